"""How full training runs are shown, whatever stage they belong to: their columns and their loss curves."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from batchscout.orchestrator.stages.figures import (
    AUXILIARY_COLOUR,
    BASELINE_COLOUR,
    CHOSEN_COLOUR,
    FAILED_COLOUR,
    OTHERS_COLOUR,
    Axis,
    Figure,
    Mark,
    Series,
    names_of,
    time_axis,
)
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.units import counted, loss_text, number_text

TRAINING_COLUMNS = (
    "samples_seen", "val_loss", "train_loss", "generalisation_gap", "perplexity", "update_ratio", "train_seconds",
    "tokens_per_second", "micro_batches_per_step", "tokens_per_step", "padding_share", "peak_memory_bytes",
)  # fmt: skip


def seeds_bar(trials: Sequence[Trial]) -> str:
    """Return what a bar is in a figure of these runs."""
    assumed = "" if len({trial.config.seed for trial in trials}) > 1 else ", which is assumed: all have one seed"
    return f" A bar is the deviation from seed to seed{assumed}."


MOST_CURVES = 50
"""How many curves one figure shows: each is named at its edge, and has a line of text there."""


def loss_curves(trials: Sequence[Trial], winner: str | None, deviation: float | None = None) -> list[Figure]:
    """Return the validation losses of the trials over the time trained, and over the samples seen.

    deviation: that of a run's last loss from seed to seed; None where it is not known.
    """
    shown = _worth_showing(trials, winner)
    left_out = (
        f" The {len(shown)} of {len(trials):,} runs that ended lowest are shown." if len(shown) < len(trials) else ""
    )
    curves = {trial.id: [loss for _, loss in sorted(trial.curve("samples_seen"))] for trial in shown}
    sane = [curves[trial.id] for trial in shown if trial.cause is not Cause.DIVERGED]
    y_axis, cut = loss_axis([*curves.values()], sane, deviation or 0.0)
    names, figures = names_of(shown), list[Figure]()
    longest = max((seconds for trial in shown for seconds, _ in trial.curve("train_seconds")), default=0.0)
    x_axes = {"train_seconds": time_axis("training time", longest), "samples_seen": Axis("samples seen", zero=True)}
    for key, x_axis in x_axes.items():
        series = tuple(_curve(trial, names[trial.id], key, winner, deviation) for trial in shown)
        bar = seeds_bar(shown) if any(mark.low is not None for one in series for mark in one.marks) else ""
        said = "".join([_roles(series), bar, left_out, cut]).strip()
        figures.append(Figure(f"loss_by_{key}", x_axis, y_axis, series, said, height=320))
    return figures


def _roles(series: Sequence[Series]) -> str:
    """Return what the looks of lines mean, of those that are drawn."""
    looks = {
        "bold: chosen by the stage": any(one.bold and one.marks for one in series),
        "green: the baseline": any(one.colour == BASELINE_COLOUR and one.marks for one in series),
        "dashed: pruned or failed": any(one.dashed and len(one.marks) > 1 for one in series),
    }
    said = "; ".join(look for look, is_drawn in looks.items() if is_drawn)
    return f"{said[0].upper()}{said[1:]}." if said else ""


def loss_axis(
    curves: Sequence[Sequence[float]], sane: Sequence[Sequence[float]] = (), deviation: float = 0.0
) -> tuple[Axis, str]:
    """Return the axis of validation losses, which ends where what diverged would flatten the others, and what is to be said of it: nothing
    where it shows all. sane: the curves that are known not to have diverged; empty where that is not known. deviation: half a bar."""
    top = _shown_top(sorted(itertools.chain(*without_diverged(sane or curves)))) + deviation
    beyond = sum(loss > top for loss in itertools.chain(*curves))
    if not beyond:
        return Axis("validation loss", precise=loss_text), ""
    return Axis("validation loss", top=top, precise=loss_text), f" {above_text(beyond, 'evaluation', top)}"


def above_text(number: int, what: str, top: float) -> str:
    """Return that so many values lie above the end of the axis."""
    return f"{counted(number, what)} above {number_text(top)} {'is' if number == 1 else 'are'} not shown."


def _worth_showing(trials: Sequence[Trial], winner: str | None) -> Sequence[Trial]:
    """Return all trials, or as many as one figure shows: the winner, and those whose last loss is the lowest."""
    if len(trials) <= MOST_CURVES:
        return trials
    best = heapq.nsmallest(MOST_CURVES, trials, key=lambda trial: (trial.id != winner, last_loss(trial)))
    kept = {trial.id for trial in best}
    return [trial for trial in trials if trial.id in kept]


def last_loss(trial: Trial) -> float:
    """Return it as one compares it: without one, a trial comes last."""
    loss = trial.metric("val_loss")
    return math.inf if loss is None else loss


def _curve(trial: Trial, name: str, key: str, winner: str | None, deviation: float | None) -> Series:
    marks = tuple(Mark(x, loss) for x, loss in sorted(trial.curve(key)))
    if marks and trial.state is TrialState.COMPLETE:
        marks = (*marks[:-1], with_deviation(marks[-1], deviation))
    if marks and trial.state.ruled_out:
        marks = (*marks[:-1], replace(marks[-1], told=trial.how_it_ended))
    has_failed = trial.state in (TrialState.FAILED, TrialState.OUT_OF_MEMORY)
    roles = ((trial.id == winner, CHOSEN_COLOUR), (has_failed, FAILED_COLOUR), (trial.protected, BASELINE_COLOUR))
    colour = next((colour for has_role, colour in roles if has_role), OTHERS_COLOUR)
    return Series(name, marks, colour, dashed=trial.state.ruled_out, bold=trial.id == winner)


def best_so_far(study: Study, runs: Sequence[Trial], winner: str | None) -> list[Figure]:
    """Return the losses of whole runs over the lane time that the study had taken when they ended, and the lowest of them by then; nothing for
    fewer than two runs."""
    ended = [trial for trial in study.trials.values() if trial.holds and trial.holds[-1].ended is not None]
    spent, marks, whole = 0.0, list[Mark](), {trial.id for trial in runs}
    names = names_of(runs)
    for trial in sorted(ended, key=lambda trial: trial.holds[-1].ended or 0.0):
        spent += trial.seconds
        loss = trial.metric("val_loss")
        if trial.id in whole and trial.state is TrialState.COMPLETE and loss is not None:
            kind = "chosen" if trial.id == winner else "baseline" if trial.protected else "point"
            marks.append(Mark(spent, loss, "", kind, told=names[trial.id]))
    if len(marks) < 2:
        return []
    lowest = itertools.accumulate(marks, lambda best, mark: Mark(mark.x, min(best.y, mark.y)))
    y_axis, cut = loss_axis([[mark.y] for mark in marks])
    return [
        Figure(
            "best_so_far",
            time_axis("lane time of the study", spent),
            y_axis,
            (
                Series("lowest so far", tuple(lowest), AUXILIARY_COLOUR, steps=True),
                Series("runs", tuple(marks), OTHERS_COLOUR, joined=False),
            ),
            f"The best result so far against what it cost: a point for each whole run, at its end. Ringed: the chosen one.{cut}",
            height=230,
        )
    ]


def with_deviation(mark: Mark, deviation: float | None) -> Mark:
    """Return the loss with a bar of one deviation to either side, not below 0 unless the loss is; as it is where that is not known."""
    if not deviation:
        return mark
    low = mark.y - deviation
    return replace(mark, low=low if mark.y < 0 else max(low, 0.0), high=mark.y + deviation)


def without_diverged(curves: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return the curves but those that end far above all of the one that ends lowest: in one figure these would flatten the others."""
    some = [one for one in curves if one]
    best = min(some, key=lambda one: one[-1], default=())
    if len(best) < 2:
        return some
    far = max(best) + max(3 * (max(best) - min(best)), abs(max(best)) / 2)
    return [one for one in some if one[-1] <= far]


def _shown_top(losses: list[float]) -> float:
    """Return where the loss axis ends: one diverging trial must not flatten the others."""
    if not losses:
        return math.inf
    ninth = losses[math.ceil(0.9 * len(losses)) - 1]
    return max(ninth, min(losses[-1], losses[0] + 1.5 * (ninth - losses[0])))
