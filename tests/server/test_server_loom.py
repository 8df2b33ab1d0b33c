"""``/v1/loom`` before an engine whose pages a test writes: objects, streams, keys, batches."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedClient
from serving import Running, serving

from live import eventually
from weft.batch.folder import StoreLimits
from weft.batch.store import BatchStore
from weft.core.types import ServiceClass
from weft.ring.layout import (
    COUNTED_CLASSES,
    OTHER_CLASSES,
    EngineInfo,
    LoggedRecovery,
    LoggedStep,
)
from weft.server import keys as key_ring
from weft.server import loom as served_loom
from weft.server.counts import TTFT_BUCKETS, Histogram, percentile
from weft.server.metrics import Metrics
from weft.server.probe import NoProbe

PATH = "/v1/loom"
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
KEYS = (
    "keys:\n  - {name: boss, key: boss}\n  - {name: user, key: user}\n  - {name: eye, key: eye}\n"
)


def places(**counts: int) -> tuple[int, ...]:
    """By place: of batch, flex, interactive, priority, in the order of their names."""
    names = ("batch", "flex", "interactive", "priority")
    given = [counts.get(name, 0) for name in names]
    return (*given, *[0] * (COUNTED_CLASSES - len(given)))


class Pages(NoProbe):
    """An engine of which a test says everything."""

    def __init__(self) -> None:
        self.logged: list[LoggedStep] = []
        self.recovered: list[LoggedRecovery] = []
        self.info_page = EngineInfo(
            ready=1, blocks=100, free_blocks=60, block_size=16, host_blocks=10, free_host_blocks=4,
            waiting=3, running=2, paused=1, queued_prompt_tokens=77, max_num_seqs=16, steps=9,
            output_tokens=50, waiting_0=3, running_2=2, started_ns=time.monotonic_ns(),
        )  # fmt: skip

    def step(self, **given: Any) -> None:
        number = len(self.logged)
        now = time.monotonic_ns()
        row = LoggedStep(
            number, 1, number + 1, now - 5_000_000, now, 0, 1, 0, 0, 0, places(), places()
        )
        self.logged.append(replace(row, **given))

    def page(self) -> EngineInfo:
        return self.info_page

    def steps(self, since: int) -> tuple[int, list[LoggedStep]]:
        return len(self.logged), self.logged[since:]

    def recoveries(self) -> list[LoggedRecovery]:
        return self.recovered

    def engines(self) -> int:
        return 2

    def policy(self) -> str:
        return "slo"


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def running(text: Any, pages: Pages, tmp_path: Path) -> Iterator[Running]:
    with serving(ScriptedClient([700, 701, 702]), text, pages, data_dir=str(tmp_path)) as server:
        yield server


def look(running: Running, **headers: str) -> dict[str, Any]:
    with running.http() as http:
        answer = http.get(PATH, params={"once": 1}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        found: dict[str, Any] = answer.json()
        return found


@contextmanager
def events(running: Running, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    with running.http() as http, http.stream("GET", PATH, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        yield (json.loads(line.removeprefix("data: ")) for line in lines)


# -- objects and streams ---------------------------------------------------------------------------


def test_an_object_has_what_the_pages_have(running, pages):
    pages.step(prefill=places(batch=40), decode=places(interactive=2, batch=1), drafts=3)
    pages.step(steps=4, predicted_ns=2_000_000, host_tokens=2, began_ns=0, ended_ns=8_000_000)
    pages.step(split=1, engine=2)
    now_ns = time.monotonic_ns()
    pages.recovered = [LoggedRecovery(2, 2, now_ns - 10**9, now_ns - 5 * 10**8)]
    began = time.time()
    seen = look(running)
    assert seen["object"] == "loom"
    assert began <= seen["at"] <= time.time()
    assert seen["models"] == ["builtin", "org/other"]
    assert (seen["engine"]["state"], seen["engine"]["number"]) == ("ready", 2)
    assert (seen["engine"]["policy"], seen["engine"]["max_num_seqs"]) == ("slo", 16)
    assert abs(seen["engine"]["started_at"] - began) < 30
    assert seen["engine"]["updated_at"] is None
    assert seen["load"] == {
        "waiting": 3, "running": 2, "paused": 1, "queued_prompt_tokens": 77, "host_queue": 0
    }  # fmt: skip
    assert seen["kv"] == {
        "blocks": 100, "used_blocks": 40, "block_size": 16, "host_blocks": 10, "used_host_blocks": 6
    }  # fmt: skip
    assert (seen["totals"]["steps"], seen["totals"]["output_tokens"]) == (9, 50)
    assert (seen["batches"], seen["lost_steps"]) == ([], 0)
    first, second, third = seen["steps"]
    assert first["prefill"] == {"batch": 40}
    assert first["decode"] == {"interactive": 2, "batch": 1}
    assert (first["n"], first["step"], first["engine"], first["drafts"]) == (0, 1, 1, 3)
    assert (first["ms"], first["predicted_ms"], first["kind"]) == (5.0, None, "planned")
    assert abs(first["at"] - began) < 30
    assert (second["ms"], second["predicted_ms"]) == (2.0, 2.0)  # of one of the four
    assert (second["steps"], second["kind"], second["host"]) == (4, "resident", 2)
    assert (third["kind"], third["engine"], third["prefill"]) == ("split", 2, {})
    (recovery,) = seen["recoveries"]
    assert (recovery["engine"], recovery["n"], recovery["gap_s"]) == (2, 2, 0.5)
    assert abs(recovery["back_at"] - began) < 30
    classes = {row["name"]: row for row in seen["classes"]}
    assert list(classes) == ["priority", "interactive", "flex", "batch"]
    assert (classes["batch"]["waiting"], classes["batch"]["running"]) == (3, 0)
    assert (classes["interactive"]["waiting"], classes["interactive"]["running"]) == (0, 2)
    assert classes["interactive"]["ttft_s"] == {
        "target": 3.0, "p50": None, "p99": None, "count": 0
    }  # fmt: skip
    assert (classes["batch"]["kept"], classes["batch"]["judged"]) == (None, 0)


def test_a_client_may_ask_for_json_by_its_header(running):
    with running.http() as http:
        answer = http.get(PATH, headers={"accept": "application/json"})
        assert answer.json()["object"] == "loom"


@pytest.mark.parametrize(
    ("query", "word"), [("once=2", "once"), ("once=", "once"), ("onc=1", "once"), ("x=1", "x")]
)
def test_a_query_that_makes_no_sense_is_refused(running, query, word):
    with running.http() as http:
        answer = http.get(f"{PATH}?{query}")
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]
        assert http.post(PATH).status_code == 405


def test_events_have_each_step_once(running, pages):
    pages.step()
    pages.step()
    with events(running) as stream:
        assert [step["n"] for step in next(stream)["steps"]] == [0, 1]
        pages.step()
        after = next(stream)
        assert [step["n"] for step in after["steps"]] == [2]
        empty = next(stream)
        assert (empty["steps"], empty["lost_steps"]) == ([], 0)
        assert served_loom.EVERY_S * 0.5 < empty["at"] - after["at"] < 10 * served_loom.EVERY_S


def test_steps_that_nobody_kept_are_counted(running, pages, monkeypatch):
    with events(running) as stream:
        next(stream)
        kept = pages.logged
        monkeypatch.setattr(pages, "steps", lambda since: (len(kept), kept[max(since, 3) :]))
        for _ in range(5):
            pages.step()
        seen = [next(stream) for _ in range(4)]
    assert sum(event["lost_steps"] for event in seen) == 3


def test_readers_are_bounded_and_those_who_leave_make_room(running, monkeypatch):
    monkeypatch.setattr(served_loom, "MOST_READERS", 1)
    with running.http() as http:
        with events(running) as stream:
            next(stream)
            refused = http.get(PATH)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_readers"
            assert int(refused.headers["retry-after"]) > 0
            assert look(running)["object"] == "loom"

        def taken() -> bool:
            with http.stream("GET", PATH) as answer:
                return answer.status_code == 200

        eventually(taken)


def test_a_stream_ends_with_the_server(text, pages):
    got: list[dict[str, Any]] = []
    with serving(ScriptedClient(), text, pages) as running:

        def read() -> None:
            with events(running) as stream:
                got.extend(stream)

        reading = threading.Thread(target=read)
        reading.start()
        eventually(lambda: bool(got))
    reading.join(10)
    assert got[-1] == {"object": "loom.end", "reason": "server_stopping"}
    assert [event["object"] for event in got[:-1]] == ["loom"] * (len(got) - 1)


# -- classes ---------------------------------------------------------------------------------------


def test_latencies_and_targets_of_what_was_served(running):
    running.client.answer = None
    body = {"model": "builtin", "prompt": [9], "max_tokens": 8}
    answers = []

    def ask() -> None:
        with running.http() as http:
            answers.append(http.post("/v1/completions", json=body).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    request = running.client.submitted.get(timeout=10)
    running.client.send(request, 700)
    time.sleep(0.3)
    running.client.send(request, 701, 702, 703, finish="stop")
    asking.join(10)
    assert answers == [200]
    row = next(row for row in look(running)["classes"] if row["name"] == "interactive")
    assert (row["kept"], row["judged"]) == (1.0, 1)
    assert (row["ttft_s"]["count"], row["tpot_s"]["count"]) == (1, 1)
    assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p99"]
    assert 0.1 * 0.9 < row["tpot_s"]["p99"] <= 0.2  # 0.3 s over three tokens, in its bucket


def test_percentiles_lie_in_the_bucket_of_their_observation():
    histogram = Histogram(TTFT_BUCKETS)
    assert percentile(TTFT_BUCKETS, histogram.counts, 0.5) is None
    for value in [0.03] * 98 + [0.9, 1000.0]:
        histogram.observe(value)
    assert 0.02 < percentile(TTFT_BUCKETS, histogram.counts, 0.5) < 0.04
    assert 0.75 < percentile(TTFT_BUCKETS, histogram.counts, 0.99) <= 1.0
    assert percentile(TTFT_BUCKETS, histogram.counts, 1.0) == TTFT_BUCKETS[-1]


def test_what_was_long_ago_does_not_count(monkeypatch):
    metrics = Metrics("m", NoProbe())
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    latencies = metrics.latencies_of(metrics.place_of("interactive"))
    latencies.time_to_first_token.observe(0.03)
    metrics.show()
    clock[0] += 301
    metrics.show()
    recent = metrics.attainment.recent(metrics.total().observed())
    assert sum(recent.values()) == 0
    latencies.time_to_first_token.observe(0.03)
    recent = metrics.attainment.recent(metrics.total().observed())
    assert +recent == {metrics.bucket_key(metrics.place_of("interactive"), "ttft", 4): 1}


def test_classes_beyond_those_with_a_place_are_counted_together(text, pages):
    tokenizer, template, card = text
    names = [f"c{number}" for number in range(COUNTED_CLASSES + 1)]
    classes = tuple(ServiceClass(name, at) for at, name in enumerate(names))
    pages.step(decode=tuple(range(1, COUNTED_CLASSES + 1)))
    texts = tokenizer, template, replace(card, classes=classes)
    with serving(ScriptedClient(), texts, pages) as running:
        seen = look(running)
    assert seen["steps"][0]["decode"] == {
        **{f"c{at}": at + 1 for at in range(COUNTED_CLASSES - 1)}, OTHER_CLASSES: COUNTED_CLASSES
    }  # fmt: skip
    rows = {row["name"]: row["running"] for row in seen["classes"]}
    assert list(rows) == names
    assert (rows["c2"], rows["c7"], rows["c8"]) == (2, None, None)


# -- keys and batches ------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(text: Any, pages: Pages, tmp_path: Path) -> Iterator[Running]:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    options: dict[str, Any] = {
        "data_dir": str(tmp_path / "data"),
        "api_key_file": str(path),
        "admin_key": ("boss",),
        "disk_reserve_bytes": 0,
    }
    with serving(ScriptedClient(), text, pages, **options) as server:
        yield server


def create(running: Running, key: str) -> str:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)
    file = client.files.create(file=("in.jsonl", LINE), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    return batch.id


def test_a_key_sees_its_own_batches_and_an_admin_all(keyed):
    with keyed.http() as http:
        assert http.get(PATH).status_code == 401
        assert http.get(PATH, headers=bearer("nobody")).status_code == 401
    assert look(keyed, **bearer("user"))["batches"] == []
    assert not Path(keyed.service.options.data_dir).exists()  # to look is not to use
    ids = {key: create(keyed, key) for key in ("user", "eye", "boss")}
    for key in ("user", "eye"):
        (batch,) = look(keyed, **bearer(key))["batches"]
        assert (batch["id"], batch["own"]) == (ids[key], True)
        assert batch["cancel"] == f"/v1/batches/{ids[key]}/cancel"
        assert (batch["status"], batch["progress"]) == ("validating", 0.0)
    rows = {row["id"]: row for row in look(keyed, **bearer("boss"))["batches"]}
    assert list(rows) == [ids["boss"], ids["eye"], ids["user"]]  # the newest first
    assert [rows[ids[key]]["own"] for key in ("user", "eye", "boss")] == [False, False, True]
    assert rows[ids["user"]]["cancel"] is None
    with keyed.http() as http:
        path = rows[ids["boss"]]["cancel"]
        assert http.post(path, headers=bearer("boss")).json()["status"] == "cancelling"
    after = {row["id"]: row for row in look(keyed, **bearer("boss"))["batches"]}
    assert after[ids["boss"]]["cancel"] is None


def test_one_key_leaves_others_their_readers_and_looks_once(keyed, monkeypatch):
    looks = []
    batches = served_loom.Loom.batches

    async def counted(loom: Any, viewer: Any) -> Any:
        looks.append(viewer.owner)
        return await batches(loom, viewer)

    monkeypatch.setattr(served_loom.Loom, "batches", counted)
    monkeypatch.setattr(served_loom, "BATCHES_EVERY_S", 60.0)
    monkeypatch.setattr(served_loom, "MOST_READERS", 8)
    one, two, other = (events(keyed, **bearer(key)) for key in ("user", "user", "eye"))
    with keyed.http() as http, one as first, two as second:
        for stream in (first, second, first):
            assert next(stream)["batches"] == []
        refused = http.get(PATH, headers=bearer("user"))
        assert refused.status_code == 503
        assert "2 clients with this key" in refused.json()["error"]["message"]
        assert len(looks) == 1
        with other as third:
            assert next(third)["batches"] == []
    assert len(set(looks)) == len(looks) == 2


def test_progress_and_end_of_a_batch(keyed, monkeypatch):
    batch_id = create(keyed, "user")
    store = BatchStore(Path(keyed.service.options.data_dir), StoreLimits(reserve_bytes=0))
    soon = int(time.time()) + 100
    store.update(batch_id, status="in_progress", total=8, completed=3, failed=1, predicted_at=soon)
    (batch,) = look(keyed, **bearer("user"))["batches"]
    assert (batch["total"], batch["completed"], batch["failed"]) == (8, 3, 1)
    assert (batch["progress"], batch["predicted_end_at"]) == (0.5, soon)
    assert 90 < batch["eta_s"] <= 100
    assert batch["warning"] is None
    store.update(batch_id, status="completed", completed=7, completed_at=int(time.time()))
    (batch,) = look(keyed, **bearer("user"))["batches"]
    assert (batch["progress"], batch["eta_s"], batch["cancel"]) == (1.0, None, None)
    assert batch["ended_at"] is not None
    monkeypatch.setattr(served_loom, "ENDED_S", -10.0)
    assert look(keyed, **bearer("user"))["batches"] == []
    store.close()


def test_batches_that_cannot_be_read_are_null_and_the_rest_is_there(running, tmp_path):
    (tmp_path / "weft.db").write_bytes(b"something else" * 100)
    seen = look(running)
    assert seen["batches"] is None
    assert seen["kv"]["blocks"] == 100


def test_with_a_key_for_metrics_others_see_nothing(text, pages, tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS)
    given: dict[str, Any] = {"metrics_key": ("eye",), "admin_key": ("boss",)}
    with (
        serving(ScriptedClient(), text, pages, api_key_file=str(path), **given) as running,
        running.http() as http,
    ):
        refused = http.get(PATH, headers=bearer("user"))
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "loom_not_allowed"
        for key in ("eye", "boss"):
            assert look(running, **bearer(key))["object"] == "loom"


def test_a_stream_ends_when_its_key_is_taken_away(keyed, monkeypatch):
    monkeypatch.setattr(key_ring, "LOOK_EVERY_S", 0.0)
    path = Path(keyed.service.options.api_key_file)
    with events(keyed, **bearer("user")) as stream, events(keyed, **bearer("eye")) as other:
        assert next(stream)["object"] == "loom"
        path.write_text(KEYS.replace("key: user", "key: another"))
        last = {event["object"]: event for event in stream}["loom.end"]
        assert last["reason"] == "key_revoked"
        for _ in range(3):
            assert next(other)["object"] == "loom"


def test_one_client_that_does_not_read_holds_nobody_up(running, pages):
    raw = running.connect()
    raw.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    for _ in range(256):
        pages.step(decode=places(batch=1))
    with events(running) as stream:
        for _ in range(3):
            assert next(stream)["object"] == "loom"
    with httpx.Client() as http:
        assert http.get(f"{running.url}/health").status_code == 200
    raw.close()
