"""The end of a study: its files, its exit code, and the message to its user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.decisions.further import kept_by_the_budget
from batchscout.orchestrator.decisions.retries import trials_that_count
from batchscout.orchestrator.output.answer import Answer
from batchscout.orchestrator.output.exports import first_trainer
from batchscout.orchestrator.output.known import failed_stage
from batchscout.orchestrator.output.recommendation import Recommendation, recommend, write_recommendation
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.study.run_directory import logs_of
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import TrialState
from batchscout.trainers.files import quoted


@dataclass(frozen=True)
class Ending:
    """How `batchscout run` ends."""

    exit_code: int
    message: str
    """What there is to say beside the answer."""
    answer: Answer | None = None
    trainer: str | None = None
    """What the recommendation is most likely to be pasted into, as `export` names it; None where there is none."""

    def text(self, run_dir: str) -> str:
        """Return all of it, where nobody can ask for a part. run_dir: as the user would type it."""
        return "\n".join(filter(None, [self.answer.text(run_dir) if self.answer else "", self.message]))


def finish(config: StudyConfig, run_dir: Path, study: Study) -> Ending:
    """Write report and recommendation from the journal, and say how the study stands."""
    recommendation = write_results(config, run_dir, study)
    failed = failed_stage(study)
    remedy = _remedy(run_dir, study)
    trainer = first_trainer(config, study.facts.own_run) if recommendation else None
    if failed is not None:
        return Ending(
            2 if failed.bad_input else 1,
            f"{failed.stage}: {failed.reason}\n{remedy or _without_a_failure(config, failed, study)}",
            trainer=trainer,
        )
    done = "\n".join(f"{conclusion.stage}: {conclusion.reason}" for conclusion in study.conclusions.values())
    found = "" if recommendation else done or "the study has no result yet"
    said = "\n".join(filter(None, [found, _OUT_OF_BUDGET if kept_by_the_budget(config, study) else "", remedy]))
    wants_one = any(stage_of(stage).trains_candidates for stage in config.stages)
    exit_code = 1 if remedy or (wants_one and recommendation is None) else 0
    return Ending(exit_code, said, recommendation.answer if recommendation else None, trainer)


def _remedy(run_dir: Path, study: Study) -> str:
    """Return which trial failed of what, where its log is, and what to do about it; empty where none failed."""
    broken = [trial for trial in study.trials.values() if trial.state is TrialState.FAILED]
    if not broken:
        return ""
    first, more = broken[0], f"{len(broken)} trials failed, the first of them " if len(broken) > 1 else ""
    logs = logs_of(run_dir, first.id)
    log = f" Its log: {quoted(logs[0])}." if logs else ""
    return f"{more}{first.id}: {first.explanation}.{log} Fix it, and {_again(study, 'what failed')}"


def _again(study: Study, what: str) -> str:
    """Return, in words, how what says nothing yet runs again once the code or the data are fixed."""
    if trials_that_count(study):
        return (
            f"run the same command with --keep-finished: {what} runs again, and what has ended is kept as it is, of the code and data before "
            "(where there is nothing to fix: --retry-failed)"
        )
    return f"run the same command again: {what} runs again once your code or data have changed (or at once, with --retry-failed)"


_OUT_OF_BUDGET = "It stopped for budget.device_hours: raise it, and run the same command again to go further."


def _without_a_failure(config: StudyConfig, failed: Conclusion, study: Study) -> str:
    if kept_by_the_budget(config, study):
        return _OUT_OF_BUDGET
    return f"No trial failed. Where code or data are to blame, {_again(study, f'the stage {failed.stage}')}; a changed study file needs another --dir"


def write_results(
    config: StudyConfig, run_dir: Path, study: Study, *, is_driven: bool = False
) -> Recommendation | None:
    """Write recommendation.json and report.html, each whole, and return the recommendation. is_driven: True if a process goes on with the
    study."""
    from batchscout.orchestrator.output.report.page import write_report

    recommendation = recommend(config, study)
    write_recommendation(run_dir / "recommendation.json", recommendation)
    write_report(run_dir / "report.html", config, study, recommendation, is_driven=is_driven)
    return recommendation
