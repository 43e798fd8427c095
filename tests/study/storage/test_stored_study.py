"""A run directory in an object store: what is acknowledged is there, one driver writes it, and what is amiss is told with a remedy."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.execution.ranks import run_trial
from batchscout.orchestrator.study.events import ClusterReady
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.messages import Assignment
from batchscout.orchestrator.study.run_directory import discard_what_nobody_needs, open_run_directory, put_former_try_by
from batchscout.orchestrator.study.slow_storage import told_if_storage_hangs
from batchscout.orchestrator.study.state import Halted
from batchscout.orchestrator.study.storage import place
from batchscout.orchestrator.study.storage.object_lease import is_stored_study_run
from batchscout.orchestrator.study.storage.place import ObjectStore, beside, run_place_of
from batchscout.orchestrator.study.storage.stored_study import StoredStudy, read_copy, stored_journal
from batchscout.orchestrator.study.storage.stored_trials import StoredTrials
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.trainers import loop
from batchscout.trainers.files import StorageLost, exists
from tests.support.lane_player import study_of
from tests.support.object_store import BUCKET, CREDENTIALS, object_store, reached_at
from tests.support.processes import answer, next_line
from tests.support.silent_place import SilentPlace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with object_store() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in reached_at(server.address).items():
            patch.setenv(name, value)
        yield server.address


@pytest.fixture
def store(address: str, request: pytest.FixtureRequest) -> ObjectStore:
    return ObjectStore(f"s3://{BUCKET}/runs/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}")


def ready(token: str) -> ClusterReady:
    return ClusterReady(token=token, seconds=1.0)


def opened(store: ObjectStore) -> Journal:
    stored = StoredStudy(store)
    return Journal(stored.run_dir / "journal.jsonl", "s", published=stored)


def tokens(store: ObjectStore) -> list[str]:
    return re.findall(r'"token":"(\w+)"', stored_journal(store).decode())


# Places


def test_a_place_is_a_folder_or_a_uri_of_a_store() -> None:
    assert run_place_of("runs/one") == Path("runs/one")
    assert run_place_of("s3://bucket/runs/one") == ObjectStore("s3://bucket/runs/one")
    assert run_place_of("s3://bucket/me@work.org/a:b") == ObjectStore("s3://bucket/me@work.org/a:b")
    assert beside(ObjectStore("s3://b/x/?region=r"), "report.html") == "'s3://b/x/report.html?region=r'"
    assert beside(Path("a b"), "report.html") == "'a b/report.html'"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("hdfs://host/x", "^hdfs:// is no storage that batchscout knows: a run directory is a folder, or begins with s3:// or gs://$"),
        ("s3a://key:secret@bucket/x", "^s3a:// is no storage that batchscout knows"),
        ("s3://bucket", "'s3://bucket' names no run directory; write s3://BUCKET/NAME, such as s3://my-bucket/runs/one"),
        ("s3://key:secret@bucket/x", "it has no credentials, and no @ or : in its bucket; .* write s3://BUCKET/NAME$"),
        ("s3://key:sec/ret@bucket/x", "^the name of a run directory appears in messages and reports, so it has no credentials, .* write s3://BUCKET/NAME$"),
        ("s3://key:sec/ret", "^the name of a run directory appears in messages and reports, so it has no credentials, .* write s3://BUCKET/NAME$"),
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused_with_what_to_write(typed: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        run_place_of(typed)
    assert not re.search("secret|key:|ret@", str(refused.value))


# What is there


def test_a_folder_is_published_and_fetched_as_it_is(store: ObjectStore, tmp_path: Path) -> None:
    """And the second time what is new or has changed."""
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "a" / "checkpoints").mkdir(parents=True)
    (here / "a" / "checkpoints" / "1.pt").write_bytes(os.urandom(3 << 20))
    (here / "a" / "log").write_text("one")
    (here / "a" / ".half.partial").write_text("half")
    assert store.add(here, "trials") == {"trials/a/checkpoints/1.pt", "trials/a/log"}
    store.fetch(there, "trials")
    assert names_below(there) == ["a/checkpoints/1.pt", "a/log"]
    assert (there / "a/checkpoints/1.pt").read_bytes() == (here / "a/checkpoints/1.pt").read_bytes()
    (here / "a" / "log").write_text("two")
    store.add(here, "trials")
    store.fetch(there, "trials")
    assert (there / "a" / "log").read_text() == "two"
    without = tmp_path / "without"
    store.fetch(without, "trials", lambda name: not name.endswith(".pt"))
    assert names_below(without) == ["a/log"]


@pytest.mark.parametrize("drivers", [1, 2])
def test_a_study_that_was_removed_from_its_store_begins_anew_there(store: ObjectStore, drivers: int) -> None:
    """Its copy here has what is in no journal: logs of trials and its results."""
    config = study_of()
    for _ in range(drivers):
        with contextlib.closing(StoredStudy(store)) as stored, open_run_directory(config, stored.run_dir, stored):
            (stored.run_dir / "trials" / "a").mkdir(parents=True, exist_ok=True)
            for name in ("report.html", "trials/a/log"):
                (stored.run_dir / name).write_text("of the first study")
    for name in store.stored():
        store.remove(name)
    with (
        contextlib.closing(StoredStudy(store)) as stored,
        open_run_directory(config, stored.run_dir, stored) as journal,
    ):
        assert not journal.study.num_events
        assert not exists(stored.run_dir / "report.html")


def test_a_rank_of_a_killed_driver_removes_nothing_that_another_has_written(store: ObjectStore, tmp_path: Path) -> None:
    """Its folder may have been taken over, or be gone with the disk, and it does not know."""
    folder = tmp_path / "a"
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "100-old.pt").write_text("old")
    publication = StoredTrials(store, generation=3).publication("a", folder)
    publication.update()
    store.write("trials/a/checkpoints/150-new.pt", b"another driver's")
    (checkpoints / "100-old.pt").rename(checkpoints / "200-old.pt")
    publication.update()
    there = ["trials/a/checkpoints/150-new.pt", "trials/a/checkpoints/200-old.pt"]
    assert sorted(store.stored("trials")) == there, "its own it replaces"
    shutil.rmtree(checkpoints)
    publication.update()
    assert sorted(store.stored("trials")) == there, "what somebody clears away here is not replaced"
    shutil.rmtree(folder)
    with pytest.raises(StorageLost, match="could not be read: No such file"):
        publication.update()
    assert sorted(store.stored("trials")) == there


def test_a_checkpoint_that_was_set_aside_goes_from_the_store_with_the_next(store: ObjectStore, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for name in ("100-t.pt", "200-t.pt"):
        (checkpoints / name).write_text(name)
    publication = StoredTrials(store, generation=3).publication("a", tmp_path)
    publication.update()
    (checkpoints / "200-t.pt").unlink()  # as what is damaged is moved elsewhere
    publication.update()
    assert "trials/a/checkpoints/100-t.pt" in store.stored("trials/a")
    (checkpoints / "100-t.pt").rename(checkpoints / "300-t.pt")
    publication.update()
    assert [*store.stored("trials/a")] == ["trials/a/checkpoints/300-t.pt"]


def test_what_the_journal_acknowledged_survives_the_loss_of_this_machines_disk(
    store: ObjectStore, data_cache: Path
) -> None:
    written = []
    for driver in range(3):
        with opened(store) as journal:
            for number in range(3):
                journal.append(ready(f"d{driver}n{number}"))
                written.append(f"d{driver}n{number}")
                assert tokens(store) == written, "it is there as soon as it counts"
        shutil.rmtree(data_cache / "runs")
    with opened(store) as journal:
        assert journal.path.read_bytes() == stored_journal(store)
        assert tokens(store) == written
    assert {name.split("/")[1] for name in store.stored("journal")} == {"000004"}, "those before it were taken over"


def test_a_missing_object_in_the_journals_middle_is_named(store: ObjectStore) -> None:
    with opened(store) as journal:
        for token in "abc":
            journal.append(ready(token))
    store.remove("journal/000001/00000002.jsonl")
    with pytest.raises(
        ValueError, match=r"journal/000001/00000002\.jsonl is missing from the journal; restore it from a copy"
    ):
        stored_journal(store)


# One driver

DRIVER = """
import sys
from batchscout.orchestrator.study.events import ClusterReady
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.orchestrator.study.state import Halted
from batchscout.orchestrator.study.storage.stored_study import StoredStudy
stored = StoredStudy(ObjectStore(sys.argv[1]), float(sys.argv[2]))
with Journal(stored.run_dir / "journal.jsonl", "s", published=stored) as journal:
    print("open", flush=True)
    for token in map(str.strip, sys.stdin):
        try:
            journal.append(ClusterReady(token=token, seconds=1.0))
            print("written", flush=True)
        except Halted as error:
            print(error, flush=True)
