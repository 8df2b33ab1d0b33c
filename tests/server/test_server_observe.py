"""Observability: metrics by Prometheus's own parser, logs, request ids, traces, facts."""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedClient
from serving import serving

from live import eventually
from weft.core.errors import ConfigError, InvariantError, RequestCrashedError, WeftError
from weft.core.logs import JsonLines, TextLines, log_level
from weft.core.plan import Update
from weft.core.types import FinishReason
from weft.server.metric_families import ENGINE_METRICS
from weft.server.options import ServerOptions
from weft.server.probe import NoProbe

BODY = {"model": "builtin", "prompt": "a secret prompt", "max_tokens": 100}

# As dashboards and gateways know them.
KINDS = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
}


class TellingProbe(NoProbe):
    def gauges(self) -> dict[str, float]:
        return dict.fromkeys(ENGINE_METRICS, 5.0)


class TimedClient(ScriptedClient):
    """Says with each end that the sequence waited for 2 s, and that its prompt took 3 s."""

    def submit(self, requests: Any, sink: Any) -> None:
        import time

        began = time.monotonic_ns() + 2 * 10**9
        for request in requests:
            self.submitted.put(request)
            end = {"scheduled_ns": began, "prefilled_ns": began + 3 * 10**9}
            sink([Update(request.id, 700), Update(request.id, 701)])
            sink([Update(request.id, None, finish=FinishReason.STOP, **end)])


@pytest.mark.parametrize("both", [False, True])
def test_names_and_types_are_those_that_dashboards_know(text, both):
    with (
        serving(TimedClient(), text, TellingProbe(), vllm_metrics=both) as running,
        running.http() as http,
    ):
        assert http.post("/v1/completions", json={**BODY, "n": 2}).status_code == 200
        page = http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for prefix in ("weft", "vllm") if both else ("weft",):
        for name, kind in KINDS.items():
            family = families.pop(f"{prefix}:{name}")
            assert family.type == kind, name
            assert family.documentation
            for sample in family.samples:
                assert sample.labels["model_name"] == "builtin"
                assert ("service_class" in sample.labels) == (kind == "histogram")
                wanted = {"counter": ("_total",), "gauge": ("",)}.get(
                    kind, ("_bucket", "_sum", "_count")
                )
                assert sample.name.removeprefix(family.name) in wanted
    own = {"weft:request_rejected", "weft:slo_targets", "weft:slo_target_seconds"}
    own |= {"weft_slo_attainment"}
    own |= {f"weft:key_{name}" for name in ("requests", "prompt_tokens", "generation_tokens")}
    assert set(families) == own


def test_queue_and_prefill_times_are_the_engine_s(text):
    with serving(TimedClient(), text) as running, running.http() as http:
        http.post("/v1/completions", json=BODY)
        page = http.get("/metrics").text
    families = {f.name: f for f in text_string_to_metric_families(page)}
    for name, seconds in (("queue", 2), ("prefill", 3)):
        samples = {
            s.name: s.value
            for s in families[f"weft:request_{name}_time_seconds"].samples
            if s.labels["service_class"] == "interactive"
        }
        assert samples[f"weft:request_{name}_time_seconds_count"] == 1
        assert seconds - 1 < samples[f"weft:request_{name}_time_seconds_sum"] <= seconds + 1


def test_a_real_engine_tells_its_times(real):
    with real.http() as http:
        body = {"model": "builtin", "prompt": "def f(x):", "max_tokens": 3}
        assert http.post("/v1/completions", json=body).status_code == 200
        page = http.get("/metrics").text
    for name in ("queue", "prefill", "decode"):
        labels = '{model_name="builtin",service_class="interactive"}'
        count = re.search(rf"weft:request_{name}_time_seconds_count{labels} (\S+)", page)
        assert float(count[1]) >= 1


# -- request ids and logs -----------------------------------------------------------------------


