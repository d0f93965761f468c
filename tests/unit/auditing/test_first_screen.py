"""The first screen: its text for every outcome, the next step, and the glossary of its words."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from residuum.auditing.applicability import NOT_TRIED, Applies
from residuum.auditing.next_steps import TABLE
from residuum.auditing.outcomes import AttackOutcome, Findings
from residuum.auditing.power import BUDGET, PositiveControls
from residuum.auditing.result import AuditResult
from residuum.auditing.stored_records import ONLY_STORED
from residuum.auditing.token_models import NO_ATTACK as NO_ATTACK_ON_TOKENS
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND, Checks, Verdict
from residuum.cli.main import COMMANDS
from residuum.evaluation.adapting import Fit
from residuum.evaluation.targets import TargetTest
from residuum.networks.network import Network
from residuum.records import RecoveredTable
from residuum.records.attribute_test import AttributeTest
from residuum.report.glossary import GLOSSARY, compile_pattern, find_entry, find_used_words
from residuum.report.html import render
from residuum.risk.membership import MOVED_ROWS, LossSeparation
from tests import pages
from tests.documents import ROOT

FIT = Fit("accuracy", 1.0, 0.9, 0.5)
KNOWN = Checks(fit=FIT, told_apart=0.001)
FILES = {"checkpoint": "my model.pt", "data": "train.npz", "holdout": "test.npz", "out": "runs/a"}
RAN = AttackOutcome("binary-kkt", True, True, True, "", "weights", residual=0.1)
MOMENT = RAN.replace(name="moment", surface="moment")
WEIGHTS = Network({"layers.0.weight": torch.ones(1, 1)}, "mlp:1-1")
MEMBERS = pages.member_test(30, holdout=600)
MEMORIZES = MEMBERS.replace(loss=LossSeparation(0.9, 0.85, 0.95, 0.3, 1e-6))


def audit(verdict: Verdict, attacks: tuple[AttackOutcome, ...], **changes: object) -> AuditResult:
    return pages.bare(verdict=verdict, attacks=attacks, files=FILES, **changes)


def opened(checks: Checks = KNOWN, attacks: tuple[AttackOutcome, ...] = (RAN,), **changes: object):
    """An inconclusive audit."""
    return audit(OPEN, attacks, checks=checks, **{"membership": MEMBERS, **changes})


def leaked(grade: str, attacks: tuple[AttackOutcome, ...] = (), **changes: object) -> AuditResult:
    """An audit that found a leak of this grade."""
    limit = str(changes.pop("limit", "membership"))
    stored = "9 records" if grade == "verbatim" else ""
    verdict = Verdict(LEAK, n=30, grade=grade, grades={grade: 6}, limit=limit, stored=stored)
    return audit(verdict, attacks, **changes)


def recovered_table() -> RecoveredTable:
    values, flags = torch.zeros(3, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.bool)
    targets = torch.zeros(3, 1, dtype=torch.float64)
    return RecoveredTable(
        "RandomForestRegressor", 9, values, values, flags, ~flags, ~flags, targets, True
    )


TABLE_OF_FOREST = recovered_table()
OPEN = Verdict(INCONCLUSIVE, ("because of that",), n=30)
SURVIVES = RAN.replace(adjusted=0.001)
LEAKS_MOMENT = MOMENT.replace(adjusted=0.001)
SHORT = RAN.replace(unfinished="each restart ran 609 of 3000 steps")
NOT_FITTED = KNOWN.replace(fit=FIT.replace(train=0.5))
LIMITED_CONTROLS = (PositiveControls("membership", limited_by=BUDGET),)
NO_CONTROLS = (PositiveControls("membership", reason="you passed --no-positive-controls"),)
TOKENS = Checks(why_no_attack=NO_ATTACK_ON_TOKENS)
NO_ATTACK = Checks(why_no_attack="residuum has no attack on models of the class Ridge")
# A name, an audit, words of its next step, and a part of its last command, "" if there is none. One row of
# the table in next_steps.py after the other.
NEXT = [
    ("stored", leaked("verbatim", checkpoint=WEIGHTS), "writes only the weights", "--redact"),
    (
        "texts in the folder",
        leaked("verbatim", checks=TOKENS),
        "its files hold training texts",
        "report runs/a --redact",
    ),
    ("made of records", leaked("verbatim"), "such as nearest neighbors", "--redact"),
    ("below", leaked("class-level", limit="near-copy"), "weaker than your limit", "--redact"),
    (
        "words",
        leaked(
            "membership",
            checks=TOKENS,
            membership=MEMBERS.replace(is_finding=True, signal=MOVED_ROWS),
        ),
        "rows of the embedding that moved",
        "report runs/a --redact",
    ),
    ("members", leaked("membership"), "who is in the training set", "report runs/a --redact"),
    (
        "inferred values",
        leaked("attribute", attributes=AttributeTest(30)),
        "Rounding (bf16, int8), mini-batches and weight decay do not protect",
        "report runs/a --redact",
    ),
    (
        "stored values",
        leaked("attribute", targets=TargetTest("values of columns")),
        "its thresholds are values of training records",
        "report runs/a --redact",
    ),
    (
        "forest",
        leaked("near-copy", (SURVIVES,), table=TABLE_OF_FOREST),
        "at least 5 records in every leaf",
        "report runs/a --redact",
    ),
    (
        "moment",
        leaked("near-copy", (LEAKS_MOMENT,), checkpoint=WEIGHTS),
        "Strip it and audit what remains",
        "report runs/a --redact",
    ),
    (
        "moment and weights",
        leaked("near-copy", (LEAKS_MOMENT, SURVIVES)),
        "Also remove the optimizer state",
        "report runs/a --redact",
    ),
    (
        "weights",
        leaked("near-copy", (SURVIVES,)),
        "Retrain with differential privacy",
        "report runs/a --redact",
    ),
    (
        "samples of another form",
        audit(Verdict(INCONCLUSIVE, ("no test",)), (), notes=(f"{ONLY_STORED}. Encode them",)),
        "Pass samples that the model can receive",
        "",
    ),
    ("no data", audit(Verdict(INCONCLUSIVE, ("no data",)), ()), "Pass the training samples", ""),
    (
        "no held-out samples",
        opened(membership=MEMBERS.replace(holdout=0)),
        "Pass samples that the network never saw",
        "",
    ),
    ("failed control", opened(Checks(("broke",))), "other held-out samples", ""),
    ("misread", opened(NOT_FITTED, (SHORT,)), "Check that architecture", ""),
    (
        "few held-out samples",
        opened(membership=MEMBERS.replace(holdout=50, reason="there are 50.")),
        "at least 199, and there are 50",
        "",
    ),
    (
        "memorizes, no attack",
        opened(NO_ATTACK, membership=MEMORIZES),
        "with more regularization",
        "report runs/a --redact",
    ),
    (
        "token model",
        opened(TOKENS, membership=MEMBERS),
        "audit the head with these embeddings as samples",
        "report runs/a --redact",
    ),
    (
        "no attack",
        opened(NO_ATTACK, membership=MEMBERS.replace(holdout=100)),
        "No audit by residuum can rule out a leak of this kind of model",
        "report runs/a --redact",
    ),
    (
        "quick",
        opened(KNOWN.replace(restricted="effort quick"), settings={"effort": "quick"}),
        "Run the standard plan",
        "--out runs/a-again",
    ),
    (
        "repeats match",
        opened(findings=Findings(28, set_aside_matches=(3,))),
        "Remove the training samples from the held-out file",
        "",
    ),
    (
        "moment stays",
        opened(attacks=(RAN, MOMENT), checkpoint=WEIGHTS),
        "Strip the optimizer state",
        "audit stripped.pt",
    ),
    (
        "out of reach",
        opened(KNOWN.replace(budget_needed=24_000.0), (SHORT,)),
        "would take about 6h40m of reference time",
        "",
    ),
    (
        "left out",
        opened(KNOWN.replace(budget_needed=100.0), (SHORT,), settings={"budget": 9.0}),
        "Raise the budget",
        "--budget 1m40s",
    ),
    ("stopped", opened(KNOWN.replace(stopped="the clock")), "on an idle machine", "runs/a-again"),
    (
        "forest memorizes",
        opened(membership=MEMORIZES, table=TABLE_OF_FOREST),
        "more records in every leaf",
        "--redact",
    ),
    ("memorizes", opened(membership=MEMORIZES), "cannot rule out a leak", "--redact"),
    (
        "no controls",
        opened(KNOWN.replace(positive_controls=NO_CONTROLS)),
        "Let the audit train its positive controls",
        "audit 'my model.pt'",
    ),
    (
        "forest without controls",
        opened(membership=MEMBERS, table=TABLE_OF_FOREST),
        "Pass more held-out samples with targets",
        "",
    ),
    (
        "other samples",
        opened(membership=MEMBERS.replace(reason="of another kind.")),
        "Check that architecture",
        "",
    ),
    (
        "small controls",
        opened(KNOWN.replace(positive_controls=LIMITED_CONTROLS)),
        "Raise the budget to 40m",
        "--budget 40m",
    ),
    ("not detected", opened(), "--recipe", ""),
    (
        "no leak",
        audit(
            Verdict(NO_LEAK_FOUND, n=30), (RAN,), applies=(Applies("ntk", NOT_TRIED, "no start"),)
        ),
        "Not covered: an attacker who knows the initial weights (--init)",
        "scan 'my model.pt'",
    ),
]
STEPS = [case[1:] for case in NEXT]


def test_every_row_of_the_table_of_next_steps_has_a_case() -> None:
    rows = [(outcome, i) for outcome, table in TABLE.items() for i in range(len(table))]
    reached = []
    for _, result, _, _ in NEXT:
        table = TABLE[result.verdict.outcome]
        first = next(i for i, row in enumerate(table) if row.applies(result))
        reached.append((result.verdict.outcome, first))
    assert reached == rows


@pytest.mark.parametrize(("result", "text", "command"), STEPS, ids=[case[0] for case in NEXT])
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


def test_every_fact_is_printed_once_and_counts_with_what_chance_gives() -> None:
    result = pages.example(LEAK)
    text = " ".join(result.screen.text().split())
    for once in (
        f"{result.verdict.recovered} of 60",
        "0.6 expected by chance",
        "p = 0.002",
        "100.0% on the",
        *(answer.question for answer in result.verdict.answers),
    ):
        assert text.count(once) == 1, once
    assert FIT.line not in result.screen.text(80, ("network",))


def test_attacker_knowledge_is_shown_in_words_with_its_source() -> None:
    line = dict(pages.audited(3).screen.lines)["attacker knows"]
    for phrase in ("range of values (0 to 1)", "mean of the samples (from the training data"):
        assert phrase in line
    assert dict(pages.bare().screen.lines)["attacker knows"] == "nothing but the weights"


@pytest.mark.parametrize("width", [80, 110])
def test_no_line_is_wider_than_the_terminal_and_commands_survive(width: int) -> None:
    for _, result, _, _ in NEXT:
        lines = result.screen.text(width).splitlines()
        assert max(map(len, lines)) <= width
        flags = "positive-controls"  # options without a value
        assert not any(re.search(rf" --(?!{flags})[\w-]+ \\$", line) for line in lines)
        joined = re.sub(r" \\\n\s*", " ", "\n".join(lines))
        assert all(command in joined for command in result.screen.next.commands)


# Words that only the authors know; whichever stands on a first screen must be explained there.
JARGON = [
    "adjusted",
    "activation",
    "baseline",
    "bias",
    "calibrated",
    "candidate",
    "certificate",
    "chance",
    "Clarke",
    "class-level",
    "complementary",
    "control",
    "convict",
    "deciding",
    "energy",
    "exchangeable",
    "explained",
    "false discovery",
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
    "named",
    "near-copy",
    "NCC",
    "NTK",
    "null",
    "optimizer",
    "permutation",
    "permuted",
    "power",
    "reference time",
    "Phi",
    "pool",
    "prior",
    "recovered",
    "residual",
    "resemblance",
    "restart",
    "stationarity",
    "surface",
    "survives",
    "theta",
    "threshold",
    "uniqueness",
    "twin",
    "unmix",
    "verbatim",
    "vouch",
]


def unexplained(text: str) -> list[str]:
    """Words of ours that the glossary lacks."""
    explained = " ".join(find_used_words(text))
    return [word for word in JARGON if re.search(rf"\b{word}", text) and word not in explained]


def test_every_term_of_the_first_screen_is_in_the_glossary() -> None:
    """Of real audits of every kind too, in ``test_terminal.py``."""
    text = " ".join(result.screen.text() for _, result, _, _ in NEXT)
    assert unexplained(text) == []
    assert "positive control" in find_used_words(text)
    assert unexplained("the Clarke residual") == ["Clarke"]


def test_the_glossary_is_short_and_in_order() -> None:
    assert 25 <= len(GLOSSARY) <= 40
    words = [word.lower() for word in GLOSSARY]
    assert words == sorted(words)
    for text in GLOSSARY.values():
        assert text.endswith(".")
        assert ";" not in text
        assert all(len(sentence.split()) <= 30 for sentence in text.split(". ")), text


def test_words_of_the_verdict_are_explained_and_removed_words_are_not() -> None:
    new = {"membership", "activation boundary", "named", "false discovery rate", "positive control"}
    new |= {"effort", "reference time", "class-level", "resemblance", "near-copy", "verbatim"}
    assert new <= set(GLOSSARY)
    removed = {
        "explained",
        "permuted target",
        "vouch",
        "class-like",
        "resembles",
        "granted",
        "twin",
    }
    assert not removed & set(GLOSSARY)
    texts = " ".join(GLOSSARY.values())
    for word in ("twin", "vouch", "permuted", "explain", "switches at"):
        assert word not in texts


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("near-copies", "near-copy"),
        ("14 Near-copy", "near-copy"),
        ("activation boundaries", "activation boundary"),
        ("positive controls", "positive control"),
        ("classes", ""),
        ("p < 0.001", "p"),
        ("P. 5", ""),
        ("KKT points", "KKT"),
        ("kkt", ""),
        ("losses and gradients", ""),
    ],
)
def test_plurals_lead_to_their_word(text: str, word: str) -> None:
    assert find_used_words(text) == ((word,) if word else ())
    assert [find_entry(match[0]) for match in compile_pattern().finditer(text)] == (
        [word] if word else []
    )


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
    for _, result, _, _ in NEXT:
        assert result.replace(files={}).screen.next.commands == ()
