"""The recommendation, which is what to type into a trainer: with its reason, its margin and what was ruled out."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, TypeAdapter, ValidationError

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.output.answer import Answer, answer_of
from batchscout.orchestrator.output.deciding import to_decide
from batchscout.orchestrator.output.known import known_of, undecided_between
from batchscout.orchestrator.output.scope import Scope, scope_of
from batchscout.orchestrator.output.verdict import micro_batch_tokens, verdict
from batchscout.orchestrator.stages import candidate_runs, change_of, recommended_run
from batchscout.orchestrator.stages.estimates.ranking import standings
from batchscout.orchestrator.stages.figures import split_text
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.horizons import HorizonsFindings, as_recommended, nearest_run
from batchscout.orchestrator.stages.train import TimeGain
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.units import bytes_text, counted
from batchscout.trainers.config import (
    TEXT_SEQ_LEN,
    ActivationCheckpointing,
    Compile,
    CrossEntropy,
    DataConfig,
    OptimizerConfig,
    Parallel,
    Phase,
    Precision,
    Schedule,
    Split,
    TrialConfig,
)
from batchscout.trainers.files import own_file, written_whole
from batchscout.trainers.knobs import with_settings
from batchscout.trainers.sources.settings import OwnRun
from batchscout.trainers.user_code import SCRIPT

BatchNorm = Literal["micro-batch", "all ranks"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured of the recommended configuration: for a longer real run, of the study's own run that is most like it. Of several
    seeds a figure is the mean, of memory the most, and of the gradient noise the first one's. One that was not measured is None, and not in
    the file."""

    trial: str
    """Its first seed."""
    val_loss: float | None = None
    train_loss: float | None = None
    """Over samples that it was trained on, at its end and without dropout."""
    generalisation_gap: float | None = None
    """val_loss less train_loss."""
    perplexity: float | None = None
    tokens_per_second: float | None = None
    micro_batches_per_step: float | None = None
    """Over all ranks, as a mean over the run. This and the two below are None unless micro-batches are cut by tokens."""
    tokens_per_step: float | None = None
    """Of the samples themselves, over all ranks: the effective batch in tokens."""
    padding_share: float | None = None
    """The share of padding in the tokens of its micro-batches."""
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    train_seconds: float | None = None
    noise_scale: float | None = None
    noise_scale_low: float | None = None
    noise_scale_high: float | None = None
    coherence: float | None = None
    coherence_floor: float | None = None
    noise_measured_at_samples: float | None = None
    """The samples seen when the figures above were measured, at weights that stood still; None if they are of the run's last steps,
    in which the weights moved."""
    mfu: float | None = None
    memory_limit_bytes: int | None = None
    memory_margin_bytes: int | None = None
    memory: str | None = None
    """Peak, limit and margin in words. This and the two fields above are None if no limit is known."""
    stages: dict[str, str]
    """What every stage concluded."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Alternative:
    """Another configuration that finished, with all of its seeds: figures are their means."""

    trial: str
    """Its first seed."""
    role: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    val_loss: float | None
    tokens_per_second: float | None
    generalisation_gap: float | None = None
    """None, and not in the file, if it was not measured."""


@dataclass(frozen=True)
class RuledOut:
    """A trial that did not finish."""

    trial: str
    state: TrialState
    reason: str
    """Begins with the code of its cause."""


@dataclass(frozen=True)
class Script:
    """The script that was studied, and how it is told another recipe."""

    script: str
    args: tuple[str, ...]
    flags: dict[str, str]
    """Its own, by the key that they set: learning_rate, micro_batch_size, gradient_accumulation_steps, steps; samples_per_step, the batch of
    one rank, or micro_batches, those of the run, where a flag counts these."""
    factors: dict[str, float] = field(default_factory=dict)
    """By the flag, what it is of the learning rate of the first parameter group, or of the run's steps (or micro-batches, where a flag counts
    these), where it counts those of a part of the schedule."""


@dataclass(frozen=True)
class Sample:
    """What a sample is to all that counts samples, where it is not one of the data as they are."""

    tokens: int
    kind: Literal["pack", "text", "cut", "leave_out"]
    """pack: a row into which samples of the data were packed. text: a row of running text. cut: one of the data, cut off after so many tokens.
    leave_out: one of the data, of which those with more tokens were left out."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Recommendation:
    """What to train with, and why. The fields are the keys of recommendation.json, in its order."""

    micro_batch_size: int
    """Samples per forward and backward pass of one rank; where `micro_batch_tokens` is given, the longest ones that it holds at least."""
    micro_batch_tokens: int | None = None
    """The most tokens of a micro-batch on one rank, padding included: the samples of each step are cut by it, and the accumulation is the most
    micro-batches that a step takes. None, and not in the file, where micro-batches have equally many samples."""
    sample: Sample | None = None
    """None, and not in the file, where samples are those of the data as they are."""
    gradient_accumulation_steps: int
    world_size: int
    effective_batch_size: int
    activation_checkpointing: ActivationCheckpointing
    compile: Compile
    """true: the blocks one by one. whole: the model as one graph. false: nothing."""
    precision: Precision
    allow_tf32: bool | None = None
    """None, and not in the file, unless float32 was computed in TF32."""
    cross_entropy: CrossEntropy | None = None
    """None, and not in the file, if it is computed as usual."""
    parallel: Parallel | None = None
    """fsdp: each rank holds a shard of the model. None, and not in the file, if each holds the whole."""
    batch_norm: BatchNorm | None = None
    """Whose statistics BatchNorm layers take: a micro-batch's, or those over all ranks. None, and not in the file, if the model has
    no such layers."""
    ema_half_life_samples: int | None = None
    """The half-life of the moving average of the weights with which losses were measured. None, and not in the file, without one."""
    peft: dict[str, Any] | None = None
    """The arguments of peft.LoraConfig with which the model got its adapters. None, and not in the file, without any."""
    memory_knobs: tuple[str, ...] | None = None
    """None, and not in the file, if none is in use. What a knob sets (optimizer_8bit, fsdp) shows in `optimizer` and `parallel`, too."""
    learning_rate: float
    warmup_samples: int
    sample_budget: int
    optimizer: OptimizerConfig
    schedule: Schedule
    ramp: tuple[Phase, ...] | None = None
    """The phases in which the batch grows: the accumulation and learning rate above are those up to the first of them. None,
    and not in the file, if the batch stays."""
    model_changes: dict[str, float] | None = None
    """Arguments of the model, `dropout` or `label_smoothing`, that are to have another value than in the study file. None, and
    not in the file, if none is."""
    seed: int
    verdict: str
    """For people: the configuration, and what it saves against the user's own setting."""
    answer: Answer
    """The same in five lines."""
    decided: bool
    """True if another setting than the user's own is recommended that wastes less than `useful_gain` on average. False where the user's
    own stays, where the best is left open, and where too little was compared."""
    time: TimeGain | None = None
    """The share of the training time of the user's own setting in which this one comes to the same loss, with its 90 % interval. None,
    and not in the file, where it is that one or that one did not complete."""
    regret_time: float | None = None
    """The share of the training time that this setting wastes on average, against the best one. None, and not in the file, where a
    single run was made."""
    p_best: float | None = None
    """The probability that the batch is the best, each at its best rate: those of all batches add up to 1; None where only one was tried."""
    scope: Scope | None = None
    """What the recommendation was measured on."""
    undecided_between: tuple[int, ...] = ()
    """The effective batches between which the study could not decide."""
    would_decide: str | None = None
    """What would decide it, for people; None where it is decided, or where nothing of that is known."""
    real_run: HorizonsFindings | None = None
    """What holds for the real run, where the study was asked for it."""
    script: Script | None = None
    """The script that was studied (`from: {script: ...}`). None, and not in the file, in any other study."""
    own_run: OwnRun | None = None
    """The run that the object under `from` is set to: exports take as long, and have the keys of its own Trainer. None, and not in the file, in any
    other study."""
    study_sample_budget: int | None = None
    """`sample_budget` of the study file, which the user's own setting trains on in the study. None, and not in the file, where `own_run` is."""
    complete: bool
    """False while a stage of the study has yet to conclude."""
    evidence: Evidence
    alternatives: tuple[Alternative, ...]
    """The best first: by val_loss or, with `objective: target`, by the seconds to the target."""
    ruled_out: tuple[RuledOut, ...]

    def __repr__(self) -> str:
        split = Split(self.micro_batch_size, self.gradient_accumulation_steps, self.world_size)
        batch = f"effective batch {self.effective_batch_size} ({split_text(split)})"
        return f"<recommendation: {batch}, learning rate {self.learning_rate:.3g}, {self.answer.badge}>"

    def to_json(self) -> dict[str, JsonValue]:
        """Return the tree that recommendation.json holds."""
        tree = _adapter().dump_python(self, mode="json")
        tree["evidence"] = {key: value for key, value in tree["evidence"].items() if value is not None}
        for alternative in tree["alternatives"]:
            if alternative["generalisation_gap"] is None:
                del alternative["generalisation_gap"]
        return {key: value for key, value in tree.items() if value is not None}

    @classmethod
    def from_json(cls, text: str | bytes) -> Recommendation:
        """Return what recommendation.json says. Raises ValueError, with the remedy, where that is no recommendation."""
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                f"this is not a recommendation.json as batchscout writes it ({where}: {first['msg']}); "
                "write it again: batchscout report RUN_DIR"
            ) from error


