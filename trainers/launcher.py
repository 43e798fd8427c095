"""What a launcher of several processes (torchrun, accelerate launch, mpirun) tells each of them in its environment.

A study starts ranks of its own and tells them. What a launcher left behind, or a notebook exports, would have a library wait for ranks that
never come.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
"""What a launcher tells the only process of a run."""
_OTHERS = {
    "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE",
}  # fmt: skip
_BEGINNINGS = "ACCELERATE_", "FSDP_", "MV2_COMM_WORLD_", "OMPI_COMM_WORLD_", "PARALLELISM_CONFIG_", "TORCHELASTIC_"
_OF_ANY_PROCESS = "ACCELERATE_TORCH_DEVICE"


def is_a_launchers(name: str) -> bool:
    """True if a variable of this name says which process of several this is, or how they train together."""
    return (name in ALONE or name in _OTHERS or name.startswith(_BEGINNINGS)) and name != _OF_ANY_PROCESS


def remove_launcher() -> dict[str, str]:
    """Take what a launcher has left out of this process's environment, and return it."""
    return {name: os.environ.pop(name) for name in [*os.environ] if is_a_launchers(name)}


@contextlib.contextmanager
def without_launcher() -> Iterator[list[str]]:
    """Within this, the environment has nothing of a launcher's. Yield the names of what it had."""
    found = remove_launcher()
    try:
        yield sorted(found)
    finally:
        os.environ.update(found)
