"""Simulated time to the best configuration: our promotion ASHA, Ray Tune's own schedulers, and no pruning.

    python benchmarks/pruner_simulation.py [--device cpu|cuda] [--quick]

Discrete events, no training: the device makes no difference. In every world configurations learn along curves that are
noisy and cross; all sides meet the same worlds, in the same order of arrival, with the same rungs and reduction factor.
Ours is decided by orchestrator/decisions/pruners.py; Ray's by its own classes, told and asked as its TuneController
does. The time to the best is that until any configuration that ends within 1 % of the best has been trained to its full
budget; infinite where all of those were cut. Losers are the configurations that end further from the best. `knowing the
law` shows how much there is to gain: it is told how these worlds are made, which nobody is.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import ray
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, TrialScheduler
from side_by_side import options

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import AshaPruner
from batchscout.orchestrator.decisions.pruners import Decision, Demand, Entrant, judge_rung

LARGE, LARGE_GPUS = 256, (1, 4, 16, 64, 256, 1024)
SMALL, SMALL_GPUS = 6, (1, 2, 4, 8)  # as many configurations as the stage `train` has of itself
# A study file's defaults.
SAMPLE_BUDGET: int = StudyConfig.model_fields["sample_budget"].default
REDUCTION_FACTOR = AshaPruner().reduction_factor
MILESTONES = (*AshaPruner(min_samples=SAMPLE_BUDGET // 8).rungs(SAMPLE_BUDGET, SAMPLE_BUDGET), SAMPLE_BUDGET)
MIN_SAMPLES = MILESTONES[0]
GOOD_ENOUGH = 1.01

# The worlds. Losses end evenly spread over ENDS and fall to that by a power law of the samples (Kaplan et al. 2020,
# arXiv 2001.08361); curves cross for differing in height, by a spread that is drawn for each world.
ENDS = (3.0, 4.0)
HEIGHT, EXPONENT = 0.5, 0.5
CROSSING = (0.1, 0.4)
NOISE = 0.01
SPEEDS = (0.7, 1.3)
# What every start of a trial costs, its first and those after a pause, as a share of a full run.
START_COST = 0.005

# How many heights a curve lies above its end at each milestone.
FALLS = [(samples / SAMPLE_BUDGET) ** -EXPONENT - 1 for samples in MILESTONES]

Verdict = Literal["go on", "pause", "stop"]


@dataclass(frozen=True)
class World:
    losses: list[list[float]]
    """The loss that is seen of each configuration: [configuration][milestone]."""
    ends: list[float]
    """The loss of each configuration at the full budget, without the noise."""
    speeds: list[float]
    """Full runs per unit of time, 1 on average."""
    crossing: float
    """The relative deviation of the heights."""

    @property
    def good(self) -> set[int]:
        """The configurations that end within 1 % of the best."""
        return {i for i, end in enumerate(self.ends) if end <= GOOD_ENOUGH * min(self.ends)}


def world_of(num_configurations: int, seed: int) -> World:
    draw = random.Random(seed)
    crossing = draw.uniform(*CROSSING)
    ends = [draw.uniform(*ENDS) for _ in range(num_configurations)]
    losses = [_curve(end, HEIGHT * (1 + crossing * draw.gauss(0, 1)), draw) for end in ends]
    return World(losses, ends, [draw.uniform(*SPEEDS) for _ in ends], crossing)


def _curve(end: float, height: float, draw: random.Random) -> list[float]:
    return [(end + height * fall) * draw.gauss(1, NOISE) for fall in FALLS]


class Side(Protocol):
    """One side, which decides who runs. Configurations are numbers, in the order of their arrival."""

    def next(self) -> int | None:
        """Return which configuration a free GPU should start or go on with."""
        ...

    def heard(self, configuration: int, milestone: int, loss: float) -> Verdict:
        """Take note that a configuration has reached a milestone."""
        ...


@dataclass(frozen=True)
class Outcome:
    """Times are in full runs at the average speed."""

    time_to_best: float
    regret: float
    """How far from the best, relative, the configuration ends whose seen loss was lowest at the full budget."""
    losers_share: float
    gpu_time: float
    end: float


def simulate(world: World, num_gpus: int, side: Side) -> Outcome:
    reached = [-1] * len(world.ends)  # the last milestone of each
    held = [0.0] * len(world.ends)
    finished: dict[int, float] = {}
    running: list[tuple[float, int, int]] = []
    now, order = 0.0, 0

    def run(configuration: int, start_cost: float) -> None:
        nonlocal order
        order += 1
        time = start_cost + _share_of_run(reached[configuration] + 1) / world.speeds[configuration]
        held[configuration] += time
        heapq.heappush(running, (now + time, order, configuration))

    while True:
        while len(running) < num_gpus and (chosen := side.next()) is not None:
            run(chosen, START_COST)
        if not running:
            return _outcome(world, finished, held, now)
        now, _, configuration = heapq.heappop(running)
        reached[configuration] += 1
        milestone = reached[configuration]
        verdict = side.heard(configuration, milestone, world.losses[configuration][milestone])
        if MILESTONES[milestone] == SAMPLE_BUDGET:
            finished[configuration] = now
        elif verdict == "go on":
            run(configuration, 0.0)


def _share_of_run(milestone: int) -> float:
    """From the milestone before."""
    before = MILESTONES[milestone - 1] if milestone else 0
    return (MILESTONES[milestone] - before) / SAMPLE_BUDGET


def _outcome(world: World, finished: dict[int, float], held: list[float], end: float) -> Outcome:
    good = world.good
    chosen = min(finished, key=lambda configuration: world.losses[configuration][-1])
    return Outcome(
        time_to_best=min((at for configuration, at in finished.items() if configuration in good), default=math.inf),
        regret=world.ends[chosen] / min(world.ends) - 1,
        losers_share=sum(time for configuration, time in enumerate(held) if configuration not in good) / sum(held),
        gpu_time=sum(held),
        end=end,
    )


class NoPruning:
    def __init__(self, num_configurations: int) -> None:
        self._arrivals = iter(range(num_configurations))

    def next(self) -> int | None:
        return next(self._arrivals, None)

    def heard(self, configuration: int, milestone: int, loss: float) -> Verdict:
        return "go on"


class Ours:
    """The Director without its journal: the entrants of every rung, judged by the product's own rules."""

    def __init__(self, num_configurations: int, num_gpus: int, *, synchronous: bool) -> None:
        self._num_gpus, self._synchronous = num_gpus, synchronous
        self._newcomers = list(range(num_configurations))[::-1]
        self._entrants = {rung: [Entrant(str(i), None) for i in range(num_configurations)] for rung in MILESTONES[:-1]}
        self._paused_at: dict[int, int] = {}
        self._let_past: dict[int, int] = {}
        """The rung that each of those that wait to go on was let past."""

    def next(self) -> int | None:
        for rung in sorted(set(self._paused_at.values())):
            self._judge(rung)
        if not self._let_past:
            return self._newcomers.pop() if self._newcomers else None
        furthest = max(self._let_past, key=self._let_past.__getitem__)
        del self._let_past[furthest]
        return furthest

    def heard(self, configuration: int, milestone: int, loss: float) -> Verdict:
        rung = MILESTONES[milestone]
        if rung == SAMPLE_BUDGET:
            return "stop"
        self._paused_at[configuration] = rung
        self._change(rung, configuration, value=loss)
        self._judge(rung)
        if self._let_past.pop(configuration, None):
            return "go on"
        return "pause" if configuration in self._paused_at else "stop"

    def _judge(self, rung: int) -> None:
        verdicts = judge_rung(
            f"{rung} samples",
            self._entrants[rung],
            REDUCTION_FACTOR,
            synchronous=self._synchronous,
            first=rung == MIN_SAMPLES,
            demand=Demand(len(self._newcomers) / self._num_gpus, idle=not self._newcomers and not self._let_past),
        )
        for name, decision in verdicts.items():
            self._apply(int(name), rung, decision)

    def _apply(self, configuration: int, rung: int, decision: Decision) -> None:
        if decision.action == "go on":
            del self._paused_at[configuration]
            self._let_past[configuration] = rung
            self._change(rung, configuration, promoted=True)
        elif decision.action == "stop":
            del self._paused_at[configuration]
            for each in self._entrants:
                self._change(each, configuration, out=True)

    def _change(self, rung: int, configuration: int, **changes: Any) -> None:
        self._entrants[rung][configuration] = replace(self._entrants[rung][configuration], **changes)


