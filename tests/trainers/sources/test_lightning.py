"""A LightningModule trains in a study as it does under Lightning's own Trainer; what cannot be honoured is refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

from batchscout.trainers.before.changing_loss import changing_with_steps
from batchscout.trainers.before.first_pass import first_pass
from batchscout.trainers.before.read_source import read
from batchscout.trainers.before.source import Source
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.criteria import MeanLoss
from batchscout.trainers.data.samples import loaded
from batchscout.trainers.model.losses import loss_function
from batchscout.trainers.reporting.evaluation import evaluate
from batchscout.trainers.sources.adapted import module_of, param_groups, settings_of
from batchscout.trainers.sources.lightning_fit import Fit
from batchscout.trainers.sources.of_lightning import OfLightning
from tests.support.map_style import map_style
from tests.support.tiny import cpu_run

L = pytest.importorskip("lightning")
callbacks = L.pytorch.callbacks
pytestmark = pytest.mark.slow
HERE = __name__


class Module(L.LightningModule):
    """A regression with a mean loss, a layer that decays and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.last(torch.tanh(self.first(x))).squeeze(-1), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.first.parameters(), "lr": 1e-2},
            {"params": self.last.parameters(), "lr": 5e-3, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)


class Data(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        self.samples = TensorDataset(x, x.sum(1))

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=8)


def trainer(**arguments: Any) -> Any:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(accelerator="cpu", **dict.fromkeys(quiet, False), **arguments)


MADE: dict[str, Callable[[], Any]] = {
    "plain": lambda: (Module(), Data()),
    "trainer": lambda: (
        *made("plain"),
        trainer(max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5, precision="bf16-mixed"),
    ),
    "padded": lambda: (OfPaddedTokens(), PaddedData()),
    "asks its trainer in a step": lambda: (with_hook(training_step=times_its_epochs), Data(), trainer(max_epochs=2)),
    "two optimizers": lambda: (with_hook(configure_optimizers=two_optimizers), Data()),
    "clipped by value": lambda: (*made("plain"), trainer(gradient_clip_val=1.0, gradient_clip_algorithm="value")),
    "in half": lambda: (*made("plain"), trainer(precision="bf16-true")),
    "averaging": lambda: (*made("plain"), trainer(callbacks=[callbacks.StochasticWeightAveraging(1e-3)])),
    "a callback of one's own": lambda: (*made("plain"), trainer(callbacks=[ReplacesWeights()])),
    "module alone": Module,
    "chosen by weight": lambda: (Module(), Weighted()),
    "in batches": lambda: (Module(), InBatches()),
    "partly pretrained": lambda: (PartlyPretrained(), Data()),
    "several loaders": lambda: (Module(), Several()),
    "annealed": lambda: (Annealed(), Data()),
    "watched": lambda: (
        with_hook(on_train_batch_end=nothing, validation_step=nothing),
        Data(),
        trainer(callbacks=[Watches(), callbacks.Timer()], max_steps=5),
    ),
}


def made(kind: str) -> Any:
    return MADE[kind]()


def said_of(kind: str, num_targets: str | None = None) -> Any:
    return read(Source("lightning", f"{HERE}:made", {"kind": kind}, num_targets))


def trial(kind: str = "plain", **changes: Any) -> TrialConfig:
    place = {"target": f"{HERE}:made", "kwargs": {"kind": kind}}
    optimizer = {
        "betas": [0.8, 0.9], "weight_decay": 0.1, "param_groups": "batchscout.trainers.sources.adapted:param_groups",
        "max_gradient_norm": None,
    }  # fmt: skip
    shared = {"micro_batch_size": 4, "learning_rate": 1e-2, "sample_budget": 32, "schedule": {"type": "constant"}}
    loss = {"type": "mean", "over": "targets"}
    told = {"model": place, "data": place, "loss": loss, "optimizer": optimizer, "compile": False, **shared, **changes}
    return TrialConfig.model_validate(told)


@pytest.mark.filterwarnings("ignore")  # what Lightning's loop warns of is its own
def test_four_steps_end_where_lightnings_own_trainer_ends() -> None:
    """In the order of the data, at the same batch: with two parameter groups of rates and decays of their own."""
    run = cpu_run(trial(gradient_accumulation_steps=2, statistics=False))
    ours, train_set = cast(Any, run.module).inner, cast(Any, run.train_set)
    torch.manual_seed(0)
    module = Module()
    initial = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in initial.items())
    order = run.order.indices(range(32))
    batches = [train_set.collate_fn([train_set[index] for index in order[i : i + 8]]) for i in range(0, 32, 8)]
    trainer(max_epochs=1).fit(module, DataLoader(cast(Any, batches), batch_size=None))
    for _ in range(4):
        run.step()
    for name, tensor in module.state_dict().items():
        assert torch.allclose(tensor, ours.state_dict()[name], rtol=1e-5, atol=1e-7), name


