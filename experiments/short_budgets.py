"""Does a leaking network ever pass because its audit was short?

60 audits of networks that memorize their digits: three architectures, four seeds, five budgets. The bar:
no audit ends in exit code 0. Run ``python -m experiments.short_budgets``.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from experiments.common import Case, run_cases

ARCHITECTURES = {"mlp:64-100-100-1": 30, "mlp:64-60-60-1": 20, "mlp:64-200-1": 24}  # and samples
SEEDS = range(9000, 9004)  # used nowhere else
BUDGETS = (5, 8, 15, 30, 60)  # seconds


def cases() -> list[Case]:
    return [
        {"arch": arch, "samples": samples, "seed": seed, "budget": budget}
        for budget in BUDGETS
        for seed in SEEDS
        for arch, samples in ARCHITECTURES.items()
    ]


def measure(case: Case) -> dict[str, Any]:
    from experiments.leaking import audit, row_of, train_digits

    checkpoint, split = train_digits(case["arch"], case["samples"], case["seed"])
    start = time.monotonic()
    return row_of(audit(checkpoint, split, split.holdout, case["budget"]), start)


def summarize(rows: list[Case]) -> str:
    lines = ["budget  exit 0  exit 1  exit 3  longest, times the budget"]
    for budget in BUDGETS:
        group = [row for row in rows if row["case"]["budget"] == budget]
        codes = Counter(row["exit_code"] for row in group)
        longest = max((row["audit_seconds"] / budget for row in group), default=0.0)
        lines.append(f"{budget:4} s {codes[0]:7} {codes[1]:7} {codes[3]:7} {longest:10.2f}")
    return "\n".join(
        [*lines, f"exit 0 in {sum(row['exit_code'] == 0 for row in rows)} of {len(rows)}"]
    )


if __name__ == "__main__":
    run_cases("short_budgets", cases(), measure, summarize)
