"""The gated delta rule in plain torch, token by token: the truth of the tests of every kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weft.kernels.delta import DeltaParts, LayerStates, StateBatch


class ReferenceDelta:
    """A layer by the gated delta rule (Yang et al. 2024, equation 10), as Qwen3-Next has it.

    With S [Dk, Dv] of a value head, in float32, token by token: ``delta = beta (v - g S^T k)``,
    ``o = g S^T q + (k q) delta``, ``S = g S + k delta^T``. Where each channel of a key has a decay
    of its own, g is a diagonal matrix [Dk, Dk] (Kimi Linear 2025, equation 1). A token's result
    depends on the state before it and on nothing else, wherever a prompt is cut.
    """

    def __init__(self, parts: DeltaParts) -> None:
        self._shape, self._eps = parts.shape, parts.norm_eps
        self._conv = parts.conv.float().T.contiguous()  # [K, channels]
        self._decay = -parts.decay.float().exp()  # [Hv]
        self._bias, self._norm = parts.bias.float(), parts.norm.float()
        self._floor = parts.floor
        self._gating = functional.silu if parts.gating == "silu" else torch.sigmoid

    def __call__(self, x: Tensor, gates: Tensor, states: LayerStates, batch: StateBatch) -> Tensor:
        """Return [T, Hv, Dv] in the dtype of x, and write the states of all rows.

        Args:
            x: [T, channels + Hv * Dv]: q, k and v before the convolution, then the norm's gate.
            gates: [T, Hv + decays]: those of beta, then of the time step.
        """
        shape, heads = self._shape, self._shape.value_heads
        mixed, z = x[:, : shape.channels].float(), x[:, shape.channels :].float()
        beta = gates[:, :heads].float().sigmoid()  # [T, Hv]
        decay = self._decays(gates[:, heads:].float() + self._bias)  # [T, Hv, Dk or 1]
        out = torch.zeros(len(x), heads, shape.value_dim)
        bounds, marks = batch.bounds.tolist(), dict(batch.marks.tolist())
        for row, read in enumerate(batch.reads.tolist()):
            inputs = torch.zeros(shape.kept_inputs) if read < 0 else states.inputs[read]
            matrix = torch.zeros(shape.matrix) if read < 0 else states.matrices[read].clone()
            matrix = matrix.view(heads, shape.key_dim, shape.value_dim)
            start, stop = bounds[row], bounds[row + 1]
            inputs = torch.cat((inputs, mixed[start:stop]))  # [K - 1 + n, channels]
            q, k, v = self._convolve(inputs, stop - start)
            for token in range(start, stop):
                at = token - start
                matrix = matrix * decay[token].unsqueeze(-1)
                by_key = (matrix * k[at].unsqueeze(-1)).sum(1)  # [Hv, Dv]
                by_query = (matrix * q[at].unsqueeze(-1)).sum(1)
                delta = (v[at] - by_key) * beta[token].unsqueeze(-1)
                product = (k[at] * q[at]).sum(-1, keepdim=True)
                out[token] = by_query + product * delta
                matrix = matrix + k[at].unsqueeze(-1) * delta.unsqueeze(1)
                if token in marks:
                    _write(states, marks[token], matrix, inputs[at + 1 :][: shape.taps - 1])
            _write(states, int(batch.writes[row]), matrix, inputs[stop - start :])
        return self._gated_norm(out, z).to(x.dtype)

    def _decays(self, times: Tensor) -> Tensor:
        """Return the decays [T, Hv, Dk or 1] of time steps [T, decays]."""
        times, rate = times.view(len(times), len(self._decay), -1), self._decay.unsqueeze(-1)
        if self._floor is not None:
            return torch.exp(self._floor * (-rate * times).sigmoid())
        return torch.exp(rate * functional.softplus(times))

    def _convolve(self, inputs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k [n, Hv, Dk] and v [n, Hv, Dv] of the last ``count`` inputs."""
        shape = self._shape
        mixed = torch.zeros(count, shape.channels)
        for tap, weight in enumerate(self._conv):
            mixed = mixed + inputs[tap : tap + count] * weight
        q, k, v = torch.split(
            functional.silu(mixed), [shape.keys, shape.keys, shape.values], dim=-1
        )
        each = shape.value_heads // shape.key_heads
        q, k = (
            part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            for part in (p.view(count, shape.key_heads, shape.key_dim) for p in (q, k))
        )
        q, k = (
            part.repeat(1, each, 1) if shape.tiled else part.repeat_interleave(each, 1)
            for part in (q, k)
        )
        return q * shape.key_dim**-0.5, k, v.view(count, shape.value_heads, shape.value_dim)

    def _gated_norm(self, x: Tensor, z: Tensor) -> Tensor:
        """Normalise x [T, Hv, Dv] and multiply by what the gate z [T, Hv * Dv] opens."""
        x = x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt() * self._norm
        return x * self._gating(z).view(x.shape)


def _write(states: LayerStates, slot: int, matrix: Tensor, inputs: Tensor) -> None:
    states.matrices[slot] = matrix.flatten(1)
    states.inputs[slot] = inputs
