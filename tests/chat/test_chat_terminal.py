"""``weft chat`` on a terminal: keys, commands, answers, and what is sent next."""

from __future__ import annotations

import json
import os
import stat
import threading
import time

import pytest
from speaking import DROP, UNTIL_LEFT, Refusal, thought
from terminal import (
    ALT_ENTER,
    CTRL_C,
    CTRL_D,
    ENTER,
    PASTE,
    PASTED,
    TAB,
    UP,
    chatting,
)

from live import START_S

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1m \u202eback&#27;[2J <b>tag</b> \rover"


def test_answers_commands_and_the_end(server, state, tmp_path):
    """One conversation through every command; what was asked is looked at each time."""
    with chatting("--url", server.url, "--temperature", "0.5") as user:
        user.wait_for("one at http://127.0.0.1")
        user.wait_for_line()
        server.says("# Hello\n\nSome *words*", " and `code`.\n\n```python\nx = 1\n```\n")
        user.send("hi")
        user.wait_for("tokens/s]")
        user.wait_for_line()
        assert "*" not in user.text()
        assert "```" not in user.text()
        assert user.cells("words")[0].italics
        assert "Some words and code." in user.text()
        assert server.asked == [("user", "hi")]
        assert (server.bodies[-1]["model"], server.bodies[-1]["temperature"]) == ("one", 0.5)

        user.send("/system Be brief.")
        user.send("/set temperature 0.25")
        user.send("/set usage off")
        user.wait_for("usage is off")
        server.says("Second.")
        user.send("/retry")
        user.wait_for("Second.")
        user.wait_for_line()
        assert server.asked == [("system", "Be brief."), ("user", "hi")]
        assert server.bodies[-1]["temperature"] == 0.25
        assert user.text().count("tokens/s]") == 1

        user.send("/edit")
        user.wait_until(lambda: user.line() == "> hi")
        server.says("Third.")
        user.send(" there")
        user.wait_for("Third.")
        user.wait_for_line()
        assert server.asked == [("system", "Be brief."), ("user", "hi there")]

        user.send("/model")
        user.wait_for("* one\n  two")
        user.send("/model tow")
        user.wait_for("Did you mean 'two'?")
        user.send("/model two")
        user.wait_for("two answers from now on")
        server.says("Fourth.")
        user.send("more")
        user.wait_for("Fourth.")
        user.wait_for_line()
        assert server.bodies[-1]["model"] == "two"
        assert server.asked[1:] == [("user", "hi there"), ("assistant", "Third."), ("user", "more")]

        user.send("/modl")
        user.wait_for("There is no command /modl. Did you mean '/model'?")
        user.send("/set temprature 1")
        user.wait_for("Did you mean 'temperature'?")
        user.send("/set temperature hot")
        user.wait_for("temperature must be")
        user.send("/class")
        user.wait_for("says nothing of service classes")
        user.send("help")
        user.wait_for("/quit end the chat")

        file = tmp_path / "kept.json"
        user.send(f"/save {file}")
        user.wait_for("Saved to")
        kept = json.loads(file.read_text())
        assert [m["role"] for m in kept] == ["system", *["user", "assistant"] * 2]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        user.send(f"/save {file}")
        user.wait_for("exists. Replace it? [y/N]")
        user.send("n")
        user.wait_for("Nothing is saved.")
        user.send("/clear")
        user.wait_for("A new conversation begins.")
        server.says("Fifth.")
        user.send("anew")
        user.wait_for("Fifth.")
        user.wait_for_line()
        assert server.asked == [("system", "Be brief."), ("user", "anew")]
        user.send(f"/load {file}")
        user.wait_for("is not saved. Forget it? [y/N]")
        user.send("y")
        user.wait_for("2 turns loaded.")
        user.wait_for("The last message was: more")
        server.says("Sixth.")
        user.send(" /not a command")
        user.wait_for("Sixth.")
        user.wait_for_line()
        assert [text for _, text in server.asked] == [
            "Be brief.", "hi there", "Third.", "more", "Fourth.", "/not a command",
        ]  # fmt: skip
        user.send("exit")
        assert user.ended() == 0
    history = state / "history.jsonl"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert json.loads(history.read_text().splitlines()[0]) == "hi"
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        user.type(UP + UP)  # past the word that has ended it
        user.wait_until(lambda: user.line() == ">  /not a command")
        user.type(CTRL_C)
        user.wait_for_line()
        user.type(CTRL_D)
        assert user.ended() == 0


