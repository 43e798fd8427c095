"""What is exported means the same training run in the target's own terms."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import itertools
import json
import math
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pydantic import JsonValue

from batchscout import load
from batchscout.orchestrator.output.exports import WRITERS, export
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import Schedule, TrialConfig
from batchscout.trainers.sources.of_transformers import own_arguments
from batchscout.trainers.sources.settings import GROUPS, OwnRun
from batchscout.trainers.step.learning_rate import learning_rate_of_step
from tests.support.command_line import Typed
from tests.support.every import for_every
from tests.support.example_study import ANSWER, example_recommendation
from tests.support.outcome import GOLDEN
from tests.support.ranks import on_two_ranks

TARGETS = ("torch", "hf", "accelerate", "lightning", "trl", "axolotl", "torchtitan", "deepspeed", "nanogpt")
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"type": "warmup_stable_decay", "decay": 0.25},
    {"type": "warmup_stable_decay", "decay": 0.0},
    {"type": "cosine", "decay": 0.2},
    {"type": "constant", "decay": 0.2},
    {"type": "table", "factors": [0.1, 1.0, 0.5, 0.25, 0.0]},
)


def recommendation(**changes: JsonValue) -> Recommendation:
    """Two ranks, and a budget and a warm-up that do not divide by the effective batch."""
    keys = {"world_size": 2, "effective_batch_size": 64, "sample_budget": 1000, "warmup_samples": 100}
    return example_recommendation(**(keys | changes))


# The older name, which all of transformers' versions from 4.56 to 5.24 take: the newer one is a TypeError before 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")


def with_optimizer(**changes: JsonValue) -> Recommendation:
    optimizer = recommendation().optimizer.model_dump(mode="json")
    return recommendation(optimizer=optimizer | changes)


def hf_arguments(text: str) -> dict[str, Any]:
    """The keyword arguments, checked against the signature of the real class; made of it where accelerate is there."""
    from transformers import TrainingArguments

    taken = dict(inspect.signature(TrainingArguments).parameters)
    given: dict[str, Any] = {}

    def stand_in(**kwargs: Any) -> None:
        given.update(kwargs)
        unknown = kwargs.keys() - taken.keys()
        assert not unknown
        assert "warmup_ratio" not in kwargs, "deprecated"

    module = ModuleType("transformers")
    module.__dict__["TrainingArguments"] = stand_in
    run(text, {"transformers": module})
    if importlib.util.find_spec("accelerate"):
        TrainingArguments(**given, use_cpu=True)
    return given


def run(text: str, modules: dict[str, ModuleType]) -> dict[str, Any]:
    """The names that the text defines, with these modules in place of the installed ones."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        names: dict[str, Any] = {}
        exec(compile(text, "exported", "exec"), names)
        return names
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def test_an_unknown_target_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=f"'keras'.*{', '.join(TARGETS)}"):
        export(recommendation(), "keras")


@for_every(to=TARGETS)
def test_every_target_says_where_its_steps_come_from(to: str) -> None:
    text = export(recommendation(), to)
    assert "ceil(samples / 64): budget 1000 -> 16, warm-up 100 -> 2" in text


@for_every(to=TARGETS)
def test_a_verdict_over_several_lines_stays_a_comment(to: str) -> None:
    answer = ANSWER | {"because": "first\nimport nothing_of_this_name"}
    text = export(recommendation(answer=answer), to)
    assert "import nothing_of_this_name" in text
    assert "\nimport nothing" not in text


def test_the_lines_of_the_answer_are_the_first_comments_without_the_command_that_wrote_them() -> None:
    found = load(GOLDEN / "quickstart").recommendation
    assert found is not None
    for next_one, num_lines in (("batchscout export RUN_DIR", 4), ("batchscout run RUN_DIR/study.yaml", 5)):
        answer = replace(found.answer, next=next_one)
        told = replace(found, answer=answer)
        lines = [f"# {label} {text}" for label, text in answer.lines().items()][:num_lines]
        assert export(told, "nanogpt").splitlines()[: num_lines + 1] == ["# batchscout", *lines]
        for run_dir in ("RUN_DIR", "runs/quickstart"):
            said = export(told, "nanogpt", run_dir)
            assert "batchscout export" not in said
            assert (next_one.replace("RUN_DIR", run_dir) in said) == (num_lines == 5)


@for_every(mode=["selective", 0.5], to=["hf", "accelerate", "lightning", "deepspeed", "nanogpt"])
def test_checkpointing_that_the_target_cannot_say_is_said_in_words(to: str, mode: str | float) -> None:
    said = "activation_checkpointing"
    assert any(
        said in line and str(mode) in line
        for line in export(recommendation(activation_checkpointing=mode), to).splitlines()
    )
    assert said not in export(recommendation(activation_checkpointing="none"), to)


def test_hf_arguments_are_the_recommendation() -> None:
    given = hf_arguments(export(recommendation(), "hf"))
    expected = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "max_steps": math.ceil(1000 / 64),
        "warmup_steps": math.ceil(100 / 64),
        "learning_rate": 6e-4,
        "lr_scheduler_type": "warmup_stable_decay",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "bf16": True,
        "torch_compile": True,
        "gradient_checkpointing": True,
        "average_tokens_across_devices": True,
        "seed": 0,
    }
    assert {key: given.get(key) for key in expected} == expected
    assert "fp16" not in given
    assert given["lr_scheduler_kwargs"] == {"num_decay_steps": math.ceil(0.2 * 1000 / 64), "decay_type": "linear"}


def test_hf_defaults_are_what_is_left_out() -> None:
    """No checkpointing, no compiling and float32 are said by silence: the defaults must be those."""
    from transformers import TrainingArguments

    given = hf_arguments(
        export(recommendation(activation_checkpointing="none", compile=False, precision="float32"), "hf")
    )
    left_out = {"bf16", "fp16", "torch_compile", "gradient_checkpointing"}
    assert left_out.isdisjoint(given)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    assert not any(defaults[key] for key in left_out)


@pytest.mark.parametrize("schedule", SCHEDULES[:-1])
def test_hf_builds_the_schedule(schedule: dict[str, Any]) -> None:
    """transformers' own scheduler stays near ours: it is one step behind, and anneals over one step less."""
    from transformers.optimization import get_scheduler

    r = recommendation(schedule=schedule, sample_budget=6400, warmup_samples=640)
    given = hf_arguments(export(r, "hf"))
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=r.learning_rate)
    kwargs = given.get("lr_scheduler_kwargs")
    steps = {"num_warmup_steps": given["warmup_steps"], "num_training_steps": given["max_steps"]}
    scheduler = get_scheduler(given["lr_scheduler_type"], optimizer, scheduler_specific_kwargs=kwargs, **steps)
    assert rates(optimizer, scheduler, 100) == pytest.approx(ours(r, 100), abs=0.11 * r.learning_rate)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """The learning rate of each step."""
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def ours(r: Recommendation, steps: int) -> list[float]:
    keys = ("micro_batch_size", "gradient_accumulation_steps", "world_size", "learning_rate", "warmup_samples")
    shared = {key: getattr(r, key) for key in (*keys, "sample_budget", "schedule")}
    shared["ramp"] = r.ramp or ()
    config = TrialConfig.model_validate({"model": {"target": "gpt"}, "data": {"target": "python_stdlib"}} | shared)
    first_samples = [0]
    for _ in range(steps - 1):
        split = config.split_in(config.phase_at(first_samples[-1]))
        first_samples.append(first_samples[-1] + split.effective_batch_size)
    return [learning_rate_of_step(config, first_sample) for first_sample in first_samples]


def test_hf_sgd_keeps_momentum_and_decay() -> None:
    given = hf_arguments(export(with_optimizer(type="sgd"), "hf"))
    assert given["optim"] == "sgd"
    assert given["optim_args"] == "momentum=0.9,weight_decay=0.1"
    assert not {key for key in given if key.startswith("adam")}


@for_every(groups=[GROUPS, None], told=[{"nesterov": True}, {"dampening": 0.1}, {"maximize": True}])
def test_transformers_makes_the_studys_sgd_or_is_told_that_it_cannot(
    groups: str | None, told: dict[str, JsonValue]
) -> None:
    optimizer = pytest.importorskip("transformers.trainer_optimizer")
    changes = {"type": "sgd", "param_groups": groups, "kwargs": told}
    r = of_trainer(optimizer=recommendation().optimizer.model_dump(mode="json") | changes)
    text, of_axolotl = export(r, "hf"), export(r, "axolotl")
    arguments = optimizer._parse_optim_args(hf_arguments(text)["optim_args"])
    _, made = optimizer._get_sgd(SimpleNamespace(optimizer_kwargs={}, optim_args=arguments))
    is_said = "maximize" not in told
    assert made == {"momentum": 0.9, "weight_decay": 0.1} | (told if is_said else {})
    assert yaml.safe_load(of_axolotl)["optim_args"] == made
    assert ("optimizer sgd with" in of_axolotl) == (not is_said)
    assert ("optimizer sgd with" in text) == (not is_said and groups is None)


