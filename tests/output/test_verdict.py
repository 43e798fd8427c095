"""The sentence on top, in each of its forms, and the keys of recommendation.json that say how sure it is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
from pydantic import JsonValue

from batchscout.orchestrator.config.load import apply_override, parse_study
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.output.scope import Scope
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.equivalence import EquivalenceFindings
from batchscout.orchestrator.stages.findings import Findings
from batchscout.orchestrator.stages.forms import Rate
from batchscout.orchestrator.stages.horizons.findings import BatchAtLength, HorizonsFindings
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.orchestrator.stages.train import BatchFindings, LearningRateFindings, TimeGain, TrainFindings, whose
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Concluded, Evaluated, FactsRead, Noticed, RunBegan
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import TrialState
from batchscout.trainers.config import ModelConfig, Schedule
from batchscout.trainers.notices import NoticeKind
from batchscout.trainers.sources.settings import OwnRun
from tests.support.every import for_every
from tests.support.example_study import BUDGET, add_trial, batch_findings, conclude, end_trial, example_config, tell
from tests.support.outcome import recommendation_of
from tests.support.worlds import FRONTIER, NONE

SMALLEST = "It is the smallest batch that was compared: a smaller one may be better."
LARGEST = "It is the largest batch that was compared: a larger one may be better."
SCOPE = "Measured with one seed, 256 validation samples, a run of 32.8k samples, effective batches 8 to 32, no accumulation."


@dataclass(frozen=True)
class Run:
    """A full run of the train stage that completed; its curve is (training seconds, validation loss)."""

    batch: int
    curve: tuple[tuple[float, float], ...]
    tokens_per_second: float | None = None
    learning_rate: float = 6e-4


BY_THE_RATE = TimeGain("train-m8k1", 0.6, 0.45, 0.8, 0.6, 0.97)
EARLIER: dict[str, Any] = {"regret_time": None, "time": None, "keeps_own": False}
"""What a study of an earlier version found of this: nothing."""
SMALL, LARGE = Run(8, ((30, 4.0), (60, 3.5))), Run(32, ((30, 3.6), (60, 3.2)))
CLEAR = batch_findings(8, 3.45, 0.02), batch_findings(32, 3.2, 0.98)
"""Batches of which the larger one is likely to be the best."""


def recommended(
    *batches: BatchFindings,
    winner: int = 32,
    seconds: float | None = 60.0,
    runs: tuple[Run, ...] = (SMALL, LARGE),
    tuned: Run | None = None,
    earlier: tuple[Findings, ...] = (),
    found: dict[str, Any] | None = None,
    facts: Facts | None = None,
    cluster_options: tuple[str, ...] = (),
    pruned: tuple[Run, ...] = (),
    other_rates: tuple[Run, ...] = (),
    given: dict[str, JsonValue] | None = None,
    form: dict[str, Any] | None = None,
    **changes: Any,
) -> Recommendation:
    """What follows from a train stage that found this of its batches, of which 8 is the baseline's.

    found: what else it found; by default that the choice wastes 1.2 % and the winner saves time, or is the user's own. tuned: a run of the learning_rate stage, which it found the best. earlier: what the stages before them found. form: how all runs trained otherwise than the study file says.
    """
    stages = [
        {"type": "frontier"},
        {"type": "train", "max_runs": len(runs)},
        *([{"type": "learning_rate"}] if tuned else []),
    ]
    config = example_config(**({"stages": stages, "batch": {"micro_batch_size": 8}} | changes))
    study = Study(config.name, facts=facts or Facts())
    if given:
        tell(study, RunBegan(token="first", given=given))
    for findings in earlier:
        conclude(study, findings, "")
    for run in runs:
        add(study, config, f"train-m{run.batch}k1", run, role="baseline" if run.batch == 8 else "", **(form or {}))
    for run in other_rates:
        add(study, config, f"train-m{run.batch}k1-lr{run.learning_rate:g}", run)
    for run in pruned:
        add(study, config, f"train-m{run.batch}k1-lr{run.learning_rate:g}", run, state=TrialState.PRUNED)
    loss = study.trials[f"train-m{winner}k1"].measured("val_loss")
    own: dict[str, Any] = (
        {"keeps_own": True}
        if winner == 8
        else {"time": TimeGain("train-m8k1", 0.36, 0.25, 0.52, 0.6, 0.98, by_speed=0.5)}
    )
    told: dict[str, Any] = {"regret_time": 0.012, **own, **(found or {})}
    train = TrainFindings(f"train-m{winner}k1", loss, batches=batches, seconds=seconds, **told)
    conclude(study, train, "")
    if tuned is not None:
        add(study, config, "learning_rate-x2", tuned)
        refined = replace(train, winner="learning_rate-x2", keeps_own=False, time=BY_THE_RATE)
        conclude(study, LearningRateFindings(1.2e-3, "learning_rate-x2", on_edge=True, losses={}, train=refined), "")
    tell(study, RunBegan(token="last", cluster_options=cluster_options))
    return recommendation_of(config, study)


def add(
    study: Study,
    config: Any,
    trial_id: str,
    run: Run,
    role: str = "",
    state: TrialState = TrialState.COMPLETE,
    **form: Any,
) -> None:
    split = {"micro_batch_size": run.batch, "gradient_accumulation_steps": 1}
    add_trial(study, config, trial_id, role, learning_rate=run.learning_rate, **split, **form)
    for seconds, loss in run.curve:
        tell(
            study,
            Evaluated(id=trial_id, metrics={"samples_seen": 500 * seconds, "train_seconds": seconds, "val_loss": loss}),
        )
    end_trial(study, trial_id, run.curve[-1][0], {"tokens_per_second": run.tokens_per_second}, state)


def reason(found: Recommendation) -> str:
    """The verdict without what to train with and without its scope."""
    what, _, rest = found.verdict.partition(": ")
    assert what.startswith(f"Train with micro-batch {found.micro_batch_size}, no accumulation (effective batch ")
    why, measured, _ = rest.partition(" Measured with ")
    assert measured
    return why


PAYS = "The study took 2 min 0 s of lane time in all, and pays off for runs of 3 min 8 s or more."
OWN = "with your own setting (effective batch 8, learning rate 0.0006)"
SAME_TIME = "after the same training time (1 min 0 s)"
SAVED = (
    "it reaches the same loss in 36% of the training time (25% to 52% with probability 0.9) = 60% by the learning rate x 120% by the "
    "batch x 50% by its higher samples/s"
)


def test_another_setting_says_what_it_saves_of_the_users_time_from_what_and_what_it_may_waste() -> None:
    found = recommended(*CLEAR)
    assert found.verdict == (
        "Train with micro-batch 32, no accumulation (effective batch 32), activation checkpointing none and learning rate "
        f"0.0006: val loss 3.200 against 3.500 {OWN} {SAME_TIME}; {SAVED}; this setting wastes 1.2% of the training time on average "
        f"against the best one. {LARGEST} {SCOPE} {PAYS} For a longer run, give real_run.samples."
    )
    assert (found.decided, found.p_best, found.undecided_between, found.would_decide) == (True, 0.98, (), None)
    tree = found.to_json()
    assert tree["regret_time"] == 0.012
    assert tree["time"] == {
        "trial": "train-m8k1", "share": 0.36, "low": 0.25, "high": 0.52, "by_rate": 0.6, "p_better": 0.98, "by_speed": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(("by_speed", "side"), [(0.94, "higher "), (0.996, ""), (1.004, ""), (1.06, "lower ")])
def test_no_speed_is_called_lower_or_higher_whose_share_is_shown_as_all(by_speed: float, side: str) -> None:
    time = TimeGain("train-m8k1", 0.36, 0.25, 0.52, 0.6, 0.98, by_speed=by_speed)
    found = recommended(*CLEAR, found={"time": time})
    assert f" x {by_speed:.0%} by its {side}samples/s" in found.verdict


@for_every(useful_gain=[0.005, 0.025, 0.03, 0.15], share=[0.002, 0.046, 0.36])
def test_small_shares_are_told_with_the_digits_that_they_have(useful_gain: float, share: float) -> None:
    time = TimeGain("train-m8k1", share, share / 2, 2 * share, 0.6, 0.98)
    batches = batch_findings(8, 3.45, 0.02), batch_findings(32, 3.2, 0.98)
    decided = recommended(*batches, found={"time": time, "regret_time": 0.001}, useful_gain=useful_gain).answer
    kept = recommended(*CLOSE, winner=8, found={"regret_time": 0.001}, useful_gain=useful_gain).answer
    for line, words, meant in (
        (decided.because, r"save ([\d.]+)%", useful_gain),
        (kept.because, r"save ([\d.]+)%", useful_gain),
        (decided.gain, r"the same loss in ([\d.]+)%", share),
        (decided.gain, r"\(([\d.]+)% to", share / 2),
        (decided.gain, r"to ([\d.]+)% with", 2 * share),
    ):
        (said,) = re.findall(words, line)
        assert float(said) / 100 == pytest.approx(meant, rel=0.05), line


def test_what_was_planned_for_the_same_time_is_told_with_the_seconds_that_it_took() -> None:
    slower = replace(LARGE, curve=((30, 3.6), (75, 3.2)))
    found = recommended(*CLEAR, runs=(SMALL, slower))
    assert f"3.500 {OWN}, after 1 min 15 s and 1 min 0 s of training; it reaches" in found.verdict


def test_equal_samples_are_said_where_all_trained_on_as_many() -> None:
    found = recommended(*CLEAR, seconds=None, objective="samples")
    assert f"{OWN} after the same samples; it reaches the same loss in 36% of the samples (25%" in found.verdict
    assert "this setting wastes 1.2% of the samples on average" in found.verdict


STAYS = "your own setting stays: none of the others is shown to save 3% of the training time"


def test_where_none_is_shown_to_be_better_the_users_own_stays_and_it_is_not_called_decided() -> None:
    batches = batch_findings(8, 3.5, 0.6), batch_findings(32, 3.51, 0.4)
    found = recommended(*batches, winner=8)
    assert reason(found) == (
        f"{STAYS}, so the batch is not your bottleneck; it ends at val loss 3.500; this setting wastes 1.2% of the training time on average "
        f"against the best one. {SMALLEST}"
    )
    assert (found.decided, found.effective_batch_size, found.learning_rate) == (False, 8, 6e-4)
    assert (found.would_decide, found.undecided_between) == (None, ())
    assert "time" not in found.to_json()
    unsure = recommended(*batches, winner=8, found={"regret_time": 0.08})
    assert f"{STAYS}; it ends at val loss 3.500; this setting wastes 8.0% of the training time" in unsure.verdict
    assert "undetermined between effective batches 8 and 32 (8 with probability 0.60)" in unsure.verdict
    alone = recommended(batch_findings(8, 3.5, 1.0), winner=8, runs=(SMALL,))
    assert f"{STAYS}; it ends at" in alone.verdict, "of one batch nothing is said of batches"


def test_the_users_batch_with_a_better_rate_says_what_the_rate_saves() -> None:
    batches = batch_findings(8, 3.5, 0.95), batch_findings(32, 3.6, 0.05)
    found = recommended(*batches, winner=8, tuned=Run(8, ((30, 3.9), (60, 3.3))))
    assert (
        f"val loss 3.300 against 3.500 {OWN} {SAME_TIME}; it reaches the same loss in 60% of the training time"
        in found.verdict
    )
    assert "(45% to 80% with probability 0.9), by the learning rate alone; this setting" in found.verdict
    assert "The learning rate is at the edge of those that were tried: one beyond it may be better." in reason(found)


@for_every(others=[(), (3e-4,), (12e-4,), (3e-4, 12e-4)], pruned=[True, False], best=[1e-4, 3e-4, 6e-4, 12e-4, 36e-4])
def test_a_rate_at_an_end_of_those_that_were_tried_is_told_as_one_where_the_best_lies_further_out(
    others: tuple[float, ...], pruned: bool, best: float
) -> None:
    """The chosen rate is 6e-4: a run at another one tells that it is at no end, whatever has become of that run."""
    runs = tuple(replace(LARGE, learning_rate=rate) for rate in others)
    batches = batch_findings(8, 3.45, 0.02), batch_findings(32, 3.2, 0.98, learning_rate=best)
    found = recommended(*batches, pruned=runs if pruned else (), other_rates=() if pruned else runs)
    is_told = bool(others) and (best < 6e-4 < min(others) or max(others) < 6e-4 < best)
    assert ("The learning rate is at the edge" in found.verdict) is is_told
    assert any("the learning rate is at the edge" in one for one in found.answer.caveats) is is_told


@pytest.mark.parametrize(
    ("batches", "chosen", "p_best", "told"),
    [
        ((4, 8), 4, 0.95, "smallest"),
        ((8, 32), 32, 0.95, "largest"),
        ((4, 8, 32), 8, 0.95, None),
        ((1, 8), 1, 0.95, None),
        ((4, 8), 4, 0.4, None),
    ],
    ids=["at the lower end", "at the upper end", "between", "none is smaller", "unlikely"],
)
def test_a_batch_at_an_end_of_what_was_compared_is_told_as_one(
    batches: tuple[int, ...], chosen: int, p_best: float, told: str | None
) -> None:
    tried = [
        batch_findings(batch, 3.2 if batch == chosen else 3.5, p_best if batch == chosen else 0.02) for batch in batches
    ]
    runs = tuple(Run(batch, ((30, 4.0), (60, 3.5))) for batch in batches)
    found = recommended(*tried, winner=chosen, runs=runs)
    assert ("that was compared" in found.verdict) == (told is not None)
    assert told is None or f"It is the {told} batch that was compared" in found.verdict


def test_what_cannot_be_decided_names_the_batches_and_what_would_decide() -> None:
    batches = batch_findings(32, 3.2, 0.55), batch_findings(16, 3.22, 0.4), batch_findings(8, 3.5, 0.05)
    found = recommended(*batches, found={"regret_time": 0.045})
    assert reason(found).endswith(
        "; this setting wastes 4.5% of the training time on average against the best one; undetermined between effective batches 16 "
        f"and 32 (32 with probability 0.55). {LARGEST} To decide it: about 3 more runs of 1 min 0 s each, 3 min 0 s in all: "
        "raise stages.train.max_runs."
    )
    assert (found.decided, found.undecided_between) == (False, (16, 32))
    twice = recommended(*batches, found={"regret_time": 0.045}, seeds=[0, 1])
    assert twice.would_decide is not None
    assert twice.would_decide.startswith("about 6 more runs of 1 min 0 s each, 6 min 0 s in all"), "each with 2 seeds"
    stages = [{"type": "frontier"}, {"type": "train"}]
    stopped = recommended(*batches, found={"regret_time": 0.045}, stages=stages)
    assert stopped.would_decide is not None
    assert stopped.would_decide.startswith(
        "more seeds, or a longer run (sample_budget): no further run of this length is worth its time"
    )
    far = recommended(*batches, found={"regret_time": 0.5})
    assert far.would_decide == "more than 30 further runs (raise stages.train.max_runs), or more seeds"


@for_every(stages=[("train",), ("train", "learning_rate"), ("throughput", "train")], budget=[None, 1e-6])
def test_a_study_that_times_no_batches_is_decided_by_a_stage_that_does(
    stages: tuple[str, ...], budget: float | None
) -> None:
    """Without speeds train makes its first run alone, whatever `max_runs` and budget are."""
    keys: dict[str, Any] = {"stages": [{"type": one} for one in stages]}
    keys |= {"budget": {"device_hours": budget}} if budget else {}
    found = recommended(*CLOSE, winner=8, found={"regret_time": 0.08}, **keys)
    assert found.would_decide is not None
    times_batches = "throughput" in stages
    assert ("add the stages frontier and throughput" in found.would_decide) is not times_batches
    assert ("worth its time" in found.would_decide) is (times_batches and not budget)
    assert found.answer.next.startswith("batchscout export") is not (times_batches and bool(budget))


@for_every(times=[1.5, 4, 4.5, 20, 100])
def test_an_open_answer_for_a_real_run_is_decided_by_runs_that_are_nearer_to_it_in_length(times: float) -> None:
    samples = round(times * BUDGET)
    at_length = tuple(BatchAtLength(batch, 3.0, 2.9, 3.1, 0.5) for batch in (8, 32))
    real = HorizonsFindings(
        samples, 8, 6e-4, 4e-4, 9e-4, at_length, 3.0, 2.9, 3.1, 8, 1, None, samples, 0.3, None, None, True
    )
    found = recommended(*CLOSE, winner=8, earlier=(real,), real_run={"samples": samples})
    told = re.search(r"sample_budget[:=] ?(\d+)", f"{found.would_decide} {found.answer.next}")
    assert told
    budget = int(told[1])
    assert max(BUDGET + 1, samples / 4) <= budget <= samples
    assert ("without real_run" in found.answer.because) is (budget == samples), "which has to be longer than a study"


def test_a_real_run_that_leaves_what_the_study_keeps_says_what_that_saves() -> None:
    """For runs of the study's length the user's own setting stays; in the real run another one is better."""
    at_length = BatchAtLength(8, 3.0, 2.9, 3.1, 0.05), BatchAtLength(32, 2.8, 2.7, 2.9, 0.95)
    saved = TimeGain("train-m8k1", 0.8, 0.7, 0.9, 1.0, 0.95)
    real = HorizonsFindings(
        4 * BUDGET,
        32,
        6e-4,
        4e-4,
        9e-4,
        at_length,
        2.8,
        2.7,
        2.9,
        32,
        1,
        None,
        4 * BUDGET,
        0.01,
        saved,
        2 * BUDGET,
        False,
    )
    found = recommended(*CLOSE, winner=8, earlier=(real,), real_run={"samples": 4 * BUDGET})
    assert (found.effective_batch_size, found.decided) == (32, True)
    for said in (found.answer.gain, found.verdict):
        assert "the same loss in 80% of the training time (70% to 90% with probability 0.9)" in said
    assert f"of a run of 131k samples {OWN}" in found.answer.gain


def test_where_the_rate_alone_is_open_no_batches_are_named() -> None:
    others = [batch_findings(batch, 3.4, p) for batch, p in ((2, 0.05), (4, 0.06), (8, 0.04))]
    found = recommended(*others, batch_findings(32, 3.2, 0.85), found={"regret_time": 0.04})
    assert found.undecided_between == ()
    assert found.decided is False
    assert "; undetermined at which learning rate (0.0004 to 0.0009)" in found.verdict


def test_another_useful_gain_decides_otherwise() -> None:
    assert recommended(*CLEAR, found={"regret_time": 0.04}).decided is False
    assert recommended(*CLEAR, found={"regret_time": 0.04}, useful_gain="5%").decided is True


def test_a_single_batch_is_the_only_one_and_has_no_probability() -> None:
    found = recommended(batch_findings(8, 3.5, 1.0, num_runs=1), winner=8, runs=(SMALL,))
    assert reason(found) == "it is the only batch that was tried."
    assert found.p_best is None
    assert not found.to_json().keys() & {"p_best", "would_decide", "regret_time", "time"}


def test_a_single_batch_with_rates_of_its_own_says_what_the_rate_saves() -> None:
    found = recommended(batch_findings(8, 3.5, 1.0), winner=8, runs=(SMALL,), tuned=Run(8, ((30, 3.9), (60, 3.3))))
    assert (
        "it reaches the same loss in 60% of the training time (45% to 80% with probability 0.9), by the learning rate alone"
        in found.verdict
    )
    assert found.p_best is None


@pytest.mark.parametrize(
    ("others", "place"),
    [
        ((), "the only run that ended"),
        ((3.3,), "the best of 2 runs"),
        ((3.19, 3.3), "tied with the best of 3 runs, which ends at val loss 3.190"),
        ((3.0,), "behind the best of 2 runs, which ends at val loss 3.000"),
    ],
)
def test_without_the_users_own_run_it_is_called_the_best_only_where_it_is(
    others: tuple[float, ...], place: str
) -> None:
    batches = batch_findings(8, 3.5, 0.0), batch_findings(32, 3.2, 1.0)
    runs = [Run(batch, ((30, 3.6), (60, loss))) for batch, loss in zip((16, 4), others, strict=False)]
    found = recommended(*batches, runs=(LARGE, *runs), found={"time": None})
    assert reason(found) == (
        f"it ends at val loss 3.200, {place}; this setting wastes 1.2% of the training time on average against the best one. {LARGEST}"
    )


@for_every(other=[2.5, 3.18, 3.4])
def test_of_tied_runs_the_smaller_batch_is_not_called_the_best(other: float) -> None:
    """Batch 16 ends at 3.2, batch 32 at the other loss, and seeds make differences of about 0.05."""
    config = example_config(stages=[{"type": "grid", "micro_batch_size": [16], "effective_batch_size": [16, 32]}])
    study = Study(config.name)
    for accumulation, loss in ((1, 3.2), (2, other)):
        split: dict[str, Any] = {"micro_batch_size": 16, "gradient_accumulation_steps": accumulation}
        add_trial(study, config, f"grid-m16k{accumulation}", **split)
        end_trial(study, f"grid-m16k{accumulation}", 60.0, {"val_loss": loss})
    (keys,) = config.stages
    tell(study, Concluded(**asdict(stage_of(keys).conclude(StageContext(keys, config, study)))))
    found = recommendation_of(config, study)
    is_best = found.evidence.val_loss == min(3.2, other)
    for said in (found.verdict, found.answer.because):
        assert "the best of 2 runs" in said
        assert (f"tied with the best of 2 runs, which ends at val loss {other:.3f}" in said) is not is_best


def test_a_target_is_told_in_seconds_and_a_run_that_missed_it_with_its_projection() -> None:
    target: dict[str, Any] = {"objective": "target", "target_loss": 3.4}
    batches = batch_findings(8, 90.0, 0.02, score_low=80.0), batch_findings(32, 45.0, 0.97, score_low=40.0)
    found = recommended(*batches, **target)
    projected = 60 * 2 ** (0.1 / 0.5)
    assert reason(found).startswith(
        "it reaches val loss 3.4 after 45 s of training, your own setting (effective batch 8, learning rate 0.0006) ends at val loss "
        f"3.500 and would reach 3.4 after about 1 min {round(projected) - 60} s; it reaches the same loss in 36% of the training time"
    )


def test_a_run_that_has_come_to_rest_is_not_told_when_it_would_reach_a_target() -> None:
    """Two evaluations that hardly differ, projected, give more years than the world has."""
    resting = Run(8, ((30, 3.5001), (60, 3.5)))
    found = recommended(*CLEAR, runs=(resting, LARGE), objective="target", target_loss=3.4)
    told = "ends at val loss 3.500 and would not reach 3.4 in 100 times that training"
    assert told in found.verdict
    never = Run(8, ((30, 3.5), (60, 3.5)))
    assert told in recommended(*CLEAR, runs=(never, LARGE), objective="target", target_loss=3.4).verdict


@for_every(target=[3.0, 3.1999, 3.2, 3.4], regret=[0.012, 0.3])
def test_projected_times_decide_nothing_and_are_the_first_thing_that_is_said_of_them(
    target: float, regret: float
) -> None:
    """The best run ends at 3.2."""
    batches = batch_findings(8, 90.0, 0.02, score_low=80.0), batch_findings(32, 45.0, 0.97, score_low=40.0)
    keys: dict[str, Any] = {"objective": "target", "target_loss": target, "found": {"regret_time": regret}}
    found = recommended(*batches, **keys)
    no_run_reached = target < 3.2
    assert found.decided is (not no_run_reached and regret < 0.03)
    assert ("projected" in found.answer.caveats[0] and f"({target:g})" in found.answer.caveats[0]) is no_run_reached
    assert ("Warning: no setting that was compared reached" in found.verdict) is no_run_reached
    if no_run_reached:
        assert found.answer.badge == "undetermined"
        assert found.would_decide is not None
        assert "sample_budget" in found.would_decide


@for_every(
    target=[3.25, 3.6, 3.7],
    own=[SMALL, Run(8, ((30, 3.5), (60, 3.3)))],
    regret=[0.012, 0.3],
    winner=[8, 32],
)
def test_a_target_that_the_first_evaluation_has_reached_decides_nothing_and_keeps_nothing(
    target: float, own: Run, regret: float, winner: int
) -> None:
    """The larger batch is at 3.6 then."""
    batches = batch_findings(8, 90.0, 0.02, score_low=80.0), batch_findings(32, 45.0, 0.97, score_low=40.0)
    keys: dict[str, Any] = {"objective": "target", "target_loss": target, "found": {"regret_time": regret}}
    found = recommended(*batches, runs=(own, LARGE), winner=winner, **keys)
    was_first = own.curve[0][1] <= target or (winner == 32 and target >= 3.6)
    said = f"target_loss ({target:g}) was reached by the first evaluation already"
    assert found.answer.caveats[0].startswith(said) is was_first
    assert (f"Warning: {said}" in found.verdict) is was_first
    assert ("or raise evaluations (8)" in (found.would_decide or "")) is was_first
    if was_first:
        assert (found.answer.badge, found.decided) == ("undetermined", False)


@for_every(target=[None, 3.5])
def test_alternatives_are_told_in_the_order_of_what_decides(target: float | None) -> None:
    """The one that comes to the target first is the one that ends highest of those that do."""
    runs = SMALL, LARGE, Run(16, ((30, 3.7), (40, 3.4), (60, 3.39))), Run(64, ((30, 3.8), (58, 3.6), (60, 3.3)))
    batches = [batch_findings(run.batch, 90.0, 0.25, score_low=80.0) for run in runs]
    keys: dict[str, Any] = {} if target is None else {"objective": "target", "target_loss": target}
    found = recommended(*batches, runs=runs, **keys)
    order = [one.micro_batch_size for one in found.alternatives]
    assert order == ([64, 16, 8] if target is None else [16, 64, 8])


def test_a_study_of_an_earlier_version_claims_no_more_than_it_knew() -> None:
    found = recommended(winner=8, seconds=None, found=EARLIER)
    assert reason(found) == "no batch that was tried is better than yours."
    assert (found.p_best, found.would_decide) == (None, None)
    later = recommended(*CLEAR, found=EARLIER)
    assert reason(later) == f"val loss 3.200 against 3.500 {OWN} {SAME_TIME}."
    assert (later.decided, later.p_best) == (False, None)


def of_two_seeds(*own: float | None) -> Recommendation:
    """What follows where batch 32 ends at 3.2 and 3.4, and the user's own, 8, at these losses; None is a seed that diverged."""
    config = example_config(stages=[{"type": "train"}], seeds=[0, 1], batch={"micro_batch_size": 8})
    study = Study(config.name)
    for batch, losses in ((8, own), (32, (3.2, 3.4))):
        for seed, loss in enumerate(losses):
            name, role = f"train-m{batch}k1", "baseline" if batch == 8 else ""
            add_trial(study, config, f"{name}-s{seed}", role, name, micro_batch_size=batch, seed=seed)
            state, cause = (TrialState.PRUNED, Cause.DIVERGED) if loss is None else (TrialState.COMPLETE, None)
            end_trial(study, f"{name}-s{seed}", 60.0, {"val_loss": loss}, state, cause)
    batches = batch_findings(8, 3.6, 0.02), batch_findings(32, 3.3, 0.98)
    conclude(study, TrainFindings("train-m32k1-s0", 3.3, batches=batches), "")
    return recommendation_of(config, study)


