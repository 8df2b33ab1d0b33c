"""A few hundred requests made by schemathesis from OpenAI's own API description."""

from __future__ import annotations

import description


def test_generated_requests_are_answered_as_described(server):
    description.need()
    import schemathesis_run

    referee = schemathesis_run.run(server.url, 120, 1)
    assert referee.sent >= 90
    answered = sum(counter[200] for counter in referee.statuses.values())
    assert answered >= 10
    assert referee.streams > 0