def test_several_lines(server):
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        for keys, sent in (
            (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
            (f"one\\{ENTER}two{ENTER}", "one\ntwo"),
            (f'"""one{ENTER}{ENTER}two"""{ENTER}', "one\n\ntwo"),
            (f"{PASTE}one\n  two\n{PASTED}three{ENTER}", "one\n  two\nthree"),
            (f"漢字 \u00e9{ENTER}", "漢字 é"),
        ):
            count = len(server.bodies)
            server.says("Yes.")
            user.type(keys)
            user.wait_until(lambda count=count: len(server.bodies) > count)
            user.wait_for("tokens/s]", count + 1)
            user.wait_for_line()
            assert server.asked[-1] == ("user", sent)


def test_completion(server, tmp_path):
    (tmp_path / "kept.json").write_text('[{"role": "user", "content": "open question"}]')
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        user.type("/mod" + TAB)
        user.wait_until(lambda: user.line() == "> /model")
        user.type(" tw" + TAB)
        user.wait_until(lambda: user.line() == "> /model two")
        user.type(CTRL_C)
        user.wait_for_line()
        user.type(f"/load {tmp_path}/ke" + TAB)
        user.wait_for("kept.json")
        user.type(ENTER)
        user.wait_for("0 turns loaded.")
        user.wait_until(lambda: user.line() == "> open question")


def test_ctrl_c_takes_the_turn_back_or_keeps_what_there_is(server):
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        server.says("First.")
        user.send("one")
        user.wait_for("First.")
        user.wait_for_line()
        server.says(thought("Let me think"), UNTIL_LEFT)
        user.send("two")
        user.wait_for("Let me think")
        user.type(CTRL_C)
        user.wait_for("stopped before the answer began")
        user.wait_until(lambda: user.line() == "> two")
        assert server.left.wait(START_S)
        server.left.clear()
        server.says("Half an answ", UNTIL_LEFT)
        user.type(ENTER)
        user.wait_for("Half an answ")
        assert server.asked == [("user", "one"), ("assistant", "First."), ("user", "two")]
        user.type(CTRL_C)
        user.wait_for("[stopped; the conversation keeps the answer")
        user.wait_for_line()
        assert server.left.wait(START_S)
        server.says(UNTIL_LEFT)
        user.send("/retry")
        user.wait_until(lambda: len(server.bodies) == 4)
        user.type(CTRL_C)
        user.wait_for("the answer that was there stays")
        user.wait_for_line()
        server.says("Whole.")
        user.send("three")
        user.wait_for("Whole.")
        user.wait_for_line()
    assert server.asked == [
        ("user", "one"), ("assistant", "First."), ("user", "two"), ("assistant", "Half an answ"),
        ("user", "three"),
    ]  # fmt: skip
    assert all(m.keys() == {"role", "content"} for m in server.bodies[-1]["messages"])


def test_an_answer_stays_until_the_new_one_is_whole(server):
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        server.says("First.")
        user.send("one")
        user.wait_for("First.")
        user.wait_for_line()
        server.says("Half", UNTIL_LEFT)
        user.send("/retry")
        user.wait_for("Half")
        user.type(CTRL_C)
        user.wait_for("[stopped; the answer that was there stays]")
        user.wait_for_line()
        user.send("/edit")
        user.wait_until(lambda: user.line() == "> one")
        server.says("Part", UNTIL_LEFT)
        user.send(" more")
        user.wait_for("Part")
        user.type(CTRL_C)
        user.wait_for("[stopped; the answer that was there stays]", 2)
        user.wait_until(lambda: user.line() == "> one more")
        user.type(CTRL_C)  # takes the edit back
        user.wait_for_line()
        server.says("Second.")
        user.send("two")
        user.wait_for("Second.")
        user.wait_for_line()
    assert server.asked == [("user", "one"), ("assistant", "First."), ("user", "two")]


def test_a_command_that_fails_leaves_the_chat(server):
    with chatting("--url", server.url, columns=120) as user:
        user.wait_for_line()
        server.says("First.")
        user.send("one")
        user.wait_for("First.")
        user.wait_for_line()
        user.send("/save ~nosuch/x")
        user.wait_for("/save cannot be done: Could not determine home directory.")
        user.send(f"/load {'x' * 300}")
        user.wait_for("/load cannot be done: File name too long.")
        server.tells.clear()
        user.send("/model")
        time.sleep(0.2)
        user.type(CTRL_C)
        user.wait_for("[stopped]")
        user.wait_for_line()
        server.tells.set()
        server.says("Second.")
        user.send("two")
        user.wait_for("Second.")
        user.wait_for_line()
    assert server.asked == [("user", "one"), ("assistant", "First."), ("user", "two")]


FAILURES = [
    (["Half", DROP], "was lost"),
    (["Half", b'data: {"error": {"message": "the engine died"}}\n\n'], "the engine died"),
    ([Refusal(401, "who?")], "needs a key; give it with --api-key"),
    ([Refusal(429, "Slow down.", headers={"retry-after": "7"})], "Slow down. Try again in 7 s."),
    ([Refusal(400, "Too long.", "context_length_exceeded")], "Too long. /clear begins a new"),
    ([Refusal(503, "It is \x1b[2Jaway.")], "It is \u241b[2Jaway. Try again in a moment."),
    (["Half", b"data: [DONE]\n\n", DROP], "has closed the stream before the answer's end"),
    (["Half", b"data: nonsense\n\n", DROP], "events that are no chunks of an answer"),
]


def test_what_fails_leaves_the_conversation_and_the_text(server):
    with chatting("--url", server.url, columns=120, rows=60) as user:
        user.wait_for_line()
        server.says("First.")
        user.send("one")
        user.wait_for("First.")
        user.wait_for_line()
        whole = [("user", "one"), ("assistant", "First."), ("user", "two")]
        user.type("two")
        for steps, words in FAILURES:
            server.says(*steps)
            user.type(ENTER)
            user.wait_for(words)
            user.wait_until(lambda: user.line() == "> two")
            assert server.asked == whole
        server.says("Again.")
        user.type(ENTER)
        user.wait_for("Again.")
        user.wait_for_line()
        assert server.asked == whole


def test_reasoning_is_dim_and_folded(server):
    gate = threading.Event()
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        server.says(thought("First I think"), thought(" of it."), gate, "The answer.")
        user.send("why")
        user.wait_for("First I think of it.")
        assert user.raw.count(b"\x1b[2m") >= 1
        gate.set()
        user.wait_for("The answer.")
        user.wait_for_line()
        text = user.text()
        assert "First I think" not in text
        assert "[reasoning: 5 words in" in text
        user.send("/reasoning")
        user.wait_for("First I think of it.")
        server.says("Next.")
        user.send("and")
        user.wait_for("Next.")
        user.wait_for_line()
    assert server.asked == [("user", "why"), ("assistant", "The answer."), ("user", "and")]


def test_tool_calls_are_shown_and_answered(server):
    server.says(
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "\x1b[1mBonn"}'}}]},
    )
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        user.send("weather?")
        user.wait_for('tool call: look({"city": "\u241b[1mBonn"})')
        user.wait_for_line()
        server.says("Fine.")
        user.send("well?")
        user.wait_for("Fine.")
        user.wait_for_line()
    roles = [m["role"] for m in server.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]
    assert server.bodies[-1]["messages"][2]["tool_call_id"] == "c1"


