"""Facts of the device that the Triton kernels need."""

from __future__ import annotations

from functools import cache

import torch
import triton

NONE = (0, 0)  # the capability of the interpreter
FP8_CAPABILITY = (8, 9)  # the first with arithmetic in E4M3
LEAST_SHARED_BYTES = 99 * 1024  # of the smallest of today's GPUs (sm_86, sm_89, sm_120)
ROWWISE_CAPABILITY = FP8_CAPABILITY  # the first that ``torch._scaled_mm`` takes a scale a row for
# Tensor cores of these majors add products of FP8 in full float32 by themselves. Those of Ada and
# Hopper keep 14 bits (DeepSeek-V3, section 3.3.2), unless sums are moved to float32 in between:
# cuBLASLt names these two where CUBLASLT_MATMUL_DESC_FAST_ACCUM has an effect.
FULL_SUMS = (10,)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; ``NONE`` of the interpreter."""
    return NONE if device.type != "cuda" else torch.cuda.get_device_capability(device)


def has_fp8(device: torch.device) -> bool:
    """Whether the device computes with E4M3; others get the same numbers in bfloat16."""
    return capability(device) >= FP8_CAPABILITY


def fast_sums(wish: str, device: torch.device) -> bool:
    """Return whether torch leaves whole sums of FP8 to the tensor cores: ``fp8_accumulation``.

    By default where they lose nothing by it, as ``gemm.py``, which computes fewer rows, loses
    nothing anywhere: a row's result must not get worse with the batch.
    """
    if wish == "auto":
        return capability(device)[0] in FULL_SUMS
    return wish == "fast"


def copies_beyond_caches(nbytes: int, device: torch.device) -> int:
    """Return how many copies of data are together twice as large as the caches of a GPU; else 1.

    Whoever measures with one after the other reads memory each time, as steps with many layers do.
    """
    if device.type != "cuda":
        return 1
    return 1 + 2 * int(torch.cuda.get_device_properties(device).L2_cache_size) // nbytes


@cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a CUDA device has; 1 of the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_bytes(device: torch.device) -> int:
    """Return how much shared memory a program may have on a CUDA device; little in the interpreter.

    Source of the least: CUDA C++ programming guide, technical specifications per capability.
    """
    if device.type != "cuda":
        return LEAST_SHARED_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
