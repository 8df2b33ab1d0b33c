"""A chain of small kernels, each of which may begin while the one before it ends (PDL)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SIZE, BLOCK = 128 * 3584, 1024


@triton.jit
def add_one(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDS: tl.constexpr):
    """Write x + 1. With DEPENDS the next kernel begins at once, and waits before it reads."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < SIZE) + 1.0, mask=at < SIZE)


def chain(length: int, *, depends: bool) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return what runs so many of them, and whether all have waited for the one before."""
    numbers = [torch.zeros(SIZE, device="cuda") for _ in range(2)]

    def run() -> None:
        numbers[0].zero_()
        for i in range(length):
            source, target = numbers[i % 2], numbers[1 - i % 2]
            grid = (triton.cdiv(SIZE, BLOCK),)
            add_one[grid](source, target, SIZE, BLOCK, depends, launch_pdl=depends)

    def right() -> bool:
        return bool((numbers[length % 2] == length).all())

    return run, right
