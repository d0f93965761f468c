"""Does the attack bring samples back? Settings here were fixed before the victims' seeds were drawn."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from residuum.attacks import Auto, ModelInversion, attack, select
from residuum.datasets import load_dataset
from residuum.evaluation import score
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Split
from residuum.stationarity import parameters
from residuum.training import TrainingConfig, initialize, train

CIRCLE_ARCH, CIRCLE_SEEDS, CIRCLE_KEPT = "mlp:2-400-1", (100, 101, 102), 40
CIRCLE_TRAINING = {"steps": 4000, "init_scale": 0.1}
CIRCLE_ATTACK = Auto(
    candidates=100, restarts=2, steps=5000, sigma=0.5, lr_x=0.02, lr_lam=0.02, lr_decay=0.02
)
DIGITS_ARCH, DIGITS_SEEDS = "mlp:64-200-200-1", (2000, 2001, 2002, 2003, 2004)
DIGITS_ATTACK = Auto(candidates=40, restarts=3, steps=1500, dtype="float32")
SIGNIFICANT = 0.01


def released(arch: str, data: Dataset, config: TrainingConfig) -> Network:
    return Network(dict(train(arch, data, config).theta), arch, data.shape, (), "binary")


def matched(points: torch.Tensor, truth: torch.Tensor, within: float = 0.05) -> int:
    """Largest one-to-one matching of truth to points closer than ``within``."""
    is_near = (torch.cdist(truth, points) < within).numpy().astype(float)
    rows, columns = linear_sum_assignment(-is_near)
    return int(is_near[rows, columns].sum())


@lru_cache
def circle_victim(seed: int) -> tuple[Network, Dataset]:
    data = load_dataset("circle", 20, seed=seed).train
    return released(CIRCLE_ARCH, data, TrainingConfig(seed=seed, **CIRCLE_TRAINING)), data


@pytest.mark.parametrize("seed", CIRCLE_SEEDS)
def test_circle_is_recovered_whole(seed):
    checkpoint, data = circle_victim(seed)
    reconstruction = attack(checkpoint, Knowledge(), CIRCLE_ATTACK)
    chosen = select(reconstruction, radius=0.03)
    points = chosen.x[chosen.lam.argsort(descending=True)[:CIRCLE_KEPT]]  # no data in this choice
    angle = math.radians(9)  # half the spacing: as far from the truth as the circle allows
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
        dtype=torch.float64,
    )
    assert len(points) <= CIRCLE_KEPT
    assert matched(points, data.x) == 20
    assert matched(points, data.x @ turn.T) <= 1
    inversion = ModelInversion(candidates=100, steps=200)
    inverted = attack(checkpoint, Knowledge(), inversion)
    assert matched(inverted.x, data.x) < 20


@lru_cache
def digits_split(seed: int) -> Split:
    return load_dataset("digits", 20, seed=seed)


def knowledge_of(split: Split) -> Knowledge:
    return Knowledge(
        value_range=(0.0, 1.0), mean=split.train.mean, sample_count=20, provenance={"mean": "train"}
    )


def found_by(checkpoint: Network, split: Split) -> torch.Tensor:
    """Candidates of the attack with the knowledge that ``split`` gives."""
    return attack(checkpoint, knowledge_of(split), DIGITS_ATTACK).x


def p_value(candidates: torch.Tensor, claim: Split) -> float:
    """Of the claim that the network was trained on ``claim.train``."""
    scores = score(candidates, claim.train, claim.holdout, metrics=("ncc",))
    assert scores.calibrated
    return scores.p_value


def never_seen(split: Split) -> Split:
    """A wrong claim: train and held-out drawn from samples the network never saw."""
    unseen = split.holdout
    return Split(
        Dataset(unseen.x[:20], unseen.y[:20], unseen.mean),
        Dataset(unseen.x[20:], unseen.y[20:], unseen.mean),
    )


@lru_cache
def digits_victim(seed: int) -> Network:
    return released(DIGITS_ARCH, digits_split(seed).train, TrainingConfig(steps=2000, seed=seed))


def test_digits_leak_and_sets_the_network_never_saw_do_not_match():
    """Power and false alarms of one configuration on fresh victims, from the same attacks."""
    leaks, wrong = [], []
    for seed in DIGITS_SEEDS:
        split = digits_split(seed)
        candidates = found_by(digits_victim(seed), split)
        leaks.append(p_value(candidates, split))
        wrong.append(p_value(candidates, never_seen(split)))
    assert sum(p < SIGNIFICANT for p in leaks) >= 4, leaks
    assert all(p >= SIGNIFICANT for p in wrong), wrong


def test_randomly_initialized_networks_hold_nothing():
    arch = Architecture.parse(DIGITS_ARCH)
    random = []
    for seed in DIGITS_SEEDS:
        model = initialize(arch, TrainingConfig(init="default", seed=seed))
        checkpoint = Network(parameters(model), DIGITS_ARCH, (1, 8, 8), (), "binary")
        split = digits_split(seed)
        random.append(p_value(found_by(checkpoint, split), split))
    assert all(p >= SIGNIFICANT for p in random), random


def test_the_data_cannot_reach_the_attack():
    """With knowledge fixed, another dataset around the attack changes not one bit of its result."""
    from residuum.records import same

    checkpoint = digits_victim(DIGITS_SEEDS[0])
    knowledge = knowledge_of(digits_split(DIGITS_SEEDS[0]))
    quick = Auto(candidates=10, restarts=2, steps=30)
    before = attack(checkpoint, knowledge, quick)
    other = load_dataset("digits", 40, seed=77)
    other.train.x.zero_()
    after = attack(checkpoint, knowledge, quick)
    assert same(before.replace(seconds=0.0), after.replace(seconds=0.0))


def test_a_small_convnet_is_attacked_for_real():
    """The count is reported whatever it is; here only that the pipeline runs and is calibrated."""
    split = load_dataset("digits", 10, seed=3)
    checkpoint = released("convnet:1x8x8-8-16-1", split.train, TrainingConfig(steps=400, seed=3))
    knowledge = Knowledge(value_range=(0.0, 1.0), mean=split.train.mean)
    reconstruction = attack(checkpoint, knowledge, Auto(candidates=20, restarts=1, steps=60))
    scores = score(reconstruction.x, split.train, split.holdout, metrics=("ncc",))
    assert reconstruction.status == ("finished",)
    assert reconstruction.loss[0, -1] < 0.9 * reconstruction.loss[0, 0]
    assert scores.calibrated
    assert 0 <= scores.recovered <= 10
