"""What every stage tries next and what it concludes: pure functions of what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from batchscout.orchestrator.config.mode import Mode, mode_of
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.stages import grid, stage_of
from batchscout.orchestrator.stages.equivalence import EquivalenceFindings
from batchscout.orchestrator.stages.stage import Stage
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.facts import Facts
from batchscout.trainers.config import DevicePeak, Precision, Split
from tests.support.every import for_every
from tests.support.known_stage import Known
from tests.support.lane_player import study_of
from tests.support.worlds import FRONTIER, KNOWN, NONE

# Equivalence


def equivalence_in(precision: Precision, stage: dict[str, Any] | None = None, facts: Facts | None = None) -> Known:
    chosen = replace(FRONTIER.chosen, mode=replace(NONE, precision=precision))
    return Known({"type": "equivalence", **(stage or {})}, facts).concluded(replace(FRONTIER, chosen=chosen))


def equivalence_of(
    rho: float, controls: tuple[float, ...] = (1e-6,) * 3, reference: dict[str, Any] | None = None, **changes: Any
) -> Known:
    """The stage with splits that end at most rho apart, and as many of the controls as it asks for."""
    known = equivalence_in(changes.pop("precision", "float32"), **changes)
    known.end("equivalence-m8k2", **(reference or {}))
    known.end("equivalence-m4k4", rho=rho)
    known.end("equivalence-m2k8", rho=rho / 2)
    for number, distance in enumerate(controls, start=1):
        if (name := f"equivalence-m8k2-permuted{number}") in known.ids():
            known.end(name, rho=distance)
    return known


def num_controls(known: Known) -> int:
    return sum("permuted" in name for name in known.ids())


def test_the_splits_are_the_chosen_micro_batch_and_two_divisors_of_it_against_the_first() -> None:
    known = Known({"type": "equivalence"}, model={"target": "gpt", "kwargs": {"dropout": 0.1}}).concluded(FRONTIER)
    assert known.ids() == ["equivalence-m8k2"], "the others need its weights"
    known.end("equivalence-m8k2")
    reference, *others, control = [proposal.config for proposal in known.propose()]
    assert known.ids()[1:] == ["equivalence-m4k4", "equivalence-m2k8", "equivalence-m8k2-permuted1"]
    assert reference.save_weights
    assert reference.check_parts
    for one in (*others, control):
        assert one.reference_weights == "../equivalence-m8k2/weights.pt"
        assert (one.effective_batch_size, one.precision, one.dropout) == (16, "float32", False)
    assert control.split == reference.split
    assert [one.sample_permutation for one in (*others, control)] == [None, None, 1]


@pytest.mark.parametrize(
    ("budget", "first", "second"),
    [(10_000, "m8k2", "m4k4"), (2_800, "m4k2", "m2k4"), (100, "m4k2", "m2k4")],
    ids=["enough for the chosen 8", "enough for 7, which does not divide it", "enough for none"],
)
def test_a_smaller_micro_batch_is_split_where_the_chosen_one_would_take_too_many_samples(
    budget: int, first: str, second: str
) -> None:
    """Three splits and three controls of 10 steps: 120 samples for each sample of the micro-batch. 2 % of 16 runs are theirs."""
    known = Known(
        {"type": "equivalence"},
        more_stages=[{"type": "throughput"}, {"type": "train", "max_runs": 16}],
        sample_budget=budget,
    )
    known.concluded(FRONTIER)
    assert known.ids() == [f"equivalence-{first}"]
    known.end(f"equivalence-{first}")
    assert known.ids()[1] == f"equivalence-{second}"
    for name in known.ids()[1:]:
        known.end(name, rho=1e-6)
    told = " ".join(known.conclude().notes)
    taken = "would take 960 samples, and the limit is "
    assert (f"tested with micro-batch {first[1]}: the chosen 8 {taken}" in told) is (budget < 10_000)


def test_two_keys_do_not_both_say_what_is_split() -> None:
    with pytest.raises(
        ValueError, match=r"max_samples \(500\) chooses the size that micro_batch_sizes says; leave one of them"
    ):
        study_of(stages=[{"type": "equivalence", "max_samples": 500, "micro_batch_sizes": [4, 2]}])


def test_a_run_in_another_precision_is_told_that_precisions_peak() -> None:
    peaks: dict[Precision, DevicePeak] = {
        "float32": DevicePeak(flops_per_second=1e12, source="measured"),
        "bfloat16": DevicePeak(flops_per_second=4e12, source="data sheet"),
    }
    found = equivalence_of(7e-6, precision="bfloat16", facts=Facts(device_peaks=peaks))
    told = {p.config.precision: p.config.device_peaks[p.config.precision] for p in found.propose()}
    assert told == peaks


def test_of_given_sizes_the_largest_is_what_the_others_are_compared_with() -> None:
    sizes = {"type": "equivalence", "micro_batch_sizes": [2, 8, 4]}
    known = Known(sizes).concluded(FRONTIER)
    assert known.ids() == ["equivalence-m8k2"]
    known.end("equivalence-m8k2")
    assert known.ids()[1:3] == ["equivalence-m4k4", "equivalence-m2k8"]


@pytest.mark.parametrize(("rho", "controls", "judgement", "asked"), [
    (7e-6, (1e-6,), "equivalent", 1),
    (9.9e-5, (1e-6,), "equivalent", 1),  # what rounding makes below 1e-4 is not looked at
    (3.8e-4, (3.6e-4,), "equivalent", 1),  # a ViT's key bias
    (3.8e-4, (1e-5, 2e-4), "equivalent", 2),  # a single control may be a small draw
    (3.8e-4, (1e-5, 1e-5, 1e-5), "splits_differ", 3),
    (0.13, (6e-8, 6e-8, 6e-8), "splits_differ", 3),
])  # fmt: skip
def test_a_split_is_held_against_what_the_same_samples_in_another_order_make(
    rho: float, controls: tuple[float, ...], judgement: str, asked: int
) -> None:
    known = equivalence_of(rho, controls)
    found = known.found(EquivalenceFindings)
    assert found.judgement == judgement
    assert found.tolerance == max(1e-4, 3 * max(controls))
    assert num_controls(known) == asked
    assert list(found.rho.values()) == [rho, rho / 2]
    assert list(found.controls.values()) == list(controls)
    assert known.conclude().ok


def test_the_sentence_names_both_distances() -> None:
    assert "rho <= 7.0e-06 (tolerance 1.0e-04; reordering the samples alone gives 1.0e-06)" in (
        equivalence_of(7e-6).conclude().reason
    )
    assert equivalence_of(7e-6).conclude().notes == ()


def test_a_model_that_no_split_leaves_as_it_is_goes_on_with_what_the_comparisons_mean() -> None:
    found = equivalence_of(0.38, reference={"parts_training_ratio": 1.024}).conclude()
    assert found.ok
    assert "batch 16 (4 x 4) is rho = 3.8e-01 from batch 16 (8 x 2) (tolerance 1.0e-04" in found.reason
    assert "add up to 1.0240 x that of the whole" in found.reason
    assert found.notes[0].startswith("batches are comparable where their micro-batch size is the same")
    assert "look for a state that every forward pass changes" in equivalence_of(0.38).conclude().reason


def test_batch_norm_is_named_as_the_cause() -> None:
    found = equivalence_of(0.4, reference={"num_batch_norms": 2}).conclude()
    assert "the model has 2 BatchNorm layers" in found.reason
    assert "with GroupNorm or LayerNorm instead they would be" in found.notes[0]


@pytest.mark.parametrize(("ratios", "said"), [
    ({"parts_loss_ratio": 2.0, "parts_targets_ratio": 1.0}, "losses add up to 2.000 x and the num_targets add up to 1.000 x"),
    ({"parts_loss_ratio": 1.0, "parts_targets_ratio": 2.0}, "losses add up to 1.000 x and the num_targets add up to 2.000 x"),
    ({"parts_loss_ratio": 1.18}, "the losses add up to 1.180 x that of all in one micro-batch"),
])  # fmt: skip
def test_a_loss_that_is_no_sum_ends_the_study_before_anything_is_compared(ratios: dict[str, Any], said: str) -> None:
    known = Known({"type": "equivalence"}).concluded(FRONTIER)
    known.end("equivalence-m8k2", **ratios)
    assert known.ids() == ["equivalence-m8k2"]
    found = known.conclude()
    assert not found.ok
    assert said in found.reason
    assert "(reduction='sum')" in found.reason
    assert known.found(EquivalenceFindings).judgement == "no_sum"


def test_what_draws_random_numbers_is_not_judged_and_the_study_goes_on() -> None:
    known = Known({"type": "equivalence"}).concluded(FRONTIER)
    known.end("equivalence-m8k2", loss_randomness=3e-3, parts_loss_ratio=1.01)
    assert known.ids() == ["equivalence-m8k2"]
    found = known.conclude()
    assert found.ok
    assert found.reason.startswith("undecided: model or data draw random numbers in training")
    assert "moves by 3.0e-03 of itself" in found.reason
    assert known.found(EquivalenceFindings).judgement == "random"


def test_dropout_that_was_switched_off_is_said() -> None:
    notes = equivalence_of(7e-6, reference={"num_dropouts_off": 4}).conclude().notes
    assert notes == ("dropout was off in these runs: its masks differ between splits, which is no fault",)


def test_low_precision_is_compared_in_float32_and_what_it_makes_alone_is_said() -> None:
    known = equivalence_of(7e-6, precision="bfloat16")
    known.end("equivalence-m8k2-bfloat16", rho=0.016)
    configs = {proposal.id: proposal.config for proposal in known.propose()}
    assert {name for name, one in configs.items() if one.precision != "float32"} == {"equivalence-m8k2-bfloat16"}
    assert configs["equivalence-m8k2-bfloat16"].split == configs["equivalence-m8k2"].split
    found = known.conclude()
    assert known.found(EquivalenceFindings).tolerance == 1e-4
    assert found.notes == (
        "the splits were compared in float32. bfloat16 alone moves the weights by rho = 1.6e-02: that is its rounding, and "
        "not the split's",
    )


def test_a_size_that_does_not_fit_in_float32_gives_way_to_the_next_one() -> None:
    known = equivalence_in("bfloat16")
    known.end("equivalence-m8k2", "out_of_memory", "x", Cause.OUT_OF_MEMORY)
    known.end("equivalence-m4k4")
    for name in known.ids()[2:]:
        known.end(name, rho=1e-6)
    assert list(known.found(EquivalenceFindings).rho) == ["equivalence-m2k8", "equivalence-m1k16"]
    assert "skipped: batch 16 (8 x 2) did not end, out_of_memory: x" in known.conclude().notes


def test_a_given_tolerance_holds_and_needs_no_control() -> None:
    known = equivalence_of(7e-6, stage={"tolerance": 1e-6})
    assert known.found(EquivalenceFindings).judgement == "splits_differ"
    assert num_controls(known) == 0
    assert "(tolerance 1.0e-06)" in known.conclude().reason


def test_splits_that_do_not_divide_are_skipped_and_listed_with_both_numbers() -> None:
    known = Known({"type": "equivalence", "effective_batch_size": 12}).concluded(FRONTIER)
    assert known.ids() == ["equivalence-m4k3"], "8 does not divide 12"
    known.end("equivalence-m4k3")
    for name in known.ids()[1:]:
        known.end(name, rho=1e-6)
    assert list(known.found(EquivalenceFindings).rho) == ["equivalence-m2k6", "equivalence-m1k12"]
    (note,) = known.conclude().notes
    assert note.startswith(
        "skipped: effective_batch_size (12) is not a multiple of micro_batch_size x world_size (8 x 1"
    )
    known = Known({"type": "equivalence", "effective_batch_size": 9}).concluded(FRONTIER)
    assert known.ids() == [], "1 alone divides 9"
    assert known.conclude().ok
    assert len(known.conclude().notes) == 3


def test_a_reference_that_fails_ends_the_study_with_its_reason_and_another_split_does_not() -> None:
    known = Known({"type": "equivalence"}).concluded(FRONTIER)
    known.end("equivalence-m8k2", "failed", "x", Cause.FAILED)
    assert known.conclude().reason == "batch 16 (8 x 2) could not be compared: failed: x"
    assert not known.conclude().ok
    known = Known({"type": "equivalence"}).concluded(FRONTIER)
    known.end("equivalence-m8k2")
    known.end("equivalence-m4k4", rho=1e-6)
    known.end("equivalence-m2k8", "failed", "x", Cause.FAILED)
    assert known.conclude().ok
    assert known.conclude().notes == ("skipped: batch 16 (2 x 8) did not end, failed: x",)


def test_where_no_two_splits_run_there_is_nothing_to_compare_and_the_study_goes_on() -> None:
    known = Known({"type": "equivalence"}).concluded(FRONTIER)
    for name in ("equivalence-m8k2", "equivalence-m4k4", "equivalence-m2k8"):
        known.end(name, "out_of_memory", "x", Cause.OUT_OF_MEMORY)
    found = known.conclude()
    assert found.ok
    assert found.reason == "nothing to compare: there are no two splits of this batch that could be run"
    assert len(found.notes) == 3


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
    assert Known({"type": "grid", "micro_batch_size": [4], "compile": ["whole"]}).ids() == ["grid-m4k1-none-whole"]


OWN: dict[str, Any] = {
    "activation_checkpointing": "full",
    "compile": False,
    "batch": {"micro_batch_size": 4, "effective_batch_size": 32},
}


def test_what_the_lists_leave_open_is_the_study_files() -> None:
    known = Known({"type": "grid"}, **OWN)
    (point,) = known.propose()
    assert point.id == "grid-m4k8-full-eager"
    alone = known.context.trial(known.context.given_split(), None)
    assert (point.config.split, mode_of(point.config)) == (alone.split, mode_of(alone))
    assert Known({"type": "grid", "micro_batch_size": [4, 8]}, **OWN).ids() == [
        "grid-m4k8-full-eager",
        "grid-m8k4-full-eager",
    ], "the effective batch of the study file"
    listed = {"type": "grid", "activation_checkpointing": ["none"], "compile": ["whole"]}
    assert Known(listed, **OWN).ids() == ["grid-m4k8-none-whole"]
    only_a_size = Known({"type": "grid", "micro_batch_size": [4, 6]}, batch={"micro_batch_size": 4})
    assert only_a_size.ids() == [
        "grid-m4k1-none",
        "grid-m6k1-none",
    ]


def test_what_the_lists_leave_open_is_what_the_frontier_chose_where_there_is_one() -> None:
    mode = replace(NONE, activation_checkpointing="selective", compile="whole", memory_knobs=("optimizer_8bit",))
    frontier = replace(FRONTIER, chosen=replace(FRONTIER.chosen, mode=mode))
    (point,) = Known({"type": "grid"}, **OWN).concluded(frontier).propose()
    assert point.config.split == Split(FRONTIER.chosen.micro_batch_size, 1, 1)
    assert mode_of(point.config) == mode
    listed = Known({"type": "grid", "compile": [True, False]}, **OWN).concluded(frontier).propose()
    assert [mode_of(one.config) for one in listed] == [replace(mode, compile=True), replace(mode, compile=False)]


def test_a_point_larger_than_the_budget_is_skipped_with_both_numbers() -> None:
    rates = [1e-3, 2e-3]  # what one reason excludes is told once
    known = Known({"type": "grid", "micro_batch_size": [4], "effective_batch_size": [8, 1024], "learning_rate": rates})
    assert known.ids() == ["grid-m4k2-none-lr0.001", "grid-m4k2-none-lr0.002"]
    (reason,) = grid.skipped(known.context)
    assert "1024" in reason
    assert "512" in reason


def test_to_a_target_the_point_that_reaches_it_first_wins_though_another_ends_lower() -> None:
    stage = {"type": "grid", "micro_batch_size": [8], "learning_rate": [1e-3, 2e-3, 4e-3]}
    known = Known(stage, objective="target", target_loss=3.0)
    for name, reached, end in zip(known.ids(), (40.0, 10.0, 30.0), (2.0, 2.8, 2.9), strict=True):
        known.end(name, val_loss=end)
        seconds = {reached - 1: 3.5, reached: 3.0, 50.0: end}
        history = tuple({"train_seconds": at, "val_loss": loss} for at, loss in seconds.items())
        known.study.trials[name] = replace(known.study.trials[name], history=history)
    assert known.found(grid.GridFindings).winner == "grid-m8k1-none-lr0.002"
    assert "reaches the target after 10 s and ends at val loss 2.800" in known.conclude().reason


@pytest.mark.parametrize(
    ("other", "place"), [(3.18, "tied with the best of 2 runs, which ends at val loss 3.180"), (3.4, "best of 2")]
)
def test_a_point_that_is_chosen_of_those_that_are_tied_is_not_called_the_best(other: float, place: str) -> None:
    known = Known({"type": "grid", "micro_batch_size": [16], "effective_batch_size": [16, 32]})
    for name, loss in zip(known.ids(), (3.2, other), strict=True):
        known.end(name, val_loss=loss)
    assert known.conclude().reason.endswith(f" ends at val loss 3.200, {place}")


# All of them


@for_every(keys=get_args(StageKeys))
def test_every_stage_of_a_study_file_has_its_entry(keys: Any) -> None:
    assert isinstance(stage_of(keys()), Stage)


def test_proposing_is_pure() -> None:
    """Asked twice, a stage wants the same trials."""
    for kind in ("frontier", "throughput", "equivalence", "train", "learning_rate", "grid"):
        known = Known({"type": kind}).concluded(*KNOWN)
        assert known.propose() == known.propose()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (Mode("selective", compile=True, precision="float32"), "selective"),
        (Mode("none", compile="whole", precision="bfloat16"), "none (compiled as one graph)"),
        (Mode("full", False, "float32", "chunked", 64), "full (not compiled, cross-entropy in chunks, samples of 64)"),
    ],
)
def test_a_sentence_names_what_a_trainer_must_be_told_beside_activation_checkpointing(mode: Mode, said: str) -> None:
    assert mode.in_words() == said


@pytest.mark.parametrize("stage", ["train", "learning_rate"])
def test_a_stage_of_whose_runs_none_finished_is_undetermined(stage: str) -> None:
    known = Known({"type": stage})
    for name in known.ids():
        known.end(name, "failed", "lost")
    assert not known.conclude().ok
    assert known.conclude().reason.startswith("undetermined:")


@pytest.mark.parametrize(("num_runs", "learned"), [(1, True), (2, False)])
def test_a_single_loss_is_not_one_that_stays_as_it_was(num_runs: int, learned: bool) -> None:
    rates = [1e-3, 2e-3][:num_runs]
    known = Known({"type": "grid", "micro_batch_size": [8], "learning_rate": rates}, evaluations=1)
    for name in known.ids():
        known.end(name, val_loss=3.1)
        trial = known.study.trials[name]
        known.study.trials[name] = replace(trial, history=({"samples_seen": 512, "val_loss": 3.1},))
    assert known.conclude().ok is learned


def test_where_runs_failed_beside_those_that_diverged_their_error_is_named() -> None:
    known = Known({"type": "grid", "micro_batch_size": [8], "learning_rate": [1e-3, 2e-3]})
    diverged, failed = known.ids()
    known.end(diverged, "pruned", "the loss is nan in step 3", Cause.DIVERGED)
    known.end(failed, "failed", "KeyError: 'labels'", Cause.FAILED)
    assert f"mend first what ended {failed} (failed: KeyError: 'labels')" in known.conclude().reason
