"""Classes, limits and usage of API keys over HTTP, with several request planes."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedClient
from serving import Running, serving

from live import eventually
from weft.core.errors import ConfigError
from weft.core.types import ServiceClass
from weft.server import attainment, metrics
from weft.server import keys as key_ring
from weft.server.accounts import Accounts
from weft.server.counts import Use
from weft.server.listen import listen
from weft.server.metrics import Metrics
from weft.server.options import ServerOptions
from weft.server.probe import NoProbe
from weft.server.quota_board import QuotaBoard, create_quota_board

KEYS = """keys:
  - {name: boss, key: boss}
  - {name: nightly, key: nightly, classes: [flex, batch], default_class: batch}
  - {name: slow, key: slow, requests_per_minute: 3}
  - {name: short, key: short, tokens_per_minute: 100}
  - {name: narrow, key: narrow, max_concurrent_requests: 2}
  - {name: rotated, key: [old, new], requests_per_minute: 2}
"""
BODY = {"model": "builtin", "prompt": [5, 6, 7], "max_tokens": 10}
CHAT = {"model": "builtin", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    return str(file)


@contextlib.contextmanager
def planes(text: Any, count: int, **options: Any) -> Iterator[list[Running]]:
    """Several servers that share quotas, as request planes do."""
    memory = create_quota_board(count)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, memory)
        yield [
            stack.enter_context(
                serving(
                    ScriptedClient([700, 701]),
                    text,
                    quotas=QuotaBoard(memory, number),
                    **options,
                )
            )
            for number in range(count)
        ]


def ask(
    running: Running,
    key: str,
    body: Any = BODY,
    path: str = "/v1/completions",
    **headers: str,
) -> httpx.Response:
    url = running.url + path
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(url, json=body, headers={**bearer(key), **named}, timeout=30)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# -- classes --------------------------------------------------------------------------------------


def test_every_class_can_be_asked_for_and_the_answer_says_which_it_was(text):
    with serving(ScriptedClient([700]), text) as running, running.http() as http:
        for headers, tier, used, shown in (
            ({}, None, "interactive", None),
            ({}, "batch", "batch", "batch"),
            ({"x-weft-class": "batch"}, None, "batch", "batch"),
            ({"x-weft-class": "batch"}, "auto", "batch", "batch"),
            ({"x-weft-class": "interactive"}, None, "interactive", "default"),
        ):
            body = {**BODY, "service_tier": tier}
            answer = http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-weft-class"] == used
            assert answer.json().get("service_tier") == shown
            assert running.client.submitted.get(timeout=10).service_class == used
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/responses", {"model": "builtin", "input": "x", "store": False}),
            ("/v1/messages", {**CHAT, "max_tokens": 4}),
            ("/api/chat", {**CHAT, "max_tokens": None, "stream": False}),
            ("/api/generate", {"model": "builtin", "prompt": "x"}),
        ):
            body = {name: value for name, value in body.items() if value is not None}
            if path == "/api/chat":
                body.pop("max_tokens", None)
            answer = http.post(path, json=body, headers={"x-weft-class": "batch"})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-weft-class"] == "batch"
            assert running.client.submitted.get(timeout=10).service_class == "batch"
        both = {**BODY, "service_tier": "flex"}
        wrong = http.post("/v1/completions", json=both, headers={"x-weft-class": "batch"})
        assert error_of(wrong, 400)["param"] == "x-weft-class"


def test_a_key_has_its_classes(text, key_file):
    with serving(ScriptedClient([700]), text, api_key_file=key_file) as running:
        assert ask(running, "nightly").json()["service_tier"] == "batch"
        assert ask(running, "nightly", {**BODY, "service_tier": "flex"}).status_code == 200
        assert ask(running, "boss", {**BODY, "service_tier": "priority"}).status_code == 200
        for more in ({"service_tier": "priority"}, {"service_tier": "default"}):
            error = error_of(ask(running, "nightly", {**BODY, **more}), 403)
            assert error["code"] == "service_class_not_allowed"
            assert error["type"] == "permission_error"
            assert error["param"] == "service_tier"
            assert "only 'flex', 'batch'" in error["message"]
        error = error_of(ask(running, "nightly", x_weft_class="interactive"), 403)
        assert error["param"] == "x-weft-class"
        message = {**CHAT, "stream": True}
        answer = ask(running, "nightly", message, "/v1/messages", x_weft_class="priority")
        assert answer.json()["error"]["type"] == "permission_error"
        answer = ask(running, "nightly", CHAT, "/v1/messages")
        assert answer.json()["usage"]["service_tier"] == "batch"


def test_a_changed_file_changes_classes_and_limits(text, key_file, monkeypatch):
    monkeypatch.setattr(key_ring, "LOOK_EVERY_S", 0.0)
    with serving(ScriptedClient([700]), text, api_key_file=key_file) as running:
        assert ask(running, "boss").status_code == 200
        Path(key_file).write_text(KEYS.replace("key: boss", "key: boss, classes: [flex]"))
        assert ask(running, "boss").json()["service_tier"] == "flex"
        Path(key_file).write_text(KEYS.replace("key: boss", "key: boss, classes: [silver]"))
        assert ask(running, "boss").json()["service_tier"] == "flex"  # malformed: no change
        Path(key_file).write_text(KEYS.replace("key: boss", "key: boss, requests_per_minute: 1"))
        assert [ask(running, "boss").status_code for _ in range(2)] == [200, 429]


def test_files_that_name_other_classes_are_refused_at_the_start(key_file):
    Path(key_file).write_text(KEYS.replace("[flex, batch]", "[flex, batch, silver]"))
    options = ServerOptions(port=0, api_key_file=key_file)
    with pytest.raises(ConfigError, match="'silver' is no service class"):
        listen(options, ["interactive", "flex", "batch"])


# -- rates ----------------------------------------------------------------------------------------


def test_requests_a_minute_hold_over_planes(text, key_file):
    with planes(text, 2, api_key_file=key_file) as (one, two):
        answers = [ask(plane, "slow") for plane in (one, two, one, two)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert left == ["2", "1", "0", "0"]
        assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"3"}
        assert answers[0].headers["x-ratelimit-reset-requests"] == "20s"
        assert "x-ratelimit-limit-tokens" not in answers[0].headers
        error = error_of(answers[3], 429)
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(answers[3].headers["retry-after"]) <= 20
        assert ask(two, "boss").status_code == 200
        assert "x-ratelimit-limit-requests" not in ask(two, "boss").headers
        assert [ask(one, key).status_code for key in ("old", "new", "old")] == [200, 200, 429]
        streamed = ask(one, "slow", {**CHAT, "stream": True}, "/v1/messages")
        assert streamed.json()["error"]["type"] == "rate_limit_error"
        assert "retry-after" in streamed.headers


def test_what_is_wrong_or_not_taken_is_not_charged(text, key_file):
    with serving(ScriptedClient([700]), text, api_key_file=key_file) as running:
        for body in ({**BODY, "top_p": 7}, {**BODY, "model": "other"}):
            assert ask(running, "slow", body).status_code in (400, 404)
        late = ask(running, "slow", x_request_timeout="0.001")
        taken = 1 if late.status_code == 200 else 0
        left = int(ask(running, "slow").headers["x-ratelimit-remaining-requests"])
        assert left in (2 - taken, 2)


def test_tokens_are_charged_as_the_most_and_corrected_at_the_end(text, key_file):
    """Limit 100: prompts of 3 tokens, 2 tokens of output for 10 that are asked for."""
    with planes(text, 2, api_key_file=key_file) as (one, two):
        first = ask(one, "short")
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        assert first.headers["x-ratelimit-remaining-tokens"] == "87"
        assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
        second = ask(two, "short", {**BODY, "n": 2})
        left = int(second.headers["x-ratelimit-remaining-tokens"])
        assert 100 - 5 - 23 <= left <= 100 - 5 - 23 + 10  # refilled: under 2 a second
        error = error_of(ask(one, "short", {**BODY, "max_tokens": 98}), 429)
        assert "tokens a minute" in error["message"]
        too_large = ask(one, "short", {**BODY, "n": 10})
        assert "alone may need 103" in error_of(too_large, 429)["message"]
        assert "retry-after" not in too_large.headers


def test_an_output_without_a_limit_is_charged_when_it_has_ended(text, key_file):
    body = {"model": "builtin", "messages": [{"role": "user", "content": "x"}], "stream": True}
    client = ScriptedClient([700] * 90)
    with serving(client, text, api_key_file=key_file) as running:
        answer = ask(running, "short", body, "/v1/chat/completions")
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 50
        eventually(lambda: ask(running, "short").status_code == 429)


def test_concurrent_requests_hold_over_planes(text, key_file):
    with planes(text, 2, api_key_file=key_file) as running:
        for plane in running:
            plane.client.answer = None
        one, two = running
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda plane=plane: answers.append(ask(plane, "narrow")))
            for plane in running
        ]
        for thread in threads:
            thread.start()
        requests = [plane.client.submitted.get(timeout=10) for plane in running]
        error = error_of(ask(two, "narrow"), 429)
        assert error["code"] == "too_many_requests"
        assert "2 requests in progress" in error["message"]
        one.client.send(requests[0], 700, finish="stop")
        threads[0].join(10)
        again = threading.Thread(target=lambda: answers.append(ask(two, "narrow")))
        again.start()
        two.client.send(two.client.submitted.get(timeout=10), 700, finish="stop")
        two.client.send(requests[1], 700, finish="stop")
        for thread in (again, *threads):
            thread.join(10)
        assert [answer.status_code for answer in answers] == [200] * 3


def test_a_client_that_leaves_pays_what_was_computed(text, key_file):
    client = ScriptedClient()
    with serving(client, text, api_key_file=key_file) as running:
        data = json.dumps({**BODY, "max_tokens": 90, "stream": True}).encode()
        with running.connect() as raw:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: short\r\n"
            raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            client.send(client.submitted.get(timeout=10), 700)
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
        client.cancelled.get(timeout=10)
        client.answer = [700]
        eventually(lambda: ask(running, "short").status_code == 200)
        left = int(ask(running, "short").headers["x-ratelimit-remaining-tokens"])
        assert left > 60


def test_a_request_that_another_process_has_charged_is_not_charged_again():
    board = QuotaBoard.alone()
    bill = Accounts(board).resumed("alice")
    assert (bill.payer, bill.begin(50)) == ("alice", Use())
    bill.spend(10)
    bill.settle()
    fresh = Accounts(board).bill(None)
    assert [fresh.begin(50), fresh.begin(7)] == [Use(1, 50), Use(0, 7)]


# -- usage ----------------------------------------------------------------------------------------


def usage_of(running: Running, **query: Any) -> list[dict[str, Any]]:
    answer = httpx.get(f"{running.url}/v1/usage", headers=bearer("boss"), params=query)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


def test_usage_is_kept_by_key_class_and_day_over_planes_and_restarts(text, key_file, tmp_path):
    today = datetime.now(UTC).date().isoformat()
    options = {"api_key_file": key_file, "admin_key": ("boss",)}
    options["usage_db"] = str(tmp_path / "usage.db")
    for times in (1, 2):
        with planes(text, 2, **options) as (one, two):
            ask(one, "nightly", {**BODY, "n": 2})
            ask(two, "nightly")
            ask(two, "nightly", {**BODY, "service_tier": "flex"})
            ask(two, "boss", {"model": "builtin", "input": ["a", "b"]}, "/v1/embeddings")
            eventually(lambda n=times: sum(r["requests"] for r in usage_of(one)) >= 3 * n)
            [row] = usage_of(one, key="nightly", service_class="batch")
            assert row == {
                "id": f"{today}/nightly/batch",
                "object": "usage",
                "date": today,
                "key": "nightly",
                "service_class": "batch",
                "requests": 2 * times,
                "prompt_tokens": 6 * times,
                "completion_tokens": 6 * times,
                "total_tokens": 12 * times,
            }
            assert usage_of(two, start_date="2000-01-01", end_date="2000-01-31") == []
            rows = usage_of(two, start_date=today)
            pages, after = [], None
            while not pages or after:
                query = {"limit": 1} | ({"after": after} if after else {})
                found = httpx.get(
                    f"{one.url}/v1/usage", headers=bearer("boss"), params=query
                ).json()
                pages += found["data"]
                after = found["last_id"] if found["has_more"] else None
            assert pages == rows
            page = httpx.get(f"{two.url}/metrics", headers=bearer("boss")).text
    labels = 'key="nightly",model_name="builtin",service_class="flex"'
    assert f"weft:key_requests_total{{{labels}}} 1.0" in page
    assert f"weft:key_generation_tokens_total{{{labels}}} 2.0" in page


def test_only_admins_read_usage(text, key_file):
    options = {"api_key_file": key_file}
    with serving(ScriptedClient([700]), text, **options) as running:
        for key in ("boss", "slow"):
            answer = httpx.get(f"{running.url}/v1/usage", headers=bearer(key))
            assert error_of(answer, 403)["code"] == "usage_not_allowed"
            ask(running, key)
            page = httpx.get(f"{running.url}/metrics", headers=bearer(key)).text
            assert "weft:request_success_total" in page
            assert "weft:key_" not in page
    with serving(ScriptedClient([700]), text, admin_key=("boss",), **options) as running:
        assert usage_of(running) == []
        for key, status in (("slow", 403), ("none", 401)):
            answer = httpx.get(f"{running.url}/v1/usage", headers=bearer(key))
            assert answer.status_code == status
    with pytest.raises(ConfigError, match="no key has the name 'chef'"):
        listen(ServerOptions(port=0, admin_key=("chef",), **options))
    with serving(ScriptedClient([700]), text) as running, running.http() as http:
        http.post("/v1/completions", json=BODY)  # without keys nobody is anybody else
        eventually(lambda: http.get("/v1/usage").json()["data"] != [])
        [row] = http.get("/v1/usage").json()["data"]
        assert (row["key"], row["requests"]) == (None, 1)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"start_date": "yesterday"}, "start_date"),
        ({"end_date": "2026-13-01"}, "end_date"),
        ({"start_date": "2026-02-02", "end_date": "2026-02-01"}, "end_date"),
        ({"limit": "0"}, "limit"),
        ({"limit": "1e9"}, "limit"),
        ({"after": "x"}, "after"),
        ({"keys": "x"}, "keys"),
    ],
)
def test_queries_that_make_no_sense(scripted, query, param):
    with scripted.http() as http:
        answer = http.get("/v1/usage", params=query)
    assert error_of(answer, 400)["param"] == param


def test_a_file_of_something_else_is_not_touched(tmp_path):
    file = tmp_path / "other.db"
    file.write_bytes(b"not a data base" * 100)
    with pytest.raises(ConfigError, match="Cannot open the usage"):
        listen(ServerOptions(port=0, usage_db=str(file)))
    assert file.read_bytes() == b"not a data base" * 100


# -- attainment -----------------------------------------------------------------------------------


def attained(found: Metrics) -> dict[str, float]:
    families = {f.name: f for f in text_string_to_metric_families(found.render().decode())}
    samples = families["weft_slo_attainment"].samples
    return {sample.labels["service_class"]: sample.value for sample in samples}


def test_attainment_is_the_share_of_the_last_minutes(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(attainment.time, "monotonic", lambda: now)
    table = (ServiceClass("urgent", 0, ttft_s=1.0), ServiceClass("batch", 1))
    found = metrics.Metrics("m", NoProbe(), classes=table)
    found.show()
    assert attained(found) == {}
    for took in (0.5, 0.5, 0.5, 2.0):
        found.judge("urgent", took, 0.0)
    assert attained(found) == {"urgent": 0.75}
    for _ in range(40):
        now += 10
        found.show()
    assert attained(found) == {}
    found.judge("urgent", 2.0, 0.0)
    found.judge("batch", 2.0, 0.0)
    assert attained(found) == {"urgent": 0.0}
