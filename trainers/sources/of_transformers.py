"""A Trainer of transformers or TRL as it is: its compute_loss, its optimizer's groups, its data set and collator."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from batchscout.trainers.having import having
from batchscout.trainers.sources.held_out import every_tenth
from batchscout.trainers.sources.kinds import is_overridden, library_of, refuse_callback
from batchscout.trainers.sources.optimizers import groups_of, optimizer_keys, rate_of
from batchscout.trainers.sources.own_checkpointing import OWN_CHECKPOINTING, without_own_checkpointing
from batchscout.trainers.sources.schedules import NOT_FORETOLD, take_schedule, told_of_momentum
from batchscout.trainers.sources.settings import Settings, is_secret, num_samples_of, told_of_checkpoint
from batchscout.trainers.sources.takes_batch import TakesBatch

LIBRARIES = ("transformers", "trl")
TRAINS_LIKE_TRAINER = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")
"""The classes of these libraries whose loss is that of a batch of samples, and of nothing that is generated or compared."""
CHANGE_TRAINING = ("training_step", "_inner_training_loop", "create_accelerator_and_postprocess", "optimizer_step")
CHOOSE_SAMPLES = ("get_train_dataloader", "_get_train_sampler")
CALLED_IN_A_STEP = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


class OfTrainer(TakesBatch):
    """trainer: one of transformers or TRL. Called with a batch, it returns (loss_sum, num_targets) where the Trainer counts
    the targets of a batch, and what compute_loss returns where it does not."""

    def __init__(self, trainer: Any) -> None:
        """Raises ValueError where the Trainer trains in a way that a study would have to guess."""
        super().__init__()
        _refuse_what_cannot_be_honoured(trainer)
        # It would multiply by the ranks, over which this project sums.
        trainer.args.average_tokens_across_devices = False
        without_own_checkpointing(trainer.model)
        self.inner = trainer.model
        self.trainer = trainer
        self.was_given_its_optimizer = trainer.optimizer is not None
        self.was_given_its_schedule = trainer.lr_scheduler is not None

    def forward(self, batch: dict[str, Any]) -> Any:
        num_targets = self.count(batch)
        if num_targets is None:
            return self.trainer.compute_loss(self.inner, dict(batch))
        at_least_one = num_targets.clamp(min=1)
        mean = self.trainer.compute_loss(self.inner, dict(batch), num_items_in_batch=at_least_one)
        return mean * at_least_one, num_targets

    def count(self, batch: dict[str, Any]) -> Tensor | None:
        """Return the number of targets that the Trainer's loss is a mean over; None where it does not count them."""
        device = next(self.inner.parameters()).device
        _, count = self.trainer.get_batch_samples(iter([batch]), 1, device)
        return None if count is None else torch.as_tensor(count, device=device)


def _refuse_what_cannot_be_honoured(trainer: Any) -> None:
    name = type(trainer).__name__
    known = next(base for base in type(trainer).__mro__ if library_of(base) in LIBRARIES)
    if known.__name__ not in TRAINS_LIKE_TRAINER:
        raise ValueError(
            f"{name} is a {known.__name__}, whose loss is made of generated text, of pairs or of another model, and not of each sample by "
            f"itself; a study takes {', '.join(TRAINS_LIKE_TRAINER)} and classes made of these"
        )
    if changed := [method for method in CHANGE_TRAINING if is_overridden(trainer, method, LIBRARIES)]:
        raise ValueError(
            f"{name} overrides {', '.join(changed)}, and a study has a training loop of its own; put what it does into compute_loss or "
            "the data collator"
        )
    if chosen := [method for method in CHOOSE_SAMPLES if is_overridden(trainer, method, LIBRARIES)]:
        raise ValueError(
            f"{name} overrides {', '.join(chosen)}, and every batch of a study must see the same samples in the same order; give the "
            "samples as train_dataset, and batch them in data_collator"
        )
    for callback in trainer.callback_handler.callbacks:
        if library_of(type(callback)) not in LIBRARIES:
            refuse_callback(callback, CALLED_IN_A_STEP, LIBRARIES)


