"""Grammars: accepted ones, refusals by name, and bounded cost of hostile ones."""

from __future__ import annotations

import contextlib
import json
import re
import time
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

import weft
from weft.core.errors import GrammarError
from weft.core.grammar import compile_grammar, grammar_tokenizer
from weft.text import Tokenizer
from weft.text.callgrammar import CallableFunction, turn_grammar
from weft.text.closing import close_objects
from weft.text.dialect import Dialect
from weft.text.grammar import (
    GrammarChecker,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from weft.text.schema import read_schema

EOS = (1, 6)


@pytest.fixture(scope="module")
def builtin() -> Tokenizer:
    return Tokenizer.load(Path(weft.__file__).parent / "builtin")


@pytest.fixture(scope="module")
def checker(builtin) -> GrammarChecker:
    return GrammarChecker(builtin, 4096, EOS)


def taker(tokenizer: Tokenizer, vocab_size: int, eos: tuple[int, ...] = EOS):
    """Whether a grammar takes a text, and may end after it."""
    view = grammar_tokenizer(tokenizer.grammar_document(), vocab_size, eos)

    def check(grammar: str, text: str) -> bool:
        matcher = compile_grammar(view, grammar).deep_copy()
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    return check


@pytest.fixture(scope="module")
def takes(builtin):
    return taker(builtin, 4096)


def schema(value) -> str:
    return json_schema_grammar(json.dumps(value))


def properties(count: int, *, required: int):
    names = [f"p{i}" for i in range(count)]
    return {
        "properties": dict.fromkeys(names, True),
        "required": names[:required],
        "type": "object",
    }


def test_objects_with_as_many_optional_properties_as_may_be_can_be_followed(takes):
    """What is taken at the door must not fail in the output."""
    assert takes(schema(properties(100, required=0)), '{"p1": 1, "p99": 2}')
    assert takes(
        schema(properties(1000, required=900)), json.dumps({f"p{i}": i for i in range(900)})
    )


def nested(depth: int) -> dict:
    node: dict = {"type": "string"}
    for _ in range(depth):
        node = {"type": "array", "items": node}
    return node


def chain(length: int, keyword: str) -> dict:
    """Definitions that each name the next one twice: 2 ** length when written out."""
    refs = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**refs, f"d{length}": {"type": "string"}}}


def test_each_kind_takes_what_it_says_and_nothing_else(takes):
    person = schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    )
    assert takes(person, '{"name": "Zoë 😀", "age": 3}')
    assert not takes(person, '{"name": "x"}')
    assert not takes(person, '{"name": "x", "age": -1}')
    assert takes(json_object_grammar(), '{"a": [1, {"b": null}]}')
    assert not takes(json_object_grammar(), "[1]")
    assert takes(regex_grammar("[a-c]{2}-\\d+"), "ab-12")
    assert not takes(regex_grammar("[a-c]{2}-\\d+"), "ab-12x")
    choice = choice_grammar(["yes", 'no "x"\n', "😀/\\"])
    assert [takes(choice, text) for text in ("yes", 'no "x"\n', "😀/\\", "no", "")] == [
        *(True, True, True, False, False)
    ]
    assert takes(lark_grammar('start: "a" b+\nb: /[0-9]/ | "(" b ")"'), "a1((2))")


def test_bounds_of_numbers(takes):
    above = schema({"type": "number", "exclusiveMinimum": 0})
    assert [takes(above, text) for text in ("0", "0.0", "0.01", "5")] == [False, False, True, True]
    half = schema({"type": "number", "minimum": 0.5, "exclusiveMaximum": 2})
    assert [takes(half, text) for text in ("0.4", "0.5", "1.99", "2")] == [False, True, True, False]


def test_a_key_has_one_spelling_and_white_space_is_bounded(takes):
    flags = schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert takes(flags, '{"a": 1}')
    assert not takes(flags, '{"\\u0061": "text"}')
    flexible = json_schema_grammar('{"type": "object"}', "flexible")
    assert takes(flexible, "{" + " " * 16 + '"a":\n1}')
    assert not takes(flexible, "{" + " " * 17 + '"a": 1}')


