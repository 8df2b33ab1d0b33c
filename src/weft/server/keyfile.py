"""The file of API keys: one key a line, or YAML with classes and limits of each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from weft.api.classes import USUAL
from weft.core.errors import ConfigError, ParameterError, suggest
from weft.core.salt import key_salt
from weft.core.settings import settings_of, shortened
from weft.server.quota import NO_LIMITS, Quota

MAX_KEY_CHARS = 1024
MAX_FILE_BYTES = 16 * 2**20
MAX_KEYS = 16_384

_NAME = r"[A-Za-z0-9_.@-]{1,64}"
_NAMED = re.compile(rf"({_NAME}):\s*(.*)")
_COMMENT = re.compile(r"\s#.*")
_YAML = re.compile(r"keys\s*:\s*(#.*)?")  # its first line, which no key is
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = tuple(settings_of(Quota))
_FIELDS = ("name", "key", "sha256", "classes", "default_class", *_LIMITS)


@dataclass(frozen=True, slots=True)
class Key:
    """One key, and what it may do; the key itself is not kept.

    Attributes:
        name: what logs, metrics and the list of usage call it.
        digest: SHA-256 of the key.
        classes: service classes that it may use; empty for all.
        default_class: the class of requests that ask for none.
        quota: its limits.
        account: under what its use is counted; keys of one entry share it.
    """

    name: str
    digest: bytes
    classes: tuple[str, ...] = ()
    default_class: str = USUAL
    quota: Quota = NO_LIMITS
    account: bytes = b""

    def may_use(self, service_class: str) -> bool:
        """Whether its requests may be in a class."""
        return not self.classes or service_class in self.classes

    def salt(self, more: bytes) -> bytes:
        """A cache salt that no other key can have, whatever ``more`` a request gives."""
        return key_salt(self.digest, more)


class NoKeysError(ConfigError):
    """The API key file is not there, or has no keys."""


def read_keys(given: Seq[str], path: str | None, classes: Seq[str] | None = None) -> list[Key]:
    """The keys of the command line and of a file, which has lines of keys, or YAML.

    A line is ``key`` or ``name:key``; what comes after a space and ``#`` is a comment. YAML starts
    with the line ``keys:``, and has a list of entries below it, with ``name``, ``key`` or
    ``sha256``, ``classes``, ``default_class``, and the limits of a `Quota`.

    Args:
        classes: the class table; without it, names of classes are not checked.

    Raises:
        NoKeysError: the file is not there, or has no keys.
        ConfigError: the file cannot be read, or something in it is malformed.
    """
    keys = [_key(f"api_key-{i}", key, "api_key") for i, key in enumerate(given, 1)]
    if path is not None:
        text = _read(path)
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if _counts(line)]
        if any(_YAML.fullmatch(line.rstrip()) for _, line in lines[: _begin(lines)]):
            found = list(_entries(text, classes))
        else:
            found = [
                _key(*_named(line, number), f"line {number} of the API key file")
                for number, line in lines
            ]
        if not found:
            raise NoKeysError("The API key file has no keys.", param="api_key_file")
        keys += found
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError("An API key is given twice.", param="api_key_file")
    if len(keys) > MAX_KEYS:
        raise _wrong(f"There are {len(keys)} API keys; {MAX_KEYS} can be served.")
    return keys


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        message = f"Cannot read the API key file '{path}': {error.strerror}."
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise (NoKeysError if gone else ConfigError)(message, param="api_key_file") from None
    except UnicodeDecodeError:
        raise _wrong(f"The API key file '{path}' is not text.") from None


def _begin(lines: Seq[tuple[int, str]]) -> int:
    """How many lines may be the first one of YAML: it may begin with a mark of documents."""
    return 2 if lines and lines[0][1].rstrip() == "---" else 1


def _counts(line: str) -> bool:
    """Whether a line is more than a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _named(line: str, number: int) -> tuple[str, str]:
    line = _COMMENT.sub("", line).strip()
    match = _NAMED.fullmatch(line)
    name, key = (match[1], match[2]) if match else (f"line-{number}", line)
    if any(letter.isspace() for letter in key):
        raise _wrong(
            f"line {number} of the API key file: a key has no spaces; comments begin with '#'."
        )
    return name, key


def _key(name: str, key: str, where: str) -> Key:
    digest = _digest(key, where)
    return Key(name, digest, account=digest)


