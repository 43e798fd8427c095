"""Verdicts on the trials of a stage, from what is known of the study. Pure: the Director carries them out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import NoPruner, Pruner, StageKeys
from batchscout.orchestrator.decisions.decision import GO_ON, Action, Decision, stop
from batchscout.orchestrator.decisions.kill_rules import judge_losses, judge_plan, judge_probe, judge_throughput
from batchscout.orchestrator.decisions.pruners import Demand, Entrant, judge_rung, mean_of_seeds
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext, disturbance_in
from batchscout.orchestrator.stages.estimates.node_speeds import slowness, stragglers
from batchscout.orchestrator.stages.estimates.ranking import seconds_to
from batchscout.orchestrator.stages.estimates.speeds import usual_share
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import PLANNED_RATE, Metrics, Trial, TrialState
from batchscout.trainers.step_log import Step

# Candidates of different batches are compared from this share of their budgets on. benchmarks/recommendation.py says how
# often the best is cut.
ACROSS_BATCHES_FROM = 0.5
# A rate is judged after so many steps, when compiling and the slow first steps are over.
STEPS_BEFORE_RATE_IS_JUDGED = 20


def at_rung(
    study: Study, stage: StageKeys, level: int, num_lanes: int, target_loss: float | None = None
) -> dict[str, Decision]:
    """Return the verdict on every candidate that stands at its rung of this level and was not let past it.

    A level is a share of a run's own budget, so candidates of different budgets meet at equal cost. At an early level
    only those of one effective batch meet: of different batches, the larger one still catches up.
    """
    pruner: Pruner = getattr(stage, "pruner", NoPruner())  # stages without full runs have none
    if isinstance(pruner, NoPruner):
        return {}
    verdicts: dict[str, Decision] = {}
    for candidates in _who_meets(study.candidates(stage.type), level):
        rungs = {name: seeds[0].config.rungs[level] for name, seeds in candidates.items()}
        verdicts |= judge_rung(
            _where(rungs),
            [_entrant(name, seeds, level, target_loss) for name, seeds in candidates.items()],
            pruner.reduction_factor,
            synchronous=pruner.synchronous,
            first=level == 0,
            demand=_demand(study, stage, num_lanes),
            tie=_tie(candidates, level),
        )
    return verdicts


def _who_meets(candidates: dict[str, list[Trial]], level: int) -> list[dict[str, list[Trial]]]:
    """Return the candidates that are compared with each other at this level, in groups."""
    here = {name: seeds for name, seeds in candidates.items() if level < len(seeds[0].config.rungs)}
    groups: dict[int, dict[str, list[Trial]]] = {}
    for name, seeds in here.items():
        config = seeds[0].config
        early = config.rungs[level] < ACROSS_BATCHES_FROM * config.sample_budget
        groups.setdefault(config.effective_batch_size if early else 0, {})[name] = seeds
    return list(groups.values())


def _where(rungs: dict[str, int]) -> str:
    low, high = min(rungs.values()), max(rungs.values())
    return f"{low} samples" if low == high else f"{low} to {high} samples (the same share of each budget)"


def _tie(candidates: dict[str, list[Trial]], level: int) -> float:
    """Return by how much a candidate may trail without being cut: what the leader gained since half the rung, as that is
    about what others can still catch up."""
    means = {name: mean_of_seeds({t.id: _value_at(t, level) for t in seeds}) for name, seeds in candidates.items()}
    known = {name: value for name, value in means.items() if value is not None and math.isfinite(value)}
    if not known:
        return 0.0
    leader = min(known, key=lambda name: known[name])
    before = mean_of_seeds({t.id: _loss_at(t, t.config.rungs[level] / 2) for t in candidates[leader]})
    return 0.0 if before is None else max(0.0, before - known[leader])


def _loss_at(trial: Trial, samples: float) -> float | None:
    """Return the loss of the trial's evaluation nearest to so many samples."""
    known = [(abs(seen - samples), loss) for seen, loss in trial.curve("samples_seen")]
    return min(known)[1] if known else None


def _demand(study: Study, stage: StageKeys, num_lanes: int) -> Demand:
    """Return what else could run on a lane that is free, or that the verdict frees."""
    waiting = study.in_state(stage.type, TrialState.WAITING)
    newcomers = sum(not trial.rungs for trial in waiting)
    return Demand(newcomers / num_lanes, idle=not waiting)


def _entrant(name: str, seeds: list[Trial], level: int, target_loss: float | None) -> Entrant:
    """Return a candidate as the rung sees it: its seeds count as one, and a seed that ended earlier makes it the worst.

    A candidate that is cut stays among the entrants: how many go on must not depend on when it was cut.
    """
    out = all(trial.state.ended for trial in seeds)
    values = {trial.id: _value_at(trial, level) for trial in seeds}
    if not out or any(value is not None for value in values.values()):
        values |= {t.id: math.nan for t in seeds if t.state.ended and values[t.id] is None}
    return Entrant(
        name,
        mean_of_seeds(values),
        out=out,
        stays=_why_it_stays(seeds, target_loss),
        promoted=all(trial.config.rungs[level] in trial.promoted for trial in seeds),
    )


def _why_it_stays(seeds: list[Trial], target_loss: float | None) -> str:
    """Return why a candidate goes on whatever its loss at a rung: only what ran to its end can be chosen; empty where it may be cut."""
    if any(trial.protected for trial in seeds):
        return "never cut before the end"
    if target_loss is not None and all(math.isfinite(seconds_to(trial, target_loss)) for trial in seeds):
        return "it has reached target_loss"
    return ""


