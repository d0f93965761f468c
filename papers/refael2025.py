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
SEEN = 1e-3  # singular values of W1 below this share of the largest span what it does not see
MATCHED = 0.8  # NCC


@dataclass(frozen=True)
class Sizes:
    """Of the experiments on synthetic points; the paper has n = 500 on S^783, width 1000."""

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
    """Fig. 1 from an actual network: two samples merged, one split along its margin, one split too far."""
    point = triangle()
    given = point.set
    merged, i = given.merge(0, 3), torch.tensor([1])
    nu = given.directions("softest", i)[0]
    reach = float(given.budgets(nu, i).least[0])
    inside, beyond = given.split(1, nu, 0.8 * reach), given.split(1, nu, 1.5 * reach, check=False)
    first = point.model.linears[0]
    arrays = {"weight": first.weight.detach(), "bias": first.bias.detach(), "nu": nu}
    for name, made in (("x", given), ("merged", merged), ("split", inside)):
        arrays |= {name: made.x, f"{name}_y": made.y}
    out = Outcome(arrays={name: part.numpy() for name, part in arrays.items()})
    out.details = {"network": "2-3-1, closed form, six samples on margin 1"}
    out.row("residual of the training set", given.residual, corrected=0.0)
    out.row("residual after a merge", merged.residual, 0.0, corrected=0.0)
    out.row("residual after a split inside the budget", inside.residual, 0.0, corrected=0.0)
    note = "no KKT set any more"
    out.row("residual after a split beyond the budget", beyond.residual, note=note)
    out.row("margin after the merge", merged.margin, 1.0, corrected=1.0)
    note = "the direction is orthogonal to grad_x Phi"
    out.row("margin after the split", inside.margin, 1.0, corrected=1.0, note=note)
    out.row("exact budget of the split", reach)
    return out


# Fig. 2a: how far reconstructions are when candidates start on a sphere of a radius. Beside the
# published quantity: the same after projecting candidates on row(W1), since what lies outside is not
# seen by the network, and held-out points as control.
GROWS = "the mean distance of the five best grows with the initial radius"
SPHERE_NOTE = (
    "a default first layer of width 1000 has a squared norm of 333 before training, near the published "
    "objective: compare it with initial_squared_norms in the details, and read the residual of each layer"
)
INITS = ("default", "small")


def sphere(context: Context) -> Outcome:
    """Initial radius against the mean distance of the five best, for two ways to start training."""
    own = SIZES[context.scale.name]
    split = rs.load_dataset("sphere", own.n, seed=context.seed, dim=own.dim)
    out = Outcome(details={"victims": {}, "rows": []}, notes=[SPHERE_NOTE])
    for init in INITS:
        arch = mlp(split.train, (own.width,))
        net = context.train(arch, split.train, steps=own.training, init=init)
        norms = {"initial_squared_norms": squares(net.theta0)}
        norms["squared_norms"] = squares(net.checkpoint.theta)
        out.details["victims"][init] = net.summary | norms
        basis = row_space(net.checkpoint.theta[FIRST])
        for radius in own.radii:
            config = sphere_attack(context, radius)
            found = context.attack(net.checkpoint, Knowledge(shape=(own.dim,)), config)
            for run in range(own.restarts):
                row = {"init": init, "radius": radius, "run": run, "rank": basis.shape[1]}
                row |= layer_residuals(found, net.checkpoint, run)
                row |= components(found, run, net.checkpoint, basis)
                row |= five_best(found.x[found.run == run].double(), split, basis)
                out.details["rows"].append(row)
    for init in INITS:
        mine = [row for row in out.details["rows"] if row["init"] == init]
        for kind in ("raw", "projected"):
            for radius in own.radii:
                at = [row for row in mine if row["radius"] == radius]
                keys = (f"five_best_{kind}_{part}" for part in ("train", "holdout"))
                train, held = (float(np.mean([row[key] for row in at])) for key in keys)
                says = GROWS if kind == "raw" and radius == own.radii[-1] else None
                what = f"{init} init, radius {radius:g}: mean distance of the five best, {kind}"
                out.row(what, train, says, held)
        ends = [end(row["objective"] for row in mine) for end in (min, max)]
        says = "330 to 332 in all runs" if own.width == 1000 else None
        out.row(f"{init} init: total objective at the end", ends, says)
    return out


