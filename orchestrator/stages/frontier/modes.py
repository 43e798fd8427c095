"""The modes that the frontier compares, and those that it tries beside them."""

from __future__ import annotations

import itertools
from dataclasses import replace

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.frontier.checkpointing import not_checkpointed
from batchscout.orchestrator.stages.frontier.variants import variants
from batchscout.trainers.config import ActivationCheckpointing
from batchscout.trainers.knobs import KNOBS, chunked_cross_entropy, excluding, knob


def modes(context: StageContext[Frontier]) -> list[Mode]:
    """Return the modes to compare. Those with other sample lengths come last, and only show what the lengths cost."""
    stage = context.stage
    precisions = stage.precision or (context.config.precision,)
    kinds = stage.cross_entropy or ("whole",)
    lengths = (None, *(length for length in stage.seq_len if length != context.config.data.kwargs.get("seq_len")))
    left_out = not_checkpointed(context)
    checkpointing: list[ActivationCheckpointing] = [
        mode for mode in stage.activation_checkpointing if mode not in left_out
    ]
    axes = itertools.product(lengths, checkpointing, stage.compile or (True,), precisions, kinds)
    always = context.config.memory_knobs
    return [Mode(mode, compiled, precision, kind, length, always) for length, mode, compiled, precision, kind in axes]


def predicted_modes(context: StageContext[Frontier]) -> list[Mode]:
    """Return every mode that the frontier may run: its own, and each again in the variants and with the knobs that it tries."""
    compared = modes(context)
    of_the_data = [mode for mode in compared if mode.seq_len is None]
    varied = [variant.of_mode(mode) for variant in variants(context) for mode in of_the_data]
    return [*compared, *varied, *modes_with_knobs(context)]


def modes_with_knobs(context: StageContext[Frontier]) -> list[Mode]:
    """Return every mode with each of the knobs that may be tried in it. Pairs, of which there are many, are not predicted."""
    of_the_data = [mode for mode in modes(context) if mode.seq_len is None]
    with_each = [with_knobs(context, mode, (name,)) for name in knobs_to_try(context) for mode in of_the_data]
    return [mode for mode in with_each if mode is not None]


def knobs_to_try(context: StageContext[Frontier]) -> tuple[str, ...]:
    """Return the knobs that the stage tries: those that the study file names, or else those that change no number and that the model
    is known to go with."""
    asked, always = context.stage.memory_knobs, context.config.memory_knobs
    names = (context.study.facts.memory_knobs or ()) if asked is None else asked
    return tuple(one.name for one in KNOBS if one.name in names and one.name not in always)


def with_knobs(context: StageContext[Frontier], ground: Mode, names: tuple[str, ...]) -> Mode | None:
    """Return a mode with further knobs; None where they do not go with it."""
    all_of_them = tuple(sorted({*ground.memory_knobs, *names}))
    if excluding(all_of_them) or (chunked_cross_entropy.NAME in names and ground.cross_entropy == "chunked"):
        return None
    mode = replace(ground, memory_knobs=all_of_them)
    plain = base_trial(context.config, None).model_copy(update={**mode.fields(), "gradient_accumulation_steps": 1})
    return None if any(knob(name).incompatible_with(plain) for name in all_of_them) else mode


def prediction_key(mode: Mode) -> str:
    """Return the key of a mode's prediction: compiled and eager modes share one, which is made for eager code."""
    return f"{replace(mode, compile=True)}, {mode.precision}"
