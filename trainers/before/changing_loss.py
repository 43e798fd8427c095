"""A loss that changes with the steps of its run, or with its calls."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from batchscout.trainers.data.batches import move
from batchscout.trainers.model.adding_up import RANDOM_ABOVE, buffers_kept, evaluated, seeded
from batchscout.trainers.model.losses import LossFunction
from batchscout.trainers.sources.steps import LATER_STEPS, at_step, counts_steps


def changing_with_steps(module: nn.Module, loss: LossFunction, batch: Any, device: torch.device) -> str | None:
    """Return, in words, how a loss that counts the steps of its run changes with them; None where it does not. Every batch takes
    another number of steps: they would train and be compared by different losses."""
    if not counts_steps(module):
        return None

    def loss_at(number: int) -> float:
        with at_step(module, number), seeded(module, 0), buffers_kept(module):
            return evaluated(module, loss, _apart(batch, device), training=True)[0]

    first = loss_at(0)
    if not math.isclose(first, loss_at(0), rel_tol=RANDOM_ABOVE):
        return None
    for number in LATER_STEPS:
        if not math.isclose(then := loss_at(number), first, rel_tol=RANDOM_ABOVE):
            return (
                f"the loss of the same samples is {first:.4g} at the first step and {then:.4g} at step {number:,}: it reads how many steps, epochs "
                "or batches were taken (global_step, current_epoch, state.global_step, batch_idx). Batches that are compared take different "
                "numbers of steps, and would be judged by different losses; make it the same at every step, as it is at the end of your run"
            )
    return None


CALLS = 8
"""Whose losses chance alone would hardly ever bring in order."""


def changing_with_calls(module: nn.Module, loss: LossFunction, batch: Any, device: torch.device) -> str | None:
    """Return, in words, how a loss rises or falls from call to call, though samples, weights and random numbers are the same; None
    where it does not. It counts the calls itself, of evaluations and micro-batches, too, or goes by those before."""
    losses = list[float]()
    for _ in range(CALLS):
        with seeded(module, 0), buffers_kept(module, but_counts=True):
            losses.append(evaluated(module, loss, _apart(batch, device), training=True)[0])
    if not (all(a < b for a, b in pairwise(losses)) or all(a > b for a, b in pairwise(losses))):
        return None
    return (
        f"the loss of the same samples and the same weights is {losses[0]:.7g} at one call and {losses[-1]:.7g} {CALLS - 1} calls later: it goes "
        "by how often it was called. Batches that are compared take different numbers of micro-batches, and are trained and judged by "
        "different losses: if that is not meant, make it the same at every call, as it is at the end of your run"
    )


def _apart(batch: Any, device: torch.device) -> Any:
    """Return a batch of its own, as a loss may change what it is given: normalize it in place, say."""
    return move(copy.deepcopy(batch), device)
