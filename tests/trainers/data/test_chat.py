"""Of a conversation only what the assistant wrote is learnt, whatever the form, the tokenizer and the template."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from batchscout.trainers.config import DataConfig
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.chat import ChatSamples
from batchscout.trainers.data.chat_tokenizers import PLAIN
from batchscout.trainers.data.conversations import Row, pieces_of, texts_of
from batchscout.trainers.data.tokenizers import trained_bpe
from tests.support.map_style import map_style_sets
from tests.support.tiny import config, cpu_run

pytestmark = pytest.mark.usefixtures("cache")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_EARLIER_ANSWERS = (
    "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TWO_TURNS = [
    said("system", "Be brief."), said("user", "Two and two?"), said("assistant", "Four."),
    said("user", "Größer?"), said("assistant", "Fünf \N{GRINNING FACE}"),
]  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {"messages": TWO_TURNS},
    {"prompt": "The capital of France is", "completion": " Paris."},
    {"prompt": [said("user", "Hi"), said("assistant", "Hello, who?"), said("user", "Me")], "completion": [said("assistant", "I see")]},
    {"messages": [said("user", "One?"), said("assistant", "Two")]},
]  # fmt: skip
LEARNT = ["Four.|Fünf \N{GRINNING FACE}|", " Paris.|", "I see|", "Two|"]
"""What the assistant wrote in each, with its ends."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path, ROWS)


def written(folder: Path, rows: list[Any]) -> str:
    path = folder / "chat.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in rows))
    return str(path)


def saved(folder: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"messages": row["messages"]} for row in ROWS if "messages" in row]).save_to_disk(folder)


def opened(train: str | list[str], **kwargs: Any) -> tuple[ChatSamples, ChatSamples]:
    val = shutil.copy(train, f"{train}.val") if isinstance(train, str) and Path(train).is_file() else train
    sets = map_style_sets(DataConfig(target="chat", kwargs={"train": train, "val": val, **kwargs}))
    assert all(isinstance(one, ChatSamples) for one in sets)
    return sets  # pyright: ignore[reportReturnType]


def tokenizer_folder(folder: Path, template: str | None) -> str:
    """A real tokenizer of transformers, trained on the spot."""
    transformers = pytest.importorskip("transformers")
    from datasets import Dataset

    special = ["<|im_start|>", "<|im_end|>"]
    texts = [texts_of(pieces_of(Row("here", one), PLAIN)) for one in ROWS]
    bpe = trained_bpe(300, Dataset.from_dict({"text": texts}), special)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    made.chat_template = template
    made.save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def learnt(samples: ChatSamples, index: int, text_of: Any) -> str:
    targets = samples[index]["targets"]
    return text_of(targets[targets != -100].tolist())


def of_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode().replace("<|end|>", "|")


def test_in_bytes_the_targets_are_what_the_assistant_wrote(file: str) -> None:
    samples, _ = opened(file, tokenizer="bytes")
    assert [learnt(samples, index, of_bytes) for index in range(len(samples))] == LEARNT
    sample = samples[0]
    whole = "<|system|>Be brief.<|end|><|user|>Two and two?<|end|><|assistant|>Four.<|end|>"
    assert bytes(sample["input_ids"].tolist()).decode().startswith(whole)
    counted = sample["targets"] != -100
    assert torch.equal(sample["targets"][:-1][counted[:-1]], sample["input_ids"][1:][counted[:-1]])


def test_a_tokenizer_that_is_trained_on_them_has_a_token_for_each_mark(file: str, cache: Path) -> None:
    samples, _ = opened(file, tokenizer={"train_bpe": 300})
    tokenizer = Tokenizer.from_file(str(samples.entry / "tokenizer.json"))

    def text_of(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False).replace("<|end|>", "|")

    assert [learnt(samples, index, text_of) for index in range(len(samples))] == LEARNT
    assert samples.vocab_size <= 300
    assert samples[0]["input_ids"][0] == tokenizer.token_to_id("<|system|>")


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_tokenizers_own_template_is_used_where_it_has_one(tmp_path: Path, file: str, template: str | None) -> None:
    folder = tokenizer_folder(tmp_path, template)
    samples, _ = opened(file, tokenizer=folder)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")

    def text_of(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False).replace("<|im_end|>", "|").replace("<|end|>", "|")

    assert [learnt(samples, index, text_of) for index in range(len(samples))] == LEARNT
    begins = tokenizer.decode(samples[0]["input_ids"].tolist(), skip_special_tokens=False)
    assert begins.startswith(
        "<|system|>" if template is None else "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
    )


