"""The stages of an audit: attack, score, certify, expose.

Attack: which attacks apply, their batches of restarts, and what they bring back. Score: every deciding
attack is a test of its own, and all tests are judged together. They share one set of permuted subsets, so
that the level of 1% holds over all of them (``evaluation/null.py``); what is shown of it, pictures,
histogram and slider, is of the strongest test. Certify: KKT residuals, and what other sets keep of a
reconstruction; with training data the KKT certificate is of the data, without of the best restart's
candidates. Expose: which records are at risk, from the data and after the attacks, so it never reaches
them, and it decides nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from residuum import similarity
from residuum.attacks import PRESETS, Attack, AttackConfig, every_attack, select
from residuum.attacks.base import Watcher, ran
from residuum.attacks.run import FEWEST, resolve
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.objectives import permuted
from residuum.attacks.stationarity.solution import (
    Explained,
    best_residual,
    best_rows,
    explained,
    solution,
)
from residuum.auditing.budget import (
    ATTACK_SHARE,
    BASELINE_SHARE,
    CERTIFICATE_SHARE,
    LEAST_BASELINE,
    LEAST_UNIQUENESS,
    MAX_RESTARTS,
    PARTS,
    UNIQUENESS_SHARE,
    Allowance,
    Batch,
    Plan,
    first_batch,
    forecast,
    next_batch,
)
from residuum.auditing.controls import Claim
from residuum.auditing.result import Evidence
from residuum.auditing.verdict import CLASS_LIKE, NEAR_COPY, RESEMBLES, AttackOutcome, Findings
from residuum.errors import InconclusiveError, InputError, PluginError, ResiduumError
from residuum.evaluation import Calibration, score
from residuum.evaluation.matching import METRICS, Array, Field, greedy_in_sets, lay_out
from residuum.evaluation.null import SIGNIFICANCE, draw_sets, fewest_beyond_chance, step_down
from residuum.evaluation.scoring import (
    DECIDING,
    CandidatePool,
    affordable,
    control_of,
    joined,
    label_name,
    margins,
    selected_pool,
    whole_pool,
)
from residuum.networks import dense_chain
from residuum.networks.network import Network
from residuum.records import (
    Certificate,
    Dataset,
    Exposure,
    Knowledge,
    Reconstruction,
    Scores,
    Uniqueness,
)
from residuum.risk.run import FEWEST_HELD_OUT, expose
from residuum.surfaces.surface import WEIGHTS, Surface, surfaces
from residuum.theory import certify
from residuum.theory.kkt import evaluate
from residuum.theory.uniqueness import uniqueness

if TYPE_CHECKING:
    from residuum.auditing.artifacts import AuditRun

Watch = Callable[[str, int, int], Watcher]  # attack, its restarts done before, and in all
CONVICTS_ONLY = "it leaves no residual, so what it does not find says nothing"
MOST_SAMPLES = 1000  # of a KKT certificate: its multipliers are a problem in as many unknowns
MOST_BYTES = 2 << 30  # of its gradients
# Of a uniqueness certificate: candidates, and values in them, that a share of the budget is enough for.
MOST_CERTIFIED, MOST_UNKNOWNS = 40, 400_000
TRAINING, CANDIDATES = "training samples", "candidates of the best restart"
MOST_REASON = 300  # characters of what a stranger's attack says when it fails
MOST_EXPOSED = 2000  # records whose exposure an audit looks at
MOST_GRADIENTS = 2 * 10**8  # records times parameters, likewise, for networks that are no chain
OUT_OF_TIME = "skipped: time budget exhausted"
MAX_BASELINE = 3.0  # times its share: a baseline that takes longer is skipped
MIN_SECONDS = 1e-3  # that an attack is given: the solver needs a positive time limit
ELSEWHERE = "residuum exposure takes as long as it needs"
MOST_SETS, MOST_VALUES = 100, 5000  # held-out sets in the report, and values it carries of them
MOST_SHOWN = 300  # samples that the record keeps beside what was found: a page shows fewer
# Of what a public picture leaves of a sample (1 - ncc), the most that a better one may leave. Fixed on
# digits: of two means of a class one is the nearer by chance, by a quarter in one case of a hundred.
NEARER = 0.75


@dataclass(frozen=True)
class Attacked:
    """All that the attacks brought back, deciding ones first, and the batches they took."""

    outcomes: tuple[AttackOutcome, ...]
    found: tuple[Reconstruction, ...]  # of the deciding attacks, all restarts together
    baselines: tuple[Reconstruction, ...]
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class AttackStage:
    """Everything the attacks need.

    store: keeps finished batches, so that an interrupted audit goes on.
    batches: exactly these instead of what the budget allows.
    watch: makes the watcher of a batch.
    say: told what it will all take.
    exact: whether the steps of ``config`` were asked for.
    samples: of the training set, for the forecast.
    only: these attacks.
    clock: time until the attacks must end, whatever is left of their plan.
    """

    checkpoint: Network
    knowledge: Knowledge
    config: AttackConfig
    seconds: float
    store: AuditRun | None = None
    watch: Watch | None = None
    batches: tuple[Batch, ...] = ()
    baselines: bool = True
    say: Callable[[str], None] | None = None
    exact: bool = False
    samples: int = 0
    only: tuple[str, ...] = ()
    clock: Allowance = field(default_factory=lambda: Allowance(math.inf))

    def run(self) -> Attacked:
        """Run what applies; the deciding attacks share their part of the budget, by their ``part``.

        Attacks that run once come first and leave what they do not need; batches of restarts fill the
        rest, in equal shares, planned from timed steps; baselines come last. A fault of one attack is a
        row that says so, never the end of the audit.
        """
        there = surfaces(self.checkpoint, self.knowledge)
        known = {n: one for n, one in every_attack().items() if self.baselines or not one.baseline}
        known = {name: one for name, one in known.items() if not self.only or name in self.only}
        known = dict(sorted(known.items(), key=lambda item: item[1].baseline))  # those last
        on = {name: there.get(one.surface, there[WEIGHTS]) for name, one in known.items()}
        rows: dict[str, AttackOutcome] = {}
        for name, one in known.items():
            with _own_fault(name, one, rows):
                why_not = one.why_not(on[name], self.knowledge)
                if reason := why_not or one.left_out(on[name], self.knowledge):
                    rows[name] = AttackOutcome(name, not one.baseline, not why_not, False, reason)
        timed = [n for n, one in known.items() if not one.baseline and one.pace != "formula"]
        timed = [name for name in timed if name not in rows]
        found: dict[str, Reconstruction] = {}
        done: list[Batch] = []

        def attack(name: str, plan: Plan | None, share: float) -> None:
            one = known[name]
            if one.baseline and self.clock.left <= 0:
                rows[name] = AttackOutcome(name, False, True, False, OUT_OF_TIME)
                return
            with _own_fault(name, one, rows):
                part, batches = self._found(name, one, on[name], plan, share)
                cut = self._unfinished(batches, part) if one.pace == "batches" else ""
                rows[name] = outcome_of(one, on[name], part).replace(unfinished=cut)
                found[name] = part
                done.extend(batches)

        # What runs once comes first, and leaves what it does not need of its share to the batches.
        left, parts = ATTACK_SHARE * self.seconds, sum(known[name].part for name in timed)
        batched = [name for name in timed if known[name].pace == "batches"]
        for name in timed:
            if name not in batched:  # the same for the same budget
                attack(name, None, ATTACK_SHARE * self.seconds * known[name].part / parts)
                left -= found[name].seconds if name in found else 0.0
        share = max(left, 0.0) / max(1, len(batched))
        plans: dict[str, Plan] = {}
        for name in batched if not self.batches else ():
            with _own_fault(name, known[name], rows):
                plans[name] = self._plan(name, share)
        if self.say is not None and not self.batches:
            self.say(forecast(self.seconds, list(plans.values()), self.samples))
        for name in known:
            if name not in rows:
                attack(name, plans.get(name), share)
        return Attacked(
            # A baseline that does not apply is nobody's loss; one that failed is said.
            tuple(rows[n] for n, one in known.items() if not one.baseline or rows[n].applies),
            tuple(found[n] for n, one in known.items() if n in found and not one.baseline),
            tuple(found[n] for n, one in known.items() if n in found and one.baseline),
            tuple(done),
        )

    def _unfinished(self, batches: list[Batch], found: Reconstruction) -> str:
        """Return what is missing of the steps and restarts that the preset plans, "" if nothing."""
        plan = self.config
        whole = [batch for batch in batches if batch.steps >= plan.steps]
        cut_by_clock = found.status.count("time")
        finished = sum(batch.restarts for batch in whole) - cut_by_clock
        if finished >= plan.restarts:
            return ""
        longest = max(batch.steps for batch in batches)
        if longest < plan.steps:
            return f"each restart ran {longest} of {plan.steps} steps"
        return f"{max(finished, 0)} of {plan.restarts} restarts ran all {plan.steps} steps"

    def budget_for_full_plan(self, attacked: Attacked) -> float | None:
        """Estimate the budget, in seconds, at which every attack finishes its plan.

        The estimate comes from the time that the attacks took. None if no attack ran in batches.
        """
        each: dict[str, float] = {}
        for row in attacked.outcomes:
            work = sum(b.restarts * b.steps for b in attacked.batches if b.attack == row.name)
            if work:
                each[row.name] = row.seconds * self.config.steps / work
        if not each:
            return None
        restarts = max(PARTS, self.config.restarts)
        return restarts * max(each.values()) * len(each) / ATTACK_SHARE

    def left_on_permuted(self, name: str, steps: int, seconds: float) -> float | None:
        """Residual of the judged layers that one restart leaves where there is nothing to explain.

        None where ``seconds`` end before its steps: fewer would leave more, and acquit too easily. A
        closed form has no such run: what it does not explain stays whole.
        """
        one = every_attack()[name]
        if not isinstance(one, Stationarity):
            return 1.0
        surface = surfaces(self.checkpoint, self.knowledge)[one.surface]
        kind = permuted(one.objective, self.config.seed)
        config = replace(self.config, objective=name, restarts=1, steps=steps, seconds=seconds)
        config = resolve(self.checkpoint, self.knowledge, config)
        found = Stationarity(name, kind).run(surface, self.knowledge, config)
        return None if "time" in found.status else explained(surface, found, kind).worst

    def once_more(self, name: str, batch: Batch | None, seconds: float) -> Reconstruction | None:
        """An attack that the audit ran, here: this batch of it, or its one run; None: it does not apply."""
        one, there = every_attack()[name], surfaces(self.checkpoint, self.knowledge)
        surface = there.get(one.surface, there[WEIGHTS])
        if one.why_not(surface, self.knowledge):
            return None
        config = replace(self.config, objective=name, seconds=seconds)
        config = config if batch is None else batch.of(config)
        config = resolve(self.checkpoint, self.knowledge, config)
        return ran(one, surface, self.knowledge, config)

    def _plan(self, name: str, share: float) -> Plan:
        """The first batch of an attack, as planned before an interruption where there was one."""
        config = replace(self.config, objective=name)
        if self.store and (batch := self.store.planned(name)) is not None:
            return Plan(batch, share, config.steps)
        plan = first_batch(self.checkpoint, self.knowledge, config, share, exact=self.exact)
        if self.store:
            self.store.plan(plan.batch)
        return plan

    def _found(
        self, name: str, one: Attack, surface: Surface, plan: Plan | None, share: float
    ) -> tuple[Reconstruction, list[Batch]]:
        """What an attack brings back, and the batches it took."""
        if one.baseline:
            return self._baseline(name, one, surface), []
        if one.pace != "batches":
            clocked = one.pace != "sized"  # repeated batches have no clock
            seconds = math.inf if self.batches and clocked else share
            config = replace(self.config, objective=name, seconds=seconds)
            config = resolve(self.checkpoint, self.knowledge, config)
            return ran(one, surface, self.knowledge, config), []
        parts: list[Reconstruction] = []
        batches: list[Batch] = []
        for batch in self._schedule(name, plan, share, parts):
            done = sum(before.restarts for before in batches)
            every = self._restarts(name, plan, share, done, parts)
            parts.append(self._batch(one, surface, batch, done, max(every, done + batch.restarts)))
            batches.append(batch)
        if not parts:
            raise NotAsked
        return merged(parts), batches

    def _schedule(
        self, name: str, plan: Plan | None, share: float, parts: list[Reconstruction]
    ) -> Iterator[Batch]:
        """Batches one after another; ``parts`` grows as they are finished."""
        if plan is None:
            yield from (batch for batch in self.batches if batch.attack == name)
            return
        batch: Batch | None = plan.batch
        done: list[tuple[Batch, float]] = []
        while batch is not None:
            yield batch
            if self.clock.left <= 0:
                return
            done.append((batch, parts[-1].seconds))
            candidates = len(parts[-1].x) // max(1, parts[-1].restarts)
            batch = next_batch(done, candidates, share)

    def _restarts(
        self, name: str, plan: Plan | None, share: float, done: int, parts: list[Reconstruction]
    ) -> int:
        """How many restarts an attack will have in all, by what one took or should take."""
        if plan is None:
            return sum(batch.restarts for batch in self.batches if batch.attack == name)
        took = sum(part.seconds for part in parts) if done else plan.seconds
        each = took / (done or plan.batch.restarts)
        return min(MAX_RESTARTS, int(share / each)) if each > 0 else MAX_RESTARTS

    def _batch(
        self, one: Attack, surface: Surface, batch: Batch, done: int, every: int
    ) -> Reconstruction:
        """One batch: read back where it is finished, otherwise run, or gone on with."""
        if self.store and (found := self.store.load(batch)) is not None:
            return found
        config = resolve(self.checkpoint, self.knowledge, batch.of(self.config))
        config = replace(config, seconds=max(self.clock.left, MIN_SECONDS))
        watch = self.watch(batch.attack, done, every) if self.watch else None
        state = self.store.state(batch) if self.store else None
        found = ran(one, surface, self.knowledge, config, state_path=state, watch=watch)
        if self.store:
            self.store.save(batch, found)
        return found

    def _baseline(self, name: str, one: Attack, surface: Surface) -> Reconstruction:
        """Fewer candidates for want of time."""
        device, seed = self.config.device, self.config.seed
        config = PRESETS.get(name, self.config)
        config = replace(config, objective=name, device=device, seed=seed)
        config = resolve(self.checkpoint, self.knowledge, config)
        once = ran(one, surface, self.knowledge, replace(config, steps=1))
        needed = once.seconds * config.steps
        allowed = max(LEAST_BASELINE, BASELINE_SHARE * self.seconds)
        if needed > allowed and not self.batches:  # repeated batches have no clock
            fit = max(FEWEST, int(config.candidates * allowed / needed))
            config = replace(config, candidates=min(config.candidates, fit))
            # A pass through a large network takes its time, however few candidates there are.
            fewer = ran(one, surface, self.knowledge, replace(config, steps=1))
            if fewer.seconds * config.steps > MAX_BASELINE * allowed:
                raise OutOfTime
        return ran(one, surface, self.knowledge, config)


class OutOfTime(Exception):
    """There is no time for this baseline."""


class NotAsked(Exception):
    """None of the batches to be repeated is this attack's."""


