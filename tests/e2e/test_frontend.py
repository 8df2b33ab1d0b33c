"""``weft serve --engine-only`` and ``weft frontend``: request planes on another machine."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

import lossy_link
import weft
from depth import deep
from flaky_proxy import flaky_proxy
from frontends import KEY, RemoteEngine, Stream, engine_only, fronting
from live import (
    START_S,
    Server,
    eventually,
    free_port,
    in_shared_memory,
    lives,
    refused,
    run,
    serving,
)
from places import key_file

LONG = 400  # tokens: more than the first extent of an output
PROMPTS = [[9 + number, 7, 5 + number] for number in range(6)]
QUICK = ["--ring-timeout-s", "2"]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = in_shared_memory()
    yield
    eventually(lambda: in_shared_memory() <= before, START_S)


@pytest.fixture
def engine(tmp_path) -> Iterator[RemoteEngine]:
    with engine_only(tmp_path, *QUICK) as running:
        yield running


def begin(server: Server, tokens: int = LONG, **more) -> list[Stream]:
    return [Stream(server, prompt, tokens, **more) for prompt in PROMPTS]


def begun(streams: list[Stream]) -> bool:
    return all(stream.tokens for stream in streams)


def answers(server: Server) -> list[object]:
    """Everything that differs if a bit of a logit does."""
    bodies = [
        {"prompt": "def fibonacci(n):", "max_tokens": 300, "temperature": 0, "logprobs": 3},
        {"prompt": "import ", "max_tokens": 60, "seed": 7, "temperature": 1.2, "n": 3},
        {"prompt": "x = [", "max_tokens": 20, "echo": True, "logprobs": 1, "temperature": 0},
        {"prompt": ["a", "b" * 300], "max_tokens": 5, "temperature": 0},
        {"prompt": "class A", "max_tokens": 30, "temperature": 0, "logit_bias": {"11": 4}},
        {"prompt": "def", "max_tokens": 40, "temperature": 0, "stop": ["\n\n"]},
    ]
    found: list[object] = []
    for body in bodies:
        body |= {"model": "builtin", "ignore_eos": True}
        got = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S).json()
        found.append((got["choices"], got["usage"]["completion_tokens"]))
    body = {"model": "builtin", "input": ["one", "two"]}
    got = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=START_S).json()
    found.append([entry["embedding"] for entry in got["data"]])
    found += [stream.outcome() for stream in begin(server)]
    return found


def test_answers_are_those_of_a_local_server(tmp_path):
    with serving(tmp_path) as server:
        local = answers(server)
    key = str(key_file(tmp_path, KEY))
    with (
        engine_only(tmp_path, "--ring-key-file", key, modelled=False) as engine,
        fronting(tmp_path, engine.address, "--ring-key-file", key) as server,
    ):
        assert answers(server) == local
        eventually(server.idle, START_S)
        cached = list((tmp_path / "cache" / "weft" / "frontend").glob("*/model/tokenizer.json"))
        assert len(cached) == 1


def test_several_request_planes_share_an_engine(engine, tmp_path):
    with (
        fronting(tmp_path, engine.address, "--frontends", "2") as one,
        fronting(tmp_path, engine.address) as other,
    ):
        streams = [*begin(one), *begin(other)]
        ends = [stream.outcome() for stream in streams]
        assert ends[: len(PROMPTS)] == ends[len(PROMPTS) :]
        assert {end for _, end in ends} == {"length"}
        info = httpx.get(f"{one.url}/server_info", timeout=START_S).json()
        assert info["engine"]["name"] == "builtin"
        changed = httpx.put(f"{one.url}/v1/targets", json={}, timeout=START_S)
        assert changed.status_code >= 400
        assert "takes no other targets" in changed.text


def test_who_leaves_holds_nothing(tmp_path):
    with (
        engine_only(tmp_path, modelled=False) as engine,
        fronting(tmp_path, engine.address) as server,
    ):
        streams = begin(server, 900)
        eventually(lambda: begun(streams), START_S)
        for stream in streams:
            stream.leave()
        assert {stream.outcome()[1] for stream in streams} == {"left"}
        eventually(server.idle, START_S)
        assert Stream(server, [1, 2], 5).outcome()[1] == "length"


def test_a_killed_request_plane_is_replaced_and_its_requests_end(engine, tmp_path):
    with fronting(tmp_path, engine.address) as server:
        streams = begin(server, 4000)
        eventually(lambda: begun(streams), START_S)
        plane = server.children()["weft-frontend"]
        plane.kill()
        assert all(stream.outcome()[1].startswith("broken") for stream in streams)
        eventually(lambda: answers_again(server), START_S)
        eventually(server.idle, START_S)


def answers_again(server: Server) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return Stream(server, [3, 4], 5).outcome()[1] == "length"
    return False


def test_a_killed_frontend_leaves_nothing_at_the_engine(engine, tmp_path):
    with fronting(tmp_path, engine.address) as server:
        streams = begin(server, 4000)
        eventually(lambda: begun(streams), START_S)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with fronting(tmp_path, engine.address) as server:
        eventually(server.idle, START_S)
        assert server.metrics("weft:num_requests_running") == [0]
        assert Stream(server, [1, 2], 5).outcome()[1] == "length"
    eventually(lambda: "did not come back" in engine.errors.read_text(), START_S)


def test_streams_go_on_after_the_engine_was_killed(engine, tmp_path):
    with fronting(tmp_path, engine.address) as server:
        undisturbed = [stream.outcome() for stream in begin(server)]
        streams = begin(server)
        eventually(lambda: begun(streams), START_S)
        engine.children()["weft-engine"].kill()
        assert [stream.outcome() for stream in streams] == undisturbed
        eventually(lambda: server.metrics("weft:engine_restarts_total") == [1], START_S)


def test_a_killed_agent_ends_requests_with_an_error_and_comes_back(engine, tmp_path):
    with fronting(tmp_path, engine.address) as server:
        streams = begin(server, 4000)
        eventually(lambda: begun(streams), START_S)
        engine.children()["weft-ring-agent"].kill()
        assert {stream.outcome()[1] for stream in streams} == {"engine_unreachable"}
        eventually(lambda: answers_again(server), START_S)
        eventually(server.idle, START_S)


def test_a_stopped_agent_is_replaced(tmp_path):
    with (
        engine_only(tmp_path, *QUICK, "--watchdog-s", "2") as engine,
        fronting(tmp_path, engine.address, *QUICK) as server,
    ):
        agent = engine.children()["weft-ring-agent"]
        agent.send_signal(signal.SIGSTOP)
        eventually(lambda: not lives(agent), START_S)
        assert "not responding" in engine.errors.read_text()
        eventually(lambda: answers_again(server), START_S)


class Between(NamedTuple):
    """A network between an engine and its request plane that can be cut."""

    server: Server
    cut: Callable[[], None]
    mend: Callable[[], None]


@contextlib.contextmanager
def namespaces(folder: Path, delay_s: float, loss: float) -> Iterator[Between]:
    key = ["--ring-key-file", str(key_file(folder, KEY))]
    with lossy_link.lossy_link(delay_s, loss) as link:
        listen = f"{link.there}:0"
        with (
            engine_only(folder, *QUICK, *key, listen=listen, within=link.within) as engine,
            fronting(folder, engine.address, *QUICK, *key) as server,
        ):
            yield Between(server, link.cut, link.mend)


@contextlib.contextmanager
def relay(folder: Path, delay_s: float, loss: float) -> Iterator[Between]:  # noqa: ARG001
    """The same without packets: nothing of TCP gets lost."""
    with (
        engine_only(folder, *QUICK) as engine,
        flaky_proxy(engine.address, delay_s) as proxy,
        fronting(folder, proxy.address, *QUICK) as server,
    ):
        yield Between(server, proxy.cut, proxy.mend)


# Where there are no namespaces the relay stands for them; nothing is left out.
NETWORKS = [relay] if lossy_link.why_not() else [relay, namespaces]


@pytest.mark.parametrize("network", NETWORKS)
def test_streams_over_a_slow_and_lossy_network(network, tmp_path):
    with engine_only(tmp_path) as engine, fronting(tmp_path, engine.address) as server:
        undisturbed = [stream.outcome() for stream in begin(server)]
    with network(tmp_path, 0.005, 0.02) as between:
        assert [stream.outcome() for stream in begin(between.server)] == undisturbed
        eventually(between.server.idle, START_S)


@pytest.mark.parametrize("network", NETWORKS)
def test_streams_go_on_when_a_lost_link_is_restored(network, tmp_path):
    with network(tmp_path, 0.001, 0.0) as between:
        server = between.server
        undisturbed = [stream.outcome() for stream in begin(server)]
        streams = begin(server)
        eventually(lambda: begun(streams), START_S)
        between.cut()
        lost = "is lost"
        eventually(lambda: lost in server.errors.read_text(), START_S)
        between.mend()
        assert [stream.outcome() for stream in streams] == undisturbed
        assert "is up again" in server.errors.read_text()
        eventually(server.idle, START_S)


def test_a_link_that_stays_lost_ends_requests_with_an_error(tmp_path):
    with relay(tmp_path, 0.0, 0.0) as between:
        server = between.server
        streams = begin(server, 4000)
        eventually(lambda: begun(streams), START_S)
        between.cut()
        assert {stream.outcome()[1] for stream in streams} == {"engine_unreachable"}
        assert httpx.get(f"{server.url}/ready", timeout=START_S).status_code == 503
        refusal = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "builtin", "prompt": "a"},
            timeout=START_S,
        )
        assert refusal.status_code == 503
        assert refusal.json()["error"]["code"] == "engine_unreachable"
        assert "retry-after" in refusal.headers
        between.mend()
        eventually(lambda: answers_again(server), START_S)
        eventually(server.idle, START_S)


def test_streams_outlive_connections_that_are_reset_again_and_again(tmp_path):
    with (
        engine_only(tmp_path, *QUICK, modelled=False) as engine,
        flaky_proxy(engine.address, 0.002) as proxy,
        fronting(tmp_path, proxy.address, *QUICK) as server,
    ):
        undisturbed = [stream.outcome() for stream in begin(server, 900)]
        streams = begin(server, 900)
        for resets, seen in enumerate((20, 100, 200), start=1):
            eventually(lambda seen=seen: min(len(s.tokens) for s in streams) > seen, START_S)
            proxy.reset()
            eventually(
                lambda resets=resets: server.errors.read_text().count("is up again") == resets,
                START_S,
            )
        assert [stream.outcome() for stream in streams] == undisturbed
        eventually(server.idle, START_S)


@deep
def test_streams_survive_engines_that_die_behind_links_that_break(tmp_path):
    draw = random.Random(3)
    with (
        engine_only(tmp_path, *QUICK, modelled=False) as engine,
        flaky_proxy(engine.address, 0.001) as proxy,
        fronting(tmp_path, proxy.address, *QUICK) as server,
    ):
        undisturbed = [stream.outcome() for stream in begin(server, 900)]
        kills = 0
        for _ in range(6):
            streams = begin(server, 900)
            while not all(stream.ended for stream in streams):
                time.sleep(draw.uniform(0.3, 1.5))
                if draw.random() < 0.3 and (victim := engine.children().get("weft-engine")):
                    victim.kill()
                    kills += 1
                else:
                    proxy.reset()
            assert [stream.outcome() for stream in streams] == undisturbed
        assert kills
        eventually(server.idle, START_S)


def test_an_engine_that_is_told_to_end_lets_streams_finish(tmp_path):
    with engine_only(tmp_path) as engine, fronting(tmp_path, engine.address) as server:
        streams = begin(server)
        eventually(lambda: begun(streams), START_S)
        engine.process.send_signal(signal.SIGTERM)
        assert {stream.outcome()[1] for stream in streams} == {"length"}
        assert engine.process.wait(START_S) == 0
        eventually(lambda: "The engine has ended." in server.errors.read_text(), START_S)
        assert Stream(server, [1], 5).outcome()[1].startswith("broken")


def test_a_signal_to_all_processes_lets_streams_finish(tmp_path):
    """As service managers send it: to the agent, and by its supervisor once more."""
    with engine_only(tmp_path) as engine, fronting(tmp_path, engine.address) as server:
        streams = begin(server, 3000)
        eventually(lambda: begun(streams), START_S)
        agent = engine.children()["weft-ring-agent"]
        engine.process.send_signal(signal.SIGTERM)
        agent.send_signal(signal.SIGTERM)
        assert {stream.outcome()[1] for stream in streams} == {"length"}
        assert engine.process.wait(START_S) == 0


def test_an_agent_that_is_told_to_end_has_a_successor_at_its_port(engine, tmp_path):
    with fronting(tmp_path, engine.address) as server:
        assert Stream(server, [1], 5).outcome()[1] == "length"
        agent = engine.children()["weft-ring-agent"]
        agent.send_signal(signal.SIGTERM)
        eventually(lambda: not lives(agent), START_S)
        eventually(lambda: answers_again(server), START_S)
    assert engine.process.poll() is None


def test_a_request_plane_waits_for_a_ring_however_long_it_takes(tmp_path):
    with engine_only(tmp_path, *QUICK, "--ring-planes", "1") as engine, ExitStack() as waiting:
        with fronting(tmp_path, engine.address):
            given = [engine.address, "--watchdog-s", "1"]
            server = waiting.enter_context(fronting(tmp_path, *given, wait=False))
            eventually(lambda: "rings are taken" in server.errors.read_text(), START_S)
            plane = server.children()["weft-frontend"]
            time.sleep(3)
        eventually(lambda: answers_again(server), START_S)
        assert server.children()["weft-frontend"] == plane
        assert server.errors.read_text().count("rings are taken") == 1


def other_model(folder: Path) -> Path:
    """The built-in model with a tokeniser that has other ids for the same text."""
    other = folder / "other"
    shutil.copytree(Path(weft.__file__).parent / "builtin", other)
    swap_words(other)
    return other


def swap_words(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    words = [token for token in ids if token.isalpha()]
    for one, other in zip(words[::2], words[1::2], strict=False):
        ids[one], ids[other] = ids[other], ids[one]
    (model / "tokenizer.json").write_text(json.dumps(content))


def tokens_of(server: Server, text: str) -> list[int]:
    """How the request plane tokenises; raises while it cannot be asked."""
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=START_S)
    answer.raise_for_status()
    return answer.json()["tokens"]


def tokenises_like(server: Server, text: str, expected: list[int]) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return tokens_of(server, text) == expected
    return False


TEXT = "def fibonacci(number):"


def test_an_engine_with_another_model_gets_request_planes_with_its_facts(tmp_path):
    address, model = f"127.0.0.1:{free_port()}", str(other_model(tmp_path))
    with (
        engine_only(tmp_path, "--model", model, modelled=False) as engine,
        fronting(tmp_path, engine.address) as server,
    ):
        expected = tokens_of(server, TEXT)
    with ExitStack() as stack:
        with engine_only(tmp_path, *QUICK, listen=address, modelled=False) as engine:
            server = stack.enter_context(fronting(tmp_path, address, *QUICK))
            assert tokens_of(server, TEXT) != expected
            first = server.children()["weft-frontend"]
            open_stream = Stream(server, [1, 2], 1000)
            eventually(lambda: bool(open_stream.tokens), START_S)
            engine.process.kill()
        assert open_stream.outcome()[1] == "engine_unreachable"
        given = ["--model", model, *QUICK]
        with engine_only(tmp_path, *given, listen=address, modelled=False):
            eventually(lambda: tokenises_like(server, TEXT, expected), START_S)
            assert not lives(first)
            said = server.errors.read_text()
            assert "it serves another model now, or other text files of it" in said
            assert said.count("start anew with its facts") == 1
            name = httpx.get(f"{server.url}/v1/models", timeout=START_S).json()["data"][0]["id"]
            assert Stream(server, [1, 2], 5, model=name).outcome()[1] == "length"


def test_a_restarted_engine_with_other_text_files_gets_request_planes_with_its_facts(tmp_path):
    model = other_model(tmp_path)
    given = ["--model", str(model), *QUICK]
    with (
        engine_only(tmp_path, *given, modelled=False) as engine,
        fronting(tmp_path, engine.address, *QUICK) as server,
    ):
        before = tokens_of(server, TEXT)
        engine.children()["weft-engine"].kill()
        eventually(lambda: "has taken over" in engine.errors.read_text(), START_S)
        name = httpx.get(f"{server.url}/v1/models", timeout=START_S).json()["data"][0]["id"]
        assert Stream(server, [1, 2], 5, model=name).outcome()[1] == "length"
        assert "anew" not in server.errors.read_text()  # the same facts as before
        swap_words(model)
        agent = engine.children()["weft-ring-agent"]
        engine.children()["weft-engine"].kill()
        eventually(lambda: "anew" in server.errors.read_text(), START_S)
        eventually(lambda: up(server), START_S)
        assert tokens_of(server, TEXT) != before
        assert Stream(server, [1, 2], 5, model=name).outcome()[1] == "length"
        assert engine.children()["weft-ring-agent"] == agent


def up(server: Server) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{server.url}/ready", timeout=START_S).status_code == 200
    return False


def test_wrong_keys_are_refused_on_both_sides(tmp_path):
    right, folder = str(key_file(tmp_path, KEY)), tmp_path / "other"
    folder.mkdir()
    wrong = str(key_file(folder, "another key of the tests"))
    with engine_only(tmp_path, "--ring-key-file", right) as engine:
        for given in ([], ["--ring-key-file", wrong]):
            done = run("frontend", "--ring", engine.address, "--port", "0", *given)
            refused(done, "The keys of request plane and engine differ.")
        eventually(lambda: engine.errors.read_text().count("keys of request") == 2, START_S)
        with fronting(tmp_path, engine.address, "--ring-key-file", right) as server:
            assert Stream(server, [1], 5).outcome()[1] == "length"


def test_wrong_usage_is_answered_with_one_sentence(tmp_path):
    listen = ["serve", "--engine-only", "--ring-listen"]
    refused(run(*listen, "0.0.0.0:0"), "Other machines can reach 0.0.0.0", "--ring-key-file")
    refused(run(*listen, "nonsense"), "HOST:PORT")
    refused(run("serve", "--engine-only"), "engine_only and ring_listen go together")
    refused(run("serve", "--ring-listen", "127.0.0.1:0"), "engine_only and ring_listen go together")
    refused(run(*listen, "127.0.0.1:0", "--port", "1"), "--port is of no use here")
    short = key_file(tmp_path, "short")
    refused(run(*listen, "127.0.0.1:0", "--ring-key-file", str(short)), "has 5 bytes")
    refused(run("serve", "--ring-planes", "3"), "--ring-planes is of no use without --engine-only")
    refused(run("frontend", "--ring", "nonsense"), "HOST:PORT")
    refused(run("frontend", "--standby"), "unknown argument '--standby'")