def test_json_is_compact_unless_it_is_asked_for_otherwise(takes):
    numbers = {"type": "object", "additionalProperties": {"type": "array"}}
    right = ['{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}', '{"a": 1,"b":[1, {"c":2}]}', "{}"]
    wrong = ['{ "a": 1}', '{"a" : 1}', '{"a":  1}', '{"a":\n1}', '{"a":[1 ,2]}', '{"a": 1 }', "{ }"]
    for compact in (schema({"type": "object"}), json_object_grammar()):
        assert [takes(compact, text) for text in right] == [True] * 4
        assert [takes(compact, text) for text in wrong] == [False] * 7
        assert not takes(compact, '{"a": 1}\n')
    for flexible in (json_schema_grammar("{}", "flexible"), json_object_grammar("flexible")):
        assert [takes(flexible, text) for text in right + wrong] == [True] * 11
    assert not takes(schema(numbers), '{"a": [\n  1\n]}')


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"propertyNames": {"pattern": "a", "minLength": 2}}, "at '.': propertyNames"),
        ({"items": {"propertyNames": {"format": "email"}}}, "at 'items': propertyNames"),
        ({"propertyNames": {"type": "integer"}}, "satisfied by no text"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"a": {}}}, "beside properties"),
        (
            {
                "propertyNames": {"minLength": 2},
                "properties": {"ab": {}},
                "additionalProperties": {"type": "null"},
            },
            "beside properties",
        ),
        ({"propertyNames": {"pattern": "a"}, "anyOf": [{}]}, "anyOf"),
        ({"propertyNames": {"$ref": "#/$defs/x"}}, "not there"),
        ({"propertyNames": {"maxLength": -1}}, "whole numbers"),
        ({"properties": {"a": {"items": {"extends": {}}}}}, "properties.a.items.*extends"),
        ({"type": "string", "format": "made-up"}, "made-up"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
        ({"const": "\u0001"}, "control characters"),
        ({"properties": {"a": {"enum": [{"\u0001": 1}]}}}, "properties.a.*control characters"),
        ({"properties": {"\u0001": {}}}, "control characters"),
        ({"type": "object", "required": ["\u0001"]}, "control characters"),
        ({"type": "integer", "minimum": 1e30}, "too far from 0"),
        ({"type": "number", "maximum": -1e300}, "too far from 0"),
        ({"type": "number", "minimum": 1e-300}, "closer to 0"),
        ({"minimum": True}, "expected a number"),
        ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"allOf": [{"exclusiveMaximum": True, "maximum": 3}]}, "allOf.*exclusiveMaximum"),
        ({"type": "array", "items": [{"type": "string"}]}, "prefixItems"),
        ({"type": "array", "items": []}, "prefixItems"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0 cannot be excluded"),
        (
            {"allOf": [{"type": "number", "exclusiveMaximum": 0}, {"minimum": -0.5}]},
            "0 cannot be excluded",
        ),
        ({"type": "made-up"}, "made-up"),
        ({"$ref": "http://localhost/schema"}, "localhost"),
        ({"x-guidance": {"lenient": True}, "format": "made-up", "type": "string"}, "made-up"),
        (False, "object"),
        (3, "object"),
        # Satisfied by no finite text.
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text"),
    ],
)
def test_what_cannot_be_guaranteed_is_refused_by_name(checker, value, says):
    with pytest.raises(GrammarError, match=says) as caught:
        checker.check(schema(value))
    # Nothing of how the library is set up or written: a client can set none of it.
    assert not re.search("option'|Failed|f64|Some", caught.value.message)


MAP = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize("kind", [{}, {"type": "string"}], ids=["any", "texts"])
def test_names_whose_references_double_are_refused_before_all_are_read(kind):
    defs = {
        f"a{n}": {**kind, "anyOf": [{"$ref": f"#/$defs/a{n + 1}", **kind}] * 2} for n in range(16)
    }
    text = json.dumps(
        {"propertyNames": {"$ref": "#/$defs/a0"}, "$defs": {**defs, "a16": {"enum": ["b"]}}}
    )
    with pytest.raises(GrammarError, match="too much to read"):
        read_schema(text)


