"""What is no study of one loss by one optimizer, with the reason. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection

from torch.optim import LBFGS

from batchscout.trainers.sources.watch.observer import Seen

_OF_REWARDS = ("gymnasium", "gym", "pettingzoo", "stable_baselines3")
_OF_PRIVATE_GRADIENTS = ("opacus",)


def refused(seen: Seen, imported: Collection[str] = sys.modules) -> str | None:
    """Return why a script cannot be studied; None where nothing says so. imported: the modules that are loaded."""
    if seen.handed is not None:
        return None
    if not seen.steps or seen.backward is None:
        had = "an optimizer of torch was made and never stepped" if seen.made_with else "no optimizer of torch was made"
        return (
            f"{had}: what changes its weights by hand, or in processes that it starts, cannot be watched; have it train in "
            "one process with an optimizer of torch"
        )
    kinds = [type(step.optimizer).__name__ for step in seen.steps]
    if len({id(step.optimizer) for step in seen.steps}) > 1:
        return (
            f"two optimizers take turns ({' and '.join(kinds)}), as those of a GAN do, and a study changes the learning rate and the batch of "
            "one; write the loss of one of them as package.module:callable (docs/own_model.md)"
        )
    if any(isinstance(step.optimizer, LBFGS) for step in seen.steps):
        return (
            "its optimizer is L-BFGS, which evaluates the loss of one batch many times in a step: neither accumulation nor a learning "
            "rate by the batch fit it; use an optimizer that takes one gradient a step"
        )
    if found := [one for one in _OF_PRIVATE_GRADIENTS if type(seen.steps[0].optimizer).__module__.startswith(one)]:
        return (
            f"its optimizer is of {found[0]}, whose noise depends on the batch: its answer for another batch is another privacy budget; "
            "study the model without it"
        )
    if (found := [one for one in _OF_REWARDS if one in imported]) and not seen.backward.fetched:
        return (
            f"it plays in an environment ({found[0]}) and trains on rewards, which depend on the weights: no study can train two batches on "
            "the same samples"
        )
    if seen.clipped_values:
        return (
            "it clips each number of the gradient (clip_grad_value_), and a study clips the norm of the whole gradient; use "
            "clip_grad_norm_"
        )
    return None
