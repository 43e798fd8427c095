"""What offloading decides and keeps, on the CPU: which tensors move, that numbers stay, where state lies. Moving between a GPU and its
host is for `pytest -m cuda`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from batchscout.trainers.model.activation_offload import SMALLEST_BYTES, ActivationOffload
from batchscout.trainers.run import Run
from batchscout.trainers.step.optimizer_offload import OnTheHost
from tests.support.tiny import config, cpu_run, gradient_of_step

SIDE = 1024


def test_activations_move_and_weights_and_small_tensors_stay() -> None:
    model = nn.Linear(2 * SIDE, SIDE, bias=False)
    offload = ActivationOffload(model)
    assert offload.moves(torch.empty(3, SIDE, SIDE))
    assert not offload.moves(torch.empty(SMALLEST_BYTES // 4 - 1))
    assert not offload.moves(model.weight.t())
    assert not offload.moves(model.weight.bfloat16().t())  # autocast's copy
    assert offload.moves(torch.empty(SMALLEST_BYTES // 4))


def test_what_has_moved_comes_back_as_it_was() -> None:
    run = cpu_run(config(micro_batch_size=4))
    expected = gradient_of_step(run)
    again = cpu_run(config(micro_batch_size=4))
    offload, moved = ActivationOffload(again.module), list[bool]()
    offload.moves = lambda tensor: moved.append(True) or True  # of a model this small no tensor is worth it
    again.loss_function = offload.during(again.loss_function)
    assert torch.equal(gradient_of_step(again), expected)
    assert moved


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_state_on_the_host_steps_as_it_does_on_the_device(kind: str) -> None:
    torch.manual_seed(0)
    makers = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    }
    plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    offloaded = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    offloaded.load_state_dict(plain.state_dict())
    one, other = makers[kind](plain.parameters()), OnTheHost(makers[kind](offloaded.parameters()))
    for number in range(6):
        if number == 3:  # a run that is resumed in the middle
            saved = other.state_dict()
            other = OnTheHost(makers[kind](offloaded.parameters()))
            other.load_state_dict(saved)
        for model, optimizer in ((plain, one), (offloaded, other)):
            optimizer.zero_grad()
            model(torch.arange(8.0) * number).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True))


def test_a_learning_rate_that_changes_reaches_the_optimizer_within() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = OnTheHost(torch.optim.SGD([weight], lr=1.0))
    optimizer.param_groups[0]["lr"] = 0.5
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight, torch.full((4, 4), 0.5))


@pytest.mark.cuda
@pytest.mark.parametrize("knob", ["activation_offload", "optimizer_offload"])
def test_on_a_gpu_it_trains_the_same_in_less_memory(knob: str) -> None:
    """Not yet run: no GPU was at hand when this was written."""
    large = {"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 8, "hidden_dim": 512}}
    data = {"target": "tests.support.tiny:data", "kwargs": {"seq_len": 512, "vocab_size": 256}}
    device, losses, peaks = torch.device("cuda"), [], []
    for knobs in ([], [knob]):
        run = Run(config(model=large, data=data, micro_batch_size=16, statistics=False, memory_knobs=knobs), device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            run.step()
        losses.append([step.loss for step in run.read()])
        peaks.append(torch.cuda.max_memory_allocated(device))
        del run
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert peaks[1] < peaks[0]


class OnTheGpu(TorchDispatchMode):
    """Sees what is put there that is more than a number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if isinstance(returned, Tensor) and returned.is_cuda and returned.dim():
            self.found.append(str(func))
        return returned


def test_a_state_is_loaded_without_a_visit_to_the_device() -> None:
    """With all moments there at once, a run whose weights leave them no room could not go on from its checkpoint. The tensors have no values."""
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(8, 4, device="cuda")), nn.Parameter(torch.empty(4, device="cuda"))]
        plain = torch.optim.AdamW([torch.empty_like(weight, device="cpu", requires_grad=True) for weight in weights])
        for group in plain.param_groups:
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight)
        plain.step()
        optimizer = OnTheHost(torch.optim.AdamW(weights))
        with OnTheGpu() as seen:
            optimizer.load_state_dict(plain.state_dict())
    assert not seen.found
    assert [[*optimizer.state[weight]] for weight in weights] == [["step", "exp_avg", "exp_avg_sq"]] * 2
    assert {value.device.type for weight in weights for value in optimizer.state[weight].values()} == {"cpu"}
