"""When a run evaluates, saves, reports and stops, and what its reports are made of."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from batchscout.trainers import loop
from batchscout.trainers.loop import milestones, train
from batchscout.trainers.model import activation_checkpointing
from batchscout.trainers.report import Answer, Report
from batchscout.trainers.reporting import reporter
from batchscout.trainers.reporting.evaluation import evaluate
from batchscout.trainers.reporting.reporter import rungs_crossed
from batchscout.trainers.speed.throughput import NUM_WARMUP_STEPS
from tests.support.map_style import map_style
from tests.support.ranks import on_two_ranks
from tests.support.run_curves import steps_taken
from tests.support.tiny import Samples, config, cpu_run, data, gradient_of_step, newest_state, relative_error

Told = tuple[str, int, tuple[int, ...]]
"""(kind, samples seen, rungs) of a report"""


class Listener:
    """Keeps every report; answers "stop" to the first one that `stops` holds for."""

    def __init__(self, stops: Callable[[Report], bool] = lambda report: False) -> None:
        self.reports: list[Report] = []
        self._stops = stops

    def __call__(self, report: Report) -> str:
        stop = self._stops(report) and not any(map(self._stops, self.reports))
        self.reports.append(report)
        return Answer.STOP if stop else Answer.GO_ON

    def told(self) -> list[Told]:
        return [(report.kind, report.samples_seen, report.rungs) for report in self.reports]


@pytest.fixture(autouse=True)
def no_progress_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(reporter, "SECONDS_BETWEEN_PROGRESS_REPORTS", math.inf)


@pytest.fixture
def every_interval(monkeypatch: pytest.MonkeyPatch, no_progress_reports: None) -> None:
    """Progress is reported whenever it is read, however fast the machine is, and it is read often."""
    monkeypatch.setattr(loop, "STEPS_PER_INTERVAL", 5)
    monkeypatch.setattr(reporter, "SECONDS_BETWEEN_PROGRESS_REPORTS", 0.0)


def test_milestones_and_rungs_fall_on_the_first_step_at_or_past_their_number(tmp_path: Path) -> None:
    listener = Listener()
    trial = config(micro_batch_size=8, sample_budget=60, rungs=(16, 33), evaluations=(1, 20))
    assert train(trial, listener, tmp_path) == Answer.GO_ON
    assert listener.told() == [
        ("milestone", 8, ()),  # evaluation at 1
        ("milestone", 16, (16,)),
        ("milestone", 24, ()),  # evaluation at 20
        ("milestone", 40, (33,)),
        ("end", 64, ()),  # the budget of 60
    ]
    assert all({"val_loss", "perplexity"} <= report.metrics.keys() for report in listener.reports)
    assert [len(report.steps) for report in listener.reports] == [1, 1, 1, 2, 3]


def test_rungs_that_one_step_crosses_together_are_told_together(tmp_path: Path) -> None:
    listener = Listener()
    train(config(micro_batch_size=32, sample_budget=96, rungs=(4, 8, 31)), listener, tmp_path)
    assert listener.told() == [("milestone", 32, (4, 8, 31)), ("end", 96, ())]


def test_the_budget_is_the_last_milestone_and_no_rung() -> None:
    trial = config(sample_budget=64, rungs=(16, 64), evaluations=(32,))
    assert milestones(trial, 0) == [16, 32, 64]
    assert milestones(trial, 16) == [32, 64]
    assert milestones(trial, 64) == []
    assert milestones(config(sample_budget=64, evaluations=(80,)), 16) == [64]
    assert rungs_crossed(trial, 0, 16) == (16,)
    assert rungs_crossed(trial, 16, 64) == ()


def test_reports_are_plain_numbers_that_pickle(tmp_path: Path, every_interval: None) -> None:
    listener = Listener()
    train(config(gradient_accumulation_steps=2, rungs=(16,), evaluations=(64,)), listener, tmp_path)
    assert {report.kind for report in listener.reports} == {"progress", "milestone", "end"}
    for report in listener.reports:
        steps = (value for step in report.steps for value in astuple(step))
        assert {type(value) for value in (*report.metrics.values(), *steps)} <= {int, float}
        assert pickle.loads(pickle.dumps(report)) == report
    expected = {
        "samples_seen", "loss", "val_loss", "perplexity", "gradient_norm", "learning_rate", "peak_memory_bytes",
        "coherence", "coherence_floor", "noise_scale_low", "step_seconds", "epoch_seconds", "tokens_per_second",
        "compile_seconds", "train_seconds", "num_batch_norms",
    }  # fmt: skip
    assert expected <= listener.reports[-1].metrics.keys()


def test_every_step_has_its_loss_in_exactly_one_report(tmp_path: Path, every_interval: None) -> None:
    listener, losses = Listener(), []
    trial = config(sample_budget=128, rungs=(20, 72))
    train(trial, listener, tmp_path)
    run = cpu_run(trial)
    for _ in range(32):
        run.step()
        losses.append(run.read()[0].loss)
    assert [step.loss for report in listener.reports for step in report.steps] == losses
    assert listener.reports[-1].metrics["final_loss"] == losses[-1]


def test_the_loss_falls_and_the_validation_loss_with_it(tmp_path: Path) -> None:
    listener = Listener()
    train(config(sample_budget=640, rungs=(64,)), listener, tmp_path)
    first, last = listener.reports[0].metrics, listener.reports[-1].metrics
    assert last["loss"] < first["loss"] - 0.5
    assert last["val_loss"] < first["val_loss"] - 0.5
    assert last["perplexity"] == pytest.approx(math.exp(last["val_loss"]))


def test_a_report_lost_with_the_process_is_told_again(tmp_path: Path) -> None:
    lost = []

    def dies(report: Report) -> None:
        lost.append(report)
        raise KeyboardInterrupt

    trial = config(rungs=(16, 32))
    with pytest.raises(KeyboardInterrupt):
        train(trial, dies, tmp_path)
    listener = Listener()
    assert train(trial, listener, tmp_path) == Answer.GO_ON
    assert listener.told() == [("milestone", 16, (16,)), ("milestone", 32, (32,)), ("end", 64, ())]
    again = listener.reports[0].metrics
    assert {**again, "compile_seconds": 0.0} == {**lost[0].metrics, "compile_seconds": 0.0}


def test_an_answer_may_be_given_as_its_text(tmp_path: Path) -> None:
    assert train(config(rungs=(16,)), lambda report: "stop", tmp_path) is Answer.STOP


def test_stop_is_obeyed_when_a_report_is_told_again(tmp_path: Path) -> None:
    trial = config(rungs=(16, 32))
    assert train(trial, lambda report: Answer.STOP, tmp_path) == Answer.STOP
    assert train(trial, lambda report: Answer.STOP, tmp_path) == Answer.STOP
    assert newest_state(tmp_path / "checkpoints")["num_steps"] == 4


def test_a_run_stopped_by_a_progress_report_tells_every_rung(tmp_path: Path, every_interval: None) -> None:
    """Also one that falls on the very step at which progress is due: its checkpoint would be past the rung."""
    listener = Listener(lambda report: report.samples_seen == 5 * 4)
    trial = config(rungs=(18, 40), evaluations=(64,))
    answers = [train(trial, listener, tmp_path)]
    while answers[-1] == Answer.STOP:
        answers.append(train(trial, listener, tmp_path))
    assert len(answers) == 2
    assert sorted({rung for report in listener.reports for rung in report.rungs}) == [18, 40]
    assert listener.reports[-1].kind == "end"


def test_a_finished_run_says_its_end_again_without_a_step(tmp_path: Path) -> None:
    trial = config(rungs=(16,), evaluations=(64,))
    first, second = Listener(), Listener()
    train(trial, first, tmp_path)
    train(trial, second, tmp_path)
    assert second.told() == [("end", 64, ())]
    assert second.reports[0].metrics["val_loss"] == first.reports[-1].metrics["val_loss"]


def test_a_budget_smaller_than_an_effective_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ValidationError, match=r"sample_budget \(31\) is smaller than one effective batch \(32\); raise"
    ):
        config(micro_batch_size=8, gradient_accumulation_steps=4, sample_budget=31)
    config(micro_batch_size=8, gradient_accumulation_steps=4, sample_budget=32)


def test_another_number_of_processes_than_world_size_is_refused(tmp_path: Path) -> None:
    expected = r"world_size is 2, but this trial runs in 1 process; start 2 ranks or set world_size: 1"
    with pytest.raises(ValueError, match=expected):
        train(config(world_size=2), lambda report: None, tmp_path)


class OfLengths(Samples):
    """Samples of two lengths; a batch is padded to its longest."""

    lengths: list[int]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        longest = max(self.lengths[index] for index in indices)
        return [{key: value[:longest] for key, value in self[index].items()} for index in indices]


def of_lengths() -> tuple[OfLengths, OfLengths]:
    sets = []
    for samples in data(num_train=32, num_val=32):
        found = OfLengths(samples)
        found.vocab_size, found.seq_len = samples.vocab_size, samples.seq_len
        found.lengths = [12 if index in (7, 20, 21, 30) else 3 for index in range(len(samples))]
        sets.append(found)
    return sets[0], sets[1]


@pytest.mark.parametrize(("longest", "lengths"), [(True, {12}), (False, {3, 12})])
def test_a_probe_takes_the_longest_samples_in_the_steps_that_are_not_timed_and_in_its_evaluation(
    longest: bool, lengths: set[int]
) -> None:
    trial = config(
        data={"target": "tests.trainers.test_loop:of_lengths"}, micro_batch_size=2, gradient_accumulation_steps=2,
        sample_budget=32, evaluation_samples=4, longest_samples=longest,
    )  # fmt: skip
    run, seen = cpu_run(trial), []
    run.module.register_forward_pre_hook(lambda module, args: seen.append(args[0]["input_ids"].shape[1]))
    for _ in range(NUM_WARMUP_STEPS):
        run.step()
    evaluate(run)
    assert set(seen) == lengths
    for _ in range(5):
        run.step()
    assert set(seen) == {3, 12}, "the others follow"


def of_many_lengths() -> tuple[OfLengths, OfLengths]:
    sets = of_lengths()
    for samples in sets:
        samples.lengths = [2 + index % 11 for index in range(len(samples))]
    return sets


@pytest.mark.first
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_run_takes_every_length_with_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpointing, "RECOMPILE_LIMIT", 4)
    monkeypatch.setitem(counters["frames"], "ok", 0)  # whatever other tests have compiled
    trial = config(data={"target": "tests.trainers.test_loop:of_many_lengths"}, micro_batch_size=1, compile=True)
    run = cpu_run(trial, steps=12)
    assert all(math.isfinite(step.loss) for step in run.read())


def no_targets() -> tuple[Samples, Samples]:
    train_set, val_set = data(num_train=8)
    for sample in train_set[4:]:
        sample["targets"].fill_(-100)
    return train_set, val_set


def test_a_step_whose_labels_are_all_masked_is_an_error_that_says_so(tmp_path: Path) -> None:
    trial = config(micro_batch_size=1, sample_budget=8, data={"target": "tests.trainers.test_loop:no_targets"})
    with pytest.raises(ValueError, match=r"had no targets: .* \(effective batch 1\); leave such samples out"):
        train(trial, Listener(), tmp_path)


def test_evaluation_is_the_mean_over_all_validation_targets_whatever_the_micro_batch_size() -> None:
    losses = []
    for micro_batch_size in (1, 3, 16):
        run = cpu_run(config(padded=True, dropout=0.5, micro_batch_size=micro_batch_size))
        losses.append(evaluate(run)["val_loss"])
        assert run.module.training
    run.module.eval()
    val_set = map_style(run.val_set)
    stacked = {key: torch.stack([sample[key] for sample in val_set]) for key in val_set[0]}
    with torch.no_grad():
        loss_sum, num_targets = run.module(stacked)
    assert losses == pytest.approx([(loss_sum / num_targets).item()] * 3, rel=1e-6)


def test_validation_samples_without_targets_are_an_error_that_says_so() -> None:
    run = cpu_run(config(data={"target": "tests.support.tiny:data", "kwargs": {"num_val": 3}}))
    for sample in map_style(run.val_set):
        sample["targets"][:] = -100
    with pytest.raises(ValueError, match="none of the 3 validation samples has a target"):
        evaluate(run)


def test_without_evaluation_samples_nothing_is_evaluated(tmp_path: Path) -> None:
    listener = Listener()
    train(config(evaluation_samples=0, rungs=(16,)), listener, tmp_path)
    assert not any("val_loss" in report.metrics for report in listener.reports)


def stopped_and_not(directory: str) -> list[tuple[float, float, bool]]:
    """Of a sharded run: (val loss at its end, that of a run stopped and resumed, whether the weights are equal)."""
    averaged = {"activation_checkpointing": "full", "ema_half_life_samples": 16}
    several: list[dict[str, Any]] = [{}, averaged, {"optimizer": {"type": "sgd"}}]
    found = []
    for changes in several:
        trial = config(
            padded=True, micro_batch_size=2, gradient_accumulation_steps=2, world_size=2, parallel="fsdp",
            sample_budget=48, evaluations=(24,), evaluation_samples=7, save_weights=True, **changes,
        )  # fmt: skip
        folder = Path(directory) / f"run{len(found)}"
        whole, parts = Listener(), Listener(lambda report: report.kind == "milestone")
        assert train(trial, whole, folder / "whole") == Answer.GO_ON
        assert train(trial, parts, folder / "parts") == Answer.STOP
        assert train(trial, parts, folder / "parts") == Answer.GO_ON
        ends = [torch.load(folder / name / "weights.pt")["final"] for name in ("whole", "parts")]
        equal = all(ends[0][name].equal(ends[1][name]) for name in ends[0])
        found.append([*(one.reports[-1].metrics["val_loss"] for one in (whole, parts) if one.reports), equal])
    return found


@pytest.mark.slow
def test_a_sharded_run_that_is_stopped_and_resumed_is_bitwise_the_run_that_was_not(tmp_path: Path) -> None:
    """With an uneven number of evaluation samples: a rank that has none left still takes part."""
    main, other = on_two_ranks(stopped_and_not, tmp_path, str(tmp_path))
    for whole, parts, equal in main:
        assert whole == parts
        assert equal
    assert other == 3 * [[True]], "rank 0 alone reports"


def sharded_after_an_evaluation() -> bool:
    run = cpu_run(config(world_size=2, parallel="fsdp", ema_half_life_samples=16), steps=1)
    evaluate(run)
    return all(isinstance(parameter, DTensor) for parameter in run.module.parameters())


@pytest.mark.slow
def test_an_evaluation_leaves_the_shards_as_they_were(tmp_path: Path) -> None:
    assert on_two_ranks(sharded_after_an_evaluation, tmp_path) == [True, True]


def of_two_ranks(directory: str) -> tuple[list[Answer], list[Told]]:
    """A run that is stopped at a rung and goes on; (answers, reports) of this rank."""
    trial = config(padded=True, dropout=0.1, micro_batch_size=2, world_size=2, rungs=(16,), evaluations=(64,))
    listener = Listener(lambda report: bool(report.rungs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter, "SECONDS_BETWEEN_PROGRESS_REPORTS", math.inf)
        answers = [train(trial, listener, Path(directory) / "parts") for _ in range(2)]
        train(trial, lambda report: None, Path(directory) / "whole")
    return answers, listener.told()


@pytest.mark.first
@pytest.mark.slow
def test_two_ranks_stop_and_go_on_together_and_rank_0_alone_reports(tmp_path: Path) -> None:
    (answers, told), others = on_two_ranks(of_two_ranks, tmp_path, str(tmp_path))
    assert answers == [Answer.STOP, Answer.GO_ON]
    assert told == [("milestone", 16, (16,)), ("milestone", 16, (16,)), ("end", 64, ())]
    assert others == ([Answer.STOP, Answer.GO_ON], [])
    parts, whole = (newest_state(tmp_path / name / "checkpoints") for name in ("parts", "whole"))
    assert all(torch.equal(parts["model"][name], whole["model"][name]) for name in whole["model"])
    assert not torch.equal(whole["random"][0]["cpu"], whole["random"][1]["cpu"])  # dropout differs between ranks
    steps = steps_taken(tmp_path / "parts" / "steps.jsonl")
    assert [step.number for step in steps] == list(range(1, 17))
    assert steps == steps_taken(tmp_path / "whole" / "steps.jsonl")


@pytest.mark.first
@pytest.mark.slow
def test_bfloat16_trains_and_its_first_gradient_is_near_that_of_float32(tmp_path: Path) -> None:
    listener = Listener()
    train(config(precision="bfloat16", sample_budget=640, rungs=(64,)), listener, tmp_path)
    first, last = listener.reports[0].metrics, listener.reports[-1].metrics
    assert last["val_loss"] < first["val_loss"] - 0.5
    exact, rounded = (gradient(precision) for precision in ("float32", "bfloat16"))
    assert 1e-4 < relative_error(rounded, exact) < 0.05


@pytest.mark.first
@pytest.mark.slow
def test_float16_trains_with_its_scaler_on_a_cpu(tmp_path: Path) -> None:
    listener = Listener()
    train(config(precision="float16", sample_budget=640, rungs=(64,)), listener, tmp_path)
    first, last = listener.reports[0].metrics, listener.reports[-1].metrics
    assert last["val_loss"] < first["val_loss"] - 0.5
    assert relative_error(gradient("float16"), gradient("float32")) < 0.01


def gradient(precision: str) -> torch.Tensor:
    return gradient_of_step(cpu_run(config(precision=precision, optimizer={"max_gradient_norm": None})))


def of_pixels() -> tuple[Any, Any]:
    """A target in each pixel, and nothing that says how many there are."""
    images = torch.randn(8, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    rows = [{"input": image, "targets": (image[..., 0] > 0).long()} for image in images]
    return rows, rows[:1]


class OfPixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.head(batch["input"])
        loss_sum = nn.functional.cross_entropy(logits.flatten(0, 2), batch["targets"].flatten(), reduction="sum")
        return loss_sum, torch.tensor(batch["targets"].numel())


LONG: dict[str, Any] = {
    "data": {"target": "tests.support.tiny:data", "kwargs": {"num_train": 8, "num_val": 1, "seq_len": 1024}}
}
DENSE: dict[str, Any] = {"data": {"target": f"{__name__}:of_pixels"}, "model": {"target": f"{__name__}:OfPixels"}}


@pytest.mark.parametrize("of_many_targets", [LONG, DENSE], ids=["long", "dense"])
def test_float16_skips_no_step_at_the_start_however_many_targets_a_sample_has(of_many_targets: dict[str, Any]) -> None:
    run = cpu_run(config(precision="float16", **of_many_targets))
    before = [p.detach().clone() for p in run.parameters]
    run.step()
    run.read()
    assert not any(torch.equal(p, old) for p, old in zip(run.parameters, before, strict=True))
    assert run.metrics()["loss_scale"] == 2.0**16


def test_an_overflow_in_float16_skips_the_update_and_lowers_the_scale() -> None:
    run = cpu_run(config(precision="float16"), steps=1)
    before, scale = [p.detach().clone() for p in run.parameters], run.scaler.get_scale()
    handle = run.parameters[0].register_hook(lambda gradient: gradient * math.inf)
    run.step()
    handle.remove()
    assert all(torch.equal(p, old) for p, old in zip(run.parameters, before, strict=True))
    assert run.scaler.get_scale() == scale / 2
    run.step()
    assert not any(torch.equal(p, old) for p, old in zip(run.parameters, before, strict=True))
