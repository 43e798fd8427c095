"""Reads a folder, or what an import path names, and writes a study file for it."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from batchscout.orchestrator.init.command import Command
from batchscout.orchestrator.init.kinds import Project
from batchscout.orchestrator.init.reading import Class, Function, Module, read_module
from batchscout.orchestrator.init.study_file import Machine, written
from batchscout.orchestrator.init.subject import FromSubject, OwnSubject, Subject, WatchedSubject, script_of, subject_of
from batchscout.trainers.before.source import Source, read_source
from batchscout.trainers.errors import LossNotSeen, NoStudy, NotInTime, SourceFault
from batchscout.trainers.files import own_file, quoted, written_whole

MOST_FILES = 2000
"""Those furthest up count; a folder of more is no project."""
MOST_BYTES = 2**20
"""A longer file is data."""
_NOT_LOOKED_INTO = {
    "venv", "env", "node_modules", "site-packages", "build", "dist", "tests", "test", "__pycache__", "runs", "wandb",
}  # fmt: skip
_NAME = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True)
class Read:
    """A project, and what could not be read of it."""

    project: Project
    unread: tuple[str, ...]


@dataclass(frozen=True)
class Started:
    """What `init` has done."""

    path: Path
    folder: Path
    """Where the file is to be used: all that it names is looked for from there."""
    subject: Subject
    to_do: tuple[str, ...]
    told: tuple[str, ...]
    """What else people should know."""


def watch(command: Command, to: str | None, say: Callable[[str], None]) -> Started:
    """Run a script until its second optimizer step, and write a study file of what it trains. to: the file; study.yaml here if it is
    None. Raises ValueError where the file is there already, or the script cannot be studied; then nothing is written."""
    path = Path(to or "study.yaml")
    _refuse_to_overwrite(path)
    say(f"running {command.script} until its second optimizer step")
    began = time.monotonic()
    source, unseen = Source("script", command.script, {"args": list(command.args)}, is_timed=True), ""
    name = _study_name(Path(command.script).name.removesuffix(".py").rpartition(".")[2])
    try:
        said = read_source(source)
    except LossNotSeen as fault:
        unseen = str(fault)
        said = read_source(replace(source, kwargs={**source.kwargs, "own_loss": True}))
    except NotInTime as fault:
        folder = Path(command.script).parent
        read = read_folder(folder)
        told = (*read.unread, f"{fault}. So the files were read instead")
        return _write(path, folder, subject_of(read.project), name, told)
    subject = WatchedSubject(command, said, time.monotonic() - began, unseen)
    return _write(path, Path(), subject, name, (*said.told, *_uncounted(command)))


def _uncounted(command: Command) -> Iterator[str]:
    """Yield that a launcher's words give its number of processes by no number."""
    if command.uncounted:
        yield (
            f"{command.uncounted} gives no number of processes, and {command.num_processes} was taken: where there are more, set world_size to "
            "their number, and optimizer: {reference_batch_size: ...} to the samples that all of them take in a step"
        )


def start(what: str, to: str | None, say: Callable[[str], None] = lambda _: None) -> Started:
    """Write a study file. what: a folder, or `package.module:callable` below this one. to: the file; study.yaml in the folder if it is
    None. A folder's script is watched, if it has one that makes an optimizer and no function makes all that it trains; else nothing is run.
    Raises ValueError where the file is there already, or `what` is not."""
    module_name, colon, name = what.partition(":")
    folder = Path() if colon else Path(what)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {quoted(folder)}; name one, or a callable as package.module:callable")
    path = Path(to) if to else folder / "study.yaml"
    _refuse_to_overwrite(path)
    read = read_folder(folder)
    subject = subject_of(read.project, _named(read.project, module_name, name) if colon else None)
    told = (*read.unread, *_runs_when_imported(read.project, subject))
    if not colon and not (isinstance(subject, FromSubject) and subject.is_there):
        watched = _watch_in(folder, read.project, path, say)
        if isinstance(watched, Started):
            return watched
        told = (*told, *watched)
    return _write(path, folder, subject, _study_name(folder.absolute().name), told)


def _watch_in(folder: Path, project: Project, path: Path, say: Callable[[str], None]) -> Started | tuple[str, ...]:
    """Watch a folder's script, if there is one; else return what is to be told of it. Raises NoStudy where it is none."""
    found = script_of(project)
    if found is None:
        return ()
    module, call = found
    script = str(module.path.relative_to(folder))
    say(
        f"{script} makes the optimizer ({call.name}, line {call.line}); another script is named with its arguments: batchscout init SCRIPT.py ..."
    )
    to = path.absolute()
    with contextlib.chdir(folder):
        try:
            done = watch(Command(script), str(to), say)
            return replace(done, folder=folder / done.folder)
        except NoStudy:
            raise
        except SourceFault as fault:
            return (f"{fault}. So the files were read instead: run batchscout init {script} with its arguments",)


