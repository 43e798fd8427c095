"""The frontier stage in worlds of known memory and speed: what it tries, what it chooses, what it says."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.decisions.director import Director
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.forms import forms, measured_sizes
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings, OperatingPoint
from batchscout.orchestrator.stages.frontier.pareto import Point, knee, pareto_front
from batchscout.orchestrator.stages.frontier.probes import ladder
from batchscout.orchestrator.stages.frontier.variants import ONE_GRAPH, variants
from batchscout.orchestrator.stages.probing import cost_of, num_full_runs
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.reuse import Measurements
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import Proposal, Reuse, TrialState
from batchscout.trainers.config import Compile
from tests.support.every import for_every
from tests.support.frontier_world import LIMIT, World, played
from tests.support.known_stage import Known, noisy
from tests.support.lane_player import know, next_trial, study_of
from tests.support.worlds import MIB, NONE


def directed(path: Path, measurements: Measurements, verified: float = 1.0) -> tuple[Study, list[str]]:
    """The stage as a Director runs it, and the ids of the trials that it started.

    verified: the speed of a verification, beside what it would be if nothing else ran.
    """
    stage = {"type": "frontier", "activation_checkpointing": ["none", "full"]}
    world, config = World(), study_of(stages=[stage], memory_limit=f"{LIMIT}MiB")
    with Journal(path, config.name) as journal:
        know(journal, facts=Facts(num_train_samples=1000))
        context = StageContext(config.stages[0], config, journal.study)
        director = Director(context, journal, (), 1, measurements=measurements)
        started = []
        while trial := next_trial(director):
            started.append(trial.id)
            director.on_started(trial.id)
            share = verified if trial.proposal.fresh_process else 1.0
            director.on_message(trial.id, world.message(trial.config, share))
        director.conclude()
    return journal.study, started


@pytest.mark.parametrize(("tokens", "largest"), [(1000, 3), (300, 1), ("auto", 19)])
def test_no_micro_batch_is_tried_that_holds_more_tokens_than_the_study_file_allows(
    tokens: int | str, largest: int
) -> None:
    study = {"micro_batch": {"tokens": tokens}}
    known, found = played(World(), Facts(longest_sample=300), study=study, activation_checkpointing=["none"])
    probed = [t.config for t in known.study.trials.values() if t.config.dynamic_micro_batch]
    assert largest == max(
        t.config.micro_batch_size for t in known.study.trials.values() if t.state is TrialState.COMPLETE
    )
    assert all(config.longest_samples and config.micro_batch is not None for config in probed)
    said = "none: micro-batch 3 fits: a larger one would hold more than micro_batch.tokens (1,000)"
    assert (said in " ".join(found.notes)) == (tokens == 1000)


def test_a_second_study_measures_nothing_that_the_first_did_and_finds_the_same(tmp_path: Path) -> None:
    def known(name: str, *, remeasure: bool = False) -> Measurements:
        return Measurements(tmp_path / "measurements.jsonl", {"device": "x"}, f"/runs/{name}", remeasure=remeasure)

    first, measured = directed(tmp_path / "first.jsonl", known("first"))
    assert len(measured) > 5
    second, started = directed(tmp_path / "second.jsonl", known("second"))
    assert not started
    assert all(trial.reused for trial in second.trials.values())
    assert second.conclusions["frontier"].findings == first.conclusions["frontier"].findings
    assert f"{len(measured)} of {len(measured)} trials were measured in earlier studies" in "".join(
        second.conclusions["frontier"].notes
    )
    assert directed(tmp_path / "third.jsonl", known("third", remeasure=True))[1] == measured


def test_what_something_else_slowed_down_is_measured_again_by_the_next_study(tmp_path: Path) -> None:
    def known(name: str) -> Measurements:
        return Measurements(tmp_path / "measurements.jsonl", {"device": "x"}, f"/runs/{name}")

    first, measured = directed(tmp_path / "first.jsonl", known("first"), verified=0.3)
    assert "the machine was busy: frontier-none-m18-verified reached" in "".join(first.conclusions["frontier"].notes)
    second, started = directed(tmp_path / "second.jsonl", known("second"))
    assert started == ["frontier-none-m18-verified"]
    assert "busy" not in "".join(second.conclusions["frontier"].notes)
    assert sum("-round" in name for name in measured) == 15
    assert directed(tmp_path / "third.jsonl", known("third"))[1] == [], "and then it is known"


def test_a_point_beside_whose_every_timing_something_else_was_at_work_is_marked() -> None:
    """Of a finalist the rounds count, and not the probe before them."""
    probes = {p.id for p in played(World())[0].study.trials.values() if p.proposal.round is None}
    smallest, finalist = "frontier-none-m1", "frontier-none-m18"
    assert {smallest, finalist} <= probes
    known, _ = played(World(others=lambda proposal: 0.6 if proposal.id in (smallest, finalist) else 0.0))
    marked = {str(one.point) for one in known.found(FrontierFindings).measured if one.disturbed}
    assert marked == {"none-m1"}


def test_a_rate_that_the_data_bounds_is_told_as_the_datas_and_not_as_the_devices() -> None:
    """Above micro-batch 8 data come no faster, so that more memory does not pay: for want of workers."""

    def waits(proposal: Proposal) -> float:
        return 1 - 8 / proposal.config.micro_batch_size if proposal.config.micro_batch_size > 8 else 0.0

    known, found = played(World(waits=waits))
    chosen = known.found(FrontierFindings).chosen
    assert chosen.input_bound is not None
    share = 1 - 8 / chosen.micro_batch_size
    assert chosen.input_bound.data_wait == pytest.approx(share)
    most = chosen.tokens_per_second / (1 - share)
    assert (
        f"input-bound: {share:.0%} of each step waits for data; raise data.workers (now 2), not the batch: without the wait it would "
        f"reach up to {most:,.0f} tokens/s"
    ) in found.reason
    _, of_samples = played(World(waits=waits), Facts(counted="samples"))
    assert f"reach up to {most:,.0f} samples/s" in of_samples.reason
    notes = "".join(found.notes)
    assert "of each step waits for data, which is due to the data, not the device" in notes
    assert "their order is that of the data, and another one with more data.workers" in notes


def test_a_frontier_that_does_not_wait_for_data_says_nothing_of_them() -> None:
    known, found = played(World(waits=lambda proposal: 0.09))
    assert known.found(FrontierFindings).chosen.input_bound is None
    assert "data.workers" not in found.reason + "".join(found.notes)


def test_the_fastest_inside_the_headroom_is_chosen_and_what_is_around_it_is_said() -> None:
    known, found = played(World())
    assert found.ok
    findings = known.found(FrontierFindings)
    assert findings.chosen.mode.activation_checkpointing == "none"
    assert findings.chosen.micro_batch_size == 18, "20 + 4 x 18 = 92 of 95 MiB"
    assert findings.limit_bytes == findings.chosen.peak_memory_bytes + 8 * MIB
    assert findings.largest.micro_batch_size >= 0.98 * 80
    assert findings.largest.mode.activation_checkpointing == "full"
    assert findings.baseline.micro_batch_size == 1
    assert findings.baseline.mode.activation_checkpointing == "none"
    assert found.reason.startswith(
        "micro-batch 18 with activation checkpointing none is fastest inside the limit: 474 tokens/s, 92 MiB of 100 MiB; "
        "micro-batch 16 with activation checkpointing none reaches 0.94 x [0.94, 0.94] in 3 rounds; micro-batch 80 with "
        "activation checkpointing full reaches 0.84 x [0.84, 0.84] in 3 rounds; the largest that fits, micro-batch 80 with activation checkpointing full, reaches 400"
    )
    assert found.notes[0] == "none: micro-batch 18 fits, 19 leaves less than the headroom free (5 probes)"
    assert known.study.trials["frontier-none-m18-verified"].proposal.fresh_process
    assert sum(trial.proposal.fresh_process for trial in known.study.trials.values()) == 1


@pytest.mark.slow
@for_every(seed=range(40))
def test_in_any_world_the_choice_fits_is_verified_and_nobody_was_truly_faster_by_more_than_a_tie(seed: int) -> None:
    draw = random.Random(seed)
    modes = ["none", "full"]
    world = World(
        base={mode: draw.uniform(1, 60) for mode in modes},
        slope={mode: draw.uniform(0.4, 12) for mode in modes},
        rate={mode: draw.uniform(500, 1500) for mode in modes},
        half_rate_size=draw.uniform(0, 30),
        noise=lambda proposal: random.Random(proposal.id).uniform(0.995, 1.005),
    )
    known, found = played(world)
    edges = {mode: int((0.95 * LIMIT - world.base[mode]) / world.slope[mode]) for mode in modes}
    if max(edges.values()) < 1:
        assert not found.ok
        return
    findings = known.found(FrontierFindings)
    assert findings.chosen.peak_memory_bytes <= 0.95 * LIMIT * MIB
    assert findings.limit_bytes == LIMIT * MIB
    best = max(
        world.rate[mode] * size / (size + world.half_rate_size)
        for mode, edge in edges.items()
        for size in range(1, edge + 1)
    )
    assert findings.chosen.tokens_per_second >= 0.96 * best  # a tie's width, and what the search leaves
    assert findings.largest.micro_batch_size >= 0.98 * max(edges.values()) - 1


def test_finalists_are_timed_in_turns_with_static_shapes() -> None:
    known, _ = played(World(), rounds=3, finalists=2)
    timed = [(name, trial.config) for name, trial in known.study.trials.items() if "-round" in name]
    names = [name for name, _ in timed]
    assert [name[-6:] for name in names] == ["round1", "round1", "round2", "round2", "round3", "round3"]
    assert len({name[:-7] for name in names}) == 2
    assert names[::2] == [names[0][:-1] + turn for turn in "123"]
    assert not any(config.dynamic_micro_batch for _, config in timed)


def test_on_a_gpu_no_speed_is_that_of_a_few_steps_with_statistics() -> None:
    """Their hooks on every micro-gradient cost small sizes more, so a probe's rates would favour large ones."""
    known, _ = played(World())
    seconds = {
        trial.config.dynamic_micro_batch: trial.config.gpu_timing_seconds for trial in known.study.trials.values()
    }
    assert seconds == {True: 0.5, False: 2.0}, "of a probe, and of a timing or verification"


