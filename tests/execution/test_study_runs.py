"""Whole studies on real Ray: lanes, Tune, the journal, and what comes out.

A lane takes ten seconds to start, so a study here is run once and asked many laws: each fixture is a study that has ended.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator import run as runner
from orchestrator.output.results import Ending
from orchestrator.run import run_study
from orchestrator.stages.findings import found
from orchestrator.stages.frontier.findings import FrontierFindings
from orchestrator.study.causes import Cause
from orchestrator.study.journal import replay
from orchestrator.study.lines import read_lines
from orchestrator.study.state import Study
from orchestrator.study.trial import Trial, TrialState
from tests.support.processes import kernel_tells
from tests.support.studies import grid, tiny_study

# A fixture is a whole study, and the first test that asks for it waits for it.
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

MIB = 2**20


@dataclass(frozen=True)
class Ran:
    """A study that has ended, and where its models left the numbers of the processes that built them."""

    ending: Ending
    study: Study
    run_dir: Path
    changes: dict[str, Any]
    log: Path

    def journal(self) -> bytes:
        return (self.run_dir / "journal.jsonl").read_bytes()

    def kinds(self) -> list[str]:
        return [line.event.kind for line in read_lines(self.run_dir / "journal.jsonl")]

    def recommended(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "recommendation.json").read_text())

    def lane_processes(self) -> list[str]:
        """In the order in which they built models; the driver builds one, too, before anything starts."""
        return [number for number in self.log.read_text().split() if number != str(os.getpid())]


def run(folder: Path, *, remeasure: bool = True, **changes: Any) -> Ran:
    run_dir, config = folder / "run", tiny_study(**changes)
    ending = run_study(config, run_dir, remeasure=remeasure, quiet=True)
    return Ran(ending, replay(run_dir / "journal.jsonl", config.name), run_dir, changes, folder / "processes")


def run_leaving_traces(folder: Path, **changes: Any) -> Ran:
    """Of a model that says where it is."""
    model = {"target": "tests.support.studies:SaysWhereItIs", "kwargs": {"log": str(folder / "processes")}}
    return run(folder, model=model, **changes)


def states(study: Study) -> dict[str, str]:
    return {trial.id: str(trial.state) for trial in study.trials.values()}


def frontier_findings(ran: Ran) -> FrontierFindings:
    findings = found(ran.study, FrontierFindings)
    assert findings is not None
    return findings


def check_running_again_changes_nothing(ran: Ran) -> None:
    before = ran.journal()
    again = run(ran.run_dir.parent, **ran.changes)
    assert again.ending == ran.ending
    assert again.journal() == before
    assert states(again.study) == states(ran.study)


# Five stages


@pytest.mark.compiled
def test_five_stages_end_in_a_recommendation_with_its_evidence(tmp_path: Path) -> None:
    stages = [
        {
            "type": "frontier",
            "smallest": 4,
            "largest": 16,
            "activation_checkpointing": ["none"],
            "steps": 5,
            "finalists": 1,
            "rounds": 1,
        },
        {"type": "throughput", "multiples": [1, 2], "steps": 8},
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
    assert ran.study.trials["train-m4k2"].state is TrialState.COMPLETE, "the baseline is never cut"
    report = (ran.run_dir / "report.html").read_text()
    assert all(trial in report for trial in ran.study.trials)


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
    assert worst.explanation == "rung: place 4 of 4 at 32 samples; the best 3 go on"
    assert worst.metrics["samples_seen"] == 32, "a loser is not trained past its rung"
    assert results.kinds().count("paused") >= 3


def test_offline_wandb_has_a_closed_run_per_trial(results: Ran) -> None:
    files = list((results.run_dir / "wandb").glob("**/*.wandb"))
    assert len(files) == len(results.study.trials)


# The same learning rates again, in fresh processes and on two ranks


def run_rates(folder: Path, **changes: Any) -> Ran:
    """Of an effective batch of 4, alone or on two ranks."""
    sizes = {1: [4], 2: [1]}[changes.get("world_size", 1)]
    stages = grid(micro_batch_size=sizes, effective_batch_size=[4], learning_rate=[1e-3, 3e-3])
    return run_leaving_traces(folder, stages=stages, **changes)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Ran:
    return run_rates(tmp_path_factory.mktemp("two-ranks"), world_size=2)


def test_two_ranks_learn_what_one_rank_learns(results: Ran, on_two_ranks: Ran) -> None:
    loss_of_one = with_rate(results, 3e-3).metrics["val_loss"]
    assert with_rate(on_two_ranks, 3e-3).metrics["val_loss"] == pytest.approx(loss_of_one, rel=1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_isolation_by_trial_gives_the_same_losses_as_warm_lanes(
    results: Ran, on_two_ranks: Ran, tmp_path: Path, world_size: int
) -> None:
    warm = {1: results, 2: on_two_ranks}[world_size]
    fresh = run_rates(tmp_path, world_size=world_size, isolation="trial")
    assert len(set(fresh.lane_processes())) == 2 * world_size, "no process ran both trials"
    assert len(set(warm.lane_processes())) == world_size
    for trial in fresh.study.trials.values():
        assert trial.state is TrialState.COMPLETE, trial.reason
        before = with_rate(warm, trial.config.learning_rate).history
        losses = [point["val_loss"] for point in trial.history]
        assert losses[: len(before)] == [point["val_loss"] for point in before], "to the bit"
    final = with_rate(fresh, 3e-3).metrics["val_loss"]
    assert final == with_rate(warm, 3e-3).metrics["val_loss"]


# A study whose trials fail in every way

RAISES, DIES_ONCE, CRASHES_TWICE, HANGS, EXITS, WELL = 8, 4, 2, 1, 32, 16
MAX_SILENT_SECONDS = 20
"""Silence counts from when a lane takes a trial: a lane's own start is none, and building a model takes a second or two."""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Ran:
    """Trials told apart by the size of their micro-batch, of which the last one is well."""
    folder = tmp_path_factory.mktemp("failures")
    faults = {RAISES: ("raises", 1), DIES_ONCE: ("dies once", 1), CRASHES_TWICE: ("crashes twice", 2)}
    faults |= {HANGS: ("hangs", 1), EXITS: ("exits", 1)}
    kwargs = {"faults": {str(size): fault for size, fault in faults.items()}, "folder": str(folder)}
    model = {"target": "tests.support.studies:Misbehaves", "kwargs": kwargs}
    kill = {"max_silent_seconds": MAX_SILENT_SECONDS, "min_relative_throughput": None}
    return run(folder, model=model, kill=kill, stages=grid(micro_batch_size=[*faults, WELL]))


