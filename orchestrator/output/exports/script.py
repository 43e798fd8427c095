"""The script that was studied: its own command with other numbers, and what it has no flag for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from batchscout.orchestrator.output.exports.counted import decay_steps, max_steps, warmup_steps
from batchscout.orchestrator.output.exports.notes import text_of, without_ramp
from batchscout.orchestrator.output.recommendation import Recommendation, Script
from batchscout.trainers.sources.watch.flags import with_values


def written(r: Recommendation) -> str:
    """Raises ValueError where it was no script that was studied."""
    script = r.script
    if script is None:
        raise ValueError(
            "the study was not of a script, so there is no command to write; choose another trainer: --to torch, hf, lightning, ..."
        )
    r, lost = without_ramp(r, "a command")
    numbers = {
        "learning_rate": r.learning_rate,
        "micro_batch_size": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps,
        "steps": max_steps(r),
    }
    values = {
        script.flags[key]: f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in numbers.items()
        if key in script.flags
    }
    for flag, factor in script.factors.items():
        is_rate = flag == script.flags.get("learning_rate")
        values[flag] = f"{factor * r.learning_rate:.4g}" if is_rate else str(max(1, round(factor * max_steps(r))))
    command = [*_python(r, script), *with_values(script.args, values)]
    return text_of(r, [*lost, *_by_hand(r, script)], [shlex.join(command)], has_own_groups=True)


def _python(r: Recommendation, script: Script) -> list[str]:
    what = [script.script] if script.script.endswith(".py") else ["-m", script.script]
    return ["torchrun", f"--nproc_per_node={r.world_size}", *what] if r.world_size > 1 else ["python", *what]


def _by_hand(r: Recommendation, script: Script) -> Iterator[str]:
    """Yield what is to be changed in the script itself, and what the study had otherwise than it."""
    name = script.script
    if script.factors.get(script.flags.get("learning_rate", ""), 1.0) != 1.0:
        factor = script.factors[script.flags["learning_rate"]]
        yield f"the first parameter group trains at {r.learning_rate:.4g}: what the flag sets is {factor:.4g} times that, as in your own command"
    if r.world_size > 1:
        yield (
            f"batch and accumulation are those of one of {r.world_size} processes: where {name} divides them by the number of processes, give it "
            f"{r.world_size} times as many"
        )
    if "learning_rate" not in script.flags:
        yield f"{name} has no flag for its learning rate: {_rate_by_hand(r)}"
    if "micro_batch_size" not in script.flags:
        yield f"{name} has no flag for its batch: have each of its batches take {r.micro_batch_size} samples (batch_size of a DataLoader)"
    if r.gradient_accumulation_steps > 1 and "gradient_accumulation_steps" not in script.flags:
        yield (
            f"{name} has no flag for accumulation: step the optimizer after every {r.gradient_accumulation_steps} micro-batches, with each "
            f"loss divided by {r.gradient_accumulation_steps}"
        )
    yield from _length(r, script)
    yield from _of_recipe(r)
    if r.activation_checkpointing != "none":
        yield f"activation checkpointing ({r.activation_checkpointing}): wrap the blocks of the model in torch.utils.checkpoint"
    if r.compile:
        yield "compile: call model.compile() before training"
    if r.parallel == "fsdp":
        yield "the study's ranks sharded the model (FSDP2)"


def _rate_by_hand(r: Recommendation) -> str:
    """Return what to do with the rate in the script. As a factor it holds whatever the schedule makes of the number that it has there: 50 times
    less, of Adam(lr=1.0) with that of Noam."""
    own = (r.own_run.recipe if r.own_run else {}).get("optimizer", {}).get("lr")
    if not own:
        return f"set that of its first parameter group to {r.learning_rate:.4g}, and others as many times theirs"
    return (
        f"multiply what it sets, for all parameter groups, by {r.learning_rate / own:.4g}, so that the first trains at {r.learning_rate:.4g} where "
        f"it is highest, and not at {own:.4g}"
    )


def _length(r: Recommendation, script: Script) -> Iterator[str]:
    """Yield how the run's length is to change where that is no flag of its command, and the parts of its schedule."""
    own = r.own_run
    if own is None or own.samples is None:
        return
    if not own.in_steps:
        if (times := r.sample_budget / own.samples) != 1:
            yield f"its command trains {own.samples} samples, and the answer is for {r.sample_budget}: give it {times:.3g} times as many passes over the data"
        return
    before, after = own.samples / own.samples_per_step, max_steps(r)
    if abs(after / before - 1) < 0.01:
        return
    if "steps" not in script.flags:
        yield f"{script.script} has no flag for its number of steps: {before:.0f} become {after}"
    counts = [flag.rstrip("=") for flag in script.factors if flag != script.flags.get("learning_rate")]
    if own.schedule is None or own.schedule.type != "constant":
        others = (
            f"what else counts steps of its schedule than {', '.join(counts)}"
            if counts
            else "what counts steps of its schedule"
        )
        yield f"{others}, such as a warm-up or a decay, becomes {after / before:.3g} times as long"


def _of_recipe(r: Recommendation) -> Iterator[str]:
    """Yield what the study trained with otherwise than the script does."""
    own_run = r.own_run
    own = own_run.recipe if own_run else {}
    if r.warmup_samples or (own_run and own_run.schedule != r.schedule):
        decay = f", and went down over the last {decay_steps(r)}" if decay_steps(r) else ""
        why = "; how the script's own rate goes on could not be known" if own_run and own_run.schedule is None else ""
        yield f"the study's schedule was {r.schedule.type}: it warmed up over {warmup_steps(r)} steps{decay}{why}"
    optimizer = own.get("optimizer", {})
    for key in ("type", "target", "betas", "eps", "weight_decay", "max_gradient_norm", "kwargs"):
        before, after = optimizer.get(key), getattr(r.optimizer, key)
        if key in optimizer and before != (list(after) if isinstance(after, tuple) else after):
            yield f"{key} of the optimizer: {after}, where the script has {before}"
    if own.get("precision", r.precision) != r.precision:
        yield f"precision: {r.precision}, where the script has {own['precision']}"
