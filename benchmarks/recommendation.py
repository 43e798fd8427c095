"""How good the study's answer is, in training time: its decision code as it is, replayed on made and on recorded worlds.

    python benchmarks/recommendation.py [--device cpu|cuda] [--quick] [--tables FILE ...] [--studies 200] [--lanes 1 4 8]
    python benchmarks/recommendation.py --real [RUN_DIR]      instead: a study's answer against its own grid (real_grid.py)

The measure is what a user pays: the share of the training time that an answer wastes, since the best setting of the world comes
to the same loss in the rest of it. A study without an answer, or with one that diverges, wastes all of it.

The worlds are fifteen kinds of made ones (made_worlds.py), which hold in turn what is hard for such a study, and the tables of
real training runs in worlds/ (recorded_worlds.py). What a study knows before its first run, its prior, is made of the recorded
worlds (late_gain.py); here each recorded world is judged by what the others make it. The peers (peer_searches.py) choose within the
same batches and learning rates at the same cost; `by_the_rule` alone spends what it spends.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import real_grid
from late_gain import prior_of
from made_worlds import KINDS, made_world
from peer_searches import Searched, Space, by_the_rule, gaussian_process, optuna_tpe, ray_asha
from recorded_worlds import WORLDS, cases_of
from replayed import Answer, Case, replay
from world_table import World, load

from batchscout.orchestrator.stages.estimates import surface
from batchscout.orchestrator.stages.estimates.surface import Prior
from batchscout.orchestrator.stages.train.findings import TimeGain

PEERS: dict[str, Callable[[Space, Random], Searched]] = {
    "gaussian_process": gaussian_process,
    "by_the_rule": by_the_rule,
    "optuna": optuna_tpe,
    "ray_asha": ray_asha,
}
SHORTEST, LONGEST = 2.0**-10, 8.0
"""The shares of the training time within which it is asked when a setting comes to a loss."""
CLOSE, FAR = 0.03, 0.10
"""The wastes, as shares of the training time, up to which an answer counts as right, and as nearly right."""
TIED = 0.005
"""Batches whose wastes differ by less, as shares of the training time, are the best together."""
NUM_BINS = 5


@dataclass(frozen=True)
class Judged:
    """An answer held against the world's truth."""

    answer: Answer
    waste: float
    """The share of the training time that the chosen setting wastes: 1 without an answer, and where it diverges."""
    claims: tuple[tuple[float, float], ...] = ()
    """Of every batch: the claimed probability that it is the best, and 1 / n where it is, together with n - 1 others; else 0."""
    is_covered: bool | None = None
    """Whether the interval of what is saved against the user's own setting holds the true share; None where none is claimed."""


def judge(case: Case, seed: int, answer: Answer) -> Judged:
    if answer.chosen is None:
        return Judged(answer, 1.0)
    return Judged(
        answer,
        waste_of(case, *answer.chosen),
        _claims(case, answer.p_best),
        _is_covered(answer.time, true_share(case, seed, *answer.chosen)),
    )


def waste_of(case: Case, batch: int, rate: float) -> float:
    """Return the share of the training time that a setting wastes: the world's best comes to its loss in the rest."""
    return 1.0 - min(1.0, time_to(case, case.best(), case.mean_loss(batch, rate)))


def true_share(case: Case, seed: int, batch: int, rate: float) -> float | None:
    """Return the share of the training time in which a setting comes to the loss that the user's own has after all of it, within
    SHORTEST and LONGEST; None where the user's own diverges."""
    own = case.mean_loss(case.reference, case.user_rate(seed))
    return time_to(case, (batch, rate), own) if math.isfinite(own) else None


def time_to(case: Case, setting: tuple[int, float], loss: float) -> float:
    """Return the share of the training time in which a setting, with a schedule as long as that, ends at a loss: from SHORTEST to
    LONGEST, and 0 where any run that trains would do."""
    if math.isinf(loss):
        return 0.0
    low, high = math.log2(SHORTEST), math.log2(LONGEST)
    if case.mean_loss(*setting, 1.0) == loss:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if case.mean_loss(*setting, 2**middle) <= loss else (middle, high)
    return 2**high


