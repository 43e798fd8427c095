"""The verbs. Everything heavy is imported inside them: `--help` needs neither torch nor ray."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrator.signals import (
    all_are_ctrl_c,
    all_are_ctrl_c_until_the_end,
    interrupts_afterwards,
    leave_dead_terminal,
    leave_on_signals,
)
from orchestrator.terminal import printable, show_exception, spell_out_what_cannot_be_printed, wrapped
from orchestrator.units import exit_text
from orchestrator.verbs.helping import SCHEMAS, doctor, init, schema
from orchestrator.verbs.reading import compare, explain, export, report, status
from trainers.files import StorageLost, quoted

if TYPE_CHECKING:
    from orchestrator.config.keys import StudyConfig

EXPORTS = ("hf", "accelerate", "lightning", "trl", "axolotl", "torchtitan", "deepspeed", "nanogpt")


def program() -> NoReturn:
    """Be the program `batchscout`, and end the process."""
    all_are_ctrl_c_until_the_end()
    spell_out_what_cannot_be_printed()
    code = _exit_code(None)
    leave_on_signals(code)
    sys.exit(code)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a verb, and exit with 0: fine, 1: no recommendation or a failed run, 2: bad input, 130: stopped by Ctrl-C."""
    with all_are_ctrl_c():
        sys.exit(_exit_code(argv))


