"""`batchscout run`: a study from its file to its recommendation, stage by stage. Running again is resuming."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator import preflight
from orchestrator.cluster import ON_THE_HEAD
from orchestrator.config import StudyConfig, read_yaml, uses_compile
from orchestrator.director import Director
from orchestrator.journal import Journal
from orchestrator.measurements import Measurements, identity
from orchestrator.progress import Progress
from orchestrator.recommend import recommend, write_recommendation
from orchestrator.stages.setting import Setting
from orchestrator.study import Halted, Study, Trial, TrialState
from trainers.files import PARTIAL, StorageLost, naming_the_disk, written_whole

if TYPE_CHECKING:
    from orchestrator.lanes import Lanes

# A trial in Tune only relays: it takes no CPU. Lanes take the CPUs and GPUs.
RELAY_RESOURCES = {"CPU": 0, **ON_THE_HEAD}
MAX_DIFFERENCES = 8
# How long Ctrl-C waits for the running trials to save a checkpoint.
SECONDS_TO_SAVE = 30
SECONDS_FOR_A_NODE = 60


@dataclass(frozen=True)
class Ending:
    """How `batchscout run` ends."""

    exit_code: int
    message: str


@dataclass(frozen=True)
class Session:
    """One process's run of a study: what all its stages share."""

    config: StudyConfig
    run_dir: Path
    journal: Journal
    progress: Progress
    token: str
    """Of this run: who writes what."""
    fresh: bool
    """Measure the frontier though another study has done so on this machine."""


def run_study(
    config: StudyConfig, run_dir: Path, address: str | None = None, *, fresh: bool = False, quiet: bool = False
) -> Ending:
    """Run what the journal does not hold yet, and write report and recommendation. Raises ValueError for bad input."""
    with open_run_directory(config, run_dir) as journal, _sigterm_is_ctrl_c():
        if journal.study.is_over(stage.type for stage in config.stages):
            return finish(config, run_dir, journal.study)
        try:
            facts = preflight.check(config, compiles=address is None and uses_compile(config))
            if not journal.study.trials:  # until then the study file may have been mended
                journal.append("facts", facts=facts | preflight.predicted_memory(config, facts))
            token = uuid.uuid4().hex[:8]
            journal.append("run", token=token)
            with Progress(config, journal.study, quiet) as progress:
                _run_stages(Session(config, run_dir, journal, progress, token, fresh), address)
        except Halted as error:
            why = f"{error}. Nothing is lost: mend that, and run the same command again"
            return _stopped(1, why, config, run_dir, journal.study)
        except KeyboardInterrupt:
            why = "stopped; nothing that was measured or saved is lost. To go on, run the same command again"
            return _stopped(130, why, config, run_dir, journal.study)
        return finish(config, run_dir, journal.study)


def _stopped(exit_code: int, why: str, config: StudyConfig, run_dir: Path, study: Study) -> Ending:
    """With the results so far written, if there is room for them."""
    try:
        finish(config, run_dir, study)
    except StorageLost as error:
        why += f"; {error}"
    return Ending(exit_code, f"{why} ({_count(study)})")


def open_run_directory(config: StudyConfig, run_dir: Path) -> Journal:
    """The journal of this very study, locked, and study.yaml beside it. Raises ValueError, with the difference, where the
    directory holds another study, something else, or a running driver."""
    path = run_dir / "study.yaml"
    if run_dir.is_file():
        raise ValueError(f"{run_dir} is a file; choose another --dir")
    if run_dir.exists() and not path.exists() and not all(map(_is_ours, run_dir.iterdir())):
        raise ValueError(f"{run_dir} is not empty and holds no study.yaml; choose another --dir, or empty it")
    run_dir.mkdir(parents=True, exist_ok=True)
    journal = Journal(run_dir / "journal.jsonl", config.name)  # locked: nobody else reads or writes the file now
    try:
        _write_study(config, path, has_begun=bool(journal.study.trials))
    except BaseException:
        journal.close()
        raise
    return journal


def _is_ours(entry: Path) -> bool:
    """What a driver that died before it wrote study.yaml has left."""
    return entry.suffix == PARTIAL or entry.name == "journal.jsonl"