def test_a_tie_goes_to_the_smaller_memory() -> None:
    flat = World(half_rate_size=0.0, noise=noisy(0.005))
    known, found = played(flat, activation_checkpointing=["none"])
    findings = known.found(FrontierFindings)
    timed = [trial for trial in known.study.trials.values() if trial.proposal.round is not None]
    assert findings.chosen.micro_batch_size == min(trial.config.micro_batch_size for trial in timed)
    assert {rival.order for rival in findings.rivals} == {"tied"}
    assert "may be as fast: 1.0" in found.reason


def test_the_only_point_that_was_measured_is_not_called_the_fastest() -> None:
    _, found = played(World(), activation_checkpointing=["none"], smallest=8, largest=8)
    assert found.reason.startswith(
        "micro-batch 8 with activation checkpointing none is the only point that was measured inside the limit: "
    )


def test_a_largest_size_whose_probe_reads_faster_than_the_chosen_point_is_not_said_to_be_faster() -> None:
    slow_when_timed = World(noise=lambda proposal: 1.0 if proposal.round is None else 0.5)
    known, found = played(slow_when_timed, activation_checkpointing=["none", "full"], finalists=2)
    findings = known.found(FrontierFindings)
    assert findings.largest.tokens_per_second > findings.chosen.tokens_per_second
    assert (
        "; the largest that fits, micro-batch 80 with activation checkpointing full, reached 400 tokens/s when it was probed, "
        "at another time than the chosen one was timed: the two cannot be compared" in found.reason
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "What lies right of the headroom line runs"),
        ({"memory_limit": None}, "the slowest to the fastest round."),
        ({"memory_limit": "4GiB"}, "The limit, 4 GiB, lies far to the right."),
    ],
)
def test_a_caption_tells_of_the_lines_that_its_picture_has(changes: dict[str, Any], told: str) -> None:
    known, _ = played(World(), study=changes, largest=16, activation_checkpointing=["none"])
    (figure,) = known.stage.figures(known.context)
    assert told in figure.caption
    assert ("headroom line" in figure.caption) == any("headroom" in line.label for line in figure.lines)


