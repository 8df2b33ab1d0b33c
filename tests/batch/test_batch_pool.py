"""Turns of many batches: fair among keys, the earliest due first within one, nobody forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weft.batch.pool import Pool, Share
from weft.batch.ports import Result
from weft.batch.usage import Usage


class Lines:
    """So many lines, each handed out once."""

    def __init__(self, count: int) -> None:
        self.remaining = count
        self.ready = True

    def next(self) -> int | None:
        self.remaining -= 1
        return self.remaining

    def ended(self, index: int, output: int | None) -> None:
        """Nothing to do."""


def serve(shares: list[Share], steps: int, cost: dict[bytes, int]) -> list[Share]:
    """Take a line whenever there is one, and end the oldest else; who was served, in order."""
    served: list[Share] = []
    running: list[Share] = []
    for _ in range(steps):
        taker = next((share for share in shares if share.remaining and _took(share)), None)
        if taker is not None:
            served.append(taker)
            running.append(taker)
        elif running:
            share = running.pop(0)
            share.ended(0, 1)
            share.watch(Result("x", usage=Usage(0, cost.get(share.owner, 10))))
    for share in running:
        share.ended(0, 1)
    return served


def _took(share: Share) -> bool:
    return share.next() is not None


def test_a_key_with_many_batches_gets_no_more_than_one_with_few():
    pool = Pool(4)
    shares = [pool.join(b"a", due, Lines(1000)) for due in range(5)]
    shares.append(pool.join(b"b", 99, Lines(1000)))
    served = Counter(share.owner for share in serve(shares, 400, {}))
    assert abs(served[b"a"] - served[b"b"]) <= 4


def test_tokens_are_what_is_shared_out():
    pool = Pool(4)
    shares = [pool.join(owner, 0, Lines(10_000)) for owner in (b"a", b"b")]
    served = Counter(s.owner for s in serve(shares, 2000, {b"a": 30, b"b": 10}))
    assert 2.5 < served[b"b"] / served[b"a"] < 3.5


def test_within_a_key_the_batch_that_is_due_first_goes_first():
    pool = Pool(3)
    late, early = pool.join(b"a", 20, Lines(5)), pool.join(b"a", 10, Lines(5))
    assert serve([late, early], 40, {}) == [early] * 5 + [late] * 5


def test_who_was_away_has_saved_nothing_up():
    pool = Pool(2)
    first = pool.join(b"a", 0, Lines(10_000))
    serve([first], 400, {})
    second = pool.join(b"b", 0, Lines(10_000))
    served = Counter(s.owner for s in serve([first, second], 100, {}))
    assert served[b"a"] >= served[b"b"] - 4


def test_a_pause_hands_out_nothing_and_what_left_gives_its_room_back():
    pool = Pool(1)
    one, other = pool.join(b"a", 0, Lines(2)), pool.join(b"b", 0, Lines(2))
    woken: list[str] = []
    one.wake, other.wake = (lambda: woken.append("one")), (lambda: woken.append("other"))
    pool.pause(True)
    assert one.next() is None
    assert not woken
    pool.pause(False)
    assert woken == ["one"]
    assert one.next() is not None
    assert other.next() is None
    pool.leave(one)
    pool.leave(one)
    assert woken[-1] == "other"
    assert pool.num_open == 0
    assert other.next() is not None


@given(
    st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 20)), min_size=1),
    st.integers(1, 8),
)
def test_all_lines_of_all_batches_go_and_nobody_sleeps_for_ever(batches, at_once):
    async def run() -> None:
        pool = Pool(at_once)
        most = 0

        async def one(owner: bytes, due: int, count: int) -> int:
            """A runner in small."""
            share, changed, done = pool.join(owner, due, Lines(count)), asyncio.Event(), 0
            share.wake = changed.set
            open_lines: set[asyncio.Task[None]] = set()

            async def line() -> None:
                nonlocal most
                most = max(most, pool.num_open)
                await asyncio.sleep(0)
                share.ended(0, 1)
                share.watch(Result("x", usage=Usage(1, 1)))

            while share.remaining:
                if share.next() is None:
                    changed.clear()
                    await changed.wait()
                    continue
                done += 1
                open_lines.add(asyncio.create_task(line()))
                await asyncio.sleep(0)
            await asyncio.gather(*open_lines)
            pool.leave(share)
            return done

        async with asyncio.timeout(20):
            counts = [one(owner, due, n) for due, (owner, n) in enumerate(batches)]
            done = await asyncio.gather(*counts)
        assert done == [n for _, n in batches]
        assert most <= at_once
        assert pool.num_open == 0

    asyncio.run(run())


def test_who_was_not_ready_has_saved_nothing_up():
    pool, slow = Pool(4), Lines(1000)
    slow.ready = False
    shares = [pool.join(b"a", 0, Lines(1000)), pool.join(b"b", 0, slow)]
    assert {share.owner for share in serve(shares, 200, {})} == {b"a"}
    assert pool.num_open == 0
    slow.ready = True
    served = Counter(share.owner for share in serve(shares, 200, {}))
    assert min(served.values()) > 40
    assert abs(served[b"a"] - served[b"b"]) <= 8
