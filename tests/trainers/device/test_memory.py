"""A memory limit is real, running out is recognised, and the process is as good as new afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import resource
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.device import gpu_memory, host_memory
from batchscout.trainers.device.gpu_memory import (
    MOST_SECONDS_TO_SETTLE,
    SETTLED_SECONDS,
    GpuMemory,
    GpuPeak,
    capacity_bytes,
    settled,
)
from batchscout.trainers.device.host_memory import HostMemory, HostPeak, status_bytes
from batchscout.trainers.device.memory import give_back
from batchscout.trainers.device.out_of_memory import is_out_of_memory
from batchscout.trainers.speed.meter import Meter
from batchscout.trainers.speed.throughput import NUM_WARMUP_STEPS
from tests.support.tiny import config, cpu_run, in_fresh_process

MIB = 1 << 20
CPU = torch.device("cpu")
FITS, FAR_TOO_LARGE = 4, 512


def sized(micro_batch_size: int, limit_bytes: int | None) -> TrialConfig:
    """A run of two steps that needs about a MiB per sample beside some 10 MiB of weights and Adam's state."""
    return config(
        model={"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 4, "hidden_dim": 96}},
        data={"target": "tests.support.tiny:data", "kwargs": {"num_train": 1024, "seq_len": 48}},
        micro_batch_size=micro_batch_size,
        sample_budget=2 * micro_batch_size,
        evaluation_samples=0,
        memory_limit_bytes=limit_bytes,
    )


def how_it_ends(trial: TrialConfig) -> str:
    """As a lane runs a trial: no exception outlives this frame."""
    from batchscout.trainers.loop import train

    try:
        with tempfile.TemporaryDirectory() as directory:
            return train(trial, lambda report: None, Path(directory))
    except Exception as error:
        return "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"


def what_small_laws_need() -> dict[str, Any]:
    """What one fresh process finds out for several tests. Its threads come first: later ones would reuse their stacks."""
    return {
        "threads": growth_of_threads(),
        "mapped file": peak_of_reading_a_mapped_file(),
        "allocations": [measured(num_bytes) for num_bytes in KNOWN_ALLOCATIONS],
    }


@pytest.fixture(scope="module")
def small_laws() -> dict[str, Any]:
    return in_fresh_process(what_small_laws_need)


def out_of_memory_and_on() -> dict[str, Any]:
    ended: list[str] = []
    growth: list[float] = []
    ended.append(how_it_ends(sized(FITS, None)))  # a warm process: threads, kernels, caches
    limits_before = resource.getrlimit(resource.RLIMIT_DATA)
    idle = status_bytes("VmData")
    for _ in range(2):
        ended.append(how_it_ends(sized(FAR_TOO_LARGE, 64 * MIB)))
        give_back()
        growth.append((status_bytes("VmData") - idle) / MIB)
        for _ in range(3):
            ended.append(how_it_ends(sized(FITS, 64 * MIB)))
            give_back()
            growth.append((status_bytes("VmData") - idle) / MIB)
    lifted = resource.getrlimit(resource.RLIMIT_DATA) == limits_before
    return {"ended": ended, "growth": growth, "lifted": lifted}


@pytest.mark.slow
def test_after_running_out_of_memory_the_process_runs_what_fits() -> None:
    found = in_fresh_process(out_of_memory_and_on)
    assert found["ended"] == ["go on", *["out of memory", "go on", "go on", "go on"] * 2]
    assert max(found["growth"]) <= 64, found["growth"]
    assert found["lifted"]


def kernels_made_after_one_found_no_room() -> list[str]:
    """How making kernels of new sizes ended: inside a limit of nothing, in the same thread after it, and in the next."""

    def of_new_sizes() -> str:
        try:
            for _ in range(400):
                torch.empty(1, next(sizes)).to_mkldnn()
        except RuntimeError as error:
            return "no room" if is_out_of_memory(error) else str(error)
        return "made"

    def inside_and_after() -> list[str]:
        room = [bytes(40_000) for _ in range(400)]
        del room  # the heap keeps it, so that it is the kernels' own pages that find none
        with HostMemory().held_to(0):
            inside = of_new_sizes()
        return [inside, of_new_sizes()]

    sizes = itertools.count(1)
    of_new_sizes()
    run = HostMemory().without_after_effects
    return [*run(inside_and_after), run(of_new_sizes), of_new_sizes()]


@pytest.mark.slow
def test_a_kernel_that_found_no_room_leaves_no_harm_to_the_next_run() -> None:
    """Where an object of oneDNN's own finds no room it may end the process (docs/reliability.md): that proves nothing, and the
    process is tried again; what it finds is judged once."""
    found: list[str] = []
    for attempt in range(3):
        with contextlib.suppress(AssertionError) if attempt < 2 else contextlib.nullcontext():
            found = in_fresh_process(kernels_made_after_one_found_no_room, MALLOC_TRIM_THRESHOLD_=str(1 << 30))
            break
    assert found == ["no room", "no room", "made", "made"], "the second is oneDNN's doing"


def shapes_of_two_runs() -> list[str]:
    def shape() -> str:
        with FakeTensorMode():
            return str(tuple(torch.empty(3, 4).sum(0).shape))

    return [HostMemory().without_after_effects(shape) for _ in range(2)]


@pytest.mark.slow
def test_a_process_counts_shapes_in_its_second_run_too() -> None:
    """A CUDA build of torch 2.11 without a GPU died there (SIGSEGV)."""
    assert in_fresh_process(shapes_of_two_runs) == ["(4,)", "(4,)"]


def ends_under_rising_limits() -> list[str]:
    how_it_ends(sized(FITS, None))
    return [how_it_ends(sized(48, mebibytes * MIB)) for mebibytes in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 512)]


