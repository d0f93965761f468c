"""From a checkpoint and what the attacker knows to a reconstruction. The data is never seen."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from residuum import plugins
from residuum.attacks.baselines import FirstLayerWeights, ModelInversion
from residuum.attacks.contract import Attack, Watcher, ran, select
from residuum.attacks.corners import Corners
from residuum.attacks.growth import Grower
from residuum.attacks.invert import GEIPING, OURS, Invert
from residuum.attacks.objectives import OBJECTIVES, Objective
from residuum.attacks.polynomial import PolynomialAttack
from residuum.attacks.priors import PRIORS
from residuum.attacks.solver import Population, Solver, SolverState, load_state
from residuum.attacks.trunk import BehindTrunk
from residuum.attacks.unmix import Unmix
from residuum.checkpoints import as_checkpoint, build_model, first_layer
from residuum.checkpoints.contents import RELEASE, with_release
from residuum.checkpoints.surfaces import (
    CHANGE,
    MOMENT,
    SURFACES,
    WEIGHTS,
    Surface,
    chosen,
    sample_shape,
    task_of,
)
from residuum.errors import InputError, require_known
from residuum.networks import Architecture
from residuum.records import Checkpoint, Knowledge, Reconstruction
from residuum.settings import LR_LAM, AttackConfig

TYPED = 0.01  # weight of the columns' types
SPARSE, SLOW = 60.0, 0.003  # SLOW: the rate of multipliers beside a sparse prior
# Where multipliers have to find their sign first, with a rate as without prior: photographs, pen strokes.
SIGNED_SPARSE, SIGNED_STROKES = 6.0, 0.6
SAVE_EVERY = 20.0  # seconds between saves of an attack that is kept
NEIGHBOURS, STROKES = 0.5, 5.0  # half way between the rows of ``Appearance``
SIDE = 8  # pixels: in smaller frames neighbours say nothing of an image
LEADING = 0.1  # share of the largest singular value down to which vectors are looked at
FEWEST, MOST = 20, 1000  # candidates; the most bound memory, and only where no count is known


def attack(
    checkpoint: Checkpoint | nn.Module | str | Path,
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
    path, checkpoint = checkpoint, as_checkpoint(checkpoint, shape=knowledge.shape)
    if isinstance(path, str | Path):
        knowledge = with_release(path, checkpoint, knowledge)
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


def search(
    solver: Solver,
    path: str | Path | None = None,
    watch: Watcher | None = None,
    until: int | None = None,
    grower: Grower | None = None,
) -> SolverState:
    """An attack from look to look: between them candidates grow, a watcher is told, the clock is read.

    path: where the state is kept, and taken up again.
    until: pause at the first look from this step on; the state that comes back has not stopped, and
        is gone on with.
    """
    config, path = solver.config, None if path is None else Path(path)
    if grower is None and config.growth.how != "none":
        grower = Grower(solver)
    start = saved = time.monotonic()
    solver.deadline = start + config.seconds
    state = load_state(path, solver.fingerprint, config.device) or solver.start()
    try:
        while not state.stopped and (until is None or state.step < until):
            next_ = solver.next_look(state.step)
            if grower is not None:
                next_ = min(next_, grower.next_round(state.step))
            state = solver.solve(state, next_)
            if grower is not None:
                state = grower.after(state)
            if watch is not None:
                watch(solver.progress(state))
            now = time.monotonic()
            if not state.stopped and now - start > config.seconds:
                state = state.replace(stopped="time")
            if path is not None and now - saved > SAVE_EVERY:
                state.save(path)
                saved = now
    finally:
        if path is not None:
            state.save(path)
    return state


def advance(
    checkpoint: Checkpoint,
    knowledge: Knowledge,
    config: AttackConfig,
    state_path: Path,
    until: int,
    per_run: Sequence[AttackConfig] | None = None,
) -> bool:
    """The steps of an attack up to ``until``, kept at ``state_path``; False when none are left.

    :func:`attack` with the same settings and state goes on from there.
    """
    config = resolve(checkpoint, knowledge, config)
    per_run = None if per_run is None else [resolve(checkpoint, knowledge, one) for one in per_run]
    method = every_attack()[config.objective]
    assert isinstance(method, Stationarity)
    solver = prepare(checkpoint, knowledge, config, per_run, method.objective)
    return not search(solver, state_path, until=until).stopped


class Stationarity(Attack):
    """Descent on the residual of the surface's equation, with the covectors of an objective."""

    acquits: ClassVar[bool] = True
    pace: ClassVar[str] = "batches"

    def __init__(self, name: str, objective: type[Objective]) -> None:
        self.name, self.objective, self.surface = name, objective, objective.surface

    @property
    def outside(self) -> bool:
        """As the objective is."""
        return not self.objective.__module__.startswith("residuum.")

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """As the objective says."""
        why_not = self.objective().why_not(surface.outputs, surface.task, knowledge)
        return why_not or ("" if surface.name == self.surface else f"needs {self.surface}")

    def why(self, surface: Surface) -> str:
        """Likewise."""
        return self.objective().why(surface)

    def left_out(self, surface: Surface, knowledge: Knowledge) -> str:
        """Likewise."""
        return self.objective().left_out(surface.task, knowledge)

    def run(
        self,
        surface: Surface,
        knowledge: Knowledge,
        config: AttackConfig,
        *,
        state_path: str | Path | None = None,
        watch: Watcher | None = None,
        per_run: Sequence[AttackConfig] | None = None,
    ) -> Reconstruction:
        """All restarts side by side; a saved state is gone on with."""
        start = time.monotonic()
        solver = prepare(surface.checkpoint, knowledge, config, per_run, self.objective)
        grower = None if config.growth.how == "none" else Grower(solver)
        state = search(solver, state_path, watch, grower=grower)
        runs = config.restarts
        status = tuple(state.stopped if alive else "diverged" for alive in state.alive.tolist())
        lam, x = solver.multipliers(state.best_lam), state.best_x
        population = state.population or Population.start(runs, solver.problem.labels)
        living = population.best_active.cpu().flatten()
        notes, second_order = grown_facts(grower, state)
        found = Reconstruction(
            attack=config.objective,
            x=_flat(x)[living],
            labels=population.best_labels.cpu().flatten()[living],
            lam=_flat(lam)[living],
            run=torch.arange(runs).repeat_interleave(x.shape[1])[living],
            steps=torch.tensor(state.steps),
            loss=torch.stack(state.loss, 1),
            layers=torch.stack(state.layers, 1),
            layer_names=solver.problem.layer_names,
            status=status,
            knowledge=knowledge,
            settings=config.to_json(),
            seconds=time.monotonic() - start,
            notes=notes,
            events=population.events,
            ident=population.best_ident.cpu().flatten()[living],
            second_order=second_order,
        )
        return found.replace(selection=select(found))


