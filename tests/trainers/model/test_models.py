"""What counts as a model, and which of its parts repeat."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscout.trainers.config import ModelConfig, call_target, resolve
from batchscout.trainers.criteria import OwnLoss
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.errors import LossFault
from batchscout.trainers.model.gpt import GPT, summed_cross_entropy
from batchscout.trainers.model.losses import loss_function
from batchscout.trainers.model.models import (
    build_model,
    num_batch_norms,
    regularizers,
    switch_off_dropout,
    with_synced_batch_norm,
)
from tests.support.tiny import config, cpu_run, data, losses_of

TINY_GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}


class Bigram(nn.Module):
    """A user's module, whose size comes from the data."""

    def __init__(self, *, vocab_size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(vocab_size, vocab_size), scale

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return summed_cross_entropy(self.scale * self.table(batch["input_ids"]), batch["targets"])


def loss_of_logits(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return summed_cross_entropy(module(batch["input_ids"]), batch["targets"])


def not_a_module(**kwargs: object) -> str:
    return "not a module"


NUMBER = 3


def build(target: str, **kwargs: Any) -> Any:
    return build_model(ModelConfig(target=target, kwargs=kwargs), data()[0])


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return fetch(data(padded=True)[0], range(8))


def test_a_users_module_takes_its_size_from_the_data() -> None:
    model = build("tests.trainers.model.test_models:Bigram", scale=2.0)
    assert (model.table.num_embeddings, model.scale) == (24, 2.0)
    assert build("tests.trainers.model.test_models:Bigram", vocab_size=99).table.num_embeddings == 99


def test_a_users_loss_leaves_the_module_untouched(batch: dict[str, Tensor]) -> None:
    loss = loss_function(OwnLoss(target="tests.trainers.model.test_models:loss_of_logits"))
    torch.manual_seed(0)
    foreign = loss(build("tests.support.tiny:LogitsOnly"), batch)
    torch.manual_seed(0)
    own = loss_function(None)(build("tests.trainers.model.test_models:Bigram"), batch)
    assert [value.item() for value in foreign] == [value.item() for value in own]
    trial = config(
        model={"target": "tests.support.tiny:LogitsOnly"}, loss="tests.trainers.model.test_models:loss_of_logits"
    )
    run = cpu_run(trial, steps=1)
    assert run.read()[0].loss > 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gtp", "model.target 'gtp' is not built in; use gpt, hf or an import path package.module:callable"),
        ("tests.absent:Model", "'tests.absent:Model' does not resolve: no module named 'tests.absent'"),
        (
            "tests.trainers.model.test_models:Absent",
            "'tests.trainers.model.test_models' has no 'Absent'; check its spelling",
        ),
        (
            "tests.trainers.model.test_models:",
            "'tests.trainers.model.test_models:' is not an import path; write it as package.module:callable",
        ),
        ("tests.trainers.model.test_models:not_a_module", "returned a str, not an nn.Module; return the module itself"),
        (
            "tests.trainers.model.test_models:NUMBER",
            "model.target 'tests.trainers.model.test_models:NUMBER' is a int; name a callable",
        ),
    ],
)
def test_a_target_that_is_no_model_is_refused_by_name(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(target)


def test_kwargs_that_do_not_fit_are_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"model\.kwargs do not fit: .*'layers'; it takes: .*num_layers"):
        build("gpt", layers=3)
    with pytest.raises(
        ValueError, match=r"hidden_dim \(10\) is not a multiple of num_heads \(4\); choose a multiple of 4"
    ):
        build("gpt", hidden_dim=10)


def test_targets_of_minus_100_do_not_count() -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[1, -100, 2], [-100, -100, 4]])
    loss_sum, num_targets = summed_cross_entropy(logits, targets)
    log_p = logits.log_softmax(-1)
    assert num_targets.item() == 3
    assert loss_sum.item() == pytest.approx(-(log_p[0, 0, 1] + log_p[0, 2, 2] + log_p[1, 2, 4]).item(), rel=1e-5)


