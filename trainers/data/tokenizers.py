"""Tokenizers: what `data.kwargs.tokenizer` may say, and how text becomes token numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchscout.trainers.data.cache import hash_of_file

if TYPE_CHECKING:
    import datasets
    import pyarrow


TOKENIZER_CHOICES = "use bytes, {train_bpe: 8192}, the path of a tokenizer.json, or a name on the Hugging Face hub"


TokenizerSpec = str | dict[str, int]


Encode = Callable[[Sequence[str]], np.ndarray]


def tokenizer_identity(spec: TokenizerSpec) -> str:
    """Return a text that differs where the tokens would. Raises ValueError where `data.kwargs.tokenizer` is no valid
    choice."""
    match spec:
        case {"train_bpe": int(vocab_size)} if len(spec) == 1 and not isinstance(vocab_size, bool):
            if vocab_size < 256:
                raise ValueError(
                    f"data.kwargs.tokenizer asks for train_bpe: {vocab_size}; it starts from 256 bytes, give more"
                )
            return f"train_bpe {vocab_size}"
        case "bytes":
            return "bytes"
        case str() if Path(spec).is_file():
            return f"file {hash_of_file(Path(spec)).hex()}"
        case str() if spec and not spec.endswith(".json"):
            return f"hub {spec}"
        case str() if spec:
            raise ValueError(f"data.kwargs.tokenizer names '{spec}', which does not exist; {TOKENIZER_CHOICES}")
    raise ValueError(f"data.kwargs.tokenizer is {spec!r}; {TOKENIZER_CHOICES}")


def encoder_of(spec: TokenizerSpec, documents: datasets.Dataset, directory: Path) -> tuple[Encode, int]:
    """Return (a function from texts to their tokens in one array, vocab_size). The tokenizer is saved as
    tokenizer.json."""
    if spec == "bytes":
        return lambda texts: np.frombuffer("".join(texts).encode(), np.uint8), 256
    tokenizer = loaded_tokenizer(spec) if isinstance(spec, str) else trained_bpe(spec["train_bpe"], documents)
    tokenizer.save(str(directory / "tokenizer.json"))

    def encode(texts: Sequence[str]) -> np.ndarray:
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, np.int64) for encoding in encodings])

    return encode, 1 + max(tokenizer.get_vocab().values())  # ids may have gaps


def loaded_tokenizer(spec: str) -> Any:
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(spec) if Path(spec).is_file() else Tokenizer.from_pretrained(spec)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(
            f"data.kwargs.tokenizer '{spec}' could not be loaded: {error}; "
            "give the path of a tokenizer.json, or train one on the data with tokenizer: {train_bpe: 8192}"
        ) from error
    return of_whole_texts(found)


def of_whole_texts(tokenizer: Any) -> Any:
    """Let a tokenizer return all tokens of a text, and no others. It is saved with the length to which it cut or padded a batch last, and
    would do so again."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def trained_bpe(vocab_size: int, documents: datasets.Dataset, special_tokens: Sequence[str] = ()) -> Any:
    """Train a byte-level BPE on the documents. It is smaller than asked for where they hold fewer pairs of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    batches: Iterator[Any] = documents.with_format("arrow").iter(batch_size=256)
    tokenizer.train_from_iterator(map(lines_of, batches), trainer)
    return tokenizer


def lines_of(texts: pyarrow.Table) -> list[str]:
    """Return the table's texts, each ended by a line end, so that they can be put one after the other."""
    return [f"{text or ''}\n" for text in texts.column(0).to_pylist()]
