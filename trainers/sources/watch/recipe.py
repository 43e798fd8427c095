"""The recipe of a loop that was watched: optimizer, schedule, batch and length, what people should know, and what was taken."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from batchscout.trainers.sources.held_out import every_tenth
from batchscout.trainers.sources.optimizers import optimizer_keys
from batchscout.trainers.sources.own_checkpointing import OWN_CHECKPOINTING, checkpoints_itself
from batchscout.trainers.sources.schedules import take_rates, told_of_momentum
from batchscout.trainers.sources.settings import Settings, num_samples_of
from batchscout.trainers.sources.watch.batches import (
    FromCall,
    FromLoader,
    FromRows,
    draws_at_will,
    is_for_tests,
    num_samples_in_pass,
    num_samples_in_source,
)
from batchscout.trainers.sources.watch.later import changes_later, may_end_before, optimizer_anew, trains_again
from batchscout.trainers.sources.watch.length import rounds_of, run_samples
from batchscout.trainers.sources.watch.loop import Loop, names_around
from batchscout.trainers.sources.watch.observer import Seen
from batchscout.trainers.sources.watch.rates import may_change, rates_of_run


def settings(loop: Loop) -> Settings:
    """Return what the script's optimizer, schedule and loop say."""
    for group, rate in zip(loop.optimizer.param_groups, _base_rates(loop.seen), strict=True):
        group.setdefault("initial_lr", rate)
    low = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    precision = low.get(loop.seen.autocast or torch.float32, "float32")
    keys: dict[str, Any] = {"optimizer": optimizer_keys(loop.optimizer), "precision": precision}
    keys["batch"] = {"micro_batch_size": loop.micro_batch_size}
    if loop.seen.allows_tf32:
        keys["allow_tf32"] = True
    batch = loop.micro_batch_size * loop.num_micro_batches
    length, in_steps = run_samples(loop.batches.source, loop.seen, loop.micro_batch_size) or (None, False)
    told = list(_schedule(loop, keys, batch, length))
    if length is None:
        told.append(
            "how long its run is was not found; set sample_budget to the samples of your run, of all passes: that of the study is a guess"
        )
    elif (sooner := may_end_before(loop.seen)) is not None:
        told.append(
            f"its run may end before its last round ({sooner}), and is taken as long as it can be, {length:,} samples; where it usually ends sooner, set "
            "sample_budget, and real_run where the study has one, to the samples that it usually takes"
        )
    keys["optimizer"] |= {"reference_batch_size": batch, "max_gradient_norm": _clipped_at(loop)}
    told += told_of_momentum(loop.optimizer)
    return Settings(keys, (*told, *_told(loop)), length, in_steps, taken=tuple(_taken(loop, batch)))


def _clipped_at(loop: Loop) -> float | None:
    """Return the norm at which a study clips the mean gradient of a step's samples, so that it clips the same steps as the script, whose
    gradient may be a sum."""
    return None if loop.seen.max_gradient_norm is None else loop.seen.max_gradient_norm / added_up(loop)


def added_up(loop: Loop) -> int:
    """Return by what the gradient of a step is larger than the mean of its samples'."""
    return (loop.micro_batch_size if loop.sums else 1) * (1 if loop.is_averaged else loop.num_micro_batches)


def _schedule(loop: Loop, keys: dict[str, Any], batch: int, length: int | None) -> Iterator[str]:
    """Set the schedule to the script's own, over its whole run, and the rate to the highest of it; yield what is to be told."""
    per_pass = num_samples_in_source(loop.batches.source)
    steps = max(2, math.ceil((length or batch) / batch))
    rates = rates_of_run(loop.seen, steps, per_pass / batch if per_pass else None) if length else None
    if rates is None and not may_change(loop.seen):
        rates = [loop.seen.steps[0].rates[0]] * 2
    if rates is None:
        yield (
            f"how its learning rate changes over its run cannot be known in advance, or is not the same for all parameter groups ({loop.seen.steps[0].rates[0]:.3g} in its first step, "
            f"{keys['optimizer']['lr']:.3g} when the optimizer was made); a study takes its own warm-up and warmup_stable_decay to the latter: "
            "set schedule to choose another"
        )
        return
    take_rates(keys, rates)


