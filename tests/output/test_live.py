"""While a study runs its report is written again, now and then, at a cost that has a bound."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batchscout.orchestrator.output.live import LEAST_SECONDS, MOST_SHARE, LiveReport
from batchscout.orchestrator.output.recommendation import recommend
from batchscout.orchestrator.output.report.page import render_report
from batchscout.orchestrator.study.lines import read_lines
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.orchestrator.study.state import Study
from tests.support.example_study import example_config, example_study
from tests.support.outcome import GOLDEN


def written_during(seconds: float, page_seconds: float, run_dir: Path) -> Iterator[float]:
    """Yield the times at which pages were written while something happened ten times a second."""
    config, file, now = example_config(), run_dir / "report.html", 0.0

    def clock() -> float:
        nonlocal now
        if file.exists():  # read again since a page was written: that is how long it took
            now += page_seconds
        return now

    report = LiveReport(config, Study(config.name), run_dir, pytest.fail, clock)
    while now < seconds:
        report.stage_began(config.stages[0])
        if file.exists():
            file.unlink()
            yield now
        now += 0.1


@pytest.mark.parametrize("page_seconds", [0.01, 0.5, 3.0])
def test_pages_take_a_bounded_share_of_the_time(page_seconds: float, tmp_path: Path) -> None:
    whole = 300.0
    times = list(written_during(whole, page_seconds, tmp_path))
    assert len(times) >= 0.8 * min(whole / LEAST_SECONDS, MOST_SHARE * whole / page_seconds)
    assert len(times) * page_seconds <= MOST_SHARE * whole + page_seconds
    assert all(later - earlier >= LEAST_SECONDS for earlier, later in itertools.pairwise(times))


def test_the_page_of_a_running_study_says_so_and_looks_for_a_newer_one(tmp_path: Path) -> None:
    config = example_config()
    LiveReport(config, example_study(config), tmp_path, pytest.fail).stage_began(config.stages[0])
    page = (tmp_path / "report.html").read_text()
    found = re.search(r'<html lang="en" data-every="(.*?)">', page)
    assert found is not None
    assert float(found[1]) >= LEAST_SECONDS
    assert "while the study runs" in page


@pytest.mark.parametrize("run", ["quickstart", "every_end", "every_state"])
def test_there_is_a_page_at_every_moment_of_a_study(run: str) -> None:
    """Of the moments every ninth."""
    config = load_stored_study(GOLDEN / run / "study.yaml")
    study = Study(config.name)
    for number, line in enumerate(read_lines(GOLDEN / run / "journal.jsonl")):
        study.apply(line.event)
        if number % 9 == 0:
            assert render_report(config, study, recommend(config, study)).endswith("</html>\n")


def test_a_page_that_cannot_be_made_is_told_and_ends_no_study(tmp_path: Path) -> None:
    config, said = example_config(), list[str]()
    study = example_study(config)
    report = LiveReport(config, study, tmp_path, said.append)
    winner = study.conclusions["train"]
    study.conclusions["train"] = replace(winner, findings={"winner": "nobody"})  # which no trial is called
    for _ in range(3):
        report.stage_began(config.stages[0])
    assert len(said) == 1
    assert "batchscout report " in said[0]
