"""Reports as one HTML file each: no network, no markup from names, readable without a script.

Style sheet and script are written into the page and admitted by their hash. The policy forbids everything
else, so a mistake in escaping loads and runs nothing. Names from files are text: the template engine escapes
markup, and this module makes control characters, direction marks and characters without width visible. A dash
stands for "not known". On a card the difference is taken after scale and offset of the reconstruction are
fitted to the sample, because the deciding metric (NCC) ignores both.

All counts of an audit come from the answers of its verdict and from the record. This module computes none.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup, escape
from torch import Tensor

from residuum.evaluation.null import format_p
from residuum.evaluation.scoring import all_candidates, join_pools
from residuum.records.inputs import with_mean
from residuum.report import charts, drawing
from residuum.report.drawing import Array
from residuum.report.glossary import GLOSSARY, entry, pattern
from residuum.report.members import named_samples
from residuum.similarity import cosine, ncc
from residuum.theory.kkt import EXACT_KKT, NEAR_KKT

if TYPE_CHECKING:
    from jinja2 import Environment

    from residuum.auditing.comparing import Comparison
    from residuum.auditing.result import AuditResult, Evidence
    from residuum.records import Reconstruction, Selection

HERE = Path(__file__).parent
SYMBOLS = {"yes": "leak", "no": "no-leak-found", "unknown": "inconclusive"}  # of the answers
MAX_LENGTH = 600  # characters of a name or sentence from outside
# Cc: controls; Cf: direction marks, zero-width; Cs: halves of a pair, no UTF-8; Co, Cn: without a meaning.
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~])")  # in Markdown
MAX_COLUMNS = 12  # of a row that a card shows, those in which it stands out most; all are counted
TOLERANCE = 0.1  # of a column's spread: closer values count as recovered
BEST = 3  # matches on the first screen
MAX_CARDS = 120  # of one page
MAX_CANDIDATES = 60  # cards without data
CARD_SENTENCE = 24  # words of the evidence for an answer in a model card
CARD_SUBJECT, CARD_HEADLINE = 80, 160  # characters
CARD_CAVEAT = "This is evidence about the tests that ran. It is no guarantee of privacy."
MAX_BYTES = 2_000_000  # of pictures in one file: it is mailed, and opened on phones
BEYOND = 1e300  # stands for infinity, which JSON has not
STATUS = {  # of a KKT certificate, in words
    "kkt": f"Clarke residual at most {EXACT_KKT:g}: a KKT point up to rounding",
    "near_kkt": f"Clarke residual at most {NEAR_KKT:g}: near a KKT point",
    "far_from_kkt": f"Clarke residual above {NEAR_KKT:g}: far from a KKT point, which the KKT attack "
    "assumes; the verdict does not rest on it",
    "not_separated": "some sample is on the wrong side of its margin: not a KKT point",
}
# What every other set of the same patterns keeps of it; "" when no certificate was computed.
DETERMINED, PARTLY, FREE = "others keep it", "others keep a part", "others may lose it"
SAME = 0.9  # cosine above which a certified candidate stands for another one
# Shares of an image's energy: others keep it where the bound says so, may lose it where one does.
KEPT, LOST = 0.9, 0.5
SORTED = {
    "margin": "margin",
    "confidence": "confidence",
    "determined_at_least": "energy that others keep",
    "radius_most": "distance at most",
}


def page(
    template: str, *, styles: tuple[str, ...] = ("report.css",), script: str = "", **values: Any
) -> str:
    """A page of its own: ``template`` with its style sheets and script, and nothing else admitted."""
    style = Markup("\n").join(_inlined(name) for name in styles)
    code = _inlined(script) if script else Markup("")
    values = {"blur": False, "redact": False, "created": ""} | values
    text = _environment().get_template(template)
    return text.render(style=style, script=code, policy=_policy(style, code), **values)


def render(result: AuditResult, *, blur: bool = False, redact: bool = False) -> str:
    """The whole report, one file without requests to the network.

    blur: images are shown when asked for.
    redact: the file holds no image, and nothing to make one from.
    """
    control = result.control
    items = items_of(result)
    if redact:
        items = tuple(replace(item, row=None, found=None) for item in items)
    best = [] if redact else cards_of(items[:BEST], result.shape)
    if control is not None:  # matches that are expected by chance are no finding
        items = tuple(item for item in items if item.recovered)
    cards = cards_of(items, result.shape, redact=redact)
    total = len(items) if control else result.scores.n if result.scores else len(result.ranked)
    shown = [card.item for card in cards]
    evidence = () if control is None or result.evidence is None else (result.evidence, control)
    table = charts.threshold_table(*evidence) if evidence else None
    labels = sorted({item.label for item in shown} - {""})
    certificates = sorted({item.certificate for item in shown} - {""})
    stepped = [part for part in result.reconstructions if part.loss.shape[1]]
    curves = [charts.residual_chart(part) for part in stepped]
    batch = "{0.attack}: {0.restarts} restarts of {0.steps} steps, seed {0.seed}"
    batches = ", ".join(map(batch.format, result.batches))
    metrics = () if result.scores is None else result.scores.metrics.values()
    lowest = [f"scores:{row.name}" for row in metrics if not row.higher_is_better]
    return page(
        "template.html",
        script="report.js",
        page=result,
        verdict=result.verdict,
        screen=result.screen,
        best=best,
        answers={answer.key: answer for answer in result.verdict.answers},
        named=named_samples(result, redact=redact),
        sentence=_without_answers(result),
        membership_chart=_membership_chart(result),
        other_recovered=_recovered_by_other_attacks(result),
        link=Linked(),
        glossary=[(word, anchor(word), text) for word, text in GLOSSARY.items()],
        cards=cards,
        subject=result.subject,
        created=_clock(result),
        blur=blur and not redact,
        redact=redact,
        threshold=table,
        histogram=charts.histogram(*evidence) if evidence else None,
        scatter=charts.scatter(*evidence) if evidence else None,
        residuals=[chart for chart in curves if chart],
        labels=labels,
        certificates=certificates,
        sorts=_sort_keys(shown),
        left_out=total - len(cards),
        total=total,
        matched=any(item.matched for item in shown),
        frames=max((len(card.pictures) for card in cards), default=0),
        tables=_tables(
            {
                "Settings": {**result.settings, "batches": batches},
                "Environment": result.environment,
                "SHA-256": result.hashes,
            }
        ),
        data={
            "threshold": table,
            "cards": [keys(item) for item in shown],
            "labels": labels,
            "certificates": certificates,
            "ascending": ["number", "margin", *lowest],
        },
    )


def _without_answers(result: AuditResult) -> str:
    """Return the sentence of the first screen without what the answers below it say."""
    sentence = result.screen.sentence
    for answer in result.verdict.answers:
        for text in (answer.power, answer.evidence.partition(" By their losses")[0]):
            sentence = sentence.replace(text, "") if text else sentence
    return " ".join(sentence.split())


def _membership_chart(result: AuditResult) -> charts.Chart | None:
    return None if result.membership is None else charts.membership_chart(result.membership)


def _recovered_by_other_attacks(result: AuditResult) -> tuple[int, ...]:
    """Return the rows of samples that attacks recover whose scores the report does not show."""
    if result.findings is None or result.scores is None:
        return ()
    shown = {row.index for row in result.scores.per_sample if row.recovered}
    return tuple(row for row in result.findings.samples if row not in shown)


def is_reconstructed(result: AuditResult) -> bool:
    """Return whether attacks reconstructed more training samples than is expected by chance."""
    return result.findings is not None and bool(result.findings.survivors)


def render_sweep(
    *,
    coordinates: Sequence[charts.Coordinate] = (),
    items: Sequence[Item] = (),
    shape: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    **said: Any,
) -> str:
    """The report of a sweep: settings as parallel coordinates, best trials, consensus.

    coordinates: one value per complete trial, best trial first.
    said: what the template names, all of it text.
    """
    said_of = ("tiles", "columns", "rows", "choice", "scores", "knowledge", "failures", "notes")
    nothing = dict.fromkeys(said_of, ())
    return page(
        "sweep.html",
        styles=("report.css", "sweep.css"),
        parallel=charts.parallel(coordinates),
        trials=len(coordinates[0].values) if coordinates else 0,
        size=(charts.WIDE, charts.TALL),
        cards=cards_of(items, shape, "consensus"),
        tables=_tables({"Settings": settings or {}, "Environment": environment or {}}),
        **nothing | {"total": len(items)} | said,
    )


def render_comparison(
    found: Comparison,
    results: tuple[AuditResult, AuditResult],
    *,
    blur: bool = False,
    redact: bool = False,
) -> str:
    """Return a page with the figures of two audits and the best matches of each.

    Args:
        found: What changed.
        results: The audit before and the audit after.
        blur: Blur images until the reader asks for them.
        redact: Leave out all images.

    Returns:
        One HTML file that needs no network.
    """
    names = ("Before", found.before), ("After", found.after)
    sides = [
        (title, name, [] if redact else cards_of(items_of(one)[:BEST], one.shape))
        for (title, name), one in zip(names, results, strict=True)
    ]
    return page(
        "comparison.html",
        subject=f"{found.before}, {found.after}",
        found=found,
        sides=sides,
        blur=blur and not redact,
        redact=redact,
    )


def inline(result: AuditResult) -> str:
    """Return a short summary for notebooks: the headline and the three answers, no script and no image.

    Notebooks are shared and committed, so what they keep must not hold training data.
    """
    count = len(items_of(result))
    return page("inline.html", subject=result.subject, verdict=result.verdict, count=count)


def model_card(result: AuditResult) -> str:
    """Return a section for a model card: the three questions with their answers, at most 150 words.

    Args:
        result: The audit.

    Returns:
        Markdown.
    """
    answers = [
        (answer.question, answer.answer.capitalize(), _first_sentence(answer.evidence))
        for answer in result.verdict.answers
    ]
    subject = textwrap.shorten(visible(result.subject), CARD_SUBJECT, placeholder="…")
    headline = textwrap.shorten(result.verdict.headline, CARD_HEADLINE, placeholder="…")
    text = page(
        "model_card.md",
        subject=subject,
        headline=headline,
        caveat=CARD_CAVEAT,
        answers=answers,
        created=_clock(result),
    )
    return text.rstrip() + "\n"


def _first_sentence(text: str) -> str:
    """Return the first sentence of a text, "" if it is too long for a model card."""
    sentence = re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]
    return sentence if len(sentence.split()) <= CARD_SENTENCE else ""


def _clock(result: AuditResult) -> str:
    return f"{result.created[:16].replace('T', ' ')} UTC"


def _tables(parts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, dict[str, str]]]:
    """(identifier, title, flat rows) of all that hold something."""
    names = {"SHA-256": "hashes"}
    return [(names.get(t, t.lower()), t, _flat(rows)) for t, rows in parts.items() if rows]


def _flat(rows: Mapping[str, Any], head: str = "") -> dict[str, str]:
    """Nested settings as dotted names."""
    flat: dict[str, str] = {}
    for name, value in rows.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{head}{name}.")
        elif isinstance(value, tuple | list):
            flat[f"{head}{name}"] = ", ".join(map(str, value))
        else:
            flat[f"{head}{name}"] = "–" if value is None else str(value)
    return flat


def _policy(style: str, script: str) -> str:
    """Content security policy: nothing but these two texts and images inside the file."""
    return (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inlined(name: str) -> Markup:
    """A file of this folder, to be written between its tags as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=lambda name: name != "model_card.md",
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"name": isolated, "shown": shown, "fixed": fixed, "p": p_text}
    environment.filters["markdown"] = markdown
    environment.globals |= {"STATUS": STATUS, "CAVEAT": CARD_CAVEAT, "SYMBOLS": SYMBOLS}
    environment.globals |= {"WIDTH": charts.WIDTH, "HEIGHT": charts.HEIGHT}
    return environment


