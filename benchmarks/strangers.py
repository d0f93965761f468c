"""Whole audits of networks that never saw the claimed set, its own mean granted in half of them.

Unlike the wrong claims of ``verdict``, these are not exchangeable with the control by construction: the
mean of the very set that is claimed is told to the attacker, and the claimed samples are 1/n of it.
Every leak is a false alarm. Half of the networks are random, half were trained on other digits; sets of 20
and 50 digits; 240 audits in all. At 1% two or three leaks are expected; more than six have a probability
of 2%.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

import residuum as rs
from benchmarks.harness import Report, only_on
from residuum.auditing.budget import Batch
from residuum.auditing.verdict import LEAK
from residuum.networks import Architecture
from residuum.records import Checkpoint, Dataset, Knowledge
from residuum.stationarity import parameters
from residuum.training import TrainingConfig, initialise

ARCH, TRAINING, RESTARTS, STEPS, POOL, SUBSETS = "mlp:64-100-100-1", 1000, 2, 300, 500, 500
NETWORKS, SIZES, SEEDS = ("random", "other digits"), (20, 50), tuple(range(100, 130))
ALLOWED = 6


def strangers(device: str) -> Report:
    """False alarms of 240 audits whose network never saw the claimed digits."""
    only_on(device, "cpu")
    cases = list(product(NETWORKS, (True, False), SIZES, SEEDS))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(outcome, cases))
    figures: list[dict[str, Any]] = []
    for network, mean, n in product(NETWORKS, (True, False), SIZES):
        mine = [
            found for case, found in zip(cases, outcomes, strict=True)
            if case[:3] == (network, mean, n)
        ]  # fmt: skip
        row = {"network": network, "own mean granted": mean, "claimed": n, "audits": len(mine)}
        figures.append(row | {name: mine.count(name) for name in sorted(set(outcomes))})
    leaks = outcomes.count(LEAK)
    return Report(
        what="verdicts on digits that the network never saw, their own mean granted or not",
        settings={
            "arch": ARCH, "training_steps": TRAINING, "restarts": RESTARTS, "steps": STEPS,
            "pool": POOL, "subsets": SUBSETS,
        },
        seeds=SEEDS,
        figures=figures,
        ratio=ALLOWED / max(1, leaks),
        bar=1.0,
        checks={f"at most {ALLOWED} leaks of {len(cases)}": leaks <= ALLOWED},
        also={"leaks": leaks, "ratio": "allowed leaks over leaks, at least 1"},
    )  # fmt: skip


def outcome(case: tuple[str, bool, int, int]) -> str:
    """The verdict of one audit: a network, a claim it knows nothing of, a control."""
    network, mean, n, seed = case
    torch.set_num_threads(1)
    split = rs.load_dataset("digits", 2 * n, seed=seed, holdout=POOL, center=False)
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(seed))
    own, claim = (
        split.train.replace(x=split.train.x[half], y=split.train.y[half])
        for half in (order[:n], order[n:])
    )
    if network == "random":
        start = TrainingConfig(init="default", seed=seed)
        theta = parameters(initialise(Architecture.parse(ARCH), start))
    else:
        seen = own.replace(x=own.x - own.x.mean(0)) if mean else own
        theta = rs.train(ARCH, seen, TrainingConfig(steps=TRAINING, seed=seed)).theta
    centre = claim.x.mean(0)
    granted = Knowledge(sample_count=n)
    control: Dataset = split.holdout
    if mean:
        claim, control = (data.replace(x=data.x - centre, mean=centre) for data in (claim, control))
        granted = Knowledge(
            sample_count=n, value_range=(0.0, 1.0), mean=centre, provenance={"mean": "train"}
        )
    found = rs.audit(
        Checkpoint(theta, ARCH), data=claim, holdout=control, knowledge=granted,
        batches=[Batch("binary-kkt", RESTARTS, STEPS, seed)], subsets=SUBSETS, baselines=False,
        seed=seed,
    )  # fmt: skip
    return found.verdict.outcome
