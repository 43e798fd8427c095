"""A recorded world is read back as it was written, between what was recorded by rule, and beyond it not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from world_table import World, load

from tests.support.every import for_every

FRACTIONS = (0.25, 0.5, 0.75, 1.0)


def loss_of(batch: int, rate: float, seed: int, budget: int, fraction: float) -> float:
    """A surface that is linear in everything in which a world interpolates linearly."""
    return 9 + 0.1 * math.log(batch) + 0.2 * math.log(rate) - 0.3 * math.log(budget) - fraction + 0.01 * seed


def line(batch: int = 4, rate: float = 0.01, seed: int = 0, budget: int = 1000, **changes: Any) -> dict[str, Any]:
    points = [[round(f * budget), loss_of(batch, rate, seed, budget, f)] for f in FRACTIONS]
    keys = {"effective_batch_size": batch, "learning_rate": rate, "seed": seed, "sample_budget": budget}
    return keys | {"points": points} | changes


def grid() -> list[dict[str, Any]]:
    return [line(b, r, s, n) for b in (4, 64) for r in (0.01, 0.04) for s in (0, 1) for n in (1000, 4000)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "toy.jsonl"


def world_of(table: Path, lines: list[dict[str, Any]]) -> World:
    table.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return load(table)


def test_a_world_says_what_was_recorded(table: Path) -> None:
    world = world_of(table, [*grid(), line(4, 0.16, 2, 8000, betas=[0.9, 0.99])])
    assert (world.name, world.batches(), world.seeds()) == ("toy", [4, 64], [0, 1, 2])
    assert (world.rates(4), world.rates(64)) == ([0.01, 0.04, 0.16], [0.01, 0.04])
    assert (world.budgets(4), world.budgets(64)) == ([1000, 4000, 8000], [1000, 4000])
    assert world.runs[-1].other_keys == {"betas": [0.9, 0.99]}


@for_every(rate=[0.01, 0.015, 0.04], budget=[1000, 1700, 4000], fraction=[0.25, 0.4, 1.0])
def test_between_what_was_recorded_a_linear_surface_is_met_exactly(
    table: Path, rate: float, budget: int, fraction: float
) -> None:
    found = world_of(table, grid()).loss(64, rate, 1, budget, fraction * budget)
    assert found == pytest.approx(loss_of(64, rate, 1, budget, fraction), abs=1e-12)


def test_before_the_first_point_the_loss_is_that_of_the_first(table: Path) -> None:
    world = world_of(table, grid())
    assert world.loss(4, 0.01, 0, 1000, 0) == world.loss(4, 0.01, 0, 1000, 250)


def test_a_rate_that_is_written_with_other_digits_is_the_same(table: Path) -> None:
    world = world_of(table, [line(rate=0.1 + 0.2), line(rate=0.6)])
    assert world.loss(4, 0.3, 0, 1000, 1000) == world.loss(4, 0.1 + 0.2, 0, 1000, 1000)


@pytest.mark.parametrize(("rate", "diverged"), [(0.01, False), (0.02, False), (0.0201, True), (0.04, True)])
def test_beside_a_diverged_rate_the_nearer_one_decides(table: Path, rate: float, diverged: bool) -> None:
    whole = line(rate=0.01)
    world = world_of(table, [whole, line(rate=0.04, points=[[250, 8.0], [500, None]])])
    assert world.loss(4, rate, 0, 1000, 1000) == (None if diverged else whole["points"][-1][1])


def test_a_run_that_has_diverged_stays_so(table: Path) -> None:
    world = world_of(table, [line(points=[[250, 8.0], [500, None], [1000, 3.0]])])
    losses = [world.loss(4, 0.01, 0, 1000, samples) for samples in (250, 370, 380, 500, 1000)]
    assert losses == [8.0, 8.0, None, None, None]


def test_a_rate_at_which_any_seed_diverged_is_never_the_best(table: Path) -> None:
    world = world_of(table, [*grid(), line(rate=0.16, seed=0), line(rate=0.16, seed=1, points=[[250, None]])])
    finals = world.final_losses(4, 1000)
    assert finals[0.16] == math.inf
    assert finals[0.04] == pytest.approx(loss_of(4, 0.04, 0, 1000, 1.0) + 0.005)


def test_a_bare_null_is_a_divergence_after_the_point_before_it(table: Path) -> None:
    world = world_of(table, [line(points=[[250, 8.0], None, None])])
    assert [world.loss(4, 0.01, 0, 1000, samples) for samples in (250, 252, 1000)] == [8.0, None, None]


def test_budgets_may_hold_other_rates_and_other_points(table: Path) -> None:
    short = [line(rate=rate, points=[[500, 4.0], [1000, 2.0]]) for rate in (0.01, 0.02)]
    long = [line(rate=rate, budget=4000, points=[[1000, 3.0], [4000, 1.0]]) for rate in (0.005, 0.08)]
    world = world_of(table, short + long)
    assert world.loss(4, 0.015, 0, 2000, 2000) == pytest.approx(1.5)
    with pytest.raises(
        ValueError, match=r"learning_rate of batch 4 at 1,000 samples is 0\.04, and recorded is 0\.01, 0\.02"
    ):
        world.loss(4, 0.04, 0, 2000, 2000)


def test_where_each_run_has_its_own_seeds_each_seed_is_answered_by_one_of_them(table: Path) -> None:
    world = world_of(table, [line(rate=0.01, seed=7), line(rate=0.01, seed=9), line(rate=0.04, seed=8)])
    assert [world.loss(4, 0.01, seed, 1000, 1000) for seed in (7, 8, 9)] == [
        pytest.approx(loss_of(4, 0.01, seed, 1000, 1.0)) for seed in (7, 9, 9)
    ]


@pytest.mark.parametrize(("asked", "says"), [
    ((16, 0.01, 0, 1000, 10), r"world toy: effective_batch_size is 16, and recorded is 4, 64; ask within that"),
    ((4, 0.08, 0, 1000, 10), "world toy: learning_rate of batch 4 at 1,000 samples is 0.08, and recorded is 0.01, 0.04"),
    ((4, 0.01, 5, 1000, 10), "world toy: seed is 5, and recorded is 0, 1"),
    ((4, 0.01, 0, 500, 10), "world toy: sample_budget of batch 4 is 500, and recorded is 1000, 4000"),
    ((4, 0.01, 0, 1000, 1001), "world toy: samples_seen is 1001, and recorded is 0, 1000"),
])  # fmt: skip
def test_what_was_not_recorded_is_refused_by_name(table: Path, asked: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        world_of(table, grid()).loss(*asked)


@pytest.mark.parametrize(("wrong", "says"), [
    ("{", "not JSON"),
    ("[1]", "is no object"),
    (json.dumps(line() | {"seed": None}), "seed is None; write a number"),
    (json.dumps(line() | {"effective_batch_size": 0}), "must all be above 0"),
    (json.dumps(line() | {"effective_batch_size": 1.5}), "effective_batch_size is 1.5; write a whole number"),
    (json.dumps(line(points=[])), "points is \\[\\]"),
    (json.dumps(line(points=[[100, "low"]])), "is not \\[samples seen, loss\\]"),
    (json.dumps(line(points=[[100, 1.0], [100, 0.9]])), "a point at 100 samples follows one at 100"),
    (json.dumps(line(points=[[100, math.nan]])), "NaN is no JSON number; write null"),
    (json.dumps(line(seed=1)), "stand on an earlier line; keep one"),
])  # fmt: skip
def test_a_malformed_line_is_refused_by_file_and_number(table: Path, wrong: str, says: str) -> None:
    table.write_text(json.dumps(line()) + "\n\n" + json.dumps(line(seed=1)) + "\n" + wrong + "\n")
    with pytest.raises(ValueError, match=f"toy.jsonl, line 4: .*{says}"):
        load(table)


def test_a_table_without_runs_is_refused(table: Path) -> None:
    table.write_text("\n")
    with pytest.raises(ValueError, match="holds no run"):
        load(table)
