"""Which effective batches are timed, and why the others are not. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import Throughput
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.chosen import chosen_mode, chosen_split
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import batches_text
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.forms import Form, worth_timing
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.probing import num_full_runs
from batchscout.orchestrator.stages.too_short import in_words, too_short

# Effective batches closer than this factor train much alike.
APART = 1.3


@dataclass(frozen=True)
class Batches:
    """The effective batches to time with the forms that each may be fastest in, the smallest first."""

    forms: dict[int, list[Form]]
    left_out: tuple[str, ...] = ()
    """Why others are not, for people."""


def batches(context: StageContext[Throughput]) -> Batches:
    """Return the effective batches that a full run can use: the baseline, the chosen one, and those below and above."""
    kept, notes = _wanted(context)
    num_samples = context.study.facts.num_train_samples
    if num_samples is not None and (too_large := [batch for batch in kept if batch > num_samples]):
        kept = [batch for batch in kept if batch <= num_samples]
        notes.append(f"{named(too_large)} left out: the data has {num_samples:,} training samples")
    forms = {batch: _forms(context, batch) for batch in kept}
    usable, short = _usable(context, forms)
    return Batches(usable, (*notes, *short))


def named(batches: Iterable[int]) -> str:
    listed = sorted(batches)
    return f"{batches_text(listed)} {'were' if len(listed) > 1 else 'was'}"


def _wanted(context: StageContext[Throughput]) -> tuple[list[int], list[str]]:
    """Return (the batches, none of them close to another, the smallest first; why the baseline is none of them)."""
    world_size, baseline = context.config.world_size, baseline_batch(context.config)
    chosen, frontier = chosen_split(context), found(context.study, FrontierFindings)
    smallest = frontier.baseline.micro_batch_size if frontier else 1
    above = [chosen.effective_batch_size * multiple for multiple in sorted({1, *context.stage.multiples})]
    powers = [
        2**i
        for i in reversed(range(chosen.micro_batch_size.bit_length()))
        if smallest <= 2**i < chosen.micro_batch_size
    ]
    kept = [baseline] if baseline % world_size == 0 else []
    for batch in [*above, *(world_size * power for power in powers)]:
        if all(max(batch, other) >= APART * min(batch, other) for other in kept):
            kept.append(batch)
    notes = [] if baseline in kept else [
        f"the baseline's effective batch ({baseline}) was left out: it is not a multiple of world_size ({world_size})"
    ]  # fmt: skip
    return sorted(kept), notes


def _forms(context: StageContext[Throughput], batch: int) -> list[Form]:
    """Return the forms of a batch to time; without a frontier, that with the largest micro-batch of the study file."""
    frontier, world_size = found(context.study, FrontierFindings), context.config.world_size
    if frontier and (predicted := worth_timing(frontier, batch, world_size)):
        return predicted
    per_rank, most = batch // world_size, chosen_split(context).micro_batch_size
    size = next(size for size in range(min(most, per_rank), 0, -1) if per_rank % size == 0)
    split = context.split(size, per_rank // size)
    mode = chosen_mode(context.study) or mode_of(context.short_trial(split, None, steps=1))
    return [Form(split, mode, predicted=0.0, is_measured=size == most)]


def _usable(context: StageContext[Throughput], forms: dict[int, list[Form]]) -> tuple[dict[int, list[Form]], list[str]]:
    """Return (the batches of which a full run has enough steps, and the baseline; why not the others)."""
    if not num_full_runs(context.config, context.study):
        return forms, []
    baseline = baseline_batch(context.config)
    reference = forms[baseline][0].predicted if baseline in forms else 0.0
    found = {
        batch: too_short(context.config, batch, some[0].predicted / reference if reference else 1.0)
        for batch, some in forms.items()
    }
    short = {batch: one for batch, one in found.items() if one is not None and batch != baseline}
    notes = [f"left out: {in_words([*short.values()])}"] if short else []
    return {batch: some for batch, some in forms.items() if batch not in short}, notes
