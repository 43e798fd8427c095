"""Where Ray keeps what a study's own cluster writes: in a folder of the user's alone, that does not grow for ever."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from batchscout.orchestrator.execution.local_cluster import NUM_KEPT_SESSIONS, ended, private_folder
from batchscout.trainers.files import StorageLost
from tests.support.processes import next_line


@pytest.fixture(autouse=True)
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the sessions will lie in."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(
        "batchscout.orchestrator.execution.local_cluster.LONGEST_FOLDER", 1000
    )  # no sockets are made here
    return tmp_path / f"batchscout-{os.getuid()}" / "ray"


def session(folder: Path, minute: int, driver: int) -> Path:
    """A session as Ray names it, begun in this minute."""
    path = folder / f"session_2026-11-23_04-{minute:02d}-46_541306_{driver}"
    (path / "logs").mkdir(parents=True)
    return path


def ended_driver() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_latest_sessions_are_kept_and_those_of_drivers_that_run(sessions: Path) -> None:
    assert private_folder() == sessions
    gone = ended_driver()
    running = session(sessions, 0, os.getpid())
    over = [session(sessions, minute, gone) for minute in range(1, NUM_KEPT_SESSIONS + 4)]
    (sessions / "session_latest").symlink_to(over[-1])
    private_folder()
    assert {path for path in sessions.iterdir() if path.name != "session_latest"} == {
        running,
        *over[-NUM_KEPT_SESSIONS:],
    }


def test_a_server_that_ends_by_itself_has_left_its_cause_in_logs_that_are_named(sessions: Path) -> None:
    mine = session(sessions, 1, os.getpid())
    raylet, killed = (subprocess.Popen(["sh", "-c", command]) for command in ("exit 1", "kill -9 $$"))
    raylet.wait()
    killed.wait()
    assert ended({"raylet": raylet}) == f"Ray's raylet exited with status 1 (Ray's logs are in {mine}/logs)"
    assert ended({"raylet": killed}) == "Ray's raylet was killed by SIGKILL"


def test_a_session_of_a_cluster_whose_first_node_is_another_machine_is_kept_while_its_servers_run(
    sessions: Path,
) -> None:
    """Its name has the number of a process there, which here is nobody's."""
    private_folder()
    gone = ended_driver()
    ours = session(sessions, 0, gone)
    for minute in range(1, NUM_KEPT_SESSIONS + 1):
        session(sessions, minute, gone)
    command = [sys.executable, "-u", "-c", "print(); input()", f"--store_socket_name={ours}/sockets/plasma_store"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        next_line(server)  # while it has only just begun the kernel does not tell its command
        private_folder()
        assert ours.exists()
        server.kill()
    private_folder()
    assert not ours.exists()


def test_nobody_else_can_enter_the_folder(sessions: Path) -> None:
    before = os.umask(0)
    try:
        private_folder()
    finally:
        os.umask(before)
    assert stat.S_IMODE(sessions.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_refused(sessions: Path) -> None:
    sessions.parent.mkdir()
    sessions.parent.chmod(0o755)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(sessions.parent))} is open to other users .* in RAY_TMPDIR$"
    ):
        private_folder()


def test_the_remedy_can_be_pasted_and_removes_nothing_else(
    sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path with a space in it, and a directory beside it that has the name up to the space."""
    (victim := tmp_path / "my" / "thesis.txt").parent.mkdir()
    victim.write_text("It was a dark and stormy night.")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "my tmp"))
    (ours := tmp_path / "my tmp" / sessions.parent.name).mkdir(parents=True)
    ours.chmod(0o755)
    with pytest.raises(ValueError, match="is open to other users") as refused:
        private_folder()
    remedy = re.search(r"remove it \((rm -r .*)\), or", str(refused.value))
    assert remedy is not None
    done = subprocess.run(["bash", "-c", remedy[1]], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert victim.exists()
    assert not ours.exists()
    private_folder()


def test_a_folder_that_cannot_be_made_is_named(sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(StorageLost, match=rf"/file/{sessions.parent.name} could not be written: Not a directory$"):
        private_folder()