def lightning_of(r: Recommendation) -> tuple[dict[str, Any], dict[str, Any]]:
    return lightning_text(export(r, "lightning"))


def lightning_text(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(Trainer's keyword arguments, the names defined), with names of Lightning's that only note what they are told."""
    given: dict[str, Any] = {}
    module = ModuleType("lightning")
    module.__dict__.update(
        Callback=object,
        Trainer=lambda **kwargs: given.update(kwargs),
        seed_everything=lambda seed: given.update(seed=seed),
    )
    return given, run(text, {"lightning": module})


def test_lightning_trainer_is_the_recommendation() -> None:
    given, names = lightning_of(recommendation(seed=7))
    assert given == {
        "devices": 2,
        "accumulate_grad_batches": 2,
        "max_steps": 16,
        "precision": "bf16-mixed",
        "gradient_clip_val": 1.0,
        "seed": 7,
    }
    assert names["micro_batch_size"] == 16


@for_every(schedule=SCHEDULES, warmup_samples=[0, 640])
def test_lightning_optimizer_has_the_learning_rates_of_the_study(schedule: dict[str, Any], warmup_samples: int) -> None:
    r = recommendation(schedule=schedule, sample_budget=6400, warmup_samples=warmup_samples)
    built = lightning_of(r)[1]["configure_optimizers"](torch.nn.Linear(2, 2))
    optimizer, scheduler = built["optimizer"], built["lr_scheduler"]
    assert scheduler["interval"] == "step"
    assert rates(optimizer, scheduler["scheduler"], 100) == pytest.approx(ours(r, 100), rel=1e-9)


@pytest.mark.parametrize("to", ["torch", "accelerate", "lightning"])
def test_a_table_keeps_the_warm_up_that_the_study_had_beside_it(to: str) -> None:
    table = {"type": "table", "factors": [1.0, 0.5, 0.1]}
    r = recommendation(schedule=table, sample_budget=6400, warmup_samples=640)
    text = export(r, to)
    factor = (lightning_text(text)[1] if to == "lightning" else run(text, {}))["learning_rate_factor"]
    assert [r.learning_rate * factor(step) for step in range(100)] == pytest.approx(ours(r, 100), rel=1e-9)


@pytest.mark.parametrize("trainer", sorted({*WRITERS} - {"script"}))
def test_no_trainer_is_given_more_digits_of_a_beta_than_six(trainer: str) -> None:
    given = with_optimizer(betas=[0.9, 0.9872585449014338])
    assert "0.98725854" not in export(given, trainer)


@for_every(beta=[0.0, 0.9, 0.95, 0.9872585449014338, 0.99998419, 0.99999984])
def test_the_half_life_of_an_exported_beta_is_the_studys(beta: float) -> None:
    text = export(with_optimizer(betas=[0.9, beta]), "hf")
    told = float(text.partition("adam_beta2=")[2].partition(",")[0])
    assert 1 - told == pytest.approx(1 - beta, rel=5e-4)


def test_lightning_decays_matrices_only() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = lightning_of(recommendation())[1]["configure_optimizers"](model)["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["weight_decay"]: [p.dim() for p in group["params"]] for group in optimizer.param_groups} == {
        0.1: [2],
        0.0: [1],
    }
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    momentum = lightning_of(with_optimizer(type="sgd"))[1]["configure_optimizers"](model)["optimizer"]
    assert isinstance(momentum, torch.optim.SGD)
    assert momentum.defaults["momentum"] == 0.9


class WithBlocks(torch.nn.Module):
    """A LightningModule's attributes, as far as an optimizer is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
        self.model.head = torch.nn.Linear(3, 5)


def test_lightning_builds_the_other_optimizers_as_the_study_did() -> None:
    def built(**optimizer: Any) -> Any:
        return lightning_of(with_optimizer(**optimizer))[1]["configure_optimizers"](WithBlocks())["optimizer"]

    muon, adamw = built(type="muon", kwargs={"ns_steps": 3}).members
    assert [tuple(p.shape) for p in muon.param_groups[0]["params"]] == [(3, 3)]
    assert (muon.defaults["ns_steps"], muon.defaults["adjust_lr_fn"]) == (3, "match_rms_adamw")
    assert [len(group["params"]) for group in adamw.param_groups] == [1, 2]
    assert isinstance(built(type="adafactor"), torch.optim.Adafactor)
    own = built(type="own", target="torch.optim:NAdam", kwargs={"weight_decay": 0.05})
    assert isinstance(own, torch.optim.NAdam)
    assert own.defaults["weight_decay"] == 0.05
    grouped = built(type="own", target="torch.optim:NAdam", param_groups="tests.output.test_export:two_rates")
    assert [group["initial_lr"] for group in grouped.param_groups] == pytest.approx([6e-4, 6e-5])
    adamw = built(type="adamw", weight_decay=0.3, param_groups="tests.output.test_export:two_rates")
    assert [(group["initial_lr"], group["weight_decay"]) for group in adamw.param_groups] == [
        (pytest.approx(6e-4), 0.3),
        (pytest.approx(6e-5), 0.3),
    ]


class WithModes(torch.optim.SGD):
    """It steps from other weights than are evaluated, as schedule-free optimizers do, and must be told which are wanted."""

    mode = ""

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


@pytest.mark.parametrize("groups", [None, "tests.output.test_export:two_rates"])
def test_an_optimizer_with_modes_is_told_to_train(groups: str | None) -> None:
    r = with_optimizer(type="own", target="tests.output.test_export:WithModes", param_groups=groups)
    for to in ("torch", "accelerate"):
        assert run(export(r, to), {})["build_optimizer"](torch.nn.Linear(2, 2)).mode == "train"


def two_rates(model: torch.nn.Module) -> list[dict[str, Any]]:
    weights = list(model.parameters())
    return [{"params": weights[:1], "lr": 0.5}, {"params": weights[1:], "lr": 0.05}]


@for_every(
    to=["hf", "trl", "axolotl", "torchtitan", "deepspeed", "nanogpt"],
    optimizer=[
        {"type": "muon"},
        {"type": "adafactor"},
        {"type": "adamw", "kwargs": {"amsgrad": True}},
        {"type": "own", "target": "my.module:Lion", "kwargs": {"betas": [0.9, 0.99]}},
    ],
)
def test_a_trainer_that_cannot_say_the_optimizer_says_so(to: str, optimizer: dict[str, Any]) -> None:
    name = optimizer.get("target") or optimizer["type"]
    text = export(with_optimizer(**optimizer), to)
    assert f"optimizer {name}" in text
    assert "cannot be expressed in" in text
    if to == "hf" and optimizer["type"] != "adamw":
        assert "optim" not in hf_arguments(text)


@pytest.mark.parametrize("bits", [8, 4])
def test_transformers_has_torchaos_optimizers(bits: int) -> None:
    given = hf_arguments(export(with_optimizer(type=f"adamw_{bits}bit"), "hf"))
    assert (given["optim"], given["adam_beta2"]) == (f"adamw_torch_{bits}bit", 0.95)


def test_torchtitan_toml_keeps_the_batch_identity() -> None:
    tree = tomllib.loads(export(recommendation(), "torchtitan"))
    training = tree["training"]
    ranks = tree["parallelism"]["data_parallel_replicate_degree"] * tree["parallelism"]["data_parallel_shard_degree"]
    assert training["global_batch_size"] == training["local_batch_size"] * ranks * 2
    assert (training["steps"], tree["lr_scheduler"]["warmup_steps"]) == (16, 2)
    assert tree["lr_scheduler"]["decay_ratio"] == 0.2
    assert training["mixed_precision_param"] == "bfloat16"
    assert tree["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert tree["optimizer"]["lr"] == 6e-4
    assert tree["compile"]["enable"] is True
    assert tomllib.loads(export(replace(recommendation(), compile="whole"), "torchtitan"))["compile"]["enable"] is True


@for_every(to=TARGETS)
def test_an_export_says_where_float32_was_tf32(to: str) -> None:
    said = "its float32 is TF32: call torch.set_float32_matmul_precision('high')"
    assert said not in export(recommendation(), to)
    assert said in export(replace(recommendation(), allow_tf32=True), to)


@pytest.mark.parametrize("to", ["hf", "nanogpt", "torchtitan", "lightning"])
def test_an_export_names_the_memory_knobs_that_it_cannot_say(to: str) -> None:
    text = export(replace(recommendation(), memory_knobs=("activation_offload", "optimizer_8bit")), to)
    assert "fits with activations offloaded to the host (activation_offload), which is not set below" in text
    assert "memory knob" not in export(recommendation(), to)
    only = export(replace(recommendation(), memory_knobs=("optimizer_8bit",)), to)
    assert "not set below" not in only  # the optimizer says it


def test_torchtitan_says_a_memory_budget_and_what_it_cannot() -> None:
    never = with_optimizer(type="sgd", max_gradient_norm=None)
    text = export(replace(never, activation_checkpointing=0.5, precision="float16"), "torchtitan")
    tree = tomllib.loads(text)
    assert tree["activation_checkpoint"] == {"mode": "memory_budget", "memory_budget": 0.5}
    assert tree["training"]["max_norm"] == math.inf
    assert "float16 cannot be expressed" in text
    assert "sgd cannot be expressed" in text


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_deepspeed_is_json_with_the_batch_identity(schedule: dict[str, Any]) -> None:
    tree = json.loads(export(recommendation(schedule=schedule), "deepspeed"))
    micro, accumulation = tree["train_micro_batch_size_per_gpu"], tree["gradient_accumulation_steps"]
    assert tree["train_batch_size"] == micro * accumulation * 2 == 64
    assert tree["bf16"]["enabled"] is True
    assert tree["fp16"]["enabled"] is False
    assert tree["optimizer"]["params"] == {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert tree["activation_checkpointing"]["partition_activations"] is False
    assert tree["scheduler"]["params"]["warmup_num_steps"] == 2
    assert tree["scheduler"]["params"]["warmup_type"] == "linear"
    assert tree["scheduler"]["type"] == ("WarmupCosineLR" if schedule["type"] == "cosine" else "WarmupLR")
    anneals = schedule["type"] == "warmup_stable_decay" and schedule["decay"] > 0
    assert any("the last 4 steps were annealed" in note for note in tree["_batchscout"]) == anneals


def test_nanogpt_keeps_the_rate_of_a_schedule_that_it_has_not() -> None:
    text = export(recommendation(schedule={"type": "table", "factors": [1.0, 0.1]}), "nanogpt")
    assert run(text, {})["decay_lr"] is False
    assert "here the rate stays" in text


def test_nanogpt_accumulation_counts_all_ranks() -> None:
    text = export(recommendation(), "nanogpt")
    names = run(text, {})
    ranks = 2
    assert names["gradient_accumulation_steps"] % ranks == 0
    assert names["batch_size"] * names["gradient_accumulation_steps"] == 64
    expected = {"max_iters": 16, "lr_decay_iters": 16, "warmup_iters": 2, "learning_rate": 6e-4, "min_lr": 0.0}
    expected |= {
        "dtype": "bfloat16",
        "compile": True,
        "beta1": 0.9,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
    }
    assert {key: names[key] for key in expected} == expected
    assert "warmup_stable_decay cannot be expressed in nanoGPT" in text


def test_a_gradient_that_is_never_clipped_is_so_everywhere() -> None:
    r = with_optimizer(max_gradient_norm=None)
    assert hf_arguments(export(r, "hf"))["max_grad_norm"] == 0.0
    assert lightning_of(r)[0]["gradient_clip_val"] is None
    assert json.loads(export(r, "deepspeed"))["gradient_clipping"] == 0.0
    assert run(export(r, "nanogpt"), {})["grad_clip"] == 0.0


# A batch that grows


def growing(*phases: tuple[int, int, float], **changes: JsonValue) -> Recommendation:
    """(from so many samples, accumulation, learning rate); the first phase has 64 samples a step."""
    ramp: list[JsonValue] = [
        {"from_samples": samples, "gradient_accumulation_steps": accumulation, "learning_rate": rate}
        for samples, accumulation, rate in phases
    ]
    return recommendation(**({"ramp": ramp, "sample_budget": 6400, "warmup_samples": 640} | changes))


DOUBLING = growing((1280, 4, 8.5e-4), (3072, 8, 1.2e-3))
STEPS = 20 + 14 + 13
"""Of 64, 128 and 256 samples; the last one goes beyond the budget."""


@pytest.mark.parametrize("decay", [0.25, 0.0])
def test_lightning_lets_the_batch_grow_with_the_learning_rates_of_the_study(decay: float) -> None:
    r = replace(DOUBLING, schedule=Schedule(decay=decay))
    given, names = lightning_of(r)
    assert given["max_steps"] == STEPS
    built = names["configure_optimizers"](torch.nn.Linear(2, 2))
    found = rates(built["optimizer"], built["lr_scheduler"]["scheduler"], STEPS)
    assert found == pytest.approx(ours(r, STEPS), rel=1e-9)
    (callback,) = given["callbacks"]
    trainer, accumulation = SimpleNamespace(accumulate_grad_batches=2, global_step=0), []
    for step in range(STEPS):
        trainer.global_step = step
        callback.on_train_batch_start(trainer, None, None, 0)
        accumulation.append(trainer.accumulate_grad_batches)
    assert accumulation == [2] * 20 + [4] * 14 + [8] * 13


def test_lightning_cannot_let_it_grow_within_a_step() -> None:
    text = export(growing((1280, 3, 7e-4)), "lightning")
    assert "the batch is to grow, which cannot be expressed in Lightning: here it stays at 64" in text
    assert "GrowingBatch" not in text


def test_deepspeed_is_told_the_calls_that_let_the_batch_grow() -> None:
    tree = json.loads(export(DOUBLING, "deepspeed"))
    notes = "\n".join(tree["_batchscout"])
    assert tree["train_batch_size"] == 64
    assert (
        "after optimizer step 20 call engine.set_train_batch_size(128), and from there on set the learning rate to 1.41"
        in notes
    )
    assert (
        "after optimizer step 34 call engine.set_train_batch_size(256), and from there on set the learning rate to 2 x"
        in notes
    )
    assert f"end your loop after {STEPS} optimizer steps" in notes
    assert "steps are counted as the batch grows from 64: budget 6400 -> 47, warm-up 640 -> 10" in notes
    assert "the last 5 steps were annealed" in notes


@pytest.mark.parametrize("to", ["hf", "trl", "axolotl", "torchtitan", "nanogpt"])
def test_what_cannot_let_the_batch_grow_says_so_and_where_it_would(to: str) -> None:
    text, stays = export(DOUBLING, to), export(replace(DOUBLING, ramp=None), to)
    assert "# the batch is to grow, which cannot be expressed in " in text
    assert "# from 1280 samples, after step 20: accumulation 4, effective batch 128, learning rate 0.00085\n" in text
    assert "# from 3072 samples, after step 34: accumulation 8, effective batch 256, learning rate 0.0012\n" in text
    without = [line for line in text.splitlines() if not line.startswith(("# the batch is", "# from "))]
    assert without == stays.splitlines(), "the run whose batch stays"


@pytest.mark.parametrize("to", TARGETS)
def test_the_verb_exports_what_the_version_before_has_recommended(to: str, typed: Typed) -> None:
    code, out, _ = typed("export", str(GOLDEN / "quickstart"), "--to", to)
    assert code == 0
    assert "effective batch 4 = micro-batch 4 x accumulation 1 x ranks 1" in out


def test_the_verb_exports_what_the_journal_says_and_no_earlier_answer(tmp_path: Path, typed: Typed) -> None:
    """After more runs, or a kill between the two files."""
    shutil.copytree(GOLDEN / "quickstart", tmp_path / "run")
    file = tmp_path / "run" / "recommendation.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"learning_rate": 0.123}))
    for journal in (True, False):
        if not journal:
            (tmp_path / "run" / "journal.jsonl").unlink()
        _, out, _ = typed("export", str(tmp_path / "run"), "--to", "hf")
        assert ("0.123" in out) != journal


# What the real libraries make of it


class UnevenLoss(torch.nn.Module):
    """A regression whose samples have unequal numbers of targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)


def loss_of(module: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    wrong = (module(batch["inputs"]).squeeze(-1) - batch["targets"]) ** 2
    return (wrong * batch["counts"]).sum(), batch["counts"].sum()


def uneven_batches(num_batches: int, size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "inputs": torch.randn(size, 3, generator=generator),
            "targets": torch.randn(size, generator=generator),
            "counts": torch.randint(0, 2, (size,), generator=generator).float(),
        }
        for _ in range(num_batches)
    ]


@pytest.mark.parametrize(("to", "grows"), [("accelerate", False), ("accelerate", True), ("torch", False)])
def test_a_loop_takes_the_steps_of_the_study(to: str, grows: bool) -> None:
    """With unequal numbers of targets, too, and where an epoch ends in the middle of a step."""
    phases: list[JsonValue] = [{"from_samples": 32, "gradient_accumulation_steps": 3, "learning_rate": 1.2e-3}]
    small: dict[str, JsonValue] = {
        "micro_batch_size": 4,
        "world_size": 1,
        "effective_batch_size": 8,
        "sample_budget": 80,
        "warmup_samples": 16,
        "precision": "float32",
        "compile": False,
        "ramp": phases if grows else None,
    }
    r = recommendation(**small)
    names, loader = run(export(r, to), {}), uneven_batches(3, 4)
    model, expected = UnevenLoss(), UnevenLoss()
    names["train"](model, torch.utils.data.DataLoader(loader, batch_size=None), loss_of)  # pyright: ignore[reportArgumentType]
    steps = names["max_steps"]
    accumulation = [2] * 4 + [3] * (steps - 4) if grows else [2] * steps
    reference_steps(expected, r, itertools.cycle(loader), accumulation)
    assert sum(accumulation) * 4 >= 80
    for ours, theirs in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("to", ["accelerate", "torch"])
def test_a_loop_in_float16_skips_no_step_at_the_start_however_many_targets_a_sample_has(to: str) -> None:
    """Accelerate refuses float16 on a CPU, so its loop takes the same steps in float32 here."""
    small: dict[str, JsonValue] = {
        "micro_batch_size": 4, "world_size": 1, "effective_batch_size": 8, "sample_budget": 80, "warmup_samples": 16,
        "precision": "float16", "compile": False,
    }  # fmt: skip
    r = recommendation(**small)
    names, loader = run(export(r, to).replace("'fp16'", "'no'"), {}), uneven_batches(3, 4 * 2**12)
    model, expected, before = UnevenLoss(), UnevenLoss(), UnevenLoss()
    names["train"](model, torch.utils.data.DataLoader(loader, batch_size=None), loss_of)  # pyright: ignore[reportArgumentType]
    reference_steps(expected, r, itertools.cycle(loader), [2] * names["max_steps"])
    moved, wanted = (
        torch.cat([(p - old).flatten() for p, old in zip(one.parameters(), before.parameters(), strict=True)])
        for one in (model, expected)
    )
    assert (moved - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("float16", 0.02)])
def test_the_loop_of_several_ranks_takes_the_steps_of_the_study(
    precision: str, tolerance: float, tmp_path: Path
) -> None:
    """Which AdamW shows, too, with an eps that is large beside a gradient."""
    keys = {
        "micro_batch_size": 4,
        "effective_batch_size": 16,
        "sample_budget": 160,
        "warmup_samples": 32,
        "compile": False,
    }
    optimizer = recommendation().optimizer.model_dump(mode="json") | {"eps": 1.0}
    r = recommendation(precision=precision, optimizer=optimizer, learning_rate=0.1, **keys)
    size = {"float32": 4, "float16": 4 * 2**12}[precision]
    batches, before, expected = uneven_batches(6, size), UnevenLoss(), UnevenLoss()
    for of_second_rank in batches[1::2]:  # which has half as many targets
        of_second_rank["counts"][size // 2 :] = 0
    # A step's samples: two micro-batches of each rank, which has every second one.
    reference_steps(expected, r, itertools.cycle(batches), [4] * 10)
    wanted = [p - old for p, old in zip(expected.parameters(), before.parameters(), strict=True)]
    for found in on_two_ranks(trained_by_the_loop, tmp_path, export(r, "torch"), batches):
        moved = [p - old for p, old in zip(found, before.parameters(), strict=True)]
        for one, other in zip(moved, wanted, strict=True):
            assert (one - other).norm() < tolerance * other.norm()


def trained_by_the_loop(text: str, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """The weights that a rank's loop ends with, of a model that every rank holds."""
    model, own = UnevenLoss(), batches[torch.distributed.get_rank() :: 2]
    loader: Any = torch.utils.data.DataLoader(own, batch_size=None)  # pyright: ignore[reportArgumentType]
    run(text, {})["train"](torch.nn.parallel.DistributedDataParallel(model), loader, loss_of)
    return [p.detach() for p in model.parameters()]


def reference_steps(
    model: torch.nn.Module, r: Recommendation, batches: Iterator[dict[str, torch.Tensor]], accumulation: list[int]
) -> None:
    """Each step's mean over all its targets, at once."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": r.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=r.optimizer.betas, eps=r.optimizer.eps)
    for micro_batches, rate in zip(accumulation, ours(r, len(accumulation)), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        sums = [loss_of(model, next(batches)) for _ in range(micro_batches)]
        loss = torch.stack([loss for loss, _ in sums]).sum() / torch.stack([count for _, count in sums]).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), r.optimizer.max_gradient_norm or math.inf)
        optimizer.step()


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("parallel", [None, "fsdp"])
def test_trl_is_told_what_it_would_do_by_itself(mode: str, parallel: str | None) -> None:
    from trl.trainer.sft_config import SFTConfig

    r = recommendation(activation_checkpointing=mode, precision="float32", compile=False, parallel=parallel)
    given: dict[str, Any] = {}
    module = ModuleType("trl")
    module.__dict__["SFTConfig"] = lambda **kwargs: given.update(kwargs)
    run(export(r, "trl"), {"trl": module})
    config = SFTConfig(**{key: value for key, value in given.items() if not key.startswith("fsdp")}, use_cpu=True)
    assert (config.bf16, config.packing, config.max_length) == (False, False, None)
    shards = given.get("fsdp_config", {"activation_checkpointing": False})
    assert (config.gradient_checkpointing or shards["activation_checkpointing"]) == (mode == "full")
    assert not (config.gradient_checkpointing and shards["activation_checkpointing"])
    assert (given.get("fsdp") is True) == (parallel == "fsdp")
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps * 2 == 64


@for_every(
    sample=[
        (None, {"packing": False, "max_length": None}, "", "and so did the study"),
        ("pack", {"packing": True, "packing_strategy": "bfd", "max_length": 96}, "a row of 96 tokens into which samples", "makes the study's samples"),
        ("text", {"packing": True, "packing_strategy": "wrapped", "max_length": 96}, "a row of 96 tokens of running", "makes the study's samples"),
        ("cut", {"packing": False, "max_length": 96}, "more than 96 tokens were cut off", "makes the study's samples"),
        ("leave_out", {"packing": False, "max_length": None}, "more than 96 tokens were left out", "leave out those of more than 96"),
    ]
)  # fmt: skip
def test_what_a_sample_is_is_told_to_every_trainer_and_made_by_trl(
    sample: tuple[str | None, dict[str, Any], str, str],
) -> None:
    kind, keys, told, by_trl = sample
    r = recommendation(sample=kind and {"tokens": 96, "kind": kind}, precision="float32", compile=False)
    assert all(told in export(r, to) for to in TARGETS)
    text = export(r, "trl")
    assert by_trl in text
    assert ("so did the study" in text) == (kind is None)
    exec(text, names := dict[str, Any]())
    assert {key: getattr(names["args"], key) for key in keys} == keys


class YourBlock(torch.nn.Linear):
    """What the exported text calls the class of a model's blocks."""


@pytest.mark.parametrize("mode", ["none", "full"])
def test_accelerate_shards_and_checkpoints_the_blocks_one_by_one(mode: str) -> None:
    utils = pytest.importorskip("accelerate.utils")
    fsdp = pytest.importorskip("accelerate.utils.fsdp_utils")
    text = export(recommendation(parallel="fsdp", activation_checkpointing=mode), "accelerate")
    calls = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call)]
    (made,) = [one for one in calls if ast.unparse(one.func) == "FullyShardedDataParallelPlugin"]
    plugin = eval(ast.unparse(made), vars(utils))
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2), YourBlock(2, 2), YourBlock(2, 2), torch.nn.Linear(2, 3))
    takes = fsdp.fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [takes(part) for part in model] == [False, True, True, False]
    assert plugin.activation_checkpointing == (mode == "full")


