"""The types in which KV can be kept other than that of the weights: a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVType:
    """Codes with a float32 scale beside each row of a token and head; see ``kernels.kv_storage``.

    Attributes:
        dtype: of the codes, as numpy and torch call it.
        largest: the largest code.
        whole: codes are whole numbers.
        standard: what the format is called elsewhere, if that is another name.
    """

    dtype: str
    largest: float
    whole: bool = False
    standard: str = ""
    code_bytes: int = 1
    scale_bytes: int = 4


KV_TYPES: Mapping[str, KVType] = {  # by the names of the setting
    "int8": KVType("int8", 127.0, whole=True),
    "fp8": KVType("float8_e4m3fn", 448.0, standard="E4M3"),
}


def describe_kv_types() -> str:
    """How KV is kept, as one sentence."""
    rows = [f"{n} ({row.standard})" if row.standard else n for n, row in KV_TYPES.items()]
    return (
        f"how KV is kept: {' and '.join(rows)} take half of bfloat16, with a scale for each token "
        "and head; auto is the type of the weights"
    )


def cache_dtype(name: str) -> str:
    """Return the dtype of a cache by the name of a type of KV or of weights."""
    return KV_TYPES[name].dtype if name in KV_TYPES else name


def row_size(dtype: str, head_dim: int) -> int:
    """Return the last dimension of a cache of a dtype: a head, and its scale if it has one."""
    scales = [row.scale_bytes for row in KV_TYPES.values() if row.dtype == dtype]
    return head_dim + sum(scales)
