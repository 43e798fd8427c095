"""What the files of single runs show: the loss and gradient norm of every step, and the gradient noise along the way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree.ElementTree import Element

from batchscout.orchestrator.output.known import last_baseline
from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.output.report.figures import figure_element
from batchscout.orchestrator.output.report.tables import heading, html_table, notes_list, number_cell
from batchscout.orchestrator.stages.curves import above_text, without_diverged
from batchscout.orchestrator.stages.figures import (
    AUXILIARY_COLOUR,
    BASELINE_COLOUR,
    CATEGORIES,
    CHOSEN_COLOUR,
    Axis,
    Figure,
    Mark,
    Series,
    coherence_mark,
    noise_scale_mark,
)
from batchscout.orchestrator.stages.input_bound import INPUT_BOUND
from batchscout.orchestrator.study.run_directory import trial_directory
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.units import loss_text, number_text
from batchscout.trainers.noise.noise_curve import NOISE_CURVE_FILE, AccumulatedGradient, NoiseSnapshot, read_noise_curve
from batchscout.trainers.notices import Notice, heard_by
from batchscout.trainers.step_log import FILE_NAME, Step, read_steps

# A figure has room for so many points of a run, of which each pair is the lowest and the highest of its steps: a spike
# of a single step is seen.
MOST_POINTS = 400
NUM_MEANS = 40
"""A run of twice as many steps has so many means drawn over it."""


@dataclass(frozen=True)
class RunCurves:
    """What a run has kept of its course."""

    name: str
    steps: list[Step]
    snapshots: list[NoiseSnapshot]
    notices: list[Notice] = field(default_factory=list)
    """What was amiss with its files."""


def read_curves(run_dir: Path, study: Study, winner: str | None) -> list[RunCurves]:
    """Return the curves of the recommended run and of the baseline's, as far as there are any."""
    shown = {"recommended": study.trials.get(winner or ""), "baseline": last_baseline(study)}
    if shown["recommended"] is shown["baseline"]:
        shown = {"baseline": shown["baseline"]}
    found = [_curves(name, trial_directory(run_dir, trial.id)) for name, trial in shown.items() if trial]
    return [one for one in found if one.steps or one.snapshots or one.notices]


def _curves(name: str, directory: Path) -> RunCurves:
    met: list[Notice] = []
    with heard_by(met.append):
        steps, snapshots = read_steps(directory / FILE_NAME), read_noise_curve(directory / NOISE_CURVE_FILE)
    return RunCurves(name, steps, snapshots, met)


def training_section(curves: Sequence[RunCurves]) -> Element | None:
    """Return the section of these runs; None where they have kept nothing."""
    if not curves:
        return None
    notes = [f"{one.name}: {notice.text}" for one in curves for notice in one.notices]
    return element(
        "section",
        heading("Along the way", "How did the steps go, and how noisy were they?"),
        notes_list(notes),
        element("div", *[figure_element(one, "training") for one in curve_figures(curves)], class_="plots"),
        *[_noise_table(one) for one in curves if one.snapshots],
        id="training",
    )


def curve_figures(curves: Sequence[RunCurves]) -> list[Figure]:
    return [*step_figures(curves), *_noise_figures(curves)]


