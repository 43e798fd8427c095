"""A real study on a two-node cluster, struck at random moments at every level, again and again.

    python -m tests.fault_harness [--faults 100] [--seed 0] [--levels driver,lane,...] [--longest-quiet 20]

The study's decisions depend on no clock, so whatever is struck it must end as it does undisturbed: the same journal but for
its waits, the same recommendation, the same losses to the bit. Prints a line for every fault; what is violated raises.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.load import parse_study
from orchestrator.config.trial import base_trial
from orchestrator.execution.local_cluster import protect_local_cluster
from orchestrator.execution.session import start_ray, worker_environment
from orchestrator.study.events import Concluded, Ended, Evaluated, Event, Paused, Promoted, Started
from orchestrator.study.journal import replay
from orchestrator.study.lines import read_lines
from orchestrator.study.lock import is_locked
from orchestrator.study.state import Study
from orchestrator.study.trial import TrialState
from tests.support.studies import TINY, grid
from trainers.data.batches import fetch
from trainers.data.order import SampleOrder
from trainers.data.samples import load_data

MICRO_BATCH_SIZE, SAMPLE_BUDGET, EVALUATIONS = 4, 768, 6
STUDY: dict[str, Any] = TINY | {
    "name": "struck",
    "sample_budget": SAMPLE_BUDGET,
    "evaluations": EVALUATIONS,
    "kill": {"min_relative_throughput": None},
    "stages": grid(learning_rate=[1e-4, 1e-3, 3e-3], pruner={"type": "asha", "min_samples": 128}),
}
PATIENCE_SECONDS = 240
# Train tries four times to find room for a lane; the outage is as long as several Train runs.
OUTAGE_SECONDS, SECONDS_TO_FIND_ROOM = 25.0, "1"
DECISIONS = (Promoted, Paused, Ended, Concluded)


class Driver:
    """`batchscout run` in a process of its own, on a cluster that is there."""

    def __init__(self, folder: Path, study: dict[str, Any], address: str) -> None:
        (folder / "study.yaml").write_text(yaml.safe_dump(study))
        self.run_dir, self.name = folder / "run", study["name"]
        self.command = [
            sys.executable, "-m", "orchestrator", "run", str(folder / "study.yaml"), "--dir", str(self.run_dir),
            "--address", address,
        ]  # fmt: skip
        # Ray takes an address of loopback for that of the machine in its network, unless it is told that there is none.
        no_network = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if address.startswith("127.") else {}
        self.environment = {**os.environ, **no_network}
        self.process: subprocess.Popen[str] | None = None

    def start(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, **options
        )

    def wait_until(self, condition: Callable[[list[Event]], bool]) -> None:
        """Until the journal says so."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(self.events()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the study did not get there"
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(number)
        return self.end()

    def end(self) -> tuple[int, str]:
        """(exit code, output)"""
        assert self.process is not None
        output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, output

    def ends_within(self, seconds: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def events(self) -> list[Event]:
        return [line.event for line in read_lines(self.run_dir / "journal.jsonl")]

    def study(self) -> Study:
        return replay(self.run_dir / "journal.jsonl", self.name)


def decisions(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, DECISIONS)]


def has(kind: str, count: int = 1) -> Callable[[list[Event]], bool]:
    return lambda events: sum(event.kind == kind for event in events) >= count


def check_nothing_was_lost_or_doubled(driver: Driver, samples_between: int, evaluations: int) -> None:
    """No trial ended twice, no evaluation made twice, and none missing."""
    ended = [event.id for event in driver.events() if isinstance(event, Ended)]
    assert len(ended) == len(set(ended))
    for trial in driver.study().trials.values():
        seen = [point["samples_seen"] for point in trial.history]
        assert seen == [samples_between * (i + 1) for i in range(len(seen))]
        if trial.state is TrialState.COMPLETE:
            assert len(seen) == evaluations


class Scene:
    """A head without CPUs, one node that the lane runs on, and a study with its driver."""

    def __init__(self, folder: Path, log: Path) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._num_nodes = 0
        self.node = self.add_node()
        self.folder, self.log = folder, log
        self.driver = self.new_study()
        self.lane_was_killed = False

    def add_node(self) -> Any:
        """Each unpacks what drivers ship into a directory of its own, as on a machine of its own it would."""
        self._num_nodes += 1
        return self.cluster.add_node(num_cpus=1, runtime_env_dir_name=f"node-{self._num_nodes}")

    def new_study(self) -> Driver:
        """The next one, in a directory of its own, and with a log of its own."""
        number = sum(1 for _ in self.folder.glob("study-*"))
        place = self.folder / f"study-{number}"
        place.mkdir()
        self.log = place / "batches.jsonl"
        model = {"target": "tests.support.studies:LogsItsBatches", "kwargs": {"log": str(self.log)}}
        assert self.cluster.address is not None
        self.driver = Driver(place, STUDY | {"model": model}, self.cluster.address)
        return self.driver

    def start(self) -> None:
        self.driver.start()
        self.lane_was_killed = False

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def rank(self) -> int | None:
        """The process that trains now."""
        assert self.driver.process is not None
        pids = [line["pid"] for line in self.logged() if line["pid"] != self.driver.process.pid]
        return pids[-1] if pids and alive(pids[-1]) else None

    def on_the_head(self, actor: str) -> int | None:
        """The process of a Ray actor there, by what its title says."""
        assert self.cluster.head_node is not None
        raylet = self.cluster.head_node.all_processes["raylet"][0].process.pid
        return next((pid for pid in children(raylet) if actor in title(pid)), None)


