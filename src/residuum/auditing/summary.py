"""The summary of an audit, and what to do next.

A person reads the summary first. It has the same words in terminal, report and notebook: the verdict with
its count and the chance level, how sure that is, the attacker's knowledge, what was attacked, the positive
controls, and one next step with its command ready to copy. The glossary (``report/glossary.py``) explains
every term. The verdict is not decided here.

The next step is a table: the first row whose condition holds gives the text and the commands.
"""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from residuum.attacks import every_attack
from residuum.auditing.applicability import NOT_TRIED
from residuum.auditing.commands import audit_command
from residuum.auditing.durations import duration, seconds_of
from residuum.auditing.verdict import (
    INCONCLUSIVE,
    LEAK,
    NO_LEAK_FOUND,
    STORED,
    SURFACES_SAID,
    acquitting,
    summarize_positive_controls,
    unfinished,
)
from residuum.records import Knowledge, Record

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult

MOMENT = "moment"
SHORTEST_STRETCH = 1.5  # times the budget: a longer one that is advised is clearly longer
OUT_OF_REACH = 3600.0  # seconds: a longer budget is not advised
STRIPPED_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")  # files that strip writes anew
TOLD = {  # known facts in words; a value stands where it is one
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


class Fact(NamedTuple):
    """One line of the summary."""

    title: str
    text: str


@dataclass(frozen=True, eq=False)
class NextStep(Record):
    """What to do now, in sentences, and the commands for it, ready to copy."""

    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Screen:
    """The summary of an audit."""

    headline: str
    sentence: str
    facts: tuple[Fact, ...]
    next: NextStep

    def text(self, width: int = 80, without: tuple[str, ...] = ()) -> str:
        """Return the summary as lines for a terminal. Commands can be copied as they are.

        Args:
            width: Length of a line.
            without: Titles of facts that the reader knows already.

        Returns:
            The lines.
        """
        indent = max(map(len, TITLES)) + 2
        lines = [self.headline.upper(), *_wrap(self.sentence, width)]
        facts = (fact for fact in self.facts if fact.title not in without)
        for title, text in (*facts, Fact("next step", self.next.text)):
            lines += _wrap(text, width, f"{title:<{indent}}", " " * indent)
        for command in self.next.commands:
            lines += _fold_command(command, width)
        return "\n".join(lines)


def _fold_command(command: str, width: int) -> list[str]:
    """Break a command into lines as a shell reads them. An option and its value stay on one line."""
    joined = re.sub(r"( --[\w-]+) (?!-)", "\\1\x00", command)  # not a blank for the wrapper
    lines = [line.replace("\x00", " ") for line in _wrap(joined, width - 4, "", "    ")]
    return [f"  {line} \\" for line in lines[:-1]] + [f"  {lines[-1]}"]


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Break a text into lines between words only."""
    wrapper = textwrap.TextWrapper(
        width, first, rest, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


def summarize(result: AuditResult) -> Screen:
    """Return the summary of an audit."""
    verdict, controls = result.verdict, result.checks.twins
    texts = (
        verdict.reasons[0] if verdict.outcome == INCONCLUSIVE and verdict.reasons else "",
        verdict.sure,
        _knowledge(result.knowledge)
        or f"nothing but the {'file' if verdict.stored else 'weights'}",
        _attacked_surfaces(result),
        summarize_positive_controls(controls) if controls else "",
        "" if result.fit is None else result.fit.line,
    )
    facts = tuple(Fact(title, text) for title, text in zip(TITLES, texts, strict=True) if text)
    return Screen(verdict.headline, verdict.sentence, facts, next_step(result))


def _knowledge(knowledge: Knowledge) -> str:
    """Return what the attacker knows in addition to the release, and where each fact is from."""
    sentences = []
    for known in knowledge.facts:
        value = known.value.replace(", ", " to ") if known.fact == "value_range" else known.value
        words = TOLD.get(known.fact, known.fact).format(value)
        sentences.append(words + SOURCES.get(known.provenance, ""))
    return "; ".join(sentences)


def _attacked_surfaces(result: AuditResult) -> str:
    """Return the surfaces that were attacked, and by how many attacks."""
    surfaces = Counter(
        SURFACES_SAID.get(row.surface, row.surface or "the weights")
        for row in result.attacks
        if row.ran and row.decides
    )
    texts = [
        name if name == SURFACES_SAID[STORED] else f"{name}, by {n} attack{'' if n == 1 else 's'}"
        for name, n in surfaces.items()
    ]
    return "; ".join(texts) or "nothing: no attack applies to this network"


def next_step(result: AuditResult) -> NextStep:
    """Return what to do next: the first row of the advice whose condition holds."""
    row = next(row for row in ADVICE[result.verdict.outcome] if row.applies(result))
    commands = tuple(filter(None, (command(result) for command in row.commands)))
    text = row.text.format(
        needed=duration(_needed_budget(result)), not_covered=_not_covered(result)
    )
    shareable = redacted_report in row.commands and redacted_report(result)
    return NextStep(text + (TO_SHOW if shareable else ""), commands)


def strip_file(result: AuditResult) -> str:
    """Return the command that removes what the network does not need, "" if it does not apply."""
    file = result.files.get("checkpoint", "")
    has_weights = bool(result.checkpoint.theta)
    if not has_weights or Path(file).suffix not in STRIPPED_SUFFIXES:
        return ""
    return shlex.join(["residuum", "strip", file, "--out", "stripped.pt"])


def redacted_report(result: AuditResult) -> str:
    """Return the command that writes the report without any sample, "" if the audit was not saved."""
    out = result.files.get("out", "")
    return shlex.join(["residuum", "report", out, "--redact"]) if out else ""


def scan_file(result: AuditResult) -> str:
    """Return the command that scans the file, "" if there is none."""
    file = result.files.get("checkpoint", "")
    return shlex.join(["residuum", "scan", file]) if file else ""


def audit_stripped_file(result: AuditResult) -> str:
    """Return the command that audits the file that :func:`strip_file` writes."""
    return audit_command(result, checkpoint="stripped.pt", out="-stripped", surface="all")


def audit_with_vouch(result: AuditResult) -> str:
    """Return the command of this audit with ``--vouch``."""
    return audit_command(result, vouch=True)


def audit_longer(result: AuditResult) -> str:
    """Return the command of this audit with the budget that its full plan needs."""
    return audit_command(result, budget=_needed_budget(result))


def _leaking_surfaces(result: AuditResult) -> set[str]:
    return {row.surface for row in result.attacks if row.survives}


def _has_wrong_holdout(result: AuditResult) -> bool:
    """Return True if a control failed for another reason than a short budget."""
    return any("--budget" not in failure for failure in result.checks.failures)


def _may_be_other_samples(result: AuditResult) -> bool:
    checks = result.checks
    return not checks.failures and not checks.vouched and bool(checks.strangers)


def _has_strippable_state(result: AuditResult) -> bool:
    attacked = any(row.ran and row.surface == MOMENT for row in result.attacks)
    return attacked and bool(strip_file(result))


def _needs_time(result: AuditResult) -> bool:
    checks = result.checks
    unknown = any(row.unasked for row in result.attacks)  # residual on a permuted target
    cut_short = unfinished(result.attacks, checks)
    return bool(checks.failures or unknown or checks.hurried or cut_short)


def _needed_budget(result: AuditResult) -> float:
    """Return the seconds that the full plan takes by the audit's own estimate, in whole minutes."""
    budget = seconds_of(result.settings.get("budget") or "1min")
    needed = max(result.checks.budget_needed or 0.0, SHORTEST_STRETCH * budget)
    return 60.0 * math.ceil(needed / 60)


def _not_covered(result: AuditResult) -> str:
    """Return what "no leak found" does not cover, and who would be a stronger attacker."""
    attacks = every_attack()
    skipped = [
        row.what for row in result.applies if row.status == NOT_TRIED and row.what in attacks
    ]
    facts = {
        "theta0": "the weights that training began from (--init)",
        "mean": "the mean of the samples (--mean train)",
        "value_range": "the range of values (--value-range)",
    }
    unknown = [text for name, text in facts.items() if name not in result.knowledge.granted]
    gaps = [f"an attacker who knows {' or '.join(unknown)}"] if unknown else []
    gaps += [f"attacks that were not run ({', '.join(skipped)})"] if skipped else []
    gaps += ["confirming that a known record was trained on (see membership below)"]
    gaps += ["anything else that is released with this file (residuum scan)"]
    return "; ".join(gaps)


class Advice(NamedTuple):
    """A row of the advice: when it applies, what it says, and its commands.

    The text may name ``needed``, the time that the full plan takes, and ``not_covered``. Commands that do
    not exist for the audit ("") are left out.
    """

    applies: Callable[[AuditResult], bool]
    text: str
    commands: tuple[Callable[[AuditResult], str], ...] = ()


TO_SHOW = " The last command writes this report without any sample, to show to others."
HOLDS_RECORDS = "Do not release this file, because it contains training records."
RETRAIN = (
    "Do not release this file. The weights themselves leak, so only another training helps. Retrain with "
    "differential privacy (DP-SGD) and audit the result. On images, DP-SGD was the only defense that held in "
    "our measurements. Weight noise, early stopping, weight decay, label smoothing and mini-batches did not."
)
CHECK_READING = (
    "Check that architecture, preprocessing, labels and records are those of the training. "
)

LEAK_ADVICE = (
    Advice(
        lambda result: bool(result.verdict.stored and strip_file(result)),
        f"{HOLDS_RECORDS} The first command writes the weights alone. Audit the result before you release "
        "it.",
        (strip_file, redacted_report),
    ),
    Advice(
        lambda result: bool(result.verdict.stored),
        f"{HOLDS_RECORDS} If the model is made of its records, such as nearest neighbors, it cannot work "
        "without them. Train another kind of model, or save the model without the records, and audit it "
        "again.",
        (redacted_report,),
    ),
    Advice(
        lambda result: _leaking_surfaces(result) == {MOMENT} and bool(strip_file(result)),
        "Do not release this file as it is. Its optimizer state leaks training samples and is not needed to "
        "use the network. Strip it and audit what remains.",
        (strip_file, audit_stripped_file, redacted_report),
    ),
    Advice(
        lambda result: MOMENT in _leaking_surfaces(result),
        f"{RETRAIN} Also remove the optimizer state from the file.",
        (redacted_report,),
    ),
    Advice(lambda result: True, RETRAIN, (redacted_report,)),
)
# What is most likely to help. Wrong inputs come before more time.
INCONCLUSIVE_ADVICE = (
    Advice(
        lambda result: result.verdict.n is None,
        "Pass the training samples (--data) and at least 100 samples that the network never saw "
        "(--holdout). Without them nothing can be compared.",
    ),
    Advice(
        lambda result: result.verdict.recovered is None,
        "Pass more held-out samples (--holdout): at least 100, and at least as many as there are training "
        "samples, from the same source and prepared in the same way.",
    ),
    Advice(
        _has_wrong_holdout,
        "Pass other held-out samples (--holdout): from the same source as the training samples, prepared in "
        "the same way, and none of them trained on.",
    ),
    Advice(lambda result: result.fit is not None and result.fit.doubtful, CHECK_READING),
    Advice(
        _may_be_other_samples,
        f"{CHECK_READING}If they are, confirm it with --vouch.",
        (audit_with_vouch,),
    ),
    Advice(
        lambda result: bool(result.findings and result.findings.set_aside_matches),
        "Remove the training samples from the held-out file and audit again. Some of them match a "
        "reconstruction, so this file may leak.",
    ),
    Advice(
        _has_strippable_state,
        "Strip the optimizer state, which is not needed to use the network, and audit what remains.",
        (strip_file, audit_stripped_file),
    ),
    Advice(
        lambda result: _needs_time(result) and _needed_budget(result) > OUT_OF_REACH,
        "A full audit of this network would take about {needed} on this machine. Run it on a GPU "
        "(--device cuda), or treat the file as not cleared.",
    ),
    Advice(
        _needs_time,
        "Give the audit more time. Its full plan takes about {needed} on this machine.",
        (audit_longer,),
    ),
    Advice(
        lambda result: not acquitting(result.attacks),
        "The attacks ran their full plan and could not fit these weights, so finding nothing proves nothing, "
        "and more time is unlikely to help. Do not treat this file as cleared. An attacker who knows more, "
        "such as the value range (--value-range), the mean of the samples (--mean) or the initial weights "
        "(--init), may fit them. Declare such knowledge if it is realistic.",
    ),
    Advice(
        lambda result: any(control.reason for control in result.checks.twins),
        "Pass more held-out samples, with labels, and let the audit run its positive controls (do not pass "
        "--no-twin).",
    ),
    Advice(
        lambda result: True,
        "Describe how the network was trained, so that the positive controls are trained in the same way. "
        "For example: --recipe optimiser=adam,rate=0.001,epochs=100.",
    ),
)
NO_LEAK_ADVICE = (
    Advice(
        lambda result: True,
        "These attacks give no reason to hold this file back. Not covered: {not_covered}.",
        (scan_file,),
    ),
)
ADVICE = {LEAK: LEAK_ADVICE, INCONCLUSIVE: INCONCLUSIVE_ADVICE, NO_LEAK_FOUND: NO_LEAK_ADVICE}
