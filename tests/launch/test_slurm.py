"""A study as a job of SLURM: the script that is submitted, and real daemons that run it on two nodes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.launch import job, node
from batchscout.orchestrator.launch.node import start_command, this_node
from batchscout.orchestrator.launch.slurm import SlurmJob, script
from tests.support.command_line import Typed
from tests.support.ports import free_ports
from tests.support.processes import HANGS_AFTER_SECONDS, until, without_rays_settings
from tests.support.studies import TINY, grid

CLONE = Path(__file__).parents[2]
RUN = ("python", "-m", "batchscout", "run", "study.yaml")
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_what_is_asked_of_slurm_is_what_was_given() -> None:
    asks = SlurmJob("s", RUN, Path("/r/s.log"), 2, 4, 32, "8:00:00", "gpu", "team", ("--qos=high",))
    asked = directives(script(asks))
    assert {"--nodes=2", "--gpus-per-node=4", "--cpus-per-task=32", "--time=8:00:00", "--partition=gpu"} < set(asked)
    assert {"--account=team", "--qos=high", "--requeue", "--output=/r/s.log"} < set(asked)
    left_out = directives(script(SlurmJob("s", RUN, Path("/r/s.log"))))
    assert not [option for option in left_out if option.startswith(("--gpus", "--cpus", "--time", "--part", "--acc"))]


HOSTILE = "a b;touch /tmp/never $(touch never) `touch never` 'x' \"y\" %j"


def test_no_word_of_the_users_is_read_by_the_shell(tmp_path: Path) -> None:
    hostile = SlurmJob(HOSTILE, ("printf", "%s\\n", HOSTILE), tmp_path / f"{HOSTILE.replace('/', '_')}.log")
    started = script(hostile).replace(f"exec {sys.executable} -m batchscout.orchestrator.launch.job -- ", "exec ")
    done = subprocess.run(["bash", "-c", started], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{HOSTILE}\n"), done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "%%j.log" in script(hostile), "SLURM would put the job's number there"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"time": "8h"}, r"--time is '8h', which SLURM cannot read; write minutes \(90\), hours \(8:00:00\) or days"),
        (
            {"time": "4"},
            "--time is '4', which is 240 s, and a job is told to save 210 s before its end: give it at least 5 minutes",
        ),
        ({"time": "4:59"}, "--time is '4:59', which is 299 s"),
        ({"time": "0:04:59"}, "--time is '0:04:59', which is 299 s"),
        ({"options": ("qos=high",)}, "--sbatch is 'qos=high', which is no option of sbatch; write --sbatch=--qos=high"),
        ({"options": ("--a\n#SBATCH -x",)}, "which is no option of sbatch"),
        ({"partition": "a\nb"}, r"--partition is 'a\\nb', which has a character that cannot be printed; leave it out"),
    ],
)
def test_what_slurm_would_misread_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SlurmJob("s", RUN, Path("/r/s.log"), **fields)


def test_the_first_node_is_the_head_and_jobs_that_share_a_node_have_ports_of_their_own() -> None:
    told = {
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "17",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        "SLURM_CPUS_ON_NODE": "16",
        "SLURM_GPUS_ON_NODE": "4",
    }
    head, other = this_node(told), this_node(told | {"SLURM_NODEID": "1"})
    assert head.address == other.address == f"10.0.0.1:{20_000 + 34}"
    assert {"--head", "--num-gpus=4", f"--port={head.port}"} < set(start_command(head, Path("/t")))
    assert f"--address={head.address}" in start_command(other, Path("/t"))
    ports = [this_node(told | {"SLURM_JOB_ID": str(number)}).port for number in range(17, 6017)]
    assert len({port + i for port in ports for i in (0, 1)}) == 12_000
    assert max(ports) + 1 < 32_768, "from there on Linux gives ports to whoever asks"


@pytest.mark.slow
def test_ray_is_started_though_its_command_is_not_beside_this_python(tmp_path: Path) -> None:
    """As `pip install --user` leaves it, and a distribution's Python."""
    (python := tmp_path / "python3").symlink_to(Path(sys.executable).resolve())
    program = (
        "import subprocess, pathlib, batchscout.orchestrator.launch.node as node\n"
        "command = node.start_command(node.Node(1, '10.0.0.1', 20_000, 1, 0), pathlib.Path('/t'))\n"
        "subprocess.run([*command[: command.index('start')], '--version'], check=True)"
    )
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([python, "-c", program], env=settings, capture_output=True, text=True, check=True).stdout
    assert said.strip().endswith(version("ray"))


