"""A study as `batchscout status` shows it."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.output.answer import RUN_DIR, how_to_resume
from batchscout.orchestrator.output.caveats import lane_deaths_text
from batchscout.orchestrator.output.progress import best_so_far, trial_metrics
from batchscout.orchestrator.output.recommendation import recommend
from batchscout.orchestrator.output.rows import LEAST_ROOM
from batchscout.orchestrator.output.shown import Terminal, print_answer, shown
from batchscout.orchestrator.output.time_split import time_split
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.node_speeds import stragglers
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, Trial, TrialState
from batchscout.orchestrator.terminal import printable
from batchscout.orchestrator.units import counted, seconds_text
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.notices import NoticeKind

# A disk that fails may damage a file of every trial.
MOST_NOTICES = 20
LEAST_ROWS_OF_TRIALS = 4
"""Of a window: what is said before the stages leaves as many."""


StageState = Literal["waiting", "running", "complete", "failed"]


@dataclass(frozen=True)
class StageStatus:
    """A stage, and how far it is."""

    type: str
    """The word under `type` in the study file: `frontier`, `train`, ..."""
    state: StageState
    """failed: the study ended with it."""


@dataclass(frozen=True)
class TrialStatus:
    """A trial, and what has become of it."""

    id: str
    stage: str
    """The type of its stage."""
    state: TrialState
    reason: str
    """Why it is in that state, for people; it begins with the code of its cause. Empty if there is nothing to say."""
    config: TrialConfig
    """What it trains, complete."""
    metrics: Metrics
    """What it measured last, by names with their units: `val_loss`, `tokens_per_second`, `peak_memory_bytes`, ... null: it is no finite
    number."""


@dataclass(frozen=True)
class StudyStatus:
    """What `status --json` prints."""

    name: str
    """The study's name."""
    is_running: bool
    """True if a process runs the study now. Where none does, `running` is the state in which a stage or a trial was left."""
    stages: tuple[StageStatus, ...]
    """In the order in which they run."""
    trials: tuple[TrialStatus, ...]
    """In the order in which they were proposed."""


def json_pieces(config: StudyConfig, study: Study, *, is_driven: bool) -> Iterator[str]:
    """Yield the text that `status --json` prints, a trial a line: StudyStatus as JSON.

    All in one tree, 10,000 trials take 250 MB more. is_driven: True if a process runs the study now.
    """
    stages = [vars(StageStatus(stage.type, stage_state(stage.type, study))) for stage in config.stages]
    head = f'"name": {json.dumps(config.name)},\n"is_running": {json.dumps(is_driven)}'
    yield f'{{{head},\n"stages": {json.dumps(stages)},\n"trials": ['
    before = "\n"
    for trial in study.trials.values():
        yield before + json.dumps(_trial_values(trial))
        before = ",\n"
    yield "\n]}\n"


def stage_state(stage: str, study: Study) -> StageState:
    """Return how far a stage is."""
    conclusion = study.conclusions.get(stage)
    if conclusion:
        return "complete" if conclusion.ok else "failed"
    return "running" if stage in study.started else "waiting"


def state_text(state: StageState | TrialState, *, is_driven: bool) -> str:
    """Return the state for people. A driver that was killed could not tell the journal: what is running there has stopped with it."""
    return "stopped" if state == "running" and not is_driven else str(state)


def _trial_values(trial: Trial) -> dict[str, JsonValue]:
    status = TrialStatus(trial.id, trial.stage, trial.state, trial.explanation, trial.config, trial.metrics)
    config = trial.config.model_dump(mode="json", exclude={"device_peaks"})  # the machine's, not the trial's
    return vars(status) | {"config": config}


