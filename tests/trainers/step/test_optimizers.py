"""Every optimizer trains and goes on where it was stopped; one of the user's own is taken as it is, or refused in words."""

from __future__ import annotations

import copy
import importlib.util
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from batchscout.trainers.before.prediction import live_bytes, predict
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.loop import train
from batchscout.trainers.model.blocks import find_blocks
from batchscout.trainers.noise.step_statistics import read_step
from batchscout.trainers.reporting.evaluation import evaluate
from batchscout.trainers.run import Run
from batchscout.trainers.step.optimizers import Together, build_optimizer, set_learning_rate
from tests.support.map_style import map_style_sets
from tests.support.ranks import on_two_ranks
from tests.support.tiny import assert_equal_bit_by_bit, config, cpu_run, newest_state, stop_at

HERE = "tests.trainers.step.test_optimizers"
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
COMPILES = pytest.mark.compiled, pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""torchao compiles its steps, and imports what torch has deprecated."""
BUILT_IN = [
    "adamw", "sgd", "muon", "adafactor",
    *(pytest.param(name, marks=[needs_torchao, *COMPILES]) for name in ("adamw_8bit", "adamw_4bit")),
]  # fmt: skip
OWN = {"target": "torch.optim:Adam"}


def optimizer_of(**settings: Any) -> torch.optim.Optimizer:
    return cpu_run(config(optimizer=settings)).optimizer


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_learns_and_a_stopped_run_ends_bit_by_bit_as_one_that_was_not(tmp_path: Path, name: str) -> None:
    trial = config(
        optimizer={"type": name}, sample_budget=256, rungs=(128,), evaluations=(256,), statistics=False,
        learning_rate=0.1 if name == "sgd" else 1e-2,
    )  # fmt: skip
    losses: dict[str, list[float]] = {"whole": [], "stopped": []}
    for how, rungs in (("whole", ()), ("stopped", (128,))):
        stop = stop_at(*rungs)

        def report(said: Any, how: str = how, stop: Callable[[Any], Any] = stop) -> Any:
            losses[how] += [step.loss for step in said.steps]
            return stop(said)

        for _ in range(1 + len(rungs)):
            train(trial, report, tmp_path / how)
    assert losses["whole"] == losses["stopped"]
    assert losses["whole"][-1] < losses["whole"][0] - 0.2
    assert_equal_bit_by_bit(*(newest_state(tmp_path / how / "checkpoints") for how in losses))


# Muon


def test_muon_has_the_matrices_of_the_blocks_and_adamw_all_else_at_one_learning_rate() -> None:
    run = cpu_run(config(optimizer={"type": "muon", "weight_decay": 0.3, "kwargs": {"ns_steps": 3}}))
    optimizer = run.optimizer
    assert isinstance(optimizer, Together)
    muon, adamw = optimizer.members
    assert isinstance(muon, torch.optim.Muon)
    expected = {id(p) for block in find_blocks(run.module) for p in block.module.parameters() if p.dim() == 2}
    of_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    of_adamw = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert of_muon == expected
    assert of_adamw == {id(p) for p in run.parameters} - expected
    assert muon.param_groups[0]["ns_steps"] == 3
    set_learning_rate(optimizer, 0.007)
    assert {group["lr"] for member in optimizer.members for group in member.param_groups} == {0.007}


def test_muon_on_a_model_without_blocks_and_on_shards_is_refused_with_the_way_out() -> None:
    plain = {"target": "tests.support.tiny:LogitsOnly", "kwargs": {"vocab_size": 24}}
    trial = config(optimizer={"type": "muon"}, model=plain, loss="cross_entropy")
    with pytest.raises(
        ValueError, match=r"no ModuleList or Sequential of them; name it under model\.blocks, or name torch\.optim:Muon"
    ):
        build_optimizer(nn.Embedding(24, 24), trial)
    with pytest.raises(
        ValueError, match=r"muon needs whole matrices, and parallel: fsdp shards them; use parallel: ddp"
    ):
        build_optimizer(nn.Embedding(24, 24), config(optimizer={"type": "muon"}, parallel="fsdp", world_size=2))


def test_optimizers_that_step_together_do_what_each_does_alone_also_after_their_state_was_loaded() -> None:
    def parts() -> tuple[list[nn.Parameter], list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]
        return weights, [torch.optim.Muon(weights[:1], lr=0.1), torch.optim.AdamW(weights[1:], lr=0.1)]

    def step(weights: list[nn.Parameter], optimizers: Iterable[torch.optim.Optimizer], seed: int) -> None:
        torch.manual_seed(seed)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        for optimizer in optimizers:
            optimizer.step()

    (alone, optimizers), (joint, members) = parts(), parts()
    together = Together(members)
    for seed in (1, 2):
        step(alone, optimizers, seed)
        step(joint, [together], seed)
    assert together.step(lambda: 0.5) == 0.5, "a trainer may hand over what evaluates the loss"
    for optimizer in optimizers:
        optimizer.step()
    fresh, members = parts()
    loaded = Together(members)
    loaded.load_state_dict(copy.deepcopy(together.state_dict()))
    for mine, theirs in zip(fresh, joint, strict=True):
        mine.data.copy_(theirs)
    step(alone, optimizers, 3)
    step(joint, [together], 3)
    step(fresh, [loaded], 3)
    for one, other, third in zip(alone, joint, fresh, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


# One's own


def test_ones_own_is_called_with_the_rate_and_its_arguments_and_makes_the_same_steps_as_by_hand() -> None:
    run = cpu_run(config(optimizer={**OWN, "kwargs": {"betas": [0.8, 0.9], "weight_decay": 0.1}}, statistics=False))
    assert type(run.optimizer) is torch.optim.Adam
    by_hand = cpu_run(config(statistics=False))
    by_hand.optimizer = torch.optim.Adam(by_hand.parameters, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    for _ in range(3):
        run.step()
        by_hand.step()
    assert all(torch.equal(a, b) for a, b in zip(run.parameters, by_hand.parameters, strict=True))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.005, "weight_decay": 0.0}]


def test_groups_keep_the_ratio_of_their_rates_while_the_study_changes_the_first() -> None:
    trial = config(optimizer={**OWN, "param_groups": f"{HERE}:two_groups"}, warmup_samples=8, learning_rate=0.4)
    run = cpu_run(trial, steps=1)
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.2, 0.05])
    run.step()
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.4, 0.1])
    assert run.metrics()["learning_rate"] == pytest.approx(0.4)


def slow_first_block(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    first = [
        p for name, p in named if name.startswith("blocks.0.attention.") or name == "blocks.0.attention_norm.weight"
    ]
    others = [p for name, p in named if not any(p is one for one in first)]
    return [{"params": others, "lr": 0.02}, {"params": first, "lr": 0.002}]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_groups_by_name_are_the_same_whatever_is_checkpointed(mode: str) -> None:
    """A wrapped block's parameters had its wrapper in their names, and fell into the other group."""
    model = {"target": "gpt", "kwargs": {"num_layers": 2, "hidden_dim": 16, "num_heads": 2}}
    run = cpu_run(
        config(
            model=model, activation_checkpointing=mode,
            optimizer={"param_groups": f"{HERE}:slow_first_block"}, learning_rate=0.4,
        ),
        steps=1,
    )  # fmt: skip
    assert [len(group["params"]) for group in run.optimizer.param_groups] == [17, 3]
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.4, 0.04])


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_those_that_are_built_in_take_groups_too_and_decay_what_says_nothing(name: str) -> None:
    settings = {"type": name, "param_groups": f"{HERE}:two_groups", "weight_decay": 0.3}
    run = cpu_run(config(optimizer=settings, learning_rate=0.4), steps=1)
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.4, 0.1])
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.3, 0.0]


