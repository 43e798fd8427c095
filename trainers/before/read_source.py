"""The other end of `batchscout.trainers.before.source.read_source`: makes the object, tries its loss, and says what it holds."""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import nn

from batchscout.trainers.before.own_process import asked
from batchscout.trainers.before.pass_seconds import pass_seconds
from batchscout.trainers.before.source import Library, Source
from batchscout.trainers.config import call_target, resolve
from batchscout.trainers.criteria import IGNORED_TARGET, MeanLoss
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.loaders import read_by
from batchscout.trainers.data.samples import SAMPLES_LOOKED_AT, SampleSet, first_of, loaded
from batchscout.trainers.device.device import pick_device
from batchscout.trainers.errors import LossFault, LossNotSeen, SourceFault, raised_text, raised_where
from batchscout.trainers.model.adding_up import SUM_OR_MEAN, Fault, not_adding_up, read_once, seeded
from batchscout.trainers.model.losses import autocasting, loss_function
from batchscout.trainers.sources.adapted import loaders_of, module_of, settings_of
from batchscout.trainers.sources.kinds import is_lightning_run, is_transformers_trainer
from batchscout.trainers.sources.lightning_fit import FORMS, fit_of
from batchscout.trainers.sources.of_transformers import OfTrainer
from batchscout.trainers.sources.optimizers import rate_of
from batchscout.trainers.sources.settings import Settings, num_samples_of
from batchscout.trainers.sources.watch.batches import num_samples_in_source
from batchscout.trainers.sources.watch.flags import flags_and_factors, options_typed
from batchscout.trainers.sources.watch.loop import Loop, OfLoop
from batchscout.trainers.sources.watch.script import WRITE_THE_LOSS, watched

SAME_LOSS = 1e-4
"""So far, as a share of itself, a loss may differ from one time to the next by how its sum was rounded."""
SAMPLES_DOUBLED, DRAWS, SECONDS_OF_DRAWS = 8, 6, 5.0
"""So many samples tell a mean from a sum; and where random numbers move the loss, it is computed so often, or for so long."""
GROWS_BY = 0.05
"""So much, as a share of itself, no mean grows when all its samples are taken twice."""
_WANTED = {"lightning": FORMS, "transformers": "a Trainer of transformers, or an SFTTrainer of trl"}


def main() -> None:
    """Answer what the source says, or its fault."""
    with asked() as (question, answer):
        answer(_answer(Source(**question)))


def _answer(source: Source) -> dict[str, Any]:
    try:
        said = read(source)
    except ValueError as error:
        return {"fault": str(error), "kind": type(error).__name__}
    except Exception as error:
        return {"fault": f"raised {raised_where(error)}; fix it, or debug it by calling it yourself"}
    return asdict(said)


