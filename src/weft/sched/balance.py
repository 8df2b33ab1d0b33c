"""Balances a step between device and host: the share of host work, and the number of sub-batches.

NEO (section 3.2) compares the time per request of two schedules. Here work is priced in the time
that the device alone would take for it, so that chunks of prompts can be compared as well: a prompt
token at the slope of the dense layers, a decode at its share of the step of the device alone. What
the host adds is worth taking if it costs less time than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from weft.core.plan import Tier
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work

GAIN = 1e-3  # what a schedule must be better by to be preferred to a plainer one
ROUNDS = 4  # times that a search goes on behind decodes that are too long for what is left


class HostShare(NamedTuple):
    """The host work that goes with the device's own work.

    Attributes:
        chunk: prompt tokens whose KV goes to the host.
        first, second: which host decodes go into batch 0 and into batch 1: their places in
            ``HostWork.contexts``, in order. Batch 1 has the first choice.
        seconds: predicted time of the step.
        rate: what the step is worth by its time; 1 for the device alone.
    """

    chunk: int
    first: tuple[int, ...]
    second: tuple[int, ...]
    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class HostWork:
    """The work that the host could take.

    Attributes:
        contexts: of each decode whose KV lies with the host, in the order of service.
        pieces: (start, count) of each prompt, or rest of one, whose KV goes to the host.
        budget: tokens that may go along in all.
    """

    contexts: Seq[int]
    pieces: Seq[tuple[int, int]]
    budget: int


class Balance:
    """Chooses by a cost model; deterministic.

    Attributes:
        free_tokens: tokens of a step that takes as long as reading the weights once.

    Args:
        most_tokens: of a step, within which the cost model is asked.
    """

    def __init__(self, cost: CostModel, most_tokens: int) -> None:
        self.cost = cost
        half = (most_tokens + 1) // 2
        dense = [cost.terms(Work(tokens=tokens)).dense for tokens in (1, half, most_tokens)]
        self._token_s = max((dense[2] - dense[1]) / max(1, most_tokens - half), 1e-12)
        self.free_tokens = min(most_tokens, int(dense[0] / self._token_s))

    def cpu_seconds(self, contexts: Seq[int]) -> float:
        """Time of the host's attention if all of these decode in one step."""
        count = len(contexts)
        work = Work(tokens=count, host_decodes=count, host_context=sum(contexts))
        return self.cost.terms(work).cpu_attention

    def move_seconds(self, tokens: int) -> float:
        """Time to bring the KV of so many tokens from one tier to the other."""
        return self.cost.terms(Work(in_tokens=tokens)).moving

    def choose(self, base: Work, host: HostWork, least: tuple[int, int] = (0, 0)) -> HostShare:
        """Choose what goes along with ``base``, the device's own work.

        Args:
            least: (decodes, prompt tokens) that must go along at least, as far as there are any;
                of the decodes the first ones.
        """
        return _Choosing(self.cost, self._token_s, self.free_tokens, base, host).best(least)

    def compared(self, base: Work, host: HostWork) -> list[HostShare]:
        """What ``choose`` compares where nothing must go along, but for the device alone."""
        choosing = _Choosing(self.cost, self._token_s, self.free_tokens, base, host)
        return [share for share in choosing.options((0, 0)) if share.first or share.second]

    def choose_all(self, host: HostWork) -> HostShare:
        """Take everything along, in two sub-batches that are as equal as can be."""
        count = min(len(host.contexts), host.budget)
        chunk = min(host.budget - count, sum(count for _, count in host.pieces))
        choosing = _Choosing(self.cost, self._token_s, self.free_tokens, Work(), host)
        sums = [0, *accumulate(host.contexts[:count])]
        second = _most(count, lambda n: sums[n] <= sums[count] / 2)
        return choosing.choice(chunk, range(second, count), range(second))


