"""What the throughput stage concludes: the fastest batch and how the others stand to it, and the noise scale."""

from __future__ import annotations

import math

from batchscout.orchestrator.config.stages import Throughput
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.noise_scale import NoiseScale, pooled_noise_scale
from batchscout.orchestrator.stages.estimates.ranking import goodput
from batchscout.orchestrator.stages.estimates.timing import Ratio, Timings, held_against
from batchscout.orchestrator.stages.figures import batches_text, split_text
from batchscout.orchestrator.stages.findings import concluded
from batchscout.orchestrator.stages.forms import Form, Rate, rate_of
from batchscout.orchestrator.stages.input_bound import input_bound
from batchscout.orchestrator.stages.short_runs import lowered, notes_on_divergence, why_they_diverge
from batchscout.orchestrator.stages.throughput.findings import ThroughputFindings
from batchscout.orchestrator.stages.throughput.propose import ThroughputProgress
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import listed, rate_text


def conclude(context: StageContext[Throughput]) -> Conclusion:
    """Conclude with the fastest batch, the rates of all, the noise scale and, if known, the batch of best goodput."""
    known = ThroughputProgress(context)
    timed = known.timed
    if timed is None:
        reason = f"no effective batch could be measured; {why_they_diverge(context) or 'see the reasons of its trials'}"
        return Conclusion("throughput", ok=False, reason=reason)
    fastest_forms = {batch: known.fastest_form(timed, batch) for batch in known.batches.forms}
    forms = {batch: form for batch, form in fastest_forms.items() if form is not None}
    fastest = timed.fastest_first(forms.values())[0]
    others = {batch: timed.ratio(form, fastest, len(forms)) for batch, form in forms.items() if form != fastest}
    scale = pooled_noise_scale(known.first_round())
    rates = [
        rate_of(form, timed.rate(form), timed.interval(form), len(timed.rounds), timed.deviation())
        for form in forms.values()
    ]
    waits = input_bound(trial for trial in context.trials() if trial.config.split == fastest.split)
    gains = _goodputs(rates, scale.point) if scale and scale.point else {}
    findings = ThroughputFindings(
        critical_batch_size=scale.point if scale else None,
        critical_batch_size_low=scale.low if scale else None,
        critical_batch_size_high=scale.high if scale else None,
        goodput=gains,
        goodput_ends=_goodput_ends(rates, gains, scale) if scale else {},
        rates=tuple(rates),
        busy=bool(unrest_of(known, timed)),
        input_bound=waits,
    )
    split, speed = fastest.split, rate_text(timed.rate(fastest), "samples/s")
    said = [
        f"effective batch {split.effective_batch_size} ({split_text(split)}) trains fastest: {speed}",
        *_others(context, others),
        _noise(scale, findings),
    ]
    said += [str(waits)] if waits else []
    return concluded(findings, "; ".join(said), tuple(_notes(known, timed, forms)))


def unrest_of(known: ThroughputProgress, timed: Timings[Form]) -> str | None:
    """Return the signs that something else had the machine, or that it slowed itself down; None if there is none."""
    found = ((trial, known.context.disturbance(trial.metrics)) for trial in known.context.trials())
    first = next((f"{trial.id}: {why}" for trial, why in found if why), None)
    return "; ".join(filter(None, [timed.unrest() if timed.busy else None, first])) or None


def _goodputs(rates: list[Rate], noise_scale: float) -> dict[int, float]:
    """Return the goodput of every batch, relative to the best."""
    gains = {
        rate.effective_batch_size: goodput(rate.samples_per_second, rate.effective_batch_size, noise_scale)
        for rate in rates
    }
    return {batch: gain / max(gains.values()) for batch, gain in gains.items()}


def _goodput_ends(rates: list[Rate], gains: dict[int, float], scale: NoiseScale) -> dict[int, tuple[float, float]]:
    """Return what each relative goodput lies between. An unbounded noise scale makes every batch as efficient as one."""
    if not gains:
        return {}
    at_ends = [gains, *(_goodputs(rates, end) for end in (scale.low, scale.high or math.inf) if end > 0)]
    return {
        rate.effective_batch_size: (
            min(one[rate.effective_batch_size] for one in at_ends) * rate.low / rate.samples_per_second,
            max(one[rate.effective_batch_size] for one in at_ends) * rate.high / rate.samples_per_second,
        )
        for rate in rates
    }


