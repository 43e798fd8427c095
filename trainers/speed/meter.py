"""What a run measures of itself. Figures stay on the device until an interval is read, so that no step has to wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.micro_batches import Tokens
from batchscout.trainers.device.device_peak import device_peak
from batchscout.trainers.device.memory import memory_of
from batchscout.trainers.model.models import num_batch_norms
from batchscout.trainers.noise.gradient_noise import NoiseLog
from batchscout.trainers.noise.noise_estimate import SquaredNorms
from batchscout.trainers.speed import throughput
from batchscout.trainers.speed.flops import Work


class TokenCount:
    """What the steps that were cut by tokens held, over all ranks. A run's count goes on over its processes."""

    def __init__(self) -> None:
        self._sums = Counter(num_steps=0, num_micro_batches=0, num_tokens=0, num_padded_tokens=0)

    def add(self, step: Tokens) -> None:
        self._sums.update(num_steps=1, **vars(step))

    def metrics(self) -> dict[str, float]:
        """Return {micro_batches_per_step, tokens_per_step, padding_share}: means over the run, and the share of padding in what was
        computed; nothing where no step was cut by tokens."""
        sums = self._sums
        if not sums["num_steps"]:
            return {}
        return {
            "micro_batches_per_step": sums["num_micro_batches"] / sums["num_steps"],
            "tokens_per_step": sums["num_tokens"] / sums["num_steps"],
            "padding_share": 1 - sums["num_tokens"] / sums["num_padded_tokens"],
        }

    def state(self) -> dict[str, int]:
        return dict(self._sums)

    def load(self, state: dict[str, int]) -> None:
        self._sums = Counter(state)


