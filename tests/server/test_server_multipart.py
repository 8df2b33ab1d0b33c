"""Forms piece by piece: any cutting gives the same fields, and no bytes are taken for a mark."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.server.multipart import (
    MAX_HEADER_BYTES,
    MAX_PARTS,
    MultipartError,
    MultipartReader,
    PartHead,
    boundary_of,
)

MARK = b"--xyz"


def form(*parts: tuple[str, str | None, bytes]) -> bytes:
    body = b""
    for name, filename, content in parts:
        more = "" if filename is None else f'; filename="{filename}"'
        head = f'Content-Disposition: form-data; name="{name}"{more}'
        body += MARK + b"\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + MARK + b"--\r\n"


def read(*pieces: bytes) -> list[tuple[PartHead, bytes]]:
    reader = MultipartReader(b"xyz")
    found: list[tuple[PartHead, bytes]] = []
    for piece in pieces:
        for part in reader.feed(piece):
            if isinstance(part, PartHead):
                found.append((part, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + part)
    reader.finish()
    return found


# Contents that look like marks as much as can be.
contents = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--", b"xyz", b"--xy", b"a"])).map(
    lambda parts: b"".join(parts).replace(b"\r\n--xyz", b"")
)


@given(st.lists(contents, max_size=4), st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_any_cutting_gives_the_same_fields(given_contents, cuts, preamble):
    parts = [(f"n{i}", f"f{i}" if i % 2 else None, c) for i, c in enumerate(given_contents)]
    body = b"preamble\r\n" * preamble + form(*parts)
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(places)]
    wanted = [(PartHead(name, filename), content) for name, filename, content in parts]
    assert read(*pieces) == wanted
    assert read(*(bytes([byte]) for byte in body)) == wanted


def test_nothing_but_a_mark_is_held():
    reader = MultipartReader(b"xyz")
    list(reader.feed(form(("file", "f", b"")).partition(b"\r\n--xyz--")[0] + b"x"))
    for _ in range(100):
        assert sum(len(part) for part in reader.feed(b"x" * 1000)) >= 1000 - 7


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form",
        form(("a", None, b"x"))[:-4],
        MARK + b"\r\n\r\nno headers",
        MARK + b"\r\nno header\r\n\r\nx\r\n" + MARK + b"--",
        MARK + b"\r\nContent-Disposition: form-data\r\n\r\nx\r\n" + MARK + b"--",
        MARK + b'\r\nContent-Disposition: attachment; name="x"\r\n\r\nx\r\n' + MARK + b"--",
        form(("a", None, b"x")).replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: x\r\n\r\n"),
        MARK + b"more\r\n",
        MARK + b"\r\n" + b"x" * (MAX_HEADER_BYTES + 1),
        form(*[("a", None, b"")] * (MAX_PARTS + 1)),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused(body):
    with pytest.raises(MultipartError):
        read(body)


def test_what_follows_the_end_is_ignored():
    assert len(read(form(("a", None, b"x")), b"more" * 1000, MARK)) == 1


@pytest.mark.parametrize(
    ("given", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; boundary="a b"', b"a b"),
        ("multipart/form-data", None),
        ("multipart/mixed; boundary=abc", None),
        ("application/json", None),
        ("multipart/form-data; boundary=" + "a" * 71, None),
        ('multipart/form-data; boundary="a\u00e9"', None),
        ("", None),
    ],
)
def test_boundaries(given, boundary):
    if boundary is None:
        with pytest.raises(MultipartError):
            boundary_of(given)
    else:
        assert boundary_of(given) == boundary
