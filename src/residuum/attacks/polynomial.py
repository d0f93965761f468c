"""Exact recovery of the samples of a polynomial network of degree >= 3 (Shen et al. 2026, Thm 4.1).

With f, b_i, N_r as in residuum.theory.polynomial, in the r-dimensional span of the neurons:

    M(v) = sum_i b_i (x_i.v)^(alpha-2) x_i x_i^T             slices of f
    M(v1)^-1 M(v2) = V Lam V^-1,  rows of V^-1: the x_i up to scale
    b_k = <z_k, f(z_k)>,  z_k.x_i = [i = k]                  dual vectors

The paper prints b_k = <x_k, f(x_k)>, which holds for orthonormal samples alone. Needs r independent
samples and distinct ratios of the x_i.v; several pairs (v1, v2) are tried and the widest eigenvalue
gap is kept. With g_i = |b_i|^(1/alpha) x_i and s_i = sign b_i, Levenberg-Marquardt steps then solve
the stationarity equations at all neurons, f(Z_j) = sum_i s_i (Z_j.g_i)^(alpha-1) g_i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.errors import InputError
from residuum.theory.polynomial import (
    Identifiability,
    Interpolant,
    conditions,
    interpolate,
    live_neurons,
    signal_subspace,
)

PAIRS = 10
STEPS = 10
JACOBIAN_ENTRIES = 1 << 26
CERTIFIED_RESIDUAL = 1e-3
BALANCE_LIMIT = 1e-2
MIN_EIGENGAP = 1e-10


@dataclass(frozen=True)
class PolynomialRecovery:
    """Recovered samples with what they rest on.

    x: (r, d); weights b = lam y: (r,); residuals: (r,) | F z_k - b_k (Z x_k)^(alpha-1) | / | F z_k |
    over the neurons, z_k dual to x_k; certified: (r,) rank condition held, |W|^2 = alpha a^2 and
    residual small; any other sample is heuristic. eigengap, real: of the kept pair; residual:
    relative, over all equations.
    """

    conditions: Identifiability
    x: Tensor
    weights: Tensor
    residuals: Tensor
    certified: Tensor
    eigengap: float
    real: bool
    residual: float
    scale: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Diagonalisation:
    """directions: (r, r) unit rows; eigengap: least distance of eigenvalues over the largest one.

    real: whether all eigenvalues are.
    """

    directions: Tensor
    eigengap: float
    real: bool


def recover(
    model: nn.Module,
    *,
    rank: int | None = None,
    norm: float | None = None,
    augmented: bool = False,
    pairs: int = PAIRS,
    steps: int = STEPS,
    seed: int = 0,
) -> PolynomialRecovery:
    """Samples and weights of ``model``, one per dimension of its signal subspace.

    norm: the samples' common norm, if known; augmented: their last coordinate is the constant 1,
    which settles scale and sign. Without either, samples are unit vectors, up to scale.
    """
    neurons = live_neurons(model)
    _check(neurons.degree, pairs, norm, augmented)
    signal = signal_subspace(neurons, rank)
    f = interpolate(neurons, signal)
    stated = conditions(neurons, signal, f)
    found = diagonalise(f, pairs, torch.Generator().manual_seed(seed))
    x, b = refine(f, found.directions, dual_weights(f, found.directions), steps)
    residuals, residual = stationarity_residuals(f, x, b)
    held = stated.samples and found.real and found.eigengap > MIN_EIGENGAP
    held = held and stated.balance_gap <= BALANCE_LIMIT
    x, b, scale = resolve(x @ signal.basis.T, b, f.degree, norm, augmented)
    return PolynomialRecovery(
        conditions=stated,
        x=x,
        weights=b,
        residuals=residuals,
        certified=(residuals <= CERTIFIED_RESIDUAL) & held,
        eigengap=found.eigengap,
        real=found.real,
        residual=residual,
        scale=scale,
        notes=(*stated.notes, *_notes(f, found, residuals)),
    )


def diagonalise(f: Interpolant, pairs: int, generator: torch.Generator) -> Diagonalisation:
    """Simultaneous diagonalisation of two slices, for the pair with the widest eigenvalue gap."""
    r = f.directions.shape[1]
    best: tuple[tuple[bool, float], Tensor] | None = None
    for _ in range(pairs):
        v1, v2 = torch.randn(2, r, generator=generator, dtype=torch.float64)
        values, vectors = torch.linalg.eig(torch.linalg.pinv(f.slice(v1)) @ f.slice(v2))
        top = float(values.abs().max())
        distance = (values[:, None] - values[None]).abs() + torch.eye(r) * 2 * top
        gap = float(distance.min()) / top if top else 0.0
        score = (bool((values.imag == 0).all()), gap)
        if best is None or score > best[0]:
            best = score, vectors
    assert best is not None
    (real, gap), vectors = best
    rows = torch.linalg.pinv(vectors).real
    return Diagonalisation(rows / rows.norm(dim=1, keepdim=True), gap, real)


def dual_weights(f: Interpolant, x: Tensor) -> Tensor:
    """b_k = <z_k, f(z_k)> for unit rows x (r, r), with z_k dual to x_k: (r,)."""
    z = torch.linalg.pinv(x).T
    return (z * f(z)).sum(1)


def refine(f: Interpolant, x: Tensor, b: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt on the stationarity equations; returns unit rows x and weights b.

    Left out where the Jacobian (m r, r^2) would be too large.
    """
    alpha = f.degree
    if f.values.numel() * x.numel() > JACOBIAN_ENTRIES:
        return x, b
    sign, g = torch.where(b < 0, -1.0, 1.0).double(), b.abs()[:, None] ** (1 / alpha) * x
    error, damping = _misfit(f, g, sign), 1e-12
    for _ in range(steps):
        jacobian = _jacobian(f, g, sign)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ error.flatten()
        normal.diagonal().mul_(1 + damping).add_(1e-14 * normal.diagonal().max())
        trial = g + torch.linalg.solve(normal, slope).reshape(g.shape)
        after = _misfit(f, trial, sign)
        if after.isfinite().all() and after.norm() < error.norm():
            g, error, damping = trial, after, damping / 10
        elif damping < 1e-6 and error.norm() < 1e-10 * f.values.norm():
            break  # at rounding
        else:
            damping = max(100 * damping, 1e-6)
    size = g.norm(dim=1)
    return g / size[:, None].clamp_min(1e-300), sign * size**alpha