def test_noise_leads_to_more_rounds_and_then_to_undetermined() -> None:
    flat = World(half_rate_size=0.0, noise=noisy(0.15))
    known, found = played(flat, activation_checkpointing=["none"])
    findings = known.found(FrontierFindings)
    assert 8 <= known.num_rounds() <= 8 + 3
    assert "undetermined" in {rival.order for rival in findings.rivals}
    assert "seems fastest inside the limit" in found.reason
    assert "undetermined whether micro-batch" in found.reason
    assert any("the machine was busy: the finalists' timings: they scatter by 1" in note for note in found.notes)
    timings = [name for name, trial in known.study.trials.items() if trial.proposal.round is not None]
    assert list(findings.disturbed) == timings


def test_a_round_in_which_the_gpu_slowed_itself_down_is_timed_again() -> None:
    known, _ = played(World(slowed=lambda proposal: proposal.round == 1))
    assert known.num_rounds() == 3 + 1
    assert {rival.ratio.num_rounds for rival in known.found(FrontierFindings).rivals} == {3}


@pytest.mark.parametrize("seed", range(4))
def test_the_sentence_and_the_findings_say_what_the_rounds_in_the_journal_say(seed: int) -> None:
    known, found = played(World(half_rate_size=2.0, noise=noisy(0.03, seed)))
    findings = known.found(FrontierFindings)
    trials = [t for t in known.study.trials.values() if t.proposal.round is not None]

    def logs(point: OperatingPoint) -> list[float]:
        mine = [
            t for t in trials if (mode_of(t.config), t.config.micro_batch_size) == (point.mode, point.micro_batch_size)
        ]
        return [math.log(trial.measured("tokens_per_second")) for trial in mine]

    assert findings.rivals
    for rival in findings.rivals:
        paired = [a - b for a, b in zip(logs(rival.point), logs(findings.chosen.point), strict=True)]
        assert math.exp(sum(paired) / len(paired)) == pytest.approx(rival.ratio.point)
        rates = {one.point: one.tokens_per_second for one in findings.measured}
        assert rates[rival.point] / rates[findings.chosen.point] == pytest.approx(rival.ratio.point)
        assert str(rival.ratio) in found.reason


def test_a_point_that_falls_in_its_verification_is_timed_again_and_its_figure_is_not_kept() -> None:
    world = World(noise=lambda proposal: 0.2 if proposal.fresh_process else 1.0)
    known, found = played(world)
    assert known.num_rounds() == 3 + 2
    findings = known.found(FrontierFindings)
    assert findings.chosen.micro_batch_size == 18
    assert findings.chosen.tokens_per_second == pytest.approx(474, abs=1), "that of its rounds"
    assert findings.disturbed == ("frontier-none-m18-verified",)
    assert any(
        "frontier-none-m18-verified reached 95 tokens/s, and the probe of the same point far more. Such figures" in note
        for note in found.notes
    )


# What a run can use, and what it may cost


