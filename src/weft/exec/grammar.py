"""Grammars of executor rows: masks of the allowed tokens, advanced by the sampled ones.

Compiling takes up to tenths of a second, so it is done on threads before a sequence is admitted
(`Grammars.compile`); a row then starts from a copy, which takes microseconds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import GrammarError, WeftError
from weft.core.grammar import compile_grammar, explain
from weft.core.plan import RowAdd
from weft.kernels.arrays import Array, from_numpy, where

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 32  # compiled grammars, used ones too; a costly one grows to some 20 MB
THREADS = 2
RENEW_TOKENS = 64

# What grammars may take of the executor's thread, in CPU time, as a busy machine must not matter.
FREE_S = 0.002  # a mask, or a token taken in; ordinary schemas take some 0.1 ms
BUDGET_S = 0.5  # of all grammars together beyond that
STILL_COUNTED = 0.9  # of what was spent, after a step: 50 ms a step can go on for ever


class Grammars:
    """Compiled grammars, the latest ones kept.

    Args:
        load_tokenizer: called once, at the first grammar.
    """

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-grammar")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def compile(
        self, grammar: str, *, instead_of: Future[LLMatcher] | None = None
    ) -> Future[LLMatcher]:
        """Return the matcher at the start of a grammar, or a GrammarError, once it is compiled.

        Args:
            instead_of: an earlier result that is of no use any more.
        """
        with self._lock:
            future = self._compiled.pop(grammar, None)
            if future is None or future is instead_of:
                future = self._pool.submit(lambda: compile_grammar(self._tokenizer, grammar))
            self._compiled[grammar] = future
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return future

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._load_tokenizer()


@dataclass(slots=True)
class _GrammarRow:
    """Where one row stands in its grammar; ``error`` says why it cannot go on."""

    grammar: str
    output: list[int]
    compiled: Future[LLMatcher]
    matcher: LLMatcher | None = None
    error: WeftError | None = None
    renew_from: int = 0  # tokens of output from which a grammar may be compiled anew


class _Costs:
    """Seconds that grammars have spent of late, which all of them together may do to a bound."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def charge(self, grammar: str, seconds: float) -> str | None:
        """Count what a grammar took; return the costliest grammar if it has to end.

        With the costliest gone the others are within the bound again, as they were before.
        """
        if seconds <= FREE_S:
            return None
        self._spent[grammar] = self._spent.get(grammar, 0.0) + seconds - FREE_S
        if sum(self._spent.values()) <= BUDGET_S:
            return None
        costliest = max(self._spent, key=self._spent.__getitem__)
        del self._spent[costliest]
        return costliest

    def forget(self) -> None:
        """Let past costs decay by one step; below 1 ms they are dropped."""
        counted = {grammar: STILL_COUNTED * spent for grammar, spent in self._spent.items()}
        self._spent = {grammar: spent for grammar, spent in counted.items() if spent > 1e-3}


