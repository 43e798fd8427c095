"""Every split of an effective batch sees the same samples; packing loses no token; the cache is built once."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from batchscout.trainers import files
from batchscout.trainers.config import DataConfig, Split
from batchscout.trainers.data import order as order_module
from batchscout.trainers.data.batches import InFlight, collate, fetch, leaves, move
from batchscout.trainers.data.cache import cache_directory, cached
from batchscout.trainers.data.corpus import no_progress_bars, stdlib_files
from batchscout.trainers.data.order import SampleOrder, micro_batch_numbers, permuted
from batchscout.trainers.data.packing import cut
from batchscout.trainers.data.samples import SampleSet, load_data
from batchscout.trainers.data.text import TokenSamples
from batchscout.trainers.files import StorageLost
from batchscout.trainers.notices import Notice, NoticeKind, heard_by
from tests.support.every import for_every
from tests.support.map_style import map_style_sets
from tests.support.processes import next_line
from tests.support.storage import Call, failing, on_failing_storage

pytestmark = pytest.mark.usefixtures("cache")
ROOT = Path(__file__).parents[3]
WIKITEXT = ROOT / "../shared/data/wikitext-2"
LINES = "".join(f"line {i} of a text, {i * i} long\n" for i in range(400))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    path.write_text(LINES)
    return path


def load_own(target: str, **kwargs: Any) -> tuple[SampleSet, SampleSet]:
    return map_style_sets(DataConfig(target=target, kwargs=kwargs))


def load(target: str, **kwargs: Any) -> tuple[TokenSamples, TokenSamples]:
    """Open a built-in data set."""
    train, val = load_data(DataConfig(target=target, kwargs=kwargs))
    assert isinstance(train, TokenSamples)
    assert isinstance(val, TokenSamples)
    return train, val


def load_text(path: Path | str, **kwargs: Any) -> tuple[TokenSamples, TokenSamples]:
    return load("text", **{"train": str(path), "seq_len": 16, "tokenizer": "bytes", **kwargs})


def copy_of(path: Path) -> str:
    """A file of the same text: what is trained on cannot be validated on."""
    return str(shutil.copy(path, path.with_suffix(".copy")))


def stream(samples: TokenSamples) -> np.ndarray:
    """The token stream that the rows were cut from, without its dropped tail."""
    rows = samples.__getitems__(list(range(len(samples))))
    return np.concatenate([rows[0]["input_ids"][:1].numpy(), *(row["targets"].numpy() for row in rows)])


SPLITS_OF_24 = [(1, 1, 24), (24, 1, 1), (2, 12, 1), (3, 4, 2), (6, 1, 4), (1, 6, 4), (4, 3, 2)]


@for_every(split=[Split(*sizes) for sizes in SPLITS_OF_24], first_sample=[0, 24, 7])
def test_every_split_of_an_effective_batch_sees_exactly_the_same_samples(split: Split, first_sample: int) -> None:
    micro_batches = [
        micro_batch_numbers(first_sample, micro_step, rank, split)
        for micro_step in range(split.gradient_accumulation_steps)
        for rank in range(split.world_size)
    ]
    assert split.effective_batch_size == 24
    assert [len(numbers) for numbers in micro_batches] == [split.micro_batch_size] * split.num_micro_batches
    assert sorted(n for numbers in micro_batches for n in numbers) == list(range(first_sample, first_sample + 24))


def test_micro_batches_are_strided_not_contiguous() -> None:
    split = Split(micro_batch_size=3, gradient_accumulation_steps=2, world_size=2)
    assert list(micro_batch_numbers(12, 0, 1, split)) == [13, 17, 21]
    assert list(micro_batch_numbers(12, 1, 0, split)) == [14, 18, 22]


def test_in_another_order_every_micro_batch_keeps_its_samples() -> None:
    split = Split(micro_batch_size=8, gradient_accumulation_steps=2, world_size=1)
    micro_batches = [micro_batch_numbers(step, micro_step, 0, split) for step in range(3) for micro_step in range(2)]
    one, again, other = ([permuted(numbers, seed) for numbers in micro_batches] for seed in (1, 1, 2))
    assert one == again != other
    for numbers, order in zip(micro_batches, one, strict=True):
        assert sorted(order) == list(numbers) != order
        assert permuted(numbers, None) == list(numbers)


def test_a_pass_has_no_repeats_and_every_pass_an_order_of_its_own() -> None:
    order = SampleOrder(101, seed=3)
    passes = [tuple(order.indices(range(p * 101, (p + 1) * 101))) for p in range(4)]
    assert all(sorted(indices) == list(range(101)) for indices in passes)
    assert len(set(passes)) == 4


def test_across_a_pass_boundary_the_order_does_not_depend_on_how_it_is_asked_for() -> None:
    whole = SampleOrder(10, seed=0).indices(range(45))
    order = SampleOrder(10, seed=0)
    assert [order.indices([n])[0] for n in (44, 9, 10, 0, 25)] == [whole[n] for n in (44, 9, 10, 0, 25)]
    assert order.indices(range(8, 13)) == whole[8:13]
    assert all(count == 1 for count in Counter(whole[10:20]).values())


def test_seeds_give_orders_that_share_no_pass() -> None:
    orders = {tuple(SampleOrder(50, seed).indices(range(p * 50, p * 50 + 50))) for seed in range(4) for p in range(4)}
    assert len(orders) == 16


def test_a_step_back_and_forth_over_a_boundary_draws_each_permutation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = order_module.permutation
    monkeypatch.setattr(order_module, "permutation", lambda *asked: drawn.append(asked) or draw(*asked))
    order = SampleOrder(10, seed=0)
    for start in range(4):
        order.indices(range(6 + start, 14 + start, 4))
    assert drawn == [(10, 0, 0), (10, 0, 1)]


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 6, 8, 9, 10, 57])
def test_rows_put_together_are_the_token_stream(num_tokens: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    rows, rest = cut(tokens, 4)
    assert rows.shape == (max(0, (num_tokens - 1) // 4), 5)
    assert np.array_equal(rows[1:, 0], rows[:-1, -1])  # a row begins where the one before it ended
    assert np.array_equal(np.concatenate([rows[:, :-1].reshape(-1), rest]), tokens)
    assert len(rest) <= 4


def test_targets_are_inputs_shifted_by_one_and_no_token_is_lost(text_file: Path) -> None:
    train, val = load_text(text_file, val=copy_of(text_file))
    sample = train[3]
    assert sample["input_ids"].dtype == sample["targets"].dtype == torch.int64
    assert sample["input_ids"].shape == sample["targets"].shape == (16,)
    assert torch.equal(sample["input_ids"][1:], sample["targets"][:-1])
    tokens = np.frombuffer((LINES + "\n").encode(), np.uint8)
    assert len(train) == len(val) == (len(tokens) - 1) // 16
    assert np.array_equal(stream(train), tokens[: len(train) * 16 + 1])


def test_packing_goes_on_across_documents_and_the_pieces_of_a_long_one(tmp_path: Path) -> None:
    long = "".join(f"{i}\n" for i in range(12_000)) + "x" * 40_000  # many pieces, and a line longer than a piece
    texts = {"a.txt": "first", "b.txt": long, "c.txt": "", "d.txt": "\n\nlast\n"}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
    train, _ = load_text(tmp_path / "*.txt", val=copy_of(tmp_path / "b.txt"), seq_len=7)
    tokens = np.frombuffer("".join(f"{content}\n" for content in texts.values()).encode(), np.uint8)
    assert np.array_equal(stream(train), tokens[: len(train) * 7 + 1])
    assert len(tokens) - (len(train) * 7 + 1) < 7


def test_without_val_the_last_samples_are_held_out(text_file: Path) -> None:
    whole, _ = load_text(text_file, val=copy_of(text_file))
    train, val = load_text(text_file, val_fraction=0.25)
    assert len(val) == round(0.25 * len(whole))
    assert len(train) + len(val) == len(whole)
    assert torch.equal(train[len(train) - 1]["targets"], whole[len(train) - 1]["targets"])
    assert torch.equal(val[0]["input_ids"], whole[len(train)]["input_ids"])


def test_tokens_are_stored_at_a_fixed_length_in_as_few_bytes_as_they_need(text_file: Path) -> None:
    train, _ = load_text(text_file)
    assert (train.rows.shape, train.rows.dtype) == ((len(train), 17), np.uint16)
    assert isinstance(train.rows, np.memmap)


def test_samples_survive_pickling_and_fetching_in_batches(text_file: Path) -> None:
    train, _ = load_text(text_file)
    pickled = pickle.dumps(train)
    assert len(pickled) < 1_000, "the file's name, not what is in it"
    again = pickle.loads(pickled)
    assert (again.vocab_size, again.seq_len, len(again)) == (256, 16, len(train))
    batch = fetch(again, [5, 0, 5])
    assert batch["input_ids"].shape == (3, 16)
    for name in ("input_ids", "targets"):
        assert torch.equal(batch[name], torch.stack([train[i][name] for i in (5, 0, 5)]))


def test_a_trained_bpe_is_deterministic_and_decodes_to_the_text(
    text_file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {"val": copy_of(text_file), "tokenizer": {"train_bpe": 300}}
    train, _ = load_text(text_file, **kwargs)
    assert train.vocab_size == 300
    (saved,) = cache.glob("data/*/tokenizer.json")
    assert (LINES + "\n").startswith(Tokenizer.from_file(str(saved)).decode(stream(train).tolist()))
    monkeypatch.setenv("BATCHSCOUT_CACHE", str(tmp_path / "another"))
    assert np.array_equal(stream(load_text(text_file, **kwargs)[0]), stream(train))


def test_a_tokenizer_file_gives_the_tokens_it_gave_when_it_was_trained(text_file: Path, cache: Path) -> None:
    trained, _ = load_text(text_file, tokenizer={"train_bpe": 300})
    (saved,) = cache.glob("data/*/tokenizer.json")
    loaded, _ = load_text(text_file, tokenizer=str(saved))
    assert loaded.vocab_size == 300
    assert np.array_equal(stream(loaded), stream(trained))


@pytest.mark.parametrize("kept", ["truncation", "padding"])
def test_a_length_that_is_saved_with_a_tokenizer_neither_cuts_nor_pads_the_text(
    text_file: Path, tmp_path: Path, cache: Path, kept: str
) -> None:
    plain, _ = load_text(text_file, tokenizer={"train_bpe": 300})
    (saved,) = cache.glob("data/*/tokenizer.json")
    tokenizer = Tokenizer.from_file(str(saved))
    if kept == "truncation":
        tokenizer.enable_truncation(max_length=5)
    else:
        tokenizer.enable_padding(length=100_000)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert np.array_equal(stream(load_text(text_file, tokenizer=str(tmp_path / "tokenizer.json"))[0]), stream(plain))


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (7, "data.kwargs.tokenizer is 7; use bytes, {train_bpe: 8192}, the path of a tokenizer.json, or"),
        ("", "data.kwargs.tokenizer is ''; use bytes"),
        ({"bpe": 300}, "data.kwargs.tokenizer is {'bpe': 300}; use bytes"),
        ({"train_bpe": "300"}, "data.kwargs.tokenizer is {'train_bpe': '300'}; use bytes"),
        ({"train_bpe": 300, "more": 1}, "data.kwargs.tokenizer is {'train_bpe': 300, 'more': 1}; use bytes"),
        ({"train_bpe": 100}, "data.kwargs.tokenizer asks for train_bpe: 100; it starts from 256 bytes, give more"),
        ("none/tokenizer.json", "names 'none/tokenizer.json', which does not exist; use bytes"),
        ("a/b/c", "'a/b/c' could not be loaded: .*; give the path .* or train one on the data with .*train_bpe: 8192}"),
    ],
)
def test_a_wrong_tokenizer_is_refused_in_the_users_words(text_file: Path, tokenizer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_text(text_file, tokenizer=tokenizer)


def snapshot(cache: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in cache.rglob("*")}


def test_a_second_load_reads_the_cache_and_writes_nothing(
    text_file: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, _ = load_text(text_file)
    written = snapshot(cache)
    second, _ = load_text(text_file)
    assert snapshot(cache) == written
    assert np.array_equal(stream(first), stream(second))
    assert capfd.readouterr() == ("", "")


def test_progress_bars_are_off_while_loading_and_then_as_they_were(text_file: Path) -> None:
    import datasets

    datasets.enable_progress_bars()
    load_text(text_file)
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("change", [{"seq_len": 8}, {"tokenizer": {"train_bpe": 300}}, {"val_fraction": 0.5}])
def test_what_changes_the_samples_gets_an_entry_of_its_own(
    text_file: Path, cache: Path, change: dict[str, Any]
) -> None:
    load_text(text_file)
    load_text(text_file, **change)
    assert len(list((cache / "data").iterdir())) == 2


def test_a_changed_text_is_packed_again(text_file: Path) -> None:
    load_text(text_file)
    text_file.write_text(LINES.upper())
    train, _ = load_text(text_file)
    assert bytes(stream(train)[:4].tolist()) == b"LINE"


def test_a_failed_build_leaves_nothing_behind(text_file: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="sample"):
        load_text(text_file, seq_len=1_000_000)
    assert list((cache / "data").iterdir()) == []


@pytest.mark.slow
def test_processes_that_race_leave_one_valid_entry(text_file: Path, cache: Path) -> None:
    program = (
        "import sys; from batchscout.trainers.data.samples import load_data; from batchscout.trainers.config import DataConfig\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"kwargs = dict(train={str(text_file)!r}, seq_len=16, tokenizer=dict(train_bpe=300))\n"
        "train, val = load_data(DataConfig(target='text', kwargs=kwargs))\n"
        "print(len(train), len(val), sum(int(train[i]['targets'].sum()) for i in range(len(train))))\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    racers = [subprocess.Popen(command, cwd=ROOT, text=True, stdin=PIPE, stdout=PIPE, stderr=PIPE) for _ in range(2)]
    for racer in racers:
        assert next_line(racer) == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outputs = [racer.communicate() for racer in racers]
    train, val = load_text(text_file, tokenizer={"train_bpe": 300})
    total = sum(int(train[i]["targets"].sum()) for i in range(len(train)))
    assert outputs == [(f"{len(train)} {len(val)} {total}\n", "")] * 2
    assert len(list((cache / "data").iterdir())) == 1


def zeroed(content: bytes) -> bytes:
    """All but the head, as a disk leaves a file whose blocks it never wrote."""
    return content[:128] + bytes(len(content) - 128)


def with_a_flipped_bit(content: bytes) -> bytes:
    return content[:200] + bytes([content[200] ^ 4]) + content[201:]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "a zeroed body": ("train.npy", zeroed, "train.npy changed"),
    "a flipped bit": ("val.npy", with_a_flipped_bit, "val.npy changed"),
    "an empty file": ("about.json", lambda content: b"", "about.json changed"),
    "a missing file": ("train.npy", None, "it has no train.npy"),
    "empty checksums": ("checksums.json", lambda content: b"", "its checksums.json is damaged"),
    "other checksums": ("checksums.json", lambda content: b"7", "its checksums.json is damaged"),
    "an entry of 0.2": ("checksums.json", None, "it has no checksums.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again_and_said_so_and_whoever_has_it_open_keeps_it(
    text_file: Path, cache: Path, damage: str
) -> None:
    name, change, said = DAMAGES[damage]
    expected = stream(load_text(text_file)[0])
    (entry,) = (cache / "data").iterdir()
    file = entry / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    before = np.load(entry / "val.npy", mmap_mode="r")
    was = before.copy()
    heard: list[Notice] = []
    with heard_by(heard.append):
        train, _ = load_text(text_file)
        assert np.array_equal(stream(train), expected)
        load_text(text_file)
    text = f"the tokens in the data cache were not as they were written ({said}) and were made again: {entry}"
    assert heard == [Notice(NoticeKind.REBUILT_DATA, text)]
    assert np.array_equal(before, was)
    assert list((cache / "data").iterdir()) == [entry]


def a_folder_in_the_place_of(file: Path) -> None:
    """No file can be put there."""
    file.unlink()
    (file / "in").mkdir(parents=True)


@pytest.mark.parametrize("name", ["train.npy", "val.npy", "about.json", "checksums.json"])
def test_an_entry_whose_files_cannot_be_replaced_is_set_aside_whole(text_file: Path, cache: Path, name: str) -> None:
    expected = stream(load_text(text_file)[0])
    (entry,) = (cache / "data").iterdir()
    a_folder_in_the_place_of(entry / name)
    heard: list[Notice] = []
    with heard_by(heard.append):
        assert np.array_equal(stream(load_text(text_file)[0]), expected)
        load_text(text_file)
    (before,) = {*(cache / "data").iterdir()} - {entry}
    assert (before / name / "in").is_dir()
    text = "the tokens in the data cache were not as they were written (it cannot be read: Is a directory) and were made again"
    lies = f"the files there could not be replaced and lie in {before}, which you may remove"
    assert heard == [Notice(NoticeKind.REBUILT_DATA, f"{text}: {entry}; {lies}")]


def test_a_file_in_the_place_of_an_entry_is_set_aside(text_file: Path, cache: Path) -> None:
    expected = stream(load_text(text_file)[0])
    (entry,) = (cache / "data").iterdir()
    entry.rename(cache / "moved")
    entry.write_bytes(b"not a folder")
    with pytest.warns(UserWarning, match=r"it cannot be read: Not a directory.* and lie in "):
        assert np.array_equal(stream(load_text(text_file)[0]), expected)


def opened_on_failing_storage(file: str, call: Call, path: str, error: str, times: int | None) -> list[str]:
    """What a process says that opens text from the cache while this call fails."""
    said: list[str] = []
    with heard_by(lambda notice: said.append(notice.text)), failing(call, path, error, times):
        try:
            said.append(f"{len(load_text(file)[0])} samples")
        except Exception as failure:
            said.append(f"{type(failure).__name__}: {failure}")
    return said


# The call that fails, where in the entry, and with what; ALWAYS: and what could not be done. NEW: in an empty cache.
ONCE: list[tuple[Call, str, str]] = [("list", "", "EACCES"), ("list", "", "EIO"), ("open", "/train.npy", "EIO")]
ALWAYS: list[tuple[Call, str, str]] = [
    ("open", "/train.npy", "read"), ("open", "/about.json", "read"), ("rename", "", "written"),
]  # fmt: skip
NEW = ["/train.npy", "/checksums.json"]


def told_of_every_fault(folder: str) -> dict[str, list[str]]:
    """What is said by its cache's name. All in one process, since what takes longest is its start."""

    def in_cache(name: str, text: str) -> str:
        os.environ["BATCHSCOUT_CACHE"] = f"{folder}/{name}"
        return text

    files.SECONDS_TO_WAIT, file, told = 0.3, f"{folder}/text.txt", dict[str, list[str]]()
    for number, (call, path, error) in enumerate(ONCE):
        samples = len(load_text(in_cache(f"once{number}", file))[0])
        (entry,) = (cache_directory() / "data").iterdir()
        told[f"once{number}"] = [
            *opened_on_failing_storage(file, call, f"{entry}{path}", error, 1),
            f"{samples} samples",
        ]
    for number, (call, path, _) in enumerate(ALWAYS):
        load_text(in_cache(f"always{number}", file))
        (entry,) = (cache_directory() / "data").iterdir()
        if call == "rename":
            (entry / "val.npy").write_bytes(b"")
        told[f"always{number}"] = [str(entry), *opened_on_failing_storage(file, call, f"{entry}{path}", "EACCES", None)]
    for path in NEW:
        told[path] = opened_on_failing_storage(
            in_cache(f"new{path.replace('/', '-')}", file), "open", path, "EACCES", None
        )
    in_cache("full", file)
    told["full"] = [tokenize_on_a_full_disk()]  # the last, since no file of this process gets longer after it
    return told


