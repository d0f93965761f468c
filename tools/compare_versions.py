"""Compare two versions of the code bit by bit: ``python -m tools.compare_versions OLD``.

OLD is a tag or commit. It is checked out into a worktree of its own. ``scenarios.py`` runs under that code
and under this code (CPU, float64, one thread, the same machine), and all results must be equal. The exit
code is 1 if anything differs. If the order of a sum has changed, allow small differences with ``--tolerance
1e-12 --steps 50``, relative to the size of each tensor, over the first 50 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = Path(__file__).with_name("scenarios.py")
Results = dict[str, dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Print a row for every scenario, and return 1 if the versions differ."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_versions", description=__doc__.split("\n")[0]
    )
    parser.add_argument("old", help="tag or commit to compare with")
    parser.add_argument("--new", help="tag or commit; default: the working tree")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="allowed relative difference; 0: none"
    )
    parser.add_argument("--steps", type=int, help="most steps of each attack")
    parser.add_argument("--only", default="", help="run scenarios with this in their name")
    options = parser.parse_args(arguments)
    extra = ["--only", options.only]
    extra += [] if options.steps is None else ["--steps", str(options.steps)]
    with checkout(options.old) as old, checkout(options.new) as new, ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda code: run(code, extra), (old, new)))
    rows = compare(*results, options.tolerance)
    width = max(map(len, rows), default=0)
    for name, difference in rows.items():
        print(f"{name:{width}}  {difference or 'equal'}")
    wrong = sum(bool(difference) for difference in rows.values())
    against = f"{options.old} and {options.new or 'the working tree'}"
    print(f"{len(rows)} scenarios, {wrong} differ between {against}")
    return 1 if wrong or not rows else 0


@contextmanager
def checkout(commit: str | None) -> Iterator[Path]:
    """Yield the code of a commit in a worktree that is removed afterwards, or the working tree."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def run(code: Path, extra: list[str]) -> Results:
    """Return the results of the scenarios with this code."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.pt"
        thread_limits = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
        )
        environment = {
            **os.environ,
            **thread_limits,
            "PYTHONPATH": str(code / "src"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, str(SCENARIOS), str(out), *extra]
        subprocess.run(command, env=environment, cwd=folder, check=True)
        results = torch.load(out, weights_only=True)
    if not Path(results["code"]).is_relative_to(code):
        raise RuntimeError(f"the code in {code} was to run; {results['code']} did")
    return results["results"]


def compare(old: Results, new: Results, tolerance: float = 0.0) -> dict[str, str]:
    """Return how each scenario differs, "" if it does not."""
    return {name: difference(old.get(name), new.get(name), tolerance) for name in {**old, **new}}


def difference(old: dict[str, Any] | None, new: dict[str, Any] | None, tolerance: float) -> str:
    """Return the first difference of two results, "" if they are equal."""
    if old is None or new is None:
        return f"only in the {'new' if old is None else 'old'} code"
    words = [json.loads(result["words"]) for result in (old, new)]
    for version, word in zip(("old", "new"), words, strict=True):
        if "failed" in word:
            return f"fails in the {version} code: {word['failed']}"
    for key in {**words[0], **words[1]}:
        before, after = (word.get(key) for word in words)
        if before != after:
            return f"{key}: {before!r} became {after!r}"
    numbers = (old["numbers"], new["numbers"])
    for key in {**numbers[0], **numbers[1]}:
        before, after = (tensors.get(key) for tensors in numbers)
        if before is None or after is None:
            return f"{key}: only in the {'new' if before is None else 'old'} code"
        if word := _numbers_differ(before, after, tolerance):
            return f"{key}: {word}"
    return ""


def _numbers_differ(a: Tensor, b: Tensor, tolerance: float) -> str:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{tuple(a.shape)} {a.dtype} became {tuple(b.shape)} {b.dtype}"
    if torch.equal(a.nan_to_num(nan=1e300), b.nan_to_num(nan=1e300)):
        return ""
    size = max(float(a.double().norm()), float(b.double().norm()))
    relative = float((a.double() - b.double()).norm()) / size
    if a.is_floating_point() and relative <= tolerance:
        return ""
    return f"{int((a != b).sum())} of {a.numel()} numbers differ, by {relative:.1e} of their size"


if __name__ == "__main__":
    sys.exit(main())
