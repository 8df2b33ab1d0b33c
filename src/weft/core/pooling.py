"""Vectors of texts, and scores of pairs of texts, which a model may give beside text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.errors import ConfigError, ParameterError, UnsuitableModelError

SCORINGS = ("yes-no", "similarity")

# Names of the prompts that stand for a kind of input, the first that a checkpoint has. Documents as
# sentence-transformers' ``encode_document`` has them; words of Cohere, Voyage and NVIDIA.
_QUERY, _DOCUMENT = ("query", "search_query"), ("document", "passage", "corpus", "search_document")
INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("query", "search_query"), _QUERY),
    **dict.fromkeys(("document", "passage", "search_document"), _DOCUMENT),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}

_FIELD = re.compile(r"\{(instruction|query|document)\}")


def split_template(text: str) -> list[str]:
    """Split the prompt of a pair: text, field, text, field, ..., text.

    Raises:
        ConfigError: it lacks ``{query}`` or ``{document}``, or has a field twice.
    """
    parts = _FIELD.split(text)
    fields = parts[1::2]
    if len(set(fields)) < len(fields) or not {"query", "document"} <= set(fields):
        raise ConfigError(
            "A score template has {query} and {document} once each, and {instruction} at most "
            "once.",
            param="score_template",
        )
    return parts


@dataclass(frozen=True, slots=True)
class Pooling:
    """What the engine can be asked for, and how texts are prepared for it.

    Attributes:
        generates: there is an output head, so there is text.
        embeds: states of tokens make a vector of the text.
        pooled: which ones: ``last``, ``first``, or ``mean``.
        unit: vectors have length 1.
        prompts: texts that go before an input, by name (sentence-transformers).
        default_prompt: the name of the one that inputs get that ask for none; empty for none.
        scoring: ``yes-no``, ``head``, ``similarity``, or empty where pairs cannot be scored.
        sigmoid: scores of a reranker are from 0 to 1, else logits, where a request says neither.
        answers: token ids of yes and no; None: those of the words.
        template: what a pair becomes, with ``{instruction}``, ``{query}`` and ``{document}``;
            empty: Qwen3-Reranker's.
        joined: a pair is rather what the tokeniser makes of two texts: ``plain``, or ``typed``,
            where tokens of the second have a type of their own; empty: it is not.
    """

    generates: bool = True
    embeds: bool = True
    pooled: str = "last"
    unit: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    scoring: str = ""
    sigmoid: bool = True
    answers: tuple[int, int] | None = None
    template: str = ""
    joined: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Pooling:
        """The same after a passage through JSON."""
        answers = values["answers"]
        return cls(**{**values, "answers": None if answers is None else tuple(answers)})

    def check_generates(self, model: str) -> None:
        """Raise UnsuitableModelError if a model has no output head."""
        if not self.generates:
            rest = "/v1/rerank or /v1/score"
            raise UnsuitableModelError(
                f"The model '{model}' generates no text: it is served for {self.describe()}. "
                f"Ask {'/v1/embeddings, ' * self.embeds}{rest}.",
                param="model",
            )

    def check_embeds(self, model: str) -> None:
        """Raise UnsuitableModelError if a model has no vectors."""
        if not self.embeds:
            raise UnsuitableModelError(
                f"The model '{model}' scores pairs of texts and has no embeddings; ask /v1/rerank "
                "or /v1/score.",
                param="model",
            )

    def check_scores(self, model: str) -> None:
        """Raise UnsuitableModelError if a model cannot score pairs of texts."""
        if not self.scoring:
            raise UnsuitableModelError(
                f"The model '{model}' cannot score pairs of texts: it is neither a reranker nor an "
                "embedding model. Started with --scoring yes-no or --scoring similarity, the "
                "server has it score all the same.",
                param="model",
            )

    def prompt(self, name: str | None = None, kind: str | None = None) -> str:
        """The text that goes before an input: that of a name, or the default one, if there is any.

        Args:
            name: of one of the checkpoint's prompts.
            kind: what the input is, in words of other APIs (``INPUT_TYPES``), or such a name.

        Raises:
            ParameterError: there is no prompt of that name or kind, or both are given.
        """
        if None not in (name, kind):
            raise ParameterError("Give either input_type or prompt_name.", param="input_type")
        if kind is not None:
            names = INPUT_TYPES.get(kind, (kind,))
            name = next((one for one in names if one in self.prompts), kind)
        if name is not None and name not in self.prompts:
            known = ", ".join(f"'{one}'" for one in self.prompts) or "none"
            raise ParameterError(
                f"This model has no prompt '{name[:200]}'; its prompts: {known}.",
                param="prompt_name" if kind is None else "input_type",
            )
        return self.prompts.get(self.default_prompt if name is None else name, "")

    def describe(self) -> str:
        """What the model is served for, as a phrase."""
        words = ["text"] if self.generates else []
        if self.embeds:
            of = f"of the {self.pooled} token" if self.pooled != "mean" else "by the mean of tokens"
            words.append(f"embeddings {of}" + ", of length 1" * self.unit)
        how = {
            "yes-no": "scores by the answer yes or no",
            "head": "scores by a classification head",
            "similarity": "scores by similarity",
        }
        if self.scoring:
            words.append(how[self.scoring])
        return "; ".join(words)


TEXT_MODEL = Pooling()  # generates text, and its states are vectors