def sphere_attack(context: Context, radius: float) -> Auto:
    """Gaussian candidates of this deviation lie on the sphere up to 1 / sqrt(2 d)."""
    own = SIZES[context.scale.name]
    sizes: Settings = {"steps": own.steps, "restarts": own.restarts, "candidates": own.candidates}
    base = Auto(lr_x=0.003, layers="all", normalize=False, seed=context.seed, **sizes)
    return base.changed(sigma=radius / own.dim**0.5, dtype=context.fast)


# Fig. 2b: data whose range the attacker does not know. The paper rewrites the first layer's biases,
# b -> b - <w, u>, and calls the result a network trained on data shifted by u. It is not one (its KKT
# residual is not zero, appendix D): both are shown, the rewritten network and one trained again.
def shift(context: Context, amounts: tuple[float, ...] = (0.5, 5.0)) -> Outcome:
    """No shift, and both kinds of shift by these amounts per pixel; no prior."""
    scale = context.scale
    split = context.split("cifar10", 100)
    data, n = split.train, len(split.train)
    config = Auto(steps=scale.attack_steps(6000), restarts=2, candidates=2 * n)
    config = config.changed(dtype=context.fast, seed=context.seed)
    arch = mlp(data, scale.hidden((1000, 1000)))
    plain = context.train(arch, data, steps=scale.training)
    cases = [("no shift", 0.0, plain.checkpoint)]
    for amount in amounts:
        again = context.train(arch, data.replace(x=data.x + amount), steps=scale.training)
        cases.append((f"rewrite {amount:g}", amount, rewritten(plain.checkpoint, amount)))
        cases.append((f"retrain {amount:g}", amount, again.checkpoint))
    out = Outcome(details={"n": n, "rows": []})
    for name, amount, network in cases:
        found = context.attack(network, Knowledge(shape=data.shape), config)
        moved, held = (part.double() + amount for part in (data.x, split.holdout.x[:n]))
        kkt, x = KKTSet.from_samples(network.copy_module(), moved, data.y), found.x.double()
        row = {"name": name, "per_pixel": amount, "margin": kkt.margin}
        row["residual_at_data"] = kkt.residual
        row["first_layer_residual"] = found.layers[:, -1, 0].sqrt().tolist()
        row |= compare(x, found.run, moved, held)
        out.details["rows"].append(row)
        shift_rows(out, row)
        value, candidate = ncc(x, moved).max(0)
        order = value.argsort(descending=True)[:5]
        pairs = {"found": as_bytes(x[candidate[order]]), "true": as_bytes(moved[order])}
        out.keep(name, {**pairs, "score": value[order].float().numpy()})
    return out


def shift_rows(out: Outcome, row: dict[str, Any]) -> None:
    """One case: how near, how unique, and whether mixtures explain it."""
    name, moved = row["name"], row["name"].startswith("rewrite")
    printed = {0.5: "vague", 5.0: "fails"}.get(row["per_pixel"]) if moved else None
    for what, key, published in (
        ("NCC of the five best", "five_best_ncc", printed),
        ("samples above NCC 0.8", "above_0.8", None),
        ("NCC with the best single sample, median", "single_ncc", None),
        ("NCC with the best mixture of five, median", "mixture_ncc", None),
    ):
        out.row(f"{name}: {what}", row[f"{key}_train"], published, row[f"{key}_holdout"])
    note = "appendix D takes it for a network trained on shifted data" if moved else ""
    zero, residual = 0.0 if moved else None, row["residual_at_data"]
    out.row(f"{name}: KKT residual at the data", residual, zero, note=note)
    repeated = f"{name}: repeats of a sample inside a restart"
    says = "only by chance" if name == "no shift" else None
    out.row(f"{repeated}, chance uniform", row["repeats"], says, row["repeats_by_chance"])
    out.row(f"{repeated}, chance over restarts", row["repeats"], None, row["repeats_if_exchanged"])


def row_space(weight: Tensor) -> Tensor:
    """(d, r) right singular vectors of W1 above ``SEEN`` of the largest singular value."""
    _, sigma, rows = torch.linalg.svd(weight.double(), full_matrices=False)
    return rows[sigma > SEEN * sigma[0]].T


