"""A plan says what the probes of a study may cost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batchscout.orchestrator.output.plan import print_plan
from batchscout.orchestrator.study.facts import Facts
from tests.support.lane_player import study_of

FUNNEL = [{"type": kind} for kind in ("frontier", "throughput", "equivalence", "train")]


def planned(capsys: pytest.CaptureFixture[str], stages: list[dict[str, Any]]) -> str:
    print_plan(study_of(stages=stages, sample_budget=10_000), Facts(), predict_memory=False)
    return " ".join(capsys.readouterr().out.split())


def test_what_the_probes_may_take_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, FUNNEL)
    assert said.count("their steps take at most 4% of the time of all full runs, or 60 s where that is more") == 2
    full_runs = int(said.split("at most ")[-1].split()[0])
    assert f"at most {full_runs * 10_000 * 2 // 100:,} samples" in said, "equivalence"
    given = planned(capsys, [{"type": "frontier", "max_samples": 1234}, {"type": "train"}])
    assert "; at most 1,234 samples (max_samples)" in given


def test_what_given_splits_take_is_counted_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Two splits and three controls of 5 steps each, over 16 samples."""
    equivalence = {"type": "equivalence", "micro_batch_sizes": [8, 4], "steps": 5}
    assert "at most 400 samples" in planned(capsys, [equivalence, {"type": "train"}])


def test_micro_batches_that_are_cut_by_tokens_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    config = study_of(stages=[{"type": "frontier"}], micro_batch={"tokens": 8192})
    print_plan(config, Facts(longest_sample=3000), predict_memory=False)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "one of size m holds as many tokens, with its padding, as m x the longest sample (3,000 tokens); at most 8,192 tokens, so m is at most 2"
        in said
    )
    assert "by tokens" not in planned(capsys, FUNNEL)


def test_a_study_that_trains_nothing_has_no_share_to_keep(capsys: pytest.CaptureFixture[str]) -> None:
    assert "probes (" not in planned(capsys, [{"type": "frontier"}])


def test_what_the_frontier_tries_at_its_fastest_point_alone_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    facts = Facts(num_blocks=2, chunked_cross_entropy=True)
    print_plan(study_of(stages=[{"type": "frontier"}]), facts, predict_memory=False)
    assert "  at the fastest point, also: the model as one graph, cross-entropy in chunks\n" in capsys.readouterr().out
    assert "at the fastest point" not in planned(capsys, [{"type": "frontier"}]), "of a model that has neither"


def test_where_the_ranks_of_a_trial_run_is_told_where_the_study_file_leaves_a_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    placement = {"strategy": "strict_pack", "device": "H100"}
    print_plan(study_of(world_size=2, placement=placement), Facts(), predict_memory=False)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "the 2 ranks of a trial run on one node (placement.strategy); trials run on H100 alone (placement.device)"
        in said
    )
    print_plan(study_of(), Facts(), predict_memory=False)
    assert "placement" not in capsys.readouterr().out


def test_one_of_a_kind_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    frontier = {"type": "frontier", "rounds": 1, "finalists": 1, "activation_checkpointing": ["none"]}
    said = planned(capsys, [frontier])
    assert ": 1 stage frontier" in said
    assert "1 finalist in 1 round; then" in said
    said = planned(capsys, [{"type": "frontier"}, {"type": "throughput", "rounds": 2, "max_rounds": 2}])
    assert ": 2 stages frontier" in said
    assert " 2 rounds over all of them" in said
    assert "2 to 4 rounds over" in planned(capsys, [{"type": "throughput", "rounds": 2, "max_rounds": 4}])


def test_what_the_study_file_leaves_open_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(study_of(optimizer={"lr": 1e-3}), Facts(), predict_memory=False)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"not in the study file, and so batchscout's own: optimizer: {type: adamw, reference_batch_size: 32, .*}", said
    )
