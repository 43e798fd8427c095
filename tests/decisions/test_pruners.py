"""Who goes on at a rung, and what is stopped between rungs."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from batchscout.orchestrator.config.stages import AshaPruner, NoPruner
from batchscout.orchestrator.decisions.decision import Action
from batchscout.orchestrator.decisions.kill_rules import judge_losses, judge_plan, judge_throughput
from batchscout.orchestrator.decisions.pruners import Demand, Entrant, early_places, judge_rung, mean_of_seeds
from tests.support.every import for_every

RULES = {"spike_deviations": 6.0, "spike_steps": 3, "above_start": 1.1}


IDLE = Demand(idle=True)
DEMANDS = [Demand(), Demand(100.0), IDLE]


def judge(
    entrants: list[Entrant], factor: int = 2, *, synchronous: bool = True, **circumstances: Any
) -> dict[str, Action]:
    verdicts = judge_rung("64 samples", entrants, factor, synchronous=synchronous, **circumstances)
    return {name: decision.action for name, decision in verdicts.items()}


def arrived(*values: float | None) -> list[Entrant]:
    return [Entrant(f"t{i}", value) for i, value in enumerate(values)]


def test_rungs_are_the_first_times_powers_of_the_factor_below_the_budget() -> None:
    assert AshaPruner(min_samples=64, reduction_factor=2).rungs(512, 512) == (64, 128, 256)
    assert AshaPruner(min_samples=64, reduction_factor=3).rungs(577, 577) == (64, 192, 576)
    assert AshaPruner(min_samples=512).rungs(512, 512) == ()
    assert AshaPruner().rungs(512, 512) == (128, 256), "a quarter of the budget"
    assert NoPruner().rungs(512, 512) == ()


@for_every(budget=[512, 10_001, 10_002, 67_349], own=[64, 333, 1023, 8551])
def test_the_second_rung_of_every_run_is_at_half_of_it_where_those_of_all_batches_meet(budget: int, own: int) -> None:
    """One sample less, and no run would be held against those of another batch."""
    _, half = AshaPruner().rungs(budget, own)
    assert own / 2 <= half < own / 2 + 2


@for_every(budget=[64, 100, 333, 512, 1024, 5000], first=[None, 32, 64, 511], factor=[2, 3])
def test_the_rungs_of_every_budget_lie_at_the_same_shares_of_it(budget: int, first: int | None, factor: int) -> None:
    pruner = AshaPruner(min_samples=first, reduction_factor=factor)
    baselines, rungs = pruner.rungs(512, 512), pruner.rungs(512, budget)
    assert len(rungs) == len(baselines) > 0
    for rung, baselines_rung in zip(rungs, baselines, strict=True):
        assert rung / budget == pytest.approx(baselines_rung / 512, abs=1 / budget)
        assert 0 < rung < budget


@for_every(num=range(1, 10), factor=[2, 3, 4], synchronous=[True, False])
def test_when_all_are_there_the_best_share_rounded_up_goes_on(num: int, factor: int, synchronous: bool) -> None:
    values = [float(value) for value in range(num)]
    random.Random(num).shuffle(values)
    verdicts = judge(arrived(*values), factor, synchronous=synchronous)
    on = [values[int(name[1:])] for name, action in verdicts.items() if action == "go on"]
    assert sorted(on) == list(range(math.ceil(num / factor)))
    assert all(action != "pause" for action in verdicts.values())


def test_who_ties_with_the_last_to_go_on_goes_on_too() -> None:
    everyone = {"t0": "go on", "t1": "go on", "t2": "go on", "t3": "go on"}
    assert judge(arrived(1.0, 2.0, 2.0, 2.0)) == everyone
    assert judge(arrived(1.0, 2.0, 2.0, 2.0, None), synchronous=False) == everyone


def test_whoever_trails_the_best_by_no_more_than_the_tie_goes_on_and_the_others_of_the_worse_half_are_cut() -> None:
    values = (1.0, 1.2, 1.5, 1.51, 9.0)
    assert [*judge(arrived(*values), tie=0.5).values()] == ["go on", "go on", "go on", "stop", "stop"]
    assert [*judge(arrived(*values), tie=0.6).values()] == ["go on"] * 4 + ["stop"]
    assert [*judge(arrived(*values), tie=0.1).values()] == ["go on"] * 3 + ["stop"] * 2, "the better half"


def test_synchronous_the_tied_wait_for_those_who_may_be_so_good_that_they_no_longer_are() -> None:
    assert judge(arrived(1.0, 1.2, 1.4, None), tie=0.5) == {"t0": "go on", "t1": "pause", "t2": "pause"}
    assert judge(arrived(1.0, 1.2, 1.4, 0.8), tie=0.5) == {"t3": "go on", "t0": "go on", "t1": "go on", "t2": "stop"}


def test_the_protected_are_never_cut_nor_do_they_wait() -> None:
    worst = Entrant("baseline", 9.0, stays="never cut before the end")
    assert judge([*arrived(1.0, 2.0, 3.0), worst])["baseline"] == "go on"
    assert judge([*arrived(1.0, None, None), worst])["baseline"] == "go on"


def test_not_a_number_is_the_worst_value_there_is() -> None:
    assert judge(arrived(math.nan, 5.0, math.inf, 1.0)) == {"t3": "go on", "t1": "go on", "t0": "stop", "t2": "stop"}


def test_synchronous_everyone_waits_for_those_who_can_still_change_the_verdict() -> None:
    assert judge(arrived(1.0, 2.0, None, None)) == {"t0": "pause", "t1": "pause"}
    assert judge(arrived(1.0, 2.0, 3.0, None)) == {"t0": "go on", "t1": "pause", "t2": "stop"}
    gone = Entrant("t3", None, out=True)
    assert judge([*arrived(1.0, 2.0, 3.0), gone]) == {"t0": "go on", "t1": "go on", "t2": "stop"}


@for_every(seed=range(100))
def test_synchronous_a_verdict_before_all_have_come_is_the_one_they_would_have_had_then(seed: int) -> None:
    """Whatever those who were missing bring, and whether they come or end on the way: no clock decides."""
    draw = random.Random(seed)
    tie = draw.choice([0.0, 0.5])
    factor, num, num_here = draw.choice([2, 3, 4]), draw.randint(2, 12), draw.randint(1, 12)
    values = [draw.choice([1.0, 2.0, math.nan, draw.uniform(0, 3)]) for _ in range(num)]
    early = judge(arrived(*values[:num_here], *[None] * (num - num_here)), factor, tie=tie)
    late = [Entrant(e.name, None, out=True) if draw.random() < 0.3 else e for e in arrived(*values)[num_here:]]
    final = judge([*arrived(*values)[:num_here], *late], factor, tie=tie)
    assert all(action in ("pause", final[name]) for name, action in early.items())


def test_asynchronous_decides_for_the_best_at_once_and_against_those_that_have_no_chance_left() -> None:
    verdicts = judge(arrived(1.0, 2.0, 3.0, 4.0, None), synchronous=False)
    assert verdicts == {"t0": "go on", "t1": "go on", "t2": "pause", "t3": "stop"}
    assert judge(arrived(1.0, 2.0, 3.0, 4.0, 5.0), synchronous=False)["t2"] == "go on"


def test_asynchronous_the_first_to_arrive_does_not_pass_unseen_while_others_want_its_lane() -> None:
    """Ray's ASHA always lets it."""
    first = arrived(1.0, None, None, None)
    assert judge(first, synchronous=False) == {"t0": "pause"}
    assert judge(first, synchronous=False, demand=IDLE) == {"t0": "go on"}
    assert judge(first, synchronous=True, demand=IDLE) == {"t0": "pause"}


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_early_places_are_rounded_down_up_where_a_lane_idles_and_few_while_newcomers_crowd(factor: int) -> None:
    enough, fewer = Demand(factor**2), Demand(factor**2 - 0.01)
    for num in range(1, 100):
        assert early_places(num, factor, first=True, demand=fewer) == num // factor
        assert early_places(num, factor, first=True, demand=enough) == num // factor**2
        assert early_places(num, factor, first=False, demand=enough) == num // factor
        assert early_places(num, factor, first=True, demand=IDLE) == math.ceil(num / factor)


