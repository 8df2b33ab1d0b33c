"""Launches the kernels beside attention in shapes of real models, for ``ahead``."""

from __future__ import annotations

from typing import Any

import torch

from weft.kernels.advance import LeaseBounds, StepBuffer
from weft.kernels.block_arrays import BlockArrays, block_pairs
from weft.kernels.conv import ConvParts, ConvShape
from weft.kernels.delta import DeltaParts, DeltaShape, LayerStates, StateBatch
from weft.kernels.hosted import HostWord
from weft.kernels.kv_storage import KV_DTYPES, row_size
from weft.kernels.lanes import MOST_LOOKS, LaneOutbox, LaneState, TicketRule
from weft.kernels.mamba2 import Mamba2Parts, Mamba2Shape
from weft.kernels.parts import LatentParts
from weft.kernels.routing import Routing
from weft.kernels.sampling import SETTINGS, RowState, SampleBatch
from weft.kernels.triton import (
    activation,
    advance,
    blocks,
    conv,
    delta,
    embedding,
    hosted,
    lanes,
    latent,
    mamba2,
    norm,
    pdl,
    peer_sum,
    process_logits,
    prologue,
    rope,
    route,
    sample,
    whole_norm,
)
from weft.kernels.triton.gemm import SplitProduct
from weft.kernels.triton.matrix import TritonMatrix
from weft.kernels.tuning import MOST_SPLITS, Heuristic

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM, BLOCK = 8, 3584, 28, 4, 128, 16
VOCABULARY = 152_064
CPU = torch.device("cpu")


def launch(capability: int) -> None:
    codes = torch.float8_e4m3fn if capability >= 89 else torch.bfloat16
    norm.codes_dtype = activation.codes_dtype = lambda _: codes
    pdl.facts.capability = lambda _: divmod(capability, 10)
    launch_rows(torch.bfloat16)
    launch_gates(torch.bfloat16)
    launch_heads(torch.bfloat16)
    launch_latent(torch.bfloat16)
    launch_recurrent(torch.bfloat16)
    launch_choice()
    launch_copies()
    launch_lanes(torch.bfloat16)
    launch_advance()
    launch_peer_sum(torch.bfloat16)