def squares(theta: dict[str, Tensor]) -> dict[str, float]:
    """Squared norm of every layer, weight and bias together."""
    found: dict[str, float] = {}
    for name, t in theta.items():
        layer = name.rpartition(".")[0]
        found[layer] = found.get(layer, 0.0) + float(t.double().square().sum())
    return found


def five_best(x: Tensor, split: Split, basis: Tensor) -> dict[str, float]:
    """Mean distance of the five best, raw and on row(W1), each beside held-out points."""
    found = {}
    held = split.holdout.x[: len(split.train)]
    for name, part in {"raw": x, "projected": x @ basis @ basis.T}.items():
        for kind, samples in (("train", split.train.x), ("holdout", held)):
            nearest = l2(part, samples.double()).amin(0)
            found[f"five_best_{name}_{kind}"] = float(nearest.sort().values[:5].mean())
        found[f"mean_norm_{name}"] = float(part.norm(dim=1).mean())
    return found


@torch.no_grad()
def components(found: Any, run: int, checkpoint: Network, basis: Tensor) -> dict[str, float]:
    """What lies outside row(W1): its share of the candidates, and ||D^T U|| over ||W1||."""
    model, mine = checkpoint.double_module, found.run == run
    assert isinstance(model, MLP)
    x, lam, labels = (part[mine].double() for part in (found.x, found.lam, found.labels))
    d, outside = model.signals(model.trace(x), (lam * labels)[:, None])[0], x - x @ basis @ basis.T
    over = float((d.T @ outside).norm() / checkpoint.theta[FIRST].double().norm())
    return {"outside_share": float(outside.norm() / x.norm()), "dtu_over_w1": over}


def layer_residuals(found: Reconstruction, checkpoint: Network, run: int) -> dict[str, Any]:
    """Squared residual of every layer at the end over its squared target, and their absolute sum."""
    relative = dict(zip(found.layer_names, found.layers[run, -1].tolist(), strict=True))
    sizes = squares(checkpoint.theta)
    total = sum(value * sizes[name] for name, value in relative.items())
    return {"relative_squared": relative, "objective": total}


def rewritten(checkpoint: Network, amount: float) -> Network:
    """b -> b - <w, u> with u the same in every pixel: the network that sees x + u as x."""
    bias = checkpoint.theta[BIAS] - amount * checkpoint.theta[FIRST].sum(1)
    return checkpoint.replace(theta={**checkpoint.theta, BIAS: bias})


def compare(x: Tensor, run: Tensor, train_x: Tensor, held: Tensor) -> dict[str, Any]:
    """Nearest samples, sparse nonnegative mixtures and repeats, held-out images beside each.

    run: (m,) restart of every candidate; repeats are counted inside each one.
    """
    row: dict[str, Any] = {}
    kept = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:100]
    for kind, samples in (("train", train_x), ("holdout", held)):
        distance, alike = l2(x, samples).amin(0), ncc(x, samples).amax(0)
        row[f"five_best_l2_{kind}"] = float(distance.sort().values[:5].mean())
        row[f"five_best_ncc_{kind}"] = float(alike.sort(descending=True).values[:5].mean())
        row[f"above_0.8_{kind}"] = int((alike > MATCHED).sum())
        atoms = standardize(samples.double())
        fits = np.array([mixture(one, atoms) for one in standardize(x[kept])])
        single, mixed = np.median(fits, 0).tolist()
        row |= {f"single_ncc_{kind}": single, f"mixture_ncc_{kind}": mixed}
    best, which = ncc(x, train_x).max(1)
    matched = best > MATCHED
    return row | repeats(which[matched], run[matched], len(train_x))


def repeats(which: Tensor, run: Tensor, n: int) -> dict[str, Any]:
    """Matched candidates whose sample another candidate of the same restart matched before.

    which, run: (k,) sample and restart of every matched candidate. Two chance levels, each summed
    over restarts: every match hits one of all n samples alike, or which restart made a match is
    exchangeable. The second keeps the samples that were found and how often, so a sample easily
    found is no evidence against it; it says nothing (None) where fewer than two restarts matched.
    """
    groups = [which[run == one] for one in run.unique()]
    sizes, total = [len(group) for group in groups], len(which)
    times = which.unique(return_counts=True)[1].tolist()

    def distinct(size: int) -> float:
        """Samples among ``size`` of the matches drawn without replacement."""
        return sum(1 - math.comb(total - c, size) / math.comb(total, size) for c in times)

    exchanged = sum(size - distinct(size) for size in sizes) if len(sizes) > 1 else None
    return {
        "matched_per_restart": sizes,
        "repeats": sum(len(group) - len(group.unique()) for group in groups),
        "repeats_by_chance": sum(1 - (1 - 1 / n) ** j for size in sizes for j in range(size)),
        "repeats_if_exchanged": exchanged,
    }


