"""Prints the page of parameters: ``python tools/parameters_page.py > docs/parameters.md``."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from msgspec import Struct

from weft.api.bodies import DetokenizeBody, TokenizeBody
from weft.api.decoding import parts_of
from weft.api.endpoints import ENDPOINTS
from weft.api.message_body import (
    Document,
    SearchResult,
    Text,
    Thinking,
    ToolReference,
    ToolResult,
    ToolUse,
)
from weft.api.ollama import Options
from weft.api.ollama_models import ModelBody
from weft.api.response_items import (
    CallItem,
    CustomCallItem,
    LoadedToolsItem,
    MessageItem,
    ReasoningItem,
    ResultItem,
    SearchCallItem,
    TextPart,
)
from weft.api.response_tools import CustomTool, FunctionTool, NamespaceTool, SearchTool
from weft.api.rules import Refused, rules_of

HEAD = """# Parameters of requests

How weft treats each parameter, from the declarations that decode requests
(`python tools/parameters_page.py > docs/parameters.md`).

- **Honoured**: it does what the API's description says, or the answer is an error that names it.
- **Ignored**: advisory, inert, or a client's own bookkeeping. It is accepted, and the answer names
  it in the header `x-weft-ignored` (`messages[].cache_control`); the log has a debug line. With
  `--strict` it is refused.
- **Refused**: honouring it would change the answer, and weft does not honour it: status 400, and
  the message says why.

`null` and the values in the last column have no effect and are always accepted. A key that is in
no table is refused at the top of a body, and ignored within the structures marked with * and in
all of Ollama's bodies.
`max_tokens`, by any of its names, is lowered to what the prompt leaves of the context and then
named as ignored; the prompt alone must fit. Tools that the client does not run are ignored: the
model does not see them. Items of `/v1/responses` that belong to tools which a provider runs
(`web_search_call` and the like), and `compaction`, are ignored: they are left out of the
conversation.
"""

Kinds = tuple[tuple[str, type[Struct]], ...]

BLOCKS: Kinds = (
    ("block `text`", Text),
    ("block `tool_use`", ToolUse),
    ("block `tool_result`", ToolResult),
    ("block `thinking`", Thinking),
    ("block `document`", Document),
    ("block `search_result`", SearchResult),
    ("block `tool_reference`", ToolReference),
)
ITEMS: Kinds = (
    ("item `message`", MessageItem),
    ("item `function_call`", CallItem),
    ("item `custom_tool_call`", CustomCallItem),
    ("items of outputs", ResultItem),
    ("item `tool_search_call`", SearchCallItem),
    ("items `tool_search_output` and `additional_tools`", LoadedToolsItem),
    ("item `reasoning`", ReasoningItem),
    ("parts of text", TextPart),
    ("tool `function`", FunctionTool),
    ("tool `custom`", CustomTool),
    ("tool `namespace`", NamespaceTool),
    ("tool `tool_search`", SearchTool),
)
NAMED = ("block", "item", "object", "part", "tool `")  # paths that say what they are themselves
OPTIONS: Kinds = (("object `options`", Options),)
INSIDE = {  # structures that stand in lists of several kinds
    "/v1/responses": ITEMS,
    "/v1/messages": BLOCKS,
    "/api/chat": OPTIONS,
    "/api/generate": OPTIONS,
}
BODIES = {row.path: row.body for row in ENDPOINTS.values() if row.body is not None}
BODIES |= {"/api/show": ModelBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}


def structures(kind: type[Struct], path: str = "") -> Iterator[tuple[str, type[Struct]]]:
    """A body and every structure in it, each with where it stands."""
    yield path, kind
    for name, part in parts_of(kind).items():
        inner = f"{path}.{name}" if path else name
        yield from structures(part.kind, f"{inner}[]" if part.in_list else inner)


def section(title: str, body: type[Struct], more: Kinds) -> str:
    """One endpoint."""
    lines = [f"\n## `{title}`\n", "Honoured:\n"]
    rows = []
    for path, kind in [*structures(body), *more]:
        rules = rules_of(kind)
        honoured = [name for name in kind.__struct_fields__ if name not in rules]
        mark = "*" if getattr(kind, "OPEN", False) else ""
        named = path.startswith(NAMED)
        where = f"{path if named else f'`{path}`'}{mark}"
        shown = ", ".join(f"`{name}`" for name in honoured)
        lines.append(f"- {shown if kind is body else f'{where}: {shown}'}")
        for name, rule in rules.items():
            fate = "refused" if isinstance(rule, Refused) else "ignored"
            neutral = ", ".join(f"`{orjson.dumps(value).decode()}`" for value in rule.neutral)
            at = f"`{name}`" if kind is body else f"`{name}` of {where.removesuffix('*')}"
            rows.append(f"| {at} | {fate} | {rule.reason} | {neutral} |")
    if rows:
        lines += ["", "| parameter | | why | asks for nothing |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    sections = [
        section(f"POST {path}", body, INSIDE.get(path, ())) for path, body in BODIES.items()
    ]
    return HEAD + "".join(sections)


if __name__ == "__main__":
    print(page(), end="")
