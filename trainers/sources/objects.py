"""Objects of a script or a notebook, in a file from which every rank takes them: what is defined there has no import path."""

from __future__ import annotations

import copy
import functools
import hashlib
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from trainers.files import quoted, written_whole
from trainers.sources.code_text import text_of
from trainers.sources.takes_batch import TakesBatch

HERE = "trainers.sources.objects"


class WithLoss(TakesBatch):
    """module and loss(module, batch) -> (loss_sum, num_targets) as one module, which returns that pair for a batch."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.inner, self.loss = module, loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.inner, batch)


def keep(objects: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Write the objects into a file of the directory, and return the arguments by which the functions below find them: {file,
    digest}. Raises ValueError where one cannot be written."""
    digest = digest_of(objects)
    path = directory / f"objects-{digest}.pt"
    if not path.exists():
        with written_whole(path) as file:
            _write(objects, file)
    return {"file": str(path), "digest": digest}


def _write(objects: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write them as torch does: thousands of samples that are views of one tensor hold its memory once."""
    import cloudpickle

    try:
        torch.save(dict(objects), file, pickle_module=cloudpickle)
    except (TypeError, AttributeError, pickle.PicklingError, NotImplementedError, RecursionError) as error:
        raise ValueError(
            f"the objects cannot be written for the ranks ({type(error).__name__}: {error}); hand over a function that makes what "
            "cannot be pickled, such as an open file or a lock"
        ) from error


def model(*, file: str, digest: str) -> nn.Module:
    """Return the model that was handed over, or what the callable that was makes; with its loss, if that is a callable."""
    objects = _read(file, digest)
    given, loss = objects["model"], objects.get("loss")
    made = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
    return WithLoss(made, loss) if loss is not None else made


def data(*, file: str, digest: str) -> tuple[Any, Any]:
    """Return the sets (train, val) that were handed over."""
    objects = _read(file, digest)
    return objects["train"], objects["val"]


def make(*, file: str, digest: str) -> Any:
    """Return what the callable that was handed over makes: a Trainer, or (LightningModule, its data)."""
    return _read(file, digest)["make"]()


@functools.lru_cache(maxsize=1)
def _read(file: str, digest: str) -> Mapping[str, Any]:
    try:
        return torch.load(
            file, map_location="cpu", weights_only=False, mmap=True
        )  # the user's own objects, of this study
    except OSError as error:
        raise ValueError(
            f"the objects of this study cannot be read from {quoted(file)} ({error.strerror}); every node must see the run directory"
        ) from error


def digest_of(objects: Mapping[str, Any]) -> str:
    """Return a digest by which the same script finds its study again, and another model, data set or loss does not.

    Of code it covers what `text_of` does, of a module the weights, of a set its class, its length, and its `content_hash` or fingerprint.
    """
    digest = hashlib.sha256()
    for name, value in sorted(objects.items()):
        for part in (name, *_parts(value)):
            digest.update(part if isinstance(part, bytes) else str(part).encode())
    return digest.hexdigest()[:16]


def _parts(value: Any) -> list[str | bytes]:
    if isinstance(value, nn.Module):
        weights = [(name, tensor.detach().cpu().numpy().tobytes()) for name, tensor in value.state_dict().items()]
        return [text_of(type(value)), *(part for pair in weights for part in pair)]
    is_set = hasattr(value, "__iter__") or hasattr(value, "__len__")
    if is_set and not isinstance(value, type):  # a stream has no length
        told = getattr(value, "content_hash", None) or getattr(value, "_fingerprint", "")
        return [type(value).__qualname__, str(len(value) if hasattr(value, "__len__") else ""), str(told)]
    return [text_of(value)]
