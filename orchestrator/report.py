"""report.html: one file that works offline. A pure function of the study file, the journal's replay and the recommendation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

import yaml

from orchestrator.config import StudyConfig
from orchestrator.plots import Axis, Line, Mark, Series, element, number_text, plot
from orchestrator.stages import learning_rate
from orchestrator.stages.mode import mode_of
from orchestrator.study import Study, Trial, TrialState
from orchestrator.words import bytes_text, seconds_text
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
_CONFIG_COLUMNS = {
    "micro_batch_size": "micro-batch",
    "gradient_accumulation_steps": "accumulation",
    "effective_batch_size": "effective batch",
    "activation_checkpointing": "activation checkpointing",
    "compile": "compile",
    "precision": "precision",
    "learning_rate": "learning rate",
    "warmup_samples": "warm-up, samples",
    "seed": "seed",
}
_METRIC_COLUMNS = {
    "samples_seen": ("samples", "{:,.0f}", 1),
    "loss": ("loss", "{:.4f}", 1),
    "final_loss": ("final loss", "{:.6f}", 1),
    "val_loss": ("val loss", "{:.4f}", 1),
    "perplexity": ("perplexity", "{:,.2f}", 1),
    "tokens_per_second": ("tokens/s", "{:,.0f}", 1),
    "step_seconds": ("step, ms", "{:,.1f}", 1e-3),
    "peak_memory_bytes": ("peak memory, MiB", "{:,.0f}", 2**20),
    "predicted_memory_bytes": ("predicted, MiB", "{:,.0f}", 2**20),
    "mfu": ("MFU, %", "{:.1f}", 0.01),
    "hfu": ("HFU, %", "{:.1f}", 0.01),
    "coherence": ("coherence", "{:.3f}", 1),
    "coherence_floor": ("its floor", "{:.3f}", 1),
    "noise_scale": ("noise scale, samples", "{:,.1f}", 1),
    "noise_scale_low": ("low", "{:,.1f}", 1),
    "noise_scale_high": ("high", "{:,.1f}", 1),
    "goodput": ("goodput, relative", "{:.2f}", 1),
    "update_ratio": ("update / weights", "{:.1e}", 1),
    "rho": ("rho", "{:.1e}", 1),
    "train_seconds": ("training, s", "{:,.1f}", 1),
    "compile_seconds": ("compiling, s", "{:,.1f}", 1),
}
_MEMORY_AND_SPEED = ("tokens_per_second", "step_seconds", "peak_memory_bytes", "predicted_memory_bytes", "mfu", "hfu")
_NOISE = ("coherence", "coherence_floor", "noise_scale", "noise_scale_low", "noise_scale_high", "goodput")
_TRAINING = (
    "samples_seen", "val_loss", "perplexity", "update_ratio", "train_seconds", "tokens_per_second", "peak_memory_bytes",
)  # fmt: skip
_STAGE_METRICS = {
    "frontier": _MEMORY_AND_SPEED,
    "throughput": ("tokens_per_second", "step_seconds", *_NOISE),
    "equivalence": ("final_loss", "step_seconds", "tokens_per_second", "mfu", "rho"),
    "train": _TRAINING,
    "learning_rate": _TRAINING,
    "grid": _TRAINING,
}


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
        element("style", _STYLE),
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
        element("div", element("h3", title), _value(key, recommendation[key]))
        for key, title in (("evidence", "Evidence"), ("alternatives", "Alternatives"), ("ruled_out", "Ruled out"))
        if recommendation.get(key)
    ]
    return element(
        "section",
        element("p", str(recommendation.get("verdict") or "no verdict"), class_="verdict"),
        element("p", f"Provisional, as far as the study has come: {unfinished} still open.") if unfinished else None,
        element("div", element("div", _facts(facts)), element("div", *snippet, class_="wide"), class_="columns"),
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
    settings |= {
        key: _config_text(r[key]) for key in ("activation_checkpointing", "compile", "precision", "world_size")
    }
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
        element("div", *_stage_plots(config, study, stage.type, trials), class_="plots"),
        _trials_table(study, stage.type, trials) if trials else element("p", "No trials yet.", class_="muted"),
        id=stage.type,
    )


def _conclusion_text(study: Study, stage: str, trials: list[Trial]) -> str:
    conclusion = study.conclusions.get(stage)
    if conclusion:
        return conclusion.reason if conclusion.ok else f"Without a result: {conclusion.reason}"
    if stage not in study.started and not trials:
        return "Has not begun."
    return f"Not concluded: {sum(trial.state.ended for trial in trials)} of {len(trials)} trials so far have ended."


def _trials_table(study: Study, stage: str, trials: list[Trial]) -> Element:
    """What varies and what was measured; what all trials share stands above."""
    varying = [key for key in _CONFIG_COLUMNS if len({getattr(t.config, key) for t in trials}) > 1]
    metrics = {trial.id: _metrics(study, trial) for trial in trials}
    measured = [key for key in _STAGE_METRICS[stage] if any(_finite(m.get(key)) is not None for m in metrics.values())]
    headers = ["trial", "state", *[_CONFIG_COLUMNS[key] for key in varying]]
    headers += [_METRIC_COLUMNS[key][0] for key in measured] + ["lane, s"]
    best = study.value(stage, "winner")
    rows = []
    for trial in trials:
        cells = [_config_text(getattr(trial.config, key)) for key in varying]
        cells += [_metric_text(key, metrics[trial.id].get(key)) for key in measured]
        rows += _trial_rows(trial, [*cells, f"{trial.seconds:,.1f}"], trial.id == best)
    shared = [
        f"{_CONFIG_COLUMNS[key]} {_config_text(getattr(trials[0].config, key))}" for key in _SHARED - set(varying)
    ]
    return element(
        "div",
        element("p", "In all trials: " + ", ".join(sorted(shared)) + "." if shared else "", class_="muted"),
        _table(headers, rows, "numbers"),
    )


def _trial_rows(trial: Trial, cells: list[str], best: bool) -> list[Element]:
    """The numbers, and under them, over the whole width, the reason."""
    names = [name for name, wanted in (("best", best), ("explained", bool(trial.reason))) if wanted]
    numbers = element(
        "tr",
        element("td", element("code", trial.id), element("small", trial.role) if trial.role else None),
        element("td", element("span", trial.state.replace("_", " "), class_=f"state {trial.state}")),
        *[_cell(cell) for cell in cells],
        class_=" ".join(names),
    )
    reason = element("tr", element("td", trial.reason, colspan=2 + len(cells), class_="reason"))
    return [numbers, reason] if trial.reason else [numbers]


_SHARED = set(_CONFIG_COLUMNS) - {"warmup_samples"}


def _metrics(study: Study, trial: Trial) -> dict[str, Any]:
    """The trial's metrics, and the goodput that the throughput stage made of them."""
    goodput = study.value(trial.stage, "goodput", {}).get(str(trial.config.effective_batch_size))
    return trial.metrics | ({"goodput": goodput} if goodput is not None else {})


