"""The keys of each stage, of the pruners, and of the rules that stop a trial. Every key is documented under its
field; the docstring of a stage is the question that the report prints above its answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from batchscout.trainers.config import (
    ActivationCheckpointing,
    Compile,
    CrossEntropy,
    Fraction,
    Precision,
)
from batchscout.trainers.knobs import MemoryKnobs
from batchscout.trainers.strict import Strict


class OnlySays(Enum):
    """What a key says that no trial is made with or judged by: it may change while a study is under way, and after it."""

    WHEN = "when the study stops"
    WHERE = "where it runs, and who is told"
    WHAT_FOLLOWS = "what comes after what there was: more members of a list, or something where there was nothing"


Positive = Annotated[float, Field(gt=0)]

Share = Annotated[Fraction, Field(gt=0)]

AtLeastOne = Field(min_length=1)


RampKind = Literal["doubling", "linear"]

FEWEST_STEPS = 40
"""A run of fewer optimizer steps trains nothing that could be compared: its batch is not tried, unless the baseline's run has no
more."""
PROBED_SHARES = {"frontier": 0.04, "throughput": 0.04, "equivalence": 0.02}
"""What each stage of probes may take, as a share of the most that the study's full runs may take: of their time, and in the
equivalence stage of their samples."""

DEFAULT_FIRST_RUNG_SHARE = 1 / 4
"""The share of a run at which the first rung lies, where neither the study file says it nor the rate still rises then."""


class NoPruner(Strict):
    """Every trial trains to the end of its budget."""

    type: Literal["none"] = "none"
    """`none`: no trial is stopped at a rung."""

    def rungs(self, baseline_budget: int, sample_budget: int, rises_until: float = 0.0) -> tuple[int, ...]:
        """Return the sample numbers at which a trial of this budget is compared."""
        return ()


class AshaPruner(Strict):
    """Promotion ASHA (Li et al. 2018, arXiv 1810.05934): trials pause at a rung, and the best of them train on."""

    type: Literal["asha"] = "asha"
    """`asha`: trials are compared at rungs, each at the same share of its own budget."""
    min_samples: PositiveInt | None = None
    """The first rung, in training samples of the baseline; of a run that may train on twice as many, it lies at twice as
    many. null: a quarter of the budget; where the learning rate still rises then, the end of its rise."""
    reduction_factor: Annotated[int, Field(ge=2)] = 2
    """One trial in this many trains on from a rung, and each rung is this many times the one before it."""
    synchronous: bool = True
    """true: a trial waits at a rung until no later arrival can change which ones train on. Then the
    result does not depend on which trial was faster. false: a trial trains on at once if it is among the best so
    far. With more than about ten trials, the best is then trained much earlier."""

    def rungs(self, baseline_budget: int, sample_budget: int, rises_until: float = 0.0) -> tuple[int, ...]:
        """Return the first rung x reduction_factor^i for i = 0, 1, ..., as long as that is below the budget.

        baseline_budget: what the study file says. sample_budget: of the trial, whose rungs lie at the same shares. rises_until: the share of a
        run until which its learning rate rises; runs that have not come to their rate do not tell which of them is better.
        """
        found: list[int] = []
        # Up, so that the rung at half of a budget is not below half, where runs of different batches do not meet yet.
        rung = self.min_samples or max(1, math.ceil(max(DEFAULT_FIRST_RUNG_SHARE, rises_until) * baseline_budget))
        while rung < baseline_budget:
            found.append(max(1, min(math.ceil(rung * sample_budget / baseline_budget), sample_budget - 1)))
            rung *= self.reduction_factor
        return tuple(found)


Pruner = Annotated[NoPruner | AshaPruner, Field(discriminator="type")]


class KillRules(Strict):
    """When a trial is stopped between rungs. null turns a rule off. A loss that is not finite always stops its
    trial."""

    spike_deviations: Positive | None = 6.0
    """How far above the running median a loss must lie to count as a spike, in robust standard deviations (1.4826
    times the median absolute deviation). null: spikes stop no trial."""
    spike_steps: PositiveInt = 3
    """This many spikes in a row stop the trial."""
    above_start_factor: Annotated[float, Field(gt=1)] | None = 1.1
    """After warm-up, a trial is stopped if ten losses in a row are more than this many times the highest of its first five
    steps; above a negative one, by as much. null: losses above the first stop no trial."""
    min_relative_throughput: Annotated[float, Field(gt=0, lt=1)] | None = 0.5
    """A trial is stopped if its tokens per second are below this share of those of the fastest trial with the same
    effective batch in another split or mode; or if it trains slower than this share of the speed that its
    sample budget was made for, unless the runs that have ended were slower, too. One is also stopped whose batch, at the
    speed that it has, can no longer be the best. null: slow trials are not stopped."""
    max_silent_seconds: Positive | None = 7200.0
    """A trial that reports nothing for this many seconds is taken to hang: it fails, and its processes are replaced. A
    trial reports every ten optimizer steps; it is silent while it compiles, evaluates or saves. null: wait for
    ever."""


class Frontier(Strict):
    """How much fits, and what is fast?"""

    type: Literal["frontier"] = "frontier"
    """`frontier`. Finds the largest micro-batch that fits into memory and the fastest one, in each mode. A mode is a
    choice of activation checkpointing, compilation, precision, cross-entropy and sample length."""
    activation_checkpointing: Annotated[tuple[ActivationCheckpointing, ...], AtLeastOne] = ("none", "selective", "full")
    """The kinds of activation checkpointing to try: none, selective, full, or a memory budget between 0 and 1, which
    needs `compile`."""
    compile: tuple[Compile, ...] = ()
    """What is compiled, each to be tried: the model's repeated blocks one by one (true, or blocks), the model as one graph
    with its norm, head and loss (whole), or nothing (false). Empty: the blocks, and the fastest point once more as one
    graph."""
    precision: tuple[Precision, ...] = ()
    """The precisions to try: float32, bfloat16, float16. Empty: the study's `precision` alone."""
    cross_entropy: tuple[CrossEntropy, ...] = ()
    """How the built-in gpt computes its loss: from all logits at once (whole), or from a few rows of them at a time
    (chunked). Empty: whole, and the fastest point once more with chunked."""
    memory_knobs: MemoryKnobs | None = None
    """The memory knobs to try, each by itself and in pairs, where memory is what binds: chunked_cross_entropy, optimizer_8bit,
    bfloat16_weights, activation_offload, optimizer_offload, fsdp. One that changes the loss must pass a check at equal samples before
    it is chosen. null: chunked_cross_entropy, which changes nothing, where the model's logits are what a
    linear layer returns. []: none."""
    seq_len: tuple[PositiveInt, ...] = ()
    """Further sample lengths, in tokens, whose memory and speed are to be shown, where `data.target` takes `seq_len`. The mode
    that the study goes on with always has the length of the data. Empty: that length alone."""
    smallest: PositiveInt = 1
    """The micro-batch size, in samples per rank, at which the search starts."""
    largest: PositiveInt = 1024
    """The micro-batch size, in samples per rank, at which the search ends even if memory does not."""
    max_step_seconds: Positive = 60
    """The longest optimizer step to consider, in seconds. Larger micro-batches are not tried where their step would
    take longer, and one whose step does take longer ends as too_slow."""
    steps: Annotated[int, Field(ge=5)] = 6
    """Optimizer steps of each measurement; the first three are not timed. Each step accumulates over two
    micro-batches."""
    finalists: PositiveInt = 3
    """How many of the fastest points are timed again, each compiled for its own micro-batch size."""
    rounds: PositiveInt = 3
    """The finalists are timed in turns, at least this many times each, so that a drift of the machine affects all of
    them."""
    max_rounds: PositiveInt = 8
    """While another finalist may be more than 5 % faster than the one that seems the fastest, they are timed again, up
    to this many times in all. What is still open then is called undetermined. If `rounds` is larger, it holds. Up to `rounds`
    disturbed rounds are timed again in addition."""
    max_samples: PositiveInt | None = None
    """How many samples the trials of this stage may take in all; the conclusion says what that leaves out. The steps that a GPU
    takes beyond these, until it was timed for 2 seconds, do not count. null: any number. What limits the stage is the time of its
    optimizer steps: 4 % of the most that the study's full training runs may take, and 60 s at least."""


