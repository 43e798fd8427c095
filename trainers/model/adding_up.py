"""Whether the losses of samples add up: what a split of a batch does to them, measured at fixed weights."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.batches import fetch, leaves, move, read
from batchscout.trainers.data.draws import drawing_on_device_from
from batchscout.trainers.data.packed_rows import Packed
from batchscout.trainers.data.samples import SampleSet
from batchscout.trainers.errors import LossFault
from batchscout.trainers.model.contract import check_first_loss, check_loss
from batchscout.trainers.model.losses import LossFunction
from batchscout.trainers.sources.kinds import library_of

# A sum over two equal samples is twice that over one, a mean the same: in between lies what else a loss may hold.
SUM_OR_MEAN = 1.5
# A mean that was multiplied by the number of samples is off by percents where these differ in targets and difficulty.
ADDS_UP_WITHIN = 0.01
# Losses hide a wrong weight of samples until the model tells them apart; gradients show it at once. So much is what autocast rounds
# away with room to spare.
GRADIENTS_ADD_UP_WITHIN = 0.03
# A GPU's threads may add in any order.
RANDOM_ABOVE = 1e-4


# A sample may have no targets. So many samples are tried until one has some.
SAMPLES_TO_CHECK = 8
SAMPLES_THAT_ADD_UP = 4
# Of so many, spread over the set, those that add up are chosen: a set may be sorted by its classes, and one of them rare.
SAMPLES_TO_CHOOSE_FROM = 128
SECONDS_TO_CHOOSE = 2.0
# Of a loss that random numbers move so many draws are compared.
DRAWS = 32

_TWO_LINES = """return the sum over the targets that count, and their number:
    loss_sum = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return loss_sum, (targets != -100).sum()
or leave the module as it is, and name the criterion in the study file: loss: cross_entropy"""


Figures = tuple[float, float]
"""(loss_sum, num_targets)."""
OnceAndTwice = tuple[Figures, Figures]
"""Those of one sample, and of the same sample taken twice."""


def check_sum(module: nn.Module, loss: LossFunction, train_set: SampleSet, device: torch.device) -> str | None:
    """Raise LossFault where the loss is a mean or the targets are not counted; return, in words, that it looks so where random numbers hide
    it. It takes four small forward passes, and more where what it draws (masks, noise) moves the loss.

    With such a loss the gradient is wrong as soon as a batch is split, and nothing else would show it.
    """
    for number in range(min(SAMPLES_TO_CHECK, len(train_set))):
        draws = list[OnceAndTwice]()
        # A number and not a time: the ranks of a sharded model take each pass together.
        while len(draws) < 2 or (len(draws) < DRAWS and _tells(draws) and _is_open(draws)):
            with drawing_on_device_from(len(draws), device):
                once, twice = (evaluated(module, loss, move(fetch(train_set, [number] * n), device)) for n in (1, 2))
            draws.append((once, twice))
        if _tells(draws):
            return _check_doubling(draws)
    return None


@torch.no_grad()
def evaluated(module: nn.Module, loss: LossFunction, batch: Any, *, training: bool = False) -> tuple[float, float]:
    module.train(training)
    with torch.random.fork_rng(cuda_devices(module)), eager():
        loss_sum, num_targets = check_loss(loss(module, batch))
    module.train()
    return loss_sum.item(), num_targets.item()


def eager() -> contextlib.AbstractContextManager[object]:
    """Let compiled modules run as they are written. Where the compiler was never imported none are, and to import it takes a
    second."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _tells(draws: Sequence[OnceAndTwice]) -> bool:
    """True where the sample has targets, and losses that are numbers."""
    has_targets = all(any(once[figure] for once, _ in draws) for figure in (0, 1))
    return has_targets and all(map(math.isfinite, itertools.chain(*itertools.chain(*draws))))


def _is_open(draws: Sequence[OnceAndTwice]) -> bool:
    """True where more draws tell more: of two that only happen to be equal, too."""
    return _differ(draws) or any(_beyond_a_mean(draws, figure)[0] < 0 for figure in (0, 1))


def _differ(draws: Sequence[OnceAndTwice]) -> bool:
    first, *others = ((*once, *twice) for once, twice in draws)
    pairs = itertools.chain.from_iterable(zip(first, other, strict=True) for other in others)
    return not all(math.isclose(one, other, rel_tol=RANDOM_ABOVE) for one, other in pairs)


def _beyond_a_mean(draws: Sequence[OnceAndTwice], figure: int) -> tuple[float, float]:
    """Return by how much that of two equal samples exceeds what halfway to a sum would have, and how far random numbers alone hardly ever
    move that. Below 0 it is a mean."""
    sign = math.copysign(1, sum(once[figure] for once, _ in draws))
    found = [sign * (twice[figure] - SUM_OR_MEAN * once[figure]) for once, twice in draws]
    return statistics.fmean(found), 3 * statistics.stdev(found) / math.sqrt(len(found))