class GrammarRows:
    """The matchers of the rows that have a grammar.

    While these work no sequence goes on. A row's mask is bounded by what it is compiled with, all
    rows together by ``_Costs``: where they exceed it, every row of the costliest grammar ends.

    Args:
        clock: seconds that the calling thread has worked.
    """

    def __init__(self, grammars: Grammars, clock: Callable[[], float] = time.thread_time) -> None:
        self._grammars = grammars
        self._clock = clock
        self._rows: dict[int, _GrammarRow] = {}
        self._costs = _Costs()

    def add(self, add: RowAdd) -> None:
        """Start a row: at the start of its grammar, or after the output that it has already."""
        grammar = add.sampling.grammar
        if grammar is not None:
            output = list(add.tokens[add.num_prompt :])
            row = _GrammarRow(grammar, output, self._grammars.compile(grammar))
            self._rows[add.row] = row
            started = self._clock()
            self._start(row)
            self._charge(row, started)

    def _start(self, row: _GrammarRow) -> None:
        try:
            row.matcher = row.compiled.result().deep_copy()
        except WeftError as error:
            row.error = error
            return
        if row.output and not row.matcher.consume_tokens(row.output):
            row.error = _failure(row.matcher)

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)

    @property
    def empty(self) -> bool:
        """Whether no row has a grammar."""
        return not self._rows

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def forbid(self, logits: Array, rows: Seq[int]) -> dict[int, WeftError]:
        """Make what the grammars do not allow impossible.

        The end of the sequence is possible exactly where the text satisfies the grammar. What is
        forbidden here is minus infinity and so below any other way of forbidding a token: an end
        that is all that a grammar allows comes even before the minimum length.

        Args:
            logits: [S, V] of the rows, changed in place; a row always keeps one token.
            rows: [S].

        Returns:
            the rows whose grammar cannot go on, and why.
        """
        at = [i for i, row in enumerate(rows) if row in self._rows]
        masks = np.zeros((len(at), -(-logits.shape[1] // 8)), np.uint8)  # [G, bytes of V bits]
        faults = self.fill([rows[i] for i in at], masks)
        if at:
            allowed = np.unpackbits(masks, axis=1, count=logits.shape[1], bitorder="little")
            blocked = from_numpy(logits, allowed == 0)  # [G, V]
            logits[at] = where(blocked, -np.inf, logits[at])
        return faults

    def fill(self, rows: Seq[int], masks: NDArray[np.uint8]) -> dict[int, WeftError]:
        """Write which tokens rows with a grammar may have next.

        Args:
            masks: [G, M] gets a bit for each token, the lowest of a byte first; of rows that cannot
                go on, all bits.

        Returns:
            the rows whose grammar cannot go on, and why.
        """
        faults: dict[int, WeftError] = {}
        self._costs.forget()
        since = self._clock()
        for mask, row in zip(masks, rows, strict=True):
            fault = self._fill(row, mask)
            since = self._charge(self._rows[row], since)
            if fault is not None:
                faults[row] = fault
                mask[:] = 255
        return faults

    def advance(self, rows: Seq[int], tokens: NDArray[np.int64]) -> None:
        """Advance by the token [S] of each row."""
        since = self._clock()
        for number, token in zip(rows, tokens.tolist(), strict=True):
            row = self._rows.get(number)
            if row is not None and row.matcher is not None and row.error is None:
                row.output.append(token)
                row.matcher.consume_token(token)
                since = self._charge(row, since)

    def _charge(self, row: _GrammarRow, since: float) -> float:
        """Count what a row took since a time, end a grammar that is too costly; return the time."""
        now = self._clock()
        costly = self._costs.charge(row.grammar, now - since)
        if costly is not None:
            error = GrammarError(
                "The grammar is too costly: finding the tokens that may follow takes too long."
            )
            for other in self._rows.values():
                if other.grammar == costly and other.error is None:
                    other.error = error
        return now

    def _fill(self, number: int, mask: NDArray[np.uint8]) -> WeftError | None:
        """Write the bits of a row's allowed tokens; return the reason if there are none."""
        row = self._rows[number]
        if row.error is None and not _allowed(row.matcher, mask):
            self._renew(row)
            if row.error is None and not _allowed(row.matcher, mask):
                row.error = _failure(row.matcher)
        return row.error

    def _renew(self, row: _GrammarRow) -> None:
        """Start a row again on a grammar compiled anew, unless that was tried just before.

        All copies of a grammar share what they have learnt, and that is bounded: a grammar in long
        use can fill it up.
        """
        if len(row.output) < row.renew_from or row.matcher is None:
            return
        row.renew_from = len(row.output) + RENEW_TOKENS
        row.compiled = self._grammars.compile(row.grammar, instead_of=row.compiled)
        self._start(row)


def _allowed(matcher: LLMatcher | None, mask: NDArray[np.uint8]) -> bool:
    """Write the bits of the allowed tokens; return whether there are any."""
    if matcher is None:
        return False
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: len(mask)]
    mask[: len(bits)] = bits
    return not matcher.is_error() and bool(mask.any())


def _failure(matcher: LLMatcher | None) -> GrammarError:
    failed = matcher is not None and matcher.is_error()
    detail = explain(matcher.get_error()) if failed and matcher else "no token may follow"
    return GrammarError(f"The output cannot follow its grammar further: {detail}.")
