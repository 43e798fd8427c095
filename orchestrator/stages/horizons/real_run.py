"""The real run itself, as it is recommended. Pure."""

from __future__ import annotations

import math

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.trial import evenly_spaced, optimizer_at, warmup_samples
from batchscout.orchestrator.stages import change_of
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.horizons.findings import HorizonsFindings
from batchscout.orchestrator.stages.train import full_runs
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.trainers.config import TrialConfig


def carried_to(study: Study, winner: Trial) -> HorizonsFindings | None:
    """Return what holds for the real run; None where the study has none, or its answer lets the batch grow, which is carried to no other
    length."""
    findings = found(study, HorizonsFindings)
    return None if winner.config.ramp else findings


def as_recommended(config: StudyConfig, study: Study, winner: Trial) -> TrialConfig:
    """Return the run to make: the winner's, at the length, batch and learning rate of the real run where there is one. What the study adds
    to its winner stays."""
    real = carried_to(study, winner)
    if real is None:
        return winner.config
    batch, budget = real.effective_batch_size, real.sample_budget
    optimizer = optimizer_at(config.optimizer, batch, real.learning_rate)
    if change := change_of(config, study, winner):  # its rules may have it follow batch and rate
        before = study.trials[change.source].config.optimizer
        times = {key: value / getattr(before, key) for key, value in change.optimizer.items()}
        optimizer = optimizer.model_copy(update={key: times[key] * getattr(optimizer, key) for key in times})
    changes = {
        **(real.mode.changes(winner.config) if real.mode else {}),
        "micro_batch_size": real.micro_batch_size,
        "gradient_accumulation_steps": real.gradient_accumulation_steps,
        "learning_rate": real.learning_rate,
        "optimizer": optimizer,
        "sample_budget": budget,
        "warmup_samples": warmup_samples(config, batch, budget),
        "evaluations": evenly_spaced(budget, config.evaluations),
        "rungs": (),
        "noise_snapshots": (),
    }
    return TrialConfig.model_validate(dict(winner.config) | changes)


def nearest_run(study: Study, winner: Trial, recommended: TrialConfig) -> Trial:
    """Return the study's own run that is most like the recommended one: the winner where it has that batch, else the full run of that
    batch with the nearest learning rate; the winner again where none of it completed."""
    if winner.config.effective_batch_size == recommended.effective_batch_size:
        return winner
    alike = [
        trial
        for trial in full_runs(study)
        if trial.state is TrialState.COMPLETE and trial.config.effective_batch_size == recommended.effective_batch_size
    ]
    return min(
        alike, key=lambda trial: abs(math.log(trial.config.learning_rate / recommended.learning_rate)), default=winner
    )
