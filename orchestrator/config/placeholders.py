"""What a study file of `batchscout init` leaves to its reader."""

from __future__ import annotations

from collections.abc import Iterator

PLACEHOLDER = "FILL_IN"
"""What `batchscout init` writes in the place of a value that it cannot find."""


def placeholders(value: object, place: str = "") -> Iterator[str]:
    """Yield the paths of the values that are still to be filled in."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from placeholders(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from placeholders(item, f"{place}.{number}")
    elif isinstance(value, str) and PLACEHOLDER in value:
        yield place
