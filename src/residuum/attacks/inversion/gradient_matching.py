"""Invert: samples whose gradients add up to an optimizer's moment, or to the change of the weights.

For any module, by automatic differentiation twice (``engine/generic.py`` is the squared case of it with
multipliers of every objective; here is what is known of single gradients in federated learning):

    T(x, lam) = sum_i grad_theta <u_i, Phi(theta; x_i)>          u_i from lam_i, the label and Phi(x_i)
    squared   sum_l w_l |t_l - T_l|^2 / |t_l|^2
    cosine    sum_l w_l (1 - <t_l, T_l> / |t_l| |T_l|)           t = m, or theta0 - theta

with l over layers, or over the network as one. A sum that is scaled wrongly in one layer, as those of a
moment over several batches and of a whole training are, has the right cosine in each. ``invert`` takes
cosines per layer, multipliers of every rival class and the fading sparse prior; ``geiping2020`` is the
floor it is measured against: Geiping, Bauermeister, Droege, Moeller 2020, "Inverting Gradients": one
cosine of the whole network with the gradient of the loss itself, total variation, signed steps of Adam.
Rows of a first dense layer are mixtures of the samples themselves: no prior has to choose a basin there, and
signed steps get further in as many. On a chain of dense layers ``invert`` is the floor with multipliers.
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
from residuum.attacks.stationarity.objectives import Moment
from residuum.attacks.stationarity.priors import PRIORS, Prior
from residuum.networks.probing import second_derivatives
from residuum.records import Knowledge, Reconstruction
from residuum.settings import RestartSettings
from residuum.stationarity import Theta, by_layer, parameters
from residuum.surfaces.surface import CHANGE, MOMENT, Surface

LOOK = 25  # steps between two looks at the residuals
LEAST = 1e-30  # of a norm that is divided by


@dataclass(frozen=True)
class Matching:
    """How gradients are compared and candidates move.

    distance: "squared" or "cosine".
    per_layer: summed over layers, each of weight 1 over their number, or of all parameters as one.
    multipliers: "rivals", a free nonnegative one for every other class (``objectives.Moment``), or
        "loss", the derivative of the loss at the candidates' outputs.
    prior, weight: beside a distance that is 1 where nothing is explained.
    signed: steps by the sign of the gradient.
    """

    distance: str = "cosine"
    per_layer: bool = True
    multipliers: str = "rivals"
    prior: str = "sparse-gradients"
    weight: float = 1.0
    signed: bool = False

    def measure(self, target: Theta, total: Theta, groups: dict[str, tuple[str, ...]]) -> Tensor:
        """(L,) the distance of every layer that is asked for, or (1,) of all as one."""
        parts = list(groups.values()) if self.per_layer else [sum(groups.values(), ())]
        return torch.stack([self._one(target, total, names) for names in parts])

    def _one(self, target: Theta, total: Theta, names: tuple[str, ...]) -> Tensor:
        """Distance of ``total`` from ``target`` over some parameters, 1 where nothing is explained.

        Cosine leaves the size of the sum free, which an attacker without the number of steps does not
        know.
        """

        def inner(a: Theta, b: Theta) -> Tensor:
            return torch.stack([(a[name] * b[name]).sum() for name in names]).sum()

        size = inner(target, target)
        if self.distance == "squared":
            left = {name: target[name] - total[name] for name in names}
            return inner(left, left) / size
        norms = (size * inner(total, total)).clamp(min=LEAST).sqrt()
        return 1 - inner(target, total) / norms


OURS = Matching()
GEIPING = Matching(
    per_layer=False, multipliers="loss", prior="total-variation", weight=1e-6, signed=True
)
DENSE = replace(GEIPING, multipliers="rivals")
ASSUMES = (
    "invert assumes that the moment, or the change of the weights, is a sum of gradients at samples, "
    "with the gates of the weights as they are; the longer the training that is summed, the less so. "
    ""
)


def gradient_like(surface: Surface) -> Theta:
    """What a sum of gradients of the loss must equal: the moment, or start less weights."""
    sign = -1.0 if surface.name == CHANGE else 1.0
    return {name: sign * t for name, t in surface.target.items()}


def covectors(matching: Matching, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
    """u (m, C): of every rival its multiplier, or the derivative of the loss times one of the sample."""
    if matching.multipliers == "rivals":
        return Moment().covectors(0, outputs, labels, lam)
    if outputs.shape[1] == 1:
        y = labels.to(outputs)[:, None]
        return -y * torch.sigmoid(-y * outputs)
    own = F.one_hot(labels.long(), outputs.shape[1]).to(outputs)
    return outputs.softmax(1) - own


class GradientMatching(RestartSettings, Attack):
    """Match gradients at candidates with the weight update from known initial weights.

    Attributes:
        matching: How gradients are compared.
        floor: It is a published attack that others are compared with.
    """

    name: ClassVar[str] = "invert"
    surface: ClassVar[str] = CHANGE
    effort_share: ClassVar[float] = 0.5
    assumes: ClassVar[str] = ASSUMES
    matching: ClassVar[Matching] = OURS
    floor: ClassVar[bool] = False

    def matched(self, surface: Surface) -> Matching:
        """Return how gradients of this network are compared, see the head of this file."""
        chain = not self.floor and surface.chain is not None
        return DENSE if chain else self.matching

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply."""
        if surface.name != self.surface:
            return {
                CHANGE: "needs the initial weights theta0; grant them with --init",
                MOMENT: "needs the state of an optimizer, from the file or from a live one",
            }[self.surface]
        if surface.task == "regression" and surface.outputs > 1:
            return "needs one output or classes; a regression of several outputs is not covered"
        return ""

    def why_applies(self, surface: Surface) -> str:
        """Return why the attack applies."""
        return "gradients of samples add up to it, whatever the network"

    def why_skipped(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why an audit leaves the attack out."""
        if self.floor:
            return "a published floor that invert is measured against; name it to run it"
        if surface.chain is None:
            return ""
        return "a chain of dense layers: moment, ntk and unmix are closer; name it to run it"

    def reconstruct(
        self, surface: Surface, knowledge: Knowledge, *, watch: Watcher | None = None, **_: Any
    ) -> Reconstruction:
        """Run the restarts one after another, each with its share of ``seconds``."""
        begun = time.monotonic()
        self.require_applicable(surface, knowledge)
        problem = Problem(surface, knowledge, self, self.matched(surface))
        found: list[Solved] = []
        for run in range(self.restarts):
            left = self.seconds - (time.monotonic() - begun)
            if found and left <= 0:
                break
            found.append(problem.solve(run, left / (self.restarts - run), watch))
        looks = min(len(one.loss) for one in found)
        x = torch.cat([one.x for one in found])
        result = Reconstruction(
            attack=self.name,
            x=x,
            labels=problem.labels.cpu().float().repeat(len(found)),
            lam=torch.cat([one.lam for one in found]),
            run=torch.arange(len(found)).repeat_interleave(self.candidates),
            steps=torch.tensor(min((one.steps for one in found), key=len)[:looks]),
            loss=torch.stack([torch.stack(one.loss[:looks]) for one in found]),
            layers=torch.stack([torch.stack(one.layers[:looks]) for one in found]),
            layer_names=tuple(problem.groups),
            status=tuple(one.status for one in found),
            knowledge=knowledge,
            settings=self.to_json(),
            seconds=time.monotonic() - begun,
            notes=(problem.note(self.name),),
        )
        return result.replace(selection=select(result))


class OptimizerStateMatching(GradientMatching):
    """Match gradients at candidates with an optimizer state."""

    name: ClassVar[str] = "invert-moment"
    surface: ClassVar[str] = MOMENT


class Geiping2020(GradientMatching):
    """Match gradients as Geiping et al. 2020 do: the published attack that ``invert`` is compared with."""

    name: ClassVar[str] = "geiping2020"
    matching: ClassVar[Matching] = GEIPING
    floor: ClassVar[bool] = True


class Geiping2020OptimizerState(Geiping2020):
    """The same attack on an optimizer state."""

    name: ClassVar[str] = "geiping2020-moment"
    surface: ClassVar[str] = MOMENT


@dataclass
class Solved:
    """One restart: candidates, their multipliers, and looks at the loss and at every layer."""

    x: Tensor
    lam: Tensor
    steps: list[int]
    loss: list[Tensor]
    layers: list[Tensor]
    status: str


class Problem:
    """The network, what its gradients must add up to, and what a candidate is."""

    def __init__(
        self, surface: Surface, knowledge: Knowledge, settings: RestartSettings, matching: Matching
    ) -> None:
        device, numbers = settings.device, settings.numbers
        self.matching, self.settings, self.knowledge = matching, settings, knowledge
        self.model = surface.model().to(device, numbers).requires_grad_(False)
        target = {name: t.to(device, numbers) for name, t in gradient_like(surface).items()}
        self.groups = {
            layer: tuple(names)
            for layer, names in by_layer(target).items()
            if layer in surface.equations and any(bool(target[name].any()) for name in names)
        }
        self.target = target
        self.shape, outputs = surface.shape(knowledge), surface.outputs
        self.labels = Moment().labels(settings.candidates, outputs, knowledge).to(device)
        self.lam_shape = Moment().multiplier_shape(outputs)
        self.prior = self._prior()

    def _prior(self) -> Prior:
        """None for samples that are no images."""
        if len(self.shape) < 2:
            return Prior()
        known = self.knowledge.replace(shape=self.shape)
        return PRIORS[self.matching.prior](self.matching.weight, knowledge=known)

    def total(self, x: Tensor, lam: Tensor) -> Theta:
        """T, differentiable in x and lam."""
        leaves = {name: t.clone().requires_grad_() for name, t in parameters(self.model).items()}
        outputs = functional_call(self.model, leaves, (x,))
        # u follows the candidates; in theta it is not differentiated.
        here = functional_call(self.model, parameters(self.model), (x,))
        u = covectors(self.matching, here, self.labels, lam)
        terms = torch.autograd.grad(
            outputs, list(leaves.values()), u, create_graph=True, materialize_grads=True
        )
        return dict(zip(leaves, terms, strict=True))

    def solve(self, run: int, seconds: float, watch: Watcher | None = None) -> Solved:
        """One restart within ``seconds``: schedules follow the steps, or the clock where it is ahead.

        Candidates and multipliers begin at random, the latter scaled so that their sum is as large as
        the target. Adam moves both; multipliers are kept nonnegative, candidates inside the known box.
        Where time runs out the schedules have run down as well, so that a short restart is a fast one
        and not a broken one.
        """
        settings, begun = self.settings, time.monotonic()
        generator = stream(self.matching.multipliers, settings.seed, run)
        x = torch.randn(settings.candidates, *self.shape, generator=generator, dtype=torch.float64)
        x = (settings.sigma * x).to(settings.device, settings.numbers).requires_grad_()
        lam = torch.rand(settings.candidates, *self.lam_shape, generator=generator)
        lam = (self._scale(x, lam.to(x)) * lam.to(x)).requires_grad_()
        rate = float(lam.detach().mean()) * settings.lr_x
        adam = torch.optim.Adam([{"params": [x], "lr": 1.0}, {"params": [lam], "lr": 1.0}])
        box, share, solved = self.knowledge.box(x[0].detach()), 0.0, Solved(x, lam, [], [], [], "")
        for step in range(settings.steps):
            share = max(share, step / settings.steps, (time.monotonic() - begun) / seconds)
            if step and share >= 1:
                break
            with second_derivatives():
                parts = self.matching.measure(self.target, self.total(x, lam), self.groups)
                loss = parts.mean() + self.prior.weight_at(share) * self._penalty(x)
                gx, gl = torch.autograd.grad(
                    loss, (x, lam), allow_unused=True, materialize_grads=True
                )
            if step % LOOK == 0:
                solved.steps.append(step)
                solved.loss.append(loss.detach().cpu().double())
                solved.layers.append(parts.detach().cpu().double().expand(len(self.groups)))
                if watch is not None:
                    now = solved.loss[-1][None], solved.layers[-1][None]
                    watch(AttackProgress(step, settings.steps, *now, tuple(self.groups)))
            if not bool(loss.isfinite()):
                break
            x.grad, lam.grad = gx.sign() if self.matching.signed else gx, gl
            falling = (
                settings.lr_decay + (1 - settings.lr_decay) * (1 + math.cos(math.pi * share)) / 2
            )
            for group, size in zip(adam.param_groups, (settings.lr_x, rate), strict=True):
                group["lr"] = falling * size
            adam.step()
            with torch.no_grad():
                lam.clamp_(min=0)
                if box is not None:
                    x.copy_(x.clamp(*box))
        finite = bool(x.isfinite().all())
        solved.status = (
            "diverged" if not finite else "time" if step < settings.steps - 1 else "finished"
        )
        solved.x, solved.lam = x.detach().double().cpu(), lam.detach().double().cpu()
        return solved

    def _penalty(self, x: Tensor) -> Tensor:
        return self.prior.penalty(x[None], x.new_ones(1, len(x)))[0]

    def _scale(self, x: Tensor, lam: Tensor) -> float:
        """Multipliers for which the first candidates' gradients are as long as the target."""
        with second_derivatives():
            total = self.total(x, lam)
        names = [name for own in self.groups.values() for name in own]
        wanted, got = (
            float(torch.stack([part[name].detach().square().sum() for name in names]).sum()) ** 0.5
            for part in (self.target, total)
        )
        return wanted / got if got > 0 else 1.0

    def note(self, name: str) -> str:
        """What was compared."""
        over = f"{len(self.groups)} layers" if self.matching.per_layer else "the whole network"
        return (
            f"{name}: {self.matching.distance} of the gradients over {over}, multipliers by "
            f"{self.matching.multipliers}, prior {self.matching.prior}"
        )
