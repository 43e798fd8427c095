"""By its contents a value is known again in another process, and told from every other one."""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import random
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from batchscout.trainers.sources.contents import contents, weights

ROOT = Path(__file__).parents[3]


@dataclass
class Sizes:
    width: int


class Plain:
    def __init__(self, width: int) -> None:
        self.width = width

    def made(self) -> int:
        return self.width


class Private:
    def __init__(self, width: int) -> None:
        self._width = width


class Net(nn.Module):
    """Two of them have weights of one shape and the same code."""

    def __init__(self, p: float = 0.0, sizes: Any = None) -> None:
        super().__init__()
        self.linear, self.dropout, self.sizes = nn.Linear(2, 2), nn.Dropout(p), sizes


class Rows(Dataset[Tensor]):
    def __init__(self, seed: int, noise: float = 0.0, length: int = 100) -> None:
        self.rows, self.noise = torch.randn(length, 3, generator=torch.Generator().manual_seed(seed)), noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + self.noise * torch.rand(3) * random.random() * float(np.random.rand())


class Named(Rows):
    """As one of Hugging Face's is, by the time and the place of its file."""

    @property
    def _fingerprint(self) -> str:
        return str(next(numbers))


numbers = itertools.count()


home = tempfile.TemporaryDirectory()
atexit.register(home.cleanup)


def beside(width: int) -> Any:
    """A script's function, and the module in which its net is."""
    (folder := Path(home.name, str(width))).mkdir(exist_ok=True)
    (folder / "net_of_test.py").write_text(f"width = 1\n\nclass Net:\n    def forward(self):\n        return {width}\n")
    (folder / "script_of_test.py").write_text(
        "import net_of_test\nfrom net_of_test import Net\n\ndef made():\n    return Net()\n\ndef wide():\n    return net_of_test.width\n"
    )
    sys.path.insert(0, str(folder))
    for name in ("net_of_test", "script_of_test"):
        sys.modules.pop(name, None)
    try:
        return importlib.import_module("script_of_test")
    finally:
        sys.path.remove(str(folder))


class Broken(Rows):
    def __getitem__(self, index: int) -> Tensor:
        raise RuntimeError("no such file")


def using(value: Any) -> Callable[[], Any]:
    return lambda: value


def kwargs_of(width: int) -> Any:
    def made() -> Net:
        return Net(sizes=SIZES[width])

    return functools.partial(made)


SIZES = {8: 1, 16: 2}
VALUES: dict[str, Callable[[int], Any]] = {
    "a number": lambda n: n,
    "a text": str,
    "a dictionary": lambda n: {"width": n},
    "a dictionary of dictionaries": lambda n: {"model": {"width": [n]}},
    "a list": lambda n: [n, 1],
    "one of many in a list": lambda n: [1] * 500 + [n] + [1] * 500,
    "a set": lambda n: {"a", "b", n},
    "a dataclass": Sizes,
    "an object": Plain,
    "what an object keeps for itself": Private,
    "a namespace": lambda n: Namespace(width=n),
    "a simple namespace": lambda n: SimpleNamespace(width=Sizes(n)),
    "a tensor": lambda n: torch.full((2,), n),
    "an empty tensor": lambda n: torch.zeros(0, n),
    "a tensor of bfloat16": lambda n: torch.full((2,), n, dtype=torch.bfloat16),
    "a sparse tensor": lambda n: torch.eye(3).mul(n).to_sparse(),
    "a tensor without numbers": lambda n: torch.empty(n, device="meta"),
    "an array": lambda n: np.full(2, n),
    "an array of objects": lambda n: np.array([None, n], dtype=object),
    "a function with a dictionary": lambda n: using({"width": n}),
    "a function with a dataclass": lambda n: using(Sizes(n)),
    "a function with a tensor": lambda n: using(torch.full((2,), n)),
    "a function that encloses a number": kwargs_of,
    "a partial": lambda n: functools.partial(Net, sizes=Sizes(n)),
    "a method": lambda n: Plain(n).made,
    "a module's setting": lambda n: Net(p=n / 100),
    "a module's own": lambda n: Net(sizes={"width": n}),
    "a list of tensors": lambda n: [torch.full((2,), n) for _ in range(100)],
    "a data set": Rows,
    "a data set of torch's": lambda n: TensorDataset(torch.full((4, 2), n)),
    "a data set that draws when it is read": lambda n: Rows(n, noise=1.0),
    "a data set's length": lambda n: Rows(0, length=n),
    "a set with a name of its own for every load": lambda n: Named(n),
    "a function that calls another module's": lambda n: beside(n).made,
    "a function that names another module": lambda n: beside(n).wide,
    "a loader": lambda n: DataLoader(Rows(n), batch_size=4),
    "a loader's batch": lambda n: DataLoader(Rows(0), batch_size=n),
}  # fmt: skip


def told(value: Any) -> list[str | bytes]:
    return list(contents(value))


def numpys_state() -> list[int]:
    state: Any = np.random.get_state()
    return state[1].tolist()


@pytest.mark.parametrize("kind", VALUES)
def test_the_same_value_is_known_again_and_another_one_is_not(kind: str) -> None:
    make = VALUES[kind]
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), numpys_state()
    assert told(make(8)) == told(make(8))
    assert told(make(8)) != told(make(16))
    assert torch.equal(of_torch, torch.get_rng_state()) or "module" in kind or kind == "a partial"
    assert (of_python, of_numpy) == (random.getstate(), numpys_state())


def test_weights_are_told_by_themselves() -> None:
    torch.manual_seed(0)
    one, other = Net(), Net()
    assert told(one) == told(other)
    assert list(weights(one)) != list(weights(other))
    other.load_state_dict(one.state_dict())
    assert list(weights(one)) == list(weights(other))


def test_what_holds_itself_comes_to_an_end() -> None:
    ring: dict[str, Any] = {"width": 8}
    ring["self"] = ring
    assert told(ring) == told(ring)


def test_a_set_that_cannot_be_read_is_left_to_the_first_pass() -> None:
    assert told(Broken(0))[-1] == "RuntimeError"


@pytest.mark.slow
def test_another_process_tells_the_same() -> None:
    """Hashes of texts, and with them the order of sets, are others there."""
    kinds = [kind for kind in VALUES if "module" not in kind]
    code = f"from tests.trainers.sources.test_contents import VALUES, told; print([repr(told(VALUES[kind](8))) for kind in {kinds}])"
    processes = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    assert processes[0].stdout == processes[1].stdout
    assert len(processes[0].stdout) > 1000
