"""Webhooks of a real server: events arrive whatever is killed, and wrong settings do not start."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from batching import KILLER, OPTIONS, create, line, wait
from live import Server, eventually, refused, serving
from receiver import Receiver, receiving, status

IMPATIENT = """
from weft.batch import webhooks
webhooks.TIMEOUT_S = webhooks.FIRST_DELAY_S = 1.0  # what was claimed by a killed process is due
"""
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving(lambda handler, number: status(503 if number == 1 else 200)(handler, 0)) as made:
        yield made


@pytest.fixture(scope="module")
def killed_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("point") / "point"


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, killed_at: Path
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("webhooks")
    (folder / "secret").write_text(f"{SECRET}\n")
    given = ("--data-dir", str(folder / "data"), "--webhook-secret-file", str(folder / "secret"))
    given += ("--webhook-url", f"http://127.0.0.1:{receiver.port}/hook", "--webhook-allow-private")
    killer = KILLER.format(file=str(killed_at))
    with serving(folder, *given, *OPTIONS, modelled=True, batches=killer + IMPATIENT) as running:
        yield running


def told(receiver: Receiver, batch_id: str) -> list[tuple[str, Any]]:
    """The ``webhook-id`` and the event of each message about a batch, by OpenAI's client."""
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    found = [
        (headers["webhook-id"], client.webhooks.unwrap(body, headers))
        for _, headers, body in receiver.got
    ]
    return [(name, event) for name, event in found if event.data.id == batch_id]


def test_the_end_of_each_batch_is_told(server, receiver):
    client = server.client()
    done = create(client, [line(0)])
    failed = create(client, ["nonsense"])
    cancelled = create(client, [line(i, max_tokens=100) for i in range(400)])
    eventually(lambda: client.batches.retrieve(cancelled).status == "in_progress", 60)
    client.batches.cancel(cancelled)
    for batch_id, end in ((done, "completed"), (failed, "failed"), (cancelled, "cancelled")):
        assert wait(client, batch_id).status == end
        eventually(lambda batch_id=batch_id: bool(told(receiver, batch_id)), 60)
        events = told(receiver, batch_id)
        assert {(name, event.id, event.type) for name, event in events} == {
            (events[0][0], events[0][1].id, f"batch.{end}")
        }


@pytest.mark.parametrize("point", ["results synchronised", "batch finished", "webhook confirmed"])
def test_no_kill_loses_an_event(server, receiver, killed_at, point):
    client = server.client()
    killed_at.write_text(f"{point}|1")
    batch_id = create(client, [line(i) for i in range(5)])
    assert wait(client, batch_id).status == "completed"
    often = 2 if point == "webhook confirmed" else 1  # the outbox does not know of the first
    eventually(lambda: len(told(receiver, batch_id)) == often, 60)
    assert killed_at.read_text() == "", "nobody was killed"
    assert len({(name, event.id) for name, event in told(receiver, batch_id)}) == 1


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (("--webhook-url", "https://host.example/"), "webhook_secret_file"),
        (("--webhook-secret-file", "SECRET"), "webhook_url"),
        (("--webhook-allow-private",), "webhook_url"),
        (("--webhook-url", "host.example", "--webhook-secret-file", "SECRET"), "host.example"),
        (("--webhook-url", "http://127.0.0.1/", "--webhook-secret-file", "SECRET"), "127.0.0.1"),
        (("--webhook-url", "https://host.example/", "--webhook-secret-file", "NONE"), "NONE"),
        (("--webhook-url", "https://host.example/", "--webhook-secret-file", "BAD"), "base64"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(call, tmp_path, given, word):
    (tmp_path / "SECRET").write_text(f"{SECRET}\n")
    (tmp_path / "BAD").write_text(json.dumps("hush"))
    named = [str(tmp_path / text) if text in ("SECRET", "NONE", "BAD") else text for text in given]
    done = call("serve", *named)
    refused(done, word)
    assert "hush" not in done.stderr
