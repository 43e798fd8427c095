"""What one training run is told: a `TrialConfig`, complete and checked before anything starts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

Precision = Literal["float32", "bfloat16", "float16"]
Parallel = Literal["ddp", "fsdp"]
CrossEntropy = Literal["whole", "chunked"]
ActivationCheckpointing = Literal["none", "selective", "full"] | Annotated[float, Field(gt=0, lt=1)]


class Strict(BaseModel):
    """A frozen value; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _fraction(value: object) -> object:
    """`5%` as 0.05; numbers pass through."""
    if not isinstance(value, str):
        return value
    try:
        return float(value.strip().removesuffix("%")) / (100 if value.strip().endswith("%") else 1)
    except ValueError:
        raise ValueError(f"'{value}' is not a share; write 5% or 0.05") from None


Fraction = Annotated[float, BeforeValidator(_fraction), Field(ge=0, lt=1)]


class ModelConfig(Strict):
    target: str
    """`gpt`, `hf`, or `package.module:callable` that returns an nn.Module."""
    kwargs: dict[str, Any] = {}
    """Passed to the target. `vocab_size` and `seq_len` are taken from the data where the target has them and these do not."""
    blocks: str | None = None
    """Dotted name of the ModuleList whose members are checkpointed and compiled one by one; null: the longest one found."""


class DataConfig(Strict):
    target: str
    """`python_stdlib`, `text`, `hf`, or `package.module:callable` that returns (train, val) map-style data sets. Sets whose
    samples differ in length pad in `__getitems__` and have `lengths`, so that the frontier tries the longest ones."""
    kwargs: dict[str, Any] = {}


class OptimizerConfig(Strict):
    type: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's; for SGD the first is the momentum."""
    eps: float = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Applied to tensors of two or more dimensions only."""
    max_gradient_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The norm to which the synced gradient of a whole step is clipped; null: never."""


class Schedule(Strict):
    type: Literal["warmup_stable_decay", "cosine", "constant"] = "warmup_stable_decay"
    """After warm-up: constant with a linear anneal at the end; a half cosine to zero; or constant."""
    decay: Fraction = 0.2
    """Share of the sample budget that warmup_stable_decay anneals over."""


class TrialConfig(Strict):
    """One training run. All sizes in samples (sequences) unless the name says otherwise."""

    model: ModelConfig
    loss: str | None = None
    """`package.module:callable`, called as loss(module, batch) -> (loss_sum, num_targets); null: the module returns that itself."""
    data: DataConfig
    micro_batch_size: PositiveInt
    """Samples per forward/backward on one rank."""
    gradient_accumulation_steps: PositiveInt = 1
    world_size: PositiveInt = 1
    parallel: Parallel = "ddp"
    """How ranks hold the model: `ddp`, each the whole of it; `fsdp` (FSDP2), each a shard, which needs several ranks."""
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = True
    dynamic_micro_batch: bool = False
    """Compile once for every micro-batch size (a search over sizes), not for this one alone."""
    precision: Precision = "float32"
    optimizer: OptimizerConfig = OptimizerConfig()
    learning_rate: Annotated[float, Field(gt=0)]
    warmup_samples: Annotated[int, Field(ge=0)] = 0
    schedule: Schedule = Schedule()
    sample_budget: PositiveInt
    rungs: tuple[PositiveInt, ...] = ()
    """Sample counts at which the run evaluates, saves a checkpoint and waits for an answer; the budget is always the last."""
    evaluations: tuple[PositiveInt, ...] = ()
    """Further sample counts at which the run evaluates and saves a checkpoint, without waiting."""
    evaluation_samples: Annotated[int, Field(ge=0)] = 256
    """Validation samples per evaluation; 0: never evaluate."""
    ema_half_life_samples: PositiveInt | None = None
    """Samples after which a moving average of the weights has forgotten half; null: none. With it, the average is evaluated."""
    sync_batch_norm: bool = False
    """Turn BatchNorm into SyncBatchNorm: statistics of a micro-step over all ranks. Needs GPUs; micro-steps stay apart."""
    statistics: bool = True
    """Of gradients and updates: coherence, noise scale, update ratio and the like; false: loss, norm, speed and memory only."""
    longest_samples: bool = False
    """Every step and evaluation from the longest samples alone: what is to fit must fit with them."""
    seed: int = 0
    keep_checkpoints: PositiveInt = 1
    memory_limit_bytes: PositiveInt | None = None
    """Per rank. On a CPU host: above the warm idle process, and enforced; on CUDA: of the device. Null: no limit of ours."""
    reference_weights: str | None = None
    """File of an equal run's initial and final weights; the run reports `rho`, its distance to them."""
    save_weights: bool = False
    """Leave initial and final weights behind, for another run's `reference_weights`."""

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    @model_validator(mode="after")
    def _shards_need_ranks(self) -> TrialConfig:
        check_shards(self.parallel, self.world_size)
        return self

    @model_validator(mode="after")
    def _budget_holds_a_step(self) -> TrialConfig:
        if self.sample_budget < self.effective_batch_size:
            raise ValueError(
                f"sample_budget ({self.sample_budget}) is smaller than one effective batch "
                f"({self.effective_batch_size}); raise sample_budget or lower the batch"
            )
        return self


def check_shards(parallel: Parallel, world_size: int) -> None:
    """Raise ValueError where there are no ranks to shard over."""
    if parallel == "fsdp" and world_size == 1:
        raise ValueError("parallel: fsdp shards the model over ranks, and world_size is 1; raise it, or use ddp")


def derive_accumulation(effective_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """gradient_accumulation_steps such that micro_batch_size x accumulation x world_size is the effective batch.

    Raises ValueError, naming both numbers, where it does not divide: nothing is rounded.
    """
    per_accumulation_step = micro_batch_size * world_size
    if effective_batch_size % per_accumulation_step:
        raise ValueError(
            f"effective_batch_size ({effective_batch_size}) is not a multiple of micro_batch_size x world_size "
            f"({micro_batch_size} x {world_size} = {per_accumulation_step}); choose a multiple of {per_accumulation_step}"
        )
    return effective_batch_size // per_accumulation_step


def resolve(path: str) -> Any:
    """The object that `package.module:attribute` names. Raises ValueError that says which half does not exist."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"'{path}' is not an import path; write it as package.module:callable")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"'{path}' does not resolve: no module named '{error.name}'; "
            "run from the directory that holds it, or install the package"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ValueError(f"'{path}' does not resolve: '{module_name}' has no '{attribute}'; check its spelling")
        found = getattr(found, name)
    return found


def call_target(field: str, target: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """target(**kwargs), with a ValueError in the user's words where the names do not fit its signature."""
    try:
        inspect.signature(target).bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(inspect.signature(target).parameters)
        raise ValueError(f"{field}.kwargs do not fit: {error}; it takes: {takes}") from error
    return target(**kwargs)
