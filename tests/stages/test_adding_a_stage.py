"""A stage is its keys and one file: whatever shows a study finds the rest from there."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.plan import print_plan
from batchscout.orchestrator.output.recommendation import recommend
from batchscout.orchestrator.output.report.page import render_report
from batchscout.orchestrator.output.status import json_pieces, print_status
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import Axis, Figure, Mark, Series
from batchscout.orchestrator.stages.findings import concluded, winner_of
from batchscout.orchestrator.stages.stage import Change, Stage
from batchscout.orchestrator.study.events import Concluded, Ended, StageBegan, proposed
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import Proposal, TrialState
from batchscout.trainers.metrics import METRICS, Metric
from batchscout.trainers.strict import Strict
from tests.support.example_study import example_config, tell
from tests.support.outcome import recommendation_of

# What one writes to add a stage: its keys, for orchestrator/config/stages.py ...


class Pulse(Strict):
    """How fast does it beat?"""

    type: Literal["pulse"] = "pulse"
    beats: tuple[int, ...] = (1, 2)


# ... and its file, orchestrator/stages/pulse.py.


def propose(context: StageContext[Any]) -> list[Proposal]:
    config = context.trial(context.given_split(), None)
    names = [f"pulse-{beats}" for beats in context.stage.beats]
    return [Proposal(name, "pulse", config, candidate=name) for name in names]


@dataclass(frozen=True)
class PulseFindings:
    STAGE: ClassVar[str] = "pulse"

    winner: str


def conclude(context: StageContext[Any]) -> Conclusion:
    fastest = max(context.trials(), key=lambda trial: trial.measured("pulse_rate"))
    return concluded(PulseFindings(fastest.id), f"{fastest.id} beats fastest")


def describe(context: StageContext[Any]) -> list[str]:
    return [f"{len(context.stage.beats)} kinds of beats"]


def figures(context: StageContext[Any]) -> list[Figure]:
    rates = [(float(i), trial.metric("pulse_rate")) for i, trial in enumerate(context.trials())]
    marks = tuple(Mark(x, rate) for x, rate in rates if rate is not None)
    return [
        Figure("beats", Axis("trial"), Axis("beats a minute"), (Series("rate", marks),), "The caption of the beats.")
    ]


STAGE = Stage[Any](
    propose,
    conclude,
    describe,
    figures,
    ("val_loss", "pulse_rate", "doubled"),
    lambda context, trial: {"doubled": 2 * trial.measured("pulse_rate")} if "pulse_rate" in trial.metrics else {},
    winner=lambda context: winner_of(context.study, PulseFindings),
    change=lambda context: Change("pulse-1", model={"beats": 2.0}),
    precedence=1,
    num_full_runs=lambda context: len(context.stage.beats),
)


class _Page(HTMLParser):
    """The texts and the tags of the stage's section."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self._inside = ("id", "pulse") in attrs
        if self._inside:
            self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts.append(data)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> StudyConfig:
    """A study of this stage alone; what YAML may say is not asked."""
    module = ModuleType("batchscout.orchestrator.stages.pulse")
    module.__dict__["STAGE"] = STAGE
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(METRICS, "pulse_rate", Metric("Beats a minute."))  # rows of trainers/metrics.py
    monkeypatch.setitem(METRICS, "doubled", Metric("Twice that."))
    return example_config().model_copy(update={"stages": (Pulse(),), "seeds": (0, 1)})


@pytest.fixture
def study(config: StudyConfig) -> Study:
    """Its trials have ended, the second with the faster beat, and it has concluded."""
    study = Study(config.name)
    context = StageContext(config.stages[0], config, study)
    stage = stage_of(context.stage)
    tell(study, StageBegan(stage="pulse"))
    for number, wanted in enumerate(stage.propose(context), start=60):
        tell(study, proposed(wanted))
        metrics: dict[str, float | None] = {"val_loss": 3.0, "pulse_rate": float(number)}
        end = {"state": TrialState.COMPLETE, "cause": None, "reason": "", "metrics": metrics, "seconds": 1.0}
        tell(study, Ended(id=wanted.id, **end))
    tell(study, Concluded(**asdict(stage.conclude(context))))
    return study


def test_plan_describes_it_and_counts_its_runs(config: StudyConfig, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(config, Facts())
    said = capsys.readouterr().out
    assert "pulse: How fast does it beat?" in said
    assert "2 kinds of beats" in said
    assert "at most 4 full runs" in said  # of two beats with two seeds


def test_status_shows_it(config: StudyConfig, study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads("".join(json_pieces(config, study, is_driven=False)))["stages"] == [
        {"type": "pulse", "state": "complete"}
    ]
    print_status(config, study, is_driven=False)
    assert "pulse-2 beats fastest" in capsys.readouterr().out


def test_the_report_has_its_conclusion_its_figure_and_its_table(config: StudyConfig, study: Study) -> None:
    page = _Page(render_report(config, study, recommend(config, study)))
    texts = set(page.texts)
    assert {"How fast does it beat?", "pulse-2 beats fastest", "The caption of the beats.", "beats a minute"} <= texts
    assert {"pulse-1", "pulse-2", "val loss", "pulse rate", "doubled", "61", "122"} <= texts
    assert "svg" in page.tags


def test_what_it_chose_is_recommended(config: StudyConfig, study: Study) -> None:
    found = recommendation_of(config, study)
    assert found.evidence.trial == "pulse-2"
    assert [one.trial for one in found.alternatives] == ["pulse-1"]


def test_what_it_changed_of_the_run_that_was_chosen_before_is_recommended(config: StudyConfig, study: Study) -> None:
    found = recommendation_of(config, study)
    assert found.model_changes == {"beats": 2.0}
    assert found.answer.settings.endswith(", and beats 2")
    assert "the same run without beats 2" in found.answer.gain
    assert "the same run without beats 2" in found.verdict


def test_before_it_has_run_it_is_shown_as_open(config: StudyConfig) -> None:
    page = _Page(render_report(config, Study(config.name), None))
    assert "Has not begun." in page.texts
    assert "nothing measured" in page.texts