"""


def driver(store: ObjectStore, lease_seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(store), str(lease_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert next_line(process) == "open\n"
    return process


def once_let_in(store: ObjectStore) -> Journal:
    while True:
        with contextlib.suppress(ValueError):
            return opened(store)


def test_a_second_driver_is_refused_by_name_and_a_dead_one_followed_at_once(store: ObjectStore) -> None:
    with driver(store, 60) as first:
        assert is_stored_study_run(store)
        with pytest.raises(
            ValueError,
            match=rf"another process \(process {first.pid} on .*, since .*, last seen \d+ s ago\) is running the",
        ):
            opened(store)
        assert answer(first, "one") == "written", "who was refused has disturbed nothing"
        os.kill(first.pid, signal.SIGKILL)
    assert not is_stored_study_run(store)
    with opened(store) as journal:
        journal.append(ready("two"))
    assert tokens(store) == ["one", "two"]


def test_a_suspended_driver_that_was_followed_notices_before_its_next_line_and_nothing_is_lost(
    store: ObjectStore,
) -> None:
    with driver(store, 1) as first:
        assert answer(first, "one") == "written"
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(ValueError, match=rf"another process \(process {first.pid} on "):
            opened(store)
        journal = once_let_in(store)
        with journal:
            journal.append(ready("two"))
            os.kill(first.pid, signal.SIGCONT)
            said = answer(first, "never")
            assert said.startswith(f"another process (process {os.getpid()} on "), said
            assert (
                f"has taken over the study in {store}, since this one was not heard from for longer than its lease of 1 s"
                in said
            )
            assert answer(first, "never") == said
            journal.append(ready("three"))
        first.communicate("")
    assert tokens(store) == ["one", "two", "three"]


def test_what_a_driver_that_was_followed_still_writes_is_read_by_nobody(store: ObjectStore) -> None:
    """It was suspended after it had looked, and before it wrote."""
    late = StoredStudy(store)
    late.begin(b"")
    store.write(
        f"lease/{late.lease.number:06d}-{'f' * 12}",
        (store.read(next(iter(store.stored("lease")))) or b"").replace(b"false", b"true"),
    )
    with opened(store) as journal:
        journal.append(ready("ours"))
        late.append(b'{"token":"late"}\n')
        assert tokens(store) == ["ours"]
    with opened(store):
        assert tokens(store) == ["ours"]
    late.close()


# What is amiss


def test_a_bucket_that_is_not_there_is_named(address: str) -> None:
    with pytest.raises(
        ValueError, match=r"there is no bucket 'nowhere' for s3://nowhere/x; make it, or check the name and its region"
    ):
        StoredStudy(ObjectStore("s3://nowhere/x"))


def test_a_store_that_does_not_answer_is_bad_input_with_the_remedy() -> None:
    dead = ObjectStore(f"s3://{BUCKET}/x?endpoint_override=http%3A%2F%2F127.0.0.1%3A9&region=us-east-1")
    with pytest.raises(
        ValueError, match="could not be listed: the store does not answer; check the network, and AWS_ENDPOINT_URL"
    ):
        StoredStudy(dead)


def test_credentials_that_the_store_does_not_know_are_told() -> None:
    """The server asks for credentials from its first request on."""
    with object_store(INITIAL_NO_AUTH_ACTION_COUNT="0") as strict:
        store = f"s3://{BUCKET}/x?endpoint_override={strict.address.replace(':', '%3A').replace('/', '%2F')}&region=us-east-1"
        ask = f"from batchscout.orchestrator.study.storage.place import *; ObjectStore({store!r}).refuse_unusable()"
        done = subprocess.run([sys.executable, "-c", ask], env=os.environ | CREDENTIALS, capture_output=True, text=True)
    assert re.search(
        r"ValueError: .* could not be listed: the store .* credentials.*; set AWS_ACCESS_KEY_ID and", done.stderr
    ), done.stderr


def test_a_store_that_goes_away_halts_the_study_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "SECONDS_TO_COME_BACK", 1.0)
    with object_store() as server:
        store = ObjectStore(
            f"s3://{BUCKET}/x?endpoint_override={server.address.replace(':', '%3A').replace('/', '%2F')}&region=us-east-1"
        )
        with pytest.MonkeyPatch.context() as patch:
            for name, value in CREDENTIALS.items():
                patch.setenv(name, value)
            journal = opened(store)
            journal.append(ready("one"))
    said = list[str]()
    with (
        pytest.raises(Halted, match="could not be listed: the store does not answer"),
        told_if_storage_hangs(journal, said.append, seconds=0.05),
    ):
        journal.append(ready("two"))
    assert (
        f"{store} has not answered for 0.05 s: the study waits, and goes on when it does; nothing is lost. " in said[0]
    )
    assert "After 60 s it stops; run the same command again when the store is back" in said[0]
    assert len(said) == 1, "nor that it answers again"
    assert re.findall(r'"token":"(\w+)"', journal.path.read_text()) == ["one"], "nor does it count here"
    journal.close()


def test_a_machine_of_a_cluster_has_what_the_store_knows_of_a_trial_and_no_later_checkpoint(
    store: ObjectStore, data_cache: Path
) -> None:
    """A later one was saved there before the trial went on elsewhere; logs that the store does not have stay."""
    trials = StoredTrials(store, generation=3)
    folder = trials.directory("a", of_the_driver="/elsewhere")
    earlier = folder.parents[2] / "000002"
    (earlier / "trials" / "a").mkdir(parents=True)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "300-t.pt").write_bytes(b"later")
    (folder / "crash-rank0.log").write_text("a stack")
    for name in ("checkpoints/200-t.pt", "steps.jsonl"):
        store.write(f"trials/a/{name}", b"stored")
    trials.fetch("a", checkpoints_alone=True)
    assert names_below(folder) == ["checkpoints/200-t.pt", "crash-rank0.log"]
    trials.fetch("a", checkpoints_alone=False)
    assert names_below(folder) == ["checkpoints/200-t.pt", "crash-rank0.log", "steps.jsonl"]
    trials.leave("a")
    assert names_below(folder) == ["crash-rank0.log", "steps.jsonl"]
    assert not earlier.exists(), "what an earlier driver's trials had here is in the store"
    in_place = StoredTrials(store, generation=None)
    in_place.fetch("b", checkpoints_alone=False)
    assert in_place.directory("b", of_the_driver="/elsewhere") == Path("/elsewhere")


def test_a_rank_has_there_what_it_saved_and_neither_an_open_log_nor_what_it_replaced(
    store: ObjectStore, tmp_path: Path
) -> None:
    """Another rank removes its log whenever it pleases. A checkpoint that is kept for a branch is never removed."""
    for name in ("checkpoints/100-t.pt", "checkpoints/kept/100.pt", "crash-rank1.log", "steps.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    publication = StoredTrials(store, generation=3).publication("a", tmp_path)
    publication.update()
    assert sorted(store.stored("trials/a")) == [
        f"trials/a/{name}" for name in ("checkpoints/100-t.pt", "checkpoints/kept/100.pt", "steps.jsonl")
    ]
    shutil.rmtree(tmp_path / "checkpoints" / "kept")
    (tmp_path / "checkpoints" / "100-t.pt").rename(tmp_path / "checkpoints" / "200-t.pt")
    publication.update()
    assert sorted(store.stored("trials/a/checkpoints")) == [
        "trials/a/checkpoints/200-t.pt",
        "trials/a/checkpoints/kept/100.pt",
    ]


def last_word_of_a_run(
    store: ObjectStore, patch: pytest.MonkeyPatch, saved: str, ends: Callable[[], str]
) -> tuple[str | None, list[str], list[str]]:
    """(outcome, what the store has of the trial, what its folder on this machine of a cluster has) after a run that writes a file and
    ends so."""

    def run(_config: object, _report: object, directory: Path, *_: object) -> str:
        (directory / saved).parent.mkdir(parents=True, exist_ok=True)
        (directory / saved).write_text("saved")
        return ends()

    patch.setattr(loop, "train", run)
    stored = StoredTrials(store, generation=3)
    config = base_trial(study_of(), None).model_dump_json()
    assignment = Assignment("a", config, "/the/drivers/trials/a", "token", stored=stored)
    word, _ = run_trial(assignment, SilentPlace(dispatcher=None, lane="lane", rank=0))
    assert word is not None
    there = sorted(name.removeprefix("trials/a/") for name in store.stored("trials/a"))
    return word.outcome, there, names_below(stored.directory("a", "/the/drivers/trials/a"))


def test_what_a_trial_saves_in_order_to_stop_is_there_before_its_node_is_freed(
    store: ObjectStore, data_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C and a node that is taken away come between two evaluations, and no report tells of that checkpoint."""
    saved = "checkpoints/000000000150-token.pt"
    assert last_word_of_a_run(store, monkeypatch, saved, lambda: "stop") == ("stopped", [saved], [])


