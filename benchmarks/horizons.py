"""How good the answer for a longer run is, in its training time: studies with a `real_run` replayed on recorded and made worlds.

    python benchmarks/horizons.py [--device cpu|cuda] [--quick] [--studies 24]

A study is told that the run it is for is 2 to 64 times as long as its own; what it says is held against that length: within
recorded worlds as far as they were recorded, in made ones, whose best rate falls and whose best batch grows with the length, to 64
times. Beside it stand who keeps the study's own answer as it is, and who lets its rate fall by the usual power of the length.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import Any

import numpy as np
from made_worlds import Made, drifting, made_world
from recorded_worlds import HARDWARE, WORLDS, Recorded, case_of
from replayed import Answer, replay
from world_table import load

from batchscout.orchestrator.stages.horizons.longer import RATE_DRIFT

KINDS = "plain", "rate_too_low", "noise_by_batch", "spikes", "flat", "two_optima", "edge", "other_exponent"
MADE_TIMES = 2, 8, 64
SHORTER = 1, 2, 4, 8, 16
"""The lengths at which the best batch is looked up, in parts of what was recorded."""
RECORDED_TIMES = {4: (2, 4), 8: (2, 4, 8)}
"""How much longer the real run is, by how much shorter than recorded the study is: its own shorter runs must be recorded, too."""
CLOSE = 0.10
"""Answers that waste at most so much of the training time are as good as the best."""
Setting = tuple[int, float]


@dataclass(frozen=True)
class Study:
    """One study to replay, for a run so many times as long."""

    kind: str
    case: Recorded | tuple[str, int]
    seed: int
    times: float


@dataclass(frozen=True)
class Judged:
    """What a study said of the longer run, held against the world's truth."""

    wastes: Mapping[str, float]
    """By who chose: the share of the longer run's training time that the setting wastes."""
    loss_holds: bool | None
    rate_holds: bool | None
    """Whether the 90 % intervals hold what the setting comes to, and its batch's best rate; None where none is told."""
    loss_width: float | None
    """How wide the interval of the loss is, in times of what the whole run's loss lies below the study's."""
    claimed: float | None
    """The probability that is claimed of the batch that was chosen, and whether it is the better of those that were carried on."""
    is_better: bool | None


def judged(study: Study) -> Judged:
    case = drifting(made_world(*study.case)) if isinstance(study.case, tuple) else study.case
    answer = replay(case, study.seed, case.timing_noise, real_run=study.times)
    assert answer.chosen, "no world here makes all of a study's runs diverge"
    batch, rate = answer.chosen
    chosen: dict[str, Setting] = {
        "ours": _said(answer) or answer.chosen,
        "kept": answer.chosen,
        "by the power": (batch, rate * study.times**RATE_DRIFT),
    }
    wastes = {name: waste_at(case, setting, study.times) for name, setting in chosen.items()}
    said = answer.real_run
    if said is None:
        return Judged(wastes, None, None, None, None, None)
    ours = next(one for one in said.batches if one.effective_batch_size == said.effective_batch_size)
    comes_to = case.mean_loss(*chosen["ours"], study.times)
    best_rate = case.best_rate_at(said.effective_batch_size, study.times)
    falls_by = case.mean_loss(batch, rate) - comes_to
    ends = {one.effective_batch_size: _best_end(case, one.effective_batch_size, study.times) for one in said.batches}
    return Judged(
        wastes,
        _holds(said.val_loss_low, comes_to, said.val_loss_high),
        said.learning_rate_low <= best_rate <= said.learning_rate_high,
        ((said.val_loss_high or 0.0) - (said.val_loss_low or 0.0)) / falls_by if falls_by > 0 else None,
        ours.p_best if len(ends) > 1 else None,
        ends[ours.effective_batch_size] <= min(ends.values()) if len(ends) > 1 else None,
    )


def _holds(low: float | None, true: float, high: float | None) -> bool:
    assert low is not None, "a study of this version tells it"
    assert high is not None, "as it does both ends"
    return low <= true <= high


def _said(answer: Answer) -> Setting | None:
    said = answer.real_run
    return None if said is None else (said.effective_batch_size, said.learning_rate)


def _best_end(case: Made | Recorded, batch: int, times: float) -> float:
    return case.mean_loss(batch, case.best_rate_at(batch, times), times)


def best_at(case: Made | Recorded, share: float) -> Setting:
    """Return the best setting of a run whose length is this share of the study's."""
    return min(
        ((batch, case.best_rate_at(batch, share)) for batch in case.budgets),
        key=lambda setting: case.mean_loss(*setting, share),
    )


def waste_at(case: Made | Recorded, setting: Setting, times: float) -> float:
    """Return the share of the training time of a run so many times as long that a setting wastes: the best one comes to its loss in
    the rest."""
    loss = case.mean_loss(*setting, times)
    low, high = -8.0, 0.0
    for _ in range(24):
        middle = (low + high) / 2
        share = times * 2**middle
        low, high = (low, middle) if case.mean_loss(*best_at(case, share), share) <= loss else (middle, high)
    return 1 - 2**high


