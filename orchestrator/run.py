"""`batchscout run`: a study from its file to its recommendation, stage by stage. Running again is resuming."""

from __future__ import annotations

import contextlib
import functools
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from batchscout.orchestrator import preflight
from batchscout.orchestrator.changes import (
    Changes,
    changes_of,
    changes_of_what_is_over,
    made_of,
    measured_elsewhere,
    refuse_or_keep,
    without_what_it_writes,
)
from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.recipe import left_open_text
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.config.trial import precisions, uses_compile
from batchscout.orchestrator.decisions.director import Director
from batchscout.orchestrator.decisions.further import events_to_go_further
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.decisions.retries import events_of, tried_again, why_again
from batchscout.orchestrator.execution.device_peaks import device_peaks
from batchscout.orchestrator.execution.fleet import ClusterResources, wait_for_room
from batchscout.orchestrator.execution.lanes import Lanes, Workplace, open_lanes
from batchscout.orchestrator.execution.nodes.autoscaler import (
    Autoscaler,
    MayStart,
    NoAutoscaler,
    autoscaler,
    start_asker,
)
from batchscout.orchestrator.execution.nodes.node_kinds import Choice, chosen_nodes
from batchscout.orchestrator.execution.nodes.placement import LaneShape, lane_shape, nodes_now
from batchscout.orchestrator.execution.nodes.room import at_most
from batchscout.orchestrator.execution.nodes.shared_storage import shared_marker, store_marker
from batchscout.orchestrator.execution.session import (
    lane_environment,
    ray_cluster,
    rays_of_users_ended,
    reachable_address,
    refuse_other_devices,
    refuse_too_many_nodes,
    wait_for_nodes,
)
from batchscout.orchestrator.execution.tune import run_stage
from batchscout.orchestrator.output.fetched import TrialsFetched
from batchscout.orchestrator.output.live import LiveReport
from batchscout.orchestrator.output.progress import Progress
from batchscout.orchestrator.output.results import Ending, finish
from batchscout.orchestrator.output.tracking import open_trackers, require_libraries
from batchscout.orchestrator.output.tracking.runs import TrialRuns
from batchscout.orchestrator.output.tracking.tables import found_by
from batchscout.orchestrator.signals import (
    SECONDS_TO_SAVE,
    all_are_ctrl_c,
    interrupt_has_come,
    interrupts_between_events,
    leave_dead_terminal,
)
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.events import ClusterReady, FactsRead, RunBegan, RunStopped, noticed
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal, Vanished
from batchscout.orchestrator.study.reuse import Measurements, identity
from batchscout.orchestrator.study.run_directory import (
    as_it_began,
    discard_what_nobody_needs,
    open_run_directory,
    put_former_try_by,
)
from batchscout.orchestrator.study.slow_storage import told_if_storage_hangs
from batchscout.orchestrator.study.state import Halted, Study
from batchscout.orchestrator.study.storage.lease import RunsOut
from batchscout.orchestrator.study.storage.marker import RunMarker
from batchscout.orchestrator.study.storage.place import RunPlace
from batchscout.orchestrator.study.storage.stored_study import StoredStudy
from batchscout.orchestrator.study.trial import TrialState
from batchscout.orchestrator.terminal import printable
from batchscout.orchestrator.units import bytes_text, counted
from batchscout.trainers.config import DevicePeak, Precision, left_as_it_is
from batchscout.trainers.data.cache import cache_directory
from batchscout.trainers.device import cgroup
from batchscout.trainers.files import StorageLost, naming_the_disk
from batchscout.trainers.notices import Notice, NoticeKind, heard_by

# The clocks of two machines do not run equally fast: so much longer than a lease is waited.
SECONDS_AFTER_A_LEASE = 1.0
Held = TypeVar("Held")
STOPPED = "stopped; nothing that was measured or saved is lost. To go on, run the same command again"


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that are not keys of its study."""

    address: str | None = None
    """Of the user's cluster; None: the study has one of its own."""
    min_nodes: int = 1
    """How many nodes the cluster is to have before the study counts what it holds."""
    remeasure: bool = False
    """True if the frontier is to be measured though another study has done so on this machine."""
    retry_failed: bool = False
    """True if what failed is to be tried again though nothing has changed that the driver can see."""
    keep_finished: bool = False
    """True if trials are to be kept though the user's code or data have changed since."""
    seconds_to_save: int = SECONDS_TO_SAVE
    """How long the running trials have to save a checkpoint where the study is stopped."""
    quiet: bool = False
    told: tuple[str, ...] = ()
    """What was told of the object that `from` names when the study was read."""
    began: float | None = None
    """When the user's command did, by the monotonic clock; None: now."""

    @property
    def of_the_cluster(self) -> tuple[str, ...]:
        """The options of the command that say on which cluster the study runs."""
        address = () if self.address is None else ("--address", self.address)
        return address if self.min_nodes == 1 else (*address, "--min-nodes", str(self.min_nodes))


