"""Exposure measured: its ranking, its calls, records left out, epsilon as a bound, and what it costs.

    python -m benchmarks.unmix data SOURCE FOLDER                images for claims, others for tuning
    python -m benchmarks.exposure ranking FOLDER --pool tune     victims that formulas were chosen on
    python -m benchmarks.exposure fit                            coefficients of risk/run.py, by those
    python -m benchmarks.exposure draw                           seeds of claims, formulas being committed
    python -m benchmarks.exposure ranking FOLDER --device cuda   26 victims, attacks, scores (--jobs N)
    python -m benchmarks.exposure kinks FOLDER --device cuda     CIFAR n = 100: members, halves, strangers
    python -m benchmarks.exposure leftout FOLDER --jobs 16       20 records x 3 seeds, trained without
    python -m benchmarks.exposure epsilon                        DP-SGD at 1, 4, 8, and none (opacus)
    python -m benchmarks.exposure speed                          two sizes, seconds and memory
    python -m benchmarks.exposure picture PNG                    reliability of the probability

Each writes ``benchmarks/results/exposure-NAME.json`` after every victim and goes on where it was stopped;
``tables_of_exposure.py`` sets them beside what was wanted.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import RESULTS, draw_seeds, ended
from residuum.attacks import Auto, Unmix, attack
from residuum.datasets import load_dataset
from residuum.errors import InputError
from residuum.evaluation import score
from residuum.evaluation.roc import area_under_curve
from residuum.evaluation.scoring import all_candidates
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Split, write_json
from residuum.records.exposure import Exposure
from residuum.records.rundir import environment
from residuum.risk.run import expose
from residuum.risk.stages import Canaries
from residuum.similarity import ncc
from residuum.training import TrainingConfig, initialize, train

SEEDS_FILE = RESULTS / "exposure-seeds.json"  # of kinks and epsilon
AGAIN_FILE = RESULTS / "exposure-seeds-again.json"  # of what the score decides, since it was mended
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
    """Victims of one kind: records, hidden layers, training, and the seeds of those to tune on."""

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
KINKED, KINK_RECORDS, KINK_HIDDEN = 20, 100, "1000-1000"
KINK_TRAINING = TrainingConfig(steps=5000, dtype="float32")
LEFT_OUT = {"digits": ("digits", 40, "100-100"), "mnist": ("mnist", 50, "200-200")}
LEFT_RECORDS, LEFT_SEEDS, LEFT_STEPS = 20, 3, 1500
EPSILONS, EPSILON_RUNS, CANARIES = (1.0, 4.0, 8.0, math.inf), 20, 400


# ---- what all measurements share ----


def _table(name: str, folder: Path) -> str:
    """An .npz of one of scikit-learn's bundled tables, two classes.

    cancer: 30 standardized columns; diabetes: 10 columns cut at their fifths, 50 columns of 0 and 1.
    """
    from sklearn import datasets

    path = folder / f"{name}.npz"
    if not path.exists():
        found = getattr(datasets, f"load_{ {'cancer': 'breast_cancer'}.get(name, name) }")()
        x, y = found.data, found.target
        if name == "cancer":
            x = (x - x.mean(0)) / x.std(0)
        else:
            fifths = [np.quantile(column, (0.2, 0.4, 0.6, 0.8)) for column in x.T]
            cut = [np.searchsorted(at, column) for at, column in zip(fifths, x.T, strict=True)]
            x, y = np.eye(5)[np.stack(cut, 1)].reshape(len(x), -1), (y > np.median(y)).astype(int)
        np.savez(path, x=x, y=y)
    return str(path)


def _split(data: str, n: int, seed: int, folder: str, pool: str, **more: Any) -> Split:
    if data in ("cancer", "diabetes"):
        data = _table(data, Path(folder))
    return load_dataset(data, n, seed=seed, root=str(Path(folder) / pool), **more)


def _run(
    name: str,
    head: dict[str, Any],
    jobs: dict[str, tuple[Any, ...]],
    work: Callable[..., dict[str, Any]],
    workers: int,
) -> dict[str, Any]:
    """Every job that is not in the file yet, side by side; the file is written after each."""
    path = RESULTS / f"exposure-{name}.json"
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {**head, "cases": {}}
    if {k: done.get(k) for k in head if k != "environment"} != {
        k: json.loads(json.dumps(v)) for k, v in head.items() if k != "environment"
    }:
        raise InputError(f"{path.name} is of another run.", "Move it away.")
    left = {key: job for key, job in jobs.items() if key not in done["cases"]}
    start = time.time()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        waiting = {processes.submit(work, *job): key for key, job in left.items()}
        for one in as_completed(waiting):
            done["cases"][waiting[one]] = one.result()
            done["cases"] = dict(sorted(done["cases"].items()))
            write_json(path, done)
            print(
                f"{waiting[one]}: {len(done['cases'])} done, {time.time() - start:.0f} s",
                flush=True,
            )
    return done


def _seeds(path: Path = AGAIN_FILE) -> dict[str, list[int]]:
    return dict(json.loads(path.read_text())["seeds"])


def draw() -> None:
    """Of everything that a claim is made on and whose seeds are not drawn yet."""
    fixed = {"kinks": KINKED} | {f"epsilon-{e:g}": EPSILON_RUNS for e in EPSILONS}
    scored = dict.fromkeys(CLAIMED, VICTIMS) | {"leftout": LEFT_SEEDS}
    for path, counts in ((SEEDS_FILE, fixed), (AGAIN_FILE, scored)):
        if not path.exists():
            draw_seeds(path, seeds=counts)


def _plain(values: Tensor) -> list[float | None]:
    return [round(v, 5) if math.isfinite(v) else None for v in values.double().tolist()]


# ---- ranking: who is recovered, and the probability of it ----


def ranked_victim(kind: Kind, seed: int, folder: str, pool: str, device: str) -> dict[str, Any]:
    """Train, expose, attack twice; one entry of figures and outcomes per record.

    Device: of the training and of stationarity; unmix has its 40 seconds on the CPU always.
    """
    torch.set_num_threads(1)
    split = _split(kind.data, kind.n, seed, folder, pool)
    shape = split.train.shape
    arch = f"mlp:{math.prod(shape)}-{kind.hidden}-1"
    start = time.time()
    state = train(arch, split.train, kind.training.changed(seed=seed), device=device)
    took = {"training": time.time() - start}
    released = Network(state.theta, arch, shape)
    found = expose(released, split.train, split.holdout)
    # The product withholds the probability where this benchmark found it wrong.
    checked = found.replace(probability=found.score.sigmoid())
    took["exposure"] = found.seconds
    granted = {"value_range": (0, 1), "mean": split.train.mean} if len(shape) > 1 else {}
    knowledge = Knowledge(shape=shape, **granted)
    entry: dict[str, Any] = {
        "seed": seed,
        "n": kind.n,
        "values": math.prod(shape),
        "device": device,
        "rank": found.rank,
        "misfit": found.misfit,
        "called": found.called,
        "expected": float(found.score.sigmoid().sum()),
        "loss": state.history[-1]["loss"],
        "records": {name: _plain(getattr(checked, name)) for name in FEATURES},
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
            told = judge(x)
            more[SIGNED] = [bool(row.recovered) for row in told.per_sample]
        else:
            scores = judge(x)
        unit = torch.nn.functional.normalize
        cosine = unit(flat.flatten(1)) @ unit(x.flatten(1)).T
        entry["attacks"][name] = {
            "recovered": [bool(row.recovered) for row in scores.per_sample],
            "expected": scores.expected_by_chance,
            "threshold": scores.metrics["ncc"].threshold_null99,
            "ncc": _plain(ncc(flat, x).abs().amax(1)),
            "cosine": _plain(cosine.abs().amax(1)),
            **more,
        }
    entry["seconds"] = {name: round(value, 1) for name, value in took.items()}
    return entry


def ranking(folder: Path, pool: str, device: str, workers: int) -> None:
    """Victims of every kind, the large ones first and on the device, small ones on the CPU."""
    seeds = (
        {name: list(kind.tuned) for name, kind in KINDS.items()}
        if pool == "tune"
        else {name: _seeds()[name] for name in CLAIMED}
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cancer", "diabetes"):
        _table(name, folder)
    large = [name for name in seeds if KINDS[name].data in ("mnist", "cifar10")]
    jobs = {
        f"{name}/{k}": (KINDS[name], seed, str(folder), pool, device if name in large else "cpu")
        for name in [*large, *(name for name in seeds if name not in large)]
        for k, seed in enumerate(seeds[name])
    }
    head = {"pool": pool, "seeds": seeds, "environment": environment(device)}
    _run("ranking" if pool == "claim" else "tuning", head, jobs, ranked_victim, workers)


def outcomes(case: dict[str, Any], told: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Who is recovered: by each attack that ran, by the strongest one, and by any.

    Sources of unmix count up to their sign; told: with the sign that unmix gave them.
    """
    ran = {
        name: np.array(one.get(SIGNED, one["recovered"]) if told else one["recovered"])
        for name, one in case["attacks"].items()
        if "recovered" in one
    }
    best = max(ran, key=lambda name: ran[name].sum())
    return {**ran, "strongest": ran[best], "any": np.any(list(ran.values()), 0)}


