"""Refael et al. 2025, No Prior, No Leakage (arXiv 2509.21296)."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn.functional import softplus

import residuum as rs
from papers import drawing
from papers.points import ExactPoint, noisy, normal, relu_point, steep_point, triangle
from papers.runs import Context, Figure, Outcome, Settings, as_bytes, mlp
from residuum.attacks import Auto
from residuum.networks import MLP, dense_chain
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction, Split
from residuum.similarity import l2, ncc, standardize
from residuum.stationarity import norm
from residuum.theory.budgets import compute_exact_budgets, unit
from residuum.theory.directions import find_data_direction
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import HypothesisError

FIRST, BIAS = "layers.0.weight", "layers.0.bias"
# The row space of W1 is spanned by the singular vectors above this share of the largest singular value.
SEEN = 1e-3
MATCHED = 0.8  # a candidate matches a sample if their NCC exceeds this value


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiments on synthetic points. The paper uses n = 500 points on S^783 and width 1000."""

    n: int
    dim: int
    width: int
    training: int
    steps: int
    candidates: int
    restarts: int
    radii: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0)


SIZES = {
    "tiny": Sizes(20, 40, 50, 150, 150, 30, 1, (0.5, 10.0)),
    "small": Sizes(60, 100, 150, 1500, 1500, 90, 3),
    "paper": Sizes(500, 784, 1000, 3000, 3000, 600, 3),
}


def plane(context: Context) -> Outcome:
    """Merge two samples of a small network, and split a sample inside and beyond its budget (Fig. 1)."""
    point = triangle()
    training_set = point.set
    merged, i = training_set.merge(0, 3), torch.tensor([1])
    nu = training_set.directions("softest", i)[0]
    reach = float(training_set.budgets(nu, i).least[0])
    inside, beyond = (
        training_set.split(1, nu, 0.8 * reach),
        training_set.split(1, nu, 1.5 * reach, check=False),
    )
    first = point.model.linears[0]
    arrays = {"weight": first.weight.detach(), "bias": first.bias.detach(), "nu": nu}
    for name, kkt_set in (("x", training_set), ("merged", merged), ("split", inside)):
        arrays |= {name: kkt_set.x, f"{name}_y": kkt_set.y}
    out = Outcome(arrays={name: array.numpy() for name, array in arrays.items()})
    out.details = {"network": "2-3-1, closed form, six samples on margin 1"}
    out.row("residual of the training set", training_set.residual, corrected=0.0)
    out.row("residual after a merge", merged.residual, 0.0, corrected=0.0)
    out.row("residual after a split inside the budget", inside.residual, 0.0, corrected=0.0)
    note = "this set is no longer a KKT set"
    out.row("residual after a split beyond the budget", beyond.residual, note=note)
    out.row("margin after the merge", merged.margin, 1.0, corrected=1.0)
    note = "the direction is orthogonal to grad_x Phi"
    out.row("margin after the split", inside.margin, 1.0, corrected=1.0, note=note)
    out.row("exact budget of the split", reach)
    return out


# Fig. 2a: distance of reconstructions from the samples when candidates start on a sphere of a given radius.
# We also compute the distance after projecting candidates on row(W1), because the network does not see the
# component outside row(W1), and the distance from held-out points as negative control.
GROWS = "the mean distance of the five best grows with the initial radius"
SPHERE_NOTE = (
    "a default first layer of width 1000 has a squared norm of 333 before training, near the published "
    "objective: compare the objective with initial_squared_norms in the details, and look at the residual of "
    "each layer"
)
INITS = ("default", "small")


def sphere(context: Context) -> Outcome:
    """Measure the mean distance of the five best candidates for several radii and two initializations."""
    sizes = SIZES[context.scale.name]
    split = rs.load_dataset("sphere", sizes.n, seed=context.seed, dim=sizes.dim)
    out = Outcome(details={"victims": {}, "rows": []}, notes=[SPHERE_NOTE])
    for init in INITS:
        arch = mlp(split.train, (sizes.width,))
        net = context.train(arch, split.train, steps=sizes.training, init=init)
        norms = {"initial_squared_norms": squares(net.theta0)}
        norms["squared_norms"] = squares(net.checkpoint.theta)
        out.details["victims"][init] = net.summary | norms
        basis = row_space(net.checkpoint.theta[FIRST])
        for radius in sizes.radii:
            config = sphere_attack(context, radius)
            reconstruction = context.attack(net.checkpoint, Knowledge(shape=(sizes.dim,)), config)
            for run in range(sizes.restarts):
                row = {"init": init, "radius": radius, "run": run, "rank": basis.shape[1]}
                row |= layer_residuals(reconstruction, net.checkpoint, run)
                row |= measure_outside_components(reconstruction, run, net.checkpoint, basis)
                row |= five_best(reconstruction.x[reconstruction.run == run].double(), split, basis)
                out.details["rows"].append(row)
    for init in INITS:
        init_rows = [row for row in out.details["rows"] if row["init"] == init]
        for kind in ("raw", "projected"):
            for radius in sizes.radii:
                radius_rows = [row for row in init_rows if row["radius"] == radius]
                keys = (f"five_best_{kind}_{split_name}" for split_name in ("train", "holdout"))
                train, held = (float(np.mean([row[key] for row in radius_rows])) for key in keys)
                published = GROWS if kind == "raw" and radius == sizes.radii[-1] else None
                what = f"{init} init, radius {radius:g}: mean distance of the five best, {kind}"
                out.row(what, train, published, held)
        ends = [end(row["objective"] for row in init_rows) for end in (min, max)]
        published = "330 to 332 in all runs" if sizes.width == 1000 else None
        out.row(f"{init} init: total objective at the end", ends, published)
    return out


