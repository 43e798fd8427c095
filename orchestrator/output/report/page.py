"""report.html: one file that works offline. A pure function of the study file, the journal's replay and the recommendation."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

import yaml

from orchestrator.config.keys import StudyConfig
from orchestrator.output.plots import element
from orchestrator.output.report.figures import stage_figures, time_bar
from orchestrator.output.report.tables import (
    config_text,
    facts_table,
    finite,
    html_table,
    number_cell,
    trials_table,
    value_element,
)
from orchestrator.study.state import Study, Trial
from orchestrator.units import seconds_text
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


def write_report(path: Path, config: StudyConfig, study: Study, recommendation: dict[str, Any] | None) -> None:
    """Put the report in place whole: a reader never sees half of it."""
    page = render_report(config, study, recommendation).encode("utf-8", "replace")
    with written_whole(path) as file:
        file.write(page)


def render_report(config: StudyConfig, study: Study, recommendation: dict[str, Any] | None) -> str:
    """The page. All text goes through the tree's writer, which escapes it."""
    body = element(
        "main",
        element("p", "batchscout", class_="muted"),
        element("h1", study.name),
        _answer(config, study, recommendation),
        *[_stage_section(config, study, stage) for stage in config.stages],
        _time_section(config, study),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{study.name}: batchscout"),
        element("style", "\n" + STYLE.read_text()),
    )
    page = element("html", head, element("body", body), lang="en")
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def _answer(config: StudyConfig, study: Study, recommendation: dict[str, Any] | None) -> Element:
    if recommendation is None:
        return element("section", *_known_so_far(config, study), id="recommendation")
    unfinished = ", ".join(_open_stages(config, study))
    facts = [(key, recommendation.get(key)) for key in _RECOMMENDED]
    facts += [("cross_entropy", recommendation["cross_entropy"])] if "cross_entropy" in recommendation else []
    known = recommendation.get("micro_batch_size") and recommendation.get("learning_rate")
    snippet = [element("h3", "To type in"), element("pre", paste_text(recommendation))] if known else []
    details = [
        element("div", element("h3", title), value_element(key, recommendation[key]))
        for key, title in (("evidence", "Evidence"), ("alternatives", "Alternatives"), ("ruled_out", "Ruled out"))
        if recommendation.get(key)
    ]
    return element(
        "section",
        element("p", str(recommendation.get("verdict") or "no verdict"), class_="verdict"),
        element("p", f"Provisional, as far as the study has come: {unfinished} still open.") if unfinished else None,
        element("div", element("div", facts_table(facts)), element("div", *snippet, class_="wide"), class_="columns"),
        *details,
        id="recommendation",
    )


def _open_stages(config: StudyConfig, study: Study) -> list[str]:
    return [stage.type for stage in config.stages if stage.type not in study.conclusions]


def _known_so_far(config: StudyConfig, study: Study) -> list[Element]:
    """Why there is no recommendation, and what has been found."""
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


def paste_text(recommendation: dict[str, Any]) -> str:
    """The recommendation as keys of a study file, and as one training run."""
    r = recommendation
    optimizer = {"lr": r["learning_rate"], "lr_scaling": "none", "warmup": r["warmup_samples"]}
    batch = {key: r[key] for key in ("micro_batch_size", "gradient_accumulation_steps")}
    varied = ("micro_batch_size", "effective_batch_size", "activation_checkpointing", "compile")
    grid = {"type": "grid"} | {key: [r[key]] for key in varied}
    keys = {
        "precision": r["precision"],
        "world_size": r["world_size"],
        "optimizer": optimizer,
        "batch": batch,
        **({"model": {"kwargs": {"cross_entropy": r["cross_entropy"]}}} if "cross_entropy" in r else {}),
        "stages": [grid],
    }
    text = yaml.safe_dump(keys, default_flow_style=None, sort_keys=False, width=100)
    return f"# keys of the study file; what else it says stays\n{text}\n{_trial_command(r, batch, optimizer)}"


def _trial_command(r: dict[str, Any], batch: dict[str, Any], optimizer: dict[str, Any]) -> str:
    settings = {f"batch.{key}": value for key, value in batch.items()}
    settings |= {f"optimizer.{key}": value for key, value in optimizer.items()}
    settings |= {key: config_text(r[key]) for key in ("activation_checkpointing", "compile", "precision", "world_size")}
    settings |= {"model.kwargs.cross_entropy": r["cross_entropy"]} if "cross_entropy" in r else {}
    flags = "".join(f" \\\n  --set {key}={value}" for key, value in settings.items())
    return f"# or one training run, in this process\nbatchscout trial study.yaml{flags}"


def _stage_section(config: StudyConfig, study: Study, stage: Any) -> Element:
    trials = study.of_stage(stage.type)
    conclusion = study.conclusions.get(stage.type)
    notes = [element("li", note) for note in conclusion.notes] if conclusion else []
    return element(
        "section",
        element("h2", stage.type, element("span", (type(stage).__doc__ or "").split("\n")[0], class_="question")),
        element("p", _conclusion_text(study, stage.type, trials), class_="conclusion"),
        element("ul", *notes, class_="notes") if notes else None,
        element("div", *stage_figures(config, study, stage.type, trials), class_="plots"),
        trials_table(study, stage.type, trials) if trials else element("p", "No trials yet.", class_="muted"),
        id=stage.type,
    )


def _conclusion_text(study: Study, stage: str, trials: list[Trial]) -> str:
    conclusion = study.conclusions.get(stage)
    if conclusion:
        return conclusion.reason if conclusion.ok else f"Without a result: {conclusion.reason}"
    if stage not in study.started and not trials:
        return "Has not begun."
    return f"Not concluded: {sum(trial.state.ended for trial in trials)} of {len(trials)} trials so far have ended."


def _time_section(config: StudyConfig, study: Study) -> Element:
    """Lane time of each stage, and how much of it was training and compiling."""
    spent = {stage.type: _times(study.of_stage(stage.type)) for stage in config.stages}
    whole = sum(seconds for _, seconds, _, _ in spent.values())
    longest = max((seconds for _, seconds, _, _ in spent.values()), default=0.0)
    headers = ["stage", "", "lane time", "share", "training", "compiling", "the rest", ""]
    rows = [
        element(
            "tr",
            element("td", stage),
            element("td", f"{count} trials"),
            number_cell(seconds_text(seconds)),
            number_cell(f"{seconds / whole:.0%}" if whole else "-"),
            *[
                number_cell(seconds_text(part))
                for part in (training, compiling, max(0.0, seconds - training - compiling))
            ],
            element("td", time_bar((training, compiling, max(0.0, seconds - training - compiling)), longest)),
        )
        for stage, (count, seconds, training, compiling) in spent.items()
    ]
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


def _startup_text(study: Study) -> str:
    started = study.startup_seconds
    return f", and {seconds_text(sum(started))} to start {len(started)} runs" if started else ""


def _times(trials: list[Trial]) -> tuple[int, float, float, float]:
    """(trials, lane seconds, training seconds, compile seconds)."""
    training, compiling = (
        sum(finite(trial.metrics.get(key)) or 0.0 for trial in trials) for key in ("train_seconds", "compile_seconds")
    )
    return len(trials), sum(trial.seconds for trial in trials), training, compiling
