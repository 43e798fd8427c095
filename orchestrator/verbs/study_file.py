"""The study file that was typed, and the directory that its study runs in."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from batchscout.orchestrator.study.storage.place import RunPlace, on_this_machine
from batchscout.orchestrator.terminal import printable

if TYPE_CHECKING:
    from batchscout.orchestrator.config.keys import StudyConfig


def config_of(arguments: argparse.Namespace, hear: Callable[[str], object] = lambda _: None) -> StudyConfig:
    """Return the study that was typed. hear: is called with what is printed about the object under `from`."""
    from batchscout.orchestrator.config.load import load_study
    from batchscout.orchestrator.study.run_directory import keys_given

    def say(told: str) -> None:
        hear(told)
        print(f"batchscout: {printable(told)}", file=sys.stderr)

    return load_study(arguments.study, arguments.set, say, lambda file: keys_given(file, say))


def place_of_study(arguments: argparse.Namespace, config: StudyConfig) -> RunPlace:
    """Return where the study lives: as typed, or runs/<name> here."""
    typed = arguments.dir or Path("runs") / config.name
    return typed.absolute() if isinstance(typed, Path) else typed


def run_dir_of(arguments: argparse.Namespace, config: StudyConfig, what: str) -> Path:
    """Return the folder that the study lives in. Raises ValueError where it is to live in an object store, which `what` cannot use."""
    return on_this_machine(place_of_study(arguments, config), what)


@contextlib.contextmanager
def copy_to_read(place: RunPlace) -> Iterator[Path]:
    """Yield the run directory; of one in an object store a temporary copy, without checkpoints."""
    if isinstance(place, Path):
        yield place
        return
    from batchscout.orchestrator.study.storage.stored_study import read_copy

    with tempfile.TemporaryDirectory(prefix="batchscout-") as folder:
        read_copy(place, Path(folder))
        try:
            yield Path(folder)
        except ValueError as error:
            raise ValueError(str(error).replace(folder, str(place))) from error
