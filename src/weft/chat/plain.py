"""A chat without a terminal: one message from standard input, its answer to standard output."""

from __future__ import annotations

import sys

from weft.chat.asking import AskSettings, StreamedAnswer, call_words
from weft.chat.client import ChatClient
from weft.chat.conversation import Conversation
from weft.core.errors import ConfigError
from weft.core.inert import inert

MOST_CHARS = 16 * 2**20


def say_to_errors(text: str) -> None:
    """Print a line to standard error, as other commands do."""
    print(f"weft: {inert(text)}", file=sys.stderr)


def read_message() -> str:
    """All of standard input. Raises ConfigError if that is nothing, or no text."""
    if sys.stdin.isatty():
        say_to_errors("write the message; Ctrl-D ends it")
    try:
        text = sys.stdin.read(MOST_CHARS + 1).strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"Standard input is not text: {error}.") from None
    if not text:
        raise ConfigError(
            "Standard input has no message; as in: echo 'What is a list?' | weft chat"
        )
    if len(text) > MOST_CHARS:
        raise ConfigError(f"Standard input has more than {MOST_CHARS} characters.")
    return text


class Printed:
    """Prints an answer as it comes: as it is into a file or a pipe, inert on a terminal."""

    def __init__(self) -> None:
        self._inert = sys.stdout.isatty()

    def reason(self, piece: str) -> None:
        """Reasoning is not printed."""

    def write(self, piece: str) -> None:
        """Print more of the answer."""
        print(inert(piece) if self._inert else piece, end="", flush=True)


async def answer_once(
    client: ChatClient, asked: AskSettings, system: str | None, message: str
) -> int:
    """Print the answer to a message; returns the exit status.

    Raises:
        ChatRefusedError: there is no whole answer.
    """
    messages = [*Conversation(system).messages(), {"role": "user", "content": message}]
    answer, printed = StreamedAnswer(), Printed()
    try:
        await answer.read(client, asked.body(messages), printed)
    finally:
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
        await client.aclose()
    for call in answer.calls:
        printed.write(f"{call_words(call)}\n")
    if answer.finish == "length":
        say_to_errors("the answer is cut off: max_tokens, or the end of the model's context")
    if asked.usage:
        print(answer.usage(asked.service_class), file=sys.stderr)
    return 0
