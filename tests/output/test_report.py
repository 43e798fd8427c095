"""The report says what the study knows, whatever that is, and nothing in it is taken for markup."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import apply_override, parse_study
from batchscout.orchestrator.config.stages import Grid, Train
from batchscout.orchestrator.config.trial import base_trial, optimizer_at
from batchscout.orchestrator.output.plots import Scale, element, plot, spread, ticks
from batchscout.orchestrator.output.report.answer import paste_text, short_answer
from batchscout.orchestrator.output.report.figures import figure_element
from batchscout.orchestrator.output.report.page import render_report, write_report
from batchscout.orchestrator.output.report.setting import setting
from batchscout.orchestrator.output.status import MOST_NOTICES, print_status
from batchscout.orchestrator.output.time_split import LaneTime, lane_time, time_split
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import Axis, Figure, Mark, Series
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.train import TrainFindings
from batchscout.orchestrator.stages.train.choice import so_far
from batchscout.orchestrator.stages.train.findings import chosen_run
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Concluded, Ended, Evaluated, Noticed, RunBegan, Started
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, TrialState
from batchscout.orchestrator.units import listed, number_text, share_text, training_time_text
from batchscout.trainers.notices import NoticeKind
from tests.support.example_study import (
    ANSWER,
    add_trial,
    conclude,
    end_trial,
    example_config,
    example_recommendation,
    example_study,
    tell,
)
from tests.support.outcome import GOLDEN, RECORDED, kept_in

STAGES = ("frontier", "throughput", "equivalence", "train", "learning_rate")
VOID = ("meta", "input")


class Page(HTMLParser):
    """What a browser would find: sections, the elements and the text in each; unbalanced tags are an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.data: list[str] = []
        self.open: list[tuple[str, str | None]] = []
        self.texts: dict[str | None, str] = {}
        self.tags: dict[str | None, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    @property
    def section(self) -> str | None:
        return next((name for tag, name in reversed(self.open) if tag == "section"), None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))
        self.tags.setdefault(self.section, []).append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "script":
            self.data.append(data)
            return
        self.texts[self.section] = self.texts.get(self.section, "") + data


@pytest.fixture(scope="module")
def config() -> StudyConfig:
    return example_config()


@pytest.fixture(scope="module")
def study(config: StudyConfig) -> Study:
    return example_study(config)


@pytest.fixture(scope="module")
def html(config: StudyConfig, study: Study) -> str:
    return render_report(config, study, example_recommendation())


def svgs(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)]


def test_every_stage_has_its_question_its_conclusion_a_plot_and_its_trials(html: str, study: Study) -> None:
    page = Page(html)
    for stage in STAGES:
        text = page.texts[stage]
        assert study.conclusions[stage].reason in text
        assert "?" in text
        assert "svg" in page.tags[stage]
        for trial in study.of_stage(stage):
            assert trial.id in text
            assert trial.explanation_beside_state in text


def test_what_leads_to_a_section_has_the_words_of_its_heading(html: str) -> None:
    tree = ElementTree.fromstring(
        re.sub(r"<(meta|input)([^>]*)>", r"<\1\2/>", re.sub(r"<script.*?</script>", "", html, flags=re.S)[15:])
    )
    headings = {one.get("id"): one.findtext("h2") for one in tree.iter("section")}
    leads = {link.get("href", "")[1:]: link.text for nav in tree.iter("nav") for link in nav}
    assert leads == {name: words or "recommendation" for name, words in headings.items() if name in leads}
    assert {"training", "setting", *headings} - {*leads} <= {"training", "setting", "notices"}


def test_one_table_has_the_trials_of_all_stages_where_several_have_any(html: str, config: StudyConfig) -> None:
    study = example_study(config)
    table = html[html.index('<section id="trials">') : html.index('<section id="time">')]
    rows = re.findall(r"<td><code>(.*?)</code>.*?<td class=\"number\">(.*?)</td>", table)
    assert sorted(rows) == sorted((trial.id, trial.stage) for trial in study.trials.values())
    alone = Study(config.name)
    add_trial(alone, config, "train-m1")
    assert "trials" not in Page(render_report(config, alone, None)).tags


def test_the_chart_beside_the_answer_is_that_of_the_run_which_is_recommended(config: StudyConfig, study: Study) -> None:
    """A stage after it may recommend another, which that chart knows nothing of."""
    evidence = {"stages": {}, "notes": []}
    for trial, beside in (("learning_rate-x1", True), ("learning_rate-x0.5", False)):
        recommendation = example_recommendation(evidence={"trial": trial, **evidence})
        page = render_report(config, study, recommendation)
        assert page.count('id="train-differences"') == 1
        assert (page.index('id="train-differences"') < page.index('<section id="train"')) == beside


