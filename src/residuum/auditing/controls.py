"""Negative controls: can training and held-out samples be compared at all?

The tests of an audit compare candidates (images that an attack reconstructs) with training and held-out
samples. The tests assume that only the network distinguishes training from held-out samples. Every audit
checks this assumption by negative controls, which do not use the network and must find nothing:

- A held-out sample that repeats a training sample would hide a leak of that sample. Both samples are set
  aside (not used in the tests).
- Some of the held-out samples are used as candidates.
- Facts that the attacker knows, with added noise, are used as candidates. For example, a known mean of few
  samples resembles these samples.
- A classifier tries to distinguish training from held-out samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from residuum import similarity
from residuum.auditing.plan import NO_DEADLINE, Deadline
from residuum.errors import InputError
from residuum.evaluation.matching import (
    METRICS,
    MIN_HOLDOUT,
    Array,
    are_class_labels,
    as_array,
    prepare_scoring_data,
    why_not_calibrated,
)
from residuum.evaluation.null import (
    MIN_SUBSETS,
    SIGNIFICANCE,
    SUBSETS,
    draw_sets,
    format_p,
    step_down,
)
from residuum.evaluation.scoring import DECIDING, calibrate_metric
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Record
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, normalize_labels

# A negative control is a test that should find nothing. It fails if its p-value is at most this level,
# which happens by chance in 1 of 1000 audits.
LEVEL = 0.001
# Let d be the median distance between a training sample and its nearest held-out sample. A training sample
# repeats a held-out sample if their distance is at most this share of d.
REPEAT_DISTANCE = 0.01
# Two samples with at least MIN_NCC_VALUES values repeat each other if 1 - NCC is below 1 - REPEAT_NCC. For a
# table that is not standardized, this limit is too large, because the column with the largest values
# dominates all NCCs. So let d be the median of 1 - NCC between a training sample and its nearest held-out
# sample. If d is below 1 - REPEAT_NCC, the limit is d / 100 instead.
REPEAT_NCC, MIN_NCC_VALUES = 0.99, 30
MAX_REPEATS = 0.1  # largest share of training or held-out samples that may be set aside as repeats
# A negative control uses at most one of five held-out samples as guesses of training samples.
CANDIDATE_SHARE = 5
# If a classifier tells training and held-out samples apart with this AUC, they are not comparable.
MAX_AUC = 0.8
# The AUC of the classifier counts only if it exceeds 1/2 by this number of standard errors.
MIN_STANDARD_ERRORS = 3.0
# The classifier is trained on 10 to 400 training samples and on held-out samples. With fewer than 10 training
# samples, the AUC of the classifier says nothing.
MAX_CLASSIFIED, MIN_CLASSIFIED = 400, 10
ENERGY_LEVEL = 0.01  # the energy test reports different distributions at this p-value
# Significance level of the tests for a leak if training and held-out samples may have different
# distributions.
STRICT_LEVEL = 0.001
# A control uses copies of a fact that the attacker knows (such as the mean image) as guesses. The copies
# get random noise with this share of the fact's norm.
NOISE = 0.05
# Some samples may be recovered from the attacker's knowledge alone, without the weights. If they are more
# than this share of the recovered samples, the audit is inconclusive.
MAX_KNOWN_SHARE = 1 / 3
# Most negative controls pass, so a control first draws only FIRST_DRAWS random subsets of the held-out
# samples. With so few subsets, no p-value can be below LEVEL. If the p-value is as small as possible, the
# control draws MAX_DRAWS subsets.
FIRST_DRAWS, MAX_DRAWS = MIN_SUBSETS, 1000
# A negative control begins only if this multiple of its expected duration is left.
TIME_MARGIN = 1.5
MIN_CLASSIFIER_SECONDS = 0.3  # the classifier runs only if this many seconds are left


@dataclass(frozen=True, eq=False)
class ControlRow(Record):
    """The result of a negative control: a test of guesses (candidates) that do not depend on the network.

    Attributes:
        name: Name of the control.
        candidates: Number of candidates.
        recovered: Number of training samples that the candidates recover.
        expected_by_chance: Mean number of samples that the candidates recover from a held-out subset as large
            as the training set.
        p_value: P-value of the number of recovered samples.
        samples: Rows of the recovered training samples.
        granted: Whether the candidates are made from facts that the attacker knows.
        subsets: Number of held-out subsets that were drawn.
    """

    name: str
    candidates: int
    recovered: int
    expected_by_chance: float
    p_value: float
    samples: tuple[int, ...] = ()
    granted: bool = False
    subsets: int = MAX_DRAWS

    @property
    def has_failed(self) -> bool:
        """Whether the control's guesses match more training samples than expected by chance (p <= 0.001)."""
        return self.p_value <= LEVEL

    @property
    def is_undecided(self) -> bool:
        """Whether more random subsets must be drawn to decide if this negative control fails."""
        return not self.has_failed and self.p_value * (self.subsets + 1) < 1.5


