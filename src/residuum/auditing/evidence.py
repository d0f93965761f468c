"""Collect what the report shows about the strongest attack: training samples, matches and chance level."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from residuum import similarity
from residuum.auditing.controls import SampleSets
from residuum.auditing.result import Evidence
from residuum.evaluation.embeddings import are_embeddings, match_embeddings
from residuum.evaluation.matching import match_greedily_in_sets
from residuum.evaluation.null import draw_sets
from residuum.evaluation.scoring import label_name, margins
from residuum.records import Scores

if TYPE_CHECKING:
    from residuum.auditing.scores import AttackTest

# To show what is expected by chance, the report plots scores of matches with random sets of held-out
# samples. There are 10 to 100 sets, and more than 10 only if they have at most 5000 samples together.
MAX_SETS, MAX_VALUES = 100, 5000
MAX_DISPLAYED = 300  # largest number of samples that are stored for the report. A page shows fewer


def collect_evidence(
    sets: SampleSets,
    scores: Scores,
    candidates: Tensor,
    outputs: Tensor,
    test: AttackTest | None,
    seed: int,
) -> Evidence:
    """Collect the training samples with the best matches, and the scores that the report plots.

    The report shows the scores in a histogram with a slider for the threshold.

    Args:
        sets: Training and held-out samples.
        scores: Scores of the strongest attack.
        candidates: (m, *shape) all candidates of the strongest attack.
        outputs: (n, C) outputs of the network on the training samples.
        test: Test of the strongest attack, None if no attack could be tested.
        seed: Seed of the held-out subsets.

    Returns:
        Samples and scores for the report, with the best-matched samples first.
    """
    train = sets.train
    match_scores = [row.matches[scores.deciding].score for row in scores.per_sample]
    score_values = torch.tensor(
        [float("nan") if value is None else value for value in match_scores]
    )
    sorted_positions = score_values.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    displayed_positions = sorted_positions[:MAX_DISPLAYED]
    has_one_output = outputs.shape[1] == 1
    flat_samples = train.x.flatten(1).double()
    value_spread = (flat_samples.quantile(0.95, 0) - flat_samples.quantile(0.05, 0)).reshape(
        train.shape
    )
    nearest_holdout = None
    if sets.holdout is not None and sets.holdout.shape == train.shape:
        holdout_similarities = similarity.ncc(
            flat_samples[displayed_positions], sets.holdout.x.flatten(1).double()
        )
        nearest_holdout = sets.holdout.x[holdout_similarities.argmax(1)]
    embeddings = None
    if are_embeddings(train) and len(candidates):
        matched = [
            scores.per_sample[i].matches[scores.deciding].candidate
            for i in displayed_positions.tolist()
        ]
        embeddings = match_embeddings(candidates, matched, train, displayed_positions, sets.holdout)
    return Evidence(
        index=displayed_positions,
        x=train.x[displayed_positions],
        values=score_values,
        null=torch.zeros(0) if test is None else held_out_matches(test, seed),
        null_sets=count_sets(len(train)),
        mean=train.mean,
        outputs=outputs[:, 0] if has_one_output else margins(outputs, train.y),
        output_name="network output" if has_one_output else "margin",
        labels=tuple(
            "" if row.label is None else label_name(row.label, train) for row in scores.per_sample
        ),
        nearest_holdout=nearest_holdout,
        features=train.features,
        units=train.units,
        scale=train.scale,
        offset=train.offset,
        spread=value_spread if train.x.ndim == 2 else None,
        embeddings=embeddings,
    )


def count_sets(n: int) -> int:
    """Return how many random sets of ``n`` held-out samples the report plots, to show matches by chance."""
    return max(10, min(MAX_SETS, MAX_VALUES // n))


def held_out_matches(test: AttackTest, seed: int) -> Tensor:
    """Return the scores of matches between reconstructions and random held-out samples (matches by chance).

    Each held-out set is as large as the training set.

    Args:
        test: The test of one attack.
        seed: Seed that draws the held-out sets.

    Returns:
        The scores of all matches in all sets, in one dimension.
    """
    field, gain, n = test.field, test.gain, test.field.n
    labels = np.zeros(gain.shape[1], dtype=int) if field.strata is None else field.strata
    rng = np.random.default_rng(
        (seed, 2)
    )  # seed key 2, so that the sets differ from those of the test
    set_positions = n + draw_sets(labels[n:], labels[:n], count_sets(n), rng)
    matched_candidates = match_greedily_in_sets(gain, set_positions)
    is_matched = matched_candidates >= 0
    return torch.from_numpy(gain[matched_candidates[is_matched], set_positions[is_matched]])
