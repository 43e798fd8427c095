"""The journal is the truth: its replay is the study, however its writer ended."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import shutil
import signal
import tracemalloc
import zlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.study.events import (
    FORMAT_VERSION,
    ClusterReady,
    Concluded,
    Ended,
    Evaluated,
    Event,
    Paused,
    Promoted,
    RunBegan,
    Started,
    proposed,
)
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.lines import read_lines
from batchscout.orchestrator.study.state import Halted, Study
from batchscout.orchestrator.study.trial import Proposal, TrialState
from batchscout.trainers.files import StorageLost
from batchscout.trainers.lines import line_of
from batchscout.trainers.notices import NoticeKind
from tests.support.damage import flipped
from tests.support.every import for_every
from tests.support.journal_writer import writer
from tests.support.lane_player import play_stage, study_of
from tests.support.processes import next_line
from tests.support.tiny import in_fresh_process
from tests.support.worlds import KNOWN, memory_world, train_config, with_accidents

CONFIG = base_trial(study_of(), None)
TRIAL = proposed(Proposal("train-a", "train", CONFIG, candidate="train-a", role="baseline", protected=True))


def ready(token: str, seconds: float = 1.0) -> ClusterReady:
    """An event of a line, of which a study keeps its token."""
    return ClusterReady(token=token, seconds=seconds)


def write(path: Path, *events: Event) -> None:
    with Journal(path, "s") as journal:
        for event in events:
            journal.append(event)


def events_of(path: Path) -> list[Event]:
    return [line.event for line in read_lines(path)]


def a_whole_stage(folder: Path) -> tuple[Path, Study]:
    """A journal with pauses, promotions, prunings, divergence, out of memory and a conclusion, and its live study."""
    path = folder / "journal.jsonl"
    study = play_stage(path, train_config(seeds=[0, 1]), "train", with_accidents, 2, found=KNOWN)
    with Journal(path, "played") as journal:
        journal.append(RunBegan(token="second"))
        journal.append(ready("second", 3.5))
        study = journal.study
    return path, study


def test_the_replay_is_the_live_study(tmp_path: Path) -> None:
    path, live = a_whole_stage(tmp_path)
    assert replay(path, "played") == live
    kinds = {event.kind for event in events_of(path)}
    assert kinds == {
        "run_began", "cluster_ready", "stage_began", "proposed", "started", "evaluated", "paused", "promoted", "ended",
        "concluded",
    }  # fmt: skip


def test_records_that_come_twice_change_nothing(tmp_path: Path) -> None:
    """Each record twice in a row, and every prefix of the journal once more after itself."""
    path, _ = a_whole_stage(tmp_path)
    events = events_of(path)
    for end in range(1, len(events) + 1):
        once, twice = Study("played"), Study("played")
        for event in events[:end]:
            once.apply(event)
            twice.apply(event)
            twice.apply(event)
        assert once == twice
        for event in events[:end]:
            twice.apply(event)
        assert once == twice, events[end - 1]


def test_what_has_ended_never_changes(tmp_path: Path) -> None:
    _, study = a_whole_stage(tmp_path)
    before = deepcopy(study.trials)
    ended = [trial.id for trial in study.trials.values() if trial.state.ended]
    assert ended
    for trial_id in ended:
        study.apply(Started(id=trial_id))
        study.apply(Paused(id=trial_id, rung=7, reason="x", seconds=1.0))
        study.apply(Promoted(id=trial_id, rung=7, reason="x"))
        end = {"state": TrialState.COMPLETE, "cause": None, "reason": "", "metrics": {}, "seconds": 1.0}
        study.apply(Ended(id=trial_id, **end))
    assert study.trials == before


@for_every(cut=range(1, 40))
def test_a_torn_last_line_is_left_out_and_the_next_writer_goes_on_from_there(tmp_path: Path, cut: int) -> None:
    path = tmp_path / f"{cut}.jsonl"
    write(path, ready("a"))
    whole = path.read_bytes()
    write(path, ready("b"))
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    assert list(replay(path, "s").ready) == ["a"]
    with Journal(path, "s") as journal:
        assert path.read_bytes() == whole
        journal.append(ready("c"))
    assert list(replay(path, "s").ready) == ["a", "c"]


@pytest.mark.parametrize("damage", [b'{"kind": "fac', b"\x00\x00\x00\n", b"\xff\xfe\n", b"\n", b"7\n"])
def test_a_torn_middle_line_is_an_error_that_names_the_line(path: Path, damage: bytes) -> None:
    write(path, *(ready(str(value)) for value in range(5)))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = damage if damage.endswith(b"\n") else damage + b"\n"
    path.write_bytes(b"".join(lines))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"line 3 of .*journal.jsonl is damaged, and 2 more follow it; .* remove that"):
        replay(path, "s")
    with pytest.raises(ValueError, match="line 3 of"):
        Journal(path, "s")
    assert path.read_bytes() == before, "a damaged journal is left as it is"


def test_a_journal_that_could_not_be_read_is_not_locked_for_ever(path: Path) -> None:
    path.write_bytes(b"not json\n" * 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="line 1 of"):
            Journal(path, "s")


def test_no_flipped_bit_is_taken_for_what_was_written(path: Path) -> None:
    """Each bit of a line in the middle, the checksum's own included."""
    write(path, *(ready(token, 3.5) for token in "abc"))
    first, line, last = path.read_bytes().splitlines(keepends=True)
    for bit in range(8 * (len(line) - 1)):  # all but its end, without which it is one with the next
        path.write_bytes(first + flipped(line, bit) + last)
        with pytest.raises(ValueError, match=r"line 2 of .* is damaged, and \d more follow it; .* remove that line"):
            replay(path, "s")