def _stage_plots(config: StudyConfig, study: Study, stage: str, trials: list[Trial]) -> list[Element]:
    if stage == "frontier":
        return _frontier_plots(config, study, trials)
    if stage == "throughput":
        return _throughput_plots(study, trials)
    if stage == "equivalence":
        return _equivalence_plots(study, trials)
    if stage == "learning_rate":
        return _learning_rate_plots(study, trials)
    return _training_plots(study, stage, trials)


def _frontier_plots(config: StudyConfig, study: Study, trials: list[Trial]) -> list[Element]:
    limit = study.value("frontier", "limit_bytes") or study.facts.get("memory_limit_bytes") or config.memory_limit
    modes: dict[str, list[Trial]] = {}
    for trial in trials:
        modes.setdefault(_mode_text(trial, trials), []).append(trial)
    series = [_frontier_series(study, mode, modes[mode], i, limit) for i, mode in enumerate(modes)]
    front = [Mark(p["peak_memory_bytes"], p["tokens_per_second"]) for p in study.value("frontier", "front", [])]
    if len(front) > 1:
        series.append(Series("nothing faster in less memory", tuple(front), 6, dashed=True))
    unit = next((size for size in (2**30, 2**20, 2**10) if limit and limit >= size), 2**20)
    x_axis = Axis("peak memory of a rank", bytes_text, zero=True, unit=unit)
    lines = [Line(float(limit), f"limit {bytes_text(limit)}", vertical=True)] if limit else []
    chart = plot(x_axis, Axis("tokens/s", zero=True), series, lines, width=860, height=330)
    return [_figure(chart, "Numbers are micro-batch sizes; ringed: chosen; cross: out of memory.")]


