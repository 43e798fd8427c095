"""Run a workload's program as `python` does, and tell its validation loss over its training seconds.

Its training stays as it is.

    python watched.py FILE SPEC WORDS...        SPEC: a JSON object of the fields of `Spec`

Training seconds run from the first forward pass that has gradients on; evaluations, its own (a forward pass without
gradients until the next one with) and those made here, are not among them. What is drawn here comes from generators
of its own, and the program's are put back.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

Namespace = dict[str, Any]
"""The program's own globals."""


@dataclass(frozen=True)
class Spec:
    workload: str
    seed: int
    every: int
    """Optimizer steps from one evaluation made here to the next."""
    last: list[int]
    """Which step may be the last: it is evaluated, too."""
    printed: str
    compile: bool


@dataclass
class Clock:
    """Wall and CPU seconds of training."""

    spent: tuple[float, float] = (0.0, 0.0)
    since: tuple[float, float] | None = None

    def start(self) -> None:
        if self.since is None:
            self.since = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        self.spent, self.since = self.now(), None

    def now(self) -> tuple[float, float]:
        if self.since is None:
            return self.spent
        return (
            self.spent[0] + time.perf_counter() - self.since[0],
            self.spent[1] + time.process_time() - self.since[1],
        )


@dataclass
class Watched:
    spec: Spec
    clock: Clock = field(default_factory=Clock)
    steps: int = 0
    model: torch.nn.Module | None = None
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)
    """(steps, training seconds, their CPU seconds, validation loss)."""

    def note(self, loss: float) -> None:
        self.curve.append((self.steps, *self.clock.now(), loss))

    def before_forward(self, module: torch.nn.Module, _: object) -> None:
        if not torch.is_grad_enabled():
            if self.clock.since is not None:
                self.clock.stop()
            return
        if self.clock.since is None:
            self.clock.start()
        if self.model is None and module.training and any(True for _ in module.parameters()):
            self.model = module
            if self.spec.compile:
                module.compile()

    def after_step(self, *_: object) -> None:
        self.steps += 1
        if not self.spec.printed and (self.steps % self.spec.every == 0 or self.steps in self.spec.last):
            self.evaluate()

    def evaluate(self) -> None:
        assert self.model is not None
        running = self.clock.since is not None
        self.clock.stop()
        with undisturbed(self.model):
            loss = LOSSES[self.spec.workload](vars(sys.modules["__main__"]), self.model)
        self.note(loss)
        if running:
            self.clock.start()


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Leave the program's generators and the mode of every module as they were; gradients are off within."""
    modes = [(module, module.training) for module in model.modules()]
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    model.eval()
    with torch.no_grad():
        yield
    for module, mode in modes:
        module.training = mode
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def of_nanogpt(main: Namespace, model: torch.nn.Module) -> float:
    """The mean over 320 windows, evenly over the validation text, of the same number of tokens each."""
    data = np.memmap(os.path.join(main["data_dir"], "val.bin"), dtype=np.uint16, mode="r")
    size = main["block_size"]
    begins = np.linspace(0, len(data) - size - 1, 320).astype(int)
    tokens = torch.from_numpy(np.stack([data[at : at + size + 1] for at in begins]).astype(np.int64))
    return float(np.mean([float(model(part[:, :-1], part[:, 1:].contiguous())[1]) for part in tokens.split(64)]))


def of_tiny_diffusion(main: Namespace, model: torch.nn.Module) -> float:
    """The mean over all time steps, of 1,000 points that the program's data set would have with another seed."""
    rng = np.random.default_rng
    np.random.default_rng = lambda seed: rng(seed + 1)
    try:
        (points,) = main["datasets"].get_dataset(main["config"].dataset, 1_000).tensors
    finally:
        np.random.default_rng = rng
    noise = torch.randn(points.shape, generator=torch.Generator().manual_seed(1))
    scheduler = main["noise_scheduler"]
    losses = []
    for step in range(scheduler.num_timesteps):
        steps = torch.full((len(points),), step)
        losses.append(float(functional.mse_loss(model(scheduler.add_noise(points, noise, steps), steps), noise)))
    return float(np.mean(losses))


def of_fno(main: Namespace, model: torch.nn.Module) -> float:
    """Its trainer's own figure on the test fields: the loss that it trains on."""
    processor = main["data_processor"]
    mode = processor.training
    found = main["trainer"].evaluate({"h1": main["h1loss"]}, main["test_loaders"][16], log_prefix="16")
    processor.train(mode)
    return float(found["16_h1"])


def of_mnist1d(main: Namespace, model: torch.nn.Module) -> float:
    data = main["data"]
    return float(functional.cross_entropy(model(torch.Tensor(data["x_test"])), torch.LongTensor(data["y_test"])))


def of_chemprop(main: Namespace, model: torch.nn.Module) -> float:
    """The squared error on the validation molecules, in the unit of the scaled targets that its trainer tells it in."""
    import lightning.pytorch

    trainer = next(one for one in gc.get_objects() if isinstance(one, lightning.pytorch.Trainer))
    whole: Any = trainer.lightning_module
    loader: Any = trainer.val_dataloaders
    errors = list[torch.Tensor]()
    with undisturbed(whole):
        for graphs, atoms, extra, targets, *_ in loader:
            errors.append((whole.predictor.train_step(whole.fingerprint(graphs, atoms, extra)) - targets) ** 2)
    return float(torch.cat(errors).mean())


LOSSES: dict[str, Callable[[Namespace, torch.nn.Module], float]] = {
    "nanogpt": of_nanogpt,
    "tiny-diffusion": of_tiny_diffusion,
    "fno-darcy": of_fno,
    "mnist1d-cnn": of_mnist1d,
    "chemprop-solubility": of_chemprop,
}
"""Those that print none, or too rarely."""


def printing_watched(watched: Watched) -> None:
    """Note the loss of every line that has one, as the program prints it."""
    pattern, write, line = re.compile(watched.spec.printed), sys.stdout.write, ""

    def noted(text: str) -> int:
        nonlocal line
        *whole, line = (line + text).split("\n")
        for one in whole:
            if found := pattern.search(one):
                watched.note(float(found.group(1)))
        return write(text)

    sys.stdout.write = noted


def run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    told, spec, *words = sys.argv[1:]
    watched = Watched(Spec(**json.loads(spec)))
    random.seed(watched.spec.seed)
    np.random.seed(watched.spec.seed)
    torch.manual_seed(watched.spec.seed)
    main_process = os.getpid()
    torch.nn.modules.module.register_module_forward_pre_hook(watched.before_forward)
    register_optimizer_step_post_hook(watched.after_step)
    if watched.spec.printed:
        printing_watched(watched)
    namespace = sys.modules["__main__"]
    try:
        run(words)
    finally:
        if os.getpid() == main_process and watched.steps:
            sys.modules["__main__"] = namespace
            with open(told, "w") as file:
                json.dump({"steps": watched.steps, "seconds": watched.clock.now(), "curve": watched.curve}, file)


if __name__ == "__main__":
    main()
