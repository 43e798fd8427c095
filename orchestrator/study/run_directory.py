"""A study's directory: who may write there, which study it holds, and what is kept of its trials."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import BaseModel, JsonValue

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import parse_stored_study, read_yaml, written_yaml
from batchscout.orchestrator.config.placeholders import leaves
from batchscout.orchestrator.config.stages import OnlySays
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import FORMAT_VERSION, Event, Proposed, RunBegan
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.lines import format_of, read_lines, refuse_earlier_format
from batchscout.orchestrator.study.storage.stored_study import StoredStudy
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.study.upgrade import upgraded_study
from batchscout.trainers.files import (
    PARTIAL,
    StorageLost,
    exists,
    make_private_directory,
    own_file,
    quoted,
    storage_error,
    written_whole,
)

MAX_DIFFERENCES = 8


def open_run_directory(
    config: StudyConfig,
    run_dir: Path,
    published: StoredStudy | None = None,
    goes_further: Callable[[StudyConfig, Journal], object] = lambda before, journal: None,
) -> Journal:
    """Return this study's journal, locked, and write study.yaml beside it. published: where the directory is a copy of.

    goes_further: is called with the study as it was, and its journal, where keys have changed that only say when it stops or where it runs; what
    it journals is there before study.yaml says so. Raises ValueError where the directory holds another study (with the difference), other files, or a running driver.
    """
    path = run_dir / "study.yaml"
    with _as_the_user_chose(run_dir):
        _refuse_other_files(config, run_dir)
        make_private_directory(run_dir)
    # Locked: nobody else reads or writes the file now.
    journal = Journal(run_dir / "journal.jsonl", config.name, published=published)
    try:
        _discard_half_written(run_dir)
        _write_study(config, path, journal, goes_further)
        if published is not None:
            published.publish_study()
    except BaseException:
        journal.close()
        raise
    return journal


@contextlib.contextmanager
def _as_the_user_chose(run_dir: Path) -> Iterator[None]:
    """Raise an OSError as a ValueError that names the directory: no study can live there. What the disk is to blame for is raised as a
    StorageLost."""
    try:
        yield
    except OSError as error:
        if storage_error(error) is not None:
            raise StorageLost(f"{quoted(run_dir)} could not be written: {error.strerror}") from error
        raise ValueError(f"{quoted(run_dir)} cannot hold a study: {error.strerror}; choose another --dir") from error


def refuse_other_study(config: StudyConfig, run_dir: Path) -> None:
    """Raise ValueError where a study that has begun there is another one, or the directory holds other files; write nothing."""
    path, journal = run_dir / "study.yaml", run_dir / "journal.jsonl"
    with _as_the_user_chose(run_dir):
        _refuse_other_files(config, run_dir)
    with own_file(run_dir, "read"):
        refuse_earlier_format(journal)
        if exists(path) and exists(journal) and replay(journal, config.name).trials:
            _refuse_other(_stored(path), config, run_dir)


def _refuse_other_files(config: StudyConfig, run_dir: Path) -> None:
    path = run_dir / "study.yaml"
    if exists(run_dir) and not run_dir.is_dir():
        raise ValueError(f"{quoted(run_dir)} is no directory; choose another --dir")
    if exists(run_dir) and not exists(path) and not all(map(_is_ours, run_dir.iterdir())):
        raise ValueError(f"{quoted(run_dir)} is not empty and holds no study.yaml; choose another --dir, or empty it")
    has_begun = next(read_lines(run_dir / "journal.jsonl"), None) is not None
    if exists(path) and not has_begun and not _is_alike(_stored(path), config) and not _is_as_we_write(path):
        raise ValueError(
            f"{quoted(path)} is a study file, and no study has begun beside it: it would be written over; choose another --dir"
        )


def _is_as_we_write(path: Path) -> bool:
    """True if a study file has neither comments nor a form of its own that would be lost."""
    return written_yaml(read_yaml(path)) == path.read_text("utf-8")


def _is_alike(before: object, now: StudyConfig) -> bool:
    return isinstance(before, StudyConfig) and before.model_dump(mode="json") == now.model_dump(mode="json")


def load_stored_study(path: Path) -> StudyConfig:
    """Return the study that a run directory's study.yaml holds, in this version's keys."""
    tree = read_yaml(path)
    earlier = format_of(path.with_name("journal.jsonl")) < FORMAT_VERSION
    return parse_stored_study(upgraded_study(tree) if earlier else tree, quoted(path))


def as_it_began(config: StudyConfig, run_dir: Path) -> StudyConfig:
    """Return the study with the defaults that it began with, for keys that were left open then and are now: another version may have
    other defaults, and all runs of a study are compared under one rule."""
    with _as_the_user_chose(run_dir):
        given = _given_at_the_start(run_dir / "journal.jsonl")
        has_begun = given is not None and exists(run_dir / "study.yaml")
    return _with_defaults_of(load_stored_study(run_dir / "study.yaml"), config, given) if has_begun else config


def keys_given(file: Path, say: Callable[[str], object]) -> JsonValue:
    """Return the keys that a study file gives: of a run directory's, which has all, those that the study was given there or that are not as
    by default. say: is called with what was told of the object under `from` then."""
    first = next((line.event for line in read_lines(file.with_name("journal.jsonl")) if _has_keys(line.event)), None)
    if file.name != "study.yaml" or not isinstance(first, RunBegan):
        return read_yaml(file)
    for told in first.told:
        say(told)
    return _without_defaults(load_stored_study(file), first.given).model_dump(mode="json", exclude_unset=True)


def _has_keys(event: Event) -> bool:
    return isinstance(event, RunBegan) and bool(event.given)


def _without_defaults(keys: Keys, given: Mapping[str, JsonValue]) -> Keys:
    """Return the keys of which those count as left open that were not given and are as by default."""
    kept, fields = {}, type(keys).model_fields
    for name in keys.model_fields_set:
        value = getattr(keys, name)
        if name in given:
            kept[name] = _parts_without_defaults(value, given[name])
        elif value != fields[name].get_default(call_default_factory=True):
            kept[name] = value
    found = keys.model_copy(update=kept)
    found.model_fields_set.intersection_update(kept)
    return found


def _parts_without_defaults(value: Any, given: JsonValue) -> Any:
    if isinstance(value, BaseModel) and isinstance(given, dict):
        return _without_defaults(value, given)
    if isinstance(value, tuple) and isinstance(given, list) and len(value) == len(given):
        return (*map(_parts_without_defaults, value, given),)
    return value


def _given_at_the_start(journal: Path) -> JsonValue:
    """Return the keys that the study was given when it began; None if it has no trial yet, until which it may change."""
    given = None
    for line in read_lines(journal):
        match line.event:
            case RunBegan():
                given = line.event.given
            case Proposed():
                return given
    return None


Keys = TypeVar("Keys", bound=BaseModel)


def _with_defaults_of(then: Keys, now: Keys, given: JsonValue) -> Keys:
    """Return the keys of now, and where neither now nor then one was given, that of then. given: the keys that then were."""
    if not isinstance(given, dict):
        return now
    found = {}
    for name in type(now).model_fields:
        if name in now.model_fields_set:
            found[name] = _parts_with_defaults_of(getattr(then, name), getattr(now, name), given.get(name))
        elif name not in given:
            found[name] = getattr(then, name)
    kept = now.model_copy(update=found)
    kept.model_fields_set.intersection_update(now.model_fields_set)  # what is kept was not given
    return kept


def _parts_with_defaults_of(then: Any, now: Any, given: JsonValue) -> Any:
    """The same of a key's value: only keys within it may have been left open."""
    if isinstance(now, BaseModel) and type(now) is type(then):
        return _with_defaults_of(then, now, given)
    if (
        isinstance(now, tuple)
        and isinstance(then, tuple)
        and isinstance(given, list)
        and len(then) == len(given) <= len(now)
    ):
        return (*map(_parts_with_defaults_of, then, now, given), *now[len(then) :])
    return now


