"""Three run directories of journal format 1, as this version reads them: nothing that they say has changed.

`quickstart` ran all five stages; `every_end` has a trial of every final state but failed, and what an earlier study measured;
`every_state` was killed while one trial ran, and holds failed, paused and waiting ones.
"""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser

import pytest

from batchscout.orchestrator.cli import main
from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.recommendation import recommend
from batchscout.orchestrator.output.report.page import render_report
from batchscout.orchestrator.output.status import json_pieces
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import TrialState
from batchscout.trainers.config import TrialConfig
from tests.support.outcome import GOLDEN, kept_in

RUNS = sorted(path.name for path in GOLDEN.iterdir())


def read(run: str) -> tuple[StudyConfig, Study]:
    return kept_in(GOLDEN / run)


class _Text(HTMLParser):
    """What a person reads of a page, a line for each piece."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._in_style = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._in_style = tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if data.strip() and not self._in_style:
            self.lines.append(" ".join(data.split()))


@pytest.mark.parametrize("run", RUNS)
def test_status_says_what_it_said(run: str) -> None:
    said = json.loads("".join(json_pieces(*read(run), is_driven=False)))
    expected = json.loads((GOLDEN / run / "status.json").read_text())
    for then in expected["trials"]:  # what a configuration has since got stands as it did before there was a choice
        then["config"] = TrialConfig.model_validate(then["config"]).model_dump(mode="json", exclude={"device_peaks"})
    assert said == expected


@pytest.mark.parametrize("run", RUNS)
def test_the_recommendation_is_what_it_was(run: str) -> None:
    file = GOLDEN / run / "recommendation.json"
    expected = json.loads(file.read_text()) if file.exists() else None
    found = recommend(*read(run))
    assert (found and found.to_json()) == expected


@pytest.mark.parametrize("run", RUNS)
def test_the_report_says_what_it_said(run: str) -> None:
    """In whatever order, and whatever else it says since then."""
    config, study = read(run)
    page = render_report(config, study, recommend(config, study))
    said = (GOLDEN / run / "report.txt").read_text().splitlines()
    assert Counter(said) - Counter(_Text(page).lines) == Counter()


def test_the_three_hold_every_state_that_a_trial_can_be_in() -> None:
    states = {trial.state for run in RUNS for trial in read(run)[1].trials.values()}
    assert states == set(TrialState)
    assert any(trial.reused for trial in read("every_end")[1].trials.values())


def test_a_state_is_said_once_in_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not again as the cause of itself."""
    monkeypatch.setenv("COLUMNS", "250")
    for run in ("every_end", "every_state"):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["status", str(GOLDEN / run)])
    lines = capsys.readouterr().out.splitlines()
    for state in (TrialState.OUT_OF_MEMORY, TrialState.FAILED):
        said = [line for line in lines if f" {state} " in line]
        assert said
        assert all(line.count(state) == 1 for line in said)
