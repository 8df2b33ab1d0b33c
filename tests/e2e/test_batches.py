"""Batches over HTTP before real processes: every line answered once, whoever is killed and when."""

from __future__ import annotations

import json
import random
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest

from batching import ENDED, KILLER, OPTIONS, create, line, wait
from depth import deep
from live import Server, eventually, serving
from weft.batch.points import POINTS

# Points to which request planes come; tests/batch/test_batch_store.py ends a process there.
IN_PLANES = {"upload written", "upload renamed", "upload committed", "batch created"}
IN_PLANES |= {"file forgotten", "batch forgotten"}
ELSEWHERE = IN_PLANES | {"webhook confirmed"}  # tests/e2e/test_webhooks.py ends a process there


def results(client: openai.OpenAI, batch: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Texts of answers and codes of errors by custom_id, each of which is there once."""
    texts: dict[str, str] = {}
    errors: dict[str, str] = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        content = client.files.content(file_id).text if file_id else ""
        for text in content.splitlines():
            found = json.loads(text)
            name = found["custom_id"]
            assert name not in texts, name
            assert name not in errors, name
            if found["error"] is not None:
                errors[name] = found["error"]["code"]
            else:
                texts[name] = found["response"]["body"]["choices"][0]["text"]
    assert batch.request_counts.completed == len(texts)
    assert batch.request_counts.failed == len(errors)
    return texts, errors


def batch_processes(server: Server) -> list[psutil.Process]:
    return [child for name, child in server.children().items() if name == "weft-batches"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def killed_at(folder: Path) -> Path:
    """Names the commit point at which the next batch process is killed."""
    return folder / "point"


@pytest.fixture(scope="module")
def server(folder: Path, killed_at: Path) -> Iterator[Server]:
    killer = KILLER.format(file=str(killed_at))
    data = ("--data-dir", str(folder / "data"), *OPTIONS)
    with serving(folder, *data, modelled=True, batches=killer) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> dict[str, str]:
    """What the lines are answered where nobody is killed."""
    return results(client, wait(client, create(client, [line(i) for i in range(60)])))[0]


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


def test_message_batches_with_anthropics_client(server, client, killed_at):
    """Also where the batch process is killed amid their lines."""
    anthropics = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    said = [{"role": "user", "content": "Hi"}]
    params = {"model": "builtin", "messages": said, "max_tokens": 5}
    asked = [{"custom_id": f"m{i}", "params": params} for i in range(30)]
    asked.append({"custom_id": "wrong", "params": {**params, "max_tokens": -1}})
    asked.append({"custom_id": "stream", "params": {**params, "stream": True}})
    killed_at.write_text("line appended|9")
    batch = anthropics.messages.batches.create(requests=asked)
    eventually(
        lambda: anthropics.messages.batches.retrieve(batch.id).processing_status == "ended", 120
    )
    assert killed_at.read_text() == "", "nobody was killed"
    found = {line.custom_id: line.result for line in anthropics.messages.batches.results(batch.id)}
    assert set(found) == {request["custom_id"] for request in asked}
    assert {found.pop(name).error.error.type for name in ("wrong", "stream")} == {
        "invalid_request_error"
    }
    assert {result.message.usage.output_tokens for result in found.values()} == {5}
    counts = anthropics.messages.batches.retrieve(batch.id).request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (30, 2, 0)
    assert batch.id not in [b.id for b in client.batches.list()]
    assert anthropics.messages.batches.delete(batch.id).type == "message_batch_deleted"


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


def expire(folder: Path, batch_id: str) -> None:
    """Let the time of a batch be over; the shortest window is too long for a test."""
    with closing(sqlite3.connect(folder / "data" / "weft.db", timeout=30)) as base, base:
        base.execute("UPDATE batches SET expires_at = ? WHERE id = ?", (time.time(), batch_id))


def test_an_expired_batch_has_what_was_done(client, folder):
    batch_id = create(client, [line(i, max_tokens=100) for i in range(400)])
    eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 0, 60)
    expire(folder, batch_id)
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


@pytest.mark.parametrize(
    ("point", "nth"),
    [(point, 1 + 16 * point.startswith("line ")) for point in POINTS if point not in ELSEWHERE],
)
def test_a_kill_at_a_commit_point(client, killed_at, folder, undisturbed, point, nth):
    over = point.removeprefix("lines ") if point.startswith("lines") else "completed"
    killed_at.write_text(f"{point}|{nth}")
    long = {} if over == "completed" else {"max_tokens": 90}
    count = 60 if over == "completed" else 300
    batch_id = create(client, [line(i, **long) for i in range(count)])
    if over != "completed":
        eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 0, 60)
    if over == "cancelled":
        client.batches.cancel(batch_id)
    elif over == "expired":
        expire(folder, batch_id)
    batch = wait(client, batch_id)
    assert batch.status == over
    assert killed_at.read_text() == "", "nobody was killed"
    texts, errors = results(client, batch)
    if over == "completed":
        assert (texts, errors) == (undisturbed, {})
    assert len(texts) + len(errors) == count
    assert set(errors.values()) <= {f"batch_{over}"}


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


def test_lines_do_not_fill_the_queue_that_requests_are_refused_for(tmp_path):
    data = ("--data-dir", str(tmp_path / "data"), *OPTIONS, "--max-queued-requests", "2")
    with serving(tmp_path, *data, modelled=True) as limited:
        client = limited.client()
        batch_id = create(client, [line(i, max_tokens=100) for i in range(300)])
        eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 20, 60)
        for _ in range(10):
            client.completions.create(model="builtin", prompt="x", max_tokens=2)
        assert client.batches.retrieve(batch_id).status == "in_progress"


def kill_at_random(server: Server, batches: list[str], kills: int, draw: random.Random) -> int:
    """Kill one process after the other while batches run; how many were killed."""
    client, done = server.client(), 0
    while done < kills:
        time.sleep(draw.uniform(0.05, 0.6))
        try:
            if all(client.batches.retrieve(name).status in ENDED for name in batches):
                break
        except (openai.APIConnectionError, openai.InternalServerError):
            continue
        victims = [
            child for name, child in server.children().items()
            if name in ("weft-batches", "weft-batches", "weft-engine", "weft-frontend")
        ]  # fmt: skip
        victim = draw.choice(victims)
        victim.send_signal(signal.SIGKILL)
        done += 1
    return done


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=deep)])
def test_kills_at_random_lose_and_repeat_nothing(server, client, kills):
    draw = random.Random(kills)
    lines = [line(i) for i in range(60 + 8 * kills)]
    wanted = results(client, wait(client, create(client, lines)))[0]
    batches = [create(client, lines) for _ in range(3)]
    assert kill_at_random(server, batches, kills, draw) > 2
    for name in batches:
        batch = wait(client, name, 300)
        assert batch.status == "completed"
        assert results(client, batch) == (wanted, {})


def test_a_batch_that_would_miss_its_window_is_promoted_and_says_so(client, folder, server):
    batch_id = create(client, [line(i, max_tokens=100) for i in range(1200)])
    eventually(lambda: client.batches.retrieve(batch_id).status == "in_progress", 60)
    with closing(sqlite3.connect(folder / "data" / "weft.db", timeout=30)) as base, base:
        base.execute("UPDATE batches SET expires_at = ? WHERE id = ?", (time.time() + 20, batch_id))

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
