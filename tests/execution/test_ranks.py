"""What a rank is told, and what it says of how its trial ended, without Ray."""

from __future__ import annotations

from orchestrator.config.trial import base_trial
from orchestrator.execution.ranks import memory_reason
from tests.support.studies import tiny_study


def test_out_of_memory_is_said_in_sizes() -> None:
    config = base_trial(tiny_study(memory_limit="128MiB"), 128 * 2**20)
    cpu = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8388608 bytes. Error code 12"
    assert memory_reason(cpu, config) == "8 MiB more did not fit into the limit of 128 MiB"
    cuda = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB"
    on_device = config.model_copy(update={"memory_limit_bytes": None})
    assert memory_reason(cuda, on_device) == "2.50 GiB more did not fit into the device"
