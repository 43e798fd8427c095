"""The built-in data set `chat`: conversations and instructions, in which only what the assistant wrote is learnt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from batchscout.trainers.criteria import IGNORED_TARGET
from batchscout.trainers.data.cache import cached, hash_of
from batchscout.trainers.data.chat_tokenizers import ChatTokenizer, chat_tokenizer_identity, chat_tokenizer_of
from batchscout.trainers.data.conversations import Row, Rows, is_folder, pieces_of, rows_of
from batchscout.trainers.data.corpus import no_progress_bars, refuse_shared_files
from batchscout.trainers.data.text import DEFAULT_VAL_FRACTION, check_held_out, check_whole
from batchscout.trainers.data.tokenizers import TokenizerSpec
from batchscout.trainers.files import own_file

FORMAT_VERSION = 2
"""Part of every cache key; raise it when the same conversations would be written differently."""
Longer = Literal["cut", "leave_out"]


def chat(
    *,
    train: str | list[str],
    val: str | list[str] | None = None,
    tokenizer: TokenizerSpec = {"train_bpe": 2048},  # noqa: B006 (never changed)
    seq_len: int | None = None,
    longer: Longer | None = None,
    val_fraction: float | None = None,
) -> tuple[ChatSamples, ChatSamples]:
    """Open JSON-lines files, or a folder that save_to_disk of the `datasets` library has written. Without `val` a folder's own
    validation set is taken; where there is none, or `val_fraction` is given, the last `val_fraction` of the conversations is held out.

    tokenizer: a folder of transformers, whose chat template is used if it has one; or what the data set `text` takes. seq_len: the
    most tokens of a sample; None: the longest conversation's. longer: what becomes of longer ones.
    """
    if seq_len is not None:
        check_whole("seq_len", seq_len)
    if longer not in (None, "cut", "leave_out"):
        raise ValueError(f"data.kwargs.longer is {longer!r}; use cut or leave_out")
    check_held_out(val, val_fraction)
    found = rows_of("train", train)
    _refuse_shared(train, val, found)
    if val is not None:
        of_val = rows_of("val", val)
        held_out = of_val.get("validation") or next(iter(of_val.values()))
    else:
        held_out = val_fraction or found.get("validation", DEFAULT_VAL_FRACTION)
    if "train" not in found:
        raise ValueError(f"data.kwargs.train '{train}' has the splits {', '.join(found)}, and no train")
    rows, val_identity = found["train"], held_out.content_hash if isinstance(held_out, Rows) else held_out
    identity = [FORMAT_VERSION, rows.content_hash, val_identity, chat_tokenizer_identity(tokenizer), seq_len, longer]
    key = hash_of([json.dumps(["chat", *identity]).encode()])
    entry = cached(key, lambda directory: _build(directory, rows, held_out, tokenizer, seq_len, longer))
    return ChatSamples(entry, "train"), ChatSamples(entry, "val")


def _refuse_shared(train: str | list[str], val: str | list[str] | None, found: dict[str, Rows]) -> None:
    """Raise ValueError where what is held out is trained on, too. found: the splits of train."""
    if not is_folder(train):
        if val is None or not is_folder(val):
            refuse_shared_files(train, val)
    elif val is not None and is_folder(val) and Path(train).samefile(val) and "validation" not in found:
        raise ValueError(
            f"data.kwargs.train and val are both '{val}', which has no validation set; leave val out: then the last conversations "
            "(val_fraction) are held out"
        )


class ChatSamples(Dataset[dict[str, Tensor]]):
    """Conversations, mapped into memory. A sample is {input_ids (T,), targets (T,)}; targets are one token ahead, and ignored where
    the assistant did not write it. T differs from sample to sample."""

    def __init__(self, entry: Path, name: str) -> None:
        with own_file(entry, "read"):
            about = json.loads((entry / "about.json").read_text())
            self.tokens, self.learnt, self.ends = (
                np.load(entry / f"{name}.{part}.npy", mmap_mode="r") for part in ("tokens", "learnt", "ends")
            )
        self.entry, self.name = entry, name
        self.vocab_size, self.seq_len = about["vocab_size"], about["seq_len"]
        self.lengths = np.diff(self.ends) - 1

    @property
    def content_hash(self) -> str:
        """Differs where the samples do."""
        return self.entry.name

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatSamples, (self.entry, self.name)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin, end = self.ends[index], self.ends[index + 1]
        tokens = torch.from_numpy(self.tokens[begin:end].astype(np.int64))
        targets = torch.from_numpy(np.where(self.learnt[begin:end], tokens, IGNORED_TARGET))
        return {"input_ids": tokens[:-1], "targets": targets[1:]}

    @staticmethod
    def collate_fn(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return them as long as the longest. A causal model needs no mask of what comes after a sample's end."""
        fill = {"input_ids": 0, "targets": IGNORED_TARGET}
        return {
            key: torch.nn.utils.rnn.pad_sequence([one[key] for one in samples], batch_first=True, padding_value=value)
            for key, value in fill.items()
        }