@for_every(seed=range(40), demand=DEMANDS)
def test_nobody_is_cut_but_by_as_many_better_peers_as_go_on_when_all_have_come(seed: int, demand: Demand) -> None:
    draw = random.Random(seed)
    factor, num = draw.choice([2, 3, 4]), draw.randint(1, 12)
    values = [draw.choice([1.0, 2.0, 3.0, draw.random(), None]) for _ in range(num)]
    for synchronous in (True, False):
        verdicts = judge(arrived(*values), factor, synchronous=synchronous, first=True, demand=demand)
        cut = [values[int(name[1:])] for name, action in verdicts.items() if action == "stop"]
        for value in cut:
            assert value is not None, "who has no value yet is not cut"
            assert sum(peer < value for peer in values if peer is not None) >= math.ceil(num / factor)


@pytest.mark.parametrize("demand", DEMANDS)
def test_who_wants_the_lanes_decides_nothing_once_all_have_come_nor_in_the_synchronous_mode(demand: Demand) -> None:
    for values in ((3.0, 1.0, 2.0, 5.0, 4.0), (3.0, 1.0, None, 5.0, 4.0)):
        for synchronous in (True, False):
            if synchronous or None not in values:
                verdicts = judge(arrived(*values), synchronous=synchronous, first=True, demand=demand)
                assert verdicts == judge(arrived(*values), synchronous=synchronous)


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_late_arrival_is_judged_with_all_that_is_known_not_with_the_places_that_are_left(synchronous: bool) -> None:
    """Those before it have taken both places of four."""
    before = [Entrant("a", 2.0, promoted=True), Entrant("b", 3.0, promoted=True), Entrant("c", 4.0, out=True)]
    assert judge([*before, Entrant("late", 1.0)], synchronous=synchronous) == {"late": "go on"}
    assert judge([*before, Entrant("late", 2.5)], synchronous=synchronous) == {"late": "go on"}
    assert judge([*before, Entrant("late", 3.5)], synchronous=synchronous) == {"late": "stop"}


