"""KKT sets: samples and multipliers that fit the same weights, checked, merged and split.

    target = sum_i lam_i grad_theta <c_i, Phi(theta; x_i)>,     lam_i > 0

c_i is the label (binary), the combination of class differences (multiclass), or the signed direction of
free multipliers (regression, NTK). Refael et al. 2025, Definition 3, measure a set by its residual, the
margin p, and delta = max_i lam_i (m_i - p). A set that was made from another set is compared with the
levels of the original set, because on a network that is no exact KKT point nothing reaches zero.

By Section 3 of that paper, grad_theta Phi is affine in x inside an activation pattern. So

    merge   x' = (lam_1 x_1 + lam_2 x_2) / (lam_1 + lam_2),   lam' = lam_1 + lam_2
    split   x + alpha nu with lam beta / (alpha + beta),   x - beta nu with lam alpha / (alpha + beta)

do not change the sum, for any depth and objective. Two properties are distinguished. A set is stationary if
it has the sum and the signs, which is all that an attack can check. It is a full KKT set if it also keeps
margins and slackness, which needs nu orthogonal to grad_x Phi.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from residuum.similarity import l2
from residuum.stationarity import Theta, layer_residuals, norm, parameters, weighted_gradient
from residuum.theory.budgets import Budgets, compute_exact_budgets, unit
from residuum.theory.directions import DIRECTIONS, SLOW, find_hidden_basis
from residuum.theory.kkt import evaluate, fit_multipliers, pose_problem
from residuum.theory.patterns import (
    HypothesisError,
    Switches,
    check_piecewise_linear,
    compute_switches,
)
from residuum.theory.rows import margins

TOLERANCE = 1e-9  # relative: a smaller residual or gap to the margin counts as zero
WATCHED_CHUNK = 4  # samples between two reports of progress
Watcher = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class KKTSet:
    """Samples, labels and multipliers that fit the weights of a network, and how well they do.

    All numbers are float64. Merging, splitting and far sets check their hypotheses exactly.

    Attributes:
        models: The network at every gradient point. There is one, except for NTK with both.
        target: What the sum must equal.
        x: (n, *shape) samples.
        y: Labels as in the mathematics.
        lam: (n,) multipliers.
        covectors: (n, P, C), c_i at every gradient point.
        task: binary, multiclass, regression or ntk.
        parent: The set from which this set was made, or None for an original set.
    """

    models: tuple[nn.Module, ...]
    target: Theta
    x: Tensor
    y: Tensor
    lam: Tensor
    covectors: Tensor
    task: str
    parent: KKTSet | None = None

    @classmethod
    def from_samples(
        cls,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        lam: Tensor | None = None,
        *,
        task: str = "auto",
        rivals: str = "tied",
    ) -> KKTSet:
        """Build a set from given samples.

        Args:
            model: The network.
            x: (n, *shape) samples.
            y: Labels.
            lam: A multiplier per constraint row. The default is the best fit (NNLS).
            task: binary, multiclass, regression, or auto.
            rivals: Which rival classes get a constraint: tied or best.

        Returns:
            The set.
        """
        check_piecewise_linear(model)
        model, x, y, _, task, rows = pose_problem(model, x, y, task, rivals)
        if lam is None:
            lam = fit_multipliers(model, x, rows, free=task == "regression")[0]
        if task == "binary":
            return cls((model,), parameters(model), x, y, lam.double(), y[:, None, None], task)
        u = rows.combine(lam.double(), len(x))[:, None]
        return cls.from_covectors((model,), parameters(model), x, y, u, task)

    @classmethod
    def from_covectors(
        cls,
        models: tuple[nn.Module, ...],
        target: Theta,
        x: Tensor,
        y: Tensor,
        u: Tensor,
        task: str,
    ) -> KKTSet:
        """Build a set from covectors with their multipliers, as an attack finds them.

        u is split into its size, which is the multiplier lam (n,), and a covector. The covector is -1/+1
        for a binary network. For several classes it has the shares of the rivals, so that lam is their
        sum. In all other cases the size is the norm of u. Negative multipliers of a margin are set to
        zero, because no KKT point has them.

        Args:
            models: The network at every gradient point.
            target: What the sum must equal.
            x: (n, *shape) samples.
            y: Labels.
            u: (n, P, C) products of multipliers and covectors.
            task: binary, multiclass, regression or ntk.

        Returns:
            The set.
        """
        for model in models:
            check_piecewise_linear(model)
        if task == "binary":
            y = torch.where(y > 0, 1.0, -1.0).to(x)
            return cls(models, target, x, y, (u[:, 0, 0] * y).clamp(min=0), y[:, None, None], task)
        if task == "multiclass":
            y = y.long()
            u = torch.where(
                torch.nn.functional.one_hot(y, u.shape[2]).bool()[:, None], 0, u.clamp(max=0)
            )
            size = -u.sum((1, 2))
            u = u + torch.nn.functional.one_hot(y, u.shape[2])[:, None] * size[:, None, None]
        else:
            size = u.flatten(1).norm(dim=1)
        return cls(models, target, x, y, size, _over(u, size), task)

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def u(self) -> Tensor:
        """(n, P, C) products lam_i c_i."""
        return self.lam[:, None, None] * self.covectors

    @cached_property
    def remainder(self) -> Theta:
        """The difference target - sum_i lam_i grad <c_i, Phi(x_i)>."""
        remainder = dict(self.target)
        for p, model in enumerate(self.models):
            gradient = weighted_gradient(model, self.x, self.u[:, p])
            remainder = {name: remainder[name] - gradient[name] for name in remainder}
        return remainder

    @property
    def residual(self) -> float:
        """||target - sum_i lam_i grad <c_i, Phi(x_i)>|| / ||target||."""
        return norm(self.remainder) / norm(self.target)

    @cached_property
    def layer_residuals(self) -> dict[str, float]:
        """The relative residual of every layer."""
        return layer_residuals(self.remainder, self.target)

    @cached_property
    def outputs(self) -> Tensor:
        """(n, C) outputs of the network at theta."""
        return evaluate(self.models[0], self.x)

    @cached_property
    def margins(self) -> Tensor | None:
        """(n, rows) margin of every constraint: one if binary, one per rival if multiclass, else None."""
        if self.task == "binary":
            return margins(self.outputs, self.y)
        if self.task == "multiclass":
            rivals = _rivals(self.y, self.outputs)
            return margins(self.outputs, self.y)[rivals].reshape(len(self), -1)
        return None

    @cached_property
    def row_multipliers(self) -> Tensor:
        """(n, rows) multiplier of every constraint."""
        if self.task == "multiclass":
            return -self.u[:, 0][_rivals(self.y, self.outputs)].reshape(len(self), -1)
        return self.lam[:, None]

    @property
    def margin(self) -> float | None:
        """The smallest margin p of this set, or None."""
        return None if self.margins is None else float(self.margins.min())

    @property
    def slack(self) -> Tensor | None:
        """(n,) sums of lam (m - p) over the constraints of a sample, with p of the original set."""
        p = self.root.margin
        if self.margins is None or p is None:
            return None
        return (self.row_multipliers * (self.margins - p)).sum(1)

    @property
    def delta(self) -> float | None:
        """The maximum of lam (m - p) over all constraints, with p of this set (Definition 3)."""
        if self.margins is None:
            return None
        return float((self.row_multipliers * (self.margins - self.margins.min())).max())

    @property
    def root(self) -> KKTSet:
        """The original set from which this set was made."""
        return self if self.parent is None else self.parent.root

    @property
    def _has_valid_signs(self) -> bool:
        return self.task in ("regression", "ntk") or bool((self.row_multipliers >= 0).all())

    @property
    def is_stationary_set(self) -> bool:
        """Whether this set fits the target as well as the original. Attacks can only check this."""
        return self._has_valid_signs and self.residual <= self.root.residual + TOLERANCE

    @property
    def is_exact(self) -> bool:
        """Whether this is a KKT point up to rounding."""
        slack = self.delta is None or self.delta <= TOLERANCE
        return self._has_valid_signs and slack and self.residual <= TOLERANCE

    @property
    def is_on_margin(self) -> bool:
        """Whether all margins, and the margins of active constraints, stay in the original range.

        No margin may be below p, and no active constraint above the largest active margin of the original
        set. At an exact KKT point all active constraints are at p. At an approximate one some are above.
        """
        if self.margins is None:
            return True
        assert self.root.margins is not None
        p, highest = self.root.margins.min(), self.root.margins[self.root.row_multipliers > 0].max()
        rounding = TOLERANCE * max(float(p.abs()), 1.0)
        active = self.margins[self.row_multipliers > 0]
        return bool((self.margins >= p - rounding).all() and (active <= highest + rounding).all())

    @property
    def is_full_kkt_set(self) -> bool:
        """Whether margins and slackness also hold, at the levels of the original set."""
        if not (self.is_stationary_set and self.is_on_margin):
            return False
        if self.delta is None or self.root.delta is None:
            return True
        return self.delta <= self.root.delta + TOLERANCE

    @cached_property
    def switches(self) -> Switches:
        """The activation patterns of all samples."""
        return compute_switches(self.models, self.x)

    @cached_property
    def gradients(self) -> Tensor:
        """(n, g, d) derivatives in x of every constraint, or of every output if there are none."""
        model, theta = self.models[0], parameters(self.models[0])
        classes = self.outputs.shape[1]

        def weighted_output(sample: Tensor, covector: Tensor) -> Tensor:
            return (covector * functional_call(model, theta, (sample[None],))[0]).sum()

        eye = torch.eye(classes, dtype=self.x.dtype, device=self.x.device)
        per_output = vmap(vmap(grad(weighted_output), (None, 0)), (0, None), chunk_size=64)
        return per_output(self.x, eye).flatten(2)  # they span the class differences

    @property
    def margin_slopes(self) -> Tensor:
        """(n, rows, d) derivatives in x of every margin."""
        if self.task == "binary":
            return self.y[:, None, None] * self.gradients
        label_gradients = self.gradients[torch.arange(len(self)), self.y]
        rival = _rivals(self.y, self.outputs)
        return (label_gradients[:, None] - self.gradients)[rival].reshape(
            len(self), -1, label_gradients.shape[1]
        )

    def budgets(self, direction: Tensor, samples: Tensor | None = None) -> Budgets:
        """Compute exact budgets of the samples along unit directions.

        Args:
            direction: (d,) a common direction, or a row for each sample.
            samples: Which samples, by default all.

        Returns:
            The budgets.
        """
        x = self.x if samples is None else self.x[samples]
        nu = direction.double().expand(len(x), x[0].numel()).reshape(x.shape)
        return compute_exact_budgets(self.models, x, nu)

    def directions(
        self, name: str = "softest", samples: Tensor | None = None, watch: Watcher | None = None
    ) -> Tensor:
        """Find directions that keep samples on their margin.

        Args:
            name: A rule of ``DIRECTIONS``.
            samples: Which samples, by default all.
            watch: Called with the number of finished samples and their total, if the rule is slow.

        Returns:
            (k, d) directions.
        """
        indices = torch.arange(len(self)) if samples is None else samples
        size = WATCHED_CHUNK if watch is not None and name in SLOW else max(1, len(indices))
        blocks = []
        for chunk in indices.split(size):
            blocks.append(DIRECTIONS[name](self.models, self.x, chunk, self.gradients[chunk]))
            if watch is not None:
                watch(sum(map(len, blocks)), len(indices))
        return torch.cat(blocks)

    def merge(self, i: int, k: int) -> KKTSet:
        """Replace samples i and k by their weighted mean, in the place of i.

        lam_i g(x_i) + lam_k g(x_k) = (lam_i + lam_k) g(mean), because g is affine inside a pattern. A pattern
        is convex, so it contains the mean. For samples of different patterns the equation is false. Then an
        error names the neurons that differ.

        Args:
            i: A sample.
            k: Another sample.

        Returns:
            The merged set.

        Raises:
            HypothesisError: If the samples cannot be merged.
        """
        if i == k:
            raise HypothesisError(
                "label", f"Merging needs two samples; got sample {i} twice.", "Pass another sample."
            )
        self._check_mergeable(i, k)
        return self._merged([[i, k], *([j] for j in range(len(self)) if j not in (i, k))])

    def merge_all(self) -> tuple[KKTSet, list[list[int]]]:
        """Merge active samples until no two have the same label, multipliers and pattern.

        Returns:
            The merged set, and the samples of this set behind each of its samples.
        """
        groups: list[list[int]] = []
        for k in range(len(self)):
            for group in groups:
                with suppress(HypothesisError):
                    self._check_mergeable(group[0], k)
                    group.append(k)
                    break
            else:
                groups.append([k])
        return self._merged(groups), groups

    def _merged(self, groups: list[list[int]]) -> KKTSet:
        """Return a set with one sample for each group, in the place of the group's first sample."""
        groups = sorted(groups)
        first = torch.tensor([group[0] for group in groups])
        lam = torch.stack([self.lam[group].sum() for group in groups])
        x = torch.stack(
            [
                torch.tensordot(self.lam[group], self.x[group], 1) / self.lam[group].sum()
                for group in groups
            ]
        )
        return self._with(x, self.y[first], lam, self.covectors[first])

    def _check_mergeable(self, i: int, k: int) -> None:
        """Raise an error that names the difference if two samples cannot be merged."""
        self._check_multiplier(torch.tensor([i, k]))
        if self.task in ("binary", "multiclass") and self.y[i] != self.y[k]:
            raise HypothesisError(
                "label",
                f"Merging needs samples of the same label; samples {i} and {k} have {self.y[i]:g} and "
                f"{self.y[k]:g}.",
                "Merge samples of the same class.",
            )
        scale = float(self.covectors[i].norm())
        if float((self.covectors[i] - self.covectors[k]).norm()) > TOLERANCE * scale:
            raise HypothesisError(
                "multiplier",
                f"Merging needs proportional multipliers over rivals or outputs; those of samples {i} "
                f"and {k} are not.",
                "Merge samples whose multipliers agree up to one positive factor.",
            )
        differ = self.switches.pattern[i] != self.switches.pattern[k]
        if differ.any():
            raise HypothesisError(
                "pattern",
                f"Merging needs samples of the same activation pattern; samples {i} and {k} differ at "
                f"{int(differ.sum())} neurons: {self.switches.names(differ)}.",
                "Merge samples of the same pattern.",
            )

    def split(
        self,
        i: int,
        direction: Tensor,
        alpha: float,
        beta: float | None = None,
        *,
        check: bool = True,
    ) -> KKTSet:
        """Replace sample i by two samples, in its place.

        Args:
            i: A sample.
            direction: (d,) direction of the split.
            alpha: Length in this direction.
            beta: Length in the opposite direction, by default alpha.
            check: Check that the lengths are within the budget.

        Returns:
            The set with the split sample.
        """
        nu, indices = direction.reshape(1, -1), torch.tensor([i])
        first = torch.tensor([alpha], dtype=torch.float64)
        second = None if beta is None else torch.full_like(first, beta)
        return self.split_all(nu, first, second, samples=indices, check=check)

    def split_all(
        self,
        directions: Tensor,
        alpha: Tensor,
        beta: Tensor | None = None,
        *,
        samples: Tensor | None = None,
        check: bool = True,
    ) -> KKTSet:
        """Split samples along individual directions by individual lengths.

        x becomes x + alpha nu with multiplier lam beta / (alpha + beta), and x - beta nu with the remaining
        multiplier. This keeps mass and moment, and an affine gradient depends on nothing else. Both halves
        follow each other in the place of their sample.

        Args:
            directions: (k, d), normalized to length 1.
            alpha: (k,) lengths forwards.
            beta: (k,) lengths backwards, by default alpha.
            samples: Which samples, by default all.
            check: Check that the lengths are within the budget. Beyond it a sample leaves its pattern,
                and the set is no longer stationary.

        Returns:
            The set with the split samples.

        Raises:
            HypothesisError: If a length, a budget or a multiplier does not allow the split.
        """
        indices = torch.arange(len(self)) if samples is None else samples
        nu = torch.stack([unit(direction) for direction in directions.expand(len(indices), -1)])
        self._check_multiplier(indices)
        alpha, beta = (
            length.double().expand(len(indices))
            for length in (alpha, alpha if beta is None else beta)
        )
        if not bool(((alpha > 0) & (beta > 0) & (alpha + beta).isfinite()).all()):
            raise HypothesisError(
                "budget",
                "Both halves of a split must move by a positive finite length; at least one does not.",
                "Pass positive finite lengths.",
            )
        if check:
            self._check_budget(indices, nu, alpha, beta)
        shape = (-1, *[1] * (self.x.ndim - 1))
        step = nu.reshape(len(indices), *self.x.shape[1:])
        share = alpha / (alpha + beta)
        copies = torch.ones(len(self), dtype=torch.long).index_fill(0, indices, 2)
        first = (copies.cumsum(0) - copies)[indices]  # position of the first half
        x, y, lam, c = (
            t.repeat_interleave(copies, 0) for t in (self.x, self.y, self.lam, self.covectors)
        )
        x[first] += alpha.reshape(shape) * step
        x[first + 1] -= beta.reshape(shape) * step
        lam[first] *= 1 - share
        lam[first + 1] *= share
        return self._with(x, y, lam, c)

    def used(self) -> KKTSet:
        """Return the set without samples of multiplier zero, which do not contribute to the weights."""
        return self.take(self.lam != 0)

    def take(self, samples: Tensor) -> KKTSet:
        """Return the set that has only some of the samples."""
        return self._with(
            self.x[samples], self.y[samples], self.lam[samples], self.covectors[samples]
        )

    def far_set(self, r: float) -> KKTSet:
        """Build a set at least ``r`` away from every sample of this set (Theorem 4, for any depth).

        Every active sample is split along a direction that the first layer ignores, so outputs of the network
        do not change. Samples of multiplier zero are removed.

        Args:
            r: The distance.

        Returns:
            The far set.

        Raises:
            HypothesisError: If the distance is not positive, or if the first layer has full rank.
        """
        if not 0 < r < float("inf"):
            raise HypothesisError(
                "budget", f"A distance must be positive and finite; got {r}.", "Pass r=1.0."
            )
        basis = find_hidden_basis(self.models, self.x)
        if not basis.shape[1]:
            raise HypothesisError(
                "subspace",
                f"A far set needs a direction orthogonal to all neurons of the first layer; the layer has "
                f"full rank {self.x[0].numel()}.",
                "Split within the budgets instead: call split_all, or pass --budget-frac.",
            )
        nu, used = basis[:, 0], self.used()
        along = self.x.flatten(1) @ nu
        length = r * (1 + 1e-12) + float(along.max() - along.min())
        lengths = torch.full((len(used),), length, dtype=torch.float64)
        return dataclasses.replace(used.split_all(nu[None], lengths), parent=self)

    def distance(self, other: KKTSet) -> float:
        """Return d(A, B), the smallest distance between a sample of this set and a sample of ``other``."""
        return float(l2(self.x, other.x).min())

    def _check_budget(self, indices: Tensor, nu: Tensor, alpha: Tensor, beta: Tensor) -> None:
        """Raise an error that names the limiting neurons if a split would leave its pattern."""
        budgets = self.budgets(nu, indices)
        bad = ((alpha >= budgets.alpha) | (beta >= budgets.beta)).nonzero()[:, 0].tolist()
        if not bad:
            return
        k = bad[0]
        i, kinks = int(indices[k]), int(budgets.kinks[k].sum())
        if kinks:
            raise HypothesisError(
                "kink",
                f"A sample with kinks cannot be split along a direction that moves them; sample {i} has "
                f"{kinks}: {budgets.names(k)}.",
                "Use a direction orthogonal to these neurons: directions('softest').",
            )
        raise HypothesisError(
            "budget",
            f"A split must stay inside its activation pattern; sample {i} may move by less than "
            f"{float(budgets.alpha[k]):.6g} and {float(budgets.beta[k]):.6g}, got {float(alpha[k]):.6g} and "
            f"{float(beta[k]):.6g}. The limiting neurons are {budgets.names(k)}.",
            "Pass a shorter length or another direction.",
        )

    def _check_multiplier(self, indices: Tensor) -> None:
        bad = indices[self.lam[indices] <= 0].tolist()
        if bad:
            raise HypothesisError(
                "multiplier",
                f"Merging and splitting need positive multipliers; sample {bad[0]} has "
                f"{float(self.lam[bad[0]]):g}.",
                "Remove such samples with used(): they do not contribute to the weights.",
            )

    def _with(self, x: Tensor, y: Tensor, lam: Tensor, covectors: Tensor) -> KKTSet:
        return dataclasses.replace(self, x=x, y=y, lam=lam, covectors=covectors, parent=self)


def _rivals(y: Tensor, outputs: Tensor) -> Tensor:
    return ~torch.nn.functional.one_hot(y, outputs.shape[1]).bool()


def _over(u: Tensor, size: Tensor) -> Tensor:
    """Return u / size per sample, or zero if the size is zero."""
    return u / torch.where(size > 0, size, 1.0)[:, None, None]