def sphere_attack(context: Context, radius: float) -> Auto:
    """Return the attack of Fig. 2a.

    Candidates start from a Gaussian distribution. Their norms equal the radius up to a relative error of
    1 / sqrt(2 d).

    Args:
        context: scale and seed of the run.
        radius: initial norm of the candidates.

    Returns:
        The settings of the attack.
    """
    sizes = SIZES[context.scale.name]
    options: Settings = {
        "steps": sizes.steps,
        "restarts": sizes.restarts,
        "candidates": sizes.candidates,
    }
    base = Auto(lr_x=0.003, layers="all", normalize=False, seed=context.seed, **options)
    return base.changed(sigma=radius / sizes.dim**0.5, dtype=context.fast)


# Fig. 2b: data whose range the attacker does not know. The paper rewrites the biases of the first layer,
# b -> b - <w, u>, and calls the result a network trained on data shifted by u. This is wrong, because the KKT
# residual of the rewritten network is not zero (appendix D). We show the rewritten network and a network that
# is retrained on shifted data.
def shift(context: Context, amounts: tuple[float, ...] = (0.5, 5.0)) -> Outcome:
    """Attack networks on shifted data, by rewritten biases and by retraining, without a prior (Fig. 2b).

    Args:
        context: scale, device and cache of the run.
        amounts: shifts per pixel, in addition to no shift.

    Returns:
        The rows of the table and the images of the picture.
    """
    scale = context.scale
    split = context.split("cifar10", 100)
    data, n = split.train, len(split.train)
    config = Auto(steps=scale.attack_steps(6000), restarts=2, candidates=2 * n)
    config = config.changed(dtype=context.fast, seed=context.seed)
    arch = mlp(data, scale.hidden((1000, 1000)))
    plain = context.train(arch, data, steps=scale.training)
    cases = [("no shift", 0.0, plain.checkpoint)]
    for amount in amounts:
        retrained = context.train(arch, data.replace(x=data.x + amount), steps=scale.training)
        cases.append((f"rewrite {amount:g}", amount, rewrite_biases(plain.checkpoint, amount)))
        cases.append((f"retrain {amount:g}", amount, retrained.checkpoint))
    out = Outcome(details={"n": n, "rows": []})
    for name, amount, network in cases:
        reconstruction = context.attack(network, Knowledge(shape=data.shape), config)
        moved, held = (images.double() + amount for images in (data.x, split.holdout.x[:n]))
        kkt, x = (
            KKTSet.from_samples(network.copy_module(), moved, data.y),
            reconstruction.x.double(),
        )
        row = {"name": name, "per_pixel": amount, "margin": kkt.margin}
        row["residual_at_data"] = kkt.residual
        row["first_layer_residual"] = reconstruction.layers[:, -1, 0].sqrt().tolist()
        row |= compare_with_samples(x, reconstruction.run, moved, held)
        out.details["rows"].append(row)
        shift_rows(out, row)
        value, candidate = ncc(x, moved).max(0)
        order = value.argsort(descending=True)[:5]
        pairs = {"found": as_bytes(x[candidate[order]]), "true": as_bytes(moved[order])}
        out.keep(name, {**pairs, "score": value[order].float().numpy()})
    return out


