"""Whole studies on real Ray: lanes, Tune, the journal, and what comes out."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator import run as runner
from orchestrator.output.results import Ending
from orchestrator.run import run_study
from orchestrator.study.journal import replay
from orchestrator.study.state import Study, TrialState
from tests.support.studies import grid, tiny_study

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def run(run_dir: Path, *, remeasure: bool = True, **changes: Any) -> tuple[Ending, Study]:
    config = tiny_study(**changes)
    ending = run_study(config, run_dir, remeasure=remeasure, quiet=True)
    return ending, replay(run_dir / "journal.jsonl", config.name)


def states(study: Study) -> dict[str, str]:
    return {trial.id: str(trial.state) for trial in study.trials.values()}


@pytest.mark.compiled
def test_five_stages_end_in_a_recommendation_with_its_evidence(tmp_path: Path) -> None:
    stages = [
        {
            "type": "frontier",
            "smallest": 4,
            "largest": 16,
            "activation_checkpointing": ["none", "full"],
            "steps": 5,
            "finalists": 2,
            "rounds": 2,
        },
        {"type": "throughput", "multiples": [1, 2], "steps": 8},
        {"type": "equivalence", "steps": 3},
        {"type": "train", "pruner": {"type": "asha", "min_samples": 32}},
        {"type": "learning_rate", "multipliers": [0.5, 1]},
    ]
    ending, study = run(tmp_path / "run", stages=stages, memory_limit="600MiB")
    assert ending.exit_code == 0, ending.message
    found = json.loads((tmp_path / "run" / "recommendation.json").read_text())
    for key in (
        "micro_batch_size", "gradient_accumulation_steps", "world_size", "effective_batch_size",
        "activation_checkpointing", "compile", "precision", "learning_rate", "warmup_samples",
        "verdict", "evidence", "alternatives", "ruled_out",
    ):  # fmt: skip
        assert key in found
    product = found["micro_batch_size"] * found["gradient_accumulation_steps"] * found["world_size"]
    assert found["effective_batch_size"] == product
    assert all(conclusion.ok for conclusion in study.conclusions.values())
    assert "train-m4k1" in study.trials
    assert study.trials["train-m4k1"].state is TrialState.COMPLETE, "the baseline is never cut"
    report = (tmp_path / "run" / "report.html").read_text()
    assert all(trial in report for trial in study.trials)


def test_running_a_finished_study_again_changes_nothing(tmp_path: Path) -> None:
    _, study = run(tmp_path / "run", stages=grid())
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    ending, again = run(tmp_path / "run", stages=grid())
    assert ending.exit_code == 0
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before
    assert states(again) == states(study)


def test_two_ranks_learn_what_one_rank_learns(tmp_path: Path) -> None:
    alone = grid(effective_batch_size=[8])
    together = grid(effective_batch_size=[8], micro_batch_size=[2])
    _, one = run(tmp_path / "one", stages=alone)
    _, two = run(tmp_path / "two", stages=together, world_size=2)
    loss_of_one = one.trials["grid-m4k2-none-eager"].metrics["val_loss"]
    loss_of_two = two.trials["grid-m2k2-none-eager"].metrics["val_loss"]
    assert loss_of_two == pytest.approx(loss_of_one, rel=1e-4)


def test_running_out_of_memory_is_a_result_and_the_lane_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "processes"
    model = {"target": "tests.support.studies:SaysWhereItIs", "kwargs": {"log": str(log)}}
    stages = grid(micro_batch_size=[4096, 4], effective_batch_size=[4096])
    ending, study = run(tmp_path / "run", model=model, stages=stages, memory_limit="96MiB", sample_budget=4096)
    large, small = study.trials["grid-m4096k1-none-eager"], study.trials["grid-m4k1024-none-eager"]
    assert large.state is TrialState.OUT_OF_MEMORY
    assert "more did not fit into the limit of 96 MiB" in large.reason
    assert small.state is TrialState.COMPLETE
    assert ending.exit_code == 0, ending.message
    assert len({*log.read_text().split()[-2:]}) == 1, "in the process that had run out"


def test_the_frontier_finds_the_edge_between_what_fitted_and_what_did_not(tmp_path: Path) -> None:
    quick = {"compile": [False], "activation_checkpointing": ["none"], "finalists": 1, "cross_entropy": ["whole"]}
    changes = {"memory_limit": "96MiB", "sample_budget": 4096, "headroom": "0%"}
    ending, study = run(tmp_path / "run", stages=[{"type": "frontier", "smallest": 64, **quick}], **changes)
    assert ending.exit_code == 0, ending.message
    edge = max(study.conclusions["frontier"].values["fitting"])
    probes = [trial for trial in study.trials.values() if not trial.fresh]
    sizes = {s: [t.config.micro_batch_size for t in probes if t.state is s] for s in TrialState}
    assert min(sizes[TrialState.OUT_OF_MEMORY], default=math.inf) > edge
    assert max(sizes[TrialState.COMPLETE]) == edge


def test_what_the_frontier_chooses_has_fitted_in_processes_that_ran_nothing_else(tmp_path: Path) -> None:
    log = tmp_path / "processes"
    model = {"target": "tests.support.studies:SaysWhereItIs", "kwargs": {"log": str(log)}}
    stages = [{"type": "frontier", "largest": 4, "compile": [False], "activation_checkpointing": ["none"], "rounds": 2}]
    ending, study = run(tmp_path / "run", model=model, stages=stages, memory_limit="256MiB")
    assert ending.exit_code == 0, ending.message
    built = log.read_text().split()
    others = built[: built.index(built[-1])]
    assert set(built[len(others) :]) == {built[-1]}, "the verification comes last, and alone"
    assert others.count(others[-1]) > 5, "the trials before it shared a process"
    changes = {"model": model, "stages": stages, "memory_limit": "256MiB", "seeds": [1]}
    again, second = run(tmp_path / "again", remeasure=False, **changes)
    assert again == ending
    assert second.conclusions["frontier"].values == study.conclusions["frontier"].values
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "again" / "journal.jsonl").read_text().splitlines()]
    assert "started" not in kinds, "what was measured before is not measured again"
    last = list(study.trials.values())[-1]
    assert last.id.endswith("-verified")
    assert study.conclusions["frontier"].values["peak_memory_bytes"] >= last.metrics["peak_memory_bytes"]


def test_a_limit_in_which_nothing_fits_is_bad_input(tmp_path: Path) -> None:
    stages = [{"type": "frontier", "smallest": 64, "compile": [False], "activation_checkpointing": ["none"]}]
    ending, _ = run(tmp_path / "run", stages=stages, memory_limit="1MiB", sample_budget=4096)
    assert ending.exit_code == 2
    assert "not even micro-batch 64 fits into memory_limit (1 MiB)" in ending.message
    assert "raise memory_limit" in ending.message


def test_an_error_in_the_users_code_fails_its_trial_with_its_traceback_and_the_study_goes_on(tmp_path: Path) -> None:
    model = {"target": "tests.support.studies:RaisesAfter", "kwargs": {"passes": 12, "message": "my own mistake"}}
    ending, study = run(tmp_path / "run", model=model, stages=grid(micro_batch_size=[4, 64], effective_batch_size=[64]))
    few, many = study.trials["grid-m64k1-none-eager"], study.trials["grid-m4k16-none-eager"]
    assert few.state is TrialState.COMPLETE
    assert many.state is TrialState.FAILED
    assert many.reason == "failed: ArithmeticError: my own mistake"
    log = (tmp_path / "run" / "trials" / many.id / "error-rank0.log").read_text()
    assert 'studies.py", line' in log
    assert "ArithmeticError: my own mistake" in log
    assert ending.exit_code == 1, "a failure that is not a result"
    assert ending.message.startswith("Train with micro-batch 64")
    assert "my own mistake" in ending.message


@pytest.mark.parametrize(("times", "state"), [(1, TrialState.COMPLETE), (2, TrialState.FAILED)])
def test_a_trial_goes_on_after_its_lane_died_once_and_is_failed_after_twice(
    tmp_path: Path, times: int, state: TrialState
) -> None:
    kwargs = {"marker": str(tmp_path / "deaths"), "times": times}
    model = {"target": "tests.support.studies:KillsItsProcess", "kwargs": kwargs}
    _, study = run(tmp_path / "run", model=model, stages=grid())
    (trial,) = study.trials.values()
    assert trial.state is state, trial.reason
    assert (tmp_path / "deaths").read_text() == "x" * times
    if state is TrialState.FAILED:
        assert "ended its lane 2 times" in trial.reason
    else:
        assert [point["samples_seen"] for point in trial.history] == [32, 64, 96, 128], "it went on from its checkpoint"


def test_a_model_whose_batch_cannot_be_split_fails_the_study_with_the_number(tmp_path: Path) -> None:
    stages = [{"type": "equivalence", "micro_batch_sizes": [8, 4], "steps": 3}]
    model = {"target": "tests.support.studies:BatchNormModel"}
    ending, study = run(tmp_path / "run", model=model, stages=stages, batch={"micro_batch_size": 8})
    assert ending.exit_code == 1
    rho = study.trials["equivalence-m4k4"].metrics["rho"]
    assert rho > 1e-3
    assert f"rho = {rho:.2e}" in ending.message
    assert "1 BatchNorm layers" in ending.message
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    again, _ = run(tmp_path / "run", model=model, stages=stages, batch={"micro_batch_size": 8})
    assert again == ending, "running again does not get past a stage that failed"
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_isolation_by_trial_gives_the_same_losses_as_warm_lanes(tmp_path: Path, world_size: int) -> None:
    stages = grid(learning_rate=[1e-3, 2e-3])
    _, warm = run(tmp_path / "warm", stages=stages, world_size=world_size)
    _, fresh = run(tmp_path / "fresh", stages=stages, world_size=world_size, isolation="trial")
    for trial in warm.trials.values():
        assert fresh.trials[trial.id].state is TrialState.COMPLETE, fresh.trials[trial.id].reason
        assert fresh.trials[trial.id].metrics["val_loss"] == trial.metrics["val_loss"]


def test_a_failed_probe_is_exit_code_1_though_no_recommendation_was_asked_for(tmp_path: Path) -> None:
    modes = {"type": "frontier", "activation_checkpointing": ["none", "full"], "compile": [False], "largest": 1}
    ending, study = run(tmp_path / "run", model={"target": "tests.support.studies:BatchNormModel"}, stages=[modes])
    assert study.conclusions["frontier"].ok
    assert ending.exit_code == 1
    assert "1 trial(s) failed" in ending.message
    assert "needs repeated blocks" in ending.message


def test_losers_are_paused_at_rungs_and_the_best_promoted(tmp_path: Path) -> None:
    pruner = {"type": "asha", "min_samples": 32, "reduction_factor": 2}
    rates = [1e-5, 1e-4, 1e-3, 3e-3]
    ending, study = run(tmp_path / "run", stages=grid(learning_rate=rates, pruner=pruner))
    assert ending.exit_code == 0
    by_rate = {t.config.learning_rate: t for t in study.trials.values()}
    assert by_rate[3e-3].state is TrialState.COMPLETE
    assert by_rate[1e-5].state is TrialState.PRUNED
    assert by_rate[1e-5].reason == "rung: place 3 of 3 at 32 samples; the best 2 go on"
    assert set(by_rate[3e-3].promoted) == {32, 64}
    assert by_rate[1e-5].metrics["samples_seen"] == 32, "a loser is not trained past its rung"
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert kinds.count("paused") >= 3


def test_an_interrupt_that_tune_swallowed_concludes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_stage", lambda *told: os.kill(os.getpid(), signal.SIGINT))
    ending, study = run(tmp_path / "run", stages=grid())
    assert ending.exit_code == 130
    assert not study.conclusions


def test_a_trial_that_hangs_fails_and_the_study_goes_on(tmp_path: Path) -> None:
    model = {"target": "tests.support.studies:HangsOnce", "kwargs": {"marker": str(tmp_path / "marker")}}
    kill = {"max_silent_seconds": 30}
    ending, study = run(tmp_path / "run", model=model, kill=kill, stages=grid(learning_rate=[1e-3, 2e-3]))
    first, second = study.trials.values()
    assert first.state is TrialState.FAILED
    assert first.reason.startswith("failed: it said nothing for 3")
    assert first.reason.endswith("longer than kill.max_silent_seconds (30)")
    assert second.state is TrialState.COMPLETE
    assert ending.exit_code == 1


def test_a_diverging_trial_is_pruned_with_its_reason(tmp_path: Path) -> None:
    _, study = run(
        tmp_path / "run", stages=grid(learning_rate=[1e-3, 1e4]), optimizer={"type": "sgd", "max_gradient_norm": None}
    )
    diverged = study.trials["grid-m4k1-none-eager-lr10000"]
    assert diverged.state is TrialState.PRUNED
    assert diverged.reason.startswith("diverged: ")


def test_offline_wandb_has_a_closed_run_per_trial(tmp_path: Path) -> None:
    _, study = run(tmp_path / "run", stages=grid(learning_rate=[1e-3, 2e-3]), tracking={"wandb": "offline"})
    files = list((tmp_path / "run" / "wandb").glob("**/*.wandb"))
    assert len(files) == len(study.trials)
