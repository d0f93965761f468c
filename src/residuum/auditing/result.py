"""What an audit found: the record that every artifact is written from.

What applies to a network, what was tried, what was not, and why is one table in the terminal, the report,
``result.json`` and a dry run. Facts that were measured come first: the reasons below rest on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from residuum.attacks.trunk import dense_behind
from residuum.attacks.unmix import fed_by_input
from residuum.auditing.budget import Batch
from residuum.auditing.controls import Controls, Membership
from residuum.auditing.inputs import Fit
from residuum.auditing.verdict import AttackOutcome, Checks, Findings, Verdict
from residuum.checkpoints import Inspection, build_model
from residuum.checkpoints.surfaces import sample_shape, task_of
from residuum.networks import Architecture
from residuum.records import (
    Certificate,
    Checkpoint,
    Exposure,
    Knowledge,
    Reconstruction,
    Record,
    Scores,
    Uniqueness,
)
from residuum.records.results import MetricScore
from residuum.stationarity import by_layer, moved_layers

if TYPE_CHECKING:
    from residuum.auditing.screen import Screen

SUITE = 1  # of all attacks: one more when an attack gets stronger or a new one comes
MEASURED, TRIED, NOT_TRIED, PLANNED = "measured", "tried", "not tried", "to be tried"
MOST_NAMED = 6  # layers: a row of the table is one line or two


@dataclass(frozen=True, eq=False)
class Evidence(Record):
    """Samples and control values that the report shows beside the scores.

    index: (k,) training samples shown, best first, x: (k, *shape) they themselves as the network
        receives them.
    mean: what to add for display.
    values: (n,) deciding score of every training sample, NaN for no match.
    null: scores of held-out matches in ``null_sets`` sets of n.
    outputs: (n,) the network's output, or the margin where it has several.
    labels: (n,) names of labels.
    near: (k, *shape) the held-out sample nearest to each.
    features, units, scale, offset: of a table, see ``Dataset``.
    spread: (*shape) of every column, from its 5th to its 95th percentile.
    """

    index: Tensor
    x: Tensor
    values: Tensor
    null: Tensor
    null_sets: int
    mean: Tensor | None = None
    outputs: Tensor | None = None
    output_name: str = ""
    labels: tuple[str, ...] = ()
    near: Tensor | None = None
    features: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    scale: Tensor | None = None
    offset: Tensor | None = None
    spread: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AuditResult(Record):
    """The outcome of :func:`audit`.

    scores: of the strongest test, whose attack is ``shown``, None without data.
    findings: of all tests together.
    selected: of the attacks' own choice alone.
    certificate: see ``certificate_of``, the reason where it is None.
    batches: what was run, enough to repeat it.
    controls, checks: what the verdict may rest on.
    membership: beside it, None without held-out samples and labels.
    exposure: beside it likewise.
    warnings: what in the input may mislead, notes: what else was met.
    applies: what was tried, what was not, and why.
    suite, suite_attacks: version and names of the attacks it could choose from.
    files: what was read and written as the user named it, for the next command.
    seconds: by stage; inputs: settings and hashes of what was read.
    inspection: what the weights are, measured without data.
    reconstructions: of every attack that ran, deciding ones first.
    uniqueness: what other training sets keep of what was found, the reason where it is None.
    evidence: what the report draws from.
    assumptions, limitations: what the attacks take for granted, and what nobody must conclude.
    """

    subject: str
    created: str
    verdict: Verdict
    checkpoint: Checkpoint
    inspection: Inspection
    knowledge: Knowledge
    attacks: tuple[AttackOutcome, ...]
    reconstructions: tuple[Reconstruction, ...]
    scores: Scores | None
    selected: Scores | None
    certificate: Certificate | None
    certificate_of: str
    uniqueness: Uniqueness | None
    uniqueness_reason: str
    evidence: Evidence | None
    batches: tuple[Batch, ...]
    seconds: dict[str, float]
    settings: dict[str, Any]
    environment: dict[str, Any]
    hashes: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    limitations: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: Findings | None = None
    shown: str = ""
    controls: Controls = field(default_factory=Controls)
    checks: Checks = field(default_factory=Checks)
    membership: Membership | None = None
    exposure: Exposure | None = None
    applies: tuple[Applies, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    suite: int = 0
    suite_attacks: tuple[str, ...] = ()

    @property
    def newer(self) -> tuple[str, ...]:
        """What this version of residuum tries beyond what the audit could, one clause each."""
        from residuum.attacks import every_attack

        added = [name for name in every_attack() if name not in self.suite_attacks]
        said = (
            [f"attacks that it did not know: {', '.join(added)}"]
            if self.suite_attacks and added
            else []
        )
        if self.suite < SUITE:
            said.append(f"version {SUITE} of the attack suite, this audit ran version {self.suite}")
        return tuple(said)

    @property
    def fit(self) -> Fit | None:
        """How well the network as read does."""
        return self.checks.fit

    @property
    def screen(self) -> Screen:
        """What a person reads first, and what to do next."""
        from residuum.auditing.screen import screen

        return screen(self)

    @property
    def exit_code(self) -> int:
        """0 no leak found by these attacks, 1 leak, 3 inconclusive."""
        return self.verdict.exit_code

    @property
    def control(self) -> MetricScore | None:
        """Counts by the deciding metric, None where no held-out control set its threshold."""
        if self.evidence is None or self.scores is None or not self.scores.calibrated:
            return None
        row = self.scores.metrics[self.scores.deciding]
        return None if row.threshold_null99 is None else row

    @property
    def ranked(self) -> list[tuple[Reconstruction, int]]:
        """What the attacks chose without the data: consensus first, then by confidence.

        Each as an attack's reconstruction and the place in its selection.
        """
        found = [
            (part.selection, part, i)
            for part in self.reconstructions
            if part.selection
            for i in range(len(part.selection))
        ]
        found.sort(
            key=lambda row: (int(row[0].support[row[2]]) < 2, -float(row[0].confidence[row[2]]))
        )
        return [(part, i) for _, part, i in found]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one picture: granted, then the data's own, then the checkpoint's."""
        if self.knowledge.shape is not None:
            return self.knowledge.shape
        if self.evidence is not None:
            return tuple(self.evidence.x.shape[1:])
        return self.checkpoint.input_shape

    @property
    def directions(self) -> tuple[int | None, str]:
        """Of the first layer, and above what, or None and why, given the samples the audit knows of."""
        return self.inspection.directions_given(self.verdict.n or self.knowledge.sample_count)

    def html(self, *, blur: bool = False, redact: bool = False) -> str:
        """The report as one self-contained page."""
        from residuum.report.html import render

        return render(self, blur=blur, redact=redact)

    def save(self, path: str | Path) -> Path:
        """Write every artifact into the folder ``path``: report.html, result.json and the rest."""
        from residuum.auditing.artifacts import AuditRun, write_artifacts

        with AuditRun.open(path) as folder:
            folder.refuse_other_results()
            file = self.settings.get("file")  # of records alone: there are no weights to keep
            write_artifacts(folder, self, sources={"checkpoint": file} if file else None)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The audit in the folder ``path``; files that changed since it was written are refused."""
        from residuum.auditing.artifacts import load_parts

        record, reconstructions = load_parts(Path(path))
        return super().load(record).replace(reconstructions=reconstructions)

    def save_record(self, path: Path) -> None:
        """All but the reconstructions as one file."""
        super(AuditResult, self.replace(reconstructions=())).save(path)

    def summary(self) -> str:
        """The first screen as plain text."""
        return self.screen.text()

    def show(self) -> None:
        """Print the first screen; the whole report is in ``save(folder)``, file report.html."""
        sys.stdout.write(self.summary() + "\n")

    def _repr_html_(self) -> str:
        from residuum.report.html import inline

        return inline(self)


@dataclass(frozen=True, eq=False)
class Applies(Record):
    """One row: a fact that was measured, or something that was tried or not, and why."""

    what: str
    status: str
    why: str


def facts(
    checkpoint: Checkpoint, inspection: Inspection, knowledge: Knowledge, fit: Fit | None
) -> tuple[Applies, ...]:
    """What the network is, by running it."""
    arch, order = Architecture.parse(checkpoint.arch), inspection.homogeneity_order
    kept = checkpoint.module is not None
    rows = {
        "network": "kept as given: its forward is run by automatic differentiation"
        if kept
        else f"read as {checkpoint.arch}",
        "homogeneity": "none: weights scaled by 0.7 to 1.4 do not scale the outputs by a power, so the KKT "
        "theorem does not cover it; published attacks still worked"
        if order is None
        else f"order {order:g}: weights scaled by 0.7 to 1.4 scale the outputs so; the KKT theorem covers it",
        "layer on the input": _first(checkpoint, knowledge),
        "layers that moved": _moved(checkpoint, knowledge),
        "outputs": f"{arch.outputs}, taken as {task_of(checkpoint)}"
        + ("" if fit is None else f"; {fit.line}"),
    }
    return tuple(Applies(what, MEASURED, why) for what, why in rows.items())


def _first(checkpoint: Checkpoint, knowledge: Knowledge) -> str:
    model, sample = build_model(checkpoint), sample_shape(checkpoint, knowledge)
    name, shape, whole = fed_by_input(model, sample)
    if not name:
        said = "none is dense on the samples or on patches of them: its rows are no mixtures of samples"
        name, shape = dense_behind(model, sample)
        maps = "x".join(map(str, shape))
        return f"{said}; behind the trunk {name} is given features {maps}" if name else said
    what = (
        "dense: its rows are mixtures of samples"
        if whole
        else f"on patches {shape}: its rows mix those"
    )
    return f"{name}, {what}"


def _moved(checkpoint: Checkpoint, knowledge: Knowledge) -> str:
    if knowledge.theta0 is None:
        return "not known: no start was granted (--init)"
    moved, every = moved_layers(checkpoint.theta, knowledge.theta0), by_layer(checkpoint.theta)
    few = ", ".join(moved[:MOST_NAMED]) + (", ..." if len(moved) > MOST_NAMED else "")
    return f"{len(moved)} of {len(every)}" + (f": {few}" if moved else "")


def tried(rows: Iterable[AttackOutcome], run: str = TRIED) -> tuple[Applies, ...]:
    """Every attack, those that run first; run: what is said of these."""
    ordered = sorted(rows, key=lambda row: not row.ran)
    return tuple(Applies(row.name, run if row.ran else NOT_TRIED, row.reason) for row in ordered)


def others(**why_not: str) -> tuple[Applies, ...]:
    """Everything else of an audit, by name: why it was not tried, "" where it was."""
    return tuple(
        Applies(name.replace("_", " "), NOT_TRIED if why else TRIED, why or BESIDE[name])
        for name, why in why_not.items()
    )


BESIDE = {
    "membership": "losses and margins of data against held-out samples; beside the verdict",
    "exposure": "which samples are at risk, by weights and data; beside the verdict",
    "certificate": "how near the weights are to a KKT point of the samples",
    "uniqueness": "what other training sets keep of the candidates",
}
