"""Whole stages, played without Ray: what the Director decides, and that a crash at any moment changes none of it."""

from __future__ import annotations

import json
import math
import random
import re
import zlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.decisions.decision import Action
from batchscout.orchestrator.decisions.director import MAX_INTERRUPTIONS, Director, Wanted
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.findings import Findings, found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.grid import GridFindings
from batchscout.orchestrator.stages.train import TrainFindings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Evaluated, RunBegan, proposed
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal, read_lines, replay
from batchscout.orchestrator.study.messages import Message
from batchscout.orchestrator.study.state import Halted, Study
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.notices import Notice, NoticeKind
from tests.support.every import for_every
from tests.support.known_stage import Known
from tests.support.lane_player import Player, World, director_of, know, next_trial, play_stage, steps_of, study_of
from tests.support.outcome import found_by
from tests.support.worlds import (
    BOOM,
    FIELD,
    FRONTIER,
    KNOWN,
    NONE,
    TIMED,
    bowl,
    by_rate,
    curves,
    failing,
    field_config,
    field_curves,
    field_with_accidents,
    measured,
    memory_world,
    run_at,
    train_config,
)


def probed(study: Study, mode: str) -> dict[int, TrialState]:
    trials = [t for t in study.of_stage("frontier") if t.config.activation_checkpointing == mode]
    return {t.config.micro_batch_size: t.state for t in trials}


@pytest.mark.slow
@pytest.mark.parametrize("edge", [1, 2, 3, 5, 7, 8, 31, 32, 33, 100, 777, 1023, 1024, 5000])
def test_the_frontier_finds_the_edge_of_memory_exactly_or_where_it_is_far_within_2_percent(
    tmp_path: Path, edge: int
) -> None:
    config = study_of(stages=[{"type": "frontier", "activation_checkpointing": ["none", "full"]}])
    study = play_stage(tmp_path / "journal.jsonl", config, "frontier", memory_world({"none": edge, "full": 2 * edge}))
    roomy = edge >= 1024  # then checkpointing has nothing to give, and is not searched
    assert len(probed(study, "full")) == 1 if roomy else len(probed(study, "full")) >= 1
    for mode, true_edge in [("none", min(edge, 1024))] + [("full", min(2 * edge, 1024))] * (not roomy):
        found = probed(study, mode)
        fits = [size for size, state in found.items() if state is TrialState.COMPLETE]
        fails = [size for size, state in found.items() if state is TrialState.OUT_OF_MEMORY]
        step = max(1, int(0.02 * true_edge))
        assert true_edge - step < max(fits) <= true_edge
        assert fails == [] if true_edge == 1024 else true_edge < min(fails) <= true_edge + step
        assert len(found) <= 3 * math.log2(true_edge + 1) + 10
    assert study.conclusions["frontier"].ok


def test_a_frontier_probe_is_never_larger_than_the_data(tmp_path: Path) -> None:
    config = study_of(stages=[{"type": "frontier", "activation_checkpointing": ["none"]}], world_size=2)
    world = memory_world({"none": 10_000})
    study = play_stage(tmp_path / "journal.jsonl", config, "frontier", world, facts=Facts(num_train_samples=101))
    assert max(probed(study, "none")) == 50


# Runs that are proposed at once


def start_next(director: Director) -> Trial:
    trial = next_trial(director)
    assert trial is not None
    director.on_started(trial.id)
    return trial


def states(study: Study) -> dict[str, str]:
    return {trial.id: str(trial.state) for trial in study.of_stage("grid")}


def test_synchronous_rungs_keep_the_best_half(tmp_path: Path) -> None:
    study = play_stage(tmp_path / "journal.jsonl", field_config(), "grid", field_curves)
    assert states(study) == {
        run_at(1e-3): "pruned",  # 3.9
        run_at(2e-3): "complete",  # 3.1
        run_at(3e-3): "pruned",  # 3.15: second of 2 at 256
        run_at(4e-3): "pruned",  # 3.3
        run_at(5e-3): "pruned",  # 3.2: third of 3 at 128, where the best 2 go on
        run_at(6e-3): "pruned",  # 3.4
    }
    assert study.trials[run_at(6e-3)].explanation.startswith(
        "rung: ranked 5 of 6 after 64 samples; the best 3 continue"
    )
    places = {rate: place_of({"reason": study.trials[run_at(rate)].reason}) for rate in (3e-3, 5e-3)}
    assert places == {3e-3: (2, 2), 5e-3: (3, 3)}


def winner(study: Study, stage: str) -> str | None:
    kind = {"train": TrainFindings, "grid": GridFindings}[stage]
    findings = found(study, kind)
    return findings.winner if findings else None


def place_of(event: dict[str, Any]) -> tuple[int, int]:
    """(place, of how many)"""
    place, num_here = re.findall(r"ranked (\d+) of (\d+)", event["reason"])[0]
    return int(place), int(num_here)


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_asynchronous_rungs_on_one_lane_end_and_cut_nobody_who_has_a_chance_left(tmp_path: Path) -> None:
    config = field_config(pruner={"synchronous": False})
    study = play_stage(tmp_path / "journal.jsonl", config, "grid", field_curves)
    assert set(states(study).values()) == {"complete", "pruned"}
    assert winner(study, "grid") == run_at(2e-3)
    events = events_of(tmp_path / "journal.jsonl")
    assert "paused" in [event["kind"] for event in events]
    cut = [place_of(event) for event in events if event["kind"] == "ended" and " after 64 samples" in event["reason"]]
    assert cut
    assert all(place > 3 for place, _ in cut), "half of 6 go on"


