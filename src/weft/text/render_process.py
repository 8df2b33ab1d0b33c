"""The process that compiles and renders chat templates, isolated with limits.

    python -m weft.text.render_process SOCKET PARENT

Requests and replies are JSON behind their length (see `weft.text.renderer`, which starts it). Each
request has a budget of CPU time and of memory. A timer of the kernel ends the process when the time
is up, whatever runs then; memory beyond the budget is a MemoryError, after which it ends by itself.
Nothing in the interpreter could bound a single ``'%1000000000d' % 1``.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
from setproctitle import setproctitle

from weft.text import sandbox
from weft.text.frames import receive, send
from weft.text.quoting import Alphabet, join

COMPILE_CPU_S, RENDER_CPU_S = 2.0, 1.0
MOST_BYTES = 64 * 2**20
BYTES_PER_INPUT_BYTE = 16  # on top: the copies of its texts that a template makes on its way
KEPT_TEMPLATES = 16
KEPT_BYTES = 512 * 2**20  # of address space, with which a process is replaced by a fresh one
MAX_DETAIL_CHARS = 500

Reply = dict[str, Any]


def main() -> None:
    """Answer requests until the parent, or its end of the socket, is gone."""
    setproctitle("weft-renderer")
    link = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        parent = os.pidfd_open(int(sys.argv[2]))
    except ProcessLookupError:
        return
    templates = Templates()
    last = False
    with contextlib.suppress(ConnectionError):  # the parent has closed its end
        while not last and _readable(link, parent) and (request := receive(link)) is not None:
            reply = templates.answer(*request)
            last = reply["last"] = reply.get("error") == "memory" or _mapped_bytes() > KEPT_BYTES
            send(link, reply)


def _readable(link: socket.socket, parent: int) -> bool:
    """Wait for a request; False if the parent has ended."""
    ready, _, _ = select.select([link.fileno(), parent], [], [])
    return parent not in ready


class Templates:
    """The compiled templates that were used last, by the digests that requests name."""

    def __init__(self) -> None:
        self._environment = sandbox.new_environment()
        self._compiled: OrderedDict[str, jinja2.Template] = OrderedDict()

    def answer(self, request: dict[str, Any], num_bytes: int) -> Reply:
        """Compile the ``source`` of a ``template``, or render one that is compiled."""
        if "source" in request:
            with _budget(COMPILE_CPU_S, MOST_BYTES):
                return self._compile(request["template"], request["source"])
        template = self._compiled.get(request["template"])
        if template is None:
            return {"error": "unknown"}
        self._compiled.move_to_end(request["template"])
        with _budget(RENDER_CPU_S, MOST_BYTES + BYTES_PER_INPUT_BYTE * num_bytes):
            return _render(template, request)

    def _compile(self, digest: str, source: str) -> Reply:
        try:
            template = self._environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            return _error("syntax", f"{error.message} (line {error.lineno})")
        except RecursionError:
            return _error("syntax", "it is nested too deeply")
        except MemoryError:
            return _error("memory", "")
        except Exception as error:  # folding its constants can fail in any way
            return _error("syntax", f"{type(error).__name__}: {error}")
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
        return _error("memory", "")
    except sandbox.TemplateRefusedError as error:
        return _error("refused", str(error))
    except Exception as error:  # a template can fail in any way that Python code can
        return _error("failed", f"{type(error).__name__}: {error}")


def _collect(parts: Iterator[str], room: int) -> Reply:
    out: list[str] = []
    for part in parts:
        room -= len(part)
        if room < 0:
            return _error("long", "")
        out.append(part)
    return {"text": join(out)}


_alphabet = lru_cache(maxsize=64)(Alphabet)


def _error(kind: str, detail: str) -> Reply:
    return {"error": kind, "detail": detail[:MAX_DETAIL_CHARS]}


@contextlib.contextmanager
def _budget(cpu_s: float, num_bytes: int) -> Iterator[None]:
    """Let the process take so much CPU time, or be killed, and so much memory on top of what it
    has, or meet a MemoryError."""
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + num_bytes, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


_STATM = os.open("/proc/self/statm", os.O_RDONLY)


def _mapped_bytes() -> int:
    """The address space that the process has."""
    return int(os.pread(_STATM, 64, 0).split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