def _refuse_to_overwrite(path: Path) -> None:
    with own_file(path, "read"):
        is_there = path.exists()
    if is_there:
        raise ValueError(
            f"{quoted(path)} is there already, and init does not overwrite it; name another, as batchscout init --to other.yaml ..., or remove it"
        )


def _write(path: Path, folder: Path, subject: Subject, name: str, told: tuple[str, ...]) -> Started:
    file = written(subject, name, path_from(folder, path), _machine(), told)
    with written_whole(path) as stream:
        stream.write(file.text.encode())
    return Started(path, folder, subject, file.to_do, told)


def path_from(folder: Path, path: Path) -> str:
    """Return what is typed in a folder for a file that may lie elsewhere."""
    return os.path.relpath(path.resolve(), folder.resolve())


def read_folder(folder: Path) -> Read:
    """Return what the Python files of a folder define."""
    modules, unread = list[Module](), list[str]()
    for path in _python_files(folder)[:MOST_FILES]:
        parts = path.relative_to(folder).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        if not all(part.isidentifier() for part in names):
            continue  # no import leads there
        try:
            with own_file(path, "read"):
                modules.append(read_module(path, ".".join(names)))
        except ValueError as error:
            unread.append(f"{path.relative_to(folder)} could not be parsed as Python ({error}), and was left out")
    return Read(Project(tuple(modules)), tuple(unread))


def _python_files(folder: Path) -> list[Path]:
    """Return them, those furthest up first."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if not _is_left_out(Path(place, one)))
        found += [
            path for one in files if one.endswith(".py") and (path := Path(place, one)).stat().st_size <= MOST_BYTES
        ]
    return sorted(found, key=lambda path: (len(path.parts), path))


def _is_left_out(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in _NOT_LOOKED_INTO or (folder / "pyvenv.cfg").exists()


def _named(project: Project, module_name: str, name: str) -> tuple[Module, Class | Function]:
    """Return what an import path names. Raises ValueError, with the nearest names, where it names nothing."""
    module = next((one for one in project.modules if one.name == module_name), None)
    if module is None:
        near = _nearest(module_name, [one.name for one in project.modules])
        raise ValueError(
            f"there is no file for the module '{module_name}' in {quoted(Path.cwd())}; {near}run init in the folder that holds it"
        )
    defined = [*module.classes, *module.functions]
    found = next((one for one in defined if one.name == name), None)
    if found is None:
        near = _nearest(name, [one.name for one in defined])
        raise ValueError(f"{quoted(module.path)} defines no class or function '{name}'; {near}check the name")
    return module, found


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}? Or " if near else ""


def _runs_when_imported(project: Project, subject: Subject) -> Iterator[str]:
    """Warn of files that are imported for the study and would do something then."""
    for module in project.modules:
        if module.runs_at is not None and module.name in set(_modules_of(subject)):
            yield (
                f"{module.path.name}, line {module.runs_at} runs whenever the file is imported, as every run of a study does: put it, and what it needs, "
                'below if __name__ == "__main__":'
            )


def _modules_of(subject: Subject) -> Iterator[str]:
    if isinstance(subject, WatchedSubject):
        return
    places = (subject.maker,) if isinstance(subject, FromSubject) else (subject.model, subject.data)
    yield from (one.target.split(":")[0] for one in places if one is not None)


def _study_name(folder: str) -> str:
    return _NAME.sub("-", folder).strip("-").lower()[:60] or "study"


def _machine() -> Machine:
    has_gpu = Path("/dev/nvidiactl").exists()
    compilers = [os.environ.get("CC", "gcc"), "clang"] if has_gpu else [os.environ.get("CXX", "g++")]
    return Machine(has_gpu, any(map(shutil.which, compilers)))


def found_text(subject: Subject) -> str:
    """Return what was found, in a sentence."""
    match subject:
        case WatchedSubject():
            what = "\n".join(subject.said.taken)
            return f"{subject.command.script} was watched until its second optimizer step ({subject.seconds:.0f} s, once in each process of a study):\n{what}"
        case FromSubject(is_there=True):
            return f"{subject.maker.target} ({subject.maker.where}) makes what the {subject.library} library trains: its model, data and loss are studied as they are."
        case FromSubject():
            return (
                f"{subject.maker.where} has what the {subject.library} library trains, and no function returns it yet."
            )
        case OwnSubject(model=None, data=None):
            return "No model and no data were found: this is an example, whose placeholders are to be filled in."
        case OwnSubject():
            model = (
                f"The model is {subject.model.target} ({subject.model.where})"
                if subject.model
                else "No model was found"
            )
            data = (
                f"the data {subject.data.target} ({subject.data.where})"
                if subject.data
                else "no function was found that returns (train, val)"
            )
            return f"{model}, and {data}."
