"""What an audit found: the record that every artifact is written from.

What applies to a network, what was tried, what was not, and why is one table in the terminal, the report,
``result.json`` and a dry run. Facts that were measured come first: the reasons below rest on them.

The first screen is what a person reads first, and what to do next: the same words in terminal, report and
notebook. Each fact stands once: the verdict with its count beside chance, how sure that is, what the
attacker was told, what was attacked, what a twin gave back, and one next step with its command ready to
copy. Every term there is in the glossary (``report/glossary.py``). Nothing is decided here.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor

from residuum.attacks import every_attack
from residuum.attacks.unmixing.backbone import dense_behind
from residuum.attacks.unmixing.layers import fed_by_input
from residuum.auditing.budget import Batch, duration, seconds_of
from residuum.auditing.controls import Controls, Membership
from residuum.auditing.inputs import Fit
from residuum.auditing.verdict import (
    INCONCLUSIVE,
    LEAK,
    STORED,
    SURFACES_SAID,
    AttackOutcome,
    Checks,
    Findings,
    Verdict,
    acquitting,
    summarize_positive_controls,
    unfinished,
)
from residuum.networks.network import Network
from residuum.records import (
    Certificate,
    Exposure,
    Knowledge,
    Reconstruction,
    Record,
    Scores,
    Uniqueness,
)
from residuum.records.scores import MetricScore
from residuum.stationarity import by_layer, moved_layers
from residuum.surfaces.inspection import Inspection

SUITE = 1  # of all attacks: one more when an attack gets stronger or a new one comes
MEASURED, TRIED, NOT_TRIED, PLANNED = "measured", "tried", "not tried", "to be tried"
MOST_NAMED = 6  # layers: a row of the table is one line or two
MOMENT = "moment"
SHORTEST_STRETCH = 1.5  # times the budget: a longer one that is advised is clearly longer
OUT_OF_REACH = 3600.0  # seconds: a longer budget is not advised
STRIPPED_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")  # files that strip writes anew
TOLD = {  # granted facts in words; a value stands where it is one
    "shape": "the shape of a sample ({})",
    "value_range": "the range of values ({})",
    "mean": "the mean of the samples",
    "sample_count": "how many samples there are ({})",
    "label_balance": "the share of each label",
    "theta0": "the weights that training began from",
    "loss": "the loss ({})",
    "weight_decay": "the weight decay ({})",
    "norms": "the length of every sample",
    "moment": "the optimiser state",
    "columns": "the types of the columns ({})",
}
SOURCES = {
    "user": "",
    "train": " (taken from the training data: the strongest attacker)",
    "holdout": " (taken from the held-out data)",
    "release": " (found in the release itself)",
}
TITLES = ("why", "how sure", "attacker was told", "attacked", "positive controls", "network")


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
    membership: Membership | None = None
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

    @property
    def screen(self) -> Screen:
        """What a person reads first, and what to do next."""
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
        chosen = [(part, part.selection) for part in self.reconstructions if part.selection]
        found = [
            (int(one.support[i]) < 2, -(one.confidence_of(i) or 0.0), part, i)
            for part, one in chosen
            for i in range(len(one))
        ]
        return [(part, i) for *_, part, i in sorted(found, key=lambda row: row[:2])]

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
    checkpoint: Network, inspection: Inspection, knowledge: Knowledge, fit: Fit | None
) -> tuple[Applies, ...]:
    """What the network is, by running it."""
    arch, order = checkpoint.architecture, inspection.homogeneity_order
    kept = checkpoint.live is not None
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
        "outputs": f"{arch.outputs}, taken as {checkpoint.inferred_task}"
        + ("" if fit is None else f"; {fit.line}"),
    }
    return tuple(Applies(what, MEASURED, why) for what, why in rows.items())


def _first(checkpoint: Network, knowledge: Knowledge) -> str:
    model, sample = checkpoint.module, checkpoint.sample_shape(knowledge)
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


def _moved(checkpoint: Network, knowledge: Knowledge) -> str:
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


class Fact(NamedTuple):
    """One line of the first screen."""

    title: str
    text: str


@dataclass(frozen=True, eq=False)
class NextStep(Record):
    """What to do now, in sentences, and the commands for it, ready to copy."""

    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Screen:
    """The first screen of an audit."""

    headline: str
    sentence: str
    facts: tuple[Fact, ...]
    next: NextStep

    def text(self, width: int = 80, without: tuple[str, ...] = ()) -> str:
        """As lines for a terminal; commands can be copied as they are.

        without: facts that the reader has been told already.
        """
        indent = max(map(len, TITLES)) + 2
        lines = [self.headline.upper(), *wrapped(self.sentence, width)]
        facts = (fact for fact in self.facts if fact.title not in without)
        for title, text in (*facts, Fact("next step", self.next.text)):
            lines += wrapped(text, width, f"{title:<{indent}}", " " * indent)
        for command in self.next.commands:
            lines += folded(command, width)
        return "\n".join(lines)


def folded(command: str, width: int) -> list[str]:
    """A command in lines of at most ``width`` where its words allow, as a shell reads it.

    An option and its value stay on one line: for wrapping, what lies between them is no blank.
    """
    held = re.sub(r"( --[\w-]+) (?!-)", "\\1\x00", command)
    lines = [line.replace("\x00", " ") for line in wrapped(held, width - 4, "", "    ")]
    return [f"  {line}" + (" \\" if line is not lines[-1] else "") for line in lines]


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most ``width`` that break between words only."""
    wrap = textwrap.TextWrapper(width, first, rest, break_long_words=False, break_on_hyphens=False)
    return wrap.wrap(text)


