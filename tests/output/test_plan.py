"""A plan says what the probes of a study may cost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batchscout.orchestrator.config.stages import FEWEST_STEPS
from batchscout.orchestrator.output.plan import MOST_ROWS, Predicted, estimate, print_plan
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.cost import Cost, cost_of, samples_per_second
from batchscout.orchestrator.stages.learning_rate import MOST_EXTENSIONS
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study
from tests.support.lane_player import study_of

FUNNEL = [{"type": kind} for kind in ("frontier", "throughput", "equivalence", "train")]


def planned(capsys: pytest.CaptureFixture[str], facts: Facts | None = None, **keys: Any) -> str:
    print_plan(study_of(**({"sample_budget": 10_000} | keys)), facts or Facts())
    return " ".join(capsys.readouterr().out.split())


def test_what_the_probes_may_take_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, stages=FUNNEL)
    assert said.count("limit of their steps: 4% of the time of all full runs, at least 60 s") == 2
    full_runs = int(said.split("at most ")[-1].split()[0])
    assert f"at most {full_runs * 10_000 * 2 // 100:,} samples" in said, "equivalence"
    given = planned(capsys, stages=[{"type": "frontier", "max_samples": 1234}, {"type": "train"}])
    assert "; at most 1,234 samples (max_samples)" in given


def test_what_given_splits_take_is_counted_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Two splits and three controls of 5 steps each, over 16 samples."""
    equivalence = {"type": "equivalence", "micro_batch_sizes": [8, 4], "steps": 5}
    assert "at most 400 samples" in planned(capsys, stages=[equivalence, {"type": "train"}])


def test_micro_batches_that_are_cut_by_tokens_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    facts = Facts(longest_sample=3000)
    said = planned(capsys, facts, stages=[{"type": "frontier"}], micro_batch={"tokens": 8192})
    assert (
        "one of size m holds as many tokens, with its padding, as m x the longest sample (3,000 tokens); at most 8,192 tokens, so m is at most 2"
        in said
    )
    assert "by tokens" not in planned(capsys, stages=FUNNEL)


def test_a_study_that_trains_nothing_has_no_share_to_keep(capsys: pytest.CaptureFixture[str]) -> None:
    assert "probes (" not in planned(capsys, stages=[{"type": "frontier"}])


def test_what_the_frontier_tries_at_its_fastest_point_alone_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    facts = Facts(num_blocks=2, chunked_cross_entropy=True)
    print_plan(study_of(stages=[{"type": "frontier"}]), facts)
    assert "  at the fastest point, also: the model as one graph, cross-entropy in chunks\n" in capsys.readouterr().out
    assert "at the fastest point" not in planned(capsys, stages=[{"type": "frontier"}]), "of a model that has neither"


def test_where_the_ranks_of_a_trial_run_is_told_where_the_study_file_leaves_a_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    placement = {"strategy": "strict_pack", "device": "H100"}
    said = "the 2 ranks of a trial run on one node (placement.strategy); trials run on H100 alone (placement.device)"
    assert said in planned(capsys, world_size=2, placement=placement)
    assert "placement" not in planned(capsys)


def test_what_a_stage_says_that_it_may_take_is_in_the_cost() -> None:
    """Comparisons at a batch that the file gives, and rates beyond an end of the grid, come on top of what a stage is else allowed."""
    equivalence = {"type": "equivalence", "effective_batch_size": 256, "steps": 20}
    config = study_of(sample_budget=4096, stages=[equivalence, {"type": "learning_rate", "multipliers": [0.5, 1, 2]}])
    cost = cost_of(config, Facts(), 100.0)
    context = StageContext(config.stages[0], config, Study(config.name))
    assert (
        f"at most {100 * cost.probes['equivalence']:,.0f} samples" in stage_of(config.stages[0]).describe(context)[-1]
    )
    assert cost.num_full_runs == 3 + MOST_EXTENSIONS


