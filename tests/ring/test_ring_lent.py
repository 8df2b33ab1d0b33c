"""A copy of a ring on another machine: what its engine may write there, and what is sent again."""

from __future__ import annotations

import mmap
import os
import random
import struct

import pytest

from weft.ring import _native
from weft.ring.codec import SAMPLING
from weft.ring.layout import SIZES

SLOTS, ARENA = 4, 1 << 18
OFFSETS = _native.offsets(SLOTS)
SLOT, EXTENT, SECTIONS = SIZES["slot_bytes"], 16, 32  # the latter two within an input
OUTPUT = SECTIONS + 9 * 16
MORE = SIZES["more_offset"]
PROMPT = list(range(100, 400))
LENGTH = 5  # the Reason
PAST = 1 << 63  # nothing follows a change with this bit: its pages are to be given back


def change(offset: int, data: bytes, bit: int = 0) -> bytes:
    return struct.pack("<QQ", offset, len(data) | bit) + (data + bytes(-len(data) % 8)) * (not bit)


class Distant:
    """An engine, its agent, and a request plane with a copy of the ring, without a network."""

    def __init__(self) -> None:
        self.there = _native.create(SLOTS, ARENA, SAMPLING, ARENA)
        self.here = -1
        self.agent = _native.Agent(self.there, SAMPLING)
        self._wake = os.eventfd(0)
        self.engine = _native.Engine([(self.there, self._wake)], SAMPLING)
        self.attach()

    def attach(self) -> None:
        """Have a request plane come, and lose the one before it."""
        if self.here >= 0:
            os.close(self.here)
        self.agent.attach()
        self.here = _native.create(SLOTS, ARENA, SAMPLING, ARENA)
        self.plane = _native.RemoteClient(self.here, SAMPLING, self.agent.snapshot())
        self.up()

    def close(self) -> None:
        for fd in (self.there, self.here, self._wake):
            os.close(fd)

    def submit(self, number: int, prompt: list[int], output: tuple[int, ...] = ()) -> int:
        sampling = bytes(64)
        given = [[], [], [], b"", b"", b"", [], b"", list(output), 1000]
        slot = self.plane.prepare(number, prompt, sampling, *given)
        assert slot >= 0
        self.plane.submit([slot])
        return slot

    def up(self) -> None:
        for part in self.plane.take():
            self.agent.apply(part)

    def down(self) -> list:
        for part in self.agent.collect(True):
            self.plane.apply(part)
        return self.plane.poll()

    def claimed(self) -> list[tuple]:
        return [tuple(request) for request in self.engine.receive()[0]]

    def publish(self, number: int, tokens: list[int]) -> None:
        for token in tokens:
            self.engine.publish([(number, token)])
        self.engine.flush(1)

    def finish(self, number: int) -> None:
        self.engine.finish(number, 2, None, 0, 0, "", "", "")
        self.engine.flush(0)

    def sent_again(self) -> list[bytes]:
        self.plane.link_down()
        self.plane.link_up()
        return self.plane.take()

    def memory(self) -> mmap.mmap:
        """The request plane's own memory, as nobody else has it."""
        return mmap.mmap(self.here, OFFSETS["arena"] + ARENA)


@pytest.fixture
def distant():
    made = Distant()
    yield made
    made.close()


def places(distant: Distant, slot: int) -> dict[str, tuple[int, int]]:
    """Offset behind the header and bytes of what belongs to a request."""
    base = OFFSETS["slots"] + slot * SLOT
    with distant.memory() as memory:
        extent, size = struct.unpack_from("<QQ", memory, base + EXTENT)
        output, room = struct.unpack_from("<QQ", memory, base + OUTPUT)
    arena = OFFSETS["arena"]
    return {"extent": (arena + extent, size), "output": (arena + output, room), "slot": (base, 0)}


