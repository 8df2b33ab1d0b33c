"""Files and batches whose processes are killed at each commit point: all or nothing, and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from live import Server, eventually, serving
from served_batches import (
    IN_PLANES,
    KILLER,
    OPTIONS,
    batch_processes,
    change,
    create,
    create_of,
    expire,
    line,
    listed,
    on_disk,
    patiently,
    results,
    undisturbed_results,
    upload,
    wait,
)
from weft.batch.points import POINTS

SWEEPING = "from weft.server import data\ndata.SWEEP_EVERY_S = 0.0\n"  # at every look at the folder
AT_ONCE = "from weft.core import process\nprocess.FIRST_DELAY_S = 0.0\n"  # until a restart
KEPT = ("upload committed",)  # of the points of an upload: the file is there after a kill


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return folder / "data"


@pytest.fixture(scope="module")
def killed_at(folder: Path) -> Path:
    """Names the commit point at which a process is killed; says afterwards whose code it ran."""
    return folder / "point"


@pytest.fixture(scope="module")
def server(folder: Path, data: Path, killed_at: Path) -> Iterator[Server]:
    killer = KILLER.format(file=str(killed_at))
    options = ("--data-dir", str(data), *OPTIONS)
    inside = {
        "weft.cli": AT_ONCE,
        "weft.server.batch_process": killer,
        "weft.server.process": SWEEPING + killer,
    }
    with serving(folder, *options, modelled=True, inside=inside) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> dict[str, str]:
    return undisturbed_results(client)


@pytest.fixture(autouse=True)
def nothing_is_left(client: openai.OpenAI, data: Path, killed_at: Path) -> Iterator[None]:
    """After each test the folder has the bytes of the files that are listed, and no others."""
    yield
    killed_at.unlink(missing_ok=True)
    eventually(lambda: on_disk(data) == listed(client), 30)


def was_killed(killed_at: Path, point: str) -> None:
    """Wait until whoever was to be killed has been."""
    module = "weft.server.process" if point in IN_PLANES else "weft.server.batch_process"
    eventually(lambda: killed_at.read_text() == module, 60)


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("upload ")])
def test_an_upload_is_there_as_a_whole_or_not_at_all(client, data, killed_at, point):
    before = listed(client)
    killed_at.write_text(f"{point}|1")
    with pytest.raises(openai.APIConnectionError):
        upload(client, [line(i) for i in range(60)])
    was_killed(killed_at, point)
    new = listed(client).keys() - before.keys()
    assert len(new) == (point in KEPT)
    eventually(lambda: on_disk(data).keys() - before.keys() == new, 30)
    batch = wait(client, create_of(client, new.pop() if new else upload(client, [line(1)])))
    assert batch.status == "completed"
    assert batch.request_counts.completed == (60 if point in KEPT else 1)


def test_a_batch_that_no_bell_was_rung_for_is_answered(server, client, killed_at, undisturbed):
    """Nothing tells the supervisor that there is a batch, and no batch process is there."""
    for child in batch_processes(server):
        child.kill()
    eventually(lambda: not batch_processes(server), 30)
    file_id = upload(client, [line(i) for i in range(60)])
    killed_at.write_text("batch created|1")
    with pytest.raises(openai.APIConnectionError):
        create_of(client, file_id)
    was_killed(killed_at, "batch created")
    newest = patiently(lambda: client.batches.list(limit=1)).data[0]
    assert newest.input_file_id == file_id
    batch = wait(client, newest.id)
    assert batch.status == "completed"
    assert results(client, batch) == (undisturbed, {})


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("batch validated", 1),
        ("batch started", 1),
        ("line answered", 17),
        ("line appended", 60),
        ("batch finalizing", 1),
        ("results synchronised", 1),
        ("batch finished", 1),
    ],
)
def test_a_batch_goes_on_where_it_was(client, killed_at, undisturbed, point, nth):
    killed_at.write_text(f"{point}|{nth}")
    batch = wait(client, create(client, [line(i) for i in range(60)]))
    was_killed(killed_at, point)
    assert batch.status == "completed"
    assert results(client, batch) == (undisturbed, {})


@pytest.mark.parametrize(
    ("over", "point"),
    [
        ("cancelled", "batch cancelling"),
        ("cancelled", "end recorded"),
        ("cancelled", "lines cancelled"),
        ("expired", "end recorded"),
        ("expired", "lines expired"),
        ("expired", "batch finished"),
    ],
)
def test_what_is_given_up_is_given_up_once(client, data, killed_at, over, point):
    batch_id = create(client, [line(i, max_tokens=100) for i in range(500)])
    eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 0, 60)
    killed_at.write_text(f"{point}|1")
    if over == "expired":
        expire(data, batch_id)
    elif point in IN_PLANES:
        with pytest.raises(openai.APIConnectionError):
            client.batches.cancel(batch_id)
    else:
        client.batches.cancel(batch_id)
    was_killed(killed_at, point)
    batch = wait(client, batch_id)
    assert batch.status == over
    texts, errors = results(client, batch)
    assert set(errors.values()) == {f"batch_{over}"}
    assert texts.keys() | errors.keys() == {f"r{i}" for i in range(500)}


@pytest.mark.parametrize("point", ["file forgotten", "files expired"])
def test_a_file_goes_with_its_bytes(client, data, killed_at, point):
    file_id = upload(client, [line(0)])
    killed_at.write_text(f"{point}|1")
    if point == "files expired":
        change(data, "files", file_id, expires_at=1)
    with pytest.raises(openai.APIConnectionError):
        client.files.delete(file_id)
    was_killed(killed_at, point)
    with pytest.raises(openai.NotFoundError):
        patiently(lambda: client.files.retrieve(file_id))


def test_message_batches_with_anthropics_client(server, client, killed_at):
    """Also where the batch process is killed amid their lines."""
    anthropics = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    said = [{"role": "user", "content": "Hi"}]
    params = {"model": "builtin", "messages": said, "max_tokens": 5}
    asked = [{"custom_id": f"m{i}", "params": params} for i in range(30)]
    asked.append({"custom_id": "wrong", "params": {**params, "max_tokens": -1}})
    asked.append({"custom_id": "stream", "params": {**params, "stream": True}})
    killed_at.write_text("line appended|9")
    batch = anthropics.messages.batches.create(requests=asked)
    eventually(
        lambda: anthropics.messages.batches.retrieve(batch.id).processing_status == "ended", 120
    )
    was_killed(killed_at, "line appended")
    found = {line.custom_id: line.result for line in anthropics.messages.batches.results(batch.id)}
    assert set(found) == {request["custom_id"] for request in asked}
    assert {found.pop(name).error.error.type for name in ("wrong", "stream")} == {
        "invalid_request_error"
    }
    assert {result.message.usage.output_tokens for result in found.values()} == {5}
    counts = anthropics.messages.batches.retrieve(batch.id).request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (30, 2, 0)
    assert batch.id not in [b.id for b in client.batches.list()]
    killed_at.write_text("batch forgotten|1")
    with pytest.raises(anthropic.APIConnectionError):
        anthropics.messages.batches.delete(batch.id)
    was_killed(killed_at, "batch forgotten")
    with pytest.raises(anthropic.NotFoundError):
        anthropics.messages.batches.retrieve(batch.id)


def test_each_point_is_killed_at():
    """A commit point that is new, or never reached, belongs into one of the tests above."""
    text = Path(__file__).read_text()
    elsewhere = ("upload ", "webhook ")  # test_webhooks.py has the latter
    assert [p for p in POINTS if f'"{p}"' not in text and not p.startswith(elsewhere)] == []