def _check_doubling(draws: Sequence[OnceAndTwice]) -> str | None:
    hidden = list[str]()
    for figure, (name, is_wrong, remedy) in enumerate(
        (
            ("loss_sum", "it is a mean, and every split of a batch would train differently", _TWO_LINES),
            ("num_targets", "it does not count what loss_sum sums over", "return the number of targets in the batch"),
        )
    ):
        beyond, error = _beyond_a_mean(draws, figure)
        one, two = (statistics.fmean(taken[figure] for taken in column) for column in zip(*draws, strict=True))
        on_average = f", on average over {len(draws)} draws of what is random in it" if _differ(draws) else ""
        measured = f"the model's {name} is {one:.4g} for one sample and {two:.4g} for two equal ones{on_average}"
        if beyond < -error:
            raise LossFault(f"{measured}: {is_wrong}; {remedy}")
        if beyond < 0:
            hidden.append(f"{measured}, too few to tell; if {is_wrong}, {remedy}")
    return ". ".join(hidden) or None


@dataclass(frozen=True)
class NotAddingUp:
    """What differs between samples in one batch and the same one by one."""

    figure: Literal["loss_sum", "num_targets"]
    together: float
    one_by_one: float
    num_samples: int

    def __str__(self) -> str:
        return (
            f"the model's {self.figure} of {self.num_samples} samples is {self.together:.4g} in one batch, and "
            f"{self.one_by_one:.4g} added up one by one"
        )


@dataclass(frozen=True)
class GradientsNotAddingUp:
    """How far the gradients of samples one by one, added up, are from that of all in one batch."""

    apart: float
    """The norm of the difference over that of the batch's gradient."""
    num_samples: int

    def __str__(self) -> str:
        return (
            f"the gradient of {self.num_samples} samples in one batch is {self.apart:.0%} of its length away from the sum of theirs one by "
            "one (as it is where classes have weights)"
        )


Fault = NotAddingUp | GradientsNotAddingUp


def not_adding_up(module: nn.Module, loss: LossFunction, train_set: SampleSet, device: torch.device) -> Fault | None:
    """Return by how much the losses or gradients of some samples do not add up to those of all in one batch; None where they do, and
    where random numbers move the loss, so that nothing can be said."""
    indices = _unlike(train_set, SAMPLES_THAT_ADD_UP)
    train_set = read_once(train_set)

    def measured(part: Sequence[int], seed: int = 0) -> tuple[float, float]:
        with seeded(module, seed):
            return evaluated(module, loss, move(fetch(train_set, part), device))

    whole, with_other_numbers = measured(indices), measured(indices, seed=1)
    if not math.isclose(whole[0], with_other_numbers[0], rel_tol=RANDOM_ABOVE) or not all(map(math.isfinite, whole)):
        return None
    alone = [measured([index]) for index in indices]
    for loss_sum, num_targets in alone:
        check_first_loss(loss_sum, num_targets)
    figures: tuple[Literal["loss_sum"], Literal["num_targets"]] = ("loss_sum", "num_targets")
    for figure, of_all, parts in zip(figures, whole, zip(*alone, strict=True), strict=True):
        if not math.isclose(sum(parts), of_all, rel_tol=ADDS_UP_WITHIN):
            return NotAddingUp(figure, of_all, sum(parts), len(indices))
    apart = _gradients_apart(module, loss, train_set, indices, device)
    return GradientsNotAddingUp(apart, len(indices)) if apart is not None and apart > GRADIENTS_ADD_UP_WITHIN else None


def read_once(samples: SampleSet) -> SampleSet:
    """Return a set whose samples, once read, stay as they are; the same set where another library reads several at once, since it may pad
    them to each other."""
    is_one_by_one = library_of(getattr(samples, "__getitems__", None)) in ("", "torch", "datasets")
    return _Drawn(samples) if is_one_by_one else samples


class _Drawn:
    """A set whose samples, once read, stay as they are: each reading may change a sample at random, as pictures are turned or cut."""

    def __init__(self, samples: SampleSet) -> None:
        self._samples, self._drawn = samples, dict[int, Any]()
        if hasattr(samples, "collate_fn"):
            self.collate_fn = samples.collate_fn  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        if index not in self._drawn:
            (self._drawn[index],) = read(self._samples, [index])
        return self._drawn[index]