def test_lightnings_trainer_takes_the_keys() -> None:
    import lightning

    given, _ = lightning_of(recommendation(world_size=1, effective_batch_size=32))
    given.pop("seed")  # which seed_everything takes
    trainer = lightning.Trainer(**given, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert (trainer.accumulate_grad_batches, trainer.max_steps) == (2, math.ceil(1000 / 32))


@for_every(schedule=SCHEDULES, optimizer=["adamw", "sgd", "adamw_8bit", "adamw_4bit"], parallel=[None, "fsdp"])
def test_axolotls_schema_takes_every_key(schedule: dict[str, Any], optimizer: str, parallel: str | None) -> None:
    """Held by itself, without what axolotl then asks the machine for."""
    schemas = pytest.importorskip("axolotl.utils.schemas.config", reason="axolotl is not installed")
    r = recommendation(schedule=schedule, parallel=parallel, peft=LORA, cross_entropy="chunked")
    r = replace(r, optimizer=with_optimizer(type=optimizer).optimizer)
    tree = yaml.safe_load(export(r, "axolotl"))
    assert not tree.keys() - schemas.AxolotlInputConfig.model_fields.keys()
    yours = {"base_model": "yours", "datasets": [{"path": "yours", "type": "alpaca"}], "sequence_len": 512}
    taken = schemas.AxolotlInputConfig.model_validate(tree | yours).model_dump()
    for key in ("micro_batch_size", "gradient_accumulation_steps", "max_steps", "learning_rate", "warmup_steps"):
        assert taken[key] == tree[key], key


@for_every(schedule=SCHEDULES, mode=["none", "selective", "full", 0.5], parallel=[None, "fsdp"])
def test_torchtitan_reads_the_file(
    schedule: dict[str, Any], mode: str | float, parallel: str | None, tmp_path: Path
) -> None:
    titan = pytest.importorskip("torchtitan.config", reason="torchtitan is not installed")
    if not hasattr(titan, "JobConfig"):
        pytest.skip("torchtitan 0.2.2 is the last that reads TOML")
    r = recommendation(schedule=schedule, activation_checkpointing=mode, parallel=parallel)
    (path := tmp_path / "job.toml").write_text(export(r, "torchtitan"))
    read = titan.ConfigManager().parse_args(["--job.config_file", str(path)])
    for section, keys in tomllib.loads(path.read_text()).items():
        assert {key: getattr(getattr(read, section), key) for key in keys} == keys


@for_every(schedule=SCHEDULES, parallel=[None, "fsdp"])
def test_deepspeed_reads_the_file(schedule: dict[str, Any], parallel: str | None) -> None:
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="deepspeed is not installed")
    r = recommendation(world_size=1, effective_batch_size=32, schedule=schedule, parallel=parallel)
    read = config.DeepSpeedConfig(json.loads(export(r, "deepspeed")))
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps, read.train_batch_size) == (16, 2, 32)
    assert (read.gradient_clipping, read.bfloat16_config.enabled) == (1.0, True)
    assert read.zero_config.stage == (3 if parallel == "fsdp" else 0)
    assert read.optimizer_name == "adamw"
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], **read.optimizer_params)
    made = getattr(schedules, read.scheduler_name)(optimizer, **read.scheduler_params)
    for _ in range(math.ceil(100 / 32) + 1):
        made.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(6e-4, rel=0.03), "after the warm-up"


