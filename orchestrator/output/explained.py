"""One trial of a study as `batchscout explain` tells it: why it ran, what was decided with it, its result and its cost."""

from __future__ import annotations

import difflib
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import JsonValue

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.output.progress import trial_metrics
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.output.rows import labelled_lines
from batchscout.orchestrator.output.shown import Terminal, shown
from batchscout.orchestrator.output.time_split import held_seconds
from batchscout.orchestrator.output.trial_steps import Step, steps_of
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.events import Interrupted, RunBegan, Started
from batchscout.orchestrator.study.history import Change, history_of
from batchscout.orchestrator.study.run_directory import trial_directory
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.orchestrator.study.trial import PLANNED_RATE, Metrics, Trial, TrialState
from batchscout.orchestrator.units import bytes_text, counted, number_text, seconds_text
from batchscout.trainers.files import own_file, quoted

MOST_BESIDE = 4
_NO_LOG = "none: a rank writes one where it fails"
_FILES = {
    "error-*": "a rank's traceback",
    "crash-*": "the stack of a rank that crashed",
    "try*-*": "of an earlier try",
    "steps.jsonl": "loss, gradient norm and learning rate of every step",
    "noise.jsonl": "the gradient noise along the way",
}


@dataclass(frozen=True)
class RungReached:
    """A rung that the trial has reached, and how it stood there."""

    samples: int
    value: float | None
    """What was compared there, the less the better; None where it is no finite number."""
    others: dict[str, float | None]
    """The same of the other trials of the stage that have reached the rung of this level by now, the best first."""


