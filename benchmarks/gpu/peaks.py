"""Measured peaks of a device: memory reads, and matrix products of a type."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from figures import figure

from weft.kernels.triton.device import ROWWISE_CAPABILITY, capability
from weft.kernels.triton.tuned import graph_seconds

ROUNDS = 2  # on the CPU, where only a test looks at it

# Seconds of a call with one of so many copies of its data.
Clock = Callable[[Callable[[int], None], int], float]


def host_seconds(call: Callable[[int], None], copies: int) -> float:
    """Return the seconds of a call on the CPU, the best of two rounds over all copies."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for copy in range(copies):
            call(copy)
        best = min(best, (time.perf_counter() - start) / copies)
    return best


def clock_of(device: torch.device) -> Clock:
    """Return what measures on a device."""
    return graph_seconds if device.type == "cuda" else host_seconds


def read_bandwidth(device: torch.device, numbers: int = 2**29) -> float:
    """Return the bytes a second at which memory is read: the sum of so many float32 numbers."""
    data = torch.ones(numbers, device=device)
    out = torch.zeros((), device=device)
    return data.nbytes / clock_of(device)(lambda _: torch.sum(data, 0, out=out), 1)


def matrix_peak(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float | None:
    """Return the operations a second of a large product, by torch's own kernels.

    FP8 has one scale for each operand, the fastest product that there is. None where torch has no
    product of the type.
    """
    clock, operations = clock_of(device), 2.0 * size**3
    if dtype != torch.float8_e4m3fn:
        a, b = torch.randn(2, size, size, device=device, dtype=dtype)
        out = torch.empty(size, size, device=device, dtype=dtype)
        return operations / clock(lambda _: torch.mm(a, b, out=out), 1)
    if capability(device) < ROWWISE_CAPABILITY:
        return None
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    one = torch.ones((), device=device)

    def call(_: int) -> None:
        torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return operations / clock(call, 1)


def report_bandwidth(device: torch.device, numbers: int) -> float:
    """Measure and print the read bandwidth."""
    found = read_bandwidth(device, numbers)
    figure("read bandwidth", found / 1e12, "TB/s")
    return found


def report_peak(device: torch.device, dtype: torch.dtype, size: int) -> float | None:
    """Measure and print the matrix peak of a type."""
    found = matrix_peak(device, dtype, size)
    if found is None:
        print(f"torch has no product of {dtype} on this device")
    else:
        figure(f"matrix peak, {str(dtype).removeprefix('torch.')}", found / 1e12, "TFLOP/s")
    return found