def mixture(x: Tensor, atoms: Tensor, size: int = 5) -> tuple[float, float]:
    """NCC of x with its best single atom, and with its best mixture of up to ``size`` atoms.

    x: (d,), atoms: (n, d), both standardized, so that a constant shift drops out. Atoms are taken
    greedily by their correlation with what is left and fitted by NNLS.
    """
    target, matrix = x.numpy(), atoms.numpy()
    chosen: list[int] = []
    values, left = [0.0], target
    while len(chosen) < size:
        gains = matrix @ left
        gains[chosen] = -np.inf
        if gains.max() <= 0:
            break
        chosen.append(int(gains.argmax()))
        fit = matrix[chosen].T @ nnls(matrix[chosen].T, target)[0]
        left = target - fit
        values.append(float(fit @ target / max(float(np.linalg.norm(fit)), 1e-12)))
    return values[min(1, len(values) - 1)], values[-1]


# Every lemma and theorem of Refael et al. 2025 on a concrete network: printed, corrected, exact.
#
# Theorem 9 in full: splitting sample l into x + a nu and x - b nu moves its margin m_l by +a s and -b s
# with s = y_l <grad_x Phi, nu>, and everything follows exactly:
#
#     p' = min(p, m_l + a s, m_l - b s),    delta' = max over the new set of lam (m - p')
#
# Printed beside it: delta' <= delta + Dd if Dd < p, Dd = lam_l (a+b) C with
# C = sum_{j active on x_l} |v_j| (eps + gamma |v_j| sum lam). That bound is not one (delta' reached 2.25
# times it, and Dd < p compares different units). What does hold, since p - p' <= max(a, b) C:
#
#     delta' <= delta + max(a, b) C max_i lam_i
#
# with equality at an exact point whose samples all have the same <nu, x_i> and share one neuron.
# what, exact, printed, corrected, note
Rows = Iterator[tuple[str, float, float | None, float | None, str]]


@dataclass(frozen=True)
class SplitLevels:
    """Levels before and after a split: exact, as printed, and a bound that holds.

    printed: delta + Dd, or None where its condition Dd < p fails; bound: the corrected one; both need
    a two-layer network and are None for others.
    """

    margin_before: float
    margin_after: float
    delta_after: float
    printed: float | None
    bound: float | None


def split_levels(kkt: KKTSet, i: int, direction: Tensor, alpha: float, beta: float) -> SplitLevels:
    """Exact p' and delta' of a split that stays inside its pattern, and the published bound."""
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
    """The published bounds on a split of one sample beside the exact budget; lengths, |nu| = 1.

    They bound |<w_j, nu>| of a two-layer network by what stationarity says about w_j, with gamma =
    max_i |<nu, x_i>|; printed with a one-sided gamma = max_i <nu, x_i> all of them are false:

        Theorem 5 as printed   min_j |pre_j| / (gamma sum_i lam_i)              false where |v_j| > 1
        Theorem 5 corrected    min_j |pre_j| / (gamma |v_j| sum_{i active on j} lam_i)
        Theorem 8              min_j |pre_j| / (eps + gamma |v_j| sum_i lam_i)

    (|pre_j| = |D_j| |w_j|, D_j the signed distance to the neuron's hyperplane.)

    theorem5_printed, theorem5_corrected: for an exact KKT point (eps = 0); theorem8: for an eps-KKT
    point; one_sided: Theorem 8 with the printed gamma = max_i <nu, x_i>; exact: the smaller one-sided
    budget. A certificate is valid where it does not exceed the exact budget.
    """

    theorem5_printed: float
    theorem5_corrected: float
    theorem8: float
    one_sided: float
    exact: float
    gamma: float
    eps: float

    def valid(self, name: str) -> bool:
        """Whether the named bound keeps its promise here (to rounding)."""
        return bool(getattr(self, name) <= self.exact * (1 + 1e-12))

    @property
    def invalid(self) -> tuple[str, ...]:
        """Names of the bounds that promise more than there is."""
        names = ("theorem5_printed", "theorem5_corrected", "theorem8", "one_sided")
        return tuple(name for name in names if not self.valid(name))


