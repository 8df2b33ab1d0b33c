"""An engine whose answers the prompt scripts, so that a real client's answers are known.

Lines of the last user message that has any say what to do, one for each turn that follows:

    script> say "TEXT"       answer with this text, a JSON string
    script> call NAME {...}  call a function with these arguments
    script> recall           repeat what the assistant has said before
    script> wait             go on until somebody cancels

``$result`` in a text or in arguments is the last tool's result, and after the last line the answer
is that. What it reads is what a model would:
the ids of a prompt that the chat template of the built-in model has rendered.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import serving

import weft
from weft.api import ModelCard
from weft.core.plan import Update
from weft.core.ports import Sink
from weft.core.types import FinishReason, Request
from weft.text import ChatTemplate, Tokenizer

MODEL = "builtin"
MODEL_FOLDER = Path(weft.__file__).parent / MODEL
LINE = re.compile(r"^script> (say|call|recall|wait)\b ?(.*)$", re.MULTILINE)
RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
ROLES = ("system", "user", "assistant")
PAUSE_S = 0.002  # between tokens, so that a stream is one
LONGEST_WAIT_S = 120.0


@dataclass(frozen=True)
class Turn:
    """One turn of a rendered conversation."""

    role: str
    text: str


def turns_of(prompt: Seq[int], tokenizer: Tokenizer) -> list[Turn]:
    """The turns of a prompt, without the one that it opens."""
    heads = {tokenizer.reference.token_to_id(f"<|{role}|>"): role for role in ROLES}
    starts = [i for i, token in enumerate(prompt) if token in heads]
    spans = itertools.zip_longest(starts, starts[1:], fillvalue=len(prompt))
    turns = [Turn(heads[prompt[a]], tokenizer.decode(prompt[a + 1 : b])) for a, b in spans]
    return turns[:-1]


def answer(turns: Seq[Turn]) -> str | None:
    """What to say next; None goes on until cancelled."""
    asked = [i for i, turn in enumerate(turns) if turn.role == "user" and LINE.search(turn.text)]
    if not asked:
        return "Ready."
    since = turns[asked[-1] + 1 :]
    lines = LINE.findall(turns[asked[-1]].text)
    step = sum(turn.role == "assistant" for turn in since)
    result = result_of(since[-1].text) if since else ""
    if step >= len(lines):
        return f"Result: {result}"
    match lines[step]:
        case "say", text:
            return str(json.loads(text)).replace("$result", result)
        case "call", given:
            name, _, arguments = given.partition(" ")
            return call(turns, name, arguments.replace("$result", json.dumps(result)[1:-1]))
        case "recall", _:
            said = [turn.text for turn in turns[: asked[-1]] if turn.role == "assistant"]
            return f"I said: {' '.join(said)}"
    return None


def result_of(text: str) -> str:
    """What the last tool said, in the template's form or in a client's own."""
    found = RESPONSE.findall(text)
    return str(found[-1] if found else text).strip().removeprefix("Observation:").strip()


def call(turns: Seq[Turn], name: str, arguments: str) -> str:
    """A call in the form of the template, if the prompt offers the function."""
    offered = any(turn.role == "system" and f'"name": "{name}"' in turn.text for turn in turns)
    if not offered:
        return f"There is no function {name}."
    call = json.dumps({"name": name, "arguments": json.loads(arguments)})
    return f"<tool_call>\n{call}\n</tool_call>"


class ScriptEngine:
    """An engine client whose answers stand in the prompts; each is sent by a thread of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._running: dict[int, threading.Event] = {}

    def submit(self, requests: Seq[Request], sink: Sink) -> None:
        for request in requests:
            self._running[request.id] = threading.Event()
            threading.Thread(target=self._answer, args=(request, sink), daemon=True).start()

    def cancel(self, sequence_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        del reason
        if (ended := self._running.get(sequence_id)) is not None:
            ended.set()

    def _answer(self, request: Request, sink: Sink) -> None:
        finish = FinishReason.STOP
        for count, token in enumerate(self._tokens(request)):
            if self._running[request.id].wait(PAUSE_S):
                finish = FinishReason.CANCELLED
                break
            if count == request.sampling.max_tokens:
                finish = FinishReason.LENGTH
                break
            sink([Update(request.id, token)])
        del self._running[request.id]
        sink([Update(request.id, None, finish=finish)])

    def _tokens(self, request: Request) -> Iterator[int]:
        text = answer(turns_of(request.prompt, self._tokenizer))
        if text is not None:
            yield from self._tokenizer.encode(text, add_special_tokens=False)
            return
        end = time.monotonic() + LONGEST_WAIT_S
        more = self._tokenizer.encode(" waiting", add_special_tokens=False)
        while time.monotonic() < end:
            yield from more


@contextlib.contextmanager
def script_server(context_tokens: int = 8192, **options: Any) -> Iterator[str]:
    """Run weft's request plane before a `ScriptEngine`; the URL.

    Args:
        options: of the server.
    """
    tokenizer, template = Tokenizer.load(MODEL_FOLDER), ChatTemplate.load(MODEL_FOLDER)
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    card = ModelCard(
        served_names=(MODEL,),
        vocab_size=config["vocab_size"],
        max_model_len=context_tokens,
        eos_token_ids=(config["eos_token_id"],),
        hidden_size=config["hidden_size"],
    )
    with serving(ScriptEngine(tokenizer), (tokenizer, template, card), **options) as running:
        yield running.url