def test_the_losses_are_the_means_of_the_seeds() -> None:
    found = of_two_seeds(3.5, 3.7)
    assert "val loss 3.300 against 3.600 with your own setting" in found.verdict
    assert "Measured with 2 seeds, " in found.verdict


@pytest.mark.parametrize(("own", "num_diverged"), [((3.1, None), 1), ((None, 3.1), 1), ((None, None), 2)])
def test_nothing_is_held_against_the_users_own_setting_where_a_seed_of_it_diverged(
    own: tuple[float | None, ...], num_diverged: int
) -> None:
    found = of_two_seeds(*own)
    for said in (found.verdict, found.answer.gain):
        assert (
            f"your own setting (effective batch 8, learning rate 0.0003) diverged with {num_diverged} of 2 seeds"
            in said
        )
        assert "3.100" not in said


@pytest.mark.parametrize(
    ("given", "whose_it_is"),
    [
        ({"name": "s", "optimizer": {"weight_decay": 0.1}}, "batchscout's default setting"),
        ({"name": "s", "optimizer": {"lr": 1e-3}}, "your own setting"),
        ({"name": "s", "batch": {"micro_batch_size": 8}}, "your own setting"),
        ({}, "your own setting"),
    ],
    ids=["neither rate nor batch", "a rate", "a batch", "not known"],
)
def test_a_setting_that_nobody_gave_is_not_called_the_users(given: dict[str, JsonValue], whose_it_is: str) -> None:
    study = Study("s")
    tell(study, RunBegan(token="first", given=given))
    assert whose(example_config(), study, None) == whose_it_is


