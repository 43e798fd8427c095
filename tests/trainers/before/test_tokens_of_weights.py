"""A pretrained model gets the tokens that it was trained with, or is refused before anything is trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchscout.trainers.before.first_pass import FirstPass, parts
from batchscout.trainers.before.tokens_of_weights import check_tokens
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.errors import DataFault
from tests.support.tiny import config

TEXT = {"target": "text", "kwargs": {"train": "train.txt", "seq_len": 16}}


@pytest.fixture(autouse=True)
def base(home: Path, cache: Path) -> Path:
    """A folder that save_pretrained has written, and a text."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    Path("train.txt").write_text("".join(f"line {number} of a text\n" for number in range(200)))
    words = Tokenizer(models.WordLevel({"<pad>": 0, "line": 1, "of": 2, "a": 3, "text": 4}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained("base")
    made = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16
    )  # fmt: skip
    transformers.LlamaForCausalLM(made).save_pretrained("base")
    return home / "base"


def tuned(name: str, target: str = "hf", **kwargs: Any) -> TrialConfig:
    model: dict[str, Any] = {"target": target, "kwargs": {"name": name, "pretrained": True}}
    if target != "hf":
        model["kwargs"] = {"pretrained_model_name_or_path": name}
    return config(model=model, data={**TEXT, "kwargs": {**TEXT["kwargs"], **kwargs}})


@pytest.mark.slow
def test_the_first_pass_refuses_other_tokens_and_takes_the_models_own() -> None:
    *_, found = parts(tuned("base"))
    assert isinstance(found, FirstPass)
    assert (found.outcome, found.part) == ("refused", "data")
    assert found.said.endswith("set data.kwargs.tokenizer: base/tokenizer.json")
    *_, found = parts(tuned("base", tokenizer="base/tokenizer.json"))
    assert isinstance(found, FirstPass)
    assert found.outcome == "passed"


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (tuned("base"), "is the default, train_bpe, which is trained on the data; set data.kwargs.tokenizer: base/tokenizer.json"),
        (tuned("base", tokenizer={"train_bpe": 300}), "tokenizer is {'train_bpe': 300}, which is trained on the data; set"),
        (tuned("base", tokenizer="bytes"), "data.kwargs.tokenizer is bytes; set data.kwargs.tokenizer: base/tokenizer.json"),
        (tuned("gpt2", tokenizer="bytes"), "model 'gpt2' is pretrained in the tokens of a tokenizer of its own"),
        (tuned("base", "transformers:AutoModelForCausalLM.from_pretrained"), "set data.kwargs.tokenizer: base/tokenizer.json"),
        (config(model={"target": "hf", "kwargs": {"name": "base", "pretrained": True}}, data={**TEXT, "target": "chat"}),
         "set data.kwargs.tokenizer: base"),
    ],
)  # fmt: skip
def test_tokens_that_are_not_the_weights_own_are_refused_with_those_that_are(trial: TrialConfig, message: str) -> None:
    with pytest.raises(DataFault, match=rf"{re.escape(message)}"):
        check_tokens(trial)


def test_what_was_trained_on_bytes_or_begins_at_random_is_not_refused(base: Path) -> None:
    check_tokens(config(model={"target": "hf", "kwargs": {"name": "base"}}, data=TEXT))
    check_tokens(config(model={"target": "hf", "kwargs": {"name": "base", "pretrained": True}}))
    for file in base.glob("tokenizer*"):
        file.unlink()
    check_tokens(tuned("base", tokenizer="bytes"))
