"""A loop that was watched, as a study takes it: a module that gives the loss of a batch, its data, and its recipe."""

from __future__ import annotations

import ast
import math
import weakref
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from batchscout.trainers.sources.optimizers import groups_of, optimizer_keys
from batchscout.trainers.sources.schedules import ALIKE, schedule_like
from batchscout.trainers.sources.settings import Settings
from batchscout.trainers.sources.takes_batch import TakesBatch
from batchscout.trainers.sources.watch.batches import (
    FromCall,
    FromLoader,
    batch_size_of,
    draws_at_will,
    loaders_of,
    num_samples_in_pass,
    validation_loader,
    with_plain_batches,
    within,
)
from batchscout.trainers.sources.watch.length import run_samples, value_of
from batchscout.trainers.sources.watch.observer import Place, Seen, num_samples_in
from batchscout.trainers.sources.watch.rates import rates_of_run
from batchscout.trainers.sources.watch.replay import Copies, LossOfBatch, give_back


@dataclass(frozen=True)
class Loop:
    """What a script's loop trains, and how. One of these serves a whole process: its modules are copied for each run."""

    seen: Seen
    loss: LossOfBatch
    sums: bool = False
    """True if the loss of a batch is the sum of those of its samples."""

    @property
    def optimizer(self) -> Optimizer:
        return self.seen.steps[0].optimizer

    @property
    def validation(self) -> DataLoader[Any] | None:
        if not isinstance(self.loss.source, FromLoader):
            return None
        assert self.seen.backward is not None
        named = {name: value for place in reversed(self.seen.backward.places) for name, value in _names(place)}
        return validation_loader(self.loss.source.loader, self.seen.loaders, named)

    @property
    def loaders(self) -> tuple[Any, Any]:
        found = loaders_of(self.loss.source, self.validation)
        return (with_plain_batches(found[0]), with_plain_batches(found[1])) if self.boxes else found

    @property
    def boxes(self) -> bool:
        """True if its batches are dictionaries of a library's own kind, such as a tokenizer's: a study passes plain ones on."""
        return isinstance(self.loss.first, UserDict)

    @property
    def num_micro_batches(self) -> int:
        """Of an optimizer step."""
        return max(1, self.seen.steps[-1].num_backwards)  # the first step of some comes too early

    @property
    def is_averaged(self) -> bool:
        """True if the gradient of a step is the mean of those of its micro-batches, or there is a single one."""
        assert self.seen.backward is not None
        count = self.num_micro_batches
        if count == 1 or self.loss.factor != self.seen.backward.scaled_by:
            return True
        return self._is_divided(count)

    def _is_divided(self, count: int) -> bool:
        """True if the script's statements divide the loss by so many."""
        code = self.loss.code
        inner = (one for part in code.statements for one in ast.walk(part))
        made = [
            code.loss,
            *(one for one in inner if isinstance(one, ast.Assign | ast.AugAssign) and _makes(one, code.loss)),
        ]
        return any(_divides(node, count, self.loss.place) for part in made for node in ast.walk(part))

    @property
    def times(self) -> float:
        """By what the statements' loss is multiplied to be that of its micro-batch alone."""
        assert self.seen.backward is not None
        divided = self.loss.factor == self.seen.backward.scaled_by and self.num_micro_batches > 1
        return float(self.num_micro_batches) if divided and self._is_divided(self.num_micro_batches) else 1.0


def _makes(statement: ast.Assign | ast.AugAssign, loss: ast.expr) -> bool:
    """True if it gives a value to what the loss is made of in the end: `loss = loss / 4`."""
    names = {ast.unparse(one) for one in ast.walk(loss) if isinstance(one, ast.Name | ast.Attribute)}
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return any(ast.unparse(one) in names for one in targets)


def _divides(node: ast.AST, count: int, place: Place) -> bool:
    """True of a division by so many, or a product with one part of so many, of something that was computed before."""
    if not isinstance(node, ast.AugAssign | ast.BinOp):
        return False
    left, by = (node.target, node.value) if isinstance(node, ast.AugAssign) else (node.left, node.right)
    calls = [one for one in ast.walk(left) if isinstance(one, ast.Call)]
    if any(len(one.args) == 1 and not isinstance(one.args[0], ast.Name) for one in calls):
        return False  # within a call: `model(x / 4)`
    match node.op:
        case ast.Div():
            return value_of(by, place) == count
        case ast.Mult():
            return value_of(by, place) == 1 / count
        case _:
            return False


