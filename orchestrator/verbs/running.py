"""Verbs that run what a study file describes, or say what would run."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from batchscout.orchestrator.environment import fit_environment, importing_ray
from batchscout.orchestrator.signals import interrupts_afterwards, leave_dead_terminal
from batchscout.orchestrator.study.storage.place import beside, is_there, on_this_machine
from batchscout.orchestrator.terminal import printable, printed_to_a_file, wrapped
from batchscout.orchestrator.units import seconds_text
from batchscout.orchestrator.verbs.study_file import config_of, copy_to_read, place_of_study
from batchscout.trainers.files import quoted

if TYPE_CHECKING:
    from rich.text import Text

    from batchscout.orchestrator.output.panel import Panel


@fit_environment()
def plan(arguments: argparse.Namespace) -> int:
    """Show stages, first trials, what is skipped and why, and the predicted memory; train nothing."""
    from batchscout.orchestrator import preflight
    from batchscout.orchestrator.config.trial import uses_compile
    from batchscout.orchestrator.execution.code_shipping import import_from_here
    from batchscout.orchestrator.output.plan import predict, print_plan
    from batchscout.orchestrator.output.tracking import require_libraries
    from batchscout.orchestrator.study.facts import Facts
    from batchscout.orchestrator.study.run_directory import as_it_began, refuse_other_study
    from batchscout.trainers.notices import heard_by

    began = time.monotonic()
    import_from_here()
    with _clock(f"reading {arguments.study}", began):
        config = config_of(arguments)
    with copy_to_read(place_of_study(arguments, config)) as run_dir:
        refuse_other_study(config := as_it_began(config, run_dir), run_dir)
    if arguments.no_memory:
        print_plan(config, Facts())
        return 0
    with _clock("looking at model and data, and predicting memory and time", began):
        say = functools.partial(print, file=sys.stderr)
        with printed_to_a_file(f"plan-{config.name}"), heard_by(lambda notice: say(printable(notice.text))):
            preflight.check_environment(config)
            beyond = preflight.beyond_host(config)
            require_libraries(config.tracking)
            preflight.check_ranks(config)
            facts = preflight.check_new_study(config, is_local=True, compiles=uses_compile(config), say=say)
            predicted = predict(config, facts)
    print_plan(config, facts, predicted, beyond)
    return 0


def _clock(doing: str, began: float, left: str = "", *, redirect: bool = True) -> Panel:
    """Return what a terminal shows within this: what is done, for how long the command has run, and what is left."""
    from batchscout.orchestrator.output.panel import Panel
    from batchscout.orchestrator.output.shown import Terminal, shown

    def text() -> Text:
        return shown(f"{doing}, {seconds_text(time.monotonic() - began)} so far{left}")

    return Panel(Terminal(file=sys.stdout), text, redirect=redirect)


@fit_environment()
def run(arguments: argparse.Namespace) -> int:
    """Run the study, or go on with it; ends with a recommendation."""
    from batchscout.orchestrator.execution.code_shipping import import_from_here, refuse_hidden_packages

    began, told = time.monotonic(), list[str]()
    if arguments.address is None and arguments.min_nodes > 1:
        raise ValueError(
            f"--min-nodes is {arguments.min_nodes}, and without --address a study has this machine alone, which is 1 node; add --address auto, "
            "or leave --min-nodes out"
        )
    refuse_hidden_packages()  # before a script is watched that `from` names
    left = ", the time left is not known yet"
    with _clock(f"reading {arguments.study}", began, left):
        config = config_of(arguments, told.append)
    with (
        _clock("loading torch and Ray", began, left, redirect=False),
        importing_ray(),
        interrupts_afterwards(),
    ):  # the libraries' own code, half imported
        from batchscout.orchestrator.output.shown import Terminal, print_answer
        from batchscout.orchestrator.output.tracking import how_to_look
        from batchscout.orchestrator.run import RunOptions, run_study

    import_from_here()
    place = place_of_study(arguments, config)
    options = RunOptions(
        arguments.address,
        min_nodes=arguments.min_nodes,
        remeasure=arguments.fresh,
        retry_failed=arguments.retry_failed,
        keep_finished=arguments.keep_finished,
        seconds_to_save=arguments.seconds_to_save,
        told=(*told,),
        began=began,
    )
    ending = run_study(config, place, options)
    leave_dead_terminal()  # the exit code is to tell how the study ended, whoever reads what is printed
    stream = sys.stdout if ending.exit_code == 0 else sys.stderr
    typed = quoted(str(arguments.dir or Path("runs") / config.name))
    print(file=stream)
    if ending.answer is not None:
        print_answer(Terminal(), ending.answer, typed)
    if ending.message:
        print(wrapped(printable(ending.message), stream), file=stream)
    if ending.exit_code in (0, 1):
        if is_there(place, "report.html"):
            print(f"\n  report:         {beside(place, 'report.html')}", file=stream)
        if is_there(place, "recommendation.json"):
            print(f"  recommendation: {beside(place, 'recommendation.json')}", file=stream)
            if ending.trainer is not None:
                print(f"  paste it:       batchscout export {typed} --to {ending.trainer}", file=stream)
        if isinstance(place, Path):
            for what, command in how_to_look(config.tracking, place).items():
                print(f"  {what + ':':15} {command}", file=stream)
    return ending.exit_code


@fit_environment()
def trial(arguments: argparse.Namespace) -> int:
    """Run one training run in this process, without Ray: for a debugger."""
    from batchscout.orchestrator.execution.code_shipping import import_from_here

    import_from_here()
    config = config_of(arguments)
    from batchscout.orchestrator.trial import run_trial

    # Not the study's own directory, which `run` wants empty.
    where = on_this_machine(arguments.dir or Path("runs") / f"{config.name}-trial", "batchscout trial")
    return run_trial(config, where.absolute())
