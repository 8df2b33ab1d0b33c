"""Structured output: builds the grammar from ``response_format`` and its extensions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from msgspec import Raw

from weft.api.bodies import GenerationBody, ResponseFormat, StructuredOutputs
from weft.api.errors import MissingParameterError
from weft.api.jobs import Builder, Job
from weft.api.rules import NULL
from weft.core.errors import GrammarError, ParameterError
from weft.text.grammar import (
    Whitespace,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)


class Constraint(NamedTuple):
    """A grammar, and the parameter that asked for it."""

    grammar: str
    param: str


@contextlib.contextmanager
def blaming(param: str) -> Iterator[None]:
    """Make errors of grammars name the parameter that set the grammar."""
    try:
        yield
    except GrammarError as error:
        message = f"'{param}' cannot be honoured: {error.message.rstrip('.')}."
        raise GrammarError(message, param=param) from None


def check_grammar(job: Job, builder: Builder) -> None:
    """Compile what a job's output has to follow; takes up to some tenths of a second.

    Raises:
        GrammarError: it cannot be compiled; it names the parameter that asked for it.
    """
    grammar, param = job.requests[0].sampling.grammar, job.constrained_by
    if grammar is not None and param is not None:
        with blaming(param):
            builder.grammars.check(grammar)


def find_constraint(body: GenerationBody) -> Constraint | None:
    """Return what the output of a body must follow, None for free text.

    Raises:
        GrammarError: the parameter asks for something that cannot be guaranteed.
        ParameterError: there are several constraints, or none where one is announced.
    """
    white = body.json_whitespace or "compact"
    wanted = [
        *_of_format(body.response_format, white),
        *_of_outputs(body.structured_outputs, white),
    ]
    guided = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    wanted += [
        (f"guided_{kind}", _makers(kind, value, white))
        for kind, value in guided.items()
        if _given(value)
    ]
    if len(wanted) > 1:
        names = " and ".join(name for name, _ in wanted)
        raise ParameterError(f"The output can follow one of {names}.", param=wanted[1][0])
    for param, make in wanted:
        with blaming(param):
            return Constraint(make(), param)
    return None


def raw_text(raw: Raw) -> str:
    """JSON as text; a string with JSON counts as that JSON. Raises GrammarError otherwise."""
    try:
        text = bytes(raw).decode()
        return str(json.loads(text)) if text.lstrip().startswith('"') else text
    except ValueError:
        raise GrammarError("it is not valid JSON") from None


def _given(value: object) -> bool:
    return (
        value is not None and value is not False and not (isinstance(value, Raw) and _null(value))
    )


def _null(raw: Raw) -> bool:
    return raw is NULL or bytes(raw).strip() == b"null"


def _of_format(
    given: ResponseFormat | None, white: Whitespace
) -> list[tuple[str, Callable[[], str]]]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        if not _null(given.schema):
            return [("response_format.schema", _makers("json", given.schema, white))]
        return [("response_format", partial(json_object_grammar, white))]
    if given.json_schema is None:
        raise MissingParameterError("response_format.json_schema")
    schema = given.json_schema.schema
    if _null(schema):
        return [("response_format.json_schema", partial(json_object_grammar, white))]
    return [("response_format.json_schema.schema", _makers("json", schema, white))]


def _of_outputs(
    given: StructuredOutputs | None, white: Whitespace
) -> list[tuple[str, Callable[[], str]]]:
    if given is None:
        return []
    white = "compact" if given.disable_any_whitespace else white
    wanted = [
        (f"structured_outputs.{kind}", _makers(kind, value, white))
        for kind in given.KINDS
        if _given(value := getattr(given, kind))
    ]
    if not wanted:
        kinds = ", ".join(given.KINDS)
        raise ParameterError(
            f"structured_outputs asks for nothing; it may have one of {kinds}.",
            param="structured_outputs",
        )
    return wanted


def _makers(kind: str, value: object, white: Whitespace) -> Callable[[], str]:
    """Functions that build the grammar of each kind from its value."""
    if isinstance(value, Raw):
        return lambda: json_schema_grammar(raw_text(value), white)
    if isinstance(value, list):
        return lambda: choice_grammar(value)
    if isinstance(value, str):
        return lambda: regex_grammar(value) if kind == "regex" else lark_grammar(value)
    return partial(json_object_grammar, white)