@torch.no_grad()
def budget_certificates(
    model: MLP, x: Tensor, lam: Tensor, i: int, direction: Tensor, eps: float = 0.0
) -> BudgetCertificates:
    """Certificates for splitting sample i of a binary two-layer network. x: (n, d); lam: (n,)."""
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
    """(h,) output weights v of a two-layer MLP with one output; the printed theorems need one."""
    chain = dense_chain(model)
    if chain is None or len(chain.linears) != 2 or chain.linears[1].out_features != 1:
        raise HypothesisError(
            "depth",
            "Theorems 5, 8 and 9 are stated for two-layer networks with one output; this is another.",
            "Use compute_exact_budgets, which hold for any depth.",
        )
    return chain.linears[1].weight.detach()[0]


def _ratio(above: Tensor, below: Tensor) -> float:
    """min above / below; nothing below, or less, means nothing in the way."""
    held = below > 0
    return float((above[held] / below[held]).min()) if held.any() else math.inf


def largest_split(kkt: KKTSet, i: int, direction: Tensor, delta: float) -> float:
    """The inverse of Theorem 9: the longest symmetric split of sample i that an attacker cannot rule
    out who knows delta' <= delta; never beyond the exact budget. 0 where none is allowed.

    With a = b = t both halves have multiplier lam/2 and margins m +- t|s|, and every term of delta'
    grows with t, so each gives one bound on t in closed form.
    """
    margins, lam, nu = _check_binary(kkt)[:, 0], kkt.lam, unit(direction)
    budget = float(kkt.budgets(nu, torch.tensor([i])).least[0])
    p, m = float(margins.min()), float(margins[i])
    s = abs(float(kkt.gradients[i, 0] @ nu))
    others = torch.arange(len(lam)) != i
    # Of the other samples, whose slack grows once p' falls below p:
    rest = (lam[others] * (margins[others] - p)).amax() if others.any() else torch.tensor(0.0)
    rounding = 1e-12 * float(lam.max() * margins.abs().max())
    if max(float(rest), float(lam[i]) / 2 * (m - p)) > delta + rounding:
        return 0.0
    if s <= 1e-14 * float(kkt.gradients[i, 0].norm()):
        return budget
    used = others & (lam > 0)
    bounds = (m - margins[used] + delta / lam[used]) / s
    own = (2 * delta / float(lam[i]) - (m - p)) / s  # while p' = p
    if own > (m - p) / s:  # p' = m - t s from here on
        own = delta / (float(lam[i]) * s)
    return max(0.0, min([budget, own, *bounds.tolist()]))


def kkt_loss(kkt: KKTSet, power: int = 1, g1: float = 1.0, g2: float = 1.0) -> float:
    """L_KKT of Definition 1: g1 ||r||^power + g2 sum_i max(-lam_i, 0); Haim et al. 2022 have power 2."""
    size = kkt.residual * norm(kkt.target)
    return g1 * size**power + g2 * float((-kkt.lam).clamp(min=0).sum())


def _check_binary(kkt: KKTSet) -> Tensor:
    if kkt.task != "binary" or kkt.margins is None:
        raise HypothesisError(
            "label", "Theorem 9 is about binary labels and their margins.", "Compare KKTSet.delta."
        )
    return kkt.margins


def _sensitivity(kkt: KKTSet, model: MLP, i: int, direction: Tensor) -> float:
    """C: bound on |<grad_x Phi, nu>| at sample i from stationarity alone."""
    v, nu = two_layer_weights(model).abs(), unit(direction)
    eps = kkt.residual * norm(kkt.target)
    gamma = float((kkt.x.flatten(1) @ nu).abs().max())
    active = model.trace(kkt.x[i : i + 1]).pre[0][0] > 0
    return float((v * (eps + gamma * v * kkt.lam.sum()))[active].sum())


