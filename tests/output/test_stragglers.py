"""A node that is slower than the others is told wherever people look."""

from __future__ import annotations

import pytest

from batchscout.orchestrator.output.report.page import render_report
from batchscout.orchestrator.output.status import notice_lines, print_status
from batchscout.orchestrator.study.events import Ended, Started
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.orchestrator.study.trial import Metrics, TrialState
from tests.support.example_study import add_trial, example_config, example_study, tell
from tests.support.outcome import recommendation_of


def test_a_straggler_is_told_in_status_report_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    config = example_config()
    study = example_study(config)
    assert "the same steps" not in "".join(notice_lines(study))
    for number in range(3):
        for node, seconds in (("node-a", 1.0), ("node-b", 1.5)):
            name, lane = f"throughput-again{number}-{node}", HeldLane(0, node)
            add_trial(study, config, name, micro_batch_size=16)
            tell(study, Started(id=name))
            metrics: Metrics = {"step_seconds": seconds * (1 + 0.01 * number), "tokens_per_second": 100 / seconds}
            tell(
                study,
                Ended(
                    id=name, state=TrialState.COMPLETE, cause=None, reason="", metrics=metrics, seconds=9.0, lane=lane
                ),
            )
    said = "node-b takes 1.50 x ["
    assert notice_lines(study)[0].startswith(said)
    recommendation = recommendation_of(config, study)
    assert f"Warning: {said}" in recommendation.verdict
    assert said in render_report(config, study, recommendation)
    print_status(config, study, is_driven=False)
    assert said in capsys.readouterr().out