@pytest.mark.parametrize(
    "where",
    [
        "the sizes", "who is attached", "the bell of the engine", "that the plane sleeps",
        "its words", "an input", "the place of a piece", "two slots", "a prompt",
        "what was given out", "what lies behind the output", "the free arena", "pages of an output",
        "beyond the end", "around the end",
    ],
)  # fmt: skip
def test_the_engine_writes_only_what_is_its_own(distant, where):
    slot = distant.submit(1, PROMPT, output=(7, 8, 9))
    mine = places(distant, slot)
    (extent, size), (output, room), (base, _) = mine["extent"], mine["output"], mine["slot"]
    offset, data = {
        "the sizes": (SIZES["slots_offset"], bytes(4)),
        "who is attached": (SIZES["client_epoch_offset"], bytes(4)),
        "the bell of the engine": (SIZES["to_engine_offset"], bytes(4)),
        "that the plane sleeps": (SIZES["to_client_asleep_offset"], bytes(4)),
        "its words": (OFFSETS["asked"] + 8 * slot, bytes(8)),
        "an input": (base + EXTENT, bytes(8)),
        "the place of a piece": (base + MORE, bytes(8)),
        "two slots": (base + SIZES["prompt_published_offset"], bytes(SLOT)),
        "a prompt": (extent, bytes(8)),
        "what was given out": (output + 8, bytes(16)),
        "what lies behind the output": (output + room - 8, bytes(16)),
        "the free arena": (extent + size, bytes(8)),
        "pages of an output": (output + 16, bytes(8)),
        "beyond the end": (2**45, bytes(8)),
        "around the end": (2**64 - 8, bytes(16)),
    }[where]
    with distant.memory() as memory:
        before = memory[:]
        with pytest.raises(ValueError, match="where its sender may not write"):
            distant.plane.apply(change(offset, data, PAST if where.startswith("pages") else 0))
        assert memory[:] == before
    allowed = [(output + 12, b"record"), (OFFSETS["given"] + 16 * slot, bytes(16))]
    allowed += [
        (base + SIZES["prompt_published_offset"], bytes(8)),
        (SIZES["epoch_offset"], bytes(4)),
    ]
    for offset, data in allowed:
        distant.plane.apply(change(offset, data))


def test_an_output_is_lent_no_longer_than_its_request_lives(distant):
    slot = distant.submit(1, PROMPT)
    output, _ = places(distant, slot)["output"]
    record = change(output, b"word")
    distant.plane.apply(record)
    distant.up()
    (number,) = [request[0] for request in distant.claimed()]
    distant.publish(number, list(range(300)))  # more than the first extent has room for
    distant.down()
    distant.up()  # it has grown
    distant.publish(number, [300])
    distant.finish(number)
    (news,) = distant.down()
    assert (list(news[1]), news[-1] is None) == ([256 + i for i in range(45)], False)
    with pytest.raises(ValueError, match="where its sender may not write"):
        distant.plane.apply(record)


def test_what_is_sent_again_is_what_the_request_plane_wrote(distant):
    """Whatever becomes of the inputs in its copy, nothing but a request's own bytes leaves."""
    slot = distant.submit(1, PROMPT, output=(7, 8, 9))
    distant.up()
    distant.publish(distant.claimed()[0][0], list(range(200)))
    distant.down()
    distant.up()
    base = places(distant, slot)["slot"][0]
    bell = 24  # bytes at the end: it counts on
    honest = b"".join(distant.sent_again())[:-bell]
    with distant.memory() as memory:
        for seed in range(200):
            noise = random.Random(seed).randbytes(SIZES["prompt_published_offset"])
            memory[base : base + len(noise)] = noise
            assert b"".join(distant.sent_again())[:-bell] == honest


def test_the_place_of_an_output_is_no_place_to_read_from(distant):
    """An engine names another place, breaks the link once, and wants to be told what lies there."""
    slot = distant.submit(1, PROMPT)
    base = places(distant, slot)["slot"][0]
    distant.up()
    for offset in (0, ARENA, 2**40, 2**64 - 2**20):
        evil = change(base + EXTENT, struct.pack("<Q", offset))
        evil += change(base + OUTPUT, struct.pack("<Q", (offset + 2**16) % 2**64))
        with pytest.raises(ValueError, match="where its sender may not write"):
            distant.plane.apply(evil)
        assert sum(map(len, distant.sent_again())) < 4 * len(PROMPT) + 2 * SLOT


