"""report.html: one file that works offline, made from the study file, the journal's replay and the recommendation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

import yaml
from pydantic import JsonValue

from orchestrator.config.keys import StudyConfig
from orchestrator.config.stages import StageKeys
from orchestrator.output.plots import element
from orchestrator.output.recommendation import Recommendation
from orchestrator.output.report.figures import figure_element, time_bar
from orchestrator.output.report.pieces import each, within
from orchestrator.output.report.tables import (
    config_text,
    facts_table,
    html_table,
    number_cell,
    trials_table,
    value_element,
)
from orchestrator.output.report.training import RunCurves, read_curves, training_section
from orchestrator.output.status import notice_lines
from orchestrator.output.time_split import LaneTime, lane_time
from orchestrator.stages import stage_of
from orchestrator.stages.context import StageContext
from orchestrator.study.state import Study
from orchestrator.study.trial import Trial
from orchestrator.units import seconds_text
from trainers.config import OptimizerConfig
from trainers.files import written_whole

_RECOMMENDED = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "effective_batch_size",
    "activation_checkpointing",
    "compile",
    "precision",
    "learning_rate",
    "warmup_samples",
)
STYLE = Path(__file__).with_name("style.css")


def write_report(path: Path, config: StudyConfig, study: Study, recommendation: Recommendation | None) -> None:
    """Write report.html whole or not at all, so that nobody reads half of it. Beside it lie the files of the trials."""
    curves = read_curves(path.parent, study, recommendation.evidence.trial if recommendation else None)
    with written_whole(path) as file:
        for piece in _pieces(config, study, recommendation, curves):
            file.write(piece.encode("utf-8", "replace"))


def render_report(
    config: StudyConfig, study: Study, recommendation: Recommendation | None, curves: Sequence[RunCurves] = ()
) -> str:
    """Return the page. curves: of the runs that are worth a closer look."""
    return "".join(_pieces(config, study, recommendation, curves))


def _pieces(
    config: StudyConfig, study: Study, recommendation: Recommendation | None, curves: Sequence[RunCurves]
) -> Iterator[str]:
    body = within(
        element("main"),
        element("p", "batchscout", class_="muted"),
        element("h1", study.name),
        _answer(config, study, recommendation),
        *[_stage_section(StageContext(keys, config, study)) for keys in config.stages],
        training_section(curves),
        _notices_section(study),
        _time_section(config, study),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{study.name}: batchscout"),
        element("style", "\n" + STYLE.read_text()),
    )
    yield "<!DOCTYPE html>\n"
    yield from within(element("html", lang="en"), head, within(element("body"), body))
    yield "\n"


def _answer(config: StudyConfig, study: Study, recommendation: Recommendation | None) -> Iterator[str]:
    section = element("section", id="recommendation")
    if recommendation is None:
        return within(section, *_known_so_far(config, study))
    values = recommendation.to_json()
    unfinished = ", ".join(_open_stages(config, study))
    facts = {key: values[key] for key in (*_RECOMMENDED, "cross_entropy", "ramp") if key in values}
    snippet = [element("h3", "To type in"), element("pre", paste_text(recommendation, config.optimizer))]
    details = (
        element("div", element("h3", title), value_element(key, values[key]))
        for key, title in (("evidence", "Evidence"), ("alternatives", "Alternatives"), ("ruled_out", "Ruled out"))
        if values[key]
    )
    return within(
        section,
        element("p", recommendation.verdict, class_="verdict"),
        element("p", f"Provisional, as far as the study has come: {unfinished} still open.") if unfinished else None,
        element("div", element("div", facts_table(facts)), element("div", *snippet, class_="wide"), class_="columns"),
        each(details),
    )


def _open_stages(config: StudyConfig, study: Study) -> list[str]:
    return [stage.type for stage in config.stages if stage.type not in study.conclusions]


def _known_so_far(config: StudyConfig, study: Study) -> list[Element]:
    """Return why there is no recommendation, and what has been found."""
    unfinished = _open_stages(config, study)
    verdict = (
        f"Unfinished: no recommendation yet. Still open: {', '.join(unfinished)}."
        if unfinished
        else "Undetermined: every stage has concluded, and what they found makes no recommendation."
    )
    found = [
        element("li", element("b", conclusion.stage), f": {conclusion.reason}")
        for conclusion in study.conclusions.values()
    ]
    known = [element("h3", "Known so far"), element("ul", *found)] if found else []
    return [element("p", verdict, class_="verdict"), *known]


def paste_text(recommendation: Recommendation, optimizer: OptimizerConfig) -> str:
    """Return the recommendation as keys of a study file, and as one training run. optimizer: the study file's."""
    r, optimizer_keys = recommendation, _optimizer_keys(recommendation, optimizer)
    varied = {
        "micro_batch_size": r.micro_batch_size,
        "effective_batch_size": r.effective_batch_size,
        "activation_checkpointing": r.activation_checkpointing,
        "compile": r.compile,
    }
    keys = {
        "precision": r.precision,
        "world_size": r.world_size,
        "optimizer": optimizer_keys,
        "batch": _batch_keys(r),
        **({"model": {"kwargs": _model_keys(r)}} if _model_keys(r) else {}),
        "stages": [{"type": "grid"} | {key: [value] for key, value in varied.items()}],
    }
    text = yaml.safe_dump(keys, default_flow_style=None, sort_keys=False, width=100)
    grows = "# the batch is to grow (ramp), which a study file cannot say: this is how it begins\n" if r.ramp else ""
    return f"# keys of the study file; what else it says stays\n{grows}{text}\n{_trial_command(r, optimizer_keys)}"


