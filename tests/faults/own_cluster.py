"""A study with a Ray cluster of its own, and what may go wrong with it, its files, its memory and its machine."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchscout.orchestrator.study.events import Evaluated, Noticed, Started, TrialEvent
from batchscout.orchestrator.study.storage.lock import is_locked
from batchscout.trainers.files import sync
from tests.faults.driver import Driver
from tests.faults.scene import Scene, alive, title
from tests.support.damage import flipped
from tests.support.disk import Disk
from tests.support.memory_group import MemoryGroup
from tests.support.processes import descendants, kill, until
from tests.support.storage import Call, fault, interposed_library

# A dead gcs or raylet is noticed, and the report is written, within this.
SECONDS_TO_NOTICE = 10.0
SECONDS_TO_BE_GONE = 5.0
EVALUATIONS_ON_BAD_STORAGE = 3
SECONDS_TO_RUN_OUT = 60.0
CHECKPOINTS = "1/checkpoints"
"""In the paths of the trials at 0.001 and 0.0001; without the 1 it would be in that of the package's own files, too."""
# Where a study touches its files while it runs, and what storage may say there.
CALLS: tuple[tuple[Call, str], ...] = (
    ("write", "/run/journal.jsonl"), ("fsync", "/run/journal.jsonl"), ("open", CHECKPOINTS),
    ("write", CHECKPOINTS), ("fsync", CHECKPOINTS), ("rename", CHECKPOINTS), ("open", "steps.jsonl"),
    ("write", "steps.jsonl"), ("unlink", CHECKPOINTS), ("list", CHECKPOINTS), ("rename", "/run/report.html"), ("rename", "/run/recommendation.json"),
)  # fmt: skip
ERRORS = ("EBUSY", "EACCES", "ENOSPC")


class OwnCluster(Scene):
    """The studies lie on the disk if there is one, and run in the group if there is one."""

    def __init__(self, folder: Path, chance: random.Random, disk: Disk | None, group: MemoryGroup | None) -> None:
        super().__init__(folder, chance)
        self.disk, self.group = disk, group
        self.place = disk.root if disk else folder
        self.pids: set[int] = set()
        """The processes that the study's drivers have started and a fault has seen."""
        self.new_study()

    def driver_of(self, study: dict[str, Any], place: Path) -> Driver:
        home = self.place / place.name
        home.mkdir(exist_ok=True)
        if self.disk:
            sync(self.place)  # the user's own directory; the study file is not on the disk
        driver = Driver(place, study, None, home / "run")
        driver.environment |= {"RAY_TMPDIR": str(self.folder), "BATCHSCOUT_CACHE": str(self.place / "cache")}
        return driver

    def start(self, **environment: str) -> None:
        """With these variables in the driver's environment."""
        enter = self.group.enter if self.group else None
        self.driver.start(preexec_fn=enter, env=self.driver.environment | environment)
        self.lane_was_killed = False

    def started(self) -> list[int]:
        """The processes that the driver has started, and those that they have."""
        assert self.driver.process is not None
        found = descendants(self.driver.process.pid)
        self.pids |= {*found}
        return found

    def server(self, name: str) -> int | None:
        """The process of the cluster that has this program."""
        return next((pid for pid in self.started() if title(pid).split("\0")[0].endswith(f"/{name}")), None)

    def stop(self) -> str:
        """Have the driver end in order, whatever it is at; returns what it said."""
        self.started()
        code, output = self.driver.send(signal.SIGTERM)
        assert code in (0, 1, 130, -signal.SIGTERM), f"exit code {code}: {output}"
        assert code != 1 or is_of_storage(output), output
        assert code != -signal.SIGTERM or not output, f"it had begun: {output}"
        return output

    def end(self) -> None:
        """Kill what is still there, after whatever went wrong: the driver, and what it has left behind."""
        if self.driver.process is not None and self.driver.process.poll() is None:
            self.started()
            kill(self.driver.process.pid)
            self.driver.end()
        kill(*self.pids)
        until(lambda: not any(map(alive, self.pids)), "the study's processes are gone")

    def check_nothing_is_left_over(self) -> None:
        pids = self.pids | {line["pid"] for line in self.logged()}
        until(lambda: not any(map(alive, pids)), "the study's processes are gone", SECONDS_TO_BE_GONE)
        self.pids = set()
        assert not is_locked(self.driver.run_dir / "journal.jsonl")


# Faults: each answers what it struck, None where there was nothing to strike


def kill_gcs(scene: OwnCluster) -> str | None:
    return kill_server(scene, "gcs_server")


def kill_raylet(scene: OwnCluster) -> str | None:
    return kill_server(scene, "raylet")


def kill_server(scene: OwnCluster, name: str) -> str | None:
    """The driver says so in one sentence and ends, and is started again. Until a rank trains, Ray itself starts."""
    pid = scene.server(name)
    if pid is None or scene.rank() is None:
        return None
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    code, output = scene.driver.end()
    seconds = time.monotonic() - killed_at
    if code != 0:  # 0: nothing was left to run
        said = f"Ray's {name} was killed by SIGKILL: the study's cluster is gone. Nothing is lost: run the same command"
        assert code == 1, f"exit code {code}: {output}"
        assert said in " ".join(output.split()), output
        assert "Traceback" not in output, output
        assert seconds < SECONDS_TO_NOTICE, f"{seconds:.1f} s"
    scene.start()
    return f"{name} {pid}, noticed after {seconds:.1f} s"


