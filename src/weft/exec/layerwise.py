"""The forward pass in which piggybacked rows come and go between the layers."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from weft.exec.attend import attend_over
from weft.exec.inputs import StepInputs
from weft.exec.piggyback import PiggybackedRows, Rows
from weft.exec.store import KVStore
from weft.kernels.arrays import Array
from weft.kernels.cpu.stack import CpuStack
from weft.models.decoder import Decoder
from weft.models.layers import Angles


class LayerwiseForward:
    """Computes the tokens of a step, and along with them what a host worker has attended to.

    The products of a layer are of all its rows together (OmniServe section 3.2, layer-wise
    batching). The step's own tokens get the bits of ``bind_forward``.
    """

    def __init__(self, decoder: Decoder, store: KVStore, rows: PiggybackedRows) -> None:
        self._decoder, self._store, self._rows = decoder, store, rows
        stack = decoder.bind(store.keys, store.values)
        self._stack = stack if isinstance(stack, CpuStack) else None

    def run(self, inputs: StepInputs, begun: Seq[int], limits: Seq[int]) -> tuple[Array, Rows]:
        """Run every layer.

        Args:
            inputs: the step's own T tokens, or none.
            begun: rows whose next token begins.
            limits: for each layer, how many results of the host it may carry; empty for none.

        Returns:
            normalised hidden states [T + F, C], and the rows [F] of the last F of them, which have
            come through the last layer. ``PiggybackedRows.finish`` ends their tokens.
        """
        if self._stack is not None:
            return self._run_natively(self._stack, inputs, begun, limits)
        decoder, rows = self._decoder, self._rows
        ids, carried = inputs.input_ids, np.array(begun, np.int32)
        tokens = len(ids)
        if len(carried):
            ids = _joined(ids, rows.begin(carried))
        residual = decoder.embed(ids)  # [T + n, C]
        attend = attend_over(decoder, self._store, inputs.groups)
        angles = decoder.angles(inputs.positions)
        for layer in range(decoder.spec.num_layers):
            attended = residual[:0]
            if len(residual):
                qkv = decoder.pre(layer, residual, self._angles(angles, carried))
                if len(carried):
                    theirs = [None if x is None else x[tokens:] for x in qkv]
                    rows.submit(carried, layer, residual[tokens:], *theirs)
                if tokens:
                    attended = attend(layer, *(None if x is None else x[:tokens] for x in qkv))
            residual, carried = residual[:tokens], carried[:0]
            if limits and rows.done_counts()[layer]:
                carried, theirs_attended, waited = rows.take(layer, limits[layer])
                attended, residual = _joined(attended, theirs_attended), _joined(residual, waited)
            if len(residual):
                residual = decoder.post(layer, attended, residual)
        return decoder.finish(residual) if len(residual) else residual, carried

    def _run_natively(
        self, stack: CpuStack, inputs: StepInputs, begun: Seq[int], limits: Seq[int]
    ) -> tuple[Array, Rows]:
        """All layers as one call."""
        rows, begins, ids = self._rows, np.array(begun, np.int32), inputs.input_ids
        if len(begins):
            ids = _joined(ids, rows.begin(begins))
        most = len(rows) + len(begins)
        rows.carried.clear()
        try:
            hidden, _ = stack.run_carrying(
                ids, inputs.positions, inputs.groups, rows.carried,
                begins, np.array(limits, np.int32), most,
            )  # fmt: skip
        finally:
            came = rows.taken_natively()
        return hidden, came

    def _angles(self, own: tuple[Angles, ...], carried: Rows) -> tuple[Angles, ...]:
        """The angles of the step's own tokens and of the rows that it carries."""
        if not len(carried):
            return own
        pairs = zip(own, self._rows.angles(carried), strict=True)
        return tuple(
            (_joined(cos, more_cos), _joined(sin, more_sin))
            for (cos, sin), (more_cos, more_sin) in pairs
        )


def _joined(own: Array, more: Array) -> Array:
    """Rows of both, one after the other; either may be none."""
    if not len(own) or not len(more):
        return own if len(own) else more
    return np.concatenate((own, more))