def stationarity_residuals(f: Interpolant, x: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """Per sample (r,), in the direction of its dual vector, and over all equations; relative."""
    explained = b * (f.directions @ x.T) ** (f.degree - 1)  # (m, r)
    target = f.values @ torch.linalg.pinv(x)
    each = (target - explained).norm(dim=0) / target.norm(dim=0).clamp_min(1e-300)
    return each, float((f.values - explained @ x).norm() / f.values.norm())


def resolve(
    x: Tensor, b: Tensor, alpha: int, norm: float | None, augmented: bool
) -> tuple[Tensor, Tensor, str]:
    """Choose the representative (t x, b / t^alpha) of each unit sample; say how t was found."""
    if augmented:
        if (x[:, -1].abs() < 1e-12).any():
            raise InputError(
                "Augmented samples end in the constant 1; a recovered one ends in 0.",
                "Leave `augmented` out.",
            )
        t, scale = 1 / x[:, -1], "fixed by the constant coordinate"
    else:
        peak = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
        t = torch.where((b if alpha % 2 else peak) < 0, -1.0, 1.0).double() * (norm or 1.0)
        scale = "up to scale: unit vectors" if norm is None else f"norm {norm:g} as given"
    return t[:, None] * x, b / t**alpha, scale


def _misfit(f: Interpolant, g: Tensor, sign: Tensor) -> Tensor:
    """F_j - sum_i s_i (Z_j.g_i)^(alpha-1) g_i: (m, r)."""
    return f.values - (sign * (f.directions @ g.T) ** (f.degree - 1)) @ g


def _jacobian(f: Interpolant, g: Tensor, sign: Tensor) -> Tensor:
    """Derivative of the sum in g, rows (j, component), columns (i, component): (m r, r^2)."""
    z, alpha = f.directions, f.degree
    product = z @ g.T  # (m, r)
    inner = (alpha - 1) * sign * product ** (alpha - 2)
    jacobian = torch.einsum("ji,ia,jb->jaib", inner, g, z)
    jacobian.diagonal(dim1=1, dim2=3).add_((sign * product ** (alpha - 1))[:, :, None])
    return jacobian.reshape(z.numel(), g.numel())


def _check(degree: int, pairs: int, norm: float | None, augmented: bool) -> None:
    if degree < 3:
        raise InputError(
            f"Samples are not identifiable from a network of degree {degree}; an aggregate "
            "of them is.",
            "Use `identifiability(model)`.",
        )
    if pairs < 1:
        raise InputError(f"At least one pair of slices is needed; got {pairs}.", "Use `pairs=10`.")
    if norm is not None and not (0 < norm < float("inf")):
        raise InputError(f"A norm is positive and finite; got {norm}.", "Leave it out if unknown.")
    if norm is not None and augmented:
        raise InputError("`norm` and `augmented` both fix the scale.", "Give one of them.")


def _notes(f: Interpolant, found: Diagonalisation, residuals: Tensor) -> list[str]:
    notes = []
    if not found.real:
        notes.append("no pair of slices had real eigenvalues: the samples are heuristic")
    elif found.eigengap <= MIN_EIGENGAP:
        notes.append("eigenvalues of the slices coincide: the samples are heuristic")
    bad = int((~(residuals <= CERTIFIED_RESIDUAL)).sum())
    if bad:
        notes.append(
            f"{bad} of {len(residuals)} samples leave residuals above {CERTIFIED_RESIDUAL}"
        )
    if f.values.numel() * f.directions.shape[1] ** 2 > JACOBIAN_ENTRIES:
        notes.append("too many neurons for the refinement: left out")
    return notes
