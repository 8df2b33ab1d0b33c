"""Prepares the messages of a conversation for the chat template, and encodes the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from weft.api.bodies import ChatBody, Message, TokenizeBody
from weft.api.decoding import encode_json
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder
from weft.api.pictures import IMAGE_PARTS, Pictures
from weft.api.rules import MAX_SHOWN_CHARS, Notes
from weft.core.errors import ParameterError, TemplateError
from weft.text import ChatTemplate, encode_chat
from weft.text.customcalls import CUSTOM_INPUT

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_VARIABLES_BYTES = 16 * 2**10
TEXT_PARTS = ("text", "input_text", "output_text")  # one name in each of OpenAI's APIs

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Settings for rendering messages to a prompt.

    Attributes:
        variables: of the template.
        tools: as the template shows them.
        documents: the same.
        continued: the model goes on with the last message, which the prompt leaves open.
        add_generation_prompt: end with the header of the assistant's answer.
        template: text of another template than the model's.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Seq[Mapping[str, Any]] | None = None
    documents: Seq[Any] | None = None
    continued: bool = False
    add_generation_prompt: bool = True
    template: str | None = None


def rendering(
    body: ChatBody | TokenizeBody,
    variables: Mapping[str, Any],
    tools: Seq[Mapping[str, Any]] | None,
) -> Rendering:
    """The rendering settings of a body.

    Raises:
        ParameterError: fields contradict each other, or documents cannot be read.
    """
    continued, add = bool(body.continue_final_message), body.add_generation_prompt
    if continued and add:
        raise ParameterError(
            "continue_final_message and add_generation_prompt cannot both be true.",
            param="continue_final_message",
        )
    documents = None if body.documents is None else read_documents(body.documents)
    add = not continued if add is None else add
    return Rendering(variables, tools, documents, continued, add, body.chat_template)


def encode_messages(
    messages: Seq[Message],
    builder: Builder,
    how: Rendering,
    notes: Notes,
    pictures: Pictures,
) -> list[int]:
    """Return the token ids of a conversation.

    Args:
        pictures: takes its images.

    Raises:
        ParameterError: a message is malformed, has content that is not read, or answers no call.
        TemplateError: the model has no chat template, or its template refused the conversation.
    """
    template = builder.template(how.template)
    if template is None:
        raise TemplateError(
            "This model has no chat template; use /v1/completions, or start the server with "
            "--chat-template FILE.",
            param="messages",
        )
    knows_developer = any("developer" in source for source in template.sources.values())
    plain = [
        _message(message, i, knows_developer, notes, pictures) for i, message in enumerate(messages)
    ]
    if builder.dialect.text_arguments and how.template is None:
        _write_arguments(plain)
    _check_results(plain)
    num_bytes = sum(map(_num_bytes, messages, plain))
    num_bytes += sum(len(encode_json(shown)) for shown in (how.tools, how.documents) if shown)
    builder.check_size(num_bytes, "messages")
    template.check_variables(how.variables)
    if how.continued:
        _check_continued(plain[-1], len(plain) - 1)
    given = {**_with_documents(how, template), "tools": how.tools}
    given["add_generation_prompt"] = how.add_generation_prompt
    _check_roles(plain, template, given)
    with_images = pictures.expand if pictures else None
    return encode_chat(
        builder.tokenizer,
        template,
        plain,
        continue_final_message=how.continued,
        with_images=with_images,
        **given,
    )


def _check_roles(
    messages: Seq[Mapping[str, Any]], template: ChatTemplate, given: Mapping[str, Any]
) -> None:
    """Refuse a role of the client's own that the template passes over without a word."""
    own = [message for message in messages if message["role"] not in ROLES]
    text = template.render(messages, **given) if own else ""
    for message in own:
        if (message.get("content") or "").strip() not in text:
            raise TemplateError(
                f"The chat template shows no messages of the role '{message['role']}' to the "
                "model.",
                param="messages",
            )


def _with_documents(how: Rendering, template: ChatTemplate) -> dict[str, Any]:
    if how.documents is None:
        return dict(how.variables)
    if "documents" not in template.variables:
        raise UnsupportedParameterError(
            "documents", " The chat template of this model shows no documents to it."
        )
    return {**how.variables, "documents": how.documents}


def _check_continued(last: Mapping[str, Any], index: int) -> None:
    """Check that the message to continue is the assistant's, and has text."""
    if last["role"] != "assistant" or not (last.get("content") or "").strip():
        raise ParameterError(
            "continue_final_message needs a last message of the assistant with text.",
            param=f"messages[{index}]",
        )


