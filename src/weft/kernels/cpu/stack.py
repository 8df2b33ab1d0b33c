"""A forward pass as one native call, and the small ops before and after the layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.kernels.cpu import _native
from weft.kernels.cpu.attention import view
from weft.kernels.cpu.layer import CpuLayer
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.interface import AttentionMetadata


class CpuStack:
    """Embedding, layers bound to their caches, and final norm.

    ``run`` gives the very bits of the parts called one by one, without Python in between, whose
    code and data are cold after the weights of each layer.
    """

    def __init__(
        self,
        embedding: Tensor | CpuMatrix,
        embedding_scale: float,
        norm: Tensor,
        norm_eps: float,
        norm_plus_one: bool,
    ) -> None:
        """Bind what precedes and follows the layers.

        Args:
            embedding: [V, C].
            embedding_scale: multiplies embeddings; rounded to their dtype before.
            norm: [C], the weight of the final norm; ``norm_plus_one`` adds 1 to it.
        """
        native = _native.Stack()
        self._native = native
        self._dtype, self._width = norm.dtype, len(norm)
        if isinstance(embedding, CpuMatrix):
            native.packed = embedding.native
        else:
            embedding = embedding.contiguous()
            native.table = view("table", embedding)
        native.embedding_scale = torch.tensor(embedding_scale, dtype=norm.dtype).item()
        weight = 1.0 + norm.float() if norm_plus_one else norm.float().clone()
        native.final_norm = weight.data_ptr()
        native.epsilon = norm_eps
        self._kept: list[object] = [embedding, weight]

    def add_rope(self, frequencies: Tensor, scale: float) -> None:
        """Append a rotary embedding: frequencies [R] float32, and the factor of cos and sin."""
        self._kept.append(frequencies)
        self._native.add_rope(frequencies.data_ptr(), len(frequencies), scale)

    def add_layer(
        self,
        layer: CpuLayer,
        places: tuple[int, int],
        caches: tuple[Tensor, Tensor],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Append a layer.

        Args:
            places: which rope, of those appended before, and which KV group of a call it has.
            caches: keys and values; like ``scale``, ``window`` and ``softcap`` those of
                ``paged_attention``.
        """
        keys, values = caches
        self._native.add_layer(
            layer.native,
            *places,
            view("k_cache", keys),
            view("v_cache", values),
            scale,
            window or 0,
            softcap or 0.0,
        )
        self._kept += [layer, keys, values]

    def run(self, ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata]) -> Tensor:
        """Return the normalised hidden states [T, C].

        Args:
            ids, positions: [T] int64.
            groups: the attention metadata of each KV group.

        Raises:
            IndexError: an id is outside the vocabulary; nothing has been written then.
            ValueError: shapes, dtypes or indices do not fit; caches may have been written then.
        """
        tokens = len(ids)
        if not ids.dtype == positions.dtype == torch.int64 or positions.shape != ids.shape:
            raise ValueError(f"positions {list(positions.shape)} do not fit {tokens} ids of int64")
        ids, positions = ids.contiguous(), positions.contiguous()
        hidden = torch.empty((tokens, self._width), dtype=self._dtype)
        self._native.run(
            ids.data_ptr(),
            positions.data_ptr(),
            tokens,
            [
                (
                    view("block_tables", group.block_tables),
                    view("query_start", group.query_start),
                    view("seq_lens", group.seq_lens),
                    view("slot_mapping", group.slot_mapping),
                    group.block_size,
                )
                for group in groups
            ],
            hidden.data_ptr(),
        )
        return hidden


def angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, R] float32 of positions [T] int64; see ``reference.angles``."""
    positions = positions.contiguous()
    shape = (len(positions), len(frequencies))
    cos, sin = torch.empty(shape), torch.empty(shape)
    _native.angles(
        positions.data_ptr(), *shape[:1], frequencies.data_ptr(), shape[1], scale,
        cos.data_ptr(), sin.data_ptr(),
    )  # fmt: skip
    return cos, sin


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """Root mean square norm of x [T, D] or [T, H, D]; see ``reference.rms_norm``.

    Args:
        weight: [D], or one for each head [H, D].

    Raises:
        ValueError: shapes do not fit.
    """
    if weight is not None and weight.shape not in (x.shape[-1:], x.shape[1:]):
        raise ValueError(f"weight {list(weight.shape)} does not fit {list(x.shape)}")
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    heads = x if x.dim() == 3 else x.unsqueeze(1)
    weights = None if weight is None else view("weight", weight.reshape(-1))
    _native.normalise(view("x", heads), weights, plus_one, eps, out.data_ptr())
    return out
