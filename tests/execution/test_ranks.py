"""What a rank is told, and what it says of how its trial ended, without Ray."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.trial import base_trial
from orchestrator.execution.ranks import MOST_OF_A_TRACEBACK, _write_traceback, memory_reason
from orchestrator.study.messages import Assignment
from tests.support.studies import tiny_study


def test_out_of_memory_is_said_in_sizes() -> None:
    config = base_trial(tiny_study(memory_limit="128MiB"), 128 * 2**20)
    cpu = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8388608 bytes. Error code 12"
    assert memory_reason(cpu, config) == "8 MiB more did not fit into the limit of 128 MiB"
    cuda = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB"
    on_device = config.model_copy(update={"memory_limit_bytes": None})
    assert memory_reason(cuda, on_device) == "2.50 GiB more did not fit into the device"


def test_the_traceback_of_an_exception_of_50_mb_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    try:
        raise RuntimeError(f"it began {'x' * 50_000_000} and ended")
    except RuntimeError:
        _write_traceback(Assignment("a", "{}", str(tmp_path), "token"), rank=1)
    kept = (tmp_path / "error-rank1.log").read_text()
    assert len(kept) <= MOST_OF_A_TRACEBACK
    assert "in test_the_traceback_of_an_exception_of_50_mb" in kept
    assert "RuntimeError: it began xxx" in kept
    assert kept.rstrip().endswith("xxx and ended")
