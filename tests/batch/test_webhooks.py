"""Webhooks: who may be told, how it is signed, and that nothing is lost until it is confirmed."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import trustme

from receiver import Receiver, receiving, status
from weft.batch import outward, webhooks
from weft.batch.database import VERSION, work_within
from weft.batch.folder import StoreLimits
from weft.batch.outbox import FORGOTTEN_S, KEPT_S, Delivery
from weft.batch.outward import NotDeliveredError, OutwardClient
from weft.batch.records import BatchRecord
from weft.batch.store import BatchStore
from weft.batch.webhook_settings import (
    WebhookSettings,
    check_url,
    is_public,
    read_secrets,
)
from weft.batch.webhooks import WebhookSender, delay_s, signed_headers
from weft.core.errors import ConfigError

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
OTHER = "whsec_" + base64.b64encode(b"t" * 24).decode()


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
            *("100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "198.18.0.1"),
            *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1"),
            *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
            *("2002:7f00:1::", "2002:808:808::", "2001:0:1::1", "::7f00:1", "2001:db8::1"),
        ],
    )
    def test_what_is_not_public(self, address):
        assert not is_public(ipaddress.ip_address(address))

    @pytest.mark.parametrize(
        "address",
        ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"],
    )
    def test_what_is_public(self, address):
        assert is_public(ipaddress.ip_address(address))

    @pytest.mark.parametrize(
        "url",
        [
            *("", "host.example", "ftp://host.example/", "http://", "https:///path", "//host/"),
            *("https://user@host.example/", "https://u:p@host.example/", "https://host.example/#f"),
            *("https://host.example:0/", "https://host.example:99999/", "https://host.example:x/"),
            *("https://ho st.example/", "https://host.example/\n", "https://h\u00f6st.example/"),
            *("https://[::1/", "https://a..b/", "https://host.example\\@evil/", "https://-\u2028/"),
            "https://host.example/" + "x" * 2048,
        ],
    )
    def test_malformed_ones_are_refused(self, url):
        for allow_private in (False, True):
            with pytest.raises(ConfigError) as error:
                check_url(url, allow_private)
            assert error.value.param == "webhook_url"

    def test_private_ones_are_refused_unless_they_are_allowed(self):
        for url in (
            "http://127.0.0.1:80/x",
            "https://[::1]/",
            "http://10.1.2.3/",
            "http://[fe80::1]/",
        ):
            with pytest.raises(ConfigError):
                check_url(url, False)
            check_url(url, True)
        for url in ("https://host.example/a?b=c", "http://8.8.8.8/", "https://a_b.host:8443"):
            check_url(url, False)


class TestSecrets:
    def test_each_line_is_one(self, tmp_path):
        file = tmp_path / "secrets"
        file.write_text(f"# new\n{SECRET}\n\n  {OTHER}  \n")
        assert read_secrets(str(file)) == [b"s" * 32, b"t" * 24]

    @pytest.mark.parametrize(
        "text",
        [
            *("", "# none\n", "secret\n", "whsec_\n", "whsec_%%%\n", f"{SECRET}x!\n"),
            *(base64.b64encode(b"s" * 32).decode(), f"{SECRET}\n" * 9),
            *("whsec_" + base64.b64encode(b"s" * size).decode() for size in (8, 65)),
        ],
    )
    def test_others_are_refused_without_being_shown(self, tmp_path, text):
        file = tmp_path / "secrets"
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            read_secrets(str(file))
        assert error.value.param == "webhook_secret_file"
        assert SECRET.removeprefix("whsec_")[:20] not in error.value.message

    def test_a_file_that_is_not_there_or_no_text(self, tmp_path):
        with pytest.raises(ConfigError):
            read_secrets(str(tmp_path / "none"))
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError):
            read_secrets(str(tmp_path / "bytes"))


def test_signatures_are_those_of_openais_client():
    now, client = int(time.time()), openai.OpenAI(api_key="none")
    body = b'{"id": "evt_1", "type": "batch.expired", "created_at": 1, "data": {"id": "b\xc3\xa9"}}'
    delivery = Delivery("wh_1", "https://host.example:8443/x?y", body, now, now)
    headers = signed_headers(delivery, now, [b"s" * 32, b"t" * 24])
    for secret in (SECRET, OTHER):
        event = client.webhooks.unwrap(body, headers, secret=secret)
        assert (event.type, event.data.id) == ("batch.expired", "b\u00e9")
    assert headers["host"] == "host.example:8443"
    for changed in (
        {"webhook-id": "wh_2"},
        {"webhook-timestamp": str(now - 1)},
        {"webhook-signature": headers["webhook-signature"].replace("v1,", "v1,A")},
    ):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body, {**headers, **changed}, secret=SECRET)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body + b" ", headers, secret=SECRET)


def post(url: str, allow_private: bool = True, context: ssl.SSLContext | None = None) -> None:
    async def go() -> None:
        client = OutwardClient(allow_private, context)
        try:
            await client.post(url, {"host": "h", "content-length": "2"}, b"{}")
        finally:
            await client.aclose()

    asyncio.run(go())


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What names lead to, and which of them were asked for."""
    known: dict[str, Any] = {"asked": []}

    async def getaddrinfo(_: Any, host: str, port: int, **__: Any) -> list[Any]:
        known["asked"].append(host)
        return [(2, 1, 6, "", (address, port)) for address in known.get(host, [host])]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return known


