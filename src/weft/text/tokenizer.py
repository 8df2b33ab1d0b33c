"""Encodes and decodes text: `tokenizers` as the reference, `fastokens` where it agrees."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken as ReferenceToken
from tokenizers import Tokenizer as Reference

from weft.core.errors import ParameterError, TokenizerError, WeftError, short
from weft.core.json_files import parse_object, read_text
from weft.text.assets import named_tokens, read_config
from weft.text.control import AddedToken, Guard, Scanner, grammar_document, list_added
from weft.text.decoding import DecodeTable, build_table
from weft.text.fast import Encoder
from weft.text.growth import growth

# What no tokeniser of a model has.
MAX_FILE_BYTES = 256 * 2**20
MAX_VOCAB_SIZE = 4 * 2**20
MAX_ADDED_TOKENS = 256 * 2**10
MAX_GROWTH = 256
COMMON_GROWTH = 8  # up to which a text may have any length; the longest with more:
MAX_NORMALISED_CHARS = 4 * 2**20
PAIR = ("a b", "c d")  # of which marks around two texts are read


class Tokenizer:
    """The tokeniser of one model folder. Immutable after loading; safe to share between threads.

    Attributes:
        reference: the `tokenizers.Tokenizer`; treat as read-only.
        encoder: what encodes, and why.
        vocab_size: every id is below it; some ids below it may be unused.
        special_tokens: ``{"bos_token": "<s>", ...}``, as chat templates see them.
        bos_id, eos_id: the ids of two of these, None where the folder names none.
        special_ids: ids that `decode` skips by default.
        control_ids: ids that text without ``parse_special`` never becomes: special tokens, and
            added tokens spelled like one (``<|...|>``). Not the token for unknown text.
        decode_table: what each id contributes to the text; None for unusual decoders.
    """

    def __init__(
        self,
        reference: Reference,
        config: Mapping[str, Any],
        document: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer` and the contents of its tokenizer_config.json.

        Args:
            document: the tokenizer.json that the first was made of, if it is at hand.

        Raises:
            TokenizerError: see `load`.
        """
        document = document or json.loads(reference.to_str())
        reference.no_truncation()
        reference.no_padding()
        self.reference = reference
        self.special_tokens = named_tokens(config)
        self._promote_named_tokens(document)
        added = list_added(reference)
        self.added_tokens = [token for token in added if token.content.strip()]
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.special_ids = frozenset(token.token_id for token in added if token.special)
        tokens = _tokens(reference, document["model"], added)
        self.vocab_size = 1 + max(tokens, default=-1)
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise TokenizerError(
                f"tokenizer.json has the id {self.vocab_size - 1}; ids up to {MAX_VOCAB_SIZE} are "
                "supported."
            )
        self._growth = growth(document.get("normalizer"))
        self.control_ids = frozenset(
            token.token_id for token in self.added_tokens if token.is_marker
        ) - {_unknown_id(reference, document["model"])}
        self.decode_table: DecodeTable | None = build_table(
            document.get("decoder"), [tokens.get(i) for i in range(self.vocab_size)]
        )
        self._prefix, self._suffix = _affixes(reference)
        self._shown_pieces: dict[frozenset[int], list[bytes]] = {}  # by the ids that are hidden
        self._guard: Guard | None = None
        self._guard_lock = threading.Lock()
        self.encoder = Encoder(reference, [token.content for token in self.added_tokens])

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load ``tokenizer.json`` and ``tokenizer_config.json`` from a model folder.

        Raises:
            TokenizerError: a file is missing or broken, names an unknown bos or eos token, or would
                take more time or memory than that of any model.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"There is no tokenizer.json in '{folder}'; add the one of the model, name the "
                "folder that has it with --tokenizer, or convert older tokeniser files with "
                "transformers' AutoTokenizer.save_pretrained."
            )
        text = read_text(path, TokenizerError, MAX_FILE_BYTES)
        document = _checked_document(text)
        config = read_config(Path(folder))
        try:
            return cls(Reference.from_str(text), config, document)
        except (WeftError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # bare exceptions, and Rust panics, which are no Exception
            raise TokenizerError(
                f"tokenizer.json is broken ({short(error)}); download the file again."
            ) from error

    @property
    def id_to_bytes(self) -> list[bytes | None] | None:
        """The bytes each id stands for, None for unused ids; None if `decode_table` is."""
        return self.decode_table.pieces if self.decode_table is not None else None

    def shown_pieces(self, hidden: frozenset[int]) -> list[bytes]:
        """Like `id_to_bytes`, but empty for ids that give no text; not to be changed."""
        pieces = self._shown_pieces.get(hidden)
        if pieces is None:
            known = enumerate(self.id_to_bytes or [])
            pieces = [b"" if piece is None or i in hidden else piece for i, piece in known]
            self._shown_pieces[hidden] = pieces
        return pieces

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the ids of ``text``; time grows about linearly with its length.

        Args:
            text: at most as long as the caller has checked.
            add_special_tokens: add what the model expects around a text, such as its bos token.
            parse_special: let text that spells a control token (``<|eot_id|>``) become it.
                Otherwise it is ordinary text, whatever it spells; other added tokens are still
                matched.

        Raises:
            ParameterError: the text has unpaired surrogates, which no UTF-8 text has.
        """
        ids = self.encode_parsed(text)
        if not parse_special and not self.control_ids.isdisjoint(ids):
            pieces = self.scanner.split(text)
            ids = self.guard.encode(
                (p.text, p.token is not None and p.token.token_id not in self.control_ids)
                for p in pieces
            )
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_parsed(self, text: str) -> list[int]:
        """Return the ids of ``text``, spelled tokens parsed, none added. Raises as `encode`."""
        if self._growth > COMMON_GROWTH and len(text) * self._growth > MAX_NORMALISED_CHARS:
            raise ParameterError(
                f"The tokeniser of this model may make a text {self._growth} times as long; it "
                f"takes {MAX_NORMALISED_CHARS // self._growth} characters at most."
            )
        try:
            return self.encoder.encode(text)
        except (TypeError, UnicodeEncodeError) as error:
            raise ParameterError(
                "The text is not valid Unicode: it has an unpaired surrogate. Send it as UTF-8."
            ) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; unknown ids give no text."""
        return self.reference.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def scanner(self) -> Scanner:
        """Finds spellings of added tokens in a text."""
        return Scanner(self.added_tokens)

    @property
    def guard(self) -> Guard:
        """The instance that no text can trick; built at the first text that spells a control token.

        Building takes as long as loading a tokenizer.json; a server may touch it at start.

        Raises:
            TokenizerError: this tokeniser cannot be guarded.
        """
        with self._guard_lock:
            if self._guard is None:
                self._guard = Guard(self.reference, self.added_tokens)
            return self._guard

    def grammar_document(self) -> str:
        """The text of a tokenizer.json for `weft.core.grammar`."""
        return grammar_document(self.reference, self.added_tokens)

    def pair_marks(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return the ids before, between and behind two texts that are joined, and their types.

        All are empty where the tokeniser joins texts in another way.
        """
        first, second = (self.reference.encode(text, add_special_tokens=False).ids for text in PAIR)
        whole = self.reference.encode(*PAIR)
        ids, types, middle = whole.ids, whole.type_ids, len(whole.ids) - len(second)
        for start in range(len(ids) - len(first) + 1):
            stop = start + len(first)
            if ids[start:stop] != first:
                continue
            for then in range(stop, middle + 1):
                end = then + len(second)
                if ids[then:end] == second:
                    marks = types[:start] + types[stop:then] + types[end:]
                    return ids[:start], ids[stop:then], ids[end:], marks
        return [], [], [], []

    def _promote_named_tokens(self, document: Mapping[str, Any]) -> None:
        """Tokens that the config names are special, whatever tokenizer.json says about them."""
        known = [
            t for t in self.special_tokens.values() if self.reference.token_to_id(t) is not None
        ]
        special = {token["content"] for token in document["added_tokens"] if token["special"]}
        plain = [token for token in known if token not in special]
        if plain:
            self.reference.add_special_tokens(
                [ReferenceToken(token, special=True, normalized=False) for token in plain]
            )

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if token is None:
            return None
        token_id = self.reference.token_to_id(token)
        if token_id is None:
            raise TokenizerError(
                f"tokenizer_config.json names '{short(token)}' as {name}, but tokenizer.json has "
                "no such token; take both files from the same model."
            )
        return token_id


def _checked_document(text: str) -> dict[str, Any]:
    """Parse a tokenizer.json. Raises TokenizerError if the library had better not see it."""
    found: Any = None
    with contextlib.suppress(ValueError):
        found = orjson.loads(text)  # in half the time
    if not isinstance(found, dict):
        found = parse_object(text, "tokenizer.json", TokenizerError)  # says what is wrong
    document: dict[str, Any] = found
    for section in ("normalizer", "decoder"):
        factor = growth(document.get(section))
        if factor > MAX_GROWTH:
            raise TokenizerError(
                f"The {section} of tokenizer.json may make a text {factor} times as long; "
                f"{MAX_GROWTH} times is supported."
            )
    added = document.get("added_tokens")
    if isinstance(added, list) and len(added) > MAX_ADDED_TOKENS:
        raise TokenizerError(
            f"tokenizer.json has {len(added)} added tokens; {MAX_ADDED_TOKENS} are supported."
        )
    return document


def _tokens(
    reference: Reference, model: Mapping[str, Any], added: Sequence[AddedToken]
) -> dict[int, str | None]:
    """All tokens by id: out of the file where it says them, as the library takes longer."""
    listed = model.get("vocab")
    vocab: dict[str, int] = listed if isinstance(listed, dict) else {}
    tokens: dict[int, str | None] = {i: token for token, i in vocab.items()}
    if not tokens or len(tokens) < len(vocab):  # a list with scores; or some share an id
        return {i: reference.id_to_token(i) for i in reference.get_vocab().values()}
    return tokens | {token.token_id: token.content for token in added}


def _unknown_id(reference: Reference, model: Mapping[str, Any]) -> int | None:
    """The id that stands for unknown text: text may become it without spelling it."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token = model.get("unk_token")
    return reference.token_to_id(token) if token is not None else None


def _affixes(reference: Reference) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor puts before and after a text."""
    plain = reference.encode("a b", add_special_tokens=False).ids
    whole = reference.encode("a b", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise TokenizerError(
        "The post_processor of tokenizer.json does not keep the text in one piece, which is not "
        "supported; use one that adds tokens only before and after the text."
    )
