"""Every combination of the given lists, each a full training run."""

from __future__ import annotations

import itertools
from typing import Any

from orchestrator.config.stages import Grid
from orchestrator.config.trial import rungs
from orchestrator.stages.candidates import Candidate, seeded
from orchestrator.stages.context import Setting
from orchestrator.stages.ranking import standings
from orchestrator.stages.train import settle
from orchestrator.study.state import Conclusion, Proposal, Study
from trainers.config import derive_accumulation


def propose(stage: Grid, setting: Setting, study: Study) -> list[Proposal]:
    return [proposal for proposals, _ in _points(stage, setting, study) for proposal in proposals]


def skipped(stage: Grid, setting: Setting, study: Study) -> list[str]:
    """The combinations that are not run, each with its numbers."""
    return [reason for _, reason in _points(stage, setting, study) if reason]


def _points(stage: Grid, setting: Setting, study: Study) -> list[tuple[list[Proposal], str]]:
    """For each combination its trials, or the reason why there are none."""
    sizes = stage.micro_batch_size or (setting.chosen_batch(study)[0],)
    effective: tuple[int | None, ...] = stage.effective_batch_size or (None,)
    rates: tuple[float | None, ...] = stage.learning_rate or (None,)
    axes = itertools.product(sizes, effective, stage.activation_checkpointing, stage.compile, rates)
    return [_point(stage, setting, study, *point) for point in axes]


def _point(
    stage: Grid,
    setting: Setting,
    study: Study,
    size: int,
    effective: int | None,
    mode: Any,
    compiled: bool,
    rate: float | None,
) -> tuple[list[Proposal], str]:
    try:
        accumulation = derive_accumulation(effective or size * setting.study.world_size, size, setting.study.world_size)
    except ValueError as error:
        return [], str(error)
    total, budget = size * accumulation * setting.study.world_size, setting.study.sample_budget
    if total > budget:
        return [], f"effective_batch_size ({total}) is larger than sample_budget ({budget})"
    if total > (num_samples := study.facts.get("num_train_samples", total)):
        return [], f"effective_batch_size ({total}) is larger than the training data ({num_samples} samples)"
    changes: dict[str, Any] = {
        "activation_checkpointing": mode,
        "compile": compiled,
        "rungs": rungs(stage.pruner, setting.study.sample_budget),
    }
    if rate is not None:
        changes["learning_rate"] = rate
    eager = "" if compiled else "-eager"
    name = f"grid-m{size}k{accumulation}-{mode}{eager}" + (f"-lr{rate:g}" if rate is not None else "")
    return seeded(name, "grid", Candidate("", size, accumulation), changes, setting, study), ""


def conclude(stage: Grid, setting: Setting, study: Study) -> Conclusion:
    ranking = standings(study.of_stage("grid"), "val_loss", None)
    notes = tuple(f"skipped: {reason}" for reason in skipped(stage, setting, study))
    if not ranking:
        return Conclusion(
            "grid", False, "undetermined: no point of the grid finished; see the trials' reasons", {}, notes
        )
    winner = settle(ranking)
    reason = f"{winner.name} ends at val loss {winner.val_loss:.3f}, best of {len(ranking)}"
    return Conclusion("grid", True, reason, {"winner": winner.trials[0].id, "val_loss": winner.val_loss}, notes)
