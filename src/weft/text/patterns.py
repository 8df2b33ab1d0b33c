"""Bounds of regular expressions, checked before compilation."""

from __future__ import annotations

from weft.core.errors import GrammarError

MAX_PATTERN_CHARS = 4096
MAX_NESTED_REPETITIONS = 10_000


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression that would take too long. Raises GrammarError."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise GrammarError(f"the expression has more than {MAX_PATTERN_CHARS} characters")
    check_repetitions(pattern)


def check_repetitions(text: str) -> None:
    """Refuse counted repetitions within others whose product is large: ``((a{99}){99}){99}``."""
    inner = [1]  # for each open group the largest product within it
    last = 1  # of the item before the current place
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\":
            at, last = at + 1, 1
        elif char == "(":
            inner.append(1)
            last = 1
        elif char == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
        elif char == "{" and (count := _count(text, at)):
            if last > 1 and last * count > MAX_NESTED_REPETITIONS:
                raise GrammarError(
                    f"repetitions within repetitions may make {MAX_NESTED_REPETITIONS} at most"
                )
            last *= count
            inner[-1] = max(inner[-1], last)
            at = text.index("}", at) + 1
        elif char not in "*+?":
            last = 1


def _count(text: str, at: int) -> int:
    """The larger number of ``n}``, ``n,}`` or ``n,m}``; 0 if it is no count."""
    end = text.find("}", at, at + 32)
    parts = text[at:end].split(",") if end > 0 else []
    numbers = [int(part) for part in parts if part.strip().isdecimal()]
    return max(numbers, default=0) if len(parts) <= 2 else 0
