"""Batches over HTTP before real processes: every line answered, however the batch ends."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from family import peak_bytes
from live import Server, eventually, serving
from served_batches import (
    OPTIONS,
    batch_processes,
    change,
    create,
    create_of,
    expire,
    line,
    results,
    undisturbed_results,
    wait,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    data = ("--data-dir", str(folder / "data"), *OPTIONS)
    with serving(folder, *data, modelled=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> dict[str, str]:
    return undisturbed_results(client)


def test_there_is_no_process_before_the_first_batch_and_each_line_is_answered(server, client):
    assert not batch_processes(server)
    lines = [line(i) for i in range(40)] + [line(40, temperature="hot"), line(41, model="gpt-4")]
    batch_id = create(client, lines, metadata={"job": "x"})
    batch = wait(client, batch_id)
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"job": "x"}, "builtin")
    texts, errors = results(client, batch)
    assert set(texts) == {f"r{i}" for i in range(40)}
    assert errors == {"r40": "invalid_parameter", "r41": "model_not_found"}
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.usage.output_tokens == sum(6 + i % 20 for i in range(40))
    assert batch.usage.input_tokens == 4 * 40
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert len(batch_processes(server)) == 1


def test_other_endpoints(client):
    chat = {"model": "builtin", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    chats = [
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    ]
    batch = wait(client, create(client, chats, endpoint="/v1/chat/completions"))
    assert batch.request_counts.completed == 1
    body = {"model": "builtin", "input": "Hi", "max_output_tokens": 3}
    asked = [{"custom_id": "c", "method": "POST", "url": "/v1/responses", "body": body}]
    batch = wait(client, create(client, asked, endpoint="/v1/responses"))
    assert (batch.request_counts.completed, batch.usage.output_tokens) == (1, 3)
    message = {"custom_id": "c", "method": "POST", "url": "/v1/messages", "body": chat}
    batch = wait(client, create(client, [message], endpoint="/v1/messages"))
    assert (batch.request_counts.completed, batch.usage.output_tokens) == (1, 3)
    answer = json.loads(client.files.content(batch.output_file_id).text)
    assert answer["response"]["body"]["usage"]["service_tier"] == "batch"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["this is no JSON"], "invalid_json", 1),
        ([line(0), "", {**line(1), "url": "/v1/chat/completions"}], "mismatched_url", 3),
        ([{**line(0), "url": "/v1/images"}], "unknown_url", 1),
        ([line(0), line(0)], "duplicate_custom_id", 2),
        ([{"custom_id": "x"}], "missing_required_parameter", 1),
        ([line(0, stream=True)], "unsupported_parameter", 1),
        ([""], "empty_file", None),
    ],
)
def test_a_wrong_input_fails_with_its_lines(client, lines, code, number):
    batch = wait(client, create(client, lines))
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


def test_a_cancelled_batch_has_what_was_done(client):
    batch_id = create(client, [line(i, max_tokens=100) for i in range(400)])
    eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 0, 60)
    file_id = client.batches.retrieve(batch_id).input_file_id
    with pytest.raises(openai.ConflictError):
        client.files.delete(file_id)
    client.batches.cancel(batch_id)
    batch = wait(client, batch_id)
    assert batch.status == "cancelled"
    texts, errors = results(client, batch)
    assert texts
    assert set(errors.values()) == {"batch_cancelled"}
    assert len(texts) + len(errors) == 400
    assert client.files.delete(file_id).deleted


def test_an_expired_batch_has_what_was_done(client, folder):
    batch_id = create(client, [line(i, max_tokens=100) for i in range(400)])
    eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 0, 60)
    expire(folder / "data", batch_id)
    batch = wait(client, batch_id)
    assert batch.status == "expired"
    texts, errors = results(client, batch)
    assert texts
    assert set(errors.values()) == {"batch_expired"}
    assert len(texts) + len(errors) == 400


def test_a_line_that_was_torn_by_a_kill_is_asked_again(client, server, folder, undisturbed):
    batch_id = create(client, [line(i) for i in range(60)])
    eventually(lambda: client.batches.retrieve(batch_id).status == "in_progress", 60)
    journals = {path.name for path in (folder / "data" / "files").iterdir()}
    known = {file.id for file in client.files.list()}
    for child in batch_processes(server):
        child.kill()
    for name in journals - known:
        with (folder / "data" / "files" / name).open("ab") as journal:
            journal.write(b'{"id": "batch_req_')
    batch = wait(client, batch_id)
    texts, errors = results(client, batch)
    assert (texts, errors) == (undisturbed, {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_and_starts_again_goes_on(tmp_path, undisturbed, number):
    data = ("--data-dir", str(tmp_path / "data"), *OPTIONS)
    with serving(tmp_path, *data, modelled=True) as first:
        client = first.client()
        batch_id = create(client, [line(i) for i in range(60)])
        eventually(lambda: client.batches.retrieve(batch_id).status != "validating", 60)
        first.process.send_signal(number)  # to the supervisor
        first.process.wait(60)
    with serving(tmp_path, *data, modelled=True) as second:
        batch = wait(second.client(), batch_id)
        assert results(second.client(), batch) == (undisturbed, {})


def test_memory_does_not_grow_with_a_file(tmp_path):
    """Neither the request plane that takes it nor the batch process that reads it holds it."""

    def peaks(client: openai.OpenAI, server: Server, lines: int) -> dict[str, int]:
        bulky = {"messages": [{"role": "user", "content": "many words " * 900}]}
        chat = {"url": "/v1/chat/completions", "body": {"model": "builtin", **bulky}}
        path = tmp_path / "in.jsonl"
        with path.open("w") as file:
            file.writelines(json.dumps({**line(i), **chat}) + "\n" for i in range(lines))
        file_id = client.files.create(file=path, purpose="batch").id
        batch_id = create_of(client, file_id, endpoint="/v1/chat/completions")
        eventually(lambda: client.batches.retrieve(batch_id).status == "in_progress", 60)
        client.batches.cancel(batch_id)
        assert wait(client, batch_id).request_counts.total == lines
        found = server.children()
        return {name: peak_bytes(found[name].pid) for name in ("weft-frontend", "weft-batches")}

    options = ("--data-dir", str(tmp_path / "data"), *OPTIONS)
    with serving(tmp_path, *options, modelled=True) as own:
        client = own.client()
        small, large = (peaks(client, own, lines) for lines in (800, 8000))  # 8 and 80 MB
    for name, peak in large.items():
        assert peak - small[name] < 20 * 2**20, name
        assert peak < 150 * 2**20, name


def test_lines_do_not_fill_the_queue_that_requests_are_refused_for(tmp_path):
    data = ("--data-dir", str(tmp_path / "data"), *OPTIONS, "--max-queued-requests", "2")
    with serving(tmp_path, *data, modelled=True) as limited:
        client = limited.client()
        batch_id = create(client, [line(i, max_tokens=100) for i in range(300)])
        eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 20, 60)
        for _ in range(10):
            client.completions.create(model="builtin", prompt="x", max_tokens=2)
        assert client.batches.retrieve(batch_id).status == "in_progress"


def test_a_batch_that_would_miss_its_window_is_promoted_and_says_so(client, folder, server):
    batch_id = create(client, [line(i, max_tokens=100) for i in range(1200)])
    eventually(lambda: client.batches.retrieve(batch_id).status == "in_progress", 60)
    change(folder / "data", "batches", batch_id, expires_at=time.time() + 20)

    def shown() -> dict[str, Any]:
        return client.batches.retrieve(batch_id).model_extra["weft"]

    eventually(lambda: shown()["service_class"] == "flex", 60)
    assert shown()["predicted_end_at"] > time.time()
    assert "would miss its window" in server.errors.read_text()
    client.batches.cancel(batch_id)
    assert wait(client, batch_id).status in ("cancelled", "expired")


KEYS = """keys:
  - {name: boss, key: key-boss}
  - {name: nightly, key: key-nightly, classes: [batch], default_class: batch}
  - {name: chats, key: key-chats, classes: [interactive]}
