"""LoRA: what is trained, what stays as it was, and what is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.model.adapters import add_adapters
from batchscout.trainers.model.gpt import GPT
from batchscout.trainers.model.models import initial_module
from batchscout.trainers.speed.flops import flops_per_sample
from tests.support.tiny import config, cpu_run, losses_of

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "target": "hf",
    "kwargs": {
        "model_type": "llama",
        "config": {
            "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 32, "bos_token_id": 0, "eos_token_id": 1,
        },
    },
}  # fmt: skip
GPT_KWARGS = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16}


def adapted(peft: dict[str, Any], **changes: Any) -> TrialConfig:
    return config(model=LLAMA | {"peft": peft}, **changes)


def on_gpt(peft: dict[str, Any], **changes: Any) -> TrialConfig:
    return config(model={"target": "gpt", "kwargs": GPT_KWARGS, "peft": peft}, **changes)


def test_only_the_adapters_are_trained() -> None:
    run = cpu_run(adapted({"r": 4, "target_modules": "all-linear"}))
    before = {name: tensor.clone() for name, tensor in run.module.state_dict().items()}
    for _ in range(2):
        run.step()
    run.read()
    moved = {name for name, tensor in run.module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert moved == {name for name in before if "lora_" in name}
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for name, p in run.module.named_parameters() if "lora_" in name}


def test_the_layers_of_any_model_can_be_named() -> None:
    run = cpu_run(on_gpt({"r": 2, "target_modules": ["qkv"], "modules_to_save": ["norm"]}))
    trained = {name for name, p in run.module.named_parameters() if p.requires_grad}
    assert all("qkv.lora_" in name or "norm.modules_to_save" in name for name in trained)
    assert any("qkv.lora_" in name for name in trained)


def bert(kind: str, **more: Any) -> Any:
    made = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=24, **more
    )
    return getattr(transformers, kind)(made)


def trained_in(model: nn.Module) -> set[str]:
    names = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name.removeprefix("base_model.model.") for name in names}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own models ask for it
@pytest.mark.parametrize(
    ("kind", "peft", "head"),
    [
        ("BertForSequenceClassification", {"task_type": "SEQ_CLS", "target_modules": "all-linear"}, "classifier"),
        ("BertForTokenClassification", {"task_type": "TOKEN_CLS"}, "classifier"),
        ("BertForQuestionAnswering", {"task_type": "QUESTION_ANS", "modules_to_save": ["LayerNorm"]}, "qa_outputs"),
        ("BertForMaskedLM", {"task_type": "FEATURE_EXTRACTION"}, "lora_A"),
    ],
)  # fmt: skip
def test_what_peft_trains_of_a_task_is_what_is_trained(kind: str, peft: dict[str, Any], head: str) -> None:
    """Its head is new, and frozen it would stay at random."""
    from peft import LoraConfig, get_peft_model

    ours = bert(kind)
    add_adapters(ours, {"r": 2, **peft})
    assert trained_in(ours) == trained_in(get_peft_model(bert(kind), LoraConfig(r=2, **peft)))
    assert any(head in name for name in trained_in(ours))


class Towers(nn.Module):
    """As a retriever has them, with a layer of its own around both."""

    def __init__(self, **frozen: bool) -> None:
        super().__init__()
        self.query, self.passage, self.head = bert("BertModel"), bert("BertModel"), nn.Linear(16, 4)
        for name in frozen:
            getattr(self, name).requires_grad_(False)


def test_each_transformers_model_within_gets_adapters_and_what_is_around_them_is_trained_whole() -> None:
    towers = Towers()
    add_adapters(towers, {"r": 2, "target_modules": ["query.dense", "value"]})
    trained = trained_in(towers)
    assert {name for name in trained if "lora_" not in name} == {"head.weight", "head.bias"}
    for tower in ("query", "passage"):
        assert any(name.startswith(f"{tower}.") and "lora_" in name for name in trained)


def test_a_tower_that_is_frozen_stays_so() -> None:
    towers = Towers(passage=True)
    add_adapters(towers, {"r": 2, "target_modules": ["value"]})
    assert {name.partition(".")[0] for name in trained_in(towers)} == {"query", "head"}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_leaves_the_adapters_training_as_it_was(mode: str) -> None:
    trials = (adapted({"r": 4, "lora_dropout": 0.1}, activation_checkpointing=one) for one in ("none", mode))
    plain, again = (losses_of(trial, 3) for trial in trials)
    assert plain == again


def test_frozen_layers_have_no_gradient_of_their_weights_to_compute() -> None:
    trained = flops_per_sample(config(model=LLAMA))
    assert flops_per_sample(adapted({"r": 1})) < 0.8 * trained


def test_the_weights_in_a_file_are_the_models_below_the_adapters(tmp_path: Path) -> None:
    torch.manual_seed(7)
    module = GPT(vocab_size=24, seq_len=12, **GPT_KWARGS)  # pyright: ignore[reportArgumentType]
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    trial = on_gpt({"r": 2, "target_modules": ["qkv"]}, initial_weights=str(tmp_path / "weights.pt"))
    state = cpu_run(trial).module.state_dict()
    assert torch.equal(
        state["blocks.0.attention.qkv.base_layer.weight"], module.state_dict()["blocks.0.attention.qkv.weight"]
    )


def test_a_folder_that_save_pretrained_has_written_is_where_a_run_begins(tmp_path: Path) -> None:
    whole = initial_module(config(model=LLAMA, seed=3), cpu_run(config()).train_set)
    whole.inner.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    loaded = {"target": "hf", "kwargs": {"name": str(tmp_path), "pretrained": True}}
    expected, found = whole.state_dict(), cpu_run(config(model=loaded)).module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(
        ValueError, match=r"model.kwargs.name is '\./no', which is no folder; name one that save_pretrained"
    ):
        cpu_run(config(model={"target": "hf", "kwargs": {"name": "./no", "pretrained": True}}))


@pytest.mark.parametrize(
    ("peft", "message"),
    [
        ({"rank": 4, "r": 4}, "model.peft has rank, which peft.LoraConfig does not take; it takes: task_type"),
        ({"target_modules": ["nope"]}, "model.peft does not fit this model: Target modules {'nope'} not found"),
        (
            {"modules_to_save": ["clasifier"]},
            "model.peft.modules_to_save names clasifier, and no layer of the model is called so; it has",
        ),
        ({"r": 0}, "model.peft does not fit this model: `r` should be a positive integer"),
        ({"inference_mode": True}, "leaves nothing to train; leave inference_mode out"),
    ],
)
def test_what_does_not_fit_is_refused(peft: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cpu_run(adapted(peft))


def test_a_model_of_no_known_family_must_name_its_layers() -> None:
    with pytest.raises(ValueError, match=r"Please specify `target_modules`.*; name its layers as target_modules"):
        cpu_run(on_gpt({"r": 2}))


def test_without_the_library_its_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"model\.peft needs the library peft; pip install 'batchscout\[hf\]'"):
        cpu_run(adapted({"r": 4}))