def test_losses_that_hardly_change_are_said_first_with_what_to_raise() -> None:
    flat = Run(8, ((30, 3.5007), (60, 3.5))), Run(32, ((30, 3.4005), (60, 3.4)))
    said = recommended(runs=flat).answer.caveats[0]
    assert all(one in said for one in ("0.02%", "raise optimizer.lr", "sample_budget")), said
    learns = recommended(runs=(flat[0], LARGE))
    assert not any("hardly" in caveat for caveat in learns.answer.caveats)


# The machine


@pytest.mark.parametrize(("rates", "told"), [
    ({8: (99.0, 100.0, 101.0), 16: (98.0, 101.0, 104.0), 32: (102.0, 104.0, 106.0)}, "100 to 104 at effective batches 8 to 32"),
    ({8: (99.0, 100.0, 101.0), 16: (80.0, 82.0, 84.0)}, "82 to 100 at effective batches 8 to 16"),
    ({8: (99.0, 100.0, 101.0), 16: (98.0, 104.0, 110.0)}, None),
    ({8: (99.0, 100.0, 101.0)}, None),
], ids=["flat", "falling", "it may grow by more", "a single batch"])  # fmt: skip
def test_a_machine_on_which_a_larger_batch_is_no_faster_is_told(
    rates: dict[int, tuple[float, float, float]], told: str | None
) -> None:
    timed = tuple(Rate(batch, 1, batch, NONE, rate, low, high, 3, None) for batch, (low, rate, high) in rates.items())
    throughput = ThroughputFindings(None, None, None, {}, rates=timed)
    found = recommended(batch_findings(8, 3.5, 0.05), batch_findings(32, 3.2, 0.95), earlier=(throughput,))
    assert ("Samples/s do not grow with the batch" in found.verdict) == (told is not None)
    assert told is None or f" Samples/s do not grow with the batch on this machine: {told}." in found.verdict


