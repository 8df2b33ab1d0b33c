"""Anthropic's client over message batches, by their plain and their beta form."""

import time
from typing import Any

import anthropic
import checks

CLIENT = anthropic.Anthropic(base_url=checks.URL, api_key="none", max_retries=0)
APIS = (CLIENT.messages.batches, CLIENT.beta.messages.batches)
MADE: list[Any] = []


def begin(api: Any, count: int, tokens: int) -> Any:
    params = {"model": checks.MODEL, "max_tokens": tokens}
    params |= {"messages": [{"role": "user", "content": "Hi"}]}
    requests = [{"custom_id": f"c{number}", "params": params} for number in range(count)]
    requests[-1] = {"custom_id": "wrong", "params": {**params, "max_tokens": -1}}
    batch = api.create(requests=requests)
    assert (batch.type, batch.processing_status) == ("message_batch", "in_progress"), batch
    assert batch.request_counts.processing == count, batch
    assert (batch.expires_at - batch.created_at).total_seconds() == 86400, batch
    return batch


def ended(api: Any, batch_id: str) -> Any:
    end = time.monotonic() + checks.BATCH_S
    while time.monotonic() < end:
        batch = api.retrieve(batch_id)
        if batch.processing_status == "ended":
            return batch
        time.sleep(0.1)
    raise AssertionError(f"the batch did not end: {batch}")


def create() -> None:
    for api in APIS:
        batch = ended(api, begin(api, 6, 5).id)
        counts = batch.request_counts
        assert (counts.succeeded, counts.errored, counts.processing) == (5, 1, 0), batch
        assert batch.ended_at >= batch.created_at
        MADE.append(batch)


def list() -> None:
    for api in APIS:
        more = [begin(api, 1, 5).id for _ in range(3)]
        for batch_id in more:
            ended(api, batch_id)
        found = [batch.id for batch in api.list(limit=2)]  # goes from page to page
        assert found[:3] == more[::-1], found
        assert len(found) == len(set(found)) >= 5
        back = [batch.id for batch in api.list(limit=1, before_id=more[0])]
        assert back == more[1:], back


def results() -> None:
    for api, batch in zip(APIS, MADE, strict=True):
        found = {line.custom_id: line.result for line in api.results(batch.id)}
        error = found.pop("wrong")
        assert (error.type, error.error.error.type) == ("errored", "invalid_request_error"), error
        assert sorted(found) == [f"c{number}" for number in range(5)]
        for result in found.values():
            assert result.type == "succeeded", result
            assert 0 < result.message.usage.output_tokens <= 5, result


def cancel() -> None:
    for api in APIS:
        batch = begin(api, 500, 60)
        assert api.cancel(batch.id).processing_status == "canceling"
        batch = ended(api, batch.id)
        assert batch.cancel_initiated_at is not None
        assert batch.request_counts.canceled > 0, batch
        kinds = {line.result.type for line in api.results(batch.id)}
        assert "canceled" in kinds, kinds


def delete() -> None:
    for api, batch in zip(APIS, MADE, strict=True):
        assert api.delete(batch.id).type == "message_batch_deleted"
        for ask in (api.retrieve, api.results, api.delete, api.cancel):
            try:
                ask(batch.id)
            except anthropic.NotFoundError:
                continue
            raise AssertionError("a batch is there after its end")


checks.run(create=create, list=list, results=results, cancel=cancel, delete=delete)
