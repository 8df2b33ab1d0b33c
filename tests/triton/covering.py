"""Few cases in which every two values of different factors meet, instead of their product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

_Pair = tuple[tuple[str, int], tuple[str, int]]  # two factors, and the places of their values


def covering(factors: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Return cases, a value for each factor, so that all pairs of values are in some case.

    Each case begins with a pair that is in none yet and takes of every other factor the value that
    brings most new pairs (Cohen et al. 1997, AETG). Equal calls return equal cases.
    """
    names = sorted(factors, key=lambda name: -len(factors[name]))
    open_pairs: dict[_Pair, None] = dict.fromkeys(
        ((a, x), (b, y))
        for a, b in combinations(names, 2)
        for x, y in product(range(len(factors[a])), range(len(factors[b])))
    )
    cases = []
    while open_pairs:
        case = dict(next(iter(open_pairs)))
        for name in names:
            places = [case[name]] if name in case else range(len(factors[name]))
            news = [sum(pair in open_pairs for pair in _with(case, name, x)) for x in places]
            case[name] = places[news.index(max(news))]
        for pair in combinations(((name, case[name]) for name in names), 2):
            open_pairs.pop(pair, None)
        cases.append({name: factors[name][case[name]] for name in factors})
    return cases


def each_once(factors: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Return as few cases as there are in which every value of every factor occurs."""
    number = max(map(len, factors.values()))
    return [{name: of[i % len(of)] for name, of in factors.items()} for i in range(number)]


def _with(case: Mapping[str, int], name: str, place: int) -> list[_Pair]:
    """The pairs of one more value and those of a case, in both orders."""
    pairs = [((other, at), (name, place)) for other, at in case.items() if other != name]
    return pairs + [(b, a) for a, b in pairs]
