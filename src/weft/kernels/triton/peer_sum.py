"""Sums over ranks by one exchange of peer memory: every rank reads the parts of all.

The one-shot all-reduce of vLLM (csrc/custom_all_reduce.cuh) and TensorRT-LLM, with two differences:
parts are added in the order of ranks, in float32, so that all ranks get the same bits
(``collectives.in_order``), and all state is on the device, so that captured steps may be replayed
in any order.

Each program publishes and sums its own part of a message, and counts its own sums. With an odd and
an even slot it need not wait at the end: who publishes sum n + 2 has seen every rank publish sum
n + 1, which each did after it had read sum n.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import power_of_2

PART_BYTES = 4096  # of a message that a program publishes and sums
MOST_RANKS = 8
STOPS, STOP_S = 100, 1e-3  # how often ``stop`` is written, and the seconds between


@triton.jit(do_not_specialize=["rank", "flags_at"])
def _publish(
    x, memories, epochs, count, rank, slot_bytes, flags_at,
    SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    epoch = tl.load(epochs + program)
    at = program * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < count)
    slot = tl.load(memories + rank) + (epoch % 2) * slot_bytes
    slot = tl.multiple_of(slot.to(tl.pointer_type(x.dtype.element_ty)), 16)
    tl.store(slot + at, numbers, mask=at < count)
    tl.debug_barrier()  # all threads have stored: what one releases now includes it
    for peer in tl.static_range(SIZE):
        flags = (tl.load(memories + peer) + flags_at).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flags + rank * PROGRAMS + program, epoch + 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank", "flags_at"])
def _sum(
    out, memories, epochs, stop, count, rank, slot_bytes, flags_at,
    SIZE: tl.constexpr, PEERS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    epoch = tl.load(epochs + program)
    peers = tl.arange(0, PEERS)
    flags = (tl.load(memories + rank) + flags_at).to(tl.pointer_type(tl.int64))
    flags += peers * PROGRAMS + program
    nothing = tl.zeros((PEERS,), tl.int64)
    waiting = 1
    while waiting > 0:
        seen = tl.atomic_or(flags, nothing, mask=peers < SIZE, sem="acquire", scope="sys")
        late = (seen <= epoch) & (peers < SIZE)
        waiting = tl.sum(late.to(tl.int32))
        if tl.atomic_or(stop, 0, sem="acquire", scope="sys") != 0:
            waiting = 0  # a rank has ended, and the host knows
    tl.debug_barrier()  # what one thread has acquired, all have
    at = program * BLOCK + tl.arange(0, BLOCK)
    shift = (epoch % 2) * slot_bytes
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):
        slot = (tl.load(memories + peer) + shift).to(tl.pointer_type(out.dtype.element_ty))
        slot = tl.multiple_of(slot, 16)
        part = tl.load(slot + at, mask=at < count, cache_modifier=".cg").to(tl.float32)
        total = part if peer == 0 else total + part
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
    tl.store(epochs + program, epoch + 1)


def memory_bytes(most_bytes: int, size: int) -> int:
    """Bytes of a rank's peer memory for messages of so many bytes: two slots, and flags."""
    return 2 * most_bytes + 8 * size * (most_bytes // PART_BYTES)


@dataclass(frozen=True)
class PeerSum:
    """The sum over the ranks whose memory is mapped here.

    Attributes:
        rank: of this process.
        memories: [size] int64, where the memory of each rank begins; zeros when it is made.
        most_bytes: of a message; a multiple of ``PART_BYTES``.
        epochs: [most_bytes / PART_BYTES] int64 on the device: sums of each program so far.
        stop: [1] int32 that the host may set: nobody waits for ranks any more.
        owner: what must live as long as the memory.
    """

    rank: int
    memories: Tensor
    most_bytes: int
    epochs: Tensor
    stop: Tensor
    owner: Any = None

    def takes(self, x: Tensor) -> bool:
        """Whether a message is not too large."""
        return 0 < x.nbytes <= self.most_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's ``x`` [...], in its dtype.

        All ranks call it with the same shapes, in the same order.

        Raises:
            ValueError: the message is too large.
        """
        x = x.contiguous()
        self.publish(x)
        return self.collect(x)

    def end_waits(self) -> None:
        """Let nobody wait any more. For another thread than those that sum.

        Programs read ``stop`` atomically, for which a GPU may write back what it has read: where
        its link has no atomic operations, that undoes what the host has written meanwhile.
        """
        for _ in range(STOPS):
            self.stop.fill_(1)
            time.sleep(STOP_S)

    def publish(self, x: Tensor) -> None:
        """Let all ranks read a contiguous ``x``. Raises ValueError if it is too large."""
        if not self.takes(x):
            raise ValueError(f"{x.nbytes} bytes are not 1 to {self.most_bytes}")
        _publish[self._grid(x)](
            x, self.memories, self.epochs, *self._sizes(x), **self._constants(x)
        )

    def collect(self, x: Tensor) -> Tensor:
        """Wait for what every rank publishes; return the sum, of the shape and dtype of ``x``."""
        out, peers = torch.empty_like(x), power_of_2(len(self.memories))
        _sum[self._grid(x)](
            out, self.memories, self.epochs, self.stop, *self._sizes(x),
            PEERS=peers, **self._constants(x),
        )  # fmt: skip
        return out

    def _grid(self, x: Tensor) -> tuple[int]:
        return (-(-x.nbytes // PART_BYTES),)

    def _sizes(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.numel(), self.rank, self.most_bytes, 2 * self.most_bytes

    def _constants(self, x: Tensor) -> dict[str, int]:
        return {
            "SIZE": len(self.memories),
            "PROGRAMS": len(self.epochs),
            "BLOCK": PART_BYTES // x.element_size(),
            "num_warps": 4,
        }
