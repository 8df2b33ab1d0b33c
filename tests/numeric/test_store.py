"""KV tensors: zeros that take no memory before they are written."""

from __future__ import annotations

import os

import torch

from weft.engine.machine import resident_bytes
from weft.exec.store import KVStore
from weft.models.spec import KVGroup

BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM = 2**16, 4, 16, 64  # 512 MiB for each of the two tensors


def test_unwritten_blocks_take_no_memory_and_are_zero():
    group = KVGroup("full", (0,), None, HEADS, HEAD_DIM)
    before = resident_bytes(os.getpid())
    store = KVStore([group], [BLOCKS], BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))
    keys = store.keys[0][0]
    assert keys.shape == (BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM)
    assert not keys[0].any()
    assert not keys[-1].any()
    assert resident_bytes(os.getpid()) - before < 64 * 2**20
    keys[5] = 1.0
    store.zero(0, 5)
    assert not keys[5].any()
