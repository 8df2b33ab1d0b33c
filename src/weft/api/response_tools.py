"""Tools of ``/v1/responses`` as functions of a chat, and how calls of them are shown.

A chat has one list of functions. A tool of a namespace gets a name that has both, and the search
for tools that a client runs is a function, too. Tools come with a body, or later as items of the
conversation: as the result of such a search, or as ``additional_tools``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from weft.api.bodies import MAX_TOOLS, Name
from weft.api.decoding import decode_body, kind_of
from weft.api.errors import UnsupportedParameterError
from weft.api.jobs import ShownCall
from weft.api.rules import MAX_SHOWN_CHARS, NULL, Ignored, Notes
from weft.core.errors import ParameterError

SEARCH = "tool_search"  # the function that stands for a client's search
SEARCH_PARAMETERS = b'{"type":"object","properties":{"query":{"type":"string"}}}'
LOADING = ("tool_search_output", "additional_tools")  # items that bring tools
EVERY_TOOL = Ignored("the model sees every tool", (False,))
DIRECT = Ignored("the model calls tools itself", (["direct"],))


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Name
    parameters: Raw = NULL
    strict: bool | None = None
    description: str | None = None
    output_schema: Annotated[Raw, Ignored("results are read as text")] = NULL
    defer_loading: Annotated[Raw, EVERY_TOOL] = NULL
    allowed_callers: Annotated[Raw, DIRECT] = NULL

    OPEN: ClassVar[bool] = True


class ResponseCustomFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that takes a text instead of arguments."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: ResponseCustomFormat | None = None
    defer_loading: Annotated[Raw, EVERY_TOOL] = NULL
    allowed_callers: Annotated[Raw, DIRECT] = NULL

    OPEN: ClassVar[bool] = True


class NamespaceTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """Tools under a common name, such as those of one MCP server.

    Attributes:
        description: of all its tools; the model sees it with the first one.
    """

    type: Literal["namespace"]
    name: Name
    tools: Annotated[list[Raw], Meta(max_length=MAX_TOOLS)]
    description: str | None = None

    OPEN: ClassVar[bool] = True


class SearchTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A search for tools; by the client, or by a server, which is left out."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: Raw = NULL

    OPEN: ClassVar[bool] = True


def function_name(namespace: str | None, name: str) -> str:
    """The function that stands for a tool: ``mcp__x`` and ``read`` make ``mcp__x__read``."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def loaded_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """The functions that stand for the tools of an item."""
    names = []
    for tool in tools:
        if tool.get("type") == "namespace":
            names += [function_name(tool["name"], inner["name"]) for inner in tool["tools"]]
        elif tool.get("type") in ("function", "custom"):
            names.append(tool["name"])
    return names


@dataclass(slots=True)
class ResponseTools:
    """The tools of one response.

    Attributes:
        notes: take what is ignored.
        functions: tools as a chat has them.
        paths: where the body has each of them.
        shown: how calls of a function are shown, where its name or its kind is another one.
    """

    notes: Notes
    functions: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    shown: dict[str, ShownCall] = field(default_factory=dict)

    def read(self, tools: Seq[Raw], path: str) -> None:
        """Add the tools of a list; those that a provider runs are ignored.

        Raises:
            ParameterError: one is malformed; the error names it.
        """
        for index, raw in enumerate(tools):
            self._add(raw, f"{path}[{index}]", None, "")

    def load(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Add the tools that items bring, each once; what is ignored in them is known already."""
        for item in items:
            if item["type"] not in LOADING:
                continue
            more = ResponseTools(Notes())
            raws = [Raw(msgspec.json.encode(tool)) for tool in item["tools"]]
            more.read(raws, f"input[]({item['type']}).tools")
            known = {self._name(function) for function in self.functions}
            for function, path in zip(more.functions, more.paths, strict=True):
                if (name := self._name(function)) in known:
                    continue
                self.functions.append(function)
                self.paths.append(path)
                if name in more.shown:
                    self.shown[name] = more.shown[name]

    def names(self) -> dict[str, str]:
        """Places in the list of the chat -> places in the body."""
        return {f"tools[{index}]": path for index, path in enumerate(self.paths)}

    def function(self, name: str, namespace: str | None = None) -> str:
        """The function that a choice names; a namespace may be left out where one has the name."""
        if namespace is not None or any(self._name(one) == name for one in self.functions):
            return function_name(namespace, name)
        found = [function for function, call in self.shown.items() if call.name == name]
        return found[0] if len(found) == 1 else name

    @staticmethod
    def _name(function: Mapping[str, Any]) -> str:
        return str(function[function["type"]]["name"])

    def _add(self, raw: Raw, path: str, namespace: str | None, about: str) -> None:
        kind = kind_of(raw, path)
        if kind == "function":
            self._function(decode_body(FunctionTool, raw, path, self.notes), path, namespace, about)
        elif kind == "custom":
            self._custom(decode_body(CustomTool, raw, path, self.notes), path, namespace, about)
        elif kind == "namespace" and namespace is None:
            group = decode_body(NamespaceTool, raw, path, self.notes)
            about = group.description or ""
            for index, inner in enumerate(group.tools):
                self._add(inner, f"{path}.tools[{index}]", group.name, "" if index else about)
        elif namespace is not None:
            raise UnsupportedParameterError(
                f"{path}.type", " A namespace has tools of the types function and custom."
            )
        elif kind == "tool_search" and self._is_clients(raw, path):
            return
        else:
            self.notes.ignore(f"{path}({kind[:MAX_SHOWN_CHARS]})")

    def _is_clients(self, raw: Raw, path: str) -> bool:
        """Add a search if the client runs it."""
        tool = decode_body(SearchTool, raw, path, self.notes)
        if tool.execution != "client":
            return False
        has_none = bytes(tool.parameters) == b"null"
        parameters = Raw(SEARCH_PARAMETERS) if has_none else tool.parameters
        given = {"name": SEARCH, "parameters": parameters}
        self._append("function", given, path, tool.description, "")
        self.shown[SEARCH] = ShownCall("tool_search_call", SEARCH)
        return True

    def _function(self, tool: FunctionTool, path: str, namespace: str | None, about: str) -> None:
        given: dict[str, Any] = {"name": function_name(namespace, tool.name)}
        if tool.parameters is not NULL:
            given["parameters"] = tool.parameters
        if tool.strict is not None:
            given["strict"] = tool.strict
        self._append("function", given, path, tool.description, about)
        if namespace is not None:
            self.shown[given["name"]] = ShownCall("function_call", tool.name, namespace)

    def _custom(self, tool: CustomTool, path: str, namespace: str | None, about: str) -> None:
        given: dict[str, Any] = {"name": function_name(namespace, tool.name)}
        form = tool.format
        if form is not None and form.type == "grammar":
            grammar = {"syntax": form.syntax, "definition": form.definition}
            given["format"] = {"type": "grammar", "grammar": grammar}
        self._append("custom", given, path, tool.description, about)
        if namespace is not None:
            self.shown[given["name"]] = ShownCall("custom_tool_call", tool.name, namespace)

    def _append(
        self, kind: str, given: dict[str, Any], path: str, description: str | None, about: str
    ) -> None:
        texts = [text for text in (about, description) if text]
        if texts:
            given["description"] = "\n\n".join(texts)
        self.functions.append({"type": kind, kind: given})
        self.paths.append(path)


def read_loaded(given: Seq[Raw], path: str, notes: Notes) -> list[Any]:
    """The tools that an item brings, checked. Raises ParameterError for a malformed one."""
    ResponseTools(notes).read(given, path)
    try:
        return [msgspec.json.decode(raw) for raw in given]
    except (msgspec.DecodeError, RecursionError):  # numbers beyond float64, which a body may have
        raise ParameterError(f"'{path}' cannot be read.", param=path) from None
