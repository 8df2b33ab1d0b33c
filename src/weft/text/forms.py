"""Forms of tool calls and reasoning, as data: parser and grammar are both made of them.

A turn of calls is written as

    section[0] CALL between CALL ... section[1]

and each call as

    call[0] name[0] NAME name[1] ARGUMENTS arguments[1] call[1]

The white space of these texts is what models write; the parser takes any in its place. A ``#``
stands for a number. The texts follow the documented formats of the families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

MARK = "\U0010fffe"  # stands before a marker that is one token; no text has it
Affix = tuple[str, str]  # before and after
Body = Literal["object", "json", "tagged", "python", "bare", "harmony"]
Ids = Literal["call", "mistral", "written"]

_BAR, _LOW = "\uff5c", "\u2581"  # of DeepSeek's tokens: a wide bar, and a low line for a space
_PLAIN = ("hints", "keys", "body", "ids")  # fields of a form that are no markup


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family writes calls; see the module.

    Attributes:
        body: ``object``: one JSON object has name and arguments, under ``keys``. ``json``: the
            arguments are a JSON object. ``tagged``: each argument stands between ``key`` and
            ``value``, and the schema says what its text is. ``python``: keyword arguments with
            literals. ``bare``: JSON with bare keys, and strings between ``quotes``. ``harmony``:
            messages on channels.
        key: around the name of an argument.
        value: around its value. A line end at the inner side is no part of the value.
        json_key: what ends the name in place of ``key[1]`` where the value is JSON; empty where
            only the schema tells.
        keys: of an object with name and arguments; more for arguments are read than written.
        unmarked: calls begin a turn, or follow another call, without a marker.
        ids: ``mistral``: nine letters and digits. ``written``: the name as the model writes it.
        others: forms with the same first marker, read where this one is not found.
        hints: all of these in a chat template speak for the form.
    """

    body: Body = "object"
    section: Affix = ("", "")
    call: Affix = ("", "")
    name: Affix = ('{"name": "', '", "arguments": ')
    arguments: Affix = ("", "}")
    key: Affix = ("", "")
    value: Affix = ("", "")
    json_key: str = ""
    keys: tuple[str, ...] = ("name", "arguments", "parameters")
    quotes: Affix = ('"', '"')
    between: str = ""
    unmarked: bool = False
    ids: Ids = "call"
    others: tuple[CallForm, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def opening(self) -> str:
        """What begins the calls of a turn."""
        return self.section[0] or self.call[0] or self.name[0]

    def texts(self) -> Iterator[str]:
        """All markup of the form and of its ``others``."""
        for form in (self, *self.others):
            for field in fields(form):
                if field.name not in ("others", *_PLAIN):
                    value = getattr(form, field.name)
                    if isinstance(value, str):
                        yield value
                    elif isinstance(value, tuple):
                        yield from value

    def rewritten(self, change: Callable[[str], str]) -> CallForm:
        """The form with all of its markup changed."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _PLAIN:
                continue
            if field.name == "others":
                changed["others"] = tuple(other.rewritten(change) for other in value)
            elif isinstance(value, str):
                changed[field.name] = change(value)
            elif isinstance(value, tuple):
                changed[field.name] = tuple(map(change, value))
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """The texts around reasoning, each with a marker; ``harmony``: it is a channel."""

    start: str
    end: str
    harmony: bool = False


_XML = CallForm(
    body="tagged",
    call=("<tool_call>\n", "</tool_call>"),
    name=("<function=", ">\n"),
    arguments=("", "</function>\n"),
    key=("<parameter=", ">"),
    value=("\n", "\n</parameter>\n"),
    between="\n",
    hints=("<tool_call>", "<function="),
)
_GLM = CallForm(
    body="tagged",
    call=("<tool_call>", "</tool_call>"),
    name=("", "\n"),
    arguments=("", ""),
    key=("<arg_key>", "</arg_key>\n"),
    value=("<arg_value>", "</arg_value>\n"),
    between="\n",
    hints=("<tool_call>", "<arg_key>"),
)
_MINIMAX = CallForm(
    body="tagged",
    section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    call=('<invoke name="', "</invoke>"),
    name=("", '">\n'),
    arguments=("", ""),
    key=('<parameter name="', '">'),
    value=("", "</parameter>\n"),
    between="\n",
    hints=("<minimax:tool_call>",),
)
_PYTHONIC = CallForm(
    body="python", name=("", "("), arguments=("", ")"), key=("", "="), between=", "
)
_LLAMA = CallForm(
    name=('{"name": "', '", "parameters": '),
    keys=("name", "parameters", "arguments"),
    between="; ",
    hints=("<|python_tag|>",),
)
_DSML = f"{_BAR}DSML{_BAR}"
_LISTED = CallForm(section=("[TOOL_CALLS][", "]"), between=", ", ids="mistral")
_DEEPSEEK_SECTION = (
    f"<{_BAR}tool{_LOW}calls{_LOW}begin{_BAR}>",
    f"<{_BAR}tool{_LOW}calls{_LOW}end{_BAR}>",
)
_DEEPSEEK_CALL = f"<{_BAR}tool{_LOW}call{_LOW}begin{_BAR}>"
_DEEPSEEK_END = f"<{_BAR}tool{_LOW}call{_LOW}end{_BAR}>"
_DEEPSEEK_NAME = f"<{_BAR}tool{_LOW}sep{_BAR}>"

# Those with the most specific hints come first.
CALL_FORMS: Mapping[str, CallForm] = {
    "harmony": CallForm(
        body="harmony",
        call=("<|channel|>commentary to=functions.", "<|call|>"),
        name=("", " <|constrain|>json<|message|>"),
        arguments=("", ""),
        hints=("<|channel|>", "<|message|>"),
    ),
    "qwen3-coder": _XML,
    "glm": _GLM,
    "seed-oss": replace(
        _XML,
        section=("<seed:tool_call>\n", "\n</seed:tool_call>"),
        call=("<function=", "</function>"),
        name=("", ">\n"),
        arguments=("", ""),
        value=("", "</parameter>\n"),
        hints=("<seed:tool_call>",),
    ),
    "minimax": _MINIMAX,
    "deepseek-dsml": replace(
        _MINIMAX,
        section=(f"<{_DSML}function_calls>\n", f"\n</{_DSML}function_calls>"),
        call=(f'<{_DSML}invoke name="', f"</{_DSML}invoke>"),
        key=(f'<{_DSML}parameter name="', '" string="true">'),
        value=("", f"</{_DSML}parameter>\n"),
        json_key='" string="false">',
        hints=(f"{_DSML}",),
    ),
    "deepseek-v3": CallForm(
        body="json",
        section=_DEEPSEEK_SECTION,
        call=(_DEEPSEEK_CALL, f"\n```{_DEEPSEEK_END}"),
        name=(f"function{_DEEPSEEK_NAME}", "\n```json\n"),
        arguments=("", ""),
        between="\n",
        hints=(_DEEPSEEK_CALL, "```json"),
    ),
    "deepseek-v3.1": CallForm(
        body="json",
        section=_DEEPSEEK_SECTION,
        call=(_DEEPSEEK_CALL, _DEEPSEEK_END),
        name=("", _DEEPSEEK_NAME),
        arguments=("", ""),
        hints=(_DEEPSEEK_CALL,),
    ),
    "kimi-k2": CallForm(
        body="json",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        name=("functions.", ":#<|tool_call_argument_begin|>"),
        arguments=("", ""),
        ids="written",
        hints=("<|tool_calls_section_begin|>",),
    ),
    "gemma4": CallForm(
        body="bare",
        call=("<|tool_call>", "<tool_call|>"),
        name=("call:", ""),
        arguments=("", ""),
        quotes=('<|"|>', '<|"|>'),
        hints=("<|tool_call>",),
    ),
    "mistral": CallForm(
        body="json",
        call=("[TOOL_CALLS]", ""),
        name=("", "[ARGS]"),
        arguments=("", ""),
        ids="mistral",
        others=(_LISTED,),
        hints=("[TOOL_CALLS]",),
    ),
    "command": CallForm(
        section=("<|START_ACTION|>[\n", "\n]<|END_ACTION|>"),
        name=('{"tool_call_id": "#", "tool_name": "', '", "parameters": '),
        keys=("tool_name", "parameters", "arguments"),
        between=",\n",
        hints=("<|START_ACTION|>",),
    ),
    "phi4-mini": CallForm(
        section=("<|tool_call|>[", "]<|/tool_call|>"), between=", ", hints=("<|tool_call|>",)
    ),
    "hermes": CallForm(
        call=("<tool_call>\n", "\n</tool_call>"), between="\n", hints=("<tool_call>",)
    ),
    "lfm2": replace(
        _PYTHONIC,
        section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        hints=("<|tool_call_start|>",),
    ),
    "olmo3": replace(
        _PYTHONIC,
        section=("<function_calls>\n", "\n</function_calls>"),
        between="\n",
        hints=("<function_calls>",),
    ),
    "llama4": replace(
        _PYTHONIC,
        section=("[", "]"),
        unmarked=True,
        others=(replace(_PYTHONIC, section=("<|python_start|>[", "]<|python_end|>")),),
        hints=("<|python_start|>",),
    ),
    "llama3": replace(
        _LLAMA, unmarked=True, others=(replace(_LLAMA, call=("<|python_tag|>", "")),)
    ),
}
REASONING_FORMS: Mapping[str, ReasoningForm] = {
    "harmony": ReasoningForm("<|channel|>analysis<|message|>", "<|end|>", harmony=True),
    "think": ReasoningForm("<think>", "</think>"),
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "command": ReasoningForm("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed": ReasoningForm("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningForm("<|channel>thought\n", "<channel|>"),
}
# Where a template tells nothing: forms by the model type of config.json.
MODEL_CALLS: Mapping[str, str] = {
    "gpt_oss": "harmony",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "qwen3_next": "hermes",
    "qwen3_5": "qwen3-coder",
    "qwen3_5_moe": "qwen3-coder",
    "nemotron_h": "qwen3-coder",
    "glm4_moe": "glm",
    "glm4_moe_lite": "glm",
    "minimax_m2": "minimax",
    "seed_oss": "seed-oss",
    "deepseek_v3": "deepseek-v3.1",
    "deepseek_v32": "deepseek-dsml",
    "kimi_k2": "kimi-k2",
    "gemma4": "gemma4",
    "mistral3": "mistral",
    "ministral3": "mistral",
    "granitemoehybrid": "hermes",
    "smollm3": "hermes",
    "phi3": "phi4-mini",
    "cohere2": "command",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "olmo3": "olmo3",
    "llama4": "llama4",
    "llama4_text": "llama4",
}
EFFORTS = ("low", "medium", "high")  # of harmony
