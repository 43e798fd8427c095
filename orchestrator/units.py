"""Numbers as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """1.5 GiB, 320 MiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
