"""How much a reader must hold in the head: ``python -m benchmarks.house``. It informs, it fails nothing.

Code lines are those with code on them: blank lines, comments and docstrings are not counted. The files
that ``residuum attack`` and ``residuum audit`` enter are those of the package in which a function
ran on a small network (imports and class bodies not counted); changes of file in one step are those
between one call and the next, from the optimizer's step to the first update of a variable.
"""

from __future__ import annotations

import ast
import io
import itertools
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.harness import arguments

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "residuum"
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Lines with code on them."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines -= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return len(lines)


def importers() -> dict[str, set[str]]:
    """Which modules of the package import each of its modules."""
    names = {_module(path): path for path in PACKAGE.rglob("*.py")}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        wanted: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        for other in (wanted & set(names)) - {name}:
            found[other].add(name)
    return found


def lonely() -> tuple[list[str], list[str]]:
    """Modules with one importer: cuts, and those that are commands or re-exported by their package."""
    cuts, expected = [], []
    for name, others in importers().items():
        if len(others) == 1:
            command = name.startswith(("residuum.cli.", "residuum.verbs."))
            exported = others == {name.rpartition(".")[0]}
            (expected if command or exported else cuts).append(name)
    return cuts, expected


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@contextmanager
def entered(files: list[str], until: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Append the package's file of every function that is called, ``until`` says enough."""

    def watch(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(str(PACKAGE)) or until():
            return
        if frame.f_code.co_name != "<module>" and "__module__" not in frame.f_locals:
            files.append(str(Path(name).relative_to(PACKAGE)))

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def files_of(command: list[str]) -> set[str]:
    """Files that a command of residuum enters, what it imports loaded before."""
    from residuum.cli.main import main

    files: list[str] = []
    with entered(files):
        main(command)
    return set(files)


def changes_in_a_step() -> int:
    """Changes of file between the call of one optimizer step and its first update."""
    import torch

    from residuum.attacks import BinaryKKT
    from residuum.networks import Architecture
    from residuum.networks.network import Network
    from residuum.records import Knowledge
    from residuum.stationarity import parameters
    from residuum.training import TrainingConfig, initialize

    arch = "mlp:64-30-30-1"
    theta = parameters(initialize(Architecture.parse(arch), TrainingConfig()))
    checkpoint, known = Network(theta, arch), Knowledge(value_range=(0.0, 1.0))
    attack = BinaryKKT(restarts=1, steps=10).resolve_settings(checkpoint, known)
    solver = attack.solver(checkpoint, known)
    state = solver.start()
    x, lam, moving = state.x.clone(), state.lam.clone(), state.moving
    files: list[str] = []
    moments: dict[str, torch.Tensor] = {}
    solver.step(x, lam, moments, 0, moving)  # what runs once is behind us
    before = x._version, lam._version
    with entered(files, lambda: (x._version, lam._version) != before):
        solver.step(x, lam, moments, 1, moving)
    return sum(a != b for a, b in itertools.pairwise(files))


def _quiet(work: Callable[[], Any]) -> Any:
    from contextlib import redirect_stderr, redirect_stdout

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return work()


def commands() -> dict[str, int]:
    """Files entered by the two commands on a small network."""
    from residuum.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/m"
        _quiet(
            lambda: main(
                [
                    "train",
                    "--data",
                    "digits",
                    "--n",
                    "20",
                    "--holdout",
                    "200",
                    "--arch",
                    "mlp:64-30-30-1",
                    "--steps",
                    "60",
                    "--out",
                    run,
                ]
            )
        )
        attack = ["attack", f"{run}/model.safetensors", "--steps", "60", "--restarts", "1"]
        audit = ["audit", run, "--data", run, "--holdout", run, "--effort", "quick"]
        for command in (attack, audit):  # once for what is imported late
            _quiet(lambda c=command: main([*c, "--out", f"{folder}/{c[0]}-first"]))
        return {
            c[0]: len(_quiet(lambda c=c: files_of([*c, "--out", f"{folder}/{c[0]}"])))
            for c in (attack, audit)
        }


def main() -> int:
    """Print the counts."""
    for name, root in (("src", PACKAGE), ("papers", ROOT / "papers")):
        paths = list(root.rglob("*.py"))
        lines = sum(map(code_lines, paths))
        skips = sum(p.read_text(encoding="utf-8").count("# fmt: " + "skip") for p in paths)
        print(f"{name}: {lines} code lines in {len(paths)} files, fmt skipped {skips} times")
    cuts, expected = lonely()
    aside = f"and {len(expected)} commands or re-exports"
    print(f"modules with one importer: {len(cuts)}, {aside}")
    for name, count in commands().items():
        print(f"files entered by {name}: {count}")
    print(f"changes of file in one step: {changes_in_a_step()}")
    return 0


if __name__ == "__main__":
    arguments(__doc__)
    sys.exit(main())
