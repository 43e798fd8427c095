"""Steps cut by tokens in a run: the gradient of the whole step, the same samples for every split and rank, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.utils import counters

from batchscout.trainers.before.compilation import warm_up
from batchscout.trainers.config import MicroBatch, TrialConfig
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.micro_batches import check_tokens, lengths_of
from batchscout.trainers.loop import train
from batchscout.trainers.model.models import initial_module
from batchscout.trainers.noise.noise_curve import read_noise_curve
from tests.support.ranks import on_two_ranks
from tests.support.tiny import (
    Samples,
    assert_equal_bit_by_bit,
    config,
    cpu_run,
    data,
    gradient_of_step,
    newest_state,
    relative_error,
    sample_numbers,
    stop_at,
)

BATCH = 16
SPLITS = [(16, 1), (4, 4), (1, 16)]
TWO_RANKS = [(8, 1), (2, 4), (1, 8)]


class Uneven(Samples):
    """Samples of 1 to 12 tokens, most of them short; a batch is padded to its longest."""

    lengths: list[int]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        longest = max(self.lengths[index] for index in indices)
        return [self._padded(index, longest) for index in indices]

    def _padded(self, index: int, longest: int) -> dict[str, Tensor]:
        sample, length = {key: value[:longest].clone() for key, value in self[index].items()}, self.lengths[index]
        sample["targets"][length:] = -100
        return sample


def uneven(shortest: int = 1) -> tuple[Uneven, Uneven]:
    sets = []
    for samples in data():
        found = Uneven(samples)
        found.vocab_size, found.seq_len = samples.vocab_size, samples.seq_len
        random = torch.Generator().manual_seed(4)
        lengths = 1 + 11 * torch.rand(len(samples), generator=random, dtype=torch.float64) ** 3
        found.lengths = lengths.round().int().clamp(min=shortest).tolist()
        found.lengths[5] = 12
        sets.append(found)
    return sets[0], sets[1]


def by_tokens(micro_batch_size: int, accumulation: int, world_size: int = 1, **changes: Any) -> TrialConfig:
    fields: dict[str, Any] = {
        "data": {"target": "tests.trainers.data.test_micro_batches:uneven"},
        "optimizer": {"max_gradient_norm": None},
        "micro_batch": {},
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "world_size": world_size,
    }
    return config(**fields | changes)


def whole_gradient(trial: TrialConfig) -> Tensor:
    """Of the mean loss over all targets of the first step, in one piece, without any code of ours but the model."""
    run = cpu_run(trial.model_copy(update={"world_size": 1}))
    module = initial_module(trial, run.train_set).double()
    loss_sum, num_targets = module(fetch(run.first_samples, run.order.indices(range(BATCH))))
    gradients = torch.autograd.grad(loss_sum / num_targets, list(module.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("shape", SPLITS)
def test_the_gradient_is_that_of_the_whole_step(shape: tuple[int, int]) -> None:
    trial = by_tokens(*shape)
    assert relative_error(gradient_of_step(cpu_run(trial)), whole_gradient(trial)) <= 1e-6


def two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {"gradients": {}, "targets": {}, "samples": {}, "sizes": {}}
    for shape in TWO_RANKS:
        for parallel in ("ddp", "fsdp"):
            run = cpu_run(by_tokens(*shape, world_size=2, parallel=parallel))
            plan = run.plan_of_step(0, run.config.split)
            found["gradients"][parallel, shape] = gradient_of_step(run)
            mine = [index for indices in plan.micro_batches for index in indices]
            found["samples"][shape], found["sizes"][shape] = mine, [len(indices) for indices in plan.micro_batches]
            found["targets"][shape] = sum(uneven()[0].lengths[index] for index in mine)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_ranks(two_ranks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("shape", TWO_RANKS)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_gradient_is_that_of_the_whole_step_on_two_ranks_with_uneven_counts(
    ranks: list[dict[str, Any]], parallel: str, shape: tuple[int, int]
) -> None:
    for rank in ranks:
        assert relative_error(rank["gradients"][parallel, shape], whole_gradient(by_tokens(*shape))) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("shape", TWO_RANKS)
def test_two_ranks_share_the_samples_of_the_step_and_have_uneven_targets(
    ranks: list[dict[str, Any]], shape: tuple[int, int]
) -> None:
    run = cpu_run(by_tokens(16, 1))
    together = ranks[0]["samples"][shape] + ranks[1]["samples"][shape]
    assert sorted(together) == sorted(run.order.indices(range(BATCH)))
    assert len(ranks[0]["sizes"][shape]) == len(ranks[1]["sizes"][shape])
    assert ranks[0]["targets"][shape] != ranks[1]["targets"][shape]


def test_every_split_takes_the_same_samples_in_a_step_and_no_more_micro_batches_than_it_says() -> None:
    seen = []
    for shape in SPLITS:
        run = cpu_run(by_tokens(*shape))
        run.module.register_forward_pre_hook(lambda module, args, run=run: _within(run, args[0]["input_ids"]))
        taken = sample_numbers(run)
        for _ in range(4):
            run.step()
        run.read()
        seen.append([sorted(taken[start : start + BATCH]) for start in range(0, 4 * BATCH, BATCH)])
        assert 1 <= run.metrics()["micro_batches_per_step"] <= shape[1]
    assert seen[0] == seen[1] == seen[2] == [list(range(start, start + BATCH)) for start in range(0, 64, BATCH)]


def _within(run: Any, input_ids: Tensor) -> None:
    assert input_ids.numel() <= run.config.micro_batch_size * 12


def test_a_run_tells_its_micro_batches_tokens_and_padding() -> None:
    run, batches = cpu_run(by_tokens(2, 8)), []
    run.module.register_forward_pre_hook(lambda module, args: batches.append(args[0]["input_ids"].shape))
    indices = run.order.indices(range(2 * BATCH))
    for _ in range(2):
        run.step()
    run.read()
    padded = sum(shape.numel() for shape in batches)
    tokens = sum(uneven()[0].lengths[index] for index in indices)
    metrics = run.metrics()
    assert metrics["micro_batches_per_step"] == len(batches) / 2 < 8
    assert metrics["tokens_per_step"] == tokens / 2
    assert metrics["padding_share"] == pytest.approx(1 - tokens / padded)


def test_a_run_that_was_stopped_goes_on_bit_by_bit_and_goes_on_counting(tmp_path: Path) -> None:
    trial = by_tokens(2, 4, rungs=(24,), evaluations=(64,), evaluation_samples=0)
    ended: dict[str, dict[str, float]] = {}

    def end_of(name: str) -> Any:
        return lambda said: ended.update({name: said.metrics}) if said.kind == "end" else None

    train(trial, end_of("whole"), tmp_path / "whole")
    train(trial, stop_at(24), tmp_path / "parts")
    train(trial, end_of("parts"), tmp_path / "parts")
    states = [newest_state(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert_equal_bit_by_bit(*states)
    assert states[0]["tokens"] == states[1]["tokens"]
    for key in ("micro_batches_per_step", "tokens_per_step", "padding_share"):
        assert ended["whole"][key] == ended["parts"][key]


def test_a_run_may_go_on_with_another_cut(tmp_path: Path) -> None:
    train(by_tokens(2, 4, rungs=(32,), micro_batch=None), stop_at(32), tmp_path)
    said = []
    train(by_tokens(1, 8, rungs=(32,)), lambda report: said.append(report), tmp_path)
    assert said[-1].metrics["samples_seen"] == 64
    assert not any(report.notice for report in said)


def test_noise_is_measured_by_snapshots_alone(tmp_path: Path) -> None:
    """Of micro-batches that each hold one length, the moving run would take what lengths make for noise."""
    ends = []
    trial = by_tokens(1, 4, sample_budget=640, noise_snapshots=(480,))
    train(trial, lambda report: ends.append(report.metrics), tmp_path)
    assert "noise_scale" not in ends[-1]
    assert "coherence" not in ends[-1]
    assert ends[-1]["snapshot_micro_batches"] >= 5
    assert len(read_noise_curve(tmp_path / "noise.jsonl")) == 1


def test_the_longest_samples_are_cut_by_count_which_is_the_fullest_micro_batch() -> None:
    run, shapes = cpu_run(by_tokens(4, 2, longest_samples=True)), []
    run.module.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0]["input_ids"].shape)))
    run.step()
    assert [samples for samples, _ in shapes] == [4, 4]
    assert max(samples * length for samples, length in shapes) == 4 * 12


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_what_micro_batches_of_any_size_and_length_need_is_compiled_before_the_first_step() -> None:
    """A sample of a single token is of another kind to the compiler, as a micro-batch of one sample is."""
    torch.compiler.reset()
    here = {"target": "tests.trainers.data.test_micro_batches:uneven", "kwargs": {"shortest": 2}}
    trial = by_tokens(2, 8, compile=True, data=here)
    assert warm_up(trial, torch.device("cpu")) > 0
    run, shapes = cpu_run(trial), set()
    run.module.register_forward_pre_hook(lambda module, args: shapes.add(tuple(args[0]["input_ids"].shape)))
    before = counters["stats"]["unique_graphs"]
    for _ in range(8):
        run.step()
    assert {samples for samples, _ in shapes} >= {1, 2, 3}
    assert counters["stats"]["unique_graphs"] == before > 0


def test_a_sample_that_is_longer_than_the_budget_is_named() -> None:
    expected = "micro_batch.tokens is 8, and sample 5 of the train set has 12; raise it to 12 at least, or shorten such samples"
    with pytest.raises(ValueError, match=expected):
        cpu_run(by_tokens(1, 1, micro_batch={"tokens": 8}))


def test_a_micro_batch_size_that_the_budget_does_not_hold_is_refused_with_the_one_that_it_does() -> None:
    expected = (
        r"micro_batch.tokens is 30, and 4 of the longest samples \(micro_batch_size\) have 48, 12 each; lower "
        "micro_batch_size to 2, or raise micro_batch.tokens"
    )
    with pytest.raises(ValueError, match=expected):
        check_tokens(MicroBatch(tokens=30), 4, uneven()[0])
    assert max(check_tokens(MicroBatch(tokens=30), 2, uneven()[0])) == 12


def test_a_set_must_say_how_long_each_sample_is() -> None:
    with pytest.raises(
        ValueError,
        match=r"does not say how many they have; give it `lengths`, one number for each sample, or",
    ):
        lengths_of(Samples(data()[0]))


@pytest.mark.parametrize("tokens", [0, True, 8192.5, "many"])
def test_a_budget_is_a_number_of_tokens(tokens: object) -> None:
    with pytest.raises(
        ValidationError,
        match="is no number of tokens; write how many a micro-batch may hold, such as 8192, or auto",
    ):
        MicroBatch.model_validate({"tokens": tokens})


def test_rows_of_one_length_are_not_cut_by_tokens() -> None:
    with pytest.raises(
        ValidationError, match=r"data.pack makes rows that all have 16 tokens; leave one of the two out"
    ):
        config(data={"target": "text", "pad": {"labels": -100}, "pack": 16}, micro_batch={})
