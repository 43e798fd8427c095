"""Samples: where they come from, and which of them a micro-batch takes.

T is seq_len. Text is tokenised and packed once, into a cache that every rank and every trial maps into memory.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import shutil
import sysconfig
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from trainers.config import DataConfig, call_target, resolve
from trainers.files import naming_the_disk

if TYPE_CHECKING:
    import datasets
    import pyarrow

FORMAT_VERSION = 2
"""Part of every cache key; raise it when the same text would be packed differently."""
ROWS_PER_WRITE = 1 << 12
TOKENIZER_CHOICES = "use bytes, {train_bpe: 8192}, the path of a tokenizer.json, or a name on the Hugging Face hub"

TokenizerSpec = str | dict[str, int]
Encode = Callable[[Sequence[str]], np.ndarray]


class SampleSet(Protocol):
    """A map-style data set. Where samples differ in length it pads in `__getitems__`, and says their `lengths`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def load_data(config: DataConfig) -> tuple[SampleSet, SampleSet]:
    """The (train, val) sets that `data.target` names; neither is empty."""
    found = call_target("data", _target(config.target), config.kwargs)
    return _checked_pair(config.target, found)


def _target(name: str) -> Callable[..., Any]:
    built_in: dict[str, Callable[..., Any]] = {"python_stdlib": python_stdlib, "text": text, "hf": hf}
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        raise ValueError(
            f"data.target '{name}' is not built in; use {', '.join(built_in)} or an import path package.module:callable"
        )
    found = resolve(name)
    if not callable(found):
        raise ValueError(f"data.target '{name}' is a {type(found).__name__}; name a callable that returns (train, val)")
    return found


def _checked_pair(target: str, found: Any) -> tuple[SampleSet, SampleSet]:
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"data.target '{target}' returned a {type(found).__name__}; return a pair (train, val)")
    for name, samples in zip(("train", "val"), found, strict=True):
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise ValueError(
                f"data.target '{target}' returned a {type(samples).__name__} as its {name} set; "
                "return a map-style data set, with __len__ and __getitem__"
            )
    train, val = found
    if not (len(train) and len(val)):
        raise ValueError(
            f"data.target '{target}' returned {len(train)} train and {len(val)} val samples; each needs at least one"
        )
    return train, val


@dataclass(frozen=True)
class Corpus:
    """Documents, read only when they are needed, and a hash of everything in them."""

    content_hash: str
    documents: Callable[[], datasets.Dataset]
    """A data set with one column, of strings."""


def python_stdlib(
    *,
    seq_len: int = 256,
    tokenizer: TokenizerSpec = {"train_bpe": 2048},  # noqa: B006 (never changed)
    max_text_bytes: int = 8_000_000,
    val_fraction: float = 0.05,
) -> tuple[TokenSamples, TokenSamples]:
    """Source text of the running Python's standard library; whole files are held out as val."""
    _check_whole("seq_len", seq_len)
    _check_whole("max_text_bytes", max_text_bytes)
    _check_fraction(val_fraction)
    files = _read_up_to(_stdlib_files(), max_text_bytes)
    num_val = _num_files_in(files, val_fraction * sum(map(len, files)))
    return _packed_sets(_corpus_of(files[num_val:]), _corpus_of(files[:num_val]), seq_len, tokenizer)


def text(
    *,
    train: str | list[str],
    val: str | list[str] | None = None,
    seq_len: int = 256,
    tokenizer: TokenizerSpec = {"train_bpe": 2048},  # noqa: B006 (never changed)
    val_fraction: float = 0.05,
) -> tuple[TokenSamples, TokenSamples]:
    """UTF-8 files, or patterns of them; without `val` the last `val_fraction` of the training samples is held out."""
    _check_whole("seq_len", seq_len)
    _check_fraction(val_fraction)
    held_out = val_fraction if val is None else _files_corpus("val", val)
    return _packed_sets(_files_corpus("train", train), held_out, seq_len, tokenizer)