def shift_rows(out: Outcome, row: dict[str, Any]) -> None:
    """Add the rows of a case: similarity to samples, to mixtures of samples, and repeated samples.

    Args:
        out: outcome that receives the rows.
        row: results of the case.
    """
    name, moved = row["name"], row["name"].startswith("rewrite")
    printed = {0.5: "vague", 5.0: "fails"}.get(row["per_pixel"]) if moved else None
    for what, key, published in (
        ("NCC of the five best", "five_best_ncc", printed),
        ("samples above NCC 0.8", "above_0.8", None),
        ("NCC with the best single sample, median", "single_ncc", None),
        ("NCC with the best mixture of five, median", "mixture_ncc", None),
    ):
        out.row(f"{name}: {what}", row[f"{key}_train"], published, row[f"{key}_holdout"])
    note = "appendix D treats this network as trained on shifted data" if moved else ""
    published_residual, residual = 0.0 if moved else None, row["residual_at_data"]
    out.row(f"{name}: KKT residual at the data", residual, published_residual, note=note)
    repeats_label = f"{name}: repeats of a sample inside a restart"
    published_repeats = "only by chance" if name == "no shift" else None
    out.row(
        f"{repeats_label}, chance uniform",
        row["repeats"],
        published_repeats,
        row["repeats_by_chance"],
    )
    out.row(
        f"{repeats_label}, chance over restarts", row["repeats"], None, row["repeats_if_exchanged"]
    )


def row_space(weight: Tensor) -> Tensor:
    """Return the (d, r) right singular vectors of W1 above ``SEEN`` of the largest singular value."""
    _, sigma, rows = torch.linalg.svd(weight.double(), full_matrices=False)
    return rows[sigma > SEEN * sigma[0]].T


def squares(theta: dict[str, Tensor]) -> dict[str, float]:
    """Return the squared norm of each layer, weight and bias together."""
    squared_norms: dict[str, float] = {}
    for name, t in theta.items():
        layer = name.rpartition(".")[0]
        squared_norms[layer] = squared_norms.get(layer, 0.0) + float(t.double().square().sum())
    return squared_norms


def five_best(x: Tensor, split: Split, basis: Tensor) -> dict[str, float]:
    """Compute the mean distance of the five best candidates, without and with projection on row(W1).

    Args:
        x: candidates.
        split: training and held-out samples.
        basis: (d, r) basis of row(W1).

    Returns:
        Distances from training and held-out samples, and mean norms of candidates, by name.
    """
    distances = {}
    held = split.holdout.x[: len(split.train)]
    for name, candidates in {"raw": x, "projected": x @ basis @ basis.T}.items():
        for kind, samples in (("train", split.train.x), ("holdout", held)):
            nearest = l2(candidates, samples.double()).amin(0)
            distances[f"five_best_{name}_{kind}"] = float(nearest.sort().values[:5].mean())
        distances[f"mean_norm_{name}"] = float(candidates.norm(dim=1).mean())
    return distances


@torch.no_grad()
def measure_outside_components(
    reconstruction: Any, run: int, checkpoint: Network, basis: Tensor
) -> dict[str, float]:
    """Measure the component U of the candidates outside row(W1).

    Args:
        reconstruction: result of an attack.
        run: index of the restart.
        checkpoint: network that was attacked.
        basis: (d, r) basis of row(W1).

    Returns:
        The share of U in the norm of the candidates, and ||D^T U|| / ||W1||, where D are the weighted
        gradients with respect to the inputs of the first layer's neurons.
    """
    model, in_run = checkpoint.double_module, reconstruction.run == run
    assert isinstance(model, MLP)
    x, lam, labels = (
        tensor[in_run].double()
        for tensor in (reconstruction.x, reconstruction.lam, reconstruction.labels)
    )
    d, outside = model.signals(model.trace(x), (lam * labels)[:, None])[0], x - x @ basis @ basis.T
    over = float((d.T @ outside).norm() / checkpoint.theta[FIRST].double().norm())
    return {"outside_share": float(outside.norm() / x.norm()), "dtu_over_w1": over}


def layer_residuals(
    reconstruction: Reconstruction, checkpoint: Network, run: int
) -> dict[str, Any]:
    """Return the final squared residual of each layer over its squared weights, and the objective.

    Args:
        reconstruction: result of an attack.
        checkpoint: network that was attacked.
        run: index of the restart.

    Returns:
        Relative squared residuals by layer, and the sum of the absolute squared residuals.
    """
    relative = dict(
        zip(reconstruction.layer_names, reconstruction.layers[run, -1].tolist(), strict=True)
    )
    sizes = squares(checkpoint.theta)
    total = sum(value * sizes[name] for name, value in relative.items())
    return {"relative_squared": relative, "objective": total}


def rewrite_biases(checkpoint: Network, amount: float) -> Network:
    """Rewrite the biases b as b - <w, u>, so that the network treats x + u as x.

    Args:
        checkpoint: network with weights w and biases b in its first layer.
        amount: value of the shift u in every pixel.

    Returns:
        The network with rewritten biases.
    """
    bias = checkpoint.theta[BIAS] - amount * checkpoint.theta[FIRST].sum(1)
    return checkpoint.replace(theta={**checkpoint.theta, BIAS: bias})


