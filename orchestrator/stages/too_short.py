"""Batches of which the study's full runs have too few optimizer steps: it cannot say how well they train, but it does say what
they would gain in speed, and which length of run would tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import FEWEST_STEPS
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.figures import batches_text
from batchscout.orchestrator.stages.probing import affordable_samples, fewest_steps, rate_of_batch
from batchscout.orchestrator.units import counted


@dataclass(frozen=True)
class TooShort:
    """A full run is too short for a batch."""

    effective_batch_size: int
    speedup: float
    """Its samples/s, as a multiple of the baseline's."""
    num_steps: int
    """The optimizer steps that a full run of it has."""
    fewest_steps: int
    sample_budget: int
    """With it, a full run of the batch has enough steps."""


def in_words(found: Sequence[TooShort]) -> str:
    """Return which batches a full run is too short for, what they would gain, and the remedy."""
    several = len(found) > 1
    they, most, up_to, them = ("they", "at most ", "up to ", "them") if several else ("it", "", "", "it")
    batches = batches_text([one.effective_batch_size for one in found])
    fastest, most_steps = max(one.speedup for one in found), max(one.num_steps for one in found)
    return (
        f"{batches}: in a full run {they} would get {most}{counted(most_steps, 'optimizer step')}, and {found[0].fewest_steps} are needed; "
        f"{up_to}{fastest:.2f} x as many samples/s as the baseline; sample_budget: {max(one.sample_budget for one in found)} includes {them}"
    )


def too_short(config: StudyConfig, effective_batch_size: int, speedup: float) -> TooShort | None:
    """Return how far a full run is too short for a batch; None where it is long enough.

    speedup: how many times as fast as the baseline it trains.
    """
    samples, fewest = affordable_samples(config, speedup), fewest_steps(config)
    steps = int(samples / effective_batch_size)
    if steps >= fewest:
        return None
    enough = math.ceil(config.sample_budget * FEWEST_STEPS * effective_batch_size / samples)
    return TooShort(effective_batch_size, speedup, steps, fewest, enough)


def out_of_reach(config: StudyConfig, rates: Mapping[int, float]) -> list[TooShort]:
    """Return the batches that fit in one micro-batch, and of which a full run has too few steps.

    rates: the samples/s of every micro-batch size that fits, over all ranks.
    """
    if not rates:
        return []
    baseline = rate_of_batch(rates, baseline_batch(config) // config.world_size)
    found = [too_short(config, size * config.world_size, rate / baseline) for size, rate in sorted(rates.items())]
    return [one for one in found if one is not None]