def hf(
    *,
    path: str,
    name: str | None = None,
    train_split: str = "train",
    val_split: str = "validation",
    text_column: str = "text",
    seq_len: int = 256,
    tokenizer: TokenizerSpec = {"train_bpe": 2048},  # noqa: B006 (never changed)
) -> tuple[TokenSamples, TokenSamples]:
    """A data set of the `datasets` library: a name on the hub, or a folder that save_to_disk or load_dataset knows."""
    _check_whole("seq_len", seq_len)
    with _no_progress_bars():
        splits = _hf_splits(path, name)
    train = _hf_corpus(splits, "train_split", train_split, text_column)
    val = _hf_corpus(splits, "val_split", val_split, text_column)
    return _packed_sets(train, val, seq_len, tokenizer)


def _check_whole(name: str, number: object) -> None:
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"data.kwargs.{name} is {number!r}; give a whole number of at least 1")


def _check_fraction(val_fraction: object) -> None:
    if not isinstance(val_fraction, float) or not 0 < val_fraction < 1:
        raise ValueError(f"data.kwargs.val_fraction is {val_fraction!r}; give a number between 0 and 1, such as 0.05")


def _stdlib_files() -> list[Path]:
    """Every source file outside of tests, in an order that mixes the packages and is the same everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idle_test"}
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        names += [os.path.relpath(os.path.join(folder, file), root) for file in files if file.endswith(".py")]
    return [root / name for name in sorted(names, key=lambda name: _hash([name.encode()]))]


def _read_up_to(paths: Iterable[Path], max_bytes: int) -> list[bytes]:
    """The files' contents; the last one is cut so that together they have at most `max_bytes`."""
    contents: list[bytes] = []
    for path in paths:
        if max_bytes <= 0:
            break
        contents.append(path.read_bytes()[:max_bytes])
        max_bytes -= len(contents[-1])
    return contents


def _num_files_in(files: Sequence[bytes], num_bytes: float) -> int:
    """How many of the first files it takes to reach that many bytes."""
    ends = itertools.accumulate(map(len, files))
    return sum(1 for end, file in zip(ends, files, strict=True) if end - len(file) < num_bytes)


def _corpus_of(files: list[bytes]) -> Corpus:
    return Corpus(_hash(files), lambda: _documents(file.decode(errors="replace") for file in files))


def _files_corpus(field: str, patterns: str | list[str]) -> Corpus:
    """The files that data.kwargs.<field> names. Raises ValueError where there is nothing to read."""
    if not isinstance(patterns, str | list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"data.kwargs.{field} is {patterns!r}; give a file name or a list of them")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    paths = [path for pattern in patterns for path in _matches(field, pattern)]
    if not sum(path.stat().st_size for path in paths):
        raise ValueError(f"data.kwargs.{field} names {patterns}, which hold no text; name files that are not empty")
    return Corpus(_hash(map(_file_hash, paths)), lambda: _documents(_decoded(field, path) for path in paths))


def _matches(field: str, pattern: str) -> list[Path]:
    names = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if os.path.isdir(pattern):
        raise ValueError(f"data.kwargs.{field} names '{pattern}', which is a folder; write '{pattern}/*.txt'")
    if not names:
        raise ValueError(
            f"data.kwargs.{field} names '{pattern}', which does not exist; "
            f"relative paths start at {os.getcwd()}, give another path or a pattern such as 'texts/*.txt'"
        )
    return [Path(name) for name in names if os.path.isfile(name)]


def _decoded(field: str, path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.kwargs.{field} names '{path}', which is not UTF-8 (byte {error.start}); convert it to UTF-8"
        ) from error


def _documents(texts: Iterable[str]) -> datasets.Dataset:
    from datasets import Dataset

    return Dataset.from_dict({"text": [piece for whole in texts for piece in _pieces(whole)]})


def _pieces(document: str, num_characters: int = 1 << 14) -> Iterator[str]:
    """The document cut at line ends, so that tokenising needs little memory; joined by line ends it is the document."""
    start = 0
    while (end := document.find("\n", start + num_characters)) >= 0:
        yield document[start:end]
        start = end + 1
    yield document[start:]


