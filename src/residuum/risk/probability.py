"""Combine the figures of a record into log odds of being recovered, and say when they are a probability.

Two kinds of attack read the layer on the input. Each has its own log odds, linear in

    stationarity   log(1 - signal share), log(signal-to-residual ratio)
    unmixing       log(1 - reach_ncc^2), log(signal-to-residual ratio), log(d / n), log(n / r)

for n records of d values and r clean directions. If both attacks were independent, at least one would
recover the record with probability q = 1 - (1 - p)(1 - p'). They are not, so the score is a + b logit(q).
The score uses log(signal-to-residual ratio) and log(d / n) alone if the network has no dense layer on
whole samples, if its initial weights hide the samples, or if the clean directions fill the input space
(then every record lies in them, trained on or not). Coefficients were fitted on networks of the pool
``tune`` of ``benchmarks/exposure.py`` and on nothing else.

The score ranks the records of every network. Its logistic is a probability only for networks like those
on which it was checked: see :func:`why_uncalibrated`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residuum.networks import ReLU, dense_chain
from residuum.risk.case import Case
from residuum.surfaces.surface import WEIGHTS

FLOOR = 1e-4  # keeps logarithms finite
FILLED = 0.9  # share of all directions at which the clean ones no longer tell records apart
STATIONARITY = (-5.081, -2.230, 0.254)  # 1, log(1 - signal share), log ratio
UNMIXING = (
    -9.267,
    -0.755,
    0.361,
    2.109,
    2.835,
)  # 1, log(1 - reach^2), log ratio, log(d/n), log(n/r)
EITHER = (-0.486, 0.923)  # 1, logit(q)
RATIO_ALONE = (-1.061, 0.814, 1.060)  # 1, log ratio, log(d/n)
# Networks on which probabilities were checked: 349 expected and 325 recovered of 600 CIFAR records. On
# smaller samples they were wrong: MNIST 42 and 117 of 200 for one kind, digits 92 and 56 of 240.
CALIBRATED_VALUES = 3072  # of a sample, at least
CALIBRATED_RECORDS = (40, 100)
CALIBRATED_WIDTHS = (200, 400)  # of one or two hidden layers
ATTACKS = (
    "of being recovered (NCC beyond 99% of chance; unmix up to sign) by stationarity, 2 restarts of "
    "1500 steps, or unmix, 40 s on a CPU"
)


def score(
    ratio: Tensor, signal_share: Tensor, reach_ncc: Tensor, values: int, rank: int | None
) -> Tensor:
    """Return the log odds (n,) of being recovered.

    Args:
        ratio: Signal-to-residual ratio of each record, (n,).
        signal_share: Share of each record that the layer on the input has seen, (n,).
        reach_ncc: Best possible NCC of each record, (n,).
        values: Number of values of a record, d.
        rank: Number of clean directions, None if the network has no row space.
    """
    n = len(ratio)
    log_ratio, log_values = (ratio.double() + FLOOR).log(), math.log(values / n)
    if rank is None or _filled(rank, values):
        return _linear(RATIO_ALONE, log_ratio, log_values)
    unseen = (1 - signal_share.double() + FLOOR).log()
    outside = (1 - reach_ncc.double().square() + FLOOR).log()
    p = torch.sigmoid(_linear(STATIONARITY, unseen, log_ratio))
    log_rank = math.log(n / max(rank, 1))
    p_unmixing = torch.sigmoid(_linear(UNMIXING, outside, log_ratio, log_values, log_rank))
    q = 1 - (1 - p) * (1 - p_unmixing)
    return _linear(EITHER, torch.logit(q, eps=1e-12))


def _linear(coefficients: tuple[float, ...], *features: Tensor | float) -> Tensor:
    total = torch.tensor(coefficients[0], dtype=torch.float64)
    for coefficient, feature in zip(coefficients[1:], features, strict=True):
        total = total + coefficient * feature
    return total


def row_space_notes(rank: int | None, values: int) -> tuple[str, ...]:
    """Say if the clean directions fill the input space, so that the score leaves them out."""
    if rank is None or not _filled(rank, values):
        return ()
    return ("clean directions fill the input space: heard and reach tell nothing apart",)


def _filled(rank: int, values: int) -> bool:
    return rank >= FILLED * values


def why_uncalibrated(case: Case) -> str:
    """Say why the score of this case is no probability; return "" if it is one.

    The probability is printed only for networks like those on which expected and recovered records were
    compared: a ReLU network of dense layers with one output, small initialization, and large images.
    """
    only = "probabilities were calibrated only"
    values, n = math.prod(case.data.shape), len(case.data)
    if case.surface.name != WEIGHTS or case.knowledge.theta0 is not None:
        return f"{only} for final weights, without known initial weights"
    if values < CALIBRATED_VALUES:
        return (
            f"{only} for samples with at least {CALIBRATED_VALUES} values each, and yours have "
            f"{values}"
        )
    fewest, most = CALIBRATED_RECORDS
    if not fewest <= n <= most:
        return f"{only} for {fewest} to {most} records, and yours are {n}"
    chain = dense_chain(case.model)
    if (
        chain is None
        or not isinstance(chain.activation, ReLU)
        or chain.linears[-1].out_features != 1
    ):
        return f"{only} for ReLU networks of dense layers with one output"
    narrow, wide = CALIBRATED_WIDTHS
    widths = [layer.out_features for layer in chain.linears[:-1]]
    if not (1 <= len(widths) <= 2 and all(narrow <= width <= wide for width in widths)):
        return f"{only} for one or two hidden layers of {narrow} to {wide} neurons"
    if case.row_space is None:
        return f"{only} where the first layer shows the samples, and {case.no_row_space}"
    return ""