class Throughput(Strict):
    """What does accumulation cost, what does it buy?"""

    type: Literal["throughput"] = "throughput"
    """`throughput`. Times the effective batches that may be trained, in turns, each in the fastest split into
    micro-batches and the fastest mode. They are powers of two times `world_size` below the batch that the frontier
    chose, that batch and its `multiples`, and the baseline. Left out are those within a factor of 1.3 of
    another, and those that get fewer than 40 optimizer steps in the baseline's time (or than the baseline's own, if it has fewer
    than 40)."""
    multiples: Annotated[tuple[PositiveInt, ...], AtLeastOne] = (1, 2, 4, 8, 16)
    """Which multiples of the chosen micro-batch size times `world_size` are timed, by accumulating gradients."""
    steps: Annotated[int, Field(ge=8)] = 20
    """In the first round the noise scale is measured: in this many optimizer steps of two micro-batches each, or in as
    many micro-batches where a step has more of them. Other timings have 5 to 8 steps, the first three not timed."""
    rounds: PositiveInt = 3
    """Every form of every batch is timed at least this many times, in turns, so that a drift of the machine affects all of
    them."""
    max_rounds: PositiveInt = 8
    """While a batch's samples/s are not known within 5 %, or not which form of a batch is faster, all are timed again, up to this many
    times in all. What is still open then is called undetermined. If `rounds` is larger, it holds. Up to `rounds`
    disturbed rounds are timed again in addition."""
    max_samples: PositiveInt | None = None
    """How many samples the trials of this stage may take in all. Where it is too small for `steps`, the noise scale is
    taken from the timed steps; then the largest batches are left out, and the conclusion names them. The steps that a GPU takes
    beyond these, until it was timed for 2 seconds, do not count. null: any number. What limits the stage is the time of its
    optimizer steps: 4 % of the most that the study's full training runs may take, and 60 s at least."""


