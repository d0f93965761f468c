"""The interface of an attack: settings, and one method from a release to a reconstruction.

To write an attack, subclass :class:`Attack` or :class:`AtOnce`, implement ``why_not`` and one of
``reconstruct`` and ``find``, and add the class to ``ATTACKS`` (``registry.py``), here or in an installed
package. The settings of an attack are the fields of its class. Audits call every registered attack through
this interface and know nothing else about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from residuum import plugins
from residuum.attacks.selection import select
from residuum.errors import InputError, PluginError, ResiduumError
from residuum.io.checkpoints import as_network
from residuum.io.release import Release, open_release
from residuum.io.release_knowledge import RELEASE, with_release
from residuum.networks.network import Network, first_layer
from residuum.records import Knowledge, Reconstruction
from residuum.settings import AttackSettings, SearchSettings
from residuum.surfaces.surface import MOMENT, SURFACES, WEIGHTS, Surface

if TYPE_CHECKING:
    from torch import nn

MAX_RETURNED = 20_000  # candidates of one attack: bounds the memory of the scoring
MIN_CANDIDATES, MAX_CANDIDATES = 20, 1000  # if the number of samples is not known
NOT_ATTACKED = "the optimizer state in this file was not attacked; --surface moment does that"


@dataclass(frozen=True)
class AttackProgress:
    """What a watcher receives: losses (R,) and relative squared residuals (R, L) at a step.

    living: returns the candidates of every run at this moment.
    steps: number of steps that the attack takes.
    layer_names: names of the L layers.
    """

    step: int
    steps: int
    loss: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]
    living: Callable[[], list[Tensor]] | None = None


Watcher = Callable[[AttackProgress], None]


class Attack(AttackSettings):
    """Base of all attacks. By default an attack uses the weights, runs once, and can only show a leak.

    Attributes:
        name: Name of the attack in tables and files.
        surface: The attack surface that it uses.
        has_residual: It leaves a residual on its surface, which the report shows.
        baseline: It is a comparison and never part of a test.
        pace: How an audit plans it: in "batches" of restarts, "once" with its own settings, "sized" if it
            adapts its effort to ``seconds`` of a reference machine, or "formula" if it takes no time worth
            planning.
        part: Its share of the effort, relative to 1 of the other attacks.
        assumes: A sentence for the report on what a finding rests on.
    """

    name: ClassVar[str] = ""
    surface: ClassVar[str] = WEIGHTS
    has_residual: ClassVar[bool] = False
    baseline: ClassVar[bool] = False
    pace: ClassVar[str] = "once"
    part: ClassVar[float] = 1.0
    assumes: ClassVar[str] = ""

    @classmethod
    def like(cls, other: AttackSettings, **changes: Any) -> Self:
        """Return this attack with the settings that it shares with another attack.

        Args:
            other: The other attack, or settings of one.
            **changes: Settings that differ.

        Returns:
            The attack.
        """
        shared = cls.model_fields.keys() & other.model_fields_set
        return cls(**{**{name: getattr(other, name) for name in shared}, **changes})

    @classmethod
    def shared(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return those of some settings that this attack has."""
        return {name: value for name, value in settings.items() if name in cls.model_fields}

    def to_json(self) -> dict[str, Any]:
        """Return the name of the attack and all its settings as plain values."""
        return {"attack": self.name, **super().to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the attack that :meth:`to_json` wrote."""
        return super().from_json({k: v for k, v in values.items() if k in cls.model_fields})

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply, "" if it does."""
        return ""

    def why(self, surface: Surface) -> str:
        """Return why the attack applies, in a few words."""
        return "applies to this network"

    def left_out(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why an audit leaves the attack out although it applies, "" if it does not."""
        return ""

    def refuse(self, surface: Surface, knowledge: Knowledge) -> None:
        """Raise an error if the attack does not apply."""
        if why_not := self.why_not(surface, knowledge):
            raise InputError(f"{self.name} does not apply: {why_not}.", "Use another attack.")

    def resolved(self, network: Network, knowledge: Knowledge) -> Attack:
        """Return the attack with all settings filled in that depend on the network."""
        network.check_weights()
        if isinstance(self, SearchSettings) and not self.candidates:
            return self.changed(candidates=estimated_candidates(network, knowledge))
        return self

    def run(
        self,
        target: Release | Surface | Network | nn.Module | str | Path,
        knowledge: Knowledge | None = None,
        *,
        state_path: str | Path | None = None,
        watch: Watcher | None = None,
        per_run: Sequence[Attack] | None = None,
    ) -> Reconstruction:
        """Run the attack. Exceptions raised by a plug-in become PluginError, and its output is validated.

        Args:
            target: What is attacked: a release, the path of one, a network, a live module, or one
                attack surface.
            knowledge: What the attacker knows besides the release.
            state_path: File that keeps the state of the search, so that it continues after an
                interruption. Attacks that take no steps ignore it.
            watch: Receives the progress.
            per_run: Settings of each restart, if they differ.

        Returns:
            The reconstruction.

        Raises:
            InputError: If the attack does not apply.
            PluginError: If an attack of another package fails.

        Example:
            >>> import residuum as rs
            >>> kkt = rs.attacks.KKT(steps=3000, restarts=8)
            >>> reconstruction = kkt.run(rs.load("model.pt"))  # doctest: +SKIP
        """
        if isinstance(target, Surface):
            attack, surface = self.resolved(target.checkpoint, knowledge or Knowledge()), target
            knowledge = knowledge or Knowledge()
        else:
            network, knowledge = read_target(target, knowledge)
            attack = self.resolved(network, knowledge)
            surface = SURFACES[attack.surface](network, knowledge)
        runs = (
            None
            if per_run is None
            else [r.resolved(surface.checkpoint, knowledge) for r in per_run]
        )
        options: dict[str, Any] = {"state_path": state_path, "watch": watch, "per_run": runs}
        result = attack._guarded(surface, knowledge, **options)
        if surface.name == MOMENT or knowledge.provenance.get("moment") != RELEASE:
            return result
        return result.replace(notes=(*result.notes, NOT_ATTACKED))

    def reconstruct(
        self,
        surface: Surface,
        knowledge: Knowledge,
        *,
        state_path: str | Path | None = None,
        watch: Watcher | None = None,
        per_run: Sequence[Attack] | None = None,
    ) -> Reconstruction:
        """Return candidates. An attack that takes no steps does not use the keywords."""
        raise NotImplementedError

    @property
    def outside(self) -> bool:
        """True if the attack comes from another package, so that its faults are its own."""
        return not type(self).__module__.startswith("residuum.")

    def _guarded(self, surface: Surface, knowledge: Knowledge, **options: Any) -> Reconstruction:
        if not self.outside:
            return self.reconstruct(surface, knowledge, **options)
        try:
            self.refuse(surface, knowledge)
            return self._validated(
                self.reconstruct(surface, knowledge, **options), surface, knowledge
            )
        except ResiduumError:
            raise
        except (Exception, SystemExit) as problem:
            fault = f"{self.name}, of another package, failed: {plugins.describe(problem)}."
            raise PluginError(fault, "Correct it, or use another attack.") from problem

    def _validated(
        self, result: Reconstruction, surface: Surface, knowledge: Knowledge
    ) -> Reconstruction:
        """Return the output of a plug-in after checking it, with the name, settings and selection."""
        result = checked(result, surface, knowledge).replace(attack=self.name)
        result = result if result.settings else result.replace(settings=self.to_json())
        return result if result.selection is not None else result.replace(selection=select(result))


class AtOnce(Attack):
    """An attack without steps that could be watched or continued. Subclasses implement ``find``."""

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Return the candidates."""
        raise NotImplementedError

    def reconstruct(self, surface: Surface, knowledge: Knowledge, **_: Any) -> Reconstruction:
        """Return the candidates, with a selection by agreement if ``find`` makes none."""
        start = time.monotonic()
        self.refuse(surface, knowledge)
        result = self.find(surface, knowledge)
        if self.outside:
            result = checked(result, surface, knowledge)
        result = result.replace(settings=self.to_json())
        selection = select(result) if result.selection is None else result.selection
        return result.replace(selection=selection, seconds=time.monotonic() - start)


def read_target(
    target: Release | Network | nn.Module | str | Path, knowledge: Knowledge | None
) -> tuple[Network, Knowledge]:
    """Read what is attacked.

    Args:
        target: A release, the path of one, a network or a live module.
        knowledge: What the attacker knows besides the release.

    Returns:
        The network, and the knowledge together with what the release itself tells.
    """
    plugins.load()
    knowledge = knowledge or Knowledge()
    release = open_release(target) if isinstance(target, str | Path) else target
    network = as_network(release, shape=knowledge.shape)
    if isinstance(release, Release):
        knowledge = with_release(release, network, knowledge)
    return network, knowledge


def estimated_candidates(network: Network, knowledge: Knowledge) -> int:
    """Return twice the known sample count, or half the neurons of the first layer.

    h neurons and a first layer of rank r give about h r equations for m (r + 1) unknowns: m = h is
    the most that they could determine. Half of it found as many digits (``benchmarks/candidates.py``).
    """
    if knowledge.sample_count is not None:
        return max(MIN_CANDIDATES, 2 * knowledge.sample_count)
    neurons = len(first_layer(network.theta))
    return max(MIN_CANDIDATES, min(MAX_CANDIDATES, neurons // 2))


def checked(result: Reconstruction, surface: Surface, knowledge: Knowledge) -> Reconstruction:
    """Return the output of an attack of another package, after checking its form.

    Raises:
        PluginError: If a field has the wrong type, shape or values.
    """
    if not isinstance(result, Reconstruction):
        raise _wrong("a Reconstruction", type(result).__name__)
    n, restarts, looks = len(result.x), result.restarts, len(result.steps)
    if not 0 < n <= MAX_RETURNED:
        raise _wrong(f"1 to {MAX_RETURNED} candidates", n)
    shapes = {
        "x": (n, *surface.shape(knowledge)),
        "labels": (n,),
        "lam": (n, *result.lam.shape[1:]),
        "run": (n,),
        "loss": (restarts, looks),
        "layers": (restarts, looks, len(result.layer_names)),
    }
    for name, shape in shapes.items():
        if (got := tuple(getattr(result, name).shape)) != shape:
            raise _wrong(f"{name} of shape {shape}", got)
    for name in ("x", "labels", "lam"):
        if not getattr(result, name).isfinite().all():
            raise _wrong(f"finite {name}", "others")
    if not result.x.is_floating_point():
        raise _wrong("x of a floating-point type", result.x.dtype)
    if result.run.dtype != torch.long or {*result.run.tolist()} - {*range(restarts)}:
        raise _wrong(f"run as whole numbers below the {restarts} restarts", result.run.dtype)
    return result


def _wrong(rule: str, got: object) -> PluginError:
    return PluginError(f"An attack must return {rule}; got {got}.", "Correct the attack.")


def predicted_labels(outputs: Tensor) -> Tensor:
    """Return the labels that the network predicts from its outputs (n, C): -1 or 1, or a class."""
    return (outputs[:, 0].sign() if outputs.shape[1] == 1 else outputs.argmax(1)).float()
