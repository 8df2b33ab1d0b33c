"""Prompts of rerankers: a query and a document in a template, or joined by marks, as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.core.errors import ParameterError, UnsuitableModelError
from weft.core.pooling import split_template
from weft.text.tokenizer import Tokenizer

# The prompt of https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


class JoinedPair:
    """Two texts as the tokeniser joins them: ``[CLS] query [SEP] document [SEP]``.

    Attributes:
        instructed: there is no place for an instruction.
    """

    instructed = False

    def __init__(self, tokenizer: Tokenizer, *, typed: bool) -> None:
        """Find the marks around texts.

        Args:
            typed: the model gives the tokens behind the first mark of those that end texts a type
                of their own.

        Raises:
            UnsuitableModelError: the tokeniser does not join texts so.
        """
        self._tokenizer = tokenizer
        self._before, self._between, self._after, types = tokenizer.pair_marks()
        marks = [*self._before, *self._between, *self._after]
        texts = self._between and self._after
        if not texts or (typed and types != self._types(marks)):
            raise UnsuitableModelError(
                "The tokeniser does not join two texts as this cross encoder needs them, with a "
                "mark behind each; take the tokeniser of the model.",
                param="model",
            )

    def _types(self, marks: list[int]) -> list[int]:
        """The types of marks: 1 behind the first one that is as the last."""
        first = marks.index(marks[-1])
        return [int(at > first) for at in range(len(marks))]

    def encode(
        self,
        values: Mapping[str, str],
        most_document_tokens: int | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        """As ``PairTemplate.encode``."""
        query, document = (
            self._tokenizer.encode(values[name], add_special_tokens=False)
            for name in ("query", "document")
        )
        head = [*self._before, *query, *self._between]
        others = len(head) + len(self._after)
        room = len(document) if most_tokens is None else most_tokens - others
        if room < min(1, len(document)):
            raise ParameterError(
                f"The prompt cannot be cut to {most_tokens} tokens, of which the query and the "
                f"marks take {others}.",
                param="truncate_prompt_tokens",
            )
        return [*head, *document[:most_document_tokens][:room], *self._after]


class PairTemplate:
    """A text with ``{query}``, ``{document}`` and perhaps ``{instruction}``, each once.

    Attributes:
        instructed: whether there is a place for an instruction.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the text lacks a place, or has one twice."""
        self._tokenizer = tokenizer
        self._parts = split_template(text)
        self.instructed = "instruction" in self._parts[1::2]
        self._controls = self._controls_of(tokenizer.encode_parsed("".join(self._parts[::2])))
        self._last = self._parts[-2]
        self._ending = tokenizer.encode_parsed(self._parts[-1])

    def encode(
        self,
        values: Mapping[str, str],
        most_document_tokens: int | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of a pair; what values spell is text, never a control token.

        Args:
            values: of each field.
            most_document_tokens: the document, or what stands last, loses its end beyond so many.
            most_tokens: it loses as much of its end as is needed for so many in all.

        Raises:
            ParameterError: not valid Unicode, or too little room for anything of the document.
        """
        ids = self._encode(values)
        limit = len(ids) if most_tokens is None else min(len(ids), most_tokens)
        if most_document_tokens is not None and limit > most_document_tokens:
            others = len(self._encode({**values, self._last: ""}))
            limit = min(limit, others + most_document_tokens)
        if limit == len(ids):
            return ids
        kept = limit - len(self._ending)
        if kept <= 0:
            raise ParameterError(
                f"The prompt cannot be cut to {limit} tokens, of which its end alone takes "
                f"{len(self._ending)}.",
                param="truncate_prompt_tokens",
            )
        return [*ids[:kept], *self._ending]

    def _encode(self, values: Mapping[str, str]) -> list[int]:
        tokenizer = self._tokenizer
        text = "".join([values[part] if at % 2 else part for at, part in enumerate(self._parts)])
        ids = tokenizer.encode_parsed(text)
        if self._controls_of(ids) == self._controls:
            return ids
        return tokenizer.guard.encode(self._pieces(values))

    def _controls_of(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._tokenizer.control_ids]

    def _pieces(self, values: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """Pieces of the text, with whether each is meant as the added token that it spells."""
        scanner, controls = self._tokenizer.scanner, self._tokenizer.control_ids
        for at, part in enumerate(self._parts):
            given = at % 2 == 1
            for piece in scanner.split(values[part] if given else part):
                token = piece.token
                yield piece.text, token is not None and not (given and token.token_id in controls)
