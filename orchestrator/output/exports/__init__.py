"""A recommendation as another trainer's configuration: text to paste, and what that trainer cannot do. A file a trainer."""

from __future__ import annotations

from collections.abc import Callable

from batchscout.orchestrator.output.exports import (
    accelerate,
    axolotl,
    deepspeed,
    hf,
    lightning,
    nanogpt,
    torchtitan,
    trl,
)
from batchscout.orchestrator.output.recommendation import Recommendation

WRITERS: dict[str, Callable[[Recommendation], str]] = {
    "hf": hf.written,
    "accelerate": accelerate.written,
    "lightning": lightning.written,
    "trl": trl.written,
    "axolotl": axolotl.written,
    "torchtitan": torchtitan.written,
    "deepspeed": deepspeed.written,
    "nanogpt": nanogpt.written,
}
"""By the names of the trainers."""


def export(recommendation: Recommendation, to: str) -> str:
    """Return the text for a trainer. Raises ValueError, with the names of all, for one that is not among WRITERS."""
    if to not in WRITERS:
        raise ValueError(f"cannot export to '{to}'; choose one of: {', '.join(WRITERS)}")
    return WRITERS[to](recommendation)
