"""The frontier's memory knobs in worlds of known memory, speed and loss: what is tried, what may be chosen, what is said."""

from __future__ import annotations

import math
from typing import Any

import pytest

from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Conclusion
from batchscout.trainers.before.peak_memory import Line, PeakMemory
from batchscout.trainers.config import TrialConfig
from tests.support.frontier_world import World, played
from tests.support.known_stage import Known
from tests.support.lane_player import study_of
from tests.support.worlds import MIB

CHUNKED, ROUNDED = "chunked_cross_entropy", "bfloat16_weights"
BFLOAT16 = {"precision": "bfloat16"}


def tight(**changes: Any) -> World:
    """A world in which memory is what limits the micro-batch."""
    binds: dict[str, Any] = {"slope": {"none": 8.0, "full": 2.0}, "rate": {"none": 1000.0, "full": 600.0}}
    return World(**binds | changes)


def probes_with_knobs(known: Known) -> list[TrialConfig]:
    trials = known.context.trials()
    return [t.config for t in trials if t.config.memory_knobs and t.config.dynamic_micro_batch]


def note_of(conclusion: Conclusion, words: str) -> str:
    return next(note for note in conclusion.notes if words in note)


def test_a_knob_that_lets_more_fit_is_chosen_and_held_against_accumulation() -> None:
    known, conclusion = played(tight(knobs={CHUNKED: (0.98, 0.5)}), memory_knobs=[CHUNKED])
    findings = known.found(FrontierFindings)
    assert findings.chosen.mode.memory_knobs == (CHUNKED,)
    compared = next(one for one in findings.knobs if one.fastest.mode == findings.chosen.mode)
    assert compared.accumulated is not None
    assert compared.accumulated_tokens_per_second is not None
    assert compared.accumulated.mode.memory_knobs == ()
    assert compared.tokens_per_second > compared.accumulated_tokens_per_second
    at_least = compared.accumulated.micro_batch_size * compared.accumulation_steps
    assert at_least >= compared.fastest.micro_batch_size
    accumulated = f"{compared.accumulated.micro_batch_size} x {compared.accumulation_steps} (full)"
    said = note_of(conclusion, "; it is taken")
    assert said.startswith(f"at equal memory (95 MiB), accumulation {accumulated} reaches ")
    assert "cross-entropy in chunks" in said
    verified = known.study.trials[findings.winner]
    assert verified.config.memory_knobs == (CHUNKED,)


def test_what_costs_more_than_it_lets_fit_is_not_chosen_and_its_figures_are_said() -> None:
    known, conclusion = played(tight(knobs={CHUNKED: (0.5, 0.9)}), memory_knobs=[CHUNKED])
    assert known.found(FrontierFindings).chosen.mode.memory_knobs == ()
    # One with each checkpointing: no larger size that could fit would make up for the speed.
    assert [config.activation_checkpointing for config in probes_with_knobs(known)] == ["full", "none"]
    assert "cross-entropy in chunks" in note_of(conclusion, "at equal memory")


def test_no_knob_is_tried_where_memory_is_not_what_binds() -> None:
    roomy = tight(slope={"none": 0.01, "full": 0.005}, knobs={CHUNKED: (1.0, 0.5)})
    known, conclusion = played(roomy, memory_knobs=[CHUNKED])
    assert probes_with_knobs(known) == []
    assert "memory is not what limits the micro-batch" in note_of(conclusion, "were not tried")


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "facts", "tried"), [
    (None, None, False), (None, Facts(memory_knobs=(CHUNKED,)), True), ([], Facts(memory_knobs=(CHUNKED,)), False),
])  # fmt: skip
def test_unasked_only_what_changes_nothing_and_is_known_to_go_is_tried(
    asked: list[str] | None, facts: Facts | None, tried: bool
) -> None:
    known, _ = played(tight(knobs={CHUNKED: (1.0, 0.5)}), facts, memory_knobs=asked)
    assert bool(probes_with_knobs(known)) is tried


@pytest.mark.slow
def test_the_probes_of_all_knobs_together_are_twelve_at_most_and_the_rest_is_named() -> None:
    names = [CHUNKED, ROUNDED, "activation_offload", "optimizer_offload"]
    world = tight(knobs=dict.fromkeys(names, (1.0, 0.7)))
    known, conclusion = played(world, study=BFLOAT16, memory_knobs=names)
    assert len(probes_with_knobs(known)) == 12
    assert "not probed: " in note_of(conclusion, "at most 12 probes are for knobs")


def test_what_the_prediction_says_saves_nothing_is_not_probed() -> None:
    world = tight(knobs={CHUNKED: (1.0, 0.99)})
    line = {kind: PeakMemory((Line(world.base[kind] * MIB, world.slope[kind] * MIB),)) for kind in world.base}
    key = "{}{}, float32"
    predicted = {key.format(kind, knob): line[kind] for kind in world.base for knob in ("", f"-{CHUNKED}")}
    known, conclusion = played(world, Facts(predicted_memory=predicted), memory_knobs=[CHUNKED])
    assert probes_with_knobs(known) == []
    assert "cross-entropy in chunks with none" in note_of(conclusion, "predicted to save nothing")


