"""Every setting of ``weft bench``, declared once; flags and the page of settings derive from it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import ConfigError
from weft.core.settings import check_settings, config_errors, setting, settings_of
from weft.workload.arrivals import parse_rates
from weft.workload.lengths import parse_lengths

ARRIVALS = ("poisson", "gamma", "closed", "trace")
_READ_WITH = {
    "rate": ("poisson", "gamma"),
    "burstiness": ("gamma",),
    "clients": ("closed",),
    "speed": ("trace",),
}  # the arrivals for which a setting means something
DEFAULT_REQUESTS = 100
NEIGHBOURS = ("compress", "compile", "memory")


@dataclass(frozen=True, slots=True)
class ServeBench:
    """Settings of ``weft bench serve``.

    Raises:
        ConfigError: a value is malformed, out of bounds, or contradicts another one.
    """

    url: str = setting("str", "http://127.0.0.1:8000", "address of the server")
    model: str | None = setting("str", None, "name of the model; unset takes the server's first")
    api_key: str | None = setting("str", None, "the server's key; unset takes OPENAI_API_KEY")
    endpoint: str = setting(
        "str", "completions", "endpoint to measure", choices=("completions", "chat")
    )
    arrivals: str = setting(
        "str",
        "poisson",
        "when requests are sent: at random at a rate (gamma: with burstiness), by clients that "
        "wait for each answer, or as recorded in a trace",
        choices=ARRIVALS,
    )
    rate: str = setting(
        "str", "1", "requests a second; several for a sweep, as 1,2,4 or 1..32:13 (13 even steps)"
    )
    burstiness: float = setting(
        "float",
        0.5,
        "shape of gamma's intervals: 1 is Poisson, below 1 in bursts, above 1 more evenly",
        low=0,
        high=1000,
        above=True,
    )
    clients: tuple[int, ...] = setting(
        "ints", (1,), "clients of a closed loop; several for a sweep", low=1, high=100
    )
    trace: str | None = setting(
        "path", None, "CSV of Azure, JSON lines of Mooncake, or JSON lines of your own"
    )
    speed: float = setting(
        "float", 1.0, "how much faster than recorded a trace is replayed", low=0, above=True
    )
    requests: int | None = setting(
        "int",
        None,
        f"requests after which a run ends; unset is {DEFAULT_REQUESTS}, a whole trace, or what "
        "duration_s has room for",
        low=1,
        high=10**7,
    )
    duration_s: float | None = setting(
        "float", None, "seconds in which a run sends requests", low=0, above=True
    )
    warmup: int = setting("int", 2, "requests sent before the run, not counted", low=0, high=10**4)
    input_tokens: str = setting(
        "str",
        "128",
        "length of prompts: 128, or evenly from 64..256 or 100+-10%, or lognormal:MEAN:DEVIATION",
    )
    output_tokens: str = setting("str", "128", "length of answers, in the same form")
    shared_prefix_tokens: int = setting(
        "int",
        0,
        "length of a common prefix of all prompts, added to input_tokens",
        low=0,
        high=2**20,
    )
    prompts: str = setting(
        "str",
        "text",
        "prompts of common words (any server), or of random token ids (completions only)",
        choices=("text", "ids"),
    )
    token_ids: int = setting(
        "int", 1000, "random token ids are below this number", low=200, high=2**24
    )
    ignore_eos: bool = setting(
        "bool", True, "request answers of full length; not every server supports it"
    )
    temperature: float = setting("float", 0.0, "sampling temperature", low=0, high=2)
    slo_ttft_ms: float | None = setting(
        "float", None, "SLO: most milliseconds to the first token", low=0, above=True
    )
    slo_tpot_ms: float | None = setting(
        "float",
        None,
        "SLO: most milliseconds for each further token, on average",
        low=0,
        above=True,
    )
    slo_e2e_ms: float | None = setting(
        "float", None, "SLO: most milliseconds to the end", low=0, above=True
    )
    timeout_s: float = setting(
        "float", 600.0, "seconds after which a request has failed", low=0, above=True
    )
    seed: int = setting("int", 0, "seed of arrivals, lengths and prompts", low=0, high=2**63 - 1)
    server_pids: tuple[int, ...] = setting(
        "ints",
        (),
        "processes whose CPU time is the server's, with all that they have started; none takes "
        "those that listen at its address",
        low=0,
        high=64,
    )
    output: str | None = setting("path", None, "file for the result as JSON")
    samples: bool = setting("bool", False, "write every request's figures into the JSON, too")
    plots: str | None = setting("path", None, "folder for plots; needs weft[bench]")

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
            self.rates()
            parse_lengths(self.input_tokens, "input_tokens")
            parse_lengths(self.output_tokens, "output_tokens")
        if (self.arrivals == "trace") != (self.trace is not None):
            raise ConfigError(
                "A trace is replayed with both --arrivals trace and --trace FILE.", param="trace"
            )
        if min(self.clients) < 1:
            raise ConfigError("clients must be whole numbers above 0.", param="clients")
        for name, arrivals in _READ_WITH.items():
            if self.arrivals not in arrivals and self._is_set(name):
                raise ConfigError(
                    f"--{name} needs --arrivals {' or '.join(arrivals)}; they are "
                    f"{self.arrivals}, which would not heed it.",
                    param=name,
                )
        if self.prompts == "ids" and self.endpoint != "completions":
            raise ConfigError("Prompts of token ids go to completions only.", param="prompts")

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != settings_of(ServeBench)[name].default)

    def rates(self) -> list[float]:
        """The offered rates, ascending. Raises ParameterError if they cannot be understood."""
        return parse_rates(self.rate)

    @property
    def has_slo(self) -> bool:
        return any((self.slo_ttft_ms, self.slo_tpot_ms, self.slo_e2e_ms))


@dataclass(frozen=True, slots=True)
class EnergyBench:
    """Settings of ``weft bench energy``, beside those of the load, which are ``ServeBench``."""

    rest_s: float = setting(
        "float",
        3.0,
        "seconds in which the server is measured at rest, before",
        low=0,
        high=3600,
    )

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)


@dataclass(frozen=True, slots=True)
class InterfereBench:
    """Settings of ``weft bench interfere``, beside the engine's own settings."""

    neighbours: tuple[str, ...] = setting(
        "strings",
        ("compress", "compile", "memory"),
        "what runs on the processor of the control path: compress, compile and memory, each as "
        "often as it is named",
    )
    sequences: int = setting("int", 4, "sequences that decode at once", low=1, high=4096)
    requests: int = setting("int", 24, "requests of a run, one after the end of another", low=1)
    input_tokens: int = setting("int", 64, "length of prompts", low=1, high=2**20)
    output_tokens: int = setting("int", 256, "length of answers", low=2, high=2**20)
    repeats: int = setting("int", 3, "runs that count, after one to warm up", low=1, high=1000)
    seed: int = setting("int", 0, "seed of prompts", low=0, high=2**63 - 1)
    output: str | None = setting("path", None, "file for the result as JSON")

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
        for kind in self.neighbours:
            if kind not in NEIGHBOURS:
                raise ConfigError(
                    f"There is no neighbour '{kind}'; known are: {', '.join(NEIGHBOURS)}.",
                    param="neighbours",
                )


