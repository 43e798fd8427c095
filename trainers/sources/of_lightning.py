"""A LightningModule as it is: the loss of its training_step, the groups of its configure_optimizers, and its loaders."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from batchscout.trainers.errors import LossFault, SourceFault
from batchscout.trainers.sources.held_out import batch_size_of, every_tenth
from batchscout.trainers.sources.kinds import (
    LIGHTNING,
    is_lightning_data,
    is_lightning_trainer,
    is_overridden,
    library_of,
    refuse_callback,
)
from batchscout.trainers.sources.lightning_fit import Fit, num_batches
from batchscout.trainers.sources.optimizers import groups_of, optimizer_keys
from batchscout.trainers.sources.own_checkpointing import OWN_CHECKPOINTING, without_own_checkpointing
from batchscout.trainers.sources.schedules import NOT_FORETOLD, take_rates, take_schedule, told_of_momentum
from batchscout.trainers.sources.settings import Settings, num_samples_of, told_of_checkpoint
from batchscout.trainers.sources.takes_batch import TakesBatch

OF_TRANSFER = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
"""Those that Lightning calls of a LightningDataModule, too."""
CHANGE_TRAINING = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_start",
    *OF_TRANSFER, "configure_sharded_model",
)  # fmt: skip
"""Methods that are called in the middle of a step, and may change its batch, its gradient or the weights."""
NOT_CALLED = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_end", "on_train_end",
    "on_fit_end", "validation_step", "on_validation_epoch_end", "lr_scheduler_step",
)  # fmt: skip
"""Methods that mostly watch. A study does without them, and says so."""
ONLY_WATCH = (
    "ModelCheckpoint", "OnExceptionCheckpoint", "EarlyStopping", "LearningRateMonitor", "ModelSummary", "RichModelSummary",
    "ProgressBar", "TQDMProgressBar", "RichProgressBar", "Timer", "DeviceStatsMonitor", "ThroughputMonitor",
    "SaveConfigCallback",
)  # fmt: skip
"""Lightning's own callbacks that leave the weights alone. Which run ends when is the study's own to decide."""
_PRECISIONS = {
    "32": "float32", "32-true": "float32", "bf16": "bfloat16", "bf16-mixed": "bfloat16", "16": "float16",
    "16-mixed": "float16",
}  # fmt: skip


class OfLightning(TakesBatch):
    """inner: the LightningModule. Called with a batch, it returns what training_step returns for it."""

    def __init__(self, fit: Fit) -> None:
        """Raises ValueError where the module trains in a way that a study would have to guess."""
        super().__init__()
        inner = fit.module
        _refuse_what_cannot_be_honoured(inner)
        if is_lightning_data(fit.data):
            _refuse_methods(fit.data, OF_TRANSFER)
        fit.set_up_module()
        if without_own_checkpointing(inner):
            fit.told.append(OWN_CHECKPOINTING)
        self.inner = inner
        self.fit: Fit | None = fit if fit.trainer is not None else Fit(inner, None)
        """What its optimizer is configured by: the data only where a Trainer may be asked of it. None once that is done."""
        inner.log = inner.log_dict = _not_logged  # there is no Trainer to take it
        self.batch_idx = 0
        """What training_step is told: the loss does not depend on it (see steps.py)."""
        self._takes_number = len(inspect.signature(inner.training_step).parameters) > 1
        self._in_evaluation = _in_evaluation(inner)

    def train(self, mode: bool = True) -> Self:
        """As of any module, but what is in evaluation mode before the fit stays so, as in Lightning's loop, which calls no `train`."""
        super().train(mode)
        for name in self._in_evaluation:
            self.inner.get_submodule(name).training = False
        return self

    def forward(self, batch: Any) -> Any:
        step: Any = self.inner.training_step
        try:
            returned = step(batch, self.batch_idx) if self._takes_number else step(batch)
        except RuntimeError as error:
            if not _misses_its_trainer(self.inner, error):
                raise
            name = type(self.inner).__name__
            raise SourceFault(
                f"{name}.training_step reads self.trainer, and none is attached in a study's runs, which are no fit; give {name} what it needs "
                "of it as an argument, such as the number of epochs"
            ) from error
        if returned is None:
            raise LossFault(
                f"{type(self.inner).__name__}.training_step returned None, which skips a batch there; return the loss, here every "
                "batch counts"
            )
        return returned


def _in_evaluation(module: nn.Module) -> list[str]:
    """Return the names of those of its modules that are in evaluation mode, as a frozen or pretrained part may be."""
    return [name for name, part in module.named_modules() if not part.training]


