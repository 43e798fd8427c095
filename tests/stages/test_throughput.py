"""Which effective batches are timed, in which forms and how often, and what is said of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from batchscout.orchestrator.stages.forms import forms, worth_timing
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings, MeasuredPoint
from batchscout.orchestrator.stages.probing import rate_at
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.orchestrator.stages.throughput.figures import figures
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Ended, Started, proposed
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.orchestrator.study.trial import Proposal, TrialState
from batchscout.trainers.config import TrialConfig
from tests.support.known_stage import Known, noisy
from tests.support.worlds import FRONTIER, FULL, MIB, NONE

TRAIN = {"type": "train"}
OVERHEAD = 4.0


def samples_per_second(micro_batch_size: int, mode: str = "none") -> float:
    """Of a machine on which a micro-batch takes as long as so many samples more."""
    return {"none": 100.0, "full": 80.0}[mode] * micro_batch_size / (micro_batch_size + OVERHEAD)


def frontier(*sizes: int, full: tuple[int, ...] = ()) -> FrontierFindings:
    """What a frontier found that measured these sizes, and these with checkpointing; it chose the last of the former."""
    points = [(NONE, size, samples_per_second(size)) for size in sizes]
    points += [(FULL, size, samples_per_second(size, "full")) for size in full]
    measured = tuple(MeasuredPoint(mode, size, 9.0, size * MIB, rate) for mode, size, rate in points)
    chosen = measured[len(sizes) - 1]
    return replace(FRONTIER, chosen=chosen, baseline=measured[0].point, largest=measured[-1], measured=measured)


def quiet(proposal: Proposal) -> float:
    return 1.0


def measure(known: Known, proposal: Proposal, share: float) -> None:
    config = proposal.config
    rate = share * samples_per_second(config.micro_batch_size, str(config.activation_checkpointing))
    seconds = config.effective_batch_size / rate
    known.end(proposal.id, tokens_per_second=128 * rate, step_seconds=seconds, **signal(config))


def signal(config: TrialConfig) -> dict[str, Any]:
    if config.gradient_accumulation_steps == 1:
        return {}
    return {
        "noise_scale": 40.0,
        "noise_scale_low": 30.0,
        "noise_scale_high": 50.0,
        "inverse_noise_scale": 1 / 40,
        "inverse_noise_scale_error": 1 / 240,
        "inverse_noise_scale_steps": 20,
        "coherence": 0.2,
        "coherence_floor": 0.1,
    }


def begun(found: FrontierFindings | None, facts: Facts | None = None, **changes: Any) -> Known:
    """The stage before its first timing, in a study that trains and whose probes may cost anything."""
    keys = {"type": "throughput", "max_samples": 10**9} | changes.pop("stage", {})
    given = {"sample_budget": 10**6, "more_stages": [TRAIN]} | changes
    return Known(keys, facts, **given).concluded(*([found] if found else []))


def played(
    found: FrontierFindings | None,
    noise: Callable[[Proposal], float] = quiet,
    facts: Facts | None = None,
    **changes: Any,
) -> Known:
    """The stage from its first timing to its last."""
    return begun(found, facts, **changes).play(lambda known, one: measure(known, one, noise(one)))


def played_alike(beside: Callable[[Known, Proposal], dict[str, Any]], **changes: Any) -> Known:
    """The stage on a machine on which two batches are equally fast. beside: what else is told of a timing."""
    alike: dict[str, Any] = {"tokens_per_second": 1000.0, "step_seconds": 0.1}
    return begun(frontier(4, 8), **changes).play(lambda known, one: known.end(one.id, **alike | beside(known, one)))


def batches_of(known: Known) -> list[int]:
    return [rate.effective_batch_size for rate in known.found(ThroughputFindings).rates]


def test_batches_that_wait_for_data_are_told_with_the_remedy() -> None:
    def end(known: Known, proposal: Proposal) -> None:
        rate = min(100.0, samples_per_second(proposal.config.micro_batch_size))
        seconds, waits = proposal.config.effective_batch_size / rate, {"data_wait": 0.4, "data_workers": 1.0}
        known.end(proposal.id, tokens_per_second=128 * rate, step_seconds=seconds, **waits, **signal(proposal.config))

    known = begun(frontier(1, 2, 4)).play(end)
    found = known.conclude()
    assert found.reason.endswith(
        "input-bound: 40% of each step waits for data; raise data.workers (now 1), not the batch"
    )
    bound = known.found(ThroughputFindings).input_bound
    assert bound is not None
    assert bound.data_wait == 0.4


# Which batches


def test_they_reach_from_the_smallest_micro_batch_to_the_multiples_of_the_chosen_one() -> None:
    known = played(frontier(1, 2, 4, 8, 16), optimizer={"reference_batch_size": 8}, stage={"multiples": [2, 4]})
    assert batches_of(known) == [1, 2, 4, 8, 16, 32, 64]
    known = played(frontier(4, 8, 12), optimizer={"reference_batch_size": 12}, stage={"multiples": [2]})
    assert batches_of(known) == [4, 8, 12, 24], "nothing below the smallest of the frontier"
    known = played(frontier(1, 2, 4), optimizer={"reference_batch_size": 8}, world_size=2, stage={"multiples": [1]})
    assert batches_of(known) == [2, 4, 8]


def test_one_close_to_another_is_left_out_unless_it_is_the_baseline() -> None:
    known = played(frontier(1, 2, 4, 8, 14), optimizer={"reference_batch_size": 16}, stage={"multiples": [1]})
    assert batches_of(known) == [1, 2, 4, 8, 16]
    known = played(frontier(1, 2, 4, 8, 9), optimizer={"reference_batch_size": 40}, stage={"multiples": [1]})
    assert batches_of(known) == [1, 2, 4, 9, 40]


def test_a_baseline_that_no_split_gives_is_left_out_and_both_numbers_are_said() -> None:
    known = played(frontier(2, 4), optimizer={"reference_batch_size": 9}, world_size=2)
    assert 9 not in batches_of(known)
    notes = known.conclude().notes
    assert "the baseline's effective batch (9) was left out: it is not a multiple of world_size (2)" in notes


def test_the_batch_of_the_study_file_is_the_baseline_where_it_gives_one() -> None:
    batch = {"micro_batch_size": 5, "effective_batch_size": 10}
    assert 10 in batches_of(played(frontier(1, 2, 4, 8), batch=batch, optimizer={"reference_batch_size": 100}))


def test_one_of_which_the_baselines_time_holds_fewer_than_40_steps_is_left_out_with_the_numbers() -> None:
    known = played(frontier(1, 2, 4, 8), optimizer={"reference_batch_size": 4}, sample_budget=640)
    # at 8 samples a micro-batch it is 4/3 as fast as at 4, so its run has 853 samples: 26 steps of 32
    assert batches_of(known) == [1, 2, 4, 8, 16]
    assert known.conclude().notes[1] == (
        "left out: effective batches 32, 64, 128: in a full run they would get at most 26 optimizer steps, and 40 are needed; up to 1.33 x "
        "as many samples/s as the baseline; sample_budget: 3840 includes them"
    )


def test_a_size_that_something_else_slowed_down_is_expected_to_be_as_fast_as_those_beside_it_say() -> None:
    """A batch is not left out because of a speed that it does not have: it is timed."""
    quiet_one = frontier(4, 8, 12)

    def slowed(*sizes: int, by: float = 10.0) -> FrontierFindings:
        points = [
            replace(one, samples_per_second=(one.samples_per_second or 0) / by, disturbed=True)
            if one.micro_batch_size in sizes
            else one
            for one in quiet_one.measured
        ]
        return replace(quiet_one, measured=tuple(points))

    settings: dict[str, Any] = {"optimizer": {"reference_batch_size": 12}, "sample_budget": 10**5}
    assert 4 in batches_of(played(quiet_one, **settings))
    assert batches_of(played(slowed(4), **settings)) == batches_of(played(quiet_one, **settings))
    (small,) = (form for form in forms(slowed(4), 4, 1) if form.split.micro_batch_size == 4)
    assert small.predicted == pytest.approx(samples_per_second(8) / 2)
    (middle,) = (form for form in forms(slowed(8), 8, 1) if form.split.micro_batch_size == 8)
    assert middle.predicted == pytest.approx(samples_per_second(8)), "a micro-batch's seconds are linear in its size"
    (hardly,) = (form for form in forms(slowed(8, by=0.99), 8, 1) if form.split.micro_batch_size == 8)
    assert hardly.predicted > samples_per_second(8), "what it reached all the same counts"
    everywhere = slowed(4, 8, 12)
    assert batches_of(played(everywhere, **settings)) == batches_of(played(quiet_one, **settings)), "all as much"


def test_at_equal_samples_a_faster_batch_has_no_more_steps() -> None:
    changes: dict[str, Any] = {"optimizer": {"reference_batch_size": 4}, "sample_budget": 640, "objective": "samples"}
    known = played(frontier(1, 2, 4, 8), **changes)
    assert known.conclude().notes[1] == (
        "left out: effective batches 32, 64, 128: in a full run they would get at most 20 optimizer steps, and 40 are needed; up to 1.33 x "
        "as many samples/s as the baseline; sample_budget: 5120 includes them"
    )


def test_no_batch_is_larger_than_the_data() -> None:
    known = played(frontier(1, 2, 4, 8), facts=Facts(num_train_samples=31), optimizer={"reference_batch_size": 4})
    assert max(batches_of(known)) == 16
    assert "effective batches 32, 64, 128 were left out: the data has 31 training samples" in known.conclude().notes


def test_without_a_frontier_the_batch_of_the_study_file_is_timed_below_and_above() -> None:
    known = played(None, batch={"micro_batch_size": 4}, stage={"multiples": [1, 2]})
    assert [(r.micro_batch_size, r.effective_batch_size) for r in known.found(ThroughputFindings).rates] == [
        (1, 1), (2, 2), (4, 4), (4, 8)
    ]  # fmt: skip


def test_micro_batches_that_are_cut_by_tokens_are_timed_and_tell_no_noise_scale() -> None:
    plain = played(frontier(1, 2, 4), optimizer={"reference_batch_size": 4})
    by_tokens = played(frontier(1, 2, 4), optimizer={"reference_batch_size": 4}, micro_batch={})
    steps = [
        {t.id: t.config.sample_budget // t.config.effective_batch_size for t in known.study.trials.values()}
        for known in (plain, by_tokens)
    ]
    assert steps[0].keys() == steps[1].keys()
    assert max(steps[0].values()) > 8 >= max(steps[1].values())
    assert all(trial.config.micro_batch is not None for trial in by_tokens.study.trials.values())
    assert "so they tell no noise scale; the train stage's baseline measures it" in by_tokens.conclude().notes[0]


# In which forms


def test_a_batch_is_split_into_the_fastest_size_that_divides_it_in_its_fastest_mode() -> None:
    found = frontier(4, 9, 12, full=(4, 8, 16, 32))
    tried = {
        batch: [(f.split.micro_batch_size, str(f.mode)) for f in worth_timing(found, batch, 1)] for batch in (4, 36, 32)
    }
    assert tried[4] == [(4, "none")]
    assert tried[36] == [(12, "none"), (9, "none")], "75 and 69 samples/s"
    assert tried[32] == [(32, "full"), (16, "full")], (
        "71 and 64 samples/s; 8 without checkpointing would have 67, and was not run"
    )


def test_a_size_that_was_never_run_is_taken_where_no_other_is_about_as_fast() -> None:
    (best, *_) = forms(frontier(4, 8, 14), 20, 1)
    assert (best.split.micro_batch_size, best.is_measured) == (10, False)
    assert best.predicted == pytest.approx(samples_per_second(10), rel=0.02)


def test_a_rate_between_two_sizes_is_that_of_seconds_on_a_line() -> None:
    rates = {size: samples_per_second(size) for size in (4, 16)}
    assert rate_at(rates, 8) == pytest.approx(samples_per_second(8))
    assert rate_at(rates, 2) == pytest.approx(samples_per_second(4) / 2)
    assert rate_at(rates, 64) == rates[16]


def test_the_form_that_is_kept_is_within_5_percent_of_the_fastest() -> None:
    found, held = frontier(2, 4, 8, 12, full=(8, 16, 24)), list[bool]()
    for seed in range(12):
        known = played(found, noisy(0.05, seed), optimizer={"reference_batch_size": 24}, stage={"multiples": [1, 2]})
        for rate in known.found(ThroughputFindings).rates:
            all_forms = forms(found, rate.effective_batch_size, 1)
            true = [samples_per_second(f.split.micro_batch_size, str(f.mode)) for f in all_forms]
            held.append(samples_per_second(rate.micro_batch_size, str(rate.mode)) >= 0.95 * max(true))
    assert sum(held) / len(held) >= 0.95


def test_of_forms_that_may_be_as_fast_the_users_own_is_kept_and_else_the_one_in_the_fewest_pieces() -> None:
    for seed in range(8):
        noise = noisy(0.03, seed)

        def measured_alike(known: Known, one: Proposal, noise: Callable[[Proposal], float] = noise) -> None:
            seconds = one.config.effective_batch_size / (1000.0 * noise(one))
            known.end(one.id, tokens_per_second=1000.0, step_seconds=seconds)

        own = {"micro_batch_size": 32, "gradient_accumulation_steps": 2}
        known = begun(frontier(16, 32, 64), batch=own).play(measured_alike)
        kept = {
            rate.effective_batch_size: rate.gradient_accumulation_steps
            for rate in known.found(ThroughputFindings).rates
        }
        assert kept[64] == 2
        assert kept[32] == 1


# How often, and what is said


def test_they_are_timed_in_turns_and_the_noise_scale_is_measured_in_the_first_round() -> None:
    known = played(frontier(4, 8), optimizer={"reference_batch_size": 16}, stage={"multiples": [1, 4], "steps": 10})
    order = [(t.proposal.round, t.config.effective_batch_size) for t in known.study.trials.values()]
    assert order == [(turn, batch) for turn in (1, 2, 3) for batch in (4, 8, 16, 32)]
    steps = {t.id: t.config.sample_budget // t.config.effective_batch_size for t in known.study.trials.values()}
    assert [steps[f"throughput-m8k{k}-round1"] for k in (1, 2, 4)] == [8, 10, 5], "20 micro-batches, or those timed"
    assert [steps[f"throughput-m8k{k}-round2"] for k in (1, 2, 4)] == [8, 6, 5]


def test_more_rounds_until_the_rates_are_known_and_no_more_than_allowed() -> None:
    found = frontier(4, 8, 16)
    assert played(found).num_rounds() == 3
    assert 3 < played(found, noisy(0.1, 0)).num_rounds() <= 8
    busy = played(found, noisy(0.4, 0))
    assert 8 <= busy.num_rounds() <= 8 + 3, "so many that agree, and three more in place of those that do not"
    assert busy.found(ThroughputFindings).busy
    assert "undetermined whether other effective batches are faster: " in busy.conclude().reason
    assert any(note.startswith("the machine was busy: they scatter by ") for note in busy.conclude().notes)


def test_goodput_has_an_interval_and_what_may_be_the_best_within_it_is_named() -> None:
    known = played(frontier(4, 8, 16), noisy(0.01, 0), optimizer={"reference_batch_size": 16})
    findings = known.found(ThroughputFindings)
    assert findings.goodput_ends.keys() == findings.goodput.keys()
    for batch, (low, high) in findings.goodput_ends.items():
        assert low <= findings.goodput[batch] <= high
    rates = {rate.effective_batch_size: rate for rate in findings.rates}
    for batch, rate in rates.items():  # the noise scale is 40 [30, 50] samples
        of_rate = rate.high / rate.samples_per_second
        assert findings.goodput_ends[batch][1] >= of_rate * findings.goodput[batch] - 1e-12
    best = max(findings.goodput, key=lambda batch: findings.goodput[batch])
    least = findings.goodput_ends[best][0]
    rivals = [batch for batch, (_, most) in sorted(findings.goodput_ends.items()) if most > least and batch != best]
    named = known.conclude().reason.partition(" has the best goodput of these")[2]
    assert named == (f"; within the intervals it may be {', '.join(map(str, rivals))}" if rivals else "")


def test_another_program_beside_a_single_trial_is_told_with_its_share() -> None:
    def ended(share: float, **changes: Any) -> Known:
        return played_alike(lambda known, _: {"other_cpu_share": 0.0 if known.study.trials else share}, **changes)

    alone, crowded = ended(0.1), ended(0.6)
    assert not alone.found(ThroughputFindings).busy
    assert crowded.found(ThroughputFindings).busy
    first = next(iter(crowded.study.trials))
    (told,) = [note for note in crowded.conclude().notes if note.startswith("the machine was busy: ")]
    assert "round 1 was disturbed and does not count" in told
    assert told.endswith(f"; {first}: other processes took 60% of the CPUs. Time the batches again when it is quiet")
    assert (alone.num_rounds(), crowded.num_rounds()) == (3, 3 + 1), "the round that it disturbed does not count"
    assert not ended(0.6, world_size=2).found(ThroughputFindings).busy, "the other rank may have half of them"


def test_where_every_round_is_disturbed_all_that_are_allowed_are_timed_and_count() -> None:
    known = disturbed(lambda number: True)
    assert known.num_rounds() == 8 + 3
    findings = known.found(ThroughputFindings)
    assert findings.busy
    assert {rate.num_rounds for rate in findings.rates} == {8 + 3}
    assert {round(rate.deviation, 3) for rate in findings.rates} == {round(math.log(1.5) / math.sqrt(11), 3)}, (
        "that its timings agree to the digit says nothing of what disturbed them all"
    )


@pytest.mark.parametrize("allowed", [5000, 7000, 10000])
def test_every_round_that_was_timed_counts_where_no_further_one_is_allowed(allowed: int) -> None:
    """That the stage may take no more is known after its last round: it speaks against the next, and not against those before it."""
    known = disturbed(lambda number: True, rounds=2, max_samples=allowed)
    assert {rate.num_rounds for rate in known.found(ThroughputFindings).rates} == {known.num_rounds()}
    assert 2 < known.num_rounds() < 8 + 2


def test_a_disturbed_round_is_timed_again_where_the_study_file_wants_no_more_rounds_than_the_fewest() -> None:
    known = disturbed(lambda number: number == 1, rounds=2, max_rounds=2)
    assert known.num_rounds() == 2 + 1
    assert {rate.deviation for rate in known.found(ThroughputFindings).rates} == {0.0}


def disturbed(is_disturbed: Callable[[int], bool], **stage: Any) -> Known:
    """With something else at work in some rounds."""
    return played_alike(lambda _, one: {"other_cpu_share": 0.6 * is_disturbed(one.round or 0)}, stage=stage)


def test_a_round_in_which_the_gpu_slowed_itself_down_is_timed_again() -> None:
    known = played_alike(lambda _, one: {"gpu_slowed": float(one.id.endswith("-round2"))})
    assert known.num_rounds() == 3 + 1
    assert known.found(ThroughputFindings).busy
    assert any("the GPU slowed itself down for its heat or power supply" in note for note in known.conclude().notes)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_the_intervals_of_the_rates_cover_how_much_faster_one_batch_is(noise: float) -> None:
    held = []
    for seed in range(12):
        known = played(
            frontier(4, 8, 16), noisy(noise, seed), optimizer={"reference_batch_size": 4}, stage={"multiples": [1]}
        )
        rates = known.found(ThroughputFindings).rates
        for slow, fast in itertools.pairwise(rates):
            half = math.hypot(math.log(slow.high / slow.low), math.log(fast.high / fast.low)) / 2
            true = samples_per_second(fast.micro_batch_size) / samples_per_second(slow.micro_batch_size)
            held.append(abs(math.log(fast.samples_per_second / slow.samples_per_second / true)) <= half)
    assert sum(held) / len(held) >= 0.9


def test_the_sentence_names_the_fastest_the_next_and_the_baseline_with_their_paired_figures() -> None:
    known = played(frontier(4, 8, 16), optimizer={"reference_batch_size": 4}, stage={"multiples": [1]})
    assert known.conclude().reason == (
        "effective batch 16 (16 x 1) trains fastest: 80 samples/s; "
        "effective batch 8 reaches 0.83 x [0.83, 0.83] in 3 rounds; "
        "effective batch 4 reaches 0.63 x [0.63, 0.63] in 3 rounds; "
        "the noise scale is undetermined, so goodput is not ranked"
    )


def test_the_sentence_tells_the_ranks_among_which_a_batch_is_split() -> None:
    known = played(frontier(4, 8), optimizer={"reference_batch_size": 8}, stage={"multiples": [1]}, world_size=2)
    assert known.conclude().reason.startswith("effective batch 16 (8 x 1 x 2) trains fastest: ")


def test_with_a_noise_scale_goodput_is_ranked_and_a_single_micro_batch_tells_none() -> None:
    known = played(frontier(4, 8), optimizer={"reference_batch_size": 16}, stage={"multiples": [1, 4]})
    found = known.found(ThroughputFindings)
    assert found.critical_batch_size == pytest.approx(40.0)
    assert max(found.goodput.values()) == 1
    assert max(found.goodput, key=lambda batch: found.goodput[batch]) == 8
    assert "the noise scale needs two micro-batches a step; effective batches 4, 8 have one" in known.conclude().notes


def test_the_goodput_figure_names_the_noise_scale_as_everything_else_does() -> None:
    """The critical batch is another number, which branches measure."""
    known = played(frontier(4, 8), optimizer={"reference_batch_size": 16}, stage={"multiples": [1, 4]})
    findings = known.found(ThroughputFindings)
    known.concluded(findings)
    goodput = next(one for one in figures(known.context) if one.name == "goodput")
    assert [(line.value, line.label) for line in goodput.lines] == [(findings.critical_batch_size, "noise scale 40")]


def test_coherence_inside_its_noise_floor_is_named() -> None:
    known = played(frontier(4, 8), optimizer={"reference_batch_size": 16}, stage={"multiples": [1]})
    assert not any("noise floor" in note for note in known.conclude().notes)
    name = "throughput-m8k2-round1"
    trial = known.study.trials[name]
    known.study.trials[name] = replace(trial, metrics=trial.metrics | {"coherence": 0.05})
    assert "at effective batch 16 the coherence is not above its noise floor" in known.conclude().notes


def test_a_batch_that_does_not_run_is_named_and_the_others_stand() -> None:
    def end(known: Known, proposal: Proposal) -> None:
        if proposal.config.effective_batch_size == 16:
            known.end(proposal.id, "out_of_memory", "x", Cause.OUT_OF_MEMORY)
        else:
            measure(known, proposal, 1.0)

    known = begun(frontier(4, 8), more_stages=[]).play(end)
    assert 16 not in batches_of(known)
    assert 8 in batches_of(known)
    assert "effective batch 16 did not run in every round; see the reasons of its trials" in known.conclude().notes


@pytest.mark.parametrize("allowed", [1000, 2000])
def test_the_largest_batches_give_way_to_max_samples_and_are_named(allowed: int) -> None:
    found = frontier(1, 2, 4, 8, 16, 32)
    stage = {"max_samples": allowed}
    known = played(found, sample_budget=3072, stage=stage, optimizer={"reference_batch_size": 16})
    taken = sum(trial.config.sample_budget for trial in known.study.trials.values())
    needed = 3 * 8 * (16 + 32)  # the baseline and the chosen batch
    assert taken <= max(allowed, needed)
    assert any(f"more than the {allowed:,} that max_samples leaves" in note for note in known.conclude().notes)
    assert {16, 32} <= {*batches_of(known)}


def test_by_default_it_is_time_that_leaves_batches_out_and_never_the_smallest_or_the_largest() -> None:
    """A quarter of the speed of the others' machine: the rounds of all of them take more than a minute."""
    whole = frontier(1, 2, 4, 8, 16, 32)
    rates = [(one.micro_batch_size, one.samples_per_second) for one in whole.measured]
    slow = tuple(
        replace(one, samples_per_second=rate / 4) for one, (_, rate) in zip(whole.measured, rates, strict=True) if rate
    )
    everything = batches_of(played(whole, sample_budget=3072))
    some = batches_of(played(replace(whole, measured=slow), sample_budget=3072))
    assert 2 < len(some) < len(everything)
    assert {some[0], some[-1]} == {everything[0], everything[-1]}
    assert any(
        "that the study's length leaves" in note
        for note in played(replace(whole, measured=slow), sample_budget=3072).conclude().notes
    )


