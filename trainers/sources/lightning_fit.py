"""What Lightning's `Trainer.fit` is called with, taken as far as the first step: its module and data are set up in Lightning's order."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from batchscout.trainers.having import having
from batchscout.trainers.sources.kinds import (
    LIGHTNING,
    is_lightning_data,
    is_lightning_module,
    is_lightning_run,
    is_lightning_trainer,
    is_overridden,
)

FORMS = (
    "what Trainer.fit is called with, (model, train_loader, val_loader) or (model, datamodule), or (model,) if it has its loaders itself; "
    "with the Trainer as the last if there is one"
)
"""What the callable of a Lightning study may return."""
EPOCHS_BY_DEFAULT = 1000
"""Of a Trainer that is told neither how many epochs nor how many steps to take."""


class TrainerIsMissing(ValueError):
    """Something is read of a Trainer that the callable has not returned. The message is in the user's words."""


@dataclass(frozen=True)
class Fit:
    module: Any
    """The LightningModule."""
    data: Any
    """What has `train_dataloader` and `val_dataloader`, a LightningDataModule or the module itself; or the loaders (train, val), whose val
    may be None."""
    trainer: Any = None
    """None where the callable returned none."""
    _set_up: set[int] = field(default_factory=set)
    """The ids of those whose `setup` was called."""
    told: list[str] = field(default_factory=list)
    """What the module had that a study has otherwise, in words."""

    def __deepcopy__(self, memo: Any) -> Fit:
        """Return it without data and Trainer: a model is copied for one pass, and its copy would keep them in memory."""
        return Fit(copy.deepcopy(self.module, memo), None)

    def set_up_module(self) -> None:
        """Call what Lightning calls of the module before its `configure_optimizers`."""
        self._set_up_once(self.module)
        if is_overridden(self.module, "configure_model", LIGHTNING):
            self.called(self.module, "configure_model")

    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """Return the loaders (train, val); None in the place of val where there is nothing to validate on. Raises ValueError where either is
        not one DataLoader."""
        return self.loader("train"), self.loader("val") if self.validates else None

    @property
    def validates(self) -> bool:
        """True if it has data to validate on."""
        if isinstance(self.data, tuple):
            return not _is_nothing(self.data[1])
        return self._has_loader("val") and not _is_nothing(self._asked_for("val"))

    def _asked_for(self, kind: Literal["train", "val"]) -> Any:
        self._set_up_once(self.data)
        return self.called(self.data, f"{kind}_dataloader")

    def _has_loader(self, kind: Literal["train", "val"]) -> bool:
        # A LightningDataModule.from_datasets has functions of Lightning's in the place of its class's.
        method = f"{kind}_dataloader"
        return is_overridden(self.data, method, LIGHTNING) or method in getattr(self.data, "__dict__", {})

    def called(self, owner: Any, method: str, **arguments: Any) -> Any:
        """Return what a method of the module or of the data returns, with the Trainer attached to both of them. Raises TrainerIsMissing
        where it reads a Trainer and there is none."""
        call = functools.partial(getattr(owner, method), **arguments)
        # Where a model is followed with tensors that have shapes alone, its data have values all the same, and are not counted.
        with contextlib.nullcontext() if owner is self.module else _disable_current_modes():
            if self.trainer is not None:
                with self._trainer_attached():
                    return call()
            try:
                return call()
            except (RuntimeError, AttributeError):  # Lightning's own of a module, and that of None
                _refuse_if_it_reads_a_trainer(owner, method, call)
                raise

    def _set_up_once(self, owner: Any) -> None:
        if id(owner) in self._set_up:
            return
        self._set_up.add(id(owner))
        for hook, arguments in (("prepare_data", {}), ("setup", {"stage": "fit"})):
            if is_overridden(owner, hook, LIGHTNING):
                self.called(owner, hook, **arguments)

    def loader(self, kind: Literal["train", "val"]) -> DataLoader[Any]:
        if isinstance(self.data, tuple):
            train, val = self.data
            return _one_loader(train if kind == "train" else val, f"its {kind}_loader is")
        name, method = type(self.data).__name__, f"{kind}_dataloader"
        if not self._has_loader(kind):
            raise ValueError(f"{name} has no {method}; write it, or return (model, train_loader, val_loader)")
        return _one_loader(self._asked_for(kind), f"{name}.{method} returned")

    @contextlib.contextmanager
    def _trainer_attached(self) -> Iterator[None]:
        """Within this, the Trainer is attached to the module and the data, and answers as it does in `fit` before the first step."""
        kind = type(self.trainer)
        with contextlib.ExitStack() as stack:
            if not isinstance(self.trainer, _InFit):
                self.trainer.what_is_fitted = self
                stack.callback(delattr, self.trainer, "what_is_fitted")
                stack.enter_context(having(self.trainer, "__class__", type(kind.__name__, (_InFit, kind), {})))
                stack.enter_context(having(self.trainer.fit_loop, "setup_data", lambda: None))
            for owner in (self.module, self.data):
                if is_lightning_module(owner) or is_lightning_data(owner):
                    stack.enter_context(_attached(self.trainer, owner))
            yield

    def data_module(self) -> Any:
        """Return the LightningDataModule, set up; None where the data is none."""
        if not is_lightning_data(self.data):
            return None
        self._set_up_once(self.data)
        return self.data


