"""Parts of ``weft chat``: blocks of Markdown, text made inert, files of conversations, history."""

from __future__ import annotations

import asyncio
import json
import stat
from unittest.mock import Mock

import pytest
from prompt_toolkit.document import Document
from rich.console import Console

from weft.chat.asking import AskSettings
from weft.chat.client import ChatClient, ChatRefusedError
from weft.chat.commands import run_command
from weft.chat.conversation import Conversation, answered, load, save, to_send
from weft.chat.line import MOST_ENTRIES, HistoryFile, is_open, without_quotes
from weft.chat.screen import Screen, Tail, markdown, whole_blocks
from weft.chat.session import ChatSession
from weft.core.errors import ConfigError
from weft.core.inert import inert


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("one line", ""),
        ("one\n\ntwo", ""),  # who knows what the line will be
        ("one\n\ntwo\n", "one\n\n"),
        ("one\n#", ""),  # a heading, or a tag of the paragraph
        ("one\n# head\n", "one\n"),
        ("- a\n\n- b\n", ""),
        ("- a\n\n- b\n\nend\n", "- a\n\n- b\n\n"),
        ("```\ncode\n\n# no heading\n", ""),
        ("```\ncode\n```\n\nend\n", "```\ncode\n```\n\n"),
        ("| a |\n|---|\n| 1 |\n", ""),
    ],
)
def test_blocks_that_are_complete(text, whole):
    assert text[: whole_blocks(text)] == whole


def rendered(content, width=40, height=10) -> str:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(content)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_markdown_keeps_lines_tags_and_targets():
    assert rendered(markdown("roses\nviolets")) == "roses\nviolets"
    assert rendered(markdown("<div>a</div> and <b>b</b>")) == "<div>a</div> and <b>b</b>"
    assert rendered(markdown("[here](http://evil.example)")) == "here (http://evil.example)"
    assert rendered(Tail(markdown("a\n\nb\n\nc"), 3)) == "b\n\nc"


def test_blocks_one_by_one_are_the_whole():
    text = "# Head\n\npara *one*\n\n1. a\n2. b\n\n```py\nx = 1\n```\n\n> quote\n\nend\n"
    parts, rest = [], ""
    for character in text:
        rest += character
        if at := whole_blocks(rest):
            parts.append(rest[:at])
            rest = rest[at:]
    assert "".join(parts) + rest == text
    assert len(parts) == 5


def test_no_character_controls_the_terminal():
    every = "".join(map(chr, range(0x300))) + "\u202e\u2066\ud800"
    shown = inert(every)
    assert not [c for c in shown if (ord(c) < 32 and c not in "\t\n") or 0x7E < ord(c) < 0xA0]
    assert not set("\r\u202e\u2066\ud800") & set(shown)
    assert inert("漢字 👩‍🔬 é\tx\n") == "漢字 👩‍🔬 é\tx\n"


def test_a_server_that_takes_too_long_for_a_command(monkeypatch, state):
    monkeypatch.setattr(ChatClient, "models", Mock(side_effect=TimeoutError))
    asked = AskSettings("one")
    client = ChatClient("http://127.0.0.1:9", None)
    session = ChatSession(client, asked, Conversation(), state, Screen())
    with pytest.raises(ChatRefusedError, match="does not answer yet; try again"):
        asyncio.run(run_command(session, "/model"))


def test_a_conversation_comes_back_from_its_file(tmp_path):
    path = tmp_path / "kept.json"
    kept = Conversation("Be brief.")
    question = [{"role": "user", "content": "漢字?"}]
    kept.put(answered(question, "Half", reasoning="Hm.", stopped=True), 0)
    save(kept, path)
    back, unanswered = load(path)
    assert (back.messages(), unanswered, back.saved) == (kept.messages(), "", True)
    assert back.turns[0].reasoning == "Hm."
    assert to_send(back.messages())[2] == {"role": "assistant", "content": "Half"}
    path.chmod(0o644)
    save(back, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="Cannot write"):
        save(kept, tmp_path / "none" / "kept.json")


def test_a_file_from_elsewhere(tmp_path):
    path = tmp_path / "other.json"
    messages = [
        {"role": "assistant", "content": "Welcome."},
        {"role": "user", "content": "one"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "open"},
    ]
    path.write_text(json.dumps({"messages": messages}))
    loaded, unanswered = load(path)
    assert unanswered == "open"
    assert loaded.messages() == messages[:-1]
    assert [turn.asked for turn in loaded.turns] == [None, "more"]
    assert loaded.turns[1].question == tuple(messages[1:3])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[" * 40 + "]" * 40, "levels deep"),
        ("[]", "no messages"),
        ('"hi"', "no messages"),
        ("[1]", "message 1 is not an object"),
        ('[{"role": "king", "content": ""}]', 'message 1 has the role "king"'),
        ('[{"role": "user"}]', "message 1 has no content"),
        ('[{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]', "message 2"),
        ('[{"role": "user", "content": "a", "reasoning_content": 1}]', "reasoning_content"),
    ],
)
def test_a_file_that_is_no_conversation(tmp_path, text, words):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(path)
    with pytest.raises(ConfigError, match="There is no file"):
        load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_the_history_is_bounded_private_and_survives_damage(tmp_path):
    path = tmp_path / "chat" / "history.jsonl"
    history = HistoryFile(path)
    for number in range(MOST_ENTRIES + 1):
        history.store_string(f"entry {number}\nof two lines")
    history.store_string("x" * 2**20)
    with path.open("ab") as file:
        file.write(b'{"damaged\n[1]\n"last"\n')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    entries = list(HistoryFile(path).load_history_strings())
    assert entries[:2] == ["last", f"entry {MOST_ENTRIES}\nof two lines"]
    assert len(path.read_bytes().splitlines()) <= MOST_ENTRIES // 2
    assert list(HistoryFile(tmp_path / "none").load_history_strings()) == []


def test_quotes_let_a_message_go_on():
    assert is_open('"""')
    assert is_open('"""one\ntwo')
    assert not is_open('"""one\ntwo"""\n')
    assert not is_open('say """')
    assert without_quotes('"""\none\n two\n""" ') == "one\n two"
    assert without_quotes(' "quoted" ') == '"quoted"'


def test_nothing_is_completed_in_a_message():
    from weft.chat.line import ChatCompleter

    completer = ChatCompleter({"/model": "", "/save": ""}, lambda _: ["one", "two"])

    def offered(text: str) -> list[str]:
        return [c.text for c in completer.get_completions(Document(text), None)]

    assert offered("/m") == ["/model"]
    assert offered("/model t") == ["two"]
    assert offered("/model two o") == []
    assert offered("hello /m") == []
    assert offered("/m\nx") == []
