"""Audits of leaking networks that once ended in exit code 0: do they still?

Overlap: the training samples that a first audit recovers best are copied into the held-out set. Short
budgets: two networks that leak little, and twelve with and without weight noise. The bar: every audit ends
in exit code 1 or 3. Run ``python -m experiments.wrong_passes``.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from experiments.common import Case, run_cases

ARCH, SAMPLES = "mlp:64-100-100-1", 30


def cases() -> list[Case]:
    overlap = [{"kind": "overlap", "victim": v, "copies": 12} for v in (0, 1, 2)]
    overlap += [{"kind": "overlap", "victim": v, "copies": 6} for v in range(6)]
    overlap += [{"kind": "overlap", "victim": v, "copies": 3} for v in range(3)]
    seeds = [
        {"kind": "seeds", "victim": v, "budget": 8, "seed": s} for v in (1, 10) for s in range(4)
    ]
    noisy = [
        {"kind": "short", "victim": v, "noise": noise, "budget": budget}
        for budget in (8, 15)
        for noise in (0.0, 0.05)
        for v in range(12)
    ]
    return [*overlap, *seeds, *noisy]


def measure(case: Case) -> dict[str, Any]:
    import torch

    from experiments.leaking import audit, row_of, train_digits

    checkpoint, split = train_digits(ARCH, SAMPLES, case["victim"], case.get("noise", 0.0))
    holdout = split.holdout
    if case["kind"] == "overlap":
        first = audit(checkpoint, split, holdout, 15, positive_controls=False)
        values = first.evidence.values.nan_to_num(nan=-torch.inf)
        best = split.train.take(values.argsort(descending=True)[: case["copies"]])
        subset = holdout.take(torch.arange(case["copies"], len(holdout)))
        holdout = holdout.replace(x=torch.cat([subset.x, best.x]), y=torch.cat([subset.y, best.y]))
    start = time.monotonic()
    result = audit(checkpoint, split, holdout, case.get("budget", 15), seed=case.get("seed", 0))
    return row_of(result, start)


def summarize(rows: list[Case]) -> str:
    lines = ["audits           exit 0  exit 1  exit 3"]
    for kind in ("overlap", "seeds", "short"):
        codes = Counter(row["exit_code"] for row in rows if row["case"]["kind"] == kind)
        lines.append(f"{kind:16} {codes[0]:6} {codes[1]:7} {codes[3]:7}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("wrong_passes", cases(), measure, summarize)
