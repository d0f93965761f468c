"""Exact recovery of the samples of a polynomial network of degree >= 3 (Shen et al. 2026, Thm 4.1).

With f, b_i, N_r as in residuum.theory.polynomial, in the r-dimensional span of the neurons:

    M(v) = sum_i b_i (x_i.v)^(alpha-2) x_i x_i^T             slices of f
    M(v1)^-1 M(v2) = V Lam V^-1,  rows of V^-1: the x_i up to scale
    b_k = <z_k, f(z_k)>,  z_k.x_i = [i = k]                  dual vectors

The paper prints b_k = <x_k, f(x_k)>, which holds for orthonormal samples alone. Needs r independent
samples and distinct ratios of the x_i.v; several pairs (v1, v2) are tried and the widest eigenvalue
gap is kept, and Levenberg-Marquardt steps on the stationarity equations of all neurons follow. Where
the rank condition fails, or this fails in spite of it, residuum.attacks.power takes over.

A checkpoint is read as sum_j a_j sigma(W_j.x): a polynomial network; and, once told the activation, two
tensors W (m, d) and a (m,), or a two-layer network d-m-1. A first-layer bias is a coordinate of the
constant 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from residuum.attacks.base import OneShotAttack
from residuum.attacks.exact.power import BUDGET, Grown, grow, levenberg_marquardt, refinement_cost
from residuum.attacks.random_streams import stream
from residuum.errors import InputError
from residuum.networks import Architecture, Polynomial, PolynomialNetwork
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction
from residuum.records.identification import Identification
from residuum.surfaces.surface import Surface
from residuum.theory.polynomial import (
    Interpolant,
    estimate_signal_subspace,
    find_live_neurons,
    interpolate,
    measure_conditions,
    measure_identifiability,
)

PAIRS = 10  # random pairs of slices: the one whose eigenvalues lie farthest apart is used
STEPS = 10  # of Levenberg-Marquardt from there
CERTIFIED_RESIDUAL = 1e-3  # relative: a sample whose equations hold to this is called certified
BALANCE_LIMIT = (
    1e-2  # gap of |W_j|^2 = alpha a_j^2, relative, up to which f at the neurons is trusted
)
MIN_EIGENGAP = 1e-10  # relative: nearer eigenvalues belong to no vectors in particular
# An activation t^k by its name.
POWERS = {"linear": 1, "quadratic": 2, "cubic": 3, "quartic": 4, "quintic": 5}


def recover(
    model: nn.Module,
    *,
    rank: int | None = None,
    norm: float | None = None,
    augmented: bool = False,
    pairs: int = PAIRS,
    steps: int = STEPS,
    seed: int = 0,
) -> Identification:
    """Samples and weights of ``model``, one per dimension of its signal subspace.

    norm: the samples' common norm, if known.
    augmented: their last coordinate is the constant 1, which settles scale and sign.
    Without either, samples are unit vectors, up to scale.
    """
    neurons = find_live_neurons(model)
    _check(neurons.degree, pairs, norm, augmented)
    signal = estimate_signal_subspace(neurons, rank)
    f = interpolate(neurons, signal)
    stated = measure_conditions(neurons, signal, f)
    generator = stream("polynomial", seed)
    exact = diagonalise(f, pairs, steps, generator) if stated.samples else None
    found, grown = exact, None
    if found is None or not found.sound:
        grown = grow(f, signal.rank, generator)
        if found is None or grown.misfit < found.residual:
            found = Explanation(grown.x, grown.b, *stationarity_residuals(f, grown.x, grown.b))
    trusted = found is exact and found.sound and _trusted(stated)
    x, b, scale = resolve(found.x @ signal.basis.T, found.b, f.degree, norm, augmented)
    return stated.replace(
        x=x,
        weights=b,
        residuals=found.residuals,
        certified=(found.residuals <= CERTIFIED_RESIDUAL) & trusted,
        method="diagonalisation" if found is exact else "growth",
        residual=found.residual,
        scale=scale,
        notes=(*stated.notes, *_notes(stated, exact, found, grown)),
    )


@dataclass(frozen=True)
class Explanation:
    """Samples x: (k, r) in the signal subspace and weights b: (k,), with their residuals."""

    x: Tensor
    b: Tensor
    residuals: Tensor
    residual: float
    eigengap: float = 0.0
    real: bool = False

    @property
    def sound(self) -> bool:
        """Real and distinct eigenvalues, and every equation met."""
        distinct = self.real and self.eigengap > MIN_EIGENGAP
        return distinct and bool((self.residuals <= CERTIFIED_RESIDUAL).all())


def diagonalise(f: Interpolant, pairs: int, steps: int, generator: torch.Generator) -> Explanation:
    """Theorem 4.1: two slices diagonalised together, weights by dual vectors, refined.

    Of all pairs the one with the widest eigenvalue gap: least distance over the largest eigenvalue.
    """
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
    x = rows / rows.norm(dim=1, keepdim=True)
    z = torch.linalg.pinv(x).T
    x, b = refine(f, x, (z * f(z)).sum(1), steps)
    return Explanation(x, b, *stationarity_residuals(f, x, b), gap, real)


def _trusted(stated: Identification) -> bool:
    """Whether the network looks like the KKT point that the theorem is about."""
    balanced = stated.balance_gap <= BALANCE_LIMIT
    return balanced and stated.outside <= CERTIFIED_RESIDUAL and stated.checkable


def refine(f: Interpolant, x: Tensor, b: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt on the stationarity equations, where affordable: unit rows x, weights b."""
    if refinement_cost(f, len(x), steps) > BUDGET:
        return x, b
    alpha, sign = f.degree, torch.where(b < 0, -1.0, 1.0).double()
    g = b.abs()[:, None] ** (1 / alpha) * x
    g, _ = levenberg_marquardt(f, g, sign, steps, damping=1e-12)
    size = g.norm(dim=1)
    return g / size[:, None].clamp_min(1e-300), sign * size**alpha


