"""From the key `loss` to loss(module, batch) -> (loss_sum, num_targets), the form that every split of a batch needs.

A loss that is a mean over a micro-batch would weigh samples by how the batch was split. So criteria of torch's are summed,
and the mean that a transformers model returns is multiplied by the number of targets that it is a mean over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchscout.trainers.config import resolve
from batchscout.trainers.criteria import (
    IGNORED_TARGET,
    Criterion,
    CrossEntropyCriterion,
    Loss,
    MeanLoss,
    OwnLoss,
    TransformersLoss,
)
from batchscout.trainers.data.batches import leaves
from batchscout.trainers.errors import LossFault
from batchscout.trainers.sources.takes_batch import TakesBatch

LossFunction = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


def loss_function(loss: Loss | None) -> LossFunction:
    """Return loss(module, batch) -> (loss_sum, num_targets). None: the module's own forward is the loss."""
    match loss:
        case None:
            return lambda module, batch: module(batch)
        case OwnLoss():
            return resolve(loss.target)
        case TransformersLoss():
            return _of_transformers
        case MeanLoss():
            return _Mean(loss)
        case CrossEntropyCriterion():
            return _CrossEntropy(loss)
        case _:
            return functools.partial(_elementwise, loss)


def autocasting(loss_function: LossFunction, precision: str, device: torch.device) -> LossFunction:
    """Return the loss in this precision. Backward passes stay outside of autocast, as torch asks."""
    if precision == "float32":
        return loss_function

    def cast(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, getattr(torch, precision)):
            return loss_function(module, batch)

    return cast


