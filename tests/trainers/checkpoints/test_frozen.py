"""Weights that are not trained are in no checkpoint, and a run goes on as if they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.checksums import load_tensors
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.loop import train
from batchscout.trainers.model import frozen
from batchscout.trainers.model.frozen import frozen_of
from batchscout.trainers.model.gpt import GPT
from batchscout.trainers.model.models import initial_module
from batchscout.trainers.notices import heard_by
from batchscout.trainers.report import Answer, Report
from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run, gradient_of_step, newest_state, relative_error


class HalfFrozen(GPT):
    """Its tied embedding and its first block are not trained."""

    def __init__(self, *, vocab_size: int, seq_len: int) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=2, num_heads=2, hidden_dim=16)
        for part in (self.token_embedding, self.blocks[0]):
            part.requires_grad_(False)


def trial(**changes: Any) -> TrialConfig:
    own: dict[str, Any] = {
        "model": {"target": f"{__name__}:HalfFrozen"},
        "evaluations": (32, 64),
        "ema_half_life_samples": 16,
    }
    return config(**(own | changes))


def stop_at(samples: int) -> Any:
    return lambda report: Answer.STOP if report.samples_seen >= samples else Answer.GO_ON


def stopped(directory: Path, **changes: Any) -> Path:
    """Train halfway; return the checkpoint."""
    assert train(trial(**changes), stop_at(32), directory) is Answer.STOP
    (path,) = (directory / "checkpoints").glob("*.pt")
    return path


def test_a_run_goes_on_to_the_same_end_from_what_is_trained_alone(tmp_path: Path) -> None:
    train(trial(), lambda _: None, tmp_path / "whole")
    saved = load_tensors(stopped(tmp_path / "parts"))["model"]
    module = initial_module(trial(), cpu_run(trial()).train_set)
    assert {"head.weight", "token_embedding.weight"} <= frozen_of(module).keys()
    assert saved.keys() == module.state_dict().keys() - frozen_of(module).keys()
    assert train(trial(), lambda _: None, tmp_path / "parts") is Answer.GO_ON
    ends = [newest_state(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert ends[0]["samples_seen"] == ends[1]["samples_seen"] == 64
    for part in ("model", "average"):
        torch.testing.assert_close(ends[0][part], ends[1][part], rtol=0, atol=0)


def test_a_checkpoint_over_other_frozen_weights_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path)
    monkeypatch.setattr(frozen, "_digests", {})  # as in another process
    monkeypatch.setattr(GPT, "__init__", _with_another_embedding(GPT.__init__))
    notices: list[str] = []
    seen: list[int] = []

    def report(one: Report) -> None:
        seen.append(one.samples_seen)
        if one.notice is not None:
            notices.append(one.notice.text)

    with heard_by(lambda notice: notices.append(notice.text)):
        train(trial(), report, tmp_path)
    assert "was made with other weights that are not trained; the run begins again" in notices[0]
    assert 32 in seen


def _with_another_embedding(init: Any) -> Any:
    def other(self: GPT, **kwargs: Any) -> None:
        init(self, **kwargs)
        with torch.no_grad():
            self.token_embedding.weight.mul_(2.0)

    return other


def test_the_distance_of_two_ends_is_that_of_what_is_trained(tmp_path: Path) -> None:
    reference = {"save_weights": True, "sample_budget": 16, "evaluations": ()}
    train(trial(**reference), lambda _: None, tmp_path / "reference")
    held = load_tensors(tmp_path / "reference" / "weights.pt")
    assert held["final"].keys() == held["initial"].keys()
    assert "blocks.1.up.weight" in held["final"]
    assert "blocks.0.up.weight" not in held["final"]
    found: dict[str, float] = {}
    changes = reference | {"save_weights": False, "reference_weights": "../reference/weights.pt", "micro_batch_size": 2}
    train(
        trial(**changes, gradient_accumulation_steps=2), lambda report: found.update(report.metrics), tmp_path / "other"
    )
    assert 0 < found["rho"] < 1e-3


SHARES = {"micro_batch_size": 2, "world_size": 2}


def on_ranks(directory: str, parallel: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Train in two parts; return the gradient of the first step, and rank 0's last checkpoint."""
    of_ranks = trial(**SHARES, parallel=parallel)
    gradient = gradient_of_step(cpu_run(of_ranks))
    for end in (32, 64):
        train(of_ranks, stop_at(end), Path(directory))
    return gradient, newest_state(Path(directory) / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_train_and_go_on_with_frozen_weights_as_one_process_does(tmp_path: Path, parallel: str) -> None:
    alone = gradient_of_step(cpu_run(trial()))
    train(trial(), lambda _: None, tmp_path / "alone")
    expected = newest_state(tmp_path / "alone" / "checkpoints")["model"]
    gradient, state = on_two_ranks(on_ranks, tmp_path, str(tmp_path / parallel), parallel)[0]
    assert relative_error(gradient, alone) < 1e-5
    assert state["samples_seen"] == 64
    torch.testing.assert_close(state["model"], expected, rtol=1e-4, atol=1e-5)
