"""From a schedule of the learning rate that exists to the key `schedule`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any


def schedule_keys(schedule: Any, keys: dict[str, Any]) -> Iterator[str]:
    """Set `schedule` to one of the study's that is like it, and yield what is to be told where there is none. None: the rate is constant."""
    match name := _name(schedule):
        case "NoneType" | "ConstantLR" | "get_constant_schedule":
            keys["schedule"] = {"type": "constant"}
        case "CosineAnnealingLR" | "get_cosine_schedule_with_warmup":
            keys["schedule"] = {"type": "cosine"}
        case "LinearLR" | "get_linear_schedule_with_warmup":
            keys["schedule"] = {"type": "warmup_stable_decay", "decay": 0.99}
        case _:
            yield f"its schedule {name} is not one of the study's, which takes warmup_stable_decay; set schedule to choose another"


def _name(schedule: Any) -> str:
    """Return the name of its class, or of the function of transformers that has made it."""
    made_by = getattr(schedule, "lr_lambdas", [None])[0]
    function = made_by.func if isinstance(made_by, functools.partial) else made_by
    name = getattr(function, "__name__", "")
    is_transformers = getattr(function, "__module__", "") == "transformers.optimization"
    return name.removeprefix("_").removesuffix("_lr_lambda") if is_transformers else type(schedule).__name__
