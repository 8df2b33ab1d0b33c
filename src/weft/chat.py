"""``weft chat``: a terminal client of any OpenAI server that shows tokens as they come."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from weft.core.errors import ConfigError, WeftError

HELP = "/system TEXT sets the system message, /reset forgets the conversation, /quit leaves."
CONNECT_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Conversation:
    """The conversation so far."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]


class ChatClient:
    """Streams chat completions from a server.

    Args:
        url: of the server, with or without ``/v1``.
        settings: sampling settings sent with every request.
    """

    def __init__(
        self, url: str, model: str | None, api_key: str | None, settings: dict[str, Any]
    ) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        try:
            self._http = httpx.Client(headers=headers, timeout=timeout)
            httpx.URL(self._base)
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"'{url}' is not a server's address: {error}") from None
        self._settings = {"stream_options": {"include_usage": True}, **settings}
        self.tokens = 0  # of the last answer, as the server counts them
        self.model = model or self._first_model()

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Yield the answer piece by piece. Raises WeftError with the server's message."""
        self.tokens = 0
        body = {"model": self.model, "messages": messages, "stream": True, **self._settings}
        try:
            with self._http.stream("POST", f"{self._base}/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    raise WeftError(_message(answer))
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = json.loads(line[6:])
                        yield _content(chunk)
                        usage = chunk.get("usage") or {}
                        self.tokens = usage.get("completion_tokens", self.tokens)
        except httpx.HTTPError as error:
            raise WeftError(f"The connection to {self._base} failed: {error}") from None

    def _first_model(self) -> str:
        try:
            answer = self._http.get(f"{self._base}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WeftError(
                f"No server answers at {self._base} ({error}); start one with: weft serve"
            ) from None
        if answer.status_code != httpx.codes.OK:
            raise WeftError(_message(answer))
        return str(answer.json()["data"][0]["id"])


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {answer.status_code} {answer.reason_phrase}."


def _content(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise WeftError(str(chunk["error"]["message"]))
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def run_chat(client: ChatClient, system: str | None) -> int:
    """Read lines until the end of input; Ctrl-C ends the answer that is running."""
    conversation = Conversation(system)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() a history and editing

        print(f"{client.model}. {HELP}")
    while (line := _read(interactive)) is not None:
        if line in ("/quit", "/exit"):
            break
        if line.startswith("/"):
            _command(line, conversation)
        elif line:
            _answer(client, conversation, line)
    return 0


def _read(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return None


def _command(line: str, conversation: Conversation) -> None:
    name, _, rest = line.partition(" ")
    if name == "/system":
        conversation.system = rest.strip() or None
        print("The system message is set." if conversation.system else "No system message.")
    elif name == "/reset":
        conversation.turns.clear()
        print("A new conversation starts.")
    else:
        print(f"Unknown command {name}. {HELP}" if name != "/help" else HELP)


def _answer(client: ChatClient, conversation: Conversation, line: str) -> None:
    """Print the answer as it comes; a failed turn leaves the conversation as it was."""
    conversation.turns.append({"role": "user", "content": line})
    pieces: list[str] = []
    first = started = time.monotonic()
    try:
        for piece in client.stream(conversation.messages()):
            first = first if pieces else time.monotonic()
            pieces.append(piece)
            print(piece, end="", flush=True)
    except WeftError as error:
        print(f"\nweft: {error.message}", file=sys.stderr)
        conversation.turns.pop()
        return
    except KeyboardInterrupt:
        pass
    print()
    conversation.turns.append({"role": "assistant", "content": "".join(pieces)})
    seconds = max(time.monotonic() - started, 1e-9)  # of all: tokens come in groups
    tokens = client.tokens or len(pieces)  # an answer that was cut short brings no count
    print(
        f"[{tokens} tokens, first after {first - started:.2f} s, {tokens / seconds:.0f} tokens/s]",
        file=sys.stderr,
    )
