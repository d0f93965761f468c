"""Is the comparison itself sound, and was the network trained on these samples at all?

The test of a verdict takes training and held-out samples to be exchangeable but for the network. What
would break that is looked for in every audit, each by a control that must find nothing:

- held-out samples that repeat a training sample hide it: both are set aside;
- a part of the held-out samples, taken out of the pool, serves as candidates;
- what was granted, with noise, serves as candidates: a mean of few samples gives them away itself;
- a classifier tries to tell training from held-out samples without any network.

Of a network that does not know these samples, "no leak found" would say nothing: its losses must tell
them from held-out ones. How well they do, and margins, is membership: what could be confirmed by
somebody who already has a sample (Yeom et al. 2018; Carlini et al. 2022 for the rates at few false
positives). It stands beside the verdict, and a network that tells nothing apart may still give samples
back, so it never acquits.

    AUC   how often a training sample's loss is below that of a held-out one, ties counting half
    TPR   share of training samples below the loss that a share FPR of the held-out ones is below
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
from residuum.auditing.budget import UNBOUNDED, Allowance
from residuum.evaluation.matching import (
    METRICS,
    Array,
    as_array,
    discrete,
    lay_out,
    why_not_calibrated,
)
from residuum.evaluation.null import MIN_SUBSETS, SUBSETS, draw_sets, format_p, step_down
from residuum.evaluation.roc import area_under_curve, true_positive_rate
from residuum.evaluation.scoring import DECIDING, control_of
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Record
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, margins, normalise_labels

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
NOISE = 0.05  # of candidates of what was granted, over their size; one for each sample
# Of what came back, that what was granted brings back by itself: too much to decide.
OVERLAP = 1 / 3
# Subsets of a control: the fewest whose least p is below its level. One among them that the control
# does not beat clears it: most are cleared by the first few, and no more are drawn.
FIRST, DRAWS = MIN_SUBSETS, 1000
SLACK = 1.5  # of what a control is expected to take: so much must be left to begin it
MACHINE = 0.3  # seconds that the classifier must have: it looks at a bounded number of samples
UNTRIED = "was not tried, for want of time"
RATES = (0.01, 0.001)  # false positives at which true ones are counted


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
    failures: why nothing can be decided, one sentence each.
    notes: what else a reader should know.
    """

    rows: tuple[ControlRow, ...] = ()
    repeats: tuple[int, ...] = ()
    auc: float | None = None
    energy: float | None = None
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