# Attacks of their own; every objective makes one more.
ATTACKS: plugins.Table[Attack] = plugins.Table(
    "attack",
    {
        one.name: one
        for one in (
            Unmix("unmix", WEIGHTS),
            Unmix("unmix-moment", MOMENT),
            BehindTrunk("trunk", WEIGHTS),
            BehindTrunk("trunk-moment", MOMENT),
            Invert("invert", CHANGE, OURS),
            Invert("invert-moment", MOMENT, OURS),
            Invert("geiping2020", CHANGE, GEIPING, floor=True),
            Invert("geiping2020-moment", MOMENT, GEIPING, floor=True),
            Corners(),
            PolynomialAttack(),
            ModelInversion(),
            FirstLayerWeights(),
        )
    },
    beside=OBJECTIVES,
)
OBJECTIVES.beside = ATTACKS


def every_attack() -> dict[str, Attack]:
    """By name, as they stand: those of the objectives first."""
    return {name: Stationarity(name, cls) for name, cls in OBJECTIVES.items()} | ATTACKS


def grown_facts(
    grower: Grower | None, state: SolverState
) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...]]:
    """What an attack that grew says of itself: notes, stationarity of its end."""
    if grower is None or state.population is None:
        return (), ()
    found, notes = grower.verdict(state), list(grower.notes.values())
    kinds = {event["kind"] for event in state.population.events}
    if not kinds & {"split", "random", "frank-wolfe"}:
        why = "no candidate was unstable" if kinds else "no round was due within the steps"
        notes.append(f"growth: no candidate was added, {why}")
    for run, reason in enumerate(state.population.stopped):
        if reason == "limit":
            notes.append(f"growth: restart {run} stopped growing at its limit of candidates")
    return tuple(notes), tuple(found)


def resolve(checkpoint: Checkpoint, knowledge: Knowledge, config: AttackConfig) -> AttackConfig:
    """The configuration with its attack named and its candidates counted."""
    build_model(checkpoint)  # refuses weights that do not fit before anything is read off them
    name = config.objective
    if name in ("auto", ""):
        task = task_of(checkpoint)
        name = next(name for name, objective in OBJECTIVES.items() if objective.task == task)
    require_known(name, every_attack(), "No attack")
    for prior, _ in config.priors or ():
        require_known(prior, PRIORS, "No prior")
    count = config.candidates or _estimate(checkpoint, knowledge)
    return fitted(checkpoint, knowledge, replace(config, objective=name, candidates=count))


