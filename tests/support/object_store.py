"""An object store of a test's own: a server of the S3 protocol, in a process of its own, on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

SERVER = """
import os, sys
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer
s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(sys.argv[1], "us-east-1")  # before it answers anybody
server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(os.environ.get("PORT", "0")), verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Server:
    address: str
    _process: subprocess.Popen[str]

    @contextlib.contextmanager
    def saying_nothing(self) -> Iterator[None]:
        """Within it the server keeps its connections, and answers nobody."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def object_store(**environment: str) -> Iterator[Server]:
    """Start a server that has a bucket."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, BUCKET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    try:
        port = next(line.split()[1] for line in process.stdout if line.startswith("port"))
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.communicate()


def reached_at(address: str) -> dict[str, str]:
    """Return the environment of a process that is to use the server."""
    return {**CREDENTIALS, "AWS_ENDPOINT_URL": address, "AWS_EC2_METADATA_DISABLED": "true"}