def run_controls(
    claim: Claim,
    knowledge: Knowledge,
    seed: int,
    subsets: int = DRAWS,
    allowance: Allowance = UNBOUNDED,
) -> Controls:
    """Every control that the samples allow.

    One that ``allowance`` has no time for fails: nobody knows what it would have said.
    """
    train, pool = claim.train, claim.pool
    if pool is None or why_not_calibrated(len(train), len(pool)):
        return Controls(repeats=claim.repeats, notes=claim.notes)
    rng = np.random.default_rng((seed, 5))
    notes, failures, rows = [*claim.notes], [claim.failure] if claim.failure else [], []
    matched = _strata(train, pool) is not None
    notes.append(
        f"subsets of held-out samples are {'matched by label' if matched else 'not label-matched'}"
    )
    spare = len(pool) - max(len(train), 100)  # what the control itself cannot do without
    count = min(len(train), len(pool) // SHARE, spare)
    tries: list[tuple[str, Tensor, Dataset, bool]] = []
    if count >= 1:
        order = torch.from_numpy(rng.permutation(len(pool)))
        mine, rest = order[:count], order[count:]
        others = pool.take(rest)
        tries.append(("held-out samples as candidates", pool.x[mine], others, False))
    else:
        notes.append("too few held-out samples to try some of them as candidates")
    tries += [
        (f"{name} alone, as candidates", x, pool, True)
        for name, x in granted_candidates(train, pool, knowledge, rng)
    ]
    longest = 0.0  # seconds of a control before: the next is as large
    for name, x, others, granted in tries:
        before = allowance.left
        if before <= SLACK * longest:
            failures.append(f"the control {name} {UNTRIED}. Give a longer --budget")
            continue
        row = _row(name, x, train, others, seed, subsets, allowance).replace(granted=granted)
        longest = max(longest, before - allowance.left) if before < np.inf else 0.0
        rows.append(row)
        if row.undecided and not granted:
            failures.append(
                f"the control {name} is undecided after {row.subsets} of {subsets} subsets, for want "
                "of time. Give a longer --budget"
            )
        if row.failed:
            said = (
                f'{row.name}: {row.recovered} of {len(train)} training samples "come back" '
                f"({row.expected_by_chance:.2g} by chance, {format_p(row.p_value)}) without any network"
            )
            # What a grant gives away is known sample by sample: see ``brought_by_grant``.
            (notes if row.granted else failures).append(
                f"{said}; findings must go beyond these"
                if row.granted
                else f"{said}, so nothing that the attacks match can be told from it"
            )
    auc, energy = told_by_samples(train, pool, rng, allowance)
    if auc is None and len(train) >= FEWEST_TOLD:
        failures.append(
            f"a classifier between training and held-out samples {UNTRIED}. Give a longer --budget"
        )
    elif auc is not None and energy is None:
        notes.append(f"the energy test between training and held-out samples {UNTRIED}")
    if auc is not None and auc.value >= APART and auc.clear:
        failures.append(
            f"a classifier tells training from held-out samples without any network (AUC "
            f"{auc.value:.2f}): they are not of one kind. Give held-out samples of the same source"
        )
    if energy is not None and energy <= 0.01:
        notes.append(
            f"training and held-out samples differ somewhat in distribution (energy test, p = "
            f"{energy:.2g}): the control is a little off, as between official training and test sets"
        )
    value = None if auc is None else auc.value
    return Controls(tuple(rows), claim.repeats, value, energy, tuple(failures), tuple(notes))


def granted_candidates(
    train: Dataset, pool: Dataset, knowledge: Knowledge, rng: np.random.Generator
) -> list[tuple[str, Tensor]]:
    """Samples that what was granted makes by itself, without the network: directions and noise.

    An attacker with public data of the same kind knows their mean; less that, a granted mean of few
    samples points at each of them.
    """
    found: list[tuple[str, Tensor]] = []
    count, shape = len(train), train.shape
    size = train.x[0].numel()

    def noisy(centre: Tensor) -> Tensor:
        """Its direction, so many times that every sample may have it."""
        flat = centre.double().reshape(-1)
        flat = flat - flat.mean()
        flat = flat / max(float(flat.norm()), 1e-12)
        noise = torch.from_numpy(rng.standard_normal((count, size))) / size**0.5
        return (flat + NOISE * noise).reshape(-1, *shape)

    if knowledge.mean is not None and knowledge.mean.numel() == size:
        mean = knowledge.mean.double().reshape(shape)
        public = pool.x.double().mean(0)
        if pool.mean is not None:  # samples come less a mean: as pictures they have it back
            public = public + pool.mean.double().reshape(shape)
        found.append(("the granted mean", noisy(mean)))
        found.append(("the granted mean less that of the held-out samples", noisy(mean - public)))
    box = knowledge.box(train.x[0].double())
    if box is not None:
        low, high = (end.expand(shape) for end in box)
        uniform = torch.from_numpy(rng.random((count, *shape)))
        found.append(("the granted value range", low + (high - low) * uniform))
    return found


def _row(
    name: str,
    candidates: Tensor,
    train: Dataset,
    others: Dataset,
    seed: int,
    subsets: int,
    allowance: Allowance,
) -> ControlRow:
    """The test of a verdict, on candidates that hold nothing of the network.

    More subsets are drawn where the first do not clear it, if there is time for them.
    """
    begun, metric = allowance.left, METRICS[DECIDING]
    field = lay_out(candidates, train, others.replace(mean=train.mean), [], seed=seed)
    gain = field.gain(metric)

    def drawing(count: int) -> ControlRow:
        found = control_of(metric, field, gain, seed, count)
        samples = tuple(train.rows[i] for i in np.flatnonzero(found.recovered))
        counts = len(candidates), len(samples), found.expected_by_chance
        return ControlRow(name, *counts, found.p_value, samples, subsets=count)

    row = drawing(min(FIRST, subsets))
    left = allowance.left
    took = begun - left if begun < np.inf else 0.0
    if row.undecided and row.subsets < subsets and took * subsets / row.subsets < left:
        row = drawing(subsets)
    return row


def brought_by_grant(controls: Controls, samples: tuple[int, ...]) -> tuple[str, ...]:
    """Why recovered ``samples`` say nothing of the network: what was granted brings them back alone."""
    found = []
    for row in controls.rows:
        both = len({*row.samples} & {*samples})
        if row.granted and samples and both >= OVERLAP * len(samples):
            found.append(
                f"{row.name}: bring back {both} of the {len(samples)} samples that the attacks do, "
                "without any network. Grant less, or a mean of more samples"
            )
    return tuple(found)


@dataclass(frozen=True)
class Auc:
    """How well two kinds are told apart; error: standard error where they are one kind."""

    value: float
    error: float

    @property
    def clear(self) -> bool:
        """No matter of few samples."""
        return self.value > 0.5 + CLEAR * self.error


def machinery() -> tuple[ModuleType, ModuleType]:
    """What the classifier is made of: reading it from disk takes longer than its work."""
    from sklearn import model_selection, svm

    return model_selection, svm


def told_by_samples(
    train: Dataset, pool: Dataset, rng: np.random.Generator, allowance: Allowance = UNBOUNDED
) -> tuple[Auc | None, float | None]:
    """AUC of a cross-validated RBF machine, and p of an energy test, between the two sets.

    Held-out samples are drawn with the training set's label counts, as the subsets of the test are.
    Both look at the same distances, measured once. None where it was not tried.
    """
    model_selection, svm = machinery()
    few = rng.permutation(len(train))[:MOST_TOLD]
    if len(few) < FEWEST_TOLD or allowance.left < MACHINE:
        return None, None
    a, b = (as_array(part.x.double()).reshape(len(part), -1) for part in (train, pool))
    labels = _strata(train, pool)
    labels = np.zeros(len(train) + len(pool), dtype=int) if labels is None else labels
    mine, theirs = labels[: len(train)][few], labels[len(train) :]
    room = [
        (theirs == v).sum() // k for v, k in zip(*np.unique(mine, return_counts=True), strict=True)
    ]
    times = max(1, min(min(room), MOST_TOLD // len(few)))
    chosen = draw_sets(theirs, np.tile(mine, times), 1, rng)[0]
    x = np.concatenate([a[few], b[chosen]])
    kind = np.repeat([1, 0], [len(few), len(chosen)])
    folds = model_selection.StratifiedKFold(5, shuffle=True, random_state=int(rng.integers(2**31)))
    distance = as_array(similarity.l2(torch.from_numpy(x), torch.from_numpy(x)))
    kernel = np.exp(-(distance**2) / max(x.shape[1] * x.var(), 1e-300))
    machine = svm.SVC(kernel="precomputed", class_weight="balanced")
    scored = model_selection.cross_val_score(machine, kernel, kind, cv=folds, scoring="roc_auc")
    value = float(scored.mean())
    error = np.sqrt((len(x) + 1) / (12 * len(few) * len(chosen)))
    energy = _energy(distance, kind, rng) if allowance.left > 0 else None
    return Auc(value, float(error)), energy


def _energy(
    distance: Array, kind: Array, rng: np.random.Generator, permutations: int = 499
) -> float:
    """p of the energy distance 2 E|A - B| - E|A - A'| - E|B - B'| among permuted kinds."""
    signs = np.where(kind == 1, 1.0 / (kind == 1).sum(), -1.0 / (kind == 0).sum())
    drawn = np.stack([signs, *(rng.permutation(signs) for _ in range(permutations))])
    energy = -np.einsum("bi,bi->b", drawn @ distance, drawn)
    return float((energy >= energy[0] - 1e-12 * abs(energy[0])).mean())


def told_by_network(
    checkpoint: Network, train: Dataset, pool: Dataset | None, task: str, seed: int
) -> float | None:
    """p that the network's losses on the training samples are those of so many others; None: no control.

    Two statistics share the permuted subsets: the mean loss, and how far the distribution of losses
    lies from that of all (at a margin training samples have equal losses, neither least nor largest).
    Where held-out samples come without labels the network's own answers stand in for them all.
    """
    if pool is None or why_not_calibrated(len(train), len(pool)):
        return None
    loss = sample_losses(checkpoint, train, pool, task)
    if loss is None:
        return None
    labels = _strata(train, pool)
    labels = np.zeros(len(loss), dtype=int) if labels is None else labels
    n, rng = len(train), np.random.default_rng((seed, 6))
    drawn = draw_sets(labels, labels[:n], SUBSETS - 1, rng)
    sets = np.concatenate([np.arange(n)[None], drawn])
    rank = np.argsort(np.argsort(loss, kind="stable"), kind="stable")
    places = np.sort(rank[sets], axis=1) / len(loss)
    steps = np.arange(n) / n
    apart = np.maximum(np.abs(places - steps), np.abs(places - steps - 1 / n)).max(1)
    return float(step_down(np.stack([-loss[sets].mean(1), apart])).min())


def _outputs(checkpoint: Network, train: Dataset, pool: Dataset) -> Tensor:
    """Return the network's outputs for training and held-out samples in float64, (n + N, k)."""
    model = checkpoint.double_module
    return evaluate(model, torch.cat([train.x, pool.x]).double())


def sample_losses(
    checkpoint: Network, train: Dataset, pool: Dataset, task: str, outputs: Tensor | None = None
) -> Array | None:
    """Loss of every training and held-out sample, (n + N,); None where there is nothing to compare.

    By the true labels where the held-out samples have them. Without, by the label that the network
    itself would give, for both alike: else training samples would be told apart by their labels.
    """
    outputs = _outputs(checkpoint, train, pool) if outputs is None else outputs
    task = choose_task(task, outputs.shape[1])
    if task == "regression":
        if pool.y.shape[1:] != train.y.shape[1:] or len(pool.y.unique()) < 2:
            return None
        wanted = normalise_labels(torch.cat([train.y, pool.y]), task, outputs.shape[1])
        return as_array((outputs - wanted).square().mean(1))
    known = {*pool.y.flatten().tolist()} <= {*train.y.flatten().tolist()}
    if known and len(pool.y.unique()) > 1:
        y = normalise_labels(torch.cat([train.y, pool.y]), task, outputs.shape[1])
    elif task == "binary":
        y = torch.where(outputs[:, 0] > 0, 1.0, -1.0)
    else:
        y = outputs.argmax(1)
    if task == "binary":
        return as_array(F.softplus(-y.double() * outputs[:, 0]))
    return as_array(F.cross_entropy(outputs, y.long(), reduction="none"))


def _strata(train: Dataset, pool: Dataset) -> Array | None:
    """Labels of both, where the pool has enough of each; None: not to be matched."""
    if not (discrete(train.y) and discrete(pool.y)):
        return None
    labels = np.concatenate([as_array(train.y), as_array(pool.y)])
    n = len(train)
    values, wanted = np.unique(labels[:n], return_counts=True)
    enough = all((labels[n:] == v).sum() >= k for v, k in zip(values, wanted, strict=True))
    return labels if enough else None


@dataclass(frozen=True, eq=False)
class Separation(Record):
    """One statistic: how well it tells training from held-out samples.

    auc: 0.5 by chance.
    error: its standard error by chance.
    at_1, at_01: share of training samples found at 1% and 0.1% false positives, which is that share
        by chance; None with fewer held-out samples than make one false positive.
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


def membership(checkpoint: Network, claim: Claim | None) -> Membership | None:
    """None where there are no held-out samples, or none with labels, to compare with."""
    train, pool = (None, None) if claim is None else (claim.train, claim.pool)
    if train is None or pool is None or min(len(train), len(pool)) < FEWEST_TOLD:
        return None
    if train.shape != pool.shape or len(pool.y.unique()) < 2:
        return None
    outputs = _outputs(checkpoint, train, pool)
    loss = sample_losses(checkpoint, train, pool, checkpoint.task, outputs)
    if loss is None:
        return None
    n, margin = len(train), _margins(checkpoint, train, pool, outputs)
    by_margin = None if margin is None else separation("margin", -margin[:n], -margin[n:])
    return Membership(n, len(pool), separation("loss", loss[:n], loss[n:]), by_margin)


def separation(by: str, mine: Array, others: Array) -> Separation:
    """Of a statistic that is small for training samples: ``mine`` are theirs."""
    n, pool = len(mine), len(others)
    scores, is_member = -np.concatenate([mine, others]), np.repeat([True, False], [n, pool])
    error = math.sqrt((n + pool + 1) / (12 * n * pool))
    shares = [
        true_positive_rate(scores, is_member, rate) if rate * pool > 1 - 1e-9 else None
        for rate in RATES
    ]
    return Separation(by, area_under_curve(scores, is_member), error, *shares)


def _margins(checkpoint: Network, train: Dataset, pool: Dataset, outputs: Tensor) -> Array | None:
    """y Phi, or the own output less the best other, of both; None for a regression or odd labels."""
    task = choose_task(checkpoint.task, outputs.shape[1])
    known = {*pool.y.flatten().tolist()} <= {*train.y.flatten().tolist()}
    if task == "regression" or not known or not discrete(pool.y):
        return None
    y = normalise_labels(torch.cat([train.y, pool.y]), task, outputs.shape[1])
    return as_array(margins(outputs, y).amin(1))
