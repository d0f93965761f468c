"""Audit a network trained on bundled digits beside one never trained, and write both reports.

    python examples/audit_digits.py --out runs/example-audit

A verdict means something only beside a control: the second network holds no data at all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import residuum as rs

ARCH, SAMPLES = "mlp:64-60-60-1", 30


def train(split: rs.Split, steps: int) -> rs.Network:
    """A network near its KKT point, or at its random start for ``steps`` = 0."""
    config = rs.TrainingConfig(steps=steps) if steps else rs.TrainingConfig(steps=1, init="default")
    state = rs.train(ARCH, split.train, config)
    theta = state.theta if steps else state.theta0
    return rs.Network(theta, ARCH, input_shape=split.train.shape)


def main(arguments: list[str] | None = None) -> dict[str, rs.AuditResult]:
    """Both audits by name, printed side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/example-audit"))
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--steps", type=int, default=1000, help="steps of every attack")
    options = parser.parse_args(arguments)

    split = rs.load_dataset("digits", SAMPLES)
    knowledge = rs.Knowledge(
        value_range=(0, 1),
        mean=split.train.mean,
        sample_count=SAMPLES,
        provenance={"mean": "train", "sample_count": "train"},
    )
    results = {}
    for name, steps in (("trained", 1500), ("never trained", 0)):
        result = rs.audit(
            train(split, steps),
            data=split.train,
            holdout=split.holdout,
            knowledge=knowledge,
            effort=options.effort,
            steps=options.steps,
        )
        verdict = result.verdict
        print(
            f"{name}: {verdict.outcome}, {verdict.recovered} of {verdict.n} recovered"
            f" ({result.scores.rule}), {verdict.expected_by_chance:.2f} by chance,"
            f" p = {verdict.p_value:.3f}"
        )
        print("  report:", result.save(options.out / name.replace(" ", "-")) / "report.html")
        results[name] = result
    return results


if __name__ == "__main__":
    main()
