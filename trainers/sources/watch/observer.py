"""What a script does until its second optimizer step: its optimizer, its batches, the module that it trains, and where it calls backward.

Everything that is seen belongs to the script, and goes on to change after it was seen: what a replay needs is copied at once.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import gc
import inspect
import math
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from batchscout.trainers.criteria import IGNORED_TARGET
from batchscout.trainers.having import having
from batchscout.trainers.sources.kinds import is_lightning_trainer, is_transformers_trainer
from batchscout.trainers.sources.watch.batches import same_numbers
from batchscout.trainers.sources.watch.flags import Option, options_of_parser
from batchscout.trainers.sources.watch.on_import import on_import
from batchscout.trainers.sources.watch.statements import Loop, compiled, loops_around, parsed
from batchscout.trainers.user_code import is_librarys

STEPS = 2
"""So many optimizer steps tell a schedule from a constant rate, and two optimizers that take turns from one."""
BATCHES_KEPT = 3
"""Loaders that fetch ahead have yielded more than the one that is trained on."""
MOST_BACKWARDS = 64
"""So many calls of backward without an optimizer, and a script changes its weights by hand."""
_LOAD_THEMSELVES = tuple(
    kind for kind in vars(lr_scheduler).values() if "load_state_dict" in getattr(kind, "__dict__", {})
)
"""The schedules of torch, but for those that load their state as the first of them does."""
_MADE_APART = (LRScheduler, ReduceLROnPlateau, SequentialLR, ChainedScheduler)
"""The first schedule of torch, and those that are made without a call of its `__init__`."""
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


class Enough(BaseException):
    """Ends a script: what there is to be seen has been seen. No script catches it by `except Exception`."""


@dataclass(frozen=True)
class RandomState:
    """The generators that a loss may draw from."""

    torch_cpu: Tensor
    torch_cuda: list[Tensor]
    numpy: Any
    python: Any

    @staticmethod
    def now() -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return RandomState(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def put_back(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@dataclass(frozen=True)
class Place:
    """A place in the code, and what its names stood for when it was reached."""

    file: str
    position: tuple[int, int]
    """The line and the column of the call."""
    function: str
    local: Mapping[str, Any]
    global_: dict[str, Any]
    is_the_scripts: bool
    """False of a library's."""

    @property
    def names(self) -> dict[str, Any]:
        return {**self.global_, **self.local}

    @property
    def loops(self) -> list[Loop]:
        """Those of its function around it, the innermost first."""
        return loops_around(parsed(self.file), self.position)

    def get(self, name: str) -> Any:
        """Return what a name stands for, or an attribute of one; None where it stands for nothing."""
        first, *attributes = name.split(".")
        found = self.local[first] if first in self.local else self.global_.get(first)
        try:
            return functools.reduce(getattr, attributes, found)
        except Exception:  # of the script's own objects, whose attributes may be computed
            return None


def value_of(node: ast.expr, place: Place) -> Any:
    """Return what a plain expression stands for: a number, a name, an attribute, a length, or arithmetic of these; None of anything
    else."""
    if not all(isinstance(one, _PLAIN) or _is_of_arithmetic(one) for one in ast.walk(node)):
        return None
    try:
        return eval(compiled(node), place.names)  # names and numbers of the script's own
    except Exception:  # a name that is given a value later
        return None


def _is_of_arithmetic(node: ast.AST) -> bool:
    """True of a call that can be made again: `len(X)`, `X.size(0)`, `math.ceil(a / b)`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _ARITHMETIC


_ARITHMETIC = ("len", "size", "int", "min", "max", "abs", "round", "ceil", "floor")
_PLAIN = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Constant,
    ast.BinOp,
    ast.operator,
    ast.UnaryOp,
    ast.unaryop,
    ast.IfExp,
    ast.Compare,
    ast.cmpop,
    ast.expr_context,
)


@dataclass(frozen=True)
class Fetched:
    """A batch that a loader has yielded."""

    loader: DataLoader[Any]
    batch: Any
    """As it was: loaders fill their buffers again."""
    random: RandomState


@dataclass(frozen=True)
class Backward:
    """The first call of backward in an optimizer step."""

    loss: Tensor
    value: float
    all_places: tuple[Place, ...]
    """That led to it, the innermost first: the script's, and those of libraries but torch, which may have the loop."""
    fetched: tuple[Fetched, ...]
    """The last batches by then, the latest first."""
    random: RandomState
    """When the module was called first since the step before."""
    scaled_by: float
    """A GradScaler's factor; 1 without one."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """What it gave, by the id of the parameter."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The script's own."""
        return tuple(one for one in self.all_places if one.is_the_scripts)

    @property
    def all_loops(self) -> list[Loop]:
        return [loop for place in self.all_places for loop in place.loops]