def has_ranking(outcome: np.ndarray[Any, Any]) -> bool:
    """Whether enough records are recovered and enough are not."""
    return FEWEST <= outcome.sum() <= len(outcome) - FEWEST


def area(values: Iterable[float | None], outcome: np.ndarray[Any, Any], sign: int = 1) -> float:
    """Of a figure for an outcome."""
    scores = np.array([sign * (-1e9 if v is None else v) for v in values], dtype=float)
    return area_under_curve(scores, outcome)


def fit() -> None:
    """Coefficients of ``risk/run.py`` from the tuning victims, and how they do on kinds left out."""
    from sklearn.linear_model import LogisticRegression

    cases = json.loads((RESULTS / "exposure-tuning.json").read_text())["cases"]
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

    def logistic(names: list[str], some: list[dict[str, Any]], outcome: str) -> Any:
        x = np.concatenate([np.stack([table(c)[k] for k in names], 1) for c in some])
        y = np.concatenate([outcomes(c)[outcome] for c in some])
        weight = np.concatenate([np.full(c["n"], 40 / c["n"]) for c in some])
        return LogisticRegression(C=100, max_iter=3000).fit(x, y, sample_weight=weight)

    spanned = {
        k: c for k, c in cases.items() if c["rank"] is not None and c["rank"] < 0.9 * c["values"]
    }
    models = {"stationarity": ["missed", "own"], "unmix": ["outside", "own", "wide", "crowd"]}
    odds, truth, weight = [], [], []
    for key, case in spanned.items():
        others = [c for k, c in spanned.items() if k.split("/")[0] != key.split("/")[0]]
        neither = np.ones(case["n"])
        for attacked, names in models.items():
            model = logistic(names, [c for c in others if attacked in outcomes(c)], attacked)
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


