"""The gcs of a cluster that is not the study's own: whether it is still there."""

from __future__ import annotations

import socket
import time

# How long one of Ray's servers may take to be started again on its host.
SECONDS_OF_REFUSAL = 8.0
SECONDS_TO_CONNECT = 2.0


class Gcs:
    """The process on the head without which no cluster works, as whoever connects to it sees it."""

    def __init__(self, address: str) -> None:
        """address: host:port."""
        self._address = address
        self._refused_since: float | None = None

    def loss(self) -> str | None:
        """Return what is wrong, once its host has refused connections for a while: nobody listens there any more.

        Silence is left to Ray, which waits a minute for the network to come back.
        """
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT).close()
        except ConnectionRefusedError:
            self._refused_since = self._refused_since or time.monotonic()
            is_gone = time.monotonic() - self._refused_since >= SECONDS_OF_REFUSAL
            return f"Ray's gcs_server at {self._address} has ended" if is_gone else None
        except OSError:
            return None
        self._refused_since = None
        return None