def test_words_of_free_slots_are_sent_before_what_has_taken_their_memory(distant):
    distant.submit(1, PROMPT)
    slot = distant.submit(2, [1, 2])
    distant.up()
    number = distant.claimed()[1][0]
    distant.finish(number)
    distant.down()
    distant.plane.take()  # lost with the link
    (text,) = distant.sent_again()
    offsets = []
    while text:
        offset, size = struct.unpack_from("<QQ", text)
        offsets += range(offset, offset + size, 8) if size % 8 == 0 else [offset]
        text = text[16 + size + -size % 8 :]
    word = OFFSETS["asked"] + 8 * slot
    assert offsets.index(word) < min(i for i, at in enumerate(offsets) if at >= OFFSETS["slots"])
    assert offsets.count(OFFSETS["asked"]) == 1
    assert offsets.index(OFFSETS["asked"]) > max(
        i for i, at in enumerate(offsets) if at >= OFFSETS["slots"]
    )


def test_what_was_inherited_is_cancelled_and_neither_told_nor_sent_again(distant):
    distant.submit(1, PROMPT)
    distant.up()
    (number,) = [request[0] for request in distant.claimed()]
    distant.publish(number, [5] * 100)
    distant.attach()
    parts = distant.agent.collect(True)
    assert not any(struct.pack("<I", 5) * 100 in part for part in parts)
    for part in parts:
        distant.plane.apply(part)
    assert distant.plane.poll() == []
    again = distant.sent_again()
    assert sum(map(len, again)) < 200  # words, and the bell
    for part in again:
        distant.agent.apply(part)
    assert distant.engine.receive()[1] == [(number, 3)]  # cancelled
    distant.finish(number)
    assert distant.down() == []
    assert distant.plane.free_slots == SLOTS
    assert distant.plane.free_bytes == ARENA
    distant.submit(2, [1, 2])  # in the same slot
    distant.up()
    (number,) = [request[0] for request in distant.claimed()]
    distant.publish(number, [6])
    ((_, tokens, *_),) = distant.down()
    assert list(tokens) == [6]


def test_an_inherited_prompt_that_waits_is_not_made_zeros(distant):
    slot = distant.submit(1, PROMPT)
    extent, _ = places(distant, slot)["extent"]
    distant.up()
    distant.attach()
    for part in distant.sent_again():
        distant.agent.apply(part)
    with mmap.mmap(distant.there, OFFSETS["arena"] + ARENA, access=mmap.ACCESS_READ) as memory:
        assert memory[extent : extent + 1200] == struct.pack("<300I", *PROMPT)
    assert distant.claimed() == []
    assert distant.engine.refused == 0


def word(rng: random.Random) -> int:
    tag = rng.randrange(3) << 48 | rng.randrange(4) << 24
    low = rng.randrange(7) | rng.randrange(6) << 8 | rng.randrange(18) << 16
    return rng.choice([0, 1, 2**24 - 1, 2**64 - 1, rng.getrandbits(64), tag | low])


def test_nothing_that_an_engine_writes_makes_a_request_plane_send_anything_else():
    """Random changes of an engine amid real traffic: they are refused, or only tokens are wrong."""
    rng = random.Random(1)
    refused = sent = 0
    for _ in range(30):
        distant = Distant()
        prompts: list[bytes] = []
        for number in range(1, 200):
            kind = rng.randrange(6)
            if kind == 0 and distant.plane.free_slots:
                prompt = [rng.randrange(1 << 31) for _ in range(rng.randrange(1, 50))]
                distant.submit(number, prompt)
                prompts.append(struct.pack(f"<{len(prompt)}I", *prompt))
            elif kind == 1:
                distant.up()
                distant.claimed()
            elif kind == 2:
                distant.plane.poll()
            elif kind == 3:
                text = b"".join(distant.sent_again())
                live = OFFSETS["arena"] + ARENA
                while text:
                    offset, size = struct.unpack_from("<QQ", text)
                    if OFFSETS["arena"] <= offset < live:
                        body = text[16 : 16 + size]
                        assert any(body.startswith(prompt) for prompt in prompts)
                        sent += 1
                    text = text[16 + size + -size % 8 :]
            else:
                at = rng.choice([OFFSETS["asked"], OFFSETS["given"], OFFSETS["slots"]])
                offset = at + 8 * rng.randrange(SLOTS * SLOT // 8)
                try:
                    distant.plane.apply(change(offset, struct.pack("<Q", word(rng))))
                except ValueError:
                    refused += 1
        distant.close()
    assert refused > 100
    assert sent > 100