def _mode_text(trial: Trial, trials: list[Trial]) -> str:
    """The checkpointing mode, and what else tells the modes of this study apart."""
    config = trial.config
    parts = [str(config.activation_checkpointing)]
    if len({t.config.compile for t in trials}) > 1:
        parts.append("compiled" if config.compile else "eager")
    if len({t.config.precision for t in trials}) > 1:
        parts.append(config.precision)
    parts += ["chunked"] * (mode_of(config).cross_entropy == "chunked")
    if len({t.config.data.kwargs.get("seq_len") for t in trials}) > 1:
        parts.append(f"{config.data.kwargs.get('seq_len')} long")
    return ", ".join(parts)


def _frontier_series(study: Study, label: str, trials: list[Trial], colour: int, limit: float | None) -> Series:
    """Each size that fitted, by what all its trials say of it; then, at the limit, what did not."""
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        by_size.setdefault(trial.config.micro_batch_size, []).append(trial)
    marks = [mark for size in sorted(by_size) for mark in _size_mark(study, by_size[size])]
    failed = [size for size in sorted(by_size) if all(t.state is TrialState.OUT_OF_MEMORY for t in by_size[size])]
    if failed and limit:
        marks.append(Mark(float(limit), marks[-1].y if marks else 0.0, "", "cross"))
        label = f"{label} (not {', '.join(map(str, failed))})"
    return Series(label, tuple(marks), colour)


def _size_mark(study: Study, trials: list[Trial]) -> list[Mark]:
    """The rate of its rounds where it was timed in them; the most memory it took; nothing where it did not run."""
    ran = [t for t in trials if t.state is not TrialState.OUT_OF_MEMORY and _finite(t.metrics.get("tokens_per_second"))]
    ran = [trial for trial in ran if _finite(trial.metrics.get("peak_memory_bytes")) is not None]
    if not ran:
        return []
    rounds = [trial for trial in ran if not trial.config.dynamic_micro_batch and not trial.fresh]
    rate = statistics.median(trial.metrics["tokens_per_second"] for trial in rounds or ran)
    memory = max(trial.metrics["peak_memory_bytes"] for trial in ran)
    chosen = any(trial.id == study.value("frontier", "winner") for trial in trials)
    return [Mark(memory, rate, str(ran[0].config.micro_batch_size), "chosen" if chosen else "point")]


def _throughput_plots(study: Study, trials: list[Trial]) -> list[Element]:
    batches = tuple(float(trial.config.effective_batch_size) for trial in trials)
    x_axis = Axis("effective batch, samples", log=True, ticks=batches)
    critical = _finite(study.value("throughput", "critical_batch_size"))
    lines = [Line(critical, f"critical {number_text(critical)}", vertical=True)] if critical else []
    noise = [replace(mark, low=low, high=high) for mark, low, high in _noise_marks(study, trials)]
    floor = Series("floor", _batch_marks(study, trials, "coherence_floor"), 6, dashed=True)
    size: dict[str, Any] = {"width": 530, "height": 230}
    speed = [Series("", _batch_marks(study, trials, "tokens_per_second"))]
    goodput = [Series("", _batch_marks(study, trials, "goodput"), 2)]
    coherence = [Series("coherence", _batch_marks(study, trials, "coherence"), 1), floor]
    return [
        _figure(plot(x_axis, Axis("tokens/s", zero=True), speed, **size), "What accumulation costs."),
        _figure(plot(x_axis, _noise_axis(noise), [Series("", tuple(noise), 3)], **size), _NOISE_NOTE),
        _figure(plot(x_axis, Axis("gradient coherence", zero=True), coherence, **size), _COHERENCE_NOTE),
        _figure(plot(x_axis, Axis("goodput, relative", zero=True), goodput, lines, **size), "Progress per second."),
    ]


def _noise_axis(marks: list[Mark]) -> Axis:
    """The interval may reach to infinity, and must not flatten the estimates."""
    return Axis("noise scale, samples", zero=True, top=3 * max((mark.y for mark in marks), default=1.0))


_NOISE_NOTE = "Gradient noise scale (B_simple) with its 95 % interval."
_COHERENCE_NOTE = "How far the micro-batches' gradients agree; at the floor they show nothing but noise."


def _batch_marks(study: Study, trials: list[Trial], key: str) -> tuple[Mark, ...]:
    """(effective batch, metric) of the trials that have it."""
    points = ((float(t.config.effective_batch_size), _finite(_metrics(study, t).get(key))) for t in trials)
    return tuple(Mark(x, y) for x, y in sorted((x, y) for x, y in points if y is not None))


