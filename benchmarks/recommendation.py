"""How often the study's answer is right, replayed on recorded worlds: its decision code as it is, and what else there is.

    python benchmarks/recommendation.py [--device cpu|cuda] [--quick] [--tables FILE ...] [--timing-noise 0.05] [--lanes 1 4 8]
    python benchmarks/recommendation.py --real [RUN_DIR]      instead: a study's answer against its own grid (real_grid.py)

A world is a table of real training runs (world_table.py says how it is written, record_worlds.py records those in
worlds/). Here it is crossed with hardware: tokens/s go as B / (B + h), so h = 0 gains nothing from a larger batch; and with
the length of a study, as long as was recorded, a fourth and a sixteenth of that. Every candidate may train for as long as
the baseline needs; its seconds are those of the hardware, timed with noise. The stages `train` and `learning_rate` propose,
judge and conclude as in a study; only what a run would measure is looked up. What they know before the first run, their
prior, is made of the recorded worlds (late_gain.py); here each world is judged by what the others make it.

The peers get the same candidates, learning rates, seconds and total cost: Ray's ASHA draws them at random and stops the
worse half at each rung; Optuna's TPE proposes them, its successive halving stops.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import real_grid
from late_gain import prior_of
from peer_searches import Chosen, Space, optuna_tpe, ray_asha
from world_table import World, load

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import FEWEST_STEPS
from batchscout.orchestrator.decisions.decision import Action
from batchscout.orchestrator.decisions.director import Director
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.stages.chosen import RankBatch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates import surface
from batchscout.orchestrator.stages.findings import concluded, found
from batchscout.orchestrator.stages.rates import Rate
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.orchestrator.stages.train import Gain, TrainFindings
from batchscout.orchestrator.study.events import Concluded, RunBegan
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.messages import Message
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.trainers.config import TrialConfig

WORLDS = Path(__file__).parent / "worlds"
HARDWARE = (0, 16, 128)
LENGTHS = (1, 4, 16)
"""A study is this many times shorter than the recorded runs allow."""
MARGIN = 1.15
"""A batch takes part with so many times the fewest steps, lest the timing's noise leave it out."""
MODE = Mode("none", compile=True, precision="float32")
# The study's own learning rate is off by up to so many factors of 2: it is what a user brings, not the best.
RATE_OFF = 1.0
ROUNDS = 5
NUM_BINS = 5


@dataclass(frozen=True)
class Case:
    """A world on some hardware, within what was recorded."""

    world: World
    hardware: int
    length: int
    reference: int
    """The effective batch of the baseline."""
    budgets: dict[int, int]
    """The samples of each candidate batch at equal time, by the true speed."""

    @property
    def name(self) -> str:
        return name_of(self.world, self.hardware, self.length)

    def speed(self, batch: int) -> float:
        return 1000.0 * batch / (batch + self.hardware)

    @property
    def seconds(self) -> float:
        """What every candidate's run takes."""
        return self.budgets[self.reference] / self.speed(self.reference)

    def mean_loss(self, batch: int, rate: float) -> float:
        """Return the final loss at equal time, as the mean over the seeds; infinite where a seed diverged."""
        budget = self.budgets[batch]
        losses = [self.world.loss(batch, rate, seed, budget, budget) for seed in self.world.seeds()]
        return math.inf if None in losses else statistics.fmean(loss for loss in losses if loss is not None)

    def table(self) -> dict[tuple[int, float], float]:
        """Return the final loss of every batch and recorded rate."""
        return {(batch, rate): self.mean_loss(batch, rate) for batch in self.budgets for rate in rates_of(self, batch)}

    def seed_deviation(self) -> float:
        """Return the deviation of a run's final loss from seed to seed, pooled over each batch's best rate."""
        best = {
            batch: min(rates_of(self, batch), key=lambda rate: self.mean_loss(batch, rate)) for batch in self.budgets
        }
        spreads = []
        for batch, rate in best.items():
            budget = self.budgets[batch]
            losses = [self.world.loss(batch, rate, seed, budget, budget) for seed in self.world.seeds()]
            spreads.append(statistics.variance([loss for loss in losses if loss is not None]))
        return math.sqrt(statistics.fmean(spreads))


def name_of(world: World, hardware: int, length: int) -> str:
    return f"{world.name}, h={hardware}, 1/{length}"


