"""The routes as the OpenAPI description has them: a row for each method and path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from weft.api import answers, server_answers
from weft.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from weft.api.embeddings import EmbeddingBody
from weft.api.endpoints import ENDPOINTS, EVENT_STREAM, JSON_LINES
from weft.api.message_body import MessageBody, PromptBody
from weft.api.ollama_models import ModelBody
from weft.api.response_body import ResponseBody
from weft.api.score_bodies import RerankBody, ScoreBody, TextsBody
from weft.batch.records import UPLOADED
from weft.server import batches, message_batches, model_lists
from weft.server.files import EXPIRY_S, MOST_FILES
from weft.server.metrics import CONTENT_TYPE
from weft.server.ollama import STORE_PATHS
from weft.server.responses import DEFAULT_ITEMS, MOST_ITEMS
from weft.server.several_app import OrderBody
from weft.server.targets import TargetsBody
from weft.server.usage import DEFAULT_ROWS, MOST_ROWS

Kinds = tuple[type[Struct], ...]
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter of a query string."""

    name: str
    kind: Any
    told: str


@dataclass(frozen=True, slots=True)
class Operation:
    """What a method of a path takes and gives.

    Attributes:
        answer: kinds of a body of status 200, which is one of them.
        body: the same of requests; of an endpoint of the engine the kind that its row names.
        events: what each event or line of a stream is; None where they are of many kinds.
        streams: whether an answer may be a stream.
        media: of answers that are no JSON.
        form: schema of a body that is a form.
        refused: every request gets an error.
    """

    tag: str
    summary: str
    answer: tuple[Any, ...] = ()
    body: Kinds = ()
    events: type[Struct] | None = None
    streams: bool = False
    media: str = ""
    query: tuple[Query, ...] = ()
    form: Mapping[str, Any] | None = None
    refused: bool = False


class QueuedMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """One request of a batch of messages."""

    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: MessageBody


