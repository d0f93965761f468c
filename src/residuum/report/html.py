"""The report as one HTML file: no network, no markup from names, readable without its script.

Style sheet and script are written into the page and admitted by their hash; the policy forbids all
else, so that even a mistake in escaping could load and run nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
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


def render(result: AuditResult, *, blur: bool = False, redact: bool = False) -> str:
    """The whole report. blur: images are shown when asked for; redact: the file holds no image."""
    items = gallery.items(result)
    cards = gallery.cards(gallery.redacted(items) if redact else items, result.shape)
    shown, total, control = [card.item for card in cards], gallery.total(result), result.control
    style, script = (_inlined(name) for name in ("report.css", "report.js"))
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
    return _environment().get_template("template.html").render(
        page=result, verdict=result.verdict, cards=cards, blur=blur and not redact, redact=redact,
        created=f"{result.created[:16].replace('T', ' ')} UTC",
        style=style, script=script, policy=_policy(style, script), threshold=table,
        histogram=charts.histogram(*evidence) if evidence else None,
        scatter=charts.scatter(*evidence) if evidence else None,
        residuals=[chart for chart in curves if chart], labels=labels, certificates=certificates,
        certificate=certificate_rows(result),
        sorts=gallery.sort_keys(shown), left_out=total - len(cards), total=total,
        matched=any(item.matched for item in shown),
        frames=max((len(card.pictures) for card in cards), default=0), tables=_tables(result),
        data={"threshold": table, "cards": [gallery.keys(item) for item in shown],
              "labels": labels, "certificates": certificates,
              "ascending": gallery.ascending(result)},
    )  # fmt: skip


def inline(result: AuditResult) -> str:
    """A short summary for notebooks: the verdict and its numbers, no script and no image.

    Notebooks are shared and committed, so what they keep must not hold training data.
    """
    return _environment().get_template("inline.html").render(
        page=result, verdict=result.verdict, figures=verdict_figures(result.verdict),
        count=len(gallery.items(result)),
    )  # fmt: skip


def _tables(result: AuditResult) -> tuple[tuple[str, str, dict[str, str]], ...]:
    """Settings, environment and hashes: (identifier, title, flat rows)."""
    batches = ", ".join(
        f"{b.attack}: {b.restarts} restarts of {b.steps} steps, seed {b.seed}"
        for b in result.batches
    )
    parts = (
        ("settings", "Settings", {**result.settings, "batches": batches}),
        ("environment", "Environment", result.environment),
        ("hashes", "SHA-256", result.hashes),
    )
    return tuple((key, title, _flat(rows)) for key, title, rows in parts if rows)


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
