"""The forward pass over the blocks of a KV store, as executors run it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TypeAlias, cast

from weft.exec.store import KVStore
from weft.kernels.arrays import Array
from weft.kernels.delta import StateBatch
from weft.kernels.interface import (
    AttentionMetadata,
    FusedStack,
    PaddedLane,
    PaddedStack,
    RecurrentStack,
)
from weft.models.decoder import Attend, Decoder

Forward: TypeAlias = Callable[[Array, Array, Seq[AttentionMetadata]], Array]
RecurrentForward: TypeAlias = Callable[[Array, Array, Seq[AttentionMetadata], StateBatch], Array]
PaddedForward: TypeAlias = Callable[..., None]
Lanes: TypeAlias = Callable[[Array, Array, Seq[AttentionMetadata]], PaddedLane]


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
    states = None if store.states is None else store.states.layers
    return decoder.bind(store.keys, store.values, states)


def forward_over(decoder: Decoder, store: KVStore, stack: FusedStack | None) -> Forward:
    """``bind_forward`` with what ``bind_stack`` has returned."""
    if stack is not None:
        return stack.run

    def forward(ids: Array, positions: Array, groups: Seq[AttentionMetadata]) -> Array:
        return decoder.forward(ids, positions, attend_over(decoder, store, groups))

    return forward


def forward_recurrent(
    decoder: Decoder, store: KVStore, stack: FusedStack | None
) -> RecurrentForward:
    """Return the forward pass of a model with recurrent layers; see ``forward_over``.

    It also takes the states that the rows read and write.
    """
    if stack is not None:
        return cast("RecurrentStack", stack).run_recurrent

    def forward(
        ids: Array, positions: Array, groups: Seq[AttentionMetadata], states: StateBatch
    ) -> Array:
        return decoder.forward(ids, positions, attend_over(decoder, store, groups, states))

    return forward


def bind_padded(decoder: Decoder, store: KVStore) -> PaddedForward:
    """Return the forward pass of steps that can be captured, which writes the hidden states.

    It takes ids [T], positions [T], the metadata of each KV group, tokens in flight [R], for number
    i of which the id -1 - i stands, and where [T, C] the normalised hidden states are written; of a
    model with recurrent layers also the states that the rows read and write.
    """
    from weft.kernels.reference import known_ids

    stack = bind_stack(decoder, store, padded=True)
    if stack is not None:
        return cast("PaddedStack", stack).run_into  # ``Fused.padded`` says that it has it

    def forward(
        ids: Array,
        positions: Array,
        groups: Seq[AttentionMetadata],
        in_flight: Array,
        out: Array,
        states: StateBatch | None = None,
    ) -> None:
        attend = attend_over(decoder, store, groups, states)
        out.copy_(decoder.forward(known_ids(ids, in_flight), positions, attend))

    return forward


def bind_lanes(decoder: Decoder, store: KVStore) -> Lanes:
    """Return what puts padded batches on their way: ids [T], positions [T], and the metadata."""
    stack = bind_stack(decoder, store, padded=True)
    if stack is not None:
        return cast("PaddedStack", stack).lane  # ``Fused.padded`` says that it has it
    return partial(_DecoderLane, decoder, store)


class _DecoderLane:
    """A batch on its way through a model that does not run as one call."""

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        ids: Array,
        positions: Array,
        groups: Seq[AttentionMetadata],
    ) -> None:
        self._decoder, self._attend = decoder, attend_over(decoder, store, groups)
        self._residual = decoder.embed(ids)  # [T, C]
        self._inputs = decoder.layer_inputs(ids, self._residual)  # [L, T, P] or None
        self._angles = decoder.angles(positions)

    def enter(self, layer: int) -> Callable[[], Array]:
        return partial(self._attend, layer, *self._decoder.pre(layer, self._residual, self._angles))

    def leave(self, layer: int, attended: Array) -> None:
        inputs = None if self._inputs is None else self._inputs[layer]
        self._residual = self._decoder.post(layer, attended, self._residual, inputs)

    def finish(self) -> Array:
        return self._decoder.finish(self._residual)


def attend_over(
    decoder: Decoder,
    store: KVStore,
    groups: Seq[AttentionMetadata],
    states: StateBatch | None = None,
) -> Attend:
    """The attention of one step: write K and V into the store, attend over it.

    Args:
        states: those that recurrent layers read and write.
    """
    recurrent = {} if store.states is None or states is None else store.states.layers

    def attend(layer: int, q: Array, k: Array | None, v: Array | None) -> Array:
        if states is not None and layer in recurrent:
            return decoder.mix(layer, q, k, recurrent[layer], states)
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
            sinks=decoder.sinks(layer),
            value_dim=params.value_dim,
            causal=params.causal,
        )

    return attend
