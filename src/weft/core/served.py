"""What the engine tells the request plane about the model that it serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts of a loaded model; they cross from process to process as one JSON line.

    Attributes:
        folder: where tokeniser and chat template lie.
        max_model_len: tokens of prompt and output together.
        sampling_defaults: what ``SamplingParams`` takes for fields that a request leaves open.
        batch_invariant: whether a result depends on nothing but the sequence itself.
        kernels: op name -> implementation.
        kv_blocks: KV blocks by group name.
        weight_bytes: memory of the weights.
        kv_memory: what was set or found for the KV, so that another engine gets the same.
        versions: of what the engine runs on.
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
    kernels: Mapping[str, str]
    kv_blocks: Mapping[str, int]
    weight_bytes: int
    kv_memory: int
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServedModel:
        values = json.loads(text)
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        return cls(**values)
