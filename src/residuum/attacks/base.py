"""The interface of an attack: one method from an attack surface and the attacker's knowledge to candidates.

To write an attack, implement ``why_not`` and ``run`` and add the attack to ``ATTACKS``
(``registry.py``), here or in an installed package. Audits call every registered attack through this
interface and know nothing else about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from residuum import plugins
from residuum.attacks.selection import select
from residuum.errors import InputError, PluginError, ResiduumError
from residuum.records import Knowledge, Reconstruction
from residuum.settings import AttackConfig
from residuum.surfaces.surface import WEIGHTS, Surface

MOST_CANDIDATES = 20_000  # of one attack: bounds the memory of the scoring


@dataclass(frozen=True)
class AttackProgress:
    """What a watcher sees: losses (R,) and relative squared residuals (R, L) at a step.

    living: the candidates of every run at this moment, worked out when asked for.
    steps: that the attack will take.
    layer_names: of the L layers.
    """

    step: int
    steps: int
    loss: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]
    living: Callable[[], list[Tensor]] | None = None


Watcher = Callable[[AttackProgress], None]


class Attack:
    """Base: works on the weights, runs once, can convict and never acquit.

    acquits: it leaves a residual on its surface, so that finding nothing after explaining the
        surface is evidence.
    baseline: compared with, never part of what is tested.
    pace: "batches" of restarts as long as its share of a budget lasts, "once" with that share as
        ``config.seconds``, "sized" by that share whatever the clock says, so that it repeats, or
        "formula", which takes no share.
    part: of a share, beside 1 of the others.
    assumes: a sentence for the report on what a finding rests on.
    """

    name: str = ""
    surface: str = WEIGHTS
    acquits: ClassVar[bool] = False
    baseline: ClassVar[bool] = False
    pace: ClassVar[str] = "once"
    part: ClassVar[float] = 1.0
    assumes: ClassVar[str] = ""

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Why it does not apply; "" when it does."""
        return ""

    def why(self, surface: Surface) -> str:
        """Why it applies, in a few words."""
        return "applies to this network"

    def left_out(self, surface: Surface, knowledge: Knowledge) -> str:
        """Why an audit leaves it out although it applies; "" when it does not."""
        return ""

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
        """Candidates. An attack that takes no steps has no use for the keywords."""
        raise NotImplementedError

    def refuse(self, surface: Surface, knowledge: Knowledge) -> None:
        """An error where it does not apply."""
        if why_not := self.why_not(surface, knowledge):
            raise InputError(f"{self.name} does not apply: {why_not}.", "Use another attack.")

    @property
    def outside(self) -> bool:
        """Whether it comes from another package: then its faults are its own."""
        return not type(self).__module__.startswith("residuum.")


class AtOnce(Attack):
    """One that takes no steps which could be watched or gone on with: ``find`` is all of it."""

    def find(self, surface: Surface, knowledge: Knowledge, config: AttackConfig) -> Reconstruction:
        """The candidates."""
        raise NotImplementedError

    def run(
        self, surface: Surface, knowledge: Knowledge, config: AttackConfig, **_: Any
    ) -> Reconstruction:
        """What is found, with a selection by agreement where it brings none of its own."""
        start = time.monotonic()
        self.refuse(surface, knowledge)
        found = self.find(surface, knowledge, config).replace(settings=config.to_json())
        chosen = select(found) if found.selection is None else found.selection
        return found.replace(selection=chosen, seconds=time.monotonic() - start)


def ran(
    attack: Attack, surface: Surface, knowledge: Knowledge, config: AttackConfig, **how: Any
) -> Reconstruction:
    """One run of an attack. Where another package has a part in it, whatever it dies of is its fault; and
    what an attack from outside brings back is looked at before it is believed.
    """
    if not attack.outside:
        return attack.run(surface, knowledge, config, **how)
    try:
        attack.refuse(surface, knowledge)
        found = attack.run(surface, knowledge, config, **how)
    except ResiduumError:
        raise
    except (Exception, SystemExit) as problem:
        fault = f"{attack.name}, of another package, failed: {plugins.describe(problem)}."
        raise PluginError(fault, "Correct it, or use another attack.") from problem
    if type(attack).__module__.startswith("residuum."):  # an objective of others, in steps of ours
        return found
    found = checked(found, surface, knowledge).replace(attack=config.objective)
    found = found if found.settings else found.replace(settings=config.to_json())
    return found if found.selection is not None else found.replace(selection=select(found))


def checked(found: Reconstruction, surface: Surface, knowledge: Knowledge) -> Reconstruction:
    """What an attack from outside brought back, or an error that says what is wrong with it."""
    if not isinstance(found, Reconstruction):
        raise _wrong("a Reconstruction", type(found).__name__)
    n, restarts, looks = len(found.x), found.restarts, len(found.steps)
    if not 0 < n <= MOST_CANDIDATES:
        raise _wrong(f"1 to {MOST_CANDIDATES} candidates", n)
    wanted = {
        "x": (n, *surface.shape(knowledge)),
        "labels": (n,),
        "lam": (n, *found.lam.shape[1:]),
        "run": (n,),
        "loss": (restarts, looks),
        "layers": (restarts, looks, len(found.layer_names)),
    }
    for name, shape in wanted.items():
        if (got := tuple(getattr(found, name).shape)) != shape:
            raise _wrong(f"{name} of shape {shape}", got)
    for name in ("x", "labels", "lam"):
        if not getattr(found, name).isfinite().all():
            raise _wrong(f"finite {name}", "others")
    if not found.x.is_floating_point():
        raise _wrong("x of a floating-point type", found.x.dtype)
    if found.run.dtype != torch.long or {*found.run.tolist()} - {*range(restarts)}:
        raise _wrong(f"run as whole numbers below the {restarts} restarts", found.run.dtype)
    return found


def _wrong(wanted: str, got: object) -> PluginError:
    return PluginError(f"An attack must return {wanted}; got {got}.", "Correct the attack.")


def said_labels(outputs: Tensor) -> Tensor:
    """What the network says of samples by its outputs (n, C): -1 or 1 with one, else a class."""
    return (outputs[:, 0].sign() if outputs.shape[1] == 1 else outputs.argmax(1)).float()
