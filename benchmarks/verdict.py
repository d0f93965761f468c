"""How often is the verdict wrong, and what is "no leak found" worth? ``python -m benchmarks.verdict``.

Each case is a function of a seed that returns one row; ``CASES`` says with which seeds it is run and
what must hold of all its rows. Rows are kept in ``results/verdict.json`` as they are finished, so that a
run that was stopped goes on; ``--jobs`` processes work side by side, ``--only`` names cases, ``--data`` is
the folder of MNIST and CIFAR-10 (else ``$RESIDUUM_DATA``; without either these cases are left out).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import residuum as rs
from benchmarks.harness import RESULTS, Report, ended, only_on
from residuum import similarity
from residuum.attacks import attack, make_attack
from residuum.auditing.certificates import Certificates
from residuum.auditing.controls import (
    SampleSets,
    explain_by_knowledge,
    run_controls,
    set_aside_repeats,
)
from residuum.auditing.outcomes import CLASS_LEVEL, NEAR_COPY, RESEMBLANCE
from residuum.auditing.plan import limit_of
from residuum.auditing.request import AuditRequest
from residuum.auditing.result import AuditResult
from residuum.auditing.scores import findings, grades, run_tests
from residuum.auditing.verdict import LEAK
from residuum.errors import ResiduumError
from residuum.evaluation.matching import as_array
from residuum.evaluation.scoring import CandidatePool, all_candidates
from residuum.io.checkpoints import as_network
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction, Split, write_json
from residuum.records.rundir import environment
from residuum.stationarity import parameters
from residuum.training import TrainingConfig, initialize, make_release, train

FILE = RESULTS / "verdict.json"
ARCH, POOL = "mlp:64-100-100-1", 500
Row = dict[str, Any]
FAULTS = (ValueError, RuntimeError, AssertionError, ResiduumError)
CHECKS = ("negative controls", "positive controls")  # stages
# Names of the grades in the stored results.
STORED_GRADES = {NEAR_COPY: "near-copy", RESEMBLANCE: "resembles", CLASS_LEVEL: "class-like"}


@dataclass(frozen=True)
class Case:
    """One question: asked of every seed, and what must hold of the rows; data: needs other images."""

    run: Callable[[int], Row]
    seeds: range
    holds: Callable[[list[Row]], bool]
    must: str
    data: bool = False


# networks and claims


def digits(seed: int, n: int, *, pool: int | None = POOL, center: bool = True) -> Split:
    return rs.load_dataset("digits", n, seed=seed, holdout=pool, center=center)


def victim(seed: int, n: int = 40, steps: int = 2000) -> tuple[Network, Split]:
    """A network trained on digits to its margin; every other digit is held out."""
    split = digits(seed, n, pool=None)
    state = train(ARCH, split.train, TrainingConfig(steps=steps, seed=seed))
    return make_release(state, ARCH, split.train, "binary"), split


def random_network(seed: int, arch: str = ARCH) -> Network:
    start = TrainingConfig(init="default", seed=seed)
    return Network(
        parameters(initialize(Architecture.parse(arch), start)), arch, (1, 8, 8), task="binary"
    )


def granted(data: Dataset, mean: bool) -> Knowledge:
    known = Knowledge(sample_count=len(data))
    if not mean:
        return known
    return known.replace(value_range=(0.0, 1.0), mean=data.mean, provenance={"mean": "train"})


def audited(checkpoint: Network, split: Split, known: Knowledge, **options: Any) -> AuditResult:
    """A whole audit without its certificates, which decide nothing."""
    with mock.patch("residuum.auditing.stages.compute_certificates", return_value=Certificates()):
        return rs.audit(
            checkpoint,
            data=split.train,
            holdout=split.holdout,
            knowledge=known,
            baselines=False,
            **options,
        )


def outcome(found: AuditResult) -> Row:
    verdict, controls = found.verdict, found.checks.positive_controls
    limit = limit_of(AuditRequest(effort=found.settings["effort"], budget=found.settings["budget"]))
    ran = [row for row in found.attacks if row.ran and row.decides]
    return {
        "outcome": verdict.outcome,
        "exit": verdict.exit_code,
        "recovered": verdict.recovered,
        "expected": verdict.expected_by_chance,
        "p": verdict.p_value,
        "grade": verdict.grade,
        "residual": [row.residual for row in ran],
        "told_apart": found.checks.told_apart,
        "fits": found.fit is not None and not found.fit.is_doubtful,
        "positive controls": {control.question: control.samples for control in controls},
        "failures": len(found.checks.failures),
        "seconds": found.seconds,
        "checks_share": sum(found.seconds.get(stage, 0.0) for stage in CHECKS) / limit,
    }


def tested(pools: dict[str, torch.Tensor], claim: SampleSets, seed: int) -> Any:
    """What candidates find by themselves, each pool a test."""
    made = {name: _pool(x) for name, x in pools.items()}
    tests, _ = run_tests(made, claim, seed, 2000, float("inf"))
    return findings(tests, len(claim.train))


def _pool(x: torch.Tensor) -> CandidatePool:
    return CandidatePool(x, torch.ones(len(x)))


# level


def level(seed: int) -> Row:
    """A network that never saw the claimed digits, their own mean granted or not, 1 to 12 tests."""
    number = seed - 100
    network, mean = ("random", "other digits")[number % 2], number // 2 % 2 == 0
    n, count = (20, 50)[number // 4 % 2], 1 + number % 12
    both = digits(seed, 2 * n, center=False)
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(seed))
    own, claim = (
        both.train.replace(x=both.train.x[half], y=both.train.y[half], mean=None)
        for half in (order[:n], order[n:])
    )
    pool = both.holdout.replace(mean=None)
    if mean:
        own = own.replace(x=own.x - own.x.mean(0))
        center = claim.x.mean(0)
        claim, pool = (data.replace(x=data.x - center, mean=center) for data in (claim, pool))
    if network == "random":
        checkpoint = random_network(seed)
    else:
        state = train(ARCH, own, TrainingConfig(steps=1000, seed=seed))
        checkpoint = make_release(state, ARCH, own, "binary")
    known = granted(claim, mean)
    found = audited(
        checkpoint,
        Split(claim, pool),
        known,
        attacks=[{"attack": "binary-kkt", "restarts": count, "steps": 300}],
        seed=seed,
        positive_controls=False,
    )
    part = found.reconstructions[0]
    several = tested(
        {str(k): part.x[part.run == k] for k in range(count)}, SampleSets(claim, pool), seed
    )
    return outcome(found) | {
        "network": network,
        "mean": mean,
        "n": n,
        "tests": count,
        "leak_over_tests": bool(several.survivors),
    }


def mean_only(seed: int) -> Row:
    """Candidates of the training mean less a public one, made without any network."""
    n, centered, noise = (10, 50)[seed % 2], seed // 2 % 2 == 0, (0.1, 0.5, 1.0)[seed // 4 % 3]
    split = digits(seed, n, pool=None, center=False)
    order = torch.randperm(len(split.holdout), generator=torch.Generator().manual_seed(seed))
    mean = split.train.x.mean(0)
    public = split.holdout.x[order[600:]].mean(0)
    shift = mean if centered else torch.zeros_like(mean)
    train_set, pool = (
        data.replace(x=data.x[rows] - shift, y=data.y[rows], mean=mean if centered else None)
        for data, rows in ((split.train, torch.arange(n)), (split.holdout, order[:600]))
    )
    direction = (mean - public).flatten()
    direction = (direction - direction.mean()) / (direction - direction.mean()).norm()
    rng = np.random.default_rng((seed, 9))
    scatter = torch.from_numpy(rng.standard_normal((2 * n, direction.numel())))
    x = (direction + noise * scatter / direction.numel() ** 0.5).reshape(-1, *train_set.shape)
    claim = SampleSets(train_set, pool)
    found = tested({"mean": x}, claim, seed)
    controls = run_controls(claim, Knowledge(mean=mean, value_range=(0.0, 1.0)), seed)
    caught = bool(controls.failures or explain_by_knowledge(controls, found.samples))
    return {"n": n, "noise": noise, "leak": bool(found.survivors), "caught": caught}


# power


def power(seed: int) -> Row:
    """Twelve tests, one of which finds 8 of 40."""
    split = digits(seed, 40, pool=400)
    rng = np.random.default_rng(seed)

    def noise(m: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((m, *split.train.shape)))

    pools = {str(k): noise(80) for k in range(11)}
    pools["one"] = torch.cat([split.train.x[:8] + 0.15 * noise(8), noise(72)])
    found = tested(pools, SampleSets(split.train, split.holdout), seed)
    return {"survivors": list(found.survivors), "p": found.p_value, "recovered": found.recovered}


def leaking(seed: int) -> Row:
    """The leaking digits victims, whole audits, with and without the mean granted."""
    checkpoint, split = victim(seed)
    row: Row = {}
    for name, mean in (("mean", True), ("none", False)):
        found = audited(
            checkpoint,
            split,
            granted(split.train, mean),
            attacks=[{"attack": "binary-kkt", "restarts": 4, "steps": 1500}],
            seed=seed,
        )
        row |= {f"{name}: {key}": value for key, value in outcome(found).items()}
    return row


# controls


def shifted(seed: int) -> Row:
    """A claim of zeros and ones among all digits, labels by parity; other zeros and ones as candidates."""
    from sklearn.datasets import load_digits

    images, digit = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    few = order[digit[order] < 2]
    mine, others = few[:40], few[40:120]
    rest = order[~np.isin(order, np.concatenate([mine, others]))][:600]
    x, y = torch.from_numpy(images / 16).reshape(-1, 1, 8, 8), torch.from_numpy(digit % 2 * 2 - 1)
    claim = SampleSets(Dataset(x[mine], y[mine]), Dataset(x[rest], y[rest]))
    controls = run_controls(claim, Knowledge(), seed)
    found = tested({"others": x[others]}, claim, seed)
    return {
        "auc": controls.auc,
        "leak": bool(found.survivors),
        "inconclusive": bool(controls.failures),
    }


def official(name: str, seed: int) -> Row:
    """Training against test images of a published set: the controls must let it pass."""
    split = rs.load_dataset(name, 500, seed=seed, holdout=2000)
    claim = set_aside_repeats(split.train, split.holdout)
    controls = run_controls(claim, granted(split.train, True), seed)
    return {
        "auc": controls.auc,
        "energy": controls.energy,
        "repeats": len(controls.repeats),
        "inconclusive": bool(controls.failures),
        "failures": list(controls.failures),
    }


def mnist(seed: int) -> Row:
    return official("mnist", seed)


def cifar(seed: int) -> Row:
    return official("cifar10", seed)


def repeats(seed: int) -> Row:
    """Twenty near-copies of training samples in a pool of 500; 20 of 50 are among the candidates."""
    split = digits(seed, 50, pool=480)
    rng = np.random.default_rng(seed)
    chosen = torch.from_numpy(rng.permutation(50)[:20])
    copies = split.train.x[chosen] + 0.001 * torch.from_numpy(rng.standard_normal((20, 1, 8, 8)))
    pool = split.holdout.replace(
        x=torch.cat([split.holdout.x, copies]),
        y=torch.cat([split.holdout.y, split.train.y[chosen]]),
    )
    candidates = split.train.x[:20] + 0.15 * torch.from_numpy(rng.standard_normal((20, 1, 8, 8)))
    claim = set_aside_repeats(split.train, pool)
    kept = [i for i in range(20) if i not in claim.repeats]
    found, hidden = (
        tested({"some": candidates}, one, seed) for one in (claim, SampleSets(split.train, pool))
    )
    return {
        "left": len(kept),
        "recovered": found.recovered,
        "p": found.p_value,
        "recovered_with_repeats": hidden.recovered,
    }


# what exit 0 is worth


def private(
    split: Split, seed: int, epsilon: float = 1.0, steps: int = 100
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and start of full-batch descent with clipped gradients and Gaussian noise.

    rho = steps / (2 sigma^2) of zCDP.
    """
    delta = 1e-3
    log = np.log(1 / delta)
    rho = (np.sqrt(log + epsilon) - np.sqrt(log)) ** 2  # epsilon = rho + 2 sqrt(rho log 1/delta)
    sigma = np.sqrt(steps / (2 * rho))
    model = initialize(Architecture.parse(ARCH), TrainingConfig(init="default", seed=seed))
    start = {name: p.detach().double() for name, p in model.named_parameters()}
    theta = dict(start)
    x, y = split.train.x.double(), split.train.y.double()
    generator = torch.Generator().manual_seed(seed)

    def loss(weights: Any, one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, weights, (one[None],))[0, 0]
        return torch.nn.functional.softplus(-label * out)

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    for _ in range(steps):
        grads = per_sample(theta, x, y)
        size = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
        scale = (1 / size.clamp(min=1.0)) / len(x)
        for name, g in grads.items():
            noise = (
                torch.randn(g.shape[1:], generator=generator, dtype=torch.float64) * sigma / len(x)
            )
            step = torch.einsum("n,n...->...", scale, g) + noise
            theta[name] = theta[name] - 0.5 * step
    return theta, start