@dataclass(frozen=True)
class Cost:
    """What the trial took."""

    lane_seconds: float
    """How long it has held a lane, by the wall clock, in all its tries."""
    device_seconds: float
    """The same times its ranks."""
    share_of_study: float
    """The share in the lane seconds of all trials."""
    samples: int
    """The training samples of its last try."""
    tries: int
    """0 if it never started."""
    interruptions: int
    """How often it lost its lane through no fault of its own."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """All that a run directory tells of one trial. `print` shows it as `batchscout explain` does."""

    trial: str
    stage: str
    question: str
    """What the stage was to find out."""
    role: str
    """Why the stage wanted this trial, in its own words; empty if the trial has no role of its own."""
    notes: tuple[str, ...]
    """What sets it apart from others of its stage."""
    what: str
    """What it trained."""
    state: TrialState
    reason: str
    """Why it is in that state; empty if there is nothing to say."""
    history: tuple[Step, ...]
    rungs: tuple[RungReached, ...]
    metrics: Metrics
    result: str
    """The metrics that people look at first."""
    outcome: tuple[str, ...]
    """What the study made of it."""
    cost: Cost
    files: dict[str, str]
    """What it has left, by path, with what that is."""

    def to_json(self) -> dict[str, JsonValue]:
        return asdict(self)

    def __str__(self) -> str:
        parts = _sections(self, shutil.get_terminal_size().columns)
        return "\n\n".join([f"{self.trial}: {self.state}", *("\n".join([title, *lines]) for title, lines in parts)])

    def __repr__(self) -> str:
        return f"<explanation of {self.trial}: {self.state}>"


def explain_trial(
    run_dir: Path, config: StudyConfig, study: Study, recommendation: Recommendation | None, name: str
) -> Explanation:
    """Return what is known of a trial. Raises ValueError, with the nearest names, where there is none of this name."""
    known = study.withdrawn | study.trials
    if name not in known:
        raise ValueError(no_such_trial(run_dir, name, list(known)))
    trial, changes = known[name], history_of(run_dir / "journal.jsonl", config.name, name)
    keys = next((one for one in config.stages if one.type == trial.stage), None)
    return Explanation(
        trial=name,
        stage=trial.stage,
        question=(type(keys).__doc__ or "").split("\n")[0] if keys else "",
        role=trial.role,
        notes=tuple(_notes(study, trial)),
        what=_what(trial),
        state=trial.state,
        reason=trial.explanation,
        history=tuple(steps_of(changes, study)),
        rungs=tuple(_rungs(trial, study)),
        metrics=trial.metrics,
        result=_result(trial, study),
        outcome=tuple(_outcome(keys and StageContext(keys, config, study), study, recommendation, trial)),
        cost=_cost(trial, study, changes),
        files=_files(run_dir, name),
    )


def no_such_trial(run_dir: Path, name: str, names: list[str]) -> str:
    """Return what to say of a name that no trial has, with the nearest ones."""
    if not names:
        return f"{quoted(run_dir)} has no trials yet; look again once batchscout status shows some"
    near = difflib.get_close_matches(name, names, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"{quoted(run_dir)} has no trial '{name}'; {meant}all {len(names)} names: batchscout status {quoted(run_dir)}"
    )


def _notes(study: Study, trial: Trial) -> Iterator[str]:
    proposal = trial.proposal
    memory, rate = (proposal.expected.get(name) for name in ("predicted_memory_bytes", PLANNED_RATE))
    if memory is not None:
        yield f"it was predicted to take {bytes_text(memory)}"
    if rate is not None:
        yield f"its number of samples was set for {rate:,.3g} samples/s"
    seeds = [one for one in study.seeds_of(trial) if one.id != trial.id]
    if proposal.protected:
        yield "it is never cut for being slower or worse than others"
    if proposal.control:
        yield "it is a control: it calibrates the comparison of the others, and is not compared itself"
    if proposal.round is not None:
        yield f"it is a timing of round {proposal.round}, in turns with the others of that round"
    if proposal.fresh_process:
        yield "it ran in processes that had run nothing before"
    if seeds:
        yield f"it is judged together with the other seeds of {trial.candidate}: {', '.join(one.id for one in seeds)}"
    if trial.id in study.withdrawn:
        yield "it is withdrawn: an earlier stage is open again; its own has not asked for it yet"


def _what(trial: Trial) -> str:
    """Return the batch, mode, rate and length of the run in a sentence."""
    config = trial.config
    accumulation = config.gradient_accumulation_steps
    ranks = f" x {counted(config.world_size, 'rank')}" if config.world_size > 1 else ""
    batch = f"micro-batch {config.micro_batch_size} x {counted(accumulation, 'accumulation step')}{ranks}"
    mode = f"activation checkpointing {mode_of(config).in_words()}, {config.precision}"
    run = f"learning rate {config.learning_rate:.3g}, seed {config.seed}, up to {config.sample_budget:,} samples"
    return f"{batch} = effective batch {config.effective_batch_size}; {mode}; {run}"


def _rungs(trial: Trial, study: Study) -> Iterator[RungReached]:
    """Yield what is known at each rung. Trials of other budgets have rungs of other sample numbers, at the same shares of a run: they
    are alike by their level."""
    for level, samples in enumerate(sorted(trial.rungs)):
        others = {
            one.id: one.rungs[sorted(one.rungs)[level]]
            for one in study.of_stage(trial.stage)
            if one.id != trial.id and len(one.rungs) > level
        }
        yield RungReached(samples, trial.rungs[samples], dict(sorted(others.items(), key=lambda one: _rank(one[1]))))


def _rank(value: float | None) -> float:
    return math.inf if value is None else value


def _result(trial: Trial, study: Study) -> str:
    line = trial_metrics(trial, trial.metrics, study.facts.rate_unit) if trial.state is not TrialState.WAITING else ""
    noise, low, high = (trial.metric(f"noise_scale{end}") for end in ("", "_low", "_high"))
    interval = f" ({number_text(low)} to {number_text(high)})" if low is not None and high is not None else ""
    scale = f"noise scale {number_text(noise)} samples{interval}" if noise is not None else ""
    return ", ".join(filter(None, [line, scale])) or "none"


def _outcome(
    stage: StageContext[StageKeys] | None, study: Study, recommendation: Recommendation | None, trial: Trial
) -> Iterator[str]:
    """Say whether the stage or the study chose the trial, and what its stage has concluded."""
    if recommendation and recommendation.evidence.trial == trial.id:
        is_longer = recommendation.sample_budget > trial.config.sample_budget
        yield "the study's run that is most like the real run" if is_longer else "the study recommends this run"
    if stage is not None and stage_of(stage.stage).winner(stage) == trial.id:
        yield f"the stage {trial.stage} chose it"
    if (conclusion := study.conclusions.get(trial.stage)) is not None:
        yield f"the stage {trial.stage} concluded: {conclusion.reason}"


def _cost(trial: Trial, study: Study, changes: Iterable[Change]) -> Cost:
    events = [change.event for change in changes]
    starts = any(isinstance(event, Started) for event in events)
    held = held_seconds(study, trial)
    whole = study.lane_seconds + sum(held_seconds(study, one) - one.seconds for one in study.trials.values())
    return Cost(
        lane_seconds=round(held, 3),
        device_seconds=round(held * trial.config.world_size, 3),
        share_of_study=round(held / whole, 4) if whole else 0.0,
        samples=int(trial.metric("samples_seen") or 0) if starts else 0,
        tries=len(trial.earlier_tries) + starts,
        interruptions=sum(isinstance(event, Interrupted | RunBegan) for event in events),
    )


def _files(run_dir: Path, trial_id: str) -> dict[str, str]:
    directory = trial_directory(run_dir, trial_id)
    with own_file(directory, "read"):
        found = {str(path): text for pattern, text in _FILES.items() for path in sorted(directory.glob(pattern))}
        checkpoints = sorted((directory / "checkpoints").glob("*.pt"))
    size = sum(path.stat().st_size for path in checkpoints)
    kept = {str(directory / "checkpoints"): f"{counted(len(checkpoints), 'checkpoint')}, {bytes_text(size)}"}
    return found | (kept if checkpoints else {})


def kept_at(told: Explanation, copy: Path, store: ObjectStore) -> Explanation:
    """Return what a copy of a run directory tells, with the paths of its files in the store."""
    files = {store.at(str(Path(path).relative_to(copy.absolute()))): text for path, text in told.files.items()}
    return replace(told, files=files)


def print_explanation(told: Explanation, state: str) -> None:
    """Print it for people. state: that of the trial in words, as `status` shows it."""
    console = Terminal()
    console.print(shown(f"{told.trial}: {state}", style="bold"))
    for title, lines in _sections(told, console.width):
        console.print(shown(f"\n{title}", style="bold"))
        console.print_lines(lines)


def _sections(told: Explanation, width: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each title with the lines below it, where there are any."""
    stage = f"{told.stage}: {told.question}" if told.question else told.stage
    role = [("role", told.role)] if told.role else []
    sections = {
        "why it ran": [("stage", stage), *role, *(("note", note) for note in told.notes), ("trains", told.what)],
        "what happened": [(f"after {_seconds(step.seconds)}", step.text) for step in told.history],
        "its rungs": [(f"{rung.samples:,} samples", _standing(rung)) for rung in told.rungs],
        "what came of it": [("result", told.result), *(("outcome", text) for text in told.outcome)],
        "what it cost": _cost_rows(told.cost),
        "what it left": [(quoted(path), text) for path, text in told.files.items()] or [("log", _NO_LOG)],
    }
    for title, rows in sections.items():
        if rows:
            yield title, list(labelled_lines(rows, width))