def compare_with_samples(x: Tensor, run: Tensor, train_x: Tensor, held: Tensor) -> dict[str, Any]:
    """Compare candidates with the nearest samples and mixtures of samples, and count repeated samples.

    Args:
        x: candidates.
        run: (m,) restart of each candidate. Repeats are counted inside each restart.
        train_x: training samples.
        held: held-out samples, for the chance level.

    Returns:
        The results by name.
    """
    row: dict[str, Any] = {}
    selected = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:100]
    for kind, samples in (("train", train_x), ("holdout", held)):
        distance, similarity = l2(x, samples).amin(0), ncc(x, samples).amax(0)
        row[f"five_best_l2_{kind}"] = float(distance.sort().values[:5].mean())
        row[f"five_best_ncc_{kind}"] = float(similarity.sort(descending=True).values[:5].mean())
        row[f"above_0.8_{kind}"] = int((similarity > MATCHED).sum())
        atoms = standardize(samples.double())
        fits = np.array([mixture(candidate, atoms) for candidate in standardize(x[selected])])
        single, mixed = np.median(fits, 0).tolist()
        row |= {f"single_ncc_{kind}": single, f"mixture_ncc_{kind}": mixed}
    best, which = ncc(x, train_x).max(1)
    matched = best > MATCHED
    return row | count_repeats(which[matched], run[matched], len(train_x))


def count_repeats(which: Tensor, run: Tensor, n: int) -> dict[str, Any]:
    """Count candidates that match a sample which another candidate of the same restart also matches.

    There are two chance levels, each summed over restarts. The first one assumes that each match hits one of
    the n samples with equal probability. The second one assumes that the restarts of the matches are
    exchangeable. It keeps the number of matches of each sample, so that easy samples are no evidence. It is
    None if fewer than two restarts have matches.

    Args:
        which: (k,) sample of each matched candidate.
        run: (k,) restart of each matched candidate.
        n: number of samples.

    Returns:
        The number of repeats and both chance levels, by name.
    """
    groups = [which[run == restart] for restart in run.unique()]
    sizes, total = [len(group) for group in groups], len(which)
    times = which.unique(return_counts=True)[1].tolist()

    def distinct(size: int) -> float:
        """Return the expected number of different samples in ``size`` matches drawn without replacement."""
        return sum(1 - math.comb(total - c, size) / math.comb(total, size) for c in times)

    exchanged = sum(size - distinct(size) for size in sizes) if len(sizes) > 1 else None
    return {
        "matched_per_restart": sizes,
        "repeats": sum(len(group) - len(group.unique()) for group in groups),
        "repeats_by_chance": sum(1 - (1 - 1 / n) ** j for size in sizes for j in range(size)),
        "repeats_if_exchanged": exchanged,
    }


def mixture(x: Tensor, atoms: Tensor, size: int = 5) -> tuple[float, float]:
    """Compute the NCC of a candidate with its best single atom and its best mixture of atoms.

    Atoms are chosen greedily by their correlation with the remainder, and fitted by nonnegative least
    squares.

    Args:
        x: (d,) standardized candidate. Standardization removes a constant shift.
        atoms: (n, d) standardized samples.
        size: maximum number of atoms in a mixture.

    Returns:
        The NCC with the best atom, and the NCC with the best mixture.
    """
    target, matrix = x.numpy(), atoms.numpy()
    chosen: list[int] = []
    values, remainder = [0.0], target
    while len(chosen) < size:
        gains = matrix @ remainder
        gains[chosen] = -np.inf
        if gains.max() <= 0:
            break
        chosen.append(int(gains.argmax()))
        fit = matrix[chosen].T @ nnls(matrix[chosen].T, target)[0]
        remainder = target - fit
        values.append(float(fit @ target / max(float(np.linalg.norm(fit)), 1e-12)))
    return values[min(1, len(values) - 1)], values[-1]


# Every lemma and theorem of Refael et al. 2025 on a concrete network: printed, corrected and exact values.
#
# Theorem 9 in full: splitting sample l into x + a nu and x - b nu moves its margin m_l by +a s and -b s
# with s = y_l <grad_x Phi, nu>. The new margin p' and slack delta' follow exactly:
#
#     p' = min(p, m_l + a s, m_l - b s),    delta' = max over the new set of lam (m - p')
#
# The paper prints: delta' <= delta + Dd if Dd < p, Dd = lam_l (a+b) C with
# C = sum_{j active on x_l} |v_j| (eps + gamma |v_j| sum lam). This bound is false (delta' reached 2.25
# times the bound, and Dd < p compares different units). This bound holds, since p - p' <= max(a, b) C:
#
#     delta' <= delta + max(a, b) C max_i lam_i
#
# with equality at an exact point whose samples all have the same <nu, x_i> and share one neuron.
# A row has the columns: what, exact, printed, corrected, note.
Rows = Iterator[tuple[str, float, float | None, float | None, str]]


