"""The client of the template renderer process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from weft.text.isolated import Failure, IsolatedProcess

MAX_SOURCE_CHARS = 128 * 1024  # the longest template that is known has 40,000


@dataclass(frozen=True)
class TemplateSource:
    """The text of a template and the name that the renderer knows it by."""

    text: str
    digest: str

    @classmethod
    def of(cls, text: str) -> TemplateSource:
        return cls(text, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest())


class Renderer(IsolatedProcess):
    """The process that renders templates."""

    module = "weft.text.render_process"
    work = "renders chat templates"

    def compile(self, source: TemplateSource) -> frozenset[str] | Failure:
        """Compile a template; return the names of the variables that it reads.

        Raises:
            RendererDeadError: the process cannot be started, or has ended for no known reason.
        """
        if len(source.text) > MAX_SOURCE_CHARS:
            return Failure("syntax", f"it is longer than {MAX_SOURCE_CHARS} characters")
        with self._own_lock():
            reply = self._ask({"template": source.digest, "source": source.text})
        return reply if isinstance(reply, Failure) else frozenset(reply["variables"])

    def render(
        self,
        source: TemplateSource,
        variables: Mapping[str, Any],
        alphabet: str | None,
        max_chars: int,
    ) -> str | Failure:
        """Render a template.

        Args:
            variables: JSON values.
            alphabet: the characters of the `Alphabet` that texts among them are quoted in, if any.
            max_chars: of the text.

        Raises:
            RendererDeadError: as `compile`.
            ValueError: JSON cannot say one of the variables.
        """
        request = {
            "template": source.digest,
            "variables": variables,
            "alphabet": alphabet,
            "max_chars": max_chars,
        }
        with self._own_lock():
            reply = self._ask(request)
            if reply == Failure("unknown"):  # to a process that has not seen it yet
                reply = self._ask({"template": source.digest, "source": source.text})
                reply = reply if isinstance(reply, Failure) else self._ask(request)
        return reply if isinstance(reply, Failure) else str(reply["text"])


@cache
def shared_renderer() -> Renderer:
    """The renderer of this process."""
    return Renderer()
