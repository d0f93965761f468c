"""Sweeps in this process and in others: drawn alike, remembered once, ended by nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from residuum.attacks import Attack, Auto
from residuum.attacks.registry import rebuild_attack
from residuum.errors import InputError, OutputError
from residuum.io.checkpoints import save_checkpoint
from residuum.records import Reconstruction, same
from residuum.sweeping import Range, SweepOptions, SweepRequest, executors, sweep
from residuum.sweeping.executors import ENGINES, Job, Local, Outcome, Task, run_jobs
from residuum.sweeping.run import JOURNAL
from residuum.sweeping.scoring import SweepRun
from residuum.sweeping.space import COMPLETE, ETA, FAILED, PRUNED, SAMPLERS, SEEDS
from residuum.sweeping.study import Study, open_storage
from tests.sweeps import (
    KNOWLEDGE,
    Deadly,
    killed_and_resumed,
    plan,
    some_jobs,
    stored_numbers,
    sweep_victim,
    task,
    trial_facts,
    victim,
)


def stop_after(count: int) -> Any:
    """A watcher that presses Ctrl-C."""

    def watch(progress: Any) -> None:
        if progress.fresh == count:
            raise KeyboardInterrupt

    return watch


def test_processes_compute_what_this_one_computes_and_one_that_dies_takes_its_own_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_plan, marker = plan(7, sampler="sobol", batch=2), tmp_path / "deaths"
    here = sweep_victim(tmp_path / "a", sweep_plan)
    assert [t.number for t in here.trials] == list(range(7))
    assert {t.state for t in here.trials} == {COMPLETE}
    # The worker must die in the middle of a job, which no setting of a sweep can bring about.
    monkeypatch.setattr(
        "residuum.sweeping.run.Task", lambda *arguments: Deadly(Task(*arguments), marker, 1)
    )
    elsewhere = sweep_victim(tmp_path / "b", sweep_plan, engine="processes", workers=2, retries=0)
    lost = [t for t in elsewhere.trials if t.state == FAILED]
    assert {t.reason for t in lost} == {"the worker process died 1 times: exit code 3"}
    assert len({t.number // 2 for t in lost}) == 1, "the trials of one job"
    for trial, its in zip(here.trials, elsewhere.trials, strict=True):
        if its not in lost:
            assert trial_facts(trial) == trial_facts(its)
            name = f"trials/{trial.number:06d}.safetensors"
            stored = [Reconstruction.load(tmp_path / folder / name) for folder in "ab"]
            assert same(*(reconstruction.replace(seconds=0.0) for reconstruction in stored))


class Mortal(Local):
    """An engine with two slots whose workers die of some jobs, a given number of times each."""

    def __init__(self, deaths: dict[int, int]) -> None:
        super().__init__(task(), plan())
        self.deaths = deaths

    def count_slots(self) -> int:
        return 2

    def submit(self, job: Job) -> Future[Outcome]:
        if self.deaths.get(job.numbers[0], 0) == 0:
            return super().submit(job)
        self.deaths[job.numbers[0]] -= 1
        died: Future[Outcome] = Future()
        died.set_exception(EOFError("gone"))
        return died


def test_a_job_whose_worker_died_is_tried_again_and_reported_in_the_end() -> None:
    ended = list(run_jobs(Mortal({1: 2, 2: 3}), some_jobs(4), retries=2))
    assert sorted(o.job.numbers[0] for o in ended) == list(range(4))
    reasons = {o.job.numbers[0]: o.reason for o in ended if not o.reconstructions}
    assert reasons == {2: "the worker process died 3 times: EOFError: gone"}


def test_a_trial_is_the_attack_it_names(tmp_path: Path) -> None:
    from residuum.attacks import attack

    done = sweep_victim(tmp_path / "s")
    stored = Reconstruction.load(tmp_path / "s/trials/000002.safetensors")
    repeated = attack(victim(), KNOWLEDGE, rebuild_attack(stored))
    assert same(repeated.replace(seconds=0.0), stored.replace(seconds=0.0))
    norms = repeated.layers[torch.arange(2), repeated.loss.argmin(1), 0].sqrt()
    assert done.trials[2].residual == float(norms.median())
    assert done.trials[2].params["lr_x"] == stored.settings["lr_x"]


def test_ranking_is_by_residual_and_the_front_by_both(tmp_path: Path) -> None:
    done = sweep_victim(tmp_path / "s", plan(6, objectives=("residual", "agreement")))
    residuals = [t.residual for t in done.order]
    assert residuals == sorted(residuals)
    beaten = [
        t
        for t in done.trials
        if any(
            o.residual <= t.residual
            and o.agreement >= t.agreement
            and trial_facts(o) != trial_facts(t)
            and (o.residual < t.residual or o.agreement > t.agreement)
            for o in done.trials
        )
    ]
    assert {t.number for t in done.front} == {t.number for t in done.trials if t not in beaten}


def test_trials_that_share_a_program_are_those_that_run_alone(tmp_path: Path) -> None:
    """Nearly: rounding differs, and the random start, which is why the batch is part of the plan."""
    sweep_plan = plan(4, batch=2)
    done = sweep_victim(tmp_path / "b", sweep_plan)
    alone = sweep_victim(tmp_path / "a", plan(4))
    for n in (0, 2):  # the first of each block starts from the same random numbers
        assert done.trials[n].residual == pytest.approx(alone.trials[n].residual, rel=1e-6)
    stored = [Reconstruction.load(tmp_path / f"b/trials/00000{n}.safetensors") for n in range(4)]
    assert [reconstruction.settings["lr_x"] for reconstruction in stored] == [
        t.params["lr_x"] for t in done.trials
    ]
    assert all(
        reconstruction.restarts == 2 and len(reconstruction.x) == 24 for reconstruction in stored
    )


def test_successive_halving_ends_the_worst_and_changes_nothing_else(tmp_path: Path) -> None:
    uninterrupted = sweep_victim(tmp_path / "whole", plan(9, 225))
    sweep_plan = plan(9, 225, rungs=2)
    assert sweep_plan.pauses == [25, 75]
    halved = sweep_victim(tmp_path / "halved", sweep_plan)
    ended = {t.number: t for t in halved.trials}
    stopped = {
        step: [t.number for t in halved.trials if t.state == PRUNED and t.step == step]
        for step in (25, 75)
    }
    assert [len(stopped[25]), len(stopped[75]), len(halved.order)] == [6, 2, 1]
    last = halved.order[0].number
    assert trial_facts(ended[last]) == trial_facts(uninterrupted.trials[last]), (
        "a paused trial goes on as if nothing was"
    )
    worst = min(ended[n].residual for n in stopped[25])
    history = {
        n: Reconstruction.load(tmp_path / f"whole/trials/{n:06d}.safetensors") for n in range(9)
    }
    residual_at_rung = {
        n: executors.first_layer_residual(h.loss[:, :2], h.layers[:, :2])
        for n, h in history.items()
    }
    assert {n for n, value in residual_at_rung.items() if value < worst} == set(range(9)) - set(
        stopped[25]
    )
    assert not list((tmp_path / "halved/trials").glob("*.state.*"))
    assert ETA == 3


def test_halving_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    sweep_plan = plan(9, 225, rungs=2)
    uninterrupted = sweep_victim(tmp_path / "whole", sweep_plan)
    for count in (3, 4):  # within the first rung's ends, and past them
        with pytest.raises(KeyboardInterrupt):
            sweep_victim(tmp_path / "cut", sweep_plan, watch=stop_after(count))
    assert [trial_facts(t) for t in sweep_victim(tmp_path / "cut", sweep_plan).trials] == [
        trial_facts(t) for t in uninterrupted.trials
    ]


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_ctrl_c_and_go_on(sampler: str, tmp_path: Path) -> None:
    sweep_plan = plan(6, sampler=sampler, wave=4)
    uninterrupted = sweep_victim(tmp_path / "whole", sweep_plan)
    with pytest.raises(KeyboardInterrupt):
        sweep_victim(tmp_path / "cut", sweep_plan, watch=stop_after(2))
    first = {p: p.stat().st_mtime_ns for p in (tmp_path / "cut/trials").iterdir()}
    assert len(first) == 2
    done = sweep_victim(tmp_path / "cut", sweep_plan)
    assert done.fresh == 4
    assert [trial_facts(t) for t in done.trials] == [trial_facts(t) for t in uninterrupted.trials]
    assert {p: p.stat().st_mtime_ns for p in first} == first
    assert sweep_victim(tmp_path / "cut", sweep_plan).fresh == 0


def test_candidates_without_their_line_get_it(tmp_path: Path) -> None:
    """As after a kill between the two writes, or a power cut within the second."""
    uninterrupted, journal = sweep_victim(tmp_path / "s"), tmp_path / "s" / JOURNAL
    for spoil in (journal.unlink, lambda: os.truncate(journal, journal.stat().st_size - 20)):
        spoil()
        resumed = sweep_victim(tmp_path / "s")
        assert resumed.fresh == 0
        assert [trial_facts(t) for t in resumed.trials] == [
            trial_facts(t) for t in uninterrupted.trials
        ]
        assert stored_numbers(tmp_path / "s") == list(range(6))
    path = tmp_path / "s/trials/000002.safetensors"
    stored = Reconstruction.load(path)
    stored.replace(settings=stored.settings | {"lr_x": 0.125}).save(path)
    journal.unlink()
    assert sweep_victim(tmp_path / "s").trials[2].params["lr_x"] == 0.125, (
        "as found, not as drawn again"
    )
    journal.write_text("no journal\n" + journal.read_text())
    with pytest.raises(InputError, match=r"lines of JSON.*Remove the journal"):
        sweep_victim(tmp_path / "s")


def test_diverging_and_crashing_trials_are_remembered_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Attack.run

    def sometimes(attack: Any, *target: Any, **options: Any) -> Any:
        if attack.seed % 3 == 1:
            raise RuntimeError("a bad day\nfor sums")
        return real(attack, *target, **options)

    # No setting makes an attack raise an error that depends on its seed.
    monkeypatch.setattr(Attack, "run", sometimes)
    diverging = Auto(
        restarts=2, steps=50, candidates=12, optimizer="sgd", lr_x=1e-6, constraint="penalty"
    )
    mixed = plan(6, attack=diverging, space={"lr_lam": Range(1e5, 1e6)})
    done = sweep_victim(tmp_path / "s", mixed)
    reasons = {t.number: t.reason for t in done.trials}
    crashed = [n for n in range(6) if (3 * SEEDS + n) % 3 == 1]
    assert crashed
    assert all(reasons[n] == "RuntimeError: a bad day for sums" for n in crashed)
    assert all(reasons[n] == "diverged" for n in range(6) if n not in crashed)
    assert all(t.state == FAILED for t in done.trials)
    assert done.reconstruction is None
    assert sweep_victim(tmp_path / "s", mixed).fresh == 0, "what failed is not tried for ever"


def test_a_job_out_of_memory_is_tried_in_halves_then_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = Attack.run, []

    def small(attack: Any, *target: Any, **options: Any) -> Any:
        sizes.append(attack.restarts)
        if attack.restarts > 4 or (attack.restarts == 2 and attack.lr_x > 0.5):
            raise torch.OutOfMemoryError("no more")
        return real(attack, *target, **options)

    # The memory of a test machine is not known, so the error is raised by hand.
    monkeypatch.setattr(Attack, "run", small)
    done = sweep_victim(tmp_path / "s", plan(4, batch=4))
    assert sizes == [8, 4, 4]
    assert [t.state for t in done.trials] == [COMPLETE] * 4
    alone = sweep_victim(tmp_path / "t", plan(4, space={"lr_x": Range(0.6, 0.9)}))
    assert {t.reason for t in alone.trials} == {"out of memory: no more"}


def test_a_killed_driver_continues(tmp_path: Path) -> None:
    done, summary = killed_and_resumed(tmp_path, "--engine", "processes", "--workers", "1")
    assert 12 - summary["session"]["trials"] in (done - 1, done, done + 1)


def test_another_sweep_and_a_second_driver_are_refused(tmp_path: Path) -> None:
    sweep_victim(tmp_path / "s", plan(2))
    with pytest.raises(InputError, match="other settings"):
        sweep_victim(tmp_path / "s", plan(3))
    other_knowledge = KNOWLEDGE.replace(sample_count=7)
    with pytest.raises(InputError, match="other settings"):
        sweep(victim(), other_knowledge, out=tmp_path / "s", **dict(plan(2)))
    with SweepRun.open(tmp_path / "s"), pytest.raises(OutputError, match="another sweep"):
        sweep_victim(tmp_path / "s", plan(2))
    (tmp_path / "f").mkdir()
    (tmp_path / "f/mine.txt").write_text("x")
    with pytest.raises(OutputError, match="holds other files"):
        sweep_victim(tmp_path / "f", plan(2))


def test_what_no_trial_can_work_with_is_said_before_the_first(tmp_path: Path) -> None:
    boxed = Auto(priors=(("value-box", 1.0),))
    with pytest.raises(InputError, match="value_range"):
        sweep_victim(tmp_path / "s", plan(attack=boxed))
    assert not (tmp_path / "s").exists()


def test_unknown_engines_and_storages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no engine 'rya'.*Did you mean 'ray'"):
        sweep_victim(tmp_path / "s", engine="rya")
    with pytest.raises(InputError, match="URL of a reachable database") as caught:
        sweep_victim(tmp_path / "t", storage="postgresql+psycopg://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(caught.value)
    with pytest.raises(InputError, match="URL of a reachable database"):
        sweep_victim(tmp_path / "u", storage="nonsense")
    assert set(ENGINES) == {"local", "processes", "ray"}


def test_the_options_are_the_fields_of_the_request() -> None:
    """Names and types that editors see are those that pydantic checks."""
    options, fields = get_type_hints(SweepOptions), get_type_hints(SweepRequest)
    assert {name: fields[name] for name in SweepRequest.model_fields} == options
    assert all(field.description for field in SweepRequest.model_fields.values())
    request = plan(3, sampler="sobol", batch=2, retries=0)
    assert SweepRequest(**dict(request)) == request


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trails": 3}, "no setting 'trails'.*Did you mean 'trials'"),
        ({"trials": 0}, "trials must be at least 1 and .*; got 0"),
        ({"seed": 2**31}, "seed must be at least 0 and below"),
        ({"cpus": "many"}, "cpus is refused: .*integer.* Got 'many'"),
        ({"attack": {}}, "attack is refused: "),
    ],
)
def test_options_that_are_unknown_or_out_of_bounds_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        sweep(victim(), **options)


def test_two_sweeps_share_a_storage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'both.db'}"
    first = sweep_victim(tmp_path / "a", plan(2), storage=url)
    second = sweep_victim(tmp_path / "b", plan(3), storage=url)
    assert (first.fresh, second.fresh) == (2, 3)
    with open_storage(tmp_path, url) as storage:
        held = Study(plan(2), storage, json.loads((tmp_path / "a/request.json").read_text()))
    assert [trial_facts(t) for t in held.trials.values()] == [trial_facts(t) for t in first.trials]


def test_nothing_heavy_is_imported_before_it_is_needed_and_what_is_missing_is_said_in_a_line(
    tmp_path: Path,
) -> None:
    model = save_checkpoint(victim(), tmp_path / "model.safetensors")
    arguments = ["sweep", str(model), "--engine", "ray", "--out", str(tmp_path / "s")]
    code = f"""
import sys, residuum.cli.main, residuum.sweeping.run
print(sorted({{"ray", "optuna", "sqlalchemy"}} & sys.modules.keys()))
sys.modules["ray"] = None
print(residuum.cli.main.main({arguments}))
del sys.modules["ray"]
print(residuum.cli.main.main({[*arguments, "--address", "nonsense"]}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n")[:3] == ["[]", "2", "2"], done.stderr
    without, unreached = done.stderr.strip().splitlines()
    assert 'in a clone of residuum: pip install ".[cluster]"' in without
    if importlib.util.find_spec("ray"):
        assert "A Ray cluster must be reachable at 'nonsense'" in unreached
