"""The result of an audit. The report, ``result.json`` and all other files are written from it."""

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
from residuum.auditing.outcomes import AttackOutcome, Findings
from residuum.auditing.plan import Batch
from residuum.auditing.summary import Screen, summarize
from residuum.auditing.verdict import Checks, Verdict
from residuum.evaluation.adapting import Fit
from residuum.evaluation.embeddings import EmbeddingMatches
from residuum.evaluation.targets import TargetTest
from residuum.networks.network import Network
from residuum.records import (
    Certificate,
    Exposure,
    Knowledge,
    Reconstruction,
    Record,
    RecoveredTable,
    Scores,
    Selection,
    Uniqueness,
)
from residuum.records.attribute_test import AttributeTest
from residuum.records.scores import MetricScore
from residuum.risk.membership import MembershipTest
from residuum.risk.moved_rows import MovedRows
from residuum.surfaces.inspection import Inspection

# Version of the set of attacks that an audit runs. It grows if an attack is added or becomes stronger.
SUITE = 1


@dataclass(frozen=True, eq=False)
class Evidence(Record):
    """Training samples and scores of held-out samples that the report displays.

    Attributes:
        index: (k,) positions of the displayed training samples, best match first.
        x: (k, *shape) displayed training samples, as the network receives them.
        values: (n,) similarity of every training sample and its matched candidate, by the metric that decides
            the verdict. NaN if the sample has no match.
        null: The same similarities for random held-out sets of n samples, which show the chance level.
        null_sets: Number of held-out sets in ``null``.
        mean: Mean that is added to samples for display.
        outputs: (n,) output of the network for each training sample. If the network has several outputs, the
            margin instead.
        output_name: Whether ``outputs`` are outputs or margins: "network output" or "margin".
        labels: (n,) names of the labels of the training samples.
        nearest_holdout: (k, *shape) the held-out sample nearest to each displayed sample.
        features: Names of the columns if the samples are a table, see ``Dataset``.
        units: Units of the columns of a table.
        scale: Factor by which each column of a table was divided.
        offset: Number that was subtracted from each column of a table.
        spread: (*shape) difference between the 95th and the 5th percentile of each column of a table.
        embeddings: The cosines of the displayed samples if these are embeddings.
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
    embeddings: EmbeddingMatches | None = None


@dataclass(frozen=True, eq=False)
class AuditResult(Record):
    """The result of an audit, which the function :func:`audit` returns.

    Attributes:
        subject: Name of the audited file or network.
        created: Time at which the audit ended.
        verdict: The verdict.
        checkpoint: The audited network.
        inspection: Facts about the network that were measured from its weights.
        knowledge: What the attacker knows.
        attacks: One row for each attack. If stored records were searched, the first row is about this search.
        reconstructions: Outputs of the attacks that ran, without baselines.
        certificate_of: The samples for which ``certificate`` was computed, or why there is no certificate.
        uniqueness_reason: The reason why there is no ``uniqueness``.
        settings: Settings of the audit.
        environment: Software and hardware of the audit.
        scores: Scores of the strongest attack, None if there are no samples.
        selected: Scores of the candidates that the attacks selected as likely training samples.
        certificate: KKT certificate: how close the weights are to a KKT point of the samples.
        uniqueness: Uniqueness certificate. Several training sets may fit the weights equally well. The
            certificate says which part of each candidate (reconstructed sample) all these sets share.
        evidence: Samples and values that the report displays.
        batches: The batches of restarts that ran, with all settings needed to repeat them.
        seconds: Duration of each stage in seconds, by name.
        hashes: SHA-256 of the files that were read.
        assumptions: What the attacks assume about the network.
        limitations: What a reader must not conclude from the audit.
        warnings: Properties of the inputs that may mislead a reader.
        notes: Other remarks for the reader.
        findings: The number of training samples that all attacks together recovered, with the tests of this
            number.
        displayed_attack: The strongest attack, whose candidates the report displays.
        controls: The negative controls.
        checks: Checks that decide whether an audit without a finding can rule out a leak.
        membership: The test of membership, None if it was not run.
        attributes: The test whether missing values of training records can be inferred, None if it was not
            run.
        moved_rows: The embedding rows that training moved, compared with the tokens of the texts.
        table: The training table that the attack on a forest recovered.
        targets: The test whether recovered targets are those of the training samples.
        exposure: The ranking of the samples by risk. It does not enter the verdict.
        applies: One row for each measured property, attack and check. The row says whether the attack or
            check was tried, and why.
        files: Paths of the input files and of the run directory, as the user passed them.
        suite: Version of the set of attacks from which the audit could choose.
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
    attributes: AttributeTest | None = None
    moved_rows: MovedRows | None = None
    table: RecoveredTable | None = None
    targets: TargetTest | None = None
    exposure: Exposure | None = None
    applies: tuple[Applies, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    suite: int = 0
    suite_attacks: tuple[str, ...] = ()

    @property
    def newer_attacks(self) -> tuple[str, ...]:
        """Texts about attacks of the installed residuum that did not exist when the audit ran, () if none."""
        new_attacks = [name for name in every_attack() if name not in self.suite_attacks]
        new_attack_text = f"attacks that it did not know: {', '.join(new_attacks)}"
        suite_differences = [new_attack_text] if self.suite_attacks and new_attacks else []
        if self.suite < SUITE:
            suite_differences.append(
                f"version {SUITE} of the attack suite, this audit ran version {self.suite}"
            )
        return tuple(suite_differences)

    @property
    def fit(self) -> Fit | None:
        """How well the network predicts the training and held-out samples."""
        return self.checks.fit

    @cached_property
    def screen(self) -> Screen:
        """Summary of the audit for a reader: headline, answers to three questions, and the next step."""
        return summarize(self)

    @property
    def exit_code(self) -> int:
        """The exit code: 0 for no leak found by these tests, 1 for a leak, 3 for inconclusive."""
        return self.verdict.exit_code

    @property
    def control(self) -> MetricScore | None:
        """Score of the metric that decides the verdict, with the number of recovered samples.

        None if there are too few held-out samples to set the threshold of the metric.
        """
        if self.evidence is None or self.scores is None or not self.scores.calibrated:
            return None
        deciding_score = self.scores.metrics[self.scores.deciding]
        return None if deciding_score.threshold_null99 is None else deciding_score

    @property
    def ranked(self) -> list[tuple[Reconstruction, Selection, int]]:
        """Reconstructions that the attacks selected as likely training samples, without seeing the data.

        Each candidate is given as (reconstruction, selection, position). Candidates that several restarts
        found come first. Candidates with larger confidence come before candidates with smaller confidence.
        """
        selected_candidates = [
            (reconstruction, selection, i)
            for reconstruction in self.reconstructions
            if (selection := reconstruction.selection) is not None
            for i in range(len(selection))
        ]

        def order(choice: tuple[Reconstruction, Selection, int]) -> tuple[bool, float]:
            _, selection, i = choice
            return int(selection.support[i]) < 2, -(selection.confidence_of(i) or 0.0)

        return sorted(selected_candidates, key=order)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample.

        If the attacker knows the shape, this shape is used. Otherwise it is the shape of the displayed
        samples. If there are no samples, it is the input shape of the network.
        """
        if self.knowledge.shape is not None:
            return self.knowledge.shape
        if self.evidence is not None:
            return tuple(self.evidence.x.shape[1:])
        return self.checkpoint.input_shape

    @property
    def directions(self) -> tuple[int | None, str]:
        """Number of directions in the first layer's weights that come from training samples.

        These are the directions whose singular values exceed those of a random initialization. The second
        value names the threshold above which singular values were counted. If the number is unknown, the
        first value is None, and the second value is the reason.
        """
        return self.inspection.directions_for(self.verdict.n or self.knowledge.sample_count)

    def html(self, *, blur: bool = False, redact: bool = False) -> str:
        """Return the report as one self-contained HTML page.

        Args:
            blur: Blur the images until the reader asks for them.
            redact: Leave out all samples.

        Returns:
            The report as HTML text.
        """
        from residuum.report.html import render

        return render(self, blur=blur, redact=redact)

    def save(self, path: str | Path) -> Path:
        """Write report.html, result.json and all other artifacts into a folder and return its path."""
        from residuum.auditing.artifacts import write_artifacts
        from residuum.auditing.store import AuditRun

        with AuditRun.open(path) as folder:
            folder.refuse_other_results()
            # If the audit found only stored records and no network, the settings hold the path of the file.
            record_file = self.settings.get("file")
            write_artifacts(
                folder.path, self, sources={"checkpoint": record_file} if record_file else None
            )
            folder.finish()
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the result of the audit in a folder. If a file has changed, raise an ``InputError``."""
        from residuum.auditing.artifacts import load_artifacts

        record, reconstructions = load_artifacts(Path(path))
        return super().load(record).replace(reconstructions=reconstructions)

    def save_record(self, path: Path) -> None:
        """Write the result of the audit to one file, without the reconstructions."""
        super(AuditResult, self.replace(reconstructions=())).save(path)

    def summary(self) -> str:
        """Return the summary of the audit as plain text for a terminal."""
        return self.screen.text()

    def show(self) -> None:
        """Print the summary of the audit. ``save(folder)`` writes the complete report."""
        sys.stdout.write(self.summary() + "\n")

    def _repr_html_(self) -> str:
        from residuum.report.html import inline

        return inline(self)
