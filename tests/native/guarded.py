"""Calls the native kernels with tensors that lie at the edge of memory that may not be touched.

``python guarded.py after`` puts the end of every tensor before such a page, ``before`` its start
behind one, so that the first byte beyond it ends the process. Unlike a sanitizer this needs no
build, and tests every instruction set as it is installed. ``beyond`` reads such a byte.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "numeric"))

from test_cpu_layer import Weights

from attention_cases import Case, Shape, make_case
from rows_of_settings import whole_row
from weft.kernels.block_arrays import BlockArrays
from weft.kernels.cpu import attention
from weft.kernels.cpu.blocks import copy_blocks
from weft.kernels.cpu.matrix import CpuMatrix, gather, linear
from weft.kernels.cpu.sample import sample
from weft.kernels.kv_storage import SCALED

SIDE = sys.argv[1]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
empty = torch.empty


def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor between two pages that may not be touched, next to one of them."""
    size = empty(shape, dtype=dtype, device="meta").nbytes
    if size == 0:
        return empty(shape, dtype=dtype)
    page, pages = mmap.PAGESIZE, -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for place in (0, pages + 1):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + place * page), page, 0) == 0
    offset = page if SIDE == "before" else (pages + 1) * page - size
    return (
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        .view(dtype)
        .view(shape)
    )


def guarded(tensor: Tensor) -> Tensor:
    return room(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def made_by_kernels(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return room(tuple(shape), dtype)


def guarded_parts(parts: Any) -> Any:
    """The same dataclass with all of its tensors guarded."""
    tensors = {name: x for name, x in vars(parts).items() if isinstance(x, Tensor)}
    return replace(parts, **{name: guarded(x) for name, x in tensors.items()})


def attend(draw: random.Random) -> None:
    kv_heads = draw.randint(1, 3)
    dtype = draw.choice(FLOATS)
    shape = Shape(
        heads=kv_heads * draw.randint(1, 8),
        kv_heads=kv_heads,
        head_size=draw.choice([7, 16, 24, 40, 64, 80, 96, 128, 160, 256]),
        block_size=draw.choice([1, 7, 16, 32]),
        window=draw.choice([None, None, 5, 100]),
        softcap=draw.choice([None, 30.0]),
        dtype=dtype,
        cache_dtype=draw.choice([dtype, *FLOATS, *SCALED]),
        sinks=draw.random() < 0.5,
    )
    rows = [(draw.choice([1, 1, 3, 40]), draw.randint(0, 300)) for _ in range(draw.randint(1, 4))]
    case: Case = make_case(rows, shape)
    case = guarded_parts(replace(case, batch=guarded_parts(case.batch)))
    assert case.run_in_place(attention.paged_attention, case.k_cache, case.v_cache).isfinite().all()


class GuardedWeights(Weights):
    def random(self, *shape: int) -> Tensor:
        return guarded(super().random(*shape))


def multiply(draw: random.Random) -> None:
    dtype = draw.choice([torch.float32, torch.bfloat16])
    outputs, inputs, rows = (draw.randint(1, 300) for _ in range(3))
    matrix = CpuMatrix(guarded(torch.randn(outputs, inputs).to(dtype)))
    gather(matrix, guarded(torch.arange(outputs)))
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    assert linear(guarded(x), matrix, guarded(bias)).isfinite().all()


def run_layer(draw: random.Random) -> None:
    weights = GuardedWeights(draw, draw.choice([torch.float32, torch.bfloat16]))
    residual, cos, sin, attended = map(guarded, weights.inputs(draw.randint(1, 40)))
    layer = weights.layer()
    layer.pre(residual, cos, sin)
    layer.post(attended, residual)


def choose_tokens(draw: random.Random) -> None:
    rows, size = draw.randint(1, 5), draw.choice([1, 3, 130, 5003])
    filters = draw.choice([0, 7]), draw.choice([1, 0.9]), 0.01
    settings = [whole_row(draw.choice([0, 0.7, 1]), *filters)]
    numbers = torch.arange(rows)
    tokens = room((rows,), torch.int64)
    finite = room((rows,), torch.bool)
    sample(
        guarded(torch.randn(rows, size)),
        guarded(torch.tensor(settings * rows, dtype=torch.float64)),
        *(guarded(numbers), guarded(numbers), tokens, finite),
    )
    assert ((tokens >= 0) & (tokens < size)).all()


def copy_whole_blocks(draw: random.Random) -> None:
    shape = draw.randint(1, 40), draw.randint(1, 9), draw.choice([1, 7, 5003])
    sources, targets = ([guarded(torch.randn(shape)) for _ in range(2)] for _ in range(2))
    blocks = draw.sample(range(shape[0]), shape[0])
    copy_blocks(BlockArrays(sources), BlockArrays(targets), range(shape[0]), blocks)
    assert all(torch.equal(x, y[blocks]) for x, y in zip(sources, targets, strict=True))


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if SIDE == "beyond":
        ctypes.string_at(room((5,), torch.float32).data_ptr(), 21)
        return
    torch.empty = made_by_kernels
    torch.empty_like = lambda x: made_by_kernels(x.shape, x.dtype)
    for isa in attention.isas():
        attention.use_isa(isa)
        draw = random.Random(isa)
        for call in (attend, multiply, run_layer, choose_tokens, copy_whole_blocks):
            for _ in range(25):
                call(draw)
    print("good")


if __name__ == "__main__":
    main()
