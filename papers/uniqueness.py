"""Experiments on whether reconstructions are unique and what decides how much leaks, with controls.

=========  =======================================================================================
sphere     initial radius against the mean distance of the five best, and the share outside row(W1)
objective  terms of the published objective of the sphere attack
shift      CIFAR shifted by rewriting biases and by retraining; single samples against mixtures
unshifted  only the first case of shift: repeats of a sample inside a restart
length     training length against recovered samples, KKT residual and budgets
spectrum   data with smaller and larger lowest singular values
flat       MNIST with all but its main directions made smaller, down to a proper subspace
convnet    merge and split on trained convnets
partial    attacks that know a share of the neurons, or only the first layer
=========  =======================================================================================

The figures sphere, shift and unshifted are figures of Refael et al. 2025.
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
# Keys of a row that name its settings. The other keys of a row are results.
SETTINGS = ("data", "seed", "victim", "attack", "length", "factor", "access", "share")
Rows = Iterator[dict[str, Any]]


def experiment(context: Context, rows: Callable[[Context], Rows]) -> Outcome:
    """Run an experiment and add each number of each row to the table.

    Args:
        context: scale, device and cache of the run.
        rows: function that yields the rows of the experiment.

    Returns:
        The table, and the rows as details.
    """
    out = Outcome(details={"n": context.scale.n(50), "rows": list(rows(context))})
    for row in out.details["rows"]:
        name = ", ".join(f"{key} {row[key]}" for key in SETTINGS if key in row)
        for key, value in row.items():
            if key not in SETTINGS and isinstance(value, int | float):
                chance = row["expected_by_chance"] if key == "recovered" else None
                out.row(f"{name}: {key}", value, None, chance)
    return out


def seeds(context: Context) -> range:
    """Return the seeds of the victims: three at the scale of the paper, otherwise one."""
    return range(3 if context.scale.name == "paper" else 1)


def digits(context: Context, seed: int, depth: int = 1, data: str = "mnist") -> tuple[Split, str]:
    """Load 50 images of MNIST (odd against even) or CIFAR, and choose the network to train on them.

    Args:
        context: scale and data folder of the run.
        seed: seed of the choice of images.
        depth: number of hidden layers.
        data: mnist or cifar10.

    Returns:
        The training and held-out samples, and the architecture.
    """
    split = context.split(data, 50, seed=seed + 100)
    return split, mlp(split.train, (SIZES[context.scale.name].width,) * depth)


def attack_network(
    context: Context, checkpoint: Network, n: int, name: str = "auto", **changes: Any
) -> Reconstruction:
    """Attack a network with two candidates per sample. The attacker knows the shape and the sample count.

    Args:
        context: scale, device and cache of the run.
        checkpoint: network that is attacked.
        n: number of training samples.
        name: name of the attack.
        **changes: changed settings of the attack.

    Returns:
        The reconstruction.
    """
    sizes = SIZES[context.scale.name]
    kind = attack_class(name)
    base = {"steps": sizes.steps, "restarts": sizes.restarts, "dtype": context.fast}
    attack = kind(**kind.select_settings({**base, "candidates": 2 * n, **changes}))
    knowledge = Knowledge(shape=checkpoint.input_shape, sample_count=n)
    return context.attack(checkpoint, knowledge, attack)


def count_recovered(reconstruction: Reconstruction, split: Split) -> dict[str, Any]:
    """Count the recovered training samples, and the number expected by chance.

    Args:
        reconstruction: result of an attack.
        split: training and held-out samples.

    Returns:
        The residual of the first layer and the NCC scores, by name.
    """
    scores = rs.score(
        reconstruction.x.double(), split.train, split.holdout, metrics=("ncc",), subsets=200
    )
    metric = scores.metrics["ncc"].to_json()
    names = ("recovered", "threshold_null99", "expected_by_chance", "p_value", "top10_mean")
    return {"first_layer_residual": first_residual(reconstruction)} | {
        key: metric[key] for key in names
    }


def first_layer_rank(checkpoint: Network) -> int:
    """Return the number of singular values of the first layer above 1% of the largest."""
    return rank_above(singular_values(checkpoint.theta[FIRST]), 0.01)


def length(context: Context) -> Rows:
    """Measure recovered samples, KKT residual and budgets for several training lengths."""
    seed = context.seed
    for data in ("mnist", "cifar10"):
        split, arch = digits(context, seed, 2, data)
        for steps in LENGTHS[context.scale.name]:
            net = context.train(arch, split.train, steps=steps, seed=seed)
            row = {
                "data": data,
                "seed": seed,
                "length": steps,
                **attack_and_certify(context, net, split),
            }
            unmixed = attack_network(context, net.checkpoint, len(split.train), "unmix")
            unmix_counts = count_recovered(unmixed, split)
            yield row | {
                f"unmix_{key}": unmix_counts[key] for key in ("recovered", "expected_by_chance")
            }


def flat(context: Context) -> Rows:
    """Measure the leak of images whose minor directions are scaled down.

    The main directions are those of training and held-out samples together, so that both sets stay
    exchangeable.

    Args:
        context: scale, device and cache of the run.

    Yields:
        One row of results per seed and scale factor.
    """
    for seed in seeds(context)[:2]:
        original, arch = digits(context, seed)
        n, shape = len(original.train), original.train.shape
        pool = torch.cat([original.train.x, original.holdout.x]).double().flatten(1)
        basis = torch.linalg.svd(pool, full_matrices=False).Vh[: n // 2]
        main = pool @ basis.T @ basis
        for factor in (1.0, 0.3, 0.1, 0.0):
            moved = (main + factor * (pool - main)).to(original.train.x).reshape(-1, *shape)
            split = Split(
                original.train.replace(x=moved[:n]), original.holdout.replace(x=moved[n:])
            )
            steps = SIZES[context.scale.name].training
            net = context.train(arch, split.train, steps=steps, seed=seed)
            yield {"seed": seed, "factor": factor, **attack_and_certify(context, net, split)}


def attack_and_certify(context: Context, net: Victim, split: Split) -> dict[str, Any]:
    """Attack a victim, score the reconstruction, and compute the budgets of the training samples.

    Args:
        context: scale, device and cache of the run.
        net: the victim.
        split: training and held-out samples.

    Returns:
        The results by name.
    """
    checkpoint, n = net.checkpoint, len(split.train)
    all_samples = KKTSet.from_samples(checkpoint.copy_module(), split.train.x, split.train.y)
    kkt = all_samples.used()
    layers = sum(name.endswith("weight") for name in checkpoint.theta)  # the order of homogeneity
    budgets = kkt.budgets(kkt.directions("weights")).least / kkt.x.flatten(1).norm(dim=1)
    return {
        "margin": net.summary["margin"],
        "residual_plain": all_samples.residual,
        "normalized_margin": (all_samples.margin or 0.0) / norm(all_samples.target) ** layers,
        "budget_over_norm": float(budgets.median()),
        "in_use": len(kkt),
        "first_layer_rank": first_layer_rank(checkpoint),
        **count_recovered(attack_network(context, checkpoint, n), split),
    }


def spectrum(context: Context) -> Rows:
    """Attack networks trained on data whose lowest singular values are scaled down, in the end to zero."""
    sizes = SIZES[context.scale.name]
    dim, n = max(20, sizes.width // 10), max(30, sizes.width // 5)
    for seed in seeds(context)[:2]:
        full = normal(2 * n, dim, seed=seed) / dim**0.5
        y = torch.where(full[:, 0] > 0, 1.0, -1.0)
        for factor in (1.0, 0.3, 0.1, 0.03, 0.0):
            x = full.clone()
            x[:, dim // 2 :] *= factor
            split = Split(Dataset(x[:n], y[:n]), Dataset(x[n:], y[n:]))
            arch, steps = mlp(split.train, (sizes.width,)), 2 * sizes.training // 3
            net = context.train(arch, split.train, steps=steps, seed=seed)
            reconstruction = attack_network(context, net.checkpoint, n, lr_x=0.003)
            row = {"seed": seed, "factor": factor, "margin": net.summary["margin"]}
            row |= {"first_layer_residual": first_residual(reconstruction)} | flatness(
                net.checkpoint, split
            )
            yield row | five_best(
                reconstruction.x.double(), split, row_space(net.checkpoint.theta[FIRST])
            )


def flatness(checkpoint: Network, split: Split) -> dict[str, Any]:
    """Compute the budgets along the last singular vector of the data: exact and by Theorem 8.

    Args:
        checkpoint: network trained on the samples.
        split: training and held-out samples.

    Returns:
        The smallest singular value sigma_d, its bound gamma, medians of the budgets, and how many
        published budgets exceed the exact ones.
    """
    model = checkpoint.double_module
    assert isinstance(model, MLP)
    kkt = KKTSet.from_samples(model, split.train.x, split.train.y)
    nu, sigma, gamma = find_data_direction(split.train.x)
    eps = kkt.residual * norm(kkt.target)
    used = (kkt.lam > 0).nonzero()[:, 0].tolist()
    certificates = [budget_certificates(model, kkt.x, kkt.lam, i, nu, eps) for i in used]
    return {
        "sigma_d": sigma,
        "gamma": gamma,
        "residual_plain": kkt.residual,
        "theorem8_median": float(np.median([certificate.theorem8 for certificate in certificates])),
        "exact_median": float(np.median([certificate.exact for certificate in certificates])),
        "theorem5_printed_beyond_exact": sum(
            "theorem5_printed" in certificate.invalid for certificate in certificates
        ),
        "theorem8_beyond_exact": sum(
            "theorem8" in certificate.invalid for certificate in certificates
        ),
        "certified": len(certificates),
    }


def convnet(context: Context) -> Rows:
    """Merge and split samples of trained convnets, and measure the residual inside and beyond the budget."""
    for seed in seeds(context):
        split = context.split("mnist", 20, seed=seed + 100)
        arch = f"convnet:{'x'.join(map(str, split.train.shape))}-4-8-1"
        steps = min(SIZES[context.scale.name].training, 2000)
        net = context.train(arch, split.train, steps=steps, seed=seed)
        kkt = KKTSet.from_samples(net.checkpoint.copy_module(), split.train.x, split.train.y)
        samples = (kkt.lam > 0).nonzero()[:3, 0]
        nu = kkt.directions("softest", samples)
        least = kkt.budgets(nu, samples).least
        row = {"seed": seed, "margin": net.summary["margin"], "residual": kkt.residual}
        row["budget_median"] = float(least.median())
        row["norm"] = float(kkt.x.flatten(1).norm(dim=1).mean())
        inside, first = kkt.split_all(nu, 0.9 * least, samples=samples), int(samples[0])
        back = inside.merge(first, first + 1)
        row["merge_error"] = float((back.x[first] - kkt.x[first]).norm())
        row["outputs_change"] = abs((inside.margin or 0.0) - (kkt.margin or 0.0))
        for share in (0.5, 0.9, 0.99, 1.1, 2.0, 5.0):  # lengths as shares of the exact budget
            after = kkt.split_all(nu, share * least, samples=samples, check=False)
            yield {**row, "share": share, "change": abs(after.residual - kkt.residual)}


def partly(context: Context) -> Rows:
    """Attack with a part of the weights: a share of the neurons, or only the first layer."""
    for seed in seeds(context):
        split, arch = digits(context, seed)
        steps = SIZES[context.scale.name].training
        network = context.train(arch, split.train, steps=steps, seed=seed).checkpoint
        shares = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
        cases = {
            f"{share:g} of the neurons": select_neurons(network, share, seed) for share in shares
        }
        cases["first layer, signs known"] = rebuild_from_balance(network, None)
        cases["first layer alone"] = rebuild_from_balance(network, seed)
        for name, checkpoint in cases.items():
            reconstruction = attack_network(context, checkpoint, len(split.train), layers="first")
            row = {"seed": seed, "access": name, "neurons": len(checkpoint.theta[FIRST])}
            row["first_layer_rank"] = first_layer_rank(checkpoint)
            yield row | count_recovered(reconstruction, split)


def select_neurons(checkpoint: Network, share: float, seed: int) -> Network:
    """Return a network of randomly chosen hidden neurons. Each neuron has its own stationarity equation.

    Args:
        checkpoint: network with one hidden layer.
        share: share of the hidden neurons to select.
        seed: seed of the choice.

    Returns:
        The network of the selected neurons.
    """
    theta = checkpoint.theta
    width, dim = theta[FIRST].shape
    keep = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    keep = keep[: max(1, round(share * width))].sort().values
    selected_theta = {
        FIRST: theta[FIRST][keep],
        BIAS: theta[BIAS][keep],
        LAST: theta[LAST][:, keep],
    }
    return checkpoint.replace(theta=selected_theta, arch=f"mlp:{dim}-{len(keep)}-1")


def rebuild_from_balance(checkpoint: Network, guess: int | None) -> Network:
    """Rebuild the output weights from the balance |v_j|^2 = |w_j|^2 + b_j^2 of each neuron j.

    Args:
        checkpoint: network with one hidden layer.
        guess: seed of random signs, or None to use the true signs.

    Returns:
        The network with rebuilt output weights v.
    """
    theta = checkpoint.theta
    size = (theta[FIRST].square().sum(1) + theta[BIAS].square()).sqrt()
    sign = theta[LAST][0].sign()
    if guess is not None:
        rng = torch.Generator().manual_seed(guess)
        sign = torch.randint(0, 2, sign.shape, generator=rng).to(sign) * 2 - 1
    return checkpoint.replace(theta={**theta, LAST: (size * sign)[None]})


def objective(context: Context) -> Rows:
    """Measure the terms of the published objective of the sphere attack (330 to 332).

    Victims start from torch's default initialization. Gradient descent ends at theta = theta_0 + the
    weight update. An attack that fits only the weight update ends at the objective |theta_0|^2. The rows
    therefore contain |theta_0|^2 and the cosine between the remaining residual and theta_0.

    Args:
        context: scale, device and cache of the run.

    Yields:
        One row of results per victim and attack.
    """
    sizes = SIZES[context.scale.name]
    split = rs.load_dataset("sphere", sizes.n, seed=context.seed, dim=sizes.dim)
    ours = refael2025.sphere_attack(context, 1.0).changed(restarts=1)
    published: Settings = {"sigma": ours.sigma, "steps": 7 * sizes.steps, "candidates": 2 * sizes.n}
    attacks: dict[str, Attack] = {
        "published": make_attack(preset=RELEASED, dtype=context.fast, **published)
    }
    # With momentum 0.9, this rate acts like plain descent at ten times the rate, 300 times the published.
    descent: Settings = {"method": "gd", "lr": 0.3, "momentum": 0.9, "steps": 10 * sizes.training}
    ways = {f"descent to loss {loss:g}": {**descent, "stop_loss": loss} for loss in (1e-2, 1e-3)}
    for name, changes in ways.items():
        net = context.train(
            mlp(split.train, (sizes.width,)), split.train, init="default", **changes
        )
        victim_details = {"victim": name, "training_steps": net.summary["steps"]}
        victim_details |= {"training_loss": net.summary["loss"], "margin": net.summary["margin"]}
        victim_details["initial_squared_norms"] = squares(net.theta0)
        victim_details["squared_norms"] = squares(net.checkpoint.theta)
        for attack, config in (attacks | {"residuum": ours}).items():
            reconstruction = context.attack(
                net.checkpoint, Knowledge(shape=split.train.shape), config
            )
            row = (
                victim_details
                | {"attack": attack}
                | layer_residuals(reconstruction, net.checkpoint, 0)
            )
            yield row | {
                "history": history(reconstruction, net.checkpoint),
                **compare_remainder(reconstruction, net),
            }


def history(reconstruction: Reconstruction, checkpoint: Network) -> list[tuple[int, float]]:
    """Return the objective of an attack at about ten steps.

    Args:
        reconstruction: result of an attack.
        checkpoint: network that was attacked.

    Returns:
        Pairs (step, objective).
    """
    squared_norms = squares(checkpoint.theta)
    scales = torch.tensor(
        [squared_norms[name] for name in reconstruction.layer_names], dtype=torch.float64
    )
    totals = (reconstruction.layers[0].double() @ scales).tolist()
    pairs = list(zip(reconstruction.steps.tolist(), totals, strict=True))
    return pairs[:: max(1, len(pairs) // 10)]


def compare_remainder(reconstruction: Reconstruction, net: Victim) -> dict[str, float]:
    """Compare the residual of the weights theta with the initial weights theta_0.

    The residual is computed with the activations of the network itself.

    Args:
        reconstruction: result of an attack.
        net: the victim.

    Returns:
        The squared residual, the sum of the multipliers, and the cosine with theta_0.
    """
    theta = {name: t.double() for name, t in net.checkpoint.theta.items()}
    u = (reconstruction.lam.double() * reconstruction.labels.double())[:, None]
    remainder = flatten(
        residual(net.checkpoint.copy_module().double(), theta, reconstruction.x.double(), u)
    )
    start = flatten({name: net.theta0[name].double() for name in theta})
    cosine = float(remainder @ start / (remainder.norm() * start.norm()))
    lengths = {
        "left_squared": float(remainder @ remainder),
        "multipliers": float(reconstruction.lam.sum()),
    }
    return lengths | {"cosine_with_initial": cosine}


def _figure(title: str, rows: Callable[[Context], Rows], *curve_options: str) -> Figure:
    x, scale, keys = curve_options or ("", "", "")
    draw = partial(drawing.curves, x=x, scale=scale, keys=keys) if curve_options else None
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