def _names(place: Any) -> Iterator[tuple[str, Any]]:
    yield from place.global_.items()
    yield from place.local.items()
    for value in [*place.global_.values(), *place.local.values()]:
        if type(value) is dict:  # `loaders["val"]`
            yield from ((str(key), one) for key, one in value.items() if isinstance(one, DataLoader))
    for value in list(place.local.values()):  # the loaders of a class that trains
        if not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
            yield from vars(value).items()


class OfLoop(TakesBatch):
    """inner: a copy of what the script trains. Called with a batch, it returns the loss that the script computes of it."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        copies = Copies(loop.seen)
        modules = list(copies.modules.values())
        self.inner = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self.loop, self.copies = _Held(loop), copies
        copies.put_in_use(loop.seen)
        weakref.finalize(self, give_back, loop.seen, copies.number)

    def train(self, mode: bool = True) -> OfLoop:
        """As of any module, but what the script trains in evaluation mode stays so."""
        super().train(mode)
        if mode and hasattr(self, "copies"):
            for key, parts in self.copies.parts.items():
                for part, was_training in zip(parts, self.loop.one.seen.modes[key], strict=True):
                    part.training = was_training
        return self

    def forward(self, batch: Any) -> Any:
        loop = self.loop.one
        self.copies.put_in_use(loop.seen)
        loss = loop.loss.call(type(loop.loss.first)(batch) if loop.boxes else batch) * loop.times
        if not loop.sums:
            return loss
        return loss, torch.tensor(num_samples_in(batch), device=loss.device)


@dataclass
class _Held:
    """Not a part of the module, and not copied with it."""

    one: Loop

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


def groups(model: OfLoop) -> list[dict[str, Any]]:
    """Return the groups of the script's optimizer, of the parameters of this copy."""
    loop = model.loop.one
    ours = {id(own): again for own, again in _pairs(loop.seen, model.copies.modules)}
    return [
        {**group, "params": [ours[id(one)] for one in group["params"] if id(one) in ours]}
        for group in groups_of(loop.optimizer)
    ]