def _of_data(loop: Loop) -> str:
    source = loop.batches.source
    if isinstance(source, FromCall):
        return source.text
    if isinstance(source, FromRows):
        apart = "of which a tenth is held out"
        if source.validation is not None:
            apart = f"and {len(source.validation[0]):,} of validation data"
        return f"the {len(source.tables[0]):,} rows of {' and '.join(source.names)}, {apart}"
    train = f"{loop.name_of(source.loader)} ({_size(source.loader)})"
    if loop.validation is None:
        return f"{train}, of which a tenth is held out"
    return f"{train}, and {loop.name_of(loop.validation)} ({_size(loop.validation)}) to validate on"


def _name_of_validation(loop: Loop) -> str:
    """Return what is validated on, as the script calls it; empty where it has nothing for that."""
    match loop.batches.source:
        case FromLoader():
            return "" if loop.validation is None else loop.name_of(loop.validation)
        case FromRows() as rows:
            return " and ".join(rows.validation_names)
        case FromCall() as call:
            return call.validation_text


def _size(loader: DataLoader[Any]) -> str:
    number = num_samples_in_pass(loader)
    return "a stream" if number is None else f"{number:,} samples"


def _taken(loop: Loop, batch: int) -> Iterator[str]:
    sizes = {one: sum(p.numel() for p in one.parameters()) for one in loop.seen.pristine.values()}
    names = " and ".join(f"{type(one).__name__} ({size:,} parameters)" for one, size in sizes.items())
    parts = f", {loop.num_micro_batches} micro-batches to a step" if loop.num_micro_batches > 1 else ""
    yield f"model: {names}"
    each = f"{len(loop.seen.optimizers)} that step together, " if loop.seen.together else ""
    yield f"optimizer: {type(loop.optimizer).__name__}, {each}{batch} samples a step{parts}"
    yield f"data: {_of_data(loop)}"
    if loop.loss is not None:
        yield f"loss of a batch (replayed, it gives the loss and the gradient that were seen), from {loop.place.function}:"
        yield from (f"    {line}" for line in loop.loss.text.splitlines()[1:])


def _base_rates(seen: Seen) -> tuple[float, ...]:
    """Return the rates that are not a step's of a schedule: those of all steps where they do not change, or else those that the optimizer
    was made with."""
    constant = len(seen.steps) > 1 and len({step.rates for step in seen.steps}) == 1
    first = seen.steps[0].rates if constant else seen.made_with[id(seen.steps[0].optimizer)]
    return (*first, *(rate for one in seen.together for rate in seen.made_with[id(one)]))


_AVERAGE = re.compile("(?i:ema)|.*(EMA|Ema([A-Z]|$)|MovingAverage|AveragedModel)|(.*_)?ema(_.*)?")


def _averages(seen: Seen) -> str:
    """Return the names of what keeps an average of the weights, by what it or its class is called; empty without any."""
    found = {
        name: value
        for place in seen.backward.places
        if place.is_the_scripts
        for name, value in names_around(place)
        if _AVERAGE.fullmatch(name) or _AVERAGE.fullmatch(type(value).__name__)
    }
    objects = {name: value for name, value in found.items() if not isinstance(value, type)}
    kept = (name for name, value in objects.items() if isinstance(value, nn.Module | dict) or hasattr(value, "update"))
    return ", ".join(sorted(kept))


def _clips(loop: Loop) -> str:
    if loop.seen.max_gradient_norm is None:
        return ""
    return (
        f"; it clips the mean at {_clipped_at(loop):.3g} where the script clips the sum at {loop.seen.max_gradient_norm:.3g}, and so the same steps "
        "at the script's own batch"
    )


def _rounds_of_runs(seen: Seen) -> int | None:
    """Return how many runs the script makes; None where that is not to be seen."""
    loops = ((loop, place) for place in seen.backward.places for loop in place.loops)
    rounds = [rounds_of(loop, place, None) for loop, place in loops if seen.begins_anew(loop, place)]
    return math.prod(one for one in rounds if one is not None) if None not in rounds else None


