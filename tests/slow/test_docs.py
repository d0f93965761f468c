"""What README and docs say is run: code blocks, command lines, links, tables of names, examples, the site."""

from __future__ import annotations

import ast
import html
import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.pages import filling as results
from experiments.pages.tables import read, victims_of
from residuum.attacks.registry import ATTACKS
from residuum.attacks.stationarity.objectives import OBJECTIVES
from residuum.attacks.stationarity.priors import PRIORS
from residuum.cli.main import COMMANDS
from residuum.datasets import DATASETS, load_dataset
from residuum.defenses import DEFENSES
from residuum.evaluation import METRICS
from residuum.report.glossary import GLOSSARY
from residuum.schemas import derive_schemas
from residuum.settings import MODELS, PRESETS
from residuum.training import TrainingConfig, make_release, train
from tests import documents
from tests.cases import relu_point
from tests.documents import PAGES, ROOT
from tests.program import options_of

RUNNERS = ("python", "console")
NOTHING_TO_RUN = {
    "ci.md": "a workflow of another system; its command lines are checked",
    "defenses.md": "audits of minutes; its command lines are checked",
    "faq.md": "no code",
    "field.md": "a benchmark of minutes; tests/slow/test_field.py runs it small",
    "index.md": "a table of contents",
    "glossary.md": "words, which the report has",
    "papers.md": "figures of a GPU; tests/slow/test_papers_page.py compares them with the files",
    "polynomial.md": "command lines on files of the reader; tests/integration/cli/test_identify.py runs them",
    "responsible-use.md": "no code",
    "results.md": "benchmarks of minutes to hours",
    "splitting.md": "command lines of minutes; tests/integration/attacks/test_growth.py runs them",
    "sweeps.md": "command lines of minutes; tests/slow/test_sweep.py runs them",
    "theory.md": "a table of names, which is checked",
}


def trained_digits() -> dict[str, Any]:
    """The names that the audit's page uses without defining them."""
    split = load_dataset("digits", 20)
    state = train("mlp:64-50-1", split.train, TrainingConfig(steps=300))
    model = make_release(state, "mlp:64-50-1", split.train, "binary")
    return {"model": model, "x": split.train.x, "y": split.train.y, "x_test": split.holdout.x}


def exact_point() -> dict[str, Any]:
    """The names that the page about other training sets uses without defining them."""
    point = relu_point()
    return {"model": point.model, "x": point.x, "y": point.y}


def parts_of_ones_own(names: dict[str, Any]) -> None:
    """Every part that the page adds was used and did something."""
    assert names["sizes"][1] < 0.9 * names["sizes"][0]  # the prior
    assert "cosine" in names["scores"].metrics
    assert set(names["counts"]) == {"unaware", "unmix"}  # the defense
    assert {*names["DATASETS"]} >= {"moons"}


def leak(names: dict[str, Any]) -> None:
    assert names["result"].verdict.outcome == "leak"


GIVEN = {"audit.md": trained_digits, "uniqueness.md": exact_point}


def digits_come_back(names: dict[str, Any]) -> None:
    assert names["ncc"].recovered >= 3
    assert names["ncc"].p_value < 0.01