def test_nobody_at_the_rung_or_everyone_out_is_no_verdict() -> None:
    assert judge([]) == {}
    assert judge(arrived(None, None)) == {}
    assert judge([Entrant("a", 1.0, out=True), Entrant("b", None, out=True)]) == {}


def test_who_was_let_past_or_has_ended_is_not_judged_again_but_counts() -> None:
    entrants = [Entrant("past", 1.0, promoted=True), Entrant("cut", 2.0, out=True), Entrant("new", 3.0)]
    assert judge(entrants) == {"new": "stop"}


def test_verdicts_do_not_depend_on_the_order_of_arrival() -> None:
    for entrants in itertools.permutations(arrived(3.0, 1.0, math.nan, 1.0, 2.0)):
        assert judge(list(entrants)) == judge(arrived(3.0, 1.0, math.nan, 1.0, 2.0))


def test_the_reason_has_the_place_the_number_and_how_many_go_on() -> None:
    verdicts = judge_rung("64 samples", arrived(1.0, 2.0, 3.0), 2, synchronous=True)
    assert verdicts["t2"].reason == "ranked 3 of 3 after 64 samples; the best 2 continue"


def test_seeds_are_judged_by_their_mean_and_only_together() -> None:
    assert mean_of_seeds({"a-s0": 1.0, "a-s1": 3.0}) == 2.0
    assert mean_of_seeds({"a-s0": 1.0, "a-s1": None}) is None
    with_nan = mean_of_seeds({"a-s0": 1.0, "a-s1": math.nan})
    assert with_nan is not None
    assert math.isnan(with_nan)
    assert mean_of_seeds({}) is None


# Losses


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 1, 30])
def test_a_loss_that_is_not_finite_stops_at_once_whatever_is_turned_off(bad: float, step: int) -> None:
    losses = [3.0] * step + [bad] + [3.0] * 5
    decision = judge_losses(losses, 0, None, 3, None)
    assert decision.action == "stop"
    assert decision.reason == f"the loss is {bad} in step {step + 1}"


def healthy(seed: int, noise: float = 0.05) -> list[float]:
    draw = random.Random(seed)
    return [(3 + 7 * math.exp(-step / 40)) * draw.gauss(1, noise) for step in range(200)]


def stopped_at(losses: list[float], num_warmup_steps: int = 10, read_every: int = 1) -> int | None:
    """The first step after which the rules stop it, asked as the Director asks: after every few steps."""
    for end in range(read_every, len(losses) + 1, read_every):
        if judge_losses(losses[:end], num_warmup_steps, **RULES).action == "stop":
            return end
    return None


