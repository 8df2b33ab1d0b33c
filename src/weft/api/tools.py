"""Tools of a chat: those in the template, those that may be called, and the grammar for calls."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from weft.api.bodies import ChatBody, Function, GrammarText, Tool, ToolChoice, ToolRef
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder
from weft.api.rules import MAX_SHOWN_CHARS, NULL, Notes
from weft.api.structured import Constraint, blaming, raw_text
from weft.core.errors import ParameterError
from weft.text.argumentgrammar import CallableFunction as GrammarFunction
from weft.text.callgrammar import turn_grammar
from weft.text.customcalls import PARAMETERS
from weft.text.dialect import Reading
from weft.text.grammar import (
    Whitespace,
    custom_grammar,
    custom_schema,
    json_object_grammar,
    json_schema_grammar,
)

NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that the model sees, as a function.

    Attributes:
        path: where the request has it.
        format: what the text for a custom tool is to follow; None where nothing is set.
    """

    path: str
    function: Function
    custom: bool = False
    format: GrammarText | None = None

    @property
    def strict(self) -> bool:
        """Whether calls that are not forced must satisfy a schema or format, too."""
        return bool(self.function.strict) or self.format is not None


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of a chat.

    Attributes:
        offered: all that the model sees.
        callable: indices of those that it may call.
        forced: at least one call must come.
        parallel: several calls may come.
        limited: something about the calls must be guaranteed.
    """

    offered: Seq[Offered]
    callable: Seq[int]
    forced: bool = False
    parallel: bool = True

    @property
    def limited(self) -> bool:
        return (
            self.forced
            or not self.parallel
            or len(self.callable) < len(self.offered)
            or any(self.offered[i].strict for i in self.callable)
        )

    @property
    def names(self) -> list[str]:
        return [one.function.name for one in self.offered]

    @property
    def custom(self) -> frozenset[str]:
        """Names of the tools that take a text."""
        return frozenset(one.function.name for one in self.offered if one.custom)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of each function's arguments, by its name."""
        return {
            one.function.name: plain.get("parameters") or {}
            for one, plain in zip(self.offered, map(_plain, self.offered), strict=True)
        }

    def shown(self) -> list[dict[str, Any]]:
        """The tools as templates take them."""
        return [{"type": "function", "function": _plain(one)} for one in self.offered]


def read_tools(body: ChatBody, builder: Builder, notes: Notes) -> Tools | None:
    """Return the tools of a body, None if there are none to call.

    Tools of types that the client does not call, such as searches that a provider runs, are
    ignored: the model does not see them.

    Raises:
        ParameterError: a tool or the choice is wrong.
        UnsupportedParameterError: the template shows no tools, or the format of calls is unknown.
    """
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise ParameterError(
            f"tool_choice must be none, auto, required or an object, not '{choice[:100]}'.",
            param="tool_choice",
        )
    tools = offered_tools(body.tools or (), notes)
    names = tools.names
    if not names:
        if choice not in (None, "none", "auto"):
            raise ParameterError(
                "tool_choice asks for a tool, but there are none that can be called.",
                param="tool_choice",
            )
        return None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ParameterError(f"'tools' has two tools with the name '{twice}'.", param="tools")
    if choice == "none":
        return None
    _check_model(builder)
    chosen, forced = names, choice == "required"
    if isinstance(choice, ToolChoice):
        chosen, forced = _chosen(choice)
    missing = [name for name in chosen if name not in names]
    if missing or not chosen:
        raise ParameterError(
            f"tool_choice names '{missing[0]}', which is no tool that can be called."
            if missing
            else "No tool is allowed.",
            param="tool_choice",
        )
    named = isinstance(choice, ToolChoice) and choice.allowed_tools is None
    parallel = body.parallel_tool_calls is not False and not named
    allowed = [names.index(name) for name in dict.fromkeys(chosen)]
    return Tools(tools.offered, allowed, forced, parallel)


def offered_tools(tools: Seq[Tool], notes: Notes) -> Tools:
    """All tools of a body that can be called. Raises ParameterError for a malformed one."""
    found = [_offered(tool, f"tools[{i}]", notes) for i, tool in enumerate(tools)]
    offered = [one for one in found if one is not None]
    return Tools(offered, range(len(offered)))