class Equivalence(Strict):
    """Does a batch that is split into micro-batches train this model as the whole batch does?"""

    type: Literal["equivalence"] = "equivalence"
    """`equivalence`. Checks, in float32 and without dropout, that a batch which is split into micro-batches trains the
    model as the whole batch does. Some models are no longer the same when their batch is split, those with BatchNorm
    for instance: then it says which comparisons of the study still hold. A loss that is no sum ends the study."""
    micro_batch_sizes: tuple[PositiveInt, ...] = ()
    """The micro-batch sizes, in samples per rank, into which the effective batch is split; the largest is what the
    others are compared with. Empty: the chosen micro-batch size, or the largest one for which `max_samples` is enough, and
    its two largest divisors."""
    effective_batch_size: PositiveInt | None = None
    """The effective batch, in samples. null: twice the largest micro-batch size times `world_size`."""
    steps: PositiveInt = 10
    """Optimizer steps of each run."""
    tolerance: Positive | None = None
    """The largest distance (rho) that counts as equal: between two runs' final weights, over the way from the initial
    weights. null: 3 times what rounding alone makes, measured by one to three runs with the samples of each
    micro-batch in another order, and at least 1e-4."""
    max_samples: PositiveInt | None = None
    """How many samples the trials of this stage may take in all: where it is too small for the chosen micro-batch size, a
    smaller one is split, since the answer does not depend on it. One of 4 is split even so. null: 2 % of the most
    that the study's full training runs may take, and any number in a study without such runs. It does not go with `micro_batch_sizes` or
    `effective_batch_size`, which say what the runs take."""

    @model_validator(mode="after")
    def _one_says_the_size(self) -> Equivalence:
        if self.max_samples is not None and (self.micro_batch_sizes or self.effective_batch_size):
            given = "micro_batch_sizes" if self.micro_batch_sizes else "effective_batch_size"
            raise ValueError(
                f"max_samples ({self.max_samples}) chooses the size that {given} says; leave one of them out"
            )
        return self


