"""Whether an error says that memory has run out. Every library has its own words for it, and wraps those of others."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import torch

from batchscout.trainers.errors import said_by

_TEXTS = (
    # torch's allocator, CUDA's runtime and driver, HIP's, Triton's launchers, and NCCL when one of these refused it
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "could not create a memory object",  # oneDNN's own ways to say it
    "could not create a primitive",
    "unable to mmap",
    "can't start new thread",  # no room for its stack
    "ALLOC_FAILED",  # cuBLAS, cuFFT, cuSOLVER, those of ROCm, and cuDNN before 9
    "ALLOCATION_FAILED",  # cuDNN from 9 on: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "miopenStatusAllocFailed",
)

_TEXTS_WITH_LITTLE_FREE = (
    "blasCreate(handle)",
    "blasLtCreate",  # cuBLAS, hipBLAS
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "Failed to CUDA calloc",  # NCCL
    "unable to find an engine to execute this computation",  # torch tried all of cuDNN's, and swallowed each refusal
)
"""Libraries say this for want of room, and also when a driver or an earlier kernel is broken, or when a GPU has no kernel for
a type (a convolution in bfloat16 on a T4)."""

LITTLE_FREE_BYTES = 1 << 30
"""What a library's context, kernels and workspace take, all together."""

_NO_ROOM_IN_A_BLOCK = "out of resource"
"""A kernel wants more of a block's shared memory than the chip has. No memory is freed by a smaller model, although
torch raises OutOfMemoryError for it."""


def is_out_of_memory(error: BaseException, free_bytes: int | None = None) -> bool:
    """True if this error, or one behind it, says that memory has run out. free_bytes: of the device; None on a CPU."""
    return refusal_in(error, free_bytes) is not None


def refusal_in(error: BaseException, free_bytes: int | None = None) -> BaseException | None:
    """Return the first error that says so: this one, what caused it, or what was being handled when it was raised."""
    return next((one for one in _with_those_behind(error, set()) if _says_so(one, free_bytes)), None)


def _with_those_behind(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    handled = None if error.__suppress_context__ else error.__context__
    compiler_met = getattr(error, "inner_exception", None)  # Dynamo's and Inductor's errors keep it there
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for behind in (error.__cause__, handled, compiler_met, *group):
        yield from _with_those_behind(behind, seen)


def _says_so(error: BaseException, free_bytes: int | None) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    said = said_by(error)
    is_little_free = free_bytes is not None and free_bytes < LITTLE_FREE_BYTES
    if any(text in said for text in (*_TEXTS, *(_TEXTS_WITH_LITTLE_FREE if is_little_free else ()))):
        return True
    return isinstance(error, torch.OutOfMemoryError) and _NO_ROOM_IN_A_BLOCK not in said