def hang_up(scene: OwnCluster) -> str | None:
    pids = scene.started()
    code, output = scene.driver.send(signal.SIGHUP)
    in_order = code == 130 and "run the same command again" in " ".join(output.split())
    not_yet = code in (130, -signal.SIGHUP) and scene.driver.events() == scene.known  # nothing had begun
    assert in_order or not_yet or code == 0, f"exit code {code}: {output}"
    assert "Traceback" not in output, output
    until(lambda: not any(map(alive, pids)), "no process outlives the study", SECONDS_TO_BE_GONE)
    scene.start()
    return f"SIGHUP to the driver, which ended with {code}"


def flip_bit(scene: OwnCluster) -> str | None:
    """Of a checkpoint, or of the journal's last line, while no driver runs."""
    if not any(isinstance(event, Evaluated) for event in scene.known):
        return None
    scene.stop()
    checkpoints = sorted(scene.driver.run_dir.glob("trials/*/checkpoints/*.pt"))
    if checkpoints and scene.chance.random() < 0.5:
        what = flip_bit_of_checkpoint(scene, scene.chance.choice(checkpoints))
    else:
        what = flip_bit_of_journal(scene)
    scene.start()
    return what


def flip_bit_of_checkpoint(scene: OwnCluster, path: Path) -> str:
    content = path.read_bytes()
    bit = scene.chance.randrange(8 * len(content))
    path.write_bytes(flipped(content, bit))
    trial_id = path.parts[-3]
    scene.may_repeat_steps.add(trial_id)
    return f"bit {bit} of {trial_id}'s checkpoint {path.name}"


def flip_bit_of_journal(scene: OwnCluster) -> str | None:
    """None where the line tells of another damage, or names the trial of what was logged last."""
    events = scene.driver.events()
    if isinstance(events[-1], Started | Noticed):
        return None
    path = scene.driver.run_dir / "journal.jsonl"
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + still_a_line(last, scene.chance))
    scene.known = events[:-1]
    scene.num_damaged_lines += 1
    if isinstance(events[-1], TrialEvent):
        scene.may_repeat_steps.add(events[-1].id)
    return f"a bit of the journal's last line, which told: {events[-1].kind}"


def still_a_line(line: bytes, chance: random.Random) -> bytes:
    """The line with a bit flipped: another one where that would make two lines of it, or none that is whole."""
    while True:
        content = flipped(line, chance.randrange(8 * (len(line) - 1)))
        if content.count(b"\n") == 1:
            return content


def fail_storage(scene: OwnCluster) -> str | None:
    """For a driver from its start: it goes on, or halts with a sentence, and goes on once the storage works again."""
    scene.stop()
    (call, path), error = scene.chance.choice(CALLS), scene.chance.choice(ERRORS)
    after, times = scene.chance.randrange(3), scene.chance.choice((1, 3, None))
    preloaded = {"LD_PRELOAD": str(interposed_library()), "RAY_LD_PRELOAD_ON_WORKERS": "1"}
    scene.start(**fault(call, path, error, times, after), **preloaded)
    so_far = num_evaluations(scene.driver)
    while num_evaluations(scene.driver) < so_far + EVALUATIONS_ON_BAD_STORAGE and not scene.driver.ends_within(0.1):
        pass
    output = scene.stop()
    assert "Traceback" not in output, output
    then = "it halted" if is_of_storage(output) else "it went on"
    scene.start()
    return f"{error} at {call} of {path}, {times or 'always'} after {after}: {then}"


def num_evaluations(driver: Driver) -> int:
    return sum(isinstance(event, Evaluated) for event in driver.events())


def is_of_storage(output: str) -> bool:
    said = " ".join(output.split())
    return any(f"could not be {done}: " in said for done in ("written", "read", "removed"))


def run_out_of_memory(scene: OwnCluster) -> str | None:
    """Once in a driver's life."""
    rank = scene.rank()
    if scene.group is None or scene.lane_was_killed or rank is None:
        return None
    scene.started()
    scene.group.run_out(rank, lambda: not alive(rank), SECONDS_TO_RUN_OUT)
    scene.lane_was_killed = True
    return f"the memory of the lane's process {rank}"


def cut_power(scene: OwnCluster) -> str | None:
    """Of the whole machine: what no fsync has asked for is gone, and so is every process."""
    if scene.disk is None or not scene.known:
        return None
    assert scene.driver.process is not None
    pids = scene.started()
    scene.disk.cut_power()
    kill(scene.driver.process.pid, *pids, *scene.started())
    scene.driver.end()
    until(lambda: not any(map(alive, pids)), "the machine is off")
    scene.disk.unmount()
    scene.disk.mount()
    scene.known = scene.known[:-1]  # it may have been read before it was synced
    scene.start()
    return "the machine's power"


FAULTS: dict[str, Callable[[OwnCluster], str | None]] = {
    "gcs": kill_gcs,
    "raylet": kill_raylet,
    "hangup": hang_up,
    "flip": flip_bit,
    "storage": fail_storage,
    "memory": run_out_of_memory,
    "power": cut_power,
}
