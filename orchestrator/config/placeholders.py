"""The texts of a study file, and what `batchscout init` leaves of them to its reader."""

from __future__ import annotations

from collections.abc import Iterator

PLACEHOLDER = "FILL_IN"
"""What `batchscout init` writes in the place of a value that it cannot find."""


def placeholders(tree: object) -> Iterator[str]:
    """Yield the paths of the values that are still to be filled in."""
    return (place for place, text in texts_in(tree) if PLACEHOLDER in text)


def texts_in(value: object, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text of (nested) keys and lists, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from texts_in(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from texts_in(item, f"{place}.{number}")
    elif isinstance(value, str):
        yield place, value
