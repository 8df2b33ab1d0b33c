"""Slots of recurrent state: by hand, and against a plain model of what they must hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from weft.core.errors import InvariantError
from weft.core.plan import NO_STATE
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.states import MARK_EVERY
from weft.kv.tiers import TieredCache

SIZE = 4


def cache_of(slots: int, blocks: int = 64, **options) -> KVCache:
    groups = [
        GroupSpec("full", SIZE, blocks),
        GroupSpec("state", SIZE, slots, window=1, recurrent=True),
    ]
    return KVCache(groups, **options)


@dataclass
class Slots:
    """What each slot holds: the tokens of which it is the state; an executor of nothing else."""

    content: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def run(self, tokens: list[int], start: int, count: int, step) -> None:
        """Compute a step twice, as a retry does, and check what it reads."""
        for _ in range(2):
            read = () if step.read == NO_STATE else self.content[step.read]
            assert read == tuple(tokens[:start])
            for place, slot in step.marks:
                assert start < place < start + count
                self.content[slot] = tuple(tokens[:place])
            self.content[step.write] = tuple(tokens[: start + count])


def run(cache: KVCache, slots: Slots, number: int, tokens: list[int], chunks: list[int]) -> int:
    """Compute a sequence in chunks as a scheduler does, the first of them or all its prompt.

    Returns:
        its prefix hit.
    """
    cache.register(number, b"")
    hit = cache.find_prefix(number, tokens[: chunks[0]] if chunks[1:] else tokens)
    cache.open(number, hit)
    start = hit
    for count in chunks or [len(tokens) - hit]:
        assert cache.extend(number, start + count) is not None
        slots.run(tokens, start, count, cache.states.plan(number, start, count))
        start += count
        cache.commit(number, tokens, start)
        cache.check()
    return hit


def end(cache: KVCache, number: int, **options) -> None:
    cache.release(number, **options)
    cache.forget(number)
    cache.check()


def test_a_prompt_leaves_a_mark_at_its_last_full_block():
    cache, slots = cache_of(8), Slots()
    assert run(cache, slots, 1, list(range(14)), []) == 0
    end(cache, 1)
    assert run(cache, slots, 2, list(range(14)), []) == 12
    assert run(cache, slots, 3, [*range(12), 50, 51], []) == 12
    assert run(cache, slots, 4, [*range(8), 50, 51], []) == 0  # nobody has marked 8


def test_where_prompts_branch_the_second_one_leaves_a_mark():
    cache, slots = cache_of(16), Slots()
    run(cache, slots, 1, list(range(30)), [])
    branch = [*range(16), *range(100, 110)]
    assert run(cache, slots, 2, branch, []) == 0
    assert run(cache, slots, 3, [*range(16), *range(200, 210)], []) == 16


def test_output_leaves_its_newest_boundary_only():
    cache, slots = cache_of(8), Slots()
    tokens = list(range(40))
    run(cache, slots, 1, tokens, [5, *[1] * 33])  # to 38
    chain = cache._chains[1][SIZE].block_hashes
    found = [i + 1 for i, digest in enumerate(chain) if cache.states.pool.find(digest) is not None]
    assert [blocks * SIZE for blocks in found] == [4, 36]  # that of the prompt stays
    end(cache, 1)
    assert run(cache, slots, 2, [*tokens[:38], 7, 8, 9], []) == 36


def test_long_prompts_leave_marks_on_the_way():
    tokens = list(range(2 * MARK_EVERY + 10))
    cache, slots = cache_of(8, blocks=6000), Slots()
    run(cache, slots, 1, tokens, [])
    end(cache, 1)
    assert run(cache, slots, 2, [*tokens[: MARK_EVERY + 3], 1, 2, 3], []) == MARK_EVERY


def test_a_sequence_goes_on_with_two_slots_when_there_are_no_others():
    cache, slots = cache_of(2), Slots()
    assert run(cache, slots, 1, list(range(30)), [9, *[1] * 20]) == 0
    cache.register(2, b"")
    cache.open(2, 0)
    assert cache.extend(2, 4) is None
    assert cache.pools[0].held == 8  # nothing was taken of the other group
    assert cache.needs(2, 4, 4) == [1, 2]
    assert cache.available()[1] == 0
    assert cache.freed([1]) == [8, 2]


def test_a_shared_state_is_not_written():
    cache, slots = cache_of(12), Slots()
    tokens = list(range(13))
    run(cache, slots, 1, tokens, [])
    for number in (2, 3, 4):
        assert run(cache, slots, number, [*range(12), *[100 * number] * 7], []) == 12
    for number in (1, 2, 3, 4):
        end(cache, number)
    assert cache.states.pool.held == 0


def test_states_of_a_faulty_sequence_are_not_found():
    cache, slots = cache_of(12), Slots()
    tokens = list(range(30))
    run(cache, slots, 1, tokens[:17], [])
    assert run(cache, slots, 2, tokens, []) == 16
    end(cache, 2, faulty_from=16)
    assert run(cache, slots, 3, [*tokens, 99], []) == 16


def test_no_marks_without_prefix_caching():
    cache, slots = cache_of(4, prefix_caching=False), Slots()
    assert run(cache, slots, 1, list(range(30)), []) == 0
    end(cache, 1)
    assert run(cache, slots, 2, list(range(30)), []) == 0
    assert cache.states.pool.available == 2


def test_a_prefix_ends_where_a_window_has_what_its_state_goes_on_from():
    """The state after 8 tokens is there, the window before it is not: nothing is shared."""
    groups = [
        GroupSpec("sliding", SIZE, 30, window=4),
        GroupSpec("state", SIZE, 30, window=1, recurrent=True),
    ]
    cache, slots, tokens = KVCache(groups), Slots(), list(range(24))
    run(cache, slots, 1, tokens, [9, 13])
    hashes = list(cache.state_hashes(1))
    end(cache, 1)
    cache.register(2, b"")
    assert cache.find_prefix(2, tokens) == 8
    cache.pools[0].evict([cache.pools[0].find(hashes[1])])
    assert cache.find_prefix(2, tokens) == 0
    cache.open(2, 0)
    cache.check()


def test_states_need_attention_beside_them():
    state = GroupSpec("state", SIZE, 4, window=1, recurrent=True)
    for groups in ([state], [GroupSpec("full", SIZE, 4), state, state]):
        with pytest.raises(InvariantError, match="states need"):
            KVCache(groups)


def guess(
    cache: KVCache, slots: Slots, number: int, tokens: list[int], drafts: int, right: int
) -> int:
    """Compute the last token with guesses, of which the first ones are right, and commit it.

    Returns:
        the tokens that stay computed.
    """
    start, more = len(tokens) - 1, [7 + i % 2 for i in range(drafts)]
    assert cache.extend(number, start + 1 + drafts, drafts=True) is not None
    step = cache.states.plan(number, start, 1, drafts)
    slots.run([*tokens, *more[:right], *[5] * (drafts - right)], start, 1 + drafts, step)
    cache.check()
    tokens += more[:right]
    kept = cache.settle(number, len(tokens))
    cache.commit(number, tokens, kept)
    cache.check()
    assert_true(cache, slots, number, tokens)
    return kept


def assert_true(cache: KVCache, slots: Slots, number: int, tokens: list[int]) -> None:
    """What can be found is the state of the tokens that it is found by, and so is ``now``."""
    chain = cache._chains[number][SIZE].block_hashes
    for index, digest in enumerate(chain):
        if (slot := cache.states.pool.find(digest)) is not None:
            assert slots.content[slot] == tuple(tokens[: (index + 1) * SIZE])


@pytest.mark.parametrize("spare", [0, 1, 3, 30])
@pytest.mark.parametrize("start", range(1, 6))
def test_drafts_may_fail_at_every_place(start, spare):
    """Of any number of guesses any number is right, across boundaries, with few slots and many.

    Afterwards another sequence finds states of the true text alone.
    """
    for drafts in range(1, 10):
        for right in range(drafts + 1):
            cache, slots = cache_of(3 + spare), Slots()
            tokens = list(range(100, 100 + start))
            run(cache, slots, 1, tokens, [])
            tokens.append(50)
            kept = guess(cache, slots, 1, tokens, drafts, right)
            assert start + 1 <= kept <= start + 1 + right
            if right == drafts:
                assert kept == len(tokens)  # nothing is computed twice
            elif spare == 30:
                assert kept >= (start + 1 + right) // SIZE * SIZE
            slots.run(
                [*tokens, 60], kept, len(tokens) + 1 - kept,
                cache.states.plan(1, kept, len(tokens) + 1 - kept),
            )  # fmt: skip
            cache.extend(1, len(tokens) + 1)
            cache.commit(1, [*tokens, 60], len(tokens) + 1)
            cache.check()
            assert_true(cache, slots, 1, [*tokens, 60])
            end(cache, 1)
            wrong = [*tokens[: start + 1 + right], *[5] * 12]
            for number, text in ((2, [*tokens, 60, 61, 62, 63, 64]), (3, wrong)):
                run(cache, slots, number, text, [])  # which checks what is read
                end(cache, number)


def test_a_state_behind_a_wrong_guess_is_found_by_nobody():
    """The guesses fill a block: the text that has them finds the block before it, at most."""
    cache, slots = cache_of(30), Slots()
    tokens = [1, 2, 3, 4, 5, 6]
    run(cache, slots, 1, tokens, [])
    tokens.append(9)
    assert guess(cache, slots, 1, tokens, 5, 0) == 7
    end(cache, 1)
    assert run(cache, slots, 2, [1, 2, 3, 4, 5, 6, 9, 5, 5, 5, 5, 5, 5], []) == 4


def test_a_boundary_among_right_guesses_is_the_mark_of_the_output():
    cache, slots = cache_of(30), Slots()
    tokens = [1, 2, 3, 4, 5, 6]
    run(cache, slots, 1, tokens, [])
    tokens.append(9)
    assert guess(cache, slots, 1, tokens, 6, 2) == 8  # 9 is computed again
    text = [*tokens, 3, 3]
    end(cache, 1)
    assert run(cache, slots, 2, text, []) == 8


def test_a_step_is_not_planned_before_drafts_are_settled():
    cache = cache_of(8)
    cache.register(1, b"")
    cache.open(1, 0)
    assert cache.extend(1, 8, drafts=True) is not None
    cache.states.plan(1, 0, 1, 3)
    with pytest.raises(InvariantError, match="before its drafts are settled"):
        cache.states.plan(1, 1, 1)
    assert cache.settle(1, 1) == 1
    with pytest.raises(InvariantError, match="no drafts of 1 tokens to settle"):
        cache.settle(1, 1)


def test_a_step_is_not_planned_before_lent_slots_are_taken_back():
    cache = cache_of(8)
    cache.register(1, b"")
    cache.open(1, 0)
    assert cache.extend(1, 8) is not None
    cache.states.plan(1, 0, 1)
    cache.states.lend(1, 1)
    with pytest.raises(InvariantError, match="before its lease has ended"):
        cache.states.plan(1, 1, 1)
    cache.states.take_back(1, 0)
    cache.states.plan(1, 1, 1)


def test_drafts_without_a_slot_to_spare_are_not_made():
    cache, slots = cache_of(2), Slots()
    run(cache, slots, 1, [1, 2, 3], [])
    held = cache.pools[0].held
    assert cache.extend(1, 12, drafts=True) is None
    assert cache.pools[0].held == held
    assert cache.extend(1, 12) is not None


# -- the host -------------------------------------------------------------------------------------


def tiers_of(slots: int = 8, host_slots: int = 2) -> TieredCache:
    groups = [
        GroupSpec("full", SIZE, 64),
        GroupSpec("state", SIZE, slots, window=1, recurrent=True),
    ]
    return TieredCache(groups, (64, host_slots))


def begin(tiers: TieredCache, slots: Slots, number: int, tokens: list[int]) -> int:
    """Compute a prompt on the device; return the slot of its state."""
    tiers.register(number, b"")
    tiers.device.open(number, tiers.device.find_prefix(number, tokens))
    assert tiers.device.extend(number, len(tokens)) is not None
    step = tiers.device.states.plan(number, 0, len(tokens))
    slots.run(tokens, 0, len(tokens), step)
    tiers.commit(number, tokens, len(tokens))
    tiers.check()
    return step.write


def test_a_sequence_moves_with_the_state_that_its_next_step_reads():
    tiers, slots, host = tiers_of(), Slots(), Slots()
    tokens = list(range(10))
    now = begin(tiers, slots, 1, tokens)
    held = tiers.device.held(1)
    assert held == [3, 2]
    away, pin = tiers.move(1, 0, 10)
    assert tiers.planned(away, pin) == away
    assert away.state[0] == now
    host.content[away.state[1]] = slots.content[now]
    assert tiers.coming() == held
    tiers.check()
    tiers.complete_move(pin)
    assert tiers.coming() == [0, 0]
    assert tiers.device.states.pool.held == 0
    assert tiers.device.states.pool.cached()  # the mark of the prompt stays
    assert (tiers.host.held(1), tiers.host.needs(1, 11, 1)) == ([3, 1], [0, 1])
    back, pin = tiers.move(1, 0, 10)
    assert back.state[0] == away.state[1]
    slots.content[back.state[1]] = host.content[back.state[0]]
    assert tiers.device.extend(1, 11) is not None
    slots.run([*tokens, 7], 10, 1, tiers.device.states.plan(1, 10, 1))
    tiers.complete_move(pin)
    tiers.commit(1, [*tokens, 7], 11)
    tiers.check()
    assert tiers.host.states.pool.held == 0
    tiers.release(1)
    assert tiers.device.states.pool.held == 0


def test_what_leaves_after_a_step_is_the_state_that_it_writes():
    tiers, slots = tiers_of(), Slots()
    tokens = list(range(10))
    before = begin(tiers, slots, 1, tokens)
    assert tiers.device.extend(1, 11) is not None
    move, pin = tiers.move(1, 0, 11, after_layer=True)  # as the step is filled
    step = tiers.device.states.plan(1, 10, 1)
    move = tiers.planned(move, pin)
    assert step.read == before
    assert move.state[0] == step.write != before
    tiers.check()
    tiers.release(1)  # cancelled meanwhile
    tiers.check()
    assert tiers.device.states.pool.held == 2
    tiers.complete_move(pin)
    tiers.check()
    assert tiers.device.states.pool.held == tiers.host.states.pool.held == 0


def test_a_host_without_a_slot_takes_no_sequence():
    tiers, slots = tiers_of(host_slots=1), Slots()
    for number in (1, 2):
        begin(tiers, slots, number, list(range(20 * number, 20 * number + 10)))
    assert tiers.move(1, 0, 10) is not None
    held = tiers.host.pools[0].held
    assert tiers.move(2, 1, 10) is None
    assert tiers.host.pools[0].held == held


def test_states_of_a_faulty_sequence_that_has_moved_are_not_found():
    for done in (True, False):
        tiers, slots = tiers_of(), Slots()
        tokens = list(range(10))
        begin(tiers, slots, 1, tokens)
        assert tiers.device.states.pool.cached()
        _, pin = tiers.move(1, 0, 10)
        if done:
            tiers.complete_move(pin)
        tiers.release(1, faulty_from=0)
        if not done:
            tiers.complete_move(pin)
        tiers.check()
        assert not tiers.device.states.pool.cached()


@pytest.mark.parametrize("seed", range(40))
def test_any_traffic_reads_what_it_must(seed):
    """Conversations, cuts, preemption, steps in flight and few slots: the content is right."""
    draw = random.Random(seed)
    cache, slots = cache_of(draw.randint(2, 14), draw.randint(20, 60)), Slots()
    texts = [[draw.randrange(4) for _ in range(draw.randint(2, 50))] for _ in range(6)]
    live: dict[int, list] = {}  # number -> tokens, planned, computed steps in flight
    for number in range(300):
        if draw.random() < 0.4 and len(live) < 5:
            text = draw.choice(texts)
            tokens = text[: draw.randint(1, len(text))] + [draw.randrange(3) for _ in range(3)]
            cache.register(number, b"")
            hit = cache.find_prefix(number, tokens)
            cache.open(number, hit)
            if cache.extend(number, min(len(tokens), hit + 1)) is None:
                cache.release(number)
                cache.forget(number)
            else:
                live[number] = [tokens, hit, []]
        for chosen in list(live):
            tokens, planned, flying = live[chosen]
            if draw.random() < 0.5 and planned < len(tokens):
                count = draw.choice((1, 1, 2, 5, 16))
                count = min(count, len(tokens) - planned)
                if cache.extend(chosen, planned + count) is not None:
                    step = cache.states.plan(chosen, planned, count)
                    slots.run(tokens, planned, count, step)
                    flying.append(planned + count)
                    live[chosen][1] += count
            if planned == len(tokens) and draw.random() < 0.7:
                tokens.append(draw.randrange(3))
            while flying and draw.random() < 0.6:
                cache.commit(chosen, tokens, flying.pop(0))
            drafts = draw.randint(1, 9)
            due = not flying and live[chosen][1] == len(tokens) - 1 and draw.random() < 0.4
            if due and cache.extend(chosen, len(tokens) + drafts, drafts=True) is not None:
                start, more = len(tokens) - 1, [draw.randrange(3) for _ in range(drafts)]
                step = cache.states.plan(chosen, start, 1, drafts)
                slots.run([*tokens, *more], start, 1 + drafts, step)
                tokens += more[: draw.randint(0, drafts)]
                live[chosen][1] = cache.settle(chosen, len(tokens))
                cache.commit(chosen, tokens, live[chosen][1])
                assert_true(cache, slots, chosen, tokens)
            if not flying and draw.random() < 0.06:
                cache.release(chosen, faulty_from=None)
                cache.forget(chosen)
                del live[chosen]
            cache.check()
    for chosen, (_, _, flying) in live.items():
        flying.clear()
        end(cache, chosen)
    assert cache.states.pool.held == 0


def test_of_a_conversation_the_newest_mark_stays_longest():
    """Two conversations and four slots beside those that work: each keeps its newest mark."""
    cache, slots = cache_of(6), Slots()
    texts = [[100 * number + i for i in range(9)] for number in range(2)]
    hits, number = [], 0
    for _ in range(4):
        for text in texts:
            number += 1
            text += range(1000 * number, 1000 * number + 6)
            cache.register(number, b"")
            hit = cache.find_prefix(number, text)
            hits.append(hit)
            cache.open(number, hit)
            start = hit
            for _ in range(10):  # the prompt, and output token by token
                assert cache.extend(number, len(text)) is not None
                step = cache.states.plan(number, start, len(text) - start)
                slots.run(text, start, len(text) - start, step)
                cache.commit(number, text, start := len(text))
                text.append(7)
            text.pop()
            end(cache, number)
    assert hits == [0, 0, *[24 + 15 * turn // 4 * 4 for turn in range(3) for _ in texts]]