def grid_config(num_rates: int) -> StudyConfig:
    rates = [1e-4 * (i + 1) for i in range(num_rates)]
    pruner = {"type": "asha", "min_samples": 64, "synchronous": False}
    return study_of(stages=[{"type": "grid", "micro_batch_size": [8], "learning_rate": rates, "pruner": pruner}])


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_asynchronous_the_first_to_come_to_the_first_rung_waits_only_where_another_wants_its_lane(
    tmp_path: Path, num_lanes: int
) -> None:
    path = tmp_path / "journal.jsonl"
    play_stage(path, grid_config(3), "grid", by_rate, num_lanes)
    events = events_of(path)
    first = next(event["id"] for event in events if "64" in event.get("rungs", ()))
    waited = any(event["kind"] == "paused" and (event["id"], event["rung"]) == (first, 64) for event in events)
    assert waited == (num_lanes == 1)


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_asynchronous_few_pass_the_first_rung_while_newcomers_crowd(tmp_path: Path, num_lanes: int) -> None:
    """Unless they are sure to be among the best half of all."""
    path, num_rates = tmp_path / "journal.jsonl", 40
    study = play_stage(path, grid_config(num_rates), "grid", by_rate, num_lanes)
    started, shares = set(), {True: [], False: []}
    for event in events_of(path):
        if event["kind"] == "started":
            started.add(event["id"])
        if event["kind"] == "promoted" and event["rung"] == 64:
            place, num_here = place_of(event)
            if place > num_here - num_rates / 2:
                shares[num_rates - len(started) >= 4 * num_lanes].append(place / num_here)
    assert 0 < max(shares[True]) <= 1 / 4 < max(shares[False]) <= 1 / 2
    assert all(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in study.of_stage("grid"))


def value_at(rung: int, trial: Trial) -> float:
    value = trial.rungs[rung]
    assert value is not None
    return value


def test_every_verdict_is_the_one_that_the_pure_rule_gives_on_the_same_values(tmp_path: Path) -> None:
    """Half of those that stood at a rung went past it, and none of those that were cut was better than one of them."""
    study = play_stage(tmp_path / "journal.jsonl", field_config(), "grid", field_curves, num_lanes=2)
    trials = study.of_stage("grid")
    for rung in (64, 128, 256):
        here = [trial for trial in trials if rung in trial.rungs]
        past = [trial for trial in here if rung in trial.promoted]
        cut = [trial for trial in here if rung not in trial.promoted]
        assert all(trial.state is TrialState.PRUNED for trial in cut)
        assert len(past) == math.ceil(len(here) / 2)
        assert max(value_at(rung, t) for t in past) < min(value_at(rung, t) for t in cut)


@pytest.mark.parametrize("num_lanes", [2, 3])
def test_the_number_of_lanes_does_not_change_what_synchronous_rungs_decide(tmp_path: Path, num_lanes: int) -> None:
    one = play_stage(tmp_path / "one.jsonl", field_config(), "grid", field_with_accidents, 1)
    many = play_stage(tmp_path / "many.jsonl", field_config(), "grid", field_with_accidents, num_lanes)
    assert states(one) == states(many)
    assert one.conclusions == many.conclusions


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_accidents_end_a_trial_with_their_reason_and_the_stage_goes_on(
    tmp_path: Path, synchronous: bool, num_lanes: int
) -> None:
    config = field_config(pruner={"synchronous": synchronous})
    study = play_stage(tmp_path / "journal.jsonl", config, "grid", field_with_accidents, num_lanes)
    causes = {trial.id: trial.cause for trial in study.of_stage("grid")}
    assert causes.pop(run_at(5e-3)) is Cause.DIVERGED
    assert causes.pop(run_at(3e-3)) is Cause.OUT_OF_MEMORY
    assert causes.pop(run_at(2e-3)) is None
    assert set(causes.values()) == {Cause.RUNG}
    assert winner(study, "grid") == run_at(2e-3)


def test_seeds_stand_at_a_rung_together_and_go_on_together(tmp_path: Path) -> None:
    study = play_stage(tmp_path / "journal.jsonl", field_config(seeds=[0, 1, 2]), "grid", field_curves, 2)
    for rate in FIELD:
        fates = {(str(t.state), t.promoted) for t in study.of_stage("grid") if t.id.startswith(run_at(rate) + "-s")}
        assert len(fates) == 1, rate
    assert winner(study, "grid") == run_at(2e-3) + "-s0"


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("outcome", ["failed", "out_of_memory"])
def test_the_other_seeds_of_one_that_ended_do_not_wait_for_it_for_ever(
    tmp_path: Path, synchronous: bool, outcome: str
) -> None:
    one_seed_fails = failing(field_curves, lambda one: one.seed == 1 and one.learning_rate == 2e-3, outcome)
    config = field_config(seeds=[0, 1, 2], pruner={"synchronous": synchronous})
    study = play_stage(tmp_path / "journal.jsonl", config, "grid", one_seed_fails, 2)
    assert {study.trials[f"{run_at(2e-3)}-s{seed}"].state for seed in (0, 2)} == {TrialState.PRUNED}
    assert winner(study, "grid") == run_at(3e-3) + "-s0"


