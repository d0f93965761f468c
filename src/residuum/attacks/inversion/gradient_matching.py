"""The attack "invert": find samples whose gradients add up to an optimizer state or to the weight update.

This attack works for any module, because automatic differentiation computes the derivatives in the weights
and in the samples. The attack generalizes the squared distance of ``engine/generic.py``. Its distances and
multipliers are known from attacks on single gradients in federated learning:

    T(x, lam) = sum_i grad_theta <u_i, Phi(theta; x_i)>          u_i from lam_i, the label and Phi
    squared   sum_l w_l |t_l - T_l|^2 / |t_l|^2
    cosine    sum_l w_l (1 - <t_l, T_l> / |t_l| |T_l|)           t = optimizer state, or theta0 - theta

Phi is the network with weights theta, x_i are the candidates and lam_i their multipliers. The index l runs
over layers with equal weights w_l, or there is one term for the whole network. The attacker knows the sum of
gradients of several batches, or of a full training, only up to a factor in each layer. The cosine does not
depend on this factor.

``invert`` uses one cosine for each layer, multipliers of every rival class (each class but the label), and a
sparse prior that fades out. ``geiping2020`` is the published attack with which we compare ``invert``:
Geiping, Bauermeister, Droege, Moeller 2020, "Inverting Gradients". This attack uses one cosine for the whole
network, the gradient of the loss itself, total variation, and signed steps of Adam.

On a chain of dense layers, ``invert`` is ``geiping2020`` with multipliers. There, rows of the first layer are
mixtures of the samples, so the prior matters little, and signed steps make more progress in the same number
of steps.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from residuum.attacks.base import Attack, AttackProgress, Watcher
from residuum.attacks.random_streams import stream
from residuum.attacks.selection import select
from residuum.attacks.stationarity.objectives import UNKNOWN_WEIGHTS, Moment
from residuum.attacks.stationarity.priors import PRIORS, Prior
from residuum.networks.probing import second_derivatives
from residuum.records import Knowledge, Reconstruction
from residuum.settings import RestartSettings
from residuum.stationarity import Theta, by_layer, parameters
from residuum.surfaces.surface import CHANGE, MOMENT, Surface

RECORD_EVERY = 25  # number of steps after which the errors of the fit are recorded
MIN_NORM = 1e-30  # squared norms are clamped to at least this value before a division


@dataclass(frozen=True)
class MatchingRule:
    """How the attack compares gradients and moves candidates.

    Attributes:
        distance: Name of the distance between gradients: "squared" or "cosine".
        per_layer: Whether to use the mean distance over layers instead of one distance over all parameters.
        multipliers: How the weights u_i of the outputs in the sum of gradients are computed. "rivals": The
            attack optimizes one nonnegative multiplier for every class but the label
            (``objectives.Moment``). "loss": The weights u_i are the derivative of the loss in the outputs.
        prior: Name of the prior on candidates.
        weight: Weight of the prior, which is added to the distance. The distance lies between 0 for a perfect
            fit and about 1 for a random guess.
        signed: Whether a candidate moves by the sign of the derivative instead of the derivative.
    """

    distance: str = "cosine"
    per_layer: bool = True
    multipliers: str = "rivals"
    prior: str = "sparse-gradients"
    weight: float = 1.0
    signed: bool = False

    def measure(self, target: Theta, total: Theta, groups: dict[str, tuple[str, ...]]) -> Tensor:
        """Measure the distance between two gradients.

        Args:
            target: The gradient that the candidates must fit.
            total: The sum of gradients at the candidates.
            groups: Names of the parameters of every layer.

        Returns:
            (L,) distances of L layers, or (1,) the distance over all parameters together.
        """
        name_groups = list(groups.values()) if self.per_layer else [sum(groups.values(), ())]
        return torch.stack([self._distance(target, total, names) for names in name_groups])

    def _distance(self, target: Theta, total: Theta, names: tuple[str, ...]) -> Tensor:
        """Return the distance between two gradients over some parameters.

        The cosine distance ignores the size of the gradients, because an attacker who does not know the
        number of training steps does not know this size.

        Args:
            target: The gradient that the candidates must fit.
            total: The sum of gradients at the candidates.
            names: Names of the parameters.

        Returns:
            The distance: 0 for a perfect fit, and 1 for a sum that fits nothing.
        """

        def inner(a: Theta, b: Theta) -> Tensor:
            return torch.stack([(a[name] * b[name]).sum() for name in names]).sum()

        squared_norm = inner(target, target)
        if self.distance == "squared":
            difference = {name: target[name] - total[name] for name in names}
            return inner(difference, difference) / squared_norm
        norm_product = (squared_norm * inner(total, total)).clamp(min=MIN_NORM).sqrt()
        return 1 - inner(target, total) / norm_product


OURS = MatchingRule()
GEIPING = MatchingRule(
    per_layer=False, multipliers="loss", prior="total-variation", weight=1e-6, signed=True
)
DENSE = replace(GEIPING, multipliers="rivals")
ASSUMPTION = (
    "invert assumes that the optimizer state, or the weight update, is a sum of gradients at samples, "
    "with the activation patterns of the final weights. The longer the training, the less accurate this "
    "assumption is."
)


def read_gradient_sum(surface: Surface) -> Theta:
    """Return the tensors that the sum of loss gradients must equal.

    The tensors are the optimizer state, or the initial weights minus the released weights.

    Args:
        surface: The attack surface: the weight update or an optimizer state.

    Returns:
        The tensors by parameter name.
    """
    sign_of_gradients = -1.0 if surface.name == CHANGE else 1.0
    return {name: sign_of_gradients * t for name, t in surface.target.items()}


def covectors(matching: MatchingRule, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
    """Compute the vectors u_i, which weight the network's outputs for candidate i in the sum of gradients.

    The vectors follow from the multipliers of every class but the label, or from the derivative of the
    loss.

    Args:
        matching: How the attack compares gradients.
        outputs: (m, C) outputs of the network at m candidates.
        labels: (m,) labels of the candidates.
        lam: Multipliers (weights) of the candidates.

    Returns:
        (m, C) vectors u_i, one for each candidate.
    """
    if matching.multipliers == "rivals":
        return Moment().covectors(0, outputs, labels, lam)
    if outputs.shape[1] == 1:
        signed_labels = labels.to(outputs)[:, None]
        return -signed_labels * torch.sigmoid(-signed_labels * outputs)
    one_hot_labels = F.one_hot(labels.long(), outputs.shape[1]).to(outputs)
    return outputs.softmax(1) - one_hot_labels


class GradientMatching(RestartSettings, Attack):
    """Find candidates whose gradients add up to the weight update from known initial weights.

    Attributes:
        matching: How the attack compares gradients.
        is_published: Whether the attack is a published attack that is included only for comparison.
    """

    name: ClassVar[str] = "invert"
    surface: ClassVar[str] = CHANGE
    effort_share: ClassVar[float] = 0.5
    assumes: ClassVar[str] = ASSUMPTION
    matching: ClassVar[MatchingRule] = OURS
    is_published: ClassVar[bool] = False

    def choose_matching(self, surface: Surface) -> MatchingRule:
        """Return how the attack compares gradients.

        The rule DENSE is for networks that consist of dense layers.
        """
        if self.is_published or surface.chain is None:
            return self.matching
        return DENSE

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply to a network.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the attack applies.
        """
        if surface.name != self.surface:
            return {
                CHANGE: "needs the initial weights theta0; pass them with --init",
                MOMENT: "needs an optimizer state, from the file or from a live optimizer",
            }[self.surface]
        if not surface.has_weights:
            return UNKNOWN_WEIGHTS
        if surface.task == "regression" and surface.outputs > 1:
            return "needs one output or classes; a regression of several outputs is not supported"
        return ""

    def why_applies(self, surface: Surface) -> str:
        """Return a short reason why the attack applies to a network."""
        return "in any network, gradients of samples add up to the weight update or optimizer state"

    def why_skipped(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why an audit skips the attack although the attack applies.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the audit runs the attack.
        """
        if self.is_published:
            return f"{self.name} is a published attack for comparison; name {self.name} to run it"
        if surface.chain is None:
            return ""
        return (
            f"moment, ntk and unmix are more accurate on dense layers; name {self.name} to run it"
        )

    def reconstruct(
        self, surface: Surface, knowledge: Knowledge, *, watch: Watcher | None = None, **_: Any
    ) -> Reconstruction:
        """Run the restarts (independent runs) of the attack one after another.

        Each restart gets its share of the time limit ``seconds``.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.
            watch: Function that receives the progress of every restart.

        Returns:
            The candidates of all restarts.
        """
        start_time = time.monotonic()
        self.require_applicable(surface, knowledge)
        matching_problem = Problem(surface, knowledge, self, self.choose_matching(surface))
        results: list[SolvedRestart] = []
        for run in range(self.restarts):
            remaining_seconds = self.seconds - (time.monotonic() - start_time)
            if results and remaining_seconds <= 0:
                break
            results.append(
                matching_problem.solve(run, remaining_seconds / (self.restarts - run), watch)
            )
        record_count = min(len(restart.loss) for restart in results)
        candidates = torch.cat([restart.x for restart in results])
        reconstruction = Reconstruction(
            attack=self.name,
            x=candidates,
            labels=matching_problem.labels.cpu().float().repeat(len(results)),
            lam=torch.cat([restart.lam for restart in results]),
            run=torch.arange(len(results)).repeat_interleave(self.candidates),
            steps=torch.tensor(min((restart.steps for restart in results), key=len)[:record_count]),
            loss=torch.stack([torch.stack(restart.loss[:record_count]) for restart in results]),
            layers=torch.stack([torch.stack(restart.layers[:record_count]) for restart in results]),
            layer_names=tuple(matching_problem.groups),
            status=tuple(restart.status for restart in results),
            knowledge=knowledge,
            settings=self.to_json(),
            seconds=time.monotonic() - start_time,
            notes=(matching_problem.describe_comparison(self.name),),
        )
        return reconstruction.replace(selection=select(reconstruction))


class OptimizerStateMatching(GradientMatching):
    """Attack that finds samples whose gradients add up to the state of an optimizer."""

    name: ClassVar[str] = "invert-moment"
    surface: ClassVar[str] = MOMENT


class Geiping2020(GradientMatching):
    """The published attack of Geiping et al. 2020 on the weight update, for comparison."""

    name: ClassVar[str] = "geiping2020"
    matching: ClassVar[MatchingRule] = GEIPING
    is_published: ClassVar[bool] = True


class Geiping2020OptimizerState(Geiping2020):
    """The published attack of Geiping et al. 2020 on an optimizer state, for comparison."""

    name: ClassVar[str] = "geiping2020-moment"
    surface: ClassVar[str] = MOMENT


@dataclass
class SolvedRestart:
    """The result of one run of the attack: reconstructed samples, their weights, and recorded losses."""

    x: Tensor
    lam: Tensor
    steps: list[int]
    loss: list[Tensor]
    layers: list[Tensor]
    status: str


class Problem:
    """The optimization problem: a network, the vector that gradients must add up to, and the candidates."""

    def __init__(
        self,
        surface: Surface,
        knowledge: Knowledge,
        settings: RestartSettings,
        matching: MatchingRule,
    ) -> None:
        device, numbers = settings.device, settings.numbers
        self.matching, self.settings, self.knowledge = matching, settings, knowledge
        self.model = surface.copy_module().to(device, numbers).requires_grad_(False)
        target = {name: t.to(device, numbers) for name, t in read_gradient_sum(surface).items()}
        self.groups = {
            layer: tuple(names)
            for layer, names in by_layer(target).items()
            if layer in surface.equations and any(bool(target[name].any()) for name in names)
        }
        self.target = target
        self.shape, outputs = surface.sample_shape(knowledge), surface.outputs
        self.labels = Moment().labels(settings.candidates, outputs, knowledge).to(device)
        self.lam_shape = Moment().multiplier_shape(outputs)
        self.prior = self._prior()

    def _prior(self) -> Prior:
        """Return the penalty on candidates (prior). If the samples are vectors and not images, it is zero."""
        if len(self.shape) < 2:
            return Prior()
        knowledge = self.knowledge.replace(shape=self.shape)
        return PRIORS[self.matching.prior](self.matching.weight, knowledge=knowledge)

    def total(self, x: Tensor, lam: Tensor) -> Theta:
        """Compute the sum of gradients at candidates x with multipliers (weights) lam.

        The sum is differentiable in x and lam.

        Args:
            x: (m, *shape) candidates.
            lam: Multipliers (weights) of the candidates.

        Returns:
            The sum of gradients for every parameter.
        """
        leaf_weights = {
            name: t.clone().requires_grad_() for name, t in parameters(self.model).items()
        }
        outputs = functional_call(self.model, leaf_weights, (x,))
        # Each output of the network is weighted with a number u. The gradient with respect to the network's
        # weights must treat u as a constant, so u is computed with weights that require no gradient.
        fixed_outputs = functional_call(self.model, parameters(self.model), (x,))
        output_weights = covectors(self.matching, fixed_outputs, self.labels, lam)
        gradients = torch.autograd.grad(
            outputs,
            list(leaf_weights.values()),
            output_weights,
            create_graph=True,
            materialize_grads=True,
        )
        return dict(zip(leaf_weights, gradients, strict=True))

    def solve(self, run: int, seconds: float, watch: Watcher | None = None) -> SolvedRestart:
        """Run one restart: search for samples from one random start.

        Candidates and multipliers start at random. Multipliers are scaled so that the sum of gradients is as
        long as the vector that the sum must equal. Adam moves candidates and multipliers. Multipliers stay
        nonnegative, and candidates stay inside the known value range.

        The learning rate and the weight of the prior depend on the progress of the restart, a number from 0
        to 1. The progress is the share of the steps that are done, or the share of the time that is over,
        whichever is larger. The progress therefore reaches 1 even if the restart runs out of time.

        Args:
            run: Number of the restart.
            seconds: Time budget of the restart.
            watch: Function that receives the progress.

        Returns:
            The candidates, the multipliers, and records of the distances.
        """
        settings, start = self.settings, time.monotonic()
        generator = stream(self.matching.multipliers, settings.seed, run)
        candidates = torch.randn(
            settings.candidates, *self.shape, generator=generator, dtype=torch.float64
        )
        candidates = (
            (settings.sigma * candidates).to(settings.device, settings.numbers).requires_grad_()
        )
        multipliers = torch.rand(settings.candidates, *self.lam_shape, generator=generator)
        multipliers = (
            self._scale(candidates, multipliers.to(candidates)) * multipliers.to(candidates)
        ).requires_grad_()
        lam_rate = float(multipliers.detach().mean()) * settings.lr_x
        adam = torch.optim.Adam(
            [{"params": [candidates], "lr": 1.0}, {"params": [multipliers], "lr": 1.0}]
        )
        box, progress = self.knowledge.box(candidates[0].detach()), 0.0
        result = SolvedRestart(candidates, multipliers, [], [], [], "")
        for step in range(settings.steps):
            progress = max(progress, step / settings.steps, (time.monotonic() - start) / seconds)
            if step and progress >= 1:
                break
            with second_derivatives():
                distances = self.matching.measure(
                    self.target, self.total(candidates, multipliers), self.groups
                )
                loss = distances.mean() + self.prior.weight_at(progress) * self._penalty(candidates)
                gx, gl = torch.autograd.grad(
                    loss, (candidates, multipliers), allow_unused=True, materialize_grads=True
                )
            if step % RECORD_EVERY == 0:
                result.steps.append(step)
                result.loss.append(loss.detach().cpu().double())
                result.layers.append(distances.detach().cpu().double().expand(len(self.groups)))
                if watch is not None:
                    latest_record = result.loss[-1][None], result.layers[-1][None]
                    watch(AttackProgress(step, settings.steps, *latest_record, tuple(self.groups)))
            if not bool(loss.isfinite()):
                break
            candidates.grad, multipliers.grad = gx.sign() if self.matching.signed else gx, gl
            rate_factor = (
                settings.lr_decay + (1 - settings.lr_decay) * (1 + math.cos(math.pi * progress)) / 2
            )
            for group, size in zip(adam.param_groups, (settings.lr_x, lam_rate), strict=True):
                group["lr"] = rate_factor * size
            adam.step()
            with torch.no_grad():
                multipliers.clamp_(min=0)
                if box is not None:
                    candidates.copy_(candidates.clamp(*box))
        is_finite = bool(candidates.isfinite().all())
        result.status = (
            "diverged" if not is_finite else "time" if step < settings.steps - 1 else "finished"
        )
        result.x, result.lam = (
            candidates.detach().double().cpu(),
            multipliers.detach().double().cpu(),
        )
        return result

    def _penalty(self, x: Tensor) -> Tensor:
        return self.prior.penalty(x[None], x.new_ones(1, len(x)))[0]

    def _scale(self, x: Tensor, lam: Tensor) -> float:
        """Return the factor for the samples' weights that makes the sum of gradients as long as needed."""
        with second_derivatives():
            gradient_sum = self.total(x, lam)
        parameter_names = [name for group in self.groups.values() for name in group]
        target_norm, total_norm = (
            float(
                torch.stack(
                    [gradients[name].detach().square().sum() for name in parameter_names]
                ).sum()
            )
            ** 0.5
            for gradients in (self.target, gradient_sum)
        )
        return target_norm / total_norm if total_norm > 0 else 1.0

    def describe_comparison(self, name: str) -> str:
        """Return a note that says how the attack compared gradients."""
        scope = f"{len(self.groups)} layers" if self.matching.per_layer else "the whole network"
        return (
            f"{name} matched gradients by their {self.matching.distance} distance over {scope}, with "
            f"multipliers by {self.matching.multipliers} and the prior {self.matching.prior}"
        )
