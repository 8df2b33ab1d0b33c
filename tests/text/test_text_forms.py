"""Every form of calls: templates and grammars write what the parser reads, for any cutting."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
from call_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

import weft
from weft.core.errors import GrammarError
from weft.core.grammar import compile_grammar, grammar_tokenizer
from weft.text import ChatTemplate, TextStream, Tokenizer
from weft.text.argumentgrammar import CallableFunction
from weft.text.assistant import Content, Event, Reasoning, ToolArguments, ToolCall
from weft.text.callgrammar import turn_grammar
from weft.text.callwriting import write_calls
from weft.text.detect import choose_dialect
from weft.text.dialect import Dialect, Reading
from weft.text.forms import CALL_FORMS, EFFORTS, MARK, REASONING_FORMS, CallForm
from weft.text.grammar import json_object_grammar, json_schema_grammar

LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0},
        "far": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOW: dict = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"look": LOOK, "now": NOW}
MARKERS = sorted(
    {marker for form in CALL_FORMS.values() for text in form.texts() if (marker := text.strip())}
)
# What a text in a value may be made of: markup of every form, quotes, other scripts.
HOSTILE = st.lists(
    st.sampled_from([*MARKERS, "<think>", "</think>", '"', "'", "\\", "\n", " ", "é😀", "{", "]"])
    | st.text(max_size=6),
    max_size=6,
).map("".join)
# What forms without quotes can say: no marker of their own, no space at the ends, no number sign.
PLAIN = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs"), exclude_characters="<[|"),
    max_size=20,
).map(str.strip)


def read(
    dialect: Dialect, pieces: list[str], *, cut: bool = False, opened: bool = False
) -> list[Event]:
    parser = Reading(dialect, TOOLS, opened).parser()
    return [event for piece in pieces for event in parser.push(piece)] + parser.flush(cut=cut)


def told(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and the calls with their arguments."""
    calls = [event for event in events if isinstance(event, ToolCall)]
    return (
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        [
            (call.name, "".join(e.text for e in events
                                if isinstance(e, ToolArguments) and e.index == call.index))
            for call in calls
        ],
    )  # fmt: skip


def loaded(events: list[Event]) -> list[tuple[str, dict]]:
    return [(name, json.loads(arguments)) for name, arguments in told(events)[2]]


def arguments_of(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {"city": text},
        optional={
            "days": st.integers(0, 10**12),
            "far": st.booleans(),
            "tags": st.lists(st.sampled_from(["a", "b"]), max_size=3),
        },
    )


def calls_of(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, dict]]]:
    one = st.tuples(st.just("look"), arguments_of(text)) | st.just(("now", {}))
    return st.lists(one, min_size=1, max_size=3)


