"""Trials per minute against the number of nodes, and the seconds from a node's arrival, or its death, to a trial that runs.

    python benchmarks/cluster_scale.py [--quick] [--only NAME ...]

Clusters on this machine: a head without CPUs, and 1 to 8 nodes of one CPU each, with one lane a node. `waiting` are trials that sleep
for a fixed time at every step, so that the machine's cores are no limit; `training` are small real ones, which are bound by them. Trials
per minute are those of all lanes at work: for each lane the trials that began after the last lane had its first, over the time between
the first of these and the last. `linear` is that of the most nodes over that of one, by their number.

`arrival`: Ray's own autoscaler starts a second node for a study that is under way. The seconds are from when its
raylet is started to the first trial's model there; between lie the start of Ray there, the look for nodes, a Train run's start and the import of torch. `recovery`: the node of
a lane is killed with all its processes while its trial, the only one, runs. The seconds are from the kill to that trial's model on another
node; `detection` is how much of it passed until the group of the lane was known to be dead. `by_a_new_lane`: the other node is idle, and
the lane starts there anew. `by_an_idle_lane`: another lane waits there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from side_by_side import machine, options

from batchscout.orchestrator.study.events import Interrupted
from batchscout.orchestrator.study.trial import Hold
from tests.faults.driver import Driver, has
from tests.support.growing_cluster import growing_cluster
from tests.support.processes import descendants, kill_node_of

NODES = {"waiting": (1, 2, 4, 8), "training": (1, 2, 4)}
TRIALS_A_NODE = 5
"""And one more for every node that there is: lanes come up one after another, and count from when the last one has."""
ROUNDS = 3
"""Of arrivals and recoveries."""
LANES_TO_RECOVER = {1: "by_a_new_lane", 2: "by_an_idle_lane"}
EVALUATIONS_BEFORE = {1: 1, 2: 40}
"""How far the trial is when its node is killed: there the other lane has come up, whose processes start beside it."""
PARTS = ("arrival", "recovery", "waiting", "training")
SECONDS_TO_WAIT, SECONDS_TO_END = 240.0, 900.0
STUDY: dict[str, Any] = {
    "name": "scale",
    "data": {"target": "python_stdlib", "kwargs": {"seq_len": 32, "tokenizer": "bytes", "max_text_bytes": 300_000}},
    "evaluation_samples": 4,
    "evaluations": 1,
    "kill": {"min_relative_throughput": None},
}
# Sixteen steps of a quarter of a second.
WAITING = {"target": "tests.support.studies:Sleeps", "kwargs": {"seconds": 0.25}}
WAITING_STUDY = STUDY | {"model": WAITING, "sample_budget": 64}
TRAINING_STUDY = STUDY | {
    "model": {"target": "gpt", "kwargs": {"num_layers": 2, "num_heads": 2, "hidden_dim": 64}},
    "sample_budget": 512,
}


def main() -> None:
    chosen = options(__doc__, parts=PARTS)
    os.environ |= {"RAY_worker_niceness": "0"}  # as the documented commands start nodes
    parts, most = chosen.only or PARTS, 2 if chosen.quick else 8
    print(f"{machine()}; load {os.getloadavg()[0]:.1f} at the beginning", flush=True)
    found: dict[str, Any] = {}
    if "arrival" in parts:
        found["arrival"] = [arrival() for _ in range(ROUNDS)]
    if "recovery" in parts:
        found["recovery"] = {lanes: [recovery(lanes) for _ in range(ROUNDS)] for lanes in LANES_TO_RECOVER}
    studies = {"waiting": WAITING_STUDY, "training": TRAINING_STUDY}
    for name, study in studies.items():
        if name in parts:
            paces = {number: trials_per_minute(study, number) for number in NODES[name] if number <= most}
            found |= {name: paces, f"{name}_linear": paces[max(paces)] / paces[1] / max(paces)}
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    print(json.dumps(_last_line(found)))


# Trials per minute


def trials_per_minute(study: dict[str, Any], num_nodes: int) -> float:
    from tests.support.nodes import cluster_of

    with cluster_of([{"num_cpus": 1}] * num_nodes) as address, ended(study, address, num_nodes) as driver:
        holds = [hold for trial in driver.study().trials.values() for hold in trial.holds]
        pace = 60 * sum(1 / seconds for seconds in periods(holds, num_nodes))
        print(f"{num_nodes} nodes: {pace:.1f} trials a minute", flush=True)
        return pace


def periods(holds: list[Hold], num_lanes: int) -> list[float]:
    """Return for each lane the mean seconds from one trial's beginning to the next, once all lanes are at work."""
    by_lane: dict[int, list[float]] = {}
    for hold in holds:
        assert hold.lane is not None
        by_lane.setdefault(hold.lane.number, []).append(hold.began)
    assert len(by_lane) == num_lanes, f"{len(by_lane)} of {num_lanes} lanes had a trial"
    all_at_work = max(min(began) for began in by_lane.values())
    late = [sorted(one for one in began if one >= all_at_work) for began in by_lane.values()]
    return [(began[-1] - began[0]) / (len(began) - 1) for began in late]