def _noise_marks(study: Study, trials: list[Trial]) -> list[tuple[Mark, float | None, float | None]]:
    low, high = (
        {mark.x: mark.y for mark in _batch_marks(study, trials, key)} for key in ("noise_scale_low", "noise_scale_high")
    )
    return [(mark, low.get(mark.x), high.get(mark.x)) for mark in _batch_marks(study, trials, "noise_scale")]


def _equivalence_plots(study: Study, trials: list[Trial]) -> list[Element]:
    measured = [(trial, _finite(trial.metrics.get("rho"))) for trial in trials]
    shown = [(trial, rho) for trial, rho in measured if rho is not None and rho > 0]
    tolerance = _finite(study.value("equivalence", "tolerance"))
    marks = tuple(Mark(rho, -float(i), number_text(rho)) for i, (_, rho) in enumerate(shown))
    names = {-float(i): _short(trial) for i, (trial, _) in enumerate(shown)}
    lines = [Line(tolerance, f"tolerance {number_text(tolerance)}", vertical=True)] if tolerance else []
    x_axis = Axis("rho, relative distance of the weights", log=True)
    y_axis = Axis("", lambda tick: names[tick], ticks=tuple(names))
    left = 30 + 7 * max((len(name) for name in names.values()), default=0)
    series = [Series("", marks, joined=False)]
    chart = plot(x_axis, y_axis, series, lines, width=640, height=90 + 34 * len(shown), left=left)
    same = [_short(trial) for trial, rho in measured if rho == 0]
    return [_figure(chart, f"Not on the axis, because rho is 0: {', '.join(same)}." if same else "")]


def _training_plots(study: Study, stage: str, trials: list[Trial]) -> list[Element]:
    losses = sorted(y for trial in trials for _, y in _history(trial, "samples_seen"))
    top = _shown_top(losses)
    winner = study.value(stage, "winner")
    loss = Axis("validation loss", top=top)
    beyond = sum(value > top for value in losses)
    note = f" {beyond} evaluations above {number_text(top)} are not shown." if beyond else ""
    axes = {"samples_seen": Axis("samples seen", zero=True), "train_seconds": _time_axis(trials)}
    return [
        _figure(
            plot(axis, loss, _histories(trials, key, winner), width=540, height=320),
            f"Dashed: pruned or failed; bold: the winner.{note}",
        )
        for key, axis in axes.items()
    ]


def _time_axis(trials: list[Trial]) -> Axis:
    longest = max((x for trial in trials for x, _ in _history(trial, "train_seconds")), default=0.0)
    unit, name = next(((u, n) for u, n in ((3600, "h"), (60, "min")) if longest >= 2 * u), (1, "s"))
    return Axis(f"training time, {name}", lambda seconds: number_text(seconds / unit), zero=True, unit=unit)


def _shown_top(losses: list[float]) -> float:
    """Where the loss axis ends: one diverging trial must not flatten the others."""
    if not losses:
        return math.inf
    ninth = losses[math.ceil(0.9 * len(losses)) - 1]
    return max(ninth, min(losses[-1], losses[0] + 1.5 * (ninth - losses[0])))


def _histories(trials: list[Trial], key: str, winner: str | None) -> list[Series]:
    lost = (TrialState.PRUNED, TrialState.FAILED, TrialState.OUT_OF_MEMORY)
    return [
        Series(
            _short(trial),
            tuple(Mark(x, y) for x, y in _history(trial, key)),
            colour,
            dashed=trial.state in lost,
            bold=trial.id == winner,
        )
        for colour, trial in enumerate(trials)
    ]


def _history(trial: Trial, key: str) -> list[tuple[float, float]]:
    """(key, val_loss) of every evaluation that has both."""
    points = ((_finite(point.get(key)), _finite(point.get("val_loss"))) for point in trial.history)
    return sorted((x, y) for x, y in points if x is not None and y is not None)


