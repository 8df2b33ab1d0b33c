"""Settings of ``weft attend``."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.logs import LEVELS
from weft.core.settings import check_settings, config_errors, setting


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """Settings of ``weft attend``."""

    listen: str = setting(
        "str",
        "127.0.0.1:8700",
        "HOST:PORT where engines connect; other addresses than loopback need a key; port 0 takes "
        "a free one",
    )
    key_file: str | None = setting(
        "path", None, "file with the key that the engines have, too: 16 bytes or more"
    )
    kv_memory: int = setting(
        "bytes", 4 * 2**30, "memory for the KV of the engine that is served", low=2**10
    )
    threads: int | None = setting(
        "int",
        None,
        "threads that attend; unset takes every processor that this process may use",
        low=1,
        high=1024,
    )
    log_level: str | None = setting(
        "str",
        None,
        "lowest level that is logged; unset follows WEFT_LOG_LEVEL, else warning",
        choices=LEVELS,
    )

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
