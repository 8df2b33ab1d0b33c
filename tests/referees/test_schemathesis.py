"""A few hundred requests made by schemathesis from OpenAI's own API description."""

from __future__ import annotations

import pytest

import description
from depth import DEEP


@pytest.mark.deeper
def test_generated_requests_are_answered_as_described(server):
    description.need()
    import schemathesis_run

    requests = 120 if DEEP else 40
    referee = schemathesis_run.run(server.url, requests, 1)
    assert referee.sent >= 0.75 * requests
    answered = sum(counter[200] for counter in referee.statuses.values())
    assert answered >= requests / 12
    assert referee.streams >= 3  # at least the simplest of each operation that streams