NANOGPT = {
    "batch_size", "gradient_accumulation_steps", "max_iters", "lr_decay_iters", "warmup_iters", "learning_rate", "min_lr",
    "decay_lr", "weight_decay", "beta1", "beta2", "grad_clip", "dtype", "compile",
}  # fmt: skip
"""The settings of nanoGPT's train.py that a recommendation decides."""


def test_nanogpt_is_told_by_the_names_of_its_train_py_and_by_no_others() -> None:
    """Its configurator executes the file among the names of train.py: one that is not there would change nothing."""
    names = run(export(recommendation(), "nanogpt"), {})
    assert {name for name in names if not name.startswith("__")} == NANOGPT


def test_axolotl_yaml_keeps_the_batch_identity() -> None:
    tree = yaml.safe_load(export(recommendation(), "axolotl"))
    assert tree["micro_batch_size"] * tree["gradient_accumulation_steps"] * 2 == 64
    expected = {"max_steps": 16, "warmup_steps": 2, "learning_rate": 6e-4, "bf16": True, "gradient_checkpointing": True}
    assert {key: tree[key] for key in expected} == expected
    assert tree["lr_scheduler_kwargs"] == {"num_decay_steps": 4, "decay_type": "linear"}


@for_every(to=["hf", "axolotl", "deepspeed"])
def test_no_export_says_that_weights_in_bfloat16_were_float32(to: str) -> None:
    assert "float32" in (plain := export(recommendation(), to))
    text = export(recommendation(memory_knobs=["bfloat16_weights"]), to)
    assert "float32" not in text
    assert "weights in bfloat16" in text
    assert "weights in bfloat16" not in plain


