"""Packing: a stream of tokens becomes rows of equal length, which are written to disk as one array.

T is seq_len, N the number of rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchscout.trainers.data.tokenizers import Encode, lines_of

if TYPE_CHECKING:
    import datasets
    import pyarrow


ROWS_PER_WRITE = 1 << 12


def pack(
    documents: datasets.Dataset, name: str, encode: Encode, vocab_size: int, seq_len: int, directory: Path
) -> datasets.Dataset:
    """Return the documents' tokens in rows of T + 1. Raises ValueError where the text does not fill one."""
    packer = Packer(encode, seq_len, np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32))
    rows = documents.with_format("arrow").map(
        packer,
        batched=True,
        batch_size=256,
        remove_columns=documents.column_names,
        cache_file_name=str(directory / f"{name}.arrow"),
        new_fingerprint=name,
    )
    if not packer.num_rows:
        raise ValueError(
            f"the {name} text has {packer.num_tokens} tokens, one sample needs seq_len + 1 = {seq_len + 1}; "
            "give more text or lower data.kwargs.seq_len"
        )
    return rows


class Packer:
    """Turns tables of texts into tables of token rows; what does not fill a row waits for the next call."""

    def __init__(self, encode: Encode, seq_len: int, dtype: np.dtype[Any]) -> None:
        self.encode, self.seq_len = encode, seq_len
        self.rest = np.empty(0, dtype)
        self.num_tokens = self.num_rows = 0

    def __call__(self, texts: pyarrow.Table) -> pyarrow.Table:
        import pyarrow as pa

        tokens = self.encode(lines_of(texts)).astype(self.rest.dtype)
        rows, self.rest = cut(np.concatenate([self.rest, tokens]), self.seq_len)
        self.num_tokens += len(tokens)
        self.num_rows += len(rows)
        flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
        return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, self.seq_len + 1)})


def cut(tokens: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows (N, T + 1), the tokens that are left). A row starts with the last token of the row before it."""
    num_rows = max(0, (len(tokens) - 1) // seq_len)
    if not num_rows:
        return np.empty((0, seq_len + 1), tokens.dtype), tokens
    rows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]
    return rows[:num_rows], tokens[num_rows * seq_len :]


def split_rows(rows: datasets.Dataset, fraction: float, seq_len: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return (the first rows, the last `fraction` of them, which is at least one row)."""
    num_val = max(1, round(fraction * len(rows)))
    num_train = len(rows) - num_val
    if not num_train:
        raise ValueError(
            f"the train text has {len(rows)} sample{'s' * (len(rows) != 1)} of seq_len + 1 = {seq_len + 1} tokens, "
            f"and val takes {num_val}; give more text, a val of its own, or lower data.kwargs.seq_len"
        )
    return rows.select(range(num_train)), rows.select(range(num_train, len(rows)))


def write_rows(path: Path, rows: datasets.Dataset, seq_len: int) -> None:
    """Write the rows' tokens as one array, which opens at once and without the library that made it."""
    array: np.ndarray | None = None
    for start in range(0, len(rows), ROWS_PER_WRITE):
        table: Any = rows.with_format("arrow")[start : start + ROWS_PER_WRITE]
        tokens = table["tokens"].combine_chunks().flatten().to_numpy().reshape(-1, seq_len + 1)
        if array is None:
            array = np.lib.format.open_memmap(path, "w+", tokens.dtype, (len(rows), seq_len + 1))
        array[start : start + len(tokens)] = tokens
    assert array is not None
    array.flush()
