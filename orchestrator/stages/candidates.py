"""A candidate, and how it becomes one full training run for each seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchscout.orchestrator.config.mode import Mode, mode_of
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.trial import PLANNED_RATE, Proposal, TrialState
from batchscout.trainers.config import Split

MOST_HALVED = 2
"""A micro-batch that had fitted and then fills the memory is halved this often at most; after that, something else fills it."""


@dataclass(frozen=True)
class Candidate:
    """A batch in a mode that is to be trained."""

    role: str
    """A label for people, such as "most samples/s"; may be empty."""
    split: Split
    mode: Mode | None
    """None for the mode of the study file."""
    sample_budget: int
    """The samples that it may train on."""
    samples_per_second: float | None = None
    """How fast it is expected to train; None where that is not known."""
    protected: bool = False
    """True of the baseline, which is never cut before the end."""

    @property
    def told(self) -> str:
        """What people are told of a run of it."""
        return ", ".join(filter(None, ["baseline" if self.protected else "", self.role]))


def seeded_where_it_fits(
    context: StageContext[StageKeys], name: str, candidate: Candidate, **changes: object
) -> list[Proposal]:
    """Return the same as `seeded`; where that micro-batch has run out of memory in a full run, the same effective batch in micro-batches
    of half the size or less, which trains the same but where a layer normalises over its micro-batch. A short run may have fitted: samples
    of many lengths take memory of their own.
    """
    proposals, split = seeded(context, name, candidate, **changes), candidate.split
    for _ in range(MOST_HALVED):
        smaller = _in_smaller_micro_batches(split, context.study.facts.smallest_micro_batch)
        if smaller is None or not _has_run_out(context, proposals):
            break
        split = smaller
        proposals = seeded(context, f"{name}-{split}", replace(candidate, split=split), **changes)
    return proposals


def _has_run_out(context: StageContext[StageKeys], proposals: Sequence[Proposal]) -> bool:
    """True if one of these has run out of memory or, before any of them is made, a full run in the same mode did so in micro-batches that
    are no larger, and its batch was trained in smaller ones."""
    trials, config = context.study.trials, proposals[0].config
    if made := [trials[one.id] for one in proposals if one.id in trials]:
        return any(trial.state is TrialState.OUT_OF_MEMORY for trial in made)
    alike = [one for one in trials.values() if one.is_full_run and mode_of(one.config) == mode_of(config)]
    lost = [one.config for one in alike if one.state is TrialState.OUT_OF_MEMORY]
    trained = {
        (one.config.effective_batch_size, one.config.micro_batch_size)
        for one in alike
        if one.state is TrialState.COMPLETE
    }
    return any(
        one.micro_batch_size <= config.micro_batch_size
        and any(batch == one.effective_batch_size and size < one.micro_batch_size for batch, size in trained)
        for one in lost
    )


def _in_smaller_micro_batches(split: Split, smallest: int) -> Split | None:
    """Return the same effective batch in the largest micro-batches of at most half the size; None below the smallest size."""
    per_rank, most = split.micro_batch_size * split.gradient_accumulation_steps, split.micro_batch_size // 2
    size = next((size for size in range(most, smallest - 1, -1) if per_rank % size == 0), None)
    return None if size is None else Split(size, per_rank // size, split.world_size)


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
        role=candidate.told,
        protected=candidate.protected,
        expected={} if planned is None else {PLANNED_RATE: planned},
    )
