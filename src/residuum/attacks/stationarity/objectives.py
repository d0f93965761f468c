"""Objectives define the target, the gradients and the multipliers of each attack. All attacks share one loss.

    L(x, lam) = sum_l w_l || target_l - sum_i grad_l <u_i, Phi(x_i)> ||^2,   u = covectors(lam, ...)

Phi is the network with released weights theta and initial weights theta0. x_i are candidates with labels y_i
and multipliers lam_i. The covectors u_i weight the outputs of the network in the gradients, and w_l weights
layer l. The target comes from the attack surface (``surfaces/surface.py``).

==================  ===============  ==================================  ==========================
attack              target           u_i                                 multipliers
==================  ===============  ==================================  ==========================
binary KKT [H]      theta            lam_i y_i                           lam >= 0
multiclass KKT [B]  theta            sum_c lam_ic (e_y - e_c)            lam >= 0, per rival
weight decay [B]    theta            lam_i, or -l'(Phi_i, y_i) / (n w)   free, or none
NTK [L]             theta - theta0   lam_i at theta, theta0 or both      free, one set per point
moment              m                -lam_i y_i, -sum_c lam_ic (e_y-e_c) lam >= 0, per rival
==================  ===============  ==================================  ==========================

[H] Haim et al. 2022, [B] Buzaglo et al. 2023, [L] Loo et al. 2024. Here m is an optimizer state, e are unit
vectors, l' is the derivative of the loss, n the number of samples, and w the weight decay. "Per rival" means
one multiplier for each class c that competes with the label. "One set per point" means separate multipliers
for the gradients at theta and at theta0. Free multipliers can have any sign.

To add an objective, write one frozen class with a ``covectors`` method, here or in an installed package, and
add one line to ``OBJECTIVES``. The class also defines its options and when it applies. Try it first with
``plain.attack``.
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
from residuum.surfaces.surface import CHANGE, MOMENT, SURFACES, UPDATE, WEIGHTS, Surface

UNKNOWN_WEIGHTS = "needs the weights at which the update was computed; pass them with --base"


@dataclass(frozen=True)
class Objective(ABC):
    """Base class of the equations that attacks solve. Subclasses define the multipliers.

    By default, gradients are taken at the released weights theta, and their weighted sum must equal theta.

    The dataclass fields are options of the objective. If the attack has a setting with the name of an option,
    the option has the value of this setting.

    Attributes:
        name: Name of the objective.
        paper: Publication of the equation.
        surface: Name of the attack surface whose tensors the weighted sum of gradients must equal.
        task: Task ("binary", "multiclass" or "regression") that a certificate assumes. A certificate is a
            proof about the candidates. If the task is "", the certificate assumes the task of the network.
        nonnegative: Whether the multipliers must be nonnegative.
        points: Names of the weights at which gradients are taken: "theta", "theta0" or both.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    surface: ClassVar[str] = WEIGHTS
    task: ClassVar[str] = ""
    nonnegative: ClassVar[bool] = True
    points: ClassVar[tuple[str, ...]] = ("theta",)

    @classmethod
    def from_settings(cls, settings: AttackSettings, knowledge: Knowledge) -> Self:
        """Create the objective (the equation of an attack), with options from the attack's settings.

        Args:
            settings: Settings of the attack.
            knowledge: What the attacker knows.

        Returns:
            The objective.
        """
        option_names = {f.name for f in fields(cls)} & type(settings).model_fields.keys()
        return cls(**{name: getattr(settings, name) for name in option_names})

    @property
    def follows_outputs(self) -> bool:
        """Whether the weights of the outputs in the sum of gradients (covectors u) depend on the outputs.

        The covectors u are the weights of the outputs in the sum of gradients. If this property is True, the
        derivative of the loss in a candidate includes the derivative of u.

        Returns:
            False by default.
        """
        return False

    def gradient_points(self) -> tuple[str, ...]:
        """Return at which weights gradients are taken: the trained "theta", the initial "theta0", or both."""
        return self.points

    def why_not(self, outputs: int, task: str, knowledge: Knowledge) -> str:
        """Return why the objective does not apply to a network.

        Args:
            outputs: Number of outputs of the network.
            task: Task of the network, "" if it is not known.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the objective applies.
        """
        return ""

    def why_applies(self, surface: Surface) -> str:
        """Return in a few words why the objective applies to a network."""
        return "applies to this network"

    def why_skipped(self, task: str, knowledge: Knowledge) -> str:
        """Return why an audit skips the objective although it applies.

        Args:
            task: Task of the network, "" if it is not known.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the audit does not skip the objective.
        """
        return ""

    def check(self, outputs: int, knowledge: Knowledge) -> None:
        """Raise an error if the network or the attacker's knowledge does not suit the equation of the attack.

        The task of the network is not checked.

        Args:
            outputs: Number of outputs of the network.
            knowledge: What the attacker knows.

        Raises:
            InputError: If the objective does not apply to the network.
        """
        if why_not := self.why_not(outputs, "", knowledge):
            raise InputError(
                f"The attack must suit the network. The attack objective `{type(self).__name__}` does not, "
                f"because it {why_not}.",
                "To list the attacks that apply, run: residuum audit CKPT --dry-run",
            )

    def create_surface(self, theta: Theta, knowledge: Knowledge) -> Surface:
        """Create the attack surface: the tensors that the weighted sum of gradients must equal.

        The architecture of the network is not needed.

        Args:
            theta: Released weights by parameter name.
            knowledge: What the attacker knows.

        Returns:
            The attack surface. Its attribute ``target`` holds the tensors.
        """
        return SURFACES[self.surface](Network(theta, ""), knowledge)

    def labels(self, count: int, outputs: int, knowledge: Knowledge) -> Tensor:
        """Return a binary label for every candidate.

        The first half of the labels is -1, as in the released code of Haim et al. 2022.

        Args:
            count: Number of candidates.
            outputs: Number of outputs of the network.
            knowledge: What the attacker knows, such as the balance of the labels.

        Returns:
            Labels (count,).
        """
        balance = knowledge.label_balance or (0.5, 0.5)
        negative_count = round(count * balance[0] / sum(balance))
        return torch.cat([-torch.ones(negative_count), torch.ones(count - negative_count)])

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """Return the shape of the multipliers (weights) of one candidate. It is () for a single number."""
        return ()

    @abstractmethod
    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Return the covectors u of the candidates: the weights of the outputs in the sum of gradients.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).

        Returns:
            The covectors u (weights of the outputs), of shape (..., m, C).
        """

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Compute derivatives of the loss with respect to the outputs and the multipliers lam (chain rule).

        The derivative in the covectors u (weights of the outputs) is given.

        By default, ``covectors`` is differentiated automatically. A subclass can override this method to be
        faster.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).
            ubar: Derivative of the loss with respect to the covectors u (weights of the outputs).

        Returns:
            The derivative in the outputs, or None if u does not depend on the outputs, and the derivative
            in lam.
        """

        def u(outputs: Tensor, lam: Tensor) -> Tensor:
            return self.covectors(point, outputs, labels, lam)

        return torch.func.vjp(u, outputs, lam)[1](ubar)