@pytest.mark.slow
def test_wherever_memory_runs_out_it_is_recognised() -> None:
    """In the model's weights, the forward, the backward or the optimizer: by how much the limit leaves."""
    ended = in_fresh_process(ends_under_rising_limits)
    assert set(ended) == {"out of memory", "go on"}
    assert ended == sorted(ended, reverse=True)
    assert ended.count("out of memory") >= 5


def measured(num_bytes: int) -> list[int]:
    """Peaks above idle while a tensor of that size is alive, after it, and of a fresh meter after it."""
    meter = HostPeak()
    nothing = meter.peak_bytes()
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    peaks = [nothing, meter.peak_bytes()]
    del tensor
    give_back()
    return [*peaks, meter.peak_bytes(), HostPeak().peak_bytes()]


KNOWN_ALLOCATIONS = [50 * MIB, 200 * MIB]


@pytest.mark.parametrize("place", range(len(KNOWN_ALLOCATIONS)))
def test_the_meter_measures_a_known_allocation(small_laws: dict[str, Any], place: int) -> None:
    num_bytes = KNOWN_ALLOCATIONS[place]
    nothing, alive, afterwards, of_a_fresh_meter = small_laws["allocations"][place]
    assert nothing <= 0.1 * num_bytes
    assert alive == pytest.approx(num_bytes, rel=0.1)
    assert afterwards == pytest.approx(num_bytes, rel=0.1)
    assert of_a_fresh_meter <= 0.1 * num_bytes


