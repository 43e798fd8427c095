"""What a study file says. Every key is documented under its field; the file's keys are these fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ByteSize, Field, PositiveInt, ValidationError, model_validator

from trainers.config import (
    ActivationCheckpointing,
    CrossEntropy,
    DataConfig,
    Fraction,
    ModelConfig,
    OptimizerConfig,
    Parallel,
    Precision,
    Schedule,
    Strict,
    TrialConfig,
    check_shards,
    derive_accumulation,
)

Positive = Annotated[float, Field(gt=0)]
AtLeastOne = Field(min_length=1)


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


def uses_compile(study: StudyConfig) -> bool:
    """Whether any trial of the study compiles."""
    asked = [stage.compile for stage in study.stages if isinstance(stage, (Frontier, Grid))]
    return any(any(choice) for choice in asked) if asked else study.compile is not False


def base_trial(study: StudyConfig, memory_limit_bytes: int | None) -> TrialConfig:
    """What all trials of the study have in common, with the batch that `batch` gives."""
    micro_batch_size, accumulation = given_batch(study.batch, study.world_size)
    effective = micro_batch_size * accumulation * study.world_size
    shared = StudyOptimizer.model_fields.keys() - OptimizerConfig.model_fields.keys()
    return TrialConfig(
        model=study.model,
        loss=study.loss,
        data=study.data,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        world_size=study.world_size,
        parallel=study.parallel,
        ema_half_life_samples=study.ema_half_life_samples,
        sync_batch_norm=study.sync_batch_norm,
        statistics=study.statistics,
        activation_checkpointing=study.activation_checkpointing,
        compile=uses_compile(study) if study.compile is None else study.compile,
        precision=study.precision,
        optimizer=OptimizerConfig(**study.optimizer.model_dump(exclude=set(shared))),
        learning_rate=scaled_learning_rate(study.optimizer, effective),
        warmup_samples=warmup_samples(study.optimizer, effective, study.sample_budget),
        schedule=study.schedule,
        sample_budget=study.sample_budget,
        evaluations=evenly_spaced(study.sample_budget, study.evaluations),
        evaluation_samples=study.evaluation_samples,
        seed=study.seeds[0],
        keep_checkpoints=study.keep_checkpoints,
        memory_limit_bytes=memory_limit_bytes,
    )


def scaled_learning_rate(optimizer: StudyOptimizer, effective_batch_size: int) -> float:
    """The rule's learning rate for an effective batch."""
    ratio = effective_batch_size / optimizer.reference_batch_size
    return optimizer.lr * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[optimizer.lr_scaling]


def warmup_samples(optimizer: StudyOptimizer, effective_batch_size: int, sample_budget: int) -> int:
    """A heuristic where `auto`: 1 % of the budget, 2 % from 8 times the reference batch, 5 % from 16 times."""
    if optimizer.warmup != "auto":
        return optimizer.warmup
    ratio = effective_batch_size / optimizer.reference_batch_size
    share = 0.05 if ratio >= 16 else 0.02 if ratio >= 8 else 0.01
    return round(share * sample_budget)


def evenly_spaced(total: int, count: int) -> tuple[int, ...]:
    """`count` sample numbers up to `total`, which is the last."""
    return tuple(sorted({max(1, round(total * (i + 1) / count)) for i in range(count)}))


def read_yaml(path: Path) -> Any:
    """What a YAML file says. Raises ValueError, with the line, where it is not YAML."""
    try:
        return yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}; mend that line") from error


def load_study(path: Path, overrides: list[str]) -> StudyConfig:
    """The study that a file describes, with `a.b=c` overrides; relative data paths are resolved here and now.

    Raises ValueError in the user's words: what is wrong, where, and what would be right.
    """
    if not path.is_file():
        raise ValueError(f"there is no study file {path}; check the path, or start from one in configs/")
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds no keys; a study file needs at least model and data")
    tree.setdefault("name", path.stem)
    if any(override.startswith("stages.") for override in overrides):
        tree.setdefault("stages", [{"type": stage.type} for stage in StudyConfig.model_fields["stages"].default])
    for override in overrides:
        apply_override(tree, override)
    _make_absolute(tree)
    return parse_study(tree, str(path))