# ---- kinks: members, sets of half members, strangers ----


def kinked_victim(
    seed: int, folder: str, pool: str, device: str, hidden: str, steps: int
) -> dict[str, Any]:
    """A network on 100 CIFAR images: who is called of its members, of a set of half members, of strangers."""
    torch.set_num_threads(1)
    # Twice as many are drawn: one half is trained on, the other is of the same kind and never seen.
    whole = _split("cifar10", 2 * KINK_RECORDS, seed, folder, pool, center=False, holdout=2000)
    y = whole.train.y
    order = torch.cat([(y == label).nonzero()[:, 0] for label in y.unique()])
    members = order.reshape(2, -1)[:, : KINK_RECORDS // 2].flatten()
    strangers = order.reshape(2, -1)[:, KINK_RECORDS // 2 :].flatten()
    mean = whole.train.x[members].mean(0)
    x, held = whole.train.x - mean, Dataset(whole.holdout.x - mean, whole.holdout.y)
    arch = f"mlp:{x[0].numel()}-{hidden}-1"
    config = KINK_TRAINING.changed(seed=seed, steps=steps)
    start = time.time()
    state = train(arch, Dataset(x[members], y[members]), config, device=device)
    trained = time.time() - start
    released = Network(state.theta, arch, tuple(x.shape[1:]))
    both = torch.cat([members, strangers])
    found = {}
    start = time.time()
    for name, some in (("members", members), ("half", both), ("strangers", strangers)):
        found[name] = expose(released, Dataset(x[some], y[some]), held, device=device)
    called = {name: one.kink_q <= one.level for name, one in found.items()}
    dual = found["half"].dual_p <= 0.01
    n = KINK_RECORDS
    return {
        "seed": seed,
        "loss": state.history[-1]["loss"],
        "train_seconds": round(trained, 1),
        "expose_seconds": round((time.time() - start) / 3, 2),
        "rank": found["members"].rank,
        "members called": int(called["members"].sum()),
        "strangers called": int(called["strangers"].sum()),
        "half: members called": int(called["half"][:n].sum()),
        "half: strangers called": int(called["half"][n:].sum()),
        "kinks of members": float(found["members"].kinks.sum(1).double().mean()),
        "kinks of strangers": float(found["strangers"].kinks.sum(1).double().mean()),
        "dual p <= 0.01: members": int(dual[:n].sum()),
        "dual p <= 0.01: strangers": int(dual[n:].sum()),
        "median reach_ncc: members": float(found["members"].reach_ncc.median()),
        "median reach_ncc: strangers": float(found["strangers"].reach_ncc.median()),
    }


def kinks(folder: Path, pool: str, device: str, workers: int, hidden: str, steps: int) -> None:
    """Twenty networks."""
    seeds = _seeds(SEEDS_FILE)["kinks"] if pool == "claim" else [9901, 9902]
    jobs = {
        f"{k:02}": (seed, str(folder), pool, device, hidden, steps) for k, seed in enumerate(seeds)
    }
    head = {
        "pool": pool,
        "seeds": seeds,
        "hidden": hidden,
        "steps": steps,
        "environment": environment(device),
    }
    name = (
        "kinks"
        if (pool, hidden, steps) == ("claim", KINK_HIDDEN, KINK_TRAINING.steps)
        else "kinks-tuning"
    )
    _run(name, head, jobs, kinked_victim, workers)


# ---- left out: the same network without a record ----


def without(data: Dataset, index: int) -> tuple[Dataset, Dataset]:
    """The records without one, and with it as the last."""
    kept = [i for i in range(len(data)) if i != index]
    rest = Dataset(data.x[kept], data.y[kept])
    every = [*kept, index]
    return rest, Dataset(data.x[every], data.y[every])


def left_out(case: str, seed: int, folder: str, pool: str) -> dict[str, Any]:
    """Exposure of records when in, and of the same records appended when the network never saw them."""
    torch.set_num_threads(1)
    name, n, hidden = LEFT_OUT[case]
    split = _split(name, n, seed, folder, pool)
    arch = f"mlp:{split.train.x[0].numel()}-{hidden}-1"
    config = TrainingConfig(steps=LEFT_STEPS, dtype="float32", seed=seed)

    def exposed(data: Dataset, records: Dataset) -> Exposure:
        return expose(Network(train(arch, data, config).theta, arch), records)

    inside = exposed(split.train, split.train)
    drawn = np.random.default_rng(seed).choice(n, LEFT_RECORDS, replace=False).tolist()
    names = ("score", "own_over_misfit", "multiplier", "heard", "reach", "margin", "dual")
    entry: dict[str, Any] = {"seed": seed, "n": n, "records": drawn, "in": {}, "out": {}}
    outside = [exposed(*without(split.train, i)) for i in drawn]
    for figure in names:
        entry["in"][figure] = _plain(getattr(inside, figure)[drawn])
        entry["out"][figure] = _plain(torch.stack([getattr(one, figure)[-1] for one in outside]))
    return entry


def leftout(folder: Path, pool: str, workers: int) -> None:
    """Twenty records of three networks each."""
    seeds = _seeds()["leftout"] if pool == "claim" else [9801]
    jobs = {
        f"{case}/{k}": (case, seed, str(folder), pool)
        for case in LEFT_OUT
        for k, seed in enumerate(seeds)
    }
    head = {"pool": pool, "seeds": seeds, "environment": environment("cpu")}
    _run("leftout" if pool == "claim" else "leftout-tuning", head, jobs, left_out, workers)


# ---- epsilon: canaries in networks of known privacy ----


def canary_run(epsilon: float, seed: int) -> dict[str, Any]:
    """Digits, a coin per canary, DP-SGD at ``epsilon`` (plain training at infinity), and the bound."""
    from residuum.defenses import Training
    from residuum.defenses.catalog import use_dp_sgd
    from residuum.defenses.loops import Job, train_privately

    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    split = load_dataset("digits", 500 + CANARIES, seed=seed, holdout=100)
    order = torch.from_numpy(rng.permutation(500 + CANARIES))
    x, y = split.train.x[order], split.train.y[order]
    flipped = torch.from_numpy(
        rng.random(CANARIES) < 0.5
    )  # labels of canaries by a coin of their own
    inserted = torch.from_numpy(rng.random(CANARIES) < 0.5)
    labels = torch.where(flipped, -y[:CANARIES], y[:CANARIES])
    canaries = Dataset(x[:CANARIES], labels)
    data = Dataset(
        torch.cat([x[:CANARIES][inserted], x[CANARIES:]]),
        torch.cat([labels[inserted], y[CANARIES:]]),
    )
    arch = "mlp:64-100-100-1"
    descent = TrainingConfig(method="gd", steps=3000, lr=0.5, momentum=0.9, seed=seed)
    facts: dict[str, Any] = {}
    delta = 1 / (10 * len(data))
    if math.isinf(epsilon):
        theta = train(arch, data, descent).theta
    else:
        training = use_dp_sgd(Training(descent, descent, len(data)), epsilon, seed)
        state, facts = train_privately(Job(arch, data, training.config, "binary"), epsilon=epsilon)
        theta = state.theta
    found = expose(
        Network(theta, arch), data, canaries=Canaries(canaries, inserted, 0.95, delta)
    ).canaries
    assert found is not None
    pure = expose(Network(theta, arch), data, canaries=Canaries(canaries, inserted)).canaries
    assert pure is not None
    return {
        "seed": seed,
        "delta": delta,
        "spent": facts.get("epsilon"),
        "bound": found.epsilon,
        "bound at delta 0": pure.epsilon,
        "auc": found.auc,
        "statistic": found.statistic,
        "guesses": found.guesses,
        "right": found.right,
        "true positives": {f"{p.rate:g}": p.true_rate for p in found.points},
    }


def epsilon(workers: int, pool: str) -> None:
    """Twenty networks of each."""
    jobs, used = {}, {}
    for value in EPSILONS:
        seeds = _seeds(SEEDS_FILE)[f"epsilon-{value:g}"] if pool == "claim" else [9701, 9702]
        used[f"{value:g}"] = seeds
        jobs |= {f"{value:g}/{k:02}": (value, seed) for k, seed in enumerate(seeds)}
    head = {"pool": pool, "seeds": used, "canaries": CANARIES, "environment": environment("cpu")}
    _run("epsilon" if pool == "claim" else "epsilon-tuning", head, jobs, canary_run, workers)


# ---- speed ----


def speed_case(n: int, arch: str, device: str, threads: int) -> dict[str, Any]:
    """Seconds and peak memory of one exposure, in a process of its own.

    Records near a few hundred patterns, as images are, and a first layer that mixes them.
    """
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    d, h = (int(part) for part in arch.split(":")[1].split("-")[:2])
    patterns = torch.randn(min(d, 300), d, generator=generator)
    fall = torch.linspace(0, -2, len(patterns)).exp()
    x = (torch.randn(n + 1000, len(patterns), generator=generator) * fall) @ patterns / d**0.5
    y = torch.where(torch.randn(n + 1000, generator=generator) > 0, 1.0, -1.0)
    model = initialize(Architecture.parse(arch), TrainingConfig(dtype="float32"))
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    mixed = torch.randn(h, min(n, 5000), generator=generator) @ x[: min(n, 5000)]
    theta["layers.0.weight"] += mixed / min(n, 5000)
    released, held = Network(theta, arch), Dataset(x[n:], y[n:])
    if device != "cpu":
        expose(released, held, held, device=device)  # the first products choose their kernels
    start = time.perf_counter()
    found = expose(released, Dataset(x[:n], y[:n]), held, device=device)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "n": n,
        "arch": arch,
        "device": device,
        "threads": threads,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_gb": round(peak / 2**20, 2),
        "gap": found.gap,
        "rank": found.rank,
    }


def speed(device: str, threads: int) -> None:
    """Two sizes."""
    jobs = {
        "n=500, 3072-1000-1000-1": (500, "mlp:3072-1000-1000-1", device, threads),
        "n=50000, 64-100-100-1": (50_000, "mlp:64-100-100-1", device, threads),
    }
    head = {"device": device, "environment": environment(device)}
    _run(f"speed-{device}", head, jobs, speed_case, 1)


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"exposure-{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def picture(out: Path) -> None:
    """Share recovered over predicted probability, in tenths, claims and tuning victims."""
    from residuum.report import drawing

    figure = drawing.new_figure(4.2, 3.8)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#BBBBBB", lw=1)
    for name, color in (("tuning", "#999999"), ("ranking", drawing.BLUE)):
        if (found := _load(name)) is None:
            continue
        p = np.concatenate([c["records"]["probability"] for c in found["cases"].values()])
        who = np.concatenate([outcomes(c)["any"] for c in found["cases"].values()])
        points = [
            (p[mine].mean(), who[mine].mean(), mine.sum())
            for k in range(10)
            if (mine := (p >= k / 10) & (p < k / 10 + 0.1)).any()
        ]
        x, y, size = map(list, zip(*points, strict=True))
        label = {"tuning": "tuning victims", "ranking": "fresh victims"}[name]
        axes.scatter(x, y, s=[8 + v / 8 for v in size], color=color, label=label, zorder=3)
        axes.plot(x, y, color=color, lw=1)
    axes.set_xlabel("probability", fontsize=8.5)
    axes.set_ylabel("share recovered by an attack", fontsize=8.5)
    axes.legend(fontsize=7.5, frameon=False)
    drawing.tidy(axes)
    out.write_bytes(drawing.encode_png(figure))


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "command",
        choices=(
            "ranking",
            "fit",
            "draw",
            "kinks",
            "leftout",
            "epsilon",
            "speed",
            "picture",
        ),
    )
    parser.add_argument(
        "path", type=Path, nargs="?", help="folder of images, or the picture to write"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pool", choices=("claim", "tune"), default="claim")
    parser.add_argument("--hidden", default=KINK_HIDDEN, help="of kinks, to try it small")
    parser.add_argument("--steps", type=int, default=KINK_TRAINING.steps, help="likewise")
    o = parser.parse_args()
    if o.command in ("ranking", "kinks", "leftout", "picture") and o.path is None:
        parser.error(f"{o.command} needs a path")
    actions: dict[str, Callable[[], None]] = {
        "ranking": lambda: ranking(o.path, o.pool, o.device, o.jobs),
        "fit": fit,
        "draw": draw,
        "kinks": lambda: kinks(o.path, o.pool, o.device, o.jobs, o.hidden, o.steps),
        "leftout": lambda: leftout(o.path, o.pool, o.jobs),
        "epsilon": lambda: epsilon(o.jobs, o.pool),
        "speed": lambda: speed(o.device, o.threads),
        "picture": lambda: picture(o.path),
    }
    actions[o.command]()
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
