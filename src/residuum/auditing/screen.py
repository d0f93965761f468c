"""What a person reads first, and what to do next: the same words in terminal, report and notebook.

Each fact stands once: the verdict with its count beside chance, how sure that is, what the attacker was
told, what was attacked, what a twin gave back, and one next step with its command ready to copy. Every
term here is in the glossary (``report/glossary.py``). Nothing is decided here.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from residuum.attacks import every_attack
from residuum.auditing.budget import duration, seconds_of
from residuum.auditing.result import NOT_TRIED
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, STORED, SURFACES_SAID, acquitting
from residuum.networks import Architecture

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult
    from residuum.records import Knowledge

MOMENT = "moment"
LONGER = 10  # times the budget, where a longer one is the thing to try
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
}
SOURCES = {
    "user": "",
    "train": " (taken from the training data: the strongest attacker)",
    "holdout": " (taken from the held-out data)",
    "release": " (found in the release itself)",
}


TITLES = ("why", "how sure", "attacker was told", "attacked", "positive control", "network")


class Fact(NamedTuple):
    """One line of the first screen."""

    title: str
    text: str


@dataclass(frozen=True)
class NextStep:
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
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def screen(result: AuditResult) -> Screen:
    """The first screen of ``result``."""
    verdict, twin = result.verdict, result.checks.twin
    facts = (
        verdict.reasons[0] if verdict.outcome == INCONCLUSIVE and verdict.reasons else "",
        verdict.sure,
        told(result.knowledge) or f"nothing but the {'file' if verdict.stored else 'weights'}",
        attacked(result),
        "" if twin is None else twin.short,
        "" if result.fit is None else result.fit.line,
    )
    shown = tuple(Fact(title, text) for title, text in zip(TITLES, facts, strict=True) if text)
    return Screen(verdict.headline, verdict.sentence, shown, next_step(result))


def told(knowledge: Knowledge) -> str:
    """What the attacker was granted beside the weights, and where each fact is from."""
    said = [
        TOLD.get(fact, fact).format(value.replace(", ", " to ") if fact == "value_range" else value)
        + SOURCES.get(source, "")
        for fact, value, source in knowledge.facts
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


def _files(result: AuditResult) -> dict[str, str]:
    """Files as they were named on the command line; a capital word where there was none."""
    named = {"checkpoint": "FILE", "data": "TRAIN", "holdout": "HELD_OUT", "out": "RUN"}
    return named | {name: path for name, path in result.files.items() if path}


def _again(result: AuditResult, *options: str, checkpoint: str = "", out: str = "-again") -> str:
    """The audit once more, with what was granted and these ``options``."""
    files = _files(result)
    said = ["residuum", "audit", checkpoint or files["checkpoint"], "--data", files["data"]]
    said += ["--holdout", files["holdout"], *shlex.split(files.get("options", "")), *options]
    return shlex.join([*said, "--out", f"{files['out']}{out}"])


def _stripped(result: AuditResult) -> tuple[str, str]:
    """Strip the file, audit what is left."""
    files = _files(result)
    strip = shlex.join(["residuum", "strip", files["checkpoint"], "--out", "stripped.pt"])
    return strip, _again(result, checkpoint="stripped.pt", out="-stripped")


def _after_a_leak(result: AuditResult) -> NextStep:
    files = _files(result)
    redact = shlex.join(["residuum", "report", files["out"], "--redact"])
    if result.verdict.stored:
        return NextStep(
            "Do not release this file: it holds training records as they are. Where a network stands "
            "beside them, the first command writes its weights alone. A model that is made of its "
            "records, such as nearest neighbours, cannot be had without them: train another kind. The "
            "last command writes this report without any sample, to be shown to others.",
            (_stripped(result)[0], redact),
        )
    surfaces = {row.surface for row in result.attacks if row.survives}
    if surfaces == {MOMENT}:
        return NextStep(
            "Do not release this file as it is. Its optimiser state gives samples back, and nobody "
            "needs that to use the network: strip it and audit what is left. The last command writes "
            "this report without any sample, to be shown to others.",
            (*_stripped(result), redact),
        )
    arch = result.checkpoint.arch
    # Where its code is the user's, or a start that it was tuned from, so is its training.
    own = Architecture.parse(arch).kind == "module"
    tuned = result.knowledge.provenance.get("theta0") == "user"
    if own or tuned or files["data"].endswith(".csv"):
        text = (
            "Do not release this file. What came back is in the weights, and only another training "
            "changes that: with fewer steps, more samples, noise or differential privacy. Audit the "
            "result again. The command writes this report without any sample, to be shown to others."
        )
        return NextStep(text, (redact,))
    defend = ["residuum", "defend", "--data", files["data"], "--arch", arch]
    private = ",dp:8" if find_spec("opacus") else ""
    defend += ["--defenses", f"noise:0.5{private}", "--out", f"{files['out']}-defended"]
    return NextStep(
        "Do not release this file. What came back is in the weights, and only another training changes "
        "that: the first command measures what defenses keep of the accuracy and of the leak. "
        "Retrain with one that helps and audit again. The second command writes this report without any "
        "sample, to be shown to others.",
        (shlex.join(defend), redact),
    )


def _when_inconclusive(result: AuditResult) -> NextStep:
    """The one thing most likely to help."""
    checks = result.checks
    if result.verdict.n is None:
        return NextStep(
            "Give the training samples and samples the network never saw; without them nothing can be "
            "compared.",
            (_again(result),),
        )
    if result.verdict.recovered is None:
        return NextStep(
            "Give more samples that the network never saw, at least 100 and as many as there are "
            "training samples, from the same source and prepared in the same way.",
            (_again(result),),
        )
    longer = duration(LONGER * seconds_of(result.settings.get("budget") or "1min"))
    more_time = NextStep(
        "Give the audit more time, so that an attack can explain the weights.",
        (_again(result, "--budget", longer),),
    )
    if checks.failures:
        if any("--budget" in failure for failure in checks.failures):
            return more_time
        return NextStep(
            "Take other held-out samples: from the same source as the training samples, none of them "
            "trained on, prepared in the same way.",
            (_again(result),),
        )
    if any(row.ran and row.surface == MOMENT for row in result.attacks):
        return NextStep(
            "Strip the optimiser state, which nobody needs to use the network, and audit what is left.",
            _stripped(result),
        )
    if not acquitting(result.attacks) or checks.hurried:
        return more_time
    if not checks.vouched and checks.strangers:
        return NextStep(
            "Check that architecture, preprocessing, labels and records are those of the training. Where "
            "they are, and the network generalises or was trained privately, vouch for it.",
            (_again(result, "--vouch"),),
        )
    if checks.twin is not None and checks.twin.reason:
        return NextStep(
            "Give more held-out samples, with labels, and let the audit train a twin (no --no-twin).",
            (_again(result),),
        )
    recipe = "optimiser=adam,rate=0.001,epochs=100"
    return NextStep(
        "Say how the network was trained, so that its twin is made alike. Example values:",
        (_again(result, "--recipe", recipe),),
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
    parts += ["anything else that is released beside this file, which the command looks through"]
    folder = shlex.join(["residuum", "scan", _files(result)["checkpoint"]])
    return NextStep(f"{said}{'; '.join(parts)}.", (folder,))
