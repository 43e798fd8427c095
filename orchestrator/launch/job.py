"""The study of a job, on the job's first node: `python -m batchscout.orchestrator.launch.job -- batchscout run ...` in a batch script of SLURM, or on
every node of a task of SkyPilot.

It starts Ray on all nodes and runs the study on the first. In SLURM it starts the nodes by srun, and puts the job back into the
queue if its time was up before the study ended; SkyPilot has started a process like this one on every node. The study's process is
this one's child, since a signal that SLURM or srun sends to the nodes reaches every process there, Ray's too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from batchscout.orchestrator.launch import node
from batchscout.orchestrator.launch.node import SKYPILOT_RANK, this_node

OUT_OF_TIME = signal.SIGUSR1
"""What the batch script asks SLURM for some time before the job's time is up."""
SECONDS_TO_END = 60
"""How long the nodes' Ray may take to end."""
_NODE = (sys.executable, "-m", "batchscout.orchestrator.launch.node")
_WHOLE_NODE = ("--export=ALL", "--cpu-bind=none")
"""A job that was submitted with --export=NONE has srun pass on nothing of its environment, and so not the token either. A site may have each
task, which here is a node's Ray with all its ranks, bound to one core."""


def main(command: Sequence[str]) -> int:
    """Run the study on the job's nodes, and return its exit code; on other nodes than the first, run the node. Raises ValueError outside
    of a job."""
    if SKYPILOT_RANK in os.environ:
        return _in_a_task(command, os.environ)
    if "SLURM_JOB_ID" in os.environ:
        return _in_a_slurm_job(command, os.environ["SLURM_JOB_ID"])
    raise ValueError(
        "this runs in a job of SLURM (submit one: batchscout launch slurm STUDY.yaml) or in a task of SkyPilot "
        "(sky launch configs/launch/skypilot.yaml)"
    )


def _in_a_slurm_job(command: Sequence[str], number: str) -> int:
    # Whoever reaches Ray's ports may run code there, so its nodes demand a token of each other that only this job has.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    srun = ["srun", "--overlap", "--kill-on-bad-exit=0", *_WHOLE_NODE, *_NODE]
    told = _told()
    code = _study_on(srun, command, os.environ["SLURM_NNODES"], told)
    if OUT_OF_TIME in told:
        subprocess.run(["scontrol", "requeue", number], check=False)
    return code


def _in_a_task(command: Sequence[str], environ: Mapping[str, str]) -> int:
    if not environ.get("RAY_AUTH_TOKEN"):
        raise ValueError(
            "RAY_AUTH_TOKEN is not set, so whoever reaches the nodes could run code there; "
            "sky launch ... --secret RAY_AUTH_TOKEN=$(openssl rand -hex 32)"
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    if this_node(environ).number:
        return node.main()
    return _study_on(_NODE, command, environ["SKYPILOT_NUM_NODES"], _told())


def _told() -> set[signal.Signals]:
    """Return the set into which every signal comes that asks the study to save and end."""
    told = set[signal.Signals]()
    for one in (OUT_OF_TIME, signal.SIGTERM):
        signal.signal(one, lambda number, _: told.add(signal.Signals(number)))
    return told


def _study_on(starts_nodes: Sequence[str], command: Sequence[str], num_nodes: str, told: set[signal.Signals]) -> int:
    with _cluster(starts_nodes) as address:
        return _run([*command, "--address", address, "--min-nodes", num_nodes], told) if address else 1


@contextlib.contextmanager
def _cluster(starts_nodes: Sequence[str]) -> Iterator[str]:
    """Run Ray on the nodes, and yield its address; nothing where it did not start, and the nodes have said why."""
    nodes = subprocess.Popen(starts_nodes, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert nodes.stdout is not None
    try:
        yield nodes.stdout.readline().strip()
    finally:
        nodes.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes.wait(SECONDS_TO_END)


def _run(command: Sequence[str], told: set[signal.Signals]) -> int:
    """Run the study, which is to save as soon as this process was told anything."""
    study = subprocess.Popen(command)

    def pass_on(number: int, _: object) -> None:
        told.add(signal.Signals(number))
        study.terminate()

    for one in (OUT_OF_TIME, signal.SIGTERM):
        signal.signal(one, pass_on)
    if told:  # before there was a study to tell
        study.terminate()
    return study.wait()


if __name__ == "__main__":
    given = sys.argv[1:]
    try:
        sys.exit(main(given[1:] if given[:1] == ["--"] else given))
    except ValueError as error:
        print(f"batchscout: {error}", file=sys.stderr)
        sys.exit(2)
