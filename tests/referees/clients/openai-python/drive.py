"""OpenAI's client over files and batches."""

import json
import time
from typing import Any

import checks
import openai

CLIENT = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key="none", max_retries=0)
PATH = "/v1/chat/completions"
COUNT = 6
MADE: list[Any] = []


def upload(count: int, tokens: int) -> Any:
    body = {"model": checks.MODEL, "max_tokens": tokens}
    body |= {"messages": [{"role": "user", "content": "Hi"}]}
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": PATH, "body": body}
        for number in range(count)
    ]
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    return CLIENT.files.create(
        file=("in.jsonl", data),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )


def begin(file_id: str) -> Any:
    batch = CLIENT.batches.create(
        input_file_id=file_id, endpoint=PATH, completion_window="24h", metadata={"a": "b"}
    )
    assert (batch.status, batch.input_file_id) == ("validating", file_id), batch
    return batch


def ended(batch_id: str) -> Any:
    end = time.monotonic() + checks.BATCH_S
    while time.monotonic() < end:
        batch = CLIENT.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.1)
    raise AssertionError(f"the batch did not end: {batch}")


def create() -> None:
    file = upload(COUNT, 5)
    assert CLIENT.files.retrieve(file.id) == file
    assert len(CLIENT.files.content(file.id).text.splitlines()) == COUNT
    batch = ended(begin(file.id).id)
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"}), batch
    assert (batch.request_counts.completed, batch.request_counts.failed) == (COUNT, 0), batch
    assert batch.usage.output_tokens > 0
    MADE.append(batch)


def list() -> None:
    files = [upload(1, 5).id for _ in range(3)]
    found = [file.id for file in CLIENT.files.list(limit=2)]  # goes from page to page
    assert found[:3] == files[::-1], found
    outputs = CLIENT.files.list(purpose="batch_output").data
    assert [file.id for file in outputs] == [MADE[0].output_file_id]
    batches = [begin(file).id for file in files]
    found = [batch.id for batch in CLIENT.batches.list(limit=2)]
    assert found == [*batches[::-1], MADE[0].id], found
    for batch_id in batches:
        assert ended(batch_id).status == "completed"


def results() -> None:
    content = CLIENT.files.content(MADE[0].output_file_id).text
    found = {line["custom_id"]: line for line in map(json.loads, content.splitlines())}
    assert sorted(found) == [f"c{number}" for number in range(COUNT)]
    for line in found.values():
        body = line["response"]["body"]
        assert body["object"] == "chat.completion", body


def cancel() -> None:
    batch = begin(upload(500, 60).id)
    assert CLIENT.batches.cancel(batch.id).status == "cancelling"
    batch = ended(batch.id)
    assert (batch.status, batch.cancelled_at is None) == ("cancelled", False), batch


def delete() -> None:
    for file in CLIENT.files.list():
        assert CLIENT.files.delete(file.id).deleted
    assert not CLIENT.files.list().data
    for ask in (CLIENT.files.retrieve, CLIENT.files.content, CLIENT.files.delete):
        try:
            ask(MADE[0].output_file_id)
        except openai.NotFoundError:
            continue
        raise AssertionError("a file is there after its end")


checks.run(create=create, list=list, results=results, cancel=cancel, delete=delete)
