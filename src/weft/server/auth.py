"""API keys: who may ask, how much at once, and under which salt."""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.api.errors import error_object
from weft.core.errors import ConfigError, WeftError
from weft.server.errors import error_response, json_response
from weft.server.exchange import EXCHANGE, inner_path

logger = logging.getLogger("weft.server")

OPEN_PATHS = frozenset({"/health", "/ready"})
LOOK_EVERY_S = 1.0
MAX_KEY_CHARS = 1024
MAX_FILE_BYTES = 16 * 2**20

METRICS_PATH = "/metrics"

_NAMED = re.compile(r"([A-Za-z0-9_.@-]{1,64}):\s*(.*)")
_COMMENT = re.compile(r"\s#.*")


class KeyBusyError(WeftError):
    """A key has as many requests in progress as it may."""

    http_status = 429
    code = "too_many_requests"
    retry_after_s = 1


class MetricsNotAllowedError(WeftError):
    """Metrics are for other keys than this one."""

    http_status = 403
    code = "metrics_not_allowed"


@dataclass(slots=True)
class Key:
    """One key; the key itself is not kept.

    Attributes:
        name: what logs call it.
        digest: SHA-256 of the key.
        open: requests of it that are being answered.
    """

    name: str
    digest: bytes
    open: int = 0

    def salt(self, more: bytes) -> bytes:
        """A cache salt that no other key can have, whatever ``more`` a request gives."""
        return sha256(b"weft cache salt" + self.digest + more).digest()[:16]


class NoKeysError(ConfigError):
    """The API key file is not there, or has no keys."""


def read_keys(given: Seq[str], path: str | None) -> list[Key]:
    """The keys of the command line and of a file: one a line, ``key`` or ``name:key``.

    What comes after a space and ``#`` is a comment.

    Raises:
        NoKeysError: the file is not there, or has no keys.
        ConfigError: the file cannot be read, or a line is malformed.
    """
    keys = [_key(f"api_key-{i}", key, "api_key") for i, key in enumerate(given, 1)]
    if path is not None:
        found = [
            _key(*_named(line, number), f"line {number} of the API key file")
            for number, line in enumerate(_lines(path), 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not found:
            raise NoKeysError("The API key file has no keys.", param="api_key_file")
        keys += found
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError("An API key is given twice.", param="api_key_file")
    return keys


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MAX_FILE_BYTES).splitlines()
    except OSError as error:
        message = f"Cannot read the API key file '{path}': {error.strerror}."
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise (NoKeysError if gone else ConfigError)(message, param="api_key_file") from None
    except UnicodeDecodeError:
        message = f"The API key file '{path}' is not text."
        raise ConfigError(message, param="api_key_file") from None


def _named(line: str, number: int) -> tuple[str, str]:
    line = _COMMENT.sub("", line).strip()
    match = _NAMED.fullmatch(line)
    name, key = (match[1], match[2]) if match else (f"line-{number}", line)
    if any(letter.isspace() for letter in key):
        raise ConfigError(
            f"line {number} of the API key file: a key has no spaces; comments begin with '#'.",
            param="api_key_file",
        )
    return name, key


def _key(name: str, key: str, where: str) -> Key:
    wrong = not key.isascii() or not key.isprintable() or key != key.strip()
    if wrong or not 0 < len(key) <= MAX_KEY_CHARS:
        raise ConfigError(
            f"{where}: a key must be 1 to {MAX_KEY_CHARS} printable ASCII characters.",
            param="api_key_file" if "line" in where else "api_key",
        )
    return Key(name, sha256(key.encode()).digest())


class KeyRing:
    """The keys that are valid now. A changed file counts within a second, without a restart.

    A file that is gone or empty has no keys any more; one that is unreadable or malformed changes
    nothing. The log says so. Whoever starts a server checks the file by `read_keys` before: where
    it cannot be used from the beginning, because a process was restarted, it has no keys.
    """

    def __init__(self, given: Seq[str] = (), path: str | None = None) -> None:
        self._given = tuple(given)
        self._path = path
        self._stamp = self._look()
        self._next_look = 0.0
        self._keys = read_keys(given, None)
        self._read()

    @property
    def demanded(self) -> bool:
        """Whether requests need a key at all."""
        return bool(self._given) or self._path is not None

    def find(self, given: str) -> Key | None:
        """The key that was given. All digests are compared, each in constant time."""
        self.refresh()
        digest = sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def refresh(self) -> None:
        """Read the file again if it has changed; looks at most once a second."""
        now = time.monotonic()
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._read()
        logger.warning("The API key file has changed; %d keys are valid.", len(self._keys))

    def _read(self) -> None:
        try:
            fresh = read_keys(self._given, self._path)
        except NoKeysError as error:
            logger.warning("No key of a file is valid now. %s", error.message)
            fresh = read_keys(self._given, None)
        except ConfigError as error:
            logger.error("The API keys were not read; no key has changed. %s", error.message)
            return
        known = {key.digest: key for key in self._keys}
        for key in fresh:
            if key.digest in known:
                known[key.digest].name = key.name
        self._keys = [known.get(key.digest, key) for key in fresh]

    def _look(self) -> tuple[int, ...] | None:
        if self._path is None:
            return None
        with contextlib.suppress(OSError):
            stat = Path(self._path).stat()
            return stat.st_mtime_ns, stat.st_size, stat.st_ino
        return None


class RequireKey:
    """Lets requests pass that bear one of the keys; all, if there are no keys.

    Every path but ``OPEN_PATHS`` is guarded, also those that do not exist. The key comes as
    ``Authorization: Bearer KEY`` or as ``X-Api-Key: KEY``.

    Args:
        limit: requests with a body that one key may have in progress; None for any number.
        readers: names of the keys that may read the metrics; none for all.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        limit: int | None = None,
        readers: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._keys = keys
        self._limit = limit
        self._readers = readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = scope["type"] == "http"
        if not http or not self._keys.demanded or inner_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = _given_key(Headers(scope=scope))
        key = self._keys.find(given)
        if key is None:
            await _refusal(given)(scope, receive, send)
            return
        exchange = EXCHANGE.get()
        if exchange is not None:
            exchange.key = key
        if self._readers and key.name not in self._readers and inner_path(scope) == METRICS_PATH:
            message = "The metrics of this server are for other keys."
            await error_response(MetricsNotAllowedError(message))(scope, receive, send)
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._limit is not None and key.open >= self._limit:
            message = f"This API key has {key.open} requests in progress, which is its limit."
            await error_response(KeyBusyError(message))(scope, receive, send)
            return
        with _counted(key):
            await self._app(scope, receive, send)


def _given_key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "") if not scheme else ""


def _refusal(given: str) -> ASGIApp:
    message = (
        "Incorrect API key provided."
        if given
        else "No API key provided; send it as 'Authorization: Bearer KEY'."
    )
    exchange = EXCHANGE.get()
    if exchange is not None:
        exchange.error = "invalid_api_key"
    body = error_object(message, status=401, code="invalid_api_key")
    return json_response(body, 401, {"www-authenticate": "Bearer"})


@contextlib.contextmanager
def _counted(key: Key) -> Iterator[None]:
    key.open += 1
    try:
        yield
    finally:
        key.open -= 1