def peak_of_reading_a_mapped_file() -> float:
    """MiB."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * 100 * MIB)
        file.flush()
        samples, meter = np.memmap(file.name, mode="r"), HostPeak()
        samples.sum()
        return meter.peak_bytes() / MIB


def test_pages_of_a_file_are_no_memory_that_could_run_out(small_laws: dict[str, Any]) -> None:
    assert small_laws["mapped file"] < 5


def peaks_of_a_run() -> list[float]:
    """(measured, in a run that needs so much more) MiB. Each goes on beyond its warm-up, and keeps what it frees then."""
    peaks = []
    for micro_batch_size in (16, 16, 64, 16):
        trial = sized(micro_batch_size, None).model_copy(update={"sample_budget": 8 * micro_batch_size})
        run = cpu_run(trial, steps=NUM_WARMUP_STEPS + 4)
        peaks.append(run.meter.peak.peak_bytes() / MIB)
        del run
        give_back()
    return peaks


@pytest.mark.slow
def test_the_peak_of_a_run_is_its_own_and_not_that_of_a_larger_one_before() -> None:
    _, small, large, small_again = in_fresh_process(peaks_of_a_run)
    assert large > 2 * small
    assert small_again == pytest.approx(small, rel=0.1)


def peak_beside_a_gap() -> float:
    """The peak in MiB of 20 MiB and, after these, 60 MiB, where an earlier run has left a gap of 24 MiB in the heap."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    HostPeak().end_warm_up()
    blocks = [libc.malloc(ctypes.c_size_t(size)) for size in (24 * MIB, 8 * MIB)]  # the second one lives on
    libc.free(ctypes.c_void_p(blocks[0]))
    peak = HostPeak()
    for size in (20, 60):
        tensor = torch.ones(size * MIB, dtype=torch.uint8)
        del tensor
    return peak.peak_bytes() / MIB


def test_a_gap_that_an_earlier_run_left_in_the_heap_is_no_part_of_a_later_ones_peak() -> None:
    assert in_fresh_process(peak_beside_a_gap) == pytest.approx(60, abs=4)


