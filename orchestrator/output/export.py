"""Writes a recommendation as another trainer's configuration: text to paste, and what that trainer cannot do."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace

from pydantic import JsonValue

from orchestrator.output.recommendation import Recommendation
from trainers.config import ActivationCheckpointing, OptimizerConfig, Schedule, num_steps


def export(recommendation: Recommendation, to: str) -> str:
    """Return the text for one of hf, lightning, torchtitan, deepspeed, nanogpt. Raises ValueError for another name."""
    writers: dict[str, Callable[[Recommendation], str]] = {
        "hf": _hf,
        "lightning": _lightning,
        "torchtitan": _torchtitan,
        "deepspeed": _deepspeed,
        "nanogpt": _nanogpt,
    }
    if to not in writers:
        raise ValueError(f"cannot export to '{to}'; choose one of: {', '.join(writers)}")
    return writers[to](recommendation)


def _steps_of(samples: int, recommendation: Recommendation) -> int:
    """Return the optimizer steps that reach so many samples."""
    return num_steps(samples, _batches(recommendation))


def _batches(recommendation: Recommendation) -> list[tuple[int, int]]:
    """Return the sample count at which each phase begins, and its effective batch."""
    r = recommendation
    per_accumulation_step = r.micro_batch_size * r.world_size
    grown = [(p.from_samples, p.gradient_accumulation_steps * per_accumulation_step) for p in r.ramp or ()]
    return [(0, r.effective_batch_size), *grown]


def _max_steps(recommendation: Recommendation) -> int:
    return _steps_of(recommendation.sample_budget, recommendation)


def _warmup_steps(recommendation: Recommendation) -> int:
    return _steps_of(recommendation.warmup_samples, recommendation)


def _decay_steps(recommendation: Recommendation) -> int:
    """Return the steps of the linear anneal; 0 where the schedule has none."""
    schedule, budget = recommendation.schedule, recommendation.sample_budget
    if schedule.type != "warmup_stable_decay":
        return 0
    if recommendation.ramp:
        return _max_steps(recommendation) - _steps_of(math.floor((1 - schedule.decay) * budget), recommendation)
    return _steps_of(math.ceil(schedule.decay * budget), recommendation)


def _header(recommendation: Recommendation) -> list[str]:
    r = recommendation
    return [
        f"batchscout: {' '.join(r.verdict.split())}",
        f"effective batch {r.effective_batch_size} = micro-batch {r.micro_batch_size} x accumulation "
        f"{r.gradient_accumulation_steps} x ranks {r.world_size}; the micro-batch is per rank",
        f"steps are {_counted(r)}: budget {r.sample_budget} -> {_max_steps(r)}, warm-up {r.warmup_samples} -> "
        f"{_warmup_steps(r)}",
        *(["its float32 is TF32: call torch.set_float32_matmul_precision('high')"] if r.allow_tf32 else []),
        *(
            [f"the optimizer's parameters are in the groups of {groups}"]
            if (groups := r.optimizer.param_groups)
            else []
        ),
        *(
            f"the chosen run has {name} {value:g} in the model: train with it"
            for name, value in (r.model_changes or {}).items()
        ),
    ]


def _counted(recommendation: Recommendation) -> str:
    batch = recommendation.effective_batch_size
    return f"counted as the batch grows from {batch}" if recommendation.ramp else f"ceil(samples / {batch})"


def _without_ramp(recommendation: Recommendation, target: str) -> tuple[Recommendation, list[str]]:
    """Return the run whose batch stays, for a target that cannot let it grow, and what is lost by that."""
    if not recommendation.ramp:
        return recommendation, []
    lost = f"the batch is to grow, which cannot be said in {target}: here it stays at {recommendation.effective_batch_size}"
    return replace(recommendation, ramp=None), [lost, *_phase_notes(recommendation)]


def _phase_notes(recommendation: Recommendation) -> list[str]:
    """Return where the batch grows to what."""
    ramp, batches = recommendation.ramp or (), _batches(recommendation)[1:]
    return [
        f"from {samples} samples, after step {_steps_of(samples, recommendation)}: accumulation "
        f"{phase.gradient_accumulation_steps}, effective batch {batch}, learning rate {phase.learning_rate:.6g}"
        for phase, (samples, batch) in zip(ramp, batches, strict=True)
    ]


def _comments(lines: list[str]) -> list[str]:
    return [f"# {line}" for line in lines]


def _cannot_be_said(optimizer: OptimizerConfig, target: str) -> str:
    kwargs = f" with {optimizer.kwargs}" if optimizer.kwargs else ""
    return f"optimizer {optimizer.name}{kwargs} cannot be said in {target}"


def _checkpointing_note(recommendation: Recommendation, target: str, nearest: str) -> list[str]:
    """Return what is lost where the target knows only full checkpointing or none."""
    mode = recommendation.activation_checkpointing
    if mode in ("none", "full"):
        return []
    meant = f"a memory budget of {mode}" if isinstance(mode, float) else f"'{mode}'"
    return [f"activation_checkpointing {meant} cannot be said in {target}: {nearest}"]


def _hf(recommendation: Recommendation) -> str:
    r, lost = _without_ramp(recommendation, "TrainingArguments")
    keys: dict[str, JsonValue] = {
        "output_dir": "output",
        "per_device_train_batch_size": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps,
        "max_steps": _max_steps(r),
        "learning_rate": r.learning_rate,
        "warmup_steps": _warmup_steps(r),
        **_hf_schedule(r),
        **_hf_optimizer(r.optimizer),
        **({"bf16": True} if r.precision == "bfloat16" else {}),
        **({"fp16": True} if r.precision == "float16" else {}),
        **({"torch_compile": True} if r.compile else {}),
        **({} if r.activation_checkpointing == "none" else {"activation_checkpointing": True}),
        "average_tokens_across_devices": True,
        "seed": r.seed,
    }
    notes = [*_header(r), *lost, f"start it with: torchrun --nproc_per_node={r.world_size} train.py", *_hf_notes(r)]
    lines = [f"    {key}={value!r}," for key, value in keys.items()]
    return _text(
        [*_comments(notes), "from transformers import TrainingArguments", "", "args = TrainingArguments(", *lines, ")"]
    )


def _hf_notes(recommendation: Recommendation) -> list[str]:
    notes = _checkpointing_note(
        recommendation, "TrainingArguments", "activation_checkpointing=True is full: slower, and less memory"
    )
    if recommendation.optimizer.type in ("muon", "adafactor", "own") or recommendation.optimizer.kwargs:
        notes.append(
            f"{_cannot_be_said(recommendation.optimizer, 'TrainingArguments')}: build it yourself, and hand it to the Trainer, "
            "optimizers=(optimizer, schedule)"
        )
    if recommendation.activation_checkpointing != "none":
        notes.append("older transformers call activation_checkpointing gradient_checkpointing")
    return notes


def _hf_schedule(recommendation: Recommendation) -> dict[str, JsonValue]:
    if recommendation.schedule.type == "cosine":
        return {"lr_scheduler_type": "cosine"}
    if decay_steps := _decay_steps(recommendation):
        kwargs = {"num_decay_steps": decay_steps, "decay_type": "linear"}
        return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
    return {"lr_scheduler_type": "constant_with_warmup"}


def _hf_optimizer(optimizer: OptimizerConfig) -> dict[str, JsonValue]:
    beta1, beta2 = optimizer.betas
    shared: dict[str, JsonValue] = {
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_gradient_norm or 0.0,  # transformers' word for never
    }
    if optimizer.type == "sgd":
        # transformers takes the SGD's own keys from optim_args alone.
        return {"optim": "sgd", "optim_args": f"momentum={beta1},weight_decay={optimizer.weight_decay}", **shared}
    names = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_torch_8bit", "adamw_4bit": "adamw_torch_4bit"}
    if optimizer.type not in names:
        return shared
    return {
        "optim": names[optimizer.type],
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_epsilon": optimizer.eps,
        **shared,
    }


def _lightning(recommendation: Recommendation) -> str:
    r, lost = (
        (recommendation, []) if _can_grow_in_lightning(recommendation) else _without_ramp(recommendation, "Lightning")
    )
    precision = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}[r.precision]
    return _text(
        [
            *_comments([*_header(r), *lost, *_lightning_notes(r)]),
            "import math",
            "",
            "import lightning as L",
            "import torch",
            "",
            *_growing_callback(r),
            f"L.seed_everything({r.seed})",
            "trainer = L.Trainer(",
            *(["    callbacks=[GrowingBatch()],"] if r.ramp else []),
            f"    devices={r.world_size},",
            f"    accumulate_grad_batches={r.gradient_accumulation_steps},",
            f"    max_steps={_max_steps(r)},",
            f"    precision={precision!r},",
            f"    gradient_clip_val={r.optimizer.max_gradient_norm},",
            ")",
            f"micro_batch_size = {r.micro_batch_size}  # DataLoader(..., batch_size=micro_batch_size)",
            "",
            "",
            "def learning_rate_factor(step):",
            *_factor_lines(r),
            "",
            "",
            "def configure_optimizers(self):  # a method of your LightningModule",
            *_configure_lines(r),
        ]
    )


def _can_grow_in_lightning(recommendation: Recommendation) -> bool:
    """True if each phase begins where a step of the one before ends, and at a multiple of its own batch: Lightning steps
    after every so many batches since the epoch's first."""
    phases = itertools.pairwise(_batches(recommendation))
    meet = [(end - begin) % batch == 0 and end % grown == 0 for (begin, batch), (end, grown) in phases]
    return all(meet) and recommendation.schedule.type == "warmup_stable_decay"