def for_training(
    world: World, budget: int, then: tuple[str, ...] = ("train",), **stage: Any
) -> tuple[Known, Conclusion]:
    """The stage in a study that trains, without a memory limit worth the name."""
    return played(world, then=then, study={"memory_limit": "100GiB", "sample_budget": budget}, **stage)


ROOMY = World(base={"none": 0.1, "full": 0.1}, slope={"none": 0.01, "full": 0.01}, half_rate_size=4.0)


def sizes_of(known: Known, **changes: Any) -> list[int]:
    trials = [trial for trial in known.study.trials.values() if "full" not in trial.id]
    return sorted(
        {trial.config.micro_batch_size for trial in trials if (trial.proposal.round is not None) is bool(changes)}
    )


@pytest.mark.parametrize("budget", [512, 2048])
def test_both_ends_are_looked_at_and_only_sizes_that_a_run_can_use_are_timed_again(budget: int) -> None:
    known, found = for_training(ROOMY, budget)
    probed, timed = sizes_of(known), sizes_of(known, timed=True)
    assert (probed[0], probed[-1]) == (1, 1024), "however short the study"
    largest = known.found(FrontierFindings).chosen.micro_batch_size
    assert timed
    assert max(timed) == largest < 1024
    for size, usable in ((largest, True), (1024, False)):
        gain = (size / (size + 4)) / (8 / (8 + 4))  # over the baseline's 8 samples: in its time more are trained
        assert (gain * budget / size >= 40) is usable
    (note,) = (note for note in found.notes if note.startswith("not compared: "))
    assert "1024: in a full run " in note
    assert f"and 40 are needed; up to {1024 / 1028 / (8 / 12):.2f} x as many samples/s as the baseline" in note
    enough = int(note.split("sample_budget: ")[1].split()[0])
    for longer, told in ((enough, 0), (enough - 100, 1)):
        _, found = for_training(ROOMY, longer)
        assert sum("1024: in a full run " in note for note in found.notes) == told


def test_a_fixed_cost_of_each_pass_hides_no_size_however_few_samples_the_study_has() -> None:
    """Every pass takes 60 ms: micro-batch 256 costs what one of 4 costs."""
    fixed = World(base={"none": 0.1}, slope={"none": 0.01}, rate={"none": 1e6 / 0.06}, half_rate_size=1e6)
    known, found = for_training(fixed, 1024, smallest=4, largest=256)
    assert (sizes_of(known)[0], sizes_of(known)[-1]) == (4, 256)
    assert known.found(FrontierFindings).chosen.micro_batch_size == 256, found.reason


def test_checkpointing_is_not_searched_where_everything_fits_without() -> None:
    known, found = for_training(ROOMY, 2048)
    assert [name for name in known.study.trials if "full" in name] == ["frontier-full-m1"]
    assert "full: micro-batch 1 fits; 16 was left out: without checkpointing (none) all sizes" in found.notes[1]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [512, 2048, 32_768, 10**6])
@pytest.mark.parametrize("world", ["roomy", "with an edge in each mode"])
def test_the_stage_takes_at_most_4_percent_of_the_training_or_a_minute_and_says_what_it_left_out(
    world: str, budget: int
) -> None:
    """Beside the two first sizes, which may take any time, and what is verified."""
    slow = {"none": 4.0, "full": 2.0}
    known, found = for_training(replace(ROOMY if world == "roomy" else World(), rate=slow), budget)
    trials = known.study.trials
    taken = sum(cost_of(trial).seconds for name, trial in trials.items() if name not in fresh(known))
    first = sum(cost_of(trial).seconds for trial in [*trials.values()][:2])
    baseline = 4.0 * 8 / (8 + (4.0 if world == "roomy" else 20.0))
    training = num_full_runs(known.config, known.study) * budget / baseline
    assert taken <= max(60.0, 0.04 * training) * 1.02 + first
    if budget == 512:
        assert any("the stage may take steps of" in note for note in found.notes)


def test_max_samples_is_a_limit_where_it_is_given() -> None:
    known, found = for_training(ROOMY, 10**6, max_samples=500)
    assert sum(trial.config.sample_budget for trial in known.study.trials.values()) <= 500
    assert any("500 samples (max_samples)" in note for note in found.notes)


def test_a_study_that_trains_nothing_probes_as_far_as_memory_reaches() -> None:
    known, _ = for_training(ROOMY, 512, (), largest=300)
    assert max(trial.config.micro_batch_size for trial in known.study.trials.values()) == 300


def test_what_does_not_fit_in_a_fresh_process_gives_way_to_the_next_best() -> None:
    world = World(more_memory=lambda p: 10.0 if p.id == "frontier-none-m18-verified" else 0.0)
    known, found = played(world)
    assert found.ok
    assert known.found(FrontierFindings).chosen.point != OperatingPoint(NONE, 18)
    assert (
        next(name for name, trial in known.study.trials.items() if trial.proposal.fresh_process)
        == "frontier-none-m18-verified"
    )
    nothing = World(
        more_memory=lambda p: 10.0 * p.fresh_process, base={"none": 90.0}, slope={"none": 1.0}, rate={"none": 9e3}
    )
    _, found = played(nothing)
    assert not found.ok
    assert "4 micro-batch sizes fitted in a probe, and none when it was timed or in a fresh process" in found.reason