@pytest.mark.parametrize("outcome", ["failed", "out_of_memory"])
def test_the_other_seeds_of_a_baseline_that_failed_are_never_cut(tmp_path: Path, outcome: str) -> None:
    one_seed_fails = failing(bowl, lambda one: one.seed == 1 and one.effective_batch_size == 8, outcome)
    config = train_config(seeds=[0, 1, 2], max_runs=4)
    study = play_stage(tmp_path / "journal.jsonl", config, "train", one_seed_fails, 2, found=TIMED)
    assert {study.trials[f"train-m8k1-s{seed}"].state for seed in (0, 2)} == {TrialState.COMPLETE}
    assert winner(study, "train")


def test_the_baseline_is_never_cut_however_bad_it_is(tmp_path: Path) -> None:
    def worst(config: TrialConfig, samples: int) -> dict[str, Any]:
        metrics = bowl(config, samples)
        return metrics | {"val_loss": metrics["val_loss"] + (config.effective_batch_size == 8)}

    path = tmp_path / "journal.jsonl"
    study = play_stage(path, train_config(max_runs=3), "train", worst, num_lanes=3, found=TIMED)
    promoted = [e["reason"] for e in events_of(path) if e["kind"] == "promoted" and e["id"] == "train-m8k1"]
    assert all(reason.endswith("; never cut before the end") for reason in promoted)
    assert study.trials["train-m8k1"].state is TrialState.COMPLETE
    others = [trial.metric("val_loss") for trial in study.of_stage("train") if not trial.protected]
    assert all(loss is not None and loss < study.trials["train-m8k1"].measured("val_loss") for loss in others)


def test_a_loss_that_rises_above_its_start_ends_the_trial(tmp_path: Path) -> None:
    def rising(config: TrialConfig, samples: int) -> dict[str, Any]:
        return field_curves(config, samples) | ({"loss": 5 + samples / 50} if config.learning_rate == 2e-3 else {})

    study = play_stage(tmp_path / "journal.jsonl", field_config(), "grid", rising)
    assert study.trials[run_at(2e-3)].explanation.startswith("diverged:")


def test_a_batch_that_passes_several_rungs_in_one_step_is_judged_at_each_of_them(tmp_path: Path) -> None:
    """16 samples a step cross the rungs 4, 8 and 16 at once."""
    for synchronous in (True, False):
        config = field_config(pruner={"min_samples": 4, "synchronous": synchronous})
        study = play_stage(tmp_path / f"{synchronous}.jsonl", config, "grid", field_curves, 2)
        complete = [trial for trial in study.of_stage("grid") if trial.state is TrialState.COMPLETE]
        assert run_at(2e-3) in [trial.id for trial in complete]
        for trial in complete:
            assert trial.promoted == set(trial.config.rungs), trial.id
        pruned = [trial for trial in study.of_stage("grid") if trial.state is TrialState.PRUNED]
        for trial in pruned:
            cut_at = int(trial.reason.split(" after ")[1].split()[0])
            assert trial.promoted == {rung for rung in trial.config.rungs if rung < cut_at}, trial
        assert len({trial.promoted for trial in pruned}) > 1, "at several rungs"


def test_a_loss_that_is_nan_only_at_the_very_end_is_divergence_not_a_result(tmp_path: Path) -> None:
    def ends_in_nan(config: TrialConfig, samples: int) -> dict[str, Any]:
        last = config.learning_rate == 2e-3 and samples >= config.sample_budget
        return field_curves(config, samples) | ({"val_loss": math.nan} if last else {})

    config = field_config(pruner={"min_samples": 256})
    study = play_stage(tmp_path / "journal.jsonl", config, "grid", ends_in_nan)
    assert study.trials[run_at(2e-3)].state is TrialState.PRUNED
    assert study.trials[run_at(2e-3)].explanation.startswith("diverged:")
    assert winner(study, "grid") == run_at(3e-3)


def test_everyone_diverging_is_said_and_not_a_crash(tmp_path: Path) -> None:
    def all_nan(config: TrialConfig, samples: int) -> dict[str, Any]:
        return {"loss": math.nan, "val_loss": math.nan}

    study = play_stage(tmp_path / "journal.jsonl", train_config(), "train", all_nan, found=KNOWN)
    assert {str(trial.state) for trial in study.of_stage("train")} == {"pruned"}
    assert not study.conclusions["train"].ok
    assert study.conclusions["train"].reason.startswith("nothing trains: ")


RISING = {"loss": lambda samples: 5 + samples / 50}
SPIKE = {"loss": lambda samples: 9.0 if samples > 300 else 5 + samples % 7 / 100}
SLOW = {"tokens_per_second": lambda samples: 100.0}


