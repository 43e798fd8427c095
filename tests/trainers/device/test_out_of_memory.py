"""Out of memory is recognised by the real texts of those who say it, and nothing else is taken for it."""

from __future__ import annotations

import errno

import pytest
import torch
from torch._inductor.exc import InductorError
from torch._inductor.runtime.triton_heuristics import NoTritonConfigsError

from batchscout.trainers.device.out_of_memory import LITTLE_FREE_BYTES, is_out_of_memory, refusal_in

MUCH = 8 * LITTLE_FREE_BYTES

# c10/cuda/CUDACachingAllocator.cpp, torch 2.11; ROCm's build says HIP for CUDA
ALLOCATOR = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.19 GiB is free."
)
# c10/cuda/CUDAException.cpp, torch 2.11
RUNTIME = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in CUDA's documentation for more information."
)
# c10/cuda/driver_api.h and ATen/cuda/Exceptions.h, torch 2.13: expandable segments, Inductor's static launcher
DRIVER = "CUDA driver error: out of memory"
# third_party/nvidia/backend/driver.c, Triton 3.6
TRITON = "Triton Error [CUDA]: out of memory"
# third_party/amd/backend/driver.c, Triton 3.4 ("Messsage" is theirs)
TRITON_ON_ROCM = "Triton Error [HIP]:  Code: 2, Messsage: out of memory"
# C10D_NCCL_CHECK and getNcclErrorDetailStr, torch 2.13; "Cuda failure" from src/include/checks.h, NCCL 2.27
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'"
)
# ATen/cuda/Exceptions.h and ATen/native/cuda/CuFFTUtils.h, torch 2.13, with each library's name of the status: cuBLAS's,
# hipBLAS's, cuFFT's, cuSOLVER's, cuDNN 8's, cuDNN 9's and MIOpen's
LIBRARIES = (
    "CUDA error: out of memory when calling `cusparseCreate(handle)`",  # in words: cusparseGetErrorString, CUDA 12
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "miopenStatusAllocFailed",
)
# The same, of a library that finds no room for its handle; NCCL's from src/include/alloc.h, NCCL 2.27. The last two from
# ATen/native/cudnn/Conv_v8.cpp, torch 2.11: it catches the allocator's refusal of each engine's workspace.
WITHOUT_SAYING_WHY = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`",
    "CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasLtCreate(&handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
)
# torch/csrc/inductor/static_launcher/cuda.cpp, torch 2.11: raised as OutOfMemoryError, and it is shared memory
BLOCK = (
    "out of resource: triton_red_fused_0 Required: 286784 Hardware limit:232448 Reducing block sizes or `num_stages` may "
    "help."
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("could not create a primitive"),
        torch.OutOfMemoryError(ALLOCATOR),
        torch.OutOfMemoryError(ALLOCATOR.replace("CUDA", "HIP")),
        torch.AcceleratorError(RUNTIME),
        torch.AcceleratorError(RUNTIME.replace("CUDA", "HIP")),
        torch.distributed.DistBackendError(NCCL),
        *(RuntimeError(text) for text in (DRIVER, TRITON, TRITON_ON_ROCM, *LIBRARIES)),
    ],
)
def test_every_way_to_say_it_is_recognised_whatever_is_free(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert is_out_of_memory(error, free_bytes=MUCH)


@pytest.mark.parametrize(
    "inner", [torch.OutOfMemoryError(ALLOCATOR), RuntimeError(TRITON), RuntimeError(DRIVER), MemoryError()]
)
def test_it_is_found_behind_the_errors_that_wrap_it(inner: Exception) -> None:
    """As Inductor wraps what autotuning raised, as code raises from it, and as clean-up fails while it is handled."""
    wrapped = InductorError(inner, None)
    wrapped.args = ("backend='inductor' raised:",)
    assert refusal_in(wrapped) is inner
    assert is_out_of_memory(NoTritonConfigsError(f"No valid triton configs. {type(inner).__name__}: {inner}")) == (
        not isinstance(inner, MemoryError)
    )
    with pytest.raises(KeyError) as raised_from:
        raise KeyError("layer") from inner
    assert refusal_in(raised_from.value) is inner
    with pytest.raises(KeyError) as while_handled:
        _raise_while_handling(inner)
    assert refusal_in(while_handled.value) is inner
    assert refusal_in(ExceptionGroup("two", [KeyError("layer"), inner])) is inner


def _raise_while_handling(inner: Exception) -> None:
    try:
        raise inner
    except Exception:
        {}["layer"]


def test_an_error_that_puts_another_aside_stands_for_itself() -> None:
    with pytest.raises(KeyError) as caught:
        _raise_instead_of(MemoryError())
    assert not is_out_of_memory(caught.value)


def _raise_instead_of(inner: Exception) -> None:
    try:
        raise inner
    except Exception:
        raise KeyError("layer") from None


def test_errors_that_refer_to_each_other_are_looked_at_once() -> None:
    one, other = KeyError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)


@pytest.mark.parametrize("text", WITHOUT_SAYING_WHY)
def test_a_library_that_does_not_say_why_it_failed_ran_out_of_memory_only_where_little_is_free(text: str) -> None:
    error = RuntimeError(text)
    assert is_out_of_memory(error, free_bytes=LITTLE_FREE_BYTES - 1)
    assert not is_out_of_memory(error, free_bytes=MUCH)
    assert not is_out_of_memory(error), "on a CPU, or on a device that does not answer"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not fit"),
        ValueError("std::bad_alloc"),
        KeyboardInterrupt(),
        torch.OutOfMemoryError(BLOCK),
        NoTritonConfigsError(f"No valid triton configs. OutOfMemoryError: {BLOCK}"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
        torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1. "),
    ],
)
def test_other_errors_are_not_out_of_memory_however_little_is_free(error: BaseException) -> None:
    assert not is_out_of_memory(error, free_bytes=0)
