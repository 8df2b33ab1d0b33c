"""Long lists in bodies: each item comes out as it went in, wherever the body is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.api.errors import InvalidJSONError
from weft.core.errors import ParameterError, WeftError
from weft.server.listsplit import MAX_REST_BYTES, ItemTooLargeError, ListSplitter

NASTY = st.text(alphabet='"\\{}[],: \n\u00e9x', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NASTY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NASTY, inner, max_size=4),
    max_leaves=12,
)
ITEMS = st.lists(st.dictionaries(NASTY, VALUES, max_size=4), max_size=6)


def split(body: bytes, size: int, most: int = 10_000) -> tuple[list[bytes], bytes]:
    splitter = ListSplitter("items", most)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    items = [item for piece in pieces for item in splitter.feed(piece)]
    assert splitter.count == len(items)
    return items, splitter.finish()


@searching(600)
@given(
    items=ITEMS,
    others=st.dictionaries(NASTY.filter(lambda name: name != "items"), VALUES, max_size=3),
    place=st.integers(0, 3),
    indent=st.sampled_from((None, 1)),
    ascii_only=st.booleans(),
    size=st.integers(1, 200),
)
def test_items_come_out_as_they_went_in(items, others, place, indent, ascii_only, size):
    names = list(others)
    names.insert(place, "items")
    body: dict[str, Any] = {name: items if name == "items" else others[name] for name in names}
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_only)
    found, rest = split(text.encode(), size)
    assert [json.loads(item) for item in found] == items
    assert json.loads(rest) == {**body, "items": []}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "body",
    [
        b'{"items": [{"a": 1} {"a": 2}]}',
        b'{"items": [{"a": 1},, {"a": 2}]}',
        b'{"items": [,{"a": 1}]}',
        b'{"items": [{"a": 1},]}',
        b'{"items": [{"a": 1}',
        b'{"items": [{"a": "',
        b'{"items": [',
    ],
)
def test_what_is_no_list_is_refused(body, size):
    with pytest.raises(InvalidJSONError):
        split(body, size)


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (b'{"items": [{}, 5]}', ParameterError, "items[1]"),
        (b'{"items": [[]]}', ParameterError, "items[0]"),
        (b'{"items": [{}], "items": [{}]}', ParameterError, "items"),
        (b'{"items": [{"a": "%b"}]}' % (b"x" * 20_000), ItemTooLargeError, "items[0]"),
        (b'{"items": [], "more": "%b"}' % (b"x" * MAX_REST_BYTES), ParameterError, None),
        (b'{"more": "%b", "items": []}' % (b"x" * MAX_REST_BYTES), ParameterError, None),
    ],
)
def test_errors_name_what_is_wrong(body, kind, param):
    for size in (1000, len(body)):
        with pytest.raises(WeftError) as error:
            split(body, size)
        assert isinstance(error.value, kind)
        assert error.value.param == param


def test_a_list_of_another_name_or_place_is_no_list():
    for body in (b'{"x": {"items": [{}]}}', b'{"item": [{}]}', b'["items", [{}]]', b"[]", b"{"):
        assert split(body, 3) == ([], body)
