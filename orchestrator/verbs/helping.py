"""Verbs that help whoever writes a study file, or sets a machine up."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchscout.orchestrator.terminal import print_lines
from batchscout.trainers.files import own_file, quoted

if TYPE_CHECKING:
    from batchscout.orchestrator.doctor.facts import Cluster


def init(arguments: argparse.Namespace) -> int:
    """Write a commented study file. A script is run until its second optimizer step, and watched; of a folder it is the script that makes the
    optimizer, and without one the files are only read. Of an import path nothing is run."""
    from batchscout.orchestrator.init.command import command_in
    from batchscout.orchestrator.init.start import found_text, path_from, start, watch

    def say(told: str) -> None:
        print(told, file=sys.stderr, flush=True)

    words = [*(["-m"] if arguments.is_module else []), arguments.what, *arguments.args]
    if (command := command_in(words)) is not None:
        done = watch(command, arguments.to, say)
    elif (to := _named_behind(arguments.args)) is not None:
        done = start(arguments.what, to, say)
    elif arguments.args:
        raise ValueError(
            f"{' '.join(words)} names no script; give a file of Python, or -m and a module, before its arguments"
        )
    else:
        done = start(arguments.what, arguments.to, say)
    said = [
        found_text(done.subject),
        f"wrote {quoted(done.path)}",
        *(f"- {text}" for text in (*done.to_do, *done.told)),
    ]
    go = f"cd {quoted(done.folder)} && " if done.folder.resolve() != Path.cwd() else ""
    file = path_from(done.folder, done.path)
    said.append(f"{'then' if done.to_do else 'next'}:  {go}batchscout plan {quoted(file)}")
    print_lines(said)
    return 0


def _named_behind(words: list[str]) -> str | None:
    """Return the file of a `--to` that was typed behind a folder."""
    match words:
        case ["--to", to]:
            return to
        case [to] if to.startswith("--to="):
            return to.removeprefix("--to=")
    return None


def doctor(arguments: argparse.Namespace) -> int:
    """Say what will work on this machine, what will not, and how to fix it; exits with 1 if there is a fault."""
    from batchscout.orchestrator.doctor.check import worst
    from batchscout.orchestrator.doctor.checks import all_checks
    from batchscout.orchestrator.doctor.observe import observe
    from batchscout.orchestrator.doctor.told import as_json, print_checks

    checks = all_checks(observe(arguments.study, named_cluster()))
    if arguments.json:
        print(json.dumps(as_json(checks), indent=2))
    else:
        print_checks(checks)
    return 1 if worst(checks) == "fault" else 0


def named_cluster() -> Cluster:
    """Ask what RAY_ADDRESS names, as `--address auto` does."""
    from batchscout.orchestrator.doctor.facts import Cluster

    if not (address := os.environ.get("RAY_ADDRESS", "")):
        return Cluster("")
    try:
        from batchscout.orchestrator.execution.session import ClusterRefused, reachable_address
    except ImportError as error:
        return Cluster(address, f"RAY_ADDRESS is {address}, and Ray cannot be imported ({error})", "see ray, above")
    try:
        reachable_address("auto")
    except ClusterRefused as refused:
        return Cluster(address, refused.finding, refused.remedy)
    return Cluster(address)


def schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of a study file, of `status --json` or of recommendation.json."""
    from batchscout.orchestrator.output.schemas import schema_path

    path = schema_path(arguments.of)
    with own_file(path, "read"):
        text = path.read_text()
    sys.stdout.write(text)
    return 0