def alive(pid: int) -> bool:
    return bool(title(pid))


def title(pid: int) -> str:
    """Empty of a process that has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Faults: each answers what it struck, None where there was nothing to strike


def kill_driver(scene: Scene) -> str | None:
    before = scene.driver.run_dir / "journal.jsonl"
    scene.driver.send(signal.SIGKILL)
    assert not is_locked(before), "the dead driver's lock is held"
    scene.start()
    return "the driver"


def kill_lane(scene: Scene) -> str | None:
    """Once in a driver's life: a trial under which its lane died twice is at fault itself."""
    if scene.lane_was_killed:
        return None
    what = send(signal.SIGKILL, "the lane's process", scene.rank())
    scene.lane_was_killed = what is not None
    return what


def send(number: signal.Signals, what: str, pid: int | None) -> str | None:
    if pid is None:
        return None
    os.kill(pid, number)
    return f"{number.name} to {what} {pid}"


def kill_controller(scene: Scene) -> str | None:
    return send(signal.SIGKILL, "the Train controller", scene.on_the_head("TrainController"))


def kill_relay(scene: Scene) -> str | None:
    """Tune names it after what holds its resources."""
    return send(signal.SIGKILL, "the trial's Tune actor", scene.on_the_head("ResourceTrainable"))


def kill_dispatcher(scene: Scene) -> str | None:
    """Without it nothing can be run: the driver says so and ends, and is started again."""
    what = send(signal.SIGKILL, "the Dispatcher", scene.on_the_head("Dispatcher"))
    if what is not None:
        code, output = scene.driver.end()
        said = "the process that hands trials to the lanes has died" in " ".join(output.split())
        assert (code == 1 and said) or code == 0, f"exit code {code}: {output}"  # 0: nothing was left to run
        scene.start()
    return what


def kill_node(scene: Scene) -> str | None:
    scene.cluster.remove_node(scene.node, allow_graceful=False)
    scene.node = scene.add_node()
    return "the lane's node"


def take_node_away(scene: Scene) -> str | None:
    """For longer than a lane has to come up, were it there."""
    scene.cluster.remove_node(scene.node, allow_graceful=False)
    time.sleep(OUTAGE_SECONDS)
    scene.node = scene.add_node()
    return f"the lane's node, for {OUTAGE_SECONDS:g} s"


def tell_to_end(scene: Scene) -> str | None:
    return send(signal.SIGTERM, "the lane's process", scene.rank())


