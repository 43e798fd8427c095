"""A LightningModule or a Trainer at another step of its run than the first: what its loss may read there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from batchscout.trainers.having import having
from batchscout.trainers.sources.kinds import is_lightning_module
from batchscout.trainers.sources.of_lightning import OfLightning
from batchscout.trainers.sources.of_transformers import OfTrainer

LATER_STEPS = (1, 100, 5_040, 720_720)
"""Where a weight that rises or falls has moved, and, by their many divisors, what is done once in so many steps is done."""


def counts_steps(module: nn.Module) -> bool:
    """True if there is a count of steps that its loss could read."""
    return isinstance(module, OfTrainer) or any(is_lightning_module(part) for part in module.modules())


@contextlib.contextmanager
def at_step(module: nn.Module, number: int) -> Iterator[None]:
    """Within this, so many steps, epochs and batches seem to have been taken."""
    with contextlib.ExitStack() as stack:
        if isinstance(module, OfTrainer):
            for name in ("global_step", "epoch"):
                stack.enter_context(having(module.trainer.state, name, number))
        if isinstance(module, OfLightning):
            stack.enter_context(having(module, "batch_idx", number))
        for part in module.modules():
            if is_lightning_module(part):  # they are properties
                told = {"global_step": number, "current_epoch": number}
                stack.enter_context(having(part, "__class__", type(type(part).__name__, (type(part),), told)))
        yield