def test_axolotl_is_told_only_of_the_knobs_that_it_has_no_key_for() -> None:
    knobs: JsonValue = ["activation_offload", "chunked_cross_entropy"]
    text = export(recommendation(memory_knobs=knobs, cross_entropy="chunked"), "axolotl")
    assert yaml.safe_load(text)["chunked_cross_entropy"] is True
    assert "(activation_offload), which is not set below" in text
    assert "in chunks" not in text


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("kwargs", [{}, {"maximize": True}])
def test_deepspeed_makes_the_studys_optimizer_or_says_what_stands_in_its_place(
    kind: str, kwargs: dict[str, JsonValue]
) -> None:
    tree = json.loads(export(with_optimizer(type=kind, kwargs=kwargs), "deepspeed"))
    told = any("AdamW stands in its place" in note for note in tree["_batchscout"])
    assert told == (kind == "muon" or (kind == "adamw" and bool(kwargs)))
    made = getattr(torch.optim, tree["optimizer"]["type"])(
        [torch.nn.Parameter(torch.zeros(()))], **tree["optimizer"]["params"]
    )
    assert isinstance(made, torch.optim.SGD) == (kind == "sgd")
    assert made.defaults["maximize"] == (kind == "sgd" and bool(kwargs))


@for_every(to=TARGETS)
def test_what_is_the_models_or_the_loops_is_said_to_every_trainer(to: str) -> None:
    plain = export(recommendation(), to)
    kept = recommendation(cross_entropy="chunked", batch_norm="all ranks", ema_half_life_samples=640)
    text = export(kept, to)
    for said in ("cross-entropy in chunks", "SyncBatchNorm", f"decay of {0.5 ** (64 / 640):.6g} a step"):
        assert (said in text) != (to == "axolotl" and "in chunks" in said), "which has a key for that"
        assert said not in plain
    assert "statistics over each micro-batch of 16" in export(recommendation(batch_norm="micro-batch"), to)


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("hf", "fsdp=True"),
        ("accelerate", "fsdp_version=2"),
        ("lightning", "fully_shard"),
        ("trl", "fsdp=True"),
        ("axolotl", "fsdp_version: 2"),
        ("torchtitan", "data_parallel_shard_degree = 2"),
        ("deepspeed", '"stage": 3'),
        ("nanogpt", "sharded the model over its ranks (FSDP2): nanoGPT cannot"),
    ],
)
def test_shards_are_said_to_every_trainer(to: str, said: str) -> None:
    assert said in export(recommendation(parallel="fsdp"), to)
    assert said not in export(recommendation(), to)


LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "bias": "lora_only"}


@for_every(to=TARGETS)
def test_adapters_are_said_to_every_trainer(to: str) -> None:
    text = export(recommendation(peft=LORA), to)
    assert "peft.LoraConfig(r=16, lora_alpha=32, target_modules='all-linear', bias='lora_only')" in text
    assert "LoraConfig" not in export(recommendation(), to)


@pytest.mark.parametrize(("to", "name"), [("hf", "get_peft_model"), ("trl", "SFTTrainer")])
def test_the_lines_make_the_adapters_of_the_study(to: str, name: str) -> None:
    peft = pytest.importorskip("peft")
    lines = export(recommendation(peft=LORA), to).splitlines()
    assert name in lines[-1]
    call = ast.parse(lines[-1]).body[0].value  # pyright: ignore[reportAttributeAccessIssue]
    made = eval(ast.unparse(call.args[1] if to == "hf" else call), vars(peft))
    assert (made.r, made.lora_alpha, made.target_modules, made.bias) == (16, 32, "all-linear", "lora_only")


def test_axolotl_has_its_own_words_for_adapters() -> None:
    text = export(recommendation(peft=LORA), "axolotl")
    keys = yaml.safe_load(text)
    said = {key: value for key, value in keys.items() if "lora" in key or key == "adapter"}
    assert said == {
        "adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target_linear": True,
    }  # fmt: skip
    assert "# bias of peft.LoraConfig cannot be expressed in axolotl" in text
    assert "lora_target_modules" not in text
    assert "name in lora_target_modules those that peft took" in export(recommendation(peft={"r": 8}), "axolotl")


@pytest.mark.parametrize(
    ("to", "nearest"),
    [
        ("hf", "train_sampling_strategy='batch_rebalance' is the nearest"),
        ("trl", "SFTConfig has no budget of tokens; train_sampling_strategy='batch_rebalance' is the nearest"),
        ("accelerate", "set accumulation to the step's own number"),
        ("axolotl", "axolotl has no budget of tokens; group_by_length: true"),
        ("lightning", "accumulate_grad_batches is a fixed number"),
        ("torchtitan", "torchtitan packs its text into rows of seq_len tokens"),
        ("deepspeed", "data_efficiency.data_sampling.dynamic_batching (max_tokens) is the nearest"),
        ("nanogpt", "nanoGPT knows only samples of one length"),
    ],
)
def test_an_export_says_what_stands_for_micro_batches_that_are_cut_by_tokens(to: str, nearest: str) -> None:
    said = "the study cut each step by tokens, at most 8192 a micro-batch with its padding"
    plain, by_tokens = (export(replace(recommendation(), micro_batch_tokens=tokens), to) for tokens in (None, 8192))
    assert said in by_tokens
    assert nearest in by_tokens[by_tokens.index("micro-batches by tokens: ") :]
    assert "by tokens" not in plain


@pytest.mark.parametrize("to", ["hf", "trl", "axolotl", "torchtitan", "deepspeed", "nanogpt"])
def test_a_schedule_of_the_users_own_is_told_where_it_cannot_be_said(to: str) -> None:
    assert "the schedule is your own" in export(recommendation(schedule=SCHEDULES[-1]), to)


# What a study of a Trainer gives back to it


TRAINER: dict[str, JsonValue] = {
    "library": "transformers", "samples": 36_000, "samples_per_step": 16, "schedule": SCHEDULES[-1],
    "arguments": {
        "output_dir": "mine", "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "num_decay_steps": 900},
        "warmup_steps": 200, "num_train_epochs": 3, "optim": "adamw_torch", "remove_unused_columns": False,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "seed": 7, "torch_compile_mode": "max-autotune",
    },
}  # fmt: skip


def of_trainer(own_run: dict[str, Any] = TRAINER, **changes: Any) -> Recommendation:
    """A short study of a Trainer whose run is longer, at another batch than its own: 64 samples a step in place of 16."""
    optimizer = recommendation().optimizer.model_dump(mode="json") | {"param_groups": GROUPS}
    kept = {"own_run": own_run, "schedule": own_run["schedule"], "warmup_samples": 0, "optimizer": optimizer}
    return recommendation(**(kept | changes))