@pytest.mark.parametrize("kind", [{}, {"type": "string"}], ids=["any", "texts"])
def test_names_that_refer_to_themselves_are_refused(kind):
    defs = {"a": {**kind, "anyOf": [{"$ref": "#/$defs/a", **kind}]}}
    with pytest.raises(GrammarError, match="refers to itself"):
        read_schema(json.dumps({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": defs}))


@pytest.mark.parametrize(
    "names",
    [
        True,
        {},
        {"type": "string"},
        {"type": ["string", "null"], "title": "Key", "minLength": 0},
        {"anyOf": [{"enum": ["a"]}, {"type": "string"}]},
        {"$ref": "#/$defs/key"},
    ],
)
def test_names_of_properties_that_say_nothing_are_dropped(takes, names):
    given = {**MAP, "propertyNames": names}
    defs = {"$defs": {"key": {"type": "string", "description": "a key"}}}
    for place in (
        given,
        {"$ref": "#/$defs/map", "$defs": {"map": given}},
        {"anyOf": [{"type": "null"}, given]},
        {"allOf": [given], "properties": {"b": True}},
    ):
        grammar = schema({**place, "$defs": {**place.get("$defs", {}), **defs["$defs"]}})
        assert takes(grammar, '{"any": 1}')
        assert not takes(grammar, '{"any": "text"}')


@pytest.mark.parametrize(
    ("more", "right", "wrong"),
    [
        ({"propertyNames": {"enum": ["a", 3, "b"]}}, ["{}", "ab", "b"], ["c", "aa", "a1"]),
        ({"propertyNames": {"enum": ["a", "b"]}, "required": ["b"]}, ["b", "ab"], ["a", "{}"]),
        ({"propertyNames": {"const": "a"}}, ["a", "{}"], ["b"]),
        ({"propertyNames": {"$ref": "#/$defs/color"}}, ["red", "green"], ["blue"]),
        ({"propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}}, ["ab"], ["c"]),
        ({"propertyNames": {"pattern": "^x_"}}, ["x_1", "{}"], ["y_1", "ax_"]),
        ({"propertyNames": {"pattern": "^x_"}, "required": ["x_1"]}, ["x_1"], ["x_2", "{}"]),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ["aé", "abc"], ["a", "abcd"]),
        ({"propertyNames": {"enum": ["a", "bb"], "minLength": 2}}, ["bb"], ["a"]),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "properties": {"b": {}, "c": {}}},
            ["a", "b", "ba"],
            ["c", "d"],
        ),
        (
            {
                "propertyNames": {"minLength": 2},
                "properties": {"a": {}, "bb": {}},
                "additionalProperties": True,
            },
            ["bb", "cc"],
            ["a", "c"],
        ),
        ({"propertyNames": {"enum": [f"k{i}" for i in range(200)]}}, ["k7", "k199"], ["k200"]),
        ({"propertyNames": {"enum": ["a"]}, "additionalProperties": False}, ["{}"], ["a"]),
    ],
)
def test_names_of_properties_are_honoured(takes, more, right, wrong):
    """Keys of one character stand for themselves; ``aa`` is a key twice."""
    colors = {"$defs": {"color": {"type": "string", "enum": ["red", "green"]}}}
    grammar = schema({**MAP, **more, **colors})

    def written(keys: str) -> str:
        names = list(keys) if set(keys) <= set("ab") else [keys]
        names = [keys] if keys == "bb" else names
        return "{}" if keys == "{}" else "{" + ", ".join(f'"{name}": 1' for name in names) + "}"

    assert [takes(grammar, written(keys)) for keys in right] == [True] * len(right)
    assert [takes(grammar, written(keys)) for keys in wrong] == [False] * len(wrong)


def test_names_of_properties_within_others_do_not_multiply(takes):
    node: dict = {"type": "integer"}
    for _ in range(25):
        node = {
            "type": "object",
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": node,
        }
    grammar = schema(node)
    assert len(grammar) < 20_000
    assert takes(grammar, '{"b":' * 25 + "1" + "}" * 25)


def test_characters_that_no_output_needs_to_have_are_let_through(takes):
    notes = {"title": "\u0000", "description": "\u0001", "$comment": "\u0002"}
    texts = {**notes, "default": "\u0000", "examples": ["\u0000"]}
    grammar = schema({**texts, "properties": {"description": {"type": "null", **texts}}})
    assert takes(grammar, '{"description": null}')


BOMBS = {
    "deep schema": lambda: schema(nested(70)),
    "deeper than Python": lambda: json_schema_grammar('{"items":' * 5000 + "{}" + "}" * 5000),
    "large schema": lambda: schema({"description": "x" * 200_000}),
    "many properties": lambda: schema(properties(1001, required=1001)),
    "many optional properties": lambda: schema(properties(102, required=1)),
    "huge enum": lambda: schema({"enum": list(range(10_001))}),
    "many choices": lambda: choice_grammar([str(i) for i in range(10_001)]),
    "large choices": lambda: choice_grammar(["x" * 1000] * 200),
    "long expression": lambda: regex_grammar("a" * 5000),
    "nested counts": lambda: regex_grammar("((a{99}){99}){99}"),
    "nested counts in a schema": lambda: schema({"pattern": "x((((y{9}){9}){9}){9}){9}"}),
    "nested counts in a key": lambda: schema({"patternProperties": {"((a{99}){99}){99}": {}}}),
    "large grammar": lambda: lark_grammar("start: " + '"a" ' * 20_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_are_compiled(name):
    with pytest.raises(GrammarError):
        BOMBS[name]()


COSTLY = {
    "as many properties as may be": schema(properties(1000, required=1000)),
    "as many optional properties as may be": schema(properties(101, required=1)),
    "as large an enum as may be": schema({"enum": [f"v{i}" for i in range(9999)]}),
    "as many choices as may be": choice_grammar([f"option {i}" for i in range(9999)]),
    "as deep as may be": schema(nested(30)),
    "doubling anyOf": schema(chain(20, "anyOf")),
    "doubling allOf": schema(chain(20, "allOf")),
    "nested stars": regex_grammar("((((a+)+)+)+)+b"),
    "many dots": regex_grammar("(.*a){300}b"),
    "far back": regex_grammar("(?s:.*)a.{30}z"),
    "a large count": regex_grammar("[a-z]{1,99999999}"),
    "counts": regex_grammar("(a{1,99}){1,99}"),
    "ambiguous": lark_grammar('start: s\ns: s s s | s s | "a" |'),
    "counted rules": lark_grammar('start: a{1,999}\na: b{1,9}\nb: "x"{1,9}'),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_may_be_asked_costs_little_or_is_refused(builtin, name):
    """CPU time, not elapsed: compiling and eight tokens take less than 3 s on any machine."""
    view = grammar_tokenizer(builtin.grammar_document(), 4096, EOS)
    before = time.process_time()
    matcher = None
    with contextlib.suppress(GrammarError):
        matcher = compile_grammar(view, COSTLY[name]).deep_copy()
    for _ in range(8):
        if matcher is None or matcher.is_error() or matcher.is_stopped():
            break
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        matcher.consume_token(int(allowed[-1]))
    assert time.process_time() - before < 3


def test_every_kind_of_tokeniser_gives_json(tokenizer):
    size = tokenizer.vocab_size + 40  # models have ids that their tokenisers lack
    if tokenizer.decode_table is None:
        with pytest.raises(GrammarError, match="tokeniser of this model"):
            GrammarChecker(tokenizer, size, (tokenizer.eos_id,)).check(json_object_grammar())
        return
    view = grammar_tokenizer(tokenizer.grammar_document(), size, (tokenizer.eos_id,))
    names = compile_grammar(view, schema({"type": "array", "items": {"type": "string"}}))
    text = '["a b", "é日", "😀\\n"]'
    matcher = names.deep_copy()
    assert matcher.consume_tokens(view.greedy_tokenize(text))
    assert matcher.is_accepting()
    ids = view.greedy_tokenize(text)
    assert tokenizer.decode(ids) == text
    for wrong in ([*ids[:2], tokenizer.eos_id], [*ids[:2], size - 1]):
        assert not names.deep_copy().consume_tokens(wrong)


def test_markers_that_are_control_tokens(builtin):
    reference = Reference.from_str(builtin.reference.to_str())
    reference.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    mistral = Tokenizer(reference, {})
    checks = taker(mistral, mistral.vocab_size)
    dialect = Dialect.named("mistral", "mistral")
    assert len(dialect.marker_ids(mistral, calls=True)) == 4
    assert len(dialect.marker_ids(mistral, calls=False)) == 2
    call = '[TOOL_CALLS]add[ARGS]{"a": 1}'
    forced = turn_grammar(dialect, mistral, [ADD, NOW], forced=True)
    for text in (call, f"[THINK]Hm[/THINK]{call}", f"{call}[TOOL_CALLS]now[ARGS]{{}}"):
        assert checks(forced, text)
    assert not checks(forced, '[TOOL_CALLS]add[ARGS]{"a": 3}')
    assert not checks(forced, "Hm")
    free = turn_grammar(dialect, mistral, [ADD, NOW])
    assert checks(free, f"Let me see.{call}")
    assert checks(free, "Let me see.")
    assert not checks(free, "Let me see.[TOOL_CALLS]sub[ARGS]{}")


@pytest.mark.parametrize(
    "text",
    [
        '{"const": "\\ud800"}',
        '{"description": "\\ud800"}',
        '{"const": "\ud800"}',
        '{"minimum": NaN}',
        '{"minimum": 1e999}',
        '{"minLength": -1}',
        '{"minLength": 1.5}',
        '{"minLength": "1"}',
        '{"required": 3}',
        '{"properties": []}',
        '{"enum": {}}',
        '{"enum": []}',
        '{"pattern": 3}',
        '{"items": 3}',
        '{"$ref": 3}',
        '{"$ref": "#/$defs/missing"}',
        '{"type": ["string", 3]}',
        '{"minimum": "a"}',
        '{"a": 1}}',
        "",
        '"a"',
    ],
)
def test_malformed_schemas_are_errors_of_the_schema(checker, text):
    with pytest.raises(GrammarError):
        checker.check(json_schema_grammar(text))


@pytest.mark.parametrize(
    "rules", ['s s | s s s | /[a-z ]/ | ""', "s s | s s s | s s s s | /./"], ids=["empty", "four"]
)
def test_ambiguous_grammars_end_before_they_cost_much(builtin, rules):
    view = grammar_tokenizer(builtin.grammar_document(), 4096, EOS)
    matcher = compile_grammar(view, lark_grammar(f"start: s\ns: {rules}"))
    draw = np.random.default_rng(0)
    for _ in range(25):  # then a mask takes 0.1 s; with twice the items it would be seconds
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if matcher.is_error():
            break
        matcher.consume_token(int(draw.choice(np.setdiff1d(allowed, EOS))))
    assert "items" in matcher.get_error()


def test_a_checker_remembers_both_answers(checker):
    good, bad = schema({"type": "null"}), schema({"not": {}})
    assert not checker.knows(good)
    checker.check(good)
    for _ in range(2):
        with pytest.raises(GrammarError, match="not"):
            checker.check(bad)
    assert checker.knows(good)
    assert checker.knows(bad)


def test_a_model_without_an_end_has_no_structured_output(builtin):
    with pytest.raises(GrammarError, match="end-of-sequence"):
        GrammarChecker(builtin, 4096, ()).check(json_object_grammar())


ADD = CallableFunction(
    "add", schema({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
)
NOW = CallableFunction("now", schema({"type": "object", "additionalProperties": False}))
CALLS = {
    "hermes": [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>',
    ],
    "llama3": [
        '{"name": "add", "parameters": {"a": 1}}',
        '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        '{"name": "sub", "parameters": {"a": 1}}',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "add", "arguments": {}}]',
    ],
}


@pytest.mark.parametrize("family", CALLS)
def test_turns_of_calls(builtin, takes, family):
    one, two, wrong = CALLS[family]
    prose = "Let me see."

    def allowed(**settings) -> list[bool]:
        grammar = turn_grammar(Dialect.named(family), builtin, [ADD, NOW], **settings)
        return [takes(grammar, text) for text in (one, two, wrong, prose, "7")]

    assert allowed(forced=True) == [True, True, False, False, False]
    assert allowed(forced=True, parallel=False) == [True, False, False, False, False]
    assert allowed() == [True, True, False, True, True]
    assert allowed(body=schema({"const": 7})) == [True, True, False, False, True]
    if family != "llama3":
        assert takes(turn_grammar(Dialect.named(family), builtin, [ADD, NOW]), prose + one)


def test_reasoning_may_come_before_what_is_asked_for(builtin, takes):
    body = schema({"const": 7})
    grammar = turn_grammar(Dialect.named(None, "think"), builtin, body=body)
    assert takes(grammar, "7")
    assert takes(grammar, "<think>Well, {8?}</think>\n\n7")
    assert not takes(grammar, "<think>Well</think>\n\n8")
    opened = turn_grammar(Dialect.named(None, "think"), builtin, body=body, opened=True)
    assert takes(opened, "Well</think>7")
    assert not takes(opened, "7")


@pytest.fixture(scope="module")
def qwen(builtin) -> Tokenizer:
    """The built-in tokeniser with markers as tokens that are not special, as Qwen's are."""
    reference = Reference.from_str(builtin.reference.to_str())
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    reference.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    return Tokenizer(reference, {})


def test_markers_that_are_tokens_but_not_special(qwen):
    checks = taker(qwen, qwen.vocab_size)
    call = CALLS["hermes"][0]
    dialect = Dialect.named("hermes", "think")
    forced = turn_grammar(dialect, qwen, [ADD, NOW], forced=True)
    assert checks(forced, call)
    assert checks(forced, f"<think>Hm</think>\n\n{call}")
    opened = turn_grammar(dialect, qwen, [ADD, NOW], forced=True, opened=True)
    assert checks(opened, f"Hm</think>\n\n{call}")
    assert checks(turn_grammar(dialect, qwen, [ADD, NOW]), f"Let me see.{call}")


def test_text_that_spells_a_control_token_can_be_written(tokenizer):
    """Where only one text is left, the mask must not offer the token that it spells."""
    if tokenizer.decode_table is None:
        return
    size = tokenizer.vocab_size
    view = grammar_tokenizer(tokenizer.grammar_document(), size, (tokenizer.eos_id,))
    names = [token.content for token in tokenizer.added_tokens if token.is_apart]
    text = "a" + "".join(names)
    output, matcher = [], compile_grammar(view, choice_grammar([text])).deep_copy()
    while not matcher.is_accepting():
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert tokenizer.eos_id not in allowed
        output.append(int(allowed[0]))
        assert matcher.consume_token(output[-1])
    assert tokenizer.decode(output) == text


@cache
def view_of(tokenizer: Tokenizer):
    return grammar_tokenizer(tokenizer.grammar_document(), tokenizer.vocab_size, EOS)


def longest(tokenizer: Tokenizer, grammar: str, say: str, start: str = "") -> str:
    """What a turn says that repeats one token while it may, then writes what is left to write.

    White space between its parts is left out.
    """
    matcher = compile_grammar(view_of(tokenizer), grammar).deep_copy()
    output = tokenizer.encode(start, add_special_tokens=False) if start else []
    assert matcher.consume_tokens(output)
    [wanted] = tokenizer.encode(say, add_special_tokens=False)
    spelled = partial(tokenizer.decode, skip_special_tokens=False)
    for _ in range(40):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if wanted not in allowed and matcher.is_accepting():
            break
        rest = [i for i in allowed.tolist() if spelled([i]).strip(" \n")]
        output.append(wanted if wanted in allowed else (rest or allowed.tolist())[0])
        assert matcher.consume_token(output[-1])
    return spelled(output)


@pytest.mark.parametrize("budget", [0, 1, 9])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("kind", ["builtin", "qwen"])
def test_a_thinking_budget_ends_reasoning_by_its_marker(request, kind, opened, budget):
    tokenizer = request.getfixturevalue(kind)
    start = "" if opened else "<think>"
    dialect = Dialect.named("hermes", "think")
    settings = {"opened": opened, "thinking_budget": budget}
    thought = f"{start}{' the' * budget}</think>"
    for grammar in (
        turn_grammar(dialect, tokenizer, body=schema({"const": 7}), **settings),
        turn_grammar(
            Dialect.named(None, "think"), tokenizer, body=schema({"const": 7}), **settings
        ),
    ):
        assert longest(tokenizer, grammar, " the", start) == f"{thought}7"
    forced = turn_grammar(dialect, tokenizer, [NOW], forced=True, **settings)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert longest(tokenizer, forced, " the", start) == f"{thought}{call}"
    for functions in ([], [NOW]):
        free = turn_grammar(dialect, tokenizer, functions, **settings)
        answer = longest(tokenizer, free, " the", start)
        assert answer.startswith(f"{thought} the the the")
        assert longest(tokenizer, free, "!", start).startswith(f"{start}{'!' * budget}</think>!!!")


@pytest.mark.parametrize("kind", ["builtin", "qwen"])
def test_reasoning_within_its_budget_ends_where_the_model_ends_it(request, kind):
    tokenizer = request.getfixturevalue(kind)
    checks = taker(tokenizer, tokenizer.vocab_size)
    dialect = Dialect.named("hermes", "think")
    free = turn_grammar(dialect, tokenizer, [NOW], thinking_budget=9)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for answer in ("Yes. <b>2 < 3</b>", call, f"I look.{call}"):
        assert checks(free, f"<think>Hm, 3 > 2.</think>\n\n{answer}")
        assert checks(free, answer)
    assert not checks(free, "<think> a b c d e f g h i j k")
    assert not checks(free, " <think> a b c d e f g h i j k")
    for family, (one, _, wrong) in CALLS.items():
        dialect = Dialect.named(family, "think")
        settings = {"body": schema({"const": 7}), "thinking_budget": 9}
        body = turn_grammar(dialect, tokenizer, [ADD, NOW], **settings)
        for thought in ("", "<think>Hm.</think>"):
            allowed = [checks(body, thought + answer) for answer in (one, "7", wrong, "8")]
            assert allowed == [True, True, False, False]


def test_a_thinking_budget_says_nothing_where_no_reasoning_is_marked(builtin, takes):
    grammar = turn_grammar(Dialect(), builtin, body=schema({"const": 7}), thinking_budget=3)
    assert takes(grammar, "7")


def test_calls_of_a_model_without_a_form_are_refused(builtin):
    with pytest.raises(GrammarError, match="no form of tool calls"):
        turn_grammar(Dialect(), builtin, [ADD], forced=True)


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": {"a": {"type": "integer"}}}, True),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, False),
        ({"properties": {"a": {"type": "integer"}}, "patternProperties": {"^b$": {}}}, False),
        ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, False),
        ({"properties": {"a": {"type": "integer"}}, "minProperties": 2}, False),
        ({"properties": {"a": {"type": "integer"}}, "allOf": [{"required": ["b"]}]}, False),
        ({"properties": {}}, True),
        ({}, False),
    ],
)
def test_keys_that_a_schema_does_not_name(schema, closed):
    nodes = [{"type": "object", **schema}]
    assert close_objects(nodes) == closed
    assert (nodes[0].get("additionalProperties") is False) == closed


def test_objects_within_are_closed_and_merged_ones_are_not():
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    listed = {"type": "object", "properties": {"of": {"type": "array", "items": inner}}}
    assert json_schema_grammar(json.dumps(listed)).count("additionalProperties") == 2
    merged = {"allOf": [inner, {"type": "object", "properties": {"b": {"type": "integer"}}}]}
    assert "additionalProperties" not in json_schema_grammar(json.dumps(merged))
