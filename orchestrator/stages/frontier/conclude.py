"""What the frontier concludes: the choice with its margin, the largest sizes, the front, and a sentence for each."""

from __future__ import annotations

import statistics
from collections.abc import Collection

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.timing import held_against
from batchscout.orchestrator.stages.findings import concluded
from batchscout.orchestrator.stages.frontier.checkpointing import notes_on_checkpointing
from batchscout.orchestrator.stages.frontier.doubts import (
    disturbed_trials,
    notes_on_the_machine,
    notes_on_what_was_left_out,
)
from batchscout.orchestrator.stages.frontier.findings import (
    FrontierFindings,
    LengthFindings,
    MeasuredPoint,
    OperatingPoint,
    Rival,
)
from batchscout.orchestrator.stages.frontier.knob_notes import knob_findings, notes_on_knobs
from batchscout.orchestrator.stages.frontier.measured import ended_for_another_reason, peak_of, rate_of
from batchscout.orchestrator.stages.frontier.modes import modes
from batchscout.orchestrator.stages.frontier.pareto import Point, knee, pareto_front
from batchscout.orchestrator.stages.frontier.progress import FrontierProgress
from batchscout.orchestrator.stages.frontier.variants import variants
from batchscout.orchestrator.stages.input_bound import input_bound
from batchscout.orchestrator.stages.probing import num_full_runs
from batchscout.orchestrator.stages.short_runs import made_again, notes_on_divergence, why_they_diverge
from batchscout.orchestrator.stages.too_short import in_words, out_of_reach
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.units import bytes_text, counted, rate_text


def conclude(context: StageContext[Frontier]) -> Conclusion:
    """Conclude with the fastest verified point within the limit and its headroom, or fail where nothing fits."""
    known = FrontierProgress(context)
    chosen = known.verification.verified()
    if chosen is None:
        return _nothing_fits(known)
    findings = _findings(known, chosen)
    beyond = out_of_reach(context.config, findings.rates) if num_full_runs(context.config, context.study) else []
    unit = context.study.facts.rate_unit
    notes = (
        *(_edge(known, mode) for mode in modes(context)),
        *notes_on_checkpointing(context),
        *_notes_on_verifications(known),
        *_notes_on_the_front(findings, unit),
        *_notes_on_the_data(findings),
        *_notes_on_variants(known, chosen),
        *notes_on_knobs(known, findings),
        *_notes_on_lengths(findings, unit),
        *_notes_on_earlier_studies(known),
        *([f"not compared: {in_words(beyond)}"] if beyond else []),
        *notes_on_divergence(context),
        *notes_on_what_was_left_out(known),
        *notes_on_the_machine(known),
    )
    return concluded(findings, _sentence(findings, unit, bool(beyond)), notes)


def _sentence(findings: FrontierFindings, rate_unit: str, sizes_left_out: bool) -> str:
    """sizes_left_out: whether those of which a full run has too few steps were not compared."""
    chosen, largest, limit = findings.chosen, findings.largest, findings.limit_bytes
    peak = bytes_text(chosen.peak_memory_bytes)
    room = f"{peak} of {bytes_text(limit)}" if limit else peak
    among = ", of the sizes that a full run can use" if sizes_left_out else ""
    rate = rate_text(chosen.tokens_per_second, rate_unit)
    said = [f"{_describe(chosen.point)} {_is_fastest(findings)} inside the limit{among}: {rate}, {room}"]
    said += [held_against(_describe(rival.point), rival.ratio) for rival in findings.rivals]
    if largest.micro_batch_size != chosen.micro_batch_size:
        said.append(_of_the_largest(findings, rate_unit))
    if (bound := chosen.input_bound) is not None:
        most = bound.without_wait(chosen.tokens_per_second)
        said.append(f"{bound}: without the wait it would reach up to {rate_text(most, rate_unit)}")
    return "; ".join(said)


def _is_fastest(findings: FrontierFindings) -> str:
    if len(findings.measured) == 1:
        return "is the only point that was measured"
    if not findings.rivals or any(rival.order == "undetermined" for rival in findings.rivals):
        return "seems fastest"
    return "is fastest"


def _of_the_largest(findings: FrontierFindings, rate_unit: str) -> str:
    """Return what the largest size reaches. One that was timed apart from the chosen one, by its probe, may be read as
    faster without being so: the machine had another speed then."""
    largest = findings.largest
    reached = f"the largest that fits, {_describe(largest.point)},"
    apart = largest.point not in {rival.point for rival in findings.rivals}
    rate = rate_text(largest.tokens_per_second, rate_unit)
    if not apart or largest.tokens_per_second <= findings.chosen.tokens_per_second:
        return f"{reached} reaches {rate}"
    return f"{reached} reached {rate} when it was probed, at another time than the chosen one was timed: the two cannot be compared"


