"""Does the network tell its training samples from others? Membership by loss and by margin.

Beside the verdict, never part of it: reconstruction asks what comes back, membership asks what could
be confirmed by somebody who already has a sample (Yeom et al. 2018; Carlini et al. 2022 for the rates at
few false positives). It needs a forward alone, so every network gets an answer; a network that tells
nothing apart may still give samples back, so that answer never acquits.

    AUC   how often a training sample's loss is below that of a held-out one, ties counting half
    TPR   share of training samples below the loss that a share FPR of the held-out ones is below
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import rankdata

from residuum.auditing.controls import Claim, sample_losses
from residuum.checkpoints import build_model
from residuum.evaluation.matching import Array, as_array, discrete
from residuum.records import Checkpoint, Dataset
from residuum.records.base import Record
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, margins, normalise_labels

RATES = (0.01, 0.001)  # false positives at which true ones are counted
FEWEST = 10  # samples on either side


@dataclass(frozen=True, eq=False)
class Separation(Record):
    """One statistic: how well it tells training from held-out samples.

    auc: 0.5 by chance; error: its standard error by chance; at_1, at_01: share of training samples found
    at 1% and 0.1% false positives, which is that share by chance; None with fewer held-out samples than
    make one false positive.
    """

    by: str
    auc: float
    error: float
    at_1: float | None
    at_01: float | None

    @property
    def line(self) -> str:
        """In one sentence."""
        rates = [
            f"{share:.1%} of the training samples at {rate:.1%} false positives"
            for share, rate in zip((self.at_1, self.at_01), RATES, strict=True)
            if share is not None
        ]
        found = f"; finds {' and '.join(rates)}" if rates else ""
        return f"by {self.by}: AUC {self.auc:.2f} (0.5 ± {self.error:.2f} by chance){found}"


@dataclass(frozen=True, eq=False)
class Membership(Record):
    """n training against ``pool`` held-out samples; margin: None for a regression."""

    n: int
    pool: int
    loss: Separation
    margin: Separation | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """One for each statistic."""
        return tuple(part.line for part in (self.loss, self.margin) if part is not None)


def membership(checkpoint: Checkpoint, claim: Claim | None) -> Membership | None:
    """None where there are no held-out samples, or none with labels, to compare with."""
    train, pool = (None, None) if claim is None else (claim.train, claim.pool)
    if train is None or pool is None or min(len(train), len(pool)) < FEWEST:
        return None
    if train.shape != pool.shape or len(pool.y.unique()) < 2:
        return None
    loss = sample_losses(checkpoint, train, pool, checkpoint.task)
    if loss is None:
        return None
    n, margin = len(train), _margins(checkpoint, train, pool)
    by_margin = None if margin is None else separation("margin", -margin[:n], -margin[n:])
    return Membership(n, len(pool), separation("loss", loss[:n], loss[n:]), by_margin)


def separation(by: str, mine: Array, others: Array) -> Separation:
    """Of a statistic that is small for training samples: ``mine`` are theirs."""
    n, pool = len(mine), len(others)
    ranks = rankdata(np.concatenate([mine, others]))[:n]
    auc = 1 - (ranks.sum() - n * (n + 1) / 2) / (n * pool)
    error = math.sqrt((n + pool + 1) / (12 * n * pool))
    sorted_others = np.sort(others)

    def found(rate: float) -> float | None:
        allowed = math.floor(rate * pool + 1e-9)
        return float((mine < sorted_others[allowed]).mean()) if allowed else None

    return Separation(by, float(auc), error, *map(found, RATES))


def _margins(checkpoint: Checkpoint, train: Dataset, pool: Dataset) -> Array | None:
    """y Phi, or the own output less the best other, of both; None for a regression or odd labels."""
    outputs = evaluate(
        build_model(checkpoint, torch.float64), torch.cat([train.x, pool.x]).double()
    )
    task = choose_task(checkpoint.task, outputs.shape[1])
    known = {*pool.y.flatten().tolist()} <= {*train.y.flatten().tolist()}
    if task == "regression" or not known or not discrete(pool.y):
        return None
    y = normalise_labels(torch.cat([train.y, pool.y]), task, outputs.shape[1])
    return as_array(margins(outputs, y).amin(1))
