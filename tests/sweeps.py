"""What sweep tests share: a small exact network, plans that take a moment, and tasks that go wrong."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import signal
import subprocess
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from residuum.attacks import Auto
from residuum.cli.main import main
from residuum.io.checkpoints import save_checkpoint
from residuum.io.modules import checkpoint_from_module
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.sweeping import Sweep, SweepRequest, sweep
from residuum.sweeping.executors import Job, Task, split_into_jobs
from residuum.sweeping.run import JOURNAL
from residuum.sweeping.space import Range, Trial
from residuum.sweeping.study import TRIAL_ATTRIBUTE, Study
from tests.cases import relu_point
from tests.program import start

KNOWLEDGE = Knowledge(sample_count=6)


@lru_cache(maxsize=1)
def victim() -> Network:
    """An exact KKT point with six samples."""
    return checkpoint_from_module(relu_point().model)


def plan(trials: int = 6, steps: int = 50, **changes: Any) -> SweepRequest:
    attack = Auto(restarts=2, steps=steps, candidates=12)
    return SweepRequest(**{"trials": trials, "seed": 3, "attack": attack} | changes)


def sweep_victim(out: Path, request: SweepRequest | None = None, **options: Any) -> Sweep:
    """Sweep the victim as ``request`` says; options: other arguments, and fields that differ."""
    return sweep(victim(), KNOWLEDGE, out=out, **dict(request or plan()) | options)


def task(**changes: Any) -> Task:
    attack = plan(**changes).attack.resolve_settings(victim(), KNOWLEDGE)
    return Task(victim(), KNOWLEDGE, attack)


def some_jobs(count: int, steps: int = 50) -> list[Job]:
    return split_into_jobs(Study(plan(count, steps)).ask(range(count)), 3, 1)


def share(setting: Range, value: float) -> float:
    """How far on its way from low to high a value lies."""
    if setting.log:
        return math.log(value / setting.low) / math.log(setting.high / setting.low)
    return (value - setting.low) / (setting.high - setting.low)


class Deadly:
    """A task that ends its process the first ``times`` times it is worked on, in any process."""

    def __init__(self, task: Task, marker: Path, times: int) -> None:
        self._task, self._marker, self._times = task, str(marker), times

    @property
    def threads(self) -> int:
        """What ``work`` looks at first."""
        with open(self._marker, "a+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # or two processes count the same death
            stream.seek(0)
            if len(stream.read()) < self._times:
                stream.write("x")
                stream.flush()
                os._exit(3)
        return 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._task, name)


def trial_facts(trial: Trial) -> Trial:
    """A trial less its wall clock."""
    return dataclasses.replace(trial, seconds=0.0)


def killed_and_resumed(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """``residuum sweep`` of twelve trials, killed after three and said again, to its end.

    How many trials the first driver left, none of which the second may write; its summary.
    """
    model = save_checkpoint(victim(), folder / "model.safetensors")
    out = folder / "s"
    arguments = [
        "sweep",
        str(model),
        "--trials",
        "12",
        "--steps",
        "2000",
        "--candidates",
        "12",
        "--out",
        str(out),
        "--quiet",
    ]
    process = start(*arguments, *options)
    try:
        done = _kill_after(process, out / "trials", 3)
    finally:
        process.kill()
    assert 3 <= len(done) < 12
    assert main([*arguments, *(options if "ray" in options else ())]) == 0  # any engine goes on
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    summary = json.loads((out / "sweep.json").read_text())
    assert [t["number"] for t in summary["trials"]] == list(range(12))
    assert stored_numbers(out) == list(range(12))
    return len(done), summary


def _kill_after(process: subprocess.Popen[str], folder: Path, count: int) -> dict[Path, int]:
    """Kill a driver without warning once so many trials are there; which, and written when."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if len(list(folder.glob("0*.safetensors"))) >= count:
            break
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [child for child in children if _alive(child)], "orphans"
    return {path: path.stat().st_mtime_ns for path in folder.glob("0*.safetensors")}


def _alive(process: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def stored_numbers(out: Path) -> list[int]:
    """Numbers of the trials in the journal, each as often as it occurs."""
    rows = map(json.loads, (out / JOURNAL).read_text().splitlines())
    attributes = (row["user_attrs"].get(TRIAL_ATTRIBUTE) for row in rows if "user_attrs" in row)
    return sorted(trial["number"] for trial in attributes if trial)