def test_without_a_limit_what_the_gpu_had_for_its_process_is_the_limit() -> None:
    given, told = played(World())
    read, told_of_gpu = played(World(device_memory_bytes=LIMIT * MIB), study={"memory_limit": None})
    assert told_of_gpu.ok
    assert told_of_gpu.ok == told.ok
    of_file, of_gpu = given.found(FrontierFindings), read.found(FrontierFindings)
    assert of_gpu.limit_bytes == LIMIT * MIB
    assert of_gpu.chosen.point == of_file.chosen.point
    assert of_gpu.largest.point == of_file.largest.point
    assert of_gpu.largest.peak_memory_bytes <= 0.95 * LIMIT * MIB


def test_what_a_gpu_had_when_an_earlier_study_measured_is_no_limit_of_this_one() -> None:
    """Another process had the rest of it that day."""
    today = World(device_memory_bytes=LIMIT * MIB)

    def end(known: Known, proposal: Proposal) -> None:
        today.end(known, proposal)
        if proposal.id == "frontier-none-m1":
            trial = known.study.trials[proposal.id]
            then = trial.metrics | {"device_memory_bytes": 40.0 * MIB}
            known.study.trials[trial.id] = replace(trial, metrics=then, reused=Reuse("2026-11-01", "runs/earlier"))

    keys: dict[str, Any] = {"sample_budget": 100_000, "memory_limit": None}
    stage = {"type": "frontier", "activation_checkpointing": list(today.base)}
    found = Known(stage, **keys).play(end).found(FrontierFindings)
    alone = played(today, study=keys)[0].found(FrontierFindings)
    assert found.limit_bytes == LIMIT * MIB
    assert found.largest.point == alone.largest.point


def fresh(known: Known) -> list[str]:
    return [name for name, trial in known.study.trials.items() if trial.proposal.fresh_process]


def test_the_large_sizes_that_are_trained_are_verified_as_the_chosen_one_is() -> None:
    known, found = played(World(), then=("train",))
    findings = known.found(FrontierFindings)
    assert fresh(known) == ["frontier-none-m18-verified", f"frontier-{findings.largest.point}-verified"]
    assert not [note for note in found.notes if "fresh process" in note]
    assert findings.largest.point == played(World())[0].found(FrontierFindings).largest.point


def test_no_point_is_verified_twice_and_none_in_a_mode_that_is_nowhere_the_fastest() -> None:
    """Both modes hold the same sizes, and `none` runs all of them faster."""
    alike = World(half_rate_size=1000.0, slope={"none": 30.0, "full": 30.0}, base={"none": 20.0, "full": 20.0})
    known, _ = played(alike, then=("train",))
    assert known.found(FrontierFindings).chosen.point == known.found(FrontierFindings).largest.point
    assert fresh(known) == ["frontier-none-m2-verified"]


@pytest.mark.slow
@for_every(seed=range(10))
def test_whatever_is_trained_is_no_larger_than_what_fitted_in_a_fresh_process_in_its_mode(seed: int) -> None:
    draw = random.Random(seed)
    bound = {"none": draw.randrange(8, 25), "full": draw.randrange(30, 90)}

    def more(proposal: Proposal) -> float:
        beyond = proposal.config.micro_batch_size > bound[str(proposal.config.activation_checkpointing)]
        return 200.0 if proposal.fresh_process and beyond else 0.0

    known, found = played(World(more_memory=more, rate={"none": 1000.0, "full": 900.0}), then=("train",))
    findings = known.found(FrontierFindings)
    assert findings.chosen.micro_batch_size <= bound[str(findings.chosen.mode)]
    trained = [forms(findings, size, 1)[0] for size in measured_sizes(findings)]
    assert all(form.split.micro_batch_size <= bound[str(form.mode)] for form in trained)
    assert findings.largest.micro_batch_size == max(form.split.micro_batch_size for form in trained)
    refuted = [name for name in fresh(known) if known.study.trials[name].state is not TrialState.COMPLETE]
    said = [note for note in found.notes if "fitted when it was probed, and not again in a fresh process" in note]
    assert len(said) == len(refuted)


def test_a_size_whose_step_would_take_too_long_is_not_tried_and_the_evidence_says_so() -> None:
    world = World(half_rate_size=0.0, base={"full": 5.0}, slope={"full": 0.1}, rate={"full": 2.0})
    known, found = played(world, max_step_seconds=30)
    assert max(trial.config.micro_batch_size for trial in known.study.trials.values()) == 30
    assert found.notes[0].startswith("full: micro-batch 30 fits: a step would take longer than max_step_seconds (30)")


def test_a_mode_is_spared_for_one_without_checkpointing_only_where_that_was_shown_to_fit_all() -> None:
    """Data that end it are a largest size; samples that are spent say nothing of what would have fitted."""
    world = World(
        base={"none": 20.0, "full": 10.0}, slope={"none": 1.0, "full": 0.5}, rate={"none": 20.0, "full": 10.0}
    )
    _, ended_by_data = played(world, Facts(num_train_samples=12))
    said = " ".join(ended_by_data.notes)
    assert "none: micro-batch 12 fits: a step would take some of the 12 training samples twice" in said
    assert "without checkpointing (none) all sizes that a run can use fit, too" in said
    known, ended_by_budget = played(world, Facts(num_train_samples=12), max_samples=40)
    assert max(t.config.micro_batch_size for t in known.study.trials.values()) < 12
    assert "all sizes that a run can use fit, too" not in " ".join(ended_by_budget.notes)