def test_files_are_validated_on_a_folder_and_a_folder_on_files(tmp_path: Path, file: str) -> None:
    saved(tmp_path / "saved")
    train, val = opened(file, val=str(tmp_path / "saved"), tokenizer="bytes")
    assert (len(train), len(val)) == (4, 2)
    train, val = opened(str(tmp_path / "saved"), val=file, tokenizer="bytes")
    assert (len(train), len(val)) == (2, 4)


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_length_that_is_saved_with_a_tokenizer_neither_cuts_nor_pads_a_conversation(
    tmp_path: Path, file: str, template: str | None
) -> None:
    folder = tokenizer_folder(tmp_path, template)
    plain, _ = opened(file, tokenizer=folder)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(max_length=5)
    tokenizer.enable_padding(length=500)
    tokenizer.save(f"{folder}/tokenizer.json")
    samples, _ = opened(file, tokenizer=folder)
    assert samples.content_hash != plain.content_hash, "they are made anew"
    assert all(torch.equal(samples[number]["targets"], plain[number]["targets"]) for number in range(len(ROWS)))


def test_a_saved_data_set_gives_the_same_samples_and_its_own_validation_set(tmp_path: Path, file: str) -> None:
    from datasets import Dataset, DatasetDict

    rows = [{"messages": row["messages"]} for row in ROWS if "messages" in row]
    DatasetDict({"train": Dataset.from_list(rows), "validation": Dataset.from_list(rows[1:])}).save_to_disk(
        tmp_path / "saved"
    )
    train, val = map_style_sets(
        DataConfig(target="chat", kwargs={"train": str(tmp_path / "saved"), "tokenizer": "bytes"})
    )
    assert (len(train), len(val)) == (2, 1)
    of_file, _ = opened(file, tokenizer="bytes")
    for mine, other in ((train[0], of_file[0]), (train[1], of_file[3]), (val[0], of_file[3])):
        assert all(torch.equal(mine[key], other[key]) for key in ("input_ids", "targets"))


def test_a_batch_is_as_long_as_its_longest_sample_and_what_is_added_is_no_target(file: str) -> None:
    samples, _ = opened(file, tokenizer="bytes")
    batch = fetch(samples, [1, 3])
    longest = max(samples.lengths[[1, 3]])
    assert batch["input_ids"].shape == batch["targets"].shape == (2, longest)
    for row, index in enumerate((1, 3)):
        length = int(samples.lengths[index])
        assert torch.equal(batch["targets"][row, :length], samples[index]["targets"])
        assert (batch["targets"][row, length:] == -100).all()
    assert samples.seq_len == max(samples.lengths)


def test_built_once_and_opened_again_as_it_was(file: str, cache: Path) -> None:
    first, _ = opened(file, tokenizer="bytes")
    built = {path: path.stat().st_mtime_ns for path in first.entry.iterdir()}
    again, _ = opened(file, tokenizer="bytes")
    assert {path: path.stat().st_mtime_ns for path in again.entry.iterdir()} == built
    sent = pickle.loads(pickle.dumps(again))
    assert np.array_equal(sent.tokens, first.tokens)
    assert opened(file, tokenizer="bytes", seq_len=500)[0].content_hash != first.content_hash
    Path(file).write_text(Path(file).read_text() + "\n" + json.dumps(ROWS[3]))
    assert len(opened(file, tokenizer="bytes")[0]) == len(first) + 1