def loaders_of(trainer: Any) -> tuple[Any, Any]:
    """Return the DataLoaders (train, val) of a Trainer; None in the place of val where it has nothing to validate on."""
    if trainer.eval_dataset is None:
        return trainer.get_train_dataloader(), None
    if isinstance(trainer.eval_dataset, dict):
        raise ValueError(
            f"the {type(trainer).__name__}'s eval_dataset are {len(trainer.eval_dataset)} sets, and a study compares one validation loss; "
            "give it a single one"
        )
    return trainer.get_train_dataloader(), trainer.get_eval_dataloader()


def groups(model: OfTrainer) -> list[dict[str, Any]]:
    return groups_of(model.trainer.create_optimizer())


def settings(trainer: Any) -> Settings:
    """Return what the arguments and the optimizer of a Trainer say."""
    args = trainer.args
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    num_samples = num_samples_of(trainer.train_dataset)
    steps, run_samples = args.max_steps, args.max_steps * batch
    if steps <= 0 and num_samples is not None:
        micro_batches = math.ceil(num_samples / args.per_device_train_batch_size)
        steps = math.ceil(args.num_train_epochs * math.ceil(micro_batches / args.gradient_accumulation_steps))
        run_samples = int(args.num_train_epochs * num_samples)
    optimizer, count = trainer.create_optimizer(), args.gradient_accumulation_steps if _adds_up(trainer) else 1
    clip = {"max_gradient_norm": float(args.max_grad_norm) / count or None, "reference_batch_size": batch}
    keys: dict[str, Any] = {
        "optimizer": optimizer_keys(optimizer) | clip,
        "precision": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        "batch": {"micro_batch_size": args.per_device_train_batch_size},
        **({"allow_tf32": True} if getattr(args, "tf32", None) else {}),
    }
    told = list(_schedule(trainer, optimizer, keys, steps))
    if count > 1:
        told.append(_of_a_sum(count, type(optimizer).__name__, clip["max_gradient_norm"]))
    told += [*told_of_momentum(optimizer), *_told_of(trainer), *told_of_checkpoint(trainer)]
    return Settings(keys, tuple(told), run_samples, in_steps=args.max_steps > 0)


def _adds_up(trainer: Any) -> bool:
    """True if the gradient of a step is the sum of those of its micro-batches: its own compute_loss leaves num_items_in_batch alone, and the Trainer, which
    counts it, takes the loss to be divided by it."""
    is_own = is_overridden(trainer, "compute_loss", LIBRARIES) and trainer.compute_loss_func is None
    is_said = getattr(trainer, "loss_is_scaled_for_ga", None) is not None
    if trainer.args.gradient_accumulation_steps == 1 or not is_own or is_said:
        return False
    losses = list[float]()
    with torch.random.fork_rng(), torch.no_grad(), trainer.compute_loss_context_manager():
        batch = next(iter(trainer.get_train_dataloader()))
        _, count = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        if count is None:
            return False
        for times in (1, 2):
            torch.manual_seed(0)  # of its dropout
            losses.append(float(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=times * count)))
    return math.isclose(*losses, rel_tol=1e-3)


def _of_a_sum(count: int, optimizer: str, norm: float | None) -> str:
    """Return what to tell of such a Trainer. Raises ValueError where its learning rate would be that of the sum."""
    said = f"its compute_loss leaves num_items_in_batch alone, so that the Trainer adds up the gradients of {count} micro-batches, where a study takes their mean"
    remedy = "set loss_is_scaled_for_ga = False in its class, or divide the loss by num_items_in_batch"
    if optimizer in ("SGD", "ASGD"):
        raise ValueError(
            f"{said}, and {optimizer} does not divide by the gradient's size; {remedy}, and multiply the learning rate by {count}"
        )
    clips = f", and clips it at {norm:.3g} where the Trainer clips the sum at {norm * count:.3g}" if norm else ""
    return f"{said}{clips}; to have the mean in its own run, too, {remedy}"


