"""Lines over HTTP to a scripted server: busy, unreachable, broken, slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from answering import request

from weft.batch import http
from weft.batch.http import HttpAsker, NoAnswerError
from weft.batch.ports import BatchLine, LineAnswer, NobodyAnswersError
from weft.core.errors import ConfigError

Said = tuple[int, dict[str, str], Any]  # status, headers, body: JSON, or bytes as they are
GOOD: Said = (200, {"X-Request-Id": "r7"}, {"ok": True})
MODELS: Said = (200, {}, {"data": []})


class Scripted:
    """A server that gives one answer of a script after the other, and the last one ever after.

    Attributes:
        bodies: that were sent to it, with the path.
        keys: the Authorization of every request.
    """

    def __init__(self, *script: Said | None) -> None:
        self.script = list(script)
        self.bodies: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []

    def next(self) -> Said | None:
        self.times.append(time.monotonic())
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


@contextlib.contextmanager
def running(scripted: Scripted, port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, said: Said | None) -> None:
            if said is None:  # hang up in the middle
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, headers, body = said
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            scripted.keys.append(self.headers.get("authorization"))
            self.answer(scripted.next())

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            scripted.bodies.append((self.path, json.loads(data)))
            scripted.keys.append(self.headers.get("authorization"))
            self.answer(scripted.next())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def line(**fields: Any) -> BatchLine:
    return msgspec.json.decode(json.dumps(request("a", **fields)), type=BatchLine)


def ask(
    url: str, key: str | None = None, asked: BatchLine | None = None, **options: Any
) -> LineAnswer:
    """Ask one line of a server."""

    async def go() -> LineAnswer:
        asker = HttpAsker(url, key, **options)
        try:
            return await asker.ask(1, asked or line())
        finally:
            await asker.aclose()

    return asyncio.run(go())


def check(url: str) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        asker = HttpAsker(url, None)
        try:
            return await asker.check()
        finally:
            await asker.aclose()

    return asyncio.run(go())


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch) -> None:
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.01)


def test_a_line_goes_as_it_is_and_the_answer_comes_back():
    scripted = Scripted(GOOD)
    with running(scripted) as url:
        answer = ask(f"{url}/v1/", "secret")
    assert answer == LineAnswer(200, "r7", b'{"ok": true}')
    body = {**request("a")["body"], "service_tier": "batch"}
    assert scripted.bodies == [("/v1/completions", body)]
    assert scripted.keys == ["Bearer secret"]


def test_a_tier_is_put_into_bodies_that_have_none():
    scripted = Scripted(GOOD)
    own = line(body={"prompt": "x", "service_tier": "priority"})
    vectors = line(url="/v1/embeddings", body={"input": "x"})
    ranked = line(body={"prompt": "x", "priority": 3})
    with running(scripted) as url:
        for asked in (line(), own, vectors, ranked):
            ask(url, asked=asked, service_tier="flex")
            ask(url, asked=asked)
    tiers = [body.get("service_tier") for _, body in scripted.bodies]
    assert tiers == ["flex", "batch", "priority", "priority", "flex", "batch", None, None]


class Choosy(Scripted):
    """Refuses some tiers at some endpoints, as servers do that do not know them."""

    def __init__(self, *known: str | None, status: int = 400) -> None:
        super().__init__(GOOD)
        self.known, self.status = known, status

    def next(self) -> Said | None:
        tier = self.bodies[-1][1].get("service_tier") if self.bodies else None
        if tier in self.known:
            return GOOD
        return self.status, {}, {"error": {"message": "no", "param": "service_tier"}}


@pytest.mark.parametrize("status", [400, 403, 422])
@pytest.mark.parametrize("weft", [True, False])
def test_a_server_that_refuses_the_class_of_batches_is_asked_without_it(status, weft, caplog):
    scripted = Choosy("flex", None, status=status)

    async def go(url: str) -> list[int]:
        asker = HttpAsker(url, None)
        if weft:
            asker._tiers = http.WEFT_TIERS
        vectors = line(url="/v1/embeddings", body={"input": "x"})
        answers = [await asker.ask(1, asked) for asked in (line(), line(), vectors)]
        await asker.aclose()
        return [answer.status for answer in answers]

    with running(scripted) as url:
        assert asyncio.run(go(url)) == [200] * 3
    then = "flex" if weft else None
    tiers = [body.get("service_tier") for _, body in scripted.bodies]
    assert tiers == ["batch", then, then, "batch", then]
    assert len(caplog.messages) == 2, "one for each endpoint"
    assert "completions does not take service_tier batch" in caplog.messages[0]


def test_a_tier_that_the_user_wants_is_not_left_out():
    scripted = Choosy(None)
    with running(scripted) as url:
        assert ask(url, service_tier="batch").status == 400
    assert len(scripted.bodies) == 1


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, None])
def test_what_may_pass_is_asked_again(status):
    bad = None if status is None else (status, {}, {"error": {"message": "later"}})
    scripted = Scripted(bad, bad, GOOD)
    with running(scripted) as url:
        assert ask(url).status == 200
    assert len(scripted.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_will_not_pass_is_not_asked_again(status):
    error = {"error": {"message": "no", "code": "x"}}
    scripted = Scripted((status, {}, error), GOOD)
    with running(scripted) as url:
        answer = ask(url)
    assert (answer.status, json.loads(answer.body)) == (status, error)


def test_failures_of_one_line_end_after_so_many_times():
    scripted = Scripted((500, {}, {"error": {"message": "broken"}}))
    with running(scripted) as url:
        answer = ask(url, retries=2)
    assert answer.status == 500
    assert len(scripted.bodies) == 3
    with running(Scripted(None)) as url, pytest.raises(NoAnswerError, match="failed 2 times"):
        ask(url, retries=1)


def test_an_answer_that_takes_too_long_is_one_of_them():
    started = threading.Event()

    class Slow(Scripted):
        def next(self) -> Said | None:
            started.wait(1)
            return super().next()

    with running(Slow(GOOD)) as url, pytest.raises(NoAnswerError, match="failed 1 times"):
        ask(url, retries=0, timeout_s=0.1)
    started.set()


def test_a_busy_server_is_waited_for_without_counting(caplog):
    """After 300 s of nothing but 429 the batch stopped, as it does for a lower class under load."""
    busy = (429, {}, {"error": {"message": "too many"}})
    scripted = Scripted(*[busy] * 8, GOOD)
    with running(scripted) as url:
        assert ask(url, retries=0, patience_s=0.05).status == 200
        assert len(scripted.bodies) == 9
        assert scripted.times[-1] - scripted.times[0] > 0.1
    assert "has taken no request for 0.05 s (429: too many); waiting on." in caplog.text


def test_a_server_that_is_away_is_not_waited_for_for_ever():
    unpaid = (429, {}, {"error": {"message": "pay first", "code": "insufficient_quota"}})
    away = (503, {}, {"error": {"message": "starting"}})
    for said, why in ((unpaid, "429: pay first"), (away, "503: starting")):
        with (
            running(Scripted(said)) as url,
            pytest.raises(NobodyAnswersError, match=rf"nothing for 0\.1 s \({why}\)"),
        ):
            ask(url, patience_s=0.1)


def test_lines_that_a_server_has_not_taken_are_counted():
    again: list[int] = []

    async def go(url: str) -> list[int]:
        asker, seen = HttpAsker(url, None), []
        asker.started = again.append
        asking = asyncio.create_task(asker.ask(7, line()))
        while not asking.done():
            await asyncio.sleep(0.005)
            seen.append(asker.waiting)
        await asker.aclose()
        return seen

    busy = (429, {}, {"error": {"message": "too many"}})
    with running(Scripted(*[busy] * 5, GOOD)) as url:
        seen = asyncio.run(go(url))
    assert max(seen) == 1
    assert seen[-1] == 0
    assert again == [7] * 5


def test_a_server_that_comes_back_is_found_again():
    with running(Scripted(GOOD)) as url:
        port = int(url.rsplit(":", 1)[1])
    back = threading.Event()

    def bring_back() -> None:
        time.sleep(0.1)
        with running(Scripted(GOOD), port):
            back.wait(10)

    thread = threading.Thread(target=bring_back)
    thread.start()
    assert ask(url, retries=0).status == 200
    back.set()
    thread.join()
    with pytest.raises(NobodyAnswersError, match="has answered nothing"):
        ask(url, patience_s=0.05)


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_server_says_when_to_come_again(form):
    class Wishing(Scripted):
        def next(self) -> Said | None:
            first = super().next() is None
            at = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
            wish = "1" if form == "seconds" else at
            return (503, {"Retry-After": wish}, {}) if first else GOOD

    scripted = Wishing(None, GOOD)
    with running(scripted) as url:
        ask(url)
    assert scripted.times[1] - scripted.times[0] >= 0.9
    assert http._retry_after_s("soon") is None
    assert http._retry_after_s("-3") is None


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ((200, {}, b"<html>hello"), 502, "answered 200, but not with JSON: <html>hello"),
        ((404, {}, b""), 404, "answered 404, but not with JSON"),
        ((301, {"Location": "/x"}, {}), 502, None),
    ],
)
def test_what_is_no_answer_becomes_an_error(said, status, words):
    with running(Scripted(said)) as url:
        answer = ask(url, retries=0)
    assert answer.status == status
    if words is not None:
        assert words in json.loads(answer.body)["error"]["message"]


def test_a_server_is_looked_at_before_anything_is_asked():
    engine = {"max_num_seqs": 7, "kv_blocks": {"full": 3}, "block_size": 16}
    with running(Scripted(MODELS, (200, {}, {"engine": engine}))) as url:
        assert check(url) == engine
    for said in ((404, {}, {}), (200, {}, b"x"), (200, {}, {"engine": None}), (200, {}, [])):
        with running(Scripted(MODELS, said)) as url:
            assert check(url) == {}
    with running(Scripted((404, {}, {}))) as url:  # not every server has a list of models
        assert check(url) == {}
    with pytest.raises(NobodyAnswersError, match="start one with: weft serve"):
        check(url)
    refusal = (401, {}, {"error": {"message": "no such key"}})
    with running(Scripted(refusal)) as url, pytest.raises(NobodyAnswersError, match="no such key"):
        check(url)
    moved = (308, {"Location": "https://elsewhere"}, b"")
    with running(Scripted(moved)) as url, pytest.raises(NobodyAnswersError, match="answered 308"):
        check(url)


@pytest.mark.parametrize("url", ["", "nowhere", "ftp://a", "http://", "http://a:b", "//a"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="is not a server's address"):
        HttpAsker(url, None)


def test_a_key_that_cannot_be_sent_is_refused():
    with pytest.raises(ConfigError, match="printable ASCII"):
        HttpAsker("http://a", "schlüssel\n")
