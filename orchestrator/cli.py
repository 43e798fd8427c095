"""What can be typed, and how the program ends. The verbs are in verbs/, and nothing heavy is loaded by an import of one: `--help` needs
neither torch nor ray."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from batchscout.orchestrator.command_line import CommandLine
from batchscout.orchestrator.output.schemas import SCHEMA_NAMES
from batchscout.orchestrator.signals import (
    SECONDS_TO_SAVE,
    all_are_ctrl_c,
    all_are_ctrl_c_until_the_end,
    leave_dead_terminal,
    leave_on_signals,
)
from batchscout.orchestrator.study.storage.place import RunPlace, run_place_of
from batchscout.orchestrator.terminal import (
    draw_no_bars_in_a_log,
    leave_full_stdout,
    open_closed_streams,
    printable,
    show_exception,
    spell_out_what_cannot_be_printed,
)
from batchscout.orchestrator.units import exit_text
from batchscout.orchestrator.verbs.helping import doctor, init, schema
from batchscout.orchestrator.verbs.launching import kuberay, ray, slurm
from batchscout.orchestrator.verbs.reading import compare, explain, export, report, status
from batchscout.orchestrator.verbs.running import plan, run, trial
from batchscout.trainers.descendants import adopt_orphans
from batchscout.trainers.files import StorageLost

EXAMPLE = """example:
  batchscout init train.py --lr 1e-3    # your script: writes study.yaml
  batchscout run study.yaml             # ends with what to train with"""
RUN_DIR = "a study's run directory, a folder or s3://bucket/name"
EXPORTS = ("script", "torch", "hf", "accelerate", "lightning", "trl", "axolotl", "torchtitan", "deepspeed", "nanogpt")