def test_a_trainer_gets_its_own_arguments_back_with_other_numbers() -> None:
    given = hf_arguments(export(of_trainer(), "hf"))
    own = {
        "output_dir": "mine",
        "num_train_epochs": 3,
        "optim": "adamw_torch",
        "remove_unused_columns": False,
        "seed": 7,
    }
    decided = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "learning_rate": 6e-4}
    assert own | decided == {key: given[key] for key in own | decided}
    assert not given.keys() & {"max_steps", "torch_compile_mode"}


def with_arguments(**arguments: JsonValue) -> dict[str, JsonValue]:
    own = TRAINER["arguments"]
    assert isinstance(own, dict)
    return {**TRAINER, "arguments": {**own, **arguments}}


@pytest.mark.parametrize("kind", ["Seq2SeqTrainingArguments", "SFTConfig", "their own"])
def test_the_arguments_of_a_trainer_are_given_back_in_their_own_class(kind: str) -> None:
    """Whose defaults may be others, and which may have further keys."""
    pytest.importorskip("accelerate")
    library = pytest.importorskip("trl" if kind == "SFTConfig" else "transformers")

    @dataclasses.dataclass
    class TheirArguments(pytest.importorskip("transformers").TrainingArguments):
        model_max_length: int = 512
        remove_unused_columns: bool | None = False

    told = {"Seq2SeqTrainingArguments": {"predict_with_generate": True}, "SFTConfig": {"max_length": 99}}
    further = told.get(kind, {"model_max_length": 2048})
    kinds = {"TheirArguments": TheirArguments} if kind == "their own" else {}
    made_of = kinds.get("TheirArguments") or getattr(library, kind)
    shared = {"output_dir": "/tmp/unused", "report_to": "none", "bf16": False}
    own = own_arguments(made_of(**shared, **further, use_cpu=True))
    to = "trl" if kind == "SFTConfig" else "hf"
    text = export(of_trainer(TRAINER | own, precision="float32", compile=False), to)
    exec(text, names := {**kinds})
    assert type(names["args"]) is made_of
    assert {key: getattr(names["args"], key) for key in further} == further
    assert names["args"].remove_unused_columns == (kind != "their own")
    assert ("is your own class" in text) == (kind == "their own")


def test_no_secret_that_an_older_journal_has_is_given_back() -> None:
    text = export(of_trainer(with_arguments(hub_token="hf_abc", push_to_hub=True)), "hf")
    assert "push_to_hub=True" in text
    assert "hf_abc" not in text


def test_steps_of_the_trainer_come_before_its_epochs_as_with_transformers() -> None:
    given = hf_arguments(export(of_trainer(with_arguments(max_steps=2250)), "hf"))
    assert given["max_steps"] == math.ceil(36_000 / 64)
    assert "num_train_epochs" not in given


def test_the_last_step_of_a_pass_is_told_where_steps_are_counted_and_only_there() -> None:
    told = "a smaller one unless a pass has a multiple of 64 samples"
    for to in ("hf", "trl", "axolotl", "lightning"):
        assert told in export(recommendation(), to), to
    assert told not in export(of_trainer(), "hf"), "it goes by epochs, as before"
    assert told in export(of_trainer(with_arguments(max_steps=2250)), "hf")
    for to in ("torch", "accelerate"):
        assert "drop_last=True" in export(recommendation(), to), "a short micro-batch would be taken for a full one"


def test_weights_and_decay_are_told_to_whoever_has_no_trainer_yet() -> None:
    for told in ("dtype=torch.float32", "decayed those of two or more dimensions"):
        assert told in export(recommendation(), "hf")
        assert told not in export(of_trainer(), "hf")


@pytest.mark.parametrize(("samples", "warmup"), [(36_000, 100), (500, 50)])
def test_a_shorter_run_keeps_the_share_of_the_warm_up_and_a_longer_one_is_told_that_it_stays(
    samples: int, warmup: int
) -> None:
    found = recommendation(own_run=TRAINER | {"samples": samples}, study_sample_budget=1000)
    text = export(found, "torch")
    assert f"budget {samples} -> {math.ceil(samples / 64)}, warm-up {warmup} -> {math.ceil(warmup / 64)}" in text
    assert f"your own run has {samples} samples, and with your setting the study's had 1000" in text
    assert (f"the warm-up, of {warmup} samples here, is as long as in the study" in text) == (samples > 1000)


def note_on_time(own: int, taken: int) -> str:
    return f"your own run takes {own} samples, and this one {taken}, in about the same time"


@for_every(to=[*TARGETS, "script"], own=[3000, 6000, 90_000], speed=[0.5, 1.0, 3.008])
def test_a_setting_trains_for_as_long_as_the_users_own_run_takes_as_it_did_in_the_study(
    to: str, own: int, speed: float
) -> None:
    """In which the user's own setting trains on 6,000 samples, and this one on as many as it takes in that time."""
    changes = {"script": SCRIPT, "study_sample_budget": 6000, "sample_budget": round(6000 * speed)}
    text = export(of_trainer(TRAINER | {"samples": own}, **changes), to)
    taken = round(speed * own)
    assert f"budget {taken} -> {math.ceil(taken / 64)}, " in text
    assert (note_on_time(own, taken) in text) == (speed != 1.0)
    assert ("your own run has" in text) == (own != 6000)
    assert (f"real_run: {{samples: {own}}}" in text) == (own > 6000), (
        "no other is more than sample_budget, as it must be"
    )


@for_every(counts=["epochs", "steps"], speed=[1.0, 3.008])
def test_epochs_of_a_trainer_stay_only_where_the_run_takes_as_many(counts: str, speed: float) -> None:
    changes = {"study_sample_budget": 6000, "sample_budget": round(6000 * speed)}
    arguments = {"num_train_epochs": 3} if counts == "epochs" else {"max_steps": 375}
    steps, stay = math.ceil(6000 * speed / 64), counts == "epochs" and speed == 1.0
    own = with_arguments(**arguments) | {"samples": 6000}
    given = hf_arguments(export(of_trainer(own, **changes), "hf"))
    length = {key: given.get(key) for key in ("num_train_epochs", "max_steps")}
    assert length == {"num_train_epochs": 3 if stay else None, "max_steps": None if stay else steps}
    own = lightnings(samples=6000, arguments={"max_epochs": 3} if counts == "epochs" else {"max_steps": 375})
    given, _ = lightning_text(export(of_trainer(own, **changes), "lightning"))
    assert given["max_epochs"] == (3 if stay else steps)
    assert given.get("max_steps") == (None if stay else steps)


