"""What one training run is told: `TrialConfig`, complete and checked before anything starts. Every key is documented
under its field; `model`, `data`, `optimizer` and `schedule` are also keys of a study file. Loads no torch."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from batchscout.trainers.criteria import Loss
from batchscout.trainers.errors import users_frame
from batchscout.trainers.knobs import MemoryKnobsTogether, check_knobs
from batchscout.trainers.strict import Strict

Precision = Literal["float32", "bfloat16", "float16"]
Parallel = Literal["ddp", "fsdp"]
CrossEntropy = Literal["whole", "chunked"]


def _blocks(value: object) -> object:
    """Read `blocks`, the word beside `whole`, as true."""
    return True if value == "blocks" else value


Compile = Annotated[
    Literal["whole"] | bool, BeforeValidator(_blocks, json_schema_input_type=Literal["whole", "blocks"] | bool)
]
ActivationCheckpointing = Literal["none", "selective", "full"] | Annotated[float, Field(gt=0, lt=1)]


def _fillings(value: object) -> object:
    """Read the places of a tuple, which YAML has as numbers, as names; refuse what fills nothing up."""
    if not isinstance(value, dict):
        raise ValueError(
            f"{value!r} does not say what is padded with what; write such as {{input_ids: 0, labels: -100}}"
        )
    for name, filling in value.items():
        if not isinstance(filling, int | float):
            raise ValueError(
                f"{name} is to be padded with {filling!r}, which is no number; write one, such as 0 or -100"
            )
    return {str(name): filling for name, filling in value.items()}


def _a_number_or_auto(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(
            f"{value!r} is no number of tokens; write how many a micro-batch may hold, such as 8192, or auto"
        )
    return value


def _fraction(value: object) -> object:
    """Read `5%` as 0.05; numbers pass through."""
    if not isinstance(value, str):
        return value
    try:
        return float(value.strip().removesuffix("%")) / (100 if value.strip().endswith("%") else 1)
    except ValueError:
        raise ValueError(f"'{value}' is not a share; write 5% or 0.05") from None


_WrittenFraction = float | Annotated[str, Field(pattern=r"^\s*[0-9.]+\s*%?\s*$")]
Fraction = Annotated[float, BeforeValidator(_fraction, json_schema_input_type=_WrittenFraction), Field(ge=0, lt=1)]


class ModelConfig(Strict):
    """What is trained."""

    target: str
    """The model: `gpt` (built in), `hf` (a language model of the transformers library), or your own as
    `package.module:callable`, which is called with `kwargs` and returns an nn.Module."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the target. Where it has `vocab_size` or `seq_len` and they are not given here, the data's are
    taken."""
    blocks: str | tuple[str, ...] | None = None
    """The dotted name of the ModuleList or Sequential of repeated layers, which are checkpointed and compiled one by one; or
    several, as an encoder's and a decoder's. null: the longest ModuleList whose members are all of one class, and others of that
    class; where there is none the Sequentials of the class that most have."""
    peft: dict[str, Any] | None = None
    """LoRA: arguments of peft.LoraConfig (`r`, `lora_alpha`, `target_modules`, ...), for which peft must be installed. Its matrices are
    trained, and all that the model had before is frozen, but for `modules_to_save` and the head of a `task_type`. Where transformers models
    are within a module, it is they that get matrices, and layers around them are trained whole. null: there are no adapters."""


TEXT_SEQ_LEN = 256
"""`seq_len` of the built-in data sets of text, where `data.kwargs` does not say it."""


class DataConfig(Strict):
    """What the model is trained on."""

    target: str
    """The data: `python_stdlib`, `text`, `hf` or `chat` (built in), or your own as `package.module:callable`, which is called
    with `kwargs` and returns (train, val), two map-style data sets or streams (IterableDatasets). A set whose samples differ in length pads them
    as `pad` says, or itself in `__getitems__` or in a `collate_fn`, and may list how long they are as `lengths`: the frontier
    measures the longest ones, and else has to find them. One whose samples may change under the same `kwargs` has a `content_hash`,
    by which a checkpoint is known to be of other samples."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the target."""
    workers: NonNegativeInt | None = None
    """The processes of each rank that fetch training batches ahead of it, as DataLoader's `num_workers`. Their memory is their own: it
    counts neither in the rank's peak nor in `memory_limit`. 0: the rank fetches them itself. Of a stream, one process reads. null: as many
    as the DataLoader has that the target returns, and none where it returns another set."""
    pad: Annotated[
        dict[str, int | float], BeforeValidator(_fillings, json_schema_input_type=dict[str, int | float])
    ] = Field(default={})
    """For samples of uneven length: with what each member is filled up to the longest of a batch, by the key of a dictionary
    (`{input_ids: 0, labels: -100}`) or the place in a tuple (`{0: 0, 1: -100}`). What is not named is stacked. A set without `lengths` is
    read once from end to end, to know them. Empty: the set pads its samples itself, or all have one length."""
    pack: PositiveInt | None = None
    """For samples of uneven length: the tokens of a row into which several are packed, instead of padding each. A row is a sample to all that
    counts samples. It has what `pad` names, filled up with the values there, and position_ids that begin anew with each sample; it has no
    attention_mask. Models of transformers see by position_ids which tokens belong together. Any other model lets samples of a row attend to each
    other unless it does the same, and the first pass says so. null: nothing is packed."""

    @model_validator(mode="after")
    def _rows_are_filled_up(self) -> DataConfig:
        if self.pack is not None and not self.pad:
            raise ValueError(
                f"pack is {self.pack}, and pad does not say what rows are made of and filled up with; add pad, such as "
                "{input_ids: 0, labels: -100}"
            )
        return self