@dataclass(frozen=True, eq=False)
class Controls(Record):
    """The results of all negative controls of an audit.

    Attributes:
        rows: One row per control that makes candidates.
        repeats: Rows of training samples that were set aside, because they also occur in the held-out set.
        auc: AUC of a classifier that distinguishes training from held-out samples, None if it was not run.
        energy: P-value of the energy test between training and held-out samples, None if it was not run.
        level: The largest adjusted p-value that shows a leak. The level is 1%. The level is 0.1% if training
            and held-out samples may differ in distribution, or if the training samples are too few to
            measure a difference.
        failures: Reasons why the audit is inconclusive, one sentence each.
        notes: Other remarks for the reader.
    """

    rows: tuple[ControlRow, ...] = ()
    repeats: tuple[int, ...] = ()
    auc: float | None = None
    energy: float | None = None
    level: float = SIGNIFICANCE
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleSets:
    """Training and held-out samples that can be compared.

    Attributes:
        train: The training samples.
        holdout: The held-out samples, None if there are none.
        set_aside: Training samples that also occur in the held-out set. They cannot show a leak. If such a
            sample matches a reconstruction, the audit cannot end in "no leak found".
        failure: Why training and held-out samples cannot be compared, "" if they can.
        notes: Remarks on samples that were set aside.
    """

    train: Dataset
    holdout: Dataset | None
    set_aside: Dataset | None = None
    failure: str = ""
    notes: tuple[str, ...] = ()

    @property
    def repeats(self) -> tuple[int, ...]:
        """Row numbers of training samples that were removed because they also occur in the held-out set."""
        return () if self.set_aside is None else tuple(self.set_aside.rows)


def set_aside_repeats(train: Dataset, holdout: Dataset | None) -> SampleSets:
    """Remove training samples that also occur in the held-out set, and the equal held-out samples.

    Both copies of a repeated sample are removed, so that the remaining samples stay exchangeable.

    Args:
        train: The training set under test.
        holdout: The held-out set, None if there is none.

    Returns:
        The samples that remain, and the training samples that were set aside. If more than a
        tenth of the training or held-out samples are repeats, all samples remain and ``failure`` says so.
    """
    if holdout is None or holdout.shape != train.shape:
        return SampleSets(train, holdout)
    is_repeat = _find_repeats(train.x.double(), holdout.x.double())
    return describe_repeats(train, holdout, is_repeat.any(1), is_repeat.any(0))