def tokenize_on_a_full_disk() -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    kwargs = {"seq_len": 32, "tokenizer": "bytes", "max_text_bytes": 300_000}
    with pytest.raises(StorageLost) as raised:
        load_data(DataConfig(target="python_stdlib", kwargs=kwargs))
    return str(raised.value)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    (folder / "text.txt").write_text(LINES)
    return folder


@pytest.fixture(scope="module")
def told(caches: Path) -> dict[str, list[str]]:
    return on_failing_storage(told_of_every_fault, str(caches))


def entries(cache: Path) -> list[Path]:
    return list((cache / "data").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ONCE)))
def test_an_entry_that_cannot_be_read_is_made_again_and_said_so(
    number: int, caches: Path, told: dict[str, list[str]]
) -> None:
    """Neither is it the study's fault nor a trial's."""
    (entry,) = entries(caches / f"once{number}")
    why = os.strerror(getattr(errno, ONCE[number][2]))
    text = f"the tokens in the data cache were not as they were written (it cannot be read: {why}) and were made again: {entry}"
    *said, found, expected = told[f"once{number}"]
    assert said == [text]
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ALWAYS)))
def test_a_cache_that_refuses_even_a_new_entry_is_the_storages_fault(number: int, told: dict[str, list[str]]) -> None:
    _, path, done = ALWAYS[number]
    entry, *_, said = told[f"always{number}"]
    assert said == f"StorageLost: {entry}{path} could not be {done}: Permission denied"


