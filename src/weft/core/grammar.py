"""Compiles grammars with llguidance, for both the check of a request and sampling."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from functools import cache
from typing import TYPE_CHECKING

from weft.core.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_SHOWN_CHARS = 300
# What the library says in words that mean nothing to a client -> what that means.
_OWN_WORDS = (
    ("NoExtension.*", "no text satisfies it"),
    ("oneOf constraints .*", "the options of a oneOf may overlap; use anyOf"),
    (
        r"Failed to generate regex for \w+ range.*",
        "a bound of a number is too far from 0; those within 10^17 can be followed",
    ),
    (r"Expected f64\b", "expected a number"),
)


@cache
def _limits() -> LLParserLimits:
    """Bounds of one grammar: at most some 0.2 s to compile, 0.1 s and 100 MB for a token's mask.

    A mask takes items times items in a row: with the library's bounds an ambiguous grammar
    (a: a a | /./) takes seconds a token, in which no other sequence goes on.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_items_in_row=500,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def grammar_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Seq[int]) -> LLTokenizer:
    """Return the tokeniser of a model as grammars see it; takes a second for a large one.

    Args:
        tokenizer_json: text of tokenizer.json, as ``Tokenizer.grammar_document`` gives it.
        vocab_size: of the model; ids that only the model has are never allowed.
        eos_token_ids: at least one; allowed exactly where a grammar is satisfied.

    Raises:
        GrammarError: the tokeniser is of a kind that the library does not know.
    """
    from llguidance import LLTokenizer  # few engines need it

    try:
        plain = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
        if plain.vocab_size >= vocab_size:
            return plain
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as error:
        detail = explain(str(error))
        raise GrammarError(f"the tokeniser of this model cannot follow one ({detail})") from None


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the start of a grammar, to be copied. Releases the GIL.

    Raises:
        GrammarError: the grammar is wrong, too large, or allows no text at all.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(explain(matcher.get_error()))
    return matcher


def explain(message: str) -> str:
    """The library's error in one short line."""
    for theirs, ours in _OWN_WORDS:
        message = re.sub(f"^{theirs}", ours, message, flags=re.DOTALL)
    text = " ".join(message.split("<state>")[0].split("<non-verbose/>")[0].split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
