"""What a study's keys mean for one trial: the configuration that all trials share, the learning-rate rule, warm-up,
rungs."""

from __future__ import annotations

from collections.abc import Mapping

from batchscout.orchestrator.config.keys import Batch, StudyConfig, StudyOptimizer, given_batch
from batchscout.orchestrator.config.regimes import OWN_WEIGHTS
from batchscout.orchestrator.config.stages import Frontier, compiled_in
from batchscout.trainers.config import Compile, DevicePeak, OptimizerConfig, Precision, TrialConfig
from batchscout.trainers.knobs import check_knobs, excluding

WARMUP_SHARE, WARMUP_STEPS, MOST_WARMUP = 0.01, 30, 0.2
"""The shortest warm-up as a share of the run, the same in optimizer steps, and the longest as a share of the run."""
SHORT_WARMUP_SHARE, SHORT_WARMUP_STEPS = 0.06, 10
"""The same of a short one. The share is that with which RoBERTa was finetuned (Liu et al. 2019, arXiv 1907.11692)."""
LARGEST_BETA2 = 0.9999
LEAST_DECAY, MOST_DECAY = 0.01, 10.0
"""By what the weight decay is multiplied where it follows the batch."""


def uses_compile(config: StudyConfig) -> bool:
    """True if any trial of the study compiles."""
    return any(compiled_in(config.stages) or [config.compile is not False])


def default_compile(config: StudyConfig) -> Compile:
    """Return what is compiled where neither the study file nor a stage says it."""
    compiled: list[Compile] = [one for one in compiled_in(config.stages) or [True] if one]
    return compiled[0] if compiled else False


def precisions(config: StudyConfig) -> set[Precision]:
    """Return every precision in which a trial of the study may run: float32 is what lower ones are held against."""
    always: set[Precision] = {"float32", config.precision}
    return always.union(*(stage.precision for stage in config.stages if isinstance(stage, Frontier)))


def base_trial(
    config: StudyConfig,
    memory_limit_bytes: int | None,
    device_peaks: Mapping[Precision, DevicePeak] | None = None,
    long_samples: tuple[int, ...] | None = None,
    evaluated_together: int | None = None,
) -> TrialConfig:
    """Return what all trials of the study have in common, with the batch that the key `batch` gives."""
    split = given_batch(config.batch, config.world_size)
    learning_rate = scaled_learning_rate(config.optimizer, split.effective_batch_size)
    return TrialConfig(
        model=config.model,
        loss=config.loss,
        initial_weights=None if config.initial_weights == OWN_WEIGHTS else config.initial_weights,
        data=config.data,
        micro_batch_size=split.micro_batch_size,
        micro_batch=config.micro_batch,
        gradient_accumulation_steps=split.gradient_accumulation_steps,
        world_size=split.world_size,
        parallel=config.parallel,
        ema_half_life_samples=config.ema_half_life_samples,
        sync_batch_norm=config.sync_batch_norm,
        statistics=config.statistics,
        activation_checkpointing=config.activation_checkpointing,
        memory_knobs=config.memory_knobs,
        compile=default_compile(config) if config.compile is None else config.compile,
        precision=config.precision,
        allow_tf32=config.allow_tf32,
        deterministic=config.deterministic,
        optimizer=optimizer_at(config.optimizer, split.effective_batch_size, learning_rate),
        learning_rate=learning_rate,
        warmup_samples=warmup_samples(config, split.effective_batch_size, config.sample_budget),
        schedule=config.schedule,
        sample_budget=config.sample_budget,
        evaluations=evenly_spaced(config.sample_budget, config.evaluations),
        evaluation_samples=config.evaluation_samples,
        evaluated_together=evaluated_together,
        seed=config.seeds[0],
        keep_checkpoints=config.keep_checkpoints,
        memory_limit_bytes=memory_limit_bytes,
        device_peaks=dict(device_peaks or {}),
        long_samples=long_samples or (),
    )


