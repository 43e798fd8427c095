"""Makes driver and workers import the same code. Does not import Ray."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path

from batchscout.orchestrator.config.placeholders import leaves
from batchscout.trainers.files import quoted

# Ray itself refuses 500 MiB, but only after it has zipped them.
LARGEST_UPLOAD_BYTES = 200 * 2**20
# `.*` would match the directory itself, `.`, and Ray would ship nothing. Into its own session Ray puts what it ships: it
# would ship that, too, until the disk is full.
RAY_SESSION = "session_20[0-9][0-9]-[0-9][0-9]-[0-9][0-9]_*"
LEFT_OUT = (".?*", "__pycache__", "venv", "/runs", "/wandb", RAY_SESSION)

LIBRARIES = frozenset(
    {
        *("attr", "attrs", "certifi", "click", "cloudpickle", "filelock", "fsspec", "google", "idna", "jinja2"),
        *("jsonschema", "msgpack", "mpmath", "networkx", "numpy", "packaging", "pandas", "psutil", "pyarrow"),
        *("pydantic", "pydantic_core", "ray", "requests", "rich", "sympy", "torch", "torchgen", "tqdm"),
        *("typing_extensions", "urllib3", "yaml"),
    }
)
"""What importing Ray and torch, or compiling, imports in turn."""
NOBODY_IMPORTS = frozenset(
    {
        *("antigravity", "cgi", "chunk", "crypt", "curses", "filecmp", "getopt", "graphlib", "idlelib", "mailbox"),
        *("pipes", "sched", "test", "this", "tkinter", "trace", "turtle", "turtledemo", "wave"),
    }
)
"""Of Python's own modules: a user may have a package of tests by that name."""


def runtime_env(address: str | None, run_dir: Path, data_paths: Iterable[Path] = ()) -> dict[str, str | list[str]]:
    """Return the runtime_env for ray.init: it ships the current directory, without runs, data and hidden files, to a cluster that is not this
    process's own.

    A local cluster (no address) needs none of it: Ray puts the driver's current directory first on the path of every
    worker, on the same disk, so an upload would only cost time. Raises ValueError where workers would import other
    code, and where the directory is too large or has a file that cannot be read.
    """
    refuse_hidden_packages()
    if not address:
        return {}
    here = Path.cwd()
    left_out = _inside(here, [run_dir, *data_paths])
    skipped, patterns = frozenset(left_out), (*((here, line) for line in LEFT_OUT), *_ignore_lines(here))
    shipped = {child.name: list(shipped_files(child, skipped, patterns)) for child in here.iterdir()}
    refuse_unreadable_files(here, itertools.chain(*shipped.values()))
    refuse_large_directory(here, shipped)
    # Ray would read a socket or a pipe, too: that fails, or waits for ever.
    left_out += [path for path in itertools.chain(*shipped.values()) if not path.is_file()]
    return {"working_dir": str(here), "excludes": [*LEFT_OUT, *(_as_pattern(here, path) for path in left_out)]}


def import_from_here() -> None:
    """Make the current directory importable on the driver, first on the path as on Ray's workers."""
    refuse_hidden_packages()
    here = str(Path.cwd())
    if here not in sys.path[:1]:
        sys.path.insert(0, here)


def refuse_hidden_packages() -> None:
    """Raise ValueError where the current directory has another `batchscout` than this program's, or a module by the name of one that this
    program, torch or Ray import."""
    here, ours = Path.cwd(), Path(__file__).parents[2]
    for other in (here / ours.name, here / f"{ours.name}.py"):
        if other.exists() and not other.samefile(ours) and _sources(other) not in ({}, _sources(ours)):
            raise ValueError(
                f"{quoted(other)} would hide this program's own '{ours.name}' ({quoted(ours)}) on Ray's workers; run from another "
                f"directory, rename it, or, where it is the clone you mean to run, `pip install -e {quoted(here)}`"
            )
    elsewhere = [folder for folder in sys.path if Path(folder).absolute() != here]
    for name in sorted((sys.stdlib_module_names | LIBRARIES) - NOBODY_IMPORTS):
        own, hidden = PathFinder.find_spec(name, [str(here)]), PathFinder.find_spec(name, elsewhere)
        if own is None or hidden is None or None in (own.origin, hidden.origin) or own.origin == hidden.origin:
            continue
        whose = "Python's own" if name in sys.stdlib_module_names else "the library"
        raise ValueError(
            f"{quoted(str(own.origin))} would hide {whose} '{name}' from torch and Ray, which import it; rename it, or run from another directory"
        )