def test_longer_conversations_are_cut_or_left_out_but_only_if_asked(file: str) -> None:
    message = (
        r"2 of 4 conversations of the train data have more than seq_len \(60\) tokens, the longest \d+; raise "
        r"data\.kwargs\.seq_len, or say what becomes of them: data\.kwargs\.longer: cut, or leave_out"
    )
    with pytest.raises(ValueError, match=message):
        opened(file, tokenizer="bytes", seq_len=60)
    left, _ = opened(file, tokenizer="bytes", seq_len=60, longer="leave_out")
    assert [learnt(left, index, of_bytes) for index in range(len(left))] == [LEARNT[1], LEARNT[3]]
    cut, _ = opened(file, tokenizer="bytes", seq_len=75, longer="cut")
    assert "Four.<|end|>".startswith(learnt(cut, 0, of_bytes))
    assert max(cut.lengths) <= 75


def test_without_a_validation_set_the_last_conversations_are_held_out(file: str) -> None:
    kwargs = {"train": file, "tokenizer": "bytes", "val_fraction": 0.25}
    train, val = map_style_sets(DataConfig(target="chat", kwargs=kwargs))
    assert (len(train), len(val)) == (3, 1)
    assert bytes(val[0]["input_ids"].tolist()).startswith(b"<|user|>One?")


def test_the_masked_prompt_moves_no_weight(file: str) -> None:
    """The gradient of a batch is that of its counted targets alone, so it is the same for every split."""
    data = {"target": "chat", "kwargs": {"train": file, "val": shutil.copy(file, f"{file}.val"), "tokenizer": "bytes"}}
    run = cpu_run(config(data=data, micro_batch_size=2, gradient_accumulation_steps=2), steps=1)
    (step,) = run.read()
    counted = sum(int((run.first_samples[index]["targets"] != -100).sum()) for index in range(4))
    assert run.meter.noise.steps[0][2] == counted
    assert step.loss == pytest.approx(np.log(256), rel=0.1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"messages": ['], "chat.jsonl, line 1, is no JSON"),
        (["[1]"], "chat.jsonl, line 1, holds a list, not an object; give it `messages`, a list of"),
        ([ROWS[0], {"text": "a"}], "chat.jsonl, line 2, has text, which is no conversation; give it `messages`"),
        ([{"messages": [said("user", "a")]}], "line 1, has no message of the assistant, so nothing to learn; leave it out"),
        ([{"messages": [{"content": "a"}]}], "line 1, has a message without a role"),
        ([{"messages": [said("user", [1]), said("assistant", "b")]}], "line 1: a message of the user has a list as its content"),
        (["  "], "the train data has no conversation; name files that are not empty"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_by_its_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        opened(written(tmp_path, rows), tokenizer="bytes")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            WITHOUT_EARLIER_ANSWERS,
            r"line 1: the tokenizer's chat template writes message 3 otherwise once there are others",
        ),
        (REFUSING, r"line 1: the tokenizer's chat template refuses it: no system"),
    ],
)
def test_a_template_that_does_not_tell_what_was_written_is_refused(
    tmp_path: Path, file: str, template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        opened(file, tokenizer=tokenizer_folder(tmp_path, template))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seq_len": 0}, "data.kwargs.seq_len is 0; give a whole number of at least 1"),
        ({"longer": "drop"}, "data.kwargs.longer is 'drop'; use cut or leave_out"),
        ({"val": None, "val_fraction": 2.0}, "data.kwargs.val_fraction is 2.0; give a number between 0 and 1"),
        ({"val_fraction": 0.1}, "and data.kwargs.val_fraction 0.1; give one of the two"),
        ({"val": "chat.jsonl"}, "data.kwargs.train and val share 1 of 1 files"),
        ({"train": ["chat.jsonl", "*.jsonl"], "val": None}, "chat.jsonl' twice, and what is held out of it"),
        (
            {"train": "saved", "val": "saved"},
            "train and val are both 'saved', which has no validation set; leave val out",
        ),
        ({"train": "no.jsonl"}, "data.kwargs.train names 'no.jsonl', which does not exist"),
        ({"tokenizer": {"train_bpe": 8}}, "it starts from 256 bytes, give more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    file: str, kwargs: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(file).parent)
    if kwargs.get("train") == "saved":
        saved(Path("saved"))
    with pytest.raises(ValueError, match=re.escape(message)):
        opened(**({"train": file, "tokenizer": "bytes"} | kwargs))