def drain_node(scene: Scene) -> str | None:
    """As a cloud does that takes a machine away: a notice first, the end later."""
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]

    rank, leaving = scene.rank(), scene.node
    deadline_ms = int((time.time() + 60) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why_not = GcsClient(address=scene.cluster.address).drain_node(
        leaving.node_id, reason, "test", deadline_ms
    )
    assert accepted, why_not
    scene.node = scene.add_node()
    if rank is not None:
        until(lambda: not alive(rank), "the drained node's rank ended by itself")
    scene.cluster.remove_node(leaving)
    return "the lane's node, by a drain"


FAULTS: dict[str, Callable[[Scene], str | None]] = {
    "driver": kill_driver,
    "lane": kill_lane,
    "controller": kill_controller,
    "relay": kill_relay,
    "dispatcher": kill_dispatcher,
    "node": kill_node,
    "outage": take_node_away,
    "sigterm": tell_to_end,
    "drain": drain_node,
}


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


# What must hold


def check_journal_only_grew(scene: Scene, before: list[Event]) -> None:
    assert scene.driver.events()[: len(before)] == before, "the journal's past changed"
    check_nothing_was_lost_or_doubled(scene.driver, SAMPLE_BUDGET // EVALUATIONS, EVALUATIONS)


def check_it_ended_as_undisturbed(scene: Scene, undisturbed: Driver) -> None:
    study, reference = scene.driver.study(), undisturbed.study()
    for trial_id, trial in reference.trials.items():
        assert study.trials[trial_id].state == trial.state, study.trials[trial_id].reason
        losses = [point["val_loss"] for point in study.trials[trial_id].history]
        assert losses == [point["val_loss"] for point in trial.history], "to the bit"
    assert recommended(scene.driver) == recommended(undisturbed)
    check_nothing_was_lost_or_doubled(scene.driver, SAMPLE_BUDGET // EVALUATIONS, EVALUATIONS)


def recommended(driver: Driver) -> dict[str, Any]:
    found = json.loads((driver.run_dir / "recommendation.json").read_text())
    keys = ("micro_batch_size", "gradient_accumulation_steps", "learning_rate", "activation_checkpointing", "compile")
    return {key: found[key] for key in keys}


def check_nothing_was_trained_twice(scene: Scene, order: list[int]) -> None:
    """Every process trained a run of consecutive batches, from the last evaluation that the journal had, or later."""
    for segment in segments(scene.logged()):
        if not set(order).intersection(segment["batches"]):
            continue  # a process warms up on a batch of its own
        places = [order.index(batch) for batch in segment["batches"]]
        assert places == list(range(places[0], places[0] + len(places)))
        trial = last_started(scene.driver.events(), segment["time"])
        known = [
            event.metrics["samples_seen"] or 0
            for event in scene.driver.events()
            if isinstance(event, Evaluated) and event.id == trial and event.time < segment["time"]
        ]
        assert places[0] * MICRO_BATCH_SIZE >= max(known, default=0), f"{trial} was trained again"


def segments(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """{time, batches} of every run of a trial in a process: what follows a model's being built there."""
    for _, mine in itertools.groupby(sorted(lines, key=lambda line: line["pid"]), key=lambda line: line["pid"]):
        runs: list[dict[str, Any]] = []
        for line in mine:
            if "batch" in line:
                runs[-1]["batches"].append(line["batch"])
            else:
                runs.append({"time": line["time"], "batches": []})
        yield from (run for run in runs if run["batches"])


def last_started(events: list[Event], before: float) -> str:
    return [event.id for event in events if isinstance(event, Started) and event.time < before][-1]


def check_nothing_is_left_over(scene: Scene) -> None:
    import ray

    pids = {line["pid"] for line in scene.logged()}
    until(lambda: not any(map(alive, pids)), "the ranks are gone")
    until(lambda: ray.available_resources().get("CPU") == 1, "the lane's CPU is free again")
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}, "no placement group is left"
    assert not is_locked(scene.driver.run_dir / "journal.jsonl")


def batches_in_order() -> list[int]:
    """What `LogsItsBatches` logs of a run from its first step to its last."""
    trial = base_trial(parse_study(STUDY, "the harness's study"), None)
    train_set, _ = load_data(trial.data)
    order = SampleOrder(len(train_set), trial.seed)
    starts = range(0, SAMPLE_BUDGET, MICRO_BATCH_SIZE)
    batches = [fetch(train_set, order.indices(range(start, start + MICRO_BATCH_SIZE))) for start in starts]
    return [zlib.crc32(batch["input_ids"].numpy().tobytes()) for batch in batches]


# The play


def strike(
    scene: Scene, levels: Iterator[str], count: int, chance: random.Random, longest_quiet_seconds: float
) -> Counter[str]:
    """Studies in which `count` faults happen, one after another, each study to its end."""
    undisturbed, order = scene.driver, batches_in_order()
    scene.start()
    code, output = scene.driver.end()
    assert code == 0, f"exit code {code}: {output}"
    check_nothing_was_trained_twice(scene, order)
    struck: Counter[str] = Counter()
    while struck.total() < count:
        scene.new_study()
        scene.start()
        while not scene.driver.ends_within(chance.uniform(0, longest_quiet_seconds)):
            if struck.total() < count:
                before = scene.driver.events()
                level = next(levels)
                what = FAULTS[level](scene)
                check_journal_only_grew(scene, before)
                if what is None:  # it comes again
                    levels = itertools.chain([level], levels)
                    continue
                struck[level] += 1
                print(f"{struck.total():4} of {count}: {what}, after {len(before)} events", flush=True)
        code, output = scene.driver.end()
        assert code == 0, f"exit code {code}: {output}"
        check_it_ended_as_undisturbed(scene, undisturbed)
        check_nothing_was_trained_twice(scene, order)
        check_nothing_is_left_over(scene)
        print("     the study ended as it does undisturbed", flush=True)
    return struck


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", default=",".join(FAULTS), help="taken in turns")
    parser.add_argument("--longest-quiet", type=float, default=20.0, metavar="SECONDS", help="between two faults")
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    os.environ.update(worker_environment() | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": SECONDS_TO_FIND_ROOM})
    protect_local_cluster()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), Path(folder) / "unused")
        try:
            start_ray(parse_study(STUDY, "the harness's study"), scene.cluster.address, Path(folder))
            levels = itertools.cycle(chosen.levels.split(","))
            struck = strike(scene, levels, chosen.faults, chance, chosen.longest_quiet)
        finally:
            import ray

            ray.shutdown()
            scene.cluster.shutdown()
    print(
        f"{struck.total()} faults, nothing lost: " + ", ".join(f"{count} x {level}" for level, count in struck.items())
    )


if __name__ == "__main__":
    main()