class TestPosts:
    def test_no_private_address_is_reached(self):
        with receiving() as receiver:
            for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433"):
                with pytest.raises(NotDeliveredError) as error:
                    post(f"http://{host}:{receiver.port}/", allow_private=False)
                assert "not public" in error.value.message, host
            assert not receiver.got
            post(f"http://127.0.0.1:{receiver.port}/")
            assert len(receiver.got) == 1

    def test_a_name_is_refused_if_one_of_its_addresses_is_private(self, names):
        names["two.example"] = ["93.184.216.34", "127.0.0.1"]
        with receiving() as receiver:
            with pytest.raises(NotDeliveredError, match=r"127\.0\.0\.1"):
                post(f"http://two.example:{receiver.port}/", allow_private=False)
            assert not receiver.got

    def test_a_name_is_looked_up_once(self, names):
        """So that it cannot lead elsewhere between the check and the connection."""
        names["one.example"] = ["127.0.0.1"]
        with receiving() as receiver:
            post(f"http://one.example:{receiver.port}/a?b=c")
            (got,) = receiver.got
        assert (got[0], got[2]) == ("/a?b=c", b"{}")
        assert names["asked"].count("one.example") == 1
        assert set(names["asked"]) <= {"one.example", "127.0.0.1"}

    def test_the_next_address_is_tried(self, names):
        names["some.example"] = ["127.0.0.2", "127.0.0.1"]
        with receiving() as receiver:
            post(f"http://some.example:{receiver.port}/")
            assert len(receiver.got) == 1

    def test_certificates_are_checked_against_the_name(self, names):
        names["right.example"] = names["wrong.example"] = ["127.0.0.1"]
        authority, served = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("right.example").configure_cert(served)
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        with receiving(context=served) as receiver:
            for host in ("wrong.example", "127.0.0.1"):
                with pytest.raises(NotDeliveredError, match=r"(?i)certificate|mismatch"):
                    post(f"https://{host}:{receiver.port}/", context=trusting)
            with pytest.raises(NotDeliveredError, match=r"(?i)certificate"):
                post(f"https://right.example:{receiver.port}/")
            assert not receiver.got
            post(f"https://right.example:{receiver.port}/", context=trusting)
            assert len(receiver.got) == 1

    @pytest.mark.parametrize("number", [100 * k + n for k in (3, 4, 5) for n in (0, 4)])
    def test_only_2xx_confirms_and_no_redirection_is_followed(self, number):
        with receiving() as elsewhere:
            location = f"http://127.0.0.1:{elsewhere.port}/"
            with receiving(status(number, location=location)) as receiver:
                with pytest.raises(NotDeliveredError, match=str(number)):
                    post(f"http://127.0.0.1:{receiver.port}/")
                assert len(receiver.got) == 1
            assert not elsewhere.got

    def test_a_body_without_end_is_not_read(self):
        def react(handler: Any, _: int) -> None:
            handler.send_response(200)
            handler.end_headers()
            while True:
                handler.wfile.write(b"x" * 65536)

        with receiving(react) as receiver:
            post(f"http://127.0.0.1:{receiver.port}/")

    def test_headers_without_end_are_given_up(self):
        def react(handler: Any, _: int) -> None:
            handler.send_response(200)
            handler.flush_headers()
            while True:
                handler.wfile.write(b"a: b\r\n" * 1000)

        with receiving(react) as receiver, pytest.raises(NotDeliveredError):
            post(f"http://127.0.0.1:{receiver.port}/")

    def test_one_that_says_nothing_is_given_up(self, monkeypatch):
        monkeypatch.setattr(outward, "TIMEOUT_S", 0.3)
        with (
            receiving(lambda *_: time.sleep(5)) as receiver,
            pytest.raises(NotDeliveredError, match="no answer within"),
        ):
            post(f"http://127.0.0.1:{receiver.port}/")

    def test_nobody_there_and_no_such_name(self):
        with receiving() as receiver:
            pass
        for where in (f"127.0.0.1:{receiver.port}", "nowhere.invalid"):
            with pytest.raises(NotDeliveredError):
                post(f"http://{where}/")


