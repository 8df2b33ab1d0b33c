"""Offline order: every request once, sharing kept, leaves in falling order, memory shared out."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.blend.blending import ENOUGH, choose_samples
from weft.blend.density import Rates, density
from weft.blend.dual_scan import RIGHT, Node, shares
from weft.blend.forecast import Forecast
from weft.blend.lengths import LengthTable
from weft.blend.order import ORDERS, Jobs, Room, make_order
from weft.blend.partition import partition
from weft.blend.sort import _Sorting, sort_tree
from weft.blend.tree import build_tree
from weft.blend.windows import Windows
from weft.core.errors import ParameterError, ProfileError
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted, ProfileKey
from weft.cost.hardware import hardware
from weft.cost.shape import model_shape

RATES = Rates.of(model_shape("llama-3.1-8b"), hardware("a100"))
HEAD_HEAVY = Rates(1.0, 0.0, 0.1)  # figures that can be followed by hand

prompt_lists = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=24
)


@st.composite
def workloads(draw):
    """Prompts with shared prefixes, and an output length for each."""
    prompts = draw(prompt_lists)
    outputs = draw(st.lists(st.integers(1, 60), min_size=len(prompts), max_size=len(prompts)))
    return prompts, outputs


def common(a, b, block: int) -> int:
    """Tokens in whole blocks that both have, short of the last token of either."""
    same = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return min(same, len(a) - 1, len(b) - 1) // block * block


# -- densities ------------------------------------------------------------------------------------


def test_times_of_a_request_by_hand():
    rates = Rates(2.0, 0.5, 3.0)
    assert rates.compute_s(4, 6) == 2 * 10 + 0.5 * 16
    assert rates.memory_s(4, 6) == 3 * (24 + 18)
    assert density(20.0, 5.0, 10.0) == 2.0


def test_sliding_layers_read_their_window_only():
    """Half of the layers look back 5 tokens: 29.5 in all there, instead of 42."""
    rates = Rates(2.0, 0.5, 3.0, window=5, sliding=0.5)
    exactly = Rates(2.0, 0.5, 3.0)
    assert rates.memory_s(4, 6) == 3 * (42 + 29.5) / 2
    assert rates.memory_s(1, 4) == exactly.memory_s(1, 4)
    assert rates.compute_s(4, 6) == exactly.compute_s(4, 6)
    assert rates.compute_s(10, 0) == 2 * 10 + 0.5 * (100 + 75) / 2
    lengths, outputs = np.array([4.0, 1.0]), np.array([6.0, 4.0])
    assert rates.memory_s(lengths, outputs).tolist() == [107.25, 36.0]


def test_rates_of_a_sheet_know_which_layers_slide():
    sliding = Rates.of(model_shape("mistral-7b"), hardware("a100"))
    assert (sliding.window, sliding.sliding) == (4096, 1.0)
    assert RATES.sliding == 0


def test_rates_of_a_profile_are_those_of_its_largest_step():
    """0.1 ms a token in a step of 1024; a prompt of p tokens has p * p / 2 pairs."""
    key = ProfileKey("cpu", "m", "bf16", "tp1", "none")
    none = dict.fromkeys(FEATURES, 0.0)
    dense, priced = (
        Curve((1, 1024), (0.01, 0.1024)),
        {"prefill_area": 4e-9, "decode_context": 1e-7},
    )
    rates = Rates.of_profile(Fitted(key, 4, dense, {**none, **priced}))
    assert (rates.token_s, rates.square_s, rates.read_s) == pytest.approx((1e-4, 2e-9, 1e-7))
    for context in (0.0, -1e-7):
        fitted = Fitted(key, 4, dense, {**none, "decode_context": context})
        with pytest.raises(ProfileError, match="of m cannot tell compute from memory"):
            Rates.of_profile(fitted)


def test_rates_of_llama_on_an_a100():
    """2 P / C with P = 7.5e9 and C = 312e12; 128 KiB of KV a token over 2.039e12 B/s."""
    assert RATES.token_s == pytest.approx(2 * 7.505e9 / 312e12, rel=1e-3)
    assert RATES.read_s == pytest.approx(131072 / 2.039e12)


# -- tree -----------------------------------------------------------------------------------------


@given(prompt_lists, st.integers(1, 3))
def test_the_tree_knows_what_prompts_share(prompts, block):
    tree = build_tree(prompts, block)
    ordered = [prompts[leaf] for leaf in tree.leaves]
    assert ordered == sorted(prompts)
    wanted = [0] + [common(a, b, block) for a, b in itertools.pairwise(ordered)]
    assert tree.shared.tolist() == wanted
    for node, above in enumerate(tree.parent.tolist()):
        first, last = tree.first[node], tree.last[node]
        depth = tree.depth[node]
        if node:
            assert above < node
            assert tree.first[above] <= first < last <= tree.last[above]
            assert depth > tree.depth[above]
            assert min(wanted[first + 1 : last]) == depth, "a node is as deep as its range allows"
            assert wanted[first] < depth
            assert last == len(wanted) or wanted[last] < depth
    for leaf in range(len(ordered)):
        nodes = [n for n in range(len(tree.parent)) if tree.first[n] <= leaf < tree.last[n]]
        assert tree.leaf_parent[leaf] == max(nodes, key=lambda n: tree.depth[n])


@given(prompt_lists, st.integers(1, 3))
def test_depth_first_order_shares_most_and_keeps_arrival_between_siblings(prompts, block):
    tree = build_tree(prompts, block)
    order = tree.depth_first().tolist()
    assert sorted(order) == list(range(len(prompts)))
    saved = sum(common(prompts[a], prompts[b], block) for a, b in itertools.pairwise(order))
    assert saved <= tree.shared.sum()
    if (
        block == 1
        and all(len(p) > 1 for p in prompts)
        and len(set(map(tuple, prompts))) == len(order)
    ):
        without_prefixes = not any(
            a != b and p[: len(q)] == q
            for a, p in enumerate(prompts)
            for b, q in enumerate(prompts)
        )
        if without_prefixes:
            assert saved == tree.shared.sum()
    assert order[0] == 0


@pytest.mark.parametrize(
    "bad", [[[1], []], [[1], [-1]], [[1], [2**32]], [[1], ["a"]], [[1], [1.5]]]
)
def test_a_bad_prompt_is_named(bad):
    with pytest.raises(ParameterError, match="Prompt 1"):
        build_tree(bad)
    with pytest.raises(ParameterError, match="no prompts"):
        build_tree([])


# -- samples --------------------------------------------------------------------------------------


def test_samples_are_a_share_of_the_whole_and_the_same_for_the_same_seed():
    chosen = choose_samples(10_000, 0.01, seed=3)
    assert len(set(chosen.tolist())) == 100
    assert (chosen == choose_samples(10_000, 0.01, seed=3)).all()
    assert (chosen != choose_samples(10_000, 0.01, seed=4)).any()
    assert choose_samples(5).tolist() == [0, 1, 2, 3, 4]


# -- sort and split -------------------------------------------------------------------------------


@given(workloads(), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]), st.integers(1, 2))
@searching(100)
def test_sorting_keeps_the_sharing_and_splits_only_what_pays(workload, keep, block):
    prompts, outputs = workload
    tree = build_tree(prompts, block)
    lengths = np.asarray(outputs, float)[tree.leaves]
    order = sort_tree(tree, lengths, HEAD_HEAVY, keep=keep)
    assert sorted(order.positions.tolist()) == list(range(len(prompts)))
    saved = int(order.shared.sum())
    assert saved >= keep * tree.shared.sum()
    numbers = tree.leaves[order.positions].tolist()
    really = sum(common(prompts[a], prompts[b], block) for a, b in itertools.pairwise(numbers))
    assert really >= saved, "moved leaves may still happen to share"
    assert order.split <= len(prompts)
    # Monotone, or every split is too dear.
    state = _Sorting(tree, lengths, HEAD_HEAVY, None, keep)
    while state.split():
        pass
    assert state.moved == order.split
    own = state.density[order.positions]
    if (own[1:] > own[:-1]).any():
        home, shared = state._shared_at_home()
        spare = int(shared.sum()) - state.least
        worth = state._mismatch()
        cost = dict(zip(home.tolist(), np.maximum(shared, np.append(shared[1:], 0)), strict=True))
        for leaf in state._out_of_order().tolist():
            dear = state.hangs[leaf] == 0 or cost[leaf] > spare or worth[leaf] <= cost[leaf]
            assert dear, f"leaf {leaf} stands out and could move"


def test_an_outlier_moves_to_its_place_at_the_root():
    """Figure 5 of the paper: request 2, memory-heavy among compute-heavy siblings."""
    long = list(range(20, 220))
    prompts = [[1, 10, *long], [1, 11], [1, 12, *long], [4, *long[:49]], [2, 5], [3, 5]]
    outputs = np.asarray([1.0, 30.0, 1.0, 5.0, 60.0, 100.0])
    tree = build_tree(prompts, 1)
    strict = sort_tree(tree, outputs[tree.leaves], HEAD_HEAVY, keep=1.0)
    assert strict.split == 0
    assert tree.leaves[strict.positions].tolist() == [0, 2, 1, 3, 4, 5]
    loose = sort_tree(tree, outputs[tree.leaves], HEAD_HEAVY, keep=0.5)
    assert loose.split == 1
    assert tree.leaves[loose.positions].tolist() == [0, 2, 3, 1, 4, 5]


@given(workloads())
@searching(100)
def test_absent_leaves_are_left_out(workload):
    prompts, outputs = workload
    tree = build_tree(prompts, 1)
    present = np.arange(len(prompts)) % 3 != 1
    lengths = np.asarray(outputs, float)[tree.leaves]
    order = sort_tree(tree, lengths, HEAD_HEAVY, present=present)
    assert sorted(order.positions.tolist()) == np.flatnonzero(present).tolist()


# -- dual scan ------------------------------------------------------------------------------------


def test_memory_is_shared_out_by_density():
    """The two equations of section 5.3."""
    left, right = Node(20.0, 1.0), Node(0.1, 1.0)
    for rho in (0.5, 1.4, 10.0):
        ours, theirs = shares(left, right, rho, 1000.0)
        assert ours + theirs == 1000
        assert (ours * 20.0 + theirs * 0.1) == pytest.approx(1000 * rho)
    assert shares(left, right, 30.0, 1000.0) == (1000, 0)
    assert shares(left, right, 0.05, 1000.0) == (0, 1000)
    assert shares(right, right, 0.7, 1000.0) == (500, 500)


@given(
    st.floats(1.5, 50), st.floats(0.01, 1), st.floats(0.01, 50), st.floats(1, 9), st.floats(1, 9)
)
def test_shares_add_up_and_balance_what_is_read(high, low, rho, reads_left, reads_right):
    ours, theirs = shares(Node(high, reads_left), Node(low, reads_right), rho, 1000.0)
    assert ours + theirs == pytest.approx(1000)
    assert min(ours, theirs) >= 0
    if low < rho < high:
        read = ours * reads_left + theirs * reads_right
        assert ours * reads_left * high + theirs * reads_right * low == pytest.approx(rho * read)


# -- forecast -------------------------------------------------------------------------------------


@given(workloads(), st.data())
@searching(100)
def test_the_forecast_is_the_peak_of_what_is_held(workload, data):
    prompts, outputs = workload
    tree = build_tree(prompts, 1)
    capacity = data.draw(st.integers(20, 150))
    several = data.draw(st.lists(st.integers(1, 3), min_size=len(prompts), max_size=len(prompts)))
    forecast = Forecast(tree, capacity, choices=np.asarray(several, np.int64))
    live: dict[int, tuple[int, int]] = {}

    def held(at: int, of: dict[int, tuple[int, int]]) -> int:
        running = {leaf: start for leaf, (start, end) in of.items() if end > at}
        return sum(
            int(tree.lengths[leaf] - tree.depth[tree.leaf_parent[leaf]])
            + several[leaf] * (at - start)
            for leaf, start in running.items()
        )

    def prefixes(leaves) -> int:
        nodes: set[int] = set()
        for leaf in leaves:
            node = int(tree.leaf_parent[leaf])
            while node > 0:
                nodes.add(node)
                node = int(tree.parent[node])
        return sum(int(tree.depth[node] - tree.depth[tree.parent[node]]) for node in nodes)

    for leaf in data.draw(st.permutations(range(len(prompts)))):
        for other in [o for o, (_, end) in live.items() if end <= forecast.now]:
            forecast.release(other)
            del live[other]
        with_it = {**live, leaf: (forecast.now, forecast.now + outputs[leaf])}
        ends = {o: end for o, (_, end) in with_it.items()}
        # Just before an end its sequence is held in full: held(end - 1) and one token for each.
        peak = max(
            held(end - 1, with_it) + sum(several[o] for o, e in ends.items() if e >= end)
            for end in ends.values()
            if end <= forecast.now + outputs[leaf]
        )
        assert forecast.fits(leaf, outputs[leaf]) == (peak + prefixes(with_it) <= capacity)
        if forecast.fits(leaf, outputs[leaf]):
            forecast.admit(leaf, outputs[leaf])
            live = with_it
            assert forecast.held() == held(forecast.now, live) + prefixes(live)
        forecast.check()
        if live and data.draw(st.booleans()):
            some = data.draw(st.sampled_from(sorted(live)))
            forecast.tick(some, data.draw(st.integers(0, live[some][1] - live[some][0])))


# -- the front ------------------------------------------------------------------------------------


def serve(order, outputs, *, progress: bool = False, fail=()) -> list[tuple[int, int]]:
    """A null engine: every running request gains a token a step. (step, request) at each start."""
    running: dict[int, int] = {}
    started: list[tuple[int, int]] = []
    for step in itertools.count():
        while (number := order.next()) is not None:
            running[number] = 0
            started.append((step, number))
        if not running:
            assert order.remaining == 0, "nothing runs and nothing comes"
            return started
        for number in list(running):
            running[number] += 1
            if progress:
                order.progress(number, running[number])
            if running[number] >= outputs[number]:
                del running[number]
                order.ended(number, None if number in fail else outputs[number])
    raise AssertionError("unreachable")


@given(
    workloads(),
    st.sampled_from([*ORDERS, "dfs with a forecast"]),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(0, 3),
    st.booleans(),
)
@searching(150)
def test_every_request_is_handed_out_exactly_once(workload, kind, kv, most, seed, progress):
    prompts, outputs = workload
    done = {number: outputs[number] for number in range(len(prompts)) if number % 5 == 4}
    room = Room(kv, most, block_size=2)

    def once():
        table = LengthTable() if kind not in ORDERS else None
        name = kind.split()[0]
        order = make_order(name, Jobs(prompts, outputs, done), room, RATES, seed, table)
        found = serve(order, outputs, progress=progress, fail={0, 3})
        assert order.remaining == 0
        return found

    found = once()
    assert found == once(), "equal calls, equal answers"
    counts = Counter(number for _, number in found)
    assert counts == Counter(set(range(len(prompts))) - set(done))


def blended(count: int, seed: int = 0):
    """Short prompts with long answers and long prompts with short ones, shuffled."""
    rng = np.random.default_rng(seed)
    prompts, outputs = [], []
    for number in range(count):
        long_prompt = rng.random() < 0.7
        head = [7] * 16 if long_prompt else [8] * 16
        size = int(rng.integers(300, 500)) if long_prompt else 8
        prompts.append([*head, *rng.integers(10, 30_000, size).tolist(), number])
        outputs.append(int(rng.integers(4, 12)) if long_prompt else int(rng.integers(600, 1400)))
    return prompts, outputs


def side_by_side(prompts, outputs, kind) -> float:
    """Share of the steps in which requests of both kinds run."""
    order = make_order(kind, Jobs(prompts), Room(40_000, 512), Rates(1e-4, 0.0, 2e-8))
    started = serve(order, outputs)
    ends = [step + outputs[number] for step, number in started]
    kinds = np.zeros((2, max(ends)), bool)
    for (step, number), end in zip(started, ends, strict=True):
        kinds[int(outputs[number] > 100), step:end] = True
    return float(kinds.all(0).mean())


def test_compute_and_memory_heavy_requests_run_side_by_side():
    workload = blended(2000)
    assert side_by_side(*workload, "dfs") < 0.3
    assert side_by_side(*workload, "blend") > 0.6


@pytest.mark.parametrize("progress", [False, True])
def test_blend_fills_the_memory_and_does_not_overflow_it(progress):
    kv, means = 40_000, []
    for seed in (1, 2, 3):
        prompts, outputs = blended(2000, seed)
        room = Room(kv, 512, block_size=1)
        order = make_order("blend", Jobs(prompts), room, Rates(1e-4, 0.0, 2e-8))
        started = serve(order, outputs, progress=progress)
        spans = [(step, step + outputs[n], len(prompts[n])) for step, n in started]
        held = [
            sum(size - 16 + at - first for first, last, size in spans if first <= at < last) + 32
            for at in range(0, max(last for _, last, _ in spans), 100)
        ]
        filled = held[len(held) // 4 : -len(held) // 10]  # lengths are known, and work is left
        assert max(held) < 1.2 * kv, "lengths are averages: a little above may happen"
        means.append(sum(filled) / len(filled))
    assert sum(means) / len(means) > 0.75 * kv


def test_a_kind_starts_as_soon_as_the_first_of_its_samples_has_ended():
    """Answers of 600 to 1400 tokens; sorting at 512 and 1024 steps alone would be too late."""
    prompts, outputs = blended(300, 5)
    order = make_order("blend", Jobs(prompts), Room(400_000, 512), Rates(1e-4, 0.0, 2e-8))
    started = {number: step for step, number in serve(order, outputs, progress=True)}
    long = [number for number in started if outputs[number] > 100]
    first_end = min(started[n] + outputs[n] for n in long)
    assert first_end < 750
    samples = [n for n in long if started[n] < first_end]
    assert 10 <= len(samples) <= 16, "too few of the kind were drawn, so some were added"
    assert min(started[n] for n in set(long) - set(samples)) <= first_end + 8


def test_samples_are_added_where_too_few_tell_anything():
    """Two kinds of 60: of each some are drawn; of the first none has ended, all of the other."""
    prompts = [[kind] * 16 + [number] for kind in (1, 2) for number in range(60)]
    order = make_order("blend", Jobs(prompts), Room(10**6, 512), RATES)
    drawn = set(choose_samples(120).tolist())
    first = [order.next() for _ in range(len(drawn))]
    assert set(first) == drawn
    assert order.next() is None
    of_first = [number for number in first if number < 60]
    assert 2 <= len(of_first) < ENOUGH
    for number in set(first) - set(of_first):
        order.ended(number, 5)
    order.progress(of_first[0], 40)
    more = []
    while (number := order.next()) is not None and len(more) < 100:
        more.append(number)
    added = [number for number in more if number < 60]
    assert len(added) == ENOUGH - len(of_first), "then one of ten will tell soon"
    assert len(added) < len(more), "of the other kind enough is known"
    order.ended(of_first[0], 41)
    order.progress(of_first[1], 60)
    more = []
    while (number := order.next()) is not None and len(more) < 100:
        more.append(number)
    assert any(number < 60 for number in more), "one in ten has ended: the others may go"


def test_a_resumed_run_is_not_misled_by_the_short_ones_that_are_done():
    """Of requests that end alike the short ones are done when a run is cut short."""
    draw = np.random.default_rng(3)
    outputs = np.where(draw.random(1000) < 0.5, 4, 1000).tolist()
    prompts = [[7, number] for number in range(1000)]
    done = {number: output for number, output in enumerate(outputs) if output == 4}
    order = make_order("blend", Jobs(prompts, done=done), Room(10**6, 64), RATES)
    samples = set(choose_samples(1000).tolist())
    first = [order.next() for _ in range(len(samples - set(done)))]
    assert set(first) == samples - set(done)
    for number in first:
        order.ended(number, outputs[number])
    number = order.next()
    expected = order.forecast.expected(order._leaf[number])
    assert 200 < expected < 800, "the average of all, not that of the short ones"


def test_depth_first_learns_of_a_run_that_was_cut_short_without_being_misled():
    """Half of the answers have 4 tokens, half 1000. Two thirds were asked, of which those of 1000
    that came last were open."""
    draw = np.random.default_rng(3)
    outputs = np.where(draw.random(900) < 0.5, 4, 1000).tolist()
    prompts = [[7, number] for number in range(900)]
    long = [n for n in range(600) if outputs[n] == 1000]
    done = {n: outputs[n] for n in range(600) if n not in long[-64:]}
    order = make_order(
        "dfs", Jobs(prompts, done=done), Room(10**6, 64), RATES, lengths=LengthTable()
    )
    leaf = order._leaf[order.next()]
    plain = np.mean(list(done.values()))
    truth = np.mean(outputs)
    assert abs(order.forecast.expected(leaf) / truth - 1) < 0.05 < abs(plain / truth - 1)


def test_a_request_that_outgrows_its_estimate_moves_to_the_heavy_side():
    prompts, outputs = blended(400, 2)
    order = make_order(
        "blend",
        Jobs(prompts, done={n: outputs[n] for n in choose_samples(400).tolist()}),
        Room(9000, 99),
        RATES,
    )
    number = order.next()
    while order.scan.side(order._leaf[number]) == RIGHT:
        number = order.next()
    leaf = order._leaf[number]
    expected, used = order.forecast.expected(leaf), order.scan.used[RIGHT]
    order.progress(number, expected + 5)
    order.next()
    assert order.scan.side(leaf) == RIGHT
    assert order.scan.used[RIGHT] > used
    assert order.forecast.expected(leaf) > expected + 5


def test_a_bound_lets_requests_start_before_samples_have_ended():
    prompts = [[number, *range(20)] for number in range(200)]
    room = Room(10_000, 512)

    def started(longest) -> int:
        order = make_order("blend", Jobs(prompts, longest), room, RATES)
        first = order.next()
        for step in range(70):
            order.progress(first, step)
            while order.next() is not None:
                pass
        return 200 - order.remaining

    samples = len(choose_samples(200))
    assert started(None) == samples
    assert started([100] * 200) > 2 * samples


def test_bad_input_of_the_front():
    with pytest.raises(ParameterError, match="known: blend, dfs, fcfs, random"):
        make_order("lifo", Jobs([[1]]), Room(10, 1), RATES)
    with pytest.raises(ParameterError, match="2 bounds"):
        Jobs([[1]], [1, 2])
    with pytest.raises(ParameterError, match="no prompt 4"):
        Jobs([[1]], done={4: 1})
    with pytest.raises(ParameterError, match="kv_tokens"):
        Room(0, 1)
    order = make_order("blend", Jobs([[1]]), Room(10, 1), RATES)
    with pytest.raises(ParameterError, match="does not run"):
        order.ended(0, 3)


# -- partition and windows ------------------------------------------------------------------------


@given(workloads(), st.integers(1, 4))
@searching(100)
def test_parts_hold_every_request_once(workload, parts):
    prompts, outputs = workload
    tree = build_tree(prompts, 1)
    lengths = np.asarray(outputs, float)[tree.leaves]
    if parts > len(prompts):
        with pytest.raises(ParameterError, match="cannot be cut"):
            partition(tree, lengths, RATES, parts)
        return
    found = partition(tree, lengths, RATES, parts)
    assert sorted(itertools.chain(*found)) == list(range(len(prompts)))
    assert all(found)


def test_parts_are_as_large_as_their_weights():
    prompts, outputs = blended(3000, 3)
    tree = build_tree(prompts)
    lengths = np.asarray(outputs, float)[tree.leaves]
    present = np.ones(3000, bool)
    present[::3] = False
    found = partition(tree, lengths, RATES, 3, weights=[1, 2, 5], present=present)
    assert sorted(itertools.chain(*found)) == sorted(tree.leaves[present].tolist())
    sizes, outs = np.asarray([len(p) for p in prompts], float), np.asarray(outputs, float)
    for load in (RATES.compute_s(sizes, outs), RATES.memory_s(sizes, outs)):
        sums = np.asarray([load[part].sum() for part in found])
        assert np.allclose(sums / sums.sum(), [1 / 8, 2 / 8, 5 / 8], atol=0.01)
    for weights in ([1], [1, 0], [1, float("nan")]):
        with pytest.raises(ParameterError, match="weights above 0"):
            partition(tree, lengths, RATES, 2, weights=weights)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_have_equal_loads_and_little_lost_sharing(parts):
    prompts, outputs = blended(4000, 3)
    tree = build_tree(prompts)
    lengths = np.asarray(outputs, float)[tree.leaves]
    found = partition(tree, lengths, RATES, parts)
    sizes = np.asarray([len(prompt) for prompt in prompts], float)
    outs = np.asarray(outputs, float)
    for load in (RATES.compute_s(sizes, outs), RATES.memory_s(sizes, outs)):
        sums = [load[part].sum() for part in found]
        assert max(sums) < 1.02 * min(sums)
    shared = sum(build_tree([prompts[n] for n in part]).shared.sum() for part in found)
    assert shared > 0.99 * tree.shared.sum()


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 30)), max_size=30), st.floats(0, 20))
def test_a_pool_ends_before_its_oldest_request_is_due(requests, deadline):
    windows = Windows(deadline + 1)
    arrivals = sorted(arrival for arrival, _ in requests)
    work = [seconds for _, seconds in requests]
    for number, arrival in enumerate(arrivals):
        windows.add(number, arrival, work[number])
    now, seen = (arrivals[0] if arrivals else 0.0), []
    while pool := windows.take(now):
        ends = list(itertools.accumulate((work[number] for number in pool), initial=now))[1:]
        dues = [arrivals[number] + deadline + 1 for number in pool]
        in_time = [due for end, due in zip(ends, dues, strict=True) if end <= due]
        now = ends[-1]
        assert not in_time or now <= in_time[0]
        rest = len(seen) + len(pool)
        assert rest == len(requests) or now + work[rest] > in_time[0]
        seen += pool
    assert seen == list(range(len(requests)))


def test_a_pool_is_not_cut_to_nothing_by_a_request_that_is_nearly_due():
    for least, pool in ((0.0, [0]), (2.5, [0, 1, 2])):
        windows = Windows(10.0, least)
        for number in range(9):
            windows.add(number, float(number), 1.0)
        assert windows.take(9.0) == pool


def test_windows_name_what_comes_late():
    windows = Windows(10.0)
    for number, work in enumerate((4.0, 4.0, 4.0, 1.0)):
        windows.add(number, 0.0, work)
    assert windows.late(0.0) == [2, 3]
    assert windows.take(0.0) == [0, 1]
    assert windows.take(8.0) == [2, 3], "both are late, so nothing is gained by one at a time"
    windows.add(4, 0.0, 1.0)
    with pytest.raises(ParameterError, match="out of order"):
        windows.add(9, -1.0, 1.0)
    with pytest.raises(ParameterError, match="lie ahead"):
        Windows(0)