def test_a_damaged_last_line_is_left_out_and_said_for_good(path: Path) -> None:
    """Each bit of it. Readers are told, too, before and after a writer has put the notice in its place."""
    write(path, ready("a"), ready("b"))
    first, line = path.read_bytes().splitlines(keepends=True)
    for bit in range(8 * (len(line) - 1)):  # all but its end, without which it is torn
        damaged = flipped(line, bit)
        if b"\n" in damaged[:-1]:  # two lines now, of which the first is not the last
            continue
        path.write_bytes(first + damaged)
        reader = replay(path, "s")
        ((notice,),) = reader.notices.values()
        assert notice.kind is NoticeKind.DAMAGED_JOURNAL
        assert f"line 2 of {path}, its last one, is not what was written, and is left out" in notice.text
        assert path.read_bytes() == first + damaged, "reading is not writing"
        if bit % 8:  # a writer syncs the disk each time: it is told of one bit of each byte
            continue
        with Journal(path, "s") as journal:
            assert journal.met == [notice]
            assert journal.study == reader
            journal.append(ready("c"))
        with Journal(path, "s") as journal:
            assert journal.met == []
            assert list(journal.study.ready) == ["a", "c"]
            assert journal.study.notices == reader.notices


def open_in(path: str, num_bytes: int) -> str:
    """What is said where the file may have so many bytes at most."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    with pytest.raises(StorageLost) as refused:
        Journal(Path(path), "s")
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 10])
def test_a_damaged_line_stays_where_the_disk_refuses_what_is_to_stand_in_its_place(path: Path, room: int) -> None:
    """So the next writer tells of it. room: how many bytes of the notice the disk takes."""
    with Journal(path, "s") as journal:
        for number in range(20):  # longer than the lease beside it, which has room under the same limit
            journal.append(ready(f"a{number}"))
        whole = path.stat().st_size
        journal.append(ready("b"))
    damaged = path.read_bytes().replace(b'"b"', b'"c"')
    path.write_bytes(damaged)
    assert in_fresh_process(open_in, str(path), whole + room) == f"{path} could not be written: File too large"
    assert path.read_bytes()[:whole] == damaged[:whole]
    with Journal(path, "s") as journal:
        ((notice,),) = journal.study.notices.values()
        assert notice.kind is NoticeKind.DAMAGED_JOURNAL
        assert list(journal.study.ready) == [f"a{number}" for number in range(20)]


def rewritten(line: bytes, **changes: Any) -> bytes:
    """The line with other values, and with the checksum that such a line would have."""
    record = {key: value for key, value in json.loads(line).items() if key != "crc32"} | changes
    body = json.dumps(record, separators=(",", ":")).encode()
    return body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def with_another_id(journal: Path, trial_id: str) -> None:
    """Give the trial of the first line another id."""
    first, *others = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([rewritten(first, id=trial_id), *others]))


def test_the_id_of_a_trial_is_a_name_and_never_a_path(path: Path) -> None:
    """Its directory is named after it, and what a concluded stage does not need is deleted there."""
    write(path, TRIAL, ready("a"))
    with_another_id(path, "grid-m4k1-none-lr1e+20-s-3")
    assert list(replay(path, "s").trials) == ["grid-m4k1-none-lr1e+20-s-3"]
    for trial_id in ("../../../victim", "a/b", ".hidden", "", "a b", "<b>a</b>"):
        with_another_id(path, trial_id)
        with pytest.raises(
            ValueError, match=r"line 1 of .* is no event that .* \(id: .* or restore the file"
        ) as raised:
            replay(path, "s")
        assert repr(trial_id) in str(raised.value)


def test_a_journal_of_a_later_format_is_refused_by_its_number_and_left_as_it_is(path: Path) -> None:
    write(path, ready("a"))
    later = FORMAT_VERSION + 1
    path.write_bytes(
        path.read_bytes() + line_of(json.dumps({"version": later, "kind": "dreamt", "time": 1.0}).encode())
    )
    before = path.read_bytes()
    said = rf"line 2 of .* has journal format {later}, and this batchscout reads up to {FORMAT_VERSION}; go on with the version that wrote"
    for read in (replay, Journal):
        with pytest.raises(ValueError, match=said):
            read(path, "s")
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [None, "2", 0.5])
def test_a_version_that_is_no_number_of_a_format_is_named_with_its_line(path: Path, version: Any) -> None:
    write(path, ready("a"))
    path.write_bytes(rewritten(path.read_bytes(), version=version))
    for read in (replay, Journal):
        with pytest.raises(ValueError, match=r"line 1 of .* is no event that .* \(version: .* or restore the file"):
            read(path, "s")


def test_a_last_line_that_a_later_version_wrote_is_refused_by_its_kind_and_not_cut_off(path: Path) -> None:
    """It is whole, as its checksum says: no crash has torn it."""
    write(path, ready("a"), ready("b"))
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + rewritten(last, kind="dreamt"))
    before = path.read_bytes()
    for read in (replay, Journal):
        with pytest.raises(
            ValueError, match=r"line 2 of .* is of the kind 'dreamt', which .* go on with the version that"
        ):
            read(path, "s")
    assert path.read_bytes() == before


def test_a_replay_holds_no_more_of_the_file_than_a_line(path: Path) -> None:
    num_trials = 300
    metrics: dict[str, float | None] = {f"figure_{i}": i / 7 for i in range(20)}
    events = [TRIAL.model_copy(update={"id": f"train-{i}"}) for i in range(num_trials)]
    events += [Evaluated(id=f"train-{i}", metrics=metrics) for i in range(num_trials)]
    path.write_bytes(b"".join(line_of(event.model_dump_json().encode()) for event in events))
    tracemalloc.start()
    try:
        study = replay(path, "s")
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(study.trials) == num_trials
    assert most < held + io.DEFAULT_BUFFER_SIZE + 100_000, most - held


def test_an_event_of_a_trial_that_nobody_proposed_is_refused(path: Path) -> None:
    """As after the line that proposed it was removed."""
    write(path, TRIAL, Started(id="train-a"))
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[1])
    said = r"line 1 of .* is about the trial 'train-a', which no line before it proposes; restore the file from a copy"
    with pytest.raises(ValueError, match=said):
        replay(path, "s")


def test_no_journal_is_an_empty_study(path: Path) -> None:
    assert replay(path, "s") == Study("s")


@pytest.mark.parametrize("written", [1, 7, 40])
def test_kill_9_in_the_middle_of_writing_loses_nothing_that_was_true(path: Path, written: int) -> None:
    with writer(path, "write") as process:
        while int(next_line(process)) < written:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with Journal(path, "s") as journal:
        count = len(journal.study.ready)
        assert count >= written
        assert [token.split()[0] for token in journal.study.ready] == [f"key{i}" for i in range(count)]
        journal.append(ready("after"))
    assert "after" in replay(path, "s").ready


def test_nan_and_infinity_never_reach_the_file(path: Path) -> None:
    metrics: dict[str, Any] = {"loss": math.nan, "noise_scale_high": math.inf, "samples_seen": 8}
    with Journal(path, "s") as journal:
        journal.append(TRIAL)
        journal.append(Evaluated(id="train-a", metrics=metrics, rungs={64: -math.inf}))
        journal.append(Concluded(stage="train", ok=True, reason="", findings={"rho": [math.nan, 1.0]}))
        live = journal.study

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert live.trials["train-a"].metrics == {"loss": None, "noise_scale_high": None, "samples_seen": 8}
    assert live.conclusions["train"].findings == {"rho": [None, 1.0]}
    assert replay(path, "s") == live


def test_what_ran_when_the_driver_died_waits_again(path: Path) -> None:
    with Journal(path, "s") as journal:
        journal.append(TRIAL)
        journal.append(Started(id="train-a"))
        assert journal.study.trials["train-a"].state is TrialState.RUNNING
    with Journal(path, "s") as journal:
        journal.append(RunBegan(token="second"))
        assert journal.study.trials["train-a"].state is TrialState.WAITING


def test_every_line_is_one_object_with_its_kind_and_time(path: Path) -> None:
    world = memory_world({"none": 6, "full": 12, "selective": 8})
    config = study_of(stages=[{"type": "frontier"}])
    play_stage(path, config, "frontier", world)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all({"kind", "version", "time", "crc32"} <= record.keys() for record in records)
    assert [record["time"] for record in records] == sorted(record["time"] for record in records)


def fill_up(path: str) -> tuple[list[str], int]:
    """What a journal says whose file may grow no further, and how many appends were true before."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    said, appended = [], 0
    with Journal(Path(path), "played") as journal:
        for _ in range(100):
            try:
                journal.append(ready("x" * 100))
                appended += 1
            except Halted as error:
                said.append(str(error))
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return said, appended