def print_status(config: StudyConfig, study: Study, run_dir: str = RUN_DIR, *, is_driven: bool) -> None:
    """Print, for people, the answer if there is one, then every stage with its trials.

    run_dir: as its user types it. is_driven: True if a process runs the study now.
    """
    console = Terminal()
    _print_head(console, config, study, run_dir, is_driven=is_driven)
    for stage in config.stages:
        context = StageContext(stage, config, study)
        console.print()
        _print_stage(console, context, is_driven=is_driven)
        for lines in _trial_lines(context, console.width, is_driven=is_driven):
            console.file.write(lines + "\n")  # without rich, which asks for the terminal's size at each line
    console.print(shown(f"\n{_time_line(study)}"))


def status_in_a_window(config: StudyConfig, study: Study, run_dir: str = RUN_DIR, *, is_driven: bool, rows: int) -> str:
    """Return as much of the same as fits a window of so many rows: of the trials those of the stage that has begun and is not concluded, first
    what runs, then what ended last."""
    console = Terminal()
    with console.capture() as head:
        _print_head(console, config, study, run_dir, is_driven=is_driven)
    stages, trials, place = list[str](), list[tuple[Trial, str]](), 0
    for stage in config.stages:
        context = StageContext(stage, config, study)
        is_open = stage.type in study.started and stage.type not in study.conclusions
        with console.capture() as of_stage:
            if is_open:
                _print_stage(console, context, is_driven=is_driven)
            else:
                count = f", {counted(len(context.trials()), 'trial')}" if context.trials() else ""
                console.print(shown(f"{stage.type}: {stage_state(stage.type, study)}{count}", style="bold"))
        stages += of_stage.get().splitlines()
        if is_open:
            place = len(stages)
            lines = _trial_lines(context, console.width, is_driven=is_driven)
            trials = list(zip(context.trials(), lines, strict=True))
    with console.capture() as time:
        console.print(shown(_time_line(study)))
    room = rows - 1 - len(stages) - len(time.get().splitlines())
    above = head.get().splitlines()
    if len(above) > (most := max(2, room - LEAST_ROWS_OF_TRIALS)):
        above = [*above[: most - 1], "..."]
    stages[place:place] = _fitting(trials, room - sum(_height(line, console.width) for line in above), console.width)
    return "\n".join([*above, *stages, *time.get().splitlines()])


def _fitting(trials: Sequence[tuple[Trial, str]], room: int, width: int) -> list[str]:
    """Return the trials' lines in their order, as many trials as there is room for: first what runs, then what ended last. A line that is
    wider than the window takes several rows of it."""
    runs = [i for i, (trial, _) in enumerate(trials) if trial.state is TrialState.RUNNING]
    waits = [i for i, (trial, _) in enumerate(trials) if trial.state is TrialState.WAITING]
    order = [*runs, *(i for i in reversed(range(len(trials))) if i not in {*runs, *waits}), *waits]
    heights = [sum(_height(line, width) for line in text.splitlines()) for _, text in trials]
    num_kept = len(trials)
    while num_kept and sum(heights[i] for i in order[:num_kept]) + (num_kept < len(trials)) > room:
        num_kept -= 1
    left_out = len(trials) - num_kept
    more = [f"  ... and {left_out} more"] if left_out else []
    return [line for i in sorted(order[:num_kept]) for line in trials[i][1].splitlines()] + more


def _height(line: str, width: int) -> int:
    """Return how many rows of a window a line takes."""
    return max(1, math.ceil(len(line) / width))


def _time_line(study: Study) -> str:
    parts = [f"{part} {seconds_text(seconds)}" for part, seconds in time_split(study).items() if seconds >= 0.5]
    return f"time: {', '.join(parts) or 'none yet'}"


def _print_head(console: Terminal, config: StudyConfig, study: Study, run_dir: str, *, is_driven: bool) -> None:
    """Print what is said before the stages."""
    recommendation = recommend(config, study)
    console.print(shown(config.name, style="bold"))
    if not is_driven and not study.is_over(config.stages):
        console.print(shown("stopped: no process runs this study now. To go on:"))
        # Not wrapped: a broken command could not be pasted.
        console.print(shown(f"  {how_to_resume(config, study, run_dir)}"), soft_wrap=True)
    if recommendation:
        print_answer(console, recommendation.answer, run_dir)
    if is_driven and study.lanes_text:
        console.print(shown(study.lanes_text))
    for line in notice_lines(study):
        console.print(shown(line, style="yellow"))


