"""Ports that nothing listens at."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, NUM_PORTS = 24_000, 1_000
"""For each process of the suite. From 32,768 on Linux gives ports to whoever asks, and Ray asks for many; below 20,000 are those of Ray's
workers."""
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_OURS = range(FIRST + NUM_PORTS * _WORKER, FIRST + NUM_PORTS * (_WORKER + 1))
_numbers = itertools.islice(itertools.cycle(_OURS), os.getpid() % NUM_PORTS, None)


def free_ports(number: int) -> list[int]:
    """Return ports that this process has not handed out lately."""
    return list(itertools.islice(filter(_is_free, _numbers), number))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
