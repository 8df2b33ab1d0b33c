"""Control tokens: separates the intended ones from text that merely spells one.

A tokeniser matches its added tokens by their spelling, so text from outside that spells
``<|eot_id|>`` would end a turn. The `Guard` is a second instance of the same tokeniser in which
every added token has a random private name instead of its spelling: text can then not name one by
accident or on purpose, whatever normalisers, merges or the vocabulary do. The caller puts the
private name where a token is meant and leaves everything else as it is, so a single call encodes
the whole text and every id is the one that the ordinary instance has.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Reference

from weft.core.errors import TokenizerError

_NAME_CHARS = 8
_PRIVATE, _PRIVATE_CHARS = 0x100000, 0xFFFE
_MOST_PREFIXES = 1024
_BARS = re.compile(r"<([|｜]).*\1>", re.DOTALL)


@dataclass(frozen=True)
class AddedToken:
    """One entry of the added vocabulary: its spelling, and whether it is marked special."""

    token_id: int
    content: str
    special: bool

    @property
    def is_marker(self) -> bool:
        """Control by default: marked special, or spelled like a marker, as ``<|fim_prefix|>``."""
        return self.special or _BARS.fullmatch(self.content) is not None

    @property
    def is_apart(self) -> bool:
        """Whether grammars know the token by its id and never as text: llguidance's own rule."""
        return self.special or (self.content.startswith("<") and self.content.endswith(">"))


@dataclass(frozen=True)
class TextPiece:
    """A stretch of text; ``token`` is set where it spells an added token."""

    text: str
    token: AddedToken | None


class Scanner:
    """Finds spellings of added tokens: leftmost, then longest, as the tokeniser itself does."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.content: token for token in tokens}
        lengths: dict[str, set[int]] = {}
        for content in self._tokens:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._starts = re.compile(_starts_pattern(self._tokens))

    def split(self, text: str) -> Iterator[TextPiece]:
        """Yield pieces that join to ``text``, spelled tokens apart from the text between them."""
        end = at = 0
        while (match := self._starts.search(text, at)) is not None:
            at = match.start()
            token = self._longest(text, at)
            if token is None:
                at += 1
                continue
            if at > end:
                yield TextPiece(text[end:at], None)
            yield TextPiece(token.content, token)
            end = at = at + len(token.content)
        if end < len(text):
            yield TextPiece(text[end:], None)

    def _longest(self, text: str, at: int) -> AddedToken | None:
        for length in self._lengths[text[at]]:
            token = self._tokens.get(text[at : at + length])
            if token is not None:
                return token
        return None


class Guard:
    """The same tokeniser with added tokens under private names; see the module's docstring."""

    def __init__(self, reference: Reference, tokens: Sequence[AddedToken]) -> None:
        """Build the second instance; takes as long and as much memory as loading the first.

        Raises:
            TokenizerError: the tokeniser cannot be rewritten so that its ids stay the same.
        """
        contents = [token.content for token in tokens]
        self._names = dict(zip(contents, _private_names(len(contents)), strict=True))
        document = _renamed(json.loads(reference.to_str()), self._names)
        try:
            self._tokenizer = Reference.from_str(json.dumps(document))
        except Exception as error:  # the library raises bare exceptions
            raise _not_separable(str(error)) from error
        for token in tokens:
            if self._tokenizer.token_to_id(self._names[token.content]) != token.token_id:
                raise _not_separable(f"the id of {token.content!r} changes")

    def encode(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Encode pieces of ``(text, meant)`` as one text; a meant one spells one added token."""
        text = "".join([self._names[text] if meant else text for text, meant in pieces])
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def list_added(reference: Reference) -> list[AddedToken]:
    """Return the added tokens by id."""
    return [
        AddedToken(token_id, token.content, token.special)
        for token_id, token in sorted(reference.get_added_tokens_decoder().items())
    ]


def grammar_document(reference: Reference, tokens: Iterable[AddedToken]) -> str:
    """The text of a tokenizer.json for grammars, in which no text spells a control token.

    Where a grammar leaves one text only, llguidance allows the token that its tokeniser makes of
    it: with the tokens' own names a text that spells one could never be written, and one that
    spells the end of the sequence would end it.
    """
    apart = [token.content for token in tokens if token.is_apart]
    names = {
        content: f"<{name}>"
        for content, name in zip(apart, _private_names(len(apart)), strict=True)
    }
    return json.dumps(_renamed(json.loads(reference.to_str()), names))


def _private_names(count: int) -> Iterator[str]:
    """128 random bits and a number as private-use characters (plane 16)."""
    secret = "".join(chr(_PRIVATE + secrets.randbelow(_PRIVATE_CHARS)) for _ in range(_NAME_CHARS))
    for number in range(count):
        high, low = divmod(number, _PRIVATE_CHARS)
        yield secret + chr(_PRIVATE + high) + chr(_PRIVATE + low)


def _not_separable(reason: str) -> TokenizerError:
    return TokenizerError(
        "The control tokens of this tokeniser cannot be told apart from text that spells them "
        f"({reason.splitlines()[0][:200]}); use the tokenizer.json of the original model."
    )


def _renamed(document: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer.json in which tokens have new names, in the vocabulary too."""
    for token in document["added_tokens"]:
        if token["content"] in names:
            token |= {
                "content": names[token["content"]],
                "normalized": False,
                "single_word": False,
            }
    model = document["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges") and not names.keys().isdisjoint(vocab):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    return document


def _makes(merge: str | Sequence[str], names: Mapping[str, str]) -> bool:
    """Whether a BPE merge takes or makes one of the renamed tokens."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right in names or left in names or right in names


def _starts_pattern(words: Iterable[str]) -> str:
    """Return a regular expression for places where one of ``words`` may start.

    It knows their first characters only, as many as leave few beginnings: a pattern of all the
    words takes seconds to compile where there are 100,000.
    """
    starts = set(words)
    for length in (4, 2, 1):
        starts = {word[:length] for word in starts}
        if len(starts) <= _MOST_PREFIXES:
            break
    return "|".join(map(re.escape, sorted(starts))) or "(?!)"