def constrain_turn(
    tools: Tools | None,
    body: Constraint | None,
    reading: Reading,
    builder: Builder,
    thinking_budget: int | None = None,
    whitespace: Whitespace = "compact",
) -> Constraint | None:
    """Return the constraint of a whole turn, None for free text.

    Args:
        thinking_budget: tokens of reasoning at most, where the model marks it.
        whitespace: of the arguments of calls.

    Raises:
        GrammarError: the schema of a function cannot be guaranteed.
    """
    budgeted = thinking_budget is not None and reading.dialect.reasoning is not None
    limited = tools is not None and (tools.limited or body is not None or budgeted)
    if not limited and body is None and not budgeted:
        return None
    if not limited and reading.dialect.reasoning is None and not reading.dialect.harmony:
        return body
    functions: list[GrammarFunction] = []
    if tools is not None and limited:
        functions = [_for_grammar(tools, i, whitespace) for i in tools.callable]
    with blaming("tools"):
        grammar = turn_grammar(
            reading.dialect,
            builder.tokenizer,
            functions,
            forced=tools is not None and tools.forced,
            parallel=tools is None or tools.parallel,
            body=None if body is None else body.grammar,
            opened=reading.opened,
            thinking_budget=thinking_budget,
        )
    if body is not None:
        return Constraint(grammar, body.param)
    return Constraint(grammar, "tools" if limited else "thinking_token_budget")


def _for_grammar(tools: Tools, index: int, whitespace: Whitespace) -> GrammarFunction:
    """A function with the grammar of its arguments.

    They satisfy its schema where a call is forced, or the function is strict; else they are an
    object.
    """
    one = tools.offered[index]
    function = one.function
    if not one.strict and not tools.forced:
        return GrammarFunction(function.name, json_object_grammar(whitespace))
    if one.format is not None:
        with blaming(f"{one.path}.custom.format.grammar"):
            given = {"syntax": one.format.syntax, "definition": one.format.definition}
            wanted = {"type": "grammar", **given}
            return GrammarFunction(function.name, custom_grammar(wanted), custom_schema(wanted))
    with blaming(f"{one.path}.function.parameters"):
        text = NO_ARGUMENTS if function.parameters is NULL else raw_text(function.parameters)
        grammar = json_schema_grammar(text, whitespace)
        return GrammarFunction(function.name, grammar, json.loads(text), whitespace)


def _offered(tool: Tool, path: str, notes: Notes) -> Offered | None:
    if tool.type == "custom":
        return _custom(tool, path)
    if tool.type != "function":
        notes.ignore(f"{path}({tool.type[:MAX_SHOWN_CHARS]})")
        return None
    if tool.function is None:
        raise MissingParameterError(f"{path}.function")
    function = tool.function
    try:
        parameters = msgspec.json.decode(function.parameters)
    except (msgspec.DecodeError, UnicodeDecodeError):
        parameters = ""
    if parameters is not None and not isinstance(parameters, dict):
        param = f"{path}.function.parameters"
        raise ParameterError(f"'{param}' must be a JSON Schema.", param=param)
    return Offered(path, function)


def _custom(tool: Tool, path: str) -> Offered:
    if tool.custom is None:
        raise MissingParameterError(f"{path}.custom")
    given, text = tool.custom, None
    if given.format is not None and given.format.type == "grammar":
        text = given.format.grammar
        if text is None:
            raise MissingParameterError(f"{path}.custom.format.grammar")
    function = Function(name=given.name, description=given.description, parameters=Raw(PARAMETERS))
    return Offered(path, function, custom=True, format=text)


def _check_model(builder: Builder) -> None:
    template = builder.chat_template
    if template is not None and "tools" not in template.variables:
        raise UnsupportedParameterError(
            "tools", " The chat template of this model shows no tools to it."
        )
    if builder.dialect.tools is None:
        raise UnsupportedParameterError(
            "tools",
            " The format of this model's tool calls is unknown; set it with --tool-parser.",
        )


def _chosen(choice: ToolChoice) -> tuple[list[str], bool]:
    """The names that a choice allows, and whether it forces a call."""
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise MissingParameterError("tool_choice.allowed_tools")
        allowed = choice.allowed_tools
        names = [
            _named(tool, f"tool_choice.allowed_tools.tools[{i}]")
            for i, tool in enumerate(allowed.tools)
        ]
        return names, allowed.mode == "required"
    if choice.type in ("function", "custom"):
        return [_named(choice, "tool_choice")], True
    raise UnsupportedParameterError("tool_choice.type", " Choose a tool by name, or allowed_tools.")


def _named(ref: ToolChoice | ToolRef, path: str) -> str:
    named = ref.function if ref.type == "function" else ref.custom
    if named is None:
        raise MissingParameterError(f"{path}.{ref.type}")
    return named.name


def _plain(one: Offered) -> dict[str, Any]:
    function = one.function
    plain: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        plain["description"] = function.description
    if function.parameters is not NULL:
        try:
            plain["parameters"] = msgspec.json.decode(function.parameters)
        except msgspec.DecodeError as error:  # numbers beyond float64, which the body may have
            path = f"{one.path}.function.parameters"
            raise ParameterError(f"'{path}' cannot be read: {error}.", param=path) from None
    return plain
