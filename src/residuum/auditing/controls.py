"""What the report shows of the control: matched samples, and scores of held-out sets."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from residuum.auditing.result import Evidence
from residuum.evaluation.matching import greedy_in_sets, lay_out
from residuum.evaluation.metrics import METRICS
from residuum.evaluation.null import draw_sets
from residuum.evaluation.scoring import label_name, margins
from residuum.records import Dataset, Scores

MOST_SETS, MOST_VALUES = (
    100,
    5000,
)  # held-out sets in the report, and their values, which it carries
MOST_SHOWN = 300


def evidence(
    candidates: Tensor,
    train: Dataset,
    holdout: Dataset | None,
    scores: Scores,
    outputs: Tensor,
    seed: int,
) -> Evidence:
    """The samples worth showing, best first, and the values behind histogram and slider."""
    metric = METRICS[scores.deciding]
    found = [row.matches[scores.deciding].score for row in scores.per_sample]
    values = torch.tensor([float("nan") if value is None else value for value in found])
    oriented = values if metric.higher_is_better else -values
    order = oriented.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    shown = order[:MOST_SHOWN]
    single = outputs.shape[1] == 1
    shown_outputs = outputs[:, 0] if single else margins(outputs, train.y)
    return Evidence(
        index=shown,
        x=train.x[shown],
        values=values,
        null=null_values(candidates, train, holdout, scores, seed),
        null_sets=null_sets(len(train)),
        mean=train.mean,
        outputs=shown_outputs,
        output_name="network output" if single else "margin",
        labels=tuple(
            "" if row.label is None else label_name(row.label, train) for row in scores.per_sample
        ),
    )


def null_sets(n: int) -> int:
    """How many held-out sets of n samples the report draws: as many as it can carry, at least 10."""
    return max(10, min(MOST_SETS, MOST_VALUES // n))


def null_values(
    candidates: Tensor, train: Dataset, holdout: Dataset | None, scores: Scores, seed: int
) -> Tensor:
    """Scores of the matches of held-out sets of the training set's size. (sets * n,)."""
    if not scores.calibrated:
        return torch.zeros(0)
    field = lay_out(
        candidates, train, holdout, candidate_labels=None, match_labels=True, same_label=False,
        seed=seed, notes=[],
    )  # fmt: skip
    metric, n = METRICS[scores.deciding], field.n
    gain = field.gain(metric)
    labels = np.zeros(gain.shape[1], dtype=int) if field.strata is None else field.strata
    rng = np.random.default_rng((seed, 2))  # a stream of its own: the test's draws stay as they are
    sets = n + draw_sets(labels[n:], labels[:n], null_sets(len(train)), rng)
    candidate = greedy_in_sets(gain, sets)
    matched = candidate >= 0
    values = gain[candidate[matched], sets[matched]]
    return torch.from_numpy(values if metric.higher_is_better else -values)
