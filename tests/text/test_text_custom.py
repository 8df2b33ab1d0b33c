"""Formats of custom tools: their text as a string of JSON, and refusals."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

import weft
from weft.core.errors import GrammarError
from weft.core.grammar import compile_grammar, grammar_tokenizer
from weft.text import Tokenizer
from weft.text.grammar import GrammarChecker, custom_grammar
from weft.text.regular import MAX_EXPRESSION_CHARS, lark_expression

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
SUM = r"""
// Sums of products.
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)* -> mul
    | factor
factor.2: INT  # one number
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
WORDS = r"""
start: WORD ("," WORD){1,2} [num] "END"i
?num: "0".."9"~2
WORD: LETTER+
%import common (LETTER, WS_INLINE)
%import common.DIGIT -> ONE
%ignore WS_INLINE
"""
CHANGE = '*** Begin Patch\n*** Update File: a "b"\\c.py\n@@ def f():\n-\told\n+\tnew "x" \\n\n'
ADDED = "*** Add File: é.txt\n+hi\n*** End Patch"


@pytest.fixture(scope="module")
def builtin() -> Tokenizer:
    return Tokenizer.load(Path(weft.__file__).parent / "builtin")


@pytest.fixture(scope="module")
def takes(builtin):
    """Whether a format takes a text as the string of a call's arguments."""
    view = grammar_tokenizer(builtin.grammar_document(), 4096, (1, 6))

    def check(form, text: str) -> bool:
        matcher = compile_grammar(view, custom_grammar(form)).deep_copy()
        arguments = json.dumps({"input": text}, ensure_ascii=False)
        ids = builtin.encode(arguments, add_special_tokens=False)
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    return check


def form(syntax: str, definition: str):
    return {"type": "grammar", "syntax": syntax, "definition": definition}


@pytest.mark.parametrize(
    ("definition", "right", "wrong"),
    [
        (PATCH, [CHANGE + ADDED], [CHANGE, ADDED, "hello", f"x{CHANGE}{ADDED}"]),
        (SUM, ["1", "1 + 22 * 3"], ["1+2", "1 + ", "a", ""]),
        (WORDS, ["a,b end", "a , b,c 12 End"], ["a,b,c,d end", "a,b 1 end", "a b,c end"]),
        (r'start: "a\tb" | /[^a]\/"\n/s | "\\"', ["a\tb", 'x/"\n', "\\"], ["a b", "\\\\"]),
        ('start: "x"?num\n!num: ONE\nONE: "1"', ["x1", "1"], ["x"]),
        ('start: ("a"~2 | "b"~1..2 | "c"{2,})+"."?', ["aab.", "ccc"], ["a", "c."]),
    ],
)
def test_a_lark_grammar_is_followed_within_the_string(takes, definition, right, wrong):
    given = form("lark", definition)
    assert [takes(given, text) for text in right] == [True] * len(right)
    assert [takes(given, text) for text in wrong] == [False] * len(wrong)


def test_an_expression_and_any_text_within_the_string(takes):
    given = {"type": "grammar", "grammar": {"syntax": "regex", "definition": 'say "[^"]+"|a\n'}}
    assert takes(given, 'say "hi\n\\"')
    assert takes(given, "a\n")
    assert not takes(given, 'say "hi')
    assert not takes(given, 'xsay "hi"')
    for anything in (None, {"type": "text"}):
        assert takes(anything, 'any\n"text"')


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ('start: a\na: "x" a | "y"', "'a' refers to itself"),
        ("start: b", "does not define 'b'"),
        ("", "does not define 'start'"),
        ('start: "a', "cannot be read at"),
        ("start: <|end|>", "cannot be read at"),
        ('start: %json {"type": "object"}', "%json"),
        ("%declare A\nstart: A", "%declare"),
        ("%import common.FOO\nstart: FOO", "no 'FOO'"),
        ('start: "a" ~"x"', "not complete"),
        ("start[lazy]: /a*/", "plain definition"),
        ("start: /(?=a)b/", "look-around"),
        ("start: /a/l", "flags 'l'"),
        (r'start: "\x4"', "no text"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "levels deep"),
        ("start: a\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(100)), "does not define 'a'"),
        ("start: ((/a{99}/){99}){99}", "repetitions"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(builtin, definition, says):
    with pytest.raises(GrammarError, match=says.replace("(", r"\(")):
        GrammarChecker(builtin, 4096, (1,)).check(custom_grammar(form("lark", definition)))


def doubling(first: str, last: str, count: int) -> str:
    rules = [f"r{i}: r{i + 1} r{i + 1}" for i in range(count)]
    return "\n".join([first, *rules, f"r{count}: {last}"])


@pytest.mark.parametrize(
    "definition",
    [
        doubling("start: r0", '"a"', 60),
        doubling("start: " + "|".join(["r0"] * 1000), '"a"', 9),
        doubling('start: "a"\n' + "%ignore r0\n" * 2000, '"a"', 11),
        doubling("start: r0 r0\n%ignore / +/", '"a"', 10),
        "start: /a/" + "+" * 20_000,
    ],
    ids=["in sequence", "as alternatives", "ignored", "with blanks", "repeated"],
)
def test_what_doubles_is_refused_before_it_grows(definition):
    tracemalloc.start()
    try:
        with pytest.raises(GrammarError, match=str(MAX_EXPRESSION_CHARS)):
            lark_expression(definition)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json"},
        {"type": "grammar"},
        {"type": "grammar", "grammar": 3},
        form("bnf", "a"),
        {"type": "grammar", "syntax": "regex", "definition": 3},
    ],
)
def test_malformed_formats_are_errors(given):
    with pytest.raises(GrammarError):
        custom_grammar(given)