def _discard_half_written(run_dir: Path) -> None:
    """Remove what a killed driver, or a killed `batchscout report`, was writing: a report may have megabytes."""
    with own_file(run_dir, "removed"):
        for leftover in run_dir.glob(f".*{PARTIAL}"):
            leftover.unlink(missing_ok=True)


def _is_ours(entry: Path) -> bool:
    """True if a driver that died before it wrote study.yaml may have left this file, or `batchscout.find` has put it there."""
    of_find = entry.name.startswith("objects-") and entry.suffix == ".pt"
    return of_find or entry.suffix == PARTIAL or entry.name in ("journal.jsonl", "journal.lock", ".lease")


def _write_study(
    config: StudyConfig, path: Path, journal: Journal, goes_further: Callable[[StudyConfig, Journal], object]
) -> None:
    """Write study.yaml. It may change until the first trial is proposed, and after that in keys that only say when the study stops or where
    it runs; raises ValueError if another one changed after that."""
    before = _stored(path) if exists(path) else None
    if _is_alike(before, config):
        return
    if before is not None and journal.study.trials:
        goes_further(_refuse_other(before, config, path.parent), journal)
    with written_whole(path) as file:
        file.write(written_yaml(config.model_dump(mode="json")).encode())


def _refuse_other(before: object, now: StudyConfig, run_dir: Path) -> StudyConfig:
    """Return the study as it was; raise ValueError if it is another one."""
    if isinstance(before, StudyConfig):
        there, here = _identity(before, before), _identity(now, before)
        if there == here:
            return before
    else:
        there, here = before, now.model_dump(mode="json")
    raise ValueError(
        f"{quoted(run_dir)} holds another study:\n{_difference(there, here)}\n"
        "choose another --dir, or take the change back to go on with that study"
    )


