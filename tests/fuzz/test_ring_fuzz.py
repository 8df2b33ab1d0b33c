"""Corrupted rings: refused when attached; under traffic no other ring is affected."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
import time

import pytest
from modelled import VOCAB
from test_ring_processes import Collector, comparable, engine, in_process, threaded

from weft.core.errors import ParameterError, WeftError
from weft.core.types import Request, SamplingParams
from weft.ring import _native
from weft.ring.client import RingClient
from weft.ring.inbox import RingInbox
from weft.ring.layout import SIZES
from weft.ring.segment import RingFds, create_ring

CONSTANT_BYTES = 128  # magic, version, sizes and offsets, which nobody ever writes again
SLOTS = 16
PLACES, PROMPTS = _native.offsets(SLOTS), SIZES["prompt_published_offset"]


def flip(memory: mmap.mmap, bit: int) -> None:
    memory[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("attach", [RingClient, lambda fds: RingInbox([fds])])
def test_no_bit_of_the_constant_header_may_differ(attach):
    fds = create_ring(2, 4096)
    with mmap.mmap(fds.memory, 0) as memory:
        for bit in range(8 * CONSTANT_BYTES):
            flip(memory, bit)
            with pytest.raises(ParameterError):
                attach(fds)
            flip(memory, bit)
    attach(fds).close()
    fds.close()


def requests(seed: int, count: int, tokens: tuple[int, ...]) -> list[Request]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        params = SamplingParams(
            max_tokens=draw.choice(tokens),
            seed=number,
            ignore_eos=True,
            allowed_token_ids=tuple(range(draw.randrange(5))),
            bad_token_sequences=((1,), (2, 3))[: draw.randrange(3)],
        )
        prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.randrange(1, 60)))
        made.append(Request(1000 * seed + number, prompt, params))
    return made


def place(kind: str, ring: RingFds, draw: random.Random) -> int:
    """The byte of a ring that is to be hit: in its header's words, its slots, or anywhere."""
    if kind == "header":
        return draw.randrange(SIZES["header_bytes"])
    if kind == "slots":
        return PLACES["slots"] + draw.randrange(SLOTS * SIZES["slot_bytes"])
    if kind == "states":
        slot = draw.randrange(SLOTS)  # what it is asked, its state and its counts
        words = [PLACES["asked"] + 8 * slot, *(PLACES["given"] + 16 * slot + at for at in (0, 8))]
        words.append(PLACES["slots"] + slot * SIZES["slot_bytes"] + PROMPTS)
        return draw.choice(words)
    return draw.randrange(os.fstat(ring.memory).st_size)


def hit(memory: mmap.mmap, at: int, draw: random.Random) -> None:
    """Change one bit, or a whole word."""
    if draw.random() < 0.5:
        flip(memory, 8 * at + draw.randrange(8))
    else:
        struct.pack_into("Q", memory, at // 8 * 8, draw.choice((0, -1, 3)) % 2**64)


@pytest.mark.parametrize("kind", ["header", "slots", "states", "anywhere"])
@pytest.mark.parametrize("seed", range(2))
def test_a_ring_that_is_corrupted_under_traffic_disturbs_no_other(kind, seed):
    """Bits and words of one ring change while both are at work; the other's answers are right."""
    draw = random.Random(seed)
    broken, sound = create_ring(SLOTS, 1 << 16), create_ring(SLOTS, 1 << 20)
    constant = os.pread(broken.memory, CONSTANT_BYTES, 0)
    with engine(broken, sound, step_s=0.0005) as process, threaded(sound) as client:
        for number in range(4):
            asked = requests(number, 12, (1, 5, 40))
            expected, collector = in_process(asked, 0), Collector()
            os.pwrite(broken.memory, constant, 0)
            victim = RingClient(broken)
            with contextlib.suppress(WeftError):
                victim.submit(requests(100 + number, 5, (300,)), lambda _: None)
            client.submit(asked, collector)
            with mmap.mmap(broken.memory, 0) as memory:
                for _ in range(100):
                    hit(memory, place(kind, broken, draw), draw)
                    victim.poll()
                    time.sleep(0.0005)
            collector.ends(len(asked))
            assert process.poll() is None
            assert {i: comparable(own) for i, own in collector.updates.items()} == {
                i: comparable(own) for i, own in expected.items()
            }
            victim.close()
    broken.close()
    sound.close()