def test_what_a_trial_that_failed_has_told_is_there(
    store: ObjectStore, data_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> str:
        raise ArithmeticError("my own mistake")

    outcome, there, _ = last_word_of_a_run(store, monkeypatch, "steps.jsonl", fails)
    assert (outcome, there) == ("failed", ["error-rank0.log", "steps.jsonl"])


@pytest.mark.parametrize("runs_trials_here", [True, False])
def test_what_nobody_needs_goes_from_the_store_too_and_a_former_try_is_put_by_there(
    store: ObjectStore, data_cache: Path, runs_trials_here: bool
) -> None:
    """Whether its checkpoints are here as well, or on the machines of a cluster alone."""
    files = (
        "checkpoints/8-t.pt",
        "checkpoints/kept/8.pt",
        "weights.pt",
        "set_aside/4-t.pt",
        "error-rank0.log",
        "steps.jsonl",
    )
    for name in ("done", "lost", "other"):
        for file in files:
            store.write(f"trials/{name}/{file}", b"stored")
    config = base_trial(study_of(), None)
    done, lost = (
        Trial(Proposal(name, "grid", config, candidate=name), state)
        for name, state in (("done", TrialState.COMPLETE), ("lost", TrialState.FAILED))
    )
    with contextlib.closing(StoredStudy(store, runs_trials_here=runs_trials_here)) as stored:
        (stored.run_dir / "trials" / "lost" / "crash-rank0.log").write_text("")
        (stored.run_dir / "trials" / "lost" / "crash-rank1.log").write_text("a stack")
        discard_what_nobody_needs(stored.run_dir, [done, lost], stored)
        there = {name.removeprefix("trials/") for name in store.stored("trials")}
        assert there == {
            *(f"other/{file}" for file in files),
            *(f"done/{file}" for file in files if file != "weights.pt"),
            *("lost/set_aside/4-t.pt", "lost/error-rank0.log", "lost/steps.jsonl"),
            *(["lost/crash-rank1.log"] if runs_trials_here else []),
        }
        put_former_try_by(stored.run_dir, lost, stored)
        there = {name.removeprefix("trials/lost/") for name in store.stored("trials/lost")}
        assert there == {
            *("set_aside/4-t.pt", "try1-error-rank0.log", "steps.jsonl"),
            *("try1-crash-rank0.log", "try1-crash-rank1.log"),
        }


def names_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_copy_to_read_has_all_but_the_checkpoints(store: ObjectStore, tmp_path: Path) -> None:
    with opened(store) as journal:
        assert journal.published is not None
        trial = journal.published.run_dir / "trials" / "a"
        (trial / "checkpoints").mkdir(parents=True)
        (trial / "checkpoints" / "1.pt").write_bytes(b"weights")
        (trial / "steps.jsonl").write_text("{}")
        journal.append(ready("one"))
        store.add(trial, "trials/a")
    read_copy(store, tmp_path)
    assert names_below(tmp_path) == ["journal.jsonl", "trials/a/steps.jsonl"]
