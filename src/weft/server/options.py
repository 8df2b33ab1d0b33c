"""Every setting of the request plane, declared once; flags and pages derive from it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import ConfigError, ParameterError
from weft.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a user may set about the HTTP server.

    Raises:
        ConfigError: a value is malformed, out of bounds, or contradicts another one.
    """

    host: str = setting("str", "127.0.0.1", "address to listen on; 0.0.0.0 for every network")
    port: int = setting("int", 8000, "TCP port; 0 takes a free one", low=0, high=65535)
    uds: str | None = setting("path", None, "Unix socket to listen on instead of a TCP port")
    root_path: str = setting("str", "", "path prefix that a proxy in front of the server strips")
    served_model_name: tuple[str, ...] = setting(
        "strings", (), "name of the model in requests; may be given several times", high=64
    )
    api_key: tuple[str, ...] = setting(
        "strings", (), "key that requests must bear; may be given several times", high=4096
    )
    cors_origin: tuple[str, ...] = setting(
        "strings", (), "web origin that may call the server, or *; may be repeated", high=256
    )
    max_body_bytes: int = setting(
        "bytes", 4 * 2**20, "longest request body that is read", low=1024, high=2**31
    )
    max_header_bytes: int = setting(
        "bytes",
        64 * 2**10,
        "longest request line and headers together",
        low=1024,
        high=16 * 2**20,
    )
    header_timeout_s: float = setting(
        "float", 20.0, "seconds that a client has to send its headers", low=0.1, high=86400
    )
    max_prompt_bytes: int = setting(
        "bytes", 8 * 2**20, "longest prompt in bytes, checked before tokenising", low=1
    )
    max_sequences: int = setting("int", 512, "prompts times n of one request", low=1, high=65536)
    tokenizer_threads: int = setting(
        "int", 2, "threads that tokenise long prompts beside the event loop", low=1, high=64
    )
    drain_timeout_s: float = setting(
        "float", 30.0, "seconds that open requests get to finish on SIGTERM", low=0, high=86400
    )
    keep_alive_s: int = setting(
        "int", 75, "seconds that an idle connection is kept open", low=1, high=86400
    )
    vllm_metrics: bool = setting("bool", False, "also emit metrics under vllm: names")
    access_log: bool = setting("bool", False, "log one line for each request")

    def __post_init__(self) -> None:
        try:
            check_settings(self)
        except ParameterError as error:
            raise ConfigError(error.message, param=error.param) from None
        if any(not key.isascii() or not key.strip() for key in self.api_key):
            raise ConfigError("api_key must be printable ASCII and not empty.", param="api_key")
        if "" in self.served_model_name:
            raise ConfigError("served_model_name must not be empty.", param="served_model_name")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError("root_path must start with '/'.", param="root_path")
