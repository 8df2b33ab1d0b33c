"""Turns of assistants as events: the forms of each family, for any cutting of the text."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.text import ChatTemplate
from weft.text.assistant import (
    Content,
    Event,
    ToolArguments,
    ToolCall,
)
from weft.text.detect import choose_dialect
from weft.text.dialect import Dialect, Reading

NAMES: dict = {"get_weather": {}, "add": {}}
WEATHER = '{"city": "P\\"a}r{is", "days": [1, 2, {"x": "]"}]}'


def read(
    dialect: Dialect,
    pieces: list[str],
    opened: bool = False,
    *,
    cut: bool = False,
    forced: bool = False,
) -> list[Event]:
    """The events of a turn that comes in these pieces."""
    parser = Reading(dialect, NAMES, opened, forced=forced).parser()
    return [event for piece in pieces for event in parser.push(piece)] + parser.flush(cut=cut)


def joined(events: list[Event]) -> list[tuple[str, ...]]:
    """Events without random ids, neighbours of a kind joined."""
    out: list[tuple[str, ...]] = []
    for event in events:
        if isinstance(event, ToolCall):
            out.append(("call", str(event.index), event.name))
            continue
        kind = type(event).__name__ + str(getattr(event, "index", ""))
        if out and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1] + event.text)
        else:
            out.append((kind, event.text))
    return out


def call(index: int, name: str, arguments: str) -> list[tuple[str, ...]]:
    return [("call", str(index), name), (f"ToolArguments{index}", arguments)]


HERMES = Dialect.named("hermes", "think")
LLAMA = Dialect.named("llama3")
MISTRAL = Dialect.named("mistral", "mistral")
TURNS = [
    (
        HERMES,
        "Just text < with > marks </think>",
        [("Content", "Just text < with > marks </think>")],
    ),
    (
        HERMES,
        f'<think>\nHm <b>\n\n</think>\n\nLet me see.\n<tool_call>\n{{"name": "get_weather", '
        f'"arguments": {WEATHER}}}\n</tool_call>\n<tool_call>{{"arguments": {{"a": 1}}, '
        '"name": "add"}</tool_call>\n',
        [
            ("Reasoning", "Hm <b>"),
            ("Content", "Let me see."),
            *call(0, "get_weather", WEATHER),
            *call(1, "add", '{"a": 1}'),
        ],
    ),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', call(0, "now", "{}")),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}', call(0, "now", "{}")),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', call(0, "f", '{"a": 1}')),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1', call(0, "f", '{"a": [1')),
    (
        HERMES,
        'a <tool_call>{"name": 3, "arguments": {}}</tool_call> b',
        [("Content", 'a <tool_call>{"name": 3, "arguments": {}}</tool_call> b')],
    ),
    (HERMES, "a\n<tool_call>\nno call", [("Content", "a\n<tool_call>\nno call")]),
    (HERMES, '<tool_call>{"name": "f"', [("Content", '<tool_call>{"name": "f"')]),
    (HERMES, "a <tool_ca", [("Content", "a <tool_ca")]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}} and more',
        [*call(0, "f", '{"a": 1}'), ("Content", "and more")],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1]} x',
        [*call(0, "f", '{"a": 1'), ("Content", "]} x")],
    ),
    (LLAMA, f'<|python_tag|>{{"name": "f", "parameters": {WEATHER}}}', call(0, "f", WEATHER)),
    (
        LLAMA,
        '\n{"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "add", '
        '"parameters": {}}',
        [*call(0, "add", '{"a": 1}'), *call(1, "add", "{}")],
    ),
    (LLAMA, '{"name": "Bob", "age": 3}', [("Content", '{"name": "Bob", "age": 3}')]),
    (LLAMA, '{"title": "x", "n": {', [("Content", '{"title": "x", "n": {')]),
    (LLAMA, 'x {"name": "add"}', [("Content", 'x {"name": "add"}')]),
    (LLAMA, '<|python_tag|>print("x")', [("Content", '<|python_tag|>print("x")')]),
    (
        MISTRAL,
        '[THINK]So.[/THINK]Yes.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "x"}, '
        '{"name": "add", "arguments": {}}]',
        [
            ("Reasoning", "So."),
            ("Content", "Yes."),
            *call(0, "add", '{"a": 1}'),
            *call(1, "add", "{}"),
        ],
    ),
    (
        MISTRAL,
        f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{{}}",
        [*call(0, "get_weather", WEATHER), *call(1, "add", "{}")],
    ),
    (MISTRAL, "[TOOL_CALLS]add{}", call(0, "add", "{}")),
    (MISTRAL, "[TOOL_CALLS][]", [("Content", "[TOOL_CALLS][]")]),
    (MISTRAL, "[TOOL_CALLS] what {}", call(0, "what", "{}")),
    (MISTRAL, "[TOOL_CALLS] what? {}", [("Content", "[TOOL_CALLS] what? {}")]),
]


@pytest.mark.parametrize(("dialect", "text", "expected"), TURNS)
def test_a_turn_is_read_alike_however_it_is_cut(dialect, text, expected):
    assert joined(read(dialect, [text])) == expected
    assert joined(read(dialect, list(text))) == expected
    for at in range(len(text)):
        assert joined(read(dialect, [text[:at], text[at:]])) == expected


CUT = [
    (HERMES, "a <tool_ca", [("Content", "a <tool_ca")]),
    (HERMES, "a <tool_call>", [("Content", "a")]),
    (HERMES, '<tool_call>{"name": "f', []),
    (HERMES, '<tool_call>{"name": "f"', [("call", "0", "f")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a', [("call", "0", "f")]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f', []),
    (HERMES, '<tool_call>{"name": 3,', [("Content", '<tool_call>{"name": 3,')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1', call(0, "f", '{"a": [1')),
    (HERMES, '<tool_call>{"name": "f"}\n</tool_call', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f"}\n</tool_call>\n<t', call(0, "f", "{}")),
    (
        HERMES,
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>\n{"name": "g",',
        [*call(0, "f", "{}"), ("call", "1", "g")],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f"}</tool_call> so <tool_call>x',
        [*call(0, "f", "{}"), ("Content", "so <tool_call>x")],
    ),
    (LLAMA, '{"name": "ad', [("Content", '{"name": "ad')]),
    (LLAMA, '{"name": "add", "para', [("call", "0", "add")]),
    (LLAMA, '<|python_tag|>{"na', []),
    (LLAMA, '{"name": "add", "parameters": {}}; {"na', call(0, "add", "{}")),
    (MISTRAL, "[TOOL_CALLS]get_wea", []),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]", [("call", "0", "add")]),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]a", call(0, "add", "{}")),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", ', [("call", "0", "add")]),
]


@pytest.mark.parametrize(("dialect", "text", "expected"), CUT)
def test_a_turn_that_is_cut_shows_a_call_that_has_begun_and_no_form_of_it(dialect, text, expected):
    for pieces in ([text], list(text)):
        assert joined(read(dialect, pieces, cut=True)) == expected


FORCED = [
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}; '),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}'),
    (Dialect.named("mistral"), '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
]


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(("dialect", "one"), FORCED)
def test_a_forced_turn_shows_calls_and_nothing_else_wherever_it_ends(dialect, one, cut):
    text = one + one
    seen = set()
    for at in range(len(text) + 1):
        events = read(dialect, list(text[:at]), cut=cut, forced=True)
        assert not [event for event in events if isinstance(event, Content)]
        names = [event.name for event in events if isinstance(event, ToolCall)]
        assert set(names) <= {"add"}
        for index in range(len(names)):
            written = "".join(
                e.text for e in events if isinstance(e, ToolArguments) and e.index == index
            )
            assert '{"a": 1}'.startswith(written)
            seen.add(written)
    assert {"", '{"a', '{"a": 1}'} <= seen


@given(
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.lists(
        st.sampled_from(
            [
                *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"),
                *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[", "]", "{", "}", ","),
                *(";", ":", '"', "\\", " ", "\n", "x", "null", "1", "add", '"add"', '"name"'),
                *('{"name": "add", "arguments": {"a": "b"}}', '{"name": "add", "parameters": '),
                *('"arguments"', '"parameters"'),
            ]
        ),
        max_size=20,
    ),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
)
def test_anything_is_read_alike_however_it_is_cut(dialect, pieces, cuts, opened):
    text = "".join(pieces)
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    events = joined(read(dialect, parts, opened))
    assert events == joined(read(dialect, list(text), opened))
    assert events == joined(read(dialect, [text], opened))
    shown = "".join(text for kind, *_, text in events if kind in ("Content", "Reasoning"))
    if not any(kind == "call" for kind, *_ in events):
        # Without a call only the markers of reasoning and white space beside them are gone.
        marks = [m for m in ("<think>", "</think>", "[THINK]", "[/THINK]") if m in text]
        if not marks:
            assert "".join(shown.split()) == "".join(text.split())


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=8))
def test_arguments_come_as_they_are_written(value):
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    events = read(HERMES, list(text))
    assert "".join(e.text for e in events if isinstance(e, ToolArguments)) == arguments
    assert not [e for e in events if isinstance(e, Content)]


def test_arguments_stream_and_text_is_held_only_where_it_must():
    parser = Reading(HERMES, NAMES).parser()
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <tool") == []
    assert parser.push('_call>{"name": "f", "arguments"') == []
    (start, first) = parser.push(': {"a')
    assert (start.index, start.name, first) == (0, "f", ToolArguments(0, '{"a'))
    assert parser.push('": 12') == [ToolArguments(0, '": 12')]
    assert parser.push("3}}") == [ToolArguments(0, "3}")]
    assert parser.flush() == []


def test_ids_of_calls_are_as_each_family_wants_them():
    (hermes, *_) = read(HERMES, ['<tool_call>{"name": "f"}</tool_call>'])
    (mistral, *_) = read(MISTRAL, ["[TOOL_CALLS]f{}"])
    assert hermes.id.startswith("call_")
    assert len(hermes.id) == 29
    assert len(mistral.id) == 9
    assert mistral.id.isalnum()


def test_reasoning_that_the_prompt_has_opened():
    assert joined(read(HERMES, ["\nHm.\n</think>\n\nYes."], opened=True)) == [
        ("Reasoning", "Hm."),
        ("Content", "Yes."),
    ]
    assert joined(read(HERMES, ["Hm"], opened=True)) == [("Reasoning", "Hm")]


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text})


def test_dialects_are_read_off_templates():
    qwen = template("{% if tools %}<tool_call>{% endif %}{{ '</think>' }}")
    assert choose_dialect(qwen) == Dialect.named("hermes", "think")
    assert choose_dialect(qwen, "none", "none") == Dialect()
    assert choose_dialect(qwen, "mistral") == Dialect.named("mistral", "think")
    coder = template("{% if tools %}<tool_call>\n<function=f>{% endif %}")
    assert choose_dialect(coder) == Dialect.named("qwen3-coder")
    llama = template("{% if tools %}<|start_header_id|>{% endif %}")
    assert choose_dialect(llama) == Dialect.named("llama3")
    assert choose_dialect(template("<|start_header_id|>")) == Dialect()
    mistral = template("{% if tools %}[AVAILABLE_TOOLS]{% endif %}")
    assert choose_dialect(mistral) == Dialect.named("mistral")
    assert choose_dialect(None) == Dialect()
