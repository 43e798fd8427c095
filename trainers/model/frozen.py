"""What of a model's state a checkpoint holds: neither weights that are not trained, of which it has a digest instead, nor what torch
would not load again."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are not trained by their names in the model's state, a tied one under each of its names."""
    state = module.state_dict(keep_vars=True)
    return {name: p for name, p in state.items() if isinstance(p, nn.Parameter) and not p.requires_grad}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model's state: a model may have other things there (`get_extra_state`, what it was made with)."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def others_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else there is in a model's state."""
    return {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def is_loadable(value: Any) -> bool:
    """True if a file can hold it that is loaded without running code of it: functions, say, are not."""
    if isinstance(value, Tensor):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):  # pickle raises all three for what it cannot write
        return False
    return True


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
