"""Runs a script until its second optimizer step, and returns what a study takes of it. Once in a process: every run has its copies."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import io
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchscout.trainers.errors import LossNotSeen, NoStudy, raised_where
from batchscout.trainers.files import quoted
from batchscout.trainers.sources.kinds import is_lightning_run, is_transformers_trainer
from batchscout.trainers.sources.watch.flags import Option, options_by_name
from batchscout.trainers.sources.watch.loop import Loop
from batchscout.trainers.sources.watch.observer import STEPS, RandomState, Seen, observed
from batchscout.trainers.sources.watch.one_process import asks_for_a_launcher, one_process
from batchscout.trainers.sources.watch.refused import refused
from batchscout.trainers.sources.watch.replay import LossOfBatch, NotReplayed, loss_of
from batchscout.trainers.sources.watch.world import WatchStopped, World

SCRIPT_MODULE = "batchscout_watched_script"
_WRITE = (
    "write it as package.module:callable, which takes (module, batch) and returns (loss_sum, num_targets), and name"
)
WRITE_THE_LOSS = f"{_WRITE} it beside from in the study file: loss: package.module:callable (docs/own/script.md)"
LINES_KEPT = 5
"""Of what a script has printed last."""


@dataclass(frozen=True)
class _Loop:
    """A loop, as far as it was understood."""

    seen: Seen
    loss: LossOfBatch | NotReplayed


@dataclass(frozen=True)
class Watched:
    """What came of a script."""

    found: Any
    """A Trainer, what Lightning's `fit` was called with, or a _Loop."""
    options: tuple[Option, ...]
    """What it was called with, and could be."""


def made(
    *,
    script: str,
    args: Sequence[str] = (),
    sums: bool = False,
    own_loss: bool = False,
    flags: Mapping[str, str] | None = None,
    factors: Mapping[str, float] | None = None,
) -> Any:
    """Return what a script trains: a Trainer, what Lightning's `fit` was called with, or a Loop.

    script: a file, or a module as `python -m` takes it. sums: whether its loss is the sum of those of its samples. own_loss: whether
    the study has a loss of its own. flags, factors: those of its own by which its recipe is set, and what they are of its numbers: for
    an export. Raises ValueError, in the user's words, where it cannot be studied.
    """
    found = watched(script, tuple(args)).found
    if isinstance(found, _Loop):
        return _loop(found, sums=sums, own_loss=own_loss)
    if is_transformers_trainer(found):
        return _trainer_again(found)
    assert is_lightning_run(found)
    module = copy.deepcopy(found[0])
    return tuple(module if one is found[0] else one for one in found)


def _trainer_again(trainer: Any) -> Any:
    """Return the Trainer with a model of its own, and with the optimizer that it was given, if it was, over that model's parameters."""
    again, copied = copy.copy(trainer), dict[int, Any]()
    again.model = copy.deepcopy(trainer.model, copied)
    if (given := trainer.optimizer) is not None:
        again.optimizer = object.__new__(type(given))
        groups = [{**group, "params": [copied.get(id(p), p) for p in group["params"]]} for group in given.param_groups]
        # Not by copy: an optimizer copies nothing but its groups, its defaults and its state.
        vars(again.optimizer).update(vars(given), param_groups=groups)
    return again


@functools.lru_cache(maxsize=1)
def watched(script: str, args: tuple[str, ...]) -> Watched:
    """Run it, once in a process. Raises ValueError as `made` does."""
    file, is_module = _file_of(script)
    try:
        seen = _run(script, file, args, is_module=is_module)
    except ValueError as error:
        if not asks_for_a_launcher(error.__cause__):
            raise
        seen = _run(script, file, args, is_module=is_module, launched=True)
    if (reason := refused(seen)) is not None:
        raise NoStudy(reason)
    if seen.handed is not None:
        _put_away(seen)
        return Watched(seen.handed, tuple(seen.options))
    loss = loss_of(seen)
    _put_away(seen)
    place = loss.place if isinstance(loss, LossOfBatch) else seen.backward.places[0]
    by_name = options_by_name(args, place.global_)
    return Watched(_Loop(seen, loss), (*seen.options, *by_name))


