"""Shared prefixes in flight: the first sequence computes the prefix, the others wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq


class PrefixWait:
    """Blocks that running sequences are about to compute, by content hash."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._computing: dict[bytes, int] = {}  # block -> priority of the class that computes it
        self._leads: dict[int, deque[tuple[int, bytes]]] = {}

    def lead(self, sequence_id: int, priority: int, block_hashes: Seq[bytes], hit: int) -> None:
        """Announce that a sequence of this priority computes its blocks from token ``hit`` on."""
        own: deque[tuple[int, bytes]] = deque()
        for index in range(hit // self._block_size, len(block_hashes)):
            if block_hashes[index] not in self._computing:
                self._computing[block_hashes[index]] = priority
                own.append(((index + 1) * self._block_size, block_hashes[index]))
        if own:
            self._leads[sequence_id] = own

    def awaited(self, priority: int, block_hashes: Seq[bytes], hit: int) -> bytes:
        """Return the last block after ``hit`` that another sequence computes, or b"" for none.

        Nobody waits for a lower class, which may be starved.
        """
        found = b""
        for digest in block_hashes[hit // self._block_size :]:
            if self._computing.get(digest, priority + 1) > priority:
                break
            found = digest
        return found

    def in_progress(self, digest: bytes) -> bool:
        return digest in self._computing

    def advance(self, sequence_id: int, computed: int) -> None:
        """The sequence's first ``computed`` tokens are committed."""
        own = self._leads.get(sequence_id)
        if own is None:
            return
        while own and own[0][0] <= computed:
            del self._computing[own.popleft()[1]]
        if not own:
            del self._leads[sequence_id]

    def abandon(self, sequence_id: int) -> None:
        """The sequence will not compute its remaining blocks now."""
        for _, digest in self._leads.pop(sequence_id, ()):
            del self._computing[digest]

    def empty(self) -> bool:
        return not self._computing and not self._leads
