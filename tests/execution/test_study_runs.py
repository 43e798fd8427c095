"""Whole studies on real Ray: lanes, Tune, the journal, and what comes out.

A lane takes ten seconds to start, so a study here is run once and asked many laws: each fixture is a study that has ended.
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
import ray
from ray._private.state import state

from batchscout.orchestrator import run as runner
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Trial, TrialState
from tests.support.studies import grid
from tests.support.study_runs import Ran, run, run_leaving_traces, states

# A fixture is a whole study, and the first test that asks for it waits for it.
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]


def check_running_again_changes_nothing(ran: Ran) -> None:
    before = ran.journal()
    again = run(ran.run_dir.parent, **ran.changes)
    assert again.ending == ran.ending
    assert again.journal() == before
    assert states(again.study) == states(ran.study)


# Five stages


@pytest.mark.first
def test_five_stages_end_in_a_recommendation_with_its_evidence(tmp_path: Path) -> None:
    stages = [
        {
            "type": "frontier",
            "smallest": 4,
            "largest": 16,
            "compile": [False],
            "activation_checkpointing": ["none"],
            "steps": 5,
            "finalists": 1,
            "rounds": 1,
        },
        {"type": "throughput", "multiples": [1, 2], "steps": 8, "rounds": 2, "max_rounds": 2},
        {"type": "equivalence", "steps": 3},
        {"type": "train", "pruner": {"type": "asha", "min_samples": 32}},
        {"type": "learning_rate", "multipliers": [0.5, 1]},
    ]
    ran = run(tmp_path, stages=stages, memory_limit="600MiB")
    assert ran.ending.exit_code == 0, ran.ending.message
    recommended = ran.recommended()
    for key in (
        "micro_batch_size", "gradient_accumulation_steps", "world_size", "effective_batch_size",
        "activation_checkpointing", "compile", "precision", "learning_rate", "warmup_samples",
        "verdict", "evidence", "alternatives", "ruled_out",
    ):  # fmt: skip
        assert key in recommended
    split = (recommended[key] for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size"))
    assert recommended["effective_batch_size"] == math.prod(split)
    assert [*ran.study.conclusions] == [stage["type"] for stage in stages]
    assert all(conclusion.ok for conclusion in ran.study.conclusions.values())
    baseline = [trial for trial in ran.study.of_stage("train") if trial.protected]
    assert [trial.state for trial in baseline] == [TrialState.COMPLETE], "the baseline is never cut"
    report = (ran.run_dir / "report.html").read_text()
    assert all(trial in report for trial in ran.study.trials)
    assert "TrainController" in actors_started()
    assert not {"PlacementGroupCleaner", "_AutoscalingCoordinatorActor"} & actors_started(), "what lanes do without"


def actors_started() -> set[str]:
    """The classes of all actors that this process has started, or that these have."""
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return {actor["ActorClassName"] for actor in state.actor_table(None, job_id=job).values()}


# A study whose trials end in every way that is a result

RATES = (1e-5, 1e-4, 1e-3, 3e-3)
DIVERGES = 1e4
TOO_LARGE = 128


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Ran:
    """A size that does not fit, a learning rate that diverges, losers and winners, with W&B listening."""
    pruner = {"type": "asha", "min_samples": 32, "reduction_factor": 2}
    stages = grid(micro_batch_size=[TOO_LARGE, 4], learning_rate=[*RATES, DIVERGES], pruner=pruner)
    folder = tmp_path_factory.mktemp("results")
    return run_leaving_traces(folder, stages=stages, memory_limit="16MiB", tracking={"wandb": "offline"})


def with_rate(ran: Ran, rate: float) -> Trial:
    return next(
        trial
        for trial in ran.study.trials.values()
        if trial.config.learning_rate == rate and trial.config.micro_batch_size != TOO_LARGE
    )


def test_a_study_of_results_is_exit_code_0(results: Ran) -> None:
    assert results.ending.exit_code == 0, results.ending.message


def test_every_trial_tells_its_utilisation_against_the_studys_one_peak(results: Ran) -> None:
    peaks = results.study.facts.device_peaks
    assert peaks is not None
    assert all(trial.config.device_peaks == peaks for trial in results.study.trials.values())
    told = {trial.metric("assumed_peak_flops") for trial in results.study.trials.values()} - {None}
    assert told == {peaks["float32"].flops_per_second}


def test_running_a_finished_study_again_changes_nothing(results: Ran) -> None:
    check_running_again_changes_nothing(results)


def test_running_out_of_memory_is_a_result_and_the_lane_goes_on(results: Ran) -> None:
    too_large = [trial for trial in results.study.trials.values() if trial.config.micro_batch_size == TOO_LARGE]
    assert {trial.state for trial in too_large} == {TrialState.OUT_OF_MEMORY}
    assert all("more did not fit into the limit of 16 MiB" in trial.reason for trial in too_large)
    assert len(set(results.lane_processes())) == 1, "the others ran in the process that had run out"
    assert len(results.lane_processes()) >= len(results.study.trials)


def test_a_diverging_trial_is_pruned_with_its_reason(results: Ran) -> None:
    diverged = with_rate(results, DIVERGES)
    assert diverged.state is TrialState.PRUNED
    assert diverged.cause is Cause.DIVERGED


def test_losers_are_paused_at_rungs_and_the_best_promoted(results: Ran) -> None:
    best, worst = with_rate(results, 3e-3), with_rate(results, 1e-5)
    assert best.state is TrialState.COMPLETE
    assert set(best.promoted) == {32, 64}
    assert worst.state is TrialState.PRUNED
    assert worst.explanation == "rung: ranked 4 of 4 after 32 samples; the best 3 continue"
    assert worst.metrics["samples_seen"] == 32, "a loser is not trained past its rung"
    assert results.kinds().count("paused") >= 3


def test_offline_wandb_has_a_closed_run_per_trial_and_one_of_the_study(results: Ran) -> None:
    files = list((results.run_dir / "wandb").glob("**/*.wandb"))
    assert len(files) == len(results.study.trials) + 1


# Some of its learning rates again, on two ranks and in fresh processes


def test_two_ranks_learn_what_one_rank_learns(results: Ran, tmp_path: Path) -> None:
    stages = grid(micro_batch_size=[1], effective_batch_size=[4], learning_rate=[3e-3])
    on_two_ranks = run_leaving_traces(tmp_path, stages=stages, world_size=2)
    assert len(set(on_two_ranks.lane_processes())) == 2
    loss_of_one = with_rate(results, 3e-3).metrics["val_loss"]
    assert with_rate(on_two_ranks, 3e-3).metrics["val_loss"] == pytest.approx(loss_of_one, rel=1e-4)


def test_isolation_by_trial_gives_the_same_losses_as_warm_lanes(results: Ran, tmp_path: Path) -> None:
    fresh = run_leaving_traces(tmp_path, stages=grid(learning_rate=[1e-3, 3e-3]), isolation="trial")
    assert len(set(fresh.lane_processes())) == 2, "no process ran both trials"
    for trial in fresh.study.trials.values():
        assert trial.state is TrialState.COMPLETE, trial.reason
        losses, in_warm_lane = (
            dict(one.curve("samples_seen")) for one in (trial, with_rate(results, trial.config.learning_rate))
        )
        met = losses.keys() & in_warm_lane.keys()
        assert {0.25, 0.5} <= {samples / trial.config.sample_budget for samples in met}
        assert all(losses[samples] == in_warm_lane[samples] for samples in met), "to the bit"


# A study that ends early


def test_an_interrupt_that_tune_swallowed_concludes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_stage", lambda *told: os.kill(os.getpid(), signal.SIGINT))
    ran = run(tmp_path, stages=grid())
    assert ran.ending.exit_code == 130
    assert not ran.study.conclusions
    assert ran.kinds()[-1] == "run_stopped", "else nobody knows how long what ran has held its lane"