@cache
def _adapter() -> TypeAdapter[Recommendation]:
    return TypeAdapter(Recommendation)


def recommend(config: StudyConfig, study: Study) -> Recommendation | None:
    """Return the recommendation as far as the study has come; None while no full run has won."""
    winner = recommended_run(config, study)
    if winner is None:
        return None
    trial, known = as_recommended(config, study, winner), known_of(config, study, winner)
    nearest = nearest_run(study, winner, trial)
    answer, deciding = answer_of(config, study, winner, trial), to_decide(config, study, winner)
    change = change_of(config, study, winner)
    return Recommendation(
        micro_batch_size=trial.micro_batch_size,
        micro_batch_tokens=micro_batch_tokens(study, trial),
        sample=_sample(trial.data),
        gradient_accumulation_steps=trial.gradient_accumulation_steps,
        world_size=trial.world_size,
        effective_batch_size=trial.effective_batch_size,
        activation_checkpointing=trial.activation_checkpointing,
        compile=trial.compile,
        precision=trial.precision,
        allow_tf32=True if trial.allow_tf32 and trial.precision == "float32" else None,
        cross_entropy=None if (kind := mode_of(trial).cross_entropy) == "whole" else kind,
        parallel="fsdp" if with_settings(trial).parallel == "fsdp" else None,
        batch_norm=_batch_norm(study, trial),
        ema_half_life_samples=trial.ema_half_life_samples,
        peft=trial.model.peft,
        memory_knobs=trial.memory_knobs or None,
        learning_rate=trial.learning_rate,
        warmup_samples=trial.warmup_samples,
        sample_budget=trial.sample_budget,
        optimizer=with_settings(trial).optimizer,
        schedule=trial.schedule,
        ramp=trial.ramp or None,
        model_changes=dict(change.model) or None if change else None,
        seed=trial.seed,
        verdict=verdict(config, study, winner, trial),
        answer=answer,
        decided=answer.is_decided,
        time=known.time if known else None,
        regret_time=known.regret_time if known else None,
        p_best=known.p_best[trial.effective_batch_size] if known and len(known.p_best) > 1 else None,
        scope=scope_of(config, study, winner),
        undecided_between=undecided_between(config, known),
        would_decide=deciding.words if deciding else None,
        real_run=found(study, HorizonsFindings),
        script=_script(config),
        own_run=study.facts.own_run,
        study_sample_budget=None if study.facts.own_run is None else config.sample_budget,
        complete=all(stage.type in study.conclusions for stage in config.stages),
        evidence=_evidence(study, nearest),
        alternatives=_alternatives(config, study, nearest),
        ruled_out=tuple(
            RuledOut(one.id, one.state, one.explanation) for one in study.trials.values() if one.state.ruled_out
        ),
    )