class Sending:
    """A data folder, and senders of what is in its outbox."""

    def __init__(self, folder: Path, *urls: str) -> None:
        secret = folder / "secret"
        secret.write_text(f"{SECRET}\n")
        self.settings = WebhookSettings(urls, str(secret), allow_private=True)
        self.store = BatchStore(folder, StoreLimits(reserve_bytes=0), webhook_urls=urls)
        self.thread = ThreadPoolExecutor(1)

    async def call(self, work: Callable[[BatchStore], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, self.store)

    def end(self, status: Any = "completed") -> BatchRecord:
        """A batch that has ended."""
        upload = self.store.begin_upload(b"k")
        upload.keep()
        record = self.store.create_message_batch(
            upload, b"k", lines=1, window="1h", window_s=60, keep_s=60, model="m", served="s"
        )
        self.store.finish(record, status)
        return record

    def age(self, seconds: float) -> None:
        self.store._base.execute("UPDATE outbox SET created_at = created_at - ?", (seconds,))

    def waiting(self) -> int:
        return int(self.store._base.execute("SELECT COUNT(*) FROM outbox").fetchone()[0])

    def run(self, until: Callable[[], bool], senders: int = 1) -> None:
        async def go() -> None:
            made = [WebhookSender(self.call, self.settings) for _ in range(senders)]
            tasks = [asyncio.create_task(sender.run()) for sender in made]
            try:
                async with asyncio.timeout(30):
                    while not until():
                        await asyncio.sleep(0.01)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(go())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "LOOK_S", 0.01)
    monkeypatch.setattr(webhooks, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 0.05)


@pytest.fixture
def sending(tmp_path: Path) -> Iterator[Callable[..., Sending]]:
    made: list[Sending] = []

    def starting(*receivers: Receiver) -> Sending:
        urls = [f"http://127.0.0.1:{receiver.port}/hook" for receiver in receivers]
        made.append(Sending(tmp_path, *urls))
        return made[-1]

    yield starting
    for one in made:
        one.thread.shutdown()
        one.store.close()


def test_every_address_is_told_how_a_batch_ended(sending):
    with receiving() as first, receiving(status(200)) as second:
        one = sending(first, second)
        ends = ("completed", "failed", "expired", "cancelled")
        records = {end: one.end(end) for end in ends}
        one.run(lambda: not one.waiting())
        client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
        ids = []
        for receiver in (first, second):
            events = {}
            for path, headers, body in receiver.got:
                assert path == "/hook"
                assert headers["content-type"] == "application/json"
                event = client.webhooks.unwrap(body, headers)
                events[event.type] = event
                ids.append(headers["webhook-id"])
                assert headers["host"] == f"127.0.0.1:{receiver.port}"
            assert set(events) == {f"batch.{end}" for end in ends}
            for end, record in records.items():
                event = events[f"batch.{end}"]
                assert event.data.id == record.id
                assert event.object == "event"
                assert event.id.startswith("evt_")
                assert event.created_at == one.store.reload(record.id).ended_at
        assert len(set(ids)) == len(ids) == 8


def test_it_is_told_again_until_it_is_confirmed_and_always_by_the_same_id(sending):
    def react(handler: Any, number: int) -> None:
        status(500 if number < 4 else 202)(handler, number)

    with receiving(react) as receiver:
        one = sending(receiver)
        one.end()
        one.run(lambda: not one.waiting())
        assert len(receiver.got) == 4
        assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1
        assert len({body for _, _, body in receiver.got}) == 1


