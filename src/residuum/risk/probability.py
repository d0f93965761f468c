"""Combine the measurements of a record into a score, the log odds that an attack recovers the record.

Two attacks reconstruct records from the first layer's weights. Stationarity searches records whose weighted
gradients equal the weights. Unmixing separates the rows of the weight matrix into records. The log odds that
one of these attacks recovers a record are linear in the following terms:

    stationarity   log(1 - signal share), log(signal-to-residual ratio)
    unmixing       log(1 - reach_ncc^2), log(signal-to-residual ratio), log(d / n), log(n / r)

There are n records of d values. The r clean directions are the singular vectors of the weight matrix above
the noise. ``row_space.py`` defines signal share and reach_ncc, and ``fit.py`` the signal-to-residual ratio.

Let p and p' be the probabilities of both attacks. If the attacks were independent, at least one of them would
recover the record with probability q = 1 - (1 - p)(1 - p'). The attacks are not independent, so the score is
a + b logit(q) with fitted coefficients a and b.

In three cases the score uses only log(signal-to-residual ratio) and log(d / n). First, the network has no
dense layer on whole samples. Second, the initial weights hide the samples. Third, the clean directions fill
the input space, so every possible input lies in their span and not only the training records. All
coefficients were fitted on the networks of the pool ``tune`` of ``experiments/exposure_ranking.py`` and on
nothing else.

The score ranks the records of every network. The logistic function of the score is a probability only for
networks like those on which it was compared with attacks (:func:`explain_uncalibrated`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residuum.networks import ReLU, dense_chain
from residuum.risk.case import Case
from residuum.surfaces.surface import WEIGHTS

# This number is added to the arguments of logarithms, because an argument may be zero.
LOG_OFFSET = 1e-4
# Clean directions are singular vectors of the first layer above the noise of the initial weights. If they
# span at least this share of the input space, nearly every input lies in their span, so they do not
# identify training records.
FULL_SHARE = 0.9
# Coefficients of a logistic model for the probability that an attack on the stationarity equation recovers
# a record: the intercept, and the coefficients of log(1 - signal share) and log(signal-to-residual ratio).
STATIONARITY = (-5.081, -2.230, 0.254)
# Coefficients of a logistic model for the probability that the attack "unmix" recovers a record: the
# intercept, and the coefficients of log(1 - reach_ncc^2), log(signal-to-residual ratio), log(values per
# record / records) and log(records / clean directions). Clean directions are singular vectors of the first
# layer above the noise. ``reach_ncc`` is the best NCC of a record with a vector in their span.
UNMIXING = (-9.267, -0.755, 0.361, 2.109, 2.835)
# Coefficients of a logistic model for the probability that any attack recovers a record: the intercept, and
# the coefficient of logit(q). Here q is the probability that at least one of two attacks recovers the
# record, if the attacks are independent.
COMBINED = (-0.486, 0.923)
# Coefficients of a logistic model for networks whose first layer has no singular vectors above the noise:
# the intercept, and the coefficients of log(signal-to-residual ratio) and log(values per record / records).
RATIO_ONLY = (-1.061, 0.814, 1.060)
# The predicted probability that a record is recovered was compared with the results of attacks. On CIFAR
# networks within the limits below, 349 of 600 records were expected to be recovered, and 325 were recovered.
# On smaller samples the probability was wrong. On MNIST networks of one kind, 42 of 200 records were expected
# to be recovered, and 117 were recovered. On networks trained on digits, 92 of 240 were expected to be
# recovered, and 56 were recovered.
#
# Probabilities are printed if each sample has at least this number of values.
MIN_CALIBRATED_VALUES = 3072
# Probabilities are printed if the number of training records is in this range.
CALIBRATED_RECORDS = (40, 100)
# Probabilities are printed if the number of neurons of each hidden layer is in this range.
CALIBRATED_WIDTHS = (200, 400)
ATTACKS = (
    "of being recovered (NCC beyond 99% of chance; unmix up to sign) by stationarity, 2 restarts of "
    "1500 steps, or unmix, 40 s on a CPU"
)


def score_records(
    ratio: Tensor, signal_share: Tensor, reach_ncc: Tensor, values: int, rank: int | None
) -> Tensor:
    """Compute for each record the log odds that attacks recover it.

    Args:
        ratio: Signal-to-residual ratio of each record, (n,).
        signal_share: Share of each record's squared norm along singular vectors of the first layer's weight
            with large singular values, (n,).
        reach_ncc: Best possible NCC (normalized cross-correlation) of a reconstruction of each record, (n,).
        values: Number of values of a record, d.
        rank: Number of singular vectors of the first layer's weight above the noise, None if not measured.

    Returns:
        The log odds of each record, (n,).
    """
    record_count = len(ratio)
    log_ratio, log_values = (ratio.double() + LOG_OFFSET).log(), math.log(values / record_count)
    if rank is None or _fills_input_space(rank, values):
        return _add_features(RATIO_ONLY, log_ratio, log_values)
    log_missing_share = (1 - signal_share.double() + LOG_OFFSET).log()
    log_unreachable_share = (1 - reach_ncc.double().square() + LOG_OFFSET).log()
    p_stationarity = torch.sigmoid(_add_features(STATIONARITY, log_missing_share, log_ratio))
    log_records_per_direction = math.log(record_count / max(rank, 1))
    p_unmixing = torch.sigmoid(
        _add_features(
            UNMIXING, log_unreachable_share, log_ratio, log_values, log_records_per_direction
        )
    )
    p_any = 1 - (1 - p_stationarity) * (1 - p_unmixing)
    return _add_features(COMBINED, torch.logit(p_any, eps=1e-12))


def _add_features(coefficients: tuple[float, ...], *features: Tensor | float) -> Tensor:
    log_odds = torch.tensor(coefficients[0], dtype=torch.float64)
    for coefficient, feature in zip(coefficients[1:], features, strict=True):
        log_odds = log_odds + coefficient * feature
    return log_odds


def describe_row_space(rank: int | None, values: int) -> tuple[str, ...]:
    """Return a note if the singular vectors above the noise fill the input space.

    Every possible input then lies in their span, so the score of a record does not depend on them.

    Args:
        rank: Number of singular vectors of the first layer's weight above the noise, None if not measured.
        values: Number of values of a record.

    Returns:
        The note, () if the singular vectors do not fill the input space.
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
    """Return why the scores of a network's records are not calibrated probabilities, "" if they are.

    The probability was compared with the results of attacks only on ReLU networks of dense layers with one
    output, a small initialization and large images. It is printed only for such networks.
    """
    message_start = "probabilities were calibrated only"
    values, n = math.prod(case.data.shape), len(case.data)
    if case.surface.name != WEIGHTS or case.knowledge.theta0 is not None:
        return f"{message_start} for final weights, without known initial weights"
    if values < MIN_CALIBRATED_VALUES:
        return (
            f"{message_start} for samples with at least {MIN_CALIBRATED_VALUES} values each, and yours "
            f"have {values}"
        )
    low, high = CALIBRATED_RECORDS
    if not low <= n <= high:
        return f"{message_start} for {low} to {high} records, and you passed {n}"
    chain = dense_chain(case.model)
    if (
        chain is None
        or not isinstance(chain.activation, ReLU)
        or chain.linears[-1].out_features != 1
    ):
        return f"{message_start} for ReLU networks of dense layers with one output"
    narrow, wide = CALIBRATED_WIDTHS
    widths = [layer.out_features for layer in chain.linears[:-1]]
    if not (1 <= len(widths) <= 2 and all(narrow <= width <= wide for width in widths)):
        return f"{message_start} for one or two hidden layers of {narrow} to {wide} neurons"
    if case.row_space is None:
        return f"{message_start} for first layers that mix whole samples, and {case.no_row_space}"
    return ""