@pytest.mark.slow
@pytest.mark.parametrize("path", NEW)
def test_a_new_entry_that_cannot_be_written_is_the_storages_fault(
    path: str, caches: Path, told: dict[str, list[str]]
) -> None:
    """And leaves nothing behind."""
    (said,), cache = told[path], caches / f"new{path.replace('/', '-')}"
    assert said.startswith(f"StorageLost: {cache}/data/.")
    assert said.endswith(" could not be written: Permission denied")
    assert entries(cache) == []


@pytest.mark.slow
def test_a_full_disk_is_named_and_no_half_entry_left(caches: Path, told: dict[str, list[str]]) -> None:
    (said,) = told["full"]
    assert said.startswith(f"{caches}/full/data/")
    assert said.endswith(" could not be written: File too large")
    assert entries(caches / "full") == []


def test_a_cache_that_cannot_be_made_is_told_with_how_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSCOUT_CACHE", "/proc/none")  # where root, too, can make nothing
    with pytest.raises(StorageLost, match=r"^/proc/none/data/.* could not be written: .*BATCHSCOUT_CACHE"):
        cached("key", lambda folder: None)


def test_the_loser_of_a_race_takes_the_winners_entry(cache: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "mine").touch()
        winner = cache / "data" / "key"
        winner.mkdir()
        (winner / "theirs").touch()

    entry = cached("key", build)
    assert [path.name for path in entry.iterdir()] == ["theirs"]
    assert list((cache / "data").iterdir()) == [entry]


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BATCHSCOUT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "batchscout"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "batchscout"


