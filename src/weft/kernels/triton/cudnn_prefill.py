"""Attention of prompts over paged KV by NVIDIA's cuDNN, where a tuning file asks for it.

Rows of few tokens are computed as always, by ``attention.paged_attention``. The others go to a
graph of cuDNN's frontend (``pip install nvidia-cudnn-frontend``): its operation for scaled dot
products with page tables, ragged queries and a causal mask at the end of each context. It has not
run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.kernels.interface import AttentionMetadata
from weft.kernels.triton.attention import paged_attention, plan_for
from weft.kernels.triton.launch import power_of_2
from weft.kernels.triton.tiles import Heads
from weft.kernels.tuning import PREFILL, Tuning
from weft.kernels.unavailable import KernelUnavailable

CUDNN = "CUDNN"  # of a launch of prefill attention in a tuning file: 1 asks for it
MOST_DIM = 128  # of heads that cuDNN serves on every GPU from Ampere on
INT32 = 4  # bytes
LATENT = "latent attention (MLA)"
REMEDY = f"take {CUDNN} out of the entry of the tuning file, or set tuning='heuristic'"


@dataclass(frozen=True)
class Shape:
    """What a graph is made for.

    Attributes:
        rows, tokens: of the step, rounded up; a row may have all tokens.
        pages: block ids of a row.
        q_strides: of a token and of a head.
        k_strides, v_strides: of a block, a head of it, a token and a number.
    """

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    blocks: int
    block_size: int
    pages: int
    q_strides: tuple[int, int]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    dtype: torch.dtype
    scale: float


def asks(tuning: Tuning, heads: Heads) -> bool:
    """Whether a tuning has cuDNN compute the prompts of such heads."""
    launch = tuning.attention(heads.shape(PREFILL))
    return launch is not None and bool(launch.get(CUDNN, 0))


def attention_by(tuning: Tuning | None) -> Callable[..., Tensor]:
    """Return paged attention with the launches of a tuning, by cuDNN where that asks for it."""
    return PrefillByCudnn(tuning)


class PrefillByCudnn:
    """``paged_attention``, and cuDNN for rows of many tokens of the shapes that ask for it."""

    def __init__(self, tuning: Tuning | None, load: Callable[[], ModuleType] | None = None) -> None:
        self._tuning = tuning
        self._attend: Callable[..., Tensor] = partial(paged_attention, tuning=tuning)
        self._load = load or load_cudnn
        self._graphs: dict[Shape, Graph] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
        causal: bool = True,
    ) -> Tensor:
        """See ``attention.paged_attention``.

        Raises:
            KernelUnavailable: the tuning asks for cuDNN, and it is missing or cannot compute this.
        """
        given: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        given |= {"sinks": sinks, "value_dim": value_dim, "causal": causal}
        if not causal or not self._asked(q, k_cache, value_dim):
            return self._attend(q, k, v, k_cache, v_cache, batch, **given)
        few = plan_for(q, k_cache, batch.max_query_len, self._tuning, value_dim).few
        if min(batch.max_query_len or len(q), len(q)) <= few:
            return self._attend(q, k, v, k_cache, v_cache, batch, **given)
        check(q, k_cache, window, softcap, sinks, value_dim)
        key = PrefillByCudnn, few  # kept, as every layer reads its list of splits
        short = batch.derived.setdefault(key, replace(batch, max_query_len=few))
        few = plan_for(q, k_cache, few, self._tuning, value_dim).few
        out = self._attend(q, k, v, k_cache, v_cache, short, **given)  # writes K and V as well
        return self._more(q, k_cache, v_cache, batch, few, scale, out)

    def _asked(self, q: Tensor, k_cache: Tensor, value_dim: int | None) -> bool:
        if self._tuning is None:
            return False
        kv_heads, (_, heads, dim) = k_cache.shape[1], q.shape
        found = Heads(kv_heads, heads // max(1, kv_heads), dim, q.dtype, k_cache.dtype, value_dim)
        return asks(self._tuning, found)

    def _more(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionMetadata,
        few: int,
        scale: float,
        out: Tensor,
    ) -> Tensor:
        """Return ``out`` with the rows of more than ``few`` tokens computed by cuDNN."""
        key = PrefillByCudnn, "rows", few, k_cache.shape[0]
        if key not in batch.derived:  # the first layer of a step
            batch.derived[key] = PromptRows.of(batch, few, len(q), k_cache.shape[0])
        rows: PromptRows = batch.derived[key]
        shape = Shape(
            rows=len(rows.tables),
            tokens=power_of_2(len(q)),
            heads=q.shape[1],
            kv_heads=k_cache.shape[1],
            dim=q.shape[2],
            blocks=k_cache.shape[0],
            block_size=batch.block_size,
            pages=rows.tables.shape[1],
            q_strides=(q.stride(0), q.stride(1)),
            k_strides=tuple(k_cache.stride()),
            v_strides=tuple(v_cache.stride()),
            dtype=q.dtype,
            scale=scale,
        )
        if shape not in self._graphs:
            self._graphs[shape] = Graph(self._load(), shape, q.device)
        more = q.new_empty(len(q) + 1, *out.shape[1:])  # padding rows are behind the last token
        self._graphs[shape].run(q, k_cache, v_cache, rows, more)
        return torch.where(rows.taken[:, None, None], more[:-1], out)


@dataclass(frozen=True)
class PromptRows:
    """The rows of a step as a graph takes them, for all of its layers.

    Their number, and that of the pages of each, are powers of 2, so that few graphs serve all
    steps. Rows that are there for that, or have few tokens, have none here.

    Attributes:
        tables: [R, P] int32, valid block ids everywhere.
        start: [R + 1] int32 tokens before each row.
        queries, context: [R] int32 tokens of each row.
        taken: [T] whether a token is of a row that the graph computes.
    """

    tables: Tensor
    start: Tensor
    queries: Tensor
    context: Tensor
    taken: Tensor

    @classmethod
    def of(cls, batch: AttentionMetadata, few: int, tokens: int, blocks: int) -> PromptRows:
        """Return those of more than ``few`` tokens. Raises as ``dense_tables``."""
        tables, start = dense_tables(batch, blocks), batch.query_start
        counts = start[1:] - start[:-1]
        many = counts > few
        at = torch.arange(tokens, device=start.device, dtype=start.dtype)
        row = torch.searchsorted(start[1:], at, right=True)  # R for tokens of no row
        taken = torch.cat((many, many.new_zeros(1)))[row]
        more = power_of_2(len(counts)) - len(counts)
        wider = power_of_2(tables.shape[1]) - tables.shape[1]
        return cls(
            pad(tables, (0, wider, 0, more)),
            torch.cat((start, start[-1:].expand(more))),
            pad(torch.where(many, counts, 0), (0, more)),
            pad(torch.where(many, batch.seq_lens, 0), (0, more)),
            taken,
        )


class Graph:
    """A graph of cuDNN for a shape, with its plan. Raises KernelUnavailable: there is no plan."""

    def __init__(self, cudnn: ModuleType, shape: Shape, device: torch.device) -> None:
        self._cudnn, self._device = cudnn, device
        self._token, self._row = shape.q_strides[0], shape.heads * shape.dim
        self.graph, self._parts = describe(cudnn, shape)
        self._handle = cudnn.create_handle()
        try:
            self.graph.build_operation_graph()
            self.graph.create_execution_plans([cudnn.heur_mode.A])
            self.graph.check_support()
            self.graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            raise KernelUnavailable(
                f"cuDNN has no prefill attention for {shape.heads} heads of {shape.dim} over "
                f"{shape.kv_heads} KV heads in blocks of {shape.block_size} on {device}: {error}; "
                f"{REMEDY}"
            ) from error

    @property
    def workspace_bytes(self) -> int:
        """What a run needs beside its arguments."""
        return max(1, int(self.graph.get_workspace_size()))

    def run(self, q: Tensor, keys: Tensor, values: Tensor, rows: PromptRows, out: Tensor) -> None:
        """Attend; rows without queries get what is not to be looked at, one token at the most.

        Args:
            q, keys, values: with the strides of the shape.
            out: [T + 1, H, D].
        """
        given = {
            "q": q,
            "keys": keys,
            "values": values,
            "tables": rows.tables,
            "queries": rows.queries,
            "context": rows.context,
            "q_offsets": rows.start * self._token,
            "out_offsets": rows.start * self._row,
            "out": out,
        }
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._cudnn.set_stream(handle=self._handle, stream=stream)
        pack = {self._parts[name]: tensor for name, tensor in given.items()}
        self.graph.execute(pack, workspace, handle=self._handle)


@cache
def step_bytes(
    heads: Heads,
    step: tuple[int, int, int],
    block_size: int,
    device: torch.device,
    load: Callable[[], ModuleType] | None = None,
) -> int:
    """Return what a step needs on a device beside what other attention does.

    That is the tables and lengths of its rows, results, and the workspace of the graph, which cuDNN
    tells. Of a GPU that is absent it is left out.

    Args:
        step: rows, tokens and pages of a row, each the most of any step.

    Raises:
        KernelUnavailable: cuDNN is missing, or has no plan.
    """
    if heads.value_dim is not None:
        raise KernelUnavailable(f"prefill attention by cuDNN does not serve {LATENT}; {REMEDY}")
    rows, tokens, pages = map(power_of_2, step)
    width = heads.kv_heads * heads.group * heads.dim
    counted = 3 * rows * pages * INT32 + 6 * rows * INT32  # gathered, clamped and padded tables
    counted += 2 * tokens * width * heads.dtype.itemsize + 32 * tokens
    if device.type == "meta":
        return counted
    block = heads.kv_heads * block_size * heads.dim
    strides = (2 * block, block_size * heads.dim, heads.dim, 1)
    shape = Shape(
        rows=rows,
        tokens=tokens,
        heads=heads.kv_heads * heads.group,
        kv_heads=heads.kv_heads,
        dim=heads.dim,
        blocks=max(1, rows * pages),
        block_size=block_size,
        pages=pages,
        q_strides=(width + 2 * heads.kv_heads * heads.dim, heads.dim),
        k_strides=strides,
        v_strides=strides,
        dtype=heads.dtype,
        scale=heads.dim**-0.5,
    )
    return counted + Graph((load or load_cudnn)(), shape, device).workspace_bytes


def describe(cudnn: ModuleType, shape: Shape) -> tuple[Any, dict[str, Any]]:
    """Return the validated graph of a shape and its tensors by name; needs no GPU."""
    types = cudnn.data_type
    half = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[shape.dtype]
    graph = cudnn.pygraph(
        io_data_type=half, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT
    )
    rows, tokens, heads, dim = shape.rows, shape.tokens, shape.heads, shape.dim

    def tensor(name: str, sizes: list[int], strides: list[int], kind: Any) -> Any:
        return graph.tensor(name=name, dim=sizes, stride=strides, data_type=kind)

    def numbers(name: str, count: int) -> Any:
        return tensor(name, [count, 1, 1, 1], [1, 1, 1, 1], types.INT32)

    token, head = shape.q_strides
    cache = [shape.blocks, shape.kv_heads, shape.block_size, dim]
    pages = [rows, 1, shape.pages, 1], [shape.pages, shape.pages, 1, 1]
    parts = {
        "q": tensor("q", [rows, heads, tokens, dim], [tokens * token, head, token, 1], half),
        "keys": tensor("keys", cache, list(shape.k_strides), half),
        "values": tensor("values", cache, list(shape.v_strides), half),
        "tables": tensor("tables", *pages, types.INT32),
        "queries": numbers("queries", rows),
        "context": numbers("context", rows),
        "q_offsets": numbers("q_offsets", rows + 1),
        "out_offsets": numbers("out_offsets", rows + 1),
    }
    parts["q"].set_ragged_offset(parts["q_offsets"])
    out, _ = graph.sdpa(
        name="prefill",
        q=parts["q"],
        k=parts["keys"],
        v=parts["values"],
        generate_stats=False,
        attn_scale=shape.scale,
        use_padding_mask=True,
        seq_len_q=parts["queries"],
        seq_len_kv=parts["context"],
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
        diagonal_band_right_bound=0,
        paged_attention_k_table=parts["tables"],
        paged_attention_v_table=parts["tables"],
        paged_attention_max_seq_len_kv=shape.pages * shape.block_size,
    )
    out.set_output(True).set_data_type(half)
    out.set_dim([rows, heads, tokens, dim])
    out.set_stride([tokens * heads * dim, dim, heads * dim, 1])
    out.set_ragged_offset(parts["out_offsets"])
    parts["out"] = out
    graph.validate()
    return graph, parts


def dense_tables(batch: AttentionMetadata, blocks: int) -> Tensor:
    """Return block tables [R, P] with valid ids; what a row does not have may be any.

    Raises:
        ValueError: the tables are flat, and no bound of contexts is known.
    """
    tables: Tensor = batch.block_tables
    if batch.table_start is not None:
        if batch.max_context is None:
            raise ValueError("flat block tables need max_context, which bounds those of a row")
        pages = -(-batch.max_context // batch.block_size)
        at = batch.table_start[:, None] + torch.arange(pages, device=tables.device)
        tables = tables[at.clamp_(0, max(0, len(tables) - 1)).long()]
    return tables.clamp(0, blocks - 1).contiguous()


def check(
    q: Tensor,
    k_cache: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> None:
    """Raise KernelUnavailable for what cuDNN's paged attention is not asked to compute."""
    wrong = None
    if q.dtype not in (torch.bfloat16, torch.float16) or k_cache.dtype != q.dtype:
        wrong = f"queries of {q.dtype} over KV of {k_cache.dtype}; both must be one 16-bit type"
    elif window is not None or softcap is not None or sinks is not None:
        wrong = "layers with a window, capped scores or sinks"
    elif value_dim is not None:
        wrong = LATENT
    elif q.shape[2] > MOST_DIM or q.shape[2] % 8:
        wrong = f"heads of size {q.shape[2]}; they must be multiples of 8 up to {MOST_DIM}"
    if wrong is not None:
        raise KernelUnavailable(f"prefill attention by cuDNN does not serve {wrong}; {REMEDY}")


def load_cudnn() -> ModuleType:
    """Import cuDNN's frontend. Raises KernelUnavailable: it is missing."""
    try:
        import cudnn
    except ImportError as error:
        raise KernelUnavailable(
            f"the tuning file asks for prefill attention by cuDNN, whose frontend is missing "
            f"({error}): pip install nvidia-cudnn-frontend, or {REMEDY}"
        ) from error
    found: ModuleType = cudnn
    return found