# Scope


@pytest.mark.parametrize(("scope", "words"), [
    (Scope(1, 64, 1024, (4,), 1), "one seed, 64 validation samples, a run of 1.02k samples, effective batch 4, no accumulation"),
    (Scope(1, 1, 1024, (4,), 1), "one seed, 1 validation sample, a run of 1.02k samples, effective batch 4, no accumulation"),
    (Scope(3, 256, 32_768, (4, 8, 64), 8),
     "3 seeds, 256 validation samples, a run of 32.8k samples, effective batches 4 to 64, accumulation up to 8"),
])  # fmt: skip
def test_the_scope_in_words(scope: Scope, words: str) -> None:
    assert str(scope) == words


def test_the_scope_is_of_what_completed() -> None:
    found = recommended(*CLEAR)
    assert found.scope == Scope(1, 256, 32_768, (8, 32), 1)
    assert found.to_json()["scope"] == {
        "seeds": 1, "validation_samples": 256, "sample_budget": 32_768, "effective_batch_sizes": [8, 32],
        "largest_accumulation": 1,
    }  # fmt: skip


def test_no_more_validation_samples_are_told_than_there_are() -> None:
    found = recommended(*CLEAR, facts=Facts(num_val_samples=64))
    assert "Measured with one seed, 64 validation samples, " in found.verdict


