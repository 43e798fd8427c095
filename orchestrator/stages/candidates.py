"""A candidate, and how it becomes one full training run for each seed."""

from __future__ import annotations

from dataclasses import dataclass

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.trial import PLANNED_RATE, Proposal
from batchscout.trainers.config import Split


@dataclass(frozen=True)
class Candidate:
    """A batch in a mode that is to be trained."""

    role: str
    """Why it is a candidate, for people."""
    split: Split
    mode: Mode | None
    """None for the mode of the study file."""
    sample_budget: int
    """The samples that it may train on."""
    samples_per_second: float | None = None
    """How fast it is expected to train; None where that is not known."""
    protected: bool = False
    """True if it is never cut before the end."""


def seeded(context: StageContext[StageKeys], name: str, candidate: Candidate, **changes: object) -> list[Proposal]:
    """Return one proposal for each seed of the study; the id names the seed where there are several.

    changes: fields of the TrialConfig that differ from what the study file and the scaling rule say. What was proposed
    before is returned as it was: a stage is asked at every event, and a configuration takes a millisecond to check.
    """
    seeds, trials = context.config.seeds, context.study.trials
    ids = {f"{name}-s{seed}" if len(seeds) > 1 else name: seed for seed in seeds}
    return [
        trials[one].proposal if one in trials else _proposal(context, one, name, candidate, changes | {"seed": seed})
        for one, seed in ids.items()
    ]


def _proposal(
    context: StageContext[StageKeys], trial_id: str, name: str, candidate: Candidate, changes: dict[str, object]
) -> Proposal:
    planned = candidate.samples_per_second
    settings = {"sample_budget": candidate.sample_budget} | changes
    return Proposal(
        trial_id,
        context.stage.type,
        context.trial(candidate.split, candidate.mode, **settings),
        candidate=name,
        role=candidate.role,
        protected=candidate.protected,
        expected={} if planned is None else {PLANNED_RATE: planned},
    )
