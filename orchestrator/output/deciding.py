"""What would decide a study that could not: in words, and as the keys to change. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.output.known import compared_of, is_projected, is_too_easy, known_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.generalisation import Overfitting
from batchscout.orchestrator.stages.estimates.next_run import MOST_RUNS_FORETOLD, runs_to_decide
from batchscout.orchestrator.stages.horizons import carried_to
from batchscout.orchestrator.stages.rates import rates
from batchscout.orchestrator.stages.train.foreseen import times_batches
from batchscout.orchestrator.stages.train.propose import num_counted
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import number_text, training_time_text

A_FEW_TIMES = 4
"""A prediction for a run that is longer than the study's by no more than this is about as sure as the study's own
(docs/benchmarks.md, horizons)."""


@dataclass(frozen=True)
class ToDecide:
    """What would decide a study."""

    what: str
    how: str = ""
    """Which keys to change, in words; empty where `what` says it."""
    keys: Mapping[str, float] = field(default_factory=dict)
    """The keys of the study file that would do it, with their new values; none where more is to be weighed."""
    goes_on: bool = True
    """True if the same study goes on with these keys, False if they make another one."""

    @property
    def words(self) -> str:
        return f"{self.what}: {self.how}" if self.how else self.what


def runs_of_length(config: StudyConfig, sample_budget: int) -> dict[str, float]:
    """Return the keys of a study whose full runs have so many samples; its budget goes with them."""
    hours = (
        {}
        if config.budget is None
        else {"budget.device_hours": _hours(config.budget.device_hours * sample_budget / config.sample_budget)}
    )
    return {"sample_budget": sample_budget, **hours}


def _shorter(config: StudyConfig, overfitting: Overfitting) -> ToDecide:
    what, samples = "runs that end where the validation loss was lowest", overfitting.samples_seen
    if config.real_run:
        return ToDecide(what, f"sample_budget: {samples}, without real_run")
    return ToDecide(what, keys=runs_of_length(config, samples), goes_on=False)


def _hours(hours: float) -> float:
    return math.ceil(100 * hours) / 100


def to_decide(config: StudyConfig, study: Study, winner: Trial) -> ToDecide | None:
    """Return what would decide a study that could not; None where it did, and where nothing is known of it."""
    if is_projected(config, study, winner):
        return ToDecide(
            "runs that reach target_loss",
            f"raise it ({config.target_loss:g}), or sample_budget ({config.sample_budget})",
        )
    if is_too_easy(config, study, winner):
        return ToDecide(
            "a target_loss that is reached between two evaluations",
            f"lower it ({config.target_loss:g}), or raise evaluations ({config.evaluations})",
        )
    known, compared = known_of(config, study, winner), compared_of(study, winner)
    if known is None or not known.is_open(config.useful_gain):
        return None
    if known.overfitting:
        return _shorter(config, known.overfitting)
    if real := carried_to(study, winner):
        budget = max(math.ceil(real.samples / A_FEW_TIMES), A_FEW_TIMES * config.sample_budget)
        if budget >= real.samples:
            return ToDecide(
                "a study with runs as long as the real run", f"sample_budget: {real.samples}, without real_run"
            )
        longer = "a study with longer runs (sample_budget): at least a quarter of the real run's length"
        return ToDecide(longer, keys=runs_of_length(config, budget), goes_on=False)
    assert compared, "it is known of those"
    findings = compared.findings
    num_runs = sum(one.num_runs for one in findings.batches)
    train = config.keys_of(Train)
    context = train and StageContext(train, config, study, config.placement.lanes or 1)
    if context and not (times_batches(config) or rates(context)):
        return ToDecide(
            "runs of other batches and rates, for which train needs speeds", "add the stages frontier and throughput"
        )
    measured = [seconds for one in study.completed_runs if (seconds := one.metric("train_seconds"))]
    seconds = statistics.median(measured) if measured else findings.seconds or 0.0
    if config.budget and 3600 * config.budget.device_hours / config.world_size - study.lane_seconds < seconds:
        more = {"budget.device_hours": _hours(2 * config.budget.device_hours)}
        return ToDecide("further runs, for which budget.device_hours left no time", "raise it", more)
    ran = num_counted(context) if context else 0
    if context and ran < context.stage.most_runs(context.most_lanes):
        return ToDecide("more seeds, or a longer run (sample_budget): no further run of this length is worth its time")
    runs = runs_to_decide(known.regret_time, config.useful_gain, num_runs)
    keys = "stages.train.max_runs" + (" and budget.device_hours" if config.budget else "")
    if runs is None:
        return ToDecide(f"more than {MOST_RUNS_FORETOLD} further runs (raise {keys}), or more seeds")
    changes: dict[str, float] = {"stages.train.max_runs": ran + runs} if train else {}
    runs *= len(config.seeds)
    hours = runs * seconds * config.world_size / 3600
    if train and config.budget:
        changes["budget.device_hours"] = _hours(config.budget.device_hours + hours)
    in_all = (
        f"{number_text(_hours(hours))} device-hours"
        if config.budget
        else f"{training_time_text(runs * seconds)} in all"
    )
    each = f"of {training_time_text(seconds)}" if runs == 1 else f"of {training_time_text(seconds)} each, {in_all}"
    what = f"about {runs} more {'run' if runs == 1 else 'runs'} {each}"
    return ToDecide(what, f"raise {keys}", changes)