@pytest.mark.parametrize(
    ("rate", "objective", "is_told"), [(900.0, "time", True), (410.0, "time", False), (900.0, "samples", False)]
)
def test_a_faster_batch_that_runs_of_this_length_cannot_compare_is_named_with_the_length_that_would(
    rate: float, objective: str, is_told: bool
) -> None:
    """Of 32,768 samples at the baseline's 8, a run of 4,096 has 18 steps in its time at 900 samples/s, at 400 for the baseline."""
    points = tuple(
        replace(FRONTIER.chosen, micro_batch_size=m, samples_per_second=r)
        for m, r in ((8, 400.0), (32, 400.0), (4096, rate))
    )
    found = recommended(
        *CLEAR, earlier=(replace(FRONTIER, measured=points),), batch={"micro_batch_size": 8}, objective=objective
    )
    told = "The study's runs are too short for effective batch 4096: in a full run it would get 18 optimizer steps, and 40 are needed; 2.25 x as"
    assert (told in found.verdict) is is_told, found.verdict
    assert ("too short" in found.verdict) is is_told


# What speaks against the recommended run


@pytest.mark.parametrize(("slowed", "busy"), [((), False), (("frontier-none-m4",), False), ((), True), (("a",), True)])
def test_a_machine_that_was_busy_is_a_warning(slowed: tuple[str, ...], busy: bool) -> None:
    timed = ThroughputFindings(None, None, None, {}, busy=busy)
    found = recommended(
        batch_findings(8, 3.5, 0.05),
        batch_findings(32, 3.2, 0.95),
        earlier=(replace(FRONTIER, disturbed=slowed), timed),
    )
    stages = ", ".join(["frontier"] * bool(slowed) + ["throughput"] * busy)
    told = f" Warning: the machine was busy, or its speed uneven, while speeds were timed ({stages}), and these speeds decide which batches "
    assert (told in found.verdict) == bool(stages)
    assert ("Warning" in found.verdict) == bool(stages)