MAX_RUNS, RUNS_OF_A_FURTHER_LANE = 12, 2
"""In four kinds of replayed worlds, 40 studies each, 16 runs on 4 lanes waste what 12 on one lane do, and 20 little more than half of it."""


class Train(Strict):
    """Which batch ends best at equal cost?"""

    type: Literal["train"] = "train"
    """`train`. Trains candidates at equal cost, each batch at learning rates of its own, until choosing now wastes less than
    `useful_gain` on average, no further run is worth its time, or `max_runs` is reached."""
    pruner: Pruner = AshaPruner()
    """Which runs are stopped before the end of their budget: `{type: asha}` or `{type: none}`."""
    max_runs: Annotated[PositiveInt | None, OnlySays.WHEN] = None
    """The most full training runs of the stage, for each seed. null: 12, and 2 for each further lane, as runs that train at the same time
    know nothing of each other. Those that are stopped early count, too, but for those that diverge before any has completed: then the learning
    rate is lowered until one does."""

    def most_runs(self, num_lanes: int) -> int:
        """Return the most runs with so many lanes."""
        return MAX_RUNS + RUNS_OF_A_FURTHER_LANE * (num_lanes - 1) if self.max_runs is None else self.max_runs


class LearningRate(Strict):
    """Which learning rate is best at the chosen batch?"""

    type: Literal["learning_rate"] = "learning_rate"
    """`learning_rate`. Tries learning rates around the one that the train stage found best for its winning batch, and
    says how the scaling rule did."""
    multipliers: Annotated[tuple[Positive, ...], AtLeastOne] = (0.5, 0.71, 1, 1.41, 2)
    """The learning rates to try, as multiples of the one that the train stage found best; without a train stage, of
    the scaling rule's. Rates that were run before are not run again. Where the best lies at an end, further rates are
    tried on that side, three at most; while all diverge lower ones are, eight at most."""
    pruner: Pruner = AshaPruner()
    """Which rates are stopped before the end of their budget: `{type: asha}` or `{type: none}`."""


class Horizons(Strict):
    """Which batch and learning rate should the longer real run have?"""

    type: Literal["horizons"] = "horizons"
    """`horizons`. For a study with `real_run`: trains the chosen batch and its strongest rival for shares of the study's
    length too, and says what the real run's length makes of batch, learning rate and loss."""
    shares: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], AtLeastOne] = (0.25, 0.5)
    """The lengths of the further runs, as shares of each batch's own budget. Every run has its whole schedule."""


class Grid(Strict):
    """Every combination of the lists, each a full training run; what does not divide is skipped and listed."""

    type: Literal["grid"] = "grid"
    """`grid`. Trains every combination of the lists below for the whole budget. A combination whose effective batch
    does not divide, or is larger than the budget or the data, is skipped and listed."""
    micro_batch_size: tuple[PositiveInt, ...] = ()
    """Samples per forward and backward pass on one rank. Empty: the one that the frontier chose, else that of
    `batch`."""
    effective_batch_size: tuple[PositiveInt, ...] = ()
    """Samples per optimizer step over all ranks. Empty: that of `batch`, if it has `effective_batch_size` or
    `gradient_accumulation_steps` and no frontier has chosen; else the micro-batch size times `world_size`, without
    accumulation."""
    activation_checkpointing: tuple[ActivationCheckpointing, ...] = ()
    """The kinds of activation checkpointing: none, selective, full, or a memory budget between 0 and 1, which needs
    `compile`. Empty: the one that the frontier chose, else the study's `activation_checkpointing`."""
    compile: tuple[Compile, ...] = ()
    """What is compiled, each to be tried: the model's repeated blocks one by one (true, or blocks), the model as one graph
    with its norm, head and loss (whole), or nothing (false). Empty: what the frontier chose, else the study's `compile`."""
    learning_rate: tuple[Positive, ...] = ()
    """Learning rates, used as they are. Empty: that of the scaling rule for each effective batch."""
    pruner: Pruner = NoPruner()
    """Which combinations are stopped before the end of their budget: `{type: asha}` or `{type: none}`."""


