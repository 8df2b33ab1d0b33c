"""Bodies of other endpoints to chats: what they share, and errors by the names of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weft.api.bodies import ChatBody, decode_body
from weft.api.chat import chat_job
from weft.api.jobs import Builder, Job
from weft.core.errors import ParameterError, WeftError

CHAT_CONTENT = frozenset({"messages"})  # fields that do not map one to one


def job_of_chat(fields: Mapping[str, Any], builder: Builder, names: Mapping[str, str]) -> Job:
    """Build the job of the chat that a body of another endpoint stands for.

    Args:
        fields: of the chat body; None is left out.
        names: field of the chat body -> field of the endpoint's body, where they differ.

    Raises:
        WeftError: as `chat_job`, with the names of the endpoint.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return chat_job(decode_body(ChatBody, _encoded(given)), builder)
    except WeftError as error:
        raise renamed(error, names) from None


def renamed(error: WeftError, names: Mapping[str, str]) -> WeftError:
    """Let an error speak of the endpoint's fields instead of the chat's."""
    if error.param is None:
        return error
    head = error.param.replace("[", ".").partition(".")[0]
    if head not in names:
        return error
    rest = "" if head in CHAT_CONTENT else error.param[len(head) :]
    error.message = error.message.replace(error.param, head).replace(head, names[head] + rest)
    error.param = names[head] + rest
    error.args = (error.message,)
    return error


def _encoded(fields: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields)
    except RecursionError:
        raise ParameterError("The body of the request is nested too deeply.") from None
