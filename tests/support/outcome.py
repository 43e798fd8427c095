"""What a study is known to have come to: a test that asks for it fails where there is nothing."""

from __future__ import annotations

from pathlib import Path

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.recommendation import Recommendation, recommend
from batchscout.orchestrator.stages.findings import Found, found
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.orchestrator.study.state import Study

GOLDEN = Path(__file__).parents[1] / "golden"
"""Run directories of journal format 1."""
RECORDED = Path(__file__).parents[2] / "docs" / "recorded" / "quickstart"
"""The run directory of the page of the quickstart."""


def found_by(study: Study, kind: type[Found]) -> Found:
    findings = found(study, kind)
    assert findings is not None
    return findings


def recommendation_of(config: StudyConfig, study: Study) -> Recommendation:
    recommendation = recommend(config, study)
    assert recommendation is not None
    return recommendation


def kept_in(run_dir: Path) -> tuple[StudyConfig, Study]:
    """A run directory's study file, and what its journal has of the study."""
    config = load_stored_study(run_dir / "study.yaml")
    return config, replay(run_dir / "journal.jsonl", config.name)
