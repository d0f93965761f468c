"""Combine the measurements of a record into log odds of being recovered, and calibrate these log odds.

Two kinds of attack read the layer on the input. The log odds that an attack recovers a record are linear in

    stationarity   log(1 - signal share), log(signal-to-residual ratio)
    unmixing       log(1 - reach_ncc^2), log(signal-to-residual ratio), log(d / n), log(n / r)

for n records of d values and r clean directions. ``row_space.py`` and ``fit.py`` define these terms. If both
attacks were independent, at least one would recover the record with probability q = 1 - (1 - p)(1 - p'). They
are not independent, so the score is a + b logit(q). In three cases the score uses only log(signal-to-residual
ratio) and log(d / n): the network has no dense layer on whole samples, the initial weights hide the samples,
or the clean directions fill the input space. In the last case all inputs lie in the clean directions, whether
or not training used them. The coefficients were fitted on networks of the pool ``tune`` of
``experiments/exposure_ranking.py`` and on nothing else.

The score ranks the records of every network. Its logistic is a probability only for networks like those on
which it was checked (:func:`explain_uncalibrated`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residuum.networks import ReLU, dense_chain
from residuum.risk.case import Case
from residuum.surfaces.surface import WEIGHTS

LOG_OFFSET = 1e-4  # added to arguments of logarithms, which keeps them finite
FULL_SHARE = 0.9  # share of all directions at which clean directions no longer distinguish records
# Coefficients of 1, log(1 - signal share), log(signal-to-residual ratio).
STATIONARITY = (-5.081, -2.230, 0.254)
# Coefficients of 1, log(1 - reach_ncc^2), log(signal-to-residual ratio), log(d/n), log(n/r).
UNMIXING = (-9.267, -0.755, 0.361, 2.109, 2.835)
COMBINED = (-0.486, 0.923)  # coefficients of 1 and logit(q)
RATIO_ONLY = (-1.061, 0.814, 1.060)  # coefficients of 1, log(signal-to-residual ratio), log(d/n)
# Probabilities were checked on networks within these limits: 349 of 600 CIFAR records were expected to be
# recovered, and 325 were. On smaller samples they were wrong: for one kind of MNIST networks 42 of 200 were
# expected and 117 recovered, for digits 92 of 240 and 56.
MIN_CALIBRATED_VALUES = 3072  # smallest number of values in a sample
CALIBRATED_RECORDS = (40, 100)  # smallest and largest number of training records
CALIBRATED_WIDTHS = (200, 400)  # fewest and most neurons in each of one or two hidden layers
ATTACKS = (
    "of being recovered (NCC beyond 99% of chance; unmix up to sign) by stationarity, 2 restarts of "
    "1500 steps, or unmix, 40 s on a CPU"
)


def score_records(
    ratio: Tensor, signal_share: Tensor, reach_ncc: Tensor, values: int, rank: int | None
) -> Tensor:
    """Return the log odds that attacks recover each record.

    Args:
        ratio: Signal-to-residual ratio of each record, (n,).
        signal_share: Share of each record that the layer on the input has seen, (n,).
        reach_ncc: Best possible NCC of each record, (n,).
        values: Number of values of a record, d.
        rank: Number of directions above the noise in the layer on the input, None without a row space.

    Returns:
        The log odds of each record, (n,).
    """
    n = len(ratio)
    log_ratio, log_values = (ratio.double() + LOG_OFFSET).log(), math.log(values / n)
    if rank is None or _fills_input_space(rank, values):
        return _linear(RATIO_ONLY, log_ratio, log_values)
    log_unseen = (1 - signal_share.double() + LOG_OFFSET).log()
    log_outside = (1 - reach_ncc.double().square() + LOG_OFFSET).log()
    p_stationarity = torch.sigmoid(_linear(STATIONARITY, log_unseen, log_ratio))
    log_rank = math.log(n / max(rank, 1))
    p_unmixing = torch.sigmoid(_linear(UNMIXING, log_outside, log_ratio, log_values, log_rank))
    p_any = 1 - (1 - p_stationarity) * (1 - p_unmixing)
    return _linear(COMBINED, torch.logit(p_any, eps=1e-12))


def _linear(coefficients: tuple[float, ...], *features: Tensor | float) -> Tensor:
    total = torch.tensor(coefficients[0], dtype=torch.float64)
    for coefficient, feature in zip(coefficients[1:], features, strict=True):
        total = total + coefficient * feature
    return total


def describe_row_space(rank: int | None, values: int) -> tuple[str, ...]:
    """Return a note if the directions above the noise fill the input space, so that the score ignores them.

    Args:
        rank: Number of directions above the noise in the layer on the input, None without a row space.
        values: Number of values of a record.

    Returns:
        The note, () if the directions do not fill the input space.
    """
    if rank is None or not _fills_input_space(rank, values):
        return ()
    return (
        "the first layer's directions above the noise fill the input space, so signal share and best "
        "possible NCC do not distinguish records",
    )


def _fills_input_space(rank: int, values: int) -> bool:
    return rank >= FULL_SHARE * values


def explain_uncalibrated(case: Case) -> str:
    """Return why the score of a case is not a calibrated probability, "" if it is calibrated."""
    # Expected and recovered records were compared on ReLU networks of dense layers with one output, small
    # initialization, and large images. The probability is printed only for such networks.
    calibrated_only = "probabilities were calibrated only"
    values, n = math.prod(case.data.shape), len(case.data)
    if case.surface.name != WEIGHTS or case.knowledge.theta0 is not None:
        return f"{calibrated_only} for final weights, without known initial weights"
    if values < MIN_CALIBRATED_VALUES:
        return (
            f"{calibrated_only} for samples with at least {MIN_CALIBRATED_VALUES} values each, and yours "
            f"have {values}"
        )
    low, high = CALIBRATED_RECORDS
    if not low <= n <= high:
        return f"{calibrated_only} for {low} to {high} records, and you passed {n}"
    chain = dense_chain(case.model)
    if (
        chain is None
        or not isinstance(chain.activation, ReLU)
        or chain.linears[-1].out_features != 1
    ):
        return f"{calibrated_only} for ReLU networks of dense layers with one output"
    narrow, wide = CALIBRATED_WIDTHS
    widths = [layer.out_features for layer in chain.linears[:-1]]
    if not (1 <= len(widths) <= 2 and all(narrow <= width <= wide for width in widths)):
        return f"{calibrated_only} for one or two hidden layers of {narrow} to {wide} neurons"
    if case.row_space is None:
        return f"{calibrated_only} for first layers that mix whole samples, and {case.no_row_space}"
    return ""