def test_the_cost_is_one_total_with_the_length_of_run_for_which_it_pays() -> None:
    """12 runs of 75 s for a run of 75 s: 16 minutes, as somebody's were without a word."""
    grid = {"type": "grid", "micro_batch_size": [4], "learning_rate": [0.001 * i for i in range(1, 13)]}
    config = study_of(stages=[grid], sample_budget=7500, placement={"lanes": 2})
    facts = Facts(pass_seconds=(0.0, 0.01))
    assert cost_of(config, facts, samples_per_second(config, (0.0, 0.01))) == Cost(75.0, 12, {})
    told = " ".join(estimate(config, facts, 12))
    assert "cost: at most 15 min 16 s on one lane, 7 min 38 s on 2 lanes: 12 full runs of 1 min 15 s" in told
    assert "worth it for runs longer than 30 min 31 s if it saves half of their time" in told
    assert "Warning: that is 12 times the run of 7,500 samples (sample_budget, 1 min 15 s)" in told


def test_a_study_that_is_cheap_for_its_run_is_not_warned_of() -> None:
    config = study_of(
        stages=[{"type": "train"}, {"type": "horizons"}], sample_budget=7500, real_run={"samples": 75_000}
    )
    assert not [line for line in estimate(config, Facts(pass_seconds=(0.0, 0.01)), 14) if "Warning" in line]


def test_a_fixed_part_of_a_pass_is_shared_by_the_samples_of_a_batch() -> None:
    config = study_of(batch={"micro_batch_size": 8}, world_size=2)
    assert samples_per_second(config, (0.06, 0.01)) == pytest.approx(2 * 8 / 0.14)


def test_runs_of_few_steps_are_warned_of_with_the_budget_that_has_enough() -> None:
    told = [
        " ".join(estimate(study_of(stages=FUNNEL, sample_budget=budget), Facts(pass_seconds=(0.0, 0.01)), 1))
        for budget in (8 * FEWEST_STEPS - 1, 8 * FEWEST_STEPS)
    ]
    assert "has 39 optimizer steps" in told[0]
    assert f"set sample_budget to {8 * FEWEST_STEPS} or more" in told[0]
    assert "optimizer step" not in told[1]
    alone = study_of(stages=[{"type": "train"}], sample_budget=FEWEST_STEPS)
    assert "optimizer step" not in " ".join(estimate(alone, Facts(pass_seconds=(0.0, 0.01)), 1)), (
        "it is effective batch 1"
    )


def test_which_batches_are_compared_is_told_and_why_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, stages=FUNNEL)
    assert "(the baseline)" in said
    assert "and larger only if faster than the baseline: " in said
    warning = "Warning: your own batch (8) is not among them: it is no multiple of world_size (3)"
    assert warning in planned(capsys, stages=FUNNEL, world_size=3)
    alone = planned(capsys, stages=[{"type": "train"}])
    assert "is compared with nothing" in alone
    assert "1 run at most" in alone


def test_one_of_a_kind_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    frontier = {"type": "frontier", "rounds": 1, "finalists": 1, "activation_checkpointing": ["none"]}
    said = planned(capsys, stages=[frontier])
    assert ": 1 stage frontier" in said
    assert "1 finalist in 1 round; then" in said
    said = planned(capsys, stages=[{"type": "frontier"}, {"type": "throughput", "rounds": 2, "max_rounds": 2}])
    assert ": 2 stages frontier" in said
    assert " 2 rounds over all of them" in said
    assert "2 to 4 rounds over" in planned(capsys, stages=[{"type": "throughput", "rounds": 2, "max_rounds": 4}])


def test_what_the_study_file_leaves_open_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, optimizer={"lr": 1e-3})
    assert re.search(
        r"not in the study file, so these are batchscout's defaults: optimizer: {type: adamw, reference_batch_size: 32, .*}",
        said,
    )


def test_a_plan_is_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 columns and 40 rows, with a full table and all warnings: the largest part is the table."""
    monkeypatch.setenv("COLUMNS", "100")
    config = study_of(stages=FUNNEL, sample_budget=100, optimizer={"lr": 1e-3})
    predicted = Predicted(None, estimate(config, Facts(pass_seconds=(0.0, 0.01)), 12))
    assert len([line for line in predicted.cost if "Warning" in line]) == 2
    print_plan(config, Facts(pass_seconds=(0.0, 0.01)), predicted)
    assert len(capsys.readouterr().out.splitlines()) + MOST_ROWS + 3 <= 40
