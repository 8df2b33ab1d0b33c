"""Tools of a chat: what the template shows, what may be called, and the grammar that sees to it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.api.bodies import NULL, ChatBody, Function, ToolChoice
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder
from weft.api.structured import Constraint, blaming, raw_text
from weft.core.errors import ParameterError
from weft.text.callgrammar import Function as GrammarFunction
from weft.text.callgrammar import turn_grammar
from weft.text.dialect import Reading
from weft.text.grammar import json_object_grammar, json_schema_grammar

NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of a chat.

    Attributes:
        functions: all that the model is told of.
        callable: indices of those that it may call.
        forced: at least one call must come.
        parallel: several calls may come.
        limited: something about the calls must be guaranteed.
    """

    functions: Seq[Function]
    callable: Seq[int]
    forced: bool
    parallel: bool

    @property
    def limited(self) -> bool:
        return (
            self.forced
            or not self.parallel
            or len(self.callable) < len(self.functions)
            or any(self.functions[i].strict for i in self.callable)
        )

    def shown(self) -> list[dict[str, Any]]:
        """The tools as templates take them."""
        return [
            {"type": "function", "function": _plain(function, i)}
            for i, function in enumerate(self.functions)
        ]


def read_tools(body: ChatBody, builder: Builder) -> Tools | None:
    """Return the tools that a body offers, None if there are none to call.

    Raises:
        ParameterError: a tool or the choice is wrong.
        UnsupportedParameterError: the model knows no tools, or nothing is known about its calls.
    """
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise ParameterError(
            f"tool_choice must be none, auto, required or an object, not '{choice[:100]}'.",
            param="tool_choice",
        )
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise ParameterError(
                "tool_choice asks for a tool, but there are none.", param="tool_choice"
            )
        return None
    functions = [_function(tool, i) for i, tool in enumerate(body.tools)]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise ParameterError("Two tools have the same name.", param="tools")
    if choice == "none":
        return None
    _check_model(builder)
    chosen, forced = names, choice == "required"
    if isinstance(choice, ToolChoice):
        chosen, forced = _chosen(choice)
    missing = [name for name in chosen if name not in names]
    if missing or not chosen:
        raise ParameterError(
            f"tool_choice names '{missing[0]}', which is no tool."
            if missing
            else "No tool is allowed.",
            param="tool_choice",
        )
    named = isinstance(choice, ToolChoice) and choice.function is not None
    parallel = body.parallel_tool_calls is not False and not named
    return Tools(functions, [names.index(name) for name in dict.fromkeys(chosen)], forced, parallel)


def constrain_turn(
    tools: Tools | None, body: Constraint | None, reading: Reading, builder: Builder
) -> Constraint | None:
    """Return the constraint of a whole turn, None for free text.

    Raises:
        GrammarError: the schema of a function cannot be guaranteed.
    """
    limited = tools is not None and (tools.limited or body is not None)
    if not limited and body is None:
        return None
    if not limited and reading.dialect.reasoning is None:
        return body
    functions: list[GrammarFunction] = []
    if tools is not None and limited:
        functions = [_for_grammar(tools, i) for i in tools.callable]
    grammar = turn_grammar(
        reading.dialect,
        builder.tokenizer,
        functions,
        forced=tools is not None and tools.forced,
        parallel=tools is None or tools.parallel,
        body=None if body is None else body.grammar,
        opened=reading.opened,
    )
    return Constraint(grammar, body.param if body is not None else "tools")


def _for_grammar(tools: Tools, index: int) -> GrammarFunction:
    """A function with the grammar of its arguments.

    A function that is not strict is held to its schema only where a call is forced; one that says
    so itself to none but that its arguments are an object.
    """
    function = tools.functions[index]
    if not function.strict and (function.strict is False or not tools.forced):
        return GrammarFunction(function.name, json_object_grammar())
    with blaming(f"tools[{index}].function.parameters"):
        schema = NO_ARGUMENTS if function.parameters is NULL else raw_text(function.parameters)
        return GrammarFunction(function.name, json_schema_grammar(schema))


def _function(tool: Any, index: int) -> Function:
    if tool.type != "function":
        raise UnsupportedParameterError(
            f"tools[{index}].type",
            f" There are no tools of type '{tool.type[:100]}'; use functions.",
        )
    if tool.function is None:
        raise MissingParameterError(f"tools[{index}].function")
    function: Function = tool.function
    try:
        parameters = msgspec.json.decode(function.parameters)
    except (msgspec.DecodeError, UnicodeDecodeError):
        parameters = ""
    if parameters is not None and not isinstance(parameters, dict):
        path = f"tools[{index}].function.parameters"
        raise ParameterError(f"'{path}' must be a JSON Schema.", param=path)
    return function


def _check_model(builder: Builder) -> None:
    template = builder.chat_template
    if template is not None and "tools" not in template.variables:
        raise UnsupportedParameterError(
            "tools", " The chat template of this model shows no tools to it."
        )
    if builder.dialect.tools is None:
        raise UnsupportedParameterError(
            "tools",
            " How this model writes calls is not known; the server can be told by --tool-parser.",
        )


def _chosen(choice: ToolChoice) -> tuple[list[str], bool]:
    """The names that a choice allows, and whether it forces a call."""
    if choice.type == "function":
        if choice.function is None:
            raise MissingParameterError("tool_choice.function")
        return [choice.function.name], True
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise MissingParameterError("tool_choice.allowed_tools")
        allowed = choice.allowed_tools
        return [tool.function.name for tool in allowed.tools], allowed.mode == "required"
    raise UnsupportedParameterError("tool_choice.type", " Choose a function, or allowed_tools.")


def _plain(function: Function, index: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        plain["description"] = function.description
    if function.parameters is not NULL:
        try:
            plain["parameters"] = msgspec.json.decode(function.parameters)
        except msgspec.DecodeError as error:  # numbers beyond float64, which the body may have
            path = f"tools[{index}].function.parameters"
            raise ParameterError(f"'{path}' cannot be read: {error}.", param=path) from None
    return plain
