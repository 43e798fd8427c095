"""The user's modules that a study runs, told by digests: those that its import paths name, and what these import. A comment changes
nothing, nor does a file that nobody imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchscout.trainers.files import own_file

_PYTHONS = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
OURS = Path(__file__).parents[1]


def code_of(import_paths: Iterable[str | None]) -> dict[str, str]:
    """Return a digest of each module's code, by its file, as it is named from the directory that its import begins at.

    import_paths: package.module:name, path/of/script.py:name, and built-in names among them. Of an installed package the module that is
    named counts, and not what it imports. Imports are read from the text: one that is made of a name at run time is not seen.
    """
    named = {path.rpartition(":")[0] for path in import_paths if path and ":" in path}
    beside = [file.parent for name in sorted(named) if (file := script_file(name)) is not None]
    found, pending, seen = dict[str, str](), sorted(named), set(named)
    while pending:
        module = pending.pop()
        for root, file in _files_of(module, beside):
            if (name := str(file.relative_to(root))) in found or (_is_installed(file) and module not in named):
                continue
            with own_file(file, "read"):
                text = file.read_bytes()
            found[name] = hashlib.sha256(_without_comments(text)).hexdigest()[:16]
            package = list(file.relative_to(root).parent.parts)  # at which relative imports begin
            imported = set() if _is_installed(file) else set(_imported(text, package)) - seen
            seen |= imported
            pending += sorted(imported)
    return dict(sorted(found.items()))


SCRIPT = "batchscout.trainers.sources.watch.script:made"
"""The target of a study of a script, which is its argument `script`."""
OBJECTS = "batchscout.trainers.sources.objects"
"""The module from which a study takes objects that were handed over in Python, and have no import path."""


def import_path_of(target: str, kwargs: Mapping[str, Any]) -> str:
    """Return the import path of the code that a target runs: itself, or the script that it watches, by its path or its module."""
    return target if target != SCRIPT else f"{kwargs['script']}:__main__"


def script_file(module: str) -> Path | None:
    """Return the file of a script that is named by its path, from the working directory on; None of any other module."""
    file = Path(module).resolve()
    return file if module.endswith(".py") and file.is_file() else None


def _without_comments(text: bytes) -> bytes:
    """Return the lines of a module that hold code, without their comments: the same in every version of Python. A text that is no
    Python is returned as it is."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(text).readline)
        lines = io.StringIO(text.decode(encoding), newline=None).read().split("\n")
        tokens = list(tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline))
    except (tokenize.TokenError, SyntaxError, ValueError):
        return text
    with_code, within_strings = set[int](), set[int]()
    for token in tokens:
        first, last = token.start[0], token.end[0]
        if token.type == tokenize.COMMENT:
            lines[first - 1] = lines[first - 1][: token.start[1]]
        elif token.type not in _NO_CODE:
            with_code.update(range(first, last + 1))
            within_strings.update(range(first, last))
    return "\n".join(
        lines[row - 1] if row in within_strings else lines[row - 1].rstrip() for row in sorted(with_code)
    ).encode()


_NO_CODE = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def _files_of(module: str, beside: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield the file of a module and those of the packages that it is in, each with the directory that its import begins at; none of
    torch's, of Python's own, and of this program's. beside: the folders of scripts, whose imports begin there."""
    if (script := script_file(module)) is not None:
        here = Path.cwd().resolve()
        yield here if script.is_relative_to(here) else script.parent, script
        return
    top, *names = module.split(".")
    for folder in beside:
        if (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file():
            yield from _inner_files(folder, folder, [top, *names])
            return
    if not top or top == "torch":
        return
    try:
        spec = importlib.util.find_spec(top)  # of no inner one: that would run the packages around it
    except (ImportError, ValueError):
        return
    found = [folder / top for folder in beside] if spec is None else spec.submodule_search_locations or ()
    folders = [Path(folder) for folder in found]
    origin = Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None
    if origin is not None and _may_count(origin):
        yield (origin.parent.parent if folders else origin.parent), origin
    for folder in folders:
        yield from _inner_files(folder.parent, folder, names)


def _inner_files(root: Path, folder: Path, names: list[str]) -> Iterator[tuple[Path, Path]]:
    for name in names:
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file() and _may_count(file):
                yield root, file
        folder /= name


def is_librarys(file: Path) -> bool:
    """True of a module that is installed, comes with Python, or is this program's own."""
    return _is_installed(file) or _is_pythons_or_ours(file)


def _may_count(file: Path) -> bool:
    return file.suffix == ".py" and not _is_pythons_or_ours(file)


def _is_pythons_or_ours(file: Path) -> bool:
    comes_with_python = not _is_installed(file) and any(file.is_relative_to(place) for place in _PYTHONS)
    return comes_with_python or file.is_relative_to(OURS)


def _is_installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(file.parts))


def _imported(text: bytes, package: list[str]) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)  # it may be a module, too