@pytest.mark.parametrize(("speed", "objective", "said"), [
    (650.0, "time", "it trains at 0.65 x the baseline's speed (650 against 1k tokens/s), so the same samples take 1.5 times as long; "
     "the comparison at equal training time counts that"),
    (650.0, "samples", "take 1.5 times as long; a comparison at equal samples does not count that; objective: time does"),
    (950.0, "time", None),
    (2000.0, "samples", None),
    (None, "time", None),
])  # fmt: skip
def test_a_batch_that_is_slower_than_the_baseline_is_not_recommended_without_a_word(
    speed: float | None, objective: str, said: str | None
) -> None:
    runs = (replace(SMALL, tokens_per_second=1000.0), replace(LARGE, tokens_per_second=speed))
    found = recommended(*CLEAR, runs=runs, objective=objective)
    assert ("Warning: it trains at" in found.verdict) is (said is not None)
    assert said is None or said in found.verdict


def test_the_speed_of_samples_that_are_no_tokens_is_told_in_samples() -> None:
    runs = (replace(SMALL, tokens_per_second=1000.0), replace(LARGE, tokens_per_second=650.0))
    assert "(650 against 1k samples/s)" in recommended(*CLEAR, runs=runs, facts=Facts(counted="samples")).verdict


def test_a_run_that_overfits_is_told_with_the_samples_at_which_its_loss_was_lowest() -> None:
    rising = (2560, 2.6, 2.0), (3072, 2.7, 1.7), (3584, 2.8, 1.4)
    found = of_a_curve(((1024, 3.0, 3.0), (2048, 2.5, 2.2), *rising, (4096, 2.9, 1.1)))
    assert (
        " Warning: it overfits: validation loss was lowest after 2,048 samples (2.500) and rose to 2.900 while training loss "
        "fell from 2.200 to 1.100; a shorter run" in found.verdict
    )


def test_one_that_does_not_is_told_without_a_warning() -> None:
    assert "Warning" not in of_a_curve(((1024, 3.0, 3.0), (4096, 2.5, 1.1))).verdict


@pytest.mark.parametrize(("num_samples", "passes"), [(4096, "8.0"), (8192, None)])
def test_finetuning_on_few_samples_is_told_with_how_often_each_is_met(num_samples: int, passes: str | None) -> None:
    found = of_a_curve(((1024, 3.0, 3.0),), num_samples, regime="finetune", initial_weights="own")
    assert ("Warning" in found.verdict) is (passes is not None)
    if passes:
        assert (
            f"it sees each of the 4,096 training samples {passes} times, and finetuning takes 2 to 4 passes"
            in found.verdict
        )
        assert "a sample_budget of at most 16,384" in found.verdict
    assert "Warning" not in of_a_curve(((1024, 3.0, 3.0),), num_samples).verdict, "pre-training says it in its notes"


@pytest.mark.parametrize(
    ("waited", "remedy"),
    [
        ({"data_wait": 0.34, "data_workers": 2.0}, "raise data.workers (now 2), not the batch"),
        (
            {"data_wait": 0.34, "data_workers": 1.0, "stream_passes": 0.0},
            "make the stream cheaper to read, which one process does, or return a map-style data set, and raise data.workers, not the batch",
        ),
        ({"data_wait": 0.09, "data_workers": 2.0}, None),
    ],
)
def test_a_run_that_waited_for_data_is_told_with_the_remedy(waited: dict[str, float], remedy: str | None) -> None:
    found = of_a_curve(((1024, 3.0, 3.0),), waited=waited).verdict
    if remedy is None:
        assert "Warning" not in found
    else:
        assert f" Warning: the recommended run is input-bound: 34% of each step waits for data; {remedy}." in found


# The five lines


def five_lines(found: Recommendation, run_dir: str = "runs/mine") -> dict[str, str]:
    lines = found.answer.lines(run_dir)
    assert list(lines) == ["Train with", "Verdict", "Gain", "Caveat", "Next"]
    return lines


CLOSE = batch_findings(8, 3.5, 0.6), batch_findings(32, 3.51, 0.4)
FASTER = replace(
    FRONTIER,
    measured=tuple(
        replace(FRONTIER.chosen, micro_batch_size=m, samples_per_second=r) for m, r in ((8, 400.0), (4096, 900.0))
    ),
)


def test_a_decided_answer_says_what_it_gains_from_what_and_is_to_be_pasted() -> None:
    lines = five_lines(recommended(*CLEAR))
    assert lines == {
        "Train with": "micro-batch 32, no accumulation (effective batch 32), activation checkpointing none and learning rate 0.0006",
        "Verdict": "decided: nothing else that was compared is likely to save 3%; this setting wastes 1.2% of the training time on average against the best one",
        "Gain": SAVED.removeprefix("it reaches ").replace(
            "0.9) = ", "0.9) of your own setting (effective batch 8, learning rate 0.0006) = "
        ),
        "Caveat": LARGEST[0].lower() + LARGEST[1:-1] + " (and 1 more in the report)",
        "Next": "batchscout export runs/mine",
    }


def test_the_users_own_setting_that_stays_is_nothing_to_change() -> None:
    lines = five_lines(recommended(*CLOSE, winner=8, compile=False))
    assert lines["Verdict"].startswith("keep yours: ")
    assert (lines["Gain"], lines["Next"]) == ("nothing: it is your own setting", "nothing to change")


@pytest.mark.parametrize("form", [{}, {"compile": True}])
def test_a_setting_that_nobody_gave_is_not_theirs_to_keep(form: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"compile": False, "form": form, "given": {"name": "s"}}
    found = recommended(*CLOSE, winner=8, **keys)
    lines = five_lines(found)
    assert found.decided
    assert lines["Verdict"].startswith(
        "decided: nothing else that was compared is likely to save 3%; this setting wastes"
    )
    assert (lines["Gain"], lines["Next"]) == (
        "nothing: it is batchscout's default setting",
        "batchscout export runs/mine",
    )
    unsure = five_lines(recommended(*CLOSE, winner=8, found={"regret_time": 0.08}, **keys))
    assert unsure["Verdict"].startswith("undetermined: between effective batches 8 and 32")
    other = recommended(*CLOSE, winner=8, batch={"micro_batch_size": 16}, **keys)
    assert not re.search("your own|yours", other.verdict + other.answer.text())