def test_the_standard_library_is_split_by_whole_files() -> None:
    train, val = load("python_stdlib", max_text_bytes=300_000, seq_len=32, tokenizer="bytes")
    assert 300_000 <= 32 * (len(train) + len(val)) + 400 < 301_000
    assert 0.05 * len(train) < len(val) < 0.5 * len(train)
    assert {train.vocab_size, train.seq_len} == {256, 32}


def test_the_standard_library_comes_without_tests_and_packages_and_mixed() -> None:
    files = stdlib_files()
    assert files == stdlib_files()
    assert not any({"test", "tests", "idle_test", "site-packages"} & set(path.parts[-4:-1]) for path in files)
    assert len(files) > 200
    assert files != sorted(files)


def test_patterns_and_lists_name_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    by_pattern, _ = load_text(tmp_path / "*.txt")
    by_list, _ = load("text", train=[str(tmp_path / f"{n}.txt") for n in "ab"], seq_len=16, tokenizer="bytes")
    assert np.array_equal(stream(by_pattern), stream(by_list))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"train": "x.txt"},
            "data.kwargs.train names 'x.txt', which does not exist; relative paths start at .*pattern",
        ),
        ({"val": "v*.txt"}, "data.kwargs.val names 'v.\\.txt', which does not exist"),
        ({"train": "."}, "data.kwargs.train names '.', which is a folder; write './\\*.txt'"),
        ({"train": 3}, "data.kwargs.train is 3; give a file name or a list of them"),
        ({"train": [3]}, "data.kwargs.train is \\[3\\]; give a file name or a list of them"),
        ({"train": []}, "data.kwargs.train names \\[\\], which hold no text; name files that are not empty"),
        ({"train": "empty.txt"}, "data.kwargs.train names \\['empty.txt'\\], which hold no text"),
        ({"train": "binary.txt"}, "'binary.txt', which is not UTF-8 \\(byte 2\\); convert it to UTF-8"),
        ({"seq_len": "256"}, "data.kwargs.seq_len is '256'; give a whole number of at least 1"),
        ({"seq_len": 0}, "data.kwargs.seq_len is 0; give a whole number"),
        ({"val_fraction": "5%"}, "data.kwargs.val_fraction is '5%'; give a number between 0 and 1, such as 0.05"),
        ({"val": "train.txt"}, "data.kwargs.train and val share 1 of 1 files .*; name other files, or leave val out"),
        (
            {"train": ["*in.txt", "train.txt"]},
            "data.kwargs.train names '.*train.txt' twice, .* name each file once .*, or give val",
        ),
        ({"train": ["train.txt", "link.txt"]}, "data.kwargs.train names '.*train.txt' twice"),
        (
            {"val": "short.txt", "val_fraction": 0.1},
            "val is 'short.txt' and data.kwargs.val_fraction 0.1; give one of the two",
        ),
        ({"val_fraction": 1.0}, "data.kwargs.val_fraction is 1.0; give a number between 0 and 1"),
        (
            {"train": "short.txt", "val": "train.txt", "seq_len": 256},
            "the train text has 120 tokens, one sample needs seq_len \\+ 1 = 257; "
            "give more text or lower data.kwargs.seq_len",
        ),
        ({"val": "short.txt", "seq_len": 256}, "the val text has 120 tokens, one sample needs seq_len \\+ 1 = 257"),
        (
            {"train": "short.txt", "seq_len": 100},
            "the train text has 1 sample of seq_len \\+ 1 = 101 tokens, and val takes 1; "
            "give more text, a val of its own, or lower data.kwargs.seq_len",
        ),
        ({"trian": "x"}, "data.kwargs do not fit: got an unexpected keyword argument 'trian'; it takes: train, val,"),
    ],
)
def test_a_wrong_text_is_refused_in_the_users_words(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(text_file.parent)
    Path("short.txt").write_text("x" * 119)
    Path("empty.txt").touch()
    Path("link.txt").symlink_to("train.txt")
    Path("binary.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=message):
        load_text("train.txt", **kwargs)


def test_with_a_val_of_its_own_a_file_may_be_trained_on_twice(text_file: Path) -> None:
    train, _ = load_text(text_file, train=[str(text_file)] * 2, val=copy_of(text_file))
    assert bytes(stream(train).tolist()).decode().count("line 7 of") == 2 * LINES.count("line 7 of")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_text_bytes": "8MB"}, "data.kwargs.max_text_bytes is '8MB'; give a whole number of at least 1"),
        ({"max_text_bytes": 100}, "the train text has 0 tokens, one sample needs seq_len \\+ 1 = 257"),
    ],
)
def test_a_wrong_amount_of_the_standard_library_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("python_stdlib", **kwargs)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    from datasets import Dataset, DatasetDict, NamedSplit

    texts = {"train": LINES.splitlines(), "validation": ["some text", None, "", "more of it" * 9]}
    splits: dict[str | NamedSplit, Dataset] = {
        split: Dataset.from_dict({"text": lines, "n": [0] * len(lines)}) for split, lines in texts.items()
    }
    with no_progress_bars():
        DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_saved_data_set_is_packed_like_its_text(
    saved: Path, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train, val = load("hf", path=str(saved), seq_len=16, tokenizer="bytes")
    same, _ = load_text(text_file, val=copy_of(text_file))
    assert np.array_equal(stream(train), stream(same)[: len(train) * 16 + 1])
    assert bytes(stream(val).tolist()).startswith(b"some text\n\n\nmore of it")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kwargs", "num_train_samples", "num_val_samples"),
    [
        ({}, 726, 38),
        ({"val_fraction": 0.25}, 573, 191),
        ({"val_split": "train[90%:]", "train_split": "train[:90%]"}, 684, 79),
    ],
)
def test_one_split_is_enough(saved: Path, kwargs: dict[str, Any], num_train_samples: int, num_val_samples: int) -> None:
    train, val = load("hf", path=str(saved / "train"), seq_len=16, tokenizer="bytes", **kwargs)
    assert (len(train), len(val)) == (num_train_samples, num_val_samples)
    whole = LINES.rstrip().encode()
    assert whole.startswith(bytes(stream(train).tolist()))
    assert bytes(stream(val).tolist()) in whole[len(train) * 16 :], "what is held out comes last, and is not trained on"