def step_figures(curves: Sequence[RunCurves]) -> list[Figure]:
    kept = [one for one in curves if one.steps]
    if not kept:
        return []
    losses = _with_means(kept, lambda step: step.loss)
    norms = _with_means(kept, lambda step: step.gradient_norm)
    waits = _with_means(kept, lambda step: step.data_wait)
    means = (
        f" Faint: single steps; the line over them is the mean of each of {NUM_MEANS} stretches."
        if any(one.faint for one in losses)
        else ""
    )
    samples = Axis("samples seen", zero=True)
    every = [[step.loss for step in one.steps if math.isfinite(step.loss)] for one in kept]
    top = max(itertools.chain(*without_diverged(every)), default=math.inf)
    beyond = sum(loss > top for one in every for loss in one)
    cut = f" {above_text(beyond, 'step', top)}" if beyond else ""
    figures = [
        Figure(
            "step_losses",
            samples,
            Axis("training loss", top=top, precise=loss_text),
            losses,
            f"The loss of every step, before its update.{means}{cut}",
        ),
        Figure("gradient_norms", samples, Axis("gradient norm", log=True), norms, f"Before clipping.{means}"),
    ]
    share = Axis("share of the step waiting for data", lambda share: f"{100 * share:.3g}%", zero=True)
    told = f"From {INPUT_BOUND:.0%} on the run is input-bound: more data.workers would make it faster, and another batch would not."
    return [*figures, Figure("data_wait", samples, share, waits, f"{told}{means}")]


def _with_means(runs: Sequence[RunCurves], value: Callable[[Step], float]) -> tuple[Series, ...]:
    """Return every step of each run, faintly, and over it the mean of each stretch of steps; of a short run its steps alone."""
    series = []
    for one in runs:
        values, colour = [value(step) for step in one.steps], _colour(one)
        many = len(one.steps) >= 2 * NUM_MEANS
        series.append(Series(one.name, _thinned(one.steps, values), colour, faint=many))
        if many:
            edges = [round(i * len(values) / NUM_MEANS) for i in range(NUM_MEANS + 1)]
            means = [_mean(one.steps[start:end], values[start:end]) for start, end in itertools.pairwise(edges)]
            series.append(Series(one.name, tuple(mark for mark in means if mark is not None), colour))
    return tuple(series)