def _claims(case: Case, p_best: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    wastes = {batch: waste_of(case, batch, case.best_rate(batch)) for batch in case.budgets}
    tied = [batch for batch, waste in wastes.items() if waste <= TIED]
    return tuple((claimed, (batch in tied) / max(1, len(tied))) for batch, claimed in p_best.items())


def _is_covered(claimed: TimeGain | None, true: float | None) -> bool | None:
    return None if claimed is None or true is None else claimed.low <= true <= claimed.high


@dataclass(frozen=True)
class Study:
    """One study to replay. It goes to another process: a made world goes by its kind and number, and is made there."""

    case: Case | tuple[str, int]
    seed: int
    prior: Prior | None = None
    """What the other recorded worlds make the study know; None: what every study knows."""
    num_lanes: int = 1
    with_peers: bool = True


@dataclass(frozen=True)
class Outcome:
    """What became of one study, and of the peers at its cost."""

    ours: Judged
    peers: Mapping[str, Judged] = field(default_factory=dict)


def outcome_of(study: Study) -> Outcome:
    case = made_world(*study.case) if isinstance(study.case, tuple) else study.case
    with _knowing(study.prior or surface.PRIOR):
        answer = replay(case, study.seed, case.timing_noise, study.num_lanes)
    peers = PEERS if study.with_peers else {}
    found = {name: of_peer(case, search, answer.cost, study.seed) for name, search in peers.items()}
    return Outcome(judge(case, study.seed, answer), {name: judge(case, study.seed, one) for name, one in found.items()})


@contextmanager
def _knowing(prior: Prior) -> Iterator[None]:
    """Let studies begin with this prior."""
    before, surface.PRIOR = surface.PRIOR, prior
    try:
        yield
    finally:
        surface.PRIOR = before


def of_peer(case: Case, search: Callable[[Space, Random], Searched], cost: float, seed: int) -> Answer:
    """Return what a peer chooses at a cost, in full runs, with the same seed's runs."""

    def loss(batch: int, rate: float, share: float) -> float:
        known = case.loss(batch, rate, seed, share)
        return math.inf if known is None else known

    own = case.user_rate(seed)
    space = Space(
        {batch: case.grid(batch) for batch in case.budgets},
        {batch: own * (batch / case.reference) ** 0.5 for batch in case.budgets},
        case.reference,
        loss,
        cost,
    )
    searched = search(space, Random(f"{case.name} {seed} search"))
    return Answer(searched.chosen, searched.runs, searched.cost, wait=searched.cost)


def main() -> None:
    arguments = _arguments()
    if arguments.real:
        return real_grid.main(
            [str(arguments.real), "--device", arguments.device, *(["--quick"] if arguments.quick else [])]
        )
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that are started: each has a core
    kinds, left_out = studies_of(arguments.tables, 2 if arguments.quick else arguments.studies)
    print(f"left out, as fewer than two batches lie within what was recorded: {'; '.join(left_out) or 'none'}")
    lanes, *more_lanes = arguments.lanes
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        print(f"{' | '.join(['| kind', *HEADINGS])} |\n{'|---' * (len(HEADINGS) + 1)}|", flush=True)
        worlds = {kind: _played(pool, kind, studies, lanes, with_peers=True) for kind, studies in kinds.items()}
        every = [one for outcomes in worlds.values() for one in outcomes]
        peers = {name: summary_of_peer([one.peers[name] for one in every]) for name in PEERS}
        line = summary([one.ours for one in every])
        for name, figures in {"all kinds": line, **peers}.items():
            print(row(name, figures), flush=True)
        by_lanes = {}
        for number in more_lanes:
            again = [
                _played(pool, f"{kind}, {number} lanes", studies, number, with_peers=False)
                for kind, studies in kinds.items()
            ]
            by_lanes[number] = summary([one.ours for outcomes in again for one in outcomes])
            print(row(f"all kinds, {number} lanes", by_lanes[number]), flush=True)
    num_refused = sum(one.ours.answer.num_refused for one in every)
    print(f"{num_refused} runs were asked for at learning rates beyond those recorded, and failed")
    line |= peers
    line["worlds"] = {kind: _with_peers(outcomes) for kind, outcomes in worlds.items()}
    line["by_lanes"] = by_lanes
    print(json.dumps(line))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="nothing is trained: no difference")
    parser.add_argument("--quick", action="store_true", help="2 studies a kind: to see that it runs, not to quote it")
    parser.add_argument(
        "--tables", type=Path, nargs="+", metavar="FILE", help="recorded worlds; these alone are played"
    )
    parser.add_argument("--studies", type=int, default=200, metavar="N", help="of each kind of world")
    parser.add_argument(
        "--lanes",
        type=int,
        nargs="+",
        default=[1],
        help="how many runs train at a time; further numbers are replayed, too",
    )
    parser.add_argument("--real", type=Path, nargs="?", const=Path("runs/quickstart"), metavar="RUN_DIR")
    return parser.parse_args()


