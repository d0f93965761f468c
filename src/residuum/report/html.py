"""Write each report as one HTML file that needs no network and is readable without a script.

The style sheet and the script are part of the page. The content security policy admits style sheet and script
by hash and forbids everything else. So a mistake in escaping cannot load or run foreign code. Names from
files are text: the template engine escapes markup, and this module makes control characters, direction marks
and characters without width visible. A dash means "not known". A card shows the difference of a
reconstruction and a sample. First the scale and the offset of the reconstruction are fitted to the sample,
because the metric that decides the verdict (NCC) ignores both.

The numbers of recovered samples on a page are taken from the verdict and the result of the audit. This module
does not compute them again.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import textwrap
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
from residuum.notebook import escape_invisible
from residuum.records.inputs import add_mean
from residuum.report import charts, drawing
from residuum.report.drawing import Array
from residuum.report.forest import summarize_columns
from residuum.report.glossary import GLOSSARY, compile_pattern, find_entry
from residuum.report.members import named_samples
from residuum.similarity import cosine, ncc
from residuum.theory.kkt import EXACT_KKT, NEAR_KKT

if TYPE_CHECKING:
    from jinja2 import Environment

    from residuum.auditing.comparing import Comparison
    from residuum.auditing.result import AuditResult, Evidence
    from residuum.records import Reconstruction, Selection

HERE = Path(__file__).parent
# Name of the icon and style for each answer to a question of the report.
SYMBOLS = {"yes": "leak", "no": "no-leak-found", "unknown": "inconclusive"}
MAX_LENGTH = 600  # characters of a name or sentence from a file; the rest is cut off
MARKDOWN_CHARACTERS = re.compile(r"([\\`*_{}\[\]()#+!|~])")  # characters with a meaning in Markdown
MAX_COLUMNS = 12  # columns of a table row that a card shows, the most unusual first
# A value of a table counts as reconstructed if its error is at most this share of the spread of its column.
TOLERANCE = 0.1
MAX_CELLS = 20  # largest number of inferred values in the table of missing values
MAX_BEST = 3  # number of best matches on the first screen of a report
MAX_CARDS = 120  # largest number of cards (samples with their reconstructions) on a page
MAX_CANDIDATES = 60  # largest number of cards if an audit has no training data
MAX_CARD_SENTENCE = 24  # largest number of words of a sentence in a model card
# Largest number of characters of the subject and of the headline of a model card.
MAX_CARD_SUBJECT, MAX_CARD_HEADLINE = 80, 160
CARD_CAVEAT = "This is evidence about the tests that ran. It is no guarantee of privacy."
# Largest size of all pictures in a page. Pages must stay small, because they are mailed and opened on phones.
MAX_BYTES = 2_000_000
MAX_NUMBER = 1e300  # replaces infinity, which JSON does not have
STATUS = {  # status of a KKT certificate in words
    "kkt": f"Clarke residual at most {EXACT_KKT:g}: a KKT point up to rounding",
    "near_kkt": f"Clarke residual at most {NEAR_KKT:g}: near a KKT point",
    "far_from_kkt": f"Clarke residual above {NEAR_KKT:g}: far from a KKT point, which the KKT attack "
    "assumes; the verdict does not rest on it",
    "not_separated": "at least one sample is on the wrong side of its margin: not a KKT point",
}
# Results of a uniqueness certificate in words: whether all other training sets with the same activation
# patterns keep the energy (squared norm) of a reconstruction. The result is "" without a certificate.
DETERMINED, PARTLY_DETERMINED, UNDETERMINED = (
    "others keep it",
    "others keep a part",
    "others may lose it",
)
# A candidate without a certificate gets the certificate of the nearest certified candidate if their cosine is
# at least this value.
MIN_COSINE = 0.9
# An image is determined if all other training sets provably keep at least the share MIN_DETERMINED of its
# energy (squared norm). It is partly determined if the training set that was found to keep least of its
# energy keeps at least the share MIN_PARTLY.
MIN_DETERMINED, MIN_PARTLY = 0.9, 0.5
SORT_NAMES = {
    "margin": "margin",
    "confidence": "confidence",
    "determined_at_least": "energy that others keep",
    "radius_most": "distance at most",
}


def render_page(
    template: str, *, styles: tuple[str, ...] = ("report.css",), script: str = "", **values: Any
) -> str:
    """Render a template as an HTML page that can load only its own style sheets and script.

    Args:
        template: Name of the template.
        styles: Names of the style sheets.
        script: Name of the script, "" for none.
        **values: Variables of the template.

    Returns:
        The page.
    """
    style = Markup("\n").join(_read_inline(name) for name in styles)
    script_code = _read_inline(script) if script else Markup("")
    values = {"blur": False, "redact": False, "created": ""} | values
    page_template = _environment().get_template(template)
    return page_template.render(
        style=style, script=script_code, policy=_make_policy(style, script_code), **values
    )


def render(result: AuditResult, *, blur: bool = False, redact: bool = False) -> str:
    """Return the report of an audit as one HTML file that needs no network.

    Args:
        result: The result of the audit.
        blur: Blur images until the reader asks for them.
        redact: Leave out all images and everything from which an image could be made.

    Returns:
        The page.
    """
    deciding_score = result.control
    items = items_of(result)
    if redact:
        items = tuple(
            replace(item, row=None, embedding=None, reconstruction=None) for item in items
        )
    best_cards = [] if redact else cards_of(items[:MAX_BEST], result.shape)
    # If there is a chance level, show only samples whose match is better than chance.
    if deciding_score is not None:
        items = tuple(item for item in items if item.recovered)
    cards = cards_of(items, result.shape, redact=redact)
    item_count = (
        len(items) if deciding_score else result.scores.n if result.scores else len(result.ranked)
    )
    items_on_cards = [card.item for card in cards]
    evidence_and_metric = (
        ()
        if deciding_score is None or result.evidence is None
        else (result.evidence, deciding_score)
    )
    slider_table = charts.threshold_table(*evidence_and_metric) if evidence_and_metric else None
    labels = sorted({item.label for item in items_on_cards} - {""})
    certificates = sorted({item.certificate for item in items_on_cards} - {""})
    residual_charts = [charts.residual_chart(r) for r in result.reconstructions if r.loss.shape[1]]
    restarts_format = "{0.attack}: {0.restarts} restarts of {0.steps} steps, seed {0.seed}"
    restarts_text = ", ".join(map(restarts_format.format, result.batches))
    metrics = () if result.scores is None else result.scores.metrics.values()
    lower_is_better_keys = [f"scores:{row.name}" for row in metrics if not row.higher_is_better]
    return render_page(
        "template.html",
        script="report.js",
        page=result,
        columns=[]
        if result.table is None
        else summarize_columns(result.table, _column_names(result)),
        verdict=result.verdict,
        screen=result.screen,
        best=best_cards,
        answers={answer.key: answer for answer in result.verdict.answers},
        named=named_samples(result, redact=redact),
        shown_cells=() if result.attributes is None else result.attributes.disclosed[:MAX_CELLS],
        sentence=_without_answers(result),
        membership_chart=_membership_chart(result),
        other_recovered=_recovered_by_other_attacks(result),
        link=Linked(),
        glossary=[(word, make_anchor(word), text) for word, text in GLOSSARY.items()],
        cards=cards,
        subject=result.subject,
        created=_format_time(result),
        blur=blur and not redact,
        redact=redact,
        threshold=slider_table,
        histogram=charts.draw_histogram(*evidence_and_metric) if evidence_and_metric else None,
        scatter=charts.draw_scatter(*evidence_and_metric) if evidence_and_metric else None,
        residuals=[chart for chart in residual_charts if chart],
        labels=labels,
        certificates=certificates,
        sorts=_sort_keys(items_on_cards),
        left_out=item_count - len(cards),
        total=item_count,
        matched=any(item.matched for item in items_on_cards),
        picture_count=max((len(card.pictures) for card in cards), default=0),
        tables=_tables(
            {
                "Settings": {**result.settings, "batches": restarts_text},
                "Environment": result.environment,
                "SHA-256": result.hashes,
            }
        ),
        data={
            "threshold": slider_table,
            "cards": [make_sort_values(item) for item in items_on_cards],
            "labels": labels,
            "certificates": certificates,
            "ascending": ["number", "margin", *lower_is_better_keys],
        },
    )


def _column_names(result: AuditResult) -> tuple[str, ...]:
    """Return the names of the columns in the samples, () if they have none."""
    return () if result.evidence is None else result.evidence.features


def _without_answers(result: AuditResult) -> str:
    """Return the summary sentence of a report without the texts that the answers below it repeat."""
    sentence = result.screen.sentence
    for answer in result.verdict.answers:
        for text in (answer.power, answer.evidence.partition(" By their losses")[0]):
            sentence = sentence.replace(text, "") if text else sentence
    return " ".join(sentence.split())


def _membership_chart(result: AuditResult) -> charts.Chart | None:
    return None if result.membership is None else charts.membership_chart(result.membership)


def _recovered_by_other_attacks(result: AuditResult) -> tuple[int, ...]:
    """Return the rows of samples that are recovered only by attacks whose scores are not in the report."""
    if result.findings is None or result.scores is None:
        return ()
    recovered_in_report = {row.index for row in result.scores.per_sample if row.recovered}
    return tuple(row for row in result.findings.samples if row not in recovered_in_report)


def is_reconstructed(result: AuditResult) -> bool:
    """Return whether attacks reconstructed more training samples than expected by chance."""
    return result.findings is not None and bool(result.findings.survivors)


def render_sweep(
    *,
    coordinates: Sequence[charts.Coordinate] = (),
    items: Sequence[Item] = (),
    shape: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    **texts: Any,
) -> str:
    """Return the report of a sweep over settings: parallel coordinates, best trials, consensus.

    Args:
        coordinates: The settings, with one value per complete trial, best trial first.
        items: The candidates on which several runs agree.
        shape: Shape of a sample.
        settings: Settings of the sweep.
        environment: Versions of the software.
        **texts: Texts for the other variables of the template.

    Returns:
        The page.
    """
    variable_names = (
        "tiles",
        "columns",
        "rows",
        "choice",
        "scores",
        "knowledge",
        "failures",
        "notes",
    )
    empty_variables = dict.fromkeys(variable_names, ())
    return render_page(
        "sweep.html",
        styles=("report.css", "sweep.css"),
        parallel=charts.draw_parallel_coordinates(coordinates),
        trials=len(coordinates[0].values) if coordinates else 0,
        size=(charts.WIDE, charts.TALL),
        cards=cards_of(items, shape, "consensus"),
        tables=_tables({"Settings": settings or {}, "Environment": environment or {}}),
        **empty_variables | {"total": len(items)} | texts,
    )


def render_comparison(
    comparison: Comparison,
    results: tuple[AuditResult, AuditResult],
    *,
    blur: bool = False,
    redact: bool = False,
) -> str:
    """Return a page with the figures and the best matches of two audits.

    Args:
        comparison: What changed between the two audits.
        results: The audit before and the audit after.
        blur: Blur images until the reader asks for them.
        redact: Leave out all images.

    Returns:
        One HTML file that needs no network.
    """
    titles_and_audits = ("Before", comparison.before), ("After", comparison.after)
    titles_names_and_cards = [
        (title, name, [] if redact else cards_of(items_of(result)[:MAX_BEST], result.shape))
        for (title, name), result in zip(titles_and_audits, results, strict=True)
    ]
    return render_page(
        "comparison.html",
        subject=f"{comparison.before}, {comparison.after}",
        comparison=comparison,
        sides=titles_names_and_cards,
        blur=blur and not redact,
        redact=redact,
    )


def inline(result: AuditResult) -> str:
    """Return a summary of an audit for notebooks: the headline and the three answers, without images."""
    # Notebooks are shared and committed, so their output must not hold training data.
    item_count = len(items_of(result))
    return render_page(
        "inline.html", subject=result.subject, verdict=result.verdict, count=item_count
    )


def model_card(result: AuditResult) -> str:
    """Return a section for a model card: the three questions with their answers, at most 150 words.

    Args:
        result: The result of the audit.

    Returns:
        The section in Markdown.
    """
    answers = [
        (answer.question, answer.answer.capitalize(), _first_sentence(answer.evidence))
        for answer in result.verdict.answers
    ]
    subject = textwrap.shorten(escape_invisible(result.subject), MAX_CARD_SUBJECT, placeholder="…")
    headline = textwrap.shorten(result.verdict.headline, MAX_CARD_HEADLINE, placeholder="…")
    text = render_page(
        "model_card.md",
        subject=subject,
        headline=headline,
        caveat=CARD_CAVEAT,
        answers=answers,
        created=_format_time(result),
    )
    return text.rstrip() + "\n"


def _first_sentence(text: str) -> str:
    """Return the first sentence of a text, "" if it is too long for a model card."""
    sentence = re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]
    return sentence if len(sentence.split()) <= MAX_CARD_SENTENCE else ""


def _format_time(result: AuditResult) -> str:
    return f"{result.created[:16].replace('T', ' ')} UTC"


def _tables(tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, dict[str, str]]]:
    """Return identifier, title and rows of each table that is not empty.

    Nested settings become rows with names that are joined by dots, such as "attack.steps".
    """
    identifier_by_title = {"SHA-256": "hashes"}
    return [
        (identifier_by_title.get(title, title.lower()), title, _flatten(rows))
        for title, rows in tables.items()
        if rows
    ]


def _flatten(rows: Mapping[str, Any], head: str = "") -> dict[str, str]:
    """Return nested settings as one level of texts, with names that are joined by dots."""
    flat: dict[str, str] = {}
    for name, value in rows.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{head}{name}.")
        elif isinstance(value, tuple | list):
            flat[f"{head}{name}"] = ", ".join(map(str, value))
        else:
            flat[f"{head}{name}"] = "–" if value is None else str(value)
    return flat


def _make_policy(style: str, script: str) -> str:
    """Return a content security policy that admits only this style, this script and embedded images."""
    return (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read_inline(name: str) -> Markup:
    """Return a style sheet or script of this package, to insert it unchanged into the page."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=lambda name: name != "model_card.md",
        finalize=_escape_string,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "name": isolate,
        "number": format_number,
        "fixed": format_fixed,
        "p": format_p_value,
    }
    environment.filters["markdown"] = escape_markdown
    environment.globals |= {"STATUS": STATUS, "CAVEAT": CARD_CAVEAT, "SYMBOLS": SYMBOLS}
    environment.globals |= {"WIDTH": charts.WIDTH, "HEIGHT": charts.HEIGHT}
    return environment


