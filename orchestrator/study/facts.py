"""What was read once, from the machine, the model and the data, and holds for the whole study."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from batchscout.orchestrator.study.messages import Device
from batchscout.trainers.before.peak_memory import PeakMemory
from batchscout.trainers.config import DevicePeak, Precision
from batchscout.trainers.counted import Counted, rate_unit
from batchscout.trainers.errors import NotFollowed
from batchscout.trainers.sources.settings import OwnRun


@dataclass(frozen=True)
class Facts:
    """A fact is None until it has been read."""

    num_train_samples: int | None = None
    num_val_samples: int | None = None
    longest_sample: int | None = None
    """The tokens of the longest training sample, where micro-batches are cut by tokens."""
    long_samples: tuple[int, ...] | None = None
    """The indices of the longest training samples that were found, where they differ in size and the set does not tell their lengths."""
    evaluated_together: int | None = None
    """How many samples every trial is evaluated with at a time, where the losses of samples were seen not to add up, or their batches
    to be drawn."""
    num_parameters: int | None = None
    num_batch_norms: int | None = None
    num_blocks: int | None = None
    """The model's repeated blocks, which are checkpointed one by one; 0 where none were found."""
    pass_seconds: tuple[float, float] | None = None
    """What a forward and backward pass of eager code took on the machine that begins the study: (whatever its size, and for each sample).
    None where it was not timed, or trials run elsewhere."""
    alone_raises: str | None = None
    """What a single sample raises in training, as BatchNorm over vectors does; None where it does not, or where it was not tried."""
    blocks_differ_again: str | None = None
    """How a block that is run again on the same input differs, in words: of such a model nothing is recomputed. None where none did, or
    where it was not tried."""
    counted: Counted | None = None
    """What a sample's targets are, so what `tokens_per_second` counts."""
    chunked_cross_entropy: bool | None = None
    """True if the model can compute its cross-entropy in chunks."""
    memory_knobs: tuple[str, ...] | None = None
    """The memory knobs that change no number and that the model goes with: a frontier tries them unasked."""
    regularizers: dict[str, float] | None = None
    """What the model takes of `dropout` and `label_smoothing`, as it is set."""
    own_run: OwnRun | None = None
    """Of a model that trains elsewhere (`from`), the run that it is set to there."""
    predicted_memory: dict[str, PeakMemory] | None = None
    """The peak memory that fake tensors predict, by the name of the mode that it is predicted for."""
    unpredicted_memory: dict[str, NotFollowed] | None = None
    """Why no memory is predicted, by the name of the mode that it was to be predicted for."""
    contents: dict[str, str] | None = None
    """Digests of the data, or how many there are where they are others in every process."""
    code: dict[str, str] | None = None
    """Digests of the user's modules that trials run, by their files, as the last driver found them."""
    inputs: dict[str, str] | None = None
    """Digests of the files that the study file names, by its keys, as the last driver found them."""
    memory_limit_bytes: int | None = None
    """What one rank may take of the host, where the study file names no limit."""
    device_peaks: dict[Precision, DevicePeak] | None = None
    """What a rank's device can compute at most, for each precision of the study."""
    device: str | None = None
    """What the first lane runs on."""
    device_kind: str | None = None
    """The kind of device that the study runs on, as the cluster's nodes announce it."""
    measured_on: Device | None = None
    """The device of the first lane by its parts: no lane on another kind of GPU runs a trial."""
    versions: dict[str, str] | None = None
    """Those of Python and of the libraries that decide how a run goes, by their names, in the driver that began the study."""

    @property
    def smallest_micro_batch(self) -> int:
        """The fewest samples that the model trains on at once, as far as is known."""
        return 1 if self.alone_raises is None else 2

    @property
    def rate_unit(self) -> str:
        """The unit of `tokens_per_second`; tokens/s in studies that were begun before there was another."""
        return rate_unit(self.counted or "tokens")

    def updated(self, other: Facts) -> Facts:
        """Return these facts with what `other` has read put over them."""
        read = {field.name: value for field in fields(other) if (value := getattr(other, field.name)) is not None}
        return replace(self, **read)
