"""The keys of a study file: `StudyConfig`. Every key is documented under its field; those of the stages are in
stages.py, those of `model`, `data` and `schedule` in trainers/config.py."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    ModelWrapValidatorHandler,
    PositiveInt,
    model_validator,
)

from batchscout.orchestrator.config.regimes import HIGHEST_OVER_USUAL, usual_rate, with_defaults_of_regime
from batchscout.orchestrator.config.stages import (
    CHANGING,
    AtLeastOne,
    Branch,
    Equivalence,
    Frontier,
    Horizons,
    KillRules,
    OnlySays,
    Positive,
    StageConfig,
    StageKeys,
    Throughput,
    Train,
    compiled_in,
)
from batchscout.trainers.config import (
    ActivationCheckpointing,
    Compile,
    DataConfig,
    Fraction,
    MicroBatch,
    ModelConfig,
    OptimizerConfig,
    Parallel,
    Precision,
    Schedule,
    Split,
    check_cut,
    check_shards,
    check_whole,
    derive_accumulation,
)
from batchscout.trainers.criteria import Loss
from batchscout.trainers.knobs import MemoryKnobsTogether
from batchscout.trainers.strict import Strict

# Figures are floats, which count one by one up to here.
LARGEST_COUNT = 2**53
# Most file systems take 255, of which what stands beside a name must have some.
LONGEST_NAME_BYTES = 200
# torch's generators take numbers of 64 bits, and a seed is multiplied by the number of ranks.
Seed = Annotated[int, Field(ge=0, lt=2**32)]

AnyStage = TypeVar("AnyStage", bound=StageKeys)


def _name_of_a_directory(name: str) -> str:
    """Refuse what cannot be the name of a directory below runs/, or is hard to type."""
    faults = {
        "it is empty": not name,
        "it begins with a dot or a dash": name[:1] in (".", "-"),
        "it has a slash in it": "/" in name,
        "it begins or ends with a space, or has a character that cannot be printed": name.strip() != name
        or not name.isprintable(),
        f"it is longer than {LONGEST_NAME_BYTES} bytes": len(name.encode()) > LONGEST_NAME_BYTES,
    }
    found = next((fault for fault, is_so in faults.items() if is_so), None)
    if found is not None:
        raise ValueError(f"{name!r} cannot be a directory below runs/: {found}; choose a name such as gpt-small")
    return name


def _with_a_unit(value: object) -> object:
    """Refuse text of which pydantic would read the number at its beginning alone, such as 80%."""
    if isinstance(value, str) and re.match(r"\s*[\d.]", value) and not re.fullmatch(r"\s*[\d.]+\s*[A-Za-z]*\s*", value):
        raise ValueError(f"{value!r} is no amount of memory; write an amount with a unit, such as 16GiB")
    return value


def _yaml_off(value: object) -> object:
    """Return "off" for false, which is how YAML reads a bare `off`."""
    return "off" if value is False else value


Objective = Literal["time", "samples", "target"]


class StudyOptimizer(OptimizerConfig):
    """The optimizer, and how its learning rate and warm-up follow the batch size."""

    lr: Positive = 6e-4
    """The learning rate at `reference_batch_size`; `lr_scaling` says what it becomes at other batch sizes."""
    reference_batch_size: PositiveInt = 32
    """The effective batch, in samples, that `lr` was chosen for. Where the study file gives no `batch`, the candidate nearest to it is the
    baseline, with which all others are compared."""
    lr_scaling: Literal["auto", "none", "linear", "sqrt"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    """How the learning rate follows the effective batch: with its square root (sqrt, for Adam: Malladi et al. 2022,
    arXiv 2205.10287), in proportion to it (linear, for SGD: Goyal et al. 2017, arXiv 1706.02677), not at all (none), or with a
    power of it, from 0 to 1. auto: linear for sgd, 0.75 for muon (measured: docs/own_model.md), sqrt for all others. The rule
    is where the search for the rate begins, and never the answer."""
    warmup: Literal["auto", "short"] | Annotated[int, Field(ge=0)] = "auto"
    """The samples over which the learning rate rises from zero; of a number, a run shorter than `sample_budget` has the same share. auto: 1 %
    of the run's samples, but at least those of 30 optimizer steps, and at most a fifth of the run. short, which is the default of
    `regime: finetune`: 6 %, but at least those of 10 optimizer steps, and at most a fifth of the run."""
    beta2_scaling: Literal["none", "samples"] = "samples"
    """How the second of `betas` follows the effective batch. samples: AdamW's second moment forgets over as many samples
    at every batch as at `reference_batch_size`, so it is betas[1] to the power of batch / reference_batch_size, but, where it
    is not that itself, at least betas[0] and at most 0.9999 (arXiv 2507.07101). none: it stays as it is."""
    weight_decay_scaling: Literal["none", "samples"] = "none"
    """How `weight_decay` follows the effective batch and the learning rate. none: it stays as it is. samples: weights
    decay over as many samples as at `reference_batch_size` and `lr`, so it is multiplied by batch /
    reference_batch_size and by lr / the run's learning rate, but by 0.01 at least and by 10 at most (arXiv
    2405.13698)."""


class Tracking(Strict):
    """Where the curves of the trials are sent besides the run directory."""

    wandb: Annotated[
        Literal["off", "offline", "online"],
        BeforeValidator(_yaml_off, json_schema_input_type=Literal["off", "offline", "online", False]),
    ] = "off"
    """Whether each trial is a run in Weights & Biases, and all of a study one group: off, offline (written to disk,
    to be sent with `wandb sync`) or online. Without a key or a network the study goes on offline, and says so."""
    project: str = "batchscout"
    """The project in Weights & Biases and in Trackio, and the experiment in MLflow."""
    tensorboard: bool = False
    """true: the curves of each trial are also written for TensorBoard, into the run directory's `tensorboard/`."""
    mlflow: bool = False
    """true: each trial is also a run in MLflow, below one of the study: in the run directory's `mlflow.db`, or on the server that the
    environment variable MLFLOW_TRACKING_URI names. `pip install mlflow-skinny sqlalchemy alembic`; to look at it, `mlflow`."""
    trackio: bool = False
    """true: each trial is also a run in Trackio, and all of a study one group: in Trackio's own directory, which the environment
    variable TRACKIO_DIR names. `pip install trackio`."""