def _loop(found: _Loop, *, sums: bool, own_loss: bool) -> Loop:
    """Return the loop with its own loss, or without. Raises LossNotSeen where it has none, and ValueError where there are no batches
    for another one, either."""
    if isinstance(found.loss, LossOfBatch):
        return Loop(found.seen, found.loss.batches, None if own_loss else found.loss, sums)
    fault = f"the loss of a batch could not be had from its loop ({found.loss.reason})"
    if found.loss.batches is None:
        raise ValueError(f"{fault}; {_WRITE} model, data and loss in a study file (docs/own_model.md)")
    if not own_loss:
        raise LossNotSeen(f"{fault}; {WRITE_THE_LOSS}")
    return Loop(found.seen, found.loss.batches, None)


def _file_of(script: str) -> tuple[Path, bool]:
    """Return the file, and whether it is a module's."""
    if (path := Path(script)).suffix == ".py" or path.is_file():
        if not path.is_file():
            raise ValueError(
                f"there is no script {quoted(path)} in {quoted(Path.cwd())}; run from the directory that holds it"
            )
        return path.absolute(), False
    found = importlib.util.find_spec(script)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{script}.__main__")
    if found is None or found.origin is None:
        raise ValueError(
            f"there is neither a file nor a module '{script}'; check its spelling, or run from the directory that holds it"
        )
    return Path(found.origin), True


def _run(script: str, file: Path, args: Sequence[str], *, is_module: bool, launched: bool = False) -> Seen:
    """Run it as `python` would, and return what was seen. What it draws without a seed is the same in every process."""
    drawn = RandomState.now()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = sys.modules.get("__main__")
    main = types.ModuleType("__main__")
    main.__file__ = str(file)
    main.__dict__["__builtins__"] = __builtins__
    if is_module:
        main.__package__ = script.rpartition(".")[0] if file.name != "__main__.py" else script
    with World(Path.cwd(), file.parent) as world, one_process(launched=launched), observed(file.parent) as seen:
        sys.argv[:] = [str(file) if is_module else script, *args]
        sys.path.insert(0, "" if is_module else str(file.parent))
        sys.modules["__main__"] = main
        try:
            with contextlib.suppress(WatchStopped), _unheard(), _in_the_users_words(script):
                exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), main.__dict__)
        finally:
            drawn.put_back()
            # What it has defined is looked for in the module that its globals name, by torch.compile, too.
            sys.modules[SCRIPT_MODULE] = main
            main.__dict__["__name__"] = SCRIPT_MODULE
            if before is not None:
                sys.modules["__main__"] = before
    if world.stopped is not None and len(seen.steps) < STEPS:  # else all was seen, and it would have written at its end
        raise ValueError(world.stopped)
    if str(file.parent) not in sys.path and not is_module:
        sys.path.append(str(file.parent))  # what it imports when its model is first called
    return seen


class _Tail(io.TextIOBase):
    """Keeps the last words of what is printed."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self.lines.extend(text.splitlines())
        return len(text)

    def __str__(self) -> str:
        return "; ".join(line.strip() for line in self.lines if line.strip())


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keep what a script prints to itself; an end that it has chosen is told with its last words."""
    tail = _Tail()
    with contextlib.redirect_stdout(tail), contextlib.redirect_stderr(tail):
        try:
            yield
        except SystemExit as ended:
            if ended.code not in (None, 0):
                said = ended.code if isinstance(ended.code, str) else str(tail)
                raise ValueError(
                    f"it ended before its second optimizer step: {said}; give it its arguments after its name"
                ) from ended


@contextlib.contextmanager
def _in_the_users_words(script: str) -> Iterator[None]:
    """Raise ValueError for what a script raises, with its own line."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"it raised {raised_where(error)} before its second optimizer step; run it by itself: python {script}"
        ) from error


def _put_away(seen: Seen) -> None:
    """Give back the memory of what was watched: each run has weights of its own."""
    if seen.handed is not None:  # a Trainer of transformers has moved its model when it was made
        (seen.handed.model if is_transformers_trainer(seen.handed) else seen.handed[0]).cpu()
    if seen.first_backward is not None:
        seen.first_backward.gradients.clear()
    seen.places_again = ()
    for step in seen.steps:
        step.optimizer.state.clear()
    for one in (p for some in seen.parameters.values() for p in some):
        one.grad, one.data = None, one.data.cpu()
    for module in seen.pristine.values():
        module.cpu()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
