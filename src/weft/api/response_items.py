"""Items of ``/v1/responses``: what a client sends, the form in which they are kept, and chats.

An item is kept as OpenAI's API shows it, with id and status. Earlier input, earlier output and new
input have the same form, and together make the messages of a chat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, Literal

from msgspec import Raw, Struct

from weft.api.bodies import NULL, Name, Parts, decode_body, kind_of
from weft.api.errors import UnsupportedParameterError
from weft.api.jobs import new_id
from weft.core.errors import ParameterError

Item = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Parts
    type: Literal["message"] = "message"
    id: Name | None = None
    status: Status | None = None
    phase: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"phase": ()}


class CallItem(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Name | None = None
    status: Status | None = None
    caller: Raw = NULL
    namespace: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"caller": ({"type": "direct"},), "namespace": ()}


class ResultItem(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call_output"]
    call_id: Name
    output: str | Parts
    id: Name | None = None
    status: Status | None = None
    name: Name | None = None
    caller: Raw = NULL
    namespace: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"caller": ({"type": "direct"},), "namespace": ()}


class ReasoningItem(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["reasoning"]
    id: Name | None = None
    summary: Parts = []
    content: Parts | None = None
    status: Status | None = None
    encrypted_content: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"encrypted_content": ()}


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    text: str
    annotations: Raw = NULL
    logprobs: Raw = NULL
    prompt_cache_breakpoint: Raw = NULL


class RefusalPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    refusal: str


def read_items(given: str | Seq[Raw], at: str = "input") -> list[Item]:
    """Decode the input of a body.

    Raises:
        ParameterError: an item is malformed, of an unknown type, or has content that is not text.
    """
    if isinstance(given, str):
        return [_message(MessageItem(role="user", content=given), at)]
    if not given:
        raise ParameterError("The list of input items is empty.", param=at)
    return [_item(raw, f"{at}[{index}]") for index, raw in enumerate(given)]


def _item(raw: Raw, path: str) -> Item:
    kind = kind_of(raw, path, "message")
    if kind == "message":
        return _message(decode_body(MessageItem, raw, path), path)
    if kind == "function_call":
        call = decode_body(CallItem, raw, path)
        return {
            **_head(call, kind, "fc"),
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        }
    if kind == "function_call_output":
        result = decode_body(ResultItem, raw, path)
        output = result.output
        if not isinstance(output, str):
            output = _joined(output, f"{path}.output", ("input_text",))
        return {**_head(result, kind, "fco"), "call_id": result.call_id, "output": output}
    if kind == "reasoning":
        thought = decode_body(ReasoningItem, raw, path)
        summary = _plain(thought.summary, f"{path}.summary", "summary_text")
        content = _plain(thought.content or (), f"{path}.content", "reasoning_text")
        return {**_head(thought, kind, "rs"), "summary": summary, "content": content}
    raise UnsupportedParameterError(
        f"{path}.type", f" Items of type {kind[:100]!r} cannot be read here."
    )


def _head(
    item: MessageItem | CallItem | ResultItem | ReasoningItem, kind: str, prefix: str
) -> Item:
    number = item.id or new_id(prefix, "_")
    return {"type": kind, "id": number, "status": item.status or "completed"}


def _message(message: MessageItem, path: str) -> Item:
    content, path = message.content, f"{path}.content"
    parts: list[dict[str, Any]]
    if message.role == "assistant":
        if not isinstance(content, str):
            content = _joined(content, path, ("output_text", "refusal", "input_text"))
        parts = [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    elif isinstance(content, str):
        parts = [{"type": "input_text", "text": content}]
    else:
        parts = _plain(content, path, "input_text")
    return {**_head(message, "message", "msg"), "role": message.role, "content": parts}


def _plain(parts: Iterable[Raw], path: str, kind: str) -> list[dict[str, Any]]:
    """Parts of one type that have text."""
    texts = _texts(parts, path, (kind,))
    return [{"type": kind, "text": text} for text in texts]


def _joined(parts: Iterable[Raw], path: str, kinds: Seq[str]) -> str:
    return "\n".join(_texts(parts, path, kinds))


def _texts(parts: Iterable[Raw], path: str, kinds: Seq[str]) -> list[str]:
    texts = []
    for index, raw in enumerate(parts):
        where = f"{path}[{index}]"
        kind = kind_of(raw, where)
        if kind not in kinds:
            raise UnsupportedParameterError(
                f"{where}.type",
                f" Content of type {kind[:100]!r} cannot stand here; send {' or '.join(kinds)}.",
            )
        if kind == "refusal":
            texts.append(decode_body(RefusalPart, raw, where).refusal)
        else:
            texts.append(decode_body(TextPart, raw, where).text)
    return texts


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The messages of the chat that items stand for.

    What the assistant thinks, says and calls without somebody else between is one message.

    Raises:
        ParameterError: the output of a function has no call before it.
    """
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            if item["call_id"] not in called:
                raise ParameterError(
                    "No tool call found for function call output with call_id "
                    f"'{item['call_id'][:100]}'.",
                    param="input",
                )
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(result)
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _shown(item["content"])})
        else:
            _add_to_turn(messages, item)
            called |= {item["call_id"]} if kind == "function_call" else set()
    return messages


def _add_to_turn(messages: list[dict[str, Any]], item: Item) -> None:
    """Add what the assistant did to its open message, or to a new one."""
    kind = item["type"]
    message = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    ended = message is not None and (
        (kind == "message" and message["content"]) or (kind != "function_call" and _calls(message))
    )
    if message is None or ended:
        message = {"role": "assistant", "content": ""}
        messages.append(message)
    if kind == "message":
        message["content"] = _shown(item["content"])
    elif kind == "reasoning":
        text = _shown(item["content"] or item["summary"])
        before = message.get("reasoning_content")
        message["reasoning_content"] = f"{before}\n{text}" if before else text
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _calls(message: Mapping[str, Any]) -> bool:
    return "tool_calls" in message


def _shown(parts: Iterable[Mapping[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts)
