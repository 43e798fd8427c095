"""A cluster of machines in namespaces, with a network between them, disks of their own, clocks that can be set and storage that all of
them see; and what may go wrong with these."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchscout.orchestrator.study.events import Event, RunBegan
from batchscout.orchestrator.study.storage.lock import is_locked
from tests.faults.driver import Driver, has
from tests.faults.scene import Scene
from tests.support.disk import NotHere
from tests.support.machines import CLONE, Machine, machines, missing
from tests.support.processes import until
from tests.support.storage import interposed_library

PARTITION_SECONDS = 80.0
"""Ray (2.60) gives a node up after five checks that fail after 10 s each, 3 s apart: 65 s."""
BLINK_SECONDS = 8.0
HANG_SECONDS = 40.0
FULL_SECONDS = 15.0
SECONDS_TO_NOTICE = 25.0
"""A dead gcs or raylet of the head is noticed, and the report is written, within this: its host must refuse connections for 8."""
SECONDS_OFF = (3600, -3600, 86400)
SFTP_SERVER = "/usr/lib/openssh/sftp-server"
CLOCK = Path("/clock")


class SeveralMachines(Scene):
    """A head without CPUs, on which the driver runs, and a worker with one. What they share is a mount by sshfs, whose server is a
    process that can be stopped: the kernel then lets whoever touches a file wait."""

    def __init__(self, folder: Path, chance: random.Random, on_leaving: contextlib.ExitStack) -> None:
        super().__init__(folder / "shared", chance)
        self.storage = _mounted(folder, on_leaving)
        self.head, self.worker = on_leaving.enter_context(machines(folder, ("head", "worker"), [self.folder]))
        library = shutil.copy(interposed_library("clock_jump"), self.folder)
        self._settings = [
            "env",
            f"LD_PRELOAD={library}",
            f"CLOCK_OFF_BY={CLOCK}",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=1",
        ]
        self.start_cluster()
        self.new_study()

    def start_cluster(self) -> None:
        self._ray(self.head, "--head", "--port=6379", f"--node-ip-address={self.head.address}", "--num-cpus=0")
        self.start_worker()

    def start_worker(self) -> None:
        self._ray(
            self.worker,
            f"--address={self.head.address}:6379",
            f"--node-ip-address={self.worker.address}",
            "--num-cpus=1",
        )

    def end_cluster(self) -> None:
        """As after a restart of both machines."""
        for machine in (self.head, self.worker):
            machine.run("ray", "stop", "--force")

    def _ray(self, machine: Machine, *options: str) -> None:
        machine.run(*self._settings, "ray", "start", *options, "--disable-usage-stats")

    def new_study(self) -> None:
        if not self.clocks_are_right:
            self._put_clocks_right()
        super().new_study()

    def _put_clocks_right(self) -> None:
        """That, too, may set a clock back: Ray begins anew with it."""
        self.end_cluster()
        for machine in (self.head, self.worker):
            machine.write(CLOCK, "0\n")
        self.start_cluster()

    def driver_of(self, study: dict[str, Any], place: Path) -> Driver:
        driver = Driver(place, study, f"{self.head.address}:6379")
        driver.command = self.head.command([*self._settings, *driver.command], CLONE)
        return driver

    def start(self) -> None:
        self.num_begun_before = len(_beginnings(self.driver.events()))
        super().start()

    def of_this_driver(self) -> list[Event]:
        """What this driver has journaled; nothing until it has begun."""
        events = self.driver.events()
        begun = _beginnings(events)[self.num_begun_before :]
        return events[begun[0] :] if begun else []

    def end_driver(self, server: str) -> str:
        """Wait for the driver's end after one of the head's servers was killed, and start everything anew."""
        struck = time.monotonic()
        code, output = self.driver.end()
        said = " ".join(output.split())
        if code != 0:  # nothing was left to run
            assert code == 1, f"exit code {code}: {output}"
            assert f"Ray's {server}" in said, output
            assert "Nothing is lost" in said, output
            assert "Traceback" not in said, output
            seconds = time.monotonic() - struck
            assert seconds < SECONDS_TO_NOTICE, f"it took {seconds:.0f} s"
        self.end_cluster()
        self.start_cluster()
        self.start()
        return f"{server} of the head"

    def check_nothing_is_left_over(self) -> None:
        until(lambda: self.worker.pids("ray::RayTrainWorker") == [], "the ranks are gone")
        assert not is_locked(self.driver.run_dir / "journal.jsonl")


def refuse_where_missing() -> None:
    """Raise NotHere where this machine does not allow such a cluster."""
    if why := missing():
        raise NotHere(why)
    if shutil.which("sshfs") is None or not Path(SFTP_SERVER).exists():
        raise NotHere("sshfs or sftp-server is not installed: apt-get install sshfs openssh-sftp-server")
    if shutil.which("gcc") is None:
        raise NotHere("there is no gcc, which builds the interposed library")


def _mounted(folder: Path, on_leaving: contextlib.ExitStack) -> int:
    """Mount folder/stored at folder/shared; returns the process that serves it."""
    stored, shared, server = folder / "stored", folder / "shared", folder / "server"
    stored.mkdir()
    shared.mkdir()
    server.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\nexec {SFTP_SERVER}\n")
    server.chmod(0o755)
    mount = ["sshfs", "-o", f"ssh_command={server}", "-o", "dev,suid,noauto_cache", f"storage:{stored}", str(shared)]
    subprocess.run(mount, check=True)
    on_leaving.callback(subprocess.run, ["umount", "--lazy", str(shared)], check=True)
    pid = int((folder / "pid").read_text())
    on_leaving.callback(os.kill, pid, signal.SIGCONT)
    return pid


# Faults: each answers what it struck, None where there was nothing to strike


def once_it_trains(strike: Callable[[SeveralMachines], str | None]) -> Callable[[SeveralMachines], str | None]:
    """A trial of this driver's, which has connected by then: the journal has those of earlier drivers, too."""
    return lambda scene: strike(scene) if has("started")(scene.of_this_driver()) else None


