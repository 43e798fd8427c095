"""The user's modules that a study runs, told by digests: those that its import paths name, and what these import. A comment changes
nothing, nor does a file that nobody imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainers.files import own_file

OURS = [Path(__file__).parents[1] / name for name in ("trainers", "orchestrator", "batchscout.py")]


def code_of(import_paths: Iterable[str | None]) -> dict[str, str]:
    """Return a digest of each module's code, by its file, as it is named from the directory that its import begins at.

    import_paths: package.module:name, and built-in names among them. Imports are read from the text: one that is made of a name at
    run time is not seen.
    """
    found, pending = dict[str, str](), [path.partition(":")[0] for path in import_paths if path and ":" in path]
    seen = set(pending)
    while pending:
        module = pending.pop()
        for root, file in _files_of(module):
            name = str(file.relative_to(root))
            if name in found:
                continue
            with own_file(file, "read"):
                text = file.read_bytes()
            tree = _parsed(text)
            found[name] = hashlib.sha256(text if tree is None else ast.dump(tree).encode()).hexdigest()[:16]
            imported = (
                [] if tree is None else [one for one in _imported(tree, _package_of(root, file)) if one not in seen]
            )
            seen.update(imported)
            pending += imported
    return dict(sorted(found.items()))


def _parsed(text: bytes) -> ast.Module | None:
    """Return the module's tree; None where it is none."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _files_of(module: str) -> Iterator[tuple[Path, Path]]:
    """Yield the file of a module and those of the packages that it is in, each with the directory that its import begins at; none of
    what is installed, of Python's own, and of this program's."""
    top, *names = module.split(".")
    if not top or top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return
    try:
        spec = importlib.util.find_spec(top)  # of no inner one: that would run the packages around it
    except (ImportError, ValueError):
        return
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    origin = Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None
    if origin is not None and _is_the_users(origin):
        yield (origin.parent.parent if folders else origin.parent), origin
    for folder in folders:
        yield from _inner_files(folder.parent, folder, names)


def _inner_files(root: Path, folder: Path, names: list[str]) -> Iterator[tuple[Path, Path]]:
    for name in names:
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file() and _is_the_users(file):
                yield root, file
        folder /= name


def _is_the_users(file: Path) -> bool:
    is_installed = bool({"site-packages", "dist-packages"} & set(file.parts))
    return file.suffix == ".py" and not is_installed and not any(file.is_relative_to(one) for one in OURS)


def _package_of(root: Path, file: Path) -> list[str]:
    """Return the names of the package that relative imports in the file begin at."""
    return list(file.relative_to(root).parent.parts)


def _imported(tree: ast.Module, package: list[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)  # it may be a module, too
