"""What is tried, what is concluded from it, and which figures show it.

One file or package for each stage belongs here, named after its `type`, and what several of them share: pure functions
of what is known of a study. Which of its trials runs next does not belong here, nor how a figure or table is drawn. Loads neither Ray
nor torch.
"""

from __future__ import annotations

import importlib

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.stage import Change, Stage
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.metrics import METRICS


def stage_of(keys: StageKeys) -> Stage[StageKeys]:
    """Return the stage that these keys are for: it is STAGE in the file that is named after their type."""
    stage = importlib.import_module(f"{__name__}.{keys.type}").STAGE
    assert isinstance(stage, Stage)
    assert METRICS.keys() >= {*stage.columns}, (
        f"columns of {keys.type} that are no metric: add them to trainers/metrics.py"
    )
    return stage


def change_of(config: StudyConfig, study: Study, winner: Trial) -> Change | None:
    """Return in what a trial differs from the run that was chosen before it; None if it is not the choice of a stage that changes that
    run."""
    for keys in config.stages:
        stage, context = stage_of(keys), StageContext(keys, config, study)
        if keys.type == winner.stage and stage.winner(context) == winner.id:
            return stage.change(context)
    return None


def recommended_run(config: StudyConfig, study: Study) -> Trial | None:
    """Return the full run that was chosen; if several stages have chosen one, that of the highest precedence. None while none has."""
    by_precedence = sorted(config.stages, key=lambda keys: stage_of(keys).precedence, reverse=True)
    training = [keys for keys in by_precedence if stage_of(keys).trains_candidates]
    chosen = [stage_of(keys).winner(StageContext(keys, config, study)) for keys in training]
    return next((study.trials[name] for name in chosen if name is not None), None)


def candidate_runs(config: StudyConfig, study: Study) -> list[Trial]:
    """Return the completed full runs that it was chosen from: not those by which a stage measures something else."""
    training = {keys.type for keys in config.stages if stage_of(keys).trains_candidates}
    return [trial for trial in study.completed_runs if trial.stage in training]