@pytest.fixture
def ray_of_this_node() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """One whose listener takes no more connections: the kernel leaves further ones without an answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        port = full.getsockname()[1]
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


@pytest.mark.slow
def test_a_node_ends_soon_after_the_first_ones_ray_and_bears_a_longer_silence(
    monkeypatch: pytest.MonkeyPatch, ray_of_this_node: subprocess.Popen[bytes]
) -> None:
    """A silence may be the network's. Who refuses connections says that nobody listens any more."""
    monkeypatch.setattr(node, "SECONDS_REFUSED", 0.5)

    def seconds_until_over(port: int, unanswered: float) -> float:
        monkeypatch.setattr(node, "SECONDS_UNANSWERED", unanswered)
        began = time.monotonic()
        node.until_over(node.Node(1, "127.0.0.1", port, 1, 0), ray_of_this_node)
        return time.monotonic() - began

    assert seconds_until_over(free_ports(1)[0], HANGS_AFTER_SECONDS) < HANGS_AFTER_SECONDS
    with silent_port() as port:
        assert seconds_until_over(port, 6.0) >= 6.0


def test_a_node_whose_ray_has_ended_before_the_job_says_so_and_ends_well(
    ray_of_this_node: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """With another exit code SkyPilot would end all nodes of the task."""
    ray_of_this_node.kill()
    ray_of_this_node.wait()
    with socket.create_server(("127.0.0.1", 0)) as first:
        node.until_over(node.Node(1, "127.0.0.1", first.getsockname()[1], 1, 0), ray_of_this_node)
    said = capsys.readouterr().err
    assert f"Ray on {socket.gethostname()}, node 1 of this job, was killed by SIGKILL, and the job goes on" in said


def test_what_ray_said_on_a_node_that_never_joined_is_beside_the_logs_that_the_job_names() -> None:
    """Ray itself has no session then, and no log. Here it is to show a token, and there is none."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as folder:  # a short name, for the sake of Ray's sockets
        told = {
            "SLURM_NODEID": "1",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_CPUS_ON_NODE": "1",
        }
        rest = without_rays_settings()
        without_token = {"RAY_AUTH_MODE": "token", "HOME": folder, "RAY_TMPDIR": folder}
        with socket.create_server(("127.0.0.1", this_node(told).port)):
            command = [sys.executable, "-m", "batchscout.orchestrator.launch.node"]
            done = subprocess.run(command, env=rest | told | without_token, capture_output=True, text=True)
        said = re.search("node 1 of this job, exited with status 1, .*; its logs, on that node: (.*)", done.stderr)
        assert said, done.stderr
        assert done.returncode == 0
        (log,) = Path(said[1]).glob("*.log")
        assert "Token authentication is enabled but no authentication token was found" in log.read_text()


def test_outside_of_a_job_it_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(
        ValueError, match=r"in a job of SLURM \(submit one: batchscout launch slurm STUDY\.yaml\) or in a task"
    ):
        job.main([])


def test_without_slurm_the_script_is_written_and_the_message_names_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.setenv("PATH", str(home))
    Path("study.yaml").write_text(yaml.safe_dump(TINY))
    code, _, said = typed("launch", "slurm", "study.yaml", "--nodes", "2")
    assert code == 2
    written = home / "runs" / "tiny.sbatch"
    assert f"there is no sbatch on this machine, so {written} was written and not submitted" in said
    (seconds,) = re.findall(r"--signal=B:USR1@(\d+)", written.read_text())
    (to_save,) = re.findall(r"--seconds-to-save (\d+)", written.read_text())
    assert int(to_save) + 90 == int(seconds), "what the job has is the trials', but for what its end takes"
    assert "--nodes=2" in written.read_text()


@pytest.mark.parametrize(
    ("asked", "cpus"),
    [
        ([], ["--cpus-per-task=16"]),
        (["--set", "placement.cpus_per_rank=6"], ["--cpus-per-task=24"]),
        (["--cpus-per-node", "32"], ["--cpus-per-task=32"]),
        (["--sbatch=--cpus-per-gpu=7"], ["--cpus-per-gpu=7"]),
    ],
)
def test_every_rank_on_a_gpu_has_cpus_though_slurm_gives_a_task_one_that_asks_for_none(
    home: Path, typed: Typed, asked: list[str], cpus: list[str]
) -> None:
    Path("study.yaml").write_text(yaml.safe_dump(TINY))
    code, *_ = typed("launch", "slurm", "study.yaml", "--gpus-per-node", "4", "--dry-run", *asked)
    assert code == 0
    options = directives((home / "runs" / "tiny.sbatch").read_text())
    assert [option for option in options if option.startswith("--cpus")] == cpus


@pytest.mark.parametrize(
    ("asked", "cpus"),
    [
        (["--set", "placement.cpus_per_rank=8"], ["--cpus-per-task=8"]),
        (["--set", "placement={cpus_per_rank: 8, lanes: 3}", "--nodes", "2"], ["--cpus-per-task=16"]),
        (["--sbatch=--gres=gpu:a100:4"], ["--cpus-per-task=16"]),
        (["--sbatch=--gres=gpu:3"], ["--cpus-per-task=12"]),
        (["--sbatch=--gres gpu"], ["--cpus-per-task=4"]),
        (["--sbatch=--gpus-per-node=a100:2", "--set", "placement.cpus_per_rank=6"], ["--cpus-per-task=12"]),
        ([], []),
    ],
)
def test_a_job_asks_for_what_its_ranks_take_though_no_option_of_its_own_says_how_many_gpus(
    home: Path, typed: Typed, asked: list[str], cpus: list[str]
) -> None:
    Path("study.yaml").write_text(yaml.safe_dump(TINY))
    code, said, _ = typed("launch", "slurm", "study.yaml", "--dry-run", *asked)
    assert code == 0
    options = directives((home / "runs" / "tiny.sbatch").read_text())
    assert [option for option in options if option.startswith("--cpus")] == cpus
    assert ("CPUs are not asked for" in said) == (not cpus)


@pytest.mark.parametrize("given", ["0", "-1", "two"])
def test_a_job_has_at_least_one_node(given: str, typed: Typed) -> None:
    code, _, said = typed("launch", "slurm", "study.yaml", f"--nodes={given}")
    assert code == 2
    assert f"argument --nodes: '{given}' is not a whole number of at least 1" in said


# With real daemons

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True)
class Slurm:
    folder: Path

    @property
    def settings(self) -> dict[str, str]:
        own = without_rays_settings()
        # As in a job that was submitted with --export=NONE: its steps are given nothing of its environment.
        own |= {"SLURM_EXPORT_ENV": "NONE"}
        return own | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(CLONE)}

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.settings, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def batchscout(self, *arguments: str) -> str:
        return self.ask(sys.executable, "-m", "batchscout", *arguments)

    def state(self, job: str) -> str:
        told = self.ask("scontrol", "show", "job", job)
        return next(word.removeprefix("JobState=") for word in told.split() if word.startswith("JobState="))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install munge slurmctld slurmd slurm-client")
    if os.getuid() != 0:
        pytest.skip("SLURM's daemons run jobs for others, so they are started by root alone")
    cluster, started = Slurm(tmp_path), list[subprocess.Popen[bytes]]()
    (tmp_path / "key").write_bytes(os.urandom(32))
    (tmp_path / "key").chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    (tmp_path / "slurm.conf").write_text(CONFIGURATION.format(folder=tmp_path, host=host, ports=free_ports(3)))
    configured = ["-D", "-f", str(tmp_path / "slurm.conf")]
    files = [f"--{what}={tmp_path}/{name}" for what, name in MUNGE_FILES.items()]
    commands = [["munged", "--foreground", "--force", *files], ["slurmctld", *configured]]
    commands += [["slurmd", *configured, "-N", node] for node in ("n1", "n2")]
    settings = cluster.settings | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
    try:
        for command in commands:
            (tmp_path / command[-1]).mkdir(exist_ok=True) if command[0] == "slurmd" else None
            log = (tmp_path / "daemons.log").open("ab")
            started.append(subprocess.Popen(command, env=settings, stdout=log, stderr=log))
            log.close()
            until((tmp_path / "munge.sock").exists, "munged listens", 10)
        until(lambda: cluster.ask("sinfo", "-h", "-o", "%D%t").strip() == "2idle", "two nodes are idle", 30)
        yield cluster
    finally:
        subprocess.run(["scancel", "--user=root"], env=settings, check=False)  # a job would outlive its daemons
        with contextlib.suppress(AssertionError):
            until(lambda: not cluster.ask("squeue", "-h"), "the queue is empty", 30)
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(HANGS_AFTER_SECONDS)


MUNGE_FILES = {
    "key-file": "key",
    "socket": "munge.sock",
    "pid-file": "munge.pid",
    "log-file": "munge.log",
    "seed-file": "munge.seed",
}


@pytest.mark.cluster
@pytest.mark.timeout(1000)
def test_a_job_on_two_nodes_whose_time_is_up_goes_on_in_the_queue_and_ends_with_its_study(slurm: Slurm) -> None:
    study = TINY | {"name": "a study", "sample_budget": 4096, "stages": grid(learning_rate=[1e-3, 2e-3])}
    (slurm.folder / "study.yaml").write_text(yaml.safe_dump(study))
    said = slurm.batchscout("launch", "slurm", "study.yaml", "--nodes", "2", "--set", "batch.micro_batch_size=2")
    number = re.findall(r"^job (\d+) is in the queue", said, re.MULTILINE)[0]
    run_dir = slurm.folder / "runs" / "a study"
    journal, log = run_dir / "journal.jsonl", slurm.folder / "runs" / "a study.slurm.log"

    def journaled(kind: str) -> list[Any]:
        lines = journal.read_text().splitlines() if journal.exists() else []
        return [event for line in lines if (event := json.loads(line))["kind"] == kind]

    until(lambda: bool(journaled("evaluated")), "an evaluation", 300)
    slurm.ask("scancel", "--batch", "--signal=USR1", number)  # as SLURM itself does before a job's time is up
    until(lambda: slurm.state(number) == "PENDING", "it is in the queue", 60)
    before = journal.read_text()
    until(lambda: slurm.state(number) in ("COMPLETED", "FAILED", "TIMEOUT"), "its end", 450)
    assert slurm.state(number) == "COMPLETED", log.read_text()
    assert journal.read_text().startswith(before), "the study went on"
    assert len(journaled("run_began")) == 2
    assert "Train with micro-batch 4" in " ".join(log.read_text().split())
    assert "stopped; nothing that was measured or saved is lost" in log.read_text()
    token = [word for word in log.read_text().split() if len(word) == 64]
    assert token == [], "the token is in no log"
    assert "complete" in slurm.batchscout("status", str(run_dir))
