"""KKT sets: samples whose gradients, weighted by multipliers, add up to the weights of a network.

    target = sum_i lam_i grad_theta <c_i, Phi(theta; x_i)>,     lam_i > 0

The target is the vector that the weighted sum of gradients must equal, usually the weights. The covector c_i
weights the outputs Phi of the network. For a binary network it is the label. For several classes it is the
unit vector of the label minus a weighted mean of the unit vectors of the other classes. For a regression or
an NTK set, multipliers may be negative, and c_i is the direction of the multipliers of all outputs.

Refael et al. 2025, Definition 3, measure three numbers of a set: its residual, its smallest margin p, and
delta = max_i lam_i (m_i - p) with the margins m_i. Residual and delta are rarely zero, because trained
networks are not exact KKT points. So if a set was made from another set, its numbers are compared with those
of the original set.

By Section 3 of that paper, grad_theta Phi is affine in x as long as the activation pattern does not change.
So

    merge   x' = (lam_1 x_1 + lam_2 x_2) / (lam_1 + lam_2),   lam' = lam_1 + lam_2
    split   x + alpha nu with lam beta / (alpha + beta),   x - beta nu with lam alpha / (alpha + beta)

do not change the sum of gradients, for any depth and objective. A set can have two properties. A set is
stationary if its sum of gradients equals the target and its multipliers have the right signs. An attack can
check only this property. A stationary set is a full KKT set if it meets two more conditions. Its
margins stay in the range of the original set, and its delta is at most that of the original set. To keep the
margins, the direction nu of a split must be orthogonal to grad_x Phi.
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

TOLERANCE = 1e-9  # smaller relative errors count as zero, for the KKT equation and for margins
# If the directions in which samples are split are slow to compute, progress is reported after this number
# of samples.
WATCHED_CHUNK = 4
Watcher = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class KKTSet:
    """Samples whose gradients, weighted by multipliers, add up to the weights of a network.

    The methods merge and split samples without a change of this sum. They raise an error if a condition for
    this is not met. All numbers are float64.

    Attributes:
        models: Copies of the network, one for each of the P weight vectors at which gradients are taken.
            There is one copy, or two for the NTK objective with initial and final weights.
        target: The vector that the weighted sum of gradients must equal, by parameter.
        x: (n, *shape) samples.
        y: Labels from :func:`residuum.theory.rows.normalize_labels`.
        lam: (n,) multipliers.
        covectors: (n, P, C) vectors by which the C outputs of the network are weighted before a gradient is
            taken.
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
        """Build a set from samples, and fit multipliers if none are passed.

        Args:
            model: The network.
            x: (n, *shape) samples.
            y: Labels of the samples.
            lam: A multiplier for each constraint. By default nonnegative least squares fits the multipliers.
            task: binary, multiclass, regression, or auto to choose by the number of outputs.
            rivals: Which other classes of a sample get a constraint: ``tied`` for all classes whose margin is
                close to the smallest margin, ``best`` for the class with the smallest margin.

        Returns:
            The set of samples and multipliers.
        """
        check_piecewise_linear(model)
        model, x, y, _, task, rows = pose_problem(model, x, y, task, rivals)
        if lam is None:
            lam = fit_multipliers(model, x, rows, free=task == "regression")[0]
        if task == "binary":
            return cls((model,), parameters(model), x, y, lam.double(), y[:, None, None], task)
        # For each sample: the sum over its constraints of multiplier times output weights (covector).
        output_weights = rows.combine(lam.double(), len(x))[:, None]
        return cls.from_covectors((model,), parameters(model), x, y, output_weights, task)

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
        """Build a set from products of multipliers and covectors, as an attack finds them.

        Each product ``u`` is factorized into a multiplier and a covector (weights of the network's outputs).
        For a binary network, the covector is the label -1/+1. For several classes, the multiplier is the sum
        of the multipliers of all rival classes. The covector contains the share of each rival class in this
        sum. In all other cases the multiplier is the norm of ``u``. Negative multipliers of margins are set
        to zero, because multipliers are nonnegative at a KKT point.

        Args:
            models: Copies of the network, one for each of the P weight vectors at which gradients are taken.
            target: The vector that the weighted sum of gradients must equal, by parameter.
            x: (n, *shape) samples.
            y: Labels of the samples.
            u: (n, P, C) products of multipliers and covectors, for C outputs.
            task: binary, multiclass, regression or ntk.

        Returns:
            The set of samples and multipliers.
        """
        for model in models:
            check_piecewise_linear(model)
        if task == "binary":
            binary_labels = torch.where(y > 0, 1.0, -1.0).to(x)
            multipliers = (u[:, 0, 0] * binary_labels).clamp(min=0)
            return cls(
                models, target, x, binary_labels, multipliers, binary_labels[:, None, None], task
            )
        if task == "multiclass":
            y = y.long()
            one_hot_labels = torch.nn.functional.one_hot(y, u.shape[2])[:, None]
            rival_products = torch.where(one_hot_labels.bool(), 0, u.clamp(max=0))
            multipliers = -rival_products.sum((1, 2))
            u = rival_products + one_hot_labels * multipliers[:, None, None]
        else:
            multipliers = u.flatten(1).norm(dim=1)
        return cls(models, target, x, y, multipliers, _divide(u, multipliers), task)

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def u(self) -> Tensor:
        """Products of the multipliers and the covectors (weights of the outputs), (n, P, C)."""
        return self.lam[:, None, None] * self.covectors

    @cached_property
    def remainder(self) -> Theta:
        """The error of the equation by parameter: the target minus the weighted sum of gradients."""
        target_minus_sum = dict(self.target)
        for p, model in enumerate(self.models):
            weighted_sum = weighted_gradient(model, self.x, self.u[:, p])
            target_minus_sum = {
                name: target_minus_sum[name] - weighted_sum[name] for name in target_minus_sum
            }
        return target_minus_sum

    @property
    def residual(self) -> float:
        """The norm of the difference between target and weighted sum of gradients, over the target's norm."""
        return norm(self.remainder) / norm(self.target)

    @cached_property
    def layer_residuals(self) -> dict[str, float]:
        """For each layer, the norm of target minus sum of gradients, divided by the norm of the target."""
        return layer_residuals(self.remainder, self.target)

    @cached_property
    def outputs(self) -> Tensor:
        """(n, C) outputs of the network for the samples."""
        return evaluate(self.models[0], self.x)

    @cached_property
    def margins(self) -> Tensor | None:
        """(n, k) margins of the samples, one for each of their k constraints.

        A sample has one constraint for binary networks and one for each rival class for several classes. The
        margins are None for other tasks.
        """
        if self.task == "binary":
            return margins(self.outputs, self.y)
        if self.task == "multiclass":
            is_rival = _rivals(self.y, self.outputs)
            return margins(self.outputs, self.y)[is_rival].reshape(len(self), -1)
        return None

    @cached_property
    def row_multipliers(self) -> Tensor:
        """(n, k) multipliers of the samples, one for each of their k constraints."""
        if self.task == "multiclass":
            return -self.u[:, 0][_rivals(self.y, self.outputs)].reshape(len(self), -1)
        return self.lam[:, None]

    @property
    def margin(self) -> float | None:
        """The smallest margin of the samples in this set, None for tasks without margins."""
        return None if self.margins is None else float(self.margins.min())

    @property
    def slack(self) -> Tensor | None:
        """(n,) violations of the KKT condition lam (m - p) = 0, or None for tasks without margins.

        Here lam and m are the multiplier and the margin of a constraint, and p is the smallest margin of the
        original set. The violation of a sample is the sum of lam (m - p) over its constraints.
        """
        smallest_margin = self.root.margin
        if self.margins is None or smallest_margin is None:
            return None
        return (self.row_multipliers * (self.margins - smallest_margin)).sum(1)

    @property
    def delta(self) -> float | None:
        """The largest violation of the KKT condition lam (m - p) = 0, or None for tasks without margins.

        Here lam and m are the multiplier and the margin of a constraint, and p is the smallest margin of this
        set. Delta is the maximum of lam (m - p) over all constraints (Refael et al. 2025, Definition 3).
        """
        if self.margins is None:
            return None
        return float((self.row_multipliers * (self.margins - self.margins.min())).max())

    @property
    def root(self) -> KKTSet:
        """The original set of samples from which this set was made by splits and merges."""
        return self if self.parent is None else self.parent.root

    @property
    def _has_valid_signs(self) -> bool:
        return self.task in ("regression", "ntk") or bool((self.row_multipliers >= 0).all())

    @property
    def is_stationary_set(self) -> bool:
        """Whether the weighted sum of gradients explains the weights as well as for the original set.

        An attack can check only this property of a set, because the attacker does not know the margins.
        """
        return self._has_valid_signs and self.residual <= self.root.residual + TOLERANCE

    @property
    def is_exact(self) -> bool:
        """Whether the network solves the KKT equation of margin maximization for this set up to rounding."""
        has_zero_delta = self.delta is None or self.delta <= TOLERANCE
        return self._has_valid_signs and has_zero_delta and self.residual <= TOLERANCE

    @property
    def is_on_margin(self) -> bool:
        """Whether all margins of the samples stay in the range of the original set.

        No margin may be below the smallest margin of the original set. A constraint with a positive
        multiplier may not exceed the largest margin of such a constraint in the original set. At an exact KKT
        point all these constraints have the smallest margin, and at an approximate KKT point some exceed it.
        """
        if self.margins is None:
            return True
        assert self.root.margins is not None
        lowest, highest = (
            self.root.margins.min(),
            self.root.margins[self.root.row_multipliers > 0].max(),
        )
        tolerance = TOLERANCE * max(float(lowest.abs()), 1.0)
        margins_with_multiplier = self.margins[self.row_multipliers > 0]
        return bool(
            (self.margins >= lowest - tolerance).all()
            and (margins_with_multiplier <= highest + tolerance).all()
        )

    @property
    def is_full_kkt_set(self) -> bool:
        """Whether this set explains the weights, including the margins, as well as the original set.

        The residual and ``delta`` must be at most those of the original set, and the margins must stay in the
        range of the original set.
        """
        if not (self.is_stationary_set and self.is_on_margin):
            return False
        if self.delta is None or self.root.delta is None:
            return True
        return self.delta <= self.root.delta + TOLERANCE

    @cached_property
    def switches(self) -> Switches:
        """The values of all switches (such as inputs of ReLUs) at the samples.

        Their signs are the activation patterns.
        """
        return compute_switches(self.models, self.x)

    @cached_property
    def gradients(self) -> Tensor:
        """(n, g, d) derivatives of the network's g outputs with respect to the d entries of each sample."""
        model, theta = self.models[0], parameters(self.models[0])
        output_count = self.outputs.shape[1]

        def weighted_output(sample: Tensor, covector: Tensor) -> Tensor:
            return (covector * functional_call(model, theta, (sample[None],))[0]).sum()

        unit_covectors = torch.eye(output_count, dtype=self.x.dtype, device=self.x.device)
        compute_output_gradients = vmap(
            vmap(grad(weighted_output), (None, 0)), (0, None), chunk_size=64
        )
        return compute_output_gradients(self.x, unit_covectors).flatten(2)

    @property
    def margin_slopes(self) -> Tensor:
        """(n, k, d) derivatives of each sample's k margins with respect to the d entries of the sample."""
        if self.task == "binary":
            return self.y[:, None, None] * self.gradients
        label_gradients = self.gradients[torch.arange(len(self)), self.y]
        is_rival = _rivals(self.y, self.outputs)
        return (label_gradients[:, None] - self.gradients)[is_rival].reshape(
            len(self), -1, label_gradients.shape[1]
        )

    def budgets(self, direction: Tensor, samples: Tensor | None = None) -> Budgets:
        """Compute how far samples can move along unit directions before their activation patterns change.

        Args:
            direction: (d,) common direction of all samples, or (k, d) with a row for each sample.
            samples: Indices of the k samples, by default all samples.

        Returns:
            The exact distances, called budgets, on both sides of each sample.
        """
        chosen_samples = self.x if samples is None else self.x[samples]
        unit_directions = (
            direction.double()
            .expand(len(chosen_samples), chosen_samples[0].numel())
            .reshape(chosen_samples.shape)
        )
        return compute_exact_budgets(self.models, chosen_samples, unit_directions)

    def directions(
        self, name: str = "softest", samples: Tensor | None = None, watch: Watcher | None = None
    ) -> Tensor:
        """Find directions along which samples can be split without a change of their margins.

        Args:
            name: Name of the rule that chooses directions, a key of ``DIRECTIONS``.
            samples: Indices of the k samples, by default all samples.
            watch: Function that is called with the number of finished samples and the number of all samples.

        Returns:
            (k, d) unit directions.
        """
        sample_indices = torch.arange(len(self)) if samples is None else samples
        chunk_size = (
            WATCHED_CHUNK if watch is not None and name in SLOW else max(1, len(sample_indices))
        )
        found_directions = []
        for chunk in sample_indices.split(chunk_size):
            found_directions.append(
                DIRECTIONS[name](self.models, self.x, chunk, self.gradients[chunk])
            )
            if watch is not None:
                watch(sum(map(len, found_directions)), len(sample_indices))
        return torch.cat(found_directions)

    def merge(self, i: int, k: int) -> KKTSet:
        """Replace two samples by their mean, weighted by their multipliers, in the place of the first one.

        The mean has the sum of both multipliers. The weighted sum of gradients does not change, because
        gradients are affine in x inside an activation pattern, and because the mean has the same pattern. If
        the samples have different patterns, an error names the neurons that differ.

        Args:
            i: Index of the first sample.
            k: Index of the second sample.

        Returns:
            The set with the merged sample.

        Raises:
            HypothesisError: If label, pattern or multipliers of the samples do not allow a merge.
        """
        if i == k:
            raise HypothesisError(
                f"Only two different samples can be merged; got sample {i} twice.",
                "Pass the index of another sample.",
                hypothesis="label",
            )
        self._check_mergeable(i, k)
        return self._merged([[i, k], *([j] for j in range(len(self)) if j not in (i, k))])

    def merge_all(self) -> tuple[KKTSet, list[list[int]]]:
        """Merge all samples that have the same label, activation pattern and proportional multipliers.

        Returns:
            The merged set. Then, for each sample of the merged set, the indices of the original samples from
            which it was made.
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
        """Replace each group of samples by one sample: the weighted mean of the group."""
        groups = sorted(groups)
        first_samples = torch.tensor([group[0] for group in groups])
        merged_multipliers = torch.stack([self.lam[group].sum() for group in groups])
        merged_samples = torch.stack(
            [
                torch.tensordot(self.lam[group], self.x[group], 1) / self.lam[group].sum()
                for group in groups
            ]
        )
        return self._with(
            merged_samples, self.y[first_samples], merged_multipliers, self.covectors[first_samples]
        )

    def _check_mergeable(self, i: int, k: int) -> None:
        """Raise an error with the reason if two samples cannot be merged."""
        self._check_multiplier(torch.tensor([i, k]))
        if self.task in ("binary", "multiclass") and self.y[i] != self.y[k]:
            raise HypothesisError(
                f"Two samples can be merged only if their labels are equal; got samples {i} and {k} with "
                f"the labels {self.y[i]:g} and {self.y[k]:g}.",
                "Merge samples of the same class.",
                hypothesis="label",
            )
        covector_norm = float(self.covectors[i].norm())
        if float((self.covectors[i] - self.covectors[k]).norm()) > TOLERANCE * covector_norm:
            raise HypothesisError(
                f"Two samples can be merged only if the vectors of their multipliers (one for each wrong "
                f"class or output) are proportional; those of the samples {i} and {k} are not.",
                "Merge samples whose multipliers differ only by a positive factor.",
                hypothesis="multiplier",
            )
        is_different = self.switches.pattern[i] != self.switches.pattern[k]
        if is_different.any():
            raise HypothesisError(
                f"Two samples can be merged only if they activate the same neurons; the samples {i} and "
                f"{k} differ at {int(is_different.sum())} neurons: {self.switches.names(is_different)}.",
                "Merge samples that activate the same neurons.",
                hypothesis="pattern",
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
        """Replace one sample by two samples that lie on opposite sides of it.

        Args:
            i: Index of the sample.
            direction: (d,) direction of the split.
            alpha: Distance that the first half moves in this direction.
            beta: Distance that the second half moves in the opposite direction, by default alpha.
            check: Whether to check that both halves keep the activation pattern of the sample.

        Returns:
            The set with both halves in the place of the sample.
        """
        nu, indices = direction.reshape(1, -1), torch.tensor([i])
        forward_lengths = torch.tensor([alpha], dtype=torch.float64)
        backward_lengths = None if beta is None else torch.full_like(forward_lengths, beta)
        return self.split_all(nu, forward_lengths, backward_lengths, samples=indices, check=check)

    def split_all(
        self,
        directions: Tensor,
        alpha: Tensor,
        beta: Tensor | None = None,
        *,
        samples: Tensor | None = None,
        check: bool = True,
    ) -> KKTSet:
        """Split each sample into two halves, along a direction and by lengths of its own.

        The first half of x is x + alpha nu with multiplier lam beta / (alpha + beta). The second half is
        x - beta nu with the remaining multiplier. The sum of multipliers and the weighted mean of the samples
        do not change. Gradients are affine in x, so the weighted sum of gradients does not change either. In
        the new set, the two halves take the place of their sample.

        Args:
            directions: (k, d) directions nu, which are scaled to length 1.
            alpha: (k,) distances that the first halves move.
            beta: (k,) distances that the second halves move in the opposite direction, by default alpha.
            samples: Indices of the k samples, by default all samples.
            check: Whether to check that both halves keep the activation pattern of their sample. If a half
                leaves this pattern, the set is no longer stationary.

        Returns:
            The set with the split samples.

        Raises:
            HypothesisError: If a length, an activation pattern or a multiplier does not allow the split.
        """
        sample_indices = torch.arange(len(self)) if samples is None else samples
        unit_directions = torch.stack(
            [unit(direction) for direction in directions.expand(len(sample_indices), -1)]
        )
        self._check_multiplier(sample_indices)
        alpha, beta = (
            length.double().expand(len(sample_indices))
            for length in (alpha, alpha if beta is None else beta)
        )
        if not bool(((alpha > 0) & (beta > 0) & (alpha + beta).isfinite()).all()):
            raise HypothesisError(
                "The two halves of a split sample must move by positive finite lengths; got a length that "
                "is not positive and finite.",
                "Correct the lengths 'alpha' and 'beta'.",
                hypothesis="budget",
            )
        if check:
            self._check_budget(sample_indices, unit_directions, alpha, beta)
        broadcast_shape = (-1, *[1] * (self.x.ndim - 1))
        unit_steps = unit_directions.reshape(len(sample_indices), *self.x.shape[1:])
        backward_shares = alpha / (alpha + beta)
        copies_per_sample = torch.ones(len(self), dtype=torch.long).index_fill(0, sample_indices, 2)
        # Each split sample becomes two samples, its halves. These are the indices of the first halves in
        # the new set.
        first_halves = (copies_per_sample.cumsum(0) - copies_per_sample)[sample_indices]
        x, y, lam, covectors = (
            t.repeat_interleave(copies_per_sample, 0)
            for t in (self.x, self.y, self.lam, self.covectors)
        )
        x[first_halves] += alpha.reshape(broadcast_shape) * unit_steps
        x[first_halves + 1] -= beta.reshape(broadcast_shape) * unit_steps
        lam[first_halves] *= 1 - backward_shares
        lam[first_halves + 1] *= backward_shares
        return self._with(x, y, lam, covectors)

    def used(self) -> KKTSet:
        """Return the set without the samples whose multiplier is zero.

        These samples do not contribute to the weights.
        """
        return self.take(self.lam != 0)

    def take(self, samples: Tensor) -> KKTSet:
        """Select samples of the set by indices or by a mask."""
        return self._with(
            self.x[samples], self.y[samples], self.lam[samples], self.covectors[samples]
        )

    def far_set(self, r: float) -> KKTSet:
        """Build a set whose samples are at least ``r`` away from every sample of this set.

        Every sample is split along a direction that is orthogonal to all weights of the first layer, so the
        outputs of the network do not change (Refael et al. 2025, Theorem 4, here for any depth). Samples with
        multiplier zero are removed.

        Args:
            r: The smallest distance between a sample of this set and a sample of the new set.

        Returns:
            The new set.

        Raises:
            HypothesisError: If the distance is not positive and finite, or if no direction is orthogonal to
                all weights of the first layer.
        """
        if not 0 < r < float("inf"):
            raise HypothesisError(
                f"The distance 'r' between the new samples and the original samples must be positive and "
                f"finite; got {r}.",
                "Pass a positive number.",
                hypothesis="budget",
            )
        null_space_basis = find_hidden_basis(self.models, self.x)
        if not null_space_basis.shape[1]:
            raise HypothesisError(
                f"Samples can move arbitrarily far only along a direction that is orthogonal to the "
                f"first-layer weights of all neurons; these weights have full rank {self.x[0].numel()}, "
                f"so no such direction exists.",
                "Move the samples by shorter distances: call KKTSet.split_all, or pass --budget-frac.",
                hypothesis="subspace",
            )
        nu, used = null_space_basis[:, 0], self.used()
        components_along_nu = self.x.flatten(1) @ nu
        length = r * (1 + 1e-12) + float(components_along_nu.max() - components_along_nu.min())
        lengths = torch.full((len(used),), length, dtype=torch.float64)
        return dataclasses.replace(used.split_all(nu[None], lengths), parent=self)

    def distance(self, other: KKTSet) -> float:
        """Return the smallest distance between a sample of this set and a sample of ``other``."""
        return float(l2(self.x, other.x).min())

    def _check_budget(self, indices: Tensor, nu: Tensor, alpha: Tensor, beta: Tensor) -> None:
        """Raise an error if a half of a split sample would activate other neurons than the sample."""
        budgets = self.budgets(nu, indices)
        blocked_samples = (
            ((alpha >= budgets.alpha) | (beta >= budgets.beta)).nonzero()[:, 0].tolist()
        )
        if not blocked_samples:
            return
        first_blocked = blocked_samples[0]
        i, kinks = int(indices[first_blocked]), int(budgets.kinks[first_blocked].sum())
        if kinks:
            raise HypothesisError(
                f"A sample at which the input of a ReLU is exactly zero can be split in two only along a "
                f"direction that keeps this input at zero; at sample {i}, the inputs of {kinks} neurons "
                f"are zero: {budgets.names(first_blocked)}.",
                "Pass a direction that keeps these inputs at zero, such as KKTSet.directions('softest').",
                hypothesis="kink",
            )
        raise HypothesisError(
            f"A sample can be split in two only if both halves activate the same neurons as the sample. "
            f"So the halves of sample {i} must move by less than "
            f"{float(budgets.alpha[first_blocked]):.6g} forwards and "
            f"{float(budgets.beta[first_blocked]):.6g} backwards; got {float(alpha[first_blocked]):.6g} "
            f"and {float(beta[first_blocked]):.6g}. Neurons that would change: "
            f"{budgets.names(first_blocked)}.",
            "Pass a shorter length or another direction.",
            hypothesis="budget",
        )

    def _check_multiplier(self, indices: Tensor) -> None:
        without_multiplier = indices[self.lam[indices] <= 0].tolist()
        if without_multiplier:
            raise HypothesisError(
                f"Only samples that contribute to the weights can be merged or split, so their "
                f"multipliers must be positive; got sample {without_multiplier[0]} with multiplier "
                f"{float(self.lam[without_multiplier[0]]):g}.",
                "Call KKTSet.used(), which removes the samples that do not contribute to the weights.",
                hypothesis="multiplier",
            )

    def _with(self, x: Tensor, y: Tensor, lam: Tensor, covectors: Tensor) -> KKTSet:
        return dataclasses.replace(self, x=x, y=y, lam=lam, covectors=covectors, parent=self)


def _rivals(y: Tensor, outputs: Tensor) -> Tensor:
    return ~torch.nn.functional.one_hot(y, outputs.shape[1]).bool()


def _divide(u: Tensor, multipliers: Tensor) -> Tensor:
    """Divide the products ``u`` (n, P, C) by the n multipliers. A multiplier of 0 counts as 1."""
    return u / torch.where(multipliers > 0, multipliers, 1.0)[:, None, None]
