"""A study with a Ray cluster of its own: who can reach it while it runs, what it leaves behind, and how it is stopped."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import (
    HANGS_AFTER_SECONDS,
    descendants,
    kill,
    listens_beyond_loopback,
    read,
    servers_among,
    until,
    without_rays_settings,
)
from tests.support.secrets import SECRETS, told_below
from tests.support.studies import TINY, grid

# What ends a cluster at an odd moment is rare, and each way takes a cluster of its own: it belongs to the third tier.
pytestmark = pytest.mark.timeout(400)

CLONE = Path(__file__).parents[2]
# Slow enough to be caught in the act.
STUDY = TINY | {
    "name": "local",
    "world_size": 2,
    "sample_budget": 4096,
    "kill": {"min_relative_throughput": None},
    "stages": grid(learning_rate=[1e-3, 3e-3]),
}
SECONDS_TO_BE_GONE = 30


@dataclass(frozen=True)
class Stopped:
    """A study that was stopped while it trained."""

    folder: Path
    exit_code: int
    output: str
    open_to_others: list[str]
    """What other machines could have connected to."""
    left: list[str]
    """Processes that outlived the study by too much."""


def start(folder: Path, environment: Mapping[str, str] | None = None, **changes: Any) -> subprocess.Popen[str]:
    """`batchscout run` with all that it writes, Ray's files and the cache included, in this folder. environment: what it has beside this
    process's."""
    (folder / "tmp").mkdir()
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY | changes))
    settings = without_rays_settings()
    settings |= {"PYTHONPATH": str(CLONE), "RAY_TMPDIR": str(folder / "tmp"), "BATCHSCOUT_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "batchscout", "run", "study.yaml", "--dir", "run"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=settings | SECRETS | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(kind: str, folder: Path, driver: subprocess.Popen[str]) -> None:
    """Until the journal has an event of this kind."""
    while f'"kind":"{kind}"' not in read(folder / "run/journal.jsonl"):
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.1)


def alive(pids: list[int]) -> list[str]:
    return [title for pid in pids if (title := read(Path(f"/proc/{pid}/cmdline")).replace("\0", " "))]


def outlives(pids: list[int], seconds: float) -> list[str]:
    """Those of the processes that are still there after so long."""
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive(pids)


@pytest.fixture(scope="module")
def hung_up() -> Iterator[Stopped]:
    """A study on two ranks that got SIGHUP while it trained. Its folder has a short name, for the sake of sockets."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        driver = start(folder)
        try:
            wait_until("evaluated", folder, driver)
            pids = descendants(driver.pid)
            open_to_others = listens_beyond_loopback([driver.pid, *pids])
            driver.send_signal(signal.SIGHUP)
            output, _ = driver.communicate(timeout=HANGS_AFTER_SECONDS)
        finally:
            driver.kill()
        yield Stopped(folder, driver.returncode, output, open_to_others, outlives(pids, SECONDS_TO_BE_GONE))


@pytest.mark.cluster
def test_a_hangup_stops_a_study_as_ctrl_c_does(hung_up: Stopped) -> None:
    assert hung_up.exit_code == 130, hung_up.output
    assert "To go on, run the same command again" in hung_up.output
    assert "Traceback" not in hung_up.output


@pytest.mark.cluster
def test_no_process_of_ray_outlives_the_study(hung_up: Stopped) -> None:
    assert hung_up.left == []


@pytest.mark.cluster
def test_nobody_on_the_network_can_connect_to_a_local_study(hung_up: Stopped) -> None:
    assert hung_up.open_to_others == []


@pytest.mark.cluster
def test_no_secret_of_the_environment_reaches_a_file(hung_up: Stopped) -> None:
    assert told_below(hung_up.folder) == set()


@pytest.mark.cluster
def test_others_on_the_machine_cannot_enter_what_the_study_has_written(hung_up: Stopped) -> None:
    for place in (hung_up.folder / "run", hung_up.folder / "cache", *(hung_up.folder / "tmp").iterdir()):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700, place


UNRULY = """
import os, subprocess, sys, threading
from pathlib import Path

class Log:
    def write(self, text): pass

sys.stdout = sys.stderr = Log()

import torch

from batchscout.trainers.model.gpt import GPT

STARTED = Path(__file__).with_name("started")
threading.Thread(target=threading.Event().wait, name="prefetcher").start()

def leaves_running():
    for own_session in (False, True):
        child = subprocess.Popen(["sleep", "3600"], stdout=subprocess.DEVNULL, stderr=2, start_new_session=own_session)
        with STARTED.open("a") as file:
            file.write(f"{child.pid}\\n")

def data():
    leaves_running()
    os.chdir("/")
    tokens = torch.arange(33) % 16
    return [[{"input_ids": tokens[:-1], "targets": tokens[1:]}] * count for count in (64, 16)]

class Unruly(GPT):
    def __init__(self, read):
        super().__init__(vocab_size=16, seq_len=32, num_layers=1, num_heads=1, hidden_dim=16)
        assert Path(read).read_text()
        leaves_running()
        os.chdir("/")

    def forward(self, batch):
        os.chdir("/")
        return super().forward(batch)
