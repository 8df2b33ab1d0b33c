"""The servers that ``weft chat`` asks: real ones, one that a test scripts, one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from speaking import DROP, Refusal, speaking, thought
from terminal import CTRL_C, CTRL_D, chatting

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from scripted import ScriptedClient
from serving import serving as serving_scripted

from live import START_S, WEFT, eventually, free_port, lives, refused, serving
from weft.api import ModelCard
from weft.models.hub import resolve_model
from weft.text import ChatTemplate, Tokenizer

SMALL = ("--threads", "1", "--kv-memory", "16MiB")


@pytest.fixture(scope="module")
def text():
    folder = resolve_model("builtin")
    tokenizer = Tokenizer.load(folder)
    card = ModelCard(served_names=("builtin",), vocab_size=4096, max_model_len=512)
    return tokenizer, ChatTemplate.load(folder), card


@pytest.mark.usefixtures("state")
def test_ctrl_c_cancels_the_request_in_the_engine(text, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: a, key: sk-a, classes: [interactive, flex]}\n")
    engine, tokenizer = ScriptedClient(), text[0]
    say = lambda words: tokenizer.encode(words, add_special_tokens=False)  # noqa: E731
    with (
        serving_scripted(engine, text, api_key_file=str(keys), drain_timeout_s=0.5) as server,
        chatting("--url", server.url, "--api-key", "sk-a") as user,
    ):
        user.wait_for_line()
        user.send("/class flex")
        user.wait_for("of the class flex from now on")
        user.send("first question")
        request = engine.submitted.get(timeout=START_S)
        assert request.service_class == "flex"
        engine.send(request, *say("Some words of an answer"))
        user.wait_for("Some words of an answer")
        user.type(CTRL_C)
        assert engine.cancelled.get(timeout=START_S)[0] == request.id
        user.wait_for("[stopped; the conversation keeps")
        user.wait_for_line()
        user.send("/class usual")
        user.send("second question")
        request = engine.submitted.get(timeout=START_S)
        assert request.service_class == "interactive"
        prompt = tokenizer.decode(request.prompt, skip_special_tokens=False)
        order = [prompt.index(w) for w in ("first", "Some words of an answer", "second")]
        assert order == sorted(order)
        engine.send(request, *say("Done."), finish="stop")
        user.wait_for("Done.")
        user.wait_for_line()
        user.send("/class batch")
        user.wait_for("may not use a class 'batch'")


@pytest.mark.usefixtures("state")
def test_a_message_from_standard_input():
    with speaking() as server:
        ask = ("chat", "--url", server.url, "--max-tokens", "9", "--system", "Be brief.")
        server.says(thought("Hm."), "An \x1b[1manswer", ".")
        done = piped(*ask, message="What is\na list?\n")
        assert (done.returncode, done.stdout) == (0, "An \x1b[1manswer.\n")  # for files, as it is
        assert done.stderr == ""
        assert server.asked == [("system", "Be brief."), ("user", "What is\na list?")]
        assert server.bodies[-1]["max_tokens"] == 9
        server.says("Yes.")
        assert "tokens/s]" in piped(*ask, "--usage", message="Hm?").stderr
        server.says("Half", DROP)
        done = piped(*ask, message="Hm?")
        assert (done.returncode, done.stdout) == (1, "Half\n")
        refused(done, "was lost", code=1)
        server.says(Refusal(429, "Slow down.", headers={"retry-after": "7"}))
        refused(piped(*ask, message="Hm?"), "Slow down. Try again in 7 s.", code=1)
        refused(piped(*ask, message=" \n"), "has no message", code=2)
        refused(piped(*ask, "three", message="Hm?"), "does not serve 'three'", "one", code=2)
    refused(piped(*ask, message="Hm?"), "No server answers at", "leave --url out", code=1)
    refused(piped("chat", "--url", "nowhere", message="Hm?"), "not a server's address", code=2)


def piped(*arguments: str, message: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WEFT, *arguments], input=message, capture_output=True, text=True, timeout=120,
        check=False, env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
    )  # fmt: skip


@pytest.fixture
def alone(state, tmp_path, monkeypatch) -> Iterator[int]:  # noqa: ARG001 - not the user's
    """The port at which chats look for a server, and where none is: a free one."""
    port = free_port()
    site = tmp_path / "alone"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'chat' in sys.orig_argv:\n"
        "    import weft.core.addresses\n"
        f"    weft.core.addresses.DEFAULT_URL = 'http://127.0.0.1:{port}'\n"
    )
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)
    return port


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("end", ["quit", "killed"])
def test_a_server_of_its_own_ends_with_the_chat(state, end):
    with chatting(*SMALL, "--max-tokens", "8") as user:
        user.wait_for("starting a server for this chat; its log:")
        user.wait_for("builtin at the server that chat has started")
        user.wait_for_line()
        family = psutil.Process(user.process.pid).children(recursive=True)
        assert len(family) >= 3
        user.send("What is a list?")
        user.wait_for("tokens/s]")
        user.wait_for_line()
        user.type(CTRL_C)
        user.wait_for("Ctrl-D or /quit ends the chat.")
        assert all(map(lives, family))
        if end == "quit":
            user.type(CTRL_D)
            assert user.ended() == 0
        else:
            user.process.kill()
            user.process.wait()
        eventually(lambda: not any(map(lives, family)), START_S)
    (log,) = state.glob("server-*.log")
    assert "serving builtin on unix:" in log.read_text()
    socket = log.read_text().split("serving builtin on unix:")[1].split()[0]
    assert not Path(socket).exists()


@pytest.mark.usefixtures("alone")
def test_a_server_that_does_not_start_says_why():
    done = piped("chat", "./no-such-folder", message="Hm?")
    told = done.stderr.splitlines()
    assert done.returncode == 1
    assert "did not start: model folder './no-such-folder' does not exist" in told[-1]
    assert "Traceback" not in done.stderr


def test_a_running_server_is_joined_unless_it_has_another_model(alone, tmp_path):
    with serving(tmp_path, port=alone, modelled=True) as server:
        done = piped("chat", "--max-tokens", "4", message="Hm?")
        assert (done.returncode, done.stderr.count("\n")) == (0, 1)
        assert "the answer is cut off: max_tokens" in done.stderr
        assert done.stdout.strip()
        refused(piped("chat", "--threads", "1", message="Hm?"), "--threads", "one runs at", code=2)
        with chatting("builtin") as user:
            user.wait_for(f"builtin at {server.url}.")
            user.send("/class")
            user.wait_for("* interactive: first token in")
        done = piped("chat", "./other", message="Hm?")
        assert f"{server.url} serves builtin, not ./other" in done.stderr
        assert "starting a server for this chat" in done.stderr
