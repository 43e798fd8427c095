"""Where text comes from: the standard library, files, or a data set of the `datasets` library; all become a
`Corpus`."""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchscout.trainers.data.cache import hash_of, hash_of_file

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Corpus:
    """Documents, which are read only when they are needed, and a hash of all that is in them."""

    content_hash: str
    documents: Callable[[], datasets.Dataset]
    """Returns a data set with one column, of strings."""


def stdlib_files() -> list[Path]:
    """Return every source file outside of tests, in an order that mixes the packages and is the same everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idle_test"}
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        names += [os.path.relpath(os.path.join(folder, file), root) for file in files if file.endswith(".py")]
    return [root / name for name in sorted(names, key=lambda name: hash_of([name.encode()]))]


def read_up_to(paths: Iterable[Path], max_bytes: int) -> list[bytes]:
    """Return the files' contents; the last one is cut so that together they have at most `max_bytes`."""
    contents: list[bytes] = []
    for path in paths:
        if max_bytes <= 0:
            break
        contents.append(path.read_bytes()[:max_bytes])
        max_bytes -= len(contents[-1])
    return contents


def num_files_in(files: Sequence[bytes], num_bytes: float) -> int:
    """Return how many of the first files it takes to reach that many bytes."""
    ends = itertools.accumulate(map(len, files))
    return sum(1 for end, file in zip(ends, files, strict=True) if end - len(file) < num_bytes)


def corpus_of_contents(files: list[bytes]) -> Corpus:
    return Corpus(hash_of(files), lambda: _documents(file.decode(errors="replace") for file in files))


def corpus_of_files(field: str, patterns: str | list[str]) -> Corpus:
    """Return the corpus of the files that data.kwargs.<field> names. Raises ValueError where there is nothing to
    read."""
    paths = matching_files(field, patterns)
    return Corpus(hash_of(map(hash_of_file, paths)), lambda: _documents(_decoded(field, path) for path in paths))


def matching_files(field: str, patterns: str | list[str]) -> list[Path]:
    """Return the files that data.kwargs.<field> names. Raises ValueError where all are empty, or there is none."""
    if not isinstance(patterns, str | list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"data.kwargs.{field} is {patterns!r}; give a file name or a list of them")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    paths = [path for pattern in patterns for path in _matches(field, pattern)]
    if not sum(path.stat().st_size for path in paths):
        raise ValueError(f"data.kwargs.{field} names {patterns}, which hold no text; name files that are not empty")
    return paths


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
    """Cut a document at line ends, so that tokenising needs little memory. Joined by line ends, the pieces are the
    document."""
    start = 0
    while (end := document.find("\n", start + num_characters)) >= 0:
        yield document[start:end]
        start = end + 1
    yield document[start:]


def hf_splits(path: str, name: str | None) -> dict[Any, datasets.Dataset]:
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


def corpus_of_split(splits: dict[Any, datasets.Dataset], field: str, split: str, column: str) -> Corpus:
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
    return Corpus(hash_of([content.encode()]), lambda: samples.select_columns(column))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()