def _check_results(messages: Seq[Mapping[str, Any]]) -> None:
    """Every result of a tool must answer a call that an earlier message has."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called |= {call["id"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            path, number = f"messages[{index}].tool_call_id", message["tool_call_id"][:100]
            raise ParameterError(
                f"'{path}' is '{number}', but no message before it has a call with that id.",
                param=path,
            )


def _num_bytes(message: Message, plain: Mapping[str, Any]) -> int:
    """Bytes of everything in a message that a template may show."""
    texts = sum(len(value.encode()) for value in plain.values() if isinstance(value, str))
    if isinstance(content := plain.get("content"), list):
        texts += sum(len(part.get("text", "").encode()) for part in content)
    return texts + (len(encode_json(message.tool_calls)) if message.tool_calls else 0)


def read_variables(given: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Values for the template; they are decoded only if they are short."""
    param = "chat_template_kwargs"
    if (
        sum(len(name.encode()) + len(bytes(raw)) for name, raw in given.items())
        > MAX_VARIABLES_BYTES
    ):
        message = f"{param} may have {MAX_VARIABLES_BYTES} bytes at most."
        raise ParameterError(message, param=param)
    try:
        return {name: msgspec.json.decode(raw) for name, raw in given.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ParameterError(f"{param} has a value that cannot be read.", param=param) from None


def read_documents(given: Seq[Raw]) -> list[Any]:
    """Documents as the template shows them. Raises ParameterError if one cannot be read."""
    try:
        return [msgspec.json.decode(raw) for raw in given]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ParameterError("A document cannot be read.", param="documents") from None


def _message(
    message: Message, index: int, knows_developer: bool, notes: Notes, pictures: Pictures
) -> dict[str, Any]:
    """One message as templates take it; a system message by its new name gets the old one.

    A role that only the template knows is passed on; it is refused by a template that does not.
    """
    path = f"messages[{index}]"
    role = message.role
    if _ROLE.fullmatch(role) is None:
        raise ParameterError(
            f"The role of a message must be one of {', '.join(ROLES)}, or a name that the chat "
            f"template knows, not '{role[:MAX_SHOWN_CHARS]}'.",
            param=f"{path}.role",
        )
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and role != owner:
            raise ParameterError(
                f"Only messages with the role '{owner}' have {name}.", param=f"{path}.{name}"
            )
    if role == "tool" and message.tool_call_id is None:
        raise MissingParameterError(f"{path}.tool_call_id")
    content = _content(message, path, notes, pictures)
    if content is None:
        content = message.refusal
    reasoning = message.reasoning_content
    if reasoning is None:
        reasoning = message.reasoning
    silent = role == "assistant" and not message.tool_calls
    if content is None and (reasoning is not None or silent):
        content = ""
    if content is None and not message.tool_calls:
        raise MissingParameterError(f"{path}.content")
    if role == "developer" and not knows_developer:
        role = "system"
    plain: dict[str, Any] = {
        "role": role,
        "content": content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
    }
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return {name: value for name, value in plain.items() if value is not None}


def _content(
    message: Message, path: str, notes: Notes, pictures: Pictures
) -> str | list[dict[str, str]] | None:
    """The text of a message; several parts are joined by line ends, if none of them is an image."""
    content = message.content
    if content is None or isinstance(content, str):
        return content
    paths = [f"{path}.content[{i}]" for i in range(len(content))]
    parts = list(zip(content, paths, strict=True))
    if message.role != "user" or all(part.get("type") not in IMAGE_PARTS for part in content):
        return "\n".join(_part(part, where, notes) for part, where in parts)
    return [
        pictures.read(part, where, notes)
        if part.get("type") in IMAGE_PARTS
        else {"type": "text", "text": _part(part, where, notes)}
        for part, where in parts
    ]


def _part(part: Mapping[str, Any], path: str, notes: Notes) -> str:
    kind = part.get("type")
    if kind is None:
        raise MissingParameterError(f"{path}.type")
    if kind not in TEXT_PARTS and kind != "refusal":
        raise UnsupportedParameterError(
            f"{path}.type",
            f" Content of type {str(kind)[:MAX_SHOWN_CHARS]!r} cannot be read; send text"
            f"{', and images as a user' * (kind in IMAGE_PARTS)}.",
        )
    key = "refusal" if kind == "refusal" else "text"
    for name, value in part.items():
        if name not in ("type", key) and value is not None:
            notes.ignore(f"{path}.{str(name)[:MAX_SHOWN_CHARS]}")
    text = part.get(key)
    if not isinstance(text, str):
        raise ParameterError(f"'{path}.{key}' must be a string.", param=f"{path}.{key}")
    return text


def _tool_call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A call of an earlier turn; templates want its arguments as an object, not as JSON text."""
    kind = call.get("type") or "function"
    called = call.get(kind) if kind in ("function", "custom") else None
    if not isinstance(called, dict):
        raise UnsupportedParameterError(f"{path}.type", " Only calls of functions can be read.")
    name = called.get("name")
    arguments = called.get("arguments", "{}")
    if kind == "custom":
        arguments = {CUSTOM_INPUT: called.get("input")}
    if not isinstance(name, str) or not isinstance(arguments, (str, dict)):
        raise ParameterError(
            f"'{path}.{kind}' needs a name and arguments, both strings.", param=f"{path}.{kind}"
        )
    plain = {"type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain


def _write_arguments(messages: Seq[dict[str, Any]]) -> None:
    """Put JSON text for arguments of calls, where the template takes nothing else."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _arguments(arguments: str | dict[str, Any]) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        loaded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return loaded if isinstance(loaded, dict) else arguments
