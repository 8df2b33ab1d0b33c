"""Finds the forms of a model's calls and reasoning.

What is set counts first; then the tokeniser's ``response_template``; then what the chat template
writes for calls and reasoning that nobody has made; then what its text has; then the model type.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.core.errors import RendererDeadError, WeftError
from weft.text.callwriting import Call, write_calls
from weft.text.dialect import Dialect
from weft.text.forms import CALL_FORMS, MODEL_CALLS, REASONING_FORMS, CallForm, ReasoningForm

if TYPE_CHECKING:
    from weft.text.template import ChatTemplate

_CALLS: Sequence[Call] = (
    ("first_probe_f", {"key_probe_a": "text probe one", "key_probe_b": "text probe two"}),
    ("second_probe_f", {"key_probe_a": "text probe three", "key_probe_b": "text probe four"}),
)
_ASKED, _THOUGHT, _ANSWER = "asked by the probe", "thought by the probe", "answered by the probe"
_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_MARKER = re.compile(r"\s*[<\[]\S\S")
_PYTHON_QUOTES = str.maketrans("'", '"')


def choose_dialect(
    template: ChatTemplate | None,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    family: str = "",
) -> Dialect:
    """Return the dialect of a model, or what is set (a known name, or none) for ``auto``.

    Args:
        family: the model type of its config.json.
    """
    calls = None if tool_parser in ("auto", "none") else CALL_FORMS[tool_parser]
    reasoning = None
    if reasoning_parser not in ("auto", "none"):
        reasoning = REASONING_FORMS[reasoning_parser]
    if template is not None:
        if tool_parser == "auto":
            calls = _calls_of(template, family)
        if reasoning_parser == "auto":
            reasoning = _reasoning_of(template)
    return Dialect(calls, reasoning, template is not None and _wants_text(template))


def _calls_of(template: ChatTemplate, family: str) -> CallForm | None:
    if "tools" not in template.variables:
        return None
    found = _declared_calls(template.response_template)
    if found is None:
        found = _rendered_calls(template)
    if found is None:
        found = _hinted(template)
    return CALL_FORMS[MODEL_CALLS[family]] if found is None and family in MODEL_CALLS else found


def _reasoning_of(template: ChatTemplate) -> ReasoningForm | None:
    source = _source(template)
    if all(hint in source for hint in CALL_FORMS["harmony"].hints):
        return REASONING_FORMS["harmony"]
    found = _declared_reasoning(template.response_template)
    if found is None:
        found = _rendered_reasoning(template)
    if found is not None:
        return found
    forms = (form for form in REASONING_FORMS.values() if not form.harmony)
    return next((form for form in forms if form.end in source), None)


def _source(template: ChatTemplate) -> str:
    return "\0".join(template.sources.values())


def _hinted(template: ChatTemplate) -> CallForm | None:
    """A form of which the text of a template has all hints."""
    source = _source(template)
    for form in CALL_FORMS.values():
        if all(hint in source for hint in form.hints):
            return form
    if "[AVAILABLE_TOOLS]" in source:
        return CALL_FORMS["mistral"]
    return CALL_FORMS["llama3"] if "<|start_header_id|>" in source else None


def _fields(declared: Mapping[str, Any] | None) -> Mapping[str, Any]:
    fields = (declared or {}).get("fields")
    return fields if isinstance(fields, dict) else {}


def _declared_reasoning(declared: Mapping[str, Any] | None) -> ReasoningForm | None:
    """The markers of reasoning in a ``response_template`` of transformers."""
    fields = _fields(declared)
    for name in ("thinking", "reasoning_content", "reasoning"):
        field = fields.get(name)
        if isinstance(field, dict):
            start, end = _around(field)
            if isinstance(start, str) and isinstance(end, str) and start.strip() and end.strip():
                return _known_reasoning(start, end)
    return None


def _around(field: Mapping[str, Any], no_close: str | None = None) -> Iterator[Any]:
    """What opens a field and what closes it; the first, where there are several."""
    both = (field.get("open"), field.get("close", no_close))
    return (text[0] if isinstance(text, list) and text else text for text in both)


def _known_reasoning(start: str, end: str) -> ReasoningForm:
    for form in REASONING_FORMS.values():
        if (form.start.strip(), form.end.strip()) == (start.strip(), end.strip()):
            return form
    return ReasoningForm(start.strip(), end.strip())


def _declared_calls(declared: Mapping[str, Any] | None) -> CallForm | None:
    """The form of calls in a ``response_template``: JSON between two texts, or one known here."""
    field = _fields(declared).get("tool_calls")
    if not isinstance(field, dict):
        return None
    start, end = _around(field, "")
    if not isinstance(start, str) or not isinstance(end, str) or not start.strip():
        pattern = field.get("open_pattern")
        return _by_marker(pattern, field) if isinstance(pattern, str) else None
    content = field.get("content", "text")
    if content != "json" or "string_delims" in (field.get("content_args") or {}):
        return _by_marker(start, field)
    for form in CALL_FORMS.values():
        around = form.section if form.section[0] else form.call
        squeezed = tuple(_squeezed(text).strip("[]") for text in around)
        if form.body == "object" and squeezed == (_squeezed(start), _squeezed(end)):
            return form
    return CallForm(call=(start, end))


def _by_marker(text: str, field: Mapping[str, Any]) -> CallForm | None:
    """A known form whose first marker an opening text has, and that fits how it is read."""
    bodies = {
        "xml-inline": ("tagged",),
        "python-call-list": ("python",),
        "json": ("json", "bare", "object", "harmony"),
    }.get(str(field.get("content", "text")), ())
    plain = re.sub(r"\\(.)", r"\1", text)
    for form in CALL_FORMS.values():
        if form.body in bodies and all(
            hint in f"{plain}{json.dumps(field)}" for hint in form.hints
        ):
            return form
    for form in CALL_FORMS.values():
        marker = _TOKEN.search(form.opening)
        if form.body in bodies and marker is not None and marker[0] in plain:
            return form
    return None


def _messages(calls: Sequence[Call], *, as_text: bool = False) -> list[dict[str, Any]]:
    made = [
        {
            "type": "function",
            "id": f"probe000{i}",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if as_text else dict(arguments),
            },
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    return [
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": "", "tool_calls": made},
    ]


def _tools(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Probe.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": "string", "description": "Probe."} for key in arguments
                    },
                },
            },
        }
        for name, arguments in calls
    ]


def _rendered(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], calls: Sequence[Call] = ()
) -> str:
    """What the template writes after the question; empty where it refuses or fails."""
    tools = _tools(calls) if calls else None
    try:
        text = template.render(messages, add_generation_prompt=False, tools=tools)
    except RendererDeadError:
        raise
    except WeftError:
        return ""
    _, found, after = text.rpartition(_ASKED)
    return after if found else ""


def _wants_text(template: ChatTemplate) -> bool:
    """Whether a template fails with arguments as an object, and does not with their JSON text."""
    if "tools" not in template.variables:
        return False
    one = _CALLS[:1]
    return not _rendered(template, _messages(one), one) and bool(
        _rendered(template, _messages(one, as_text=True), one)
    )


def _rendered_calls(template: ChatTemplate) -> CallForm | None:
    """The form in which a template writes two calls, or one where it refuses two."""
    for calls, as_text in itertools.product((_CALLS, _CALLS[:1]), (False, True)):
        text = _rendered(template, _messages(calls, as_text=as_text), calls)
        if not text:
            continue
        squeezed = _squeezed(text)
        known = [
            (len(wanted), form)
            for written, form in _all_forms()
            if (wanted := _squeezed(write_calls(written, calls))) in squeezed
        ]
        if known:
            return max(known, key=lambda pair: pair[0])[1]
        plain = _rendered(template, [{"role": "user", "content": _ASKED},
                                     {"role": "assistant", "content": _ANSWER}], calls)  # fmt: skip
        start, _, end = plain.partition(_ANSWER)
        found = derived_form(text, calls, (start, end))
        if found is not None:
            return found
    return None


def _all_forms() -> Iterator[tuple[CallForm, CallForm]]:
    """Each form that can be written, and the one of which it is a part."""
    for form in CALL_FORMS.values():
        for written in (form, *form.others):
            yield written, form


def _squeezed(text: str) -> str:
    return "".join(text.translate(_PYTHON_QUOTES).split())


def derived_form(text: str, calls: Sequence[Call], around: tuple[str, str]) -> CallForm | None:
    """The form of two calls that a template has written, by what differs between them.

    Args:
        text: of the turn.
        around: what stands around the content of a turn without calls.

    Returns:
        None where the calls have no marker, or their arguments are in no known form.
    """
    if len(calls) < 2:
        return None
    text = text[len(_common_start(text, around[0])) :]
    first, second = (_span(text, call) for call in calls)
    if first is None or second is None or first[2] > second[1]:
        return None
    form, start, end = first
    before = text[:start].lstrip()
    middle, after = text[end : second[1]], text[second[2] :].removesuffix(around[1])
    opening = _common_end(before, middle)
    opening = opening[len(opening) - len(opening.lstrip(">]")) :]  # of a token before it
    closing = _common_start(middle[: len(middle) - len(opening)], after)
    between = middle[len(closing) : len(middle) - len(opening)]
    section = (before[: len(before) - len(opening)], after[len(closing) :])
    if _MARKER.match(section[0] or opening) is None:
        return None
    return CallForm(**{**form, "section": section, "call": (opening, closing), "between": between})


def _span(text: str, call: Call) -> tuple[dict[str, Any], int, int] | None:
    """How a call is written, and from where to where: as an object, or a name and JSON."""
    name, arguments = call
    at = text.find(name)
    start = text.find("{", at)
    keys = list(arguments)
    if at < 0:
        return None
    for begin in (text.rfind("{", 0, at), start):
        value, length = _decoded(text, begin)
        if not isinstance(value, dict):
            continue
        if begin < at and name in value.values() and dict(arguments) in value.values():
            by_value = {_hashed(v): k for k, v in value.items()}
            name_key = by_value[_hashed(name)]
            key = by_value[_hashed(dict(arguments))]
            return _object(text, begin, begin + length, name, name_key, key, arguments)
        if begin > at and value == dict(arguments):
            form = {"body": "json", "name": ("", text[at + len(name) : begin]),
                    "arguments": ("", "")}  # fmt: skip
            return form, at, begin + length
    return _tagged_span(text, at, name, keys, [str(v) for v in arguments.values()])


def _object(
    text: str, begin: int, end: int, name: str, name_key: str, key: str, arguments: Any
) -> tuple[dict[str, Any], int, int] | None:
    at = text.find(name, begin)
    start = text.find("{", at)
    value, length = _decoded(text, start)
    if value != dict(arguments):
        return None
    form = {
        "body": "object",
        "name": (text[begin:at], text[at + len(name) : start]),
        "arguments": ("", text[start + length : end]),
        "keys": (name_key, key),
    }
    return form, begin, end


def _tagged_span(
    text: str, at: int, name: str, keys: Sequence[str], values: Sequence[str]
) -> tuple[dict[str, Any], int, int] | None:
    """How arguments with markers of their own are written."""
    places = [at]
    for part in (keys[0], values[0], keys[1], values[1]):
        places.append(text.find(part, places[-1]))
        if places[-1] < 0:
            return None
    _, key, value, next_key, last = places
    inner = text[key + len(keys[0]) : value]  # between a key and its value
    middle = text[value + len(values[0]) : next_key]  # between a value and the next key
    before = text[at + len(name) : key]
    opening = _common_end(before, middle)
    opening = opening[max(opening.rfind("<"), 0) :]
    closing = middle[: len(middle) - len(opening)]
    split = inner.find(">") + 1
    if not _TOKEN.search(closing) or not opening.strip() or not split:
        return None
    end = last + len(values[1])
    if not text.startswith(closing, end):
        return None
    form = {
        "body": "tagged",
        "name": ("", before[: len(before) - len(opening)]),
        "arguments": ("", ""),
        "key": (opening, inner[:split]),
        "value": (inner[split:], closing),
    }
    return form, at, end + len(closing)


def _decoded(text: str, at: int) -> tuple[Any, int]:
    if at < 0:
        return None, 0
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, 0
    return value, end - at


def _hashed(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _common_start(one: str, other: str) -> str:
    return _common_end(one[::-1], other[::-1])[::-1]


def _common_end(one: str, other: str) -> str:
    pairs = zip(reversed(one), reversed(other), strict=False)
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return one[len(one) - count :]


def _rendered_reasoning(template: ChatTemplate) -> ReasoningForm | None:
    """The markers that a template writes around the reasoning of the last answer."""
    answer = {"role": "assistant", "content": _ANSWER}
    asked = {"role": "user", "content": _ASKED}
    text = _rendered(template, [asked, {**answer, "reasoning_content": _THOUGHT}])
    before, found, rest = text.partition(_THOUGHT)
    end, answered, _ = rest.partition(_ANSWER)
    if not found or not answered or _TOKEN.search(end) is None:
        return None
    known = [
        f
        for f in REASONING_FORMS.values()
        if not f.harmony and before.rstrip().endswith(f.start.strip())
    ]
    if known and known[0].end.strip() in end:
        return known[0]
    plain = _rendered(template, [asked, answer]).partition(_ANSWER)[0]
    own = before[len(_common_start(before, plain)) :]
    first = _TOKEN.search(end)
    start = _TOKEN.search(own)
    if first is None or start is None:
        return None
    return _known_reasoning(own[start.start() :], first[0])
