"""From a network to a verdict: inspect, attack, select, score, certify, decide.

The attack stage is handed the checkpoint and the granted knowledge. Data and held-out samples are
checked for fit before it, and compared with only after it has ended.

Records that stand in the file itself need no attack, and are the first row of the verdict's table. A
nearest-neighbour model, a support vector machine or a Gaussian process is its training records; a
checkpoint may hold the arrays it was trained on. Where the auditor gives samples, each is looked for in
the file: equal to the last bit, or within rounding, as it is and as the file's own scalers hand it on;
held-out samples are looked for likewise, as control. Where the file holds no network at all, that is
the whole audit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import hypergeom
from torch import Tensor, nn

from residuum import plugins
from residuum.attacks import PRESETS, AttackConfig, every_attack
from residuum.auditing.budget import (
    CHECK_SHARE,
    LEAST_SCORE,
    MIN_BUDGET,
    OVERRUN,
    SCORE_SHARE,
    Allowance,
    Batch,
    duration,
    running_since,
    seconds_of,
)
from residuum.auditing.controls import (
    Controls,
    brought_by_grant,
    machinery,
    membership,
    run_controls,
    told_by_network,
    without_repeats,
)
from residuum.auditing.dryrun import NO_DATA, REACHABLE, DryRun
from residuum.auditing.inputs import (
    as_knowledge,
    check_fit,
    fit_of,
    scale_notes,
    shape_for,
    suited,
    task_of,
    with_source_of_mean,
)
from residuum.auditing.result import PLANNED, SUITE, AuditResult, facts, others, tried
from residuum.auditing.stages import (
    OUT_OF_TIME,
    Attacked,
    AttackStage,
    Watch,
    certified,
    exposed,
    judge,
)
from residuum.auditing.twin import run_positive_controls
from residuum.auditing.verdict import (
    INCONCLUSIVE,
    LEAK,
    NO_LEAK_FOUND,
    STORED,
    VOUCHED,
    AttackOutcome,
    Checks,
    Twin,
    acquitting,
    assumptions,
    decide,
    limitations,
    open_question,
    opening,
)
from residuum.datasets.given import both
from residuum.errors import ResiduumError, require_known
from residuum.evaluation.null import SIGNIFICANCE, SUBSETS
from residuum.io.checkpoints import as_network
from residuum.io.estimators import scalings_in
from residuum.io.inert import Thing
from residuum.io.release import Release, open_release
from residuum.io.release_knowledge import with_release
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction, Selection
from residuum.records.rundir import environment
from residuum.scanning.findings import Kept, records_in
from residuum.surfaces.head import head_of
from residuum.surfaces.inspection import Inspection, inspect_network
from residuum.surfaces.surface import chosen

if TYPE_CHECKING:
    from residuum.auditing.artifacts import AuditRun

ROUNDING = 16 * torch.finfo(torch.float32).eps  # of a record's largest value
MOST_ALIKE = 64  # records on either side that are compared with one sample
CHUNK = 4096  # records that are taken to float64 at a time
MOST_SHOWN = 300  # records that the report is given: a page shows fewer
OUTRIGHT = "stored outright"
STOPPED = "the audit ran out of its budget of {} and was stopped before its plan was finished"
NOT_CERTIFIED: dict[str, Any] = {
    "certificate": None,
    "certificate_of": OUT_OF_TIME,
    "uniqueness": None,
    "uniqueness_reason": OUT_OF_TIME,
}
NO_NETWORK = "the file holds no network"


def audit(
    model: Network | nn.Module | Mapping[str, Tensor] | str | Path | Any,
    *,
    data: Any = None,
    holdout: Any = None,
    knowledge: Knowledge | Mapping[str, Any] | None = None,
    budget: str | float = "1min",
    preset: str = "residuum",
    steps: int | None = None,
    seed: int = 0,
    subsets: int = SUBSETS,
    device: str = "cpu",
    task: str = "auto",
    arch: str | None = None,
    baselines: bool = True,
    vouch: bool = False,
    twin: bool = True,
    recipe: str = "",
    surface: str = "all",
    stored: Stored | None = None,
    batches: Sequence[Batch] = (),
    store: AuditRun | None = None,
    watch: Watch | None = None,
    hashes: dict[str, str] | None = None,
    stage: Callable[[str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> AuditResult:
    """Attack ``model`` from its weights and what the attacker knows; report whether its data leaks.

    model: a live network of any class, its state_dict(), a fitted MLPClassifier or MLPRegressor of
        scikit-learn, a Network, or the path of a file (``docs/networks.md``), which is also
        looked through for records that it holds outright (``stored``).
    data: the training samples as (x, y), a Dataset, a DataFrame, a DataLoader, a dataset with
        items, or the path of an .npz, a .csv or a folder (``datasets/given.py``).
    holdout: samples it never saw, likewise, labels optional, at least 100; one file may hold both;
        without either the verdict is inconclusive.
    knowledge: what the attacker is told, also as a dictionary.
    budget: wall clock, such as "10min": as many batches of restarts as fit, at least one. The audit
        ends within 1.3 times the budget.
    steps: of every restart, instead of the preset's: a smaller or larger plan. "No leak found" needs
        an attack that ran all steps and restarts of its plan.
    vouch: the auditor's word that network and samples were read rightly, where it does not show.
    twin: run positive controls, which are networks known to memorize their data. Without them
        "no leak found" is not said. recipe: how to train them, see ``twin.Recipe``.
    surface: attack only "weights", their "change" from a start that is granted, or the "moment" of
        an optimiser.
    batches: exactly these instead of a budget, as recorded by an earlier audit.
    store, watch: see ``AttackStage``.
    stage: called with the name of every stage as it begins.
    say: told, one line each, what is known before the attacks: accuracy of the network as read,
        what was assumed, how long it will take.
    """
    plugged = plugins.load()
    clock = _Clock(stage)
    knowledge = as_knowledge(knowledge)
    train, control = both(data, holdout)
    shape = shape_for(model, next((one for one in (train, control) if one is not None), None))
    shape = shape or knowledge.shape
    settings = {
        "preset": preset,
        "seed": seed,
        "subsets": subsets,
        "device": device,
        "task": task,
        "budget": seconds_of(budget),
        "steps": steps,
        "baselines": baselines,
        "arch": arch or "",
        "vouch": vouch,
        "twin": twin,
        "recipe": recipe,
        "surface": surface,
        "plugins": {one.name: one.version for one in plugged},
    }
    release = open_release(model) if isinstance(model, str | Path | Release) else None
    if release is not None:
        model, stored = network_and_records(release, lambda: as_network(release, arch, shape))
        if model is None:
            settings |= {"file": str(release.path.resolve())}
            hashes = hashes or {"checkpoint": release.sha256}
    if model is None and stored is not None:
        return audit_records(stored, train, control, knowledge, settings, dict(hashes or {}))
    checkpoint = as_network(model, arch, shape)
    if release is not None:
        knowledge = with_release(release, checkpoint, knowledge)
    knowledge = with_source_of_mean(knowledge, train)
    checkpoint = checkpoint.replace(task=task_of(checkpoint, task).replace("auto", ""))
    train, control = suited(checkpoint, train, control, knowledge, task)
    check_fit(checkpoint, train, control, task)
    read = () if train is None else train.notes
    outright = () if stored is None else (stored.row(train, control),)
    only = on_surface(surface, knowledge)
    whole, said = checkpoint.arch, knowledge
    if (head := head_of(checkpoint, knowledge)) is not None:
        checkpoint, knowledge = head.checkpoint, head.knowledge(knowledge)
        train, control = (None if one is None else head.features(one) for one in (train, control))
    contradictions = scale_notes(train, control, knowledge)
    with clock("inspect"):
        inspection = inspect_network(checkpoint)
        fit = fit_of(checkpoint, train, control, checkpoint.task)
    for line in opening(checkpoint, fit):
        (say or (lambda _: None))(line)
    config = attack_config(preset, steps, seed, device)
    seconds = seconds_of(budget)
    told = (checkpoint, knowledge, config, seconds, store, watch, tuple(batches), baselines, say)
    samples = 0 if train is None else len(train)
    longest = max(seconds, MIN_BUDGET)
    attacks = AttackStage(
        *told,
        exact=steps is not None,
        samples=samples,
        only=only,
        clock=clock.until(longest, batches),
    )
    with clock("attack"):
        attacked = attacks.run()
    faults = {one.name: f"failed on import: {one.error}" for one in plugged if one.error}
    faults |= {name: f"failed: {said}" for name, said in plugins.faults.items()}
    plugins.faults.clear()  # said once
    broken = tuple(AttackOutcome(name, True, True, False, said) for name, said in faults.items())
    attacked = replace(attacked, outcomes=(*attacked.outcomes, *broken))
    lost = [row.name for row in attacked.outcomes if row.reason.startswith("failed")]
    harmless = (
        (f"Parts of other packages failed and say nothing: {', '.join(lost)}.",) if lost else ()
    )
    # Repeated batches have no clock: what was drawn then is drawn again.
    end = clock.until(OVERRUN * longest, batches)
    scoring = math.inf if batches else max(LEAST_SCORE, SCORE_SHARE * seconds)
    machinery()  # read before the clock of the controls begins
    allowance = Allowance(min(math.inf if batches else CHECK_SHARE * seconds, end.left))
    with clock("controls"), allowance:
        claim = None if train is None else without_repeats(train, control)
        controls = Controls()
        if claim is not None:
            controls = run_controls(claim, knowledge, seed, allowance=allowance)
    with clock("score"):
        judged = judge(checkpoint, attacked, claim, seed, subsets, scoring)
        judged = replace(judged, attacks=(*outright, *judged.attacks))
        beside = membership(checkpoint, claim) if attacks.clock.left > 0 else None
    found = judged.findings.samples if judged.findings is not None else ()
    failures = (*controls.failures, *brought_by_grant(controls, found))
    checks = Checks(
        failures,
        fit,
        vouched=vouch,
        set_aside=() if claim is None else claim.repeats,
        budget_needed=attacks.budget_for_full_plan(attacked),
    )
    vouched = (VOUCHED,) if vouch else ()
    # Where records stand in the file, what finding none elsewhere is worth is no question.
    asked = None if any(row.stands for row in outright) else judged.findings
    if claim is not None and asked is not None and open_question(asked, checks):
        allowance.limit(end.left)
        with clock("permuted"), allowance:
            apart = told_by_network(checkpoint, claim.train, claim.pool, checkpoint.task, seed)
            judged = replace(
                judged, attacks=_against_permuted(attacks, judged.attacks, attacked, allowance)
            )
        checks = checks.replace(told_apart=apart)
        if acquitting(judged.attacks) and (vouch or not checks.strangers):
            with clock("twin"), allowance:
                controls_run: tuple[Twin, ...] = (Twin(reason="it was not wanted (--no-twin)"),)
                if twin:
                    controls_run = run_positive_controls(
                        attacks, claim, inspection, attacked, recipe, allowance
                    )
                checks = checks.replace(twins=controls_run)
    # What does not decide is skipped once the budget is spent.
    late = attacks.clock.left <= 0
    with clock("certify"):
        certificates = NOT_CERTIFIED
        if not late:
            certificates = certified(checkpoint, train, attacked.found, knowledge, seconds)
    with clock("exposure"):
        exposure, unexposed = None, OUT_OF_TIME
        if not late:
            exposure, unexposed = exposed(
                checkpoint, train, claim, knowledge, attacked.found, judged.shown
            )
    if end.left <= 0 or any("time" in part.status for part in attacked.found):
        checks = checks.replace(stopped=STOPPED.format(duration(seconds)))
    through_head = () if head is None else (head.note,)
    taken = (*vouched, *through_head, *unconfirmed(outright), *checkpoint.assumptions)
    verdict = decide(judged.findings, judged.attacks, checks, taken)
    drawn = subsets if judged.scores is None else judged.scores.subsets or subsets
    known = every_attack()
    assumed = [known[row.name].assumes for row in judged.attacks if row.ran and row.name in known]
    notes = [note for part in attacked.found for note in part.notes]
    notes += () if judged.scores is None else judged.scores.notes
    spent = (
        f"controls, permuted target and positive controls took {allowance.spent:.1f} s of a budget of "
        f"{seconds:.0f} s ({allowance.spent / seconds:.0%}; planned: at most {CHECK_SHARE:.0%})"
    )
    membership_why_not = "there are no held-out samples with labels to compare with"
    membership_why_not = OUT_OF_TIME if late else membership_why_not
    return AuditResult(
        subject=checkpoint.arch,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=verdict,
        checkpoint=checkpoint,
        inspection=inspection,
        knowledge=said,
        reconstructions=attacked.found,
        batches=attacked.batches,
        seconds=clock.seconds,
        **vars(judged),
        **certificates,
        settings={**settings, "subsets": drawn, "arch": whole},
        environment=environment(device),
        hashes=dict(hashes or {}),
        assumptions=(*assumptions(checkpoint, inspection), *dict.fromkeys(filter(None, assumed))),
        limitations=limitations(verdict, judged.scores, knowledge),
        suite=SUITE,
        suite_attacks=tuple(known),
        controls=controls,
        checks=checks,
        membership=beside,
        exposure=exposure,
        applies=(
            *facts(checkpoint, inspection, knowledge, fit),
            *tried(judged.attacks),
            *others(
                membership="" if beside else membership_why_not,
                exposure=unexposed,
                certificate="" if certificates["certificate"] else certificates["certificate_of"],
                uniqueness=certificates["uniqueness_reason"],
            ),
        ),
        warnings=(*read, *through_head, *(fit.notes if fit else ()), *contradictions, *harmless),
        notes=(*controls.notes, *dict.fromkeys(notes), spent),
    )


def on_surface(name: str, knowledge: Knowledge) -> tuple[str, ...]:
    """Attacks on one surface, by their names; none named: all of them."""
    if name == "all":
        return ()
    wanted = chosen(name, knowledge)
    return tuple(attack for attack, one in every_attack().items() if one.surface == wanted)


def _against_permuted(
    stage: AttackStage, rows: tuple[AttackOutcome, ...], attacked: Attacked, allowance: Allowance
) -> tuple[AttackOutcome, ...]:
    """What every attack that could acquit leaves on a target that holds nothing, as far as time allows."""
    gpu, found = stage.config.device.startswith("cuda"), []
    for row in rows:
        if row.decides and row.ran and not row.silent and row.residual is not None:
            # Restarts side by side cost a CPU what they cost one after another; elsewhere one alone
            # may take as long as its whole batch.
            batches = sum(batch.attack == row.name for batch in attacked.batches)
            expected = row.seconds / max(1, batches if gpu else row.restarts)
            left, known = allowance.left, None
            if expected < left:
                known = stage.left_on_permuted(row.name, row.steps, left)
            why = f"no time was left for it, about {expected:.1f} s" if known is None else ""
            row = row.replace(permuted=known, unasked=why)
        found.append(row)
    return tuple(found)


def attack_config(preset: str, steps: int | None, seed: int, device: str) -> AttackConfig:
    """The preset with what was said to override it."""
    require_known(preset, PRESETS, "No preset")
    config = replace(PRESETS[preset], seed=seed, device=device)
    return config if steps is None else replace(config, steps=steps)


class _Clock:
    """Seconds of every stage; ``begun`` is told its name."""

    def __init__(self, begun: Callable[[str], None] | None) -> None:
        self.seconds: dict[str, float] = {}
        self.begun = begun
        self.start = time.monotonic()

    def until(self, seconds: float, batches: Sequence[Batch]) -> Allowance:
        """Return the time that is left of ``seconds`` since the audit began.

        Repeated batches have no clock, so that they repeat.
        """
        return running_since(self.start, math.inf if batches else seconds)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.begun is not None:
            self.begun(stage)
        start = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - start, 3)


@dataclass(frozen=True, eq=False)
class Stored:
    """What a file holds outright.

    model: the class of what it holds.
    scalings: of ``scalings_in``.
    inputs: of the network beside it.
    notes: why it is no network, where it is none.
    """

    model: str
    kept: tuple[Kept, ...]
    scalings: tuple[tuple[Tensor, Tensor], ...] = ()
    inputs: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether more than the name of an array says that these are records."""
        return any(one.certain for one in self.kept)

    @property
    def likely(self) -> bool:
        """Whether rows could be fed to the network beside them, where none are given to compare with."""
        widths = {one.records.shape[1] for one in self.kept if one.records is not None}
        return self.certain or self.inputs in widths

    @property
    def count(self) -> int:
        """Records, those that stand in two places (an array, and the tree made of it) once."""
        different = {
            one.finding.where if one.records is None else float(one.records.double().sum()): one
            for one in self.kept
        }
        return sum(one.finding.count or 0 for one in different.values())

    def without(self, checkpoint: Network) -> Stored | None:
        """Less what is a parameter of the network itself, whatever its name says."""
        own = tuple(checkpoint.source_names.values())
        kept = tuple(k for k in self.kept if k.certain or not k.finding.where.endswith(own))
        inputs = checkpoint.architecture.inputs
        return replace(self, kept=kept, inputs=inputs) if kept else None

    def found(self, samples: Tensor) -> Tensor:
        """(n,) how far each sample is from the nearest record: 0 for the same bits, inf for none.

        Relative to its largest value, within ``ROUNDING``; the least over every place and every number
        of scalers.
        """
        flat = samples.flatten(1).double()
        least = torch.full((len(flat),), torch.inf, dtype=torch.float64)
        for one in self.kept:
            for x in _handed_on(flat, self.scalings):
                if one.records is not None and one.records.shape[1] == x.shape[1]:
                    least = torch.minimum(least, nearest(x, one.records))
        return least

    def row(self, train: Dataset | None, control: Dataset | None) -> AttackOutcome:
        """Its row in the table of tests.

        It decides where whatever wrote the file puts records there; where only a name says so, by the
        samples that stand there, or without any by the width.
        """
        where = "; ".join(
            f"{k.finding.what}{f' ({n})' if (n := k.finding.count) else ''}, at {k.finding.where}"
            for k in self.kept
        )
        silent = "what is stored beside the weights says nothing of what they hold"
        whole = AttackOutcome(
            OUTRIGHT, self.likely, True, True, where, surface=STORED, silent=silent
        )
        whole = whole.replace(candidates=self.count)
        if train is None:
            return whole
        away = self.found(train.x)
        same, near = int((away == 0).sum()), int(away.isfinite().sum())
        n = len(train)
        row = whole.replace(
            decides=self.certain or near > 0,
            recovered=near,
            of=n,
            rule="stands in the file",
            reason=f"{where}; of {n} training samples {same} stand there bit for bit, "
            f"{near - same} more within rounding",
        )
        if control is None or control.shape != train.shape:
            return row.replace(expected_by_chance=None)
        others = int(self.found(control.x).isfinite().sum())
        p = float(hypergeom.sf(near - 1, n + len(control), near + others, n))
        return row.replace(
            decides=self.certain or p <= SIGNIFICANCE,
            reason=f"{row.reason}; of {len(control)} held-out samples {others}",
            expected_by_chance=n * others / len(control),
            p_value=p,
        )


