"""Would the tests notice small faults in the code that decides? ``python -m tools.mutants [SAMPLE ...]``.

Faults of ``mutations`` are put into the evaluation package, the verdict and the stationarity equation, one
at a time. They are ranked by a hash of the seed and of what they change, so that an edit elsewhere does not
change the sample. The first faults of each file are taken, in proportion to their number. There are three
samples:

    first     seed 1, drawn before the tests that it led to were written
    second    seed 3, drawn from the others after those tests were written: the unbiased estimate (seed 2 was
              listed too early and never run)
    review    faults that an independent review of the tests had tried, in ``mutants.toml``

Each mutant is tested in a copy of the package. The test files that cover its module run until one test
fails. A time-out counts as killed. ``mutants.toml`` gives the reasons of survivors. Results are written to
``tools/results/mutants.json`` after every mutant. They are used again while the file and its tests are the
same.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import hypothesis
import kornia.metrics  # noqa: F401  (what forks need is imported once, here)
import pytest
import scipy.optimize  # noqa: F401

from residuum.records import write_json
from residuum.records.rundir import environment, read_json
from tools import RESULTS
from tools.mutations import PACKAGE, Mutant, mutants_of

Results = dict[str, dict[str, Any]]
ROOT = Path(__file__).parent.parent
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SEEDS = {"first": 1, "second": 3}
SIZE, LEAST = 60, 3  # mutants of a sample, and of each file at least
BAR = 0.9
PACKAGES = ("residuum", "benchmarks", "experiments", "papers", "tools")  # imported anew by a fork
PATIENCE = 5  # a mutant whose tests take so many times as long is killed


def scope() -> list[str]:
    """Return the files from which faults are drawn."""
    evaluation = sorted(path.name for path in (PACKAGE / "evaluation").glob("[!_]*.py"))
    return [
        *(f"evaluation/{name}" for name in evaluation),
        "auditing/verdict.py",
        "stationarity.py",
    ]


def draw() -> dict[str, list[Mutant]]:
    """Return the mutants of every sample."""
    pools = {file: mutants_of(file) for file in scope()}
    total = sum(map(len, pools.values()))
    shares = {file: max(LEAST, round(SIZE * len(pool) / total)) for file, pool in pools.items()}
    samples: dict[str, list[Mutant]] = {}
    for name, seed in SEEDS.items():
        samples[name] = []
        for file, pool in pools.items():
            pool.sort(key=lambda mutant: _digest(f"{seed} {mutant.key}".encode()))
            samples[name] += pool[: shares[file]]
            del pool[: shares[file]]
    samples["review"] = [reviewed_mutant(**row) for row in TABLE["review"]]
    return samples


def reviewed_mutant(what: str, file: str, before: str, after: str) -> Mutant:
    """Return the mutant of an entry of the table."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    if source.count(before) != 1:
        raise SystemExit(f"{file} must hold the text of {what!r} once; mend mutants.toml: {before}")
    head = source[: source.index(before)]
    start, size = len(head.encode()), len(before.encode())
    line = head.count("\n") + 1
    return Mutant(file, what, line, before, after, start, start + size, after)


def covering(file: str) -> list[str]:
    """Return the test files of a module, by the longest entry of the table that matches."""
    fitting = [prefix for prefix in TABLE["covering"] if file.startswith(prefix)]
    return [f"tests/{name}.py" for name in TABLE["covering"][max(fitting, key=len)]]


@dataclass
class Trial:
    """A copy of the package in which a fork of this process tests one mutant at a time."""

    root: Path
    process: Any = None
    began: float = 0.0
    limit: float = 0.0

    @classmethod
    def copy_to(cls, root: Path) -> Trial:
        """Copy the package."""
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, root / "residuum", ignore=unwanted)
        # Compared by content: a mutant of the same size and second must not run old bytecode.
        checked = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(root, quiet=1, invalidation_mode=checked)
        return cls(root)

    def begin(self, mutant: Mutant | None, tests: list[str], limit: float) -> None:
        """Start the tests on the mutant, or on the package without a mutant."""
        if mutant is not None:
            (self.root / "residuum" / mutant.file).write_bytes(mutant.mutated())
        self.process = get_context("fork").Process(target=_run, args=(self.root, tests))
        self.began, self.limit = time.perf_counter(), limit
        self.process.start()

    def end(self, mutant: Mutant | None) -> dict[str, Any] | None:
        """Return the test that killed the mutant and the seconds, None while the tests run."""
        self.process.join(0.1)
        seconds = time.perf_counter() - self.began
        if running := self.process.is_alive():
            if seconds < self.limit:
                return None
            self.process.kill()
            self.process.join()
        if mutant is not None:
            original = (PACKAGE / mutant.file).read_bytes()
            (self.root / "residuum" / mutant.file).write_bytes(original)
        output = (self.root / "shown").read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        killer = "time-out" if running else failed[1] if failed else "the tests do not start"
        killed = running or self.process.exitcode != 0
        return {"killed_by": killer if killed else None, "seconds": round(seconds, 1)}


