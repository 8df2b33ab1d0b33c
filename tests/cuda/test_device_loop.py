"""Host code for the loop of a GPU: it lays out memory of an executor as the loop reads it.

The loop itself runs on the host, with one lane, and the steps of a real executor.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

import builds
from weft.exec.device import HostDevice
from weft.kernels.ops import select_ops

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BATCH, STEPS = 3, 130  # more than one execution launches


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    headers = ROOT / "src" / "weft"
    words = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{headers}"]
    words += [str(HERE / "host_loop.cpp")]
    return ctypes.CDLL(str(builds.program(words, [HERE / "host_loop.cpp", headers / "resident"])))


@pytest.fixture(scope="module")
def decoder():
    from shapes import random_decoder, shape

    ops = select_ops("cpu", "float32", "reference")
    with torch.inference_mode():
        return random_decoder(shape("tiny", 256), torch.float32, torch.device("cpu"), ops, "none")


@pytest.fixture(scope="module")
def truth(decoder):
    from leases import uncaptured

    return uncaptured(decoder, HostDevice(), BATCH, STEPS)


def test_structures_are_laid_out_as_the_loop_reads_them(library) -> None:
    from device_loop import Board, GroupRows, Loop, LoopState, Rows

    last = (
        (GroupRows, "begins"),
        (Rows, "finite"),
        (Board, "finite"),
        (LoopState, "computed"),
        (Loop, "graphs"),
    )
    found = (ctypes.c_int64 * (2 * len(last)))()
    library.layout_here(found)
    wanted = [(ctypes.sizeof(kind), getattr(kind, name).offset) for kind, name in last]
    assert list(found) == [number for pair in wanted for number in pair]


@pytest.mark.parametrize("driver", ["serve_here", "between_here"])
@pytest.mark.parametrize("stops", [False, True])
def test_the_loop_gives_the_tokens_of_planned_steps(library, decoder, truth, driver, stops) -> None:
    from device_loop import Loop, LoopMemory
    from leases import Rows

    rows = Rows(decoder, HostDevice(), BATCH, STEPS)
    rows.begin()
    packed, functions = rows.first(STEPS), rows.executor._functions

    def step() -> None:
        functions.forward(packed.forward, 1, carries=False)
        functions.sample(packed.sample)

    known = {token for tokens in truth[:20] for token in tokens}
    last = next(at for at in range(20, STEPS) if truth[at][1] not in known)
    stop_ids = [truth[last][1], 10**6] if stops else []
    ends = [at for at, tokens in enumerate(truth) if set(tokens) & set(stop_ids)]
    end = min([*ends, STEPS - 1])
    memory = LoopMemory(rows.executor, packed, [0] * BATCH, stop_ids, STEPS - 1, 60.0)
    call = ctypes.CFUNCTYPE(None)(step)
    for number in range(2):
        memory.loop.graphs[0][number] = ctypes.cast(call, ctypes.c_void_p).value
    assert isinstance(memory.loop, Loop)
    getattr(library, driver)(ctypes.byref(memory.loop))
    found, why = memory.outcome()
    assert why == ("row" if stops else "steps")
    assert found == truth[: end + 1]
    assert memory.board.published == end
    rows.executor.close()


def test_a_bell_that_rings_ends_the_loop(library, decoder, truth) -> None:
    from device_loop import LoopMemory
    from leases import Rows

    rows = Rows(decoder, HostDevice(), BATCH, STEPS)
    rows.begin()
    packed, functions = rows.first(STEPS), rows.executor._functions
    memory = LoopMemory(rows.executor, packed, [0] * BATCH, [], STEPS - 1, 60.0)

    def step() -> None:
        functions.forward(packed.forward, 1, carries=False)
        functions.sample(packed.sample)
        memory.board.bell = int(memory.board.published == 7)

    call = ctypes.CFUNCTYPE(None)(step)
    memory.loop.graphs[0][0] = memory.loop.graphs[0][1] = ctypes.cast(call, ctypes.c_void_p).value
    library.serve_here(ctypes.byref(memory.loop))
    assert memory.outcome() == (truth[:8], "asked")
    rows.executor.close()
