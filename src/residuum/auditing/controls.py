"""Controls: is the comparison sound, and was the network trained on these samples at all?

The test of a verdict assumes that only the network distinguishes training from held-out samples. Every
audit checks this assumption by controls that must find nothing:

- Held-out samples that repeat a training sample hide it. Both are set aside.
- Some of the held-out samples serve as candidates.
- What the attacker knows, with noise, serves as candidates: a mean of few samples reveals these samples.
- A classifier tries to tell training from held-out samples without any network.
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

LEVEL = 0.001  # of a control: one false alarm in a thousand audits, each
NEAR = 0.01  # of the median distance to the nearest held-out sample: a repeat
# A repeat of at least MIN_NCC_VALUES values has an NCC above REPEAT_NCC, whatever its brightness. In raw
# tables every pair of rows has such an NCC, because the largest column dominates. If the nearest
# held-out sample is typically that close, a repeat must be a hundred times closer than that.
REPEAT_NCC, MIN_NCC_VALUES = 0.99, 30
MAX_REPEATS = 0.1  # share of either set that may be set aside
SHARE = 5  # one in so many held-out samples serves as candidate
APART = 0.8  # AUC at which training and held-out samples are of two kinds
CLEAR = 3.0  # standard errors that such an AUC must lie above one half: few samples scatter
MOST_TOLD = 400  # samples of each kind that a classifier is shown
FEWEST_TOLD = 10  # of each kind, to say how well they are told apart
ENERGY_LEVEL = 0.01  # p-value of the energy test at which two sets differ in distribution
STRICT_LEVEL = 0.001  # of a finding if the two sets may differ in distribution
NOISE = 0.05  # of candidates of what was granted, over their size; one for each sample
# Of what came back, that what was granted brings back by itself: too much to decide.
OVERLAP = 1 / 3
# Subsets of a control: the fewest whose least p is below its level. One among them that the control
# does not beat clears it: most are cleared by the first few, and no more are drawn.
FIRST, DRAWS = MIN_SUBSETS, 1000
SLACK = 1.5  # of what a control is expected to take: so much must be left to begin it
MACHINE = 0.3  # seconds that the classifier must have: it looks at a bounded number of samples


@dataclass(frozen=True, eq=False)
class ControlRow(Record):
    """One control: how many training samples its candidates recovered, and which.

    granted: its candidates are made of what the attacker was told.
    subsets: how many were drawn.
    """

    name: str
    candidates: int
    recovered: int
    expected_by_chance: float
    p_value: float
    samples: tuple[int, ...] = ()
    granted: bool = False
    subsets: int = DRAWS

    @property
    def failed(self) -> bool:
        """At its own level, far below the verdict's."""
        return self.p_value <= LEVEL

    @property
    def undecided(self) -> bool:
        """No subset that was drawn clears it, and too few were to say more."""
        return not self.failed and self.p_value * (self.subsets + 1) < 1.5


@dataclass(frozen=True, eq=False)
class Controls(Record):
    """All controls of an audit.

    repeats: rows of training samples that were set aside, because the held-out set holds them too.
    auc: of telling training from held-out samples, None where it was not tried.
    energy: p of the energy test, which only warns.
    level: the largest adjusted p-value that shows a leak: 1%, or 0.1% if the two sets may differ in
        distribution, or if there are too few training samples to tell.
    failures: why nothing can be decided, one sentence each.
    notes: what else a reader should know.
    """

    rows: tuple[ControlRow, ...] = ()
    repeats: tuple[int, ...] = ()
    auc: float | None = None
    energy: float | None = None
    level: float = SIGNIFICANCE
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """Training and held-out samples fit to be compared.

    set_aside: training samples that also occur in the held-out set. They cannot show a leak, but
        they must not match a reconstruction if the audit is to end in "no leak found".
    """

    train: Dataset
    pool: Dataset | None
    set_aside: Dataset | None = None
    failure: str = ""
    notes: tuple[str, ...] = ()

    @property
    def repeats(self) -> tuple[int, ...]:
        """Row numbers of the samples that were set aside."""
        return () if self.set_aside is None else tuple(self.set_aside.rows)


