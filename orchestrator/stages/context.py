"""What a stage is told: its keys, the study file, and what is known of the study so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from batchscout.orchestrator.config.keys import StudyConfig, given_batch
from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Pruner, StageKeys
from batchscout.orchestrator.config.trial import (
    base_trial,
    evenly_spaced,
    optimizer_at,
    rises_until,
    scaled_learning_rate,
    warmup_samples,
)
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, Proposal, Trial
from batchscout.trainers.config import Split, TrialConfig, derive_accumulation
from batchscout.trainers.device.machine_load import disturbance

Keys = TypeVar("Keys", bound=StageKeys, covariant=True)
OtherKeys = TypeVar("OtherKeys", bound=StageKeys)


def disturbance_in(study: Study, config: StudyConfig, metrics: Metrics) -> str | None:
    """Return what else was at work on the machine while a trial's steps were timed; None if nothing was but the study's other lanes."""
    return disturbance(metrics, lanes_share=1 - 1 / (study.most_lanes * config.world_size))


@dataclass(frozen=True)
class StageContext(Generic[Keys]):
    stage: Keys
    config: StudyConfig
    study: Study
    """Grows while the stage runs."""
    num_lanes: int = 1
    """How many trials can run at once."""

    @property
    def most_lanes(self) -> int:
        """How many trials can run at once, or could when the study ran before."""
        return max(self.num_lanes, self.study.most_lanes)

    def trials(self) -> list[Trial]:
        """Return the stage's own trials, in the order they were proposed."""
        return self.study.of_stage(self.stage.type)

    def have_ended(self, proposals: Iterable[Proposal]) -> bool:
        trials = self.study.trials
        return all(one.id in trials and trials[one.id].state.ended for one in proposals)

    def of(self, keys: type[OtherKeys]) -> StageContext[OtherKeys] | None:
        """Return what another stage of the study is told; None where the study has none of the kind."""
        stage = self.config.keys_of(keys)
        return None if stage is None else StageContext(stage, self.config, self.study, self.num_lanes)

    def disturbance(self, metrics: Metrics) -> str | None:
        """Return what else was at work on the machine while a trial's steps were timed; None if nothing was."""
        return disturbance_in(self.study, self.config, metrics)

    def undisturbed(self, trials: Iterable[Trial]) -> list[Trial]:
        """Return the trials whose speed is their own."""
        return [trial for trial in trials if not self.disturbance(trial.metrics)]

    def limit_bytes(self) -> int | None:
        """Return the memory that a rank may take: the study file's limit, or its share of the host when the study
        began.

        None on a GPU for which the study file gives no limit: only the ranks can read its memory.
        """
        given = self.config.memory_limit
        return int(given) if given else self.study.facts.memory_limit_bytes

    def split(self, micro_batch_size: int, gradient_accumulation_steps: int = 1) -> Split:
        return Split(micro_batch_size, gradient_accumulation_steps, self.config.world_size)

    def split_of(self, effective_batch_size: int, micro_batch_size: int) -> Split:
        """Return the split of this effective batch. Raises ValueError, with both numbers, where it does not divide."""
        world_size = self.config.world_size
        return self.split(micro_batch_size, derive_accumulation(effective_batch_size, micro_batch_size, world_size))

    def given_split(self) -> Split:
        """Return the batch of the study file."""
        return given_batch(self.config.batch, self.config.world_size)

    def rungs(self, pruner: Pruner, sample_budget: int) -> tuple[int, ...]:
        """Return the sample numbers at which a full training run of this budget is compared."""
        return pruner.rungs(self.config.sample_budget, sample_budget, rises_until(self.config))

    def rule_rate(self, effective_batch_size: int) -> float:
        """Return the learning rate that the scaling rule gives this batch."""
        return scaled_learning_rate(self.config.optimizer, effective_batch_size)

    def trial(self, split: Split, mode: Mode | None, **changes: object) -> TrialConfig:
        """Return a full training run of this batch at the scaling rule's learning rate, with a schedule over its own
        budget.

        mode: None for the study file's. changes: fields that differ from that; sample_budget is the study file's unless
        it is among them. Raises ValueError where the batch is larger than the budget.
        """
        effective = split.effective_batch_size
        budget = changes.get("sample_budget", self.config.sample_budget)
        assert isinstance(budget, int)
        if effective > budget:
            raise ValueError(
                f"the effective batch ({effective}) is larger than sample_budget ({budget}); raise sample_budget"
            )
        facts = self.study.facts
        read = facts.device_peaks, facts.long_samples, facts.evaluated_together
        base = base_trial(self.config, self.limit_bytes(), *read)
        rate = changes.get("learning_rate", self.rule_rate(effective))
        assert isinstance(rate, float)
        batch = {
            "micro_batch_size": split.micro_batch_size,
            "gradient_accumulation_steps": split.gradient_accumulation_steps,
            "learning_rate": rate,
            "optimizer": optimizer_at(self.config.optimizer, effective, rate),
            "warmup_samples": warmup_samples(self.config, effective, budget),
            "sample_budget": budget,
            "evaluations": evenly_spaced(budget, self.config.evaluations),
        }
        trial = TrialConfig.model_validate(dict(base) | (mode.changes(base) if mode else {}) | batch | changes)
        return _evaluated_before_its_first_rung(trial)

    def short_trial(self, split: Split, mode: Mode | None, steps: int, **changes: object) -> TrialConfig:
        """Return a run of so many optimizer steps at a constant learning rate that is not evaluated."""
        short = {
            "sample_budget": steps * split.effective_batch_size,
            "evaluations": (),
            "evaluation_samples": 0,
            "warmup_samples": 0,
            "schedule": {"type": "constant"},
        }
        return self.trial(split, mode, **(short | changes))


EARLY_ENOUGH = 0.75
"""An evaluation no later than this share of the first rung is needed to measure how fast the leader still gains: who trails it by less is
not cut there."""


def _evaluated_before_its_first_rung(trial: TrialConfig) -> TrialConfig:
    """Return the run, evaluated half way to its first rung, too, where none of its evaluations comes early enough: decisions/verdicts.py compares
    with what the best one gained meanwhile."""
    half = trial.rungs[0] // 2 if trial.rungs else 0
    if not half or min(trial.evaluations) <= EARLY_ENOUGH * trial.rungs[0]:
        return trial
    return trial.model_copy(update={"evaluations": (half, *trial.evaluations)})
