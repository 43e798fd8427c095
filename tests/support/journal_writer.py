"""A process that writes a journal, to be killed, forked or kept out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.processes import next_line

WRITER = """
import ctypes, os, sys
from pathlib import Path
from batchscout.orchestrator.study.events import ClusterReady
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.state import Halted
with Journal(Path(sys.argv[1]), "s", *map(float, sys.argv[3:])) as journal:
    print("open", flush=True)
    if sys.argv[2] == "fork":
        helper = os.fork()
        if helper:
            print(helper, flush=True)
    if sys.argv[2] == "library":
        libc = ctypes.PyDLL(None)
        helper = libc.fork()
        while not helper:
            libc.pause()
        print(helper, flush=True)
    for token in map(str.strip, sys.stdin if sys.argv[2] == "told" else ()):
        try:
            journal.append(ClusterReady(token=token, seconds=1.0))
            print("written", flush=True)
        except Halted as error:
            print(error, flush=True)
    if sys.argv[2] in ("hold", "fork", "library"):
        sys.stdin.read()
    number = 0
    while sys.argv[2] == "write":
        journal.append(ClusterReady(token=f"key{number} " + "x" * 5000, seconds=1.0))
        number += 1
        print(number, flush=True)
"""


IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child")
"""Before a command: it has a number among processes of its own, as in a container with this machine's name."""


def writer(
    path: Path, what: str, lease: str | None = None, *, within: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    """A process that has the journal open: it writes without end ("write"), or a line with the token that it is told, and answers with
    what came of it ("told"). Or it holds the journal until its input ends ("hold"), also with a fork of it that lives on until then
    ("fork"), or with one that a library's own code made and that lives until it is killed ("library"). lease: how many seconds it may
    be silent, if not the usual. within: what the command is put after."""
    process = subprocess.Popen(
        [*within, sys.executable, "-c", WRITER, str(path), what, *([] if lease is None else [lease])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert next_line(process) == "open\n"
    return process


CALLER = """
import json, sys
from pathlib import Path
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.storage.lock import is_locked
path, said = Path(sys.argv[1]), "it was let in"
locked = is_locked(path)
try:
    Journal(path, "s").close()
except ValueError as error:
    said = str(error)
print(json.dumps([locked, said]))
"""


def call_on(path: Path, *, within: Sequence[str] = (), **environment: str) -> tuple[bool, str]:
    """Whether another process finds the journal locked, and what it is told when it would write it."""
    command = [*within, sys.executable, "-c", CALLER, str(path)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    locked, said = json.loads(done.stdout)
    return locked, said


WATCHER = """
import sys
from pathlib import Path
from batchscout.orchestrator.study.storage.lock import is_locked
print("asking", flush=True)
while True:
    is_locked(Path(sys.argv[1]))
"""


@contextlib.contextmanager
def watched(path: Path) -> Iterator[None]:
    """Have another process ask all the time whether the journal is locked."""
    with subprocess.Popen([sys.executable, "-c", WATCHER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert next_line(process) == "asking\n"
        try:
            yield
            assert process.poll() is None, "it asked to the end"
        finally:
            process.kill()


CONTENDER = """
import os, sys, time
from pathlib import Path
from batchscout.orchestrator.study.storage.lock import JournalLock
path, alone, end = Path(sys.argv[1]), Path(sys.argv[1]).with_name("alone"), time.monotonic() + 1.5
won = 0
while time.monotonic() < end:
    try:
        lock = JournalLock(path)
    except ValueError:
        continue
    os.close(os.open(alone, os.O_CREAT | os.O_EXCL))
    won += 1
    alone.unlink()
    lock.release()
print(won)
"""


def contend(path: Path, num_processes: int) -> list[int]:
    """How often each of these processes had the lock in a second and a half, in which each was alone whenever it had it."""
    command = [sys.executable, "-c", CONTENDER, str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)]
    said = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "two had it at once"
    return [int(won) for won in said]