def _sample(data: DataConfig) -> Sample | None:
    seq_len, longer = data.kwargs.get("seq_len"), data.kwargs.get("longer")
    if data.pack is not None:
        return Sample(data.pack, "pack")
    if data.target in ("python_stdlib", "text", "hf"):
        return Sample(seq_len or TEXT_SEQ_LEN, "text")
    return Sample(seq_len, longer) if data.target == "chat" and seq_len and longer else None


def _script(config: StudyConfig) -> Script | None:
    if config.model.target != SCRIPT:
        return None
    told = config.model.kwargs
    return Script(told["script"], tuple(told.get("args", ())), told.get("flags", {}), told.get("factors", {}))


def _batch_norm(study: Study, trial: TrialConfig) -> BatchNorm | None:
    if not study.facts.num_batch_norms:
        return None
    return "all ranks" if trial.sync_batch_norm and trial.world_size > 1 else "micro-batch"


def _evidence(study: Study, winner: Trial) -> Evidence:
    frontier = found(study, FrontierFindings)
    seeds = [trial for trial in study.seeds_of(winner) if trial.state is TrialState.COMPLETE]
    limit, peaks = frontier.limit_bytes if frontier else None, _known(seeds, "peak_memory_bytes")
    peak = int(max(peaks)) if peaks else None
    margin = memory = None
    if limit and peak is not None:
        margin = limit - peak
        memory = f"{bytes_text(peak)} of {bytes_text(limit)}, {bytes_text(margin)} left"
    return Evidence(
        trial=winner.id,
        val_loss=_mean(seeds, "val_loss"),
        train_loss=_mean(seeds, "train_loss"),
        generalisation_gap=_mean(seeds, "generalisation_gap"),
        perplexity=_mean(seeds, "perplexity"),
        tokens_per_second=_mean(seeds, "tokens_per_second"),
        micro_batches_per_step=_mean(seeds, "micro_batches_per_step"),
        tokens_per_step=_mean(seeds, "tokens_per_step"),
        padding_share=_mean(seeds, "padding_share"),
        step_seconds=_mean(seeds, "step_seconds"),
        peak_memory_bytes=peak,
        train_seconds=_mean(seeds, "train_seconds"),
        noise_scale=_noise(winner, "noise_scale"),
        noise_scale_low=_noise(winner, "noise_scale_low"),
        noise_scale_high=_noise(winner, "noise_scale_high"),
        coherence=_noise(winner, "coherence"),
        coherence_floor=_noise(winner, "coherence_floor"),
        noise_measured_at_samples=winner.metric(_AT),
        mfu=_mfu(seeds),
        memory_limit_bytes=limit if margin is not None else None,
        memory_margin_bytes=margin,
        memory=memory,
        stages={stage: conclusion.reason for stage, conclusion in study.conclusions.items()},
        notes=(
            *_model_notes(study),
            *_peak_notes(study, seeds),
            *(note for one in study.conclusions.values() for note in one.notes),
        ),
    )


