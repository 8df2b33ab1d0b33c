"""The forward pass over the blocks of a KV store, as executors run it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from weft.exec.store import KVStore
from weft.kernels.arrays import Array
from weft.kernels.interface import AttentionMetadata, FusedStack
from weft.models.decoder import Attend, Decoder

Forward: TypeAlias = Callable[[Array, Array, Seq[AttentionMetadata]], Array]


def bind_forward(decoder: Decoder, store: KVStore, *, padded: bool = False) -> Forward:
    """Return the forward pass of ids [T], positions [T] and the metadata of each KV group.

    It gives the normalised hidden states [T, C].

    Args:
        padded: batches may be padded and block tables ragged.
    """
    return forward_over(decoder, store, bind_stack(decoder, store, padded=padded))


def bind_stack(decoder: Decoder, store: KVStore, *, padded: bool = False) -> FusedStack | None:
    """The forward pass as one call; None where the model does not run so."""
    fused = decoder.ops.fused
    if fused is None or (padded and not fused.padded):
        return None
    return decoder.bind(store.keys, store.values)


def forward_over(decoder: Decoder, store: KVStore, stack: FusedStack | None) -> Forward:
    """``bind_forward`` with what ``bind_stack`` has returned."""
    if stack is not None:
        return stack.run

    def forward(ids: Array, positions: Array, groups: Seq[AttentionMetadata]) -> Array:
        return decoder.forward(ids, positions, attend_over(decoder, store, groups))

    return forward


def attend_over(decoder: Decoder, store: KVStore, groups: Seq[AttentionMetadata]) -> Attend:
    """The attention of one step: write K and V into the store, attend over it."""

    def attend(layer: int, q: Array, k: Array | None, v: Array | None) -> Array:
        params = decoder.attention_params(layer)
        return decoder.ops.paged_attention(
            q,
            k,
            v,
            store.keys[params.group][params.index],
            store.values[params.group][params.index],
            groups[params.group],
            scale=params.scale,
            window=params.window,
            softcap=params.softcap,
        )

    return attend