def theorems(context: Context) -> Outcome:
    """The table; every entry is computed here, none is quoted from the theory page."""
    network = "12-2-1 on 6 samples, closed form; others are named in the notes of a row"
    out = Outcome(details={"network": network})
    parts = (_threshold, _merging, _splitting, _budgets, _perturbed, _levels, _singular, _shifted)
    for part in parts:
        for what, exact, printed, corrected, note in part(relu_point()):
            out.row(what, exact, printed, corrected=corrected, note=note)
    return out


def _threshold(point: ExactPoint) -> Rows:
    """Theorem 1: a mean logistic loss below 1/n does not separate; below ln2/n it does."""
    base = steep_point()
    x = torch.stack([30 * base.x[0], 0.2 * base.x[0]])
    margins = base.model(x)[:, 0].detach() * torch.tensor([1.0, -1.0]).double() * base.y[0]
    what = "Theorem 1: loss below which all margins are positive, n = 2, logistic"
    note = f"this loss, with a margin of {float(margins.min()):.2g}: the printed 1/n is that of "
    note += "the exponential loss"
    yield what, float(softplus(-margins).mean()), 1 / 2, math.log(2) / 2, note


def _merging(point: ExactPoint) -> Rows:
    """Lemma 2 in one pattern, Lemma 6 across patterns."""
    residual = point.set.merge(0, 1).residual
    yield "Lemma 2: residual after a merge in one pattern", residual, 0.0, 0.0, ""
    other, pair = relu_point(groups=4, size=2), [0, 4]  # groups 0 and 2: one label, two patterns
    keep = [i for i in range(len(other.x)) if i not in pair]
    y, best = other.y[[*keep, pair[0]]], math.inf
    for share in torch.linspace(0, 1, 41):
        mean = share * other.x[pair[0]] + (1 - share) * other.x[pair[1]]
        merged = KKTSet.from_samples(other.model, torch.cat([other.x[keep], mean[None]]), y)
        best = min(best, merged.residual)
    note = "the best over the merged sample's place and all multipliers >= 0; network 12-4-1"
    yield "Lemma 6: residual after a merge across two patterns", best, 0.0, best, note


def _splitting(point: ExactPoint) -> Rows:
    """Lemma 3 / 7: the residual stays; the margin only along directions orthogonal to grad_x Phi.
    Theorem 4 needs no two layers.
    """
    given, some, nu = point.set, torch.tensor([0]), unit(normal(12))
    length = min(1.0, 0.5 * float(given.budgets(nu, some).least[0]))
    free = given.split(0, nu, length)
    kept = given.split(0, given.directions("tangent", some)[0], 0.1)
    yield "Lemma 3: residual after a split along a random direction", free.residual, 0.0, 0.0, ""
    change, note = length * abs(float(given.gradients[0, 0] @ nu)), "alpha |<grad_x Phi, nu>|"
    falls = [1 - float(split.margin or 0) for split in (free, kept)]
    yield "Lemma 7: fall of the margin after that split", falls[0], 0.0, change, note
    yield "Lemma 7: the same, nu orthogonal to grad_x Phi", falls[1], 0.0, 0.0, ""
    far = given.far_set(1000.0)
    note = f"distance {given.distance(far):.6g}, margin {far.margin:.6g}, full KKT set: "
    note += "yes" if far.is_full_kkt_set else "no"
    yield "Theorem 4: residual of a set farther away than 1000", far.residual, 0.0, 0.0, note


def _budgets(point: ExactPoint) -> Rows:
    """Theorem 5, where an output weight exceeds one."""
    steep = steep_point(0.05)
    given, nu = steep.set, steep.model.linears[0].weight[0].detach()
    found = [budget_certificates(steep.model, given.x, given.lam, i, nu) for i in range(len(given))]
    i = max(range(len(found)), key=lambda k: found[k].theorem5_printed / found[k].exact)
    printed, corrected = found[i].theorem5_printed, found[i].theorem5_corrected
    beyond = given.split(i, nu, 0.99 * printed, check=False).residual
    largest = float(two_layer_weights(steep.model).abs().max())
    note = f"|v| = {largest:.3g}; a split the printed budget allows has residual {beyond:.2g}"
    yield "Theorem 5: budget of a split", found[i].exact, printed, corrected, note


