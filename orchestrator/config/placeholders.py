"""The values of a study file, and what `batchscout init` leaves of them to its reader."""

from __future__ import annotations

from collections.abc import Iterator

PLACEHOLDER = "FILL_IN"
"""What `batchscout init` writes in the place of a value that it cannot find."""


def placeholders(tree: object) -> Iterator[str]:
    """Yield the paths of the values that are still to be filled in."""
    return (place for place, value in leaves(tree) if isinstance(value, str) and PLACEHOLDER in value)


def leaves(tree: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield each single value of (nested) keys and lists, with its path."""
    if not isinstance(tree, (dict, list, tuple)):
        yield place, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(value, f"{place}.{key}" if place else str(key))