def test_hostile_output_is_inert(server):
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        before = len(user.raw)
        server.says(thought(HOSTILE), HOSTILE, "\n\n```\n" + HOSTILE + "\n```\n")
        user.send("go")
        user.wait_for("tokens/s]")
        user.wait_for_line()
        raw = user.raw[before:]
        for sequence in ("\x1b]0;", "\x1b[2J", "\x1b[31mred", "\x9b", "\x07", "\u202e"):
            assert sequence not in raw.decode()
        assert "\u241b]0;owned\u2407\u241b[2J" in user.text()
        assert "<b>tag</b>" in user.text()
        assert "one at http://127.0.0.1" in user.text()


def test_long_answers_leave_a_whole_history_and_draw_little(server):
    lines = [f"- item {i}" for i in range(60)] + [""] + [f"para {i}\n" for i in range(40)]
    with chatting("--url", server.url, rows=12, columns=40) as user:
        user.wait_for_line()
        server.says(*(f"{line}\n" for line in lines))
        user.send("list")
        user.wait_for("tokens/s]")
        user.wait_for_line()
        shown = user.text()
        for i in range(60):
            assert shown.count(f" item {i}\n") == 1
        for i in range(40):
            assert shown.count(f"para {i}\n") == 1
        assert b"\x1b[2J" not in user.raw
        assert b"\x1b[?1049h" not in user.raw


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["plain", "dumb"])
def test_terminals_without_colours_or_without_anything(server, variables):
    with chatting("--url", server.url, columns=20, **variables) as user:
        user.wait_for("> ")
        server.says(thought("Hm."), "**Bold** 漢字漢字漢字漢字漢字漢字", " and so on")
        user.send("hi")
        user.wait_for("so on")
        user.wait_for("tokens/s]" if "NO_COLOR" in variables else "tokens")
        raw = user.raw.decode()
        if "TERM" in variables:
            assert "\x1b" not in raw
        else:
            assert "\x1b[3" not in raw.replace("\x1b[39m", "")
        user.type(CTRL_D)
        assert user.ended() == 0