def stationarity_residuals(f: Interpolant, x: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """Per sample (k,), in the direction of its dual vector, and over all equations; relative.

    Per sample the larger of two: neurons at their own size, and all at one size. Small neurons alone
    can raise the rank of K; where they do, their equations have to hold too.
    """
    dual = torch.linalg.pinv(x)
    target, explained = f.values, b * (f.directions @ x.T) ** (f.degree - 1)  # (m, r), (m, k)
    off, along, size = target @ dual - explained, target @ dual, f.sizes[:, None]
    each = torch.maximum(_relative(off, along), _relative(size * off, size * along))
    left, whole = size * (target - explained @ x), size * target
    return each, float(left.norm() / whole.norm())


def _relative(off: Tensor, whole: Tensor) -> Tensor:
    return off.norm(dim=0) / whole.norm(dim=0).clamp_min(1e-300)


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


def _check(degree: int, pairs: int, norm: float | None, augmented: bool) -> None:
    if degree < 3:
        raise InputError(
            f"Samples are not identifiable from a network of degree {degree}; an aggregate "
            "of them is.",
            "Use `measure_identifiability(model)`.",
        )
    if pairs < 1:
        raise InputError(f"At least one pair of slices is needed; got {pairs}.", "Use `pairs=10`.")
    if norm is not None and not (0 < norm < float("inf")):
        raise InputError(f"A norm is positive and finite; got {norm}.", "Leave it out if unknown.")
    if norm is not None and augmented:
        raise InputError("`norm` and `augmented` both fix the scale.", "Give one of them.")


def _notes(
    stated: Identification, exact: Explanation | None, found: Explanation, grown: Grown | None
) -> list[str]:
    notes = []
    if exact is not None and not exact.real:
        notes.append("no pair of slices had real eigenvalues: the samples are heuristic")
    elif exact is not None and exact.eigengap <= MIN_EIGENGAP:
        notes.append("eigenvalues of the slices coincide: the samples are heuristic")
    if exact is not None and not stated.checkable:
        notes.append(
            f"r = {stated.r}: samples that fit exist for any form in so few variables, so that "
            "nothing can be checked"
        )
    if stated.outside > CERTIFIED_RESIDUAL:
        notes.append(
            f"{stated.outside:.1e} of the norm of W lies outside the {stated.r} dimensions"
        )
    bad = int((~(found.residuals <= CERTIFIED_RESIDUAL)).sum())
    if bad:
        notes.append(
            f"{bad} of {len(found.residuals)} samples leave residuals above {CERTIFIED_RESIDUAL}"
        )
    if grown is not None and grown.equations is not None and grown.equations <= grown.unknowns:
        notes.append(
            f"{grown.equations} independent equations for {grown.unknowns} unknowns: "
            "a small residual says nothing"
        )
    if grown is not None and not grown.complete:
        notes.append(
            "the search ended with its budget: more samples may be found with a lower rank"
        )
    return notes


class PolynomialAttack(OneShotAttack):
    """:func:`recover` as an attack; where its conditions fail it refuses."""

    name: ClassVar[str] = "polynomial"
    has_residual: ClassVar[bool] = True
    pace: ClassVar[str] = "formula"

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply."""
        kind = surface.checkpoint.architecture.kind
        return "" if kind == "polynomial" else f"needs a polynomial network, not {kind}"

    def why_applies(self, surface: Surface) -> str:
        """Return why the attack applies."""
        return "`residuum identify`: exact where its rank condition holds, which it reports"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Return one restart without steps, whose residual is that of all equations together."""
        found = recover(surface.model(), seed=self.seed)
        shape = knowledge.shape or surface.checkpoint.input_shape or found.x.shape[1:]
        squared = torch.tensor([[(found.residual or 0.0) ** 2]])
        labels, weight = torch.where(found.weights < 0, -1.0, 1.0), found.weights.abs()
        x, residual = found.x.reshape(-1, *shape), {"loss": squared, "layers": squared[None]}
        part = Reconstruction.at_once(self.name, x, labels, weight, knowledge, notes=found.notes)
        steps = torch.zeros(1, dtype=torch.long)
        return part.replace(steps=steps, layer_names=("all equations",), **residual)


def identify(
    released: Network,
    activation: str | None = None,
    *,
    rank: int | None = None,
    norm: float | None = None,
    augmented: bool = False,
    data: Dataset | None = None,
    seed: int = 0,
) -> Identification:
    """Samples of degree >= 3, aggregates below.

    activation: a name of ``POWERS`` or poly:c0,c1,...
    rank, norm, augmented: as in :func:`recover`.
    data: only to report the least margin on it.
    """
    model, biased = polynomial_network(released, activation)
    margin = None if data is None else _min_margin(model, data, biased)
    augmented = augmented or (biased and norm is None)
    found = (
        measure_identifiability(model, rank)
        if model.activation.degree < 3  # type: ignore[operator]
        else recover(model, rank=rank, norm=norm, augmented=augmented, seed=seed)
    )
    return found.replace(arch=released.arch, input_shape=released.input_shape, min_margin=margin)


def polynomial_network(
    released: Network, activation: str | None = None
) -> tuple[PolynomialNetwork, bool]:
    """The network, and whether its last input is a constant 1 that stands for a first-layer bias."""
    arch = released.architecture
    given = None if activation is None else parse_activation(activation)
    tensors = _parts(arch, released.theta)
    if tensors is None or (given is None and arch.kind != "polynomial"):
        raise InputError(
            "Samples are identified from sum_j a_j sigma(W_j.x) with a polynomial sigma; this "
            f"network is {arch}.",
            "Say --activation cubic if that is its activation."
            if tensors is not None
            else "Give a polynomial network, or a network d-m-1 with --activation.",
        )
    weight, coefficient, biased = tensors
    model = (
        PolynomialNetwork(weight.shape[1], len(weight), Polynomial(given))
        if given is not None
        else cast(PolynomialNetwork, arch.build())
    ).to(weight.dtype)
    model.load_state_dict({"weight": weight, "coefficient": coefficient})
    return model.eval(), biased


def parse_activation(text: str) -> tuple[float, ...]:
    """Coefficients, c_0 first, of a name in ``POWERS`` or of poly:c0,c1,..."""
    if text in POWERS:
        return (*[0.0] * POWERS[text], 1.0)
    kind, _, numbers = text.partition(":")
    try:
        coefficients = tuple(map(float, numbers.split(",")))
    except ValueError:
        coefficients = ()
    finite = all(abs(c) < float("inf") for c in coefficients)
    if kind != "poly" or len(coefficients) < 2 or not finite or coefficients[-1] == 0:
        raise InputError(
            f"An activation is {', '.join(POWERS)} or poly:c0,c1,... with finite numbers and a "
            f"nonzero last one; got {text[:40]!r}.",
            "For t + t^3 say poly:0,1,0,1.",
        )
    return coefficients


def _parts(arch: Architecture, theta: dict[str, Tensor]) -> tuple[Tensor, Tensor, bool] | None:
    """W (m, d), a (m,), biased; None for a network of another form."""
    if arch.kind == "polynomial":
        return theta["weight"], theta["coefficient"], False
    if arch.kind != "mlp":
        return None
    weight, bias = theta["layers.0.weight"], theta.get("layers.0.bias")
    if len(arch.widths) == 2 and bias is not None:  # two bare tensors look like one layer
        return weight, bias, False
    if len(arch.widths) == 3 and arch.outputs == 1 and "layers.1.bias" not in theta:
        coefficient = theta["layers.1.weight"][0]
        if bias is None:
            return weight, coefficient, False
        return torch.cat([weight, bias[:, None]], 1), coefficient, True
    return None


def _min_margin(model: PolynomialNetwork, data: Dataset, biased: bool) -> float:
    """min_i y_i Phi(x_i) for labels -1 and +1."""
    x, y = data.x.flatten(1).to(model.weight.dtype), data.y.flatten()
    if biased:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    if x.shape[1] != model.weight.shape[1] or len(y) != len(x) or not (y.abs() == 1).all():
        raise InputError(
            f"Margins need samples of {model.weight.shape[1] - biased} values with labels -1 and "
            f"+1; got {x.shape[1] - biased} values.",
            "Correct --data, or leave it out.",
        )
    with torch.no_grad():
        return float((y * model(x)[:, 0]).min())
