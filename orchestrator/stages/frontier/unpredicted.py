"""What people are told where no memory could be predicted."""

from __future__ import annotations

from collections.abc import Mapping

from batchscout.trainers.errors import NotFollowed

WHAT_FOLLOWS = "so the search for the largest micro-batch goes by measured peaks alone, and takes a few more probes"


def unpredicted_texts(found: Mapping[str, NotFollowed], num_modes: int) -> list[str]:
    """Return a sentence for each reason, with its modes where these are not all of them. found: {mode: why}."""
    modes_of: dict[NotFollowed, list[str]] = {}
    for mode, why in found.items():
        modes_of.setdefault(why, []).append(mode)
    told = []
    for why, modes in modes_of.items():
        where = "" if len(modes) == num_modes else f" in {len(modes)} of {num_modes} modes ({'; '.join(modes)})"
        told.append(f"memory cannot be predicted for this model{where}: {why}; {WHAT_FOLLOWS}")
    return told
