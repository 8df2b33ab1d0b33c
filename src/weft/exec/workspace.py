"""Estimates the memory that a graph executor's steps need beside weights and KV."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.exec.input_batch import MOST_EDITS, SEAT_BYTES
from weft.exec.logprobs import COLUMNS, SCORED_TOKENS_AT_ONCE
from weft.exec.step_layout import (
    AHEAD,
    HASH_WORDS,
    STRIDE,
    Buffer,
    LaneSizes,
    buffers_for,
    padded_size,
    sizes_for,
)
from weft.kernels.advance import told_size
from weft.kernels.collectives import ONE_EXCHANGE_BYTES
from weft.kernels.delta import DeltaShape
from weft.kernels.lanes import AT_ONCE, lane_state_bytes
from weft.kernels.sampling import SETTINGS, state_bytes
from weft.models.spec import ModelSpec

FLOAT = 4
SAMPLED_BYTES = 8 * (2 + len(SETTINGS)) + 4  # of a row's sampling parameters
CUBLAS_BYTES = 32 * 2**20  # PyTorch's workspace for cuBLAS on Hopper, for each handle and stream
# Of ``triton.tiles``: parts of a context that decode attention merges at the most, and query heads
# of one KV head that it computes together at the least.
ATTENTION_SPLITS = 32
ATTENTION_HEADS = 16
EXPERT_WORDS_BYTES = 4 + 3 * 8  # of ``hosted_experts``: tokens, tickets, an end
LISTED_BYTES = 32  # of ``triton.work_list``, for each part of each row


@dataclass(frozen=True)
class StepSizes:
    """The largest step: tokens, rows, and samples with the drafts that the settings ask for.

    Attributes:
        blocks: entries of a row's block table, for each group.
        depth: launched steps that may wait while another is packed.
        lanes: of a step that carries piggybacked rows.
        overlaps: whether steps may be sub-batches that overlap with the host's attention.
        halves: whether they may be two halves.
        leases: whether more may follow without plans.
        scratch_bytes: KV of a longest sequence in one layer of each group, if they may.
    """

    tokens: int
    rows: int
    samples: int
    blocks: Seq[int]
    depth: int = 1
    lanes: int = 0
    overlaps: bool = False
    scratch_bytes: int = 0
    halves: bool = False
    leases: bool = False

    @property
    def pairs(self) -> bool:
        """Whether steps may be two sub-batches that are packed as one."""
        return self.overlaps or self.halves


def workspace_bytes(
    spec: ModelSpec, element: int, sizes: StepSizes, *, graphs: bool, ranks: int = 1
) -> int:
    """Return an upper bound of what steps need: static buffers, activations, logits, scratch.

    Activations count as if nothing of a layer were freed before its end. Captured steps keep those
    of the largest captured size beside those of larger steps, which are not captured.

    Args:
        spec: of one rank.
        element: bytes of a number of the hidden states.
    """
    tokens = padded_size(sizes.tokens)
    samples = min(padded_size(sizes.samples), tokens) if spec.stage.ends else 0
    lanes = LaneSizes(spec.num_layers, sizes.lanes, sizes.rows) if sizes.lanes else None
    buffer = _buffer(spec, tokens, lanes, sizes)
    static = buffer.words * FLOAT + sizes.scratch_bytes
    static += 8 * told_size(padded_size(min(sizes.rows, sizes.tokens)))  # of leases
    padding = tokens if sizes.pairs else 0  # of a second sub-batch
    static += (tokens + sizes.lanes + padding) * (
        spec.hidden_size * element + 3 * 8 + 1
    ) + HASH_WORDS * FLOAT
    if lanes is not None:
        static += _exchange_bytes(spec, element, sizes.rows, spec.hidden_size)
        static += (sizes.rows + 1) * SAMPLED_BYTES + 5 * 8 * sizes.lanes
    if sizes.overlaps:
        static += _exchange_bytes(spec, element, sizes.rows, 0) + 8 * (1 + 2 * spec.num_layers)
    chosen_from = spec.vocab_size if spec.stage.ends else 0
    static += state_bytes(sizes.rows, MOST_EDITS, chosen_from) + SEAT_BYTES
    static += 3 * ONE_EXCHANGE_BYTES * (ranks > 1)  # of sums by peer memory: two slots, flags
    scratch = CUBLAS_BYTES + _list_bytes(spec, sizes.rows)
    scratch += max(
        _attention_bytes(spec, number, sizes, tokens) for number in range(spec.num_layers)
    )
    rounded = STRIDE if sizes.pairs else 0  # each sub-batch is padded
    passes = [(tokens + sizes.lanes + rounded, samples + sizes.lanes)]
    if graphs:
        most = sizes_for(sizes.rows, 0 if sizes.pairs else sizes.tokens)[-1]
        largest = min(tokens, most)
        passes.append((largest + sizes.lanes, min(samples, most) + sizes.lanes))
        if sizes.pairs:
            passes[-1] = (2 * largest, min(samples, most))
    return static + scratch + sum(_pass_bytes(spec, element, ranks, *counts) for counts in passes)


def pinned_bytes(spec: ModelSpec, element: int, sizes: StepSizes) -> int:
    """Return what steps take of the host's memory, to the byte: buffers, results, rows for hosts.

    Args:
        spec, element: see ``workspace_bytes``.
    """
    tokens = padded_size(sizes.tokens)
    lanes = LaneSizes(spec.num_layers, sizes.lanes, sizes.rows) if sizes.lanes else None
    buffer = _buffer(spec, tokens, lanes, sizes)
    results = 2 * 8 * (1 + tokens + 2 * sizes.lanes)
    found = buffers_for(sizes.depth) * (buffer.words * FLOAT + results + 8 * COLUMNS * tokens)
    found += 4  # of bounds
    if sizes.leases:
        told = told_size(padded_size(min(sizes.rows, sizes.tokens)))
        rows = padded_size(min(sizes.rows, sizes.tokens))
        found += 8 * told + AHEAD * 8 * (2 + 2 * rows)
    if lanes is not None or sizes.overlaps:
        queries = max(spec.heads(layer) * layer.head_dim for layer in spec.layers)
        keys = max(layer.num_kv_heads * layer.head_dim for layer in spec.layers)
        found += sizes.rows * (queries + 2 * keys) * element + 8 * (sizes.rows + 1)
        found += min(sizes.rows, AT_ONCE) * (queries * element + 2 * 8)  # that come back
    return found


def _buffer(spec: ModelSpec, tokens: int, lanes: LaneSizes | None, sizes: StepSizes) -> Buffer:
    pairs, states = sizes.pairs, spec.states is not None
    return Buffer.for_steps(tokens, sizes.rows, sizes.blocks, lanes, overlaps=pairs, states=states)


def expert_rows_bytes(spec: ModelSpec, element: int, tokens: int) -> int:
    """Return what rows of a step take of the host's memory on their way to its experts and back."""
    moe = spec.moe
    assert moe is not None
    row = 2 * spec.hidden_size * element + moe.top_k * (FLOAT + 8)
    return padded_size(tokens) * row + EXPERT_WORDS_BYTES