def cut_at(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


CUTS = st.lists(st.integers(0, 400), max_size=12)


@pytest.mark.parametrize("name", CALL_FORMS)
@settings(max_examples=12)
@given(calls=calls_of(PLAIN), cuts=CUTS)
def test_calls_come_back_as_they_were_written(name, calls, cuts):
    form = CALL_FORMS[name]
    calls = calls[:1] if name == "harmony" else calls
    text = write_calls(form, calls)
    dialect = Dialect.named(name)
    expected = [(name, json.loads(json.dumps(arguments))) for name, arguments in calls]
    for pieces in ([text], list(text), cut_at(text, cuts)):
        events = read(dialect, pieces)
        assert loaded(events) == expected
        assert told(events)[:2] == ("", "")


@pytest.mark.parametrize("name", CALL_FORMS)
@settings(max_examples=12)
@given(city=HOSTILE, cuts=CUTS, broken=st.integers(0, 300), cut=st.booleans())
def test_hostile_texts_and_broken_calls_are_read_alike_however_they_are_cut(
    name, city, cuts, broken, cut
):
    calls = [("look", {"city": city, "days": 3}), ("now", {})][: 1 if name == "harmony" else 2]
    text = write_calls(CALL_FORMS[name], calls)
    dialect = Dialect.named(name, "harmony" if name == "harmony" else "think")
    for whole in (text, text[:broken], f"So: {text}", f"<think>{text}", text[broken:]):
        expected = told(read(dialect, [whole], cut=cut))
        assert told(read(dialect, list(whole), cut=cut)) == expected
        assert told(read(dialect, cut_at(whole, cuts), cut=cut)) == expected


@pytest.mark.parametrize("name", CALL_FORMS)
@settings(max_examples=12)
@given(data=st.data(), cuts=CUTS, cut=st.booleans(), opened=st.booleans())
def test_any_pieces_of_a_form_are_read_alike_however_they_are_cut(name, data, cuts, cut, opened):
    form = CALL_FORMS[name]
    call = write_calls(form, [("look", {"city": "x", "days": 3})])
    markup = [text for text in form.texts() if text]
    some = [*markup, *(text[: len(text) // 2] for text in markup), call, call[:-1], call[1:]]
    some += ["look", "city", "3", "x", '"', "{", "}", ",", " ", "\n", "</think>", "<think>", ":"]
    text = "".join(data.draw(st.lists(st.sampled_from(some), max_size=14)))
    dialect = Dialect.named(name, "harmony" if name == "harmony" else "think")
    expected = told(read(dialect, [text], cut=cut, opened=opened))
    assert told(read(dialect, list(text), cut=cut, opened=opened)) == expected
    assert told(read(dialect, cut_at(text, cuts), cut=cut, opened=opened)) == expected
    if not cut and not expected[2] and name != "harmony":
        shown = "".join("".join(expected[:2]).split())
        assert shown in "".join(text.split()) or "think>" in text


@pytest.mark.parametrize("name", [n for n, f in CALL_FORMS.items() if f.body in ("object", "json")])
@settings(max_examples=12)
@given(city=HOSTILE)
def test_markers_within_strings_of_json_are_text(name, city):
    calls = [("look", {"city": city}), ("now", {})]
    assert loaded(read(Dialect.named(name), [write_calls(CALL_FORMS[name], calls)])) == calls


def test_a_closing_marker_in_a_value_ends_it_only_where_markup_follows():
    city = "a </parameter> b\n</parameter>\nc <tool_call> </tool_call> </function>"
    text = write_calls(
        CALL_FORMS["qwen3-coder"], [("look", {"city": city, "days": 2}), ("now", {})]
    )
    expected = [("look", {"city": city, "days": 2}), ("now", {})]
    for pieces in ([text], list(text)):
        assert loaded(read(Dialect.named("qwen3-coder"), pieces)) == expected


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "007", "007"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, " two\nlines ", " two\nlines "),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, " 7\n", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "7.5", 7.5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/text"}, "5", "5"),
        ({"allOf": [{"type": "string"}]}, "5", "5"),
        ({"type": "array"}, "['a', None, True]", ["a", None, True]),
        ({"type": "object"}, "{'a': [1, {'b': \"c\"}]}", {"a": [1, {"b": "c"}]}),
        ({"type": "object"}, '{"a": 1e400}', '{"a": 1e400}'),
        ({"type": "object"}, "{a: 1}", "{a: 1}"),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({}, '"five"', '"five"'),
        (True, "[1]", [1]),
    ],
)
@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "minimax"])
def test_a_tagged_value_is_what_the_schema_says(name, schema, text, value):
    parameters = {"properties": {"x": schema}, "$defs": {"text": {"type": "string"}}}
    written = write_calls(CALL_FORMS[name], [("f", {"x": text})])
    parser = Reading(Dialect.named(name), {"f": parameters}).parser()
    events = [event for char in written for event in parser.push(char)] + parser.flush()
    [(_, arguments)] = told(events)[2]
    if text == '{"a": 1e400}':  # a number that JSON has, and floats have not
        assert arguments == '{"x": {"a": 1e400}}'
    else:
        assert json.loads(arguments) == {"x": value}


def test_strings_stream_escaped_before_they_end():
    parser = Reading(Dialect.named("qwen3-coder"), TOOLS).parser()
    assert parser.push("<tool_call>\n<function=look>\n<parameter=city>\n") != []
    assert parser.push('He said "hi"\\') == [ToolArguments(0, 'He said \\"hi\\"\\\\')]
    assert parser.push("\n") == []
    assert parser.push("more") == [ToolArguments(0, "\\nmore")]
    assert parser.push("\n</para") == []
    assert parser.push("meter>\n</function>") == [ToolArguments(0, '"}')]


