"""Objectives: which target, which gradients, which multipliers. One loss serves them all.

    L(x, lam) = sum_l w_l || target_l - sum_i grad_l <u_i, Phi(x_i)> ||^2,   u = covectors(lam, ...)

==================  ===============  ==================================  ==========================
attack              target           u_i                                 multipliers
==================  ===============  ==================================  ==========================
binary KKT [H]      theta            lam_i y_i                           lam >= 0
multiclass KKT [B]  theta            sum_c lam_ic (e_y - e_c)            lam >= 0, per rival
weight decay [B]    theta            lam_i, or -l'(Phi_i, y_i) / (n w)   free, or none
NTK [L]             theta - theta0   lam_i at theta, theta0 or both      free, one set per point
moment              m                -lam_i y_i, -sum_c lam_ic (e_y-e_c) lam >= 0, per rival
==================  ===============  ==================================  ==========================

[H] Haim et al. 2022, [B] Buzaglo et al. 2023, [L] Loo et al. 2024. Targets are those of surfaces
(``surfaces/surface.py``). A new objective is one frozen class with its ``covectors``, here or in
an installed package, and one line in ``OBJECTIVES``; try it first with ``plain.attack``. What it is
for, its options and when it applies are its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from residuum.errors import InputError, require_known
from residuum.networks.network import Network
from residuum.plugins import Table
from residuum.records import Knowledge
from residuum.settings import AttackSettings
from residuum.stationarity import Theta
from residuum.surfaces.surface import CHANGE, MOMENT, SURFACES, WEIGHTS, Surface


@dataclass(frozen=True)
class Objective(ABC):
    """Base: gradients at theta, target theta; what multipliers mean is each objective's own.

    surface: whose target the sum must equal.
    task: what a certificate of its candidates is asked for, "" to be told by the network.
    Dataclass fields are options. Those that are also settings of the attack are set from there.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    surface: ClassVar[str] = WEIGHTS
    task: ClassVar[str] = ""
    nonnegative: ClassVar[bool] = True
    points: ClassVar[tuple[str, ...]] = ("theta",)

    @classmethod
    def configured(cls, settings: AttackSettings, knowledge: Knowledge) -> Self:
        """The objective with the options of these settings."""
        shared = {f.name for f in fields(cls)} & type(settings).model_fields.keys()
        return cls(**{name: getattr(settings, name) for name in shared})

    @property
    def follows_outputs(self) -> bool:
        """Whether the covectors are differentiated through the network's outputs."""
        return False

    def gradient_points(self) -> tuple[str, ...]:
        """Where gradients are taken: "theta", "theta0", or both."""
        return self.points

    def why_not(self, outputs: int, task: str, knowledge: Knowledge) -> str:
        """Why it does not apply, "" when it does; task: of the network, "" where nobody said."""
        return ""

    def why_applies(self, surface: Surface) -> str:
        """Why it applies, in a few words."""
        return "applies to this network"

    def why_skipped(self, task: str, knowledge: Knowledge) -> str:
        """Why an audit leaves it out although it applies; "" when it does not."""
        return ""

    def check(self, outputs: int, knowledge: Knowledge) -> None:
        """Refuse a network or a lack of knowledge; whoever asks by name has seen to the task."""
        if why_not := self.why_not(outputs, "", knowledge):
            raise InputError(
                f"`{type(self).__name__}` {why_not}.",
                "residuum audit CKPT --dry-run lists the attacks that apply.",
            )

    def surface_of(self, theta: Theta, knowledge: Knowledge) -> Surface:
        """Where these weights, of whatever network, must be explained."""
        return SURFACES[self.surface](Network(theta, ""), knowledge)

    def labels(self, count: int, outputs: int, knowledge: Knowledge) -> Tensor:
        """(count,) a label for every candidate; first half -1 as in the released code of [H]."""
        balance = knowledge.label_balance or (0.5, 0.5)
        negative = round(count * balance[0] / sum(balance))
        return torch.cat([-torch.ones(negative), torch.ones(count - negative)])

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """Shape of one candidate's multipliers."""
        return ()

    @abstractmethod
    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """u: (..., m, C) from outputs (..., m, C), labels (m,), lam (..., m, *multiplier_shape)."""

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """From the loss's derivative in u to those in the outputs (None: no dependence) and in lam.

        By automatic differentiation of ``covectors``; an objective may give its own to be faster.
        """

        def u(outputs: Tensor, lam: Tensor) -> Tensor:
            return self.covectors(point, outputs, labels, lam)

        return torch.func.vjp(u, outputs, lam)[1](ubar)