@dataclass(frozen=True)
class Step:
    optimizer: Optimizer
    rates: tuple[float, ...]
    """Of the groups, as they were in it."""
    num_backwards: int
    places: frozenset[tuple[str, tuple[int, int]]]
    """From where backward was called since the step before."""
    gradient_changed: bool
    """By something else than backward, a scaler and the clipping of its norm."""
    weights_changed: bool
    """Since the step before, by something else than that one."""
    calls: Mapping[int, float] = field(default_factory=dict)
    """How far each schedule was by then, by its id."""


@dataclass
class Seen:
    """All of it, as far as the script came."""

    steps: list[Step] = field(default_factory=list)
    first_backward: Backward | None = None
    pristine: dict[int, nn.Module] = field(default_factory=dict)
    """Copies of the modules that are trained, as they were before their first forward, by the id of the script's own."""
    modules: dict[int, nn.Module] = field(default_factory=dict)
    """The script's own."""
    parts: dict[int, list[nn.Module]] = field(default_factory=dict)
    """All that these consist of, in the order of `modules()`."""
    places_again: tuple[Place, ...] = ()
    """The same as of the first call of backward, of the last one."""
    together: list[Optimizer] = field(default_factory=list)
    """Others of the class of the one that steps, which step with it, each for weights of its own."""
    made_with: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """The learning rates that the groups of an optimizer had when it was made, by its id."""
    made_at: dict[int, frozenset[tuple[str, int]]] = field(default_factory=dict)
    """The files and lines that were being run when an optimizer or a parameter was made, by its id."""
    schedulers: list[LRScheduler] = field(default_factory=list)
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    """In the order in which they were made."""
    parameters: dict[int, list[nn.Parameter]] = field(default_factory=dict)
    """The script's own parameters, by the id of their module."""
    own: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """The attributes of these parts, while they are the script's own."""
    in_use: int = 0
    """The number of the copies whose attributes the parts have now; 0: their own."""
    ignored_targets: set[int] = field(default_factory=set)
    """What a target has that does not count, in the calls of cross-entropy while a module was trained."""
    max_gradient_norm: float | None = None
    clipped_values: bool = False
    clipped_otherwise: bool = False
    """By another norm than the 2-norm, or that of a part of the gradient."""
    clipped_times: float = 1.0
    """What a GradScaler had multiplied the gradient by when its norm was clipped; 1 where it had been divided by that again."""
    other_optimizers: list[Optimizer] = field(default_factory=list)
    """Made, and not stepped."""
    modes: dict[int, list[bool]] = field(default_factory=dict)
    """Whether each part of a module was in training mode in its first forward."""
    autocast: torch.dtype | None = None
    """In which the module was called."""
    allows_tf32: bool = False
    """Then, too: of products of float32 on a GPU."""
    called_with: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    """Copies of the arguments of the first call of a module that is trained."""
    set_anew: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Numbers and words of modules that the script has changed from one call of them to the next: what they were, and have become."""
    same_in_each_step: bool = False
    """True if a module is called with the same numbers in the second step, too."""
    fetched_between: bool = False
    """True if a loader yielded a batch between the first step and the second."""
    compiled: bool = False
    goes_on: bool = False
    """True if it loads the state of an optimizer or a schedule that was in use: it goes on from a checkpoint."""
    options: list[Option] = field(default_factory=list)
    """Of the script's argument parsers, with what it was called with."""
    handed: Any = None
    """What was to be trained elsewhere: a Trainer of transformers, or what Lightning's was called with."""

    @property
    def backward(self) -> Backward:
        """The first: every script has one that is not refused."""
        assert self.first_backward is not None
        return self.first_backward

    def loops_of(self, place: Place) -> list[Loop]:
        """Return those around a place, in its function, that a run has, the innermost first."""
        return [loop for loop in place.loops if not self.begins_anew(loop, place)]

    def begins_anew(self, loop: Loop, place: Place) -> bool:
        """True if each round of a loop makes a model and its optimizer, for a seed, or a fold of the data: it is a run of its own. False where a part
        of the model was made before it, as of one that is given another head for each task, and goes on."""
        of_model = [p for group in self.steps[0].optimizer.param_groups for p in group["params"]]
        known = [self.made_in(loop, place, p) for p in of_model if id(p) in self.made_at]
        return self.made_in(loop, place, self.steps[0].optimizer) and any(known) and all(known)

    def made_in(self, loop: Loop, place: Place, one: object) -> bool:
        """True of an optimizer or a parameter that a loop around a place has made."""
        lines = (line for file, line in self.made_at.get(id(one), ()) if file == place.file)
        return any(loop.body[0].lineno <= line <= (loop.end_lineno or loop.lineno) for line in lines)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All that take a step."""
        return (self.steps[0].optimizer, *self.together)

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """The one that steps; of several that step together, one that has the groups of all."""
        if not self.together:
            return self.steps[0].optimizer
        whole = copy.copy(self.steps[0].optimizer)
        whole.param_groups = [group for one in self.optimizers for group in one.param_groups]
        return whole


@contextlib.contextmanager
def observed(folder: Path) -> Iterator[Seen]:
    """Yield what fills while a script of this folder runs in this block, which `Enough` leaves when that is all."""
    observer = _Observer(folder)
    with contextlib.ExitStack() as stack:
        for owner, name, around in observer.wrapped():
            stack.enter_context(_replaced(owner, name, around))
        stack.callback(register_module_parameter_registration_hook(observer.parameter_made).remove)
        stack.callback(register_optimizer_step_pre_hook(observer.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(observer.after_step).remove)
        replaced = stack.enter_context(contextlib.ExitStack())
        stack.enter_context(on_import(_TRAIN_THEMSELVES, lambda module: observer.stop_at(module, replaced)))
        with contextlib.suppress(Enough):
            yield observer.seen
    stepped = {id(one) for one in (*(step.optimizer for step in observer.seen.steps), *observer.seen.together)}
    observer.seen.other_optimizers = [one for one in observer.optimizers if id(one) not in stepped]


def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> AbstractContextManager[None]:
    before = getattr(owner, name)
    return having(owner, name, functools.wraps(before)(around(before)))


class _Observer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = Seen()
        self._memo: dict[int, Any] = {}
        self.optimizers: list[Optimizer] = []
        self._depth = 0
        self._num_backwards = 0
        self._backed_from = set[tuple[str, tuple[int, int]]]()
        self._norm: float | None = None
        self._settings: dict[int, dict[str, Any]] = {}
        """The numbers and words that a module had after its last call, by its id."""
        self._weights: dict[nn.Parameter, tuple[str, str]] = {}
        """As the last step left them."""
        self._untrained: dict[nn.Parameter, tuple[nn.Module, tuple[str, str]]] = {}
        """Parameters that no optimizer has, with the part that they are of, and as the last step left them."""
        self._moved, self._run = set[int](), set[int]()
        """The ids of the parts whose untrained parameters are others since the last step, and of those that were called since."""
        self._scaled_by = self._times = 1.0
        """A GradScaler's factor in the loss, and in the gradient, which it is taken out of again."""
        self._in_step: RandomState | None = None
        self._fetched: deque[Fetched] = deque(maxlen=BATCHES_KEPT)
        self._given: tuple[Any, ...] | None = None
        """What a module was called with in the first step, until it is compared with that of the second."""

    def wrapped(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        """Return what is called through this observer: the owner, the name, and what is to be put around it."""
        clip = torch.nn.utils.clip_grad
        return [
            (Optimizer, "__init__", _noted(self._optimizer_made)),
            (Optimizer, "add_param_group", _noted(self._group_added)),
            *((kind, "load_state_dict", _noted(self._state_loaded)) for kind in (Optimizer, *_LOAD_THEMSELVES)),
            *((kind, "__init__", _noted(self._scheduler_made)) for kind in _MADE_APART),
            (DataLoader, "__init__", _noted(self._loader_made)),
            (DataLoader, "__iter__", self._iterated),
            (nn.Module, "__call__", self._called),
            *((owner, "backward", self._backward_called) for owner in (Tensor, torch.autograd)),
            (torch, "compile", self._compiled),
            (argparse.ArgumentParser, "parse_known_args", self._parsed),
            (torch.amp.GradScaler, "scale", _noted(self._scaled)),
            (torch.amp.GradScaler, "unscale_", _noted(self._unscaled)),
            *((torch.nn.functional, name, _noted(self._cross_entropy)) for name in ("cross_entropy", "nll_loss")),
            *((owner, "clip_grad_norm_", self._norm_clipped) for owner in (torch.nn.utils, clip)),
            *((owner, "clip_grad_value_", _noted(self._values_clipped)) for owner in (torch.nn.utils, clip)),
        ]

    # What is made

    def _optimizer_made(self, optimizer: Optimizer, *_: object, **__: object) -> None:
        self.optimizers.append(optimizer)
        self.seen.made_with[id(optimizer)] = _rates(optimizer)
        self.seen.made_at[id(optimizer)] = _lines()

    def parameter_made(self, _module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
        self.seen.made_at[id(parameter)] = _lines()

    def _group_added(self, optimizer: Optimizer, *_: object, **__: object) -> None:
        if id(optimizer) in self.seen.made_with:  # and not while it is made
            self.seen.made_with[id(optimizer)] += _rates(optimizer)[-1:]

    def _scheduler_made(self, scheduler: LRScheduler, *_: object, **__: object) -> None:
        self.seen.schedulers.append(scheduler)

    def _state_loaded(self, owner: Optimizer | LRScheduler, *_: object, **__: object) -> None:
        in_use = bool(owner.state) if isinstance(owner, Optimizer) else _num_calls(owner) > 0
        self.seen.goes_on |= in_use and not self.seen.steps

    def _loader_made(self, loader: DataLoader[Any], *_: object, **__: object) -> None:
        self.seen.loaders.append(loader)

    def _compiled(self, compile: Callable[..., Any]) -> Callable[..., Any]:
        def as_it_is(model: Any = None, **kwargs: Any) -> Any:  # compiling is the study's to decide, and takes minutes
            self.seen.compiled = True
            return model if model is not None else lambda function: function

        return as_it_is

    def stop_at(self, module: ModuleType, replaced: contextlib.ExitStack) -> None:
        """Have a Trainer's own loop end the watch where it would begin."""
        trainer = vars(module)["Trainer"]
        replaced.enter_context(_replaced(trainer, _TRAIN_THEMSELVES[module.__name__], self._handed_over))

    def _handed_over(self, train: Callable[..., Any]) -> Callable[..., Any]:
        def handed(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.handed = handed_over(trainer, args, kwargs)
            raise Enough

        return handed

    def _parsed(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def parsed(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            found = parse(parser, *args, **kwargs)
            self.seen.options += options_of_parser(parser._actions, vars(found[0]))  # it has no public list of them
            return found

        return parsed

    # What is run

    def _iterated(self, iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def iterated(loader: DataLoader[Any]) -> Iterator[Any]:
            return _Batches(iterate(loader), loader, self._fetch)

        return iterated

    def _fetch(self, loader: DataLoader[Any], batch: Any) -> None:
        self._end_where_all_is_seen()
        self.seen.fetched_between |= bool(self.seen.steps) and torch.is_grad_enabled()
        if self.seen.first_backward is None and torch.is_grad_enabled():  # and not to evaluate something
            self._fetched.appendleft(Fetched(loader, copied(batch), RandomState.now()))

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._end_where_all_is_seen()
            self._run.add(id(module))
            is_outermost = self._depth == 0 and torch.is_grad_enabled() and module.training
            if is_outermost:
                self._before_forward(module, args, kwargs)
                self._note_what_was_set(module)
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1
                if is_outermost:
                    self._settings |= {id(part): _settings_of(part) for part in module.modules()}

        return called

    def _note_what_was_set(self, module: nn.Module) -> None:
        for part in module.modules():
            now, kind = _settings_of(part), type(part)
            before = self._settings.get(id(part), now)
            changed = {name: (before.get(name), value) for name, value in now.items() if before.get(name) != value}
            self.seen.set_anew |= {
                f"{kind.__name__}.{name}": values for name, values in changed.items() if _is_read(kind, name)
            }

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._in_step is None:
            self._in_step = RandomState.now()
            # What a forward moves itself, as a codebook, it does in a study, too.
            self._moved = {id(part) for p, (part, sums) in self._untrained.items() if _sums(p) != sums}
        kind = next(module.parameters(), torch.empty(0)).device.type
        if torch.is_autocast_enabled(kind):
            self.seen.autocast = torch.get_autocast_dtype(kind)
        self.seen.allows_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        trained = parameters_of(*self.optimizers)
        if not any(id(p) in trained for p in module.parameters()):
            return
        if self.seen.first_backward is None:
            self._keep(_whole(unwrapped(module), trained))
            if self.seen.called_with is None:
                self.seen.called_with, self._given = copied((args, dict(kwargs))), (*args, *kwargs.values())
        elif self._given is not None and len(self.seen.steps) == 1:
            assert self.seen.called_with is not None
            copies = (*self.seen.called_with[0], *self.seen.called_with[1].values())
            now, given, self._given = (*args, *kwargs.values()), self._given, None
            self.seen.same_in_each_step = len(now) == len(given) and all(
                same_numbers(copy, again) or (again is before and not num_samples_in(again))
                for before, copy, again in zip(given, copies, now, strict=True)
            )

    def _keep(self, module: nn.Module) -> None:
        if id(module) not in self.seen.modules:
            self.seen.modules[id(module)] = module
            self.seen.parts[id(module)] = list(module.modules())
            self.seen.modes[id(module)] = [part.training for part in module.modules()]
            self.seen.own[id(module)] = [part.__dict__ for part in module.modules()]
            self.seen.parameters[id(module)] = list(module.parameters())
            with _leaves_alone(module):
                self.seen.pristine[id(module)] = copy.deepcopy(module, self._memo)

    def _backward_called(self, backward: Callable[..., None]) -> Callable[..., None]:
        def called(tensors: Any, *args: Any, **kwargs: Any) -> None:
            loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
            self._backward(loss, lambda: backward(tensors, *args, **kwargs))

        return called

    def _backward(self, loss: Tensor, run: Callable[[], None]) -> None:
        places = tuple(_places(self.folder))
        own = next((one for one in places if one.is_the_scripts), None)
        if own is None:  # torch's own, within the one that the script has called
            run()
            return
        self._num_backwards += 1
        self._backed_from.add((own.file, own.position))
        if self._num_backwards > MOST_BACKWARDS and not self.optimizers:
            raise Enough
        if self.seen.first_backward is not None:
            self.seen.places_again = places
            run()
            self._norm = self._gradient_norm()
            return
        random = self._in_step or RandomState.now()
        seen = Backward(loss, float(loss.detach()), places, tuple(self._fetched), random, self._scaled_by)
        self.seen.first_backward = seen
        parameters = [p for some in self.seen.parameters.values() for p in some]
        before = {id(p): p.grad.clone() for p in parameters if p.grad is not None}
        run()
        for p in parameters:
            if p.grad is not None:
                seen.gradients[id(p)] = p.grad - before[id(p)] if id(p) in before else p.grad.clone()
        self._norm = self._gradient_norm()

    def _scaled(self, scaler: torch.amp.GradScaler, *_: object, **__: object) -> None:
        self._scaled_by = self._times = scaler.get_scale()

    def _unscaled(self, *_: object, **__: object) -> None:
        self._times = 1.0

    def _cross_entropy(self, *args: Any, **kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.seen.ignored_targets.add(int(kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED_TARGET)))

    def _norm_clipped(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        def clipped(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            given = set(map(id, parameters))
            trained = {id(p) for some in self.seen.parameters.values() for p in some if p.grad is not None}
            found = clip(parameters, max_norm, norm_type, *args, **kwargs)
            if math.isfinite(max_norm):
                self.seen.max_gradient_norm, self.seen.clipped_times = float(max_norm), self._times
                self.seen.clipped_otherwise |= norm_type != 2.0 or not trained <= given
            self._norm = self._gradient_norm()
            return found

        return clipped

    def _values_clipped(self, *_: object, **__: object) -> None:
        self.seen.clipped_values = True

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a step, and end the script at the last one that is looked at."""
        if self.seen.steps and not self._num_backwards and self._is_of_the_same_step(optimizer):
            self.seen.together.append(optimizer)
            return
        changed = False
        if self._norm is not None and self._scaled_by == 1:
            changed = not math.isclose(self._gradient_norm(), self._norm, rel_tol=1e-5, abs_tol=1e-12)
        places = frozenset(self._backed_from)
        # An average that the loss does not read may lie in the same module: what it is is not called.
        by_hand = bool(self._moved & self._run) or any(_sums(p) != sums for p, sums in self._weights.items())
        calls = {id(one): _num_calls(one) for one in self.seen.schedulers}
        step = Step(optimizer, _rates(optimizer), self._num_backwards, places, changed, by_hand, calls)
        self.seen.steps.append(step)
        self._num_backwards, self._norm, self._in_step = 0, None, None
        self._backed_from.clear()
        self._run.clear()
        self._end_where_all_is_seen()

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._weights |= {p: _sums(p) for group in optimizer.param_groups for p in group["params"]}
        trained = parameters_of(*self.optimizers)
        own = (
            (part, p) for parts in self.seen.parts.values() for part in parts for p in part.parameters(recurse=False)
        )
        self._untrained = {
            p: (part, _sums(p)) for part, p in own if id(p) not in trained and p.dtype is torch.float32
        }  # of another type they are refused, or are no numbers to average

    def _is_of_the_same_step(self, optimizer: Optimizer) -> bool:
        """True of another optimizer of the same class, which takes the same gradient to other weights."""
        before = self.seen.optimizers
        is_another = all(type(one) is type(optimizer) and one is not optimizer for one in before)
        return is_another and not parameters_of(*before) & parameters_of(optimizer)

    def _end_where_all_is_seen(self) -> None:
        """End the script; again, where it has caught that and goes on."""
        if len(self.seen.steps) >= STEPS:
            raise Enough

    def _gradient_norm(self) -> float:
        gradients = [p.grad for some in self.seen.parameters.values() for p in some if p.grad is not None]
        dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
        return math.hypot(*(float(torch.linalg.vector_norm(one.float())) for one in dense))


def _settings_of(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not name.startswith("_") and name != "training"
    }


def _is_read(kind: type[nn.Module], attribute: str) -> bool:
    """True if code of the class reads the attribute, and does not only set it; and where its code is not there."""
    try:
        return re.search(rf"self\.{attribute}\b(?!\s*[-+*/]?=[^=])", inspect.getsource(kind)) is not None
    except (OSError, TypeError):
        return True


def _sums(parameter: nn.Parameter) -> tuple[str, str]:
    """Return what tells whether a weight is as it was; as text, in which one that is no number equals itself."""
    of_all = parameter.detach()
    return str(of_all.sum().item()), str(of_all.abs().sum().item())


def _noted(note: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what is to be put around a function so that `note` is called after it, with the same arguments."""

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            note(*args, **kwargs)
            return found

        return called

    return around


class _Batches:
    """An iterator over a loader's batches that tells of each."""

    def __init__(self, batches: Iterator[Any], loader: DataLoader[Any], tell: Callable[[DataLoader[Any], Any], None]):
        self._batches, self._loader, self._tell = batches, loader, tell

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._tell(self._loader, batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


_TRAIN_THEMSELVES = {
    "transformers.trainer": "train",
    "lightning.pytorch.trainer.trainer": "fit",
    "pytorch_lightning.trainer.trainer": "fit",
}
"""Where the Trainers are that have a loop of their own, and the method that begins it."""


def handed_over(trainer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what is studied of a Trainer: itself, of transformers; of Lightning what its `fit` was called with, and itself. It has the checkpoint
    that it was told to go on from as `goes_on_from`."""
    if is_transformers_trainer(trainer):
        trainer.goes_on_from = kwargs.get("resume_from_checkpoint", next(iter(args), None)) or None
        return trainer
    assert is_lightning_trainer(trainer)
    names = ("model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path")
    told = dict(zip(names, args, strict=False)) | dict(kwargs)
    trainer.goes_on_from = told.get("ckpt_path")
    module = told["model"]
    if (data := told.get("datamodule")) is not None or hasattr(data := told.get("train_dataloaders"), "setup"):
        return (module, data, trainer)
    if data is None:
        return (module, module, trainer)
    return (module, data, told.get("val_dataloaders"), trainer)


@contextlib.contextmanager
def _leaves_alone(module: nn.Module) -> Iterator[None]:
    """Within this, tensors that a module has computed and kept, as weight_norm does, are cut off from what they were computed of: else
    it could not be copied. They are computed anew in each forward."""
    computed = [
        (part.__dict__, name, value)
        for part in module.modules()
        for name, value in part.__dict__.items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]
    for attributes, name, value in computed:
        attributes[name] = value.detach()
    try:
        yield
    finally:
        for attributes, name, value in computed:
            attributes[name] = value


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module in whatever runs it over several devices, or compiled."""
    while type(module).__name__ in _WRAPPERS:
        name = "_orig_mod" if hasattr(module, "_orig_mod") else "module"
        module = getattr(module, name)
    return module


def _whole(module: nn.Module, trained: set[int]) -> nn.Module:
    """Return the smallest module that has this one in it and all parameters that are trained, or this one where there is none: a script
    may call a part of it, or one of its methods."""
    if trained <= {id(p) for p in module.parameters()}:
        return module
    around = [
        (sum(1 for _ in one.modules()), one)
        for one in gc.get_objects()
        if issubclass(type(one), nn.Module)  # isinstance asks the object, and some are there to warn
        and type(one).__name__ not in _WRAPPERS
        and any(part is module for part in one.modules())
        and trained <= {id(p) for p in one.parameters()}
    ]
    return min(around, key=lambda pair: pair[0])[1] if around else module


def copied(values: Any) -> Any:
    """Return copies of the tensors and arrays in a batch or in arguments, and all else as it is."""
    if isinstance(values, Tensor):
        return values.detach().clone()
    if isinstance(values, np.ndarray):
        return values.copy()
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*map(copied, values))
    if isinstance(values, list | tuple):
        return type(values)(map(copied, values))
    if isinstance(values, dict):
        return {key: copied(value) for key, value in values.items()}
    return copy.copy(values)  # a library's own kind of batch


def num_samples_in(batch: Any) -> int:
    """Return the length of the first dimension of what a batch holds; 0 where nothing has one."""
    if isinstance(batch, Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((size for size in map(num_samples_in, parts) if size), 0)


def parameters_of(*optimizers: Optimizer) -> set[int]:
    """Return the ids of what they train."""
    return {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}


def _num_calls(schedule: LRScheduler) -> float:
    """Return how far a schedule is. One of several that step together counts nothing itself."""
    return _num_calls(schedule._schedulers[0]) if isinstance(schedule, ChainedScheduler) else schedule.last_epoch


def _rates(optimizer: Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


def _places(folder: Path) -> Iterator[Place]:
    """Yield the places that led here. None where torch called itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is not None and _module_of(frame).split(".")[0] == "torch":
        return
    while frame is not None and not _module_of(frame).startswith("batchscout.trainers.sources.watch"):
        file = frame.f_code.co_filename
        if not file.startswith("<") and _module_of(frame).split(".")[0] != "torch":
            names = dict(frame.f_locals), dict(frame.f_globals)
            is_the_scripts = Path(file).parent == folder or not is_librarys(Path(file))
            yield Place(file, _position(frame), frame.f_code.co_name, *names, is_the_scripts)
        frame = frame.f_back


def _lines() -> frozenset[tuple[str, int]]:
    """Return the files and lines that are being run."""
    lines, frame = set[tuple[str, int]](), sys._getframe(1)
    while frame is not None:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frozenset(lines)


def _position(frame: FrameType) -> tuple[int, int]:
    """Return the line and the column of the call that a frame is in."""
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return line or frame.f_lineno, column or 0


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