def describe_repeats(
    train: Dataset, holdout: Dataset, in_holdout: Tensor, in_train: Tensor
) -> SampleSets:
    """Remove repeated samples, or explain that there are too many.

    Args:
        train: The training set under test.
        holdout: The held-out set.
        in_holdout: (n,) whether each training sample also occurs in the held-out set.
        in_train: (N,) whether each held-out sample also occurs in the training set.

    Returns:
        The samples that remain. If too many are repeats, all samples remain and ``failure`` says so.
    """
    if not bool(in_holdout.any()):
        return SampleSets(train, holdout)
    repeat_count = int(in_holdout.sum())
    sentence = f"{repeat_count} of {len(train)} training samples also occur in the held-out set"
    if max(float(in_holdout.double().mean()), float(in_train.double().mean())) > MAX_REPEATS:
        failure = f"{sentence}. At most a tenth may. Pass held-out samples that were not trained on"
        return SampleSets(train, holdout, failure=failure)
    set_aside = train.take(in_holdout)
    listed_rows = ", ".join(map(str, set_aside.rows[:20])) + (", ..." if repeat_count > 20 else "")
    note = f"{sentence} (rows {listed_rows}, counted from 0). These samples were not judged"
    return SampleSets(train.take(~in_holdout), holdout.take(~in_train), set_aside, "", (note,))


def _find_repeats(train: Tensor, holdout: Tensor) -> Tensor:
    """Return a mask (n, N) that says which of n training and N held-out samples are the same.

    n is the number of training samples, and N is the number of held-out samples.
    """
    distance = similarity.l2(train, holdout)
    if train[0].numel() < MIN_NCC_VALUES:
        return distance <= REPEAT_DISTANCE * distance.amin(1).median()
    ncc_distance = 1 - similarity.ncc(train, holdout)
    median_nearest_distance = float(ncc_distance.amin(1).median())
    max_ncc_distance = (
        1 - REPEAT_NCC
        if median_nearest_distance > 1 - REPEAT_NCC
        else REPEAT_DISTANCE * median_nearest_distance
    )
    return (ncc_distance < max_ncc_distance) | (distance == 0)


@dataclass(frozen=True)
class Control:
    """A negative control: a test of guesses that do not depend on the network, which must find no leak.

    Attributes:
        name: Name of the control.
        candidates: (m, *shape) candidates.
        holdout: Held-out samples to compare with. No candidate is among these samples.
        granted: Whether the candidates are made from facts that the attacker knows.
    """

    name: str
    candidates: Tensor
    holdout: Dataset
    granted: bool = False


MATCHED = "subsets of held-out samples are matched by label"
NOT_MATCHED = "subsets of held-out samples are not label-matched"
TOO_FEW = "there are too few held-out samples to use some of them as candidates"
NOT_TRIED = "the control {name} was skipped: time budget exhausted. Pass a larger --budget"
UNDECIDED = (
    "the control {name} is undecided after {drawn} of {subsets} subsets: time budget exhausted. Pass a "
    "larger --budget"
)
RECOVERED_WITHOUT_NETWORK = (
    "{name}: {recovered} of {n} training samples are recovered ({expected:.2g} expected by chance, {p}) "
    "without the network"
)
NOT_CLASSIFIED = (
    "the classifier between training and held-out samples was skipped: time budget exhausted. Pass a "
    "larger --budget"
)
ENERGY_NOT_TRIED = (
    "the energy test between training and held-out samples was skipped: time budget exhausted"
)
DIFFERENT_KINDS = (
    "a classifier distinguishes training from held-out samples without the network (AUC {auc:.2f}), so "
    "the samples do not come from the same source. Pass held-out samples from the source of the training "
    "samples"
)
SHIFTED = (
    "training and held-out samples differ slightly in distribution (energy test, p = {p:.2g}). Official "
    "training and test sets often do. Chance levels are then slightly wrong"
)
STRICTER = (
    "a leak needs an adjusted p-value of {level:g}, because training and held-out samples may differ in "
    "distribution, or because there are too few training samples to measure this"
)
KNOWN_BEFORE = (
    "{name} recovers {common} of the {n} samples that the attacks recover, without the network. Let the "
    "attacker know less, or pass a mean of more samples"
)


