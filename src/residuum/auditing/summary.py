"""The summary of an audit, which a person reads first.

Terminal, report and notebook show the same texts: the headline, the answers to the three questions, the
attacker's knowledge, what was attacked, and one next step with its command. This module does not decide the
verdict.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from residuum.auditing.next_steps import NextStep, next_step
from residuum.auditing.outcomes import STORED
from residuum.auditing.questions import Answer
from residuum.auditing.verdict import LEAK
from residuum.records import Knowledge

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult

SURFACE_WORDS = {
    STORED: "stored records",
    "weights": "the weights",
    "weights - start": "the weight update from the initial weights",
    "moment": "the optimizer state in this file",
    "update": "the update",
    "trees": "the trees",
}
FACT_TEXTS = {  # facts that the attacker may know, in words. {} is replaced by the value
    "shape": "the shape of a sample ({})",
    "value_range": "the range of values ({})",
    "mean": "the mean of the samples",
    "sample_count": "how many samples there are ({})",
    "label_balance": "the share of each label",
    "theta0": "the initial weights",
    "loss": "the loss ({})",
    "weight_decay": "the weight decay ({})",
    "norms": "the length of every sample",
    "moment": "the optimizer state",
    "columns": "the types of the columns ({})",
    "column_ranges": "the smallest and largest value of every column",
}
SOURCES = {
    "user": "",
    "train": " (from the training data, which makes the strongest attacker)",
    "holdout": " (from the held-out data)",
    "release": " (from the release itself)",
}
TITLES = ("attacker knows", "attacked", "network", "not verified")


class ScreenLine(NamedTuple):
    """A line of an audit summary: a short title and a text, such as "attacker knows" and the known facts."""

    title: str
    text: str


@dataclass(frozen=True)
class Screen:
    """The summary of an audit: headline, result, answers to the three questions, and the next step."""

    headline: str
    sentence: str
    answers: tuple[Answer, ...]
    lines: tuple[ScreenLine, ...]
    next: NextStep

    def text(self, width: int = 80, without: tuple[str, ...] = ()) -> str:
        """Return the summary as lines for a terminal. Commands can be copied as they are.

        Args:
            width: Largest number of characters in a line.
            without: Titles of lines that are left out.

        Returns:
            The summary, with line breaks.
        """
        indent = max(map(len, TITLES)) + 2
        text_lines = [self.headline.upper(), *_wrap(self.sentence, width)]
        for answer in self.answers:
            text_lines += [answer.question]
            power = "" if answer.power in self.sentence else answer.power
            evidence_and_power = " ".join(filter(None, (answer.evidence, power)))
            text_lines += _wrap(
                f"{answer.answer.capitalize()}. {evidence_and_power}", width, "    ", "    "
            )
        printed_lines = (line for line in self.lines if line.title not in without)
        for title, text in (*printed_lines, ScreenLine("next step", self.next.text)):
            text_lines += _wrap(text, width, f"{title:<{indent}}", " " * indent)
        for command in self.next.commands:
            text_lines += _fold_command(command, width)
        return "\n".join(text_lines)


def _fold_command(command: str, width: int) -> list[str]:
    """Break a command into lines for a shell. An option and its value stay on the same line."""
    command_with_joined_options = re.sub(
        r"( --[\w-]+) (?!-)", "\\1\x00", command
    )  # lines break only at spaces
    folded_lines = [
        line.replace("\x00", " ")
        for line in _wrap(command_with_joined_options, width - 4, "", "    ")
    ]
    return [f"  {line} \\" for line in folded_lines[:-1]] + [f"  {folded_lines[-1]}"]


def _wrap(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """Break a text into lines, only at spaces."""
    wrapper = textwrap.TextWrapper(
        width, first, following, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


def summarize(result: AuditResult) -> Screen:
    """Return the summary of an audit for a reader, with the next step."""
    verdict = result.verdict
    release_text = "model" if result.checks.why_no_attack else "weights"
    release_text = "update" if result.knowledge.update is not None else release_text
    no_knowledge_text = f"nothing but the {'file' if verdict.stored else release_text}"
    known_base_text = "" if result.moved_rows is None else "the weights before fine-tuning"
    line_texts = (
        _knowledge(result.knowledge) or known_base_text or no_knowledge_text,
        _attacked_surfaces(result),
        "" if result.fit is None else result.fit.line,
        _unproven_assumption(result),
    )
    screen_lines = tuple(
        ScreenLine(title, text) for title, text in zip(TITLES, line_texts, strict=True) if text
    )
    sentence = verdict.not_judged_note if verdict.outcome == LEAK else verdict.sentence
    return Screen(verdict.headline, sentence, verdict.answers, screen_lines, next_step(result))


def _unproven_assumption(result: AuditResult) -> str:
    """Return why it is not shown that the model was trained on the passed samples.

    If the audit shows that the model was trained on them, return "".
    """
    needs_no_note = result.verdict.outcome == LEAK or result.membership is None
    return "" if needs_no_note else "; ".join(result.checks.unproven)


def _knowledge(knowledge: Knowledge) -> str:
    """Return what the attacker knows in addition to the release, with the source of each fact."""
    fact_texts = []
    for fact in knowledge.known_facts:
        if knowledge.update is not None and fact.fact in ("moment", "update", "theta0"):
            continue
        value_text = fact.value.replace(", ", " to ") if fact.fact == "value_range" else fact.value
        fact_text = FACT_TEXTS.get(fact.fact, fact.fact).format(value_text)
        fact_texts.append(fact_text + SOURCES.get(fact.provenance, ""))
    if knowledge.update in ("gradient", "difference"):
        fact_texts.append("the weights before the update")
    return "; ".join(fact_texts)


def _attacked_surfaces(result: AuditResult) -> str:
    """Return the parts of the model file that were attacked, each with its number of attacks."""
    attack_counts = Counter(
        SURFACE_WORDS.get(row.surface, row.surface or "the weights")
        for row in result.attacks
        if row.ran and row.decides
    )
    surface_texts = [
        name if name == SURFACE_WORDS[STORED] else f"{name}, by {n} attack{'' if n == 1 else 's'}"
        for name, n in attack_counts.items()
    ]
    why_no_attack = result.checks.why_no_attack and "residuum has no attack on this kind of model"
    return (
        "; ".join(surface_texts)
        or f"nothing: {why_no_attack or 'no attack applies to this network'}"
    )
