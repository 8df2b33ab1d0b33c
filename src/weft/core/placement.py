"""On which NUMA nodes pages of memory lie, by the system calls for it.

Kernels without NUMA and most containers refuse these calls; the log then says so once, and pages
lie where the thread runs that touches them first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

logger = logging.getLogger("weft")

MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3
NODES = 1024  # the most that kernels are built for
_MBIND = {"x86_64": 237, "aarch64": 235}
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def interleave(start: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """Have the pages of fresh memory lie on nodes in turns; whether the system does.

    Args:
        start: the address of a page that nothing has touched yet.
        nodes: none for wherever they are touched first.
    """
    if not nodes:
        return False
    address, size = ctypes.c_void_p(start), ctypes.c_ulong(nbytes)
    return _call(_MBIND, "mbind", address, size, *_policy(nodes), ctypes.c_ulong(0))


def interleave_thread(nodes: Sequence[int]) -> bool:
    """Have all pages that this thread is first to touch lie on nodes in turns; whether they do.

    Among them are those of the page cache, whose place the memory that maps them has no say in.

    Args:
        nodes: none for the system's default.
    """
    return _call(_SET_MEMPOLICY, "set_mempolicy", *_policy(nodes))


@contextlib.contextmanager
def interleaving(nodes: Sequence[int]) -> Iterator[None]:
    """Do ``interleave_thread`` for a while, if there are any nodes."""
    changed = bool(nodes) and interleave_thread(nodes)
    try:
        yield
    finally:
        if changed:
            interleave_thread(())


def _policy(nodes: Sequence[int]) -> tuple[ctypes.c_int, object, ctypes.c_ulong]:
    """Mode, mask of nodes and its size in bits, as the calls take them."""
    if not nodes:
        return ctypes.c_int(MPOL_DEFAULT), None, ctypes.c_ulong(0)
    words = (ctypes.c_ulong * (NODES // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    # The kernel looks at one bit less than it is told.
    return ctypes.c_int(MPOL_INTERLEAVE), words, ctypes.c_ulong(NODES + 1)


def _call(numbers: dict[str, int], name: str, *arguments: object) -> bool:
    number = numbers.get(platform.machine())
    if number is None:
        _say_once(name, f"is not known for {platform.machine()}")
        return False
    if _syscall()(ctypes.c_long(number), *arguments):
        _say_once(name, f"is refused ({os.strerror(ctypes.get_errno())})")
        return False
    return True


@functools.cache
def _syscall() -> Any:
    return ctypes.CDLL(None, use_errno=True).syscall


@functools.cache
def _say_once(name: str, problem: str) -> None:
    logger.warning("Memory is not spread over the NUMA nodes: the call %s %s.", name, problem)
