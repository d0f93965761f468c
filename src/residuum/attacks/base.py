"""The interface of an attack: its settings, and one method that reconstructs training samples.

A release is the published file of a model. A reconstruction holds candidates for training samples.

To write an attack, subclass :class:`OneShotAttack` and implement ``why_not`` and ``find``. If the attack
takes steps that can be watched or continued, subclass :class:`Attack` and implement ``why_not`` and
``reconstruct``. Add the class to ``ATTACKS`` (``registry.py``). An installed package can add attacks too. The
settings of an attack are the fields of its class. Audits call every registered attack through this interface
and know nothing else about the attack.
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
from residuum.io.release_knowledge import RELEASE, add_stored_knowledge
from residuum.networks.network import Network, first_layer
from residuum.records import Knowledge, Reconstruction
from residuum.settings import AttackSettings, SearchSettings
from residuum.surfaces.surface import MOMENT, SURFACES, WEIGHTS, Surface

if TYPE_CHECKING:
    from torch import nn

# Maximum number of candidates (guesses of training samples) that an attack may return.
MAX_RETURNED = 20_000
# Limits of the estimated number of candidates (guesses of training samples).
MIN_CANDIDATES, MAX_CANDIDATES = 20, 1000
NOT_ATTACKED = (
    "the optimizer state in this file was not attacked. To attack it, pass --surface moment"
)


@dataclass(frozen=True)
class AttackProgress:
    """Progress of a running attack. Attacks pass this record to the function ``watch`` of the caller.

    Attributes:
        step: Number of the current optimization step.
        steps: Number of steps that the attack takes.
        loss: (R,) current loss of each of R restarts (independent runs of the attack).
        layers: (R, L) squared residual of the equations of each layer, divided by the squared norm of their
            target, for R restarts and L layers.
        layer_names: Names of the L layers.
        current_candidates: Function that returns the current candidates (guesses of samples) of every
            restart.
    """

    step: int
    steps: int
    loss: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]
    current_candidates: Callable[[], list[Tensor]] | None = None


Watcher = Callable[[AttackProgress], None]


class Attack(AttackSettings):
    """Base class of all attacks. The default values describe an attack that uses the weights and runs once.

    Attributes:
        name: Name of the attack in tables and files.
        surface: Name of the attack surface: the weights, the weight update or the optimizer state.
        has_residual: Whether the attack fits equations and leaves a residual, which the report shows.
        is_baseline: Whether the attack is only a comparison. Tests for a leak never use a baseline.
        pace: How an audit schedules the attack. "batches": The audit runs the restarts of the attack in
            batches. "once": The audit runs the attack once, with the settings of the attack. "sized": The
            attack fits its amount of computation to its setting ``seconds``. "formula": The attack evaluates
            a formula in negligible time.
        effort_share: Weight of this attack when an audit divides its time budget among the attacks.
        assumes: Sentence for the report about the assumptions on which the attack relies.
    """

    name: ClassVar[str] = ""
    surface: ClassVar[str] = WEIGHTS
    has_residual: ClassVar[bool] = False
    is_baseline: ClassVar[bool] = False
    pace: ClassVar[str] = "once"
    effort_share: ClassVar[float] = 1.0
    assumes: ClassVar[str] = ""

    @classmethod
    def like(cls, other: AttackSettings, **changes: Any) -> Self:
        """Create an attack of this class that takes its settings from another attack.

        Settings that this class does not have are ignored.

        Args:
            other: The other attack, or the settings of the other attack.
            **changes: Settings that replace those of the other attack.

        Returns:
            The attack.
        """
        shared_settings = cls.model_fields.keys() & other.model_fields_set
        return cls(**{**{name: getattr(other, name) for name in shared_settings}, **changes})

    @classmethod
    def select_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of the dictionary ``settings`` whose names are settings of this attack."""
        return {name: value for name, value in settings.items() if name in cls.model_fields}

    def to_json(self) -> dict[str, Any]:
        """Return the name of the attack and all its settings as plain values."""
        return {"attack": self.name, **super().to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Create an attack from the plain values that :meth:`to_json` returned."""
        return super().from_json({k: v for k, v in values.items() if k in cls.model_fields})

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply to a network.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the attack applies.
        """
        return ""

    def why_applies(self, surface: Surface) -> str:
        """Return a short reason why the attack applies, for the report."""
        return "applies to this network"

    def why_skipped(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why an audit skips the attack although the attack applies.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the audit runs the attack.
        """
        return ""

    def require_applicable(self, surface: Surface, knowledge: Knowledge) -> None:
        """Raise an error if the attack does not apply to a network.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Raises:
            InputError: If the attack does not apply.
        """
        if reason := self.why_not(surface, knowledge):
            raise InputError(
                f"The attack '{self.name}' does not apply to this network: {reason}.",
                "Use another attack.",
            )

    def resolve_settings(self, network: Network, knowledge: Knowledge) -> Attack:
        """Set the settings that depend on the network, such as the number of candidates (guesses of samples).

        Args:
            network: The network to attack.
            knowledge: What the attacker knows.

        Returns:
            The attack with all settings.
        """
        network.check_weights()
        if isinstance(self, SearchSettings) and not self.candidates:
            return self.changed(candidates=estimate_candidate_count(network, knowledge))
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
        """Run the attack.

        If the attack does not apply, this method raises an ``InputError``. If the attack comes from a
        plug-in, its output is validated, and its exceptions become ``PluginError``.

        Args:
            target: What to attack: a release, the path of a release, a network, a PyTorch module, or an
                attack surface (the weights, the weight update or an optimizer state of a network).
            knowledge: What the attacker knows in addition to the release.
            state_path: File with the state of the search. If the search is interrupted, the next run
                continues from this file. Attacks without steps ignore this argument.
            watch: Function that the attack calls with its progress, an :class:`AttackProgress`.
            per_run: Settings of each restart (independent run of the attack), if they differ.

        Returns:
            The reconstruction.

        Example:
            >>> import residuum as rs
            >>> kkt = rs.attacks.KKT(steps=3000, restarts=8)
            >>> reconstruction = kkt.run(rs.load("model.pt"))  # doctest: +SKIP
        """
        if isinstance(target, Surface):
            attack, surface = (
                self.resolve_settings(target.checkpoint, knowledge or Knowledge()),
                target,
            )
            knowledge = knowledge or Knowledge()
        else:
            network, knowledge = read_target(target, knowledge)
            attack = self.resolve_settings(network, knowledge)
            surface = SURFACES[attack.surface](network, knowledge)
        resolved_per_run = (
            None
            if per_run is None
            else [r.resolve_settings(surface.checkpoint, knowledge) for r in per_run]
        )
        options: dict[str, Any] = {
            "state_path": state_path,
            "watch": watch,
            "per_run": resolved_per_run,
        }
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
        """Reconstruct training samples. An attack without steps ignores the keyword arguments.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.
            state_path: File with the state of the search, from which an interrupted search continues.
            watch: Function that the attack calls with its progress, an :class:`AttackProgress`.
            per_run: Settings of each restart (independent run of the attack), if they differ.

        Returns:
            The candidates.

        Raises:
            NotImplementedError: If a subclass does not implement this method.
        """
        raise NotImplementedError

    @property
    def is_plugin(self) -> bool:
        """True if the class of the attack comes from another package than residuum."""
        return not type(self).__module__.startswith("residuum.")

    def _guarded(self, surface: Surface, knowledge: Knowledge, **options: Any) -> Reconstruction:
        if not self.is_plugin:
            return self.reconstruct(surface, knowledge, **options)
        try:
            self.require_applicable(surface, knowledge)
            return self._validated(
                self.reconstruct(surface, knowledge, **options), surface, knowledge
            )
        except ResiduumError:
            raise
        except (Exception, SystemExit) as problem:
            raise PluginError(
                f"The plug-in attack {self.name} failed: {plugins.describe(problem)}.",
                "Correct the plug-in package that defines this attack, or use another attack.",
            ) from problem

    def _validated(
        self, result: Reconstruction, surface: Surface, knowledge: Knowledge
    ) -> Reconstruction:
        """Validate the output of a plug-in attack.

        The method records the name of the attack in the output. If the output has no settings or no selected
        candidates, the method adds the settings of the attack and selects candidates.

        Returns:
            The completed output.
        """
        result = validate_output(result, surface, knowledge).replace(attack=self.name)
        result = result if result.settings else result.replace(settings=self.to_json())
        return result if result.selection is not None else result.replace(selection=select(result))


class OneShotAttack(Attack):
    """Base class of attacks that run in one piece, without progress reports.

    Subclasses implement ``find``.
    """

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Find candidates for training samples. Subclasses implement this method.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The candidates.

        Raises:
            NotImplementedError: If a subclass does not implement this method.
        """
        raise NotImplementedError

    def reconstruct(self, surface: Surface, knowledge: Knowledge, **_: Any) -> Reconstruction:
        """Run the method ``find``. If it selects no candidates, select those that several restarts found.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.
            **_: Options of attacks with steps, which this method ignores.

        Returns:
            The candidates.
        """
        start_time = time.monotonic()
        self.require_applicable(surface, knowledge)
        result = self.find(surface, knowledge)
        if self.is_plugin:
            result = validate_output(result, surface, knowledge)
        result = result.replace(settings=self.to_json())
        selection = select(result) if result.selection is None else result.selection
        return result.replace(selection=selection, seconds=time.monotonic() - start_time)


def read_target(
    target: Release | Network | nn.Module | str | Path, knowledge: Knowledge | None
) -> tuple[Network, Knowledge]:
    """Read the network to attack, and collect what its file tells the attacker.

    Args:
        target: A release, the path of a release, a network or a PyTorch module.
        knowledge: What the attacker knows in addition to the release.

    Returns:
        The network, and the knowledge extended by the contents of the release.
    """
    plugins.load()
    knowledge = knowledge or Knowledge()
    opened_target = open_release(target) if isinstance(target, str | Path) else target
    network = as_network(opened_target, shape=knowledge.shape)
    if isinstance(opened_target, Release):
        knowledge = add_stored_knowledge(opened_target, network, knowledge)
    return network, knowledge


def estimate_candidate_count(network: Network, knowledge: Knowledge) -> int:
    """Choose the number of candidates (guesses of training samples) that an attack optimizes.

    If the number of samples is known, the function returns twice this number, at least MIN_CANDIDATES.
    Otherwise the function returns half the number of neurons in the first layer, between MIN_CANDIDATES and
    MAX_CANDIDATES. The reason is a count of equations: if the weight matrix of the first layer has h rows and
    rank r, it gives about h r equations. The m training samples have m (r + 1) unknown values, so the
    equations can determine about h samples at most. In an experiment with images of digits, h / 2 candidates
    recovered as many training images as h candidates (``experiments/candidate_counts.py``).

    Args:
        network: The network to attack.
        knowledge: What the attacker knows.

    Returns:
        The number of candidates.
    """
    if knowledge.sample_count is not None:
        return max(MIN_CANDIDATES, 2 * knowledge.sample_count)
    neurons = len(first_layer(network.theta))
    return max(MIN_CANDIDATES, min(MAX_CANDIDATES, neurons // 2))


def validate_output(
    result: Reconstruction, surface: Surface, knowledge: Knowledge
) -> Reconstruction:
    """Validate the output of a plug-in attack.

    Args:
        result: The output of the attack.
        surface: The attack surface: the weights, the weight update or an optimizer state.
        knowledge: What the attacker knows.

    Returns:
        The unchanged output.

    Raises:
        PluginError: If a field has the wrong type, shape or values.
    """
    if not isinstance(result, Reconstruction):
        raise PluginError(*_describe_invalid_output("a Reconstruction", type(result).__name__))
    n, restarts, checks = len(result.x), result.restarts, len(result.steps)
    if not 0 < n <= MAX_RETURNED:
        raise PluginError(*_describe_invalid_output(f"1 to {MAX_RETURNED} candidates", n))
    expected_shapes = {
        "x": (n, *surface.sample_shape(knowledge)),
        "labels": (n,),
        "lam": (n, *result.lam.shape[1:]),
        "run": (n,),
        "loss": (restarts, checks),
        "layers": (restarts, checks, len(result.layer_names)),
    }
    for name, shape in expected_shapes.items():
        if (got := tuple(getattr(result, name).shape)) != shape:
            raise PluginError(*_describe_invalid_output(f"{name} of shape {shape}", got))
    for name in ("x", "labels", "lam"):
        if not getattr(result, name).isfinite().all():
            raise PluginError(*_describe_invalid_output(f"finite {name}", "infinite or NaN values"))
    if not result.x.is_floating_point():
        raise PluginError(*_describe_invalid_output("x of a floating-point type", result.x.dtype))
    if result.run.dtype != torch.long or {*result.run.tolist()} - {*range(restarts)}:
        run_rule = f"integers from 0 to {restarts - 1} in run, one restart for each candidate"
        raise PluginError(*_describe_invalid_output(run_rule, result.run.dtype))
    return result


def _describe_invalid_output(rule: str, got: object) -> tuple[str, str]:
    return f"An attack must return {rule}; got {got}.", "Correct the attack."


def predict_labels(outputs: Tensor) -> Tensor:
    """Return the predicted labels for outputs (n, C): -1 or 1 for a single output, otherwise the class."""
    return (outputs[:, 0].sign() if outputs.shape[1] == 1 else outputs.argmax(1)).float()
