"""Lanes of captured steps in Triton: the very rows, bits and tickets of the reference."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import where
from weft.kernels import reference_lanes
from weft.kernels.lanes import LaneOutbox, LaneState, TicketRule
from weft.kernels.triton import lanes

LAYERS = 5
EXACT = {"rtol": 0, "atol": 0}


def state_of(rows: int, rule: TicketRule, share: float, dtype: str = "float32") -> LaneState:
    """Rows of which some have a token, some of those a result, and some of these an old one."""
    state = LaneState.empty(rows, 96, 40, dtype, where.NAME)
    generator = torch.Generator(where.NAME).manual_seed(rows)
    tickets = torch.randperm(50 * LAYERS * rule.lanes, generator=generator)[:rows]
    state.jobs[:rows] = tickets + rule.first(1)
    draw = torch.rand(rows, generator=generator)
    state.jobs[:rows][draw < 0.1] = 0
    state.jobs[:rows][(draw >= 0.1) & (draw < 0.2)] *= -1
    state.arrived[:rows] = torch.where(draw > 1 - share, state.jobs[:rows], 7)
    for tensor in (state.results, state.residuals):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    state.positions.copy_(torch.arange(rows + 1) * 3)
    return state


def cloned(state: LaneState) -> LaneState:
    return replace(state, **{name: tensor.clone() for name, tensor in vars(state).items()})


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
@pytest.mark.parametrize(("rows", "count"), [(1, 4), (7, 32), (100, 4), (300, 32)])
def test_the_oldest_results_of_a_layer_are_taken(rows, count, share) -> None:
    rule, taken = TicketRule(LAYERS, count), 0
    state = state_of(rows, rule, share)
    for layer in range(LAYERS):
        for limit in (3, 0, 10**6, -1):
            limits = torch.full((LAYERS,), -5, dtype=torch.int32)
            limits[layer] = limit
            wanted = cloned(state)
            lines = [torch.full((count,), 99) for _ in range(2)]
            reference_lanes.choose_lanes(wanted, limits, layer, rule, lines[0])
            lanes.choose_lanes(state, limits, layer, rule, lines[1])
            assert torch.equal(*lines)
            for name, tensor in vars(state).items():
                assert torch.equal(tensor, getattr(wanted, name)), name
            taken += int((lines[0] < rows).sum())
    assert taken > 0 or share == 0 or rows == 1


def some_lanes(rows: int) -> torch.Tensor:
    """A row in every second lane."""
    line = torch.full((8,), rows)
    line[::2] = torch.tensor([4, 0, rows - 1, 2])
    return line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 3, 32), (5, 2, 20), (3, 1, 7)])
def test_rows_join_those_of_a_step(tokens, heads, dim, dtype) -> None:
    """With zeros where a lane is empty, whatever lay there."""
    state = state_of(9, TicketRule(LAYERS, 8), 0.5, str(dtype).removeprefix("torch."))
    line = some_lanes(9)
    attended = torch.randn(tokens, heads, dim, dtype=dtype)
    found = []
    for ops in (reference_lanes, lanes):
        residual = torch.full((tokens + 8, 40), float("nan"), dtype=dtype)
        residual[:tokens] = 2.5
        positions = torch.full((tokens + 8,), 11)
        joined = ops.join_lanes(state, line, attended, residual, positions)
        found.append((joined, residual, positions))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, **EXACT)
    assert torch.isfinite(found[1][1]).all()


def test_rows_that_go_on_are_kept_with_a_new_ticket() -> None:
    rule, line, serial = TicketRule(LAYERS, 8), some_lanes(9), torch.tensor([41])
    state = state_of(9, rule, 0.5)
    wanted = cloned(state)
    residual = torch.randn(11, 40)
    reference_lanes.keep_lanes(wanted, line, residual, serial, 3, rule)
    lanes.keep_lanes(state, line, residual, serial, 3, rule)
    for name, tensor in vars(state).items():
        torch.testing.assert_close(tensor, getattr(wanted, name), **EXACT)
    assert state.jobs[0] == rule.first(41) + 3 * 8 + 2
    assert rule.layer_of(int(state.jobs[0])) == 3


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_queries_keys_and_values_leave_for_the_host(fused, writes) -> None:
    """Also out of one tensor that has the heads of all of them."""
    line, found = some_lanes(9), []
    heads = torch.randn(11, 7, 20)
    q, k, v = heads[:, :3], heads[:, 3:5], heads[:, 5:]
    if not fused:
        q, k, v = q.contiguous(), k.contiguous(), v.transpose(1, 2).contiguous().transpose(1, 2)
    for ops in (reference_lanes, lanes):
        memory = torch.zeros(9, 160, device="cpu", pin_memory=where.ON_GPU)
        outbox = LaneOutbox(memory, torch.tensor([memory.data_ptr()]), 64, 112)
        ops.send_lanes(line, q, *((k, v) if writes else (None, None)), outbox)
        if where.ON_GPU:
            torch.cuda.synchronize()
        found.append(memory)
    assert torch.equal(*found)
    assert found[0][0].any()
    assert found[0][0, 64:].any() == writes
    assert not found[0][1].any()


def overlapped(state: LaneState, ticket: int) -> torch.Tensor:
    """A lane for each of eight tokens; the results of the rows in every second one are here."""
    line = some_lanes(9)
    state.arrived.zero_()
    state.arrived[line[::2]] = torch.tensor([ticket, ticket + 3, ticket, ticket])
    return line


@pytest.mark.parametrize("case", ["here", "empty", "missing", "ended"])
def test_results_are_awaited_until_somebody_ends_it(case) -> None:
    """What is missing is not awaited for ever, either."""
    state, ticket, found = state_of(9, TicketRule(LAYERS, 1), 0.5), 207, []
    line = overlapped(state, ticket)
    if case == "empty":
        line[:] = 9
    elif case != "here":
        state.arrived[4] = ticket - 1
    looks = 2**40 if case == "ended" else 20
    if case == "ended":
        state.arrived[9] = 1
    for ops in (reference_lanes, lanes):
        gave_up = torch.zeros(1, dtype=torch.int64)
        ops.wait_for_lanes(state, line, torch.tensor([ticket]), gave_up, looks)
        found.append(int(gave_up))
    assert found == 2 * [int(case in ("missing", "ended"))]


@pytest.mark.skipif(where.ON_GPU, reason="reads a GPU's memory while it waits")
def test_a_result_that_comes_meanwhile_ends_the_wait() -> None:
    state, gave_up = state_of(9, TicketRule(LAYERS, 1), 0.5), torch.zeros(1, dtype=torch.int64)
    line = overlapped(state, 207)
    state.arrived[4] = 0
    come = threading.Timer(0.2, lambda: state.arrived.__setitem__(4, 207))
    come.start()
    lanes.wait_for_lanes(state, line, torch.tensor([207]), gave_up, 2**40)
    come.join()
    assert not gave_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 32), (2, 20), (1, 7)])
def test_results_take_the_places_of_their_tokens(heads, dim, dtype) -> None:
    state = state_of(9, TicketRule(LAYERS, 1), 0.5, str(dtype).removeprefix("torch."))
    line, found = some_lanes(9), []
    given = torch.randn(8, heads, dim, dtype=dtype)
    for ops in (reference_lanes, lanes):
        found.append(given.clone())
        ops.receive_lanes(state, line, found[-1])
    torch.testing.assert_close(*found, **EXACT)
    torch.testing.assert_close(found[1][1::2], given[1::2], **EXACT)
    assert not torch.equal(found[1][0], given[0])