def launch_peer_sum(dtype: torch.dtype) -> None:
    most, memories = 128 * peer_sum.PART_BYTES, torch.zeros(4, dtype=torch.int64)
    epochs, stop = torch.zeros(128, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    add = peer_sum.PeerSum(1, memories, most, epochs, stop)
    for kind in (dtype, torch.float32):
        add(torch.empty(TOKENS, HIDDEN, dtype=kind))


def launch_rows(dtype: torch.dtype) -> None:
    x, weight = torch.empty(TOKENS, HIDDEN, dtype=dtype), torch.empty(HIDDEN, dtype=dtype)
    kind = norm.NormKind(1e-6, False)
    norm.rms_norm(x, weight, 1e-6, False)
    for scores in (torch.empty(TOKENS, 128, dtype=dtype), split(128, dtype)):
        route.route(scores, Routing(8, normalise=True))
    grouped = Routing(8, True, "sigmoid", 8, 4, routed_scaling_factor=2.5)  # beside a gate
    for scores in (torch.empty(TOKENS, 257), split(257, dtype)):
        route.route(scores, grouped, torch.empty(256), torch.empty(TOKENS))
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    embedding.embedding(ids, x)
    codes = torch.empty(TOKENS, HIDDEN, dtype=torch.uint8).view(torch.float8_e4m3fn)
    head = TritonMatrix(codes, torch.empty(TOKENS), dtype, Heuristic(132, 99 * 1024))
    for table, inputs in ((x, "float"), (x, "token"), (head, "token")):
        prologue.enter(ids, ids, table, 8.0, weight, kind, inputs)
    activation.softcap(torch.empty(TOKENS, HIDDEN), 30.0)
    for inputs in ("float", "token"):
        for product in (x, split(HIDDEN, dtype)):
            norm.add_norm(product, x, weight, weight, kind, inputs)
        activation.act_mul_for(inputs, torch.empty(TOKENS, 2 * 18_944, dtype=dtype), "gelu_tanh")
        activation.act_mul_for(inputs, torch.empty(TOKENS, 2 * 1280, dtype=dtype), "silu<=7.0")
    activation.act_mul(torch.empty(TOKENS, 21_504, dtype=dtype), "xielu", torch.empty(4))
    activation.act_mul(torch.empty(TOKENS, 18_432, dtype=dtype), "relu2")


def launch_gates(dtype: torch.dtype) -> None:
    x = torch.empty(TOKENS, HEADS, DIM, dtype=dtype)
    for kind, gates in (("sigmoid", x.flatten(1)), ("softplus", x[:, :, 0])):
        activation.gate(x, gates, kind)


def launch_recurrent(dtype: torch.dtype) -> None:
    """Layers of Qwen3.6-35B-A3B, Kimi-Linear, Ling 3, Granite 4 Small and LFM2, with two slots."""
    words = torch.zeros(TOKENS + 1, dtype=torch.int32)
    batch = StateBatch(words, words[:-1], words[:-1], words[:-1])

    def run(layer: Any, shape: Any, wide: int, opening: int | None) -> None:
        states = LayerStates(*(torch.empty(2, *size) for size in (shape.matrix, shape.kept_inputs)))
        gates = None if opening is None else torch.empty(TOKENS, opening, dtype=dtype)
        layer(torch.empty(TOKENS, wide, dtype=dtype), gates, states, batch)

    for key_heads, by_channel, floor in ((16, False, None), (32, True, None), (32, True, -5.0)):
        shape = DeltaShape(key_heads, 32, 128, 128, 4, by_channel=by_channel)
        taps, weight = torch.empty(shape.channels, shape.taps), torch.empty(shape.value_dim)
        steps = torch.empty(shape.value_heads), torch.empty(shape.decays)
        gating = "sigmoid" if by_channel else "silu"
        layer = delta.TritonDelta(DeltaParts(shape, taps, *steps, weight, 1e-6, gating, floor))
        run(layer, shape, shape.channels + shape.values, shape.value_heads + shape.decays)
    shape = Mamba2Shape(128, 64, 1, 128, 4)
    taps, bias = torch.empty(shape.channels, shape.taps), torch.empty(shape.channels)
    heads, weight = torch.empty(shape.heads), torch.empty(shape.values)
    parts = Mamba2Parts(shape, taps, bias, heads, heads, heads, weight, 1e-6)
    run(mamba2.TritonMamba2(parts), shape, shape.channels + shape.values, shape.heads)
    shape = ConvShape(2048, 3)
    layer = conv.TritonConv(ConvParts(shape, torch.empty(2048, 3), None))
    run(layer, shape, 3 * 2048, None)


def split(outputs: int, dtype: torch.dtype, tokens: int = TOKENS) -> SplitProduct:
    """A product of rounded rows in as many parts as there may be by rule."""
    sums, scales = torch.empty(MOST_SPLITS, tokens, outputs), torch.empty(outputs)
    return SplitProduct(sums, scales[:tokens], scales, scales.to(dtype), dtype)


def launch_heads(dtype: torch.dtype) -> None:
    x = torch.empty(TOKENS, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
    cos, sin = rope.angles(torch.zeros(TOKENS, dtype=torch.int64), torch.empty(DIM // 2), 1.0)
    heads = rope.HeadNorm(torch.empty(HEADS + KV_HEADS, DIM, dtype=dtype), 1e-6, False)
    rope.rope(x, cos, sin)
    sums = whole_norm.square_sums(x[:, : HEADS + KV_HEADS], HEADS)
    whole = torch.empty((HEADS + KV_HEADS) * DIM, dtype=dtype)
    whole_norm.norm_by_sums(x[:, : HEADS + KV_HEADS], HEADS, sums, whole, 1e-6, False, 2)
    for kind in (dtype, *KV_DTYPES.values()):
        caches = [
            torch.empty(4, KV_HEADS, BLOCK, row_size(kind, DIM), dtype=kind) for _ in range(2)
        ]
        places = rope.Places(*caches, torch.zeros(TOKENS, dtype=torch.int64), BLOCK)
        for product in (x, split((HEADS + 2 * KV_HEADS) * DIM, dtype)):
            rope.rotate(product, HEADS, KV_HEADS, cos, sin, heads, places)


def launch_latent(dtype: torch.dtype) -> None:
    """Layers of DeepSeek V3 and V2 Lite, whose queries have a latent and none, in every KV type."""
    launches = Heuristic(132, 99 * 1024)
    cos, sin = torch.empty(2, 64, 32).unbind()
    for heads, queries in ((128, 1536), (16, None)):
        up, norms = None, torch.empty(1536, dtype=dtype)
        if queries is not None:
            up = TritonMatrix(torch.empty(heads * 192, queries, dtype=dtype), None, dtype, launches)
        weights = torch.empty(heads, 512, 128, dtype=dtype)
        parts = LatentParts(64, 1e-6, up, norms, norms[:512], weights, weights.mT.contiguous())
        bound, width = latent.LatentHeads(parts, heads), (queries or heads * 192) + 576
        for tokens, kind in [
            *((TOKENS, kind) for kind in (dtype, *KV_DTYPES.values())),
            (64, dtype),
        ]:
            cache = torch.empty(4, 1, BLOCK, row_size(kind, 576), dtype=kind)
            places = rope.Places(cache, cache, torch.zeros(tokens, dtype=torch.int64), BLOCK)
            for product in (torch.empty(tokens, width, dtype=dtype), split(width, dtype, tokens)):
                bound.queries(product, cos[:tokens], sin[:tokens], places)
            bound.outputs(torch.empty(tokens, heads, 576, dtype=dtype))


def launch_copies() -> None:
    for row in (DIM, 1):  # whole words, and bytes
        arrays = BlockArrays([torch.empty(4, row, dtype=torch.int8)])
        pairs = block_pairs(arrays, arrays, [1], [2])
        blocks.copy_blocks(arrays, arrays, pairs, torch.clone)


def launch_lanes(dtype: torch.dtype) -> None:
    """64 lanes of 1024 rows, and of a layer with and without keys of its own."""
    count, rule = 64, TicketRule(28, 64)
    state = LaneState.empty(1024, HEADS * DIM, HIDDEN, "bfloat16", CPU)
    line = torch.zeros(count, dtype=torch.int64)
    residual = torch.empty(TOKENS + count, HIDDEN, dtype=dtype)
    qkv = torch.empty(TOKENS + count, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    number = torch.zeros(1, dtype=torch.int64)
    lanes.choose_lanes(state, torch.zeros(28, dtype=torch.int32), 3, rule, line)
    attended = torch.empty(TOKENS, HEADS, DIM, dtype=dtype)
    positions = torch.zeros(TOKENS + count, dtype=torch.int64)
    lanes.join_lanes(state, line, attended, residual, positions)
    lanes.keep_lanes(state, line, residual, number, 3, rule)
    outbox = LaneOutbox(torch.empty(1024, qkv.shape[1] * DIM, dtype=dtype), number, 3584, 4096)
    lanes.send_lanes(line, q, k, v, outbox)
    lanes.send_lanes(line, q.contiguous(), None, None, outbox)
    for tokens in (TOKENS, 512):
        line = torch.zeros(tokens, dtype=torch.int64)
        lanes.wait_for_lanes(state, line, number, number, MOST_LOOKS)
    lanes.receive_lanes(state, line[:TOKENS], attended)
    word = HostWord(number, number)
    hosted.await_answer(word, number, word, MOST_LOOKS)


def launch_choice() -> None:
    rows = torch.zeros(TOKENS, dtype=torch.int64)
    settings = torch.zeros(TOKENS, len(SETTINGS), dtype=torch.float64)
    finite = torch.zeros(TOKENS).bool()
    logits, words = torch.empty(TOKENS, VOCABULARY), torch.zeros(TOKENS, dtype=torch.int32)
    samples, state = SampleBatch(rows, rows, words, words), RowState.empty(1, 1184, VOCABULARY, CPU)
    process_logits.process_logits(logits, samples, state)
    sample.sample(logits, settings, rows, rows, rows, finite)
    process_logits.verify_drafts(
        rows, finite, samples, state, torch.zeros(TOKENS, 2, dtype=torch.int64)
    )


def launch_advance() -> None:
    """Steps of few rows and of many, with one KV group and with two."""
    for tokens, groups in ((TOKENS, 1), (512, 2)):
        numbers, words = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens + 1).int()
        step = StepBuffer(
            numbers, numbers, numbers.expand(groups, -1), words, words[:-1],
            words[:-1].expand(groups, -1), words, numbers, numbers, words, numbers[:2], BLOCK,
        )  # fmt: skip
        bounds = LeaseBounds.empty(512, [0] * groups, torch.zeros(1).int(), 512, CPU)
        advance.advance(step, bounds, torch.zeros(tokens, 2, dtype=torch.int64))