CHECKED = {
    "README.md": leak,
    "algorithm.md": digits_come_back,
    "extending.md": parts_of_ones_own,
}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, every registry as it was before, and audits that ignore the clock."""
    monkeypatch.chdir(tmp_path)
    documents.ignore_the_clock(monkeypatch)
    registries = (ATTACKS, OBJECTIVES, PRIORS, PRESETS, METRICS, DATASETS, DEFENSES)
    before = [dict(registry) for registry in registries]  # type: ignore[call-overload]
    yield
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: Path, elsewhere: None, capsys: pytest.CaptureFixture[str]) -> None:
    runnable = [b for b in documents.blocks(page) if b.language in RUNNERS and not b.reason]
    if not runnable:
        assert page.name in NOTHING_TO_RUN, f"{page.name} has no block that is run"
        return
    namespace = {"__name__": "__main__", **GIVEN.get(page.name, dict)()}
    for block in runnable:
        if block.language == "python":
            documents.run_python(page, block, namespace)
        else:
            documents.run_console(page, block, capsys)
    CHECKED.get(page.name, lambda _: None)(namespace)


def test_command_lines_name_commands_and_options_that_exist() -> None:
    for page in PAGES:
        for block in documents.blocks(page):
            for command, *arguments in documents.command_lines(block):
                if command.startswith("-"):
                    continue
                assert command in COMMANDS, f"{page.name}:{block.line}: no command {command}"
                attack = (
                    arguments[:1]
                    if command == "attack" and arguments[0] in (*MODELS, "fill")
                    else []
                )
                known_options = options_of(command, *attack)
                options = {a.partition("=")[0] for a in arguments if re.match(r"--?[a-z]", a)}
                assert options <= known_options | {"--help"}, (
                    f"{page.name}:{block.line}: {options - known_options}"
                )


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in documents.links(page):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                assert target.startswith("https://"), link
                continue
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{page.name}: {link}"
            assert ROOT in (file, *file.parents), f"{page.name}: {link} leaves the repository"
            assert not anchor or anchor in documents.anchors(file), f"{page.name}: {link}"


def test_a_block_that_is_not_run_says_why() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        marks = len(re.findall("<!-- not run", text))
        reasons = [block.reason for block in documents.blocks(page) if block.reason]
        assert len(reasons) == marks
        assert all(len(reason) > 10 for reason in reasons)


def test_lists_of_pages_are_up_to_date() -> None:
    names = {page.name for page in PAGES}
    assert set(GIVEN) <= names
    assert set(NOTHING_TO_RUN) <= names


# Tables of results.


def test_tables_are_what_the_files_of_results_say() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        names = re.findall(r"<!-- table: (\S+) -->", text)
        assert len(names) == len(results.MARK.findall(text)) == text.count("<!-- /table -->")
        assert results.filled(text) == text, "run: python -m experiments.pages"


def test_every_table_is_on_a_page() -> None:
    tables_shown = {
        n for page in PAGES for n in re.findall(r"<!-- table: (\S+) -->", page.read_text("utf-8"))
    }
    assert tables_shown == {*results.TABLES}


def test_a_number_that_no_file_has_is_written_over() -> None:
    text = "Before.\n\n<!-- table: quick -->\n\n| 500 | 9.99 |\n\n<!-- /table -->\n\nAfter."
    filled = results.filled(text)
    assert (
        filled
        == f"Before.\n\n<!-- table: quick -->\n\n{results.TABLES['quick']()}\n\n<!-- /table -->\n\nAfter."
    )
    assert "9.99" not in filled


PROGRAMS = [
    f"{folder}.{path.stem}"
    for folder in ("benchmarks", "experiments", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if f"python -m {folder}.{path.stem}" in path.read_text(encoding="utf-8")
    and "__main__" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_is_asked_for_help_does_not_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out


def test_a_number_in_running_text_is_the_one_that_its_file_has() -> None:
    path = "surfaces-h200:victims:momentum-500/*:as?saved:all:0.9"
    counts = [v["as saved"]["all"]["0.9"] for v in victims_of("surfaces-h200", "momentum-500")]
    wrong = f"<!-- value: {path} .1f -->99.9<!-- / -->"
    assert results.filled(wrong) == wrong.replace("99.9", f"{sum(counts) / len(counts):.1f}")
    assert results.value(path, "each=d") == ", ".join(map(str, counts))
    assert results.value(path, "max=") == str(max(counts))
    seeds = [read(f"papers/shen2026-fig5{end}")["seconds"] for end in ("", "-seed1", "-seed2")]
    value = results.value("papers/shen2026-fig5+:seconds", "each=.3f")
    assert value == ", ".join(f"{seconds:.3f}" for seconds in seeds)
    with pytest.raises(KeyError, match="nothing at"):
        results.value("surfaces-h200:victims:no-such-victim")


def test_running_text_of_results_holds_no_number_of_its_own() -> None:
    marked = "<!-- given -->17 of 500<!-- / -->, `0.5`, n = 100\n\n| 0.9 |\n"
    assert results.unmarked(marked) == []
    assert results.unmarked(f"{marked} 0.7, 3 of 20 or 15%") == ["0.7", "3 of 20", "15%"]
    for name in results.PROSE:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert not results.unmarked(text), f"{name}: see experiments/pages/__init__.py"


def headlines() -> dict[str, list[float]]:
    """Figures of running text: how they are said, and what the files have."""
    ways = {
        raw: [
            e["ways"]
            for name, es in read("surfaces-gates")["victims"].items()
            for e in es
            if name.endswith("-raw") == raw
        ]
        for raw in (True, False)
    }

    def ends(name: str, key: str, *values: Any) -> list[float]:
        """The least and the largest count of each value of an experiment about uniqueness."""
        rows = read(f"uniqueness-{name}")["rows"]
        recovered_counts = [
            [row["recovered"] for row in rows if row[key] == value] for value in values
        ]
        return [end for counts in recovered_counts for end in (min(counts), max(counts))]

    flat = {(r["factor"], r["seed"]): r["recovered"] for r in read("uniqueness-flat")["rows"]}
    neurons = [f"{share} of the neurons" for share in ("0.1", "1", "0.02")]
    return {
        r"(\d+) to (\d+) come back after 100 steps of 784-1000-1000-1, (\d+) to (\d+) after 300, "
        r"(\d+) and (\d+) after 6000": ends("length", "length", 100, 300, 6000),
        r"to nothing (\d+) and (\d+) come back instead of (\d+) and (\d+)": [
            flat[factor, seed] for factor in (0.0, 1.0) for seed in (0, 1)
        ],
        r"`partial`, 784-1000-1\): (\d+) to (\d+) against (\d+) to (\d+), 2% of them (\d+) to (\d+)": ends(
            "partial", "access", *neurons
        ),
        r"balanced, and (\d+) to (\d+) come back": ends("partial", "access", "first layer alone"),
        r"raw images in (\d+) to (\d+) ways of 100, centered ones in (\d+) to (\d+)": [
            end for raw in (True, False) for end in (min(ways[raw]), max(ways[raw]))
        ],
    }


def test_headlines_of_the_readme_are_those_of_the_field() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    values_shown = re.findall(r"<!-- value: field-h200:\S+:(\w+):\S+ \S+ -->(\d+)<!-- / -->", text)
    assert {"together", "haim2022"} <= {arm for arm, _ in values_shown}


def test_headlines_are_those_of_the_files() -> None:
    pages = [" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES]
    for pattern, values in headlines().items():
        matches = [match for text in pages for match in re.findall(pattern, text)]
        assert matches, pattern
        for match in matches:
            figures = [match] if isinstance(match, str) else match
            for figure, value in zip(figures, values, strict=True):
                digits = len(figure.partition(".")[2])
                assert figure == f"{value:.{digits}f}", (pattern, figure, value)


# Theory to code.


def theory_rows() -> list[list[str]]:
    """Rows of three columns whose second one names code."""
    text = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if len(row) == 3 and "::" in row[2]]


def test_every_equation_has_its_function_and_its_test() -> None:
    defined = lru_cache(
        lambda file: {
            node.name
            for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
    )
    for row in theory_rows():
        names, tests = (re.findall(r"`([^`]+)`", cell) for cell in row[1:3])
        assert names, row
        assert tests, row
        for name in names:
            assert resolve(name) is not None, name
        for test in tests:
            file, _, function = test.partition("::")
            assert function in defined(file), test


def resolve(name: str) -> Any:
    """The object that a dotted name means, below residuum unless it is one of the papers."""
    components = name.split(".")
    root = [] if components[0] == "papers" else ["residuum"]
    for cut in range(len(components), 0, -1):
        try:
            target: Any = importlib.import_module(".".join([*root, *components[:cut]]))
        except ModuleNotFoundError:
            continue
        for component in components[cut:]:
            target = getattr(target, component)
        return target
    raise AssertionError(f"no module residuum.{components[0]}")


def test_names_that_do_not_exist_are_noticed() -> None:
    assert callable(resolve("theory.kkt.certify"))
    with pytest.raises(AttributeError):
        resolve("theory.kkt.certified")
    with pytest.raises(AssertionError):
        resolve("theories.kkt")


def test_the_table_of_theory_is_not_empty() -> None:
    assert len(theory_rows()) > 50


# Exit codes and extension points, each documented in one place.


def test_every_exit_code_is_listed() -> None:
    from residuum import errors
    from residuum.auditing.verdict import EXIT_CODES
    from residuum.cli import main as program

    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    codes = {c.exit_code for c in classes} | {*EXIT_CODES.values()}
    codes |= {program.USAGE, program.INTERNAL, program.INTERRUPTED}
    start = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    assert {int(c) for c in re.findall(r"^\| (\d+) \|", start, re.MULTILINE)} == codes


@pytest.mark.parametrize(
    ("page", "registry"),
    [("choosing.md", OBJECTIVES), ("choosing.md", PRIORS), ("choosing.md", PRESETS)],
)
def test_every_choice_is_described(page: str, registry: dict[str, Any]) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in registry if f"`{name}`" not in text] == []


# The site.


def navigation(entries: list[Any]) -> list[str]:
    targets = [target for entry in entries for target in entry.values()]
    return [p for t in targets for p in (navigation(t) if isinstance(t, list) else [t])]


def test_every_page_is_in_the_navigation() -> None:
    listed = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(listed) == len({*listed})
    assert {page.name for page in PAGES[1:]} <= {*listed}


def build_site(folder: Path, site: Path) -> None:
    """Build as `make docs` does, with the docs and mkdocs.yml of ``folder``."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(folder / "mkdocs.yml"), strict=True, site_dir=str(site)))


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("faq.md", "[a page](index.md#home) [a file](../LICENSE)", False),
        ("faq.md", "[a page](nowhere.md)", True),
        ("faq.md", "[a page](index.md#nowhere)", True),
        ("faq.md", "[a file](../NOTHING)", True),
        ("forgotten.md", "not in the navigation", True),
    ],
)
def test_a_fault_in_a_page_stops_the_build(
    name: str, text: str, refused: bool, tmp_path: Path
) -> None:
    from mkdocs.exceptions import Abort

    (tmp_path / "docs").mkdir()
    for file in ("mkdocs.yml", "docs/hooks.py", "LICENSE"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    (tmp_path / "docs" / "index.md").write_text("# Home", encoding="utf-8")
    (tmp_path / "docs" / name).write_text(f"# Page\n\n{text}", encoding="utf-8")
    with pytest.raises(Abort) if refused else nullcontext():
        build_site(tmp_path, tmp_path / "site")


def test_the_site_builds_without_warnings_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build_site(ROOT, site)
    pages_made = {path.stem for path in site.glob("*.html")}
    assert {page.stem for page in PAGES[1:]} <= pages_made
    assert "A complete attack in one file" in (site / "algorithm.html").read_text(encoding="utf-8")
    assert "max_i |&lt;nu, x_i&gt;|" in (site / "theory.html").read_text(encoding="utf-8")
    words = html.unescape((site / "glossary.html").read_text(encoding="utf-8"))
    assert all(f"<strong>{word}</strong>: {text}" in words for word, text in GLOSSARY.items())
    schemas = {path.name: path.read_text("utf-8") for path in (site / "schemas").iterdir()}
    assert schemas == derive_schemas()
    linked = re.findall(r'href="schemas/([^"]+)"', (site / "schemas.html").read_text("utf-8"))
    assert {*linked} == {*schemas}
    start = (site / "start.html").read_text(encoding="utf-8")
    assert all(f"<td>{text}</td>" in start for text in COMMANDS.values())
    for path in site.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.?(?:https?:)?//", page), path
