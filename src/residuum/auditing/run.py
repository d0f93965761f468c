"""From a network to a verdict: inspect, attack, select, score, certify, decide.

The attack stage is handed the checkpoint and the granted knowledge. Data and held-out samples are
checked for fit before it, and compared with only after it has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from residuum import plugins
from residuum.attacks import PRESETS, AttackConfig, every_attack
from residuum.auditing.budget import (
    CHECK_SHARE,
    LEAST_SCORE,
    SCORE_SHARE,
    Allowance,
    Batch,
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
from residuum.auditing.inputs import (
    as_knowledge,
    check_fit,
    fit_of,
    scale_notes,
    shape_for,
    suited,
    task_of,
)
from residuum.auditing.result import SUITE, AuditResult, facts, others, tried
from residuum.auditing.stages import Attacked, AttackStage, Watch, certified, exposed, judge
from residuum.auditing.stored import Stored, audit_records, network_and_records, unconfirmed
from residuum.auditing.twin import audit_twin
from residuum.auditing.verdict import (
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
from residuum.checkpoints import as_checkpoint, inspect_checkpoint, weights_hash
from residuum.checkpoints.contents import with_release
from residuum.checkpoints.surfaces import chosen, head_of
from residuum.datasets.given import both
from residuum.errors import require_known
from residuum.evaluation.null import SUBSETS
from residuum.records import Checkpoint, Knowledge
from residuum.records.rundir import environment

if TYPE_CHECKING:
    from residuum.auditing.artifacts import AuditRun


def audit(
    model: Checkpoint | nn.Module | Mapping[str, Tensor] | str | Path | Any,
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
    """Attack ``model`` from its weights alone and say whether its training data came back.

    model: a live network of any class, its state_dict(), a fitted MLPClassifier or MLPRegressor of
        scikit-learn, a Checkpoint, or the path of a file (``docs/networks.md``), which is also
        looked through for records that it holds outright (``stored``).
    data: the training samples as (x, y), a Dataset, a DataFrame, a DataLoader, a dataset with
        items, or the path of an .npz, a .csv or a folder (``datasets/given.py``).
    holdout: samples it never saw, likewise, labels optional, at least 100; one file may hold both;
        without either the verdict is inconclusive.
    knowledge: what the attacker is told, also as a dictionary.
    budget: wall clock, such as "10min": as many batches of restarts as fit, at least one.
    vouch: the auditor's word that network and samples were read rightly, where it does not show.
    twin: train and attack a network known to hold its data, without which "no leak found" is not
        said, recipe: how, see ``twin.Recipe``.
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
    path = model if isinstance(model, str | Path) else None
    if path is not None:
        model, stored = network_and_records(path, lambda: as_checkpoint(path, arch, shape))
        if model is None:
            settings |= {"file": str(Path(path).resolve())}
            hashes = hashes or {"checkpoint": weights_hash(path)}
    if model is None and stored is not None:
        return audit_records(stored, train, control, knowledge, settings, dict(hashes or {}))
    checkpoint = as_checkpoint(model, arch, shape)
    if path is not None:
        knowledge = with_release(path, checkpoint, knowledge)
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
        inspection = inspect_checkpoint(checkpoint)
        fit = fit_of(checkpoint, train, control, checkpoint.task)
    for line in opening(checkpoint, fit):
        (say or (lambda _: None))(line)
    config = attack_config(preset, steps, seed, device)
    seconds = seconds_of(budget)
    told = (checkpoint, knowledge, config, seconds, store, watch, tuple(batches), baselines, say)
    samples = 0 if train is None else len(train)
    attacks = AttackStage(*told, exact=steps is not None, samples=samples, only=only)
    with clock("attack"):
        attacked = attacks.run()
    faults = {one.name: f"failed on import: {one.error}" for one in plugged if one.error}
    faults |= {name: f"failed: {said}" for name, said in plugins.faults.items()}
    plugins.faults.clear()  # said once
    broken = tuple(AttackOutcome(name, True, True, False, said) for name, said in faults.items())
    attacked = replace(attacked, outcomes=(*attacked.outcomes, *broken))
    # Repeated batches have no clock: what was drawn then is drawn again.
    scoring = math.inf if batches else max(LEAST_SCORE, SCORE_SHARE * seconds)
    machinery()  # read before the clock of the controls begins
    allowance = Allowance(math.inf if batches else CHECK_SHARE * seconds)
    with clock("controls"), allowance:
        claim = None if train is None else without_repeats(train, control)
        controls = Controls()
        if claim is not None:
            controls = run_controls(claim, knowledge, seed, allowance=allowance)
    with clock("score"):
        judged = judge(checkpoint, attacked, claim, seed, subsets, scoring)
        judged = replace(judged, attacks=(*outright, *judged.attacks))
        beside = membership(checkpoint, claim)
    found = judged.findings.samples if judged.findings is not None else ()
    failures = (*controls.failures, *brought_by_grant(controls, found))
    checks = Checks(failures, fit, vouched=vouch)
    vouched = (VOUCHED,) if vouch else ()
    # Where records stand in the file, what finding none elsewhere is worth is no question.
    asked = None if any(row.stands for row in outright) else judged.findings
    if claim is not None and asked is not None and open_question(asked, checks):
        with clock("permuted"), allowance:
            apart = told_by_network(checkpoint, claim.train, claim.pool, checkpoint.task, seed)
            judged = replace(
                judged, attacks=_against_permuted(attacks, judged.attacks, attacked, allowance)
            )
        checks = checks.replace(told_apart=apart)
        if acquitting(judged.attacks) and (vouch or not checks.strangers):
            with clock("twin"), allowance:
                made = Twin(reason="it was not wanted (--no-twin)")
                if twin:
                    made = audit_twin(attacks, claim, inspection, attacked, recipe, allowance)
                checks = checks.replace(twin=made)
    with clock("certify"):
        certificates = certified(checkpoint, train, attacked.found, knowledge, seconds)
    with clock("exposure"):
        exposure, unexposed = exposed(
            checkpoint, train, claim, knowledge, attacked.found, judged.shown
        )
    through_head = () if head is None else (head.note,)
    taken = (*vouched, *through_head, *unconfirmed(outright), *checkpoint.assumptions)
    verdict = decide(judged.findings, judged.attacks, checks, taken)
    drawn = subsets if judged.scores is None else judged.scores.subsets or subsets
    known = every_attack()
    assumed = [known[row.name].assumes for row in judged.attacks if row.ran and row.name in known]
    notes = [note for part in attacked.found for note in part.notes]
    notes += () if judged.scores is None else judged.scores.notes
    spent = (
        f"controls, permuted target and twin took {allowance.spent:.1f} s of a budget of "
        f"{seconds:.0f} s ({allowance.spent / seconds:.0%}; planned: at most a third)"
    )
    membership_why_not = "there are no held-out samples with labels to compare with"
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
        warnings=(*read, *through_head, *(fit.notes if fit else ()), *contradictions),
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

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.begun is not None:
            self.begun(stage)
        start = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - start, 3)
