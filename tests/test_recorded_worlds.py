"""The choice in the recorded worlds is as good as the documents say: a change of the decision code that spoils it fails here."""

from __future__ import annotations

import pytest
from recommendation import WORLDS, cases_of, judged_by_others, summary
from world_table import load

from batchscout.orchestrator.stages.estimates import surface

pytestmark = pytest.mark.slow
DRAWS = 2
"""Of each case. The documents quote eight."""


def test_the_choice_is_right_at_a_fraction_of_the_cost_and_knows_how_sure_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(surface, "PRIOR", surface.PRIOR)  # each case is judged with one of its own
    worlds = [load(path) for path in sorted(WORLDS.glob("*.jsonl"))]
    cases, _ = cases_of(worlds)
    found = summary([one for case in cases for one in judged_by_others(case, worlds, DRAWS)])
    assert found["p_right"] >= 0.9
    assert found["p_batch_right"] >= 0.95
    assert found["p_winner_cut"] <= 0.05
    assert found["cost_ratio"] <= 0.25
    assert found["calibration"] <= 0.1
