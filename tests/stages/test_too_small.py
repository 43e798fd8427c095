"""A memory limit far below what is predicted is refused before anything is probed."""

from __future__ import annotations

import pytest

from batchscout.orchestrator.stages.frontier.too_small import LEAST_OF_PREDICTED, check_fits
from batchscout.trainers.before.peak_memory import Line, PeakMemory
from tests.support.lane_player import study_of

MIB = 2**20
MODES = [PeakMemory((Line(30.0 * MIB, 10.0 * MIB),)), PeakMemory((Line(20.0 * MIB, 10.0 * MIB),))]


def test_a_limit_far_below_the_leanest_mode_is_refused_with_both_numbers() -> None:
    least = int(LEAST_OF_PREDICTED * 40 * MIB)
    check_fits(study_of(memory_limit=least), MODES, smallest=2)
    with pytest.raises(
        ValueError, match=r"memory_limit is .*, and micro-batch 2, .* takes 40 MiB at least .*; raise memory_limit"
    ):
        check_fits(study_of(memory_limit=least - 1), MODES, smallest=2)


def test_without_a_limit_or_a_prediction_nothing_is_refused() -> None:
    check_fits(study_of(), MODES, smallest=2)
    check_fits(study_of(memory_limit="1B"), [], smallest=2)
