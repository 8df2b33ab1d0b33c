"""Grammars of whole turns: tool calls in a model's form, reasoning, or another body."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.errors import GrammarError
from weft.text.argumentgrammar import ANY, ArgumentRules, CallableFunction, Spell, until
from weft.text.dialect import Dialect
from weft.text.forms import CallForm
from weft.text.grammar import quote
from weft.text.tokenizer import Tokenizer
from weft.text.toolcalls import MARKER

__all__ = ["CallableFunction", "turn_grammar"]

_NUMBER = "/[0-9]{1,3}/"


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
        GrammarError: there are functions, but the model has no form of calls; or a schema cannot
            be followed in the form.
    """
    if functions and dialect.tools is None:
        raise GrammarError("no form of tool calls is known for this model")
    turn = _Turn(dialect, tokenizer, functions, forced, parallel, body is not None)
    if body is not None and not forced:
        turn.rules.add("body", body)
    answer = turn.harmony() if dialect.harmony else turn.answer()
    start = "" if dialect.harmony else turn.reasoning(opened, thinking_budget)
    if dialect.harmony:
        turn.channels(thinking_budget)
    rules = [f"start: {start} answer", f"answer: {answer}", *turn.rules.lines]
    grammars = [{"lark_grammar": "\n".join(rules)}, *turn.rules.grammars]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def speller(tokenizer: Tokenizer) -> Spell:
    """How a grammar spells markup: tokens by id, other text as it is, ``#`` as a number."""

    def spell(text: str) -> str:
        parts: list[str] = []
        for piece in tokenizer.scanner.split(text):
            if piece.token is not None and piece.token.is_apart:
                parts.append(f"<[{piece.token.token_id}]>")
                continue
            for i, plain in enumerate(piece.text.split("#")):
                parts += [_NUMBER] if i else []
                parts += [quote(plain)] if plain else []
        return " ".join(parts)

    return spell


