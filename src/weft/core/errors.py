"""Typed, structured errors: each has an HTTP status, a code and the parameter that it concerns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


class WeftError(Exception):
    """Base of every error that weft raises on purpose.

    Attributes:
        message: one sentence that says what is wrong and what to do.
        code: a stable machine-readable name.
        param: the wrong request parameter or setting, if there is one.
        http_status: the status that a server answers with.
        retry_after_s: seconds after which it may be worth asking again, None if it never is.
    """

    http_status = 500
    code = "internal_error"
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(WeftError):
    """A setting is unknown, out of bounds, or does not go with another one."""

    http_status = 400
    code = "invalid_config"


class ParameterError(WeftError):
    """A request parameter is malformed, out of bounds, or not supported."""

    http_status = 400
    code = "invalid_parameter"


class PromptTooLongError(ParameterError):
    """Prompt and requested output do not fit the context of the model."""

    code = "context_length_exceeded"


class ModelNotFoundError(WeftError):
    """The model folder or hub id does not exist or cannot be reached."""

    http_status = 404
    code = "model_not_found"


class UnsupportedModelError(WeftError):
    """The checkpoint's config needs a feature that weft does not implement."""

    http_status = 400
    code = "unsupported_model"


class CheckpointError(WeftError):
    """A tensor of the checkpoint is missing, unexpected, misshapen or unreadable."""

    http_status = 500
    code = "bad_checkpoint"


class TokenizerError(WeftError):
    """The tokeniser or chat template of the model is missing or unusable."""

    http_status = 500
    code = "bad_tokenizer"


class TemplateError(WeftError):
    """The chat template refused the conversation or failed while rendering it."""

    http_status = 400
    code = "chat_template_error"


class RendererDeadError(WeftError):
    """The process that renders chat templates has ended or cannot be started."""

    http_status = 503
    code = "renderer_dead"
    retry_after_s = 1


class UnsuitableModelError(WeftError):
    """The model cannot do what is asked for: it has no output head, no vectors, or no scores."""

    http_status = 400
    code = "unsuitable_model"


class ImageError(ParameterError):
    """An image is damaged, too large, of no known format, or lies where weft does not read it."""

    code = "invalid_image"


class GrammarError(ParameterError):
    """A schema, expression or grammar is wrong, too costly, or cannot be guaranteed."""

    code = "invalid_grammar"


class KernelError(WeftError):
    """No kernel for an op, shape, dtype or device; there is never a silent fallback."""

    http_status = 500
    code = "missing_kernel"


class OutOfMemoryError(WeftError):
    """A sequence or the model cannot get the memory that it needs."""

    http_status = 503
    code = "out_of_memory"


class NonFiniteLogitsError(WeftError):
    """The model produced NaN or infinite logits for one sequence."""

    http_status = 500
    code = "non_finite_logits"


class ProfileError(WeftError):
    """A profile of costs is missing, damaged, or of another machine or model."""

    code = "bad_profile"


class EngineBusyError(WeftError):
    """No room for another request at present; it may be sent again later."""

    http_status = 429
    code = "engine_busy"
    retry_after_s = 1


class NoTargetsError(WeftError):
    """Nothing keeps targets at present."""

    http_status = 409
    code = "no_targets"


class TargetError(WeftError):
    """The request would miss the latency target of its class, as is predicted.

    ``retry_after_s`` says when it would meet it, as far as is known; None if it never would.
    """

    http_status = 429
    code = "target_unattainable"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = 1
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class EngineDeadError(WeftError):
    """The engine process has ended or cannot be reached."""

    http_status = 503
    code = "engine_dead"
    retry_after_s = 5


class RingLinkError(EngineDeadError):
    """The link to an engine on another machine is down, or the other side broke its protocol."""

    code = "engine_unreachable"


class RingRefusedError(RingLinkError):
    """Engine and request plane do not go together: key, version, or no ring is free."""

    code = "engine_refused"


class ModelChangedError(RingRefusedError):
    """The engine serves another model, or other text files, than the request plane works with."""

    code = "model_changed"


class EngineOutOfMemoryError(EngineDeadError):
    """The engine process was killed because memory ran out, or the next one finds too little."""

    code = "engine_out_of_memory"


class ModelAsleepError(WeftError):
    """The model could not be woken, or was not loaded yet and this request does not load it."""

    http_status = 503
    code = "model_asleep"
    retry_after_s = 5


class ModelFailedError(ModelAsleepError):
    """The model of a server that has several could not be loaded."""

    code = "model_failed"


class ModelsBusyError(ModelAsleepError):
    """Models in use leave no memory for another one, or one that is to be unloaded is in use."""

    code = "models_busy"

    @classmethod
    def no_room(cls, name: str) -> ModelsBusyError:
        """The error where all memory is held by models that are in use."""
        return cls(
            f"The model '{name}' is asleep, and the models that are in use leave no memory for it; "
            "try again later."
        )


class HostWorkerError(WeftError):
    """The worker for attention on the host has ended, or cannot be started."""

    http_status = 503
    code = "host_worker_dead"
    retry_after_s = 5


class PlaceError(WeftError):
    """A remote host that attends cannot be reached, has gone silent, or broke the protocol."""

    http_status = 503
    code = "place_unavailable"
    retry_after_s = 5


class PlaceRefusedError(PlaceError):
    """Engine and place do not go together: key, version, geometry or memory; says both sides."""

    code = "place_refused"


class RequestCrashedError(WeftError):
    """The engine process has died again and again while it computed this request."""

    http_status = 500
    code = "request_crashed"


class RequestOutOfMemoryError(WeftError):
    """The engine was killed for memory again and again while it computed this request."""

    http_status = 500
    code = "request_out_of_memory"


class InvariantError(WeftError):
    """A bug in weft: an internal invariant does not hold."""

    code = "invariant_violated"


def short(value: object, chars: int = 200) -> str:
    """Foreign text in one line, cut to ``chars`` characters."""
    text = " ".join(str(value)[: 4 * chars].split())
    return text if len(text) <= chars else f"{text[: chars - 3]}..."


# Settings and keys of classes that had another name before.
RENAMED = {
    "attention": "kernels",
    "batch_invariant": "require_batch_invariance",
    "rank": "priority",
}


def suggest(name: str, known: Iterable[str], likeness: float = 0.5) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name nearest to ``name``, else ``""``.

    Of a name that was changed, return what it is called now. Flags keep their form. Names that are
    less alike than ``likeness``, from 0 to 1, do not count.
    """
    known = list(known)
    word = name.lstrip("-").removeprefix("no-").replace("-", "_")
    for now in (RENAMED.get(word, ""), "--" + RENAMED.get(word, "").replace("_", "-")):
        if now in known:
            return f" It is called '{now}' now."
    begun = [one for one in known if len(name) > 2 and one.startswith(name)]
    nearest = begun[:1] or difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""


def look_up(name: str, table: Mapping[str, Entry], kind: str) -> Entry:
    """The entry of a table by its name, whose letters may be of either case.

    Args:
        kind: what the table has, which is the name of the setting, too.

    Raises:
        ConfigError: no such name; the message lists the known ones.
    """
    entry = table.get(name.lower())
    if entry is None:
        raise ConfigError(
            f"Unknown {kind} '{name}'.{suggest(name.lower(), table)} "
            f"Known: {', '.join(sorted(table))}.",
            param=kind,
        )
    return entry
