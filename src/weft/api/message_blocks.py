"""Reads the blocks in the contents of ``/v1/messages``: their texts, and what they do to tools."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from weft.api.bodies import IMAGE, Parts
from weft.api.decoding import decode_body, kind_of
from weft.api.errors import UnsupportedParameterError
from weft.api.message_body import (
    Compaction,
    Content,
    Document,
    DocumentSource,
    ImageBlock,
    MessageTool,
    Other,
    SearchResult,
    Text,
    Thinking,
    ToolChange,
    ToolReference,
    ToolResult,
    ToolUse,
)
from weft.api.rules import Notes

Kinds = Mapping[str, type[Struct]]
Placed = tuple[MessageTool, str]  # and where the request has it

TEXT_BLOCKS: Kinds = {"text": Text}
SYSTEM_BLOCKS: Kinds = {
    **TEXT_BLOCKS,
    "tool_addition": ToolChange,
    "tool_removal": ToolChange,
}
USER_BLOCKS: Kinds = {
    **TEXT_BLOCKS,
    "image": ImageBlock,
    "tool_result": ToolResult,
    "document": Document,
    "search_result": SearchResult,
    "compaction": Compaction,
}
RESULT_BLOCKS: Kinds = {
    **TEXT_BLOCKS,
    "image": Other,
    "document": Document,
    "search_result": SearchResult,
    "tool_reference": ToolReference,
}
ASSISTANT_BLOCKS: Kinds = {
    **TEXT_BLOCKS,
    "compaction": Compaction,
    "thinking": Thinking,
    "tool_use": ToolUse,
}
# Of tools that Anthropic runs, reasoning that only Anthropic can read, and marks of its servers.
PROVIDERS_BLOCKS = (
    "redacted_thinking",
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_listing",
    "_tool_result",
    "container_upload",
    "fallback",
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Reads the blocks of contents; ``notes`` take what is ignored in them.

    Attributes:
        referenced: names of tools that results of tools refer to, or that messages add.
        removed: names of tools that messages remove.
        defined: tools that messages define, the last one of each name.
    """

    notes: Notes
    referenced: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    defined: dict[str, Placed] = field(default_factory=dict)

    def text(self, content: Content, path: str) -> str:
        """The text of what may have blocks of text only."""
        if isinstance(content, str):
            return content
        return "\n".join(block.text for block, _ in self.read(content, path, TEXT_BLOCKS))

    def changed(self, content: Content, path: str) -> str:
        """The text of a system message, which may add and remove tools."""
        if isinstance(content, str):
            return content
        found = self.read(content, path, SYSTEM_BLOCKS)
        return "\n".join(filter(None, (self.shown(block, where) for block, where in found)))

    def _change(self, change: ToolChange, path: str) -> str:
        """Take a change of the tools in; return what the model reads of it."""
        tool = change.tool
        if change.type == "tool_addition" and tool.definition is not None:
            name = tool.definition.name
            where = f"{path}.tool.definition"
            self.defined[name or where] = (tool.definition, where)
        else:
            name = tool.name if tool.type == "tool_reference" else None
        if name is None:  # a tool that Anthropic calls
            self.notes.ignore(path)
            return ""
        if change.type == "tool_removal":
            self.removed.add(name)
            self.referenced.discard(name)
            return f"[The tool {name} can no longer be called.]"
        self.removed.discard(name)
        self.referenced.add(name)
        return f"[The tool {name} can be called.]"

    def result(self, content: Content, path: str) -> str:
        """The text of a tool's result; an image has a text in its place."""
        if isinstance(content, str):
            return content
        found = self.read(content, path, RESULT_BLOCKS)
        return "\n".join(self.shown(block, where) for block, where in found)

    def read(
        self, content: Parts, path: str, kinds: Kinds, ignored: Seq[str] = ()
    ) -> list[tuple[Any, str]]:
        """The decoded blocks of a content, each with its path.

        Raises:
            UnsupportedParameterError: a block is of a type that is neither known nor ignored.
        """
        found = []
        for index, raw in enumerate(content):
            where = f"{path}[{index}]"
            kind = kind_of(raw, where)
            if kind in kinds:
                found.append((decode_body(kinds[kind], raw, where, self.notes), where))
            elif kind.endswith(tuple(ignored)):
                self.notes.ignore(f"{where}({kind})")
            else:
                raise UnsupportedParameterError(
                    f"{where}.type",
                    f" A block of type {kind[:100]!r} is not supported here; send "
                    f"{', '.join(kinds)}.",
                )
        return found

    def shown(self, block: Struct, path: str) -> str:
        """The text that the model sees for a block."""
        if isinstance(block, Text):
            return block.text
        if isinstance(block, ToolChange):
            return self._change(block, path)
        if isinstance(block, Compaction):
            return block.content or ""
        if isinstance(block, ToolReference):
            self.referenced.add(block.tool_name)
            return f"[The tool {block.tool_name} can be called.]"
        if isinstance(block, SearchResult):
            text = self.text(block.content, f"{path}.content")
            return f"{block.title} ({block.source})\n{text}"
        if isinstance(block, Document):
            heads = [line for line in (block.title, block.context) if line]
            return "\n".join([*heads, self._source(block.source, f"{path}.source")])
        self.notes.ignore(path)
        return IMAGE

    def _source(self, source: DocumentSource, path: str) -> str:
        if source.type == "text" and source.data is not None:
            return source.data
        if source.type == "content" and source.content is not None:
            return self.text(source.content, f"{path}.content")
        raise UnsupportedParameterError(
            f"{path}.type", " Only documents of plain text can be read; send the text."
        )