def visible(text: str) -> str:
    """The text with unseen characters written as their code point."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(f"‹U+{ord(c):04X}›" if unicodedata.category(c) in UNSEEN else c for c in text)


def isolated(value: object) -> Markup:
    """The value as text of a bounded length, whose direction of writing ends where it ends."""
    text = str(value)
    if len(text) > MAX_LENGTH:
        text = f"{text[:MAX_LENGTH]}… ({len(text)} characters)"
    return Markup("<bdi>") + escape(visible(text)) + Markup("</bdi>")


class Linked:
    """Links the first occurrence of each word of the glossary on a page to its entry."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, text: str) -> Markup:
        """Return the text with links, escaped and isolated like every text of a page."""
        parts, end = [], 0
        text = visible(text[:MAX_LENGTH])
        for match in pattern().finditer(text):
            word = entry(match[0])
            if word not in self.seen:
                self.seen.add(word)
                link = Markup('<a class="term" href="#{}">{}</a>')
                parts += [escape(text[end : match.start()]), link.format(anchor(word), match[0])]
                end = match.end()
        return Markup("<bdi>{}</bdi>").format(Markup("").join([*parts, escape(text[end:])]))


def anchor(word: str) -> str:
    """The place of a word of the glossary on the page."""
    return f"word-{word.lower().replace(' ', '-')}"


