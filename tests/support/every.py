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
            broken = list[tuple[str, Exception]]()
            for case in cases:
                try:
                    law(**case, **fixtures)
                except Exception as error:
                    broken.append((_told(case), error))
                except (
                    pytest.fail.Exception
                ) as error:  # a test's time limit speaks like this, too: nothing goes on after it
                    error.add_note(f"with {_told(case)}")
                    raise
            if broken:
                lines = [f"  {case}: {_in_one_line(error)}" for case, error in broken]
                text = "\n".join([f"{len(broken)} of {len(cases)} break this law:", *lines])
                raise AssertionError(text) from broken[0][1]

        signature = inspect.signature(law)
        fixtures = [each for name, each in signature.parameters.items() if name not in things]
        holds_for_all.__signature__ = signature.replace(parameters=fixtures)  # pyright: ignore[reportAttributeAccessIssue]
        return holds_for_all

    return one_test


def _told(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_short(_shown(value), 100)}" for name, value in case.items())


def _shown(value: Any) -> str:
    if isinstance(value, Path) and value.is_relative_to(ROOT):
        return str(value.relative_to(ROOT))
    return getattr(value, "__name__", None) or str(value)


def _in_one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return _short(" ".join(text.split()), 400)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
