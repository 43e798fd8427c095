"""The throughput stage's figures: speed, noise scale, coherence and goodput over the effective batch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from batchscout.orchestrator.config.stages import Throughput
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import (
    AUXILIARY_COLOUR,
    OTHERS_COLOUR,
    Axis,
    Figure,
    Line,
    Mark,
    Series,
    coherence_mark,
    noise_scale_mark,
    rate_axis,
    split_text,
)
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.throughput.findings import ThroughputFindings
from batchscout.orchestrator.study.state import speed_kind
from batchscout.orchestrator.study.trial import Metrics, Trial
from batchscout.orchestrator.units import number_text


def derived(context: StageContext[Throughput], trial: Trial) -> Metrics:
    """Return the trial's goodput, which no trial can measure alone: it needs the noise scale over all of them."""
    findings = found(context.study, ThroughputFindings)
    goodputs = findings.goodput if findings else {}
    batch = trial.config.effective_batch_size
    return {"goodput": goodputs[batch]} if batch in goodputs else {}


def figures(context: StageContext[Throughput]) -> list[Figure]:
    """Return speed, noise scale, coherence and goodput over the effective batch."""
    findings = found(context.study, ThroughputFindings)
    noise = _marks(context, "noise_scale", _noise_mark)
    speed = Series("", _speed_marks(context), OTHERS_COLOUR)
    agreeing = _marks(context, "coherence", lambda x, y, of: coherence_mark(x, y, of.get("coherence_floor")))
    coherence = _of_batches("coherence", agreeing, OTHERS_COLOUR)
    floors = _marks(context, "coherence_floor", lambda x, y, _: Mark(x, y))
    floor = replace(_of_batches("floor", tuple(replace(one, text="") for one in floors), AUXILIARY_COLOUR), dashed=True)
    gain = Series("", _goodput_marks(findings) if findings else (), OTHERS_COLOUR)
    # It ends above the estimates: an interval that reaches far must not flatten them.
    noise_axis = Axis(
        "noise scale, samples", zero=True, top=3 * max((mark.y for mark in noise), default=1.0), precise=number_text
    )
    scale = findings.critical_batch_size if findings else None
    limits = (Line(scale, f"noise scale {scale:,.0f}", vertical=True),) if scale else ()
    return [
        _figure("speed", context, rate_axis(context.study.facts.rate_unit), (speed,), SPEED_CAPTION),
        _figure("noise_scale", context, noise_axis, (_of_batches("", noise, OTHERS_COLOUR),), NOISE_CAPTION),
        _figure("coherence", context, Axis("gradient coherence", zero=True), (coherence, floor), COHERENCE_CAPTION),
        _figure("goodput", context, Axis("goodput, relative", zero=True), (gain,), GOODPUT_CAPTION, limits),
    ]


GOODPUT_CAPTION = "Progress per second, with its 95 % interval."
SPEED_CAPTION = (
    "What accumulation costs: each batch in its fastest form; the bar is from the slowest to the fastest round."
)
NOISE_CAPTION = "Gradient noise scale (B_simple) with its 95 % interval."
COHERENCE_CAPTION = (
    "How far the micro-batches' gradients agree, with its 95 % interval; below the floor it may be nothing but noise."
)


def _of_batches(label: str, marks: tuple[Mark, ...], colour: int) -> Series:
    """Return the marks, joined unless two splits of one batch lie above each other."""
    return Series(label, marks, colour, joined=len({mark.x for mark in marks}) == len(marks))


def _figure(
    name: str,
    context: StageContext[Throughput],
    y_axis: Axis,
    series: tuple[Series, ...],
    caption: str,
    lines: tuple[Line, ...] = (),
) -> Figure:
    batches = tuple(float(trial.config.effective_batch_size) for trial in context.trials())
    x_axis = Axis("effective batch, samples", log=True, ticks=batches)
    return Figure(name, x_axis, y_axis, series, caption, lines, width=530, height=230)


def _speed_marks(context: StageContext[Throughput]) -> tuple[Mark, ...]:
    """Return the speed of every effective batch: of all its rounds, in its fastest form."""
    rates = dict[float, dict[tuple[object, ...], list[float]]]()
    for trial in context.trials():
        if rate := trial.metric("tokens_per_second"):
            forms = rates.setdefault(float(trial.config.effective_batch_size), {})
            forms.setdefault(speed_kind(trial.config), []).append(rate)
    return tuple(
        Mark(x, statistics.median(fastest), low=min(fastest), high=max(fastest))
        for x, forms in sorted(rates.items())
        for fastest in [max(forms.values(), key=statistics.median)]
    )


_APART = 16
"""The pixels between two splits of one batch."""


def _marks(
    context: StageContext[Throughput], metric: str, mark: Callable[[float, float, Metrics], Mark]
) -> tuple[Mark, ...]:
    """Return the mark of each trial that has the metric; of several rounds the first measures these. Splits of one batch lie beside each
    other, and say which they are."""
    trials = [one for one in context.trials() if one.proposal.round in (None, 1) and one.metric(metric) is not None]
    by_batch: dict[int, list[Trial]] = {}
    for trial in sorted(trials, key=lambda one: one.config.effective_batch_size):
        by_batch.setdefault(trial.config.effective_batch_size, []).append(trial)
    return tuple(
        replace(
            mark(float(batch), trial.measured(metric), trial.metrics),
            text=split_text(trial.config.split) if len(some) > 1 else "",
            aside=_APART * (number - (len(some) - 1) / 2),
        )
        for batch, some in by_batch.items()
        for number, trial in enumerate(some)
    )


def _noise_mark(x: float, noise_scale: float, metrics: Metrics) -> Mark:
    return noise_scale_mark(x, noise_scale, metrics.get("noise_scale_low"), metrics.get("noise_scale_high"))


def _goodput_marks(findings: ThroughputFindings) -> tuple[Mark, ...]:
    ends = findings.goodput_ends
    gains = ((batch, gain, ends.get(batch, (None, None))) for batch, gain in sorted(findings.goodput.items()))
    return tuple(Mark(batch, gain, low=low, high=high) for batch, gain, (low, high) in gains)
