"""OpenAI's API without a transport: request bodies to sequences, updates to answers and chunks."""

from weft.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from weft.api.card import ApiLimits, ModelCard
from weft.api.chat import chat_job
from weft.api.chunks import ChunkWriter
from weft.api.completions import completion_job
from weft.api.decoding import decode_body
from weft.api.errors import describe_error
from weft.api.jobs import Builder, Job
from weft.api.logprobs import TokenTexts
from weft.api.responses import Collector, model_list, model_object
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
    "model_list",
    "model_object",
    "tokenize",
]
