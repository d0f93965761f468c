"""A section for a model card: what was tried, what came back, and what that does not mean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from residuum.report.page import p_text, shown

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult

COUNTS = (
    "Counts are of each attack's candidates alone, beyond 99% of their own chance. The verdict "
    "rests on the candidates of all attacks but the baselines, pooled."
)
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~])")


def model_card(result: AuditResult) -> str:
    """Markdown; names from files stay text."""
    verdict = result.verdict
    network = f"{result.checkpoint.arch}, {result.inspection.parameters} parameters"
    created = f"{result.created[:16].replace('T', ' ')} UTC"
    lines = [
        "## Training-data reconstruction audit",
        "",
        f"**{verdict.headline}.** {verdict.sentence}",
        "",
        f"Audited: {text(result.subject)} ({text(network)}), {text(created)}, by residuum.",
        "",
        *_section("Why", (*verdict.reasons, *([result.fit.line] if result.fit else []))),
        *_attacks(result),
        *_section(
            "Granted to the attacker",
            tuple(
                f"{fact.fact}: {fact.value} ({fact.provenance})" for fact in result.knowledge.facts
            )
            or ("nothing but the weights",),
        ),
        *_section("Assumptions", result.assumptions),
        *_section("Limitations", result.limitations),
        *_section("Notes", result.notes),
    ]
    return "\n".join(lines).rstrip() + "\n"


def text(value: object) -> str:
    """Plain text in Markdown: special characters escaped, one line."""
    line = _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _section(title: str, rows: tuple[str, ...]) -> list[str]:
    return [f"### {title}", "", *(f"- {text(row)}" for row in rows), ""] if rows else []


def _attacks(result: AuditResult) -> list[str]:
    rows = [
        "### Attacks", "",
        "| attack | run | restarts | residual, judged layers | recovered | rule | by chance | p | note |",
        "|---|---|---:|---:|---:|---|---:|---:|---|",
    ]  # fmt: skip
    for row in result.attacks:
        rows.append(
            f"| {text(row.name)} | {'yes' if row.ran else 'no'} | "
            f"{shown(row.restarts if row.ran else None)} | {shown(row.residual)} | "
            f"{shown(row.recovered)} | {text(row.rule) or '-'} | {shown(row.expected_by_chance)} | "
            f"{text(p_text(row.p_value))} | {text(row.status if row.ran else row.reason)} |"
        )
    return [*rows, "", COUNTS, ""] if result.attacks else []