def one_pass(split: Split, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and start."""
    config = TrainingConfig(
        method="sgd", batch=10, steps=len(split.train) // 10, lr=0.1, init="default", seed=seed
    )
    state = train(ARCH, split.train, config)
    return state.theta, state.theta0


SOUND = ("large n", "private", "large n", "one pass")


def sound(seed: int) -> Row:
    """Networks of 1000 digits that should not leak, asked of 40 of these; and ones of 30 that do.

    Private: epsilon 1, the start known. One pass: ten at a time, the start known. Large n: to its margin.
    """
    kind = "leaks" if seed % 3 == 2 else SOUND[(seed // 3 * 2 + seed % 3) % 4]
    split = digits(seed, 30 if kind == "leaks" else 1000, pool=None)
    known, claim = granted(split.train, True), split.train
    if kind != "leaks":
        some = torch.randperm(len(claim), generator=torch.Generator().manual_seed(seed))[:40]
        claim = claim.replace(x=claim.x[some], y=claim.y[some])
    if kind in ("private", "one pass"):
        theta, start = (private if kind == "private" else one_pass)(split, seed)
        known = known.replace(theta0=start, provenance={**known.provenance, "theta0": "user"})
    else:
        theta = train(ARCH, split.train, TrainingConfig(steps=1500, seed=seed)).theta
    checkpoint = Network(theta, ARCH, claim.shape, task="binary")
    found = audited(checkpoint, Split(claim, split.holdout), known, seed=seed)
    return {
        "kind": kind,
        "exit unvouched": found.exit_code,  # a key of the stored results, which the tables read
        "reasons": list(found.verdict.reasons),
    } | outcome(found)


def stranger(seed: int) -> Row:
    """Networks that hold nothing of the claim: random, first layer frozen, images of zeros."""
    kind = ("random", "frozen", "zeros", "random")[seed % 4]
    split = digits(seed, 30)
    known = granted(split.train, True)
    checkpoint = random_network(seed)
    if kind == "zeros":
        zeros = split.train.replace(x=torch.zeros_like(split.train.x))
        state = train(ARCH, split.train, TrainingConfig(steps=500, seed=seed))
        checkpoint, split = (
            make_release(state, ARCH, split.train, "binary"),
            Split(zeros, split.holdout),
        )
    if kind == "frozen":
        start = checkpoint.theta
        theta = _last_layer_only(checkpoint, split, seed)
        checkpoint = checkpoint.replace(theta=theta)
        known = known.replace(theta0=start, provenance={**known.provenance, "theta0": "user"})
    found = audited(checkpoint, split, known, seed=seed)
    return {"kind": kind} | outcome(found)


def misread(seed: int) -> Row:
    """Shifted labels, a fine-tuned last layer, a network with pooling read as one with stride."""
    kind = ("labels", "last layer", "pooling")[seed % 3]
    split = digits(seed, 30)
    known = granted(split.train, True)
    if kind == "labels":
        state = train(ARCH, split.train, TrainingConfig(steps=1000, seed=seed))
        wrong = split.train.replace(y=split.train.y.roll(7))
        checkpoint, split = (
            make_release(state, ARCH, split.train, "binary"),
            Split(wrong, split.holdout),
        )
    elif kind == "last layer":
        checkpoint = random_network(seed)
        known = known.replace(
            theta0=checkpoint.theta, provenance={**known.provenance, "theta0": "user"}
        )
        checkpoint = checkpoint.replace(theta=_last_layer_only(checkpoint, split, seed))
    else:
        checkpoint = _pooled_as_strided(split, seed)
    found = audited(checkpoint, split, known, seed=seed)
    return {"kind": kind} | outcome(found)


def wrong_set(seed: int) -> Row:
    """A trained network, and a claim of other digits of the same population."""
    checkpoint, split = victim(seed, steps=1000)
    pool = split.holdout
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    claim, rest = (
        pool.replace(x=pool.x[rows], y=pool.y[rows]) for rows in (order[:40], order[40:640])
    )
    found = audited(
        checkpoint,
        Split(claim, rest),
        granted(claim, True),
        attacks=[{"attack": "binary-kkt", "restarts": 2, "steps": 600}],
        seed=seed,
    )
    return outcome(found)


def _last_layer_only(checkpoint: Network, split: Split, seed: int) -> dict[str, torch.Tensor]:
    """Training moves the last layer and nothing else."""
    model = initialize(Architecture.parse(ARCH), TrainingConfig(init="default", seed=seed))
    parts = list(model.named_parameters())
    last = parts[-1][0].rsplit(".", 1)[0]
    moving = [p.requires_grad_(name.startswith(last)) for name, p in parts]
    steps = torch.optim.Adam([p for p in moving if p.requires_grad], lr=0.01)
    for _ in range(2000):
        steps.zero_grad()
        out = model(split.train.x.to(moving[0].dtype))[:, 0]
        torch.nn.functional.softplus(-split.train.y.to(out) * out).mean().backward()
        steps.step()
    return parameters(model)


def _pooled_as_strided(split: Split, seed: int) -> Network:
    """Trained with max pooling after a convolution; read as a convolution of stride two."""
    from torch import nn

    torch.manual_seed(seed)
    true = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 1)
    )
    steps = torch.optim.Adam(true.parameters(), lr=0.01)
    for _ in range(500):
        steps.zero_grad()
        out = true(split.train.x.float())[:, 0]
        torch.nn.functional.softplus(-split.train.y.to(out) * out).mean().backward()
        steps.step()
    read = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 1)
    )
    read[0].load_state_dict(true[0].state_dict())
    read[3].load_state_dict(true[4].state_dict())
    return as_network(read, None, (1, 8, 8))


# grades


def graded(name: str, arch: str, n: int, seed: int) -> Row:
    """Grades of what an attack brings back, beside NCC; and of candidates whose kind is known."""
    split = rs.load_dataset(name, n, seed=seed, holdout=1500)
    state = train(arch, split.train, TrainingConfig(steps=2000, seed=seed))
    checkpoint = make_release(state, arch, split.train, "binary")
    config = make_attack(restarts=2, steps=2000, seed=seed)
    found: Reconstruction = attack(checkpoint, granted(split.train, True), config)
    claim = SampleSets(split.train, split.holdout)
    tests, _ = run_tests({"kkt": all_candidates(found)}, claim, seed, 1000, float("inf"))
    one = tests["kkt"]
    grade = grades(one, one.field.strata)
    values = {
        g: [float(one.control.value[i]) for i, which in grade.items() if which == g]
        for g in set(grade.values())
    }
    return {
        "n": n,
        "recovered": int(one.control.recovered.sum()),
        "p": one.adjusted,
        "expected": one.control.expected_by_chance,
        "grades": dict(Counter(STORED_GRADES[which] for which in grade.values())),
        "ncc": {STORED_GRADES[g]: [min(v), float(np.median(v)), max(v)] for g, v in values.items()},
        "confusion": known_kinds(split, seed),
    }


def known_kinds(split: Split, seed: int) -> dict[str, dict[str, int]]:
    """The grade of candidates that hold the sample, another image like it, or its class alone.

    copy: the sample with noise of half its spread (NCC about 0.9); other image: of a third of the
    held-out samples that the grading never sees, the nearest; class mean: of the same third.
    """
    x, y, n = split.train.x.double(), split.train.y, len(split.train)
    rng = np.random.default_rng((seed, 11))
    unseen = torch.from_numpy(rng.permutation(len(split.holdout)) < len(split.holdout) // 3)
    others, theirs = split.holdout.x[unseen].double(), split.holdout.y[unseen]
    pool = split.holdout.replace(x=split.holdout.x[~unseen], y=split.holdout.y[~unseen])
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape)))
    spread = (x - x.flatten(1).mean(1).reshape(-1, *[1] * (x.ndim - 1))).flatten(1).std(1)
    made = {
        NEAR_COPY: x + 0.5 * spread.reshape(-1, *[1] * (x.ndim - 1)) * noise,
        RESEMBLANCE: others[similarity.ncc(x, others).argmax(1)],
        CLASS_LEVEL: torch.stack([others[theirs == label].mean(0) for label in y]),
    }
    table: dict[str, dict[str, int]] = {}
    for kind, candidates in made.items():
        tests, _ = run_tests(
            {kind: _pool(candidates)}, SampleSets(split.train, pool), seed, 200, 1e9
        )
        test = tests[kind]
        paired = np.diag(as_array(similarity.ncc(x, candidates)))
        control = replace(test.control, recovered=np.ones(n, bool), value=paired)
        given = Counter(grades(replace(test, control=control), test.field.strata).values())
        table[STORED_GRADES[kind]] = {key: given[g] for g, key in STORED_GRADES.items()}
    return table


def grades_digits(seed: int) -> Row:
    return graded("digits", ARCH, 40, seed)


def grades_mnist(seed: int) -> Row:
    return graded("mnist", "mlp:784-300-300-1", 100, seed)


def grades_cifar(seed: int) -> Row:
    return graded("cifar10", "mlp:3072-300-300-1", 50, seed)


def _true(_: list[Row]) -> bool:
    return True


CASES: dict[str, Case] = {
    "power": Case(
        power,
        range(20),
        lambda rows: all("one" in r["survivors"] for r in rows),
        "leak in every seed",
    ),
    "shifted": Case(
        shifted,
        range(30),
        lambda rows: sum(r["inconclusive"] for r in rows) >= 28,
        "inconclusive in at least 28 of 30",
    ),
    "repeats": Case(
        repeats,
        range(20),
        lambda rows: all(r["p"] <= 0.01 for r in rows),
        "the samples that nobody repeats are found",
    ),
    "mean_only": Case(
        mean_only,
        range(200),
        lambda rows: (
            10 * sum(r["caught"] for r in rows if r["leak"]) >= 9 * sum(r["leak"] for r in rows)
        ),
        "at least 90% of the leaks are caught",
    ),
    "mnist": Case(
        mnist,
        range(10),
        lambda rows: not any(r["inconclusive"] for r in rows),
        "stays decidable",
        data=True,
    ),
    "cifar": Case(
        cifar,
        range(10),
        lambda rows: not any(r["inconclusive"] for r in rows),
        "stays decidable",
        data=True,
    ),
    "leaking": Case(
        leaking,
        range(20, 25),
        lambda rows: all(r["mean: outcome"] == LEAK and r["none: outcome"] == LEAK for r in rows),
        "leak in 5 of 5, either way",
    ),
    "level": Case(
        level,
        range(100, 340),
        lambda rows: sum(r["outcome"] == LEAK or r["leak_over_tests"] for r in rows) <= 6,
        "at most 6 leaks of 240",
    ),
    "stranger": Case(
        stranger,
        range(40),
        lambda rows: sum(r["exit"] == 1 for r in rows) <= 3,
        "leaks within the level",
    ),
    "misread": Case(
        misread, range(12), lambda rows: not any(r["exit"] == 0 for r in rows), "never 0"
    ),
    "wrong_set": Case(
        wrong_set,
        range(40),
        lambda rows: sum(r["exit"] == 1 for r in rows) <= 3,
        "leaks within the level",
    ),
    "sound": Case(
        sound,
        range(30),
        lambda rows: (
            not any(r["kind"] == "leaks" and r["exit"] == 0 for r in rows)
            and sum(r["kind"] in ("private", "one pass") and r["exit"] == 1 for r in rows) <= 1
        ),
        "a network that leaks never ends in 0; of those private or of one pass at most one in 1",
    ),
    "grades_digits": Case(grades_digits, range(5), _true, "a table of grades"),
    "grades_mnist": Case(grades_mnist, range(3), _true, "a table of grades", data=True),
    "grades_cifar": Case(grades_cifar, range(3), _true, "a table of grades", data=True),
}


# running


def one(name: str, seed: int) -> Row:
    """One row, in a process of its own; what goes wrong is a row that says so."""
    torch.set_num_threads(1)
    os.environ["RESIDUUM_CACHE"] = ""  # every positive control is trained, and its time counts
    start = time.monotonic()
    row = CASES[name].run(seed)
    return {"seed": seed, "took": round(time.monotonic() - start, 2)} | row


def run(names: Sequence[str], jobs: int, file: Path = FILE) -> dict[str, Any]:
    """Every row that is not there yet, written as it comes; then what must hold."""
    rows: dict[str, list[Row]] = json.loads(file.read_text())["rows"] if file.exists() else {}
    done = {(name, row["seed"]) for name, some in rows.items() for row in some}
    wanted = [
        (name, seed) for name in names for seed in CASES[name].seeds if (name, seed) not in done
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(one, *case): case for case in wanted}
        for finished in as_completed(waiting):
            name, seed = waiting[finished]
            try:
                row = finished.result()
            except (
                ValueError,
                RuntimeError,
                AssertionError,
                ResiduumError,
            ) as problem:  # the others go on; this one is run again next time
                print(f"{name} {seed}: {type(problem).__name__}: {problem}", file=sys.stderr)
                continue
            rows.setdefault(name, []).append(row)
            _write(file, rows)
            print(f"{name} {seed}: {row['took']:.1f} s", flush=True)
    return _write(file, rows)


def _write(file: Path, rows: dict[str, list[Row]]) -> dict[str, Any]:
    checks = {
        name: {
            "must": case.must,
            "rows": len(rows.get(name, [])),
            "of": len(case.seeds),
            "holds": bool(case.holds(rows[name]))
            if len(rows.get(name, [])) == len(case.seeds)
            else None,
        }
        for name, case in CASES.items()
    }
    ordered = {name: sorted(some, key=lambda row: row["seed"]) for name, some in rows.items()}
    content = {"checks": checks, "rows": ordered, "environment": environment("cpu")}
    write_json(file, content)
    return content


def verdict(device: str) -> Report:
    """All cases that this machine has the data for, as a report of the harness."""
    only_on(device, "cpu")
    here = bool(os.environ.get("RESIDUUM_DATA"))
    names = [name for name, case in CASES.items() if here or not case.data]
    content = run(names, os.cpu_count() or 1)
    checks = {name: row for name, row in content["checks"].items() if name in names}
    return Report(
        what="verdicts where nothing leaked, where something did, and what no leak found is worth",
        settings={"arch": ARCH, "pool": POOL},
        seeds=(0,),
        figures=[{name: f"{row['rows']} of {row['of']}" for name, row in checks.items()}],
        ratio=1.0,
        bar=1.0,
        checks={f"{name}: {row['must']}": bool(row["holds"]) for name, row in checks.items()},
    )


def main(arguments: list[str] | None = None) -> int:
    """Run cases and print what holds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdict", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--data", metavar="FOLDER", help="of MNIST and CIFAR-10 (else $RESIDUUM_DATA)"
    )
    options = parser.parse_args(arguments)
    if options.data:
        os.environ["RESIDUUM_DATA"] = options.data
    if unknown := [name for name in options.only if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; known: {', '.join(CASES)}")
    here = bool(os.environ.get("RESIDUUM_DATA"))
    names = options.only or [name for name, case in CASES.items() if here or not case.data]
    content = run(names, options.jobs)
    for name, row in content["checks"].items():
        print(f"{name:14} {row['rows']:3} of {row['of']:3}  {row['must']}: {row['holds']}")
    return 0 if all(content["checks"][name]["holds"] for name in names) else 1


if __name__ == "__main__":
    sys.exit(ended(main))
