"""Weights that are not trained: a checkpoint leaves them out, and holds a digest of them instead."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are not trained by their names in the model's state, a tied one under each of its names."""
    state = module.state_dict(keep_vars=True)
    return {name: p for name, p in state.items() if isinstance(p, nn.Parameter) and not p.requires_grad}


def frozen_digest(module: nn.Module, config: TrialConfig) -> str | None:
    """Return a digest of a run's frozen weights, which it begins with; None where all are trained.

    They may take seconds to read, so a process that runs trial after trial reads those of the same model once.
    """
    frozen = frozen_of(module)
    if not frozen:
        return None
    made_from = f"{config.model.model_dump_json()} {config.seed} {config.initial_weights}"
    if made_from not in _digests:
        _digests[made_from] = _digest(frozen)
    return _digests[made_from]


_digests: dict[str, str] = {}


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
