"""How the processes of a lane, its ranks, become a group: what is called in them before they serve.

The driver and the controller of the lane's Train run import this file, too, to have it called. They need no torch, whose import
takes seconds, so it is imported where it is called.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import ray
from ray import train

from batchscout.orchestrator.environment import observed_environment, obstacles_between_ranks, refuse
from batchscout.trainers.launcher import remove_launcher

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits in a collective for the others, one of which may compile or write a checkpoint."""


def require_cuda() -> None:
    """Raise ValueError where torch cannot use the GPU that Ray has given this process: NCCL's own message does not say so."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"Ray has a GPU for this rank on {socket.gethostname()}, and torch {torch.__version__} can use none there: install "
            "torch's build for its CUDA or ROCm, see whether its driver is recent enough, or start Ray there with --num-gpus 0"
        )


_store: Any = None
"""Where the ranks of a group meet, if this process has opened it: it lives as long as the process."""


def open_store() -> tuple[str, int]:
    """Open the store in which the ranks of a group meet, on the address that this node has in its cluster alone: torch's own listens on every
    address of the machine, with nothing to keep strangers out.

    Returns address and port.
    """
    from torch._C._distributed_c10d import TCPStore  # as the type checker wants it

    global _store
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    _store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=listener.detach()
    )
    return address, port


def join(backend: str, address: str, port: int) -> None:
    """Join the group whose ranks meet in this store. Libraries read in the environment who they are, as under torchrun."""
    import torch.distributed as dist

    context = train.get_context()
    if context.get_world_size() > 1:  # of a cluster's nodes only their own processes can tell
        refuse(obstacles_between_ranks(observed_environment(), on_gpu=backend == "nccl"))
    remove_launcher()  # the driver has none, but a cluster's node may have been started by one
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for a store that somebody else has opened
    }
    use_its_gpu()
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)


def serve(told: dict[str, Any]) -> None:
    """Run assignments until there are no more. Ray Train calls this on every rank of a lane, in a thread of its own."""
    from batchscout.orchestrator.execution import ranks

    use_its_gpu()
    ranks.serve(told)


def use_its_gpu() -> None:
    """Have this thread use the GPU that Ray has given to this rank, of those of its group that it sees on this node, and none if it was given
    none: Ray hides them from no process that has asked for none."""
    if not ray.get_gpu_ids():
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}
        return
    import torch
    from ray.train.torch import get_device

    torch.cuda.set_device(get_device())
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(get_device())
