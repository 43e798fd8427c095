"""A run whose batch grows takes every sample in its turn, and each of its steps is one of a run with that batch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from batchscout.trainers.config import Phase, TrialConfig
from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer, Report
from batchscout.trainers.step.learning_rate import learning_rate_of_step
from batchscout.trainers.step.ramps import doubling_ramp, linear_ramp
from batchscout.trainers.step_log import read_steps
from tests.support.ranks import on_two_ranks
from tests.support.run_curves import steps_taken
from tests.support.tiny import (
    assert_equal_bit_by_bit,
    config,
    cpu_run,
    gradient_of_step,
    newest_state,
    sample_numbers,
    stop_at,
)

RATE = 1e-2
BUDGET = 224


def rate_of(accumulation: int) -> float:
    return RATE * accumulation**0.5


def ramped(**changes: Any) -> TrialConfig:
    """Batches of 4, then from 32 samples of 8, and from 84 of 16: eight steps, seven, and nine."""
    fields: dict[str, Any] = {"dropout": 0.2, "learning_rate": RATE, "sample_budget": BUDGET, "evaluations": (BUDGET,)}
    fields |= {"ramp": doubling_ramp(1, (32, 84), rate_of)} | changes
    return config(**fields)


STEPS_OF_4, STEPS_OF_8, STEPS_OF_16 = range(4, 33, 4), range(40, 89, 8), range(104, 233, 16)


def final_state(trial: TrialConfig, directory: Path, *rungs: int) -> dict[str, Any]:
    """The state of a run that is stopped at these rungs and goes on."""
    report = stop_at(*rungs)
    while train(trial, report, directory) == Answer.STOP:
        torch.manual_seed(1000)  # what else the process draws is of no consequence
    return newest_state(directory / "checkpoints")


def test_a_phase_begins_with_the_first_step_at_or_past_its_sample_count(tmp_path: Path) -> None:
    train(ramped(schedule={"type": "constant"}), lambda report: None, tmp_path)
    steps = read_steps(tmp_path / "steps.jsonl")
    assert [step.samples_seen for step in steps] == [*STEPS_OF_4, *STEPS_OF_8, *STEPS_OF_16]
    rates = [step.learning_rate / RATE for step in steps]
    assert rates == pytest.approx([1.0] * 8 + [2**0.5] * 7 + [2.0] * 9, rel=1e-6)


def test_every_sample_is_taken_in_its_turn_whatever_the_phase() -> None:
    run = cpu_run(ramped())
    taken = sample_numbers(run)
    while run.samples_seen < BUDGET:
        first_sample, before = run.samples_seen, len(taken)
        run.step()
        assert sorted(taken[before:]) == list(range(first_sample, run.samples_seen))


def test_a_ramp_of_equal_phases_is_bit_by_bit_the_run_without_one(tmp_path: Path) -> None:
    same = tuple(Phase(from_samples=n, gradient_accumulation_steps=2, learning_rate=RATE) for n in (32, 84))
    changes: dict[str, Any] = {"gradient_accumulation_steps": 2, "ema_half_life_samples": 64, "warmup_samples": 40}
    plain, ramp = (
        final_state(ramped(ramp=phases, **changes), tmp_path / name) for name, phases in (("plain", ()), ("ramp", same))
    )
    assert_equal_bit_by_bit(plain, ramp)
    averages = [state["average"]["values"] for state in (plain, ramp)]
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))
    assert steps_taken(tmp_path / "plain" / "steps.jsonl") == steps_taken(tmp_path / "ramp" / "steps.jsonl")


def test_the_gradient_of_a_step_is_that_of_a_run_with_its_batch_on_the_same_samples() -> None:
    ramp, large = cpu_run(ramped(dropout=0.0)), cpu_run(ramped(dropout=0.0, gradient_accumulation_steps=4, ramp=()))
    while ramp.samples_seen < 88:
        ramp.step()
    large.module.load_state_dict(ramp.module.state_dict())
    large.samples_seen = 88
    found, expected = gradient_of_step(ramp), gradient_of_step(large)
    assert torch.equal(found, expected)
    assert found.norm() > 0


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return final_state(ramped(), tmp_path_factory.mktemp("never-stopped"))


@pytest.mark.parametrize("rungs", [(20,), (48,), (32,), (88,), (120,), (20, 33, 60, 200)], ids=str)
def test_a_run_stopped_in_any_phase_or_between_two_ends_bit_by_bit_as_one_that_was_not(
    tmp_path: Path, never_stopped: dict[str, Any], rungs: tuple[int, ...]
) -> None:
    found = final_state(ramped(rungs=rungs), tmp_path, *rungs)
    assert (found["num_steps"], found["samples_seen"]) == (24, 232)
    assert_equal_bit_by_bit(found, never_stopped)


def as_ranks(directory: str) -> Answer:
    return train(ramped(dropout=0.0, world_size=2, micro_batch_size=2), lambda report: None, Path(directory))


@pytest.mark.slow
def test_two_ranks_grow_their_batch_together(tmp_path: Path) -> None:
    on_two_ranks(as_ranks, tmp_path, str(tmp_path / "two"))
    alone = final_state(ramped(dropout=0.0), tmp_path / "one")["model"]
    for name, value in newest_state(tmp_path / "two" / "checkpoints")["model"].items():
        torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-5)


def test_no_estimate_mixes_phases(tmp_path: Path) -> None:
    told: list[Report] = []
    train(ramped(rungs=(88,)), told.append, tmp_path)
    state = newest_state(tmp_path / "checkpoints")
    assert len(state["noise_steps"]) == len(STEPS_OF_16)
    for report, batch in zip(told, (8, 16), strict=True):
        metrics = report.metrics
        assert metrics["epoch_seconds"] == pytest.approx(metrics["step_seconds"] * 64 / batch)
        assert metrics["gradient_snr"] == pytest.approx(batch / metrics["noise_scale"])


def test_no_interval_mixes_phases(tmp_path: Path) -> None:
    train(ramped(), lambda report: None, tmp_path)
    lines = [json.loads(line)["samples_seen"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [samples for line in lines for samples in line] == [*STEPS_OF_4, *STEPS_OF_8, *STEPS_OF_16]
    assert all(len({after - before for before, after in itertools.pairwise(line)}) <= 1 for line in lines)


def test_seconds_of_training_are_those_of_all_phases() -> None:
    run = cpu_run(ramped())
    seconds = [0.0]
    while run.samples_seen < BUDGET:
        run.step()
        run.read()
        seconds.append(run.metrics()["train_seconds"])
    assert seconds == sorted(seconds)
    assert all(after > before for before, after in itertools.pairwise(seconds))


@pytest.mark.parametrize("schedule", ["warmup_stable_decay", "cosine"])
def test_the_last_step_of_a_ramp_still_moves_and_warm_up_is_in_samples(schedule: str) -> None:
    trial = ramped(schedule={"type": schedule}, warmup_samples=64)
    assert learning_rate_of_step(trial, 28) == pytest.approx(RATE / 2)
    assert learning_rate_of_step(trial, 32) == pytest.approx(rate_of(2) * 40 / 64)
    last = learning_rate_of_step(trial, BUDGET - 8)
    assert 0 < last < 0.3 * rate_of(4)


@pytest.mark.parametrize("begin", [0, 36, 96])
def test_steps_are_counted_as_the_run_takes_them_from_where_it_begins(begin: int) -> None:
    point = {"directory": "source", "samples": begin} if begin else None
    trial, seen = ramped(branch_from=point), begin
    for number in range(1, 12):
        seen += trial.split_in(trial.phase_at(seen)).effective_batch_size
        assert trial.num_steps_at(seen) == number


def test_a_checkpoint_of_another_ramp_is_refused_with_both(tmp_path: Path) -> None:
    train(ramped(rungs=(40,)), stop_at(40), tmp_path)
    run = cpu_run(ramped(rungs=(40,), ramp=()))
    with pytest.warns(
        UserWarning, match=r"was made with the ramp \[\(32, 8\), \(84, 16\)\], and this run has \[\]; the run"
    ):
        run.resume(tmp_path)
    assert run.num_steps == 0


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        ((64, 32), r"a phase from 32 samples after one from 64; let each phase begin later than the one before it"),
        ((0,), r"a phase from 0 samples after one from 0; let each phase begin later than the one before it"),
        ((32, BUDGET), rf"from {BUDGET} samples, which the run never begins: its sample_budget is {BUDGET}; leave"),
    ],
)
def test_phases_out_of_order_or_past_the_budget_are_refused(begin: tuple[int, ...], message: str) -> None:
    phases = [Phase(from_samples=n, gradient_accumulation_steps=2, learning_rate=RATE) for n in begin]
    with pytest.raises(ValidationError, match=message):
        ramped(ramp=phases)


def test_a_ramp_goes_through_a_journal() -> None:
    assert TrialConfig.model_validate_json(ramped().model_dump_json()) == ramped()


def batches(phases: Iterable[Phase]) -> dict[int, int]:
    return {phase.from_samples: phase.gradient_accumulation_steps for phase in phases}


def test_a_doubling_ramp_doubles_at_each_count_at_the_callers_rates() -> None:
    phases = doubling_ramp(3, (100, 250, 900), rate_of)
    assert batches(phases) == {100: 6, 250: 12, 900: 24}
    assert [phase.learning_rate for phase in phases] == [rate_of(6), rate_of(12), rate_of(24)]


def test_a_linear_ramp_is_never_more_than_one_micro_batch_below_the_line() -> None:
    first, last, at_samples = 2, 9, 1000
    phases = linear_ramp(first, last, at_samples, rate_of)
    assert batches(linear_ramp(1, 5, 400, rate_of)) == {100: 2, 200: 3, 300: 4, 400: 5}
    trial = config(gradient_accumulation_steps=first, ramp=phases, sample_budget=2000)
    for sample in range(2000):
        line = min(last, first + (last - first) * sample / at_samples)
        assert math.floor(line - 0.01) <= trial.phase_at(sample).gradient_accumulation_steps <= line + 0.01
