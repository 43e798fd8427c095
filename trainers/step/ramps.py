"""Ramps: phases in which the effective batch grows in the course of a run. They only make phases; loads no torch.

The batch that still uses every sample well is near zero at first and grows (Merrill et al. 2025, arXiv 2505.23971), so
a run may begin with a small batch and end with a large one, in fewer steps. How the learning rate goes with the batch
is for the caller to say. Merrill et al. multiply it by sqrt(2) where the batch doubles; where a schedule would halve
it, Meterez et al. 2025 (arXiv 2510.14717) divide it by sqrt(2) and double the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchscout.trainers.config import Phase

LearningRateOf = Callable[[int], float]
"""The learning rate at so many gradient accumulation steps."""


def doubling_ramp(
    gradient_accumulation_steps: int, at_samples: Sequence[int], learning_rate_of: LearningRateOf
) -> tuple[Phase, ...]:
    """Return phases in which the batch doubles at each of these sample counts.

    gradient_accumulation_steps: those of the first phase, which is not among what is returned.
    """
    accumulation = [gradient_accumulation_steps * 2**times for times in range(1, len(at_samples) + 1)]
    return _phases(at_samples, accumulation, learning_rate_of)


def linear_ramp(first: int, last: int, at_samples: int, learning_rate_of: LearningRateOf) -> tuple[Phase, ...]:
    """Return phases in which the batch grows from `first` to `last` gradient accumulation steps, one by one and at even
    distances, so that it has grown at `at_samples`."""
    accumulation = range(first + 1, last + 1)
    begin = [round(at_samples * (steps - first) / (last - first)) for steps in accumulation]
    return _phases(begin, accumulation, learning_rate_of)


def _phases(begin: Sequence[int], accumulation: Sequence[int], learning_rate_of: LearningRateOf) -> tuple[Phase, ...]:
    return tuple(
        Phase(from_samples=samples, gradient_accumulation_steps=steps, learning_rate=learning_rate_of(steps))
        for samples, steps in zip(begin, accumulation, strict=True)
    )