def test_the_same_journal_gives_the_same_proposals() -> None:
    known = played(frontier(4, 8, 16), noisy(0.08, 0))
    again = begun(frontier(4, 8, 16))
    for name, trial in known.study.trials.items():
        assert name in again.ids()
        measure(again, trial.proposal, noisy(0.08, 0)(trial.proposal))
    assert again.ids() == known.ids()


# Nodes


def played_on_two_nodes(slow: float) -> Known:
    """Two lanes, each on a node of its own: who is free first takes the next trial. Steps take so many times as long on the second."""
    known = begun(frontier(1, 2, 4, 8))
    known.context = replace(known.context, num_lanes=2)
    free_at, noise = [0.0, 0.0], noisy(0.02, 0)
    while waiting := known.waiting():
        for proposal in waiting:
            lane = free_at.index(min(free_at))
            config, factor = proposal.config, (1.0, slow)[lane]
            seconds = config.effective_batch_size / samples_per_second(config.micro_batch_size)
            seconds *= factor * noise(proposal)
            free_at[lane] += 10 * seconds
            known.study.apply(proposed(proposal))
            known.study.apply(Started(id=proposal.id))
            metrics = {"tokens_per_second": 128 / seconds, "step_seconds": seconds, **signal(config)}
            held = HeldLane(lane, f"node-{lane}")
            end = {"state": TrialState.COMPLETE, "cause": None, "reason": "", "metrics": metrics, "seconds": 1}
            known.study.apply(Ended(id=proposal.id, lane=held, **end))
    return known


def test_the_speed_of_no_batch_depends_on_how_often_it_was_timed_on_a_slower_node() -> None:
    alike, unequal = (
        {
            rate.effective_batch_size: rate.samples_per_second
            for rate in played_on_two_nodes(slow).found(ThroughputFindings).rates
        }
        for slow in (1.0, 1.6)
    )
    assert unequal == pytest.approx(alike, rel=0.05)
