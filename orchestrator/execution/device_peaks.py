"""What the device of a rank can compute at most, read once for all lanes of a study."""

from __future__ import annotations

from collections.abc import Iterable

import ray
from ray.exceptions import GetTimeoutError, RayError

from batchscout.orchestrator.execution.group import require_cuda
from batchscout.orchestrator.execution.nodes.placement import LaneShape
from batchscout.trainers.config import DevicePeak, Precision

# A node of the cluster may still be starting; without an answer every run measures its own device.
SECONDS_TO_MEASURE = 60


def device_peaks(
    shape: LaneShape, precisions: Iterable[Precision], *, is_local: bool, allow_tf32: bool = False
) -> dict[Precision, DevicePeak] | None:
    """Return a rank's peak in each precision; None where no process of the cluster could tell it.

    is_local: true if the lanes run on this host. Its CPUs are measured in this process, which has torch loaded; a GPU,
    or another host, in a process that ends with it.
    """
    wanted = sorted(precisions)
    if is_local and not shape.use_gpu:
        return _with_threads(shape.cpus_per_rank, wanted)
    room = {"num_cpus": shape.cpus_per_rank, "num_gpus": int(shape.use_gpu), "resources": shape.of_its_kind}
    measure = ray.remote(**room, max_calls=1)(_peaks_here)
    answer = measure.remote(wanted, allow_tf32, shape.use_gpu)
    try:
        return ray.get(answer, timeout=SECONDS_TO_MEASURE)
    except GetTimeoutError:
        ray.cancel(answer, force=True)  # it would take the room of a lane
        return None
    except RayError:
        return None


def _with_threads(num_threads: int, precisions: list[Precision]) -> dict[Precision, DevicePeak]:
    """Measure with as many threads as Ray gives a rank."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return _peaks_here(precisions, allow_tf32=False, on_gpu=False)  # a CPU has none
    finally:
        torch.set_num_threads(before)


def _peaks_here(precisions: list[Precision], allow_tf32: bool, on_gpu: bool) -> dict[Precision, DevicePeak]:
    if on_gpu:
        require_cuda()  # else these would be its host's
    from batchscout.trainers.device import device_peak
    from batchscout.trainers.device.device import pick_device

    return device_peak.device_peaks(pick_device(), precisions, allow_tf32=allow_tf32)