def _identity(keys: BaseModel, beside: BaseModel) -> dict[str, JsonValue]:
    """Return the keys that trials are made with and judged by, as JSON. beside: the study before; of what may follow, it says how much there
    was."""
    tree = keys.model_dump(mode="json")
    for name, field in type(keys).model_fields.items():
        value, other = getattr(keys, name), getattr(beside, name, None)
        said = next((one for one in field.metadata if isinstance(one, OnlySays)), None)
        if said is OnlySays.WHAT_FOLLOWS and other is not None:
            if isinstance(value, tuple) and isinstance(other, tuple):
                tree[name] = [_identity(one, one) for one in value[: len(other)]]
        elif said is not None:
            del tree[name]
        elif isinstance(value, BaseModel):
            tree[name] = _identity(value, other if isinstance(other, BaseModel) else value)
    return tree


def _stored(path: Path) -> object:
    """Return the study that the file holds; where it is none of this version's, what is there, to be shown."""
    try:
        return load_stored_study(path)
    except ValueError:
        return read_yaml(path)


def _difference(before: object, now: object) -> str:
    there, here = dict(leaves(before)), dict(leaves(now))
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    lines = [f"  {key}: {there.get(key, 'absent')} there, {here.get(key, 'absent')} now" for key in keys]
    if len(lines) > MAX_DIFFERENCES:
        lines = [*lines[:MAX_DIFFERENCES], f"  and {len(lines) - MAX_DIFFERENCES} more"]
    return "\n".join(lines)


def trial_directory(run_dir: Path, trial_id: str) -> Path:
    """Return where the files of a trial lie."""
    return run_dir / "trials" / trial_id


def discard_what_nobody_needs(run_dir: Path, trials: list[Trial], published: StoredStudy | None = None) -> None:
    """Delete what the trials of a concluded stage have saved, except the checkpoints of full runs that completed, and of those that a larger
    budget would let go on. published: where the directory is a copy of."""
    kept = {
        trial.id: trial.cause is Cause.BUDGET or (trial.state is TrialState.COMPLETE and trial.is_full_run)
        for trial in trials
    }
    for name, is_kept in kept.items():
        directory = trial_directory(run_dir, name)
        with own_file(directory, "removed"):
            for leftover in [directory / "weights.pt", *directory.rglob(f".*{PARTIAL}")]:
                leftover.unlink(missing_ok=True)
            if not is_kept and exists(directory / "checkpoints"):
                shutil.rmtree(directory / "checkpoints")
    if published is not None:
        published.add_trials()
        published.discard(lambda path: _is_discarded(path, kept))


def _is_discarded(path: PurePosixPath, kept: Mapping[str, bool]) -> bool:
    """True for what nobody needs of these trials, by its path below all trials. kept: whether a trial's checkpoints are."""
    name, *below = path.parts
    is_of_a_checkpoint = below[:1] == ["checkpoints"] and not kept.get(name, True)
    return is_of_a_checkpoint or (name in kept and below == ["weights.pt"])


def logs_of(run_dir: Path, trial_id: str) -> list[Path]:
    """Return what the ranks of a trial have left of its failure: tracebacks, and after them the stacks of crashes, the last one first: those
    before it the trial has survived."""
    logs = trial_directory(run_dir, trial_id).glob("[ec]r*-rank*.log")
    return sorted(logs, key=lambda log: (-log.stat().st_mtime if log.name.startswith("crash") else -math.inf, log.name))


def put_former_try_by(run_dir: Path, trial: Trial, published: StoredStudy | None = None) -> None:
    """Have an ended trial's directory ready for its next try: without what it would go on from, and with its logs under names that
    say of which try they are. published: as of `discard_what_nobody_needs`."""
    discard_what_nobody_needs(run_dir, [trial], published)
    directory, former = trial_directory(run_dir, trial.id), logs_of(run_dir, trial.id)
    put_by = [log.with_name(f"try{len(trial.earlier_tries) + 1}-{log.name}") for log in former]
    with own_file(directory):
        for log, aside in zip(former, put_by, strict=True):
            log.rename(aside)
        if exists(directory / "checkpoints"):
            shutil.rmtree(directory / "checkpoints")
    if published is not None:
        published.add_logs(put_by)
        gone = {PurePosixPath(trial.id, log.name) for log in former}
        published.discard(lambda path: path in gone or path.parts[:2] == (trial.id, "checkpoints"))
