"""Run an attack on a network, given what the attacker knows. The training data is never seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from residuum import plugins
from residuum.attacks.base import Watcher, ran
from residuum.attacks.registry import every_attack
from residuum.attacks.stationarity.attack import Stationarity, prepare, search
from residuum.attacks.stationarity.defaults import with_defaults
from residuum.attacks.stationarity.objectives import OBJECTIVES
from residuum.attacks.stationarity.priors import PRIORS
from residuum.errors import InputError, require_known
from residuum.io.checkpoints import as_network
from residuum.io.release import open_release
from residuum.io.release_knowledge import RELEASE, with_release
from residuum.networks.network import Network, first_layer
from residuum.records import Knowledge, Reconstruction
from residuum.settings import AttackConfig
from residuum.surfaces.surface import CHANGE, MOMENT, SURFACES, WEIGHTS, chosen

FEWEST, MOST = 20, 1000  # candidates; the most bound memory, and only where no count is known


def attack(
    checkpoint: Network | nn.Module | str | Path,
    knowledge: Knowledge | None = None,
    config: AttackConfig | None = None,
    *,
    surface: str = "",
    state_path: str | Path | None = None,
    watch: Watcher | None = None,
    per_run: Sequence[AttackConfig] | None = None,
) -> Reconstruction:
    """Reconstruct training samples of ``checkpoint``; see :class:`AttackConfig` for the settings.

    A live module or the path of a file is read first, as :func:`residuum.audit` does.
    surface: weights, their change from a start, or the moment of an optimiser; "": what the
        objective is about.
    per_run: settings of each restart where they differ, see ``PerRun``.
    """
    plugins.load()
    knowledge = knowledge or Knowledge()
    release = open_release(checkpoint) if isinstance(checkpoint, str | Path) else None
    checkpoint = as_network(release or checkpoint, shape=knowledge.shape)
    if release is not None:
        knowledge = with_release(release, checkpoint, knowledge)
    config = on_surface(surface, knowledge, config or AttackConfig())
    config = resolve(checkpoint, knowledge, config)
    per_run = None if per_run is None else [resolve(checkpoint, knowledge, one) for one in per_run]
    method = every_attack()[config.objective]
    there = SURFACES[method.surface](checkpoint, knowledge)
    how: dict[str, Any] = {"state_path": state_path, "watch": watch, "per_run": per_run}
    found = ran(method, there, knowledge, config, **how)
    if there.name == MOMENT or knowledge.provenance.get("moment") != RELEASE:
        return found
    return found.replace(notes=(*found.notes, NOT_ATTACKED))


def advance(
    checkpoint: Network,
    knowledge: Knowledge,
    config: AttackConfig,
    state_path: Path,
    until: int,
    per_run: Sequence[AttackConfig] | None = None,
) -> bool:
    """Run an attack of the stationarity family up to step ``until`` and save its state.

    :func:`attack` with the same settings and ``state_path`` continues from there.

    Returns:
        True if steps are left.
    """
    config = resolve(checkpoint, knowledge, config)
    per_run = None if per_run is None else [resolve(checkpoint, knowledge, one) for one in per_run]
    method = every_attack()[config.objective]
    assert isinstance(method, Stationarity)
    solver = prepare(checkpoint, knowledge, config, per_run, method.objective)
    return not search(solver, state_path, until=until).stopped


def on_surface(name: str, knowledge: Knowledge, config: AttackConfig) -> AttackConfig:
    """The configuration whose attack works on the surface that a user names."""
    if not name:
        return config
    wanted, said = chosen(name, knowledge), config.objective
    every = every_attack()
    if said in ("auto", ""):
        fitting = next(n for n, one in every.items() if one.surface == wanted)
        return config if wanted == WEIGHTS else replace(config, objective=fitting)
    if said in UNMIX.values():
        return replace(config, objective=UNMIX[wanted])
    if said in every and every[said].surface != wanted:
        raise InputError(
            f"--objective {said} attacks {every[said].surface}, not {wanted}.",
            "Leave --surface or --objective out.",
        )
    return config


NOT_ATTACKED = "optimiser state in this file was not attacked: --surface moment does"
UNMIX = {WEIGHTS: "unmix", CHANGE: "unmix", MOMENT: "unmix-moment"}  # a start it subtracts itself


def resolve(checkpoint: Network, knowledge: Knowledge, config: AttackConfig) -> AttackConfig:
    """The configuration with its attack named and its candidates counted."""
    checkpoint.check_weights()
    name = config.objective
    if name in ("auto", ""):
        task = checkpoint.inferred_task
        name = next(name for name, objective in OBJECTIVES.items() if objective.task == task)
    attacks = every_attack()
    require_known(name, attacks, "No attack")
    for prior, _ in config.priors or ():
        require_known(prior, PRIORS, "No prior")
    count = config.candidates or _estimate(checkpoint, knowledge)
    config = replace(config, objective=name, candidates=count)
    return with_defaults(checkpoint, knowledge, config, attacks[name])


def _estimate(checkpoint: Network, knowledge: Knowledge) -> int:
    """Twice the known sample count, or half the neurons of the first layer.

    h neurons and a first layer of rank r give about h r equations for m (r + 1) unknowns: m = h is
    the most that they could determine. Half of it found as many digits (``benchmarks/candidates.py``).
    """
    if knowledge.sample_count is not None:
        return max(FEWEST, 2 * knowledge.sample_count)
    return max(FEWEST, min(MOST, len(first_layer(checkpoint.theta)) // 2))
