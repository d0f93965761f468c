"""Commands of the program, each in a fork of one idle process: how they ended and what they took.

A fork starts with the memory of the idle process, so what it reaches above that is the command's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from typing import NamedTuple

LIMIT_SECONDS, LIMIT_BYTES = (
    30,
    4 << 30,
)  # a hostile file that is not refused must not take the suite


class Taken(NamedTuple):
    code: int
    seconds: float
    bytes: int


def confined(warm_up: list[list[str]], commands: list[list[str]]) -> list[Taken]:
    """Run ``warm_up`` so that everything is imported, then each command in a fork."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.confined"],
        input=json.dumps([warm_up, commands]),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [Taken(*row) for row in json.loads(done.stdout)]


def _fork(arguments: list[str] | None) -> Taken:
    child = os.fork()
    if child == 0:
        code = 0
        if arguments is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS))
            resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
            code = _run(arguments)
        os._exit(code)
    _, status, used = os.wait4(child, 0)
    seconds = used.ru_utime + used.ru_stime
    return Taken(os.waitstatus_to_exitcode(status), seconds, used.ru_maxrss * 1024)


def _run(arguments: list[str]) -> int:
    from residuum.cli.main import main

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return main(arguments)


if __name__ == "__main__":
    warm_up, commands = json.load(sys.stdin)
    for arguments in warm_up:
        _run(arguments)
    idle = _fork(None)
    processes = [_fork(arguments) for arguments in commands]
    json.dump([(t.code, t.seconds, t.bytes - idle.bytes) for t in processes], sys.stdout)
