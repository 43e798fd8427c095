"""What runs on each node of a job of SLURM or task of SkyPilot: that node of a Ray cluster, for as long as the first node has one.

Each node ends the Ray processes that it has started, and no others: `ray stop` would also end those of other jobs of the same user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from batchscout.orchestrator.execution.cluster_servers import refuses
from batchscout.orchestrator.execution.local_cluster import private_folder
from batchscout.orchestrator.launch import RAY
from batchscout.orchestrator.units import ending_text

SECONDS_TO_MEET = 300
"""How long the first node's Ray may take to start."""
SECONDS_TO_END = 20
"""How long a node's Ray may take to end its processes."""
SECONDS_REFUSED, SECONDS_UNANSWERED = 5, 60
"""When the first node has refused connections for so long, its Ray has ended, and so has the job. Silence may be the network's: it is waited for as
long as Ray waits itself."""
RAY_ENVIRONMENT = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "RAY_worker_niceness": "0"}
"""At its end Ray would wait 30 s for work to move to other nodes, and the whole job is over. At its own niceness of 15 anything else on
the node would slow down what is being timed."""
SKYPILOT_RANK = "SKYPILOT_NODE_RANK"
FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Where the ports of jobs lie: below those that Linux hands out by itself."""


@dataclass(frozen=True)
class Node:
    """Which node of a job this is."""

    number: int
    head: str
    """The address of the first node."""
    port: int
    num_cpus: int
    num_gpus: int

    @property
    def address(self) -> str:
        return f"{self.head}:{self.port}"


def this_node(environ: Mapping[str, str]) -> Node:
    """Return this node, as srun or SkyPilot tells it. SkyPilot runs tasks on SLURM, too, and is then the one that asks."""
    if SKYPILOT_RANK in environ:
        return Node(
            number=int(environ[SKYPILOT_RANK]),
            head=environ["SKYPILOT_NODE_IPS"].split()[0],
            port=_port(zlib.crc32(environ["SKYPILOT_TASK_ID"].encode())),
            num_cpus=len(os.sched_getaffinity(0)),
            num_gpus=int(environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "0")),
        )
    return Node(
        number=int(environ["SLURM_NODEID"]),
        head=environ["SLURM_LAUNCH_NODE_IPADDR"],
        port=_port(int(environ["SLURM_JOB_ID"])),
        num_cpus=int(environ["SLURM_CPUS_ON_NODE"]),
        num_gpus=int(environ.get("SLURM_GPUS_ON_NODE", "0")),
    )


def _port(job: int) -> int:
    """Return the job's own port: two that share a node must not meet, and each has a second one for Ray's client server."""
    return FIRST_PORT + 2 * (job % (NUM_PORTS // 2))


def start_command(node: Node, folder: Path) -> list[str]:
    """Return `ray start` of this node, which runs for as long as the node's Ray does. folder: for logs and sockets of the job."""
    own = [f"--num-cpus={node.num_cpus}", f"--num-gpus={node.num_gpus}", "--block", "--disable-usage-stats"]
    ray = [*RAY, "start"]
    if node.number:
        return [*ray, f"--address={node.address}", *own]
    ports = [f"--node-ip-address={node.head}", f"--port={node.port}", f"--ray-client-server-port={node.port + 1}"]
    return [*ray, "--head", *ports, f"--temp-dir={folder}", "--include-dashboard=false", *own]


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what this node's Ray is given of an environment.

    SkyPilot runs a task in a process of a Ray of its own, which counts half a CPU for it and has set it to one thread. Ours gives each rank as
    many as it has CPUs, unless somebody has set another number.
    """
    is_skypilots = SKYPILOT_RANK in environ and environ.get("OMP_NUM_THREADS") == "1"
    return {name: value for name, value in environ.items() if not (is_skypilots and name == "OMP_NUM_THREADS")}


def main() -> int:
    """Run this node's Ray. The first node prints the cluster's address once that answers."""
    node = this_node(os.environ)
    if node.number:
        _until_answered(node, None)
    elif _answers(node):
        sys.exit(
            f"batchscout: something else listens at {node.address}, which follows from this job's number; submit the job again"
        )
    with _ray_of(node) as ray:
        _until_answered(node, ray)
        if node.number == 0:
            print(node.address, flush=True)
        until_over(node, ray)
    return 0


def until_over(node: Node, ray: subprocess.Popen[bytes]) -> None:
    """Wait until the first node's Ray has ended, and say so where this node's own has before. That is no failure of the job's: SkyPilot would
    end all its nodes."""
    answered, refused = time.monotonic(), None
    while True:
        if answers := _answers(node):
            answered, refused = time.monotonic(), None
        elif refuses((node.head, node.port)):
            refused = refused or time.monotonic()
        else:
            refused = None
        if ray.poll() is not None and answers:
            print(
                f"batchscout: Ray on {socket.gethostname()}, node {node.number} of this job, {ending_text(ray.returncode)}, and the job goes on "
                f"without it; its logs, on that node: {private_folder()}",
                file=sys.stderr,
            )
            return
        now = time.monotonic()
        is_refused = refused is not None and now - refused >= SECONDS_REFUSED
        if is_refused or now - answered >= SECONDS_UNANSWERED or ray.poll() is not None:
            return
        time.sleep(1)


@contextlib.contextmanager
def _ray_of(node: Node) -> Iterator[subprocess.Popen[bytes]]:
    """Start this node's Ray, and end it on leaving, as SIGTERM does. What `ray start` says is in a file beside Ray's own logs: where no
    session comes about it is all that there is to read."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = private_folder()
    with (folder / f"ray_start_{node.port}_{node.number}.log").open("wb") as said:
        process = subprocess.Popen(
            start_command(node, folder),
            env=inherited(os.environ) | RAY_ENVIRONMENT,
            start_new_session=True,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _until_answered(node: Node, ray: subprocess.Popen[bytes] | None) -> None:
    """Wait for the first node's Ray, or end with a word why not. ray: this node's own, where it is started already."""
    deadline = time.monotonic() + SECONDS_TO_MEET
    while not _answers(node):
        has_ended = ray is not None and ray.poll() is not None
        if has_ended or time.monotonic() > deadline:
            how = "has ended" if has_ended else f"did not answer for {SECONDS_TO_MEET} s"
            sys.exit(
                f"batchscout: Ray at {node.address}, on this job's first node, {how}; its logs: {private_folder()}"
            )
        time.sleep(0.5)


def _answers(node: Node) -> bool:
    try:
        socket.create_connection((node.head, node.port), timeout=1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
