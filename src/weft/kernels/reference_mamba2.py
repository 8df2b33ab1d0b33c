"""Mamba-2 in plain torch, token by token: the truth of the tests of every kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weft.kernels.delta import LayerStates, StateBatch
from weft.kernels.mamba2 import Mamba2Parts


class ReferenceMamba2:
    """A layer by Mamba-2 (Dao and Gu 2024, equation 2), behind a short convolution.

    With S [N, P] of a head, in float32, token by token: ``S = exp(A t) S + B (t x)^T``,
    ``y = S^T C + D x``, where t is the token's time step.
    """

    def __init__(self, parts: Mamba2Parts) -> None:
        self._shape, self._eps, self._limits = parts.shape, parts.norm_eps, parts.time_limits
        self._conv = parts.conv.float().T.contiguous()  # [K, channels]
        self._conv_bias = torch.zeros(parts.shape.channels)
        if parts.conv_bias is not None:
            self._conv_bias = parts.conv_bias.float()
        self._decay = -parts.decay.float().exp()  # [H]
        self._bias, self._skip = parts.bias.float(), parts.skip.float()
        self._norm = parts.norm.float()

    def __call__(self, x: Tensor, gates: Tensor, states: LayerStates, batch: StateBatch) -> Tensor:
        """Return [T, H, P] in the dtype of x, and write the states of all rows.

        Args:
            x: [T, channels + H * P]: x, B and C before the convolution, then the norm's gate.
            gates: [T, H]: those of the time step.
        """
        shape = self._shape
        mixed, z = x[:, : shape.channels].float(), x[:, shape.channels :].float()
        step = functional.softplus(gates.float() + self._bias).clamp(*self._limits)  # [T, H]
        decay = (self._decay * step).exp()
        out = torch.empty(len(x), shape.heads, shape.head_dim)
        bounds, marks = batch.bounds.tolist(), dict(batch.marks.tolist())
        for row, read in enumerate(batch.reads.tolist()):
            inputs = torch.zeros(shape.kept_inputs) if read < 0 else states.inputs[read]
            matrix = torch.zeros(shape.matrix) if read < 0 else states.matrices[read].clone()
            matrix = matrix.view(shape.heads, shape.state_dim, shape.head_dim)
            start, stop = bounds[row], bounds[row + 1]
            inputs = torch.cat((inputs, mixed[start:stop]))  # [K - 1 + n, channels]
            values, keys, queries = self._convolve(inputs, stop - start)
            for token in range(start, stop):
                at = token - start
                added = (values[at] * step[token].unsqueeze(-1)).unsqueeze(1)  # [H, 1, P]
                matrix = matrix * decay[token].view(-1, 1, 1) + keys[at].unsqueeze(-1) * added
                found = (matrix * queries[at].unsqueeze(-1)).sum(1)  # [H, P]
                out[token] = found + values[at] * self._skip.unsqueeze(-1)
                if token in marks:
                    _write(states, marks[token], matrix, inputs[at + 1 :][: shape.taps - 1])
            _write(states, int(batch.writes[row]), matrix, inputs[stop - start :])
        return self._gated_norm(out.flatten(1), z).view(out.shape).to(x.dtype)

    def _convolve(self, inputs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [n, H, P], B and C [n, H, N] of the last ``count`` inputs."""
        shape = self._shape
        mixed = self._conv_bias.expand(count, -1)
        for tap, weight in enumerate(self._conv):
            mixed = mixed + inputs[tap : tap + count] * weight
        sizes = [shape.values, shape.keys, shape.keys]
        values, *others = torch.split(functional.silu(mixed), sizes, dim=-1)
        keys, queries = (
            part.view(count, shape.groups, -1).repeat_interleave(shape.heads // shape.groups, 1)
            for part in others
        )
        return values.view(count, shape.heads, shape.head_dim), keys, queries

    def _gated_norm(self, x: Tensor, z: Tensor) -> Tensor:
        """Multiply x [T, H * P] by silu of the gate z, and normalise each group of heads."""
        grouped = (x * functional.silu(z)).view(len(x), self._shape.groups, -1)
        grouped = grouped * (grouped.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        normalised: Tensor = grouped.flatten(1) * self._norm
        return normalised


def _write(states: LayerStates, slot: int, matrix: Tensor, inputs: Tensor) -> None:
    states.matrices[slot] = matrix.flatten(1)
    states.inputs[slot] = inputs