def _pairs(seen: Seen, copies: dict[int, nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    for key, originals in seen.parameters.items():
        yield from zip(originals, copies[key].parameters(), strict=True)


def settings(loop: Loop) -> Settings:
    """Return what the script's optimizer, schedule and loop say."""
    for group, rate in zip(loop.optimizer.param_groups, _base_rates(loop.seen), strict=True):
        group.setdefault("initial_lr", rate)
    keys: dict[str, Any] = {"optimizer": optimizer_keys(loop.optimizer), "precision": _precision(loop.seen)}
    batch = _samples_per_step(loop)
    length = run_samples(loop.loss, loop.seen, batch // loop.num_micro_batches)
    told = list(_schedule(loop, keys, batch, length))
    keys["optimizer"] |= {"reference_batch_size": batch, "max_gradient_norm": loop.seen.max_gradient_norm}
    return Settings(keys, (*told, *_told(loop)), length, tuple(_taken(loop, batch)))


def _schedule(loop: Loop, keys: dict[str, Any], batch: int, length: int | None) -> Iterator[str]:
    """Set the schedule to the script's own, over its whole run, and the rate to the highest of it; yield what is to be told."""
    source = loop.loss.source
    per_pass = num_samples_in_pass(source.loader) if isinstance(source, FromLoader) else None
    steps = max(2, math.ceil((length or batch) / batch))
    rates = rates_of_run(loop.seen, steps, per_pass / batch if per_pass else None) if length else None
    if rates is None and len({step.rates for step in loop.seen.steps}) == 1 and not loop.seen.schedulers:
        rates = [loop.seen.steps[0].rates[0]] * 2
    if rates is None:
        yield (
            f"how its learning rate changes over its run could not be foretold ({loop.seen.steps[0].rates[0]:.3g} in its first step, "
            f"{keys['optimizer']['lr']:.3g} when the optimizer was made); a study takes its own warm-up and warmup_stable_decay to the latter: "
            "set schedule to choose another"
        )
        return
    keys["schedule"], highest = schedule_like(rates)
    keys["optimizer"]["warmup"] = 0
    if not math.isclose(
        highest, keys["optimizer"]["lr"], rel_tol=ALIKE
    ):  # the highest may lie between two steps that were looked at
        keys["optimizer"]["lr"] = highest


def _of_data(loop: Loop) -> str:
    source = loop.loss.source
    if not isinstance(source, FromLoader):
        return (
            source.text
            if isinstance(source, FromCall)
            else f"the rows of {' and '.join(source.names)}, of which a tenth is held out"
        )
    train = f"{_name_of(loop, source.loader)} ({_size(source.loader)})"
    if loop.validation is None:
        return f"{train}, of which a tenth is held out"
    return f"{train}, and {_name_of(loop, loop.validation)} ({_size(loop.validation)}) to validate on"


def _name_of(loop: Loop, loader: DataLoader[Any]) -> str:
    assert loop.seen.backward is not None
    named = (name for place in loop.seen.backward.places for name, value in _names(place) if within(value) is loader)
    return next(named, "a DataLoader")


def _size(loader: DataLoader[Any]) -> str:
    number = num_samples_in_pass(loader)
    return "a stream" if number is None else f"{number:,} samples"


def _taken(loop: Loop, batch: int) -> Iterator[str]:
    modules = list(loop.seen.pristine.values())
    sizes = [sum(p.numel() for p in one.parameters()) for one in modules]
    names = " and ".join(
        f"{type(one).__name__} ({size:,} parameters)" for one, size in zip(modules, sizes, strict=True)
    )
    parts = f", {loop.num_micro_batches} micro-batches to a step" if loop.num_micro_batches > 1 else ""
    yield f"model: {names}"
    yield f"optimizer: {type(loop.optimizer).__name__}, {batch} samples a step{parts}"
    yield f"data: {_of_data(loop)}"
    yield f"loss of a batch (replayed, it gives the loss and the gradient that were seen), from {loop.loss.place.function}:"
    yield from (f"    {line}" for line in loop.loss.text.splitlines()[1:])


def _precision(seen: Seen) -> str:
    return {torch.bfloat16: "bfloat16", torch.float16: "float16"}.get(seen.autocast or torch.float32, "float32")


def _samples_per_step(loop: Loop) -> int:
    if isinstance(loop.loss.source, FromLoader):
        return batch_size_of(loop.loss.source.loader) * loop.num_micro_batches
    return num_samples_in(loop.loss.first) * loop.num_micro_batches


def _base_rates(seen: Seen) -> tuple[float, ...]:
    """Return the rates that are not a step's of a schedule: those of all steps where they do not change, or else those that the optimizer
    was made with."""
    constant = len(seen.steps) > 1 and len({step.rates for step in seen.steps}) == 1
    return seen.steps[0].rates if constant else seen.made_with[id(seen.steps[0].optimizer)]


def _scales_with_gradient(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ in ("SGD", "ASGD")


def _told(loop: Loop) -> Iterator[str]:
    source = loop.loss.source
    if isinstance(source, FromLoader) and loop.validation is None:
        yield "no other loader of the script is of validation data, so every tenth sample is held out and only evaluated"
    if isinstance(source, FromLoader) and draws_at_will(source.loader):
        yield "its sampler draws some samples several times in a pass and others not at all; a study takes each once"
    if isinstance(source, FromCall):
        yield f"its batches come from {source.text}: their rows are the samples"
        if source.validation is None:
            yield "no call for validation data was found, so fresh batches of the training data are evaluated"
    if loop.sums and _scales_with_gradient(loop.optimizer):
        raise ValueError(
            f"its loss is a sum over the batch, and {type(loop.optimizer).__name__} does not divide by the gradient's size, so that its learning "
            "rate is another at every batch; divide the loss by the number of samples, and multiply the rate by it"
        )
    if not loop.is_averaged and _scales_with_gradient(loop.optimizer):
        raise ValueError(
            f"it adds up the gradients of {loop.num_micro_batches} micro-batches, and {type(loop.optimizer).__name__} does not divide by the "
            f"gradient's size; divide the loss by {loop.num_micro_batches}, and multiply the learning rate by it"
        )
    if loop.sums:
        yield "its loss is a sum over the batch; a study takes the mean, whose gradient does not grow with the batch"
    if not loop.is_averaged:
        yield (
            f"it adds up the gradients of {loop.num_micro_batches} micro-batches, where a study takes their mean: its optimizer divides by the "
            "gradient's size, and what it clips is another"
        )
    if loop.seen.compiled:
        yield "torch.compile is the study's to decide"