@dataclass(frozen=True, slots=True)
class KernelsBench:
    """Settings of ``weft bench kernels``.

    Raises:
        ConfigError: a value is malformed or out of bounds.
    """

    threads: int | None = setting(
        "int", None, "compute threads; unset takes every core", low=1, high=1024
    )
    only: str | None = setting("str", None, "only kernels whose name contains this")
    seconds: float = setting(
        "float", 0.5, "seconds for which each kernel is repeated", low=0, high=3600, above=True
    )
    output: str | None = setting("path", None, "file for the result as JSON")

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)


@dataclass(frozen=True, slots=True)
class ThroughputBench:
    """Settings of ``weft bench throughput``, beside the engine's own settings."""

    prompts: int = setting("int", 16, "prompts that are computed at once", low=1, high=10**6)
    input_tokens: str = setting(
        "str",
        "128",
        "length of prompts: 128, or evenly from 64..256 or 100+-10%, or lognormal:MEAN:DEVIATION",
    )
    output_tokens: str = setting("str", "128", "length of answers, in the same form")
    repeats: int = setting("int", 3, "runs that count, after one to warm up", low=1, high=1000)
    seed: int = setting("int", 0, "seed of lengths and prompts", low=0, high=2**63 - 1)
    output: str | None = setting("path", None, "file for the result as JSON")

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
            parse_lengths(self.input_tokens, "input_tokens")
            parse_lengths(self.output_tokens, "output_tokens")
