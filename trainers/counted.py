"""What a run counts when it tells its speed. Loads no torch."""

from __future__ import annotations

from typing import Literal

Counted = Literal["tokens", "samples", "targets"]
"""What the targets of a sample are: tokens of a text; the sample itself, which has one, as for a classifier; or other numbers, such
as the pixels of a picture."""


def rate_unit(counted: Counted) -> str:
    """Return the unit of a speed."""
    return f"{counted}/s"
