"""Cross-entropy in chunks for any model whose logits are what its last linear layer returns.

The layer is made to pass on what it is given. So the module returns hidden states where it returned logits, and the loss takes products
with the layer's weights a chunk at a time. Nothing may come between the layer and the logits: a model that scales or caps them is found
out, since its logits are then no linear layer's own output, or are no longer what the layer returned. What a model adds to its
cross-entropy only numbers tell: `batchscout.trainers.before.in_chunks` compares them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.criteria import CrossEntropyCriterion, TransformersLoss
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.samples import SampleSet
from batchscout.trainers.errors import said_by
from batchscout.trainers.knobs import chunked_cross_entropy as chunked
from batchscout.trainers.model.contract import fake_batch
from batchscout.trainers.model.cross_entropy import chunked_cross_entropy
from batchscout.trainers.model.gpt import GPT
from batchscout.trainers.model.losses import LossFunction, logits_and_targets
from batchscout.trainers.model.models import CausalLanguageModel, build_model
from batchscout.trainers.model.shapes import shapes_alone


def with_chunks(module: nn.Module, config: TrialConfig, head_name: str | None, whole: LossFunction) -> LossFunction:
    """Let the module compute its cross-entropy in chunks, and return its loss.

    head_name: what `head_of` has found. whole: the loss without chunks, which is also that of a model that can take chunks itself.
    """
    if isinstance(module, GPT):
        module.cross_entropy = "chunked"
        return whole
    assert head_name is not None, "only the built-in gpt has a head that need not be found"
    head = module.get_submodule(head_name)
    assert isinstance(head, nn.Linear)
    head.forward = _passed_on
    if isinstance(module, CausalLanguageModel):
        module.take_chunks(head)
        return whole
    loss = config.loss
    assert isinstance(loss, CrossEntropyCriterion | TransformersLoss), "the knob was checked"

    def in_chunks(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        hidden, targets, ignored = logits_and_targets(loss, module, batch)
        return chunked_cross_entropy(hidden, head.weight, targets, bias=head.bias, ignore_index=ignored)

    return in_chunks


def _passed_on(input: Tensor) -> Tensor:
    return input


def head_of(config: TrialConfig, train_set: SampleSet) -> str | None:
    """Return the name of the linear layer whose output is the model's logits; None for the built-in gpt, which takes chunks itself.

    Fake tensors tell it, in a second. Raises ValueError where there is none, with the reason.
    """
    if config.model.target == "gpt":
        return None
    sample = fetch(train_set, [0])
    try:
        with shapes_alone(), torch.no_grad():
            return head_in(build_model(config.model, train_set), config, fake_batch(sample, 1))
    except ValueError:
        raise
    except Exception as error:  # a user's forward may do what fake tensors cannot
        said = next(iter(said_by(error).splitlines()), "")
        raise ValueError(_refused(f"fake tensors cannot follow it ({type(error).__name__}: {said})")) from error


def head_in(module: nn.Module, config: TrialConfig, batch: Any) -> str:
    """Return the same of a module, by the logits that it returns for this batch."""
    returned = dict[str, list[tuple[Tensor, int]]]()

    def note(name: str, layer: nn.Module, given: Any, output: Tensor) -> None:
        returned.setdefault(name, []).append((output, output._version))

    hooks = [
        layer.register_forward_hook(functools.partial(note, name), prepend=True)  # before one that changes the output
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear
    ]
    try:
        if isinstance(module, CausalLanguageModel):
            logits = module.logits(batch)
        else:
            assert isinstance(config.loss, CrossEntropyCriterion | TransformersLoss), "the knob was checked"
            logits = logits_and_targets(config.loss, module, batch)[0]
    finally:
        for hook in hooks:
            hook.remove()
    for name, outputs in returned.items():
        if not any(output is logits for output, _ in outputs):
            continue
        if len(outputs) > 1:
            raise ValueError(_refused(f"it ({name}) is called {len(outputs)} times in a forward pass"))
        if any(output._version != version for output, version in outputs):
            raise ValueError(_refused("the model writes into them after that layer: it scales, caps or masks them"))
        return name
    raise ValueError(_refused("they are no linear layer's own output: it scales, caps, moves or casts them"))


def _refused(why: str) -> str:
    return (
        f"memory_knobs has {chunked.NAME}, which needs the layer that makes the model's logits, and {why}; return what an nn.Linear "
        "returns, or leave it out"
    )
