"""Fits: recover known costs, with noise and through a file; errors give the reason."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import ConfigError, ProfileError
from weft.cost.curves import Curve, Grid, divide
from weft.cost.fit import (
    FEATURES,
    Fitted,
    Point,
    ProfileKey,
    accuracy,
    agreement,
    fit,
    profile_path,
)
from weft.cost.host_costs import CarryCost, HostCosts, MoveCost, OverlapCost, WakeCost
from weft.cost.model import step_time
from weft.cost.work import Work

KEY = ProfileKey("epyc-7763 x2", "weft-builtin", "bfloat16", "tp1", "linear=cpu attention=cpu")


def tiled(tokens: int) -> float:
    """A dense curve with a spike at every 128 tokens, as of a GPU's tiles."""
    return 1e-3 * (1 + (tokens - 1) // 128) + 1e-7 * tokens


def test_divide_and_conquer_finds_spikes_with_few_measurements():
    measured = divide(tiled, 1, 1024)
    curve = Curve(tuple(measured), tuple(measured.values()))
    errors = [abs(curve.at(n) - tiled(n)) / tiled(n) for n in range(1, 1025)]
    assert sum(errors) / len(errors) < 0.03
    assert len(measured) < 80


def test_a_flat_curve_needs_its_ends_only():
    asked: list[int] = []

    def flat(tokens: int) -> float:
        asked.append(tokens)
        return 1e-3 + tokens * 1e-9

    assert set(divide(flat, 1, 4096)) == {1, 16, 4096}
    assert len(asked) == len(set(asked))


@given(
    st.lists(st.tuples(st.integers(1, 999), st.floats(0, 1)), min_size=2, unique_by=lambda p: p[0])
)
def test_a_curve_goes_through_its_knots_and_on(pairs):
    pairs.sort()
    curve = Curve(tuple(n for n, _ in pairs), tuple(s for _, s in pairs))
    for tokens, seconds in pairs:
        assert curve.at(tokens) == pytest.approx(seconds)
    last, before = pairs[-1], pairs[-2]
    slope = (last[1] - before[1]) / (last[0] - before[0])
    assert curve.at(2000) == pytest.approx(last[1] + slope * (2000 - last[0]))


def test_cpu_attention_is_bilinear_in_decodes_and_mean_context():
    def seconds(decodes: int, context: float) -> float:
        return 1e-5 + 2e-6 * decodes + 3e-9 * context + 1e-8 * decodes * context

    grid = Grid.of({(n, c): seconds(n, c) for n in (1, 8, 64) for c in (16, 256, 4096)})
    for decodes, context in ((1, 16), (5, 700), (64, 4096), (100, 9000)):
        assert grid.at(decodes, decodes * context) == pytest.approx(seconds(decodes, context))
    with pytest.raises(ProfileError, match=r"lacks \(2, 5\)"):
        Grid.of({(1, 4): 1.0, (1, 5): 1.0, (2, 4): 1.0})
    with pytest.raises(ProfileError, match="at least 2 x 2"):
        Grid.of({(1, 4): 1.0})


def truth(work: Work) -> float:
    """A made-up machine with every feature; a3 is negative, as OmniServe found."""
    seconds = tiled(work.tokens) + 2e-6 * work.sampled + 4e-6 * work.prefills
    if work.prefills:
        seconds += 1e-5 + 3e-10 * work.prefill_area
    if work.decodes:
        seconds += 2e-5 + 2e-8 * work.decode_context - 1e-6 * work.decodes
        seconds -= 3e-6 * min(work.decodes, 8)
    return seconds


KNOTS = sorted({1, 16, *(n + edge for n in range(128, 1025, 128) for edge in (0, 1))})


def mixed(random_: random.Random) -> Work:
    work = Work()
    for _ in range(random_.choice((0, 1, 1, 2, 4))):
        work.add(random_.choice((0, 0, 300, 900)), random_.randint(2, 200), random_.random() < 0.5)
    for _ in range(random_.choice((0, 1, 8, 60)) or (not work.tokens)):
        work.add(random_.randint(8, 1000), 1)
    return work


def points(seed: int, count: int, noise: float = 0.0) -> list[Point]:
    random_ = random.Random(seed)
    works = [mixed(random_) for _ in range(count)]
    for tokens in KNOTS:
        works.append(Work())
        works[-1].add(0, tokens, False)
    return [Point(work, truth(work) * random_.gauss(1, noise)) for work in works]


def test_the_fit_finds_what_made_the_points():
    fitted = fit(KEY, 6, points(1, 300), KNOTS)
    assert fitted.coefficients["prefill_area"] == pytest.approx(3e-10, rel=1e-3)
    assert fitted.coefficients["decode_context"] == pytest.approx(2e-8, rel=1e-3)
    assert fitted.coefficients["prefill_row"] == pytest.approx(4e-6, rel=1e-3)
    assert fitted.coefficients["decode_few"] == pytest.approx(-3e-6, rel=1e-2)
    assert fitted.coefficients["decode_row"] + fitted.coefficients["sampled"] == pytest.approx(
        1e-6, rel=1e-2
    )
    assert accuracy(fitted, points(2, 100)) == pytest.approx((1, 1), abs=1e-4)


def test_noise_on_points_stays_noise():
    fitted = fit(KEY, 6, points(3, 300, noise=0.03), KNOTS)
    exact = accuracy(fitted, points(4, 100))
    assert exact.average > 0.97
    assert exact.p90 > 0.95


def test_terms_add_up_to_the_step():
    fitted = fit(KEY, 6, points(5, 300), KNOTS)
    for work, seconds in points(6, 20):
        assert fitted.terms(work).total == pytest.approx(seconds, rel=1e-3)
        assert step_time(fitted, [work]) == pytest.approx(fitted.terms(work).total)
    assert fitted.terms(Work()).total == 0


GRID = Grid((1, 8), (16, 256), ((1e-6, 2e-6), (3e-6, 4e-6)))
HOST = HostCosts(
    GRID, MoveCost(1e-5, 1e-8), MoveCost(2e-5, 3e-8), 0.25, False, CarryCost(1e-4, 1e-6)
)


WAKES = replace(HOST, wake=WakeCost(1e-3, 1e-6))
OVERLAPS = replace(WAKES, overlap=OverlapCost(1e-4, 2e-6, -3e-4, 5e-5, 0.25))


@pytest.mark.parametrize("host", [HOST, WAKES, OVERLAPS])
def test_a_profile_survives_its_file(tmp_path, host):
    fitted = replace(fit(KEY, 6, points(7, 100), KNOTS), hosts={"1 thread of the engine": host})
    path = tmp_path / "made" / "profile.json"
    fitted.save(path, {"accuracy": 0.95})
    assert Fitted.load(path, KEY) == Fitted.load(path) == fitted
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def test_the_host_tier_that_is_planned_with_gives_its_terms():
    fitted = fit(KEY, 6, points(7, 100), KNOTS).planned_with(HOST)
    work = Work(tokens=3, sampled=3)
    work.host_decodes, work.host_context, work.out_tokens = 2, 200, 2
    terms = fitted.terms(work)
    assert terms.cpu_attention == GRID.at(2, 200)
    assert terms.moving == pytest.approx(1e-5 + 2e-8)
    assert terms.kv_stall == pytest.approx(0.25 * terms.moving)
    work.in_tokens = 5
    assert fitted.terms(work).moving == pytest.approx(1e-5 + 2e-8 + 2e-5 + 15e-8)
    both = fitted.planned_with(replace(HOST, duplex=True))
    assert both.terms(work).moving == pytest.approx(2e-5 + 15e-8)
    assert fitted.terms(Work(piggyback_layers=10)).piggybacked == pytest.approx(1e-4 + 1e-5)
    assert fitted.terms(Work()).total == 0


def test_a_step_that_awaits_the_host_takes_what_was_measured_of_such_steps():
    fitted = fit(KEY, 6, points(7, 100), KNOTS)
    work = Work(tokens=3, sampled=3)
    work.host_decodes, work.host_context, work.out_tokens = 2, 200, 2
    wakes, overlaps = fitted.planned_with(WAKES), fitted.planned_with(OVERLAPS)
    assert wakes.terms(work).cpu_attention == pytest.approx(GRID.at(2, 200) + 1e-3 + 2e-6)
    terms = overlaps.terms(work)
    assert terms.cpu_attention == pytest.approx(GRID.at(2, 200) + 5e-5)
    assert terms.handover == pytest.approx(1e-4 + 2 * 2e-6 + 0.25 * GRID.at(2, 200))
    assert terms.moving == 0.0  # K and V of the decodes go with their queries
    assert overlaps.terms(replace(work, out_tokens=12)).moving == pytest.approx(1e-5 + 10e-8)
    alone, row = fitted.terms(Work(tokens=3, sampled=3)), fitted.coefficients["decode_row"]
    assert terms.head == pytest.approx(alone.head + 2 * (row + fitted.coefficients["decode_few"]))
    assert terms.total == pytest.approx(
        alone.total - alone.head + terms.head + terms.handover + terms.cpu_attention
    )
    device = Work(tokens=5, sampled=5, decodes=5, decode_context=500)
    one = overlaps.terms(device)
    want = max(one.linear, terms.cpu_attention) + max(terms.linear, 0) + one.attention - 3e-4
    want += overlaps.terms(device.joined(work)).outside
    assert step_time(overlaps, [device, work]) == pytest.approx(want)
    assert step_time(overlaps, [device]) == step_time(fitted, [device])


def test_what_a_move_stalls_comes_on_top_of_the_layers():
    fitted = fit(KEY, 6, points(7, 100), KNOTS)
    decodes = Work(tokens=3, sampled=3, decodes=3, decode_context=300)
    moving = replace(decodes, out_tokens=10)
    alone_s = step_time(fitted, [decodes])
    for stall, added in ((1.0, 1e-5 + 1e-7), (0.0, 0.0)):
        host = fitted.planned_with(replace(HOST, stall=stall))
        assert step_time(host, [moving]) == pytest.approx(alone_s + added)


def test_a_file_keeps_the_host_tiers_that_are_not_measured_again(tmp_path):
    path, plain = tmp_path / "profile.json", fit(KEY, 6, points(7, 100), KNOTS)
    replace(plain, hosts={"1 thread of the engine": HOST}).save(path, {"accuracy": 0.95})
    slower = replace(HOST, out=MoveCost(1.0, 1.0))
    replace(plain, hosts={"2 threads of weft-host": slower}).save(path)
    assert Fitted.load(path, KEY).hosts == {
        "1 thread of the engine": HOST,
        "2 threads of weft-host": slower,
    }
    assert json.loads(path.read_text())["report"] == {"accuracy": 0.95}
    other = replace(plain, key=replace(KEY, model="llama"))
    other.save(path)
    assert Fitted.load(path).hosts == {}


def test_a_profile_without_a_host_refuses_host_work():
    fitted = fit(KEY, 6, points(8, 100), KNOTS)
    with pytest.raises(ConfigError, match="no CPU attention"):
        fitted.terms(Work(tokens=1, host_decodes=1, host_context=9))
    with pytest.raises(ConfigError, match="no moves"):
        fitted.terms(Work(out_tokens=1))


def test_a_profile_that_cannot_be_used_says_why(tmp_path):
    path = tmp_path / "profile.json"
    with pytest.raises(ProfileError, match=r"no profile .* weft profile --model weft-builtin"):
        Fitted.load(path, KEY)
    fit(KEY, 6, points(9, 100), KNOTS).save(path)
    other = ProfileKey(KEY.hardware, "llama", KEY.dtype, "tp2", KEY.kernels)
    with pytest.raises(ProfileError, match="model is 'weft-builtin', not 'llama', parallelism is"):
        Fitted.load(path, other)
    whole = json.loads(path.read_text())
    for damage in (
        {"version": 3},
        {"hosts": {"1 thread of the engine": {"out": 1}}},
        {"layers": "many"},
        {"dense": {"tokens": [5, 3], "seconds": [1, 1]}},
        {"coefficients": {"prefill": 1}},
        {"key": {"hardware": "x"}},
    ):
        path.write_text(json.dumps(whole | damage))
        with pytest.raises(ProfileError):
            Fitted.load(path)
    path.write_text(json.dumps(whole | {"version": 3}))
    with pytest.raises(ProfileError, match=r"has version 3, not 4\. Make one with: weft profile"):
        Fitted.load(path, KEY)
    path.write_text("{")
    with pytest.raises(ProfileError, match="not a profile"):
        Fitted.load(path)


def test_fits_that_cannot_be_made_say_why():
    with pytest.raises(ProfileError, match=f"{len(KNOTS) + len(FEATURES)} unknowns"):
        fit(KEY, 6, points(10, 0)[:20], KNOTS)
    with pytest.raises(ProfileError, match="no step of 5 tokens"):
        fit(KEY, 6, points(10, 100), [5, *KNOTS[1:]])
    with pytest.raises(ProfileError, match="no time"):
        fit(KEY, 6, [*points(10, 100), Point(Work(tokens=1), 0.0)], KNOTS)


def test_where_profiles_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = profile_path(KEY)
    assert path.parent == tmp_path / "weft" / "profiles"
    assert path.name.startswith("weft-builtin-bfloat16-tp1-")
    again = ProfileKey("other machine", *list(vars(KEY).values())[1:])
    assert profile_path(again) != path
    assert str(profile_path(KEY, "here.json")) == "here.json"


def test_accuracy_is_the_mean_and_what_nine_of_ten_reach():
    pairs = [(1.01, 1.0)] * 8 + [(0.9, 1.0)] + [(1.5, 1.0)]
    assert agreement(pairs) == pytest.approx((0.8 * 0.99 + 0.09 + 0.05, 0.9))
    with pytest.raises(ProfileError):
        agreement([])
