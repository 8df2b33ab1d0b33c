"""A place as its peers see it: handshake, hostile peers, and what it refuses. Real processes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from geometries import content, geometry

from live import eventually
from places import KEY, RunningPlace, attending, key_file
from weft import __version__
from weft.attend.channel import RULES, SocketTransport, connect
from weft.attend.frames import (
    FRAME_BYTES,
    Frame,
    FrameKind,
    KVBlocks,
    pack_jobs,
    pack_kv,
    pack_slots,
    unpack_ready,
    unpack_refusal,
    unpack_results,
)
from weft.attend.geometry import Geometry, LayerGeometry
from weft.core import sealed
from weft.core.addresses import parse_address
from weft.core.errors import ConfigError, PlaceError, PlaceRefusedError
from weft.core.sealed import HEAD, HELLO, read_key
from weft.kernels.cpu import attention
from weft.kernels.cpu.courier import ClaimedJobs

WITHIN_S = 20.0


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[RunningPlace]:
    """A place with a key."""
    folder = tmp_path_factory.mktemp("place")
    with attending(folder, "--key-file", str(key_file(folder)), kv_memory="64KiB") as running:
        yield running


def shape(**more) -> Geometry:
    return geometry(**{"isa": attention.isa(), **more})


def call(place: RunningPlace, key: str = KEY) -> SocketTransport:
    transport = connect(parse_address(place.address), key.encode(), WITHIN_S)
    transport.set_timeout(WITHIN_S)
    return transport


@contextlib.contextmanager
def session(place: RunningPlace, given: Geometry) -> Iterator[SocketTransport]:
    """A session; the place is free again when the block ends."""

    def opened() -> SocketTransport | None:
        transport = call(place)
        transport.send(FrameKind.OPEN, given.encode())
        frame = transport.receive()
        if frame.kind is FrameKind.READY:
            assert unpack_ready(frame.body, 1) == (2**16 // 2048,)
            return transport
        assert "another engine" in unpack_refusal(frame.body)[0]
        transport.close()
        return None

    found: list[SocketTransport | None] = []
    eventually(lambda: bool(found.append(opened()) or found[-1]), WITHIN_S)
    transport = found[-1]
    assert transport is not None
    try:
        yield transport
    finally:
        transport.close()


def answer(transport: SocketTransport) -> Frame:
    """The next frame that is no PING."""
    while (frame := transport.receive()).kind is FrameKind.PING:
        pass
    return frame


def refusal(transport: SocketTransport) -> tuple[str, bool]:
    """Why the place ends the session."""
    frame = answer(transport)
    assert frame.kind is FrameKind.REFUSE
    return unpack_refusal(frame.body)


def token(slot: int = 1, context: int = 1, blocks: int = 1, order: int = 7) -> ClaimedJobs:
    """A row of the first layer; with a context of 1 its attention is v."""
    heads, size = 4, 16
    table = np.arange(blocks, dtype=np.int32)[None]
    draw = np.random.default_rng(1)
    q, k, v = (draw.random((1, n * size), np.float32) for n in (heads, 2, 2))
    return ClaimedJobs(
        0, np.array([slot], np.int32), np.array([order], np.uint64),
        np.array([context], np.int32), (table,), *(x.view(np.uint8) for x in (q, k, v)),
    )  # fmt: skip


def attended(jobs: ClaimedJobs) -> np.ndarray:
    """What a token without others before it attends to: v, for each head of its group."""
    return jobs.v.view(np.float32).reshape(2, 16).repeat(2, axis=0).reshape(1, -1)


def test_a_job_comes_back_with_its_number(place):
    jobs = token(order=2**60 + 1)
    plain = LayerGeometry(0, 0, 4, 0.25, None, None, writes=True)
    with session(place, shape(layers=(plain,))) as transport:
        for _ in range(2):  # the slot begins another token, with the last one's result taken
            transport.send(FrameKind.JOB, *pack_jobs(jobs))
            result = unpack_results(answer(transport).body)
            assert (result.layer, result.slots.tolist()) == (0, [1])
            assert result.orders.tolist() == [2**60 + 1]
            np.testing.assert_array_equal(result.out.view(np.float32), attended(jobs))


def test_what_is_freed_may_begin_again_at_once(place):
    with session(place, shape()) as transport:
        for order in range(50):
            transport.send(FrameKind.JOB, *pack_jobs(token(order=order)))
            transport.send(FrameKind.FREE, *pack_slots(np.array([1, 2], np.int32)))
        transport.send(FrameKind.JOB, *pack_jobs(token(order=99)))
        while unpack_results(answer(transport).body).orders.tolist() != [99]:
            pass


def test_one_engine_at_a_time_and_the_same_one_may_come_again(place):
    mine = shape(engine="mine")
    with session(place, mine) as first:
        other = call(place)
        other.send(FrameKind.OPEN, shape(engine="other").encode())
        why, final = refusal(other)
        assert "attends for another engine" in why
        assert not final
        again = call(place)
        again.send(FrameKind.OPEN, mine.encode())
        assert answer(again).kind is FrameKind.READY
        with contextlib.suppress(PlaceError):
            while True:  # what was sent before it was closed
                first.receive()
        again.close()


@pytest.mark.parametrize("key", ["another key, just as long as it is", ""])
def test_a_wrong_key_is_refused(place, key):
    with pytest.raises(PlaceRefusedError, match="keys of engine and place differ"):
        call(place, key)
    with session(place, shape()):
        pass  # it goes on


def test_another_version_is_refused_on_both_sides(place, monkeypatch):
    monkeypatch.setattr(sealed, "__version__", "0.0.1")
    with pytest.raises(PlaceRefusedError) as found:
        call(place)
    assert __version__ in found.value.message
    assert "0.0.1" in found.value.message
    eventually(lambda: "The engine has weft 0.0.1" in place.log.read_text(), WITHIN_S)


def test_other_kernels_and_too_little_memory_are_refused(place):
    transport = call(place)
    transport.send(FrameKind.OPEN, shape(isa="none").encode())
    why, final = refusal(transport)
    assert "kernels none, the place has" in why
    assert final
    transport = call(place)
    groups = shape().groups
    large = replace(groups[0], kv_heads=2, head_dim=2**13, tensor_bytes=2 * 8 * 2**13 * 4)
    transport.send(FrameKind.OPEN, shape(groups=(large,)).encode())
    why, final = refusal(transport)
    assert "the place has 64.00 KiB" in why
    assert final


BAD = {
    "no tensor 9": (FrameKind.KV, pack_kv(KVBlocks(0, 9, np.zeros(1, np.int32), content(1, 8, 1)))),
    "not one of the 32": (
        FrameKind.KV,
        pack_kv(KVBlocks(0, 0, np.full(1, 32, np.int32), content(1, 1024, 1))),
    ),
    "has 1000 bytes, not 1024": (
        FrameKind.KV,
        pack_kv(KVBlocks(0, 0, np.zeros(1, np.int32), content(1, 1000, 1))),
    ),
    "slot is not one of 4": (FrameKind.JOB, pack_jobs(token(slot=4))),
    "no layer 5": (FrameKind.JOB, pack_jobs(replace(token(), layer=5, contexts=None, tables=()))),
    "has no token": (FrameKind.JOB, pack_jobs(replace(token(), contexts=None, tables=()))),
    "occurs twice": (FrameKind.FREE, pack_slots(np.array([1, 1], np.int32))),
    "a block does not exist": (
        FrameKind.JOB,
        pack_jobs(replace(token(), tables=(np.full((1, 1), 99, np.int32),))),
    ),
    "longer than the block table": (FrameKind.JOB, pack_jobs(token(context=40))),
    "1 token at least": (FrameKind.JOB, pack_jobs(token(context=-1))),
    "shape of its layer": (FrameKind.JOB, pack_jobs(replace(token(), q=token().v))),
    "holds less than it says": (FrameKind.JOB, (b"\0" * 8,)),
    "sends no READY": (FrameKind.READY, ()),
    "sends no OPEN": (FrameKind.OPEN, ()),
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
def test_an_engine_that_breaks_the_protocol_is_told_why_and_the_next_is_served(place, why):
    kind, parts = BAD[why]
    with session(place, shape()) as transport:
        transport.send(kind, *parts)
        assert why in refusal(transport)[0]
    jobs = token()
    with session(place, shape()) as transport:
        transport.send(FrameKind.JOB, *pack_jobs(jobs))
        assert unpack_results(answer(transport).body).slots.tolist() == [1]


def test_frames_that_are_changed_repeated_or_too_long_end_the_session(place):
    ping = HEAD.pack(0, FrameKind.PING)

    def after(*data: bytes) -> str:
        with session(place, shape()) as transport:
            for one in data:
                transport._socket.sendall(one)
            return refusal(transport)[0]

    with session(place, shape()) as transport:
        good = ping + transport._mac(transport._sending, transport._sent, ping)
        transport._socket.sendall(good)  # as it should be
        transport._socket.sendall(good)  # and once more
        assert "changed on its way" in refusal(transport)[0]
    assert "changed on its way" in after(ping + b"\0" * 32)
    assert "too long" in after(HEAD.pack(FRAME_BYTES + 1, FrameKind.KV))
    assert "too long" in after(HEAD.pack(2**32 - 1, FrameKind.KV))


def test_strangers_cost_nothing(place):
    """Whoever says nothing, or nonsense, or too much; more of them than handshakes at once."""
    address = parse_address(place.address)
    mute = [socket.create_connection(address, WITHIN_S) for _ in range(8)]
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 500, HELLO.pack(b"x", 1, b"", b"")):
        with socket.create_connection(address, WITHIN_S) as stranger:
            stranger.settimeout(WITHIN_S)
            stranger.sendall(noise)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
    with session(place, shape()):
        pass
    many = [socket.create_connection(address, WITHIN_S) for _ in range(30)]
    for stranger in many:  # those beyond the limit are turned away at once
        stranger.settimeout(WITHIN_S)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
    for stranger in (*mute, *many):
        stranger.close()
    with session(place, shape()):
        pass


def test_an_engine_that_falls_silent_is_given_up(place):
    with session(place, shape(timeout_s=1.5)) as transport:
        assert "the other side is silent" in refusal(transport)[0]
        with session(place, shape(engine="next")):
            pass


def test_a_place_that_lies_about_its_key_is_refused():
    """It cannot prove that it knows the key, whatever it says of the engine's proof."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lie() -> None:
            link, _ = listener.accept()
            with link:
                link.recv(HELLO.size, socket.MSG_WAITALL)
                link.sendall(RULES.hello())
                link.recv(32, socket.MSG_WAITALL)
                link.sendall(b"\x01" + b"\0" * 32)

        liar = threading.Thread(target=lie)
        liar.start()
        with pytest.raises(PlaceRefusedError, match="keys of engine and place differ"):
            connect(listener.getsockname(), KEY.encode(), WITHIN_S)
        liar.join()


def test_a_key_file_that_everybody_can_read_is_told_once(tmp_path, caplog):
    path = key_file(tmp_path)
    assert read_key(str(path)) == KEY.encode()
    assert not caplog.messages
    path.chmod(0o604)
    for _ in range(2):
        assert read_key(str(path)) == KEY.encode()
    (line,) = caplog.messages
    assert "Everybody on this machine can read the key file" in line


def test_key_files(tmp_path):
    assert read_key(None) == b""
    assert read_key(str(key_file(tmp_path))) == KEY.encode()
    with pytest.raises(ConfigError, match="has 5 bytes; a key has 16 to 4096"):
        read_key(str(key_file(tmp_path, "short")))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "found"),
    [("127.0.0.1:8700", ("127.0.0.1", 8700)), ("[::1]:1", ("::1", 1)), ("a.b:0", ("a.b", 0))],
)
def test_addresses(text, found):
    assert parse_address(text) == found


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:70000", "::1:5"])
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="is no address; write HOST:PORT"):
        parse_address(text)
