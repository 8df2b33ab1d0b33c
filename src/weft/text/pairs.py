"""Prompts of rerankers: a query and a document in a template, as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.core.errors import ParameterError
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
