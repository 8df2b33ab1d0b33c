"""The jinja2 environment of chat templates: sandboxed, with the conventions of Hugging Face.

The sandbox keeps a template from reaching Python objects and from changing its inputs. Limits here
bound the output, ``range`` (jinja2's own 100,000), and repetition by ``*`` and ``**``. Nothing
bounds the *time* a template takes: nested loops can run for hours. So a template is trusted as far
as the model folder or the operator's file that it comes from, and is never taken from a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.text.quoting import join

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
_MAX_EXPONENT = 64
_NON_ASCII = re.compile("[^\x00-\x7f\ud800-\udfff]")


class RefusedError(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


class _Environment(ImmutableSandboxedEnvironment):
    """Bounds what one operator can build; keeps text quoted through macros and blocks."""

    intercepted_binops = frozenset(["*", "**"])
    concat = staticmethod(join)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > _MAX_EXPONENT:
            raise OverflowError(f"an exponent may be {_MAX_EXPONENT} at most")
        if operator == "*" and _repeated(left, right) > MAX_OUTPUT_CHARS:
            raise OverflowError(f"a repetition may have {MAX_OUTPUT_CHARS} items at most")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the model's text; renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace, without names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        jinja2.utils.Namespace.__init__(self, _checked(dict(*rest, **kwargs)))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _checked({name: value})[name])


def new_environment() -> jinja2.Environment:
    """Return the environment in which every chat template is compiled."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _dict,
    }
    del environment.globals["lipsum"]
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `json.dumps`, without the escapes for HTML; quoted characters stay as they are."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NON_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise RefusedError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _checked(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in attributes:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError("names in a namespace may not start with '_'")
    return attributes


def _repeated(left: Any, right: Any) -> int:
    """The length of ``left * right`` if one of them is a sequence, else 0."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0
