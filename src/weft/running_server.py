"""Pages of a running server, asked for by commands that must start fast."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, Request, build_opener

from weft.core.addresses import base_of
from weft.core.errors import ConfigError, WeftError
from weft.core.event_stream import EventSplitter

TIMEOUT_S = 10.0
READ_BYTES = 2**16
LABELS = {"service_class", "target", "outcome", "finished_reason"}  # that tell values apart
LOOM = "/v1/loom"

Metrics = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class ServerPage:
    """What a server answers."""

    status: int
    reason: str
    body: bytes

    def json(self) -> Any:
        """Raises ValueError."""
        return json.loads(self.body)

    @property
    def words(self) -> str:
        return f"{self.status} {self.reason}"


class _NoRedirects(HTTPRedirectHandler):
    """A redirect is an answer: to follow it might tell another server the key."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RunningServer:
    """Pages of a server.

    Args:
        url: with or without ``/v1``.

    Raises:
        ConfigError: the URL is not one of a server, or the key cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = base_of(url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("The key must be printable ASCII.", param="api_key")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._opener = build_opener(_NoRedirects)
        self._timeout_s = timeout_s

    def state(self) -> str:
        """Of the server: ``ready``, or why it is not. Raises WeftError if it is not weft's."""
        page = self._get("/ready")
        try:
            return str(page.json()["status"])
        except (ValueError, KeyError, TypeError):
            raise WeftError(
                f"What answers at {self.url} is not weft: it has no /ready ({page.words}). Give "
                "the address with --url."
            ) from None

    def info(self) -> dict[str, Any]:
        """What ``/server_info`` says. Raises WeftError without a right key."""
        page = self._get("/server_info")
        self._check(page, "/server_info")
        found: dict[str, Any] = page.json()
        return found

    def metrics(self, model: str) -> Metrics | None:
        """Values of the metrics of a model by name and labels; None if they are for other keys."""
        page = self._get("/metrics")
        if page.status != HTTPStatus.OK:
            return None
        return dict(_values(page.body.decode(errors="replace"), model))

    def loom(self, model: str | None = None) -> dict[str, Any]:
        """What ``/v1/loom`` shows. Raises WeftError as `looms`."""
        page = self._get(LOOM, once="1", **_named(model))
        self._check_loom(page)
        found: dict[str, Any] = page.json()
        return found

    def looms(self, model: str | None = None) -> Iterator[dict[str, Any]]:
        """The same again and again, until the server ends.

        Args:
            model: which one, where the server has several; the first by default.

        Raises:
            WeftError: nobody answers, or an older server, or none of weft; or the key is wrong, or
                it does not serve the model.
        """
        with self._asked(LOOM, _named(model)) as answer:
            if answer.status != HTTPStatus.OK:
                self._check_loom(ServerPage(answer.status, answer.reason, answer.read()))
            events = EventSplitter()
            while part := answer.read1(READ_BYTES):
                yield from map(json.loads, events.feed(part))

    def _check_loom(self, page: ServerPage) -> None:
        if page.status == HTTPStatus.NOT_FOUND and b"model_not_found" not in page.body:
            raise WeftError(
                f"The server at {self.url} has no {LOOM}: it is no weft, or an older one; "
                "weft status says which."
            )
        self._check(page, LOOM)

    def _check(self, page: ServerPage, path: str) -> None:
        """Raise WeftError unless it is what was asked for."""
        if page.status == HTTPStatus.UNAUTHORIZED:
            wrong = "refuses this key" if self._headers else "needs a key"
            raise WeftError(
                f"The server at {self.url} {wrong}; give its key with --api-key or OPENAI_API_KEY."
            )
        if page.status != HTTPStatus.OK:
            raise WeftError(
                f"The server at {self.url} answers {path} with {page.words}{_reason(page)}"
            )

    def _get(self, path: str, **query: str) -> ServerPage:
        with self._asked(path, query) as answer:
            return ServerPage(answer.status, answer.reason, answer.read())

    @contextlib.contextmanager
    def _asked(self, path: str, query: dict[str, str]) -> Iterator[HTTPResponse]:
        """An answer, of whatever status, while it is read. Raises WeftError for none."""
        asked = f"{self.url}{path}{'?' * bool(query)}{urlencode(query)}"
        try:
            with self._open(Request(asked, headers=self._headers)) as answer:
                yield answer
        except (OSError, HTTPException) as error:
            why = error.reason if isinstance(error, URLError) else error
            if isinstance(error, URLError) and not isinstance(why, (TimeoutError, ssl.SSLError)):
                raise WeftError(
                    f"No server answers at {self.url}; start one with: weft serve MODEL, or give "
                    "its address with --url."
                ) from None
            what = str(why) or type(why).__name__
            raise WeftError(f"The server at {self.url} does not answer: {what}.") from None

    def _open(self, request: Request) -> Any:
        """An ``HTTPResponse``; urllib's error for a status is one, too."""
        try:
            return self._opener.open(request, timeout=self._timeout_s)
        except HTTPError as error:
            return error


def _named(model: str | None) -> dict[str, str]:
    """The query that asks for a model."""
    return {} if model is None else {"model": model}


def _reason(page: ServerPage) -> str:
    """What an error of the API says, behind a colon; a full stop without one."""
    try:
        return f": {page.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return "."


def _values(page: str, model: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Values of a model: of the name without ``weft:``, and the labels that matter."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix("weft:")
            of_it = sample.labels.get("model_name", model) == model
            told_apart = name != sample.name and not {"le", "key"} & set(sample.labels)
            if of_it and told_apart:
                labels = (value for label, value in sample.labels.items() if label in LABELS)
                yield (name, *sorted(labels)), sample.value
