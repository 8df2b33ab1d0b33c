"""The Python API: ``LLM(...).generate(...)``, chat and asynchronous streaming."""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, ParameterError, PromptTooLongError, WeftError
from weft.core.plan import Update
from weft.core.types import MAX_SEED, FinishReason, Request, SamplingParams, TokenLogprob
from weft.engine.build import Engine, build_engine
from weft.engine.local import EngineThread
from weft.text.stream import TextStream
from weft.text.template import ChatTemplate, encode_chat
from weft.text.tokenizer import Tokenizer

Prompt = str | Seq[int]


@dataclass(slots=True)
class GenerationResult:
    """What came of one prompt.

    Attributes:
        text: the generated text, without the prompt and, unless asked for, without a stop string.
        token_ids: the generated tokens that belong to the text, an end token included.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error``.
        stop_string: the stop string that ended the text, if one did.
        logprobs: one entry a token, if asked for.
        prompt_logprobs: one entry a prompt token (None for the first), if asked for.
        cached_tokens: prompt tokens that came from the prefix cache.
        error: why a result with finish_reason ``error`` is incomplete.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    error: WeftError | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream: new text, new tokens, and the whole result once it has ended."""

    text: str
    token_ids: tuple[int, ...]
    result: GenerationResult | None = None


class _Assembly:
    """Collects the updates of one request into text and a result."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.request = request
        self.result = GenerationResult(prompt, request.prompt)
        self.done = False
        self._pieces: list[str] = []
        self._stream = TextStream(
            tokenizer,
            sampling.stop,
            include_stop=sampling.include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        if sampling.logprobs is not None:
            self.result.logprobs = []
        if sampling.prompt_logprobs is not None:
            self.result.prompt_logprobs = [None]

    def push(self, update: Update) -> tuple[str, bool]:
        """Take an update in; return the new text and whether the engine should stop now."""
        result = self.result
        if update.prompt_logprobs is not None and result.prompt_logprobs is not None:
            result.prompt_logprobs.extend(update.prompt_logprobs.entries)
        text, stop = "", False
        if update.token is not None and self._stream.stopped_by is None:
            result.token_ids.append(update.token)
            if result.logprobs is not None and update.logprob is not None:
                result.logprobs.append(update.logprob)
            text, stop = self._stream.push([update.token])
        if update.finish is not None:
            text += self._stream.flush()
            self._end(update)
        self._pieces.append(text)
        if self.done:
            result.text = "".join(self._pieces)
        return text, stop and not self.done

    def _end(self, update: Update) -> None:
        stopped_by = self._stream.stopped_by
        self.done = True
        self.result.stop_string = stopped_by
        self.result.finish_reason = str(FinishReason.STOP if stopped_by else update.finish)
        self.result.cached_tokens, self.result.error = update.cached_tokens, update.error


class LLM:
    """A model with its engine, in this process.

    Args:
        model: a folder, a hub id, or ``builtin``.
        settings: any field of ``EngineConfig`` by name.

    Raises:
        WeftError: a typed error if settings, model or memory are wrong.
    """

    def __init__(self, model: str | Path = "builtin", **settings: Any) -> None:
        self.config = EngineConfig.from_mapping({"model": str(model), **settings}, "LLM")
        self.engine: Engine = build_engine(self.config)
        folder = self.engine.model.folder
        self.tokenizer = Tokenizer.load(Path(self.config.tokenizer or folder))
        self._chat_template: ChatTemplate | None = None
        self._ids = itertools.count(1)
        self._thread = EngineThread(self.engine.scheduler, self.engine.executor)

    # -- generating ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerationResult]:
        """Generate from each prompt and return the results in the order of the prompts.

        Args:
            prompts: texts or token-id lists, or a single one.
            params: one for all prompts, or one for each.
            progress: show a progress bar on standard error.

        Raises:
            ParameterError: a prompt or parameter is wrong; nothing was started.
        """
        listed = _prompt_list(prompts)
        each = _params_list(params, len(listed))
        work = [self._assembly(p, s) for p, s in zip(listed, each, strict=True)]
        by_id = {assembly.request.id: assembly for assembly in work}
        with tqdm(total=len(work), disable=not progress, unit="prompt") as bar:
            tokens = 0
            for update in self._updates([assembly.request for assembly in work]):
                assembly = by_id[update.sequence_id]
                tokens += update.token is not None
                if assembly.push(update)[1]:
                    self._thread.inbox.cancel(update.sequence_id, FinishReason.STOP)
                if assembly.done:
                    bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                    bar.update()
        return [assembly.result for assembly in work]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Generate from one prompt, yielding text as soon as it is certain.

        The last delta carries the result. Leaving the iterator early cancels the request.
        """
        assembly = self._assembly(prompt, params or SamplingParams())
        for update in self._updates([assembly.request]):
            if (delta := self._delta(assembly, update)) is not None:
                yield delta
            if assembly.done:
                return

    async def stream_async(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Delta]:
        """Like ``stream``, for an event loop; many may run at once."""
        assembly = self._assembly(prompt, params or SamplingParams())
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Update] = asyncio.Queue()

        def sink(updates: Seq[Update]) -> None:
            for update in updates:
                loop.call_soon_threadsafe(news.put_nowait, update)

        self._thread.inbox.submit([assembly.request], sink)
        try:
            while not assembly.done:
                if (delta := self._delta(assembly, await news.get())) is not None:
                    yield delta
        finally:
            self._thread.inbox.cancel(assembly.request.id)

    def chat(
        self,
        messages: Seq[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **template_arguments: Any,
    ) -> GenerationResult:
        """Answer a conversation of ``{"role": ..., "content": ...}`` messages."""
        prompt = self.encode_chat(messages, **template_arguments)
        return self.generate([prompt], params, progress=False)[0]

    def encode_chat(self, messages: Seq[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """Token ids of a conversation by the model's chat template."""
        return encode_chat(self.tokenizer, self.chat_template, messages, **arguments)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, or the one that the settings name; loaded on first use."""
        if self._chat_template is None:
            named = self.config.chat_template
            file = Path(named) if named else None
            self._chat_template = ChatTemplate.load(self.engine.model.folder, file=file)
        return self._chat_template

    # -- life cycle ---------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine; open requests end with an error. May be called twice."""
        self._thread.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- requests -----------------------------------------------------------------------------

    def _assembly(self, prompt: Prompt, params: SamplingParams) -> _Assembly:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(ids)
        params.check_vocabulary(self.engine.model.spec.vocab_size)
        sampling = params.with_defaults(self.engine.model.sampling_defaults)
        number = next(self._ids)
        if sampling.seed is None:
            base = self.config.base_seed
            seed = secrets.randbelow(MAX_SEED) if base is None else (base + number) % MAX_SEED
            sampling = replace(sampling, seed=seed)
        request = Request(number, tuple(ids), sampling, self.engine.model.eos_token_ids)
        return _Assembly(request, prompt if isinstance(prompt, str) else None, self.tokenizer)

    def _check_prompt(self, ids: Seq[int]) -> None:
        vocab_size, limit = self.engine.model.spec.vocab_size, self.engine.resolved.max_model_len
        if not ids:
            raise ParameterError("The prompt is empty; give at least one token.", param="prompt")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ParameterError(
                    f"The prompt has token id {token!r}; ids go from 0 to {vocab_size - 1}.",
                    param="prompt",
                )
        if len(ids) >= limit:
            raise PromptTooLongError(
                f"The prompt has {len(ids)} tokens, but the context of {limit} must hold prompt "
                "and output; shorten the prompt or raise max_model_len.",
                param="prompt",
            )

    def _updates(self, requests: Seq[Request]) -> Iterator[Update]:
        """Submit requests and yield their updates until all have ended; cancel on the way out."""
        news: queue.SimpleQueue[Seq[Update]] = queue.SimpleQueue()
        open_ids = {request.id for request in requests}
        self._thread.inbox.submit(requests, news.put)
        try:
            while open_ids:
                for update in news.get():
                    if update.finish is not None:
                        open_ids.discard(update.sequence_id)
                    yield update
        finally:
            for sequence_id in open_ids:
                self._thread.inbox.cancel(sequence_id)

    def _delta(self, assembly: _Assembly, update: Update) -> Delta | None:
        text, stop = assembly.push(update)
        if stop:
            self._thread.inbox.cancel(update.sequence_id, FinishReason.STOP)
        tokens = () if update.token is None else (update.token,)
        if not text and not tokens and not assembly.done:
            return None
        return Delta(text, tokens, assembly.result if assembly.done else None)


def _prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        return [cast(Seq[int], prompts)]
    return cast(list[Prompt], list(prompts))


def _params_list(
    params: SamplingParams | Seq[SamplingParams] | None, count: int
) -> Seq[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling parameters were given for {count} prompts.")
    return params