class _InFit:
    """Before the class of a Trainer: what Lightning would have told it of a fit. What takes the data's being set up is done when it is
    asked for. They are properties, as most of Lightning's own, which cannot be set."""

    what_is_fitted: Fit

    @property
    def lightning_module(self) -> Any:
        return self.what_is_fitted.module

    @property
    def datamodule(self) -> Any:
        return self.what_is_fitted.data_module()

    @property
    def train_dataloader(self) -> DataLoader[Any]:
        return self.what_is_fitted.loader("train")

    @property
    def num_training_batches(self) -> float:
        return num_batches(self.train_dataloader, self.what_is_fitted.trainer.limit_train_batches)

    @property
    def max_epochs(self) -> int:
        """As `fit` fills it in: -1 where only steps or seconds end it."""
        trainer: Any = self
        if trainer.fit_loop.max_epochs is not None:
            return trainer.fit_loop.max_epochs
        is_timed = any(type(callback).__name__ == "Timer" for callback in trainer.callbacks)
        return -1 if is_timed or trainer.max_steps != -1 else EPOCHS_BY_DEFAULT


def fit_of(found: Any) -> Fit | None:
    """Return what a callable returned as what `Trainer.fit` is called with; None of what is of another kind. Raises ValueError where
    a LightningModule is not returned with what it needs."""
    if isinstance(found, Fit):
        return found
    if not is_lightning_run(found):
        return None
    module, *rest = found
    trainer = rest.pop() if rest and is_lightning_trainer(rest[-1]) else None
    match rest:
        case []:
            return Fit(module, module, trainer)
        case [(_, _) as pair] if isinstance(pair, tuple):
            return Fit(module, pair, trainer)
        case [train, val]:
            return Fit(module, (train, val), trainer)
        case [data] if hasattr(data, "train_dataloader"):
            return Fit(module, data, trainer)
        case [DataLoader() as train]:
            return Fit(module, (train, None), trainer)
        case _:
            raise ValueError(f"returned ({', '.join(type(one).__name__ for one in found)}); return {FORMS}")


@contextlib.contextmanager
def _attached(trainer: Any, owner: Any) -> Iterator[None]:
    try:
        before = owner.trainer
    except RuntimeError:  # as a module says that it has none
        before = None
    owner.trainer = trainer
    try:
        yield
    finally:
        owner.trainer = before


class _NoTrainer:
    """Stands where a Trainer is missing, and says what is read of it."""

    def __init__(self, reader: str) -> None:
        self._reader = reader

    def __bool__(self) -> bool:
        return False  # a module's current_epoch and its kind are 0 where it has none

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TrainerIsMissing(
            f"{self._reader} reads self.trainer.{name}, and the callable returned no Trainer; return the run's own, too, as the last: "
            "(model, train_loader, val_loader, trainer)"
        )


def _refuse_if_it_reads_a_trainer(owner: Any, method: str, call: Callable[[], Any]) -> None:
    """Raise TrainerIsMissing if that is why a call failed, which is done again to see what it reads."""
    if not (is_lightning_module(owner) or is_lightning_data(owner)):
        return
    with _attached(_NoTrainer(f"{type(owner).__name__}.{method}"), owner):
        try:
            call()
        except TrainerIsMissing:
            raise
        except Exception:
            return


def _is_nothing(loader: Any) -> bool:
    """True of what Lightning takes for no validation."""
    return loader is None or (isinstance(loader, list | tuple | dict) and not loader)


def _one_loader(loader: Any, what: str) -> DataLoader[Any]:
    if isinstance(loader, list | tuple | dict) or type(loader).__name__ == "CombinedLoader":
        raise ValueError(
            f"{what} a {type(loader).__name__} of several loaders, and a study measures one set; return one DataLoader"
        )
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"{what} {'None' if loader is None else f'a {type(loader).__name__}'}, and a study makes its batches of the samples that a "
            "DataLoader reads; return torch.utils.data.DataLoader(samples, batch_size=...)"
        )
    return loader


def num_batches(loader: DataLoader[Any], limit: float, processes: int = 1) -> float:
    """Return how many batches an epoch has on one device, as Lightning counts them; infinity of a stream. limit: `limit_train_batches`,
    a number of batches if it is an int, or else a share of them. processes: that share the samples."""
    try:
        length = math.ceil(len(loader) / processes)
    except (TypeError, NotImplementedError):
        length = math.inf
    if isinstance(limit, int):
        return min(length, limit)
    return length if math.isinf(length) else int(length * limit)
