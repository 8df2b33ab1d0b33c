"""Sums by peer memory in Triton: the bits of the reference on every rank, of any messages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import where
from weft.kernels.collectives import in_order
from weft.kernels.triton.peer_sum import PART_BYTES, PeerSum, memory_bytes

MOST = 3 * PART_BYTES


def ranks_of(size: int) -> list[PeerSum]:
    """Ranks of one process, whose memories are all here."""
    memories = [
        torch.zeros(memory_bytes(MOST, size), dtype=torch.uint8, device=where.NAME)
        for _ in range(size)
    ]
    table = torch.tensor([memory.data_ptr() for memory in memories], device=where.NAME)
    return [
        PeerSum(
            rank,
            table,
            MOST,
            torch.zeros(MOST // PART_BYTES, dtype=torch.int64, device=where.NAME),
            torch.zeros(1, dtype=torch.int32, device=where.NAME),
            memories,
        )
        for rank in range(size)
    ]


def summed(ranks: list[PeerSum], parts: list[Tensor]) -> list[Tensor]:
    """What each rank gets: all publish before the first one waits."""
    for rank, part in zip(ranks, parts, strict=True):
        rank.publish(part)
    return [rank.collect(part) for rank, part in zip(ranks, parts, strict=True)]


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Numbers whose sum depends on the order."""
    draw = torch.Generator(where.NAME).manual_seed(seed)
    return [
        (torch.randn(shape, generator=draw, device=where.NAME) * 3.0**rank).to(dtype)
        for rank in range(size)
    ]


def expected_of(parts: list[Tensor]) -> Tensor:
    """The reference; the interpreter rounds to bfloat16 towards zero."""
    if where.ON_GPU or parts[0].dtype is not torch.bfloat16:
        return in_order(parts)
    exact = in_order([part.float() for part in parts])
    return (exact.view(torch.int32) & -(2**16)).view(torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_gets_the_bits_of_the_reference(size) -> None:
    """Messages of other sizes and types one after the other, through both slots."""
    ranks = ranks_of(size)
    shapes = [(1, 7), (3, 1000), (1,), (PART_BYTES // 2,), (2, 1500), (5, 333), (1, 7)]
    for number, shape in enumerate(shapes):
        dtype = (torch.bfloat16, torch.float32, torch.float16)[number % 3]
        parts = parts_of(size, shape, dtype, number)
        expected = expected_of(parts)
        for found in summed(ranks, parts):
            assert found.dtype == dtype
            assert torch.equal(found, expected)
        if size > 2 and dtype is torch.float32:
            assert parts[0].numel() < 9 or not torch.equal(in_order(parts[::-1]), expected)


def test_a_rank_that_is_ahead_overwrites_nothing_that_is_read() -> None:
    """It has published the next sum when another one reads this one."""
    ranks, size = ranks_of(2), (2, 1100)
    first, second = (parts_of(2, size, torch.float32, seed) for seed in (1, 2))
    for rank, part in zip(ranks, first, strict=True):
        rank.publish(part)
    assert torch.equal(ranks[1].collect(first[1]), in_order(first))
    ranks[1].publish(second[1])  # as its stream goes on
    assert torch.equal(ranks[0].collect(first[0]), in_order(first))
    ranks[0].publish(second[0])
    for rank, part in zip(ranks, second, strict=True):
        assert torch.equal(rank.collect(part), in_order(second))


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    alone = ranks_of(2)[0]
    x = torch.ones(10, device=where.NAME)
    alone.publish(x)
    alone.end_waits()
    assert alone.collect(x).shape == x.shape


def test_large_messages_are_refused() -> None:
    rank = ranks_of(2)[0]
    large = torch.zeros(MOST // 4 + 1, device=where.NAME)
    assert not rank.takes(large)
    assert rank.takes(large[1:])
    assert not rank.takes(large[:0])
    with pytest.raises(ValueError, match=f"{MOST + 4} bytes are not 1 to {MOST}"):
        rank.publish(large)
