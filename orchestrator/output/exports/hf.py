"""The TrainingArguments of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import JsonValue

from batchscout.orchestrator.output.exports.counted import (
    decay_steps,
    has_own_length,
    is_about_one,
    max_steps,
    times_as_many_steps,
    warmup_steps,
)
from batchscout.orchestrator.output.exports.notes import (
    arguments_text,
    cannot_be_said,
    checkpointing_note,
    decay_note,
    has_float32_weights,
    optimizer_notes,
    passes_note,
    table_note,
    text_of,
    tokens_note,
    without_ramp,
)
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import OptimizerConfig
from batchscout.trainers.sources.settings import GROUPS, is_secret


def written(r: Recommendation) -> str:
    r, lost = without_ramp(r, "TrainingArguments")
    keys = arguments_of(r, "transformers")
    if r.activation_checkpointing == "none":
        del keys["gradient_checkpointing"]
    return text_of(
        r,
        [*lost, *arguments_notes(r, "TrainingArguments", "transformers")],
        [
            *call_lines(r, "transformers", "TrainingArguments", keys),
            *adapter_lines(r, "model = get_peft_model(model, ", ")", "LoraConfig, get_peft_model"),
        ],
        has_own_groups=bool(own_arguments(r, "transformers")),
    )


def adapter_lines(r: Recommendation, before: str, after: str, names: str) -> list[str]:
    """Return the lines that give the model the study's adapters, between `before` and `after`; none where it had none."""
    if r.peft is None:
        return []
    return ["", f"from peft import {names}", "", f"{before}LoraConfig({arguments_text(r.peft)}){after}"]


def arguments_of(r: Recommendation, library: Library) -> dict[str, JsonValue]:
    """Return the keyword arguments of TrainingArguments that are the recommendation's run, whose batch stays: of a study of such a Trainer
    its own, with other numbers. library: whose arguments they are."""
    own = own_arguments(r, library)
    changed = {
        "per_device_train_batch_size": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps,
        **_length(r, own),
        **_learning_rate(r, own),
        **_schedule(r, own),
        **_optimizer(r.optimizer, own),
        **({"bf16": True} if r.precision == "bfloat16" else {}),
        **({"fp16": True} if r.precision == "float16" else {}),
        **({"torch_compile": True} if r.compile else {}),
        **_memory(r),
        "average_tokens_across_devices": True,
    }
    others = {name: value for name, value in own.items() if name not in _DECIDED}
    return {"output_dir": "output", **({} if own else {"seed": r.seed}), **changed, **others}


Library = Literal["transformers", "trl"]
_DECIDED = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "optim",
    "optim_args", "bf16", "fp16", "torch_compile", "torch_compile_backend", "torch_compile_mode", "fsdp", "fsdp_config",
    "activation_checkpointing", "gradient_checkpointing", "average_tokens_across_devices", "auto_find_batch_size",
)  # fmt: skip
"""What a recommendation decides, and what is the study's own: none of it is left as a Trainer had it."""


def own_arguments(r: Recommendation, library: Library) -> dict[str, JsonValue]:
    """Return what the Trainer that was studied was made with; nothing where it was none of this library."""
    arguments = r.own_run.arguments if r.own_run and r.own_run.library == library else {}
    # Journals of earlier versions may have one.
    return {name: value for name, value in arguments.items() if not is_secret(name)}