def rates_of(case: Case, batch: int) -> list[float]:
    """Return the recorded rates that the batch can be asked for at its budget."""
    kept = []
    for rate in case.world.rates(batch):
        try:
            case.world.loss(batch, rate, case.world.seeds()[0], case.budgets[batch], case.budgets[batch])
        except ValueError:
            continue
        kept.append(rate)
    return kept


def case_of(world: World, hardware: int, length: int = 1) -> Case:
    """Return the world on this hardware: the fastest batch trains on the most samples that were recorded, or a `length`th
    of them, and a batch whose samples in that time were not recorded takes no part. Raises ValueError where fewer than two
    are left."""
    batches = world.batches()
    most = min(world.budgets(batch)[-1] * (1 + hardware / batch) for batch in batches) / length
    # `most` is the time, in which batch B trains on most / (1 + h / B) samples, that none outgrows its recorded budgets
    budgets = {batch: round(most / (1 + hardware / batch) / batch) * batch for batch in batches}
    within = {b: n for b, n in budgets.items() if world.budgets(b)[0] <= n <= world.budgets(b)[-1]}
    kept = {b: n for b, n in within.items() if n >= MARGIN * FEWEST_STEPS * b}
    if len(kept) < 2:
        raise ValueError(
            f"world {name_of(world, hardware, length)}: of the batches {batches} only {list(kept)} have their samples at equal time "
            "within what was recorded; record more budgets"
        )
    ordered = sorted(kept)
    return Case(world, hardware, length, ordered[(len(ordered) - 1) // 2], kept)


@dataclass(frozen=True)
class Answer:
    """What one side chose in one case."""

    batch: int
    rate: float
    p_best: float | None
    cost: float
    """In full runs."""
    wait: float
    """How long people wait for it, in the time that a full run takes."""
    cut_best: bool
    """True if of all runs that it began it cut the one that would have ended best, at a rung or for its speed."""
    p_best_of: Mapping[int, float] = field(default_factory=dict)
    """What it claimed of every batch."""
    gain: Gain | None = None
    """What it claimed to gain over the baseline's batch."""
    most_to_gain: float | None = None
    """What it claimed that no other batch gains more than."""
    refused: tuple[str, ...] = ()


def study_of(case: Case, rate: float, pruner: str = "asha") -> StudyConfig:
    return parse_study(
        {
            "name": "replayed",
            "model": {"target": "gpt"},
            "data": {"target": "python_stdlib"},
            "optimizer": {"lr": rate, "reference_batch_size": case.reference},
            "sample_budget": case.budgets[case.reference],
            "stages": [
                {"type": "train", "pruner": {"type": pruner}},
                {"type": "learning_rate", "pruner": {"type": pruner}},
            ],
        },
        "the replayed study",
    )


def replay(case: Case, seed: int, timing_noise: float, num_lanes: int = 1) -> Answer:
    """Return what a study on so many lanes answers in this case. seed: of the user's learning rate, the timing and the
    runs."""
    chance = random.Random(f"{case.name} {seed}")
    best = min(rates_of(case, case.reference), key=lambda rate: case.mean_loss(case.reference, rate))
    config = study_of(case, best * 2 ** chance.uniform(-RATE_OFF, RATE_OFF))
    player = Player(case, case.world.seeds()[seed % len(case.world.seeds())], num_lanes)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="replay"))
        journal.append(Concluded(**asdict(concluded(_timed(case, chance, timing_noise), ""))))
        for keys in config.stages:
            player.play(Director(StageContext(keys, config, journal.study), journal, Observer(), num_lanes))
        return _answer(case, journal.study, player)


def _timed(case: Case, chance: random.Random, timing_noise: float) -> ThroughputFindings:
    """Return what the throughput stage would find: every batch's rate as the mean of some noisy rounds."""
    rates = []
    for batch in case.budgets:
        error = chance.gauss(0, timing_noise / math.sqrt(ROUNDS))
        speed = case.speed(batch) * math.exp(error)
        width = 1 + 2 * timing_noise / math.sqrt(ROUNDS)
        rates.append(Rate(batch, 1, batch, MODE, speed, speed / width, speed * width, ROUNDS))
    fastest = max(rates, key=lambda rate: rate.samples_per_second)
    batch = RankBatch(fastest.micro_batch_size, 1)
    return ThroughputFindings(None, None, None, {}, batch, batch, rates=tuple(rates))