@dataclass(frozen=True)
class SplitLevels:
    """Margin p and slack delta before and after a split, with the printed and the corrected bound.

    Attributes:
        margin_before: margin p before the split.
        margin_after: margin p' after the split.
        delta_after: slack delta' after the split.
        printed: the printed bound delta + Dd, or None if its condition Dd < p fails or if the network
            does not have two layers.
        bound: the corrected bound, or None if the network does not have two layers.
    """

    margin_before: float
    margin_after: float
    delta_after: float
    printed: float | None
    bound: float | None


def split_levels(kkt: KKTSet, i: int, direction: Tensor, alpha: float, beta: float) -> SplitLevels:
    """Compute the exact margin p' and slack delta' after a split, and the published bound.

    Args:
        kkt: KKT set.
        i: index of the sample that is split. The split must stay inside its activation pattern.
        direction: direction nu of the split.
        alpha: length of the split along nu.
        beta: length of the split against nu.

    Returns:
        The exact values and the bounds.
    """
    _check_binary(kkt)
    after = kkt.split(i, direction, alpha, beta)
    levels = (kkt.margin, after.margin, kkt.delta, after.delta)
    p, p_after, delta, delta_after = (float(value or 0.0) for value in levels)
    printed = bound = None
    chain = dense_chain(kkt.models[0])
    if chain is not None and len(chain.linears) == 2:
        c = _sensitivity(kkt, chain, i, direction)
        change = float(kkt.lam[i]) * (alpha + beta) * c
        printed = delta + change if change < p else None
        bound = delta + max(alpha, beta) * c * float(kkt.lam.max())
    return SplitLevels(p, p_after, delta_after, printed, bound)


@dataclass(frozen=True)
class BudgetCertificates:
    """The published bounds on the length of a split of one sample, and the exact budget, for |nu| = 1.

    The bounds follow from |<w_j, nu>| of a two-layer network, which stationarity limits, with gamma =
    max_i |<nu, x_i>|. The paper prints a one-sided gamma = max_i <nu, x_i>, for which all bounds are false:

        Theorem 5 as printed   min_j |pre_j| / (gamma sum_i lam_i)              false where |v_j| > 1
        Theorem 5 corrected    min_j |pre_j| / (gamma |v_j| sum_{i active on j} lam_i)
        Theorem 8              min_j |pre_j| / (eps + gamma |v_j| sum_i lam_i)

    (|pre_j| = |D_j| |w_j|, D_j the signed distance to the neuron's hyperplane.)

    A certificate is valid if it does not exceed the exact budget.

    Attributes:
        theorem5_printed: Theorem 5 as printed, for an exact KKT point (eps = 0).
        theorem5_corrected: Theorem 5 corrected, for an exact KKT point.
        theorem8: Theorem 8, for an eps-KKT point.
        one_sided: Theorem 8 with the printed gamma = max_i <nu, x_i>.
        exact: exact budget, the smaller one of the two directions nu and -nu.
        gamma: max_i |<nu, x_i>|.
        eps: norm of the KKT residual.
    """

    theorem5_printed: float
    theorem5_corrected: float
    theorem8: float
    one_sided: float
    exact: float
    gamma: float
    eps: float

    def valid(self, name: str) -> bool:
        """Return True if the named bound does not exceed the exact budget, up to rounding."""
        return bool(getattr(self, name) <= self.exact * (1 + 1e-12))

    @property
    def invalid(self) -> tuple[str, ...]:
        """Names of the bounds that exceed the exact budget."""
        names = ("theorem5_printed", "theorem5_corrected", "theorem8", "one_sided")
        return tuple(name for name in names if not self.valid(name))


@torch.no_grad()
def budget_certificates(
    model: MLP, x: Tensor, lam: Tensor, i: int, direction: Tensor, eps: float = 0.0
) -> BudgetCertificates:
    """Compute the published bounds and the exact budget for splitting a sample.

    Args:
        model: binary network with two layers.
        x: (n, d) samples.
        lam: (n,) multipliers.
        i: index of the sample that is split.
        direction: direction nu of the split.
        eps: norm of the KKT residual.

    Returns:
        The bounds and the exact budget.
    """
    v = two_layer_weights(model)
    nu = unit(direction)
    flat = x.flatten(1)
    pre = model.trace(x).pre[0]
    along = flat @ nu
    gamma, total = float(along.abs().max()), lam.sum()
    active = ((pre > 0) * lam[:, None]).sum(0)  # (h,) multipliers of the samples active on j
    distance = pre[i].abs()
    live = distance > 0  # a neuron without weights has no hyperplane
    one_sided = float(along.max())
    exact = compute_exact_budgets((model,), x[i : i + 1], nu.reshape(x[i : i + 1].shape))
    return BudgetCertificates(
        theorem5_printed=_ratio(distance[live], (gamma * total).expand_as(distance[live])),
        theorem5_corrected=_ratio(distance[live], (gamma * v.abs() * active)[live]),
        theorem8=_ratio(distance[live], (eps + gamma * v.abs() * total)[live]),
        one_sided=_ratio(distance[live], (eps + one_sided * v.abs() * total)[live]),
        exact=float(exact.least[0]),
        gamma=gamma,
        eps=eps,
    )


