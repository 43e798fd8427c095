"""A study's answer, held against a grid that is trained for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import real_grid

from tests.support.real_player import run_for_real
from tests.support.studies import tiny_study


@pytest.mark.slow
def test_every_batch_is_trained_at_every_rate_with_every_seed_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [{"type": "throughput", "steps": 8, "rounds": 2, "max_rounds": 2}, {"type": "train", "max_runs": 2}]
    config = tiny_study(stages=stages, compile=False, sample_budget=512)
    study = run_for_real(config, tmp_path)
    (tmp_path / "study.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    monkeypatch.setattr("sys.argv", ["real_grid.py", str(tmp_path), "--exponents", "0", "1", "--seeds", "2"])
    real_grid.main()
    first = capsys.readouterr().out
    found = json.loads(first.splitlines()[-1])
    runs = [json.loads(line) for line in (tmp_path / "grid.jsonl").read_text().splitlines()]
    points = {(run["effective_batch_size"], run["learning_rate"]) for run in runs}
    batches = {batch for batch, _ in points}
    assert found["grid_runs"] == 2 * len(points)
    assert len(points) in (2 * len(batches), 2 * len(batches) + 1), (
        "each at two rates, and the recommendation at its own"
    )
    assert (found["chosen_batch"], found["chosen_rate"]) in points
    point = found["chosen_batch"], found["chosen_rate"]
    of_study = [
        trial
        for trial in study.trials.values()
        if (trial.config.effective_batch_size, trial.config.learning_rate) == point
    ]
    chosen = next(
        one for one in runs if (one["effective_batch_size"], one["learning_rate"]) == point and one["seed"] == 0
    )
    assert chosen["val_loss"] == of_study[-1].measured("val_loss"), "the same run, to the bit"
    assert found["regret"] >= 0
    real_grid.main()
    assert capsys.readouterr().out.splitlines()[-1] == first.splitlines()[-1], "nothing is trained twice"