@pytest.mark.parametrize("cause", [Cause.TOO_SLOW, Cause.THRASHING])
def test_a_size_that_thrashes_or_crawls_bounds_the_search_like_one_that_does_not_fit(cause: Cause) -> None:
    world = World(base={"none": 20.0}, slope={"none": 4.0}, rate={"none": 1000.0})

    def end(known: Known, proposal: Proposal) -> None:
        if proposal.config.micro_batch_size > 11:
            known.end(proposal.id, "pruned", "x", cause, peak_memory_bytes=50 * MIB)
        else:
            world.end(known, proposal)

    known = Known({"type": "frontier", "activation_checkpointing": ["none"]}, memory_limit="100MiB").play(end)
    found = known.conclude()
    assert known.found(FrontierFindings).largest.micro_batch_size == 11
    assert "none: micro-batch 11 fits, 12 does not" in found.notes[0]


def test_a_longer_context_is_priced_and_never_chosen() -> None:
    world = World(base={"none": 20.0}, slope={"none": 1.0}, rate={"none": 1000.0})
    known, found = played(world, seq_len=[4])
    findings = known.found(FrontierFindings)
    assert findings.chosen.micro_batch_size in (72, 75)
    assert findings.largest.mode.seq_len is None
    (longer,) = findings.other_lengths
    assert (longer.seq_len, longer.largest_micro_batch_size) == (4, 18)
    later = known.context.trial(known.context.split(4, 2), findings.chosen.mode)
    assert "seq_len" not in later.data.kwargs, "later stages run the data's own"
    assert any(note.startswith("samples of 4: 474 tokens/s at micro-batch 18 with") for note in found.notes)


@pytest.mark.parametrize(
    ("chunked", "kind", "said"),
    [
        ((1.0, 0.5), "chunked", "in chunks pays here: tokens/s 1.00 x [1.00, 1.00] in 3 rounds, memory 0.6"),
        ((0.8, 0.5), "whole", "in chunks does not pay here: tokens/s 0.80 x [0.80, 0.80] in 3 rounds, memory 0.6"),
    ],
)
def test_cross_entropy_in_chunks_is_timed_beside_the_best_and_taken_where_it_pays(
    chunked: tuple[float, float], kind: str, said: str
) -> None:
    world = World(chunked=chunked)
    known, found = played(world, Facts(chunked_cross_entropy=True))
    findings = known.found(FrontierFindings)
    assert findings.chosen.mode.cross_entropy == kind
    assert any(said in note for note in found.notes), found.notes
    kwargs = known.context.trial(known.context.split(4, 2), findings.chosen.mode).model.kwargs
    assert kwargs.get("cross_entropy", "whole") == kind
    assert not any("chunk" in note for note in played(world)[1].notes), "where torch has none, nothing is said"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one_graph", "compiled", "said"),
    [
        ((1.2, 0.6), "whole", "the model as one graph pays here: tokens/s 1.20 x [1.20, 1.20] in 3 rounds, memory 0.6"),
        (
            (0.8, 0.6),
            True,
            "the model as one graph does not pay here: tokens/s 0.80 x [0.80, 0.80] in 3 rounds, memory 0.",
        ),
        ((1.2, 3.0), True, "the model as one graph could not be timed"),
        (
            (1.2, 1.1),
            True,
            "the model as one graph does not fit here: tokens/s 1.20 x [1.20, 1.20] in 3 rounds, memory 1.0",
        ),
    ],
)
def test_the_model_as_one_graph_is_timed_beside_the_best_and_taken_for_all_sizes_where_it_pays(
    one_graph: tuple[float, float], compiled: Compile, said: str
) -> None:
    known, found = played(World(one_graph=one_graph), Facts(num_blocks=2), then=("train",))
    findings = known.found(FrontierFindings)
    assert findings.chosen.mode.compile == compiled
    assert any(said in note for note in found.notes), found.notes
    assert {form.mode.compile for size in measured_sizes(findings) for form in forms(findings, size, 1)} == {compiled}
    verified = [known.study.trials[name].config.compile for name in fresh(known)]
    assert verified == [compiled, compiled], "the chosen one and the largest, as they are trained"
    probed = {trial.config.compile for trial in known.study.trials.values() if trial.config.dynamic_micro_batch}
    assert probed == {True}, "no search of its own"