def test_an_open_answer_says_between_what_and_which_command_goes_on() -> None:
    """Of 4 runs that waste 8 %, about 7 more of a minute each would decide at a useful gain of 3 %: 0.12 device-hours."""
    open_ = recommended(*CLOSE, winner=8, found={"regret_time": 0.08}, budget={"device_hours": 1})
    lines = five_lines(open_, "'my runs/a'")
    assert lines["Verdict"].startswith("undetermined: between effective batches 8 and 32 (8 with probability 0.60)")
    assert "this setting wastes 8.0%" in lines["Verdict"]
    where = "'my runs/a'/study.yaml --dir 'my runs/a'"
    assert (
        lines["Next"]
        == f"about 7 more runs of 1 min 0 s each, 0.12 device-hours:\nbatchscout run {where} --set stages.train.max_runs=9 --set budget.device_hours=1.12"
    )
    assert open_.answer.next.count("RUN_DIR") == 2, "a recommendation does not know where its study lies"


def test_many_device_hours_are_told_as_people_read_them() -> None:
    long = tuple(
        replace(run, curve=tuple((600 * seconds, loss) for seconds, loss in run.curve)) for run in (SMALL, LARGE)
    )
    found = recommended(*CLOSE, winner=8, found={"regret_time": 0.08}, runs=long, budget={"device_hours": 1000})
    assert "about 7 more runs of 10 h 0 min each, 70 device-hours" in found.answer.next
    far = recommended(*CLOSE, winner=8, found={"regret_time": 0.16}, runs=long, budget={"device_hours": 1000})
    assert re.search(r"each, \d{3} device-hours", far.answer.next)


def test_what_further_runs_take_is_told_by_those_that_ran_to_their_end() -> None:
    cut = tuple(Run(batch, ((5, 4.0),)) for batch in (2, 4, 16))
    found = recommended(*CLOSE, winner=8, found={"regret_time": 0.08}, pruned=cut)
    assert "more runs of 1 min 0 s each" in found.answer.next


def test_the_next_command_names_the_cluster_on_which_the_study_ran_last() -> None:
    for options, typed in (
        (("--address", "ray://a b:1", "--min-nodes", "2"), " --address 'ray://a b:1' --min-nodes 2"),
        ((), ""),
    ):
        found = recommended(*CLOSE, winner=8, found={"regret_time": 0.08}, cluster_options=options)
        assert f"\nbatchscout run RUN_DIR/study.yaml --dir RUN_DIR{typed} --set" in found.answer.next


def test_an_open_answer_of_runs_that_are_too_short_for_a_faster_batch_says_the_length_that_would_compare_it() -> None:
    keys: dict[str, Any] = {"earlier": (FASTER,), "batch": {"micro_batch_size": 8}}
    lines = five_lines(recommended(*CLOSE, winner=8, found={"regret_time": 0.08}, **keys))
    assert lines["Verdict"].startswith(
        "too short to tell: effective batch 4096: in a full run it would get 18 optimizer steps"
    )
    budget = lines["Verdict"].split("sample_budget: ")[1].split()[0]
    assert (
        lines["Next"]
        == f"full runs that are long enough:\nbatchscout run runs/mine/study.yaml --dir runs/mine-longer --set sample_budget={budget}"
    )
    decided = five_lines(recommended(*CLEAR, **keys))
    assert decided["Verdict"].startswith("decided: ")
    assert decided["Caveat"].startswith("the study's runs are too short for effective batch 4096: ")