class OptimizerConfig(Strict):
    """The optimizer, apart from its learning rate."""

    type: Literal["adamw", "sgd", "muon", "adafactor", "adamw_8bit", "adamw_4bit", "own"] = "adamw"
    """adamw, sgd (with momentum), adafactor: torch's. muon: torch's Muon for the matrices of the model's blocks, and AdamW for
    all else, at one learning rate (arXiv 2502.16982). adamw_8bit, adamw_4bit: AdamW with moments of 8 or 4 bits, for which torchao
    must be installed. own: what `target` names."""
    target: str | None = None
    """An optimizer of your own as `package.module:callable`. It is called with the parameters (or the groups that `param_groups`
    makes of them), `lr` and `kwargs`, and returns a torch.optim.Optimizer."""
    param_groups: str | None = None
    """A callable, as `package.module:callable`, that takes the model and returns its parameters as groups, as torch.optim takes
    them. Where each has an `lr`, the first group trains at the study's learning rate and the others keep their ratio to it. null:
    tensors of two or more dimensions decay and others do not; for an optimizer of your own, all parameters are one group."""
    kwargs: dict[str, Any] = Field(default={})
    """Further arguments of the optimizer: of your own all but `lr`, of muon those of its matrices' part (`momentum`, `nesterov`,
    `ns_steps`), of the others those that no key here stands for."""
    betas: tuple[float, float] = (0.9, 0.95)
    """The decay rates of AdamW's two moving averages, with muon those of what is not a matrix. For SGD the first is the momentum,
    and the second has no effect. Neither has for adafactor and an optimizer of your own."""
    eps: float = 1e-8
    """What AdamW adds to the denominator. It has no effect for sgd, adafactor and an optimizer of your own."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """The weight decay. It applies to tensors of two or more dimensions only, so not to biases and norms; with `param_groups`, to the
    groups that have none of their own. It has no effect for an optimizer of your own, which has it in `kwargs` or in its groups."""
    max_gradient_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The norm to which the gradient of a whole optimizer step is clipped. null: it is never clipped."""

    @property
    def name(self) -> str:
        """The built-in one, or the import path of another."""
        return self.target or self.type

    @property
    def has_betas(self) -> bool:
        """True if it keeps Adam's moments, of all parameters or of some."""
        return self.type in ("adamw", "muon", "adamw_8bit", "adamw_4bit")

    @property
    def code(self) -> str:
        """What memory and speed depend on: which it is and its further arguments, but not its other numbers."""
        own = {"target": self.target, "param_groups": self.param_groups, "kwargs": self.kwargs}
        told = {key: value for key, value in own.items() if value}
        return json.dumps({"type": self.type, **told}, sort_keys=True) if told else self.type

    @model_validator(mode="before")
    @classmethod
    def _target_is_ones_own(cls, given: Any) -> Any:
        """A target says by itself that the optimizer is one's own."""
        return {"type": "own", **given} if isinstance(given, dict) and given.get("target") else given

    @model_validator(mode="after")
    def _one_thing_says_which(self) -> OptimizerConfig:
        if self.target and self.type != "own":
            raise ValueError(
                f"type is {self.type} and target {self.target}; each names an optimizer: leave one of them out"
            )
        if self.type == "own" and not self.target:
            raise ValueError("type is own, and no target names it; set target: package.module:callable")
        if self.param_groups and self.type == "muon":
            raise ValueError(
                f"param_groups is {self.param_groups}, and type is muon, which groups the parameters itself; leave param_groups out, "
                "or name torch.optim:Muon as target"
            )
        for argument, key in self._arguments().items():
            if argument in self.kwargs:
                raise ValueError(
                    f"kwargs has {argument}, for which the study file has a key of its own; set optimizer.{key} instead"
                )
        return self

    def _arguments(self) -> dict[str, str]:
        """Return the optimizer's arguments for which there is a key, and which one."""
        rate, decay = {"lr": "lr"}, {"weight_decay": "weight_decay"}
        of_type: dict[str, dict[str, str]] = {
            "own": rate,
            "sgd": rate | decay | {"momentum": "betas"},
            "adafactor": rate | decay,
        }
        return of_type.get(self.type, rate | decay | {"betas": "betas", "eps": "eps"})