@pytest.mark.parametrize("target", ["gpt", "hf"])
def test_labels_are_smoothed_in_training_alone(target: str, batch: dict[str, Tensor]) -> None:
    """A smoothed target gives each of the 24 tokens 0.2 / 24 of itself; a validation loss is that of the labels as they are."""
    kwargs = {
        "gpt": {"num_layers": 1, "num_heads": 2, "hidden_dim": 16},
        "hf": {"model_type": "gpt2", "config": TINY_GPT2},
    }
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    if target == "hf":
        kwargs["hf"]["config"] = TINY_GPT2 | dropout
    model = build(target, label_smoothing=0.2, **kwargs[target]).train()
    smoothed, plain = model(batch)[0].item(), model.eval()(batch)[0].item()
    every = [model({**batch, "targets": torch.where(batch["targets"] == -100, -100, token)})[0] for token in range(24)]
    uniform = torch.stack(every).mean().item()
    assert smoothed == pytest.approx(0.8 * plain + 0.2 * uniform, rel=1e-5)


def test_a_smoothing_that_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="label_smoothing is 1; choose a share from 0 to below 1"):
        build("gpt", label_smoothing=1.0)


class Smoothing(Bigram):
    """A user's module that takes both arguments."""

    def __init__(self, *, vocab_size: int, dropout: float = 0.3, label_smoothing: float = 0.1) -> None:
        super().__init__(vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("target", "kwargs", "expected"),
    [
        ("gpt", {}, {"dropout": 0.0, "label_smoothing": 0.0}),
        ("gpt", {"dropout": 0.2}, {"dropout": 0.2, "label_smoothing": 0.0}),
        ("hf", {"model_type": "gpt2"}, {"label_smoothing": 0.0}),
        ("tests.trainers.model.test_models:Smoothing", {}, {"dropout": 0.3}),
        ("tests.trainers.model.test_models:Bigram", {}, {}),
    ],
    ids=["gpt", "gpt with dropout", "hf", "a user's with both", "a user's with neither"],
)
def test_the_regularizers_of_a_model_are_the_arguments_that_it_takes(
    target: str, kwargs: dict[str, Any], expected: dict[str, float]
) -> None:
    assert regularizers(ModelConfig(target=target, kwargs=kwargs)) == expected


def test_gpt_cannot_see_the_token_it_predicts(batch: dict[str, Tensor]) -> None:
    model = GPT(vocab_size=24, seq_len=12, num_layers=2, num_heads=2, hidden_dim=16)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, 6:] = 0
    for ids in (batch, changed):
        ids["targets"] = ids["targets"].clone()
        ids["targets"][:, 6:] = -100
    assert model(batch)[0].item() == pytest.approx(model(changed)[0].item(), rel=1e-6)


def test_gpt_ties_its_head_to_its_embedding() -> None:
    model = GPT(vocab_size=24, seq_len=12, num_layers=1, num_heads=2, hidden_dim=16)
    assert model.head.weight is model.token_embedding.weight


@pytest.fixture
def gpt2() -> Any:
    return build("hf", model_type="gpt2", config=TINY_GPT2).eval()


def test_a_transformers_model_has_its_own_loss_and_the_datas_vocabulary(gpt2: Any) -> None:
    input_ids = fetch(data()[0], range(4))["input_ids"]
    targets = torch.cat([input_ids[:, 1:], torch.full((4, 1), -100)], dim=1)
    loss_sum, num_targets = gpt2({"input_ids": input_ids, "targets": targets})
    theirs = gpt2.inner(input_ids=input_ids, labels=input_ids).loss
    assert gpt2.inner.config.vocab_size == 24
    assert (loss_sum / num_targets).item() == pytest.approx(theirs.item(), rel=1e-6)