def _exchange_bytes(spec: ModelSpec, element: int, rows: int, hidden: int) -> int:
    """What the device keeps of rows that the host attends for, and results on their way to it."""
    width = max(spec.heads(layer) * layer.head_dim for layer in spec.layers)
    kept = lane_state_bytes(rows, width, hidden, element)
    return kept + min(rows, AT_ONCE) * (width * element + 2 * 8)


def _attention_bytes(spec: ModelSpec, number: int, sizes: StepSizes, tokens: int) -> int:
    """The sums of splits, and two numbers beside each, until they are merged."""
    few = max(1, ATTENTION_HEADS // _together(spec, number))  # tokens of a row
    places = min(tokens, sizes.rows * few)
    value = spec.layers[number].head_dim if spec.latent is None else spec.latent.rank
    return places * spec.heads(spec.layers[number]) * ATTENTION_SPLITS * (value + 2) * FLOAT


def _together(spec: ModelSpec, number: int) -> int:
    """Query heads of a tile: those of a KV head, or of latent attention a divisor of all heads."""
    if spec.latent is None:
        layer = spec.layers[number]
        return spec.heads(layer) // max(1, layer.num_kv_heads)
    return max(n for n in range(1, ATTENTION_HEADS + 1) if spec.num_heads % n == 0)


def _list_bytes(spec: ModelSpec, rows: int) -> int:
    """The parts of all rows' contexts, and how many of a row's are computed for a tile of heads."""
    tiles = max(
        spec.heads(layer) // _together(spec, number) for number, layer in enumerate(spec.layers)
    )
    row = ATTENTION_SPLITS * LISTED_BYTES + tiles * FLOAT
    return len(spec.kv_groups) * (rows * row + LISTED_BYTES)


def _pass_bytes(spec: ModelSpec, element: int, ranks: int, tokens: int, samples: int) -> int:
    """Activations of one layer, and the logits, of which choosing tokens makes a copy.

    Several ranks also have the parts of a sum and the sum in float32, and the logits as they come
    from each rank and side by side. Stages before the last one have no logits.
    """
    logits = max(samples, SCORED_TOKENS_AT_ONCE) * spec.vocab_size * FLOAT * spec.stage.ends
    width = element * max(_layer_width(spec, i) for i in range(spec.num_layers))
    if ranks == 1:
        return tokens * width + 2 * logits
    parts = tokens * spec.hidden_size * (3 * element + FLOAT) + ranks * ONE_EXCHANGE_BYTES
    return tokens * width + parts + 4 * logits


def _layer_width(spec: ModelSpec, number: int) -> int:
    """Numbers that a layer makes of a token."""
    layer, hidden = spec.layers[number], spec.hidden_size
    queries = spec.heads(layer)
    heads = queries + 2 * layer.num_kv_heads
    width = 6 * hidden
    if spec.latent is None:
        width += 2 * (heads + queries) * layer.head_dim
    else:  # queries, their latent, absorbed ones with the row; what was attended, and outputs
        latent = spec.latent
        width += 2 * (latent.query_rank or 0) + (heads + spec.num_heads + 1) * layer.head_dim
        width += spec.num_heads * (latent.query_dim + latent.value_dim)
    width += 3 * layer.intermediate_size
    if layer.state is not None and isinstance(layer.state.shape, DeltaShape):
        shape = layer.state.shape  # what is mixed, its gates; results in float32, then as they are
        width += shape.channels + shape.value_heads + shape.decays
        width += (2 + FLOAT // 2) * shape.values
    if layer.moe and spec.moe is not None:
        width += spec.moe.top_k * (3 * spec.moe.intermediate_size + 2 * hidden)
    return width + spec.total_layers * spec.per_layer_input_size * 2
