"""A snapshot measures what it says, costs what it may, and leaves the run as it was."""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from batchscout.trainers import step_log
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.batches import leaves
from batchscout.trainers.loop import train
from batchscout.trainers.noise.noise_curve import NOISE_CURVE_FILE, NoiseSnapshot, add_to_noise_curve, read_noise_curve
from batchscout.trainers.noise.noise_estimate import SquaredNorms, estimate_noise
from batchscout.trainers.noise.step_statistics import adam_snr_of
from batchscout.trainers.notices import NoticeKind
from batchscout.trainers.report import Answer, Report
from batchscout.trainers.reporting import noise_snapshot, reporter
from batchscout.trainers.reporting.noise_snapshot import (
    FEWEST_WINDOWS,
    SHARE_OF_TRAINING,
    Windows,
    take_snapshot,
    windows_of,
)
from batchscout.trainers.run import Run
from batchscout.trainers.speed import throughput
from tests.support.every import for_every
from tests.support.gradients import known_windows
from tests.support.ranks import on_two_ranks
from tests.support.run_curves import steps_taken
from tests.support.tiny import config, cpu_run, newest_state, train_until_killed

# 200 samples in micro-batches of 1 allow 10 of them: five pairs.
SHORT: dict[str, Any] = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "sample_budget": 400,
    "evaluations": (300, 400),
    "padded": True,
}
BATCH_NORM = {"model": {"target": "tests.support.studies:BatchNormModel"}, "padded": False}


def parts_of(state: dict[str, Any]) -> dict[str, Any]:
    """What the end of a run is made of, tensors by their names."""
    optimizer = state["optimizer"]["state"]
    moments = {f"{place} {key}": value for place, each in optimizer.items() for key, value in each.items()}
    random = {f"random {rank}": one["cpu"] for rank, one in enumerate(state["random"])}
    return {**state["model"], **moments, **random}


def final_state(trial: TrialConfig, directory: Path) -> tuple[dict[str, Any], list[NoiseSnapshot]]:
    assert train(trial, lambda report: Answer.GO_ON, directory) is Answer.GO_ON
    state = newest_state(directory / "checkpoints")
    return state, read_noise_curve(directory / NOISE_CURVE_FILE)


def assert_no_trace(trial: TrialConfig, directory: Path) -> None:
    """The run ends bit by bit as without its snapshots."""
    without = trial.model_copy(update={"noise_snapshots": ()})
    state, curve = final_state(trial, directory / "with")
    expected, none = final_state(without, directory / "without")
    assert [one.samples_seen for one in curve] == list(trial.noise_snapshots)
    assert none == []
    found, before = parts_of(state), parts_of(expected)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[key], before[key]) for key in found)
    assert state["num_steps"] == expected["num_steps"]
    assert repr(state["noise_steps"]) == repr(expected["noise_steps"]), (
        "which are not a number for steps without targets"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"dropout": 0.2}, BATCH_NORM, {"precision": "float16"}, {"optimizer": {"type": "sgd"}}], ids=str
)
def test_a_run_with_snapshots_ends_bit_by_bit_as_one_without(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert_no_trace(config(**(SHORT | changes), noise_snapshots=(200, 400)), tmp_path)


def no_trace_on_two_ranks(directory: str, changes: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    trial = config(**(SHORT | {"gradient_accumulation_steps": 5, "padded": False} | changes), world_size=2)
    if rank == 0:
        assert_no_trace(trial, Path(directory))
        return
    for name, snapshots in (("with", trial.noise_snapshots), ("without", ())):
        part = trial.model_copy(update={"noise_snapshots": snapshots})
        assert train(part, lambda report: Answer.GO_ON, Path(directory) / name) is Answer.GO_ON


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2, "noise_snapshots": (400,)},
        {**BATCH_NORM, "noise_snapshots": (400,)},
        {"parallel": "fsdp", "noise_snapshots": (400,)},
    ],
    ids=str,
)
def test_nor_do_several_ranks_find_a_trace(tmp_path: Path, changes: dict[str, Any]) -> None:
    on_two_ranks(
        no_trace_on_two_ranks, tmp_path, str(tmp_path), {"sample_budget": 440, "evaluations": (440,)} | changes
    )


def run_of(**changes: Any) -> Run:
    """A run that has trained on 960 samples in steps of 24: its snapshot may take 48 of them. Weights hardly move, so that
    they are the same for every split."""
    fields = {
        "padded": True, "micro_batch_size": 4, "gradient_accumulation_steps": 6, "sample_budget": 960,
        "noise_snapshots": (960,),
    }  # fmt: skip
    run = cpu_run(config(**(fields | changes), learning_rate=1e-6))
    while run.samples_seen < 960:
        run.step()
    run.read()
    return run