@pytest.mark.parametrize(
    ("own", "form"),
    [
        ({"batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 4}}, {}),
        ({"compile": None}, {"compile": True}),
        ({}, {"compile": "whole"}),
        ({"compile": True}, {"compile": False}),
        ({}, {"activation_checkpointing": "full"}),
        ({"precision": "float32"}, {"precision": "bfloat16"}),
        ({}, {"memory_knobs": ("optimizer_8bit",)}),
        ({}, {"model": ModelConfig(target="gpt", kwargs={"num_layers": 6, "cross_entropy": "chunked"})}),
    ],
    ids=[
        "split",
        "blocks compiled",
        "one graph",
        "not compiled",
        "checkpointing",
        "precision",
        "knob",
        "cross-entropy",
    ],
)
def test_batch_and_rate_that_stay_in_a_faster_form_are_something_to_change(
    own: dict[str, Any], form: dict[str, Any]
) -> None:
    keys: dict[str, Any] = {"compile": False, **own}
    lines = five_lines(recommended(*CLOSE, winner=8, form=form, **keys))
    assert lines["Verdict"].startswith("keep yours: ")
    assert "fastest form" in lines["Gain"]
    assert lines["Next"] == "batchscout export runs/mine"


@pytest.mark.parametrize(
    ("judgement", "is_told"), [("splits_differ", True), ("no_sum", True), ("equivalent", False), ("random", False)]
)
def test_splits_that_do_not_train_alike_limit_the_answer(judgement: Any, is_told: bool) -> None:
    found = recommended(*CLOSE, winner=8, earlier=(EquivalenceFindings(1e-4, {}, judgement=judgement),))
    assert any("splits of one batch do not train alike" in one for one in found.answer.caveats) is is_told


def test_the_nearest_to_the_users_batch_that_was_run_is_not_called_their_own() -> None:
    kept = five_lines(recommended(*CLOSE, winner=8, batch={"micro_batch_size": 16}))
    assert kept["Verdict"].startswith("undetermined: your own effective batch 16 was not run; ")
    assert kept["Gain"] == "nothing: it is the setting nearest to yours"
    assert kept["Next"].startswith("batchscout export"), "it may be better than theirs"
    other = recommended(*CLEAR, batch={"micro_batch_size": 16})
    assert (
        other.answer.caveats[0]
        == "your own effective batch 16 was not run; figures are against 8, the nearest that was"
    )
    assert "of the setting nearest to yours (effective batch 8, learning rate 0.0006)" in other.answer.gain


def test_a_schedule_that_was_not_the_users_own_is_the_first_thing_that_limits_the_answer() -> None:
    def first(own_run: OwnRun, **keys: Any) -> str:
        return recommended(*CLOSE, winner=8, facts=Facts(own_run=own_run), **keys).answer.caveats[0]

    said = first(OwnRun("script"))
    assert "warmup_stable_decay" in said
    assert "set schedule to yours" in said
    for schedule in ("cosine", "warmup_stable_decay"):
        named = {"schedule": {"type": schedule}}
        assert "set schedule" not in first(OwnRun("script"), given=named, **named), "somebody has"
    assert "set schedule" not in first(OwnRun("lightning", schedule=Schedule(type="constant")))


def test_nothing_is_decided_while_a_stage_that_chooses_is_to_come_or_for_another_length_than_was_asked_for() -> None:
    unfinished = recommended(*CLEAR, stages=[{"type": "train", "max_runs": 2}, {"type": "learning_rate"}])
    assert "learning_rate is still to come" in five_lines(unfinished)["Verdict"]
    elsewhere = recommended(*CLEAR, real_run={"samples": 1_000_000})
    assert (unfinished.decided, elsewhere.decided) == (False, False)


def test_what_did_not_run_after_a_stage_that_ended_the_study_is_not_called_to_come() -> None:
    stages = [{"type": "train", "max_runs": 2}, {"type": "learning_rate"}, {"type": "regularization"}]
    config = example_config(stages=stages, batch={"micro_batch_size": 8}, real_run={"samples": 1_000_000})
    study = Study(config.name)
    for run in (SMALL, LARGE):
        add(study, config, f"train-m{run.batch}k1", run, role="baseline" if run.batch == 8 else "")
    conclude(study, TrainFindings("train-m32k1", 3.2, batches=CLEAR, seconds=60.0, regret_time=0.012), "")
    tell(study, Concluded(stage="learning_rate", ok=False, reason="none of its trials finished"))
    found = recommendation_of(config, study)
    assert "undetermined: the study ended at learning_rate, so regularization did not run" in found.answer.text()
    assert any(one.endswith("1M: the study ended at learning_rate") for one in found.answer.caveats)


@for_every(real_run=[None, 40_000, 100_000, 1_000_000], regret=[0.04, 0.3])
def test_the_keys_that_would_decide_make_a_study(real_run: int | None, regret: float) -> None:
    keys: dict[str, Any] = {"earlier": (FASTER,), "batch": {"micro_batch_size": 8}, "budget": {"device_hours": 1}}
    asked: dict[str, Any] = {"real_run": {"samples": real_run}} if real_run else {}
    lines = five_lines(recommended(*CLOSE, winner=8, found={"regret_time": regret}, **keys, **asked))
    words = shlex.split(lines["Next"].rpartition("\n")[2])
    tree = json.loads(
        example_config(**asked, budget={"device_hours": 1}, stages=[{"type": "train"}]).model_dump_json(
            exclude_unset=True
        )
    )
    changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert bool(changes) is (words[1] == "run")
    for change in changes:
        apply_override(tree, change)
    followed, before = parse_study(tree, "the study that follows"), example_config(**asked)
    assert followed.budget
    longer = followed.sample_budget > before.sample_budget or followed.budget.device_hours > 1
    assert longer is bool(changes), "it may take longer than the one before"


def test_what_was_compared_with_nothing_is_not_called_decided() -> None:
    alone = recommended(winner=8, runs=(SMALL,), found=EARLIER)
    assert alone.decided is False
    assert five_lines(alone)["Verdict"] == "undetermined: only one run ended, so nothing was compared"


def test_all_that_limits_an_answer_is_told_what_matters_most_first_and_what_was_measured_last() -> None:
    rising = tuple((256 + 128 * step, 3.0 + 0.1 * step, 2.9 - 0.1 * step) for step in range(7))
    found = of_a_curve(rising, waited={"data_wait": 0.34})
    assert [caveat.split(" ", 2)[:2] for caveat in found.answer.caveats] == [
        ["it", "overfits:"], ["the", "recommended"], ["measured", "with"],
    ]  # fmt: skip
    assert five_lines(found)["Caveat"].endswith(" (and 2 more in the report)")


def of_a_curve(
    curve: tuple[tuple[int, float, float], ...],
    num_samples: int = 32_768,
    waited: Mapping[str, float] | None = None,
    **changes: Any,
) -> Recommendation:
    """curve: (samples, validation loss, training loss) at each evaluation."""
    config = example_config(**{"stages": [{"type": "train"}], "batch": {"micro_batch_size": 8}, **changes})
    study = Study(config.name)
    tell(study, FactsRead(facts=Facts(num_train_samples=num_samples)))
    add_trial(study, config, "train-m8k1", "baseline", micro_batch_size=8, learning_rate=6e-4)
    for samples, val_loss, loss in curve:
        tell(
            study,
            Evaluated(id="train-m8k1", metrics={"samples_seen": samples, "val_loss": val_loss, "loss": loss}, rungs={}),
        )
    end_trial(study, "train-m8k1", 1.0, dict(waited or {}))
    conclude(study, TrainFindings("train-m8k1", curve[-1][1]), "")
    return recommendation_of(config, study)


@pytest.mark.parametrize(
    ("accumulation", "words"),
    [(1, "no accumulation, on each of 2 ranks (effective batch 16)"),
     (3, "3 accumulation steps, on each of 2 ranks (effective batch 48)")],
)  # fmt: skip
def test_the_ranks_among_which_a_batch_is_split_are_told_with_it(accumulation: int, words: str) -> None:
    config = example_config(stages=[{"type": "train"}], world_size=2)
    study = Study(config.name)
    add_trial(study, config, "train-m8", micro_batch_size=8, gradient_accumulation_steps=accumulation)
    end_trial(study, "train-m8", 60.0, {"val_loss": 3.0})
    conclude(study, TrainFindings("train-m8", 3.0), "")
    found = recommendation_of(config, study)
    assert found.answer.settings.startswith(f"micro-batch 8, {words}")
    assert f"effective batch {16 * accumulation} (8 x {accumulation} x 2)" in repr(found)


def test_a_verdict_warns_of_lanes_that_died_under_the_study() -> None:
    config, study = example_config(stages=[{"type": "train"}]), Study("example")
    add_trial(study, config, "train-m8k1")
    died = Noticed(id="train-m8k1", notice=NoticeKind.LANE_DIED, reason="rank 0 was killed by SIGSEGV")
    end_trial(study, "train-m8k1", 60.0, {"val_loss": 3.0})
    conclude(study, TrainFindings("train-m8k1", 3.0), "")
    for event, is_told in ((None, False), (died, True)):
        if event is not None:
            tell(study, event)
        found = recommendation_of(config, study)
        assert ("died once" in found.verdict and "train-m8k1: rank 0 was killed by SIGSEGV" in found.verdict) == is_told


def test_a_verdict_tells_micro_batches_that_are_cut_by_tokens() -> None:
    config = example_config(stages=[{"type": "train"}], micro_batch={"tokens": 9000}, world_size=2)
    study = Study(config.name)
    tell(study, FactsRead(facts=Facts(longest_sample=1024)))
    add_trial(study, config, "train-m8k4", micro_batch_size=8, gradient_accumulation_steps=4)
    by_tokens = {"micro_batches_per_step": 3.25, "tokens_per_step": 12_345.6, "padding_share": 0.1234}
    end_trial(study, "train-m8k4", 60.0, {"val_loss": 3.0, **by_tokens})
    conclude(study, TrainFindings("train-m8k4", 3.0), "")
    found = recommendation_of(config, study)
    assert found.verdict.startswith(
        "Train with micro-batches of at most 8,192 tokens (as many as 8 of the longest samples have), at most 4 accumulation steps, on each of "
        "2 ranks (effective batch 64; a step had 12,346 tokens on average, in 3.2 micro-batches over all ranks of which 12% is padding)"
    )
    tree = found.to_json()
    assert tree["micro_batch_tokens"] == 8192
    assert isinstance(tree["evidence"], dict)
    assert by_tokens.items() <= tree["evidence"].items()
    assert Recommendation.from_json(json.dumps(tree)).micro_batch_tokens == 8192
