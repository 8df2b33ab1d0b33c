"""Steps whose tokens stand for images: what is read in their place, and how they attend."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.core.images import PromptImage
from weft.core.plan import SubBatch
from weft.exec.attend import attend_over
from weft.exec.inputs import StepInputs
from weft.exec.store import KVStore
from weft.kernels.arrays import Array
from weft.kernels.interface import AttentionMetadata
from weft.models.decoder import Attend, Decoder


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The tokens of a step that stand for images, N of S images.

    Attributes:
        at: [N] where they are among the tokens of the step.
        rows: [N, C] what is read in place of their embeddings.
        members: [S] of which row of the batch each image is.
        starts: [S + 1] int32, where the tokens of each image begin among the N.
        stops: [S] int32, tokens of its row up to the end of the image.
    """

    at: NDArray[np.int64]
    rows: NDArray[Any]
    members: NDArray[np.int64]
    starts: NDArray[np.int32]
    stops: NDArray[np.int32]


def find_seen(
    batch: SubBatch, inputs: StepInputs, images: Callable[[int], Seq[PromptImage]]
) -> SeenTokens | None:
    """The tokens of a sub-batch that stand for images; None if there are none.

    Args:
        images: those of a row.

    Raises:
        InvariantError: an image was cut, or is not encoded.
    """
    places, rows, members, stops = [], [], [], []
    first = 0  # of a row, among the tokens of the step
    for member, (row, start, count) in enumerate(
        zip(batch.rows, inputs.starts.tolist(), inputs.counts.tolist(), strict=True)
    ):
        for image in images(row):
            begin, end = max(start, image.start), min(start + count, image.stop)
            if begin >= end:
                continue
            if end < image.stop or image.rows is None:
                raise InvariantError(f"a step cuts an image of row {row}, or it is not encoded")
            places.append(np.arange(first + begin - start, first + end - start))
            rows.append(image.rows[begin - image.start :])
            members.append(member)
            stops.append(end)
        first += count
    if not places:
        return None
    starts = np.cumsum([0, *map(len, places)], dtype=np.int32)
    return SeenTokens(
        np.concatenate(places),
        np.concatenate(rows),
        np.array(members),
        starts,
        np.array(stops, np.int32),
    )


def forward_seeing(
    decoder: Decoder,
    store: KVStore,
    inputs: StepInputs,
    seen: SeenTokens,
) -> Array:
    """The forward pass of a step with images: normalised hidden states [T, C].

    The tokens of an image also attend to those behind them in the same image, as Gemma 3 has it;
    all else is computed as without images, to the same bits.
    """
    attend = attend_over(decoder, store, inputs.groups)
    within = _within_images(decoder, store, inputs.groups, seen, attend)
    return decoder.forward(inputs.input_ids, inputs.positions, within, (seen.at, seen.rows))


def _within_images(
    decoder: Decoder,
    store: KVStore,
    groups: Seq[AttentionMetadata],
    seen: SeenTokens,
    attend: Attend,
) -> Attend:
    """Attention that lets the tokens of an image see all of it, once their KV is written."""
    slots = np.full(len(seen.at), -1, np.int64)  # nothing is written anew
    of_images = [
        AttentionMetadata(
            block_tables=np.ascontiguousarray(group.block_tables[seen.members]),
            query_start=seen.starts,
            seq_lens=seen.stops,
            slot_mapping=slots,
            block_size=group.block_size,
        )
        for group in groups
    ]

    def attend_within(layer: int, q: Array, k: Array | None, v: Array | None) -> Array:
        attended = attend(layer, q, k, v)
        params = decoder.attention_params(layer)
        attended[seen.at] = decoder.ops.paged_attention(
            np.ascontiguousarray(q[seen.at]),
            None,
            None,
            store.keys[params.group][params.index],
            store.values[params.group][params.index],
            of_images[params.group],
            scale=params.scale,
            window=params.window,
            softcap=params.softcap,
            sinks=decoder.sinks(layer),
            causal=False,
        )
        return attended

    return attend_within
