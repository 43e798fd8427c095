"""Verdicts on the trials of a stage, from what is known of the study. Pure: the Director carries them out."""

from __future__ import annotations

import math

from orchestrator.config.keys import StudyConfig
from orchestrator.config.stages import AshaPruner, KillRules, StageKeys, pruner_of
from orchestrator.decisions.decision import GO_ON, Action, Decision, stop
from orchestrator.decisions.kill_rules import judge_losses, judge_throughput
from orchestrator.decisions.pruners import Demand, Entrant, judge_rung, mean_of_seeds
from orchestrator.study.causes import Cause
from orchestrator.study.state import Study
from orchestrator.study.trial import Metrics, Trial, TrialState

# A rate is judged after so many steps, when compiling and the slow first steps are over.
STEPS_BEFORE_RATE_IS_JUDGED = 20


def at_rung(study: Study, stage: StageKeys, rung: int, num_lanes: int) -> dict[str, Decision]:
    """Return the verdict on every candidate that stands at the rung and was not let past it."""
    pruner = pruner_of(stage)
    if not isinstance(pruner, AshaPruner):
        return {}
    candidates = study.candidates(stage.type)
    lowest = next(iter(candidates.values()))[0].config.rungs[0]
    return judge_rung(
        rung,
        [_entrant(name, seeds, rung) for name, seeds in candidates.items()],
        pruner.reduction_factor,
        synchronous=pruner.synchronous,
        first=rung == lowest,
        demand=_demand(study, stage, num_lanes),
    )


def _demand(study: Study, stage: StageKeys, num_lanes: int) -> Demand:
    """Return what else could run on a lane that is free, or that the verdict frees."""
    waiting = study.in_state(stage.type, TrialState.WAITING)
    newcomers = sum(not trial.rungs for trial in waiting)
    return Demand(newcomers / num_lanes, idle=not waiting)


def _entrant(name: str, seeds: list[Trial], rung: int) -> Entrant:
    """Return a candidate as the rung sees it: its seeds count as one, and a seed that ended earlier makes it the worst.

    A candidate that is cut stays among the entrants: how many go on must not depend on when it was cut.
    """
    out = all(trial.state.ended for trial in seeds)
    values = {trial.id: _value_at(trial, rung) for trial in seeds}
    if not out or any(value is not None for value in values.values()):
        values |= {t.id: math.nan for t in seeds if t.state.ended and values[t.id] is None}
    return Entrant(
        name,
        mean_of_seeds(values),
        out=out,
        protected=any(trial.protected for trial in seeds),
        promoted=all(rung in trial.promoted for trial in seeds),
    )


def _value_at(trial: Trial, rung: int) -> float | None:
    """Return the trial's objective at the rung. If it crossed several rungs at once it stands at the lowest of them
    that it was not let past, and has no value at the others."""
    return trial.rungs.get(rung) if all(lower in trial.promoted for lower in trial.rungs if lower < rung) else None


def rungs_waited_at(study: Study, stage: StageKeys) -> list[int]:
    """Return the rungs at which trials are paused, the lowest first."""
    paused = study.in_state(stage.type, TrialState.PAUSED)
    return sorted({min(trial.rungs.keys() - trial.promoted) for trial in paused})


def between_rungs(study: Study, config: StudyConfig, trial: Trial, metrics: Metrics, losses: list[float]) -> Decision:
    """Return stop for a full run that diverges or is too slow; else go on.

    metrics: those of its latest report. losses: the loss of every step that was heard from it.
    """
    rules, batch = config.kill, trial.config.effective_batch_size
    # After a crash of the driver the first losses heard are not those of the start.
    heard_from_start = len(losses) * batch >= (metrics.get("samples_seen") or 0)
    decision = judge_losses(
        losses,
        math.ceil(trial.config.warmup_samples / batch),
        rules.spike_deviations,
        rules.spike_steps,
        rules.above_start_factor if heard_from_start else None,
    )
    return decision if decision.action is Action.STOP or trial.protected else _on_rate(study, rules, trial, metrics)


def _on_rate(study: Study, rules: KillRules, trial: Trial, metrics: Metrics) -> Decision:
    rate, samples = metrics.get("tokens_per_second"), metrics.get("samples_seen") or 0
    if rate is None or samples < STEPS_BEFORE_RATE_IS_JUDGED * trial.config.effective_batch_size:
        return GO_ON
    rates = [rival.metric("tokens_per_second") for rival in study.speed_rivals(trial)]
    best = max((known for known in rates if known is not None), default=None)
    return judge_throughput(rate, best, rules.min_relative_throughput)


def on_short_run(losses: list[float]) -> Decision:
    """Return stop for a run of a few steps whose loss is not finite; nothing else ends it."""
    return judge_losses(losses, 0, None, 1, None)


def on_validation(metrics: Metrics) -> Decision:
    """Return stop for a validation loss that is not finite."""
    loss = metrics.get("val_loss", 0.0)
    if loss is not None and math.isfinite(loss):
        return GO_ON
    return stop(Cause.DIVERGED, f"the validation loss is {loss}")
