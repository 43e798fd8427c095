"""What the frontier concludes: the choice with its margin, the largest sizes, the front, and a sentence for each."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from orchestrator.config.stages import Frontier
from orchestrator.stages.context import Setting
from orchestrator.stages.frontier.pareto import Point, knee, pareto_front
from orchestrator.stages.frontier.propose import Key, SoFar, modes, peak_of, rate_of, says_nothing
from orchestrator.stages.frontier.search import Found
from orchestrator.stages.mode import Mode, mode_of_values
from orchestrator.study.state import Conclusion, Study, TrialState
from orchestrator.units import bytes_text

# The second largest size is one that trains differently: the search's last sizes differ by one sample in a hundred.
CLEARLY_SMALLER = 0.8


def conclude(stage: Frontier, setting: Setting, study: Study) -> Conclusion:
    """The fastest mode and size within the limit and its headroom, verified; not ok where nothing fits."""
    known = SoFar(stage, setting, study)
    chosen = known.verified()
    if chosen is None:
        return _nothing_fits(known)
    values = _values(known, chosen)
    notes = [_edge(known, mode) for mode in modes(stage, setting)]
    notes += _of_the_front(values) + _of_the_chunks(known, chosen) + _of_lengths(values) + _of_earlier_studies(known)
    return Conclusion("frontier", True, _sentence(chosen, values), values, tuple(notes))


def _sentence(chosen: Key, values: dict[str, Any]) -> str:
    peak, limit, rate = (values[key] for key in ("peak_memory_bytes", "limit_bytes", "tokens_per_second"))
    room = f"{bytes_text(peak)} of {bytes_text(limit)}" if limit else bytes_text(peak)
    found = f"{_describe(chosen)} is fastest inside the limit: {rate:,.0f} tokens/s, {room}"
    largest = values["largest"]
    if largest["micro_batch_size"] == chosen.micro_batch_size:
        return found
    what = _describe(Key(mode_of_values(largest), largest["micro_batch_size"]))
    return f"{found}; the largest that fits, {what}, reaches {largest['tokens_per_second']:,.0f}"


def _values(known: SoFar, chosen: Key) -> dict[str, Any]:
    """What the later stages build on, and the front for people."""
    fitting, limit = known.fitting(), known.limit_bytes()
    points = _points(known, {*fitting, chosen})
    baseline = min(fitting, key=lambda key: key.micro_batch_size)
    by_size = sorted(fitting, key=lambda key: (key.micro_batch_size, points[key].tokens_per_second), reverse=True)
    clearly_smaller = CLEARLY_SMALLER * by_size[0].micro_batch_size
    second = next((key for key in by_size if key.micro_batch_size <= clearly_smaller), None)
    front = pareto_front(list(points.values()))
    bend = knee(front)
    return {
        **_plain(points, chosen),
        "winner": known.trials_of(chosen)[-1].id,
        "limit_bytes": limit,
        "margin_bytes": None if limit is None else limit - points[chosen].peak_memory_bytes,
        "baseline_micro_batch_size": baseline.micro_batch_size,
        "baseline_mode": baseline.mode.values(),
        "largest": _plain(points, by_size[0]),
        "second_largest": _plain(points, second) if second else None,
        "fitting": sorted({key.micro_batch_size for key in fitting if key.mode == chosen.mode}),
        "front": [point._asdict() for point in front],
        "knee": bend.name if bend else None,
        "other_lengths": _by_length(known),
    }


def _points(known: SoFar, keys: Collection[Key]) -> dict[Key, Point]:
    """Of each its rate, over the rounds where it was timed in them, and the most memory that any of its trials took."""
    found = {}
    for key in keys:
        done = [trial for trial in known.trials_of(key) if trial.state is TrialState.COMPLETE]
        rate = statistics.median(known.rounds(key) or [rate_of(done[-1])])
        found[key] = Point(f"{key.mode}-m{key.micro_batch_size}", rate, max(map(peak_of, done)))
    return found


def _plain(points: dict[Key, Point], key: Key) -> dict[str, Any]:
    point = points[key]
    measured = {"tokens_per_second": point.tokens_per_second, "peak_memory_bytes": point.peak_memory_bytes}
    return key.mode.values() | {"micro_batch_size": key.micro_batch_size} | measured


def _by_length(known: SoFar) -> dict[str, dict[str, Any]]:
    """Of every further length of the samples its fastest probe and the largest that fits."""
    found = {}
    for length in {mode.seq_len: None for mode in modes(known.stage, known.setting) if mode.seq_len is not None}:
        points = _points(known, known.fitting(length))
        if points:
            best = max(points, key=lambda key: points[key].tokens_per_second)
            found[str(length)] = _plain(points, best) | {"largest": max(key.micro_batch_size for key in points)}
    return found


def _nothing_fits(known: SoFar) -> Conclusion:
    broken = next((trial for trial in known.trials() if says_nothing(trial)), None)
    if broken is not None:
        return Conclusion("frontier", False, f"no probe succeeded; {broken.id}: {broken.reason}")
    limit, headroom = known.limit_bytes(), f"headroom ({known.setting.study.headroom:.0%})"
    if fitting := known.fitting():
        return Conclusion(
            "frontier",
            False,
            f"of {len(fitting)} sizes that fitted, none did so again when it was timed or in a fresh process; raise "
            f"{headroom}, or see what else takes memory on the device",
        )
    needed = min((peak_of(t) for t in known.trials() if t.state is TrialState.COMPLETE), default=None)
    above = f"; the least measured was {bytes_text(needed)}, and {headroom} must stay free" if needed else ""
    where = f"memory_limit ({bytes_text(limit)})" if limit else "the device"
    more = "raise memory_limit, make" if limit else "make"
    return Conclusion(
        "frontier",
        False,
        f"not even micro-batch {known.stage.smallest} fits into {where} in any mode{above}; {more} the model smaller, or add "
        "activation_checkpointing modes to the frontier stage",
        {"bad_input": True},
    )


def _edge(known: SoFar, mode: Mode) -> str:
    """The evidence for one mode: what fits, and what does not."""
    sizes, end = known.search(mode)
    trials = [trial for size in sizes if (trial := known.probe_of(Key(mode, size)))]
    if end is None:
        return f"{mode}: the search ended at {trials[-1].id}, which {trials[-1].state}: {trials[-1].reason}"
    return f"{mode}: micro-batch {end.evidence}{_of_the_clock(known, end, known.slowest(trials))} ({len(sizes)} probes)"


def _of_the_clock(known: SoFar, end: Found, slowest: int) -> str:
    """Said where it was the clock that ended the search."""
    if end.micro_batch_size is None or not slowest <= end.micro_batch_size < known.stage.largest:
        return ""
    return f": a step would take max_step_seconds ({known.stage.max_step_seconds:g})"


def _of_the_front(values: dict[str, Any]) -> list[str]:
    if values["knee"] is None:
        return []
    point = next(point for point in values["front"] if point["name"] == values["knee"])
    top = values["front"][-1]
    return [
        f"more memory stops paying at {point['name']}: {point['tokens_per_second'] / top['tokens_per_second']:.0%} of the "
        f"most tokens/s at {point['peak_memory_bytes'] / top['peak_memory_bytes']:.0%} of its memory"
    ]


def _of_the_chunks(known: SoFar, chosen: Key) -> list[str]:
    """Whether cross-entropy in chunks was tried, and whether it paid."""
    chunked = next((key for key in known.finalists() if key.mode.cross_entropy == "chunked"), None)
    if chunked is None or known.stage.cross_entropy:
        return []
    whole = chunked._replace(mode=replace(chunked.mode, cross_entropy="whole"))
    ours, theirs = known.rounds(chunked), known.rounds(whole)
    if not (ours and theirs):
        return ["cross-entropy in chunks could not be timed"]
    speed = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    memory = known.most_memory(chunked) / known.most_memory(whole)
    pays = "pays" if chosen.mode.cross_entropy == "chunked" else "does not pay"
    return [f"cross-entropy in chunks {pays} here: {speed:.2f} x the tokens/s at {memory:.0%} of the memory"]


def _of_lengths(values: dict[str, Any]) -> list[str]:
    return [
        f"samples of {length}: {found['tokens_per_second']:,.0f} tokens/s at micro-batch {found['micro_batch_size']} with "
        f"activation checkpointing {mode_of_values(found)}; the largest that fits is {found['largest']}"
        for length, found in values["other_lengths"].items()
    ]


def _of_earlier_studies(known: SoFar) -> list[str]:
    trials = known.trials()
    reused = sum(trial.reused for trial in trials)
    again = "batchscout run --fresh with another --dir measures them again"
    return [f"{reused} of {len(trials)} trials were measured in earlier studies on this machine; {again}"] * bool(
        reused
    )


def _describe(key: Key) -> str:
    return f"micro-batch {key.micro_batch_size} with activation checkpointing {key.mode}"