def isolate(value: object) -> Markup:
    """Return a value as text of limited length, isolated from the writing direction around it."""
    text = str(value)
    if len(text) > MAX_LENGTH:
        text = f"{text[:MAX_LENGTH]}… ({len(text)} characters)"
    return Markup("<bdi>") + escape(escape_invisible(text)) + Markup("</bdi>")


class Linked:
    """A filter that links the first occurrence of each glossary word on a page to its entry."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, text: str) -> Markup:
        """Return the text with links to the glossary, escaped and isolated like all text on a page."""
        pieces, end_of_last_link = [], 0
        text = escape_invisible(text[:MAX_LENGTH])
        for match in compile_pattern().finditer(text):
            word = find_entry(match[0])
            if word not in self.seen:
                self.seen.add(word)
                link_template = Markup('<a class="term" href="#{}">{}</a>')
                pieces += [
                    escape(text[end_of_last_link : match.start()]),
                    link_template.format(make_anchor(word), match[0]),
                ]
                end_of_last_link = match.end()
        return Markup("<bdi>{}</bdi>").format(
            Markup("").join([*pieces, escape(text[end_of_last_link:])])
        )


def make_anchor(word: str) -> str:
    """Return the identifier of a glossary entry on the page."""
    return f"word-{word.lower().replace(' ', '-')}"


def escape_markdown(value: object) -> str:
    """Return a value as one line of plain text in Markdown, with special characters escaped."""
    line = MARKDOWN_CHARACTERS.sub(r"\\\1", " ".join(str(value).split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _escape_string(value: object) -> object:
    """Make invisible characters in a value of the template visible."""
    return (
        escape_invisible(value)
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


def format_number(value: float | int | None) -> str:
    """Return a number with three significant digits, an integer with all digits, a dash for None."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    return f"{value}" if isinstance(value, int) else f"{value:.3g}"