@pytest.mark.parametrize(("noise", "read_every"), [(0.02, 1), (0.05, 5), (0.15, 5)])
def test_fewer_than_2_percent_of_healthy_noisy_runs_are_killed(noise: float, read_every: int) -> None:
    killed = [seed for seed in range(200) if stopped_at(healthy(seed, noise=noise), read_every=read_every)]
    assert len(killed) < 4


@pytest.mark.parametrize("num_targets", [8, 16, 64])
def test_fewer_than_2_percent_of_runs_are_killed_whose_loss_is_noisy_and_hardly_falls(num_targets: int) -> None:
    """Each loss is the mean of so many squared errors, as of a regression whose targets are mostly noise."""
    random, killed = np.random.default_rng(1), 0
    for _ in range(200):
        falls = 1 - 0.1 * np.arange(120) / 120
        losses = [float(loss) for loss in falls * (random.standard_normal((120, num_targets)) ** 2).mean(axis=1)]
        killed += stopped_at(losses, read_every=4) is not None
    assert killed < 4


def test_a_sustained_spike_stops_and_a_single_one_does_not() -> None:
    losses = healthy(1)[:100]
    assert stopped_at([*losses, 30.0, *healthy(2)[100:]]) is None
    assert stopped_at([*losses, 30.0, 30.0, *healthy(2)[100:]]) is None
    assert stopped_at([*losses, 30.0, 31.0, 32.0]) == 103


@pytest.mark.parametrize(("steps", "counted"), [(1, " in 1 step ("), (3, " in 3 steps in a row (")])
def test_how_many_steps_a_spike_lasted_is_counted(steps: int, counted: str) -> None:
    losses = [5.0, 5.1, 4.9] * 20 + [50.0] * steps
    assert counted in judge_losses(losses, 0, **RULES | {"spike_steps": steps}).reason


def test_a_spike_needs_a_history_to_be_one() -> None:
    assert judge_losses([3.0, 3.1, 2.9, 50.0, 50.0, 50.0], 6, 6.0, 3, None).action == "go on"


def test_a_flat_loss_has_no_spread_to_measure_a_spike_with() -> None:
    assert judge_losses([3.0] * 60 + [3.001] * 3, 0, **RULES).action == "go on"


def test_rising_above_the_start_after_warm_up_stops_and_rising_during_warm_up_does_not() -> None:
    rising = [5 + step / 20 for step in range(100)]
    assert stopped_at(rising, num_warmup_steps=0) in range(11, 30)
    assert stopped_at(rising, num_warmup_steps=60) in range(60, 71)
    assert stopped_at([5 + step / 20 for step in range(60)], num_warmup_steps=60) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_falls_below_zero_goes_on_and_one_that_rises_is_stopped(sign: int) -> None:
    falling = [-2.0 - sign * step / 250 for step in range(100)]
    assert (stopped_at(falling, num_warmup_steps=0) is None) == (sign == 1)


def test_rules_that_are_turned_off_stop_nothing() -> None:
    losses = [*healthy(1)[:100], 300.0, 310.0, 320.0, *[400.0] * 50]
    assert judge_losses(losses, 0, None, 3, None).action == "go on"


# Throughput


def test_throughput_is_held_against_the_best_equal_and_only_where_there_is_one() -> None:
    assert judge_throughput(49.0, 100.0, 0.5).action == "stop"
    assert judge_throughput(50.0, 100.0, 0.5).action == "go on"
    assert judge_throughput(1.0, None, 0.5).action == "go on"
    assert judge_throughput(1.0, 100.0, None).action == "go on"
    assert judge_throughput(49.0, 100.0, 0.5).reason.startswith("49 tokens/s is below 0.5 x 100 tokens/s")


def test_a_run_that_takes_more_than_twice_its_time_is_stopped_with_both_speeds() -> None:
    assert judge_plan(51, 100, 0.5).action == judge_plan(1, 100, None).action == "go on"
    decision = judge_plan(40, 100, 0.5)
    assert (decision.action, decision.cause) == ("stop", "low_throughput")
    assert decision.reason == (
        "40 samples/s is below 0.5 x the 100 samples/s that its sample budget was made for: it would take 2.5 x the training "
        "time that every candidate has"
    )