def _growing_callback(recommendation: Recommendation) -> list[str]:
    """Return the phases and a callback that changes the accumulation with them; nothing where the batch stays."""
    r = recommendation
    if not r.ramp:
        return []
    first = f"(0, 0, {r.gradient_accumulation_steps}, 1.0)"
    phases = [
        f"({_steps_of(p.from_samples, r)}, {p.from_samples}, {p.gradient_accumulation_steps}, "
        f"{p.learning_rate / r.learning_rate!r})"
        for p in r.ramp
    ]
    return [
        "# (first optimizer step, first sample, accumulate_grad_batches, learning rate over the first phase's)",
        f"PHASES = [{', '.join((first, *phases))}]",
        "",
        "",
        "def phase_of(step):",
        "    return max(phase for phase in PHASES if phase[0] <= step)",
        "",
        "",
        "class GrowingBatch(L.Callback):",
        "    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):",
        "        trainer.accumulate_grad_batches = phase_of(trainer.global_step)[2]",
        "",
        "",
    ]


def _lightning_notes(recommendation: Recommendation) -> list[str]:
    notes = ["Lightning averages over micro-batches: right only where each holds equally many targets"]
    if recommendation.ramp:
        largest = _batches(recommendation)[-1][1]
        notes.append(
            f"the batch grows: let every epoch have a multiple of {largest} samples, or steps at its end are smaller"
        )
    if recommendation.activation_checkpointing != "none":
        notes.append(
            f"Trainer has no key for activation_checkpointing ({recommendation.activation_checkpointing}): "
            "wrap the blocks of your model in torch.utils.checkpoint"
        )
    if recommendation.compile:
        notes.append("Trainer has no key for compile: call model.compile() before trainer.fit(model)")
    return notes


