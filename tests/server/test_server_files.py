"""``/v1/files`` and ``/v1/batches`` before their store: what clients may ask, and what they see."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from scripted import ScriptedClient
from serving import Running, serving

import description
from live import eventually
from weft.batch.demand import Demand
from weft.batch.folder import StoreLimits
from weft.batch.pace import Observed
from weft.batch.store import BatchStore

ALICE, BOB = "alice-key", "bob-key"
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
LIMIT = 3 * 2**20


@pytest.fixture(scope="module")
def running(text: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options: dict[str, Any] = {
        "data_dir": str(tmp_path_factory.mktemp("data") / "weft"),
        "api_key": (ALICE, BOB),
        "max_file_bytes": LIMIT,
        "disk_reserve_bytes": 0,
        "body_timeout_s": 1.0,
    }
    with serving(ScriptedClient([700]), text, **options) as server:
        yield server


def client(running: Running, key: str = ALICE) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def bearing(key: str = ALICE, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


def stored(running: Running) -> list[str]:
    folder = Path(running.service.options.data_dir or "", "files")
    return os.listdir(folder) if folder.exists() else []


def conforms(given: dict[str, Any], schema: str) -> None:
    """It is as the description says; what its examples show as null it does not allow."""
    description.need()
    present = {name: value for name, value in given.items() if value is not None}
    description.validator(schema).validate(present)


def test_a_file_with_openais_client(running):
    alice = client(running)
    made = alice.files.create(
        file=("in.jsonl", LINE * 3),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.filename, made.bytes, made.purpose) == ("in.jsonl", 3 * len(LINE), "batch")
    assert made.expires_at == made.created_at + 3600
    assert alice.files.retrieve(made.id) == made
    assert alice.files.content(made.id).read() == LINE * 3
    with running.http(headers=bearing()) as http:
        conforms(http.get(f"/v1/files/{made.id}").json(), "OpenAIFile")
        content = http.get(f"/v1/files/{made.id}/content")
        assert content.headers["content-type"] == "application/octet-stream"
        assert content.headers["content-disposition"] == 'attachment; filename="in.jsonl"'
        expiry = {"expires_after": (None, '{"anchor": "created_at", "seconds": 7200}')}
        form = {"file": ("in.jsonl", LINE), "purpose": (None, "evals"), **expiry}
        given = http.post("/v1/files", files=form).json()
        assert given["expires_at"] == given["created_at"] + 7200
        assert http.delete(f"/v1/files/{given['id']}").status_code == 200
    others = [alice.files.create(file=io.BytesIO(LINE), purpose="user_data") for _ in range(4)]
    pages = alice.files.list(limit=2)
    assert [file.id for file in pages][:5] == [*(f.id for f in reversed(others)), made.id]
    ids = [file.id for file in alice.files.list(purpose="user_data", order="asc", limit=3)]
    assert ids == [file.id for file in others]
    assert alice.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        alice.files.retrieve(made.id)
    assert made.id not in stored(running)


def test_files_and_batches_are_their_keys_own(running):
    alice, bob = client(running), client(running, BOB)
    made = alice.files.create(file=LINE, purpose="batch")
    batch = alice.batches.create(
        input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
    )
    for ask in (
        lambda: bob.files.retrieve(made.id),
        lambda: bob.files.content(made.id),
        lambda: bob.files.delete(made.id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(
            input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert not bob.files.list().data
    assert not bob.batches.list().data
    with pytest.raises(openai.BadRequestError):
        bob.files.list(after=made.id).data  # noqa: B018
    with pytest.raises(openai.ConflictError) as error:
        alice.files.delete(made.id)
    assert error.value.code == "file_in_use"


def test_a_batch_with_openais_client(running):
    alice = client(running)
    file = alice.files.create(file=LINE, purpose="batch")
    batch = alice.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="30m",  # type: ignore[arg-type]
        metadata={"job": "nightly"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert (batch.status, batch.metadata) == ("validating", {"job": "nightly"})
    assert batch.expires_at == batch.created_at + 1800
    with running.http(headers=bearing()) as http:
        conforms(http.get(f"/v1/batches/{batch.id}").json(), "Batch")
        page = http.get("/v1/batches", params={"limit": 1}).json()
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", batch.id, batch.id)
    cancelled = alice.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    assert cancelled.cancelling_at is not None
    assert alice.batches.list(limit=1).data[0] == cancelled


def test_the_predicted_end_is_a_header_and_may_be_a_reason_to_refuse(text, tmp_path):
    folder = tmp_path / "data"
    options: dict[str, Any] = {"disk_reserve_bytes": 0, "strict_windows": True}
    with (
        serving(ScriptedClient([700]), text, data_dir=str(folder), **options) as server,
        server.http() as http,
        closing(BatchStore(folder, StoreLimits(reserve_bytes=0))) as store,
    ):
        made = http.post("/v1/files", files={"file": LINE * 100, "purpose": (None, "batch")})
        body = {"input_file_id": made.json()["id"], "endpoint": "/v1/completions"}
        first = http.post("/v1/batches", json={**body, "completion_window": "10m"})
        assert "x-weft-predicted-end" not in first.headers
        assert first.json()["weft"]["predicted_from"] is None
        http.post(f"/v1/batches/{first.json()['id']}/cancel")
        store.update(first.json()["id"], status="cancelled")
        identity = server.service.builder.card.identity
        store.paces.add(identity, Observed(100, Demand(10, 10, 160)))  # the lines take 1000 s
        late = http.post("/v1/batches", json={**body, "completion_window": "15m"})
        assert late.status_code == 422
        error = late.json()["error"]
        assert (error["code"], error["param"]) == ("window_unattainable", "completion_window")
        assert "window of 15m" in error["message"]
        [only] = http.get("/v1/batches").json()["data"]
        assert only["id"] == first.json()["id"]
        good = http.post("/v1/batches", json={**body, "completion_window": "20m"})
        told = good.json()["weft"]
        assert int(good.headers["x-weft-predicted-end"]) == told["predicted_end_at"]
        assert told["predicted_end_at"] - good.json()["created_at"] == pytest.approx(1000, abs=2)
        assert (told["predicted_from"], told["warning"]) == ("rates", None)


KEYS = """keys:
  - {name: limited, key: key-one, classes: [batch, interactive], max_queued_batch_tokens: 300}