def test_classes_are_those_of_the_key(server):
    rows = [{"name": "interactive", "priority": 1}, {"name": "gold", "priority": 0},
            {"name": "batch", "priority": 3}]  # fmt: skip
    server.info = {
        "engine": {"classes": rows, "scheduling": {"targets": {"gold": {"ttft_s": 1.0}}}},
        "classes": {"usable": ["interactive", "gold"], "default": "interactive"},
    }
    with chatting("--url", server.url) as user:
        user.wait_for_line()
        user.send("/class")
        user.wait_for("  gold: first token in 1 s\n* interactive: best effort")
        user.send("/class batch")
        user.wait_for("may not use a class 'batch'")
        user.send("/class gold")
        user.wait_for("of the class gold from now on")
        server.says("Yes.")
        user.send("hi")
        user.wait_for("class gold]")
        user.wait_for_line()
        assert server.bodies[-1]["service_tier"] == "gold"
        user.send("/class usual")
        user.wait_for("The server chooses")
        server.says("Again.")
        user.send("hi")
        user.wait_for("Again.")
        user.wait_for_line()
        assert "service_tier" not in server.bodies[-1]


def test_a_history_that_cannot_be_written_is_no_harm(server, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with chatting("--url", server.url, XDG_STATE_HOME=str(blocked)) as user:
        user.wait_for_line()
        server.says("Yes.")
        user.send("hi")
        user.wait_for("Yes.")
        user.wait_for_line()
        user.type(UP)
        user.wait_until(lambda: user.line() == "> hi")
    assert os.listdir(tmp_path) == ["file"]
