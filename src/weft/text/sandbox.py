"""The jinja2 environment of chat templates: sandboxed, with the conventions of Hugging Face.

The sandbox keeps a template from reaching Python objects and from changing its inputs. It bounds
neither time nor memory: that is what `weft.text.render_process` does, where templates run.
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
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.text.quoting import join

_NON_ASCII = re.compile("[^\x00-\x7f\ud800-\udfff]")


class TemplateRefusedError(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


class _Environment(ImmutableSandboxedEnvironment):
    """Keeps text quoted through macros and blocks."""

    concat = staticmethod(join)


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
    raise TemplateRefusedError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _checked(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in attributes:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError("names in a namespace may not start with '_'")
    return attributes
