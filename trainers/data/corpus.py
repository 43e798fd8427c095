"""Where text comes from: the standard library, files, or a data set of the `datasets` library; all become a
`Corpus`."""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchscout.trainers.data.cache import hash_of, hash_of_file

if TYPE_CHECKING:
    import datasets


FILE_FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""What load_dataset takes as a path where `data_files` names files of that format."""
DataFiles = str | list[str] | dict[str, str | list[str]]
"""Files or patterns of them, or those of each split."""


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


def refuse_shared_files(train: str | list[str], val: str | list[str] | None) -> None:
    """Raise ValueError where what is held out is trained on, too: where files of data.kwargs.train are those of val, or, without val, one
    is there twice."""
    trained_on = matching_files("train", train)
    if val is None:
        if twice := named_twice(trained_on):
            raise ValueError(
                f"data.kwargs.train names '{twice[0]}' twice, and what is held out of it (val_fraction) may be trained on; name each file "
                "once (patterns may overlap), or give val"
            )
        return
    validated_on = {path.resolve() for path in matching_files("val", val)}
    if shared := sorted({path.resolve() for path in trained_on} & validated_on):
        raise ValueError(
            f"data.kwargs.train and val share {len(shared)} of {len(validated_on)} files ('{shared[0]}'), and samples that are trained on tell "
            "nothing as val; name other files, or leave val out: then the last samples (val_fraction) are held out"
        )


def named_twice(files: Iterable[Path | str]) -> list[str]:
    """Return the files that are there more than once, by whatever path."""
    times = Counter(str(file) if "://" in str(file) else os.path.realpath(file) for file in files)
    return [file for file, number in times.items() if number > 1]


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


@dataclass(frozen=True)
class HfSplit:
    """A split of a data set of the `datasets` library."""

    samples: datasets.Dataset
    files: tuple[str, ...]
    """What it is read from, in order; empty for what save_to_disk has written."""


@dataclass(frozen=True)
class Part:
    """The samples of a split from number `begin` up to `end`."""

    split: str
    begin: int
    end: int

    def __str__(self) -> str:
        """Return it as the library writes it."""
        return f"{self.split}[{self.begin}:{self.end}]"


def hf_splits(
    field: str, path: str, name: str | None = None, data_files: DataFiles | None = None
) -> dict[str, HfSplit]:
    """Return the splits of the data set that data.kwargs.<field> names. Raises ValueError where it cannot be loaded."""
    from datasets import Dataset, load_dataset_builder, load_from_disk
    from datasets.exceptions import DatasetsError

    where = f"data.kwargs.{field} '{path}'"
    if any(Path(path, marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        if name is not None or data_files is not None:
            raise ValueError(
                f"{where} was written by save_to_disk, which is read as it is; leave name and data_files out"
            )
        saved = load_from_disk(path)
        found = {"train": saved} if isinstance(saved, Dataset) else saved
        return {str(split): HfSplit(samples, ()) for split, samples in found.items()}
    if path in FILE_FORMATS and not data_files:
        raise ValueError(f"{where} is a format; name files of it, such as data.kwargs.data_files: texts/*.{path}")
    _check_data_files(data_files)
    given = {"name": name, "data_files": data_files}
    try:
        builder = load_dataset_builder(path, name, data_files=data_files)
    except RuntimeError as error:
        raise ValueError(
            f"{where} needs a loading script, and the library datasets runs none any more ({error}); give what the script makes: path: "
            "parquet with data_files: hf://datasets/OWNER/NAME@refs/convert/parquet/CONFIG/train/*.parquet, where the hub has converted it, "
            "or a folder that save_to_disk has written where the script still runs (datasets<4)"
        ) from error
    except (OSError, ValueError, DatasetsError) as error:
        raise _not_loaded(where, error, given) from error
    try:
        builder.download_and_prepare()
    except (OSError, DatasetsError) as error:
        raise _not_loaded(where, error, given) from error
    prepared: Any = builder.as_dataset()
    files: dict[Any, list[str]] = dict(builder.config.data_files or {})
    return {str(split): HfSplit(samples, tuple(files.get(split, ()))) for split, samples in prepared.items()}


def _not_loaded(where: str, error: Exception, given: Mapping[str, object]) -> ValueError:
    """Return what the library's error means to whoever named the data set. given: the keys beside its path."""
    from datasets.exceptions import DatasetGenerationError

    why = error.__cause__ if isinstance(error, DatasetGenerationError) else error
    if home := _unwritable_home(why):
        return ValueError(
            f"{where} could not be loaded: the library datasets keeps what it reads in {home}, and {why}; set HF_HOME to a folder that "
            "this user may write"
        )
    remedy = (
        "check the name and the network, or give a folder written by save_to_disk, or a format "
        f"({', '.join(FILE_FORMATS)}) and its files as data.kwargs.data_files"
    )
    told = " and ".join(f"data.kwargs.{key} {value!r}" for key, value in given.items() if value is not None)
    return ValueError(f"{where} could not be loaded: {why}; {f'check {told}' if told else remedy}")