class Schedule(Strict):
    """How the learning rate changes in the course of a run, after its warm-up."""

    type: Literal["warmup_stable_decay", "cosine", "constant", "table"] = "warmup_stable_decay"
    """warmup_stable_decay: constant, then a linear fall to zero at the end of the budget. cosine: a half cosine, down
    to zero. constant: no change. table: as `factors` has it."""
    decay: Fraction = 0.2
    """The share of the sample budget over which warmup_stable_decay falls: 0.2 or 20%."""
    factors: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Of `type: table`: the learning rate as a share of its highest, at even distances from the first step to the last, and on straight lines
    between. Its own warm-up is in it: `optimizer.warmup: 0`."""

    @model_serializer(mode="wrap")
    def _without_empty_factors(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave them out where there are none: what was written before they were there is the same."""
        return {key: value for key, value in serialize(self).items() if key != "factors" or value}

    @model_validator(mode="after")
    def _a_table_has_factors(self) -> Schedule:
        if (self.type == "table") != bool(self.factors) or len(self.factors) == 1:
            raise ValueError(
                f"schedule has type {self.type} and {len(self.factors)} factors; a table has two at least, and any other type none"
            )
        return self


class MicroBatch(Strict):
    """Micro-batches with a limit of tokens in place of a number of samples."""

    tokens: Annotated[
        Literal["auto"] | PositiveInt,
        BeforeValidator(_a_number_or_auto, json_schema_input_type=Literal["auto"] | PositiveInt),
    ] = "auto"
    """The most tokens of a micro-batch on one rank, padding included. Of a micro-batch size m it holds as many as m of the longest samples
    have, so that a step never has more micro-batches than its accumulation says, and mostly has fewer. A number: no m that holds more
    is tried. auto: memory alone says how many."""