@pytest.mark.parametrize(
    ("split", "lines"),
    [
        ("train[:3]", [0, 1, 2]),
        ("train[99%:]", [396, 397, 398, 399]),
        ("train[-2:]+train[:2]", [398, 399, 0, 1]),
        ("train[:2]+train[50:1_00]", [0, 1, *range(50, 100)]),
    ],
)
def test_a_part_is_what_load_dataset_takes_for_it(saved: Path, split: str, lines: list[int]) -> None:
    train, _ = load("hf", path=str(saved), train_split=split, seq_len=16, tokenizer="bytes")
    taken = "\n".join(LINES.splitlines()[line] for line in lines).encode()
    assert taken.startswith(bytes(stream(train).tolist()))
    assert len(taken) - len(stream(train)) < 16


@pytest.mark.slow
def test_what_is_held_out_is_the_same_in_another_process(saved: Path, tmp_path: Path) -> None:
    kwargs = {"path": str(saved), "train_split": "train[:300]+train[320:]", "val_fraction": 0.2, "seq_len": 16}
    source = f"""
from batchscout.trainers.config import DataConfig
from batchscout.trainers.data.samples import load_data
_, val = load_data(DataConfig(target="hf", kwargs={kwargs!r}))
print(val.content_hash, val.rows.tobytes().hex())
"""
    environment = {**os.environ, "BATCHSCOUT_CACHE": str(tmp_path / "of another")}
    told = subprocess.run([sys.executable, "-c", source], stdout=PIPE, check=True, env=environment, text=True).stdout
    _, val = load("hf", **kwargs)
    assert told.split() == [val.content_hash, val.rows.tobytes().hex()]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the same rows in each format, and the library's cache elsewhere."""
    from datasets import Dataset, config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    folder = tmp_path / "files"
    folder.mkdir()
    rows = Dataset.from_dict({"text": LINES.splitlines()})
    with no_progress_bars():
        rows.to_json(folder / "a.json")
        rows.to_csv(folder / "a.csv")
        rows.to_parquet(folder / "a.parquet")
        Dataset.from_dict({"text": ["another text", "of a few lines"]}).to_json(folder / "b.json")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("file_format", ["json", "csv", "parquet"])