@pytest.mark.slow
def test_a_model_as_one_graph_that_does_not_fit_in_a_fresh_process_gives_way_to_its_blocks() -> None:
    """It is the fastest and takes more memory, and at larger sizes it does not fit where the blocks do."""
    refused = World(
        one_graph=(1.2, 1.0), more_memory=lambda p: 90.0 * (p.fresh_process and p.config.compile == "whole")
    )
    known, found = played(refused, Facts(num_blocks=2), then=("train",))
    findings = known.found(FrontierFindings)
    assert findings.chosen.point == OperatingPoint(NONE, 18)
    assert findings.taken == {}
    assert {form.mode.compile for size in measured_sizes(findings) for form in forms(findings, size, 1)} == {True}
    assert any("checkpointing none (compiled as one graph) fitted when it was" in note for note in found.notes), (
        found.notes
    )
    edge = World(
        one_graph=(1.2, 1.0),
        more_memory=lambda p: (
            90.0 * (p.fresh_process and p.config.compile == "whole" and p.config.micro_batch_size > 18)
        ),
    )
    known, _ = played(edge, Facts(num_blocks=2), then=("train",))
    findings = known.found(FrontierFindings)
    assert (findings.chosen.micro_batch_size, findings.taken) == (18, {"compile": "whole"})
    assert findings.largest.micro_batch_size == 18, "every larger one was refuted as it would be trained"


def test_a_variant_that_does_not_run_is_not_tried_in_every_round() -> None:
    """A model that cannot be compiled whole would be compiled in vain eight times, and a lane with it each time."""
    noisy = random.Random(0)
    world = World(one_graph=(1.2, 9.0), noise=lambda p: noisy.uniform(0.5, 2.0))
    known, found = played(world, Facts(num_blocks=2))
    tried = [name for name, trial in known.study.trials.items() if trial.config.compile == "whole"]
    assert [name.rpartition("-")[2] for name in tried] == ["round1"]
    assert found.ok
    assert max(trial.proposal.round or 0 for trial in known.study.trials.values()) > 3, "the others go on"


def test_of_two_variants_that_pay_the_one_that_pays_more_is_taken() -> None:
    world = World(one_graph=(1.2, 0.8), chunked=(1.1, 0.5))
    _, found = played(world, Facts(num_blocks=2, chunked_cross_entropy=True))
    assert any("the model as one graph pays here: tokens/s 1.20 x" in note for note in found.notes), found.notes
    assert any("in chunks pays less than another point here: tokens/s 1.10 x" in note for note in found.notes)


def test_a_variant_is_told_where_the_point_beside_it_left_no_headroom_when_it_was_timed() -> None:
    """The fastest probe took more as it was timed, so it is no longer among those that may be chosen."""
    world = World(
        one_graph=(0.5, 0.9),
        more_memory=lambda p: (
            4.0 * (p.round is not None and p.config.compile is True and p.config.micro_batch_size == 18)
        ),
        base={"none": 20.0},
        slope={"none": 4.0},
        rate={"none": 1000.0},
    )
    known, found = played(world, Facts(num_blocks=2))
    assert known.found(FrontierFindings).chosen.micro_batch_size < 18
    assert any("the model as one graph does not pay here: tokens/s 0.50 x" in note for note in found.notes)


def test_a_variant_is_as_much_faster_at_every_size_as_where_it_was_timed() -> None:
    """Otherwise the sizes beside the chosen one would seem slow, and none of them be timed."""
    plain, faster = (played(World(one_graph=(speed, 0.8)), Facts(num_blocks=2))[0] for speed in (0.5, 1.25))
    without, taken = plain.found(FrontierFindings), faster.found(FrontierFindings)
    assert (without.taken, taken.taken) == ({}, {"compile": "whole"})
    for size in measured_sizes(without):
        slow, fast = (forms(findings, size, 1)[0].predicted for findings in (without, taken))
        assert fast == pytest.approx(1.25 * slow)


def test_where_the_study_file_lists_both_losses_each_keeps_the_rates_that_were_measured() -> None:
    known, _ = played(World(chunked=(1.05, 0.5)), cross_entropy=["whole", "chunked"])
    findings = known.found(FrontierFindings)
    assert findings.chosen.mode.cross_entropy == "chunked"
    assert findings.taken == {}
    measured = {(point.mode, point.micro_batch_size) for point in findings.measured}
    said = [form for size in measured_sizes(findings) for form in forms(findings, size, 1) if form.is_measured]
    assert {(form.mode, form.split.micro_batch_size) for form in said} <= measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "more"),
    [
        (Facts(num_blocks=0), {}),  # without blocks it is one graph anyway
        (Facts(), {}),  # a study of an earlier version
        (Facts(num_blocks=2), {"compile": [True]}),
        (Facts(num_blocks=2), {"compile": [True, False]}),
    ],
)
def test_one_graph_is_not_tried_where_it_is_no_question(facts: Facts, more: dict[str, Any]) -> None:
    known, found = played(World(one_graph=(2.0, 0.5)), facts, **more)
    assert "whole" not in {trial.config.compile for trial in known.study.trials.values()}
    assert not any("graph" in note for note in found.notes)


def test_one_graph_is_not_tried_of_shards() -> None:
    known = Known(
        {"type": "frontier", "activation_checkpointing": ["none"]}, Facts(num_blocks=2), parallel="fsdp", world_size=2
    )
    assert variants(known.context) == []
    known = Known({"type": "frontier", "activation_checkpointing": ["none"]}, Facts(num_blocks=2), world_size=2)
    assert variants(known.context) == [ONE_GRAPH]


