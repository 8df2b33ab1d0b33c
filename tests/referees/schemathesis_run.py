"""Requests made by schemathesis from OpenAI's own API description, against a real server.

    python tests/referees/schemathesis_run.py [--requests 3000] [--seed 0] [--out FILE]

A third of the requests are valid by the description, a third are not, and a third are valid ones
that were made answerable: the served model, few tokens, plain messages, only some of the optional
fields (of the purely random ones nearly all ask for something that weft refuses). Whatever is sent:
no status from 500 on, no answer that takes longer than 30 s, every answer valid against the
description, every event of a stream too, and every refusal a 4xx in OpenAI's form.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import UnsupportedSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")])
import report
from description import description, validator
from live import serving

HANG_S = 30.0
MODEL = "builtin"


@dataclass(frozen=True)
class Operation:
    """An operation that weft serves.

    Attributes:
        share: how many of all requests go there.
        required: fields of a body that are never dropped.
        limit: the field that bounds the output, if there is output.
        plain: values for required fields that are always answered.
        event: the schema of an event of its streams.
        answer: the schema of answers that have null where the description has nothing; "bytes" for
            answers that are none of its business.
    """

    method: str
    path: str
    share: float
    required: tuple[str, ...] = ()
    limit: str = ""
    plain: Mapping[str, Any] = field(default_factory=dict)
    event: str = ""
    answer: str = ""


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(("user", "system")), "content": st.text()}),
    min_size=1,
    max_size=4,
)
OPERATIONS = (
    Operation(
        "POST",
        "/completions",
        0.25,
        ("model", "prompt"),
        "max_tokens",
        {"prompt": st.text(min_size=1)},
        "CreateCompletionResponse",
    ),
    Operation(
        "POST",
        "/chat/completions",
        0.25,
        ("model", "messages"),
        "max_completion_tokens",
        {"messages": MESSAGES},
        "CreateChatCompletionStreamResponse",
    ),
    Operation(
        "POST",
        "/responses",
        0.25,
        ("model", "input"),
        "max_output_tokens",
        {"input": st.text(min_size=1)},
        "ResponseStreamEvent",
    ),
    Operation("POST", "/embeddings", 0.1, ("model", "input"), "", {"input": st.text(min_size=1)}),
    Operation("GET", "/responses/{response_id}", 0.05, event="ResponseStreamEvent"),
    Operation("GET", "/responses/{response_id}/input_items", 0.05),
    Operation("POST", "/responses/{response_id}/cancel", 0.03),
    Operation("DELETE", "/responses/{response_id}", 0.03),
    Operation("GET", "/models", 0.02),
    Operation("GET", "/models/{model}", 0.07),
    Operation("POST", "/files", 0.1, ("file", "purpose"), answer="OpenAIFile"),
    Operation("GET", "/files", 0.05, answer="ListFilesResponse"),
    Operation("GET", "/files/{file_id}", 0.05, answer="OpenAIFile"),
    Operation("GET", "/files/{file_id}/content", 0.05, answer="bytes"),
    Operation(
        "POST",
        "/batches",
        0.1,
        ("input_file_id", "endpoint", "completion_window"),
        plain={"endpoint": st.sampled_from(("/v1/completions", "/v1/embeddings"))},
        answer="Batch",
    ),
    Operation("GET", "/batches", 0.05, answer="ListBatchesResponse"),
    Operation("GET", "/batches/{batch_id}", 0.05, answer="Batch"),
    Operation("POST", "/batches/{batch_id}/cancel", 0.05, answer="Batch"),
    Operation("DELETE", "/files/{file_id}", 0.05),
)
BATCH_LINE = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": MODEL, "prompt": "x", "max_tokens": 1},
}


class Referee:
    """Sends generated requests to one server and judges the answers.

    Attributes:
        statuses: how often each status was seen, by operation and manner.
    """

    def __init__(self, url: str) -> None:
        self.statuses: dict[str, Counter[int]] = {}
        self.streams = 0
        self._url = url
        body = {"model": MODEL, "input": "x", "max_output_tokens": 1}
        response = requests.post(f"{url}/v1/responses", json=body, timeout=HANG_S).json()
        file_id, batch_id = make_batch(url)
        self._places = {"model": MODEL, "response_id": response["id"], "file_id": file_id}
        self._places |= {"batch_id": batch_id, "input_file_id": file_id}
        document = undiscriminated(description())
        paths = {o.path: document["paths"][o.path] for o in OPERATIONS}
        self._schema = schemathesis.openapi.from_dict({**document, "paths": paths})

    @property
    def sent(self) -> int:
        return sum(sum(counter.values()) for counter in self.statuses.values())

    def run(self, operation: Operation, number: int, first_seed: int) -> None:
        """Send about ``number`` requests in three manners. Raises what a check finds, shrunk."""
        api = self._schema[operation.path][operation.method]
        valid = api.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
        manners = {"valid": valid, "answerable": answerable(valid, operation, self._places)}
        if operation.required:
            wrong = api.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
            manners |= {"wrong": generated(wrong)}
        for place, (manner, strategy) in enumerate(manners.items()):
            name = f"{operation.method} {operation.path} {manner}"
            counter = self.statuses.setdefault(name, Counter())
            self._send_all(strategy, operation, counter, number // len(manners), first_seed + place)

    def _send_all(
        self, strategy: Any, operation: Operation, counter: Counter[int], number: int, first: int
    ) -> None:
        @seed(first)
        @settings(
            max_examples=max(1, number),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def one(case: schemathesis.Case) -> None:
            response = case.call(base_url=f"{self._url}/v1", timeout=HANG_S)
            counter[response.status_code] += 1
            self._judge(case, response, operation)

        one()

    def _judge(self, case: schemathesis.Case, response: Any, operation: Operation) -> None:
        text = response.content.decode()
        if response.status_code != 200:
            assert 400 <= response.status_code < 500, f"{response.status_code}: {text}"
            validator("ErrorResponse").validate(json.loads(text))
        elif response.headers["content-type"][0].startswith("text/event-stream"):
            self.streams += 1
            judge_stream(text, operation)
        elif operation.answer:
            judge_answer(response, operation)
        elif isinstance(case.body, dict) and case.body.get("encoding_format") == "base64":
            judge_packed(json.loads(text))
        else:
            case.validate_response(
                response,
                checks=[not_a_server_error, content_type_conformance, response_schema_conformance],
            )


def undiscriminated(node: Any) -> Any:
    """The description without discriminators: those without a mapping contradict its own enums."""
    if isinstance(node, list):
        return [undiscriminated(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: undiscriminated(value) for key, value in node.items() if key != "discriminator"}


@st.composite
def generated(draw: Callable[[Any], Any], strategy: Any) -> schemathesis.Case:
    """What schemathesis generates, without the cases of which it says that it cannot."""
    try:
        return draw(strategy)
    except UnsupportedSchema:
        reject()


def answerable(valid: Any, operation: Operation, places: Mapping[str, str]) -> Any:
    """Valid requests changed so that weft has something to answer.

    The simplest of them, which Hypothesis sends first, is a plain stream of one token.
    """

    @st.composite
    def changed(draw: Callable[[Any], Any]) -> schemathesis.Case:
        case = draw(valid)
        if not operation.required:
            case.path_parameters = {name: places[name] for name in case.path_parameters}
            return case
        optional = [name for name in case.body if name not in operation.required]
        kept = draw(st.lists(st.sampled_from(optional), max_size=3)) if optional else []
        wanted = [name for name in (*operation.required, *kept) if name in case.body]
        body = {name: case.body[name] for name in wanted}
        body |= {name: places[name] for name in operation.required if name in places}
        for name, values in operation.plain.items():
            if draw(st.integers(0, 3)) < 3:
                body[name] = draw(values)
        if operation.limit:
            body[operation.limit] = draw(st.integers(1, 16))
            body["stream"] = not draw(st.booleans())
        if body.get("n"):
            body["n"] = min(body["n"], 3)
        case.body = body
        return case

    return changed()


def make_batch(url: str) -> tuple[str, str]:
    """The ids of a file and of a batch that reads it."""
    line = json.dumps(BATCH_LINE).encode()
    form = {"file": ("in.jsonl", line), "purpose": (None, "batch")}
    file = requests.post(f"{url}/v1/files", files=form, timeout=HANG_S).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = requests.post(f"{url}/v1/batches", json=body, timeout=HANG_S).json()
    return file["id"], batch["id"]


def judge_answer(response: Any, operation: Operation) -> None:
    """Files and batches.

    By its examples the description has null where its schemas have nothing; of the purposes that
    it lets clients upload for, its schema of a file lacks one; and it calls any content JSON.
    """
    if operation.answer == "bytes":
        assert response.headers["content-type"][0] == "application/octet-stream"
        return
    answer = without_nulls(response.json())
    for file in [answer, *answer.get("data", ())]:
        if file.get("purpose") == "evals":
            file["purpose"] = "user_data"
    validator(operation.answer).validate(answer)


def without_nulls(node: Any) -> Any:
    if isinstance(node, list):
        return [without_nulls(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: without_nulls(value) for key, value in node.items() if value is not None}


def judge_packed(answer: dict[str, Any]) -> None:
    """Embeddings in base64, which the description offers but has no schema for."""
    for row in answer["data"]:
        packed = base64.b64decode(row["embedding"], validate=True)
        row["embedding"] = list(memoryview(packed).cast("f"))
    validator("CreateEmbeddingResponse").validate(answer)


def judge_stream(text: str, operation: Operation) -> None:
    """Every event must be valid.

    The description has one schema for completions and their chunks, in which ``finish_reason`` is
    always a string; OpenAI's own service has null there until the end, and so has weft.
    """
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert events or operation.method == "GET", "a stream of nothing"  # all may be before its start
    if events and events[-1] == "[DONE]":
        events.pop()
    for event in map(json.loads, events):
        if operation.event == "CreateCompletionResponse":
            for choice in event.get("choices", ()):
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        validator(operation.event).validate(event)


def run(url: str, number: int, first_seed: int) -> Referee:
    """Judge a running server with at least ``number`` requests, as far as there are so many."""
    referee = Referee(url)
    for place, operation in enumerate(OPERATIONS):
        referee.run(operation, round(number * operation.share), first_seed + 10 * place)
    return referee


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given_ = parser.parse_args()
    data = ("--disk-reserve-bytes", "0", "--data-dir")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *data, str(Path(folder) / "data")) as server,
    ):
        referee = run(server.url, given_.requests, given_.seed)
    for name, counter in referee.statuses.items():
        print(f"{name:50} {dict(sorted(counter.items()))}")
    print(f"{referee.sent} requests, {referee.streams} streams; no fault")
    if given_.out:
        statuses = {name: dict(sorted(c.items())) for name, c in referee.statuses.items()}
        report.save(
            given_.out,
            schemathesis=schemathesis.__version__,
            requests_library=requests.__version__,
            sent=referee.sent,
            streams=referee.streams,
            statuses=statuses,
        )


if __name__ == "__main__":
    main()
