"""Numbers, and how processes end, as people read them."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable

from batchscout.trainers.metrics import metric_of


def bytes_text(count: float) -> str:
    """Return 1.5 GiB, 320 MiB and the like."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def shortened(text: str, most: int) -> str:
    """Return the text, or if it has more than `most` characters its beginning and its end, in as many."""
    if len(text) <= most:
        return text
    said = f" ... ({len(text):,} characters in all) ... "
    half = (most - len(said)) // 2
    return f"{text[:half]}{said}{text[-half:]}"


def counted(number: int, noun: str) -> str:
    """Return `1 trial`, `3 trials` and the like."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(words: Iterable[object], last: str = "and") -> str:
    """Return `4`, `4 and 8`, `4, 8 and 16` and the like. last: what stands before the last one."""
    *others, end = map(str, words)
    return f"{', '.join(others)} {last} {end}" if others else end


def counted_between(low: int, high: int, noun: str) -> str:
    """Return `2 to 4 rounds` and the like; `2 rounds` where both are the same."""
    return counted(high, noun) if low == high else f"{low:,} to {counted(high, noun)}"


def number_text(value: float) -> str:
    """Return 1.2k, 3.4M, 0.0005, 2.1e-05 and the like: three significant digits."""
    size = abs(value)
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= 0.9995 * scale:  # what rounds to 1000 of a unit is 1 of the next
            return f"{value / scale:.3g}{unit}" if size < 999.5 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.3g}"


def loss_text(loss: float) -> str:
    """Return 5.094, 0.0022, 3.52M and the like: three decimals, where these are neither too few digits nor too many."""
    if not math.isfinite(loss):
        return str(loss)
    return f"{loss:.3f}" if loss == 0 or 0.1 <= abs(loss) < 1000 else number_text(loss)


def gap_text(gap: float) -> str:
    """Return +0.45, -0.09 and the like: a difference of losses, of which seeds leave no more digits known."""
    return metric_of("generalisation_gap").number(gap)


def rho_text(rho: float) -> str:
    """Return 5.9e-06 and the like: a distance of weights."""
    return metric_of("rho").number(rho)


def exact_text(value: float) -> str:
    """Return 1,234,567, 5.0944, 0.0016818 and the like: at least five significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.5g}"


def share_text(share: float) -> str:
    """Return 4.9%, 26%, <0.1% and the like: what is wasted or saved of something. An estimate is never told as nothing."""
    if 0 <= share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def probability_text(p: float) -> str:
    """Return 0.93, <0.01 and the like: what is not certain is told as neither 0 nor 1."""
    return "<0.01" if p < 0.005 else ">0.99" if p >= 0.995 else f"{p:.2f}"


def rate_text(rate: float, unit: str) -> str:
    """Return 12,300 tokens/s, 4.21 samples/s and the like."""
    return f"{rate:,.0f} {unit}" if rate >= 10 else f"{rate:.3g} {unit}"


def seconds_text(seconds: float) -> str:
    """Return 42 s, 3 min 20 s, 2 h 5 min and the like."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def training_time_text(seconds: float) -> str:
    """Return 0.4 s, 42 s and the like: a time that runs are given, of which less than a second is not nothing."""
    if seconds < 0.05:
        return "less than 0.1 s"
    return f"{seconds:.1f} s" if seconds < 0.95 else seconds_text(seconds)


def ending_text(exit_code: int) -> str:
    """Return how a process ended, for people, from an exit code as `subprocess` has it: less than 0 for a signal."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-exit_code, f'signal {-exit_code}')}"


def exit_text(error: SystemExit) -> str:
    """Return what a call of sys.exit asks for: a status, or a text to print and status 1."""
    if isinstance(error.code, int) or error.code is None:
        return f"{ending_text(error.code or 0)} (sys.exit)"
    return f"{ending_text(1)} (sys.exit): {error.code}".splitlines()[0][:300]
