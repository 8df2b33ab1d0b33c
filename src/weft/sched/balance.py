"""How much work for the host goes along with a step of the device, and in how many sub-batches.

NEO (section 3.2) compares the time per request of two schedules. Here work is priced in the time
that the device alone would take for it, so that chunks of prompts can be compared as well: a prompt
token at the slope of the dense layers, a decode at its share of the step of the device alone. What
the host adds is worth taking if it costs less time than that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from weft.core.plan import Tier
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work

GAIN = 1e-3  # what a schedule must be better by to be preferred to a plainer one


class HostShare(NamedTuple):
    """What goes along with the device's own work.

    Attributes:
        chunk: prompt tokens whose KV goes to the host.
        first, second: host decodes in batch 0 and in batch 1, which takes the oldest of them.
        seconds: predicted time of the step.
        rate: what the step is worth by its time; 1 for the device alone.
    """

    chunk: int
    first: int
    second: int
    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class HostWork:
    """What the host could take part in.

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
        return self.cost.terms(Work(in_tokens=tokens)).kv_move

    def choose(self, base: Work, host: HostWork, least: tuple[int, int] = (0, 0)) -> HostShare:
        """Choose what goes along with ``base``, the device's own work.

        Args:
            least: (decodes, prompt tokens) that must go along at least, as far as there are any.
        """
        return _Choosing(self.cost, self._token_s, self.free_tokens, base, host).best(least)

    def choose_all(self, host: HostWork) -> HostShare:
        """Take everything along, in two sub-batches that are as equal as can be."""
        count = min(len(host.contexts), host.budget)
        chunk = min(host.budget - count, sum(count for _, count in host.pieces))
        choosing = _Choosing(self.cost, self._token_s, self.free_tokens, Work(), host)
        second = _most(count, lambda n: choosing.sums[n] <= choosing.sums[count] / 2)
        return choosing.choice(chunk, count - second, second)


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
        self.sums = [0, *accumulate(host.contexts)]
        self._token_s, self._free_tokens = token_s, free_tokens
        self._alone_s = step_time(cost, [base])
        self._prefill_s = cost.terms(base).prefill_attention
        self._decode_s = self._decode_price()

    def _decode_price(self) -> float:
        """What the device alone takes for a decode: its share of the step without the prompts."""
        base = self.base
        if base.decodes:
            prompts = self._token_s * (base.tokens - base.decodes) + self._prefill_s
            return max((self._alone_s - prompts) / base.decodes, self._token_s)
        if not self.host.contexts:
            return 0.0
        mean = self.sums[-1] // len(self.host.contexts)
        one = Work(tokens=1, sampled=1, decodes=1, decode_context=mean)
        return step_time(self.cost, [one])

    def best(self, least: tuple[int, int]) -> HostShare:
        """The schedule of the highest rate; of two that are about equal, the plainer one."""
        decodes = min(len(self.host.contexts), self.host.budget)
        prompts = min(self.host.budget, sum(count for _, count in self.host.pieces))
        must = min(least[0], decodes), min(least[1], prompts)
        best = HostShare(0, 0, 0, self._alone_s, 1.0 if self.base.tokens else 0.0)
        found = None if any(must) else best
        for chunk in self._chunks(prompts):
            for option in self._options(chunk, decodes):
                enough = option.first + option.second >= must[0] and option.chunk >= must[1]
                if enough and (found is None or option.rate > found.rate * (1 + GAIN)):
                    found = option
        return found or best

    def _chunks(self, most: int) -> list[int]:
        """None, what fits in beside the decodes for nothing, and all."""
        free = min(most, max(0, self._free_tokens - self.base.tokens))
        return sorted({0, free, most})

    def _options(self, chunk: int, decodes: int) -> list[HostShare]:
        decodes = min(decodes, self.host.budget - chunk)
        options = [self.choice(chunk, count, 0) for count in self._counts(chunk, decodes)]
        second = self._second(chunk, decodes)
        if second:
            first = self._first(chunk, second, decodes - second)
            options.append(self.choice(self._reduced(chunk, second), first, second))
        return options

    def _counts(self, chunk: int, most: int) -> list[int]:
        """Numbers of decodes to try in one sub-batch: hidden behind the device, and some more."""
        attention = self.cost.terms(self._batch(chunk, 0, 0)).attention
        hidden = _most(most, lambda n: self._cpu(0, n) <= attention)
        counts = {0, hidden, most}
        count = 1
        while count < most:
            counts.add(count)
            count *= 2
        return sorted(counts)

    def _second(self, chunk: int, most: int) -> int:
        """Decodes of batch 1 whose attention takes no longer than the linear part of batch 0."""
        linear = self.cost.terms(self._batch(chunk, 0, 0)).linear
        return _most(most, lambda n: self._cpu(0, n) <= linear)

    def _first(self, chunk: int, second: int, most: int) -> int:
        """Decodes of batch 0 hidden behind batch 1's linear part and batch 0's own attention."""
        attention = self.cost.terms(self._batch(chunk, 0, 0)).attention
        cover = self.cost.terms(self._batch(0, 0, second, alone=True)).linear + attention
        return _most(most, lambda n: self._cpu(second, second + n) <= cover)

    def _reduced(self, chunk: int, second: int) -> int:
        """The smallest chunk that covers batch 1, and not less than what is free (step 5)."""
        cpu = self._cpu(0, second)
        free = min(chunk, max(0, self._free_tokens - self.base.tokens))

        def covers(left_out: int) -> bool:
            return self.cost.terms(self._batch(chunk - left_out, 0, 0)).linear >= cpu

        return chunk - _most(chunk - free, covers)

    def _cpu(self, low: int, high: int) -> float:
        count, context = high - low, self.sums[high] - self.sums[low]
        return self.cost.terms(
            Work(tokens=count, host_decodes=count, host_context=context)
        ).cpu_attention

    def _batch(self, chunk: int, low: int, high: int, alone: bool = False) -> Work:
        """The device's work, or nothing, with a chunk and the host decodes [low, high)."""
        work = Work() if alone else self.base.copy()
        for start, count in self.host.pieces:
            if chunk <= 0:
                break
            taken = min(chunk, count)
            work.add(start, taken, taken == count, Tier.HOST)
            chunk -= taken
        count = high - low
        work.tokens += count
        work.sampled += count
        work.out_tokens += count
        work.host_decodes += count
        work.host_context += self.sums[high] - self.sums[low]
        return work

    def choice(self, chunk: int, first: int, second: int) -> HostShare:
        """A schedule with its time and its rate."""
        works = [self._batch(chunk, second, second + first)]
        prefill_s = self.cost.terms(works[0]).prefill_attention - self._prefill_s
        if second:
            works.append(self._batch(0, 0, second, alone=True))
        seconds = step_time(self.cost, works)
        worth = self._alone_s if self.base.tokens else 0.0
        worth += (first + second) * self._decode_s + chunk * self._token_s + prefill_s
        return HostShare(chunk, first, second, seconds, worth / seconds if seconds else 0.0)
