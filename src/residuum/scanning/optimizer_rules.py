"""Find what training leaves besides the weights: optimizer state, initial weights, seeds and adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator

from residuum.io.adapters import find_adapter_pairs
from residuum.io.estimators import NETWORKS, find_initial_weights
from residuum.io.inert import Block, InertObject
from residuum.io.optimizer_state import FIRST_MOMENTS, SECOND_MOMENTS
from residuum.io.release import Release
from residuum.io.tree import MAX_PATH_LENGTH, OPTIMIZERS, Place, join_path
from residuum.scanning.finding import ADAPTER, DROP_STATE, START, STATE, Finding

SEEDS = re.compile(
    r"^(seed|random_?seed|manual_seed|global_seed|.*rng_state|rng_states|data_seed)$", re.I
)
DROP_SKLEARN = (
    "Before saving, delete the attribute _optimizer of the network. Predictions do not need it."
)


def find_optimizer_state(place: Place) -> Iterator[Finding]:
    """Find optimizer state: mean gradients (first moments), mean squared gradients, and averaged weights."""
    value, name, where = place.value, place.leaf, place.path
    if not isinstance(value, Block) or not value.numel:
        return
    # Outside of optimizer state, only these three names show that a tensor is a mean of gradients or of
    # squared gradients (a moment).
    is_state = place.section == "state" or name in {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    remedy = DROP_SKLEARN if place.owner in OPTIMIZERS else DROP_STATE
    if is_state and place.section != "step" and value.kind.startswith(("float", "bfloat")):
        if name in FIRST_MOMENTS:
            finding_title = f"first moments ({name})"
            reason = (
                "first moments are a weighted sum of the last gradients, from which attacks reconstruct "
                "more training samples than from the weights alone"
            )
            yield Finding(STATE, "high", finding_title, where, reason, remedy, count=value.numel)
        elif name in SECOND_MOMENTS or value.shape:
            finding_title = f"second moments and other state ({name})"
            reason = "the state holds squared gradients of the last steps, element by element"
            yield Finding(STATE, "medium", finding_title, where, reason, remedy, count=value.numel)
    elif place.section == "average":
        finding_title = "averaged copies of the weights"
        reason = "averaged weights minus the last weights are a sum of the last training steps"
        remedy = "Release only one copy: the averaged weights or the last weights."
        yield Finding(STATE, "medium", finding_title, where, reason, remedy, count=value.numel)


def find_initial_weights_and_seeds(place: Place) -> Iterator[Finding]:
    """Find what reveals the weights before training: confirmed initial weights, seeds and random states."""
    value, name, where = place.value, place.name, place.path
    if isinstance(value, InertObject) and value.class_name in NETWORKS:
        if (proof := find_initial_weights(value)) is not None:
            finding_title, where = (
                f"the initial weights of {value.class_name}",
                join_path(where, proof.attribute),
            )
            reason = f"{proof.evidence}: the weight update W - W0 is a sum over training samples"
            yield Finding(
                START, "high", finding_title, where, reason, proof.remedy, count=proof.value_count
            )
    elif type(value) is int and (SEEDS.match(name) or (name == "random_state" and place.owner)):
        finding_title = f"a seed ({place.owner + '.' if place.owner else ''}{name})"
        reason = (
            "with the training code, a seed reproduces the random choices of the training, such as initial "
            "weights, the order of batches or the samples of a tree"
        )
        remedy = "Do not publish the seed of a model that was trained on private data."
        yield Finding(START, "low", finding_title, where, reason, remedy)
    elif isinstance(value, Block) and SEEDS.match(name):
        finding_title = f"the state of a random generator ({name})"
        reason = "the state reveals the random numbers that were drawn before and after saving"
        yield Finding(START, "low", finding_title, where, reason, DROP_STATE)


def find_adapters(release: Release) -> Iterator[Finding]:
    """Find the low-rank matrices of adapters, which give the change of each layer."""
    if not (pairs := find_adapter_pairs(release.content)):
        return
    ranks = sorted({min(a.shape) for a, _ in pairs.values() if a.shape})
    reason = (
        f"{len(pairs)} layers of rank {', '.join(map(str, ranks[:4]))}: with the base model, the adapter "
        "gives the change of each layer, which is a sum over training samples"
    )
    remedy = (
        "Merge the adapter into the base and round the weights, or train with differential privacy."
    )
    where, count = (
        next(iter(pairs))[:MAX_PATH_LENGTH],
        sum(a.numel + b.numel for a, b in pairs.values()),
    )
    yield Finding(ADAPTER, "medium", "a low-rank adapter", where, reason, remedy, len(pairs), count)
