"""Which activations the backward pass keeps, and compilation, block by block.

Checkpointing is torch's non-reentrant one (Chen et al. 2016, arXiv 1604.06174); `selective` keeps the results of
matrix products and attention and recomputes the rest. A memory budget in (0, 1) is the compiler's: per block it is
monotone, on a whole-model graph it is not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainers.config import ActivationCheckpointing, TrialConfig
from trainers.models import find_blocks

# One code object serves every trial of a warm process; past this it would fall back to eager, or fail as asked below.
RECOMPILE_LIMIT = 64

_SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def apply_to_blocks(model: nn.Module, config: TrialConfig) -> nn.Module:
    """The model with its blocks checkpointed and compiled as the configuration says; parameters keep their names."""
    mode = config.activation_checkpointing
    _refuse_what_does_not_go(mode, config.compile)
    blocks = find_blocks(model, config.model.blocks)
    if blocks is None and mode in ("selective", "full"):
        raise ValueError(
            f"activation_checkpointing '{mode}' needs repeated blocks, and this model has no ModuleList of them; "
            "put its layers in an nn.ModuleList and name it as model.blocks, or use 'none'"
        )
    if mode in ("selective", "full"):
        assert blocks is not None
        for index, block in enumerate(blocks):
            blocks[index] = _checkpointed(block, mode)
    if config.compile:
        _configure_compiler(mode)
        for module in [model] if blocks is None else blocks:
            module.compile(dynamic=config.dynamic_micro_batch)
    return model


def _refuse_what_does_not_go(mode: ActivationCheckpointing, compiled: bool) -> None:
    if isinstance(mode, float) and not compiled:
        raise ValueError(
            f"activation_checkpointing {mode} is a memory budget, which only the compiler can keep; "
            "set compile: true, or use none, selective or full"
        )


def _checkpointed(block: nn.Module, mode: ActivationCheckpointing) -> nn.Module:
    if mode == "full":
        return checkpoint_wrapper(block)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint_wrapper(block, context_fn=contexts)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _configure_compiler(mode: ActivationCheckpointing) -> None:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    dynamo.recompile_limit = RECOMPILE_LIMIT
    dynamo.fail_on_recompile_limit_hit = True
    dynamo.optimize_ddp = False  # blocks are compiled one by one: DDP's buckets overlap without cutting their graphs
    functorch.activation_memory_budget = mode if isinstance(mode, float) else 1.0
