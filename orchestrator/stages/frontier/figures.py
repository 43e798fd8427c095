"""The frontier's figure: speed against memory, a series for each mode."""

from __future__ import annotations

import statistics

from batchscout.orchestrator.config.mode import compile_text, mode_of
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import (
    AUXILIARY_COLOUR,
    CATEGORIES,
    Axis,
    Figure,
    Line,
    Mark,
    Series,
    rate_axis,
)
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.units import bytes_text


def figures(context: StageContext[Frontier]) -> list[Figure]:
    """Return speed over peak memory, with the limit and the front."""
    findings, trials = found(context.study, FrontierFindings), context.trials()
    limit = (findings and findings.limit_bytes) or context.limit_bytes()
    by_mode: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.proposal.control:  # of the loss, at a batch that is no operating point
            continue
        by_mode.setdefault(_mode_text(trial, trials), []).append(trial)
    series = [
        _mode_series(mode, by_mode[mode], CATEGORIES[i % len(CATEGORIES)], limit, findings)
        for i, mode in enumerate(by_mode)
    ]
    front, kinds = _front(findings), {mark.kind for one in series for mark in one.marks}
    looks = ["ringed: chosen"] * ("chosen" in kinds) + ["cross: out of memory"] * ("cross" in kinds)
    shown, largest = _shown(limit, series), _largest(series)
    far = f" The limit, {bytes_text(limit)}, lies far to the right." if limit and not shown else ""
    told = f" {RIGHT_OF_HEADROOM}" if shown and context.config.headroom else far
    return [
        Figure(
            "speed_by_memory",
            Axis("peak memory of a rank", bytes_text, zero=True, unit=_unit(shown or largest)),
            rate_axis(context.study.facts.rate_unit),
            (*series, *front),
            f"Numbers are micro-batch sizes{''.join(f'; {one}' for one in looks)}. A bar is from the slowest to the fastest round."
            f"{' On the Pareto front nothing is faster in less memory.' if front else ''}{told}",
            _limits(shown, context.config.headroom),
            beside="micro-batch",
            width=700,
            height=330,
        )
    ]


RIGHT_OF_HEADROOM = (
    "What lies right of the headroom line runs, leaves less than the headroom, and so does not count as fitting."
)
# A limit so many times the largest measured would leave all points at the left edge.
_FAR = 8


def _largest(series: list[Series]) -> int:
    return round(max((mark.x for one in series for mark in one.marks), default=0.0))


def _shown(limit: int | None, series: list[Series]) -> int | None:
    """Return the limit if it is drawn; None where there is none, or where it is too far away."""
    largest = _largest(series)
    return limit if limit and (not largest or limit <= _FAR * largest) else None


def _limits(limit: int | None, headroom: float) -> tuple[Line, ...]:
    """Return lines at the limit, and where the headroom begins."""
    if not limit:
        return ()
    capacity = Line(limit * (1 - headroom), f"headroom {headroom:.0%}", vertical=True)
    return (*([capacity] if headroom else []), Line(float(limit), f"limit {bytes_text(limit)}", vertical=True))


def _front(findings: FrontierFindings | None) -> list[Series]:
    """Return the front as a line; none where it is a single point."""
    points = findings.front if findings else ()
    if len(points) < 2:
        return []
    marks = tuple(Mark(point.peak_memory_bytes, point.tokens_per_second) for point in points)
    return [Series("Pareto front", marks, AUXILIARY_COLOUR, dashed=True)]


def _unit(limit: int | None) -> int:
    """Return the unit of which the ticks are round multiples."""
    return next((size for size in (2**30, 2**20, 2**10) if limit and limit >= size), 2**20)


def _mode_text(trial: Trial, trials: list[Trial]) -> str:
    """Return the checkpointing mode, and what else tells the modes of this study apart."""
    config = trial.config
    parts = [str(config.activation_checkpointing)]
    if len({t.config.compile for t in trials}) > 1:
        parts.append(compile_text(config.compile) or "compiled")
    if len({t.config.precision for t in trials}) > 1:
        parts.append(config.precision)
    if mode_of(config).cross_entropy == "chunked":
        parts.append("chunked")
    parts += [f"+ {name}" for name in config.memory_knobs]
    if len({t.config.data.kwargs.get("seq_len") for t in trials}) > 1:
        parts.append(f"{config.data.kwargs.get('seq_len')} long")
    return ", ".join(parts)


def _mode_series(
    label: str, trials: list[Trial], colour: int, limit: int | None, findings: FrontierFindings | None
) -> Series:
    """Return a mark for each size that fitted, from all its trials, and at the limit a cross for the sizes that did
    not."""
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        by_size.setdefault(trial.config.micro_batch_size, []).append(trial)
    marks = [mark for size in sorted(by_size) if (mark := _size_mark(by_size[size], findings))]
    failed = [size for size in sorted(by_size) if all(t.state is TrialState.OUT_OF_MEMORY for t in by_size[size])]
    if failed and limit:
        marks.append(Mark(float(limit), marks[-1].y if marks else 0.0, kind="cross"))
        label = f"{label} (not {', '.join(map(str, failed))})"
    return Series(label, tuple(marks), colour)


def _size_mark(trials: list[Trial], findings: FrontierFindings | None) -> Mark | None:
    """Return a mark at the size's rate, as the stage found it or, before that, by its rounds if it was timed, and its highest memory; None if
    it did not run."""
    ran = [
        trial
        for trial in trials
        if trial.state is not TrialState.OUT_OF_MEMORY
        and trial.metric("tokens_per_second")
        and trial.metric("peak_memory_bytes") is not None
    ]
    if not ran:
        return None
    rounds = [trial for trial in ran if trial.proposal.round is not None]
    rates = [trial.measured("tokens_per_second") for trial in rounds or ran]
    memory = max(trial.measured("peak_memory_bytes") for trial in ran)
    config = ran[0].config
    points = findings.measured if findings else ()
    same = (one for one in points if (one.mode, one.micro_batch_size) == (mode_of(config), config.micro_batch_size))
    rate = next((one.tokens_per_second for one in same), statistics.median(rates))
    kind = "chosen" if findings and any(trial.id == findings.winner for trial in trials) else "point"
    return Mark(memory, rate, str(config.micro_batch_size), kind, low=min(rate, *rates), high=max(rate, *rates))
