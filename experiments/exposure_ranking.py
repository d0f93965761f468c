"""Does the exposure score rank the records of a training set by who is reconstructed?

    python -m experiments.image_data SOURCE FOLDER                 make the images
    python -m experiments.exposure_ranking run FOLDER --pool tune  networks that the formulas are fitted on
    python -m experiments.exposure_ranking fit                     coefficients of risk/run.py
    python -m experiments.exposure_ranking draw                    seeds of all exposure experiments
    python -m experiments.exposure_ranking run FOLDER --device cuda --jobs 4    26 networks of the claim
    python -m experiments.exposure_ranking picture PNG             calibration of the probability

Each network is trained, its records get exposure scores, and two attacks reconstruct its records. Results are
written to ``experiments/results/exposure_ranking.json`` after every network, and a run that was interrupted
continues with the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import RESULTS
from experiments.exposure_common import (
    AGAIN_FILE,
    SEEDS_FILE,
    bundled_table,
    load_split,
    read_seeds,
    rounded,
    run_cases,
)
from experiments.exposure_epsilon import EPSILON_RUNS, EPSILONS
from experiments.exposure_kinks import KINKED
from experiments.exposure_left_out import LEFT_SEEDS
from experiments.programs import run_program
from experiments.seeds import draw_seeds
from residuum.attacks import Auto, Unmix, attack
from residuum.errors import InputError
from residuum.evaluation import score
from residuum.evaluation.roc import area_under_curve
from residuum.evaluation.scoring import all_candidates
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.records.rundir import environment
from residuum.risk.run import expose
from residuum.similarity import ncc
from residuum.training import TrainingConfig, train

RANKING, TUNING = (
    RESULTS / f"{name}.json" for name in ("exposure_ranking", "exposure_ranking-tuning")
)
FEATURES = (
    "score",
    "probability",
    "heard",
    "reach",
    "reach_ncc",
    "own_over_misfit",
    "margin",
)
SIGNED = "recovered with the sign told"
FEWEST = 3  # recovered records, and others, below which a victim has no ranking to speak of
MARGIN = TrainingConfig(steps=2000, dtype="float32")
SGD = TrainingConfig(method="sgd", batch=10, momentum=0.9, steps=3000, lr=0.02, dtype="float32")
DECAY = TrainingConfig(
    method="gd", steps=3000, lr=0.2, momentum=0.9, weight_decay=1e-3, dtype="float32"
)


@dataclass(frozen=True)
class Kind:
    """One kind of network: records, hidden layers, training, and the seeds for tuning."""

    data: str
    n: int
    hidden: str
    training: TrainingConfig
    tuned: tuple[int, ...]


EARLY, LATE = (9001, 9002), (9011, 9012)
KINDS = {
    "digits-3-margin": Kind("digits", 40, "100-100", MARGIN, EARLY),
    "digits-2-margin": Kind("digits", 40, "200", MARGIN, EARLY),
    "digits-3-sgd": Kind("digits", 40, "100-100", SGD, EARLY),
    "digits-3-decay": Kind("digits", 40, "100-100", DECAY, EARLY),
    "digits-60-decay": Kind("digits", 60, "200", DECAY, EARLY),
    "digits-80-margin": Kind("digits", 80, "200-200", MARGIN, LATE),
    "digits-60-sgd": Kind("digits", 60, "300", SGD, LATE),
    "mnist-3-margin": Kind("mnist", 100, "300-300", MARGIN, LATE),
    "mnist-2-sgd": Kind("mnist", 100, "400", SGD, LATE),
    "mnist-3-decay": Kind("mnist", 100, "300-300", DECAY, LATE),
    "mnist-50-margin": Kind("mnist", 50, "200-200", MARGIN, EARLY),
    "mnist-50-sgd": Kind("mnist", 50, "300", SGD, EARLY),
    "mnist-50-decay": Kind("mnist", 50, "200-200", DECAY, EARLY),
    "cifar-3-margin": Kind("cifar10", 100, "300-300", MARGIN, LATE),
    "cifar-2-margin": Kind("cifar10", 100, "400", MARGIN, LATE),
    "cifar-3-sgd": Kind("cifar10", 100, "300-300", SGD, LATE),
    "cifar-40-margin": Kind("cifar10", 40, "200-200", MARGIN, EARLY),
    "cifar-40-2-margin": Kind("cifar10", 40, "300", MARGIN, EARLY),
    "cifar-40-sgd": Kind("cifar10", 40, "200-200", SGD, EARLY),
    "cancer-3-margin": Kind("cancer", 16, "100-100", MARGIN, LATE),
    "cancer-2-sgd": Kind("cancer", 16, "200", SGD, LATE),
    "cancer-40-margin": Kind("cancer", 40, "100-100", MARGIN, EARLY),
    "cancer-40-sgd": Kind("cancer", 40, "200", SGD, EARLY),
    "diabetes-3-margin": Kind("diabetes", 24, "100-100", MARGIN, LATE),
    "diabetes-2-decay": Kind("diabetes", 24, "200", DECAY, LATE),
    "diabetes-40-margin": Kind("diabetes", 40, "100-100", MARGIN, EARLY[1:]),
    "diabetes-40-decay": Kind("diabetes", 40, "200", DECAY, EARLY[1:]),
}
# Of which claims are made: kinds with four records recovered on every network that was tuned on or
# measured before, and, for want of such a one of the second table, the best of cancer. 26 networks, since
# those of cancer may have no ranking.
CLAIMED = (
    "digits-3-margin",
    "digits-3-sgd",
    "digits-60-decay",
    "digits-80-margin",
    "mnist-3-margin",
    "mnist-2-sgd",
    "mnist-3-decay",
    "cifar-3-margin",
    "cifar-2-margin",
    "cifar-3-sgd",
    "cancer-3-margin",
    "diabetes-3-margin",
    "diabetes-2-decay",
)
VICTIMS = 2  # of each kind
SLOW = 5 * 10**4  # values of all records above which stationarity is not run on a CPU


def draw() -> None:
    """Draw the seeds that are not drawn yet, of this and the other exposure experiments."""
    fixed = {"kinks": KINKED} | {f"epsilon-{e:g}": EPSILON_RUNS for e in EPSILONS}
    scored = dict.fromkeys(CLAIMED, VICTIMS) | {"leftout": LEFT_SEEDS}
    for path, counts in ((SEEDS_FILE, fixed), (AGAIN_FILE, scored)):
        if not path.exists():
            draw_seeds(path, seeds=counts)


def measure_network(kind: Kind, seed: int, folder: str, pool: str, device: str) -> dict[str, Any]:
    """Train a network, measure exposure, and attack it twice.

    Args:
        kind: Kind of the network.
        seed: Of the data, the training and the attacks.
        folder: Folder of the images.
        pool: "claim" or "tune".
        device: Device of the training and of stationarity. Unmixing runs on the CPU for 40 seconds.

    Returns:
        Figures and outcomes of every record.
    """
    torch.set_num_threads(1)
    split = load_split(kind.data, kind.n, seed, folder, pool)
    shape = split.train.shape
    arch = f"mlp:{math.prod(shape)}-{kind.hidden}-1"
    start = time.time()
    state = train(arch, split.train, kind.training.changed(seed=seed), device=device)
    took = {"training": time.time() - start}
    released = Network(state.theta, arch, shape)
    exposure = expose(released, split.train, split.holdout)
    # The product withholds the probability where this benchmark found it wrong.
    checked = exposure.replace(probability=exposure.score.sigmoid())
    took["exposure"] = exposure.seconds
    granted = {"value_range": (0, 1), "mean": split.train.mean} if len(shape) > 1 else {}
    knowledge = Knowledge(shape=shape, **granted)
    entry: dict[str, Any] = {
        "seed": seed,
        "n": kind.n,
        "values": math.prod(shape),
        "device": device,
        "rank": exposure.rank,
        "misfit": exposure.misfit,
        "called": exposure.called,
        "expected": float(exposure.score.sigmoid().sum()),
        "loss": state.history[-1]["loss"],
        "records": {name: rounded(getattr(checked, name)) for name in FEATURES},
        "attacks": {},
    }
    judge = partial(score, train=split.train, holdout=split.holdout, metrics=["ncc"], subsets=300)
    for name, config in (
        ("unmix", Unmix(seed=seed, seconds=40)),
        (
            "stationarity",
            Auto(restarts=2, steps=1500, seed=seed, dtype="float32", device=device),
        ),
    ):
        if name == "stationarity" and device == "cpu" and kind.n * math.prod(shape) > SLOW:
            entry["attacks"][name] = {"refused": "minutes on a CPU; weaker on tuning victims"}
            continue
        start = time.time()
        try:
            pool_ = all_candidates(attack(released, knowledge, config))
        except InputError as problem:
            entry["attacks"][name] = {"refused": str(problem)}
            continue
        took[name] = time.time() - start
        x, flat = pool_.x.double(), split.train.x.double()
        more = {}
        if name == "unmix":
            # A source has no sign of its own: it is a candidate with both, for the control as well.
            scores = judge(torch.cat([x, -x]))
            signed_scores = judge(x)
            more[SIGNED] = [bool(row.recovered) for row in signed_scores.per_sample]
        else:
            scores = judge(x)
        unit = torch.nn.functional.normalize
        cosine = unit(flat.flatten(1)) @ unit(x.flatten(1)).T
        entry["attacks"][name] = {
            "recovered": [bool(row.recovered) for row in scores.per_sample],
            "expected": scores.expected_by_chance,
            "threshold": scores.metrics["ncc"].threshold_null99,
            "ncc": rounded(ncc(flat, x).abs().amax(1)),
            "cosine": rounded(cosine.abs().amax(1)),
            **more,
        }
    entry["seconds"] = {name: round(value, 1) for name, value in took.items()}
    return entry


def ranking(folder: Path, pool: str, device: str, workers: int) -> None:
    """Measure networks of every kind. Large networks come first and run on the device."""
    seeds = (
        {name: list(kind.tuned) for name, kind in KINDS.items()}
        if pool == "tune"
        else {name: read_seeds()[name] for name in CLAIMED}
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cancer", "diabetes"):
        bundled_table(name, folder)
    large = [name for name in seeds if KINDS[name].data in ("mnist", "cifar10")]
    jobs = {
        f"{name}/{k}": (KINDS[name], seed, str(folder), pool, device if name in large else "cpu")
        for name in [*large, *(name for name in seeds if name not in large)]
        for k, seed in enumerate(seeds[name])
    }
    head = {"pool": pool, "seeds": seeds, "environment": environment(device)}
    file = RANKING if pool == "claim" else TUNING
    run_cases(file, head, jobs, measure_network, workers)


def outcomes(case: dict[str, Any], known_sign: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Return which records are recovered by each attack, by the strongest attack, and by any attack.

    Args:
        case: Results of a network.
        known_sign: If True, a source of unmix counts with the sign that unmix gave to it. Otherwise it counts
            with either sign.

    Returns:
        Booleans, one for each record, by the name of the attack, and for "strongest" and "any".
    """
    ran = {
        name: np.array(
            scores.get(SIGNED, scores["recovered"]) if known_sign else scores["recovered"]
        )
        for name, scores in case["attacks"].items()
        if "recovered" in scores
    }
    best = max(ran, key=lambda name: ran[name].sum())
    return {**ran, "strongest": ran[best], "any": np.any(list(ran.values()), 0)}