def _others(context: StageContext[Throughput], others: dict[int, Ratio]) -> list[str]:
    """Return how those that may be as fast, the next one and the baseline stand to the fastest."""
    ranked = sorted(others, key=lambda batch: -others[batch].point)
    undecided = [batch for batch in ranked if others[batch].order == "undetermined"]
    at_once = undecided if len(undecided) > 1 else []
    shown = {*ranked[:1], *undecided, baseline_batch(context.config)} - {*at_once}
    said = [held_against(f"effective batch {batch}", others[batch]) for batch in ranked if batch in shown]
    against = ", ".join(f"{batch} ({others[batch]})" for batch in at_once)
    return [*said, f"undetermined whether other effective batches are faster: {against}"] if at_once else said


def _noise(scale: NoiseScale | None, findings: ThroughputFindings) -> str:
    if scale is None or scale.point is None:
        return "the noise scale is undetermined, so goodput is not ranked"
    best = max(findings.goodput, key=lambda batch: findings.goodput[batch])
    least = findings.goodput_ends[best][0] if best in findings.goodput_ends else 1.0
    rivals = [str(b) for b, (_, most) in sorted(findings.goodput_ends.items()) if b != best and most > least]
    beside = f"; within the intervals it may be {listed(rivals, 'or')}" if rivals else ""
    return f"the noise scale is {scale} samples, so effective batch {best} has the best goodput of these{beside}"


_EARLY = "the noise scale is that of early training; it grows as the loss falls (see the train stage's trials)"
_BY_TOKENS = (
    "micro-batches that are cut by tokens each have samples of about one length, so they tell no noise scale; the train stage's baseline "
    "measures it in micro-batches drawn at random"
)


def _notes(known: ThroughputProgress, timed: Timings[Form], forms: dict[int, Form]) -> list[str]:
    by_tokens = known.context.config.micro_batch is not None
    notes = [_BY_TOKENS if by_tokens else _EARLY]
    if not by_tokens and (share := lowered(known.context)) != 1:
        notes[0] += f"; it is measured at down to 1/{share:,} of the study's learning rate, where weights hardly move"
    notes += [*known.batches.left_out, *_on_the_forms(known, timed, forms)]
    if unrest := unrest_of(known, timed):
        notes.append(f"the machine was busy: {unrest}. Time the batches again when it is quiet")
    notes += notes_on_divergence(known.context)
    single = [batch for batch, form in forms.items() if form.split.num_micro_batches == 1]
    if single and not by_tokens:
        notes.append(
            f"the noise scale needs two micro-batches a step; {batches_text(single)} {'has' if len(single) == 1 else 'have'} one"
        )
    below = sorted({trial.config.effective_batch_size for trial in known.first_round() if _in_the_noise(trial)})
    if below:
        notes.append(f"at {batches_text(below)} the coherence is not above its noise floor")
    return notes


def _on_the_forms(known: ThroughputProgress, timed: Timings[Form], forms: dict[int, Form]) -> list[str]:
    """Return of every batch that was timed in two forms how they compare, and which batches did not run."""
    notes = []
    for batch, tried in known.batches.forms.items():
        if batch not in forms:
            notes.append(f"effective batch {batch} did not run in every round; see the reasons of its trials")
        for form in tried:
            if form in timed.rates and form != forms[batch]:
                ratio = timed.ratio(form, forms[batch], num_compared=2)
                against = held_against(split_text(form.split), ratio)
                notes.append(f"effective batch {batch} as {split_text(forms[batch].split)}: {against}")
    return notes


def _in_the_noise(trial: Trial) -> bool:
    """True if its gradients agree no better than pure noise would."""
    coherence, floor = trial.metric("coherence"), trial.metric("coherence_floor")
    return coherence is not None and floor is not None and coherence <= floor