@dataclass(slots=True)
class _Turn:
    """The parts of a turn's grammar.

    Attributes:
        has_body: a grammar for the answer is set, so that no free text may come.
    """

    dialect: Dialect
    tokenizer: Tokenizer
    functions: Sequence[CallableFunction]
    forced: bool
    parallel: bool
    has_body: bool
    spell: Spell = None  # type: ignore[assignment]
    rules: ArgumentRules = None  # type: ignore[assignment]
    form: CallForm | None = None

    def __post_init__(self) -> None:
        self.spell = speller(self.tokenizer)
        self.form = self._written()
        self.rules = ArgumentRules(self.form or CallForm(), self.spell)

    def _written(self) -> CallForm | None:
        """The form to write: where its markers are no tokens of this model, another one."""
        form = self.dialect.tools
        if form is None or form.unmarked or form.body != "json" or not form.others:
            return form
        return form if self.spell(form.name[1]).startswith("<[") else form.others[0]

    @property
    def _alone(self) -> bool:
        """Nothing but calls; else text may stand before, between and after them."""
        return self.forced or self.has_body

    def answer(self) -> str:
        """The rule for what follows the reasoning."""
        calls = self._calls() if self.functions else ""
        if self.has_body and not self.forced:
            return f"{calls} | @body" if calls else "@body"
        return calls or "TEXT"

    def _calls(self) -> str:
        form, spell = self.form, self.spell
        assert form is not None
        marker = MARKER.match(form.opening)
        first = marker[0] if marker and not form.unmarked else ""
        between = spell(form.between)
        if form.section[0]:
            item = self.rules.items(self.functions, form.call[0])
            many = item
            if self.parallel:  # what precedes a call is one text, told from the section's end
                following = self.rules.items(self.functions, form.between + form.call[0], "next")
                many = f"{item} {following}*"
            rest = f"{spell(form.section[0][len(first) :])} {many} {spell(form.section[1])}"
            return self._marked(first, rest, "", repeats=False)
        opening = form.call[0][len(first) :] if form.call[0] else ""
        item = self.rules.items(self.functions, opening)
        return self._marked(first, item, between, repeats=self.parallel)

    def _marked(self, marker: str, rest: str, between: str, *, repeats: bool) -> str:
        """Calls that each begin with a marker; without one, only at the start."""
        form = self.form
        assert form is not None
        if self._alone or not marker:
            one = f"{self.spell(marker)} {rest}"
            calls = f"{one} ({between} {one})*" if repeats else one
            if self._alone:
                return calls
            start = re.escape((form.section[0] or form.name[0])[0])
            self.rules.lines.append(f"PLAIN: /[^{start}](?s:.*)/ & TEXT")
            return f"{calls} | PLAIN"
        self.rules.lines.append(until("lead", self.spell(marker)))
        return f"(lead {rest})* TEXT" if repeats else f"TEXT | lead {rest}"

    def reasoning(self, opened: bool, budget: int | None) -> str:
        """The rule for text before the answer; empty where the model marks no reasoning.

        Adds the rules of reasoning, and ``TEXT``: what free text of the answer may be. Under a
        budget it cannot open reasoning itself.
        """
        lines, form = self.rules.lines, self.dialect.reasoning
        if form is None:
            lines.append(f"TEXT: {ANY}")
            return ""
        start, end = form.start.strip(), form.end.strip()
        self._thought(end, budget)
        lines.append("SPACE: /[ \\n]{0,4}/")
        if opened or budget is None:
            lines.append(f"TEXT: {ANY}")
        else:
            lines.append(f"TEXT: {ANY} & ~OPENED\nOPENED: /\\s*/ {quote(start)} {ANY}")
        if opened:
            return "thought SPACE"
        lines.append(f"reasoning: {self.spell(start)} thought SPACE")
        return "reasoning?"

    def _thought(self, end: str, budget: int | None) -> None:
        """The rule of reasoning up to its closing marker; a call cannot begin within it."""
        lines, marker = self.rules.lines, self.spell(end)
        form = self.form if self.functions else None
        opening = None if form is None or form.unmarked else MARKER.match(form.opening)
        calls = "" if opening is None else f" & ~CALLED\nCALLED: {ANY} {quote(opening[0])} {ANY}"
        if budget is None:
            lines.append(f"THOUGHT: {ANY}{calls}")
            lines.append(until("thought", marker, "THOUGHT"))
            return
        text = ANY if marker.startswith("<[") else f"/[^{re.escape(end[0])}]*/"
        lines.append(f"thought: within {marker}\nwithin[max_tokens={budget}]: WITHIN")
        lines.append(f"WITHIN: {text}{calls}")

    def harmony(self) -> str:
        """The rule for a turn of messages: reasoning, then a call or the final message.

        The end of a message ends the sequence, so there is one call at most.
        """
        spell = self.spell
        final = f"{spell('<|channel|>final<|message|>')} {'@body' if self.has_body else 'TEXT'}"
        calls = ""
        if self.functions:
            form = self.form
            assert form is not None
            calls = f"thinking {self.rules.items(self.functions, form.call[0], closed=False)}"
        if self.forced:
            return calls
        return f"{calls} | thinking {final}" if calls else f"thinking {final}"

    def channels(self, budget: int | None) -> None:
        """Rules for messages before the last one: reasoning, and what is said before a call."""
        spell, lines = self.spell, self.rules.lines
        self._thought("<|end|>", budget)
        again = spell("<|start|>assistant")
        said = (
            "" if self._alone else f" ({spell('<|channel|>commentary<|message|>')} said {again})*"
        )
        lines.append(
            f"thinking: ({spell('<|channel|>analysis<|message|>')} thought {again})?{said}"
        )
        if said:
            lines.append(until("said", spell("<|end|>")))
        lines.append(f"TEXT: {ANY}")
