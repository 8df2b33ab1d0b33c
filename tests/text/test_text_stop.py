"""Stop strings against a naive scan, for any cutting of the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.core.errors import ParameterError
from weft.text import StopMatcher

texts = st.text(alphabet="ab", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)
cut_lists = st.lists(st.integers(0, 24), max_size=6)


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """After each character, look whether the text ends with a stop; the longest of those wins."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(texts, stop_lists, cut_lists, st.booleans())
@example("aab", ["ab"], [2], False)
@example("abcd", ["abcd", "bc"], [2], False)
def test_any_cutting_gives_the_result_of_a_naive_scan(text, stops, cuts, include):
    matcher = StopMatcher(stops, include_stop=include)
    results = [matcher.push(piece) for piece in cut(text, cuts)]
    got = "".join(safe for safe, _ in results) + matcher.flush()
    assert (got, results[-1][1]) == naive(text, stops, include)
    assert matcher.stopped_by == results[-1][1]


@given(texts, stop_lists)
def test_holds_back_only_what_may_still_become_a_stop(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for end, char in enumerate(text, 1):
        safe, stopped = matcher.push(char)
        shown += safe
        if stopped:
            return
        held = text[len(shown) : end]
        prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
        longest = max(
            (text[start:end] for start in range(end + 1)), key=lambda s: (s in prefixes, len(s))
        )
        assert held == longest


@given(texts, stop_lists, texts)
def test_would_stop_foretells_push_and_changes_nothing(text, stops, more):
    matcher = StopMatcher(stops)
    matcher.push(text)
    told = matcher.would_stop(more)
    assert told == matcher.would_stop(more)
    if matcher.stopped_by is None:
        assert told == (matcher.push(more)[1] is not None)


def test_the_stop_completed_first_wins_then_the_longest():
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopMatcher(["b", "ab"]).push("xab") == ("x", "ab")


def test_after_a_stop_nothing_more_comes():
    matcher = StopMatcher(["END"])
    assert matcher.push("a EN") == ("a ", None)
    assert matcher.push("D more") == ("", "END")
    assert matcher.push("text") == ("", "END")
    assert matcher.flush() == ""


def test_a_long_stop_of_one_letter_is_not_slow():
    matcher = StopMatcher(["a" * 1000 + "b"])
    safe = "".join(matcher.push("a" * 100)[0] for _ in range(300))
    assert safe + matcher.flush() == "a" * 30_000


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ParameterError, match="must not be empty"):
        StopMatcher(["x", ""])
