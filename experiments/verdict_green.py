"""Do ordinary networks that generalize end in exit code 0? ``python -m experiments.verdict_green``.

- ``short``: ten networks of digits, MNIST and breast cancer, trained for at most 20 epochs or with early
  stopping. The bar: at least 8 end in exit code 0.
- ``long``: ten networks trained for 200 epochs. Those whose test accuracy is within 12 points of their
  training accuracy count. The bar: every exit code 1 among them is a membership finding.
- ``remedy``: the first five of ``long``, trained for 10 epochs as the report advises. The bar: at least four
  end in exit code 0.

The audits have standard effort and no options. The seeds were drawn after this file was committed.
"""

from __future__ import annotations

from typing import Any

from experiments.common import Case, run_cases

REMEDY_EPOCHS = 10
MAX_GAP = 0.12
SHORT = (
    ("digits", 900, 600, "mlp", 20, {}),
    ("digits", 900, 600, "mlp", 10, {}),
    ("digits", 900, 600, "mlp", 200, {"early_stopping": True}),
    ("digits", 900, 600, "mlp-256-128", 10, {}),
    ("mnist", 2000, 1000, "mlp", 10, {}),
    ("mnist", 2000, 1000, "mlp", 20, {"optimizer": "sgd"}),
    ("mnist", 2000, 1000, "cnn", 5, {}),
    ("mnist", 1000, 1000, "cnn", 10, {"optimizer": "sgd"}),
    ("cancer", 150, 400, "mlp", 20, {}),
    ("cancer", 150, 400, "mlp", 20, {"optimizer": "sgd"}),
)
LONG = (
    ("digits", 900, 600, "mlp", {}),
    ("digits", 500, 600, "mlp", {"optimizer": "sgd"}),
    ("mnist", 2000, 1000, "mlp", {}),
    ("cancer", 150, 400, "mlp", {}),
    ("mnist", 1000, 1000, "cnn", {}),
    ("digits", 300, 600, "mlp", {}),
    ("digits", 900, 600, "mlp-256-128", {}),
    ("mnist", 2000, 1000, "mlp", {"weight_decay": 1e-3}),
    ("cancer", 100, 400, "mlp", {"optimizer": "sgd"}),
    ("digits", 900, 600, "mlp", {"dropout": 0.2}),
)


def cases() -> list[Case]:
    rows: list[Case] = []
    for i, (data, n, holdout, model, epochs, change) in enumerate(SHORT):
        shared = {"data": data, "n": n, "holdout": holdout, "model": model, "change": change}
        rows.append({"part": "short", **shared, "epochs": epochs, "seed": 9580 + i})
    for i, (data, n, holdout, model, change) in enumerate(LONG):
        shared = {"data": data, "n": n, "holdout": holdout, "model": model, "change": change}
        rows.append({"part": "long", **shared, "epochs": 200, "seed": 9620 + i})
        if i < 5:
            rows.append({"part": "remedy", **shared, "epochs": REMEDY_EPOCHS, "seed": 9620 + i})
    return rows


def measure(case: Case) -> Case:
    import torch

    from experiments.ordinary import accuracies, audit, draw, trained

    torch.set_num_threads(1)
    data = draw(case["data"], case["n"], case["holdout"], case["seed"])
    model = trained(case, data)
    train_accuracy, test_accuracy = accuracies(model, data)
    row: dict[str, Any] = audit(model, data["members"], data["holdout"])
    return {"train": train_accuracy, "test": test_accuracy, **row}


def summarize(rows: list[Case]) -> str:
    lines = []
    for name in ("short", "long", "remedy"):
        group = [row for row in rows if row["case"]["part"] == name]
        if name == "long":
            group = [row for row in group if row["train"] - row["test"] <= MAX_GAP]
        codes = [row["exit_code"] for row in group]
        other = [
            row for row in group if row["exit_code"] == 1 and set(row["grades"]) != {"membership"}
        ]
        slowest = max((row["audit_seconds"] for row in group), default=0)
        lines.append(
            f"{name:8} {len(group):3} networks: exit 0 {codes.count(0)}, exit 1 {codes.count(1)} "
            f"({len(other)} not by membership alone), exit 3 {codes.count(3)}, slowest {slowest:.0f} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("verdict_green", cases(), measure, summarize)
