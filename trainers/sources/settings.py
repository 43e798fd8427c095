"""What an object that trains elsewhere says of a study. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

from batchscout.trainers.config import Schedule

GROUPS = "batchscout.trainers.sources.adapted:param_groups"
"""`optimizer.param_groups` of a study of such an object."""
LIBRARIES = ("transformers", "trl", "peft", "accelerate", "lightning", "pytorch-lightning")
"""Whose objects are taken, and what they are made with."""


@dataclass(frozen=True)
class Settings:
    keys: Mapping[str, Any]
    """As in a study file, which comes first where it says them itself."""
    told: tuple[str, ...]
    """What people should know, one sentence each."""
    run_samples: int | None = None
    """The samples of the run that it is set to; None where that has no end."""
    in_steps: bool = False
    """True if that run has a number of steps, and so more samples where a step has more; else it has a number of passes."""
    _: KW_ONLY
    sample_seconds: float | None = None
    """What a forward and backward pass takes for each sample at its own micro-batch, in one process; None where it was not timed."""
    processes: int = 1
    """Those whose samples `optimizer.reference_batch_size` counts."""
    taken: tuple[str, ...] = ()
    """What was found in it, a line each: for people who look whether that is right."""

    @property
    def accumulation(self) -> int:
        """The micro-batches of a step in one process."""
        of_all = self.keys["batch"]["micro_batch_size"] * self.processes
        return max(1, self.keys["optimizer"]["reference_batch_size"] // of_all)


@dataclass(frozen=True)
class OwnRun:
    """The run that an object which trains elsewhere is set to: what an export gives back, with other numbers."""

    library: Literal["transformers", "trl", "lightning", "script"]
    samples: int | None = None
    """None where it has no end, or none that is known."""
    samples_per_step: int = 1
    """Of all processes that are known of."""
    in_steps: bool = False
    """As in `Settings`."""
    schedule: Schedule | None = None
    """None where it could not be foretold."""
    rate_factor: float | None = 1.0
    """What its setting of the learning rate is of that of the first parameter group, at which a study trains: 10 where the first group has a
    tenth. None where nothing that it is called or made with sets the rate."""
    has_schedule: bool = False
    """True where its Trainer is given a schedule that is made already, so that no argument sets its length."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Those that its Trainer was made with and that are not as by default; of Lightning's its length alone."""
    arguments_class: str | None = None
    """The class of these arguments, as package.module:name; None where that is not known, and of Lightning's."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Its `optimizer`, `precision` and `batch`, as far as they are known, as keys of a study."""
    adds_up: bool = False
    """True where the gradient of its script is a sum, and not the mean over the samples of a step: it clips the norm of that."""
    not_plain: tuple[str, ...] = ()
    """Further ones whose values cannot be written down, or must not."""

    def with_steps_of(self, samples: int) -> OwnRun:
        """Return the run where a step of all processes together takes so many samples."""
        total = scaled(self.samples, self.in_steps, samples / self.samples_per_step)
        return replace(self, samples=total, samples_per_step=samples)


_SECRET = re.compile(r"(?!(bos|cls|eos|mask|pad|sep|unk)_)(.*_)?(token|api_key|password|secret)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """True of an argument whose value may be a secret, such as `hub_token`; the special tokens of a tokenizer are none."""
    return _SECRET.fullmatch(name) is not None


def scaled(samples: int | None, in_steps: bool, times: float) -> int | None:
    """Return the samples of a run whose steps take so many times as many."""
    return samples if samples is None or not in_steps else round(samples * times)


def told_of_checkpoint(trainer: Any) -> Iterator[str]:
    """Yield, where a script has its Trainer go on from a checkpoint, that a study does not."""
    if (checkpoint := getattr(trainer, "goes_on_from", None)) is not None:
        named = "its last" if checkpoint is True else checkpoint
        yield (
            f"the script goes on from a checkpoint ({named}), and a study is of the whole run, from the weights that the script gives its model before; "
            "have it load those of the checkpoint there to study what follows them"
        )


def num_samples_of(samples: Any) -> int | None:
    """Return how many samples a set has; None of a stream."""
    return len(samples) if hasattr(samples, "__len__") else None
