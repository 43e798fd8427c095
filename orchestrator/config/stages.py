"""The keys of each stage, of the pruners, and of the rules that stop a trial. Every key is documented under its field."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from trainers.config import (
    ActivationCheckpointing,
    CrossEntropy,
    Precision,
    Strict,
)

Positive = Annotated[float, Field(gt=0)]


AtLeastOne = Field(min_length=1)


class Frontier(Strict):
    """How much fits, and what is fast?"""

    type: Literal["frontier"] = "frontier"
    activation_checkpointing: Annotated[tuple[ActivationCheckpointing, ...], AtLeastOne] = ("none", "selective", "full")
    compile: Annotated[tuple[bool, ...], AtLeastOne] = (True,)
    precision: tuple[Precision, ...] = ()
    """Empty: the study's precision."""
    cross_entropy: tuple[CrossEntropy, ...] = ()
    """Of the built-in gpt: whole, chunked; empty: whole, and the fastest point once more in chunks where torch has them."""
    seq_len: tuple[PositiveInt, ...] = ()
    """Further lengths of the samples, to show what they cost; what is chosen has the data's own."""
    smallest: PositiveInt = 1
    """The micro-batch size that the search starts at, and the baseline of the train stage."""
    largest: PositiveInt = 1024
    """Where the search ends even if memory does not."""
    max_step_seconds: Positive = 60
    """Sizes whose step would take longer are not tried, and one that does is too_slow."""
    steps: Annotated[int, Field(ge=5)] = 6
    """Optimizer steps of a probe, each of 2 accumulation steps; the first 3 are not timed."""
    finalists: PositiveInt = 3
    """So many of the fastest are timed again, compiled for their size alone ..."""
    rounds: PositiveInt = 5
    """... in so many rounds of turns."""


class Throughput(Strict):
    """What does accumulation cost, what does it buy?"""

    type: Literal["throughput"] = "throughput"
    multiples: Annotated[tuple[PositiveInt, ...], AtLeastOne] = (1, 2, 4, 8, 16)
    """Effective batches, in units of the chosen micro-batch times the world size."""
    steps: Annotated[int, Field(ge=8)] = 20
    """Optimizer steps per effective batch."""


class Equivalence(Strict):
    """Is (m x k) really the same as (1 x mk) for this model?"""

    type: Literal["equivalence"] = "equivalence"
    micro_batch_sizes: tuple[PositiveInt, ...] = ()
    """The splits of the effective batch, the first is the reference; empty: the chosen micro-batch and two divisors of it."""
    effective_batch_size: PositiveInt | None = None
    """null: twice the largest split over all ranks."""
    steps: PositiveInt = 10
    tolerance: Positive | None = None
    """Largest rho that passes; null: 1e-4 in float32, else that of the last split against itself in float32."""


class NoPruner(Strict):
    type: Literal["none"] = "none"


class AshaPruner(Strict):
    """Promotion ASHA (Li et al. 2018, arXiv 1810.05934): pause at a rung, promote the best."""

    type: Literal["asha"] = "asha"
    min_samples: PositiveInt | None = None
    """The first rung; null: an eighth of the budget."""
    reduction_factor: Annotated[int, Field(ge=2)] = 2
    """One in so many goes on from a rung."""
    synchronous: bool = True
    """Wait at a rung until nobody who has yet to reach it can change the verdict: no clock decides. For more trials than
    about ten, false has the best one trained much earlier: whoever is among the best so far goes on at once."""


class KillRules(Strict):
    """When a trial is stopped between rungs. A null turns the rule off; a loss that is not finite always stops."""

    spike_deviations: Positive | None = 6.0
    """A loss above the running median by so many robust standard deviations (1.4826 x MAD) ..."""
    spike_steps: PositiveInt = 3
    """... for so many steps in a row."""
    above_start_factor: Annotated[float, Field(gt=1)] | None = 1.1
    """After warm-up, a loss above so many times that of the first steps."""
    min_relative_throughput: Annotated[float, Field(gt=0, lt=1)] | None = 0.5
    """Tokens/s below this share of the best trial of the same effective batch in another split or mode."""
    max_silent_seconds: Positive | None = 7200.0
    """A trial that says nothing for so long has hung: it fails, and its processes are replaced. It speaks every ten
    optimizer steps; compiling, evaluating and saving are silent."""


class Train(Strict):
    """Which candidate reaches the loss first?"""

    type: Literal["train"] = "train"
    pruner: Annotated[NoPruner | AshaPruner, Field(discriminator="type")] = AshaPruner()
    unscaled_contrast: bool = True
    """Run the candidate with the best goodput once more with the learning rate unscaled."""


class LearningRate(Strict):
    """Is the scaling rule right here?"""

    type: Literal["learning_rate"] = "learning_rate"
    multipliers: Annotated[tuple[Positive, ...], AtLeastOne] = (0.5, 0.71, 1, 1.41, 2)
    """Of the rule's learning rate at the winner."""


class Grid(Strict):
    """Every combination of the lists, each a full training run; what does not divide is skipped and listed."""

    type: Literal["grid"] = "grid"
    micro_batch_size: tuple[PositiveInt, ...] = ()
    effective_batch_size: tuple[PositiveInt, ...] = ()
    """Empty: micro-batch x world size, no accumulation."""
    activation_checkpointing: Annotated[tuple[ActivationCheckpointing, ...], AtLeastOne] = ("none",)
    compile: Annotated[tuple[bool, ...], AtLeastOne] = (True,)
    learning_rate: tuple[Positive, ...] = ()
    """Empty: the scaling rule's."""
    pruner: Annotated[NoPruner | AshaPruner, Field(discriminator="type")] = NoPruner()


StageConfig = Annotated[
    Frontier | Throughput | Equivalence | Train | LearningRate | Grid,
    Field(discriminator="type"),
]
