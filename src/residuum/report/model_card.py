"""A section for a model card: what was tried, what came back, and what that does not mean."""

from __future__ import annotations

import re

from residuum.report.page import AttackRow, Page, p_text, shown

COUNTS = (
    "Counts are of each attack's candidates alone, beyond 99% of their own chance. The verdict "
    "rests on the candidates of all attacks but the baselines, pooled."
)
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~])")


def model_card(page: Page) -> str:
    """Markdown; names from files stay text."""
    verdict = page.verdict
    lines = [
        "## Training-data reconstruction audit",
        "",
        f"**{verdict.headline}.** {verdict.sentence}",
        "",
        f"Audited: {text(page.subject)} ({text(page.description)}), {text(page.created)}, by residuum.",
        "",
        *_section("Why", verdict.reasons),
        *_attacks(page),
        *_section(
            "Granted to the attacker",
            tuple(f"{fact.fact}: {fact.value} ({fact.provenance})" for fact in page.knowledge)
            or ("nothing but the weights",),
        ),
        *_section("Assumptions", page.assumptions),
        *_section("Limitations", page.limitations),
        *_section("Notes", page.notes),
    ]
    return "\n".join(lines).rstrip() + "\n"


def text(value: object) -> str:
    """Plain text in Markdown: special characters escaped, one line."""
    line = _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _section(title: str, rows: tuple[str, ...]) -> list[str]:
    return [f"### {title}", "", *(f"- {text(row)}" for row in rows), ""] if rows else []


def _attacks(page: Page) -> list[str]:
    rows = [
        "### Attacks", "",
        "| attack | run | restarts | residual, judged layers | recovered | rule | by chance | p | note |",
        "|---|---|---:|---:|---:|---|---:|---:|---|",
    ]  # fmt: skip
    for row in page.attacks:
        rows.append(
            f"| {text(row.name)} | {'yes' if row.ran else 'no'} | {shown(row.restarts)} | "
            f"{shown(row.residual)} | {shown(row.recovered)} | "
            f"{text(row.rule) or '-'} | {shown(row.expected)} | "
            f"{text(p_text(row.p_value))} | {text(_note(row))} |"
        )
    return [*rows, "", COUNTS, ""] if page.attacks else []


def _note(row: AttackRow) -> str:
    return (row.status if row.ran else row.reason) or row.reason
