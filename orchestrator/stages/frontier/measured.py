"""What a probe or a timing tells."""

from __future__ import annotations

from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Trial, TrialState


def ended_for_another_reason(trial: Trial) -> bool:
    """True if the trial ended for another reason than its size."""
    of_size = trial.state is TrialState.PRUNED and trial.cause in (Cause.TOO_SLOW, Cause.THRASHING)
    return not (trial.state in (TrialState.COMPLETE, TrialState.OUT_OF_MEMORY) or of_size)


def rate_of(trial: Trial) -> float:
    return trial.metric("tokens_per_second") or 0.0


def peak_of(trial: Trial) -> float:
    return trial.measured("peak_memory_bytes")