def unconfirmed(rows: tuple[AttackOutcome, ...]) -> tuple[str, ...]:
    """What is to be said where an array's name alone speaks for records in it."""
    return tuple(f"not confirmed: {row.reason}" for row in rows if not row.stands)


def stored_in(release: Release) -> Stored | None:
    """Return the records that a release stores, or None if it stores none."""
    try:
        kept = tuple(records_in(release))
        scalings = tuple(scalings_in(release)) if kept else ()
    except ResiduumError:
        return None
    if not kept:
        return None
    model = release.content.short if isinstance(release.content, Thing) else ""
    return Stored(model, kept, scalings)


def network_and_records(
    release: Release, load: Callable[[], Network]
) -> tuple[Network | None, Stored | None]:
    """Return the network that ``load`` reads, and the records that the release stores.

    Raises:
        ResiduumError: If there is neither.
    """
    stored = stored_in(release)
    try:
        checkpoint = load()
    except ResiduumError as problem:
        if stored is None:
            raise
        return None, replace(stored, notes=(problem.message,))
    return checkpoint, None if stored is None else stored.without(checkpoint)


def foretold(run: DryRun, stored: Stored) -> DryRun:
    """A dry run of a file with records outright: how the audit will end, network or none."""
    row = stored.row(None, None)
    why = "the file itself holds records outright"
    other = f"cannot be reached: {why}"
    ends = {LEAK: f"certain: {why}", NO_LEAK_FOUND: other, INCONCLUSIVE: other}
    if not stored.certain:
        by_name = "an array is named as records: where samples stand in it, that is a leak"
        ends = {**run.verdicts, LEAK: f"{REACHABLE}: {by_name}"}
    return run.replace(
        doubts=tuple(d for d in run.doubts if not (stored.certain and d.startswith(NO_DATA))),
        applies=(*tried((row,), PLANNED), *run.applies),
        verdicts=run.verdicts if run.obstacles else ends,
    )