def _known(seeds: Sequence[Trial], name: str) -> list[float]:
    return [figure for trial in seeds if (figure := trial.metric(name)) is not None]


def _mean(seeds: Sequence[Trial], name: str) -> float | None:
    known = _known(seeds, name)
    return statistics.fmean(known) if known else None


_AT = "snapshot_samples_seen"


def _noise(winner: Trial, key: str) -> float | None:
    """Return a figure of the gradient noise: of the last snapshot at weights that stood still, or else of the moving run."""
    return winner.metric(key if winner.metric(_AT) is None else f"snapshot_{key}")


def _model_notes(study: Study) -> list[str]:
    layers = study.facts.num_batch_norms
    if not layers:
        return []
    return [
        f"the model has {counted(layers, 'BatchNorm layer')}: their statistics are a micro-batch's, so accumulation changes them"
    ]


def _peak_notes(study: Study, seeds: Sequence[Trial]) -> list[str]:
    """Return against what the winner's utilisation is told."""
    precision = seeds[0].config.precision
    peak = (study.facts.device_peaks or {}).get(precision)
    if peak is None or all(_mean(seeds, one) is None for one in ("mfu", "model_flops_per_sample")):
        return []
    source = (
        "that matrix products reached on this device" if peak.source == "measured" else "of the device's data sheet"
    )
    of_peak = f"the {peak.flops_per_second:.3g} FLOP/s in {precision} {source}"
    if _mfu(seeds) is None:
        return [
            f"no MFU is told: training takes more than {of_peak}, so these are not its peak (was the machine busy?)"
        ]
    return [f"MFU is relative to {of_peak}"]


def _mfu(seeds: Sequence[Trial]) -> float | None:
    """Return what it used of the device; None where that is not known, or is more than all."""
    mfu = _mean(seeds, "mfu")
    return mfu if mfu is not None and mfu <= 1 else None


def _alternatives(config: StudyConfig, study: Study, winner: Trial) -> tuple[Alternative, ...]:
    """Return the other full runs that finished, the best first."""
    return tuple(
        Alternative(
            trial=one.first.id,
            role=one.first.role,
            micro_batch_size=one.config.micro_batch_size,
            gradient_accumulation_steps=one.config.gradient_accumulation_steps,
            learning_rate=one.config.learning_rate,
            val_loss=one.val_loss,
            tokens_per_second=_mean(one.trials, "tokens_per_second"),
            generalisation_gap=_mean(one.trials, "generalisation_gap"),
        )
        for one in standings(candidate_runs(config, study), config.target_loss)
        if winner not in one.trials and len(one.trials) == len(study.seeds_of(one.first))
    )


def write_recommendation(path: Path, recommendation: Recommendation | None) -> None:
    """Write recommendation.json, whole or not at all; take away that of an answer which the study has no more, where there is nothing to recommend."""
    if recommendation is None:
        with own_file(path):
            path.unlink(missing_ok=True)
        return
    with written_whole(path) as file:
        file.write((json.dumps(recommendation.to_json(), indent=2) + "\n").encode())
