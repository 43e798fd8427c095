"""The figures of each stage."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree.ElementTree import Element

from orchestrator.config.keys import StudyConfig
from orchestrator.output.plots import Axis, Line, Mark, Series, element, number_text, plot
from orchestrator.output.report.tables import finite, metrics_with_goodput, short_id
from orchestrator.stages import learning_rate
from orchestrator.stages.mode import mode_of
from orchestrator.study.state import Study, Trial, TrialState
from orchestrator.units import bytes_text


def stage_figures(config: StudyConfig, study: Study, stage: str, trials: list[Trial]) -> list[Element]:
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
    return [figure_of(chart, "Numbers are micro-batch sizes; ringed: chosen; cross: out of memory.")]


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
    ran = [t for t in trials if t.state is not TrialState.OUT_OF_MEMORY and finite(t.metrics.get("tokens_per_second"))]
    ran = [trial for trial in ran if finite(trial.metrics.get("peak_memory_bytes")) is not None]
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
    critical = finite(study.value("throughput", "critical_batch_size"))
    lines = [Line(critical, f"critical {number_text(critical)}", vertical=True)] if critical else []
    noise = [replace(mark, low=low, high=high) for mark, low, high in _noise_marks(study, trials)]
    floor = Series("floor", _batch_marks(study, trials, "coherence_floor"), 6, dashed=True)
    size: dict[str, Any] = {"width": 530, "height": 230}
    speed = [Series("", _batch_marks(study, trials, "tokens_per_second"))]
    goodput = [Series("", _batch_marks(study, trials, "goodput"), 2)]
    coherence = [Series("coherence", _batch_marks(study, trials, "coherence"), 1), floor]
    return [
        figure_of(plot(x_axis, Axis("tokens/s", zero=True), speed, **size), "What accumulation costs."),
        figure_of(plot(x_axis, _noise_axis(noise), [Series("", tuple(noise), 3)], **size), _NOISE_NOTE),
        figure_of(plot(x_axis, Axis("gradient coherence", zero=True), coherence, **size), _COHERENCE_NOTE),
        figure_of(plot(x_axis, Axis("goodput, relative", zero=True), goodput, lines, **size), "Progress per second."),
    ]


def _batch_marks(study: Study, trials: list[Trial], key: str) -> tuple[Mark, ...]:
    """(effective batch, metric) of the trials that have it."""
    points = ((float(t.config.effective_batch_size), finite(metrics_with_goodput(study, t).get(key))) for t in trials)
    return tuple(Mark(x, y) for x, y in sorted((x, y) for x, y in points if y is not None))


def _noise_marks(study: Study, trials: list[Trial]) -> list[tuple[Mark, float | None, float | None]]:
    low, high = (
        {mark.x: mark.y for mark in _batch_marks(study, trials, key)} for key in ("noise_scale_low", "noise_scale_high")
    )
    return [(mark, low.get(mark.x), high.get(mark.x)) for mark in _batch_marks(study, trials, "noise_scale")]


def _equivalence_plots(study: Study, trials: list[Trial]) -> list[Element]:
    measured = [(trial, finite(trial.metrics.get("rho"))) for trial in trials]
    shown = [(trial, rho) for trial, rho in measured if rho is not None and rho > 0]
    tolerance = finite(study.value("equivalence", "tolerance"))
    marks = tuple(Mark(rho, -float(i), number_text(rho)) for i, (_, rho) in enumerate(shown))
    names = {-float(i): short_id(trial) for i, (trial, _) in enumerate(shown)}
    lines = [Line(tolerance, f"tolerance {number_text(tolerance)}", vertical=True)] if tolerance else []
    x_axis = Axis("rho, relative distance of the weights", log=True)
    y_axis = Axis("", lambda tick: names[tick], ticks=tuple(names))
    left = 30 + 7 * max((len(name) for name in names.values()), default=0)
    series = [Series("", marks, joined=False)]
    chart = plot(x_axis, y_axis, series, lines, width=640, height=90 + 34 * len(shown), left=left)
    same = [short_id(trial) for trial, rho in measured if rho == 0]
    return [figure_of(chart, f"Not on the axis, because rho is 0: {', '.join(same)}." if same else "")]


def _training_plots(study: Study, stage: str, trials: list[Trial]) -> list[Element]:
    losses = sorted(y for trial in trials for _, y in loss_history(trial, "samples_seen"))
    top = _shown_top(losses)
    winner = study.value(stage, "winner")
    loss = Axis("validation loss", top=top)
    beyond = sum(value > top for value in losses)
    note = f" {beyond} evaluations above {number_text(top)} are not shown." if beyond else ""
    axes = {"samples_seen": Axis("samples seen", zero=True), "train_seconds": _time_axis(trials)}
    return [
        figure_of(
            plot(axis, loss, _histories(trials, key, winner), width=540, height=320),
            f"Dashed: pruned or failed; bold: the winner.{note}",
        )
        for key, axis in axes.items()
    ]


def _time_axis(trials: list[Trial]) -> Axis:
    longest = max((x for trial in trials for x, _ in loss_history(trial, "train_seconds")), default=0.0)
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
            short_id(trial),
            tuple(Mark(x, y) for x, y in loss_history(trial, key)),
            colour,
            dashed=trial.state in lost,
            bold=trial.id == winner,
        )
        for colour, trial in enumerate(trials)
    ]


def loss_history(trial: Trial, key: str) -> list[tuple[float, float]]:
    """(key, val_loss) of every evaluation that has both."""
    points = ((finite(point.get(key)), finite(point.get("val_loss"))) for point in trial.history)
    return sorted((x, y) for x, y in points if x is not None and y is not None)


def _learning_rate_plots(study: Study, trials: list[Trial]) -> list[Element]:
    """Every rate that was run at the winner's batch, those of the train stage among them."""
    winner = study.value("learning_rate", "winner")
    trials = [*learning_rate.run_before(study), *trials]
    measured = sorted(
        (trial.config.learning_rate, loss, trial.id)
        for trial in trials
        if (loss := finite(trial.metrics.get("val_loss"))) is not None
    )
    marks = [Mark(rate, loss, f"{loss:.3f}", "chosen" if id == winner else "point") for rate, loss, id in measured]
    highest = max((mark.y for mark in marks), default=1.0)
    without = [trial for trial in trials if trial.state.ended and finite(trial.metrics.get("val_loss")) is None]
    lost = tuple(Mark(trial.config.learning_rate, highest, trial.reason.split(":")[0], "cross") for trial in without)
    rates = tuple(trial.config.learning_rate for trial in trials)
    single = len({mark.x for mark in marks}) == len(marks)
    series = [Series("", tuple(marks), joined=single), Series("", lost, 1, joined=False)]
    chart = plot(Axis("learning rate", log=True, ticks=rates), Axis("validation loss"), series, width=640, height=290)
    edge = " It lies on the edge of the grid." if study.value("learning_rate", "on_edge") else ""
    return [figure_of(chart, f"Ringed: the best.{edge}")]


def time_bar(parts: Sequence[float], longest: float) -> Element:
    """The parts side by side, to the scale of the longest stage."""
    scale = 260 / max(longest, sum(parts), 1e-9)
    starts = [scale * sum(parts[:i]) for i in range(len(parts))]
    rects = [
        element("rect", x=round(start, 1), y=2, width=round(scale * part, 1), height=11, class_=f"c{i}")
        for i, (start, part) in enumerate(zip(starts, parts, strict=True))
    ]
    return element("svg", *rects, viewBox="0 0 260 15", style="width:260px;max-width:260px", role="img")


def figure_of(chart: Element, caption: str) -> Element:
    return element("figure", chart, element("figcaption", caption) if caption else None)


def _noise_axis(marks: list[Mark]) -> Axis:
    """The interval may reach to infinity, and must not flatten the estimates."""
    return Axis("noise scale, samples", zero=True, top=3 * max((mark.y for mark in marks), default=1.0))


_NOISE_NOTE = "Gradient noise scale (B_simple) with its 95 % interval."


_COHERENCE_NOTE = "How far the micro-batches' gradients agree; at the floor they show nothing but noise."