class Phase(Strict):
    """A part of a run with an accumulation, and so an effective batch, of its own."""

    from_samples: NonNegativeInt
    """The sample count at which it begins: its first step is the first one that begins there or later."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches per optimizer step on one rank."""
    learning_rate: Annotated[float, Field(gt=0)]
    """The learning rate after warm-up, before the schedule lowers it."""


class DevicePeak(Strict):
    """What a device can compute at most, in one precision."""

    flops_per_second: PositiveFloat
    """Dense matrix products, without sparsity."""
    source: Literal["data sheet", "measured"]
    """Whether a data sheet says so, or large matrix products reached it."""


class BranchPoint(Strict):
    """A checkpoint that another run has kept."""

    directory: str
    """The directory of the other run, as the ranks see it; a relative one begins at this run's own."""
    samples: PositiveInt
    """One of the other run's `kept_checkpoints`."""


class Decides(Enum):
    """What a field of a trial decides at most: each decides what those below it do, too."""

    CODE = "the code that is compiled"
    SPEED = "the memory and the speed of a short trial: so does every field that does not say otherwise"
    LOSS = "the loss"
    NOTHING = "none of these"


class TrialConfig(Strict):
    """One training run, complete. All sizes are in samples (sequences) unless the name says otherwise."""

    model: Annotated[ModelConfig, Decides.CODE]
    """What is trained."""
    loss: Annotated[Loss | None, Decides.CODE] = None
    """What the loss is: a criterion of torch's, a transformers model's own, or the user's. null: the module itself returns
    (loss_sum, num_targets)."""
    data: Annotated[DataConfig, Decides.CODE]
    """What it is trained on."""
    initial_weights: Annotated[str | None, Decides.LOSS] = None
    """The file of the weights that the run begins with. null: those that the model's target makes of the seed."""
    micro_batch_size: Annotated[PositiveInt, Decides.CODE]
    """Samples per forward and backward pass on one rank; with `micro_batch`, the longest samples that one holds at least."""
    micro_batch: MicroBatch | None = None
    """How micro-batches are cut by tokens. The samples of a step stay the same. null: each has `micro_batch_size` samples."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step on one rank; with `micro_batch`, the most of them."""
    world_size: Annotated[PositiveInt, Decides.CODE] = 1
    """The data-parallel ranks of the run."""
    parallel: Annotated[Parallel, Decides.CODE] = "ddp"
    """How ranks hold the model: each of them the whole (ddp), or each a shard (fsdp, which is FSDP2, and needs
    several)."""
    activation_checkpointing: Annotated[ActivationCheckpointing, Decides.CODE] = "none"
    """Which activations are computed again in the backward pass: none, those of cheap operations (selective), those
    of whole blocks (full), or as many as a memory budget between 0 and 1 asks for, which needs `compile`."""
    memory_knobs: Annotated[MemoryKnobsTogether, Decides.CODE] = ()
    """Further ways to save memory, by their names in `trainers/knobs`. (): there are none."""
    compile: Annotated[Compile, Decides.CODE] = True
    """What is compiled. true, or blocks: the model's repeated blocks, one by one. whole: the model as one graph, with the
    norm, the head and the loss that it returns; it takes longer to compile, ranks exchange gradients after the backward
    pass instead of during it, and fsdp has no such graph. A `loss` of yours outside the model is never compiled. false:
    nothing."""
    dynamic_micro_batch: Annotated[bool, Decides.CODE] = False
    """true: the compiled code serves every micro-batch size, for a search over sizes. false: it serves this one
    alone."""
    precision: Annotated[Precision, Decides.CODE] = "float32"
    """The precision of forward passes: float32, or autocast to bfloat16 or float16. Weights stay in float32."""
    allow_tf32: Annotated[bool, Decides.CODE] = False
    """true: where float32 is computed on a GPU, factors of matrix products and convolutions are rounded to TF32 if the GPU has
    it, which is several times faster. false: they are not, convolutions included, which torch by itself rounds. It has no
    effect on other precisions, nor on a CPU."""
    deterministic: bool = False
    """true: a GPU, too, computes the same bits each time, so that a run which was interrupted and goes on ends as one that
    was not. It is slower, and an operation that has no such algorithm is an error. false: on a GPU, such runs differ by
    rounding. A CPU computes the same bits in any case."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer, apart from its learning rate."""
    learning_rate: Annotated[float, Field(gt=0), Decides.LOSS]
    """The learning rate after warm-up, before the schedule lowers it."""
    warmup_samples: Annotated[int, Field(ge=0), Decides.LOSS] = 0
    """The samples over which the learning rate rises from zero. 0: there is no warm-up."""
    schedule: Annotated[Schedule, Decides.LOSS] = Schedule()
    """How the learning rate changes after warm-up."""
    ramp: tuple[Phase, ...] = ()
    """Later phases of the run, in their order, whose effective batches differ by accumulation: the micro-batch stays, so
    nothing is compiled again. The first phase, up to them, has the accumulation and the learning rate given above, and
    `effective_batch_size` is its. Warm-up and schedule run on over all phases. (): there is no other phase."""
    sample_budget: PositiveInt
    """The samples that the run trains on. It ends with the first step that reaches them, and evaluates there."""
    rungs: tuple[PositiveInt, ...] = ()
    """Sample counts at which the run evaluates, saves a checkpoint, reports, and waits until it is told whether to go
    on."""
    evaluations: tuple[PositiveInt, ...] = ()
    """Further sample counts at which the run evaluates, saves a checkpoint and reports, and goes on without waiting."""
    evaluation_samples: Annotated[int, Field(ge=0)] = 256
    """Validation samples of each evaluation, from all parts of the set (of a stream its first), or all if there are fewer. 0: it never
    evaluates."""
    evaluated_together: PositiveInt | None = None
    """How many samples an evaluation takes at a time, where the loss of a sample depends on those beside it: trials with micro-batches of other
    sizes are then judged by the same loss. null: as many as a micro-batch has."""
    ema_half_life_samples: PositiveInt | None = None
    """The half-life of a moving average of the weights, in samples. Evaluations use the average, in which the initial
    weights do not count. null: there is none."""
    sync_batch_norm: bool = False
    """true: BatchNorm layers take the statistics of a micro-batch over all ranks (SyncBatchNorm), which needs GPUs."""
    statistics: bool = True
    """true: the run measures coherence, noise scale, update ratio and similar figures of its gradients and updates.
    false: it measures loss, gradient norm, speed and memory alone."""
    gpu_timing_seconds: Annotated[NonNegativeFloat, Decides.NOTHING] = 0.0
    """How long a GPU's steps are timed at least. Where those up to the budget take less, the run takes as many more as that
    needs, without statistics, and tells the speed of these; they are no part of it otherwise. 0: the steps up to the budget
    are enough, as they always are on a CPU."""
    noise_snapshots: tuple[PositiveInt, ...] = ()
    """Sample counts at which the run stops to measure its gradient noise at weights that stand still, which leaves the
    run as it is and no trace in its timings. A snapshot takes at most 5 % of the micro-batches since the one before,
    and is left out where that is too few: less than 10 per snapshot. It holds a gradient beside the activations, as
    accumulation does. Its figures come with the next report (`snapshot_noise_scale`, ...), and all of them in the
    trial's `noise.jsonl`."""
    longest_samples: bool = False
    """true: the first steps, which are not timed, and every evaluation take the longest samples of the data, since what is to
    fit must fit with them."""
    long_samples: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Where the training data differ in size and do not tell their `lengths`: the indices of the longest that were found, the
    longest first."""
    seed: Annotated[int, Decides.LOSS] = 0
    """Decides the initial weights, the order of the samples, and dropout."""
    keep_checkpoints: Annotated[PositiveInt, Decides.NOTHING] = 1
    """How many checkpoints are kept: the newest. A run whose newest one the disk has damaged goes on from the one
    before it; with 1 there is none, and it begins again."""
    kept_checkpoints: tuple[PositiveInt, ...] = ()
    """Sample counts at which the run evaluates, saves a checkpoint and reports, as at `evaluations`, and keeps that
    checkpoint beside the newest ones, for other runs' `branch_from`."""
    branch_from: BranchPoint | None = None
    """Where this run begins: with the weights, the optimizer's moments and the place in the data that another run had at
    a checkpoint which it has kept. Batch, learning rate, schedule and budget are this run's own; with the other's seed
    and data it takes the samples that the other takes next. Its sample counts go on from the other's: budget, rungs,
    evaluations, ramp, warm-up and schedule count from the beginning of that run. null: it begins on its own."""
    memory_limit_bytes: PositiveInt | None = None
    """How much memory one rank may use, in bytes. On a GPU: of its memory. On a CPU host: what the process may
    allocate beyond what it held before the run, and more is refused; twice as much after the warm-up. null: whatever the device or host has."""
    device_peaks: Annotated[dict[Precision, DevicePeak], Decides.NOTHING] = Field(default={})
    """What the device can compute at most, for each precision: `mfu` is relative to it. A precision that is not here:
    the run looks its device up, and measures one that it does not know."""
    dropout: Annotated[bool, Decides.CODE] = True
    """true: the model's dropout is as it was built. false: it is switched off, as its masks would differ between two
    splits of a batch."""
    sample_permutation: PositiveInt | None = None
    """A number: the samples of each micro-batch come in another order, which the number decides. The gradient is then
    the same but for its rounding. null: they come in the order of the data."""
    reference_weights: str | None = None
    """The file in which an equal run left its weights (`save_weights`); a relative path begins at this run's directory.
    This run reports `rho`, its distance to that one. null: it is compared with none."""
    save_weights: bool = False
    """true: the run leaves its initial and final weights in a file, for another run's `reference_weights`."""
    check_parts: bool = False
    """true: at its end the run also measures whether the losses of a few samples add up to that of all of them in one
    micro-batch, and whether the model draws random numbers."""

    @property
    def split(self) -> Split:
        """How a step's samples are split into micro-batches, in the first phase."""
        return Split(self.micro_batch_size, self.gradient_accumulation_steps, self.world_size)

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step over all ranks, in the first phase."""
        return self.split.effective_batch_size

    @property
    def last_effective_batch_size(self) -> int:
        """Samples per optimizer step over all ranks, in the last phase."""
        return self.split_in(self.phases[-1]).effective_batch_size

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases of the run: the first, which the ramp does not list, and those of the ramp."""
        accumulation, rate = self.gradient_accumulation_steps, self.learning_rate
        return (Phase(from_samples=0, gradient_accumulation_steps=accumulation, learning_rate=rate), *self.ramp)

    @property
    def accumulations(self) -> tuple[int, ...]:
        """The accumulation of each phase."""
        return (self.gradient_accumulation_steps, *(phase.gradient_accumulation_steps for phase in self.ramp))

    def phase_at(self, first_sample: int) -> Phase:
        """Return the phase of the step whose first sample has this number, from 0."""
        return [phase for phase in self.phases if phase.from_samples <= first_sample][-1]

    def num_steps_at(self, samples_seen: int) -> int:
        """Return how many optimizer steps the run itself has taken once it has seen so many samples: a branch's begin where
        it does."""
        batches = [(phase.from_samples, self.split_in(phase).effective_batch_size) for phase in self.phases]
        return num_steps(samples_seen, batches, begin=self.branch_from.samples if self.branch_from else 0)

    def split_in(self, phase: Phase) -> Split:
        """Return how a step's samples are split in that phase."""
        return Split(self.micro_batch_size, phase.gradient_accumulation_steps, self.world_size)

    @model_validator(mode="after")
    def _parts_go_together(self) -> TrialConfig:
        check_cut(self.micro_batch, self.data)
        check_shards(self.parallel, self.world_size)
        check_whole(self.parallel, [self.compile])
        check_knobs(self)
        return self

    @model_validator(mode="after")
    def _phases_follow_each_other(self) -> TrialConfig:
        begin = [0, *(phase.from_samples for phase in self.ramp)]
        for before, after in itertools.pairwise(begin):
            if after <= before:
                raise ValueError(
                    f"ramp has a phase from {after} samples after one from {before}; let each phase begin later than the "
                    "one before it (the first, which is not listed, begins at 0)"
                )
        if begin[-1] >= self.sample_budget:
            raise ValueError(
                f"ramp has a phase from {begin[-1]} samples, which the run never begins: its sample_budget is "
                f"{self.sample_budget}; leave the phase out, or raise sample_budget"
            )
        return self

    @model_validator(mode="after")
    def _the_budget_is_long_enough(self) -> TrialConfig:
        late = [count for count in self.kept_checkpoints if count >= self.sample_budget]
        if late:
            raise ValueError(
                f"kept_checkpoints has {late[0]} samples, and the run ends at its sample_budget ({self.sample_budget}); "
                "keep an earlier one, or raise sample_budget"
            )
        if self.branch_from and self.branch_from.samples >= self.sample_budget:
            raise ValueError(
                f"branch_from begins at {self.branch_from.samples} samples, and sample_budget ({self.sample_budget}) counts "
                "those before the branch too; raise sample_budget, or begin earlier"
            )
        if self.sample_budget < self.effective_batch_size:
            raise ValueError(
                f"sample_budget ({self.sample_budget}) is smaller than one effective batch "
                f"({self.effective_batch_size}); raise sample_budget or lower the batch"
            )
        return self

    @model_validator(mode="after")
    def _snapshots_are_statistics(self) -> TrialConfig:
        if self.noise_snapshots and not self.statistics:
            raise ValueError(
                f"noise_snapshots has {len(self.noise_snapshots)} sample counts, but statistics is false; set statistics: true "
                "or leave noise_snapshots empty"
            )
        return self