class MarginKKT(Objective):
    """A classifier of largest margin, which training to zero loss leads to."""

    def why_not(self, outputs: int, task: str, knowledge: Knowledge) -> str:
        """A classifier with the outputs of its task."""
        if (outputs == 1) != (self.task == "binary"):
            wanted = "one output" if self.task == "binary" else "at least 2 outputs"
            return f"needs {wanted}; this network has {outputs}"
        return "needs a classifier; this network is a regression" if task == "regression" else ""

    def why_applies(self, surface: Surface) -> str:
        """What homogeneity says."""
        if (order := surface.checkpoint.homogeneity_order) is None:
            return (
                "not homogeneous: the KKT theorem does not cover it, published attacks still worked"
            )
        return f"homogeneous of order {order:g}: training to zero loss leads to a KKT point"


@dataclass(frozen=True)
class BinaryKKT(MarginKKT):
    """theta = sum_i lam_i y_i grad Phi(x_i), lam >= 0."""

    name: ClassVar[str] = "binary-kkt"
    paper: ClassVar[str] = "Haim et al. 2022"
    task: ClassVar[str] = "binary"

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """lam_i y_i."""
        return (lam * labels.to(lam.dtype))[..., None]

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """y_i times the derivative in u."""
        return None, ubar[..., 0] * labels.to(lam.dtype)


