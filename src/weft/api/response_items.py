"""Items of ``/v1/responses``: as a client sends them, as weft stores them, and as chat messages.

An item is kept as OpenAI's API shows it, with id and status. Earlier input, earlier output and new
input have the same form, and together make the messages of a chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta, Raw, Struct

from weft.api.bodies import CACHE_HINT, CALLER, IMAGE, MAX_TOOLS, Name, Parts
from weft.api.decoding import decode_body, kind_of
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import new_id
from weft.api.response_tools import LOADING, SEARCH, function_name, loaded_names, read_loaded
from weft.api.rules import NULL, Ignored, Notes, Refused
from weft.api.turn import arguments_object
from weft.core.errors import ParameterError
from weft.text.customcalls import CUSTOM_INPUT

Item = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
CALLS = ("function_call", "custom_tool_call", "tool_search_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "tool_search_output")
RESULT_TEXTS = ("input_text", "output_text")
# Calls that a provider runs itself, their results, and what it shortened a conversation to: other
# servers leave them in conversations, and no model here can read them.
LEFT_OUT = frozenset(
    (
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "computer_call",
        "computer_call_output",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "program",
        "program_output",
        "compaction",
    )
)


class MessageItem(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Parts
    type: Literal["message"] = "message"
    id: Name | None = None
    status: Status | None = None
    phase: Annotated[Raw, Ignored("messages keep their order")] = NULL

    OPEN: ClassVar[bool] = True


class CallItem(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Name | None = None
    status: Status | None = None
    namespace: Name | None = None
    caller: Annotated[Raw, CALLER] = NULL

    OPEN: ClassVar[bool] = True


class ResultItem(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: str | Parts
    id: Name | None = None
    status: Status | None = None
    name: Name | None = None
    caller: Annotated[Raw, CALLER] = NULL
    namespace: Annotated[Raw, CALLER] = NULL

    OPEN: ClassVar[bool] = True


class CustomCallItem(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str
    id: Name | None = None
    status: Status | None = None
    namespace: Name | None = None
    caller: Annotated[Raw, CALLER] = NULL

    OPEN: ClassVar[bool] = True


class SearchCallItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """A search for tools; one that a provider runs has no id, and is left out."""

    type: Literal["tool_search_call"]
    arguments: Raw
    call_id: Name | None = None
    execution: Literal["server", "client"] | None = None
    id: Name | None = None
    status: Status | None = None

    OPEN: ClassVar[bool] = True


class LoadedToolsItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """Tools that a search has found, or that come amid a conversation."""

    type: Literal["tool_search_output", "additional_tools"]
    tools: Annotated[list[Raw], Meta(max_length=MAX_TOOLS)]
    call_id: Name | None = None
    execution: Literal["server", "client"] | None = None
    role: Literal["developer"] | None = None
    id: Name | None = None
    status: Status | None = None

    OPEN: ClassVar[bool] = True


class ReasoningItem(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["reasoning"]
    id: Name | None = None
    summary: Parts = []
    content: Parts | None = None
    status: Status | None = None
    encrypted_content: Annotated[Raw, Ignored("reasoning is sent and read in clear")] = NULL

    OPEN: ClassVar[bool] = True


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    text: str
    annotations: Annotated[Raw, Ignored("the text does not need them", ([],))] = NULL
    logprobs: Annotated[Raw, Ignored("the text does not need them", ([],))] = NULL
    prompt_cache_breakpoint: Annotated[Raw, CACHE_HINT] = NULL

    OPEN: ClassVar[bool] = True


class ImagePart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    image_url: str | None = None
    detail: Annotated[Raw, Ignored("every image has the size that the model takes")] = NULL
    file_id: Annotated[Raw, Refused("send the image itself as a data URL")] = NULL
    prompt_cache_breakpoint: Annotated[Raw, CACHE_HINT] = NULL

    OPEN: ClassVar[bool] = True


class LeftOutItem(Struct, kw_only=True):
    """The call id of an item that is left out; its result is left out, too."""

    call_id: Name | None = None


class RefusalPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    refusal: str

    OPEN: ClassVar[bool] = True


def read_items(given: str | Seq[Raw], at: str = "input", notes: Notes | None = None) -> list[Item]:
    """Decode the input of a body; items of tools that a provider runs are left out.

    Args:
        notes: take what is ignored.

    Raises:
        ParameterError: an item is malformed, of an unknown type, or has content that is not text.
    """
    reader = _ItemReader(Notes() if notes is None else notes)
    if isinstance(given, str):
        return [reader.message(MessageItem(role="user", content=given), at)]
    if not given:
        raise ParameterError("The list of input items is empty.", param=at)
    items = [reader.item(raw, f"{at}[{index}]") for index, raw in enumerate(given)]
    return [item for item in items if item is not None]


class _Headed(Protocol):
    """An item that may have an id and a status."""

    @property
    def id(self) -> str | None: ...

    @property
    def status(self) -> Status | None: ...


def _head(item: _Headed, kind: str, prefix: str) -> Item:
    number = item.id or new_id(prefix, "_")
    return {"type": kind, "id": number, "status": item.status or "completed"}


@dataclass(frozen=True, slots=True)
class _ItemReader:
    """Decodes items and their parts.

    Attributes:
        notes: take what is ignored.
        left_out: ids of calls that are left out.
    """

    notes: Notes
    left_out: set[str] = field(default_factory=set)

    def item(self, raw: Raw, path: str) -> Item | None:
        """An item as it is kept; None for one that is left out."""
        kind = kind_of(raw, path, "message")
        if kind == "message":
            return self.message(decode_body(MessageItem, raw, path, self.notes), path)
        if kind == "function_call":
            call = decode_body(CallItem, raw, path, self.notes)
            return {**_head(call, kind, "fc"), **_named(call), "arguments": call.arguments}
        if kind == "custom_tool_call":
            custom = decode_body(CustomCallItem, raw, path, self.notes)
            return {**_head(custom, kind, "ctc"), **_named(custom), "input": custom.input}
        if kind == "tool_search_call":
            return self._search(decode_body(SearchCallItem, raw, path, self.notes), path)
        if kind in LOADING:
            return self._loaded(decode_body(LoadedToolsItem, raw, path, self.notes), path)
        if kind in OUTPUTS:
            result = decode_body(ResultItem, raw, path, self.notes)
            if result.call_id in self.left_out:
                self.notes.ignore(f"{path}({kind})")
                return None
            output = result.output
            if not isinstance(output, str):
                output = "\n".join(self._texts(output, f"{path}.output", RESULT_TEXTS, True))
            return {**_head(result, kind, "fco"), "call_id": result.call_id, "output": output}
        if kind == "reasoning":
            thought = decode_body(ReasoningItem, raw, path, self.notes)
            summary = self._plain(thought.summary, f"{path}.summary", "summary_text")
            content = self._plain(thought.content or (), f"{path}.content", "reasoning_text")
            return {**_head(thought, kind, "rs"), "summary": summary, "content": content}
        if kind in LEFT_OUT:
            number = decode_body(LeftOutItem, raw, path, self.notes).call_id
            if number is not None:
                self.left_out.add(number)
            self.notes.ignore(f"{path}({kind})")
            return None
        hint = f" Items of type {kind[:100]!r} cannot be read here."
        if kind == "item_reference":
            hint = " Send the item itself, or the previous_response_id of its response."
        raise UnsupportedParameterError(f"{path}.type", hint)

    def _search(self, call: SearchCallItem, path: str) -> Item | None:
        """The call of a search; None for one that a provider has run."""
        if call.call_id is None or call.execution == "server":
            self.notes.ignore(f"{path}({call.type})")
            return None
        try:
            arguments = msgspec.json.decode(call.arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        if isinstance(arguments, str):  # as of other calls
            arguments = arguments_object(arguments)
        if not isinstance(arguments, dict):
            param = f"{path}.arguments"
            raise ParameterError(f"'{param}' must be an object.", param=param)
        given = {"call_id": call.call_id, "execution": "client", "arguments": arguments}
        return {**_head(call, call.type, "tsc"), **given}

    def _loaded(self, item: LoadedToolsItem, path: str) -> Item | None:
        """Tools that are there from now on; None for what a provider's search has found."""
        tools = read_loaded(item.tools, f"{path}.tools", self.notes)
        if item.type == "additional_tools":
            role = {"role": item.role or "developer"}
            return {**_head(item, item.type, "at"), **role, "tools": tools}
        if item.call_id is None or item.execution == "server":
            self.notes.ignore(f"{path}({item.type})")
            return None
        given = {"call_id": item.call_id, "execution": "client", "tools": tools}
        return {**_head(item, item.type, "tso"), **given}

    def message(self, message: MessageItem, path: str) -> Item:
        content, path = message.content, f"{path}.content"
        parts: list[dict[str, Any]]
        if message.role == "assistant":
            if not isinstance(content, str):
                kinds = ("output_text", "refusal", "input_text")
                content = "\n".join(self._texts(content, path, kinds))
            parts = [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
        elif isinstance(content, str):
            parts = [{"type": "input_text", "text": content}]
        else:
            parts = self._parts(content, path, images=message.role == "user")
        return {**_head(message, "message", "msg"), "role": message.role, "content": parts}

    def _parts(self, parts: Seq[Raw], path: str, *, images: bool) -> list[dict[str, Any]]:
        """Parts of a message of the client's: texts, and of a user also images."""
        found: list[dict[str, Any]] = []
        for index, raw in enumerate(parts):
            where = f"{path}[{index}]"
            if images and kind_of(raw, where) == "input_image":
                part = decode_body(ImagePart, raw, where, self.notes)
                if part.image_url is None:
                    raise MissingParameterError(f"{where}.image_url")
                found.append({"type": "input_image", "image_url": part.image_url})
            else:
                (text,) = self._texts([raw], path, ("input_text",), at=index)
                found.append({"type": "input_text", "text": text})
        return found

    def _plain(self, parts: Iterable[Raw], path: str, kind: str) -> list[dict[str, Any]]:
        """Parts of one type that have text."""
        return [{"type": kind, "text": text} for text in self._texts(parts, path, (kind,))]

    def _texts(
        self,
        parts: Iterable[Raw],
        path: str,
        kinds: Seq[str],
        result: bool = False,
        at: int = 0,
    ) -> list[str]:
        """The texts of parts; in a tool's result an image or a file has a text in its place."""
        texts = []
        for index, raw in enumerate(parts, at):
            where = f"{path}[{index}]"
            kind = kind_of(raw, where)
            if result and kind in ("input_image", "input_file"):
                self.notes.ignore(where)
                texts.append(IMAGE)
            elif kind not in kinds:
                raise UnsupportedParameterError(
                    f"{where}.type",
                    f" Content of type {kind[:100]!r} is not supported here; send "
                    f"{' or '.join(kinds)}.",
                )
            elif kind == "refusal":
                texts.append(decode_body(RefusalPart, raw, where, self.notes).refusal)
            else:
                texts.append(decode_body(TextPart, raw, where, self.notes).text)
        return texts


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Convert items to the messages of a chat.

    Consecutive reasoning, text and calls of the assistant become one message.

    Raises:
        ParameterError: the output of a function has no call before it.
    """
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    for item in items:
        kind = item["type"]
        if kind == "additional_tools":
            continue
        if kind in OUTPUTS:
            if item["call_id"] not in called:
                raise ParameterError(
                    "No tool call found for function call output with call_id "
                    f"'{item['call_id'][:100]}'.",
                    param="input",
                )
            text = _found(item["tools"]) if kind == "tool_search_output" else item["output"]
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind == "message" and item["role"] != "assistant":
            seen = any(part["type"] == "input_image" for part in item["content"])
            content = item["content"] if seen else _shown(item["content"])
            messages.append({"role": item["role"], "content": content})
        else:
            _add_to_turn(messages, item)
            called |= {item["call_id"]} if kind in CALLS else set()
    return messages


def _add_to_turn(messages: list[dict[str, Any]], item: Item) -> None:
    """Add what the assistant did to its open message, or to a new one."""
    kind = item["type"]
    message = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    ended = message is not None and (
        (kind == "message" and message["content"]) or (kind not in CALLS and _calls(message))
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
        name = function_name(item.get("namespace"), item.get("name", SEARCH))
        function = {"name": name, "arguments": _arguments(item)}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _arguments(item: Item) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    if item["type"] == "tool_search_call":
        return json.dumps(item["arguments"], ensure_ascii=False)
    return json.dumps({CUSTOM_INPUT: item["input"]}, ensure_ascii=False)


def _found(tools: Iterable[Mapping[str, Any]]) -> str:
    """What the model reads of the tools that a search has found."""
    names = loaded_names(tools)
    return f"These tools can be called now: {', '.join(names)}." if names else "No tool was found."


def _named(call: CallItem | CustomCallItem) -> Item:
    named = {"call_id": call.call_id, "name": call.name}
    return named if call.namespace is None else {**named, "namespace": call.namespace}


def _calls(message: Mapping[str, Any]) -> bool:
    return "tool_calls" in message


def _shown(parts: Iterable[Mapping[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts)