def _exit_code(argv: list[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    sys.excepthook = show_exception
    try:
        return arguments.verb(arguments)
    except SystemExit as error:  # no verb ends so by itself: the user's code would end the program without a word
        said = f"batchscout: the study's own code {exit_text(error)}; mend what it gave up for, here:"
        print(printable("\n".join([said, *traceback.format_tb(error.__traceback__)])), file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not leave_dead_terminal():  # then the pipe was the study's own
            raise
        return 0  # as `head` does, the reader had enough
    except ValueError as error:
        print(f"batchscout: {printable(str(error))}", file=sys.stderr)
        return 2
    except StorageLost as error:
        print(f"batchscout: {printable(str(error))}; mend that, and run the same command again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("batchscout: stopped; nothing is lost, and the same command goes on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchscout",
        description="Which micro-batch size, accumulation, activation checkpointing and learning rate to train with, and why.",
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="show the version that is installed, and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_verbs_of_a_study_file(verbs)
    _add_verbs_of_a_run_directory(verbs)
    _add_launch(verbs)
    _add_helpers(verbs)
    return parser


def _add_verbs_of_a_study_file(verbs: Any) -> None:
    """Add those that take a study file."""
    for verb in (plan, run, trial):
        command = _verb(verbs, verb, "study", "STUDY.yaml", "the study file")
        command.add_argument(
            "--set", action="append", default=[], metavar="a.b=c", help="change one key of it; repeatable"
        )
        command.add_argument("--dir", type=Path, metavar="RUN_DIR", help="where the study lives; default runs/<name>")
        if verb is run:
            _add_options_of_run(command)
        if verb is plan:
            command.add_argument(
                "--no-memory",
                action="store_true",
                help="only read the study file: no prediction, and no look at model and data",
            )


def _add_options_of_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--address", metavar="ADDRESS", help="a Ray cluster to use ('auto': the one this node is in)")
    command.add_argument(
        "--min-nodes",
        type=_count,
        default=1,
        metavar="N",
        help="wait until the cluster has so many nodes: what it holds is counted once",
    )
    command.add_argument(
        "--fresh", action="store_true", help="measure the frontier though another study did so on this machine"
    )
    command.add_argument(
        "--retry-failed", action="store_true", help="try what failed again, though code and data are as they were"
    )


def _add_launch(verbs: Any) -> None:
    """Add `launch`, with a verb of its own for each scheduler."""
    schedulers = verbs.add_parser("launch", help="Run a study as a job of a cluster's scheduler.").add_subparsers(
        required=True, metavar="SCHEDULER"
    )
    options_of = {slurm: _add_options_of_slurm, ray: _add_options_of_ray, kuberay: _add_options_of_kuberay}
    for scheduler, add_options in options_of.items():
        command = _verb(schedulers, scheduler, "study", "STUDY.yaml", "the study file")
        command.add_argument(
            "--set", action="append", default=[], metavar="a.b=c", help="change one key of it; repeatable"
        )
        add_options(command)


def _add_options_of_ray(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cluster",
        type=Path,
        default=Path("cluster.yaml"),
        metavar="FILE",
        help="the file for `ray up`; default cluster.yaml",
    )
    command.add_argument(
        "--min-nodes", type=_count, default=1, metavar="N", help="wait until the cluster has so many nodes"
    )
    command.add_argument(
        "--tmux", action="store_true", help="end at once; the study goes on, whatever becomes of this machine"
    )
    command.add_argument("--yes", action="store_true", help="start the cluster without asking")


def _add_options_of_kuberay(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dir", type=Path, metavar="RUN_DIR", help="beside which to write the manifest")
    command.add_argument("--image", required=True, metavar="IMAGE", help="of the clone, made with its Dockerfile")
    command.add_argument("--claim", required=True, metavar="NAME", help="the PersistentVolumeClaim for run directories")
    command.add_argument("--nodes", type=_count, default=1, metavar="N", help="pods that run lanes, beside the head's")
    command.add_argument("--gpus-per-node", type=_count, metavar="N", help="GPUs of each")
    command.add_argument("--cpus-per-node", type=_count, default=4, metavar="N", help="CPUs of each")
    command.add_argument("--memory-per-node", default="16Gi", metavar="SIZE", help="memory of each")


def _add_options_of_slurm(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dir", type=Path, metavar="RUN_DIR", help="where the study lives, on storage that all nodes see"
    )
    command.add_argument("--nodes", type=_count, default=1, metavar="N", help="nodes of the job")
    command.add_argument("--gpus-per-node", type=_count, metavar="N", help="GPUs of each node")
    command.add_argument("--cpus-per-node", type=_count, metavar="N", help="CPUs of each node")
    command.add_argument(
        "--time", metavar="TIME", help="as SLURM has it, 8:00:00; the job goes on in another when it is up"
    )
    command.add_argument("--partition", metavar="NAME", help="the partition")
    command.add_argument("--account", metavar="NAME", help="the account")
    command.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, as --sbatch=--qos=high",
    )
    command.add_argument("--dry-run", action="store_true", help="write the script, and do not submit it")


def _add_verbs_of_a_run_directory(verbs: Any) -> None:
    """Add those that read what a study has written."""
    command = _verb(verbs, status, "run_dir", "RUN_DIR", "a study's run directory")
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="for programs")
    shown.add_argument(
        "--watch", action="store_true", help="again whenever something has changed, until the study is over"
    )
    command = _verb(verbs, report, "run_dir", "RUN_DIR", "a study's run directory")
    command.add_argument(
        "other",
        nargs="?",
        type=Path,
        metavar="OTHER",
        help="another study's: compare the two, in OTHER/comparison.html",
    )
    command = _verb(verbs, explain, "run_dir", "RUN_DIR", "a study's run directory")
    command.add_argument("trial", metavar="TRIAL", help="the trial's name, as status shows it")
    command.add_argument("--json", action="store_true", help="for programs")
    command = _verb(verbs, compare, "run_dir", "RUN_A", "a study's run directory")
    command.add_argument("other", type=Path, metavar="RUN_B", help="another study's")
    command.add_argument("--json", action="store_true", help="for programs")
    command = _verb(verbs, export, "run_dir", "RUN_DIR", "a study's run directory")
    command.add_argument("--to", required=True, choices=EXPORTS)


def _add_helpers(verbs: Any) -> None:
    """Add the verbs that help whoever types."""
    command = verbs.add_parser("init", help=init.__doc__, description=init.__doc__)
    command.add_argument(
        "what",
        nargs="?",
        default=".",
        metavar="FOLDER | package.module:callable",
        help="what to look at; default: this folder",
    )
    command.add_argument("--to", metavar="STUDY.yaml", help="the file to write; default: study.yaml in the folder")
    command.set_defaults(verb=init)
    command = verbs.add_parser("doctor", help=doctor.__doc__, description=doctor.__doc__)
    command.add_argument(
        "study",
        nargs="?",
        type=Path,
        metavar="STUDY.yaml",
        help="a study file that is to run here; its code is not run",
    )
    command.add_argument("--json", action="store_true", help="for programs")
    command.set_defaults(verb=doctor)
    command = verbs.add_parser("schema", help=schema.__doc__, description=schema.__doc__)
    command.add_argument("of", choices=SCHEMAS, help="what it describes")
    command.set_defaults(verb=schema)


def _count(text: str) -> int:
    """Return a whole number of at least 1. argparse tells the user what it was to be."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


class _PrintVersion(argparse.Action):
    """Prints the version. Unlike argparse's own action it reads the package's metadata only when it is asked to."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('batchscout')}")
        parser.exit()


def _verb(verbs: Any, verb: Any, argument: str, metavar: str, text: str) -> argparse.ArgumentParser:
    """Add a verb, which is a function whose docstring is its help."""
    command = verbs.add_parser(verb.__name__, help=verb.__doc__, description=verb.__doc__)
    command.add_argument(argument, type=Path, metavar=metavar, help=text)
    command.set_defaults(verb=verb)
    return command


def plan(arguments: argparse.Namespace) -> int:
    """Show stages, first trials, what is skipped and why, and the predicted memory; start nothing."""
    from orchestrator import preflight
    from orchestrator.config.trial import uses_compile
    from orchestrator.execution.code_shipping import import_from_here
    from orchestrator.output.plan import print_plan
    from orchestrator.output.tracking import require_libraries
    from orchestrator.study.facts import Facts
    from orchestrator.study.run_directory import as_it_began, refuse_other_study
    from trainers.notices import heard_by

    import_from_here()
    config = _config(arguments)
    run_dir = _run_dir(arguments, config)
    refuse_other_study(config := as_it_began(config, run_dir), run_dir)
    facts = Facts()
    if not arguments.no_memory:
        preflight.check_host(config)
        require_libraries(config.tracking)
        preflight.check_ranks(config)
        say = functools.partial(print, file=sys.stderr)
        with heard_by(lambda notice: say(printable(notice.text))):
            facts = preflight.check_new_study(config, is_local=True, compiles=uses_compile(config), say=say)
    print_plan(config, facts, predict_memory=not arguments.no_memory)
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Run the study, or go on with it; ends with a recommendation."""
    config = _config(arguments)
    with interrupts_afterwards():  # the libraries' own code, half imported
        from orchestrator.execution.code_shipping import import_from_here
        from orchestrator.output.tracking import how_to_look
        from orchestrator.run import run_study

    import_from_here()
    run_dir = _run_dir(arguments, config)
    ending = run_study(
        config,
        run_dir,
        arguments.address,
        min_nodes=arguments.min_nodes,
        remeasure=arguments.fresh,
        retry_failed=arguments.retry_failed,
    )
    leave_dead_terminal()  # the exit code is to tell how the study ended, whoever reads what is printed
    stream = sys.stdout if ending.exit_code == 0 else sys.stderr
    print(f"\n{wrapped(printable(ending.message), stream)}", file=stream)
    if ending.exit_code in (0, 1):
        if (run_dir / "report.html").exists():
            print(f"\n  report:         {quoted(run_dir / 'report.html')}", file=stream)
        if (run_dir / "recommendation.json").exists():
            typed = quoted(arguments.dir or Path("runs") / config.name)
            print(f"  recommendation: {quoted(run_dir / 'recommendation.json')}", file=stream)
            print(f"  paste it:       batchscout export {typed} --to hf", file=stream)
        for what, command in how_to_look(config.tracking, run_dir).items():
            print(f"  {what + ':':15} {command}", file=stream)
    return ending.exit_code


def trial(arguments: argparse.Namespace) -> int:
    """Run one training run in this process, without Ray: for a debugger."""
    config = _config(arguments)
    from orchestrator.execution.code_shipping import import_from_here
    from orchestrator.trial import run_trial

    import_from_here()
    # Not the study's own directory, which `run` wants empty.
    return run_trial(config, (arguments.dir or Path("runs") / f"{config.name}-trial").absolute())


def slurm(arguments: argparse.Namespace) -> int:
    """Submit the study as one job of SLURM, which goes on with it after a preemption or the end of its time."""
    from orchestrator.launch.slurm import SlurmJob, submit, write_script

    config = _config(arguments)
    run_dir = _run_dir(arguments, config).absolute()
    changes = [word for change in arguments.set for word in ("--set", change)]
    study = str(arguments.study.absolute())
    command = (sys.executable, "-m", "orchestrator", "run", study, "--dir", str(run_dir), *changes)
    job = SlurmJob(
        name=config.name,
        command=command,
        log=run_dir.with_name(f"{run_dir.name}.slurm.log"),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_node=arguments.cpus_per_node,
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        options=tuple(arguments.sbatch),
    )
    path = run_dir.with_name(f"{run_dir.name}.sbatch")
    write_script(path, job)
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
    from orchestrator.launch.over_ssh import SentStudy, fetch_command, launch, status_command

    changes = [word for change in arguments.set for word in ("--set", change)]
    sent = SentStudy(
        cluster=arguments.cluster,
        name=_config(arguments).name,
        study=arguments.study,
        options=(*changes, "--min-nodes", str(arguments.min_nodes)),
        in_tmux=arguments.tmux,
    )
    is_well = launch(sent, is_agreed=arguments.yes)
    print(f"  how far it is:    {shlex.join(status_command(sent))}")
    print(f"  fetch the runs:   {shlex.join(fetch_command(sent))}")
    print(f"  end the cluster:  ray down {quoted(sent.cluster)}")
    return 0 if is_well else 1


def kuberay(arguments: argparse.Namespace) -> int:
    """Write the study as a RayJob of KubeRay; another job of the same study goes on with it."""
    from orchestrator.launch.kuberay import KubeRayJob, resource_name, write_manifest

    config = _config(arguments)
    job = KubeRayJob(
        name=config.name,
        study=arguments.study.read_text(),
        image=arguments.image,
        claim=arguments.claim,
        changes=tuple(arguments.set),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_node=arguments.cpus_per_node,
        memory_per_node=arguments.memory_per_node,
    )
    run_dir = _run_dir(arguments, config)
    path = run_dir.with_name(f"{run_dir.name}.rayjob.yaml")
    write_manifest(path, job)
    print(f"wrote {quoted(path)}")
    print(f"  run it, or go on:  kubectl replace --force -f {quoted(path)}")
    print(f"  how far it is:     kubectl get rayjob {resource_name(config.name)}")
    print(f"  what it says:      kubectl logs -f job/{resource_name(config.name)}")
    return 0


def _config(arguments: argparse.Namespace) -> StudyConfig:
    from orchestrator.config.load import load_study

    def say(told: str) -> None:
        print(f"batchscout: {printable(told)}", file=sys.stderr)

    return load_study(arguments.study, arguments.set, say)


def _run_dir(arguments: argparse.Namespace, config: StudyConfig) -> Path:
    return (arguments.dir or Path("runs") / config.name).absolute()
