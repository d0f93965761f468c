"""What benchmarks share: the report they return, timing, the device's name, the file on disk."""

from __future__ import annotations

import argparse
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from residuum.attacks import Attack, make_attack
from residuum.errors import InputError, ResiduumError
from residuum.networks.network import first_layer
from residuum.networks.spectrum import rank_above, singular_values
from residuum.records import write_json
from residuum.records.rundir import environment

RESULTS = Path(__file__).parent / "results"
T = TypeVar("T")


def attack_with(name: str = "auto", preset: str = "residuum", **settings: Any) -> Attack:
    """Return an attack with a preset and those of some settings that it has.

    Args:
        name: Name of the attack. "auto" stands for the attack of the preset.
        preset: Name of the preset.
        **settings: Settings of several attacks.

    Returns:
        The attack.
    """
    kind = type(make_attack(name, preset))
    return make_attack(name, preset, **kind.select_settings(settings))


class WrongDevice(Exception):
    """A benchmark does not run on the device asked for; it is skipped, not failed."""


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    figures: one row per seed or case, the same keys in each; ratio: published cost over ours, the
    smallest of all rows; bar: what the ratio must reach; checks: statements that must hold for the
    ratio to mean anything (the same answer, a stable reference), by name; also: what else a reader
    should know, limits above all.
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
        """Whether the bar is reached and every check holds."""
        return self.ratio >= self.bar and all(self.checks.values())


Benchmark = Callable[[str], Report]


def ended(main: Callable[[], Any]) -> int:
    """The exit code of a program: what it was given wrongly it says in a line."""
    try:
        return int(main() or 0)
    except ResiduumError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    except OSError as problem:
        print(f"error: {problem}.", file=sys.stderr)
        return InputError.exit_code
    except KeyboardInterrupt:
        print("Interrupted. What was finished is kept.", file=sys.stderr)
        return 130


def arguments(doc: str | None, *names: str) -> list[Path]:
    """Paths that a program is called with, by these names; ``--help`` tells instead of doing."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=text)
    for name in names:
        parser.add_argument(name, type=Path)
    return [*vars(parser.parse_args()).values()]


def clock(work: Callable[[], T], device: str = "cpu") -> tuple[T, float]:
    """The result of ``work()`` and its wall-clock seconds; waits for the accelerator."""
    _wait(device)
    start = time.perf_counter()
    result = work()
    _wait(device)
    return result, time.perf_counter() - start


def median_time(
    work: Callable[[], T], repeats: int, warmups: int = 1, device: str = "cpu"
) -> tuple[T, float]:
    """The last result of ``work()`` and the median seconds over ``repeats``."""
    for _ in range(warmups):
        work()
    runs = [clock(work, device) for _ in range(repeats)]
    return runs[-1][0], statistics.median(seconds for _, seconds in runs)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with so many torch threads: small problems lose more than they gain by several."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def only_on(device: str, *fitting: str) -> None:
    """Refuse a device that a benchmark was not written for."""
    if device.split(":")[0] not in fitting:
        raise WrongDevice(f"runs on {' or '.join(fitting)} only")


def first_layer_rank(theta: dict[str, Tensor]) -> int:
    """Singular values of the first layer above 1% of the largest."""
    return rank_above(singular_values(first_layer(theta)), 0.01)


def device_name(device: str) -> str:
    """The device in one word for a file name: cpu, or h200 for an NVIDIA H200."""
    if not device.startswith("cuda"):
        return device
    words = torch.cuda.get_device_name(device).lower().split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce"))


def write(name: str, report: Report, device: str, seconds: float) -> Path:
    """Write ``results/<name>-<device>.json`` with the environment it was measured in."""
    content = {
        "benchmark": name,
        **asdict(report),
        "met": report.met,
        "seconds": round(seconds, 1),
        "environment": environment(device),
    }
    return write_json(RESULTS / f"{name}-{device_name(device)}.json", content)


def draw_seeds(path: Path, **counts: dict[str, int]) -> None:
    """Seeds from the system's entropy, so many of each, once, after the settings are in a commit."""

    def git(*words: str) -> str:
        done = subprocess.run(("git", *words), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    if path.exists():
        raise InputError(f"{path.name} is there: seeds are drawn once.", "Run with them.")
    if git("status", "--porcelain"):
        raise InputError("Settings must be committed before seeds are drawn.", "Commit first.")
    drawn = {
        part: {name: [secrets.randbelow(2**31) for _ in range(k)] for name, k in names.items()}
        for part, names in counts.items()
    }
    write_json(path, {"commit": git("rev-parse", "HEAD"), **drawn})


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
