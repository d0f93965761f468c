"""Sweeps that a PostgreSQL server remembers."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sweeps import plan, sweep_victim, trial_facts


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A server of this test's own, reached through a socket in its folder and no other way."""
    places = [
        *Path("/usr/lib/postgresql").glob("*/bin"),
        Path(shutil.which("initdb") or "/none").parent,
    ]
    programs = next((place for place in places if (place / "initdb").exists()), None)
    if programs is None:
        reason = "needs a PostgreSQL server: apt-get install postgresql"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="residuum-pg-", dir="/tmp"))
    owner: dict[str, Any] = {"cwd": folder, "check": True, "stdout": subprocess.DEVNULL}
    if os.getuid() == 0:  # a server refuses to run as root
        shutil.chown(folder, "postgres", "postgres")
        owner |= {"user": "postgres", "group": "postgres", "extra_groups": []}
    data, options = str(folder / "data"), f"-k {folder} -c listen_addresses= -c fsync=off"
    subprocess.run([programs / "initdb", "-D", data, "-A", "trust", "-U", "residuum"], **owner)
    control = [programs / "pg_ctl", "-D", data, "-w"]
    subprocess.run([*control, "-o", options, "-l", folder / "log", "start"], **owner)
    yield f"postgresql+psycopg://residuum@/postgres?host={folder}"
    subprocess.run([*control, "-m", "immediate", "stop"], **owner)
    shutil.rmtree(folder)


@pytest.mark.postgres
def test_a_server_remembers_what_a_file_does(postgres: str, tmp_path: Path) -> None:
    sweep_plan = plan(5, objectives=("residual", "agreement"))

    def stop(progress: Any) -> None:
        if progress.fresh == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep_victim(tmp_path / "a", sweep_plan, storage=postgres, watch=stop)
    on_server = sweep_victim(tmp_path / "a", sweep_plan, storage=postgres)
    here = sweep_victim(tmp_path / "b", sweep_plan)
    assert on_server.fresh == 3
    assert [trial_facts(t) for t in on_server.trials] == [trial_facts(t) for t in here.trials]
    assert not (tmp_path / "a/study.journal").exists()