def test_the_recommendation_comes_first_and_whole(html: str) -> None:
    page = Page(html)
    text = page.texts["recommendation"] + page.texts["evidence"]
    rendered = ("Train with micro-batch 16", "0.0006", "rho is at most 1.9e-05", "35,300", "4.1 GiB")
    for part in (*rendered, "second largest", "rung: place 5 of 6 at 16384"):
        assert part in text
    assert html.index('id="recommendation"') < html.index('id="frontier"')


def test_every_plot_is_well_formed_and_draws_inside_its_box(html: str) -> None:
    charts = svgs(html)
    assert len(charts) >= 1 + 4 + 1 + 2 + 1
    for chart in charts:
        width, height = (float(side) for side in chart.attrib["viewBox"].split()[2:])
        for node in chart.iter():
            for key, limit in (
                ("x", width),
                ("cx", width),
                ("x1", width),
                ("x2", width),
                ("y", height),
                ("cy", height),
            ):
                assert -1 <= float(node.attrib.get(key, 0)) <= limit + 1, (node.tag, node.attrib)
            for point in node.attrib.get("points", "").split():
                x, y = map(float, point.split(","))
                assert -1 <= x <= width + 1
                assert -1 <= y <= height + 1


def test_the_page_loads_nothing(html: str) -> None:
    page = Page(html)
    loading = ("src", "href", "xlink:href", "data", "action", "srcset")
    assert [(name, to) for name, to in page.attributes if name in loading and not (to or "").startswith("#")] == []
    assert not re.search(r"url\(|@import|https?://", re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))
    assert {"link", "img", "iframe"}.isdisjoint({tag for tags in page.tags.values() for tag in tags})


def test_text_from_the_data_is_never_markup(config: StudyConfig) -> None:
    hostile = "<script>alert('x')</script> & \"quoted\""
    study = Study(config.name)
    add_trial(study, config, "train-m1", role=hostile)
    end_trial(study, "train-m1", 1.0, {}, TrialState.FAILED, Cause.FAILED, hostile)
    conclude(study, TrainFindings(winner=hostile, val_loss=1.0), hostile, (hostile,))
    recommendation = example_recommendation(
        answer=ANSWER | {"settings": hostile}, evidence={"trial": "train-m1", "stages": {hostile: hostile}, "notes": []}
    )
    page = Page(render_report(config, study, recommendation))
    tags = [tag for tags in page.tags.values() for tag in tags]
    assert tags.count("script") == 1 + sum(
        one.startswith(("{", "[")) for one in page.data
    )  # the page's own, and its data
    assert "alert('x')" not in "".join(one for one in page.data if not one.startswith(("{", "[")))
    assert page.texts["train"].count(hostile) == 4
    assert page.texts["recommendation"].startswith(f"Train with{hostile}")
    assert page.texts["evidence"].count(hostile) == 2


def test_a_study_without_trials_renders_and_says_what_is_open(config: StudyConfig) -> None:
    page = Page(render_report(config, Study(config.name), None))
    for stage in STAGES:
        assert "Has not begun" in page.texts[stage]
        assert "svg" in page.tags[stage]
    assert "Unfinished" in page.texts["recommendation"]
    assert "frontier, throughput, equivalence, train, learning_rate" in page.texts["recommendation"]


def test_without_a_recommendation_it_says_what_is_known(config: StudyConfig, study: Study) -> None:
    text = Page(render_report(config, study, None)).texts["recommendation"]
    assert "Undetermined" in text
    assert study.conclusions["throughput"].reason in text


def test_a_recommendation_before_the_end_is_called_provisional(config: StudyConfig, html: str) -> None:
    study = example_study(config)
    del study.conclusions["learning_rate"]
    text = Page(render_report(config, study, example_recommendation())).texts["recommendation"]
    assert "Still open: learning_rate." in text
    assert "Still open" not in html


