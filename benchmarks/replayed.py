"""A study replayed: its decision code as it is, on a case in which every run's loss can be looked up instead of trained.

A case is a world, recorded (recorded_worlds.py) or made (made_worlds.py), on some hardware. The study is told how fast the
batches are, timed with noise, as its `throughput` stage would have found it. Then `train` proposes, judges and concludes as in
any study; a `Player` stands for Ray and the trainers.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from peer_searches import Chosen

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.decisions.decision import Action
from batchscout.orchestrator.decisions.director import Director
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.findings import concluded, found
from batchscout.orchestrator.stages.horizons import HorizonsFindings
from batchscout.orchestrator.stages.rates import Rate
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.orchestrator.stages.train.findings import TimeGain, TrainFindings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Concluded, RunBegan
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.messages import Message
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.trainers.config import TrialConfig

MODE = Mode("none", compile=True, precision="float32")
ROUNDS = 5
"""A batch's speed is the mean of so many timings."""


class Case(Protocol):
    """What a study can be replayed on, and what is true of it."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """What cases are put together under."""
        ...

    @property
    def budgets(self) -> Mapping[int, int]:
        """The samples of every effective batch at equal time, by its true speed."""
        ...

    @property
    def reference(self) -> int:
        """The user's own effective batch."""
        ...

    @property
    def hardware(self) -> float:
        """Samples/s go as B / (B + hardware)."""
        ...

    @property
    def timing_noise(self) -> float:
        """The deviation of one timing, relative."""
        ...

    def user_rate(self, seed: int) -> float:
        """Return the learning rate that the user has at the reference batch."""
        ...

    def range_of(self, batch: int) -> tuple[float, float] | None:
        """Return the lowest and the highest learning rate that can be looked up; None where any can."""
        ...

    def grid(self, batch: int) -> tuple[float, ...]:
        """Return the learning rates that the peers choose from, the lowest first."""
        ...

    def loss(self, batch: int, rate: float, seed: int, share_of_run: float, time_share: float = 1.0) -> float | None:
        """Return what a run measures after a share of its samples; None where it has diverged by then.

        time_share: how long the whole run is, as a share of the training time that every batch has. Raises ValueError where
        the rate lies beyond `range_of`.
        """
        ...

    def mean_loss(self, batch: int, rate: float, time_share: float = 1.0) -> float:
        """Return the final loss, without noise, of a run with a schedule of its own over this share of the training time;
        infinite where it diverges. A rate beyond `range_of` counts as the nearest within it."""
        ...

    def best_rate(self, batch: int) -> float: ...

    def best(self) -> tuple[int, float]:
        """Return the best batch and its best rate."""
        ...


def speed_of(case: Case, batch: int) -> float:
    """Return the true samples/s."""
    return 1000.0 * batch / (batch + case.hardware)


def seconds_of(case: Case) -> float:
    """Return what every batch's run takes."""
    return case.budgets[case.reference] / speed_of(case, case.reference)


@dataclass(frozen=True)
class Answer:
    """What a study, or a peer, came to in one case, and what it took."""

    chosen: Chosen
    """The effective batch and its learning rate; None where there is no answer."""
    runs: int
    """Those that began."""
    cost: float
    """The seconds of training, in full runs: one that was stopped counts by its share."""
    wait: float
    """The seconds until the answer, in full runs: less than the cost where several lanes train."""
    saved: float = 0.0
    """The share of the training seconds that stopping runs at rungs, or for their speed, saved."""
    cut_best: bool = False
    """True if of all runs that it began it stopped the one that would have ended best."""
    p_best: Mapping[int, float] = field(default_factory=dict)
    """What it claims of every batch."""
    time: TimeGain | None = None
    """What it claims to save of the time of the user's own setting."""
    regret_time: float | None = None
    """The share of the training time that it claims to waste."""
    is_decided: bool = False
    """Whether it calls itself so: another setting than the user's, known well enough."""
    real_run: HorizonsFindings | None = None
    """What it says of a longer run, where it was asked for one."""
    num_refused: int = 0
    """Runs that were asked for at rates beyond `range_of`, and failed."""


def replay(case: Case, seed: int, timing_noise: float, num_lanes: int = 1, real_run: float | None = None) -> Answer:
    """Return what a study on so many lanes answers in this case.

    seed: of the user's learning rate, the timings and the runs. timing_noise: the deviation of one timing, relative. real_run: the
    length of the run that the answer is for, in times of the study's.
    """
    config = _study_of(case, case.user_rate(seed), real_run)
    player = Player(case, seed, num_lanes)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="replay"))
        journal.append(Concluded(**asdict(concluded(_timed(case, seed, timing_noise), ""))))
        for keys in config.stages:
            player.play(Director(StageContext(keys, config, journal.study), journal, (), num_lanes))
        return _answer(case, config, journal.study, player)


def _study_of(case: Case, rate: float, real_run: float | None) -> StudyConfig:
    """Return the study of a user who has this learning rate at the reference batch."""
    longer = {} if real_run is None else {"real_run": {"samples": round(real_run * case.budgets[case.reference])}}
    return parse_study(
        {
            **longer,
            "name": "replayed",
            "model": {"target": "gpt"},
            "data": {"target": "python_stdlib"},
            "optimizer": {"lr": rate, "reference_batch_size": case.reference},
            "sample_budget": case.budgets[case.reference],
            "stages": [{"type": "train", "pruner": {"type": "asha"}}],
        },
        "the replayed study",
    )


