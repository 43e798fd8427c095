"""A CPU host's memory (Linux): RLIMIT_DATA holds the process to its warm idle size plus the limit, so that running out is the
allocator's own error; the peak is VmHWM above the idle size, pages of files left out.

Memory is measured in a run's warm-up steps, in which what is freed goes back to the kernel at once: the peak is then the tensors'
and not the heap's history. But a page that comes back costs a fault, which makes a step two to three times as long, and by more
where tensors are larger. So the steps that are timed keep what was freed, as the C library does in any other program."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

T = TypeVar("T")

# A process that has run out of memory is fit for another run if it holds no more than this above its idle size.
TOLERANCE_BYTES = 64 * 2**20

SMALL_STACK_BYTES = 1 << 20

# Of mallopt(3): a freed block of this size goes back to the kernel at once, and so does a free end of the heap of that size.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
GIVING_BACK = (64 << 10, 64 << 10)
MOST_GAPS = (
    1 << 16
)  # where the user's environment has it map no blocks (MALLOC_MMAP_MAX_=0), any number would be of the heap
KEEPING = (32 << 20, 64 << 20)  # what glibc's own thresholds come to once blocks of 32 MiB have been freed


def status_bytes(key: str) -> int:
    """Return a figure of /proc/self/status (VmData, VmRSS, VmHWM) in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not report {key}")


class HostMemory:
    """A CPU host's memory, asked as `GpuMemory` is: limits and peaks count from what the process holds before a run."""

    limit_bytes: ClassVar[int | None] = None
    """What this process is held to now, above its idle size."""

    def idle_bytes(self) -> int:
        return status_bytes("VmData")

    def free_bytes(self, limit_bytes: int | None = None) -> int | None:
        return None

    def give_back(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def bytes_kept(self) -> int | None:
        self.give_back()
        return self.idle_bytes()

    def is_fit(self, idle_bytes: int, *, ran_out: bool) -> bool:
        """A process also grows by what its libraries load, so what it keeps counts only where memory ran out."""
        kept = self.bytes_kept()
        return kept is not None and (not ran_out or kept - idle_bytes <= TOLERANCE_BYTES)

    def without_after_effects(self, run: Callable[[], T]) -> T:
        """Return run(), from a thread of its own.

        oneDNN's code generator (Xbyak) keeps the first error of each thread for as long as the thread lives, and that there
        was no room for a kernel is one: whatever needs a new kernel in this thread would be said to run out of memory, too.
        """
        # A CUDA build of torch 2.11 without a GPU dies in the second thread that enters this mode, unless one that lives on was the first.
        with FakeTensorMode():
            pass
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_with_its_helpers, run).result()

    @contextlib.contextmanager
    def held_to(self, limit_bytes: int | None, idle_bytes: int | None = None) -> Iterator[None]:
        if limit_bytes is None:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        base = self.idle_bytes() if idle_bytes is None else idle_bytes
        if hard != resource.RLIM_INFINITY and hard < base + limit_bytes:
            raise ValueError(
                f"a process may have {hard >> 20:,} MiB of data here (ulimit -Hd), and memory_limit asks for {limit_bytes >> 20:,} MiB beside the "
                f"{base >> 20:,} MiB that a rank has when idle; remove the limit where the study, or Ray on this node, is started (ulimit -d "
                "unlimited), or lower memory_limit"
            )
        with _small_stacks():
            resource.setrlimit(resource.RLIMIT_DATA, (base + limit_bytes, hard))
            HostMemory.limit_bytes = limit_bytes
            try:
                yield
            finally:
                HostMemory.limit_bytes = None
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def peak(self) -> HostPeak:
        return HostPeak()

    def metrics(self) -> dict[str, float]:
        return {}


class HostPeak:
    """What the tensors of a run take at most, above the idle process, in its warm-up steps. Pages of files (code that is run for the first
    time, samples that are mapped) are left out: they never run out."""

    def __init__(self) -> None:
        _set_allocator(*GIVING_BACK)
        self._gaps = _gaps_in_the_heap()
        ctypes.CDLL(None).malloc_trim(0)
        self.forget()
        self.idle_resident_bytes = status_bytes("VmRSS") - status_bytes("RssFile")

    def forget(self) -> None:
        self._of_warm_up: int | None = None
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS; ru_maxrss cannot be reset

    def end_warm_up(self) -> None:
        """Keep what is freed from here on. That takes a third to a half more than the tensors do, so the limit is twice what it was."""
        if self._of_warm_up is not None:
            return
        self._of_warm_up = self.peak_bytes()
        self._gaps.close()
        _set_allocator(*KEEPING)
        if HostMemory.limit_bytes is not None:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            raised = soft + HostMemory.limit_bytes
            resource.setrlimit(
                resource.RLIMIT_DATA, (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard)
            )

    def retries(self) -> dict[str, float]:
        return {}

    def peak_bytes(self) -> int:
        if self._of_warm_up is not None:
            return self._of_warm_up
        return max(0, status_bytes("VmHWM") - status_bytes("RssFile") - self.idle_resident_bytes)


class _Held:
    """Blocks of the C library's heap that nobody uses, until they are let go."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.close = weakref.finalize(self, _free, blocks)


def _gaps_in_the_heap() -> _Held:
    """Take what earlier runs have left free between blocks that live on: a large block that came to lie there would not go back to the kernel when
    it is freed, and the peak would be the heap's history after all. Their pages are not touched, so they take no memory."""
    libc, blocks = ctypes.CDLL(None), list[int]()
    libc.malloc.restype = ctypes.c_void_p
    for size in (GIVING_BACK[0] << power for power in range(10, -1, -1)):
        block = libc.malloc(ctypes.c_size_t(size))
        while block is not None and not _is_mapped(block) and len(blocks) < MOST_GAPS:
            blocks.append(block)
            block = libc.malloc(ctypes.c_size_t(size))
        if block is not None:
            libc.free(ctypes.c_void_p(block))
    return _Held(blocks)


def _is_mapped(block: int) -> bool:
    """True of a block that the kernel has mapped by itself, outside of the heap: the second bit of glibc's header."""
    return bool(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2)


def _free(blocks: Sequence[int]) -> None:
    libc = ctypes.CDLL(None)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))


def _set_allocator(block_bytes: int, end_bytes: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, block_bytes)
    libc.mallopt(M_TRIM_THRESHOLD, end_bytes)


def _with_its_helpers(run: Callable[[], T]) -> T:
    """Start the threads with which this one computes before a limit counts their stacks: OpenMP's belong to one thread."""
    torch.zeros(torch.get_num_threads() << 16).add_(1.0)
    return run()


@contextlib.contextmanager
def _small_stacks() -> Iterator[None]:
    """Give new threads small stacks: the whole of a stack, 8 MiB by default, counts as data."""
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(64), ctypes.c_size_t()
    libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    _set_stack_bytes(libc, attributes, min(SMALL_STACK_BYTES, size.value))
    try:
        yield
    finally:
        _set_stack_bytes(libc, attributes, size.value)


def _set_stack_bytes(libc: ctypes.CDLL, attributes: ctypes.Array[ctypes.c_char], stack_bytes: int) -> None:
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(stack_bytes))
    libc.pthread_setattr_default_np(attributes)