def seen_by(run: Run) -> tuple[NoiseSnapshot, list[Any]]:
    """(the snapshot, this rank's micro-batches in it)"""
    batches: list[Any] = []
    hook = run.module.register_forward_pre_hook(lambda module, args: batches.append(args[0]))
    found = take_snapshot(run)
    hook.remove()
    assert found is not None
    return found, batches


def gradient_of(run: Run, batch: Any) -> tuple[Tensor, int]:
    """The mean gradient of a micro-batch, and its number of targets."""
    loss_sum, num_targets = run.module(batch)
    gradients = torch.autograd.grad(loss_sum / num_targets, run.parameters)
    return torch.cat([gradient.flatten().double() for gradient in gradients]), int(num_targets)


def mean_gradient(micro: list[tuple[Tensor, int]]) -> Tensor:
    return torch.stack([g * n for g, n in micro]).sum(0) / sum(n for _, n in micro)


def norms_of(micro: list[tuple[Tensor, int]]) -> SquaredNorms:
    total = sum(n for _, n in micro)
    mean_square = sum(g.square().sum().item() * n for g, n in micro) / total
    return SquaredNorms(mean_square, mean_gradient(micro).square().sum().item(), total)


def about(found: float | None, expected: float | None) -> bool:
    return found is expected is None or found == pytest.approx(expected, rel=1e-3)


def assert_figures_are_those_of(found: NoiseSnapshot, windows: list[list[tuple[Tensor, int]]]) -> None:
    expected = estimate_noise(map(norms_of, windows), found.micro_batch_size, len(windows[0]))
    assert about(found.noise_scale, expected.noise_scale)
    assert about(found.noise_scale_low, expected.noise_scale_low)
    for row in found.accumulated:
        sums = [window[: row.num_micro_batches] for window in windows]
        mean = torch.stack([mean_gradient(micro) for micro in sums])
        of_row = estimate_noise(map(norms_of, sums), found.micro_batch_size, row.num_micro_batches)
        assert row.samples == row.num_micro_batches * found.micro_batch_size
        assert about(row.coherence, of_row.coherence)
        assert about(row.coherence_floor, of_row.coherence_floor)
        assert row.gradient_norm == pytest.approx(mean.square().sum(1).mean().sqrt().item(), rel=1e-4)
        assert row.gradient_mean == pytest.approx(mean.mean().item(), rel=1e-3, abs=1e-9)
        assert row.gradient_variance == pytest.approx(mean.var(dim=1, correction=0).mean().item(), rel=1e-4)
        if expected.noise_scale:
            assert row.gradient_snr == pytest.approx(row.samples / expected.noise_scale, rel=1e-3)
            assert row.adam_snr == pytest.approx(adam_snr_of(row.samples / expected.noise_scale, 0.9), rel=1e-3)