@pytest.mark.parametrize(
    ("rule", "others_off", "trouble", "code"),
    [
        ("above_start_factor", {"spike_deviations": None}, RISING, "diverged"),
        ("spike_deviations", {"above_start_factor": None}, SPIKE, "diverged"),
        ("min_relative_throughput", {}, SLOW, "low_throughput"),
    ],
)
def test_every_kill_rule_names_itself_as_the_reason_and_can_be_turned_off(
    tmp_path: Path, rule: str, others_off: dict[str, Any], trouble: dict[str, Any], code: str
) -> None:
    """One of two splits of the same effective batch is in trouble."""

    def world(config: TrialConfig, samples: int) -> dict[str, Any]:
        troubled = config.micro_batch_size == 8
        return curves(config, samples) | ({key: of(samples) for key, of in trouble.items()} if troubled else {})

    splits = {"type": "grid", "micro_batch_size": [16, 8], "effective_batch_size": [16]}
    for name, changes in (("on", {}), ("off", {rule: None})):
        config = study_of(stages=[splits], evaluations=16, sample_budget=1024, kill=others_off | changes)
        study = play_stage(tmp_path / f"{name}.jsonl", config, "grid", world, 2)
        troubled = study.trials["grid-m8k2-none"]
        if name == "on":
            assert (troubled.state, troubled.cause) == (TrialState.PRUNED, code)
        else:
            assert troubled.state is TrialState.COMPLETE


def test_a_slow_trial_is_stopped_by_a_faster_one_of_the_same_effective_batch_and_no_other(tmp_path: Path) -> None:
    """Effective batch 16 as 16 x 1 is 3 times slower than as 8 x 2. 12 x 1 is as slow, but has no equal; of 8 x 2, one
    learning rate is slower than another, but runs the same code: that is the machine's noise."""

    def rates(config: TrialConfig, samples: int) -> dict[str, Any]:
        rate = {16: 1000.0, 12: 1000.0, 8: 3000.0 if config.learning_rate == 1e-3 else 1200.0}[config.micro_batch_size]
        return curves(config, samples) | {"tokens_per_second": rate}

    axes = {"micro_batch_size": [8, 12, 16], "effective_batch_size": [12, 16], "learning_rate": [1e-3, 2e-3]}
    config = study_of(stages=[{"type": "grid"} | axes], sample_budget=1024, evaluations=16)
    study = play_stage(tmp_path / "journal.jsonl", config, "grid", rates, 6)
    slow = [trial.id for trial in study.of_stage("grid") if trial.cause is Cause.LOW_THROUGHPUT]
    assert slow == ["grid-m16k1-none-lr0.001", "grid-m16k1-none-lr0.002"]
    assert {"grid-m8k2-none-lr0.002", "grid-m12k1-none-lr0.001"} < set(study.trials)


def test_a_trial_whose_relay_is_lost_waits_and_is_the_next_to_run(tmp_path: Path) -> None:
    config = train_config()
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        know(journal, found=KNOWN)
        director = director_of(config, journal, "train")
        lost = start_next(director)
        assert next_trial(director) is None, "one lane, one trial"
        director.on_relay_lost(lost.id, "its Tune actor was lost")
        waiting = journal.study.trials[lost.id]
        assert (waiting.state, waiting.explanation) == (TrialState.WAITING, "interrupted: its Tune actor was lost")
        assert next_trial(director) == waiting


