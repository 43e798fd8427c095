"""The built-in data sets of text: `python_stdlib`, `text` and `hf`, the names that `data.target` may have.

T is seq_len. Text is tokenised and packed once, into a cache that every rank and every trial maps into memory.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from batchscout.trainers.config import TEXT_SEQ_LEN
from batchscout.trainers.data.cache import cached, hash_of
from batchscout.trainers.data.corpus import (
    Corpus,
    DataFiles,
    corpus_of_contents,
    corpus_of_files,
    corpus_of_parts,
    hf_splits,
    named_twice,
    no_progress_bars,
    num_files_in,
    parts_of,
    read_up_to,
    refuse_shared_files,
    shared_by,
    stdlib_files,
)
from batchscout.trainers.data.packing import pack, split_rows, write_rows
from batchscout.trainers.data.tokenizers import TokenizerSpec, encoder_of, tokenizer_identity
from batchscout.trainers.files import own_file

FORMAT_VERSION = 3
"""Part of every cache key; raise it when the same text would be packed differently."""
DEFAULT_VAL_FRACTION = 0.05
"""The share of the training samples that is held out where there is no val."""


def python_stdlib(
    *,
    seq_len: int = TEXT_SEQ_LEN,
    tokenizer: TokenizerSpec = {"train_bpe": 2048},  # noqa: B006 (never changed)
    max_text_bytes: int = 8_000_000,
    val_fraction: float = DEFAULT_VAL_FRACTION,
) -> tuple[TokenSamples, TokenSamples]:
    """Open the source text of the running Python's standard library; whole files of it are held out as val."""
    check_whole("seq_len", seq_len)
    check_whole("max_text_bytes", max_text_bytes)
    _check_fraction(val_fraction)
    files = read_up_to(stdlib_files(), max_text_bytes)
    num_val = num_files_in(files, val_fraction * sum(map(len, files)))
    return _packed_sets(corpus_of_contents(files[num_val:]), corpus_of_contents(files[:num_val]), seq_len, tokenizer)


def text(
    *,
    train: str | list[str],
    val: str | list[str] | None = None,
    seq_len: int = TEXT_SEQ_LEN,
    tokenizer: TokenizerSpec = {"train_bpe": 2048},  # noqa: B006 (never changed)
    val_fraction: float | None = None,
) -> tuple[TokenSamples, TokenSamples]:
    """Open UTF-8 files, or patterns of them. Without `val` the last `val_fraction` of the training samples is held
    out."""
    check_whole("seq_len", seq_len)
    check_held_out(val, val_fraction)
    refuse_shared_files(train, val)
    held_out = (val_fraction or DEFAULT_VAL_FRACTION) if val is None else corpus_of_files("val", val)
    return _packed_sets(corpus_of_files("train", train), held_out, seq_len, tokenizer)


def hf(
    *,
    path: str,
    name: str | None = None,
    data_files: DataFiles | None = None,
    train_split: str = "train",
    val_split: str | None = None,
    val_fraction: float | None = None,
    text_column: str = "text",
    seq_len: int = TEXT_SEQ_LEN,
    tokenizer: TokenizerSpec = {"train_bpe": 2048},  # noqa: B006 (never changed)
) -> tuple[TokenSamples, TokenSamples]:
    """Open a data set of the `datasets` library: what load_dataset(path, name, data_files=...) knows, or a folder that save_to_disk has
    written. Without `val_split` its `validation` split is taken; where there is none, or `val_fraction` is given, the last
    `val_fraction` of the training samples is held out."""
    check_whole("seq_len", seq_len)
    if val_fraction is not None:
        _check_fraction(val_fraction)
    if val_split is not None and val_fraction is not None:
        raise ValueError(
            f"data.kwargs.val_split is '{val_split}' and data.kwargs.val_fraction {val_fraction}; give one of the two: a split, or the share "
            "of the training samples that is held out"
        )
    with no_progress_bars():
        splits = hf_splits("path", path, name, data_files)
    train = parts_of(splits, "train_split", train_split)
    if val_split is None and val_fraction is None and "validation" in splits:
        val_split = "validation"
    if val_split is not None:
        val = parts_of(splits, "val_split", val_split)
        if shared := shared_by(splits, itertools.product(train, val)):
            raise ValueError(
                f"data.kwargs.train_split '{train_split}' and val_split '{val_split}' share {', '.join(shared)}, and samples that are trained "
                "on tell nothing as val; take other samples, such as train[:90%] and train[90%:], or give val_fraction: 0.05 instead of val_split"
            )
        held_out = corpus_of_parts(splits, val, text_column)
    else:
        shared = shared_by(splits, itertools.combinations(train, 2))
        shared += [file for split in {part.split for part in train} for file in named_twice(splits[split].files)]
        if shared:
            raise ValueError(
                f"data.kwargs.train_split '{train_split}' takes {', '.join(shared)} twice, and what is held out of it may be trained on; take "
                "each sample once, or give val_split"
            )
        held_out = val_fraction or DEFAULT_VAL_FRACTION
    return _packed_sets(corpus_of_parts(splits, train, text_column), held_out, seq_len, tokenizer)


