"""Is a reconstruction unique, and what decides how much leaks? Experiments with their controls beside.

=========  =======================================================================================
sphere     initial radius against the mean distance of the five best; how much lies outside row(W1)
objective  what the published objective of the sphere attack is made of
shift      CIFAR shifted by rewriting biases and by training again; single samples against mixtures
unshifted  the first case of shift alone: repeats of a sample inside a restart
length     training length against recovered samples, KKT residual and budgets
spectrum   data with smaller and larger lowest singular values
flat       MNIST with all but its main directions made smaller, down to a proper subspace
convnet    merge and split on trained convnets
partial    attacks that know a share of the neurons, or the first layer alone
=========  =======================================================================================

sphere, shift and unshifted are figures of Refael et al. 2025 under the names they are quoted by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import residuum as rs
from papers import drawing, refael2025
from papers.points import normal
from papers.refael2025 import (
    BIAS,
    FIRST,
    SIZES,
    budget_certificates,
    five_best,
    layer_residuals,
    row_space,
    squares,
)
from papers.runs import Context, Figure, Outcome, Settings, Victim, first_residual, mlp
from residuum.attacks import Attack, attack_class, make_attack
from residuum.networks import MLP
from residuum.networks.network import Network
from residuum.networks.spectrum import rank_above, singular_values
from residuum.records import Dataset, Knowledge, Reconstruction, Split
from residuum.stationarity import flatten, norm, residual
from residuum.theory.directions import find_data_direction
from residuum.theory.kkt_sets import KKTSet

LENGTHS = {"tiny": (30, 60, 120, 240, 480), "small": (100, 300, 1000, 2000)}
LENGTHS["paper"] = (100, 300, 1000, 4000)
LAST, RELEASED = "layers.1.weight", "haim2022-mnist-kcf9bhbi"
# What tells the rows of an experiment apart.
SETTINGS = ("data", "seed", "victim", "attack", "length", "factor", "access", "share")
Rows = Iterator[dict[str, Any]]


def experiment(context: Context, rows: Callable[[Context], Rows]) -> Outcome:
    """The rows of an experiment, each number of each row in the table."""
    out = Outcome(details={"n": context.scale.n(50), "rows": list(rows(context))})
    for row in out.details["rows"]:
        name = ", ".join(f"{key} {row[key]}" for key in SETTINGS if key in row)
        for key, value in row.items():
            if key not in SETTINGS and isinstance(value, int | float):
                chance = row["expected_by_chance"] if key == "recovered" else None
                out.row(f"{name}: {key}", value, None, chance)
    return out


def seeds(context: Context) -> range:
    """Three victims at the paper's size, one else."""
    return range(3 if context.scale.name == "paper" else 1)


def digits(context: Context, seed: int, depth: int = 1, data: str = "mnist") -> tuple[Split, str]:
    """MNIST, odd against even (or CIFAR), and the network trained on it."""
    split = context.split(data, 50, seed=seed + 100)
    return split, mlp(split.train, (SIZES[context.scale.name].width,) * depth)


def attacked(
    context: Context, checkpoint: Network, n: int, name: str = "auto", **changes: Any
) -> Reconstruction:
    """Two candidates per sample, the shape and the number of samples known."""
    own = SIZES[context.scale.name]
    kind = attack_class(name)
    base = {"steps": own.steps, "restarts": own.restarts, "dtype": context.fast}
    attack = kind(**kind.select_settings({**base, "candidates": 2 * n, **changes}))
    known = Knowledge(shape=checkpoint.input_shape, sample_count=n)
    return context.attack(checkpoint, known, attack)


def counts(found: Reconstruction, split: Split) -> dict[str, Any]:
    """What came back, beside chance."""
    scores = rs.score(found.x.double(), split.train, split.holdout, metrics=("ncc",), subsets=200)
    metric = scores.metrics["ncc"].to_json()
    names = ("recovered", "threshold_null99", "expected_by_chance", "p_value", "top10_mean")
    return {"first_layer_residual": first_residual(found)} | {key: metric[key] for key in names}


def first_layer_rank(checkpoint: Network) -> int:
    """Singular values of the first layer above 1% of the largest."""
    return rank_above(singular_values(checkpoint.theta[FIRST]), 0.01)


