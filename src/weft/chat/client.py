"""Asks a server with OpenAI's API for its models and classes, and for answers as they are made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from weft.batch.http import CONNECT_TIMEOUT_S
from weft.core.addresses import base_of
from weft.core.errors import ConfigError, WeftError
from weft.core.event_stream import EventSplitter, LongLineError
from weft.core.inert import inert_line

PATIENCE_S = 10.0  # for an answer that needs no model
STREAM = "text/event-stream"


class ChatRefusedError(WeftError):
    """The server has refused a request, or there is none, or it was lost."""

    code = "chat_refused"


class NoServerError(ChatRefusedError):
    """Nobody answers at the address, or somebody who has no models."""

    code = "no_server"


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What one event of a stream brings.

    Attributes:
        calls: parts of tool calls, as OpenAI's API has them.
        finish: why the answer has ended; None before that.
        tokens: of the whole answer, as the server counts them.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    finish: str | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class UsableClass:
    """A service class of the server that the key may use."""

    name: str
    ttft_s: float | None
    tpot_s: float | None
    usual: bool


class ChatClient:
    """Asks one server.

    Args:
        url: of the server, with or without ``/v1``.
        uds: Unix socket on which it listens, if it is one of chat's own.

    Raises:
        ConfigError: the URL is not one of a server, or the key cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None, uds: str | None = None) -> None:
        self.url = base_of(url)
        self.name = self.url if uds is None else "the server that chat has started"
        self._keyed = bool(api_key)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=PATIENCE_S,
                transport=None if uds is None else httpx.HTTPTransport(uds=uds),
            )
            self._streams = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                transport=None if uds is None else httpx.AsyncHTTPTransport(uds=uds),
            )
        except ValueError:
            raise ConfigError("The key must be printable ASCII.", param="api_key") from None

    def close(self) -> None:
        """Close the connections that no answer uses."""
        self._http.close()

    async def aclose(self) -> None:
        """Close the connections of answers."""
        await self._streams.aclose()

    def ready(self) -> bool:
        """Whether a weft server accepts requests."""
        try:
            return self._http.get("/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def models(self, timeout_s: float | None = PATIENCE_S) -> list[str]:
        """Names of the models that it serves.

        Raises:
            NoServerError: nobody answers, or a server that has no models.
            ChatRefusedError: it refuses the key.
            TimeoutError: it takes longer.
        """
        try:
            answer = self._http.get("/v1/models", timeout=timeout_s)
        except httpx.ReadTimeout:
            raise TimeoutError from None
        except httpx.HTTPError as error:
            raise NoServerError(
                f"No server answers at {self.name} ({_why(error)}). Start one with weft serve, or "
                "let weft chat start one: leave --url out."
            ) from None
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise self._refusal(answer)
        try:
            names = [str(row["id"]) for row in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if not names:
            raise NoServerError(
                f"What answers at {self.name} does not list models as OpenAI's API does "
                f"({answer.status_code} {inert_line(answer.reason_phrase)})."
            )
        return names

    def classes(self) -> list[UsableClass]:
        """The service classes that the key may use, the first ones served first.

        Raises:
            ChatRefusedError: the server is not weft, or it does not answer.
        """
        try:
            told = self._http.get("/server_info").json()
            engine, classes = told["engine"], told["classes"]
            targets = engine.get("scheduling", {}).get("targets", {})
            order = {row["name"]: row["priority"] for row in engine.get("classes", ())}
            return [
                UsableClass(
                    str(name),
                    targets.get(name, {}).get("ttft_s"),
                    targets.get(name, {}).get("tpot_s"),
                    name == classes["default"],
                )
                for name in sorted(classes["usable"], key=lambda name: order.get(name, 0))
            ]
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ChatRefusedError(
                f"What answers at {self.name} says nothing of service classes: it is not weft, or "
                "an older version."
            ) from None

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[AnswerPiece]:
        """Yield an answer piece by piece; whoever closes the iterator ends the request.

        Raises:
            ChatRefusedError: the server refuses it, or the connection is lost.
        """
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._streams.stream("POST", "/v1/chat/completions", json=asked) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    raise self._refusal(answer)
                if not answer.headers.get("content-type", "").startswith(STREAM):
                    raise ChatRefusedError(f"{self.name} answers, but not with a stream.")
                events = EventSplitter()
                async for part in answer.aiter_bytes():
                    for data in events.feed(part):
                        if data == b"[DONE]":
                            return
                        yield _piece(data)
        except LongLineError as error:
            raise ChatRefusedError(error.message) from None
        except httpx.HTTPError as error:
            raise self._lost(error) from None

    def _lost(self, error: httpx.HTTPError) -> ChatRefusedError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return NoServerError(f"{self.name} does not answer any more ({_why(error)}).")
        return ChatRefusedError(f"The connection to {self.name} was lost ({_why(error)}).")

    def _refusal(self, answer: httpx.Response) -> ChatRefusedError:
        """What an answer other than 200 says, and what to do."""
        message, code = _error_of(answer)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            wrong = "refuses this key" if self._keyed else "needs a key"
            message = f"{self.name} {wrong}; give it with --api-key or OPENAI_API_KEY."
        elif answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            after = inert_line(answer.headers.get("retry-after", ""))
            message += f" Try again in {after} s." if after.isdecimal() else " Try again later."
        elif code == "context_length_exceeded":
            message += " /clear begins a new conversation."
        elif answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            message += " Try again in a moment."
        return ChatRefusedError(message)


def _error_of(answer: httpx.Response) -> tuple[str, str]:
    """Message and code of an error."""
    try:
        error = answer.json()["error"]
        return inert_line(error["message"]), str(error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        reason = inert_line(answer.reason_phrase)
        return f"The server answers {answer.status_code} {reason}.", ""


def _why(error: httpx.HTTPError) -> str:
    return inert_line(error) or type(error).__name__


def _piece(data: bytes) -> AnswerPiece:
    try:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise ChatRefusedError(inert_line(chunk["error"]["message"]))
        tokens = (chunk.get("usage") or {}).get("completion_tokens")
        choices = chunk.get("choices") or []
        delta = (choices[0].get("delta") or {}) if choices else {}
        return AnswerPiece(
            _text(delta.get("content")),
            _text(delta.get("reasoning_content") or delta.get("reasoning")),
            tuple(delta.get("tool_calls") or ()),
            choices[0].get("finish_reason") if choices else None,
            tokens if isinstance(tokens, int) else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ChatRefusedError("The server sends events that are no chunks of an answer.") from None


def _text(value: Any) -> str:
    """A text that can be encoded: JSON may have halves of surrogate pairs."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""