def format_fixed(value: float | None) -> str:
    """Return a number for a table: with three decimals, or in scientific notation if it is tiny or huge."""
    if value is None or np.isnan(value):
        return "–"
    if np.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def format_p_value(value: float | None) -> str:
    """Return a p-value for a table, without the letter p."""
    return (
        format_number(value)
        if value is None
        else format_p(value).removeprefix("p ").removeprefix("= ")
    )


class Column(NamedTuple):
    """One value of a table row in three versions: reconstructed, true, and in the nearest held-out row."""

    name: str
    unit: str
    reconstructed: str
    training: str
    held_out: str
    within: bool


class TableRow(NamedTuple):
    """The columns of a training row, the most unusual columns first.

    A column is unusual if its value in the row differs much from the median of the column.

    Attributes:
        columns: The columns that a card shows.
        total: Number of all columns.
        within: Number of all columns with an error of the reconstruction of at most ``TOLERANCE`` times the
            spread of the column.
        held_out_within: The same number for the nearest held-out row in place of the reconstruction, None
            without held-out rows.
    """

    columns: tuple[Column, ...]
    total: int
    within: int
    held_out_within: int | None


class EmbeddingRow(NamedTuple):
    """The cosines of a reconstructed embedding, and the texts of the embeddings that it is compared with.

    Attributes:
        cosine: Cosine of the reconstruction and the training sample.
        holdout_cosine: Largest cosine of the reconstruction and a held-out sample, None without them.
        chance: The 99th percentile of the largest cosines of held-out samples, None without them.
        text: Text of the training sample, "" if it is unknown.
        holdout_text: Text of the nearest held-out sample, "" if it is unknown.
    """

    cosine: float
    holdout_cosine: float | None
    chance: float | None
    text: str
    holdout_text: str