def fitted(checkpoint: Checkpoint, knowledge: Knowledge, config: AttackConfig) -> AttackConfig:
    """Fill in the priors that suit the appearance of the data in the first layer, if none are set.

    Images get a sparse prior. If the multipliers have a free sign, the prior is weaker, and weaker again
    for pen strokes. Its strength was chosen on images that no claim uses: with weight decay, 15 of 40
    photographs exceed NCC 0.9 (4 without a prior). With known initial weights, 167 of 180 digits are
    closer than 2.5 (140 with the prior for photographs). If column types are known, tables get a prior
    that pulls each column to its type.
    """
    if None not in (config.priors, config.lr_lam):
        return config
    method = every_attack()[config.objective]
    signed = isinstance(method, Stationarity) and not method.objective.nonnegative
    rows, shape = shown_rows(checkpoint, knowledge, method), sample_shape(checkpoint, knowledge)
    dense = rows.ndim == 2 and rows.shape[1] == math.prod(shape)
    seen = appearance(rows, shape) if dense else Appearance()
    free = SIGNED_SPARSE if seen.photographs else SIGNED_STROKES
    priors = (("sparse-gradients", free if signed else SPARSE),) if seen.images else ()
    if knowledge.columns is not None:
        priors = (("columns", TYPED),)
    chosen: dict[str, Any] = {
        "priors": priors,
        "lr_lam": SLOW if seen.images and config.priors != () and not signed else LR_LAM,
    }
    open_ = {name: value for name, value in chosen.items() if config.value(name) is None}
    return config.changed(**open_)


def shown_rows(checkpoint: Checkpoint, knowledge: Knowledge, method: Attack) -> Tensor:
    """First-layer rows that mix training samples: after a large start the weights themselves do not."""
    if method.surface == MOMENT:
        return first_layer({**checkpoint.theta, **(knowledge.moment or {})})
    if method.surface == CHANGE and knowledge.theta0 is not None:
        return first_layer(SURFACES[CHANGE](checkpoint, knowledge).target)
    return first_layer(checkpoint.theta)


@dataclass(frozen=True)
class Appearance:
    """What the training data looks like, read off the first layer alone; 0 for samples that are no images.

    Rows of a trained first layer are mixtures of training samples, and so are its leading right singular
    vectors. Laid out as images they show two things that survive mixing:

        neighbours  correlation of neighbouring pixels, weighted by squared singular values
        strokes     fourth over squared second moment of their pixels: large where most of the frame stays
                    empty, as around a pen stroke, 3 for a normal density

    Measured on networks of two starts (small and torch's own), 20 to 200 samples:

    =======================  ===========  ===========
    data                     neighbours   strokes
    =======================  ===========  ===========
    never trained            0.00         3.0
    digits, 8 x 8            0.26-0.37    3.6-3.8
    MNIST                    0.65-0.78    6.7-7.4
    CIFAR-10, photographs    0.70-0.90    3.0-3.8
    =======================  ===========  ===========
    """

    neighbours: float = 0.0
    strokes: float = 0.0

    @property
    def images(self) -> bool:
        """Whether neighbouring pixels belong together, as in images of any kind and size worth it."""
        return self.neighbours > NEIGHBOURS

    @property
    def photographs(self) -> bool:
        """Images that fill their frame."""
        return self.images and self.strokes < STROKES


def appearance(rows: Tensor, shape: tuple[int, ...]) -> Appearance:
    """rows: (h, d) of the first layer; shape: of one sample."""
    if len(shape) < 2 or min(shape[-2:]) < SIDE or not bool(rows.isfinite().all()):
        return Appearance()
    _, s, vectors = torch.linalg.svd(rows.detach().float().cpu(), full_matrices=False)
    if not s[0] > 0:
        return Appearance()
    leading = s > LEADING * s[0]
    images, weight = vectors[leading].reshape(-1, *shape), s[leading].square()

    def mean(values: Tensor) -> float:
        return float((values * weight).sum() / weight.sum())

    def agree(axis: int) -> float:
        count = images.shape[axis] - 1
        a, b = (images.narrow(axis, start, count).flatten(1) for start in (0, 1))
        return mean(torch.cosine_similarity(a, b))

    squares = images.flatten(1).square()
    return Appearance(
        min(agree(-1), agree(-2)), mean(squares.square().mean(1) / squares.mean(1).square())
    )


def prepare(
    checkpoint: Checkpoint,
    knowledge: Knowledge,
    config: AttackConfig,
    per_run: Sequence[AttackConfig] | None = None,
    kind: type[Objective] | None = None,
) -> Solver:
    """The attack that a resolved configuration describes, before its first step.

    kind: the objective where it is not the one that the configuration names.
    """
    objective = (kind or OBJECTIVES[config.objective]).configured(config, knowledge)
    shape = sample_shape(checkpoint, knowledge)
    outputs = Architecture.parse(checkpoint.arch).outputs
    objective.check(outputs, knowledge)
    model = build_model(checkpoint)
    return Solver(model, objective, knowledge, config, shape, outputs, config.candidates, per_run)


def _flat(part: Tensor) -> Tensor:
    return part.detach().flatten(0, 1).cpu()


def _estimate(checkpoint: Checkpoint, knowledge: Knowledge) -> int:
    """Twice the known sample count, or half the neurons of the first layer.

    h neurons and a first layer of rank r give about h r equations for m (r + 1) unknowns: m = h is
    the most that they could determine. Half of it found as many digits (``benchmarks/candidates.py``).
    """
    if knowledge.sample_count is not None:
        return max(FEWEST, 2 * knowledge.sample_count)
    return max(FEWEST, min(MOST, len(first_layer(checkpoint.theta)) // 2))
