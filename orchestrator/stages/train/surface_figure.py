"""The figures of the surface: what each batch costs against the choice, and what it would come to at every learning rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.observed import observations, setting_of
from batchscout.orchestrator.stages.estimates.surface import Observation, Setting, Surface
from batchscout.orchestrator.stages.figures import (
    AUXILIARY_COLOUR,
    BASELINE_COLOUR,
    FAILED_COLOUR,
    OTHERS_COLOUR,
    Axis,
    Cell,
    Figure,
    Line,
    Mark,
    Series,
)
from batchscout.orchestrator.stages.train.choice import choice_of, full_runs, surface_of, whose
from batchscout.orchestrator.stages.train.conclude import interval
from batchscout.orchestrator.stages.train.findings import chosen_run
from batchscout.orchestrator.stages.train.lineup import lineup_of
from batchscout.orchestrator.units import loss_text, number_text, probability_text

STEP = 0.25
"""The height of a cell, in factors of 2 of the learning rate."""
MARGIN = 1.0
"""How many factors of 2 the cells reach beyond the rates that were tried."""
STRONGEST, FADED = 0.7, 3.0
"""How strong the colour of the lowest cell is, and how many typical distances above it nearly nothing is left of it."""


def surface_figures(context: StageContext[Train]) -> list[Figure]:
    """Return each batch against the choice, where there are several, and the surface with the runs on it; nothing before a run has
    completed."""
    observed = observations(full_runs(context.study), context.config.target_loss)
    surface = surface_of(context, lineup_of(context)) if observed else None
    if surface is None:
        return []
    to_target = context.config.objective == "target"
    what = "seconds to the target loss" if to_target else "validation loss"
    batches = surface.coordinates.batches
    against, (cells, shades) = _differences(context, surface), _cells(surface, observed, what)
    runs = _runs(context, surface, observed)
    diverged = [one for one in observed if one.loss is None]
    lost = tuple(Mark(one.effective_batch_size, one.learning_rate, "diverged", "cross") for one in diverged)
    roles = {mark.kind for mark in runs.marks}
    has_cut = any("~" in mark.text for mark in runs.marks)
    who = "did not reach the target" if to_target else "was cut"
    cut = f"; with a ~, what a run that {who} would have come to" if has_cut else ""
    looks = ["ringed: recommended"] * ("chosen" in roles) + [f"green: {_whose(context)}"] * ("baseline" in roles)
    return [
        *([against] if sum(len(one.marks) for one in against.series) > 1 else []),
        Figure(
            "surface",
            Axis("effective batch, samples", log=True, ticks=tuple(float(batch) for batch in batches)),
            Axis("learning rate", log=True, precise=number_text),
            (_best_rates(surface), runs, Series("diverged" if lost else "", lost, FAILED_COLOUR, joined=False)),
            f"The {what} at equal cost that the surface through all runs has: the stronger the shade, the lower, as the scale above says. Numbers are what "
            f"the runs came to{cut}{''.join(f'; {one}' for one in looks)}. The dashed line is each batch's best learning rate, with its 90 % interval.",
            cells=cells,
            beside=what,
            shades=shades,
            width=700,
            height=360,
        ),
    ]


def _whose(context: StageContext[Train]) -> str:
    return whose(context.config, context.study, next((trial for trial in context.trials() if trial.protected), None))


MOST_LOST = -1.0
"""Twice the training time. Intervals that reach further down would flatten all that lies near the zero line."""


def _differences(context: StageContext[Train], surface: Surface) -> Figure:
    """Return what the choice saves against every batch at its best rate, and against the user's own setting.

    The differences are paired: what all batches share, such as how far the late gain is known, is in none of them.
    """
    chosen, own = _chosen(context, surface), choice_of(context, surface).own
    what = {"samples": "samples", "target": "time to the target loss"}.get(context.config.objective, "training time")

    def mark(batch: int, loss: NDArray[np.float64], told: str, aside: float = 0.0) -> Mark:
        share = surface.time_share(surface.at(chosen), loss)
        high, middle, low = (1 - one for one in interval(share))
        return Mark(batch, middle, _share_text(middle), low=low, high=high, told=told, aside=aside)

    p_best = surface.p_best
    best = tuple(
        mark(batch, surface.best_loss(batch), f"at its best learning rate; P(best) {probability_text(p_best[batch])}")
        for batch in surface.coordinates.batches
        if batch != chosen.effective_batch_size
    )
    yours = setting_of(own.first) if own else chosen
    p_chosen = probability_text(p_best[chosen.effective_batch_size])
    told = f"learning rate {chosen.learning_rate:.3g}; P(best) of its batch {p_chosen}"
    choice = Mark(chosen.effective_batch_size, 0.0, "recommended", "chosen", told=told)
    its_own = mark(yours.effective_batch_size, surface.at(yours), f"learning rate {yours.learning_rate:.3g}", aside=9)
    marks = (*best, its_own)
    bottom = min(MOST_LOST, *(1.2 * one.y for one in marks))
    is_cut = any(one.low is not None and one.low < bottom for one in marks)
    return Figure(
        "differences",
        Axis("effective batch, samples", log=True, ticks=tuple(float(one) for one in surface.coordinates.batches)),
        Axis(
            f"{what} that the recommended setting saves",
            _tick_text,
            precise=_share_text,
            bottom=bottom if is_cut else None,
        ),
        (
            Series("", (choice,), joined=False),
            Series("at its best rate", best, OTHERS_COLOUR, joined=False),
            *([Series(_whose(context), (its_own,), BASELINE_COLOUR, joined=False)] if yours != chosen else []),
        ),
        f"The share of the {what} to the loss of each that the recommended setting saves, with the 90 % interval, by the surface through all runs. "
        f"Where an interval crosses the zero line, neither is the better one with a probability of 95 %.{' One that reaches the bottom goes on below it.' if is_cut else ''}",
        (Line(0.0, ""),),
        width=540,
        height=300,
    )


def _tick_text(share: float) -> str:
    return f"{100 * share:.3g}%"


def _share_text(share: float) -> str:
    """Return whole percents: intervals are tens of them."""
    return f"{round(100 * share)}%"


def _chosen(context: StageContext[Train], surface: Surface) -> Setting:
    """Return the setting that the study recommends, or would by now."""
    winner = chosen_run(context.study)
    if winner is not None:
        return setting_of(context.study.trials[winner])
    return choice_of(context, surface).setting


def _runs(context: StageContext[Train], surface: Surface, observed: Sequence[Observation]) -> Series:
    """Return the runs that came to something; the chosen one is ringed, and one that is extrapolated tells its own last loss, too."""
    ends = {setting_of(trial): trial.how_it_ended_at for trial in full_runs(context.study) if trial.state.ended}
    chosen, standing = _chosen(context, surface), choice_of(context, surface).own
    own = setting_of(standing.first) if standing else None
    marks = []
    for one in observed:
        setting = Setting(one.effective_batch_size, one.learning_rate)
        if one.loss is not None:
            marks.append(
                Mark(
                    one.effective_batch_size,
                    one.learning_rate,
                    f"~{loss_text(one.loss)}" if one.extra_deviation else f"{loss_text(one.loss)}",
                    "chosen" if setting == chosen else "baseline" if setting == own else "point",
                    told=f"extrapolated: {ends[setting]}" if one.extra_deviation else "",
                )
            )
    return Series("runs", tuple(marks), OTHERS_COLOUR, joined=False)


def _best_rates(surface: Surface) -> Series:
    marks = []
    for batch in surface.coordinates.batches:
        low, middle, high = (surface.coordinates.rate(batch, u) for u in interval(surface.best_u(batch)))
        marks.append(Mark(batch, middle, low=low, high=high))
    return Series("best rate", tuple(marks), AUXILIARY_COLOUR, dashed=True)


def _cells(surface: Surface, observed: Sequence[Observation], what: str) -> tuple[tuple[Cell, ...], dict[str, float]]:
    """Return a column of cells for every batch, whose colours fade with the distance from the lowest of all, and the scale of them."""
    coordinates, edges = surface.coordinates, _edges(surface.coordinates.batches)
    rates = [one.learning_rate for one in observed]
    low, high = math.log2(min(rates)) - MARGIN, math.log2(max(rates)) + MARGIN
    rungs = [float(step) for step in np.arange(math.floor(low / STEP), math.ceil(high / STEP) + 1) * STEP]
    highest = np.median(surface.cliffs, axis=0)  # the u up to which each batch trains as likely as not
    losses = {
        (i, rung): float(surface.loss(batch, coordinates.u(batch, 2**rung)).mean())
        for i, batch in enumerate(coordinates.batches)
        for rung in rungs
        if coordinates.u(batch, 2**rung) <= highest[i]
    }
    lowest = min(losses.values())
    typical = float(np.median([loss - lowest for loss in losses.values()])) or 1.0

    def strength(loss: float) -> float:
        return round(STRONGEST * math.exp(-FADED / 2 * (loss - lowest) / typical), 2)

    cells = tuple(
        Cell(
            edges[i],
            edges[i + 1],
            2 ** (rung - STEP / 2),
            2 ** (rung + STEP / 2),
            f"effective batch {coordinates.batches[i]}, learning rate {number_text(2**rung)}: {what} {loss_text(loss)} by the surface",
            AUXILIARY_COLOUR,
            strength(loss),
        )
        for (i, rung), loss in losses.items()
    )
    steps = (lowest + share * typical for share in (0, 0.25, 0.5, 1, 2))
    return cells, {loss_text(loss): strength(loss) for loss in steps}


def _edges(batches: Sequence[int]) -> list[float]:
    """Return where the columns begin, and where the last one ends: halfway between two batches, in proportion."""
    between = [math.sqrt(one * another) for one, another in itertools.pairwise(batches)]
    first = batches[0] ** 2 / between[0] if between else batches[0] / math.sqrt(2)
    last = batches[-1] ** 2 / between[-1] if between else batches[-1] * math.sqrt(2)
    return [first, *between, last]
