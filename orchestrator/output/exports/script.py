"""The script that was studied: its own command with other numbers, and what it has no flag for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from batchscout.orchestrator.output.exports.counted import (
    decay_steps,
    is_about_one,
    max_steps,
    times_as_many_steps,
    warmup_steps,
)
from batchscout.orchestrator.output.exports.notes import optimizer_notes, text_of, without_ramp
from batchscout.orchestrator.output.recommendation import Recommendation, Script
from batchscout.trainers.sources.watch.flags import sets_lowest_rate, sets_rate, with_values


def written(r: Recommendation) -> str:
    """Raises ValueError where it was no script that was studied."""
    script = r.script
    if script is None:
        raise ValueError(
            "the study was not of a script, so there is no command to write; choose another trainer: --to torch, hf, lightning, ..."
        )
    r, lost = without_ramp(r, "a command")
    steps, accumulation = max_steps(r), r.gradient_accumulation_steps
    numbers = {
        "learning_rate": _rate_factor(script) * r.learning_rate,
        "micro_batch_size": r.micro_batch_size,
        "samples_per_step": r.micro_batch_size * accumulation,
        "gradient_accumulation_steps": accumulation,
        "steps": steps,
        "micro_batches": steps * accumulation,
    }
    values = {
        script.flags[key]: f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in numbers.items()
        if key in script.flags
    }
    length = numbers["micro_batches" if "micro_batches" in script.flags else "steps"]
    values |= {flag: str(max(1, round(factor * length))) for flag, factor in _of_schedule(script).items()}
    lowest = {flag: factor for flag, factor in script.factors.items() if sets_lowest_rate(flag)}
    values |= {flag: f"{factor * r.learning_rate:.4g}" for flag, factor in lowest.items()}
    command = [*_python(r, script), *with_values(script.args, values)]
    return text_of(r, [*lost, *_by_hand(r, script)], [shlex.join(command)], has_own_groups=True)


def _rate_factor(script: Script) -> float:
    """Return what the flag of the rate sets, as a share of that of the first parameter group."""
    return script.factors.get(script.flags.get("learning_rate", ""), 1.0)


def _of_schedule(script: Script) -> dict[str, float]:
    """Return the flags that count steps of the schedule, with their shares of the run."""
    # Studies of earlier versions have a factor of the rate's long name, too, where it was typed by a short one.
    return {
        flag: factor
        for flag, factor in script.factors.items()
        if flag != script.flags.get("learning_rate") and not sets_rate(flag) and not sets_lowest_rate(flag)
    }


def _python(r: Recommendation, script: Script) -> list[str]:
    what = [script.script] if script.script.endswith(".py") else ["-m", script.script]
    return ["torchrun", f"--nproc_per_node={r.world_size}", *what] if r.world_size > 1 else ["python", *what]


def _by_hand(r: Recommendation, script: Script) -> Iterator[str]:
    """Yield what is to be changed in the script itself, and what the study had otherwise than it."""
    name = script.script
    if (factor := _rate_factor(script)) != 1.0:
        yield f"the first parameter group trains at {r.learning_rate:.4g}: what the flag sets is {factor:.4g} times that, as in your own command"
    if r.world_size > 1:
        yield (
            f"batch and accumulation are those of one of {r.world_size} processes: where {name} divides them by the number of processes, give it "
            f"{r.world_size} times as many"
        )
        yield (
            f"where {name} multiplies its learning rate by the number of processes, divide {_flag_of_rate(script)} by {r.world_size}, so that the first "
            f"parameter group trains at {r.learning_rate:.4g}"
        )
    if "learning_rate" not in script.flags and (by_hand := _rate_by_hand(r)):
        yield f"{name} has no flag for its learning rate: {by_hand}"
    if not script.flags.keys() & {"micro_batch_size", "samples_per_step"}:
        yield f"{name} has no flag for its batch: have each of its batches take {r.micro_batch_size} samples (batch_size of a DataLoader)"
    yield from _of_split(r, script)
    yield from _length(r, script)
    yield from _of_recipe(r, script)
    if r.activation_checkpointing != "none":
        yield f"activation checkpointing ({r.activation_checkpointing}): wrap the blocks of the model in torch.utils.checkpoint"
    if r.compile:
        yield "compile: call model.compile() before training"
    if r.parallel == "fsdp":
        yield "the study's ranks sharded the model (FSDP2)"


def _of_split(r: Recommendation, script: Script) -> Iterator[str]:
    """Yield what another batch and accumulation than the script's own change in it, as far as its own are known."""
    name, flags, accumulation = script.script, script.flags, r.gradient_accumulation_steps
    own = (r.own_run.recipe if r.own_run else {}).get("batch", {})
    before = own.get("gradient_accumulation_steps", 1)
    if accumulation != before and "gradient_accumulation_steps" not in flags:
        has = f", and has {before} micro-batches in a step" if before > 1 else ""
        after = f"every {accumulation} micro-batches, with each loss divided by {accumulation}"
        if accumulation == 1:
            after = "each micro-batch, with its loss as it is"
        yield f"{name} has no flag for accumulation{has}: step the optimizer after {after}"
    if accumulation != before:
        # Without accumulation a micro-batch is a step, and a number may mean either; one of the schedule may in any script.
        batch, length = (flags.get(key) if before == 1 else None for key in ("micro_batch_size", "steps"))
        counts = [*([length] if length else []), *_of_schedule(script)]
        unit = "micro-batches" if "micro_batches" in flags else "optimizer steps"
        taken = [f"{_typed(batch)} for the samples of a micro-batch"] if batch else []
        taken += [f"{', '.join(map(_typed, counts))} for {unit}"] if counts else []
        if taken:
            yield f"check that {name}, with this accumulation, takes {', and '.join(taken)}"
    of_script = r.own_run is not None and r.own_run.library == "script"  # a Trainer's rate is what it is given
    if of_script and own and (r.micro_batch_size, accumulation) != (own["micro_batch_size"], before):
        yield (
            f"where {name} multiplies its rate by its batch (lr * batch_size / 256, say), divide "
            f"{_flag_of_rate(script)} by as much, so that the first parameter group trains at {r.learning_rate:.4g}"
        )


