"""The summary of an audit: what a person reads first.

Terminal, report and notebook show the same texts: the headline, the answers to the three questions, the
attacker's knowledge, what was attacked, and one next step with its command. The verdict is not decided here.
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
    "weights - start": "the change from the start",
    "moment": "the optimizer state in this file",
}
KNOWN_FACTS = {  # known facts in words; a value stands where it is one
    "shape": "the shape of a sample ({})",
    "value_range": "the range of values ({})",
    "mean": "the mean of the samples",
    "sample_count": "how many samples there are ({})",
    "label_balance": "the share of each label",
    "theta0": "the weights that training began from",
    "loss": "the loss ({})",
    "weight_decay": "the weight decay ({})",
    "norms": "the length of every sample",
    "moment": "the optimizer state",
    "columns": "the types of the columns ({})",
}
SOURCES = {
    "user": "",
    "train": " (taken from the training data: the strongest attacker)",
    "holdout": " (taken from the held-out data)",
    "release": " (found in the release itself)",
}
TITLES = ("attacker knows", "attacked", "network", "not verified")


class Fact(NamedTuple):
    """One line of the summary."""

    title: str
    text: str


@dataclass(frozen=True)
class Screen:
    """The summary of an audit."""

    headline: str
    sentence: str
    answers: tuple[Answer, ...]
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
        for answer in self.answers:
            lines += [answer.question]
            power = "" if answer.power in self.sentence else answer.power
            texts = " ".join(filter(None, (answer.evidence, power)))
            lines += _wrap(f"{answer.answer.capitalize()}. {texts}", width, "    ", "    ")
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
    verdict = result.verdict
    nothing = f"nothing but the {'file' if verdict.stored else 'weights'}"
    texts = (
        _knowledge(result.knowledge) or nothing,
        _attacked_surfaces(result),
        "" if result.fit is None else result.fit.line,
        _unproven_assumption(result),
    )
    facts = tuple(Fact(title, text) for title, text in zip(TITLES, texts, strict=True) if text)
    sentence = verdict.not_judged_note if verdict.outcome == LEAK else verdict.sentence
    return Screen(verdict.headline, sentence, verdict.answers, facts, next_step(result))


def _unproven_assumption(result: AuditResult) -> str:
    """Return why nothing shows that the network was trained on these samples, "" if something does."""
    is_shown = result.verdict.outcome == LEAK or result.membership is None
    return "" if is_shown else "; ".join(result.checks.unproven)


def _knowledge(knowledge: Knowledge) -> str:
    """Return what the attacker knows in addition to the release, and where each fact is from."""
    sentences = []
    for known in knowledge.known_facts:
        value = known.value.replace(", ", " to ") if known.fact == "value_range" else known.value
        words = KNOWN_FACTS.get(known.fact, known.fact).format(value)
        sentences.append(words + SOURCES.get(known.provenance, ""))
    return "; ".join(sentences)


def _attacked_surfaces(result: AuditResult) -> str:
    """Return the surfaces that were attacked, and by how many attacks."""
    surfaces = Counter(
        SURFACE_WORDS.get(row.surface, row.surface or "the weights")
        for row in result.attacks
        if row.ran and row.decides
    )
    texts = [
        name if name == SURFACE_WORDS[STORED] else f"{name}, by {n} attack{'' if n == 1 else 's'}"
        for name, n in surfaces.items()
    ]
    return "; ".join(texts) or "nothing: no attack applies to this network"
