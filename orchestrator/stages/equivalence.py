"""Does a batch that is split into micro-batches train this model as the whole batch does? Several splits of one effective
batch, from the same weights.

All splits run in float32 and without dropout, so that rounding alone is left to tell them apart. How far rounding goes
is up to the model (an attention's key bias has no gradient but rounding, and Adam makes whole steps of that), so a
control measures it: the reference once more, with the samples of each micro-batch in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from batchscout.orchestrator.config.stages import PROBED_SHARES, Equivalence, Frontier
from batchscout.orchestrator.config.trial import precisions
from batchscout.orchestrator.stages.chosen import chosen_mode, chosen_split
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import (
    OTHERS_COLOUR,
    Axis,
    Figure,
    Line,
    Mark,
    Series,
    batch_text,
    names_of,
)
from batchscout.orchestrator.stages.findings import concluded, found
from batchscout.orchestrator.stages.probing import max_samples
from batchscout.orchestrator.stages.short_runs import (
    made_again,
    notes_on_divergence,
    short_id,
    short_run,
    why_they_diverge,
)
from batchscout.orchestrator.stages.stage import Stage
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.orchestrator.units import counted, rho_text
from batchscout.trainers.config import Split, TrialConfig
from batchscout.trainers.knobs import that_change_the_loss

# A split passes if its rho is at most FACTOR times the largest rho of up to three controls. Of 160 runs without a fault (GPT, ViT,
# Llama, CNN with GroupNorm; AdamW and SGD; micro-batches of 8 and 2; 10 steps) 5 went further, none beyond 1.6e-5; past
# that the ratio was 1.8 at most. With one control, the ratio came to 19: it is a single draw, with a long tail.
FACTOR = 3
MOST_CONTROLS = 3
# The tolerance is never smaller: what rounding makes below it is not looked at. Faults (a mean over micro-batches of
# unequal lengths, BatchNorm) made 0.07 to 0.4, where the controls made less than 1e-6.
SMALLEST_TOLERANCE = 1e-4
# The losses of four samples add up to that of all in one micro-batch but for rounding: 1e-6 in float32, 1e-4 where a GPU
# multiplies in TF32. With a mean they add up to 4 x it.
ADDS_UP_WITHIN = 1e-3
# BatchNorm moves the loss in training by 1e-3 to 2e-2 of itself.
MIXES_ABOVE = 1e-4
# Without random numbers the same forward gives the same loss, but for the order in which a GPU's threads may add. A
# dropout of 0.1 moves that of 8 short samples by 1e-4.
RANDOM_ABOVE = 1e-6
# So many splits are compared, unless the study file says which.
DEFAULT_SPLITS = 3
SMALLEST_SPLIT = 4

Judgement = Literal["equivalent", "splits_differ", "random", "no_sum"]


@dataclass(frozen=True)
class EquivalenceFindings:
    STAGE: ClassVar[str] = "equivalence"

    tolerance: float
    """The largest rho that passes."""
    rho: dict[str, float]
    """For each trial, the distance of its weights from the reference's, relative to how far these have moved."""
    controls: dict[str, float] = field(default_factory=dict)
    """The same for each control: what rounding alone makes."""
    judgement: Judgement | None = None
    """equivalent: a batch trains the same however it is split. splits_differ: it does not. random: not known, as the
    model draws random numbers. no_sum: its loss is no sum over samples."""


def propose(context: StageContext[Equivalence]) -> list[Proposal]:
    """Return the reference; once it is done the other splits, the controls, and the reference in the study's own
    precision."""
    tried, reference = _reference_runs(context), _reference(context)
    if reference is None or _is_random(reference) or not _is_sum(reference):
        return tried
    others = _others(context, reference)
    return [*tried, *others, *_controls(context, reference, others), *_own_precision(context, reference)]


def _reference_runs(context: StageContext[Equivalence]) -> list[Proposal]:
    """Return a run of the largest micro-batch, and of the next one where that does not fit: in float32 it takes more
    memory than in the precision in which the frontier chose it."""
    runs: list[Proposal] = []
    for split in _splits(context)[0][:-1]:  # the last one would have nothing left to be compared with
        runs.append(_reference_run(context, split))
        if not _does_not_fit(context, split):
            break
    return runs


