"""What a set of samples and multipliers explains of a network, and how well: residual, margins, slack.

    target = sum_i lam_i grad_theta <c_i, Phi(theta; x_i)>,     lam_i > 0

c_i is the label (binary), the mix of class differences (multiclass), or the signed direction of free
multipliers (regression, NTK). Levels of Refael et al. 2025, Definition 3: the residual, the margin p,
and delta = max_i lam_i (m_i - p). A set made from another is judged at the levels of the one that
was given first: on a network that is no exact KKT point nothing reaches zero.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from residuum.stationarity import Theta, norm, parameters, weighted_gradient
from residuum.theory.kkt import evaluate, fit_multipliers
from residuum.theory.patterns import Switches, check_piecewise_linear, switches
from residuum.theory.rows import choose_task, constraint_rows, normalise_labels

TOLERANCE = 1e-9  # relative: below it a residual or a gap to the margin counts as zero


@dataclass(frozen=True, eq=False)
class Explanation:
    """Samples, labels and multipliers that explain a network, and how well they do.

    models: the network at every gradient point (one, but for NTK with both); target: what the sum
    must equal; x: (n, *shape); y: labels as the mathematics has them; lam: (n,); covectors: (n, P, C),
    c_i at every point; task: binary, multiclass, regression or ntk; before: the set this one was made
    from, None for one that was given. All in float64.
    """

    models: tuple[nn.Module, ...]
    target: Theta
    x: Tensor
    y: Tensor
    lam: Tensor
    covectors: Tensor
    task: str
    before: Self | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        lam: Tensor | None = None,
        *,
        task: str = "auto",
        rivals: str = "tied",
    ) -> Self:
        """A set on given samples. lam: one per constraint row; by default the best ones (NNLS)."""
        model = copy.deepcopy(model).double().requires_grad_(False)
        check_piecewise_linear(model)
        x = x.double()
        outputs = evaluate(model, x)
        task = choose_task(task, outputs.shape[1])
        y = normalise_labels(y, task, outputs.shape[1])
        rows = constraint_rows(outputs, y, task, rivals)
        if lam is None:
            lam = fit_multipliers(model, x, rows, free=task == "regression")[0]
        if task == "binary":
            return cls((model,), parameters(model), x, y, lam.double(), y[:, None, None], task)
        u = rows.combine(lam.double(), len(x))[:, None]
        size = -u.clamp(max=0).sum((1, 2)) if task == "multiclass" else u.flatten(1).norm(dim=1)
        return cls((model,), parameters(model), x, y, size, _over(u, size), task)

    @classmethod
    def ntk(cls, models: tuple[nn.Module, ...], target: Theta, x: Tensor, lam: Tensor) -> Self:
        """target = theta - theta0; lam: (n, P, C) free multipliers at every gradient point."""
        doubles = tuple(copy.deepcopy(m).double().requires_grad_(False) for m in models)
        for model in doubles:
            check_piecewise_linear(model)
        size = lam.double().flatten(1).norm(dim=1)
        wanted = {name: t.detach().double() for name, t in target.items()}
        return cls(doubles, wanted, x.double(), size, size, _over(lam.double(), size), "ntk")

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def u(self) -> Tensor:
        """(n, P, C) lam_i c_i."""
        return self.lam[:, None, None] * self.covectors

    @cached_property
    def residual(self) -> float:
        """||target - sum_i lam_i grad <c_i, Phi(x_i)>|| / ||target||."""
        left = dict(self.target)
        for p, model in enumerate(self.models):
            part = weighted_gradient(model, self.x, self.u[:, p])
            left = {name: left[name] - part[name] for name in left}
        return norm(left) / norm(self.target)

    @cached_property
    def outputs(self) -> Tensor:
        """(n, C) of the network at theta."""
        return evaluate(self.models[0], self.x)

    @cached_property
    def margins(self) -> Tensor | None:
        """(n, rows) margin of every constraint: one (binary), one per rival; None without any."""
        if self.task == "binary":
            return self.y[:, None] * self.outputs
        if self.task == "multiclass":
            rival = _rivals(self.y, self.outputs)
            own = self.outputs.gather(1, self.y[:, None])
            return own - self.outputs[rival].reshape(len(self), -1)
        return None

    @cached_property
    def row_multipliers(self) -> Tensor:
        """(n, rows) the multiplier of every constraint."""
        if self.task == "multiclass":
            return -self.u[:, 0][_rivals(self.y, self.outputs)].reshape(len(self), -1)
        return self.lam[:, None]

    @property
    def margin(self) -> float | None:
        """p: the smallest margin of this set."""
        return None if self.margins is None else float(self.margins.min())

    @property
    def slack(self) -> Tensor | None:
        """(n,) sum over its constraints of lam (m - p), p of the set that was given first."""
        p = self.root.margin
        if self.margins is None or p is None:
            return None
        return (self.row_multipliers * (self.margins - p)).sum(1)

    @property
    def delta(self) -> float | None:
        """max lam (m - p) over all constraints, p of this set (Definition 3)."""
        if self.margins is None:
            return None
        return float((self.row_multipliers * (self.margins - self.margins.min())).max())

    @property
    def root(self) -> Self:
        """The set that was given first."""
        return self if self.before is None else self.before.root

    @property
    def _signs(self) -> bool:
        return self.task in ("regression", "ntk") or bool((self.row_multipliers >= 0).all())

    @property
    def stationary_set(self) -> bool:
        """Whether it explains the target as well as the set given first: all that an attack sees."""
        return self._signs and self.residual <= self.root.residual + TOLERANCE

    @property
    def exact(self) -> bool:
        """Whether this is a KKT point to rounding, whatever it was made from."""
        slack = self.delta is None or self.delta <= TOLERANCE
        return self._signs and slack and self.residual <= TOLERANCE

    @property
    def on_margin(self) -> bool:
        """Whether margins are those of the first set: none below p, none in use above its largest.

        At an exact KKT point all constraints in use lie at p; at an approximate one some lie above.
        """
        if self.margins is None:
            return True
        assert self.root.margins is not None
        p, highest = self.root.margins.min(), self.root.margins[self.root.row_multipliers > 0].max()
        rounding = TOLERANCE * max(float(p.abs()), 1.0)
        own = self.margins[self.row_multipliers > 0]
        return bool((self.margins >= p - rounding).all() and (own <= highest + rounding).all())

    @property
    def full_kkt_set(self) -> bool:
        """Whether margins and slackness hold too, at the levels of the set given first."""
        if not (self.stationary_set and self.on_margin):
            return False
        if self.delta is None or self.root.delta is None:
            return True
        return self.delta <= self.root.delta + TOLERANCE

    @cached_property
    def switches(self) -> Switches:
        """The activation patterns of all samples."""
        return switches(self.models, self.x)


def _rivals(y: Tensor, outputs: Tensor) -> Tensor:
    return ~torch.nn.functional.one_hot(y, outputs.shape[1]).bool()


def _over(u: Tensor, size: Tensor) -> Tensor:
    """u / size per sample, zero where the size is."""
    return u / torch.where(size > 0, size, 1.0)[:, None, None]
