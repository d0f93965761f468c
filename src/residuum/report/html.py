"""Reports as one HTML file each: no network, no markup from names, readable without a script.

Style sheet and script are written into the page and admitted by their hash; the policy forbids all
else, so that even a mistake in escaping could load and run nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from residuum.report import charts, gallery
from residuum.report.page import certificate_rows, fixed, p_text, shown, verdict_figures
from residuum.report.safetext import finalize, isolated

if TYPE_CHECKING:
    from jinja2 import Environment

    from residuum.auditing.result import AuditResult

HERE = Path(__file__).parent
PROVENANCE = {
    "user": "said by the auditor",
    "train": "computed from the training set: the strongest attacker",
    "holdout": "computed from the held-out set",
}


def page(
    template: str, *, styles: tuple[str, ...] = ("report.css",), script: str = "", **values: Any
) -> str:
    """A page of its own: ``template`` with its style sheets and script, and nothing else admitted."""
    style = Markup("\n").join(_inlined(name) for name in styles)
    code = _inlined(script) if script else Markup("")
    values = {"blur": False, "redact": False, "created": ""} | values
    return (
        _environment()
        .get_template(template)
        .render(style=style, script=code, policy=_policy(style, code), **values)
    )


def render(result: AuditResult, *, blur: bool = False, redact: bool = False) -> str:
    """The whole report. blur: images are shown when asked for; redact: the file holds no image."""
    items = gallery.items(result)
    cards = gallery.cards(gallery.redacted(items) if redact else items, result.shape)
    shown, total, control = [card.item for card in cards], gallery.total(result), result.control
    evidence = () if control is None or result.evidence is None else (result.evidence, control)
    table = charts.threshold_table(*evidence) if evidence else None
    labels, certificates = (
        _distinct(getattr(item, name) for item in shown) for name in ("label", "certificate")
    )
    curves = (
        charts.residual_chart(part, result.verdict.residual_limit)
        for part in result.reconstructions
        if part.loss.shape[1]
    )
    batches = ", ".join(
        f"{b.attack}: {b.restarts} restarts of {b.steps} steps, seed {b.seed}"
        for b in result.batches
    )
    return page(
        "template.html", script="report.js", page=result, verdict=result.verdict, cards=cards,
        subject=result.subject, created=f"{result.created[:16].replace('T', ' ')} UTC",
        blur=blur and not redact, redact=redact, threshold=table,
        histogram=charts.histogram(*evidence) if evidence else None,
        scatter=charts.scatter(*evidence) if evidence else None,
        residuals=[chart for chart in curves if chart], labels=labels, certificates=certificates,
        certificate=certificate_rows(result),
        sorts=gallery.sort_keys(shown), left_out=total - len(cards), total=total,
        matched=any(item.matched for item in shown),
        frames=max((len(card.pictures) for card in cards), default=0),
        tables=_tables({
            "Settings": {**result.settings, "batches": batches},
            "Environment": result.environment, "SHA-256": result.hashes,
        }),
        data={"threshold": table, "cards": [gallery.keys(item) for item in shown],
              "labels": labels, "certificates": certificates,
              "ascending": gallery.ascending(result)},
    )  # fmt: skip


def render_sweep(
    *,
    coordinates: Sequence[charts.Coordinate] = (),
    items: Sequence[gallery.Item] = (),
    shape: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    **said: Any,
) -> str:
    """The report of a sweep: settings as parallel coordinates, best trials, consensus.

    coordinates: one value per complete trial, best trial first; said: what the template names, all
    of it text.
    """
    axes, lines = charts.parallel(coordinates)
    nothing = dict.fromkeys(
        ("tiles", "columns", "rows", "choice", "scores", "knowledge", "failures", "notes"), ()
    )
    return page(
        "sweep.html", styles=("report.css", "sweep.css"), axes=axes, lines=lines,
        size=(charts.WIDE, charts.TALL), span=(charts.UPPER, charts.LOWER),
        cards=gallery.cards(items, shape, lambda item: "consensus"),
        tables=_tables({"Settings": settings or {}, "Environment": environment or {}}),
        **nothing | {"total": len(items)} | said,
    )  # fmt: skip


def inline(result: AuditResult) -> str:
    """A short summary for notebooks: the verdict and its numbers, no script and no image.

    Notebooks are shared and committed, so what they keep must not hold training data.
    """
    return page(
        "inline.html", subject=result.subject, verdict=result.verdict,
        figures=verdict_figures(result.verdict), count=len(gallery.items(result)),
    )  # fmt: skip


def _tables(parts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, dict[str, str]]]:
    """(identifier, title, flat rows) of all that hold something."""
    names = {"SHA-256": "hashes"}
    return [
        (names.get(title, title.lower()), title, _flat(rows))
        for title, rows in parts.items()
        if rows
    ]


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


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted({value for value in values if value})


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, finalize=finalize,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"name": isolated, "shown": shown, "fixed": fixed, "p": p_text}
    environment.globals |= {"figures_of": verdict_figures, "PROVENANCE": PROVENANCE}
    return environment
