"""What a run says while it trains (`Report`), and how it is answered (`Answer`). The driver reads both: no torch
here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from batchscout.trainers.notices import Notice
from batchscout.trainers.step_log import Step

ReportKind = Literal["progress", "milestone", "end", "notice"]


class Answer(StrEnum):
    """Whether the run that reported trains on. It is its text, so the two words may also come from elsewhere."""

    GO_ON = "go on"
    STOP = "stop"


@dataclass(frozen=True)
class Report:
    """The figures of a run at one moment.

    A `progress` report carries what was measured since the last one; a `milestone` report comes with an evaluation
    and a checkpoint; the `end` report is the last one of a run that has reached its budget. A `notice` report has no
    figures.
    """

    kind: ReportKind
    samples_seen: int
    """Training samples up to this report, over all ranks."""
    metrics: dict[str, float]
    rungs: tuple[int, ...] = ()
    """The rungs that the run has crossed here. The run waits for the answer before it trains on."""
    steps: tuple[Step, ...] = ()
    """Those since the last report."""
    notice: Notice | None = None
    """What a `notice` report is about."""


@dataclass(frozen=True)
class Known:
    """What the journal of a study knows of a run. A checkpoint that tells of more is not taken: the journal was removed
    or cut since, and what it does not hold has not happened."""

    tokens: frozenset[str]
    """Those of all drivers that have run the study."""
    evaluations: frozenset[int]
    """The sample counts at which the run has evaluated itself."""


ReportFunction = Callable[[Report], object]
"""Called with every report on rank 0. The run stops where it returns `Answer.STOP`, and goes on after anything else."""