@dataclass(frozen=True)
class MulticlassKKT(MarginKKT):
    """theta = sum_ic lam_ic grad (Phi_y - Phi_c)(x_i) over rivals c, lam >= 0.

    rivals "tied": a multiplier for every rival within ``tolerance`` of the best one; "best": one
    multiplier on the best rival, as published.
    """

    name: ClassVar[str] = "multiclass-kkt"
    paper: ClassVar[str] = "Buzaglo et al. 2023"
    task: ClassVar[str] = "multiclass"
    rivals: str = "tied"
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        require_known(self.rivals, ("tied", "best"), "No rivals rule")

    def labels(self, count: int, outputs: int, knowledge: Knowledge) -> Tensor:
        """Classes in turn, as evenly as ``label_balance`` says."""
        share = torch.tensor(knowledge.label_balance or [1 / outputs] * outputs)
        bounds = (share.cumsum(0) / share.sum() * count).round().long()
        return torch.bucketize(torch.arange(count), bounds, right=True).clamp(max=outputs - 1)

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """One per rival, or one."""
        return (outputs,) if self.rivals == "tied" else ()

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """sum_c lam_ic (e_y - e_c); which rivals count is read off the outputs, not differentiated."""
        own, counts = self._rivals(outputs, labels)
        weights = counts * (lam if self.rivals == "tied" else lam[..., None])
        return weights.sum(-1, keepdim=True) * own - weights

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """lam_ic multiplies e_y - e_c where rival c counts."""
        own, counts = self._rivals(outputs, labels)
        inner = counts * ((ubar * own).sum(-1, keepdim=True) - ubar)
        return None, inner if self.rivals == "tied" else inner.sum(-1)

    def _rivals(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """e_y (m, C), and 1 for every rival that counts (..., m, C)."""
        classes = outputs.shape[-1]
        own = F.one_hot(labels.long(), classes).to(outputs.dtype)
        rivals = outputs.detach().masked_fill(own.bool(), -torch.inf)
        if self.rivals == "best":
            return own, F.one_hot(rivals.argmax(-1), classes).to(outputs.dtype)
        best = rivals.amax(-1, keepdim=True)
        margin = (outputs.detach() * own).sum(-1, keepdim=True) - best
        return own, (rivals >= best - self.tolerance * margin.abs()).to(outputs.dtype)


@dataclass(frozen=True)
class WeightDecay(Objective):
    """theta = -(1/(n w)) sum_i l'(Phi_i, y_i) grad Phi(x_i) at a minimum of mean loss + w/2 |theta|^2.

    Without the decay w the multipliers are free; with ``loss``, ``weight_decay`` and
    ``sample_count`` granted they are tied to the candidates: logistic lam_i = y_i sigmoid(-y_i
    Phi_i)/(n w), squared lam_i = 2 (y_i - Phi_i)/(n w), times a free scale around one.
    """

    name: ClassVar[str] = "weight-decay"
    paper: ClassVar[str] = "Buzaglo et al. 2023"
    task: ClassVar[str] = "regression"
    nonnegative: ClassVar[bool] = False
    tied: float = 0.0  # 1 / (n w) once known
    loss: str = ""

    @property
    def follows_outputs(self) -> bool:
        """Tied multipliers do."""
        return bool(self.tied)

    @classmethod
    def configured(cls, settings: AttackSettings, knowledge: Knowledge) -> Self:
        """With multipliers tied to the loss where knowledge allows."""
        if not (knowledge.weight_decay and knowledge.sample_count and knowledge.loss):
            return cls()
        if knowledge.loss not in ("logistic", "squared"):
            raise InputError(
                f"Multipliers are tied for the logistic and the squared loss; got {knowledge.loss!r}.",
                "Leave the loss out to keep them free.",
            )
        scale = 1 / (knowledge.sample_count * knowledge.weight_decay)
        return cls(tied=scale, loss=knowledge.loss)

    def why_applies(self, surface: Surface) -> str:
        """At a minimum of the decayed loss."""
        return "sound when the network was trained with weight decay"

    def why_skipped(self, task: str, knowledge: Knowledge) -> str:
        """A classifier that nobody said was decayed."""
        if task == self.task or knowledge.weight_decay is not None:
            return ""
        return "needs the weight decay of the training; grant it with --weight-decay"

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """One per output."""
        return (outputs,)

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Free: lam itself. Tied: the loss's derivative at the candidates' outputs."""
        if not self.tied:
            return lam
        return self.tied * self._pull(outputs, labels)[0] * lam

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Tied multipliers pass the derivative on to the outputs."""
        if not self.tied:
            return None, ubar
        pull, slope = self._pull(outputs, labels)
        return self.tied * slope * lam * ubar, self.tied * pull * ubar

    def _pull(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float]:
        """-l'(Phi, y) and its derivative in Phi."""
        y = labels.to(outputs.dtype)[..., None]
        if self.loss == "squared":
            return 2 * (y - outputs), -2.0
        s = torch.sigmoid(-y * outputs)
        return y * s, -s * (1 - s)


@dataclass(frozen=True)
class NTK(Objective):
    """theta - theta0 = sum_i lam_i grad Phi(x_i), gradients at theta, theta0 or both; lam free."""

    name: ClassVar[str] = "ntk"
    paper: ClassVar[str] = "Loo et al. 2024"
    surface: ClassVar[str] = CHANGE
    task: ClassVar[str] = "regression"
    nonnegative: ClassVar[bool] = False
    gradients: str = "theta"

    def gradient_points(self) -> tuple[str, ...]:
        """As asked for."""
        return ("theta", "theta0") if self.gradients == "both" else (self.gradients,)

    def __post_init__(self) -> None:
        require_known(self.gradients, ("theta", "theta0", "both"), "No gradient point")

    def why_not(self, outputs: int, task: str, knowledge: Knowledge) -> str:
        """The initial weights must be known."""
        known = knowledge.theta0 is not None
        return "" if known else "needs the initial weights theta0; grant them with --init"

    def why_applies(self, surface: Surface) -> str:
        """They are."""
        return "initial weights are at hand"

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """One per output and gradient point."""
        return (len(self.gradient_points()), outputs)

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """The multipliers of this point."""
        return lam[..., point, :]

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Only this point's multipliers take part."""
        inner = torch.zeros_like(lam)
        inner[..., point, :] = ubar
        return None, inner


@dataclass(frozen=True)
class Moment(Objective):
    """m = sum_i grad l(Phi(x_i), y_i) over the last batches, as momentum and Adam weigh them.

    The gates are those of the weights themselves, nearly, and nothing has to have converged. A loss
    pulls towards its own class: m = -sum_i lam_i y_i grad Phi(x_i), or with every rival c its own
    multiplier -sum_ic lam_ic grad (Phi_y - Phi_c)(x_i), lam >= 0. With one output and both signs of y
    that is a regression as well.
    """

    name: ClassVar[str] = "moment"
    paper: ClassVar[str] = "residuum's own"
    surface: ClassVar[str] = MOMENT

    def why_not(self, outputs: int, task: str, knowledge: Knowledge) -> str:
        """The state of the optimizer must be there."""
        if knowledge.moment is None:
            return "needs the state of an optimizer, in the file or of a live one"
        several = task == "regression" and outputs > 1
        return "needs one output; a regression of several is not covered" if several else ""

    def why_applies(self, surface: Surface) -> str:
        """What it is."""
        return "the optimizer keeps a mean of the last gradients"

    def labels(self, count: int, outputs: int, knowledge: Knowledge) -> Tensor:
        """As those of a classifier."""
        kind = Objective if outputs == 1 else MulticlassKKT
        return kind.labels(self, count, outputs, knowledge)

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """One per rival, or one."""
        return () if outputs == 1 else (outputs,)

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Down the loss."""
        classes = outputs.shape[-1]
        if classes == 1:
            return -(lam * labels.to(lam.dtype))[..., None]
        own = F.one_hot(labels.long(), classes).to(lam.dtype)
        rivals = lam * (1 - own)
        return rivals - rivals.sum(-1, keepdim=True) * own

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """The transpose of the linear map above."""
        classes = ubar.shape[-1]
        if classes == 1:
            return None, -ubar[..., 0] * labels.to(lam.dtype)
        own = F.one_hot(labels.long(), classes).to(lam.dtype)
        return None, (1 - own) * (ubar - (ubar * own).sum(-1, keepdim=True))


OBJECTIVES: Table[type[Objective]] = Table(
    "objective",
    {cls.name: cls for cls in (BinaryKKT, MulticlassKKT, WeightDecay, NTK, Moment)},
    base=Objective,
)
