"""Gradients whose noise scale is known, and the norms that a run would note of them."""

from __future__ import annotations

import math

import numpy as np

from batchscout.trainers.noise.noise_estimate import SquaredNorms

DIM = 60


def known_windows(
    seed: int,
    *,
    noise_scale: float,
    micro_batch_size: int,
    num_micro_batches: int,
    num_steps: int,
    num_windows: int = 1,
    spectrum: float = 0.0,
    uneven: bool = False,
    design_effect: float = 1.0,
    shared: float = 0.0,
) -> list[list[SquaredNorms]]:
    """What so many runs note. The true gradient has norm 1, or 0 where noise_scale is infinite, and the covariance of a
    sample's gradient has the trace noise_scale.

    spectrum: the variances of the directions fall with this power. uneven: micro-batches have 0.2 to 2.2 targets a
    sample, 1 on average. design_effect: by how much samples that resemble each other raise the variance of their
    micro-batch's mean. shared: the share of that variance that all micro-batches of a step have in common.
    """
    random = np.random.default_rng(seed)
    shape = (num_windows, num_steps, num_micro_batches)
    signal = np.full(DIM, DIM**-0.5) if math.isfinite(noise_scale) else np.zeros(DIM)
    variances = np.arange(1, DIM + 1.0) ** -spectrum
    variances *= (noise_scale if math.isfinite(noise_scale) else 1.0) * design_effect / variances.sum()
    targets = micro_batch_size * (random.choice([0.2, 0.6, 1.0, 2.2], shape) if uneven else np.ones(shape))
    own = random.normal(size=(*shape, DIM)) * math.sqrt(1 - shared)
    common = random.normal(size=(*shape[:2], 1, DIM)) * math.sqrt(shared) if shared else 0.0
    micro = signal + (own + common) * np.sqrt(variances) / np.sqrt(targets)[..., None]
    total = targets.sum(2)
    mean_squares = ((micro**2).sum(3) * targets).sum(2) / total
    squares_of_mean = ((micro * targets[..., None]).sum(2) ** 2).sum(2) / total**2
    stacked = np.stack([mean_squares, squares_of_mean, total], axis=-1)
    return [[SquaredNorms(*step) for step in window] for window in stacked.tolist()]
