"""What each memory knob declares of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

Effect = Literal["none", "rounding", "loss"]
Part = Literal["settings", "loss", "optimizer"]


def nothing(_: object) -> str:
    """Say nothing: there is nothing in the way."""
    return ""


@dataclass(frozen=True)
class Knob:
    """A way to train the same model in less memory. It may cost time, and some change what is learned."""

    name: str
    """The word in a study file."""
    words: str
    """The same in a sentence."""
    effect: Effect
    """What it does to the numbers. none: gradients and weights are the same but for the order of sums. rounding: so are they,
    and ranks add in another order. loss: training itself differs, so the loss must be looked at."""
    changes: Part
    """The part of a run that it replaces: settings of the trial, its loss, or its optimizer."""
    incompatible_with: Callable[[TrialConfig], str] = nothing
    """Returns what of a trial's configuration it does not go with, ending with the way out; empty if it goes."""
    missing: Callable[[str], str] = nothing
    """Returns what a machine whose device is of this type (cpu, cuda) lacks, ending with the way out; empty if it has all."""
    excludes: tuple[str, ...] = ()
    """Other knobs that it does not go with; one of the two says so."""
    tried_by_itself: bool = False
    """True if a frontier tries it unasked where memory is what binds. Such a knob changes no number."""


def needs_cuda(what: str) -> Callable[[str], str]:
    """Return `missing` of a knob that does its work between a GPU and its host."""

    def missing(device_type: str) -> str:
        if device_type == "cuda":
            return ""
        return (
            f"{what} to the host's memory, and on a CPU the tensors are there already; leave it out, or train on a GPU"
        )

    return missing
