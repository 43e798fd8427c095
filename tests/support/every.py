"""A law about many things is one test, which names every thing that breaks it."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Law = Callable[..., None]
ROOT = Path(__file__).parents[2]


def for_every(**things: Iterable[Any]) -> Callable[[Law], Law]:
    """The test that a law holds for each of these, or for each combination where several names are given.

    As pytest.mark.parametrize, but one item: it runs to its end, then fails with a line for each that breaks the law, and
    the whole traceback of the first. A fixture is made once and serves them all.
    """
    cases = [dict(zip(things, values, strict=True)) for values in itertools.product(*things.values())]
    assert cases, "a law about nothing holds of itself"

    def one_test(law: Law) -> Law:
        @functools.wraps(law)
        def holds_for_all(**fixtures: Any) -> None:
            broken = dict[str, Exception]()
            for case in cases:
                try:
                    law(**case, **fixtures)
                except Exception as error:
                    broken[_told(case)] = error
                except (
                    pytest.fail.Exception
                ) as error:  # a test's time limit speaks like this, too: nothing goes on after it
                    error.add_note(f"with {_told(case)}")
                    raise
            if broken:
                lines = [f"  {case}: {_first_line(error)}" for case, error in broken.items()]
                text = "\n".join([f"{len(broken)} of {len(cases)} break this law:", *lines])
                raise AssertionError(text) from next(iter(broken.values()))

        signature = inspect.signature(law)
        fixtures = [each for name, each in signature.parameters.items() if name not in things]
        holds_for_all.__signature__ = signature.replace(parameters=fixtures)  # pyright: ignore[reportAttributeAccessIssue]
        return holds_for_all

    return one_test


def _told(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in case.items())


def _shown(value: Any) -> str:
    if isinstance(value, Path) and value.is_relative_to(ROOT):
        return str(value.relative_to(ROOT))
    return getattr(value, "__name__", None) or str(value)


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