def test_a_transformers_model_sees_no_padding_and_no_other_sample_of_a_packed_row(gpt2: Any) -> None:
    gpt2.inner.config.use_cache = False  # as in a run: with a cache a row is not taken for a packed one
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    alone = torch.cat([gpt2.logits({"input_ids": part}) for part in (ids[:, :5], ids[:, 5:])], dim=1)
    row = gpt2.logits({"input_ids": ids, "position_ids": positions})
    assert torch.allclose(row, alone, atol=1e-5)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    batch, other = (
        {"input_ids": torch.cat([torch.tensor([pad]), ids[:, 2:]], 1), "attention_mask": mask}
        for pad in ([1, 2], [3, 4])
    )
    assert torch.allclose(gpt2.logits(batch)[:, 2:], gpt2.logits(other)[:, 2:], atol=1e-5)
    targets = {"targets": torch.where(mask == 1, ids, -100)}
    assert gpt2(batch | targets)[0].item() == pytest.approx(gpt2(other | targets)[0].item(), rel=1e-6)


EXPERTS = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16,
    "num_local_experts": 4, "router_aux_loss_coef": 10.0,
}  # fmt: skip


@pytest.fixture
def experts() -> Any:
    torch.manual_seed(0)
    return build("hf", model_type="mixtral", config=EXPERTS | {"output_router_logits": True}).train()


@pytest.mark.parametrize("chunks", [False, True], ids=["whole", "in chunks"])
def test_the_balance_of_experts_is_a_part_of_the_loss_as_in_the_model_s_own(experts: Any, chunks: bool) -> None:
    input_ids = fetch(data()[0], range(4))["input_ids"]
    targets = torch.cat([input_ids[:, 1:], torch.full((4, 1), -100)], dim=1)
    theirs = experts.inner(input_ids=input_ids, labels=input_ids)
    assert theirs.aux_loss.item() > 1
    routers = [p for name, p in experts.named_parameters() if name.endswith("gate.weight")]
    expected = torch.autograd.grad(theirs.loss, routers)
    if chunks:
        head = experts.inner.lm_head
        experts.take_chunks(head)
        experts.inner.lm_head = nn.Identity()
    loss_sum, num_targets = experts({"input_ids": input_ids, "targets": targets})
    assert (loss_sum / num_targets).item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss_sum / num_targets, routers), expected)


def test_experts_are_validated_by_the_cross_entropy_alone(experts: Any, batch: dict[str, Tensor]) -> None:
    expected, _ = summed_cross_entropy(experts.logits(batch), batch["targets"])
    assert experts.eval()(batch)[0].item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_balance_that_belongs_to_the_loss_by_nobody_knows_how_much_is_refused(
    experts: Any, batch: dict[str, Tensor]
) -> None:
    del experts.inner.router_aux_loss_coef
    with pytest.raises(
        LossFault, match=r"MixtralForCausalLM returns the balance .*; set output_router_logits: false in"
    ):
        experts(batch)


def test_a_transformers_model_holds_its_weights_in_float32_whatever_its_file_says() -> None:
    model = build("hf", model_type="gpt2", config=TINY_GPT2 | {"dtype": "bfloat16"})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_transformers_model_trains_checkpointed() -> None:
    model = {"target": "hf", "kwargs": {"model_type": "gpt2", "config": TINY_GPT2}}
    none, selective, full = (
        losses_of(config(model=model, activation_checkpointing=mode), 3) for mode in ("none", "selective", "full")
    )
    assert none == full == pytest.approx(selective, rel=1e-6)


@pytest.mark.parametrize("kwargs", [{}, {"name": "gpt2", "model_type": "gpt2"}])
def test_a_transformers_model_needs_a_name_or_a_type(kwargs: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="need either name or model_type; give one of the two"):
        build("hf", **kwargs)