def _factor_lines(recommendation: Recommendation) -> list[str]:
    """Return the body of a function that is the study's schedule; its `step` counts the steps that have ended."""
    if recommendation.ramp:
        return _growing_factor_lines(recommendation)
    total, warmup, decay = _max_steps(recommendation), _warmup_steps(recommendation), _decay_steps(recommendation)
    lines = [f"    warmup = min(1.0, (step + 1) / {max(1, warmup)})"]
    if recommendation.schedule.type == "cosine":
        progress = f"min(1.0, max(0.0, (step + 1 - {warmup}) / {total + 1 - warmup}))"
        return [*lines, f"    return min(warmup, 0.5 * (1 + math.cos(math.pi * {progress})))"]
    if decay:
        return [*lines, f"    return min(warmup, max(0.0, ({total} - step) / {decay + 1}))"]
    return [*lines, "    return warmup"]


def _growing_factor_lines(recommendation: Recommendation) -> list[str]:
    """Return the body where the batch grows: warm-up and anneal are counted in samples."""
    r = recommendation
    last, anneal = _batches(r)[-1][1], r.schedule.decay * r.sample_budget
    return [
        "    first_step, first_sample, accumulation, ratio = phase_of(step)",
        f"    samples = first_sample + (step + 1 - first_step) * accumulation * {r.micro_batch_size * r.world_size}",
        f"    warmup = min(1.0, samples / {max(1, r.warmup_samples)})",
        f"    return ratio * min(warmup, max(0.0, ({r.sample_budget + last} - samples) / {anneal + last!r}))"
        if anneal
        else "    return ratio * warmup",
    ]