def _digest(key: str, where: str) -> bytes:
    wrong = not key.isascii() or not key.isprintable() or key != key.strip()
    if wrong or not 0 < len(key) <= MAX_KEY_CHARS:
        raise ConfigError(
            f"{where}: a key must be 1 to {MAX_KEY_CHARS} printable ASCII characters.",
            param="api_key" if where == "api_key" else "api_key_file",
        )
    return sha256(key.encode()).digest()


def _entries(text: str, classes: Seq[str] | None) -> Iterator[Key]:
    """The keys of a file in YAML."""
    names: set[str] = set()
    for number, entry in enumerate(_load(text), 1):
        where = f"key {number} of the API key file"
        if not isinstance(entry, Mapping):
            raise _wrong(f"{where}: an entry maps 'name', 'key' and others to values.")
        name = entry.get("name")
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise _wrong(f"{where}: 'name' must be 1 to 64 letters, digits and '_.@-'.")
        where = f"key '{name}' of the API key file"
        if name in names:
            raise _wrong(f"{where}: the name is given twice; 'key' may be a list of keys.")
        names.add(name)
        yield from _keys_of(entry, name, where, classes)


def _load(text: str) -> Seq[Any]:
    import yaml  # most servers need none

    make = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first is some ten times faster
    try:
        loader = make(text)
        node = loader.get_single_node()
        _check_twice(node)
        loaded = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's text would show keys
        place = "" if mark is None else f" at line {mark.line + 1}"
        raise _wrong(f"The API key file is not valid YAML{place}.") from None
    if not isinstance(loaded, dict) or set(loaded) != {"keys"}:
        raise _wrong("The API key file has more than 'keys:' at its top.")
    entries = loaded["keys"] or []
    if not isinstance(entries, list):
        raise _wrong("'keys' of the API key file must be a list.")
    return entries


def _check_twice(node: Any) -> None:
    """Refuse a field that is given twice, of which YAML would take the last."""
    if node.id == "sequence":
        for item in node.value:
            _check_twice(item)
    if node.id != "mapping":
        return
    names = [name.value for name, _ in node.value if name.id == "scalar"]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        place = node.start_mark.line + 1
        raise _wrong(f"The API key file has '{twice[:64]}' twice in what begins at line {place}.")
    for _, value in node.value:
        _check_twice(value)


def _keys_of(
    entry: Mapping[Any, Any], name: str, where: str, table: Seq[str] | None
) -> Iterator[Key]:
    for field in entry:
        if field not in _FIELDS:
            hint = suggest(str(field)[:64], _FIELDS)
            raise _wrong(f"{where}: unknown field {shortened(field)}.{hint}")
    try:
        quota = Quota(**{field: entry[field] for field in _LIMITS if field in entry})
    except ParameterError as error:
        raise _wrong(f"{where}: {error.message}") from None
    classes, default = _classes(entry, where, table)
    account = sha256(b"weft account " + name.encode()).digest()
    for digest in _digests(entry, where):
        yield Key(name, digest, classes, default, quota, account)


def _digests(entry: Mapping[Any, Any], where: str) -> Iterator[bytes]:
    """Digests of the entry's keys, which it has as they are, or as digests."""
    for field in ("key", "sha256"):
        given = entry.get(field)
        for key in given if isinstance(given, list) else [given]:
            if key is None:
                continue
            if not isinstance(key, str):
                raise _wrong(f"{where}: '{field}' must be a string; put it into quotes.")
            if field == "key":
                yield _digest(key, where)
            elif _DIGEST.fullmatch(key):
                yield bytes.fromhex(key)
            else:
                raise _wrong(f"{where}: 'sha256' must be 64 hexadecimal digits in lower case.")
    if not entry.get("key") and not entry.get("sha256"):
        raise _wrong(f"{where}: 'key' or 'sha256' is missing.")


def _classes(
    entry: Mapping[Any, Any], where: str, table: Seq[str] | None
) -> tuple[tuple[str, ...], str]:
    """The classes that an entry allows, none for all, and its default."""
    allowed, default = entry.get("classes"), entry.get("default_class")
    names = allowed if isinstance(allowed, list) else []
    if allowed is not None and not names:
        raise _wrong(f"{where}: 'classes' must be a list of at least one class.")
    for name in [*names, *([] if default is None else [default])]:
        if not isinstance(name, str) or (table is not None and name not in table):
            known = "" if table is None else f"; there are {', '.join(table)}"
            raise _wrong(f"{where}: {shortened(name)} is no service class{known}.")
    if default is None:
        default = USUAL if not names or USUAL in names else names[0]
    elif names and default not in names:
        raise _wrong(f"{where}: 'default_class' is none of its 'classes'.")
    return tuple(dict.fromkeys(names)), default


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="api_key_file")
