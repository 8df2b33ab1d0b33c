"""Settings of ``weft frontend`` beside those of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.logs import FORMATS, LEVELS
from weft.core.settings import check_settings, config_errors, setting


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """Settings of ``weft frontend``."""

    ring: str = setting(
        "str", "127.0.0.1:8800", "HOST:PORT of a weft serve --engine-only --ring-listen HOST:PORT"
    )
    tokenizer: str | None = setting(
        "path",
        None,
        "folder with the model's tokeniser and chat template; unset fetches them from the engine "
        "and keeps them in the cache folder",
    )
    chat_template: str | None = setting(
        "path", None, "file with a chat template to use instead of the model's"
    )
    base_seed: int | None = setting(
        "int",
        None,
        "makes the seeds of requests without one reproducible; with one request plane",
        low=0,
        high=2**64 - 1,
    )
    log_level: str | None = setting(
        "str",
        None,
        "lowest level that is logged; unset follows WEFT_LOG_LEVEL, else warning",
        choices=LEVELS,
    )
    log_format: str = setting("str", "text", "form of log lines", choices=FORMATS)

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