def _perturbed(point: ExactPoint) -> Rows:
    """Theorem 8 and Lemma 14 at an eps-KKT point, and Theorem 8 with the printed gamma."""
    model, nu = noisy(point.model, 0.05, seed=3), unit(normal(12, seed=1))
    given = KKTSet.from_samples(model, point.x, point.y, point.lam)
    eps = given.residual * norm(given.target)
    sound = budget_certificates(model, point.x, point.lam, 0, nu, eps)
    what, note = "Theorem 8: budget at an eps-KKT point", f"eps = {eps:.3g}, two-sided gamma"
    yield what, sound.exact, sound.theorem8, sound.theorem8, note
    along = (normal(12, seed=seed) for seed in range(40))
    tried = itertools.product(along, range(len(point.x)))
    sides = [budget_certificates(point.model, point.x, point.lam, k, nu) for nu, k in tried]
    false = max(sides, key=lambda one: one.one_sided / one.exact)
    what, note = "Theorem 8 with the printed one-sided gamma", "worst of 240 directions and samples"
    yield what, false.exact, false.one_sided, false.theorem8, note
    along, v = (model.linears[0].weight @ nu).abs().detach(), two_layer_weights(model).abs()
    bounds = eps + float((point.x @ nu).abs().max()) * v * point.lam.sum()
    j = int((along / bounds).argmax())
    bound, note = float(bounds[j]), "the neuron nearest its bound"
    yield "Lemma 14: |<w_j, nu>|", float(along[j]), bound, bound, note


def _levels(point: ExactPoint) -> Rows:
    """Theorem 9: what a split does to delta and to the margin; the split that breaks it most."""
    steep = steep_point(0.5).set
    least, nu = int(steep.lam.argmin()), steep.gradients[0, 0]
    reach = 0.05 * float(steep.budgets(unit(nu)).least[least])
    lengths = [share * reach for share in (0.02, 0.1, 0.5, 1.0)]
    tried = [split_levels(steep, least, nu, a, b) for a in lengths for b in lengths]
    stated = [found for found in tried if found.printed is not None]
    found = max(stated, key=lambda one: one.delta_after / float(one.printed or 1))
    yield "Theorem 9: delta after a split", found.delta_after, found.printed, found.bound, ""
    what, note = "Theorem 9: margin after that split", "condition (b) is stated at that before"
    yield what, found.margin_after, found.margin_before, found.margin_after, note


def _singular(point: ExactPoint) -> Rows:
    """Theorem 15 and its remark."""
    n, d = 40, 12
    _, sigma, gamma = find_data_direction(normal(n, d))
    what, note = "Theorem 15: gamma along the last singular vector", "an upper bound, as printed"
    yield what, gamma, sigma, sigma, f"{note}; n = {n}, d = {d}"
    note = "no direction has less than sigma_d / sqrt(n); the remark says sigma_d / n"
    yield "Theorem 15, remark: size of gamma", gamma, sigma / n, sigma / math.sqrt(n), note


def _shifted(point: ExactPoint) -> Rows:
    """Appendix D: rewriting the biases is not training on shifted data."""
    weight, bias = (part.detach() for part in point.model.linears[0].parameters())
    for length in (0.1, 0.5, 5.0):
        u = length * torch.ones(12, dtype=torch.float64) / math.sqrt(12)
        moved = copy.deepcopy(point.model)
        moved.linears[0].bias.data.sub_(weight @ u)
        given = KKTSet.from_samples(moved, point.x + u, point.y, point.lam)
        formula = math.hypot(float(bias.norm()) * length, float((weight @ u).norm()))
        note = (
            f"refitted multipliers: {KKTSet.from_samples(moved, point.x + u, point.y).residual:.3g}"
        )
        what = f"Appendix D: residual after a shift of norm {length:g}"
        yield what, given.residual, 0.0, formula / norm(given.target), note


_KEYS = "five_best_raw_train five_best_projected_train objective"
_RADII = partial(drawing.curves, x="radius", keys=_KEYS, by="init", scale="log")
FIGURES = {
    "fig1": Figure("merge and split in the plane, on an actual network", plane, drawing.regions),
    "fig2a": Figure("distance of reconstructions by initial radius, sphere", sphere, _RADII),
    "fig2b": Figure("reconstructions without a known range, CIFAR", shift, drawing.shifts),
    "theorems": Figure("every lemma and theorem: printed, corrected, exact", theorems),
}