def _learning_rate(r: Recommendation, own: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the rate, of which the first group that the Trainer makes may have a share; none where it is given its optimizer."""
    factor = r.own_run.rate_factor if own and r.own_run else 1.0
    if factor is None:
        return {}
    return {"learning_rate": r.learning_rate if abs(factor - 1) < 1e-6 else float(f"{r.learning_rate * factor:.6g}")}


def _length(r: Recommendation, own: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the length of the run: in epochs where the Trainer goes by them and the run takes as many."""
    if _goes_by_epochs(r, own):
        return {"num_train_epochs": own["num_train_epochs"]}
    return {"max_steps": max_steps(r)}


def _goes_by_epochs(r: Recommendation, own: Mapping[str, JsonValue]) -> bool:
    """max_steps comes before epochs, as with transformers."""
    return has_own_length(r) and "num_train_epochs" in own and "max_steps" not in own


def call_lines(r: Recommendation, library: Library, usual: str, keys: dict[str, JsonValue]) -> list[str]:
    """Return the call that makes the arguments. usual: the name of their class where the Trainer has none of its own."""
    module, name = _class_of(r, library, usual)
    imported = [f"from {module} import {name}", ""] if _is_imported(module) else []
    return [*imported, f"args = {name}(", *(f"    {key}={value!r}," for key, value in keys.items()), ")"]


def _class_of(r: Recommendation, library: Library, usual: str) -> tuple[str, str]:
    """Return the module and the name of the class of the arguments: that of the Trainer's own where it is known."""
    path = r.own_run.arguments_class if r.own_run and own_arguments(r, library) else None
    module, _, name = (path or f"{library}:{usual}").partition(":")
    return module, name


def _is_imported(module: str) -> bool:
    """False of a user's own module, which may be the one that the text is put into: it cannot import itself."""
    return module.partition(".")[0] in get_args(Library)


def arguments_notes(r: Recommendation, target: str, library: Library) -> list[str]:
    """Return how to start a run, and what these arguments cannot say. target: what they are called."""
    own = own_arguments(r, library)
    notes = [f"start it with: torchrun --nproc_per_node={r.world_size} train.py"]
    if own:
        notes.append(f"these are your Trainer's {target} with other numbers: replace yours with them")
    module, name = _class_of(r, library, target)
    if not _is_imported(module):
        notes.append(f"{name} is your own class, of {module}: put this where it is defined or imported")
    if own and r.own_run and r.own_run.not_plain:
        notes.append(
            f"{', '.join(r.own_run.not_plain)}: add yours, whose values are secret or cannot be written as text"
        )
    if not own and has_float32_weights(r):
        notes.append(
            "the study's weights were float32: where you load the model by from_pretrained, give it dtype=torch.float32"
        )
    if not own and r.optimizer.weight_decay:
        notes += decay_note(r, "transformers goes by names, and decays all parameters but biases and norms")
    if not _goes_by_epochs(r, own):
        notes += passes_note(r, target)
    factor = r.own_run.rate_factor if own and r.own_run else 1.0
    if factor is None:
        notes.append(
            f"your Trainer is given its optimizer, which {target} do not change: give its first parameter group the learning rate "
            f"{r.learning_rate:.6g}, and the others as many times theirs"
        )
        notes += optimizer_notes(r, "yours")
    elif abs(factor - 1) > 1e-6:
        notes.append(
            f"the learning rate {r.learning_rate:.6g} is that of your first parameter group, which has learning_rate / {factor:.4g}"
        )
    if own and r.own_run and r.own_run.has_schedule:
        times, made = times_as_many_steps(r) or 1.0, f"make it for {max_steps(r)} steps"
        if not _keeps_schedule(r, own):
            made += ", as lr_scheduler_type and what is beside it say below"
        elif not is_about_one(times):
            made += f", and what it counts in steps, such as a warm-up, {times:.3g} times as long"
        notes.append(f"your Trainer is given its schedule, which {target} do not change: {made}")
    notes += checkpointing_note(r, target, "gradient_checkpointing=True is full: slower, and less memory")
    if not _keeps_schedule(r, own):
        notes += table_note(r, target)
    optimizer, is_its_own = r.optimizer, own and r.optimizer.param_groups == GROUPS
    if not is_its_own and (optimizer.type in ("muon", "adafactor", "own") or has_unsaid_kwargs(optimizer)):
        notes.append(
            f"{cannot_be_said(optimizer, target)}: build it yourself, and hand it to the Trainer, "
            "optimizers=(optimizer, schedule)"
        )
    notes += tokens_note(
        r,
        f"{target} has no budget of tokens; train_sampling_strategy='batch_rebalance' is the nearest, it evens out the padding "
        "of a step's micro-batches and keeps their number (older transformers: group_by_length=True, which also changes the order)",
    )
    if r.activation_checkpointing != "none":
        notes.append(
            "gradient_checkpointing is also called activation_checkpointing from transformers 5.23 on, and only that from 6 on"
        )
    return notes


def _memory(r: Recommendation) -> dict[str, JsonValue]:
    """Return who recomputes activations: with shards FSDP does, or blocks would be gathered once more than they need."""
    recomputes = r.activation_checkpointing != "none"
    if r.parallel == "fsdp":
        return {
            "fsdp": True,
            "fsdp_config": {"version": 2, "activation_checkpointing": recomputes},
            "gradient_checkpointing": False,
        }
    return {"gradient_checkpointing": recomputes}


def _keeps_schedule(r: Recommendation, own: Mapping[str, JsonValue]) -> bool:
    """True if the study trained with the Trainer's own schedule."""
    return bool(own and r.own_run and r.own_run.schedule == r.schedule and r.warmup_samples == 0)


def _schedule(r: Recommendation, own: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    if _keeps_schedule(r, own):
        return _own_schedule(r, own)
    return schedule_keys(r, "lr_scheduler_type") | {"warmup_steps": warmup_steps(r)}


def schedule_keys(r: Recommendation, key: str) -> dict[str, JsonValue]:
    """Return the schedule as transformers knows it. key: what its name stands under."""
    if r.schedule.type == "cosine":
        return {key: "cosine"}
    if steps := decay_steps(r):
        kwargs: dict[str, JsonValue] = {"num_decay_steps": steps, "decay_type": "linear"}
        return {key: "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
    return {key: "constant_with_warmup"}


def _own_schedule(r: Recommendation, own: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the Trainer's own schedule; what it counts in steps, as the same share of the run, and its lowest rate, of the highest."""
    assert r.own_run, "it is that of its Trainer"
    own_rate = r.own_run.recipe.get("optimizer", {}).get("lr")
    before = max(1.0, (r.own_run.samples or 0) / r.own_run.samples_per_step)

    def steps(value: JsonValue) -> JsonValue:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:  # a share is one already
            return value
        return max(1, round(value * max_steps(r) / before))

    def in_this_run(name: str, value: JsonValue) -> JsonValue:
        if name.endswith("_steps") or name == "timescale":
            return steps(value)
        if name in ("min_lr", "lr_end") and isinstance(value, int | float) and own_rate:
            return float(f"{value * r.learning_rate / own_rate:.6g}")
        return value

    kwargs = own.get("lr_scheduler_kwargs")
    of_type: dict[str, JsonValue] = {"lr_scheduler_type": own["lr_scheduler_type"]}
    if isinstance(kwargs, dict):
        of_type["lr_scheduler_kwargs"] = {name: in_this_run(name, value) for name, value in kwargs.items()}
    if "warmup_ratio" in own:
        of_type["warmup_ratio"] = own["warmup_ratio"]
    return {**of_type, **({"warmup_steps": steps(own["warmup_steps"])} if "warmup_steps" in own else {})}


OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_torch_8bit", "adamw_4bit": "adamw_torch_4bit"}
"""What transformers calls them."""


def _optimizer(optimizer: OptimizerConfig, own: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return which optimizer it is and its numbers; own: what the Trainer was made with whose optimizer it may be."""
    is_its_own = bool(own) and optimizer.param_groups == GROUPS
    # 0 is transformers' word for never.
    clipped: dict[str, JsonValue] = {"max_grad_norm": optimizer.max_gradient_norm or 0.0}
    if is_its_own and optimizer.type == "own":
        return {name: own[name] for name in ("optim", "optim_args", *_NUMBERS) if name in own} | clipped
    beta1, beta2 = optimizer.betas
    shared = {"weight_decay": optimizer.weight_decay, **clipped}
    if optimizer.type == "sgd":
        told = ",".join(f"{name}={value}" for name, value in sgd_arguments(optimizer).items())
        return {"optim": "sgd", "optim_args": told, **shared}
    if optimizer.type not in OPTIMIZERS:
        return shared
    its_name = {name: own[name] for name in ("optim", "optim_args") if name in own and optimizer.type == "adamw"}
    return {
        "optim": OPTIMIZERS[optimizer.type],
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_epsilon": optimizer.eps,
        **shared,
        **(its_name if is_its_own else {}),
    }


def sgd_arguments(optimizer: OptimizerConfig) -> dict[str, JsonValue]:
    """Return the keys of SGD, which transformers takes from optim_args alone."""
    further = {name: value for name, value in optimizer.kwargs.items() if name in _OF_SGD}
    return {"momentum": optimizer.betas[0], "weight_decay": optimizer.weight_decay, **further}


def has_unsaid_kwargs(optimizer: OptimizerConfig) -> bool:
    """True where the optimizer is made with what transformers has no word for."""
    return bool(optimizer.kwargs.keys() - (_OF_SGD if optimizer.type == "sgd" else ()))


_OF_SGD = {"nesterov", "dampening"}
_NUMBERS = ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