def _optimizer_keys(r: Recommendation, optimizer: OptimizerConfig) -> dict[str, JsonValue]:
    """Return the keys with which the study file gives this optimizer. At the reference batch no rule changes anything."""
    keys: dict[str, JsonValue] = {
        "lr": r.learning_rate,
        "reference_batch_size": r.effective_batch_size,
        "warmup": r.warmup_samples,
    }
    if r.optimizer.betas != optimizer.betas:
        keys["betas"] = list(r.optimizer.betas)
    if r.optimizer.weight_decay != optimizer.weight_decay:
        keys["weight_decay"] = r.optimizer.weight_decay
    return keys


def _model_keys(r: Recommendation) -> dict[str, JsonValue]:
    return {**({"cross_entropy": r.cross_entropy} if r.cross_entropy else {}), **(r.model_changes or {})}


def _batch_keys(r: Recommendation) -> dict[str, JsonValue]:
    return {
        "micro_batch_size": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps,
    }


def _trial_command(r: Recommendation, optimizer_keys: dict[str, JsonValue]) -> str:
    overrides = {f"batch.{key}": value for key, value in _batch_keys(r).items()}
    overrides |= {f"optimizer.{key}": value for key, value in optimizer_keys.items()}
    overrides |= {
        "activation_checkpointing": config_text(r.activation_checkpointing),
        "compile": config_text(r.compile),
        "precision": r.precision,
        "world_size": r.world_size,
    }
    overrides |= {f"model.kwargs.{key}": value for key, value in _model_keys(r).items()}
    flags = "".join(f" \\\n  --set {shlex.quote(f'{key}={value}')}" for key, value in overrides.items())
    return f"# or one training run, in this process\nbatchscout trial study.yaml{flags}"


def _stage_section(context: StageContext[StageKeys]) -> Iterator[str]:
    keys, study, trials = context.stage, context.study, context.trials()
    conclusion = study.conclusions.get(keys.type)
    notes = [element("li", note) for note in conclusion.notes] if conclusion else []
    question = (type(keys).__doc__ or "").split("\n")[0]
    figures = (figure_element(figure) for figure in stage_of(keys).figures(context))
    return within(
        element("section", id=keys.type),
        element("h2", keys.type, element("span", question, class_="question")),
        element("p", _conclusion_text(study, keys.type, trials), class_="conclusion"),
        element("ul", *notes, class_="notes") if notes else None,
        within(element("div", class_="plots"), each(figures)),
        trials_table(context, trials) if trials else element("p", "No trials yet.", class_="muted"),
    )


def _conclusion_text(study: Study, stage: str, trials: list[Trial]) -> str:
    conclusion = study.conclusions.get(stage)
    if conclusion:
        return conclusion.reason if conclusion.ok else f"Without a result: {conclusion.reason}"
    if stage not in study.started and not trials:
        return "Has not begun."
    return f"Not concluded: {sum(trial.state.ended for trial in trials)} of {len(trials)} trials so far have ended."


def _notices_section(study: Study) -> Element | None:
    lines = [element("li", line) for line in notice_lines(study)]
    if not lines:
        return None
    said = "Met on the way and dealt with. The results stand."
    return element(
        "section", element("h2", "Notices"), element("p", said), element("ul", *lines, class_="notes"), id="notices"
    )


def _time_section(config: StudyConfig, study: Study) -> Element:
    """Return the lane time of each stage, and how much of it was training and compiling."""
    trials = {stage.type: study.of_stage(stage.type) for stage in config.stages}
    spent = {stage: lane_time(of_stage) for stage, of_stage in trials.items()}
    whole = sum(time.held for time in spent.values())
    longest = max((time.held for time in spent.values()), default=0.0)
    headers = ["stage", "", "lane time", "share", "training", "compiling", "the rest", ""]
    rows = [_time_row(stage, len(trials[stage]), time, whole, longest) for stage, time in spent.items()]
    names = ("training", "compiling", "the rest: start, data, evaluation, checkpoints")
    legend = [element("span", element("i", class_=f"c{i}"), name) for i, name in enumerate(names)]
    return element(
        "section",
        element("h2", "Where the time went"),
        element("p", f"{seconds_text(whole)} of lane time in all{_startup_text(study)}.", class_="conclusion"),
        element("p", *legend, class_="legend"),
        html_table(headers, rows, "numbers"),
        id="time",
    )


def _time_row(stage: str, num_trials: int, time: LaneTime, whole: float, longest: float) -> Element:
    parts = (time.training, time.compiling, time.rest)
    return element(
        "tr",
        element("td", stage),
        element("td", f"{num_trials} trials"),
        number_cell(seconds_text(time.held)),
        number_cell(f"{time.held / whole:.0%}" if whole else "-"),
        *[number_cell(seconds_text(part)) for part in parts],
        element("td", time_bar(parts, longest)),
    )


def _startup_text(study: Study) -> str:
    started = study.startup_seconds
    return f", and {seconds_text(sum(started))} to start {len(started)} runs" if started else ""