def with_rates_of_its_own(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in params:
        by_kind[parameter.dim() == 2].append(parameter)
    return torch.optim.Adam([{"params": by_kind[True], "lr": lr}, {"params": by_kind[False], "lr": 0.1 * lr}])


def test_rates_that_its_own_callable_gives_keep_their_ratio_too() -> None:
    run = cpu_run(config(optimizer={"target": f"{HERE}:with_rates_of_its_own"}, learning_rate=0.4), steps=1)
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.4, 0.04])


class CountsInItsGroups(torch.optim.SGD):
    """As Prodigy and others do: what it has learned of the run lies in the groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["momentum"] = 0.9 - 0.8 / group["count"]
        return super().step(closure)


def test_what_it_keeps_in_its_groups_goes_on_with_the_run(tmp_path: Path) -> None:
    trial = config(
        optimizer={"target": f"{HERE}:CountsInItsGroups"},
        sample_budget=64,
        rungs=(32,),
        evaluations=(64,),
        statistics=False,
    )
    for name, rungs in (("whole", ()), ("stopped", (32,))):
        for stop in [stop_at(*rungs)] * (1 + len(rungs)):
            train(trial, stop, tmp_path / name)
    whole, stopped = (newest_state(tmp_path / name / "checkpoints") for name in ("whole", "stopped"))
    assert_equal_bit_by_bit(whole, stopped)
    assert [group["count"] for group in stopped["optimizer"]["param_groups"]] == [16]


def leaves_out_the_head(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for name, p in model.named_parameters() if "head" not in name and "norm" not in name]}]


def with_a_rate_for_one(model: nn.Module) -> list[dict[str, Any]]:
    first, second = two_groups(model)
    del second["lr"]
    return [first, second]


def parameters_alone(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


class WantsAClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().step(closure)


def no_optimizer(params: Any, lr: float) -> str:
    return "adam"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": "torch.optim:Muon"},
         r"optimizer torch\.optim:Muon cannot be made of this model's parameters: Muon only supports 2D .*; check "
         r"optimizer\.kwargs, or say with optimizer\.param_groups"),
        ({**OWN, "kwargs": {"momentum": 0.9}},
         r"optimizer\.kwargs do not fit torch\.optim:Adam: got an unexpected keyword argument 'momentum'; it takes: lr, betas"),
        ({**OWN, "param_groups": f"{HERE}:leaves_out_the_head"},
         r"leaves out \d+ of the \d+ parameters that are trained, .* among them; put them into a group, or freeze them"),
        ({**OWN, "param_groups": f"{HERE}:with_a_rate_for_one"}, r"gives 1 of 2 groups an lr; give it to all, .* or to none"),
        ({**OWN, "param_groups": f"{HERE}:parameters_alone"}, r"returned a list with Parameter; return a list of dictionaries"),
        ({"target": f"{HERE}:WantsAClosure"}, r"asks for a closure, .* name another optimizer"),
        ({"target": f"{HERE}:no_optimizer"}, r"returned a str; return a torch\.optim\.Optimizer"),
        ({"target": f"{HERE}:HERE"}, r"is a str; name a callable that returns an optimizer"),
        ({"type": "muon", "kwargs": {"nesterow": True}}, r"optimizer\.kwargs do not fit muon: .*'nesterow'; it takes: "),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value.get("param_groups") or value.get("target") or "muon"),
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_words(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        optimizer_of(**settings)


def test_without_torchao_its_optimizers_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(ValueError, match=r"adamw_8bit is torchao's, which is not installed here; pip install torchao"):
        optimizer_of(type="adamw_8bit")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**OWN, "type": "sgd"}, "type is sgd and target torch.optim:Adam; each names an optimizer: leave one of them out"),
        ({"type": "own"}, "type is own, and no target names it; set target: package.module:callable"),
        ({"type": "muon", "param_groups": "a:b"}, "param_groups is a:b, and type is muon, which groups the parameters itself; leave"),
        ({**OWN, "kwargs": {"lr": 1}}, "kwargs has lr, for which the study file has a key of its own; set optimizer.lr instead"),
        ({"kwargs": {"betas": [0, 1]}}, "kwargs has betas, for which the study file has a key of its own"),
        ({"type": "sgd", "kwargs": {"momentum": 0.5}}, "kwargs has momentum, for which the study file has a key of its own; set optimizer.betas"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused_with_both(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        config(optimizer=settings)


# What is measured of a step


@pytest.mark.parametrize(
    "settings",
    [{"type": "muon"}, {"type": "adafactor"}, OWN, {"kwargs": {"amsgrad": True}}],
    ids=["muon", "adafactor", "own", "a variant"],
)
def test_a_step_that_is_not_known_tells_of_its_gradient_and_claims_nothing_of_its_update(settings: Any) -> None:
    run = cpu_run(config(optimizer=settings), steps=3)
    gradient = torch.cat([p.grad.flatten().double() for p in run.parameters if p.grad is not None])
    found = read_step(run.optimizer)
    assert found.keys() == {"gradient_mean", "gradient_variance"}
    assert found["gradient_variance"] == pytest.approx(gradient.var(correction=0).item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"type": "muon"}, OWN], ids=["muon", "own"])
def test_its_state_counts_in_the_memory_that_is_predicted(settings: Any) -> None:
    """Muon keeps one moment of a matrix, Adam two of everything."""
    found, adamw = (predict(config(optimizer=some)).bytes_at(1) for some in (settings, {}))
    weights = 4 * sum(p.numel() for p in cpu_run(config()).module.parameters())
    if settings == OWN:
        assert found == pytest.approx(adamw, abs=0.5 * weights)
    else:
        assert adamw - 1.5 * weights < found < adamw


def test_what_an_optimizer_reads_of_its_tensors_does_not_keep_its_memory_from_being_predicted() -> None:
    """Adafactor's step reads norms. It keeps the sums of a matrix's rows and columns, where Adam keeps two of its size."""
    wide: dict[str, Any] = {"data": {"target": "tests.support.tiny:data", "kwargs": {"vocab_size": 4096}}}
    weights = 4 * sum(p.numel() for p in cpu_run(config(**wide)).module.parameters())
    held = [held_after_a_step(config(**wide, optimizer=settings)) for settings in ({"type": "adafactor"}, {})]
    assert held[1] - held[0] == pytest.approx(2 * weights, rel=0.1)


def held_after_a_step(trial: TrialConfig) -> float:
    train_set, _ = map_style_sets(trial.data)
    return live_bytes(trial, train_set, fetch(train_set, [0]))[-1]


class AddsNoise(torch.optim.SGD):
    """As Langevin dynamics do, drawn from torch's, numpy's and Python's generators."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                parameter.add_(torch.randn_like(parameter) + np.random.rand() + random.random(), alpha=1e-3)
        return super().step(closure)