def test_a_lost_relay_changes_nothing_of_a_trial_that_did_not_run(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl", "played") as journal:
        director = director_of(RATES, journal, "grid")
        trial = start_next(director)
        director.on_message(trial.id, Message(outcome="failed", reason="its own doing"))
        ended = journal.study.trials[trial.id]
        director.on_relay_lost(trial.id, "its Tune actor was lost")
        assert journal.study.trials[trial.id] == ended


class _Listener(Observer):
    def __init__(self) -> None:
        self.heard: list[tuple[str | None, Notice]] = []

    def noticed(self, trial: Trial | None, notice: Notice) -> None:
        self.heard.append((trial and trial.id, notice))


def test_what_a_trial_met_and_dealt_with_is_journaled_and_told_and_the_trial_runs_on(tmp_path: Path) -> None:
    notice, listener = Notice(NoticeKind.DAMAGED_CHECKPOINT, "a.pt is damaged; the run begins again"), _Listener()
    with Journal(tmp_path / "journal.jsonl", "played") as journal:
        director = director_of(RATES, journal, "grid", observer=listener)
        trial = start_next(director)
        before = journal.study.trials[trial.id]
        assert director.on_message(trial.id, Message(notice=notice)).action is Action.GO_ON
        assert journal.study.trials[trial.id] == before
        assert listener.heard == [(trial.id, notice)]
    assert replay(tmp_path / "journal.jsonl", "played").notices == {trial.id: [notice]}


def evaluations_in(path: Path) -> list[Evaluated]:
    return [line.event for line in read_lines(path) if isinstance(line.event, Evaluated)]


INTERRUPTED: Any = Message(outcome="interrupted", reason="its node has died")


def test_a_trial_whose_machine_is_lost_waits_and_is_the_next_to_run(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl", "played") as journal:
        director = director_of(RATES, journal, "grid")
        trial = start_next(director)
        director.on_message(trial.id, INTERRUPTED)
        waiting = journal.study.trials[trial.id]
        assert waiting.state is TrialState.WAITING
        assert (waiting.cause, waiting.reason) == (Cause.INTERRUPTED, INTERRUPTED.reason)
        assert next_trial(director) == waiting
    assert replay(tmp_path / "journal.jsonl", "played").trials[trial.id] == waiting


def test_one_whose_machine_is_lost_again_and_again_before_it_gets_anywhere_fails(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl", "played") as journal:
        director = director_of(RATES, journal, "grid")
        trial = next_trial(director)
        assert trial is not None
        for evaluated in (True, False):
            for _ in range(MAX_INTERRUPTIONS - evaluated):
                director.on_started(trial.id)
                director.on_message(trial.id, INTERRUPTED)
            if evaluated:
                director.on_started(trial.id)
                director.on_message(trial.id, Message({"samples_seen": 64, "val_loss": 3.0}, evaluated=True))
        ended = journal.study.trials[trial.id]
        assert ended.state is TrialState.FAILED
        said = f"failed: its machine was lost {MAX_INTERRUPTIONS} times since its last evaluation; its node"
        assert ended.explanation.startswith(said)


def test_an_evaluation_told_again_by_a_run_that_went_on_from_there_is_journaled_once_and_is_no_progress(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    evaluation = Message({"samples_seen": 64, "val_loss": 3.0}, evaluated=True)
    with Journal(path, "played") as journal:
        director = director_of(RATES, journal, "grid")
        trial = start_next(director)
        assert director.on_message(trial.id, evaluation).action is Action.GO_ON
        for times in range(1, MAX_INTERRUPTIONS + 1):
            director.on_message(trial.id, INTERRUPTED)
            known = journal.study.trials[trial.id]
            assert (known.state is TrialState.FAILED) == (times == MAX_INTERRUPTIONS), known.explanation
            if not known.state.ended:
                director.on_started(trial.id)
                assert director.on_message(trial.id, evaluation).action is Action.GO_ON
    assert len(evaluations_in(path)) == 1


def test_the_last_evaluation_of_a_run_that_ends_again_is_journaled_once(tmp_path: Path) -> None:
    """The driver was killed between the two lines that an end is: the run evaluates itself again, and ends."""
    path, metrics = tmp_path / "journal.jsonl", {"samples_seen": 64.0, "val_loss": 3.0}
    with Journal(path, "played") as journal:
        trial = start_next(director_of(RATES, journal, "grid"))
        journal.append(Evaluated(id=trial.id, metrics={**metrics}))
        journal.append(RunBegan(token="second"))
        again = director_of(RATES, journal, "grid")
        again.on_started(trial.id)
        again.on_message(trial.id, Message(metrics, outcome="complete"))
        assert journal.study.trials[trial.id].state is TrialState.COMPLETE
    assert len(evaluations_in(path)) == 1


def test_a_trial_told_to_stop_by_ctrl_c_waits_to_go_on(tmp_path: Path) -> None:
    config = train_config()
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        know(journal, found=KNOWN)
        director = director_of(config, journal, "train")
        first = start_next(director)
        director.on_message(first.id, Message(outcome="stopped"))
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="second"))
        assert journal.study.trials[first.id].state is TrialState.WAITING
        assert start_next(director_of(config, journal, "train")).id == first.id


# A crash at any moment


def decided(study: Study) -> dict[str, Any]:
    """All that a resumed study must not change or do otherwise: no clock is among it, nor who came last to a rung and did not wait there."""
    trials = {t.id: replace(t, seconds=0.0, holds=(), paused_at=frozenset()) for t in study.trials.values()}
    return {"trials": trials, "conclusions": study.conclusions}


@pytest.mark.parametrize("pruner", [{"synchronous": True}, {"synchronous": True, "min_samples": 4}])
def test_killed_after_any_journal_line_the_study_ends_as_if_nothing_had_happened(
    tmp_path: Path, pruner: dict[str, Any]
) -> None:
    """On one lane."""
    config = field_config(sample_budget=256, evaluations=2, pruner=pruner)
    whole, resumed = play_killed_after_any_line(tmp_path, config, "grid", field_with_accidents)
    for study in resumed:
        assert decided(study) == decided(whole)


def play_killed_after_any_line(
    folder: Path, config: StudyConfig, stage: str, world: World, num_lanes: int = 1, found: Sequence[Findings] = ()
) -> tuple[Study, list[Study]]:
    """A study without a crash, and those that were killed after each line of its journal and then went on."""
    path = folder / "whole.jsonl"
    moments: list[tuple[int, dict[str, Any]]] = []
    with Journal(path, config.name) as journal:
        journal.append(RunBegan(token="first"))
        know(journal, found)
        player = Player(director_of(config, journal, stage, num_lanes), world, num_lanes)
        player.before_message = lambda: moments.append((path.read_bytes().count(b"\n"), deepcopy(player.disk)))
        whole = player.play()
    lines = path.read_bytes().splitlines(keepends=True)
    disks: dict[int, dict[str, Any]] = {}
    for begin, disk in moments:  # a run saves before it speaks: what a message led to was journaled on this disk
        disks |= dict.fromkeys(range(begin, len(lines) + 1), disk)
    resumed: list[Study] = []
    for kept in range(min(disks), len(lines) + 1):
        cut = folder / f"cut{kept}.jsonl"
        cut.write_bytes(b"".join(lines[:kept]))
        before = replay(cut, config.name)
        with Journal(cut, config.name) as journal:
            journal.append(RunBegan(token="second"))
            director = director_of(config, journal, stage, num_lanes)
            resumed.append(Player(director, world, num_lanes, disk=deepcopy(disks[kept])).play())
        for trial in before.trials.values():
            after = resumed[-1].trials[trial.id]
            assert trial.promoted <= after.promoted
            if trial.state.ended:
                assert after == trial, "an ended trial was touched again"
        assert decided(replay(cut, config.name)) == decided(resumed[-1])
    return whole, resumed


def winning_batch(study: Study) -> int:
    return study.trials[winner(study, "train") or ""].config.effective_batch_size


@pytest.mark.slow
@pytest.mark.parametrize("num_lanes", [1, 5])
def test_killed_after_any_journal_line_train_ends_with_the_same_batch(tmp_path: Path, num_lanes: int) -> None:
    """On one lane it asks for the same runs, too, and ends with the same one. On five, what it asks for next depends on
    which run ended first, which is the clock's business, and it may end with a batch beside the best."""
    config = train_config(evaluations=1, max_runs=10, pruner={"min_samples": 128})
    whole, resumed = play_killed_after_any_line(tmp_path, config, "train", bowl, num_lanes, TIMED)
    trials = whole.of_stage("train")
    assert len(trials) > 4, "some were asked for because of how others ended"
    assert TrialState.PRUNED in {trial.state for trial in trials}
    for study in resumed:
        assert winning_batch(study) in ({4} if num_lanes == 1 else {2, 4, 8})
        assert len(study.of_stage("train")) <= 10
        assert num_lanes > 1 or decided(study) == decided(whole)


@pytest.mark.slow
def test_killed_after_any_journal_line_the_frontier_ends_at_the_same_edge(tmp_path: Path) -> None:
    modes = {"type": "frontier", "activation_checkpointing": ["none", "full"], "rounds": 2, "finalists": 2}
    config, world = study_of(stages=[modes]), memory_world({"none": 3, "full": 5})
    path = tmp_path / "whole.jsonl"
    whole = decided(play_stage(path, config, "frontier", world))
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        cut = tmp_path / f"cut{kept}.jsonl"
        cut.write_bytes(b"".join(lines[:kept]))
        assert decided(play_stage(cut, config, "frontier", world)) == whole


ONE_SEED_FAILS = failing(field_with_accidents, lambda one: one.seed == 1 and one.learning_rate in (2e-3, 4e-3))
"""Of two configurations: they stand at the first rung as the worst of those there, also once they are cut."""


@pytest.mark.parametrize(("seeds", "world"), [([0], field_with_accidents), ([0, 1], ONE_SEED_FAILS)])
def test_any_order_in_which_lanes_speak_gives_the_same_synchronous_decisions(
    tmp_path: Path, seeds: list[int], world: World
) -> None:
    """Which lane is faster is the clock's business, and must not be the study's."""
    found = []
    for seed in range(12):
        config = field_config(sample_budget=256, evaluations=2, seeds=seeds)
        order = random.Random(seed)
        with Journal(tmp_path / f"{seed}.jsonl", config.name) as journal:
            num_lanes = 1 + seed
            player = Player(director_of(config, journal, "grid", num_lanes), world, num_lanes)
            player.before_message = lambda p=player, o=order: _shuffle(p.running, o)
            study = player.play()
        found.append(({t.id: (t.state, t.promoted) for t in study.of_stage("grid")}, winner(study, "grid")))
    assert all(one == found[0] for one in found)


def _shuffle(running: dict[str, Any], order: random.Random) -> None:
    items = list(running.items())
    order.shuffle(items)
    running.clear()
    running.update(items)


def noisy(config: TrialConfig, samples: int) -> dict[str, Any]:
    """A healthy run with a micro-batch of one: each step's loss is 15 % off its mean."""
    draw = random.Random(zlib.crc32(f"{config.seed} {samples}".encode()))
    loss = (3 + 2 * math.exp(-samples / 100)) * draw.gauss(1, 0.15)
    return {"loss": loss, "val_loss": 3 + 2 * math.exp(-samples / 100), "train_seconds": samples / 100}


def test_a_resumed_healthy_run_is_not_taken_for_a_diverging_one(tmp_path: Path) -> None:
    """After a crash the driver has lost the first losses: those that it hears first are no start to compare with."""
    config = study_of(
        stages=[{"type": "grid"}], seeds=list(range(40)),
        evaluations=32, sample_budget=640,
    )  # fmt: skip
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="first"))
        director = director_of(config, journal, "grid", 40)
        disk: dict[str, tuple[int, Message | None]] = {proposal.id: (320, None) for proposal in director.proposals()}
        study = Player(director, noisy, 40, disk=disk).play()
    assert [trial.reason for trial in study.of_stage("grid") if trial.state is not TrialState.COMPLETE] == []


