"""From a checkpoint to what its polynomial network identifies: samples, or an aggregate of them.

Read as sum_j a_j sigma(W_j.x): a polynomial network; and, once told the activation, two tensors W
(m, d) and a (m,), or a two-layer network d-m-1. A first-layer bias is a coordinate of the constant 1.
"""

from __future__ import annotations

from dataclasses import fields
from typing import cast

import torch
from torch import Tensor

from residuum.attacks.polynomial import recover
from residuum.errors import InputError
from residuum.networks import Architecture, Polynomial, PolynomialNetwork
from residuum.records import Checkpoint, Dataset
from residuum.records.identification import Identification
from residuum.theory.polynomial import identifiability


def identify(
    released: Checkpoint,
    activation: str | None = None,
    *,
    rank: int | None = None,
    norm: float | None = None,
    augmented: bool = False,
    data: Dataset | None = None,
    seed: int = 0,
) -> Identification:
    """Samples of degree >= 3, aggregates below.

    activation: a name of ``POWERS`` or poly:c0,c1,...; rank, norm, augmented: as in
    :func:`residuum.attacks.polynomial.recover`; data: only to report the least margin on it.
    """
    model, biased = polynomial_network(released, activation)
    margin = None if data is None else _min_margin(model, data, biased)
    augmented = augmented or (biased and norm is None)
    if model.activation.degree < 3:  # type: ignore[operator]
        stated, none = identifiability(model, rank), torch.zeros(0, dtype=torch.float64)
        empty = none.reshape(0, model.weight.shape[1])
        found = {"x": empty, "weights": none, "residuals": none, "certified": none.bool()}
    else:
        recovery = recover(model, rank=rank, norm=norm, augmented=augmented, seed=seed)
        stated, found = recovery.conditions, vars(recovery)
    figures = {**vars(stated), "order": stated.order, "n_r": stated.coefficients}
    figures |= {"rank_k": stated.rank, "cond_k": stated.condition, "min_margin": margin, **found}
    published = {field.name for field in fields(Identification)} & {*figures}
    return Identification(
        released.arch, released.input_shape, **{name: figures[name] for name in published}
    )


def polynomial_network(
    released: Checkpoint, activation: str | None = None
) -> tuple[PolynomialNetwork, bool]:
    """The network, and whether its last input is a constant 1 that stands for a first-layer bias."""
    arch = Architecture.parse(released.arch)
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


POWERS = {"linear": 1, "quadratic": 2, "cubic": 3, "quartic": 4, "quintic": 5}