def _hf_splits(path: str, name: str | None) -> dict[Any, datasets.Dataset]:
    from datasets import Dataset, load_dataset, load_from_disk

    if any(Path(path, marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        saved = load_from_disk(path)
        return {"train": saved} if isinstance(saved, Dataset) else dict(saved)
    try:
        return dict(load_dataset(path, name))
    except OSError as error:
        raise ValueError(
            f"data.kwargs.path '{path}' could not be loaded: {error}; "
            "check the name and the network, or give a folder written by save_to_disk"
        ) from error


def _hf_corpus(splits: dict[Any, datasets.Dataset], field: str, split: str, column: str) -> Corpus:
    if split not in splits:
        raise ValueError(f"data.kwargs.{field} '{split}' is not in the data set; choose one of: {', '.join(splits)}")
    samples = splits[split]
    if column not in samples.column_names:
        there = ", ".join(samples.column_names)
        raise ValueError(f"data.kwargs.text_column '{column}' is not in the data set; choose one of: {there}")
    if samples.features[column].dtype not in ("string", "large_string"):
        kind = samples.features[column].dtype
        raise ValueError(f"data.kwargs.text_column '{column}' holds {kind}, not text; choose a column of strings")
    content = f"{samples._fingerprint} {column}"  # changes with the data; reading it all on every open would be slow
    return Corpus(_hash([content.encode()]), lambda: samples.select_columns(column))


class TokenSamples(Dataset[dict[str, Tensor]]):
    """Packed text, mapped into memory. A sample is {input_ids (T,), targets (T,)}, the targets one token ahead."""

    def __init__(self, file: Path, vocab_size: int, seq_len: int) -> None:
        self.rows = np.load(file, mmap_mode="r")
        self.file, self.vocab_size, self.seq_len = file, vocab_size, seq_len

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenSamples, (self.file, self.vocab_size, self.seq_len)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """The samples at `indices`, read at once."""
        rows = torch.from_numpy(self.rows[indices].astype(np.int64))
        return [{"input_ids": row[:-1], "targets": row[1:]} for row in rows]


def _packed_sets(
    train: Corpus, held_out: Corpus | float, seq_len: int, tokenizer: TokenizerSpec
) -> tuple[TokenSamples, TokenSamples]:
    """(train, val) from the cache, where they are put first if they are not there. A fraction holds out of `train`."""
    held_out_identity = held_out.content_hash if isinstance(held_out, Corpus) else held_out
    identity = [FORMAT_VERSION, train.content_hash, held_out_identity, seq_len, _tokenizer_identity(tokenizer)]
    key = _hash([json.dumps(identity).encode()])
    entry = _cached(key, lambda directory: _build(directory, train, held_out, seq_len, tokenizer))
    vocab_size = json.loads((entry / "about.json").read_text())["vocab_size"]
    train_samples, val_samples = (TokenSamples(entry / f"{name}.npy", vocab_size, seq_len) for name in ("train", "val"))
    return train_samples, val_samples


def _cached(key: str, build: Callable[[Path], None]) -> Path:
    """The cache entry of this key, built aside and renamed: nobody reads half of one, and the first of two wins."""
    entry = cache_directory() / "data" / key
    if entry.exists():
        return entry
    aside = entry.with_name(f".{key[:16]}-{uuid.uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        with naming_the_disk(entry):
            build(aside)
        os.rename(aside, entry)
    except OSError:
        if not entry.exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return entry


def cache_directory() -> Path:
    """$BATCHSCOUT_CACHE, or batchscout's folder in the user's cache."""
    if own := os.environ.get("BATCHSCOUT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchscout"


def _build(directory: Path, train: Corpus, held_out: Corpus | float, seq_len: int, tokenizer: TokenizerSpec) -> None:
    """Write train.npy, val.npy, (N, T + 1) each, and about.json."""
    with _no_progress_bars():
        documents = train.documents()
        encode, vocab_size = _encoder(tokenizer, documents, directory)
        train_rows = _pack(documents, "train", encode, vocab_size, seq_len, directory)
        if isinstance(held_out, Corpus):
            val_rows = _pack(held_out.documents(), "val", encode, vocab_size, seq_len, directory)
        else:
            train_rows, val_rows = _split(train_rows, held_out, seq_len)
        _write_rows(directory / "train.npy", train_rows, seq_len)
        _write_rows(directory / "val.npy", val_rows, seq_len)
    for working_file in directory.glob("*.arrow"):
        working_file.unlink()
    (directory / "about.json").write_text(json.dumps({"vocab_size": vocab_size}))


def _pack(
    documents: datasets.Dataset, name: str, encode: Encode, vocab_size: int, seq_len: int, directory: Path
) -> datasets.Dataset:
    """Rows of T + 1 tokens. Raises ValueError where the text does not fill one."""
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


def _write_rows(path: Path, rows: datasets.Dataset, seq_len: int) -> None:
    """The rows' tokens as one array on disk, which opens in no time and without the library that made it."""
    array: np.ndarray | None = None
    for start in range(0, len(rows), ROWS_PER_WRITE):
        table: Any = rows.with_format("arrow")[start : start + ROWS_PER_WRITE]
        tokens = table["tokens"].combine_chunks().flatten().to_numpy().reshape(-1, seq_len + 1)
        if array is None:
            array = np.lib.format.open_memmap(path, "w+", tokens.dtype, (len(rows), seq_len + 1))
        array[start : start + len(tokens)] = tokens
    assert array is not None
    array.flush()


class Packer:
    """Turns tables of texts into tables of token rows; what does not fill a row waits for the next call."""

    def __init__(self, encode: Encode, seq_len: int, dtype: np.dtype[Any]) -> None:
        self.encode, self.seq_len = encode, seq_len
        self.rest = np.empty(0, dtype)
        self.num_tokens = self.num_rows = 0

    def __call__(self, texts: pyarrow.Table) -> pyarrow.Table:
        import pyarrow as pa

        tokens = self.encode(_lines(texts)).astype(self.rest.dtype)
        rows, self.rest = cut(np.concatenate([self.rest, tokens]), self.seq_len)
        self.num_tokens += len(tokens)
        self.num_rows += len(rows)
        flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
        return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, self.seq_len + 1)})


def cut(tokens: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows (N, T + 1) at stride T, the tokens from the next row's first on)."""
    num_rows = max(0, (len(tokens) - 1) // seq_len)
    if not num_rows:
        return np.empty((0, seq_len + 1), tokens.dtype), tokens
    rows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]
    return rows[:num_rows], tokens[num_rows * seq_len :]


def _split(rows: datasets.Dataset, fraction: float, seq_len: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """(the first rows, the last `fraction` of them, at least one)."""
    num_val = max(1, round(fraction * len(rows)))
    num_train = len(rows) - num_val
    if not num_train:
        raise ValueError(
            f"the train text has {len(rows)} sample(s) of seq_len + 1 = {seq_len + 1} tokens, "
            f"and val takes {num_val}; give more text, data.kwargs.val, or lower data.kwargs.seq_len"
        )
    return rows.select(range(num_train)), rows.select(range(num_train, len(rows)))


def _lines(texts: pyarrow.Table) -> list[str]:
    """The table's texts, such that they can be put one after the other."""
    return [f"{text or ''}\n" for text in texts.column(0).to_pylist()]


def _tokenizer_identity(spec: TokenizerSpec) -> str:
    """What decides the tokens. Raises ValueError where `data.kwargs.tokenizer` is none of the choices."""
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
            return f"file {_file_hash(Path(spec)).hex()}"
        case str() if spec and not spec.endswith(".json"):
            return f"hub {spec}"
        case str() if spec:
            raise ValueError(f"data.kwargs.tokenizer names '{spec}', which does not exist; {TOKENIZER_CHOICES}")
    raise ValueError(f"data.kwargs.tokenizer is {spec!r}; {TOKENIZER_CHOICES}")


def _encoder(spec: TokenizerSpec, documents: datasets.Dataset, directory: Path) -> tuple[Encode, int]:
    """(texts -> their tokens in one array, vocab_size); a tokenizer is left in `directory` as tokenizer.json."""
    if spec == "bytes":
        return lambda texts: np.frombuffer("".join(texts).encode(), np.uint8), 256
    tokenizer = _loaded(spec) if isinstance(spec, str) else _trained_bpe(spec["train_bpe"], documents)
    tokenizer.save(str(directory / "tokenizer.json"))

    def encode(texts: Sequence[str]) -> np.ndarray:
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, np.int64) for encoding in encodings])

    return encode, 1 + max(tokenizer.get_vocab().values())  # ids may have gaps