def pages_of_a_run() -> tuple[list[int], list[float], list[bool]]:
    """(pages that each step faults in, the peak in MiB after the warm-up and at the end, whether the limit and a half is had before the
    warm-up, after it, and after the run)."""
    trial, limit = sized(16, None), 256 * MIB
    has_room = [False]
    faults, peaks = list[int](), list[float]()
    idle_bytes = HostMemory().idle_bytes()
    run = cpu_run(trial.model_copy(update={"sample_budget": 16 * 16}))
    with HostMemory().held_to(limit, idle_bytes):
        has_room = [_can_have(limit * 3 // 2)]
        for step in range(NUM_WARMUP_STEPS + 5):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            run.step()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            if step + 1 in (NUM_WARMUP_STEPS, NUM_WARMUP_STEPS + 5):
                peaks.append(run.meter.peak.peak_bytes() / MIB)
        has_room.append(_can_have(limit * 3 // 2))
    return faults, peaks, [*has_room, HostMemory.limit_bytes is None]


def _can_have(num_bytes: int) -> bool:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8).numel() == num_bytes
    except RuntimeError:
        return False


@pytest.mark.slow
def test_the_warm_up_measures_memory_and_the_steps_that_are_timed_run_as_in_any_program() -> None:
    """Pages that come back from the kernel would make a step two to three times as long."""
    faults, peaks, has_room = in_fresh_process(pages_of_a_run)
    warm_up, timed = faults[:NUM_WARMUP_STEPS], faults[NUM_WARMUP_STEPS + 2 :]
    assert max(timed) < min(warm_up) / 10, faults
    assert peaks[0] == peaks[1] > 5
    assert has_room == [False, True, True]


def test_a_limit_holds_inside_only_and_also_when_an_error_leaves_it() -> None:
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with HostMemory().held_to(2048 * MIB):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] <= status_bytes("VmData") + 2048 * MIB
        with pytest.raises(RuntimeError, match="allocate memory") as caught:
            torch.empty(4096 * MIB, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
    with pytest.raises(ArithmeticError), HostMemory().held_to(512 * MIB):
        raise ArithmeticError
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
    with HostMemory().held_to(None):
        assert resource.getrlimit(resource.RLIMIT_DATA) == limits


CUDA = torch.device("cuda", 0)


class Clock:
    """Seconds that pass when they are waited for, and what is free on a device meanwhile."""

    def __init__(self, free_from: dict[float, int]) -> None:
        self.seconds, self._free_from = 0.0, free_from

    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    def free(self) -> int:
        return [free for since, free in self._free_from.items() if since <= self.seconds][-1]


@pytest.mark.parametrize(
    ("free_from", "expected", "seconds"),
    [
        ({0: 70}, 70, SETTLED_SECONDS),
        ({0: 10, 1.5: 40, 3.0: 70}, 70, 3.0 + SETTLED_SECONDS),
        ({0: 70, 1.0: 30}, 70, SETTLED_SECONDS),
        ({0.5 * number: number for number in range(100)}, 40, MOST_SECONDS_TO_SETTLE),
    ],
    ids=["at rest", "a predecessor that ends in two parts", "this process takes its own", "never"],
)
def test_what_is_free_counts_once_a_process_that_still_ends_has_given_its_memory_back(
    free_from: dict[float, int], expected: int, seconds: float
) -> None:
    clock = Clock(free_from)
    assert settled(clock.free, clock.wait) == expected
    assert clock.seconds == pytest.approx(seconds, abs=0.3)


def test_what_a_process_can_have_of_a_gpu_is_what_was_free_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others on the device and the context are gone for good, and what the process takes itself stays its own."""
    capacity_bytes.cache_clear()
    monkeypatch.setattr(gpu_memory.time, "sleep", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * MIB, 80 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * MIB)
    assert capacity_bytes(CUDA) == 72 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * MIB, 80 * MIB))
    assert capacity_bytes(CUDA) == 72 * MIB
    capacity_bytes.cache_clear()


def test_the_allocators_retries_count_in_timed_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = {"num_alloc_retries": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: allocator)
    monkeypatch.setattr(torch.cuda, "reset_accumulated_memory_stats", lambda _: allocator.update(num_alloc_retries=0))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    meter = Meter(config(), CPU, 0.0)
    meter.peak = GpuPeak(CUDA)
    one = torch.ones(())
    for step in range(NUM_WARMUP_STEPS + 2):
        allocator["num_alloc_retries"] += 1
        assert meter.peak.retries()["allocator_retries"] >= 1, step
        meter.end_of_step(one, one, one, None)
    meter.read()
    allocator["num_alloc_retries"] += 5  # those of an evaluation, whose tensors have other sizes
    assert meter.metrics(torch.nn.Linear(1, 1), 1, None)["allocator_retries"] == 2
    assert HostPeak().retries() == {}


def test_on_a_gpu_the_peak_is_what_was_reserved_and_its_tensors_stand_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What does not fit is what cannot be reserved. What is reserved when the peak is forgotten, and held by nothing, was another's."""
    allocator = {"reserved": 5 * MIB, "allocated": 3 * MIB, "reserved_now": 5 * MIB}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: allocator.update(reserved_now=MIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: allocator["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: allocator["allocated"])
    monkeypatch.setattr(
        torch.cuda,
        "reset_peak_memory_stats",
        lambda _: allocator.update(reserved=allocator["reserved_now"], allocated=0),
    )
    monkeypatch.setattr(torch.cuda, "reset_accumulated_memory_stats", lambda _: None)
    monkeypatch.setattr(gpu_memory, "capacity_bytes", lambda _: 80 * MIB)
    meter = GpuPeak(CUDA)
    assert meter.peak_bytes() == MIB
    allocator.update(reserved=7 * MIB, allocated=4 * MIB)
    assert meter.peak_bytes() == 7 * MIB
    assert GpuMemory(CUDA).metrics() == {"peak_allocated_bytes": 4 * MIB, "device_memory_bytes": 80 * MIB}


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_a_limit_on_a_gpu_is_its_share_of_the_device_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    """torch refuses a share for a device without a number, where other calls take the current one."""
    shares: list[tuple[float, Any]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=80 * MIB))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, where: shares.append((share, where.index))
    )
    with GpuMemory(torch.device(device)).held_to(20 * MIB):
        assert shares == [(0.25, index)]
    assert shares[-1] == (1.0, index)


def device_that_failed(*_: Any) -> None:
    """As every call that touches a device after a kernel of it has failed (c10/cuda/CUDAException.cpp, torch 2.11)."""
    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_a_device_that_no_longer_answers_keeps_nobody_knows_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * MIB)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * MIB, 8 * MIB))
    assert (GpuMemory(CUDA).bytes_kept(), GpuMemory(CUDA).free_bytes()) == (3 * MIB, 5 * MIB)
    monkeypatch.setattr(torch.cuda, "synchronize", device_that_failed)
    monkeypatch.setattr(torch.cuda, "mem_get_info", device_that_failed)
    assert (GpuMemory(CUDA).bytes_kept(), GpuMemory(CUDA).free_bytes()) == (None, None)
    assert HostMemory().free_bytes() is None