def screen(result: AuditResult) -> Screen:
    """The first screen of ``result``."""
    verdict, controls = result.verdict, result.checks.twins
    facts = (
        verdict.reasons[0] if verdict.outcome == INCONCLUSIVE and verdict.reasons else "",
        verdict.sure,
        told(result.knowledge) or f"nothing but the {'file' if verdict.stored else 'weights'}",
        attacked(result),
        summarize_positive_controls(controls) if controls else "",
        "" if result.fit is None else result.fit.line,
    )
    shown = tuple(Fact(title, text) for title, text in zip(TITLES, facts, strict=True) if text)
    return Screen(verdict.headline, verdict.sentence, shown, next_step(result))


def told(knowledge: Knowledge) -> str:
    """What the attacker was granted beside the weights, and where each fact is from."""
    said = [
        TOLD.get(known.fact, known.fact).format(
            known.value.replace(", ", " to ") if known.fact == "value_range" else known.value
        )
        + SOURCES.get(known.provenance, "")
        for known in knowledge.facts
    ]
    return "; ".join(said)


def attacked(result: AuditResult) -> str:
    """The surfaces that were attacked, and by how many attacks."""
    counts: dict[str, int] = {}
    for row in result.attacks:
        if row.ran and row.decides:
            name = SURFACES_SAID.get(row.surface, row.surface or "the weights")
            counts[name] = counts.get(name, 0) + 1
    said = [
        name if name == SURFACES_SAID[STORED] else f"{name}, by {n} attack{'' if n == 1 else 's'}"
        for name, n in counts.items()
    ]
    return "; ".join(said) or "nothing: no attack applies to this network"


def next_step(result: AuditResult) -> NextStep:
    """By outcome: what to do with a leak, what to try when nothing was decided, what was not covered."""
    if result.verdict.outcome == LEAK:
        return _after_a_leak(result)
    if result.verdict.outcome == INCONCLUSIVE:
        return _when_inconclusive(result)
    return _not_covered(result)


def _again(result: AuditResult, *options: str, checkpoint: str = "", out: str = "-again") -> str:
    """Return the command of this audit with its knowledge and with ``options``, "" if it had no files."""
    files = result.files
    if not all(files.get(name) for name in ("checkpoint", "data", "out")):
        return ""
    said = ["residuum", "audit", checkpoint or files["checkpoint"], "--data", files["data"]]
    said += ["--holdout", files["holdout"]] if files.get("holdout") else []
    said += [*shlex.split(files.get("options", "")), *options]
    return shlex.join([*said, "--out", f"{files['out']}{out}"])


def _strip(result: AuditResult) -> str:
    """Return the command that removes what the network does not need, "" if it does not apply."""
    file = result.files.get("checkpoint", "")
    has_weights = bool(result.checkpoint.theta)
    if not has_weights or Path(file).suffix not in STRIPPED_SUFFIXES:
        return ""
    return shlex.join(["residuum", "strip", file, "--out", "stripped.pt"])


def _redact(result: AuditResult) -> str:
    """Return the command that writes the report without any sample, "" if the audit was not saved."""
    out = result.files.get("out", "")
    return shlex.join(["residuum", "report", out, "--redact"]) if out else ""


def _step(text: str, *commands: str) -> NextStep:
    """Return a next step with the commands that exist for this audit."""
    return NextStep(text, tuple(filter(None, commands)))


def _after_a_leak(result: AuditResult) -> NextStep:
    redact = _redact(result)
    show = " The last command writes this report without any sample, to show to others."
    show = show if redact else ""
    if result.verdict.stored:
        strip = _strip(result)
        if strip:
            return _step(
                "Do not release this file, because it contains training records. The first command "
                f"writes the weights alone. Audit the result before you release it.{show}",
                strip,
                redact,
            )
        return _step(
            "Do not release this file, because it contains training records. If the model is made of its "
            "records, such as nearest neighbors, it cannot work without them. Train another kind of "
            f"model, or save the model without the records, and audit it again.{show}",
            redact,
        )
    surfaces = {row.surface for row in result.attacks if row.survives}
    strip = _strip(result)
    if surfaces == {MOMENT} and strip:
        return _step(
            "Do not release this file as it is. Its optimizer state leaks training samples and is not "
            f"needed to use the network. Strip it and audit what remains.{show}",
            strip,
            _again(result, checkpoint="stripped.pt", out="-stripped"),
            redact,
        )
    also = " Also remove the optimizer state from the file." if MOMENT in surfaces else ""
    return _step(
        "Do not release this file. The weights themselves leak, so only another training helps. Retrain "
        "with differential privacy (DP-SGD) and audit the result. On images, DP-SGD was the only "
        "defense that held in our measurements. Weight noise, early stopping, weight decay, label smoothing "
        f"and mini-batches did not.{also}{show}",
        redact,
    )


