"""Who takes part in the train stage, and what each may train on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import FEWEST_STEPS
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.probing import num_full_runs
from batchscout.orchestrator.stages.train.lineup import Lineup, lineup_of
from batchscout.orchestrator.study.trial import PLANNED_RATE
from tests.support.known_stage import Known
from tests.support.lane_player import study_of
from tests.support.loss_worlds import IDEAL, throughput_of
from tests.support.worlds import FULL

BATCHES = (4, 8, 16, 64, 256)
BUDGET = 4096
"""Of the baseline, batch 8."""


def known_of(rates: dict[int, float], **changes: Any) -> Known:
    keys: dict[str, Any] = {"sample_budget": BUDGET} | changes
    return Known({"type": "train"}, **keys).concluded(throughput_of(rates))


def lineup(rates: dict[int, float], **changes: Any) -> Lineup:
    return lineup_of(known_of(rates, **changes).context)


def budgets(found: Lineup) -> dict[int, int]:
    return {one.split.effective_batch_size: one.sample_budget for one in found.candidates}


RATES = {batch: IDEAL.samples_per_second(batch) for batch in BATCHES}


@pytest.mark.parametrize("objective", [{}, {"objective": "target", "target_loss": 3.0}])
def test_equal_time_gives_each_batch_the_samples_it_gets_done_in_whole_steps(objective: dict[str, Any]) -> None:
    found = lineup(RATES, **objective)
    assert found.seconds is not None
    assert found.seconds == pytest.approx(BUDGET / RATES[8])
    assert budgets(found)[8] == BUDGET, "the baseline's is the study file's, as it is"
    assert budgets(found).keys() == set(BATCHES)
    for batch, budget in budgets(found).items():
        assert budget % batch == 0
        assert abs(budget - RATES[batch] * found.seconds) <= batch / 2
    assert found.left_out == ()


def test_equal_samples_gives_every_batch_as_many() -> None:
    found = lineup(RATES, objective="samples")
    assert set(budgets(found).values()) == {BUDGET}
    assert found.seconds is None


def test_a_batch_of_too_few_steps_is_left_out_with_both_numbers() -> None:
    found = lineup(RATES, sample_budget=2048)
    steps = round(2048 / RATES[8] * RATES[256] / 256)
    assert steps < FEWEST_STEPS
    assert budgets(found).keys() == {4, 8, 16, 64}
    (note,) = found.left_out
    assert "effective batch 256: in a full run it would get 22 optimizer steps, and 40 are needed; 2.82 x" in note
    enough = int(note.split("sample_budget: ")[1].split()[0])
    assert 256 in budgets(lineup(RATES, sample_budget=enough))
    assert 256 not in budgets(lineup(RATES, sample_budget=enough - 10))
    enough = lineup({8: 100.0, 16: 100.0}, sample_budget=16 * FEWEST_STEPS)
    fewer = lineup({8: 100.0, 16: 100.0}, sample_budget=16 * FEWEST_STEPS - 16)
    assert [enough.left_out == (), fewer.left_out == ()] == [True, False]


def test_the_baseline_takes_part_however_few_its_steps_are() -> None:
    found = lineup({8: 100.0, 32: 100.0}, sample_budget=80)
    assert budgets(found) == {8: 80}
    assert found.baseline.protected


@pytest.mark.parametrize(
    ("reference", "baseline"), [(1, 4), (4, 4), (7, 8), (11, 8), (12, 16), (32, 16), (33, 64), (9999, 256)]
)
def test_the_baseline_is_the_candidate_nearest_in_proportion_to_the_reference_batch(
    reference: int, baseline: int
) -> None:
    found = lineup(RATES, sample_budget=60_000, optimizer={"lr": 1e-3, "reference_batch_size": reference})
    assert found.baseline.split.effective_batch_size == baseline
    assert [one.split.effective_batch_size for one in found.candidates if one.protected] == [baseline]
    assert found.baseline.told.startswith("baseline")
    assert budgets(found)[baseline] == 60_000
    distance = {batch: abs(math.log(batch / reference)) for batch in BATCHES}
    assert distance[baseline] == min(distance.values())


def test_roles_say_which_is_the_baseline_and_which_is_fastest() -> None:
    found = lineup({4: 90.0, 8: 100.0, 64: 300.0, 128: 280.0}, sample_budget=60_000)
    assert [(one.split.effective_batch_size, one.told) for one in found.candidates] == [
        (4, ""), (8, "baseline"), (64, "most samples/s"), (128, ""),
    ]  # fmt: skip


def test_a_run_of_the_baselines_batch_at_another_rate_is_not_called_the_baseline() -> None:
    known = known_of({8: 100.0, 16: 90.0})
    known.context = replace(known.context, num_lanes=6)
    of_batch = [one for one in known.propose() if one.config.effective_batch_size == 8]
    assert len(of_batch) > 1, "with so many lanes rates beside the rule's are among the first runs"
    assert [(one.protected, one.role) for one in of_batch] == [
        (True, "baseline, most samples/s"), *[(False, "most samples/s")] * (len(of_batch) - 1)
    ]  # fmt: skip


def test_a_candidate_trains_in_its_fastest_form_at_the_scaled_rate_and_knows_its_speed() -> None:
    known = known_of(RATES)
    for proposal in known.propose():
        config = proposal.config
        batch = config.effective_batch_size
        assert (config.micro_batch_size, config.gradient_accumulation_steps) == (min(batch, 64), max(1, batch // 64))
        assert config.learning_rate == pytest.approx(1e-3 * (batch / 8) ** 0.5)
        assert config.sample_budget == budgets(lineup(RATES))[batch]
        assert config.evaluations[-1] == config.sample_budget, "its schedule ends where its own budget does"
        assert proposal.expected == {PLANNED_RATE: RATES[batch]}


def test_each_runs_in_the_mode_in_which_it_is_fastest() -> None:
    findings = throughput_of({8: 100.0, 16: 150.0})
    slower, faster = findings.rates
    findings = replace(findings, rates=(slower, replace(faster, mode=FULL)))
    proposals = Known({"type": "train"}, sample_budget=BUDGET).concluded(findings).propose()
    modes = {p.config.effective_batch_size: p.config.activation_checkpointing for p in proposals}
    assert modes == {8: "none", 16: "full"}


def test_without_rates_the_study_files_batch_is_alone_and_the_baseline() -> None:
    batch = {"micro_batch_size": 4, "effective_batch_size": 16}
    known = Known({"type": "train"}, batch=batch)
    found = lineup_of(known.context)
    assert (budgets(found), found.seconds, found.left_out) == ({16: 512}, None, ())
    (proposal,) = known.propose()
    assert (proposal.id, proposal.protected, proposal.role) == ("train-m4k4", True, "baseline")
    assert num_full_runs(known.config, known.study) == 1, "and so many are promised"
    assert proposal.expected == {}


@pytest.mark.parametrize(
    ("batch", "baseline"), [({}, 32), ({"micro_batch_size": 1}, 1), ({"effective_batch_size": 8}, 8)]
)
def test_a_batch_that_is_given_is_the_baseline_whatever_it_is(batch: dict[str, int], baseline: int) -> None:
    config = study_of(batch=batch, optimizer={"reference_batch_size": 32})
    assert baseline_batch(config) == baseline
    stored = StudyConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))))
    assert baseline_batch(stored) == baseline, "study.yaml, with every default written out, says the same"
