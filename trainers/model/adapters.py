"""LoRA adapters in a model's layers, by the library peft: they are trained, and the weights that it had are frozen (Hu et al. 2021, arXiv
2106.09685)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",)}
"""By task_type: the layers that peft's own models of that task train whole, as they are new. To inject adapters alone leaves them frozen."""


def add_adapters(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Put LoRA's matrices into the model, in place, and freeze what is not to be trained.

    settings: arguments of peft.LoraConfig. They are held against each transformers model within, where there is one, whose family says
    which layers get adapters by default; what lies around these stays as it is. Raises ValueError in the user's words where they do not fit.
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
    layers = [name for name, _ in model.named_modules()]
    if absent := [name for name in settings.get("modules_to_save") or () if not _named(name, layers)]:
        raise ValueError(
            f"model.peft.modules_to_save names {', '.join(absent)}, and no layer of the model is called so; it has, for instance, "
            f"{', '.join(layers[-3:])}"
        )
    try:
        with unset_fake_temporarily() as fake_mode:
            for one in _of_transformers(model):
                inject_adapter_in_model(LoraConfig(**_with_heads(settings, one)), one)
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


def _with_heads(settings: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the settings with the heads that the model has of those that its task trains whole."""
    layers = [name for name, _ in model.named_modules()]
    heads = [name for name in HEADS.get(settings.get("task_type") or "", ()) if _named(name, layers)]
    whole = [*(settings.get("modules_to_save") or ()), *heads]
    return {**settings, **({"modules_to_save": whole} if whole else {})}


def _named(name: str, layers: Iterable[str]) -> bool:
    """True if a layer is called so, as peft looks for those that it trains whole."""
    return any(layer.endswith(name) for layer in layers)


def _of_transformers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost transformers models within that are not frozen, such as both towers of a retriever; the model itself where
    there is none."""
    found: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():  # each comes before what is in it
        if module not in inner and is_of_transformers(module):
            found.append(module)
            inner.update(module.modules())
    trained = [one for one in found if any(parameter.requires_grad for parameter in one.parameters())]
    return trained or found or [model]


def is_of_transformers(module: nn.Module) -> bool:
    """True of a model of that library, which need not be loaded to tell."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
