"""Lanes of captured steps in plain tensor operations: the truth of the tests of their kernels.

Of R rows, lane number i has row ``lanes[i]``, or R if it is empty. Imports no torch, as the table
of CPU ops names these functions, too.
"""

from __future__ import annotations

import time

from weft.kernels.arrays import Array
from weft.kernels.lanes import LaneOutbox, LaneState, TicketRule

LOOK_S = 2e-5  # between looks for a result


def choose_lanes(
    state: LaneState, limits: Array, layer: int, rule: TicketRule, lanes: Array
) -> None:
    """Take results of a layer that are here into lanes: those first that were first submitted.

    Args:
        state: jobs whose results are taken become negative.
        limits: [L] int32, how many each layer may take; more than there are lanes means all.
        lanes: [K] int64 gets the rows, ascending, then R.
    """
    jobs, most = state.jobs, min(int(limits[layer]), len(lanes))
    ready = (jobs > 0) & (jobs == state.arrived) & (rule.layer_of(jobs) == layer)
    (rows,) = ready.nonzero(as_tuple=True)
    chosen = rows[jobs[rows].argsort()][: max(most, 0)].sort().values
    lanes.fill_(len(jobs) - 1)
    lanes[: len(chosen)] = chosen
    jobs[chosen] *= -1


def join_lanes(
    state: LaneState, lanes: Array, attended: Array, residual: Array, positions: Array
) -> Array:
    """Put the rows of lanes [K] behind the T tokens of a step; zeros for lanes that are empty.

    Args:
        attended: [T, H, D] of the step's own tokens.
        residual: [T + K, C]; the last K are overwritten.
        positions: [T + K] int64; the last K are overwritten.

    Returns:
        attended [T + K, H, D].
    """
    tokens, heads, dim = attended.shape
    joined = attended.new_empty((tokens + len(lanes), heads, dim))
    joined[:tokens] = attended
    width = heads * dim
    empty = lanes == len(state.jobs) - 1
    results = state.results[lanes, :width].masked_fill(empty[:, None], 0)
    joined[tokens:] = results.view(-1, heads, dim)
    residual[tokens:] = state.residuals[lanes].masked_fill(empty[:, None], 0)
    positions[tokens:] = state.positions[lanes].masked_fill(empty, 0)
    return joined


def keep_lanes(
    state: LaneState, lanes: Array, residual: Array, serial: Array, layer: int, rule: TicketRule
) -> None:
    """Keep the residuals of rows that go on in a layer, and give each of them a new ticket.

    Args:
        residual: [T + K, C] of which the last K are those of lanes [K].
        serial: [1] int64, the number of the step.
    """
    first = (int(serial[0]) * rule.layers + layer) * rule.lanes
    for lane, row in enumerate(lanes.tolist()):
        if row < len(state.jobs) - 1:
            state.residuals[row] = residual[len(residual) - len(lanes) + lane]
            state.jobs[row] = first + lane


def send_lanes(
    lanes: Array, q: Array, k: Array | None, v: Array | None, outbox: LaneOutbox
) -> None:
    """Write q, k and v of lanes [K] to the host's memory, each row's where the host looks for it.

    Args:
        q: [T + K, H, D], of which the last K are those of the lanes.
        k, v: [T + K, Hkv, D] likewise; both None where a layer has none.
    """
    for part, place in ((q, 0), (k, outbox.keys), (v, outbox.values)):
        if part is None:
            continue
        for lane, row in enumerate(lanes.tolist()):
            if row < len(outbox.memory):
                mine = part[len(part) - len(lanes) + lane].reshape(-1)
                outbox.memory[row, place : place + len(mine)] = mine


def wait_for_lanes(
    state: LaneState, lanes: Array, ticket: Array, gave_up: Array, looks: int
) -> None:
    """Wait until results with a ticket are here, for the rows of all lanes [N] that are not empty.

    Args:
        ticket: [1] int64; later ones will do.
        gave_up: [1] int64, becomes 1 if ``state`` says so, or results are not here after so many
            looks.
    """
    rows = lanes[lanes < len(state.jobs) - 1]
    for _ in range(looks):
        if bool((state.arrived[rows] >= ticket).all()):
            return
        if int(state.arrived[-1]) != 0:
            break
        time.sleep(LOOK_S)
    gave_up.fill_(1)


def receive_lanes(state: LaneState, lanes: Array, attended: Array) -> None:
    """Overwrite the attention of tokens by the host's results, where their lanes are not empty.

    Args:
        lanes: [N], one for each token.
        attended: [N, H, D].
    """
    (mine,) = (lanes < len(state.jobs) - 1).nonzero(as_tuple=True)
    heads, dim = attended.shape[1:]
    attended[mine] = state.results[lanes[mine], : heads * dim].view(-1, heads, dim)