def run_controls(
    sets: SampleSets,
    knowledge: Knowledge,
    seed: int,
    subsets: int = MAX_DRAWS,
    deadline: Deadline = NO_DEADLINE,
) -> Controls:
    """Run every negative control for which there are enough samples.

    Args:
        sets: Training and held-out samples.
        knowledge: What the attacker knows.
        seed: Seed of candidates and subsets.
        subsets: The largest number of random subsets of the held-out set that are drawn.
        deadline: Time limit of the audit. If no time is left for a control, the control counts as failed.

    Returns:
        The results of the controls, with the reasons why the audit is inconclusive.
    """
    train, holdout = sets.train, sets.holdout
    if holdout is None or len(holdout) < MIN_HOLDOUT:
        return Controls(repeats=sets.repeats, notes=sets.notes)
    rng = np.random.default_rng((seed, 5))
    notes = [*sets.notes, NOT_MATCHED if _strata(train, holdout) is None else MATCHED]
    failures = [sets.failure] if sets.failure else []
    controls = make_holdout_control(train, holdout, rng)
    if not controls:
        notes.append(TOO_FEW)
    if not why_not_calibrated(len(train), len(holdout)):
        controls += [
            Control(f"{name} alone, as candidates", x, holdout, granted=True)
            for name, x in make_candidates_from_knowledge(train, holdout, knowledge, rng)
        ]
    control_rows = []
    longest_seconds = (
        # Duration of the slowest negative control so far, which is the estimate for the next one.
        0.0
    )
    for control in controls:
        seconds_before = deadline.seconds_left
        if seconds_before <= TIME_MARGIN * longest_seconds:
            failures.append(NOT_TRIED.format(name=control.name))
            continue
        try:
            control_row = run_control(control, train, seed, subsets, deadline)
        except InputError as problem:  # too few held-out samples remain for this negative control
            failures.append(problem.message.rstrip("."))
            continue
        longest_seconds = (
            max(longest_seconds, seconds_before - deadline.seconds_left)
            if seconds_before < np.inf
            else 0.0
        )
        control_rows.append(control_row)
        # If the attacker's knowledge alone already recovers samples, the control adds only a note. The
        # function ``explain_by_knowledge`` decides whether the audit is inconclusive because of these
        # samples.
        (notes if control_row.granted else failures).extend(
            _judge(control_row, len(train), subsets)
        )
    auc, energy = compare_distributions(train, holdout, rng, deadline)
    if auc is None and len(train) >= MIN_CLASSIFIED:
        failures.append(NOT_CLASSIFIED)
    elif auc is not None and energy is None:
        notes.append(ENERGY_NOT_TRIED)
    if auc is not None and auc.value >= MAX_AUC and auc.is_significant:
        failures.append(DIFFERENT_KINDS.format(auc=auc.value))
    if energy is not None and energy <= ENERGY_LEVEL:
        notes.append(SHIFTED.format(p=energy))
    is_shifted = (energy is not None and energy <= ENERGY_LEVEL) or (
        auc is not None and auc.is_significant
    )
    significance_level = STRICT_LEVEL if is_shifted or len(train) < MIN_CLASSIFIED else SIGNIFICANCE
    if significance_level < SIGNIFICANCE:
        notes.append(STRICTER.format(level=significance_level))
    auc_value = None if auc is None else auc.value
    failure_reasons = tuple(dict.fromkeys(failures))
    return Controls(
        tuple(control_rows),
        sets.repeats,
        auc_value,
        energy,
        significance_level,
        failure_reasons,
        tuple(notes),
    )


def _judge(row: ControlRow, n: int, subsets: int) -> tuple[str, ...]:
    """Return the reason why a negative control fails, in a tuple, or () if it passes."""
    if row.is_undecided and not row.granted:
        return (UNDECIDED.format(name=row.name, drawn=row.subsets, subsets=subsets),)
    if not row.has_failed:
        return ()
    sentence = RECOVERED_WITHOUT_NETWORK.format(
        name=row.name,
        recovered=row.recovered,
        n=n,
        expected=row.expected_by_chance,
        p=format_p(row.p_value),
    )
    if row.granted:
        return (f"{sentence}. Findings must go beyond these samples",)
    return (f"{sentence}, so samples that the attacks recover prove nothing",)


