"""Which trials are stopped, but at rungs. Pure: values in, decisions with reasons out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from batchscout.orchestrator.decisions.decision import GO_ON, Decision, stop
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.units import counted, loss_text


def judge_losses(
    losses: Sequence[float],
    num_warmup_steps: int,
    spike_deviations: float | None,
    spike_steps: int,
    above_start: float | None,
) -> Decision:
    """Return stop for a trial that diverges, judged by the loss of every step so far; else go on."""
    not_finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if not_finite is not None:
        return stop(Cause.DIVERGED, f"the loss is {losses[not_finite]} in step {not_finite + 1}")
    return (
        _judge_start(losses, num_warmup_steps, above_start)
        or _judge_spike(losses, spike_deviations, spike_steps)
        or GO_ON
    )


# A run is above its start once so many losses in a row, after warm-up, are above the highest of its first steps by the
# factor. The rule is asked at every step, so it must hold against every one of them: medians of five losses would rise above the start
# in most runs whose loss is noisy and hardly falls (tests/decisions/test_pruners.py holds this rule to fewer than 2 % of them).
_START_STEPS = 5
_STEPS_ABOVE = 10
# A spike is held against the median of so many steps before it, or of fewer while there are not so many yet...
_SPIKE_WINDOW = 50
# ... but at least of so many: before that no loss is called a spike.
_SPIKE_HISTORY = 20


def _judge_start(losses: Sequence[float], num_warmup_steps: int, factor: float | None) -> Decision | None:
    settled = losses[max(num_warmup_steps, _START_STEPS) :]
    if factor is None or len(settled) < _STEPS_ABOVE:
        return None
    highest, lowest = max(losses[:_START_STEPS]), min(settled[-_STEPS_ABOVE:])
    limit = highest + (factor - 1) * abs(highest)  # a loss may be negative
    if lowest <= limit:
        return None
    return stop(
        Cause.DIVERGED,
        f"{_STEPS_ABOVE} losses in a row, {loss_text(lowest)} and more, above {loss_text(limit)}, which is {factor - 1:.0%} "
        f"above {loss_text(highest)}, the highest of its first {_START_STEPS} steps",
    )


def _judge_spike(losses: Sequence[float], deviations: float | None, steps: int) -> Decision | None:
    """Return stop for `steps` losses in a row above median + deviations x 1.4826 MAD of the window before them."""
    before, latest = losses[-steps - _SPIKE_WINDOW : -steps], losses[-steps:]
    if deviations is None or len(before) < _SPIKE_HISTORY:
        return None
    median = statistics.median(before)
    spread = 1.4826 * statistics.median(abs(loss - median) for loss in before)
    threshold = median + deviations * spread
    if spread == 0 or min(latest) <= threshold:
        return None
    return stop(
        Cause.DIVERGED,
        f"loss above {loss_text(threshold)} in {counted(steps, 'step')}{' in a row' if steps > 1 else ''} (median before: {loss_text(median)})",
    )


def judge_throughput(
    tokens_per_second: float, best_of_equals: float | None, min_share: float | None, rate_unit: str = "tokens/s"
) -> Decision:
    """Return stop for a trial that is too slow beside the fastest of the same effective batch in another split or
    mode."""
    if min_share is None or best_of_equals is None or tokens_per_second >= min_share * best_of_equals:
        return GO_ON
    return stop(
        Cause.LOW_THROUGHPUT,
        f"{tokens_per_second:.0f} {rate_unit} is below {min_share:g} x {best_of_equals:.0f} {rate_unit}, "
        "the best of the same effective batch",
    )


def judge_plan(
    samples_per_second: float, planned: float, min_share: float | None, usual_share: float = 1.0
) -> Decision:
    """Return stop for a trial so slow that its sample budget, which was made for another speed, takes far more time
    than every candidate has: what it would end at is of no use at equal cost.

    usual_share: the share of their planned speeds that the study's runs reach, where that is below 1: what slows all of them is
    nothing against this one.
    """
    expected = usual_share * planned
    if min_share is None or samples_per_second >= min_share * expected:
        return GO_ON
    usual = f" at the {usual_share:.0%} of it that the study's runs reach" if usual_share < 1 else ""
    return stop(
        Cause.LOW_THROUGHPUT,
        f"{samples_per_second:.4g} samples/s is below {min_share:g} x the {planned:.4g} samples/s that its sample budget was "
        f"made for{usual}: it would take {expected / samples_per_second:.1f} x the training time that every candidate has",
    )


def judge_probe(metrics: Mapping[str, float | None], max_step_seconds: float) -> Decision:
    """Return stop for a size that fits and is of no use: it lives on the allocator's retries, or its steps take too
    long."""
    retries, seconds = metrics.get("allocator_retries") or 0.0, metrics.get("step_seconds") or 0.0
    if retries:
        return stop(Cause.THRASHING, f"the allocator had to free its cache and retry {counted(round(retries), 'time')}")
    if seconds > max_step_seconds:
        return stop(Cause.TOO_SLOW, f"a step takes {seconds:.1f} s, more than max_step_seconds ({max_step_seconds:g})")
    return GO_ON


def judge_silence(seconds: float, max_silent_seconds: float | None) -> Decision:
    """Return stop for a trial that has said nothing for too long."""
    if max_silent_seconds is None or seconds <= max_silent_seconds:
        return GO_ON
    limit = f"kill.max_silent_seconds ({max_silent_seconds:g})"
    return stop(Cause.FAILED, f"it said nothing for {seconds:.0f} s, longer than {limit}")
