"""What a recommendation was measured on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import number_text


@dataclass(frozen=True)
class Scope:
    """What a recommendation was measured on: it holds there, and is a guess elsewhere."""

    seeds: int
    validation_samples: int
    sample_budget: int
    """The samples that the recommended run was trained on."""
    effective_batch_sizes: tuple[int, ...]
    """The effective batches of which full runs completed."""
    largest_accumulation: int
    """The most accumulation steps of any full run."""

    def __str__(self) -> str:
        batches = self.effective_batch_sizes
        tried = (
            f"effective batch {batches[0]}" if len(batches) == 1 else f"effective batches {batches[0]} to {batches[-1]}"
        )
        accumulated = (
            "no accumulation" if self.largest_accumulation == 1 else f"accumulation up to {self.largest_accumulation}"
        )
        return (
            f"{'one seed' if self.seeds == 1 else f'{self.seeds} seeds'}, {number_text(self.validation_samples)} validation "
            f"sample{'' if self.validation_samples == 1 else 's'}, a run of {number_text(self.sample_budget)} samples, {tried}, {accumulated}"
        )


def scope_of(config: StudyConfig, study: Study, winner: Trial) -> Scope:
    full = [trial.config for trial in study.completed_runs]
    there_are = study.facts.num_val_samples
    return Scope(
        len(config.seeds),
        min(config.evaluation_samples, there_are) if there_are else config.evaluation_samples,
        winner.config.sample_budget,
        tuple(sorted({one.effective_batch_size for one in full})),
        max(max(one.accumulations) for one in full),
    )