@pytest.mark.parametrize("ran_out", [True, False])
def test_a_gpus_process_goes_on_where_the_device_answers_and_its_memory_is_back_whatever_the_trial_came_to(
    monkeypatch: pytest.MonkeyPatch, ran_out: bool
) -> None:
    kept: list[int | None] = [gpu_memory.TOLERANCE_BYTES, gpu_memory.TOLERANCE_BYTES + 1, None]
    monkeypatch.setattr(GpuMemory, "bytes_kept", lambda _: kept.pop(0))
    assert [GpuMemory(CUDA).is_fit(0, ran_out=ran_out) for _ in range(3)] == [True, False, False]


def test_what_a_cpus_process_keeps_counts_only_where_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it may be code that was loaded for the first time."""
    tolerance = host_memory.TOLERANCE_BYTES
    monkeypatch.setattr(HostMemory, "bytes_kept", lambda _: 2 * tolerance)
    assert HostMemory().is_fit(0, ran_out=False)
    assert not HostMemory().is_fit(0, ran_out=True)
    assert HostMemory().is_fit(tolerance, ran_out=True)


@pytest.mark.parametrize(
    ("limit_bytes", "expected_bytes"),
    [(None, 70 * MIB), (8 * MIB, 5 * MIB), (100 * MIB, 70 * MIB), (2 * MIB, 0)],
    ids=[
        "no limit",
        "a limit below the device",
        "others hold the rest of the device",
        "more was held before the limit",
    ],
)
def test_what_is_free_on_a_gpu_ends_at_the_runs_own_limit(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None, expected_bytes: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * MIB, 80 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * MIB)
    assert GpuMemory(CUDA).free_bytes(limit_bytes) == expected_bytes


def bytes_of_threads(count: int) -> int:
    """By how much VmData grows while so many threads that do nothing are alive."""
    before, done = status_bytes("VmData"), threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    grown = status_bytes("VmData") - before
    done.set()
    for thread in threads:
        thread.join()
    return grown


def growth_of_threads() -> tuple[int, int]:
    with HostMemory().held_to(64 * MIB):
        inside = bytes_of_threads(4)
    return inside, bytes_of_threads(8)


def test_a_librarys_new_threads_do_not_use_up_the_limit(small_laws: dict[str, Any]) -> None:
    inside, after = small_laws["threads"]
    assert inside < 4 * 1.5 * MIB, "and what the heap grows by meanwhile"
    assert after > 4 * 4 * MIB, "of eight at most four got a small stack that was left"


def held_under_a_hard_limit() -> str:
    most = status_bytes("VmData") + 200 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with HostMemory().held_to(100 * MIB):
        pass
    try:
        with HostMemory().held_to(300 * MIB):
            return "held"
    except ValueError as error:
        return str(error)


def test_a_limit_of_the_system_below_that_of_the_study_is_named_with_how_it_is_removed() -> None:
    finding, remedy = in_fresh_process(held_under_a_hard_limit).split("; ")
    assert "(ulimit -Hd)" in finding
    assert "memory_limit asks for 300 MiB" in finding
    assert "ulimit -d unlimited" in remedy