def _configure_lines(recommendation: Recommendation) -> list[str]:
    optimizer, rate = recommendation.optimizer, recommendation.learning_rate
    return [
        *(_own_lines(optimizer, rate) if optimizer.type == "own" else _built_in_lines(optimizer, rate)),
        "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)",
        "    return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': schedule, 'interval': 'step'}}",
    ]


def _built_in_lines(optimizer: OptimizerConfig, rate: float) -> list[str]:
    """Return the lines that build it as the study did."""
    beta1, beta2 = optimizer.betas
    decay = optimizer.weight_decay
    of_the_rest = {"weight_decay": decay} if optimizer.param_groups else {}
    further = "".join(f", {name}={value!r}" for name, value in {**of_the_rest, **optimizer.kwargs}.items())
    of_adam = f"lr={rate!r}, betas=({beta1}, {beta2}), eps={optimizer.eps!r}"
    grouped = (
        _own_groups(optimizer.param_groups, rate)
        if optimizer.param_groups
        else [
            "    matrices = [p for p in self.parameters() if p.dim() >= 2]",
            "    others = [p for p in self.parameters() if p.dim() < 2]",
            f"    groups = [{{'params': matrices, 'weight_decay': {decay}}}, {{'params': others, 'weight_decay': 0.0}}]",
        ]
    )
    match optimizer.type:
        case "sgd":
            return [*grouped, f"    optimizer = torch.optim.SGD(groups, lr={rate!r}, momentum={beta1}{further})"]
        case "adafactor":
            return [*grouped, f"    optimizer = torch.optim.Adafactor(groups, lr={rate!r}{further})"]
        case "adamw_8bit" | "adamw_4bit":
            name = {"adamw_8bit": "AdamW8bit", "adamw_4bit": "AdamW4bit"}[optimizer.type]
            return [
                "    from torchao.optim import " + name,
                "",
                *grouped,
                f"    optimizer = {name}(groups, {of_adam}{further})",
            ]
        case "muon":
            return _muon_lines(optimizer, rate, of_adam)
        case _:
            return [*grouped, f"    optimizer = torch.optim.AdamW(groups, {of_adam}{further})"]


