"""Memory that lies on NUMA nodes in turns, as the kernel itself tells."""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
import subprocess
import sys
import threading

import numpy as np
import pytest

from weft.core import placement
from weft.core.topology import this_machine

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
AT_ADDRESS = 2
INTERLEAVED, DEFAULT = 3, 0

pytestmark = pytest.mark.skipif(
    platform.machine() not in GET_MEMPOLICY, reason="system calls have other numbers here"
)


def policy(address: int | None = None) -> tuple[int, set[int]]:
    """The mode and the nodes of this thread, or of the memory at an address."""
    mode, words = ctypes.c_int(), (ctypes.c_ulong * 16)()
    number = ctypes.c_long(GET_MEMPOLICY[platform.machine()])
    bits, flags = ctypes.c_ulong(1024), ctypes.c_ulong(AT_ADDRESS if address else 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(number, ctypes.byref(mode), words, bits, ctypes.c_void_p(address), flags):
        pytest.skip("this system refuses the calls for NUMA nodes")
    nodes = {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    return mode.value, nodes


@pytest.fixture
def nodes() -> tuple[int, ...]:
    policy()
    return this_machine().memory_nodes


def test_fresh_memory_is_spread_over_the_nodes(nodes):
    pages = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    array = np.frombuffer(pages, np.uint8)
    address = array.ctypes.data
    assert policy(address) == (DEFAULT, set())
    assert not placement.interleave(address, len(array), ())
    assert policy(address) == (DEFAULT, set())
    assert placement.interleave(address, len(array), nodes)
    assert policy(address) == (INTERLEAVED, set(nodes))


def test_what_a_thread_touches_is_spread_for_a_while(nodes):
    found = []

    def look() -> None:
        with placement.interleaving(nodes):
            found.append(policy())
        found.append(policy())
        with placement.interleaving(()):
            found.append(policy())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(INTERLEAVED, set(nodes)), (DEFAULT, set()), (DEFAULT, set())]
    assert policy() == (DEFAULT, set())


def test_a_refusal_is_said_once_and_is_no_error(caplog):
    placement._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not placement.interleave_thread((1000,))  # a node that no machine has
            with placement.interleaving((1000,)):
                pass
    (record,) = caplog.records
    text = record.getMessage()
    assert "Memory is not spread over the NUMA nodes: the call set_mempolicy is refused (" in text


UNKNOWN = """
import platform
platform.machine = lambda: "riscv64"
from weft.core.placement import interleave_thread
print(interleave_thread((0,)))
"""


def test_an_unknown_machine_goes_without():
    done = subprocess.run(
        [sys.executable, "-c", UNKNOWN], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
    assert "the call set_mempolicy is not known for riscv64" in done.stderr