@pytest.mark.parametrize("form", ["{}", "list", "split"])
def test_files_of_a_format_are_read(written: Path, text_file: Path, file_format: str, form: str) -> None:
    file = f"a.{file_format}"
    data_files: Any = {"{}": file, "list": [file], "split": {"train": file}}[form]
    train, val = load("hf", path=file_format, data_files=data_files, seq_len=16, tokenizer="bytes")
    same, _ = load_text(text_file)
    assert np.array_equal(stream(train), stream(same)[: len(train) * 16 + 1])
    assert len(val) == 38


def test_files_may_be_of_two_splits_or_lie_in_a_folder(written: Path) -> None:
    both = {"train": "a.json", "validation": "b.json"}
    for path, data_files in (("json", both), (str(written), both)):
        _, val = load("hf", path=path, data_files=data_files, seq_len=8, tokenizer="bytes")
        assert bytes(stream(val).tolist()).startswith(b"another text\nof a few")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"data_files": {"train": "a.json", "validation": "a.json"}},
            r"'train' and val_split 'validation' share train\[0:400\]",
        ),
        (
            {"data_files": {"train": "*.json", "validation": "b.json"}},
            "'train' and val_split 'validation' share /.*/b.json, and",
        ),
        (
            {"data_files": ["a.json", "./a.json"]},
            "'train' takes /.*/a.json twice, .* take each sample once, or give val_split",
        ),
        (
            {"data_files": "c.json"},
            "could not be loaded: Unable to find '/.*/c.json'; check data.kwargs.data_files 'c.json'",
        ),
        (
            {"data_files": "broken.json"},
            "could not be loaded: JSON parse error.*; check data.kwargs.data_files 'broken.json'",
        ),
        ({"data_files": 3}, "data.kwargs.data_files is 3; give a file name, a list of them, or those of each split"),
        ({"data_files": {"train": [3]}}, "data.kwargs.data_files is {'train': \\[3\\]}; give a file name"),
        ({}, "data.kwargs.path 'json' is a format; name files of it, such as data.kwargs.data_files: texts/\\*.json"),
        ({"path": "../files", "name": "x"}, "BuilderConfig 'x' not found.*; check data.kwargs.name 'x'"),
        ({"path": "scripted"}, r"path 'scripted' needs a loading script, .*@refs/convert/parquet/.*save_to_disk"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_the_remedy(
    written: Path, kwargs: dict[str, Any], message: str
) -> None:
    (written / "broken.json").write_text('{"text": ')
    (written / "scripted").mkdir()
    (written / "scripted/scripted.py").touch()
    if "*" in str(kwargs):
        (written / "broken.json").unlink()
    with pytest.raises(ValueError, match=message):
        load("hf", **{"path": "json", **kwargs})


def test_a_home_of_the_library_that_cannot_be_written_is_named(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home of his own has it under /proc, /nonexistent or the like."""
    monkeypatch.setattr("datasets.config.HF_CACHE_HOME", "/proc/hub")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("/proc/hub/datasets"))
    with pytest.raises(
        ValueError, match=r"keeps what it reads in /proc/hub, and .*; set HF_HOME to a folder that this user may write"
    ):
        load("hf", path="json", data_files="a.json")


@pytest.mark.parametrize("held", [["a", "b"], [{"role": "user", "content": "a"}], {"en": "a", "de": "b"}], ids=str)
def test_a_column_of_lists_or_mappings_is_no_text(tmp_path: Path, held: Any) -> None:
    from datasets import Dataset

    with no_progress_bars():
        Dataset.from_dict({"messages": [held] * 40}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(ValueError, match=r"text_column 'messages' holds \w+, not text; choose a column of strings"):
        load("hf", path=str(tmp_path / "set"), text_column="messages", seq_len=16, tokenizer="bytes")


def test_another_data_set_at_the_same_path_is_packed_again(tmp_path: Path) -> None:
    from datasets import Dataset

    for letter in "ab":
        with no_progress_bars():
            Dataset.from_dict({"text": [letter * 100]}).save_to_disk(str(tmp_path / letter))
    os.rename(tmp_path / "a", tmp_path / "set")
    kwargs = {"path": str(tmp_path / "set"), "seq_len": 16, "tokenizer": "bytes"}
    assert set(stream(load("hf", **kwargs)[0])) == {ord("a")}
    os.rename(tmp_path / "set", tmp_path / "a")
    os.rename(tmp_path / "b", tmp_path / "set")
    assert set(stream(load("hf", **kwargs)[0])) == {ord("b")}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"text_column": "body"}, "data.kwargs.text_column 'body' is not in the data set; choose one of: text, n"),
        ({"text_column": "n"}, "data.kwargs.text_column 'n' holds int64, not text; choose a column of strings"),
        (
            {"train_split": "tr"},
            "data.kwargs.train_split 'tr' is not in the data set .*; choose one of: train, validation, or a part",
        ),
        (
            {"val_split": "dev[:5]"},
            r"data.kwargs.val_split 'dev\[:5\]' is not in the data set .* of: train, validation",
        ),
        ({"val_split": ["dev"]}, r"data.kwargs.val_split '\['dev'\]' is not in the data set"),
        ({"train_split": "train[:99.5%]"}, r"train_split 'train\[:99.5%\]' .* whole percent, such as train\[:90%\]"),
        ({"val_split": "train[90%:10%]"}, r"val_split .* takes no sample \(train\[360:40\]\); train has 400"),
        (
            {"val_split": "train"},
            r"train_split 'train' and val_split 'train' share train\[0:400\], .*val_fraction: 0.05",
        ),
        (
            {"train_split": "train[:90%]", "val_split": "validation+train[80%:]"},
            r"train_split 'train\[:90%\]' and val_split 'validation\+train\[80%:\]' share train\[320:360\]",
        ),
        ({"train_split": "all"}, r"train_split 'all' and val_split 'validation' share validation\[0:4\]"),
        (
            {"train_split": "train[:60]+train[50:]", "val_fraction": 0.1},
            r"train_split .* takes train\[50:60\] twice.*; take each sample once, or give val_split",
        ),
        (
            {"val_split": "train", "val_fraction": 0.1},
            "val_split is 'train' and data.kwargs.val_fraction 0.1; give one",
        ),
        ({"val_fraction": 2.0}, "data.kwargs.val_fraction is 2.0; give a number between 0 and 1"),
        ({"name": "x"}, "was written by save_to_disk, which is read as it is; leave name and data_files out"),
    ],
)
def test_a_wrong_column_or_split_is_refused_with_those_there_are(
    saved: Path, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load("hf", path=str(saved), **kwargs)


def test_a_path_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data.kwargs.path .* could not be loaded: .*; check the name and the network"
    ):
        load("hf", path=str(tmp_path))


class Squares:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == 4:
            raise RuntimeError("disk on fire")
        return {"x": torch.tensor(index * index), "name": f"n{index}"}


class Stream:
    def __iter__(self) -> Iterator[object]:
        return iter([])


def own(found: str = "pair") -> object:
    return {"pair": (Squares(), Squares()), "one": Squares(), "stream": (Squares(), Stream()), "empty": ([], [1, 2])}[
        found
    ]


NOT_CALLABLE = 3


def test_an_import_path_gives_the_users_own_sets() -> None:
    train, _ = load_own(f"{__name__}:own")
    batch = fetch(train, [3, 0])
    assert batch["x"].tolist() == [9, 0]
    assert batch["name"] == ["n3", "n0"]


def test_an_exception_of_the_users_set_comes_through_unchanged() -> None:
    train, _ = load_own(f"{__name__}:own")
    with pytest.raises(RuntimeError, match=r"^disk on fire$"):
        fetch(train, [0, 4])


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        (
            "wikitext",
            {},
            "data.target 'wikitext' is not built in; use python_stdlib, text, hf, chat or .* package.module:call",
        ),
        (f"{__name__}:nothing", {}, f"'{__name__}' has no 'nothing'"),
        (f"{__name__}:NOT_CALLABLE", {}, "is a int; name a callable that returns \\(train, val\\)"),
        (f"{__name__}:own", {"find": 1}, "data.kwargs do not fit: .*'find'; it takes: found"),
        (f"{__name__}:own", {"found": "one"}, "returned a Squares; return a pair \\(train, val\\)"),
        (f"{__name__}:own", {"found": "stream"}, "returned 5 train and 0 val samples; each needs at least one"),
        (f"{__name__}:own", {"found": "empty"}, "returned 0 train and 2 val samples; each needs at least one"),
    ],
)
def test_a_wrong_target_is_refused_in_the_users_words(target: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_own(target, **kwargs)


def test_moving_a_batch_keeps_its_structure() -> None:
    Pair = namedtuple("Pair", "a b")
    one = torch.ones(2)
    batch = {"x": one, "nested": [Pair(one, "name"), (one, 3)]}
    moved = move(batch, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["nested"][0].a.is_meta
    assert moved["nested"][1][0].is_meta
    assert (moved["nested"][0].b, moved["nested"][1][1]) == ("name", 3)
    assert isinstance(moved["nested"][0], Pair)


class Movable:
    """As a tokenizer's batch or a graph's: it alone knows where its tensors are."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Movable:
        return Movable(self.x.to(device))


class MovedInPlace(Movable):
    def to(self, device: torch.device) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.x = self.x.to(device)


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    more: Any
    length: int = field(init=False, default=0)


def test_a_batch_moves_whatever_it_is_made_of() -> None:
    one, meta = torch.ones(2), torch.device("meta")
    packed = torch.nn.utils.rnn.pack_sequence([one, one])
    moved = move(OrderedDict(own=Movable(one), record=Record(one, [Record(one, "name")]), packed=packed), meta)
    assert isinstance(moved, OrderedDict)
    assert moved["own"].x.is_meta
    assert move((MovedInPlace(one),), meta)[0].x.is_meta
    assert moved["record"].x.is_meta
    assert moved["record"].more[0].x.is_meta
    assert (moved["record"].more[0].more, moved["record"].length) == ("name", 0)
    assert moved["packed"].data.is_meta
    assert not moved["packed"].batch_sizes.is_meta, "torch wants them on the host"
    assert one.device.type == "cpu"


def test_samples_that_are_dataclasses_are_stacked_field_by_field() -> None:
    stacked = collate([Record(torch.zeros(2), 1), Record(torch.ones(2), 2)])
    assert isinstance(stacked, Record)
    assert stacked.x.tolist() == [[0, 0], [1, 1]]
    assert stacked.more.tolist() == [1, 2]


class Words(list[list[int]]):
    """Samples of uneven length, which the set pads itself as torch's DataLoader would have it do."""

    def collate_fn(self, samples: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, samples))
        return torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples])


