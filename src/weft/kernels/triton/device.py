"""Facts of the device that the Triton kernels need: of a GPU, or of one that is absent.

Tensors on ``meta`` have shapes and no numbers. Where kernels are compiled for a GPU that is absent,
they stand for its tensors (``stand_in``).
"""

from __future__ import annotations

from functools import cache

import torch
import triton

from weft.kernels.gpus import Gpu

NONE = (0, 0)  # the capability of the interpreter
FP8_CAPABILITY = (8, 9)  # the first with arithmetic in E4M3
LEAST_SHARED_BYTES = 99 * 1024  # of the smallest of today's GPUs (sm_86, sm_89, sm_120)
ROWWISE_CAPABILITY = FP8_CAPABILITY  # the first that ``torch._scaled_mm`` takes a scale a row for
# Tensor cores of these majors add products of FP8 in full float32 by themselves. Those of Ada and
# Hopper keep 14 bits (DeepSeek-V3, section 3.3.2), unless sums are moved to float32 in between:
# cuBLASLt names these two where CUBLASLT_MATMUL_DESC_FAST_ACCUM has an effect.
FULL_SUMS = (10,)

_absent: dict[str, Gpu] = {}  # by the type of the device that stands for it


def stand_in(gpu: Gpu | None) -> None:
    """Have ``meta`` stand for a GPU in this process from now on; None: for none."""
    _absent.clear()
    if gpu is not None:
        _absent["meta"] = gpu


def gpu_at(device: torch.device) -> Gpu | None:
    """Return the facts of a CUDA device, or of the GPU that a device stands for; else None."""
    return _present(device) if device.type == "cuda" else _absent.get(device.type)


@cache
def _present(device: torch.device) -> Gpu:
    index = torch.cuda.current_device() if device.index is None else device.index
    found = torch.cuda.get_device_properties(index)
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    capability = int(found.major), int(found.minor)
    processors = int(found.multi_processor_count)
    return Gpu(found.name, capability, processors, int(shared), int(found.total_memory))


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; ``NONE`` of the interpreter."""
    gpu = gpu_at(device)
    return NONE if gpu is None else gpu.capability


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


def processors(device: torch.device) -> int:
    """Return how many multiprocessors a CUDA device has; 1 of the interpreter."""
    gpu = gpu_at(device)
    return 1 if gpu is None else gpu.processors


def shared_bytes(device: torch.device) -> int:
    """Return how much shared memory a program may have on a CUDA device; little in the interpreter.

    Source of the least: CUDA C++ programming guide, technical specifications per capability.
    """
    gpu = gpu_at(device)
    return LEAST_SHARED_BYTES if gpu is None else gpu.shared_bytes
