"""Matches tool results to calls in Ollama conversations, whose calls need no ids."""

from __future__ import annotations

from weft.core.errors import ParameterError


class CallQueue:
    """The calls of a conversation that no result has answered yet, in their order."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}  # id -> name
        self._count = 0

    def asked(self, name: str, given: str | None) -> str:
        """Take a call in; return its id, which is made up where it has none."""
        self._count += 1
        number = given or f"call_{self._count}"
        self._open[number] = name
        return number

    def answered(self, number: str | None, name: str | None, path: str) -> str:
        """The id of the call that the message at ``path`` answers.

        That is the one with its id; or else the first open one of its tool; or else the first.

        Raises:
            ParameterError: no call is open.
        """
        if not self._open:
            raise ParameterError(
                f"'{path}' is the result of a tool, but no call before it waits for one.",
                param=path,
            )
        if number not in self._open:
            number = next((i for i, called in self._open.items() if called == name), None)
        if number is None:
            number = next(iter(self._open))
        del self._open[number]
        return number
