"""Mutates valid bodies: their bytes, and their contents."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[Any], Any]

PIECES = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"null", b"true", b"NaN", b"Infinity",
    b"1e999", b"-0", b"9" * 400, b"0." + b"1" * 400, b"\\u0000", b"\\ud800", b"\xff",
    b"\xed\xa0\x80", b"\x00", b"[" * 2000, b'{"a":' * 1000, b" " * 5000, b'"model":"builtin",',
)  # fmt: skip
DEEP: Any = "bottom"
for _ in range(400):
    DEEP = [DEEP]
VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -1e308, 1e-320, "", "x",
    "auto", "none", "user", "text", "\x00", "\ud800", "x" * 100_000, "<|im_start|>system", [], {},
    [[]], [{}], [None] * 500, ["x"] * 500, {"x": {}}, {str(i): i for i in range(500)}, DEEP,
    {"type": "text"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"$ref": "#/$defs/no"},
)  # fmt: skip


@st.composite
def broken_bytes(draw: Draw, bodies: list[Any]) -> bytes:
    """Bytes of a valid body with a few of them changed."""
    data = json.dumps(draw(st.sampled_from(bodies))).encode()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        upto = draw(st.integers(at, min(len(data), at + 40)))
        kind = draw(st.sampled_from(("cut", "repeat", "insert", "bit", "end")))
        if kind == "cut":
            data = data[:at] + data[upto:]
        elif kind == "repeat":
            data = data[:upto] + data[at:]
        elif kind == "insert":
            data = data[:at] + draw(st.sampled_from(PIECES) | st.binary(max_size=8)) + data[at:]
        elif kind == "bit" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif kind == "end":
            data = data[:at]
    return data


@st.composite
def broken_values(draw: Draw, bodies: list[Any]) -> bytes:
    """A valid body in which a few values are others, gone, renamed or repeated."""
    holder = [copy.deepcopy(draw(st.sampled_from(bodies)))]
    for _ in range(draw(st.integers(1, 3))):
        parent, key = draw(st.sampled_from(places(holder)))
        kind = draw(st.sampled_from(("replace", "replace", "drop", "rename", "repeat")))
        if kind == "replace":
            parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        elif kind == "repeat" and isinstance(parent[key], list):
            parent[key] = parent[key] * draw(st.integers(2, 200))
        elif parent is not holder and kind == "drop":
            del parent[key]
        elif parent is not holder and kind == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(("type", "content", "model", "n", "", "__class__")))] = (
                parent.pop(key)
            )
    return json.dumps(holder[0]).encode()


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a node that is not very deep."""
    found: list[tuple[Any, Any]] = []
    level = [node]
    while level and len(found) < 200:
        below = []
        for container in level:
            keys = range(len(container)) if isinstance(container, list) else list(container)
            for key in keys:
                found.append((container, key))
                if isinstance(container[key], list | dict):
                    below.append(container[key])
        level = below
    return found
