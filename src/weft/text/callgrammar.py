"""Grammars of whole turns: tool calls in a family's format, reasoning, or another body."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import GrammarError
from weft.text.dialect import REASONING_MARKERS, TOOL_PARSERS, Dialect
from weft.text.grammar import quote
from weft.text.tokenizer import Tokenizer

_ANY = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that may be called.

    Attributes:
        arguments: grammar of its arguments.
    """

    name: str
    arguments: str


def turn_grammar(
    dialect: Dialect,
    tokenizer: Tokenizer,
    functions: Sequence[CallableFunction] = (),
    *,
    forced: bool = False,
    parallel: bool = True,
    body: str | None = None,
    opened: bool = False,
    thinking_budget: int | None = None,
) -> str:
    """Return the grammar of a turn.

    Args:
        functions: may be called.
        forced: at least one call must come. Otherwise free text may, or ``body`` where it is set.
        parallel: several calls may come.
        body: grammar of the answer.
        opened: the prompt has opened the reasoning, so the turn starts inside; it may be left out
            where the model marks it and the prompt has not opened it.
        thinking_budget: tokens of reasoning at most, before its closing marker; nothing where the
            model marks none. Where the marker is no token of its own, reasoning under a budget
            does without the character that begins it.

    Raises:
        GrammarError: there are functions, but the model has no form of calls.
    """
    spell = _speller(tokenizer)
    grammars: list[dict[str, Any]] = []
    rules: list[str] = []
    answer = "" if functions or body is not None else "TEXT"
    if functions:
        if dialect.tools is None:
            raise GrammarError("no form of tool calls is known for this model")
        grammars += [
            _named(f"arguments_{i}", function.arguments) for i, function in enumerate(functions)
        ]
        answer = _CALLS[dialect.tools](
            _Calls(functions, spell, rules, forced or body is not None, parallel)
        )
    if body is not None and not forced:
        grammars.append(_named("body", body))
        answer = f"{answer} | @body" if answer else "@body"
    start = _reasoning(dialect, spell, opened, thinking_budget, rules)
    rules = [f"start: {start} answer" if start else "start: answer", f"answer: {answer}", *rules]
    text = "\n".join(rules)
    return json.dumps({"grammars": [{"lark_grammar": text}, *grammars]}, ensure_ascii=False)


def _speller(tokenizer: Tokenizer) -> Callable[[str], str]:
    """How a grammar spells a marker: by id if it is a control token, else as text."""
    apart = {token.content: token.token_id for token in tokenizer.added_tokens if token.is_apart}

    def spell(marker: str) -> str:
        return f"<[{apart[marker]}]>" if marker in apart else quote(marker)

    return spell


def _named(name: str, grammar: str) -> dict[str, Any]:
    """The only grammar of a text, under a name by which others refer to it."""
    (only,) = json.loads(grammar)["grammars"]
    return {**only, "name": name}


def _reasoning(
    dialect: Dialect,
    spell: Callable[[str], str],
    opened: bool,
    budget: int | None,
    rules: list[str],
) -> str:
    """The rule for text before the answer; empty where the model marks no reasoning.

    Adds the rules of reasoning, and ``TEXT``: what free text of the answer may be. Under a budget
    it cannot open reasoning itself.
    """
    if dialect.reasoning is None:
        rules.append(f"TEXT: {_ANY}")
        return ""
    start, end = REASONING_MARKERS[dialect.reasoning]
    rules += [_until("thought", spell(end))] if budget is None else _within(budget, end, spell(end))
    rules.append("SPACE: /[ \\n]{0,4}/")
    if opened or budget is None:
        rules.append(f"TEXT: {_ANY}")
    else:
        rules.append(f"TEXT: {_ANY} & ~OPENED\nOPENED: /\\s*/ {quote(start)} {_ANY}")
    if opened:
        return "thought SPACE"
    rules.append(f"reasoning: {spell(start)} thought SPACE")
    return "reasoning?"


def _within(budget: int, end: str, marker: str) -> list[str]:
    """Rules for reasoning of some tokens at most, up to its closing marker and with it."""
    text = _ANY if marker.startswith("<[") else f"/[^{re.escape(end[0])}]*/"
    return [f"thought: within {marker}", f"within[max_tokens={budget}]: WITHIN", f"WITHIN: {text}"]


def _until(name: str, marker: str) -> str:
    """A rule for any text up to a marker and with it."""
    lazy = "" if marker.startswith("<[") else "[lazy]"
    return f"{name}{lazy}: TEXT {marker}"


@dataclass(frozen=True, slots=True)
class _Calls:
    """The parts of a family's call format.

    Attributes:
        alone: nothing but calls; else text may stand before, between and after them.
    """

    functions: Sequence[CallableFunction]
    spell: Callable[[str], str]
    rules: list[str]
    alone: bool
    parallel: bool

    def item(self, before: str, after: str) -> str:
        """The rule of one call: ``before`` has the place of its name."""
        forms = [
            f"{quote(before.replace('NAME', json.dumps(f.name)))} @arguments_{i} {quote(after)}"
            for i, f in enumerate(self.functions)
        ]
        self.rules.append(f"item: {' | '.join(forms)}")
        return "item"

    def many(self, one: str, between: str) -> str:
        return f"{one} ({between} {one})*" if self.parallel else one

    def marked(self, marker: str, rest: str, between: str, repeats: bool = True) -> str:
        """Calls that each begin with a marker."""
        many = self.parallel and repeats
        if self.alone:
            one = f"{self.spell(marker)} {rest}"
            return f"{one} ({between} {one})*" if many else one
        self.rules.append(_until("lead", self.spell(marker)))
        return f"(lead {rest})* TEXT" if many else f"TEXT | lead {rest}"


def _hermes(calls: _Calls) -> str:
    (close,) = TOOL_PARSERS["hermes"].inner
    item = calls.item('{"name": NAME, "arguments": ', "}")
    return calls.marked("<tool_call>", f'"\\n" {item} "\\n" {calls.spell(close)}', '"\\n"')


def _llama3(calls: _Calls) -> str:
    item = calls.many(calls.item('{"name": NAME, "parameters": ', "}"), '"; "')
    if calls.alone:
        return item
    calls.rules.append("PLAIN: /[^{](?s:.*)/ & TEXT")
    return f"{item} | PLAIN"


def _mistral(calls: _Calls) -> str:
    arguments = calls.spell("[ARGS]")
    if arguments.startswith("<["):
        forms = [
            f"{quote(f.name)} {arguments} @arguments_{i}" for i, f in enumerate(calls.functions)
        ]
        calls.rules.append(f"item: {' | '.join(forms)}")
        return calls.marked("[TOOL_CALLS]", "item", "")
    item = calls.many(calls.item('{"name": NAME, "arguments": ', "}"), '", "')
    return calls.marked("[TOOL_CALLS]", f'"[" {item} "]"', "", repeats=False)


_CALLS: dict[str, Callable[[_Calls], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}