def test_a_set_may_collate_its_samples_itself() -> None:
    assert fetch(Words([[1], [2, 3, 4], [5, 6]]), [2, 1]).tolist() == [[5, 6, 0], [2, 3, 4]]


def test_a_tokenizers_batch_stays_one() -> None:
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": torch.ones(2)})
    moved = move(encoding, torch.device("meta"))
    assert type(moved) is type(encoding)
    assert moved.input_ids.is_meta


class Encoding(UserDict[str, Any]):
    """As a tokenizer's batch: a mapping that moves itself, in place, and has no `pin_memory`. Here it stays where it is."""

    moved_to: torch.device | None = None

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        self.moved_to, self.non_blocking = device, non_blocking
        return self


def test_a_mapping_that_moves_itself_goes_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From any other memory the copy would wait for the GPU, whatever it is asked for."""
    tensor, pinned, gpu = torch.ones(2), torch.ones(2), torch.device("cuda", 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda _: pinned)
    batch = Encoding(input_ids=tensor, text=["as it was"])
    moved = move(batch, gpu)
    assert isinstance(moved, Encoding)
    assert (moved.moved_to, moved.non_blocking) == (gpu, True)
    assert moved["input_ids"] is pinned
    assert moved["text"] is batch["text"]
    assert batch["input_ids"] is tensor, "the data set may keep it"
    assert move(batch, torch.device("cpu"))["input_ids"] is tensor


def test_a_mapping_that_pins_itself_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a TensorDict, which knows its own tensors better."""
    own = Encoding(input_ids=torch.ones(2))
    monkeypatch.setattr(Encoding, "pin_memory", lambda _: own, raising=False)
    assert move(Encoding(input_ids=torch.zeros(2)), torch.device("cuda", 0)) is own


