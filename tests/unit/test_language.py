"""Names say what they name, and public functions are documented completely."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import residuum

SOURCE = Path(residuum.__file__).parent
# Names that say nothing when they stand alone. Code about trees may use "left" (of a child).
VAGUE = set(
    """found part parts one said told own known kept given whole rest shown wanted some how why made beside
    left there others facts mine every each far near apart alike laid drawn asked taken again gone both at
    of""".split()  # noqa: SIM905  a list of words is easier to read
)
# Readers of trees and the code about trees may use "left".
MAY_USE_LEFT = re.compile(r"tree|forest|boost|lightgbm")
MODULES = sorted(SOURCE.rglob("*.py"))
ROOT = Path(__file__).parents[2]
SCRIPTS = [
    path
    for folder in ("benchmarks", "experiments", "papers", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TESTS = Path(__file__).parents[1]
TEST_FOLDERS = sorted({path.parent for path in TESTS.rglob("*.py")})


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield all names that a module binds, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def vague_names(path: Path) -> list[str]:
    folder = SOURCE if path.is_relative_to(SOURCE) else ROOT
    is_about_trees = path.is_relative_to(folder) and MAY_USE_LEFT.search(
        str(path.relative_to(folder))
    )
    allowed = {"left"} if is_about_trees else set()
    return [
        f"line {line}: {name}"
        for name, line in bindings(ast.parse(path.read_text()))
        if name.strip("_") in VAGUE - allowed
    ]


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield functions and methods that are neither private nor properties."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if not any(w in decorators for w in ("property", "override", "overload", "setter")):
                yield node


def gaps(function: ast.FunctionDef) -> list[str]:
    """Return what the docstring of a function with two or more parameters lacks."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls")]
    if len(names) < 2:
        return []
    doc = ast.get_docstring(function) or ""
    section = doc.partition("Args:")[2]
    missing = [name for name in names if f"{name}:" not in section and f"{name} (" not in section]
    returns = "None" if function.returns is None else ast.unparse(function.returns)
    if returns not in ("None", "NoReturn") and "Returns:" not in doc and "Yields:" not in doc:
        missing.append("Returns")
    return missing


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_names_say_what_they_name(path: Path) -> None:
    assert not vague_names(path)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_scripts_say_what_they_name(path: Path) -> None:
    assert not vague_names(path)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_public_functions_document_parameters_and_results(path: Path) -> None:
    lacking = {
        f"line {function.lineno}: {function.name}": missing
        for function in public_functions(ast.parse(path.read_text()).body)
        if (missing := gaps(function))
    }
    assert not lacking


@pytest.mark.parametrize("folder", TEST_FOLDERS, ids=lambda path: str(path.relative_to(TESTS)))
def test_names_in_tests_say_what_they_name(folder: Path) -> None:
    vague = {path.name: names for path in folder.glob("*.py") if (names := vague_names(path))}
    assert not vague


def test_the_checks_notice_a_vague_name_and_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f(found: int, b: int) -> int:\n    _one = found\n    return _one + b\n")
    assert vague_names(path) == ["line 1: found", "line 2: _one"]
    (function,) = public_functions(ast.parse(path.read_text()).body)
    assert gaps(function) == ["found", "b", "Returns"]
