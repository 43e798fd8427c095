"""What seeds and learning rates do to a loss, as shares of it and as shares of its late gain, in the recorded worlds.

    python benchmarks/late_gain.py [--device cpu|cuda] [--quick] [--tables FILE ...]

The late gain is what the loss of a run falls by over the second half of its samples. A row is a world:

    seeds     the deviation of the final loss from seed to seed
    rate      what a learning rate that is off by a factor of 2 costs: the mean of both sides
    doubling  what twice the samples gain at that rate, with a schedule of their own

of each batch at its best learning rate, as the geometric mean over the recorded budgets. The last line says where each
lies over all worlds, and the deviation of its logarithm. As shares of the late gain they are the prior of the surface over
batch and rate (orchestrator/stages/estimates/surface.py). recommendation.py judges each world by what the others make it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from world_table import World, load

from batchscout.orchestrator.stages.estimates.surface import PRIOR, Prior

WORLDS = Path(__file__).parent / "worlds"
OCTAVE = (1.5, 2.5)
"""The ratios of two learning rates that count as a factor of 2."""


@dataclass(frozen=True)
class Effects:
    """Of the batches at a budget, each at its best rate, in the unit of the loss."""

    loss: float
    late_gain: float
    of_seeds: float
    of_rate: float
    of_doubling: float | None
    """None at the shortest budget, and where its rate was not recorded at half of it."""


def effects_in(world: World) -> Iterator[Effects]:
    """Yield the effects at each budget."""
    for budget in sorted({budget for batch in world.batches() for budget in world.budgets(batch)}):
        batches = [batch for batch in world.batches() if budget in world.budgets(batch)]
        known = [effects for batch in batches if (effects := _of_batch(world, batch, budget)) is not None]
        if known:
            doublings = [one.of_doubling for one in known if one.of_doubling is not None]
            yield Effects(
                statistics.fmean(one.loss for one in known),
                statistics.fmean(one.late_gain for one in known),
                math.sqrt(statistics.fmean(one.of_seeds**2 for one in known)),
                statistics.fmean(one.of_rate for one in known),
                statistics.fmean(doublings) if doublings else None,
            )


def _of_batch(world: World, batch: int, budget: int) -> Effects | None:
    """None where its best rate lies at the end of those recorded, or a seed diverged at it."""
    losses = {rate: loss for rate, loss in world.final_losses(batch, budget).items() if math.isfinite(loss)}
    best = min(losses, key=lambda rate: losses[rate])
    beside = [loss for rate, loss in losses.items() if OCTAVE[0] < max(rate / best, best / rate) < OCTAVE[1]]
    ends, halves = (
        [world.loss(batch, best, seed, budget, seen) for seed in world.seeds()] for seen in (budget, budget / 2)
    )
    known, middles = [loss for loss in ends if loss is not None], [loss for loss in halves if loss is not None]
    if len(beside) < 2 or len(known) < len(ends):
        return None
    gain = abs(statistics.fmean(middles) - losses[best])
    halved = (
        world.final_losses(batch, budget // 2).get(best, math.inf) if budget // 2 in world.budgets(batch) else math.inf
    )
    doubling = halved - losses[best] if math.isfinite(halved) else None
    return Effects(losses[best], gain, statistics.stdev(known), statistics.fmean(beside) - losses[best], doubling)


@dataclass(frozen=True)
class Shares:
    """What seeds and a rate that is off do in a world, as shares of something."""

    of_seeds: float
    of_rate: float


def shares(effects: Sequence[Effects], of: Callable[[Effects], float]) -> Shares:
    return Shares(
        statistics.geometric_mean(one.of_seeds / of(one) for one in effects),
        statistics.geometric_mean(one.of_rate / of(one) for one in effects),
    )


def prior_of(worlds: Sequence[World]) -> Prior:
    """Return the prior that these worlds make: where they lie. The spreads stay."""
    found = [shares(list(effects_in(world)), late_gain) for world in worlds]
    return replace(
        PRIOR,
        seed_deviation=statistics.geometric_mean(one.of_seeds for one in found),
        curvature=statistics.geometric_mean(one.of_rate for one in found),
        doubling=statistics.geometric_mean(
            [doubling(effects) for world in worlds if _doublings(effects := list(effects_in(world)))]
            or [PRIOR.doubling]
        ),
    )


def late_gain(effects: Effects) -> float:
    return effects.late_gain


def loss(effects: Effects) -> float:
    return effects.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="nothing is trained: no difference")
    parser.add_argument("--quick", action="store_true", help="it is: no difference")
    parser.add_argument("--tables", type=Path, nargs="+", default=sorted(WORLDS.glob("*.jsonl")), metavar="FILE")
    worlds = [load(path) for path in parser.parse_args().tables]
    effects = {world.name: list(effects_in(world)) for world in worlds}
    print(
        "| world | seeds, of the loss | of the late gain | rate, of the loss | of the late gain | doubling, of the late gain |"
    )
    print("|---|---|---|---|---|---|")
    for name, found in effects.items():
        of_loss, of_gain = shares(found, loss), shares(found, late_gain)
        print(
            f"| {name} | {of_loss.of_seeds:.1%} | {of_gain.of_seeds:.2f} | {of_loss.of_rate:.1%} | {of_gain.of_rate:.2f} "
            f"| {doubling(found):.2f} |"
        )
    summaries = {"of_loss": _summary(effects.values(), loss), "of_late_gain": _summary(effects.values(), late_gain)}
    usual = round(statistics.geometric_mean(map(doubling, effects.values())), 2)
    print(json.dumps(summaries | {"doubling": usual, "doubling_spread": round(_doubling_spread(effects.values()), 2)}))


def doubling(effects: Sequence[Effects]) -> float:
    """Return what twice the samples gain, in late gains, as the geometric mean over the budgets at which they gain anything."""
    return statistics.geometric_mean(_doublings(effects))


def _doublings(effects: Sequence[Effects]) -> list[float]:
    return [one.of_doubling / one.late_gain for one in effects if one.of_doubling is not None and one.of_doubling > 0]


def _doubling_spread(worlds: Iterable[Sequence[Effects]]) -> float:
    """Return the deviation of the logarithm over worlds and budgets."""
    return statistics.stdev(math.log(one) for effects in worlds for one in _doublings(effects))


def _summary(effects: Iterable[Sequence[Effects]], of: Callable[[Effects], float]) -> dict[str, float]:
    """Return where they lie over all worlds, and the deviation of their logarithms over worlds and budgets."""
    worlds, every = [shares(found, of) for found in effects], [one for found in effects for one in found]
    return {
        "seeds": round(statistics.geometric_mean(one.of_seeds for one in worlds), 4),
        "seeds_spread": round(statistics.stdev(math.log(one.of_seeds / of(one)) for one in every), 2),
        "rate": round(statistics.geometric_mean(one.of_rate for one in worlds), 4),
        "rate_spread": round(statistics.stdev(math.log(one.of_rate / of(one)) for one in every), 2),
    }


if __name__ == "__main__":
    main()