def _when_inconclusive(result: AuditResult) -> NextStep:
    """Return the one thing that is most likely to help. Wrong inputs come before more time."""
    checks = result.checks
    if result.verdict.n is None:
        return _step(
            "Pass the training samples (--data) and at least 100 samples that the network never saw "
            "(--holdout). Without them nothing can be compared."
        )
    if result.verdict.recovered is None:
        return _step(
            "Pass more held-out samples (--holdout): at least 100, and at least as many as there are "
            "training samples, from the same source and prepared in the same way."
        )
    too_short = [failure for failure in checks.failures if "--budget" in failure]
    if checks.failures and len(too_short) < len(checks.failures):
        return _step(
            "Pass other held-out samples (--holdout): from the same source as the training samples, "
            "prepared in the same way, and none of them trained on."
        )
    unfit = checks.fit is not None and checks.fit.doubtful
    unknown = not checks.failures and not checks.vouched and checks.strangers
    if unfit or unknown:
        vouch = "" if unfit else _again(result, "--vouch")
        return _step(
            "Check that architecture, preprocessing, labels and records are those of the training. "
            + ("" if unfit else "If they are, confirm it with --vouch."),
            vouch,
        )
    if result.findings is not None and result.findings.set_aside_matches:
        return _step(
            "Remove the training samples from the held-out file and audit again. Some of them match a "
            "reconstruction, so this file may leak."
        )
    if any(row.ran and row.surface == MOMENT for row in result.attacks) and _strip(result):
        return _step(
            "Strip the optimizer state, which is not needed to use the network, and audit what remains.",
            _strip(result),
            _again(result, checkpoint="stripped.pt", out="-stripped"),
        )
    no_time = any(row.unasked for row in result.attacks)
    if too_short or no_time or checks.hurried or unfinished(result.attacks, checks):
        return _more_time(result)
    if not acquitting(result.attacks):
        return _step(
            "The attacks ran their full plan and could not fit these weights, so finding nothing proves "
            "nothing, and more time is unlikely to help. Do not treat this file as cleared. An attacker "
            "who knows more, such as the value range (--value-range), the mean of the samples (--mean) or "
            "the initial weights (--init), may fit them. Declare such knowledge if it is realistic."
        )
    if any(control.reason for control in checks.twins):
        return _step(
            "Pass more held-out samples, with labels, and let the audit run its positive controls "
            "(do not pass --no-twin)."
        )
    return _step(
        "Describe how the network was trained, so that the positive controls are trained in the same way. "
        "For example: --recipe optimiser=adam,rate=0.001,epochs=100."
    )


def _more_time(result: AuditResult) -> NextStep:
    """Advise a longer budget by the audit's own estimate, unless this machine is too slow for it."""
    given = seconds_of(result.settings.get("budget") or "1min")
    needed = max(result.checks.budget_needed or 0.0, SHORTEST_STRETCH * given)
    needed = 60.0 * math.ceil(needed / 60)
    if needed > OUT_OF_REACH:
        return _step(
            f"A full audit of this network would take about {duration(needed)} on this machine. Run it on a "
            "GPU (--device cuda), or treat the file as not cleared."
        )
    return _step(
        f"Give the audit more time. Its full plan takes about {duration(needed)} on this machine.",
        _again(result, "--budget", duration(needed)),
    )


def _not_covered(result: AuditResult) -> NextStep:
    """What "no leak found" does not speak of, and who would be a stronger attacker."""
    known = every_attack()
    missing = [row for row in result.applies if row.status == NOT_TRIED and row.what in known]
    names = ", ".join(row.what for row in missing)
    facts = {
        "theta0": "the weights that training began from (--init)",
        "mean": "the mean of the samples (--mean train)",
        "value_range": "the range of values (--value-range)",
    }
    absent = [text for name, text in facts.items() if name not in result.knowledge.granted]
    said = "These attacks give no reason to hold this file back. Not covered: "
    parts = [f"an attacker who knows {' or '.join(absent)}"] if absent else []
    parts += [f"attacks that were not run ({names})"] if names else []
    parts += ["confirming that a known record was trained on (see membership below)"]
    parts += ["anything else that is released with this file (residuum scan)"]
    file = result.files.get("checkpoint", "")
    scan = shlex.join(["residuum", "scan", file]) if file else ""
    return _step(f"{said}{'; '.join(parts)}.", scan)
