"""What runs keep of their course, made up: steps, and the gradient noise along the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchscout.orchestrator.output.report.training import RunCurves
from batchscout.trainers.noise.noise_curve import AccumulatedGradient, NoiseSnapshot
from batchscout.trainers.step_log import Step, read_steps


def steps(count: int, spike_at: int | None = None) -> list[Step]:
    return [
        Step(number, 8 * number, 9.0 if number == spike_at else 2.0 + 1 / number, 1.0 / number, 1e-3, 0.0)
        for number in range(1, count + 1)
    ]


ROW = AccumulatedGradient(
    num_micro_batches=2, samples=8, coherence=0.25, coherence_floor=0.04, gradient_norm=1.5, gradient_mean=1e-5,
    gradient_variance=2e-4, gradient_snr=0.2, adam_snr=None, update_ratio=3e-3,
)  # fmt: skip


def snapshot(samples_seen: int, noise_scale: float | None) -> NoiseSnapshot:
    rows = (ROW, replace(ROW, num_micro_batches=4, samples=16))
    low, high = (None, None) if noise_scale is None else (noise_scale / 2, noise_scale * 2)
    return NoiseSnapshot(samples_seen, 1e-3, 4, 40, noise_scale, low, high, 0.25, 0.04, rows)


def example_curves() -> list[RunCurves]:
    return [
        RunCurves("recommended", steps(900), []),
        RunCurves("baseline", steps(300, spike_at=100), [snapshot(40, 12.0), snapshot(400, 60.0)]),
    ]


def steps_taken(path: Path) -> list[Step]:
    """The steps of a file without the time that they waited for data, which no run repeats."""
    return [replace(step, data_wait=0.0) for step in read_steps(path)]