class MarginKKT(Objective):
    """KKT equation of margin maximization.

    Homogeneous classifiers that are trained to zero loss satisfy this equation in the limit.
    """

    def why_not(self, outputs: int, task: str, knowledge: Knowledge) -> str:
        """Return why the KKT equation does not apply: it needs a classifier with the right number of outputs.

        Args:
            outputs: Number of outputs of the network.
            task: Task of the network, "" if it is not known.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the objective applies.
        """
        if (outputs == 1) != (self.task == "binary"):
            requirement = "one output" if self.task == "binary" else "at least 2 outputs"
            return f"needs {requirement}; this network has {outputs}"
        return "needs a classifier; this network is a regression" if task == "regression" else ""

    def why_applies(self, surface: Surface) -> str:
        """Say whether the network is homogeneous, as the theorem about the KKT equation requires."""
        if (order := surface.checkpoint.homogeneity_order) is None:
            return (
                "not homogeneous: the KKT theorem does not cover it, published attacks still worked"
            )
        return f"homogeneous of order {order:g}: training to zero loss leads to a KKT point"


@dataclass(frozen=True)
class BinaryKKT(MarginKKT):
    """KKT equation of a binary classifier Phi with weights theta.

        theta = sum_i lam_i y_i grad Phi(x_i)

    The samples x_i have the labels y_i and the multipliers lam_i >= 0. Gradients are taken in the weights.
    """

    name: ClassVar[str] = "binary-kkt"
    paper: ClassVar[str] = "Haim et al. 2022"
    task: ClassVar[str] = "binary"

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Return the weight u_i = lam_i y_i of the output for each candidate: multiplier times label.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).

        Returns:
            The covectors u (weights of the outputs), of shape (..., m, C).
        """
        return (lam * labels.to(lam.dtype))[..., None]

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return the derivative of the loss in the multipliers lam_i: label y_i times the derivative in u_i.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).
            ubar: Derivative of the loss with respect to the covectors u (weights of the outputs).

        Returns:
            None, because u does not depend on the outputs, and the derivative in lam.
        """
        return None, ubar[..., 0] * labels.to(lam.dtype)