@pytest.mark.parametrize("failed", ["frontier", "learning_rate"])
def test_a_study_that_a_stage_ended_says_at_which_and_why_and_calls_nothing_open(
    config: StudyConfig, failed: str
) -> None:
    whole, later = example_study(config), STAGES[STAGES.index(failed) + 1 :]
    study = whole if failed == "learning_rate" else Study(config.name)
    tell(study, Concluded(stage=failed, ok=False, reason="none of its trials finished"))
    page = Page(render_report(config, study, example_recommendation() if study is whole else None))
    text = page.texts["recommendation"]
    assert f"The study ended at {failed}: none of its trials finished." in text
    assert (f"Not run: {', '.join(later)}." in text) is bool(later)
    assert all("Did not run: the study ended before it." in page.texts[stage] for stage in later)
    assert not re.search("open|Unfinished", text)


def test_a_study_in_which_nothing_trains_is_not_called_undetermined() -> None:
    config = example_config(stages=[{"type": "frontier"}])
    study = Study(config.name)
    tell(study, Concluded(stage="frontier", ok=True, reason="micro-batch 8 fits"))
    text = Page(render_report(config, study, None)).texts["recommendation"]
    assert "none of the study's stages trains what could be one." in text
    assert "micro-batch 8 fits" in text


def test_waiting_trials_and_a_grid_stage_render() -> None:
    config = example_config(stages=[{"type": "grid", "micro_batch_size": [4, 8]}])
    study = Study(config.name)
    add_trial(study, config, "grid-m4", micro_batch_size=4)
    add_trial(study, config, "grid-m8", micro_batch_size=8)
    page = Page(render_report(config, study, None))
    assert "0 of 2 trials so far have ended" in page.texts["grid"]
    assert "grid-m8" in page.texts["grid"]
    assert "frontier" not in page.texts


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_metrics_that_are_no_numbers_render_as_a_dash(config: StudyConfig, bad: float | None) -> None:
    study = Study(config.name)
    keys = ("tokens_per_second", "peak_memory_bytes", "rho", "val_loss", "noise_scale", "coherence", "train_seconds")
    for stage in STAGES:
        for name, value in (("a", bad), ("b", 2.0)):
            add_trial(study, config, f"{stage}-{name}")
            metrics: Metrics = dict.fromkeys(keys, value) | {"samples_seen": 8}
            tell(study, Evaluated(id=f"{stage}-{name}", metrics=metrics))
            end_trial(study, f"{stage}-{name}", 2.0, metrics)
    html = render_report(config, study, None)
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL))
    assert all(json.loads(one) for one in Page(html).data if one.startswith("{"))
    assert '<td class="number">-</td>' in html
    assert "not available" in Page(html).texts["throughput"]
    assert len(svgs(html)) >= 9


def test_time_adds_up(html: str, study: Study) -> None:
    text = Page(html).texts["time"]
    seconds = round(sum(trial.seconds for trial in study.trials.values()))
    assert f"{seconds // 60} min {seconds % 60} s of lane time" in text


def test_what_runs_holds_its_lane_for_no_less_time_than_it_has_trained() -> None:
    """How long it did is written down when it ends; how long it has trained with each evaluation."""
    config = example_config(stages=[{"type": "train"}])
    study = Study(config.name)
    for name in ("train-m8", "train-m16"):
        add_trial(study, config, name)
    complete: dict[str, Any] = {"state": TrialState.COMPLETE, "cause": None, "reason": ""}
    for event in (
        Started(id="train-m8", time=100),
        Ended(id="train-m8", time=160, seconds=60, metrics={"train_seconds": 50}, **complete),
        Started(id="train-m16", time=200),
        Evaluated(id="train-m16", time=900, metrics={"samples_seen": 8, "train_seconds": 600}),
    ):
        tell(study, event)
    assert lane_time(study, [*study.trials.values()]) == LaneTime(760, 650, 0)
    assert time_split(study)["rest"] == 110
    page = Page(render_report(config, study, None))
    assert "12 min 40 s of lane time in all" in page.texts["time"]
    assert "700.0" in page.texts["train"], "its row has it, too"


def test_what_an_earlier_study_measured_took_none_of_this_ones_time() -> None:
    _, known = kept_in(GOLDEN / "every_end")
    reused = [trial for trial in known.trials.values() if trial.reused]
    assert any(trial.metric("train_seconds") for trial in reused)
    assert lane_time(known, reused) == LaneTime(0, 0, 0)
    assert lane_time(known, [*known.trials.values()]).held == pytest.approx(
        sum(t.seconds for t in known.trials.values())
    )