def _muon_lines(optimizer: OptimizerConfig, rate: float, of_adam: str) -> list[str]:
    """Return the lines that build the two optimizers of muon."""
    decay, arguments = optimizer.weight_decay, {"adjust_lr_fn": "match_rms_adamw"} | optimizer.kwargs
    further = "".join(f", {name}={value!r}" for name, value in arguments.items())
    return [
        "    from trainers.step.optimizers import Together  # of batchscout: it steps both as one",
        "",
        "    blocks = self.model.blocks  # the ModuleList of your model's repeated layers",
        "    inner = {id(p) for p in blocks.parameters() if p.dim() == 2}",
        "    matrices = [p for p in self.parameters() if id(p) in inner]",
        "    others = [p for p in self.parameters() if id(p) not in inner]",
        f"    groups = [{{'params': [p for p in others if p.dim() >= 2], 'weight_decay': {decay}}}, "
        "{'params': [p for p in others if p.dim() < 2], 'weight_decay': 0.0}]",
        f"    muon = torch.optim.Muon(matrices, lr={rate!r}, weight_decay={decay}{further})",
        f"    optimizer = Together([muon, torch.optim.AdamW(groups, {of_adam})])",
    ]


def _own_lines(optimizer: OptimizerConfig, rate: float) -> list[str]:
    assert optimizer.target, "it was checked"
    further = "".join(f", {key}={value!r}" for key, value in optimizer.kwargs.items())
    made = optimizer.target.partition(":")[2]
    if not optimizer.param_groups:
        return [_import_of(optimizer.target), "", f"    optimizer = {made}(self.parameters(), lr={rate!r}{further})"]
    return [
        _import_of(optimizer.target),
        *_own_groups(optimizer.param_groups, rate),
        f"    optimizer = {made}(groups, lr={rate!r}{further})",
    ]


def _own_groups(path: str, rate: float) -> list[str]:
    """Return the lines that make the groups of the user's callable, the first of which trains at the recommended rate."""
    return [
        _import_of(path),
        "",
        f"    groups = {path.partition(':')[2]}(self.model)",
        f"    scale = {rate!r} / groups[0].get('lr', {rate!r})  # the first group trains at the recommended rate",
        f"    groups = [{{**group, 'lr': scale * group.get('lr', {rate!r})}} for group in groups]",
    ]


def _import_of(path: str) -> str:
    module, _, name = path.partition(":")
    return f"    from {module} import {name.partition('.')[0]}"


def _torchtitan(recommendation: Recommendation) -> str:
    """Return the TOML of release 0.2.2: it is the last that counts the batch in samples and reads TOML."""
    r, lost = _without_ramp(recommendation, "torchtitan")
    optimizer = r.optimizer
    beta1, beta2 = optimizer.betas
    clip = optimizer.max_gradient_norm
    half = r.precision != "float32"
    sections: dict[str, dict[str, JsonValue]] = {
        "training": {
            "local_batch_size": r.micro_batch_size,
            "global_batch_size": r.effective_batch_size,
            "steps": _max_steps(r),
            "max_norm": math.inf if clip is None else clip,
            "mixed_precision_param": "bfloat16" if half else "float32",
        },
        "parallelism": {"data_parallel_replicate_degree": r.world_size, "data_parallel_shard_degree": 1},
        "optimizer": {
            "name": "AdamW",
            "lr": r.learning_rate,
            "beta1": beta1,
            "beta2": beta2,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        },
        "lr_scheduler": {"warmup_steps": _warmup_steps(r), **_torchtitan_decay(r.schedule)},
        "activation_checkpoint": _torchtitan_checkpointing(r.activation_checkpointing),
        "compile": {"enable": bool(r.compile)},
        "debug": {"seed": r.seed},
    }
    return _text([*_comments([*_header(r), *lost, *_torchtitan_notes(r)]), *_toml(sections)])


def _torchtitan_decay(schedule: Schedule) -> dict[str, JsonValue]:
    if schedule.type == "cosine":
        return {"decay_type": "cosine"}
    return {"decay_ratio": schedule.decay if schedule.type == "warmup_stable_decay" else 0.0}


