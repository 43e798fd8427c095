"""`batchscout status --watch`: what a study has come to, shown anew whenever that may have changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

SECONDS_BETWEEN_LOOKS = 2.0
_CLEAR = "\x1b[2J\x1b[3J\x1b[H"


def watch(show: Callable[[], bool], state: Callable[[], object], seconds: float = SECONDS_BETWEEN_LOOKS) -> None:
    """Show, and show again whenever the state is another one, until `show` says that nothing will change any more.

    A terminal is cleared before; in a log one follows the other.
    """
    shown: object = None
    while True:
        now = state()
        if now != shown:
            shown = now
            if sys.stdout.isatty():
                print(_CLEAR, end="")
            is_over = show()
            sys.stdout.flush()
            if is_over:
                return
        time.sleep(seconds)
