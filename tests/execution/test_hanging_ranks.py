"""Ranks that hang in a collective, as those of NCCL do where one of them has run out of memory, are released in seconds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ray import train
from ray.train import RunConfig, ScalingConfig

from batchscout.orchestrator.execution.controller import Ranks
from batchscout.orchestrator.execution.ray_private.train import LaneTrainer

pytestmark = pytest.mark.ray

SECONDS_TO_END = 15
"""What Ray may take to see that a rank has failed, and to end the processes of the others, on a busy machine."""


def fail_while_another_hangs(told: dict[str, Any]) -> None:
    """On a CPU the others of a group notice that one is gone; here they do not, for a minute."""

    def hang(*_: object) -> None:
        time.sleep(60)

    dist.barrier()
    dist.destroy_process_group = hang
    if train.get_context().get_world_rank() == 0:
        Path(told["failed_at"]).write_text(str(time.time()))
        raise MemoryError
    hang()


def test_what_hangs_where_another_failed_is_left_after_seconds(tmp_path: Path, ray_cluster: None) -> None:
    """Ray would wait for half a minute, and a study with many sizes that do not fit for as many of them."""
    failed_at = tmp_path / "failed_at"
    trainer = LaneTrainer(
        fail_while_another_hangs,
        train_loop_config={"failed_at": str(failed_at)},
        backend_config=Ranks("gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="hangs", storage_path=str(tmp_path)),
    )
    with pytest.raises(train.WorkerGroupError, match="MemoryError"):
        trainer.fit()
    waited = time.time() - float(failed_at.read_text())
    assert waited < SECONDS_TO_END
