"""What the frontier tries: probes, then timings of the finalists, then the best once more in a fresh process."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from orchestrator.config.stages import Frontier
from orchestrator.stages.context import Setting
from orchestrator.stages.frontier.pareto import fastest
from orchestrator.stages.frontier.search import Found, Probe, next_probe
from orchestrator.stages.mode import Mode
from orchestrator.study.state import Proposal, Study, Trial, TrialState
from trainers.peak_memory import Line, PeakMemory

# Optimizer steps of a timing, of which the first few are not timed.
TIMED_STEPS = 8


class Key(NamedTuple):
    """A size in a mode: what is probed, timed, verified and chosen."""

    mode: Mode
    micro_batch_size: int


def propose(stage: Frontier, setting: Setting, study: Study) -> list[Proposal]:
    """Everything so far and what comes next; the same for the same journal."""
    known = SoFar(stage, setting, study)
    proposals = known.probes()
    for further in (known.timings, known.verifications):
        if not known.all_ended(proposals):
            break
        proposals += further()
    return proposals


def modes(stage: Frontier, setting: Setting) -> list[Mode]:
    """What is compared; other lengths of the samples last, and only to show what they cost."""
    precisions = stage.precision or (setting.study.precision,)
    kinds = stage.cross_entropy or ("whole",)
    lengths = (None, *(length for length in stage.seq_len if length != setting.study.data.kwargs.get("seq_len")))
    axes = itertools.product(lengths, stage.activation_checkpointing, stage.compile, precisions, kinds)
    return [Mode(mode, compiled, precision, kind, length) for length, mode, compiled, precision, kind in axes]


def ladder(smallest: int, largest: int) -> list[int]:
    """Doubling up to the largest, and the round numbers just below it that kernels are made for."""
    doubled = [smallest * 2**i for i in range(largest.bit_length()) if smallest * 2**i <= largest]
    round_below = [largest - largest % unit for unit in (2, 4, 8, 16, 32, 64) if 4 * unit <= largest]
    return sorted({*doubled, *(size for size in round_below if size >= smallest), largest})


def predicted_modes(stage: Frontier, setting: Setting, facts: Mapping[str, Any]) -> list[Mode]:
    """What the frontier may run: its modes, and those of its finalists with cross-entropy in chunks."""
    compared = modes(stage, setting)
    chunked = [replace(mode, cross_entropy="chunked") for mode in compared if mode.seq_len is None]
    return compared + (chunked if _tries_chunks(stage, facts) else [])


def prediction_key(mode: Mode) -> str:
    """Compiled or not, the prediction is that of eager code."""
    return f"{replace(mode, compile=True)}, {mode.precision}"


def _tries_chunks(stage: Frontier, facts: Mapping[str, Any]) -> bool:
    return not stage.cross_entropy and bool(facts.get("chunked_cross_entropy"))


@dataclass(frozen=True)
class SoFar:
    """The stage as far as the journal knows it."""

    stage: Frontier
    setting: Setting
    study: Study

    # Probes

    def probes(self) -> list[Proposal]:
        return [self._probe(Key(mode, size)) for mode in modes(self.stage, self.setting) for size in self.sizes(mode)]

    def sizes(self, mode: Mode) -> list[int]:
        """The search as far as it has come; when it is over, those below what it found."""
        searched, end = self.search(mode)
        if end is None or end.micro_batch_size is None:
            return searched
        return searched + [size for size in ladder(self.stage.smallest, end.micro_batch_size) if size not in searched]

    def search(self, mode: Mode) -> tuple[list[int], Found | None]:
        """(the sizes that the search has asked for, what it found; None while the last has not ended or says nothing).

        The smallest size comes first, wherever the limit is: its memory and its speed are what all else is held against.
        """
        trials, probes, sizes = list[Trial](), list[Probe](), [self.stage.smallest]
        while True:
            trial = self.probe_of(Key(mode, sizes[-1]))
            if trial is None or not trial.state.ended or says_nothing(trial):
                return sizes, None
            trials.append(trial)
            probes.append(self._outcome(trial))
            bounds = {"smallest": self.stage.smallest, "largest": self._largest(trials)}
            predicted = self._predicted(mode)
            line = predicted.lines[-1] if predicted else None  # the one of large sizes, where the limit is
            step = next_probe(probes, self.capacity_bytes(), line, **bounds)
            if isinstance(step, Found):
                return sizes, step
            sizes.append(step.micro_batch_size)

    def probe_of(self, key: Key) -> Trial | None:
        return self.study.trials.get(self._name(key))

    def _outcome(self, trial: Trial) -> Probe:
        ran = trial.state is not TrialState.OUT_OF_MEMORY
        peak = trial.metrics.get("peak_memory_bytes") if ran else None
        return Probe(trial.config.micro_batch_size, self.fits(trial), peak)

    def fits(self, trial: Trial) -> bool:
        """It ran, and left the headroom free."""
        capacity = self.capacity_bytes()
        return trial.state is TrialState.COMPLETE and (capacity is None or peak_of(trial) <= capacity)

    def _largest(self, trials: list[Trial]) -> int:
        """No larger than the data, as a step must not see a sample twice, and no slower than max_step_seconds."""
        num_samples = self.study.facts.get("num_train_samples")
        of_data = num_samples // self.setting.study.world_size if num_samples else self.stage.largest
        return max(self.stage.smallest, min(self.stage.largest, of_data, self.slowest(trials)))

    def slowest(self, trials: list[Trial]) -> int:
        """The size whose step would take max_step_seconds at the best rate so far."""
        rates = [t.metrics["step_seconds"] / t.config.micro_batch_size for t in trials if "step_seconds" in t.metrics]
        return int(self.stage.max_step_seconds / min(rates)) if rates and min(rates) > 0 else self.stage.largest

    def _probe(self, key: Key) -> Proposal:
        config = self.setting.short_trial(
            self.study,
            key.micro_batch_size,
            2,  # the gradient that is held while the next micro-batch runs counts too
            self.stage.steps,
            mode=key.mode,
            dynamic_micro_batch=True,
            longest_samples=True,
            evaluation_samples=key.micro_batch_size * self.setting.study.world_size,
        )
        return Proposal(self._name(key), "frontier", config, expected=self._expected(key))

    def _expected(self, key: Key) -> dict[str, float]:
        predicted = self._predicted(key.mode)
        return {"predicted_memory_bytes": predicted.bytes_at(key.micro_batch_size)} if predicted else {}

    def _predicted(self, mode: Mode) -> PeakMemory | None:
        """What fake tensors say of the mode, run eagerly."""
        lines = self.study.facts.get("predicted_memory", {}).get(prediction_key(mode))
        return PeakMemory(tuple(Line(*line) for line in lines)) if lines else None

    def fitting(self, seq_len: int | None = None) -> dict[Key, Trial]:
        """The probes that fit, with samples of this length, in the order of the study file's modes."""
        wanted = [mode for mode in modes(self.stage, self.setting) if mode.seq_len == seq_len]
        keys = [Key(mode, size) for mode in wanted for size in self.sizes(mode)]
        return {key: trial for key in keys if (trial := self.probe_of(key)) and self.fits(trial)}

    # Timings

    def timings(self) -> list[Proposal]:
        """Every finalist once a round, in turns; nothing where there is only one."""
        finalists = self.finalists()
        if len(finalists) < 2:
            return []
        return [self._static(key, f"round{turn}") for turn in self._turns() for key in finalists]

    def finalists(self) -> list[Key]:
        """The fastest probes that fit, and the fastest of all with cross-entropy in chunks where that can be had."""
        fitting = self.fitting()
        keys = sorted(fitting, key=lambda key: -rate_of(fitting[key]))[: self.stage.finalists]
        if keys and _tries_chunks(self.stage, self.study.facts):
            keys.append(keys[0]._replace(mode=replace(keys[0].mode, cross_entropy="chunked")))
        return keys

    def _turns(self) -> range:
        return range(1, self.stage.rounds + 1)

    def rounds(self, key: Key) -> list[float]:
        """Its tokens/s in every round; empty where it was not timed in all of them."""
        trials = [self.study.trials.get(self._name(key, f"round{turn}")) for turn in self._turns()]
        done = [trial for trial in trials if trial is not None and trial.state is TrialState.COMPLETE]
        return [rate_of(trial) for trial in done] if len(done) == self.stage.rounds else []

    # Verification

    def verifications(self) -> list[Proposal]:
        """The best in a fresh process; where it does not fit there, the next best."""
        proposals: list[Proposal] = []
        for key in self._by_preference():
            proposals.append(self._static(key, "verified", role="once more, in a fresh process", fresh=True))
            trial = self.study.trials.get(proposals[-1].id)
            if trial is None or not trial.state.ended or self.fits(trial):
                break
        return proposals

    def verified(self) -> Key | None:
        """The finalist that fitted in a fresh process."""
        verifications = {key: self.study.trials.get(self._name(key, "verified")) for key in self._by_preference()}
        return next((key for key, trial in verifications.items() if trial and self.fits(trial)), None)

    def _by_preference(self) -> list[Key]:
        """The finalists that fitted every time: those tied for the fastest by their memory, then the others by speed; then
        all else that fitted, should none of these do so in a fresh process."""
        fitting, finalists, capacity = self.fitting(), self.finalists(), self.capacity_bytes()
        others = sorted((key for key in fitting if key not in finalists), key=lambda key: -rate_of(fitting[key]))
        if len(finalists) == 1:
            return finalists + others
        rounds = {key: rates for key in finalists if (rates := self.rounds(key))}
        rounds = {key: rates for key, rates in rounds.items() if self.most_memory(key) <= (capacity or math.inf)}
        tied = sorted(fastest(rounds), key=self.most_memory) if rounds else []
        slower = sorted((key for key in rounds if key not in tied), key=lambda key: -statistics.median(rounds[key]))
        return tied + slower + others

    def most_memory(self, key: Key) -> float:
        """Of all its trials that ran, but the verification: whom to verify is decided without."""
        trials = [trial for trial in self.trials_of(key) if not trial.fresh and "peak_memory_bytes" in trial.metrics]
        return max(map(peak_of, trials))

    def trials_of(self, key: Key) -> list[Trial]:
        """Its probe, its timings and its verification, as far as there are any."""
        names = [self._name(key), *(self._name(key, f"round{turn}") for turn in self._turns())]
        return [self.study.trials[name] for name in (*names, self._name(key, "verified")) if name in self.study.trials]

    # What all of them share

    def _static(self, key: Key, what: str, role: str = "", *, fresh: bool = False) -> Proposal:
        """A trial compiled for this size alone, as training will be; of ordinary samples where it is there to be timed."""
        evaluated = key.micro_batch_size * self.setting.study.world_size
        size, kind = (key.micro_batch_size, 2, TIMED_STEPS), {"mode": key.mode, "longest_samples": fresh}
        config = self.setting.short_trial(self.study, *size, **kind, evaluation_samples=evaluated)
        return Proposal(self._name(key, what), "frontier", config, role, fresh=fresh, expected=self._expected(key))

    def _name(self, key: Key, what: str = "") -> str:
        several = f"-{key.mode.precision}" if len(self.stage.precision) > 1 else ""
        return f"frontier-{key.mode}{several}-m{key.micro_batch_size}" + (f"-{what}" if what else "")

    def all_ended(self, proposals: list[Proposal]) -> bool:
        return all(p.id in self.study.trials and self.study.trials[p.id].state.ended for p in proposals)

    def limit_bytes(self) -> int | None:
        """Of the study file, of the host, or the GPU's memory as the ranks read it; None while nobody has."""
        given = self.setting.memory_limit_bytes(self.study)
        read = [t.metrics["device_memory_bytes"] for t in self.trials() if "device_memory_bytes" in t.metrics]
        return int(given) if given else int(min(read)) if read else None

    def capacity_bytes(self) -> float | None:
        """The limit less the headroom."""
        limit = self.limit_bytes()
        return None if limit is None else limit * (1 - self.setting.study.headroom)

    def trials(self) -> list[Trial]:
        return self.study.of_stage("frontier")


def says_nothing(trial: Trial) -> bool:
    """Whether it ended for another reason than its size."""
    of_size = trial.state is TrialState.PRUNED and trial.reason.startswith(("too_slow:", "thrashing:"))
    return not (trial.state in (TrialState.COMPLETE, TrialState.OUT_OF_MEMORY) or of_size)


def rate_of(trial: Trial) -> float:
    return trial.metrics.get("tokens_per_second", 0.0)


def peak_of(trial: Trial) -> float:
    return trial.metrics["peak_memory_bytes"]