def _handed_on(x: Tensor, scalings: tuple[tuple[Tensor, Tensor], ...]) -> Iterator[Tensor]:
    """The samples as given, and after each scaler."""
    yield x
    for factor, shift in scalings:
        if factor.numel() in (1, x.shape[1]) and shift.numel() in (1, x.shape[1]):
            x = x * factor + shift
            yield x


def nearest(x: Tensor, records: Tensor) -> Tensor:
    """(n,) the largest difference to the nearest record over the sample's largest value; inf for none.

    Rows that agree have one place on any line: only neighbours on a random one are compared. Rounding is
    of either sign, so that places differ by its size times the length of the line.
    """
    line = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    at, order = torch.cat([part.to(x) @ line for part in records.split(CHUNK)]).sort()
    size = x.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    reach, place = 4 * ROUNDING * size * line.norm(), x @ line
    first, middle, last = torch.searchsorted(at, torch.stack([place - reach, place, place + reach]))
    first, last = first.clamp(min=middle - MOST_ALIKE), last.clamp(max=middle + MOST_ALIKE)
    found = torch.full((len(x),), torch.inf, dtype=x.dtype)
    for i in (first < last).nonzero().flatten().tolist():
        rows = records[order[first[i] : last[i]]].to(x)
        gap = (rows - x[i]).abs().amax(1).nan_to_num(torch.inf).min() / size[i]
        found[i] = gap if gap <= ROUNDING else torch.inf
    return found


