"""Converts Lark grammars without recursion to one regular expression."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from weft.core.errors import GrammarError

MAX_EXPRESSION_CHARS = 32 * 2**10
MAX_RULE_DEPTH = 64  # rules within rules, and groups within groups

_TOKENS = re.compile(
    r"""(?P<blank>[ \t\f\r]+|(?://|\#)[^\n]*|\\\n)
    |(?P<newline>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?![/*])(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<name>_?[a-zA-Z][\w-]*)
    |(?P<number>\d+)
    |(?P<directive>%[a-z]+)
    |(?P<mark>\.\.|->|[][(){}|:*+?!~.,])""",
    re.VERBOSE,
)
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_COMMON: Mapping[str, str] = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "SIGNED_FLOAT": r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "NUMBER": r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
}


class _Token(NamedTuple):
    kind: str
    text: str


_END = _Token("newline", "")


def lark_expression(grammar: str) -> str:
    """Return the expression that matches what a grammar describes.

    Where terminals may be cut in several ways every way counts, as with Lark's dynamic lexer.

    Raises:
        GrammarError: it is no grammar, a rule refers to itself, or it uses what no expression has.
    """
    statements = list(_statements(list(_tokens(grammar))))
    return _Grammar(statements).expression()


def _tokens(grammar: str) -> Iterator[_Token]:
    at = 0
    while at < len(grammar):
        match = _TOKENS.match(grammar, at)
        if match is None or match.lastgroup is None:
            shown = grammar[at : at + 20].split("\n")[0]
            raise GrammarError(f"the Lark grammar cannot be read at '{shown}'")
        if match.lastgroup != "blank":
            yield _Token(match.lastgroup, match[0])
        at = match.end()


def _statements(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """Yield definitions and directives; a line that begins with ``|`` goes on with the last one."""
    statement: list[_Token] = []
    open_groups = 0
    for index, token in enumerate(tokens):
        if token.kind == "mark":
            open_groups += (token.text in "([{") - (token.text in ")]}")
        if token.kind != "newline":
            statement.append(token)
        elif statement and open_groups <= 0 and not _goes_on(tokens, index):
            yield statement
            statement = []
    if statement:
        yield statement


def _goes_on(tokens: list[_Token], newline: int) -> bool:
    following = (token for token in tokens[newline:] if token.kind != "newline")
    return next(following, _END).text == "|"


def _check_length(num_chars: int) -> None:
    if num_chars > MAX_EXPRESSION_CHARS:
        raise GrammarError(
            f"the Lark grammar makes an expression of more than {MAX_EXPRESSION_CHARS} characters"
        )


class _Parts:
    """Parts of an expression, which is refused before it is written where it gets too long."""

    def __init__(self, separator: str = "") -> None:
        self._separator = separator
        self._texts: list[str] = []
        self._num_chars = 0

    def add(self, text: str) -> None:
        """Raises GrammarError where the parts are too long together."""
        self._num_chars += len(text) + len(self._separator)
        _check_length(self._num_chars)
        self._texts.append(text)

    def joined(self) -> str:
        return self._separator.join(self._texts)


class _Grammar:
    """The definitions of a grammar, each written out when another one needs it."""

    def __init__(self, statements: list[list[_Token]]) -> None:
        self._bodies: dict[str, list[_Token]] = {}
        self._known: dict[str, str] = {}
        self._within: list[str] = []
        self._ignored: list[list[_Token]] = []
        for statement in statements:
            if statement[0].kind == "directive":
                self._direct(statement)
            else:
                self._define(statement)

    def expression(self) -> str:
        ignored = _Parts("|")
        for body in self._ignored:
            ignored.add(_BodyReader(self, body, "").read())
        between = f"(?:{ignored.joined()})*" if self._ignored else ""
        whole = _Parts()
        whole.add(between)
        whole.add(self.expand("start", between))
        return whole.joined()

    def expand(self, name: str, between: str) -> str:
        """The expression of a rule or terminal; ``between`` may follow each terminal of a rule."""
        if name in self._within or len(self._within) == MAX_RULE_DEPTH:
            raise GrammarError(
                f"the Lark rule '{name[:100]}' refers to itself, or rules are nested more than "
                f"{MAX_RULE_DEPTH} levels deep; only grammars without recursion can be followed "
                "within a JSON string"
            )
        if name not in self._known:
            if name not in self._bodies:
                raise GrammarError(f"the Lark grammar does not define '{name[:100]}'")
            self._within.append(name)
            self._known[name] = _BodyReader(self, self._bodies[name], between).read()
            self._within.pop()
        return self._known[name]

    def _define(self, statement: list[_Token]) -> None:
        how = statement[0].kind == "mark" and statement[0].text in "?!"  # of its tree
        name, *rest = statement[1:] if how and statement[1:] else statement
        if rest[:1] == [_Token("mark", ".")]:  # a priority, which says nothing about the language
            rest = rest[2:]
        if name.kind != "name" or rest[:1] != [_Token("mark", ":")]:
            shown = " ".join(token.text for token in statement[:4])[:100]
            raise GrammarError(f"the Lark grammar has '{shown}', which is no plain definition")
        self._bodies[name.text] = rest[1:]

    def _direct(self, statement: list[_Token]) -> None:
        directive, *rest = statement
        if directive.text == "%ignore":
            self._ignored.append(rest)
        elif directive.text == "%import" and [token.text for token in rest[:1]] == ["common"]:
            self._import([token.text for token in rest[1:]])
        else:
            shown = " ".join(token.text for token in statement)[:100]
            raise GrammarError(f"'{shown}' of Lark cannot be followed within a JSON string")

    def _import(self, texts: list[str]) -> None:
        """``.NAME``, ``.NAME -> OTHER`` or ``(NAME, NAME)``."""
        names = [text for text in texts if text not in (".", "(", ")", ",", "->")]
        renamed = len(names) == 2 and "->" in texts
        for name in names[:1] if renamed else names:
            if name not in _COMMON:
                raise GrammarError(f"Lark's 'common' has no '{name[:100]}' here")
            self._known[names[-1] if renamed else name] = f"(?:{_COMMON[name]})"


class _BodyReader:
    """Reads one body: what alternatives, sequences, repetitions and groups stand for."""

    def __init__(self, grammar: _Grammar, tokens: list[_Token], between: str) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._between = between
        self._at = 0
        self._depth = 0

    def read(self) -> str:
        text = self._alternatives()
        if self._at < len(self._tokens):
            raise GrammarError(f"'{self._next.text[:100]}' stands where Lark cannot have it")
        return text

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def _take(self, *texts: str) -> bool:
        """Whether the next token is one of some marks; it is taken then."""
        found = self._next.kind == "mark" and self._next.text in texts
        self._at += found
        return found

    def _alternatives(self) -> str:
        if self._depth == MAX_RULE_DEPTH:
            raise GrammarError(f"groups are nested more than {MAX_RULE_DEPTH} levels deep")
        self._depth += 1
        parts = _Parts("|")
        parts.add(self._sequence())
        while self._take("|"):
            parts.add(self._sequence())
        self._depth -= 1
        return f"(?:{parts.joined()})"

    def _sequence(self) -> str:
        parts = _Parts()
        while self._next.kind in ("name", "string", "regex") or self._next.text in ("(", "["):
            parts.add(self._repeated())
        if self._take("->"):
            self._at += 1
        return parts.joined()

    def _repeated(self) -> str:
        text = self._item()
        while self._next.kind == "mark" and self._next.text in ("*", "+", "?", "~", "{"):
            _check_length(len(text))
            text = f"(?:{text}{self._count()})"
        return text

    def _count(self) -> str:
        mark = self._next.text
        self._at += 1
        if mark in "*+?":
            return mark
        low = self._number()
        several = self._take("..", ",")
        high = self._number() if several else low
        if (mark == "{") != self._take("}") or not low + high:
            raise GrammarError("a repetition of the Lark grammar is not complete")
        return f"{{{low or 0},{high}}}" if several else f"{{{low}}}"

    def _number(self) -> str:
        if self._next.kind != "number":
            return ""
        self._at += 1
        return self._tokens[self._at - 1].text[:9]

    def _item(self) -> str:
        token = self._next
        self._at += 1
        if token.kind == "mark":
            text = self._alternatives()
            if not self._take(")" if token.text == "(" else "]"):
                raise GrammarError("a group of the Lark grammar is not closed")
            return text if token.text == "(" else f"{text}?"
        if token.kind == "name" and token.text.lstrip("_")[:1].islower():
            return self._grammar.expand(token.text, self._between)
        text = self._terminal(token)
        return f"(?:{text}{self._between})" if self._between else text

    def _terminal(self, token: _Token) -> str:
        if token.kind == "name":
            return self._grammar.expand(token.text, "")
        if token.kind == "regex":
            return _regex(token.text)
        if self._take(".."):
            last = self._next
            self._at += 1
            return f"[{_escaped(_literal(token.text))}-{_escaped(_literal(last.text))}]"
        text = _escaped(_literal(token.text))
        return f"(?i:{text})" if token.text.endswith("i") else f"(?:{text})"


def _regex(text: str) -> str:
    """A regular expression of Lark with its flags within."""
    source, _, flags = text[1:].rpartition("/")
    if set(flags) - set("imsux"):
        raise GrammarError(f"the flags '{flags[:100]}' of a Lark expression are not known")
    flags = flags.replace("u", "")
    source = source.replace("\\/", "/")
    return f"(?{flags}:{source})"


def _literal(text: str) -> str:
    try:
        value = ast.literal_eval(text.removesuffix("i"))
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, str):
        raise GrammarError(f"'{text[:100]}' is no text as Lark writes them")
    return value


def _escaped(text: str) -> str:
    return _META.sub(r"\\\g<0>", text)