def _findings(known: FrontierProgress, chosen: OperatingPoint) -> FrontierFindings:
    fitting = [*known.verification.standing()] or [chosen]
    measured = _measured(known, [*fitting, chosen])
    baseline = min(fitting, key=lambda point: point.micro_batch_size)
    largest = max((measured[point] for point in fitting), key=lambda one: (one.micro_batch_size, one.tokens_per_second))
    front = pareto_front(
        [Point(str(one.point), one.tokens_per_second, one.peak_memory_bytes) for one in measured.values()]
    )
    bend = knee(front)
    taken = known.verification.variant_of(chosen)
    in_the_mode = [point for point in fitting if known.verification.as_trained(point).mode == chosen.mode]
    return FrontierFindings(
        chosen=measured[chosen],
        winner=known.finalists.trials_of(chosen)[-1].id,
        limit_bytes=known.trials.limit_bytes(),
        baseline=baseline,
        largest=largest,
        fitting=tuple(sorted({point.micro_batch_size for point in in_the_mode})),
        front=tuple(front),
        knee=bend.name if bend else None,
        other_lengths=_by_length(known),
        measured=tuple(measured[point] for point in [*fitting, *({chosen} - {*fitting})]),
        rivals=_rivals(known, chosen),
        taken={taken.field: taken.value} if taken else {},
        knobs=knob_findings(known),
        disturbed=disturbed_trials(known),
    )


def _measured(known: FrontierProgress, points: Collection[OperatingPoint]) -> dict[OperatingPoint, MeasuredPoint]:
    """Return each point with its rate, which is that of its rounds if it was timed, and the most memory its trials
    took."""
    found = {}
    for point in points:
        done = [trial for trial in known.finalists.trials_of(point) if trial.state is TrialState.COMPLETE]
        timed = known.finalists.timed if known.finalists.timed and point in known.finalists.timed.rates else None
        rate = timed.rate(point) if timed else rate_of(done[-1])
        decisive = _decisive(done)
        found[point] = MeasuredPoint(
            point.mode,
            point.micro_batch_size,
            rate,
            max(map(peak_of, done)),
            _samples_per_second(decisive),
            disturbed=not known.context.undisturbed(decisive),
            input_bound=input_bound(decisive),
        )
    return found


def _rivals(known: FrontierProgress, chosen: OperatingPoint) -> tuple[Rival, ...]:
    """Return the other finalists as they stand to the chosen one; none that does not fit."""
    timed = known.finalists.timed
    if timed is None or chosen not in timed.rates:
        return ()
    others = [point for point in timed.fastest_first() if point != chosen and known.verification.may_be_chosen(point)]
    ratios = {point: timed.ratio(point, chosen) for point in others}
    return tuple(Rival(point, ratio, ratio.order) for point, ratio in ratios.items())


def _decisive(done: list[Trial]) -> list[Trial]:
    """Return the trials that tell a point's samples/s: its rounds, whose samples are ordinary ones, or else its probe."""
    return [trial for trial in done if trial.proposal.round is not None] or done[:1]


def _samples_per_second(decisive: list[Trial]) -> float | None:
    seconds = [(trial.config.effective_batch_size, trial.metric("step_seconds")) for trial in decisive]
    rates = [batch / step for batch, step in seconds if step]
    return statistics.geometric_mean(rates) if rates else None


def _by_length(known: FrontierProgress) -> tuple[LengthFindings, ...]:
    """Return, for every further length of the samples, the fastest probe and the largest size that fits."""
    found = []
    for length in {mode.seq_len: None for mode in modes(known.context) if mode.seq_len is not None}:
        measured = _measured(known, known.finalists.fitting(length)).values()
        if measured:
            best = max(measured, key=lambda one: one.tokens_per_second)
            found.append(LengthFindings(length, best, max(one.micro_batch_size for one in measured)))
    return tuple(found)


def _nothing_fits(known: FrontierProgress) -> Conclusion:
    probes = (trial for trial in known.trials.all() if not trial.proposal.control)
    broken = [one for one in probes if ended_for_another_reason(one) and not made_again(known.context, one)]
    if broken:
        other = next((f"{one.id}: {one.explanation}" for one in broken if one.cause is not Cause.DIVERGED), None)
        reason = f"no probe succeeded; {other or why_they_diverge(known.context)}"
        return Conclusion("frontier", ok=False, reason=reason)
    if fitting := known.finalists.fitting():
        reason = (
            f"{counted(len(fitting), 'micro-batch size')} fitted in a probe, and none when it was timed or in a fresh process; raise "
            f"{_headroom(known)}, or see what else takes memory on the device"
        )
        return Conclusion("frontier", ok=False, reason=reason)
    return Conclusion("frontier", ok=False, reason=_too_large(known), bad_input=True)


def _headroom(known: FrontierProgress) -> str:
    return f"headroom ({known.context.config.headroom:.0%})"


def _too_large(known: FrontierProgress) -> str:
    """Return the sentence that not even the smallest size fits, with the least memory measured, and the remedy."""
    limit = known.trials.limit_bytes()
    needed = min((peak_of(t) for t in known.trials.all() if t.state is TrialState.COMPLETE), default=None)
    least = f"; the least measured was {bytes_text(needed)}, and {_headroom(known)} must stay free" if needed else ""
    where = f"memory_limit ({bytes_text(limit)})" if limit else "the device"
    more = "raise memory_limit, make" if limit else "make"
    return (
        f"not even micro-batch {known.probes.smallest} fits into {where} in any mode{least}; {more} the model smaller, or "
        "add activation_checkpointing modes to the frontier stage"
    )