def two_layer_weights(model: nn.Module) -> Tensor:
    """Return the output weights of a two-layer MLP with one output, which the printed theorems require.

    Args:
        model: the network.

    Returns:
        (h,) output weights v.

    Raises:
        HypothesisError: if the network is not a two-layer MLP with one output.
    """
    chain = dense_chain(model)
    if chain is None or len(chain.linears) != 2 or chain.linears[1].out_features != 1:
        raise HypothesisError(
            "Theorems 5, 8 and 9 need a two-layer network with one output; this network is a different one.",
            "Use compute_exact_budgets, which works for any depth.",
            hypothesis="depth",
        )
    return chain.linears[1].weight.detach()[0]


def _ratio(above: Tensor, below: Tensor) -> float:
    """Return the minimum of above / below over positive entries of below, or infinity if there are none."""
    held = below > 0
    return float((above[held] / below[held]).min()) if held.any() else math.inf


def largest_split(kkt: KKTSet, i: int, direction: Tensor, delta: float) -> float:
    """Return the longest symmetric split of a sample that keeps the slack delta' <= delta.

    This inverts Theorem 9. An attacker who knows delta' <= delta cannot rule out this split. With lengths
    a = b = t, both halves have multiplier lam/2 and margins m +- t|s|. Each term of delta' grows with t and
    therefore gives a bound on t in closed form.

    Args:
        kkt: KKT set with binary labels.
        i: index of the sample that is split.
        direction: direction of the split.
        delta: largest slack after the split.

    Returns:
        The length t, at most the exact budget. It is 0 if no split is possible.
    """
    margins, lam, nu = _check_binary(kkt)[:, 0], kkt.lam, unit(direction)
    budget = float(kkt.budgets(nu, torch.tensor([i])).least[0])
    p, m = float(margins.min()), float(margins[i])
    s = abs(float(kkt.gradients[i, 0] @ nu))
    is_other = torch.arange(len(lam)) != i
    # Largest slack of the other samples at the margin p:
    max_slack_of_others = (
        (lam[is_other] * (margins[is_other] - p)).amax() if is_other.any() else torch.tensor(0.0)
    )
    rounding = 1e-12 * float(lam.max() * margins.abs().max())
    if max(float(max_slack_of_others), float(lam[i]) / 2 * (m - p)) > delta + rounding:
        return 0.0
    if s <= 1e-14 * float(kkt.gradients[i, 0].norm()):
        return budget
    used = is_other & (lam > 0)
    bounds = (m - margins[used] + delta / lam[used]) / s
    own_bound = (2 * delta / float(lam[i]) - (m - p)) / s  # valid while p' = p
    if own_bound > (m - p) / s:  # beyond this length, p' = m - t s
        own_bound = delta / (float(lam[i]) * s)
    return max(0.0, min([budget, own_bound, *bounds.tolist()]))


def kkt_loss(kkt: KKTSet, power: int = 1, g1: float = 1.0, g2: float = 1.0) -> float:
    """Compute L_KKT of Definition 1, g1 ||r||^power + g2 sum_i max(-lam_i, 0).

    Args:
        kkt: samples and multipliers lam with the KKT residual r.
        power: exponent of the residual, 2 in Haim et al. 2022.
        g1: weight of the residual.
        g2: weight of negative multipliers.

    Returns:
        The loss.
    """
    size = kkt.residual * norm(kkt.target)
    return g1 * size**power + g2 * float((-kkt.lam).clamp(min=0).sum())


def _check_binary(kkt: KKTSet) -> Tensor:
    if kkt.task != "binary" or kkt.margins is None:
        raise HypothesisError(
            "Theorem 9 needs binary labels and their margins.",
            "Compare KKTSet.delta.",
            hypothesis="label",
        )
    return kkt.margins


