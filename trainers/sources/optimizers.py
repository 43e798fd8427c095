"""From an optimizer that exists to the key `optimizer` of a study, and to what sets its groups apart."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from batchscout.trainers.sources.settings import GROUPS


def optimizer_keys(optimizer: Optimizer) -> dict[str, Any]:
    """Return the key `optimizer` that builds one like this. Its groups stay those that the object itself makes."""
    return {"lr": rate_of(optimizer.param_groups[0]), "param_groups": GROUPS, **_kind(optimizer)}


def _kind(optimizer: Optimizer) -> dict[str, Any]:
    """Return which optimizer it is. What it is, is built in where that is known, since more is known of these."""
    defaults, decay = optimizer.defaults, decay_of(optimizer)
    path = f"{type(optimizer).__module__}:{type(optimizer).__qualname__}"
    if path == "torch.optim.adamw:AdamW" or (path == "torch.optim.adam:Adam" and not decay):
        moments = {"betas": list(defaults["betas"]), "eps": defaults["eps"]}
        return {"type": "adamw", **moments, "weight_decay": decay, **_further(optimizer)}
    if path == "torch.optim.sgd:SGD":
        return {"type": "sgd", "betas": [defaults["momentum"], 0.0], "weight_decay": decay, **_further(optimizer)}
    decays = {"weight_decay": decay} if "weight_decay" in defaults else {}
    kwargs = _arguments(optimizer, leave_out=("lr",)) | decays
    return {"target": path, "kwargs": kwargs | _kept_beside(optimizer, kwargs)}


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate that a group was made with, or that OneCycleLR is to reach; a schedule has lowered it already."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


_KEYS = ("lr", "betas", "eps", "weight_decay", "momentum")
_OF_SPEED = ("fused", "foreach", "capturable", "differentiable")
"""Arguments that change how fast a step is computed, and not what: the study chooses these itself."""
_MOMENTUM = ("betas", "momentum")
"""What a schedule that goes up and down moves, too: its groups say so."""
_NOT_OF_A_GROUP = (
    "params", "param_names", "step", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",
)  # fmt: skip
"""Keys beside the defaults that a group has from torch, its schedules and the steps until now."""


def _further(optimizer: Optimizer) -> dict[str, Any]:
    """Return, as `kwargs`, the arguments for which the study file has no key."""
    kwargs = _arguments(optimizer, leave_out=(*_KEYS, *_OF_SPEED))
    return {"kwargs": kwargs} if kwargs else {}


def _arguments(optimizer: Optimizer, leave_out: Iterable[str]) -> dict[str, Any]:
    """Return what it was told, as far as its defaults say it."""
    return _changed(optimizer, {name: value for name, value in optimizer.defaults.items() if name not in leave_out})


def _kept_beside(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further arguments that its class keeps beside its defaults: in attributes, or in its `args` as bitsandbytes does."""
    found = _changed(
        optimizer, {k: v for k, v in _attributes(optimizer).items() if k not in ("lr", *optimizer.defaults)}
    )
    if not found:
        return {}
    make: Any = type(optimizer)
    try:
        again = make(groups_of(optimizer), lr=rate_of(optimizer.param_groups[0]), **kwargs)
    except Exception:  # it cannot be made without them
        return found
    # Some set one themselves, and refuse it as an argument: AdamW8bit of bitsandbytes has optim_bits 8, where its signature has 32.
    without = _attributes(again)
    return {name: value for name, value in found.items() if without.get(name) != _attributes(optimizer)[name]}


def _attributes(optimizer: Any) -> dict[str, Any]:
    return {**getattr(getattr(optimizer, "args", None), "__dict__", {}), **vars(optimizer)}


def _changed(optimizer: Optimizer, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the values that its class takes as arguments, and that are not as its class has them."""
    taken = inspect.signature(type(optimizer)).parameters
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name in taken and _is_plain(value) and value != taken[name].default
    }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple | list)


def decay_of(optimizer: Optimizer) -> float:
    """Return the weight decay of those of its groups that decay most; others say that they decay less."""
    return max(float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups)


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return its groups with what sets them apart: what is as its defaults have it is left to the study."""
    groups = optimizer.param_groups
    rates = set(map(rate_of, groups))
    return [
        {
            "params": group["params"],
            **{key: value for key, value in group.items() if _is_its_own(key, group, optimizer)},
            **({"lr": rate_of(group)} if len(rates) > 1 else {}),
        }
        for group in groups
    ]


def _is_its_own(key: str, group: Mapping[str, Any], optimizer: Optimizer) -> bool:
    if key not in optimizer.defaults:
        return key not in _NOT_OF_A_GROUP  # such as the rank of GaLore's
    of_the_study = decay_of(optimizer) if key == "weight_decay" else optimizer.defaults[key]
    of_its_schedule = _MOMENTUM if "max_momentum" in group else ()
    return key not in ("lr", *_OF_SPEED, *of_its_schedule) and group[key] != of_the_study
