"""What a checkpoint was made with: all that decides what is trained and reported. It says whose checkpoint it is."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.criteria import import_path
from batchscout.trainers.data.samples import Samples, num_samples
from batchscout.trainers.user_code import code_of, import_path_of

MadeWith = Mapping[str, Any]
"""Plain values, a part of what a checkpoint holds: those of `made_with`."""


def made_with(config: TrialConfig, train_set: Samples, val_set: Samples, frozen: str | None = None) -> dict[str, Any]:
    """Return what a checkpoint must have in common with the run that goes on from it.

    frozen: a digest of the weights that are not trained, which are in no checkpoint; None where all are trained.
    """
    optimizer = config.optimizer
    made = [import_path_of(one.target, one.kwargs) for one in (config.model, config.data)]
    import_paths = (*made, import_path(config.loss), optimizer.target, optimizer.param_groups)
    return {
        **spoken(config),
        "configuration": config.model_dump(mode="json"),
        "data": [*map(num_samples, (train_set, val_set)), getattr(train_set, "content_hash", None)],
        "code": code_when_first_asked(import_paths),
        **({} if frozen is None else {"frozen": frozen}),
    }


def spoken(config: TrialConfig) -> dict[str, Any]:
    """Return the part that is told by names of its own, where it differs."""
    return {
        "effective_batch_size": config.effective_batch_size,
        "ramp": [(phase.from_samples, config.split_in(phase).effective_batch_size) for phase in config.ramp],
        "parallel": config.parallel,
        "optimizer_type": config.optimizer.name,
    }


@functools.cache
def code_when_first_asked(import_paths: tuple[str | None, ...]) -> dict[str, str]:
    """Return what `code_of` does, as it was when this process, which has imported it, first asked."""
    return code_of(import_paths)


_SPOKEN = {
    "effective_batch_size": "an effective batch of", "ramp": "the ramp", "parallel": "parallel:",
    "optimizer_type": "the optimizer",
}  # fmt: skip


def differences(before: MadeWith, now: MadeWith) -> dict[str, str]:
    """Return, in words, in what a checkpoint and a run differ."""
    told = spoken_differences(before, now)
    found = told | _differences_of_fields(before["configuration"], now["configuration"]) | told
    if before["data"] != now["data"]:
        found["data"] = "other data"
    if before.get("frozen") != now.get("frozen"):
        found["frozen"] = "other weights that are not trained"
    changed = [file for file, digest in now["code"].items() if before["code"].get(file) != digest]
    return found | {file: f"other code in {file}" for file in changed}


def spoken_differences(before: MadeWith, now: MadeWith) -> dict[str, str]:
    """Return, in words, in what they differ of `spoken`."""
    changed = [key for key in _SPOKEN if before[key] != now[key]]
    return {key: f"{_SPOKEN[key]} {before[key]}, and this run has {now[key]}" for key in changed}


_FREE: Any = dict.fromkeys(
    (
        "micro_batch_size", "micro_batch", "gradient_accumulation_steps", "world_size", "activation_checkpointing", "compile",
        "dynamic_micro_batch", "memory_limit_bytes", "device_peaks", "keep_checkpoints", "kept_checkpoints",
    ),
    True,
) | {"ramp": {"__all__": {"gradient_accumulation_steps"}}, "data": {"workers"}}  # fmt: skip
"""The fields of a configuration in which a run may differ from its checkpoint. The effective batches, which some of them
make together, may not."""


def _differences_of_fields(before: MadeWith, now: MadeWith) -> dict[str, str]:
    try:
        then, here = _decisive(before), _decisive(now)
    except ValidationError:
        return {"configuration": "a configuration that this version cannot read"}
    changed = [key for key in {**then, **here} if then.get(key) != here.get(key)]
    return {key: f"{key} {then.get(key, 'absent')}, and this run has {here.get(key, 'none')}" for key in changed}


def _decisive(configuration: MadeWith) -> dict[str, Any]:
    """Return the leaves of a configuration that decide what is trained. Fields that it lacks have their defaults."""
    return dict(_leaves(TrialConfig.model_validate(configuration).model_dump(mode="json", exclude=_FREE)))


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict) or not tree:
        yield name, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{name}.{key}" if name else key)