def with_size(ran: Ran, size: int) -> Trial:
    return next(trial for trial in ran.study.trials.values() if trial.config.micro_batch_size == size)


def test_after_failures_the_study_goes_on_and_its_exit_code_is_1(failures: Ran) -> None:
    assert [*failures.study.trials][-1] == with_size(failures, WELL).id
    assert with_size(failures, WELL).state is TrialState.COMPLETE
    assert failures.study.conclusions["grid"].ok
    assert failures.ending.exit_code == 1, "failures that are no results"
    assert failures.ending.message.startswith("Train with micro-batch ")
    assert "4 trial(s) failed" in failures.ending.message


def test_an_error_in_the_users_code_fails_its_trial_with_its_traceback(failures: Ran) -> None:
    trial = with_size(failures, RAISES)
    assert trial.state is TrialState.FAILED
    assert trial.explanation == "failed: ArithmeticError: my own mistake"
    log = (failures.run_dir / "trials" / trial.id / "error-rank0.log").read_text()
    assert 'studies.py", line' in log
    assert "ArithmeticError: my own mistake" in log
    assert "my own mistake" in failures.ending.message


def test_a_trial_goes_on_from_its_checkpoint_after_its_lane_died_once(failures: Ran) -> None:
    trial = with_size(failures, DIES_ONCE)
    assert trial.state is TrialState.COMPLETE, trial.reason
    assert [point["samples_seen"] for point in trial.history] == [32, 64, 96, 128]
    assert (failures.log.parent / "dies once").read_text() == "x"


def test_a_trial_under_which_its_lane_died_twice_is_failed_and_names_its_stack(failures: Ran) -> None:
    trial = with_size(failures, CRASHES_TWICE)
    assert trial.state is TrialState.FAILED
    log = failures.run_dir / "trials" / trial.id / "crash-rank0.log"
    how = "was killed by SIGSEGV" if kernel_tells() else "crashed"
    assert trial.reason == f"it ended its lane 2 times; last: rank 0 {how} (its stack is in {log})"
    assert 'studies.py", line' in log.read_text()
    assert (failures.log.parent / "crashes twice").read_text() == "xx"


def test_a_trial_that_calls_sys_exit_is_failed_with_the_status_and_where(failures: Ran) -> None:
    trial = with_size(failures, EXITS)
    assert trial.state is TrialState.FAILED
    assert trial.explanation == "failed: exited with status 3 (sys.exit)"
    assert "SystemExit: 3" in (failures.run_dir / "trials" / trial.id / "error-rank0.log").read_text()


def test_a_trial_that_hangs_is_failed(failures: Ran) -> None:
    trial = with_size(failures, HANGS)
    assert trial.state is TrialState.FAILED
    assert trial.explanation.startswith("failed: it said nothing for ")
    assert trial.reason.endswith(f"longer than kill.max_silent_seconds ({MAX_SILENT_SECONDS})")
    assert trial.history[-1]["samples_seen"] == 32, "it hung long after its start"


# Frontiers


