"""A memory limit into which nothing will fit, seen before anything is probed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.units import bytes_text
from batchscout.trainers.before.peak_memory import PeakMemory

LEAST_OF_PREDICTED = 0.5
"""Compiled code may take less than what is predicted for eager code, but hardly less than so much of it."""


def check_fits(config: StudyConfig, predicted: Iterable[PeakMemory], smallest: int) -> None:
    """Raise ValueError where a memory limit is far below what the smallest micro-batch takes in every mode. predicted: of all modes."""
    least = min((peak.bytes_at(smallest) for peak in predicted), default=None)
    if least is not None and config.memory_limit is not None and config.memory_limit < LEAST_OF_PREDICTED * least:
        raise ValueError(
            f"memory_limit is {bytes_text(config.memory_limit)}, and micro-batch {smallest}, the smallest that the frontier tries, takes "
            f"{bytes_text(least)} at least by prediction, in whatever mode; raise memory_limit, lower stages.frontier.smallest, or make the model "
            "smaller"
        )