@pytest.mark.parametrize("rules", [{}, {"beta2_scaling": "samples", "weight_decay_scaling": "samples"}])
@pytest.mark.parametrize("changes", [{}, {"model_changes": {"dropout": 0.1}}])
def test_what_is_pasted_into_the_study_file_is_the_recommendation(
    rules: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = example_config(optimizer={"lr": 1e-4, **rules})
    settings = optimizer_at(config.optimizer, 64, 5e-5)
    twice_the_reference_batch = {"gradient_accumulation_steps": 4, "effective_batch_size": 64}
    recommendation = example_recommendation(learning_rate=5e-5, **twice_the_reference_batch, **changes)
    recommendation = replace(recommendation, optimizer=settings)
    keys, _, command = paste_text(recommendation, config.optimizer).partition("\n\n")
    file, written = config.model_dump(mode="json", exclude={"stages", "batch"}), yaml.safe_load(keys)
    for key in ("optimizer", "model"):
        written[key] = file[key] | written.get(key, {})
    tree = file | written
    pasted = parse_study(tree, "pasted")
    points = pasted.keys_of(Grid)
    assert points is not None
    assert points.activation_checkpointing == ("selective",)
    assert points.effective_batch_size == (64,)
    overridden = config.model_dump(mode="json")
    for word in shlex.split(command.replace("\\\n", " "), comments=True)[3:]:
        if word != "--set":
            apply_override(overridden, word)
    for parsed in (pasted, parse_study(overridden, "set")):
        trial = base_trial(parsed, None)
        for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size", "precision", "warmup_samples"):
            assert getattr(trial, key) == getattr(recommendation, key)
        assert trial.learning_rate == pytest.approx(5e-5)
        assert trial.effective_batch_size == recommendation.effective_batch_size
        assert trial.optimizer == settings
        assert trial.model.kwargs.items() >= (recommendation.model_changes or {}).items()


def test_text_that_is_no_unicode_is_still_written(tmp_path: Path, config: StudyConfig) -> None:
    study = Study(config.name)
    add_trial(study, config, "train-m1")
    end_trial(study, "train-m1", 1.0, {}, TrialState.FAILED, Cause.FAILED, "half a \ud800 letter in an error's text")
    torn = replace(example_recommendation(), verdict="a torn \ud800 character")
    write_report(tmp_path / "report.html", config, study, torn)
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a torn ? character" in written
    assert "half a ? letter in an error's text" in written


def test_the_report_is_replaced_whole(tmp_path: Path, config: StudyConfig, study: Study, html: str) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    before = os.stat(path).st_ino
    write_report(path, config, study, example_recommendation())
    assert path.read_text() == html
    assert os.stat(path).st_ino != before
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234, "1.23k"),
        (999_999, "1M"),
        (40_000, "40k"),
        (3.4e6, "3.4M"),
        (6e-4, "0.0006"),
        (2.14e-5, "2.14e-05"),
        (0.25, "0.25"),
    ],
)
def test_numbers_as_people_read_them(value: float, text: str) -> None:
    assert number_text(value) == text


def test_no_line_ends_within_a_number_of_a_sentence() -> None:
    said = "rho <= 5.9e-06 (tolerance 1.0e-04)"
    sentence = element("p", said, element("code", "lr=1e-05"))
    assert [one.text for one in sentence.iter("span")] == ["5.9e-06", "1.0e-04"]
    assert "".join(sentence.itertext()) == f"{said}lr=1e-05", "what one looks for and copies is what it was"


def test_labels_keep_their_distance_and_their_order() -> None:
    places = spread([10, 11, 12, 99, 100], 13, 10, 100)
    assert all(later - earlier >= 13 for earlier, later in itertools.pairwise(places))
    assert min(places) >= 10
    assert max(places) <= 100
    assert spread([10, 50, 90], 13, 0, 100) == [10, 50, 90]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("points", [[(1, 1)], [(1, 5), (2, 5)], [(1e-9, 1e-9), (1e9, 1e9)]])
def test_a_plot_of_any_range_has_finite_coordinates(points: list[tuple[float, float]], log: bool) -> None:
    series = (Series("a", tuple(Mark(x, y) for x, y in points)),)
    chart = plot(Figure("f", Axis("x", log=log), Axis("y", log=log), series))
    text = ElementTree.tostring(chart, encoding="unicode")
    assert not re.search(r"nan|inf", text)
    assert text.count('class="dot"') == len(points)


