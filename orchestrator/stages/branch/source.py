"""From which run branches begin, where, and with which batches. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchscout.orchestrator.config.stages import Branch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.train import chosen_run
from batchscout.orchestrator.study.trial import PLANNED_RATE, Trial
from batchscout.trainers.config import Split

FEWEST_STEPS = 10
"""A branch of fewer optimizer steps shows the change of its batch, and not what the batch learns."""


@dataclass(frozen=True)
class Source:
    """The chosen run, and what branches of it."""

    trial: Trial
    """Its first seed."""
    points: tuple[int, ...]
    """The sample counts at which branches begin: multiples of its batch."""
    multiples: tuple[int, ...]
    """1, and the others whose branches have enough steps."""
    num_samples: int
    """Those of each branch: a multiple of the largest batch."""
    left_out: tuple[str, ...]
    """Why points and multiples are left out, each with its numbers."""

    @property
    def effective_batch_size(self) -> int:
        return self.trial.config.effective_batch_size

    @property
    def samples_per_second(self) -> float | None:
        """What its speed was foretold to be. Its branches are no slower: they only accumulate more."""
        return self.trial.proposal.expected.get(PLANNED_RATE)

    def split(self, multiple: int) -> Split:
        """Return the split of so many times its batch: the micro-batch stays."""
        own = self.trial.config.split
        return Split(own.micro_batch_size, multiple * own.gradient_accumulation_steps, own.world_size)


def source_of(context: StageContext[Branch]) -> Source:
    """Return the run that earlier stages chose, with the points and batches that it is long enough for."""
    chosen = chosen_run(context.study)
    assert chosen is not None, "a study whose train stage chose nothing has ended"
    trial, stage = context.study.trials[chosen], context.stage
    config, batch = trial.config, trial.config.effective_batch_size
    points = {share: math.ceil(share * config.sample_budget / batch) * batch for share in sorted(stage.at)}
    wanted = stage.samples * config.sample_budget
    multiples = sorted({1, *stage.multiples})
    enough = tuple(multiple for multiple in multiples if wanted >= FEWEST_STEPS * multiple * batch)
    largest = max(enough, default=1) * batch
    return Source(
        trial,
        tuple(dict.fromkeys(point for point in points.values() if point >= config.warmup_samples)),
        enough,
        int(wanted // largest) * largest,
        (
            *(_in_warmup(trial, share) for share, point in points.items() if point < config.warmup_samples),
            *(_too_few_steps(trial, one, wanted) for one in multiples if one not in enough),
        ),
    )


def _in_warmup(trial: Trial, share: float) -> str:
    config = trial.config
    return (
        f"no branch begins at {share:g} of {trial.id}, {share * config.sample_budget:.0f} samples: its warm-up ends at "
        f"{config.warmup_samples}; begin later (stages.branch.at)"
    )


def _too_few_steps(trial: Trial, multiple: int, wanted: float) -> str:
    batch = multiple * trial.config.effective_batch_size
    return (
        f"effective batch {batch} was left out: the {wanted:.0f} samples of a branch are {wanted / batch:.1f} of its "
        f"optimizer steps, fewer than {FEWEST_STEPS}; raise stages.branch.samples or sample_budget"
    )


def rescaled_rate(context: StageContext[Branch], source: Source, effective_batch_size: int) -> float:
    """Return the chosen run's learning rate as the scaling rule carries it to another batch."""
    rule, chosen = context.rule_rate(effective_batch_size), context.rule_rate(source.effective_batch_size)
    return source.trial.config.learning_rate * rule / chosen
