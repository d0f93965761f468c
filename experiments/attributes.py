"""How many missing values of training records do the weights disclose, and how many of them are wrong?

Networks as people train them on tables of 60 or 150 rows with standardized columns. ``default`` is
``MLPClassifier()`` or ``MLPRegressor()``, ``long`` trains for 2,000 iterations, and ``two layers`` is a
PyTorch network of width 100-100. Cells are reported at a false discovery rate of 5%, pairs and triples of
columns at 2.5%. ``none`` asks about records that were never trained on, half of them shifted by half a
standard deviation. ``bfloat16`` and ``int8`` round the weights of the ``long`` networks.

``BARS`` has the bars for means over five networks. Over all tables at most 5% of the reported cells are
wrong, and at most 12% in each table with 100 or more reported cells. Of 100 sets that were never trained on,
at most 2 have any reported cell. Ridge regression predicts at most 25% of the cells of breast cancer.

    python -m experiments.attributes --draw      # once, after the settings are committed
    python -m experiments.attributes --workers 2

Seeds 0 to 99 are for development. Claims rest on the seeds in ``experiments/results/attributes-seeds.json``.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from experiments import RESULTS
from experiments.common import Case, run_cases
from experiments.seeds import draw_seeds

SEEDS = RESULTS / "attributes-seeds.json"
NETWORKS, NONE_SETS, POOL, HELD_OUT = 5, 100, 400, 400
LONG = {"max_iter": 2000, "tol": 0.0, "n_iter_no_change": 2000}
PAIRS, TRIPLES = 30, 4  # sets of columns that are drawn for each network
LEVEL_OF_SEVERAL = 0.025
# Part, table, rows and training, with the smallest mean share of reported cells.
BARS: dict[tuple[str, str, int, str], float | None] = {
    ("cells", "cancer", 60, "default"): 0.10,
    ("cells", "cancer", 150, "default"): 0.035,
    ("cells", "diabetes", 60, "default"): 0.25,
    ("cells", "digits", 60, "default"): 0.28,
    ("cells", "mixed", 60, "default"): 0.24,
    ("cells", "cancer", 60, "two layers"): 0.07,
    ("cells", "cancer", 60, "long"): 0.18,
    ("cells", "cancer", 150, "long"): 0.09,
    ("cells", "binary cancer", 60, "default"): 0.16,
    ("cells", "binary cancer", 60, "long"): 0.19,
    ("cells", "choices", 60, "default"): None,
    ("cells", "choices", 60, "long"): None,
    ("cells", "diabetes", 60, "long"): None,
    ("cells", "cancer", 60, "bfloat16"): None,
    ("cells", "cancer", 60, "int8"): None,
    ("pairs", "cancer", 60, "long"): 0.11,
    ("pairs", "diabetes", 60, "long"): 0.11,
    ("pairs", "cancer", 60, "default"): None,
    ("triples", "diabetes", 60, "long"): None,
    ("triples", "cancer", 60, "long"): None,
}
KIND_BARS = {"one-hot": 0.30, "integer": 0.26}  # of the table "choices" with default training


def load_table(name: str, seed: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the columns of a table, its targets, and whether the targets are classes."""
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        return x, (y - y.mean()) / y.std(), False
    if name == "digits":
        return *load_digits(return_X_y=True), True
    if name in ("cancer", "binary cancer"):
        x, y = load_breast_cancer(return_X_y=True)
        return (x > np.median(x, 0)).astype(float) if name == "binary cancer" else x, y, True
    generator = np.random.default_rng(seed)
    n = 1000
    numbers = generator.normal(size=(n, 6))
    age = generator.integers(18, 90, n).astype(float)
    choice = np.eye(4)[generator.integers(0, 4, n)]
    binary = generator.integers(0, 2, (n, 3)).astype(float)
    score = numbers[:, 0] + 0.05 * (age - 50) * numbers[:, 1] + choice @ [1.0, -1.0, 0.5, 0.0]
    score += binary @ [1.0, -0.5, 0.3] + 0.3 * generator.normal(size=n)
    assert name in ("mixed", "choices")
    return np.hstack([numbers, age[:, None], choice, binary]), (score > 0).astype(int), True


