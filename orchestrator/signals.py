"""Ctrl-C, SIGTERM and SIGHUP: whenever one comes, it ends a study in order."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from batchscout.trainers.descendants import adopts_orphans, end_descendants

SECONDS_TO_SAVE = 30
"""How long Ctrl-C waits for the running trials to save a checkpoint, unless the study is told otherwise."""

SECONDS_TO_LEAVE = 10.0
"""How long a program whose last word is said waits for what the interpreter waits for: threads, processes and atexit of a user's code may wait
for ever."""

_NUMBERS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

_has_come = False
_exit_code: int | None = None
"""What the process is about to end with; None while it works."""


def interrupt_has_come() -> bool:
    """True if one of the signals has come since the program began to listen to them."""
    return _has_come


@contextlib.contextmanager
def all_are_ctrl_c() -> Iterator[None]:
    """Make SIGTERM, which cluster schedulers send, and SIGHUP, the end of a terminal, stop a program as Ctrl-C does."""
    global _has_come
    _has_come = False
    with _handled_by(_interrupt):
        yield


@contextlib.contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """Raise on leaving what came meanwhile, since the block's work can neither be undone half way nor left there.

    A second signal is raised at once all the same.
    """
    with interrupts_between_events():
        yield


@contextlib.contextmanager
def interrupts_between_events() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells the Director, between events, whether a signal has come.

    A KeyboardInterrupt raised wherever the main thread happened to be was lost in Ray's callbacks now and then. A
    second signal is raised at once all the same, and on leaving the first one is raised in any case.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            _interrupt(number, frame)
        asked = True
        _note()

    try:
        with _handled_by(ask):
            yield lambda: asked
    finally:
        if asked:  # whatever the block raised: a signal to all processes of a study breaks what it was waiting for
            raise KeyboardInterrupt


@contextlib.contextmanager
def left_if_stuck(seconds: float, leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave`, in another thread, if the block goes on for longer than this after a signal has come.

    The main thread may wait in a library's own code, where no handler in Python runs.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            if os.read(reading, 1)[0] in _NUMBERS:
                _cancel_alarm()
                if not is_over.wait(seconds):
                    leave()

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        is_over.set()
        os.write(writing, b"\0")  # wakes the thread
        thread.join()
        os.close(reading)
        os.close(writing)


def all_are_ctrl_c_until_the_end() -> None:
    """Do as `all_are_ctrl_c` for as long as the process lives. To be called before a library registers what it does at
    the end."""
    atexit.register(_end)
    for number in _heard():
        signal.signal(number, _interrupt)


def hear_again() -> None:
    """Set the handlers once more, after a library has put the default action in their place behind Python's back."""
    for number in _heard():
        signal.signal(number, signal.getsignal(number))


def leave_on_signals(code: int) -> None:
    """Let a signal end the process at once from here on, with the code that it was about to end with; without one it ends after SECONDS_TO_LEAVE.

    All has been written and said by now. The interpreter joins threads, and Ray and torch let go of what they hold, before
    it is gone: that may take seconds.
    """
    global _exit_code
    _exit_code = code
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    leave_dead_terminal()
    _flush()
    _call_at_once(lambda: _leave(code))
    for number in _heard():
        signal.signal(number, lambda *_: _leave(code))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    threading.Thread(target=_leave_late, args=(code,), daemon=True).start()


def _leave_late(code: int) -> None:
    time.sleep(SECONDS_TO_LEAVE)
    with contextlib.suppress(OSError):  # whoever read it is gone
        print(f"batchscout: {_waited_for()} has not ended in {SECONDS_TO_LEAVE:g} s, and is left", file=sys.stderr)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process at once, and what it has started where it answers for that."""
    _flush()
    if adopts_orphans():
        end_descendants()
    os._exit(code)


def _waited_for() -> str:
    """Return, in words, what the interpreter waits for before it ends."""
    main = threading.main_thread()
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if threads:
        return f"a thread that your code has started ({', '.join(threads)})"
    from multiprocessing import active_children  # takes a while to load, and is seldom needed

    if children := active_children():
        return f"a process that your code has started ({', '.join(child.name for child in children)})"
    return "what your code does when the program ends (atexit)"


def _end() -> None:
    """End the process, when all that was registered later has been called.

    What is left is the interpreter's own end, at which it gives the signals their default action again.
    """
    if _exit_code is not None:
        _leave(_exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it is gone
            stream.flush()


def _call_at_once(function: Callable[[], None]) -> None:
    """Call the function in another thread when a signal comes: one that comes just before the main thread begins to wait
    for a lock has its handler called only when that is over."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        while os.read(reading, 1)[0] not in _NUMBERS:
            pass
        function()

    threading.Thread(target=watch, daemon=True).start()
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _note()
    raise KeyboardInterrupt


def _note() -> None:
    global _has_come
    _has_come = True
    _cancel_alarm()
    leave_dead_terminal()


def _cancel_alarm() -> None:
    """Call off what ends this process in three seconds, if Ray's part in C++ was the first to hear the signal: it takes that
    for a crash, and that the process ends."""
    signal.alarm(0)


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _heard()}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _heard() -> frozenset[signal.Signals]:
    """Return the three signals, but not a SIGHUP that is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return _NUMBERS - {signal.SIGHUP} if is_ignored else _NUMBERS


def leave_dead_terminal() -> bool:
    """Let what is still printed go nowhere, if the terminal, or whoever read the pipe, is gone; return whether one is.

    An error there would hide how the study ended, or end it.
    """
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    gone = [stream for stream, event in poll.poll(0) if event & (select.POLLHUP | select.POLLERR)]
    for stream in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)
    return bool(gone)
