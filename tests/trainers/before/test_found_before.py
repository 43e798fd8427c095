"""What would end a run after minutes is found in the first pass, with what is to blame for it and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchscout.trainers.before import every_sample
from batchscout.trainers.before.classes import ClassesSeen
from batchscout.trainers.before.first_pass import FirstPass, parts
from batchscout.trainers.config import DataConfig, TrialConfig
from batchscout.trainers.errors import raised_text
from tests.support.tiny import cpu_run

Sample = tuple[Tensor, Tensor]
NUM_SAMPLES, NUM_CLASSES, NUM_INPUTS = 200, 3, 4
BAD = 130


def samples(number: int, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, NUM_INPUTS, generator=generator)
    return [(row, (row.sum() > 0).long()) for row in inputs]


class With:
    """A set one sample of which is not as the others."""

    def __init__(self, number: int, change: Callable[[Sample], Any]) -> None:
        self.samples, self.change = samples(number), change

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.samples[index]) if index == BAD else self.samples[index]


def truncated(sample: Sample) -> Sample:
    raise OSError("image file is truncated")


CHANGES: dict[str, Callable[[Sample], Any]] = {
    "truncated": truncated,
    "missing values": lambda sample: (sample[0] * torch.nan, sample[1]),
    "another class": lambda sample: (sample[0], torch.tensor(7)),
    "ignored": lambda sample: (sample[0], torch.tensor(-100)),
    "nothing": lambda sample: None,
}


def with_one(change: str, of: str = "train") -> tuple[Any, Any]:
    sound, other = samples(NUM_SAMPLES), With(NUM_SAMPLES, CHANGES[change])
    return (other, sound) if of == "train" else (sound, other)


def masked(of: str, all_but: int | None = None) -> tuple[Any, Any]:
    """Sets of which one has no labels, or those of one sample alone."""
    sound = samples(NUM_SAMPLES)
    without = [one if number == all_but else CHANGES["ignored"](one) for number, one in enumerate(sound)]
    return (without, sound) if of == "train" else (sound, without)


class WithoutNone(With):
    """Its own code leaves out what could not be read."""

    def __init__(self) -> None:
        super().__init__(NUM_SAMPLES, CHANGES["nothing"])

    def collate_fn(self, batch: list[Sample | None]) -> Any:
        return torch.utils.data.default_collate([one for one in batch if one is not None])


def without_none() -> tuple[Any, Any]:
    return WithoutNone(), samples(16)


class Fails(With):
    def collate_fn(self, batch: list[Sample]) -> Any:
        if len(batch) > 1:
            raise ArithmeticError("all dropped")
        return torch.utils.data.default_collate(batch)


def fails_together() -> tuple[Any, Any]:
    return Fails(NUM_SAMPLES, CHANGES["ignored"]), samples(16)


class Net(nn.Module):
    def __init__(self, kind: str = "plain", classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(NUM_INPUTS, 8), nn.Linear(8, classes)
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        if kind == "unused":
            self.extra = nn.Linear(2, 2)
        if kind == "sparse":
            self.table = nn.EmbeddingBag(4, 8, sparse=True)
        if kind == "complex":
            self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.body(inputs)))
        if hasattr(self, "table"):
            hidden = hidden + self.table((inputs > 0).long())
        if hasattr(self, "phase"):
            hidden = (hidden * self.phase).real
        return self.head(hidden)


def own_loss(module: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum"), torch.tensor(len(batch[1]))


def by_its_parts(module: Net, batch: Sample) -> tuple[Tensor, Tensor]:
    logits = module.head(torch.relu(module.body(batch[0])))
    return F.cross_entropy(logits, batch[1], reduction="sum"), torch.tensor(len(batch[1]))


def trial(kind: str = "plain", data: str | DataConfig = "with_one", **changes: Any) -> TrialConfig:
    kwargs = {"change": "ignored"} if data == "with_one" else {}
    fields = {
        "model": {"target": f"{__name__}:Net", "kwargs": {"kind": kind}},
        "data": {"target": f"{__name__}:{data}", "kwargs": kwargs} if isinstance(data, str) else data,
        "loss": "cross_entropy",
        "micro_batch_size": 4,
        "compile": False,
        "learning_rate": 1e-2,
        "sample_budget": 64,
        "evaluation_samples": NUM_SAMPLES,
    }
    return TrialConfig.model_validate(fields | changes)


def passed(config: TrialConfig) -> FirstPass:
    *_, found = parts(config)
    assert isinstance(found, FirstPass)
    return found


def with_data(**kwargs: str) -> TrialConfig:
    return trial().model_copy(update={"data": DataConfig(target=f"{__name__}:with_one", kwargs=kwargs)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("truncated", "raised OSError: image file is truncated"),
        ("missing values", "its loss is nan"),
        ("another class", f"the target 7, and the model has {NUM_CLASSES} outputs"),
        ("nothing", "raised TypeError"),
    ],
)
@pytest.mark.parametrize(("of", "name"), [("train", "training"), ("val", "validation")])
def test_a_sample_that_none_can_train_on_is_named(change: str, said: str, of: str, name: str) -> None:
    found = passed(with_data(change=change, of=of))
    assert found.outcome == "refused"
    assert found.said.startswith(f"{name} sample {BAD} ")
    assert said in found.said


def test_a_target_that_does_not_count_is_no_fault() -> None:
    assert passed(with_data(change="ignored")).outcome == "passed"


@pytest.mark.parametrize(("of", "name"), [("train", "training"), ("val", "validation")])
def test_a_set_without_a_target_is_refused_and_one_with_few_is_not(of: str, name: str) -> None:
    found = passed(trial(data=DataConfig(target=f"{__name__}:masked", kwargs={"of": of})))
    assert found.outcome == "refused"
    assert found.said.startswith(f"no {name} sample of those looked at, in all parts of the set, has a target")
    few = trial(data=DataConfig(target=f"{__name__}:masked", kwargs={"of": of, "all_but": BAD}))
    assert passed(few).outcome == "passed"


def test_a_few_looks_do_not_tell_that_no_sample_has_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_sample, "SECONDS", 0.0)
    first_alone = trial(data=DataConfig(target=f"{__name__}:masked", kwargs={"of": "val"}))
    assert passed(first_alone).outcome == "passed"


def test_a_sample_that_the_set_leaves_out_by_itself_is_no_fault() -> None:
    assert passed(trial(data="without_none")).outcome == "passed"


def test_validation_samples_that_no_run_looks_at_are_not_looked_at() -> None:
    config = with_data(change="truncated", of="val")
    assert passed(config.model_copy(update={"evaluation_samples": BAD})).outcome == "passed"


def test_to_look_through_a_set_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_sample, "SECONDS", 0.0)
    assert passed(with_data(change="truncated")).outcome == "passed"


def test_a_batch_that_cannot_be_put_together_is_named_by_its_samples() -> None:
    found = passed(trial(data="fails_together"))
    assert found.outcome == "refused"
    assert found.said.startswith(
        "the batch of samples 0, 1 of the training data raised ArithmeticError: all dropped (in "
    )


@pytest.mark.parametrize("loss", ["cross_entropy", f"{__name__}:own_loss"])
def test_too_few_outputs_are_told_whoever_computes_the_loss(loss: str) -> None:
    found = passed(trial(loss=loss, model={"target": f"{__name__}:Net", "kwargs": {"classes": 1}}))
    assert found.outcome == "refused"
    assert "has the target 1, and the model has 1 outputs, for the classes 0 to 0" in found.said


def test_a_loss_that_is_not_given_is_what_is_missing() -> None:
    found = passed(trial(loss=None))
    assert found.outcome == "raised"
    assert found.given.startswith("no `loss` is given, ")


def test_a_parameter_that_the_loss_does_not_need_is_refused_where_ranks_wait_for_it() -> None:
    assert passed(trial("unused")).outcome == "passed"
    found = passed(trial("unused", world_size=2))
    assert found.outcome == "refused"
    assert "(extra.weight, extra.bias)" in found.said
    assert "parallel: fsdp" in found.said
    assert passed(trial("unused", world_size=2, parallel="fsdp")).outcome == "passed"


def test_a_loss_that_calls_methods_alone_is_refused_where_weights_are_gathered_by_a_forward() -> None:
    loss = f"{__name__}:by_its_parts"
    assert passed(trial(loss=loss, world_size=2)).outcome == "passed"
    assert "parallel: ddp" in passed(trial(loss=loss, world_size=2, parallel="fsdp")).said


def test_what_a_single_sample_raises_in_training_is_told() -> None:
    assert passed(trial()).alone_raises is None
    found = passed(trial("norm"))
    assert found.outcome == "passed"
    assert "more than 1 value per channel" in (found.alone_raises or "")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_complex_parameters_train(optimizer: str) -> None:
    config = trial("complex", optimizer={"type": optimizer})
    assert passed(config).outcome == "passed"
    run = cpu_run(config)
    before = run.module.get_parameter("phase").detach().clone()
    run.step()
    run.read()
    assert run.metrics()["update_norm"] > 0
    assert not torch.equal(before, run.module.get_parameter("phase").detach())


def test_a_sample_that_a_run_cannot_read_is_named_by_what_it_raises() -> None:
    run = cpu_run(with_data(change="truncated"))
    with pytest.raises(OSError, match="truncated") as raised:
        run.time_steps(NUM_SAMPLES // 4)
    assert raised_text(raised.value) == f"OSError: image file is truncated (at sample {BAD})"


def test_sparse_gradients_are_refused_with_the_way_out() -> None:
    found = passed(trial("sparse"))
    assert found.outcome == "refused"
    assert "table.weight" in found.said
    assert "sparse=False" in found.said


def test_what_is_no_tensor_is_left_to_torchs_own_words() -> None:
    with ClassesSeen("a sample"), pytest.raises(TypeError, match="must be Tensor"):
        F.cross_entropy(cast(Any, nn.Linear(2, 2)), cast(Any, [1]))


def at_its_own_rate(params: Iterable[nn.Parameter], lr: float, fixed: int = 2) -> torch.optim.Optimizer:
    """So many of its two groups do not follow the study's rate."""
    params, rates = list(params), [0.1] * fixed + [0.5 * lr] * (2 - fixed)
    groups = ([p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1])
    return torch.optim.SGD([{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=True)])


