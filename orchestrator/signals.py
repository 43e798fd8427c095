"""Ctrl-C and SIGTERM while a study runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupts_between_events() -> Iterator[Callable[[], bool]]:
    """Yield a question for the Director to ask between events: has Ctrl-C or SIGTERM come? The second one is raised at once.

    A KeyboardInterrupt that is raised wherever the main thread happens to be was lost in Ray's callbacks now and then. On
    leaving, one that came is raised in any case.
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