def read(source: Source) -> Settings:
    """Make the object, and return what it says. Raises ValueError where it is none that can be honoured."""
    target, kwargs = source.made_by
    made = call_target("from", resolve(target), kwargs)
    _check_kind(made, source.library)
    if isinstance(made, Loop):
        for loader in made.in_any_order:
            read_by(loader, made.name_of(loader))  # which refuses what a study cannot batch
    made = fit_of(made) or made  # one for all that follows, which sets it up once
    module, loaders = module_of(made), loaders_of(made)
    assert module is not None
    assert loaders is not None
    settings = settings_of(made, loaders[0])
    if not settings.taken:
        size = sum(p.numel() for p in module.parameters())
        inner = type(getattr(module, "inner", module)).__name__
        settings = replace(settings, taken=(f"model: {inner} ({size:,} parameters), as its Trainer has it",))
    whole_set, _ = loaded(loaders, source.target)
    train_set = first_of(whole_set, SAMPLES_LOOKED_AT)
    draws, reduction = False, "mean"
    if isinstance(made, Loop) and made.loss is not None:
        batch = fetch(train_set, list(range(min(SAMPLES_LOOKED_AT, len(train_set)))))
        _check_evaluates(module, batch)
        draws = _draws(module, batch)
        if source.num_targets is None:
            reduction = _reduction(module, train_set, draws=draws)
    if reduction == "neither":
        raise LossNotSeen(
            "its loss is one of the whole batch, as a contrastive one is: it grows with the number of samples, and not as a sum, so that no sample has a "
            f"loss of its own and a batch cannot be split; to have one of each micro-batch by itself, {WRITE_THE_LOSS}"
        )
    if isinstance(made, Loop) and made.loss is None:
        loss = None
    elif reduction == "sum":
        assert isinstance(made, Loop)
        kwargs = {**kwargs, "sums": True}
        settings, loss = settings_of(replace(made, sums=True), loaders[0]), None
    else:
        ignored = made.seen.ignored_targets if isinstance(made, Loop) else set[int]()
        loss = _loss(module, train_set, source.num_targets, min(ignored, default=IGNORED_TARGET))
    if draws:
        told = (
            "its loss of a batch draws random numbers (noise, masks, mixed samples), and validation computes the same loss, so val_loss has this "
            "randomness, too"
        )
        settings = replace(settings, told=(*settings.told, told))
    if source.library == "script":
        groups, size = (), num_samples_of(whole_set)
        if isinstance(made, Loop):
            groups, size = made.optimizer.param_groups, num_samples_in_source(made.batches.source)
        kwargs = {**kwargs, **_flags(source, settings, groups, size)}
    if source.is_timed:  # the last: it may move the module
        timed_by = loss or (MeanLoss() if isinstance(made, Loop) else None)
        settings = replace(settings, sample_seconds=_sample_seconds(module, timed_by, train_set, settings))
    place = {"target": target, "kwargs": kwargs}
    shared = {"model": place, "data": place, **({"loss": loss.model_dump()} if loss else {})}
    return replace(settings, keys={**settings.keys, **shared})


def _check_kind(made: Any, library: Library) -> None:
    if library == "script":
        return
    is_wanted = {"lightning": is_lightning_run, "transformers": is_transformers_trainer}[library]
    if not is_wanted(made):
        what = f"({', '.join(type(one).__name__ for one in made)})" if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"returned {what}; return {_WANTED[library]}")


def _loss(module: nn.Module, train_set: SampleSet, over: str | None, ignored: int) -> MeanLoss | None:
    """Return what the module's mean is a mean over; None where it counts that itself. Which it is, is tried: the losses of some
    samples must add up to that of all of them in one batch."""
    if over is None and isinstance(module, OfTrainer) and module.count(fetch(train_set, [0])) is not None:
        return None
    tried = [over] if over else ["targets", "samples"]
    losses = {one: MeanLoss(over=one, ignore_index=ignored) for one in tried}
    found = {one: _fault_of(loss, module, train_set) for one, loss in losses.items()}
    right = next((one for one, fault in found.items() if fault is None), None)
    if right is None:
        faults = "; ".join(f"as a mean over {one}: {fault}" for one, fault in found.items())
        said = (
            f"its loss is a mean, and over what is not clear ({faults}); say it: from: {{..., num_targets: package.module:callable}}, which "
            "takes a batch and returns the number that its loss is a mean over"
        )
        if isinstance(module, OfLoop):  # all else of the script is known
            raise LossNotSeen(f"{said}, and leave out loss; or {WRITE_THE_LOSS}")
        raise ValueError(said)
    return losses[right]


def _flags(
    source: Source, settings: Settings, groups: Sequence[Mapping[str, Any]], num_samples: int | None
) -> dict[str, dict[str, Any]]:
    """Return the flags of a script that set its recipe, and what some are of the recipe's numbers, as arguments: as they were typed if they
    were; none where there are none. groups: of its optimizer. num_samples: of a pass."""
    args, rates = tuple(source.kwargs["args"]), [settings.keys["optimizer"]["lr"], *map(rate_of, groups)]
    size, accumulation = settings.keys["batch"]["micro_batch_size"], settings.accumulation
    samples = settings.run_samples or 0
    steps = samples / settings.keys["optimizer"]["reference_batch_size"] or None
    passes = samples / num_samples if num_samples and not settings.in_steps else 0
    both = (watched(source.target, args).options, tuple(options_typed(args)))
    flags, factors = flags_and_factors(both, rates, size, accumulation, steps, passes)
    return {name: found for name, found in (("flags", flags), ("factors", factors)) if found}