def _torchtitan_checkpointing(mode: ActivationCheckpointing) -> dict[str, JsonValue]:
    if isinstance(mode, float):
        return {"mode": "memory_budget", "memory_budget": mode}
    return {"mode": mode, **({"selective_ac_option": "op"} if mode == "selective" else {})}


def _torchtitan_notes(recommendation: Recommendation) -> list[str]:
    r = recommendation
    notes = [
        "torchtitan 0.2.2, --job.config_file; its main branch since configures in Python and counts the batch in tokens",
        "set training.seq_len to the sequence length of the study's data",
        "torchtitan decays every parameter; the study decayed those of two or more dimensions",
    ]
    if r.activation_checkpointing == "selective":
        notes.append("torchtitan recomputes every second matrix product, the study none: expect less memory and speed")
    if r.precision == "float16":
        notes.append("precision float16 cannot be said in torchtitan: bfloat16 stands in its place")
    if r.optimizer.type != "adamw" or r.optimizer.kwargs:
        notes.append(f"{_cannot_be_said(r.optimizer, 'torchtitan')}: AdamW is another optimizer")
    return notes


def _toml(sections: dict[str, dict[str, JsonValue]]) -> list[str]:
    lines: list[str] = []
    for name, values in sections.items():
        # Numbers, booleans and plain words are the same in JSON and TOML, but for infinity.
        entries = [f"{key} = {'inf' if value == math.inf else json.dumps(value)}" for key, value in values.items()]
        lines += ["", f"[{name}]", *entries]
    return lines


def _deepspeed(recommendation: Recommendation) -> str:
    """Return valid JSON. It has no comments: they stand under `_batchscout`, a key that DeepSpeed ignores."""
    r = recommendation
    config: dict[str, JsonValue] = {
        "_batchscout": [*_header(r), *_deepspeed_notes(r)],
        "train_batch_size": r.effective_batch_size,
        "train_micro_batch_size_per_gpu": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps,
        "gradient_clipping": r.optimizer.max_gradient_norm or 0.0,
        "bf16": {"enabled": r.precision == "bfloat16"},
        "fp16": {"enabled": r.precision == "float16"},
        "optimizer": _deepspeed_optimizer(r),
        "scheduler": _deepspeed_schedule(r),
        **({} if r.activation_checkpointing == "none" else {"activation_checkpointing": _DEEPSPEED_CHECKPOINTING}),
    }
    return json.dumps(config, indent=2) + "\n"


_DEEPSPEED_CHECKPOINTING: dict[str, JsonValue] = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
}


def _deepspeed_optimizer(recommendation: Recommendation) -> dict[str, JsonValue]:
    optimizer = recommendation.optimizer
    params: dict[str, JsonValue] = {"lr": recommendation.learning_rate, "weight_decay": optimizer.weight_decay}
    if optimizer.type == "sgd":
        return {"type": "SGD", "params": params | {"momentum": optimizer.betas[0]}}
    # Of another one this is only the nearest: the notes say so.
    return {"type": "AdamW", "params": params | {"betas": list(optimizer.betas), "eps": optimizer.eps}}


