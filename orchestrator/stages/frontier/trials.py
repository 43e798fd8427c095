"""The frontier's trials of an operating point, in the journal or yet to be proposed: its probe, its timings and its verification."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.timing import GPU_PROBE_SECONDS, GPU_TIMING_SECONDS
from batchscout.orchestrator.stages.frontier.findings import OperatingPoint
from batchscout.orchestrator.stages.frontier.measured import peak_of
from batchscout.orchestrator.stages.frontier.modes import prediction_key
from batchscout.orchestrator.stages.probing import Cost, fastest_by_size, samples_per_second, seconds_at
from batchscout.orchestrator.stages.short_runs import short_run
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.trainers.before.peak_memory import PeakMemory
from batchscout.trainers.config import Split

# Optimizer steps of a timing, of which the first few are not timed.
TIMED_STEPS = 8
# Accumulation steps of every trial here: the gradient that is kept while the next micro-batch runs takes memory, too.
ACCUMULATED = 2


@dataclass(frozen=True)
class FrontierTrials:
    """What the journal has of the frontier's trials when this is made, and what the next ones would take."""

    context: StageContext[Frontier]

    @property
    def stage(self) -> Frontier:
        return self.context.stage

    @property
    def study(self) -> Study:
        return self.context.study

    def all(self) -> list[Trial]:
        return self.context.trials()

    def name(self, point: OperatingPoint, what: str = "") -> str:
        several = f"-{point.mode.precision}" if len(self.stage.precision) > 1 else ""
        return f"frontier-{point.mode}{several}-m{point.micro_batch_size}" + (f"-{what}" if what else "")

    def split(self, point: OperatingPoint) -> Split:
        return self.context.split(point.micro_batch_size, ACCUMULATED)

    def cost_of(self, point: OperatingPoint, steps: int) -> Cost:
        """Return what a trial of the point is expected to take, of so many optimizer steps."""
        return self.cost(point.mode, self.split(point), steps)

    def cost(self, mode: Mode, split: Split, steps: int) -> Cost:
        """Return what so many optimizer steps of a split are expected to take, at the speed of what was probed."""
        in_mode = [one for one in self.all() if one.config.activation_checkpointing == mode.activation_checkpointing]
        rates = rates_of(in_mode) or self.rates
        samples = steps * split.effective_batch_size
        size = split.micro_batch_size
        return Cost(samples / size * seconds_at(rates, size) if rates else 0.0, samples)

    @cached_property
    def rates(self) -> dict[int, float]:
        return rates_of(self.all())

    @property
    def baseline_size(self) -> int:
        """The micro-batch size that is the baseline's effective batch without accumulation."""
        return baseline_batch(self.context.config) // self.context.config.world_size

    def _run(self, point: OperatingPoint, what: str = "") -> tuple[str, float]:
        """Return (the id, the learning rate) of a trial of the point."""
        return short_run(self.context, self.name(point, what), self.split(point))

    def probe_of(self, point: OperatingPoint) -> Trial | None:
        return self.study.trials.get(self._run(point)[0])

    def timing_of(self, point: OperatingPoint, number: int) -> Trial | None:
        return self.study.trials.get(self._run(point, f"round{number}")[0])

    def verification_of(self, point: OperatingPoint) -> Trial | None:
        return self.study.trials.get(self._run(point, "verified")[0])

    def fits(self, trial: Trial) -> bool:
        """True if the trial ran, and left the headroom free."""
        capacity = self.capacity_bytes()
        return trial.state is TrialState.COMPLETE and (capacity is None or peak_of(trial) <= capacity)

    def is_refuted(self, point: OperatingPoint) -> bool:
        trial = self.verification_of(point)
        return trial is not None and trial.state.ended and not self.fits(trial)

    def limit_bytes(self) -> int | None:
        """Return the limit of study file or host, or the GPU's memory as the ranks read it; None until one has. What an earlier study's ranks
        read, when others may have had a part of it, counts until this study's own have."""
        told = [(t, bytes) for t in self.all() if (bytes := t.metric("device_memory_bytes")) is not None]
        read = [bytes for t, bytes in told if t.reused is None] or [bytes for _, bytes in told]
        return self.context.limit_bytes() or (int(min(read)) if read else None)

    def capacity_bytes(self) -> float | None:
        """Return the limit less the headroom; None if no limit is known."""
        limit = self.limit_bytes()
        return None if limit is None else limit * (1 - self.context.config.headroom)

    def predicted(self, mode: Mode) -> PeakMemory | None:
        """Return the peak memory that fake tensors predict for the mode in eager code; None if they could not follow
        it."""
        return (self.study.facts.predicted_memory or {}).get(prediction_key(mode))

    def probe(self, point: OperatingPoint) -> Proposal:
        return self._trial(
            point, steps=self.stage.steps, gpu_seconds=GPU_PROBE_SECONDS, longest_samples=True, any_size=True
        )

    def timing(self, point: OperatingPoint, number: int) -> Proposal:
        """Return the point's trial in a round, on ordinary samples."""
        return self._trial(point, f"round{number}", round=number)

    def verification(self, point: OperatingPoint) -> Proposal:
        """Return the point's trial in a fresh process, on the longest samples."""
        role = "once more, in a fresh process"
        return self._trial(point, "verified", longest_samples=True, role=role, fresh_process=True)

    def _trial(
        self,
        point: OperatingPoint,
        what: str = "",
        *,
        steps: int = TIMED_STEPS,
        gpu_seconds: float = GPU_TIMING_SECONDS,
        longest_samples: bool = False,
        any_size: bool = False,
        role: str = "",
        fresh_process: bool = False,
        round: int | None = None,
    ) -> Proposal:
        """Return a trial that is compiled for this size alone, as training will be. any_size: for every size of its mode instead."""
        name, rate = self._run(point, what)
        if name in self.study.trials:
            return self.study.trials[name].proposal
        config = self.context.short_trial(
            self.split(point),
            point.mode,
            steps,
            learning_rate=rate,
            dynamic_micro_batch=any_size,
            gpu_timing_seconds=gpu_seconds,
            longest_samples=longest_samples,
            evaluation_samples=self.context.split(point.micro_batch_size).effective_batch_size,
        )
        predicted = self.predicted(point.mode)
        return Proposal(
            name,
            "frontier",
            config,
            candidate=name,
            role=role,
            fresh_process=fresh_process,
            round=round,
            expected={"predicted_memory_bytes": predicted.bytes_at(point.micro_batch_size)} if predicted else {},
        )


def rates_of(trials: Iterable[Trial]) -> dict[int, float]:
    """Return the most samples/s, over all ranks, that a micro-batch size reached in any mode."""
    return fastest_by_size((trial.config.micro_batch_size, samples_per_second(trial)) for trial in trials)
