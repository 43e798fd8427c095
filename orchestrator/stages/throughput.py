"""What does accumulation cost, what does it buy? Effective batches in multiples of the chosen micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from orchestrator.config.stages import Throughput
from orchestrator.stages.chosen import RankBatch, chosen_mode, chosen_split
from orchestrator.stages.context import StageContext
from orchestrator.stages.figures import AUXILIARY_COLOUR, Axis, Figure, Line, Mark, Series
from orchestrator.stages.findings import concluded, found
from orchestrator.stages.forms import Rate
from orchestrator.stages.noise_scale import NoiseScale, pooled_noise_scale
from orchestrator.stages.ranking import goodput
from orchestrator.stages.stage import Stage
from orchestrator.study.state import Conclusion
from orchestrator.study.trial import Metrics, Proposal, Trial, TrialState
from orchestrator.units import number_text

# Past this many times the noise scale a larger batch saves few steps: a step already makes 2/3 of the progress it ever
# could.
ENOUGH_NOISE_SCALES = 2.0


@dataclass(frozen=True)
class ThroughputFindings:
    STAGE: ClassVar[str] = "throughput"

    critical_batch_size: float | None
    """The noise scale in samples; None if it is undetermined."""
    critical_batch_size_low: float | None
    critical_batch_size_high: float | None
    """The ends of its 95 % interval; the upper end is None if it is unbounded."""
    goodput: dict[int, float]
    """Goodput by effective batch, relative to the best."""
    best_tokens_per_second: RankBatch
    best_goodput: RankBatch
    """The fastest, if the noise scale is undetermined."""
    rates: tuple[Rate, ...] = ()
    """How fast every effective batch trains in its fastest form, the smallest first; empty in the findings of earlier
    versions."""


def propose(context: StageContext[Throughput]) -> list[Proposal]:
    """Return a trial for one multiple after the other, until a larger batch no longer improves the gradient signal."""
    chosen, mode = chosen_split(context), chosen_mode(context.study)
    num_samples = context.study.facts.num_train_samples or math.inf
    proposals: list[Proposal] = []
    for multiple in sorted(context.stage.multiples):
        split = context.split(chosen.micro_batch_size, multiple * chosen.gradient_accumulation_steps)
        if split.effective_batch_size > num_samples:
            break
        name = f"throughput-{split}"
        config = context.short_trial(split, mode, context.stage.steps)
        proposals.append(Proposal(name, "throughput", config, candidate=name))
        trial = context.study.trials.get(name)
        if trial is None or not trial.state.ended or _saturated(context.trials()):
            break
    return proposals


def _saturated(trials: list[Trial]) -> bool:
    """True if the largest batch so far is past what the noise scale, at its upper end, can use."""
    scale = pooled_noise_scale(trials)
    largest = max(trial.config.effective_batch_size for trial in trials)
    return scale is not None and scale.high is not None and largest > ENOUGH_NOISE_SCALES * scale.high


def conclude(context: StageContext[Throughput]) -> Conclusion:
    """Conclude with the fastest batch, the noise scale and, if that is known, the batch with the best goodput."""
    done = [t for t in context.trials() if t.state is TrialState.COMPLETE]
    if not done:
        reason = "no effective batch could be measured; see the reasons of its trials"
        return Conclusion("throughput", ok=False, reason=reason)
    scale = pooled_noise_scale(done)
    rates = {t.config.effective_batch_size: t for t in done}
    fastest = max(done, key=_rate)
    known = scale.point if scale else None
    gains = {batch: goodput(_rate(t), batch, known) for batch, t in rates.items()} if known else {}
    best = rates[max(gains, key=lambda batch: gains[batch])] if gains else fastest
    findings = ThroughputFindings(
        critical_batch_size=known,
        critical_batch_size_low=scale.low if scale else None,
        critical_batch_size_high=scale.high if scale else None,
        goodput={batch: gain / max(gains.values()) for batch, gain in gains.items()},
        best_tokens_per_second=_batch(fastest),
        best_goodput=_batch(best),
    )
    speed = f"effective batch {fastest.config.effective_batch_size} gives the most tokens/s ({_rate(fastest):,.0f})"
    return concluded(findings, f"{speed}; {_say_scale(scale, best)}", _notes(context, done, scale))


def _say_scale(scale: NoiseScale | None, best: Trial) -> str:
    if scale is None or scale.point is None:
        return "the noise scale is undetermined, so goodput is not ranked"
    return f"the noise scale is {scale} samples, so effective batch {best.config.effective_batch_size} has the best goodput of these"


def _notes(context: StageContext[Throughput], done: list[Trial], scale: NoiseScale | None) -> tuple[str, ...]:
    notes = ["the noise scale is that of early training; it grows as the loss falls (see the train stage's trials)"]
    notes += _left_out(context, done, scale)
    single = [t for t in done if t.config.gradient_accumulation_steps * t.config.world_size == 1]
    if single:
        batch = single[0].config.effective_batch_size
        notes.append(f"effective batch {batch} is one micro-batch, so its noise scale is not available: that takes two")
    below = [t for t in done if _in_the_noise(t)]
    if below:
        batches = ", ".join(str(t.config.effective_batch_size) for t in below)
        notes.append(f"at effective batch {batches} the coherence is not above its noise floor")
    return tuple(notes)


def _left_out(context: StageContext[Throughput], done: list[Trial], scale: NoiseScale | None) -> list[str]:
    """Return why some multiples were not tried, if any were not."""
    tried = {trial.config.gradient_accumulation_steps for trial in done}
    base = chosen_split(context).gradient_accumulation_steps
    left_out = [multiple for multiple in context.stage.multiples if multiple * base not in tried]
    if not left_out:
        return []
    what = f"multiples {', '.join(map(str, left_out))} were left out"
    if not _saturated(done):
        return [f"{what}: the data has fewer samples than such a batch"]
    largest = max(trial.config.effective_batch_size for trial in done)
    return [f"{what}: effective batch {largest} is already past {ENOUGH_NOISE_SCALES:g} x the noise scale {scale}"]


def _in_the_noise(trial: Trial) -> bool:
    """True if its gradients agree no better than pure noise would."""
    coherence, floor = trial.metric("coherence"), trial.metric("coherence_floor")
    return coherence is not None and floor is not None and coherence <= floor


def _batch(trial: Trial) -> RankBatch:
    return RankBatch(trial.config.micro_batch_size, trial.config.gradient_accumulation_steps)


def _rate(trial: Trial) -> float:
    return trial.metric("tokens_per_second") or 0.0


def describe(context: StageContext[Throughput]) -> list[str]:
    multiples = context.stage.multiples
    return [f"{len(multiples)} effective batches at most: {', '.join(map(str, multiples))} x the chosen micro-batch"]


def derived(context: StageContext[Throughput], trial: Trial) -> Metrics:
    """Return the trial's goodput, which no trial can measure alone: it needs the noise scale over all of them."""
    findings = found(context.study, ThroughputFindings)
    goodputs = findings.goodput if findings else {}
    batch = trial.config.effective_batch_size
    return {"goodput": goodputs[batch]} if batch in goodputs else {}


