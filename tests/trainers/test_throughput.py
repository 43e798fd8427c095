"""What seconds per step are made into."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.tiny import config, cpu_run
from trainers.gpt import GPT
from trainers.throughput import (
    NUM_WARMUP_STEPS,
    RECENT_STEPS,
    Pace,
    model_flops_per_token,
    peak_flops,
    recomputed_share,
    utilisation,
)


def test_a_tied_head_multiplies_and_a_table_that_is_only_looked_up_does_not() -> None:
    gpt = GPT(vocab_size=64, seq_len=16, num_layers=2, num_heads=2, hidden_dim=32)
    positions = gpt.position_embedding.weight.numel()
    assert model_flops_per_token(gpt) == 6 * (sum(p.numel() for p in gpt.parameters()) - positions)
    assert model_flops_per_token(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3, bias=False))) == 6 * 12


@pytest.mark.parametrize("world_size", [1, 4])
def test_utilisation_is_the_work_of_one_rank_over_the_peak(world_size: int) -> None:
    model, trial = nn.Linear(10, 10, bias=False), config(world_size=world_size)
    found = utilisation(model, trial, peak=1e6, tokens_per_second=1_000.0 * world_size)
    assert found == {"mfu": pytest.approx(0.6), "hfu": pytest.approx(0.6), "assumed_peak_flops": 1e6}
    assert "hfu" not in utilisation(model, config(activation_checkpointing="selective"), 1e6, 1.0)


def counted_flops(mode: str) -> int:
    with FlopCounterMode(display=False) as counter:
        cpu_run(config(activation_checkpointing=mode)).step()
    return counter.get_total_flops()


def test_full_checkpointing_recomputes_what_the_flop_counter_says() -> None:
    trial = config(activation_checkpointing="full")
    share = recomputed_share(cpu_run(trial).module, trial)
    assert share is not None
    assert 1 + share == pytest.approx(counted_flops("full") / counted_flops("none"), rel=0.02)


def test_a_cpu_is_measured_once_and_every_trial_of_a_process_is_held_against_the_same_peak() -> None:
    first = peak_flops(torch.device("cpu"), "float32")
    assert first is not None
    assert first > 1e8
    assert peak_flops(torch.device("cpu"), "float32") == first


def test_without_a_known_peak_there_is_no_utilisation() -> None:
    assert utilisation(nn.Linear(1, 1), config(), None, 1_000.0) == {}


def pace_of(seconds: Sequence[float], amounts: Sequence[float]) -> Pace:
    pace = Pace(torch.device("cpu"))
    for second, amount in zip(seconds, amounts, strict=True):
        pace.add(second, amount)
    return pace


def test_the_rate_is_the_median_over_steps_of_each_steps_own_targets() -> None:
    warm_up = [9.0] * NUM_WARMUP_STEPS
    pace = pace_of([*warm_up, 1.0, 2.0, 4.0], [1.0] * NUM_WARMUP_STEPS + [100.0, 200.0, 800.0])
    assert pace.median_rate() == 100.0
    assert pace.median_step_seconds() == 2.0
    assert pace.total_seconds() == sum(warm_up) + 7.0
    assert pace_of(warm_up, warm_up).median_rate() is None


def test_a_long_run_says_how_fast_it_is_now() -> None:
    pace = pace_of([1.0] * 3 * RECENT_STEPS + [2.0] * RECENT_STEPS, [10.0] * 4 * RECENT_STEPS)
    assert pace.median_step_seconds() == 2.0
    assert pace.median_rate() == 5.0
    assert pace.total_seconds() == 5.0 * RECENT_STEPS
