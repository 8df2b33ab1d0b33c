"""Text from outside in a private alphabet, so that it passes a chat template without spelling
tokens.

A template joins its own control tokens with text from messages, and may trim, split or compare that
text on the way; afterwards the two must still be told apart. So before rendering, each punctuation
character that occurs in a control token (``<``, ``|``, ``>``, ...) is replaced, in text from
outside, by its own lone surrogate. Whatever a template then does with the text - trim, slice, join,
replace - no sequence of these characters can spell a control token, and each character of the
output still tells where it came from. Lone surrogates cannot collide with anything: no UTF-8 text
has them, and text from outside that has them is refused.

The replacement is one character for one, so lengths and slices stay right, and `Quoted` makes
comparisons (``'</think>' in content``, ``content.split('</think>')``) see the original text. An
operation that `Quoted` does not know gives a plain string that keeps the surrogates: a comparison
may then fail to match, but nothing gets unmasked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from weft.core.errors import ParameterError, TokenizerError

_FIRST_USER, _FIRST_MODEL, _LIMIT = 0xDC00, 0xDE00, 0x200
_SURROGATE = re.compile("[\ud800-\udfff]")
_FROM_USER = re.compile("[\udc00-\uddff]")
_MAX_DEPTH = 64


class Alphabet:
    """The characters to replace, for a set of control tokens, and the way back.

    Attributes:
        chars: these characters; they make the same alphabet.
    """

    def __init__(self, control_tokens: Iterable[str]) -> None:
        """Replace the punctuation of ``control_tokens``; the first letter of one that has none.

        Raises:
            TokenizerError: the tokens have too many different characters.
        """
        tokens = list(control_tokens)
        marks = {char for char in set().union(*tokens) if _is_mark(char)}
        bare = (token for token in tokens if marks.isdisjoint(token))
        chars = sorted(marks.union(*(token.lstrip()[:1] for token in bare)))
        if len(chars) > _LIMIT:
            raise TokenizerError(
                "The control tokens of this tokeniser use too many different characters to be told "
                "apart from text; mark fewer of its added tokens as special."
            )
        self.chars = "".join(chars)
        self._quoted = re.compile("[" + re.escape(self.chars) + "\ud800-\udfff]")
        self._tables = [
            {ord(char): chr(first + n) for n, char in enumerate(chars)}
            for first in (_FIRST_USER, _FIRST_MODEL)
        ]
        self._plain = {
            first + n: c for first in (_FIRST_USER, _FIRST_MODEL) for n, c in enumerate(chars)
        }

    def quote(self, text: str, *, by_model: bool) -> str:
        """Return ``text`` as it is if it has nothing to replace, else as `Quoted`.

        Raises:
            ParameterError: the text has unpaired surrogates.
        """
        if self._quoted.search(text) is None:
            return text
        refuse_surrogates(text)
        table = self._tables[by_model]
        return Quoted(text.translate(table), table, self._plain)

    def reread(self, value: Any) -> Any:
        """Return JSON-like ``value`` with the strings that were quoted before as `Quoted` again."""
        if isinstance(value, str):
            if not has_quoted(value):
                return value
            return Quoted(value, self._tables[not from_user(value)], self._plain)
        if isinstance(value, dict):
            return {self.reread(key): self.reread(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.reread(item) for item in value]
        return value

    def plain(self, text: str) -> str:
        """Return ``text`` with every replaced character back in place."""
        return text.translate(self._plain) if has_quoted(text) else str.__str__(text)


class Quoted(str):
    """A string in the private alphabet that compares as its original text."""

    _table: Mapping[int, str]
    _plain_table: Mapping[int, str]

    def __new__(
        cls,
        text: str,
        table: Mapping[int, str] | None = None,
        plain: Mapping[int, str] | None = None,
    ) -> Quoted:
        self = super().__new__(cls, text)
        self._table = table or {}
        self._plain_table = plain or {}
        return self

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(_original(self))

    def __eq__(self, other: object) -> bool:
        return _original(self) == _original(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __iter__(self) -> Iterator[str]:
        return (self._like(char) for char in str.__iter__(self))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return self._like(str.__getitem__(self, key))

    def __add__(self, other: str) -> str:
        return self._like(str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        return self._like(str.__add__(other, self))

    def _like(self, text: str) -> Quoted:
        return Quoted(text, self._table, self._plain_table)


def has_quoted(text: str) -> bool:
    """Return whether any of ``text`` came from outside and was replaced."""
    return not str.isascii(text) and _SURROGATE.search(text) is not None


def from_user(text: str) -> bool:
    """Return whether any replaced character came from elsewhere than the model's messages."""
    return _FROM_USER.search(text) is not None


