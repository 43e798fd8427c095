"""The text of code and of what it refers to: by it one script is known from another."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def text_of(code: Any) -> str:
    """Return the source of a class, a function or a partial, with that of all functions and classes and the values of all plain
    constants that it refers to in the same package: a block of a model, its width. What other packages hold is not covered.
    """
    package = _package(code)
    told, pending, seen = [], [code], {id(code)}
    while pending:
        one = pending.pop()
        told.append(_own_text(one))
        for other in _referred(one):
            if _is_plain(other):
                told.append(repr(other))
            elif _package(other) == package and id(other) not in seen:
                seen.add(id(other))
                pending.append(other)
    return "\n".join(told)


def _package(value: Any) -> str:
    value = value.func if isinstance(value, functools.partial) else value
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part) for part in value)
    return isinstance(value, PLAIN)


def _own_text(code: Any) -> str:
    """Return the source; the name where there is none, as of a class in a notebook, whose functions have theirs."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"


def _referred(code: Any) -> Iterator[Any]:
    """Yield what a class or a function needs: bases and members, globals and what it has enclosed, a partial's arguments."""
    if isinstance(code, functools.partial):
        yield from (code.func, *code.args, *code.keywords.values())
    elif isinstance(code, type):
        yield from code.__bases__
        yield from (_function(member) for name, member in vars(code).items() if not _is_of_python(name))
    elif isinstance(function := _function(code), FunctionType):
        yield from _globals(function.__code__, function.__globals__)
        yield from inspect.getclosurevars(function).nonlocals.values()
        yield from (function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).values()


def _is_of_python(name: str) -> bool:
    """True of what Python adds to a class by itself, such as the line on which it stands."""
    return name in (
        "__module__",
        "__qualname__",
        "__doc__",
        "__firstlineno__",
        "__static_attributes__",
        "__dict__",
        "__weakref__",
    )


def _function(member: Any) -> Any:
    """Return the function of a method, a property or a wrapper."""
    if isinstance(member, (staticmethod, classmethod)) or inspect.ismethod(member):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return inspect.unwrap(member)


def _globals(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    yield from (names[name] for name in code.co_names if name in names)
    for inner in code.co_consts:  # of lambdas and comprehensions
        if isinstance(inner, CodeType):
            yield from _globals(inner, names)