def _most(high: int, fits: Callable[[int], bool]) -> int:
    """The largest n in [0, high] for which ``fits`` holds, if it holds up to some n; 0 is free."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


class _Choosing:
    """One choice: the work of the device, its prices, and the schedules that are compared."""

    def __init__(
        self, cost: CostModel, token_s: float, free_tokens: int, base: Work, host: HostWork
    ) -> None:
        self.cost, self.base, self.host = cost, base, host
        self._token_s, self._free_tokens = token_s, free_tokens
        self._alone_s = step_time(cost, [base])
        self._prefill_s = cost.terms(base).prefill_attention
        self._decode_s = self._decode_price()

    def _decode_price(self) -> float:
        """The device's time for a decode: its share of the step without the prompts."""
        base = self.base
        if base.decodes:
            prompts = self._token_s * (base.tokens - base.decodes) + self._prefill_s
            return max((self._alone_s - prompts) / base.decodes, self._token_s)
        if not self.host.contexts:
            return 0.0
        mean = sum(self.host.contexts) // len(self.host.contexts)
        one = Work(tokens=1, sampled=1, decodes=1, decode_context=mean)
        return step_time(self.cost, [one])

    def best(self, least: tuple[int, int]) -> HostShare:
        """The schedule of the highest rate; of two that are about equal, the plainer one."""
        best = HostShare(0, (), (), self._alone_s, 1.0 if self.base.tokens else 0.0)
        found = None if any(self._possible(least)) else best
        for option in self.options(least):
            if found is None or option.rate > found.rate * (1 + GAIN):
                found = option
        return found or best

    def options(self, least: tuple[int, int]) -> Iterator[HostShare]:
        """Schedules with what must go along, in one sub-batch and in two."""
        decodes, must = self._possible(least)
        prompts = self._possible((0, self.host.budget))[1]
        for chunk in self._chunks(prompts):
            for option in self._options(chunk, range(decodes)):
                if option.chunk >= must:
                    yield option

    def _possible(self, least: tuple[int, int]) -> tuple[int, int]:
        """So many decodes and prompt tokens, as far as there are any and the budget allows."""
        decodes = min(least[0], len(self.host.contexts), self.host.budget)
        return decodes, min(least[1], self.host.budget, sum(n for _, n in self.host.pieces))

    def _chunks(self, most: int) -> list[int]:
        """No chunk, the one that fits beside the decodes for free, and all."""
        free = min(most, max(0, self._free_tokens - self.base.tokens))
        return sorted({0, free, most})

    def _options(self, chunk: int, lead: Seq[int]) -> list[HostShare]:
        """Schedules with a chunk, all with the decodes ``lead``, which need not be hidden."""
        most = self.host.budget - chunk
        if len(lead) > most:
            return []
        options = [self.choice(chunk, picked, ()) for picked in self._alone(chunk, lead, most)]
        second = self._second(chunk, lead, most)
        if second:
            first = self._first(chunk, second, most - len(second))
            options.append(self.choice(self._reduced(chunk, second), first, second))
        return options

    def _alone(self, chunk: int, lead: Seq[int], most: int) -> list[Seq[int]]:
        """Decodes to try in one sub-batch.

        Those that its own attention on the device hides (NEO's inequality without a batch 1), and
        as many as take no longer than its linear part: then the step takes no longer than one of
        two sub-batches, which reads the weights twice. Where the device has nothing to do, there
        is nothing to hide behind, so the first 1, 2, 4 and so on are tried as well.
        """
        rest = self._others(lead)
        if self.base.tokens or chunk:
            terms = self.cost.terms(self._batch(chunk, ()))
            covers = {terms.attention, max(terms.attention, terms.linear)}
            return [lead, *(self._pick(lead, rest, most, cover) for cover in sorted(covers))]
        most = min(most, len(rest) + len(lead))
        counts = {most, *(1 << i for i in range(most.bit_length()))}
        linear = self.cost.terms(Work(tokens=1)).linear
        some = self._pick(lead, rest, most, linear)
        return [lead, some, *(range(n) for n in sorted(counts) if len(lead) <= n)]

    def _second(self, chunk: int, lead: Seq[int], most: int) -> Seq[int]:
        """Decodes of batch 1 whose attention takes no longer than the linear part of batch 0."""
        linear = self.cost.terms(self._batch(chunk, ())).linear
        return self._pick(lead, self._others(lead), most, linear)

    def _first(self, chunk: int, second: Seq[int], most: int) -> Seq[int]:
        """Decodes of batch 0 hidden behind batch 1's linear part and batch 0's own attention."""
        attention = self.cost.terms(self._batch(chunk, ())).attention
        cover = self.cost.terms(self._batch(0, second, alone=True)).linear + attention
        return self._pick((), self._others(second), most, cover)

    def _others(self, decodes: Seq[int]) -> list[int]:
        taken = set(decodes)
        return [i for i in range(len(self.host.contexts)) if i not in taken]

    def _pick(self, lead: Seq[int], rest: Seq[int], most: int, cover_s: float) -> Seq[int]:
        """Each decode in turn that the host attends to in time; others are skipped (step 4).

        Args:
            lead: taken in any case.
            rest: to choose from.
            most: decodes to take in all.
            cover_s: what the host's attention may take.
        """
        picked = list(lead)
        for _ in range(ROUNDS):
            rest = self._take(picked, rest, most, cover_s)
            if not rest:
                break
        return picked

    def _take(self, picked: list[int], rest: Seq[int], most: int, cover_s: float) -> Seq[int]:
        """Take decodes up to the first that does not fit; return those after it that still do."""
        contexts = self.host.contexts
        count, context = len(picked), self._context(picked)
        sums = [*accumulate((contexts[i] for i in rest), initial=context)]
        run = _most(
            min(len(rest), most - count), lambda n: self._cpu(count + n, sums[n]) <= cover_s
        )
        picked += rest[:run]
        count, context = count + run, sums[run]
        if run == len(rest) or count == most:
            return ()
        room = _most(
            contexts[rest[run]] - 1, lambda n: self._cpu(count + 1, context + n) <= cover_s
        )
        return [i for i in rest[run + 1 :] if contexts[i] <= room]

    def _reduced(self, chunk: int, second: Seq[int]) -> int:
        """The smallest chunk that covers batch 1, and not less than what is free (step 5)."""
        cpu = self._cpu(len(second), self._context(second))
        free = min(chunk, max(0, self._free_tokens - self.base.tokens))

        def covers(left_out: int) -> bool:
            return self.cost.terms(self._batch(chunk - left_out, ())).linear >= cpu

        return chunk - _most(chunk - free, covers)

    def _context(self, decodes: Seq[int]) -> int:
        return sum(self.host.contexts[i] for i in decodes)

    def _cpu(self, count: int, context: int) -> float:
        """Time of the host's attention for so many decodes with so much context in all."""
        return self.cost.terms(
            Work(tokens=count, host_decodes=count, host_context=context)
        ).cpu_attention

    def _batch(self, chunk: int, decodes: Seq[int], alone: bool = False) -> Work:
        """The device's work, if any, with a chunk and these decodes of the host."""
        work = Work() if alone else self.base.copy()
        for start, count in self.host.pieces:
            if chunk <= 0:
                break
            taken = min(chunk, count)
            work.add(start, taken, taken == count, Tier.HOST)
            chunk -= taken
        count = len(decodes)
        work.tokens += count
        work.sampled += count
        work.out_tokens += count
        work.host_decodes += count
        work.host_context += self._context(decodes)
        return work

    def choice(self, chunk: int, first: Seq[int], second: Seq[int]) -> HostShare:
        """A schedule with its time and its rate."""
        works = [self._batch(chunk, first)]
        prefill_s = self.cost.terms(works[0]).prefill_attention - self._prefill_s
        if second:
            works.append(self._batch(0, second, alone=True))
        seconds = step_time(self.cost, works)
        worth = self._alone_s if self.base.tokens else 0.0
        decodes = len(first) + len(second)
        worth += decodes * self._decode_s + chunk * self._token_s + prefill_s
        rate = worth / seconds if seconds else 0.0
        return HostShare(chunk, tuple(first), tuple(second), seconds, rate)