Sample = tuple[np.ndarray, np.ndarray]
"""Tokens, and which of them are to be learnt."""


def _build(
    directory: Path,
    train: Rows,
    held_out: Rows | float,
    spec: TokenizerSpec,
    seq_len: int | None,
    longer: Longer | None,
) -> None:
    """Write tokens, what of them is to be learnt and where each sample ends, of both sets, and about.json."""
    with no_progress_bars():
        made = chat_tokenizer_of(spec, train.read, directory)
        samples = _within("train", _encoded(train.read(), made), seq_len, longer)
        if isinstance(held_out, Rows):
            of_val = _within("val", _encoded(held_out.read(), made), seq_len, longer)
        else:
            samples, of_val = _split(samples, held_out)
    for name, part in (("train", samples), ("val", of_val)):
        _write(directory, name, part, made.vocab_size)
    longest = max(len(tokens) for tokens, _ in (*samples, *of_val)) - 1
    (directory / "about.json").write_text(json.dumps({"vocab_size": made.vocab_size, "seq_len": longest}))


def _encoded(rows: Iterator[Row], tokenizer: ChatTokenizer) -> Iterator[Sample]:
    for row in rows:
        tokens, learnt = tokenizer.encode(pieces_of(row, tokenizer.template))
        if not learnt[1:].any():
            raise ValueError(f"{row.where}, has no token that the assistant wrote after others; leave it out")
        yield tokens, learnt


def _within(name: str, samples: Iterable[Sample], seq_len: int | None, longer: Longer | None) -> list[Sample]:
    """Return the samples that have at most seq_len + 1 tokens, others as `longer` says; where they are cut, those that still have
    something to learn. Raises ValueError where it says nothing."""
    samples = list(samples)
    if not samples:
        raise ValueError(f"the {name} data has no conversation; name files that are not empty")
    most = 1 + (seq_len or max(len(tokens) for tokens, _ in samples))
    too_long = [len(tokens) - 1 for tokens, _ in samples if len(tokens) > most]
    if not too_long:
        return samples
    if longer is None:
        raise ValueError(
            f"{len(too_long)} of {len(samples)} conversations of the {name} data have more than seq_len ({seq_len}) tokens, the longest "
            f"{max(too_long)}; raise data.kwargs.seq_len, or say what becomes of them: data.kwargs.longer: cut, or leave_out"
        )
    kept = [one for one in samples if len(one[0]) <= most or longer == "cut"]
    kept = [(tokens[:most], learnt[:most]) for tokens, learnt in kept if learnt[1:most].any()]
    if not kept:
        raise ValueError(f"no conversation of the {name} data fits into seq_len ({seq_len}); raise data.kwargs.seq_len")
    return kept


def _split(samples: list[Sample], fraction: float) -> tuple[list[Sample], list[Sample]]:
    num_val = max(1, round(fraction * len(samples)))
    if num_val == len(samples):
        raise ValueError(
            f"the train data has {len(samples)} conversation{'s' * (len(samples) != 1)}, and val takes {num_val}; give more, or "
            "data.kwargs.val"
        )
    return samples[:-num_val], samples[-num_val:]


def _write(directory: Path, name: str, samples: list[Sample], vocab_size: int) -> None:
    kind: Callable[..., Any] = np.uint16 if vocab_size <= 1 << 16 else np.int32
    np.save(directory / f"{name}.tokens.npy", np.concatenate([tokens for tokens, _ in samples]).astype(kind))
    np.save(directory / f"{name}.learnt.npy", np.concatenate([learnt for _, learnt in samples]))
    np.save(directory / f"{name}.ends.npy", np.cumsum([0, *(len(tokens) for tokens, _ in samples)]))
