"""What a driver cannot do without of a cluster that is not the study's own: whether it is still there."""

from __future__ import annotations

import socket
import struct
import time

from batchscout.orchestrator.execution import process_endings
from batchscout.orchestrator.units import ending_text

# How long one of Ray's servers may take to be started again on its host.
SECONDS_OF_REFUSAL = 8.0
SECONDS_TO_CONNECT = 2.0


def refuses(address: tuple[str, int]) -> bool:
    """True if nobody listens there, on a host that answers."""
    try:
        socket.create_connection(address, timeout=SECONDS_TO_CONNECT).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class Gcs:
    """The process on the head without which no cluster works, as whoever connects to it sees it."""

    def __init__(self, address: str) -> None:
        """address: host:port."""
        self._address = address
        self._refused_since: float | None = None

    def loss(self, seconds: float | None = None) -> str | None:
        """Return what is wrong, once its host has refused connections for a while: nobody listens there any more.

        Silence is left to Ray, which waits a minute for the network to come back. seconds: how long a while is; None:
        SECONDS_OF_REFUSAL.
        """
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT).close()
        except ConnectionRefusedError:
            self._refused_since = self._refused_since or time.monotonic()
            is_gone = time.monotonic() - self._refused_since >= (SECONDS_OF_REFUSAL if seconds is None else seconds)
            return f"Ray's gcs_server at {self._address} has ended" if is_gone else None
        except OSError:
            return None
        self._refused_since = None
        return None


class Raylet:
    """The process on the driver's own node through which it reaches the cluster: who listens at a socket there."""

    def __init__(self, socket_path: str) -> None:
        """Raises OSError where nobody listens any more."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS_TO_CONNECT)
            connection.connect(socket_path)
            self._process = process_endings.open_process(_peer(connection))

    def loss(self) -> str | None:
        """Return what is wrong, once it has ended."""
        if self._process is None or not process_endings.has_ended(self._process):
            return None
        code = process_endings.exit_code(self._process)
        return f"Ray's raylet on this node {'has ended' if code is None else ending_text(code)}"


def loss_of(gcs: Gcs, raylet: Raylet) -> str | None:
    """Return what is wrong with a cluster. A raylet whose gcs has ended ends, too, and before one can be sure of the gcs."""
    no_raylet = raylet.loss()
    return gcs.loss() if no_raylet is None else gcs.loss(seconds=0) or no_raylet


def _peer(connection: socket.socket) -> int:
    """Return the process at the other end."""
    fields = struct.Struct("3i")  # struct ucred: process, user, group
    process, _, _ = fields.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, fields.size))
    return process
