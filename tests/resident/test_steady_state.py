"""Steps of the resident loop allocate nothing, throw nothing and wait for no lock.

All threads are counted, those of the pool too, from one publication of tokens to the next one.
``locks``: threads of a pool that find nothing to do for 0.1 ms sleep until they are woken, both of
which takes the pool's mutex. Those alone are allowed, and with one thread there are none.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import builds
from depth import DEEP
from weft.kernels.cpu import _native

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src" / "weft"
NEVER = ("allocations", "throws", "strange_locks", "waits")
DRAWN = {"temperature": 0.9, "top_k": 40, "top_p": 0.9}
NUCLEUS = {"temperature": 1.3, "top_p": 0.95, "min_p": 0.01}
PENALISED = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "min_tokens": 8,
    "stop_token_ids": [3],
}
ASKS = ({}, DRAWN, NUCLEUS, PENALISED)
ALL = [(rows, ask) for rows in (1, 8, 32) for ask in ASKS]
FEW = [(1, {}), (8, DRAWN), (8, NUCLEUS), (32, PENALISED)]
# Of the widest instruction set, and of others.
CASES, OTHERS = (ALL, ALL) if DEEP else (FEW, FEW[:2])

Case = tuple[str, int, dict[str, Any], int]  # instruction set, rows, what they ask, a fault

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the functions that are counted are those of glibc"
)


@pytest.fixture(scope="module")
def library() -> Path:
    flags = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{HEADERS}"]
    return builds.program([*flags, HERE / "counting.cpp", "-ldl"], [HERE, HEADERS / "resident"])


def counted(
    library: Path, threads: int, cases: list[Case], *settings: str
) -> list[list[dict[str, int]]]:
    """What each step of each case did."""
    done = subprocess.run(
        [sys.executable, HERE / "steady.py", library, str(threads), json.dumps(cases), *settings],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "LD_PRELOAD": str(library)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(cases)
    assert all(len(steps) > 20 for steps in found), "too few steps were leased"
    return found


def sums(steps: list[dict[str, int]]) -> dict[str, int]:
    return {kind: sum(step[kind] for step in steps) for kind in steps[0]}


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_allocate_throw_and_lock_nothing(library, threads) -> None:
    """With every instruction set of this machine, for one thread and for those of a pool."""
    widest, *others = _native.isas()
    cases = [(widest, *case, 0) for case in CASES]
    if threads == 2 or DEEP:
        cases += [(isa, *case, 0) for isa in others for case in OTHERS]
    for case, steps in zip(cases, counted(library, threads, cases), strict=True):
        found = sums(steps)
        assert not any(found[kind] for kind in NEVER), (case, found)
        assert threads > 1 or not found["locks"], (case, found)


@pytest.mark.parametrize("settings", [("quantize=int8", "kv_dtype=fp8"), ("quantize=int4",)])
def test_steps_with_rounded_weights_allocate_nothing(library, settings) -> None:
    cases = [(_native.isas()[0], *case, 0) for case in CASES]
    for case, steps in zip(cases, counted(library, 2, cases, *settings), strict=True):
        found = sums(steps)
        assert not any(found[kind] for kind in NEVER), (case, found)


def test_what_a_step_does_wrong_is_found(library) -> None:
    """A fault a step: of the loop's own thread, and of another one; and rows of Python's."""
    isa = _native.isas()[0]
    cases = [(isa, 8, {}, fault) for fault in range(1, 5)]
    cases.append((isa, 8, {"allowed_token_ids": list(range(40, 90))}, 0))
    *faults, python = counted(library, 1, cases)
    expected = ("allocations", "throws", "strange_locks", "allocations")
    for kind, steps in zip(expected, faults, strict=True):
        others = set(NEVER) - {kind, *(("allocations",) if kind == "throws" else ())}
        assert all(step[kind] >= 1 for step in steps), kind
        assert not any(sums(steps)[other] for other in others)
    assert all(step["allocations"] for step in python)