def _learning_rate_plots(study: Study, trials: list[Trial]) -> list[Element]:
    """Every rate that was run at the winner's batch, those of the train stage among them."""
    winner = study.value("learning_rate", "winner")
    trials = [*learning_rate.run_before(study), *trials]
    measured = sorted(
        (trial.config.learning_rate, loss, trial.id)
        for trial in trials
        if (loss := _finite(trial.metrics.get("val_loss"))) is not None
    )
    marks = [Mark(rate, loss, f"{loss:.3f}", "chosen" if id == winner else "point") for rate, loss, id in measured]
    highest = max((mark.y for mark in marks), default=1.0)
    without = [trial for trial in trials if trial.state.ended and _finite(trial.metrics.get("val_loss")) is None]
    lost = tuple(Mark(trial.config.learning_rate, highest, trial.reason.split(":")[0], "cross") for trial in without)
    rates = tuple(trial.config.learning_rate for trial in trials)
    single = len({mark.x for mark in marks}) == len(marks)
    series = [Series("", tuple(marks), joined=single), Series("", lost, 1, joined=False)]
    chart = plot(Axis("learning rate", log=True, ticks=rates), Axis("validation loss"), series, width=640, height=290)
    edge = " It lies on the edge of the grid." if study.value("learning_rate", "on_edge") else ""
    return [_figure(chart, f"Ringed: the best.{edge}")]


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
            _cell(seconds_text(seconds)),
            _cell(f"{seconds / whole:.0%}" if whole else "-"),
            *[_cell(seconds_text(part)) for part in (training, compiling, max(0.0, seconds - training - compiling))],
            element("td", _bar((training, compiling, max(0.0, seconds - training - compiling)), longest)),
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
        _table(headers, rows, "numbers"),
        id="time",
    )


def _startup_text(study: Study) -> str:
    started = study.startup_seconds
    return f", and {seconds_text(sum(started))} to start {len(started)} runs" if started else ""


def _times(trials: list[Trial]) -> tuple[int, float, float, float]:
    """(trials, lane seconds, training seconds, compile seconds)."""
    training, compiling = (
        sum(_finite(trial.metrics.get(key)) or 0.0 for trial in trials) for key in ("train_seconds", "compile_seconds")
    )
    return len(trials), sum(trial.seconds for trial in trials), training, compiling


def _bar(parts: Sequence[float], longest: float) -> Element:
    """The parts side by side, to the scale of the longest stage."""
    scale = 260 / max(longest, sum(parts), 1e-9)
    starts = [scale * sum(parts[:i]) for i in range(len(parts))]
    rects = [
        element("rect", x=round(start, 1), y=2, width=round(scale * part, 1), height=11, class_=f"c{i}")
        for i, (start, part) in enumerate(zip(starts, parts, strict=True))
    ]
    return element("svg", *rects, viewBox="0 0 260 15", style="width:260px;max-width:260px", role="img")


def _facts(facts: list[tuple[str, Any]]) -> Element:
    rows = [element("tr", element("th", key), _value_cell(key, value)) for key, value in facts]
    return element("table", element("tbody", *rows), class_="facts")


def _value_cell(key: str, value: Any) -> Element:
    return element("td", _value(key, value), class_="number" if isinstance(value, (int, float)) else None)


def _value(key: str, value: Any) -> Element:
    """A recommendation's value, whatever its shape."""
    if isinstance(value, dict):
        return _facts(list(value.items()))
    if isinstance(value, (list, tuple)):
        return _list(list(value))
    number = _finite(value) if key.endswith("_bytes") else None
    return element("span", _config_text(value) if number is None else bytes_text(number))


def _list(values: list[Any]) -> Element:
    if not all(isinstance(value, dict) for value in values):
        return element("ul", *[element("li", _value("", value)) for value in values])
    keys = list(dict.fromkeys(key for value in values for key in value))
    rows = [element("tr", *[_value_cell(key, value.get(key)) for key in keys]) for value in values]
    return _table(keys, rows)


def _config_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _metric_text(key: str, value: Any) -> str:
    _, pattern, unit = _METRIC_COLUMNS[key]
    number = _finite(value)
    if number is None:
        return "not available" if key == "noise_scale" else "-"
    return pattern.format(number / unit)


def _finite(value: Any) -> float | None:
    """The number, or None for what is missing, null or not finite."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _short(trial: Trial) -> str:
    """The trial's id without its stage."""
    return trial.id.removeprefix(f"{trial.stage}-")


def _cell(text: str) -> Element:
    return element("td", text, class_="number")


def _table(headers: list[str], rows: list[Element], kind: str = "") -> Element:
    head = element("thead", element("tr", *[element("th", header) for header in headers]))
    return element("div", element("table", head, element("tbody", *rows), class_=kind), class_="scroll")


def _figure(chart: Element, caption: str) -> Element:
    return element("figure", chart, element("figcaption", caption) if caption else None)


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --muted: #5c656e; --rule: #dfe3e7; --paper: #fff; --soft: #f5f6f8;
  --c0: #0072b2; --c1: #d55e00; --c2: #00875f; --c3: #b0529a; --c4: #8a6a00; --c5: #2a93cf; --c6: #6b747d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --muted: #9aa4ae; --rule: #333a41; --paper: #15181b;
  --soft: #1d2125; --c0: #56b4e9; --c1: #ff8a4c; --c2: #2cc79a; --c3: #e39acb; --c4: #d9b300; --c5: #9cd3f5; --c6: #a4adb6; } }
