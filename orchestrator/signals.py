"""Ctrl-C and SIGTERM while a study runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupts_between_events() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells the Director, between events, whether Ctrl-C or SIGTERM has come.

    A KeyboardInterrupt raised wherever the main thread happened to be was lost in Ray's callbacks now and then. A
    second signal is raised at once all the same, and on leaving the first one is raised in any case.
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
    """Make SIGTERM, which cluster schedulers send, stop a study as cleanly as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