def test_ids_are_random_or_what_the_model_wrote():
    kimi = read(
        Dialect.named("kimi-k2"), [write_calls(CALL_FORMS["kimi-k2"], [("look", {}), ("now", {})])]
    )
    assert [e.id for e in kimi if isinstance(e, ToolCall)] == [
        "functions.look:0",
        "functions.now:1",
    ]
    seen = set()
    for name, form in CALL_FORMS.items():
        if form.ids == "call":
            [call] = [e for e in read(Dialect.named(name), [write_calls(form, [("now", {})])])
                      if isinstance(e, ToolCall)]  # fmt: skip
            assert call.id.startswith("call_")
            seen.add(call.id)
    assert len(seen) == sum(form.ids == "call" for form in CALL_FORMS.values())


MARKED = [name for name, form in CALL_FORMS.items() if not form.unmarked and name != "harmony"]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", MARKED)
def test_a_call_within_open_reasoning_ends_it(name, opened):
    calls = [("look", {"city": "a </think> b", "days": 1})]
    text = f"Well.\n{write_calls(CALL_FORMS[name], calls)}"
    text = text if opened else f"<think>\n{text}"
    for pieces in ([text], list(text)):
        events = read(Dialect.named(name, "think"), pieces, opened=opened)
        assert told(events)[:2] == ("Well.", "")
        assert loaded(events) == calls


@pytest.mark.parametrize("name", MARKED)
def test_what_only_looks_like_a_call_stays_reasoning(name):
    opening = CALL_FORMS[name].opening.strip()
    text = f"<think>I could write {opening} now: no</think>\n\nYes."
    for pieces in ([text], list(text)):
        events = read(Dialect.named(name, "think"), pieces)
        thought, content, calls = told(events)
        assert ("".join(thought.split()), content, calls) == (
            "".join(f"I could write {opening} now: no".split()), "Yes.", [],
        )  # fmt: skip


@pytest.mark.parametrize("name", CALL_FORMS)
def test_malformed_calls_are_content_and_never_an_error(name):
    form = CALL_FORMS[name]
    opening = form.opening.strip()
    for rest in ("", " what?", "{" * 50, "[" * 50 + "]", "=(", '{"name": 3}', "\x00", "<" * 9):
        for text in (opening + rest, rest + opening, opening * 3 + rest):
            events = read(Dialect.named(name), list(text))
            shown = "".join(e.text for e in events if isinstance(e, (Content, Reasoning)))
            if not any(isinstance(e, ToolCall) for e in events) and form.body != "harmony":
                assert "".join(shown.split()) == "".join(text.split())


@pytest.mark.parametrize("name", CALL_FORMS)
def test_huge_and_deep_arguments_are_read_in_time(name):
    deep: object = "x"
    for _ in range(40):
        deep = [deep]
    arguments = {"city": "ab\n" * 8_000, "deep": deep}
    text = write_calls(CALL_FORMS[name], [("look", arguments)])
    for pieces in ([text], [text[i : i + 7] for i in range(0, len(text), 7)]):
        [(_, found)] = loaded(read(Dialect.named(name), pieces))
        assert found["city"] == arguments["city"]
        assert found["deep"] == deep
    hostile = CALL_FORMS[name].opening + "[{(" * 4_000
    read(Dialect.named(name), [hostile])


@pytest.mark.parametrize("name", CALL_FORMS)
def test_values_that_nothing_can_load_are_read_without_an_error(name):
    deep = "[" * 20_000 + "]" * 20_000
    form = CALL_FORMS[name]
    for value in (
        deep,
        "9" * 5000,
        "1e400",
        "{" * 900,
        "'\\ud800'",
        '"\\ud800"',
        "-",
        "0x",
        "lambda: 0",
    ):
        text = write_calls(form, [("look", {"days": 77})]).replace("77", value)
        events = read(Dialect.named(name), [text])
        "".join(e.text for e in events if isinstance(e, (Content, ToolArguments))).encode()


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_tell_the_forms_that_they_write(name):
    source, calls, reasoning = FAMILIES[name]
    template = ChatTemplate({"default": source})
    assert choose_dialect(template) == Dialect.named(calls, reasoning)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=4)
