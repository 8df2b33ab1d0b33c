"""The process that compiles and renders chat templates, isolated with limits.

    python -m weft.text.render_process SOCKET PARENT

`weft.text.renderer` starts it. Each request has a budget of CPU time and of memory
(`weft.text.isolated_process`). Nothing in the interpreter could bound a single
``'%1000000000d' % 1``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta

from weft.text import sandbox
from weft.text.isolated_process import Reply, answer_requests, budget, failed
from weft.text.quoting import Alphabet, join

COMPILE_CPU_S, RENDER_CPU_S = 2.0, 1.0
MOST_BYTES = 64 * 2**20
BYTES_PER_INPUT_BYTE = 16  # on top: the copies of its texts that a template makes on its way
KEPT_TEMPLATES = 16


def main() -> None:
    """Answer requests until the parent is gone."""
    answer_requests("weft-renderer", Templates().answer)


class Templates:
    """The compiled templates that were used last, by the digests that requests name."""

    def __init__(self) -> None:
        self._environment = sandbox.new_environment()
        self._compiled: OrderedDict[str, jinja2.Template] = OrderedDict()

    def answer(self, request: dict[str, Any], num_bytes: int) -> Reply:
        """Compile the ``source`` of a ``template``, or render one that is compiled."""
        if "source" in request:
            with budget(COMPILE_CPU_S, MOST_BYTES):
                return self._compile(request["template"], request["source"])
        template = self._compiled.get(request["template"])
        if template is None:
            return {"error": "unknown"}
        self._compiled.move_to_end(request["template"])
        with budget(RENDER_CPU_S, MOST_BYTES + BYTES_PER_INPUT_BYTE * num_bytes):
            return _render(template, request)

    def _compile(self, digest: str, source: str) -> Reply:
        try:
            template = self._environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            return failed("syntax", f"{error.message} (line {error.lineno})")
        except RecursionError:
            return failed("syntax", "it is nested too deeply")
        except MemoryError:
            return failed("memory", "")
        except Exception as error:  # folding its constants can fail in any way
            return failed("syntax", f"{type(error).__name__}: {error}")
        while len(self._compiled) >= KEPT_TEMPLATES:
            self._compiled.popitem(last=False)
        self._compiled[digest] = template
        return {"variables": sorted(names)}


def _render(template: jinja2.Template, request: dict[str, Any]) -> Reply:
    variables, chars = request["variables"], request["alphabet"]
    try:
        if chars is not None:
            variables = _alphabet(chars).reread(variables)
        return _collect(template.generate(variables), request["max_chars"])
    except MemoryError:
        return failed("memory", "")
    except sandbox.TemplateRefusedError as error:
        return failed("refused", str(error))
    except Exception as error:  # a template can fail in any way that Python code can
        return failed("failed", f"{type(error).__name__}: {error}")


def _collect(parts: Iterator[str], room: int) -> Reply:
    out: list[str] = []
    for part in parts:
        room -= len(part)
        if room < 0:
            return failed("long", "")
        out.append(part)
    return {"text": join(out)}


_alphabet = lru_cache(maxsize=64)(Alphabet)


if __name__ == "__main__":
    main()