def markdown(value: object) -> str:
    """Plain text in Markdown: special characters escaped, one line."""
    line = SPECIAL.sub(r"\\\1", " ".join(str(value).split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _finalize(value: object) -> object:
    """Applied to every expression of a template: no string reaches the page with unseen characters."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def shown(value: float | int | None) -> str:
    """A number for reading: integers whole, others to three significant digits, a dash for none."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    return f"{value}" if isinstance(value, int) else f"{value:.3g}"


def fixed(value: float | None) -> str:
    """A number for columns: three decimals where that is enough, a power of ten otherwise."""
    if value is None or np.isnan(value):
        return "–"
    if np.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def p_text(value: float | None) -> str:
    """A p value for a column."""
    return shown(value) if value is None else format_p(value).removeprefix("p ").removeprefix("= ")


class Column(NamedTuple):
    """One value of a row: reconstructed, in the training row, and in the nearest held-out row."""

    name: str
    unit: str
    found: str
    training: str
    held_out: str
    within: bool


class TableRow(NamedTuple):
    """The columns of a training row, those in which it differs most from the median first.

    Attributes:
        columns: The columns.
        every: Number of all columns.
        within: Number of all columns that were reconstructed within ``TOLERANCE`` of their spread.
        beside: The same number for the nearest held-out row, None without one.
    """

    columns: tuple[Column, ...]
    every: int
    within: int
    beside: int | None


@dataclass(frozen=True)
class Item:
    """One card of the gallery: with data a training sample and its match, without data a candidate.

    number: the training sample's row in the user's file, counted from 0, or the candidate's rank.
    record_id: the user's own identifier of the sample, "" if the data has no ID column.
    found: the reconstruction and nearest: the training sample, both in sample shape, the mean added
        where known.
    scores: by metric name.
    recovered: beyond chance, None when nothing is calibrated.
    margin: y Phi(x).
    support: restarts that hold it, of ``restarts``; determined_at_least and radius_most (proved),
        determined_energy (found), certificate (``DETERMINED`` and so on) and ambiguity (sample
        shape, share of the range that a value may take): of the uniqueness certificate.
    notes: anything else, one line each.
    row: of a table, its columns.
    No field holds markup.
    """

    number: int
    found: Array | None
    nearest: Array | None = None
    label: str = ""
    attack: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    recovered: bool | None = None
    margin: float | None = None
    output: float | None = None
    confidence: float | None = None
    support: int | None = None
    restarts: int | None = None
    multiplier: float | None = None
    determined_energy: float | None = None
    determined_at_least: float | None = None
    radius_most: float | None = None
    certificate: str = ""
    ambiguity: Array | None = None
    record_id: str = ""
    notes: tuple[str, ...] = ()
    row: TableRow | None = None

    @property
    def matched(self) -> bool:
        """Whether it was compared with the data; true of redacted ones too."""
        return self.nearest is not None or any(v is not None for v in self.scores.values())


class Picture(NamedTuple):
    """One frame of a card: an image as ``uri``, or ``values`` as text; alt says what it shows."""

    caption: str
    alt: str
    uri: str = ""
    values: tuple[str, ...] = ()


class Card(NamedTuple):
    """An item, what it is called, and its pictures."""

    item: Item
    title: str
    pictures: tuple[Picture, ...]


def items_of(result: AuditResult) -> tuple[Item, ...]:
    """Return one item per training sample with a match, best first; without data one per candidate.

    The matches are those of the strongest attack. A sample that only other attacks recover has the match of
    one of them, and comes after the others.
    """
    if result.evidence is None:
        return tuple(_ranked(result))
    extra = {item.number: item for item in _matched_by_others(result)}
    items = [item for item in _matched(result) if item.number not in extra]
    recovered = [item for item in items if item.recovered]
    return (*recovered, *extra.values(), *(item for item in items if not item.recovered))


def cards_of(
    items: Sequence[Item], shape: tuple[int, ...], kind: str = "", redact: bool = False
) -> list[Card]:
    """The first items, as many as a file to be mailed has room for; kind: what one is called."""
    made: list[Card] = []
    room = MAX_BYTES
    for item in items[:MAX_CARDS]:
        title = f"{kind or ('sample' if item.matched else 'candidate')} {item.number}"
        if item.record_id and not redact:  # an identifier may itself be personal data
            title += f" (ID {item.record_id})"
        pictures = () if redact else frames(item, shape, title)
        room -= sum(len(picture.uri) for picture in pictures)
        if room < 0 and made:
            break
        made.append(Card(item, title, pictures))
    return made


def keys(item: Item) -> dict[str, Any]:
    """What the script sorts and filters by; what is no number is null."""
    return {
        "number": item.number,
        "label": item.label,
        "certificate": item.certificate,
        "recovered": item.recovered,
        "scores": {name: _finite(value) for name, value in item.scores.items()},
        **{name: _finite(getattr(item, name)) for name in SORTED},
    }


def _sort_keys(shown: Sequence[Item]) -> list[tuple[str, str]]:
    """(key, name) of every order that some card has a value for, the page's own order first."""
    metrics = dict.fromkeys(name for item in shown for name in item.scores)
    there = {key for key in SORTED for item in shown if getattr(item, key) is not None}
    known = [(key, name) for key, name in SORTED.items() if key in there]
    return [
        ("order", "best first"),
        *((f"scores:{name}", name) for name in metrics),
        *known,
        ("number", "number"),
    ]


def _matched(result: AuditResult) -> Iterator[Item]:
    """One card per training sample with a match, best first."""
    evidence, scores = result.evidence, result.scores
    assert evidence is not None
    assert scores is not None
    parts = [part for part in result.reconstructions if part.attack == result.shown]
    pool = join_pools([all_candidates(part) for part in parts or result.reconstructions])
    outputs = evidence.outputs if evidence.output_name == "network output" else None
    has_finding = is_reconstructed(result)  # otherwise no single match counts
    table = len(result.shape) == 1  # flat samples may be granted the shape of an image
    matched = [
        (place, index, scores.per_sample[index], taken)
        for place, index in enumerate(evidence.index.tolist())
        if (taken := scores.per_sample[index].matches[scores.deciding].candidate) is not None
    ]
    found = pool.x[[taken for *_, taken in matched]].double()
    known = zip(matched, _groups(result, found), _certified(result, found), strict=True)
    for (place, index, row, taken), group, certified in known:
        yield Item(
            number=row.index,
            record_id=row.id,
            found=with_mean(pool.x[taken].double(), evidence.mean).numpy(),
            nearest=with_mean(evidence.x[place].double(), evidence.mean).numpy(),
            label=evidence.labels[index],
            scores={name: match.score for name, match in row.matches.items()},
            recovered=None if row.recovered and not has_finding else row.recovered,
            margin=row.margin,
            output=None if outputs is None else float(outputs[index]),
            multiplier=row.multiplier,
            row=_table_row(evidence, place, pool.x[taken].double()) if table else None,
            **group,
            **certified,
        )


def _matched_by_others(result: AuditResult) -> Iterator[Item]:
    """Yield one item per sample that only attacks recover whose scores the report does not show."""
    evidence, scores, findings = result.evidence, result.scores, result.findings
    rows = _recovered_by_other_attacks(result)
    if not rows or evidence is None or scores is None or findings is None:
        return
    others = [r for r in result.reconstructions if r.attack in findings.survivors]
    others = [r for r in others if r.attack != result.shown and len(r.x)]
    for place, index in enumerate(evidence.index.tolist()):
        number = scores.per_sample[index].index
        sample = evidence.x[place].double()
        comparable = [r for r in others if r.x[0].numel() == sample.numel()]
        if number not in rows or not comparable:
            continue
        score, attack, x = max(
            (_nearest(reconstruction, sample) for reconstruction in comparable), key=lambda m: m[0]
        )
        yield Item(
            number=number,
            record_id=scores.per_sample[index].id,
            found=with_mean(x, evidence.mean).numpy(),
            nearest=with_mean(sample, evidence.mean).numpy(),
            label=evidence.labels[index],
            attack=attack,
            scores={scores.deciding: score},
            recovered=True,
            margin=scores.per_sample[index].margin,
            row=_table_row(evidence, place, x) if len(result.shape) == 1 else None,
        )


def _nearest(reconstruction: Reconstruction, sample: Tensor) -> tuple[float, str, Tensor]:
    """Return the NCC, the attack and the candidate that is nearest to a sample."""
    x = reconstruction.x.double().flatten(1)
    x = x[x.isfinite().all(1)]
    if not len(x):
        return -1.0, reconstruction.attack, sample * 0
    best = ncc(sample.reshape(1, -1), x)[0].max(0)
    candidate = x[int(best.indices)].reshape(sample.shape)
    return float(best.values), reconstruction.attack, candidate


def _table_row(evidence: Evidence, place: int, found: Tensor) -> TableRow | None:
    """The columns of a training row, or of an embedding; None where samples are images."""
    shape = evidence.x.shape[1:]
    if evidence.spread is None or len(shape) != 1 or not shape[0]:
        return None
    rows = [found.reshape(shape), evidence.x[place].double()]
    rows += [] if evidence.near is None else [evidence.near[place].double()]
    reach = TOLERANCE * evidence.spread.clamp_min(1e-12)
    within = [((row - rows[1]).abs() <= reach) for row in rows]
    middle = evidence.x.double().median(0).values
    order = ((rows[1] - middle).abs() / evidence.spread.clamp_min(1e-12)).argsort(descending=True)
    names = evidence.features or tuple(f"column {i}" for i in range(shape[0]))
    units = evidence.units or ("",) * shape[0]
    known = [with_mean(row, evidence.mean) for row in rows]
    if evidence.scale is not None:
        known = [row * evidence.scale.double().reshape(-1) for row in known]
    if evidence.offset is not None:
        known = [row + evidence.offset.double().reshape(-1) for row in known]
    columns = []
    for i in order[:MAX_COLUMNS].tolist():
        back, training, held = [*(_figure(float(row[i])) for row in known), "–"][:3]
        columns.append(Column(names[i], units[i], back, training, held, bool(within[0][i])))
    beside = int(within[2].sum()) if len(rows) > 2 else None
    return TableRow(tuple(columns), shape[0], int(within[0].sum()), beside)


def _figure(value: float) -> str:
    """Three digits, and all that stand before the point."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _ranked(result: AuditResult) -> Iterator[Item]:
    """One card per chosen candidate, most confident first."""
    chosen = [
        Item(
            number=number,
            found=with_mean(selection.x[i].double(), reconstruction.knowledge.mean).numpy(),
            label=f"{float(selection.labels[i]):g}",
            **_standing(reconstruction, selection, i),
            multiplier=float(selection.lam[i]),
            **_certified(result, selection.x[i : i + 1])[0],
        )
        for number, (reconstruction, selection, i) in enumerate(result.ranked[:MAX_CANDIDATES])
    ]
    yield from sorted(chosen, key=lambda item: -(item.confidence or 0.0))


def _groups(result: AuditResult, x: Tensor) -> list[dict[str, Any]]:
    """Return the standing of the group that each candidate belongs to: that of the nearest choice."""
    choices = result.ranked
    if not choices or not len(x):
        return [{}] * len(x)
    chosen = torch.stack([selection.x[i].double() for _, selection, i in choices])
    return [_standing(*choices[k]) for k in cosine(x, chosen).argmax(1).tolist()]


def _standing(reconstruction: Reconstruction, selection: Selection, i: int) -> dict[str, Any]:
    """Return which attack chose a candidate, with how much support and confidence."""
    return {
        "attack": reconstruction.attack,
        "restarts": reconstruction.restarts,
        "confidence": selection.confidence_of(i),
        "support": int(selection.support[i]),
    }


def _certified(result: AuditResult, x: Tensor) -> list[dict[str, Any]]:
    """What the uniqueness certificate says of the candidate nearest to each, where one is near."""
    unique = result.uniqueness
    if unique is None or not len(unique) or not len(x):
        return [{}] * len(x)
    near, at = cosine(x.double(), result.reconstructions[0].x[unique.index].double()).max(1)
    low, high = result.knowledge.value_range or (0.0, 1.0)

    def said(i: int) -> dict[str, Any]:
        energy, least = float(unique.determined_energy[i]), float(unique.determined_at_least[i])
        most = float(unique.radius_most[i])
        width = (unique.high[i] - unique.low[i]).double()
        return {
            "determined_energy": energy,
            "determined_at_least": least,
            "radius_most": most if math.isfinite(most) else None,
            "certificate": DETERMINED if least >= KEPT else PARTLY if energy >= LOST else FREE,
            "ambiguity": (width / (high - low)).clamp(0, 1).numpy(),
        }

    pairs = zip(near.tolist(), at.tolist(), strict=True)
    return [said(i) if value >= SAME else {} for value, i in pairs]


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; an unbounded radius still sorts as the largest."""
    if value is None or math.isnan(value):
        return None
    return max(-BEYOND, min(BEYOND, float(value)))


def frames(item: Item, shape: tuple[int, ...], what: str) -> tuple[Picture, ...]:
    """Reconstruction, training sample, difference and ambiguity, as many of them as are known."""
    if item.found is None or item.row is not None:  # a table is shown as one
        return ()
    found = _shaped(item.found, shape)
    shown = [Picture("found", f"Reconstruction, {what}", *drawing.gray_or_color(found))]
    if item.nearest is not None:
        nearest = _shaped(item.nearest, shape)
        shown += [
            Picture("training", f"Training sample of {what}", *drawing.gray_or_color(nearest)),
            Picture("difference", f"Difference, {what}", *drawing.difference(found, nearest)),
        ]
    if item.ambiguity is not None:
        free = np.clip(_shaped(item.ambiguity, shape), 0, 1)
        alt = f"What other training sets may change, {what}"
        shown.append(Picture("left free", alt, *drawing.freedom(free)))
    return tuple(shown)


def _shaped(values: Array, shape: tuple[int, ...]) -> Array:
    """Finite numbers in the shape of a sample."""
    array = np.nan_to_num(np.asarray(values, dtype=float), posinf=0.0, neginf=0.0)
    return array.reshape(shape) if shape and array.size == np.prod(shape) else array