def test_the_steps_of_its_own_schedule_are_counted_in_the_recommended_batch() -> None:
    given = hf_arguments(export(of_trainer(), "hf"))
    assert (given["lr_scheduler_type"], given["warmup_steps"]) == ("polynomial", 50)
    assert given["lr_scheduler_kwargs"] == {"power": 2.0, "num_decay_steps": 225}


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("cosine_with_min_lr", {"min_lr": 3e-4}),
        ("polynomial", {"lr_end": 3e-4, "power": 2.0}),
        ("inverse_sqrt", {"timescale": 400}),
    ],
)
def test_its_own_schedule_goes_through_the_same_shares_of_the_rate(
    kind: str, kwargs: dict[str, JsonValue], batch: int
) -> None:
    from transformers.optimization import get_scheduler

    def shares(lr: float, warmup: int, steps: int, kwargs: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr)
        told = {"num_warmup_steps": warmup, "num_training_steps": steps}
        found = rates(optimizer, get_scheduler(kind, optimizer, scheduler_specific_kwargs=kwargs, **told), steps)
        return [found[round(place * (steps - 1) / 20)] / lr for place in range(21)]

    own = with_arguments(lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs) | {
        "recipe": {"optimizer": {"lr": 3e-3}}, "samples": 48_000,
    }  # fmt: skip
    split = {"micro_batch_size": 8, "gradient_accumulation_steps": batch // 16, "effective_batch_size": batch}
    given = hf_arguments(export(of_trainer(own, learning_rate=6e-4, **split), "hf"))
    now = shares(given["learning_rate"], given["warmup_steps"], 48_000 // batch, given["lr_scheduler_kwargs"])
    assert now == pytest.approx(shares(3e-3, 200, 3000, kwargs), abs=0.02)


@pytest.mark.parametrize("has_schedule", [True, False])
def test_a_schedule_that_a_trainer_is_given_is_to_be_made_anew_for_the_length_of_the_run(has_schedule: bool) -> None:
    optimizer = {"betas": [0.9, 0.999], "weight_decay": 0.1, "max_gradient_norm": 5.0}
    given = TRAINER | {"rate_factor": None, "has_schedule": has_schedule, "recipe": {"optimizer": optimizer}}
    text = export(of_trainer(given), "hf")
    steps = math.ceil(36_000 / 64)
    assert (
        f"make it for {steps} steps, and what it counts in steps, such as a warm-up, 0.25 times" in text
    ) == has_schedule
    assert "betas of the optimizer: (0.9, 0.95), where yours has [0.9, 0.999]" in text
    assert "weight_decay of" not in text, "it is as it was"
    assert "max_gradient_norm of" not in text, "it is an argument"
    other = export(of_trainer(given, schedule={"type": "cosine"}), "hf")
    assert (f"make it for {steps} steps, as lr_scheduler_type" in other) == has_schedule
    assert "make it for" not in export(of_trainer(), "hf")


def test_a_schedule_of_the_study_file_comes_before_its_own() -> None:
    given = hf_arguments(export(of_trainer(schedule={"type": "cosine"}, warmup_samples=128), "hf"))
    assert (given["lr_scheduler_type"], given["warmup_steps"]) == ("cosine", 2)
    assert "lr_scheduler_kwargs" not in given


REAL: dict[str, JsonValue] = {
    "samples": 90_000, "effective_batch_size": 64, "learning_rate": 6e-4, "learning_rate_low": 5e-4, "learning_rate_high": 7e-4,
    "batches": [], "val_loss": 3.0, "val_loss_low": 2.9, "val_loss_high": 3.1, "micro_batch_size": 32, "gradient_accumulation_steps": 2,
    "mode": None, "sample_budget": 80_000, "regret_time": 0.01, "time": None, "crossing_samples": None, "keeps_own": False,
}  # fmt: skip


@for_every(to=TARGETS)
def test_a_run_is_as_long_as_the_users_own_and_not_as_the_studys(to: str) -> None:
    assert f"budget 36000 -> {math.ceil(36_000 / 64)}," in export(of_trainer(), to)
    ramp = [{"from_samples": 640, "gradient_accumulation_steps": 2, "learning_rate": 6e-4}]
    kept = export(of_trainer(real_run=REAL, ramp=ramp), to)  # a ramp is carried to no other length
    assert "budget 80000" not in kept
    assert "budget 36000" not in kept
    carried = of_trainer(real_run=REAL, sample_budget=80_000)
    assert f"budget 80000 -> {math.ceil(80_000 / 64)}," in export(carried, to)


def test_the_real_run_comes_before_the_epochs_of_the_trainer() -> None:
    given = hf_arguments(export(of_trainer(real_run=REAL, sample_budget=80_000), "hf"))
    assert given["max_steps"] == math.ceil(80_000 / 64)
    assert "num_train_epochs" not in given
    assert given["warmup_steps"] == round(200 * (80_000 / 64) / (36_000 / 16)), "the same share of the run"


def lightnings(**changes: Any) -> dict[str, Any]:
    return TRAINER | {"library": "lightning", "arguments": {}} | changes


@pytest.mark.parametrize(
    ("own", "length"),
    [
        ({"arguments": {"max_epochs": 3}}, {"max_epochs": 3}),
        ({"arguments": {"max_steps": 2250}}, dict.fromkeys(("max_epochs", "max_steps"), math.ceil(36_000 / 64))),
        ({"samples": None}, {}),
    ],
)
def test_a_lightning_trainer_keeps_its_own_length(own: dict[str, Any], length: dict[str, int]) -> None:
    text = export(of_trainer(lightnings(**own)), "lightning")
    given, names = lightning_text(text)
    assert {key: given[key] for key in given if key.startswith("max_")} == length
    assert "configure_optimizers" not in names, "the module's own stays"
    assert ("how long it trains is not known" in text) == (not length)


@for_every(schedule=SCHEDULES)
def test_a_lightning_modules_own_optimizer_has_the_learning_rates_of_the_study(schedule: dict[str, Any]) -> None:
    r = of_trainer(lightnings(schedule=schedule, samples=None), sample_budget=6400)
    (callback,) = lightning_of(r)[0]["callbacks"]
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    groups: Any = [{"params": [first]}, {"params": [second], "lr": 0.05, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.2)
    trainer = SimpleNamespace(optimizers=[optimizer], global_step=0, estimated_stepping_batches=100)
    callback.on_train_start(trainer, None)
    found = []
    for trainer.global_step in range(100):
        callback.on_before_optimizer_step(trainer, None, optimizer)
        found.append([group["lr"] for group in optimizer.param_groups])
    assert [one for one, _ in found] == pytest.approx(ours(r, 100), rel=1e-9)
    assert [other for _, other in found] == pytest.approx([0.1 * one for one, _ in found])
    assert [(group["betas"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ((0.9, 0.95), 0.1), ((0.9, 0.95), 0.0)
    ]  # fmt: skip


@for_every(to=TARGETS)
def test_no_export_needs_what_only_a_study_has(to: str) -> None:
    text = export(of_trainer(), to)
    assert "batchscout." not in text
    if to in ("torch", "accelerate"):
        assert isinstance(run(text, {})["build_optimizer"](torch.nn.Linear(2, 2)), torch.optim.AdamW)


@for_every(to=[*TARGETS, "script"], library=["transformers", "trl", "lightning", "script"])
def test_other_parameter_groups_than_the_users_own_are_told_wherever_these_are_not_given_back(
    to: str, library: str
) -> None:
    gives_back = {"hf": "transformers", "trl": "trl", "lightning": "lightning", "script": library}
    own = TRAINER | {"library": library}
    text = export(of_trainer(own, script=SCRIPT), to)
    assert ("parameter groups that your own code makes" in text) == (gives_back.get(to) != library)
    assert "decayed those of two or more dimensions" not in text, "its own groups say what they decay"
    eight_bits = of_trainer(own, script=SCRIPT, optimizer={"type": "adamw_8bit", "param_groups": GROUPS})
    assert ("parameter groups that" in export(eight_bits, to)) == (gives_back.get(to) != library or to == "lightning")


SCRIPT = {
    "script": "train.py",
    "args": ["--lr=1e-3", "--epochs", "2", "-b", "8"],
    "flags": {"learning_rate": "--lr", "micro_batch_size": "--batch-size"},
}


def test_a_script_is_given_back_its_own_command() -> None:
    keys: dict[str, JsonValue] = {
        "world_size": 1,
        "micro_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "effective_batch_size": 32,
    }
    text = export(recommendation(script=SCRIPT, learning_rate=0.00336, **keys), "script")
    *notes, command = text.splitlines()
    assert command == "python train.py --lr=0.00336 --epochs 2 -b 8 --batch-size 16"
    assert any("step the optimizer after every 2 micro-batches" in note for note in notes), "what it has no flag for"
    module = export(recommendation(script={**SCRIPT, "script": "my.train"}, **keys), "script")
    assert module.splitlines()[-1].startswith("python -m my.train ")
    with pytest.raises(ValueError, match="not of a script"):
        export(recommendation(), "script")


def test_a_scripts_command_keeps_its_schedule_and_names_what_the_study_had_otherwise() -> None:
    own = OwnRun(
        "script", 40_000, 8, in_steps=True, schedule=Schedule(type="cosine"),
        recipe={"optimizer": {"type": "adamw", "betas": [0.9, 0.999], "weight_decay": 0.1}, "precision": "float32"},
    )  # fmt: skip
    script: dict[str, JsonValue] = {
        "script": "train.py",
        "args": ["--lr", "1e-3", "--steps", "5000", "--lr_decay_iters", "5000", "--warmup_iters", "500"],
        "flags": {"learning_rate": "--lr", "steps": "--steps"},
        "factors": {"--lr": 10.0, "--lr_decay_iters": 1.0, "--warmup_iters": 0.1},
    }
    keys: dict[str, JsonValue] = {
        "world_size": 2, "micro_batch_size": 8, "gradient_accumulation_steps": 1, "effective_batch_size": 16, "precision": "bfloat16",
        "schedule": {"type": "cosine"}, "warmup_samples": 0, "learning_rate": 2e-4,
    }  # fmt: skip
    found = replace(recommendation(script=script, **keys), own_run=own, real_run=None)
    *notes, command = export(found, "script").splitlines()
    assert (
        command
        == "torchrun --nproc_per_node=2 train.py --lr 0.002 --steps 2500 --lr_decay_iters 2500 --warmup_iters 250"
    )
    for said in (
        "the first parameter group trains at 0.0002: what the flag sets is 10 times that",
        "betas of the optimizer: (0.9, 0.",
        "precision: bfloat16, where the script has float32",
        "where train.py multiplies its learning rate by the number of processes, divide --lr by 2, so that the first parameter group trains at 0.0002",
    ):
        assert any(said in note for note in notes), said
    alone = replace(found, world_size=1, effective_batch_size=8)
    assert "number of processes" not in export(alone, "script")
    assert not any("weight_decay of" in note or "schedule was" in note for note in notes), "what is as it was"
    of_library = replace(found, own_run=replace(own, library="transformers"))
    assert any("betas of the optimizer: (0.9, 0." in note for note in export(of_library, "script").splitlines())


def test_without_flags_a_rate_is_told_by_a_factor_which_holds_for_any_schedule_of_the_script() -> None:
    own = OwnRun(
        "script", 2_000, 20, schedule=Schedule(type="table", factors=(0.1, 1.0)), recipe={"optimizer": {"lr": 0.02}}
    )
    script: dict[str, JsonValue] = {"script": "train.py", "args": [], "flags": {}}
    found = replace(
        recommendation(script=script, learning_rate=0.05, micro_batch_size=16, effective_batch_size=32), own_run=own
    )
    text = " ".join(line.lstrip("# ") for line in export(found, "script").splitlines())
    assert "multiply what it sets, for all parameter groups, by 2.5, so that the first trains at 0.05" in text
    assert "flag for its learning rate" not in export(replace(found, learning_rate=0.02), "script")
    assert "have each of its batches take 16 samples" in text


def test_a_command_that_counts_passes_is_told_how_many_more_the_real_run_takes() -> None:
    own = OwnRun("script", 20_000, 8, in_steps=False, schedule=Schedule(type="constant"))
    keys: dict[str, JsonValue] = {"world_size": 1, "effective_batch_size": 16, "sample_budget": 80_000}
    found = replace(recommendation(script=SCRIPT, real_run=REAL, **keys), own_run=own)
    assert "give it 4 times as many passes over the data" in export(found, "script")
    as_fast = replace(found, real_run=None, study_sample_budget=80_000)
    assert "as many passes" not in export(as_fast, "script")
    faster = replace(as_fast, study_sample_budget=40_000)
    assert "give it 2 times as many passes over the data" in export(faster, "script")


def of_script(own: OwnRun, *words: str, **changes: Any) -> tuple[str, str]:
    """The notes as running text, and the command: of a script that was called so. changes: of the script, and of the answer."""
    told = {key: changes.pop(key) for key in ("flags", "factors") if key in changes}
    script = {"script": "train.py", "args": [*words], "flags": {}, **told}
    keys: dict[str, JsonValue] = {
        "world_size": 1, "micro_batch_size": 16, "gradient_accumulation_steps": 1, "effective_batch_size": 16, "learning_rate": 5e-4,
        "script": script, "schedule": {"type": "cosine"}, "warmup_samples": 0,
    }  # fmt: skip
    *notes, command = export(replace(recommendation(**(keys | changes)), own_run=own), "script").splitlines()
    return " ".join(line.lstrip("# ") for line in notes), command


def watched_run(samples: int, micro_batch: int, accumulation: int = 1, **changes: Any) -> OwnRun:
    recipe = {"batch": {"micro_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}}
    cosine = Schedule(type="cosine")
    return OwnRun("script", samples, micro_batch * accumulation, schedule=cosine, recipe=recipe, **changes)


@pytest.mark.parametrize("rate", [3e-5, 2.4e-3])
def test_a_command_keeps_the_share_of_the_lowest_rate_of_its_schedule(rate: float) -> None:
    """As nanoGPT's, whose rate the study follows as shares of the highest, down to a tenth."""
    table = Schedule(type="table", factors=(0.1, 1.0, 0.6, 0.1))
    own = replace(watched_run(16_000, 16, in_steps=True), schedule=table)
    own.recipe["optimizer"] = {"lr": 6e-4}
    words, flags = ("--learning_rate=6e-4", "--min_lr=6e-5"), {"learning_rate": "--learning_rate="}
    changes = {"flags": flags, "schedule": table.model_dump(mode="json"), "learning_rate": rate}
    told, command = of_script(own, *words, factors={"--min_lr=": 0.1, "--warmup_iters=": 0.1}, **changes)
    assert command == f"python train.py --learning_rate={rate:.4g} --min_lr={rate / 10:.4g} --warmup_iters=100"
    by_itself = (
        f"the study's rate ended at {rate / 10:.3g}: where the script sets the lowest rate of its schedule by itself"
    )
    assert by_itself not in told
    assert by_itself in of_script(own, *words, **changes)[0]
    assert by_itself not in of_script(own, *words, **changes | {"learning_rate": 6e-4})[0], "it is as it was"


def test_a_command_has_one_rate_where_an_earlier_version_has_stored_a_factor_of_its_long_name_too() -> None:
    names = {"flags": {"learning_rate": "-lr"}, "factors": {"--learning-rate": 10.0, "-lr": 10.0, "--warmup": 0.1}}
    own = watched_run(16_000, 16, in_steps=True)
    told, command = of_script(own, "-lr", "0.01", **names)
    assert command == "python train.py -lr 0.005 --warmup 100"
    assert "--learning-rate" not in told


@pytest.mark.parametrize("library", ["script", "transformers", "lightning"])
@pytest.mark.parametrize(("own", "taken"), [(4, 1), (4, 8), (1, 4), (4, 4), (1, 1)])
def test_an_accumulation_that_is_hard_coded_is_told_wherever_the_answer_has_another(
    own: int, taken: int, library: Any
) -> None:
    run = replace(watched_run(64_000, 16, own), library=library)
    split = {"gradient_accumulation_steps": taken, "effective_batch_size": 16 * taken}
    told, _ = of_script(run, flags={"micro_batch_size": "--batch-size"}, **split)
    assert ("train.py has no flag for accumulation" in told) == (own != taken)
    assert (f"has {own} micro-batches in a step" in told) == (own > 1 and own != taken)
    after = "after each micro-batch" if taken == 1 else f"after every {taken} micro-batches"
    assert (after in told) == (own != taken)
    with_flag, command = of_script(run, flags={"gradient_accumulation_steps": "--accum"}, **split)
    assert "no flag for accumulation" not in with_flag
    assert command.endswith(f"--accum {taken}")


@pytest.mark.parametrize(("batch", "times"), [(16, 4), (256, 0.25), (64, 1)])
def test_a_warm_up_in_steps_keeps_its_share_of_a_run_of_passes(batch: int, times: float) -> None:
    own = watched_run(320_000, 64)
    words, split = ("--warmup-steps", "500"), {"micro_batch_size": batch, "effective_batch_size": batch}
    told, command = of_script(own, *words, factors={"--warmup-steps": 0.1}, **split)
    assert command == f"python train.py --warmup-steps {500 * times:.0f}"
    said = f"than --warmup-steps and not passes, such as a warm-up or a decay, becomes {times:.3g} times as long"
    assert (said in told) == (times != 1)
    assert "times as long" not in of_script(replace(own, schedule=Schedule(type="constant")), **split)[0]


def test_what_counts_micro_batches_and_the_samples_of_a_step_takes_as_many_as_the_run_has() -> None:
    """Of a script that goes round for each micro-batch, and divides its batch by the accumulation."""
    flags = {
        "samples_per_step": "--batch", "gradient_accumulation_steps": "--accum", "micro_batches": "--max-iters",
    }  # fmt: skip
    split = {"gradient_accumulation_steps": 4, "effective_batch_size": 64}
    own = watched_run(64_000, 8, 2, in_steps=True)
    told, command = of_script(own, flags=flags, factors={"--warmup-iters": 0.1}, **split)
    assert command == "python train.py --batch 64 --accum 4 --max-iters 4000 --warmup-iters 400"
    assert "takes --warmup-iters for micro-batches" in told
    assert "has no flag for its batch" not in told
    assert "has no flag for its number of steps" not in told


@pytest.mark.parametrize(("own", "taken"), [(1, 4), (4, 4), (1, 1)])
def test_where_no_accumulation_was_watched_what_a_flag_counts_with_one_is_to_be_looked_at(own: int, taken: int) -> None:
    flags = {"micro_batch_size": "-b", "gradient_accumulation_steps": "--accum", "steps": "--max-iters="}
    split = {"gradient_accumulation_steps": taken, "effective_batch_size": 16 * taken}
    told, _ = of_script(watched_run(16_000 * own, 16, own, in_steps=True), flags=flags, **split)
    said = "takes -b for the samples of a micro-batch, and --max-iters for optimizer steps"
    assert (said in told) == (own != taken)


@pytest.mark.parametrize(("batch", "is_told"), [(16, False), (64, True)])
def test_a_rate_that_a_script_may_multiply_by_its_batch_is_told_where_the_batch_is_another(
    batch: int, is_told: bool
) -> None:
    split = {"micro_batch_size": batch, "effective_batch_size": batch}
    told, _ = of_script(watched_run(16_000, 16), flags={"learning_rate": "--lr"}, **split)
    assert ("divide --lr by as much, so that the first parameter group trains at 0.0005" in told) == is_told


def test_a_length_that_was_rounded_to_whole_steps_is_no_other_number_of_passes() -> None:
    told, _ = of_script(watched_run(600_000, 128), sample_budget=600_064, real_run=REAL | {"samples": 600_000})
    assert "as many passes" not in told


@pytest.mark.parametrize(("adds_up", "batch"), [(True, 16), (True, 64), (False, 64)])
def test_a_script_that_clips_a_sum_is_told_what_to_clip_it_at_where_the_batch_is_another(
    adds_up: bool, batch: int
) -> None:
    split = {"micro_batch_size": batch, "effective_batch_size": batch}
    told, _ = of_script(replace(watched_run(16_000, 16), adds_up=adds_up), **split)
    assert ("set what it clips at to that" in told) == (adds_up and batch == 64)
    assert ("(64, where it adds up all samples of a step)" in told) == (adds_up and batch == 64), "a mean of norm 1"