"""


def test_what_a_key_may_is_kept_with_its_batch(text, tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS)
    options: dict[str, Any] = {"data_dir": str(tmp_path / "data"), "disk_reserve_bytes": 0}
    with serving(ScriptedClient([700]), text, api_key_file=str(path), **options) as server:
        limited = client(server, "key-one")
        file = limited.files.create(file=LINE * 3, purpose="batch")
        batch = limited.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        with closing(BatchStore(tmp_path / "data", StoreLimits(reserve_bytes=0))) as store:
            record = store.reload(batch.id)
        assert (record.queued_limit, record.promotable) == (300, "interactive")
        assert record.account != b""
        assert record.queued_tokens == 3 * (1 + 16)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"completion_window": "1s"}, "completion_window"),
        ({"completion_window": "9m"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "day"}, "completion_window"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_batch_names_what_is_wrong(running, change, param):
    file = client(running).files.create(file=LINE, purpose="batch")
    right = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "10m"}
    with running.http(headers=bearing()) as http:
        answer = http.post("/v1/batches", json={**right, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"].startswith(param.partition(".")[0])


@pytest.mark.parametrize(
    ("fields", "file", "status", "param"),
    [
        ({}, LINE, 400, "purpose"),
        ({"purpose": "batch"}, None, 400, "file"),
        ({"purpose": "batches"}, LINE, 400, "purpose"),
        ({"purpose": "batch_output"}, LINE, 400, "purpose"),
        ({"purpose": "batch", "more": "x"}, LINE, 400, "more"),
        ({"purpose": "x" * 2000}, LINE, 400, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, LINE, 400, "expires_after"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at",
             "expires_after[seconds]": "60"},
            LINE, 400, "expires_after",
        ),
        ({"purpose": "batch", "expires_after": "{"}, LINE, 400, "expires_after"),
        (
            {"purpose": "batch", "expires_after": '{"anchor": "created_at", "seconds": 60}'},
            LINE, 400, "expires_after",
        ),
        (
            {"purpose": "batch", "expires_after": '{"anchor": "created_at", "seconds": 3600}',
             "expires_after[seconds]": "3600"},
            LINE, 400, "expires_after",
        ),
        ({"purpose": "batch"}, b"x" * (LIMIT + 1), 413, "file"),
        ({"purpose": "batch"}, b"x" * (LIMIT + 2**20), 413, "file"),
    ],
)  # fmt: skip
def test_a_wrong_form_names_what_is_wrong_and_leaves_nothing(running, fields, file, status, param):
    before = stored(running)
    files = {name: (None, value) for name, value in fields.items()}
    files |= {} if file is None else {"file": ("in.jsonl", file)}
    with running.http(headers=bearing()) as http:
        answer = http.post("/v1/files", files=files or {"x": b""})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"].startswith(param)
    assert stored(running) == before


def test_lists_refuse_what_they_do_not_know(running):
    with running.http(headers=bearing()) as http:
        for path in ("/v1/files", "/v1/batches"):
            for query in ({"limit": "0"}, {"limit": "x"}, {"limit": "20000"}, {"after": "none"}):
                assert http.get(path, params=query).status_code == 400, (path, query)
        assert http.get("/v1/files", params={"order": "up"}).status_code == 400


def test_pages_of_other_sites_upload_nothing(running):
    with running.http(headers=bearing(origin="https://evil.example")) as http:
        answer = http.post("/v1/files", files={"file": LINE, "purpose": (None, "batch")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_an_upload_that_breaks_off_leaves_nothing(running):
    before = stored(running)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; "
        f"boundary=xyz\r\nAuthorization: Bearer {ALICE}\r\nContent-Length: 100000\r\n\r\n"
        '--xyz\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    )
    with running.connect() as raw:
        raw.sendall(head.encode() + LINE * 10)
        eventually(lambda: len(stored(running)) > len(before))
    eventually(lambda: stored(running) == before)
    assert b"408" in running.talk(head.encode() + LINE * 10).split(b"\r\n")[0]
    assert stored(running) == before


def test_the_memory_of_an_upload_does_not_grow_with_it(text, tmp_path):
    size = 64 * 2**20
    process = psutil.Process()
    options: dict[str, Any] = {"data_dir": str(tmp_path), "disk_reserve_bytes": 0}
    with serving(ScriptedClient([700]), text, **options) as server, server.http() as http:
        most = [0]

        def form() -> Iterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
            yield b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
            for _ in range(size // 2**20):
                yield b"x" * 2**20
                most[0] = max(most[0], process.memory_info().rss)
            yield b"\r\n--x--\r\n"

        before = process.memory_info().rss
        content_type = {"content-type": "multipart/form-data; boundary=x"}
        answer = http.post("/v1/files", content=form(), headers=content_type)
        assert answer.json()["bytes"] == size
        assert most[0] - before < size // 2
        with http.stream("GET", f"/v1/files/{answer.json()['id']}/content") as content:
            assert sum(len(part) for part in content.iter_bytes()) == size


def test_a_folder_that_cannot_be_used_is_said(text):
    with serving(ScriptedClient([700]), text, data_dir="/proc/none") as server:
        with server.http() as http:
            answer = http.get("/v1/files")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


def test_a_full_disk_is_507_and_others_are_served(text, tmp_path):
    options: dict[str, Any] = {"data_dir": str(tmp_path), "disk_reserve_bytes": 2**62}
    with serving(ScriptedClient([700]), text, **options) as server, server.http() as http:
        answer: httpx.Response = http.post(
            "/v1/files", files={"file": LINE, "purpose": (None, "batch")}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
        assert http.get("/v1/files").json()["data"] == []
