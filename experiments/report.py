"""Report a measurement that is a ratio with a bar: a table on the terminal and a file of results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments import RESULTS
from experiments.timing import clock
from residuum.errors import InputError
from residuum.records import write_json
from residuum.records.rundir import environment, require_device


class WrongDevice(Exception):
    """A measurement does not run on the requested device. It is skipped and does not count as failed."""


@dataclass(frozen=True)
class Report:
    """The result of a measurement.

    Attributes:
        what: What the ratio compares.
        settings: Settings of the measurement.
        seeds: Seeds that were used.
        figures: One row for each seed or case. All rows have the same keys.
        ratio: Cost of the reference divided by our cost, the smallest of all rows.
        bar: The ratio that must be reached.
        checks: Statements that must hold, or the ratio means nothing. An example is "same answer".
        also: Further figures, limits above all.
    """

    what: str
    settings: dict[str, Any]
    seeds: tuple[int, ...]
    figures: list[dict[str, Any]]
    ratio: float
    bar: float
    checks: dict[str, bool] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Return True if the ratio reaches the bar and every check holds."""
        return self.ratio >= self.bar and all(self.checks.values())


Measurement = Callable[[str], Report]


def only_on(device: str, *fitting: str) -> None:
    """Raise :class:`WrongDevice` if a measurement was not written for the device."""
    if device.split(":")[0] not in fitting:
        raise WrongDevice(f"runs on {' or '.join(fitting)} only")


def device_name(device: str) -> str:
    """Return the device as one word for a file name: cpu, or h200 for an NVIDIA H200."""
    if not device.startswith("cuda"):
        return device
    words = torch.cuda.get_device_name(device).lower().split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce"))


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")


def parse_options(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """Parse the command line and refuse a device that does not exist."""
    options = parser.parse_args(words)
    try:
        require_device(options.device)
    except InputError as problem:
        parser.error(str(problem))
    return options


def run_measurement(name: str, measurement: Measurement, device: str, folder: Path) -> bool:
    """Measure, write the file of results, print the table, and return True unless the bar is missed.

    Args:
        name: Name of the measurement.
        measurement: Function from a device to a report.
        device: "cpu" or "cuda".
        folder: Folder of the results.

    Returns:
        False if the bar is missed. A measurement that does not run on the device is skipped.
    """
    print(f"{name}: running on {device} ...", flush=True)
    try:
        report, seconds = clock(lambda: measurement(device))
    except WrongDevice as problem:
        print(f"{name}: skipped, {problem}.\n")
        return True
    path = write_report(folder, name, report, device, seconds)
    show_report(name, report)
    print(f"written: {path.parent.parent.name}/{path.parent.name}/{path.name}\n")
    return report.met


def run_experiment(name: str, measurement: Measurement, doc: str | None) -> int:
    """Run an experiment as a program and return its exit code, which is 1 if the bar is missed."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=text)
    add_device_option(parser)
    options = parse_options(parser, None)
    if run_measurement(name, measurement, options.device, RESULTS):
        return 0
    print(f"bar missed: {name}", file=sys.stderr)
    return 1


def write_report(folder: Path, name: str, report: Report, device: str, seconds: float) -> Path:
    """Write ``NAME-DEVICE.json`` with the environment of the measurement, and return its path."""
    content = {
        "benchmark": name,
        **asdict(report),
        "met": report.met,
        "seconds": round(seconds, 1),
        "environment": environment(device),
    }
    return write_json(folder / f"{name}-{device_name(device)}.json", content)


def show_report(name: str, report: Report) -> None:
    """Print one line for each figure and one column for each row of a report."""
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
    outcome = "met" if report.met else "MISSED"
    print(f"ratio {report.ratio:.1f}, bar {report.bar:g}: {outcome}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_text(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
