"""OpenTelemetry traces: a span for each request, with the attributes of the GenAI conventions.

Nothing is done while a request runs: its span is made when it has ended, from the times that were
noted, and is sent by a thread of the exporter. ``opentelemetry`` is the optional extra ``otel``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from weft import __version__
from weft.core.errors import ConfigError
from weft.server.exchange import CLIENT_LEFT, Exchange

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

CLOSE_S = 3.0  # for the last spans to get out
EXPORT_S = 2.0

_OPERATIONS = {
    "completion": "text_completion",
    "embedding": "embeddings",
    "rerank": "rerank",
    "score": "score",
}


def make_exporter(endpoint: str) -> SpanExporter:
    """An exporter of spans to a collector; a URL without a path means ``/v1/traces``.

    Raises:
        ConfigError: it is no http(s) URL, or the extra is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError("otlp_endpoint must be an http or https URL.", param="otlp_endpoint")
    try:
        import opentelemetry.sdk.trace  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            "Traces need the extra packages of weft[otel]: pip install 'weft[otel]'.",
            param="otlp_endpoint",
        ) from None
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)


class Tracer:
    """Makes the spans."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "weft", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("weft", __version__)

    def tell(self, exchange: Exchange) -> None:
        """Make the span of a request that has been answered; looking at the server makes none."""
        if exchange.method != "POST":
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(exchange.headers)
        span = self._tracer.start_span(
            _name(exchange),
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_attributes(exchange),
            start_time=exchange.started_ns,
        )
        for name, seconds in _events(exchange):
            since_ns = int((seconds - exchange.started) * 1e9)
            span.add_event(name, timestamp=exchange.started_ns + since_ns)
        if exchange.error:
            span.set_status(Status(StatusCode.ERROR, exchange.error))
        span.end()

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _operation(exchange: Exchange) -> str:
    assert exchange.job is not None
    return _OPERATIONS.get(exchange.job.endpoint, "chat")


def _name(exchange: Exchange) -> str:
    if exchange.job is None:
        return exchange.method
    return f"{_operation(exchange)} {exchange.job.model}"


def _attributes(exchange: Exchange) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "http.response.status_code": exchange.status or CLIENT_LEFT,
        "weft.request_id": exchange.id,
    }
    if exchange.key is not None:
        attributes["weft.key"] = exchange.key.name
    if exchange.error:
        attributes["error.type"] = exchange.error
    job, timer = exchange.job, exchange.timer
    if job is not None and timer is not None:
        sampling = job.requests[0].sampling
        attributes |= {
            "gen_ai.operation.name": _operation(exchange),
            "gen_ai.provider.name": "weft",
            "gen_ai.request.model": job.model,
            "gen_ai.response.model": job.model,
            "gen_ai.response.id": job.id,
            "gen_ai.request.choice.count": job.n,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "weft.service_class": job.requests[0].service_class,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.usage.input_tokens": job.prompt_tokens,
            "gen_ai.usage.output_tokens": timer.output_tokens,
            "gen_ai.response.finish_reasons": tuple(timer.ends),
        }
    return {name: value for name, value in attributes.items() if value is not None}


def _events(exchange: Exchange) -> list[tuple[str, float]]:
    """(name, seconds on the monotonic clock) of what happened, where it did."""
    timer = exchange.timer
    if timer is None:
        return []
    times = (
        ("queue", timer.start_ns / 1e9),
        ("prefill", timer.scheduled_ns / 1e9),
        ("prefill_end", timer.prefilled_ns / 1e9),
        ("first_token", timer.first_token),
        ("end", timer.ended),
    )
    return [(name, seconds) for name, seconds in times if seconds]
