"""What was measured once is found again by whom it says something, and by nobody else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.messages import Device, FirstLane, HeldLane
from batchscout.orchestrator.study.reuse import Measurements, against_peak, identity, source_digest
from batchscout.orchestrator.study.trial import Hold, Metrics, Proposal, Trial, TrialState
from batchscout.trainers.config import DevicePeak, TrialConfig
from batchscout.trainers.files import StorageLost
from batchscout.trainers.notices import Notice, NoticeKind, heard_by
from tests.support.damage import flipped
from tests.support.lane_player import study_of

IDENTITY = {"device": "a GPU, 80 GB", "torch": "2.13.0"}
METRICS: Metrics = {"tokens_per_second": 1000.0, "peak_memory_bytes": 5e6, "predicted_memory_bytes": 4e6}


def proposal(trial_id: str = "frontier-none-m4", predicted: float = 4e6, **changes: Any) -> Proposal:
    fields = {"model": {"target": "gpt"}, "data": {"target": "python_stdlib"}, "micro_batch_size": 4}
    config = TrialConfig.model_validate(fields | {"learning_rate": 1e-3, "sample_budget": 64} | changes)
    turn = int(trial_id[-1]) if "-round" in trial_id else None
    expected = {"predicted_memory_bytes": predicted}
    return Proposal(trial_id, "frontier", config, candidate=trial_id, round=turn, expected=expected)


def ended(
    state: TrialState = TrialState.COMPLETE,
    cause: Cause | None = None,
    reason: str = "",
    wanted: Proposal | None = None,
) -> Trial:
    return Trial(wanted or proposal(), state=state, cause=cause, reason=reason, metrics={**METRICS})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What a first study left."""
    path = tmp_path / "cache" / "measurements.jsonl"
    Measurements(path, IDENTITY, "/runs/first").remember(ended())
    return path


def test_another_study_finds_it_and_says_where_it_comes_from(file: Path) -> None:
    found = Measurements(file, IDENTITY, "/runs/second").find([proposal()]).get(proposal().id)
    assert found is not None
    assert found.state is TrialState.COMPLETE
    assert found.metrics == METRICS
    assert found.reused.day.startswith("20")
    assert found.reused.run_dir == "/runs/first"


def test_its_utilisation_is_told_against_the_peak_of_the_study_that_takes_it(tmp_path: Path) -> None:
    slow, fast = ({"float32": DevicePeak(flops_per_second=peak, source="measured")} for peak in (1e9, 2e9))
    first = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/first")
    told: Metrics = {**METRICS, "mfu": 0.5, "hfu": 0.6, "assumed_peak_flops": 1e9}
    first.remember(replace(ended(wanted=proposal(device_peaks=slow)), metrics=told))
    wanted = proposal(device_peaks=fast)
    found = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/second").find([wanted])[wanted.id]
    assert found.metrics == {**METRICS, "mfu": 0.25, "hfu": 0.3, "assumed_peak_flops": 2e9}
    assert {"mfu", "hfu"}.isdisjoint(against_peak(told, DevicePeak(flops_per_second=1e8, source="measured"))), "above 1"
    assert against_peak(METRICS, fast["float32"]) == METRICS
    assert against_peak(told, None) == told


def test_a_figure_that_was_found_to_be_disturbed_is_forgotten_until_it_is_measured_again(file: Path) -> None:
    first = Measurements(file, IDENTITY, "/runs/first")
    first.forget(ended())
    assert not Measurements(file, IDENTITY, "/runs/second").find([proposal()])
    Measurements(file, IDENTITY, "/runs/second").remember(ended())
    (found,) = Measurements(file, IDENTITY, "/runs/third").find([proposal()]).values()
    assert found.reused.run_dir == "/runs/second"


def test_why_it_ran_out_of_memory_is_kept(tmp_path: Path) -> None:
    first = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/first")
    first.remember(ended(TrialState.OUT_OF_MEMORY, Cause.OUT_OF_MEMORY, "6 MiB more did not fit"))
    found = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/second").find([proposal()]).get(proposal().id)
    assert found is not None
    assert (found.cause, found.reason) == (Cause.OUT_OF_MEMORY, "6 MiB more did not fit")


def test_the_optimizers_numbers_and_the_seed_change_neither_speed_nor_memory(file: Path) -> None:
    numbers = {"betas": (0.9, 0.998), "weight_decay": 0.3}
    assert Measurements(file, IDENTITY, "/runs/second").find([proposal(learning_rate=1e-2, seed=5, optimizer=numbers)])