DRAWS: dict[str, dict[str, Any]] = {
    "rounding": {"memory_knobs": ["bfloat16_weights"], "precision": "bfloat16"},
    "noise": {"optimizer": {"target": f"{HERE}:AddsNoise"}},
}


def weights_and_what_is_drawn_next() -> dict[str, tuple[list[Tensor], Tensor]]:
    found: dict[str, tuple[list[Tensor], Tensor]] = {}
    for name, changes in DRAWS.items():
        run = cpu_run(config(world_size=2, **changes))
        first, *_ = [(run.step(), [p.detach().clone() for p in run.parameters])[1] for _ in range(3)]
        assert not torch.equal(first[0], run.parameters[0]), "the run trains"
        found[name] = [p.detach() for p in run.parameters], torch.rand(4)
    return found


@pytest.mark.slow
def test_ranks_draw_alike_what_an_optimizer_draws_and_apart_all_else(tmp_path: Path) -> None:
    """No one exchanges weights, so what one rank alone rounds or adds at random would stay a difference for good."""
    one, other = on_two_ranks(weights_and_what_is_drawn_next, tmp_path)
    for name in DRAWS:
        assert all(torch.equal(here, there) for here, there in zip(one[name][0], other[name][0], strict=True)), name
        assert not torch.equal(one[name][1], other[name][1]), "dropout differs between the ranks"