def length(context: Context) -> Rows:
    """Training length against recovered samples, KKT residual and budgets."""
    seed = context.seed
    for data in ("mnist", "cifar10"):
        split, arch = digits(context, seed, 2, data)
        for steps in LENGTHS[context.scale.name]:
            net = context.train(arch, split.train, steps=steps, seed=seed)
            row = {"data": data, "seed": seed, "length": steps, **judged(context, net, split)}
            unmixed = attacked(context, net.checkpoint, len(split.train), "unmix")
            found = counts(unmixed, split)
            yield row | {f"unmix_{key}": found[key] for key in ("recovered", "expected_by_chance")}


def flat(context: Context) -> Rows:
    """Images that an attack recovers, made flatter: who is recovered when the data span less?

    The directions are those of training and held-out samples together, which stay exchangeable.
    """
    for seed in seeds(context)[:2]:
        given, arch = digits(context, seed)
        n, shape = len(given.train), given.train.shape
        pool = torch.cat([given.train.x, given.holdout.x]).double().flatten(1)
        basis = torch.linalg.svd(pool, full_matrices=False).Vh[: n // 2]
        main = pool @ basis.T @ basis
        for factor in (1.0, 0.3, 0.1, 0.0):
            moved = (main + factor * (pool - main)).to(given.train.x).reshape(-1, *shape)
            split = Split(given.train.replace(x=moved[:n]), given.holdout.replace(x=moved[n:]))
            steps = SIZES[context.scale.name].training
            net = context.train(arch, split.train, steps=steps, seed=seed)
            yield {"seed": seed, "factor": factor, **judged(context, net, split)}


def judged(context: Context, net: Victim, split: Split) -> dict[str, Any]:
    """Attack and score; the certificate and the budgets of the true samples."""
    checkpoint, n = net.checkpoint, len(split.train)
    given = KKTSet.from_samples(checkpoint.copy_module(), split.train.x, split.train.y)
    kkt = given.used()
    layers = sum(name.endswith("weight") for name in checkpoint.theta)  # the order of homogeneity
    budgets = kkt.budgets(kkt.directions("weights")).least / kkt.x.flatten(1).norm(dim=1)
    return {
        "margin": net.summary["margin"],
        "residual_plain": given.residual,
        "normalized_margin": (given.margin or 0.0) / norm(given.target) ** layers,
        "budget_over_norm": float(budgets.median()),
        "in_use": len(kkt),
        "first_layer_rank": first_layer_rank(checkpoint),
        **counts(attacked(context, checkpoint, n), split),
    }


def spectrum(context: Context) -> Rows:
    """Data whose lowest singular values are made smaller and smaller, down to a proper subspace."""
    own = SIZES[context.scale.name]
    dim, n = max(20, own.width // 10), max(30, own.width // 5)
    for seed in seeds(context)[:2]:
        full = normal(2 * n, dim, seed=seed) / dim**0.5
        y = torch.where(full[:, 0] > 0, 1.0, -1.0)
        for factor in (1.0, 0.3, 0.1, 0.03, 0.0):
            x = full.clone()
            x[:, dim // 2 :] *= factor
            split = Split(Dataset(x[:n], y[:n]), Dataset(x[n:], y[n:]))
            arch, steps = mlp(split.train, (own.width,)), 2 * own.training // 3
            net = context.train(arch, split.train, steps=steps, seed=seed)
            found = attacked(context, net.checkpoint, n, lr_x=0.003)
            row = {"seed": seed, "factor": factor, "margin": net.summary["margin"]}
            row |= {"first_layer_residual": first_residual(found)} | flatness(net.checkpoint, split)
            yield row | five_best(found.x.double(), split, row_space(net.checkpoint.theta[FIRST]))


def flatness(checkpoint: Network, split: Split) -> dict[str, Any]:
    """sigma_d, gamma, and the budgets along the last singular vector: Theorem 8 and exact."""
    model = checkpoint.double_module
    assert isinstance(model, MLP)
    kkt = KKTSet.from_samples(model, split.train.x, split.train.y)
    nu, sigma, gamma = find_data_direction(split.train.x)
    eps = kkt.residual * norm(kkt.target)
    used = (kkt.lam > 0).nonzero()[:, 0].tolist()
    found = [budget_certificates(model, kkt.x, kkt.lam, i, nu, eps) for i in used]
    return {
        "sigma_d": sigma,
        "gamma": gamma,
        "residual_plain": kkt.residual,
        "theorem8_median": float(np.median([one.theorem8 for one in found])),
        "exact_median": float(np.median([one.exact for one in found])),
        "theorem5_printed_beyond_exact": sum("theorem5_printed" in one.invalid for one in found),
        "theorem8_beyond_exact": sum("theorem8" in one.invalid for one in found),
        "certified": len(found),
    }


def convnet(context: Context) -> Rows:
    """Merge and split on trained convnets: residual inside the budget, and beyond it."""
    for seed in seeds(context):
        split = context.split("mnist", 20, seed=seed + 100)
        arch = f"convnet:{'x'.join(map(str, split.train.shape))}-4-8-1"
        steps = min(SIZES[context.scale.name].training, 2000)
        net = context.train(arch, split.train, steps=steps, seed=seed)
        kkt = KKTSet.from_samples(net.checkpoint.copy_module(), split.train.x, split.train.y)
        some = (kkt.lam > 0).nonzero()[:3, 0]
        nu = kkt.directions("softest", some)
        least = kkt.budgets(nu, some).least
        row = {"seed": seed, "margin": net.summary["margin"], "residual": kkt.residual}
        row["budget_median"] = float(least.median())
        row["norm"] = float(kkt.x.flatten(1).norm(dim=1).mean())
        inside, first = kkt.split_all(nu, 0.9 * least, samples=some), int(some[0])
        back = inside.merge(first, first + 1)
        row["merge_error"] = float((back.x[first] - kkt.x[first]).norm())
        row["outputs_change"] = abs((inside.margin or 0.0) - (kkt.margin or 0.0))
        for share in (0.5, 0.9, 0.99, 1.1, 2.0, 5.0):  # of the exact budget
            after = kkt.split_all(nu, share * least, samples=some, check=False)
            yield {**row, "share": share, "change": abs(after.residual - kkt.residual)}


def partly(context: Context) -> Rows:
    """What part of the weights suffices: a share of the neurons, or the first layer alone."""
    for seed in seeds(context):
        split, arch = digits(context, seed)
        steps = SIZES[context.scale.name].training
        whole = context.train(arch, split.train, steps=steps, seed=seed).checkpoint
        shares = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
        cases = {f"{share:g} of the neurons": some_neurons(whole, share, seed) for share in shares}
        cases["first layer, signs known"] = from_balance(whole, None)
        cases["first layer alone"] = from_balance(whole, seed)
        for name, checkpoint in cases.items():
            found = attacked(context, checkpoint, len(split.train), layers="first")
            row = {"seed": seed, "access": name, "neurons": len(checkpoint.theta[FIRST])}
            row["first_layer_rank"] = first_layer_rank(checkpoint)
            yield row | counts(found, split)


def some_neurons(checkpoint: Network, share: float, seed: int) -> Network:
    """The network of some hidden neurons: each one's equation stands without the others."""
    theta = checkpoint.theta
    width, dim = theta[FIRST].shape
    keep = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    keep = keep[: max(1, round(share * width))].sort().values
    part = {FIRST: theta[FIRST][keep], BIAS: theta[BIAS][keep], LAST: theta[LAST][:, keep]}
    return checkpoint.replace(theta=part, arch=f"mlp:{dim}-{len(keep)}-1")


def from_balance(checkpoint: Network, guess: int | None) -> Network:
    """Output weights from |v_j|^2 = |w_j|^2 + b_j^2, with the true signs or guessed ones."""
    theta = checkpoint.theta
    size = (theta[FIRST].square().sum(1) + theta[BIAS].square()).sqrt()
    sign = theta[LAST][0].sign()
    if guess is not None:
        rng = torch.Generator().manual_seed(guess)
        sign = torch.randint(0, 2, sign.shape, generator=rng).to(sign) * 2 - 1
    return checkpoint.replace(theta={**theta, LAST: (size * sign)[None]})


def objective(context: Context) -> Rows:
    """What the published objective of the sphere attack (330 to 332) is made of.

    Victims start from torch's default first layer. Gradient descent leaves theta = theta_0 + what the
    samples added; an attack that explains the second part alone ends at |theta_0|^2. So beside the
    objective: |theta_0|^2, and the cosine between what is left and theta_0.
    """
    own = SIZES[context.scale.name]
    split = rs.load_dataset("sphere", own.n, seed=context.seed, dim=own.dim)
    ours = refael2025.sphere_attack(context, 1.0).changed(restarts=1)
    published: Settings = {"sigma": ours.sigma, "steps": 7 * own.steps, "candidates": 2 * own.n}
    attacks: dict[str, Attack] = {
        "published": make_attack(preset=RELEASED, dtype=context.fast, **published)
    }
    # Heavy-ball descent follows the flow of plain descent at ten times this rate, 300 times the published.
    descent: Settings = {"method": "gd", "lr": 0.3, "momentum": 0.9, "steps": 10 * own.training}
    ways = {f"descent to loss {loss:g}": {**descent, "stop_loss": loss} for loss in (1e-2, 1e-3)}
    for name, changes in ways.items():
        net = context.train(mlp(split.train, (own.width,)), split.train, init="default", **changes)
        said = {"victim": name, "training_steps": net.summary["steps"]}
        said |= {"training_loss": net.summary["loss"], "margin": net.summary["margin"]}
        said["initial_squared_norms"] = squares(net.theta0)
        said["squared_norms"] = squares(net.checkpoint.theta)
        for attack, config in (attacks | {"residuum": ours}).items():
            found = context.attack(net.checkpoint, Knowledge(shape=split.train.shape), config)
            row = said | {"attack": attack} | layer_residuals(found, net.checkpoint, 0)
            yield row | {"history": history(found, net.checkpoint), **left(found, net)}


def history(found: Reconstruction, checkpoint: Network) -> list[tuple[int, float]]:
    """(step, objective) at about ten moments."""
    sizes = squares(checkpoint.theta)
    scales = torch.tensor([sizes[name] for name in found.layer_names], dtype=torch.float64)
    totals = (found.layers[0].double() @ scales).tolist()
    pairs = list(zip(found.steps.tolist(), totals, strict=True))
    return pairs[:: max(1, len(pairs) // 10)]


def left(found: Reconstruction, net: Victim) -> dict[str, float]:
    """What the candidates leave of theta, with the network's own gates, against theta_0."""
    theta = {name: t.double() for name, t in net.checkpoint.theta.items()}
    u = (found.lam.double() * found.labels.double())[:, None]
    rest = flatten(residual(net.checkpoint.copy_module().double(), theta, found.x.double(), u))
    start = flatten({name: net.theta0[name].double() for name in theta})
    cosine = float(rest @ start / (rest.norm() * start.norm()))
    lengths = {"left_squared": float(rest @ rest), "multipliers": float(found.lam.sum())}
    return lengths | {"cosine_with_initial": cosine}


def _figure(title: str, rows: Callable[[Context], Rows], *drawn: str) -> Figure:
    x, scale, keys = drawn or ("", "", "")
    draw = partial(drawing.curves, x=x, scale=scale, keys=keys) if drawn else None
    return Figure(title, partial(experiment, rows=rows), draw)


_LEAK = "recovered residual_plain budget_over_norm"
_SPECTRUM = "exact_median theorem8_median five_best_raw_train five_best_projected_train"
_SHIFT = "above_0.8_train five_best_ncc_train single_ncc_train mixture_ncc_train"
_SHIFTED = refael2025.FIGURES["fig2b"]
FIGURES: dict[str, Figure] = {
    "sphere": refael2025.FIGURES["fig2a"],
    "shift": replace(_SHIFTED, draw=partial(drawing.curves, x="name", keys=_SHIFT)),
    "unshifted": replace(_SHIFTED, compute=partial(refael2025.shift, amounts=())),
    "objective": _figure("what the objective of the sphere attack is made of", objective),
    "length": _figure(
        "training length against leak, MNIST and CIFAR n=50", length, "length", "log", _LEAK
    ),
    "flat": _figure("MNIST made flatter against leak", flat, "factor", "symlog", _LEAK),
    "spectrum": _figure("lowest singular values of data", spectrum, "factor", "symlog", _SPECTRUM),
    "convnet": _figure("merge and split on trained convnets", convnet, "share", "log", "change"),
    "partial": _figure("a part of the weights known", partly, "access", "linear", "recovered"),
}