@pytest.mark.parametrize(
    "other",
    [
        proposal(micro_batch_size=8),
        proposal(precision="bfloat16"),
        proposal(activation_checkpointing="full"),
        proposal(memory_limit_bytes=10**9),
        proposal(optimizer={"type": "sgd"}),
        proposal(model={"target": "gpt", "kwargs": {"num_layers": 3}}),
        proposal(data={"target": "python_stdlib", "kwargs": {"seq_len": 64}}),
        proposal(trial_id="frontier-none-m4-round2"),
        proposal(predicted=4.1e6),
    ],
    ids=["size", "precision", "mode", "limit", "optimizer", "model", "data", "round", "prediction"],
)
def test_what_decides_on_the_outcome_makes_it_another_measurement(file: Path, other: Proposal) -> None:
    assert Measurements(file, IDENTITY, "/runs/second").find([other]) == {}


@pytest.mark.parametrize("change", [{"device": "a GPU, 40 GB"}, {"torch": "2.12.0"}])
def test_on_another_machine_it_is_measured_again(file: Path, change: dict[str, str]) -> None:
    assert Measurements(file, IDENTITY | change, "/runs/second").find([proposal()]).get(proposal().id) is None


H100, SMALLER = Device("NVIDIA H100", 85 << 30, is_gpu=True), Device("NVIDIA H100", 47 << 30, is_gpu=True)


@pytest.mark.parametrize(
    ("ran_on", "found"), [((), True), ((H100,), True), ((SMALLER,), False), ((H100, SMALLER), False)]
)
def test_a_trial_that_ran_on_another_device_than_the_study_tells_of_leaves_nothing(
    tmp_path: Path, ran_on: tuple[Device, ...], found: bool
) -> None:
    """Of two ranks, one is enough."""
    study = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/first", lane=FirstLane("a GPU", H100))
    study.remember(replace(ended(), holds=(Hold(0.0, 1.0, lane=HeldLane(0, "a", ran_on)),)))
    again = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/second", lane=FirstLane("a GPU", H100))
    assert bool(again.find([proposal()])) == found


def test_ranks_on_several_nodes_measure_something_else_than_ranks_on_one() -> None:
    """What one node measured keeps the identity that it had before there was a choice."""
    config = study_of(world_size=2)
    alone, over_a_network = (identity(config, Facts(), FirstLane("a GPU", H100, nodes), 8) for nodes in (1, 2))
    assert alone != over_a_network
    assert "num_nodes" not in alone
    assert identity(config, Facts(), FirstLane("another GPU", H100), 8) != alone


GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "then", "now", "found"),
    [
        (None, 20 * GIB, 80 * GIB, False),
        (None, 80 * GIB, 20 * GIB, False),
        (None, 80 * GIB, 79 * GIB, True),
        (10 * GIB, 20 * GIB, 80 * GIB, True),
        (40 * GIB, 20 * GIB, 80 * GIB, False),
        (None, None, 80 * GIB, False),
    ],
)
def test_what_was_measured_beside_others_on_a_gpu_tells_nothing_of_it_without_them(
    tmp_path: Path, limit: int | None, then: int | None, now: int, found: bool
) -> None:
    """What fitted into what they left, and what did not. Under a limit that leaves them their part it is the same."""
    wanted = proposal(memory_limit_bytes=limit)
    first = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/x", lane=FirstLane("a GPU", H100, free_bytes=then))
    first.remember(ended(wanted=wanted))
    second = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/y", lane=FirstLane("a GPU", H100, free_bytes=now))
    assert bool(second.find([wanted])) == found


def test_other_cpus_or_other_data_are_another_measurement() -> None:
    config, lane = study_of(), FirstLane("a GPU", H100)
    one = identity(config, Facts(contents={"training data": "ab", "the number of weights": "12"}), lane, 1)
    assert identity(config, Facts(contents={"training data": "ab", "the number of weights": "34"}), lane, 1) == one
    assert identity(config, Facts(contents={"training data": "cd", "the number of weights": "12"}), lane, 1) != one
    assert identity(config, Facts(contents={"training data": "ab", "the number of weights": "12"}), lane, 8) != one


