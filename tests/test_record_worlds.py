"""What is recorded of a world is what runs of their own would have shown, and the recorded worlds can be judged in."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from record_worlds import (
    DECAY_START,
    RECIPES,
    Batches,
    Members,
    Pretraining,
    Recipe,
    places,
    rates_to_add,
    record,
    recorded,
    schedule_of,
    settings_at,
    starting,
    task_of,
)
from world_table import Run, World, load
from world_tasks import IGNORED, noisy_regression, sequences

from batchscout.orchestrator.config.keys import StudyOptimizer
from batchscout.trainers.step.learning_rate import learning_rate_of_step
from tests.support.every import for_every

WORLDS = Path(__file__).parents[1] / "benchmarks" / "worlds"
FILES = sorted(WORLDS.rglob("*.jsonl"))
TINY = Recipe(noisy_regression, {8: 0.004}, max_budget=1280, num_horizons=2, num_seeds=2, num_rates=3)
BATCH, WARMUP_STEPS = 8, 16


def test_a_branch_of_the_trunk_is_the_run_that_has_its_budget() -> None:
    task, members = TINY.task(TINY.max_budget), Members([0.004, 0.008], TINY.num_seeds)
    assert TINY.horizons(BATCH) == [640, 1280]
    for budget, points in recorded(TINY, task, BATCH, members):
        state, data = starting(TINY, task, BATCH, members), Batches(task.train, BATCH, TINY.max_budget, members)
        schedule, alone = schedule_of(BATCH, budget, WARMUP_STEPS), []
        for step in range(1, budget // BATCH + 1):
            state = state.step(*data.of_step(step), learning_rate_of_step(schedule, (step - 1) * BATCH))
            if step * BATCH in places(budget):
                alone.append((step * BATCH, state.losses(task.val.inputs, task.val.targets)))
        assert [samples for samples, _ in points] == [samples for samples, _ in alone]
        torch.testing.assert_close([losses for _, losses in points], [losses for _, losses in alone], rtol=0, atol=0)


def test_the_trunk_ends_where_the_rate_begins_to_fall() -> None:
    schedule = schedule_of(8, 1280, 10)
    assert learning_rate_of_step(schedule, int(DECAY_START * 1280) - 8) == 1
    assert learning_rate_of_step(schedule, int(DECAY_START * 1280)) < 1


def test_a_recording_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, recipe = tmp_path / "tiny.jsonl", replace(TINY, centres={8: 0.004, 16: 0.004})
    record("tiny", recipe, file)
    whole = file.read_text().splitlines(keepends=True)
    kept = [line for line in whole if '"effective_batch_size":8,' in line]
    assert 0 < len(kept) < len(whole)
    file.write_text("".join(kept))
    record("tiny", recipe, file)
    assert file.read_text() == "".join(whole)


def test_the_runs_of_finetuning_begin_with_what_a_run_on_other_samples_ended_with() -> None:
    before = Pretraining(noisy_regression, batch=8, learning_rate=0.004, sample_budget=1280)
    recipe = replace(TINY, begins_with=before, passes=4)
    task, members = task_of(recipe), Members([0.004, 0.008], TINY.num_seeds)
    assert len(task.train) == TINY.max_budget // 4
    alone = starting(TINY, TINY.task(1280), 8, Members([0.004], num_seeds=1))
    untrained = alone.losses(task.val.inputs, task.val.targets)
    begun = starting(recipe, task, 16, members)
    losses = begun.losses(task.val.inputs, task.val.targets)
    assert torch.equal(begun.weights, begun.weights[:1].expand_as(begun.weights)), "whatever the rate and the seed"
    assert len(losses) == 4
    assert losses.max() < 0.9 * untrained.min()


def world_with_best(rate: float) -> World:
    rates = TINY.rates(BATCH)
    return World("w", tuple(Run(BATCH, r, 0, 640, ((640, abs(math.log(r / rate))),)) for r in rates))


def test_a_grid_grows_beyond_the_edge_that_is_best() -> None:
    assert rates_to_add(TINY, None, BATCH) == [0.002, 0.004, 0.008]
    assert rates_to_add(TINY, world_with_best(0.004), BATCH) == []
    assert rates_to_add(TINY, world_with_best(0.001), BATCH) == [0.0005, 0.001]
    assert rates_to_add(TINY, world_with_best(0.016), BATCH) == [0.016, 0.032]


def test_what_follows_the_batch_is_written_beside_the_run() -> None:
    both = StudyOptimizer(
        lr=0.004, reference_batch_size=8, beta2_scaling="samples", weight_decay_scaling="samples", weight_decay=0.1
    )
    assert settings_at(TINY, 16, 0.008) == {}
    found = settings_at(replace(TINY, settings=both), 16, 0.004)
    assert found == {"betas": [0.9, pytest.approx(0.9025)], "weight_decay": pytest.approx(0.2)}


def test_sequences_ask_for_their_digits_in_order() -> None:
    train = sequences(200).train
    for inputs, targets in zip(train.inputs.tolist(), train.targets.tolist(), strict=True):
        asked = [target for target in targets if target != IGNORED]
        assert asked == sorted(inputs[: len(asked)])
        assert 2 <= len(asked) <= 8
    assert len({(row != IGNORED).sum().item() for row in train.targets}) == 7


def test_every_world_has_its_recipe() -> None:
    assert {file.stem for file in WORLDS.glob("*.jsonl")} <= RECIPES.keys()


def test_the_worlds_are_small() -> None:
    assert 0 < sum(file.stat().st_size for file in FILES) < 2e6


@for_every(file=sorted(WORLDS.glob("*.jsonl")))
def test_a_recorded_world_can_be_judged_in(file: Path) -> None:
    world = load(file)
    batches = world.batches()
    assert len(batches) >= 4
    assert batches[-1] >= 64 * batches[0]
    assert len(world.seeds()) >= 2
    for batch in batches:
        assert len(world.rates(batch)) >= 5
        assert len(world.budgets(batch)) >= 2
    assert {(run.effective_batch_size, run.learning_rate, run.seed, run.sample_budget) for run in world.runs} == {
        (batch, rate, seed, budget)
        for batch in batches for rate in world.rates(batch) for seed in world.seeds() for budget in world.budgets(batch)
    }  # fmt: skip


@for_every(file=FILES)
def test_the_best_rate_lies_inside_those_of_its_batch(file: Path) -> None:
    world = load(file)
    for batch in world.batches():
        for budget in world.budgets(batch):
            finals = world.final_losses(batch, budget)
            best = min(finals, key=lambda rate: finals[rate])
            assert min(finals) < best < max(finals), (batch, budget)
