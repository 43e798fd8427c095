"""Machines of known memory and speed, and the frontier stage played on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.messages import Message
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import Proposal
from batchscout.trainers.config import TrialConfig
from tests.support.known_stage import Known
from tests.support.worlds import MIB

LIMIT = 100


@dataclass
class World:
    """What a trial would measure. base, slope: MiB of each kind of checkpointing, and for every sample; rate: tokens/s of its best
    size."""

    base: dict[str, float] = field(default_factory=lambda: {"none": 20.0, "full": 15.0})
    slope: dict[str, float] = field(default_factory=lambda: {"none": 4.0, "full": 1.0})
    rate: dict[str, float] = field(default_factory=lambda: {"none": 1000.0, "full": 500.0})
    half_rate_size: float = 20.0
    noise: Callable[[Proposal], float] = lambda proposal: 1.0
    slowed: Callable[[Proposal], bool] = lambda proposal: False
    others: Callable[[Proposal], float] = lambda proposal: 0.0
    """What other processes take of the CPUs."""
    waits: Callable[[Proposal], float] = lambda proposal: 0.0
    """The share of a step's time that it waits for data."""
    more_memory: Callable[[Proposal], float] = lambda proposal: 0.0
    chunked: tuple[float, float] = (0.5, 1.0)
    """Of cross-entropy in chunks: times the rate, times the memory of a sample."""
    one_graph: tuple[float, float] = (0.5, 1.0)
    """Of the model as one graph: the same."""
    knobs: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each memory knob: the same."""
    knob_loss: dict[str, float] = field(default_factory=dict)
    """What a knob adds to the loss."""
    loss_of_seed: Callable[[int], float] = lambda seed: 3.0 + 0.01 * seed
    device_memory_bytes: float | None = None
    """What a GPU had for its process; None on a CPU host."""

    def peak(self, config: TrialConfig) -> float:
        mode = str(config.activation_checkpointing)
        memory = math.prod(memory for _, memory in self.variants_of(config))
        longer = config.data.kwargs.get("seq_len", 1)
        return self.base[mode] + memory * self.slope[mode] * config.micro_batch_size * longer

    def speed(self, config: TrialConfig) -> float:
        speed = math.prod(speed for speed, _ in self.variants_of(config))
        size = config.micro_batch_size
        return self.rate[str(config.activation_checkpointing)] * speed * size / (size + self.half_rate_size)

    def variants_of(self, config: TrialConfig) -> list[tuple[float, float]]:
        chunked, one_graph = config.model.kwargs.get("cross_entropy") == "chunked", config.compile == "whole"
        knobs = [self.knobs[name] for name in config.memory_knobs]
        return [self.chunked] * chunked + [self.one_graph] * one_graph + knobs

    def message(self, config: TrialConfig, share: float = 1.0) -> Message:
        """Its last word. share: of the speed that it would have alone on the machine."""
        rate, peak = share * self.speed(config), self.peak(config)
        if peak > LIMIT:
            return Message(outcome="out_of_memory", reason="x")
        return Message({"tokens_per_second": rate, "peak_memory_bytes": peak * MIB}, outcome="complete")

    def end(self, known: Known, proposal: Proposal) -> None:
        config = proposal.config
        peak = self.peak(config) + self.more_memory(proposal)
        if peak > LIMIT:
            known.end(proposal.id, "out_of_memory", "x", Cause.OUT_OF_MEMORY)
            return
        loss = self.loss_of_seed(config.seed) + sum(self.knob_loss.get(name, 0.0) for name in config.memory_knobs)
        if proposal.control and not math.isfinite(loss):
            known.end(proposal.id, "pruned", "the loss is nan", Cause.DIVERGED)
            return
        rate = self.speed(config) * self.noise(proposal)
        known.end(
            proposal.id,
            tokens_per_second=rate,
            step_seconds=2 * config.micro_batch_size / rate,
            peak_memory_bytes=peak * MIB,
            val_loss=loss if config.evaluation_samples else None,
            gpu_slowed=float(self.slowed(proposal)),
            other_cpu_share=self.others(proposal),
            data_wait=self.waits(proposal),
            data_workers=2.0,
            device_memory_bytes=self.device_memory_bytes,
        )


def played(
    world: World,
    facts: Facts | None = None,
    *,
    then: tuple[str, ...] = (),
    study: dict[str, Any] | None = None,
    **stage: Any,
) -> tuple[Known, Conclusion]:
    """The stage from its first probe to its conclusion, under a limit of 100 MiB with 5 % of headroom.

    then: the stages that the study has after it; study: its other keys.
    """
    modes = {"type": "frontier", "activation_checkpointing": list(world.base)}
    keys: dict[str, Any] = {"sample_budget": 100_000, "memory_limit": f"{LIMIT}MiB"} | (study or {})
    known = Known(modes | stage, facts, more_stages=[{"type": name} for name in then], **keys).play(world.end)
    return known, known.conclude()
