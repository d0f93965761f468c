"""The result of an audit: the record that every artifact is written from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from residuum.attacks import every_attack
from residuum.auditing.applicability import PLANNED, Applies, facts, others, tried
from residuum.auditing.controls import Controls
from residuum.auditing.inputs import Fit
from residuum.auditing.outcomes import AttackOutcome, Findings
from residuum.auditing.plan import Batch
from residuum.auditing.summary import Screen, summarize
from residuum.auditing.verdict import Checks, Verdict
from residuum.networks.network import Network
from residuum.records import (
    Certificate,
    Exposure,
    Knowledge,
    Reconstruction,
    Record,
    Scores,
    Selection,
    Uniqueness,
)
from residuum.records.scores import MetricScore
from residuum.risk.membership import MembershipTest
from residuum.surfaces.inspection import Inspection

__all__ = ["PLANNED", "SUITE", "Applies", "AuditResult", "Evidence", "facts", "others", "tried"]

SUITE = 1  # of all attacks: one more when an attack gets stronger or a new one comes


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
    membership: the test of membership, None if it was not run.
    exposure: the ranking of the samples by risk, which decides nothing.
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
    checkpoint: Network
    inspection: Inspection
    knowledge: Knowledge
    attacks: tuple[AttackOutcome, ...]
    reconstructions: tuple[Reconstruction, ...]
    certificate_of: str
    uniqueness_reason: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    scores: Scores | None = None
    selected: Scores | None = None
    certificate: Certificate | None = None
    uniqueness: Uniqueness | None = None
    evidence: Evidence | None = None
    batches: tuple[Batch, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    limitations: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: Findings | None = None
    shown: str = ""
    controls: Controls = field(default_factory=Controls)
    checks: Checks = field(default_factory=Checks)
    membership: MembershipTest | None = None
    exposure: Exposure | None = None
    applies: tuple[Applies, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    suite: int = 0
    suite_attacks: tuple[str, ...] = ()

    @property
    def newer(self) -> tuple[str, ...]:
        """What this version of residuum tries beyond what the audit could, one clause each."""
        added = [name for name in every_attack() if name not in self.suite_attacks]
        unknown = f"attacks that it did not know: {', '.join(added)}"
        said = [unknown] if self.suite_attacks and added else []
        if self.suite < SUITE:
            said.append(f"version {SUITE} of the attack suite, this audit ran version {self.suite}")
        return tuple(said)

    @property
    def fit(self) -> Fit | None:
        """How well the network as read does."""
        return self.checks.fit

    @cached_property
    def screen(self) -> Screen:
        """What a person reads first, and what to do next."""
        return summarize(self)

    @property
    def exit_code(self) -> int:
        """0 no leak found by these tests, 1 leak, 3 inconclusive."""
        return self.verdict.exit_code

    @property
    def control(self) -> MetricScore | None:
        """Counts by the deciding metric, None where no held-out control set its threshold."""
        if self.evidence is None or self.scores is None or not self.scores.calibrated:
            return None
        row = self.scores.metrics[self.scores.deciding]
        return None if row.threshold_null99 is None else row

    @property
    def ranked(self) -> list[tuple[Reconstruction, Selection, int]]:
        """What the attacks chose without the data: consensus first, then by confidence.

        Each as an attack's reconstruction, its selection, and the place in the selection.
        """
        chosen = [
            (reconstruction, selection, i)
            for reconstruction in self.reconstructions
            if (selection := reconstruction.selection) is not None
            for i in range(len(selection))
        ]

        def order(choice: tuple[Reconstruction, Selection, int]) -> tuple[bool, float]:
            _, selection, i = choice
            return int(selection.support[i]) < 2, -(selection.confidence_of(i) or 0.0)

        return sorted(chosen, key=order)

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
        return self.inspection.directions_for(self.verdict.n or self.knowledge.sample_count)

    def html(self, *, blur: bool = False, redact: bool = False) -> str:
        """The report as one self-contained page."""
        from residuum.report.html import render

        return render(self, blur=blur, redact=redact)

    def save(self, path: str | Path) -> Path:
        """Write every artifact into the folder ``path``: report.html, result.json and the rest."""
        from residuum.auditing.artifacts import write_artifacts
        from residuum.auditing.store import AuditRun

        with AuditRun.open(path) as folder:
            folder.refuse_other_results()
            file = self.settings.get("file")  # of records alone: there are no weights to keep
            write_artifacts(folder.path, self, sources={"checkpoint": file} if file else None)
            folder.finish()
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
