"""Run measurements of speed: ``python -m benchmarks [NAME ...] [--device cpu]``.

A new one is a function from a device ("cpu" or "cuda") to an :class:`experiments.report.Report`, in a file
of its own, and one line in ``BENCHMARKS``. The exit code is 1 if a bar is missed. ``benchmarks.exposure`` and
``benchmarks.generic`` have several parts and are programs of their own.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import RESULTS
from benchmarks.certificate import certificate
from benchmarks.certificate_uniqueness import certificate_uniqueness
from benchmarks.curves import curves
from benchmarks.margin import margin
from benchmarks.scaling import scaling
from benchmarks.speed import speed
from benchmarks.splitting import splitting
from benchmarks.step import step
from benchmarks.sweep import sweeps
from experiments.report import Measurement, add_device_option, parse_options, run_measurement

BENCHMARKS: dict[str, Measurement] = {
    "certificate": certificate,
    "certificate_uniqueness": certificate_uniqueness,
    "curves": curves,
    "margin": margin,
    "scaling": scaling,
    "speed": speed,
    "splitting": splitting,
    "step": step,
    "sweep": sweeps,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the named measurements, print a table for each, and write their files."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; default: all"
    )
    add_device_option(parser)
    options = parse_options(parser, arguments)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    missed = [
        name
        for name in options.names or BENCHMARKS
        if not run_measurement(name, BENCHMARKS[name], options.device, RESULTS)
    ]
    if missed:
        print(f"bar missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
