"""What is no study of one loss by one optimizer, with the reason. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch
from torch.optim import LBFGS, Optimizer

from batchscout.trainers.sources.schedules import rates_of
from batchscout.trainers.sources.watch.observer import Seen, parameters_of

_OF_REWARDS = ("gymnasium", "gym", "pettingzoo", "stable_baselines3")
_OF_PRIVATE_GRADIENTS = ("opacus",)


def refused(seen: Seen, imported: Collection[str] = sys.modules) -> str | None:
    """Return why a script cannot be studied; None where nothing says so. imported: the modules that are loaded."""
    if seen.handed is not None:
        return None
    if not seen.steps or seen.first_backward is None:
        had = "an optimizer of torch was made and never stepped" if seen.made_with else "no optimizer of torch was made"
        return (
            f"{had}: what changes its weights by hand, or in processes that it starts, cannot be watched; have it train in "
            "one process with an optimizer of torch"
        )
    if (found := _several_optimizers(seen)) is not None:
        return found
    if any(isinstance(step.optimizer, LBFGS) for step in seen.steps):
        return (
            "its optimizer is L-BFGS, which evaluates the loss of one batch many times in a step: neither accumulation nor a learning "
            "rate by the batch fit it; use an optimizer that takes one gradient a step"
        )
    kind = type(seen.optimizer)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return (
            f"the class of its optimizer, {kind.__name__}, is defined in the script itself, or in a function, where the runs of a study cannot find it; "
            "move it into a module of its own beside the script, and import it from there"
        )
    changes_gradient = any(step.gradient_changed for step in seen.steps)
    if changes_gradient and (found := [one for one in _OF_PRIVATE_GRADIENTS if one in imported]):
        return (
            f"its gradients are made private by {found[0]}, whose noise depends on the batch: its answer for another batch is another privacy budget; "
            "study the model without it"
        )
    if (found := [one for one in _OF_REWARDS if one in imported]) and not seen.backward.fetched:
        return (
            f"it plays in an environment ({found[0]}) and trains on rewards, which depend on the weights: no study can train two batches on "
            "the same samples"
        )
    if any(len(step.places) > 1 for step in seen.steps):
        return "it calls backward at several places in one step, so that no one loss is trained on; add the losses up, and call backward once"
    if seen.clipped_values:
        return (
            "it clips each number of the gradient (clip_grad_value_), and a study clips the norm of the whole gradient; use "
            "clip_grad_norm_"
        )
    if changes_gradient:
        return "it changes the gradient itself between backward and the optimizer's step, and a study would train without that"
    if any(step.weights_changed for step in seen.steps):
        return (
            "it changes the weights itself between two steps of the optimizer (a decay or a bound by hand, weights that are averaged or copied), and a "
            "study would train without that; let the optimizer's weight_decay or the model do it (torch.nn.utils.parametrize)"
        )
    if seen.set_anew:
        name, (before, now) = next(iter(seen.set_anew.items()))
        return (
            f"it sets {name} from one step to the next ({before} to {now}), and a study would keep it as it was in the first; leave it as it is at the end of "
            "the run, or let the model compute it from the batch"
        )
    if (times := seen.clipped_times) != 1:
        return (
            f"it clips the norm at {seen.max_gradient_norm:.3g} while its GradScaler has the gradient multiplied by {times:,.6g}, so that each step has a norm of "
            f"at most {(seen.max_gradient_norm or 0) / times:.2g}; call scaler.unscale_(optimizer) before clip_grad_norm_"
        )
    if seen.clipped_otherwise:
        return (
            "it clips another norm than the 2-norm of the whole gradient (clip_grad_norm_ with a norm_type, or of some parameters), and a "
            "study clips that one; use clip_grad_norm_(model.parameters(), ...)"
        )
    if (found := _outside_of_modules(seen)) is not None:
        return found
    return None


def _several_optimizers(seen: Seen) -> str | None:
    kinds = [type(step.optimizer).__name__ for step in seen.steps]
    if len({id(step.optimizer) for step in seen.steps}) > 1:
        if seen.steps[1].num_backwards == 0:
            return f"two optimizers step together ({' and '.join(kinds)}), and a study changes the learning rate of one; use one with two groups"
        return (
            f"two optimizers take turns ({' and '.join(kinds)}), as those of a GAN do, and a study changes the learning rate and the batch of "
            "one; write the loss of one of them as package.module:callable (docs/own_model.md)"
        )
    if seen.together and len({_shape_of_schedules(one, seen) for one in seen.optimizers}) > 1:
        return "its optimizers step together, but their learning rates do not go up and down together, and a study has one schedule; give all the same"
    ours = parameters_of(seen.optimizer)
    if apart := [one for one in seen.other_optimizers if not parameters_of(one) & ours]:
        return (
            f"another optimizer ({type(apart[0]).__name__}) has other parameters and did not step yet, as that of a GAN's generator, and a "
            "study has one; write the loss of one of them as package.module:callable (docs/own_model.md)"
        )
    return None


def _shape_of_schedules(optimizer: Optimizer, seen: Seen) -> tuple[object, ...]:
    """Return what two schedules have alike if they differ in nothing but the rate that they begin with."""
    ours = [one for one in seen.schedulers if one.optimizer is optimizer]
    rates = [(type(one), rates_of(one, _CALLS_COMPARED, or_fewer=True)) for one in ours]
    return tuple((kind, found and tuple(round(rate / (max(found) or 1), 6) for rate in found)) for kind, found in rates)


_CALLS_COMPARED = 1000


def _outside_of_modules(seen: Seen) -> str | None:
    kept = {id(p) for some in seen.parameters.values() for p in some}
    if not kept:
        return "no module that the optimizer trains was called in training mode; call model.train() before, and compute the loss with the module"
    if missing := parameters_of(seen.optimizer) - kept:
        return (
            f"its optimizer has {len(missing)} parameters that are in no module that is called, and a study would leave them as they are; make them "
            "parameters of the module (nn.Parameter, as an attribute of it)"
        )
    dtypes = {p.dtype for some in seen.parameters.values() for p in some if p.is_floating_point()}
    if other := [str(one).removeprefix("torch.") for one in dtypes if one is not torch.float32]:
        return f"its weights are {' and '.join(sorted(other))}, and a study keeps them in float32; use torch.autocast for another precision"
    return None
