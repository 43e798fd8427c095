"""One file a stage. Each offers two pure functions of what is known:

propose(stage, setting, study) -> the trials it wants so far; more may follow when these have ended
conclude(stage, setting, study) -> what it found, when all of them have ended
"""

from __future__ import annotations

from types import ModuleType

from orchestrator.config.stages import Grid, LearningRate, StageConfig, Train
from orchestrator.stages import equivalence, frontier, grid, learning_rate, throughput, train

_MODULES: dict[str, ModuleType] = {
    "frontier": frontier,
    "throughput": throughput,
    "equivalence": equivalence,
    "train": train,
    "learning_rate": learning_rate,
    "grid": grid,
}


def module_of(stage: StageConfig) -> ModuleType:
    """The functions of a stage."""
    return _MODULES[stage.type]


def wants_all_at_once(stage: StageConfig) -> bool:
    """Whether what its own trials bring never changes what it wants: then it is asked once, and not at every event."""
    return isinstance(stage, Train | LearningRate | Grid)
