"""What a study file says: `StudyConfig`. Every key is documented under its field; the file's keys are these fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, PositiveInt, model_validator

from orchestrator.config.stages import (
    AtLeastOne,
    Equivalence,
    Frontier,
    KillRules,
    LearningRate,
    Positive,
    StageConfig,
    Throughput,
    Train,
)
from trainers.config import (
    ActivationCheckpointing,
    DataConfig,
    Fraction,
    ModelConfig,
    OptimizerConfig,
    Parallel,
    Precision,
    Schedule,
    Strict,
    check_shards,
    derive_accumulation,
)


def _yaml_off(value: object) -> object:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


class StudyOptimizer(OptimizerConfig):
    lr: Positive = 6e-4
    """Learning rate at `reference_batch_size`."""
    reference_batch_size: PositiveInt = 32
    """The effective batch, in samples, that `lr` was chosen for."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "sqrt"
    """How the learning rate follows the effective batch: sqrt for Adam (Malladi et al. 2022, arXiv 2205.10287), linear for
    SGD (Goyal et al. 2017, arXiv 1706.02677). A centre for the learning_rate stage, never the answer."""
    warmup: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Samples of linear warm-up; auto: 1 % of the budget, 2 % from 8 times the reference batch, 5 % from 16 times."""


class Tracking(Strict):
    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_yaml_off)] = "off"
    """Each trial as a W&B run, its group the study."""
    project: str = "batchscout"


class Placement(Strict):
    """Null: from what the cluster has. One lane runs one trial at a time."""

    lanes: PositiveInt | None = None
    """Trials at a time; null: as many as the GPUs hold, and one on a CPU host, where two would disturb each other's clock."""
    cpus_per_rank: PositiveInt | None = None
    """null: on a CPU host all CPUs over the ranks; with GPUs 1."""


class Batch(Strict):
    """The batch of `batchscout trial`, and of stages that no earlier stage has chosen one for. Give two of the three at most."""

    micro_batch_size: PositiveInt = 1
    gradient_accumulation_steps: PositiveInt | None = None
    effective_batch_size: PositiveInt | None = None


class StudyConfig(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, dot, dash and underscore; the run directory is runs/<name>."""
    model: ModelConfig
    loss: str | None = None
    """`package.module:callable`, called as loss(module, batch) -> (loss_sum, num_targets); null: the module returns that itself."""
    data: DataConfig
    optimizer: StudyOptimizer = StudyOptimizer()
    precision: Precision = "float32"
    world_size: PositiveInt = 1
    """Data-parallel ranks of one trial."""
    batch: Batch = Batch()
    activation_checkpointing: ActivationCheckpointing = "none"
    """Of `batchscout trial`, and of stages that no frontier has chosen for: none, selective, full, or a memory budget in (0, 1)."""
    compile: bool | None = None
    """Likewise; null: if the frontier or the grid compiles at all, or there is neither."""
    memory_limit: Annotated[ByteSize, Field(gt=0)] | None = None
    """Per rank. CUDA: bytes of the device, null = all of it. CPU host: bytes above the warm idle process, to which it is
    held; null = what is available on the host when the study starts, over the ranks."""
    headroom: Fraction = 0.05
    """Share of the memory limit that the chosen micro-batch must leave free."""
    sample_budget: PositiveInt = 32_768
    """Samples (sequences) of one full training run, whatever its batch size."""
    evaluation_samples: PositiveInt = 256
    """Validation samples per evaluation."""
    evaluations: Annotated[int, Field(ge=1)] = 8
    """Evenly spaced evaluations of a full run."""
    schedule: Schedule = Schedule()
    isolation: Literal["lane", "trial"] = "lane"
    """trial: fresh processes for every trial."""
    parallel: Parallel = "ddp"
    """ddp: every rank holds the whole model; fsdp (FSDP2): a shard of it, which needs world_size of at least 2."""
    tracking: Tracking = Tracking()
    placement: Placement = Placement()
    keep_checkpoints: PositiveInt = 1
    """Newest checkpoints kept per trial."""
    ema_half_life_samples: PositiveInt | None = None
    """Samples after which a moving average of the weights has forgotten half; null: none. With it, the average is evaluated."""
    sync_batch_norm: bool = False
    """Turn BatchNorm into SyncBatchNorm: statistics of a micro-step over all ranks. Needs GPUs; micro-steps stay apart."""
    statistics: bool = True
    """Coherence, noise scale, update ratio and the like; false: loss, norm, speed and memory only, and no goodput."""
    seeds: Annotated[tuple[int, ...], AtLeastOne] = (0,)
    """Each candidate of train and learning_rate is run once per seed and judged by the mean."""
    objective: Literal["val_loss", "time_to_target", "gpu_hours"] = "val_loss"
    """val_loss at the budget; or training seconds, or device hours, until the loss that the baseline ends at."""
    kill: KillRules = KillRules()
    stages: Annotated[tuple[StageConfig, ...], AtLeastOne] = (
        Frontier(),
        Throughput(),
        Equivalence(),
        Train(),
        LearningRate(),
    )

    @model_validator(mode="after")
    def _checks_across_keys(self) -> StudyConfig:
        kinds = [stage.type for stage in self.stages]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice:
            raise ValueError(
                f"stages has '{twice}' twice; a study has each stage at most once, so split it in two studies"
            )
        check_shards(self.parallel, self.world_size)
        micro_batch_size, accumulation = given_batch(self.batch, self.world_size)
        effective = micro_batch_size * accumulation * self.world_size
        if effective > self.sample_budget:
            raise ValueError(
                f"sample_budget ({self.sample_budget}) is smaller than one effective batch ({effective}); "
                "raise sample_budget or lower the batch"
            )
        for stage in self.stages:
            if isinstance(stage, Equivalence) and stage.micro_batch_sizes and stage.effective_batch_size:
                for micro_batch_size in stage.micro_batch_sizes:
                    derive_accumulation(stage.effective_batch_size, micro_batch_size, self.world_size)
        return self

    def stage_named(self, kind: str) -> Any:
        """The stage of that type, or None."""
        return next((stage for stage in self.stages if stage.type == kind), None)


def given_batch(batch: Batch, world_size: int) -> tuple[int, int]:
    """(micro_batch_size, gradient_accumulation_steps) that `batch` says. Raises ValueError where its numbers disagree."""
    accumulation = batch.gradient_accumulation_steps
    if batch.effective_batch_size is None:
        return batch.micro_batch_size, accumulation or 1
    derived = derive_accumulation(batch.effective_batch_size, batch.micro_batch_size, world_size)
    if accumulation not in (None, derived):
        raise ValueError(
            f"batch gives gradient_accumulation_steps ({accumulation}), but effective_batch_size "
            f"({batch.effective_batch_size}) with micro_batch_size ({batch.micro_batch_size}) and world_size "
            f"({world_size}) makes it {derived}; leave one of them out"
        )
    return batch.micro_batch_size, derived