def test_what_module_loader_and_trainer_say_becomes_the_studys_keys() -> None:
    said = said_of("trainer")
    optimizer = said.keys["optimizer"]
    assert said.keys["precision"] == "bfloat16"
    assert optimizer == {
        "lr": 1e-2, "type": "adamw", "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.1, "max_gradient_norm": 0.5,
        "param_groups": "batchscout.trainers.sources.adapted:param_groups", "reference_batch_size": 16, "warmup": 0,
    }  # fmt: skip
    assert said.run_samples == 96
    assert said.keys["schedule"] == {"type": "constant"}
    assert said.keys["loss"]["over"] == "targets", "of one number each there are as many as samples"


def test_the_size_of_a_batch_is_known_where_a_sampler_makes_the_batches() -> None:
    keys = said_of("in batches").keys
    assert (keys["batch"]["micro_batch_size"], keys["optimizer"]["reference_batch_size"]) == (8, 8)


class PartlyPretrained(Module):
    """Its frozen part is put into evaluation mode when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).eval().requires_grad_(False)
        self.modes = list[list[bool]]()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.modes.append([part.training for part in self.modules()])
        return super().training_step((self.frozen(batch[0]), batch[1]), batch_idx)


@pytest.mark.filterwarnings("ignore")  # what Lightning's loop warns of is its own
def test_what_is_in_evaluation_mode_before_the_fit_stays_so_as_in_lightnings_own_trainer() -> None:
    run = cpu_run(trial("partly pretrained", statistics=False))
    ours = cast(Any, run.module).inner
    evaluate(run)
    ours.modes.clear()
    run.step()
    module = PartlyPretrained()
    trainer(max_steps=1, num_sanity_val_steps=0).fit(module, Data())
    assert ours.modes == module.modes
    assert not ours.frozen[0].num_batches_tracked
    copied = cast(Any, copy.deepcopy(run.module).train()).inner
    assert (copied.first.training, copied.frozen[1].training) == (True, False)
    assert (
        "3 of its modules are in evaluation mode, and stay so, as in Lightning's fit"
        in said_of("partly pretrained").told
    )


class ChecksItsPoints(Module):
    def configure_model(self) -> None:
        cast(Any, self.first).grad_checkpointing = True  # as timm's models have it


def test_a_module_that_checkpoints_itself_does_not_in_a_study_and_that_is_told() -> None:
    fit = Fit(ChecksItsPoints(), Data())
    assert not cast(Any, OfLightning(fit)).inner.first.grad_checkpointing
    assert "gradient_checkpointing is the study's to decide" in settings_of(fit, fit.loader("train")).told


def test_groups_keep_what_sets_them_apart() -> None:
    (first, last) = param_groups(OfLightning(Fit(Module(), Data())))
    assert {key: value for key, value in first.items() if key != "params"} == {"lr": 1e-2}
    assert {key: value for key, value in last.items() if key != "params"} == {"lr": 5e-3, "weight_decay": 0.0}


# What its loss is a mean over


class OfPaddedTokens(Module):
    """A mean over the tokens that count, of which each sample has another number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_token = batch["mask"].bool()
        return {"loss": (self.first(batch["x"].unsqueeze(-1)).squeeze(-1)[is_token] ** 2).mean()}


class PaddedData(Data):
    def setup(self, stage: str) -> None:
        lengths = torch.tensor([1, 5, 2, 4] * 4)
        mask = torch.arange(6) < lengths.unsqueeze(1)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
        self.samples = [{"x": row, "mask": counts.long()} for row, counts in zip(x, mask, strict=True)]


def count_of_tokens(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


def test_a_mean_over_what_cannot_be_found_is_refused_until_it_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"over what is not clear \(as a mean over targets: a batch has no 'labels' .*; as a mean over samp",
    ):
        said_of("padded")
    said = said_of("padded", num_targets=f"{HERE}:count_of_tokens")
    assert said.keys["loss"] == {
        "type": "mean",
        "over": f"{HERE}:count_of_tokens",
        "targets": "labels",
        "ignore_index": -100,
    }


# What is refused


def with_hook(**methods: Any) -> Any:
    return type("Hooked", (Module,), methods)()


def nothing(*args: object, **kwargs: object) -> None: ...


class ReplacesWeights(L.Callback):
    on_before_optimizer_step = nothing


