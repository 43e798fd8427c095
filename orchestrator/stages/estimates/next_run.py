"""Which run is worth making next: the one after which the choice is expected to waste least (the knowledge gradient; Frazier et al.
2009, doi 10.1287/ijoc.1080.0314). Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from batchscout.orchestrator.stages.estimates.surface import FAR, SAFE, Array, Setting, Surface

REACH = 1.0
"""How many factors of 2 beyond the rates that trained the next one may lie."""
APART = 0.3
"""A rate within so many factors of 2 of one that was tried at the same batch would say little new."""
OPTIONS_STEP = 0.25
"""Factors of 2 between the rates that could be next."""


@dataclass(frozen=True)
class NextRun:
    """A run, and what it is worth."""

    setting: Setting
    worth: float
    """By how much less the choice is expected to waste once the run has ended, as a share of the training time."""


def next_run(
    surface: Surface,
    tried: Sequence[Setting],
    unheard: Sequence[Setting] = (),
    diverged: Sequence[Setting] = (),
    given_up: Collection[int] = (),
    *,
    num_seeds: int = 1,
    is_last: bool = False,
) -> NextRun | None:
    """Return the run that is worth most; None where none would say anything new.

    tried: the runs that were asked for. unheard: those of them that have yet to end; what they will tell anyway does not
    count for another. diverged: those that diverged; no rate beyond them is tried. given_up: the batches that are not to be run any more.
    num_seeds: of each run, which is heard as their mean. is_last: True if no later run can use what this one tells. It is then worth what it adds to the runs that the choice is among, as only what
    was run is recommended; else any setting may still be run.
    """
    batches = [batch for batch in surface.coordinates.batches if batch not in given_up]
    options = [one for batch in batches for one in _options(surface, batch, tried, diverged)]
    if not options:
        return None
    trained = [one for one in tried if one not in diverged]
    wasted = np.stack([surface.wasted(one) for one in (*trained, *options)], axis=1)
    mean, apart = wasted.mean(axis=0), wasted - wasted.mean(axis=0)
    heard = [_heard(surface, one, number, num_seeds) for number, one in enumerate(unheard)]
    ran = len(trained)

    def least(also: int | None, results: Sequence[Array]) -> float:
        """also: an option that is run, too."""
        if not is_last or not ran:
            return _least(mean, apart, results)
        of = [*range(ran), *([] if also is None else [ran + also])]
        return _least(mean[of], apart[:, of], results)

    before = least(None, heard)
    worths = [
        surface.p_trains(one) * (before - least(number, [*heard, _heard(surface, one, -1, num_seeds)]))
        for number, one in enumerate(options)
    ]
    best = int(np.argmax(worths))
    return NextRun(options[best], max(0.0, float(worths[best])))


EACH = 8
"""Of so many draws one is looked at for what would be chosen; what a result says is learned from all."""


def _least(mean: Array, apart: Array, heard: Sequence[Array]) -> float:
    """Return what the best choice is expected to waste once these results are heard.

    mean: [choice]; apart: [draw, choice], from the mean. What a result says of a choice is taken to be linear in the result.
    """
    if not heard:
        return float(mean.min())
    basis = np.linalg.qr(np.stack([result - result.mean() for result in heard], axis=1))[0]
    return float((mean + basis[::EACH] @ (basis.T @ apart)).min(axis=1).mean())


def _heard(surface: Surface, setting: Setting, number: int, num_seeds: int) -> Array:
    """Return what a run may be heard to end at: [draw]. number: tells runs of the same setting apart."""
    batch = setting.effective_batch_size
    loss = surface.loss(batch, surface.coordinates.u_of(setting))
    excess = float((surface.at(setting) - surface.best_loss(batch)).mean())
    noise = math.hypot(surface.noise_at(batch) / math.sqrt(num_seeds), FAR * excess)
    return loss + noise * np.random.default_rng(number + 1).standard_normal(loss.size)


def _options(surface: Surface, batch: int, tried: Sequence[Setting], diverged: Sequence[Setting]) -> list[Setting]:
    """Return the rates at which the batch could be run next: in the range of those that did not diverge and a little beyond, where
    it trains as likely as not."""
    coordinates = surface.coordinates
    trained = [one for one in tried if one not in diverged]
    everywhere = [coordinates.u_of(one) for one in trained or tried] or [0.0]
    here = [coordinates.u_of(one) for one in tried if one.effective_batch_size == batch]
    too_high = min((coordinates.u_of(one) for one in diverged if one.effective_batch_size == batch), default=math.inf)
    low, high = min(everywhere) - REACH, min(max(everywhere) + REACH, too_high)
    steps = np.arange(math.ceil(low / OPTIONS_STEP), math.floor(high / OPTIONS_STEP) + 1) * OPTIONS_STEP
    settings = [
        Setting(batch, coordinates.rate(batch, u)) for u in steps if all(abs(u - before) >= APART for before in here)
    ]
    return [one for one in settings if surface.p_trains(one) >= SAFE]


MOST_RUNS_FORETOLD = 30


def is_beyond(tried: Collection[float], rate: float, best: float | None) -> bool:
    """True where a learning rate is the lowest or the highest of several that were tried at its batch, and the best one lies further out, as
    far as that is known."""
    lowest, highest = min(tried), max(tried)
    if lowest == highest or rate not in (lowest, highest):
        return False
    side = 1 if rate == highest else -1
    return best is None or side * math.log2(best / rate) >= APART


def runs_to_decide(regret: float, useful_gain: float, num_runs: int) -> int | None:
    """Return about how many more runs it takes until the choice wastes less than a useful gain, after so many; None where that is
    more than can be foretold.

    What a choice wastes falls about as the number of runs grows: both the probability of being wrong and what that costs fall as
    the deviations do.
    """
    more = math.ceil(num_runs * (regret / useful_gain - 1))
    return max(0, more) if more <= MOST_RUNS_FORETOLD else None
