"""Run benchmarks: ``python -m benchmarks [NAME ...] [--device cpu]``.

A new one is a function from a device ("cpu", "cuda") to a :class:`benchmarks.harness.Report`, in a
file of its own, and one line in ``BENCHMARKS``. The exit code is 1 when a bar is missed. ``field`` is
a table without a bar and has commands of its own: ``python -m benchmarks field --help``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from benchmarks import field
from benchmarks.certificate import certificate
from benchmarks.certificate_uniqueness import certificate_uniqueness
from benchmarks.curves import curves
from benchmarks.falsifier import falsifier
from benchmarks.harness import Benchmark, Report, WrongDevice, clock, write
from benchmarks.margin import margin
from benchmarks.polynomial import polynomial
from benchmarks.scaling import scaling
from benchmarks.speed import speed
from benchmarks.splitting import splitting
from benchmarks.step import step
from benchmarks.sweep import sweeps
from benchmarks.verdict import verdict
from residuum.errors import InputError
from residuum.records.rundir import require_device


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks asked for, print a table for each, write their files."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["field"]:
        return field.main(words[1:])
    options = _parse(words)
    missed = []
    for name in options.names or BENCHMARKS:
        print(f"{name}: running on {options.device} ...", flush=True)
        try:
            report, seconds = clock(partial(BENCHMARKS[name], options.device))
        except WrongDevice as problem:
            print(f"{name}: skipped, {problem}.\n")
            continue
        path = write(name, report, options.device, seconds)
        _show(name, report)
        print(f"written: {path.parent.parent.name}/{path.parent.name}/{path.name}\n")
        missed += [] if report.met else [name]
    if missed:
        print(f"bar missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; or field"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    try:
        require_device(options.device)
    except InputError as problem:
        parser.error(str(problem))
    return options


def _show(name: str, report: Report) -> None:
    """One line per figure, one column per row of the report."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}: {report.what}", title_justify="left")
    table.add_column("figure")
    for row in report.figures:
        table.add_column(f"seed {row['seed']}" if "seed" in row else "value", justify="right")
    for key in report.figures[0]:
        if key != "seed":
            table.add_row(key, *(_text(row[key]) for row in report.figures))
    Console().print(table)
    for check, holds in report.checks.items():
        print(f"{check}: {'yes' if holds else 'NO'}")
    for text, value in report.also.items():
        print(f"{text}: {_text(value)}")
    verdict = "met" if report.met else "MISSED"
    print(f"ratio {report.ratio:.1f}, bar {report.bar:g}: {verdict}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_text(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


BENCHMARKS: dict[str, Benchmark] = {
    "certificate": certificate,
    "certificate_uniqueness": certificate_uniqueness,
    "curves": curves,
    "falsifier": falsifier,
    "margin": margin,
    "polynomial": polynomial,
    "scaling": scaling,
    "speed": speed,
    "splitting": splitting,
    "step": step,
    "sweep": sweeps,
    "verdict": verdict,
}

if __name__ == "__main__":
    sys.exit(main())
