"""A study on a cluster whose nodes Ray's own autoscaler starts and ends: lanes come with the nodes, and go with them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchscout.orchestrator.study.trial import TrialState
from tests.faults.driver import Driver
from tests.support.growing_cluster import GrowingCluster, growing_cluster, head_in_kuberay
from tests.support.processes import until, without_rays_settings
from tests.support.studies import TINY, grid

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(720)]

SECONDS_TO_COME = 200
# Nodes come and go in their own time: alone on this machine the longest study here takes two minutes.
SECONDS_TO_END = 480
# Each of its batches of four samples takes 20 ms and more.
SAMPLES = 4_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[GrowingCluster]:
    with growing_cluster(num_workers=2, idle_seconds=3.0) as cluster:
        yield cluster


def driver_on(cluster: GrowingCluster | str, folder: Path, num_trials: int, samples: int = SAMPLES) -> Driver:
    rates = [1e-3 * (1 + number) for number in range(num_trials)]
    study = TINY | {
        "name": "grows",
        "sample_budget": samples,
        "evaluations": 20,
        "kill": {"min_relative_throughput": None},
        "model": {"target": "tests.support.studies:LogsItsBatches", "kwargs": {"log": str(folder / "batches")}},
        "stages": grid(learning_rate=rates),
        "placement": {"lanes": 2, "cpus_per_rank": 1, "idle_release_seconds": 5},
    }
    driver = Driver(folder, study, cluster if isinstance(cluster, str) else cluster.address)
    driver.environment = without_rays_settings() | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    return driver


@contextmanager
def counted(cluster: GrowingCluster) -> Iterator[list[int]]:
    """The numbers of workers that there were meanwhile, each change of them; where that fails, what the autoscaler said is shown."""
    numbers, is_over = [len(cluster.workers())], threading.Event()

    def count() -> None:
        while not is_over.wait(0.2):
            if (now := len(cluster.workers())) != numbers[-1]:
                numbers.append(now)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield numbers
    except AssertionError:
        print(numbers, cluster.said_by_autoscaler(), sep="\n")
        raise
    finally:
        is_over.set()
        thread.join()


def test_nodes_come_for_the_trials_of_a_study_and_go_as_these_end(cluster: GrowingCluster, tmp_path: Path) -> None:
    driver = driver_on(cluster, tmp_path, num_trials=3)
    with counted(cluster) as workers:
        driver.start()
        code, said = driver.end(SECONDS_TO_END)
        assert code == 0, said
        study = driver.study()
        until(lambda: workers[-1] == 0, "the workers are gone", SECONDS_TO_COME)
    top = workers.index(2)  # the last two may be seen to go at once
    assert workers[: top + 1] == [0, 1, 2]
    assert workers[top:] in ([2, 1, 0], [2, 0])
    assert [trial.state for trial in study.trials.values()] == [TrialState.COMPLETE] * 3
    assert not any(hold.lost for trial in study.trials.values() for hold in trial.holds)
    changes = [(change.lanes, change.most, change.asked) for change in study.lanes]
    assert changes == [(1, 2, 0), (1, 2, 2), (2, 2, 0), (1, 2, 0)]
    assert study.lanes[-1].reason == "no trial is left for it: 1 lane given back"
    assert "the cluster has no room for a lane (1 CPU): its autoscaler is asked for room for 1 lane" in said
    assert "2 of up to 2 lanes" in said


def test_a_node_that_is_taken_away_is_replaced_and_its_trial_goes_on(cluster: GrowingCluster, tmp_path: Path) -> None:
    driver = driver_on(cluster, tmp_path, num_trials=1)
    driver.start()
    try:
        until(
            lambda: driver.run_dir.exists() and any(t.history for t in driver.study().trials.values()),
            "an evaluation",
            SECONDS_TO_COME,
        )
        (worker,) = cluster.workers()
        cluster.kill(worker)
        code, said = driver.end(SECONDS_TO_END)
    finally:
        if driver.process is not None:
            driver.process.kill()
    assert code == 0, said
    (trial,) = driver.study().trials.values()
    assert trial.state is TrialState.COMPLETE
    assert [hold.lost for hold in trial.holds] == [True, False]
    seen = [point["samples_seen"] or 0.0 for point in trial.history]
    assert seen == sorted(set(seen)), "it went on from its last checkpoint"
    until(lambda: not cluster.workers(), "the workers are gone", SECONDS_TO_COME)


def test_a_study_that_is_to_wait_for_nodes_asks_for_them(cluster: GrowingCluster, tmp_path: Path) -> None:
    """Though its one trial needs a single node, and the cluster has none; and again where that is taken back, as Train does for itself."""
    driver = driver_on(cluster, tmp_path, num_trials=1, samples=64)
    driver.command += ["--min-nodes", "3"]
    with counted(cluster) as workers:
        driver.start()
        until(lambda: cluster.num_asked_for() == 2, "two nodes are asked for", SECONDS_TO_COME)
        cluster.ask_for_nothing()
        code, said = driver.end(SECONDS_TO_END)
        assert code == 0, said
        until(lambda: workers[-1] == 0, "the workers are gone", SECONDS_TO_COME)
    assert max(workers) == 2
    assert "the cluster has 1 of 3 nodes (--min-nodes): its autoscaler is asked for 2 beside the head" in said


def test_nothing_is_left_asked_for_by_a_driver_that_is_killed_while_it_waits(
    cluster: GrowingCluster, tmp_path: Path
) -> None:
    driver = driver_on(cluster, tmp_path, num_trials=2)
    driver.start()
    until(lambda: bool(cluster.workers()), "a worker comes", SECONDS_TO_COME)
    driver.send(signal.SIGKILL)
    until(lambda: not cluster.workers(), "the workers are gone", SECONDS_TO_COME)


def test_the_cpus_of_a_kuberay_cluster_whose_gpus_may_be_yet_to_come_run_nothing(tmp_path: Path) -> None:
    with head_in_kuberay(num_cpus=2) as address:
        driver = driver_on(address, tmp_path, num_trials=1)
        driver.start()
        code, said = driver.end(SECONDS_TO_END)
    assert code == 2, said
    assert (
        "batchscout: the cluster has 2 CPUs and no GPU now, on 1 node, and what KubeRay's autoscaler may start cannot be read from here; "
        "have it keep the nodes"
    ) in " ".join(said.split())
