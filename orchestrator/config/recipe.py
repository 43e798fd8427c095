"""The settings of the training that the study file leaves open: batchscout's own take their place, and people must see which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from batchscout.orchestrator.config.keys import StudyConfig, StudyOptimizer


def left_open(config: StudyConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that decide how a run trains and that nobody gave, with the values that they have, as a study file has them.

    given: the keys that were, as `RunBegan` has them.
    """
    of_optimizer = _open_in(
        config.optimizer.model_dump(mode="json"), _of_the_optimizer(config.optimizer), given.get("optimizer")
    )
    further = {"warmup_stable_decay": ("decay",), "table": ("factors",)}.get(config.schedule.type, ())
    of_schedule = _open_in(config.schedule.model_dump(mode="json"), ("type", *further), given.get("schedule"))
    precision = {} if "precision" in given else {"precision": config.precision}
    parts = {"optimizer": of_optimizer, "schedule": of_schedule, **precision}
    return {key: value for key, value in parts.items() if value}


def given_of(config: StudyConfig) -> dict[str, Any]:
    """Return what of the training was given in a study that has just been read."""
    return config.model_dump(mode="json", exclude_unset=True, include={"optimizer", "schedule", "precision"})


def left_open_text(config: StudyConfig, given: Mapping[str, Any]) -> str | None:
    """Return the same as a sentence, the keys as they may be pasted into the study file; None where all was given."""
    found = left_open(config, given)
    if not found:
        return None
    tells_momentum = config.optimizer.type == "sgd" and "betas" in found.get("optimizer", {})
    momentum = "; the first of betas is SGD's momentum" if tells_momentum else ""
    text = yaml.safe_dump(found, default_flow_style=True, sort_keys=False, width=10**6)
    keys = text.strip().removeprefix("{").removesuffix("}")
    return f"not in the study file, so these are batchscout's defaults: {keys}{momentum}"


def _open_in(values: Mapping[str, Any], keys: tuple[str, ...], given: object) -> dict[str, Any]:
    there = given if isinstance(given, Mapping) else {}
    return {key: values[key] for key in keys if key not in there}


def _of_the_optimizer(optimizer: StudyOptimizer) -> tuple[str, ...]:
    """Return the keys that have an effect with this optimizer."""
    which = () if optimizer.target else ("type",)
    adam = ("betas", "eps", "beta2_scaling") if optimizer.has_betas else ("betas",) if optimizer.type == "sgd" else ()
    decays = () if optimizer.type == "own" else ("weight_decay",)
    return (*which, "lr", "reference_batch_size", "lr_scaling", "warmup", *adam, *decays, "max_gradient_norm")
