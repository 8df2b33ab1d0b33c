"""A stand-in for cuDNN's frontend: it computes what a graph of attention describes, on the CPU.

Everything is read through dims, strides and offsets of the graph, as cuDNN would. Where a row has
no queries it writes garbage, as nobody promises that nothing is written there.
"""

from __future__ import annotations

import enum
import types
from dataclasses import dataclass, field
from typing import Any

import torch


class cudnnGraphNotSupportedError(Exception):  # noqa: N801 - the frontend's name
    """No plan."""


class DataType(enum.Enum):
    BFLOAT16 = torch.bfloat16
    HALF = torch.float16
    FLOAT = torch.float32
    INT32 = torch.int32


class Diagonal(enum.Enum):
    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


@dataclass(eq=False)
class GraphTensor:
    name: str = ""
    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: DataType | None = None
    ragged: GraphTensor | None = None

    def set_ragged_offset(self, offsets: GraphTensor) -> GraphTensor:
        self.ragged = offsets
        return self

    def set_output(self, _: bool) -> GraphTensor:
        return self

    def set_dim(self, dim: list[int]) -> GraphTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> GraphTensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: DataType) -> GraphTensor:
        self.data_type = data_type
        return self


class PyGraph:
    def __init__(self, **types_: DataType) -> None:
        assert types_["compute_data_type"] == DataType.FLOAT
        self.asked: dict[str, Any] = {}
        self.built: list[str] = []

    def tensor(self, **facts: Any) -> GraphTensor:
        return GraphTensor(**facts)

    def sdpa(self, **asked: Any) -> tuple[GraphTensor, None]:
        self.asked = asked | {"o": GraphTensor("o")}
        return self.asked["o"], None

    def validate(self) -> None:
        for each in (*(self.asked[name] for name in "qkvo"), self.asked["seq_len_q"]):
            assert len(each.dim) == len(each.stride) == 4
            assert each.stride[3] == 1
        assert self.asked["use_padding_mask"]
        assert self.asked["diagonal_band_right_bound"] == 0
        assert self.asked["diagonal_alignment"] == Diagonal.BOTTOM_RIGHT

    def build_operation_graph(self) -> None:
        self.built.append("operation graph")

    def create_execution_plans(self, _: list[str]) -> None:
        self.built.append("plans")

    def check_support(self) -> None:
        self.built.append("support")

    def build_plans(self) -> None:
        self.built.append("built")

    def get_workspace_size(self) -> int:
        """A byte for each row and token that a row may have."""
        rows, _, tokens, _ = self.asked["q"].dim
        return int(rows * tokens)

    def execute(self, pack: dict[GraphTensor, torch.Tensor], workspace: Any, handle: Any) -> None:
        assert self.built == ["operation graph", "plans", "support", "built"]
        assert workspace.nbytes == max(1, self.get_workspace_size())
        assert handle == "handle"
        for part, tensor in pack.items():
            assert part.data_type is not None
            assert tensor.dtype == part.data_type.value, part.name
        asked = self.asked
        keys, values = (_view(pack[asked[name]], asked[name]) for name in "kv")
        tables = _view(pack[asked["paged_attention_k_table"]], asked["paged_attention_k_table"])
        assert asked["paged_attention_v_table"] is asked["paged_attention_k_table"]
        assert tables.min() >= 0
        assert tables.max() < len(keys)
        queries, contexts = (pack[asked[name]].tolist() for name in ("seq_len_q", "seq_len_kv"))
        for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
            assert context <= asked["paged_attention_max_seq_len_kv"]
            out = _ragged(pack, asked["o"], row, max(count, 1))  # [H, S, D]
            if count == 0:
                if out is not None:
                    out.fill_(float("nan"))
                continue
            found = _ragged(pack, asked["q"], row, count)
            assert found is not None
            assert out is not None
            blocks = tables[row, 0, :, 0].long()
            k, v = (
                each[blocks].transpose(0, 1).flatten(1, 2)[:, :context] for each in (keys, values)
            )
            group = found.shape[0] // k.shape[0]
            k, v = (each.float().repeat_interleave(group, 0) for each in (k, v))
            scores = found.float() @ k.transpose(1, 2) * asked["attn_scale"]
            place = torch.arange(context - count, context)
            hidden = torch.arange(context)[None, :] > place[:, None]
            scores.masked_fill_(hidden, float("-inf"))
            out.copy_(scores.softmax(-1) @ v)


def _view(tensor: torch.Tensor, part: GraphTensor) -> torch.Tensor:
    return torch.as_strided(tensor, part.dim, part.stride, tensor.storage_offset())


def _ragged(
    pack: dict[GraphTensor, torch.Tensor], part: GraphTensor, row: int, count: int
) -> torch.Tensor | None:
    """[H, count, D] of a row, or None where a tensor has no room for so many."""
    assert part.ragged is not None
    tensor, (_, heads, most, dim) = pack[part], part.dim
    assert count <= most
    assert len(pack[part.ragged]) == len(pack[part.ragged].flatten()) == part.dim[0] + 1
    start = tensor.storage_offset() + int(pack[part.ragged][row])
    last = start + (count - 1) * part.stride[2] + (heads - 1) * part.stride[1] + dim
    if last > tensor.untyped_storage().nbytes() // tensor.element_size():
        return None
    return torch.as_strided(
        tensor, (heads, count, dim), (*part.stride[1:3][:1], *part.stride[2:]), start
    )


def module() -> types.ModuleType:
    """What ``import cudnn`` would give."""
    made = types.ModuleType("cudnn")
    made.cudnnGraphNotSupportedError = cudnnGraphNotSupportedError  # type: ignore[attr-defined]
    made.data_type, made.diagonal_alignment = DataType, Diagonal  # type: ignore[attr-defined]
    made.pygraph = PyGraph  # type: ignore[attr-defined]
    made.heur_mode = types.SimpleNamespace(A="A")  # type: ignore[attr-defined]
    made.create_handle = lambda: "handle"  # type: ignore[attr-defined]
    made.set_stream = lambda **_: None  # type: ignore[attr-defined]
    return made