"""


@pytest.fixture(scope="module")
def unruly() -> Iterator[Stopped]:
    """A study whose code changes the directory, and leaves running all that it starts."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "unruly.py").write_text(UNRULY)
        keys = {
            "model": {"target": "unruly:Unruly", "kwargs": {"read": "unruly.py"}},
            "data": {"target": "unruly:data", "kwargs": {}},
            "world_size": 1,
            "sample_budget": 64,
        }
        driver = start(folder, **keys)
        try:
            output, _ = driver.communicate(timeout=HANGS_AFTER_SECONDS)
        finally:
            driver.kill()
        pids = [int(number) for number in (folder / "started").read_text().split()]
        left = outlives(pids, SECONDS_TO_BE_GONE)
        kill(*pids)
        yield Stopped(folder, driver.returncode, output, [], left)


@pytest.mark.cluster
def test_a_study_whose_code_changes_the_directory_goes_on_as_if_it_had_not(unruly: Stopped) -> None:
    assert unruly.exit_code == 0, unruly.output
    assert len(list((unruly.folder / "run/trials").glob("*/steps.jsonl"))) == 2, "of one process, and of the next trial"


@pytest.mark.cluster
def test_a_study_whose_code_takes_the_place_of_its_streams_says_its_answer_all_the_same(unruly: Stopped) -> None:
    assert "\nTrain with  " in unruly.output


@pytest.mark.cluster
def test_a_study_whose_code_starts_ray_has_one_of_its_own(short: Path) -> None:
    """That one is open to others."""
    starts = f"import ray; ray.init(num_cpus=1, _temp_dir={str(short / 'theirs')!r}, ignore_reinit_error=True)"
    (short / "starts_ray.py").write_text(f"{starts}\n{UNRULY}")
    model = {"target": "starts_ray:Unruly", "kwargs": {"read": "starts_ray.py"}}
    data = {"target": "starts_ray:data", "kwargs": {}}
    driver = start(short, model=model, data=data, world_size=1, sample_budget=64)
    output, _ = driver.communicate(timeout=HANGS_AFTER_SECONDS)
    assert driver.returncode == 0, output
    assert "ending the Ray that your code has started" in output


@pytest.mark.cluster
def test_a_node_whose_memory_ray_calls_full_is_told_in_a_sentence(short: Path) -> None:
    driver = start(short, {"RAY_memory_usage_threshold": "0.001"}, world_size=1)
    output, _ = driver.communicate(timeout=HANGS_AFTER_SECONDS)
    assert driver.returncode == 1, output
    assert "than RAY_memory_usage_threshold says (0.001)" in " ".join(output.split())
    assert len(output.splitlines()) < 12, output


@pytest.mark.cluster
def test_a_thread_of_a_users_code_does_not_keep_the_program(unruly: Stopped) -> None:
    assert "(prefetcher)" in unruly.output


@pytest.mark.cluster
def test_nothing_that_a_users_code_starts_outlives_the_study(unruly: Stopped) -> None:
    assert unruly.left == []


@pytest.mark.cluster
@pytest.mark.parametrize("server", ["gcs_server", "raylet"])
def test_a_study_whose_cluster_dies_says_so_within_seconds_in_one_sentence(short: Path, server: str) -> None:
    """Ray itself waits a minute for its gcs, and ends the driver with forty lines."""
    driver = start(short, world_size=1)
    try:
        wait_until("started", short, driver)
        pids = descendants(driver.pid)
        (struck,) = servers_among(pids, server)
        os.kill(struck, signal.SIGKILL)
        killed_at = time.monotonic()
        output, _ = driver.communicate(timeout=HANGS_AFTER_SECONDS)
        seconds = time.monotonic() - killed_at
    finally:
        driver.kill()
    assert driver.returncode == 1, output
    assert seconds < 45, "most of it for the report"
    said = " ".join(output.split())
    assert f"Ray's {server} was killed by SIGKILL: the study's cluster is gone. Nothing is lost" in said
    assert "run the same command again (0 trials ended" in said
    assert len(output.splitlines()) < 12, output
    assert (short / "run/report.html").exists()
    (lease,) = (short / "run/.lease").iterdir()
    assert json.loads(lease.read_text())["released"], "a driver on another machine need not wait"
    assert outlives(pids, SECONDS_TO_BE_GONE) == []


def running_below(folder: Path) -> list[str]:
    """The processes whose command names this folder, as all of Ray's do that belong to the study."""
    titles = {file.parent.name: read(file).replace("\0", " ") for file in Path("/proc").glob("[0-9]*/cmdline")}
    return [title for title in titles.values() if str(folder) in title]


@pytest.mark.cluster
@pytest.mark.parametrize(("server", "number"), [("gcs_server", signal.SIGTERM), ("raylet", signal.SIGHUP)])
def test_a_study_that_is_told_to_stop_while_ray_starts_says_how_to_go_on(
    short: Path, server: str, number: signal.Signals
) -> None:
    """Ray's own handlers would end the driver with 15, or abort it, and leave an agent for a minute."""
    driver = start(short, world_size=1)
    try:
        while not any(title.split(" ")[0].endswith(f"/{server}") for title in running_below(short)):
            assert driver.poll() is None, driver.communicate()[0]
            time.sleep(0.02)
        driver.send_signal(number)
        output, _ = driver.communicate(timeout=HANGS_AFTER_SECONDS)
    finally:
        driver.kill()
    assert driver.returncode == 130, output
    assert "To go on, run the same command again" in output
    assert "Traceback" not in output
    until(lambda: running_below(short) == [], "nothing of Ray's runs", SECONDS_TO_BE_GONE)