def _write_study(config: StudyConfig, path: Path, *, has_begun: bool) -> None:
    """Until the first trial is proposed the study file may still be mended."""
    before, now = read_yaml(path) if path.exists() else None, config.model_dump(mode="json")
    if before == now:
        return
    if before is not None and has_begun:
        raise ValueError(
            f"{path.parent} holds another study:\n{_difference(before, now)}\n"
            "choose another --dir, or take the change back to go on with that study"
        )
    with written_whole(path) as file:
        file.write(yaml.safe_dump(now, sort_keys=False).encode())


def _difference(before: Any, now: Any) -> str:
    there, here = dict(_leaves(before)), dict(_leaves(now))
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    lines = [f"  {key}: {there.get(key, 'absent')} there, {here.get(key, 'absent')} now" for key in keys]
    return "\n".join(
        lines[:MAX_DIFFERENCES] + [f"  and {len(lines) - MAX_DIFFERENCES} more"] * (len(lines) > MAX_DIFFERENCES)
    )


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if not isinstance(tree, (dict, list)):
        yield prefix, tree
    for key, value in items:
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def _run_stages(session: Session, address: str | None) -> None:
    """Start Ray and the lanes once, and run every stage that is not concluded."""
    from orchestrator.lanes import open_lanes
    from orchestrator.tracking import open_tracker

    config, run_dir, journal = session.config, session.run_dir, session.journal
    tracker = open_tracker(config.tracking, config.name, run_dir)
    started = time.monotonic()
    session.progress.say("starting Ray and the lanes")
    # Once more inside: ray.init takes SIGTERM for itself.
    with ray_cluster(config, address, run_dir), _sigterm_is_ctrl_c(), contextlib.closing(tracker):
        wait_for_a_node(session.progress.say)
        shape = lane_shape(config)
        if config.memory_limit is None and not shape.use_gpu and "memory_limit_bytes" not in journal.study.facts:
            share = preflight.available_memory_bytes() // (shape.num_lanes * shape.world_size)
            journal.append("facts", facts={"memory_limit_bytes": share})
        with open_lanes(shape, run_dir / ".ray", session.progress.say, config.kill.max_silent_seconds) as lanes:
            journal.append("ready", token=session.token, seconds=time.monotonic() - started)
            for stage in config.stages:
                if stage.type in journal.study.conclusions:
                    continue
                known = _measurements(session, lanes) if stage.type == "frontier" else None
                with _interrupts_between_events() as is_stopping:
                    setting = Setting(config, str(run_dir))
                    director = Director(stage, setting, journal, tracker, shape.num_lanes, is_stopping, known)
                    _run_stage(director, session, lanes)
                _conclude(director, session)  # not where an interrupt that Tune swallowed has left trials undone
                if not journal.study.conclusions[stage.type].ok:
                    break
    shutil.rmtree(run_dir / ".ray", ignore_errors=True)  # Tune's own records: the journal has all that counts


def _measurements(session: Session, lanes: Lanes) -> Measurements:
    """What earlier studies measured on the device that this one's lanes have."""
    import ray

    from trainers.data import cache_directory

    device: Any = ray.get(lanes.switchboard.device.remote())
    shared = identity(session.config, session.journal.study.facts, device)
    return Measurements(
        cache_directory() / "measurements.jsonl", shared, str(session.run_dir), fresh=session.fresh or not device
    )


def _run_stage(director: Director, session: Session, lanes: Lanes) -> None:
    """From wherever the journal has it until every trial has ended."""
    session.progress.watch(director)
    try:
        if not director.finished():
            with naming_the_disk(session.run_dir):  # Tune writes there, too
                _tune(director, lanes.name, session.run_dir, session.token)
    except StorageLost as error:
        raise Halted(str(error)) from error
    except KeyboardInterrupt:
        session.progress.say(f"stopping: the running trials save a checkpoint (at most {SECONDS_TO_SAVE} s)")
        if not _let_trials_save(lanes.switchboard):
            session.progress.say("they did not save in time: they will go on from their last checkpoint")
        raise


