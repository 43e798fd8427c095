"""What the gradients of micro-batches say: their norms, measured while a step accumulates them, and kept over steps.

Only norms are needed: no gradient is stored. Everything stays on the device until an interval is read. What they mean
is in `batchscout.trainers.noise.noise_estimate`.
"""

from __future__ import annotations

import itertools
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from batchscout.trainers.model.parallel import several_ranks
from batchscout.trainers.noise.noise_estimate import NoiseEstimate, SquaredNorms, estimate_noise

# To measure a micro-gradient is a pass over it, which slows a small model's step. A long run has more steps than the
# estimate needs: after the first ones it measures one in so many.
FIRST_STEPS, THEN_ONE_IN = 100, 5
# The noise scale grows as the loss falls, so a long run estimates it from the last so many steps that it has measured.
RECENT_STEPS = 1000


class MicroGradientNorms:
    """Measures each micro-batch's own gradient: hooks on the leaves run before accumulation, and before ranks
    exchange it."""

    def __init__(self, parameters: list[nn.Parameter], world_size: int = 1) -> None:
        """parameters: as `batchscout.trainers.model.parallel.leaves_of` finds them."""
        self._follows_sum = False
        self._hooks: list[RemovableHandle] = []
        self._parameters, self._world_size = parameters, world_size
        self._norms: list[Tensor] = []
        self._weighted_squares: list[Tensor] = []
        self._lengths: list[Tensor] = []
        self._look(True)

    def begin_step(self, number: int, *, follow_sum: bool) -> None:
        """number: the step's, from 1. follow_sum: true to measure also the sum of the micro-gradients as it grows."""
        self._look(number <= FIRST_STEPS or number % THEN_ONE_IN == 0)
        self._follows_sum = follow_sum

    def rest(self) -> None:
        """See nothing until the next step begins."""
        self._look(False)
        self._follows_sum = False

    @property
    def _looks(self) -> bool:
        return bool(self._hooks)

    def _look(self, looks: bool) -> None:
        """Have hooks only while they see something: to call Python for every parameter is what a fast step would notice."""
        if looks == self._looks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = [parameter.register_hook(self._see) for parameter in self._parameters] if looks else []

    def _see(self, gradient: Tensor) -> None:
        wide = torch.promote_types(gradient.dtype, torch.float32)  # a narrower one than its own is refused
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=wide).float())

    def end_of_micro_batch(self, num_targets: Tensor, scale: Tensor, *, last: bool) -> None:
        """The micro-batch whose loss, summed over num_targets and multiplied by scale, has gone backward; last: of
        its step."""
        if not self._looks:
            return
        norm = torch.linalg.vector_norm(torch.stack(self._norms))
        # 0 / 0 for a micro-batch without targets: it has no gradient of its own, and the estimate leaves its step out.
        self._weighted_squares.append((norm / scale) ** 2 / num_targets)
        num_gradients, self._norms = len(self._norms), []
        if self._follows_sum and not (last and self._world_size > 1):  # by then the sum is that of all ranks
            sums = [p.grad for p in self._parameters if p.grad is not None]
            if len(sums) >= num_gradients:  # FSDP2 keeps those of low precision elsewhere
                self._lengths.append(torch.stack([norm, torch.nn.utils.get_total_norm(sums)]))

    def read_cosine(self) -> dict[str, float]:
        """Return {successive_cosine}: the mean cosine of each micro-gradient with the sum of those before it in its
        step.

        Near 0 for pure noise. The cosine of one sum with the next, which is sometimes quoted, is not: it is near 1.
        """
        lengths, self._lengths = self._lengths, []
        cosines = [_cosine_with_sum(*before, *now) for before, now in itertools.pairwise(lengths)]
        return {"successive_cosine": torch.stack(cosines).mean().item()} if cosines else {}

    def take(self) -> Tensor | None:
        """Return the sum of num_targets x |g_k|^2 over this rank's micro-batches of the step, a scalar on the device;
        None for a step that was not measured."""
        if not self._looks:
            return None
        total = torch.stack(self._weighted_squares).sum()
        self._weighted_squares = []
        return total


def _cosine_with_sum(_: Tensor, sum_before: Tensor, gradient: Tensor, sum_now: Tensor) -> Tensor:
    """Return cos(g_k, G_k-1) from the lengths alone, as G_k = G_k-1 + g_k."""
    return (sum_now**2 - sum_before**2 - gradient**2) / (2 * gradient * sum_before)


class NoiseLog:
    """The squared norms of the last RECENT_STEPS steps, and the estimate made from them."""

    def __init__(self, micro_batch_size: int, num_micro_batches: int) -> None:
        """num_micro_batches: per optimizer step, over all ranks."""
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = num_micro_batches
        self._pending: list[Tensor] = []
        self.steps: deque[SquaredNorms] = deque(maxlen=RECENT_STEPS)

    def add(self, mean_square: Tensor, gradient_norm: Tensor, num_targets: Tensor) -> None:
        """mean_square: of this rank, such that its mean over the ranks is the step's. num_targets: over all ranks."""
        self._pending.append(torch.stack([mean_square.double(), gradient_norm.double() ** 2, num_targets.double()]))

    def read(self) -> None:
        """Bring the pending steps to the host; all ranks call it together."""
        if not self._pending:
            return
        pending = torch.stack(self._pending)
        if several_ranks():
            # The other two are equal on all ranks, so the mean over ranks leaves them and averages mean |g_k|^2.
            dist.all_reduce(pending)
            pending = pending / dist.get_world_size()
        self._pending = []
        self.steps.extend(SquaredNorms(*step) for step in pending.tolist())

    def estimate(self) -> NoiseEstimate:
        return estimate_noise(self.steps, self.micro_batch_size, self.num_micro_batches)
