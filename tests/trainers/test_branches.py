"""A branch goes on where another run was: as that run did where nothing differs, and over the same samples in any
case."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from batchscout.trainers.checkpoints.checkpoint import load_kept
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer, Report
from tests.support.ranks import on_two_ranks
from tests.support.run_curves import steps_taken
from tests.support.tiny import assert_equal_bit_by_bit, config, cpu_run, newest_state, sample_numbers, stop_at

BUDGET = 96
ONE_SPLIT: dict[str, Any] = {"dropout": 0.0, "gradient_accumulation_steps": 4}
OPTIMIZERS = ["adamw", "sgd"]


def source(**changes: Any) -> TrialConfig:
    """Twelve steps of 8 samples; the checkpoint after the fifth is kept: the first at or past 36 samples."""
    fields: dict[str, Any] = {
        "dropout": 0.2, "padded": True, "gradient_accumulation_steps": 2, "sample_budget": BUDGET, "warmup_samples": 16,
        "evaluations": (BUDGET,), "kept_checkpoints": (36,),
    }  # fmt: skip
    fields |= changes
    return config(**fields)


def branch(of: Path, **changes: Any) -> TrialConfig:
    return source(**({"kept_checkpoints": (), "branch_from": {"directory": str(of), "samples": 36}} | changes))


def final_state(directory: Path) -> dict[str, Any]:
    return newest_state(directory / "checkpoints")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of a finished source, by its optimizer."""
    found = {name: tmp_path_factory.mktemp(name) for name in OPTIMIZERS}
    for name, directory in found.items():
        assert train(source(optimizer={"type": name}), lambda report: None, directory) == Answer.GO_ON
    return found