def _of_transformers(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    labels = _labels_in(batch)
    # models of segmentation have their own
    ignored = getattr(module.config, "semantic_loss_ignore_index", IGNORED_TARGET)
    shifted = labels.dim() > 1 and _predicts_the_next(module)
    if shifted:
        labels = _without_firsts(labels, batch, ignored)
        batch = {**batch, "labels": labels}
    outputs = module(**batch)
    if outputs.loss is None:
        raise LossFault(
            f"{type(module).__name__} returned no loss; give a model whose forward takes labels, or name a criterion as `loss`"
        )
    num_targets = ((labels[:, 1:] if shifted else labels) != ignored).sum()
    return torch.where(num_targets > 0, outputs.loss, 0.0) * num_targets, num_targets  # a mean over none is no number


def _labels_in(batch: Any) -> Tensor:
    remedy = "loss: transformers needs them there"
    if isinstance(batch, Mapping) and "targets" in batch:  # as the built-in texts have them
        remedy += "; for 'targets' it is loss: {type: cross_entropy, targets: targets}"
    return _of_key(batch, "labels", remedy)


def _without_firsts(labels: Tensor, batch: Any, ignored: int) -> Tensor:
    """Return the labels without those of the first tokens of samples that are packed into one row: the last token of one sample would be
    held against the first of the next."""
    positions = batch.get("position_ids")
    if positions is None or positions.shape != labels.shape:
        return labels
    return labels.masked_fill(positions == 0, ignored)


def _predicts_the_next(module: nn.Module) -> bool:
    """True of a model in whose loss the first label of a sample is no target: each position is held against the next one."""
    settings, name = module.config, getattr(getattr(module, "loss_function", None), "__name__", "")
    return name == "ForCausalLMLoss" and not getattr(settings, "is_encoder_decoder", False)


class _Mean:
    """A mean that the module returns, times what it is a mean over. A mean over nothing is no number, and nor are its gradients,
    whatever they are multiplied by: those of such a micro-batch are replaced by 0 where they reach the parameters. No number has
    to be waited for to know it."""

    def __init__(self, loss: MeanLoss) -> None:
        self._loss = loss
        self._any: Tensor | None = None
        """Whether the micro-batch that was looked at last has targets: a tensor on the device."""
        self._watched: nn.Module | None = None

    def __call__(self, module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        self._watch(module)
        mean, num_targets = _scalar_in(_called_with_all(module, batch)), _counted(self._loss, batch)
        self._any = num_targets > 0
        return torch.where(self._any, mean, 0.0) * num_targets, num_targets

    def _watch(self, module: nn.Module) -> None:
        if module is self._watched:
            return
        self._watched = module
        for parameter in module.parameters():
            is_shard = hasattr(parameter, "device_mesh")  # what it is an instance of takes seconds to import
            if parameter.requires_grad and not is_shard:  # the gradients of shards have met before they come here
                parameter.register_hook(self._without_what_is_no_number)

    def _without_what_is_no_number(self, gradient: Tensor) -> Tensor:
        return gradient if self._any is None or gradient.is_sparse else torch.where(self._any, gradient, 0.0)


def _called_with_all(module: nn.Module, batch: Any) -> Any:
    if isinstance(module, TakesBatch):
        return module(batch)
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, list | tuple) else module(batch)


def _scalar_in(returned: Any) -> Tensor:
    """Return the loss in what a module returned."""
    if isinstance(returned, tuple) and not hasattr(returned, "loss"):
        scalars = [value for value in returned if isinstance(value, Tensor) and value.dim() == 0]
        found = scalars[0] if len(scalars) == 1 else None
    else:
        found = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", returned)
    if not isinstance(found, Tensor) or found.dim() != 0:
        raise LossFault(
            f"loss: mean needs one scalar tensor, and the module returned a {type(returned).__name__} without one; return the loss "
            "alone, as `loss`, or as the one scalar of a tuple"
        )
    return found


def _counted(loss: MeanLoss, batch: Any) -> Tensor:
    """Return the number of what the mean of this batch is a mean over."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    match loss.over:
        case "samples":
            return torch.tensor(len(tensors[0]), device=tensors[0].device) if tensors else torch.tensor(_length(batch))
        case "targets":
            return (_targets_in(batch, loss) != loss.ignore_index).sum()
        case path:
            return torch.as_tensor(resolve(path)(batch), device=tensors[0].device if tensors else None)


def _length(batch: Any) -> int:
    """Return how many samples a batch without tensors has: texts, which the module makes tensors of."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    first = parts[0] if isinstance(parts, list | tuple) and parts else parts
    return len(first) if isinstance(first, list | tuple) else len(parts)


def _targets_in(batch: Any, loss: MeanLoss) -> Tensor:
    if isinstance(batch, Mapping):
        return _of_key(
            batch,
            loss.targets,
            "name its key: loss: {type: mean, targets: KEY}, or say what it is a mean over: over: samples",
        )
    if isinstance(batch, list | tuple) and batch and isinstance(batch[-1], Tensor):
        return batch[-1]
    raise LossFault(
        f"a batch is a {type(batch).__name__}, in which loss: mean finds no targets to count; let samples be tuples (input, target) "
        "or dictionaries, or say what it is a mean over: {type: mean, over: samples}"
    )


def logits_and_targets(
    loss: CrossEntropyCriterion | TransformersLoss, module: nn.Module, batch: Any
) -> tuple[Tensor, Tensor, int]:
    """Return the logits that a module returns for a batch, classes last, the class of each, and which class does not count."""
    if isinstance(loss, CrossEntropyCriterion):
        logits, targets = _outputs_and_targets(loss, module, batch)
        return logits, targets, loss.ignore_index
    labels = _labels_in(batch)
    if not _predicts_the_next(module):
        raise ValueError(
            f"{type(module).__name__} has a loss of its own, which is not known to be the cross-entropy of its logits and the next "
            "label; return logits and set loss: cross_entropy, or leave cross-entropy in chunks out"
        )
    logits = module(**{key: value for key, value in batch.items() if key != "labels"}).logits
    labels = _without_firsts(labels, batch, IGNORED_TARGET)
    return logits, F.pad(labels[:, 1:], (0, 1), value=IGNORED_TARGET), IGNORED_TARGET


class _CrossEntropy:
    """Cross-entropy of what a module returns, with the classes last or second.

    The shapes say which, but not where a length is that of the classes. Samples of uneven length may come to that in any batch,
    so what the batches before have shown is kept.
    """

    def __init__(self, criterion: CrossEntropyCriterion) -> None:
        self._criterion = criterion
        self._last: bool | None = None
        """None: no batch has shown yet where the classes are."""

    def __call__(self, module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        logits, targets = _outputs_and_targets(self._criterion, module, batch)
        last = logits.shape[:-1] == targets.shape
        second = logits.dim() > 2 and logits.shape[:1] + logits.shape[2:] == targets.shape
        if last != second:
            self._last = last
        elif not last or self._last is None:
            which = "and classes could be last or second" if last else "which are not one class for each target"
            raise LossFault(
                f"the logits are {shape_text(logits)} and the targets {shape_text(targets)}, {which}; return logits with the targets' shape and the "
                "classes last, or write the loss yourself as package.module:callable"
            )
        ignored = self._criterion.ignore_index
        if self._last:
            logits, targets = logits.flatten(0, -2), targets.flatten()
        loss_sum = F.cross_entropy(logits.float(), targets, ignore_index=ignored, reduction="sum")
        return loss_sum, (targets != ignored).sum()


def _outputs_and_targets(criterion: Criterion, module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        targets = _of_key(batch, criterion.targets, f"name its key: loss: {{type: {criterion.type}, targets: KEY}}")
        outputs = module(**{key: value for key, value in batch.items() if key != criterion.targets})
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        *inputs, targets = batch
        outputs = module(*inputs)
    else:
        raise LossFault(
            f"a batch is a {type(batch).__name__}, in which loss: {criterion.type} finds no targets; let samples be tuples "
            "(input, target) or dictionaries, or write the loss yourself as package.module:callable"
        )
    return _tensor_of(outputs, criterion), targets


def _of_key(mapping: Any, key: str, remedy: str, what: str = "a batch") -> Tensor:
    if not isinstance(mapping, Mapping):
        raise LossFault(f"{what} is a {type(mapping).__name__}, no dictionary with '{key}'; {remedy}")
    if key not in mapping:
        raise LossFault(f"{what} has no '{key}' (it has: {', '.join(map(str, mapping))}); {remedy}")
    return mapping[key]


def _tensor_of(outputs: Any, criterion: Criterion) -> Tensor:
    """Return the tensor that a module returned, alone, as `logits`, or first in a tuple."""
    if isinstance(outputs, Mapping):
        outputs = _of_key(
            outputs, "logits", "return them under this name, or the tensor alone", what="what the module returned"
        )
    elif isinstance(outputs, tuple) and not hasattr(outputs, "logits"):
        outputs = next(iter(outputs), None)
    else:
        outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise LossFault(
            f"loss: {criterion.type} needs the module's outputs as a tensor, and it returned a {type(outputs).__name__}; return "
            "the tensor, alone, first in a tuple, or as `logits`, or write the loss yourself as package.module:callable"
        )
    return outputs


def _elementwise(criterion: Criterion, module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    outputs, targets = _outputs_and_targets(criterion, module, batch)
    if outputs.shape != targets.shape:
        raise LossFault(
            f"the outputs are {shape_text(outputs)} and the targets {shape_text(targets)}, and {criterion.type} would stretch one over "
            "the other; return outputs of the targets' shape (outputs.squeeze(-1)?)"
        )
    summed = F.mse_loss if criterion.type == "mse" else F.binary_cross_entropy_with_logits
    loss_sum = summed(outputs.float(), targets.float(), reduction="sum")
    return loss_sum, torch.tensor(targets.numel())


def shape_text(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
