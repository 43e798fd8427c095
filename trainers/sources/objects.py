"""Objects of a script or a notebook, in a file from which every rank takes them: what is defined there has no import path."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchscout.trainers.files import quoted, written_whole
from batchscout.trainers.sources.contents import contents, digest_of, weights
from batchscout.trainers.sources.takes_batch import TakesBatch


class WithLoss(TakesBatch):
    """module and loss(module, batch) -> (loss_sum, num_targets) as one module, which returns that pair for a batch."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.inner, self.loss = module, loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.inner, batch)


def kept_as(objects: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the arguments by which the functions below find the objects once they are written: {file, digests}. digests: by which the
    same script finds its study again, and another model, data set or loss does not, for each of these; of weights by themselves."""
    digests = {name: digest_of(contents(value)) for name, value in sorted(objects.items())}
    if isinstance(given := objects.get("model"), nn.Module):
        digests["weights"] = digest_of(weights(given))
    name = digest_of(part for pair in digests.items() for part in pair)
    return {"file": str(directory / f"objects-{name}.pt"), "digests": digests}


def keep(objects: Mapping[str, Any], path: Path) -> None:
    """Write the objects into the file. Raises ValueError where one cannot be written. torch writes them: thousands of samples that are
    views of one tensor hold its memory once."""
    import cloudpickle

    try:
        with written_whole(path) as file:
            torch.save(dict(objects), file, pickle_module=cloudpickle)
    except (TypeError, AttributeError, pickle.PicklingError, NotImplementedError, RecursionError) as error:
        raise ValueError(
            f"the objects cannot be written for the ranks ({type(error).__name__}: {error}); hand over a function that makes what "
            "cannot be pickled, such as an open file or a lock"
        ) from error


def model(*, file: str, digests: Mapping[str, str]) -> nn.Module:
    """Return the model that was handed over, or what the callable that was makes; with its loss, if that is a callable."""
    objects = _read(file)
    given, loss = objects["model"], objects.get("loss")
    made = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
    return WithLoss(made, loss) if loss is not None else made


def data(*, file: str, digests: Mapping[str, str]) -> tuple[Any, Any]:
    """Return the sets (train, val) that were handed over."""
    objects = _read(file)
    return objects["train"], objects["val"]


def make(*, file: str, digests: Mapping[str, str]) -> Any:
    """Return what the callable that was handed over makes: a Trainer, or what a LightningModule's `fit` is called with. What a notebook
    has made before and the callable only returns is another each time, and begins anew."""
    return _read_anew(file)["make"]()


def _read_anew(file: str) -> Mapping[str, Any]:
    try:
        # The user's own objects, of this study.
        return torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    except OSError as error:
        raise ValueError(
            f"the objects of this study cannot be read from {quoted(file)} ({error.strerror}); every node must see the run directory"
        ) from error


_read = functools.lru_cache(maxsize=1)(_read_anew)
"""The same, once: a file is named after its digests, and never another's."""
