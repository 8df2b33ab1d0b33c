"""Answers about models, tokens, files, batches, the server and Ollama's API; as `answers`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from weft.api.answers import InputUsage, LikelyFirst
from weft.core.states import BatchStatus, LoadState


class ModelEntry(Struct, kw_only=True):
    """A name of a served model; ``max_model_len`` is its context, known once it was awake.

    With ``input_modalities`` it also reads images. With several models also its state, the memory
    that it takes, the seconds of its last waking, and why it cannot be loaded.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | UnsetType = UNSET
    input_modalities: list[Literal["text", "image"]] | UnsetType = UNSET
    state: LoadState | UnsetType = UNSET
    memory_bytes: int | UnsetType = UNSET
    wake_s: float | UnsetType = UNSET
    error: str | UnsetType = UNSET


class ModelState(Struct, kw_only=True):
    """What became of an order to load or unload a model."""

    id: str
    object: Literal["model"]
    state: LoadState
    memory_bytes: int
    wake_s: float | UnsetType = UNSET
    error: str | UnsetType = UNSET


class ModelList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[ModelEntry]


class Tokenized(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct, kw_only=True):
    prompt: str


class Health(Struct, kw_only=True):
    status: Literal["ok"]


class Readiness(Struct, kw_only=True):
    """Whether the engine takes requests, 503 unless ``ready``; of several models each state."""

    status: Literal["ready", "stalled", "recovering", "out_of_memory", "draining"]
    engines_killed_for_memory: int | UnsetType = UNSET
    models: dict[str, str] | UnsetType = UNSET


class Version(Struct, kw_only=True):
    version: str


class ModelSummary(Struct, kw_only=True):
    names: list[str]
    max_model_len: int
    vocab_size: int
    system_fingerprint: str
    chat: bool
    tokenizer: str


class ServerInfo(Struct, kw_only=True):
    """The model, every limit of a request, and what the engine says of itself."""

    version: str
    model: ModelSummary
    classes: UsableClasses
    limits: dict[str, Any]
    engine: dict[str, Any]


class UsableClasses(Struct, kw_only=True):
    """The classes that the key may use, and the one of requests that name none."""

    usable: list[str]
    default: str


class ClassRow(Struct, kw_only=True):
    name: str
    priority: int
    ttft_s: float | None
    tpot_s: float | None


class Targets(Struct, kw_only=True):
    """Latency targets of the service classes, and the policy that keeps them."""

    object: Literal["targets"]
    policy: str | None
    classes: list[ClassRow]


class UsageRow(Struct, kw_only=True):
    """What a key has used in a class on one day (UTC)."""

    id: str
    object: Literal["usage"]
    date: str
    key: str | None
    service_class: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class UsageList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[UsageRow]
    first_id: str | None
    last_id: str | None
    has_more: bool


# -- files and batches --------------------------------------------------------------------------


class File(Struct, kw_only=True):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[File]
    first_id: str
    last_id: str
    has_more: bool


class DeletedFile(Struct, kw_only=True):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class RequestCounts(Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchErrors(Struct, kw_only=True):
    object: Literal["list"]
    data: list[dict[str, Any]]


class Batch(Struct, kw_only=True):
    """A batch; under ``weft`` is what only weft says, such as its predicted end."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: InputUsage
    metadata: dict[str, str] | None
    weft: dict[str, Any]


class BatchList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[Batch]
    first_id: str
    last_id: str
    has_more: bool


# -- Ollama's API -------------------------------------------------------------------------------


class OllamaCalledFunction(Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaAnswerCall(Struct, kw_only=True):
    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(Struct, kw_only=True):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaAnswerCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """Fields of answers and lines of streams; counts and times (nanoseconds) are in the last."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[LikelyFirst] | UnsetType = UNSET


class OllamaChat(OllamaAnswer, kw_only=True):
    message: OllamaAnswerMessage


class OllamaText(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaVectorList(Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class OllamaVector(Struct, kw_only=True):
    embedding: list[float]


class OllamaModel(Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: dict[str, Any]
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModelList(Struct, kw_only=True):
    models: list[OllamaModel]


class OllamaShown(Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaStatus(Struct, kw_only=True):
    status: Literal["success"]