def _misses_its_trainer(module: Any, error: RuntimeError) -> bool:
    """True if Lightning raised it where the module's Trainer was asked for."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is type(module).trainer.fget.__code__


def _not_logged(*args: object, **kwargs: object) -> None:
    """Take what a module logs, as Lightning does where there is no Trainer, without its warning."""


def _refuse_what_cannot_be_honoured(module: Any) -> None:
    name = type(module).__name__
    if vars(module).get("log") is _not_logged:
        raise ValueError(
            f"the callable returned a {name} that it had returned before, and a run would go on with the weights of another; make the module "
            "within the callable, so that each run has one of its own"
        )
    if not getattr(module, "automatic_optimization", True):
        raise ValueError(
            f"{name} has automatic_optimization = False: it steps its optimizers itself, so no study could change its batch or its "
            "learning rate; let Lightning optimize, or write the loss as package.module:callable and name it under `loss`"
        )
    _refuse_methods(module, CHANGE_TRAINING)
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"{name}.training_step takes a dataloader_iter, and chooses its samples itself; take a batch: training_step(self, batch, "
            "batch_idx)"
        )


def _refuse_methods(owner: Any, methods: Iterable[str]) -> None:
    if changed := [method for method in methods if is_overridden(owner, method, LIGHTNING)]:
        raise ValueError(
            f"{type(owner).__name__} overrides {', '.join(changed)}, which may change the batch, the gradient or the weights in the middle of a "
            "step, and a study would train without it; move what it does into training_step or the data, or leave it out of what is studied"
        )


def groups(model: OfLightning) -> list[dict[str, Any]]:
    """Return the groups that its module configures. It can be called once: the data that this needs is freed, as it would count in the
    memory that is measured next."""
    fit, model.fit = model.fit, None
    assert fit is not None, "an optimizer is made once"
    return groups_of(_configured(fit)[0])


@dataclass(frozen=True)
class _Scheduled:
    """A schedule as `configure_optimizers` returns it: Lightning calls it once in so many epochs or steps."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1


def _configured(fit: Fit) -> tuple[Optimizer, list[_Scheduled]]:
    """Return the optimizer that a module configures, and its schedules, in any form that Lightning takes."""
    found: Any = fit.called(fit.module, "configure_optimizers")
    if isinstance(found, list | tuple) and len(found) == 1 and isinstance(found[0], dict):
        found = found[0]
    if isinstance(found, dict):
        optimizers, schedules = [found["optimizer"]], [found.get("lr_scheduler")]
    elif isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        optimizers, schedules = found[0], found[1] if isinstance(found[1], list | tuple) else [found[1]]
    else:
        optimizers, schedules = [found] if isinstance(found, Optimizer) else list(found or ()), []
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise ValueError(
            f"{type(fit.module).__name__}.configure_optimizers returned {len(optimizers)} optimizers, and a study changes the learning rate of "
            "one; return a single one, with a parameter group for each part of the model"
        )
    return optimizers[0], [_schedule_in(one) for one in schedules if one is not None]


def _schedule_in(told: Any) -> _Scheduled:
    if not isinstance(told, dict):
        return _Scheduled(told)
    return _Scheduled(told["scheduler"], told.get("interval", "epoch"), told.get("frequency", 1))


def settings(fit: Fit, train_loader: DataLoader[Any]) -> Settings:
    """Return what a LightningModule, its loader and, where there is one, its Trainer say."""
    trainer = fit.trainer
    optimizer, schedules = _configured(fit)
    keys: dict[str, Any] = {"optimizer": optimizer_keys(optimizer) | {"max_gradient_norm": None}}
    keys["batch"] = {"micro_batch_size": batch_size_of(train_loader)}
    told, run = [*told_of_momentum(optimizer), *fit.told, *_told_of(fit.module)], _run_of(trainer, train_loader)
    if not fit.validates:
        told.append(f"it has no data to validate on, so {every_tenth(train_loader.dataset)}")
    if trainer is not None:
        told += _of_trainer(trainer, keys)
    keys["optimizer"]["reference_batch_size"] = run.samples_per_step
    told = [*_schedule(fit.module, schedules, keys, run), *told]
    told += told_of_checkpoint(trainer)
    return Settings(keys, tuple(told), run.samples, run.in_steps, processes=run.processes)


@dataclass(frozen=True)
class _Run:
    """The run that a Trainer is set to."""

    samples: int | None
    steps: int | None
    """None where it has no end, or none that is known: of both."""
    samples_per_step: int
    """Of all its processes."""
    steps_per_epoch: float
    """Infinity of a stream."""
    processes: int = 1
    in_steps: bool = False
    """True if its number of steps, or one of batches of each epoch, ends it, and not that of its epochs."""


def _run_of(trainer: Any, train_loader: DataLoader[Any]) -> _Run:
    batch, num_samples = batch_size_of(train_loader), num_samples_of(train_loader.dataset)
    if trainer is None:
        return _Run(None, None, batch, num_batches(train_loader, 1.0))
    processes, accumulation = trainer.num_devices * trainer.num_nodes, trainer.accumulate_grad_batches
    in_epoch = num_batches(train_loader, trainer.limit_train_batches, processes)
    steps_per_epoch = in_epoch if math.isinf(in_epoch) else max(1, math.ceil(in_epoch / accumulation))
    epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else math.inf
    most = trainer.max_steps if trainer.max_steps > 0 else math.inf
    steps = min(most, epochs * steps_per_epoch)
    samples_per_step = batch * accumulation * processes
    is_cut = in_epoch < num_batches(train_loader, 1.0, processes) and _counts_batches(trainer)
    if math.isinf(steps):
        return _Run(None, None, samples_per_step, steps_per_epoch, processes, is_cut)
    of_epochs = math.inf if num_samples is None else epochs * min(num_samples, in_epoch * batch * processes)
    samples = min(steps * samples_per_step, of_epochs)  # the last step of an epoch may be smaller
    in_steps = is_cut or most < epochs * steps_per_epoch
    return _Run(int(samples), int(steps), samples_per_step, steps_per_epoch, processes, in_steps)