def _flag_of_rate(script: Script) -> str:
    return _typed(script.flags.get("learning_rate", "the rate that you set"))


def _typed(flag: str) -> str:
    return flag.rstrip("=")


def _rate_by_hand(r: Recommendation) -> str:
    """Return what to do with the rate in the script. As a factor it holds whatever the schedule makes of the number that it has there: 50 times
    less, of Adam(lr=1.0) with that of Noam. Nothing where it is the script's own."""
    own = (r.own_run.recipe if r.own_run else {}).get("optimizer", {}).get("lr")
    if own and math.isclose(r.learning_rate, own, rel_tol=1e-3):
        return ""
    if not own:
        return f"set that of its first parameter group to {r.learning_rate:.4g}, and others as many times theirs"
    return (
        f"multiply what it sets, for all parameter groups, by {r.learning_rate / own:.4g}, so that the first trains at {r.learning_rate:.4g} where "
        f"it is highest, and not at {own:.4g}"
    )


def _length(r: Recommendation, script: Script) -> Iterator[str]:
    """Yield how the run's length is to change where that is no flag of its command, and the parts of its schedule."""
    own, times = r.own_run, times_as_many_steps(r)
    if own is None or own.samples is None or times is None:
        return
    longer = r.sample_budget / own.samples
    if not own.in_steps and not is_about_one(longer):
        yield f"its command trains {own.samples} samples, and the answer is for {r.sample_budget}: give it {longer:.3g} times as many passes over the data"
    if is_about_one(times):
        return
    if own.in_steps and not script.flags.keys() & {"steps", "micro_batches"}:
        before = own.samples / own.samples_per_step
        yield f"{script.script} has no flag for its number of steps: {before:.0f} optimizer steps become {max_steps(r)}"
    if own.schedule is None or own.schedule.type != "constant":
        counts = ", ".join(map(_typed, _of_schedule(script)))
        others = (
            f"what else counts steps of its schedule than {counts}" if counts else "what counts steps of its schedule"
        )
        passes = "" if own.in_steps else " and not passes"
        yield f"{others}{passes}, such as a warm-up or a decay, becomes {times:.3g} times as long, since the run has as many times its steps"


def _of_recipe(r: Recommendation, script: Script) -> Iterator[str]:
    """Yield what the study trained with otherwise than the script does."""
    own_run = r.own_run
    own = own_run.recipe if own_run else {}
    if r.warmup_samples or (own_run and own_run.schedule != r.schedule):
        decay = f", and went down over the last {decay_steps(r)}" if decay_steps(r) else ""
        why = "; how the script's own rate goes on could not be known" if own_run and own_run.schedule is None else ""
        yield f"the study's schedule was {r.schedule.type}: it warmed up over {warmup_steps(r)} steps{decay}{why}"
    elif _ends_above_zero(r) and not any(map(sets_lowest_rate, script.factors)) and _rate_by_hand(r):
        yield (
            f"the study's rate ended at {r.schedule.factors[-1] * r.learning_rate:.3g}: where the script sets the lowest rate of its schedule by itself (eta_min, "
            "min_lr), set that"
        )
    yield from optimizer_notes(r, "the script", "max_gradient_norm")
    batch, clip = own.get("batch", {}), r.optimizer.max_gradient_norm
    split = {"micro_batch_size": r.micro_batch_size, "gradient_accumulation_steps": r.gradient_accumulation_steps}
    if own_run and own_run.adds_up and clip is not None and batch != split:
        yield (
            f"it clips a gradient that is a sum, and the study clipped the mean over samples, at {clip:.3g}: set what it clips at to that times as "
            f"much as its gradient is then of the mean ({clip * r.effective_batch_size / r.world_size:.3g}, where it adds up all samples of a step)"
        )
    if own.get("precision", r.precision) != r.precision:
        yield f"precision: {r.precision}, where the script has {own['precision']}"


def _ends_above_zero(r: Recommendation) -> bool:
    """True of a schedule whose last rate is more than the last of a straight fall to zero."""
    return r.schedule.type == "table" and r.schedule.factors[-1] > 0.01
