"""Everything that moves in a training run, and one optimizer step of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainers import memory, throughput
from trainers.accumulation import accumulate_gradient, normalise_and_clip, over_all_ranks
from trainers.activation_checkpointing import apply_to_blocks
from trainers.checkpoint import load_newest, random_state, set_random_state
from trainers.config import DataConfig, TrialConfig
from trainers.data import SampleOrder, SampleSet, fetch, load_data, micro_batch_numbers, move
from trainers.equivalence import Weights, weights_of
from trainers.gradient_noise import MicroGradientNorms, NoiseLog
from trainers.models import LossFunction, build_model, loss_function, num_batch_norms
from trainers.optim import build_optimizer, learning_rate_at


class Run:
    """A model, its optimizer and its place in the data. `step()` moves them; nothing reads the device until `read()`."""

    def __init__(self, config: TrialConfig, device: torch.device, compile_seconds: float = 0.0) -> None:
        """compile_seconds: what was spent on compiling its code before."""
        self.config, self.device = config, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size != config.world_size:
            raise ValueError(
                f"world_size is {config.world_size}, but {world_size} process(es) run this trial; "
                f"start {config.world_size} ranks or set world_size: {world_size}"
            )
        self.peak = memory.PeakMeter(device)
        self.train_set, self.val_set = _open_data(config.data.model_dump_json())
        self.order = SampleOrder(len(self.train_set), config.seed)
        self.module = initial_module(config, self.train_set, device)
        self.model = self._distributed(apply_to_blocks(self.module, config))
        self.loss_function = _autocasting(loss_function(config.loss), config, device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.module, config)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self.norms = MicroGradientNorms(self.parameters)
        num_micro_batches = config.gradient_accumulation_steps * config.world_size
        self.noise = NoiseLog(config.micro_batch_size, num_micro_batches)
        self.clock = throughput.StepClock(device)
        self.num_steps = 0
        self._unread: list[Tensor] = []
        self._loss_sum = self._num_targets = 0.0
        self._gradient_norm = 0.0
        self._targets_of_steps: list[float] = []
        self._loss: float | None = None
        # Of the processes that this run was in before, too.
        self._train_seconds_before, self._compile_seconds_before = 0.0, compile_seconds
        torch.manual_seed(config.seed * config.world_size + self.rank)  # dropout differs between ranks
        self.clock.start()

    @property
    def samples_seen(self) -> int:
        return self.num_steps * self.config.effective_batch_size

    def step(self) -> None:
        """One optimizer update from one effective batch."""
        config = self.config
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(config, self.samples_seen)
        scale = (
            self.scaler.scale(torch.ones((), device=self.device)) / config.micro_batch_size
        )  # keeps float16 in range
        loss_sum, num_targets = accumulate_gradient(
            self.model,
            self.loss_function,
            self._micro_batches(self.num_steps - 1),
            num_micro_batches=config.gradient_accumulation_steps,
            scale=scale,
            norms=self.norms,
        )
        loss_sum, num_targets = over_all_ranks(loss_sum, num_targets)
        self.scaler.unscale_(self.optimizer)
        factor = config.micro_batch_size * config.world_size / num_targets
        gradient_norm = normalise_and_clip(self.parameters, factor, config.optimizer.max_gradient_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.noise.add(self.norms.take() * config.world_size / num_targets, gradient_norm)
        self._unread.append(torch.stack([loss_sum, num_targets, gradient_norm.double()]))
        self.clock.end_of_step()

    def read(self) -> list[float]:
        """Bring the steps since the last read to the host: the mean loss of each."""
        self.clock.read()
        self.noise.read()
        steps = torch.stack(self._unread).tolist() if self._unread else []
        self._unread = []
        for loss_sum, num_targets, gradient_norm in steps:
            self._loss_sum += loss_sum
            self._num_targets += num_targets
            self._targets_of_steps.append(num_targets)
            self._gradient_norm = gradient_norm
        if not all(num_targets for _, num_targets, _ in steps):
            raise ValueError(
                f"one of the steps up to {self.num_steps} had no targets: every label of its "
                f"{self.config.effective_batch_size} samples is masked; leave such samples out, or raise the effective batch"
            )
        return [loss_sum / num_targets for loss_sum, num_targets, _ in steps]

    def metrics(self) -> dict[str, float]:
        """What there is to say, the loss since the last call; keys are absent where a figure is not available."""
        if self._num_targets:
            self._loss = self._loss_sum / self._num_targets
            self._loss_sum = self._num_targets = 0.0
        found: dict[str, float | None] = {
            "samples_seen": self.samples_seen,
            "loss": self._loss,
            "gradient_norm": self._gradient_norm,
            "learning_rate": learning_rate_at(self.config, self.samples_seen),
            "peak_memory_bytes": self.peak.peak_bytes(),
            "num_batch_norms": num_batch_norms(self.module),
            "train_seconds": self._train_seconds(),
            "compile_seconds": self._compile_seconds(),
            "device_memory_bytes": memory.device_bytes(self.device),
            **asdict(self.noise.estimate()),
            **self._rates(),
        }
        return {key: value for key, value in found.items() if value is not None}

    def _train_seconds(self) -> float:
        return self._train_seconds_before + self.clock.total_seconds()

    def _compile_seconds(self) -> float:
        return self._compile_seconds_before + self.clock.compile_seconds()

    def _rates(self) -> dict[str, float]:
        step_seconds = self.clock.median_step_seconds()
        tokens_per_second = self.clock.median_rate(self._targets_of_steps)
        if step_seconds is None or tokens_per_second is None:
            return {}
        return {
            "step_seconds": step_seconds,
            "epoch_seconds": step_seconds * len(self.train_set) / self.config.effective_batch_size,
            "tokens_per_second": tokens_per_second,
            **throughput.utilisation(self.module, self.config, self.device, tokens_per_second),
        }

    def state(self, report: dict[str, Any] | None) -> dict[str, Any]:
        """All that a bitwise continuation needs, and what is about to be reported; every rank calls it, rank 0 keeps it."""
        return {
            "report": report,
            "num_steps": self.num_steps,
            "train_seconds": self._train_seconds(),
            "compile_seconds": self._compile_seconds(),
            "effective_batch_size": self.config.effective_batch_size,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "noise_steps": self.noise.steps,
            "random": _of_every_rank(random_state(self.device)),
        }

    def resume(self, directory: Path) -> dict[str, Any] | None:
        """Go on from the newest checkpoint below `directory`; returns the report that was saved with it, if any."""
        state = load_newest(directory / "checkpoints")
        if state is None:
            return None
        before, now = state["effective_batch_size"], self.config.effective_batch_size
        if before != now:
            raise ValueError(
                f"the checkpoint in {directory} was made with an effective batch of {before}, and this run has {now}; "
                "go on with the batch it was made with, or start in another directory"
            )
        self.num_steps = state["num_steps"]
        self._train_seconds_before = state["train_seconds"]
        self._compile_seconds_before += state["compile_seconds"]
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.noise.steps = [tuple(pair) for pair in state["noise_steps"]]
        if self.rank < len(state["random"]):
            set_random_state(state["random"][self.rank], self.device)
        return state["report"]

    def initial_weights(self) -> Weights:
        """The weights this run began with, made again from its seed."""
        return weights_of(initial_module(self.config, self.train_set, torch.device("cpu")))

    def _micro_batches(self, step: int) -> Iterator[Any]:
        config = self.config
        micro_steps = range(config.gradient_accumulation_steps)
        for micro_step in reversed(micro_steps) if config.reverse_micro_batches else micro_steps:
            numbers = micro_batch_numbers(
                step,
                micro_step,
                self.rank,
                micro_batch_size=config.micro_batch_size,
                gradient_accumulation_steps=config.gradient_accumulation_steps,
                world_size=config.world_size,
            )
            yield move(fetch(self.train_set, self.order.indices(numbers)), self.device)

    def _distributed(self, model: nn.Module) -> nn.Module:
        if self.config.world_size == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


@functools.lru_cache(maxsize=1)
def _open_data(config: str) -> tuple[SampleSet, SampleSet]:
    """Kept open from trial to trial: finding and checking the files is most of what a short trial would cost."""
    return load_data(DataConfig.model_validate_json(config))


def initial_module(config: TrialConfig, train_set: Any, device: torch.device) -> nn.Module:
    """The model as its seed makes it, the same on every rank and device: drawn on the host, then moved."""
    torch.manual_seed(config.seed)
    return build_model(config.model, train_set).to(device)


def _of_every_rank(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    if not dist.is_initialized():
        return [state]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    return gathered


def _autocasting(loss_function: LossFunction, config: TrialConfig, device: torch.device) -> LossFunction:
    """The loss in the trial's precision; backward passes stay outside of autocast, as torch asks."""
    if config.precision == "float32":
        return loss_function

    def cast(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, getattr(torch, config.precision)):
            return loss_function(module, batch)

    return cast
