"""The defaults of `regime: finetune`."""

from __future__ import annotations

from collections.abc import Mapping

from batchscout.orchestrator.config.stages import StageKeys

FINETUNE_RATE = 2e-5
"""AdamW's, for a batch of 16: Devlin et al. 2018 (arXiv 1810.04805, A.3) find 2e-5 to 5e-5 at batches of 16 and 32, in 2 to 4
epochs, to work across tasks."""
LORA_RATE = 2e-4
"""The same of LoRA's matrices, which begin at nothing: Hu et al. 2021 (arXiv 2106.09685) and Dettmers et al. 2023 (arXiv
2305.14314) take it at batches of 8 and 16."""
HIGHEST_OVER_USUAL = 50.0
"""What a rate may be over the usual one at most: 1e-3 is what pre-training begins with, and overwrites the weights rather than
adapts them."""
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
    model = tree.get("model")
    has_adapters = isinstance(model, Mapping) and model.get("peft") is not None
    stages = tree.get("stages", [{"type": stage.type} for stage in default_stages])
    return {**tree, "optimizer": _optimizer(optimizer, usual_rate(has_adapters)), "stages": _stages(stages)}


def usual_rate(has_adapters: bool) -> float:
    """Return AdamW's learning rate where a study file names none; of LoRA's matrices if the model has them."""
    return LORA_RATE if has_adapters else FINETUNE_RATE


def _optimizer(given: object, rate: float) -> object:
    if not isinstance(given, Mapping):
        return given
    defaults = dict(_FINETUNE["optimizer"])
    if given.get("target"):  # it has a decay of its own
        del defaults["weight_decay"]
    if "lr" in given:
        return {**defaults, **given}
    if given.get("type", "adamw") != "adamw" or given.get("target"):
        raise ValueError("regime: finetune has a default optimizer.lr for adamw alone; set optimizer.lr")
    return {**defaults, "lr": rate, **given}


def _stages(given: object) -> object:
    if not isinstance(given, list | tuple):
        return given
    return [{**_FINETUNE.get(str(one.get("type")), {}), **one} if isinstance(one, Mapping) else one for one in given]
