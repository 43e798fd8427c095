"""`batchscout.find`: a study of objects that this process has, from a script or a notebook."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchscout.orchestrator.config.load import study_of
from batchscout.orchestrator.execution.code_shipping import import_from_here
from batchscout.orchestrator.init.command import Command, command_in
from batchscout.orchestrator.output.loaded import LoadedStudy, load
from batchscout.orchestrator.run import RunOptions, run_study
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.orchestrator.study.storage.place import on_this_machine, run_place_of
from batchscout.orchestrator.terminal import printable
from batchscout.trainers.files import make_private_directory, quoted
from batchscout.trainers.sources import objects
from batchscout.trainers.user_code import OBJECTS


@dataclass(frozen=True)
class Subject:
    """What a study is to be of: a model with its data, a callable that makes an object that trains elsewhere, or a script."""

    model: Any = None
    train: Any = None
    val: Any = None
    loss: Any = None
    lightning: Callable[[], Any] | None = None
    transformers: Callable[[], Any] | None = None
    script: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where it is not one of them, and whole."""
        given = [name for name, value in vars(self).items() if value is not None]
        makers = [name for name in ("lightning", "transformers", "script") if name in given]
        if makers and len(given) > 1:
            raise ValueError(
                f"find has {' and '.join(given)}; {makers[0]} stands for model, data and loss: give it alone"
            )
        missing = [name for name in ("model", "train", "val") if name not in given]
        if not makers and missing:
            raise ValueError(
                f"find lacks {', '.join(missing)}; give model, train and val, or lightning=make, transformers=make_trainer, or "
                'script="train.py"'
            )
        if self.command is not None and self.command.num_processes > 1:
            raise ValueError(
                f"find has script={self.script!r}, which starts {self.command.num_processes} processes, and would take the batch of one for "
                f"that of all; type batchscout init {self.script}, which writes a study file with both, and run that"
            )
        if self.script is not None and self.command is None:
            raise ValueError(
                f"find has script={self.script!r}, which names no script; give its command line, such as 'train.py --lr 1e-3'"
            )

    @property
    def command(self) -> Command | None:
        return command_in(shlex.split(self.script)) if self.script is not None else None

    def handed(self) -> dict[str, Any]:
        """Return the objects that every rank must have; none of a script, which each of them runs."""
        if self.script is not None:
            return {}
        if (make := self.lightning or self.transformers) is not None:
            return {"make": make}
        own_loss = {"loss": self.loss} if callable(self.loss) else {}
        return {"model": self.model, "train": self.train, "val": self.val, **own_loss}

    def keys(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a study file that name the objects. kwargs: how they are found."""
        if (command := self.command) is not None:
            return {"from": {"script": command.script, "args": command.args}}
        for library in ("lightning", "transformers"):
            if getattr(self, library) is not None:
                return {"from": {library: f"{OBJECTS}:make", "kwargs": kwargs}}
        named = {} if callable(self.loss) or self.loss is None else {"loss": self.loss}
        return {
            "model": {"target": f"{OBJECTS}:model", "kwargs": kwargs},
            "data": {"target": f"{OBJECTS}:data", "kwargs": kwargs},
            **named,
        }


def find(
    subject: Subject,
    *,
    run_dir: str | Path | None = None,
    stages: Sequence[str | Mapping[str, Any]] | None = None,
    address: str | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    keep_finished: bool = False,
    quiet: bool = False,
    **keys: Any,
) -> LoadedStudy:
    """See `batchscout.find`."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "batchscout.find is called in a thread, and Python lets the main thread alone hear Ctrl-C; call it there, or run it in a process of its own"
        )
    name = keys.pop("name", None) or _name_of_script()
    where = on_this_machine(run_place_of(str(run_dir or Path("runs") / name)), "batchscout.find").absolute()
    handed = subject.handed()
    kwargs = objects.kept_as(handed, where)
    _refuse_other_objects(where, name, kwargs["digests"])
    tree = {"name": name, **subject.keys(kwargs), **keys}
    if stages is not None:
        named = [stages] if isinstance(stages, str) else stages
        tree["stages"] = [stage if isinstance(stage, str) else dict(stage) for stage in named]
    import_from_here()
    with _leaving_nothing_of_what_is_refused(where, file := Path(kwargs["file"]), name):
        make_private_directory(where)
        if handed and not file.exists():
            objects.keep(handed, file)
        told = list[str]()
        config = study_of(tree, "what find was given", told.append)
        for sentence in told:
            print(f"batchscout: {sentence}", file=sys.stderr)
        try:
            options = RunOptions(
                address,
                remeasure=fresh,
                retry_failed=retry_failed,
                keep_finished=keep_finished,
                quiet=quiet,
                told=(*told,),
            )
            ending = run_study(config, where, options)
        except ValueError as error:
            raise ValueError(in_python(str(error))) from error
        said = in_python(ending.message)
        if ending.exit_code == 2:
            raise ValueError(said)
    if ending.exit_code == 130:
        raise KeyboardInterrupt(said)
    if ending.exit_code == 1:
        print(f"batchscout: {printable(said)}", file=sys.stderr)
    return load(where)