def _loaded(spec: str) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(spec) if Path(spec).is_file() else Tokenizer.from_pretrained(spec)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(
            f"data.kwargs.tokenizer '{spec}' could not be loaded: {error}; "
            "give the path of a tokenizer.json, or train one on the data with tokenizer: {train_bpe: 8192}"
        ) from error


def _trained_bpe(vocab_size: int, documents: datasets.Dataset) -> Any:
    """A byte-level BPE of the documents; smaller than asked for where they hold fewer pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    batches: Iterator[Any] = documents.with_format("arrow").iter(batch_size=256)
    tokenizer.train_from_iterator(map(_lines, batches), trainer)
    return tokenizer


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode())
        digest.update(part)
    return digest.hexdigest()


def _file_hash(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


def longest(samples: SampleSet, count: int) -> list[int]:
    """Indices of the `count` longest samples, where the set has `lengths`, one for each; else of the first."""
    lengths = getattr(samples, "lengths", None)
    if lengths is None:
        return list(range(min(count, len(samples))))
    return sorted(range(len(samples)), key=lambda index: -int(lengths[index]))[:count]


class LongestAlways:
    """The longest samples in every step: the optimizer's memory comes after the first, and shorter ones would hide it."""

    def __init__(self, samples: SampleSet, effective_batch_size: int) -> None:
        self._indices = longest(samples, effective_batch_size)

    def indices(self, numbers: Iterable[int]) -> list[int]:
        """The data indices of these global sample numbers."""
        return [self._indices[number % len(self._indices)] for number in numbers]


