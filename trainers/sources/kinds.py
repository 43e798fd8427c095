"""Which library an object is of, by the names of its classes."""

from __future__ import annotations

from typing import Any

LIGHTNING = ("lightning", "pytorch_lightning")
"""The two names under which the library is imported."""
HUGGING_FACE = ("transformers", "peft")
"""Whose models take a batch by the names of its members."""


def is_lightning_module(found: object) -> bool:
    return _descends_from(found, "LightningModule", LIGHTNING)


def is_lightning_data(found: object) -> bool:
    return _descends_from(found, "LightningDataModule", LIGHTNING)


def is_lightning_trainer(found: object) -> bool:
    return _descends_from(found, "Trainer", LIGHTNING)


def is_transformers_trainer(found: object) -> bool:
    return _descends_from(found, "Trainer", ("transformers",))


def is_lightning_run(found: object) -> bool:
    """True of a tuple that begins with a LightningModule, as what its Trainer's `fit` is called with does."""
    return isinstance(found, tuple) and bool(found) and is_lightning_module(found[0])


def is_overridden(found: object, method: str, libraries: tuple[str, ...]) -> bool:
    """True if the method is not the one that a library's own class has."""
    return library_of(getattr(found, method, None)) not in (*libraries, "")


def refuse_callback(callback: object, in_a_step: tuple[str, ...], libraries: tuple[str, ...]) -> None:
    """Raise ValueError for a callback of the user's own that a Trainer calls in the middle of a step, by one of these methods."""
    if changed := [method for method in in_a_step if is_overridden(callback, method, libraries)]:
        raise ValueError(
            f"the Trainer's callback {type(callback).__name__} has {', '.join(changed)}, which may change the gradient or the weights in the "
            "middle of a step; leave it out of what is studied, and add it to the run that the recommendation is for"
        )


def library_of(found: Any) -> str:
    """Return the name of the package that a class, a function or a method is defined in; empty for None."""
    return getattr(found, "__module__", "").partition(".")[0] if found is not None else ""


def _descends_from(found: object, name: str, libraries: tuple[str, ...]) -> bool:
    return any(base.__name__ == name and library_of(base) in libraries for base in type(found).__mro__)