def _counts_batches(trainer: Any) -> bool:
    """True if an epoch ends after a number of batches, whatever their size."""
    return isinstance(trainer.limit_train_batches, int)


def _schedule(module: Any, schedules: list[_Scheduled], keys: dict[str, Any], run: _Run) -> Iterable[str]:
    """Set the schedule to the module's own, over its whole run; yield what is to be told."""
    if not schedules:
        take_rates(keys, [keys["optimizer"]["lr"]])
        return
    if len(schedules) > 1:
        names = ", ".join(type(one.scheduler).__name__ for one in schedules)
        yield (
            f"it has {len(schedules)} schedules of one rate ({names}), and what they make of it together is not known in advance; a study takes its "
            "own warm-up and warmup_stable_decay: make them one (torch's SequentialLR or ChainedScheduler), or set schedule to choose another"
        )
        return
    (found,) = schedules
    scheduler, name = found.scheduler, type(found.scheduler).__name__
    between_calls = found.frequency * (1 if found.interval == "step" else run.steps_per_epoch)
    # One that has an end of its own tells its shape without a Trainer, too.
    calls = getattr(scheduler, "total_steps", getattr(scheduler, "T_max", None))
    if run.steps is not None:
        steps = run.steps
    elif calls is not None and math.isfinite(between_calls):
        steps = int(calls * between_calls)
    else:
        yield (
            f"its schedule {name} goes on for as long as its run, and how long that is, is not known; a study takes its own warm-up and "
            "warmup_stable_decay: return the Trainer, too, as the last, or set schedule to choose another"
        )
        return
    own_call = is_overridden(module, "lr_scheduler_step", LIGHTNING)
    if own_call or not take_schedule(keys, scheduler, max(2, steps), between_calls):
        yield f"its schedule {name} {NOT_FORETOLD}"


def _told_of(module: nn.Module) -> list[str]:
    told = list[str]()
    if number := len(_in_evaluation(module)):
        told.append(f"{number} of its modules are in evaluation mode, and stay so, as in Lightning's fit")
    unheard = [method for method in NOT_CALLED if is_overridden(module, method, LIGHTNING)]
    if not unheard:
        return told
    *first, last = unheard
    names = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    return [
        *told,
        f"{type(module).__name__}.{names} not called: evaluations take training_step's loss, in evaluation mode, and "
        "self.log has no effect",
    ]


def _of_trainer(trainer: Any, keys: dict[str, Any]) -> list[str]:
    assert is_lightning_trainer(trainer)
    precision = str(trainer.precision)
    if precision not in _PRECISIONS:
        raise ValueError(
            f"the Trainer's precision is {precision}, and a study takes {', '.join(_PRECISIONS)}; choose one of these, or leave the Trainer "
            "out of what the callable returns and set `precision`"
        )
    keys["precision"] = _PRECISIONS[precision]
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    by = getattr(algorithm, "value", algorithm)
    if value and by not in (None, "norm"):
        raise ValueError(
            f"the Trainer clips each number of the gradient at {value:g} (gradient_clip_algorithm: {by}), and a study clips the norm of "
            "the whole gradient; use gradient_clip_algorithm='norm', or leave gradient_clip_val out"
        )
    keys["optimizer"]["max_gradient_norm"] = float(value) if value else None
    return _of_callbacks(trainer.callbacks)


def _of_callbacks(callbacks: Iterable[Any]) -> list[str]:
    """Raise ValueError for a callback that changes the training; return what is to be told of the others."""
    told = []
    for callback in callbacks:
        name = type(callback).__name__
        if library_of(type(callback)) not in LIGHTNING:
            refuse_callback(callback, CHANGE_TRAINING, LIGHTNING)
            told.append(f"the callback {name} is not called")
        elif name not in ONLY_WATCH:
            raise ValueError(
                f"the Trainer has the callback {name}, which changes the training, and a study would train without it; leave it out of "
                "what is studied, and add it to the run that the recommendation is for"
            )
    return told


def length_of(trainer: Any, train_loader: DataLoader[Any]) -> dict[str, int]:
    """Return the arguments of a Trainer that say how long it trains, at another batch, too."""
    if _counts_batches(trainer) and (steps := _run_of(trainer, train_loader).steps) is not None:
        return {"max_steps": steps}
    told = {name: getattr(trainer, name) for name in ("max_epochs", "max_steps")}
    return {name: value for name, value in told.items() if value is not None and value > 0}