def studies(num_studies: int) -> list[Study]:
    """Return so many studies of every kind of world and every length."""
    found = [
        Study(kind, (kind, number), number, times)
        for kind in KINDS
        for number in range(num_studies)
        for times in MADE_TIMES
    ]
    for path in sorted(WORLDS.glob("*.jsonl")):
        world = load(path)
        cases = [case for hardware in HARDWARE for length in RECORDED_TIMES if (case := _case(world, hardware, length))]
        for seed in range(max(1, num_studies // max(1, len(cases)))):
            found += [Study(world.name, case, seed, times) for case in cases for times in RECORDED_TIMES[case.length]]
    return found


def _case(world: Any, hardware: int, length: int) -> Recorded | None:
    try:
        return case_of(world, hardware, length)
    except ValueError:  # fewer than two of its batches were recorded at that length
        return None


def drifts() -> dict[str, tuple[float, float]]:
    """Return by how many factors of 2 the best rate of a batch, and the best batch, change for each factor of 2 of the length in the
    recorded worlds: the mean and the deviation, of rates over worlds and batches, of batches over worlds and hardware."""
    rates, batches = list[float](), list[float]()
    for world in (load(path) for path in sorted(WORLDS.glob("*.jsonl"))):
        for batch in world.batches():
            best = [(budget, _lowest(world.final_losses(batch, budget))) for budget in world.budgets(batch)]
            rates += _slope([(budget, rate) for budget, rate in best if rate is not None])
        for hardware in HARDWARE:
            cases = [case for length in SHORTER if (case := _case(world, hardware, length)) and len(case.budgets) > 2]
            ends = [(case, {b: case.mean_loss(b, case.best_rate(b)) for b in case.budgets}) for case in cases]
            places = [(1 / case.length, batch) for case, losses in ends if (batch := _lowest(losses)) is not None]
            batches += _slope(places)
    return {name: (fmean(found), stdev(found)) for name, found in (("best rate", rates), ("best batch", batches))}


def _lowest(losses: Mapping[Any, float]) -> float | None:
    """Return where a parabola through the lowest loss and both beside it, over the log, has its minimum; None at an end."""
    places = sorted(losses)
    at = min(range(len(places)), key=lambda one: losses[places[one]])
    if not 0 < at < len(places) - 1 or any(math.isinf(losses[one]) for one in places[at - 1 : at + 2]):
        return None
    curve = np.polyfit(
        [math.log2(one) for one in places[at - 1 : at + 2]], [losses[one] for one in places[at - 1 : at + 2]], 2
    )
    return float(2 ** (-curve[1] / (2 * curve[0])))


def _slope(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return how the log of the second goes with that of the first; nothing of a single point."""
    if len(points) < 2:
        return []
    x, y = ([math.log2(point[place]) for point in points] for place in (0, 1))
    return [float(np.polyfit(x, y, 1)[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="nothing is trained: no difference")
    parser.add_argument("--quick", action="store_true", help="2 studies a kind: to see that it runs, not to quote it")
    parser.add_argument("--studies", type=int, default=24, metavar="N", help="of each kind of world and each length")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that are started: each has a core
    asked = studies(2 if chosen.quick else chosen.studies)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        results = list(zip(asked, pool.map(judged, asked, chunksize=4), strict=True))
    print(f"{' | '.join(['| worlds', 'times as long', *HEADINGS])} |\n{'|---' * (len(HEADINGS) + 2)}|")
    line: dict[str, Any] = {}
    for kind, is_its in {**GROUPS, **{kind: _of(kind) for kind in dict.fromkeys(one.kind for one in asked)}}.items():
        line[kind] = {}
        for times in sorted({one.times for one in asked if is_its(one)}):
            its = [found for study, found in results if is_its(study) and study.times == times]
            line[kind][f"{times:g}"] = figures = summary(its)
            print(f"| {kind} | {times:g} | {' | '.join(_cell(key, figures[key]) for key in HEADINGS.values())} |")
    found = {what: {"mean": round(mean, 2), "deviation": round(off, 2)} for what, (mean, off) in drifts().items()}
    for what, one in found.items():
        print(
            f"recorded: the {what} changes by {one['mean']} +- {one['deviation']} factors of 2 for each one of the length"
        )
    print(json.dumps({group: line[group] for group in GROUPS} | {"drifts": found}))


GROUPS: dict[str, Callable[[Study], bool]] = {
    "all made": lambda study: isinstance(study.case, tuple),
    "all recorded": lambda study: not isinstance(study.case, tuple),
}


def _of(kind: str) -> Callable[[Study], bool]:
    return lambda study: study.kind == kind


HEADINGS = {
    "studies": "studies",
    "time wasted": "regret_time",
    "kept as it is": "kept",
    "by the power": "by_the_power",
    "within 10 %": "within_10_percent",
    "loss holds": "loss_coverage",
    "rate holds": "rate_coverage",
    "width of the loss": "loss_width",
    "sure of its batch": "claimed",
    "right in it": "right",
}


def summary(its: Sequence[Judged]) -> dict[str, Any]:
    def mean(values: Iterable[float | None]) -> float | None:
        known = [float(value) for value in values if value is not None]
        return round(fmean(known), 4) if known else None

    return {
        "studies": len(its),
        "regret_time": mean(one.wastes["ours"] for one in its),
        "kept": mean(one.wastes["kept"] for one in its),
        "by_the_power": mean(one.wastes["by the power"] for one in its),
        "within_10_percent": mean(one.wastes["ours"] <= CLOSE for one in its),
        "loss_coverage": mean(one.loss_holds for one in its),
        "rate_coverage": mean(one.rate_holds for one in its),
        "loss_width": mean(one.loss_width for one in its),
        "claimed": mean(one.claimed for one in its),
        "right": mean(one.is_better for one in its),
    }


def _cell(key: str, figure: float | None) -> str:
    if figure is None or key in ("studies", "loss_width"):
        return "-" if figure is None else f"{figure:g}"
    return f"{figure:.1%}" if math.isfinite(figure) else "-"


if __name__ == "__main__":
    main()
