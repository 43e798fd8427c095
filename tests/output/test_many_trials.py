"""A study of many trials is read in little memory, and its report stays one that people can read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reading_scale import VERBS, cost_of, write_study

from batchscout.orchestrator.cli import main
from batchscout.orchestrator.output.report.tables import MOST_ROWS, MOST_WRITTEN
from batchscout.orchestrator.stages.curves import MOST_CURVES, loss_curves
from batchscout.orchestrator.stages.figures import names_of
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.trial import Trial, TrialState
from tests.support.command_line import Typed

NUM_TRIALS = 2_000


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("study")
    write_study(run_dir, NUM_TRIALS)
    return run_dir


@pytest.fixture(scope="module")
def trials(run_dir: Path) -> list[Trial]:
    study = replay(run_dir / "journal.jsonl", "scale")
    assert len(study.trials) == NUM_TRIALS
    return list(study.trials.values())


@pytest.fixture(scope="module")
def html(run_dir: Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run_dir)])
    assert not ended.value.code
    return (run_dir / "report.html").read_text()


def test_a_figure_shows_the_curves_that_ended_lowest_and_says_so(trials: list[Trial]) -> None:
    winner = trials[-1].id  # as a stage may choose it: a small batch wins ties
    lowest = sorted(trials, key=lambda trial: trial.measured("val_loss"))[: MOST_CURVES - 1]
    names = names_of([*lowest, trials[-1]])
    assert len({*names.values()}) == MOST_CURVES
    for figure in loss_curves(trials, winner):
        shown = {series.label for series in figure.series}
        assert len(shown) == MOST_CURVES
        assert shown == {*names.values()}
        assert [series.label for series in figure.series if series.bold] == [names[winner]]
        assert f"The {MOST_CURVES} of {NUM_TRIALS:,} runs that ended lowest are shown." in figure.caption


def test_a_figure_of_few_runs_shows_all_of_them(trials: list[Trial]) -> None:
    for figure in loss_curves(trials[:MOST_CURVES], None):
        assert len(figure.series) == MOST_CURVES
        assert "ended lowest" not in figure.caption


def test_the_page_has_every_trial_once_and_no_figure_that_one_scrolls_through(html: str, trials: list[Trial]) -> None:
    rows = re.findall(r"<td><code>(.*?)</code>", html)
    data = re.search(r'<script type="application/json" class="rows">(.*?)</script>', html, flags=re.DOTALL)
    assert len(rows) == MOST_WRITTEN
    assert data is not None
    assert rows + [row[0] for row in json.loads(data[1])] == [trial.id for trial in trials]
    assert f"And {NUM_TRIALS - MOST_WRITTEN:,} more" in html
    assert len(html) < 0.1e6 + 500 * NUM_TRIALS
    svgs = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)]
    assert max(float(svg.attrib["viewBox"].split()[3]) for svg in svgs) < 1000


def test_the_page_says_how_many_alternatives_it_leaves_to_the_file(html: str, run_dir: Path) -> None:
    recommendation = json.loads((run_dir / "recommendation.json").read_text())
    for listed in (recommendation["alternatives"], recommendation["ruled_out"]):
        assert f"and {len(listed) - MOST_ROWS:,} more, in recommendation.json" in html
    assert recommendation["alternatives"][0]["trial"] in html


def test_status_shows_every_trial_in_a_line(run_dir: Path, trials: list[Trial], typed: Typed) -> None:
    _, out, _ = typed("status", str(run_dir))
    states = {*TrialState}
    lines = [line[2:].split() for line in out.splitlines() if line[2:].startswith("grid-")]
    shown = [(line[0], line[1]) for line in lines if line[1] in states]
    assert shown == [(trial.id, trial.state) for trial in trials]


@pytest.mark.slow
def test_status_for_programs_has_a_line_for_each_trial_and_holds_one_at_a_time(run_dir: Path) -> None:
    """All of them in one tree took 25 kB a trial."""
    replayed, told = (cost_of(verb, run_dir).peak_bytes for verb in ("status", "status_json"))
    assert told < replayed + 4e3 * NUM_TRIALS


@pytest.mark.parametrize("verb", ["status", "status_json"])
def test_a_reader_that_has_had_enough_is_no_error(run_dir: Path, verb: str) -> None:
    """As in `batchscout status RUN | head`."""
    command = [sys.executable, "-c", f"import sys; {VERBS[verb]}", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")