def test_batch_norm_over_ranks_is_made_for_gpus_and_refused_on_a_cpu() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"sync_batch_norm needs GPUs.*; use world_size: 1, or GroupNorm"):
        with_synced_batch_norm(module, torch.device("cpu"))
    synced = with_synced_batch_norm(module, torch.device("cuda"))
    assert isinstance(synced, nn.Sequential)
    assert isinstance(synced[1], nn.SyncBatchNorm)
    assert num_batch_norms(module) == 1
    without = nn.Linear(2, 2)
    assert with_synced_batch_norm(without, torch.device("cpu")) is without


def test_shards_of_one_rank_are_refused() -> None:
    with pytest.raises(
        ValueError, match="parallel: fsdp shards the model over ranks, and world_size is 1; raise it, or"
    ):
        config(parallel="fsdp")


def born_in_evaluation(vocab_size: int) -> nn.Module:
    return Bigram(vocab_size=vocab_size).eval()


def test_a_model_that_comes_in_evaluation_mode_is_trained_in_training_mode() -> None:
    assert cpu_run(config(model={"target": "tests.trainers.model.test_models:born_in_evaluation"})).module.training


def test_a_memory_budget_needs_blocks() -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing '0\.5' needs repeated blocks"):
        cpu_run(
            config(
                model={"target": "tests.trainers.model.test_models:Bigram"}, activation_checkpointing=0.5, compile=True
            )
        )


# Dropout


class Config:
    def __init__(self) -> None:
        self.attn_pdrop, self.hidden_dropout, self.width = 0.1, 0.2, 0.5


SHARED = Config()


class DropsEverywhere(nn.Module):
    """Dropout as layers, as numbers of a layer, and as numbers of its config."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.attention_dropout, self.scale = SHARED, 0.1, 0.5
        self.layers = nn.ModuleList([nn.Dropout(0.1), nn.AlphaDropout(0.1), nn.Dropout(0.0)])
        self.recurrent = nn.LSTM(4, 4, num_layers=2, dropout=0.1)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1)


def test_dropout_is_switched_off_wherever_it_is_kept_and_counted() -> None:
    module = DropsEverywhere()
    assert switch_off_dropout(module) == 7
    assert (module.attention_dropout, module.recurrent.dropout, module.attention.dropout) == (0, 0, 0)
    assert [layer.p for layer in module.layers] == [0, 0, 0]
    assert (module.config.attn_pdrop, module.config.hidden_dropout, module.config.width) == (0, 0, 0.5)
    assert module.scale == 0.5
    assert switch_off_dropout(module) == 0


def test_the_object_that_the_next_model_is_built_from_keeps_its_dropout() -> None:
    switch_off_dropout(DropsEverywhere())
    assert (SHARED.attn_pdrop, SHARED.hidden_dropout) == (0.1, 0.2)


def test_a_transformers_model_draws_nothing_once_its_dropout_is_off() -> None:
    module = build("hf", model_type="gpt2", config=TINY_GPT2).train()
    batch = fetch(data()[0], range(4))
    assert module(batch)[0] != module(batch)[0]
    assert switch_off_dropout(module) > 0
    assert module(batch)[0] == module(batch)[0]


def test_a_user_s_code_leaves_directory_and_streams_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths of whatever comes next begin there, and all is told there: a logger that takes their place has no isatty."""
    goes = "import os, sys\ndef make(): os.chdir('/'); sys.stdout = sys.stderr = object()\nmake()\n"
    (tmp_path / "goes_elsewhere.py").write_text(goes)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    streams = sys.stdout, sys.stderr
    make = resolve("goes_elsewhere:make")
    assert (Path.cwd(), sys.stdout, sys.stderr) == (tmp_path, *streams)
    call_target("model", make, {})
    assert (Path.cwd(), sys.stdout, sys.stderr) == (tmp_path, *streams)


def test_a_process_that_a_user_s_code_has_forked_goes_no_further() -> None:
    """It would be a second driver of the study."""
    code = (
        "import os; from batchscout.trainers.config import call_target; call_target('data', os.fork, {}); print('here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "here\n"
    assert "your code has forked" in done.stderr