def test_measuring_again_takes_nothing(file: Path) -> None:
    assert Measurements(file, IDENTITY, "/runs/second", remeasure=True).find([proposal()]).get(proposal().id) is None


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (TrialState.FAILED, Cause.FAILED),
        (TrialState.WAITING, None),
        (TrialState.PRUNED, Cause.DIVERGED),
        (TrialState.OUT_OF_MEMORY, Cause.HOST_MEMORY),
    ],
)
def test_what_would_end_otherwise_another_day_is_not_kept(
    tmp_path: Path, state: TrialState, cause: Cause | None
) -> None:
    Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/first").remember(ended(state, cause))
    assert Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/second").find([proposal()]).get(proposal().id) is None


def test_timings_in_turns_stand_together_and_come_from_one_study(tmp_path: Path) -> None:
    names = [f"frontier-{mode}-m4-round{turn}" for turn in (1, 2) for mode in ("none", "full")]

    def remember(run_dir: str, *names: str, began: float = 1.0) -> None:
        study = Measurements(tmp_path / "m.jsonl", IDENTITY, run_dir, began=began)
        for name in names:
            study.remember(ended(wanted=proposal(name)))

    def found() -> set[str]:
        study = Measurements(tmp_path / "m.jsonl", IDENTITY, "/runs/third")
        return set(study.find([proposal(), *(proposal(name) for name in names)]))

    remember("/runs/first", proposal().id, *names[:3])
    assert found() == {proposal().id}
    remember("/runs/second", names[3])
    assert found() == {proposal().id}
    remember("/runs/second", *names)
    assert found() == {proposal().id, *names}
    remember("/runs/second", names[0], began=2.0)
    assert found() == {proposal().id}, "of another study in the same place, whose machine may have been busy"


def opened(file: Path) -> tuple[Measurements, list[Notice]]:
    met = list[Notice]()
    with heard_by(met.append):
        return Measurements(file, IDENTITY, "/runs/second"), met


def test_a_line_that_was_cut_off_costs_that_measurement_alone(file: Path) -> None:
    """It is said once another has been written after it: until then it may be one that is being written."""
    with file.open("a") as stream:
        stream.write('{"key": "ab')
    known, met = opened(file)
    assert known.find([proposal()])
    assert met == []
    known.remember(ended(wanted=proposal("frontier-none-m8")))
    known, met = opened(file)
    assert known.find([proposal()])
    assert known.find([proposal("frontier-none-m8")])
    (notice,) = met
    assert notice.kind is NoticeKind.DAMAGED_MEASUREMENT
    assert f"{file} has 1 damaged line of 3 (the first is line 2)" in notice.text


def test_no_flipped_bit_is_taken_for_what_was_measured(file: Path) -> None:
    """A bit of each byte of a line, the checksum's own included: it is never used, and always said."""
    line = file.read_bytes()
    for place in range(len(line) - 1):  # all but its end, without which it may be one that is being written
        file.write_bytes(damaged := flipped(line, 8 * place + place % 8))
        known, met = opened(file)
        assert known.find([proposal()]) == {}, damaged
        assert [notice.kind for notice in met] == [NoticeKind.DAMAGED_MEASUREMENT], damaged


def test_the_newest_of_two_counts(file: Path) -> None:
    Measurements(file, IDENTITY, "/runs/second", remeasure=True).remember(
        ended(TrialState.OUT_OF_MEMORY, Cause.OUT_OF_MEMORY, "x")
    )
    found = Measurements(file, IDENTITY, "/runs/third").find([proposal()]).get(proposal().id)
    assert found is not None
    assert found.state is TrialState.OUT_OF_MEMORY


def test_a_changed_line_of_the_users_source_makes_another_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "measured_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("width = 1\n")
    config = study_of(model={"target": "measured_package.model:Model"})
    before = identity(config, Facts(), FirstLane("a GPU"), 8)
    assert identity(config, Facts(), FirstLane("a GPU"), 8) == before
    (package / "layers.py").write_text("width = 2\n")
    assert identity(config, Facts(), FirstLane("a GPU"), 8) != before


def test_a_single_module_counts_and_one_that_is_nowhere_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "measured_module.py").write_text("width = 1\n")
    before = source_digest(["measured_module:Model"])
    (tmp_path / "measured_module.py").write_text("width = 2\n")
    assert source_digest(["measured_module:Model"]) != before
    assert source_digest(["no_such_module:Model"]) == source_digest(["gpt"])


def test_a_directory_in_its_place_is_named_as_what_could_not_be_read(tmp_path: Path) -> None:
    """A traceback would not say what to move out of the way."""
    (file := tmp_path / "measurements.jsonl").mkdir()
    with pytest.raises(StorageLost, match=rf"^{re.escape(str(file))} could not be read: Is a directory$"):
        opened(file)
