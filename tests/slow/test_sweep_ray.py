"""Sweeps on a Ray cluster of two nodes on this machine: machines and drivers go away, trials do not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from residuum.records import same
from residuum.sweeping.executors import LOOPBACK, QUIET, Ray, run_jobs
from tests.sweeps import (
    Deadly,
    killed_and_resumed,
    plan,
    some_jobs,
    stored_numbers,
    sweep_victim,
    task,
    trial_facts,
)

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and a second node, one core each, bound to 127.0.0.1."""
    os.environ.update(QUIET | LOOPBACK)
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        reason = 'needs Ray: pip install ".[cluster]"'
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
    head = {**node, "include_dashboard": False}
    ray_cluster = Cluster(initialize_head=True, head_node_args=head)
    ray_cluster.node_args = node
    ray_cluster.second = ray_cluster.add_node(**node)
    import ray

    # One connection for the module: its workers have imported everything after the first test.
    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    yield ray_cluster
    ray.shutdown()
    ray_cluster.shutdown()


def test_a_cluster_computes_what_this_process_computes(cluster: Any, tmp_path: Path) -> None:
    sweep_plan = plan(6, sampler="tpe", wave=4, batch=2)
    here = sweep_victim(tmp_path / "here", sweep_plan)
    on_cluster = sweep_victim(tmp_path / "there", sweep_plan, engine="ray", address=cluster.address)
    assert [trial_facts(t) for t in on_cluster.trials] == [trial_facts(t) for t in here.trials]
    assert on_cluster.order[0].number == here.order[0].number
    assert same(on_cluster.reconstruction, here.reconstruction)


def test_a_node_that_dies_and_one_that_comes(cluster: Any, tmp_path: Path) -> None:
    sweep_plan = plan(15, 400)
    seen: list[int] = []

    def watch(progress: Any) -> None:
        seen.append(progress.done)
        if progress.done == 5:
            cluster.remove_node(cluster.second, allow_graceful=False)
        if progress.done == 10:
            cluster.second = cluster.add_node(**cluster.node_args)

    done = sweep_victim(
        tmp_path / "s", sweep_plan, watch=watch, engine="ray", address=cluster.address
    )
    assert seen == list(range(1, 16))
    assert [t.number for t in done.trials] == list(range(15))
    assert {t.state for t in done.trials} == {"complete"}
    assert stored_numbers(tmp_path / "s") == list(range(15))
    assert len(list((tmp_path / "s/trials").iterdir())) == 15


def test_a_driver_killed_goes_on_from_the_storage(cluster: Any, tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, "--engine", "ray", "--address", cluster.address)


def test_a_worker_that_dies_is_replaced_and_one_that_always_dies_is_reported(
    cluster: Any, tmp_path: Path
) -> None:
    for times, count in ((1, 3), (99, 1)):
        deadly: Any = Deadly(task(), tmp_path / f"deaths-{times}", times)
        engine = Ray(deadly, plan(address=cluster.address))
        try:
            ended = list(run_jobs(engine, some_jobs(count), retries=1))
        finally:
            engine.close()
        assert sorted(o.job.numbers[0] for o in ended) == list(range(count))
        assert all(o.reconstructions for o in ended) == (times == 1)
    assert ended[0].reason.startswith("the worker process died 2 times: WorkerCrashedError")
