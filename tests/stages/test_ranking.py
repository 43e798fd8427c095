"""From measurements to what they mean."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.config.trial import base_trial
from orchestrator.stages.ranking import (
    best_noise_scale,
    goodput,
    seconds_to,
    settle,
    standings,
    token_efficiency,
)
from orchestrator.study.trial import Proposal, Trial, TrialState
from tests.support.lane_player import study_of

CONFIG = base_trial(study_of(), None)


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


@pytest.mark.parametrize("noise_scale", [0.3, 20.0, 5000.0])
@pytest.mark.parametrize("batch", [1, 32, 4096])
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


def noisy(name: str, point: float | None, low: float, high: float | None) -> Trial:
    metrics = {"noise_scale": point, "noise_scale_low": low, "noise_scale_high": high}
    return trial(name, metrics={key: value for key, value in metrics.items() if value is not None})


def test_the_noise_scale_is_taken_from_the_narrowest_interval_on_the_inverse() -> None:
    """[90, 110] is wider than [1, 2] in samples, and far narrower where estimates are comparable."""
    scale = best_noise_scale([noisy("a", 1.5, 1.0, 2.0), noisy("b", 100.0, 90.0, 110.0), trial("without")])
    assert scale is not None
    assert (scale.trial, scale.point) == ("b", 100.0)
    assert str(scale) == "100 [90, 110]"


def test_an_unbounded_noise_scale_is_said_as_a_lower_bound() -> None:
    scale = best_noise_scale([noisy("a", None, 900.0, None)])
    assert scale is not None
    assert str(scale) == "> 900"
    assert best_noise_scale([trial("without")]) is None


def test_the_ranking_is_by_the_mean_over_seeds_and_wants_all_of_them() -> None:
    trials = [
        trial("a-s0", candidate="a", val_loss=3.0), trial("a-s1", candidate="a", val_loss=3.4), trial("b-s0", candidate="b", val_loss=3.1), trial("b-s1", candidate="b", val_loss=3.1),
        trial("c-s0", candidate="c", val_loss=2.0), trial("c-s1", candidate="c", state=TrialState.PRUNED), trial("d-s0", candidate="d", val_loss=3.3), trial("d-s1", candidate="d", val_loss=3.3),
    ]  # fmt: skip
    found = standings(trials, "val_loss", None)
    assert [(one.name, pytest.approx(one.score)) for one in found] == [("b", 3.1), ("a", 3.2), ("d", 3.3)]


def test_losses_within_three_thousandths_are_a_tie() -> None:
    assert tied(3.0, 3.008)
    assert not tied(3.0, 3.01)
    assert tied(0.0, 0.0)
    assert tied(math.inf, math.inf)
    assert not tied(math.inf, 10.0)


def test_a_tie_is_settled_by_the_smaller_effective_batch_and_a_protected_one_first() -> None:
    trials = [
        trial("large", 3.000, micro_batch_size=8), trial("small", 3.001, micro_batch_size=2),
        trial("far", 3.5, micro_batch_size=1),
    ]  # fmt: skip
    assert settle(standings(trials, "val_loss", None)).name == "small"
    baseline = trial("baseline", 3.002, micro_batch_size=4, protected=True)
    assert settle(standings([*trials, baseline], "val_loss", None)).name == "baseline"


def curve(*points: tuple[float, float]) -> tuple[dict[str, float], ...]:
    return tuple({"train_seconds": seconds, "val_loss": loss} for seconds, loss in points)


def test_time_to_target_is_the_first_evaluation_at_or_below_it() -> None:
    one = trial("a", 3.0, history=curve((10, 4.0), (20, 3.2), (30, 3.3), (40, 3.0)))
    assert seconds_to([one], 3.2) == 20
    assert seconds_to([one], 3.1) == 40
    assert seconds_to([one], 2.0) == math.inf


def test_time_to_target_ranks_by_time_and_gpu_hours_by_time_times_ranks() -> None:
    fast = trial("fast", 3.1, history=curve((3600, 3.2), (7200, 3.1)), world_size=4)
    slow = trial("slow", 2.9, history=curve((7200, 3.2), (14400, 2.9)), world_size=1)
    never = trial("never", 3.3, history=curve((100, 3.3)))
    by_time = standings([slow, fast, never], "time_to_target", 3.2)
    assert [(one.name, one.score) for one in by_time] == [("fast", 3600), ("slow", 7200), ("never", math.inf)]
    by_hours = standings([slow, fast, never], "gpu_hours", 3.2)
    assert [(one.name, one.score) for one in by_hours] == [("slow", 2.0), ("fast", 4.0), ("never", math.inf)]


def test_the_target_is_reached_by_the_mean_over_the_seeds() -> None:
    seeds = [
        trial("a-s0", candidate="a", val_loss=2.9, history=curve((10, 3.4), (20, 2.9))),
        trial("a-s1", candidate="a", val_loss=3.1, history=curve((12, 3.2), (22, 3.1))),
    ]
    assert seconds_to(seeds, 3.0) == 21
    assert seconds_to(seeds, 3.3) == 11


def test_who_never_reaches_the_target_does_not_tie_with_who_does() -> None:
    trials = [
        trial("never", 3.5, history=curve((10, 3.5)), micro_batch_size=1),
        trial("fast", 3.0, history=curve((10, 3.0)), micro_batch_size=32),
        trial("baseline", 3.0, history=curve((40, 3.0)), micro_batch_size=4, protected=True),
    ]
    assert settle(standings(trials, "time_to_target", 3.0)).name == "fast"


def test_where_nobody_reaches_the_target_a_winner_is_still_settled() -> None:
    trials = [trial("a", 3.4, history=curve((10, 3.4))), trial("b", 3.3, history=curve((10, 3.3)))]
    assert settle(standings(trials, "time_to_target", 3.0)).name in ("a", "b")
