"""A sub-batch on its way through the layers, with rows for which a host worker attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import Array, address, empty
from weft.kernels.cpu.host import HostMailbox
from weft.kernels.cpu.stack import CpuStack, attention_views, checked_tokens
from weft.kernels.interface import AttentionMetadata


class LanePart(NamedTuple):
    """Tokens that the calling thread attends to.

    Attributes:
        stack: the model over the caches where their KV lies.
        tokens: how many there are.
        groups: the attention metadata of each KV group.
    """

    stack: CpuStack
    tokens: int
    groups: Sequence[AttentionMetadata]


class CpuLane:
    """Computes a sub-batch layer by layer, each as two native calls.

    In between, the caller waits for the host worker, or computes another sub-batch. The tokens get
    the bits of ``CpuStack.run``. For the thread of the mailbox's client.
    """

    def __init__(self, mailbox: HostMailbox, stack: CpuStack) -> None:
        """Take rows to a mailbox, and any tokens through a stack."""
        self._native, self._stack = mailbox.lane(), stack

    def begin(
        self,
        ids: Array,
        positions: Array,
        parts: Sequence[LanePart],
        rows: NDArray[np.int32],
    ) -> None:
        """Embed the tokens of a sub-batch.

        Args:
            ids, positions: [T] int64, those of each part, and then one of each row.
            parts: kept until ``finish``.
            rows: [n] whose attention the host worker computes; the mailbox has begun their tokens.

        Raises:
            IndexError: an id is outside the vocabulary.
            ValueError: shapes or dtypes do not fit, or the counts do not add up.
        """
        ids, positions = checked_tokens(ids, positions, 0)
        self._ids, self._parts = ids, parts
        self._native.begin(
            self._stack.native,
            address(ids),
            address(positions),
            len(ids),
            [(part.stack.native, part.tokens, attention_views(part.groups)) for part in parts],
            rows.tolist(),
        )

    def enter(self, layer: int) -> None:
        """Compute what precedes attention, hand the worker its rows, and attend to the parts."""
        self._native.enter(layer)

    def leave(self, layer: int) -> None:
        """Compute what follows attention; the worker has computed all jobs of the layer."""
        self._native.leave(layer)

    def fail(self, rows: Sequence[int]) -> None:
        """Go on without attention for rows whose jobs have failed, so that theirs means nothing."""
        self._native.fail(list(rows))

    def finish(self) -> Array:
        """Return the normalised hidden states [T, C]."""
        hidden = empty(self._ids, (len(self._ids), self._stack.width), self._stack.dtype)
        self._native.finish(address(hidden))
        return hidden