def _mean(steps: Sequence[Step], values: Sequence[float]) -> Mark | None:
    """Return the mean in the middle of the stretch; None where no value of it is finite."""
    known = [value for value in values if math.isfinite(value)]
    told = f"the mean of {len(known)} steps"
    return Mark(steps[len(steps) // 2].samples_seen, sum(known) / len(known), told=told) if known else None


def _colour(run: RunCurves) -> int:
    return BASELINE_COLOUR if run.name == "baseline" else CHOSEN_COLOUR


def _thinned(steps: Sequence[Step], values: Sequence[float]) -> tuple[Mark, ...]:
    """Return at most MOST_POINTS marks: of every stretch of steps the lowest and the highest, in their order."""
    points = [(s.samples_seen, value) for s, value in zip(steps, values, strict=True) if math.isfinite(value)]
    length = max(1, math.ceil(2 * len(points) / MOST_POINTS))
    stretches = [points[start : start + length] for start in range(0, len(points), length)]
    ends = [{min(one, key=lambda p: p[1]), max(one, key=lambda p: p[1])} for one in stretches]
    return tuple(Mark(x, y) for some in ends for x, y in sorted(some))


def _noise_figures(curves: Sequence[RunCurves]) -> list[Figure]:
    """Return the noise scale over the run, and what accumulation shows of the gradient at the last snapshot."""
    kept = [one for one in curves if one.snapshots]
    if not kept:
        return []
    return [_noise_scale_figure(kept), _coherence_figure(kept[-1]), _snr_figure(kept[-1])]


def _noise_scale_figure(curves: Sequence[RunCurves]) -> Figure:
    series = tuple(
        Series(
            one.name,
            tuple(
                noise_scale_mark(s.samples_seen, s.noise_scale, s.noise_scale_low, s.noise_scale_high)
                for s in one.snapshots
                if s.noise_scale is not None
            ),
            _colour(one),
        )
        for one in curves
    )
    top = 3 * max((mark.y for some in series for mark in some.marks), default=1.0)
    return Figure(
        "noise_curve",
        Axis("samples seen", zero=True),
        Axis("noise scale, samples", zero=True, top=top, precise=number_text),
        series,
        "Gradient noise scale (B_simple) with its 95 % interval, each measured at weights that stood still. It orders "
        "candidates and decides nothing: it is SGD's measure, and other optimizers have others (arXiv 2602.03001); what it says of "
        "a batch's efficiency was found for other schedules than warmup-stable-decay (arXiv 2601.05034).",
    )


def _coherence_figure(curves: RunCurves) -> Figure:
    last = curves.snapshots[-1]
    coherence = tuple(
        coherence_mark(row.samples, row.coherence, row.coherence_floor)
        for row in last.accumulated
        if row.coherence is not None
    )
    floor = tuple(Mark(row.samples, row.coherence_floor) for row in last.accumulated if row.coherence_floor is not None)
    return Figure(
        "coherence_curve",
        Axis("samples in the gradient", log=True, ticks=tuple(float(row.samples) for row in last.accumulated)),
        Axis("gradient coherence", zero=True),
        (Series("coherence", coherence, _colour(curves)), Series("floor", floor, AUXILIARY_COLOUR, dashed=True)),
        f"At {number_text(last.samples_seen)} samples of the {curves.name} run, with its 95 % interval. Below the floor the "
        "micro-batches' gradients may show nothing but noise.",
    )


def _snr_figure(curves: RunCurves) -> Figure:
    """Return how far the gradient stands above its noise, over the run: for every number of micro-batches that is summed."""
    counts = sorted({row.num_micro_batches for one in curves.snapshots for row in one.accumulated})
    series = tuple(
        Series(
            f"{count} micro-batch{'es' if count > 1 else ''}",
            _snr_marks(curves, count),
            CATEGORIES[number % len(CATEGORIES)],
        )
        for number, count in enumerate(counts)
    )
    return Figure(
        "gradient_snr",
        Axis("samples seen", zero=True),
        Axis("gradient SNR", log=True),
        series,
        f"The {curves.name} run's gradient over its noise, by how many micro-batches are summed; it follows from the noise scale, "
        "and its bar from that interval.",
    )


def _snr_marks(curves: RunCurves, count: int) -> tuple[Mark, ...]:
    """Return the SNR at every snapshot. It is samples / noise scale, so that the interval's ends change places."""
    return tuple(
        Mark(
            one.samples_seen,
            row.gradient_snr,
            low=0.0 if one.noise_scale_high is None else row.samples / one.noise_scale_high,
            high=row.samples / one.noise_scale_low if one.noise_scale_low else None,
        )
        for one in curves.snapshots
        for row in one.accumulated
        if row.num_micro_batches == count and row.gradient_snr is not None
    )


_HEADERS = (
    "at, samples", "micro-batches", "samples", "coherence", "its floor", "norm", "mean", "variance", "gradient SNR",
    "Adam SNR", "update / weights",
)  # fmt: skip


def _noise_table(curves: RunCurves) -> Element:
    """Return a row for every number of micro-batches at every snapshot."""
    rows = [_noise_row(snapshot, row) for snapshot in curves.snapshots for row in snapshot.accumulated]
    summary = (
        f"Gradients of 1 to {curves.snapshots[-1].accumulated[-1].num_micro_batches} micro-batches, {curves.name} run; both SNRs "
        "follow from the noise scale of their snapshot"
    )
    return element("details", element("summary", summary), html_table(list(_HEADERS), rows, "numbers"))


def _noise_row(snapshot: NoiseSnapshot, row: AccumulatedGradient) -> Element:
    figures = (
        row.coherence, row.coherence_floor, row.gradient_norm, row.gradient_mean, row.gradient_variance, row.gradient_snr,
        row.adam_snr, row.update_ratio,
    )  # fmt: skip
    counts = [f"{count:,}" for count in (snapshot.samples_seen, row.num_micro_batches, row.samples)]
    cells = [*counts, *("-" if value is None else f"{value:.3g}" for value in figures)]
    return element("tr", *[number_cell(cell) for cell in cells])