def test_the_leaves_of_a_batch_are_what_is_moved_or_moves_itself() -> None:
    one, own = torch.ones(2), Movable(torch.ones(2))
    assert list(leaves({"a": [one, (3, own)], "b": Record(one, "name")})) == [one, 3, own, one, "name", 0]


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason="wikitext-2 is not on this machine")
def test_wikitext_is_packed_and_decodes_to_itself(cache: Path) -> None:
    files = {"train": str(WIKITEXT / "valid.txt"), "val": str(WIKITEXT / "test.txt")}
    train, val = load("text", **files, seq_len=256, tokenizer={"train_bpe": 1024})
    (saved,) = cache.glob("data/*/tokenizer.json")
    decoded = Tokenizer.from_file(str(saved)).decode(stream(val).tolist())
    original = (WIKITEXT / "test.txt").read_text()
    assert decoded.rstrip("\ufffd") == original[: len(decoded.rstrip("\ufffd"))]
    assert len(decoded) > 0.99 * len(original)
    assert train.vocab_size == 1024


@pytest.mark.parametrize("most", [1, 4])
def test_the_host_runs_ahead_of_a_gpu_by_a_few_batches_and_no_more(most: int) -> None:
    waited_for: list[int] = []
    made = iter(range(10))

    class Mark:
        def __init__(self) -> None:
            self.number = next(made)

        def synchronize(self) -> None:
            waited_for.append(self.number)

    ahead = InFlight(most, Mark)
    for number in range(10):
        ahead.one_more()
        assert waited_for == list(range(number - most + 1)), "the oldest first, and each once"
