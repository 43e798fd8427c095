"""Which candidate reaches the loss first? Full training runs of the candidates that are left, pruned on the way."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.analysis import Standing, candidate, standings, tied
from orchestrator.config import AshaPruner, Train, scaled_learning_rate
from orchestrator.pruners import rungs_of
from orchestrator.stages.mode import Mode, mode_of_values
from orchestrator.stages.setting import Setting
from orchestrator.study import Conclusion, Proposal, Study, Trial, TrialState
from orchestrator.words import seconds_text

DEFAULT_FIRST_RUNG = 1 / 8


@dataclass(frozen=True)
class Candidate:
    role: str
    micro_batch_size: int
    accumulation: int
    mode: Mode | None = None
    """None: the frontier's."""
    unscaled: bool = False
    protected: bool = False


def propose(stage: Train, setting: Setting, study: Study) -> list[Proposal]:
    """All candidates at once, each once per seed."""
    return [
        proposal
        for found in merged(candidates(stage, setting, study))
        for proposal in _of_every_seed(stage, setting, study, found)
        if proposal
    ]


def candidates(stage: Train, setting: Setting, study: Study) -> list[Candidate]:
    """The baseline, the largest and second largest micro-batch, the best tokens/s, the best goodput, and a contrast."""
    baseline_size = study.value("frontier", "baseline_micro_batch_size") or setting.study.batch.micro_batch_size
    baseline_mode = study.value("frontier", "baseline_mode")
    found = [Candidate("baseline", baseline_size, 1, _mode(baseline_mode), protected=True)]
    for role, key in (("largest micro-batch", "largest"), ("second largest micro-batch", "second_largest")):
        values = study.value("frontier", key)
        if values:
            found.append(Candidate(role, values["micro_batch_size"], 1, _mode(values)))
    given = dict(zip(("micro_batch_size", "gradient_accumulation_steps"), setting.chosen_batch(study), strict=True))
    for role, key in (("best tokens/s", "best_tokens_per_second"), ("best goodput", "best_goodput")):
        batch = study.value("throughput", key, given)
        found.append(Candidate(role, batch["micro_batch_size"], batch["gradient_accumulation_steps"]))
    optimizer, effective = (
        setting.study.optimizer,
        found[-1].micro_batch_size * found[-1].accumulation * setting.study.world_size,
    )
    if stage.unscaled_contrast and scaled_learning_rate(optimizer, effective) != optimizer.lr:
        found.append(replace(found[-1], role="best goodput, learning rate unscaled", unscaled=True))
    return found


def _mode(values: dict[str, Any] | None) -> Mode | None:
    return mode_of_values(values) if values else None


def merged(found: list[Candidate]) -> list[Candidate]:
    """Candidates with the same batch and learning rate become one that bears all their roles: the mode of the first."""
    by_key: dict[tuple[int, int, bool], Candidate] = {}
    for one in found:
        key = (one.micro_batch_size, one.accumulation, one.unscaled)
        before = by_key.get(key)
        by_key[key] = replace(before, role=f"{before.role}, {one.role}") if before else one
    return list(by_key.values())


def _of_every_seed(stage: Train, setting: Setting, study: Study, found: Candidate) -> list[Proposal]:
    effective = found.micro_batch_size * found.accumulation * setting.study.world_size
    if effective > setting.study.sample_budget:
        return []
    changes: dict[str, Any] = {"rungs": rungs(stage.pruner, setting.study.sample_budget)}
    if found.unscaled:
        changes["learning_rate"] = setting.study.optimizer.lr
    name = f"train-m{found.micro_batch_size}k{found.accumulation}" + ("-unscaled" if found.unscaled else "")
    return seeded(name, "train", found, changes, setting, study)


def seeded(
    name: str, stage: str, found: Candidate, changes: dict[str, Any], setting: Setting, study: Study
) -> list[Proposal]:
    """One proposal per seed of the study; the id names the seed where there are several."""
    seeds = setting.study.seeds
    return [
        Proposal(
            f"{name}-s{seed}" if len(seeds) > 1 else name,
            stage,
            setting.trial(study, found.micro_batch_size, found.accumulation, found.mode, **changes, seed=seed),
            role=found.role,
            protected=found.protected,
        )
        for seed in seeds
    ]


def rungs(pruner: object, sample_budget: int) -> tuple[int, ...]:
    if not isinstance(pruner, AshaPruner):
        return ()
    first = pruner.min_samples or max(1, round(DEFAULT_FIRST_RUNG * sample_budget))
    return rungs_of(first, pruner.reduction_factor, sample_budget)


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
