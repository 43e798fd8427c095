"""The end of a study: its files, its exit code, and the message to its user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.keys import StudyConfig
from orchestrator.output.recommendation import Recommendation, recommend, write_recommendation
from orchestrator.stages import stage_of
from orchestrator.study.run_directory import trial_directory
from orchestrator.study.state import Study
from orchestrator.study.trial import TrialState
from trainers.files import quoted


@dataclass(frozen=True)
class Ending:
    """How `batchscout run` ends."""

    exit_code: int
    message: str


def finish(config: StudyConfig, run_dir: Path, study: Study) -> Ending:
    """Write report and recommendation from the journal, and say how the study stands."""
    recommendation = write_results(config, run_dir, study)
    failed = next((conclusion for conclusion in study.conclusions.values() if not conclusion.ok), None)
    if failed is not None:
        again = f"\n{quoted(run_dir)} keeps this as its result: once that is mended, run the study with another --dir"
        return Ending(2 if failed.bad_input else 1, f"{failed.stage}: {failed.reason}{again}")
    done = "\n".join(f"{conclusion.stage}: {conclusion.reason}" for conclusion in study.conclusions.values())
    result = recommendation.verdict if recommendation else done or "the study has no result yet"
    broken = [trial for trial in study.trials.values() if trial.state is TrialState.FAILED]
    if broken:
        where = quoted(trial_directory(run_dir, broken[0].id))
        what = f"{len(broken)} trial(s) failed; {broken[0].id}: {broken[0].explanation} (see {where})"
        return Ending(1, f"{result}\n{what}")
    wants_one = any(stage_of(stage).trains_candidates for stage in config.stages)
    return Ending(1 if wants_one and recommendation is None else 0, result)


def write_results(config: StudyConfig, run_dir: Path, study: Study) -> Recommendation | None:
    """Write recommendation.json and report.html, each whole, and return the recommendation."""
    from orchestrator.output.report.page import write_report

    recommendation = recommend(config, study)
    write_recommendation(run_dir / "recommendation.json", recommendation)
    write_report(run_dir / "report.html", config, study, recommendation)
    return recommendation