@pytest.mark.parametrize(
    ("y", "axis"),
    [(math.nan, Axis("y")), (math.inf, Axis("y")), (-1.0, Axis("y", log=True)), (11.0, Axis("y", top=10.0))],
)
def test_a_plot_leaves_out_what_its_axis_cannot_show(y: float, axis: Axis) -> None:
    marks = (Mark(1.0, 1.0), Mark(2.0, 5.0), Mark(3.0, y))
    chart = plot(Figure("f", Axis("x"), axis, (Series("a", marks),)))
    assert ElementTree.tostring(chart, encoding="unicode").count('class="dot"') == 2


def test_status_and_report_say_what_was_met_and_dealt_with_and_not_all_of_very_much(
    config: StudyConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Study(config.name)
    assert "notices" not in Page(render_report(config, study, None)).texts
    kind = NoticeKind.REBUILT_DATA
    for event in 2 * [Noticed(id=None, notice=kind, reason="the data cache was damaged, and was made again")]:
        tell(study, event)  # the second time it changes nothing
    add_trial(study, config, "train-m1")
    for number in range(MOST_NOTICES):
        tell(study, Noticed(id="train-m1", notice=NoticeKind.DAMAGED_CHECKPOINT, reason=f"{number}.pt is damaged"))
    print_status(config, study, is_driven=True)
    for said in (capsys.readouterr().out, Page(render_report(config, study, None)).texts["notices"]):
        assert said.count("the data cache was damaged, and was made again") == 1
        assert "train-m1: 0.pt is damaged" in said
        assert f"{MOST_NOTICES - 1}.pt" not in said
        assert "and 1 more, in journal.jsonl" in said


def test_status_and_report_count_the_deaths_of_lanes_and_show_the_first(
    config: StudyConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Study(config.name)
    add_trial(study, config, "train-m1")
    for number in range(24):
        tell(study, Noticed(id="train-m1", notice=NoticeKind.LANE_DIED, reason=f"process {number} died"))
    print_status(config, study, is_driven=True)
    for said in (capsys.readouterr().out, Page(render_report(config, study, None)).texts["notices"]):
        assert "died 24 times" in said
        assert "train-m1: process 0 died" in said
        assert "process 1 died" not in said


def test_status_stars_what_a_stage_chose_and_begins_no_line_of_a_sentence_at_the_margin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, known = kept_in(RECORDED)
    monkeypatch.setenv("COLUMNS", "60")
    print_status(config, known, is_driven=False)
    lines = capsys.readouterr().out.split("\nfrontier: ")[1].splitlines()
    starred = [line.split()[1] for line in lines if line.startswith("*")]
    frontier = found(known, FrontierFindings)
    assert frontier
    assert starred == [frontier.winner, chosen_run(known)], "a round of throughput's is no finding"
    heads = {f"{keys.type}: complete" for keys in config.stages}
    assert all(line[:1] in ("", " ", "*") or line in heads or line.startswith("time: ") for line in lines[1:-1])


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_status_breaks_no_figure_of_a_trial_where_the_terminal_is_narrow(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    config, known = kept_in(RECORDED)
    print_status(config, known, is_driven=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > columns and "batchscout " not in line] == []
    assert sum("tokens/s" in line for line in lines) > 20


def test_the_last_losses_have_the_seeds_deviation_where_it_is_known(config: StudyConfig) -> None:
    study = example_study(config)
    found_of = study.conclusions["train"].findings
    assert isinstance(found_of, dict)
    study.conclusions["train"] = replace(study.conclusions["train"], findings=found_of | {"seed_deviation": 0.25})
    for keys in config.stages:
        for figure in stage_of(keys).figures(StageContext(keys, config, study)):
            if figure.name in ("loss_by_train_seconds", "learning_rates"):
                bars = [mark for series in figure.series for mark in series.marks if mark.low is not None]
                assert len(bars) >= 3
                assert all(mark.low == mark.y - 0.25 and mark.high == mark.y + 0.25 for mark in bars)
                assert (
                    "A bar is the deviation from seed to seed, which is assumed: all have one seed." in figure.caption
                )


def test_points_at_one_place_are_a_sentence_with_what_is_written_beside_them() -> None:
    def said(*marks: Mark, name: str = "") -> str:
        figure = Figure("f", Axis("samples seen"), Axis("critical batch, samples"), (Series(name, marks),))
        return "".join(figure_element(figure, "branch").itertext())

    assert said(Mark(544, 32, "or more")) == "critical batch: 32 samples or more, at samples seen 544. "
    assert said(Mark(544, 32, "32")) == "critical batch: 32 samples, at samples seen 544. ", "and no number twice"
    two = said(Mark(8, 5.4621, low=3.2647, high=math.inf), Mark(8, 6.0), name="here")
    assert two == "critical batch: here 5.46 samples (from 3.26 to no upper end); here 6 samples, at samples seen 8. "
    assert "at samples" not in said(Mark(8, 5.0), Mark(16, 6.0)), "this is a chart"


@pytest.mark.parametrize(
    ("low", "high"),
    [(5.0, 7.0), (7.62, 7.64), (7.63181, 7.631816), (-0.3, 0.1), (0.0, 60_000.0), (123_400.0, 123_500.0)],
)
def test_a_tick_says_its_value_and_no_two_say_the_same(low: float, high: float) -> None:
    scale = Scale(Axis("loss"), low, high, 270, 24)
    told = {tick: scale.text(tick).replace(",", "").replace("k", "e3") for tick in ticks(scale)}
    assert len(told) >= 3
    assert all(float(text) == pytest.approx(tick, abs=1e-9 * high) for tick, text in told.items())


def test_an_interval_that_leaves_the_axis_does_not_flatten_what_lies_on_it() -> None:
    def texts(axis: Axis) -> str:
        far = Mark(2, -0.1, low=-70.0, high=0.2)
        return " ".join(plot(Figure("f", Axis("x"), axis, (Series("", (Mark(1, 0.3), far)),))).itertext())

    assert "-60" in texts(Axis("y"))
    assert "-60" not in texts(Axis("y", bottom=-1.0))
    assert "0.2" in texts(Axis("y", bottom=-1.0))


def test_shares_and_lists_as_people_read_them() -> None:
    assert [share_text(share) for share in (0.049, 0.0999, 0.487)] == ["4.9%", "10%", "49%"]
    assert [share_text(share) for share in (0.0, 0.0004)] == ["<0.1%", "<0.1%"], "an estimate is never told as nothing"
    assert [listed(some, "or") for some in ((4,), (4, 8), (4, 8, 16))] == ["4", "4 or 8", "4, 8 or 16"]


def test_what_is_not_certain_is_told_as_neither_0_nor_1() -> None:
    """The probability that a batch is the best is a share of draws: all of them are not all that there could be."""
    assert short_answer("s", "", example_recommendation(p_best=1.0)).count("&gt;0.99") == 1
    config, study = kept_in(RECORDED)
    keys = config.keys_of(Train)
    assert keys is not None
    told = so_far(StageContext(keys, config, study))
    assert re.search("[<>]0.", told)
    assert not re.search("1.00|0.00", told)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "less than 0.1 s"),
        (0.004, "less than 0.1 s"),
        (0.42, "0.4 s"),
        (0.96, "1 s"),
        (9.4, "9 s"),
        (60, "1 min 0 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_training_times_as_people_read_them(seconds: float, text: str) -> None:
    assert training_time_text(seconds) == text


def test_the_machines_memory_is_told_as_people_read_it(config: StudyConfig) -> None:
    def machine(device: str | None) -> str | None:
        return setting(config, Study("s", facts=Facts(device=device))).get("machine")

    assert machine("AMD EPYC, 2 threads, 25276502016 bytes") == "AMD EPYC, 2 threads, 23.5 GiB"
    assert machine("some device") == "some device"
    assert machine(None) is None


def test_one_sample_is_not_told_as_several(config: StudyConfig) -> None:
    data = setting(config, Study("s", facts=Facts(num_train_samples=1200, num_val_samples=1)))["data"]
    assert data == "python_stdlib, 1.2k training samples, 1 validation sample"


def test_the_report_names_what_the_study_file_left_open(config: StudyConfig) -> None:
    study = Study("s")
    assert "defaults" not in setting(config, study), "an earlier version did not write which keys were given"
    study.apply(RunBegan(token="first", given={"model": {}, "optimizer": {"lr": 1e-3}, "precision": "float32"}))
    study.apply(RunBegan(token="resumed", given={"model": {}, "optimizer": {"lr": 1e-3, "weight_decay": 0.1}}))
    said = setting(config, study)["defaults"]
    assert "weight_decay: 0.1" in said
    assert "lr:" not in said
    assert "precision" not in said


def test_the_report_names_what_is_otherwise_than_in_the_object_that_is_studied(config: StudyConfig) -> None:
    study = Study("s")
    study.apply(RunBegan(token="first", told=("precision is float32 in the study file, and bfloat16 in it",)))
    study.apply(RunBegan(token="resumed"))
    assert setting(config, study)["recipe"] == "precision is float32 in the study file, and bfloat16 in it"