def _sample_seconds(module: nn.Module, loss: MeanLoss | None, train_set: SampleSet, settings: Settings) -> float | None:
    """Return what a forward and backward pass takes for each sample at the script's own micro-batch, on the device that a study would use;
    None where it could not be timed."""
    device = pick_device()
    try:
        module.to(device)
    except torch.OutOfMemoryError:
        return None  # whether it fits is for the frontier to find
    taken = pass_seconds(
        module, autocasting(loss_function(loss), settings.keys["precision"], device), train_set, device
    )
    return None if taken is None else taken[0] / settings.keys["batch"]["micro_batch_size"] + taken[1]


def _reduction(module: nn.Module, train_set: SampleSet, *, draws: bool) -> Literal["mean", "sum", "neither"]:
    """Return what a loss is of those of its samples, from what it comes to where some are all taken once, twice and four times. A mean
    stays, and what a sum grows by doubles; a contrastive loss grows by log 2 each time. draws: whether random numbers move it."""
    train_set, once = read_once(train_set), list(range(min(SAMPLES_DOUBLED, len(train_set))))
    found, ends = list[list[float]](), time.monotonic() + SECONDS_OF_DRAWS
    while len(found) < (DRAWS if draws else 1) and time.monotonic() < ends:
        module.eval()
        with torch.no_grad(), seeded(module, len(found)):
            found.append([float(module(fetch(train_set, once * times))) for times in (1, 2, 4)])
        module.train()
    first, _ = _mean_and_error([one for one, _, _ in found])
    grown, error = _mean_and_error([two - one for one, two, _ in found])
    again, error_again = _mean_and_error([four - two for _, two, four in found])
    beyond, error_beyond = _mean_and_error([(four - two) - 2 * (two - one) for one, two, four in found])
    if abs(first + grown) > SUM_OR_MEAN * abs(first):
        return "neither" if abs(beyond) > max(abs(grown) / 4, error_beyond) else "sum"
    is_clear = abs(grown) > max(GROWS_BY * abs(first), error) and abs(again) > error_again
    return "neither" if is_clear and again / grown > 0.75 else "mean"


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean, and how far random numbers alone hardly ever move it."""
    error = 4 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def _check_evaluates(module: nn.Module, batch: Any) -> None:
    """Raise LossNotSeen for a loss that there is in training mode, or with gradients, alone: validation takes it without."""

    def fault(*, training: bool, gradients: bool) -> Exception | None:
        module.train(training)
        try:
            with torch.set_grad_enabled(gradients):
                module(copy.deepcopy(batch))
        except Exception as error:  # of the script's code
            return error
        return None

    found = fault(training=False, gradients=False)
    if found is not None and fault(training=True, gradients=True) is None:
        where, remedy = (
            "in evaluation mode",
            "let the model return there, too, what its loss reads (`if self.training`)",
        )
        if fault(training=False, gradients=True) is None:
            where, remedy = "without gradients", "compute it, from the batch on, within torch.enable_grad()"
        raise LossNotSeen(
            f"its loss can be computed in training and not {where}, as validation computes it: {raised_text(found)}; {remedy}. Or {WRITE_THE_LOSS}"
        )
    module.train()


def _draws(module: nn.Module, batch: Any) -> bool:
    """True if the loss of a batch is another one each time, with dropout off."""
    module.eval()
    with torch.no_grad():
        one, other = (float(module(copy.deepcopy(batch))) for _ in range(2))  # it may change it
    module.train()
    return not math.isclose(one, other, rel_tol=SAME_LOSS)


def _fault_of(loss: MeanLoss, module: nn.Module, train_set: SampleSet) -> Fault | LossFault | None:
    try:
        return not_adding_up(module, loss_function(loss), train_set, torch.device("cpu"))
    except LossFault as fault:
        return fault
    except SourceFault:
        raise
    except Exception as error:  # of the user's loss
        raise ValueError(
            f"the loss of some of its samples by themselves raised {raised_where(error)}; it must hold for a batch of one sample, too"
        ) from error


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