@dataclass(frozen=True)
class Driver:
    """The process that runs a study: what all its stages share."""

    config: StudyConfig
    run_dir: Path
    journal: Journal
    progress: Progress
    token: str
    """Names this process in every checkpoint of its trials: ranks of an earlier one may still be writing theirs."""
    options: RunOptions


def run_study(config: StudyConfig, place: RunPlace, options: RunOptions) -> Ending:
    """Run what the journal does not hold yet, and write report and recommendation. Raises ValueError for bad input."""
    require_libraries(config.tracking)
    if isinstance(place, Path):
        return _run(config, place, None, options)
    stored = _held(lambda: StoredStudy(place, runs_trials_here=options.address is None))
    with contextlib.closing(stored):
        try:
            ending = _run(config, stored.run_dir, stored, options)
        except ValueError as error:
            raise ValueError(stored.told(str(error))) from error
    return replace(ending, message=stored.told(ending.message))


def _run(config: StudyConfig, run_dir: Path, stored: StoredStudy | None, options: RunOptions) -> Ending:
    """See `run_study`. stored: what the run directory is a copy of."""
    address = options.address
    config = as_it_began(config, run_dir)

    def goes_further(before: StudyConfig, journal: Journal) -> None:
        for event in events_to_go_further(before, config, journal.study):
            journal.append(event)

    with _held(lambda: open_run_directory(config, run_dir, stored, goes_further)) as journal, all_are_ctrl_c():
        if journal.study.is_over(config.stages):
            changes = changes_of_what_is_over(config, journal.study.facts, _say_before)
            again = _settled(run_dir, journal, changes, options)
            if journal.study.is_over(config.stages):
                return _finish(config, run_dir, journal)
            if again:
                _say_before(again)
        try:
            if address is not None:
                address = reachable_address(address)
            with (
                Progress(config, journal.study, options.quiet, options.began) as progress,
                told_if_storage_hangs(journal, progress.say),
            ):
                progress.say("reading the data, building the model and predicting its memory")
                with rays_of_users_ended(progress.say), left_as_it_is():
                    token, notices = _begin(config, run_dir, journal, options, progress.say)
                for notice in notices:
                    progress.noticed(None, notice)
                driver = Driver(config, run_dir, journal, progress, token, options)
                with _told_when_it_stops(journal):
                    trackers = _run_stages(driver, address)
        except (Halted, StorageLost) as error:
            remedy = (
                "" if isinstance(error, Vanished) else ". Nothing is lost: fix that, and run the same command again"
            )
            return _stopped(1, f"{error}{remedy}", config, run_dir, journal)
        except KeyboardInterrupt:
            return _stopped(130, STOPPED, config, run_dir, journal)
        ending = _finish(config, run_dir, journal)
        for tracker in trackers:
            tracker.tell_study(found_by(journal.study, run_dir, ending.text(str(run_dir))))
        return ending


def _held(take: Callable[[], Held]) -> Held:
    """Return what is taken. A driver on another machine that may be gone is waited for until its lease has run out."""
    while True:
        try:
            return take()
        except RunsOut as held:
            _say_before(f"{held}; waiting for that")
            time.sleep(held.seconds_left + SECONDS_AFTER_A_LEASE)


def _finish(config: StudyConfig, run_dir: Path, journal: Journal) -> Ending:
    """Write the results, also to where the study is published, and say how it stands."""
    if (published := journal.published) is None:
        return finish(config, run_dir, journal.study)
    published.fetch_what_others_ran()
    ending = finish(config, run_dir, journal.study)
    published.publish_results()
    published.add_trials()
    return ending


def _say_before(text: str) -> None:
    """Say what comes before there is a progress."""
    print(printable(text), file=sys.stderr, flush=True)


def _settled(run_dir: Path, journal: Journal, changes: Changes, options: RunOptions) -> str:
    """Refuse or keep what was made with other code or data, and have what failed wait again, if what it was made of has changed or the
    user asks for it; return that in words."""
    refuse_or_keep(journal, changes, keep_finished=options.keep_finished)
    again = _try_again(run_dir, journal, changes.names) if changes.names or options.retry_failed else ""
    if changes.names:
        journal.append(FactsRead(facts=changes.now))
    return again