@pytest.mark.slow
@pytest.mark.parametrize(("worse_by", "passes"), [(0.0, True), (0.019, True), (0.03, False)])
def test_a_knob_that_changes_the_loss_must_end_within_what_seeds_make(worse_by: float, passes: bool) -> None:
    """The seeds' losses are 3.00, 3.01 and 3.02."""
    world = tight(knobs={ROUNDED: (1.0, 0.5)}, knob_loss={ROUNDED: worse_by})
    known, conclusion = played(world, study=BFLOAT16, memory_knobs=[ROUNDED])
    findings = known.found(FrontierFindings)
    assert (findings.chosen.mode.memory_knobs == (ROUNDED,)) is passes
    quality = next(one.quality for one in findings.knobs if one.quality)
    assert quality.tolerance == pytest.approx(0.02)
    said = note_of(conclusion, "at equal memory")
    assert ("; it learns as well: " if passes else "; it is not taken, as it learns worse: ") in said
    checks = [t.config for t in known.context.trials() if t.proposal.control]
    assert len({(c.effective_batch_size, c.sample_budget) for c in checks}) == 1
    assert [c.seed for c in checks if not c.memory_knobs][:3] == [0, 1, 2]


def test_where_the_runs_without_a_knob_diverge_its_loss_is_not_said_to_have_had_no_room() -> None:
    world = tight(knobs={ROUNDED: (1.0, 0.5)}, loss_of_seed=lambda seed: math.nan)
    _, conclusion = played(world, study=BFLOAT16, memory_knobs=[ROUNDED])
    said = note_of(conclusion, "at equal memory")
    assert "; it is not taken, as the runs without it" in said
    assert "no room" not in said


def test_a_knob_that_changes_the_loss_and_is_slower_is_not_checked() -> None:
    world = tight(knobs={ROUNDED: (0.5, 0.9)})
    known, _ = played(world, study=BFLOAT16, memory_knobs=[ROUNDED])
    assert not any(trial.proposal.control for trial in known.context.trials())


def test_where_nothing_fits_without_a_knob_what_fits_with_one_is_chosen() -> None:
    world = tight(base={"none": 60.0}, slope={"none": 50.0}, rate={"none": 1000.0}, knobs={CHUNKED: (1.0, 0.2)})
    known, conclusion = played(world, memory_knobs=[CHUNKED])
    assert conclusion.ok
    assert known.found(FrontierFindings).chosen.mode.memory_knobs == (CHUNKED,)
    assert "nothing fits without a knob" in note_of(conclusion, "at equal memory")


def test_knobs_of_the_study_are_in_every_trial_and_not_tried_again() -> None:
    world = tight(knobs={CHUNKED: (1.0, 0.5)})
    known, _ = played(world, Facts(memory_knobs=(CHUNKED,)), study={"memory_knobs": [CHUNKED]})
    assert {trial.config.memory_knobs for trial in known.context.trials()} == {(CHUNKED,)}


@pytest.mark.slow
def test_the_same_journal_gives_the_same_proposals() -> None:
    known, _ = played(tight(knobs={CHUNKED: (0.98, 0.5)}), memory_knobs=[CHUNKED])
    assert [p.id for p in known.propose()] == [*known.study.trials]


@pytest.mark.parametrize(("changes", "message"), [
    ({"memory_knobs": ["offload"]}, r"memory_knobs: 'offload' is no memory knob; choose among activation_offload, "),
    (
        {"stages": [{"type": "frontier", "memory_knobs": [ROUNDED]}]},
        r"memory_knobs has bfloat16_weights: .* precision is float32; set precision: bfloat16",
    ),
    (
        {"memory_knobs": ["optimizer_8bit"], "stages": [{"type": "frontier", "memory_knobs": [ROUNDED]}], "precision": "bfloat16"},
        r"memory_knobs has optimizer_8bit for every trial, and the frontier's memory_knobs has bfloat16_weights; they exclude each "
        "other: leave one of them out",
    ),
    ({"memory_knobs": ["optimizer_8bit", ROUNDED]}, r"bfloat16_weights and optimizer_8bit exclude each other; leave one of them out of memory_knobs"),
])  # fmt: skip
def test_a_wrong_knob_in_a_study_file_is_said_with_the_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of(**changes)


def test_where_max_samples_leaves_no_room_for_the_check_the_knob_is_not_taken() -> None:
    """160 steps of 64 samples are more than the stage may take in all."""
    study = {"precision": "bfloat16", "optimizer": {"lr": 1e-3, "reference_batch_size": 64}}
    known, conclusion = played(
        tight(knobs={ROUNDED: (1.0, 0.5)}), study=study, memory_knobs=[ROUNDED], max_samples=10_000
    )
    assert not any(trial.proposal.control for trial in known.context.trials())
    assert known.found(FrontierFindings).chosen.mode.memory_knobs == ()
    assert "left no room to check the loss" in note_of(conclusion, "weights in bfloat16")
    assert sum(trial.config.sample_budget for trial in known.context.trials()) <= 10_000
