"""The job itself, on its first node: `python -m orchestrator.launch.job -- batchscout run ...` in a batch script.

It starts Ray on all nodes by srun, runs the study here, and puts the job back into SLURM's queue if its time was up before the study
ended. The study's process is this one's child, since a signal that SLURM or srun sends to the nodes reaches every process there, Ray's
too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

OUT_OF_TIME = signal.SIGUSR1
"""What the batch script asks SLURM for some time before the job's time is up."""
SECONDS_TO_END = 60
"""How long srun may take to end the nodes' Ray."""


def main(command: Sequence[str]) -> int:
    """Run the study on the job's nodes, and return its exit code. Raises ValueError outside of a job."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ValueError("this runs in a job of SLURM; submit one: batchscout launch slurm STUDY.yaml")
    told = set[signal.Signals]()
    for one in (OUT_OF_TIME, signal.SIGTERM):
        signal.signal(one, lambda number, _: told.add(signal.Signals(number)))
    # Whoever reaches Ray's ports may run code there, so its nodes demand a token of each other that only this job has.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with _cluster() as address:
        code = _run([*command, "--address", address, "--min-nodes", os.environ["SLURM_NNODES"]], told) if address else 1
    if OUT_OF_TIME in told:
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
    return code


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    """Run Ray on all nodes of the job, and yield its address; nothing where it did not start, and the nodes have said why."""
    srun = ["srun", "--overlap", "--kill-on-bad-exit=0", sys.executable, "-m", "orchestrator.launch.node"]
    nodes = subprocess.Popen(srun, stdout=subprocess.PIPE, text=True, start_new_session=True)
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
    sys.exit(main(given[1:] if given[:1] == ["--"] else given))
