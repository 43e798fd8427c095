"""A study as one SLURM job: its sbatch script, which starts a Ray cluster of the job's nodes and runs the study on it.

The job is submitted once. It goes on after a preemption or the end of its time: the study saves, SLURM puts the job back into its
queue, and the same script goes on from the run directory.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from batchscout.trainers.files import quoted, written_whole

SECONDS_TO_SAVE, SECONDS_TO_END = 210, 90
"""How long before the end of its time a job is told to save: a step may be long, and so may writing a checkpoint. How much of that is left for its
end, once its trials have saved: where one has not, its lane is waited for, too (40 s), and Ray has 20 s to end."""
LEAST_SECONDS = SECONDS_TO_SAVE + 90
"""A job of less time is told to save before it has trained anything, and goes back into the queue for ever."""

_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d\d?(:\d\d){0,2}")


@dataclass(frozen=True)
class SlurmJob:
    """What a study asks of SLURM. All else is the partition's default, or one of `options`."""

    name: str
    command: tuple[str, ...]
    """`batchscout run` with its arguments, but for the address."""
    log: Path
    """Where the job writes, beside the run directory; nodes see it as this machine does."""
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    """None: what the partition gives."""
    time: str | None = None
    """As SLURM has it: minutes, hours:minutes:seconds or days-hours. None: the partition's longest."""
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()
    """Further options of sbatch, as `--qos=high`."""

    def __post_init__(self) -> None:
        """Raises ValueError for what sbatch would refuse without a word of help, or take for something else."""
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ValueError(
                f"--time is '{self.time}', which SLURM cannot read; write minutes (90), hours (8:00:00) or days (2-00)"
            )
        if self.time is not None and (seconds := _seconds(self.time)) and seconds < LEAST_SECONDS:
            raise ValueError(
                f"--time is '{self.time}', which is {seconds} s, and a job is told to save {SECONDS_TO_SAVE} s before its end: give it at least "
                f"{LEAST_SECONDS // 60} minutes"
            )
        words = {"--partition": self.partition, "--account": self.account, "the study's name": self.name}
        odd = next((key for key, value in words.items() if value is not None and not value.isprintable()), None)
        if odd is not None:
            raise ValueError(f"{odd} is {words[odd]!r}, which has a character that cannot be printed; leave it out")
        for option in self.options:
            if not option.startswith("-") or not option.isprintable():
                raise ValueError(f"--sbatch is '{option}', which is no option of sbatch; write --sbatch=--qos=high")


def _seconds(time: str) -> int:
    """Return how long this is, as SLURM reads it: minutes, minutes:seconds or hours:minutes:seconds, and with days-, hours:minutes:seconds of
    which the last may be left out. 0 is no limit."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours = [*parts, 0, 0][:3] if dash else [0, *parts, 0][:3] if len(parts) < 3 else parts
    return int(days or 0) * 86_400 + sum(part * size for part, size in zip(hours, (3600, 60, 1), strict=True))


def script(job: SlurmJob) -> str:
    """Return the sbatch script of a job. No word of the user's is read by a shell: each is quoted."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"--cpus-per-task={job.cpus_per_node}"] if job.cpus_per_node else []),
        *([f"--time={job.time}"] if job.time else []),
        *([f"--partition={job.partition}"] if job.partition else []),
        *([f"--account={job.account}"] if job.account else []),
        *job.options,
        f"--output={str(job.log).replace('%', '%%')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SECONDS_TO_SAVE}",
    ]
    run = shlex.join([sys.executable, "-m", "batchscout.orchestrator.launch.job", "--", *job.command])
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options), "", f"exec {run}", ""])


def write_script(path: Path, job: SlurmJob) -> None:
    """Write the job's script, whole or not at all."""
    with written_whole(path) as file:
        file.write(script(job).encode())


def submit(path: Path) -> str:
    """Submit a script, and return the number of its job. Raises ValueError where this machine has no SLURM, or where that refuses the
    job, with its words."""
    if shutil.which("sbatch") is None:
        raise ValueError(
            f"there is no sbatch on this machine, so {quoted(path)} was written and not submitted; run the same command on a "
            f"login node of the cluster, or sbatch {quoted(path)} there"
        )
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().removeprefix("sbatch: ")
        raise ValueError(
            f"SLURM refused the job: {said}; give what it asks for, for instance --partition, --cpus-per-node or --sbatch=..."
        )
    return done.stdout.strip().partition(";")[0]
