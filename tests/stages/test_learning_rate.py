"""Is the scaling rule right here? A small grid around the best rate that the train stage found."""

from __future__ import annotations

import math

import pytest

from batchscout.orchestrator.stages.learning_rate import MOST_EXTENSIONS, figures
from batchscout.orchestrator.stages.train import BatchFindings, LearningRateFindings, TrainFindings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import proposed
from tests.support.example_study import batch_findings
from tests.support.known_stage import Known
from tests.support.loss_worlds import throughput_of

RULE = 1e-3 * 2**0.5
"""Of batch 16, which wins; the baseline's, batch 8, is 1e-3."""
NO_PRUNER = {"pruner": {"type": "none"}}


def learning_rate_of(
    losses: dict[str, float], at_rule: float = 3.0, best_rate: float = RULE, batches: tuple[BatchFindings, ...] = ()
) -> Known:
    """The stage after a train stage that ran batch 16 at the rule's rate, and by its surface prefers `best_rate`."""
    rates = throughput_of({8: 100.0, 16: 100.0})
    train = Known({"type": "train"}, sample_budget=4096).concluded(rates)
    train.end("train-m8k1", val_loss=3.4)
    train.end("train-m16k1", val_loss=at_rule)
    batches = batches or (batch_findings(16, at_rule, 0.95, learning_rate=best_rate),)
    known = Known({"type": "learning_rate", **NO_PRUNER}, study=train.study, sample_budget=4096)
    known.concluded(TrainFindings("train-m16k1", at_rule, batches=batches))
    for name, loss in losses.items():
        known.end(f"learning_rate-x{name}", val_loss=loss)
    return known


def rates_of(known: Known) -> dict[str, float]:
    return {p.id.removeprefix("learning_rate-"): p.config.learning_rate for p in known.propose()}


def test_the_centre_is_the_best_rate_of_the_surface_and_what_was_run_is_not_run_again() -> None:
    assert rates_of(learning_rate_of({})) == {f"x{m:g}": pytest.approx(m * RULE) for m in (0.5, 0.71, 1.41, 2)}
    off = learning_rate_of({}, best_rate=1.2 * RULE)
    assert rates_of(off) == {f"x{m:g}": pytest.approx(m * 1.2 * RULE) for m in (0.5, 0.71, 1, 1.41, 2)}
    twice = learning_rate_of({}, best_rate=2 * RULE)
    assert set(rates_of(twice)) == {"x0.71", "x1", "x1.41", "x2"}, "half of it was run in the train stage"
    for proposal in off.propose():
        assert proposal.config.effective_batch_size == 16
        assert proposal.config.sample_budget == off.study.trials["train-m16k1"].config.sample_budget


def test_the_centre_is_the_winners_own_even_where_another_batch_is_likelier() -> None:
    """That one was never run, so it could not win."""
    batches = batch_findings(16, 3.0, 0.4, learning_rate=RULE), batch_findings(32, 2.9, 0.7, learning_rate=0.5)
    assert "x1" not in rates_of(learning_rate_of({}, batches=batches))


def test_without_a_train_stage_the_centre_is_the_rules_rate() -> None:
    found = rates_of(Known({"type": "learning_rate"}, batch={"micro_batch_size": 16}))
    assert found["x1"] == pytest.approx(RULE)


def test_the_best_in_the_middle_is_the_rules_own_and_no_warning() -> None:
    known = learning_rate_of({"0.5": 3.2, "0.71": 3.1, "1.41": 3.1, "2": 3.3})
    found = known.found(LearningRateFindings)
    assert (found.winner, found.rule) == ("train-m16k1", pytest.approx(RULE))
    assert not found.on_edge
    assert known.conclude().notes == ()
    assert known.conclude().reason == (
        "learning rate 0.00141 ends at val loss 3.000, best of 5; it is the scaling rule's own (0.00141)"
    )


def test_how_the_rule_did_is_said_with_what_it_cost() -> None:
    known = learning_rate_of({"0.5": 3.6, "0.71": 3.3, "1.41": 2.8, "2": 2.95})
    assert known.conclude().reason == (
        "learning rate 0.00199 ends at val loss 2.800, best of 5; it is 1.4 x the scaling rule's 0.00141, which ends at "
        "3.000"
    )


def test_a_tie_goes_to_the_rate_nearest_to_the_minimum_of_the_curve() -> None:
    known = learning_rate_of({"0.5": 3.12, "0.71": 3.02, "1.41": 2.995, "2": 3.2})
    found = known.found(LearningRateFindings)
    assert found.winner == "train-m16k1", (
        "the gain at 0.00199 is within the noise, and the curve's minimum is nearer to the rule's"
    )
    assert "tied with 0.00199" in known.conclude().reason


def test_a_rate_whose_run_did_not_end_is_drawn_as_a_cross_and_not_as_a_result() -> None:
    known = learning_rate_of({"0.5": 3.2, "0.71": 3.1})
    known.end("learning_rate-x1.41", "pruned", "rung", val_loss=3.61234, samples_seen=512)
    known.end("learning_rate-x2", "failed", "lost")
    results, crosses = figures(known.context)[0].series
    assert len(results.marks) == 3
    assert [mark.x for mark in crosses.marks] == [pytest.approx(m * RULE) for m in (1.41, 2)]
    cut, lost = crosses.marks
    assert (cut.y, cut.text) == (3.61234, "3.612"), "its own last loss"
    assert "512 samples" in cut.told
    assert lost.y == 3.61234, "one that had none lies at the top"
    assert "loss" not in lost.told


