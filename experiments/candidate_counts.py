"""How many candidates should an attack have that does not know the number of training samples?

    python -m experiments.candidate_counts

Networks trained on digits are attacked with the number of candidates of each rule. The attacker knows range
and mean of the samples, but not their number. With equal steps, every rule has two restarts. With equal
work, every rule has as many restarts as give the same number of candidates in all, because a step costs
about that. The rule is chosen on the first seed and checked on the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import mean
from typing import Any

from experiments import RESULTS
from experiments.networks import first_layer_rank
from experiments.programs import parse_paths
from experiments.timing import threads
from residuum.attacks import Auto, attack
from residuum.datasets import load_dataset
from residuum.evaluation import score
from residuum.networks.network import Network, first_layer
from residuum.records import Knowledge, Reconstruction, Split, write_json
from residuum.records.rundir import environment
from residuum.training import TrainingConfig, make_release, train

SEEDS = {  # of data, training and attack
    "mlp:64-100-1": (0, 1),
    "mlp:64-100-100-1": (0, 1),
    "mlp:64-50-50-1": (0,),
    "mlp:64-200-1": (0,),
}
SAMPLES, INITS, TRAINING = (20, 40, 80), ("small", "default"), 800
STEPS, RESTARTS, WORK = 1000, 2, 400  # WORK: candidates of all restarts together
FEWEST = 20
# Of a network, its width h and the number of its samples, which only the last rule looks at.
RULES: dict[str, Callable[[Network, int, int], float]] = {
    "h/4": lambda net, h, n: h / 4,
    "h/2": lambda net, h, n: h / 2,
    "h": lambda net, h, n: h,
    "2 h": lambda net, h, n: 2 * h,
    "2 rank(W1) at 1%": lambda net, h, n: 2 * first_layer_rank(net.theta),
    "2 n, if n were known": lambda net, h, n: 2 * n,
}
Row = dict[str, Any]


def train_victims() -> Iterator[tuple[Row, Network, Split]]:
    """Yield every network with its architecture, seed, number of samples and initialization."""
    for arch, seeds in SEEDS.items():
        for seed, n, init in product(seeds, SAMPLES, INITS):
            split = load_dataset("digits", n, seed=100 + seed)
            state = train(arch, split.train, TrainingConfig(steps=TRAINING, init=init, seed=seed))
            case = {"arch": arch, "seed": seed, "n": n, "init": init}
            yield case, make_release(state, arch, split.train, "binary"), split


def counts(net: Network, n: int) -> dict[str, int]:
    """Return the number of candidates by every rule."""
    h = len(first_layer(net.theta))
    return {name: max(FEWEST, round(rule(net, h, n))) for name, rule in RULES.items()}


def measure_size(net: Network, split: Split, m: int, seed: int) -> Row:
    """Return what m candidates recover with two restarts, and with equal work."""
    restarts_of_equal_work = max(1, round(WORK / m))
    restarts = max(RESTARTS, restarts_of_equal_work)
    config = Auto(candidates=m, restarts=restarts, steps=STEPS, dtype="float32", seed=seed)
    start = time.process_time()
    reconstruction = attack(net, Knowledge(value_range=(0.0, 1.0), mean=split.train.mean), config)
    seconds = time.process_time() - start
    return {
        "candidates": m,
        "equal steps": count_recovered(reconstruction, split, RESTARTS),
        "equal work": {
            "restarts": restarts_of_equal_work,
            **count_recovered(reconstruction, split, restarts_of_equal_work),
        },
        "cpu_seconds_of_a_restart": round(seconds / restarts, 2),
    }


def count_recovered(reconstruction: Reconstruction, split: Split, restarts: int) -> Row:
    """Return the counts of the first ``restarts`` restarts."""
    x = reconstruction.x[reconstruction.run < restarts].double()
    ncc = score(x, split.train, split.holdout, metrics=("ncc",), subsets=200).metrics["ncc"]
    assert ncc.recovered is not None
    assert ncc.expected_by_chance is not None
    return {
        "recovered": ncc.recovered,
        "expected_by_chance": ncc.expected_by_chance,
        "p_value": ncc.p_value,
        "threshold": ncc.threshold_null99,
    }


def summarize(rows: Sequence[Row]) -> dict[str, Row]:
    """Return means over networks by rule. Shares are of the count of the best rule on that network."""
    means = {}
    for name in RULES:
        entries = [row["rules"][name] for row in rows]
        means[name] = {"candidates": mean(entry["candidates"] for entry in entries)}
        for case in ("equal steps", "equal work"):
            means[name][case] = {
                "recovered": mean(entry[case]["recovered"] for entry in entries),
                "expected_by_chance": mean(entry[case]["expected_by_chance"] for entry in entries),
                "share_of_best": mean(
                    entry[case]["recovered"]
                    / max(1, *(other[case]["recovered"] for other in row["rules"].values()))
                    for entry, row in zip(entries, rows, strict=True)
                ),
            }
    return means


def main() -> None:
    """Attack every network with every rule, and write the file after each."""
    rows: list[Row] = []
    start = time.process_time()
    with threads(1):
        for case, net, split in train_victims():
            sizes = counts(net, case["n"])
            done = {m: measure_size(net, split, m, case["seed"]) for m in {*sizes.values()}}
            rows.append({**case, "rules": {name: done[m] for name, m in sizes.items()}})
            first = [row for row in rows if row["seed"] == 0]
            repeats = [row for row in rows if row["seed"] != 0]
            content = {
                "what": "number of candidates when the number of samples is not known",
                "settings": {
                    "training": TRAINING,
                    "steps": STEPS,
                    "restarts": RESTARTS,
                    "work": WORK,
                },
                "chosen_on": {"networks": len(first), **summarize(first)},
                "looked_at_again_on": {"networks": len(repeats), **summarize(repeats)}
                if repeats
                else {},
                "rows": rows,
                "cpu_seconds": round(time.process_time() - start, 1),
                "environment": environment("cpu"),
            }
            write_json(RESULTS / "candidate_counts.json", content)
            print(
                *case.values(), *(_brief(*item) for item in rows[-1]["rules"].items()), flush=True
            )


def _brief(name: str, entry: Row) -> str:
    recovered = "/".join(str(entry[case]["recovered"]) for case in ("equal steps", "equal work"))
    return f"{name}: {entry['candidates']} {recovered};"


if __name__ == "__main__":
    parse_paths(__doc__)
    main()