def _value_at(trial: Trial, level: int) -> float | None:
    """Return the trial's loss at its rung of this level. If it crossed several rungs at once it stands at the lowest of
    them that it was not let past, and has no value at the others."""
    rung = trial.config.rungs[level]
    return trial.rungs.get(rung) if all(lower in trial.promoted for lower in trial.rungs if lower < rung) else None


def levels_waited_at(study: Study, stage: StageKeys) -> list[int]:
    """Return the levels of the rungs at which trials are paused, the lowest first."""
    paused = study.in_state(stage.type, TrialState.PAUSED)
    return sorted({trial.config.rungs.index(min(trial.rungs.keys() - trial.promoted)) for trial in paused})


def on_report(context: StageContext[StageKeys], trial: Trial, metrics: Metrics, steps: Sequence[Step]) -> Decision:
    """Return stop for a trial whose latest report breaks a rule; else go on.

    steps: all that were heard from it.
    """
    decision = _on_validation(metrics)
    if decision.action is Action.STOP:
        return decision
    if not trial.config.evaluations:
        # A run of a few steps, of which no more is asked than a finite loss and usable steps.
        decision = judge_losses([step.loss for step in steps], 0, None, 1, None)
        return decision if decision.action is Action.STOP else _on_steps(context, metrics)
    decision = on_losses(context.config, trial, metrics, steps)
    if decision.action is Action.STOP or context.disturbance(metrics):
        return decision
    return on_speed(context.study, context.config, trial, metrics)


def on_evaluation(context: StageContext[StageKeys], trial: Trial) -> Decision:
    """Return stop for a trial that, by its speed and its evaluations, can no longer win; else go on."""
    if context.config.kill.min_relative_throughput is None:
        return GO_ON
    why = stage_of(context.stage).too_slow_to_win(context, trial)
    return GO_ON if why is None else stop(Cause.LOW_THROUGHPUT, why)


def on_end(context: StageContext[StageKeys], metrics: Metrics, steps: Sequence[Step]) -> Decision:
    """Return stop for a trial that ran to its end, and whose loss is not finite or whose steps crawl; else go on.

    steps: those that it had not told before.
    """
    bad_loss = next((step.loss for step in steps if not math.isfinite(step.loss)), None)
    if bad_loss is not None:
        return stop(Cause.DIVERGED, f"the loss is {bad_loss}")
    decision = _on_validation(metrics)
    return decision if decision.action is Action.STOP else _on_steps(context, metrics)


def on_losses(config: StudyConfig, trial: Trial, metrics: Metrics, steps: Sequence[Step]) -> Decision:
    """Return stop for a full run that diverges; else go on.

    metrics: those of its latest report. steps: all that were heard from it.
    """
    rules, batch = config.kill, trial.config.effective_batch_size
    # After a crash of the driver the first steps heard are not those of the start, and a branch's never are.
    num_steps = trial.config.num_steps_at(round(metrics.get("samples_seen") or 0))
    heard_from_start = len(steps) >= num_steps and trial.config.branch_from is None
    return judge_losses(
        [step.loss for step in steps],
        math.ceil(trial.config.warmup_samples / batch),
        rules.spike_deviations,
        rules.spike_steps,
        rules.above_start_factor if heard_from_start else None,
    )


def on_speed(study: Study, config: StudyConfig, trial: Trial, metrics: Metrics) -> Decision:
    """Return stop for a full run that is too slow, by the metrics of its latest report; else go on, as where time does not count."""
    rules = config.kill
    if trial.protected or config.objective == "samples":
        return GO_ON
    rate, samples = metrics.get("tokens_per_second"), metrics.get("samples_seen") or 0
    if rate is None or samples < STEPS_BEFORE_RATE_IS_JUDGED * trial.config.effective_batch_size:
        return GO_ON
    rates = [rival.metric("tokens_per_second") for rival in study.speed_rivals(trial)]
    best = max((known for known in rates if known is not None), default=None)
    decision = judge_throughput(rate, best, rules.min_relative_throughput, study.facts.rate_unit)
    if decision.action is Action.STOP:  # it must not lose for the node that it runs on
        rate *= _slowness(study, trial)
        decision = judge_throughput(rate, best, rules.min_relative_throughput, study.facts.rate_unit)
    return decision if decision.action is Action.STOP else _on_plan(study, config, trial, metrics)


def _slowness(study: Study, trial: Trial) -> float:
    """Return how many times as long a trial's steps take for the node that it runs on, as far as the study has seen."""
    return slowness(trial, stragglers(study.trials.values()))


def _on_plan(study: Study, config: StudyConfig, trial: Trial, metrics: Metrics) -> Decision:
    rules = config.kill
    planned, step_seconds = trial.proposal.expected.get(PLANNED_RATE), metrics.get("step_seconds")
    if planned is None or not step_seconds:
        return GO_ON
    rate = trial.config.effective_batch_size / step_seconds
    if judge_plan(rate, planned, rules.min_relative_throughput).action is Action.STOP:
        rate *= _slowness(study, trial)
    decision = judge_plan(rate, planned, rules.min_relative_throughput)
    if decision.action is not Action.STOP:
        return decision
    quiet = [one for one in study.of_stage(trial.stage) if not disturbance_in(study, config, one.metrics)]
    usual = min(1.0, usual_share(quiet) or 1.0)
    return judge_plan(rate, planned, rules.min_relative_throughput, usual)


def _on_steps(context: StageContext[StageKeys], metrics: Metrics) -> Decision:
    limit = stage_of(context.stage).step_seconds_limit(context)
    return GO_ON if limit is None else judge_probe(metrics, limit)


def _on_validation(metrics: Metrics) -> Decision:
    """Return stop for a validation loss that is not finite."""
    loss = metrics.get("val_loss", 0.0)
    if loss is not None and math.isfinite(loss):
        return GO_ON
    return stop(Cause.DIVERGED, f"the validation loss is {loss}")
