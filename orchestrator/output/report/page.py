"""report.html: one file that works offline, made from the study file, the journal's replay and the recommendation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree.ElementTree import Element

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.output.known import failed_stage
from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.output.report.answer import answer_section, evidence_section
from batchscout.orchestrator.output.report.figures import TIME_COLOURS, colour_key, figure_element, time_bar
from batchscout.orchestrator.output.report.gallery import in_order
from batchscout.orchestrator.output.report.pieces import each, within
from batchscout.orchestrator.output.report.setting import setting_list
from batchscout.orchestrator.output.report.shell import page
from batchscout.orchestrator.output.report.tables import (
    all_trials_table,
    heading,
    html_table,
    notes_list,
    number_cell,
    trials_table,
)
from batchscout.orchestrator.output.report.timeline import timeline
from batchscout.orchestrator.output.report.training import RunCurves, read_curves, training_section
from batchscout.orchestrator.output.status import notice_lines
from batchscout.orchestrator.output.time_split import LaneTime, lane_time
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import Figure
from batchscout.orchestrator.stages.train import chosen_run
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import counted, seconds_text
from batchscout.trainers.files import written_whole


def write_report(
    path: Path,
    config: StudyConfig,
    study: Study,
    recommendation: Recommendation | None,
    every: float | None = None,
    *,
    is_driven: bool = False,
) -> None:
    """Write report.html whole or not at all, so that nobody reads half of it. Beside it lie the files of the trials.

    every: while the study runs, the seconds after which the page is to look for a newer one. is_driven: True if a process runs the study
    now; of a killed one the journal still says that trials run.
    """
    curves = read_curves(path.parent, study, recommendation.evidence.trial if recommendation else None)
    with written_whole(path) as file:
        for piece in _pieces(config, study, recommendation, curves, every, is_driven=is_driven):
            file.write(piece.encode("utf-8", "replace"))


def render_report(
    config: StudyConfig, study: Study, recommendation: Recommendation | None, curves: Sequence[RunCurves] = ()
) -> str:
    """Return the page. curves: of the runs that are worth a closer look."""
    return "".join(_pieces(config, study, recommendation, curves, None, is_driven=False))


def _pieces(
    config: StudyConfig,
    study: Study,
    recommendation: Recommendation | None,
    curves: Sequence[RunCurves],
    every: float | None,
    *,
    is_driven: bool,
) -> Iterator[str]:
    stages = {keys.type: StageContext(keys, config, study) for keys in in_order(config, study)}
    figures = {name: stage_of(context.stage).figures(context) for name, context in stages.items()}
    chart = _chart_of(recommendation, study)
    answers = [(name, figure) for name, some in figures.items() for figure in some if figure.name == chart]
    along = training_section(curves)
    of_all = _all_trials(list(stages.values()), is_driven=is_driven)
    names = {
        "recommendation": "recommendation",
        **{name: name for name in stages},
        **({"training": "Along the way"} if along is not None else {}),
        **({"trials": "All trials"} if of_all is not None else {}),
        "time": "Where the time went",
        **({"evidence": "The evidence"} if recommendation else {}),
    }
    body = within(
        element("main"),
        element("p", "batchscout", class_="muted"),
        element("h1", study.name),
        element("nav", *[element("a", words, href=f"#{name}") for name, words in names.items()], aria_label="Sections"),
        _is_live() if every else None,
        answer_section(config, study, recommendation, [figure_element(figure, name) for name, figure in answers]),
        element("section", setting_list(config, study), id="setting"),
        *[
            _stage_section(context, [one for one in figures[name] if (name, one) not in answers], is_driven=is_driven)
            for name, context in stages.items()
        ],
        along,
        of_all,
        _time_section(config, study),
        _notices_section(study),
        evidence_section(recommendation) if recommendation else None,
    )
    return page(f"{study.name}: batchscout", body, every)


def _chart_of(recommendation: Recommendation | None, study: Study) -> str:
    """Return the name of the chart that stands beside the answer; empty for none. The train stage's is of runs of the study's length, and a
    later stage may recommend another run than it."""
    if recommendation is None:
        return ""
    if recommendation.real_run is not None and not recommendation.ramp:
        return "horizons"
    return "differences" if recommendation.evidence.trial == chosen_run(study) else ""


def _is_live() -> Element:
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return element(
        "p", f"Written at {now} while the study runs. The page looks for a newer one by itself.", class_="live"
    )


def _stage_section(context: StageContext[StageKeys], figures: Sequence[Figure], *, is_driven: bool) -> Iterator[str]:
    keys, study, trials = context.stage, context.study, context.trials()
    conclusion = study.conclusions.get(keys.type)
    return within(
        element("section", id=keys.type),
        heading(keys.type, (type(keys).__doc__ or "").split("\n")[0]),
        element("p", _conclusion_text(study, keys.type, trials), class_="conclusion"),
        notes_list(conclusion.notes if conclusion else ()),
        within(element("div", class_="plots"), each(figure_element(figure, keys.type) for figure in figures)),
        trials_table(context, trials, is_driven=is_driven)
        if trials
        else element("p", "No trials yet.", class_="muted"),
    )


def _all_trials(contexts: Sequence[StageContext[StageKeys]], *, is_driven: bool) -> Iterator[str] | None:
    """Return the table over all stages; None where one alone has trials, as it has the same table."""
    if sum(bool(context.trials()) for context in contexts) < 2:
        return None
    return within(
        element("section", id="trials"),
        heading("All trials", "Which of all stages' trials is the fastest, the largest, the slowest?"),
        all_trials_table(contexts, is_driven=is_driven),
    )


def _conclusion_text(study: Study, stage: str, trials: list[Trial]) -> str:
    conclusion = study.conclusions.get(stage)
    if conclusion:
        return conclusion.reason if conclusion.ok else f"Without a result: {conclusion.reason}"
    if stage not in study.started and not trials:
        return "Did not run: the study ended before it." if failed_stage(study) else "Has not begun."
    return f"Not concluded: {sum(trial.state.ended for trial in trials)} of {len(trials)} trials so far have ended."


def _notices_section(study: Study) -> Element | None:
    notices = notes_list(notice_lines(study))
    if notices is None:
        return None
    said = element("p", "What happened on the way and was dealt with. The results stand.")
    return element("section", element("h2", "Notices"), said, notices, id="notices")


def _time_section(config: StudyConfig, study: Study) -> Element:
    """Return the lane time of each stage, and how much of it was training and compiling."""
    trials = {stage.type: study.of_stage(stage.type) for stage in config.stages}
    spent = {stage: lane_time(study, of_stage) for stage, of_stage in trials.items()}
    whole = sum(time.held for time in spent.values())
    longest = max((time.held for time in spent.values()), default=0.0)
    headers = ["stage", "", "lane time", "share", "training", "compiling", "the rest", ""]
    rows = [_time_row(stage, len(trials[stage]), time, whole, longest) for stage, time in spent.items()]
    holds, started = timeline(study), study.startup_seconds
    startup = f", and {seconds_text(sum(started))} to start {counted(len(started), 'run')}" if started else ""
    lane = "A lane runs one trial after another, in processes of its own."
    return element(
        "section",
        element("h2", "Where the time went"),
        element("p", f"{seconds_text(whole)} of lane time in all{startup}. {lane}", class_="conclusion"),
        figure_element(holds, "time") if holds else None,
        colour_key(TIME_COLOURS),
        html_table(headers, rows, "numbers"),
        id="time",
    )


def _time_row(stage: str, num_trials: int, time: LaneTime, whole: float, longest: float) -> Element:
    parts = (time.training, time.compiling, time.rest)
    told = f"{stage}: training {seconds_text(parts[0])}, compiling {seconds_text(parts[1])}, the rest {seconds_text(parts[2])}"
    return element(
        "tr",
        element("td", stage),
        element("td", counted(num_trials, "trial")),
        number_cell(seconds_text(time.held)),
        number_cell(f"{time.held / whole:.0%}" if whole else "-"),
        *[number_cell(seconds_text(part)) for part in parts],
        element("td", time_bar(parts, longest, told)),
    )
