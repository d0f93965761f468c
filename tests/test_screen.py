"""The first screen: what it says of every outcome, the next step, and that its words are explained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from residuum.auditing.applicability import NOT_TRIED, Applies
from residuum.auditing.inputs import Fit
from residuum.auditing.result import AuditResult
from residuum.auditing.verdict import (
    HURRIED,
    INCONCLUSIVE,
    LEAK,
    NO_LEAK_FOUND,
    AttackOutcome,
    Checks,
    Findings,
    Twin,
    Verdict,
)
from residuum.cli.main import COMMANDS
from residuum.networks.network import Network
from residuum.report.glossary import GLOSSARY, used
from residuum.report.html import render
from tests import pages
from tests.documents import ROOT

FIT = Fit("accuracy", 1.0, 0.9, 0.5)
KNOWN = Checks(fit=FIT, told_apart=0.001)
FILES = {"checkpoint": "my model.pt", "data": "train.npz", "holdout": "test.npz", "out": "runs/a"}
EXPLAINS = AttackOutcome("binary-kkt", True, True, True, "", "weights", residual=0.1, permuted=0.8)
SILENT = EXPLAINS.replace(residual=0.7)
MOMENT = EXPLAINS.replace(name="moment", surface="moment")
WEIGHTS = Network({"layers.0.weight": torch.ones(1, 1)}, "mlp:1-1")


def audit(verdict: Verdict, attacks: tuple[AttackOutcome, ...], **changes: object) -> AuditResult:
    return pages.bare(verdict=verdict, attacks=attacks, files=FILES, **changes)


def found(outcome: str) -> Verdict:
    return Verdict(
        outcome, ("because of that",), 30, 0, 0.3, None, 0.4, "ncc", "ncc > 0.8", tests=1
    )


LEAKED = found(LEAK).replace(recovered=6, p_value=0.0005, grade="near-copy")
OPEN = found(INCONCLUSIVE)
SHORT = EXPLAINS.replace(unfinished="each restart ran 609 of 3000 steps")
NOT_FITTED = KNOWN.replace(fit=FIT.replace(train=0.5))
LEAKS = (EXPLAINS.replace(adjusted=0.001),)
NEXT = [  # an audit, words of its next step, and part of its last command, "" if words must do
    (audit(LEAKED, LEAKS), "Retrain with differential privacy", "report runs/a --redact"),
    (
        audit(LEAKED, (MOMENT.replace(adjusted=0.001),), checkpoint=WEIGHTS),
        "optimizer state",
        "report runs/a --redact",
    ),
    (audit(LEAKED.replace(stored="9 records"), ()), "contains training records", "--redact"),
    (audit(Verdict(INCONCLUSIVE, ("no data",)), ()), "Pass the training samples", ""),
    (audit(Verdict(INCONCLUSIVE, ("few",), n=30), ()), "more held-out samples", ""),
    (audit(OPEN, (SILENT,), checks=KNOWN), "more time is unlikely to help", ""),
    (
        audit(OPEN, (SHORT,), checks=KNOWN.replace(budget_needed=100.0), settings={"budget": 9.0}),
        "Its full plan takes about 2m",
        "--budget 2m",
    ),
    (
        audit(OPEN, (SHORT,), checks=KNOWN.replace(budget_needed=24_000.0)),
        "would take about 6h40m on this machine",
        "",
    ),
    (audit(OPEN, (EXPLAINS,), checks=Checks(("broke",))), "other held-out samples", ""),
    (
        audit(OPEN, (EXPLAINS,), checks=Checks(("Give a longer --budget",), FIT, 0.001)),
        "more time",
        "--budget 2m",
    ),
    # Inputs that do not fit come before everything that costs time.
    (audit(OPEN, (SHORT,), checks=NOT_FITTED), "Check that architecture", ""),
    (
        audit(OPEN, (EXPLAINS, MOMENT), checks=KNOWN, checkpoint=WEIGHTS),
        "Strip the optimizer state",
        "audit stripped.pt",
    ),
    (audit(OPEN, (EXPLAINS,), checks=KNOWN.replace(told_apart=0.5)), "Check that arch", "--vouch"),
    (
        audit(OPEN, (EXPLAINS,), checks=KNOWN.replace(twins=(Twin(reason=HURRIED),))),
        "more time",
        "--budget 2m",
    ),
    (
        audit(OPEN, (EXPLAINS,), checks=KNOWN.replace(twins=(Twin(reason="none"),))),
        "--no-twin",
        "",
    ),
    (audit(OPEN, (EXPLAINS,), checks=KNOWN.replace(twins=(Twin(n=9),))), "--recipe", ""),
    (
        audit(
            OPEN,
            (EXPLAINS,),
            checks=KNOWN,
            findings=Findings(28, set_aside_matches=(3,)),
        ),
        "Remove the training samples from the held-out file",
        "",
    ),
    (
        audit(found(NO_LEAK_FOUND), (EXPLAINS,), applies=(Applies("ntk", NOT_TRIED, "no start"),)),
        "Not covered: an attacker who knows the weights that training began from (--init)",
        "scan 'my model.pt'",
    ),
]


@pytest.mark.parametrize(("result", "text", "command"), NEXT)
def test_the_next_step_of_every_case_is_one_with_its_command(
    result: AuditResult, text: str, command: str
) -> None:
    step = result.screen.next
    assert text in step.text
    assert command in (step.commands or ("",))[-1]
    assert bool(command) == bool(step.commands)
    assert "noise:" not in " ".join(step.commands)
    for line in step.commands:  # every one can be copied: a known command with options it has
        name, *words = shlex.split(line)[1:]
        help_of = (ROOT / "tests" / "goldens" / "help" / f"{name}.txt").read_text("utf-8")
        assert name in COMMANDS
        assert all(word in help_of for word in words if word.startswith("--")), line


def test_the_next_audit_has_the_same_knowledge() -> None:
    result = pages.example(INCONCLUSIVE)
    (command,) = result.screen.next.commands
    assert "--knowledge runs/a/knowledge.safetensors --budget 15m --out runs/a-again" in command


def test_every_fact_stands_once_and_counts_stand_beside_chance() -> None:
    result = audit(LEAKED, (EXPLAINS.replace(adjusted=0.001),), checks=KNOWN)
    text = " ".join(result.screen.text().split())
    for once in ("6 of 30", "chance alone gives 0.3", "p < 0.001", "above 0.8", "100.0% on the"):
        assert text.count(once) == 1, once
    assert FIT.line not in result.screen.text(80, ("network",))


def test_what_was_granted_is_said_in_words_with_its_source() -> None:
    told = dict(pages.audited(3).screen.facts)["attacker was told"]
    for part in ("range of values (0 to 1)", "mean of the samples (taken from the training data"):
        assert part in told
    assert dict(pages.bare().screen.facts)["attacker was told"] == "nothing but the weights"


@pytest.mark.parametrize("width", [80, 110])
def test_no_line_is_wider_than_the_terminal_and_commands_survive(width: int) -> None:
    for result, _, _ in NEXT:
        lines = result.screen.text(width).splitlines()
        assert max(map(len, lines)) <= width
        assert not any(
            re.search(r" --(?!vouch)[\w-]+ \\$", line) for line in lines
        )  # an option has its value
        joined = re.sub(r" \\\n\s*", " ", "\n".join(lines))
        assert all(command in joined for command in result.screen.next.commands)


# Words that only the authors know; whichever stands on a first screen must be explained there.
JARGON = [
    "adjusted",
    "baseline",
    "bias",
    "calibrated",
    "candidate",
    "certificate",
    "chance",
    "Clarke",
    "class-like",
    "complementary",
    "control",
    "convict",
    "deciding",
    "energy",
    "exchangeable",
    "explained",
    "exposure",
    "Gram",
    "granted",
    "held-out",
    "homogeneous",
    "homogeneity",
    "kink",
    "KKT",
    "lambda",
    "leak",
    "margin",
    "membership",
    "multiplier",
    "near-copy",
    "NCC",
    "NTK",
    "null",
    "optimiser",
    "permutation",
    "permuted",
    "Phi",
    "pool",
    "prior",
    "recovered",
    "residual",
    "resembles",
    "restart",
    "stationarity",
    "surface",
    "survives",
    "theta",
    "threshold",
    "uniqueness",
    "unmix",
    "vouch",
]


def unexplained(said: str) -> list[str]:
    """Words of ours that the glossary lacks."""
    known = " ".join(used(said))
    return [word for word in JARGON if re.search(rf"\b{word}", said) and word not in known]


def test_every_term_of_the_first_screen_is_in_the_glossary() -> None:
    """Of real audits of every kind too, in ``test_terminal.py``."""
    said = " ".join(result.screen.text() for result, _, _ in NEXT)
    assert unexplained(said) == []
    assert "positive control" in used(said)
    assert unexplained("the Clarke residual") == ["Clarke"]


def test_the_glossary_is_short() -> None:
    assert 25 <= len(GLOSSARY) <= 40
    for text in GLOSSARY.values():
        assert text.endswith("."), text


# Sentences that a newcomer could not read. They must not come back: not in commands, reports or pages.
UNREADABLE = (
    "in the permutation test at",
    "beats 99% of what chance reaches",
    "reaches on samples nobody trained on",
    "value_range: said by",
    "status: steps",
    "verdict: no-leak-found",
    "supports neither a leak nor its absence",
    "hence two figures",
    "gates free at {",
    "gates free at %s",
    "least y Phi(x)",
    "0 unlimited",
    "orange above, blue below",
    "and none was granted",
    "of extreme output",
    "Name it: --arch mlp:784",
    "said by the auditor",
    "it draws what it assumes",
    "Violet marks what",
    "a convolution has none",
)


FORMED = r"gates free at \d|\d unlimited|Name it: --arch \w+:\d|status: \w+_|\bfar_from_kkt\b"


def test_the_worst_wordings_are_gone() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.html"), ROOT / "README.md"]
    files += [*(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.md")]
    assert len(files) > 150
    for path in files:
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8"))  # strings that go on
        text = " ".join(text.split())
        for wording in UNREADABLE:
            assert wording not in text, (Path(path).name, wording)
    for outcome in pages.OUTCOMES:
        text = re.sub(r"<[^>]+>", " ", render(pages.example(outcome)))
        assert not re.search(FORMED, " ".join(text.split()))


def test_the_readme_is_short_and_says_where_the_package_is_to_be_had() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 120
    assert "on no package index" in text
    assert text.count("| tool |") == 1


def test_an_audit_without_files_prints_no_command() -> None:
    """From Python there is no file to name, and a command with a made-up name would fail."""
    for result, _, _ in NEXT:
        assert result.replace(files={}).screen.next.commands == ()
