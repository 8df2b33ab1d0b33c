"""Streamed answers: turns updates of the engine into JSON chunks, framed for the endpoint.

Everything that is ready at once becomes one chunk a choice. The plain case, text without log
probabilities, only puts the encoded text between two prebuilt ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import orjson

from weft.api.choices import Assembly, ChoiceDelta
from weft.api.errors import describe_error
from weft.api.jobs import Job
from weft.api.logprobs import CompletionLogprobs, TokenNumbers, TokenTexts, chat_logprobs
from weft.api.responses import answer_head, call_object, echoed_text, finish_reason, usage
from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.text import Tokenizer
from weft.text.assistant import Content, Event, Reasoning, ToolCall

FRAME = (b"data: ", b"\n\n")
DONE = b"data: [DONE]\n\n"

_ROLE = {"role": "assistant", "content": "", "refusal": None}
_SILENT = {**_ROLE, "content": None}


class ChunkWriter:
    """Writes the chunks of one job.

    Args:
        frame: bytes before and after the JSON of each chunk.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        frame: tuple[bytes, bytes] = (b"", b"\n"),
    ) -> None:
        self.assembly = Assembly(job, tokenizer)
        self._job = job
        self._texts = texts = TokenNumbers(tokenizer) if job.tokens_as_ids else texts
        self._chat = job.endpoint == "chat"
        self._every_token = job.logprobs or job.return_token_ids or job.usage_in_chunks
        self._told = 0  # output tokens that usage in chunks counts
        self._plain = not self._every_token and job.reading is None
        choices = self.assembly.choices
        self._only = choices[0] if self._plain and len(choices) == 1 else None
        head = answer_head(job, "chat.completion.chunk" if self._chat else "text_completion")
        null_usage = b',"usage":null' if job.include_usage else b""
        self._head = frame[0] + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b"]" + null_usage + b"}" + frame[1]
        self._usage_tail = (b'],"usage":', b"}" + frame[1])
        self._ends = [self._text_ends(choice.index) for choice in self.assembly.choices]
        self._custom: set[tuple[int, int]] = set()  # calls of custom tools, by choice and place
        self._scores = {
            choice.index: CompletionLogprobs(
                tokenizer, texts, choice.request.sampling.skip_special_tokens
            )
            for choice in self.assembly.choices
            if job.logprobs and not self._chat
        }

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return self.assembly.open == 0

    def push(self, updates: Seq[Update]) -> tuple[bytes, list[int]]:
        """Take updates in; return chunks, and ids that a stop string has ended.

        Raises as `Assembly.push`.
        """
        if self._only is not None:
            text = self._only.push_plain(updates)
            if text is not None:
                before, after = self._ends[0]
                data = before + orjson.dumps(text) + after if text else b""
                return data, [self._only.request.id] if self._only.halted else []
        deltas, halted = self.assembly.push(updates)
        return b"".join([self._write(delta) for delta in deltas]), halted

    def last(self) -> bytes:
        """The chunk of usage, if asked for; empty otherwise."""
        if not self._job.include_usage:
            return b""
        return self._head + orjson.dumps(usage(self.assembly)).join(self._usage_tail)

    def _text_ends(self, index: int) -> tuple[bytes, bytes]:
        """The JSON before and after the text of a plain chunk."""
        if self._chat:
            before, closing = b'{"index":%d,"delta":{"content":', b"}"
        else:
            before, closing = b'{"index":%d,"text":', b""
        after = closing + b',"logprobs":null,"finish_reason":null}'
        return self._head + before % index, after + self._tail

    def _write(self, delta: ChoiceDelta) -> bytes:
        if self._plain and not delta.first and delta.finish_reason is None:
            before, after = self._ends[delta.index]
            return before + orjson.dumps(delta.text) + after
        out = self._opening(delta) if delta.first and self._chat else b""
        self._told = self.assembly.completion_tokens
        if self._chat:
            out += self._chat_chunk(delta)
        else:
            out += self._completion_chunk(delta)
        return out + self._closing(delta) if delta.finish_reason is not None else out

    def _opening(self, delta: ChoiceDelta) -> bytes:
        """The first chunk of a chat choice, which names the role."""
        more = {}
        if self._job.return_token_ids:
            more["prompt_token_ids"] = delta.choice.request.prompt
        role = _ROLE if self._job.reading is None else _SILENT
        opening = self._chunk(delta.index, {"delta": role}, **more)
        echoed = echoed_text(self._job, delta.index)
        if echoed:
            opening += self._chunk(delta.index, {"delta": {"content": echoed}})
        return opening

    def _closing(self, delta: ChoiceDelta) -> bytes:
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        reason = finish_reason(delta.choice, delta.finish_reason or "stop")
        return self._chunk(delta.index, empty, finish_reason=reason)

    def _chat_chunk(self, delta: ChoiceDelta) -> bytes:
        """The chunks of what is new; the first has what is said of its tokens."""
        pieces = [self._piece(event, delta.index) for event in delta.events]
        if not pieces and self._every_token and delta.token_ids:
            pieces = [{"content": ""} if self._job.reading is None else {}]
        if not pieces:
            return b""
        more: dict[str, Any] = {}
        if self._job.logprobs and delta.logprobs:
            more["logprobs"] = chat_logprobs(delta.logprobs, self._texts)
        if self._job.return_token_ids:
            more["token_ids"] = delta.token_ids
        first, *others = pieces
        out = [self._chunk(delta.index, {"delta": first}, **more)]
        return b"".join(out + [self._chunk(delta.index, {"delta": piece}) for piece in others])

    def _completion_chunk(self, delta: ChoiceDelta) -> bytes:
        echoed = echoed_text(self._job, delta.index) if delta.first else None
        text = (echoed or "") + delta.text
        if not text and echoed is None and not (self._every_token and delta.token_ids):
            return b""
        more: dict[str, Any] = {}
        if self._job.logprobs:
            more["logprobs"] = self._completion_logprobs(delta, echoed)
        if self._job.return_token_ids:
            more["token_ids"] = delta.token_ids
            if delta.first:
                more["prompt_token_ids"] = delta.choice.request.prompt
        return self._chunk(delta.index, {"text": text}, **more)

    def _completion_logprobs(self, delta: ChoiceDelta, echoed: str | None) -> dict[str, Any]:
        builder = self._scores[delta.index]
        rows = []
        if echoed is not None:
            choice = delta.choice
            prompt, most = choice.request.prompt, choice.request.sampling.logprobs or 0
            rows = builder.prompt(prompt, choice.prompt_logprobs, echoed, most)
        return builder.build(rows + builder.output(delta.token_ids, delta.logprobs))

    def _chunk(self, index: int, content: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **more}
        tail = self._tail
        if self._job.usage_in_chunks:
            tail = orjson.dumps(usage(self.assembly, self._told)).join(self._usage_tail)
        return self._head + orjson.dumps(choice) + tail

    def _piece(self, event: Event, choice: int) -> dict[str, Any]:
        """The ``delta`` of an event."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, ToolCall):
            if event.name in self._job.custom_tools:
                self._custom.add((choice, event.index))
            return {"tool_calls": [{"index": event.index, **call_object(event, "", self._job)}]}
        grown = {"function": {"arguments": event.text}}
        if (choice, event.index) in self._custom:
            grown = {"custom": {"input": event.text}}
        return {"tool_calls": [{"index": event.index, **grown}]}


class EventStream(ChunkWriter):
    """Chunks as server-sent events, with OpenAI's mark of the end."""

    def __init__(self, job: Job, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        super().__init__(job, tokenizer, texts, FRAME)

    def last(self) -> bytes:
        return super().last() + DONE

    def failed(self, error: WeftError) -> bytes:
        return FRAME[0] + orjson.dumps(describe_error(error)[1]) + FRAME[1]
