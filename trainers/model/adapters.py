"""LoRA adapters in a model's layers, by the library peft: they are trained, and all other weights are frozen (Hu et al. 2021, arXiv
2106.09685)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def add_adapters(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Put LoRA's matrices into the model, in place, and freeze what is not to be trained.

    settings: arguments of peft.LoraConfig. They are held against the transformers model within, where there is one, whose family says
    which layers get adapters by default. Raises ValueError in the user's words where they do not fit.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ValueError("model.peft needs the library peft; pip install 'batchscout[hf]'") from error
    takes = [field.name for field in dataclasses.fields(LoraConfig) if field.init]
    unknown = [key for key in settings if key not in takes]
    if unknown:
        raise ValueError(
            f"model.peft has {', '.join(unknown)}, which peft.LoraConfig does not take; it takes: {', '.join(takes)}"
        )
    try:
        with unset_fake_temporarily() as fake_mode:
            of_transformers = next((module for module in model.modules() if is_of_transformers(module)), model)
            inject_adapter_in_model(LoraConfig(**settings), of_transformers)
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(
            f"model.peft does not fit this model: {error}; name its layers as target_modules, and check the other keys"
        ) from error
    if fake_mode is not None:
        _without_values(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"model.peft {dict(settings)} leaves nothing to train; leave inference_mode out")


def _without_values(model: nn.Module) -> None:
    """Make the new parameters fake as the others are. They were made with values, since peft moves them to the others' device, which
    torch cannot do with fake ones."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, FakeTensor):
                fake = torch.empty_like(parameter, requires_grad=False)
                module.register_parameter(name, nn.Parameter(fake, requires_grad=parameter.requires_grad))


def is_of_transformers(module: nn.Module) -> bool:
    """True of a model of that library, which need not be loaded to tell."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