def _make_absolute(tree: dict[str, Any]) -> None:
    """Paths that exist from here on: a worker has another directory, and so has the next command."""
    for part, keys in (("data", ("train", "val", "path", "tokenizer")), ("model", ("name",))):
        section = tree.get(part)
        if (
            not isinstance(section, dict)
            or not isinstance(section.get("kwargs"), dict)
            or ":" in str(section.get("target"))
        ):
            continue
        kwargs = section["kwargs"]
        for key in keys:
            if key in kwargs:
                kwargs[key] = _absolute(kwargs[key], always=section["target"] == "text" and key in ("train", "val"))


def _absolute(value: Any, *, always: bool) -> Any:
    """A path, or each of a list; what might be a name in a registry instead only where such a file exists."""
    if isinstance(value, list):
        return [_absolute(item, always=always) for item in value]
    if isinstance(value, str) and (always or Path(value).exists()):
        return str(Path(value).expanduser().absolute())
    return value


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=c`; c is read as YAML, list members are addressed by their number (stages.0.smallest=4)."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set '{override}' is not of the form key=value; write --set optimizer.lr=3e-4")
    *parents, last = key.split(".")
    node: Any = tree
    for name in parents:
        node = _child(node, name, override)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(
            f"--set '{override}': what follows the = is not valid YAML; quote it, or close its brackets"
        ) from error
    if isinstance(node, list):
        node[_list_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ValueError(f"--set '{override}': '{key}' lies inside a single value; set that value whole")


def _child(node: Any, name: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_list_index(node, name, override)]
    if not isinstance(node, dict):
        raise ValueError(f"--set '{override}': '{name}' lies inside a single value; set that value whole")
    if node.get(name) is None:
        node[name] = {}
    return node[name]


def _list_index(items: list[Any], name: str, override: str) -> int:
    """A list member by number, or a stage by its type."""
    by_type = [i for i, item in enumerate(items) if isinstance(item, dict) and item.get("type") == name]
    if by_type:
        return by_type[0]
    if not name.isdigit() or int(name) >= len(items):
        raise ValueError(
            f"--set '{override}': the list has {len(items)} members, numbered from 0; '{name}' is none of them"
        )
    return int(name)


def parse_study(tree: dict[str, Any], source: str) -> StudyConfig:
    """A checked StudyConfig. Raises ValueError with one line per fault."""
    try:
        return StudyConfig.model_validate(_numbers(tree))
    except ValidationError as error:
        faults = "\n".join(f"  {_fault(item)}" for item in _own_faults(error.errors()))
        raise ValueError(f"{source} does not describe a study:\n{faults}") from error


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads `6e-4` as text for want of a dot; whoever writes it means the number."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and value[:1] in "-+0123456789." and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _own_faults(items: Sequence[Any]) -> list[Any]:
    """Without lists that are called too short only because a member of theirs is at fault."""

    def a_member_is_at_fault(place: tuple[Any, ...]) -> bool:
        return any(item["loc"] != place and item["loc"][: len(place)] == place for item in items)

    return [item for item in items if item["type"] != "too_short" or not a_member_is_at_fault(item["loc"])]


def _fault(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "the file"
    if item["type"] == "extra_forbidden":
        known = ", ".join(_known_keys(item["loc"]))
        return f"{where}: no such key; the keys here are: {known}" if known else f"{where}: no such key; remove it"
    if item["type"] == "missing":
        return f"{where}: is missing; add it"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {message}" if item["loc"] else message
    return f"{where}: {message} (it is {item['input']!r}); change it"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    """The keys that are possible where an unknown one was found."""
    owner: Any = StudyConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        field = owner.model_fields.get(part) if owner else None
        owner = _model_class(field.annotation) if field else _STAGES.get(str(part), owner)
    return list(owner.model_fields) if owner else []


def _model_class(annotation: Any) -> Any:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Strict) else None


_STAGES: dict[str, Any] = {
    "frontier": Frontier,
    "throughput": Throughput,
    "equivalence": Equivalence,
    "train": Train,
    "learning_rate": LearningRate,
    "grid": Grid,
    "asha": AshaPruner,
    "none": NoPruner,
}
