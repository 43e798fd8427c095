"""Every effective batch has a rate, that of its fastest form."""

from __future__ import annotations

from dataclasses import replace

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.stages.frontier.findings import MeasuredPoint
from batchscout.orchestrator.stages.rates import Rate, rates
from tests.support.known_stage import Known
from tests.support.worlds import FRONTIER, FULL, MIB, NONE, THROUGHPUT


def point(mode: Mode, size: int, samples_per_second: float | None) -> MeasuredPoint:
    return MeasuredPoint(mode, size, 128.0 * (samples_per_second or 1.0), size * MIB, samples_per_second)


MEASURED = replace(
    FRONTIER,
    measured=(point(NONE, 2, 20.0), point(NONE, 8, 50.0), point(FULL, 8, 40.0), point(FULL, 16, 45.0)),
)
TIMED = Rate(8, 2, 16, NONE, samples_per_second=50.0, low=48.0, high=52.0, num_rounds=5)


def test_the_throughput_stages_rates_stand_as_they_were_timed() -> None:
    known = Known({"type": "train"}).concluded(MEASURED, replace(THROUGHPUT, rates=(TIMED,)))
    assert rates(known.context) == (TIMED,)


def test_without_them_every_micro_batch_of_the_frontier_is_an_effective_batch_in_its_fastest_form() -> None:
    known = Known({"type": "train"}).concluded(MEASURED, THROUGHPUT)
    found = rates(known.context)
    assert [(r.effective_batch_size, r.micro_batch_size, r.gradient_accumulation_steps, r.mode) for r in found] == [
        (2, 2, 1, NONE),
        (8, 8, 1, NONE),
        (16, 8, 2, NONE),  # 50 samples/s, where 16 at once needs checkpointing and reaches 45
    ]
    assert all(r.low < r.samples_per_second < r.high and r.num_rounds == 1 for r in found)


def test_an_effective_batch_counts_all_ranks() -> None:
    known = Known({"type": "train"}, world_size=4).concluded(MEASURED)
    assert [r.effective_batch_size for r in rates(known.context)] == [8, 32, 64]


def test_what_an_earlier_version_found_has_no_rates() -> None:
    earlier = replace(FRONTIER, measured=(point(NONE, 8, None),))
    assert rates(Known({"type": "train"}).concluded(earlier).context) == ()
    assert rates(Known({"type": "train"}).context) == ()
