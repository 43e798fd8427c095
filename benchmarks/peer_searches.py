"""What else searches batches and learning rates, at a given cost: Ray's ASHA on random draws, Optuna's TPE with successive
halving, as their documentation says to use them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

QUARTERS = 4
"""Both judge a run after a quarter and after half of its budget, and at its end, as the study's own pruner does."""

Loss = Callable[[int, float, float], float]
"""(effective batch, learning rate, share of the run trained) -> validation loss; infinite where it has diverged."""


@dataclass(frozen=True)
class Space:
    """What both may choose from."""

    rates: dict[int, tuple[float, ...]]
    """The learning rates of every effective batch."""
    loss: Loss
    cost: float
    """In full runs: a search begins no run once it has spent so much."""


Chosen = tuple[int, float] | None
"""An effective batch and its learning rate; None where no run was trained to its end."""


def ray_asha(space: Space, chance: Random) -> Chosen:
    """Return the best of random draws that Ray's ASHA let through."""
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    scheduler: Any = ASHAScheduler(
        time_attr="quarters", metric="val_loss", mode="min", max_t=QUARTERS, grace_period=1, reduction_factor=2
    )
    points = [(batch, rate) for batch, rates in space.rates.items() for rate in rates]
    chance.shuffle(points)
    trained: dict[tuple[int, float], float] = {}
    spent = 0.0
    for number, point in enumerate(points):
        if spent >= space.cost:
            break
        trial = _Numbered(str(number))
        scheduler.on_trial_add(None, trial)
        for quarter in range(1, QUARTERS + 1):
            spent += 1 / QUARTERS
            loss = space.loss(*point, quarter / QUARTERS)
            result = {"quarters": quarter, "val_loss": loss if math.isfinite(loss) else 1e9}
            if quarter == QUARTERS:
                trained[point] = loss
            elif scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                break
    return min(trained, key=lambda point: trained[point], default=None)


@dataclass
class _Numbered:
    """What Ray's scheduler wants to know of a trial."""

    trial_id: str


def optuna_tpe(space: Space, chance: Random) -> Chosen:
    """Return the best that Optuna's TPE came to with its successive halving."""
    import optuna  # pyright: ignore[reportMissingImports]  (an extra)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=chance.randrange(2**31), multivariate=False),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    )
    spent = 0.0
    while spent < space.cost:
        trial = study.ask()
        point = _suggested(space, trial)
        for quarter in range(1, QUARTERS + 1):
            spent += 1 / QUARTERS
            loss = space.loss(*point, quarter / QUARTERS)
            trial.report(loss if math.isfinite(loss) else 1e9, quarter)
            if quarter == QUARTERS:
                study.tell(trial, loss if math.isfinite(loss) else 1e9)
            elif trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
    finished = [one for one in study.trials if one.state is optuna.trial.TrialState.COMPLETE]
    best = min(finished, key=lambda one: one.value or 0.0, default=None)
    return (best.user_attrs["batch"], best.user_attrs["rate"]) if best else None


def _suggested(space: Space, trial: Any) -> tuple[int, float]:
    """Return a batch and a rate: the rate as a place between the lowest and highest of that batch, on the log scale."""
    batch = trial.suggest_categorical("batch", list(space.rates))
    low, high = space.rates[batch][0], space.rates[batch][-1]
    rate = low * (high / low) ** trial.suggest_float("rate", 0.0, 1.0)
    trial.set_user_attr("batch", batch)
    trial.set_user_attr("rate", rate)
    return batch, rate
