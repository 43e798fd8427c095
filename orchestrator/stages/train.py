"""Which candidate reaches the loss first? Full training runs of the candidates that are left, pruned on the way."""

from __future__ import annotations

import statistics
from typing import Any

from orchestrator.config.stages import Train
from orchestrator.config.trial import rungs
from orchestrator.stages.candidates import Candidate, candidates, merged, seeded
from orchestrator.stages.context import Setting
from orchestrator.stages.ranking import Standing, candidate, standings, tied
from orchestrator.study.state import Conclusion, Proposal, Study, Trial, TrialState
from orchestrator.units import seconds_text


def propose(stage: Train, setting: Setting, study: Study) -> list[Proposal]:
    """All candidates at once, each once per seed."""
    return [
        proposal
        for found in merged(candidates(stage, setting, study))
        for proposal in _of_every_seed(stage, setting, study, found)
        if proposal
    ]


def _of_every_seed(stage: Train, setting: Setting, study: Study, found: Candidate) -> list[Proposal]:
    effective = found.micro_batch_size * found.accumulation * setting.study.world_size
    if effective > setting.study.sample_budget:
        return []
    changes: dict[str, Any] = {"rungs": rungs(stage.pruner, setting.study.sample_budget)}
    if found.unscaled:
        changes["learning_rate"] = setting.study.optimizer.lr
    name = f"train-m{found.micro_batch_size}k{found.accumulation}" + ("-unscaled" if found.unscaled else "")
    return seeded(name, "train", found, changes, setting, study)


def conclude(stage: Train, setting: Setting, study: Study) -> Conclusion:
    """The best configuration under the study's objective; a tie goes to the baseline, else to the smaller batch."""
    trials = study.of_stage("train")
    ranking = standings(trials, setting.study.objective, _target(trials))
    if not ranking:
        return Conclusion("train", False, "undetermined: no candidate finished its run; see the reasons of the trials")
    winner = settle(ranking)
    return Conclusion(
        "train", True, _sentence(winner, ranking, trials), _values(winner, ranking), _skipped(stage, setting, study)
    )


def settle(ranking: list[Standing]) -> Standing:
    """Among those tied with the best: the smallest effective batch, which needs the least of everything."""
    best = ranking[0]
    equals = [one for one in ranking if tied(one.score, best.score)]
    return min(equals, key=lambda one: (not one.trials[0].protected, one.trials[0].config.effective_batch_size))


def _target(trials: list[Trial]) -> float | None:
    """The loss that the baseline ends at, its seeds' mean."""
    ends = [t.metrics["val_loss"] for t in trials if t.protected and t.state is TrialState.COMPLETE]
    return statistics.fmean(ends) if ends else None


def _sentence(winner: Standing, ranking: list[Standing], trials: list[Trial]) -> str:
    config = winner.trials[0].config
    batch = f"{config.micro_batch_size} x {config.gradient_accumulation_steps}"
    tie = [one.name for one in ranking if one is not winner and tied(one.score, winner.score)]
    cut = sum(trial.state is TrialState.PRUNED for trial in trials)
    seconds = sum(trial.metrics.get("train_seconds", 0) for trial in winner.trials) / len(winner.trials)
    return (
        f"{winner.name} ({winner.trials[0].role}; batch {batch}) ends at val loss {winner.val_loss:.3f} "
        f"after {seconds_text(seconds)} of training"
        + (f", tied with {', '.join(tie)}" if tie else "")
        + f"; {len(ranking)} of {len({candidate(t) for t in trials})} candidates finished, {cut} trials were pruned"
    )


def _values(winner: Standing, ranking: list[Standing]) -> dict[str, Any]:
    return {
        "winner": winner.trials[0].id,
        "val_loss": winner.val_loss,
        "ranking": [{"name": one.name, "val_loss": one.val_loss, "score": one.score} for one in ranking],
    }


def _skipped(stage: Train, setting: Setting, study: Study) -> tuple[str, ...]:
    budget = setting.study.sample_budget
    return tuple(
        f"{one.role} was left out: its effective batch ({one.micro_batch_size * one.accumulation * setting.study.world_size}) "
        f"is larger than sample_budget ({budget})"
        for one in merged(candidates(stage, setting, study))
        if one.micro_batch_size * one.accumulation * setting.study.world_size > budget
    )