def _timed(case: Case, seed: int, timing_noise: float) -> ThroughputFindings:
    """Return what the throughput stage would find: every batch's rate as the mean of some noisy rounds."""
    chance, deviation = random.Random(f"{case.name} {seed} timed"), timing_noise / math.sqrt(ROUNDS)
    rates = []
    for batch in sorted(case.budgets):
        speed = speed_of(case, batch) * math.exp(chance.gauss(0, deviation))
        width = 1 + 2 * deviation
        rates.append(Rate(batch, 1, batch, MODE, speed, speed / width, speed * width, ROUNDS))
    return ThroughputFindings(None, None, None, {}, rates=tuple(rates))


class Player:
    """Plays the runs that a Director wants on some lanes, from the case, by a clock of its own."""

    def __init__(self, case: Case, seed: int, num_lanes: int) -> None:
        self.case, self.seed, self.num_lanes = case, seed, num_lanes
        self.now = 0.0
        """The seconds that the study took so far."""
        self.trained: dict[str, int] = {}
        """The samples that each trial has trained on."""
        self.num_refused = 0
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
                self._go_on(trial)
            if not self._coming:
                break
            self.now, _, trial_id, message = heapq.heappop(self._coming)
            if director.on_message(trial_id, message).action is Action.GO_ON:
                self._go_on(director.study.trials[trial_id])
        assert director.is_finished()
        director.conclude()

    def loss(self, config: TrialConfig, samples: int) -> float | None:
        """Return what the run measures after so many samples. What its batch was timed at decides how long it is."""
        batch, budget = config.effective_batch_size, config.sample_budget
        time_share = budget / self.case.budgets[batch]
        return self.case.loss(batch, config.learning_rate, self.seed, samples / budget, time_share)

    def seconds(self, trial: Trial, samples: int) -> float:
        return samples / speed_of(self.case, trial.config.effective_batch_size)

    def _num_held(self, director: Director) -> int:
        """Return how many lanes are busy with a trial that was cut meanwhile."""
        trials = director.study.trials
        return sum(trials[trial_id].state.ended for _, _, trial_id, _ in self._coming)

    def _go_on(self, trial: Trial) -> None:
        before = self.trained.get(trial.id, 0)
        message = next(self._runs[trial.id], None)
        if message is not None:
            heard_at = self.now + self.seconds(trial, self.trained.get(trial.id, 0) - before)
            heapq.heappush(self._coming, (heard_at, next(self._num_heard), trial.id, message))

    def _run(self, trial: Trial) -> Iterator[Message]:
        config, before = trial.config, 0
        for samples in sorted({*config.rungs, *config.evaluations, config.sample_budget}):
            try:
                loss = self.loss(config, samples)
            except ValueError as refused:
                self.num_refused += 1
                yield Message({}, outcome="failed", reason=str(refused))
                return
            self.trained[trial.id] = samples
            metrics = {
                "samples_seen": samples,
                "val_loss": math.nan if loss is None else loss,
                "train_seconds": self.seconds(trial, samples),
                "step_seconds": self.seconds(trial, config.effective_batch_size),
            }
            rungs = tuple(rung for rung in config.rungs if before < rung <= samples)
            before = samples
            if samples == config.sample_budget:
                yield Message(metrics, rungs, outcome="complete")
            else:
                yield Message(metrics, rungs, evaluated=True)


def _answer(case: Case, config: StudyConfig, study: Study, player: Player) -> Answer:
    findings = found(study, TrainFindings)
    winner = study.trials[findings.winner].config if findings else None
    trials = [study.trials[name] for name in player.trained]
    spent = sum(player.seconds(trial, player.trained[trial.id]) for trial in trials)
    saved = sum(
        player.seconds(trial, trial.config.sample_budget - player.trained[trial.id])
        for trial in trials
        if _is_cut(trial)
    )
    return Answer(
        (winner.effective_batch_size, winner.learning_rate) if winner else None,
        runs=len(trials),
        cost=spent / seconds_of(case),
        wait=player.now / seconds_of(case),
        saved=saved / (spent + saved) if spent else 0.0,
        cut_best=_cut_best(trials, player),
        p_best={one.effective_batch_size: one.p_best for one in findings.batches} if findings else {},
        time=findings.time if findings else None,
        regret_time=findings.regret_time if findings else None,
        is_decided=bool(findings and findings.is_decided(config.useful_gain)),
        real_run=found(study, HorizonsFindings),
        num_refused=player.num_refused,
    )


def _is_cut(trial: Trial) -> bool:
    return trial.state is TrialState.PRUNED and trial.cause is not Cause.DIVERGED


def _cut_best(trials: list[Trial], player: Player) -> bool:
    """True if the run that would have ended best of all that began was stopped."""
    ends = [(player.loss(trial.config, trial.config.sample_budget), trial) for trial in trials]
    known = [(loss, trial) for loss, trial in ends if loss is not None]
    return bool(known) and _is_cut(min(known, key=lambda end: end[0])[1])