@given(city=PLAIN.filter(lambda text: '"' not in text and "\\" not in text), cuts=CUTS)
def test_what_templates_write_is_read(name, city, cuts):
    """A turn of an earlier conversation, as the template shows it to the model."""
    source, calls, reasoning = FAMILIES[name]
    template = ChatTemplate({"default": source})
    made = [("look", {"city": city, "days": 3}), ("now", {})]
    made = made[:1] if calls in ("harmony", "llama3") else made
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": f"id{i}", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(made)
        ],
    }
    if reasoning is not None:
        message["reasoning_content"] = "Let me look."
    asked = {"role": "user", "content": "Q?"}
    before = template.render([asked], add_generation_prompt=calls != "harmony", tools=[])
    text = template.render([asked, message], add_generation_prompt=False, tools=[])
    if calls == "harmony":
        text = text.partition("Q?<|end|>")[2].partition("Reasoning: ")[0]
    else:
        assert text.startswith(before)
        text = text[len(before) :].removesuffix("<|im_end|>\n")
    dialect = Dialect.named(calls, reasoning)
    for pieces in ([text], cut_at(text, cuts)):
        events = read(dialect, pieces)
        assert loaded(events) == made
        assert told(events)[:2] == ("Let me look." if reasoning else "", "")


@pytest.fixture(scope="module")
def builtin() -> Tokenizer:
    return Tokenizer.load(Path(weft.__file__).parent / "builtin")


