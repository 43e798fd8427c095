"""Calls a function with modules as soon as they are loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def on_import(names: Collection[str], call: Callable[[ModuleType], None]) -> Iterator[None]:
    """Within this, call with each of these modules: now with those that are loaded, and with others once they have been."""
    for module in [sys.modules[name] for name in names if name in sys.modules]:
        call(module)
    finder = _Finder(names, call)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    def __init__(self, names: Collection[str], call: Callable[[ModuleType], None]) -> None:
        self._names, self._call = names, call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in self._names else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then_call(module: ModuleType) -> None:
            execute(module)
            self._call(module)

        setattr(spec.loader, "exec_module", then_call)  # noqa: B010
        return spec