def _standing(rung: RungReached) -> str:
    """Return how the trial stands at a rung, among all that have reached it by now: what was decided there was among fewer."""
    first = [f"{name} {_value(value)}" for name, value in rung.others.items()][:MOST_BESIDE]
    left_out = len(rung.others) - len(first)
    beside = ", ".join(first) + (f" and {left_out} more" if left_out else "")
    if not beside:
        return f"{_value(rung.value)}; no other has reached it yet"
    place = 1 + sum(_rank(other) < _rank(rung.value) for other in rung.others.values())
    return f"{_value(rung.value)}, by now place {place} of {len(rung.others) + 1}; the others there: {beside}"


def _value(value: float | None) -> str:
    return "no finite number" if value is None else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    return seconds_text(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def _cost_rows(cost: Cost) -> list[tuple[str, str]]:
    if not cost.tries:
        return [("time", "none: it has not run in this study")]
    devices = f", {_seconds(cost.device_seconds)} of devices" if cost.device_seconds > cost.lane_seconds else ""
    interrupted = f", interrupted {counted(cost.interruptions, 'time')}" if cost.interruptions else ""
    return [
        ("time", f"{_seconds(cost.lane_seconds)} in a lane{devices}: {cost.share_of_study:.1%} of all trials' time"),
        ("samples", f"{cost.samples:,}"),
        ("tries", f"{cost.tries}{interrupted}"),
    ]