def test_steps_that_are_taken_again_after_a_lanes_death_are_no_spike(tmp_path: Path) -> None:
    """The losses of the checkpoint that it went on from are higher than those heard since."""
    config = study_of(stages=[{"type": "train", "pruner": {"type": "none"}}], sample_budget=512)
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="first"))
        director = director_of(config, journal, "train")
        trial = start_next(director)
        batch = trial.config.effective_batch_size
        draw = random.Random(1)
        losses = tuple(5 - 0.01 * step + draw.uniform(-0.01, 0.01) for step in range(100))
        director.on_message(trial.id, Message({"samples_seen": 100.0 * batch}, steps=steps_of(losses)))
        again = Message({"samples_seen": 10.0 * batch}, steps=steps_of(losses[5:10], first=6))
        assert director.on_message(trial.id, again).action is Action.GO_ON
        spike = Message({"samples_seen": 40.0 * batch}, steps=steps_of([*losses[10:35], *[9.0] * 5], first=11))
        assert director.on_message(trial.id, spike).cause is Cause.DIVERGED


def test_a_stage_that_cannot_be_run_as_earlier_ones_chose_ends_with_that_as_its_result(tmp_path: Path) -> None:
    config = study_of(stages=[{"type": "learning_rate"}], sample_budget=16)
    frontier = replace(FRONTIER, chosen=measured(NONE, 32))
    study = play_stage(tmp_path / "journal.jsonl", config, "learning_rate", curves, found=[frontier])
    found = study.conclusions["learning_rate"]
    assert not found.ok
    assert found.reason == "the effective batch (32) is larger than sample_budget (16); raise sample_budget"


