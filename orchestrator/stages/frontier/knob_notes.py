"""What the frontier found of its memory knobs: each against accumulation in the same memory, and why others were not tried."""

from __future__ import annotations

import math

from batchscout.orchestrator.stages.frontier.findings import FrontierFindings, KnobFindings, OperatingPoint
from batchscout.orchestrator.stages.frontier.knobs import MOST_PROBES, KnobMode
from batchscout.orchestrator.stages.frontier.measured import peak_of, rate_of
from batchscout.orchestrator.stages.frontier.modes import knobs_to_try
from batchscout.orchestrator.stages.frontier.progress import FrontierProgress
from batchscout.orchestrator.units import bytes_text
from batchscout.trainers.knobs import in_words, that_change_the_loss


def knob_findings(known: FrontierProgress) -> tuple[KnobFindings, ...]:
    """Return, of each mode with knobs of which a size fitted, its fastest against the fastest without."""
    found = [_finding(known, one) for one in known.knobs.modes]
    return tuple(one for one in found if one is not None)


def _finding(known: FrontierProgress, one: KnobMode) -> KnobFindings | None:
    fitting, without = known.knobs.fitting(one), known.probes.fitting_without_knobs()
    if not fitting:
        return None
    fastest = max(fitting, key=lambda point: rate_of(fitting[point]))
    other = max(without, key=lambda point: rate_of(without[point]), default=None)
    return KnobFindings(
        one.names,
        fastest,
        _rate(known, fastest, other),
        peak_of(fitting[fastest]),
        other,
        math.ceil(fastest.micro_batch_size / other.micro_batch_size) if other else 1,
        _rate(known, other, fastest) if other else None,
        known.knobs.quality(one),
    )


def _rate(known: FrontierProgress, point: OperatingPoint, beside: OperatingPoint | None) -> float:
    """Return the speed of a point from the rounds in which both were timed in turns, or else from its probe."""
    timed = known.finalists.timed.rates if known.finalists.timed else {}
    if known.finalists.timed and point in timed and beside in timed:
        return known.finalists.timed.rate(point)
    probe = known.trials.probe_of(point)
    assert probe is not None, "it fits, so it was probed"
    return rate_of(probe)


def notes_on_knobs(known: FrontierProgress, findings: FrontierFindings) -> list[str]:
    """Return a sentence for each knob that fitted, and one for those that were not tried."""
    compared = [_note_on_knob(known, one, findings) for one in findings.knobs]
    return compared + _note_on_those_left_out(known)


def _note_on_knob(known: FrontierProgress, one: KnobFindings, findings: FrontierFindings) -> str:
    point, other, capacity = one.fastest, one.accumulated, known.trials.capacity_bytes()
    unit = known.context.study.facts.rate_unit
    within = f"at equal memory ({bytes_text(capacity)})" if capacity else "at equal memory"
    with_knob = f"{in_words(one.memory_knobs)} with micro-batch {point.micro_batch_size} ({point.mode.activation_checkpointing})"
    if other is None or one.accumulated_tokens_per_second is None:
        return f"{within} nothing fits without a knob, and {with_knob} reaches {one.tokens_per_second:,.0f} {unit}"
    ratio = one.tokens_per_second / one.accumulated_tokens_per_second
    return (
        f"{within}, accumulation {other.micro_batch_size} x {one.accumulation_steps} ({other.mode.activation_checkpointing}) reaches "
        f"{one.accumulated_tokens_per_second:,.0f} {unit}, and {with_knob} reaches {one.tokens_per_second:,.0f} ({ratio:.2f} x)"
        f"{_what_follows(known, one, findings)}"
    )


def _what_follows(known: FrontierProgress, one: KnobFindings, findings: FrontierFindings) -> str:
    """Return why the study goes on with the knob, or does not, where that is not its speed alone."""
    if one.quality and not one.quality.passed:
        return f"; it is not taken, as it learns worse: {one.quality}"
    if one.quality:
        return f"; it learns as well: {one.quality}"
    if that_change_the_loss(one.memory_knobs):
        why = "it is not faster, so its loss was not checked"
        if any(mode.mode == one.fastest.mode for mode in known.knobs.to_check):
            why = (
                "the runs without it that its loss is to be compared with did not end; see the reasons of these trials"
            )
        elif one.is_faster:
            why = "the stage's time, or max_samples, left no room to check the loss"
        return f"; it is not taken, as {why}"
    return "; it is taken" if findings.chosen.mode == one.fastest.mode else ""


def _note_on_those_left_out(known: FrontierProgress) -> list[str]:
    search, wanted = known.knobs, knobs_to_try(known.context)
    if not wanted:
        return []
    if not search.memory_binds:
        why = "as memory is not what limits the micro-batch"
        return [f"memory knobs were not tried ({in_words(wanted)}), {why}"] if known.context.stage.memory_knobs else []
    idle = _named([one for one in search.candidates if search.saves_nothing(one)])
    probed = {trial.id for trial in known.trials.all()}
    others = [
        one for one in search.modes if known.trials.name(OperatingPoint(one.mode, search.first_size(one))) not in probed
    ]
    notes = [f"predicted to save nothing, and not probed: {idle}"] if idle else []
    why = f"at most {MOST_PROBES} probes are for knobs, within the stage's time"
    return notes + ([f"not probed: {_named(others)} ({why})"] if others else [])


def _named(modes: list[KnobMode]) -> str:
    return "; ".join(f"{in_words(one.names)} with {one.ground.activation_checkpointing}" for one in modes)
