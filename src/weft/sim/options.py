"""Every setting of ``weft sim``, declared once; flags and the page of settings derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.core.class_table import class_table
from weft.core.config_rules import check_budget
from weft.core.errors import ConfigError
from weft.core.schedulers import SCHEDULERS
from weft.core.settings import check_settings, config_errors, setting
from weft.core.types import ServiceClass
from weft.workload.arrivals import parse_rates
from weft.workload.lengths import LENGTH_WORDS, parse_lengths

SYNTHETIC = "synthetic"
DEFAULT_REQUESTS = 1000
TRACES = (
    "synthetic (lengths by the settings below), a CSV of Azure, JSON lines of Mooncake or of your "
    "own, a CSV of lengths (num_prefill_tokens, num_decode_tokens), or a workload's config.json"
)


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Settings of ``weft sim``.

    Raises:
        ConfigError: a value is malformed, out of bounds, or contradicts another one.
    """

    model: str = setting("str", "llama-3.1-8b", "name of a known model, or path to a config.json")
    hardware: str = setting("str", "a10g", "name of known hardware")
    dtype: str | None = setting(
        "str",
        None,
        "type of weights and arithmetic, such as bf16; unset takes the hardware's usual one",
    )
    kv_dtype: str | None = setting("str", None, "type of KV; unset follows dtype")
    tp: int = setting("int", 1, "devices over which each layer is split", low=1, high=64)
    step_times: str = setting(
        "str",
        "roofline",
        "source of step times: the hardware's data sheet, or measured kernels (weft[sim])",
        choices=("roofline", "measured"),
    )
    host_overhead: str = setting(
        "str",
        "cpu-driven",
        "host overhead of each step: as measured on a CPU-driven engine, or none",
        choices=("cpu-driven", "none"),
    )
    scheduler: str = setting(
        "str", "fcfs", "who decides what each step computes", choices=tuple(SCHEDULERS)
    )
    overlap: str = setting(
        "str",
        "off",
        "compute large steps in two halves, dense layers of one beside decode attention of the "
        "other: off; published slows them down as NanoFlow measured on an A100; or a profile of "
        "weft that has measured it",
    )
    trace: str = setting("str", SYNTHETIC, TRACES)
    rate: str | None = setting(
        "str",
        None,
        "requests (or conversations) a second; several for a sweep, as 1,2,4 or 1..32:13; unset "
        "takes the times of the trace",
    )
    burstiness: float = setting(
        "float",
        1.0,
        "shape of the intervals where a trace has no times: 1 is Poisson, below 1 in bursts",
        low=0,
        high=1000,
        above=True,
    )
    requests: int | None = setting(
        "int",
        None,
        f"requests after which a run ends; unset is a whole trace, or {DEFAULT_REQUESTS}",
        low=1,
        high=10**8,
    )
    input_tokens: str = setting("str", "512", f"length of synthetic prompts: {LENGTH_WORDS}")
    output_tokens: str = setting("str", "128", "length of synthetic answers, in the same form")
    service_class: str = setting("str", "interactive", "class of the trace's requests")
    slo_ttft_ms: float | None = setting(
        "float",
        None,
        "target of that class for the first token, in milliseconds; unset is the workload's or "
        "the class table's",
        low=0,
        above=True,
    )
    slo_tpot_ms: float | None = setting(
        "float",
        None,
        "target of that class for each further token, on average, in milliseconds",
        low=0,
        above=True,
    )
    be_trace: str | None = setting("str", None, "best-effort requests, in the form of trace")
    be_rate: float | None = setting(
        "float",
        None,
        "best-effort requests a second; unset keeps be_open of them open",
        low=0,
        high=1e6,
        above=True,
    )
    be_open: int = setting(
        "int", 64, "best-effort requests that are always open", low=1, high=10**6
    )
    be_requests: int | None = setting(
        "int", None, "best-effort requests in total; unset is unlimited", low=1, high=10**8
    )
    be_input_tokens: str = setting("str", "512", "length of synthetic best-effort prompts")
    be_output_tokens: str = setting("str", "128", "length of synthetic best-effort answers")
    be_class: str = setting("str", "batch", "class of best-effort requests")
    classes: Mapping[str, Any] = setting(
        "map", {}, "service classes: name -> priority, ttft_s, tpot_s", high=64
    )
    max_num_seqs: int = setting("int", 256, "sequences that run at once", low=1, high=2**16)
    max_num_batched_tokens: int = setting("int", 2048, "tokens of a step", low=1, high=2**20)
    max_model_len: int | None = setting(
        "int", None, "tokens of a sequence; unset is what the KV memory holds", low=2, high=2**24
    )
    block_size: int = setting("int", 16, "tokens of a KV block", low=1, high=1024)
    prefix_caching: bool = setting("bool", True, "share the KV of equal prefixes")
    memory_share: float = setting(
        "float", 0.9, "share of device memory for weights and KV", low=0, high=1, above=True
    )
    host_kv: int | None = setting(
        "bytes", None, "host memory for KV; unset is half of the host's memory", low=0
    )
    error: float = setting(
        "float", 0.03, "standard deviation of step times, as a share of their costs", low=0, high=1
    )
    long_steps: float = setting("float", 0.001, "share of steps that are long", low=0, high=1)
    long_factor: float = setting(
        "float", 5.0, "factor by which long steps take longer", low=1, high=1000
    )
    seed: int = setting("int", 0, "seed of arrivals, lengths and errors", low=0, high=2**63 - 1)
    out: str | None = setting(
        "path", None, "folder for result.json and plots; plots need weft[sim]"
    )
    chrome_trace: str | None = setting(
        "path", None, "file for a timeline; open it in chrome://tracing or Perfetto"
    )

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
            self.rates()
            for name in ("input_tokens", "output_tokens", "be_input_tokens", "be_output_tokens"):
                parse_lengths(getattr(self, name), name)
        check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        known = [row.name for row in self.service_classes()]
        for param in ("service_class", "be_class"):
            if getattr(self, param) not in known:
                raise ConfigError(
                    f"{param} must be one of {', '.join(known)}, not '{getattr(self, param)}'.",
                    param=param,
                )

    def rates(self) -> list[float]:
        """The offered rates, ascending; none if the trace says when requests come."""
        return [] if self.rate is None else parse_rates(self.rate)

    def service_classes(
        self, ttft_ms: float | None = None, tpot_ms: float | None = None
    ) -> tuple[ServiceClass, ...]:
        """The class table, with these targets for the trace's class where none are set."""
        ttft, tpot = self.slo_ttft_ms or ttft_ms, self.slo_tpot_ms or tpot_ms
        rows = []
        for row in class_table(self.classes):
            if row.name == self.service_class and ttft is not None:
                row = replace(row, ttft_s=ttft / 1e3)
            if row.name == self.service_class and tpot is not None:
                row = replace(row, tpot_s=tpot / 1e3)
            rows.append(row)
        return tuple(rows)