@pytest.fixture
def lines():
    """What is logged, as JSON lines, while the test runs."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines("frontend"))
    root = logging.getLogger()
    root.addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    logging.getLogger("weft.requests").setLevel(logging.NOTSET)


@pytest.mark.parametrize("given", ["abc-1.2:3/x", "x" * 128])
def test_a_request_id_comes_back(scripted, given):
    with scripted.http() as http:
        for path in ("/health", "/nope", "/metrics"):
            answer = http.get(path, headers={"X-Request-Id": given})
            assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", [None, "", "x" * 129, "two words", 'quo"te', "tab\there", "é"])
def test_a_request_id_that_cannot_be_used_is_replaced(scripted, given):
    headers = {} if given is None else {b"x-request-id": given.encode()}
    with scripted.http() as http:
        first = http.get("/health", headers=headers).headers["x-request-id"]
        second = http.get("/health", headers=headers).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second


def test_one_line_for_each_request(text, lines):
    options = {"access_log": True, "api_key": ("the-key-itself",)}
    with serving(ScriptedClient([700, 701]), text, **options) as running, running.http() as http:
        headers = {"authorization": "Bearer the-key-itself", "x-request-id": "mine"}
        assert http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        assert http.post("/v1/completions", content=b"{", headers=headers).status_code == 400
        assert http.get("/metrics").status_code == 401
        eventually(lambda: len(lines()) >= 3)
    good, bad, stranger = lines()
    assert good["request_id"] == "mine"
    assert (good["key"], good["model"], good["status"]) == ("api_key-1", "builtin", 200)
    assert (good["output_tokens"], good["finish"]) == (2, "stop")
    assert good["prompt_tokens"] > 0
    assert 0 <= good["ttft_ms"] <= good["duration_ms"]
    assert (bad["status"], bad["error"]) == (400, "invalid_json")
    assert (stranger["status"], stranger["error"]) == (401, "invalid_api_key")
    everything = json.dumps(lines())
    assert "the-key-itself" not in everything
    assert "secret" not in everything


def test_clients_that_leave(text, lines):
    with serving(ScriptedClient(), text, access_log=True) as running:
        body = {**BODY, "stream": True}
        with running.ask(body) as raw:  # in the middle of a stream
            running.client.send(running.client.submitted.get(timeout=10), 700)
            answer = b""
            while b"data: " not in answer:
                answer += raw.recv(4096)
        eventually(lambda: len(lines()) == 1)
        with running.ask(body):  # before anything came
            running.client.submitted.get(timeout=10)
        eventually(lambda: len(lines()) == 2)
    first, second = lines()
    assert (first["status"], first["finish"], first["output_tokens"]) == (200, "cancelled", 1)
    assert (second["status"], second["finish"], second["output_tokens"]) == (499, "cancelled", 0)


def test_nothing_is_logged_unless_asked(text, lines):
    with serving(ScriptedClient([700]), text) as running, running.http() as http:
        http.post("/v1/completions", json=BODY)
    assert lines() == []


def test_bodies_are_logged_on_request_only(text, lines):
    with (
        serving(ScriptedClient([700]), text, log_requests=True) as running,
        running.http() as http,
    ):
        http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    body = next(line for line in lines() if line["message"] == "body")
    assert json.loads(body["body"]) == BODY
    assert body["request_id"] == "mine"


@pytest.mark.parametrize("error", [WeftError("/secret/path"), InvariantError("/secret/path")])
def test_a_failure_of_ours_shows_its_request_id_and_nothing_else(text, lines, error):
    class Broken(ScriptedClient):
        def submit(self, requests: Any, sink: Any) -> None:  # noqa: ARG002
            raise error

    with serving(Broken(), text) as running, running.http() as http:
        answer = http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert "mine" in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    (line,) = [line for line in lines() if "secret/path" in line["message"]]
    assert line["request_id"] == "mine"
    assert "trace" in line


def test_a_failure_of_one_request_alone_says_why(text):
    class Broken(ScriptedClient):
        def submit(self, requests: Any, sink: Any) -> None:  # noqa: ARG002
            raise RequestCrashedError("The engine has stopped 3 times.")

    with serving(Broken(), text) as running, running.http() as http:
        answer = http.post("/v1/completions", json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "request_crashed"
    assert "3 times" in answer.json()["error"]["message"]


def test_a_bug_shows_its_request_id_and_nothing_else(text, lines):
    class Broken(ScriptedClient):
        def submit(self, requests: Any, sink: Any) -> None:  # noqa: ARG002
            raise KeyError("/secret/path")

    with serving(Broken(), text) as running, running.http() as http:
        answer = http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert "mine" in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert any("secret/path" in line.get("trace", "") for line in lines())


def test_lines_cannot_be_forged():
    record = logging.LogRecord("weft", logging.INFO, "", 0, "a\nb %s", ("c\r\nd",), None)
    record.fields = {"path": "/x\n2026 forged", "plain": "ok", "quoted": 'a"b', "bell": "\x1b[2J"}
    line = TextLines("frontend").format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith('a\\nb c\\r\\nd path="/x\\n2026 forged" plain=ok quoted="a\\"b" '
                         'bell="\\u001b[2J"')  # fmt: skip
    assert json.loads(JsonLines("frontend").format(record))["path"] == "/x\n2026 forged"


def test_levels(monkeypatch):
    monkeypatch.setenv("WEFT_LOG_LEVEL", "Info")
    assert log_level() == "info"
    assert log_level("error") == "error"
    monkeypatch.setenv("WEFT_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="WEFT_LOG_LEVEL"):
        log_level()


# -- traces -------------------------------------------------------------------------------------


class Collector:
    """Takes traces as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                asked = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                collector.paths.append(self.path)
                for resource in asked.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def values_of(span: Any) -> dict[str, Any]:
    kinds = ("string_value", "int_value", "double_value", "array_value")
    return {
        a.key: next(getattr(a.value, kind) for kind in kinds if a.value.HasField(kind))
        for a in span.attributes
    }