@dataclass(frozen=True)
class MulticlassKKT(MarginKKT):
    """KKT equation of a multiclass classifier with weights theta and one output Phi_c for each class c.

        theta = sum_ic lam_ic grad (Phi_y - Phi_c)(x_i)

    For a sample x_i with label y, c runs over the rival classes: the classes other than y with the largest
    outputs. The multipliers lam_ic are nonnegative. Gradients are taken in the weights.

    Attributes:
        rivals: "tied" gives a multiplier to every rival class whose output is within ``tolerance`` of the
            largest rival output. "best" gives one multiplier, to the rival with the largest output, as
            published.
        tolerance: Largest distance of a rival's output from the largest rival output, relative to the margin.
    """

    name: ClassVar[str] = "multiclass-kkt"
    paper: ClassVar[str] = "Buzaglo et al. 2023"
    task: ClassVar[str] = "multiclass"
    rivals: str = "tied"
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        require_known(self.rivals, ("tied", "best"), "No rivals rule")

    def labels(self, count: int, outputs: int, knowledge: Knowledge) -> Tensor:
        """Return a class label for each candidate, in the proportions that the attacker knows.

        Args:
            count: Number of candidates.
            outputs: Number of outputs of the network.
            knowledge: What the attacker knows.

        Returns:
            Labels (count,).
        """
        class_shares = torch.tensor(knowledge.label_balance or [1 / outputs] * outputs)
        class_boundaries = (class_shares.cumsum(0) / class_shares.sum() * count).round().long()
        return torch.bucketize(torch.arange(count), class_boundaries, right=True).clamp(
            max=outputs - 1
        )

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """Return the shape of the multipliers (weights) of one candidate.

        If the option ``rivals`` is "tied", a candidate has one multiplier for each class. Otherwise a
        candidate has a single multiplier.
        """
        return (outputs,) if self.rivals == "tied" else ()

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Return the weights of the outputs for each candidate, u_i = sum_c lam_ic (e_y - e_c).

        Here lam_ic are multipliers, and e are unit vectors.

        The sum runs over the rivals c, the classes that compete with the label y. The choice of the rivals
        is not differentiated.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).

        Returns:
            The covectors u (weights of the outputs), of shape (..., m, C).
        """
        one_hot, is_rival = self._rivals(outputs, labels)
        rival_weights = is_rival * (lam if self.rivals == "tied" else lam[..., None])
        return rival_weights.sum(-1, keepdim=True) * one_hot - rival_weights

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return the derivative of the loss in the multipliers: <ubar, e_y - e_c> for every wrong class c.

        Here e are unit vectors, and y is the label.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).
            ubar: Derivative of the loss with respect to the covectors u (weights of the outputs).

        Returns:
            None, because the choice of the rivals is not differentiated, and the derivative in lam.
        """
        one_hot, is_rival = self._rivals(outputs, labels)
        inner_products = is_rival * ((ubar * one_hot).sum(-1, keepdim=True) - ubar)
        return None, inner_products if self.rivals == "tied" else inner_products.sum(-1)

    def _rivals(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the one-hot labels, and a mask (..., m, C) of the rival classes of each candidate.

        Rival classes compete with the label. Each rival class in the mask has a multiplier.
        """
        class_count = outputs.shape[-1]
        one_hot = F.one_hot(labels.long(), class_count).to(outputs.dtype)
        rival_outputs = outputs.detach().masked_fill(one_hot.bool(), -torch.inf)
        if self.rivals == "best":
            return one_hot, F.one_hot(rival_outputs.argmax(-1), class_count).to(outputs.dtype)
        largest_output = rival_outputs.amax(-1, keepdim=True)
        margin = (outputs.detach() * one_hot).sum(-1, keepdim=True) - largest_output
        is_rival = rival_outputs >= largest_output - self.tolerance * margin.abs()
        return one_hot, is_rival.to(outputs.dtype)


@dataclass(frozen=True)
class WeightDecay(Objective):
    """Equation of a network Phi that was trained with weight decay w on n samples x_i with labels y_i.

    At a minimum theta of mean loss + w/2 |theta|^2, the following equation holds. Here l' is the derivative
    of the loss in the output Phi_i = Phi(x_i), and gradients are taken in the weights theta.

        theta = -(1/(n w)) sum_i l'(Phi_i, y_i) grad Phi(x_i)

    The multiplier lam_i of a sample is the factor of its gradient. If the attacker knows the loss, the weight
    decay and the number of samples n, the outputs Phi_i of the candidates decide the multipliers. The attack
    then optimizes only a factor for each candidate, which is close to 1 at a solution. Otherwise the
    multipliers can have any value. If the outputs decide the multipliers, the formulas are:

        logistic loss   lam_i = y_i sigmoid(-y_i Phi_i) / (n w)
        squared loss    lam_i = 2 (y_i - Phi_i) / (n w)

    Attributes:
        tied: 1 / (n w) if the outputs decide the multipliers, 0 if the multipliers can have any value.
        loss: Loss of the training, "logistic" or "squared", if the outputs decide the multipliers.
    """

    name: ClassVar[str] = "weight-decay"
    paper: ClassVar[str] = "Buzaglo et al. 2023"
    task: ClassVar[str] = "regression"
    nonnegative: ClassVar[bool] = False
    tied: float = 0.0
    loss: str = ""

    @property
    def follows_outputs(self) -> bool:
        """Whether the multipliers (weights of the candidates) follow from the outputs of the network."""
        return bool(self.tied)

    @classmethod
    def from_settings(cls, settings: AttackSettings, knowledge: Knowledge) -> Self:
        """Create the objective.

        If the attacker knows the weight decay, the number of samples and the loss, the outputs of the network
        decide the multipliers.

        Args:
            settings: Settings of the attack.
            knowledge: What the attacker knows.

        Returns:
            The objective.

        Raises:
            InputError: If the loss is neither logistic nor squared.
        """
        if not (knowledge.weight_decay and knowledge.sample_count and knowledge.loss):
            return cls()
        if knowledge.loss not in ("logistic", "squared"):
            raise InputError(
                "An attack can compute the multipliers (the weights of the samples) from the `loss` only "
                f"if the loss is 'logistic' or 'squared'; got {knowledge.loss!r}.",
                "Omit `loss`. The attack then searches for the multipliers.",
            )
        multiplier_scale = 1 / (knowledge.sample_count * knowledge.weight_decay)
        return cls(tied=multiplier_scale, loss=knowledge.loss)

    def why_applies(self, surface: Surface) -> str:
        """Return the assumption of the equation for the report: the network was trained with weight decay."""
        return "sound when the network was trained with weight decay"

    def why_skipped(self, task: str, knowledge: Knowledge) -> str:
        """Return why an audit does not run this attack on a classifier whose weight decay is not known.

        Args:
            task: Task of the network, "" if it is not known.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the audit does not skip the objective.
        """
        if task == self.task or knowledge.weight_decay is not None:
            return ""
        return "needs the weight decay of the training; pass it with --weight-decay"

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """Return the shape of a candidate's multipliers (weights): one for each output of the network."""
        return (outputs,)

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Return the covectors u of the candidates, which are the weights of the network's outputs.

        If the multipliers lam can have any value, u is lam. If the outputs decide the multipliers, u is
        -lam times the derivative of the loss, divided by the number of samples times the weight decay.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).

        Returns:
            The covectors u (weights of the outputs), of shape (..., m, C).
        """
        if not self.tied:
            return lam
        return self.tied * self._loss_derivatives(outputs, labels)[0] * lam

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return the derivatives of the loss with respect to the outputs and the multipliers.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).
            ubar: Derivative of the loss with respect to the covectors u (weights of the outputs).

        Returns:
            The derivative in the outputs, or None if the outputs do not decide the multipliers, and the
            derivative in lam.
        """
        if not self.tied:
            return None, ubar
        descent, slope = self._loss_derivatives(outputs, labels)
        return self.tied * slope * lam * ubar, self.tied * descent * ubar

    def _loss_derivatives(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return minus the first and minus the second derivative of the training loss in the outputs."""
        label_column = labels.to(outputs.dtype)[..., None]
        if self.loss == "squared":
            return 2 * (label_column - outputs), -2.0
        sigmoid = torch.sigmoid(-label_column * outputs)
        return label_column * sigmoid, -sigmoid * (1 - sigmoid)


@dataclass(frozen=True)
class NTK(Objective):
    """Equation of the weight update of a network Phi, from initial weights theta0 to released weights theta.

        theta - theta0 = sum_i lam_i grad Phi(x_i)

    Gradients are taken in the weights, at theta, at theta0 or at both. The multipliers lam_i of the samples
    x_i can have any sign.

    Attributes:
        gradients: Weights at which gradients are taken: "theta", "theta0" or "both".
    """

    name: ClassVar[str] = "ntk"
    paper: ClassVar[str] = "Loo et al. 2024"
    surface: ClassVar[str] = CHANGE
    task: ClassVar[str] = "regression"
    nonnegative: ClassVar[bool] = False
    gradients: str = "theta"

    def gradient_points(self) -> tuple[str, ...]:
        """Return at which weights gradients are taken: the trained "theta", the initial "theta0", or both."""
        return ("theta", "theta0") if self.gradients == "both" else (self.gradients,)

    def __post_init__(self) -> None:
        require_known(self.gradients, ("theta", "theta0", "both"), "No gradient point")

    def why_not(self, outputs: int, task: str, knowledge: Knowledge) -> str:
        """Return why the attack on the weight update does not apply: it needs the initial weights.

        Args:
            outputs: Number of outputs of the network.
            task: Task of the network, "" if it is not known.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the objective applies.
        """
        if knowledge.theta0 is not None:
            return ""
        return "needs the initial weights theta0; pass them with --init"

    def why_applies(self, surface: Surface) -> str:
        """Return the reason why the attack applies: the initial weights are known."""
        return "the initial weights are known"

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """Return the shape (P, outputs) of a candidate's multipliers.

        P is the number of weights at which gradients are taken: 2 for theta and theta0, otherwise 1.
        """
        return (len(self.gradient_points()), outputs)

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Return the weights of the outputs (covectors u): multipliers of the gradients at theta or theta0.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).

        Returns:
            The covectors u (weights of the outputs), of shape (..., m, C).
        """
        return lam[..., point, :]

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return the derivative of the loss with respect to the multipliers (weights of the candidates).

        If ``point`` means theta, the multipliers of the gradients at theta0 have a derivative of zero, and
        vice versa.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).
            ubar: Derivative of the loss with respect to the covectors u (weights of the outputs).

        Returns:
            None, because u does not depend on the outputs, and the derivative in lam.
        """
        lam_derivative = torch.zeros_like(lam)
        lam_derivative[..., point, :] = ubar
        return None, lam_derivative


@dataclass(frozen=True)
class Moment(Objective):
    """Equation of an optimizer state m, a weighted sum of the loss's gradients over the last batches.

    The optimizer, SGD with momentum or Adam, decides the weights of the gradients.

    The equation does not require that training converged. Gradients are taken in the released weights, whose
    active ReLUs are nearly those of the last batches. Phi is the network, and a sample x_i has the label y_i
    or y and the multipliers lam_i or lam_ic. A descent step increases the output of the correct class y,
    relative to the outputs of the rival classes c:

        one output        m = -sum_i lam_i y_i grad Phi(x_i)
        several outputs   m = -sum_ic lam_ic grad (Phi_y - Phi_c)(x_i) over rivals c

    The multipliers are nonnegative. A regression with one output satisfies the same equation, if candidates
    with labels -1 and +1 are allowed.
    """

    name: ClassVar[str] = "moment"
    paper: ClassVar[str] = "residuum's own"
    surface: ClassVar[str] = MOMENT

    def why_not(self, outputs: int, task: str, knowledge: Knowledge) -> str:
        """Return why the equation of an optimizer state does not apply to a network.

        Args:
            outputs: Number of outputs of the network.
            task: Task of the network, "" if it is not known.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the objective applies.
        """
        if knowledge.moment is None:
            return "needs the state of an optimizer, from the file or from a live one"
        if knowledge.update == "alone":
            return UNKNOWN_WEIGHTS
        if task == "regression" and outputs > 1:
            return "needs one output; a regression of several outputs is not covered"
        return ""

    def why_applies(self, surface: Surface) -> str:
        """Return a text that says that the optimizer state is a mean of gradients."""
        is_update = surface.label == UPDATE
        return f"the {'update' if is_update else 'optimizer state'} is a sum or mean of gradients"

    def labels(self, count: int, outputs: int, knowledge: Knowledge) -> Tensor:
        """Return a label for each candidate: -1 or 1 for one output, class numbers for several outputs.

        Args:
            count: Number of candidates.
            outputs: Number of outputs of the network.
            knowledge: What the attacker knows.

        Returns:
            Labels (count,).
        """
        objective_class = Objective if outputs == 1 else MulticlassKKT
        return objective_class.labels(self, count, outputs, knowledge)

    def multiplier_shape(self, outputs: int) -> tuple[int, ...]:
        """Return the shape of a candidate's multipliers (weights): one per class, or one for one output."""
        return () if outputs == 1 else (outputs,)

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Return the covectors u of the candidates, which are the weights of the network's outputs.

        u_i is -lam_i y_i for one output, and -sum_c lam_ic (e_y - e_c) for several, with unit vectors e.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).

        Returns:
            The covectors u (weights of the outputs), of shape (..., m, C).
        """
        output_count = outputs.shape[-1]
        if output_count == 1:
            return -(lam * labels.to(lam.dtype))[..., None]
        one_hot = F.one_hot(labels.long(), output_count).to(lam.dtype)
        rival_lam = lam * (1 - one_hot)
        return rival_lam - rival_lam.sum(-1, keepdim=True) * one_hot

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return the derivative of the loss with respect to the multipliers (weights of the candidates).

        ``covectors`` is linear in the multipliers, so this method applies the transpose of that linear map.

        Args:
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            outputs: Outputs of the network for the candidates (..., m, C).
            labels: Labels of the candidates (m,), or (..., m) if runs have different labels.
            lam: Multipliers (weights) of the candidates (..., m, *multiplier_shape).
            ubar: Derivative of the loss with respect to the covectors u (weights of the outputs).

        Returns:
            None, because u does not depend on the outputs, and the derivative in lam.
        """
        output_count = ubar.shape[-1]
        if output_count == 1:
            return None, -ubar[..., 0] * labels.to(lam.dtype)
        one_hot = F.one_hot(labels.long(), output_count).to(lam.dtype)
        return None, (1 - one_hot) * (ubar - (ubar * one_hot).sum(-1, keepdim=True))


OBJECTIVES: Table[type[Objective]] = Table(
    "objective",
    {cls.name: cls for cls in (BinaryKKT, MulticlassKKT, WeightDecay, NTK, Moment)},
    base=Objective,
)