def without_repeats(train: Dataset, pool: Dataset | None) -> Claim:
    """Set aside training samples that also occur in the held-out set, and those held-out samples.

    Both members of a pair are set aside, so that the samples that remain stay exchangeable.

    Args:
        train: The training set under test.
        pool: The held-out set, or None.

    Returns:
        The samples that remain, and the training samples that were set aside. If more than a tenth
        of either set would be set aside, everything is kept and ``failure`` says so.
    """
    if pool is None or pool.shape != train.shape:
        return Claim(train, pool)
    is_repeat = _repeats(train.x.double(), pool.x.double())
    in_pool, in_train = is_repeat.any(1), is_repeat.any(0)
    if not bool(in_pool.any()):
        return Claim(train, pool)
    count = int(in_pool.sum())
    found = f"{count} of {len(train)} training samples also occur in the held-out set"
    if max(float(in_pool.double().mean()), float(in_train.double().mean())) > MAX_REPEATS:
        failure = f"{found}. At most a tenth may. Pass held-out samples that were not trained on"
        return Claim(train, pool, failure=failure)
    set_aside = train.take(in_pool)
    listed = ", ".join(map(str, set_aside.rows[:20])) + (", ..." if count > 20 else "")
    note = f"{found} (rows {listed}, counted from 0). They were not judged"
    return Claim(train.take(~in_pool), pool.take(~in_train), set_aside, "", (note,))


def _repeats(train: Tensor, pool: Tensor) -> Tensor:
    """Return an (n, N) mask of the pairs that are one sample, up to rounding and brightness."""
    distance = similarity.l2(train, pool)
    if train[0].numel() < MIN_NCC_VALUES:
        return distance <= NEAR * distance.amin(1).median()
    gap = 1 - similarity.ncc(train, pool)
    typical = float(gap.amin(1).median())
    limit = 1 - REPEAT_NCC if typical > 1 - REPEAT_NCC else NEAR * typical
    return (gap < limit) | (distance == 0)


@dataclass(frozen=True)
class Control:
    """Candidates that hold nothing of the network, and held-out samples to compare them with.

    granted: the candidates are made of what the attacker knows.
    """

    name: str
    candidates: Tensor
    holdout: Dataset
    granted: bool = False


# What is said of a control and of the comparison, in one place.
MATCHED = "subsets of held-out samples are matched by label"
NOT_MATCHED = "subsets of held-out samples are not label-matched"
TOO_FEW = "too few held-out samples to try some of them as candidates"
NOT_TRIED = "the control {name} was not tried, for want of time. Give a longer --budget"
UNDECIDED = (
    "the control {name} is undecided after {drawn} of {subsets} subsets, for want of time. Give a longer "
    "--budget"
)
CAME_BACK = (
    '{name}: {recovered} of {n} training samples "come back" ({expected:.2g} by chance, {p}) without any '
    "network"
)
NOT_CLASSIFIED = (
    "a classifier between training and held-out samples was not tried, for want of time. Give a longer "
    "--budget"
)
ENERGY_NOT_TRIED = (
    "the energy test between training and held-out samples was not tried, for want of time"
)
TWO_KINDS = (
    "a classifier tells training from held-out samples without any network (AUC {auc:.2f}): they are not "
    "of one kind. Give held-out samples of the same source"
)
SHIFTED = (
    "training and held-out samples differ somewhat in distribution (energy test, p = {p:.2g}): the "
    "control is a little off, as between official training and test sets"
)
STRICTER = (
    "a leak needs an adjusted p-value of {level:g}, because training and held-out samples may differ in "
    "distribution, or because there are too few training samples to tell"
)
KNOWN_BEFORE = (
    "{name}: bring back {common} of the {n} samples that the attacks do, without any network. Grant less, "
    "or a mean of more samples"
)


