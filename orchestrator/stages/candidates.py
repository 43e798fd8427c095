"""The candidates of the train stage, and how a candidate becomes one trial for each seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config.stages import StageKeys, Train
from orchestrator.config.trial import scaled_learning_rate
from orchestrator.stages.chosen import RankBatch, chosen_mode, chosen_split
from orchestrator.stages.context import StageContext
from orchestrator.stages.findings import found
from orchestrator.stages.frontier.findings import FrontierFindings, MeasuredPoint
from orchestrator.stages.mode import Mode
from orchestrator.stages.throughput import ThroughputFindings
from orchestrator.study.trial import Proposal
from trainers.config import Split


@dataclass(frozen=True)
class Candidate:
    """A batch in a mode that is to be trained."""

    role: str
    """Why it is a candidate, for people."""
    split: Split
    mode: Mode | None
    """None for the mode of the study file."""
    unscaled: bool = False
    """True if it runs at the study file's learning rate instead of the rule's for its batch."""
    protected: bool = False
    """True if it is never cut before the end."""


def candidates(context: StageContext[Train]) -> list[Candidate]:
    """Return the baseline, the largest and second largest micro-batch, the best tokens/s and goodput, and a contrast.

    The contrast is the last of them at the unscaled learning rate; it is left out where the rule scales nothing.
    """
    entrants = [_baseline(context), *_largest(context), *_best(context)]
    optimizer, last = context.config.optimizer, entrants[-1]
    rate = scaled_learning_rate(optimizer, last.split.effective_batch_size)
    if context.stage.unscaled_contrast and rate != optimizer.lr:
        entrants.append(replace(last, role="best goodput, learning rate unscaled", unscaled=True))
    return entrants


def _baseline(context: StageContext[Train]) -> Candidate:
    frontier = found(context.study, FrontierFindings)
    if frontier is None:
        split = context.split(context.config.batch.micro_batch_size)
        return Candidate("baseline", split, None, protected=True)
    return Candidate(
        "baseline", context.split(frontier.baseline.micro_batch_size), frontier.baseline.mode, protected=True
    )


def _largest(context: StageContext[Train]) -> list[Candidate]:
    frontier = found(context.study, FrontierFindings)
    if frontier is None:
        return []
    points: dict[str, MeasuredPoint | None] = {
        "largest micro-batch": frontier.largest,
        "second largest micro-batch": frontier.second_largest,
    }
    return [
        Candidate(role, context.split(point.micro_batch_size), point.mode) for role, point in points.items() if point
    ]


def _best(context: StageContext[Train]) -> list[Candidate]:
    """Return the throughput stage's best, or the chosen batch in both roles where that stage did not run."""
    throughput, chosen = found(context.study, ThroughputFindings), chosen_split(context)
    given = RankBatch(chosen.micro_batch_size, chosen.gradient_accumulation_steps)
    batches = {
        "best tokens/s": throughput.best_tokens_per_second if throughput else given,
        "best goodput": throughput.best_goodput if throughput else given,
    }
    return [
        Candidate(
            role,
            context.split(batch.micro_batch_size, batch.gradient_accumulation_steps),
            chosen_mode(context.study),
        )
        for role, batch in batches.items()
    ]


def merged(entrants: list[Candidate]) -> list[Candidate]:
    """Return the candidates with duplicates merged: the same batch and learning rate become one, with all their roles.

    It has the mode of the first of them.
    """
    by_key: dict[tuple[Split, bool], Candidate] = {}
    for one in entrants:
        key = (one.split, one.unscaled)
        before = by_key.get(key)
        by_key[key] = replace(before, role=f"{before.role}, {one.role}") if before else one
    return list(by_key.values())


def seeded(context: StageContext[StageKeys], name: str, candidate: Candidate, **changes: object) -> list[Proposal]:
    """Return one proposal for each seed of the study; the id names the seed where there are several.

    changes: fields of the TrialConfig that differ from what the study file and the scaling rule say.
    """
    seeds = context.config.seeds
    return [
        Proposal(
            f"{name}-s{seed}" if len(seeds) > 1 else name,
            context.stage.type,
            context.trial(candidate.split, candidate.mode, **changes, seed=seed),
            candidate=name,
            role=candidate.role,
            protected=candidate.protected,
        )
        for seed in seeds
    ]
