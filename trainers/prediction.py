"""Peak memory and FLOPs of a training step without taking it: fake tensors on the CPU, counted by torch's own trackers.

Eager code only: they see what is dispatched, and a compiled graph plans its buffers by itself.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainers.activation_checkpointing import apply_to_blocks
from trainers.config import TrialConfig
from trainers.contract import fake_batch
from trainers.data import fetch, load_data
from trainers.models import build_model, loss_function
from trainers.optim import build_optimizer


def predict_peaks(config: TrialConfig, micro_batch_sizes: list[int]) -> list[float]:
    """Bytes at the peak of a step with the optimizer's state in place, for each micro-batch size; `config` must not compile.

    Accumulation counts once: from the second micro-batch on, a gradient is held while the activations are.
    """
    assert not config.compile
    train_set, _ = load_data(config.data)
    sample = fetch(train_set, [0])
    return [_peak(config, train_set, sample, size) for size in micro_batch_sizes]


def _peak(config: TrialConfig, train_set: Any, sample: Any, micro_batch_size: int) -> float:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracker warns of every kind of tensor that it has not seen before
        model = apply_to_blocks(build_model(config.model, train_set), config)
        optimizer = build_optimizer(model, config)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        batch = fake_batch(sample, micro_batch_size)
        with tracker:
            for _ in range(2):  # the optimizer's state is made in the first step, the peak is in the second
                for _ in range(min(2, config.gradient_accumulation_steps)):
                    loss_sum, _ = loss_function(config.loss)(model, batch)
                    loss_sum.backward()
                    tracker.reset_mod_stats()  # it refuses a module that it has statistics of
                optimizer.step()
                optimizer.zero_grad()
        return float(sum(peak["Total"] for peak in tracker.get_tracker_snapshot("peak").values()))


def flops_per_sample(config: TrialConfig) -> float:
    """Of forward and backward, recomputation left out: matrix products, convolutions and attention, as torch counts them.

    Causal attention counts in full: its fused kernels on a CPU are not counted at all, so it is taken apart into products.
    """
    train_set, _ = load_data(config.data)
    sample = fetch(train_set, [0])
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH):
        model = build_model(config.model, train_set)
        with FlopCounterMode(display=False) as counter:
            loss_sum, _ = loss_function(config.loss)(model, fake_batch(sample, 1))
            loss_sum.backward()
    return float(counter.get_total_flops())