IN_PYTHON = {
    "run the same command again": "call batchscout.find again", "run the same command": "call batchscout.find again",
    "--dir": "run_dir", "--fresh": "fresh=True", "--retry-failed": "retry_failed=True",
    "--keep-finished": "keep_finished=True", "--address": "address",
}  # fmt: skip
"""What is typed in a call for what is typed in a command line."""


def in_python(said: str) -> str:
    """Return what a command line's user is told in the words of a call."""
    for typed, called in IN_PYTHON.items():
        said = said.replace(typed, called)
    return said


OTHER = {
    "model": "another model", "weights": "other weights", "train": "other training data", "val": "other validation data",
    "loss": "another loss", "make": "another callable",
}  # fmt: skip
NEW_WEIGHTS = (
    "; a module that is made anew begins with other random weights: hand over what makes it (model=lambda: Net()), or call "
    "torch.manual_seed before"
)


def _refuse_other_objects(where: Path, name: str, digests: Mapping[str, str]) -> None:
    """Raise ValueError where the study that has begun there is one of other objects; write nothing."""
    if not (where / "study.yaml").exists() or not replay(where / "journal.jsonl", name).trials:
        return
    before = load_stored_study(where / "study.yaml").model.kwargs.get("digests")
    if not isinstance(before, dict) or not (other := [one for one in digests if before.get(one) != digests[one]]):
        return
    raise ValueError(
        f"{quoted(where)} holds a study that began with {' and '.join(OTHER[one] for one in other)}; choose another run_dir, or take the change "
        f"back to go on with that study{NEW_WEIGHTS if 'weights' in other else ''}"
    )


@contextlib.contextmanager
def _leaving_nothing_of_what_is_refused(where: Path, file: Path, name: str) -> Iterator[None]:
    """Remove what a call that is refused has written, where no trial has come of it: the directory, if it made it, or else the file of the
    objects, if no study names it. In a directory that was there, all else may be another driver's."""
    had_directory, had_file, journal = where.exists(), file.exists(), where / "journal.jsonl"
    try:
        yield
    except ValueError:
        if not had_directory and where.exists() and not (journal.exists() and replay(journal, name).trials):
            shutil.rmtree(where)
        elif not had_file and not ((where / "study.yaml").exists() and file.name in (where / "study.yaml").read_text()):
            file.unlink(missing_ok=True)
        raise


def _name_of_script() -> str:
    """Return the name of the script that runs, as a study may have it; `notebook` where there is none."""
    name = re.sub(r"[^\w.-]+", "-", Path(sys.argv[0]).stem).strip(".-")
    return "notebook" if name in ("", "ipykernel_launcher", "__main__") else name
