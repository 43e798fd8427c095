"""What a model returns is checked before a run can go wrong over it, and said in the user's words."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.draws import drawing_on_device_from
from batchscout.trainers.errors import LossFault
from batchscout.trainers.loop import train
from batchscout.trainers.model import adding_up
from batchscout.trainers.model.adding_up import check_sum, loss_of_parts
from batchscout.trainers.model.contract import check_first_loss, check_loss, fake_batch
from batchscout.trainers.run import Run
from batchscout.trainers.step.accumulation import over_all_ranks
from tests.support.tiny import config, cpu_run

REMEDY = "return (loss_sum, num_targets): the summed loss and the number of targets it sums over, both scalar tensors"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.tensor(1.0), "the model returned a Tensor; "),
        ((torch.tensor(1.0),), "the model returned a tuple; "),
        ([torch.tensor(1.0), torch.tensor(1)], "the model returned a list; "),
        ((torch.ones(2, 3), torch.tensor(6)), "the model's loss_sum is (2, 3), not a scalar tensor; "),
        ((torch.tensor(1.0), 6.0), "the model's num_targets is float, not a scalar tensor; "),
    ],
)
def test_another_return_than_the_contracts_is_refused_with_the_contract(returned: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message + REMEDY)):
        check_loss(returned)


def test_a_count_may_be_a_plain_number_and_stays_exact() -> None:
    count = 2**24 + 1  # no float32 is this number
    loss_sum, num_targets = check_loss((torch.tensor(1.0), count))
    assert (loss_sum.item(), num_targets.item()) == (1.0, count)
    assert over_all_ranks(loss_sum, num_targets)[1].item() == count


class Pair(NamedTuple):
    input_ids: Tensor
    targets: Tensor


def test_a_fake_batch_is_made_of_what_the_samples_are_made_of() -> None:
    sample = {"pair": Pair(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)), "names": ["a"]}
    with FakeTensorMode():
        batch = fake_batch(sample, 4)
    assert isinstance(batch["pair"], Pair)
    assert [tuple(part.shape) for part in batch["pair"]] == [(4, 3), (4,)]
    assert batch["pair"].targets.dtype == torch.long
    assert batch["names"] == ["a"]


def bare_mean(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss_sum, num_targets = module(batch)
    return loss_sum / num_targets


def mean_with_count(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, num_targets = module(batch)
    return loss_sum / num_targets, num_targets


def mean_of_one(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return bare_mean(module, batch), torch.ones(())


def sum_without_count(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, _ = module(batch)
    return loss_sum, torch.tensor(12)


def sum_with_a_small_mean_beside_it(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, num_targets = module(batch)
    return loss_sum + 0.1 * loss_sum.detach() / num_targets, num_targets


def divided_by_nothing(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, num_targets = module(batch)
    return loss_sum * torch.zeros(()).log() * 0.0, num_targets


def with_loss(name: str, **changes: Any) -> TrialConfig:
    return config(loss=f"tests.trainers.model.test_contract:{name}", **changes)


def checked(run: Run) -> None:
    check_sum(run.module, run.loss_function, run.first_samples, run.device)


def test_a_run_refuses_a_model_that_returns_one_value() -> None:
    with pytest.raises(ValueError, match="the model returned a Tensor"):
        cpu_run(with_loss("bare_mean")).step()


@pytest.mark.parametrize("loss", ["mean_with_count", "mean_of_one"])
def test_a_mean_is_told_from_a_sum_before_the_first_step(tmp_path: Path, loss: str) -> None:
    with pytest.raises(ValueError, match=r"for two equal ones: it is a mean, .*\n.*reduction=.sum."):
        train(with_loss(loss, dropout=0.5), lambda report: None, tmp_path)


def test_a_count_that_does_not_count_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"num_targets is 12 for one sample and 12 for two equal ones"):
        checked(cpu_run(with_loss("sum_without_count")))


@pytest.mark.slow
def test_sums_pass_in_every_precision_and_leave_no_trace() -> None:
    settings: list[dict[str, Any]] = [
        {}, {"padded": True}, {"dropout": 0.5}, {"precision": "bfloat16"}, {"precision": "float16"},
    ]  # fmt: skip
    for changes in settings:
        for loss in (None, "tests.trainers.model.test_contract:sum_with_a_small_mean_beside_it"):
            run = cpu_run(config(loss=loss, **changes))
            before = torch.get_rng_state()
            checked(run)
            assert run.module.training
            assert torch.equal(before, torch.get_rng_state())
            assert all(p.grad is None for p in run.parameters)


def test_a_first_loss_that_is_no_number_is_an_error_and_a_later_one_is_not() -> None:
    run = cpu_run(with_loss("divided_by_nothing"))
    checked(run)  # proves nothing, and passes
    run.step()
    with pytest.raises(ValueError, match=r"the loss of the first step is nan, before any weight has moved; look for"):
        run.read()
    check_first_loss(3.0)
    run = cpu_run(config(learning_rate=1e30, optimizer={"max_gradient_norm": None}), steps=4)
    assert not math.isfinite(run.read()[-1].loss)


# What a split does to the loss


def parts(run: Run) -> dict[str, float]:
    return loss_of_parts(run.module, run.loss_function, run.first_samples, range(4), run.device)


@pytest.mark.parametrize("changes", [{}, {"padded": True}, {"dropout": 0.5}, {"precision": "bfloat16"}])
def test_the_losses_of_samples_add_up_to_that_of_all_of_them(changes: dict[str, Any]) -> None:
    found = parts(cpu_run(config(**changes)))
    assert found["parts_loss_ratio"] == pytest.approx(1, abs=1e-5)
    assert found["parts_targets_ratio"] == 1


@pytest.mark.parametrize(
    ("loss", "loss_ratio", "targets_ratio"),
    [("mean_with_count", 4, 1), ("mean_of_one", 4, 4), ("sum_without_count", 1, 4)],
)
def test_those_of_a_mean_do_not(loss: str, loss_ratio: float, targets_ratio: float) -> None:
    found = parts(cpu_run(with_loss(loss)))
    assert found["parts_loss_ratio"] == pytest.approx(loss_ratio, rel=0.05)
    assert found["parts_targets_ratio"] == pytest.approx(targets_ratio)


def test_batch_norm_mixes_samples_in_training_and_not_in_evaluation() -> None:
    run = cpu_run(config(model={"target": "tests.support.studies:BatchNormModel"}), steps=3)
    found = parts(run)
    assert found["parts_loss_ratio"] == pytest.approx(1, abs=1e-5)
    assert abs(found["parts_training_ratio"] - 1) > 1e-4
    assert found["loss_randomness"] == 0


def test_random_numbers_are_seen_wherever_they_are_drawn() -> None:
    """In a layer, in the loss; what is switched off draws none."""
    assert parts(cpu_run(config()))["loss_randomness"] == 0
    assert parts(cpu_run(config(dropout=0.1)))["loss_randomness"] > 1e-5
    assert parts(cpu_run(config(dropout=0.1).model_copy(update={"dropout": False})))["loss_randomness"] == 0
    assert parts(cpu_run(with_loss("with_noise")))["loss_randomness"] > 1e-5


def with_noise(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, num_targets = module(batch)
    return loss_sum * (1 + 0.01 * torch.rand(())), num_targets


def test_measuring_it_leaves_no_trace() -> None:
    run = cpu_run(config(model={"target": "tests.support.studies:BatchNormModel"}), steps=1)
    before = {name: value.clone() for name, value in run.module.state_dict().items()}
    random_state = torch.get_rng_state()
    parts(run)
    assert run.module.training
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in run.module.state_dict().items())


def test_a_run_that_is_asked_to_reports_it_at_its_end(tmp_path: Path) -> None:
    ends: list[dict[str, float]] = []
    asked = config(dropout=0.1, check_parts=True).model_copy(update={"dropout": False})
    train(asked, lambda report: ends.append(report.metrics), tmp_path)
    assert ends[-1]["parts_loss_ratio"] == pytest.approx(1, abs=1e-5)
    assert ends[-1]["loss_randomness"] == 0
    assert ends[-1]["num_dropouts_off"] == 4


# What is random in a loss


class MasksTokens:
    """One sample of 20 tokens, of which each batch has others to foretell, as a collator of masked language modelling has it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(20)

    def collate_fn(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens = torch.stack(samples)
        return tokens, torch.rand(tokens.shape) < 0.15


class OfTokens(nn.Module):
    """Its losses of the tokens are apart, as those of a pretrained model."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = nn.Embedding(20, 1)
        self.losses.weight.data = torch.linspace(2.0, 4.0, 20).unsqueeze(1)


def masked(module: nn.Module, batch: Any, *, mean: bool = False, counts: bool = True) -> tuple[Tensor, Tensor]:
    tokens, are_targets = batch
    losses, count = cast(Any, module).losses(tokens).squeeze(-1)[are_targets], are_targets.sum()
    loss_sum = losses.sum() / (count.clamp(min=1) if mean else 1)
    return loss_sum, count if counts else torch.tensor(3)


def told_of_masked(**how: bool) -> str | None:
    return check_sum(OfTokens(), functools.partial(masked, **how), MasksTokens(), torch.device("cpu"))


def test_a_sum_over_what_is_drawn_at_random_is_a_sum_whatever_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample alone may have more targets drawn than the same sample taken twice, in one of nine draws."""
    for seed in range(12):
        seeds_from(1000 * seed, monkeypatch)
        assert told_of_masked() is None


def test_a_mean_or_a_wrong_count_is_found_in_what_is_drawn_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        seeds_from(1000 * seed, monkeypatch)
        with pytest.raises(LossFault, match=r"two equal ones, on average over \d+ draws .*: it is a mean"):
            told_of_masked(mean=True)
        with pytest.raises(LossFault, match=r"num_targets is 3 .*: it does not count"):
            told_of_masked(counts=False)


def test_what_its_random_numbers_hide_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adding_up, "DRAWS", 4)
    monkeypatch.setattr(adding_up, "_beyond_a_mean", lambda draws, figure: (-1.0, 2.0))
    assert re.search(
        r"two equal ones, on average over 4 draws .*, too few to tell; if it is a mean", told_of_masked() or ""
    )


def seeds_from(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        adding_up, "drawing_on_device_from", lambda seed, device: drawing_on_device_from(first + seed, device)
    )
