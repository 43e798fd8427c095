"""How many lanes a study has on a cluster that grows and shrinks, for the panel, `status` and the report."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.progress import Progress
from batchscout.orchestrator.output.report.setting import setting
from batchscout.orchestrator.output.status import print_status
from batchscout.orchestrator.study.events import LanesChanged, RunBegan
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.state import Study
from tests.support.example_study import example_config

BEGAN = 1_000.0
CHANGES = [
    LanesChanged(time=BEGAN + 60, lanes=1, most=4, reason="1 trial can run, and the nodes hold 1 lane"),
    LanesChanged(time=BEGAN + 61, lanes=1, most=4, asked=2, reason="2 trials can run and the nodes hold 1 lane"),
    LanesChanged(time=BEGAN + 120, lanes=2, most=4, reason="2 trials can run, and the nodes hold 2 lanes"),
]


@pytest.fixture
def config() -> StudyConfig:
    return example_config(stages=[{"type": "train"}])


@pytest.fixture
def study(config: StudyConfig) -> Study:
    study = Study(config.name)
    for event in (RunBegan(time=BEGAN, token="first"), *CHANGES):
        study.apply(event)
    return study


def panel(config: StudyConfig, study: Study) -> str:
    console = Console(file=(file := io.StringIO()), width=200)
    console.print(Progress(config, study, quiet=True).panel())
    return file.getvalue()


def test_the_panel_and_status_say_how_many_there_are_of_how_many_and_why(
    config: StudyConfig, study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "lanes: 2 of up to 4 (2 trials can run, and the nodes hold 2 lanes)"
    assert said in panel(config, study)
    print_status(config, study, is_driven=True)
    assert said in capsys.readouterr().out
    print_status(config, study, is_driven=False)
    assert "lanes:" not in capsys.readouterr().out, "without a driver there is none"


def test_where_all_lanes_are_open_from_the_beginning_nothing_is_said(config: StudyConfig) -> None:
    assert "lanes:" not in panel(config, Study(config.name))
    assert "lanes" not in setting(config, Study(config.name))


def test_the_report_says_from_when_on_there_were_how_many(config: StudyConfig, study: Study) -> None:
    assert setting(config, study)["lanes"] == "up to 4: 1 from 1 min 0 s on, 2 from 2 min 0 s on"


def test_the_lanes_of_a_driver_end_with_it(config: StudyConfig, study: Study) -> None:
    study.apply(RunBegan(time=BEGAN + 300, token="second"))
    assert "lanes: 0 of up to 4 (another driver begins)" in panel(config, study)
    assert setting(config, study)["lanes"].endswith("2 from 2 min 0 s on, 0 from 5 min 0 s on")


def test_the_journal_has_every_change_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl", "s") as journal:
        for event in (*CHANGES, CHANGES[-1]):
            journal.append(event)
    assert replay(tmp_path / "journal.jsonl", "s").lanes == CHANGES
