"""What a user's model must return, (loss_sum, num_targets), and how to find out early that it does not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.batches import fetch, move
from batchscout.trainers.data.samples import SampleSet
from batchscout.trainers.errors import LossFault
from batchscout.trainers.model.losses import loss_function
from batchscout.trainers.model.models import build_model
from batchscout.trainers.model.shapes import shapes_alone

MOST_SHAPES = 3


def check_is_trained(module: nn.Module, loss_sum: Tensor) -> None:
    """Raise LossFault where no parameter is moved by the loss."""
    if loss_sum.requires_grad:
        return
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if trained:
        why = (
            f"the loss depends on no parameter that the model trains ({len(trained)} in all): something on its way to them is cut off; look for "
            "detach(), .data, .item(), .numpy() or torch.no_grad() in forward and loss"
        )
    elif parameters:
        why = f"the model trains no parameter of its own ({len(parameters)} in all); give those that are to be trained requires_grad_(True)"
    else:
        why = "the model has no parameters, so nothing can be trained; assign its layers to attributes of the module (self.layer = ...)"
    raise LossFault(why)


def check_is_the_models(module: nn.Module, loss_sum: Tensor) -> None:
    """Raise LossFault where the loss depends on parameters that the model does not have, as those of a loss that is a module, or of layers
    in a plain list: no run would train them, and the trials of a lane would share them."""
    own = {id(parameter) for parameter in module.parameters()}
    others = [
        leaf
        for leaf in _leaves_of(loss_sum)
        if isinstance(leaf, nn.Parameter) and leaf.requires_grad and id(leaf) not in own
    ]
    if others:
        shapes = ", ".join(" x ".join(map(str, one.shape)) or "one number" for one in others[:MOST_SHAPES])
        more = ", ..." if len(others) > MOST_SHAPES else ""
        what, they = ("a parameter", "it") if len(others) == 1 else (f"{len(others)} parameters", "them")
        raise LossFault(
            f"the loss depends on {what} that the model does not have ({shapes}{more}), so no run would train {they}; assign "
            f"the module that has {they}, such as the loss, to an attribute of the model, and layers in a list as nn.ModuleList, or freeze what is "
            "not to be trained (requires_grad_(False))"
        )


def _leaves_of(loss_sum: Tensor) -> list[Tensor]:
    """Return the tensors in which a loss's backward pass ends."""
    leaves, waiting, seen = list[Tensor](), [loss_sum.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        waiting += [before for before, _ in node.next_functions]
    return leaves


class NoLossAndCount(LossFault):
    """The model returned something else than (loss_sum, num_targets); the message says what."""


def check_loss(returned: Any) -> tuple[Tensor, Tensor]:
    """Return (loss_sum, num_targets) as two scalar tensors; the count may be an int. Raises NoLossAndCount."""
    fix = "return (loss_sum, num_targets): the summed loss and the number of targets it sums over, both scalar tensors"
    if not (isinstance(returned, tuple) and len(returned) == 2):
        what = "Tensor" if isinstance(returned, Tensor) else type(returned).__name__  # a fake one, too
        raise NoLossAndCount(f"the model returned a {what}; {fix}")
    if type(returned[1]) is int:
        returned = returned[0], torch.tensor(returned[1])
    for name, value in zip(("loss_sum", "num_targets"), returned, strict=True):
        if not isinstance(value, Tensor) or value.dim() != 0:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise NoLossAndCount(f"the model's {name} is {shape}, not a scalar tensor; {fix}")
    loss_sum, num_targets = returned
    return loss_sum, move(num_targets, loss_sum.device)  # a count made on the host, without waiting


def check_shapes(config: TrialConfig, train_set: SampleSet) -> None:
    """Raise ValueError where the model's loss is not two scalars. Fake tensors tell so in a second.

    A forward that fake tensors cannot follow proves nothing, and passes.
    """
    sample, loss = fetch(train_set, [0]), loss_function(config.loss)
    try:
        with shapes_alone():
            returned = loss(build_model(config.model, train_set), fake_batch(sample, 1))
    except LossFault:
        raise
    except Exception:
        return
    check_loss(returned)


def fake_batch(sample: Any, times: int) -> Any:
    """Return a batch of `times` samples of this one's shape; called where tensors have shapes alone (`shapes_alone`)."""
    if isinstance(sample, torch.Tensor):
        return torch.empty((times, *sample.shape[1:]), dtype=sample.dtype).zero_()
    if isinstance(sample, dict):
        return {key: fake_batch(value, times) for key, value in sample.items()}
    if isinstance(sample, (list, tuple)):
        parts = [fake_batch(value, times) for value in sample]
        return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)
    return sample


def check_first_loss(loss: float, num_targets: float = 1) -> None:
    """Raise LossFault where the first loss is not a number: nothing was learned yet, so no learning rate is to
    blame. num_targets: what it sums over."""
    if not math.isfinite(loss) and not num_targets:
        raise LossFault(
            f"the loss of samples without targets is {loss}, and would make that of every batch with one of them no number: it is 0 where "
            'there is nothing to sum; take a sum (reduction="sum") in place of a mean over none, which is 0/0'
        )
    if not math.isfinite(loss):
        raise LossFault(
            f"the loss of the first step is {loss}, before any weight has moved; look for a division by zero, a logarithm "
            "of zero or missing values in the first samples, check how the weights are initialised, or use precision: float32"
        )
