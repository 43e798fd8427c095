"""What people call Trainer.fit with is taken as it is; module and data are set up, and asked, as Lightning does before the first step."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from batchscout.orchestrator.find import Subject
from batchscout.trainers.before.prediction import predict
from batchscout.trainers.before.read_source import read
from batchscout.trainers.before.source import Source
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.samples import first_of, loaded
from batchscout.trainers.sources import objects
from batchscout.trainers.sources.adapted import loaders_of, module_of, own_run_of, param_groups, settings_of
from batchscout.trainers.sources.lightning_fit import Fit, fit_of
from batchscout.trainers.step.learning_rate import factor_at
from tests.support.tiny import cpu_run

L = pytest.importorskip("lightning")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # Lightning's own, of few workers
HERE = __name__


def samples(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1))


def loader(count: int = 33) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=4, shuffle=True)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.layer(x).squeeze(-1), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(8)


class WithLoaders(Module):
    train_dataloader, val_dataloader = Data.train_dataloader, Data.val_dataloader  # pyright: ignore[reportAssignmentType]


def trainer(**arguments: Any) -> Any:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(accelerator="cpu", **dict.fromkeys(quiet, False), **arguments)


def said_of(form: str) -> Any:
    return read(Source("lightning", f"{HERE}:of_form", {"form": form}))


def trial(make: Callable[..., Any], **kwargs: Any) -> TrialConfig:
    place = {"target": f"{make.__module__}:{make.__name__}", "kwargs": kwargs}
    groups = "batchscout.trainers.sources.adapted:param_groups"
    optimizer = {"type": "sgd", "betas": [0.0, 0.0], "param_groups": groups, "max_gradient_norm": None}
    shared = {"micro_batch_size": 4, "learning_rate": 0.1, "sample_budget": 16, "compile": False, "statistics": False}
    said = {"loss": {"type": "mean", "over": "targets"}, "optimizer": optimizer, "schedule": {"type": "constant"}}
    return TrialConfig.model_validate({"model": place, "data": place, **said, **shared})


# Its forms


TWO_EPOCHS = {"max_epochs": 2, "accumulate_grad_batches": 2}
ON_SEVERAL_DEVICES = {"max_steps": 100, "accumulate_grad_batches": 2, "devices": 4, "strategy": "ddp"}
from_datasets = L.LightningDataModule.from_datasets
FORMS: dict[str, Callable[[], Any]] = {
    "both loaders": lambda: (Module(), loader(), loader(8)),
    "a pair of loaders": lambda: (Module(), (loader(), loader(8))),
    "loaders and trainer": lambda: (Module(), loader(), loader(8), trainer(**TWO_EPOCHS)),
    "a pair and trainer": lambda: (Module(), (loader(), loader(8)), trainer(**TWO_EPOCHS)),
    "data of sets": lambda: (Module(), from_datasets(samples(33), val_dataset=samples(8), batch_size=4)),
    "itself as its data": lambda: (module := WithLoaders(), module),
    "by itself": lambda: (WithLoaders(),),
    "by itself, with trainer": lambda: (WithLoaders(), trainer(**TWO_EPOCHS)),
}
WITHOUT_VALIDATION: dict[str, Callable[[], Any]] = {
    "one loader": lambda: (Module(), loader()),
    "none": lambda: (Module(), loader(), None),
    "training data alone": lambda: (Module(), from_datasets(samples(33), batch_size=4)),
    "an empty list": lambda: (Module(), Unvalidated()),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "data": lambda: (Module(), Data()),
    "several devices": lambda: (Module(), loader(), loader(8), trainer(**ON_SEVERAL_DEVICES)),
    "ended by its epochs": lambda: (Module(), loader(), loader(8), trainer(max_steps=10_000, max_epochs=2)),
    "sets": lambda: (Module(), samples(33), samples(8)),
    "two validation loaders": lambda: (Module(), loader(), [loader(8), loader(8)]),
    "something else": lambda: (Module(), loader(), loader(8), 3),
    "alone without loaders": lambda: (Module(),),
    "built from its data": lambda: (BuiltFromItsData([]), Wide([]), trainer(max_epochs=1)),
    "many samples": lambda: (Reads(), loader(100_000), loader(8), trainer(max_epochs=1)),
    "many that are looked at": lambda: (Reads(), Counted(), trainer(max_epochs=1)),
}


def of_form(form: str) -> Any:
    return (FORMS | WITHOUT_VALIDATION | OTHERS)[form]()


def test_a_step_of_several_devices_takes_the_samples_of_all() -> None:
    said = said_of("several devices")
    assert (said.keys["optimizer"]["reference_batch_size"], said.keys["batch"]) == (32, {"micro_batch_size": 4})
    assert (said.run_samples, said.in_steps) == (3200, True)
    assert (said.processes, said.sample_seconds) == (4, None)


def test_a_run_whose_epochs_end_it_before_its_steps_counts_epochs() -> None:
    said = said_of("ended by its epochs")
    assert (said.run_samples, said.in_steps) == (66, False)


@pytest.mark.parametrize(
    ("limit", "samples", "in_steps", "length"),
    [
        (3, 24, True, {"max_steps": 6}),
        (100, 66, False, {"max_steps": 18}),  # at a smaller batch there are as many
        (0.5, 32, False, {"max_epochs": 2}),
        (1.0, 66, False, {"max_epochs": 2}),
    ],
)
def test_a_run_whose_epochs_end_after_a_number_of_batches_counts_steps(
    limit: float, samples: int, in_steps: bool, length: dict[str, int]
) -> None:
    model = module_of((Module(), loader(), loader(8), trainer(max_epochs=2, limit_train_batches=limit)))
    assert model is not None
    own = own_run_of(model)
    assert own is not None
    assert (own.samples, own.in_steps, own.arguments) == (samples, in_steps, length)


@pytest.mark.parametrize("form", FORMS)
def test_in_each_form_the_same_module_and_samples_are_the_same_study(form: str) -> None:
    said, run, usual = said_of(form), cpu_run(trial(of_form, form=form)), cpu_run(trial(of_form, form="data"))
    has_trainer = "trainer" in form
    assert said.keys["optimizer"]["reference_batch_size"] == (8 if has_trainer else 4)
    assert said.run_samples == (66 if has_trainer else None)
    for _ in range(2):
        run.step()
        usual.step()
    assert all(map(torch.equal, run.module.state_dict().values(), usual.module.state_dict().values()))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("sets", r"its train_loader is a TensorDataset, and a study makes its batches .*; return torch.utils.data.DataLoader\(samples, b"),
        ("two validation loaders", r"its val_loader is a list of several loaders, and a study measures one set; return one DataLoader"),
        ("something else", r"returned \(Module, DataLoader, DataLoader, int\); return what .*; with the Trainer as the last if there is"),
        ("alone without loaders", r"Module has no train_dataloader; write it, or return \(model, train_loader, val_loader\)"),
    ],
)  # fmt: skip
def test_what_no_fit_is_called_with_is_refused_with_what_is(form: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        said_of(form)


class Unvalidated(Data):
    def val_dataloader(self) -> Any:
        return []


@pytest.mark.parametrize("form", WITHOUT_VALIDATION)
def test_without_data_to_validate_on_every_tenth_sample_is_held_out(form: str) -> None:
    sets = [first_of(one, 1) for one in loaded(of_form(form), "a test's")]
    train, val = ({tuple(one[i][0].tolist()) for i in range(len(one))} for one in sets)
    assert (len(train), len(val)) == (30, 3)
    assert not train & val
    assert any("every tenth sample is held out" in told for told in said_of(form).told)


def test_a_loader_that_makes_batches_of_its_own_is_refused_without_data_to_validate_on_too() -> None:
    with pytest.raises(ValueError, match="batch_sampler"):
        loaded((Module(), DataLoader(samples(33), batch_sampler=[[0, 1], [2, 3]])), "a test's")


def test_objects_of_a_notebook_begin_anew_in_every_run(tmp_path: Path) -> None:
    module, train, val, own = Module(), loader(), loader(8), trainer(max_epochs=1)
    handed = Subject(lightning=lambda: (module, train, val, own)).handed()
    kwargs = objects.kept_as(handed, tmp_path)
    objects.keep(handed, Path(kwargs["file"]))
    config = trial(objects.make, **kwargs)
    for _ in range(2):
        run = cpu_run(config)
        assert torch.equal(cast(Any, run.module).inner.layer.weight, module.layer.weight)
        run.step()
        assert not torch.equal(cast(Any, run.module).inner.layer.weight, module.layer.weight)


def test_a_module_that_another_run_has_trained_is_refused() -> None:
    module = Module()
    module_of((module, Data()))
    with pytest.raises(ValueError, match=r"returned a Module that it had returned before, .*; make the module within"):
        module_of((module, Data()))


# What it reads of its Trainer

READ = ("max_epochs", "max_steps", "estimated_stepping_batches", "num_training_batches", "accumulate_grad_batches")


class Reads(Module):
    """Notes what its Trainer says."""

    def configure_optimizers(self) -> Any:
        self.read = {name: getattr(self.trainer, name) for name in READ}
        self.read |= {
            "is itself": self.trainer.lightning_module is self,
            "data": type(self.trainer.datamodule).__name__,
        }
        return super().configure_optimizers()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (samples(4)[number % 4] for number in itertools.count())


@pytest.mark.filterwarnings("ignore")  # what Lightning's loop warns of is its own
@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, Data),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, loader),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, Data),
        ({"max_epochs": 2, "limit_train_batches": 3}, loader),
        ({"max_epochs": 2, "overfit_batches": 2}, loader),
        ({"max_steps": 5, "max_epochs": 4}, loader),
        ({"max_steps": 5}, lambda: DataLoader(Endless(), batch_size=4)),
    ],
)
def test_the_trainer_answers_as_it_does_in_its_own_fit(arguments: dict[str, Any], data: Callable[[], Any]) -> None:
    def made() -> Any:
        found = data()
        return (Reads(), found) if isinstance(found, Data) else (Reads(), found, loader(8))

    in_fit, ours, own = made(), made(), trainer(**arguments)
    trainer(**arguments).fit(*in_fit)
    param_groups(cast(nn.Module, module_of((*ours, own))))
    assert ours[0].read == in_fit[0].read
    assert type(own) is L.Trainer
    assert own.datamodule is None
    with pytest.raises(RuntimeError, match="is not attached to a"):
        _ = ours[0].trainer


def test_without_a_limit_it_has_as_many_epochs_as_lightning_fills_in() -> None:
    for arguments, epochs in (
        ({}, 1000),
        ({"max_steps": 7}, -1),
        ({"max_time": {"hours": 1}}, -1),
        ({"max_epochs": 4}, 4),
    ):
        module = Reads()
        param_groups(cast(nn.Module, module_of((module, loader(), loader(8), trainer(**arguments)))))
        assert module.read["max_epochs"] == epochs


class OneCycle(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.8)
        steps = self.trainer.max_epochs * self.trainer.num_training_batches
        schedule = OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CosineByStep(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.2)
        schedule = CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class CosineByEpoch(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.2)
        return [optimizer], [CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


class AfterItsLoader(Module):
    """As Lightning's own guide has it."""

    def configure_optimizers(self) -> Any:
        self.trainer.fit_loop.setup_data()
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.2)
        steps = self.trainer.max_epochs * len(self.trainer.train_dataloader)
        return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, steps), "interval": "step"}]


