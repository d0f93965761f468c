"""How often does a verdict of leak come up where nothing leaked, and where something did?

Five networks, each attacked twice: with the training mean granted, and without. Each of the ten runs is
judged against 40 wrong claims: disjoint sets of digits that its network never saw, with all other
unseen digits as held-out control, drawn from one pool by seed. At 1% two false alarms are expected of
200; more than six have a probability below 0.5%. The same runs are judged by the right claim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import Report, only_on, threads
from residuum.attacks import PRESETS, attack, every_attack
from residuum.auditing.stages import outcome_of
from residuum.auditing.verdict import LEAK, AttackOutcome, Verdict, decide
from residuum.checkpoints.surfaces import weights
from residuum.datasets import load_dataset
from residuum.evaluation import score
from residuum.evaluation.scoring import whole_pool
from residuum.records import Checkpoint, Dataset, Knowledge, Reconstruction, Split
from residuum.training import TrainingConfig, released, train

SEEDS = (20, 21, 22, 23, 24)
ARCH, SAMPLES, TRAINING, RESTARTS, STEPS = "mlp:64-100-100-1", 40, 2000, 4, 1500
CLAIMS, ALLOWED = 40, 6


def verdict(device: str) -> Report:
    """False alarms of 200 wrong claims, and leaks found of five right ones, with and without mean."""
    only_on(device, "cpu")
    figures = []
    with threads(1):
        for seed in SEEDS:
            checkpoint, split = victim(seed)
            row: dict[str, Any] = {"seed": seed}
            for name, granted in (("mean granted", True), ("no mean", False)):
                found = attacked(checkpoint, split, granted)
                surface = weights(checkpoint, found.knowledge)
                outcome = outcome_of(every_attack()[found.attack], surface, found)
                right = judged(found, outcome, split.train, split.holdout)
                claims = wrong_claims(split, seed, CLAIMS)
                wrong = [judged(found, outcome, *claim) for claim in claims]
                row |= {
                    f"{name}: right claim": right.outcome,
                    f"{name}: recovered": right.recovered,
                    f"{name}: p": right.p_value,
                    f"{name}: false alarms": sum(one.outcome == LEAK for one in wrong),
                    f"{name}: wrong claims": len(wrong),
                }
            figures.append(row)
    return _report(figures)


def victim(seed: int) -> tuple[Checkpoint, Split]:
    """A network trained on digits; every other digit is held out."""
    split = load_dataset("digits", SAMPLES, seed=seed)
    state = train(ARCH, split.train, TrainingConfig(steps=TRAINING, seed=seed))
    return released(state, ARCH, split.train, "binary"), split


def attacked(checkpoint: Checkpoint, split: Split, mean: bool) -> Reconstruction:
    """The default attack; with ``mean`` it knows what was subtracted from the training digits."""
    knowledge = Knowledge(
        value_range=(0.0, 1.0) if mean else None,
        mean=split.train.mean if mean else None,
        sample_count=SAMPLES,
    )
    return attack(
        checkpoint, knowledge, replace(PRESETS["residuum"], restarts=RESTARTS, steps=STEPS)
    )


def wrong_claims(split: Split, seed: int, count: int) -> list[tuple[Dataset, Dataset]]:
    """Disjoint sets of unseen digits as claimed training sets, each with the others as control."""
    pool, n = split.holdout, len(split.train)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    if count * n > len(pool):
        raise ValueError(f"{count} disjoint claims of {n} need more than {len(pool)} digits.")
    claims = []
    for k in range(count):
        mine = order[k * n : (k + 1) * n]
        rest = torch.cat([order[: k * n], order[(k + 1) * n :]])
        claims.append(tuple(pool.replace(x=pool.x[i], y=pool.y[i]) for i in (mine, rest)))
    return claims


def judged(
    found: Reconstruction, outcome: AttackOutcome, claim: Dataset, control: Dataset
) -> Verdict:
    """The verdict of an audit that claims ``claim`` to be the training set."""
    scores = score(whole_pool(found).x, claim, control, metrics=["ncc"])
    return decide(scores, (outcome,))


def _report(figures: list[dict[str, Any]]) -> Report:
    alarms = {
        name: sum(row[f"{name}: false alarms"] for row in figures)
        for name in ("mean granted", "no mean")
    }
    leaks = {
        name: sum(row[f"{name}: right claim"] == LEAK for row in figures)
        for name in ("mean granted", "no mean")
    }
    return Report(
        what="verdicts of leak on claims about digits the network never saw",
        settings={
            "arch": ARCH, "samples": SAMPLES, "training_steps": TRAINING, "restarts": RESTARTS,
            "steps": STEPS, "claims": CLAIMS,
        },
        seeds=SEEDS,
        figures=figures,
        ratio=ALLOWED / max(1, *alarms.values()),
        bar=1.0,
        checks={
            f"{name}: leak in {len(figures)} of {len(figures)} right claims": count == len(figures)
            for name, count in leaks.items()
        },
        also={
            "false alarms of 200, each way": alarms,
            "leaks of 5, each way": leaks,
            "ratio": f"allowed false alarms ({ALLOWED} of 200) over the larger count, at least 1",
        },
    )  # fmt: skip