def audit_records(
    stored: Stored,
    train: Dataset | None,
    control: Dataset | None,
    knowledge: Knowledge,
    settings: dict[str, Any],
    hashes: dict[str, str],
) -> AuditResult:
    """The audit of a file that is no network: what it stores outright, and nothing else to try."""
    row = stored.row(train, control)
    verdict = decide(None, (row,), assumed=unconfirmed((row,)))
    records = [one.records for one in stored.kept if one.records is not None]
    shape = _shape(records[0].shape[1], knowledge, train) if records else ()
    name = stored.model or "records"
    return AuditResult(
        subject=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=verdict,
        checkpoint=Network({}, name, input_shape=shape),
        inspection=Inspection(
            arch=name,
            input_shape=shape,
            inputs=0,
            outputs=0,
            layers=(),
            parameters=0,
            bytes=0,
            dtype="",
            homogeneity_order=None,
            directions=None,
            directions_of=NO_NETWORK,
            ranks={},
            balance=None,
        ),
        knowledge=knowledge,
        attacks=(row,),
        reconstructions=(_shown(records[0], shape, knowledge),) if records else (),
        certificate_of=NO_NETWORK,
        uniqueness_reason=NO_NETWORK,
        settings=settings,
        environment=environment(settings["device"]),
        hashes=hashes,
        limitations=limitations(verdict, None, knowledge)[:1],
        applies=tried((row,)),
        suite=SUITE,
        notes=(*stored.notes, stored.kept[0].finding.remedy),
    )


def _shape(width: int, knowledge: Knowledge, train: Dataset | None) -> tuple[int, ...]:
    """Of one record: as was granted, as the samples have it, or flat."""
    known = (knowledge.shape, None if train is None else train.shape)
    return next((tuple(s) for s in known if s and math.prod(s) == width), (width,))


def _shown(records: Tensor, shape: tuple[int, ...], knowledge: Knowledge) -> Reconstruction:
    """The first records as what came back."""
    x = records[:MOST_SHOWN].double().reshape(-1, *shape)
    ones, first = torch.ones(len(x), dtype=x.dtype), torch.arange(len(x))
    each, no_label = first.new_ones(len(x)), torch.zeros_like(ones)
    chosen = Selection(x, no_label, ones, each, each, ones, torch.zeros(len(x), 5), first)
    return Reconstruction.at_once(OUTRIGHT, x, no_label, ones, knowledge, selection=chosen)
