"""API keys: read from settings and from a file that may change, and found in constant time."""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from weft.core.errors import ConfigError
from weft.core.salt import key_salt

logger = logging.getLogger("weft.server")

LOOK_EVERY_S = 1.0
MAX_KEY_CHARS = 1024
MAX_FILE_BYTES = 16 * 2**20
_NAMED = re.compile(r"([A-Za-z0-9_.@-]{1,64}):\s*(.*)")
_COMMENT = re.compile(r"\s#.*")


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
        return key_salt(self.digest, more)


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
