"""Every setting of ``weft batch`` beside those of the engine, declared once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import ConfigError
from weft.core.settings import check_settings, config_errors, setting

ORDERS = ("auto", "blend", "dfs", "fcfs")
URL_CONCURRENCY = 64  # requests at once to a server that does not say how many it computes at once


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Settings of ``weft batch``.

    Raises:
        ConfigError: a value is malformed, out of bounds, or does not go with another one.
    """

    output: str | None = setting("path", None, "file for the results; short: -o")
    errors: str | None = setting(
        "path",
        None,
        "file for lines without a result; unset is OUTPUT with .errors before its suffix",
    )
    url: tuple[str, ...] = setting(
        "strings",
        (),
        "address of a server that is asked instead of an engine of its own; may be given several "
        "times, for servers that share the lines",
        high=256,
    )
    api_key: str | None = setting("str", None, "the server's key; unset takes OPENAI_API_KEY")
    order: str = setting(
        "str",
        "auto",
        "order of lines: as in the file, depth first by shared prefixes, or blended so that "
        "compute and memory are busy together; auto is blend where steps overlap the two, else dfs",
        choices=ORDERS,
    )
    hardware: str | None = setting(
        "str",
        None,
        "for order blend: name of the machine's sheet, such as a100 or xeon-8462y; unset takes "
        "weft's own profile",
    )
    shape: str | None = setting(
        "str",
        None,
        "for order blend with url and hardware: the model's sizes by name, such as llama-3.1-8b",
    )
    kv_tokens: int | None = setting(
        "int",
        None,
        "for order blend with url: tokens that the server's KV memory holds; a weft server "
        "reports it",
        low=1,
        high=2**40,
    )
    concurrency: int | None = setting(
        "int",
        None,
        "requests that are open at once; unset is twice what the engine computes at once, "
        f"and {URL_CONCURRENCY} for a server that does not say",
        low=1,
        high=2**20,
    )
    restart: bool = setting("bool", False, "start over, and delete existing results")
    retry_errors: bool = setting(
        "bool", False, "run the lines again that have an error from an earlier run"
    )
    served_model_name: tuple[str, ...] = setting(
        "strings", (), "name of the engine's model in lines; may be repeated", high=64
    )
    service_tier: str | None = setting(
        "str",
        None,
        "put into lines for a server that name none; unset is batch, where the server takes it, "
        "else flex or none",
    )
    retries: int = setting(
        "int", 5, "retries of a request after a transient error of the server", low=0, high=1000
    )
    timeout_s: float = setting(
        "float", 1800.0, "seconds that a server has for one answer", low=0, above=True
    )
    patience_s: float = setting(
        "float",
        300.0,
        "seconds that a server may be away, or all of several, before the batch stops",
        low=0,
        above=True,
    )

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
        if self.output is None:
            raise ConfigError(
                "Name a file for the results, as in: weft batch requests.jsonl -o results.jsonl",
                param="output",
            )
        for name in ("api_key", "service_tier"):
            if not self.url and getattr(self, name) is not None:
                raise ConfigError(f"{name} is for a server; give its --url, too.", param=name)
        if self.hardware is not None and self.order != "blend":
            raise ConfigError(
                "hardware is for order blend, which weighs compute against memory.",
                param="hardware",
            )
        for name in ("shape", "kv_tokens"):
            if getattr(self, name) is not None and (not self.url or self.order != "blend"):
                raise ConfigError(f"{name} is for order blend with a server.", param=name)
        if self.url and (self.hardware is None) != (self.shape is None):
            raise ConfigError(
                "For the model of a server hardware and shape go together: --hardware NAME "
                "--shape NAME.",
                param="shape",
            )
        if self.url and self.served_model_name:
            raise ConfigError(
                "served_model_name cannot be combined with url; a server has its own names.",
                param="served_model_name",
            )

    @property
    def output_path(self) -> Path:
        assert self.output is not None, "checked above"
        return Path(self.output)

    @property
    def errors_path(self) -> Path:
        """The path for lines without a result."""
        if self.errors is not None:
            return Path(self.errors)
        return errors_beside(self.output_path)


def errors_beside(output: Path) -> Path:
    """The path for lines without a result beside that for results."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")