class SampleOrder:
    """Global sample number (0, 1, 2, ... over the whole run) -> index; every pass is a permutation of its own."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed
        self._passes: dict[int, Tensor] = {}

    def indices(self, numbers: Iterable[int]) -> list[int]:
        """The data indices of these global sample numbers."""
        places = (divmod(number, self.num_samples) for number in numbers)
        return [int(self._pass(number_of_pass)[place]) for number_of_pass, place in places]

    def _pass(self, number: int) -> Tensor:
        if number not in self._passes:
            # The micro-batches of one step go back and forth over a pass boundary: keep the neighbour too.
            self._passes = {kept: order for kept, order in self._passes.items() if abs(kept - number) == 1}
            self._passes[number] = permutation(self.num_samples, self.seed, number)
        return self._passes[number]


def permutation(num_samples: int, seed: int, number_of_pass: int) -> Tensor:
    """Indices (num_samples,) in the order of that pass."""
    digest = hashlib.sha256(
        f"{seed} {number_of_pass}".encode()
    ).digest()  # seed + pass would repeat other seeds' passes
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.randperm(num_samples, generator=generator)


def micro_batch_numbers(
    step: int,
    micro_step: int,
    rank: int,
    *,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    world_size: int,
) -> range:
    """Global sample numbers of one micro-batch: a strided slice of the step's, so that every split sees the same set."""
    num_micro_batches = gradient_accumulation_steps * world_size
    effective_batch_size = micro_batch_size * num_micro_batches
    first = step * effective_batch_size + micro_step * world_size + rank
    return range(first, (step + 1) * effective_batch_size, num_micro_batches)


def fetch(dataset: SampleSet, indices: Sequence[int]) -> Any:
    """The collated batch of these samples."""
    many = getattr(dataset, "__getitems__", None)
    return collate(many(list(indices)) if many else [dataset[index] for index in indices])


def collate(samples: list[Any]) -> Any:
    """Samples stacked along a new first dimension."""
    return default_collate(samples)


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`; copies to CUDA do not wait."""
    if isinstance(batch, Tensor):
        pinned = batch.pin_memory() if device.type == "cuda" and batch.device.type == "cpu" else batch
        return pinned.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    return batch
