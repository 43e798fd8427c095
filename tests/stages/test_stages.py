"""What every stage tries next and what it concludes: pure functions of what is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest

from orchestrator.config.stages import StageKeys
from orchestrator.stages import grid, stage_of
from orchestrator.stages.chosen import RankBatch
from orchestrator.stages.equivalence import EquivalenceFindings
from orchestrator.stages.learning_rate import LearningRateFindings
from orchestrator.stages.stage import Stage
from orchestrator.stages.train import TrainFindings
from orchestrator.study.causes import Cause
from tests.support.known_stage import Known
from tests.support.worlds import FRONTIER, KNOWN, NONE, THROUGHPUT
from trainers.config import DevicePeak, Precision

# Equivalence


def equivalence_of(rho: float, **changes: Any) -> Known:
    mode = replace(NONE, precision=changes.get("precision", "float32"))
    frontier = replace(FRONTIER, chosen=replace(FRONTIER.chosen, mode=mode))
    known = Known({"type": "equivalence", **changes.pop("stage", {})}, **changes).concluded(frontier)
    known.end("equivalence-m8k2")
    known.end("equivalence-m4k4", rho=rho)
    known.end("equivalence-m2k8", rho=rho / 2)
    return known


def test_the_splits_are_the_chosen_micro_batch_and_two_divisors_of_it_against_the_first() -> None:
    known = Known({"type": "equivalence"}).concluded(FRONTIER)
    assert known.ids() == ["equivalence-m8k2"], "the others need its weights"
    known.end("equivalence-m8k2")
    proposals = known.propose()
    assert [p.id for p in proposals] == ["equivalence-m8k2", "equivalence-m4k4", "equivalence-m2k8"]
    assert {p.config.effective_batch_size for p in proposals} == {16}
    assert proposals[0].config.save_weights
    assert proposals[1].config.reference_weights == "/run/trials/equivalence-m8k2/weights.pt"


def test_a_run_in_another_precision_is_told_that_precisions_peak() -> None:
    peaks: dict[Precision, DevicePeak] = {
        "float32": DevicePeak(flops_per_second=1e12, source="measured"),
        "bfloat16": DevicePeak(flops_per_second=4e12, source="data sheet"),
    }
    found = equivalence_of(7e-6, precision="bfloat16", facts=Facts(device_peaks=peaks))
    told = {p.config.precision: p.config.device_peaks[p.config.precision] for p in found.propose()}
    assert told == peaks


def test_float32_passes_within_its_tolerance() -> None:
    found = equivalence_of(7e-6).conclude()
    assert found.ok
    assert "rho <= 7.0e-06 (tolerance 1.0e-04)" in found.reason


def test_it_fails_with_the_number_and_a_cause() -> None:
    found = equivalence_of(0.38).conclude()
    assert not found.ok
    assert "equivalence-m4k4 is rho = 3.80e-01 from the reference, above 1.0e-04" in found.reason
    assert "mean instead of a sum" in found.reason


def test_batch_norm_is_named_as_the_cause() -> None:
    known = Known({"type": "equivalence"}).concluded(FRONTIER)
    known.end("equivalence-m8k2")
    known.end("equivalence-m4k4", rho=0.3, num_batch_norms=2)
    known.end("equivalence-m2k8", rho=0.4, num_batch_norms=2)
    assert "the model has 2 BatchNorm layers" in known.conclude().reason


def test_low_precision_is_held_against_what_the_precision_makes_of_the_last_split() -> None:
    for rho, ok in ((0.029, True), (0.031, False)):
        known = equivalence_of(rho, precision="bfloat16")
        last, control = (known.propose()[i].config for i in (-2, -1))
        assert last.save_weights
        assert control == last.model_copy(
            update={
                "precision": "float32",
                "save_weights": False,
                "reference_weights": "/run/trials/equivalence-m2k8/weights.pt",
            }
        )
        known.end("equivalence-m2k8-float32", rho=0.03)
        found = known.conclude()
        assert found.ok is ok
        assert "equivalence-m2k8-float32" not in known.found(EquivalenceFindings).rho


def test_where_float32_does_not_fit_the_measured_tolerance_holds() -> None:
    for rho, ok in ((0.019, True), (0.021, False)):
        known = equivalence_of(rho, precision="bfloat16")
        known.end("equivalence-m2k8-float32", "out_of_memory", "x", Cause.OUT_OF_MEMORY)
        assert known.conclude().ok is ok


def test_a_given_tolerance_holds() -> None:
    assert equivalence_of(7e-6, stage={"tolerance": 1e-6}).conclude().ok is False


def test_splits_that_do_not_divide_are_skipped_and_listed_with_both_numbers() -> None:
    known = Known({"type": "equivalence", "effective_batch_size": 12}).concluded(FRONTIER)
    assert known.ids() == ["equivalence-m4k3"], "8 does not divide 12"
    known.end("equivalence-m4k3")
    known.end("equivalence-m2k6", rho=1e-6)
    found = known.conclude()
    assert found.ok
    (note,) = found.notes
    assert note.startswith(
        "skipped: effective_batch_size (12) is not a multiple of micro_batch_size x world_size (8 x 1"
    )
    known = Known({"type": "equivalence", "effective_batch_size": 9}).concluded(FRONTIER)
    assert known.ids() == []
    assert known.conclude().ok
    assert len(known.conclude().notes) == 3


def test_a_split_that_did_not_finish_fails_the_stage_with_its_reason() -> None:
    known = Known({"type": "equivalence"}).concluded(FRONTIER)
    known.end("equivalence-m8k2", "out_of_memory", "x", Cause.OUT_OF_MEMORY)
    assert known.conclude().reason == "equivalence-m8k2 could not be compared: out_of_memory: x"
    assert not known.conclude().ok


# Train


def test_the_candidates_are_the_baseline_first_and_protected_then_the_others() -> None:
    known = Known({"type": "train"}).concluded(*KNOWN)
    proposals = known.propose()
    assert [(p.id, p.role) for p in proposals] == [
        ("train-m1k1", "baseline"),
        ("train-m16k1", "largest micro-batch"),
        ("train-m12k1", "second largest micro-batch"),
        ("train-m8k4", "best tokens/s"),
        ("train-m8k2", "best goodput"),
        ("train-m8k2-unscaled", "best goodput, learning rate unscaled"),
    ]
    assert [p.protected for p in proposals] == [True] + [False] * 5
    assert proposals[1].config.activation_checkpointing == "full", "the mode in which it fits"


def test_each_candidate_has_its_scaled_learning_rate_and_the_contrast_the_unscaled_one() -> None:
    known = Known({"type": "train"}).concluded(*KNOWN)
    for proposal in known.propose():
        ratio = 1 if proposal.id.endswith("unscaled") else proposal.config.effective_batch_size / 8
        assert proposal.config.learning_rate == pytest.approx(1e-3 * ratio**0.5)


def test_duplicates_are_merged_and_bear_all_their_roles() -> None:
    same = RankBatch(16, 1)
    throughput = replace(THROUGHPUT, best_tokens_per_second=same, best_goodput=same)
    proposals = Known({"type": "train"}).concluded(FRONTIER, throughput).propose()
    assert [(p.id, p.role) for p in proposals] == [
        ("train-m1k1", "baseline"),
        ("train-m16k1", "largest micro-batch, best tokens/s, best goodput"),
        ("train-m12k1", "second largest micro-batch"),
        ("train-m16k1-unscaled", "best goodput, learning rate unscaled"),
    ]


def test_without_scaling_or_on_request_there_is_no_contrast() -> None:
    off = Known({"type": "train", "unscaled_contrast": False}).concluded(*KNOWN)
    none = Known({"type": "train"}, optimizer={"lr": 1e-3, "lr_scaling": "none"}).concluded(*KNOWN)
    for one in (off, none):
        assert not [name for name in one.ids() if "unscaled" in name]


def test_without_earlier_stages_the_study_files_batch_is_trained() -> None:
    batch = {"micro_batch_size": 4, "effective_batch_size": 16}
    proposals = Known({"type": "train", "unscaled_contrast": False}, batch=batch).propose()
    assert [(p.id, p.protected) for p in proposals] == [("train-m4k1", True), ("train-m4k4", False)]


def test_a_candidate_larger_than_the_budget_is_left_out_and_named_with_both_numbers() -> None:
    known = Known({"type": "train"}, sample_budget=31).concluded(*KNOWN)
    assert "train-m8k4" not in known.ids()
    for name in known.ids():
        known.end(name, val_loss=3.0)
    assert known.conclude().notes == (
        "best tokens/s was left out: its effective batch (32) is larger than sample_budget (31)",
    )


def test_a_tie_goes_to_the_baseline_and_else_to_the_smaller_batch() -> None:
    known = Known({"type": "train"}).concluded(*KNOWN)
    losses = {"train-m1k1": 3.05, "train-m16k1": 3.0, "train-m12k1": 3.001, "train-m8k4": 3.0005}
    for name in known.ids():
        known.end(name, val_loss=losses.get(name, 3.5))
    assert known.found(TrainFindings).winner == "train-m12k1"
    known = Known({"type": "train"}).concluded(*KNOWN)
    for name in known.ids():
        known.end(name, val_loss=(losses | {"train-m1k1": 3.004}).get(name, 3.5))
    assert known.found(TrainFindings).winner == "train-m1k1"


def test_no_candidate_that_finished_is_undetermined() -> None:
    known = Known({"type": "train"})
    for name in known.ids():
        known.end(name, "pruned", "the loss is nan in step 3", Cause.DIVERGED)
    assert not known.conclude().ok
    assert known.conclude().reason.startswith("undetermined:")


# Learning rate


def learning_rate_of(losses: dict[str, float], centre: float = 3.0, unscaled: float | None = None) -> Known:
    known = Known({"type": "train"}).concluded(*KNOWN)
    known.end("train-m8k2", val_loss=centre)
    if unscaled is not None:
        known.end("train-m8k2-unscaled", val_loss=unscaled)
    winner = "train-m8k2" if (unscaled or math.inf) > centre else "train-m8k2-unscaled"
    known = Known({"type": "learning_rate"}, study=known.study).concluded(TrainFindings(winner, val_loss=centre))
    for name, loss in losses.items():
        known.end(f"learning_rate-x{name}", val_loss=loss)
    return known


def test_the_centre_is_the_winners_own_run_and_not_run_again() -> None:
    known = learning_rate_of({})
    assert known.ids() == ["learning_rate-x0.5", "learning_rate-x0.71", "learning_rate-x1.41", "learning_rate-x2"]
    centre = known.study.trials["train-m8k2"].config
    for proposal, multiplier in zip(known.propose(), (0.5, 0.71, 1.41, 2), strict=True):
        assert proposal.config.learning_rate == pytest.approx(multiplier * centre.learning_rate)
        assert proposal.config.effective_batch_size == centre.effective_batch_size
    assert "learning_rate-x1" in Known({"type": "learning_rate"}).ids(), "without a train stage it is"


def test_the_best_in_the_middle_is_the_rules_own_and_no_warning() -> None:
    known = learning_rate_of({"0.5": 3.2, "0.71": 3.1, "1.41": 3.1, "2": 3.3})
    found = known.found(LearningRateFindings)
    assert found.winner == "train-m8k2"
    assert not found.on_edge
    assert known.conclude().notes == ()
    assert known.conclude().reason.endswith("the scaling rule's own")


def test_the_contrast_is_a_point_of_the_grid_and_the_rules_rate_its_centre_even_where_the_contrast_won() -> None:
    known = learning_rate_of({"0.5": 3.2, "1.41": 3.1, "2": 3.3}, centre=3.0, unscaled=2.5)
    assert "learning_rate-x0.71" not in known.ids(), "the contrast ran at 1/sqrt(2) of the rule's"
    rule, contrast = (known.study.trials[name].config.learning_rate for name in ("train-m8k2", "train-m8k2-unscaled"))
    found = known.found(LearningRateFindings)
    assert found.winner == "train-m8k2-unscaled"
    assert found.learning_rate == contrast
    assert known.conclude().reason.endswith(f"{contrast / rule:.2g} x the scaling rule's {rule:.3g}")
    assert len(found.losses) == 5
    assert not found.on_edge


def test_a_tie_goes_to_the_rate_nearest_to_the_rules() -> None:
    known = learning_rate_of({"0.5": 3.2, "0.71": 3.1, "1.41": 2.999, "2": 2.998})
    found = known.found(LearningRateFindings)
    assert found.winner == "train-m8k2"
    assert "tied with" in known.conclude().reason
    assert not found.on_edge


@pytest.mark.parametrize(("losses", "side"), [
    ({"0.5": 2.7, "0.71": 2.8, "1.41": 3.1, "2": 3.3}, "low"),
    ({"0.5": 3.3, "0.71": 3.2, "1.41": 2.9, "2": 2.8}, "high"),
])  # fmt: skip
def test_the_best_on_the_edge_of_the_grid_is_a_warning(losses: dict[str, float], side: str) -> None:
    known = learning_rate_of(losses)
    found = known.conclude()
    assert known.found(LearningRateFindings).on_edge
    assert f"lies on the {side} edge of the grid" in found.notes[0]
    assert "widen the multipliers" in found.notes[0]


def test_a_rate_that_diverged_bounds_the_grid_so_the_best_beside_it_is_not_on_the_edge() -> None:
    known = learning_rate_of({"0.5": 3.2, "0.71": 3.1, "1.41": 2.9})
    known.end("learning_rate-x2", "pruned", "the loss is nan in step 9", Cause.DIVERGED)
    assert not known.found(LearningRateFindings).on_edge


# Grid


def test_what_does_not_divide_is_skipped_with_both_numbers_and_never_rounded() -> None:
    known = Known({"type": "grid", "micro_batch_size": [4, 6], "effective_batch_size": [24, 32]})
    assert known.ids() == ["grid-m4k6-none", "grid-m4k8-none", "grid-m6k4-none"]
    for name in known.ids():
        known.end(name, val_loss=3.0)
    (note,) = known.conclude().notes
    assert note.startswith(
        "skipped: effective_batch_size (32) is not a multiple of micro_batch_size x world_size (6 x 1"
    )


def test_every_combination_is_a_trial_of_its_own() -> None:
    stage = {
        "type": "grid", "micro_batch_size": [1, 2], "activation_checkpointing": ["none", "full"],
        "compile": [True, False], "learning_rate": [1e-3, 2e-3],
    }  # fmt: skip
    ids = Known(stage, seeds=[0, 1]).ids()
    assert len(ids) == len(set(ids)) == 2**5


def test_a_point_larger_than_the_budget_is_skipped_with_both_numbers() -> None:
    known = Known({"type": "grid", "micro_batch_size": [4], "effective_batch_size": [8, 1024]})
    assert known.ids() == ["grid-m4k2-none"]
    (reason,) = grid.skipped(known.context)
    assert "1024" in reason
    assert "512" in reason


# All of them


@pytest.mark.parametrize("keys", get_args(StageKeys))
def test_every_stage_of_a_study_file_has_its_entry(keys: Any) -> None:
    assert isinstance(stage_of(keys()), Stage)


def test_proposing_is_pure() -> None:
    """Asked twice, a stage wants the same trials."""
    for kind in ("frontier", "throughput", "equivalence", "train", "learning_rate", "grid"):
        known = Known({"type": kind}).concluded(*KNOWN)
        assert known.propose() == known.propose()
