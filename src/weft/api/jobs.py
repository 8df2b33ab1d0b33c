"""Jobs: checked requests of clients, as sequences for the engine."""

from __future__ import annotations

import copy
import itertools
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from weft.api.card import ApiLimits, ModelCard
from weft.api.classes import ClassRules
from weft.api.errors import UnsupportedParameterError
from weft.core.errors import ParameterError, PromptTooLongError, TemplateError, TokenizerError
from weft.core.types import Request
from weft.images.reader import ImageReader
from weft.text import ChatTemplate, Tokenizer
from weft.text.detect import choose_dialect
from weft.text.dialect import Dialect, Reading
from weft.text.grammar import GrammarChecker
from weft.text.renderer import Renderer

MAX_OWN_TEMPLATES = 32  # of requests, that are kept compiled

Endpoint = Literal["completion", "chat", "response", "message", "embedding", "rerank", "score"]


@dataclass(frozen=True, slots=True)
class ShownCall:
    """How an answer of ``/v1/responses`` shows the call of a function that stands for a tool."""

    kind: Literal["function_call", "custom_tool_call", "tool_search_call"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP body as sequences for the engine, with the form of its answer.

    Attributes:
        id: of the answer, such as ``cmpl-...`` or ``chatcmpl-...``.
        model: the name to answer with.
        requests: sequences; choice ``i`` of the answer is ``requests[i]``, the ``n`` choices of a
            prompt stand together.
        n: choices of each prompt.
        include_usage: whether a stream ends with a chunk of usage.
        usage_in_chunks: whether its other chunks have the usage so far instead of null.
        service_tier: the tier to put into the answer, None to leave it out.
        echoed: text of each prompt that the answer starts with, None without ``echo``.
        logprobs: whether the answer has log probabilities.
        prompt_logprobs: alternatives of each prompt token in ``prompt_logprobs`` of the answer,
            None without.
        tokens_as_ids: log probabilities name tokens as ``token_id:5``.
        timeout_s: seconds after which it is to end with an error; None leaves that to the server.
        no_output: ``max_tokens`` was 0; the one token that is computed is not shown.
        reading: how the text is read as a turn of an assistant; None if all of it is content.
        constrained_by: the parameter that asked for the grammar of the sequences.
        custom_tools: names of tools whose calls bear a text instead of arguments.
        shown_calls: how calls are shown, by the name of the function, where that is no plain tool.
    """

    endpoint: Endpoint
    id: str
    created: int
    model: str
    fingerprint: str
    requests: tuple[Request, ...]
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False
    service_tier: str | None = None
    echoed: tuple[str, ...] | None = None
    logprobs: bool = False
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    return_token_ids: bool = False
    no_output: bool = False
    timeout_s: float | None = None
    reading: Reading | None = None
    constrained_by: str | None = None
    custom_tools: frozenset[str] = frozenset()
    shown_calls: Mapping[str, ShownCall] = field(default_factory=dict)

    @property
    def pooled(self) -> bool:
        """Whether vectors or scores are asked for instead of text."""
        return self.endpoint in ("embedding", "rerank", "score")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(len(request.prompt) for request in self.requests[:: self.n])


class Builder:
    """Shared parts for building jobs from bodies. Safe to share between threads.

    Attributes:
        chat_template: None if the model has none; then there are no chats.
        dialect: how the model's turns mark reasoning and calls.
        grammars: checks what sequences are to follow.
        classes: decide the service class of a request.
        images: decodes those of requests.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        card: ModelCard,
        limits: ApiLimits | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.card = card
        self.limits = limits or ApiLimits()
        if dialect is None:
            dialect = choose_dialect(chat_template, family=card.weights.family)
        self.dialect = dialect
        self.classes = ClassRules(tuple(row.name for row in card.classes))
        self.grammars = GrammarChecker(tokenizer, card.vocab_size, card.eos_token_ids)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._own_renderer = Renderer()  # a slow template holds up no chats of the model's own
        self.images = ImageReader()
        self._template_of = lru_cache(MAX_OWN_TEMPLATES)(self._own_template)
        pieces = tokenizer.id_to_bytes
        self._longest_piece = (
            max((len(piece or b"") for piece in pieces), default=1) if pieces else 0
        )

    def under(self, classes: ClassRules) -> Builder:
        """This builder with other rules for the classes of requests; all else is shared."""
        other = copy.copy(self)
        other.classes = classes
        return other

    def template(self, own: str | None) -> ChatTemplate | None:
        """The model's chat template, or the one that a request brings.

        Raises:
            UnsupportedParameterError: the server does not take templates from requests.
            TemplateError: it is not a valid template.
        """
        return self.chat_template if own is None else self._template_of(own)

    def _own_template(self, text: str) -> ChatTemplate:
        if not self.limits.request_templates:
            raise UnsupportedParameterError(
                "chat_template",
                " The server takes templates from requests if it is started with "
                "--request-chat-template.",
            )
        self.check_size(len(text.encode()), "chat_template")
        named = {} if self.chat_template is None else self.chat_template.special_tokens
        try:
            return ChatTemplate({"default": text}, named, renderer=self._own_renderer)
        except TokenizerError as error:
            raise TemplateError(error.message, param="chat_template") from None

    def numbers(self, count: int) -> list[int]:
        """Sequence ids that no other request has."""
        with self._lock:
            return list(itertools.islice(self._numbers, count))

    def check_size(self, num_bytes: int, param: str) -> None:
        """Refuse text that is too long before it is tokenised.

        Raises:
            PromptTooLongError: more bytes than the limit, or than the context can hold even if
                every token were the longest of the vocabulary.
        """
        limit = self.limits.max_prompt_bytes
        if self._longest_piece:
            limit = min(limit, self.card.max_model_len * self._longest_piece)
        if num_bytes > limit:
            raise PromptTooLongError(
                f"The prompt has {num_bytes} bytes; with a context of {self.card.max_model_len} "
                f"tokens this server takes {limit} at most.",
                param=param,
            )

    def check_texts(self, texts: Iterable[str], param: str, repeated: int = 0) -> int:
        """Refuse texts that are too long, each for itself or all together, before tokenising.

        Returns the bytes of all.

        Args:
            repeated: bytes that prompts have beside the texts.

        Raises:
            PromptTooLongError: see ``check_size``.
        """
        total = repeated
        for text in texts:
            size = len(text.encode())
            self.check_size(size, param)
            total += size
        limit = self.limits.max_prompt_bytes
        if total > limit:
            raise PromptTooLongError(
                f"The texts of '{param}' make {total} bytes of prompts; this server takes {limit} "
                "at most.",
                param=param,
            )
        return total

    def check_count(self, prompts: int, n: int) -> None:
        """Raise ParameterError if a request wants more sequences than one may."""
        if prompts * n > self.limits.max_sequences:
            raise ParameterError(
                f"{prompts} prompts with n={n} are {prompts * n} sequences; one request may have "
                f"{self.limits.max_sequences}.",
                param="n" if n > 1 else "prompt",
            )


def new_id(prefix: str, joint: str = "-") -> str:
    """An id that cannot be guessed, such as ``cmpl-...``."""
    return f"{prefix}{joint}{secrets.token_hex(16)}"


def now() -> int:
    """Unix time in whole seconds."""
    return int(time.time())