@dataclass(frozen=True)
class Item:
    """The content of a card in the gallery. No field holds markup.

    If the audit had training data, an item is a training sample and its match. Otherwise an item is a
    candidate.

    Attributes:
        number: Row of the training sample in the user's file, counted from 0, or rank of the candidate.
        reconstruction: The reconstruction in the shape of a sample, with the mean added if it is known.
        nearest: The training sample in the same shape, None for a candidate.
        label: The label of the sample or candidate.
        attack: The attack that made the reconstruction.
        scores: Score of the match by metric.
        recovered: Whether the match is closer than chance, None without a chance level.
        margin: Margin of the training sample: label (-1 or +1) times output for two classes. For more
            classes, the output of the sample's class minus the largest other output.
        output: Output of the network at the training sample.
        confidence: How far restarts agree on the reconstruction, from 0 to 1.
        support: Number of restarts that contain the reconstruction.
        restarts: Number of all restarts.
        multiplier: Multiplier of the sample in the KKT equation.
        determined_energy: Share of the reconstruction's energy that another training set keeps in an example.
        determined_at_least: Share of the energy that all other training sets keep, as proved.
        radius_most: Proved upper bound on the distance to the samples of other training sets.
        certificate: ``DETERMINED``, ``PARTLY_DETERMINED``, ``UNDETERMINED``, or "" without a certificate.
        ambiguity: Share of the value range that each value may take in other training sets.
        record_id: The user's own identifier of the sample, "" if the data has no ID column.
        notes: Other remarks for the reader, one line each.
        row: The columns of a table row, None for images.
        embedding: The cosines of an embedding, None for other samples. It replaces ``row`` on a card.
    """

    number: int
    reconstruction: Array | None
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
    embedding: EmbeddingRow | None = None

    @property
    def matched(self) -> bool:
        """Whether the item was compared with the training data. This does not depend on redaction."""
        return self.nearest is not None or any(v is not None for v in self.scores.values())


