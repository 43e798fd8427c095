"""The documentation that stands under each field of a class, which Python itself does not keep."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator

_OTHERS = {*sys.stdlib_module_names, "pydantic"}
"""Packages whose classes stand below those that are documented so."""


@functools.cache
def texts_under_fields(owner: type) -> dict[str, str]:
    """Return the text of each field that a class has or inherits, with its lines."""
    own = [kind for kind in reversed(owner.__mro__) if kind.__module__.partition(".")[0] not in _OTHERS]
    return {field: text for kind in own for field, text in _texts_in(inspect.getsource(kind))}


def _texts_in(source: str) -> Iterator[tuple[str, str]]:
    (body,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            yield field.target.id, inspect.cleandoc(ast.literal_eval(text.value))