def figures(context: StageContext[Throughput]) -> list[Figure]:
    """Return speed, noise scale, coherence and goodput over the effective batch."""
    noise = _noise_marks(context)
    speed = Series("", _marks(context, "tokens_per_second"))
    coherence = Series("coherence", _marks(context, "coherence"), 1)
    floor = Series("floor", _marks(context, "coherence_floor"), AUXILIARY_COLOUR, dashed=True)
    gain = Series("", _marks(context, "goodput"), 2)
    gain_figure = _figure(context, Axis("goodput, relative", zero=True), (gain,), "Progress per second.")
    return [
        _figure(context, Axis("tokens/s", zero=True), (speed,), "What accumulation costs."),
        _figure(context, _noise_axis(noise), (Series("", noise, 3),), NOISE_CAPTION),
        _figure(context, Axis("gradient coherence", zero=True), (coherence, floor), COHERENCE_CAPTION),
        replace(gain_figure, lines=_critical_lines(context)),
    ]


NOISE_CAPTION = "Gradient noise scale (B_simple) with its 95 % interval."
COHERENCE_CAPTION = "How far the micro-batches' gradients agree; at the floor they show nothing but noise."


def _figure(context: StageContext[Throughput], y_axis: Axis, series: tuple[Series, ...], caption: str) -> Figure:
    batches = tuple(float(trial.config.effective_batch_size) for trial in context.trials())
    x_axis = Axis("effective batch, samples", log=True, ticks=batches)
    return Figure(x_axis, y_axis, series, caption, width=530, height=230)


def _marks(context: StageContext[Throughput], metric: str) -> tuple[Mark, ...]:
    """Return (effective batch, metric) of the trials that have it."""
    points = [
        (float(trial.config.effective_batch_size), (trial.metrics | derived(context, trial)).get(metric))
        for trial in context.trials()
    ]
    return tuple(Mark(x, y) for x, y in sorted((x, y) for x, y in points if y is not None))


def _noise_marks(context: StageContext[Throughput]) -> tuple[Mark, ...]:
    low, high = (
        {mark.x: mark.y for mark in _marks(context, metric)} for metric in ("noise_scale_low", "noise_scale_high")
    )
    return tuple(replace(one, low=low.get(one.x), high=high.get(one.x)) for one in _marks(context, "noise_scale"))


def _noise_axis(marks: tuple[Mark, ...]) -> Axis:
    """Return an axis that ends above the estimates: an interval that reaches far must not flatten them."""
    return Axis("noise scale, samples", zero=True, top=3 * max((mark.y for mark in marks), default=1.0))


def _critical_lines(context: StageContext[Throughput]) -> tuple[Line, ...]:
    findings = found(context.study, ThroughputFindings)
    critical = findings.critical_batch_size if findings else None
    return (Line(critical, f"critical {number_text(critical)}", vertical=True),) if critical else ()


COLUMNS = (
    "tokens_per_second", "step_seconds", "coherence", "coherence_floor", "noise_scale", "noise_scale_low",
    "noise_scale_high", "goodput",
)  # fmt: skip

STAGE = Stage[Throughput](propose, conclude, describe, figures, COLUMNS, derived)
