"""`batchscout status --watch`: what a study has come to, shown anew whenever that may have changed."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator

SECONDS_BETWEEN_LOOKS = 2.0
_TO_THE_TOP, _CLEAR_THE_REST_OF_A_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(
    in_a_window: Callable[[int], tuple[str, bool]],
    show: Callable[[], bool],
    state: Callable[[], object],
    seconds: float = SECONDS_BETWEEN_LOOKS,
) -> None:
    """Show, and show again whenever the state is another one, until the study is over.

    show: prints all, and returns whether the study is over; a log gets this at every change. in_a_window: returns as much as fits so many
    rows, and whether the study is over; a terminal shows it below a clock on its alternate screen, and in the end all is printed as well.
    """
    if not sys.stdout.isatty():
        for has_changed in _looks(state, seconds):
            is_over = has_changed and show()
            sys.stdout.flush()
            if is_over:
                return
    with _own_screen():
        _in_its_window(in_a_window, state, seconds)
    show()


def _in_its_window(in_a_window: Callable[[int], tuple[str, bool]], state: Callable[[], object], seconds: float) -> None:
    """Show below a clock what there is, until the study is over."""
    text = ""
    for has_changed in _looks(lambda: (state(), shutil.get_terminal_size()), seconds):
        size = shutil.get_terminal_size()
        if has_changed:
            text, is_over = in_a_window(size.lines - 1)
            if is_over:
                return
        clock = f"{time.strftime('%H:%M:%S')}, looked at every {seconds:g} s; Ctrl-C ends this view"
        lines = f"{clock[: size.columns]}\n{text}".replace("\n", f"{_CLEAR_THE_REST_OF_A_LINE}\n")
        print(f"{_TO_THE_TOP}{lines}{_CLEAR_THE_REST_OF_A_LINE}{_CLEAR_BELOW}", end="", flush=True)


def _looks(state: Callable[[], object], seconds: float) -> Iterator[bool]:
    """Yield now and after so many seconds again and again whether the state is another one than at the look before."""
    before: object = None
    while True:
        now = state()
        yield now != before
        before = now
        time.sleep(seconds)


@contextlib.contextmanager
def _own_screen() -> Iterator[None]:
    """Have the terminal show another screen than the one with what was printed, without a cursor."""
    print("\x1b[?1049h\x1b[?25l", end="", flush=True)
    try:
        yield
    finally:
        print("\x1b[?25h\x1b[?1049l", end="", flush=True)
