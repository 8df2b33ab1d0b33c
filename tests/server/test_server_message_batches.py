"""``/v1/messages/batches`` before its store: what clients may ask, and what they see."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import psutil
import pytest
from scripted import ScriptedClient
from serving import Running, serving

from typed import unknown_fields
from weft.batch.folder import StoreLimits
from weft.batch.store import BatchStore

ALICE, BOB = "alice-key", "bob-key"
PARAMS: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Hi"}],
}
LIMITS = {"max_file_bytes": 2**20, "max_body_bytes": 2**17, "max_batch_lines": 5}


@pytest.fixture(scope="module")
def running(text: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options: dict[str, Any] = {
        "data_dir": str(tmp_path_factory.mktemp("data") / "weft"),
        "api_key": (ALICE, BOB),
        "disk_reserve_bytes": 0,
        **LIMITS,
    }
    with serving(ScriptedClient([700]), text, **options) as server:
        yield server


def client(running: Running, key: str = ALICE) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0)


def requests(count: int, first: int = 0) -> list[Any]:
    return [{"custom_id": f"r{i}", "params": PARAMS} for i in range(first, first + count)]


def folder(running: Running) -> Path:
    return Path(running.service.options.data_dir or "")


def stored(running: Running) -> list[str]:
    path = folder(running) / "files"
    return os.listdir(path) if path.exists() else []


def answer(running: Running, batch_id: str) -> None:
    """End a batch as the batch process would: one answer, and two errors."""
    limits = StoreLimits(reserve_bytes=0)
    with closing(BatchStore(folder(running), limits)) as store:
        record = store.reload(batch_id)
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
        message |= {"content": [{"type": "text", "text": "Yes\u2028"}], "stop_reason": "end_turn"}
        message |= {"stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 2}}
        good = {"status_code": 200, "request_id": "req_1", "body": message}
        bad = {"status_code": 404, "request_id": "req_2", "body": {}}
        plain = {"type": "invalid_request_error", "param": "model"}
        missing = {**plain, "message": "No such model.", "code": "model_not_found"}
        over = {**plain, "message": "It was cancelled.", "code": "batch_cancelled"}
        path = store.files_folder.path
        line = {"id": "a", "custom_id": "r0", "response": good, "error": None}
        path(record.output_name).write_text(json.dumps(line, ensure_ascii=False) + "\n")
        lines = [
            {"id": "b", "custom_id": "r1", "response": bad, "error": missing},
            {"id": "c", "custom_id": "r2", "response": None, "error": over},
            {"id": "d", "custom_id": "r3", "response": None, "error": missing},
        ]
        path(record.errors_name).write_text("".join(json.dumps(one) + "\n" for one in lines))
        store.finish(record, "cancelled", completed=1, failed=3, given_up=1)


def test_a_batch_with_anthropics_client(running):
    alice = client(running)
    made = alice.messages.batches.create(requests=requests(4))
    assert made.id.startswith("msgbatch_")
    assert (made.type, made.processing_status, made.results_url) == (
        "message_batch",
        "in_progress",
        None,
    )
    assert (made.expires_at - made.created_at).total_seconds() == 86400
    assert (made.request_counts.processing, made.request_counts.succeeded) == (4, 0)
    assert unknown_fields(made) == [".weft"]
    assert alice.messages.batches.retrieve(made.id) == made
    with pytest.raises(anthropic.AnthropicError):
        alice.messages.batches.results(made.id)
    with pytest.raises(anthropic.ConflictError):
        alice.messages.batches.delete(made.id)
    cancelled = alice.messages.batches.cancel(made.id)
    assert cancelled.processing_status == "canceling"
    assert cancelled.cancel_initiated_at is not None

    answer(running, made.id)
    ended = alice.messages.batches.retrieve(made.id)
    assert (ended.processing_status, ended.ended_at is None) == ("ended", False)
    counts = ended.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled) == (0, 1, 2, 1)
    assert ended.results_url == f"{running.url}/v1/messages/batches/{made.id}/results"
    found = {line.custom_id: line.result for line in alice.messages.batches.results(made.id)}
    assert {name: result.type for name, result in found.items()} == {
        "r0": "succeeded",
        "r1": "errored",
        "r2": "canceled",
        "r3": "errored",
    }
    assert found["r0"].message.content[0].text == "Yes\u2028"
    error = found["r1"].error
    assert (error.type, error.error.type, error.error.message, error.request_id) == (
        "error",
        "not_found_error",
        "No such model.",
        "req_2",
    )
    assert found["r3"].error.error.type == "invalid_request_error"
    assert unknown_fields(list(found.values())) == []
    with running.http(headers={"x-api-key": ALICE}) as http:
        content = http.get(f"/v1/messages/batches/{made.id}/results")
        assert content.headers["content-type"] == "application/x-jsonl"
    names = stored(running)
    assert len(names) == 2
    deleted = alice.messages.batches.delete(made.id)
    assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
    assert not set(names) & set(stored(running))
    with pytest.raises(anthropic.NotFoundError):
        alice.messages.batches.retrieve(made.id)


def test_results_are_gone_after_their_time(running):
    alice = client(running)
    made = alice.messages.batches.create(requests=requests(4))
    answer(running, made.id)
    with closing(sqlite3.connect(folder(running) / "weft.db")) as base, base:
        base.execute("UPDATE batches SET cancelled_at = 1000 WHERE id = ?", (made.id,))
        base.execute("UPDATE files SET expires_at = 1000 WHERE purpose = 'message_batch_output'")
    with closing(BatchStore(folder(running), StoreLimits(reserve_bytes=0))):
        pass  # sweeps
    shown = alice.messages.batches.retrieve(made.id)
    assert (shown.results_url, shown.archived_at is None) == (None, False)
    with running.http(headers={"x-api-key": ALICE}) as http:
        assert http.get(f"/v1/messages/batches/{made.id}/results").status_code == 404


def test_the_address_of_results_is_the_one_that_was_asked(running):
    made = client(running).messages.batches.create(requests=requests(4))
    answer(running, made.id)
    path = f"/v1/messages/batches/{made.id}"
    for headers, start in (
        ({"host": "llm.example"}, "http://llm.example/"),
        ({"host": "llm.example", "x-forwarded-proto": "https, http"}, "https://llm.example/"),
        ({"host": "llm.example", "x-forwarded-proto": "javascript"}, "http://llm.example/"),
        ({"host": 'a"b'}, "/v1/messages"),
    ):
        with running.http(headers={"x-api-key": ALICE, **headers}) as http:
            assert http.get(path).json()["results_url"].startswith(start)


def test_pages_lead_both_ways(running):
    bob = client(running, BOB)
    empty = bob.messages.batches.list()
    assert (empty.data, empty.has_more, empty.first_id, empty.last_id) == ([], False, None, None)
    ids = [bob.messages.batches.create(requests=requests(1)).id for _ in range(5)]
    newest = ids[::-1]
    assert [batch.id for batch in bob.messages.batches.list(limit=2)] == newest
    page = bob.messages.batches.list(limit=2)
    assert ([b.id for b in page.data], page.has_more) == (newest[:2], True)
    assert (page.first_id, page.last_id) == (newest[0], newest[1])
    page = bob.messages.batches.list(limit=2, before_id=newest[4])
    assert ([b.id for b in page.data], page.has_more) == (newest[2:4], True)
    assert [b.id for b in bob.messages.batches.list(limit=3, before_id=newest[4])][:4] == [
        *newest[1:4],
        newest[0],
    ]
    page = bob.messages.batches.list(after_id=newest[2])
    assert ([b.id for b in page.data], page.has_more) == (newest[3:], False)
    for query in ({"limit": 0}, {"limit": 1001}, {"after_id": "x"}, {"before_id": "x"}):
        with pytest.raises(anthropic.BadRequestError):
            bob.messages.batches.list(**query)
    with pytest.raises(anthropic.BadRequestError):
        bob.messages.batches.list(after_id=newest[1], before_id=newest[2])


def test_each_key_and_each_api_sees_its_own(running):
    alice, bob = client(running), client(running, BOB)
    made = alice.messages.batches.create(requests=requests(1))
    for ask in (
        bob.messages.batches.retrieve,
        bob.messages.batches.cancel,
        bob.messages.batches.delete,
    ):
        with pytest.raises(anthropic.NotFoundError):
            ask(made.id)
    assert made.id not in [batch.id for batch in bob.messages.batches.list()]
    with running.http(headers={"x-api-key": ALICE}) as http:
        assert http.get(f"/v1/batches/{made.id}").status_code == 404
        assert http.post(f"/v1/batches/{made.id}/cancel").status_code == 404
        assert http.get("/v1/batches").json()["data"] == []
        assert http.get("/v1/files").json()["data"] == []
        assert http.get("/v1/messages/batches/batch_1").status_code == 404
        assert stored(running)
        for name in stored(running):
            assert http.get(f"/v1/files/{name}").status_code == 404
            assert http.delete(f"/v1/files/{name}").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "JSON"),
        (b"{", 400, "JSON"),
        (b'{"requests": 5}', 400, "requests"),
        ({"requests": []}, 400, "at least one"),
        ({"requests": [{"params": PARAMS}]}, 400, "requests[0].custom_id"),
        ({"requests": [{"custom_id": "a"}]}, 400, "requests[0].params"),
        ({"requests": [{"custom_id": "a", "params": []}]}, 400, "requests[0].params"),
        ({"requests": [*requests(1), {"custom_id": "a b", "params": {}}]}, 400, "requests[1]"),
        ({"requests": [*requests(1), {"custom_id": "x" * 65, "params": {}}]}, 400, "requests[1]"),
        ({"requests": [*requests(2), *requests(1)]}, 400, "requests[2]"),
        ({"requests": requests(6)}, 400, "at most 5"),
        ({"requests": [{**requests(1)[0], "url": "/v1"}]}, 400, "requests[0].url"),
        ({"requests": requests(1), "surprise": 1}, 400, "surprise"),
        (b'{"requests": [{"custom_id": "a", "params": {"x": nope}}]}', 400, "JSON"),
        (b'{"requests": [{"custom_id": "a", "params": {"x": "\xff"}}]}', 400, "JSON"),
        (b'{"requests": [{"custom_id": "a", "params": %b}]}' % (b'{"x":' * 20_000), 400, "JSON"),
        (
            b'{"requests": [{"custom_id": "a", "params": {"x": %b1%b}}]}'
            % (b'{"x":' * 15_000, b"}" * 15_000),
            400,
            "JSON",
        ),
        ({"requests": [{"custom_id": "a", "params": {"x": "y" * 2**17}}]}, 413, "requests[0]"),
        (b" " * (2**20 + 2**17), 413, "longer than"),
        ({"requests": [{"custom_id": f"{i}", "params": {"x": "y" * 2**16 * 3}} for i in range(6)]},
         413, ""),
    ],
)  # fmt: skip
def test_a_wrong_batch_names_what_is_wrong_and_leaves_nothing(running, body, status, words):
    before = stored(running)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with running.http(headers={"x-api-key": ALICE}) as http:
        headers = {"content-type": "application/json"}
        said = http.post("/v1/messages/batches", content=data, headers=headers)
        chunks = (data[at : at + 5000] for at in range(0, len(data), 5000))
        again = http.post("/v1/messages/batches", content=chunks, headers=headers)
    assert (said.status_code, again.status_code) == (status, status), said.text
    error = said.json()
    assert (error["type"], set(error["error"])) == ("error", {"type", "message"})
    assert words in error["error"]["message"]
    assert words in again.json()["error"]["message"]
    assert stored(running) == before


def test_a_form_is_no_batch(running):
    with running.http(headers={"x-api-key": ALICE}) as http:
        assert http.post("/v1/messages/batches", data={"requests": "x"}).status_code == 415


def test_the_lines_of_its_input_are_requests_of_a_batch(running):
    """Whatever the form of the JSON, and whatever stands in its texts."""
    params = {**PARAMS, "system": 'a\n"}]{\\ \u2028\u00e9', "metadata": {"user_id": "{"}}
    asked = [{"custom_id": f"r{i}", "params": params} for i in range(3)]
    data = json.dumps({"requests": asked}, indent=2, ensure_ascii=False).encode()
    before = set(stored(running))
    with running.http(headers={"x-api-key": ALICE, "content-type": "application/json"}) as http:
        assert http.post("/v1/messages/batches", content=data).status_code == 200
    (name,) = set(stored(running)) - before
    lines = (folder(running) / "files" / name).read_bytes().split(b"\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/messages", "body": params}
        for i in range(3)
    ]


def test_the_memory_of_a_batch_does_not_grow_with_it(text, tmp_path):
    process = psutil.Process()
    item = json.dumps({"custom_id": "ID", "params": {**PARAMS, "system": "x" * 2**16}}).encode()
    options: dict[str, Any] = {"data_dir": str(tmp_path), "disk_reserve_bytes": 0}
    with serving(ScriptedClient([700]), text, **options) as server, server.http() as http:
        most = [0]

        def body() -> Iterator[bytes]:
            yield b'{"requests": ['
            for number in range(1024):
                yield (b"," if number else b"") + item.replace(b"ID", b"r%d" % number)
                most[0] = max(most[0], process.memory_info().rss)
            yield b"]}"

        before = process.memory_info().rss
        headers = {"content-type": "application/json"}
        made = http.post("/v1/messages/batches", content=body(), headers=headers).json()
        assert made["request_counts"]["processing"] == 1024
        assert most[0] - before < 32 * 2**20
