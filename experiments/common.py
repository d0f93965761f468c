"""Run many cases in worker processes, write every finished case at once, and skip finished ones.

Results are JSON Lines: one object per case, with its key. A script can be interrupted at any time and
started again with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one core per worker

Case = dict[str, Any]


def run_cases(
    name: str,
    cases: Iterable[Case] | Callable[[argparse.Namespace], Iterable[Case]],
    measure: Callable[[Case], Case],
    summarize: Callable[..., str],
    parser: argparse.ArgumentParser | None = None,
) -> None:
    """Measure all cases that have no result yet, then print the summary of all of them.

    Args:
        name: Of the script; results go to ``experiments/results/NAME.jsonl`` unless ``--out`` is given.
        cases: Plain dictionaries that say what to measure, or a function of the command line options that
            returns them.
        measure: Returns the result of one case as a plain dictionary. It runs in a worker process.
        summarize: Returns the table of all results, given as a list.
        parser: With options of the script itself.
    """
    parser = parser or argparse.ArgumentParser(description=f"Measure {name} and print a summary.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.jsonl")
    parser.add_argument("--first", type=int, default=None, help="measure only so many new cases")
    options = parser.parse_args()
    cases = cases(options) if callable(cases) else cases
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(options.out)
    finished = {key(row["case"]) for row in rows}
    waiting = [case for case in cases if key(case) not in finished][: options.first]
    print(f"{len(rows)} cases are finished, {len(waiting)} are to be measured", file=sys.stderr)
    try:
        with get_context("spawn").Pool(options.workers) as pool:
            for row in pool.imap_unordered(_Measured(measure), waiting):
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                rows.append(row)
                print(f"{len(rows)}: {json.dumps(row)[:150]}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: run the same command to go on", file=sys.stderr)
        sys.exit(130)
    print(summarize(rows))


class _Measured:
    """A picklable function from a case to its row."""

    def __init__(self, measure: Callable[[Case], Case]) -> None:
        self.measure = measure

    def __call__(self, case: Case) -> Case:
        start = time.monotonic()
        result = self.measure(case)
        return {"case": case, **result, "seconds": round(time.monotonic() - start, 2)}


def read_rows(path: Path) -> list[Case]:
    """Return the finished rows. A line that an interrupt cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def key(case: Case) -> str:
    """Return a case as text that does not depend on the order of its entries."""
    return json.dumps(case, sort_keys=True)
