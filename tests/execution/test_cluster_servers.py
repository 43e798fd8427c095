"""Whether a cluster that others have started is still there, as its driver sees it: with processes that really listen, and really end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchscout.orchestrator.execution import cluster_servers
from batchscout.orchestrator.execution.cluster_servers import Gcs, Raylet, loss_of
from tests.support.processes import HANGS_AFTER_SECONDS, next_line

LISTENS = """
import socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("listens", flush=True)
sys.stdin.read()
"""


def test_the_end_of_a_nodes_raylet_is_seen_at_once(tmp_path: Path) -> None:
    raylet = ended_raylet(path := str(tmp_path / "socket"))
    # Which signal it was is told by Linux 6.15 and later.
    assert raylet.loss() in ("Ray's raylet on this node was killed by SIGKILL", "Ray's raylet on this node has ended")
    with pytest.raises(ConnectionRefusedError):
        Raylet(path)


def test_a_gcs_has_ended_once_its_host_has_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is started again in the meantime has not."""
    monkeypatch.setattr(cluster_servers, "SECONDS_OF_REFUSAL", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        gcs = Gcs(address)
        assert gcs.loss() is None
    assert gcs.loss() is None, "it may be started again"
    deadline = time.monotonic() + HANGS_AFTER_SECONDS
    while (said := gcs.loss()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert said == f"Ray's gcs_server at {address} has ended"


def test_a_raylet_that_ends_with_its_gcs_is_not_named_in_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.create_server(("127.0.0.1", 0)) as server:
        gcs = Gcs(address := f"127.0.0.1:{server.getsockname()[1]}")
        raylet = ended_raylet(path)
        assert loss_of(gcs, raylet) == raylet.loss(), "the gcs lives"
    assert loss_of(gcs, raylet) == f"Ray's gcs_server at {address} has ended"


def ended_raylet(path: str) -> Raylet:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LISTENS, path], stdin=pipe, stdout=pipe, text=True) as process:
        assert next_line(process) == "listens\n"
        raylet = Raylet(path)
        assert raylet.loss() is None
        process.kill()
    return raylet
