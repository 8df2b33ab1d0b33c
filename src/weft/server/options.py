"""Every setting of the request plane, declared once; flags and pages derive from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.batch.promotion import PROMOTIONS
from weft.batch.webhook_settings import WebhookSettings
from weft.core.addresses import DEFAULT_PORT
from weft.core.errors import ConfigError
from weft.core.settings import check_settings, config_errors, setting
from weft.server.keyfile import read_keys
from weft.text.forms import CALL_FORMS, REASONING_FORMS

_HOST_NAME = re.compile(r"\*|[A-Za-z0-9_.-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?")

# Settings that concern an engine without HTTP.
OF_ENGINES = (
    *("engine_only", "ring_listen", "ring_planes", "ring_key_file", "ring_timeout_s"),
    *("standby", "watchdog_s", "stalled_s", "drain_timeout_s"),
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the HTTP server.

    Raises:
        ConfigError: a value is malformed, out of bounds, or contradicts another one.
    """

    host: str = setting(
        "str", "127.0.0.1", "address to listen on; 0.0.0.0 for every network", everyday=True
    )
    port: int = setting(
        "int", DEFAULT_PORT, "TCP port; 0 takes a free one", low=0, high=65535, everyday=True
    )
    uds: str | None = setting("path", None, "Unix socket to listen on instead of a TCP port")
    root_path: str = setting("str", "", "path prefix that a proxy in front of the server strips")
    served_model_name: tuple[str, ...] = setting(
        "strings", (), "name of the model in requests; may be repeated", high=64, everyday=True
    )
    models_memory: int | None = setting(
        "bytes",
        None,
        "several models: memory that those awake may take together, with weights and KV cache; the "
        "least recently used ones sleep beyond it; unset or auto is 0.8 of the free memory",
        low=2**20,
        auto=True,
        everyday=True,
    )
    idle_sleep_s: float = setting(
        "float",
        0.0,
        "seconds without a request after which a model sleeps, its memory given back, until the "
        "next request; 0 for never",
        low=0,
        high=30 * 86400,
        everyday=True,
    )
    api_key: tuple[str, ...] = setting(
        "strings", (), "key that requests must have; may be repeated", high=4096, everyday=True
    )
    cors_origin: tuple[str, ...] = setting(
        "strings",
        (),
        "web origin that may call the server, or *; may be repeated",
        high=256,
        everyday=True,
    )
    ui: bool = setting("bool", True, "serve the page for browsers at /: chat and a live view")
    allowed_host: tuple[str, ...] = setting(
        "strings",
        (),
        "host name allowed in the Host header, beside localhost, or *; may be repeated; by "
        "default names are checked where the server listens on loopback without keys",
        high=256,
    )
    api_key_file: str | None = setting(
        "path",
        None,
        "file with one key or name:key a line, or YAML with the classes and limits of each key; "
        "read again within a second when it changes",
        everyday=True,
    )
    max_requests_per_key: int | None = setting(
        "int",
        None,
        "requests that one key may have in progress, unless the key file says otherwise for it",
        low=1,
        high=2**20,
    )
    metrics_key: tuple[str, ...] = setting(
        "strings",
        (),
        "name of a key that may read /metrics, with what each key uses; may be repeated; by "
        "default every key may, and those of admin_key see what each key uses",
        high=4096,
    )
    admin_key: tuple[str, ...] = setting(
        "strings",
        (),
        "name of a key that may read /v1/usage, which is of all keys; may be repeated; without it "
        "no key may",
        high=4096,
    )
    usage_db: str | None = setting(
        "path",
        None,
        "SQLite file of the tokens by key, class and day; without it they are lost at the end",
    )
    usage_keep_days: int = setting(
        "int", 400, "days after which the usage of a day is forgotten", low=1, high=36500
    )
    key_salt: bool = setting(
        "bool", True, "requests share cached prefixes only with requests of the same key"
    )
    tls_cert: str | None = setting("path", None, "PEM file with the certificate chain, for HTTPS")
    tls_key: str | None = setting("path", None, "PEM file with the certificate's private key")
    max_connections: int = setting(
        "int", 4096, "connections that are open at once; others get 503", low=1, high=2**20
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
    body_timeout_s: float = setting(
        "float", 60.0, "seconds that a client has to send its body", low=0.1, high=86400
    )
    max_prompt_bytes: int = setting(
        "bytes", 4 * 2**20, "longest prompt in bytes, checked before tokenising", low=1
    )
    max_sequences: int = setting("int", 512, "prompts times n of one request", low=1, high=65536)
    max_queued_requests: int | None = setting(
        "int",
        None,
        "sequences that may wait for the engine before requests get 429; unset: as many as it "
        "can hold",
        low=1,
        high=2**31,
    )
    max_queued_tokens: int | None = setting(
        "int", None, "the same for the tokens of their prompts", low=1, high=2**40
    )
    request_timeout_s: float | None = setting(
        "float",
        None,
        "seconds until a generation ends with an error, unless the request says otherwise",
        low=0,
        high=86400,
        above=True,
    )
    max_request_timeout_s: float = setting(
        "float", 3600.0, "longest time that a request may ask for", low=0, high=86400, above=True
    )
    responses_db: str | None = setting(
        "path", None, "SQLite file of stored responses; without it they are lost at the end"
    )
    responses_keep_s: float = setting(
        "float",
        30 * 86400.0,
        "seconds after its last use that a stored response is kept",
        low=1,
        high=3650 * 86400,
    )
    max_responses_bytes: int = setting(
        "bytes",
        256 * 2**20,
        "total size of stored responses; beyond it the least recently used are deleted",
        low=1,
    )
    max_background_responses: int = setting(
        "int",
        256,
        "unfinished background responses of all request planes; beyond it 429",
        low=1,
        high=65536,
    )
    data_dir: str | None = setting(
        "path",
        None,
        "folder with uploaded files and batches; unset: weft in $XDG_STATE_HOME, or in "
        "~/.local/state",
    )
    max_file_bytes: int = setting("bytes", 2**30, "longest file that may be uploaded", low=1)
    max_key_files_bytes: int = setting(
        "bytes",
        10 * 2**30,
        "files that one key may have uploaded, together, or all where no key is needed; beyond it "
        "507, and 0 takes none",
        low=0,
    )
    disk_reserve_bytes: int = setting(
        "bytes",
        2**30,
        "room that files and results of batches leave on their disk; beyond it uploads get 507 and "
        "batches wait",
        low=0,
    )
    batch_order: str = setting(
        "str",
        "auto",
        "order of the lines of a batch: depth first by shared prefixes, with a forecast of the KV "
        "memory, or as in the file; auto is dfs",
        choices=("auto", "dfs", "fcfs"),
    )
    max_batch_lines: int = setting(
        "int", 100_000, "lines that one batch may have", low=1, high=2**24
    )
    batch_promotion: str = setting(
        "str",
        "flex",
        "highest class in which a batch goes on that would miss its window, step by step; none "
        "leaves it in the class batch",
        choices=("none", *PROMOTIONS),
    )
    strict_windows: bool = setting(
        "bool",
        False,
        "refuse a batch with 422 if it is predicted to end after its window; else its batch object "
        "has a warning",
    )
    webhook_url: tuple[str, ...] = setting(
        "strings",
        (),
        "address that is told when a batch ends, whosever it is; may be repeated",
        high=16,
    )
    webhook_secret_file: str | None = setting(
        "path",
        None,
        "file with the secret that signs what webhook_url gets: whsec_ and 24 to 64 bytes in "
        "base64; a second line is a second secret",
    )
    webhook_allow_private: bool = setting(
        "bool",
        False,
        "webhook_url may lead to addresses of this machine and of private networks",
    )
    strict: bool = setting(
        "bool",
        False,
        "refuse parameters that are otherwise ignored and named in the header x-weft-ignored",
    )
    request_chat_template: bool = setting(
        "bool", False, "requests may have their own chat templates"
    )
    tool_parser: str = setting(
        "str",
        "auto",
        "form of the model's tool calls; auto finds it by tokeniser, chat template and model type",
        choices=("auto", "none", *CALL_FORMS),
    )
    reasoning_parser: str = setting(
        "str",
        "auto",
        "markers around the model's reasoning; auto finds them by tokeniser and chat template",
        choices=("auto", "none", *REASONING_FORMS),
    )
    tokenizer_threads: int = setting(
        "int", 2, "threads that tokenise long prompts beside the event loop", low=1, high=64
    )
    frontends: int | None = setting(
        "int",
        None,
        "request planes: processes that tokenise and serve HTTP on the same port; unset: 2 where "
        "4 cores can be used, else 1",
        low=1,
        high=64,
    )
    engine_only: bool = setting(
        "bool",
        False,
        "serve no HTTP, but request planes on other machines (weft frontend); needs ring_listen",
    )
    ring_listen: str | None = setting(
        "str",
        None,
        "HOST:PORT where request planes connect with engine_only; other addresses than loopback "
        "need ring_key_file; port 0 takes a free one",
    )
    ring_planes: int = setting(
        "int",
        8,
        "request planes, and batch processes of theirs, that engine_only takes at once",
        low=1,
        high=100,
    )
    ring_key_file: str | None = setting(
        "path",
        None,
        "file with the key that an engine and its request planes elsewhere share: 16 bytes or more",
    )
    ring_timeout_s: float = setting(
        "float",
        10.0,
        "seconds of silence after which the link of a ring is lost, and that a ring then waits for "
        "the next link before what is open ends",
        low=1,
        high=3600,
    )
    standby: bool | None = setting(
        "bool",
        None,
        "keep a second engine ready to take over from one that dies; unset does so if the "
        "weights are small beside the free memory; false also leaves out the fork server",
    )
    watchdog_s: float = setting(
        "float",
        300.0,
        "seconds without a step after which an engine with work is killed and replaced, also an "
        "engine or request plane without a sign of life; set it above your longest step",
        low=1,
        high=86400,
    )
    stalled_s: float = setting(
        "float",
        10.0,
        "the same, but /ready gets 503 and no process is killed",
        low=1,
        high=86400,
    )
    drain_timeout_s: float = setting(
        "float", 30.0, "seconds that open requests get to finish on SIGTERM", low=0, high=86400
    )
    keep_alive_s: int = setting(
        "int", 75, "seconds that an idle connection is kept open", low=1, high=86400
    )
    vllm_metrics: bool = setting("bool", False, "also emit metrics under vllm: names")
    access_log: bool = setting("bool", False, "log one line for each request")
    otlp_endpoint: str | None = setting(
        "str", None, "URL of an OpenTelemetry collector that gets a trace of each request"
    )
    log_requests: bool = setting("bool", False, "also log the bodies of requests, prompts included")

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
        read_keys(self.api_key, None)
        if "" in self.served_model_name:
            raise ConfigError("served_model_name must not be empty.", param="served_model_name")
        if not all(_HOST_NAME.fullmatch(name) for name in self.allowed_host):
            raise ConfigError(
                "allowed_host must be a host's name without scheme, port and path, "
                "such as models.example, or *.",
                param="allowed_host",
            )
        if self.responses_db == ":memory:":
            raise ConfigError(
                "responses_db cannot be ':memory:': leave it unset, with one request plane, "
                "or name a file that all request planes share.",
                param="responses_db",
            )
        if self.engine_only != (self.ring_listen is not None):
            raise ConfigError(
                "engine_only and ring_listen go together, as in: weft serve --engine-only "
                "--ring-listen HOST:PORT.",
                param="ring_listen",
            )
        if self.usage_db == ":memory:":
            raise ConfigError("usage_db cannot be ':memory:': leave it unset.", param="usage_db")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError("root_path must start with '/'.", param="root_path")
        if self.otlp_endpoint is not None:
            from weft.server.tracing import make_exporter  # few servers need it

            make_exporter(self.otlp_endpoint).shutdown()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together.", param="tls_key")
        WebhookSettings.of(self)
        keyed = bool(self.api_key) or self.api_key_file is not None
        for name in ("max_requests_per_key", "metrics_key", "admin_key"):
            if getattr(self, name) and not keyed:
                raise ConfigError(f"{name} needs keys: give api_key or api_key_file.", param=name)
        if (self.request_timeout_s or 0) > self.max_request_timeout_s:
            raise ConfigError(
                "request_timeout_s is above max_request_timeout_s.", param="request_timeout_s"
            )


def check_given(given: Mapping[str, Any], *, engine_only: bool) -> None:
    """Refuse settings that would do nothing. Raises ConfigError.

    Args:
        given: settings of the server.
    """
    for name in given:
        flag = "--" + name.replace("_", "-")
        if engine_only and name not in OF_ENGINES:
            raise ConfigError(
                f"--engine-only serves no HTTP, so {flag} is of no use here; give it to weft "
                "frontend.",
                param=name,
            )
        if not engine_only and name in OF_ENGINES and name.startswith("ring_"):
            raise ConfigError(f"{flag} is of no use without --engine-only.", param=name)
