"""From measurements to what they mean."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages.estimates.ranking import (
    LEAST_GAIN,
    USUAL_GAIN,
    goodput,
    late_gain,
    late_gain_of_scores,
    luck_of_the_best,
    projected_seconds_to,
    seconds_to,
    seed_deviation,
    settle,
    standings,
    tie_width,
    token_efficiency,
)
from batchscout.orchestrator.stages.estimates.surface import PRIOR
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from tests.support.every import for_every
from tests.support.lane_player import study_of

CONFIG = base_trial(study_of(), None)
NOISE = PRIOR.seed_deviation * USUAL_GAIN
"""The share of the loss that seeds make where no run was evaluated before its end."""


def trial(
    name: str,
    val_loss: float | None = None,
    state: TrialState = TrialState.COMPLETE,
    candidate: str = "",
    **changes: Any,
) -> Trial:
    """A trial of the train stage: its config, its proposal and its own fields changed as told."""
    config = CONFIG.model_copy(update={k: v for k, v in changes.items() if k in type(CONFIG).model_fields})
    rest = {key: value for key, value in changes.items() if key not in type(CONFIG).model_fields}
    metrics = rest.pop("metrics", {}) | ({} if val_loss is None else {"val_loss": val_loss})
    protected = rest.pop("protected", False)
    proposal = Proposal(name, "train", config, candidate=candidate or name, protected=protected)
    return Trial(proposal, state=state, metrics=metrics, **rest)


@for_every(noise_scale=[0.3, 20.0, 5000.0], batch=[1, 32, 4096])
def test_goodput_is_tokens_times_token_efficiency_or_steps_times_step_efficiency(
    noise_scale: float, batch: int
) -> None:
    """Both forms are one quantity, up to a factor that no batch changes."""
    steps_per_second, seq_len = 3.0, 256
    step_efficiency = 1 / (1 + noise_scale / batch)
    by_steps = steps_per_second * step_efficiency * noise_scale * seq_len
    assert goodput(steps_per_second * batch * seq_len, batch, noise_scale) == pytest.approx(by_steps)


def test_token_efficiency_is_a_half_at_the_noise_scale_and_falls_with_the_batch() -> None:
    assert token_efficiency(64, 64.0) == 0.5
    values = [token_efficiency(batch, 64.0) for batch in (1, 8, 64, 512)]
    assert values == sorted(values, reverse=True)
    assert 0.98 < values[0] < 1


def test_the_ranking_is_by_the_mean_over_seeds_and_wants_all_of_them() -> None:
    trials = [
        trial("a-s0", candidate="a", val_loss=3.0), trial("a-s1", candidate="a", val_loss=3.4), trial("b-s0", candidate="b", val_loss=3.1), trial("b-s1", candidate="b", val_loss=3.1),
        trial("c-s0", candidate="c", val_loss=2.0), trial("c-s1", candidate="c", state=TrialState.PRUNED), trial("d-s0", candidate="d", val_loss=3.3), trial("d-s1", candidate="d", val_loss=3.3),
    ]  # fmt: skip
    found = standings(trials)
    assert [(one.name, pytest.approx(one.score)) for one in found] == [("b", 3.1), ("a", 3.2), ("d", 3.3)]
    assert all(one.score == one.val_loss and one.reached for one in found)


# Ties


def seeds_of(name: str, *losses: float, **changes: Any) -> list[Trial]:
    return [trial(f"{name}-s{seed}", loss, candidate=name, **changes) for seed, loss in enumerate(losses)]


def test_a_tie_is_as_wide_as_the_seeds_make_a_difference_of_two_means() -> None:
    """Its variance is twice that of one run, over the number of seeds."""
    noise = random.Random(0)
    many = standings(
        [one for name in "abc" for one in seeds_of(name, *(3.0 + noise.gauss(0, 0.1) for _ in range(300)))]
    )
    assert tie_width(many) == pytest.approx(math.sqrt(2 / 300) * 0.1, rel=0.1)
    ranking = standings([*seeds_of("a", 3.0, 3.02), *seeds_of("b", 3.1, 3.14)])
    four = standings([*seeds_of("a", 3.0, 3.02, 3.0, 3.02), *seeds_of("b", 3.1, 3.14, 3.1, 3.14)])
    assert tie_width(four) < tie_width(ranking), "more seeds tell more"


def test_two_seeds_that_are_alike_by_chance_do_not_make_every_difference_count() -> None:
    """What they show counts as one degree of freedom beside the two of the prior."""
    alike = standings(seeds_of("a", 3.0, 3.0))
    assert seed_deviation(alike) == pytest.approx(math.sqrt(2 / 3) * NOISE * 3.0)
    apart = standings(seeds_of("a", 2.0, 4.0))
    assert seed_deviation(apart) == pytest.approx(math.sqrt((2 * (NOISE * 3.0) ** 2 + 2.0) / 3))


def fell(name: str, half: float, end: float, candidate: str = "") -> Trial:
    """A run whose loss lay so high at half of its samples, and at its end."""
    points = ((CONFIG.sample_budget // 2, half), (CONFIG.sample_budget, end))
    history = tuple({"samples_seen": float(seen), "val_loss": loss} for seen, loss in points)
    return trial(name, end, candidate=candidate, history=history)


def test_the_late_gain_is_what_losses_fall_by_over_the_second_half_as_the_median_of_the_candidates() -> None:
    ranking = standings([fell("a", 3.4, 3.0), fell("b", 3.3, 3.1), fell("c", 9.0, 3.2)])
    assert late_gain(ranking) == pytest.approx(0.4)
    seeds = standings([fell("a-s0", 3.4, 3.0, "a"), fell("a-s1", 3.8, 3.2, "a")])
    assert late_gain(seeds) == pytest.approx(0.5), "the mean over the seeds of a candidate"
    assert late_gain(standings([trial("a", 3.0)])) == pytest.approx(USUAL_GAIN * 3.0), (
        "nothing was evaluated before its end"
    )
    at_rest = standings([fell("a", 3.001, 3.0)])
    assert late_gain(at_rest) == pytest.approx(LEAST_GAIN * 3.0), "seeds still differ"


def test_with_one_seed_the_width_is_the_recorded_worlds_share_of_the_late_gain_whatever_a_loss_begins_from() -> None:
    def width(floor: float, unit: float) -> float:
        return tie_width(standings([fell(name, floor + 2 * unit, floor + unit) for name in "ab"]))

    assert width(0.0, 1.0) == pytest.approx(math.sqrt(2) * PRIOR.seed_deviation)
    assert width(5.0, 1.0) == pytest.approx(width(0.0, 1.0)), "the loss of noise that nothing can learn is no scale"
    assert width(0.0, 1000.0) == pytest.approx(1000 * width(0.0, 1.0))


def test_a_surface_to_a_target_is_held_against_the_seconds_that_a_late_gain_takes() -> None:
    fall = curve(*((seconds, 3.0 * (seconds / 100) ** -0.2) for seconds in (10, 20, 40, 80, 100)))
    half = {"samples_seen": CONFIG.sample_budget / 2, "val_loss": 3.3}
    ranking = standings([trial("a", 3.0, history=(*fall, half))], target_loss=3.0)
    # 10 % of the loss, of which each percent is about five of the seconds
    assert late_gain_of_scores(ranking) == pytest.approx(5 * 100 * 0.1, rel=0.15)


@pytest.mark.parametrize("shift", [0.0, -3.0, -4.2, 100.0])
def test_how_long_a_fall_of_the_loss_takes_does_not_hang_on_where_its_zero_lies(shift: float) -> None:
    fall = curve(*((seconds, 3.0 * (seconds / 100) ** -0.2 + shift) for seconds in (10, 20, 40, 80, 100)))
    points = [
        {"samples_seen": CONFIG.sample_budget * share, "val_loss": 3.0 + extra + shift}
        for share, extra in ((0.5, 10), (1, 0))
    ]
    one = trial("a", 3.0 + shift, history=(*fall, *points))
    assert late_gain_of_scores(standings([one], 3.0 + shift)) == pytest.approx(10 * 100 * 1.48, rel=0.02)


def test_where_no_fall_is_known_a_late_gain_takes_twice_the_time() -> None:
    ranking = standings([trial("a", 3.0, history=curve((100, 3.0)))], target_loss=3.0)
    assert late_gain_of_scores(ranking) == pytest.approx(100 * math.log(2))


def test_with_one_seed_and_no_evaluation_on_the_way_the_width_is_a_share_of_the_loss() -> None:
    ranking = standings([trial("a", 3.0), trial("b", 3.1), trial("c", 9.0)])
    assert tie_width(ranking) == pytest.approx(math.sqrt(2) * NOISE * 3.1)
    thousandfold = standings([trial("a", 3000.0), trial("b", 3100.0), trial("c", 9000.0)])
    assert tie_width(thousandfold) == pytest.approx(1000 * tie_width(ranking))


def test_a_target_is_tied_by_the_seconds_that_the_seeds_difference_in_loss_takes() -> None:
    """Where the loss falls as seconds^(-1/5), a loss that is off by 1 % is a time that is off by 5 %."""
    fall = curve(*((seconds, 3.0 * (seconds / 100) ** -0.2) for seconds in (10, 20, 40, 80, 100)))
    ranking = standings([trial("a", 3.0, history=fall)], target_loss=3.0)
    assert tie_width(ranking) == pytest.approx(math.sqrt(2) * 5 * NOISE * 100, rel=0.15)


@pytest.mark.parametrize("num_tried", [1, 2, 4])
def test_of_several_changes_that_change_nothing_the_best_wins_as_rarely_as_one_does(num_tried: int) -> None:
    noise = random.Random(0)
    ranking = standings([trial("a", 3.0), trial("b", 3.0)])
    luck = luck_of_the_best(ranking, num_tried) / tie_width(ranking)
    lowest = [min(noise.gauss(0, 1) for _ in range(num_tried)) for _ in range(4000)]
    assert sum(one < -luck for one in lowest) / len(lowest) == pytest.approx(0.16, abs=0.02)


def test_a_tie_is_settled_by_the_smaller_effective_batch_and_a_protected_one_first() -> None:
    within = math.sqrt(2) * NOISE * 3.0
    trials = [
        trial("large", 3.000, micro_batch_size=8), trial("small", 3.0 + 0.5 * within, micro_batch_size=2),
        trial("far", 3.5, micro_batch_size=1),
    ]  # fmt: skip
    assert settle(standings(trials)).name == "small"
    baseline = trial("baseline", 3.0 + 0.9 * within, micro_batch_size=4, protected=True)
    assert settle(standings([*trials, baseline])).name == "baseline"
    beaten = trial("baseline", 3.0 + 1.2 * within, micro_batch_size=4, protected=True)
    assert settle(standings([*trials, beaten])).name == "small"


# Time to a target


def curve(*points: tuple[float, float]) -> tuple[dict[str, float], ...]:
    return tuple({"train_seconds": seconds, "val_loss": loss} for seconds, loss in points)


def test_time_to_a_target_is_interpolated_to_where_the_loss_first_crosses_it() -> None:
    one = trial("a", 3.0, history=curve((10, 4.0), (20, 3.2), (30, 3.3), (40, 3.0)))
    assert seconds_to(one, 3.2) == 20
    assert seconds_to(one, 3.6) == pytest.approx(15), "half-way between two evaluations"
    assert seconds_to(one, 3.1) == pytest.approx(30 + 10 * 2 / 3), "it rose in between"
    assert seconds_to(one, 4.5) == 10, "the first evaluation is below it already: no sooner is known"
    assert seconds_to(one, 2.0) == math.inf


def test_a_target_that_was_not_reached_is_projected_along_the_log_of_the_seconds() -> None:
    """A loss that falls by 0.5 with every doubling of the time falls by another 1.0 in two more."""
    one = trial("a", 3.0, history=curve((0, 9.0), (10, 4.0), (20, 3.5), (40, 3.0)))
    assert projected_seconds_to(one, 2.0) == pytest.approx(160)
    assert projected_seconds_to(one, -1e9) < math.inf, "a number that JSON can hold"
    rising = trial("b", 3.6, history=curve((10, 3.5), (20, 3.6)))
    assert projected_seconds_to(rising, 3.0) == math.inf
    assert projected_seconds_to(trial("c", 3.5, history=curve((10, 3.5))), 3.0) == math.inf, "one point has no slope"


def test_a_target_ranks_who_reached_it_by_time_and_before_all_who_did_not() -> None:
    fast = trial("fast", 3.1, history=curve((3600, 3.2), (7200, 3.1)), world_size=4)
    slow = trial("slow", 2.9, history=curve((7200, 3.2), (14400, 2.9)), world_size=1)
    nearly = trial("nearly", 3.3, history=curve((10, 3.5), (20, 3.3)))
    never = trial("never", 3.3, history=curve((100, 3.3)))
    found = standings([never, nearly, slow, fast], target_loss=3.2)
    projected = 20 * math.exp(0.5 * math.log(2))
    assert [(one.name, one.score, one.reached) for one in found] == [
        ("fast", 3600, True), ("slow", 7200, True), ("nearly", pytest.approx(projected), False),
        ("never", math.inf, False),
    ]  # fmt: skip


def test_the_time_to_a_target_is_the_mean_over_the_seeds_and_all_of_them_must_reach_it() -> None:
    seeds = [
        trial("a-s0", candidate="a", val_loss=2.9, history=curve((10, 3.4), (20, 2.9))),
        trial("a-s1", candidate="a", val_loss=3.1, history=curve((12, 3.2), (22, 3.1))),
    ]
    (both,) = standings(seeds, target_loss=3.15)
    assert (both.score, both.reached) == (pytest.approx((15 + 17) / 2), True)
    (one,) = standings(seeds, target_loss=3.0)
    assert (one.score, one.reached) == (pytest.approx((18 + 22 * 22 / 12) / 2), False)


def test_who_never_reaches_the_target_does_not_tie_with_who_does() -> None:
    trials = [
        trial("never", 3.5, history=curve((10, 3.5)), micro_batch_size=1),
        trial("nearly", 3.01, history=curve((5, 3.1), (9, 3.01)), micro_batch_size=1),
        trial("fast", 3.0, history=curve((10, 3.0)), micro_batch_size=32),
        trial("baseline", 3.0, history=curve((40, 3.0)), micro_batch_size=4, protected=True),
    ]
    ranking = standings(trials, target_loss=3.0)
    assert next(one.score for one in ranking if one.name == "nearly") < 12, "it is projected to be almost there"
    assert settle(ranking).name == "fast"


def test_where_nobody_comes_near_the_target_the_lowest_loss_is_settled_for() -> None:
    trials = [trial(name, loss, history=curve((10, loss))) for name, loss in (("a", 3.4), ("b", 3.3), ("c", 3.5))]
    assert settle(standings(trials, target_loss=3.0)).name == "b"