def run_controls(
    claim: Claim,
    knowledge: Knowledge,
    seed: int,
    subsets: int = DRAWS,
    deadline: Deadline = NO_DEADLINE,
) -> Controls:
    """Run every control that the samples allow.

    Args:
        claim: Training and held-out samples.
        knowledge: What the attacker knows.
        seed: Of candidates and subsets.
        subsets: Held-out subsets that are drawn at most.
        deadline: Time at which the clock stops the audit. A control without time fails, because its result
            is unknown.

    Returns:
        The controls, with the reasons for which nothing can be decided.
    """
    train, pool = claim.train, claim.pool
    if pool is None or len(pool) < MIN_HOLDOUT:
        return Controls(repeats=claim.repeats, notes=claim.notes)
    rng = np.random.default_rng((seed, 5))
    notes = [*claim.notes, NOT_MATCHED if _strata(train, pool) is None else MATCHED]
    failures = [claim.failure] if claim.failure else []
    controls = held_out_control(train, pool, rng)
    if not controls:
        notes.append(TOO_FEW)
    if not why_not_calibrated(len(train), len(pool)):
        controls += [
            Control(f"{name} alone, as candidates", x, pool, granted=True)
            for name, x in granted_candidates(train, pool, knowledge, rng)
        ]
    rows, longest = [], 0.0  # seconds of the longest control so far: the next is as large
    for control in controls:
        before = deadline.left
        if before <= SLACK * longest:
            failures.append(NOT_TRIED.format(name=control.name))
            continue
        try:
            row = run_control(control, train, seed, subsets, deadline)
        except (
            InputError
        ) as problem:  # the held-out samples that are no training samples are too few
            failures.append(problem.message.rstrip("."))
            continue
        longest = max(longest, before - deadline.left) if before < np.inf else 0.0
        rows.append(row)
        # Samples that the attacker's knowledge matches by itself are subtracted: see ``brought_by_grant``.
        (notes if row.granted else failures).extend(_judge(row, len(train), subsets))
    auc, energy = tell_apart(train, pool, rng, deadline)
    if auc is None and len(train) >= FEWEST_TOLD:
        failures.append(NOT_CLASSIFIED)
    elif auc is not None and energy is None:
        notes.append(ENERGY_NOT_TRIED)
    if auc is not None and auc.value >= APART and auc.clear:
        failures.append(TWO_KINDS.format(auc=auc.value))
    if energy is not None and energy <= ENERGY_LEVEL:
        notes.append(SHIFTED.format(p=energy))
    is_shifted = (energy is not None and energy <= ENERGY_LEVEL) or (auc is not None and auc.clear)
    level = STRICT_LEVEL if is_shifted or len(train) < FEWEST_TOLD else SIGNIFICANCE
    if level < SIGNIFICANCE:
        notes.append(STRICTER.format(level=level))
    value = None if auc is None else auc.value
    reasons = tuple(dict.fromkeys(failures))
    return Controls(tuple(rows), claim.repeats, value, energy, level, reasons, tuple(notes))


def _judge(row: ControlRow, n: int, subsets: int) -> tuple[str, ...]:
    """Say what a control found that it must not find."""
    if row.undecided and not row.granted:
        return (UNDECIDED.format(name=row.name, drawn=row.subsets, subsets=subsets),)
    if not row.failed:
        return ()
    found = CAME_BACK.format(
        name=row.name,
        recovered=row.recovered,
        n=n,
        expected=row.expected_by_chance,
        p=format_p(row.p_value),
    )
    if row.granted:
        return (f"{found}; findings must go beyond these",)
    return (f"{found}, so nothing that the attacks match can be told from it",)


