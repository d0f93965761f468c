"""Do networks that leak or memorize pass an audit? ``python -m experiments.verdict_wrong_passes``.

100 networks, each trained until it knows its samples by heart, with one change that could hide this. The
bar: at most one audit ends in exit code 0. The seeds were drawn after this file was committed.
"""

from __future__ import annotations

from collections import Counter

from experiments.common import Case, run_cases

SEEDS = range(9605, 9610)
SETTINGS: tuple[Case, ...] = (
    {"data": "digits", "n": 20},
    {"data": "digits", "n": 60, "holdout": 100},
    {"data": "digits", "n": 200, "holdout": 200},
    {"data": "digits", "n": 60, "change": {"frozen": True}},
    {"data": "digits", "n": 60, "change": {"rescale": 2.0}},
    {"data": "digits", "n": 60, "overlap": 5},
    {"data": "digits", "n": 60, "change": {"fine_tune": True}},
    {"data": "digits", "n": 200, "label_noise": 0.2},
    {"data": "digits", "n": 100, "change": {"dropout": 0.5}},
    {"data": "digits", "n": 100, "change": {"weight_decay": 1e-2}},
    {"data": "digits", "n": 60, "change": {"rounding": "int8"}},
    {"data": "mnist", "n": 60, "change": {"rounding": "bf16"}},
    {"data": "mnist", "n": 500, "change": {"rounding": "noise 0.003"}},
    {"data": "mnist", "n": 200, "change": {"rounding": "noise 0.01"}},
    {"data": "digits", "n": 200, "change": {"rounding": "noise 0.03"}},
    {"data": "digits", "n": 120, "claimed": 40},
    {"data": "cancer", "n": 60, "label_noise": 0.2},
    {"data": "mnist", "n": 100, "options": {"budget": "5s"}},
    {"data": "digits", "n": 60, "options": {"budget": "30s"}},
    {"data": "mnist", "n": 2000, "label_noise": 0.2, "epochs": 60},
)


def cases() -> list[Case]:
    return [
        {"model": "mlp", "epochs": 400, "holdout": 400, **setting, "seed": seed}
        for seed in SEEDS
        for setting in SETTINGS
    ]


def measure(case: Case) -> Case:
    import torch

    from experiments.ordinary import accuracies, audit, draw, trained

    torch.set_num_threads(1)
    data = draw(
        case["data"], case["n"], case["holdout"], case["seed"], case.get("label_noise", 0.0)
    )
    model = trained(case, data)
    train_accuracy, test_accuracy = accuracies(model, data)
    (x, y), (held_x, held_y) = data["members"], data["holdout"]
    if copies := case.get("overlap", 0):
        held_x, held_y = torch.cat([held_x, x[:copies]]), torch.cat([held_y, y[:copies]])
    claimed = case.get("claimed", len(x))
    members = (x[:claimed], y[:claimed])
    row = audit(model, members, (held_x, held_y), seed=case["seed"], **case.get("options", {}))
    return {"train": train_accuracy, "test": test_accuracy, **row}


def summarize(rows: list[Case]) -> str:
    codes = Counter(row["exit_code"] for row in rows)
    lines = [f"{len(rows)} networks: exit 0 {codes[0]}, exit 1 {codes[1]}, exit 3 {codes[3]}"]
    passed = [row for row in rows if row["exit_code"] == 0]
    lines += [f"exit 0: {row['case']}, AUC {row['auc']}, {row['headline']}" for row in passed]
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("verdict_wrong_passes", cases(), measure, summarize)
