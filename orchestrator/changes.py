"""Whether code and data are what a study began with, which a driver asks before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from batchscout.orchestrator import preflight
from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.decisions.retries import changed_names, kept_text, trials_that_count, why_refused
from batchscout.orchestrator.study.events import noticed
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.inputs import data_files_of, import_paths
from batchscout.orchestrator.study.journal import Journal
from batchscout.trainers.files import StorageLost
from batchscout.trainers.notices import Notice, NoticeKind
from batchscout.trainers.user_code import code_of


@dataclass(frozen=True)
class Changes:
    """What the study is made of, as it is now, and the names of what of that is not as its trials had it."""

    now: Facts
    code: Sequence[str] = ()
    data: Sequence[str] = ()
    """Files that the study file names among them."""

    @property
    def names(self) -> list[str]:
        return [*self.code, *self.data]


def made_of(config: StudyConfig) -> Facts:
    """Return digests of the user's code and of the files that the study file names, as they are now."""
    return Facts(code=code_of(import_paths(config)), inputs=data_files_of(config))


def without_what_it_writes(before: Facts, config: StudyConfig) -> Facts:
    """Return what the study is made of without the files that its own code has written since: a log is no input of it."""
    now = data_files_of(config)
    return replace(before, inputs={name: one for name, one in (before.inputs or {}).items() if now.get(name) == one})


def changes_of(config: StudyConfig, facts: Facts, contents: Mapping[str, str]) -> Changes:
    """Compare what a study is made of with what it began with. contents: digests of data and model as they are now. A model that
    is made otherwise counts as other code, by which it is.

    What its facts do not name counts for nothing: a file that was not there, or that it writes itself, and data that are others in every
    process.
    """
    from batchscout.trainers.before.digests import MODEL, WEIGHTS  # loads torch

    now = made_of(config)
    inputs = {name: digest for name, digest in (now.inputs or {}).items() if name in (facts.inputs or {})}
    known = {name: digest for name, digest in contents.items() if name in (facts.contents or {})}
    found = changed_names(facts.contents, known)
    of_model = [name for name in found if name in (MODEL, WEIGHTS)]
    code = [*changed_names(facts.code, now.code or {}), *of_model]
    data = [*changed_names(facts.inputs, inputs), *(name for name in found if name not in of_model)]
    return Changes(replace(now, inputs=inputs, contents=known), code, data)


def changes_of_what_is_over(config: StudyConfig, facts: Facts, say: Callable[[str], object]) -> Changes:
    """The same of a study that is over, whose answer needs neither code nor data: it is said which are not there any more."""
    try:
        changes = changes_of(config, facts, preflight.contents_of(config, say))
    except (ValueError, StorageLost) as error:
        say(f"not compared with what the study began with: {error}")
        return Changes(facts)
    before, now = {**(facts.code or {}), **(facts.inputs or {})}, changes.now
    if gone := sorted(before.keys() - {**(now.code or {}), **(now.inputs or {})}.keys()):
        say(f"not compared with what the study began with: there is no {', '.join(gone)} any more")
        return Changes(facts)
    return changes


def refuse_or_keep(journal: Journal, changes: Changes, *, keep_finished: bool) -> None:
    """Raise ValueError where trials would be compared with trials of other code or data, and the user has not said that they are to be
    kept; note that they are."""
    if (why := why_refused(journal.study, changes.code, changes.data)) is None:
        return
    if not keep_finished:
        raise ValueError(why)
    if trials_that_count(journal.study):
        notice = Notice(NoticeKind.KEPT_TRIALS, kept_text(journal.study, changes.names))
        if notice not in journal.study.notices.get(None, []):
            journal.append(noticed(notice))


def measured_elsewhere(before: Facts, torch_now: str, device_now: str) -> Iterator[str]:
    """Yield what is another by now of what a study's trials were measured on: torch, or the device and the threads of a rank on it."""
    torch_before = (before.versions or {}).get("torch", "")
    device_before, device_now = (
        (told or "").rpartition(", ")[0] for told in (before.device, device_now)
    )  # the rest is its memory
    for how, one, other in (("with torch", torch_before, torch_now), ("on", device_before, device_now)):
        if one and other and one != other:
            yield (
                f"trials were measured {how} {one}, and later ones {how} {other}: speeds, memory and losses of both are compared; to measure all "
                "alike, run the study with another --dir"
            )
