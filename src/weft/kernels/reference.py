"""Plain torch implementations of every op, in float32: the reference of every kernel test."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from weft.kernels import float8
from weft.kernels.arrays import Array, to_torch
from weft.kernels.float8 import Float8
from weft.kernels.interface import AttentionMetadata, Experts, Linear
from weft.kernels.kv_storage import read_rows, write_rows
from weft.kernels.parts import SWIGLU_ALPHA, SWIGLU_LIMIT, limit_of
from weft.kernels.routing import LEAST_SUM, Routing


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, plus_one: bool, centred: bool = False
) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: [..., D].
        weight: [D] or anything that broadcasts to ``x``, such as one weight per head [H, D]; None
            only normalises.
        plus_one: multiply by ``1 + weight``, as Gemma does.
        centred: subtract the mean first, which makes it LayerNorm without a bias (Ba et al. 2016).
    """
    y = x.float()
    if centred:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (1.0 + weight.float() if plus_one else weight.float())
    return y.to(x.dtype)


def square_sums(x: Tensor, first: int) -> Tensor:
    """Return the sums [T, 2] float32 of squares of the first heads of x [T, H, D], and of others.

    Of a norm over all heads of Q, and one over those of K, of which a rank has some; their sums
    over ranks are for ``norm_by_sums``.
    """
    squares = x.float().pow(2)
    return torch.stack([part.sum((1, 2)) for part in (squares[:, :first], squares[:, first:])], 1)


def norm_by_sums(
    x: Tensor, first: int, sums: Tensor, weight: Tensor, eps: float, plus_one: bool, ranks: int
) -> Tensor:
    """Normalise the first heads of x [T, H, D] together, and the others, by their sums over ranks.

    Args:
        sums: [T, 2] float32, see ``square_sums``.
        weight: [H * D].
        ranks: that the sums are of, with as many numbers each.
    """
    heads, size = x.shape[1:]
    counts = (first, heads - first)
    scales = [
        torch.rsqrt(sums[:, i] / (count * size * ranks) + eps).unsqueeze(1).expand(-1, count)
        for i, count in enumerate(counts)
    ]
    factor = weight.float().view(heads, size)
    y = x.float() * torch.cat(scales, 1).unsqueeze(2)
    return (y * (1.0 + factor if plus_one else factor)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2R dimensions of every head, pairing dimension i with i + R.

    Args:
        x: [T, H, D] with D >= 2R; dimensions from 2R on pass unchanged.
        cos, sin: [T, R] float32.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()  # [T, H, R]
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, R] of positions [T] times frequencies [R], both times ``scale``."""
    turns = positions.float().unsqueeze(1) * frequencies  # [T, R]
    return turns.cos() * scale, turns.sin() * scale


def known_ids(ids: Tensor, in_flight: Tensor) -> Tensor:
    """Return ids [T] int64, of which -1 - i stands for number i of ``in_flight`` [R] int64."""
    return torch.where(ids < 0, in_flight[(-1 - ids).clamp_(min=0)], ids)


def act_mul(gate_up: Tensor, activation: str, numbers: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up for ``gate_up`` [..., 2I], gate first -> [..., I].

    ``swiglu_oai`` is that of gpt-oss: (up + 1) * gate * sigmoid(1.702 * gate), where gates are at
    most 7 and the others within [-7, 7]. ``silu`` with a limit (``parts.limited``) is at most that,
    times what is within [-limit, limit] (Step 3.5). ``relu2`` has no gate: it squares what is
    above 0 of [..., I] (So et al. 2021, Primer). ``gelu`` has none; ``geglu`` is the same of gates,
    ``gelu_tanh`` nearly so. ``xielu`` has none, either (Huang and Schlag
    2025), but four ``numbers`` [4]: softplus makes the slope of its square of the first and, less
    that of its linear part, the slope of its exponential of the second; the slope of the linear
    part; and the largest number that the exponential takes.
    """
    if activation == "xielu":
        if numbers is None:
            raise ValueError("xielu needs four numbers")
        square, exponential, slope, largest = numbers.float()
        rise, fall = functional.softplus(square), slope + functional.softplus(exponential)
        x = gate_up.float()
        below = (torch.expm1(torch.minimum(x, largest)) - x) * fall
        y: Tensor = torch.where(x > 0, rise * x * x, below) + slope * x
        return y.to(gate_up.dtype)
    if activation == "gelu":  # with erf, without a gate
        return functional.gelu(gate_up.float()).to(gate_up.dtype)
    if activation == "relu2":
        return functional.relu(gate_up.float()).square().to(gate_up.dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "silu":
        y = functional.silu(gate) * up
    elif (limit := limit_of(activation)) is not None:
        y = functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    elif activation == "geglu":
        y = functional.gelu(gate) * up
    elif activation == "gelu_tanh":
        y = functional.gelu(gate, approximate="tanh") * up
    elif activation == "swiglu_oai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        y = (up + 1) * gate * (SWIGLU_ALPHA * gate).sigmoid()
    else:
        known = "silu, geglu, gelu_tanh, swiglu_oai, relu2, xielu"
        raise ValueError(f"unknown activation '{activation}'; known: {known}")
    return y.to(gate_up.dtype)


def gate(x: Tensor, gates: Tensor, kind: str) -> Tensor:
    """Return heads x [T, H, D] times ``sigmoid`` or ``softplus`` of their gates.

    Args:
        gates: [T, H * D], or one a head [T, H].
    """
    each = gates.shape[1] // x.shape[1]
    factors = gates.float().reshape(*x.shape[:2], each)  # [T, H, D] or [T, H, 1]
    factors = factors.sigmoid() if kind == "sigmoid" else functional.softplus(factors)
    return (x.float() * factors).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., I] @ weight [O, I].T + bias [O] -> [..., O]."""
    y = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return y.to(x.dtype)


def product(x: Tensor, weight: Tensor | Float8, bias: Tensor | None) -> Tensor:
    """Return what ``linear`` does in the arithmetic of the dtype of x; with FP8 in float32."""
    if isinstance(weight, Float8):
        return float8.linear(x, weight, bias)
    return functional.linear(x, weight, bias)


def logits(hidden: Tensor, weight: Tensor | Float8) -> Tensor:
    """Return float32 logits [S, V] of hidden states [S, C] and the output head [V, C]."""
    if isinstance(weight, Float8):
        return float8.linear(hidden, weight, None, torch.float32)
    return functional.linear(hidden, weight).float()


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) of float32 logits [S, V]; they may be overwritten."""
    return cap * torch.tanh(logits / cap)