class WithModes(torch.optim.SGD):
    """Steps in train mode alone, and is evaluated at half of its weights, as schedule-free ones are at an average."""

    mode = "neither"

    def _scale(self, factor: float, mode: str) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.data.mul_(factor if self.mode != "neither" else 1.0)
        self.mode = mode

    def train(self) -> None:
        self._scale(2.0, "train")

    def eval(self) -> None:
        self._scale(0.5, "eval")

    def step(self, closure: Any = None) -> Any:
        assert self.mode == "train", "the optimizer was not in train mode"
        return super().step(closure)


def test_an_optimizer_that_is_evaluated_at_other_weights_is_and_trains_on_from_its_own() -> None:
    def run_of(target: str) -> Run:
        run = cpu_run(config(optimizer={"type": "own", "target": target, "max_gradient_norm": None}, statistics=False))
        run.step()
        return run

    plain, moded = run_of("torch.optim:SGD"), run_of(f"{HERE}:WithModes")
    found = evaluate(moded)["val_loss"]
    plain.step()
    moded.step()
    pairs = zip(plain.module.parameters(), moded.module.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    halved = run_of("torch.optim:SGD")
    with torch.no_grad():
        for parameter in halved.module.parameters():
            parameter.mul_(0.5)
    assert found == evaluate(halved)["val_loss"]