def train(x: np.ndarray, y: np.ndarray, is_class: bool, training: str, seed: int) -> Any:
    """Return a trained network."""
    import torch
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    from residuum.io.checkpoints import as_network

    warnings.simplefilter("ignore")
    if training == "two layers":
        torch.manual_seed(seed)
        network = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], 100),
            torch.nn.ReLU(),
            torch.nn.Linear(100, 100),
            torch.nn.ReLU(),
            torch.nn.Linear(100, 1),
        )
        inputs, targets = torch.tensor(x).float(), torch.tensor(y).float()
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(2000):
            optimizer.zero_grad()
            scores = network(inputs)[:, 0]
            torch.nn.functional.binary_cross_entropy_with_logits(scores, targets).backward()
            optimizer.step()
        return as_network(network)
    settings = {} if training == "default" else LONG
    kind = MLPClassifier if is_class else MLPRegressor
    network = as_network(kind(random_state=seed % 2**31, **settings).fit(x, y))
    if training == "bfloat16":
        theta = {name: t.bfloat16().to(t) for name, t in network.theta.items()}
        return network.replace(theta=theta)
    if training == "int8":
        theta = {}
        for name, t in network.theta.items():
            step = t.abs().max() / 127
            theta[name] = (t / step).round() * step if t.ndim == 2 else t
        return network.replace(theta=theta)
    return network


def measure(case: Case) -> Case:
    """Return the counts of one network."""
    import torch

    torch.set_num_threads(1)
    seed, n = case["seed"], case["n"]
    x, y, is_class = load_table(case["table"], seed)
    order = np.random.default_rng(seed).permutation(len(x))
    rows = order[:n]
    deviation = x[rows].std(0)
    x = (x - x[rows].mean(0)) / np.where(deviation > 0, deviation, 1)
    network = train(x[rows], y[rows], is_class, case["training"], seed)
    tensor = torch.from_numpy(x)
    train_x, holdout = tensor[rows], tensor[order[n : n + HELD_OUT]]
    if case["part"] == "cells":
        return measure_cells(network, train_x, holdout, seed)
    if case["part"] == "none":
        records = holdout[:n]
        shift = 0.5 * torch.randn(x.shape[1], generator=torch.Generator().manual_seed(seed)).sign()
        records = records + shift.double() if case["shifted"] else records
        cells = measure_cells(network, records, holdout[n:], seed)
        return {"reported": cells["reported"], "cells": cells["cells"]}
    return measure_several(network, train_x, holdout, 2 if case["part"] == "pairs" else 3, seed)


def measure_cells(network: Any, x: Any, holdout: Any, seed: int) -> Case:
    """Return the counts of reported, right and imputable cells, in all and by kind of column."""
    import torch

    from residuum.networks.inferred_cells import find_variables, infer_cells
    from residuum.risk.attributes import measure_attributes

    result = measure_attributes(network, x, holdout, seed=seed)
    pool = torch.cat([x, holdout])
    variables = find_variables(pool)
    cells = infer_cells(network, x, pool, variables, seed)
    filled, kinds = cells.fill(x), {}
    for index, variable in enumerate(variables):
        columns = [*variable.columns]
        tolerance = 0.02 * pool.std(0, correction=0)[columns]
        is_right = ((filled[:, columns] - x[:, columns]).abs() <= tolerance).all(1)
        reported = cells.is_reported[:, index]
        kind = "continuous"
        if variable.choices is not None:
            kind = "binary" if len(variable.choices) == 2 else "integer"
            kind = "one-hot" if len(columns) > 1 else kind
        counts = kinds.setdefault(kind, {"cells": 0, "reported": 0, "right": 0})
        counts["cells"] += len(x)
        counts["reported"] += int(reported.sum())
        counts["right"] += int((reported & is_right).sum())
    return {
        "cells": result.records * result.variables,
        "reported": result.reported,
        "right": result.right,
        "imputable": result.imputable,
        "holdout_reported": result.holdout_reported,
        "kinds": kinds,
    }