def test_one_address_that_fails_does_not_keep_others_waiting(sending):
    with receiving(status(500)) as failing, receiving() as good:
        one = sending(failing, good)
        for _ in range(20):
            one.end()
        one.run(lambda: len(good.got) == 20 and one.waiting() == 20)


def test_one_address_that_hangs_does_not_keep_others_waiting(sending):
    released = threading.Event()
    with receiving(lambda *_: released.wait(60)) as hanging, receiving() as good:
        one = sending(hanging, good)
        for _ in range(3 * webhooks.MOST_OPEN):
            one.end()
        one.run(lambda: len(good.got) == 3 * webhooks.MOST_OPEN)
        released.set()
        assert len(hanging.got) <= webhooks.MOST_OPEN


def test_several_servers_of_a_folder_do_not_tell_twice(sending, monkeypatch):
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 60.0)  # until another one would try, too
    with receiving() as receiver:
        one = sending(receiver)
        for _ in range(10):
            one.end()
        one.run(lambda: not one.waiting(), senders=3)
        assert len(receiver.got) == 10


def test_a_secret_is_replaced_while_the_server_runs(sending):
    with receiving() as receiver:
        one = sending(receiver)
        Path(one.settings.secret_file).write_text("nonsense\n")
        one.end()

        def tried() -> bool:
            return bool(one.store._base.execute("SELECT 1 FROM outbox WHERE tries > 0").fetchone())

        one.run(tried)
        assert not receiver.got
        Path(one.settings.secret_file).write_text(f"{OTHER}\n{SECRET}\n")
        one.run(lambda: not one.waiting())
        ((_, headers, body),) = receiver.got
        client = openai.OpenAI(api_key="none")
        for secret in (SECRET, OTHER):
            assert client.webhooks.unwrap(body, headers, secret=secret).type == "batch.completed"


def test_after_three_days_it_is_given_up(sending):
    with receiving() as receiver:
        one = sending(receiver)
        one.end()
        one.age(KEPT_S + 1)
        one.run(lambda: not one.waiting())
        assert not receiver.got


def test_what_nobody_could_tell_is_forgotten(sending, tmp_path):
    with receiving() as receiver:
        one = sending(receiver)
        one.end()
        other = Sending(tmp_path, "http://127.0.0.1:1/other")
        other.end()
        assert [d.url for d in one.store.outbox.due(time.time() + 1, 9)] == list(one.settings.urls)
        assert one.waiting() == 2
        one.run(lambda: one.waiting() == 1)
        other.age(FORGOTTEN_S + 1)
        one.run(lambda: not one.waiting())
        other.store.close()


def test_whoever_keeps_the_process_knows_when_the_next_try_is_due(sending, tmp_path):
    with receiving() as receiver:
        one = sending(receiver)
        urls = one.settings.urls
        assert work_within(tmp_path, "s", urls) is None
        one.end()
        assert work_within(tmp_path, "s", urls) == 0
        assert work_within(tmp_path, "s", ["http://127.0.0.1:1/other"]) is None
        assert work_within(tmp_path, "s") is None
        (delivery,) = one.store.outbox.due(time.time() + 1, 9)
        assert one.store.outbox.claim(delivery, time.time() + 1000)
        assert not one.store.outbox.claim(delivery, time.time() + 2000)
        assert 900 < (work_within(tmp_path, "s", urls) or 0) <= 1000
        one.store._base.execute("PRAGMA user_version = 1")
        assert work_within(tmp_path, "s") == 0, "it has to be brought to this version"
        one.store._base.execute(f"PRAGMA user_version = {VERSION}")


def test_nothing_is_kept_where_nobody_is_told(tmp_path):
    one = Sending(tmp_path)
    one.end()
    assert not one.waiting()
    assert one.store.outbox.next_due() is None
    one.store.close()


def test_tries_become_rarer(monkeypatch):
    monkeypatch.setattr(webhooks, "FIRST_DELAY_S", 5.0)
    for tries in range(100):
        longest = min(5 * 2**tries, 3600)
        delays = [delay_s(tries) for _ in range(20)]
        assert longest / 2 <= min(delays) < max(delays) <= longest


def test_the_event_is_what_the_description_says(sending):
    import description

    description.need()
    with receiving() as receiver:
        one = sending(receiver)
        one.end()
        one.run(lambda: not one.waiting())
        ((_, _, body),) = receiver.got
    description.validator("WebhookBatchCompleted").validate(json.loads(body))
