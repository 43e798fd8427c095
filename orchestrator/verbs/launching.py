"""Verbs that hand a study to a cluster."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchscout.orchestrator.verbs.study_file import config_of, run_dir_of
from batchscout.trainers.files import quoted

if TYPE_CHECKING:
    from batchscout.orchestrator.config.keys import StudyConfig

CPUS_OF_A_GPU, CPUS_OF_A_POD = 4, 4
"""What is asked for where nobody says more. SLURM gives a node's task one CPU, and every rank on a GPU takes one at least: to compile, and to
fetch its batches. Few nodes have less than four for each GPU."""


def _cpus_per_node(arguments: argparse.Namespace, config: StudyConfig) -> int | None:
    """Return how many CPUs to ask of each node; None where nothing says how many it takes."""
    of_a_rank = config.placement.cpus_per_rank
    if arguments.cpus_per_node:
        return arguments.cpus_per_node
    if gpus := arguments.gpus_per_node or _gpus_in(getattr(arguments, "sbatch", [])):
        return gpus * (of_a_rank or CPUS_OF_A_GPU)
    ranks = config.world_size * (config.placement.lanes or 1)
    return of_a_rank and of_a_rank * math.ceil(ranks / arguments.nodes)


def _gpus_in(options: Sequence[str]) -> int:
    """Return how many GPUs options of sbatch ask of each node, as sites write it that name them by type; 0 where none does."""
    asked = r"--(?:gres[= ]gpu(?::[^:,]*[^:,\d][^:,]*)?(?::(\d+))?|gpus-per-(?:node|task)[= ](?:[^:,]+:)?(\d+))"
    named = [found for one in options if (found := re.fullmatch(asked, one))]
    return max((int(found[1] or found[2] or 1) for found in named), default=0)


def _options_of_run(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the words that say on the cluster what was said of the study here."""
    kept = [option for option in ("retry_failed", "keep_finished") if getattr(arguments, option)]
    changes = [word for change in arguments.set for word in ("--set", change)]
    return *(f"--{option.replace('_', '-')}" for option in kept), *changes


def slurm(arguments: argparse.Namespace) -> int:
    """Submit the study as one job of SLURM, which goes on with it after a preemption or the end of its time."""
    from batchscout.orchestrator.launch.slurm import SECONDS_TO_END, SECONDS_TO_SAVE, SlurmJob, submit, write_script

    config = config_of(arguments)
    run_dir = run_dir_of(arguments, config, "batchscout launch slurm")
    study = str(arguments.study.absolute())
    saves = ("--seconds-to-save", str(SECONDS_TO_SAVE - SECONDS_TO_END))
    run = (sys.executable, "-m", "batchscout", "run", study, "--dir", str(run_dir))
    asks_otherwise = any(option.startswith(("--cpus-per-", "-c")) for option in arguments.sbatch)
    job = SlurmJob(
        name=config.name,
        command=(*run, *saves, *_options_of_run(arguments)),
        log=run_dir.with_name(f"{run_dir.name}.slurm.log"),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_node=arguments.cpus_per_node if asks_otherwise else _cpus_per_node(arguments, config),
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        options=tuple(arguments.sbatch),
    )
    path = run_dir.with_name(f"{run_dir.name}.sbatch")
    write_script(path, job)
    if job.cpus_per_node is None and not asks_otherwise:
        print(
            "CPUs are not asked for: SLURM gives a node's task one, unless the site says otherwise; --cpus-per-node asks for more"
        )
    if arguments.dry_run:
        print(f"wrote {quoted(path)}; submit it with: sbatch {quoted(path)}")
        return 0
    number = submit(path)
    print(f"job {number} is in the queue: squeue --job {number}")
    print(f"  what it says:   tail -f {quoted(job.log)}")
    print(f"  how far it is:  batchscout status {quoted(run_dir)}")
    print(f"  end it:         scancel {number}; the same command goes on from there")
    return 0


def ray(arguments: argparse.Namespace) -> int:
    """Run the study on the cluster of a file for `ray up`, over SSH; the cluster is started if it is not there yet."""
    from batchscout.orchestrator.launch.over_ssh import SentStudy, fetch_command, launch, status_command

    sent = SentStudy(
        cluster=arguments.cluster,
        name=config_of(arguments).name,
        study=arguments.study,
        options=(*_options_of_run(arguments), "--min-nodes", str(arguments.min_nodes)),
        in_tmux=arguments.tmux,
    )
    is_well = launch(sent, is_agreed=arguments.yes)
    print(f"  how far it is:    {shlex.join(status_command(sent))}")
    print(f"  fetch the runs:   {shlex.join(fetch_command(sent))}")
    print(f"  end the cluster:  ray down {quoted(sent.cluster)}")
    return 0 if is_well else 1


def kuberay(arguments: argparse.Namespace) -> int:
    """Write the study as a RayJob of KubeRay; another job of the same study goes on with it."""
    from batchscout.orchestrator.launch.kuberay import KubeRayJob, resource_name, write_manifest

    config = config_of(arguments)
    job = KubeRayJob(
        name=config.name,
        study=arguments.study.read_text(),
        image=arguments.image,
        claim=arguments.claim,
        options=_options_of_run(arguments),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_node=_cpus_per_node(arguments, config) or CPUS_OF_A_POD,
        memory_per_node=arguments.memory_per_node,
        head_memory=arguments.head_memory,
    )
    run_dir = run_dir_of(arguments, config, "batchscout launch kuberay")
    path = run_dir.with_name(f"{run_dir.name}.rayjob.yaml")
    write_manifest(path, job)
    print(f"wrote {quoted(path)}")
    print(f"  run it, or go on:  kubectl replace --force -f {quoted(path)}")
    print(f"  how far it is:     kubectl get rayjob {resource_name(config.name)}")
    print(f"  what it says:      kubectl logs -f job/{resource_name(config.name)}")
    return 0