def _sensitivity(kkt: KKTSet, model: MLP, i: int, direction: Tensor) -> float:
    """Return C, the bound on |<grad_x Phi, nu>| at sample i that follows from stationarity."""
    v, nu = two_layer_weights(model).abs(), unit(direction)
    eps = kkt.residual * norm(kkt.target)
    gamma = float((kkt.x.flatten(1) @ nu).abs().max())
    active = model.trace(kkt.x[i : i + 1]).pre[0][0] > 0
    return float((v * (eps + gamma * v * kkt.lam.sum()))[active].sum())


def theorems(context: Context) -> Outcome:
    """Compute the table of all theorems. No entry is copied from the theory page."""
    network = "12-2-1 on 6 samples, closed form; the notes of a row name any other network"
    out = Outcome(details={"network": network})
    checks = (_threshold, _merging, _splitting, _budgets, _perturbed, _levels, _singular, _shifted)
    for check in checks:
        for what, exact, printed, corrected, note in check(relu_point()):
            out.row(what, exact, printed, corrected=corrected, note=note)
    return out


def _threshold(point: ExactPoint) -> Rows:
    """Theorem 1: a mean logistic loss below ln2/n implies separation, a loss below 1/n does not."""
    base = steep_point()
    x = torch.stack([30 * base.x[0], 0.2 * base.x[0]])
    margins = base.model(x)[:, 0].detach() * torch.tensor([1.0, -1.0]).double() * base.y[0]
    what = "Theorem 1: loss below which all margins are positive, n = 2, logistic"
    note = f"this loss, with a margin of {float(margins.min()):.2g}: the printed 1/n is that of "
    note += "the exponential loss"
    yield what, float(softplus(-margins).mean()), 1 / 2, math.log(2) / 2, note


def _merging(point: ExactPoint) -> Rows:
    """Lemma 2 for a merge in one activation pattern, and Lemma 6 for a merge across patterns."""
    residual = point.set.merge(0, 1).residual
    yield "Lemma 2: residual after a merge in one pattern", residual, 0.0, 0.0, ""
    other, pair = relu_point(groups=4, size=2), [0, 4]  # groups 0 and 2: one label, two patterns
    keep = [i for i in range(len(other.x)) if i not in pair]
    y, best = other.y[[*keep, pair[0]]], math.inf
    for share in torch.linspace(0, 1, 41):
        mean = share * other.x[pair[0]] + (1 - share) * other.x[pair[1]]
        merged = KKTSet.from_samples(other.model, torch.cat([other.x[keep], mean[None]]), y)
        best = min(best, merged.residual)
    note = "the smallest over positions of the merged sample and multipliers >= 0; network 12-4-1"
    yield "Lemma 6: residual after a merge across two patterns", best, 0.0, best, note


def _splitting(point: ExactPoint) -> Rows:
    """Lemmas 3 and 7 and Theorem 4: a split keeps the residual, and the margin if nu _|_ grad_x Phi."""
    kkt, samples, nu = point.set, torch.tensor([0]), unit(normal(12))
    length = min(1.0, 0.5 * float(kkt.budgets(nu, samples).least[0]))
    free_split = kkt.split(0, nu, length)
    tangent_split = kkt.split(0, kkt.directions("tangent", samples)[0], 0.1)
    yield (
        "Lemma 3: residual after a split along a random direction",
        free_split.residual,
        0.0,
        0.0,
        "",
    )
    change, note = length * abs(float(kkt.gradients[0, 0] @ nu)), "alpha |<grad_x Phi, nu>|"
    falls = [1 - float(split.margin or 0) for split in (free_split, tangent_split)]
    yield "Lemma 7: fall of the margin after that split", falls[0], 0.0, change, note
    yield "Lemma 7: the same, nu orthogonal to grad_x Phi", falls[1], 0.0, 0.0, ""
    distant_set = kkt.far_set(1000.0)
    note = (
        f"distance {kkt.distance(distant_set):.6g}, margin {distant_set.margin:.6g}, full KKT set: "
    )
    note += "yes" if distant_set.is_full_kkt_set else "no"
    yield (
        "Theorem 4: residual of a set farther away than 1000",
        distant_set.residual,
        0.0,
        0.0,
        note,
    )


def _budgets(point: ExactPoint) -> Rows:
    """Theorem 5 for a network with an output weight above one."""
    steep = steep_point(0.05)
    kkt, nu = steep.set, steep.model.linears[0].weight[0].detach()
    certificates = [
        budget_certificates(steep.model, kkt.x, kkt.lam, i, nu) for i in range(len(kkt))
    ]
    i = max(
        range(len(certificates)),
        key=lambda k: certificates[k].theorem5_printed / certificates[k].exact,
    )
    printed, corrected = certificates[i].theorem5_printed, certificates[i].theorem5_corrected
    beyond = kkt.split(i, nu, 0.99 * printed, check=False).residual
    largest = float(two_layer_weights(steep.model).abs().max())
    note = f"|v| = {largest:.3g}; a split the printed budget allows has residual {beyond:.2g}"
    yield "Theorem 5: budget of a split", certificates[i].exact, printed, corrected, note


