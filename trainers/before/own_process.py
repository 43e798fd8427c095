"""Work in a process of its own: neither a crash of a user's code, nor its exit, nor what it leaves in memory reaches this one.

It is asked with one JSON value and answers with lines of them. `python -m MODULE` is the other end, where `asked` waits for the question.
Loads no torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from batchscout.trainers.descendants import end_descendants, end_with

MOST_OF_STDERR = 10_000
SECONDS_TO_END = 2.0


class OwnProcess:
    """This end."""

    def __init__(self, process: subprocess.Popen[str], stderr: IO[str]) -> None:
        self._process, self._stderr = process, stderr

    def answers(self) -> Iterator[Any]:
        """Yield each as it comes, until the process ends."""
        assert self._process.stdout
        yield from map(json.loads, self._process.stdout)

    def exit_code(self) -> int:
        """Wait for its end, and return how that was, as `subprocess` has it."""
        return self._process.wait()

    def last_words(self) -> str:
        """Wait for its end, and return the end of what it has written to stderr: after its last answer there may come more."""
        self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - MOST_OF_STDERR))
        return self._stderr.read()

    def end(self) -> None:
        """End it, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def own_process(
    module: str, question: Any, path: Sequence[str] | None = None, **environment: str
) -> Iterator[OwnProcess]:
    """Start the other end, ask it, and end it with this block. path: where it imports from; None: where this process does. environment:
    variables that it has beside those of this process."""
    importable = os.pathsep.join(map(os.path.abspath, sys.path if path is None else path))
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": importable, **environment},
            text=True,
            start_new_session=True,
        )
        assert process.stdin
        assert process.stdout
        own = OwnProcess(process, stderr)
        # Helpers that the user's code has forked hold the pipe, too: it would stay open after a crash.
        watcher = threading.Thread(target=lambda: (process.wait(), own.end()), daemon=True)
        watcher.start()
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                json.dump(question, process.stdin)
            with process.stdout:
                yield own
                with contextlib.suppress(subprocess.TimeoutExpired):  # a user's code may have something to put away
                    process.wait(SECONDS_TO_END)
        finally:
            own.end()
            watcher.join()


@contextlib.contextmanager
def asked() -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Yield the question, and what takes each answer. This is the other end: it ends with whoever asked, who may be killed, and what a user's
    code prints is none of its answers."""
    if not end_with(int(sys.argv.pop())):  # a user's code may read the others
        sys.exit("whoever asked is gone")
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # in turn with stderr
        try:
            yield json.load(sys.stdin), lambda answer: print(json.dumps(answer), file=out, flush=True)
        finally:
            end_descendants()
