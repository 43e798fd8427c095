"""What is measured in a few steps is measured where the study's learning rate would make them diverge, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchscout.orchestrator.config.trial import scaled_learning_rate
from batchscout.orchestrator.stages.no_answer import NOT_THE_RATE
from batchscout.orchestrator.stages.short_runs import LOWERED_BY, MOST_LOWERED
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Proposal, TrialState
from tests.support.known_stage import Known
from tests.support.worlds import FRONTIER, MIB

STAGES = ("frontier", "throughput", "equivalence")


def played(stage: str, share: float) -> Known:
    """A stage whose runs diverge above this share of the rule's learning rate; the larger the batch the faster."""
    found = () if stage == "frontier" else (FRONTIER,)
    known = Known({"type": stage}, memory_limit="100MiB", sample_budget=100_000).concluded(*found)
    return known.play(lambda known, one: _end(known, one, share))


def _end(known: Known, proposal: Proposal, share: float) -> None:
    config = proposal.config
    if config.learning_rate > share * scaled_learning_rate(known.config.optimizer, config.effective_batch_size):
        known.end(proposal.id, "pruned", "the loss is nan in step 2", Cause.DIVERGED)
    elif config.micro_batch_size > 64:
        known.end(proposal.id, "out_of_memory", "x", Cause.OUT_OF_MEMORY)
    else:
        size = config.micro_batch_size
        rate = 1000.0 * size / (size + 4)
        seconds, peak = config.effective_batch_size / rate, size * MIB
        known.end(proposal.id, tokens_per_second=rate, step_seconds=seconds, peak_memory_bytes=float(peak), rho=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rate_at_which_nothing_trains_keeps_no_stage_from_its_answer(stage: str) -> None:
    sound, known = played(stage, 2.0), played(stage, 1.5 / LOWERED_BY**2)
    assert known.conclude().ok
    diverged = [one for one in known.study.trials.values() if one.state is TrialState.PRUNED]
    assert len(diverged) == 2, "one at the rule's rate, one at the next: those after it begin where it fits"
    done = {one.config.split for one in known.study.trials.values()}
    assert done == {one.config.split for one in sound.study.trials.values()}
    told = f"2 short runs diverged, and were made again at a lower learning rate, 1/{LOWERED_BY**2:,} of the study's at the lowest"
    assert any(told in note for note in known.conclude().notes)
    assert not any("diverged" in note for note in sound.conclude().notes)


def test_a_stage_that_begins_with_a_lowered_rate_says_so_and_of_its_noise_scale_too() -> None:
    known = played("throughput", 2.0)
    assert not any("learning rate" in note for note in known.conclude().notes)
    one = next(iter(known.study.trials.values()))
    lost = replace(one.proposal, id="frontier-lost", stage="frontier")
    before = Known({"type": "throughput"}, memory_limit="100MiB", sample_budget=100_000).concluded(FRONTIER)
    before.study.trials[lost.id] = replace(one, proposal=lost, state=TrialState.PRUNED, cause=Cause.DIVERGED)
    before.play(lambda known, one: _end(known, one, 2.0))
    told = [note for note in before.conclude().notes if f"1/{LOWERED_BY:,} of the study's" in note]
    assert ["noise scale" in note for note in told] == [True, False]
    assert not any("made again" in note for note in told), "none of its own diverged"


def test_what_a_run_at_a_lower_rate_finds_is_the_reason_and_not_that_one_diverged() -> None:
    known = Known({"type": "frontier", "activation_checkpointing": ["none"]}, memory_limit="100MiB")
    known.end("frontier-none-m1", "pruned", "the loss is nan in step 2", Cause.DIVERGED)
    [again] = known.waiting()
    known.end(again.id, tokens_per_second=100.0, step_seconds=0.1, peak_memory_bytes=99.5 * MIB)
    known.play(lambda known, one: known.end(one.id, "out_of_memory", "x", Cause.OUT_OF_MEMORY))
    conclusion = known.conclude()
    assert conclusion.bad_input
    assert "raise memory_limit" in conclusion.reason
    assert "hardly the cause" not in conclusion.reason


@pytest.mark.parametrize("stage", STAGES)
def test_where_no_rate_helps_a_stage_ends_soon_and_says_that_the_rate_is_not_the_cause(stage: str) -> None:
    known = played(stage, 0.0)
    wanted = {
        (one.config.split, one.config.activation_checkpointing, one.proposal.round)
        for one in known.study.trials.values()
    }
    assert len(known.study.trials) == len(wanted) + MOST_LOWERED, "those after the first begin at the lowest rate"
    reason = known.conclude().reason
    assert "diverged: the loss is nan in step 2, at learning rates from 0.00" in reason
    assert reason.endswith(f": {NOT_THE_RATE}")