def check_cut(micro_batch: MicroBatch | None, data: DataConfig) -> None:
    """Raise ValueError where rows of one length are to be cut by their lengths."""
    if micro_batch is not None and data.pack is not None:
        raise ValueError(
            f"micro_batch cuts steps by the lengths of samples, and data.pack makes rows that all have {data.pack} tokens; leave one of the "
            "two out"
        )


def check_shards(parallel: Parallel, world_size: int) -> None:
    """Raise ValueError where the model is to be sharded over a single rank."""
    if parallel == "fsdp" and world_size == 1:
        raise ValueError("parallel: fsdp shards the model over ranks, and world_size is 1; raise it, or use ddp")


def check_whole(parallel: Parallel, compiled: Iterable[Compile | None]) -> None:
    """Raise ValueError where a model that is gathered block by block is to be compiled as one graph."""
    if parallel == "fsdp" and "whole" in compiled:
        raise ValueError(
            "compile: whole makes one graph of the model, and parallel: fsdp gathers it block by block; use compile: blocks, "
            "or ddp"
        )


@dataclass(frozen=True)
class Split:
    """How the samples of one optimizer step are split: into micro-batches, one after the other on each of several
    ranks."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int

    def __str__(self) -> str:
        """Return it as trials are named after it: m8k2 is a micro-batch of 8 in 2 accumulation steps."""
        return f"m{self.micro_batch_size}k{self.gradient_accumulation_steps}"

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per optimizer step over all ranks."""
        return self.gradient_accumulation_steps * self.world_size

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch_size * self.num_micro_batches