def has_ranking(outcome: np.ndarray[Any, Any]) -> bool:
    """Return True if at least ``FEWEST`` records are recovered and as many are not."""
    return FEWEST <= outcome.sum() <= len(outcome) - FEWEST


def area(values: Iterable[float | None], outcome: np.ndarray[Any, Any], sign: int = 1) -> float:
    """Return the area under the curve of a figure for an outcome."""
    scores = np.array([sign * (-1e9 if v is None else v) for v in values], dtype=float)
    return area_under_curve(scores, outcome)


def fit() -> None:
    """Print the coefficients of ``risk/run.py`` from the tuning networks, and check them on other kinds."""
    from sklearn.linear_model import LogisticRegression

    cases = json.loads(TUNING.read_text())["cases"]
    floor = 1e-4

    def table(case: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        records = {k: np.array(v, dtype=float) for k, v in case["records"].items()}
        n, ones = case["n"], np.ones(case["n"])
        return {
            "missed": np.log(1 - records["heard"] + floor),
            "outside": np.log(1 - records["reach_ncc"] ** 2 + floor),
            "own": np.log(records["own_over_misfit"] + floor),
            "wide": ones * math.log(case["values"] / n),
            "crowd": ones * math.log(n / case["rank"]),
        }

    def logistic(names: list[str], chosen: list[dict[str, Any]], outcome: str) -> Any:
        x = np.concatenate([np.stack([table(c)[k] for k in names], 1) for c in chosen])
        y = np.concatenate([outcomes(c)[outcome] for c in chosen])
        weight = np.concatenate([np.full(c["n"], 40 / c["n"]) for c in chosen])
        return LogisticRegression(C=100, max_iter=3000).fit(x, y, sample_weight=weight)

    spanned = {
        k: c for k, c in cases.items() if c["rank"] is not None and c["rank"] < 0.9 * c["values"]
    }
    models = {"stationarity": ["missed", "own"], "unmix": ["outside", "own", "wide", "crowd"]}
    odds, truth, weight = [], [], []
    for key, case in spanned.items():
        remaining = [c for k, c in spanned.items() if k.split("/")[0] != key.split("/")[0]]
        neither = np.ones(case["n"])
        for attacked, names in models.items():
            model = logistic(names, [c for c in remaining if attacked in outcomes(c)], attacked)
            neither *= model.predict_proba(np.stack([table(case)[k] for k in names], 1))[:, 0]
        either = np.clip(1 - neither, 1e-12, 1 - 1e-12)
        odds.append(np.log(either / (1 - either)))
        truth.append(outcomes(case)["any"])
        weight.append(np.full(case["n"], 40 / case["n"]))
    joined = LogisticRegression(C=1e6).fit(
        np.concatenate(odds)[:, None], np.concatenate(truth), sample_weight=np.concatenate(weight)
    )
    for attacked, names in models.items():
        model = logistic(names, [c for c in spanned.values() if attacked in outcomes(c)], attacked)
        print(attacked, ["1", *names], [*model.intercept_.round(3), *model.coef_[0].round(3)])
    print("either", [*joined.intercept_.round(3), *joined.coef_[0].round(3)])
    alone = logistic(["own", "wide"], list(cases.values()), "any")
    print("own alone", [*alone.intercept_.round(3), *alone.coef_[0].round(3)])
    ranks = []
    for value, case in zip(odds, spanned.values(), strict=True):
        if has_ranking(who := outcomes(case)["strongest"]):
            ranks.append((area(value.tolist(), who), area(case["records"]["margin"], who, -1)))
    print("kinds left out: mean area of score and margin", np.mean(ranks, 0).round(3), len(ranks))


def picture(out: Path) -> None:
    """Draw the share of recovered records over the predicted probability, in tenths."""
    from residuum.report import drawing

    figure = drawing.new_figure(4.2, 3.8)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#BBBBBB", lw=1)
    for path, label, color in (
        (TUNING, "tuning victims", "#999999"),
        (RANKING, "fresh victims", drawing.BLUE),
    ):
        if not path.exists():
            continue
        cases = json.loads(path.read_text())["cases"].values()
        p = np.concatenate([c["records"]["probability"] for c in cases])
        who = np.concatenate([outcomes(c)["any"] for c in cases])
        points = [
            (p[in_bin].mean(), who[in_bin].mean(), in_bin.sum())
            for k in range(10)
            if (in_bin := (p >= k / 10) & (p < k / 10 + 0.1)).any()
        ]
        x, y, size = map(list, zip(*points, strict=True))
        axes.scatter(x, y, s=[8 + v / 8 for v in size], color=color, label=label, zorder=3)
        axes.plot(x, y, color=color, lw=1)
    axes.set_xlabel("probability", fontsize=8.5)
    axes.set_ylabel("share recovered by an attack", fontsize=8.5)
    axes.legend(fontsize=7.5, frameon=False)
    drawing.tidy(axes)
    out.write_bytes(drawing.encode_png(figure))


def main() -> int:
    """Run a command of the head of this file."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train, expose and attack the networks without a result")
    run.add_argument("folder", type=Path, help="folder of the images")
    run.add_argument("--device", default="cpu")
    run.add_argument("--jobs", type=int, default=1)
    run.add_argument("--pool", choices=("claim", "tune"), default="claim")
    commands.add_parser("fit", help="print the coefficients of risk/run.py")
    commands.add_parser("draw", help="draw the seeds of all exposure experiments")
    image = commands.add_parser("picture", help="draw the calibration of the probability")
    image.add_argument("path", type=Path, help="PNG file")
    options = parser.parse_args()
    if options.command == "run":
        ranking(options.folder, options.pool, options.device, options.jobs)
    elif options.command == "fit":
        fit()
    elif options.command == "draw":
        draw()
    else:
        picture(options.path)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