class KnowingTheLaw:
    """Go on with whoever is most likely to end within 1 % of the best, per time that it takes to know.

    It judges by all that it has seen and by the very law that the curves are drawn from. The price that a newcomer must
    be beaten by was chosen for it.
    """

    NEWCOMERS_PRICE = 0.05

    def __init__(self, world: World) -> None:
        self._world = world
        self._newcomers = list(range(len(world.ends)))[::-1]
        self._paused: dict[int, float] = {}

    def next(self) -> int | None:
        chosen = max(self._paused, key=self._paused.__getitem__, default=None)
        if self._newcomers and (chosen is None or self._paused[chosen] < self.NEWCOMERS_PRICE):
            return self._newcomers.pop()
        if chosen is not None:
            del self._paused[chosen]
        return chosen

    def heard(self, configuration: int, milestone: int, loss: float) -> Verdict:
        seen = tuple(self._world.losses[configuration][: milestone + 1])
        left = 1 - MILESTONES[milestone] / SAMPLE_BUDGET
        if left:
            self._paused[configuration] = chance_of_good(seen, self._world.crossing) / (left + START_COST)
        return "pause"


@functools.cache
def chance_of_good(seen: tuple[float, ...], crossing: float, num_ends: int = 101) -> float:
    """That the configuration of which so much was seen ends within 1 % of the lowest there can be."""
    lowest, highest = ENDS
    ends = [lowest + (highest - lowest) * i / (num_ends - 1) for i in range(num_ends)]
    logs = [_log_likelihood(end, seen, crossing) for end in ends]
    weights = [math.exp(log - max(logs)) for log in logs]
    return sum(weight for end, weight in zip(ends, weights, strict=True) if end <= GOOD_ENOUGH * lowest) / sum(weights)


