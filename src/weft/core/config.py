"""Every setting of the engine, declared once.

``EngineConfig`` is what a user says; ``resolved`` decides what is left open there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.class_table import class_table
from weft.core.config_rules import (
    check_host_attention,
    check_host_experts,
    check_kv_disk,
    check_overlap,
    check_pipeline,
    check_sizes,
)
from weft.core.errors import ConfigError, suggest
from weft.core.kv_types import KV_TYPES, describe_kv_types
from weft.core.logs import FORMATS, LEVELS
from weft.core.pooling import SCORINGS
from weft.core.schedulers import SCHEDULERS, SERVED, describe_schedulers
from weft.core.settings import check_settings, config_errors, setting, settings_of
from weft.core.types import MAX_SEED, MAX_SPECULATION, ServiceClass

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
IN_PLACE_OF_FP8 = "int8"  # for experts on the host: as many bits, and a CPU computes with them
DEVICES = ("cpu", "cuda")
FP8_ACCUMULATIONS = ("fast", "full")
ADMISSIONS = ("demote", "reject", "off")
RING_SLOTS, RING_SLOTS_PER_SEQUENCE, MOST_RING_SLOTS = 512, 4, 65535
RING_MEMORY, RING_MEMORY_PER_SLOT = 64 * 2**20, 128 * 2**10
MOST_PLACES = 4  # whose figures the info page has
RING_REST = 2**16  # of a request beside its prompt


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine. ``None`` means "decide from model and machine".

    Raises:
        ConfigError: a value is malformed, out of bounds, or contradicts another one.
    """

    model: str = setting(
        "str",
        "builtin",
        "folder, GGUF file, name on the hub (OWNER/REPO, of GGUF files OWNER/REPO:Q4_K_M), or "
        "'builtin' for the packaged model",
        everyday=True,
    )
    revision: str | None = setting("str", None, "branch, tag or commit of a hub id")
    offline: bool | None = setting("bool", None, "use only files that are already on disk")
    tokenizer: str | None = setting("path", None, "folder with another tokenizer.json")
    chat_template: str | None = setting("path", None, "jinja file used instead of the model's own")
    scoring: str = setting(
        "str",
        "auto",
        "how pairs of texts are scored: yes-no, by the answer after a reranker's prompt; "
        "similarity, by the cosine of embeddings; auto follows the checkpoint, by which only "
        "rerankers and embedding models score",
        choices=("auto", *SCORINGS),
    )
    score_template: str | None = setting(
        "path",
        None,
        "file with the prompt of a reranker, with {query}, {document} and perhaps {instruction}; "
        "unset takes Qwen3-Reranker's",
    )
    device: str = setting(
        "str",
        "auto",
        "device that computes; auto is cuda where an NVIDIA GPU and torch are found, else cpu",
        choices=("auto", *DEVICES),
        everyday=True,
    )
    graphs: bool = setting(
        "bool",
        True,
        "device cuda: capture steps of common sizes at the start and replay them; if false, "
        "their kernels are launched one by one",
    )
    dtype: str = setting(
        "str",
        "auto",
        "type of weights and KV; auto follows checkpoint and machine",
        choices=("auto", *DTYPES),
    )
    kv_dtype: str = setting(
        "str",
        "auto",
        describe_kv_types(),
        choices=("auto", *KV_TYPES),
    )
    kernels: str = setting(
        "str",
        "auto",
        "kernels that compute every op; auto selects those of the device, cpu or triton; "
        "reference is slow and exact",
        choices=("auto", "cpu", "triton", "reference"),
    )
    tuning: str = setting(
        "str",
        "auto",
        "launches of matrix products and attention on a GPU: a file written by weft profile "
        "--tune; heuristic, a rule; auto uses the file that weft ships for the GPU, or else the "
        "rule",
    )
    kernel_cache: str | None = setting(
        "path",
        None,
        "device cuda: folder where compiled kernels are kept, by a start or weft compile; it may "
        "be copied from another machine, and be read-only; unset takes that of TRITON_CACHE_DIR, "
        "else one in the cache folder",
    )
    fp8_accumulation: str = setting(
        "str",
        "auto",
        "sums of products in FP8 that torch computes on a GPU, more than 64 rows: full adds parts "
        "in float32; fast leaves whole sums to the tensor cores, which drop bits before Blackwell; "
        "auto is full there, and fast from Blackwell on",
        choices=("auto", *FP8_ACCUMULATIONS),
    )
    require_batch_invariance: bool = setting(
        "bool",
        False,
        "refuse to start where results depend on the rest of the batch or on the chunks of a "
        "prompt, as with kernels reference",
    )
    quantize: str = setting(
        "str",
        "none",
        "round weights at load: fp8 (E4M3, with the output head fp8-head) and int8 with a scale an "
        "output, int4 with one a group of inputs; a CPU computes with int8 and int4, a GPU with "
        "all",
        choices=("none", "fp8", "fp8-head", "int8", "int4"),
        everyday=True,
    )
    quantize_group: int = setting(
        "int", 64, "inputs that share a scale of int4: 32, 64 or 128", low=32, high=128
    )
    host_experts: str = setting(
        "str",
        "none",
        "device cuda: layers whose routed experts stay in memory of the host, where the threads "
        "compute them: none, all, a number (the last ones), or auto, as many as the device has no "
        "room for; weft info predicts the speed",
    )
    host_quantize: str = setting(
        "str",
        "auto",
        "how those experts are rounded: int8, int4, or none; auto is as quantize says, and int8 "
        "in place of fp8, with which a CPU does not compute",
        choices=("auto", "none", "int8", "int4"),
    )
    packed_cache: int = setting(
        "bytes",
        20 * 2**30,
        "device cpu, and experts on the host: size of the folder where packed weights are kept, so "
        "that later starts and other processes map them; what was used longest ago makes room",
        low=0,
        off=True,
    )
    verify_weights: bool = setting(
        "bool", False, "compare packed weights that were kept with their digests at the start"
    )
    tensor_parallel: int = setting(
        "int",
        1,
        "processes over which every layer is split; on a CPU they share its cores",
        low=1,
        high=64,
        everyday=True,
    )
    pipeline_parallel: int = setting(
        "int",
        1,
        "stages, one after the other, into which the layers are split; each is a process, or with "
        "tensor_parallel so many",
        low=1,
        high=64,
    )
    threads: int | None = setting(
        "int",
        None,
        "compute threads of each process; unset takes every physical core, from 16 on all but one",
        low=1,
        high=1024,
        everyday=True,
    )
    cpu_pinning: str = setting(
        "str",
        "auto",
        "pin each compute thread but the first to a core of its own: auto does where the engine "
        "has the whole machine and cores are left over for the request planes",
        choices=("auto", "on", "off"),
    )
    max_model_len: int | None = setting(
        "int",
        None,
        "longest sequence in tokens; unset takes the longest that model and memory allow",
        low=2,
        high=2**24,
        everyday=True,
    )
    kv_memory: int | None = setting(
        "bytes",
        None,
        "memory of each process for the KV cache; unset or auto takes at most half of the free "
        "memory, or 0.9 of a GPU's",
        low=2**10,
        auto=True,
        everyday=True,
    )
    memory_limit: int | None = setting(
        "bytes",
        None,
        "device cpu: memory that weights and KV cache may take together; unset: all that is free",
        low=2**20,
    )
    host_kv_memory: int | None = setting(
        "bytes",
        None,
        "host memory of each process, beside kv_memory, for the KV of sequences that give way "
        "when that is full and come back later; unset: their KV is computed again",
        low=2**10,
    )
    host_threads: int | None = setting(
        "int",
        None,
        "schedulers slo-piggyback and load-aware: threads of each process that attend on the host, "
        "beside those of threads; unset takes 1",
        low=1,
        high=1024,
    )
    host_process: bool = setting(
        "bool",
        False,
        "schedulers slo-piggyback and load-aware: attend on the host in a process, weft-host (one "
        "for each rank), which is started again when it dies; if false, in threads of the engine",
    )
    attend: tuple[str, ...] = setting(
        "strings",
        (),
        "scheduler slo-piggyback: HOST:PORT of a machine with weft attend, for best effort if the "
        "own host is full; may be given several times",
        high=MOST_PLACES,
    )
    attend_key_file: str | None = setting(
        "path", None, "file with the key of those machines, which loopback alone can do without"
    )
    attend_timeout_s: float = setting(
        "float", 10.0, "seconds of silence after which such a machine is given up", low=2, high=3600
    )
    kv_disk: str | None = setting(
        "str",
        None,
        "device cpu: folder where cached prefixes are kept that memory gives up, and from where "
        "they come back, also after a restart",
    )
    kv_disk_size: int = setting(
        "bytes", 10 * 2**30, "size of that folder; what was used longest ago makes room", low=2**20
    )
    block_size: int = setting("int", 16, "tokens in a KV block", low=1, high=1024)
    max_num_seqs: int = setting(
        "int", 128, "sequences that run at once", low=1, high=65536, everyday=True
    )
    max_num_batched_tokens: int = setting(
        "int", 1024, "tokens in one step; longer prompts are computed in chunks", low=1, high=2**20
    )
    kv_idle_s: float = setting(
        "float",
        600.0,
        "device cpu: seconds without requests after which an engine forgets cached prefixes and "
        "gives the memory of its KV back; 0 for never",
        low=0,
        high=1e9,
    )
    images: bool = setting("bool", True, "device cpu: load the tower of a model that reads images")
    prefix_caching: bool = setting("bool", True, "share the KV of equal prefixes")
    steps_in_flight: int | None = setting(
        "int",
        None,
        "steps that wait while one is planned; unset: on a CPU alone 0, with pipeline_parallel one "
        "for each stage, else 1",
        low=0,
        high=64,
    )
    resident: str = setting(
        "str",
        "auto",
        "decode steps that nobody plans one by one where nothing changes: auto on a CPU, on also "
        "on a GPU",
        choices=("auto", "on", "off"),
    )
    max_crashes: int = setting(
        "int",
        3,
        "engine processes that a request may kill before it fails; only deaths without another "
        "possible cause count",
        low=1,
        high=100,
    )
    overlap: str = setting(
        "str",
        "auto",
        "device cuda: compute a large step in two halves, dense layers of one beside attention of "
        "the other: auto where weft profile has measured a gain of more than 3 %, on also "
        "unmeasured",
        choices=("auto", "on", "off"),
    )
    speculation: int = setting(
        "int",
        0,
        "tokens to draft by prompt lookup, for requests that do not set it; 0 is off",
        low=0,
        high=MAX_SPECULATION,
    )
    base_seed: int | None = setting(
        "int", None, "makes the seeds of requests without one repeatable", low=0, high=MAX_SEED
    )
    scheduler: str = setting(
        "str",
        "auto",
        describe_schedulers()
        + "; auto is slo for a server as soon as the costs of steps are known, and fcfs elsewhere; "
        "each has a host tier where host_kv_memory is set",
        choices=("auto", *SERVED),
    )
    interactivity: float = setting(
        "float",
        0.5,
        "scheduler slo, how strictly best effort is held back beside classes with targets: at 1 it "
        "may not slow their steps down, at 0.5 to twice, at 0 to four times the time; targets that "
        "classes do not set follow it, too",
        low=0,
        high=1,
    )
    self_profile_s: float = setting(
        "float",
        60.0,
        "scheduler auto, seconds that an idle server may take to measure the costs of steps when "
        "it has no profile; 0 for never",
        low=0,
        high=3600,
    )
    slo_admission: str = setting(
        "str",
        "demote",
        "scheduler slo: a request whose first token would come too late is served as best effort "
        "(demote), refused with the time after which to retry (reject), or served late (off)",
        choices=ADMISSIONS,
    )
    slo_margin: float = setting(
        "float",
        0.1,
        "scheduler slo: share of the target between tokens that the predicted step time leaves "
        "free",
        low=0,
        high=0.9,
    )
    slo_patience_s: float = setting(
        "float",
        30.0,
        "scheduler slo: seconds without progress after which best effort gets a share of every "
        "step",
        low=0,
        high=1e9,
    )
    profile: str | None = setting(
        "path",
        None,
        "file of step costs, written by weft profile; unset takes the one for this machine and "
        "model in the cache folder",
    )
    ring_slots: int | None = setting(
        "int",
        None,
        "requests in flight between a request plane and the engine; unset is four times "
        f"max_num_seqs, at least {RING_SLOTS}",
        low=1,
        high=MOST_RING_SLOTS,
    )
    ring_memory: int | None = setting(
        "bytes",
        None,
        "memory of a request plane for the prompts and outputs of requests in flight; unset is "
        "128 KiB a slot; outputs of requests that were taken may go beyond it",
        low=2**16,
        high=2**38,
    )
    log_level: str | None = setting(
        "str",
        None,
        "lowest level that is logged; unset follows WEFT_LOG_LEVEL, else warning",
        choices=LEVELS,
        everyday=True,
    )
    log_format: str = setting("str", "text", "form of the log lines of a server", choices=FORMATS)
    classes: Mapping[str, Any] = setting(
        "map", {}, "service classes: name -> priority, ttft_s, tpot_s", high=64
    )

    def __post_init__(self) -> None:
        layers: object = self.host_experts
        if isinstance(layers, int) and not isinstance(layers, bool):  # as a file has it
            object.__setattr__(self, "host_experts", str(layers))
        with config_errors():
            check_settings(self)
        check_sizes(self)
        check_pipeline(self)
        check_kv_disk(self)
        check_host_attention(self)
        check_overlap(self)
        check_host_experts(self)
        for name in ("tokenizer", "chat_template"):
            path = getattr(self, name)
            if path is not None and not Path(path).exists():
                raise ConfigError(f"{name}: '{path}' does not exist; check the path.", param=name)
        self.service_classes()

    @property
    def processes(self) -> int:
        """Processes that compute each step together."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def attends_on_host(self) -> bool:
        """Whether the scheduler computes attention over the KV of the host tier there."""
        return self.scheduler in SCHEDULERS and SCHEDULERS[self.scheduler].has_part

    @property
    def piggybacks(self) -> bool:
        """Whether rows whose attention is computed there go through the layers in several steps."""
        return self.attends_on_host and SCHEDULERS[self.scheduler].piggybacks

    @property
    def overlaps(self) -> bool:
        """Whether sub-batches wait in each layer for attention that is computed there."""
        return self.attends_on_host and not self.piggybacks

    @property
    def num_host_threads(self) -> int:
        """Threads that attend on the host; 0 where none do."""
        return (self.host_threads or 1) if self.attends_on_host else 0

    @property
    def expert_rounding(self) -> str:
        """How experts on the host are rounded, unless their checkpoint decides it."""
        wish = self.quantize if self.host_quantize == "auto" else self.host_quantize
        return IN_PLACE_OF_FP8 if wish.startswith("fp8") else wish

    def ring_sizes(self, requests: int = 0) -> tuple[int, int]:
        """Slots and bytes of memory of the ring of a request plane.

        Args:
            requests: that are to be in flight at once.
        """
        slots = self.ring_slots
        if slots is None:
            wanted = max(RING_SLOTS, RING_SLOTS_PER_SEQUENCE * self.max_num_seqs, requests)
            slots = min(wanted, MOST_RING_SLOTS)
        return slots, self.ring_memory or max(RING_MEMORY, RING_MEMORY_PER_SLOT * slots)

    def check_ring(self, max_model_len: int) -> None:
        """Raise ConfigError if the memory of a ring cannot take the longest prompt."""
        _, memory = self.ring_sizes()
        needed = 4 * max_model_len + RING_REST
        if memory < needed:
            raise ConfigError(
                f"ring_memory {memory} cannot take a prompt of max_model_len {max_model_len}; it "
                f"needs {needed} bytes, or a lower max_model_len.",
                param="ring_memory",
            )

    def kv_name(self, dtype: str) -> str:
        """The type that KV is kept in, where weights are of type ``dtype``."""
        return dtype if self.kv_dtype == "auto" else self.kv_dtype

    def service_classes(self) -> tuple[ServiceClass, ...]:
        """The class table: the defaults, changed and extended by ``classes``."""
        return class_table(self.classes)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> EngineConfig:
        """Build from names and values; an unknown name is an error that suggests the nearest."""
        known = settings_of(cls)
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"{source}: unknown setting '{name}'.{suggest(str(name), known)}",
                    param=str(name),
                )
        return cls(**values)