def _edge(known: FrontierProgress, mode: Mode) -> str:
    """Return the evidence for one mode: what fits, and what does not."""
    sizes, end = known.probes.search(mode)
    if end is None:
        last = [trial for size in sizes if (trial := known.trials.probe_of(OperatingPoint(mode, size)))][-1]
        return f"{mode}: the search ended at {last.id}, which {last.state}: {last.explanation}"
    return f"{mode}: micro-batch {end.evidence} ({counted(len(sizes), 'probe')})"


def _notes_on_the_front(findings: FrontierFindings, rate_unit: str) -> list[str]:
    point = next((point for point in findings.front if point.name == findings.knee), None)
    if point is None:
        return []
    top, bend = findings.front[-1], next(one.point for one in findings.measured if str(one.point) == point.name)
    waits = _waits_behind(findings, point)
    while_ = f", where {waits}, which is due to the data, not the device" if waits else ""
    return [
        f"more memory hardly pays beyond {_describe(bend)}: it reaches {point.tokens_per_second / top.tokens_per_second:.0%} of the "
        f"most {rate_unit} with {point.peak_memory_bytes / top.peak_memory_bytes:.0%} of the memory that these take{while_}"
    ]


def _waits_behind(findings: FrontierFindings, point: Point) -> str:
    """Return how points of the front wait for data that take more memory than this one; nothing where they hardly do."""
    measured = {str(one.point): one for one in findings.measured}
    behind = [measured[one.name] for one in findings.front if one.peak_memory_bytes > point.peak_memory_bytes]
    shares = [one.input_bound.data_wait for one in behind if one.input_bound]
    return f"up to {max(shares):.0%} of each step waits for data" if shares else ""


def _notes_on_the_data(findings: FrontierFindings) -> list[str]:
    """Return which sizes are as fast as their data come, if the chosen one is not the only one, or not one of them."""
    bound = sorted({one.micro_batch_size for one in findings.measured if one.input_bound})
    if not bound or bound == [findings.chosen.micro_batch_size]:
        return []
    listed = ", ".join(map(str, bound))
    return [
        f"input-bound at micro-batch {listed}: their order is that of the data, and another one with more data.workers"
    ]


def _notes_on_verifications(known: FrontierProgress) -> list[str]:
    """Return which points fitted in a warm process alone: others stand in for them."""
    probed = [*known.finalists.fitting()]
    verified = probed + [variant.of(point) for variant in variants(known.context) for point in probed]
    refuted = [point for point in verified if known.trials.is_refuted(point)]
    return [f"{_describe(point)} fitted when it was probed, and not again in a fresh process" for point in refuted]


def _notes_on_variants(known: FrontierProgress, chosen: OperatingPoint) -> list[str]:
    """Return what each variant of the fastest point gained or lost, of those that were timed."""
    fastest, timed = known.finalists.points[0], known.finalists.timed
    unit, notes = known.context.study.facts.rate_unit, list[str]()
    for variant in variants(known.context):
        tried = variant.of(fastest)
        if timed is not None and {tried, fastest} <= timed.rates.keys():
            memory = known.finalists.most_memory(tried) / known.finalists.most_memory(fastest)
            how = _how_it_pays(known, fastest, tried, chosen)
            notes.append(f"{variant.name} {how} here: {unit} {timed.ratio(tried, fastest)}, memory {memory:.2f} x")
        elif tried in known.finalists.points:
            notes.append(f"{variant.name} could not be timed")
    return notes


def _how_it_pays(
    known: FrontierProgress, fastest: OperatingPoint, tried: OperatingPoint, chosen: OperatingPoint
) -> str:
    if tried == chosen:
        return "pays"
    if not known.verification.may_be_chosen(tried):
        return "does not fit"
    ranked = known.verification.by_preference()
    behind = ranked[ranked.index(tried) :]  # the fastest probe is not ranked if it left no headroom when it was timed
    return "pays less than another point" if fastest in behind else "does not pay"


def _notes_on_lengths(findings: FrontierFindings, rate_unit: str) -> list[str]:
    return [
        f"samples of {one.seq_len}: {rate_text(one.fastest.tokens_per_second, rate_unit)} at micro-batch "
        f"{one.fastest.micro_batch_size} with activation checkpointing {one.fastest.mode}; the largest that fits is "
        f"{one.largest_micro_batch_size}"
        for one in findings.other_lengths
    ]


def _notes_on_earlier_studies(known: FrontierProgress) -> list[str]:
    trials = known.trials.all()
    reused = sum(trial.reused is not None for trial in trials)
    if not reused:
        return []
    again = "batchscout run --fresh with another --dir measures them again"
    return [f"{reused} of {len(trials)} trials were measured in earlier studies on this machine; {again}"]


def _describe(point: OperatingPoint) -> str:
    return f"micro-batch {point.micro_batch_size} with activation checkpointing {point.mode.in_words()}"