def make_holdout_control(
    train: Dataset, holdout: Dataset, rng: np.random.Generator
) -> list[Control]:
    """Return the control that uses some held-out samples as candidates.

    Args:
        train: The training set under test.
        holdout: The held-out set.
        rng: Chooses the candidates.

    Returns:
        A list with the control, or an empty list if there are too few held-out samples.
    """
    # The control uses some held-out samples as guesses. At least 100 other held-out samples must remain for
    # the p-value, and at least as many as there are training samples.
    max_candidates = len(holdout) - max(len(train), 100)
    candidate_count = min(len(train), len(holdout) // CANDIDATE_SHARE, max_candidates)
    if candidate_count < 1:
        return []
    shuffled_rows = torch.from_numpy(rng.permutation(len(holdout)))
    candidates, remaining = (
        holdout.x[shuffled_rows[:candidate_count]],
        holdout.take(shuffled_rows[candidate_count:]),
    )
    return [Control("held-out samples as candidates", candidates, remaining)]


def make_candidates_from_knowledge(
    train: Dataset, holdout: Dataset, knowledge: Knowledge, rng: np.random.Generator
) -> list[tuple[str, Tensor]]:
    """Return candidates that an attacker can make from known facts without the network.

    The first candidates are copies of the known mean with noise, because the mean of few training samples
    resembles each of these samples. The second candidates are copies of the difference of the known mean and
    the mean of public data, which resembles the samples even more. The third candidates are random samples in
    the known value range.

    Args:
        train: The training set under test, which sets the number of candidates.
        holdout: The held-out set, whose mean is the public mean.
        knowledge: What the attacker knows.
        rng: Draws the noise.

    Returns:
        The name and the (n, *shape) candidates of each known fact that gives candidates.
    """
    count, shape, size = len(train), train.shape, train.x[0].numel()

    def make_noisy_copies(direction: Tensor) -> Tensor:
        """Return noisy copies of ``direction``, one for each training sample.

        ``direction`` is first centered to mean 0 and scaled to norm 1.
        """
        flat_direction = direction.double().reshape(-1)
        flat_direction = flat_direction - flat_direction.mean()
        flat_direction = flat_direction / max(float(flat_direction.norm()), 1e-12)
        gaussian_noise = torch.from_numpy(rng.standard_normal((count, size))) / size**0.5
        return (flat_direction + NOISE * gaussian_noise).reshape(-1, *shape)

    candidates: list[tuple[str, Tensor]] = []
    if knowledge.mean is not None and knowledge.mean.numel() == size:
        known_mean = knowledge.mean.double().reshape(shape)
        public_mean = holdout.x.double().mean(0)
        if holdout.mean is not None:  # this mean was subtracted from the held-out samples
            public_mean = public_mean + holdout.mean.double().reshape(shape)
        candidates.append(("the known mean", make_noisy_copies(known_mean)))
        difference_name = "the known mean minus the mean of the held-out samples"
        candidates.append((difference_name, make_noisy_copies(known_mean - public_mean)))
    value_box = knowledge.box(train.x[0].double())
    if value_box is not None:
        low, high = (end.expand(shape) for end in value_box)
        uniform_samples = torch.from_numpy(rng.random((count, *shape)))
        candidates.append(("the known value range", low + (high - low) * uniform_samples))
    return candidates


def run_control(
    control: Control, train: Dataset, seed: int, subsets: int, deadline: Deadline
) -> ControlRow:
    """Test the guesses of a negative control in the same way as the reconstructions of an attack.

    The number of recovered samples is compared with random subsets of the held-out set. Few subsets are drawn
    first. If they do not decide whether the control passes, and if there is time, all subsets are drawn.

    Args:
        control: The control.
        train: The training set under test.
        seed: Seed of the subsets.
        subsets: The largest number of random subsets of the held-out set.
        deadline: Time limit of the audit.

    Returns:
        The number of training samples that the candidates recover, with its p-value.
    """
    seconds_at_start, metric = deadline.seconds_left, METRICS[DECIDING]
    holdout = control.holdout.replace(mean=train.mean)
    scoring_data = prepare_scoring_data(control.candidates, train, holdout, [], seed=seed)
    similarities = scoring_data.gain(metric)

    def draw(count: int) -> ControlRow:
        calibration = calibrate_metric(metric, scoring_data, similarities, seed, count)
        recovered_rows = tuple(train.rows[i] for i in np.flatnonzero(calibration.recovered))
        return ControlRow(
            name=control.name,
            candidates=len(control.candidates),
            recovered=len(recovered_rows),
            expected_by_chance=calibration.expected_by_chance,
            p_value=calibration.p_value,
            samples=recovered_rows,
            granted=control.granted,
            subsets=count,
        )

    control_row = draw(min(FIRST_DRAWS, subsets))
    seconds_left = deadline.seconds_left
    elapsed_seconds = seconds_at_start - seconds_left if seconds_at_start < np.inf else 0.0
    if (
        control_row.is_undecided
        and control_row.subsets < subsets
        and elapsed_seconds * subsets / control_row.subsets < seconds_left
    ):
        control_row = draw(subsets)
    return control_row


def explain_by_knowledge(controls: Controls, samples: tuple[int, ...]) -> tuple[str, ...]:
    """Return why the samples that the attacks recovered do not show that the network leaks.

    They do not if the attacker's knowledge alone, without the network, recovers many of the same samples.

    Args:
        controls: The negative controls of the audit.
        samples: Rows of the training samples that the attacks recovered.

    Returns:
        One sentence for each known fact whose candidates recover at least a third of ``samples``.
    """
    common_sample_counts = {
        row.name: len({*row.samples} & {*samples}) for row in controls.rows if row.granted
    }
    return tuple(
        KNOWN_BEFORE.format(name=name, common=count, n=len(samples))
        for name, count in common_sample_counts.items()
        if samples and count >= MAX_KNOWN_SHARE * len(samples)
    )


@dataclass(frozen=True)
class Auc:
    """Area under the ROC curve (AUC) of a classifier that distinguishes training from held-out samples.

    Attributes:
        value: The area under the curve (AUC).
        error: Standard error of the AUC if all samples have the same distribution.
    """

    value: float
    error: float

    @property
    def is_significant(self) -> bool:
        """Whether the AUC exceeds 1/2 by more than three standard errors."""
        return self.value > 0.5 + MIN_STANDARD_ERRORS * self.error


def import_classifier() -> tuple[ModuleType, ModuleType]:
    """Import the modules of the classifier early, because the import takes longer than the training."""
    from sklearn import model_selection, svm

    return model_selection, svm


def compare_distributions(
    train: Dataset, holdout: Dataset, rng: np.random.Generator, deadline: Deadline = NO_DEADLINE
) -> tuple[Auc | None, float | None]:
    """Measure how much training and held-out samples differ, without using the network.

    Held-out samples are drawn with the same label counts as the training set.

    Args:
        train: The training set under test.
        holdout: The held-out set.
        rng: Draws samples, folds and permutations.
        deadline: Time limit of the audit.

    Returns:
        The cross-validated AUC of a support vector machine with RBF kernel that classifies the samples, and
        the p-value of an energy test. A result is None if there was no time or too few samples.
    """
    model_selection, svm = import_classifier()
    chosen_rows = rng.permutation(len(train))[: min(MAX_CLASSIFIED, len(holdout))]
    if len(chosen_rows) < MIN_CLASSIFIED or deadline.seconds_left < MIN_CLASSIFIER_SECONDS:
        return None, None
    train_values, holdout_values = (
        as_array(samples.x.double()).reshape(len(samples), -1) for samples in (train, holdout)
    )
    labels = _strata_or_one(train, holdout)
    train_labels, holdout_labels = labels[: len(train)][chosen_rows], labels[len(train) :]
    label_values, label_counts = np.unique(train_labels, return_counts=True)
    holdout_per_training_sample = [
        (holdout_labels == v).sum() // k for v, k in zip(label_values, label_counts, strict=True)
    ]
    holdout_multiple = max(
        1, min(min(holdout_per_training_sample), MAX_CLASSIFIED // len(chosen_rows))
    )
    holdout_rows = draw_sets(holdout_labels, np.tile(train_labels, holdout_multiple), 1, rng)[0]
    all_samples = np.concatenate([train_values[chosen_rows], holdout_values[holdout_rows]])
    is_training = np.repeat([1, 0], [len(chosen_rows), len(holdout_rows)])
    folds = model_selection.StratifiedKFold(5, shuffle=True, random_state=int(rng.integers(2**31)))
    distance = as_array(similarity.l2(torch.from_numpy(all_samples), torch.from_numpy(all_samples)))
    rbf_kernel = np.exp(-(distance**2) / max(all_samples.shape[1] * all_samples.var(), 1e-300))
    classifier = svm.SVC(kernel="precomputed", class_weight="balanced")
    fold_aucs = model_selection.cross_val_score(
        classifier, rbf_kernel, is_training, cv=folds, scoring="roc_auc"
    )
    auc = Auc(float(fold_aucs.mean()), _auc_error(len(chosen_rows), len(holdout_rows)))
    return auc, _energy_p_value(distance, is_training, rng) if deadline.seconds_left > 0 else None


def _auc_error(n: int, held_out: int) -> float:
    """Return the standard error of a classifier's AUC for ``n`` training and ``held_out`` held-out samples.

    The standard error holds if all samples have the same distribution.
    """
    return math.sqrt((n + held_out + 1) / (12 * n * held_out))


def _energy_p_value(
    distance: Array, kind: Array, rng: np.random.Generator, permutations: int = 499
) -> float:
    """Return the permutation p-value of the energy statistic 2 E|A - B| - E|A - A'| - E|B - B'|.

    A and A' are random samples of one set, B and B' are random samples of the other set. ``distance`` holds
    the distance of each pair of samples. ``kind`` is 1 for samples of one set and 0 for those of the other.
    """
    set_weights = np.where(kind == 1, 1.0 / (kind == 1).sum(), -1.0 / (kind == 0).sum())
    permuted_weights = np.stack(
        [set_weights, *(rng.permutation(set_weights) for _ in range(permutations))]
    )
    energy = -np.einsum("bi,bi->b", permuted_weights @ distance, permuted_weights)
    return float((energy >= energy[0] - 1e-12 * abs(energy[0])).mean())


def compare_losses(
    network: Network, train: Dataset, holdout: Dataset | None, task: str, seed: int
) -> float | None:
    """Test whether the losses of the network differ between training and held-out samples.

    Two statistics of the training set are compared with those of random subsets of all samples. The first
    statistic is the mean loss. The second statistic is the Kolmogorov-Smirnov distance between the losses of
    the training set and the losses of all samples. The distance detects training samples that all have the
    same loss, even if this loss is neither small nor large. Such losses occur if training samples lie at the
    margin. If the held-out samples have no labels, predictions of the network replace all labels.

    Args:
        network: The audited network.
        train: The training set under test.
        holdout: The held-out set, None if there is none.
        task: Task of the network.
        seed: Seed of the subsets.

    Returns:
        The p-value over both statistics, None if there are too few held-out samples.
    """
    if holdout is None or why_not_calibrated(len(train), len(holdout)):
        return None
    losses = compute_losses(network, train, holdout, task)
    if losses is None:
        return None
    labels = _strata_or_one(train, holdout)
    n, rng = len(train), np.random.default_rng((seed, 6))
    random_subsets = draw_sets(labels, labels[:n], SUBSETS - 1, rng)
    subset_rows = np.concatenate([np.arange(n)[None], random_subsets])
    loss_ranks = np.argsort(np.argsort(losses, kind="stable"), kind="stable")
    empirical_cdf = np.sort(loss_ranks[subset_rows], axis=1) / len(losses)
    uniform_cdf = np.arange(n) / n
    distance = np.maximum(
        np.abs(empirical_cdf - uniform_cdf), np.abs(empirical_cdf - uniform_cdf - 1 / n)
    ).max(1)
    return float(step_down(np.stack([-losses[subset_rows].mean(1), distance])).min())


def _outputs(network: Network, train: Dataset, holdout: Dataset) -> Tensor:
    """Return the (n + N, k) network outputs for n training and N held-out samples, in float64."""
    return evaluate(network.double_module, torch.cat([train.x, holdout.x]).double())


def _has_known_labels(train: Dataset, holdout: Dataset) -> bool:
    """Return True if every label of the held-out samples is a label of the training set."""
    return {*holdout.y.flatten().tolist()} <= {*train.y.flatten().tolist()}


def compute_losses(
    network: Network, train: Dataset, holdout: Dataset, task: str, outputs: Tensor | None = None
) -> Array | None:
    """Return the losses of the network on training and held-out samples.

    If the labels of the held-out samples are missing or unknown classes, the predictions of the network are
    used as the labels of all samples. With true labels for training samples only, the losses would differ
    because of the labels.

    Args:
        network: The audited network.
        train: The training set under test.
        holdout: The held-out set.
        task: Task of the network.
        outputs: (n + N, k) outputs of the network. By default they are computed.

    Returns:
        (n + N,) losses, None for a regression whose held-out targets are missing or have another shape.
    """
    outputs = _outputs(network, train, holdout) if outputs is None else outputs
    task, has_several_labels = choose_task(task, outputs.shape[1]), len(holdout.y.unique()) > 1
    if task == "regression":
        if holdout.y.shape[1:] != train.y.shape[1:] or not has_several_labels:
            return None
        targets = normalize_labels(torch.cat([train.y, holdout.y]), task, outputs.shape[1])
        return as_array((outputs - targets).square().mean(1))
    if has_several_labels and _has_known_labels(train, holdout):
        labels_or_predictions = normalize_labels(
            torch.cat([train.y, holdout.y]), task, outputs.shape[1]
        )
    elif task == "binary":
        labels_or_predictions = torch.where(outputs[:, 0] > 0, 1.0, -1.0)
    else:
        labels_or_predictions = outputs.argmax(1)
    if task == "binary":
        return as_array(F.softplus(-labels_or_predictions.double() * outputs[:, 0]))
    return as_array(F.cross_entropy(outputs, labels_or_predictions.long(), reduction="none"))


def _strata(train: Dataset, holdout: Dataset) -> Array | None:
    """Return the class labels of all samples, with which random subsets get the labels of the training set.

    If the labels are no classes, or if some class has fewer held-out than training samples, return None.
    """
    if not (are_class_labels(train.y) and are_class_labels(holdout.y)):
        return None
    labels = np.concatenate([as_array(train.y), as_array(holdout.y)])
    train_count = len(train)
    values, counts = np.unique(labels[:train_count], return_counts=True)
    has_enough_held_out = all(
        (labels[train_count:] == v).sum() >= k for v, k in zip(values, counts, strict=True)
    )
    return labels if has_enough_held_out else None


def _strata_or_one(train: Dataset, holdout: Dataset) -> Array:
    """Return the class labels of all samples, or zeros if the samples have no usable class labels."""
    labels = _strata(train, holdout)
    return np.zeros(len(train) + len(holdout), dtype=int) if labels is None else labels
