"""Lanes of captured steps: which rows of the host's results a layer takes, and where they go.

One small program chooses, one program a row copies. Only overlapped sub-batches wait for the host,
in one small program, too. The only memory of the host that any of them touches is the outbox, which
they write. What reads a result is another kernel than the one that has seen its ticket, so that it
finds what was written before the ticket.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.lanes import LaneOutbox, LaneState, TicketRule
from weft.kernels.triton.launch import last_contiguous, power_of_2

_BLOCK = 1024  # numbers that a program copies at once
_NEVER = tl.constexpr(2**62)  # larger than any ticket


@triton.jit
def _last_ticket(left, most):
    """The ticket that the first ``most`` of more tickets end with; what is not one is larger."""
    low, high = tl.min(left, 0), tl.max(tl.where(left < _NEVER, left, 0), 0)
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum((left <= middle).to(tl.int32), 0) >= most
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["layer", "rows"])
def _choose_lanes(
    jobs, arrived, limits, layer, lanes, rows,
    LAYERS: tl.constexpr, LANES: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, lane = tl.arange(0, ROWS), tl.arange(0, MOST)
    job = tl.load(jobs + row, mask=row < rows, other=0)
    # Another stream writes tickets meanwhile; an atomic reads them where that has written them.
    nothing = tl.zeros([ROWS], tl.int64)
    here = tl.atomic_or(arrived + row, nothing, mask=row < rows, sem="acquire", scope="gpu")
    ready = (row < rows) & (job > 0) & (here == job) & ((job // LANES) % LAYERS == layer)
    most = tl.minimum(tl.load(limits + layer), LANES)
    last = tl.full([], _NEVER, tl.int64)
    if tl.sum(ready.to(tl.int32), 0) > most:
        last = _last_ticket(tl.where(ready, job, _NEVER), most)
    chosen = ready & (job <= last) & (most > 0)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(lanes + place, row.to(tl.int64), mask=chosen)
    tl.store(jobs + row, -job, mask=chosen)
    count = tl.sum(chosen.to(tl.int32), 0)
    empty = tl.zeros([MOST], tl.int64) + rows
    tl.store(lanes + lane, empty, mask=(lane >= count) & (lane < LANES))


@triton.jit
def _copy_row(source, target, size, BLOCK: tl.constexpr):
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < size, other=0.0), mask=at < size)


@triton.jit
def _zero_row(target, size, BLOCK: tl.constexpr):
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], target.dtype.element_ty)
        tl.store(target + at, zeros, mask=at < size)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _join_lanes(
    lanes, results, residuals, kept_positions, attended, joined, residual, positions, tokens, rows,
    RESULT: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    if at < tokens:
        _copy_row(attended + at * WIDTH, joined + at * WIDTH, WIDTH, BLOCK)
    else:
        row = tl.load(lanes + (at - tokens))
        if row < rows:
            _copy_row(results + row * RESULT, joined + at * WIDTH, WIDTH, BLOCK)
            _copy_row(residuals + row * HIDDEN, residual + at * HIDDEN, HIDDEN, BLOCK)
            tl.store(positions + at, tl.load(kept_positions + row))
        else:
            _zero_row(joined + at * WIDTH, WIDTH, BLOCK)
            _zero_row(residual + at * HIDDEN, HIDDEN, BLOCK)
            tl.store(positions + at, tl.zeros([], tl.int64))


@triton.jit(do_not_specialize=["tokens", "layer", "rows"])
def _keep_lanes(
    lanes, residual, residuals, jobs, serial, tokens, layer, rows,
    LAYERS: tl.constexpr, LANES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(lanes + lane)
    if row < rows:
        source = residual + (tokens + lane) * HIDDEN
        _copy_row(source, residuals + row * HIDDEN, HIDDEN, BLOCK)
        tl.store(jobs + row, (tl.load(serial) * LAYERS + layer) * LANES + lane)


@triton.jit
def _send_heads(
    part, target, HEAD: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        numbers = tl.load(part + at // DIM * HEAD + at % DIM, mask=at < SIZE, other=0.0)
        tl.store(target + at, numbers, mask=at < SIZE)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _send_lanes(
    lanes, q, k, v, address, tokens, rows, q_stride, k_stride, v_stride,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROW: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(lanes + lane)
    if row < rows:
        at = tokens + lane
        target = tl.load(address).to(tl.pointer_type(q.dtype.element_ty)) + row * ROW
        _send_heads(q + at * q_stride, target, Q_HEAD, DIM, QUERIES, BLOCK)
        if KEYS > 0:
            _send_heads(k + at * k_stride, target + K_AT, K_HEAD, DIM, KEYS, BLOCK)
            _send_heads(v + at * v_stride, target + V_AT, V_HEAD, DIM, KEYS, BLOCK)


@triton.jit(
    do_not_specialize=["count", "rows", "looks"],
    do_not_specialize_on_alignment=["lanes", "ticket", "gave_up"],
)
def _wait_for_lanes(arrived, lanes, ticket, gave_up, count, rows, looks, MOST: tl.constexpr):
    lane = tl.arange(0, MOST)
    row = tl.load(lanes + lane, mask=lane < count, other=rows)
    wanted, nothing = tl.load(ticket), tl.zeros([MOST], tl.int64)
    ended, waiting, left = 0, tl.sum((row < rows).to(tl.int32), 0), looks
    while waiting > 0:
        # Another stream writes tickets meanwhile; an atomic reads them where that has written them.
        here = tl.atomic_or(arrived + row, nothing, mask=row < rows, sem="acquire", scope="gpu")
        missing = tl.sum(((row < rows) & (here < wanted)).to(tl.int32), 0)
        stop = tl.atomic_or(arrived + rows, 0, sem="acquire", scope="gpu") != 0
        left -= 1
        ended = ((missing > 0) & (stop | (left <= 0))).to(tl.int32)
        waiting = tl.where(ended > 0, 0, missing)
    if ended > 0:
        tl.store(gave_up, tl.full([], 1, tl.int64))


@triton.jit(do_not_specialize=["rows"])
def _receive_lanes(
    lanes, results, attended, rows, RESULT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(lanes + at)
    if row < rows:
        _copy_row(results + row * RESULT, attended + at * WIDTH, WIDTH, BLOCK)


def choose_lanes(
    state: LaneState, limits: Tensor, layer: int, rule: TicketRule, lanes: Tensor
) -> None:
    """Take results that are here; see ``reference_lanes.choose_lanes``."""
    rows = len(state.jobs) - 1
    size = power_of_2(rows)
    _choose_lanes[(1,)](
        state.jobs, state.arrived, limits, layer, lanes, rows,
        LAYERS=rule.layers, LANES=rule.lanes, MOST=power_of_2(rule.lanes), ROWS=size,
        num_warps=max(1, min(8, size // 128)), num_stages=1,
    )  # fmt: skip


def join_lanes(
    state: LaneState, lanes: Tensor, attended: Tensor, residual: Tensor, positions: Tensor
) -> Tensor:
    """Put rows of lanes behind those of a step; see ``reference_lanes.join_lanes``.

    Raises:
        ValueError: a tensor has gaps.
    """
    tokens, heads, dim = attended.shape
    attended = attended.contiguous()
    if not residual.is_contiguous():
        raise ValueError("residuals that lanes join must be contiguous")
    joined = attended.new_empty((tokens + len(lanes), heads, dim))
    _join_lanes[(len(joined),)](
        lanes, state.results, state.residuals, state.positions, attended, joined, residual,
        positions, tokens, len(state.jobs) - 1, RESULT=state.results.shape[1], WIDTH=heads * dim,
        HIDDEN=residual.shape[1], BLOCK=_BLOCK, num_warps=4, num_stages=1,
    )  # fmt: skip
    return joined


def keep_lanes(
    state: LaneState, lanes: Tensor, residual: Tensor, serial: Tensor, layer: int, rule: TicketRule
) -> None:
    """Keep residuals and give tickets; see ``reference_lanes.keep_lanes``.

    Raises:
        ValueError: the residuals have gaps.
    """
    if not residual.is_contiguous():
        raise ValueError("residuals that are kept must be contiguous")
    _keep_lanes[(len(lanes),)](
        lanes, residual, state.residuals, state.jobs, serial, len(residual) - len(lanes), layer,
        len(state.jobs) - 1, LAYERS=rule.layers, LANES=rule.lanes, HIDDEN=residual.shape[1],
        BLOCK=_BLOCK, num_warps=4, num_stages=1,
    )  # fmt: skip


def send_lanes(
    lanes: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, outbox: LaneOutbox
) -> None:
    """Write q, k and v to the host's memory; see ``reference_lanes.send_lanes``."""
    q = last_contiguous(q)
    keys, values = (q if part is None else last_contiguous(part) for part in (k, v))
    (tokens, heads, dim), (rows, numbers) = q.shape, outbox.memory.shape
    _send_lanes[(len(lanes),)](
        lanes, q, keys, values, outbox.address, tokens - len(lanes), rows,
        q.stride(0), keys.stride(0), values.stride(0),
        Q_HEAD=q.stride(1), K_HEAD=keys.stride(1), V_HEAD=values.stride(1), DIM=dim,
        QUERIES=heads * dim, KEYS=0 if k is None else keys.shape[1] * dim, ROW=numbers,
        K_AT=outbox.keys, V_AT=outbox.values, BLOCK=_BLOCK, num_warps=4, num_stages=1,
    )  # fmt: skip


