"""What a run says while it trains, and what it is answered. Loads no torch: the driver reads these, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["go on", "stop"]


@dataclass(frozen=True)
class Report:
    """What a run says of itself. `milestone` reports carry an evaluation and a checkpoint; `end` is the last one."""

    kind: Literal["progress", "milestone", "end"]
    samples_seen: int
    metrics: dict[str, float]
    rungs: tuple[int, ...] = ()
    """The rungs that were crossed here; the run waits for the verdict on them."""
    step_losses: tuple[float, ...] = ()
    """Of each step since the last report."""


ReportFunction = Callable[[Report], object]