def join(parts: Iterable[str]) -> str:
    """Join strings; the result is `Quoted` if one of them is."""
    parts = list(parts)
    text = "".join(parts)
    for part in parts:
        if isinstance(part, Quoted):
            return part._like(text)
    return text


def refuse_surrogates(text: str) -> None:
    """Raise ParameterError if ``text`` has unpaired surrogates, which no UTF-8 text has."""
    if has_quoted(text):
        raise ParameterError(
            "The text is not valid Unicode: it has an unpaired surrogate. Send it as UTF-8."
        )


def plain_data(value: Any, quote: Callable[[str], str], depth: int = 0) -> Any:
    """Return a copy of JSON-like ``value`` made of plain types, each string and key through
    ``quote``.

    Raises:
        ParameterError: something else than JSON types is in it, or it is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise ParameterError(f"Messages and tools may be nested {_MAX_DEPTH} levels deep at most.")
    if isinstance(value, str):
        return quote(str.__str__(value))
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {
            plain_data(k, quote, depth + 1): plain_data(v, quote, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_data(item, quote, depth + 1) for item in value]
    raise ParameterError(
        f"Messages and tools must be JSON values, not {type(value).__name__} objects."
    )


def _is_mark(char: str) -> bool:
    return not (char.isalnum() or char.isspace() or char == "_")


def _original(value: object) -> object:
    """The original text of a string, as a plain str; other objects unchanged."""
    if isinstance(value, Quoted):
        return str.translate(value, value._plain_table)
    return value


def _asks(name: str) -> Callable[..., Any]:
    """A method that only looks: asked of the original text."""
    method = getattr(str, name)

    def asking(self: Quoted, *args: Any, **kwargs: Any) -> Any:
        return method(_original(self), *[_original_all(arg) for arg in args], **kwargs)

    return asking


def _original_all(value: object) -> object:
    return tuple(map(_original, value)) if isinstance(value, tuple) else _original(value)


def _makes(name: str) -> Callable[..., Any]:
    """A method that returns text: what it looks for is quoted too, and so is what it returns."""
    method = getattr(str, name)

    def making(self: Quoted, *args: Any, **kwargs: Any) -> Any:
        sought = [_sought(self, arg) for arg in args[:1]]
        named = {key: _sought(self, arg) for key, arg in kwargs.items()}
        return _wrapped(self, method(self, *sought, *args[1:], **named))

    return making


def _sought(quoted: Quoted, value: Any) -> Any:
    return value.translate(quoted._table) if isinstance(value, str) else value


def _wrapped(quoted: Quoted, value: Any) -> Any:
    if isinstance(value, str):
        return quoted._like(value)
    if isinstance(value, list | tuple):
        return type(value)(quoted._like(item) for item in value)
    return value


for _name in ("startswith", "endswith", "find", "rfind", "index", "rindex", "count"):
    setattr(Quoted, _name, _asks(_name))
for _name in ("__contains__", "__lt__", "__le__", "__gt__", "__ge__", "isascii", "isprintable"):
    setattr(Quoted, _name, _asks(_name))
for _name in (
    "split",
    "rsplit",
    "splitlines",
    "partition",
    "rpartition",
    "strip",
    "lstrip",
    "rstrip",
):
    setattr(Quoted, _name, _makes(_name))
for _name in ("replace", "removeprefix", "removesuffix", "upper", "lower", "title", "capitalize"):
    setattr(Quoted, _name, _makes(_name))
for _name in ("casefold", "swapcase", "expandtabs", "__mul__", "__rmul__"):
    setattr(Quoted, _name, _makes(_name))
