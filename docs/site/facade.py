"""The page of `import batchscout`, made of its signatures and docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import batchscout

INTRODUCTION = """\
# In Python

`find` runs a study of objects that a script or a notebook has, `load` reads one from its run directory ([an example](../quickstart.md#use-the-answer)).
Reading needs neither torch nor Ray.
"""


def page() -> str:
    """Return the page."""
    public = {name: getattr(batchscout, name) for name in batchscout.__all__}
    functions_first = sorted(public, key=lambda name: inspect.isclass(public[name]))
    return INTRODUCTION + "".join(part for name in functions_first for part in parts_of(name, public[name]))


def parts_of(name: str, what: Any) -> Iterator[str]:
    """Yield what is said of a function, or of a class and of all that it offers."""
    if not inspect.isclass(what):
        yield f"\n## `batchscout.{name}`\n{signature(name, what)}\n{doc_of(what)}\n"
        return
    yield f"\n## `batchscout.{name}`\n\n{doc_of(what)}\n"
    if dataclasses.is_dataclass(what):
        rows = [f"| `{field.name}` | `{_type(field)}` |" for field in dataclasses.fields(what)]
        yield "\n".join(["", "| field | type |", "|---|---|", *rows, ""])
    for member, value in vars(what).items():
        if not member.startswith("_") and (described := described_member(member, value)):
            yield described


def described_member(name: str, value: Any) -> str:
    """Return what is said of a property or method; nothing of a field."""
    match value:
        case property() | functools.cached_property():
            return f"\n### `{name}`\n\n{doc_of(value) or 'Of the study file.'}\n"
        case classmethod() | staticmethod():
            return f"\n### `{name}`\n{signature(name, value.__func__)}\n{doc_of(value.__func__)}\n"
        case _ if inspect.isfunction(value):
            return f"\n### `{name}`\n{signature(name, value)}\n{doc_of(value)}\n"
        case _:
            return ""


def signature(name: str, function: Any) -> str:
    """Return a block with a function as it is called, an argument a line where there are many."""
    found = inspect.signature(function)
    # An annotation is text where a module leaves annotations unread, and would stand in quotes.
    arguments = [
        re.sub(r": '([^']*)'", r": \1", str(one))
        for one in found.parameters.values()
        if one.name not in ("self", "cls")
    ]
    keywords = [one for one in found.parameters.values() if one.kind is one.KEYWORD_ONLY]
    arguments = ["*", *arguments] if keywords and len(keywords) >= len(arguments) - 1 else arguments
    inner = ", ".join(arguments)
    if len(inner) > 80:
        inner = "\n" + textwrap.indent(",\n".join(arguments), "    ") + ",\n"
    # No block of Python: it is no program.
    return f"\n```text\n{name}({inner}) -> {found.return_annotation}\n```\n"


def doc_of(what: Any) -> str:
    return inspect.getdoc(what) or ""


def _type(field: dataclasses.Field[Any]) -> str:
    """Return a field's type without the sign that would end a table's cell."""
    return str(field.type).replace(" | ", " or ")
