"""Facts of the served model that the engine sends to the request plane."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.core.images import ImageInput
from weft.core.pooling import TEXT_MODEL, Pooling
from weft.core.types import DEFAULT_CLASSES, ServiceClass

# Fields that may differ from one start of an engine to the next with the same settings and files.
VARYING = frozenset((
    "folder", "kv_blocks", "host_kv_blocks", "kv_memory", "host_kv_memory", "weight_bytes",
    "kept_weights", "host_costs", "host_attention", "kv_disk", "start_s", "started", "executor",
    "scheduling", "halves", "threads", "profile_key", "versions",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts of a loaded model; they cross from process to process as one JSON line.

    Attributes:
        folder: where tokeniser and chat template lie.
        checkpoint: tells its files from others, and from themselves once they have changed.
        max_model_len: tokens of prompt and output together.
        sampling_defaults: what ``SamplingParams`` takes for fields that a request leaves open.
        batch_invariant: whether a result depends on nothing but the sequence itself.
        kernels: by op, its kernel, dtypes, and where its launches come from.
        kv_blocks: KV blocks by group name.
        host_kv_blocks: the same of the host tier; empty if there is none.
        host_kv_memory: bytes that were set for the host tier; 0 if there is none.
        places: remote places that attend.
        host_attention: who attends on the host, as a sentence; empty if nobody does.
        host_costs: which costs of the host tier are planned with; empty if none are.
        kv_disk: where cached prefixes are kept on disk; empty if they are not.
        stages: what each stage of a pipeline holds, a line each; none where there is one stage.
        weight_bytes: memory of the weights.
        weights: how most of them are stored: a dtype, or the bits of integers and their scales.
        kept_weights: ``mapped`` where they are pages of a file that processes share, ``packed``
            where such a file is to be written, else empty.
        kv_memory: what was set or found for the KV, so that another engine gets the same.
        kv_dtype: how the KV is kept: a dtype, or ``int8`` or ``fp8`` with scales.
        device: what computes: ``cpu``, or the name of a GPU.
        isa: the instruction set of native kernels; empty if there are none.
        threads: how many threads compute and where, as a sentence; empty for a GPU alone.
        executor: a readable description of how steps run.
        start_s: seconds of each part of the engine's start, and of all under ``ready``.
        started: the same as a sentence, with where its kernels came from.
        profile_key: what a profile of its costs is kept by (``weft.cost.fit.ProfileKey``).
        versions: of what the engine runs on.
        classes: the class table, with the targets that hold at the start.
        overlaps: whether steps overlap arithmetic with reads of KV.
        halves: whether large steps are computed in halves and why, as a sentence; empty on a CPU.
        scheduling: the policy that plans at the start and why, as a sentence.
        pooling: what the model can be asked for.
        images: how it takes images; None where it does not.
        no_images: why it does not, as a sentence; empty for a model without a tower for them.
    """

    name: str
    folder: str
    family: str
    parameters: int
    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]
    batch_invariant: bool
    kernels: Mapping[str, Mapping[str, str]]
    kv_blocks: Mapping[str, int]
    weight_bytes: int
    kv_memory: int
    profile_key: Mapping[str, str]
    checkpoint: str = ""
    host_kv_blocks: Mapping[str, int] = field(default_factory=dict)
    host_kv_memory: int = 0
    host_attention: str = ""
    host_costs: str = ""
    places: tuple[str, ...] = ()
    kv_disk: str = ""
    stages: tuple[str, ...] = ()
    kv_dtype: str = ""
    device: str = "cpu"
    isa: str = ""
    threads: str = ""
    executor: str = ""
    weights: str = ""
    kept_weights: str = ""
    start_s: Mapping[str, float] = field(default_factory=dict)
    started: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[ServiceClass, ...] = DEFAULT_CLASSES
    overlaps: bool = False
    halves: str = ""
    scheduling: str = ""
    pooling: Pooling = TEXT_MODEL
    images: ImageInput | None = None
    no_images: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServedModel:
        values = json.loads(text)
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        values["pooling"] = Pooling.of(values["pooling"])
        values["images"] = ImageInput.of(values["images"])
        values["stages"] = tuple(values["stages"])
        values["classes"] = tuple(ServiceClass(**row) for row in values["classes"])
        return cls(**values)