class Picture(NamedTuple):
    """A picture on a card: an image as ``uri``, or ``values`` as text. ``alt`` describes it."""

    caption: str
    alt: str
    uri: str = ""
    values: tuple[str, ...] = ()


class Card(NamedTuple):
    """A card of the gallery: an item with its title and its pictures."""

    item: Item
    title: str
    pictures: tuple[Picture, ...]


def items_of(result: AuditResult) -> tuple[Item, ...]:
    """Return a report item for each matched training sample, or for each candidate without training data.

    The best items come first.
    """
    # Matches come from the strongest attack. If only another attack recovers a sample, its match comes from
    # this other attack.
    if result.evidence is None:
        return tuple(_ranked(result))
    items_of_other_attacks = {item.number: item for item in _matched_by_others(result)}
    items = [item for item in _matched(result) if item.number not in items_of_other_attacks]
    recovered = [item for item in items if item.recovered]
    return (
        *recovered,
        *items_of_other_attacks.values(),
        *(item for item in items if not item.recovered),
    )


def cards_of(
    items: Sequence[Item], shape: tuple[int, ...], kind: str = "", redact: bool = False
) -> list[Card]:
    """Return cards of the first items, within the limits ``MAX_CARDS`` and ``MAX_BYTES``.

    Args:
        items: The items.
        shape: Shape of a sample.
        kind: What a title calls an item, by default "sample" or "candidate".
        redact: Leave out pictures and identifiers.

    Returns:
        The cards.
    """
    cards: list[Card] = []
    remaining_bytes = MAX_BYTES
    for item in items[:MAX_CARDS]:
        title = f"{kind or ('sample' if item.matched else 'candidate')} {item.number}"
        # An identifier may be personal data, so a redacted report has no identifiers.
        if item.record_id and not redact:
            title += f" (ID {item.record_id})"
        pictures = () if redact else make_pictures(item, shape, title)
        remaining_bytes -= sum(len(picture.uri) for picture in pictures)
        if remaining_bytes < 0 and cards:
            break
        cards.append(Card(item, title, pictures))
    return cards


def make_sort_values(item: Item) -> dict[str, Any]:
    """Return the values by which the script sorts and filters a card. NaN becomes null."""
    return {
        "number": item.number,
        "label": item.label,
        "certificate": item.certificate,
        "recovered": item.recovered,
        "scores": {name: _finite(value) for name, value in item.scores.items()},
        **{name: _finite(getattr(item, name)) for name in SORT_NAMES},
    }


