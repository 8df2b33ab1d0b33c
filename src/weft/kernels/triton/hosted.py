"""Waits for experts that the host computes: one small program, which reads memory of the host.

What reads the result is a copy behind it, so that it finds what was written before the answer.
Nothing that the host does for an answer needs the driver, so a driver that wants to wait for this
program before it loads another one does no harm.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.hosted import GIVEN_UP, HostWord

_GIVEN_UP = tl.constexpr(GIVEN_UP)


@triton.jit(do_not_specialize=["looks"])
def _await_answer(answered_at, ticket, gave_up_at, looks):
    answered = tl.load(answered_at).to(tl.pointer_type(tl.int64))
    gave_up = tl.load(gave_up_at).to(tl.pointer_type(tl.int64))
    wanted, found = tl.load(ticket), tl.zeros([], tl.int64)
    left = tl.where(tl.load(gave_up, volatile=True) != 0, 0, looks)
    while (left > 0) & (found < wanted):
        found = tl.load(answered, volatile=True)
        left -= 1
    if (found < wanted) | (found == _GIVEN_UP):
        tl.store(gave_up, tl.full([], 1, tl.int64))


def await_answer(answered: HostWord, ticket: Tensor, gave_up: HostWord, looks: int) -> None:
    """Wait for the host; see ``hosted.await_answer``."""
    _await_answer[(1,)](answered.address, ticket, gave_up.address, looks, num_warps=1, num_stages=1)
