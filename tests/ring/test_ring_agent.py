"""An agent between client and engine: same updates, hostile peers refused, rings taken back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_ring_processes import (
    PATIENCE_S,
    Collector,
    comparable,
    endless,
    engine,
    in_process,
    random_requests,
    states,
    threaded,
)

from live import eventually
from places import KEY, key_file
from weft.core import sealed
from weft.core.errors import ConfigError, ModelChangedError, RingLinkError, RingRefusedError
from weft.core.sealed import SealedSocket, answer
from weft.ring import _native, facts
from weft.ring.client import RingClient
from weft.ring.facts import ModelFacts, describe_facts, fetch_facts, text_files
from weft.ring.layout import SIZES
from weft.ring.link import (
    CLOCK,
    RULES,
    LinkFrame,
    RingAccess,
    open_link,
    pack_json,
    parse_ring,
    wanted_ring,
)
from weft.ring.port import RemotePort
from weft.ring.segment import ARENA_PER_MEMORY, RingFds, create_ring

MEMORY = 1 << 20


@dataclass
class RunningAgent:
    """An agent in a process of its own, with a model that is two files."""

    process: subprocess.Popen[bytes]
    address: str
    key_file: str
    log: Path

    def access(self, plane: str = "plane", **more) -> RingAccess:
        given = {"timeout_s": PATIENCE_S, "key_file": self.key_file, **more}
        return RingAccess(self.address, plane=plane, **given)

    def said(self, words: str) -> None:
        eventually(lambda: words in self.log.read_text(), PATIENCE_S)


@contextlib.contextmanager
def agent(folder: Path, *rings: RingFds, timeout_s: float = PATIENCE_S) -> Iterator[RunningAgent]:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("hello")
    given = {"key": KEY.encode().hex(), "timeout_s": timeout_s, "tokenizer": None}
    given |= {"chat_template": None, "log_level": "info", "log_format": "text"}
    log = folder / "agent.txt"
    with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as errors:
        read_end, write_end = os.pipe()
        signs, sign = os.pipe()
        os.set_blocking(sign, False)
        command = [sys.executable, "-m", "weft.ring.agent", "--parent", str(os.getpid())]
        command += ["--socket", str(listener.fileno()), "--card", str(read_end)]
        command += ["--signs", str(sign)]
        command += [word for ring in rings for word in ("--ring", str(ring))]
        fds = [listener.fileno(), read_end, sign, *(fd for ring in rings for fd in ring.pass_fds)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, pass_fds=fds)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    os.close(read_end)
    os.close(sign)
    assert process.stdin is not None
    process.stdin.write(json.dumps(given).encode())
    process.stdin.close()
    with os.fdopen(write_end, "w") as card:
        card.write(json.dumps({"folder": str(model)}) + "\n")
    try:
        yield RunningAgent(process, address, str(key_file(folder)), log)
    finally:
        process.kill()
        process.wait()
        assert os.read(signs, 1) == b"."
        os.close(signs)


def test_the_link_gives_what_the_process_gives(ring, tmp_path):
    requests = random_requests(1, 40)
    expected = in_process(requests, 1)
    collector = Collector()
    with (
        agent(tmp_path, ring) as running,
        engine(ring, depth=1) as process,
        threaded(running.access()) as client,
    ):
        client.submit(requests[:25], collector)
        client.submit(requests[25:], collector)
        collector.ends(len(requests))
        eventually(lambda: client._ring.free_slots == 64)
        assert client._ring.free_memory == MEMORY
        assert client._ring.free_bytes == ARENA_PER_MEMORY * MEMORY
        assert client.info().pid == process.pid
        eventually(lambda: not any(states(ring)))
    for number, updates in expected.items():
        assert comparable(collector.updates[number]) == comparable(updates)


def test_on_an_event_loop(ring, tmp_path):
    requests = random_requests(5, 20)
    expected = in_process(requests, 1)
    collector = Collector()

    async def main() -> None:
        client = RingClient(running.access())
        client.attach(asyncio.get_running_loop())
        for request in requests:
            client.submit([request], collector)
        await asyncio.to_thread(collector.ends, len(requests))
        client.close()

    with agent(tmp_path, ring) as running, engine(ring, depth=1):
        asyncio.run(main())
        eventually(lambda: not any(states(ring)))  # at once: it gave the ring up
    for number, updates in expected.items():
        assert comparable(collector.updates[number]) == comparable(updates)


def test_an_output_that_grows_and_one_that_is_cancelled(ring, tmp_path):
    collector = Collector()
    with (
        agent(tmp_path, ring) as running,
        engine(ring, step_s=0.001),
        threaded(running.access()) as client,
    ):
        client.submit([endless(1), endless(2)], collector)
        collector.wait_for(lambda updates: len(updates.get(2, [])) > 3)
        client.cancel(2)
        collector.ends(2)
        assert len(collector.updates[1]) == 500  # beyond the first extent
        assert len(collector.updates[2]) < 500


def test_a_request_plane_that_comes_back_takes_its_ring_from_its_predecessor(ring, tmp_path):
    with agent(tmp_path, ring) as running, engine(ring, step_s=0.005):
        pid = os.fork()
        if pid == 0:
            own = RingClient(running.access())
            own.submit([endless(i) for i in range(20)], lambda _: None)
            time.sleep(PATIENCE_S)
            os._exit(1)
        eventually(lambda: any(states(ring)), PATIENCE_S)
        with pytest.raises(RingLinkError, match=r"all its rings are taken; raise ring_planes"):
            RingClient(running.access("another"))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with threaded(running.access()) as client:
            eventually(lambda: client._ring.free_slots == 64, PATIENCE_S)
            assert client._ring.free_bytes == ARENA_PER_MEMORY * MEMORY
            again = Collector()
            client.submit([endless(7)], again)
            again.ends(1)
            assert len(again.updates[7]) == 500


def test_one_that_does_not_come_back_loses_its_ring(ring, tmp_path):
    with agent(tmp_path, ring, timeout_s=1.0) as running, engine(ring, step_s=0.005):
        pid = os.fork()
        if pid == 0:
            own = RingClient(running.access())
            own.submit([endless(i) for i in range(20)], lambda _: None)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        running.said("did not come back")
        eventually(lambda: not any(states(ring)), PATIENCE_S)


def test_a_silent_one_is_given_up(ring, tmp_path):
    with agent(tmp_path, ring, timeout_s=1.0) as running:
        link, _ = open_link(running.access(), wanted_ring("session"))
        running.said("It is silent")
        link.close()


def contents(ring: RingFds) -> bytes:
    """All but the arena, without what the agent itself writes."""
    with mmap.mmap(ring.memory, _native.offsets(64)["arena"], access=mmap.ACCESS_READ) as memory:
        return memory[SIZES["page_bytes"] :]


OFFSETS = _native.offsets(64)
SLOT = SIZES["slot_bytes"]


def change(offset: int, data: bytes, size: int | None = None) -> bytes:
    filled = data + bytes(-len(data) % 8)
    return struct.pack("<QQ", offset, len(data) if size is None else size) + filled


@pytest.mark.parametrize(
    "body",
    {
        "the engine's words": change(OFFSETS["given"], bytes(16)),
        "the header": change(8, bytes(4)),
        "the info page": change(SIZES["page_bytes"], bytes(8)),
        "the engine's part of a slot": change(
            OFFSETS["slots"] + SIZES["prompt_published_offset"], b"12345678"
        ),
        "two slots at once": change(OFFSETS["slots"], b"x" * 2 * SLOT),
        "beyond the end": change(2**45, b"12345678"),
        "around the end": change(2**64 - 8, b"1234567812345678"),
        "a part of a word": change(OFFSETS["asked"] + 1, b"123"),
        "nothing": change(OFFSETS["asked"], b""),
        "more than came": change(OFFSETS["asked"], b"12345678", 2**40),
        "more than a number": change(OFFSETS["asked"], b"12345678", 2**63 - 1),
        "half a change": b"1234567",
        "pages of words": change(OFFSETS["asked"], b"", 2**63 | 4096),
    }.items(),
    ids=lambda item: item[0].replace(" ", "-"),
)
def test_nobody_writes_where_they_may_not(ring, tmp_path, body):
    with agent(tmp_path, ring) as running:
        link, _ = open_link(running.access(), wanted_ring("session"))
        before = contents(ring)
        link.send_frame(LinkFrame.RING, body[1])
        running.said("is lost: a change of")
        assert contents(ring) == before
        link.close()


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (LinkFrame.READY, b"", "sends no frame of kind 5"),
        (77, b"", "sends no frame of kind 77"),
        (LinkFrame.PING, b"123", "does not hold the clocks"),
    ],
)
def test_nobody_breaks_the_protocol(ring, tmp_path, kind, body, words):
    with agent(tmp_path, ring) as running:
        link, _ = open_link(running.access(), wanted_ring("session"))
        link.send_frame(kind, body)
        running.said(words)
        link.close()
        with threaded(running.access("plane")) as client:  # the agent has survived
            assert client.info().ready == 0


def test_noise_is_no_request_plane(ring, tmp_path):
    with agent(tmp_path, ring) as running:
        for noise in (b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(500), b""):
            host, port = running.address.split(":")
            with socket.create_connection((host, int(port))) as link:
                link.settimeout(PATIENCE_S)
                with contextlib.suppress(OSError):  # it may be reset at once
                    link.sendall(noise)
                    link.shutdown(socket.SHUT_WR)
                    assert not link.recv(1)
        RingClient(running.access()).close()


def test_other_versions_are_refused(ring, tmp_path, monkeypatch):
    with agent(tmp_path, ring) as running:
        for name, words in (("ring", "version 99 of the ring"), ("sampling", "sampling param")):
            with pytest.raises(RingRefusedError, match=words):
                open_link(running.access(), {**wanted_ring("session"), name: 99})
        monkeypatch.setattr(sealed, "__version__", "0.0.1")
        with pytest.raises(RingRefusedError, match=r"engine has weft .*, the request plane 0.0.1"):
            RingClient(running.access())


def test_the_other_key_is_refused(ring, tmp_path):
    (other := tmp_path / "other").mkdir()
    with agent(tmp_path, ring) as running:
        for wrong in (None, str(key_file(other, "another key of the tests"))):
            with pytest.raises(RingRefusedError, match="The keys of request plane and engine"):
                RingClient(running.access(key_file=wrong))


def test_the_clock_is_the_engines(ring, tmp_path):
    with agent(tmp_path, ring) as running:
        port = RemotePort(running.access())
        eventually(lambda: port.drain() or port._round_trip_ns > 0, PATIENCE_S)
        assert abs(port.ahead_ns) < 0.1e9  # the same machine
        port.close()
        link, _ = open_link(running.access(), wanted_ring("session"))
        link.send_frame(LinkFrame.PING, CLOCK.pack(5))
        kinds = iter(link.receive_frame, None)
        pong = next(body for kind, body in kinds if kind == LinkFrame.PONG)
        assert struct.unpack("<qq", pong)[0] == 5
        link.close()


def test_access_crosses_to_processes_as_text():
    access = RingAccess("[::1]:5", "a file, with: odd {characters}", 2.5, "plane-0")
    assert parse_ring(str(access)) == access
    assert parse_ring("3,4") == RingFds(3, 4)


# -- facts -----------------------------------------------------------------------------------------


def test_files_come_whole_and_once(ring, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with agent(tmp_path, ring) as running:
        found = fetch_facts(running.access(), with_files=True)
        assert json.loads(found.card) == {"folder": str(tmp_path / "model")}
        assert (Path(found.folder) / "tokenizer.json").read_text() == "{}"
        assert (Path(found.folder) / "chat_template.jinja").read_text() == "hello"
        assert found.tokenizer is None
        monkeypatch.setattr(facts, "_file", None)  # nothing is fetched again
        assert fetch_facts(running.access(), with_files=True) == found
        link, _ = open_link(running.access(), {"facts": True})
        link.send_frame(LinkFrame.FILE, b"../key")
        with pytest.raises(RingLinkError, match="closed the link"):
            list(iter(link.receive_frame, None))


def test_a_tokeniser_and_a_template_of_their_own(tmp_path):
    model, other = tmp_path / "a", tmp_path / "b"
    for folder in (model, other):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(folder.name)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("")
    (other / "template").write_text("")
    (model / "model.safetensors").write_text("")
    assert set(text_files(model, None, None)) == {
        "model/tokenizer.json",
        "model/additional_chat_templates/tools.jinja",
    }
    assert text_files(model, other, other / "template") == {
        "model/tokenizer.json": model / "tokenizer.json",
        "tokenizer/tokenizer.json": other / "tokenizer.json",
        "model/chat_template.jinja": other / "template",
    }


GOOD = {"name": "model/tokenizer.json", "bytes": 2, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (None, "no list"),
        ([GOOD] * 65, "no list"),
        ([{**GOOD, "name": "model/../../x"}], "that no model has"),
        ([{**GOOD, "name": "/etc/passwd"}], "that no model has"),
        ([{**GOOD, "name": "model/.hidden"}], "that no model has"),
        ([{**GOOD, "bytes": -1}], "that no model has"),
        ([{**GOOD, "bytes": 2**40}], "are larger than 256 MiB"),
        ([{**GOOD, "sha256": "x"}], "no digest"),
        ([GOOD], "is not the file that the engine announced"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path, monkeypatch, listed, words):
    """The other side knows the key, and lies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lie() -> None:
            raw, _ = listener.accept()
            link = SealedSocket(raw, RULES, *answer(RULES, raw, KEY.encode()))
            link.receive_frame()
            link.send_frame(
                LinkFrame.WELCOME, pack_json({"card": "{}", "digest": "d", "files": listed})
            )
            with contextlib.suppress(RingLinkError):
                link.receive_frame()
                link.send_frame(LinkFrame.FILE, b"too much of it")
                link.receive_frame()
            link.close()

        thread = threading.Thread(target=lie, daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        access = RingAccess(address, str(key_file(tmp_path)), 10.0, "plane")
        with pytest.raises(RingLinkError, match=words):
            fetch_facts(access, with_files=True)
        thread.join(PATIENCE_S)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_the_description_of_files_has_their_digests(tmp_path):
    (tmp_path / "f").write_text("abc")
    described = describe_facts("{}", {"model/f": tmp_path / "f"})
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert described.told["files"] == [{"name": "model/f", "bytes": 3, "sha256": digest}]


def test_the_digest_is_of_what_lasts(tmp_path):
    path = tmp_path / "f"
    path.write_text("abc")

    def digest(**card: object) -> str:
        return describe_facts(json.dumps(card), {"model/f": path}).digest

    before = digest(name="a", eos_token_ids=[1], start_s=1.0, folder="x", kv_blocks={"a": 1})
    assert digest(name="a", eos_token_ids=[1], start_s=2.0, folder="y", kv_blocks={}) == before
    assert digest(name="a", eos_token_ids=[2]) != before
    assert digest(name="b", eos_token_ids=[1]) != before
    path.write_text("abd")
    assert digest(name="a", eos_token_ids=[1]) != before


def test_files_come_as_they_were_described(ring, tmp_path, monkeypatch):
    """Whatever becomes of them on the disk: else nobody could be sent them any more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with agent(tmp_path, ring) as running:
        fetch_facts(running.access(), with_files=False)
        (tmp_path / "model" / "tokenizer.json").write_text("changed")
        (tmp_path / "model" / "chat_template.jinja").unlink()
        found = fetch_facts(running.access(), with_files=True)
    assert (Path(found.folder) / "tokenizer.json").read_text() == "{}"
    assert (Path(found.folder) / "chat_template.jinja").read_text() == "hello"


def test_who_works_with_another_model_is_refused_and_takes_no_ring(ring, tmp_path):
    with agent(tmp_path, ring) as running:
        digest = fetch_facts(running.access(), with_files=False).digest
        with pytest.raises(ModelChangedError, match="it serves another model now"):
            RingClient(running.access(model="another digest"))
        RingClient(running.access("another plane", model=digest)).close()


def test_a_template_that_cannot_be_sent_is_named(ring, tmp_path):
    more = tmp_path / "model" / "additional_chat_templates"
    more.mkdir(parents=True)
    (more / "tool use.jinja").write_text("")
    assert f"model/{more.name}/tool use.jinja" in text_files(more.parent, None, None)
    (more / "tool#use.jinja").write_text("")
    with agent(tmp_path, ring) as running:
        with pytest.raises(RingRefusedError, match=r"the chat template 'tool#use.jinja' of the mo"):
            fetch_facts(running.access(), with_files=True)
        running.said("rename it")
    (more / "tool#use.jinja").unlink()
    for number in range(32):
        (more / f"{number}.jinja").write_text("")
    with pytest.raises(ConfigError, match="33 more chat templates"):
        text_files(more.parent, None, None)


@pytest.mark.parametrize("card", ["", "[]", "{}", "nonsense", '{"eos_token_ids": 5}', "[" * 10000])
def test_a_card_that_is_none_is_refused(card):
    with pytest.raises(RingRefusedError, match="facts of its model are malformed"):
        _ = ModelFacts(card, "folder", None, "digest").served


def test_a_ring_of_its_own_for_each(ring, tmp_path):
    other = create_ring(64, MEMORY)
    collector = Collector()
    with (
        agent(tmp_path, ring, other) as running,
        engine(ring, other),
        threaded(running.access("a")) as one,
        threaded(running.access("b")) as two,
    ):
        one.submit([endless(1)], collector)
        two.submit([endless(2)], collector)
        collector.ends(2)
    other.close()


def test_nothing_is_left_of_a_port_that_was_closed(ring, tmp_path):
    def open_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    with agent(tmp_path, ring) as running:
        RingClient(running.access()).close()
        before, threads = open_fds(), threading.active_count()
        for _ in range(5):
            client = RingClient(running.access())
            client.run_in_thread()
            client.close()
            client.close()
        assert open_fds() == before
        eventually(lambda: threading.active_count() <= threads, PATIENCE_S)