def _try_again(run_dir: Path, journal: Journal, changed: Sequence[str]) -> str:
    trials, why = tried_again(journal.study), why_again(changed)
    events = events_of(journal.study, trials, why)
    if not events:
        return ""
    for trial in trials:
        put_former_try_by(run_dir, trial, journal.published)
    for event in events:
        journal.append(event)
    return f"{counted(len(trials), 'trial')} of an earlier try will run again: {why}; all else stands"


def _begin(
    config: StudyConfig, run_dir: Path, journal: Journal, options: RunOptions, say: Callable[[str], None]
) -> tuple[str, list[Notice]]:
    """Check what can be checked before anything starts; return this process's token, and what it met."""
    is_local = options.address is None
    notices: list[Notice] = []

    def hear(notice: Notice) -> None:
        if notice not in journal.study.notices.get(None, []):
            notices.append(notice)
            journal.append(noticed(notice))

    compiles = is_local and uses_compile(config)
    if is_local:
        preflight.check_host(config)
    with heard_by(hear):
        if not _begins(journal.study):
            facts = preflight.check(config, compiles=compiles, say=say)
            changes = changes_of(config, journal.study.facts, facts.contents or {})
            if again := _settled(run_dir, journal, changes, options):
                say(again)
        if _begins(journal.study):  # it may have come to that where all that there was failed
            began_with = made_of(config)
            facts = preflight.check_new_study(config, is_local=is_local, compiles=compiles, say=say)
            journal.append(FactsRead(facts=preflight.with_predicted_memory(config, facts, say)))
            journal.append(FactsRead(facts=without_what_it_writes(began_with, config)))
    token = uuid.uuid4().hex[:8]
    given = config.model_dump(mode="json", exclude_unset=True)
    journal.append(RunBegan(token=token, given=given, told=options.told, cluster_options=options.of_the_cluster))
    if (told := left_open_text(config, journal.study.given)) is not None:
        say(told)
    return token, [*journal.met, *notices]


def _begins(study: Study) -> bool:
    """True where nothing has been measured yet: what the study file names may have been mended."""
    return not study.trials or study.begins_again


@contextlib.contextmanager
def _told_when_it_stops(journal: Journal) -> Iterator[None]:
    """Journal it if the block ends before the study: what runs has held its lane until then."""
    try:
        yield
    except BaseException:
        if journal.published is not None:
            journal.published.store.expect_no_answers()
        with contextlib.suppress(Halted):  # then it counts up to the last line that could be written
            journal.append(RunStopped())
        raise


def _run_stages(driver: Driver, address: str | None) -> list[TrialRuns]:
    """Start Ray and the lanes once, and run every stage that is not concluded. Return the trackers, which are yet to hear what the
    study has found."""
    config, run_dir, journal, say = driver.config, driver.run_dir, driver.journal, driver.progress.say
    live_report = LiveReport(config, journal.study, run_dir, say)
    trackers = open_trackers(config.tracking, config.name, run_dir, functools.partial(_tell, driver))
    first = [] if journal.published is None else [TrialsFetched(journal.published)]
    observers: list[Observer] = [*first, driver.progress, *trackers, live_report]
    started = time.monotonic()
    say("starting Ray and the lanes")
    remedy = "run the same command again" if address is None else "start the cluster again, and run the same command"
    lost = functools.partial(_say_that_the_cluster_is_gone, driver, remedy)
    stopped = functools.partial(_say_at_once, driver, 130, STOPPED)
    with ray_cluster(config, address, run_dir, lost, stopped), contextlib.ExitStack() as on_leaving:
        for tracker in trackers:
            on_leaving.callback(tracker.close)
        resources = _look_at_cluster(driver, is_local=address is None)
        shape = resources.shape
        marker = None if address is None else _marker(driver, resources)
        read = Facts(memory_limit_bytes=_share_of_host_memory(driver, shape), device_kind=resources.choice.kind)
        read = replace(read, device_peaks=_device_peaks(driver, shape, is_local=address is None))
        environment = lane_environment(shape, is_local=address is None, deterministic=config.deterministic)
        place, code = (Path.cwd(), journal.study.facts.code or {}) if address is None else (None, {})
        workplace = Workplace(run_dir / ".ray", environment, place, code, marker)
        silence, measured_on = config.kill.max_silent_seconds, journal.study.facts.measured_on
        with open_lanes(shape, workplace, say, silence, measured_on, resources) as lanes:
            journal.append(ClusterReady(token=driver.token, seconds=time.monotonic() - started))
            _journal_machine(driver, lanes, read)
            for change in lanes.fleet.changes() if lanes.fleet is not None else ():  # while no stage ran
                journal.append(change)
            for stage in config.stages:
                if stage.type not in journal.study.conclusions:
                    _run_stage(stage, driver, observers, lanes, shape)
                if not journal.study.conclusions[stage.type].ok:
                    break
    shutil.rmtree(run_dir / ".ray", ignore_errors=True)  # Tune's own records: the journal has all that counts
    return trackers


