"""Deadlines, the queue's bounds, keys from a file, HTTPS, and slow or too many connections."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trustme
from scripted import ScriptedClient
from serving import Asking, serving

from live import eventually
from weft.core.errors import ConfigError
from weft.core.types import FinishReason
from weft.server import keys as key_files
from weft.server.keys import KeyRing
from weft.server.listen import listen
from weft.server.options import ServerOptions
from weft.server.probe import EngineLoad, NoProbe
from weft.server.queue import EngineRates, QueueFullError, QueueLimit, Waiting
from weft.text.renderer import shared_renderer

BODY = {"model": "builtin", "prompt": "x", "max_tokens": 100}
SECOND = 10**9


def code_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return response.json()["error"]["code"]


# -- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["header", "body", "default"])
def test_a_deadline_before_the_first_token(text, way, stream):
    options = {"request_timeout_s": 0.2} if way == "default" else {}
    headers = {"X-Request-Timeout": "0.2"} if way == "header" else {}
    body = {**BODY, "stream": stream, **({"timeout": 0.2} if way == "body" else {})}
    with serving(ScriptedClient(), text, **options) as running, running.http() as http:
        answer = http.post("/v1/completions", json=body, headers=headers)
        assert code_of(answer, 504) == "deadline_exceeded"
        request = running.client.submitted.get(timeout=5)
        assert running.client.cancelled.get(timeout=5) == (request.id, FinishReason.CANCELLED)
        assert running.service.num_open == 0
        assert running.service.metrics.waiting == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_a_deadline_at_every_endpoint(scripted, path, body):
    headers = {"X-Request-Timeout": "0.2"}
    with scripted.http() as http:
        answer = http.post(path, json={"model": "builtin", **body}, headers=headers)
        assert answer.status_code == 504, answer.text
        wrong = {"X-Request-Timeout": "soon"}
        answer = http.post(path, json={"model": "builtin", **body}, headers=wrong)
        assert answer.status_code == 400, answer.text
    assert scripted.client.cancelled.get(timeout=5)[1] is FinishReason.CANCELLED
    assert scripted.service.num_open == 0


def test_a_deadline_in_the_middle_of_a_stream(scripted):
    with Asking(scripted, {**BODY, "stream": True, "timeout": 0.5}) as asking:
        scripted.client.send(scripted.client.submitted.get(timeout=10), 700)
        asking.join()
    assert json.loads(asking.events[-1])["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in asking.events
    assert scripted.client.cancelled.get(timeout=5)[1] is FinishReason.CANCELLED
    assert scripted.service.metrics.running == 0


def test_a_request_that_is_done_in_time_is_not_disturbed(text):
    with serving(ScriptedClient([700]), text) as running, running.http() as http:
        assert http.post("/v1/completions", json={**BODY, "timeout": 30}).status_code == 200
        eventually(lambda: running.service.num_open == 0)
        assert running.client.cancelled.empty()


@pytest.mark.parametrize(
    "wrong", ["0", "-1", "1e-300", "0.0009", "nan", "inf", "soon", "", "3601", "1e999"]
)
def test_deadlines_that_make_no_sense(scripted, wrong):
    with scripted.http() as http:
        answer = http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout": wrong})
        assert code_of(answer, 400) == "invalid_parameter"
        assert answer.json()["error"]["param"] == "X-Request-Timeout"
        if wrong in ("0", "-1", "1e-300", "0.0009", "3601"):
            answer = http.post("/v1/completions", json={**BODY, "timeout": float(wrong)})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "timeout"
    assert scripted.client.submitted.empty()


# -- the queue ----------------------------------------------------------------------------------


class SayingProbe(NoProbe):
    """An engine whose queue is what the test says."""

    said = EngineLoad()

    def load(self) -> EngineLoad:
        return self.said


def limit(probe: SayingProbe, **options: int) -> QueueLimit:
    return QueueLimit(ServerOptions(**options), probe)


def test_what_waits_is_what_the_engine_says_and_what_was_sent_since():
    probe = SayingProbe()
    queue = limit(probe, max_queued_requests=4)
    own = [Waiting(5 * SECOND, 1, 10), Waiting(3 * SECOND, 1, 10), Waiting(1 * SECOND, 1, 10)]
    probe.said = EngineLoad(updated_ns=2 * SECOND, waiting=1)
    queue.admit(1, 10, own)  # 1 said, 2 later ones, 1 new
    with pytest.raises(QueueFullError):
        queue.admit(2, 10, own)
    probe.said = EngineLoad(updated_ns=4 * SECOND, waiting=2)
    queue.admit(1, 10, own)
    probe.said = EngineLoad(updated_ns=0, free_rows=3)  # all three will start at once
    queue.admit(4, 10, own)
    probe.said = EngineLoad(updated_ns=9 * SECOND)
    queue.admit(64, 10, own)  # larger than the limit, but nothing waits


def test_queued_tokens():
    probe = SayingProbe()
    queue = limit(probe, max_queued_tokens=1000)
    probe.said = EngineLoad(updated_ns=SECOND, waiting=1, queued_tokens=600)
    queue.admit(1, 400, [])
    with pytest.raises(QueueFullError, match="prompt tokens"):
        queue.admit(1, 401, [])
    with pytest.raises(QueueFullError):
        queue.admit(1, 400, [Waiting(2 * SECOND, 1, 1)])


def test_retry_after_is_what_the_measured_rate_needs():
    probe = SayingProbe()
    queue = limit(probe, max_queued_requests=10, max_queued_tokens=1000)

    def refused(sequences: int, tokens: int) -> int | None:
        with pytest.raises(QueueFullError) as caught:
            queue.admit(sequences, tokens, [])
        return caught.value.retry_after_s

    full = EngineLoad(
        updated_ns=SECOND, waiting=10, queued_tokens=1000, started=100, prompt_tokens=5000
    )
    probe.said = full
    assert refused(1, 1) == 1  # nothing is known yet
    probe.said = replace(full, updated_ns=11 * SECOND, started=105, prompt_tokens=5500)
    assert refused(5, 1) == 10  # 0.5 sequences a second
    probe.said = replace(probe.said, waiting=1, queued_tokens=1000)
    assert refused(1, 200) == 4  # 50 tokens a second
    assert refused(1, 10**6) == 60  # never longer
    probe.said = replace(full, updated_ns=50 * SECOND, started=105, prompt_tokens=5500)
    probe.said = replace(probe.said, updated_ns=85 * SECOND)
    assert refused(5, 1) == 60
    probe.said = replace(full, updated_ns=86 * SECOND, engine=2, started=0, prompt_tokens=0)
    rates = EngineRates()
    for load in (full, probe.said):
        rates.sample(load)
    assert rates.tokens != rates.tokens  # another engine: unknown again


def test_a_full_queue_over_http(text):
    options: dict[str, Any] = {"max_queued_requests": 2}
    with serving(ScriptedClient(), text, SayingProbe(), **options) as running:
        streamed = {**BODY, "stream": True}
        with Asking(running, streamed), Asking(running, streamed), running.http() as http:
            requests = [running.client.submitted.get(timeout=10) for _ in range(2)]
            answer = http.post("/v1/completions", json=BODY)
            assert code_of(answer, 429) == "queue_full"
            assert answer.headers["retry-after"] == "1"
            running.client.send(requests[0], 700)  # it does not wait any more
            with Asking(running, streamed):
                requests.append(running.client.submitted.get(timeout=10))
                for request in requests:
                    running.client.send(request, 700, finish="stop")
        page = running.service.metrics.render().decode()
    assert 'weft:request_rejected_total{model_name="builtin",reason="queue_full"} 1.0' in page


# -- keys ---------------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_come_from_a_file_and_change_with_it(text, tmp_path, monkeypatch):
    monkeypatch.setattr(key_files, "LOOK_EVERY_S", 0.0)
    file = tmp_path / "keys"
    file.write_text(
        "# who may ask\nalice: first:with-colon # until May\n\n  second  \nbob: a#b\nfifth\t# x\n"
    )
    options = {"api_key_file": str(file), "api_key": ("third",)}
    with serving(ScriptedClient([700]), text, **options) as running, running.http() as http:

        def status(key: str) -> int:
            return http.get("/v1/models", headers=bearer(key)).status_code

        assert [status(k) for k in ("first:with-colon", "second", "third")] == [200, 200, 200]
        assert [status(k) for k in ("a#b", "fifth")] == [200, 200]
        lines = ("alice: first:with-colon", "# who may ask", "x", "first:with-colon # until May")
        assert [status(k) for k in lines] == [401] * 4
        assert http.get("/v1/models", headers={"x-api-key": "second"}).status_code == 200
        both = {"x-api-key": "second", **bearer("wrong")}
        assert http.get("/v1/models", headers=both).status_code == 401
        other = tmp_path / "other"
        other.write_text("fourth\n")
        os.replace(other, file)
        assert [status(k) for k in ("second", "third", "fourth")] == [401, 200, 200]
        file.write_text("two words and a tab\there\x07")
        assert status("fourth") == 200  # a malformed file changes nothing
        for empty in (b"", b"# nobody\n", None):
            file.write_text("fourth\n")
            assert [status(k) for k in ("third", "fourth")] == [200, 200]
            file.unlink() if empty is None else file.write_bytes(empty)
            assert [status(k) for k in ("third", "fourth")] == [200, 401]


def test_a_large_file_is_read_beside_the_event_loop(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(key_files, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(key_files, "INLINE_BYTES", 10)
    file = tmp_path / "keys"
    file.write_text("keys:\n  - {name: a, key: first}\n")
    ring = KeyRing((), str(file))
    assert ring.find("first") is not None
    file.write_text("keys:\n  - {name: b, key: second}\n")
    eventually(lambda: ring.find("second") is not None)
    assert ring.find("first") is None
    file.write_text("keys:\n  - {name: b, key: broken}}\n")
    eventually(lambda: ring.find("second") is not None and "no key has changed" in caplog.text)
    file.write_text("# nobody is left\n")
    eventually(lambda: ring.find("second") is None)


def test_a_file_without_keys_revokes_all(text, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(key_files, "LOOK_EVERY_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("only\n")
    with (
        serving(ScriptedClient(), text, api_key_file=str(file)) as running,
        running.http(headers=bearer("only")) as http,
    ):
        assert http.get("/v1/models").status_code == 200
        file.write_text("")
        eventually(lambda: "No key from a file is valid now" in caplog.text)  # before any request
        for path in ("/v1/models", "/metrics", "/nope"):
            assert http.get(path).status_code == 401
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 200


def test_a_process_that_restarts_finds_a_file_without_keys(text, tmp_path):
    """Those that were valid are not known any more, so none is."""
    file = tmp_path / "keys"
    for content in ("", "mal\x07formed"):
        file.write_text(content)
        with serving(ScriptedClient(), text, checked=False, api_key_file=str(file)) as running:
            for key in ("", "mal"):
                answer = httpx.get(f"{running.url}/metrics", headers={"x-api-key": key})
                assert answer.status_code == 401


@pytest.mark.parametrize(
    "content", [b"", b"# no\n", b"\xff\xfe\n", b"name:\n", b"a\na\n", b"a b\n", b"name: # a\n"]
)
def test_key_files_that_cannot_be_used(tmp_path, content):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError):
        listen(ServerOptions(port=0, api_key_file=str(file)))
    with pytest.raises(ConfigError, match="Cannot read"):
        listen(ServerOptions(port=0, api_key_file=str(tmp_path / "none")))


def test_one_key_cannot_take_every_place(text):
    options = {"api_key": ("one", "two"), "max_requests_per_key": 1}
    body = {**BODY, "stream": True}
    with serving(ScriptedClient(), text, **options) as running, running.http() as http:
        answers: list[int] = []

        def ask(key: str) -> None:
            answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=bearer(key))
            answers.append(answer.status_code)

        first = threading.Thread(target=ask, args=("one",))
        first.start()
        request = running.client.submitted.get(timeout=10)
        refused = http.post("/v1/completions", json=body, headers=bearer("one"))
        assert code_of(refused, 429) == "too_many_requests"
        assert "retry-after" in refused.headers
        assert http.get("/metrics", headers=bearer("one")).status_code == 200
        second = threading.Thread(target=ask, args=("two",))
        second.start()
        running.client.send(request, 700, finish="stop")
        running.client.send(running.client.submitted.get(timeout=10), 700, finish="stop")
        first.join(10)
        second.join(10)
        assert answers == [200, 200]
        third = threading.Thread(target=ask, args=("one",))  # there is room again
        third.start()
        running.client.send(running.client.submitted.get(timeout=10), 700, finish="stop")
        third.join(10)


@pytest.mark.parametrize("option", [{"max_requests_per_key": 1}, {"metrics_key": ("a",)}])
def test_limits_for_keys_need_keys(option):
    with pytest.raises(ConfigError, match="needs keys"):
        ServerOptions(**option)


def test_metrics_may_be_for_some_keys_only(text, tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice: one\nprometheus: two\n")
    options = {"api_key_file": str(file), "api_key": ("three",)}
    allowed = {"metrics_key": ("prometheus", "api_key-1")}
    for more, expected in (({}, [200, 200, 200]), (allowed, [403, 200, 200])):
        with (
            serving(ScriptedClient([700]), text, **options, **more) as running,
            running.http() as http,
        ):
            keys = ("one", "two", "three")
            answers = [http.get("/metrics", headers=bearer(key)) for key in keys]
            assert [answer.status_code for answer in answers] == expected
            assert http.get("/metrics").status_code == 401
            for path in ("/v1/models", "/server_info"):
                assert http.get(path, headers=bearer("one")).status_code == 200
    assert code_of(answers[0], 403) == "metrics_not_allowed"
    assert answers[0].json()["error"]["type"] == "permission_error"
    with pytest.raises(ConfigError, match="no key has the name 'prom'"):
        listen(ServerOptions(port=0, metrics_key=("prom",), **options))


def test_every_key_has_its_own_salt(text):
    with serving(ScriptedClient([700]), text, api_key=("one", "two")) as running:
        salts = [salt_of(running, key, salt) for key in ("one", "two") for salt in ("", "s")]
        assert len(set(salts)) == 4
        assert all(len(salt) == 16 for salt in salts)
        assert salt_of(running, "one", "s") == salts[1]
        # No salt that a client can send makes another key's.
        assert salt_of(running, "two", salts[0].hex()) not in salts
    with serving(ScriptedClient([700]), text, api_key=("one", "two"), key_salt=False) as running:
        assert salt_of(running, "one", "s") == salt_of(running, "two", "s") == b"s"


def salt_of(running: Any, key: str, salt: str) -> bytes:
    with running.http() as http:
        body = {**BODY, "cache_salt": salt}
        answer = http.post("/v1/completions", json=body, headers=bearer(key))
        assert answer.status_code == 200, answer.text
    return bytes(running.client.submitted.get(timeout=10).cache_salt)


def test_a_key_is_compared_with_every_other(monkeypatch):
    compared = []

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(key_files.hmac, "compare_digest", spy)
    ring = KeyRing(("a", "b", "c"))
    for given in ("a", "c", "none"):
        compared.clear()
        assert (ring.find(given) is None) == (given == "none")
        assert len(compared) == 3
        assert all(len(left) == len(right) == 32 for left, right in compared)


# -- HTTPS --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return authority, str(cert), str(key)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_https(text, certificate):
    authority, cert, key = certificate
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    files = {"tls_cert": cert, "tls_key": key, "max_header_bytes": 4096}
    with serving(ScriptedClient([700, 701]), text, **files) as running:
        url = running.url.replace("http://", "https://")
        with httpx.Client(base_url=url, verify=trusting) as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
            streamed = http.post("/v1/completions", json={**BODY, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert http.get("/health", headers={"long": "x" * 9000}).status_code == 431
        with pytest.raises(httpx.ConnectError), httpx.Client() as stranger:
            stranger.get(f"{url}/health")  # does not trust the authority
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{running.url}/health")  # no plain HTTP
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(old)
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", verify=old)


def test_files_for_https_that_cannot_be_used(certificate, tmp_path):
    _, cert, key = certificate
    other = tmp_path / "other.pem"
    other.write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    for pair in ((cert, str(other)), (str(rubbish), key), (str(tmp_path / "none"), key)):
        with pytest.raises(ConfigError, match="TLS cannot use"):
            listen(ServerOptions(port=0, tls_cert=pair[0], tls_key=pair[1]))
    with pytest.raises(ConfigError, match="go together"):
        ServerOptions(tls_cert=cert)


# -- connections --------------------------------------------------------------------------------


def test_a_body_that_does_not_come(text):
    with serving(ScriptedClient(), text, body_timeout_s=0.2) as running:
        answer = running.talk(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer


def test_a_process_may_open_as_many_files_as_the_system_allows():
    script = (
        "import resource as r; from weft.core.process import raise_file_limit\n"
        "most = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, most))\n"
        "raise_file_limit(); assert r.getrlimit(r.RLIMIT_NOFILE) == (most, most)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"max_tokens": 1}),
        ("/v1/messages", {"max_tokens": 1}),
        ("/v1/messages/count_tokens", {}),
        ("/tokenize", {}),
        ("/api/chat", {"stream": False, "options": {"num_predict": 1}}),
    ],
)
def test_nothing_but_chats_waits_for_the_renderer(real, path, more):
    body = {"model": "builtin", "messages": [{"role": "user", "content": "hi"}], **more}
    renderer = shared_renderer()
    renderer.start()
    stopped = renderer._process.pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        with real.http() as http, ThreadPoolExecutor(1) as pool:
            chat = pool.submit(http.post, path, json=body)
            eventually(renderer._lock.locked)
            assert http.get("/health").status_code == 200
            text = {"model": "builtin", "prompt": "x", "max_tokens": 1}
            assert http.post("/v1/completions", json=text).status_code == 200
            assert not chat.done()
            os.kill(stopped, signal.SIGCONT)
            assert chat.result(30).status_code == 200
    finally:
        if renderer._process is not None and renderer._process.pid == stopped:
            os.kill(stopped, signal.SIGCONT)