class Halved(Module):
    """After every second epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "frequency": 2}}


class OnPlateau(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "loss"}}


KINDS = {
    kind.__name__: kind for kind in (OneCycle, CosineByStep, CosineByEpoch, AfterItsLoader, Halved, OnPlateau)
}  # fmt: skip


def scheduled(kind: str, epochs: int | None = 2) -> Any:
    made = (KINDS[kind](), loader(), loader(8))
    return made if epochs is None else (*made, trainer(max_epochs=epochs))


def said_of_kind(kind: str, **kwargs: Any) -> Any:
    return read(Source("lightning", f"{HERE}:scheduled", {"kind": kind, **kwargs}))


@pytest.mark.parametrize("kind", ["CosineByStep", "AfterItsLoader"])
def test_a_schedule_as_long_as_the_trainers_run_is_the_studys(kind: str) -> None:
    said = said_of_kind(kind)
    assert (said.keys["schedule"], said.keys["optimizer"]["lr"], said.told) == ({"type": "cosine"}, 0.2, ())
    assert said.keys["optimizer"]["warmup"] == 0


@pytest.mark.parametrize("epochs", [2, 3, 12])
def test_the_stairs_of_few_epochs_stay_stairs(epochs: int) -> None:
    """A cosine down to zero would anneal the last of them, which they do not."""
    schedule = said_of_kind("CosineByEpoch", epochs=epochs).keys["schedule"]
    last = 0.5 * (1 + math.cos(math.pi * (epochs - 1) / epochs))
    assert schedule["type"] == "table"
    assert (schedule["factors"][0], schedule["factors"][-1]) == (1.0, pytest.approx(last, rel=1e-3))


def test_the_stairs_of_many_epochs_have_the_name_of_what_they_follow() -> None:
    assert said_of_kind("CosineByEpoch", epochs=50).keys["schedule"] == {"type": "cosine"}


@pytest.mark.parametrize(
    ("kind", "epochs", "lr", "factors"),
    [
        ("OneCycle", 20, 0.3, {0.0: 0.04, 0.3: 1.0, 0.65: 0.5, 1.0: 0.0}),
        ("Halved", 6, 0.2, {0.1: 1.0, 0.3: 1.0, 0.4: 0.5, 0.6: 0.5, 0.7: 0.25, 1.0: 0.25}),
    ],
)
def test_a_schedule_without_a_name_here_keeps_its_shape_over_the_trainers_run(
    kind: str, epochs: int, lr: float, factors: dict[float, float]
) -> None:
    said = said_of_kind(kind, epochs=epochs)
    assert said.keys["optimizer"]["lr"] == lr
    assert {share: factor_at(said.keys["schedule"]["factors"], share) for share in factors} == {
        share: pytest.approx(factor, abs=0.03) for share, factor in factors.items()
    }


def test_a_momentum_that_a_cycle_moves_is_told() -> None:
    said = said_of_kind("OneCycle")
    assert said.keys["optimizer"]["betas"] == [0.8, 0.0]
    assert said.told[0].startswith("its schedule moves the momentum between 0.85 and 0.95, and a study keeps it at 0.8")


@pytest.mark.parametrize(
    ("kind", "epochs", "said"),
    [
        ("OnPlateau", 2, "its schedule ReduceLROnPlateau follows the training"),
        ("Halved", None, "its schedule StepLR goes on for as long as its run, and how long that is, is not known"),
    ],
)
def test_a_schedule_that_cannot_be_foretold_is_told_and_not_guessed(kind: str, epochs: int | None, said: str) -> None:
    found = said_of_kind(kind, epochs=epochs)
    assert "schedule" not in found.keys
    assert found.told[0].startswith(said)


RETURNED: dict[str, Callable[[Any, Any], Any]] = {
    "two lists": lambda optimizer, schedule: [[optimizer], [schedule]],
    "a list and a dictionary": lambda optimizer, schedule: ([optimizer], schedule),
    "a list and a schedule": lambda optimizer, schedule: ([optimizer], schedule["scheduler"]),
    "a list of one dictionary": lambda optimizer, schedule: [{"optimizer": optimizer, "lr_scheduler": schedule}],
}


@pytest.mark.parametrize("form", RETURNED)
def test_a_schedule_is_taken_in_each_form_in_which_lightning_takes_it(form: str) -> None:
    class Returns(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return RETURNED[form](optimizer, {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"})

    fit = fit_of((Returns(), loader(), loader(8), trainer(max_epochs=4)))
    schedule = settings_of(fit, loader()).keys["schedule"]
    assert {share: factor_at(schedule["factors"], share) for share in (0.1, 0.4, 0.9)} == pytest.approx(
        {0.1: 1.0, 0.4: 0.5, 0.9: 0.125}, abs=0.03
    )


def test_schedules_that_set_one_rate_together_are_told_and_not_guessed() -> None:
    class OfTwo(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [
                StepLR(optimizer, 1),
                {"scheduler": CosineAnnealingLR(optimizer, 9), "interval": "step"},
            ]

    said = settings_of(fit_of((OfTwo(), loader(), loader(8), trainer(max_epochs=2))), loader())
    assert ("schedule" in said.keys, said.keys["optimizer"]["lr"]) == (False, 0.1)
    assert said.told[0].startswith(
        "it has 2 schedules of one rate (StepLR, CosineAnnealingLR), and what they make of it"
    )


# Where there is none


class ReadsInSetup(Module):
    def setup(self, stage: str) -> None:
        self.steps = self.trainer.max_steps


class ReadsCarefully(Module):
    """Trains without one, too."""

    def configure_optimizers(self) -> Any:
        try:
            self.steps = self.trainer.estimated_stepping_batches
        except RuntimeError:
            self.steps = self.current_epoch
        return super().configure_optimizers()


class FailsByItself(Module):
    def configure_optimizers(self) -> Any:
        raise RuntimeError(f"no such disk in epoch {self.current_epoch}")


class DataReads(Data):
    def setup(self, stage: str) -> None:
        self.epochs = cast(Any, self.trainer).max_epochs


class DataReadsAtLast(Data):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(33 // cast(Any, self.trainer).world_size)


class DataReadsCarefully(Data):
    def setup(self, stage: str) -> None:
        self.epochs = 1 if self.trainer is None else self.trainer.max_epochs


@pytest.mark.parametrize(
    ("module", "data", "reader", "read"),
    [
        (Reads, Data, "Reads.configure_optimizers", "max_epochs"),
        (CosineByStep, Data, "CosineByStep.configure_optimizers", "estimated_stepping_batches"),
        (ReadsInSetup, Data, "ReadsInSetup.setup", "max_steps"),
        (Module, DataReads, "DataReads.setup", "max_epochs"),
        (Module, DataReadsAtLast, "DataReadsAtLast.train_dataloader", "world_size"),
    ],
)
def test_what_is_read_of_a_trainer_that_was_not_returned_is_named(
    module: type[Module], data: type[Data], reader: str, read: str
) -> None:
    said = rf"^{reader} reads self.trainer.{read}, and the callable returned no Trainer; return the run's own, too, as the last: \(model, "
    with pytest.raises(ValueError, match=said):
        taken(module(), data())
    taken(module(), data(), trainer(max_epochs=1))


def taken(*found: Any) -> None:
    """Take it as far as it is read."""
    fit = cast(Fit, fit_of(found))
    module = cast(nn.Module, module_of(fit))
    loaders_of(fit)
    param_groups(module)


def test_other_errors_stay_what_they_are_and_what_looks_whether_there_is_one_goes_on() -> None:
    with pytest.raises(RuntimeError, match=r"^no such disk in epoch 0$"):
        taken(FailsByItself(), Data())
    taken(ReadsCarefully(), DataReadsCarefully())


# In Lightning's order


class BuiltFromItsData(Module):
    """Has its layer from what its data says, which reads the Trainer."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def prepare_data(self) -> None:
        self.calls.append("module.prepare_data")

    def setup(self, stage: str) -> None:
        self.layer = nn.Linear(self.trainer.datamodule.width, 1)
        self.calls.append(f"module.setup {stage}")

    def configure_model(self) -> None:
        self.calls.append("module.configure_model")

    def configure_optimizers(self) -> Any:
        self.calls.append("module.configure_optimizers")
        return super().configure_optimizers()


