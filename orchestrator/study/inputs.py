"""What a study is made of beside its file: the user's code and data, told by digests. What failed is tried again once one of them
has changed."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.config.keys import StudyConfig
from trainers.criteria import import_path
from trainers.files import own_file


def inputs_of(config: StudyConfig) -> dict[str, str]:
    """Return a digest of each file that the user's code and data are in, by the file's or the key's name.

    Of code it tells the contents, of data the size and the time of the last change. Files that the study file does not name are not
    among them, such as those in a folder, or one that a default argument names.
    """
    code = {
        str(file.relative_to(root)): _digest(file)
        for package in packages_of(import_paths(config))
        for root, file in _files_of(package)
        if _is_the_users(file)
    }
    named = {"data.kwargs": config.data.kwargs, "model.kwargs": config.model.kwargs}
    data = {key: _stamp(path) for key, path in _files_among(named | {"initial_weights": config.initial_weights})}
    return code | data


def import_paths(config: StudyConfig) -> list[str | None]:
    """Return what the study file names in code: import paths, and built-in names among them."""
    optimizer = config.optimizer
    targets = [config.model.target, import_path(config.loss), config.data.target]
    return [*targets, optimizer.target, optimizer.param_groups]


def packages_of(targets: Sequence[str | None]) -> list[str]:
    """Return the packages, or modules outside any package, that these import paths begin with."""
    return sorted({target.partition(":")[0].partition(".")[0] for target in targets if target and ":" in target})


def sources_of(package: str) -> list[Path]:
    """Return every module of a package; for a module outside any package, every module beside it."""
    return sorted(file for _, file in _files_of(package))


LONGEST_NAME = 255
"""A text may be no path at all, and the system refuses to look for one with a longer name."""


def _files_of(package: str) -> Iterator[tuple[Path, Path]]:
    """Yield the modules, each with the directory that its name for people begins at."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    files = [(folder.parent, file) for folder in folders for file in folder.rglob("*.py")]
    beside = Path(found.origin).parent
    files += [] if folders else [(beside, file) for file in beside.glob("*.py")]
    yield from ((root, file) for root, file in files if file.is_file())


def _is_the_users(file: Path) -> bool:
    """True unless it is this program's, or of a library that is installed."""
    return "site-packages" not in file.parts and Path(__file__).parents[2] / "trainers" not in file.parents


def _files_among(value: object, key: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the files among the texts of nested keyword arguments, each by its key."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _files_among(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _files_among(item, f"{key}.{number}")
    elif isinstance(value, str) and _may_be_a_path(value) and Path(value).is_file():
        yield key, Path(value)


def _may_be_a_path(text: str) -> bool:
    return "\0" not in text and len(text) < 4096 and all(len(name) <= LONGEST_NAME for name in text.split("/"))


def _digest(file: Path) -> str:
    with own_file(file, "read"):
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _stamp(path: Path) -> str:
    with own_file(path, "read"):
        stat = path.stat()
    return f"{stat.st_size} bytes, {stat.st_mtime_ns} ns"
