"""The text of code and of what it refers to: by it one script is known from another."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from batchscout.trainers.user_code import code_of, is_librarys

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def reached_from(code: Any) -> tuple[list[Any], list[Any]]:
    """Return (the class, function or partial, and all functions, classes and modules that it refers to; the values that these refer to),
    each in the order in which they are found: a block of a model, its width. What libraries hold is not covered."""
    codes, values, pending, seen = [], [], [code], {id(code)}
    while pending:
        codes.append(one := pending.pop())
        for other in _referred(one):
            if not _is_code(other):
                values.append(other)
            elif id(other) not in seen and not is_of_a_library(other):
                seen.add(id(other))
                pending.append(other)
    return codes, values


def _is_code(value: Any) -> bool:
    return isinstance(value, type | ModuleType | functools.partial) or inspect.isroutine(value)


def is_of_a_library(code: Any) -> bool:
    """True of what is installed, comes with Python or is this program's own; a notebook's cells are in no file, and what a script defines
    is its own in a process that another program runs, too."""
    code = code.func if isinstance(code, functools.partial) else code
    if getattr(code, "__module__", None) == "__main__":
        return False
    module = code if isinstance(code, ModuleType) else sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return is_librarys(Path(file)) if file else getattr(module, "__name__", "") in sys.builtin_module_names


def own_text(code: Any) -> str:
    """Return what a function does, without its comments, its lines and its place; of a module its text and those of what it imports; of
    all else the name: what it consists of is told by itself."""
    if isinstance(code, ModuleType):
        return repr(code_of([f"{code.__name__}:"]))
    if isinstance(function := _function(code), FunctionType):
        return _compiled(function.__code__)
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__name__', type(code).__name__)}"


def _compiled(code: CodeType) -> str:
    constants = list(map(_constant, code.co_consts))
    return repr((code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars))


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):  # whose order is another in every process
        return repr(sorted(map(repr, value)))
    return _compiled(value) if isinstance(value, CodeType) else repr(value)


def _referred(code: Any) -> Iterator[Any]:
    """Yield what a class or a function needs: bases and members, globals and what it has enclosed, a partial's arguments."""
    if isinstance(code, functools.partial):
        yield from (code.func, *code.args, *code.keywords.values())
    elif isinstance(code, type):
        yield from code.__bases__
        members = ((name, _function(member)) for name, member in vars(code).items() if name not in _OF_PYTHON)
        yield from (one for name, one in members if _is_code(one) or not name.startswith("__"))
    elif isinstance(function := _function(code), FunctionType):
        yield from _globals(function.__code__, function.__globals__)
        yield from inspect.getclosurevars(function).nonlocals.values()
        yield from (function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).values()


_OF_PYTHON = {
    "__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__", "__dict__", "__weakref__",
}  # fmt: skip
"""What Python adds to a class by itself, such as the line on which it stands."""


def _function(member: Any) -> Any:
    """Return the function of a method, a property or a wrapper."""
    if isinstance(member, (staticmethod, classmethod)) or inspect.ismethod(member):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return inspect.unwrap(member)


def _globals(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    named = dict.fromkeys(
        one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    yield from (names[name] for name in named if name in names)
    for inner in code.co_consts:  # of lambdas and comprehensions
        if isinstance(inner, CodeType):
            yield from _globals(inner, names)