def _reference_run(context: StageContext[Equivalence], split: Split) -> Proposal:
    changes: dict[str, object] = {
        "precision": "float32",
        "allow_tf32": False,
        "dropout": False,
        "save_weights": True,
        "check_parts": True,
    }
    mode = chosen_mode(context.study)
    # A knob that changes the loss may want another precision, and would hide what the split does.
    names = mode.memory_knobs if mode else context.config.memory_knobs
    changes["memory_knobs"] = tuple(name for name in names if name not in that_change_the_loss(names))
    name, changes["learning_rate"] = short_run(context, _name(split), split)
    if name in context.study.trials:
        return context.study.trials[name].proposal
    config = context.short_trial(split, mode, context.stage.steps, **changes)
    return Proposal(name, "equivalence", config, candidate=name)


def _reference(context: StageContext[Equivalence]) -> Trial | None:
    """Return the run that the others are compared with; None while it is not complete."""
    runs = _reference_runs(context)
    trial = context.study.trials.get(runs[-1].id) if runs else None
    return trial if trial and trial.state is TrialState.COMPLETE else None


def _name(split: Split) -> str:
    return f"equivalence-{split}"


def _does_not_fit(context: StageContext[Equivalence], split: Split) -> bool:
    trial = context.study.trials.get(short_run(context, _name(split), split)[0])
    return trial is not None and trial.state is TrialState.OUT_OF_MEMORY


def _splits(context: StageContext[Equivalence]) -> tuple[list[Split], tuple[str, ...]]:
    """Return (the splits of the effective batch, the largest micro-batch first; why others were skipped)."""
    splits: list[Split] = []
    skipped: list[str] = []
    for size in _wanted(context):
        try:
            splits.append(context.split_of(_effective_batch_size(context), size))
        except ValueError as error:
            skipped.append(f"skipped: {error}")
        if sum(not _does_not_fit(context, split) for split in splits) == _most_splits(context):
            break
    return splits, tuple(skipped)


def _most_splits(context: StageContext[Equivalence]) -> int:
    return len(context.stage.micro_batch_sizes) or DEFAULT_SPLITS


def _wanted(context: StageContext[Equivalence]) -> list[int]:
    """Return the micro-batch sizes, the largest first: by default the chosen one, or one that is cheaper to split, and all that
    divide it."""
    if context.stage.micro_batch_sizes:
        return sorted({*context.stage.micro_batch_sizes}, reverse=True)
    smallest = context.study.facts.smallest_micro_batch
    return [size for size in _divisors(_largest_affordable(context)) if size >= smallest]


def _divisors(size: int) -> list[int]:
    return [divisor for divisor in range(size, 0, -1) if size % divisor == 0]