def test_a_span_for_each_request(text):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Collector() as collector:
        with (
            serving(TimedClient(), text, otlp_endpoint=collector.url) as running,
            running.http() as http,
        ):
            body = {**BODY, "temperature": 0.5}
            http.post("/v1/completions", json=body, headers={"traceparent": parent})
            http.post("/v1/completions", content=b"{")
            http.get("/health")
        good, bad = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert set(collector.paths) == {"/v1/traces"}
    assert good.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert good.parent_span_id.hex() == "b7ad6b7169203331"
    assert good.name == "text_completion builtin"
    values = values_of(good)
    assert values["gen_ai.operation.name"] == "text_completion"
    assert values["gen_ai.request.model"] == "builtin"
    assert values["gen_ai.request.temperature"] == 0.5
    assert values["gen_ai.request.max_tokens"] == 100
    assert values["gen_ai.usage.output_tokens"] == 2
    assert values["gen_ai.usage.input_tokens"] > 0
    assert [v.string_value for v in values["gen_ai.response.finish_reasons"].values] == ["stop"]
    times = {event.name: event.time_unix_nano for event in good.events}
    assert set(times) == {"queue", "prefill", "prefill_end", "first_token", "end"}
    assert times["prefill_end"] - times["prefill"] == 3 * 10**9
    start, end = good.start_time_unix_nano, good.end_time_unix_nano
    assert start <= times["queue"] <= times["first_token"] <= times["end"] <= end
    assert values_of(bad)["error.type"] == "invalid_json"
    assert not bad.parent_span_id
    assert "secret" not in str(collector.spans)


def test_a_collector_that_is_not_there_stops_nothing(text):
    with (
        serving(ScriptedClient([700]), text, otlp_endpoint="http://127.0.0.1:9") as running,
        running.http() as http,
    ):
        assert http.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:4318", "http://", ""])
def test_collectors_that_make_no_sense(url):
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        ServerOptions(otlp_endpoint=url)


def test_traces_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"weft\[otel\]"):
        ServerOptions(otlp_endpoint="http://127.0.0.1:4318")


# -- facts --------------------------------------------------------------------------------------


def test_server_info_has_every_bound(scripted):
    with scripted.http() as http:
        info = http.get("/server_info").json()
    limits = info["limits"]
    for name in ("max_body_bytes", "max_header_bytes", "body_timeout_s", "max_queued_requests"):
        assert limits[name] == getattr(scripted.service.options, name)
    for name in ("n", "top_logprobs", "stop_strings", "logit_bias", "messages"):
        assert limits[name] > 0
    assert not {"api_key", "api_key_file", "tls_key", "uds"} & set(json.dumps(info).split('"'))