@pytest.fixture(scope="module")
def frontier(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Ran:
    """Of one mode, in a limit that some two hundred samples fill."""
    stage = {
        "type": "frontier",
        "smallest": 32,
        "compile": [False],
        "activation_checkpointing": ["none"],
        "cross_entropy": ["whole"],
        "finalists": 1,
        "rounds": 2,
    }
    folder = tmp_path_factory.mktemp("frontier")
    ran = run_leaving_traces(folder, stages=[stage], sample_budget=4096, memory_limit="48MiB")
    assert ran.ending.exit_code == 0, ran.ending.message
    return ran


def test_the_frontier_finds_the_edge_between_what_fitted_and_what_did_not(frontier: Ran) -> None:
    """A size that ran, but into the headroom of 5 % that is kept free, does not fit either, nor one that did so once and
    not again."""
    edge = max(frontier_findings(frontier).fitting)
    inside = dict[int, bool]()
    for trial in frontier.study.trials.values():
        fitted = trial.state is TrialState.COMPLETE and trial.measured("peak_memory_bytes") <= 0.95 * 48 * MIB
        size = trial.config.micro_batch_size
        inside[size] = fitted and inside.get(size, True)
    assert max(size for size, fits in inside.items() if fits) == edge
    outside = [size for size, fits in inside.items() if not fits]
    assert edge < min(size for size in outside if size > edge) <= 1.02 * edge + 1, "the two are next to each other"
    assert min(outside) > 0.98 * edge, "what does not fit lies beyond what does, but for what the heap varies by"


def test_what_the_frontier_chooses_has_fitted_in_processes_that_ran_nothing_else(frontier: Ran) -> None:
    processes = frontier.lane_processes()
    others = processes[: processes.index(processes[-1])]
    assert set(processes[len(others) :]) == {processes[-1]}, "the verification comes last, and alone"
    assert max(Counter(others).values()) > 5, "trials before it shared a process"
    last = [*frontier.study.trials.values()][-1]
    assert last.id.endswith("-verified")
    assert frontier_findings(frontier).chosen.peak_memory_bytes >= last.measured("peak_memory_bytes")


def test_what_was_measured_in_another_study_is_not_measured_again(frontier: Ran, tmp_path: Path) -> None:
    if frontier_findings(frontier).disturbed:
        pytest.skip("the machine was busy while the first study timed: such figures are not kept")
    again = run(tmp_path, remeasure=False, **frontier.changes, seeds=[1])
    assert again.ending == frontier.ending
    assert frontier_findings(again) == frontier_findings(frontier)
    assert "started" not in again.kinds()


def test_a_limit_in_which_nothing_fits_is_bad_input(tmp_path: Path) -> None:
    stages = [{"type": "frontier", "smallest": 64, "compile": [False], "activation_checkpointing": ["none"]}]
    ran = run(tmp_path, stages=stages, memory_limit="1MiB", sample_budget=4096)
    assert ran.ending.exit_code == 2
    assert "not even micro-batch 64 fits into memory_limit (1 MiB)" in ran.ending.message
    assert "raise memory_limit" in ran.ending.message


def test_a_failed_probe_is_exit_code_1_though_no_recommendation_was_asked_for(tmp_path: Path) -> None:
    modes = {"type": "frontier", "activation_checkpointing": ["none", "full"], "compile": [False], "largest": 1}
    modes |= {"rounds": 1, "finalists": 1}
    ran = run(tmp_path, model={"target": "tests.support.studies:BatchNormModel"}, stages=[modes])
    assert ran.study.conclusions["frontier"].ok
    assert ran.ending.exit_code == 1
    assert "1 trial(s) failed" in ran.ending.message
    assert "needs repeated blocks" in ran.ending.message


# Studies that end early


EQUIVALENCE = {"type": "equivalence", "micro_batch_sizes": [8, 4], "steps": 3}


def test_a_model_whose_batch_cannot_be_split_is_a_finding_with_the_number_and_the_study_goes_on(tmp_path: Path) -> None:
    stages = [EQUIVALENCE, *grid()]
    ran = run(tmp_path, model={"target": "tests.support.studies:BatchNormModel"}, stages=stages)
    assert ran.ending.exit_code == 0, ran.ending.message
    rho = ran.study.trials["equivalence-m4k4"].measured("rho")
    assert rho > 1e-3
    assert ran.study.trials["equivalence-m8k2-permuted1"].measured("rho") < 1e-4
    evidence = ran.recommended()["evidence"]
    assert f"rho = {rho:.2e}" in evidence["stages"]["equivalence"]
    assert "1 BatchNorm layers" in evidence["stages"]["equivalence"]
    assert any("comparable where their micro-batch size is the same" in note for note in evidence["notes"])


def test_a_loss_that_is_no_sum_fails_the_study_with_the_numbers(tmp_path: Path) -> None:
    data = {"target": "tests.support.tiny:data", "kwargs": {"padded": True}}
    loss = "tests.trainers.test_equivalence:over_the_longest"
    ran = run(tmp_path, data=data, loss=loss, stages=[EQUIVALENCE, *grid()])
    assert ran.ending.exit_code == 1
    ratio = ran.study.trials["equivalence-m8k2"].measured("parts_loss_ratio")
    assert (
        f"the losses add up to {ratio:.3f} x and the num_targets add up to 1.000 x that of all in" in ran.ending.message
    )
    check_running_again_changes_nothing(ran)  # which does not get past a stage that failed


def test_an_interrupt_that_tune_swallowed_concludes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_stage", lambda *told: os.kill(os.getpid(), signal.SIGINT))
    ran = run(tmp_path, stages=grid())
    assert ran.ending.exit_code == 130
    assert not ran.study.conclusions