def _run(root: Path, tests: list[str]) -> None:
    """Run the tests in a fork, which has torch in memory. The package is imported again."""
    with (root / "shown").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    os.chdir(ROOT)
    sys.path[:0] = [str(root), str(ROOT)]
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    # No mutant learns from the examples that failed another one.
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    options = ["-x", "-q", "-rfE", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    sys.exit(pytest.main([*options, *tests]))


def run_mutants(mutants: list[Mutant], workers: int, old: Results) -> Iterator[Results]:
    """Yield results by the keys of mutants. A stored result is used if nothing has changed."""
    waiting = []
    for mutant in mutants:
        tests = b"".join((ROOT / name).read_bytes() for name in covering(mutant.file))
        digest = _digest(mutant.key.encode() + mutant.mutated() + tests)
        if (row := old.get(mutant.key, {})).get("digest") == digest:
            yield {mutant.key: row}
        else:
            waiting.append((mutant, digest))
    with tempfile.TemporaryDirectory() as folder:
        trials = [Trial.copy_to(Path(folder) / str(number)) for number in range(workers)]
        limits: dict[str, float] = {}
        for tests in (covering(mutant.file) for mutant, _ in waiting):
            if str(tests) not in limits:
                trials[0].begin(None, tests, float("inf"))
                while (plain_run := trials[0].end(None)) is None:
                    pass
                if plain_run["killed_by"]:
                    raise SystemExit(f"{plain_run['killed_by']} fails without any mutant")
                limits[str(tests)] = 60 + PATIENCE * plain_run["seconds"]
        busy: dict[int, tuple[Mutant, str]] = {}
        while waiting or busy:
            for number, trial in enumerate(trials):
                if number in busy and (result := trial.end(busy[number][0])) is not None:
                    mutant, digest = busy.pop(number)
                    yield {mutant.key: result | {"digest": digest}}
                if number not in busy and waiting:
                    busy[number] = waiting.pop(0)
                    tests = covering(busy[number][0].file)
                    trial.begin(busy[number][0], tests, limits[str(tests)])


def main() -> int:
    """Try the samples on the command line, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("samples", nargs="*", help="first, second, review (default: all)")
    parser.add_argument(
        "--workers", type=int, default=1, help="mutants tested in parallel (default: 1)"
    )
    options = parser.parse_args()
    samples = {k: v for k, v in draw().items() if k in options.samples or not options.samples}
    path, results = RESULTS / "mutants.json", {}
    old = {row["key"]: row for rows in read_json(path).get("mutants", {}).values() for row in rows}
    mutants_of_all = [mutant for mutants in samples.values() for mutant in mutants]
    for result in run_mutants(mutants_of_all, options.workers, old):
        results |= result
        ((key, row),) = result.items()
        print(f"{len(results)}/{len(mutants_of_all)}, {row['seconds']} s: {key}")
        print(f"    {row['killed_by'] or 'SURVIVED'}", flush=True)
        write_json(path, summary := _summary(samples, results))
    for name, sample in summary["samples"].items():
        print(f"{name}: {sample['killed']} of {sample['mutants']} killed, bar {BAR:.0%}")
    return 0 if all(p["killed"] >= BAR * p["mutants"] for p in summary["samples"].values()) else 1


def _summary(samples: dict[str, list[Mutant]], results: Results) -> dict[str, Any]:
    rows = {
        name: [
            {"key": m.key, "line": m.line, **results[m.key], "reason": TABLE["reasons"].get(m.key)}
            for m in mutants
            if m.key in results
        ]
        for name, mutants in samples.items()
    }
    return {
        "benchmark": "mutants",
        "what": (__doc__ or "").split("\n")[0],
        "bar": BAR,
        "sites": {file: len(mutants_of(file)) for file in scope()},
        "samples": {
            name: {
                "seed": SEEDS.get(name),
                "mutants": len(sample),
                "killed": sum(row["killed_by"] is not None for row in sample),
                "first_run": TABLE["first_run"][name],
                "survivors": {r["key"]: r["reason"] for r in sample if r["killed_by"] is None},
            }
            for name, sample in rows.items()
        },
        "left_out": TABLE["left_out"],
        "mutants": rows,
        "environment": environment("cpu"),
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
