"""Ctrl-C and SIGTERM while a study runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupts_between_events() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM raise a flag that the Director looks at; the second one is raised at once.

    Raised wherever the main thread happens to be, a KeyboardInterrupt was lost in Ray's callbacks now and then.
    """
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt


@contextlib.contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """A scheduler's SIGTERM stops a study as cleanly as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
