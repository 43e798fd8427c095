"""The gradient noise at weights that stand still, at chosen moments of a run.

The run stops, draws micro-batches in an order of its own, measures their gradients, and goes on as if nothing had been:
weights, optimizer, random numbers, buffers and its place in the data are left as they were. What is gathered while the
weights move mixes moments between which the noise scale may grow tenfold; a snapshot is one point of that curve.

All sums of 1, 2, 4, 8 and 16 micro-batches come from the same ones, so they differ in the accumulation alone. Each rank
adds up its own micro-batches, and only figures are exchanged; under FSDP2 gradients meet, and the sums are those of all
ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from batchscout.trainers.checkpoints.checkpoint import random_state, set_random_state
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.batches import fetch, move
from batchscout.trainers.data.order import permutation
from batchscout.trainers.data.samples import SampleSet
from batchscout.trainers.data.streams import Stream
from batchscout.trainers.noise.noise_curve import AccumulatedGradient, NoiseSnapshot
from batchscout.trainers.noise.noise_estimate import NoiseEstimate, SquaredNorms, estimate_noise, mean_of
from batchscout.trainers.noise.step_statistics import adam_snr_of, next_update, sum_and_square
from batchscout.trainers.run import Run
from batchscout.trainers.step.accumulation import accumulate_gradient, clip_factor

# A snapshot costs at most this share of the micro-batches that the run has trained on since the one before it.
SHARE_OF_TRAINING = 0.05
# Fewer windows hardly ever bound an interval: with 5 Student's t is already 2.8.
FEWEST_WINDOWS = 5
LARGEST_SUM = 16


@dataclass(frozen=True)
class Windows:
    """How many micro-batches a snapshot may take. In a window a rank adds up `size` of them; a round is one window of
    each rank."""

    size: int
    first_rounds: int
    most_rounds: int

    def looks(self) -> list[int]:
        """Return after how many rounds the interval is looked at: after twice as many each time. After every single one,
        some intervals would be bounded by chance."""
        powers = range((self.most_rounds // self.first_rounds).bit_length())
        return sorted({*(self.first_rounds * 2**power for power in powers), self.most_rounds})


def windows_of(config: TrialConfig, samples_seen: int, num_train_samples: int) -> Windows | None:
    """Return what the snapshot may take that is due when so many samples have been seen; None if that is too little.

    A count of samples decides, not a clock: the same run takes the same snapshots. What a snapshot had too little for
    is left to the next one. No sample comes twice.
    """
    per_turn = config.micro_batch_size * config.world_size
    first_rounds = math.ceil(FEWEST_WINDOWS / _windows_per_round(config))
    found, last = None, 0
    for count in sorted(count for count in config.noise_snapshots if count <= samples_seen):
        turns = min(int(SHARE_OF_TRAINING * (count - last) / per_turn), num_train_samples // per_turn)
        sizes = [2**power for power in range(1, LARGEST_SUM.bit_length()) if 2**power * first_rounds <= turns]
        found = Windows(sizes[-1], first_rounds, turns // sizes[-1]) if sizes else None
        last = count if found else last
    return found


def _windows_per_round(config: TrialConfig) -> int:
    return 1 if config.parallel == "fsdp" else config.world_size


def take_snapshot(run: Run) -> NoiseSnapshot | None:
    """Measure the gradient noise at the run's weights; None where the run is too short for it, or takes a stream, of which no other
    samples can be drawn. All ranks call this."""
    if isinstance(run.train_set, Stream):
        return None
    windows = windows_of(run.config, run.samples_seen, len(run.train_set))
    if windows is None:
        return None
    with _standing_still(run):
        return _snapshot(run, windows.size, _measure(run, run.train_set, windows))


@contextlib.contextmanager
def _standing_still(run: Run) -> Iterator[None]:
    """Leave no trace in the run: forward passes draw random numbers for dropout, and move BatchNorm's statistics."""
    assert run.norms is not None
    random, buffers = random_state(run.device), [buffer.clone() for buffer in run.module.buffers()]
    run.norms.begin_step(1, follow_sum=False)
    try:
        yield
    finally:
        run.optimizer.zero_grad(set_to_none=True)
        for buffer, before in zip(run.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        set_random_state(random, run.device)


class _Sum(NamedTuple):
    """Figures of the sum of some micro-batches' gradients."""

    norms: SquaredNorms
    mean_entry: float
    update_square: float
    weight_square: float


def _measure(run: Run, train_set: SampleSet, windows: Windows) -> list[list[_Sum]]:
    """Return each window's sums, the smallest first: as many windows as bound the noise scale, or as there may be."""
    order = permutation(len(train_set), run.config.seed, -run.samples_seen)  # a pass that no run trains on
    found: list[list[_Sum]] = []
    for done, until in itertools.pairwise([0, *windows.looks()]):
        figures = torch.stack([_window(run, train_set, order, number, windows.size) for number in range(done, until)])
        rows = _of_all_ranks(run, figures).tolist()
        found += [[_Sum(SquaredNorms(*row[:3]), *row[3:]) for row in window] for window in rows]
        if _estimate(run, found, windows.size).noise_scale_high is not None:
            break
    return found


def _of_all_ranks(run: Run, figures: Tensor) -> Tensor:
    """Return the windows of all ranks. Under FSDP2 every rank has the same ones already."""
    if _windows_per_round(run.config) == 1:
        return figures
    gathered = [torch.empty_like(figures) for _ in range(run.config.world_size)]
    dist.all_gather(gathered, figures)
    return torch.cat(gathered)


def _window(run: Run, train_set: SampleSet, order: Tensor, number: int, size: int) -> Tensor:
    """Return a row of figures for the sum of the first 1, 2, 4, ... of this rank's next micro-batches."""
    assert run.norms is not None
    scale = run.scaler.scale(torch.ones((), device=run.device)) / run.nominal_targets
    squares = targets = torch.zeros((), device=run.device)
    run.optimizer.zero_grad(set_to_none=True)
    rows, done = [], 0
    while done < size:
        until = max(1, 2 * done)
        # The module itself, not DDP around it: there is nothing to exchange.
        _, more_targets = accumulate_gradient(
            run.module,
            run.loss_function,
            (_batch(run, train_set, order, number * size + place) for place in range(done, until)),
            num_micro_batches=until - done,
            scale=scale,
            norms=run.norms,
        )
        more_squares = run.norms.take()
        assert more_squares is not None
        squares, targets, done = squares + more_squares, targets + more_targets, until
        rows.append(_figures(run, scale, squares, targets))
    return torch.stack(rows)


def _batch(run: Run, train_set: SampleSet, order: Tensor, turn: int) -> Any:
    """Return this rank's micro-batch of that turn."""
    size = run.config.micro_batch_size
    first = (turn * run.config.world_size + run.rank) * size
    return move(fetch(train_set, order[first : first + size].tolist()), run.device)


def _figures(run: Run, scale: Tensor, squares: Tensor, num_targets: Tensor) -> Tensor:
    """Return [mean |g_k|^2, |gbar|^2, targets, mean entry of gbar, |update|^2, |weights|^2] of the gradient in place."""
    met = _over_ranks(run, 1)  # the gradient is the mean over so many ranks
    entries, square = sum_and_square(run.parameters)
    sums = torch.stack([squares.double(), num_targets.double(), entries * met / scale, square * (met / scale) ** 2])
    squares, num_targets, entries, square = _added_up(run, sums)
    norm = square.sqrt() / num_targets
    factor = met / scale / num_targets * clip_factor(norm, run.config.optimizer.max_gradient_norm)
    update, weight = _added_up(run, next_update(run.optimizer, factor))
    count = sum(parameter.numel() for parameter in run.parameters)
    return torch.stack([squares / num_targets, norm**2, num_targets, entries / num_targets / count, update, weight])


def _added_up(run: Run, sums: Tensor) -> Tensor:
    """Return what shards hold added up over the ranks."""
    if run.config.parallel == "fsdp":
        dist.all_reduce(sums)
    return sums


def _estimate(run: Run, windows: Sequence[Sequence[_Sum]], count: int) -> NoiseEstimate:
    """Return the estimate from the sums of so many micro-batches, a power of two."""
    steps = [window[count.bit_length() - 1].norms for window in windows]
    return estimate_noise(steps, run.config.micro_batch_size, _over_ranks(run, count))


def _over_ranks(run: Run, count: int) -> int:
    return count * (run.config.world_size if run.config.parallel == "fsdp" else 1)


def _snapshot(run: Run, size: int, windows: list[list[_Sum]]) -> NoiseSnapshot:
    estimate = _estimate(run, windows, size)
    finite = [window for window in windows if all(math.isfinite(one.norms.mean_square) for one in window)]
    counts = [2**power for power in range(size.bit_length())] if finite else []
    return NoiseSnapshot(
        samples_seen=run.samples_seen,
        learning_rate=float(run.optimizer.param_groups[0]["lr"]),
        micro_batch_size=run.config.micro_batch_size,
        num_micro_batches=len(windows) * _over_ranks(run, size),
        noise_scale=estimate.noise_scale,
        noise_scale_low=estimate.noise_scale_low,
        noise_scale_high=estimate.noise_scale_high,
        coherence=estimate.coherence,
        coherence_floor=estimate.coherence_floor,
        accumulated=tuple(_accumulated(run, finite, count, estimate.noise_scale) for count in counts),
    )


def _accumulated(run: Run, windows: list[list[_Sum]], count: int, noise_scale: float | None) -> AccumulatedGradient:
    """Return the row of a sum of so many micro-batches of one rank, from all windows; noise_scale: of all of them."""
    sums = [window[count.bit_length() - 1] for window in windows]
    estimate, samples = _estimate(run, windows, count), run.config.micro_batch_size * _over_ranks(run, count)
    square = mean_of([one.norms.square_of_mean for one in sums])
    num_entries = sum(parameter.numel() for parameter in run.parameters)
    mean, weight = mean_of([one.mean_entry for one in sums]), mean_of([one.weight_square for one in sums])
    snr = samples / noise_scale if noise_scale else None
    return AccumulatedGradient(
        num_micro_batches=_over_ranks(run, count),
        samples=samples,
        coherence=estimate.coherence,
        coherence_floor=estimate.coherence_floor,
        gradient_norm=math.sqrt(square),
        gradient_mean=mean,
        gradient_variance=square / num_entries - mean_of([one.mean_entry**2 for one in sums]),
        gradient_snr=snr,
        adam_snr=adam_snr_of(snr, run.config.optimizer.betas[0])
        if snr and run.config.optimizer.type == "adamw"
        else None,
        update_ratio=math.sqrt(mean_of([one.update_square for one in sums]) / weight) if weight else None,
    )
