"""The Python API: ``LLM(...).generate(...)``, chat and asynchronous streaming."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
import os
import secrets
import sys
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from weft.core.config import EngineConfig
from weft.core.errors import (
    ConfigError,
    EngineDeadError,
    ParameterError,
    PromptTooLongError,
    WeftError,
)
from weft.core.plan import Update
from weft.core.types import MAX_SEED, FinishReason, Request, SamplingParams, TokenLogprob
from weft.engine.feed import updates_of
from weft.engine.remote import RemoteEngine

# What takes long to import is imported where it is used, or while the engine starts.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from weft.engine.local import LocalEngine
    from weft.text.template import ChatTemplate
    from weft.text.tokenizer import Tokenizer

Prompt = str | Seq[int]


@dataclass(slots=True)
class GenerationResult:
    """The result of one prompt.

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


class _News(NamedTuple):
    """The output of an update, and whether the engine should end the request now."""

    text: str
    token_ids: tuple[int, ...]
    stop: bool


class _Assembly:
    """Collects the updates of one request into text and a result."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer) -> None:
        from weft.text.stream import TextStream

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
            after=request.prompt,
        )
        if sampling.logprobs is not None:
            self.result.logprobs = []
        if sampling.prompt_logprobs is not None:
            self.result.prompt_logprobs = [None]

    def push(self, update: Update) -> _News:
        """Take an update in and return what it adds to text and tokens."""
        result = self.result
        if update.prompt_logprobs is not None and result.prompt_logprobs is not None:
            result.prompt_logprobs.extend(update.prompt_logprobs.entries)
        text, stop = "", False
        tokens: tuple[int, ...] = ()
        if update.token is not None and self._stream.stopped_by is None:
            tokens = (update.token,)
            result.token_ids.append(update.token)
            if result.logprobs is not None and update.logprob is not None:
                result.logprobs.append(update.logprob)
            text, stop = self._stream.push(tokens)
        if update.finish is not None:
            text += self._stream.flush()
            self._end(update)
        self._pieces.append(text)
        if self.done:
            result.text = "".join(self._pieces)
        return _News(text, tokens, stop and not self.done)

    def _end(self, update: Update) -> None:
        stopped_by = self._stream.stopped_by
        self.done = True
        self.result.stop_string = stopped_by
        self.result.finish_reason = str(FinishReason.STOP if stopped_by else update.finish)
        self.result.cached_tokens = update.cached_tokens
        self.result.error = None if stopped_by else update.error


class LLM:
    """A model with its engine, which runs in its own process behind a ring.

    Args:
        model: a folder, a hub id, or ``builtin``.
        settings: any field of ``EngineConfig`` by name.

    Raises:
        WeftError: a typed error if settings, model or memory are wrong.
    """

    def __init__(self, model: str | Path = "builtin", **settings: Any) -> None:
        given = {"model": str(model), **settings}
        config = EngineConfig.from_mapping(given, "LLM")
        self._open(config, RemoteEngine(given, meanwhile=_import_text))

    @classmethod
    def in_process(cls, model: str | Path = "builtin", **settings: Any) -> LLM:
        """The same with the engine on a thread of this process, for debuggers and profilers."""
        from weft.engine.local import LocalEngine

        given = {"model": str(model), **settings}
        made = cls.__new__(cls)
        made._open(EngineConfig.from_mapping(given, "LLM"), LocalEngine(given))
        return made

    def _open(self, config: EngineConfig, engine: RemoteEngine | LocalEngine) -> None:
        from weft.text.tokenizer import Tokenizer

        self.config = config
        self.engine = engine
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, engine.close)
        self.served = engine.served
        self._chat_template: ChatTemplate | None = None
        self._ids = itertools.count(1)
        try:
            self.tokenizer = Tokenizer.load(Path(config.tokenizer or self.served.folder))
        except WeftError:
            self.close()
            raise

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
            progress: show a progress bar if standard error is a terminal.

        Raises:
            ParameterError: a prompt or parameter is wrong; nothing was started.
        """
        from tqdm import tqdm

        listed = _prompt_list(prompts)
        results: list[GenerationResult | None] = [None] * len(listed)
        hidden = not progress or not sys.stderr.isatty()
        with tqdm(total=len(listed), disable=hidden, unit="prompt") as bar:
            tokens = 0
            for index, result in self.generate_iter(listed, params):
                results[index] = result
                tokens += len(result.token_ids)
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                bar.update()
        return [result for result in results if result is not None]

    def generate_iter(
        self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Generate from all prompts at once, yielding (index, result) as each one ends.

        Raises:
            ParameterError: a prompt or parameter is wrong; nothing was started.
        """
        work = self._assemblies(prompts, _params_list(params, len(prompts)))
        index_of = {assembly.request.id: index for index, assembly in enumerate(work)}
        for update in self._updates([assembly.request for assembly in work]):
            index = index_of[update.sequence_id]
            if work[index].push(update).stop:
                self.engine.client.cancel(update.sequence_id, FinishReason.STOP)
            if work[index].done:
                yield index, work[index].result

    def token_iter(
        self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Generate from all prompts at once, yielding (index, token id) as tokens come.

        No text is made, so stop strings end nothing.

        Raises:
            ParameterError: a prompt or parameter is wrong; nothing was started.
            WeftError: the engine could not compute a prompt.
        """
        work = self._assemblies(prompts, _params_list(params, len(prompts)))
        index_of = {assembly.request.id: index for index, assembly in enumerate(work)}
        for update in self._updates([assembly.request for assembly in work]):
            if update.error is not None:
                raise update.error
            if update.token is not None:
                yield index_of[update.sequence_id], update.token

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Generate from one prompt, yielding text as soon as it is certain.

        The last delta carries the result. Leaving the iterator early cancels the request.
        """
        (assembly,) = self._assemblies([prompt], [params or SamplingParams()])
        for update in self._updates([assembly.request]):
            if (delta := self._delta(assembly, update)) is not None:
                yield delta
            if assembly.done:
                return

    async def stream_async(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Delta]:
        """Like ``stream``, for an event loop; many may run at once."""
        (assembly,) = self._assemblies([prompt], [params or SamplingParams()])
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Update] = asyncio.Queue()

        def sink(updates: Seq[Update]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
                loop.call_soon_threadsafe(give, updates)

        def give(updates: Seq[Update]) -> None:
            for update in updates:
                news.put_nowait(update)

        self._check_process()
        self.engine.client.submit([assembly.request], sink)
        try:
            while not assembly.done:
                if (delta := self._delta(assembly, await news.get())) is not None:
                    yield delta
        finally:
            self.engine.client.cancel(assembly.request.id)

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
        from weft.text.template import encode_chat

        return encode_chat(self.tokenizer, self.chat_template, messages, **arguments)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, or the one that the settings name; loaded on first use."""
        if self._chat_template is None:
            from weft.text.template import ChatTemplate

            named = self.config.chat_template
            file = Path(named) if named else None
            self._chat_template = ChatTemplate.load(Path(self.served.folder), file=file)
        return self._chat_template

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        prompt_name: str | None = None,
        *,
        input_type: str | None = None,
        dimensions: int | None = None,
    ) -> list[NDArray[np.float32]]:
        """Return a vector for each prompt, pooled as ``served.pooling`` says.

        Args:
            prompt_name, input_type: of the checkpoint's prompt before each text; None: its default.
            dimensions: so many first numbers, scaled to length one again (Matryoshka).

        Raises:
            UnsuitableModelError: the model has no vectors.
            ParameterError: a prompt is wrong; nothing was started.
            WeftError: the engine could not compute a prompt.
        """
        from weft.api.embeddings import check_dimensions, shortened

        pooling = self.served.pooling
        pooling.check_embeds(self.served.name)
        before = pooling.prompt(prompt_name, input_type)
        check_dimensions(dimensions, self.served.hidden_size)
        sampling = SamplingParams(max_tokens=1, seed=0).with_defaults({})
        given = [before + one if isinstance(one, str) else one for one in _prompt_list(prompts)]
        requests = [
            Request(next(self._ids), tuple(self.check_prompt(prompt)), sampling, embed=True)
            for prompt in given
        ]
        vectors: dict[int, NDArray[np.float32]] = {}
        for update in self._updates(requests):
            if update.error is not None:
                raise update.error
            if (found := update.embedding) is not None:
                vectors[update.sequence_id] = shortened(found, dimensions, unit=pooling.unit)
        return [vectors[request.id] for request in requests]

    def score(self, query: str, documents: Seq[str], instruction: str | None = None) -> list[float]:
        """Return how relevant each document is to a query; see ``/v1/rerank``.

        Raises:
            UnsuitableModelError: the model cannot score.
            ParameterError: there are no documents, or one is too long.
            WeftError: the engine could not compute a pair.
        """
        from weft.api import Builder, ModelCard
        from weft.api.scores import scores_of

        builder = Builder(self.tokenizer, None, ModelCard.of(self.served))
        ask = {"query": query, "documents": documents, "instruction": instruction}
        return scores_of(ask, builder, self._ids, self._updates)

    # -- life cycle ---------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine; open requests end with an error. May be called twice."""
        self._finalizer()

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

    def check_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            ParameterError: it is no prompt, is empty, or has ids outside the vocabulary.
            PromptTooLongError: it leaves no room for output.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = _token_ids(prompt)
        self._check_ids(ids)
        return ids

    def _assemblies(self, prompts: Seq[Prompt], params: Seq[SamplingParams]) -> list[_Assembly]:
        """Check everything first, so that an invalid prompt starts nothing and counts nothing."""
        self.served.pooling.check_generates(self.served.name)
        ids = [self.check_prompt(prompt) for prompt in prompts]
        for each in params:
            each.check_vocabulary(self.served.vocab_size)
        return [
            self._assembly(prompt, tokens, each)
            for prompt, tokens, each in zip(prompts, ids, params, strict=True)
        ]

    def _assembly(self, prompt: Prompt, ids: list[int], params: SamplingParams) -> _Assembly:
        sampling = params.with_defaults(self.served.sampling_defaults)
        number = next(self._ids)
        if sampling.seed is None:
            base = self.config.base_seed
            seed = secrets.randbelow(MAX_SEED) if base is None else (base + number) % MAX_SEED
            sampling = replace(sampling, seed=seed)
        request = Request(number, tuple(ids), sampling, self.served.eos_token_ids)
        return _Assembly(request, prompt if isinstance(prompt, str) else None, self.tokenizer)

    def _check_ids(self, ids: Seq[int]) -> None:
        vocab_size, limit = self.served.vocab_size, self.served.max_model_len
        if not ids:
            raise ParameterError("The prompt is empty; give at least one token.", param="prompt")
        for token in ids:
            if not 0 <= token < vocab_size:
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
        self._check_process()
        yield from updates_of(self.engine.client, requests)

    def _delta(self, assembly: _Assembly, update: Update) -> Delta | None:
        news = assembly.push(update)
        if news.stop:
            self.engine.client.cancel(update.sequence_id, FinishReason.STOP)
        if not news.text and not news.token_ids and not assembly.done:
            return None
        return Delta(news.text, news.token_ids, assembly.result if assembly.done else None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineDeadError(
                "This LLM belongs to the process that made it; make one after the fork."
            )


def _import_text() -> None:
    import weft.text  # noqa: F401


def _token_ids(prompt: Any) -> list[int]:
    """Token ids of a prompt that is no text; numpy integers and arrays are fine."""
    if isinstance(prompt, (bytes, bytearray, Mapping)):
        raise ParameterError("A prompt is a text or a list of token ids.", param="prompt")
    try:
        tokens = list(prompt)
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise ParameterError(
            f"A prompt is a text or a list of token ids, not {type(prompt).__name__} "
            f"{str(prompt)[:40]!r}.",
            param="prompt",
        ) from None


def _prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        return [cast(Prompt, prompts)]
    if len(prompts) and not any(isinstance(p, str) or hasattr(p, "__iter__") for p in prompts):
        return [cast(Seq[int], prompts)]
    return cast(list[Prompt], list(prompts))


def _params_list(
    params: SamplingParams | Seq[SamplingParams] | None, count: int
) -> Seq[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not all(isinstance(each, SamplingParams) for each in params):
        raise ParameterError("params must be SamplingParams, or one for each prompt.")
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling parameters were given for {count} prompts.")
    return params