def held_out_control(train: Dataset, pool: Dataset, rng: np.random.Generator) -> list[Control]:
    """Return the control that takes some held-out samples as candidates, if there are enough of them."""
    spare = len(pool) - max(
        len(train), 100
    )  # the other samples must suffice for the control itself
    count = min(len(train), len(pool) // SHARE, spare)
    if count < 1:
        return []
    order = torch.from_numpy(rng.permutation(len(pool)))
    candidates, others = pool.x[order[:count]], pool.take(order[count:])
    return [Control("held-out samples as candidates", candidates, others)]


def granted_candidates(
    train: Dataset, pool: Dataset, knowledge: Knowledge, rng: np.random.Generator
) -> list[tuple[str, Tensor]]:
    """Return candidates that the attacker's knowledge gives without the network: directions and noise.

    An attacker with public data of the same kind knows their mean. A known mean of few training samples,
    less the public mean, points at each of these samples.
    """
    count, shape, size = len(train), train.shape, train.x[0].numel()

    def noisy(direction: Tensor) -> Tensor:
        """One noisy copy of a direction for every training sample."""
        flat = direction.double().reshape(-1)
        flat = flat - flat.mean()
        flat = flat / max(float(flat.norm()), 1e-12)
        noise = torch.from_numpy(rng.standard_normal((count, size))) / size**0.5
        return (flat + NOISE * noise).reshape(-1, *shape)

    candidates: list[tuple[str, Tensor]] = []
    if knowledge.mean is not None and knowledge.mean.numel() == size:
        mean = knowledge.mean.double().reshape(shape)
        public = pool.x.double().mean(0)
        if pool.mean is not None:  # the mean that was subtracted from the samples
            public = public + pool.mean.double().reshape(shape)
        candidates.append(("the granted mean", noisy(mean)))
        less_public = "the granted mean less that of the held-out samples"
        candidates.append((less_public, noisy(mean - public)))
    box = knowledge.box(train.x[0].double())
    if box is not None:
        low, high = (end.expand(shape) for end in box)
        uniform = torch.from_numpy(rng.random((count, *shape)))
        candidates.append(("the granted value range", low + (high - low) * uniform))
    return candidates


def run_control(
    control: Control, train: Dataset, seed: int, subsets: int, deadline: Deadline
) -> ControlRow:
    """Test the candidates of a control as the verdict tests those of an attack.

    More subsets are drawn if the first ones do not clear the control and there is time for them.
    """
    begun, metric = deadline.left, METRICS[DECIDING]
    holdout = control.holdout.replace(mean=train.mean)
    field = prepare_scoring_data(control.candidates, train, holdout, [], seed=seed)
    gain = field.gain(metric)

    def draw(count: int) -> ControlRow:
        test = calibrate_metric(metric, field, gain, seed, count)
        samples = tuple(train.rows[i] for i in np.flatnonzero(test.recovered))
        return ControlRow(
            name=control.name,
            candidates=len(control.candidates),
            recovered=len(samples),
            expected_by_chance=test.expected_by_chance,
            p_value=test.p_value,
            samples=samples,
            granted=control.granted,
            subsets=count,
        )

    row = draw(min(FIRST, subsets))
    remaining = deadline.left
    seconds = begun - remaining if begun < np.inf else 0.0
    if row.undecided and row.subsets < subsets and seconds * subsets / row.subsets < remaining:
        row = draw(subsets)
    return row


def brought_by_grant(controls: Controls, samples: tuple[int, ...]) -> tuple[str, ...]:
    """Say why recovered ``samples`` show nothing about the network: the attacker's knowledge suffices."""
    common = {row.name: len({*row.samples} & {*samples}) for row in controls.rows if row.granted}
    return tuple(
        KNOWN_BEFORE.format(name=name, common=count, n=len(samples))
        for name, count in common.items()
        if samples and count >= OVERLAP * len(samples)
    )


@dataclass(frozen=True)
class Auc:
    """How well two kinds of samples are told apart; error: the standard error if they are one kind."""

    value: float
    error: float

    @property
    def clear(self) -> bool:
        """True if few samples do not explain the value."""
        return self.value > 0.5 + CLEAR * self.error


def machinery() -> tuple[ModuleType, ModuleType]:
    """Import the classifier before the clock starts: reading it from disk takes longer than its work."""
    from sklearn import model_selection, svm

    return model_selection, svm


def tell_apart(
    train: Dataset, pool: Dataset, rng: np.random.Generator, deadline: Deadline = NO_DEADLINE
) -> tuple[Auc | None, float | None]:
    """Tell training from held-out samples without a network.

    Held-out samples are drawn with the training set's label counts, as the subsets of the test are.

    Returns:
        The AUC of a cross-validated RBF machine and the p-value of an energy test, on the same
        distances; None if there was no time or too few samples.
    """
    model_selection, svm = machinery()
    chosen = rng.permutation(len(train))[: min(MOST_TOLD, len(pool))]
    if len(chosen) < FEWEST_TOLD or deadline.left < MACHINE:
        return None, None
    a, b = (as_array(samples.x.double()).reshape(len(samples), -1) for samples in (train, pool))
    labels = _strata_or_one(train, pool)
    train_labels, pool_labels = labels[: len(train)][chosen], labels[len(train) :]
    values, counts = np.unique(train_labels, return_counts=True)
    room = [(pool_labels == v).sum() // k for v, k in zip(values, counts, strict=True)]
    times = max(1, min(min(room), MOST_TOLD // len(chosen)))
    drawn = draw_sets(pool_labels, np.tile(train_labels, times), 1, rng)[0]
    x = np.concatenate([a[chosen], b[drawn]])
    kind = np.repeat([1, 0], [len(chosen), len(drawn)])
    folds = model_selection.StratifiedKFold(5, shuffle=True, random_state=int(rng.integers(2**31)))
    distance = as_array(similarity.l2(torch.from_numpy(x), torch.from_numpy(x)))
    kernel = np.exp(-(distance**2) / max(x.shape[1] * x.var(), 1e-300))
    machine = svm.SVC(kernel="precomputed", class_weight="balanced")
    scores = model_selection.cross_val_score(machine, kernel, kind, cv=folds, scoring="roc_auc")
    auc = Auc(float(scores.mean()), _auc_error(len(chosen), len(drawn)))
    return auc, _energy(distance, kind, rng) if deadline.left > 0 else None


def _auc_error(n: int, pool: int) -> float:
    """Return the standard error of an AUC of n against ``pool`` samples of one kind."""
    return math.sqrt((n + pool + 1) / (12 * n * pool))


def _energy(
    distance: Array, kind: Array, rng: np.random.Generator, permutations: int = 499
) -> float:
    """Return the p-value of 2 E|A - B| - E|A - A'| - E|B - B'| among permuted kinds."""
    signs = np.where(kind == 1, 1.0 / (kind == 1).sum(), -1.0 / (kind == 0).sum())
    drawn = np.stack([signs, *(rng.permutation(signs) for _ in range(permutations))])
    energy = -np.einsum("bi,bi->b", drawn @ distance, drawn)
    return float((energy >= energy[0] - 1e-12 * abs(energy[0])).mean())


def told_by_network(
    checkpoint: Network, train: Dataset, pool: Dataset | None, task: str, seed: int
) -> float | None:
    """Test whether the network's losses tell training samples from held-out ones.

    Two statistics share the permuted subsets: the mean loss, and how far the distribution of losses
    lies from that of all samples (at a margin training samples have equal losses, neither least nor
    largest). If held-out samples have no labels, the network's own answers replace the labels of all.

    Returns:
        The p-value, None without enough held-out samples.
    """
    if pool is None or why_not_calibrated(len(train), len(pool)):
        return None
    loss = sample_losses(checkpoint, train, pool, task)
    if loss is None:
        return None
    labels = _strata_or_one(train, pool)
    n, rng = len(train), np.random.default_rng((seed, 6))
    drawn = draw_sets(labels, labels[:n], SUBSETS - 1, rng)
    sets = np.concatenate([np.arange(n)[None], drawn])
    rank = np.argsort(np.argsort(loss, kind="stable"), kind="stable")
    places = np.sort(rank[sets], axis=1) / len(loss)
    steps = np.arange(n) / n
    distance = np.maximum(np.abs(places - steps), np.abs(places - steps - 1 / n)).max(1)
    return float(step_down(np.stack([-loss[sets].mean(1), distance])).min())


def _outputs(checkpoint: Network, train: Dataset, pool: Dataset) -> Tensor:
    """Return the network's outputs for training and held-out samples in float64, (n + N, k)."""
    return evaluate(checkpoint.double_module, torch.cat([train.x, pool.x]).double())


def _has_known_labels(train: Dataset, pool: Dataset) -> bool:
    """Return True if every label of the held-out samples is a label of the training set."""
    return {*pool.y.flatten().tolist()} <= {*train.y.flatten().tolist()}


def sample_losses(
    checkpoint: Network, train: Dataset, pool: Dataset, task: str, outputs: Tensor | None = None
) -> Array | None:
    """Return the loss of every training and held-out sample, (n + N,); None if they do not compare.

    If the held-out samples have no labels of the training set, the label that the network would give is
    used for all samples. Otherwise training samples could be told apart by their labels.
    """
    outputs = _outputs(checkpoint, train, pool) if outputs is None else outputs
    task, several = choose_task(task, outputs.shape[1]), len(pool.y.unique()) > 1
    if task == "regression":
        if pool.y.shape[1:] != train.y.shape[1:] or not several:
            return None
        targets = normalize_labels(torch.cat([train.y, pool.y]), task, outputs.shape[1])
        return as_array((outputs - targets).square().mean(1))
    if several and _has_known_labels(train, pool):
        y = normalize_labels(torch.cat([train.y, pool.y]), task, outputs.shape[1])
    elif task == "binary":
        y = torch.where(outputs[:, 0] > 0, 1.0, -1.0)
    else:
        y = outputs.argmax(1)
    if task == "binary":
        return as_array(F.softplus(-y.double() * outputs[:, 0]))
    return as_array(F.cross_entropy(outputs, y.long(), reduction="none"))


def _strata(train: Dataset, pool: Dataset) -> Array | None:
    """Return the labels of all samples, None if the held-out set has too few of one to match by label."""
    if not (are_class_labels(train.y) and are_class_labels(pool.y)):
        return None
    labels = np.concatenate([as_array(train.y), as_array(pool.y)])
    n = len(train)
    values, counts = np.unique(labels[:n], return_counts=True)
    enough = all((labels[n:] == v).sum() >= k for v, k in zip(values, counts, strict=True))
    return labels if enough else None


def _strata_or_one(train: Dataset, pool: Dataset) -> Array:
    """Return the labels of all samples, or one label for all if they are not to be matched."""
    labels = _strata(train, pool)
    return np.zeros(len(train) + len(pool), dtype=int) if labels is None else labels