NO_BLOCKS = "left out, as the model has no ModuleList or Sequential of repeated blocks to checkpoint: full (put its layers into one"
DIFFERS = "left out, as a block of the model that is run again on the same input gives something else, and so a wrong gradient: it drifts: full (let"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (Facts(num_blocks=0), NO_BLOCKS),
        (Facts(num_blocks=2, blocks_differ_again="it drifts"), DIFFERS),
        (Facts(num_blocks=2), None),
        (Facts(), None),
    ],
    ids=["no blocks", "blocks that differ", "blocks", "an earlier version did not look"],
)
def test_what_does_not_go_with_the_model_is_not_checkpointed_and_that_is_said(facts: Facts, said: str | None) -> None:
    known, found = played(World(), facts)
    kinds = {trial.config.activation_checkpointing for trial in known.study.trials.values()}
    assert kinds == ({"none", "full"} if said is None else {"none"})
    assert [note[: len(said or "")] for note in found.notes if note.startswith("left out, as")] == (
        [said] if said else []
    )


def test_the_same_journal_gives_the_same_proposals_at_every_point_of_the_stage() -> None:
    known, _ = played(World())
    order = list(known.study.trials)
    again = Known({"type": "frontier", "activation_checkpointing": ["none", "full"]}, memory_limit=f"{LIMIT}MiB")
    for name in order:
        assert name in again.ids()
        World().end(again, next(p for p in again.propose() if p.id == name))
    assert again.ids() == known.ids()


def test_where_nothing_fits_the_limit_and_the_remedy_are_named() -> None:
    known = Known({"type": "frontier", "activation_checkpointing": ["none", "full"]}, memory_limit="30MiB")
    for mode in ("none", "full"):
        known.end(f"frontier-{mode}-m1", "out_of_memory", "x", Cause.OUT_OF_MEMORY)
    found = known.conclude()
    assert not found.ok
    assert found.bad_input
    assert found.reason == (
        "not even micro-batch 1 fits into memory_limit (30 MiB) in any mode; "
        "raise memory_limit, make the model smaller, or add activation_checkpointing modes to the frontier stage"
    )


def test_where_only_the_headroom_does_not_fit_the_least_that_was_measured_is_named() -> None:
    known = Known({"type": "frontier", "activation_checkpointing": ["none"]}, memory_limit="100MiB")
    known.end("frontier-none-m1", tokens_per_second=10.0, peak_memory_bytes=99.0 * MIB)
    assert "the least measured was 99 MiB, and headroom (5%) must stay free" in known.conclude().reason


def test_a_probe_that_failed_is_not_called_out_of_memory() -> None:
    known = Known({"type": "frontier", "activation_checkpointing": ["none"]})
    known.end("frontier-none-m1", "failed", "ArithmeticError: oh", Cause.FAILED)
    assert known.ids() == ["frontier-none-m1"], "no larger one is tried"
    found = known.conclude()
    assert not found.ok
    assert "frontier-none-m1: failed: ArithmeticError: oh" in found.reason
    assert not found.bad_input


def test_every_mode_of_the_product_is_probed() -> None:
    stage = {"type": "frontier", "activation_checkpointing": ["none", 0.5], "compile": [True, False]}
    stage |= {"cross_entropy": ["whole", "chunked"], "seq_len": [64]}
    names = Known(stage).ids()
    assert len(names) == 16
    assert names[:3] == ["frontier-none-m1", "frontier-none-chunked-m1", "frontier-none-eager-m1"]
    assert names[-1] == "frontier-0.5-eager-chunked-T64-m1"
    whole = {"type": "frontier", "activation_checkpointing": ["none"], "compile": ["blocks", "whole"]}
    assert Known(whole).ids() == ["frontier-none-m1", "frontier-none-whole-m1"]


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 29, 64, 100, 1000])
def test_a_ladder_doubles_up_to_the_largest_and_has_the_round_numbers_below_it(largest: int) -> None:
    sizes = ladder(1, largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))
    assert len(sizes) <= largest.bit_length() + 7
    assert {size for size in (28, 96, 992) if 0.9 * largest < size <= largest} <= set(sizes)


@for_every(seed=range(30))
def test_nothing_beats_a_point_of_the_front_and_something_beats_every_other(seed: int) -> None:
    draw = random.Random(seed)
    points = [Point(str(i), draw.uniform(1, 9), draw.uniform(1, 9)) for i in range(draw.randrange(1, 30))]
    front = pareto_front(points)

    def beats(a: Point, b: Point) -> bool:
        return a != b and a.tokens_per_second >= b.tokens_per_second and a.peak_memory_bytes <= b.peak_memory_bytes

    assert {p for p in points if not any(beats(q, p) for q in points)} == set(front)
    assert knee(front) is None or knee(front) in front


def test_the_knee_is_where_more_memory_stops_paying() -> None:
    front = [Point("a", 10.0, 1.0), Point("b", 90.0, 2.0), Point("c", 95.0, 6.0), Point("d", 100.0, 9.0)]
    assert knee(front) == front[1]
    assert knee(front[:2]) is None
    straight = [Point(str(i), 10.0 * i, float(i)) for i in range(1, 5)]
    assert knee(straight) is None
