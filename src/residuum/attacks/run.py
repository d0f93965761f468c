"""Run an attack on a released model, given what the attacker knows. The attack never sees training data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from residuum.attacks.base import Attack, Watcher, read_target
from residuum.attacks.registry import adapt_to_surface
from residuum.attacks.stationarity.attack import Auto
from residuum.io.release import Release
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction


def attack(
    target: Release | Network | nn.Module | str | Path,
    knowledge: Knowledge | None = None,
    attack: Attack | None = None,
    *,
    surface: str = "",
    state_path: str | Path | None = None,
    watch: Watcher | None = None,
    per_run: Sequence[Attack] | None = None,
) -> Reconstruction:
    """Reconstruct training samples from a released model.

    If the attack does not apply to the release, this function raises an ``InputError``.

    Args:
        target: A release, the path of a release, a network, or a PyTorch module.
        knowledge: What the attacker knows in addition to the release.
        attack: The attack with its settings, such as ``rs.attacks.KKT(steps=3000)``. The default is the KKT
            attack for classifiers, and the weight-decay attack for regressions.
        surface: What to attack: "weights", "change" (the weight update from known initial weights) or
            "moment" (the optimizer state). The default depends on the attack.
        state_path: File with the state of the search. If the search is interrupted, the next run continues
            from this file.
        watch: Function that the attack calls with its progress after some steps.
        per_run: Settings of each restart (independent run of the attack), if they differ.

    Returns:
        The reconstruction.

    Example:
        >>> import residuum as rs
        >>> reconstruction = rs.attack("model.pt", rs.Knowledge(shape=(1, 28, 28)))  # doctest: +SKIP
    """
    network, knowledge = read_target(target, knowledge)
    variant = adapt_to_surface(surface, knowledge, attack or Auto())
    return variant.run(network, knowledge, state_path=state_path, watch=watch, per_run=per_run)