.c0 { color: var(--c0) } .c1 { color: var(--c1) } .c2 { color: var(--c2) } .c3 { color: var(--c3) }
.c4 { color: var(--c4) } .c5 { color: var(--c5) } .c6 { color: var(--c6) }
body { margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 24px 64px; }
h1 { font-size: 24px; margin: 0 0 8px } h2 { font-size: 18px; margin: 0 0 6px } h3 { font-size: 14px; margin: 14px 0 4px }
p { margin: 4px 0 } ul { margin: 4px 0; padding-left: 18px }
section { border-top: 1px solid var(--rule); margin-top: 24px; padding-top: 16px }
.question { font-weight: 400; color: var(--muted); margin-left: 12px; font-size: 14px }
.verdict { font-size: 18px; line-height: 1.4; max-width: 60em; margin-bottom: 12px }
.conclusion { max-width: 70em } .notes, .muted, figcaption, small { color: var(--muted) } small { display: block }
.notes, figcaption, small { font-size: 12px }
.columns { display: flex; flex-wrap: wrap; gap: 8px 32px } .wide { flex: 1; min-width: 380px } .wide h3 { margin-top: 0 }
pre { background: var(--soft); border: 1px solid var(--rule); padding: 8px 12px; overflow-x: auto; margin: 0; font-size: 12px }
code, pre { font-family: ui-monospace, monospace } code { font-size: 12px; white-space: nowrap }
.scroll { overflow-x: auto; margin-top: 8px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule) }
thead th { font-weight: 600; font-size: 12px; color: var(--muted); vertical-align: bottom }
.facts th { font-weight: 400; color: var(--muted) } td.number { text-align: right; white-space: nowrap }
.facts td.number { text-align: left }
.numbers thead th:not(:first-child, :nth-child(2)) { text-align: right }
.explained td { border-bottom: 0; padding-bottom: 0 }
.best td { background: var(--soft); font-weight: 600 } .best small { font-weight: 400 }
.reason { color: var(--muted); font-size: 12px; padding-top: 0; overflow-wrap: anywhere }
.state { font-size: 12px; white-space: nowrap } .state::before { content: "\\25CF"; margin-right: 4px; color: var(--c6) }
.complete::before { color: var(--c2) } .running::before { color: var(--c0) } .pruned::before { color: var(--c4); content: "\\25B2" }
.failed::before, .out_of_memory::before { color: var(--c1); content: "\\2715" }
.plots { display: flex; flex-wrap: wrap; gap: 8px 20px; margin: 12px 0 }
figure { margin: 0; flex: 0 1 auto; min-width: 0 } svg { width: 100%; height: auto; display: block }
.plots svg { min-width: 320px } figure > svg { width: 860px } figcaption { margin-top: 2px }
svg text { font: 11px system-ui, sans-serif; fill: var(--muted); font-variant-numeric: tabular-nums }
svg .label { fill: var(--ink) } svg .strong { fill: var(--ink); font-weight: 600 }
svg .rule { stroke: var(--rule) } svg .axis { stroke: var(--muted) }
svg .limit { stroke: var(--ink); stroke-dasharray: 6 3 } svg .empty { fill: none; stroke: var(--rule); stroke-dasharray: 4 4 }
.series polyline { fill: none; stroke: currentColor; stroke-width: 1.6 } .series .bold { stroke-width: 3; font-weight: 700 }
.series .dashed { stroke-dasharray: 5 4 } .series .leader { stroke-width: .6; opacity: .65 }
.series .dot { fill: currentColor } .series .cross { stroke: currentColor; stroke-width: 2; fill: none }
.series .ring { fill: none; stroke: currentColor; stroke-width: 1.6 } .series .interval { stroke: currentColor; stroke-width: 1.2 }
.series .note { fill: var(--muted); paint-order: stroke; stroke: var(--paper); stroke-width: 3px }
.series .failed { stroke-width: .9; stroke-dasharray: 2 4 } .series .name { fill: currentColor } svg rect.c0, svg rect.c1, svg rect.c2 { fill: currentColor }
.legend span { margin-right: 16px; color: var(--muted); font-size: 12px }
.legend i { display: inline-block; width: 10px; height: 10px; background: currentColor; margin-right: 5px }
"""