@pytest.fixture(scope="module")
def tokened(builtin) -> Tokenizer:
    """The built-in tokeniser with every marker that models have as a special token."""
    reference = Reference.from_str(builtin.reference.to_str())
    names = [m for m in MARKERS if m.startswith("<|") and m.endswith("|>") and m.count("<") == 1]
    names += ["<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>"]
    names += ["<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", '<|"|>', "<|tool_call>"]
    names += ["<tool_call|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]
    deepseek = {
        m for f in CALL_FORMS.values() for t in f.texts() for m in t.split("\n") if "\uff5c>" in m
    }
    names += [m for m in deepseek if m.startswith("<") and "DSML" not in m]
    reference.add_special_tokens(sorted(set(names)))
    return Tokenizer(reference, {})


def function(name: str, schema: dict) -> CallableFunction:
    return CallableFunction(name, json_schema_grammar(json.dumps(schema)), schema)


FUNCTIONS = [function("look", LOOK), function("now", NOW)]


@cache
def taker(tokenizer: Tokenizer):
    view = grammar_tokenizer(tokenizer.grammar_document(), tokenizer.vocab_size, (1,))

    @lru_cache(8)
    def compiled(grammar: str):
        return compile_grammar(view, grammar)

    def takes(grammar: str, text: str) -> bool:
        matcher = compiled(grammar).deep_copy()
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    return takes


def ended(form: CallForm, text: str) -> str:
    """A turn of harmony as the engine sees it: what ends the sequence is no part of it."""
    return text.removesuffix(form.call[1]) if form.body == "harmony" else text


GOOD = [
    {"city": "Paris"},
    {"city": "", "days": 3},
    {"city": "a \"b\" é {x}", "days": 0, "far": True, "tags": []},
    {"city": "x", "tags": ["a", "b", "a"]},
]  # fmt: skip
BAD: list[dict] = [
    {},
    {"days": 3},
    {"city": "x", "days": -1},
    {"city": "x", "days": "y"},
    {"city": "x", "tags": ["c"]},
    {"city": "x", "other": 1},
]


@pytest.mark.parametrize("kind", ["builtin", "tokened"])
@pytest.mark.parametrize("name", CALL_FORMS)
def test_grammars_take_what_satisfies_the_schema_and_nothing_else(request, kind, name):
    tokenizer = request.getfixturevalue(kind)
    takes, form = taker(tokenizer), CALL_FORMS[name]
    if name == "mistral" and kind == "builtin":
        form = form.others[0]
    dialect = Dialect.named(name, "harmony" if name == "harmony" else None)
    forced = turn_grammar(dialect, tokenizer, FUNCTIONS, forced=True)
    free = turn_grammar(dialect, tokenizer, FUNCTIONS)
    for arguments in GOOD:
        text = ended(form, write_calls(form, [("look", arguments)]))
        assert takes(forced, text), text
        assert takes(free, text), text
        assert loaded(read(dialect, [text])) == [("look", arguments)]
    assert takes(forced, ended(form, write_calls(form, [("now", {})])))
    for arguments in BAD:
        assert not takes(forced, ended(form, write_calls(form, [("look", arguments)]))), arguments
    assert not takes(forced, ended(form, write_calls(form, [("other", {"city": "x"})])))
    assert not takes(forced, "Let me see.")
    if name != "harmony":
        two = write_calls(form, [("look", GOOD[0]), ("now", {})])
        assert takes(forced, two)
        assert takes(free, "Let me see.")
        single = turn_grammar(dialect, tokenizer, FUNCTIONS, forced=True, parallel=False)
        assert not takes(single, two)
    if name in MARKED:
        assert takes(free, "Let me see. " + write_calls(form, [("look", GOOD[1])]))


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma4", "glm", "deepseek-dsml", "lfm2"])
def test_any_arguments_of_a_function_that_is_not_strict(builtin, name):
    takes, form = taker(builtin), CALL_FORMS[name]
    free = turn_grammar(
        Dialect.named(name), builtin, [CallableFunction("f", json_object_grammar())], parallel=False
    )
    for arguments in ({}, {"a": "x"}, {"a": "x", "b_c": "y z"}):
        assert takes(free, write_calls(form, [("f", arguments)]))
    assert not takes(free, write_calls(form, [("g", {})]))
    if name == "gemma4":
        assert takes(free, write_calls(form, [("f", {"a": [1, {"b": None}, "x"], "c": True})]))


SCHEMAS: list[tuple[dict, list, list]] = [
    ({"type": "string", "pattern": "^[a-c]{2}/x$"}, ["ab/x"], ["ad/x", "ab/xx", ""]),
    ({"type": "string", "pattern": "b+"}, ["abba", "b"], ["aa"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é é"], ["a", "abcd"]),
    ({"const": "only"}, ["only"], ["other"]),
    ({"enum": ["a", 7, None]}, ["a", 7, None], ["b", 8]),
    ({"type": ["string", "null"]}, ["x", None], []),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [5, None], ["x"]),
    ({"$ref": "#/$defs/size"}, [5], [6, "x"]),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/size"}}}, [{"a": 5}, {}], [{"a": 6}]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]],
     [[], [1, 2, 3]]),
    ({"type": "number", "maximum": 1.5}, [1.5, -3], [2]),
]  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "deepseek-dsml", "gemma4", "lfm2"])
@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS)
def test_schemas_hold_where_strings_have_no_quotes(builtin, name, schema, good, bad):
    whole = {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "$defs": {"size": {"enum": [4, 5]}},
    }
    takes, form = taker(builtin), CALL_FORMS[name]
    grammar = turn_grammar(Dialect.named(name), builtin, [function("f", whole)], forced=True)

    def written(value: object) -> str:
        text = write_calls(form, [("f", {"x": value})])
        if form.body == "python":  # values are JSON but for true and false
            text = text.replace(repr(value), json.dumps(value, ensure_ascii=False))
        return text

    assert all(takes(grammar, written(value)) for value in good)
    assert not any(takes(grammar, written(value)) for value in bad)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date"},
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        {"type": "string", "pattern": "^a|b$"},
        {"enum": ["a </parameter> b"]},
        {"$ref": "#/nowhere"},
    ],
)
def test_what_a_form_without_quotes_cannot_guarantee_is_refused(builtin, schema):
    whole = {"type": "object", "properties": {"x": schema}}
    wanted = CallableFunction("f", json_object_grammar(), whole)
    with pytest.raises(GrammarError):
        turn_grammar(Dialect.named("qwen3-coder"), builtin, [wanted], forced=True)


