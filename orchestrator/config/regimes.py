"""The defaults of `regime: finetune`."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.stages import StageKeys

FINETUNE_RATE = 2e-5
"""AdamW's, for a batch of 16: Devlin et al. 2018 (arXiv 1810.04805, A.3) find 2e-5 to 5e-5 at batches of 16 and 32, in 2 to 4
epochs, to work across tasks."""
HIGHEST_FINETUNE_RATE = 1e-3
"""Fifty times that: what pre-training begins with, and overwrites the weights rather than adapts them."""
OWN_WEIGHTS = "own"
"""What `initial_weights` says where the model's target loads them."""

_FINETUNE: Mapping[str, Mapping[str, object]] = {
    "optimizer": {"reference_batch_size": 16, "weight_decay": 0.01, "warmup": "short"},
    "frontier": {"largest": 128},
    "throughput": {"multiples": (1, 2)},
}
"""The defaults that differ: of the optimizer, and of stages by their type."""


def with_defaults_of_regime(tree: Mapping[str, object], default_stages: tuple[StageKeys, ...]) -> dict[str, object]:
    """Return a study file's tree with the defaults of finetuning where it says nothing.

    Raises ValueError where finetuning has no default for what is missing.
    """
    if "sample_budget" not in tree:
        raise ValueError(
            "regime: finetune has no default sample_budget, since it depends on the data; set it, to 2 to 4 times the number of "
            "training samples as a rule"
        )
    optimizer = tree.get("optimizer") or {}
    stages = tree.get("stages") or [{"type": stage.type} for stage in default_stages]
    return {**tree, "optimizer": _optimizer(optimizer), "stages": _stages(stages)}


def _optimizer(given: object) -> object:
    if not isinstance(given, Mapping):
        return given
    if "lr" in given:
        return {**_FINETUNE["optimizer"], **given}
    if given.get("type", "adamw") != "adamw" or given.get("target"):
        raise ValueError("regime: finetune has a default optimizer.lr for adamw alone; set optimizer.lr")
    return {**_FINETUNE["optimizer"], "lr": FINETUNE_RATE, **given}


def _stages(given: object) -> object:
    return [_stage(one) for one in given] if isinstance(given, list | tuple) else given


def _stage(given: object) -> object:
    return {**_FINETUNE.get(str(given.get("type")), {}), **given} if isinstance(given, Mapping) else given