class Meter:
    """Counts from its creation on: memory above what the process held then, seconds beside those of earlier
    processes."""

    def __init__(self, config: TrialConfig, device: torch.device, compile_seconds: float) -> None:
        """compile_seconds: the seconds already spent on compiling the run's code."""
        self.config, self.device = config, device
        self._device_peak = config.device_peaks.get(config.precision) or device_peak(
            device, config.precision, allow_tf32=config.allow_tf32
        )
        self.memory = memory_of(device)
        self.peak = self.memory.peak()
        self.clock, self.pace = throughput.StepClock(device), throughput.Pace()
        self._retries: dict[str, float] = {}
        self.num_micro_batches = config.split.num_micro_batches
        """Of each step since the phase began, over all ranks; the most of them where they are cut by tokens."""
        self.noise = NoiseLog(config.micro_batch_size, self.num_micro_batches)
        self.tokens = TokenCount()
        self._unread: list[Tensor] = []
        self._steps_to_time = throughput.NUM_WARMUP_STEPS
        self._loss_sum = self._num_targets = 0.0
        self._gradient_norm = 0.0
        self._loss: float | None = None
        self._observed: dict[str, float] = {}
        self.snapshot: dict[str, float] = {}
        self._train_seconds_before, self._compile_seconds = 0.0, compile_seconds

    def begin_step(self, num_micro_batches: int) -> None:
        """Where a phase of more or fewer micro-batches begins, begin anew: its steps are of another length, and the
        estimates of the noise need a fixed number. What was not read by then is not told apart, so read before it."""
        if num_micro_batches == self.num_micro_batches:
            return
        self.begin_pace()
        self.num_micro_batches = num_micro_batches
        self.noise = NoiseLog(self.config.micro_batch_size, num_micro_batches)

    def begin_pace(self) -> None:
        """Tell from here on the speed of the steps that follow. Those before have been read, and their time still counts."""
        self._train_seconds_before += self.pace.total_seconds()
        self.pace = throughput.Pace()
        self.clock.begin_load()
        self._steps_to_time = throughput.NUM_WARMUP_STEPS

    def end_of_step(self, loss_sum: Tensor, num_targets: Tensor, gradient_norm: Tensor, squares: Tensor | None) -> None:
        """squares: the sum of num_targets x |g_k|^2 over this rank's micro-batches, where it is known."""
        if squares is not None:
            self.noise.add(squares * self.config.world_size / num_targets, gradient_norm, num_targets)
        self._unread.append(torch.stack([loss_sum, num_targets, gradient_norm.double()]))
        self.clock.end_of_step()
        self._steps_to_time -= 1
        if self._steps_to_time == 0:  # those that follow are timed
            self.peak.end_warm_up()

    def read(self) -> list[tuple[float, float, float]]:
        """Bring the steps since the last read to the host. Return (the mean loss, the gradient's norm, the share of its time that it
        waited for data) of each."""
        times = self.clock.read()
        self._retries = self.peak.retries()  # before an evaluation, whose tensors have other sizes, makes more of them
        self.noise.read()
        steps = torch.stack(self._unread).tolist() if self._unread else []
        self._unread = []
        for (loss_sum, num_targets, gradient_norm), taken in zip(steps, times, strict=True):
            self._loss_sum += loss_sum
            self._num_targets += num_targets
            self.pace.add(taken.seconds, num_targets, taken.data_seconds)
            self._gradient_norm = gradient_norm
        if not all(num_targets for _, num_targets, _ in steps):
            raise ValueError(
                f"a step had no targets: all labels of its samples are masked (effective batch {self._effective_batch_size}); leave such "
                "samples out, or raise the effective batch"
            )
        return [
            (loss_sum / num_targets, gradient_norm, taken.data_seconds / taken.seconds)
            for (loss_sum, num_targets, gradient_norm), taken in zip(steps, times, strict=True)
        ]

    def observe(self, found: dict[str, float]) -> None:
        """Take in figures of the last step alone; they stand until there are newer ones."""
        self._observed |= found

    def metrics(self, module: nn.Module, num_train_samples: int | None, work: Work | None) -> dict[str, float]:
        """Return all figures; `loss` is the mean since the last call. A figure that is not available has no key."""
        if self._num_targets:
            self._loss = self._loss_sum / self._num_targets
            self._loss_sum = self._num_targets = 0.0
        found: dict[str, float | None] = {
            "loss": self._loss,
            "gradient_norm": self._gradient_norm,
            "peak_memory_bytes": self.peak.peak_bytes(),
            "num_batch_norms": num_batch_norms(module),
            **self.memory.metrics(),
            **self._retries,
            **self.clock.load.metrics(),
            **self._seconds(),
            **self.tokens.metrics(),
            **asdict(self.noise.estimate()),
            **self._observed,
            **self.snapshot,
            **self._rates(num_train_samples, work),
        }
        return {key: value for key, value in found.items() if value is not None}

    def _seconds(self) -> dict[str, float]:
        return {
            "train_seconds": self._train_seconds_before + self.pace.total_seconds(),
            "compile_seconds": self._compile_seconds,
        }

    def _rates(self, num_train_samples: int | None, work: Work | None) -> dict[str, float]:
        step_seconds, tokens_per_second = self.pace.median_step_seconds(), self.pace.median_rate()
        if step_seconds is None or tokens_per_second is None:
            return {}
        samples_per_second = self._effective_batch_size / step_seconds
        data_wait = self.pace.data_wait()
        assert data_wait is not None, "it is told of the same steps"
        return {
            "step_seconds": step_seconds,
            **({"epoch_seconds": num_train_samples / samples_per_second} if num_train_samples else {}),
            "tokens_per_second": tokens_per_second,
            "data_wait": data_wait,
            **throughput.utilisation(work, self._device_peak, samples_per_second / self.config.world_size),
        }

    @property
    def _effective_batch_size(self) -> int:
        return self.config.micro_batch_size * self.num_micro_batches

    def state(self) -> dict[str, Any]:
        """Return what a later process must know to continue the counts."""
        return {
            **self._seconds(),
            "noise_steps": [tuple(step) for step in self.noise.steps],
            "observed": self._observed,
            "snapshot": self.snapshot,
            "micro_batch_size": self.config.micro_batch_size,
            "num_micro_batches": self.num_micro_batches,
            "tokens": self.tokens.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._train_seconds_before = state["train_seconds"]
        self._compile_seconds += state["compile_seconds"]
        self._observed, self.snapshot = state["observed"], state["snapshot"]
        self.tokens.load(state["tokens"])
        if state["micro_batch_size"] == self.config.micro_batch_size:  # norms of other micro-batches say something else
            self.begin_step(state["num_micro_batches"])
            self.noise.steps.extend(SquaredNorms(*step) for step in state["noise_steps"])
