"""The report as one HTML file: no network, no markup from names, readable without its script.

Style sheet and script are written into the page and admitted by their hash; the policy forbids all
else, so that even a mistake in escaping could load and run nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from residuum.report import charts, gallery
from residuum.report.page import Control, Page, Verdict, fixed, p_text, shown
from residuum.report.safetext import finalize, isolated

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
PROVENANCE = {
    "user": "said by the auditor",
    "train": "computed from the training set: the strongest attacker",
    "holdout": "computed from the held-out set",
}


def render(page: Page, *, blur: bool = False, redact: bool = False) -> str:
    """The whole report. blur: images are shown when asked for; redact: the file holds no image."""
    page = gallery.redacted(page) if redact else page
    cards = gallery.cards(page)
    style, script = (_inlined(name) for name in ("report.css", "report.js"))
    table = _threshold_table(page.control)
    labels, certificates = (
        _distinct(getattr(card.item, name) for card in cards) for name in ("label", "certificate")
    )
    return _environment().get_template("template.html").render(
        page=page, verdict=page.verdict, cards=cards, blur=blur and not redact, redact=redact,
        style=style, script=script, policy=_policy(style, script), threshold=table,
        histogram=page.control and charts.histogram(page.control),
        scatter=page.control and charts.scatter(page.control),
        residuals=[chart for one in page.residuals if (chart := charts.residual_chart(one))],
        labels=labels, certificates=certificates,
        sorts=gallery.sort_keys(page, cards), left_out=gallery.left_out(page, cards),
        matched=any(gallery.matched(card.item) for card in cards),
        frames=max((len(card.pictures) for card in cards), default=0),
        total=gallery.total(page), tables=_tables(page),
        data={"threshold": table, "cards": [gallery.keys(card.item) for card in cards],
              "labels": labels, "certificates": certificates, "ascending": gallery.ascending(page)},
    )  # fmt: skip


def inline(page: Page) -> str:
    """A short summary for notebooks: the verdict and its numbers, no script and no image.

    Notebooks are shared and committed, so what they keep must not hold training data.
    """
    return _environment().get_template("inline.html").render(
        page=page, verdict=page.verdict, figures=verdict_figures(page.verdict)
    )  # fmt: skip


def verdict_figures(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    """The numbers of a verdict, named; empty when nothing was calibrated."""
    if verdict.recovered is None or verdict.n is None:
        return ()
    interval = verdict.interval
    return (
        ("recovered", f"{verdict.recovered} of {verdict.n}"),
        ("threshold", verdict.rule or "–"),
        ("expected by chance", shown(verdict.expected)),
        ("naive 95% interval", f"{interval[0]:.1f} – {interval[1]:.1f}" if interval else "–"),
        ("p value", p_text(verdict.p_value)),
    )


def _threshold_table(control: Control | None) -> dict[str, Any] | None:
    """Counts at every position of the slider; the calibrated threshold is one of the positions.

    A sample counts when it strictly beats the threshold, as in the verdict; held-out counts are
    means over the sets, so that they stand beside a training set of the same size.
    """
    if control is None or not len(charts.finite(control.train)):
        return None
    train, null = charts.finite(control.train), charts.finite(control.null)
    sign = 1 if control.higher_is_better else -1
    values = charts.positions([*train, *null], control.threshold)
    start = values.index(control.threshold) if math.isfinite(control.threshold) else None
    if start is None:  # nothing could beat it: the end of the scale where nothing counts
        start = len(values) - 1 if sign > 0 else 0
    sets = max(control.null_sets, 1)
    return {
        "metric": control.metric, "values": values, "start": start, "sign": sign,
        "texts": [f"{value:.4g}" for value in values], "n": len(control.train),
        "train": [int((sign * train > sign * v).sum()) for v in values],
        "null": [round(float((sign * null > sign * v).sum() / sets), 4) for v in values],
        "sets": sets, "reachable": math.isfinite(control.threshold),
    }  # fmt: skip


def _tables(page: Page) -> tuple[tuple[str, str, dict[str, str]], ...]:
    """Settings, environment and hashes: (identifier, title, flat rows)."""
    parts = (
        ("settings", "Settings", page.settings),
        ("environment", "Environment", page.environment),
        ("hashes", "SHA-256", page.hashes),
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