class Branch(Strict):
    """Up to which batch does no sample go to waste, and does that grow?"""

    type: Literal["branch"] = "branch"
    """`branch`. Finds the critical batch at some points of the chosen run: from its weights there, branches with larger
    batches train on the same samples, and the largest whose loss is as good is the critical batch (Merrill et al. 2025,
    arXiv 2505.23971). Where it grows, ramps of the batch are trained at equal cost, and one that wins is recommended. It
    comes after `train` and `learning_rate`, and needs the schedule warmup_stable_decay."""
    at: Annotated[tuple[Share, ...], AtLeastOne] = (0.25, 0.5)
    """Where branches begin, as shares of the chosen run: after its warm-up, and before its learning rate falls. Two or more
    show whether the critical batch grows."""
    multiples: Annotated[tuple[PositiveInt, ...], AtLeastOne] = (1, 2, 4, 8)
    """The batches of the branches, as multiples of the chosen effective batch; the micro-batch stays. The branch at 1 x,
    which the others are compared with, is always run."""
    samples: Share = 0.2
    """The samples of each branch, as a share of those of the chosen run. A multiple of which they hold fewer than 10
    optimizer steps is left out, and the conclusion says so."""
    ramps: tuple[RampKind, ...] = ("doubling", "linear")
    """The ramps to train where the critical batch grows, each a full run in the time of the chosen one: `doubling` doubles
    the batch where the critical batch allows it, `linear` lets it grow evenly. Empty: none."""


class Regularization(Strict):
    """Does the chosen batch, at which the generalisation gap is wider, want more regularization?"""

    type: Literal["regularization"] = "regularization"
    """`regularization`. Where the generalisation gap is wider at the chosen batch than at the smallest that was trained, it
    trains the chosen run again with another dropout, label smoothing or weight decay, one at a time, and keeps one only
    where the loss falls by more than the seeds vary. Elsewhere it trains nothing. It comes after `train` and
    `learning_rate`, and in no study with `branch`."""
    dropout: tuple[Fraction, ...] = (0.1,)
    """The dropouts to try, where `model.target` takes an argument of that name. Empty: none."""
    label_smoothing: tuple[Fraction, ...] = (0.1,)
    """The label smoothings to try (Szegedy et al. 2015, arXiv 1512.00567), where the loss is the built-in cross-entropy of
    `gpt` or `hf`. Validation losses are never smoothed. Empty: none."""
    weight_decay: tuple[Positive, ...] = (0.3, 3)
    """The weight decays to try, as multiples of `optimizer.weight_decay`. Empty: none."""


StageKeys = Frontier | Throughput | Equivalence | Train | LearningRate | Horizons | Grid | Branch | Regularization
"""The keys of some stage."""
StageConfig = Annotated[StageKeys, Field(discriminator="type")]
"""The same as a study file holds them: the word under `type` says which they are."""
CHANGING = (Branch, Regularization)
"""The stages that train the chosen run again with one thing changed: each comes after those that choose it, and a study has one
of them."""


def compiled_in(stages: Sequence[StageKeys]) -> list[Compile]:
    """Return what the frontier and the grid compile, in the order of the study file; empty where neither says it."""
    found = list[Compile]()
    for stage in stages:
        if isinstance(stage, Frontier):
            found += stage.compile or (True,)
        elif isinstance(stage, Grid):
            found += stage.compile
    return found
