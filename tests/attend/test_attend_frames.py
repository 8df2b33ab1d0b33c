"""Bodies of frames: what is packed is read back, and whatever else comes is a typed error."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from geometries import content, geometry, jobs, joined, numbers
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.attend import frames
from weft.attend.frames import JobResults, KVBlocks
from weft.attend.geometry import Geometry, GroupGeometry, LayerGeometry
from weft.core.errors import PlaceError, PlaceRefusedError
from weft.kernels.cpu.courier import ClaimedJobs


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.ndarray):
        return found.shape == wanted.shape and bool((found == wanted).all())
    if isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


@searching(100)
@given(st.integers(1, 9), st.booleans(), st.lists(st.integers(1, 7), max_size=3), st.integers(0, 9))
def test_jobs_come_back(rows, begins, widths, size):
    sent = jobs(rows, 3, begins, widths, size)
    found = frames.unpack_jobs(joined(frames.pack_jobs(sent)))
    for name in ClaimedJobs.__dataclass_fields__:
        assert same(getattr(found, name), getattr(sent, name)), name


@searching(60)
@given(st.integers(1, 9), st.integers(0, 40))
def test_kv_results_and_slots_come_back(rows, size):
    kv = KVBlocks(1, 5, numbers(rows, "int32", 1), content(rows, size, 2))
    assert same(frames.unpack_kv(joined(frames.pack_kv(kv))), kv)
    results = JobResults(
        7, numbers(rows, "int32", 1), numbers(rows, "uint64", 2), content(rows, 4, 3)
    )
    assert same(frames.unpack_results(joined(frames.pack_results(results))), results)
    slots = numbers(rows, "int32", 4)
    assert same(frames.unpack_slots(joined(frames.pack_slots(slots))), slots)
    assert frames.unpack_ready(joined(frames.pack_ready([3, rows])), 2) == (3, rows)
    refusal = frames.pack_refusal("so it is", final=True)
    assert frames.unpack_refusal(joined(refusal)) == ("so it is", True)


KV = KVBlocks(0, 0, numbers(3, "int32", 1), content(3, 8, 2))
RESULTS = JobResults(1, numbers(2, "int32", 1), numbers(2, "uint64", 1), content(2, 8, 2))


def body(*parts: frames.Part) -> bytes:
    return bytes(joined(parts))


READERS: dict[str, tuple[Callable[[memoryview], Any], bytes]] = {
    "kv": (frames.unpack_kv, body(*frames.pack_kv(KV))),
    "jobs": (frames.unpack_jobs, body(*frames.pack_jobs(jobs(3, 0, True, [2, 3], 8)))),
    "results": (frames.unpack_results, body(*frames.pack_results(RESULTS))),
    "slots": (frames.unpack_slots, body(*frames.pack_slots(numbers(2, "int32", 1)))),
    "ready": (lambda given: frames.unpack_ready(given, 1), body(*frames.pack_ready([7]))),
    "geometry": (Geometry.decode, geometry().encode()),
    "refusal": (frames.unpack_refusal, body(*frames.pack_refusal("no", final=False))),
}


@pytest.mark.parametrize("name", READERS)
def test_a_torn_or_changed_body_is_a_typed_error_or_is_read(name):
    """Never another exception, and never memory for what is not there."""
    read, good = READERS[name]

    @searching(300)
    @given(st.data())
    def one(data) -> None:
        body = bytearray(good)
        for _ in range(data.draw(st.integers(1, 4))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        body = body[: data.draw(st.integers(0, len(body)))] + data.draw(st.binary(max_size=9))
        with contextlib.suppress(PlaceError):
            read(memoryview(bytes(body)))

    one()


@pytest.mark.parametrize("name", ["kv", "jobs", "results"])
def test_a_body_that_ends_early_is_refused(name):
    read, good = READERS[name]
    for size in range(len(good)):
        with pytest.raises(PlaceError):
            read(memoryview(good[:size] if name == "jobs" else good[: min(size, 17)]))


def test_a_geometry_comes_back_and_splits_memory_as_the_device_does():
    given = geometry()
    assert Geometry.decode(given.encode()) == given
    block = 2 * given.groups[0].tensor_bytes
    assert given.split(5 * block + 1) == (5,)
    with pytest.raises(PlaceRefusedError, match=r"takes 2.00 KiB, and the place has 100"):
        given.split(100)
    both = (given.groups[0], GroupGeometry(2, 1, 16, 24, 512))
    assert geometry(groups=both).split(2**20) == tuple(
        share * 2**20 // (12 * 2048 + 24 * 2048) for share in (12, 24)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int8"}, {"kv_dtype": "text"}, {"slots": 0}, {"table_width": 2**30},
        {"timeout_s": 1e9}, {"groups": ()}, {"layers": ()},
        {"layers": (LayerGeometry(1, 0, 4, 0.25, None, None, True),)},
        {"layers": (LayerGeometry(0, 1, 4, 0.25, None, None, True),)},
        {"layers": (LayerGeometry(0, 0, 3, 0.25, None, None, True),)},
        {"layers": (LayerGeometry(0, 0, 4, float("nan"), None, None, True),)},
        {"layers": (LayerGeometry(0, 0, 4, 0.25, 0, None, True),)},
        {"layers": (LayerGeometry(0, 0, 4, 0.25, None, None, True, (1.0,) * 3),)},
        {"layers": (LayerGeometry(0, 0, 4, 0.25, None, None, True, (float("inf"),) * 4),)},
        {"block_size": True},
    ],
)  # fmt: skip
def test_a_geometry_out_of_bounds_is_refused(change):
    with pytest.raises(PlaceError, match="geometry is"):
        Geometry.decode(geometry(**change).encode())


def test_another_size_of_kv_blocks_says_both_sides():
    other = json.loads(geometry().encode())
    other["groups"][0]["tensor_bytes"] += 64
    with pytest.raises(PlaceRefusedError, match="1088 bytes a tensor in the engine and 1024 at"):
        Geometry.decode(json.dumps(other).encode())
