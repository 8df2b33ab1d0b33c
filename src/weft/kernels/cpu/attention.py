"""Paged attention on the CPU: a thin wrapper around the native module ``_native``.

The native code runs without the interpreter lock on its own pool of threads, and may be called from
several Python threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.kernels.arrays import Array, empty, view
from weft.kernels.cpu import _native
from weft.kernels.interface import AttentionMetadata

__all__ = ["isa", "isas", "paged_attention", "set_threads", "threads", "use_isa"]


def paged_attention(
    q: Array,
    k: Array | None,
    v: Array | None,
    k_cache: Array,
    v_cache: Array,
    batch: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Array | None = None,
    value_dim: int | None = None,  # noqa: ARG001 - whole rows are computed
    causal: bool = True,
) -> Array:
    """Write ``k`` and ``v`` at their slot_mapping, then attend; returns ``[T, H, D]`` like
    ``q``.

    The queries of row r are the last tokens of its context. Sums are float32; where queries and
    cache are bfloat16 and the machine multiplies pairs of them, so are the products' factors, the
    weights of the values included. The result of a token depends on its own row's context only: the
    same bits come out whatever else is in the batch, however the prompt was cut into chunks, and
    whatever the number of threads. What rows of few queries have in common at the start of their
    tables is read once for all of them.

    Args:
        q: ``[T, H, D]``. Like ``k`` and ``v``, it may be a view into a fused matrix: only the last
            dimension must be contiguous.
        k: ``[T, Hkv, D]``, or None if the cache holds these tokens already.
        v: like ``k``; None exactly if ``k`` is.
        k_cache: ``[num_blocks, Hkv, block_size, D]``; its type may differ from that of ``q``. With
            8-bit types ``[num_blocks, Hkv, block_size, D + 4]``, laid out as ``kv_storage`` says.
        v_cache: like ``k_cache``.
        batch: block tables and lengths. Table entries before the sliding window of a row's first
            query are never read and may be anything.
        scale: factor of the scores.
        window: a query at position p sees the positions in ``(p - window, p]``; None: all up to p.
        sinks: ``[H]`` float32, a further score for each query head, whose value is 0; None: none.
        value_dim: how many last numbers of each head's result are wanted; all are computed.
        causal: see ``reference.paged_attention``.
        softcap: scores s become ``softcap * tanh(s / softcap)``; None: they stay.

    Raises:
        ValueError: shapes, types or indices do not fit; nothing has been written then.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or None")
    q_view = view("q", q)
    out = empty(q, q.shape)
    _native.paged_attention(
        view("out", out),
        q_view,
        None if k is None else view("k", k),
        None if v is None else view("v", v),
        view("k_cache", k_cache),
        view("v_cache", v_cache),
        view("block_tables", batch.block_tables),
        view("query_start", batch.query_start),
        view("seq_lens", batch.seq_lens),
        view("slot_mapping", batch.slot_mapping),
        batch.block_size,
        scale,
        window or 0,
        softcap or 0.0,
        None if sinks is None else view("sinks", sinks),
        causal,
    )
    return out


def set_threads(count: int, cpus: Sequence[int] = (), nodes: Sequence[int] = ()) -> None:
    """Use ``count`` threads for a call, the calling one included; ValueError if below 1.

    Safe while calls are in flight. The start value is the number of cores that the process may use.

    Args:
        cpus: the processor that each thread stays on, but for the calling one; none: they move.
        nodes: the NUMA node of each thread, on which the part of a matrix lies that it reads; none:
            memory lies where it is touched first. What is mapped stays where it is.

    Raises:
        ValueError: ``count`` is below 1, or there is not one processor or node for each thread.
    """
    _native.set_threads(count, list(cpus), list(nodes))


def threads() -> int:
    """Return the number of threads that a call may use."""
    return _native.threads()


def isa() -> str:
    """Return the instruction set of the inner loops: one of ``isas()``."""
    return _native.isa()


def isas() -> list[str]:
    """Return the instruction sets that this machine can run, widest first; the first is used."""
    return _native.isas()


def use_isa(name: str) -> None:
    """Use another one of ``isas()``, to compare or test it; ValueError if it cannot run here."""
    _native.use_isa(name)
