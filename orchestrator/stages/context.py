"""What a stage knows beside its own keys, and the choice that earlier stages hand on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.config.keys import StudyConfig, given_batch
from orchestrator.config.trial import base_trial, scaled_learning_rate, warmup_samples
from orchestrator.stages.mode import Mode, mode_of_values
from orchestrator.study.state import Study
from trainers.config import TrialConfig


@dataclass(frozen=True)
class Setting:
    study: StudyConfig
    run_dir: str

    def memory_limit_bytes(self, study: Study) -> int | None:
        """The limit of the study file, or the host's that was read when the study began."""
        return int(self.study.memory_limit) if self.study.memory_limit else study.facts.get("memory_limit_bytes")

    def trial(
        self, study: Study, micro_batch_size: int, accumulation: int, mode: Mode | None = None, **changes: Any
    ) -> TrialConfig:
        """A full training run with the batch given, this mode or else the frontier's, and the rule's learning rate and
        warm-up."""
        effective = micro_batch_size * accumulation * self.study.world_size
        budget = changes.get("sample_budget", self.study.sample_budget)
        if effective > budget:
            raise ValueError(
                f"the effective batch ({effective}) is larger than sample_budget ({budget}); raise sample_budget"
            )
        base = base_trial(self.study, self.memory_limit_bytes(study))
        batch = {
            "micro_batch_size": micro_batch_size,
            "gradient_accumulation_steps": accumulation,
            "learning_rate": scaled_learning_rate(self.study.optimizer, effective),
            "warmup_samples": warmup_samples(self.study.optimizer, effective, self.study.sample_budget),
        }
        mode = mode or self._chosen_mode(study)
        return TrialConfig.model_validate(dict(base) | (mode.changes(base) if mode else {}) | batch | changes)

    def short_trial(
        self, study: Study, micro_batch_size: int, accumulation: int, steps: int, **changes: Any
    ) -> TrialConfig:
        """A run of so many optimizer steps at a constant learning rate, not evaluated."""
        short = {
            "sample_budget": steps * micro_batch_size * accumulation * self.study.world_size,
            "evaluations": (),
            "evaluation_samples": 0,
            "warmup_samples": 0,
            "schedule": {"type": "constant"},
        }
        return self.trial(study, micro_batch_size, accumulation, **(short | changes))

    def chosen_batch(self, study: Study) -> tuple[int, int]:
        """(micro_batch_size, accumulation): the frontier's choice, else the study file's."""
        micro_batch_size = study.value("frontier", "micro_batch_size")
        if micro_batch_size:
            return micro_batch_size, 1
        given = given_batch(self.study.batch, self.study.world_size)
        return given.micro_batch_size, given.gradient_accumulation_steps

    @staticmethod
    def _chosen_mode(study: Study) -> Mode | None:
        found = study.conclusions.get("frontier")
        return mode_of_values(found.values) if found and found.ok else None