def test_free_keys_and_unknown_required_ones_are_refused(builtin):
    for whole in (
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "required": ["x"]},
        {"type": "object", "anyOf": [{"required": ["x"]}]},
    ):
        wanted = CallableFunction("f", json_object_grammar(), whole)
        with pytest.raises(GrammarError):
            turn_grammar(Dialect.named("glm"), builtin, [wanted], forced=True)


def shown(tokenizer: Tokenizer, dialect: Dialect, ids: list[int]) -> list[Event]:
    """The events of tokens, as a choice reads them."""
    markers = dialect.marker_ids(tokenizer, calls=True)
    stream = TextStream(tokenizer, markers=markers)
    parser = Reading(dialect, TOOLS, markers=markers).parser()
    events = [event for i in ids for event in parser.push(stream.push([i])[0])]
    return events + parser.push(stream.flush()) + parser.flush()


@pytest.mark.parametrize("name", ["glm", "hermes", "kimi-k2", "harmony", "gemma4"])
def test_text_that_spells_a_marker_is_text_where_markers_are_tokens(tokened, name):
    form = CALL_FORMS[name]
    dialect = Dialect.named(name, "harmony" if name == "harmony" else "think")
    ends = {"glm": "</arg_value>", "gemma4": '<|"|>', "harmony": "<|end|><|channel|>"}
    city = f"a {ends.get(name, '</tool_call>')}\n</tool_call> b"
    before, after = write_calls(form, [("look", {"city": "HERE"})]).split("HERE")
    ids = tokened.encode(before, add_special_tokens=False, parse_special=True)
    spelled = json.dumps(city)[1:-1] if form.body in ("object", "json", "harmony") else city
    ids += tokened.encode(spelled, add_special_tokens=False)
    ids += tokened.encode(after, add_special_tokens=False, parse_special=True)
    events = shown(tokened, dialect, ids)
    [(called, arguments)] = told(events)[2]
    assert (called, json.loads(arguments.replace(MARK, ""))) == ("look", {"city": city})
    told_apart = name == "harmony"
    spelled = tokened.encode(before + after, add_special_tokens=False)
    assert bool(told(shown(tokened, dialect, spelled))[2]) != told_apart


def test_reasoning_ends_by_a_marker_however_it_is_spelled(tokened):
    dialect = Dialect.named("hermes", "think")
    call = write_calls(CALL_FORMS["hermes"], [("now", {})])
    for parse in (True, False):
        text = f"<think>\nHm.\n</think>\n\nYes.\n{call}"
        ids = tokened.encode(text, add_special_tokens=False, parse_special=parse)
        assert told(shown(tokened, dialect, ids)) == ("Hm.", "Yes.", [("now", "{}")])


def test_stop_strings_see_markers_as_text(tokened):
    markers = Dialect.named("hermes").marker_ids(tokened, calls=True)
    ids = tokened.encode("a <tool_call>b", add_special_tokens=False, parse_special=True)
    for stop in (" <tool_call>", "<tool_call>b"):
        stream = TextStream(tokened, [stop], markers=markers)
        text, stopped = stream.push(ids)
        assert stopped
        assert stream.stopped_by == stop
        assert text.replace(MARK, "") == "a <tool_call>b".partition(stop)[0]


HARMONY = Dialect.named("harmony", "harmony")
TURNS = [
    ("<|channel|>final<|message|>Hi.", ("", "Hi.", [])),
    ("Hi.", ("", "Hi.", [])),
    (
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        ("Hm.", "Hi.", []),
    ),
    (
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city":"x"}<|call|>',
        ("A\n\nB", "I look.", [("look", '{"city":"x"}')]),
    ),
    (
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"city": 1}',
        ("", "", [("look", '{"city": 1}')]),
    ),
    ("<|channel|>commentary to=functions.now<|message|><|call|>", ("", "", [("now", "{}")])),
    ("<|channel|>commentary to=functions.now<|message|>", ("", "", [("now", "{}")])),
    ("<|channel|>commentary to=functions.now<|message|>now please", ("", "now please", [])),
    ("<|channel|>analysis<|message|>A<|channel|>final<|message|>B", ("A", "B", [])),
    ("<|channel|>final", ("", "<|channel|>final", [])),
    (f"<|channel|>{'x' * 600}", ("", f"<|channel|>{'x' * 600}", [])),
]