# Runs that are asked for one after the other


def ids(proposals: list[Proposal]) -> list[str]:
    return [proposal.id for proposal in proposals]


def test_train_asks_for_as_many_runs_at_once_as_there_are_free_lanes() -> None:
    known = Known({"type": "train"}).concluded(*TIMED)
    first = known.ids()
    assert len(first) == 3
    for name, loss in zip(first, (3.1, 3.11, 3.12), strict=True):
        known.end(name, val_loss=loss)
    contexts = {num_lanes: replace(known.context, num_lanes=num_lanes) for num_lanes in (1, 2, 3)}
    asked = {num_lanes: known.stage.propose(context) for num_lanes, context in contexts.items()}
    assert [len(proposals) - 3 for proposals in asked.values()] == [1, 2, 3]
    assert len({*ids(asked[3])}) == 6
    assert ids(asked[3])[:5] == ids(asked[2])
    known.study.apply(proposed(asked[1][-1]))
    assert ids(known.stage.propose(contexts[1])) == ids(asked[1]), "its lane is busy"
    assert ids(known.stage.propose(contexts[2])) == ids(asked[2]), "one lane is free"


def test_a_lane_idles_only_where_train_needs_no_more_runs_or_one_waits_at_a_rung(tmp_path: Path) -> None:
    config = train_config(max_runs=7, evaluations=2)
    idle: list[int] = []
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        know(journal, TIMED)
        director = director_of(config, journal, "train", 2)
        player = Player(director, bowl, 2)

        def check() -> None:
            trials = journal.study.of_stage("train")
            if len(player.running) == 0 and not any(trial.state is TrialState.PAUSED for trial in trials):
                idle.append(len(trials))

        player.before_message = check
        study = player.play()
    assert len(study.of_stage("train")) == 7
    assert idle
    assert set(idle) == {7}, "only when no more may be asked for"


def test_train_goes_on_without_a_batch_that_cannot_be_run(tmp_path: Path) -> None:
    world = failing(bowl, lambda one: one.effective_batch_size == 16)
    study = play_stage(tmp_path / "journal.jsonl", train_config(max_runs=6), "train", world, found=TIMED)
    batches = [trial.config.effective_batch_size for trial in study.of_stage("train")]
    assert batches.count(16) == 1
    assert len(batches) == 6
    assert winning_batch(study) == 4


# A study that fails


ALL_FAIL = failing(curves, lambda _: True)
RATES = study_of(stages=[{"type": "grid", "learning_rate": [1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4]}])


def test_where_lanes_come_and_go_a_trial_is_started_for_each_that_is_there(tmp_path: Path) -> None:
    there = [0]
    with Journal(tmp_path / "journal.jsonl", RATES.name) as journal:
        context = StageContext(RATES.stages[0], RATES, journal.study)
        director = Director(context, journal, (), num_lanes=4, lanes_now=lambda: there[0])
        assert next_trial(director) is None, "no node has come"
        for number in (1, 2):
            there[0] = number
            started = start_next(director)
            assert next_trial(director) is None
        there[0] = 1
        director.on_message(started.id, Message(outcome="interrupted", reason="its node has died"))
        assert next_trial(director) is None, "it waits for another node"
        there[0] = 2
        assert start_next(director).id == started.id


def test_what_wants_lanes_are_the_trials_that_run_or_could_and_more_may_come_until_the_last_grid(
    tmp_path: Path,
) -> None:
    equivalence = {"type": "equivalence"}
    both = study_of(stages=[*(keys.model_dump() for keys in RATES.stages), equivalence])
    for config, more_may_come in ((RATES, False), (both, True)):
        with Journal(tmp_path / f"{more_may_come}.jsonl", config.name) as journal:
            director = director_of(config, journal, "grid")
            assert director.wanted().num_trials == 0
            start_next(director)
            assert director.wanted() == Wanted(6, more_may_come)


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_study_whose_trials_all_fail_at_once_stops_itself_and_says_why(tmp_path: Path, num_lanes: int) -> None:
    study = play_stage(tmp_path / "journal.jsonl", RATES, "grid", ALL_FAIL, num_lanes)
    failed = [trial for trial in study.trials.values() if trial.state is TrialState.FAILED]
    assert 3 <= len(failed) <= 2 + num_lanes
    others = [trial for trial in study.trials.values() if trial not in failed]
    assert len(others) >= 2
    assert all(trial.state is TrialState.PRUNED for trial in others)
    assert all(
        trial.explanation == f"stopped: all of the first {len(failed)} trials failed, so no more were started"
        for trial in others
    )
    found = study.conclusions["grid"]
    assert not found.ok
    assert found.reason.endswith(f"{failed[-1].id}: failed: {BOOM}")


