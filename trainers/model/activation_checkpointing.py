"""Which activations the backward pass keeps, and what is compiled: block by block, or the model whole.

Checkpointing is torch's non-reentrant one (Chen et al. 2016, arXiv 1604.06174); `selective` keeps the results of
matrix products and attention and recomputes the rest. A memory budget in (0, 1) is the compiler's: per block it is
monotone, on a whole-model graph it is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from batchscout.trainers.config import ActivationCheckpointing, TrialConfig
from batchscout.trainers.model.blocks import find_blocks
from batchscout.trainers.model.models import BATCH_NORM

RECOMPILE_LIMIT = 64
"""Pieces of code that one run may compile of a function, where its blocks do not ask for more: one that compiles at every step is to fail."""
PIECES_PER_BLOCK = 4
"""A block may need code of its own, for training and evaluation, and for one sample and several."""

_SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def apply_to_blocks(model: nn.Module, config: TrialConfig, *, lengths_differ: bool = False) -> nn.Module:
    """Return the model with its blocks checkpointed and compiled as the configuration says; parameters keep their
    names.

    lengths_differ: true if batches differ in length. Code for each length would soon reach the compiler's limit.
    """
    mode = config.activation_checkpointing
    if isinstance(mode, float) and not config.compile:
        raise ValueError(
            f"activation_checkpointing {mode} is a memory budget, which only the compiler can keep; "
            "set compile: true, or use none, selective or full"
        )
    blocks = find_blocks(model, config.model.blocks)
    if not blocks and mode != "none":
        raise ValueError(
            f"activation_checkpointing '{mode}' needs repeated blocks, and this model has no ModuleList or Sequential of them; "
            "put its layers into one and name it as model.blocks, or use 'none'"
        )
    if mode in ("selective", "full"):
        for block in blocks:
            block.replace(_checkpointed(block.module, config))
    if config.compile:
        _configure_compiler(len(blocks))
        for module in [model] if not blocks or config.compile == "whole" else [block.module for block in blocks]:
            module.compile(dynamic=config.dynamic_micro_batch or lengths_differ, **_backend(mode))
    return model


@contextlib.contextmanager
def as_it_was_made(model: nn.Module) -> Iterator[None]:
    """Within this, the model has no checkpoint wrappers: they add to the names of the modules that they wrap."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, CheckpointWrapper)
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child._checkpoint_wrapped_module
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def _checkpointed(block: nn.Module, config: TrialConfig) -> nn.Module:
    selective = config.activation_checkpointing == "selective"
    contexts = partial(create_selective_checkpoint_contexts, selective_policy) if selective else noop_context_fn
    if not config.compile:
        contexts = partial(_with_statistics_once, block, contexts)
    elif not selective:  # the compiler changes statistics once by itself, and knows no contexts but the selective
        return checkpoint_wrapper(block)
    return checkpoint_wrapper(block, context_fn=contexts)


Context = contextlib.AbstractContextManager[Any]


def _with_statistics_once(block: nn.Module, contexts: Callable[[], tuple[Context, Context]]) -> tuple[Context, Context]:
    """Return (the context of the forward, that of its recomputation). BatchNorm's statistics take each batch in
    once."""
    forward, recomputation = contexts()
    return forward, _without_statistics(block, recomputation)


@contextlib.contextmanager
def _without_statistics(block: nn.Module, context: Context) -> Iterator[None]:
    """Keep BatchNorm from moving its statistics again.

    track_running_stats would not do: without it fewer tensors are saved than in the forward. The count that moves
    meanwhile is a copy that is thrown away.
    """
    norms = [module for module in block.modules() if isinstance(module, BATCH_NORM) and module.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            count = norm.num_batches_tracked
            norm.momentum, norm.num_batches_tracked = 0.0, None if count is None else count.clone()
        with context:
            yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def selective_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether selective checkpointing keeps what this operation makes; torch asks it for every operation."""
    saved = op in _SAVED_OPS and not _draws_dropout(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _draws_dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if this call draws random numbers. A recomputation must draw them again, or those after it would differ."""
    names = [argument.name for argument in op._schema.arguments]
    return ({**dict(zip(names, args, strict=False)), **kwargs}).get("dropout_p", 0.0) > 0


def _configure_compiler(num_blocks: int) -> None:
    """Let the run compile what it needs beside what earlier runs of this process have left, and fail where it would go on in eager code."""
    import torch._dynamo.config as dynamo
    from torch._dynamo.utils import counters

    # Blocks share one function. Those that differ in width or in a number have each their own code of it, again for every size.
    limit = counters["frames"]["ok"] + max(RECOMPILE_LIMIT, PIECES_PER_BLOCK * num_blocks)
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = limit
    dynamo.fail_on_recompile_limit_hit = True
    # Blocks that are compiled one by one overlap with DDP's buckets anyway. A whole model would be cut at the buckets, which
    # the compiler cannot do where it is checkpointed.
    dynamo.optimize_ddp = False


def _backend(mode: ActivationCheckpointing) -> dict[str, Any]:
    """Return torch.compile's arguments for this mode."""
    if not isinstance(mode, float):
        return {}
    # Not the compiler's global setting alone: dynamo keeps code by these arguments, and would give a later trial of
    # this process what it compiled under another budget.
    return {"backend": _inductor_within_budget, "options": {"activation_memory_budget": mode}}


def _inductor_within_budget(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *, options: dict[str, Any]) -> Any:
    import torch._functorch.config as functorch
    from torch._inductor.compile_fx import compile_fx

    with functorch.patch(options):
        return compile_fx(graph, inputs)