def check_knobs_of(config: StudyConfig) -> None:
    """Raise ValueError where a memory knob of the study file does not go with its other keys: it names both, and the way out."""
    trial = base_trial(config.model_copy(update={"memory_knobs": ()}), None)
    check_knobs(trial.model_copy(update={"memory_knobs": config.memory_knobs}))
    frontier = config.keys_of(Frontier)
    for name in (frontier and frontier.memory_knobs) or ():
        together = tuple(sorted({*config.memory_knobs, name}))
        if pair := excluding(together):
            other = pair[0] if pair[1] == name else pair[1]
            raise ValueError(
                f"memory_knobs has {other} for every trial, and the frontier's memory_knobs has {name}; they exclude each other: "
                "leave one of them out"
            )
        probed = {"memory_knobs": together, "gradient_accumulation_steps": 1}
        if frontier and frontier.precision:
            probed["precision"] = "bfloat16" if "bfloat16" in frontier.precision else frontier.precision[0]
        check_knobs(trial.model_copy(update=probed))


def baseline_batch(config: StudyConfig) -> int:
    """Return the effective batch that the others are held against: that of the key `batch`, or the optimizer's
    reference batch where the study file leaves `batch` as it is.

    It need not be a multiple of world_size.
    """
    if config.batch == Batch():
        return config.optimizer.reference_batch_size
    return given_batch(config.batch, config.world_size).effective_batch_size


def scaled_learning_rate(optimizer: StudyOptimizer, effective_batch_size: int) -> float:
    """Return the learning rate that the scaling rule gives for an effective batch."""
    ratio = effective_batch_size / optimizer.reference_batch_size
    rule, own = optimizer.lr_scaling, {"sgd": 1.0, "muon": 0.75}.get(optimizer.type, 0.5)
    named = {"auto": own, "none": 0.0, "sqrt": 0.5, "linear": 1.0}
    exponent = named[rule] if isinstance(rule, str) else rule
    return optimizer.lr * ratio**exponent


def optimizer_at(optimizer: StudyOptimizer, effective_batch_size: int, learning_rate: float) -> OptimizerConfig:
    """Return the optimizer of a run: its betas and weight decay follow batch and rate where the study file says so."""
    own = {name: getattr(optimizer, name) for name in OptimizerConfig.model_fields}
    ratio, (beta1, beta2) = effective_batch_size / optimizer.reference_batch_size, optimizer.betas
    if optimizer.beta2_scaling == "samples" and optimizer.has_betas:
        own["betas"] = beta1, min(max(beta2**ratio, min(beta1, beta2)), max(LARGEST_BETA2, beta2))
    if optimizer.weight_decay_scaling == "samples" and optimizer.type != "own":
        factor = ratio * optimizer.lr / learning_rate
        own["weight_decay"] = optimizer.weight_decay * min(max(factor, LEAST_DECAY), MOST_DECAY)
    return OptimizerConfig(**own)


def warmup_samples(config: StudyConfig, effective_batch_size: int, sample_budget: int) -> int:
    """Return the samples of warm-up of a run. `auto` gives Adam's moments some steps to settle in, whatever the batch. A run of fewer
    samples than the study's has the same share of those that were given."""
    warmup = config.optimizer.warmup
    if isinstance(warmup, int):
        return round(warmup * min(1.0, sample_budget / config.sample_budget))
    is_short = warmup == "short"
    share, steps = (SHORT_WARMUP_SHARE, SHORT_WARMUP_STEPS) if is_short else (WARMUP_SHARE, WARMUP_STEPS)
    wanted = max(share * sample_budget, steps * effective_batch_size)
    return round(min(wanted, MOST_WARMUP * sample_budget))


def rises_until(config: StudyConfig) -> float:
    """Return the share of a run until which its learning rate rises: that of a warm-up of so many samples, or of the highest factor of a table.
    A warm-up that is not given in samples is shorter than every first rung."""
    warmup, factors = config.optimizer.warmup, config.schedule.factors
    warm = warmup / config.sample_budget if isinstance(warmup, int) else 0.0
    return max(warm, factors.index(max(factors)) / (len(factors) - 1)) if factors else warm


def evenly_spaced(total: int, count: int) -> tuple[int, ...]:
    """Return `count` sample numbers at even distances, the last of them `total`; fewer if `total` is less than
    `count`."""
    return tuple(sorted({max(1, round(total * (i + 1) / count)) for i in range(count)}))
