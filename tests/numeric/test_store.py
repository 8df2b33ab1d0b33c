"""KV tensors: zeros that take no memory before they are written."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from weft.core.errors import OutOfMemoryError
from weft.engine.machine import resident_bytes
from weft.exec.memory import pinned_zeros
from weft.exec.store import KVStore
from weft.models.spec import KVGroup

BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM = 2**16, 4, 16, 64  # 512 MiB for each of the two tensors


def test_unwritten_blocks_take_no_memory_and_are_zero():
    group = KVGroup("full", (0,), None, HEADS, HEAD_DIM)
    before = resident_bytes(os.getpid())
    store = KVStore([group], [BLOCKS], BLOCK_SIZE, "bfloat16")
    keys = store.keys[0][0]
    assert keys.shape == (BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM)
    assert not keys[0].any()
    assert not keys[-1].any()
    assert resident_bytes(os.getpid()) - before < 64 * 2**20
    keys[5] = 1.0
    store.zero(0, 5)
    assert not keys[5].any()


class Runtime:
    """What the CUDA runtime is asked to pin and to let go."""

    def __init__(self, status: int = 0) -> None:
        self._status = status
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.pinned[address] = nbytes
        return self._status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        ctypes.string_at(address, self.pinned.pop(address))  # all of it is still mapped
        return 0


def test_memory_is_pinned_to_the_byte_and_let_go_with_its_last_view(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    numbers = pinned_zeros(3 * 2**20 + 8).view(torch.int64)
    assert runtime.pinned == {numbers.data_ptr(): 3 * 2**20 + 8}
    assert not numbers.any()
    view = numbers[5:].view(-1, 2)
    del numbers
    assert runtime.pinned
    del view
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(OutOfMemoryError, match=r"does not pin 1.00 MiB .*CUDA error 2.*ulimit"):
        pinned_zeros(2**20)
