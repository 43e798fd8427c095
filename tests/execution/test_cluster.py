"""A cluster that is not the study's own and demands a token: started by the commands of cluster.yaml as they stand there, a
head and a worker on this machine. Who has the token runs a study on it, and nobody else does."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_ports
from tests.support.processes import descendants, descended_from, kill, read, without_rays_settings
from tests.support.secrets import SECRETS, told_below
from tests.support.studies import TINY, grid

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CLONE = Path(__file__).parents[2]
SECONDS_TO_START = 120
# A data set of the user's own, by a relative path that is a default of its code. It leaves running what it starts.
OWN_DATA = """
import os, subprocess
from batchscout.trainers.data.text import text

def make(path="given/words.txt"):
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 3600 & echo"], stdout=subprocess.DEVNULL)
    assert not any(name.startswith("ACCELERATE_USE") for name in os.environ), "it would train as its launcher says"
    return text(train=path, seq_len=8, tokenizer="bytes")
"""
STUDY = TINY | {"name": "token", "sample_budget": 16, "stages": grid(learning_rate=[1e-3])}
SHOWN = {"RAY_AUTH_MODE": "token"}
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "ACCELERATE_USE_DEEPSPEED": "true"}
"""What a launcher leaves in the environment of a node that is started by one."""


@dataclass(frozen=True)
class Cluster:
    folder: Path
    address: str
    dashboard: str
    head: subprocess.Popen[str]

    def user(self, name: str) -> Path:
        """The home of somebody who may have a token; the owner's has the cluster's."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        return home

    def stranger(self, token: str | None) -> Path:
        """The home of somebody with another token, or with none."""
        home = self.user(f"stranger-{token}")
        if token is not None:
            (home / ".ray").mkdir(exist_ok=True)
            (home / ".ray/auth_token").write_text(token)
        return home

    def batchscout(self, home: Path, study: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
        """`batchscout run` of this user, from a directory of its own."""
        (home / "work").mkdir(exist_ok=True)
        (home / "work/study.yaml").write_text(yaml.safe_dump(study))
        command = [sys.executable, "-m", "batchscout", "run", "study.yaml", "--address", self.address]
        settings = settings_of(home) | {"BATCHSCOUT_CACHE": str(home / "cache")} | environment
        return subprocess.Popen(
            command, cwd=home / "work", env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def submit_job(self, home: Path, *entrypoint: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit` of this user, by HTTP to the dashboard; again for as long as it says that the node's agent, which starts
        jobs, has not come up yet."""
        command = ["ray", "job", "submit", "--address", self.dashboard, "--", *entrypoint]
        settings, began = settings_of(home) | environment, time.monotonic()
        while True:
            done = subprocess.run(
                command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
            )
            if "No available agent to submit job" not in done.stdout or time.monotonic() - began > SECONDS_TO_START:
                return done


def settings_of(home: Path) -> dict[str, str]:
    own = without_rays_settings()
    return own | {
        "HOME": str(home),
        "DESCENDS_FROM": str(home.parent),
        "PYTHONPATH": str(CLONE),
        "PATH": f"{Path(sys.executable).parent}:{own['PATH']}",
    }


def start_command(name: str, **replaced: str) -> str:
    """A node's start in cluster.yaml, the second of its commands; the first ends whatever Ray runs on the machine."""
    first, start = yaml.safe_load((CLONE / "cluster.yaml").read_text())[name]
    assert first == "ray stop"
    for before, now in replaced.items():
        assert before in start
        start = start.replace(before, now)
    return start


def start(command: str, home: Path) -> subprocess.Popen[str]:
    """A node that lives as long as this process: `ray start --block`."""
    log = home / f"{len(list(home.glob('*.log')))}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"{command} --block"],
            env=settings_of(home) | LAUNCHED,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while "will now block" not in (said := log.read_text()):  # the last words of a start, after the address
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
    except AssertionError:
        end(process)
        raise
    return process


def end(process: subprocess.Popen[str]) -> None:
    kill(*descendants(process.pid), process.pid)
    process.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With the ports and the folder of its own that a machine needs on which other clusters may run."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:
        folder, nodes = Path(name), []
        owner = folder / "owner"
        owner.mkdir()
        key = next(line for line in (CLONE / "cluster.yaml").read_text().splitlines() if "--generate" in line)
        make_key = key.lstrip("# ").partition("   ")[0]
        subprocess.run(["bash", "-c", make_key], env=settings_of(owner), check=True, capture_output=True)
        gcs, dashboard, client, of_head, of_worker = free_ports(5)
        own = f"--dashboard-port={dashboard} --ray-client-server-port={client} --dashboard-agent-listen-port={of_head}"
        own += f" --temp-dir={shlex.quote(name)}/ray --num-cpus=0"
        try:
            autoscaling = " --autoscaling-config=~/ray_bootstrap_config.yaml"  # of machines that `ray up` has started
            head = start_command("head_start_ray_commands", **{"6379": str(gcs), autoscaling: f" {own}"})
            nodes.append(start(head, owner))
            address = re.findall(rf"[0-9.]+:{gcs}", (owner / "0.log").read_text())[0]
            worker = start_command("worker_start_ray_commands", **{"$RAY_HEAD_IP:6379": address})
            nodes.append(start(f"{worker} --dashboard-agent-listen-port={of_worker} --num-cpus=1", owner))
            yield Cluster(folder, address, f"http://127.0.0.1:{dashboard}", nodes[0])
        finally:
            for node in reversed(nodes):
                end(node)


def test_who_has_the_token_runs_a_study(cluster: Cluster) -> None:
    """Their code reads a file by a relative path, nothing that it starts outlives the study, and no other secret of theirs reaches a file, on
    the cluster's nodes neither."""
    work = cluster.user("owner") / "work"
    (work / "given").mkdir(parents=True)
    (work / "given" / "words.txt").write_text(1_000 * "some words ")
    (work / "mine.py").write_text(OWN_DATA)
    secrets = {name: secret for name, secret in SECRETS.items() if name != "RAY_AUTH_TOKEN"}  # it would be the token
    driver = cluster.batchscout(cluster.user("owner"), STUDY | {"data": {"target": "mine:make"}}, **SHOWN, **secrets)
    said, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, said
    assert "Train with  micro-batch" in said
    assert told_below(cluster.folder) == set()
    assert [
        pid for pid in descended_from(cluster.folder) if read(Path(f"/proc/{pid}/cmdline")).startswith("sleep")
    ] == []


@pytest.mark.parametrize(
    ("token", "shown"), [(None, {}), (None, SHOWN), (8 * "deadbeef", SHOWN)], ids=["none", "none to show", "another"]
)
def test_a_stranger_is_refused_in_one_sentence(cluster: Cluster, token: str | None, shown: dict[str, str]) -> None:
    driver = cluster.batchscout(cluster.stranger(token), STUDY, **shown)
    said, _ = driver.communicate(timeout=300)
    assert driver.returncode == 2, said
    assert said.splitlines()[-1] == (
        f"batchscout: the Ray cluster at --address {cluster.address} demands a token, and this process has none or another "
        "one; copy ~/.ray/auth_token from a node of the cluster and set RAY_AUTH_MODE=token, or run on a node of the cluster "
        "with --address auto"
    )
    assert "InvalidAuthToken" not in said
    assert "Traceback" not in said


def test_a_study_is_a_job_of_who_has_the_token_and_its_words_arrive_as_they_were_typed(cluster: Cluster) -> None:
    owner, name = cluster.user("owner"), "a b;touch INJECTED $(touch INJECTED) 'x' \"y\""
    (owner / "batchscout" / "mine").mkdir(parents=True)
    (owner / f"batchscout/mine/{name}.yaml").write_text(yaml.safe_dump(STUDY))
    command = ["python", str(CLONE / "configs/submit.py"), f"mine/{name}.yaml", "--set", f"name={name}"]
    done = cluster.submit_job(owner, *command, **SHOWN)
    assert done.returncode == 0, done.stdout
    assert "Train with  micro-batch" in done.stdout
    run_dir = owner / "batchscout/runs" / name
    outside = [sys.executable, "-m", "batchscout", "status", str(run_dir)]
    assert "grid: complete" in subprocess.run(outside, env=settings_of(owner), capture_output=True, text=True).stdout
    assert list(cluster.folder.rglob("INJECTED")) == []
    token = (owner / ".ray/auth_token").read_text()
    told = [file for file in cluster.folder.rglob("*") if file.is_file() and token.encode() in file.read_bytes()]
    assert told == [owner / ".ray/auth_token"]


@pytest.mark.parametrize(
    ("token", "shown", "said"),
    [
        (None, {}, "Unauthorized: Missing authentication token"),
        (None, SHOWN, "Token authentication is enabled but Ray couldn't find an authentication token"),
        (8 * "deadbeef", SHOWN, "Forbidden: Invalid authentication token"),
    ],
    ids=["none", "none to show", "another"],
)
def test_a_strangers_job_is_refused(cluster: Cluster, token: str | None, shown: dict[str, str], said: str) -> None:
    done = cluster.submit_job(cluster.stranger(token), "touch", str(cluster.folder / "INJECTED"), **shown)
    assert done.returncode == 1, done.stdout
    assert said in done.stdout
    assert not (cluster.folder / "INJECTED").exists()


def test_a_node_without_the_token_does_not_join(cluster: Cluster) -> None:
    command = start_command("worker_start_ray_commands", **{"$RAY_HEAD_IP:6379": cluster.address})
    with pytest.raises(AssertionError, match="no authentication token was found"):
        start(f"{command} --num-cpus=1", cluster.user("another machine"))


def test_a_driver_whose_gcs_has_ended_says_so_within_seconds_in_one_sentence(cluster: Cluster) -> None:
    """The last test of this cluster. Ray itself waits a minute, and then ends the driver with forty lines."""
    home = cluster.user("owner")
    driver = cluster.batchscout(home, STUDY | {"name": "longer", "sample_budget": 65536}, **SHOWN)
    try:
        while '"kind":"started"' not in read(home / "work/runs/longer/journal.jsonl"):
            assert driver.poll() is None, driver.communicate()[0]
            time.sleep(0.1)
        (gcs,) = [pid for pid in descendants(cluster.head.pid) if "/gcs_server" in read(Path(f"/proc/{pid}/cmdline"))]
        os.kill(gcs, signal.SIGKILL)
        struck = time.monotonic()
        output, _ = driver.communicate(timeout=300)
    finally:
        driver.kill()
    assert driver.returncode == 1, output
    assert time.monotonic() - struck < 25
    said = " ".join(output.split())
    assert (
        f"Ray's gcs_server at {cluster.address} has ended: the study's cluster is gone. Nothing is lost: start" in said
    )
    assert "start the cluster again, and run the same command (0 trials ended" in said
    assert len(output.splitlines()) < 14, output
