"""A model's markup for reasoning and tool calls: what is set, or what its template writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from weft.text.assistant import AssistantParser, TurnParser
from weft.text.callbodies import Schemas
from weft.text.forms import CALL_FORMS, EFFORTS, MARK, REASONING_FORMS, CallForm, ReasoningForm
from weft.text.harmony import MARKERS as HARMONY_MARKERS
from weft.text.harmony import HarmonyParser
from weft.text.toolcalls import CallParser

if TYPE_CHECKING:  # the settings of a server name its parsers; its supervisor has no tokeniser
    from weft.text.tokenizer import Tokenizer

_OPENED_TOKENS = 16
_LEVELS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The markup of one model.

    Attributes:
        tools: None where no form of calls is known.
        reasoning: None where nothing is marked.
        text_arguments: the template wants arguments of earlier calls as JSON text, not as objects.
    """

    tools: CallForm | None = None
    reasoning: ReasoningForm | None = None
    text_arguments: bool = False

    @classmethod
    def named(cls, tools: str | None = None, reasoning: str | None = None) -> Dialect:
        """The dialect of forms that have names."""
        return cls(
            None if tools is None else CALL_FORMS[tools],
            None if reasoning is None else REASONING_FORMS[reasoning],
        )

    @property
    def harmony(self) -> bool:
        """Whether turns are messages on channels."""
        calls = self.tools is not None and self.tools.body == "harmony"
        return calls or (self.reasoning is not None and self.reasoning.harmony)

    def effort(self, wanted: str) -> str:
        """An effort of reasoning as the model's template knows it: harmony has three levels."""
        return _LEVELS.get(wanted, wanted) if self.harmony and wanted not in EFFORTS else wanted

    def texts(self, *, calls: bool) -> list[str]:
        """All markup that a turn may have."""
        found = list(HARMONY_MARKERS) if self.harmony else []
        if self.reasoning is not None:
            found += [self.reasoning.start, self.reasoning.end]
        if calls and self.tools is not None:
            found += self.tools.texts()
        return found

    def marker_ids(self, tokenizer: Tokenizer, *, calls: bool) -> dict[int, str]:
        """Tokens that are markers, with their texts.

        The text has to show them for a parser to see them, and to tell them from text that spells
        them where grammars do, too.
        """
        pieces = [p for text in self.texts(calls=calls) for p in tokenizer.scanner.split(text)]
        tokens = {piece.token for piece in pieces if piece.token is not None}
        return {t.token_id: t.content for t in tokens if t.is_apart}

    def opens_reasoning(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether a prompt has opened the reasoning already, so that the turn starts inside."""
        if self.reasoning is None or self.harmony:
            return False
        text = tokenizer.decode(prompt[-_OPENED_TOKENS:], skip_special_tokens=False)
        return text.rstrip().endswith(self.reasoning.start.rstrip())


@dataclass(frozen=True, slots=True)
class Reading:
    """How to parse the text of one turn.

    Attributes:
        tools: parameters of the functions that may be called, by name; None looks for no calls.
        opened: the prompt has opened the reasoning, so that the turn starts inside.
        markers: tokens that are markers, with their texts; ``MARK`` stands before each.
        with_reasoning: whether reasoning is part of the answer.
        forced: the answer is calls and nothing else.
    """

    dialect: Dialect
    tools: Schemas | None = None
    opened: bool = False
    markers: Mapping[int, str] = field(default_factory=dict)
    with_reasoning: bool = True
    forced: bool = False

    @property
    def reads(self) -> bool:
        """Whether there is anything to find but content."""
        return self.dialect.harmony or self.dialect.reasoning is not None or self.tools is not None

    def parser(self) -> TurnParser:
        """Return the parser of one turn."""
        form, reasoning = self.dialect.tools, self.dialect.reasoning
        if self.tools is None:
            form = None
        tokens = frozenset(self.markers.values())
        if self.dialect.harmony:
            thinks = reasoning is not None
            return HarmonyParser(form, tokens, thinks=thinks, forced=self.forced)
        if form is not None and tokens:
            form = _with_marks(form, tokens)
        calls = CallParser(form, self.tools)
        if reasoning is None:
            return AssistantParser(None, calls, calls, forced=self.forced)
        around = (reasoning.start.strip(), reasoning.end.strip())
        thought = CallParser(form, self.tools, unmarked=False)
        return AssistantParser(around, calls, thought, opened=self.opened, forced=self.forced)


@lru_cache(64)
def _with_marks(form: CallForm, tokens: frozenset[str]) -> CallForm:
    """A form with marked tokens, and without, as models spell markers by other tokens, too."""
    spelled = (replace(form, others=()), *form.others)
    form = form.rewritten(lambda text: marked(text, tokens))
    return replace(form, others=(*form.others, *spelled))


def marked(text: str, tokens: Iterable[str]) -> str:
    """A text with ``MARK`` before each token in it."""
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return re.sub(pattern, lambda found: MARK + found[0], text) if pattern else text
