"""Figures as plain values: axes, marks and lines. `batchscout.orchestrator.output` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import exact_text, number_text, rate_text
from batchscout.trainers.config import Split, TrialConfig

CHOSEN_COLOUR, FAILED_COLOUR, BASELINE_COLOUR, OTHERS_COLOUR = 0, 1, 2, 5
"""One colour for each role, in all figures."""
AUXILIARY_COLOUR = 6
"""The colour of what is not measured itself, such as a floor or a front."""
PRUNED_COLOUR, COMPILING_COLOUR = 4, 10
CATEGORIES = (3, 7, 8, 9, 11)
"""The colours of what has no role, such as the modes of a frontier."""


@dataclass(frozen=True)
class Mark:
    """A point of a series."""

    x: float
    y: float
    text: str = ""
    """What is written beside it."""
    kind: Literal["point", "cross", "chosen", "baseline"] = "point"
    """A cross marks a failure; a ring marks what was chosen. All but a point have the colour of their role."""
    low: float | None = None
    high: float | None = None
    """The ends of an interval of y, drawn where both are given. It may go on without an upper end (math.inf)."""
    told: str = ""
    """What else is told of it where the pointer is on it."""
    aside: float = 0.0
    """By how many pixels it is drawn to the right of its x, where another mark is there, too."""


@dataclass(frozen=True)
class Series:
    """Marks that belong together."""

    label: str
    """What is written at the right edge; empty for nothing."""
    marks: tuple[Mark, ...]
    colour: int = 0
    """A number; the same number is the same colour and shape everywhere."""
    joined: bool = True
    dashed: bool = False
    steps: bool = False
    """True for what keeps its value until the next mark: joined by steps, and has no marks of its own."""
    bold: bool = False
    faint: bool = False
    """True for what another series of the same label smooths: that one has the name."""


@dataclass(frozen=True)
class Cell:
    """A rectangle of the plane, behind the marks."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    told: str
    """What it stands for: told where the pointer is on it."""
    colour: int = 0
    strength: float = 1.0
    """How strong its colour is, from 0 to 1."""


@dataclass(frozen=True)
class Line:
    """A limit or a tolerance, across the whole figure."""

    value: float
    label: str
    vertical: bool = False


@dataclass(frozen=True)
class Axis:
    label: str
    text: Callable[[float], str] = number_text
    """Returns what is written at a tick."""
    log: bool = False
    zero: bool = False
    """True if it begins at zero."""
    ticks: tuple[float, ...] = ()
    """Where the ticks are; empty for round numbers."""
    unit: float = 1.0
    """Round numbers are multiples of it."""
    top: float | None = None
    bottom: float | None = None
    """Values above the one and below the other are not shown."""

    precise: Callable[[float], str] | None = None
    """Returns what is told of a value under the pointer and in a table; None for what is written at a tick, of plain numbers with more
    digits."""

    def told(self, value: float) -> str:
        """Return what is told of a value under the pointer and in a table."""
        return (self.precise or (exact_text if self.text is number_text else self.text))(value)


@dataclass(frozen=True)
class Figure:
    """One chart with its caption. Marks that an axis cannot show are left out."""

    name: str
    """What it is asked for by; no other figure of its stage has it."""
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    caption: str = ""
    lines: tuple[Line, ...] = ()
    cells: tuple[Cell, ...] = ()
    key: Mapping[str, int] = field(default_factory=dict)
    """What the colours of the cells stand for, where they tell kinds apart."""
    shades: Mapping[str, float] = field(default_factory=dict)
    """What some strengths of the cells stand for, where they tell a value: a scale of them."""
    beside: str = ""
    """What the texts beside its marks are, such as micro-batches."""
    width: int = 540
    """In pixels."""
    height: int = 270


def coherence_mark(x: float, coherence: float, floor: float | None) -> Mark:
    """Return the coherence with its interval, as far as that lies between opposite gradients (-1) and equal ones (1).

    floor: how far the mean of so many steps may lie off, in 95 % of all cases; None where it is not known.
    """
    if floor is None:
        return Mark(x, coherence)
    return Mark(x, coherence, low=max(coherence - floor, -1.0), high=min(coherence + floor, 1.0))


def noise_scale_mark(x: float, noise_scale: float, low: float | None, high: float | None) -> Mark:
    """Return the noise scale with its interval, which has a lower end alone where the steps do not exclude that they are noise."""
    return Mark(x, noise_scale, low=low, high=math.inf if high is None and low is not None else high)


def rate_axis(unit: str) -> Axis:
    """Return an axis of samples or tokens a second, told with as many digits as in sentences."""
    return Axis(unit, zero=True, precise=lambda rate: rate_text(rate, "").rstrip())


def time_axis(label: str, longest: float) -> Axis:
    """Return an axis of seconds, told in the unit that suits the longest time."""
    units = ((3600, "h"), (60, "min"), (1, "s"))
    unit, name = next((unit, name) for unit, name in units if longest >= 2 * unit or unit == 1)
    return Axis(f"{label}, {name}", lambda seconds: number_text(seconds / unit), zero=True, unit=unit)


def batch_text(config: TrialConfig) -> str:
    """Return `4 (4 x 1)`: the effective batch, and its micro-batch, accumulation steps and, of several, ranks."""
    return f"{config.effective_batch_size} ({split_text(config.split)})"


def batches_text(batches: Sequence[int]) -> str:
    """Return `effective batch 4`, `effective batches 4, 8` and the like."""
    return f"effective batch{'es' if len(batches) > 1 else ''} {', '.join(map(str, batches))}"


def split_text(split: Split) -> str:
    """Return `4 x 1`: the micro-batch, and its accumulation steps and, of several, ranks."""
    ranks = f" x {split.world_size}" if split.world_size > 1 else ""
    return f"{split.micro_batch_size} x {split.gradient_accumulation_steps}{ranks}"


def names_of(trials: Sequence[Trial]) -> dict[str, str]:
    """Return for each id how people read it: `batch 4 (4 x 1)` and whatever else tells the trials of one batch apart."""
    parts = {trial.id: [f"batch {batch_text(trial.config)}"] for trial in trials}
    more: tuple[Callable[[Trial], str], ...] = (
        lambda trial: f"lr {trial.config.learning_rate:.3g}",
        lambda trial: str(trial.config.activation_checkpointing),
        lambda trial: f"seed {trial.config.seed}",
        lambda trial: trial.id,
    )
    for part in more:
        told: dict[str, list[Trial]] = {}
        for trial in trials:
            told.setdefault(", ".join(parts[trial.id]), []).append(trial)
        for alike in told.values():
            if len({part(trial) for trial in alike}) > 1:
                for trial in alike:
                    parts[trial.id].append(part(trial))
    return {name: ", ".join(some) for name, some in parts.items()}
