"""Translates bodies of other endpoints to chats and completions, and error fields back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.api.bodies import ChatBody, CompletionBody
from weft.api.chat import chat_job
from weft.api.completions import completion_job
from weft.api.decoding import Body, decode_body, encode_json
from weft.api.jobs import Builder, Job
from weft.api.rules import Notes
from weft.core.errors import WeftError

_PLACE = re.compile(r"\w+\[\d+\]")


def job_of_chat(
    fields: Mapping[str, Any], builder: Builder, names: Mapping[str, str], notes: Notes
) -> Job:
    """Build the job of the chat that is equivalent to a body of another endpoint.

    Args:
        fields: of the chat body; None is left out.
        names: field of the chat body, also ``tools[3]``, -> field of the endpoint's body, where
            they differ; see `endpoint_name`.
        notes: take what is ignored, by the names of the endpoint.

    Raises:
        WeftError: as `chat_job`, with the names of the endpoint.
    """
    return _job_of(ChatBody, chat_job, fields, builder, names, notes)


def job_of_completion(
    fields: Mapping[str, Any], builder: Builder, names: Mapping[str, str], notes: Notes
) -> Job:
    """As `job_of_chat`, of a completion."""
    return _job_of(CompletionBody, completion_job, fields, builder, names, notes)


def _job_of(
    body: type[Body],
    build: Callable[[Body, Builder, Notes], Job],
    fields: Mapping[str, Any],
    builder: Builder,
    names: Mapping[str, str],
    notes: Notes,
) -> Job:
    given = {name: value for name, value in fields.items() if value is not None}
    own = Notes(notes.strict)
    try:
        job = build(decode_body(body, encode_json(given), notes=own), builder, own)
    except WeftError as error:
        raise renamed(error, names) from None
    for name in own.names:
        notes.ignore(endpoint_name(name, names))
    param = job.constrained_by
    return job if param is None else replace(job, constrained_by=endpoint_name(param, names))


def endpoint_name(param: str, names: Mapping[str, str]) -> str:
    """The endpoint's name for a field of the chat.

    Messages of a chat do not stand where the endpoint's body has them, so that only the whole list
    can be named. A name that starts with a point stands for a field further in; that functions of
    tools are objects of their own is left out, unless ``.function.`` has a name.
    """
    plain = names.get(".function.", ".")
    place = _PLACE.match(param)
    if place is not None and place[0] in names:
        head = place[0]
    else:
        head = re.split(r"[.\[]", param, maxsplit=1)[0]
    rest = "" if head == "messages" else param[len(head) :].replace(".function.", plain)
    for inner, name in names.items():
        if inner.startswith(".") and rest.endswith(inner):
            rest = rest.removesuffix(inner) + name
    return names.get(head, head) + rest


def renamed(error: WeftError, names: Mapping[str, str]) -> WeftError:
    """Rename the chat's fields in an error to the endpoint's."""
    if error.param is None:
        return error
    old, new = error.param, endpoint_name(error.param, names)
    message = error.message.replace(f"'{old}'", f"'{new}'")
    if message.startswith(f"{old} "):
        message = new + message.removeprefix(old)
    error.param, error.message, error.args = new, message, (message,)
    return error
