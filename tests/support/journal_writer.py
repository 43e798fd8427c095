"""A process that writes a journal, to be killed, forked or kept out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WRITER = """
import os, sys
from pathlib import Path
from orchestrator.study.events import ClusterReady
from orchestrator.study.journal import Journal
with Journal(Path(sys.argv[1]), "s") as journal:
    print("open", flush=True)
    if sys.argv[2] == "fork":
        helper = os.fork()
        if helper:
            print(helper, flush=True)
    if sys.argv[2] in ("hold", "fork"):
        sys.stdin.read()
    if sys.argv[2] == "once":
        journal.append(ClusterReady(token="key0", seconds=1.0))
        print(1, flush=True)
        sys.stdin.read()
    number = 0
    while sys.argv[2] == "write":
        journal.append(ClusterReady(token=f"key{number} " + "x" * 5000, seconds=1.0))
        number += 1
        print(number, flush=True)
"""


def writer(path: Path, what: str, **environment: str) -> subprocess.Popen[str]:
    """A process that has the journal open: it writes without end ("write") or one line ("once"), or holds the journal
    until its input ends ("hold"), also with a fork of it that lives on until then ("fork")."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


CALLER = """
import json, sys
from pathlib import Path
from orchestrator.study.journal import Journal
from orchestrator.study.lock import is_locked
path, said = Path(sys.argv[1]), "it was let in"
locked = is_locked(path)
try:
    Journal(path, "s").close()
except ValueError as error:
    said = str(error)
print(json.dumps([locked, said]))
"""


def call_on(path: Path, **environment: str) -> tuple[bool, str]:
    """Whether another process finds the journal locked, and what it is told when it would write it."""
    command = [sys.executable, "-c", CALLER, str(path)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    locked, said = json.loads(done.stdout)
    return locked, said