def test_a_rate_whose_run_diverged_with_a_huge_loss_does_not_flatten_the_others() -> None:
    known = learning_rate_of({"0.5": 3.2, "0.71": 3.1})
    known.end("learning_rate-x2", "pruned", "diverged", val_loss=3520398.0, samples_seen=512)
    results, crosses = figures(known.context)[0].series
    (cross,) = crosses.marks
    assert max(mark.y for mark in results.marks) < cross.y < 4
    assert cross.text == "3.52M"


@pytest.mark.parametrize(("losses", "factor"), [
    ({"0.5": 2.7, "0.71": 2.8, "1.41": 3.1, "2": 3.3}, 0.5 / 0.71),
    ({"0.5": 3.3, "0.71": 3.2, "1.41": 2.9, "2": 2.8}, 2 / 1.41),
])  # fmt: skip
def test_where_the_best_lies_at_an_end_a_further_rate_is_tried_three_times_at_most(
    losses: dict[str, float], factor: float
) -> None:
    known = learning_rate_of(losses)
    end, best = (0.5 if factor < 1 else 2.0) * RULE, 2.7 if factor < 1 else 2.8
    for number in range(1, MOST_EXTENSIONS + 1):
        (further,) = known.waiting()
        assert further.config.learning_rate == pytest.approx(end * factor**number, rel=1e-6)
        known.end(further.id, val_loss=best - 0.1 * number)
    assert not known.waiting(), "no fourth"
    found = known.conclude()
    side = "low" if factor < 1 else "high"
    assert known.found(LearningRateFindings).on_edge
    assert f"lies on the {side} edge of the grid" in found.notes[0]
    assert "widen the multipliers" in found.notes[0]


def test_an_extension_that_is_worse_ends_the_search_and_the_edge() -> None:
    known = learning_rate_of({"0.5": 3.6, "0.71": 3.4, "1.41": 2.9, "2": 2.7})
    (further,) = known.waiting()
    known.end(further.id, val_loss=2.9)
    assert not known.waiting()
    found = known.found(LearningRateFindings)
    assert (found.winner, found.on_edge) == ("learning_rate-x2", False)
    assert known.conclude().notes == ()


def test_nothing_further_is_asked_for_before_all_have_ended() -> None:
    known = learning_rate_of({})
    for proposal in known.propose():
        known.study.apply(proposed(proposal))
    for name, loss in (("0.5", 3.3), ("1.41", 2.9)):
        known.end(f"learning_rate-x{name}", val_loss=loss)
    known.end("learning_rate-x2", val_loss=2.8)
    assert not known.waiting(), "0.71 may be better yet"
    known.end("learning_rate-x0.71", val_loss=3.2)
    assert known.waiting()


def test_a_rate_that_diverged_bounds_the_grid_so_the_best_beside_it_is_not_on_the_edge() -> None:
    known = learning_rate_of({"0.5": 3.2, "0.71": 3.1, "1.41": 2.9})
    known.end("learning_rate-x2", "pruned", "the loss is nan in step 9", Cause.DIVERGED)
    assert not known.found(LearningRateFindings).on_edge
    assert not known.waiting(), "nothing beyond it is tried"


def test_a_lower_rate_that_diverged_says_nothing_of_those_beyond_the_highest() -> None:
    known = learning_rate_of({"0.71": 3.2, "1.41": 2.9, "2": 2.8})
    known.end("learning_rate-x0.5", "pruned", "the loss is nan in step 9", Cause.DIVERGED)
    for number in range(MOST_EXTENSIONS):
        known.end(known.waiting()[0].id, val_loss=2.7 - 0.1 * number)
    assert known.found(LearningRateFindings).on_edge
    assert "high edge of the grid" in known.conclude().notes[0]
    assert "widen the multipliers" in known.conclude().notes[0]


def test_where_no_run_comes_near_the_target_the_lowest_one_is_the_best() -> None:
    known = Known({"type": "learning_rate", **NO_PRUNER}, objective="target", target_loss=1.0)
    for loss, name in enumerate(reversed(known.ids()), start=3):
        known.end(name, val_loss=float(loss))
    found = known.found(LearningRateFindings)
    assert known.study.trials[found.winner].metric("val_loss") == 3.0


def test_while_every_rate_diverges_it_is_lowered_until_one_trains() -> None:
    known = Known({"type": "learning_rate"})
    first = min(proposal.config.learning_rate for proposal in known.propose())
    while waiting := known.waiting():
        for one in waiting:
            if one.config.learning_rate > first / 50:
                known.end(one.id, "pruned", "the loss is nan in step 3", Cause.DIVERGED)
            else:
                known.end(one.id, val_loss=3.0 + abs(math.log(one.config.learning_rate / (first / 100))))
    assert known.conclude().ok
    assert first / 300 < known.found(LearningRateFindings).learning_rate < first / 50


def test_where_no_rate_trains_the_last_line_says_what_was_tried_and_what_to_change() -> None:
    known = Known({"type": "learning_rate"})
    known.play(lambda known, one: known.end(one.id, "pruned", "the loss is nan in step 3", Cause.DIVERGED))
    rates = [trial.config.learning_rate for trial in known.study.trials.values()]
    reason = known.conclude().reason
    assert reason.startswith(
        f"nothing trains: {len(rates)} runs at learning rates from {min(rates):.3g} to {max(rates):.3g}"
    )
    assert min(rates) < 1e-4 * max(rates)
    assert "look at the loss" in reason