def embedding(ids: Tensor, table: Tensor | Float8) -> Tensor:
    """Return the rows [T, C] of a table [V, C] by ids [T]."""
    if isinstance(table, Float8):
        codes = table.values.view(torch.uint8)[ids].view(float8.E4M3)
        return (codes.float() * table.scales[ids].unsqueeze(1)).to(table.dtype)
    return functional.embedding(ids, table)


def upload(parameter: str, array: Array, device: torch.device) -> Tensor:  # noqa: ARG001
    """Return a parameter as a tensor on a device; see ``interface.Pack``."""
    return on_device(array, device)


def on_device(array: Array, device: torch.device) -> Tensor:
    """Return numpy's array, or a tensor, as a tensor on a device."""
    tensor = array if isinstance(array, Tensor) else to_torch(array)
    return tensor.to(device)


def heads(x: Tensor, weights: Experts) -> Tensor:
    """Multiply each head of x [T, H, I] with its own one of H matrices [O, I]: [T, H, O]."""
    products = [x[:, i].float() @ weights[i].float().T for i in range(x.shape[1])]
    return torch.stack(products, 1).to(x.dtype)


def route(scores: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by their scores; see ``Routing``.

    Args:
        scores: [T, E].
        bias: [E] float32, is added to the weights by which experts are chosen.

    Returns:
        shares [T, K] float32 and ids [T, K] int64, the best expert first.
    """
    routing.check(scores.shape[1])
    softmax = routing.scoring == "softmax"
    weights = scores.float().softmax(dim=-1) if softmax else scores.float().sigmoid()  # [T, E]
    by = weights if bias is None else weights + bias
    if routing.topk_group < routing.n_group:
        groups = by.view(len(by), routing.n_group, -1)  # [T, G, E / G]
        ranks = groups.topk(routing.group_best, dim=-1).values.sum(dim=-1)  # [T, G]
        lost = torch.ones_like(ranks, dtype=torch.bool)
        lost.scatter_(-1, ranks.topk(routing.topk_group, dim=-1).indices, False)
        by = groups.masked_fill(lost.unsqueeze(-1), -math.inf).flatten(-2)
    experts = by.topk(routing.top_k, dim=-1).indices
    shares = weights.gather(-1, experts)
    if routing.normalise:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return shares * routing.routed_scaling_factor, experts


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Experts,
    down: Experts,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    linear: Linear = linear,
) -> Tensor:
    """Weighted sum of the gated MLPs of each token's experts, tokens grouped by expert.

    Args:
        x: [T, D].
        weights: [T, K] float32, the share of each chosen expert.
        experts: [T, K] int64, the ids of the chosen experts.
        gate_up: E matrices [2I, D], gate rows first.
        down: E matrices [D, I].
        gate_up_bias: [E, 2I].
        down_bias: [E, D].
    """
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # [T * K], pairs grouped by expert
    tokens = order // top_k  # [T * K], the token of each pair
    counts = experts.flatten().bincount(minlength=len(gate_up)).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)  # [T, D]
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        pairs, start = slice(start, start + count), start + count
        rows = tokens[pairs]  # [count]
        first, second = (
            None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)
        )
        y = act_mul(linear(x[rows], gate_up[expert], first), activation)
        y = linear(y, down[expert], second)
        share = weights.flatten()[order[pairs]].unsqueeze(1)  # [count, 1]
        out.index_add_(0, rows, y.float() * share)
    return out.to(x.dtype)


def paged_attention(
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
    value_dim: int | None = None,  # noqa: ARG001 - for kernels that compute nothing else
    causal: bool = True,
) -> Tensor:
    """Write K and V at the batch's slots, then attend over each row's context.

    The queries of row r are the last tokens of its context: the query at position p sees the
    positions (p - window, p], or [0, p] without a window. Padding is as ``AttentionMetadata`` says.

    Args:
        q: [T, H, D]; H is a multiple of Hkv, query head h reads KV head h // (H / Hkv).
        k, v: [T, Hkv, D], or None for a layer that reads KV which another layer has written.
        k_cache, v_cache: [num_blocks, Hkv, block_size, D], written in place; with 8-bit types
            [num_blocks, Hkv, block_size, D + 4], laid out as ``kv_storage`` says.
        scale: factor on the scores; ``softcap`` c then maps a score s to c * tanh(s / c).
        sinks: [H] float32, for each query head a further score, whose value is 0 (Xiao et al. 2023;
            as learnt numbers in gpt-oss).
        causal: a query sees nothing behind its position p; else [p, p + window) as well, or all.
        value_dim: of latent attention, where ``k_cache`` and ``v_cache`` are one array of one KV
            head: so many last numbers of each head's result are wanted, and others may be anything.

    Returns:
        [T, H, D] in the dtype of q.
    """
    if k is not None and v is not None:
        real = batch.slot_mapping >= 0  # [T]
        slots = batch.slot_mapping[real]
        blocks, offsets = slots // batch.block_size, slots % batch.block_size
        write_rows(k_cache, blocks, offsets, k[real])
        write_rows(v_cache, blocks, offsets, v[real])
    out = torch.zeros_like(q)
    tables = batch.block_tables
    bounds, contexts = batch.query_start.tolist(), batch.seq_lens.tolist()
    for row, context in enumerate(contexts):
        queries = slice(bounds[row], bounds[row + 1])
        count = queries.stop - queries.start
        if count == 0:
            continue
        first = 0 if window is None else max(0, context - count - window + 1)
        table = tables[row] if batch.table_start is None else tables[batch.table_start[row] :]
        keys = _gather(k_cache, table, batch.block_size, first, context)
        values = _gather(v_cache, table, batch.block_size, first, context)
        sees = first, window, causal
        out[queries] = _attend_row(q[queries], keys, values, sees, scale, softcap, sinks)
    return out


def _gather(cache: Tensor, table: Tensor, block_size: int, first: int, stop: int) -> Tensor:
    """Return positions [first, stop) of one row as float32 [Hkv, stop - first, D]."""
    first_block = first // block_size
    blocks = table[first_block : -(-stop // block_size)].long()  # [n]
    rows = read_rows(cache, blocks).transpose(0, 1).flatten(1, 2)  # [Hkv, n * block_size, D]
    base = first_block * block_size
    return rows[:, first - base : stop - base]


def _attend_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sees: tuple[int, int | None, bool],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend the queries [n, H, D] of one row over keys of positions [first, first + length).

    Args:
        sees: ``first``, the window, and whether attention is causal.
    """
    first, window, causal = sees
    count, heads, dim = q.shape
    kv_heads, length = keys.shape[:2]
    grouped = q.float().transpose(0, 1).reshape(kv_heads, -1, count, dim)  # [Hkv, G, n, D]
    scores = torch.einsum("hgnd,hld->hgnl", grouped, keys) * scale  # [Hkv, G, n, length]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_position = torch.arange(first, first + length, device=q.device)
    position = torch.arange(first + length - count, first + length, device=q.device).unsqueeze(1)
    visible = (key_position <= position) | (not causal)  # [n, length]
    if window is not None:
        visible &= ((key_position - position) < window) & (key_position > position - window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.view(kv_heads, -1, 1, 1).expand(-1, -1, count, 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(dim=-1)[..., :length]
    out = torch.einsum("hgnl,hld->hgnd", shares, values)  # [Hkv, G, n, D]
    return out.reshape(heads, count, dim).transpose(0, 1).to(q.dtype)