"""


def test_what_a_batch_uses_is_its_keys(tmp_path, undisturbed):
    """A process that is killed takes along no more than it has counted in the last moment."""
    (tmp_path / "keys").write_text(KEYS)
    lines = [line(i) for i in range(60)]
    usage = ("--usage-db", str(tmp_path / "usage.db"))
    keys = ("--api-key-file", str(tmp_path / "keys"), "--admin-key", "boss", *usage)
    data = ("--data-dir", str(tmp_path / "data"), *OPTIONS)
    with serving(tmp_path, *data, *keys, modelled=True) as server:
        with pytest.raises(openai.PermissionDeniedError, match=r"only 'interactive'") as refused:
            create(server.client("key-chats"), lines)
        assert refused.value.code == "service_class_not_allowed"
        client = server.client("key-nightly")
        boss = {"authorization": "Bearer key-boss"}

        def row() -> tuple[int, int, int]:
            found = httpx.get(f"{server.url}/v1/usage?key=nightly", headers=boss).json()["data"]
            (row,) = found or [dict.fromkeys(("requests", "prompt_tokens", "completion_tokens"), 0)]
            assert row.get("service_class", "batch") == "batch"
            return row["requests"], row["prompt_tokens"], row["completion_tokens"]

        batch = wait(client, create(client, lines))
        assert results(client, batch) == (undisturbed, {})
        used = len(lines), batch.usage.input_tokens, batch.usage.output_tokens
        eventually(lambda: row() == used)
        for process in batch_processes(server):
            process.kill()
        wait(client, create(client, lines))
        eventually(lambda: row() == tuple(2 * number for number in used))
        page = httpx.get(f"{server.url}/metrics", headers=boss).text
        (total,) = re.findall(r"^weft:generation_tokens_total\{.*\} (\d+)", page, re.MULTILINE)
        assert int(total) == 2 * used[2]
        assert 'weft:key_requests_total{key="nightly"' in page
        assert (
            'weft:time_to_first_token_seconds_count{model_name="builtin",service_class="batch"}'
            in page
        )
