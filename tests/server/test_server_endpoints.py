"""One row makes an endpoint known: to servers, to batches, and to the guide."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import ScriptedClient

from weft.api.endpoints import BATCH_ENDPOINTS, ENDPOINTS
from weft.batch.lines import UnknownUrlError, parse_line
from weft.server.app import create_app
from weft.server.options import ServerOptions

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


def test_every_endpoint_has_one_route(text):
    routes = create_app(ScriptedClient(), *text, ServerOptions()).routes
    asked = [route.path for route in routes if "POST" in route.methods]
    assert len(asked) == len(set(asked))
    assert set(ENDPOINTS) <= set(asked)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_batches_ask_those_whose_row_says_so(path):
    line = b'{"custom_id": "1", "method": "POST", "url": "%s", "body": {}}' % path.encode()
    if path in BATCH_ENDPOINTS:
        assert parse_line(line).url == path
        return
    with pytest.raises(UnknownUrlError):
        parse_line(line)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_guide_names_every_endpoint(path):
    guide = GUIDE.read_text(encoding="utf-8")
    named = any(word in guide for word in (f"POST {path}`", f"`{path}`"))
    assert named, "the first table of docs/guide.md has no row for it"
    if path in BATCH_ENDPOINTS:
        urls = guide[guide.index("The urls are ") :].split("A result is")[0]
        assert f"`{path}`" in urls, "docs/guide.md says that batches cannot ask it"
