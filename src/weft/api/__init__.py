"""OpenAI's API without a transport: request bodies to sequences, updates to answers and chunks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
    from weft.api.card import ApiLimits, ModelCard
    from weft.api.chat import chat_job
    from weft.api.chunks import ChunkWriter
    from weft.api.completions import completion_job
    from weft.api.decoding import decode_body
    from weft.api.errors import describe_error
    from weft.api.jobs import Builder, Job
    from weft.api.logprobs import TokenTexts
    from weft.api.responses import Collector, model_entries, model_object
    from weft.api.rules import Notes
    from weft.api.tokens import detokenize, tokenize

__all__ = [
    "ApiLimits",
    "Builder",
    "ChatBody",
    "ChunkWriter",
    "Collector",
    "CompletionBody",
    "DetokenizeBody",
    "Job",
    "ModelCard",
    "Notes",
    "TokenTexts",
    "TokenizeBody",
    "chat_job",
    "completion_job",
    "decode_body",
    "describe_error",
    "detokenize",
    "model_entries",
    "model_object",
    "tokenize",
]

_HOMES = {
    "ApiLimits": "card",
    "Builder": "jobs",
    "ChatBody": "bodies",
    "ChunkWriter": "chunks",
    "Collector": "responses",
    "CompletionBody": "bodies",
    "DetokenizeBody": "bodies",
    "Job": "jobs",
    "ModelCard": "card",
    "Notes": "rules",
    "TokenTexts": "logprobs",
    "TokenizeBody": "bodies",
    "chat_job": "chat",
    "completion_job": "completions",
    "decode_body": "decoding",
    "describe_error": "errors",
    "detokenize": "tokens",
    "model_entries": "responses",
    "model_object": "responses",
    "tokenize": "tokens",
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use: the supervisor needs two of the modules here."""
    if name in _HOMES:
        return getattr(import_module(f"weft.api.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'weft.api' has no attribute '{name}'")