@contextlib.contextmanager
def ended(study: dict[str, Any], address: str, num_lanes: int) -> Iterator[Driver]:
    with tempfile.TemporaryDirectory() as folder:
        driver = driver_of(
            study, Path(folder), address, num_trials=(TRIALS_A_NODE + num_lanes) * num_lanes, num_lanes=num_lanes
        )
        driver.start()
        code, said = driver.end(SECONDS_TO_END)
        assert code == 0, said
        yield driver


def driver_of(study: dict[str, Any], folder: Path, address: str, *, num_trials: int, num_lanes: int) -> Driver:
    rates = [1e-4 * (1 + number) for number in range(num_trials)]
    grid = {"type": "grid", "compile": [False], "micro_batch_size": [4], "learning_rate": rates}
    placement = {"lanes": num_lanes, "cpus_per_rank": 1}
    return Driver(folder, study | {"stages": [grid], "placement": placement}, address)


# A node's arrival, and its death


def logging_study(folder: Path) -> dict[str, Any]:
    """A study whose trials last for a minute and more, and log when and where their models are built."""
    model = {"target": "tests.support.studies:LogsItsBatches", "kwargs": {"log": str(folder / "batches")}}
    return STUDY | {"model": model, "sample_budget": 20_000, "evaluations": 100}


def built(folder: Path, driver: Driver) -> list[tuple[float, int]]:
    """Return when each model was built in a lane, and in which process."""
    file = folder / "batches"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert driver.process is not None
    return [(line["time"], line["pid"]) for line in lines if "time" in line and line["pid"] != driver.process.pid]


@contextlib.contextmanager
def running(study: dict[str, Any], folder: Path, address: str, num_trials: int, num_lanes: int) -> Iterator[Driver]:
    driver = driver_of(study, folder, address, num_trials=num_trials, num_lanes=num_lanes)
    driver.start()
    try:
        yield driver
    finally:
        driver.send(signal.SIGKILL)


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {SECONDS_TO_WAIT:g} s: {what}"
        time.sleep(0.05)
    return found


def built_below(raylet: int, folder: Path, driver: Driver) -> list[tuple[float, int]]:
    """Return the models that were built on this node."""
    ranks = descendants(raylet)
    return [one for one in built(folder, driver) if one[1] in ranks]


def arrival() -> float:
    with tempfile.TemporaryDirectory() as name, growing_cluster(2, idle_seconds=30.0) as cluster:
        folder = Path(name)
        with running(logging_study(folder), folder, cluster.address, 2, 2) as driver:
            (first,) = until(cluster.workers, "a worker")
            until(lambda: len(cluster.workers()) == 2, "a second worker")
            arrived, (second,) = time.time(), [worker for worker in cluster.workers() if worker != first]
            times = until(lambda: built_below(second, folder, driver), "a model on the second worker")
    print(f"arrival: {times[0][0] - arrived:.1f} s", flush=True)
    return times[0][0] - arrived


def recovery(num_lanes: int) -> tuple[float, float]:
    """Return the seconds until the trial runs again, and of these the ones until it was known that it does not run."""
    from tests.support.nodes import cluster_of

    with tempfile.TemporaryDirectory() as name, cluster_of([{"num_cpus": 1}] * 2) as address:
        folder = Path(name)
        with running(logging_study(folder), folder, address, 1, num_lanes) as driver:
            driver.wait_until(has("evaluated", EVALUATIONS_BEFORE[num_lanes]))
            _, rank = built(folder, driver)[-1]  # the first pass was in a process of its own
            struck = kill_node_of(rank)
            (again, _) = until(lambda: [one for one in built(folder, driver) if one[0] > struck], "another model")[0]
            told = [event.time for event in driver.events() if isinstance(event, Interrupted)]
            known = told[0] if told else again  # it was told by the lane's next processes
    how = LANES_TO_RECOVER[num_lanes]
    print(f"recovery {how}: {again - struck:.1f} s, of these {known - struck:.1f} s until it was known", flush=True)
    return again - struck, known - struck


def _last_line(found: dict[str, Any]) -> dict[str, Any]:
    recoveries = {LANES_TO_RECOVER[lanes]: runs for lanes, runs in found.get("recovery", {}).items()}
    return {
        "trials_per_minute": found.get("waiting"),
        "trials_per_minute_training": found.get("training"),
        "linear": found.get("waiting_linear"),
        "linear_training": found.get("training_linear"),
        "arrival_seconds": _median(found.get("arrival", [])),
        "recovery_seconds": {how: _median([seconds for seconds, _ in runs]) for how, runs in recoveries.items()},
        "detection_seconds": {how: _median([known for _, known in runs]) for how, runs in recoveries.items()},
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


if __name__ == "__main__":
    main()