@pytest.mark.parametrize(("text", "expected"), TURNS)
def test_messages_of_harmony(text, expected):
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(len(text)))):
        assert told(read(HARMONY, pieces)) == expected


def test_messages_of_harmony_with_neither_calls_nor_reasoning():
    text = TURNS[3][0]
    parser = Reading(HARMONY, None).parser()
    assert told(parser.push(text) + parser.flush())[2] == []
    parser = Reading(Dialect.named("harmony"), TOOLS).parser()
    assert told(parser.push(text) + parser.flush())[0] == ""


def test_efforts_of_harmony_are_three():
    assert {HARMONY.effort(e) for e in ("none", "minimal", "low")} == {"low"}
    assert {HARMONY.effort(e) for e in ("high", "xhigh", "max")} == {"high"}
    assert HARMONY.effort("medium") == EFFORTS[1]
    assert Dialect.named("hermes", "think").effort("xhigh") == "xhigh"


def test_harmony_follows_a_schema_after_reasoning(tokened):
    takes = taker(tokened)
    grammar = turn_grammar(HARMONY, tokened, body=json_schema_grammar('{"const": 7}'))
    thought = "<|channel|>analysis<|message|>Hm 8.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    assert takes(grammar, f"{thought}{final}7")
    assert takes(grammar, f"{final}7")
    assert not takes(grammar, f"{final}8")
    assert not takes(grammar, "7")
    bounded = turn_grammar(HARMONY, tokened, FUNCTIONS, forced=True, thinking_budget=3)
    call = ended(CALL_FORMS["harmony"], write_calls(CALL_FORMS["harmony"], [("now", {})]))
    assert takes(bounded, f"{thought}{call}".replace("Hm 8.", "Hm"))
    assert not takes(bounded, f"{thought}{call}".replace("Hm 8.", "Hm 1 2 3 4 5 6 7"))


def test_reasoning_of_a_forced_turn_cannot_hide_a_call(builtin, tokened):
    for tokenizer in (builtin, tokened):
        takes = taker(tokenizer)
        dialect = Dialect.named("hermes", "think")
        grammar = turn_grammar(dialect, tokenizer, FUNCTIONS, forced=True)
        call = write_calls(CALL_FORMS["hermes"], [("now", {})])
        assert takes(grammar, f"<think>Hm.</think>{call}")
        assert not takes(grammar, f"<think>{call}</think>{call}")