def _schedule(trainer: Any, optimizer: Optimizer, keys: dict[str, Any], num_steps: int) -> Iterable[str]:
    """Set the schedule to what the Trainer makes for its whole run; yield what is to be told."""
    with having(trainer, "lr_scheduler", trainer.lr_scheduler):
        schedule = trainer.create_scheduler(num_training_steps=num_steps, optimizer=optimizer)
    if not take_schedule(keys, schedule, num_steps):
        yield f"its schedule {type(schedule).__name__} {NOT_FORETOLD}"


def _told_of(trainer: Any) -> Iterable[str]:
    if trainer.eval_dataset is None:
        yield f"it has no eval_dataset, so {every_tenth(trainer.train_dataset)}"
    told = vars(trainer.args)
    if told.get("activation_checkpointing", told.get("gradient_checkpointing", False)):  # its two names
        yield OWN_CHECKPOINTING
    if told.get("train_sampling_strategy") == "group_by_length" or told.get(
        "group_by_length", False
    ):  # as of now, and before
        yield (
            "group_by_length is left out: a study's batches have samples of any length, so they are padded more, and take more time and memory than its own; "
            "micro_batch: {tokens: auto} cuts each step into micro-batches of about one length, where the samples tell their lengths"
        )
    if getattr(trainer.args, "neftune_noise_alpha", None):
        yield f"a study trains without the noise of neftune_noise_alpha={trainer.args.neftune_noise_alpha:g}"
    if getattr(trainer.args, "predict_with_generate", False):
        yield "predict_with_generate: evaluations take the loss, and generate nothing"
    own = [type(one).__name__ for one in trainer.callback_handler.callbacks if library_of(type(one)) not in LIBRARIES]
    if own:
        yield f"the callbacks {', '.join(own)} are not called"


def rate_factor(model: OfTrainer) -> float | None:
    """Return what `learning_rate` is of the rate of the first group that the Trainer's optimizer has; None where it was given that."""
    if model.was_given_its_optimizer:
        return None
    first = rate_of(model.trainer.create_optimizer().param_groups[0])
    return model.trainer.args.learning_rate / first if first else None


def own_arguments(args: Any) -> dict[str, Any]:
    """Return, as fields of `OwnRun`, the library and the class of these TrainingArguments, and those that are not as this class has them by
    default: its length and its schedule in any case."""
    found, not_plain = {}, []
    for field in dataclasses.fields(args):
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(args, field.name)
        value = (value.value if isinstance(value, Enum) else value) or ("none" if field.name == "report_to" else value)
        # What is left out becomes another kind of nothing when they are made. False and 0 are something: None may let the library choose.
        if not field.init or value == default or (default in (None, "", dataclasses.MISSING) and value in _NOTHING):
            continue
        if not is_secret(field.name) and _is_plain(value):
            found[field.name] = value
        elif not _is_as_made(value):
            not_plain.append(field.name)
    length = {"max_steps": args.max_steps} if args.max_steps > 0 else {"num_train_epochs": args.num_train_epochs}
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    is_of_trl = any(library_of(base) == "trl" for base in type(args).__mro__)
    return {
        "library": "trl" if is_of_trl else "transformers",
        "arguments": found | length | {"lr_scheduler_type": kind},
        "arguments_class": _path_of(type(args)),
        "not_plain": tuple(not_plain),
    }


def _path_of(kind: type) -> str:
    """Return where a class is imported from, as package.module:name: a library's own from its top, where people import it."""
    top = library_of(kind)
    module = top if getattr(sys.modules.get(top), kind.__name__, None) is kind else kind.__module__
    return f"{module}:{kind.__qualname__.rpartition('<locals>.')[2]}"


_NOTHING = (None, "", [], (), {})


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(not is_secret(str(name)) and _is_plain(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _is_as_made(value: Any) -> bool:
    """True of an object that holds nothing but its defaults."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and value == type(value)()