def _conclude(director: Director, session: Session) -> None:
    study, stage = session.journal.study, director.stage.type
    director.conclude()
    discard_what_nobody_needs(session.run_dir, study.of_stage(stage))
    session.progress.concluded(study.conclusions[stage])


def _tune(director: Director, switchboard: str, run_dir: Path, token: str) -> None:
    """One Tuner for one stage: the Director decides, Tune and the lanes act."""
    from ray import tune

    from orchestrator.scheduler import Silence, StageScheduler, StageSearch
    from orchestrator.trainable import LaneTrainable

    # What it logs as an error, with Ray's whole stack, the journal says in a line that names the file of the stack.
    logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)
    scheduler = StageScheduler(director)
    tuner = tune.Tuner(
        tune.with_resources(LaneTrainable, RELAY_RESOURCES),
        tune_config=tune.TuneConfig(
            search_alg=StageSearch(director, scheduler, switchboard, token),
            scheduler=scheduler,
            num_samples=-1,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=f"{director.stage.type}-{token}",
            storage_path=str(run_dir / ".ray"),
            verbose=0,
            callbacks=[Silence()],
        ),
    )
    # By itself Tune starts the relays of a search algorithm one after the other.
    with _environment({"TUNE_MAX_PENDING_TRIALS_PG": str(director.num_lanes)}):
        tuner.fit()


def discard_what_nobody_needs(run_dir: Path, trials: list[Trial]) -> None:
    """Checkpoints and weights of a concluded stage's trials; those of full runs that completed are kept."""
    for trial in trials:
        directory = run_dir / "trials" / trial.id
        for leftover in [directory / "weights.pt", *directory.rglob(f".*{PARTIAL}")]:
            leftover.unlink(missing_ok=True)
        if (
            not (trial.state is TrialState.COMPLETE and trial.config.evaluations)
            and (directory / "checkpoints").exists()
        ):
            shutil.rmtree(directory / "checkpoints")


def _let_trials_save(switchboard: Any) -> bool:
    """Whether all of them did in time."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.get(switchboard.dismiss_all.remote(), timeout=SECONDS_TO_SAVE)
        ray.get(switchboard.until_idle.remote(), timeout=SECONDS_TO_SAVE)
    except RayError:  # too slow, or the cluster is gone with whoever was to save
        return False
    return True


def finish(config: StudyConfig, run_dir: Path, study: Study) -> Ending:
    """Write report and recommendation from the journal, and say how the study stands."""
    recommendation = write_results(config, run_dir, study)
    failed = next((found for found in study.conclusions.values() if not found.ok), None)
    if failed is not None:
        again = f"\n{run_dir} keeps this as its result: once that is mended, run the study with another --dir"
        return Ending(2 if failed.values.get("bad_input") else 1, f"{failed.stage}: {failed.reason}{again}")
    done = "\n".join(f"{found.stage}: {found.reason}" for found in study.conclusions.values())
    result = recommendation["verdict"] if recommendation else done or "the study has no result yet"
    broken = [trial for trial in study.trials.values() if trial.state is TrialState.FAILED]
    if broken:
        where = f"{run_dir}/trials/{broken[0].id}"
        what = f"{len(broken)} trial(s) failed; {broken[0].id}: {broken[0].reason} (see {where})"
        return Ending(1, f"{result}\n{what}")
    wants_one = any(stage.type in ("train", "learning_rate", "grid") for stage in config.stages)
    return Ending(1 if wants_one and recommendation is None else 0, result)


def write_results(config: StudyConfig, run_dir: Path, study: Study) -> dict[str, Any] | None:
    """recommendation.json and report.html, each whole; returns the recommendation."""
    from orchestrator.report import write_report

    recommendation = recommend(config, study)
    write_recommendation(run_dir / "recommendation.json", recommendation)
    write_report(run_dir / "report.html", config, study, recommendation)
    return recommendation


@contextlib.contextmanager
def ray_cluster(config: StudyConfig, address: str | None, run_dir: Path) -> Iterator[None]:
    """A connection to Ray: the caller's where there is one, else ours, ended on leaving."""
    import ray

    if ray.is_initialized():
        yield
        return
    start_ray(config, address, run_dir)
    try:
        yield
    finally:
        ray.shutdown()