def num_steps(samples_seen: int, phases: Sequence[tuple[int, int]], begin: int = 0) -> int:
    """Return the optimizer steps from one sample count to another.

    phases: of each, the sample count from which on a step belongs to it, and its effective batch.
    """
    seen, steps = begin, 0
    ends = [*(count for count, _ in phases[1:]), samples_seen]
    for (_, batch), end in zip(phases, ends, strict=True):
        here = max(0, math.ceil((min(end, samples_seen) - seen) / batch))
        steps, seen = steps + here, seen + here * batch
    return steps


def derive_accumulation(effective_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the gradient_accumulation_steps with which micro_batch_size x accumulation x world_size is the effective
    batch.

    Nothing is rounded: where it does not divide, a ValueError names both numbers.
    """
    per_accumulation_step = micro_batch_size * world_size
    if effective_batch_size % per_accumulation_step:
        raise ValueError(
            f"effective_batch_size ({effective_batch_size}) is not a multiple of micro_batch_size x world_size "
            f"({micro_batch_size} x {world_size} = {per_accumulation_step}); choose a multiple of {per_accumulation_step}"
        )
    return effective_batch_size // per_accumulation_step


@contextlib.contextmanager
def left_as_it_is() -> Iterator[None]:
    """Call a user's code within this: the directory, in which relative paths begin, and the streams, on which all is told, are afterwards
    what they were. A process that the code has forked ends here, where this one's work goes on."""
    process, streams = os.getpid(), (sys.stdout, sys.stderr)
    with contextlib.chdir("."):
        try:
            yield
        finally:
            if os.getpid() != process:
                os.write(2, b"batchscout: a process that your code has forked came back from it, and ends here\n")
                os._exit(0)
            sys.stdout, sys.stderr = streams


def resolve(path: str) -> Any:
    """Return the object that `package.module:attribute` names; an import leaves this process as it is. A script that
    parses its arguments as it is imported is given none: this process's are not its. Raises ValueError that says which half does not exist."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"'{path}' is not an import path; write it as package.module:callable")
    given, sys.argv = sys.argv, [module_name]
    try:
        with left_as_it_is():
            found: Any = importlib.import_module(module_name)
    except SystemExit as error:
        file, line = users_frame(error)
        raise ValueError(
            f"'{path}' does not resolve: importing '{module_name}' ended with exit code {error.code} (in {file}, line {line}), as a script does that "
            'parses arguments and misses one; let it do so under if __name__ == "__main__", or study the script as it is called: from: '
            "{script: ..., args: [...]}"
        ) from error
    except ModuleNotFoundError as error:
        raise ValueError(
            f"'{path}' does not resolve: no module named '{error.name}'; "
            "run from the directory that holds it, or install the package"
        ) from error
    finally:
        sys.argv = given
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ValueError(f"'{path}' does not resolve: '{module_name}' has no '{attribute}'; check its spelling")
        found = getattr(found, name)
    return found


def target_of(field: str, name: str, built_in: Mapping[str, Callable[..., Any]], returns: str) -> Callable[..., Any]:
    """Return what <field>.target names: what is built in, or the user's own callable. Raises ValueError in the user's words where it is
    neither. returns: what a callable is to return, in words."""
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        raise ValueError(
            f"{field}.target '{name}' is not built in; use {', '.join(built_in)} or an import path package.module:callable"
        )
    found = resolve(name)
    if not callable(found):
        raise ValueError(f"{field}.target '{name}' is a {type(found).__name__}; name a callable that returns {returns}")
    return found


def call_target(field: str, target: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Return target(**kwargs); the call leaves this process as it is. Raises ValueError in the user's words where the names do not fit its
    signature."""
    try:
        inspect.signature(target).bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(inspect.signature(target).parameters)
        raise ValueError(f"{field}.kwargs do not fit: {error}; it takes: {takes}") from error
    with left_as_it_is():
        return target(**kwargs)


def fields_that_decide(*what: Decides) -> set[str]:
    """Return the fields of a trial that decide this at most."""
    fields = TrialConfig.model_fields.items()
    said = {
        name: next((one for one in field.metadata if isinstance(one, Decides)), Decides.SPEED) for name, field in fields
    }
    return {name for name, most in said.items() if most in what}