def _unwritable_home(why: BaseException | None) -> Path | None:
    """Return the folder in which the library keeps what it reads, where the error is that this cannot be made or written."""
    from datasets.config import HF_CACHE_HOME

    if not isinstance(why, OSError) or not isinstance(why.filename, str):
        return None
    home, at = Path(HF_CACHE_HOME), Path(why.filename)
    return home if at == home or home in at.parents or at in home.parents else None


def _check_data_files(data_files: object) -> None:
    of_splits = list(data_files.values()) if isinstance(data_files, dict) else [data_files]
    names = [name for files in of_splits for name in (files if isinstance(files, list) else [files])]
    if data_files is not None and not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"data.kwargs.data_files is {data_files!r}; give a file name, a list of them, or those of each split, such as {{train: a.json, "
            "validation: b.json}"
        )


def parts_of(splits: dict[str, HfSplit], field: str, wanted: str) -> list[Part]:
    """Return what data.kwargs.<field> takes of which splits: a split, parts as load_dataset(split=...) has them (`train[:90%]`), or
    several added up. Raises ValueError where that is nothing."""
    from datasets import ReadInstruction

    sizes = {split: len(found.samples) for split, found in splits.items()}
    wanted = str(wanted)  # what is no text is no split
    if wanted in sizes:  # a saved set may have names that could not be written otherwise
        return [Part(wanted, 0, sizes[wanted])]
    try:
        instruction = ReadInstruction.from_spec("+".join(sizes) if wanted == "all" else wanted)
        parts = [Part(one.splitname, one.from_, one.to) for one in instruction.to_absolute(sizes)]
    except ValueError as error:
        raise ValueError(
            f"data.kwargs.{field} '{wanted}' is not in the data set ({error}); choose one of: {', '.join(sizes)}, or a part of one in samples "
            f"or whole percent, such as {next(iter(sizes))}[:90%]"
        ) from error
    for part in parts:
        if part.begin >= part.end:
            raise ValueError(
                f"data.kwargs.{field} '{wanted}' takes no sample ({part}); {part.split} has {sizes[part.split]}, take some of them"
            )
    return parts


def shared_by(splits: dict[str, HfSplit], pairs: Iterable[tuple[Part, Part]]) -> list[str]:
    """Return the samples that are in both parts of a pair, or the files where two splits are read from the same ones."""
    shared: set[str] = set()
    for one, other in pairs:
        here, there = splits[one.split].files, splits[other.split].files
        if one.split == other.split or (here and here == there):
            begin, end = max(one.begin, other.begin), min(one.end, other.end)
            shared |= {str(Part(one.split, begin, end))} if begin < end else set()
        else:
            shared |= {*here} & {*there}
    return sorted(shared)


def corpus_of_parts(splits: dict[str, HfSplit], parts: list[Part], column: str) -> Corpus:
    from datasets import concatenate_datasets

    taken: list[datasets.Dataset] = []
    content: list[bytes] = []
    for part in parts:
        samples = splits[part.split].samples
        if column not in samples.column_names:
            there = ", ".join(samples.column_names)
            raise ValueError(f"data.kwargs.text_column '{column}' is not in the data set; choose one of: {there}")
        held = samples.features[column]
        kind = getattr(held, "dtype", type(held).__name__)  # lists and mappings have none
        if kind not in ("string", "large_string"):
            raise ValueError(f"data.kwargs.text_column '{column}' holds {kind}, not text; choose a column of strings")
        # a fingerprint changes with the data; reading it all on every open would be slow
        place = "" if (part.begin, part.end) == (0, len(samples)) else f" {part.begin}:{part.end}"
        content.append(f"{samples._fingerprint} {column}{place}".encode())
        taken.append(samples.select_columns(column).select(range(part.begin, part.end)))
    return Corpus(hash_of(content), lambda: concatenate_datasets(taken))


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
