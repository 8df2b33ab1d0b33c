"""Vectors, and scores of pairs: whether a model can be asked for them, by its checkpoint."""

from __future__ import annotations

from pathlib import Path

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.json_files import read_text
from weft.core.pooling import Pooling, split_template
from weft.models.pooling import read_modules
from weft.models.spec import ModelSpec

MOST_TEMPLATE_BYTES = 2**16
RERANKER = "qwen3-reranker"  # in the name of checkpoints that bear no other mark
OWN_PROMPT = ("qwen3", "qwen3_moe")  # families whose rerankers have Qwen3-Reranker's prompt


def find_pooling(config: EngineConfig, source: Path, spec: ModelSpec) -> Pooling:
    """What a model can be asked for, by its checkpoint and the settings.

    Args:
        source: a model folder, or a GGUF file.

    Raises:
        ConfigError: the model cannot score as is set, or has no prompt for pairs of texts.
    """
    modules = read_modules(source) if source.is_dir() else None
    answers = None if modules is None else modules.answers
    scoring = _scoring(config, source, spec, reranks=answers is not None)
    template = _template(config, scoring, spec)
    return Pooling(
        generates=spec.head == "tokens",
        embeds=spec.head != "score",
        unit=spec.unit_states,
        pooled=spec.pooled,
        prompts={} if modules is None else modules.prompts,
        default_prompt="" if modules is None else modules.default_prompt,
        scoring=scoring,
        sigmoid=spec.sigmoid_scores,
        answers=answers,
        template=template,
        joined=_joined(spec),
    )


def _joined(spec: ModelSpec) -> str:
    """How a cross encoder has its pairs; empty of other models."""
    if spec.encoder is None or spec.head != "score":
        return ""
    return "typed" if spec.encoder.typed_pairs else "plain"


def _scoring(config: EngineConfig, source: Path, spec: ModelSpec, *, reranks: bool) -> str:
    wish = config.scoring
    if spec.head == "score":
        if wish != "auto":
            raise ConfigError(
                f"scoring={wish} is not for a model with a classification head; leave it at auto.",
                param="scoring",
            )
        return "head"
    if spec.head == "none" and wish == "yes-no":
        raise ConfigError(
            "scoring=yes-no needs an output head, which an embedding model has not; set it to "
            "similarity.",
            param="scoring",
        )
    if wish != "auto":
        return wish
    if spec.head == "none":
        return "similarity"
    named = RERANKER in config.model.lower() or RERANKER in source.name.lower()
    return "yes-no" if reranks or (named and spec.family in OWN_PROMPT) else ""


def _template(config: EngineConfig, scoring: str, spec: ModelSpec) -> str:
    """The prompt of a pair; empty where it is Qwen3-Reranker's, or there is none."""
    if scoring not in ("yes-no", "head") or _joined(spec):
        if config.score_template is not None:
            raise ConfigError(
                "score_template is the prompt of a reranker, as which this model is not served, or "
                "whose tokeniser joins the texts of a pair.",
                param="score_template",
            )
        return ""
    if config.score_template is None:
        if spec.family not in OWN_PROMPT:
            raise ConfigError(
                f"There is no prompt for rerankers of the family {spec.family}; set score_template "
                "to a file with one, with {query} and {document} in it.",
                param="score_template",
            )
        return ""
    text = read_text(Path(config.score_template), ConfigError, MOST_TEMPLATE_BYTES)
    split_template(text)
    return text