def _sort_keys(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Return key and name of each order in which a reader can sort the cards, the default order first."""
    metric_names = dict.fromkeys(name for item in items for name in item.scores)
    available_keys = {key for key in SORT_NAMES for item in items if getattr(item, key) is not None}
    return [
        ("order", "best first"),
        *((f"scores:{name}", name) for name in metric_names),
        *((key, name) for key, name in SORT_NAMES.items() if key in available_keys),
        ("number", "number"),
    ]


def _matched(result: AuditResult) -> Iterator[Item]:
    """Yield a report item for each training sample that the displayed attack matches, best match first."""
    evidence, scores = result.evidence, result.scores
    assert evidence is not None
    assert scores is not None
    displayed_reconstructions = [
        r for r in result.reconstructions if r.attack == result.displayed_attack
    ]
    pool = join_pools(
        [all_candidates(r) for r in displayed_reconstructions or result.reconstructions]
    )
    outputs = evidence.outputs if evidence.output_name == "network output" else None
    # If the attacks do not recover more samples than expected by chance, no single match is called recovered.
    has_finding = is_reconstructed(result)
    # ``result.shape`` is the shape for display. The network may receive images as flat vectors.
    is_table = len(result.shape) == 1
    matched_rows = [
        (position, index, scores.per_sample[index], candidate)
        for position, index in enumerate(evidence.index.tolist())
        if (candidate := scores.per_sample[index].matches[scores.deciding].candidate) is not None
    ]
    candidates = pool.x[[candidate for *_, candidate in matched_rows]].double()
    selection_facts, certificates = (
        _describe_nearest_selected(result, candidates),
        _certificates(result, candidates),
    )
    for (position, index, row, candidate), selection_fact, certificate in zip(
        matched_rows, selection_facts, certificates, strict=True
    ):
        yield Item(
            number=row.index,
            record_id=row.id,
            reconstruction=add_mean(pool.x[candidate].double(), evidence.mean).numpy(),
            nearest=add_mean(evidence.x[position].double(), evidence.mean).numpy(),
            label=evidence.labels[index],
            scores={name: match.score for name, match in row.matches.items()},
            recovered=None if row.recovered and not has_finding else row.recovered,
            margin=row.margin,
            output=None if outputs is None else float(outputs[index]),
            multiplier=row.multiplier,
            row=_table_row(evidence, position, pool.x[candidate].double()) if is_table else None,
            embedding=_embedding_row(evidence, position),
            **selection_fact,
            **certificate,
        )


def _matched_by_others(result: AuditResult) -> Iterator[Item]:
    """Yield a report item for each sample that is recovered only by attacks without scores in the report."""
    evidence, scores, findings = result.evidence, result.scores, result.findings
    recovered_rows = _recovered_by_other_attacks(result)
    if not recovered_rows or evidence is None or scores is None or findings is None:
        return
    reconstructions = [r for r in result.reconstructions if r.attack in findings.survivors]
    reconstructions = [
        r for r in reconstructions if r.attack != result.displayed_attack and len(r.x)
    ]
    for position, index in enumerate(evidence.index.tolist()):
        row_number = scores.per_sample[index].index
        sample = evidence.x[position].double()
        reconstructions_of_same_size = [
            r for r in reconstructions if r.x[0].numel() == sample.numel()
        ]
        if row_number not in recovered_rows or not reconstructions_of_same_size:
            continue
        score, attack, x = max(
            (_nearest(reconstruction, sample) for reconstruction in reconstructions_of_same_size),
            key=lambda m: m[0],
        )
        yield Item(
            number=row_number,
            record_id=scores.per_sample[index].id,
            reconstruction=add_mean(x, evidence.mean).numpy(),
            nearest=add_mean(sample, evidence.mean).numpy(),
            label=evidence.labels[index],
            attack=attack,
            scores={scores.deciding: score},
            recovered=True,
            margin=scores.per_sample[index].margin,
            row=_table_row(evidence, position, x) if len(result.shape) == 1 else None,
            embedding=_embedding_row(evidence, position, x),
        )


def _nearest(reconstruction: Reconstruction, sample: Tensor) -> tuple[float, str, Tensor]:
    """Return the NCC, the attack and the values of the candidate that is nearest to a sample."""
    candidates = reconstruction.x.double().flatten(1)
    candidates = candidates[candidates.isfinite().all(1)]
    if not len(candidates):
        return -1.0, reconstruction.attack, sample * 0
    largest_ncc_and_index = ncc(sample.reshape(1, -1), candidates)[0].max(0)
    candidate = candidates[int(largest_ncc_and_index.indices)].reshape(sample.shape)
    return float(largest_ncc_and_index.values), reconstruction.attack, candidate


def _table_row(evidence: Evidence, position: int, reconstruction: Tensor) -> TableRow | None:
    """Return the columns of a training sample that is a table row or an embedding, or None for an image.

    Args:
        evidence: The training samples, their nearest held-out samples, and names and units of the columns.
        position: Position of the sample in ``evidence.x``.
        reconstruction: The candidate that matches the sample.

    Returns:
        The columns with the values of the reconstruction, the sample and the nearest held-out sample.
    """
    sample_shape = evidence.x.shape[1:]
    if evidence.spread is None or len(sample_shape) != 1 or not sample_shape[0]:
        return None
    row_versions = [reconstruction.reshape(sample_shape), evidence.x[position].double()]
    row_versions += (
        [] if evidence.nearest_holdout is None else [evidence.nearest_holdout[position].double()]
    )
    tolerances = TOLERANCE * evidence.spread.clamp_min(1e-12)
    within_tolerance_masks = [((row - row_versions[1]).abs() <= tolerances) for row in row_versions]
    medians = evidence.x.double().median(0).values
    columns_by_difference = (
        (row_versions[1] - medians).abs() / evidence.spread.clamp_min(1e-12)
    ).argsort(descending=True)
    column_names = evidence.features or tuple(f"column {i}" for i in range(sample_shape[0]))
    units = evidence.units or ("",) * sample_shape[0]
    displayed_versions = [add_mean(row, evidence.mean) for row in row_versions]
    if evidence.scale is not None:
        displayed_versions = [
            row * evidence.scale.double().reshape(-1) for row in displayed_versions
        ]
    if evidence.offset is not None:
        displayed_versions = [
            row + evidence.offset.double().reshape(-1) for row in displayed_versions
        ]
    columns = []
    for i in columns_by_difference[:MAX_COLUMNS].tolist():
        reconstructed, training, held_out = [
            *(_format_cell(float(row[i])) for row in displayed_versions),
            "–",
        ][:3]
        columns.append(
            Column(
                column_names[i],
                units[i],
                reconstructed,
                training,
                held_out,
                bool(within_tolerance_masks[0][i]),
            )
        )
    held_out_within = int(within_tolerance_masks[2].sum()) if len(row_versions) > 2 else None
    return TableRow(
        tuple(columns), sample_shape[0], int(within_tolerance_masks[0].sum()), held_out_within
    )


def _embedding_row(
    evidence: Evidence, position: int, reconstruction: Tensor | None = None
) -> EmbeddingRow | None:
    """Return the cosines of a training sample that is an embedding, or None for other samples.

    Args:
        evidence: The training samples, with the cosines of the strongest attack.
        position: Position of the sample in ``evidence.x``.
        reconstruction: A candidate of another attack, None for the match of the strongest attack.

    Returns:
        The cosines and the texts.
    """
    matches = evidence.embeddings
    if matches is None:
        return None
    reconstruction_cosine = float(matches.cosine[position])
    holdout_value = _finite(float(matches.holdout_cosine[position]))
    text = matches.texts[position] if matches.texts else ""
    holdout_text = matches.holdout_texts[position] if matches.holdout_texts else ""
    if reconstruction is not None:
        flat_reconstruction = reconstruction.reshape(1, -1).double()
        reconstruction_cosine = float(
            cosine(flat_reconstruction, evidence.x[position].reshape(1, -1).double())
        )
        holdout_value, holdout_text = None, ""
    return EmbeddingRow(reconstruction_cosine, holdout_value, matches.chance, text, holdout_text)


def _format_cell(value: float) -> str:
    """Return a number with three significant digits and all digits before the point."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _ranked(result: AuditResult) -> Iterator[Item]:
    """Yield a report item for each selected candidate (likely training sample), highest confidence first."""
    ranked_items = [
        Item(
            number=number,
            reconstruction=add_mean(selection.x[i].double(), reconstruction.knowledge.mean).numpy(),
            label=f"{float(selection.labels[i]):g}",
            **_describe_choice(reconstruction, selection, i),
            multiplier=float(selection.lam[i]),
            **_certificates(result, selection.x[i : i + 1])[0],
        )
        for number, (reconstruction, selection, i) in enumerate(result.ranked[:MAX_CANDIDATES])
    ]
    yield from sorted(ranked_items, key=lambda item: -(item.confidence or 0.0))


def _describe_nearest_selected(result: AuditResult, x: Tensor) -> list[dict[str, Any]]:
    """Return a description of the most similar selected candidate for each candidate in ``x``.

    Selected candidates are those that an attack considers likely training samples, without seeing the data.
    Each description is a dict with the attack, the confidence and the number of restarts. It is empty if no
    candidate was selected.
    """
    ranked_candidates = result.ranked
    if not ranked_candidates or not len(x):
        return [{}] * len(x)
    selected_candidates = torch.stack(
        [selection.x[i].double() for _, selection, i in ranked_candidates]
    )
    return [
        _describe_choice(*ranked_candidates[k])
        for k in cosine(x, selected_candidates).argmax(1).tolist()
    ]


def _describe_choice(
    reconstruction: Reconstruction, selection: Selection, i: int
) -> dict[str, Any]:
    """Return the attack that selected a candidate, its confidence, and how many restarts found it."""
    return {
        "attack": reconstruction.attack,
        "restarts": reconstruction.restarts,
        "confidence": selection.confidence_of(i),
        "support": int(selection.support[i]),
    }


def _certificates(result: AuditResult, x: Tensor) -> list[dict[str, Any]]:
    """Return a uniqueness certificate for each candidate in ``x``, as a dict of fields of :class:`Item`.

    Only some candidates of the first attack have certificates. So each candidate gets the certificate of the
    certified candidate with the largest cosine. If this cosine is below ``MIN_COSINE``, the dict is empty.
    """
    uniqueness = result.uniqueness
    if uniqueness is None or not len(uniqueness) or not len(x):
        return [{}] * len(x)
    similarity, nearest = cosine(
        x.double(), result.reconstructions[0].x[uniqueness.index].double()
    ).max(1)
    low, high = result.knowledge.value_range or (0.0, 1.0)

    def describe(i: int) -> dict[str, Any]:
        energy, proved = (
            float(uniqueness.determined_energy[i]),
            float(uniqueness.determined_at_least[i]),
        )
        radius = float(uniqueness.radius_most[i])
        range_width = (uniqueness.high[i] - uniqueness.low[i]).double()
        certificate_text = PARTLY_DETERMINED if energy >= MIN_PARTLY else UNDETERMINED
        return {
            "determined_energy": energy,
            "determined_at_least": proved,
            "radius_most": radius if math.isfinite(radius) else None,
            "certificate": DETERMINED if proved >= MIN_DETERMINED else certificate_text,
            "ambiguity": (range_width / (high - low)).clamp(0, 1).numpy(),
        }

    nearest_pairs = zip(similarity.tolist(), nearest.tolist(), strict=True)
    return [describe(i) if value >= MIN_COSINE else {} for value, i in nearest_pairs]


def _finite(value: float | None) -> float | None:
    """Replace infinity by a large number and NaN by None, because JSON has neither."""
    if value is None or math.isnan(value):
        return None
    return max(-MAX_NUMBER, min(MAX_NUMBER, float(value)))


def make_pictures(item: Item, shape: tuple[int, ...], what: str) -> tuple[Picture, ...]:
    """Return the pictures on a card: the reconstruction, the training sample and their difference.

    If a uniqueness certificate was computed, another picture shows how far other training sets can change
    each pixel.

    Args:
        item: The item of a card.
        shape: Shape of a sample.
        what: Name of the item for the alternative texts of the pictures.

    Returns:
        A picture of each kind that the item has values for. A row of a table has no pictures.
    """
    if item.reconstruction is None or item.row is not None:
        return ()
    reconstructed_image = _shaped(item.reconstruction, shape)
    pictures = [
        Picture("found", f"Reconstruction, {what}", *drawing.draw_sample(reconstructed_image))
    ]
    if item.nearest is not None:
        training_image = _shaped(item.nearest, shape)
        pictures += [
            Picture("training", f"Training sample of {what}", *drawing.draw_sample(training_image)),
            Picture(
                "difference",
                f"Difference, {what}",
                *drawing.draw_difference(reconstructed_image, training_image),
            ),
        ]
    if item.ambiguity is not None:
        free_share = np.clip(_shaped(item.ambiguity, shape), 0, 1)
        alternative_text = f"Pixels that other training sets may change, {what}"
        pictures.append(Picture("left free", alternative_text, *drawing.draw_freedom(free_share)))
    return tuple(pictures)


def _shaped(values: Array, shape: tuple[int, ...]) -> Array:
    """Return a flat array in the shape of a sample, with NaN and infinity replaced by zero."""
    finite_values = np.nan_to_num(np.asarray(values, dtype=float), posinf=0.0, neginf=0.0)
    return (
        finite_values.reshape(shape)
        if shape and finite_values.size == np.prod(shape)
        else finite_values
    )