def studies_of(tables: Sequence[Path] | None, num_studies: int) -> tuple[dict[str, list[Study]], list[str]]:
    """Return so many studies of every kind of made world and of every recorded one, or those of these tables alone; and the names of
    the recorded cases that cannot be made."""
    recorded = [load(path) for path in sorted(WORLDS.glob("*.jsonl"))]
    asked = recorded if tables is None else [load(path) for path in tables]
    made = [] if tables else KINDS
    kinds = {kind: [Study((kind, number), number) for number in range(num_studies)] for kind in made}
    left_out: list[str] = []
    for world in asked:
        cases, refused = cases_of([world])
        left_out += refused
        prior = prior_by_others(world, recorded)
        places = [divmod(number, len(cases)) for number in range(num_studies if cases else 0)]
        kinds[world.name] = [Study(cases[place], seed, prior) for seed, place in places]
    return {kind: studies for kind, studies in kinds.items() if studies}, left_out


def prior_by_others(world: World, recorded: Sequence[World]) -> Prior:
    """Return the prior that the recorded worlds but this one make."""
    return prior_of([one for one in recorded if one.name != world.name])


def _played(pool: Executor, kind: str, studies: Sequence[Study], num_lanes: int, *, with_peers: bool) -> list[Outcome]:
    asked = [replace(study, num_lanes=num_lanes, with_peers=with_peers) for study in studies]
    outcomes = list(pool.map(outcome_of, asked, chunksize=2))
    print(row(kind, summary([one.ours for one in outcomes])), flush=True)
    return outcomes


def _with_peers(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    peers = {name: summary_of_peer([one.peers[name] for one in outcomes]) for name in PEERS}
    return summary([one.ours for one in outcomes]) | peers


def summary_of_peer(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return what any answer can be held to."""
    return {
        "within_3_percent": _mean(one.waste <= CLOSE for one in judged),
        "within_10_percent": _mean(one.waste <= FAR for one in judged),
        "regret_time": _mean(one.waste for one in judged),
        "no_answer": _mean(one.answer.chosen is None for one in judged),
        "runs": _mean(one.answer.runs for one in judged),
        "seconds": _mean(one.answer.cost for one in judged),
    }


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return what a study can be held to: its claims, too. Seconds are in full runs."""
    answers = [one.answer for one in judged]
    return summary_of_peer(judged) | {
        "wait": _mean(one.wait for one in answers),
        "coverage": _mean(one.is_covered for one in judged if one.is_covered is not None),
        "regret_claimed": _mean(one.regret_time for one in answers if one.regret_time is not None),
        "calibration": calibration_error([claim for one in judged for claim in one.claims]),
        "decided": _mean(one.is_decided for one in answers),
        "decided_and_wrong": _mean(one.waste > FAR for one in judged if one.answer.is_decided),
        "pruning": {
            "seconds_saved": _mean(one.saved for one in answers),
            "winner_cut": _mean(one.cut_best for one in answers),
        },
    }


def calibration_error(claims: Sequence[tuple[float, float]]) -> float | None:
    """Return by how much the claimed probabilities are off, claims of about the same probability taken together and weighted
    by their number (the expected calibration error; Guo et al. 2017, arXiv 1706.04599); None without claims."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for claim in claims:
        bins.setdefault(min(int(claim[0] * NUM_BINS), NUM_BINS - 1), []).append(claim)
    off = [abs(sum(claimed - true for claimed, true in alike)) for alike in bins.values()]
    return round(sum(off) / len(claims), 4) if claims else None


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean; None of none."""
    known = [float(value) for value in values]
    return round(fmean(known), 4) if known else None


HEADINGS = {
    "within 3 %": "within_3_percent",
    "within 10 %": "within_10_percent",
    "time wasted": "regret_time",
    "claimed": "regret_claimed",
    "no answer": "no_answer",
    "interval holds": "coverage",
    "calibration": "calibration",
    "decided": "decided",
    "of these wrong": "decided_and_wrong",
    "runs": "runs",
    "seconds, in full runs": "seconds",
}
COUNTS = "calibration", "runs", "seconds"
"""All others are shares."""


def row(name: str, figures: Mapping[str, Any]) -> str:
    cells = [_cell(key, figures.get(key)) for key in HEADINGS.values()]
    return f"| {' | '.join([name, *cells])} |"


def _cell(key: str, figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:.2f}" if key in COUNTS else f"{figure:.1%}"


if __name__ == "__main__":
    main()