def update_ratio(run: Run, windows: list[list[tuple[Tensor, int]]]) -> float:
    """What a step with each window's gradient would move the weights by, over the weights: the root of the mean square. AdamW's
    way is as long as its learning rate, so it is taken at one at which float32 rounds nothing off."""
    squares = []
    for window in windows:
        module, optimizer = copy.deepcopy((run.module, run.optimizer))
        parameters = [p for p in module.parameters() if p.requires_grad]
        before = torch.nn.utils.parameters_to_vector(parameters).detach().double()
        gradients = mean_gradient(window).float().split([p.numel() for p in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter).clone()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
        after = torch.nn.utils.parameters_to_vector(parameters).detach().double()
        squares.append(((after - before).square().sum() / before.square().sum()).item())
    return math.sqrt(sum(squares) / len(squares)) * run.optimizer.param_groups[0]["lr"] / 0.01


def windows_from(batches: list[Any], size: int) -> list[list[tuple[Tensor, int]]]:
    """The gradients of the micro-batches at the weights of `run_of`, whatever ranks it was split over."""
    run = run_of()
    micro = [gradient_of(run, batch) for batch in batches]
    return [micro[start : start + size] for start in range(0, len(micro), size)]


def test_its_figures_are_those_of_the_explicit_micro_gradients() -> None:
    found, batches = seen_by(run_of())
    assert [row.num_micro_batches for row in found.accumulated] == [1, 2]
    assert found.num_micro_batches == len(batches) >= 10
    windows = windows_from(batches, 2)
    assert_figures_are_those_of(found, windows)
    run = run_of()
    for row in found.accumulated:
        sums = [window[: row.num_micro_batches] for window in windows]
        assert row.update_ratio == pytest.approx(update_ratio(run, sums), rel=1e-3)


def test_a_snapshot_holds_no_more_micro_batches_than_a_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is trained on, and the next one: else a snapshot could need more memory than the run that it is taken of."""
    run, move = run_of(micro_batch_size=1), noise_snapshot.move
    batches: list[weakref.ref[Tensor]] = []
    most_at_once = 0

    def counted(*args: Any) -> Any:
        nonlocal most_at_once
        batch = move(*args)
        batches.append(weakref.ref(next(leaves(batch))))
        most_at_once = max(most_at_once, sum(one() is not None for one in batches))
        return batch

    monkeypatch.setattr(noise_snapshot, "move", counted)
    found = take_snapshot(run)
    assert found is not None
    assert len(found.accumulated) == 4, "sums of up to 8"
    assert most_at_once == 2


def on_a_rank(parallel: str) -> tuple[NoiseSnapshot, list[Any]]:
    return seen_by(run_of(world_size=2, micro_batch_size=2, parallel=parallel))


@pytest.mark.slow
def test_ranks_measure_windows_of_their_own_and_agree_on_what_they_mean(tmp_path: Path) -> None:
    (one, first), (two, second) = on_two_ranks(on_a_rank, tmp_path, "ddp")
    assert one == two
    assert [row.num_micro_batches for row in one.accumulated] == [1, 2, 4]
    assert one.num_micro_batches == len(first) + len(second)
    assert_figures_are_those_of(one, windows_from(first, 4) + windows_from(second, 4))


@pytest.mark.slow
def test_under_fsdp_the_sums_are_those_of_all_ranks(tmp_path: Path) -> None:
    (one, first), (two, second) = on_two_ranks(on_a_rank, tmp_path, "fsdp")
    assert one == two
    assert [row.num_micro_batches for row in one.accumulated] == [2, 4]
    by_turn = [batch for pair in zip(first, second, strict=True) for batch in pair]
    assert_figures_are_those_of(one, windows_from(by_turn, 4))


@pytest.mark.slow
def test_an_unbroken_run_and_one_that_went_on_have_the_same_curve(tmp_path: Path) -> None:
    """Killed after the snapshot at 400, whose report no checkpoint holds."""
    trial = config(**SHORT, rungs=(300,), noise_snapshots=(200, 400))
    _, expected = final_state(trial, tmp_path / "unbroken")
    train_until_killed(trial, tmp_path / "killed", 400)
    _, curve = final_state(trial, tmp_path / "killed")
    assert curve == expected
    assert [one.samples_seen for one in curve] == [200, 400]


@pytest.mark.slow
def test_the_next_report_has_the_figures_and_they_stand_until_the_next_snapshot(tmp_path: Path) -> None:
    reports: list[Report] = []
    fields: dict[str, Any] = SHORT | {"evaluations": (100, 300, 400), "noise_snapshots": (200, 400)}
    train(config(**fields), reports.append, tmp_path)
    said = {r.samples_seen: {k: v for k, v in r.metrics.items() if k.startswith("snapshot_")} for r in reports}
    first, second = read_noise_curve(tmp_path / NOISE_CURVE_FILE)
    assert said[100] == {}
    assert said[300] == first.metrics()
    assert said[400] == second.metrics()
    assert (first.metrics()["snapshot_samples_seen"], first.metrics()["snapshot_micro_batches"]) == (200, 10)


def test_a_damaged_curve_ends_no_run_and_is_reported_at_the_next_snapshot(tmp_path: Path) -> None:
    reports: list[Report] = []
    path = tmp_path / NOISE_CURVE_FILE

    def damages(report: Report) -> None:
        reports.append(report)
        if report.samples_seen == 300:
            path.write_bytes(path.read_bytes().replace(b"learning_rate", b"learning_rare"))

    train(config(**SHORT, noise_snapshots=(200, 400)), damages, tmp_path)
    (notice,) = [report.notice for report in reports if report.notice]
    assert notice.kind is NoticeKind.DAMAGED_CURVE
    assert [one.samples_seen for one in read_noise_curve(path)] == [400]


@pytest.mark.slow
def test_no_step_is_lost_to_a_snapshot(tmp_path: Path) -> None:
    """Neither from the reports nor from the file, and the last one's loss is still told where a snapshot ends the run."""
    said: dict[str, list[Report]] = {"with": [], "without": []}
    for name, snapshots in (("with", (200, 400)), ("without", ())):
        train(config(**SHORT, noise_snapshots=snapshots), said[name].append, tmp_path / name)
    found, expected = ([step.loss for report in said[name] for step in report.steps] for name in said)
    assert found == expected
    assert len(found) == 100
    assert said["with"][-1].metrics["final_loss"] == said["without"][-1].metrics["final_loss"] == found[-1]
    files = [steps_taken(tmp_path / name / step_log.FILE_NAME) for name in said]
    assert files[0] == files[1]


def test_a_snapshot_takes_no_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes a second each time it is read, and hours in a snapshot."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    def hours(run: Run) -> NoiseSnapshot | None:
        now[0] += 10_000.0
        return take_snapshot(run)

    monkeypatch.setattr(throughput.time, "perf_counter", clock)
    monkeypatch.setattr(reporter, "take_snapshot", hours)
    reports: list[Report] = []
    trial = config(**SHORT, noise_snapshots=(200, 400))
    train(trial, reports.append, tmp_path)
    assert now[0] > 20_000.0
    readings = 1 + 2 * trial.gradient_accumulation_steps  # at the end of a step, and around each batch
    assert reports[-1].metrics["train_seconds"] == readings * reports[-1].samples_seen / trial.effective_batch_size


@for_every(parallel=["ddp", "fsdp"], world_size=[1, 2, 8], micro_batch_size=[1, 6])
def test_snapshots_cost_at_most_their_share(micro_batch_size: int, world_size: int, parallel: str) -> None:
    if parallel == "fsdp" and world_size == 1:
        return
    counts = (100, 1000, 4000, 5000, 100_000)
    trial = config(
        micro_batch_size=micro_batch_size, world_size=world_size, parallel=parallel, sample_budget=100_000,
        noise_snapshots=counts,
    )  # fmt: skip
    spent = 0
    for count in counts:
        windows = windows_of(trial, count, 1_000_000)
        if windows:
            spent += windows.size * windows.most_rounds * micro_batch_size * world_size
            own = world_size if parallel == "ddp" else 1
            assert windows.first_rounds * own >= FEWEST_WINDOWS
            assert windows.looks()[0] == windows.first_rounds <= windows.looks()[-1] == windows.most_rounds
        assert spent <= SHARE_OF_TRAINING * count
    assert spent >= 0.9 * SHARE_OF_TRAINING * counts[-1]


def test_what_one_snapshot_had_too_little_for_is_left_to_the_next() -> None:
    def largest(*counts: int) -> Windows | None:
        return windows_of(config(sample_budget=4000, noise_snapshots=counts), counts[-1], 10_000)

    assert largest(400) is None  # 5 micro-batches of 4
    assert largest(400, 800) == Windows(size=2, first_rounds=5, most_rounds=5)
    assert largest(800, 1200) is None
    assert largest(4000) == Windows(size=8, first_rounds=5, most_rounds=6)
    assert windows_of(config(sample_budget=4000, noise_snapshots=(4000,)), 4000, 64) == Windows(2, 5, 8)


@pytest.mark.slow
def test_looking_at_the_interval_more_than_once_does_not_spoil_it() -> None:
    """Windows of 16 are added until the noise scale is bounded, or there may be no more."""
    looks = Windows(size=16, first_rounds=5, most_rounds=40).looks()
    assert looks == [5, 10, 20, 40]
    for noise_scale in (10.0, 200.0, 1000.0, 5000.0):
        covered = 0
        for steps in known_windows(
            0, noise_scale=noise_scale, micro_batch_size=4, num_micro_batches=16, num_steps=40, num_windows=200
        ):
            estimates = [estimate_noise(steps[:look], 4, 16) for look in looks]
            last = next((one for one in estimates if one.noise_scale_high is not None), estimates[-1])
            covered += (last.noise_scale_low or 0) <= noise_scale <= (last.noise_scale_high or math.inf)
        assert covered >= 180


def test_snapshots_without_statistics_are_refused() -> None:
    with pytest.raises(ValidationError, match="noise_snapshots has 2 sample counts, but statistics is false; set"):
        config(statistics=False, noise_snapshots=(8, 16))


def test_a_curve_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / NOISE_CURVE_FILE
    assert read_noise_curve(path) == []
    found, _ = seen_by(run_of())
    later = dataclasses.replace(found, samples_seen=found.samples_seen + 24)
    add_to_noise_curve(path, found)
    add_to_noise_curve(path, later)
    assert read_noise_curve(path) == [found, later]
    add_to_noise_curve(path, found)
    assert read_noise_curve(path) == [found]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_run_compiles_nothing_more_for_its_snapshots() -> None:
    run = run_of(compile=True, padded=False)
    before = dict(torch._dynamo.utils.counters["stats"])
    assert before["unique_graphs"]
    assert take_snapshot(run) is not None
    assert dict(torch._dynamo.utils.counters["stats"]) == before
