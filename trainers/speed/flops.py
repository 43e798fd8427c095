"""The FLOPs of a training step, counted and not assumed: matrix products, convolutions and attention.

They are counted on fake tensors, as eager code dispatches them: no device computes anything. Attention counts in full,
causal or not, and its backward pass as two forward passes, so that a transformer has 6 N + 12 L H Q T a token (PaLM,
arXiv 2204.02311, appendix B). Element-wise operations and the optimizer count nothing.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.samples import SampleSet, first_of, load_data
from batchscout.trainers.model.activation_checkpointing import apply_to_blocks
from batchscout.trainers.model.contract import NoLossAndCount, check_loss, fake_batch
from batchscout.trainers.model.losses import LossFunction, loss_function
from batchscout.trainers.model.models import build_model
from batchscout.trainers.model.shapes import NumbersAre, shapes_alone, why_not_followed

# BatchNorm refuses a batch in which a channel has one value.
COUNTED_SAMPLES = 2


@dataclass(frozen=True)
class Work:
    """The FLOPs of the forward and backward pass of one sample, as a mean over the samples that a run takes."""

    model_flops: float
    """What the model asks for, without recomputation."""
    hardware_flops: float | None
    """With what activation checkpointing computes again. None for a memory budget, where only the compiler knows."""


class NotCountable(Exception):
    """The FLOPs of this model cannot be counted; the message says why."""


class _Counts(dict[int, float]):
    """FLOPs of one sample, by its length. Of samples that do not differ in length one was counted, as length 0."""

    def mean(self, lengths: np.ndarray) -> float:
        """Return the mean over samples of these lengths. Padding is no work.

        Attention grows with the square of the length and all else with the length, so three lengths tell all others.
        """
        unit = max(self) or 1
        line = np.polyfit(np.array(list(self)) / unit, list(self.values()), deg=len(self) - 1)
        return float(np.polyval(line, lengths / unit).mean())


def work_of(config: TrialConfig, module: nn.Module, train_set: SampleSet) -> Work | None:
    """Return the work of a sample; None, with a warning that says why, where it cannot be counted.

    module: as it was built, neither checkpointed nor compiled; it stays as it is. Raises NoLossAndCount where it does
    not return what a model must.
    """
    eager = config.model_copy(update={"compile": False})
    model = _counts_of(eager.model_copy(update={"activation_checkpointing": "none"}), module, train_set)
    if model is None:
        return None
    hardware = None if isinstance(config.activation_checkpointing, float) else _counts_of(eager, module, train_set)
    lengths = _lengths_taken(train_set)
    return Work(model.mean(lengths), None if hardware is None else hardware.mean(lengths))


_known: dict[str, _Counts | None] = {}


def _counts_of(eager: TrialConfig, module: nn.Module, train_set: SampleSet) -> _Counts | None:
    """Return what `work_of` is made of. A process counts each model once in each mode of checkpointing."""
    key = eager.model_dump_json(include={"model", "loss", "data", "activation_checkpointing"})
    if key not in _known:
        try:
            _known[key] = _count(lambda fake: apply_to_blocks(_fake_copy(module, fake), eager), eager, train_set)
        except NotCountable as error:
            warnings.warn(f"MFU is not reported, since the model's FLOPs cannot be counted: {error}", stacklevel=2)
            _known[key] = None
    return _known[key]


def flops_per_sample(config: TrialConfig) -> float:
    """Return the FLOPs of forward and backward of one sample, without recomputation, of a model that need not exist.

    Raises NotCountable.
    """
    train_set = first_of(load_data(config.data)[0], 1)
    counts = _count(lambda _: build_model(config.model, train_set), config, train_set)
    return counts.mean(_lengths_taken(train_set))


def _count(make: Callable[[FakeTensorMode], nn.Module], config: TrialConfig, train_set: SampleSet) -> _Counts:
    loss = loss_function(config.loss)
    samples = {length: fetch(train_set, [index]) for length, index in _examples(train_set).items()}
    counts = _Counts()
    for length, sample in samples.items():
        with shapes_alone() as fake:
            with NumbersAre(0):
                module = make(fake)
            with _naming_the_cause():
                counts[length] = _count_one(module, loss, sample)
    return counts


@contextlib.contextmanager
def _naming_the_cause() -> Iterator[None]:
    """Turn whatever a user's code raises where its tensors have no values into NotCountable."""
    try:
        yield
    except (NotCountable, NoLossAndCount):
        raise
    except Exception as error:
        raise NotCountable(str(why_not_followed(error))) from error


def _count_one(module: nn.Module, loss: LossFunction, sample: Any) -> float:
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    # Without oneDNN an LSTM is taken apart into products; with it, it is one operation that hides them.
    with torch.backends.mkldnn.flags(enabled=False), counter, _RefusesUnknown(counter):
        loss_sum, _ = check_loss(loss(module, fake_batch(sample, COUNTED_SAMPLES)))
        loss_sum.backward()
    return counter.get_total_flops() / COUNTED_SAMPLES


def _fake_copy(module: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Return a copy whose tensors have shapes alone. What a forward keeps in its module must not stay in the real
    one."""
    with _naming_the_cause(), FakeCopyMode(fake):
        return copy.deepcopy(module)


def _examples(train_set: SampleSet) -> dict[int, int]:
    """Return up to three samples of different lengths, as {length: index}: a shortest, a middle and a longest one."""
    lengths = getattr(train_set, "lengths", None)
    if lengths is None:
        return {0: 0}
    order = np.argsort(np.asarray(lengths), kind="stable")
    return {int(lengths[index]): int(index) for index in order[[0, len(order) // 2, -1]]}


def _lengths_taken(train_set: SampleSet) -> np.ndarray:
    lengths = getattr(train_set, "lengths", None)
    return np.zeros(1) if lengths is None else np.asarray(lengths)


# What torch's counter does not know, or counts otherwise


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products for each head: (T, Q) x (Q, S), and (T, S) x (S, V)."""
    *batch_and_heads, seq, head_dim = query
    return 2 * int(np.prod(batch_and_heads)) * seq * key[-2] * (head_dim + value[-1])


def _attention_backward(_gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * _attention(query, key, value)


def _convolution_backward(
    gradient: Any, x: Any, weight: Any, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: int, wanted: Any, **_: Any,
) -> int:  # fmt: skip
    """Each gradient takes as many products as the forward pass. torch's formula has `groups` times as many for the
    weight's."""
    return conv_flop_count(x, weight, gradient, transposed=transposed) * sum(wanted[:2])


_ATEN = torch.ops.aten


_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN.convolution_backward: _convolution_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
# Operations of torch's own that multiply, and that its counter has no formula for.
_UNCOUNTED = {_ATEN.mkldnn_rnn_layer, _ATEN._cudnn_rnn, _ATEN._trilinear}


class _RefusesUnknown(TorchDispatchMode):
    """Raises NotCountable at an operation whose FLOPs are not known: an extension's, if it has not registered any."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self._counted = counter.flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = getattr(func, "_overloadpacket", func)
        foreign = func.namespace not in ("aten", "prim", "prims", "higher_order") or operation in _UNCOUNTED
        if foreign and operation not in self._counted:
            raise NotCountable(
                f"it calls {operation}, whose FLOPs torch does not know; register them with "
                "torch.utils.flop_counter.register_flop_formula"
            )
        return func(*args, **(kwargs or {}))
