"""A candidate, and how it becomes one full training run for each seed."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.stages import StageKeys
from orchestrator.stages.context import StageContext
from orchestrator.stages.mode import Mode
from orchestrator.study.trial import PLANNED_RATE, Proposal
from trainers.config import Split


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

    changes: fields of the TrialConfig that differ from what the study file and the scaling rule say.
    """
    seeds = context.config.seeds
    settings = {"sample_budget": candidate.sample_budget, **changes}
    planned = candidate.samples_per_second
    expected = {} if planned is None else {PLANNED_RATE: planned}
    return [
        Proposal(
            f"{name}-s{seed}" if len(seeds) > 1 else name,
            context.stage.type,
            context.trial(candidate.split, candidate.mode, **settings, seed=seed),
            candidate=name,
            role=candidate.role,
            protected=candidate.protected,
            expected=expected,
        )
        for seed in seeds
    ]