def start_ray(config: StudyConfig, address: str | None, run_dir: Path, **options: Any) -> None:
    """ray.init as a study needs it: quiet, no dashboard of its own, and the environment that its workers need."""
    # Read when ray is imported: set before.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "1000000")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new one prints a banner at every verbosity
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # the ranks look for themselves
    # Ray's default of 15 would let anything else on the host slow down what is being timed.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    from orchestrator.cluster import absolute_paths, protect_local_cluster, refuse_silent_address, runtime_env

    environment = runtime_env(address, run_dir, absolute_paths(config.data.kwargs))
    options = {"log_to_driver": False, "logging_level": logging.ERROR, **options}
    if address is not None:
        refuse_silent_address(address)
        try:
            ray.init(address, runtime_env=environment | {"env_vars": worker_environment()}, **options)
        except ConnectionError as error:
            raise ValueError(
                f"no Ray cluster answers at --address {address}: {str(error).splitlines()[0]}; run on a node of the cluster "
                "with --address auto, check the address, or leave --address out to use this machine alone"
            ) from error
        return
    protect_local_cluster()
    # Inherited, not a runtime_env: Ray's idle processes can then become the study's, instead of being started anew.
    with _environment(worker_environment()):
        ray.init("local", runtime_env=environment, include_dashboard=False, **options)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """The environment that processes started meanwhile inherit."""
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def worker_environment() -> dict[str, str]:
    """What every process of a study runs under."""
    from trainers.memory import MALLOC_ENVIRONMENT

    return {
        **MALLOC_ENVIRONMENT,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiler processes beside a memory limit
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    }


def wait_for_a_node(say: Callable[[str], None], seconds: float = SECONDS_FOR_A_NODE) -> None:
    """Until the cluster has a CPU: one whose only worker is just being replaced, or started, has none for a while."""
    import ray

    deadline = time.monotonic() + seconds
    if not ray.cluster_resources().get("CPU"):
        say(f"the cluster has no CPUs: waiting for a node (at most {seconds:g} s)")
    while not ray.cluster_resources().get("CPU") and time.monotonic() < deadline:
        time.sleep(0.5)


def lane_shape(config: StudyConfig) -> Any:
    """How many lanes of what size the cluster holds. Raises ValueError where it does not hold one."""
    import ray

    from orchestrator.lanes import LaneShape

    resources = ray.cluster_resources()
    num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    world_size, placement = config.world_size, config.placement
    lanes = placement.lanes or (max(1, num_gpus // world_size) if num_gpus else 1)
    ranks = lanes * world_size
    cpus_of_nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cpus_per_rank = placement.cpus_per_rank or (1 if num_gpus else largest_share(cpus_of_nodes, ranks))
    for what, need, have in (("GPUs", ranks if num_gpus else 0, num_gpus), ("CPUs", ranks * cpus_per_rank, num_cpus)):
        if need > have:
            raise ValueError(
                f"{lanes} lane(s) of world_size {world_size} need {need} {what}, and the cluster has {have}; "
                "lower world_size or placement.lanes, or add nodes"
            )
    return LaneShape(lanes, world_size, cpus_per_rank, use_gpu=num_gpus > 0)


def largest_share(cpus_of_nodes: list[int], num_ranks: int) -> int:
    """The most CPUs that each of so many ranks can have, none of them on two nodes; 1 where there are too few."""
    shares = range(max(cpus_of_nodes, default=1), 0, -1)
    return next((share for share in shares if sum(cpus // share for cpus in cpus_of_nodes) >= num_ranks), 1)


@contextlib.contextmanager
def _interrupts_between_events() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM raise a flag that the Director looks at; the second one is raised at once.

    Raised wherever the main thread happens to be, a KeyboardInterrupt was lost in Ray's callbacks now and then.
    """
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _sigterm_is_ctrl_c() -> Iterator[None]:
    """A scheduler's SIGTERM stops a study as cleanly as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _count(study: Study) -> str:
    ended = sum(trial.state.ended for trial in study.trials.values())
    paused = sum(trial.state is TrialState.PAUSED for trial in study.trials.values())
    return f"{ended} trials ended, {paused} paused, {len(study.trials) - ended - paused} to go on with"