def wait_for_lanes(
    state: LaneState, lanes: Tensor, ticket: Tensor, gave_up: Tensor, looks: int
) -> None:
    """Wait for results, in memory of the GPU alone; see ``reference_lanes.wait_for_lanes``.

    Other streams must be able to run meanwhile, and nothing may load a kernel before they have: the
    driver may want to wait for this one then.
    """
    size = power_of_2(len(lanes))
    _wait_for_lanes[(1,)](
        state.arrived, lanes, ticket, gave_up, len(lanes), len(state.jobs) - 1, looks, MOST=size,
        num_warps=max(1, min(8, size // 128)), num_stages=1,
    )  # fmt: skip


def receive_lanes(state: LaneState, lanes: Tensor, attended: Tensor) -> None:
    """Overwrite attention by the host's results; see ``reference_lanes.receive_lanes``.

    Raises:
        ValueError: the attention has gaps.
    """
    if not attended.is_contiguous():
        raise ValueError("attention that results of the host join must be contiguous")
    width = attended[0].numel()
    _receive_lanes[(len(lanes),)](
        lanes, state.results, attended, len(state.jobs) - 1, RESULT=state.results.shape[1],
        WIDTH=width, BLOCK=_BLOCK, num_warps=4, num_stages=1,
    )  # fmt: skip