def _largest_affordable(context: StageContext[Equivalence]) -> int:
    """Return the chosen micro-batch size, or its largest divisor for which max_samples is enough; at least 4, which has three
    splits, unless the chosen one is smaller."""
    chosen, allowed = chosen_split(context).micro_batch_size, max_samples(context)
    if allowed is None or context.stage.effective_batch_size:
        return chosen
    of_one_sample = _most_runs(context) * context.stage.steps * _of_micro_batch(context, 1)
    held = [size for size in _divisors(chosen) if SMALLEST_SPLIT <= size <= allowed // of_one_sample]
    return held[0] if held else min(chosen, SMALLEST_SPLIT)


def _most_runs(context: StageContext[Equivalence]) -> int:
    controls = 0 if context.stage.tolerance is not None else MOST_CONTROLS
    return _most_splits(context) + controls + (precisions(context.config) != {"float32"})


def _of_micro_batch(context: StageContext[Equivalence], size: int) -> int:
    """Return the effective batch that this micro-batch size makes in two accumulation steps."""
    return context.split(size, 2).effective_batch_size


def most_samples(context: StageContext[Equivalence]) -> int | None:
    """Return how many samples the stage's trials take at most; None where that is not known yet."""
    steps, allowed = _most_runs(context) * context.stage.steps, max_samples(context)
    if context.stage.micro_batch_sizes or context.stage.effective_batch_size:
        return steps * _effective_batch_size(context)
    return None if allowed is None else max(allowed, steps * _of_micro_batch(context, SMALLEST_SPLIT))


def _effective_batch_size(context: StageContext[Equivalence]) -> int:
    """Return the study file's effective batch, or that of the largest micro-batch in two accumulation steps."""
    return context.stage.effective_batch_size or _of_micro_batch(context, max(_wanted(context)))


def _others(context: StageContext[Equivalence], reference: Trial) -> list[Proposal]:
    splits, _ = _splits(context)
    return [
        _compared(
            reference,
            short_id(context, _name(split), split, reference.config.learning_rate),
            micro_batch_size=split.micro_batch_size,
            gradient_accumulation_steps=split.gradient_accumulation_steps,
        )
        for split in splits[splits.index(reference.config.split) + 1 :]
    ]


def _controls(context: StageContext[Equivalence], reference: Trial, others: list[Proposal]) -> list[Proposal]:
    """Return a control, and further ones while a split is beyond what those so far allow: one is a single draw."""
    controls: list[Proposal] = []
    if context.stage.tolerance is not None:
        return controls
    for number in range(1, MOST_CONTROLS + 1):
        name, role = f"{reference.id}-permuted{number}", "control: the samples in another order"
        is_first_or_known = number == 1 or name in context.study.trials
        if not is_first_or_known and (not context.have_ended([*others, *controls]) or _all_pass(context)):
            break
        controls.append(_compared(reference, name, role, sample_permutation=number))
    return controls


def _own_precision(context: StageContext[Equivalence], reference: Trial) -> list[Proposal]:
    """Return the reference in the study's own precision; none where that is the reference's."""
    precision = context.short_trial(reference.config.split, chosen_mode(context.study), context.stage.steps).precision
    if precision == reference.config.precision:
        return []
    role = "control: what the precision alone makes"
    return [_compared(reference, f"{reference.id}-{precision}", role, precision=precision)]


def _compared(reference: Trial, name: str, role: str = "", **changes: object) -> Proposal:
    """Return a run that differs from the reference in these fields alone, and is compared with it."""
    own = {"reference_weights": f"../{reference.id}/weights.pt", "save_weights": False, "check_parts": False}
    config = TrialConfig.model_validate(reference.config.model_dump() | own | changes)
    return Proposal(name, "equivalence", config, candidate=name, role=role, control=bool(role))


# What the trials say


def _is_random(reference: Trial) -> bool:
    """True if random numbers that could not be switched off move the loss."""
    return (reference.metric("loss_randomness") or 0.0) > RANDOM_ABOVE


def _is_sum(reference: Trial) -> bool:
    """True unless the samples' losses, or their numbers of targets, were seen not to add up."""
    ratios = [reference.metric(name) for name in ("parts_loss_ratio", "parts_targets_ratio")]
    return all(ratio is None or abs(ratio - 1) <= ADDS_UP_WITHIN for ratio in ratios)


def _distances(context: StageContext[Equivalence], *, control: bool) -> dict[str, float]:
    """Return the rho of every split, or of every control."""
    trials = [trial for trial in context.trials() if trial.proposal.control == control]
    wanted = [trial for trial in trials if (trial.config.sample_permutation is not None) == control]
    return {trial.id: rho for trial in wanted if (rho := trial.metric("rho")) is not None}


def _tolerance(context: StageContext[Equivalence]) -> float:
    if context.stage.tolerance is not None:
        return context.stage.tolerance
    return max(SMALLEST_TOLERANCE, FACTOR * max(_distances(context, control=True).values(), default=0.0))


def _all_pass(context: StageContext[Equivalence]) -> bool:
    return all(rho <= _tolerance(context) for rho in _distances(context, control=False).values())


def conclude(context: StageContext[Equivalence]) -> Conclusion:
    """Conclude whether the splits train the same model. Only a loss that is no sum, or a reference that fails, ends the
    study: whatever else keeps a batch from being split is a finding."""
    reference, rho = _reference(context), _distances(context, control=False)
    broken = next((trial for trial in context.trials() if trial.state is TrialState.FAILED), None)
    if reference is None and broken is not None:
        reason = f"{_split(context, broken.id)} could not be compared: {broken.explanation}"
        return Conclusion("equivalence", ok=False, reason=reason)
    if reference is not None and _is_random(reference):
        return _conclusion(context, "random", _randomness(reference))
    if reference is not None and not _is_sum(reference):
        return _conclusion(context, "no_sum", _no_sum(reference))
    if reference is None or not rho:
        diverged = why_they_diverge(context) if reference is None else None
        reason = f"nothing to compare: {diverged or 'there are no two splits of this batch that could be run'}"
        return Conclusion("equivalence", ok=True, reason=reason, notes=_left_out(context))
    if not _all_pass(context):
        return _conclusion(context, "splits_differ", _difference(context, reference), _meaning(reference))
    same = f"{len(rho) + 1} splits of one effective batch end at the same weights"
    return _conclusion(context, "equivalent", f"{same}: rho <= {rho_text(max(rho.values()))} {_allowed(context)}")


def _conclusion(
    context: StageContext[Equivalence], judgement: Judgement, reason: str, meaning: tuple[str, ...] = ()
) -> Conclusion:
    controls = _distances(context, control=True)
    findings = EquivalenceFindings(_tolerance(context), _distances(context, control=False), controls, judgement)
    notes = (
        *meaning,
        *([_WITHOUT_DROPOUT] if any(trial.metric("num_dropouts_off") for trial in context.trials()) else []),
        *_on_precision(context),
        *notes_on_divergence(context),
        *_left_out(context),
    )
    return concluded(findings, reason, notes, ok=judgement != "no_sum")


def _allowed(context: StageContext[Equivalence]) -> str:
    """Return the tolerance in words, with the control that it comes from."""
    tolerance, controls = _tolerance(context), _distances(context, control=True)
    measured = f"; reordering the samples alone gives {rho_text(max(controls.values()))}" if controls else ""
    return f"(tolerance {rho_text(tolerance)}{measured})"


def _difference(context: StageContext[Equivalence], reference: Trial) -> str:
    rho = _distances(context, control=False)
    worst = max(rho, key=lambda name: rho[name])
    return (
        f"the split of the batch changes what is trained: {_split(context, worst)} is rho = {rho_text(rho[worst])} from "
        f"{_split(context, reference.id)} "
        f"{_allowed(context)}; {_cause(reference)}"
    )


def _split(context: StageContext[Equivalence], trial_id: str) -> str:
    return f"batch {batch_text(context.study.trials[trial_id].config)}"


def _cause(reference: Trial) -> str:
    layers, ratio = int(reference.metric("num_batch_norms") or 0), reference.metric("parts_training_ratio")
    if layers:
        return f"the model has {counted(layers, 'BatchNorm layer')}, whose statistics are those of one micro-batch"
    if ratio is not None and abs(ratio - 1) > MIXES_ABOVE:
        return (
            f"in training, the losses of a micro-batch's two halves add up to {ratio:.4f} x that of the whole: its samples "
            "change one another's loss"
        )
    return "look for a state that every forward pass changes, or a gradient that is scaled within a micro-batch"


def _meaning(reference: Trial) -> tuple[str, ...]:
    """Return what the study's comparisons are worth where the micro-batch is a part of the model."""
    remedy = "; with GroupNorm or LayerNorm instead they would be" if reference.metric("num_batch_norms") else ""
    return (
        "batches are comparable where their micro-batch size is the same. Elsewhere their losses differ by the batch and "
        f"by the model together: an accumulated batch is another model than the same batch in one piece{remedy}",
        "train with the recommended micro-batch size as it is: another split of the same batch is another model",
    )


def _randomness(reference: Trial) -> str:
    moved = reference.measured("loss_randomness")
    return (
        f"undecided: model or data draw random numbers in training that could not be switched off (with others, the loss of "
        f"one micro-batch moves by {moved:.1e} of itself), and every split draws its own. A dropout is found by its name: "
        "an attribute of its layer with 'drop' in it"
    )


def _no_sum(reference: Trial) -> str:
    loss, targets = (reference.metric(name) for name in ("parts_loss_ratio", "parts_targets_ratio"))
    said = [f"{what} add up to {ratio:.3f} x" for what, ratio in (("losses", loss), ("num_targets", targets)) if ratio]
    return (
        f"the loss is no sum over samples: one by one, the {' and the '.join(said)} that of all in one micro-batch, so "
        "every split of a batch trains differently; return the sum over the targets (reduction='sum') and their number, mask "
        "what is padding, or leave the equivalence stage out if that is meant"
    )


_WITHOUT_DROPOUT = "dropout was off in these runs: its masks differ between splits, which is no fault"


def _on_precision(context: StageContext[Equivalence]) -> tuple[str, ...]:
    """Return what the study's own precision makes of the reference; empty where that is float32."""
    own = [trial for trial in context.trials() if trial.proposal.control and trial.config.precision != "float32"]
    return tuple(
        f"the splits were compared in float32. {trial.config.precision} alone moves the weights by rho = {rho:.1e}: that is "
        "its rounding, and not the split's"
        for trial in own
        if (rho := trial.metric("rho")) is not None
    )


def _left_out(context: StageContext[Equivalence]) -> tuple[str, ...]:
    """Return why trials are missing: their sizes do not divide the batch, they did not fit, or diverged."""
    _, skipped = _splits(context)
    silent = [trial for trial in context.trials() if trial.state.ruled_out and not made_again(context, trial)]
    return (
        *_instead(context),
        *skipped,
        *(f"skipped: {_split(context, trial.id)} did not end, {trial.explanation}" for trial in silent),
    )


def _instead(context: StageContext[Equivalence]) -> list[str]:
    """Return why a smaller micro-batch than the chosen one is split, where it is."""
    chosen, split, allowed = chosen_split(context).micro_batch_size, max(_wanted(context)), max_samples(context)
    if context.stage.micro_batch_sizes or split == chosen or allowed is None:
        return []
    samples = _most_runs(context) * context.stage.steps * _of_micro_batch(context, chosen)
    share = f"{PROBED_SHARES['equivalence']:.0%} of the most that the full runs may take"
    limit = share if context.stage.max_samples is None else "max_samples"
    return [
        f"tested with micro-batch {split}: the chosen {chosen} would take {samples:,} samples, and the limit is {allowed:,} ({limit}); "
        "whether a split changes the model does not depend on its size"
    ]


def describe(context: StageContext[Equivalence]) -> list[str]:
    if not context.stage.micro_batch_sizes and context.config.keys_of(Frontier):
        splits = "the chosen micro-batch, or a cheaper one, against the two largest sizes that divide it"
    else:
        splits = "one effective batch as " + ", ".join(map(str, _splits(context)[0]))
    controls = f"1 to {MOST_CONTROLS} controls: the largest again, with the samples in another order"
    most = most_samples(context)
    cost = [f"at most {counted(most, 'sample')}"] if most is not None else []
    second = "; ".join([*([controls] if context.stage.tolerance is None else []), *cost])
    return [splits, second] if second else [splits]


def figures(context: StageContext[Equivalence]) -> list[Figure]:
    """Return every split's rho, one row each; a rho of 0 cannot be shown on a log axis, so the caption names it."""
    measured = [(trial, rho) for trial in context.trials() if (rho := trial.metric("rho")) is not None]
    shown = [(trial, rho) for trial, rho in measured if rho > 0]
    names = names_of([trial for trial, _ in measured if not trial.proposal.control])
    names |= {
        one.id: f"batch {batch_text(one.config)}, in another order" for one, _ in measured if one.proposal.control
    }
    rows = {-float(i): names[trial.id] for i, (trial, _) in enumerate(shown)}
    marks = tuple(Mark(rho, row, rho_text(rho)) for row, (_, rho) in zip(rows, shown, strict=True))
    same = [names[trial.id] for trial, rho in measured if rho == 0]
    findings = found(context.study, EquivalenceFindings)
    limit = findings and Line(findings.tolerance, f"tolerance {rho_text(findings.tolerance)}", vertical=True)
    return [
        Figure(
            "equivalence",
            Axis("rho, relative distance of the weights", log=True, precise=rho_text),
            Axis("split", lambda row: rows[row], ticks=tuple(rows)),
            (Series("", marks, OTHERS_COLOUR, joined=False),),
            f"Not on the axis, because rho is 0: {', '.join(same)}." if same else "",
            (limit,) if limit else (),
            width=540,
            height=90 + 34 * len(shown),
        )
    ]


COLUMNS = ("final_loss", "step_seconds", "tokens_per_second", "mfu", "rho")

STAGE = Stage[Equivalence](propose, conclude, describe, figures, COLUMNS)
