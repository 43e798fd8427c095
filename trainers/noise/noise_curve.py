"""What snapshots of the gradient noise found in the course of a run: a JSON object with its checksum a line. Loads no
torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from batchscout.trainers.files import written_whole
from batchscout.trainers.lines import body_of_last, line_of, lines_in, tell_left_out

NOISE_CURVE_FILE = "noise.jsonl"


@dataclass(frozen=True)
class AccumulatedGradient:
    """What the gradient of so many micro-batches shows. None: it cannot be told."""

    num_micro_batches: int
    samples: int
    coherence: float | None
    """How far pairs of these micro-batches agree: the same on average for every number of them."""
    coherence_floor: float | None
    """What the coherence of pure noise stays below in 95 % of all cases, for this number of micro-batches and windows;
    see `batchscout.trainers.noise.noise_estimate.NoiseEstimate`."""
    gradient_norm: float
    gradient_mean: float
    """Over all entries of the gradient."""
    gradient_variance: float
    """Over all entries of the gradient."""
    gradient_snr: float | None
    """|G|^2 over the variance of its estimate: samples / noise scale."""
    adam_snr: float | None
    """sum m^2 / sum v of Adam's moments, bias-corrected, if it went on at these weights with gradients like this one."""
    update_ratio: float | None
    """|update| over |weights| if the next step, at the last one's learning rate, took this gradient. The optimizer's
    moments hold the run's own gradients, so it differs less between rows than it would after many such steps."""


@dataclass(frozen=True)
class NoiseSnapshot:
    """The gradient noise at one moment of a run, in samples. None: it cannot be told, or is unbounded."""

    samples_seen: int
    learning_rate: float
    micro_batch_size: int
    num_micro_batches: int
    """Measured for this snapshot, over all ranks."""
    noise_scale: float | None
    noise_scale_low: float | None
    noise_scale_high: float | None
    coherence: float | None
    coherence_floor: float | None
    accumulated: tuple[AccumulatedGradient, ...]
    """Sums of the same micro-batches, the smallest first."""

    def metrics(self) -> dict[str, float]:
        """Return the figures for a report, under keys of their own: those without `snapshot_` are the moving run's."""
        found = {
            "samples_seen": self.samples_seen,
            "micro_batches": self.num_micro_batches,
            "noise_scale": self.noise_scale,
            "noise_scale_low": self.noise_scale_low,
            "noise_scale_high": self.noise_scale_high,
            "coherence": self.coherence,
            "coherence_floor": self.coherence_floor,
        }
        return {f"snapshot_{key}": value for key, value in found.items() if value is not None}


def read_noise_curve(path: Path) -> list[NoiseSnapshot]:
    """Return the snapshots in the order of training; none where there is no such file. A damaged line is left out, with
    a notice. Raises StorageLost where the file cannot be read."""
    found = {number: _snapshot_of(line) for number, line in enumerate(lines_in(path), start=1)}
    damaged = [number for number, snapshot in found.items() if snapshot is None]
    tell_left_out(path, damaged, "what these snapshots found of the gradient noise")
    return [snapshot for snapshot in found.values() if snapshot is not None]


def _snapshot_of(line: bytes) -> NoiseSnapshot | None:
    """Return the snapshot of a line; None where it is damaged."""
    body = body_of_last(line)
    if body is None:
        return None
    record = json.loads(body)
    rows = tuple(AccumulatedGradient(**row) for row in record.pop("accumulated"))
    return NoiseSnapshot(**record, accumulated=rows)


def add_to_noise_curve(path: Path, snapshot: NoiseSnapshot) -> None:
    """Write the curve with this snapshot as its end. What lies at or after it was measured by a process that died before
    its checkpoint, and is measured again."""
    before = [one for one in read_noise_curve(path) if one.samples_seen < snapshot.samples_seen]
    with written_whole(path) as file:
        file.writelines(line_of(json.dumps(dataclasses.asdict(one)).encode()) for one in (*before, snapshot))
