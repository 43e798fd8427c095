"""Stores that stop answering are waited for, and given up once. That takes its time: they belong to the third tier."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchscout.orchestrator.study.storage import place
from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.trainers.files import StorageLost, quoted
from tests.support.object_store import BUCKET, object_store, reached_at
from tests.support.ports import free_ports
from tests.support.processes import HANGS_AFTER_SECONDS, next_line

pytestmark = pytest.mark.cluster


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where this process looks for its store, which a test starts there when it likes."""
    port = str(free_ports(1)[0])
    for name, value in reached_at(f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(name, value)
    return port


def test_a_store_that_is_away_for_a_while_is_waited_for(port: str) -> None:
    """The library gives up after six seconds."""
    store = ObjectStore(f"s3://{BUCKET}/away?region=us-east-1")
    with object_store(PORT=port):
        store.write("one", b"1")
    with ThreadPoolExecutor(1) as others:
        written = others.submit(store.write, "two", b"2")
        time.sleep(9)
        assert not written.done()
        with object_store(PORT=port):
            written.result(HANGS_AFTER_SECONDS)
            assert store.read("two") == b"2"


ASKED_BY_ANOTHER = """
import sys
from batchscout.orchestrator.study.storage.place import ObjectStore
store = ObjectStore(sys.argv[1])
store.expect_answers()
print("asks", flush=True)
store.write("two", b"2")
"""


def test_a_process_waits_for_a_store_that_has_answered_another(port: str) -> None:
    """A rank's first request of a local study is the upload of its first checkpoint."""
    uri = f"s3://{BUCKET}/another?region=us-east-1"
    with subprocess.Popen([sys.executable, "-c", ASKED_BY_ANOTHER, uri], stdout=subprocess.PIPE, text=True) as another:
        assert next_line(another) == "asks\n"
        time.sleep(9)
        assert another.poll() is None
        with object_store(PORT=port):
            assert another.wait(HANGS_AFTER_SECONDS) == 0
            assert ObjectStore(uri).read("two") == b"2"


def test_a_store_that_has_been_given_up_is_waited_for_once(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "SECONDS_TO_COME_BACK", 20.0)
    store = ObjectStore(f"s3://{BUCKET}/given-up?region=us-east-1")
    with object_store(PORT=port):
        store.write("one", b"1")
    seconds = list[float]()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(StorageLost, match="the store does not answer"):
            store.write("two", b"2")
        seconds.append(time.monotonic() - began)
    assert seconds[0] > 20 > seconds[1]


ASKS_UNTIL_IT_IS_STOPPED = """
import contextlib, sys
from batchscout.orchestrator.signals import all_are_ctrl_c_until_the_end, interrupts_afterwards, leave_on_signals
from batchscout.orchestrator.study.storage.place import ObjectStore
all_are_ctrl_c_until_the_end()
try:
    with {within}():
        ObjectStore(sys.argv[1]).refuse_unusable()
except KeyboardInterrupt:
    leave_on_signals(130)
    sys.exit(130)
"""


@pytest.mark.parametrize("within", ["contextlib.nullcontext", "interrupts_afterwards"])
def test_ctrl_c_is_heard_while_a_store_says_nothing(port: str, within: str) -> None:
    """The library waits for it for a minute and a half, in its own code, and again when the program ends. Within what is not to be
    interrupted half way the store has a few seconds still."""
    with socket.create_server(("127.0.0.1", int(port))) as silent:
        uri = f"s3://{BUCKET}/silent?region=us-east-1"
        code = ASKS_UNTIL_IT_IS_STOPPED.format(within=within)
        with subprocess.Popen([sys.executable, "-c", code, uri]) as program:
            connection, _ = silent.accept()
            with connection:
                connection.recv(1)
                began = time.monotonic()
                program.send_signal(signal.SIGINT)
                assert program.wait(HANGS_AFTER_SECONDS) == 130
                assert time.monotonic() - began < 18, "less than without it; the machine may be busy"


def test_a_store_that_keeps_a_connection_and_says_nothing_does_not_answer(port: str) -> None:
    """Asked by the program, which ends without the interpreter's last steps: a request is still waited for in the library's own
    threads, and taking the library down around them is a segmentation fault now and then."""
    uri = f"s3://{BUCKET}/silent?region=us-east-1"
    with socket.create_server(("127.0.0.1", int(port))):
        command = [sys.executable, "-m", "batchscout", "status", uri]
        asks = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER_SECONDS)
    assert asks.returncode == 2
    assert f"batchscout: {quoted(uri)} has not answered for 20 s; check the network" in asks.stderr
