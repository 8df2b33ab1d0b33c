"""Grammars of executor rows: which tokens may come next, and what came.

Compiling takes up to tenths of a second, so it is done on threads before a sequence is admitted
(`Grammars.compile`); a row then starts from a copy, which takes microseconds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import GrammarError, WeftError
from weft.core.grammar import compile_grammar, explain
from weft.core.plan import RowAdd

KEPT = 64  # compiled grammars, used ones too
THREADS = 2


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

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Return the matcher at the start of a grammar, or a GrammarError, once it is compiled."""
        with self._lock:
            future = self._compiled.pop(grammar, None)
            if future is None:
                future = self._pool.submit(lambda: compile_grammar(self._tokenizer, grammar))
            self._compiled[grammar] = future
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return future

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._load_tokenizer()


class GrammarRows:
    """The matchers of the rows that have a grammar."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: dict[int, LLMatcher | WeftError] = {}

    def __contains__(self, row: object) -> bool:
        return row in self._matchers

    def add(self, add: RowAdd) -> None:
        """Start a row: at the start of its grammar, or after the output that it has already."""
        grammar = add.sampling.grammar
        if grammar is None:
            return
        try:
            matcher = self._grammars.compile(grammar).result().deep_copy()
        except WeftError as error:
            self._matchers[add.row] = error
            return
        self._matchers[add.row] = matcher
        output = list(add.tokens[add.num_prompt :])
        if output and not matcher.consume_tokens(output):
            self._matchers[add.row] = _failure(matcher)

    def drop(self, row: int) -> None:
        self._matchers.pop(row, None)

    def forbid(self, logits: Tensor, rows: Seq[int]) -> dict[int, WeftError]:
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
        faults: dict[int, WeftError] = {}
        at = [i for i, row in enumerate(rows) if row in self._matchers]
        masks = np.zeros((len(at), -(-logits.shape[1] // 8)), np.uint8)  # [G, bytes of V bits]
        for mask, i in zip(masks, at, strict=True):
            fault = self._fill(rows[i], mask)
            if fault is not None:
                faults[rows[i]] = fault
                mask[:] = 255
        if at:
            allowed = np.unpackbits(masks, axis=1, count=logits.shape[1], bitorder="little")
            index = torch.tensor(at)
            blocked = torch.from_numpy(allowed == 0)  # [G, V]
            logits[index] = logits[index].masked_fill_(blocked, -torch.inf)
        return faults

    def advance(self, rows: Seq[int], tokens: NDArray[np.int64]) -> None:
        """Take in the token [S] that each row got."""
        for row, token in zip(rows, tokens.tolist(), strict=True):
            matcher = self._matchers.get(row)
            if isinstance(matcher, LLMatcher):
                matcher.consume_token(token)

    def _fill(self, row: int, mask: NDArray[np.uint8]) -> WeftError | None:
        """Write the bits of a row's allowed tokens; return why there are none."""
        matcher = self._matchers[row]
        if isinstance(matcher, WeftError):
            return matcher
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: len(mask)]
        mask[: len(bits)] = bits
        if matcher.is_error() or not mask.any():
            return _failure(matcher)
        return None


def _failure(matcher: LLMatcher) -> GrammarError:
    detail = explain(matcher.get_error()) if matcher.is_error() else "no token may follow"
    return GrammarError(f"The output cannot follow its grammar further: {detail}.")