class Wide(Data):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def prepare_data(self) -> None:
        self.calls.append("data.prepare_data")

    def setup(self, stage: str) -> None:
        assert not hasattr(self, "width"), "Lightning calls it once"
        self.width = 4 * cast(Any, self.trainer).max_epochs
        self.calls.append(f"data.setup {stage}")


def test_module_and_data_are_set_up_once_and_before_what_needs_them() -> None:
    calls = list[str]()
    module, data = BuiltFromItsData(calls), Wide(calls)
    taken(module, data, trainer(max_epochs=1))
    assert calls == [
        "module.prepare_data", "data.prepare_data", "data.setup fit", "module.setup fit", "module.configure_model",
        "module.configure_optimizers",
    ]  # fmt: skip
    assert data.trainer is None
    assert said_of("built from its data").keys["optimizer"]["lr"] == 0.1
    run = cpu_run(trial(of_form, form="built from its data"))
    before = cast(Any, run.module).inner.layer.weight.clone()
    run.step()
    assert not torch.equal(cast(Any, run.module).inner.layer.weight, before)


# What it leaves in memory


class Counted(Data):
    """Looks at its samples, which the following with tensors that have shapes alone must not come across."""

    def setup(self, stage: str) -> None:
        self.length = int((samples(100_000).tensors[1] < 100).sum())

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.length)


@pytest.mark.parametrize("form", ["many samples", "many that are looked at"])
def test_samples_that_are_made_for_the_model_are_not_the_devices(form: str) -> None:
    assert predict(trial(of_form, form=form)) == predict(trial(of_form, form="both loaders"))


def test_once_the_optimizer_is_made_nothing_holds_the_data_any_more() -> None:
    found = of_form("many samples")
    samples, module = weakref.ref(found[1].dataset), cast(nn.Module, module_of(found))
    del found
    gc.disable()
    _kept = copy.deepcopy(module)  # as one is to count its operations
    try:
        assert samples() is not None, "the Trainer is asked of it"
        param_groups(module)
        assert samples() is None
    finally:
        gc.enable()
