"""The comments above an export: the answer, and what the trainer cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from batchscout.orchestrator.output.exports.counted import batches_of, is_about_one, max_steps, steps_of, warmup_steps
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import OptimizerConfig
from batchscout.trainers.knobs import in_words, knob
from batchscout.trainers.sources.settings import GROUPS


def header_of(r: Recommendation, *, has_own_groups: bool = False) -> list[str]:
    """Return what is told in every export. has_own_groups: whether its target makes the parameter groups of the user's own code."""
    lines = r.answer.lines().items()
    said = [f"{label} {text}" for label, text in lines if not text.startswith("batchscout export ")]  # this is that
    batch = r.effective_batch_size
    counted = f"counted as the batch grows from {batch}" if r.ramp else f"ceil(samples / {batch})"
    return [
        "batchscout",
        *(" ".join(line.split()) for line in said),
        f"effective batch {batch} = micro-batch {r.micro_batch_size} x accumulation "
        f"{r.gradient_accumulation_steps} x ranks {r.world_size}; the micro-batch is per rank"
        + (", and the ranks are those of all nodes together" if r.world_size > 1 else ""),
        *([_SAMPLES[r.sample.kind].format(r.sample.tokens)] if r.sample else []),
        *(
            [
                f"the study cut each step by tokens, at most {r.micro_batch_tokens} a micro-batch with its padding, so that a step had fewer "
                "micro-batches than that; micro-batches of equally many samples train the same, and slower"
            ]
            if r.micro_batch_tokens
            else []
        ),
        f"steps are {counted}: budget {r.sample_budget} -> {max_steps(r)}, warm-up {r.warmup_samples} -> "
        f"{warmup_steps(r)}",
        *(["its float32 is TF32: call torch.set_float32_matmul_precision('high')"] if r.allow_tf32 else []),
        *_groups_note(r.optimizer.param_groups, has_own_groups=has_own_groups),
        *_length_notes(r),
        *_knob_notes(r),
        *(
            f"the chosen run has {name} {value:g} in the model: train with it"
            for name, value in (r.model_changes or {}).items()
        ),
        *_kept_notes(r),
    ]


_SAMPLES = {
    "pack": "a sample, as batch and budget count them, is a row of {} tokens into which samples of the data were packed",
    "text": "a sample is a row of {} tokens of running text",
    "cut": "samples of more than {} tokens were cut off there",
    "leave_out": "samples of more than {} tokens were left out",
}
"""What is told of the kinds of samples that are not those of the data as they are."""


def _groups_note(groups: str | None, *, has_own_groups: bool) -> list[str]:
    """Return in which groups the optimizer's parameters were, where those were not this project's own."""
    if groups is None or (groups == GROUPS and has_own_groups):
        return []
    if groups != GROUPS:
        return [f"the optimizer's parameters are in the groups of {groups}"]
    return [
        "the study's optimizer had the parameter groups that your own code makes, which may have rates of their own; here are others: put yours there"
    ]


def decay_note(r: Recommendation, said: str) -> list[str]:
    """Return that a target decays other parameters than the study did, which had this project's own groups."""
    return [] if r.optimizer.param_groups else [f"{said}; the study decayed those of two or more dimensions"]


def _length_notes(r: Recommendation) -> list[str]:
    """Return that the run, which was carried nowhere, takes another number of samples than the user's own, and that this one has another
    length than the study."""
    own, study = r.own_run and r.own_run.samples, r.study_sample_budget
    if not own or not study or r.real_run is not None:
        return []
    notes = []
    if not is_about_one(r.sample_budget / own):
        notes.append(
            f"your own run takes {own} samples, and this one {r.sample_budget}, in about the same time: settings were compared after equal time"
        )
    if own == study:
        return notes
    told = f"your own run has {own} samples, and with your setting the study's had {study}"
    if own > study:
        warmup = (
            f"; the warm-up, of {r.warmup_samples} samples here, is as long as in the study" if r.warmup_samples else ""
        )
        told += f"{warmup}; real_run: {{samples: {own}}} in the study file carries the answer to its length"
    return [*notes, told]


def _kept_notes(r: Recommendation) -> list[str]:
    """Return what the study's runs had that is the model's or the training loop's, whatever trainer runs it."""
    notes = []
    if r.cross_entropy == "chunked":
        notes.append(
            "the study computed cross-entropy in chunks: do so in the model, or this micro-batch may not fit into memory"
        )
    if r.peft is not None:
        notes.append(
            f"the learning rate is that of LoRA adapters, and the weights that the model had were frozen: peft.LoraConfig({arguments_text(r.peft)})"
        )
    if r.batch_norm is not None:
        over = f"each micro-batch of {r.micro_batch_size}"
        if r.batch_norm == "all ranks":
            over = "a micro-batch of all ranks (torch.nn.SyncBatchNorm.convert_sync_batchnorm)"
        notes.append(f"BatchNorm takes its statistics over {over}: another micro-batch is another training run")
    if r.ema_half_life_samples is not None:
        decay = 0.5 ** (r.effective_batch_size / r.ema_half_life_samples)
        notes.append(
            f"losses were measured with an average of the weights, of a half-life of {r.ema_half_life_samples} samples: keep one with "
            f"torch.optim.swa_utils.AveragedModel and a decay of {decay:.6g} a step{', use_buffers=True' if r.batch_norm else ''}"
        )
    return notes


