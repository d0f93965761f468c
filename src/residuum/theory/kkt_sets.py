"""KKT sets: samples and multipliers that explain the same weights, judged, merged and split.

    target = sum_i lam_i grad_theta <c_i, Phi(theta; x_i)>,     lam_i > 0

c_i is the label (binary), the mix of class differences (multiclass), or the signed direction of free
multipliers (regression, NTK). Levels of Refael et al. 2025, Definition 3: the residual, the margin p,
and delta = max_i lam_i (m_i - p). A set made from another is judged at the levels of the one that
was given first: on a network that is no exact KKT point nothing reaches zero.

Section 3 there: inside an activation pattern grad_theta Phi is affine in x, so

    merge   x' = (lam_1 x_1 + lam_2 x_2) / (lam_1 + lam_2),   lam' = lam_1 + lam_2
    split   x + alpha nu with lam beta / (alpha + beta),   x - beta nu with lam alpha / (alpha + beta)

leave the sum as it is, whatever the depth and the objective. Two claims are kept apart:
``stationary_set`` (the sum and the signs: all that an attack sees) and ``full_kkt_set`` (margins and
slackness too), which needs nu orthogonal to grad_x Phi.
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
from residuum.theory.budgets import Budgets, exact_budgets, unit
from residuum.theory.directions import DIRECTIONS, SLOW, hidden_basis
from residuum.theory.kkt import evaluate, fit_multipliers, posed
from residuum.theory.patterns import HypothesisError, Switches, check_piecewise_linear, switches
from residuum.theory.rows import margins

TOLERANCE = 1e-9  # relative: below it a residual or a gap to the margin counts as zero
CHUNK = 4  # samples between two looks at the progress
Watcher = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class KKTSet:
    """Samples, labels and multipliers that explain a network, and how well they do.

    models: the network at every gradient point (one, but for NTK with both).
    target: what the sum must equal.
    x: (n, *shape).
    y: labels as the mathematics has them.
    lam: (n,).
    covectors: (n, P, C), c_i at every point.
    task: binary, multiclass, regression or ntk.
    before: the set this one was made from, None for one that was given.

    All in float64. Merging, splitting and far sets check their hypotheses exactly.
    """

    models: tuple[nn.Module, ...]
    target: Theta
    x: Tensor
    y: Tensor
    lam: Tensor
    covectors: Tensor
    task: str
    before: KKTSet | None = None

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
    ) -> KKTSet:
        """A set on given samples. lam: one per constraint row; by default the best ones (NNLS)."""
        check_piecewise_linear(model)
        model, x, y, _, task, rows = posed(model, x, y, task, rivals)
        if lam is None:
            lam = fit_multipliers(model, x, rows, free=task == "regression")[0]
        if task == "binary":
            return cls((model,), parameters(model), x, y, lam.double(), y[:, None, None], task)
        u = rows.combine(lam.double(), len(x))[:, None]
        return cls.weighted((model,), parameters(model), x, y, u, task)

    @classmethod
    def weighted(
        cls,
        models: tuple[nn.Module, ...],
        target: Theta,
        x: Tensor,
        y: Tensor,
        u: Tensor,
        task: str,
    ) -> KKTSet:
        """From u: (n, P, C) covectors with their multipliers, as an attack has them.

        u is taken apart into a size, the multiplier lam (n,), and a covector of that size: one, -1/+1,
        for a binary network; for several classes shares of the rivals, so that lam is their sum;
        anything else by its norm. Negative multipliers of a margin count as none: no KKT point has
        them.
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
        """(n, P, C) lam_i c_i."""
        return self.lam[:, None, None] * self.covectors

    @cached_property
    def left(self) -> Theta:
        """target - sum_i lam_i grad <c_i, Phi(x_i)>."""
        left = dict(self.target)
        for p, model in enumerate(self.models):
            part = weighted_gradient(model, self.x, self.u[:, p])
            left = {name: left[name] - part[name] for name in left}
        return left

    @property
    def residual(self) -> float:
        """||target - sum_i lam_i grad <c_i, Phi(x_i)>|| / ||target||."""
        return norm(self.left) / norm(self.target)

    @cached_property
    def layer_residuals(self) -> dict[str, float]:
        """The same, layer by layer."""
        return layer_residuals(self.left, self.target)

    @cached_property
    def outputs(self) -> Tensor:
        """(n, C) of the network at theta."""
        return evaluate(self.models[0], self.x)

    @cached_property
    def margins(self) -> Tensor | None:
        """(n, rows) margin of every constraint: one (binary), one per rival; None without any."""
        if self.task == "binary":
            return margins(self.outputs, self.y)
        if self.task == "multiclass":
            rivals = _rivals(self.y, self.outputs)
            return margins(self.outputs, self.y)[rivals].reshape(len(self), -1)
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
    def root(self) -> KKTSet:
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

    @cached_property
    def gradients(self) -> Tensor:
        """(n, g, d) derivative in x of every constraint, or of every output where there is none."""
        model, theta = self.models[0], parameters(self.models[0])
        classes = self.outputs.shape[1]

        def one(sample: Tensor, covector: Tensor) -> Tensor:
            return (covector * functional_call(model, theta, (sample[None],))[0]).sum()

        eye = torch.eye(classes, dtype=self.x.dtype, device=self.x.device)
        per_output = vmap(vmap(grad(one), (None, 0)), (0, None), chunk_size=64)
        return per_output(self.x, eye).flatten(2)  # class differences lie in their span

    @property
    def margin_slopes(self) -> Tensor:
        """(n, rows, d) derivative in x of every margin."""
        if self.task == "binary":
            return self.y[:, None, None] * self.gradients
        own = self.gradients[torch.arange(len(self)), self.y]
        rival = _rivals(self.y, self.outputs)
        return (own[:, None] - self.gradients)[rival].reshape(len(self), -1, own.shape[1])

    def budgets(self, direction: Tensor, samples: Tensor | None = None) -> Budgets:
        """Exact budgets of the samples along unit directions, (d,) or one row each."""
        x = self.x if samples is None else self.x[samples]
        nu = direction.double().expand(len(x), x[0].numel()).reshape(x.shape)
        return exact_budgets(self.models, x, nu)

    def directions(
        self, name: str = "softest", samples: Tensor | None = None, watch: Watcher | None = None
    ) -> Tensor:
        """(k, d) directions that keep samples on their margin, found by a rule of ``DIRECTIONS``.

        watch(done, of): called on the way where samples are gone through one by one.
        """
        some = torch.arange(len(self)) if samples is None else samples
        size = CHUNK if watch is not None and name in SLOW else max(1, len(some))
        parts = []
        for chunk in some.split(size):
            parts.append(DIRECTIONS[name](self.models, self.x, chunk, self.gradients[chunk]))
            if watch is not None:
                watch(sum(map(len, parts)), len(some))
        return torch.cat(parts)

    def merge(self, i: int, k: int) -> KKTSet:
        """One sample for samples i and k: their weighted mean, in the place of i.

        lam_i g(x_i) + lam_k g(x_k) = (lam_i + lam_k) g(mean) because g is affine inside a pattern, and
        a pattern is convex: the mean is in it. Across patterns the statement is false, and refused with
        the neurons that differ.
        """
        if i == k:
            raise HypothesisError("label", "Merging needs two samples; got one.", "Name another.")
        self._check_alike(i, k)
        return self._merged([[i, k], *([j] for j in range(len(self)) if j not in (i, k))])

    def merge_all(self) -> tuple[KKTSet, list[list[int]]]:
        """Merge samples in use until no two share label, multipliers and pattern.

        Returns:
            The merged set, and the samples of this set behind each of its samples.
        """
        groups: list[list[int]] = []
        for k in range(len(self)):
            for group in groups:
                with suppress(HypothesisError):
                    self._check_alike(group[0], k)
                    group.append(k)
                    break
            else:
                groups.append([k])
        return self._merged(groups), groups

    def _merged(self, groups: list[list[int]]) -> KKTSet:
        """One sample for each group, in the place of the group's first."""
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

    def _check_alike(self, i: int, k: int) -> None:
        """Refuse two samples that cannot be merged, naming what differs."""
        self._check_multiplier(torch.tensor([i, k]))
        if self.task in ("binary", "multiclass") and self.y[i] != self.y[k]:
            raise HypothesisError(
                "label",
                f"Merging needs one label; samples {i} and {k} have {self.y[i]:g} and {self.y[k]:g}.",
                "Merge samples of one class.",
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
                f"Merging needs one activation pattern; samples {i} and {k} differ at "
                f"{int(differ.sum())} neurons: {self.switches.names(differ)}.",
                "Merge samples of one pattern.",
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
        """Two samples for sample i, in its place; check=False goes beyond the budget as told."""
        nu, some = direction.reshape(1, -1), torch.tensor([i])
        first = torch.tensor([alpha], dtype=torch.float64)
        second = None if beta is None else torch.full_like(first, beta)
        return self.split_all(nu, first, second, samples=some, check=check)

    def split_all(
        self,
        directions: Tensor,
        alpha: Tensor,
        beta: Tensor | None = None,
        *,
        samples: Tensor | None = None,
        check: bool = True,
    ) -> KKTSet:
        """Every sample (or those named) split along its own direction (k, d) by its own lengths (k,).

        x becomes x + alpha nu with lam beta / (alpha + beta) and x - beta nu with the rest: mass and
        moment, all that an affine gradient sees, are kept. Halves stand one after the other in the
        place of their sample.

        directions: (k, d), brought to length 1.
        alpha, beta: forwards and backwards; beta is alpha where it is not given.
        check: False for lengths beyond the budget, which leave the pattern and with it stationarity.
        """
        some = torch.arange(len(self)) if samples is None else samples
        nu = torch.stack([unit(one) for one in directions.expand(len(some), -1)])
        self._check_multiplier(some)
        alpha, beta = (
            length.double().expand(len(some)) for length in (alpha, alpha if beta is None else beta)
        )
        if not bool(((alpha > 0) & (beta > 0) & (alpha + beta).isfinite()).all()):
            raise HypothesisError(
                "budget",
                "Both halves of a split must move by a positive finite length.",
                "Raise it.",
            )
        if check:
            self._check_budget(some, nu, alpha, beta)
        shape = (-1, *[1] * (self.x.ndim - 1))
        step = nu.reshape(len(some), *self.x.shape[1:])
        share = alpha / (alpha + beta)
        copies = torch.ones(len(self), dtype=torch.long).index_fill(0, some, 2)
        first = (copies.cumsum(0) - copies)[some]  # where the halves go
        x, y, lam, c = (
            t.repeat_interleave(copies, 0) for t in (self.x, self.y, self.lam, self.covectors)
        )
        x[first] += alpha.reshape(shape) * step
        x[first + 1] -= beta.reshape(shape) * step
        lam[first] *= 1 - share
        lam[first + 1] *= share
        return self._with(x, y, lam, c)

    def used(self) -> KKTSet:
        """The set without samples of multiplier zero, which explain nothing."""
        return self.take(self.lam != 0)

    def take(self, samples: Tensor) -> KKTSet:
        """The set of some samples alone."""
        return self._with(
            self.x[samples], self.y[samples], self.lam[samples], self.covectors[samples]
        )

    def far_set(self, r: float) -> KKTSet:
        """Theorem 4 for any depth: a set at least r away from every sample of this one.

        Every sample in use is split along a direction that no first layer sees; the network's
        outputs stay what they are. Samples of multiplier zero are left out.
        """
        if not 0 < r < float("inf"):
            raise HypothesisError(
                "budget", f"A distance must be positive and finite; got {r}.", "Use 1."
            )
        basis = hidden_basis(self.models, self.x)
        if not basis.shape[1]:
            raise HypothesisError(
                "subspace",
                f"A far set needs a direction that no neuron of the first layer sees; the layer has full "
                f"rank {self.x[0].numel()}.",
                "Split along the budgets instead: split_all, or --budget-frac.",
            )
        nu, some = basis[:, 0], self.used()
        along = self.x.flatten(1) @ nu
        length = r * (1 + 1e-12) + float(along.max() - along.min())
        lengths = torch.full((len(some),), length, dtype=torch.float64)
        return dataclasses.replace(some.split_all(nu[None], lengths), before=self)

    def distance(self, other: KKTSet) -> float:
        """d(A, B): the least distance between a sample of this set and one of another."""
        return float(l2(self.x, other.x).min())

    def _check_budget(self, some: Tensor, nu: Tensor, alpha: Tensor, beta: Tensor) -> None:
        """Refuse a split that would leave its pattern, naming the neurons in the way; a kink is told
        apart, since there no length is short enough.
        """
        found = self.budgets(nu, some)
        bad = ((alpha >= found.alpha) | (beta >= found.beta)).nonzero()[:, 0].tolist()
        if not bad:
            return
        k = bad[0]
        i, kinks = int(some[k]), int(found.kinks[k].sum())
        if kinks:
            raise HypothesisError(
                "kink",
                f"A split needs a sample off the kinks that its direction moves; sample {i} sits on "
                f"{kinks}: {found.names(k)}.",
                "Take a direction orthogonal to those neurons: directions('softest').",
            )
        raise HypothesisError(
            "budget",
            f"A split must stay inside its activation pattern; sample {i} may move by less than "
            f"{float(found.alpha[k]):.6g} and {float(found.beta[k]):.6g}, got {float(alpha[k]):.6g} and "
            f"{float(beta[k]):.6g}. In the way: {found.names(k)}.",
            "Shorten it, or take another direction.",
        )

    def _check_multiplier(self, some: Tensor) -> None:
        bad = some[self.lam[some] <= 0].tolist()
        if bad:
            raise HypothesisError(
                "multiplier",
                f"Merging and splitting need positive multipliers; sample {bad[0]} has "
                f"{float(self.lam[bad[0]]):g}.",
                "Leave it out: a sample of multiplier zero explains nothing (used()).",
            )

    def _with(self, x: Tensor, y: Tensor, lam: Tensor, covectors: Tensor) -> KKTSet:
        return dataclasses.replace(self, x=x, y=y, lam=lam, covectors=covectors, before=self)


def _rivals(y: Tensor, outputs: Tensor) -> Tensor:
    return ~torch.nn.functional.one_hot(y, outputs.shape[1]).bool()


def _over(u: Tensor, size: Tensor) -> Tensor:
    """u / size per sample, zero where the size is."""
    return u / torch.where(size > 0, size, 1.0)[:, None, None]
