"""Whether a rank's process has been told to end."""

from __future__ import annotations

import signal
import threading

_told_to_end = threading.Event()
"""SIGTERM sets it; it comes before a machine is taken away."""


def hear_sigterm() -> None:
    """Note SIGTERM instead of ending at once: the trial is to save a checkpoint first.

    Only the main thread can set this up, and `serve` runs in another.
    """
    signal.signal(signal.SIGTERM, lambda *_: _told_to_end.set())


def is_told_to_end() -> bool:
    return _told_to_end.is_set()