def measure_several(network: Any, x: Any, holdout: Any, count: int, seed: int) -> Case:
    """Return the counts for random sets of two or three unknown columns."""
    import torch
    from scipy.stats import false_discovery_control

    from residuum.conformal import rank_p_values
    from residuum.networks.kinks import make_decoys
    from residuum.networks.missing_values import EQUAL_VALUES, RecordLines
    from residuum.networks.several_missing_values import infer_several

    pool = torch.cat([x, holdout])
    lines, deviation = RecordLines.measure(network, pool), pool.std(0, correction=0)
    low, high = pool.amin(0) - 0.5 * deviation, pool.amax(0) + 0.5 * deviation
    generator, choice = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    statistic, decoys, is_right = [], [], []
    for _ in range(PAIRS if count == 2 else TRIPLES):
        columns = torch.from_numpy(np.sort(choice.choice(x.shape[1], count, replace=False)))
        bounds = low[columns], high[columns], EQUAL_VALUES * deviation[columns]
        evidence = infer_several(lines, x, columns, *bounds)
        statistic.append(evidence.statistic)
        is_right.append(((evidence.value - x[:, columns]).abs() <= bounds[2]).all(1))
        for _ in range(4 if count == 2 else 2):
            noisy = make_decoys(x, deviation, generator)
            decoys.append(infer_several(lines, noisy, columns, *bounds).statistic)
    p = rank_p_values(torch.cat(statistic), torch.cat(decoys))
    reported = torch.from_numpy(false_discovery_control(p.numpy())) <= LEVEL_OF_SEVERAL
    right = int((reported & torch.cat(is_right)).sum())
    return {"cells": len(p), "reported": int(reported.sum()), "right": right}


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Return all cases, with the drawn seeds or with seeds for development."""
    if options.draw:
        names = {"/".join(map(str, key)): NETWORKS for key in BARS}
        draw_seeds(SEEDS, networks=names, none={"sets": NONE_SETS})
    if options.try_seeds:
        seeds = {
            "networks": {"/".join(map(str, key)): [1, 2] for key in BARS},
            "none": {"sets": [3, 4]},
        }
    else:
        seeds = json.loads(Path(SEEDS).read_text())
    keys = ("part", "table", "n", "training")
    cases = [
        {**dict(zip(keys, key, strict=True)), "seed": seed}
        for key in BARS
        for seed in seeds["networks"]["/".join(map(str, key))]
    ]
    tables = ("cancer", "diabetes", "mixed", "binary cancer")
    cases += [
        {
            "part": "none",
            "table": tables[i % 4],
            "n": 60,
            "training": ("default", "long")[i // 4 % 2],
            "shifted": i // 8 % 2 == 1,
            "seed": seed,
        }
        for i, seed in enumerate(seeds["none"]["sets"])
    ]
    return cases


def summarize(rows: list[Case]) -> str:
    """Return one line for each table, with its bar."""
    lines = ["part, table, rows, training: share reported (bar), right, not imputable, held out"]
    every_reported = every_wrong = 0
    for key, bar in BARS.items():
        names = ("part", "table", "n", "training")
        chosen = [r for r in rows if tuple(r["case"][name] for name in names) == key]
        if not chosen:
            continue
        share = np.mean([r["reported"] / r["cells"] for r in chosen])
        reported, right = (sum(r[name] for r in chosen) for name in ("reported", "right"))
        line = f"{', '.join(map(str, key))}: {share:.1%} ({'-' if bar is None else f'{bar:.1%}'})"
        line += f", {right} of {reported} right ({right / max(reported, 1):.1%})"
        if key[0] == "cells":
            every_reported, every_wrong = every_reported + reported, every_wrong + reported - right
            imputable = sum(r["imputable"] for r in chosen)
            line += f", {1 - imputable / max(right, 1):.1%} not imputable"
            line += f", {sum(r['holdout_reported'] for r in chosen)} held-out cells"
            for kind in sorted({kind for r in chosen for kind in r["kinds"]}):
                counts = [
                    r["kinds"].get(kind, {"cells": 1, "reported": 0, "right": 0}) for r in chosen
                ]
                kind_share = np.mean([c["reported"] / c["cells"] for c in counts])
                kind_reported, kind_right = (
                    sum(c[k] for c in counts) for k in ("reported", "right")
                )
                line += f"; {kind} {kind_share:.1%}, {kind_right} of {kind_reported} right"
        lines.append(line)
    none = [r for r in rows if r["case"]["part"] == "none"]
    lines.append(f"all cells: {every_wrong} of {every_reported} wrong")
    lines.append(f"never trained on: {sum(r['reported'] > 0 for r in none)} of {len(none)} sets")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure which missing values weights disclose.")
    parser.add_argument("--draw", action="store_true", help="draw the seeds of the claim first")
    parser.add_argument("--try-seeds", action="store_true", help="use seeds for development")
    run_cases("attributes", make_cases, measure, summarize, parser)


if __name__ == "__main__":
    main()