PlacementStrategy = Literal["pack", "spread", "strict_pack"]


class Placement(Strict):
    """How many trials run at once, where, and on how many CPUs. A lane is a group of processes that runs one trial at
    a time."""

    lanes: Annotated[PositiveInt | None, OnlySays.WHERE] = None
    """Trials that run at once, at most. null: as many as the GPUs of the cluster hold, with those that its autoscaler may
    start; on CPU hosts one, since two trials on one host would disturb each other's timing."""
    cpus_per_rank: PositiveInt | None = None
    """CPUs that are reserved for each rank. null: an equal share of all CPUs, on hosts with GPUs at most 8."""
    strategy: PlacementStrategy = "pack"
    """On which nodes of a cluster the ranks of a trial are, where `world_size` is above 1. pack: on as few as have room.
    strict_pack: on one; a study whose `world_size` no node holds is refused. spread: on as many as there
    are, as evenly as they have room, so that every speed is one over the network between them."""
    device: Annotated[str | None, OnlySays.WHERE] = None
    """The kind of GPU that trials run on, by Ray's name for it (`H100`): nodes with another kind are left idle, since what one
    kind measured holds for no other. null: the kind of which the cluster has the most when the study begins, and
    that one whenever it goes on."""
    idle_release_seconds: Annotated[Positive, OnlySays.WHERE] = 60.0
    """On a cluster whose autoscaler starts and ends nodes: how long a lane may be without a trial before it is given back, so that
    its node may end. Where no trial can come for it any more it is given back at once."""


class Batch(Strict):
    """The batch of `batchscout trial`, and of every stage for which no earlier stage has chosen one. Give two of the
    three keys at most: effective_batch_size = micro_batch_size x gradient_accumulation_steps x world_size."""

    micro_batch_size: PositiveInt | None = None
    """Samples per forward and backward pass on one rank. null: 1."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per optimizer step on one rank. null: what `effective_batch_size` makes it, or 1 without that."""
    effective_batch_size: PositiveInt | None = None
    """Samples per optimizer step over all ranks. null: what the other two keys make it."""


class Budget(Strict):
    """What a whole study may cost."""

    device_hours: Positive
    """The hours for which trials may hold devices, all together: a trial on two GPUs takes two device-hours in an hour,
    start and compiling included. A run that would not end within what is left is not started, and when all is spent the
    running ones are stopped at their next report; the answer is made from what has ended."""