class Player:
    """Plays the runs that a Director wants on some lanes, from the world, by a clock of its own."""

    def __init__(self, case: Case, seed: int, num_lanes: int) -> None:
        self.case, self.seed, self.num_lanes = case, seed, num_lanes
        self.now = 0.0
        """The seconds that the study took so far."""
        self.trained: dict[str, float] = {}
        """The share of its run that each trial has trained."""
        self.refused: list[str] = []
        self._runs: dict[str, Iterator[Message]] = {}
        self._coming: list[tuple[float, int, str, Message]] = []
        """What is heard next of every busy lane: when, after how many others were begun, of which trial, what."""
        self._num_heard = itertools.count()

    def play(self, director: Director) -> None:
        while True:
            director.advance()
            while len(self._coming) < self.num_lanes and (trial := director.next_trial(self._num_held(director))):
                director.on_started(trial.id)
                self._runs.setdefault(trial.id, self._run(trial))
                self._go_on(trial.id)
            if not self._coming:
                break
            self.now, _, trial_id, message = heapq.heappop(self._coming)
            if director.on_message(trial_id, message).action is Action.GO_ON:
                self._go_on(trial_id)
        assert director.is_finished()
        director.conclude()

    def _num_held(self, director: Director) -> int:
        """Return how many lanes are busy with a trial that was cut meanwhile."""
        trials = director.study.trials
        return sum(trials[trial_id].state.ended for _, _, trial_id, _ in self._coming)

    def _go_on(self, trial_id: str) -> None:
        before = self.trained.get(trial_id, 0.0)
        message = next(self._runs[trial_id], None)
        if message is not None:
            seconds = (self.trained.get(trial_id, 0.0) - before) * self.case.seconds
            heapq.heappush(self._coming, (self.now + seconds, next(self._num_heard), trial_id, message))

    def _run(self, trial: Trial) -> Iterator[Message]:
        config, before = trial.config, 0
        for samples in sorted({*config.rungs, *config.evaluations, config.sample_budget}):
            try:
                loss = self.loss(config, samples)
            except ValueError as refused:
                self.refused.append(str(refused))
                yield Message({}, outcome="failed", reason=str(refused))
                return
            self.trained[trial.id] = samples / config.sample_budget
            metrics = {"samples_seen": samples, "val_loss": math.nan if loss is None else loss}
            batch = config.effective_batch_size
            metrics |= {
                "train_seconds": samples / self.case.speed(batch),
                "step_seconds": batch / self.case.speed(batch),
            }
            rungs = tuple(rung for rung in config.rungs if before < rung <= samples)
            before = samples
            if samples == config.sample_budget:
                yield Message(metrics, rungs, outcome="complete")
            else:
                yield Message(metrics, rungs, evaluated=True)

    def loss(self, config: TrialConfig, samples: int) -> float | None:
        budgets = self.case.world.budgets(config.effective_batch_size)
        budget = min(max(config.sample_budget, budgets[0]), budgets[-1])  # the timing's noise may lead just beyond
        seen = budget * samples / config.sample_budget
        return self.case.world.loss(config.effective_batch_size, config.learning_rate, self.seed, budget, seen)


def _answer(case: Case, study: Study, player: Player) -> Answer:
    trained = found(study, TrainFindings)
    winner = study.trials[stage_winner(study)]
    p_best_of = {one.effective_batch_size: one.p_best for one in (trained.batches if trained else ())}
    return Answer(
        winner.config.effective_batch_size,
        winner.config.learning_rate,
        p_best_of[winner.config.effective_batch_size],
        sum(player.trained.values()),
        player.now / case.seconds,
        _cut_best(case, study, player),
        p_best_of,
        trained.gain_over_baseline if trained else None,
        trained.most_to_gain if trained else None,
        tuple(player.refused),
    )


def stage_winner(study: Study) -> str:
    for stage in ("learning_rate", "train"):
        findings = study.conclusions[stage].findings if stage in study.conclusions else None
        if isinstance(findings, dict):
            return str(findings["winner"])
    raise AssertionError("no stage has chosen a trial")


def _cut_best(case: Case, study: Study, player: Player) -> bool:
    """True if the run that would have ended best of all that began was cut."""
    ends = {}
    for trial in study.trials.values():
        loss = player.loss(trial.config, trial.config.sample_budget) if trial.id in player.trained else None
        if loss is not None:
            ends[trial.id] = loss
    best = study.trials[min(ends, key=lambda name: ends[name])]
    return best.state is TrialState.PRUNED