def _unlike(train_set: SampleSet, count: int) -> list[int]:
    """Return so many samples, of different classes as far as there are: what single numbers a sample has differ."""
    num_looked_at = min(SAMPLES_TO_CHOOSE_FROM, len(train_set))
    spread = [number * len(train_set) // num_looked_at for number in range(num_looked_at)]
    by_class, ends = dict[tuple[float, ...], int](), time.monotonic() + SECONDS_TO_CHOOSE
    for index in spread:
        singles = [leaf for leaf in leaves(fetch(train_set, [index])) if isinstance(leaf, Tensor) and leaf.numel() == 1]
        by_class.setdefault(tuple(single.item() for single in singles), index)
        if len(by_class) == count or time.monotonic() > ends:
            break
    return sorted([*by_class.values(), *(index for index in spread if index not in by_class.values())][:count])


def _gradients_apart(
    module: nn.Module, loss: LossFunction, train_set: SampleSet, indices: Sequence[int], device: torch.device
) -> float | None:
    """Return the norm of (the gradient of all in one batch - those of each alone) over that of the first; None where there is none, and
    where random numbers move it, as they may before they move the loss: of a network of spikes that has none yet."""

    def add_gradient(part: Sequence[int], sign: int, seed: int = 0) -> None:
        # cuDNN's RNNs have none in evaluation.
        with seeded(module, seed), eager(), torch.backends.cudnn.flags(enabled=False):
            loss_sum, _ = loss(module, move(fetch(train_set, part), device))
            if loss_sum.requires_grad:
                (sign * loss_sum).backward()

    module.zero_grad()
    module.eval()
    try:
        add_gradient(indices, 1)
        of_all = norm_of_gradient(module)
        for index in indices:
            add_gradient([index], -1)
        apart = norm_of_gradient(module)
        if apart > GRADIENTS_ADD_UP_WITHIN * of_all:
            module.zero_grad()
            add_gradient(indices, 1)
            add_gradient(indices, -1, seed=1)
            if norm_of_gradient(module) > RANDOM_ABOVE * of_all:
                return None
    finally:
        module.train()
        module.zero_grad()
    return apart / of_all if of_all and math.isfinite(apart / of_all) else None


def norm_of_gradient(module: nn.Module) -> float:
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in found]
    return math.hypot(*(torch.linalg.vector_norm(value).item() for value in values))


# What autocast rounds away is no sign of anything.
APART_WITHIN, APART_WITHIN_LOW_PRECISION = 1e-4, 1e-2


def not_apart(module: nn.Module, loss: LossFunction, train_set: SampleSet, config: TrialConfig) -> str | None:
    """Return, in words, what shows that samples packed in one row change each other's loss; None where nothing does."""
    if not isinstance(train_set, Packed):
        return None
    row = max(range(len(train_set)), key=lambda row: len(train_set.rows[row]))
    device = next(module.parameters()).device
    together = evaluated(module, loss, move(fetch(train_set, [row]), device))
    alone = [evaluated(module, loss, move(batch, device)) for batch in train_set.one_by_one(row)]
    loss_sum, num_targets = (sum(figures) for figures in zip(*alone, strict=True))
    within = APART_WITHIN if config.precision == "float32" else APART_WITHIN_LOW_PRECISION
    if num_targets == together[1] and math.isclose(loss_sum, together[0], rel_tol=within):
        return None
    return (
        f"samples that are packed into one row change each other's loss: it is {together[0]:.5g} over {together[1]:g} targets for a row of "
        f"{len(alone)}, and {loss_sum:.5g} over {num_targets:g} for its samples one by one. The model sees across their borders: let it "
        "attend only to tokens since position_ids was last 0, as models of transformers do, or leave data.pack out, if that is not meant"
    )


def loss_of_parts(
    module: nn.Module, loss: LossFunction, train_set: SampleSet, indices: Sequence[int], device: torch.device
) -> dict[str, float]:
    """Measure at fixed weights what a split of these samples does to the loss. A figure that has no scale has no key.

    parts_loss_ratio: the losses of the samples one by one over that of all, in evaluation mode; 1 for a sum.
    parts_targets_ratio: the same of num_targets.
    parts_training_ratio: the losses of two halves over that of all, in training mode, since BatchNorm then takes no single
    sample; 1 for a model that takes each sample by itself.
    loss_randomness: how far the loss in training mode moves with the random numbers, relative to it.
    """

    def measured(part: Sequence[int], seed: int = 0, *, training: bool = False) -> tuple[float, float]:
        with seeded(module, seed), buffers_kept(module):
            return evaluated(module, loss, move(fetch(train_set, part), device), training=training)

    middle = len(indices) // 2
    alone, together = [measured([index]) for index in indices], measured(indices)
    halves = [measured(half, training=True)[0] for half in (indices[:middle], indices[middle:])]
    trained, other = (measured(indices, seed, training=True)[0] for seed in (0, 1))
    found = {
        "parts_loss_ratio": _over(together[0], sum(loss_sum for loss_sum, _ in alone)),
        "parts_targets_ratio": _over(together[1], sum(num_targets for _, num_targets in alone)),
        "parts_training_ratio": _over(trained, sum(halves)),
        "loss_randomness": _over(abs(trained), abs(other - trained)),
    }
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def _over(whole: float, value: float) -> float | None:
    return value / whole if whole else None


@contextlib.contextmanager
def buffers_kept(module: nn.Module, *, but_counts: bool = False) -> Iterator[None]:
    """Undo what a forward in training mode does to BatchNorm's statistics and the like. but_counts: true to leave buffers of integers as
    the forward has made them."""
    kept = [buffer for buffer in module.buffers() if buffer.is_floating_point() or not but_counts]
    before = [(buffer, buffer.clone()) for buffer in kept]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextlib.contextmanager
def seeded(module: nn.Module, seed: int) -> Iterator[None]:
    """Draw random numbers from this seed, and leave the generators as they were."""
    with torch.random.fork_rng(cuda_devices(module)):
        torch.manual_seed(seed)
        yield


def cuda_devices(module: nn.Module) -> list[torch.device]:
    return [device for device in {p.device for p in module.parameters()} if device.type == "cuda"]