def test_one_that_gets_anywhere_shows_that_the_others_may(tmp_path: Path) -> None:
    world = failing(curves, lambda one: one.learning_rate != 1e-4)
    study = play_stage(tmp_path / "journal.jsonl", RATES, "grid", world)
    assert sorted(str(trial.state) for trial in study.trials.values()) == ["complete"] + ["failed"] * 5
    assert study.conclusions["grid"].ok


def test_three_of_one_mode_do_not_speak_for_the_others(tmp_path: Path) -> None:
    world = failing(curves, lambda one: bool(one.compile))
    stage = {"type": "grid", "compile": [True, False], "learning_rate": [1e-4, 2e-4, 3e-4]}
    study = play_stage(tmp_path / "journal.jsonl", study_of(stages=[stage]), "grid", world)
    assert sorted(str(trial.state) for trial in study.trials.values()) == ["complete"] * 3 + ["failed"] * 3


def test_stopped_in_the_middle_of_giving_up_it_gives_up_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = play_stage(path, RATES, "grid", ALL_FAIL)
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        path.write_bytes(b"".join(lines[:kept]))
        again = play_stage(path, RATES, "grid", ALL_FAIL)
        assert {t.id: t.state for t in again.trials.values()} == {t.id: t.state for t in whole.trials.values()}
        assert again.conclusions == whole.conclusions


def test_in_the_frontier_one_mode_may_fail_where_another_runs(tmp_path: Path) -> None:
    modes: list[Any] = ["selective", "full", 0.5, 0.3, "none"]
    config = study_of(stages=[{"type": "frontier", "activation_checkpointing": modes}])
    only_without = failing(memory_world({"none": 10_000}), lambda one: one.activation_checkpointing != "none")
    study = play_stage(tmp_path / "journal.jsonl", config, "frontier", only_without)
    one = found_by(study, FrontierFindings)
    assert one.chosen.mode.activation_checkpointing == "none"


# A study that cannot go on


@pytest.mark.parametrize("outcome", ["no_lane", "no_storage", "other_code"])
def test_without_a_lane_or_room_on_the_disk_the_study_halts_and_its_trials_wait(tmp_path: Path, outcome: Any) -> None:
    with Journal(tmp_path / "journal.jsonl", "played") as journal:
        director = director_of(RATES, journal, "grid")
        trial = start_next(director)
        director.on_message(trial.id, Message(outcome=outcome, reason="the disk is full"))
        with pytest.raises(Halted, match="the disk is full"):
            next_trial(director)
        assert not any(trial.state.ended for trial in journal.study.trials.values())


# Any study at all


@pytest.mark.slow
@for_every(seed=range(25))
def test_whatever_happens_a_stage_ends_and_the_baseline_is_never_cut_for_losing(tmp_path: Path, seed: int) -> None:
    """Random losses, accidents, rungs, lanes, seeds, objectives, a random moment at which the driver dies."""
    draw = random.Random(seed)
    budget = draw.choice([64, 256, 512])
    objective = draw.choice(
        [{"objective": "time"}, {"objective": "samples"}, {"objective": "target", "target_loss": 3.3}]
    )
    config = train_config(
        max_runs=draw.choice([2, 5, 7]),
        sample_budget=budget,
        evaluations=draw.choice([1, 3, 8]),
        seeds=list(range(draw.choice([1, 1, 2, 3]))),
        pruner={
            "min_samples": draw.choice([1, 4, 16, 64, budget // 2]),
            "reduction_factor": draw.choice([2, 3, 4]),
            "synchronous": draw.random() < 0.5,
        },
        **objective,
    )
    lanes = draw.choice([1, 2, 3, 20])

    def world(trial: TrialConfig, samples: int) -> dict[str, Any]:
        fate = random.Random(
            zlib.crc32(f"{seed} {trial.effective_batch_size} {trial.learning_rate} {trial.seed}".encode())
        )
        ends_at, how = fate.randrange(4 * budget), fate.choice(["failed", "out_of_memory", "nan"])
        loss = fate.choice([3.0, 3.5, fate.uniform(3, 4)]) + math.exp(-samples / 100)
        if samples > ends_at and how != "nan":
            return {"outcome": how, "reason": f"{how}: by chance"}
        return {"loss": loss, "val_loss": math.nan if samples > ends_at else loss, "train_seconds": samples / 10}

    path = tmp_path / f"{seed}.jsonl"
    with Journal(path, config.name) as journal:
        journal.append(RunBegan(token="first"))
        know(journal, found=TIMED)
        first = Player(director_of(config, journal, "train", lanes), world, lanes, stop_after=draw.randrange(1, 40))
        first.play()
    before = replay(path, config.name)
    with Journal(path, config.name) as journal:
        journal.append(RunBegan(token="second"))
        study = Player(director_of(config, journal, "train", lanes), world, lanes, disk=first.disk).play()
    for trial in study.of_stage("train"):
        assert trial.state.ended
        assert not (trial.protected and trial.cause is Cause.RUNG), trial
        assert trial.state is not TrialState.PRUNED or trial.cause in (Cause.RUNG, Cause.DIVERGED)
    for trial in before.of_stage("train"):
        if trial.state.ended:
            assert study.trials[trial.id] == trial
    assert study.conclusions["train"].ok or not winner(study, "train")
    if any(t.state is TrialState.COMPLETE for t in study.of_stage("train")) and len(config.seeds) == 1:
        assert winner(study, "train") or config.objective == "target", "unless none is on its way to the target"
