"""Engines whose best effort decodes at remote places: the tokens of engines that have ample KV."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from checkpoints import build, save_with_tokenizer
from crowds import assert_alike, crowd, piggybacking
from hosted import Hosted, Shape
from tight_kv import least_kv_memory, run, settings_for

import lossy_link
from live import eventually
from places import RunningPlace, attending, key_file
from weft.attend.channel import Transport
from weft.attend.frames import Frame, FrameKind, Part, unpack_results
from weft.attend.geometry import Geometry
from weft.attend.link import PlaceAccess, PlaceLink
from weft.attend.session import EngineSession
from weft.core.errors import PlaceError
from weft.core.plan import StepPlan
from weft.engine.build import Engine, build_engine
from weft.exec.piggyback import PiggybackedRows

FAMILIES: dict[str, dict[str, Any]] = {
    "mistral-window": {},
    "gemma3": {"kv_dtype": "int8"},
    "qwen3-moe-mixed": {"dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each family with the built-in model's tokenizer beside it."""
    return {
        name: save_with_tokenizer(build(name), tmp_path_factory.mktemp(name)) for name in FAMILIES
    }


def links(engine: Engine):
    return engine.executor.tier.attention.places.links


class Run:
    """An engine that has hardly any host memory of its own, and places; and ample traffic for it.

    Args:
        own: memory of the engine's own host, as a share of the device's.
        change: is called before each step, with the rows that have a token on its way.
    """

    def __init__(
        self,
        folder: Path,
        places: list[str],
        monkeypatch: pytest.MonkeyPatch,
        change: Callable[[PiggybackedRows], None] = lambda _: None,
        *,
        own: float = 0.125,
        **more: Any,
    ) -> None:
        more = {"max_num_seqs": 16, **more}
        ample = build_engine(settings_for(folder, **more))
        wanted, _ = run(ample, crowd(1, cancels=False), monkeypatch)
        tight = 2 * least_kv_memory(folder, **more)
        config = piggybacking(
            folder,
            host_kv_memory=int(own * tight),
            attend=tuple(places),
            kv_memory=tight,
            **more,
        )
        self.engine = build_engine(config)
        self.engine.start_places()
        before = PiggybackedRows.before

        def changing(rows: PiggybackedRows, plan: StepPlan) -> None:
            change(rows)
            before(rows, plan)

        monkeypatch.setattr(PiggybackedRows, "before", changing)
        for link in links(self.engine) if places else ():
            eventually(lambda link=link: link.status().blocks)
        found, self.plans = run(self.engine, crowd(1, cancels=True), monkeypatch)
        assert_alike(found, wanted)
        self.totals = self.engine.scheduler.totals
        self.moves = Counter(move.host.place for plan in self.plans for move in plan.moves)
        assert set(self.engine.executor.tier.attention.mailbox.states()) == {"empty"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_place_changes_no_token(folders, family, tmp_path, monkeypatch) -> None:
    with attending(tmp_path) as place:
        done = Run(folders[family], [place.address], monkeypatch, **FAMILIES[family])
        (link,) = links(done.engine)
        assert done.totals.lost_sequences == 0
        assert done.moves[1] > 0
        assert link.jobs >= done.engine.model.spec.num_layers
        assert done.totals.host_tokens > 0


def test_several_places_fill_evenly_once_the_own_host_is_full(
    folders, tmp_path, monkeypatch
) -> None:
    with attending(tmp_path) as first, attending(tmp_path) as second:
        places = [first.address, second.address]
        done = Run(folders["gemma3"], places, monkeypatch)
        moved = [done.moves[place] for place in (0, 1, 2)]
        assert min(moved) > 0
        assert abs(moved[1] - moved[2]) <= max(2, sum(moved) // 4)


class Wire:
    """One side of a pair of transports within this process: frames in order, some late."""

    def __init__(self, outbox: queue.SimpleQueue, inbox: queue.SimpleQueue, seed: int) -> None:
        self._outbox, self._inbox, self._random = outbox, inbox, random.Random(seed)

    def send(self, kind: FrameKind, *parts: Part) -> None:
        self._outbox.put(Frame(kind, memoryview(b"".join(map(bytes, parts)))))

    def receive(self) -> Frame:
        frame = self._inbox.get()
        if frame is None:
            raise PlaceError("The link is broken: it was closed.")
        time.sleep(self._random.choice((0, 0, 0.002)))
        return frame

    def close(self) -> None:
        for side in (self._outbox, self._inbox):
            side.put(None)


def served_within(_: PlaceAccess) -> Transport:
    """A transport to a place that is a thread of this process."""
    there, back = queue.SimpleQueue(), queue.SimpleQueue()

    def serve(wire: Wire) -> None:
        geometry = Geometry.decode(wire.receive().body)
        with contextlib.suppress(PlaceError):
            EngineSession(wire, geometry, 64 * 2**20, threads=1).run()

    threading.Thread(target=serve, args=(Wire(back, there, 1),), daemon=True).start()
    return Wire(there, back, 2)


def test_a_place_behind_another_transport_changes_no_token(folders, monkeypatch, caplog) -> None:
    start = Engine.start_places

    def start_over_wires(engine: Engine) -> None:
        for link in links(engine):
            link._open_transport = served_within
        start(engine)

    monkeypatch.setattr(Engine, "start_places", start_over_wires)
    done = Run(folders["gemma3"], ["127.0.0.1:1"], monkeypatch)
    assert done.moves[1] > 0
    assert done.totals.lost_sequences == 0
    assert "does not attend" not in caplog.text


def test_results_without_memory_for_them_end_the_session_only(
    folders, tmp_path, monkeypatch, caplog
) -> None:
    seen = []

    def short_once(body: memoryview) -> Any:
        seen.append(body)
        if len(seen) == 20:
            raise MemoryError
        return unpack_results(body)

    monkeypatch.setattr("weft.attend.link.unpack_results", short_once)
    with attending(tmp_path) as place:
        done = Run(folders["gemma3"], [place.address], monkeypatch)
    assert "There is no memory for its results." in caplog.text
    assert links(done.engine)[0].status().session >= 2
    assert done.totals.lost_sequences > 0


def test_what_is_no_name_of_a_host_is_said_and_tried_again(caplog) -> None:
    hosted = Hosted(Shape(rows=2))
    access = PlaceAccess("node..cluster:8700", b"", 2.0)
    link = PlaceLink(access, 1, cast("Geometry", None), hosted.mailbox())
    link.start()
    words = "Place node..cluster:8700 does not attend: It cannot be reached: 'node..cluster' is no"
    eventually(lambda: words in caplog.text)
    time.sleep(0.3)  # for a second attempt
    assert link._thread.is_alive()
    link.close()
    assert not link._thread.is_alive()


def once(act: Callable[[PiggybackedRows], object]) -> Callable[[PiggybackedRows], None]:
    """Acts when rows of remote places have had tokens on their way for some steps."""
    seen = Counter[str]()

    def change(rows: PiggybackedRows) -> None:
        assert rows.host.places is not None
        on_their_way = len(rows) and rows.host.places.of_rows.any()
        seen["steps"] += bool(on_their_way)
        if on_their_way and seen["steps"] >= 10 and not seen["done"]:
            seen["done"] += 1
            act(rows)

    return change


def test_a_place_that_is_killed_costs_its_rows_a_recompute(folders, tmp_path, monkeypatch) -> None:
    with attending(tmp_path) as place:
        done = Run(folders["gemma3"], [place.address], monkeypatch, once(lambda _: place.kill()))
        assert done.totals.lost_sequences > 0
        (link,) = links(done.engine)
        assert link.status().blocks == ()


def test_a_place_that_comes_back_is_used_again(folders, tmp_path, monkeypatch) -> None:
    """Its pool is a new one, of another size."""
    again: list[RunningPlace] = []
    with attending(tmp_path) as place:
        port = place.address.rpartition(":")[2]
        second = attending(tmp_path, listen=f"127.0.0.1:{port}", kv_memory="8MiB")

        def restart(rows: PiggybackedRows) -> None:
            place.kill()
            again.append(second.__enter__())
            (link,) = rows.host.places.links
            eventually(lambda: link.status().session == 2)

        done = Run(folders["gemma3"], [place.address], monkeypatch, once(restart))
    try:
        sessions = {move.host.number for plan in done.plans for move in plan.moves}
        assert done.totals.lost_sequences > 0
        assert {1, 2} <= sessions
    finally:
        second.__exit__(None, None, None)


def test_a_place_that_is_stopped_is_given_up_after_its_time(folders, tmp_path, monkeypatch) -> None:
    with attending(tmp_path) as place:
        stop = once(lambda _: os.kill(place.pid, signal.SIGSTOP))
        folder, given = folders["gemma3"], {"attend_timeout_s": 2.0}
        done = Run(folder, [place.address], monkeypatch, stop, **given)
        assert done.totals.lost_sequences > 0


def test_a_link_that_breaks_again_and_again_loses_no_token(folders, tmp_path, monkeypatch) -> None:
    """Each time while rows have tokens on their way there."""
    seen = Counter[str]()

    def cut(rows: PiggybackedRows) -> None:
        assert rows.host.places is not None
        seen["steps"] += bool(len(rows) and rows.host.places.of_rows.any())
        if seen["steps"] < 5 or seen["cuts"] == 3:
            return
        (link,) = rows.host.places.links
        before = link.status().session
        assert link._transport is not None
        link._transport.close()
        eventually(lambda: link.status().session == before + 1)
        seen["steps"], seen["cuts"] = 0, seen["cuts"] + 1

    with attending(tmp_path) as place:
        done = Run(folders["gemma3"], [place.address], monkeypatch, cut)
    assert seen["cuts"] == 3
    assert done.totals.lost_sequences > 1


def test_with_a_key(folders, tmp_path, monkeypatch) -> None:
    path = key_file(tmp_path)
    with attending(tmp_path, "--key-file", str(path)) as place:
        given = {"attend_key_file": str(path)}
        done = Run(folders["mistral-window"], [place.address], monkeypatch, **given)
        assert done.moves[1] > 0


@pytest.fixture(scope="module")
def needs_namespaces() -> None:
    if why := lossy_link.why_not():
        pytest.skip(why)


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.parametrize(("delay_s", "loss"), [(0.005, 0.0), (0.002, 0.03)])
def test_a_link_that_delays_and_loses_packets(
    folders, tmp_path, monkeypatch, delay_s, loss
) -> None:
    key = str(key_file(tmp_path))
    with lossy_link.lossy_link(delay_s, loss) as link:
        listen = f"{link.there}:8700"
        with attending(tmp_path, "--key-file", key, listen=listen, within=link.within) as place:
            done = Run(folders["gemma3"], [place.address], monkeypatch, attend_key_file=key)
            (found,) = links(done.engine)
            assert found.jobs > 0
            assert found.round_trip_ns / found.jobs > 2e9 * delay_s
            if not loss:
                assert done.totals.lost_sequences == 0


@pytest.mark.usefixtures("needs_namespaces")
def test_a_cable_that_is_pulled_and_put_back(folders, tmp_path, monkeypatch) -> None:
    """No packet says that the link is gone; the engine finds out by the silence."""
    key = str(key_file(tmp_path))
    with lossy_link.lossy_link(0.001, 0.0) as link:
        listen = f"{link.there}:8700"
        with attending(tmp_path, "--key-file", key, listen=listen, within=link.within) as place:

            def pull(rows: PiggybackedRows) -> None:
                link.cut()
                (end,) = rows.host.places.links
                eventually(lambda: not end.status().blocks)
                link.mend()
                eventually(lambda: end.status().session == 2, 60)

            given = {"attend_key_file": key, "attend_timeout_s": 2.0}
            done = Run(folders["gemma3"], [place.address], monkeypatch, once(pull), **given)
            assert done.totals.lost_sequences > 0
