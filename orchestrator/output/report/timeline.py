"""Which trial held a lane when, and how each hold ended."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.stages.figures import AUXILIARY_COLOUR, FAILED_COLOUR, Axis, Cell, Figure, time_axis
from orchestrator.study.state import Study
from orchestrator.study.trial import Hold, Trial, TrialState
from orchestrator.units import seconds_text

MOST_HOLDS = 600
"""How many holds the figure shows: more of them are narrower than a pixel."""

_RUNNING, _WAITS, _COMPLETE, _COMPILING, _PRUNED = 0, 5, 2, 3, 4
_COLOURS = {
    TrialState.COMPLETE: _COMPLETE,
    TrialState.PRUNED: _PRUNED,
    TrialState.FAILED: FAILED_COLOUR,
    TrialState.OUT_OF_MEMORY: FAILED_COLOUR,
}
_NAMES = {
    _RUNNING: "runs",
    _COMPILING: "compiling",
    _COMPLETE: "complete",
    _WAITS: "paused or waiting",
    _PRUNED: "pruned",
    FAILED_COLOUR: "failed or out of memory",
    AUXILIARY_COLOUR: "lane or driver lost",
}


def timeline(study: Study) -> Figure | None:
    """Return the figure of all holds; None before the first."""
    holds = [(trial, hold) for trial in study.trials.values() for hold in trial.holds]
    if not holds or study.began is None or study.last is None:
        return None
    began, last = study.began, study.last
    shown = sorted(holds, key=lambda one: _ended(one[1], last) - one[1].began, reverse=True)[:MOST_HOLDS]
    shown.sort(key=lambda one: one[1].began)
    rows = _rows([hold for _, hold in shown], last)
    left_out = f" Of {len(holds):,} stretches the {len(shown)} longest." if len(shown) < len(holds) else ""
    cells = [
        cell for (trial, hold), row in zip(shown, rows, strict=True) for cell in _cells(trial, hold, row, began, last)
    ]
    ticks = tuple(-float(row) for row in range(max(rows) + 1))
    return Figure(
        "timeline",
        time_axis("since the study began", last - began),
        Axis("at once", lambda row: f"{1 - int(row)}", ticks=ticks),
        (),
        "Each bar is a trial on a lane, in the colour of what it came to; trials that ran at once lie in rows of their own. "
        f"Compiling is drawn at the beginning of a trial.{left_out}",
        cells=tuple(cells),
        key={name: colour for colour, name in _NAMES.items() if any(cell.colour == colour for cell in cells)},
        width=1060,
        height=90 + 26 * len(ticks),
    )


def _ended(hold: Hold, last: float) -> float:
    return last if hold.ended is None else hold.ended


def _rows(holds: Sequence[Hold], last: float) -> list[int]:
    """Return the first row that is free when each begins. They are sorted by their beginnings."""
    free_from: list[float] = []
    rows = []
    for hold in holds:
        row = next((i for i, free in enumerate(free_from) if free <= hold.began), len(free_from))
        free_from[row : row + 1] = [_ended(hold, last)]
        rows.append(row)
    return rows


def _cells(trial: Trial, hold: Hold, row: int, began: float, last: float) -> list[Cell]:
    """Return the bar of a hold; in a trial's first one what it compiled is a bar of its own."""
    start, end = hold.began - began, max(_ended(hold, last) - began, hold.began - began + 1e-3)
    colour, came_to = _end_of(trial, hold)
    compiled = min((trial.metric("compile_seconds") or 0.0) if hold is trial.holds[0] else 0.0, end - start)
    told = f"{trial.id}: {came_to} after {seconds_text(end - start)} on its lane, from {seconds_text(start)} on"
    low, high = -row - 0.4, -row + 0.4
    cells = [Cell(start + compiled, end, low, high, told, colour, 0.85)]
    if compiled:
        said = f"{trial.id}: {seconds_text(compiled)} of compiling"
        cells.insert(0, Cell(start, start + compiled, low, high, said, _COMPILING, 0.85))
    return cells


def _end_of(trial: Trial, hold: Hold) -> tuple[int, str]:
    """Return the colour and the words for how a hold ended."""
    if hold.ended is None:
        return _RUNNING, "runs"
    if hold.lost:
        return AUXILIARY_COLOUR, "lost its lane"
    if hold is not trial.holds[-1] or not trial.state.ended:
        promoted = trial.promoted and hold is not trial.holds[-1]
        return _WAITS, "paused, and promoted later," if promoted else "paused"
    return _COLOURS[trial.state], trial.state.replace("_", " ")