def arguments_text(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _knob_notes(r: Recommendation) -> list[str]:
    """Return the memory knobs of the run that are no trainer's settings: without them its micro-batch may not fit."""
    others = [name for name in r.memory_knobs or () if knob(name).changes != "settings"]
    if not others:
        return []
    said = f"{in_words(others)} ({', '.join(others)})"
    return [
        f"the chosen run fits with {said}, which is not set below: set it up in your code, see batchscout's docs/memory_knobs.md"
    ]


def has_float32_weights(r: Recommendation) -> bool:
    return "bfloat16_weights" not in (r.memory_knobs or ())


def without_ramp(r: Recommendation, target: str) -> tuple[Recommendation, list[str]]:
    """Return the run whose batch stays, for a target that cannot let it grow, and what is lost by that."""
    if not r.ramp:
        return r, []
    lost = f"the batch is to grow, which cannot be expressed in {target}: here it stays at {r.effective_batch_size}"
    grows = [
        f"from {samples} samples, after step {steps_of(samples, r)}: accumulation "
        f"{phase.gradient_accumulation_steps}, effective batch {batch}, learning rate {phase.learning_rate:.6g}"
        for phase, (samples, batch) in zip(r.ramp, batches_of(r)[1:], strict=True)
    ]
    return replace(r, ramp=None), [lost, *grows]


def optimizer_notes(r: Recommendation, whose: str, *further: str) -> list[str]:
    """Return what the study's optimizer had otherwise than the one that the user makes. whose: that is, in words. further: keys beside those
    that an optimizer is made with."""
    own = (r.own_run.recipe if r.own_run else {}).get("optimizer", {})
    keys = ("type", "target", "betas", "eps", "weight_decay", *further, "kwargs")
    both = {key: (own[key], getattr(r.optimizer, key)) for key in keys if key in own}
    return [
        f"{key} of the optimizer: {after}, where {whose} has {before}"
        for key, (before, after) in both.items()
        if before != (list(after) if isinstance(after, tuple) else after)
    ]


def passes_note(r: Recommendation, target: str) -> list[str]:
    """Return what becomes of the last step of a pass over the data with a trainer that ends one there; the study's went on into the next."""
    largest = batches_of(r)[-1][1]
    return [
        f"{target}: its trainer ends a step with each pass over the data, a smaller one unless a pass has a multiple of {largest} samples; over "
        "several passes max_steps is then fewer samples than the study's"
    ]


def tokens_note(r: Recommendation, nearest: str) -> list[str]:
    """Return what a trainer has in place of micro-batches that are cut by tokens, where the recommendation asks for them."""
    return [f"micro-batches by tokens: {nearest}"] if r.micro_batch_tokens else []


def cannot_be_said(optimizer: OptimizerConfig, target: str) -> str:
    kwargs = f" with {optimizer.kwargs}" if optimizer.kwargs else ""
    return f"optimizer {optimizer.name}{kwargs} cannot be expressed in {target}"


def shards_note(r: Recommendation, how: str) -> list[str]:
    """Return how the target is told that each rank holds a shard of the model, where the study's did."""
    return [f"the study sharded the model over its ranks (FSDP2): {how}"] if r.parallel == "fsdp" else []


def checkpointing_note(r: Recommendation, target: str, nearest: str) -> list[str]:
    """Return what is lost where the target knows only full checkpointing or none."""
    mode = r.activation_checkpointing
    if mode in ("none", "full"):
        return []
    meant = f"a memory budget of {mode}" if isinstance(mode, float) else f"'{mode}'"
    return [f"activation_checkpointing {meant} cannot be expressed in {target}: {nearest}"]


def no_key_note(r: Recommendation, target: str) -> list[str]:
    """Return who is to recompute activations where the target has no key for it."""
    if r.activation_checkpointing == "none":
        return []
    return [
        f"{target} has no key for activation_checkpointing ({r.activation_checkpointing}): wrap the blocks of your model in "
        "torch.utils.checkpoint"
    ]


def table_note(r: Recommendation, target: str) -> list[str]:
    """Return what is lost of a schedule that only the user's own trainer has."""
    if r.schedule.type != "table":
        return []
    return [
        f"the schedule is your own, and cannot be expressed in {target}: here the rate stays; use yours, with {r.learning_rate:.4g} as its highest"
    ]


def text_of(r: Recommendation, notes: list[str], lines: list[str], *, has_own_groups: bool = False) -> str:
    """Return the lines below comments: the answer, and the notes. has_own_groups: as of `header_of`."""
    told = [*header_of(r, has_own_groups=has_own_groups), *notes]
    return "\n".join([*(f"# {note}" for note in told), *lines]) + "\n"