class RealRun(Strict):
    """The run that the recommendation is for, where it is longer than the study."""

    samples: PositiveInt
    """Its length in samples, as `sample_budget` is: what the baseline trains on. The longer it is than that, the wider the intervals."""


class StudyConfig(Strict):
    """A whole study file. Only `model` and `data` must be given; `name` is the file's where it is left out."""

    name: Annotated[str, AfterValidator(_name_of_a_directory)]
    """The study's name. Its run directory is runs/<name>, so a name has no slash, and begins with neither a dot nor a dash."""
    model: ModelConfig
    """What is trained."""
    loss: Loss | None = None
    """What the loss is, where the module returns outputs: `cross_entropy`, `mse` or `bce_with_logits` of them and the batch's
    targets, or with keys of their own: `{type: cross_entropy, targets: label, ignore_index: 255}`; `mean`, if it returns a
    mean loss; `transformers`, for that library's models and batches with `labels`; or your own as `package.module:callable`, which is called as
    loss(module, batch) and returns (loss_sum, num_targets), the summed loss and the number of targets in that sum. null: the
    module itself returns the two, scalar tensors."""
    data: DataConfig
    """What it is trained on."""
    regime: Literal["pretrain", "finetune"] = "pretrain"
    """pretrain: the defaults are those of training from random weights. finetune: it begins with weights that were trained
    before, so `initial_weights` or the model must name some, `sample_budget` must be given, and these defaults differ:
    `optimizer` {lr: 2e-5, or 2e-4 with `model.peft`, reference_batch_size: 16, weight_decay: 0.01, warmup: short}, `largest: 128` of the frontier,
    `multiples: [1, 2]` of throughput."""
    initial_weights: str | None = None
    """The weights that every run begins with, in either regime: a file of safetensors (*.safetensors), or one that
    `torch.save(model.state_dict(), ...)` wrote, where all ranks can read it. own: those that `model.target` loads itself.
    null: none but what the model's target makes of the run's seed."""
    optimizer: StudyOptimizer = StudyOptimizer()
    """The optimizer, its learning rate, and how that follows the batch size."""
    precision: Precision = "float32"
    """The precision of forward passes: float32, or autocast to bfloat16 or float16. Weights stay in float32, but for the memory knob `bfloat16_weights`."""
    allow_tf32: bool = False
    """true: where float32 is computed on a GPU, factors of matrix products and convolutions are rounded to TF32 if the GPU has
    it, which is several times faster. false: they are not, nor in convolutions, where torch's default rounds. It has no
    effect on other precisions, nor on a CPU."""
    deterministic: bool = False
    """true: a GPU, too, computes the same bits each time, so that a trial which is interrupted and resumed ends as one
    that is not. It is slower, and an operation without a deterministic algorithm fails. false: on a GPU, resumed trials
    differ by rounding. A CPU computes the same bits in any case."""
    world_size: PositiveInt = 1
    """The data-parallel ranks of one trial: that many GPUs, or processes on a CPU host, train one model together."""
    batch: Batch = Batch()
    """Your own batch: where it is given, it is the baseline, with which all others are compared. Also the batch of `batchscout trial`, and of
    stages for which no earlier stage has chosen one."""
    micro_batch: MicroBatch | None = None
    """For samples of uneven length: `{tokens: auto}` or `{tokens: 8192}` cuts the samples of each step into micro-batches by their tokens,
    the short ones together, so that little is padded. Wherever a micro-batch size is given, a micro-batch then holds as many tokens as that many
    of the longest samples have, and the accumulation is the most micro-batches that a step takes. It needs `data.pad`, or data with
    `lengths`. null: all micro-batches have equally many samples."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Which activations are computed again in the backward pass, to save memory, in `batchscout trial` and in stages
    for which no frontier has chosen: none, those of cheap operations (selective), those of whole blocks (full), or
    as many as a memory budget between 0 and 1 asks for, which needs `compile`."""
    memory_knobs: MemoryKnobsTogether = ()
    """Memory knobs that every trial of the study has, beside those that its frontier tries: the names are under that stage's
    `memory_knobs`. []: none."""
    compile: Compile | None = None
    """What is compiled, in `batchscout trial` and in stages for which no frontier has chosen: the model's repeated blocks one
    by one (true, or blocks), the model as one graph with its norm, head and loss (whole, which fsdp cannot), or nothing
    (false). null: what the study's frontier or grid compiles first in its list, and the blocks if neither says
    it."""
    memory_limit: Annotated[ByteSize, BeforeValidator(_with_a_unit), Field(gt=0)] | None = None
    """How much memory one rank may use, in bytes or as 512MiB. On a GPU: of its memory; null: all of it. On a CPU
    host: what the process may allocate beyond what it holds before a trial, and more is refused; twice as much after the
    three steps in which memory is measured, since the C library keeps what is freed while a run is timed; null: what the
    host has free when the study starts, in equal parts for all ranks."""
    headroom: Fraction = 0.05
    """The share of the memory limit that the chosen micro-batch must leave free: 0.05 or 5%."""
    sample_budget: Annotated[PositiveInt, Field(lt=LARGEST_COUNT)] = 32_768
    """The samples (sequences) of the baseline's full training run. The `objective` says what the other candidates may
    train on: as many, or as many as they get done in the same time."""
    evaluation_samples: PositiveInt = 256
    """The validation samples of each evaluation: the same ones from all parts of the set (of a stream its first), or all if there are fewer."""
    evaluations: Annotated[int, Field(ge=1)] = 8
    """How often a full training run is evaluated, at even distances; the last evaluation is at its end."""
    schedule: Schedule = Schedule()
    """How the learning rate changes in the course of a full training run."""
    isolation: Literal["lane", "trial"] = "lane"
    """lane: trials that run one after the other share their processes, which saves the start-up. trial: every trial
    gets fresh processes."""
    parallel: Parallel = "ddp"
    """How ranks hold the model: each of them the whole (ddp), or each a shard (fsdp, which is FSDP2, and needs a
    world_size of at least 2)."""
    tracking: Annotated[Tracking, OnlySays.WHERE] = Tracking()
    """Where the curves of the trials are sent besides the run directory."""
    placement: Placement = Placement()
    """How many trials run at once, where, and on how many CPUs."""
    keep_checkpoints: PositiveInt = 1
    """How many checkpoints of each trial are kept: the newest. A trial whose newest one the disk has damaged goes
    on from the one before it; with 1 there is none, and it begins again."""
    ema_half_life_samples: PositiveInt | None = None
    """The half-life of a moving average of the weights, in samples: weights of that many samples ago count
    half, and the initial ones do not count. Evaluations use the average. null: there is none, and evaluations use the
    weights as they are."""
    sync_batch_norm: bool = False
    """true: BatchNorm layers take the statistics of a micro-batch over all ranks (SyncBatchNorm), which needs GPUs. The
    statistics of different micro-batches stay apart all the same."""
    statistics: bool = True
    """true: trials measure coherence, noise scale, update ratio and similar figures. false: they measure loss,
    gradient norm, speed and memory alone, and there is no goodput."""
    seeds: Annotated[tuple[Seed, ...], AtLeastOne] = (0,)
    """Each candidate of the train, learning_rate and grid stages is run once per seed, and judged by the mean."""
    objective: Objective = "time"
    """What makes a candidate best. time: the lowest validation loss after the training time that the baseline needs for
    `sample_budget`, so a faster candidate trains on more samples. samples: the lowest validation loss after
    `sample_budget` samples each, for data that is scarce. target: the least training time until `target_loss`. Compiling,
    evaluating and waiting are not training time."""
    useful_gain: Annotated[Fraction, Field(gt=0)] = 0.03
    """The share of the training time below which a saving is not worth a change: 0.03 or 3%. The `train` stage ends once its choice
    wastes less than that on average."""
    target_loss: float | None = None
    """The validation loss to reach, for `objective: target`. null: there is none, as for the
    other objectives."""
    budget: Annotated[Budget | None, OnlySays.WHEN] = None
    """What the whole study may cost: `{device_hours: 2}`. null: there is no limit."""
    real_run: Annotated[RealRun | None, OnlySays.WHAT_FOLLOWS] = None
    """What the recommendation is for, where that is longer than the study: `{samples: 1_000_000}`. The stage `horizons`,
    which then follows the others, carries the answer to that length, and verdict, recommendation and exports are the real run's. null:
    the study's own length."""
    kill: KillRules = KillRules()
    """When a trial is stopped early by what itself does: it diverges, is too slow, or hangs."""
    stages: Annotated[tuple[StageConfig, ...], AtLeastOne, OnlySays.WHAT_FOLLOWS] = (
        Frontier(),
        Throughput(),
        Equivalence(),
        Train(),
    )
    """The stages of the study, in the order in which they run; each at most once."""

    @model_validator(mode="before")
    @classmethod
    def _horizons_of_a_real_run(cls, tree: object) -> object:
        """Append the stage that a real run needs, where the study file does not say when it is to come."""
        if not isinstance(tree, dict) or tree.get("real_run") is None:
            return tree
        stages = tree.get("stages", cls.model_fields["stages"].default)
        if not isinstance(stages, list | tuple):  # as is told when it is checked
            return tree
        named = [stage.get("type") if isinstance(stage, dict) else getattr(stage, "type", None) for stage in stages]
        return tree if "horizons" in named else tree | {"stages": [*stages, {"type": "horizons"}]}

    @model_validator(mode="wrap")
    @classmethod
    def _defaults_of_the_regime(cls, tree: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in what finetuning begins with, where the study file does not say it. As the last one here it runs first."""
        if not isinstance(tree, dict) or tree.get("regime") != "finetune":
            return handler(tree)
        config = handler(with_defaults_of_regime(tree, cls.model_fields["stages"].default))
        config.optimizer.model_fields_set.intersection_update(tree.get("optimizer") or ())  # all else nobody has given
        return config

    @model_validator(mode="after")
    def _checks_across_keys(self) -> StudyConfig:
        kinds = [stage.type for stage in self.stages]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice:
            raise ValueError(
                f"stages has '{twice}' twice; a study has each stage at most once, so split it in two studies"
            )
        if self.objective == "target" and self.target_loss is None:
            raise ValueError("objective: target has no target_loss; add target_loss, the validation loss to reach")
        if self.objective != "target" and self.target_loss is not None:
            raise ValueError(
                f"target_loss ({self.target_loss:g}) is only used by objective: target; set objective: target or remove target_loss"
            )
        _check_regime(self)
        _check_changing(self)
        _check_branch(self)
        check_cut(self.micro_batch, self.data)
        check_shards(self.parallel, self.world_size)
        check_whole(self.parallel, [self.compile, *compiled_in(self.stages)])
        self._check_real_run()
        self._check_budget()
        equivalence = self.keys_of(Equivalence)
        if equivalence and equivalence.effective_batch_size:
            for micro_batch_size in equivalence.micro_batch_sizes:
                derive_accumulation(equivalence.effective_batch_size, micro_batch_size, self.world_size)
        return self

    def _check_budget(self) -> None:
        """Raise ValueError where a full run has not a single step of the batch that is given."""
        effective, budget = given_batch(self.batch, self.world_size).effective_batch_size, self.sample_budget
        if effective > budget:
            raise ValueError(
                f"sample_budget ({budget}) is smaller than one effective batch ({effective}); raise sample_budget or lower the batch"
            )

    def _check_real_run(self) -> None:
        horizons, train = self.keys_of(Horizons), self.keys_of(Train)
        if self.real_run is None:
            if horizons:
                raise ValueError("the stage horizons needs real_run: {samples: ...}; add it or remove the stage")
            return
        kinds = [stage.type for stage in self.stages]
        late = next((kind for kind in kinds[kinds.index("horizons") :] if kind in ("train", "learning_rate")), None)
        if late:
            raise ValueError(f"horizons extends what {late} finds, but comes before it in stages; move it after {late}")
        samples, budget = self.real_run.samples, self.sample_budget
        if self.objective == "target":
            raise ValueError("real_run compares losses, and objective: target compares seconds; remove one of them")
        if train is None:
            raise ValueError("real_run goes on from what the stage train finds; add that stage or remove real_run")
        if samples <= budget:
            raise ValueError(
                f"real_run.samples ({samples}) must be more than sample_budget ({budget}), which the study's own runs train on; "
                "lower sample_budget or remove real_run"
            )

    @property
    def named_knobs(self) -> tuple[str, ...]:
        """The memory knobs that the study file names: those of every trial, and those that its frontier tries."""
        frontier = self.keys_of(Frontier)
        return (*self.memory_knobs, *((frontier and frontier.memory_knobs) or ()))

    def keys_of(self, kind: type[AnyStage]) -> AnyStage | None:
        """Return the study's stage of this class, or None where it has none."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)


def _check_regime(config: StudyConfig) -> None:
    """Raise ValueError where a study would finetune from random weights, or at a rate that forgets them."""
    if config.regime != "finetune":
        return
    if config.initial_weights is None and not _loads_weights(config.model):
        raise ValueError(
            "regime: finetune begins with weights, and the study file names none; set initial_weights to a file of them, or to "
            "own where model.target loads them itself (a transformers model does with model.kwargs pretrained: true)"
        )
    optimizer, usual = config.optimizer, usual_rate(config.model.peft is not None)
    if optimizer.type == "adamw" and optimizer.lr > HIGHEST_OVER_USUAL * usual:
        raise ValueError(
            f"optimizer.lr ({optimizer.lr:g}) is more than {HIGHEST_OVER_USUAL * usual:g}, fifty times the usual rate of "
            f"finetuning ({usual:g}); lower it, or set regime: pretrain, which takes initial_weights, too"
        )


def begins_with_weights(config: StudyConfig) -> bool:
    """True if its runs go on from weights that were trained before, in either regime, as far as the study file says so."""
    return config.regime == "finetune" or config.initial_weights is not None or _loads_weights(config.model)


def _loads_weights(model: ModelConfig) -> bool:
    """True of a model whose target loads weights by itself: a pretrained one, and one's own that gets adapters, which would be of
    no use to random weights."""
    return (
        bool(model.kwargs.get("pretrained")) if model.target == "hf" else ":" in model.target and model.peft is not None
    )


_CHOOSES = {
    "frontier": "chooses the micro-batch and the mode",
    "throughput": "times the batches",
    "train": "chooses the batch",
}
_CHOICES_BEFORE = {
    "throughput": ("frontier",),
    "equivalence": ("frontier",),
    "train": ("frontier", "throughput"),
    "learning_rate": ("frontier", "throughput", "train"),
}
"""By the stage: those whose choices it goes on with, so that none of them may come after it."""


def check_typed(config: StudyConfig) -> None:
    """Raise ValueError for what a study that begins is not to have: a stage before one whose choice it needs, a range of no size, a word that
    the model does not take, or runs without a step. Those of earlier versions may have it, and are read all the same."""
    _check_order(config)
    _check_optimizer(config)
    frontier, budget = config.keys_of(Frontier), config.sample_budget
    if frontier is None:
        return
    if frontier.smallest > frontier.largest:
        raise ValueError(
            f"stages.frontier.smallest ({frontier.smallest}) is larger than largest ({frontier.largest}), so no micro-batch is tried; lower smallest or "
            "raise largest"
        )
    if "chunked" in frontier.cross_entropy and config.model.target != "gpt":
        raise ValueError(
            "stages.frontier.cross_entropy has chunked, which is a choice of the built-in gpt alone; leave it out, and name "
            "memory_knobs: [chunked_cross_entropy] there, which other models take"
        )
    if config.keys_of(Train) is None:
        return
    reference = config.optimizer.reference_batch_size
    if config.batch == Batch() and reference > budget:
        raise ValueError(
            f"sample_budget ({budget}) is smaller than the baseline's batch, which is optimizer.reference_batch_size ({reference}) as the "
            "study file gives no batch; raise sample_budget, or give the batch that you train with"
        )
    if frontier.smallest * config.world_size > budget:
        raise ValueError(
            f"sample_budget ({budget}) is smaller than the smallest batch that the frontier tries (stages.frontier.smallest x world_size = "
            f"{frontier.smallest * config.world_size}); raise sample_budget or lower smallest"
        )


_WITHOUT_EFFECT = {"own": ("betas", "eps", "weight_decay"), "adafactor": ("betas", "eps"), "sgd": ("eps",)}
"""Keys of the optimizer, by its type, that it does not take."""


def _check_optimizer(config: StudyConfig) -> None:
    """Raise ValueError where a number of the optimizer or of its schedule would change nothing, or its warm-up never ends."""
    optimizer, schedule, budget = config.optimizer, config.schedule, config.sample_budget
    if idle := [key for key in _WITHOUT_EFFECT.get(optimizer.type, ()) if _differs_from_its_default(optimizer, key)]:
        remedy = "put them into optimizer.kwargs" if optimizer.type == "own" else "leave them out"
        raise ValueError(f"optimizer has {' and '.join(idle)}, which have no effect on {optimizer.name}; {remedy}")
    if optimizer.type == "own" and optimizer.weight_decay_scaling != "none":
        raise ValueError(
            f"optimizer has weight_decay_scaling: {optimizer.weight_decay_scaling}, which has no effect on {optimizer.name}, whose weight_decay is in "
            "optimizer.kwargs; leave it out"
        )
    if schedule.type != "warmup_stable_decay" and _differs_from_its_default(schedule, "decay"):
        raise ValueError(
            f"schedule has decay ({schedule.decay:g}), the share of the run over which warmup_stable_decay falls, and type {schedule.type}; leave "
            "decay out, or give a schedule that ends above zero as factors, with type: table"
        )
    falls = schedule.type == "warmup_stable_decay" and schedule.decay > 0
    end = round((1 - schedule.decay) * budget) if falls else budget
    if isinstance(optimizer.warmup, int) and optimizer.warmup >= end:
        what = (
            f"the rate begins to fall at {end} of sample_budget ({budget})"
            if falls
            else f"sample_budget ({budget}) is over"
        )
        raise ValueError(
            f"optimizer.warmup ({optimizer.warmup} samples) does not end before {what}, so no run comes to its learning rate; lower it or raise "
            "sample_budget"
        )


def _differs_from_its_default(keys: Strict, name: str) -> bool:
    """True if a key was chosen, as far as its value says: a run directory's study.yaml has all keys."""
    return getattr(keys, name) != type(keys).model_fields[name].default


def _check_order(config: StudyConfig) -> None:
    """Raise ValueError where a stage would run before another one whose choice it needs."""
    kinds, equivalence = [stage.type for stage in config.stages], config.keys_of(Equivalence)
    for place, kind in enumerate(kinds):
        if kind == "equivalence" and equivalence is not None and equivalence.effective_batch_size:
            continue  # it has sizes of its own
        late = next((one for one in _CHOICES_BEFORE.get(kind, ()) if one in kinds[place:]), None)
        if late is not None:
            raise ValueError(
                f"stages has '{kind}' before '{late}', which {_CHOOSES[late]} that '{kind}' needs; put '{late}' first"
            )


def _check_changing(config: StudyConfig) -> None:
    """Raise ValueError where a stage that trains the chosen run again would have none, or another one changes that run, too."""
    kinds = [stage.type for stage in config.stages]
    changing = sorted(stage.type for stage in config.stages if isinstance(stage, CHANGING))
    if len(changing) > 1:
        raise ValueError(
            f"stages has '{changing[0]}' and '{changing[1]}': each recommends a change of the chosen run, and the two are "
            "never tried together; leave one of them out"
        )
    for kind in changing:
        if config.keys_of(Train) is None:
            raise ValueError(
                f"stages has '{kind}' without 'train', which chooses the run that it trains again; add {{type: train}}"
            )
        later = next((one for one in kinds[kinds.index(kind) :] if one in ("train", "learning_rate")), None)
        if later:
            raise ValueError(
                f"stages has '{kind}' before '{later}', which chooses the run that it trains again; put '{kind}' after it"
            )


def _check_branch(config: StudyConfig) -> None:
    """Raise ValueError where a branch stage would have no stable phase to branch from."""
    branch, schedule = config.keys_of(Branch), config.schedule
    if branch is None:
        return
    if schedule.type != "warmup_stable_decay":
        raise ValueError(
            f"stages has 'branch', which needs a phase of constant learning rate, and schedule.type is {schedule.type}; set "
            "schedule: {type: warmup_stable_decay}, or leave 'branch' out"
        )
    if max(branch.at) > 1 - schedule.decay:
        raise ValueError(
            f"branch.at has {max(branch.at):g}, where the learning rate is already falling: the stable phase ends at "
            f"{1 - schedule.decay:g} of a run (schedule.decay is {schedule.decay:g}); begin earlier, or lower the decay"
        )


def given_batch(batch: Batch, world_size: int) -> Split:
    """Return the split that the key `batch` gives. Raises ValueError where its numbers disagree."""
    size, accumulation = batch.micro_batch_size or 1, batch.gradient_accumulation_steps
    if batch.effective_batch_size is None:
        return Split(size, accumulation or 1, world_size)
    derived = derive_accumulation(batch.effective_batch_size, size, world_size)
    if accumulation not in (None, derived):
        raise ValueError(
            f"batch gives gradient_accumulation_steps ({accumulation}), but effective_batch_size "
            f"({batch.effective_batch_size}) with micro_batch_size ({size}) and world_size "
            f"({world_size}) makes it {derived}; leave one of them out"
        )
    return Split(size, derived, world_size)
