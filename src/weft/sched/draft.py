"""Drafts by prompt lookup: the tokens that followed an earlier occurrence of the last ones.

Saxena 2023, "Prompt lookup decoding". A draft pays only where text repeats, and its sequence waits
for a step before it and one after it. What a draft would have been worth shows without one, too:
the output tells whether looking up would have found its next token. So drafts are made only where
that has gone well of late, at first three times in a row; and a drafter that is wrong, or finds
nothing, goes to sleep for longer and longer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

SIZES = (4, 3)  # tokens that must have stood in the text before; the longest match counts
INDEXED_A_STEP = 1024  # tokens that one call takes into the index at most
REMEMBERED = 16384  # tokens of a text that are looked at, the last ones
SHORTEST_REST, LONGEST_REST = 32, 1024  # tokens without drafts after one that was wrong
COST = 1  # tokens that a draft must gain
WORTH = 0.7  # share of tokens looked up of late that was right, from which drafts are made
MEMORY = 4  # tokens looked up in which that share is mostly renewed
LONGEST_SEARCH_REST = 32  # tokens without drafts after nothing was found


class NgramDrafter:
    """The drafts of one sequence.

    Args:
        most: tokens of the longest draft.
        start: where the output begins; what goes before it says nothing about drafts.
    """

    def __init__(self, most: int, start: int = 0) -> None:
        self._most = most
        self._start = start
        self._right = 0.3  # share of tokens looked up of late that was right
        self._length = min(2, most)  # of the next draft
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last place
        self._indexed = 0
        self._rest = SHORTEST_REST
        self._search_rest = 1

    def promising(self, tokens: Seq[int]) -> bool:
        """Whether the last tokens on the host stood in the text before."""
        return self._find(tokens) is not None

    def propose(self, tokens: Seq[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens that may follow, or none."""
        after = self._find(tokens)
        if after is None:
            return ()
        self._search_rest = 1
        known = len(tokens)
        draft: list[int] = []
        for position in range(after, after + min(self._length, most)):
            draft.append(tokens[position] if position < known else draft[position - known])
        return tuple(draft)

    def _find(self, tokens: Seq[int]) -> int | None:
        """The position after the latest, longest earlier match of the last tokens."""
        if not self._catch_up(tokens) or self._right < WORTH:
            return None
        for size in SIZES:
            after = self._after.get(tuple(tokens[len(tokens) - size :]))
            if after is not None:
                return after
        return None

    def _catch_up(self, tokens: Seq[int]) -> bool:
        """Take new tokens into the index; whether it is up to date. The last n-gram stays out."""
        known = len(tokens)
        if known - self._indexed > REMEMBERED or len(self._after) > 4 * REMEMBERED:
            self._after.clear()
            self._indexed = max(0, known - REMEMBERED)
        upto = min(known, self._indexed + INDEXED_A_STEP)
        for position in range(self._indexed, upto):
            if position >= self._start:
                self._judge(tokens, position)
            for size in SIZES:
                if position >= size:
                    self._after[tuple(tokens[position - size : position])] = position
        self._indexed = upto
        return upto == known

    def _judge(self, tokens: Seq[int], position: int) -> None:
        """Record whether lookup would have found the token at this position."""
        for size in SIZES:
            after = self._after.get(tuple(tokens[position - size : position]))
            if after is not None:
                self._right += (float(tokens[after] == tokens[position]) - self._right) / MEMORY
                return

    def searched_in_vain(self) -> int:
        """Return for how many tokens to skip drafts after a failed lookup."""
        rest, self._search_rest = self._search_rest, min(2 * self._search_rest, LONGEST_SEARCH_REST)
        return rest

    def learn(self, drafted: int, accepted: int) -> int:
        """Record the acceptance of a draft; return for how many tokens to skip drafts."""
        if accepted == drafted:
            self._length = min(2 * self._length, self._most)
        else:
            self._length = max(1, min(2, self._most, accepted))
        if accepted > COST:
            self._rest = max(SHORTEST_REST, self._rest // 2)
        if accepted >= COST:
            return 0
        rest, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        return rest