def check_whole(name: str, number: object) -> None:
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"data.kwargs.{name} is {number!r}; give a whole number of at least 1")


def check_held_out(val: object, val_fraction: object) -> None:
    """Raise ValueError where both are given, or the fraction is none."""
    if val_fraction is None:
        return
    _check_fraction(val_fraction)
    if val is not None:
        raise ValueError(
            f"data.kwargs.val is '{val}' and data.kwargs.val_fraction {val_fraction}; give one of the two: files, or the share of the training "
            "samples that is held out"
        )


def _check_fraction(val_fraction: object) -> None:
    if not isinstance(val_fraction, float) or not 0 < val_fraction < 1:
        raise ValueError(f"data.kwargs.val_fraction is {val_fraction!r}; give a number between 0 and 1, such as 0.05")


class TokenSamples(Dataset[dict[str, Tensor]]):
    """Packed text, mapped into memory. A sample is {input_ids (T,), targets (T,)}; targets are one token ahead."""

    def __init__(self, file: Path, vocab_size: int, seq_len: int) -> None:
        with own_file(file, "read"):
            self.rows = np.load(file, mmap_mode="r")
        self.file, self.vocab_size, self.seq_len = file, vocab_size, seq_len

    @property
    def content_hash(self) -> str:
        """Differs where the samples do."""
        return self.file.parent.name

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenSamples, (self.file, self.vocab_size, self.seq_len)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """Return the samples at `indices`, read at once."""
        rows = torch.from_numpy(self.rows[indices].astype(np.int64))
        return [{"input_ids": row[:-1], "targets": row[1:]} for row in rows]


def _packed_sets(
    train: Corpus, held_out: Corpus | float, seq_len: int, tokenizer: TokenizerSpec
) -> tuple[TokenSamples, TokenSamples]:
    """Return (train, val) from the cache, into which they are packed first if need be.

    held_out: the text of val, or the fraction of the training samples that becomes val.
    """
    held_out_identity = held_out.content_hash if isinstance(held_out, Corpus) else held_out
    identity = [FORMAT_VERSION, train.content_hash, held_out_identity, seq_len, tokenizer_identity(tokenizer)]
    key = hash_of([json.dumps(identity).encode()])
    entry = cached(key, lambda directory: _build(directory, train, held_out, seq_len, tokenizer))
    with own_file(entry / "about.json", "read"):
        vocab_size = json.loads((entry / "about.json").read_text())["vocab_size"]
    train_samples, val_samples = (TokenSamples(entry / f"{name}.npy", vocab_size, seq_len) for name in ("train", "val"))
    return train_samples, val_samples


def _build(directory: Path, train: Corpus, held_out: Corpus | float, seq_len: int, tokenizer: TokenizerSpec) -> None:
    """Write train.npy, val.npy, (N, T + 1) each, and about.json."""
    with no_progress_bars():
        documents = train.documents()
        encode, vocab_size = encoder_of(tokenizer, documents, directory)
        train_rows = pack(documents, "train", encode, vocab_size, seq_len, directory)
        if isinstance(held_out, Corpus):
            val_rows = pack(held_out.documents(), "val", encode, vocab_size, seq_len, directory)
        else:
            train_rows, val_rows = split_rows(train_rows, held_out, seq_len)
        write_rows(directory / "train.npy", train_rows, seq_len)
        write_rows(directory / "val.npy", val_rows, seq_len)
    for working_file in directory.glob("*.arrow"):
        working_file.unlink()
    (directory / "about.json").write_text(json.dumps({"vocab_size": vocab_size}))