def _told(loop: Loop) -> Iterator[str]:
    source = loop.batches.source
    if loop.seen.goes_on:
        yield (
            "it went on from a checkpoint: the study is of the rest of its run, from the weights and the learning rate of the checkpoint, and without "
            "the optimizer's state; to study a whole run, move the checkpoint away, or leave out the argument that names it, and init again"
        )
    if (rounds := _rounds_of_runs(loop.seen)) != 1:
        yield (
            f"it makes its model and its optimizer anew in each of {rounds or 'several'} rounds of a loop: the study is of one of these runs, as long as one"
        )
    if (anew := optimizer_anew(loop.seen)) is not None:
        yield (
            f"it has another optimizer in each round of the loop in {anew}, and a study takes all rounds for one run, with one optimizer whose learning rate "
            "and state go on; where each round is a run of its own, set sample_budget, and real_run where the study has one, to the samples of one"
        )
    if changes := changes_later(loop):
        yield f"later in its run it changes what a study keeps as in the first step: {', '.join(changes)}"
    if (again := trains_again(loop.seen)) is not None:
        yield f"it trains again after that, in {again}: the study is of the first training alone"
    if isinstance(source, FromLoader) and loop.validation is None:
        others = {loop.name_of(one) for one in loop.seen.loaders if one.dataset is not source.loader.dataset}
        named = f"no other loader of the script ({', '.join(sorted(others))}) has a name of validation data (val_loader, say)"
        yield f"{named if others else 'no other loader of the script is of validation data'}, so {every_tenth(source.loader.dataset)}"
    if is_for_tests(name := _name_of_validation(loop)):
        yield (
            f"no validation data were found, so the study chooses by {name}; a test score on it afterwards looks better than it is"
        )
    if isinstance(source, FromLoader) and draws_at_will(source.loader):
        yield (
            f"its sampler draws {num_samples_in_pass(source.loader):,} samples out of {num_samples_of(source.loader.dataset):,} for a pass, some of them "
            "perhaps several times; a study takes each of its set once before any comes again"
        )
    if isinstance(source, FromLoader) and loop.seen.same_in_each_step and not loop.seen.fetched_between:
        yield "its second step takes the batch of the first once more, and each step of a study has samples of its own"
    if isinstance(source, FromCall):
        yield f"its batches come from {source.text}: their rows are the samples"
        if source.validation is None:
            yield "no call for validation data was found, so fresh batches of the training data are evaluated"
    scales_with_gradient = type(loop.optimizer).__name__ in ("SGD", "ASGD")
    if loop.sums and scales_with_gradient:
        raise ValueError(
            f"its loss is a sum over the batch, and {type(loop.optimizer).__name__} does not divide by the gradient's size, so that its learning "
            "rate is another at every batch; divide the loss by the number of samples, and multiply the rate by it"
        )
    if not loop.is_averaged and scales_with_gradient:
        raise ValueError(
            f"it adds up the gradients of {loop.num_micro_batches} micro-batches, and {type(loop.optimizer).__name__} does not divide by the "
            f"gradient's size; divide the loss by {loop.num_micro_batches}, and multiply the learning rate by it"
        )
    if loop.sums:
        yield f"its loss is a sum over the batch; a study takes the mean, whose gradient does not grow with the batch{_clips(loop)}"
    if not loop.is_averaged:
        yield (
            f"it adds up the gradients of {loop.num_micro_batches} micro-batches, where a study takes their mean: its optimizer divides by the "
            f"gradient's size{_clips(loop)}"
        )
    if loop.seen.together:
        yield (
            f"its {len(loop.seen.optimizers)} optimizers step together, and a study has one with the groups of all: its learning rate is that of "
            "the first, and those of the others keep their ratio to it"
        )
    if averages := _averages(loop.seen):
        yield (
            f"it averages its weights ({averages}), and a study judges the weights themselves; ema_half_life_samples has it judge an average, too"
        )
    if any(map(checkpoints_itself, loop.seen.pristine.values())):
        yield OWN_CHECKPOINTING
    if loop.seen.compiled:
        yield "torch.compile is the study's to decide"