def _log_likelihood(end: float, seen: Sequence[float], crossing: float) -> float:
    """But for what is the same for all ends: normal noise of each loss, and one normal height for all of them."""
    noise = [(NOISE * loss) ** 2 for loss in seen]
    rest = [loss - end - HEIGHT * fall for loss, fall in zip(seen, FALLS, strict=False)]
    along = sum(r * fall / v for r, fall, v in zip(rest, FALLS, noise, strict=False))
    spread = 1 / (HEIGHT * crossing) ** 2 + sum(fall**2 / v for fall, v in zip(FALLS, noise, strict=False))
    return -0.5 * (sum(r**2 / v for r, v in zip(rest, noise, strict=True)) - along**2 / spread)


class StubTrial:
    """What Ray's schedulers read of a trial."""

    is_saving = False

    def __init__(self, number: int) -> None:
        self.number, self.trial_id, self.status = number, str(number), Trial.PENDING
        self.last_result: dict[str, float] = {}


class Rays:
    """A scheduler of Ray Tune, told and asked as by Ray's TuneController, whose part this plays as well."""

    def __init__(self, num_configurations: int, scheduler: TrialScheduler) -> None:
        self._scheduler: Any = scheduler
        self._trials = [StubTrial(number) for number in range(num_configurations)]
        for trial in self._trials:
            self._scheduler.on_trial_add(self, trial)

    def get_trials(self) -> list[StubTrial]:
        return self._trials

    def stop_trial(self, trial: StubTrial) -> None:
        if trial.status == Trial.RUNNING:
            self._scheduler.on_trial_complete(self, trial, trial.last_result)
        elif trial.status != Trial.TERMINATED:
            self._scheduler.on_trial_remove(self, trial)
        trial.status = Trial.TERMINATED

    def next(self) -> int | None:
        chosen = self._scheduler.choose_trial_to_run(self)
        if chosen is None:
            return None
        chosen.status = Trial.RUNNING
        return chosen.number

    def heard(self, configuration: int, milestone: int, loss: float) -> Verdict:
        trial = self._trials[configuration]
        trial.last_result = {"first_rungs": MILESTONES[milestone] // MIN_SAMPLES, "val_loss": loss}
        decision = self._scheduler.on_trial_result(self, trial, trial.last_result)
        if decision == TrialScheduler.PAUSE:
            trial.status = Trial.PAUSED
            return "pause"
        if decision == TrialScheduler.STOP or MILESTONES[milestone] == SAMPLE_BUDGET:
            self.stop_trial(trial)
            return "stop"
        return "go on"


# Samples are counted in first rungs, since the smallest bracket of Ray's HyperBand begins at 1.
RAYS: dict[str, Any] = {
    "time_attr": "first_rungs",
    "metric": "val_loss",
    "mode": "min",
    "max_t": SAMPLE_BUDGET // MIN_SAMPLES,
    "reduction_factor": REDUCTION_FACTOR,
}
SIDES: dict[str, Callable[[World, int], Side]] = {
    "ours": lambda world, gpus: Ours(len(world.ends), gpus, synchronous=False),
    "ours, synchronous": lambda world, gpus: Ours(len(world.ends), gpus, synchronous=True),
    "Ray ASHA": lambda world, gpus: Rays(len(world.ends), ASHAScheduler(grace_period=1, **RAYS)),
    "Ray HyperBand": lambda world, gpus: Rays(len(world.ends), HyperBandScheduler(**RAYS)),
    "no pruning": lambda world, gpus: NoPruning(len(world.ends)),
    "knowing the law": lambda world, gpus: KnowingTheLaw(world),
}
Found = dict[int, dict[str, list[Outcome]]]
"""{GPUs: {side: its outcome in each world}}"""


def main() -> None:
    quick = options(__doc__).quick
    print(ASSUMPTIONS)
    large = _simulate_and_print(LARGE, LARGE_GPUS, 12 if quick else 120)
    small = _simulate_and_print(SMALL, SMALL_GPUS, 100 if quick else 600)
    print(json.dumps(_last_line(large, small)))


def _simulate_and_print(num_configurations: int, all_gpus: Sequence[int], num_worlds: int) -> Found:
    worlds = [world_of(num_configurations, seed) for seed in range(num_worlds)]
    found = {
        gpus: {name: [simulate(world, gpus, of(world, gpus)) for world in worlds] for name, of in SIDES.items()}
        for gpus in all_gpus
    }
    good = statistics.median(len(world.good) for world in worlds)
    print(f"\n{num_worlds} worlds of {num_configurations} configurations, {good:.0f} within 1 % of the best (median)")
    _print_table(found)
    return found


ASSUMPTIONS = f"""\
ray {ray.__version__}; rungs at {", ".join(map(str, MILESTONES[:-1]))} of {SAMPLE_BUDGET} samples, reduction factor {REDUCTION_FACTOR}
losses end between {ENDS[0]:g} and {ENDS[1]:g}; at share s of the budget each is above its end by height x (s^-{EXPONENT:g} - 1), height {HEIGHT:g}
with a deviation of {CROSSING[0]:.0%} to {CROSSING[1]:.0%}, drawn for each world, which lets curves cross; every loss is seen with {NOISE:.0%} of noise
speeds {SPEEDS[0]:g} to {SPEEDS[1]:g}; a start of a trial, after a pause too, costs {START_COST:.1%} of a full run, on every side
times in full runs at the average speed; medians over the worlds, with 95 % intervals; missed: worlds in which all good ones were cut
Ray's ASHA stops and never pauses; ours pauses and promotes, and is `synchronous: false` where it does not say so"""


def _print_table(found: Found) -> None:
    print(
        f"{'GPUs':>5} {'':<18} {'time to the best':>22} {'/ Ray ASHA':>20} {'missed':>7} {'regret':>7} "
        f"{'on losers':>10} {'GPU time':>9} {'end':>7}"
    )
    for gpus, outcomes in found.items():
        for name, worlds in outcomes.items():
            print(f"{gpus:>5} {name:<18} {_row(worlds, outcomes['Ray ASHA'])}")


def _row(ours: list[Outcome], theirs: list[Outcome]) -> str:
    time, ratio = _with_interval(_median_time, ours), _with_interval(_ratio, list(zip(ours, theirs, strict=True)))
    missed = sum(math.isinf(outcome.time_to_best) for outcome in ours) / len(ours)
    regret, losers, gpu_time, end = (
        statistics.median(getattr(outcome, key) for outcome in ours)
        for key in ("regret", "losers_share", "gpu_time", "end")
    )
    return f"{time:>22} {ratio:>20} {missed:>7.0%} {regret:>7.2%} {losers:>10.0%} {gpu_time:>9.1f} {end:>7.2f}"


def _median_time(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(outcome.time_to_best for outcome in outcomes)


def _ratio(pairs: Sequence[tuple[Outcome, Outcome]]) -> float:
    ours, theirs = zip(*pairs, strict=True)
    return _median_time(ours) / _median_time(theirs)


def _with_interval(figure: Callable[[Sequence[Any]], float], worlds: list[Any], rounds: int = 400) -> str:
    """Return the figure with its 95 % interval, from drawing as many worlds again with replacement (the bootstrap)."""
    draw = random.Random(0)
    again = sorted(figure(draw.choices(worlds, k=len(worlds))) for _ in range(rounds))
    return f"{figure(worlds):.2f} [{again[round(0.025 * rounds)]:.2f}, {again[round(0.975 * rounds) - 1]:.2f}]"


def _last_line(large: Found, small: Found) -> dict[str, Any]:
    return {
        "time_ratio": _ratios(large, "ours"),
        "synchronous": _ratios(large, "ours, synchronous"),
        "hyperband": _ratios(large, "Ray HyperBand"),
        "no_pruning": _ratios(large, "no pruning"),
        "knowing_the_law": _ratios(large, "knowing the law"),
        "small_study": _ratios(small, "ours"),
        "small_study_synchronous": _ratios(small, "ours, synchronous"),
    }


def _ratios(found: Found, side: str) -> dict[int, float | None]:
    """Return None for a side if either it or Ray's ASHA missed the best in most worlds."""
    pairs = {gpus: list(zip(outcomes[side], outcomes["Ray ASHA"], strict=True)) for gpus, outcomes in found.items()}
    ratios = {gpus: _ratio(both) for gpus, both in pairs.items()}
    return {gpus: ratio if math.isfinite(ratio) else None for gpus, ratio in ratios.items()}


if __name__ == "__main__":
    main()