@dataclass(frozen=True)
class Judged:
    """An answer held against the world's truth."""

    right: bool
    regret: float
    """The excess of the chosen configuration's loss over the best, relative."""
    batch_right: bool
    cost_ratio: float
    """Against running every batch at every recorded rate with every seed once, which is what the truth took."""
    claims: tuple[tuple[float, bool], ...]
    """Of every batch: the claimed probability that none is better, and whether none is."""
    gain_covered: bool | None
    """Whether the interval of the gain over the baseline's batch, which claims 0.9, holds the true one."""
    bound_holds: bool | None
    """Whether no other batch gains more over the chosen one than was claimed with 0.9."""
    answer: Answer


def judge(case: Case, answer: Answer) -> Judged:
    table = case.table()
    best = min(table.values())
    spread = case.seed_deviation()
    loss = case.mean_loss(answer.batch, answer.rate)
    of_batch = {batch: min(loss for (of, _), loss in table.items() if of == batch) for batch in case.budgets}
    grid = len(table) * len(case.world.seeds())
    return Judged(
        loss <= best + spread,
        (loss - best) / abs(best),
        of_batch[answer.batch] <= best + spread,
        answer.cost / grid,
        tuple((claimed, of_batch[batch] <= best + spread) for batch, claimed in answer.p_best_of.items()),
        _gain_covered(answer.gain, of_batch[case.reference] - of_batch[answer.batch]),
        None if answer.most_to_gain is None else of_batch[answer.batch] - best <= answer.most_to_gain,
        answer,
    )


def _gain_covered(claimed: Gain | None, true: float) -> bool | None:
    return None if claimed is None else claimed.low <= true <= claimed.high


PEERS: dict[str, Callable[[Space, random.Random], Chosen]] = {"ray_asha": ray_asha, "optuna": optuna_tpe}


def of_peer(case: Case, search: Callable[[Space, random.Random], Chosen], answer: Answer, seed: int) -> Answer | None:
    """Return what a peer chooses at the cost of our answer, with the same seed's runs; None where it ended no run."""
    run_seed = case.world.seeds()[seed % len(case.world.seeds())]

    def loss(batch: int, rate: float, share: float) -> float:
        budget = case.budgets[batch]
        known = case.world.loss(batch, rate, run_seed, budget, share * budget)
        return math.inf if known is None else known

    space = Space({batch: tuple(rates_of(case, batch)) for batch in case.budgets}, loss, answer.cost)
    chosen = search(space, random.Random(f"{case.name} {seed}"))
    return Answer(chosen[0], chosen[1], None, answer.cost, answer.cost, cut_best=False) if chosen else None


def main() -> None:
    arguments = _arguments()
    if arguments.real:
        return real_grid.main(
            [str(arguments.real), "--device", arguments.device, *(["--quick"] if arguments.quick else [])]
        )
    cases, refused = cases_of([load(path) for path in arguments.tables])
    repeats = 2 if arguments.quick else 8
    lanes, *more_lanes = arguments.lanes
    print(f"{len(cases)} cases, each with {repeats} draws of the study's learning rate, timing and seed; {lanes} lanes")
    every: list[Judged] = []
    worlds: dict[str, list[Judged]] = {}
    peers: dict[str, list[Judged | None]] = {name: [] for name in PEERS}
    recorded = [load(path) for path in sorted(WORLDS.glob("*.jsonl"))]
    for case in cases:
        judged = judged_by_others(case, recorded, repeats, arguments.timing_noise, lanes)
        _print_case(case, judged)
        every += judged
        worlds.setdefault(case.world.name, []).extend(judged)
        for name, search in PEERS.items():
            answers = [of_peer(case, search, one.answer, seed) for seed, one in enumerate(judged)]
            peers[name] += [judge(case, answer) if answer else None for answer in answers]
    print(f"left out, as fewer than two batches lie within what was recorded: {'; '.join(refused)}")
    num_beyond = sum(len(one.answer.refused) for one in every)
    print(f"{num_beyond} runs were asked for at learning rates beyond those recorded, and failed")
    line = summary(every) | {name: _of_peer(found) for name, found in peers.items()}
    line["by_world"] = {name: summary(some) for name, some in worlds.items()}
    line["by_lanes"] = {
        number: summary([
            one for case in cases for one in judged_by_others(case, recorded, repeats, arguments.timing_noise, number)
        ])
        for number in more_lanes
    }  # fmt: skip
    print(json.dumps(line))