def deleted(path: Path) -> None:
    path.unlink()


def deleted_with_its_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


def moved(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def replaced(path: Path) -> None:
    path.write_bytes(path.read_bytes())  # the same file still
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").rename(path)


@pytest.mark.parametrize("take_away", [deleted, deleted_with_its_directory, moved, replaced])
def test_a_journal_that_is_taken_away_halts_its_writer(tmp_path: Path, take_away: Callable[[Path], None]) -> None:
    """What it would still write, nobody could ever read."""
    path = tmp_path / "the run" / "journal.jsonl"
    path.parent.mkdir()
    with Journal(path, "s") as journal:
        journal.append(ready("a"))
        journal.raise_if_lost()
        assert not journal.has_vanished()
        take_away(path)
        assert journal.has_vanished()
        said = rf"'{path}' was deleted, moved or replaced while the study ran, .* or remove '{path.parent}' and run the"
        for _ in range(2):
            with pytest.raises(Halted, match=said):
                journal.append(ready("b"))
        with pytest.raises(Halted, match=said):
            journal.raise_if_lost()
        assert list(journal.study.ready) == ["a"]


def test_a_process_whose_directory_is_removed_halts_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks would fail in it, one trial after the other."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    with Journal(tmp_path / "journal.jsonl", "s") as journal:
        journal.append(ready("a"))
        here.rmdir()
        with pytest.raises(Halted, match="the directory that the study was started in was removed while it ran"):
            journal.append(ready("b"))
        assert not journal.has_vanished(), "what is known is still written there"
    assert list(replay(tmp_path / "journal.jsonl", "s").ready) == ["a"]


@pytest.mark.first
@pytest.mark.slow
def test_a_disk_that_is_full_halts_the_writer_for_good_and_tears_nothing(path: Path) -> None:
    said, appended = in_fresh_process(fill_up, str(path))
    assert 5 < appended < 20
    assert len(said) == 100 - appended, (
        "room that comes back later is for the next writer: this one's study is not the file's"
    )
    assert set(said) == {f"{path} could not be written: File too large"}
    lines = list(read_lines(path))
    assert len(lines) == appended
    assert lines[-1].end == path.stat().st_size
