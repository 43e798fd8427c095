"""Which trial held a lane when, and how each hold ended."""

from __future__ import annotations

from collections.abc import Sequence

from batchscout.orchestrator.stages.figures import (
    AUXILIARY_COLOUR,
    COMPILING_COLOUR,
    FAILED_COLOUR,
    OTHERS_COLOUR,
    PRUNED_COLOUR,
    Axis,
    Cell,
    Figure,
    time_axis,
)
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Hold, Trial, TrialState
from batchscout.orchestrator.units import seconds_text

MOST_HOLDS = 600
"""How many holds the figure shows: more of them are narrower than a pixel."""
MOST_OF_A_NODE = 20
"""The characters of a node's name that stand beside its rows; all of them are told at each bar."""

_RUNNING, _WAITS = 9, 8
_COLOURS = {
    TrialState.COMPLETE: OTHERS_COLOUR,
    TrialState.PRUNED: PRUNED_COLOUR,
    TrialState.FAILED: FAILED_COLOUR,
    TrialState.OUT_OF_MEMORY: FAILED_COLOUR,
}
_NAMES = {
    _RUNNING: "not ended",
    COMPILING_COLOUR: "compiling",
    OTHERS_COLOUR: "complete",
    _WAITS: "paused or waiting",
    PRUNED_COLOUR: "pruned",
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
    rows, names = _rows([hold for _, hold in shown], last)
    left_out = f" The {len(shown)} longest of {len(holds):,} stretches are shown." if len(shown) < len(holds) else ""
    cells = [
        cell for (trial, hold), row in zip(shown, rows, strict=True) for cell in _cells(trial, hold, row, began, last)
    ]
    ticks = tuple(-float(row) for row in range(len(names)))
    return Figure(
        "timeline",
        time_axis("since the study began", last - began),
        Axis("lane" if any(hold.lane for _, hold in shown) else "at once", lambda row: names[-int(row)], ticks=ticks),
        (),
        f"Each bar is a trial on a lane, coloured by how it ended; {_what_rows_are(shown)}. "
        f"Compiling is drawn at the beginning of a trial.{left_out}",
        cells=tuple(cells),
        key={name: colour for colour, name in _NAMES.items() if any(cell.colour == colour for cell in cells)},
        width=960,
        height=90 + 26 * len(ticks),
    )


def _ended(hold: Hold, last: float) -> float:
    return last if hold.ended is None else hold.ended


def _what_rows_are(shown: Sequence[tuple[Trial, Hold]]) -> str:
    if not any(hold.lane for _, hold in shown):
        return "trials that ran at once lie in rows of their own"
    nodes = sorted({hold.lane.node for _, hold in shown if hold.lane})
    return f"each row is a lane{'' if len(nodes) > 1 else f' of {nodes[0]}'}"


def _rows(holds: Sequence[Hold], last: float) -> tuple[list[int], list[str]]:
    """Return the row of each hold, and the rows' names. The holds are sorted by their beginnings.

    A row is a lane. Holds of which no lane is known lie below, and where two are known of one lane at once, since the trial of a
    lane that died went on in another, the second lies in a row of its own: each in the first that is free when it begins.
    """
    free_from: dict[HeldLane | None, list[float]] = {}
    places = []
    for hold in holds:
        rows = free_from.setdefault(hold.lane, [])
        row = next((i for i, free in enumerate(rows) if free <= hold.began), len(rows))
        rows[row : row + 1] = [_ended(hold, last)]
        places.append((hold.lane, row))
    in_order = sorted(free_from, key=lambda lane: (lane is None, lane and (lane.number, lane.node)))
    order = [(lane, row) for lane in in_order for row in range(len(free_from[lane]))]
    has_nodes = len({lane.node for lane in free_from if lane}) > 1
    names = [_name(lane, row, has_nodes=has_nodes, has_lanes=in_order[0] is not None) for lane, row in order]
    return [order.index(place) for place in places], names


def _name(lane: HeldLane | None, row: int, *, has_nodes: bool, has_lanes: bool) -> str:
    """Return what stands beside a row; nothing where it is a lane's second one, or one of holds that no lane is known of among others."""
    if lane is None:
        return "" if has_lanes else f"{row + 1}"
    if row > 0:
        return ""
    node = lane.node if len(lane.node) <= MOST_OF_A_NODE else f"{lane.node[: MOST_OF_A_NODE - 3]}..."
    return f"{lane.number + 1}, {node}" if has_nodes else f"{lane.number + 1}"


def _cells(trial: Trial, hold: Hold, row: int, began: float, last: float) -> list[Cell]:
    """Return the bar of a hold; in a trial's first one what it compiled is a bar of its own."""
    start, end = hold.began - began, max(_ended(hold, last) - began, hold.began - began + 1e-3)
    colour, came_to = _end_of(trial, hold)
    compiled = min((trial.metric("compile_seconds") or 0.0) if hold is trial.holds[0] else 0.0, end - start)
    where = f"lane {hold.lane.number + 1} of {hold.lane.node}" if hold.lane else "its lane"
    told = f"{trial.id}: {came_to} after {seconds_text(end - start)} on {where}, from {seconds_text(start)} on"
    low, high = -row - 0.4, -row + 0.4
    cells = [Cell(start + compiled, end, low, high, told, colour, 0.85)]
    if compiled:
        said = f"{trial.id}: {seconds_text(compiled)} of compiling"
        cells.insert(0, Cell(start, start + compiled, low, high, said, COMPILING_COLOUR, 0.85))
    return cells


def _end_of(trial: Trial, hold: Hold) -> tuple[int, str]:
    """Return the colour and the words for how a hold ended."""
    if hold.ended is None:
        return _RUNNING, "not ended"
    if hold.lost:
        return AUXILIARY_COLOUR, "lost its lane"
    if hold is not trial.holds[-1] or not trial.state.ended:
        promoted = trial.promoted and hold is not trial.holds[-1]
        return _WAITS, "paused, and promoted later," if promoted else "paused"
    return _COLOURS[trial.state], trial.state.replace("_", " ")