def _beginnings(events: list[Event]) -> list[int]:
    return [number for number, event in enumerate(events) if isinstance(event, RunBegan)]


def cut_the_network(scene: SeveralMachines) -> str | None:
    """For longer than Ray waits for a node: the trial goes on as soon as there is one again.

    Not after a clock was set. Ray's timers follow the time of day (2.60, Boost's deadline_timer): once that was set back they stand still
    until it has caught up, so the head gives no node up, or the worker never asks whether it was given up.
    """
    if not scene.clocks_are_right:
        return None
    scene.worker.set_link(up=False)
    time.sleep(PARTITION_SECONDS)
    scene.worker.set_link(up=True)
    until(lambda: scene.worker.pids("/raylet") == [], "Ray on the worker, which was given up, has ended", 90)
    scene.worker.run("ray", "stop", "--force")
    scene.start_worker()
    return f"the worker's network, for {PARTITION_SECONDS:g} s"


def cut_the_network_for_a_moment(scene: SeveralMachines) -> str:
    scene.worker.set_link(up=False)
    time.sleep(BLINK_SECONDS)
    scene.worker.set_link(up=True)
    return f"the worker's network, for {BLINK_SECONDS:g} s"


def kill_gcs(scene: SeveralMachines) -> str | None:
    """Once a driver has begun, connected or not."""
    return _kill_on_the_head(scene, "gcs_server") if scene.driver.events() else None


def kill_raylet(scene: SeveralMachines) -> str:
    """Not while a driver connects, which says then that it has not: exit code 2."""
    return _kill_on_the_head(scene, "raylet")


def _kill_on_the_head(scene: SeveralMachines, server: str) -> str:
    first, *_ = sorted(scene.head.pids(f"/{server} "))  # a raylet forks: for a moment its child has its words
    os.kill(first, signal.SIGKILL)
    return scene.end_driver(server)


def fill_the_disk(scene: SeveralMachines) -> str:
    """The worker's own: where Ray logs, and where data and kernels are cached. What the study keeps lies elsewhere."""
    scene.worker.run("sh", "-c", "cat /dev/zero > /filler || true")
    time.sleep(FULL_SECONDS)
    scene.worker.run("rm", "/filler")
    return f"the worker's disk, full for {FULL_SECONDS:g} s"


def set_the_clock(scene: SeveralMachines) -> str:
    machine, seconds = scene.chance.choice((scene.head, scene.worker)), scene.chance.choice(SECONDS_OFF)
    machine.write(CLOCK, f"{seconds}\n")
    scene.clocks_are_right = False
    return f"the clock of the {machine.name}, now {seconds:+} s off"


def stop_the_storage(scene: SeveralMachines) -> str:
    """As a mount of NFS hangs whose server is away."""
    os.kill(scene.storage, signal.SIGSTOP)
    time.sleep(HANG_SECONDS)
    os.kill(scene.storage, signal.SIGCONT)
    return f"the storage, for {HANG_SECONDS:g} s"


FAULTS: dict[str, Callable[[SeveralMachines], str | None]] = {
    "partition": once_it_trains(cut_the_network),
    "blink": once_it_trains(cut_the_network_for_a_moment),
    "head-gcs": kill_gcs,
    "head-raylet": once_it_trains(kill_raylet),
    "disk": once_it_trains(fill_the_disk),
    "clock": once_it_trains(set_the_clock),
    "hang": once_it_trains(stop_the_storage),
}
