"""Structured output: turns schemas, expressions, choices and grammars into llguidance's input.

Everything is bounded before it is compiled, and what a grammar cannot guarantee is refused: a
keyword is honoured or an error, never ignored.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from weft.core.errors import GrammarError
from weft.core.grammar import compile_grammar, explain, grammar_tokenizer
from weft.text.patterns import check_pattern, check_repetitions
from weft.text.regular import lark_expression
from weft.text.schema import MAX_SCHEMA_CHARS, read_schema
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES = 10_000
MAX_LARK_CHARS = 32 * 2**10
MAX_WHITESPACE = 16  # characters between two parts of JSON: a model cannot fill the output with it
Whitespace = Literal["compact", "flexible"]
REMEMBERED = 256  # grammars that need not be checked again

_COMPACT: JsonCompileOptions = {
    "item_separator": ",\x20?",
    "key_separator": ":\x20?",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
    # Without \u a key has one spelling, so none can be written twice, and no text half a character.
    "json_allowed_escapes": 'nrbtf\\"',
}
_COMPILE_OPTIONS: Mapping[Whitespace, JsonCompileOptions] = {
    "compact": _COMPACT,
    "flexible": {
        **_COMPACT,
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": True,
        "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}",
    },
}


def json_object_grammar(whitespace: Whitespace = "compact") -> str:
    """Any JSON object; see `json_schema_grammar`."""
    return _json_grammar('{"type": "object"}', whitespace)


def json_schema_grammar(text: str, whitespace: Whitespace = "compact") -> str:
    """JSON that satisfies a schema, given as JSON text.

    Keys beyond the ``properties`` of an object come only where the schema speaks of them.

    Args:
        whitespace: ``compact`` allows a space after each comma and colon, ``flexible`` up to
            ``MAX_WHITESPACE`` characters of white space between any two parts.

    Raises:
        GrammarError: the text is no schema, is too large, or asks for something that cannot be
            guaranteed.
    """
    return _json_grammar(read_schema(text), whitespace)


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression matches as a whole. Raises GrammarError for a costly one."""
    check_pattern(pattern)
    from llguidance import LLMatcher  # few requests need it

    return str(LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of several texts. Raises GrammarError for none, for too many, and for an empty one."""
    if not 0 < len(choices) <= MAX_CHOICES:
        raise GrammarError(f"there must be 1 to {MAX_CHOICES} choices")
    if not all(choices):
        raise GrammarError("a choice must not be empty")
    if sum(map(len, choices)) > MAX_SCHEMA_CHARS:
        raise GrammarError(f"the choices have more than {MAX_SCHEMA_CHARS} characters together")
    # An upper-case name: matched as one expression, not tried as one rule a choice.
    texts = " | ".join(quote(choice) for choice in choices)
    return _lark(f"start: CHOICE\nCHOICE: {texts}\n")


def lark_grammar(text: str) -> str:
    """Text of a Lark grammar, as llguidance reads them. Raises GrammarError for a costly one."""
    if len(text) > MAX_LARK_CHARS:
        raise GrammarError(f"it has more than {MAX_LARK_CHARS} characters")
    check_repetitions(text)
    return _lark(text)


def custom_grammar(format: Mapping[str, Any] | None) -> str:
    """``{"input": "..."}`` for a custom tool of OpenAI's API; see `custom_schema`."""
    return _json_grammar(json.dumps(custom_schema(format)), "compact")


def custom_schema(format: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of ``{"input": "..."}`` with a text as a custom tool of OpenAI's API wants it.

    Args:
        format: ``{"type": "text"}`` or None for any text; ``{"type": "grammar", "syntax": "regex"
            or "lark", "definition": ...}``, the last two in an object ``grammar`` or not.

    Raises:
        GrammarError: it is malformed or too costly; or a rule of a Lark grammar refers to itself,
            which cannot be followed within a JSON string.
    """
    given = format or {"type": "text"}
    text: dict[str, Any] = {"type": "string"}
    if given.get("type") == "grammar":
        text["pattern"] = f"^(?:{_custom_pattern(given.get('grammar', given))})$"
    elif given.get("type") != "text":
        raise GrammarError("the type of the format must be 'text' or 'grammar'")
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def _custom_pattern(given: Any) -> str:
    syntax, definition = (
        (given.get("syntax"), given.get("definition")) if isinstance(given, dict) else (None, None)
    )
    if not isinstance(definition, str) or syntax not in ("regex", "lark"):
        raise GrammarError("the format needs the syntax 'regex' or 'lark' and a definition")
    if syntax == "regex":
        check_pattern(definition)
        return definition
    if len(definition) > MAX_LARK_CHARS:
        raise GrammarError(f"it has more than {MAX_LARK_CHARS} characters")
    expression = lark_expression(definition)
    check_repetitions(expression)
    return expression


def quote(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class GrammarChecker:
    """Compiles grammars once to see that they can be. Safe to share between threads.

    Args:
        eos_token_ids: of the model; without any no structured output can end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()  # digest -> what is wrong, or ""
        self._lock = threading.Lock()

    def knows(self, grammar: str) -> bool:
        """Whether `check` would answer at once."""
        return _digest(grammar) in self._known

    def check(self, grammar: str) -> None:
        """Compile a grammar; takes up to some tenths of a second and releases the GIL.

        Raises:
            GrammarError: it is wrong, too costly, or allows no text.
        """
        digest = _digest(grammar)
        problem = self._known.get(digest)
        if problem is None:
            problem = self._compile(grammar)
        with self._lock:
            self._known[digest] = problem
            self._known.move_to_end(digest)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        if problem:
            raise GrammarError(problem)

    def _compile(self, grammar: str) -> str:
        try:
            compile_grammar(self._load(), grammar)
        except GrammarError as error:
            return error.message
        return ""

    def _load(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token, so it could never end")
        with self._lock:
            if self._tokenizer is None:
                text = self._source.grammar_document()
                self._tokenizer = grammar_tokenizer(text, self._vocab_size, self._eos_token_ids)
            return self._tokenizer


def _digest(grammar: str) -> bytes:
    return sha256(grammar.encode()).digest()


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)


def _json_grammar(schema: str, whitespace: Whitespace) -> str:
    options = _COMPILE_OPTIONS[whitespace]
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))
    except ValueError as error:
        raise GrammarError(explain(str(error))) from None