def _run_stage(stage: StageKeys, driver: Driver, observers: list[Observer], lanes: Lanes, shape: LaneShape) -> None:
    """Run a stage, or what is left of it, to its conclusion."""
    known = _measurements(driver, lanes, shape) if stage_of(stage).reuses_measurements else None
    with interrupts_between_events() as is_stopping:
        context = StageContext(stage, driver.config, driver.journal.study)
        now = None if lanes.fleet is None else lanes.fleet.lanes_now
        director = Director(context, driver.journal, observers, shape.num_lanes, is_stopping, known, lanes_now=now)
        _run_trials(director, driver, lanes)
        for why in lanes.given_up():
            _tell(driver, Notice(NoticeKind.LANE_GIVEN_UP, f"a lane runs no trials: {why}"))
    director.conclude()  # after the block: on leaving, it raises an interrupt that Tune swallowed
    discard_what_nobody_needs(driver.run_dir, director.context.trials(), driver.journal.published)


def _run_trials(director: Director, driver: Driver, lanes: Lanes) -> None:
    """Run a stage from wherever the journal has it until every trial has ended."""
    try:
        director.advance()
        if not director.is_finished():
            with naming_the_disk(driver.run_dir):  # Tune writes there, too
                run_stage(director, lanes.dispatcher_name, driver.run_dir, driver.token, lanes.fleet)
    except KeyboardInterrupt:
        driver.progress.say(
            f"stopping: the running trials save a checkpoint (at most {driver.options.seconds_to_save} s)"
        )
        if not lanes.let_trials_save(driver.options.seconds_to_save):
            driver.progress.say(
                "they did not save in time: their processes are ended, and the next run goes on from their last checkpoint"
            )
        raise


def _look_at_cluster(driver: Driver, *, is_local: bool) -> ClusterResources:
    """Wait for the nodes that the study is to have from its beginning, and return what its lanes stand on."""
    scaler = NoAutoscaler() if is_local else autoscaler()
    if not isinstance(scaler, MayStart):
        wait_for_nodes(driver.options.min_nodes, driver.progress.say)
    choice = _choose_nodes(driver, scaler)
    refuse_too_many_nodes(scaler, choice, len(nodes_now()), driver.options.min_nodes)
    measured_on = driver.journal.study.facts.measured_on
    refuse_other_devices(choice, scaler, len(nodes_now()), driver.options.min_nodes, measured_on)
    shape, placement = lane_shape(driver.config, choice), driver.config.placement
    asker = start_asker() if isinstance(scaler, MayStart) else None
    resources = ClusterResources(shape, choice, placement.idle_release_seconds, asker)
    if asker is not None:
        wait_for_room(resources, driver.options.min_nodes, driver.progress.say)
    return resources


def _marker(driver: Driver, resources: ClusterResources) -> RunMarker | None:
    """Return what a node can read if it may run trials of this study; None where no node needs to. See `shared_marker`."""
    published, say, nodes = driver.journal.published, driver.progress.say, resources.choice.nodes_there
    if published is not None:
        return store_marker(published.store, nodes, say)
    return shared_marker(driver.run_dir / ".ray", nodes, say, others_may_come=resources.asker is not None)


def _choose_nodes(driver: Driver, scaler: Autoscaler) -> Choice:
    """Return the nodes that have the kind of device which the study runs on. It goes on with that kind."""
    study, named, there = driver.journal.study, driver.config.placement.device, nodes_now()
    may_be = at_most(there, scaler) if isinstance(scaler, MayStart) else there
    choice = chosen_nodes(may_be, named, study.facts.device_kind if study.trials else None)
    if choice.idle:
        _tell(driver, Notice(NoticeKind.IDLE_NODES, choice.said()))
    return choice


def _share_of_host_memory(driver: Driver, shape: LaneShape) -> int | None:
    """Return an equal share of this host's memory as the limit of every CPU rank, if the study file has none and the study has not begun with
    one; None where there is nothing to journal. Raises ValueError where there are more ranks by now than the host can give as much."""
    limit, num_ranks = driver.journal.study.facts.memory_limit_bytes, shape.num_ranks
    if driver.config.memory_limit is not None or shape.use_gpu:
        return None
    if limit is None:
        return preflight.available_memory_bytes() // num_ranks
    if limit * num_ranks > (whole := cgroup.whole_bytes()):
        raise ValueError(
            f"this study began with {bytes_text(limit)} for each rank, and {num_ranks} ranks of it are more than this host has "
            f"({bytes_text(whole)}); go on with as many lanes as it began with, or choose another --dir"
        )
    return None


