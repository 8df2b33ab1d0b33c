"""A model's markup for reasoning and tool calls: detected from its chat template, or set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.text.assistant import AssistantParser, ReasoningParser
from weft.text.toolcalls import CallParser, HermesParser, Llama3Parser, MistralParser

if TYPE_CHECKING:  # the settings of a server name its parsers; its supervisor has no tokeniser
    from weft.text.template import ChatTemplate
    from weft.text.tokenizer import Tokenizer

TOOL_PARSERS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}
REASONING_MARKERS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
_OTHER_CALLS = ("<function=", "<arg_key>")  # inside <tool_call>, by Qwen3-Coder and GLM
_OPENED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Dialect:
    """The markup of one model.

    Attributes:
        tools: a key of ``TOOL_PARSERS``, or None where no form of calls is known.
        reasoning: a key of ``REASONING_MARKERS``, or None where nothing is marked.
    """

    tools: str | None = None
    reasoning: str | None = None

    def marker_ids(self, tokenizer: Tokenizer, *, calls: bool) -> frozenset[int]:
        """Control tokens that are markers: the text has to show them for a parser to see them."""
        markers: tuple[str, ...] = REASONING_MARKERS.get(self.reasoning or "", ())
        if calls and self.tools is not None:
            markers += TOOL_PARSERS[self.tools].markers + TOOL_PARSERS[self.tools].inner
        ids = {tokenizer.reference.token_to_id(marker) for marker in markers}
        return frozenset(i for i in ids if i is not None) & tokenizer.special_ids

    def opens_reasoning(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether a prompt has opened the reasoning already, so that the turn starts inside."""
        if self.reasoning is None:
            return False
        text = tokenizer.decode(prompt[-_OPENED_TOKENS:], skip_special_tokens=False)
        return text.rstrip().endswith(REASONING_MARKERS[self.reasoning][0])


@dataclass(frozen=True, slots=True)
class Reading:
    """How to parse the text of one turn.

    Attributes:
        tools: names of the functions that may be called; None looks for no calls.
        opened: the prompt has opened the reasoning, so that the turn starts inside.
        markers: control tokens that the text has to show.
        with_reasoning: whether reasoning is part of the answer.
        forced: the answer is calls and nothing else.
    """

    dialect: Dialect
    tools: frozenset[str] | None = None
    opened: bool = False
    markers: frozenset[int] = frozenset()
    with_reasoning: bool = True
    forced: bool = False

    @property
    def reads(self) -> bool:
        """Whether there is anything to find but content."""
        return self.dialect.reasoning is not None or self.tools is not None

    def parser(self) -> AssistantParser:
        """Return the parser of one turn."""
        reasoning = calls = None
        if self.dialect.reasoning is not None:
            markers = REASONING_MARKERS[self.dialect.reasoning]
            reasoning = ReasoningParser(markers, opened=self.opened)
        if self.dialect.tools is not None and self.tools is not None:
            calls = TOOL_PARSERS[self.dialect.tools](self.tools)
        return AssistantParser(reasoning, calls, forced=self.forced)


def choose_dialect(
    template: ChatTemplate | None, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> Dialect:
    """Return the dialect of a template, or what is set (a known name, or none) for ``auto``."""
    text = "\0".join(template.sources.values()) if template is not None else ""
    return Dialect(
        _tools_of(text) if tool_parser == "auto" else _named(tool_parser),
        _reasoning_of(text) if reasoning_parser == "auto" else _named(reasoning_parser),
    )


def _named(parser: str) -> str | None:
    return None if parser == "none" else parser


def _tools_of(text: str) -> str | None:
    if "tools" not in text:
        return None
    if "[TOOL_CALLS]" in text or "[AVAILABLE_TOOLS]" in text:
        return "mistral"
    if "<tool_call>" in text:
        return None if any(form in text for form in _OTHER_CALLS) else "hermes"
    return "llama3" if "<|start_header_id|>" in text or "<|python_tag|>" in text else None


def _reasoning_of(text: str) -> str | None:
    for name, (_, close) in REASONING_MARKERS.items():
        if close in text:
            return name
    return None
