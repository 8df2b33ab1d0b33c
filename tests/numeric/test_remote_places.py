"""Engines whose best effort decodes at remote places: the tokens of engines that have ample KV."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import build, save_with_tokenizer
from crowds import assert_alike, crowd, piggybacking
from tight_kv import least_kv_memory, run, settings_for

import lossy_link
from live import eventually
from places import RunningPlace, attending, key_file
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