def program() -> NoReturn:
    """Be the program `batchscout`, and end the process."""
    open_closed_streams()
    all_are_ctrl_c_until_the_end()
    spell_out_what_cannot_be_printed()
    draw_no_bars_in_a_log()
    arguments = _parser().parse_args()
    if arguments.verb in (run, plan, trial, init):  # these run a user's code, and what that starts is to end with them
        adopt_orphans()
    try:
        code = _exit_code(arguments)
    except Exception as error:  # a fault of ours: what a user's code has started would keep the program all the same
        show_exception(type(error), error, error.__traceback__)
        code = 1
    leave_on_signals(code)
    sys.exit(code)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a verb, and exit with 0: fine, 1: no recommendation or a failed run, 2: bad input, 130: stopped by Ctrl-C."""
    with all_are_ctrl_c():
        sys.exit(_exit_code(_parser().parse_args(argv)))


def _exit_code(arguments: argparse.Namespace) -> int:
    sys.excepthook = show_exception
    try:
        if lost := _lost_directory():
            raise ValueError(lost)
        code = arguments.verb(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as error:  # no verb ends so by itself: the user's code would end the program without a word
        said = f"the study's own code {exit_text(error)}; fix the reason, here:"
        return _ended(2, "\n".join([said, *traceback.format_tb(error.__traceback__)]))
    except BrokenPipeError:
        if not leave_dead_terminal():  # then the pipe was the study's own
            raise
        return 0  # as `head` does, the reader had enough
    except ValueError as error:
        return _ended(2, str(error).strip())
    except FileNotFoundError:  # any library may ask where it is, Ray's start among them
        if not (lost := _lost_directory()):
            raise
        return _ended(1, f"{lost}, and run the same command again")
    except OSError as error:  # of a file it has a name
        if error.filename is not None or not (reason := leave_full_stdout()):
            raise
        remedy = "print to another place, and run the same command again"
        return _ended(1, f"stdout could not be written: {reason}; {remedy}")
    except StorageLost as error:
        return _ended(1, f"{error}; fix that, and run the same command again")
    except KeyboardInterrupt:
        return _ended(130, "stopped; nothing is lost, and the same command goes on from here")


def _ended(code: int, why: str) -> int:
    print(f"batchscout: {printable(why)}", file=sys.stderr)
    return code


def _lost_directory() -> str:
    """Return what to say where the current directory has been removed; empty where it is there."""
    try:
        os.getcwd()
    except OSError as error:
        return f"the current directory is gone ({error.strerror}); cd to one that is there"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = CommandLine(
        prog="batchscout",
        description="Which micro-batch size, accumulation, activation checkpointing and learning\nrate to train with, and why.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="show the version that is installed, and exit")
    verbs = _verbs_of(parser, "VERB")
    _add_verbs_of_a_study_file(verbs)
    _add_verbs_of_a_run_directory(verbs)
    _add_launch(verbs)
    _add_helpers(verbs)
    return parser


def _verbs_of(parser: argparse.ArgumentParser, metavar: str) -> Any:
    """Have the parser take a verb, and print its help where none is typed."""

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(verb=show_help)
    return parser.add_subparsers(metavar=metavar)


def _add_verbs_of_a_study_file(verbs: Any) -> None:
    """Add those that take a study file."""
    for verb in (plan, run, trial):
        command = _verb(verbs, verb, "study", "STUDY.yaml", "the study file")
        command.add_argument(
            "--set", action="append", default=[], metavar="a.b=c", help="change one key of it; repeatable"
        )
        command.add_argument(
            "--dir",
            type=_place,
            metavar="RUN_DIR",
            help="where it writes, a folder; default runs/<name>-trial"
            if verb is trial
            else "the run directory, a folder or s3://bucket/name; default runs/<name>",
        )
        if verb is run:
            _add_options_of_run(command)
        if verb is plan:
            command.add_argument(
                "--no-memory",
                action="store_true",
                help="only read the study file, with no prediction and no first pass; what its `from` names is run all the same",
            )


def _add_options_of_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--address", metavar="ADDRESS", help="a Ray cluster to use ('auto': the one this node is in)")
    command.add_argument(
        "--min-nodes",
        type=_count,
        default=1,
        metavar="N",
        help="wait until the cluster has this many nodes, the head among them; nodes that join later are used only with an autoscaler",
    )
    command.add_argument(
        "--fresh",
        action="store_true",
        help="ignore frontier measurements of earlier studies on this machine; those that this study has already taken over stay",
    )
    _add_what_becomes_of_earlier_trials(command)
    command.add_argument(
        "--seconds-to-save",
        type=_count,
        default=SECONDS_TO_SAVE,
        metavar="N",
        help=f"how long running trials have to save where the study is stopped; default {SECONDS_TO_SAVE}",
    )


def _add_what_becomes_of_earlier_trials(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--retry-failed", action="store_true", help="try what failed again, even if code and data have not changed"
    )
    command.add_argument(
        "--keep-finished", action="store_true", help="keep what was measured, even if code or data have changed since"
    )


def _add_launch(verbs: Any) -> None:
    """Add `launch`, with a verb of its own for each scheduler."""
    text = "Run a study as a job of a cluster's scheduler."
    schedulers = _verbs_of(verbs.add_parser("launch", help=text, description=text), "SCHEDULER")
    options_of = {slurm: _add_options_of_slurm, ray: _add_options_of_ray, kuberay: _add_options_of_kuberay}
    for scheduler, add_options in options_of.items():
        command = _verb(schedulers, scheduler, "study", "STUDY.yaml", "the study file")
        command.add_argument(
            "--set", action="append", default=[], metavar="a.b=c", help="change one key of it; repeatable"
        )
        _add_what_becomes_of_earlier_trials(command)
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
        "--min-nodes", type=_count, default=1, metavar="N", help="wait until the cluster has this many nodes"
    )
    command.add_argument("--tmux", action="store_true", help="return at once; the study goes on without this machine")
    command.add_argument("--yes", action="store_true", help="start the cluster without asking")


def _add_options_of_kuberay(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dir", type=_place, metavar="RUN_DIR", help="beside which to write the manifest")
    command.add_argument("--image", required=True, metavar="IMAGE", help="of the clone, made by configs/Dockerfile")
    command.add_argument("--claim", required=True, metavar="NAME", help="the PersistentVolumeClaim for run directories")
    command.add_argument("--nodes", type=_count, default=1, metavar="N", help="pods that run lanes, beside the head's")
    command.add_argument("--gpus-per-node", type=_count, metavar="N", help="GPUs of each")
    command.add_argument(
        "--cpus-per-node",
        type=_count,
        metavar="N",
        help="CPUs of each; default placement.cpus_per_rank, or 4, for each GPU",
    )
    command.add_argument("--memory-per-node", default="16Gi", metavar="SIZE", help="memory of each")
    command.add_argument(
        "--head-memory", default="16Gi", metavar="SIZE", help="memory of the head's, where the model is built once, too"
    )


def _add_options_of_slurm(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dir", type=_place, metavar="RUN_DIR", help="the run directory, on storage that all nodes see"
    )
    command.add_argument("--nodes", type=_count, default=1, metavar="N", help="nodes of the job")
    command.add_argument("--gpus-per-node", type=_count, metavar="N", help="GPUs of each node")
    command.add_argument(
        "--cpus-per-node",
        type=_count,
        metavar="N",
        help="CPUs of each node; default placement.cpus_per_rank, or 4, for each GPU",
    )
    command.add_argument(
        "--time", metavar="TIME", help="in SLURM's format, such as 8:00:00; after it the study goes on in another job"
    )
    command.add_argument("--partition", metavar="NAME", help="the partition")
    command.add_argument("--account", metavar="NAME", help="the account")
    command.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, such as --sbatch=--qos=high",
    )
    command.add_argument("--dry-run", action="store_true", help="write the script, and do not submit it")


def _add_verbs_of_a_run_directory(verbs: Any) -> None:
    """Add those that read what a study has written."""
    command = _verb(verbs, status, "run_dir", "RUN_DIR", RUN_DIR, _place)
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="for programs")
    shown.add_argument("--watch", action="store_true", help="show it again at every change, until the study is over")
    command = _verb(verbs, report, "run_dir", "RUN_DIR", RUN_DIR, _place)
    command.add_argument(
        "other",
        nargs="?",
        type=_place,
        metavar="OTHER",
        help="another study's: compare the two, in OTHER/comparison.html",
    )
    command = _verb(verbs, explain, "run_dir", "RUN_DIR", RUN_DIR, _place)
    command.add_argument("trial", metavar="TRIAL", help="the trial's name, as status shows it")
    command.add_argument("--json", action="store_true", help="for programs")
    command = _verb(verbs, compare, "run_dir", "RUN_A", RUN_DIR, _place)
    command.add_argument("other", type=_place, metavar="RUN_B", help="another study's")
    command.add_argument("--json", action="store_true", help="for programs")
    command = _verb(verbs, export, "run_dir", "RUN_DIR", RUN_DIR, _place)
    command.add_argument("--to", choices=EXPORTS, help="default: the library that the study's model comes from")


def _add_helpers(verbs: Any) -> None:
    """Add the verbs that help whoever types."""
    command = verbs.add_parser("init", help=init.__doc__, description=init.__doc__)
    command.add_argument(
        "what",
        nargs="?",
        default=".",
        metavar="SCRIPT.py | FOLDER | package.module:callable",
        help="what to look at, a script with its arguments after its name; default: this folder",
    )
    command.add_argument("-m", dest="is_module", action="store_true", help="the script is a module, as for python -m")
    command.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
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
    command.add_argument("of", choices=SCHEMA_NAMES, help="what it describes")
    command.set_defaults(verb=schema)


def _count(text: str) -> int:
    """Return a whole number of at least 1. argparse tells the user what it was to be."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def _place(text: str) -> RunPlace:
    """Return the run directory that was typed. argparse tells the user what is wrong with it."""
    try:
        return run_place_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class _PrintVersion(argparse.Action):
    """Prints the version. Unlike argparse's own action it reads the package's metadata only when it is asked to."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('batchscout')}")
        parser.exit()


def _verb(
    verbs: Any, verb: Any, argument: str, metavar: str, text: str, read: Callable[[str], object] = Path
) -> argparse.ArgumentParser:
    """Add a verb, which is a function whose docstring is its help."""
    command = verbs.add_parser(verb.__name__, help=verb.__doc__, description=verb.__doc__)
    command.add_argument(argument, type=read, metavar=metavar, help=text)
    command.set_defaults(verb=verb)
    return command