def judged_by_others(
    case: Case, recorded: Sequence[World], repeats: int, timing_noise: float = 0.05, lanes: int = 1
) -> list[Judged]:
    """Return how the study does in a case, with the prior that the recorded worlds but the case's own make."""
    surface.PRIOR = prior_of([world for world in recorded if world.name != case.world.name])
    return [judge(case, replay(case, seed, timing_noise, lanes)) for seed in range(repeats)]


def _of_peer(judged: Sequence[Judged | None]) -> dict[str, float]:
    """Return how often a peer is right; a search that ended no run is wrong, and has no regret to average."""
    known = [one for one in judged if one is not None]
    return {
        "p_right": round(sum(one.right for one in known) / len(judged), 4),
        "p_batch_right": round(sum(one.batch_right for one in known) / len(judged), 4),
        "regret": _mean(one.regret for one in known),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="nothing is trained: makes no difference"
    )
    parser.add_argument("--quick", action="store_true", help="fewer draws: to see that it runs, not to quote it")
    parser.add_argument("--tables", type=Path, nargs="+", default=sorted(WORLDS.glob("*.jsonl")), metavar="FILE")
    parser.add_argument("--timing-noise", type=float, default=0.05, help="deviation of one timing, relative")
    parser.add_argument(
        "--lanes",
        type=int,
        nargs="+",
        default=[1],
        help="how many runs train at a time; further numbers are replayed, too",
    )
    parser.add_argument("--real", type=Path, nargs="?", const=Path("runs/quickstart"), metavar="RUN_DIR")
    return parser.parse_args()


def cases_of(worlds: Sequence[World]) -> tuple[list[Case], list[str]]:
    """Return the cases, and the names of those that cannot be made."""
    cases, refused = [], []
    for world, hardware, length in itertools.product(worlds, HARDWARE, LENGTHS):
        try:
            cases.append(case_of(world, hardware, length))
        except ValueError:
            refused.append(name_of(world, hardware, length))
    return cases, refused


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    claimed = [one.answer.p_best or 0.0 for one in judged]
    batch_right = [float(one.batch_right) for one in judged]
    return {
        "p_right": _mean(one.right for one in judged),
        "p_batch_right": _mean(batch_right),
        "p_winner_cut": _mean(one.answer.cut_best for one in judged),
        "regret": _mean(one.regret for one in judged),
        "cost_ratio": _mean(one.cost_ratio for one in judged),
        "wait": _mean(one.answer.wait for one in judged),
        "calibration": round(abs(statistics.fmean(claimed) - statistics.fmean(batch_right)), 4),
        "calibration_error": calibration_error([claim for one in judged for claim in one.claims]),
        "gain_covered": _share(one.gain_covered for one in judged),
        "bound_holds": _share(one.bound_holds for one in judged),
    }


def _share(found: Iterable[bool | None]) -> float | None:
    """Return how many are true of those that are known; None where none is."""
    known = [one for one in found if one is not None]
    return _mean(known) if known else None


def calibration_error(claims: Sequence[tuple[float, bool]]) -> float | None:
    """Return by how much the claimed probabilities are off, claims of about the same probability taken together and weighted
    by their number (the expected calibration error; Guo et al. 2017, arXiv 1706.04599); None without claims."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for claim in claims:
        bins.setdefault(min(int(claim[0] * NUM_BINS), NUM_BINS - 1), []).append(claim)
    off = [abs(sum(claimed - is_true for claimed, is_true in alike)) for alike in bins.values()]
    return round(sum(off) / len(claims), 4) if claims else None


def _mean(values: Any) -> float:
    return round(statistics.fmean(map(float, values)), 4)


def _print_case(case: Case, judged: Sequence[Judged]) -> None:
    table = case.table()
    (batch, rate), best = min(table.items(), key=lambda item: item[1])
    chosen = ", ".join(f"{one.answer.batch}@{one.answer.rate:.2g}{'' if one.right else '!'}" for one in judged)
    print(
        f"{case.name}: best {batch}@{rate:.2g} ({best:.4f}); chosen {chosen}; {json.dumps(summary(judged))}", flush=True
    )


if __name__ == "__main__":
    main()