@contextmanager
def _own_fault(name: str, one: Attack, rows: dict[str, AttackOutcome]) -> Iterator[None]:
    """What goes wrong in one attack and need not stop the others is said in its row."""

    def row(applies: bool, reason: str) -> None:
        rows[name] = AttackOutcome(name, not one.baseline, applies, False, reason[:MOST_REASON])

    try:
        yield
    except NotAsked:
        row(True, "no batch of it was asked for")
    except OutOfTime:
        row(True, OUT_OF_TIME)
    except PluginError as problem:
        row(True, f"failed: {problem.message}")
    except InputError as problem:  # what an attack of this package refuses, the user can mend
        if one.pace == "batches" and not one.outside:
            raise
        row(one.outside, problem.message)
    except Exception as problem:  # the fault of another package is no fault of the network
        if not one.outside:
            raise
        row(True, f"failed: {type(problem).__name__}: {problem}")


def merged(parts: list[Reconstruction]) -> Reconstruction:
    """Batches of one attack as one reconstruction, selected anew over all restarts.

    Restarts are numbered on, since agreement between restarts is what the selection counts.
    """
    if len(parts) == 1:
        return parts[0]
    offsets = [sum(part.restarts for part in parts[:i]) for i in range(len(parts))]
    found = parts[0].replace(
        **{
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("x", "labels", "lam", "loss", "layers")
        },
        run=torch.cat([part.run + offset for part, offset in zip(parts, offsets, strict=True)]),
        status=tuple(status for part in parts for status in part.status),
        settings={**parts[0].settings, "restarts": sum(part.restarts for part in parts)},
        selection=None,
        seconds=sum(part.seconds for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
    return found.replace(selection=select(found))


def outcome_of(one: Attack, surface: Surface, found: Reconstruction) -> AttackOutcome:
    """One attack that was run, in the words of the verdict.

    Only a residual that was measured here acquits: of an objective, or of an attack of this package.
    """
    measured = one.acquits and (one.pace == "batches" or not one.outside)
    said = Explained(silent="" if one.baseline else CONVICTS_ONLY)
    far = explained(surface, found) if measured else said
    return AttackOutcome(
        found.attack,
        not one.baseline,
        True,
        True,
        "a baseline: reported, never deciding" if one.baseline else one.why(surface),
        surface=surface.name,
        restarts=found.restarts,
        steps=int(found.steps[-1]) if len(found.steps) else 0,
        candidates=len(found.x),
        diverged=sum(status == "diverged" for status in found.status),
        residual=far.worst,
        **vars(far),
        seconds=found.seconds,
    )


def certified(
    checkpoint: Network,
    train: Dataset | None,
    found: tuple[Reconstruction, ...],
    knowledge: Knowledge,
    seconds: float,
) -> dict[str, Any]:
    """Both certificates, or why there is none: fields of ``AuditResult``."""
    kkt, of = _kkt(checkpoint, train, found, CERTIFICATE_SHARE * seconds)
    unique, why_not = _uniqueness(checkpoint, found, knowledge, UNIQUENESS_SHARE * seconds)
    fields = ("certificate", "certificate_of", "uniqueness", "uniqueness_reason")
    return dict(zip(fields, (kkt, of, unique, why_not), strict=True))


def _kkt(
    checkpoint: Network, train: Dataset | None, found: tuple[Reconstruction, ...], seconds: float
) -> tuple[Certificate | None, str]:
    """The certificate and what it is of; None and the reason where there is none.

    seconds: gates at kinks are freed as long as that.
    """
    if train is not None:
        x, y, subject = train.x, train.y, TRAINING
    else:
        rows = best_rows(found[0]) if found else None
        if rows is None:
            return None, "no restart converged to candidates that could be certified"
        x, y, subject = found[0].x[rows], found[0].labels[rows], CANDIDATES
    if len(x) > MOST_SAMPLES:
        return None, f"not computed for more than {MOST_SAMPLES} samples; there are {len(x)}"
    model = checkpoint.module
    # Closed forms are for MLPs: of any other network the gradient of every sample is held.
    held = 8 * len(x) * sum(t.numel() for t in checkpoint.theta.values())
    if dense_chain(model) is None and held > MOST_BYTES:
        return None, (
            f"not computed: the gradients of {len(x)} samples take {held / 2**30:.1f} GiB, above "
            f"{MOST_BYTES / 2**30:.0f}"
        )
    try:
        task = checkpoint.task or "auto"
        return certify(model, x, y, task=task, seconds=seconds), subject
    except ResiduumError as problem:
        # Nothing is wrong with the input if a network is dead, or if its candidates fit nothing.
        if train is not None and not isinstance(problem, InconclusiveError):
            raise
        return None, f"the {subject} cannot be certified ({problem.message})"
    except RuntimeError as problem:  # a forward of somebody's own that torch cannot transform
        if checkpoint.live is None:
            raise
        return None, f"not for this kind of network ({str(problem).splitlines()[0][:200]})"


def _uniqueness(
    checkpoint: Network, found: tuple[Reconstruction, ...], knowledge: Knowledge, seconds: float
) -> tuple[Uniqueness | None, str]:
    """What other sets keep of the best restart's candidates, heaviest first, as time allows.

    ``index`` of the result counts the candidates of the first reconstruction. None and the reason
    where it is not computed.
    """
    if checkpoint.live is not None:
        why = "where a network that is kept as given has its switches is not known"
        return None, f"not for this kind: {why}"
    if seconds < LEAST_UNIQUENESS:
        return None, f"not computed: the budget leaves it less than {LEAST_UNIQUENESS:g} seconds"
    if not found or (rows := best_rows(found[0])) is None:
        return None, "no restart converged to candidates that could be certified"
    model = checkpoint.module
    if found[0].x[rows].numel() > MOST_UNKNOWNS:
        return None, f"not computed for more than {MOST_UNKNOWNS} unknown values"
    try:
        chosen = solution(model, found[0], "best")
        unique = uniqueness(
            chosen.kkt, box=knowledge.box(chosen.x[0]), samples=MOST_CERTIFIED, seconds=seconds
        ).replace(best_residual=best_residual(model, found))
    except ResiduumError as problem:  # candidates are nobody's input: no error of the user's
        return None, f"not computed: {problem.message}"
    return unique.replace(index=rows[unique.index]), ""


def exposed(
    checkpoint: Network,
    data: Dataset | None,
    claim: Claim | None,
    knowledge: Knowledge,
    found: Sequence[Reconstruction],
    shown: str,
) -> tuple[Exposure | None, str]:
    """Which records are at risk, or None and why not; shown: the attack whose candidates stand beside."""
    if data is None or claim is None:
        return None, "there are no training samples to look at"
    parameters = sum(t.numel() for t in checkpoint.theta.values())
    chain = checkpoint.chain is not None
    if len(data) > MOST_EXPOSED or (not chain and len(data) * parameters > MOST_GRADIENTS):
        return None, f"too many samples for an audit: {ELSEWHERE}"
    pool = claim.pool
    if pool is not None and (
        len(pool) < FEWEST_HELD_OUT or pool.shape != data.shape or len(pool.y.unique()) < 2
    ):
        pool = None
    parts = [part for part in found if part.attack == shown]
    candidates = whole_pool(parts[0]).x if parts else None
    if candidates is not None and candidates.shape[1:] != data.x.shape[1:]:
        candidates = None
    try:
        return expose(checkpoint, data, pool, knowledge, found=candidates), ""
    except ResiduumError as problem:
        return None, str(problem)


@dataclass(frozen=True)
class OneTest:
    """The candidates of one attack against the training set; adjusted: p over all tests together."""

    field: Field
    gain: Array
    control: Calibration
    adjusted: float = 1.0

    @property
    def survives(self) -> bool:
        """Whether it found more than chance gives all tests together."""
        return self.adjusted <= SIGNIFICANCE

    @property
    def rule(self) -> str:
        """What counts as recovered here."""
        return f"{DECIDING} > {self.control.threshold:.3g}"


def run_tests(
    pools: dict[str, CandidatePool],
    claim: Claim,
    seed: int,
    subsets: int,
    seconds: float,
    *,
    must: bool = True,
) -> tuple[dict[str, OneTest], list[str]]:
    """Every pool of candidates as a test on common subsets; none without a control, and notes.

    Fewer subsets than asked for fit ``seconds``; where even the fewest do not, they are drawn all the
    same, unless they need not (``must``): then there are no tests.
    """
    metric, notes = METRICS[DECIDING], list[str]()
    laid: dict[str, tuple[Field, Array]] = {}
    for name, pool in pools.items():
        said: list[str] = []
        try:
            field = lay_out(pool.x, claim.train, claim.pool, said, seed=seed)
        except InconclusiveError as problem:
            if len(pools) == 1:
                raise
            notes.append(f"{name}: {problem.message}")
            continue
        notes += [note for note in said if note not in notes]
        if field.pool:
            laid[name] = field, field.gain(metric)
    parts = [(metric, *part) for part in laid.values()]
    drawn = affordable(parts, seed, subsets, seconds, fewest=must)
    if not drawn:
        return {}, [*notes, "not judged, for want of time"]
    if laid and drawn < subsets:
        notes.append(f"{drawn} of {subsets} subsets drawn, for want of time")
    controls = {name: control_of(metric, *part, seed, drawn) for name, part in laid.items()}
    if not controls:
        return {}, notes
    adjusted = step_down(np.stack([one.excess for one in controls.values()]))
    return {
        name: OneTest(*laid[name], one, float(p) if one.recovered.any() else 1.0)
        for (name, one), p in zip(controls.items(), adjusted, strict=True)
    }, notes


def findings(
    tests: dict[str, OneTest],
    n: int,
    graded: dict[int, str] | None = None,
    row_numbers: Sequence[int] | None = None,
) -> Findings:
    """What all tests found together. Without a survivor nothing is recovered, whatever one matched.

    A sample counts once however many tests hold it, and so it does in the held-out sets that give
    chance: both unions are over the same tests, the survivors where there are any. row_numbers: of the
    samples in the user's file, by default their positions.
    """
    numbers = range(n) if row_numbers is None else row_numbers
    alive = {name: one for name, one in tests.items() if one.survives}
    recovered = np.any([one.control.recovered for one in alive.values()] or [np.zeros(n, bool)], 0)
    chance = np.any([one.control.chance for one in (alive or tests).values()], 0)
    expected, count = float(chance.sum() / len(chance)), int(recovered.sum())
    excess = np.stack([one.control.excess for one in tests.values()])
    beyond = [
        fewest_beyond_chance(excess, one.control.own_excess, i)
        for i, (name, one) in enumerate(tests.items())
        if name in alive
    ]
    grades = list((graded or {}).values())
    return Findings(
        n=n,
        recovered=count,
        expected_by_chance=expected,
        interval=(float(min(max(beyond, default=0), count)), float(count)),
        p_value=min(one.adjusted for one in tests.values()),
        metric=DECIDING,
        rule=", ".join(dict.fromkeys(one.rule for one in (alive or tests).values())),
        tests=len(tests),
        survivors=tuple(alive),
        samples=tuple(numbers[int(i)] for i in np.flatnonzero(recovered)),
        grades={grade: grades.count(grade) for grade in dict.fromkeys(grades)},
    )


def grades(test: OneTest, labels: Array | None) -> dict[int, str]:
    """How near each recovered sample came, by what public samples of its kind would give.

    near-copy: nearer to the sample, by a quarter, than any held-out sample and than the mean of its
    class among them; resembles: so much nearer than that mean; class-like: not even that. Nearness is
    the deciding metric.
    """
    field = test.field
    samples, pool = field.samples[: field.n], field.samples[field.n :]
    found: dict[int, str] = {}
    rows = np.flatnonzero(test.control.recovered)
    if not len(rows):
        return found
    nearest = similarity.ncc(samples[rows], pool).amax(1)
    for i, neighbour in zip(rows.tolist(), nearest.tolist(), strict=True):
        alike = pool if labels is None else pool[torch.from_numpy(labels[field.n :] == labels[i])]
        mean = (alike if len(alike) else pool).mean(0)
        typical = float(similarity.ncc(samples[i : i + 1], mean[None]))
        left = 1 - float(test.control.value[i])
        own = left <= NEARER * (1 - typical)
        near = own and left <= NEARER * (1 - neighbour)
        found[i] = NEAR_COPY if near else RESEMBLES if own else CLASS_LIKE
    return found


@dataclass(frozen=True)
class Judged:
    """Every attack by itself, all together, and what is shown: fields of ``AuditResult``."""

    attacks: tuple[AttackOutcome, ...]
    findings: Findings | None = None
    shown: str = ""
    scores: Scores | None = None
    selected: Scores | None = None
    evidence: Evidence | None = None


def judge(
    checkpoint: Network,
    attacked: Attacked,
    claim: Claim | None,
    seed: int,
    subsets: int,
    seconds: float,
) -> Judged:
    """Score what the attacks found.

    The tests are made whatever the clock says. Baselines and the attacks' own choice come after them,
    then the published metrics, as far as ``seconds`` reach.
    """
    if claim is None or not attacked.found:
        return Judged(attacked.outcomes)
    start, train = time.monotonic(), claim.train
    pools = {part.attack: whole_pool(part) for part in attacked.found}
    tests, notes = run_tests(pools, claim, seed, subsets, seconds / 2)
    took = time.monotonic() - start
    model = checkpoint.module
    outputs = evaluate(model, train.x.to(next(model.parameters()).dtype))

    def left() -> float:
        return seconds - (time.monotonic() - start)

    def scored(pool: CandidatePool, **options: Any) -> Scores:
        options |= {"multipliers": pool.lam, "outputs": outputs}
        return score(pool.x, train, claim.pool, seed=seed, subsets=subsets, **options)

    def beside(name: str, pool: CandidatePool) -> Scores | None:
        """The deciding metric of candidates that do not decide, unless the clock forbids."""
        tested = sum(len(one.x) for one in pools.values())
        if len(pool.x) and took * len(pool.x) / tested <= left():
            return scored(pool, metrics=[DECIDING], seconds=left())
        if len(pool.x):
            notes.append(f"not scored by itself, for want of time: {name}")
        return None

    baselines = {part.attack: beside(part.attack, whole_pool(part)) for part in attacked.baselines}
    selected = beside(
        "the attacks' own choice", joined([selected_pool(part) for part in attacked.found])
    )
    rows = tuple(
        _with_counts(row, tests.get(row.name), baselines.get(row.name)) for row in attacked.outcomes
    )
    if not tests:
        scores = scored(pools[attacked.found[0].attack], seconds=left())
        scores = scores.replace(notes=tuple(dict.fromkeys((*notes, *scores.notes))))
        found = Findings(len(train), reason=scores.reason, metric=DECIDING)
        shown = evidence(claim, scores, outputs, None, seed)
        return Judged(rows, found, attacked.found[0].attack, scores, selected, shown)
    strongest = strongest_of(tests)
    graded: dict[int, str] = {}
    order = (CLASS_LIKE, RESEMBLES, NEAR_COPY)
    for one in tests.values():
        if one.survives:
            for i, grade in grades(one, one.field.strata).items():
                graded[i] = max(graded.get(i, CLASS_LIKE), grade, key=order.index)
    scores = scored(pools[strongest], before=tests[strongest].control, seconds=left())
    scores = scores.replace(notes=tuple(dict.fromkeys((*notes, *scores.notes))))
    shown = evidence(claim, scores, outputs, tests[strongest], seed)
    found = findings(tests, len(train), graded, train.rows)
    found = found.replace(set_aside_matches=matches_among(claim.set_aside, pools, tests))
    return Judged(rows, found, strongest, scores, selected, shown)


def matches_among(
    samples: Dataset | None, pools: dict[str, CandidatePool], tests: dict[str, OneTest]
) -> tuple[int, ...]:
    """Return the row numbers of ``samples`` that some candidate matches, by the rule of its test."""
    if samples is None:
        return ()
    matched = torch.zeros(len(samples), dtype=torch.bool)
    for name, test in tests.items():
        candidates = pools[name].x.double()
        candidates = candidates[candidates.flatten(1).isfinite().all(1)]
        nearest = similarity.ncc(samples.x.double(), candidates.reshape(-1, *samples.shape)).amax(1)
        matched |= nearest > test.control.threshold
    return tuple(samples.take(matched).rows) if bool(matched.any()) else ()


def strongest_of(tests: dict[str, OneTest]) -> str:
    """The test with the least p; several share the least that there is: then the one with most to show."""

    def rank(name: str) -> tuple[float, float, int]:
        one = tests[name]
        return one.adjusted, one.control.p_value, -int(one.control.recovered.sum())

    return min(tests, key=rank)


def _with_counts(row: AttackOutcome, test: OneTest | None, beside: Scores | None) -> AttackOutcome:
    """The outcome with its counts: of its own test, or, for a baseline, of a comparison that decides
    nothing.
    """
    if test is not None:
        return row.replace(
            recovered=int(test.control.recovered.sum()),
            expected_by_chance=test.control.expected_by_chance,
            p_value=test.control.p_value,
            adjusted=test.adjusted,
            rule=test.rule,
        )
    if beside is None:
        return row
    return row.replace(
        recovered=beside.recovered,
        expected_by_chance=beside.expected_by_chance,
        p_value=beside.p_value,
        rule=beside.rule,
    )


def evidence(
    claim: Claim, scores: Scores, outputs: Tensor, test: OneTest | None, seed: int
) -> Evidence:
    """The samples worth showing, best first, and the values behind histogram and slider."""
    train = claim.train
    found = [row.matches[scores.deciding].score for row in scores.per_sample]
    values = torch.tensor([float("nan") if value is None else value for value in found])
    order = values.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    shown = order[:MOST_SHOWN]
    single = outputs.shape[1] == 1
    flat = train.x.flatten(1).double()
    spread = (flat.quantile(0.95, 0) - flat.quantile(0.05, 0)).reshape(train.shape)
    near = None
    if claim.pool is not None and claim.pool.shape == train.shape:
        alike = similarity.ncc(flat[shown], claim.pool.x.flatten(1).double())
        near = claim.pool.x[alike.argmax(1)]
    return Evidence(
        index=shown,
        x=train.x[shown],
        values=values,
        null=torch.zeros(0) if test is None else null_values(test, seed),
        null_sets=null_sets(len(train)),
        mean=train.mean,
        outputs=outputs[:, 0] if single else margins(outputs, train.y),
        output_name="network output" if single else "margin",
        labels=tuple(
            "" if row.label is None else label_name(row.label, train) for row in scores.per_sample
        ),
        near=near,
        features=train.features,
        units=train.units,
        scale=train.scale,
        offset=train.offset,
        spread=spread if train.x.ndim == 2 else None,
    )


def null_sets(n: int) -> int:
    """How many held-out sets of n samples the report draws: as many as it can carry, at least 10."""
    return max(10, min(MOST_SETS, MOST_VALUES // n))


def null_values(test: OneTest, seed: int) -> Tensor:
    """Values of the matches of held-out sets of the training set's size. (sets * n,)."""
    field, gain, n = test.field, test.gain, test.field.n
    labels = np.zeros(gain.shape[1], dtype=int) if field.strata is None else field.strata
    rng = np.random.default_rng((seed, 2))  # a stream of its own: the test's draws stay as they are
    sets = n + draw_sets(labels[n:], labels[:n], null_sets(n), rng)
    candidate = greedy_in_sets(gain, sets)
    matched = candidate >= 0
    return torch.from_numpy(gain[candidate[matched], sets[matched]])