def refuse_unreadable_files(here: Path, shipped: Iterable[Path]) -> None:
    """Raise ValueError, with the first of them, where files would be shipped that this user may not read."""
    unreadable = [path for path in shipped if path.exists() and not os.access(path, os.R_OK, effective_ids=True)]
    if unreadable:
        others = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
        raise ValueError(
            f"{quoted(here)} is shipped to the cluster so that workers can import from it, but {quoted(unreadable[0])}{others} cannot "
            f"be read; make it readable, list it in {quoted(here / '.rayignore')} if it is a file (one pattern a line, as in "
            ".gitignore), or run from another directory"
        )


def refuse_large_directory(here: Path, shipped: Mapping[str, Sequence[Path]]) -> None:
    """Raise ValueError, with the largest contents, where more would be shipped than LARGEST_UPLOAD_BYTES. shipped: the
    files, by the name of what lies in `here`."""
    sizes = {name: sum(path.stat().st_size for path in paths if path.is_file()) for name, paths in shipped.items()}
    total = sum(sizes.values())
    if total <= LARGEST_UPLOAD_BYTES:
        return
    largest = ", ".join(
        f"{quoted(name)} ({_mib(sizes[name])})" for name in sorted(sizes, key=lambda name: -sizes[name])[:3]
    )
    raise ValueError(
        f"{quoted(here)} is shipped to the cluster so that workers can import from it, but holds {_mib(total)}, more than "
        f"{_mib(LARGEST_UPLOAD_BYTES)}; its largest contents: {largest}. List what workers need not import in "
        f"{quoted(here / '.rayignore')} (one pattern a line, as in .gitignore), or run from a smaller directory"
    )


def shipped_files(path: Path, left_out: frozenset[Path], patterns: tuple[tuple[Path, str], ...]) -> Iterator[Path]:
    """Yield what Ray would ship of a path but for directories, following links as Ray does; and directories that cannot be
    entered, as Ray looks for a .gitignore in those, too, that are left out.

    patterns: lines of ignore files, each with the directory below which it holds.
    """
    is_closed = path.is_dir() and not os.access(path, os.R_OK | os.X_OK, effective_ids=True)
    if not is_closed and (path in left_out or any(_ignores(base, line, path) for base, line in patterns)):
        return
    if is_closed or not path.is_dir():
        yield path
        return
    inner = (*patterns, *_ignore_lines(path))
    for child in path.iterdir():
        yield from shipped_files(child, left_out, inner)


def absolute_paths(value: object) -> Iterator[Path]:
    """Yield the existing absolute paths among the texts of (nested) keyword arguments, such as a study's
    data.kwargs."""
    texts = [text for _, text in leaves(value) if isinstance(text, str)]
    return (Path(text) for text in texts if text.startswith("/") and Path(text).exists())


def _sources(package: Path) -> dict[Path, bytes]:
    """Return the contents of a package's Python files; a folder without any cannot be imported in place of ours."""
    below = [Path(folder) / name for folder, _, names in os.walk(package, followlinks=True) for name in names]
    files = [package] if package.is_file() else [file for file in below if file.suffix == ".py"]
    return {file.relative_to(package): file.read_bytes() for file in files}


def _inside(here: Path, paths: Iterable[Path]) -> list[Path]:
    """Return the paths that lie below `here`, by name or by where their links lead."""
    spelled = {Path(os.path.abspath(path)) for path in paths}
    spelled |= {path.resolve() for path in spelled}
    return sorted(path for path in spelled if here in path.parents)


def _as_pattern(here: Path, path: Path) -> str:
    """Return a .gitignore pattern that matches this path alone."""
    return "/" + "".join("\\" + letter if letter in "\\*?[] " else letter for letter in str(path.relative_to(here)))


def _ignore_lines(directory: Path) -> list[tuple[Path, str]]:
    """Return the patterns of the directory's .gitignore and .rayignore, both of which Ray obeys, each with the
    directory."""
    files = [directory / name for name in (".gitignore", ".rayignore")]
    lines = [line.strip() for file in files if file.is_file() for line in file.read_text().splitlines()]
    return [(directory, line) for line in lines if line and line[0] not in "#!"]


def _ignores(base: Path, line: str, path: Path) -> bool:
    """True if the pattern matches the path: near enough to git's rules for a size check (no `!`, and `*` may cross
    `/`).

    What is shipped is decided by Ray's own matching.
    """
    pattern, name = line.rstrip("/"), str(path.relative_to(base))
    if "/" in pattern and not pattern.startswith("**/"):
        return fnmatchcase(name, pattern.removeprefix("/"))
    return fnmatchcase("/" + name, "*/" + pattern.removeprefix("**/"))


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