def _deepspeed_schedule(recommendation: Recommendation) -> dict[str, JsonValue]:
    warmup = {"warmup_num_steps": max(1, _warmup_steps(recommendation)), "warmup_type": "linear"}
    if recommendation.schedule.type == "cosine":
        params = {"total_num_steps": _max_steps(recommendation), "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
        return {"type": "WarmupCosineLR", "params": params | warmup}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": recommendation.learning_rate}
    return {"type": "WarmupLR", "params": rates | warmup}


def _deepspeed_notes(recommendation: Recommendation) -> list[str]:
    r = recommendation
    notes = [
        f"DeepSpeed takes no number of steps: end your loop after {_max_steps(r)} optimizer steps",
        "DeepSpeed decays every parameter; the study decayed those of two or more dimensions: pass it two groups",
        "DeepSpeed averages over micro-batches: right only where each holds equally many targets",
        f"the seed ({r.seed}) is set in your script",
        *_deepspeed_ramp(r),
    ]
    if r.optimizer.type not in ("adamw", "sgd") or r.optimizer.kwargs:
        notes.append(
            f"{_cannot_be_said(r.optimizer, 'DeepSpeed')}: AdamW stands in its place; build yours, remove the key optimizer, and hand "
            "it to deepspeed.initialize(optimizer=...)"
        )
    if decay_steps := _decay_steps(r):
        notes.append(
            f"schedule warmup_stable_decay cannot be said in DeepSpeed: the last {decay_steps} steps were annealed "
            "linearly to zero, do so in your script"
        )
    if r.precision != "float32":
        notes.append("the study kept float32 weights under autocast; bf16 and fp16 here keep half-precision ones")
    if r.compile:
        notes.append("compile cannot be said in DeepSpeed's JSON: call engine.compile() after deepspeed.initialize")
    if r.activation_checkpointing != "none":
        notes.append(
            f"activation_checkpointing ({r.activation_checkpointing}) works only in a model that calls "
            "deepspeed.checkpointing.checkpoint on its blocks, which recomputes them fully"
        )
    return notes


def _deepspeed_ramp(recommendation: Recommendation) -> list[str]:
    """Return the calls that let the batch grow."""
    r = recommendation
    return [
        f"the batch grows: after optimizer step {_steps_of(samples, r)} call engine.set_train_batch_size({batch}), and from "
        f"there on set the learning rate to {phase.learning_rate / r.learning_rate:.6g} x what the schedule says"
        for phase, (samples, batch) in zip(r.ramp or (), _batches(r)[1:], strict=True)
    ]


def _nanogpt(recommendation: Recommendation) -> str:
    r, lost = _without_ramp(recommendation, "nanoGPT")
    beta1, beta2 = r.optimizer.betas
    keys: dict[str, JsonValue] = {
        "batch_size": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps * r.world_size,
        "max_iters": _max_steps(r),
        "learning_rate": r.learning_rate,
        "decay_lr": r.schedule.type != "constant",
        "warmup_iters": _warmup_steps(r),
        "lr_decay_iters": _max_steps(r),
        "min_lr": 0.0,
        "weight_decay": r.optimizer.weight_decay,
        "beta1": beta1,
        "beta2": beta2,
        "grad_clip": r.optimizer.max_gradient_norm or 0.0,  # nanoGPT's word for never
        "dtype": r.precision,
        "compile": bool(r.compile),
    }
    notes = [*_header(r), *lost, *_nanogpt_notes(r)]
    return _text([*_comments(notes), *[f"{key} = {value!r}" for key, value in keys.items()]])


def _nanogpt_notes(recommendation: Recommendation) -> list[str]:
    r = recommendation
    notes = ["gradient_accumulation_steps counts all ranks here: train.py divides it by the world size"]
    if r.activation_checkpointing != "none":
        notes.append(
            f"nanoGPT has no activation_checkpointing ({r.activation_checkpointing}): "
            "without it this micro-batch may not fit into memory"
        )
    if r.schedule.type == "warmup_stable_decay":
        notes.append("schedule warmup_stable_decay cannot be said in nanoGPT: it decays by a cosine after warm-up")
    if r.schedule.type == "constant" and r.warmup_samples:
        notes.append("nanoGPT warms up only where it decays: with decay_lr = False warmup_iters has no effect")
    if r.optimizer.type != "adamw" or r.optimizer.kwargs:
        notes.append(f"{_cannot_be_said(r.optimizer, 'nanoGPT')}: it always uses AdamW")
    elif r.optimizer.eps != 1e-8:
        notes.append(f"eps {r.optimizer.eps} cannot be said in nanoGPT: it uses 1e-8")
    return [*notes, f"nanoGPT always seeds with 1337; the study's seed was {r.seed}"]


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