def test_an_optimizer_that_does_not_follow_the_learning_rate_is_refused_and_told_of_where_a_part_does() -> None:
    """A study would compare rates that change nothing."""

    def found(fixed: int) -> FirstPass:
        return passed(trial(optimizer={"target": f"{__name__}:at_its_own_rate", "kwargs": {"fixed": fixed}}))

    assert found(2).outcome == "refused"
    assert "trains at the learning rate 0.1 whether it is called with lr=0.01 or with lr=0.02" in found(2).said
    assert found(1).outcome == "passed"
    assert "keeps the learning rate of 1 of its 2 groups (0.1)" in found(1).said
    assert found(0) == passed(trial())


class Margin(nn.Module):
    """A loss with weights of its own for each class, as ArcFace and proxies have."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(NUM_CLASSES, NUM_CLASSES))

    def forward(self, module: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        logits = module(batch[0]) @ self.proxies.T
        return F.cross_entropy(logits, batch[1], reduction="sum"), torch.tensor(len(batch[1]))


margin, frozen = Margin(), Margin().requires_grad_(False)


def by_a_margin(module: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    """It depends on where its inputs are, which is no parameter."""
    inputs, targets = batch
    return margin(module, (inputs.clone().requires_grad_(), targets))


def by_a_frozen_margin(module: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    return frozen(module, (batch[0].clone().requires_grad_(), batch[1]))


class Listed(nn.Module):
    """Layers in a plain list are not the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers = nn.Linear(NUM_INPUTS, NUM_CLASSES), [nn.Linear(NUM_INPUTS, NUM_INPUTS)]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers[0](inputs))


@pytest.mark.parametrize("loss", ["margin", "by_a_margin"])
def test_a_loss_with_parameters_of_its_own_is_refused_and_one_that_is_frozen_is_not(loss: str) -> None:
    found = passed(trial(loss=f"{__name__}:{loss}"))
    assert found.outcome == "refused"
    assert "depends on a parameter that the model does not have (3 x 3), so no run would train it; assign" in found.said
    assert passed(trial(loss=f"{__name__}:by_a_frozen_margin")).outcome == "passed"


def test_layers_that_are_not_the_models_are_refused() -> None:
    found = passed(trial(model={"target": f"{__name__}:Listed"}))
    assert found.outcome == "refused"
    assert "depends on 2 parameters that the model does not have (" in found.said
    assert "nn.ModuleList" in found.said