def _perturbed(point: ExactPoint) -> Rows:
    """Theorem 8 and Lemma 14 at an eps-KKT point, and Theorem 8 with the printed gamma."""
    model, nu = noisy(point.model, 0.05, seed=3), unit(normal(12, seed=1))
    kkt = KKTSet.from_samples(model, point.x, point.y, point.lam)
    eps = kkt.residual * norm(kkt.target)
    sound = budget_certificates(model, point.x, point.lam, 0, nu, eps)
    what, note = "Theorem 8: budget at an eps-KKT point", f"eps = {eps:.3g}, two-sided gamma"
    yield what, sound.exact, sound.theorem8, sound.theorem8, note
    along = (normal(12, seed=seed) for seed in range(40))
    tried = itertools.product(along, range(len(point.x)))
    sides = [budget_certificates(point.model, point.x, point.lam, k, nu) for nu, k in tried]
    false = max(sides, key=lambda certificates: certificates.one_sided / certificates.exact)
    what, note = "Theorem 8 with the printed one-sided gamma", "worst of 240 directions and samples"
    yield what, false.exact, false.one_sided, false.theorem8, note
    along, v = (model.linears[0].weight @ nu).abs().detach(), two_layer_weights(model).abs()
    bounds = eps + float((point.x @ nu).abs().max()) * v * point.lam.sum()
    j = int((along / bounds).argmax())
    bound, note = float(bounds[j]), "for the neuron closest to its bound"
    yield "Lemma 14: |<w_j, nu>|", float(along[j]), bound, bound, note


def _levels(point: ExactPoint) -> Rows:
    """Theorem 9: slack delta and margin after the split that violates the printed bound most."""
    steep = steep_point(0.5).set
    least, nu = int(steep.lam.argmin()), steep.gradients[0, 0]
    reach = 0.05 * float(steep.budgets(unit(nu)).least[least])
    lengths = [share * reach for share in (0.02, 0.1, 0.5, 1.0)]
    tried = [split_levels(steep, least, nu, a, b) for a in lengths for b in lengths]
    stated = [levels for levels in tried if levels.printed is not None]
    levels = max(
        stated, key=lambda candidate: candidate.delta_after / float(candidate.printed or 1)
    )
    yield "Theorem 9: delta after a split", levels.delta_after, levels.printed, levels.bound, ""
    what, note = "Theorem 9: margin after that split", "condition (b) uses the margin before"
    yield what, levels.margin_after, levels.margin_before, levels.margin_after, note


def _singular(point: ExactPoint) -> Rows:
    """Theorem 15 and its remark."""
    n, d = 40, 12
    _, sigma, gamma = find_data_direction(normal(n, d))
    what, note = "Theorem 15: gamma along the last singular vector", "an upper bound, as printed"
    yield what, gamma, sigma, sigma, f"{note}; n = {n}, d = {d}"
    note = "no direction has less than sigma_d / sqrt(n); the remark says sigma_d / n"
    yield "Theorem 15, remark: size of gamma", gamma, sigma / n, sigma / math.sqrt(n), note


def _shifted(point: ExactPoint) -> Rows:
    """Appendix D: rewriting the biases is not the same as training on shifted data."""
    weight, bias = (parameter.detach() for parameter in point.model.linears[0].parameters())
    for length in (0.1, 0.5, 5.0):
        u = length * torch.ones(12, dtype=torch.float64) / math.sqrt(12)
        moved = copy.deepcopy(point.model)
        moved.linears[0].bias.data.sub_(weight @ u)
        kkt = KKTSet.from_samples(moved, point.x + u, point.y, point.lam)
        formula = math.hypot(float(bias.norm()) * length, float((weight @ u).norm()))
        note = (
            f"refitted multipliers: {KKTSet.from_samples(moved, point.x + u, point.y).residual:.3g}"
        )
        what = f"Appendix D: residual after a shift of norm {length:g}"
        yield what, kkt.residual, 0.0, formula / norm(kkt.target), note


_KEYS = "five_best_raw_train five_best_projected_train objective"
_RADII = partial(drawing.curves, x="radius", keys=_KEYS, by="init", scale="log")
FIGURES = {
    "fig1": Figure("merge and split in the plane, on an actual network", plane, drawing.regions),
    "fig2a": Figure("distance of reconstructions by initial radius, sphere", sphere, _RADII),
    "fig2b": Figure("reconstructions without a known range, CIFAR", shift, drawing.shifts),
    "theorems": Figure("every lemma and theorem: printed, corrected, exact", theorems),
}