def test_what_is_set_and_declared_counts_before_the_template():
    source, calls, reasoning = FAMILIES["qwen3"]
    plain = ChatTemplate({"default": source})
    assert choose_dialect(plain, "glm", "seed") == Dialect.named("glm", "seed")
    assert choose_dialect(plain, "none", "none") == Dialect()
    assert choose_dialect(None, family="qwen3") == Dialect()

    def declared(**fields) -> Dialect:
        given = {"start_anchor": "x", "fields": fields}
        return choose_dialect(ChatTemplate({"default": source}, response_template=given))

    own = declared(
        tool_calls={"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
        thinking={"open": "<hm>", "close": "</hm>"},
    )
    assert own.tools == CallForm(call=("<call>", "</call>"))
    assert (own.reasoning.start, own.reasoning.end) == ("<hm>", "</hm>")
    written = '<hm>So.</hm><call>{"name": "look", "arguments": {"city": "x"}}</call>'
    assert told(read(own, list(written)))[::2] == ("So.", [("look", '{"city": "x"}')])
    known = declared(
        tool_calls={"open": "<tool_call>", "close": "</tool_call>", "content": "json"},
        thinking={"open": "<think>", "close": "</think>"},
    )
    assert known == Dialect.named("hermes", "think")
    tagged = declared(
        tool_calls={
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "content": "xml-inline",
        }
    )
    assert tagged.tools == CALL_FORMS["qwen3-coder"]
    nothing = {"tool_calls": "?"}, {"tool_calls": {"open": 3}}, {"thinking": {"open": "a"}}
    for fields in nothing:
        assert declared(**fields) == Dialect.named(calls, reasoning)


def test_the_model_type_counts_where_a_template_tells_nothing():
    silent = ChatTemplate({"default": "{{ tools }}{{ messages[0].content }}"})
    assert choose_dialect(silent, family="minimax_m2").tools == CALL_FORMS["minimax"]
    assert choose_dialect(silent, family="no_such_model") == Dialect()
    fails = ChatTemplate({"default": "{% if tools %}<tool_call>{% endif %}{{ 1 // 0 }}"})
    assert choose_dialect(fails).tools == CALL_FORMS["hermes"]


OWN = {
    "object": (
        '{% for c in m.tool_calls %}<<do>>{"fn": "{{ c.function.name }}", "with": '
        "{{ c.function.arguments | tojson }}}<</do>>{% endfor %}"
    ),
    "section": (
        "<@acts>{% for c in m.tool_calls %}<@act>{{ c.function.name }}<@with>"
        "{{ c.function.arguments | tojson }}</@act>{% endfor %}</@acts>"
    ),
    "nested": (
        '{% for c in m.tool_calls %}<call>{"type": "function", "function": {"name": '
        '"{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}}</call>'
        "{% endfor %}"
    ),
    "tagged": (
        "{% for c in m.tool_calls %}<do {{ c.function.name }}>{% for k, v in "
        "c.function.arguments.items() %}<set {{ k }}>{{ v }}</set>{% endfor %}</do>{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_forms_that_nobody_knows_are_found_by_rendering(name):
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.first %}{{ tools }}"
        "{% endif %}{% if m.tool_calls %}" + OWN[name] + "{% endif %}<|end|>{% endfor %}"
    )  # fmt: skip
    template = ChatTemplate({"default": source})
    dialect = choose_dialect(template)
    assert dialect.tools is not None
    made = [("look", {"city": "Paris in May", "tags": "q"}), ("look", {"city": "x", "tags": "b"})]
    text = template.render(
        [
            {"role": "user", "content": "Q?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "id": "i", "function": {"name": n, "arguments": a}}
                    for n, a in made
                ],
            },
        ],
        tools=[],
    )
    turn = text.partition("<|assistant|>")[2].removesuffix("<|end|>")
    assert write_calls(dialect.tools, made) == turn
    strings = {"look": {"properties": {"city": {"type": "string"}, "tags": {"type": "string"}}}}
    for pieces in ([turn], list(turn)):
        parser = Reading(dialect, strings).parser()
        events = [e for piece in pieces for e in parser.push(piece)] + parser.flush()
        assert loaded(events) == made
        assert told(events)[1] == ""


def test_reasoning_that_nobody_knows_is_found_by_rendering():
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<[muse]>"
        "{{ m.reasoning_content }}<[/muse]>{% endif %}{{ m.content }}{% endfor %}"
    )
    found = choose_dialect(ChatTemplate({"default": source})).reasoning
    assert (found.start, found.end) == ("<[muse]>", "<[/muse]>")


def test_a_role_is_no_marker_of_reasoning():
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}"
        "{{ m.reasoning_content }}<|so|>{% endif %}{{ m.content }}{% endfor %}"
    )
    assert choose_dialect(ChatTemplate({"default": source})).reasoning is None


DECLARED = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


@settings(max_examples=12)
@given(calls=calls_of(PLAIN))
def test_a_declared_form_is_read_as_transformers_reads_it(calls):
    text = f"<think>\nHm.\n</think>\n\n{write_calls(CALL_FORMS['hermes'], calls)}"
    parsing = pytest.importorskip("transformers.utils.chat_parsing")  # since 5
    theirs = parsing.parse_response(text, DECLARED, prefix="")
    dialect = choose_dialect(ChatTemplate({"default": "{{ tools }}"}, response_template=DECLARED))
    ours = read(dialect, list(text))
    assert told(ours)[:2] == (theirs["thinking"], theirs.get("content", ""))
    assert loaded(ours) == [
        (call["function"]["name"], call["function"]["arguments"]) for call in theirs["tool_calls"]
    ]


def test_forms_are_frozen_and_have_names_for_settings():
    assert set(REASONING_FORMS) >= {"think", "mistral", "command", "seed", "gemma4", "harmony"}
    with pytest.raises(AttributeError):
        CALL_FORMS["hermes"].between = ""