def notice_lines(study: Study) -> list[str]:
    """Return what trials and drivers met and dealt with, a line for each of the first notices, and before them how often lanes died, and
    the nodes that are slower than the others."""
    slow = [str(straggler) for straggler in stragglers(study.trials.values()).values()]
    lines = [line for line in (lane_deaths_text(study), *slow) if line] + [
        f"{trial_id}: {notice.text}" if trial_id else notice.text
        for trial_id, notices in study.notices.items()
        for notice in notices
        if notice.kind is not NoticeKind.LANE_DIED
    ]
    left_out = len(lines) - MOST_NOTICES
    return lines if left_out <= 0 else [*lines[:MOST_NOTICES], f"and {left_out} more, in journal.jsonl"]


def _print_stage(console: Terminal, context: StageContext[StageKeys], *, is_driven: bool) -> None:
    """Print a stage's state and what it has found."""
    stage, study = context.stage.type, context.study
    state = state_text(stage_state(stage, study), is_driven=is_driven)
    console.print(shown(f"{stage}: {state}", style="bold"))
    conclusion = study.conclusions.get(stage)
    if conclusion:
        for line in (conclusion.reason, *conclusion.notes):
            console.print_indented(line)
    elif context.trials() and (says := stage_of(context.stage).so_far(context)):
        console.print_indented(says)


def _trial_lines(context: StageContext[StageKeys], width: int, *, is_driven: bool) -> list[str]:
    """Return the lines of each of the stage's trials, one under the other."""
    trials = context.trials()
    marked, unit = _marked(context), context.study.facts.rate_unit
    rows = [
        (
            f"{'*' if trial.id == marked else ' '} {trial.id}",
            state_text(trial.state, is_driven=is_driven),
            trial_metrics(trial, trial.metrics, unit),
        )
        for trial in trials
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _line(row, widths, printable(trial.explanation_beside_state), width)
        for row, trial in zip(rows, trials, strict=True)
    ]


def _marked(context: StageContext[StageKeys]) -> str | None:
    """Return the id of the trial that has a star: the one that the stage chose, or the best so far. A stage that has
    concluded without choosing a trial has none: the fastest of many rounds is no finding."""
    if (winner := stage_of(context.stage).winner(context)) is not None:
        return winner
    if context.stage.type in context.study.conclusions:
        return None
    best = best_so_far(context.stage, context.trials())
    return best.id if best else None


def _line(row: Sequence[str], widths: Sequence[int], explanation: str, width: int) -> str:
    """Return the cells, with those of other trials one under the other, and after them the explanation, broken between words where the terminal
    ends.

    Rich's own table takes as long for 10,000 trials as all the rest of `status`.
    """
    texts = [cell.ljust(size) for cell, size in zip(row, widths, strict=True)]
    cells, below = "  ".join(texts), [explanation]
    if len(cells) > width:  # the figures go below, too
        cells, below = "  ".join(texts[:-1]), [row[-1], explanation]
    room = width - len(cells) - 2
    if len(below) > 1 or room < LEAST_ROOM:  # for words beside the cells: they go below them
        wrapped = (
            textwrap.wrap(text, max(LEAST_ROOM, width - 4), break_long_words=False, break_on_hyphens=False)
            for text in below
        )
        return "\n".join([cells.rstrip(), *(f"    {line}" for lines in wrapped for line in lines)])
    first, *others = textwrap.wrap(explanation, room, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join([f"{cells}  {first}".rstrip(), *(" " * (len(cells) + 2) + line for line in others)])
