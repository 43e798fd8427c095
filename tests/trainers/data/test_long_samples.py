"""The longest samples are found by reading the data, where nobody tells how long they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import pad_sequence

from batchscout.trainers.data.long_samples import LongSamples, long_samples
from batchscout.trainers.model import activation_checkpointing
from tests.support.tiny import config, cpu_run

ENOUGH = 60.0


class Ragged:
    """Samples of these sizes, which its own collate_fn pads. It does not tell how long they are."""

    def __init__(self, sizes: list[int], kind: str = "tensor") -> None:
        self.sizes, self.kind, self.num_read = sizes, kind, 0

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        size = self.sizes[index]
        made: dict[str, Any] = {
            "tensor": torch.zeros(size), "array": np.zeros(size), "list": [0] * size, "text": "a" * size,
            "dictionary": {"x": torch.zeros(size), "y": 1}, "pair": (torch.zeros(size), 1),
        }  # fmt: skip
        return made[self.kind]

    def collate_fn(self, samples: list[Tensor]) -> Tensor:
        return pad_sequence(samples, batch_first=True)


SIZES = [3, 5, 4, 5, 3, 90, 3, 3, 4, 40]


@pytest.mark.parametrize("kind", ["tensor", "array", "list", "text", "dictionary", "pair"])
def test_the_longest_come_first(kind: str) -> None:
    found = long_samples(Ragged(SIZES, kind), ENOUGH)
    assert found is not None
    assert found.num_looked_at == len(SIZES)
    assert found.indices[:4] == (5, 9, 1, 3)


def test_one_long_sample_among_ten_thousand_is_found() -> None:
    found = long_samples(Ragged([8] * 7000 + [9] + [8] * 3000), ENOUGH)
    assert found is not None
    assert found.indices[0] == 7000


def test_samples_of_one_size_have_none_that_are_longest() -> None:
    assert long_samples(Ragged([4] * 100), ENOUGH) == LongSamples((), 100)


def test_reading_ends_with_its_time_and_is_spread_until_then() -> None:
    samples = Ragged(list(range(1, 1001)))
    found = long_samples(samples, 0.0)
    assert found == LongSamples((), samples.num_read)
    assert samples.num_read == 1


class Together(Ragged):
    """Pads where it reads."""

    collate_fn = staticmethod(torch.utils.data.default_collate)  # pyright: ignore[reportAssignmentType]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return list(pad_sequence([self[index] for index in indices], batch_first=True))


def test_a_set_that_pads_where_it_reads_is_looked_at_too() -> None:
    found = long_samples(Together(SIZES), ENOUGH)
    assert found is not None
    assert found.indices[0] == 5


class Telling(Ragged):
    lengths = SIZES


class Stacked(Ragged):
    collate_fn = staticmethod(torch.utils.data.default_collate)  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize("kind", [Telling, Stacked])
def test_a_set_that_tells_lengths_or_is_stacked_is_not_read(kind: type[Ragged]) -> None:
    samples = kind(SIZES)
    assert long_samples(samples, ENOUGH) is None
    assert samples.num_read == 0
    of_torch: Any = torch.utils.data.TensorDataset(torch.zeros(4, 2))  # has a __getitems__, which pads nothing
    assert long_samples(of_torch, ENOUGH) is None


# In a run


class Summed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return (batch * self.weight).square().sum(), torch.tensor(len(batch))


def ragged() -> tuple[Ragged, Ragged]:
    return Ragged(SIZES * 4), Ragged(SIZES)


def test_a_probe_takes_those_that_were_found_and_some_of_them_twice() -> None:
    told: dict[str, Any] = {
        "data": {"target": f"{__name__}:ragged"},
        "model": {"target": f"{__name__}:Summed"},
        "micro_batch_size": 4,
    }
    run, taken = cpu_run(config(**told, longest_samples=True, long_samples=(5, 15), sample_budget=8)), []
    run.module.register_forward_pre_hook(lambda module, args: taken.append(tuple(args[0].shape)))
    run.step()
    assert taken == [(4, 90)]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_run_of_samples_that_differ_takes_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpointing, "RECOMPILE_LIMIT", 4)
    monkeypatch.setitem(counters["frames"], "ok", 0)  # whatever other tests have compiled
    told: dict[str, Any] = {"data": {"target": f"{__name__}:of_many_sizes"}, "model": {"target": f"{__name__}:Summed"}}
    run = cpu_run(config(**told, micro_batch_size=1, compile=True, long_samples=(11, 10)), steps=12)
    assert len(run.read()) == 12


def of_many_sizes() -> tuple[Ragged, Ragged]:
    return Ragged(list(range(2, 14))), Ragged([2, 3])