def _device_peaks(driver: Driver, shape: LaneShape, *, is_local: bool) -> dict[Precision, DevicePeak] | None:
    """Return what a rank's device can compute: each lane would measure something else. None where the study knows it, or nobody tells it."""
    if driver.journal.study.facts.device_peaks is not None:
        return None
    driver.progress.say("reading what the device can compute")
    peaks = device_peaks(shape, precisions(driver.config), is_local=is_local, allow_tf32=driver.config.allow_tf32)
    if peaks is None:
        driver.progress.say("the cluster did not report what its devices can compute: each trial measures its own")
    return peaks


def _journal_machine(driver: Driver, lanes: Lanes, read: Facts) -> None:
    """Journal on what the study is run, and with which versions, once a lane has shown that it runs there: what a start in vain has read of
    the machine may be what was amiss with it. Say where that of the trials so far is another by now."""
    numbers = {library: version(library) for library in ("batchscout", "torch", "ray")}
    study, first = driver.journal.study, lanes.first(driver.journal.raise_if_lost)
    if study.facts.versions is None or not any(one.state.ended or one.history for one in study.trials.values()):
        versions = {"python": platform.python_version(), **numbers}
        read = replace(read, device=first.device, measured_on=first.hardware, versions=versions)
    else:
        for told in measured_elsewhere(study.facts, numbers["torch"], first.device):
            _tell(driver, Notice(NoticeKind.KEPT_TRIALS, told))
    if study.facts.updated(read) != study.facts:
        driver.journal.append(FactsRead(facts=read))


def _measurements(driver: Driver, lanes: Lanes, shape: LaneShape) -> Measurements:
    """Return what earlier studies measured on the device that this one's lanes have."""
    first = lanes.first(driver.journal.raise_if_lost)
    shared = identity(driver.config, driver.journal.study.facts, first, shape.cpus_per_rank)
    file, take_none = cache_directory() / "measurements.jsonl", driver.options.remeasure
    with heard_by(functools.partial(_tell, driver)):
        published = driver.journal.published
        where = str(published.store) if published is not None else str(driver.run_dir)
        began = driver.journal.study.began
        return Measurements(file, shared, where, began=began, remeasure=take_none, lane=first)


def _tell(driver: Driver, notice: Notice) -> None:
    """Journal and show what the driver met, once in a study."""
    if notice not in driver.journal.study.notices.get(None, []):
        driver.journal.append(noticed(notice))
        driver.progress.noticed(None, notice)


def _say_that_the_cluster_is_gone(driver: Driver, remedy: str, loss: str) -> int:
    """Say it, and return the exit code. Ray itself would end this process after a minute, with forty lines and no word of the
    study."""
    if interrupt_has_come():
        return _say_at_once(driver, 130, STOPPED)
    return _say_at_once(driver, 1, f"{loss}: the study's cluster is gone. Nothing is lost: {remedy}")


def _say_at_once(driver: Driver, exit_code: int, why: str) -> int:
    """Say the last words in another thread than the main one, which waits where nothing can be raised; return the exit code."""
    with contextlib.suppress(Exception):  # the main thread may change the study meanwhile
        why = _stopped(exit_code, why, driver.config, driver.run_dir, driver.journal).message
    leave_dead_terminal()
    with contextlib.suppress(OSError):  # whoever read it is gone
        driver.progress.__exit__()
        print(printable(f"\n{why}"), file=sys.stderr, flush=True)
    driver.journal.close()  # its lease, too: on another machine the next driver would wait until that has run out
    return exit_code


def _stopped(exit_code: int, why: str, config: StudyConfig, run_dir: Path, journal: Journal) -> Ending:
    """Write the results so far, if the directory is still there and has room for them, and say where the study
    stands."""
    if journal.published is not None:
        journal.published.store.expect_no_answers()
    trainer = None
    try:
        if not journal.has_vanished():
            trainer = _finish(config, run_dir, journal).trainer
    except StorageLost as error:
        why += f"; {error}"
    states = [trial.state for trial in journal.study.trials.values()]
    ended, paused = sum(state.ended for state in states), states.count(TrialState.PAUSED)
    count = f"{counted(ended, 'trial')} ended, {paused} paused, {len(states) - ended - paused} unfinished"
    return Ending(exit_code, f"{why} ({count})", trainer=trainer)
