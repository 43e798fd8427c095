"""Who enters the train stage, and how a candidate becomes trials."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from orchestrator.config.stages import Train
from orchestrator.config.trial import scaled_learning_rate
from orchestrator.stages.context import Setting
from orchestrator.stages.mode import Mode, mode_of_values
from orchestrator.study.state import Proposal, Study


@dataclass(frozen=True)
class Candidate:
    role: str
    micro_batch_size: int
    accumulation: int
    mode: Mode | None = None
    """None: the frontier's."""
    unscaled: bool = False
    protected: bool = False


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