@pytest.mark.parametrize("stops", [(), (64,)], ids=["in one go", "stopped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_branch_in_which_nothing_differs_ends_bit_by_bit_as_its_source(
    tmp_path: Path, sources: dict[str, Path], optimizer: str, stops: tuple[int, ...]
) -> None:
    trial, report = branch(sources[optimizer], optimizer={"type": optimizer}, rungs=stops), stop_at(*stops)
    while train(trial, report, tmp_path) == Answer.STOP:
        torch.manual_seed(1000)  # what else the process draws is of no consequence
    whole, tail = final_state(sources[optimizer]), final_state(tmp_path)
    assert_equal_bit_by_bit(whole | {"noise_steps": whole["noise_steps"][5:]}, tail)
    steps = steps_taken(sources[optimizer] / "steps.jsonl")
    assert steps_taken(tmp_path / "steps.jsonl") == steps[5:]
    assert [step.samples_seen for step in steps[4:6]] == [40, 48]


def test_a_branch_of_twice_the_batch_takes_the_samples_that_its_source_takes(sources: dict[str, Path]) -> None:
    taken: list[list[int]] = []
    for accumulation in (2, 4):
        run = cpu_run(branch(sources["adamw"], gradient_accumulation_steps=accumulation, learning_rate=0.014))
        run.resume(Path("/nowhere"))
        kept = newest_state(sources["adamw"] / "checkpoints" / "kept")["model"]
        assert all(torch.equal(value, kept[name]) for name, value in run.module.state_dict().items())
        numbers = sample_numbers(run)
        while run.samples_seen < 72:
            run.step()
        taken.append(sorted(numbers))
        assert {step.learning_rate for step in run.read()} == {0.014}
    assert taken == [list(range(40, 72))] * 2


def test_the_settings_of_a_branch_are_its_own_and_the_moments_its_sources(sources: dict[str, Path]) -> None:
    run = cpu_run(branch(sources["adamw"], optimizer={"betas": (0.8, 0.99), "weight_decay": 0.3}))
    run.resume(Path("/nowhere"))
    groups = run.optimizer.param_groups
    assert [(group["betas"], group["weight_decay"]) for group in groups] == [((0.8, 0.99), 0.3), ((0.8, 0.99), 0.0)]
    moments = newest_state(sources["adamw"] / "checkpoints" / "kept")["optimizer"]["state"]
    assert torch.equal(run.optimizer.state[groups[0]["params"][0]]["exp_avg"], moments[0]["exp_avg"])
    assert moments[0]["step"] == 5


def test_a_kept_checkpoint_outlives_newer_ones_and_is_not_taken_for_the_runs_own(tmp_path: Path) -> None:
    trial = source(kept_checkpoints=(16, 36), rungs=(56,))
    told: list[Report] = []
    assert train(trial, stop_at(56), tmp_path) == Answer.STOP
    assert train(trial, told.append, tmp_path) == Answer.GO_ON
    assert [report.samples_seen for report in told] == [56, 96]
    files = sorted(str(path.relative_to(tmp_path / "checkpoints")) for path in tmp_path.rglob("*.pt"))
    assert files == ["000000000096-local.pt", "kept/000000000016.pt", "kept/000000000036.pt"]
    assert [load_kept(tmp_path / "checkpoints", count)["samples_seen"] for count in (16, 36)] == [16, 40]


def test_a_kept_checkpoint_that_was_crossed_with_the_budget_is_there(tmp_path: Path) -> None:
    train(source(kept_checkpoints=(92,), evaluations=()), lambda report: None, tmp_path)
    assert newest_state(tmp_path / "checkpoints" / "kept")["samples_seen"] == 96


def test_a_branch_with_another_seed_takes_other_samples_and_drops_others_out(sources: dict[str, Path]) -> None:
    drawn, indices = [], []
    for seed in (0, 1):
        run = cpu_run(branch(sources["adamw"], seed=seed))
        run.resume(Path("/nowhere"))
        drawn.append(torch.rand(4))
        indices.append(run.order.indices(range(40, 48)))
    assert not torch.equal(drawn[0], drawn[1])
    assert indices[0] != indices[1]


def test_an_average_that_the_source_did_not_have_begins_at_the_branch(sources: dict[str, Path]) -> None:
    run = cpu_run(branch(sources["adamw"], ema_half_life_samples=64))
    run.resume(Path("/nowhere"))
    run.step()
    now = [parameter.detach().clone() for parameter in run.parameters]
    assert run.average is not None
    with run.average.in_place():
        assert all(torch.equal(a, b) for a, b in zip(now, run.parameters, strict=True))


def test_the_initial_weights_of_a_branch_are_those_it_began_with(tmp_path: Path, sources: dict[str, Path]) -> None:
    train(branch(sources["adamw"], save_weights=True), lambda report: None, tmp_path)
    initial = torch.load(tmp_path / "weights.pt", weights_only=True)["initial"]
    kept = newest_state(sources["adamw"] / "checkpoints" / "kept")["model"]
    assert all(torch.equal(value, kept[name]) for name, value in initial.items())


def test_a_branch_goes_on_after_its_study_was_moved(tmp_path: Path, sources: dict[str, Path]) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(sources["adamw"], before / "trunk")
    trial, stop = branch(Path("../trunk"), rungs=(64,)), stop_at(64)
    assert train(trial, stop, before / "branch") == Answer.STOP
    before.rename(after)
    train(trial, stop, after / "branch")
    train(trial, lambda report: None, after / "another")
    ended = [final_state(folder)["model"] for folder in (sources["adamw"], after / "branch", after / "another")]
    assert all(torch.equal(value, state[name]) for state in ended[1:] for name, value in ended[0].items())


def as_ranks(directory: str, of: str) -> Answer:
    return train(branch(Path(of), **ONE_SPLIT, world_size=2, micro_batch_size=2), lambda report: None, Path(directory))


@pytest.mark.slow
def test_two_ranks_branch_together(tmp_path: Path, sources: dict[str, Path]) -> None:
    of = sources["adamw"]
    assert on_two_ranks(as_ranks, tmp_path, str(tmp_path / "two"), str(of)) == [Answer.GO_ON] * 2
    train(branch(of, **ONE_SPLIT), lambda report: None, tmp_path / "one")
    alone = final_state(tmp_path / "one")["model"]
    for name, value in final_state(tmp_path / "two")["model"].items():
        torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_that_was_not_kept_is_named_with_those_that_were(tmp_path: Path, sources: dict[str, Path]) -> None:
    of = sources["adamw"]
    trial = branch(of, branch_from={"directory": str(of), "samples": 64})
    path = re.escape(f"{of}/checkpoints/kept/000000000064.pt")
    expected = (
        rf"there is no {path}: .* no checkpoint at 64 samples; it has kept: 36; .* with 64 in its kept_checkpoints"
    )
    with pytest.raises(ValueError, match=expected):
        train(trial, lambda report: None, tmp_path)


def test_a_damaged_kept_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "kept").mkdir(parents=True)
    (tmp_path / "checkpoints" / "kept" / "000000000036.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(
        ValueError, match=r"kept checkpoint .*/kept/000000000036.pt is damaged \(.*\); run its trial again"
    ):
        cpu_run(branch(tmp_path)).resume(tmp_path / "branch")


def test_a_branch_with_another_optimizer_is_refused_with_both(sources: dict[str, Path]) -> None:
    expected = (
        r"branches at 36 samples, was made with the optimizer adamw, and this run has sgd; a branch must have the"
    )
    with pytest.raises(ValueError, match=expected):
        cpu_run(branch(sources["adamw"], optimizer={"type": "sgd"})).resume(Path("/nowhere"))


def test_a_branch_goes_through_a_journal() -> None:
    for trial in (source(), branch(Path("source"))):
        assert TrialConfig.model_validate_json(trial.model_dump_json()) == trial


def test_branches_at_or_past_the_budget_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValidationError, match=r"kept_checkpoints has 96 samples, .* its sample_budget \(96\); keep an"):
        source(kept_checkpoints=(8, BUDGET))
    with pytest.raises(ValidationError, match=r"begins at 36 samples, and sample_budget \(36\) counts those before"):
        branch(Path("source"), sample_budget=36)