class MessageBatchRequests(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/messages/batches``, which is read as it comes."""

    requests: Annotated[list[QueuedMessage], Meta(min_length=1)]


def _limit(default: int, most: int) -> Query:
    kind = Annotated[int, Meta(ge=1, le=most)]
    return Query("limit", kind, f"Entries of a page; {default} by default.")


CURSORS = (
    Query("after_id", str, "The last id of the page before."),
    Query("before_id", str, "The first id of the page after."),
)
AFTER = Query("after", str, "The id of the last entry of the page before.")
MODEL = Query("model", str, "Of several models, the one that is meant; the first by default.")
ORDER = Query("order", Order, "By age; the newest first by default.")
INCLUDE = Query("include", list[str], "What OpenAI's API can include; known values have no effect.")
FILE_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(UPLOADED)},
        "expires_after": {"type": "string", "contentMediaType": "application/json"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": EXPIRY_S[0],
            "maximum": EXPIRY_S[1],
        },
    },
}

GENERATION, SCORES, RESPONSES = "Generation", "Embeddings and scores", "Responses"
MESSAGES, OLLAMA, BATCHED = "Messages (Anthropic)", "Ollama", "Files and batches"
MODELS, SERVER = "Models and tokens", "Server"
TAGS = (GENERATION, RESPONSES, MESSAGES, OLLAMA, SCORES, BATCHED, MODELS, SERVER)

_GENERATED = (answers.ChatCompletion, answers.Completion)
_CHAT = Operation(
    GENERATION,
    "Answer a conversation",
    (answers.ChatCompletion,),
    events=answers.ChatChunk,
    streams=True,
)
_RANKED = Operation(SCORES, "Order documents by their relevance to a query", (answers.Ranking,))
_SCORED = Operation(SCORES, "Score pairs of texts", (answers.ScoreList,))
_INVOCATION = Operation(
    GENERATION,
    "Chat, complete, embed, rank or score, by the fields of the body",
    (*_GENERATED, answers.EmbeddingList, answers.Ranking, answers.ScoreList),
    body=(ChatBody, CompletionBody, EmbeddingBody, RerankBody, ScoreBody),
    streams=True,
)

_ASKED = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": Operation(
        GENERATION,
        "Continue one or many prompts",
        (answers.Completion,),
        events=answers.CompletionChunk,
        streams=True,
    ),
    "/invocations": _INVOCATION,
    "/v1/responses": Operation(
        RESPONSES, "Answer, and keep the conversation", (answers.Response,), streams=True
    ),
    "/v1/messages": Operation(
        MESSAGES, "Answer a conversation", (answers.MessageAnswer,), streams=True
    ),
    "/v1/embeddings": Operation(SCORES, "Vectors of texts", (answers.EmbeddingList,)),
    "/v1/rerank": _RANKED,
    "/v2/rerank": _RANKED,
    "/rerank": Operation(
        SCORES,
        "Order documents, also in the form of text-embeddings-inference",
        (answers.Ranking, list[answers.TextScore]),
        body=(RerankBody, TextsBody),
    ),
    "/v1/score": _SCORED,
    "/score": _SCORED,
    "/api/chat": Operation(
        OLLAMA,
        "Answer a conversation",
        (server_answers.OllamaChat,),
        events=server_answers.OllamaChat,
        streams=True,
    ),
    "/api/generate": Operation(
        OLLAMA,
        "Continue a prompt",
        (server_answers.OllamaText,),
        events=server_answers.OllamaText,
        streams=True,
    ),
    "/api/embed": Operation(OLLAMA, "Vectors of texts", (server_answers.OllamaVectorList,)),
    "/api/embeddings": Operation(OLLAMA, "The vector of a text", (server_answers.OllamaVector,)),
}
_RESPONSE = (answers.Response,)
_OF_RESPONSES = {
    "POST /v1/responses/input_tokens": Operation(
        RESPONSES, "Count the tokens of a body", (answers.InputTokens,), (ResponseBody,)
    ),
    "GET /v1/responses/{response_id}": Operation(
        RESPONSES,
        "A stored response, or its events",
        _RESPONSE,
        streams=True,
        query=(
            Query("stream", bool, "Send events."),
            Query("starting_after", int, "Leave out the events up to this number."),
            INCLUDE,
        ),
    ),
    "DELETE /v1/responses/{response_id}": Operation(
        RESPONSES, "Forget a response", (answers.DeletedResponse,)
    ),
    "POST /v1/responses/{response_id}/cancel": Operation(
        RESPONSES, "End a background response", _RESPONSE
    ),
    "GET /v1/responses/{response_id}/input_items": Operation(
        RESPONSES,
        "The input of a response",
        (answers.ItemList,),
        query=(_limit(DEFAULT_ITEMS, MOST_ITEMS), ORDER, AFTER, INCLUDE),
    ),
}
_MESSAGE_BATCH = (answers.MessageBatch,)
_OF_MESSAGES = {
    "POST /v1/messages/count_tokens": Operation(
        MESSAGES, "Count the tokens of a prompt", (answers.CountedTokens,), (PromptBody,)
    ),
    "POST /v1/messages/batches": Operation(
        MESSAGES, "Queue messages", _MESSAGE_BATCH, (MessageBatchRequests,), query=(MODEL,)
    ),
    "GET /v1/messages/batches": Operation(
        MESSAGES,
        "List batches of messages",
        (answers.MessageBatchList,),
        query=(
            _limit(message_batches.DEFAULT_BATCHES, message_batches.MOST_BATCHES),
            *CURSORS,
        ),
    ),
    "GET /v1/messages/batches/{batch_id}": Operation(
        MESSAGES, "The state of a batch", _MESSAGE_BATCH
    ),
    "DELETE /v1/messages/batches/{batch_id}": Operation(
        MESSAGES, "Forget a batch that has ended", (answers.DeletedMessageBatch,)
    ),
    "POST /v1/messages/batches/{batch_id}/cancel": Operation(
        MESSAGES, "End a batch early", _MESSAGE_BATCH
    ),
    "GET /v1/messages/batches/{batch_id}/results": Operation(
        MESSAGES, "Results, a line of JSON each", media=JSON_LINES
    ),
}
_OF_OLLAMA = {
    "GET /api/tags": Operation(OLLAMA, "The served names", (server_answers.OllamaModelList,)),
    "GET /api/ps": Operation(OLLAMA, "The loaded model", (server_answers.OllamaModelList,)),
    "GET /api/version": Operation(
        OLLAMA, "The version of Ollama whose API this is", (server_answers.Version,)
    ),
    "POST /api/show": Operation(
        OLLAMA, "Describe the model", (server_answers.OllamaShown,), (ModelBody,)
    ),
    "POST /api/pull": Operation(
        OLLAMA, "Succeeds for the served model", (server_answers.OllamaStatus,), (ModelBody,)
    ),
    **{
        f"{method} /api{path}": Operation(OLLAMA, "weft has no store of models", refused=True)
        for path in STORE_PATHS
        for method in ("GET", "POST", "DELETE")
    },
}
_FILE, _BATCH = (server_answers.File,), (server_answers.Batch,)
_OF_BATCHES = {
    "POST /v1/files": Operation(BATCHED, "Upload a file of requests", _FILE, form=FILE_FORM),
    "GET /v1/files": Operation(
        BATCHED,
        "List files",
        (server_answers.FileList,),
        query=(
            _limit(MOST_FILES, MOST_FILES),
            ORDER,
            AFTER,
            Query("purpose", str, "Only files of this purpose."),
        ),
    ),
    "GET /v1/files/{file_id}": Operation(BATCHED, "Describe a file", _FILE),
    "DELETE /v1/files/{file_id}": Operation(
        BATCHED, "Remove a file", (server_answers.DeletedFile,)
    ),
    "GET /v1/files/{file_id}/content": Operation(
        BATCHED, "The bytes of a file", media="application/octet-stream"
    ),
    "POST /v1/batches": Operation(
        BATCHED, "Queue a file of requests", _BATCH, (batches.BatchBody,)
    ),
    "GET /v1/batches": Operation(
        BATCHED,
        "List batches",
        (server_answers.BatchList,),
        query=(_limit(batches.DEFAULT_BATCHES, batches.MOST_BATCHES), AFTER),
    ),
    "GET /v1/batches/{batch_id}": Operation(BATCHED, "The state of a batch", _BATCH),
    "POST /v1/batches/{batch_id}/cancel": Operation(BATCHED, "End a batch early", _BATCH),
}
_OF_MODELS = {
    "GET /v1/models": Operation(
        MODELS,
        "The served names; in Anthropic's form, and by pages, with the header anthropic-version",
        (server_answers.ModelList, answers.MessageModelList),
        query=(_limit(model_lists.DEFAULT_MODELS, model_lists.MOST_MODELS), *CURSORS),
    ),
    "GET /v1/models/{name}": Operation(
        MODELS, "One served name", (server_answers.ModelEntry, answers.MessageModel)
    ),
    "POST /v1/models/load": Operation(
        MODELS, "Wake a model; with several", (server_answers.ModelState,), (OrderBody,)
    ),
    "POST /v1/models/unload": Operation(
        MODELS, "Put a model to sleep; with several", (server_answers.ModelState,), (OrderBody,)
    ),
    "POST /tokenize": Operation(
        MODELS, "Token ids of text or messages", (server_answers.Tokenized,), (TokenizeBody,)
    ),
    "POST /detokenize": Operation(
        MODELS, "Text of token ids", (server_answers.Detokenized,), (DetokenizeBody,)
    ),
}
_OF_SERVER = {
    "GET /": Operation(SERVER, "The page, for browsers; a line for probes", media="text/html"),
    "GET /ui": Operation(SERVER, "Leads to the page", media="text/html"),
    "GET /page/{name}": Operation(SERVER, "A file of the page", media="*/*"),
    "GET /health": Operation(SERVER, "The process answers", (server_answers.Health,)),
    "GET /ready": Operation(SERVER, "The engine takes requests", (server_answers.Readiness,)),
    "GET /metrics": Operation(SERVER, "Metrics for Prometheus", media=CONTENT_TYPE),
    "GET /version": Operation(SERVER, "The version of weft", (server_answers.Version,)),
    "GET /server_info": Operation(
        SERVER, "Model, limits and engine", (server_answers.ServerInfo,), query=(MODEL,)
    ),
    "GET /openapi.json": Operation(SERVER, "This description", media="application/json"),
    "GET /v1/loom": Operation(
        SERVER,
        "The engine's steps, classes, KV and batches, as they are computed",
        media="application/json",
        streams=True,
        query=(
            Query("once", Literal["0", "1"], "One object in place of a stream."),
            MODEL,
        ),
    ),
    "GET /v1/targets": Operation(
        SERVER, "Latency targets", (server_answers.Targets,), query=(MODEL,)
    ),
    "PUT /v1/targets": Operation(
        SERVER, "Change latency targets", (server_answers.Targets,), (TargetsBody,), query=(MODEL,)
    ),
    "GET /v1/usage": Operation(
        SERVER,
        "Tokens by day, key and class",
        (server_answers.UsageList,),
        query=(
            Query("start_date", str, "The first day, such as 2026-12-31."),
            Query("end_date", str, "The last day."),
            Query("key", str, "The name of a key."),
            Query("service_class", str, "The name of a class."),
            _limit(DEFAULT_ROWS, MOST_ROWS),
            AFTER,
        ),
    ),
}
OPERATIONS: Mapping[str, Operation] = {
    **{f"POST {path}": row for path, row in _ASKED.items()},
    **_OF_RESPONSES,
    **_OF_MESSAGES,
    **_OF_OLLAMA,
    **_OF_BATCHES,
    **_OF_MODELS,
    **_OF_SERVER,
}


def bodies_of(name: str, row: Operation) -> Kinds:
    """The kinds of body that an operation takes; none if it takes no JSON."""
    method, _, path = name.partition(" ")
    if row.body or method != "POST" or path not in ENDPOINTS:
        return row.body
    declared = ENDPOINTS[path].body
    return () if declared is None else (declared,)


def stream_of(name: str) -> str:
    """The content type of an operation's streams."""
    path = name.partition(" ")[2]
    return ENDPOINTS[path].content_type if path in ENDPOINTS else EVENT_STREAM
