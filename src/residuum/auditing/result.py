"""The result of an audit: the record that every artifact is written from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from residuum.attacks import every_attack
from residuum.auditing.applicability import Applies
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

# Version of the attack suite. It grows when an attack gets stronger or is added.
SUITE = 1


@dataclass(frozen=True, eq=False)
class Evidence(Record):
    """Samples and values of the chance level that the report shows with the scores.

    Attributes:
        index: (k,) positions of the displayed training samples, best first.
        x: (k, *shape) these samples, as the network receives them.
        values: (n,) deciding score of every training sample, NaN without a match.
        null: Scores of matches in ``null_sets`` held-out sets of n samples.
        null_sets: Number of these sets.
        mean: What is added for display.
        outputs: (n,) output of the network, or the margin if it has several outputs.
        output_name: What ``outputs`` are.
        labels: (n,) names of the labels.
        nearest_holdout: (k, *shape) the held-out sample nearest to each displayed sample.
        features: Names of the columns of a table, see ``Dataset``.
        units: Units of the columns.
        scale: Scale of the columns.
        offset: Offset of the columns.
        spread: (*shape) difference between the 95th and the 5th percentile of every column.
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
    nearest_holdout: Tensor | None = None
    features: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    scale: Tensor | None = None
    offset: Tensor | None = None
    spread: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AuditResult(Record):
    """The outcome of :func:`audit`.

    Attributes:
        subject: Name of the audited file or network.
        created: Time at which the audit ended.
        verdict: The verdict.
        checkpoint: The audited network.
        inspection: What was measured from the weights without data.
        knowledge: What the attacker knows.
        attacks: One row for the search of stored records, if there was one, and one for each attack.
        reconstructions: Outputs of the attacks that ran, deciding ones first.
        certificate_of: What ``certificate`` is of, or the reason why there is none.
        uniqueness_reason: The reason why there is no ``uniqueness``.
        settings: Settings of the audit.
        environment: Software and hardware of the audit.
        scores: Scores of the strongest attack, None without samples.
        selected: Scores of the candidates that the attacks selected themselves.
        certificate: The KKT certificate.
        uniqueness: Which values of the candidates other training sets share.
        evidence: Samples and values that the report displays.
        batches: The batches of restarts that ran, which suffice to repeat them.
        seconds: Time of each stage.
        hashes: SHA-256 of the files that were read.
        assumptions: What the attacks assume about the network.
        limitations: What a reader must not conclude.
        warnings: What in the inputs may mislead.
        notes: Other remarks.
        findings: The tests of all attacks together.
        displayed_attack: The strongest attack, whose candidates the report displays.
        controls: The negative controls.
        checks: What decides whether finding nothing means that there is no leak.
        membership: The test of membership, None if it was not run.
        exposure: The ranking of the samples by risk. It does not enter the verdict.
        applies: What was tried, what was not, and why.
        files: Files that were read and written, as the user named them.
        suite: Version of the attack suite.
        suite_attacks: Names of the attacks that the audit could choose from.
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
    displayed_attack: str = ""
    controls: Controls = field(default_factory=Controls)
    checks: Checks = field(default_factory=Checks)
    membership: MembershipTest | None = None
    exposure: Exposure | None = None
    applies: tuple[Applies, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    suite: int = 0
    suite_attacks: tuple[str, ...] = ()

    @property
    def newer_attacks(self) -> tuple[str, ...]:
        """Attacks of this version of residuum that the audit could not run, in words."""
        added = [name for name in every_attack() if name not in self.suite_attacks]
        unknown = f"attacks that it did not know: {', '.join(added)}"
        clauses = [unknown] if self.suite_attacks and added else []
        if self.suite < SUITE:
            clauses.append(
                f"version {SUITE} of the attack suite, this audit ran version {self.suite}"
            )
        return tuple(clauses)

    @property
    def fit(self) -> Fit | None:
        """How well the network fits the samples."""
        return self.checks.fit

    @cached_property
    def screen(self) -> Screen:
        """The summary for a reader, with the next step."""
        return summarize(self)

    @property
    def exit_code(self) -> int:
        """0 for no leak found by these tests, 1 for a leak, 3 for inconclusive."""
        return self.verdict.exit_code

    @property
    def control(self) -> MetricScore | None:
        """Counts under the deciding metric, None if no held-out samples set its threshold."""
        if self.evidence is None or self.scores is None or not self.scores.calibrated:
            return None
        row = self.scores.metrics[self.scores.deciding]
        return None if row.threshold_null99 is None else row

    @property
    def ranked(self) -> list[tuple[Reconstruction, Selection, int]]:
        """Candidates that the attacks selected without the data, as (reconstruction, selection, position).

        Candidates that several restarts found come first. The order is then by confidence.
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
        """Shape of one sample: known to the attacker, or that of the samples, or that of the network."""
        if self.knowledge.shape is not None:
            return self.knowledge.shape
        if self.evidence is not None:
            return tuple(self.evidence.x.shape[1:])
        return self.checkpoint.input_shape

    @property
    def directions(self) -> tuple[int | None, str]:
        """Directions in the first layer and what they exceed, or None and the reason."""
        return self.inspection.directions_for(self.verdict.n or self.knowledge.sample_count)

    def html(self, *, blur: bool = False, redact: bool = False) -> str:
        """Return the report as one self-contained HTML page.

        Args:
            blur: Blur the images until the reader asks for them.
            redact: Leave out all samples.

        Returns:
            The page.
        """
        from residuum.report.html import render

        return render(self, blur=blur, redact=redact)

    def save(self, path: str | Path) -> Path:
        """Write report.html, result.json and all other artifacts into a folder and return its path."""
        from residuum.auditing.artifacts import write_artifacts
        from residuum.auditing.store import AuditRun

        with AuditRun.open(path) as folder:
            folder.refuse_other_results()
            file = self.settings.get("file")  # a file of records: there are no weights to write
            write_artifacts(folder.path, self, sources={"checkpoint": file} if file else None)
            folder.finish()
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the audit in a folder. Files that changed since it was written are refused."""
        from residuum.auditing.artifacts import load_artifacts

        record, reconstructions = load_artifacts(Path(path))
        return super().load(record).replace(reconstructions=reconstructions)

    def save_record(self, path: Path) -> None:
        """Write everything except the reconstructions to one file."""
        super(AuditResult, self.replace(reconstructions=())).save(path)

    def summary(self) -> str:
        """Return the summary as plain text."""
        return self.screen.text()

    def show(self) -> None:
        """Print the summary. ``save(folder)`` writes the complete report."""
        sys.stdout.write(self.summary() + "\n")

    def _repr_html_(self) -> str:
        from residuum.report.html import inline

        return inline(self)