class Watches(L.Callback):
    on_train_end = nothing


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (with_hook(on_after_backward=nothing), "Hooked overrides on_after_backward, which may change the batch, the gradient or the weights"),
        (with_hook(automatic_optimization=False), "Hooked has automatic_optimization = False: it steps its optimizers itself"),
        (with_hook(training_step=lambda self, dataloader_iter: None), r"Hooked.training_step takes a dataloader_iter, and chooses its"),
    ],
)  # fmt: skip
def test_a_module_that_trains_in_a_way_of_its_own_is_refused_by_name(module: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        module_of((module, Data()))


class Augments(Data):
    """On the GPU, where the batch has come to."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [one + torch.randn_like(one) for one in batch]


def test_data_that_change_a_batch_on_its_way_are_refused_by_name_too() -> None:
    with pytest.raises(ValueError, match="Augments overrides on_after_batch_transfer, which may change the batch"):
        module_of((Module(), Augments()))


def two_optimizers(self: Module) -> Any:
    return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.first, self.last)]


def times_its_epochs(self: Module, batch: Any, batch_idx: int) -> Any:
    return Module.training_step(self, batch, batch_idx) * self.trainer.max_epochs


class Weighted(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=8, sampler=WeightedRandomSampler([1.0] * 32, 32))


class InBatches(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_sampler=BatchSampler(SequentialSampler(self.samples), 8, drop_last=False))


class Several(Data):
    def val_dataloader(self) -> Any:
        return [DataLoader(self.samples), DataLoader(self.samples)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("asks its trainer in a step", r"^Hooked.training_step reads self.trainer, .*; give Hooked what it needs of it as an arg"),
        ("two optimizers", "configure_optimizers returned 2 optimizers, and a study changes the learning rate of one; return a single"),
        ("clipped by value", r"clips each number of the gradient at 1 \(gradient_clip_algorithm: value\), and a study clips the norm"),
        ("in half", "the Trainer's precision is bf16-true, and a study takes 32, 32-true, bf16, bf16-mixed, 16, 16-mixed; choose"),
        ("averaging", "has the callback StochasticWeightAveraging, which changes the training, and a study would train without it"),
        ("a callback of one's own", "the Trainer's callback ReplacesWeights has on_before_optimizer_step, which may change the gradient"),
        ("module alone", r"returned Module; return what Trainer.fit is called with, \(model, train_loader, val_loader\) or \(model, datamodule\)"),
        ("chosen by weight", "chooses its samples by a WeightedRandomSampler, and every batch of a study must see the same samples"),
        ("several loaders", "Several.val_dataloader returned a list of several loaders, and a study measures one set; return one DataLoader"),
    ],
)  # fmt: skip
def test_what_a_study_cannot_honour_is_refused_by_name(kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        said_of(kind)


# What changes with the steps


class Annealed(Module):
    """Its loss has a weight that rises with the steps, as that of a variational autoencoder's prior."""

    def weight(self, batch_idx: int) -> float:
        return min(1.0, self.global_step / 1000)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.weight(batch_idx))


class ByEpoch(Annealed):
    def weight(self, batch_idx: int) -> float:
        return float(self.current_epoch > 20)


class OnceInSixteen(Annealed):
    def weight(self, batch_idx: int) -> float:
        return float(batch_idx % 16 == 0)


class LogsSometimes(Annealed):
    def weight(self, batch_idx: int) -> float:
        if self.global_step % 100 == 0 or batch_idx % 10 == 0:
            self.log("epoch", self.current_epoch)
        return 0.0


@pytest.mark.parametrize("kind", [Annealed, ByEpoch, OnceInSixteen, LogsSometimes, Module])
def test_a_loss_that_changes_with_the_steps_is_told_and_one_that_only_looks_at_them_is_not(kind: type[Module]) -> None:
    module, batch = OfLightning(Fit(kind(), Data())), (torch.ones(2, 4), torch.zeros(2))
    said = changing_with_steps(module, loss_function(MeanLoss()), batch, torch.device("cpu"))
    assert (said is None) == (kind in (LogsSometimes, Module))
    assert said is None or re.match(
        r"the loss of the same samples is [\d.]+ at the first step and [\d.]+ at step [\d,]+: it reads", said
    )
    assert (type(module.inner), module.inner.global_step, module.batch_idx) == (kind, 0, 0)


def test_a_study_of_a_loss_that_changes_with_the_steps_is_refused() -> None:
    found = first_pass(trial("annealed"), 60.0)
    assert (found.outcome, "make it the same at every step" in found.said) == ("refused", True)


def test_what_mostly_watches_is_told() -> None:
    said = said_of("watched")
    assert re.match(
        r"Hooked.on_train_batch_end and validation_step are not called: evaluations take training_step's", said.told[0]
    )
    assert said.told[1:] == ("the callback Watches is not called",)
    assert said.run_samples == 40


def test_loaders_of_plain_data_are_taken_too() -> None:
    samples = [(torch.tensor(float(n)), n) for n in range(4)]
    train, val = loaded((DataLoader(samples, batch_size=2, shuffle=True), samples), "my:data")  # pyright: ignore[reportArgumentType]
    train, val = map_style(train), map_style(val)
    assert (len(train), train[3][1], len(val)) == (4, 3, 4)
