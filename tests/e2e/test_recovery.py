"""Processes of a running server are killed: streams go on, others do not notice, nothing stays.

Most servers here are ``MODELLED``: their engines have all but a model. Those that are not show
that the streams of a real one, greedy, seeded and structured, are the undisturbed ones, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from depth import deep
from live import (
    SMALL,
    START_S,
    WEFT,
    Server,
    command_of,
    eventually,
    in_shared_memory,
    serving,
    wait_until_ready,
    with_engines,
)

STREAMS = 16
TOKENS = 100
RESTARTS = "weft:engine_restarts_total"
POISON = 3999  # first token of a prompt that kills the engines of some servers
MODELLED = {"modelled": True}


def body(number: int, tokens: int = TOKENS) -> dict:
    """Every other one greedy, every other one sampled; every third one follows a grammar."""
    draw = random.Random(number)
    grammar = {"structured_outputs": {"regex": "([a-z]{3}[0-9]{2}; ){99}"}, "ignore_eos": False}
    return {
        "model": "builtin",
        "prompt": [draw.randrange(100, 3900) for _ in range(8 + 5 * number)],
        "max_tokens": tokens,
        "temperature": number % 2,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **(grammar if number % 3 == 2 else {}),
    }


class Stream(threading.Thread):
    """Reads one stream to its end, whatever happens to the server meanwhile."""

    def __init__(self, url: str, asked: dict) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.text = ""
        self.finish = ""
        self.problem = ""
        self._url, self._asked = url, asked
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._asked, timeout=120
            ) as answer:
                for line in answer.iter_lines():
                    self._read(line)
        except Exception as error:
            self.problem = repr(error)

    def _read(self, line: str) -> None:
        if not line or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.problem = event["error"]["code"]
            return
        for choice in event["choices"]:
            self.tokens += choice.get("token_ids") or []
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish

    def outcome(self) -> tuple[list[int], str, str, str]:
        self.join(120)
        assert not self.is_alive()
        return self.tokens, self.text, self.finish, self.problem


def start(server: Server, count: int = STREAMS, tokens: int = TOKENS) -> list[Stream]:
    return [Stream(server.url, body(number, tokens)) for number in range(count)]


def begun(streams: list[Stream]) -> bool:
    """Whether all have said something. One that has failed never will."""
    problems = [stream.problem for stream in streams if stream.problem]
    assert not problems, problems
    return all(stream.tokens for stream in streams)


def said(streams: list[Stream]) -> int:
    return sum(len(stream.tokens) for stream in streams)


def begin_on(server: Server, planes: int) -> list[Stream]:
    """Streams that have begun, on each of so many request planes; the engine is stopped meanwhile.

    Who accepts a connection is left to chance, and a busy machine may let streams end too early.
    """
    eventually(lambda: len(frontends(server)) == planes, START_S)
    while True:
        streams = start(server, tokens=400)
        eventually(lambda streams=streams: begun(streams), START_S)
        stopped = engine(server)
        stopped.suspend()
        if all(map(connections, frontends(server))) and all(map(Stream.is_alive, streams)):
            return streams
        stopped.resume()
        for stream in streams:
            stream.outcome()


def connections(plane: psutil.Process) -> int:
    """Of clients, open."""
    found = plane.net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)


def engine(server: Server) -> psutil.Process:
    """The engine that serves, once it does."""
    eventually(lambda: "weft-engine" in server.children(), START_S)
    return server.children()["weft-engine"]


def frontends(server: Server) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    return [child for child in found if command_of(child)[:1] == ["weft-frontend"]]


def metric(server: Server, name: str) -> float:
    (value,) = server.metrics(name)
    return value


@pytest.mark.parametrize(("standby", "how"), [("--standby", {}), ("--no-standby", MODELLED)])
def test_killed_engines_are_no_more_than_a_pause(tmp_path, standby, how):
    draw = random.Random(standby)
    with serving(tmp_path, standby, **how) as server:

        def complete() -> bool:
            return standby == "--no-standby" or "weft-standby" in server.children()

        undisturbed = [stream.outcome() for stream in start(server)]
        eventually(complete, START_S)
        descriptors = psutil.Process(server.process.pid).num_fds()
        assert all(finish == "length" for _, _, finish, _ in undisturbed)
        streams = start(server)
        moments = (0, *sorted(draw.sample(range(1, STREAMS * TOKENS * 3 // 4), 3)))
        for kills, moment in enumerate(moments):
            eventually(lambda moment=moment: said(streams) >= moment, START_S)
            eventually(lambda kills=kills: metric(server, RESTARTS) == kills, START_S)
            victim = engine(server)
            eventually(complete, START_S)
            victim.kill()
            eventually(lambda victim=victim: not victim.is_running(), START_S)
        assert [stream.outcome() for stream in streams] == undisturbed
        eventually(server.idle, START_S)
        eventually(lambda: metric(server, RESTARTS) == 4, START_S)
        assert priorities(engine(server)) == {0}
        eventually(complete, START_S)
        main = psutil.Process(server.process.pid)
        eventually(lambda: main.num_fds() <= descriptors, START_S)  # none is left open for good


def priorities(process: psutil.Process) -> set[int]:
    """Of its threads: none that computes may be left from the quiet start of a standby."""
    return {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("resident", ["auto", pytest.param("off", marks=deep)])
@pytest.mark.parametrize("standby", ["--standby", "--no-standby"])
def test_kv_outlives_an_engine_that_was_killed_from_outside(tmp_path, standby, number, resident):
    """One that ended by its own fault may have written anything: its KV is computed again.

    Two streams without a grammar: most of their steps are the resident loop's.
    """
    with serving(tmp_path, standby, "--resident", resident) as server:
        undisturbed = [stream.outcome() for stream in start(server, 2)]
        eventually(lambda: metric(server, "weft:engine_steps_total") >= TOKENS, START_S)
        steps = metric(server, "weft:resident_steps_total")
        assert (steps > TOKENS // 2) if resident == "auto" else steps == 0
        eventually(
            lambda: standby == "--no-standby" or "weft-standby" in server.children(), START_S
        )
        for kills in (1, 2):
            streams = start(server, 2)
            eventually(lambda streams=streams: said(streams) > 2 * 20, START_S)
            engine(server).send_signal(number)
            assert [stream.outcome() for stream in streams] == undisturbed
            eventually(lambda kills=kills: metric(server, RESTARTS) == kills, START_S)
        kept = [line for line in server.errors.read_text().splitlines() if "blocks of KV" in line]
        assert len(kept) == (2 if number == signal.SIGKILL else 0)


def test_a_killed_request_plane_disturbs_no_other(tmp_path):
    """Nor are the tokens forgotten of streams that go on; a plane shows its counts now and then."""
    with serving(tmp_path, "--frontends", "2", **MODELLED) as server:
        undisturbed = [stream.outcome() for stream in start(server, tokens=400)]
        made = sum(len(tokens) for tokens, *_ in undisturbed)
        eventually(lambda: len(frontends(server)) == 2, START_S)
        before = engine(server)
        for _ in range(10):  # whoever answers knows what all have done
            eventually(lambda: metric(server, "weft:generation_tokens_total") == made, START_S)
        streams = begin_on(server, 2)
        max(frontends(server), key=connections).kill()
        before.resume()
        for _ in range(20):  # the port stays open: nobody is refused
            assert httpx.get(f"{server.url}/health", timeout=START_S).status_code == 200
        ends = [stream.outcome() for stream in streams]
        broken = [end for end in ends if end[3]]
        assert 0 < len(broken) < STREAMS
        assert [end for end in ends if not end[3]] == [
            right for right, end in zip(undisturbed, ends, strict=True) if not end[3]
        ]
        for (tokens, *_), (right, *_) in zip(ends, undisturbed, strict=True):
            assert tokens == right[: len(tokens)]
        eventually(lambda: len(frontends(server)) == 2 and server.idle(), START_S)
        assert engine(server) == before
        completed = made + sum(len(tokens) for tokens, *_, problem in ends if not problem)
        for _ in range(10):
            eventually(lambda: metric(server, "weft:generation_tokens_total") >= completed, START_S)


def test_engine_and_standby_may_be_killed_together_again_and_again(tmp_path):
    """All that follow come from one process that has done their imports; none is its child."""
    with serving(tmp_path, "--standby", **MODELLED) as server:
        undisturbed = [stream.outcome() for stream in start(server)]
        streams = start(server)
        eventually(lambda: begun(streams), START_S)
        forks = server.children()["weft-forkserver"]
        for _ in range(5):
            victims = [p for title, p in server.children().items() if title in SERVE_OR_WAIT]
            for victim in victims:
                victim.kill()
            eventually(lambda victims=victims: not any(v.is_running() for v in victims), START_S)
            enough = said(streams) + 2 * STREAMS + 4  # more than was on its way, and no suspects
            eventually(lambda enough=enough: said(streams) >= enough, START_S)
        assert [stream.outcome() for stream in streams] == undisturbed
        eventually(lambda: set(server.children()) >= {"weft-standby", "weft-forkserver"}, START_S)
        assert server.children()["weft-forkserver"] == forks
        for title in SERVE_OR_WAIT:
            assert server.children()[title].ppid() == server.process.pid
        eventually(server.idle, START_S)


SERVE_OR_WAIT = {"weft-engine", "weft-standby"}


def test_a_killed_fork_server_takes_nobody_with_it(tmp_path):
    with serving(tmp_path, "--standby", **MODELLED) as server:
        undisturbed = [stream.outcome() for stream in start(server)]
        eventually(lambda: "weft-standby" in server.children(), START_S)
        streams = start(server)
        before = server.children()
        before["weft-forkserver"].kill()
        assert [stream.outcome() for stream in streams] == undisturbed
        eventually(lambda: "weft-forkserver" in server.children(), START_S)
        assert all(server.children()[title] == before[title] for title in SERVE_OR_WAIT)


def test_a_killed_standby_is_replaced_at_once(tmp_path):
    with serving(tmp_path, "--standby", **MODELLED) as server:
        for _ in range(2):  # that has just started, and its successor
            eventually(lambda: "weft-standby" in server.children(), START_S)
            standby = server.children()["weft-standby"]
            standby.kill()
            eventually(lambda standby=standby: not standby.is_running(), START_S)
        eventually(lambda: "weft-standby" in server.children(), 25)  # long pauses are longer


@deep
def test_a_stopped_fork_server_is_replaced(tmp_path):
    with serving(tmp_path, "--standby") as server:
        eventually(lambda: "weft-standby" in server.children(), START_S)
        forks = server.children()["weft-forkserver"]
        forks.suspend()
        for victim in [p for title, p in server.children().items() if title in SERVE_OR_WAIT]:
            victim.kill()
        (stream,) = start(server, 1, 5)
        assert stream.outcome()[2:] == ("length", "")
        assert not forks.is_running()


def test_everything_may_be_killed_at_once_but_the_supervisor(tmp_path):
    with serving(tmp_path, "--frontends", "2", "--standby", **MODELLED) as server:
        eventually(lambda: "weft-standby" in server.children(), START_S)
        for child in psutil.Process(server.process.pid).children():
            child.kill()
        wait_until_ready(server)
        (stream,) = start(server, 1, 5)
        assert len(stream.outcome()[0]) == 5


HELD_BACK = """
import os, time
while os.path.exists({MARK!r}):
    time.sleep(0.02)
"""


def test_requests_wait_for_the_next_engine(tmp_path):
    mark = tmp_path / "mark"
    with serving(tmp_path, engines=HELD_BACK.format(MARK=str(mark)), **MODELLED) as server:
        mark.touch()
        engine(server).kill()
        eventually(lambda: ready(server) == "recovering", START_S)
        answer = httpx.get(f"{server.url}/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "recovering"})
        assert httpx.get(f"{server.url}/health").status_code == 200
        streams = start(server, 3, 8)
        time.sleep(0.2)
        assert not said(streams)
        mark.unlink()
        assert all(end[2:] == ("length", "") for end in (s.outcome() for s in streams))
        assert httpx.get(f"{server.url}/ready").status_code == 200


def test_a_stopped_engine_is_told_of(tmp_path):
    with serving(tmp_path, "--watchdog-s", "600", "--stalled-s", "1", **MODELLED) as server:
        undisturbed = [stream.outcome() for stream in start(server, 4)]
        streams = start(server, 4)
        eventually(lambda: said(streams) > 20, START_S)
        stopped = engine(server)
        stopped.suspend()
        if any(stream.is_alive() for stream in streams):  # else there is nothing to be late with
            eventually(lambda: ready(server) == "stalled", START_S)
        stopped.resume()
        assert [stream.outcome() for stream in streams] == undisturbed
        eventually(lambda: ready(server) == "ready", START_S)
        assert engine(server) == stopped


def test_a_stopped_engine_is_replaced(tmp_path):
    with serving(tmp_path, "--watchdog-s", "3", **MODELLED) as server:
        undisturbed = [stream.outcome() for stream in start(server, 4)]
        streams = start(server, 4)
        eventually(lambda: said(streams) > 20, START_S)
        stopped = engine(server)
        stopped.suspend()
        assert [stream.outcome() for stream in streams] == undisturbed
        eventually(lambda: not stopped.is_running(), START_S)
        eventually(lambda: ready(server) == "ready", START_S)
        assert "makes no progress" in server.errors.read_text()


def ready(server: Server) -> str:
    return str(httpx.get(f"{server.url}/ready", timeout=START_S).json()["status"])


def test_a_stopped_request_plane_is_replaced(tmp_path):
    with serving(tmp_path, "--frontends", "2", "--watchdog-s", "6", **MODELLED) as server:
        streams = begin_on(server, 2)
        stopped = max(frontends(server), key=connections)
        stopped.suspend()
        engine(server).resume()
        assert any(problem for *_, problem in [stream.outcome() for stream in streams])
        eventually(lambda: not stopped.is_running(), START_S)
        eventually(lambda: len(frontends(server)) == 2 and server.idle(), START_S)
        assert server.errors.read_text().count("is not responding; it is killed") == 1
        assert engine(server).is_running()


STALLED = """
# The first engine that has work plans nothing, but goes on otherwise.
import os
from weft.sched.scheduler import Scheduler
plan, stalled = Scheduler.plan, []
def stall(self, now):
    if not self.idle and not stalled:
        try:
            os.close(os.open({MARK!r}, os.O_CREAT | os.O_EXCL))
            stalled.append(True)
        except FileExistsError:
            stalled.append(False)
    return None if any(stalled) else plan(self, now)
Scheduler.plan = stall
"""


def test_an_engine_that_plans_nothing_is_replaced(tmp_path):
    code = STALLED.format(MARK=str(tmp_path / "mark"))
    with serving(tmp_path, "--watchdog-s", "2", engines=code, **MODELLED) as server:
        (stream,) = start(server, 1, 5)
        assert stream.outcome()[2:] == ("length", "")
        assert "no steps any more" in server.errors.read_text()


def test_a_standby_that_hangs_is_replaced(tmp_path):
    with serving(tmp_path, "--standby", "--watchdog-s", "2", **MODELLED) as server:
        eventually(lambda: "weft-standby" in server.children(), START_S)
        standby = server.children()["weft-standby"]
        standby.suspend()
        engine(server).kill()
        (stream,) = start(server, 1, 5)
        assert stream.outcome()[2:] == ("length", "")
        assert not standby.is_running()
        assert "is not ready in time" in server.errors.read_text()


def test_engines_may_be_killed_as_soon_as_they_start(tmp_path):
    with serving(tmp_path, **MODELLED) as server:
        undisturbed = [stream.outcome() for stream in start(server, 4)]
        streams = start(server, 4)
        eventually(lambda: said(streams) > 20, START_S)
        killed: set[psutil.Process] = set()
        for _ in range(6):
            eventually(lambda: bool(engines(server) - killed), START_S)
            for victim in engines(server) - killed:
                victim.kill()
                killed.add(victim)
        assert [stream.outcome() for stream in streams] == undisturbed


def engines(server: Server) -> set[psutil.Process]:
    """Engines that serve or start."""
    children = psutil.Process(server.process.pid).children()
    return {child for child in children if is_engine(child)}


def is_engine(child: psutil.Process) -> bool:
    command = command_of(child)
    return command[:1] == ["weft-engine"] or "weft.engine.process" in command


# A request with the poison kills engines, the model's or modelled ones, as soon as it is computed.
POISONED = """
import os, signal
from {EXECUTOR}
launch, poisoned = Executor.launch, set()
def deadly(self, plan):
    poisoned.difference_update(plan.drop)
    poisoned.update(add.row for add in plan.add if add.tokens[0] == {POISON})
    if any(poisoned.intersection(batch.rows) for batch in plan.batches):
        {KILL}
    return launch(self, plan)
Executor.launch = deadly
"""
REAL = "weft.exec.eager import EagerExecutor as Executor"
NULL = "weft.sim.executor import ModelledExecutor as Executor"
KILLS = POISONED.format(EXECUTOR=REAL, POISON=POISON, KILL="os.kill(os.getpid(), signal.SIGSEGV)")
# The same by the signal of those who kill from outside, up to a number of times.
FROM_OUTSIDE = """
        count = len(os.listdir({MARKS!r}))
        if count < {KILLS}:
            os.mkdir({MARKS!r} + "/" + str(count))
            os.kill(os.getpid(), signal.SIGKILL)
"""
# An error where the request is taken in, before it is computed.
BREAKS = f"""
from weft.sched.scheduler import Scheduler
add = Scheduler.add
def broken(self, request):
    assert request.prompt[0] != {POISON}
    return add(self, request)
Scheduler.add = broken
"""
# Planning that does not end while the request waits; it must be found out, too.
STALLS = f"""
from weft.sched.scheduler import Scheduler
add, plan, poisoned = Scheduler.add, Scheduler.plan, []
def note(self, request):
    poisoned.extend(request.prompt[:1].count({POISON}) * [True])
    return add(self, request)
def stall(self, now):
    while poisoned:
        pass
    return plan(self, now)
Scheduler.add, Scheduler.plan = note, stall
"""


@pytest.mark.parametrize(
    ("how", "death", "patience"),
    [
        ({"engines": KILLS}, "signal SIGSEGV", ()),
        ({"engines": BREAKS, **MODELLED}, "exit code 1", ()),
        ({"engines": STALLS, **MODELLED}, "exit code 1", ("--watchdog-s", "2")),
    ],
    ids=["kills", "breaks", "stalls"],
)
def test_a_poison_request_fails_alone(tmp_path, how, death, patience):
    with serving(tmp_path, "--standby", "--max-crashes", "1", *patience, **how) as server:
        undisturbed = [stream.outcome() for stream in start(server, 8)]
        streams = start(server, 8)
        eventually(lambda: begun(streams), START_S)
        poisonous = Stream(server.url, body(0) | {"prompt": [POISON, 200, 300]})
        assert [stream.outcome() for stream in streams] == undisturbed
        assert poisonous.outcome() == ([], "", "", "request_crashed")
        assert server.errors.read_text().count(f"({death})") == 3  # two in company, one alone
        (stream,) = start(server, 1, 5)
        assert stream.outcome()[2:] == ("length", "")


@pytest.mark.parametrize(("kills", "end"), [(6, ("length", "")), (99, ("", "request_crashed"))])
def test_kills_from_outside_blame_nobody_for_a_while(tmp_path, kills, end):
    """However unlucky a request is; but one that is always there when they come is to blame."""
    marks = tmp_path / "marks"
    marks.mkdir()
    kill = FROM_OUTSIDE.format(MARKS=str(marks), KILLS=kills).strip()
    code = POISONED.format(EXECUTOR=NULL, POISON=POISON, KILL=kill)
    with serving(tmp_path, "--standby", "--max-crashes", "1", engines=code, **MODELLED) as server:
        unlucky = Stream(server.url, body(0, 5) | {"prompt": [POISON, 200, 300]})
        assert unlucky.outcome()[2:] == end
        assert len(list(marks.iterdir())) == min(kills, 8 + 2 + 1)
        (stream,) = start(server, 1, 5)
        assert stream.outcome()[2:] == ("length", "")


def test_an_engine_that_dies_during_the_drain_is_replaced(tmp_path):
    with serving(tmp_path, "--frontends", "2", "--standby", **MODELLED) as server:
        undisturbed = [stream.outcome() for stream in start(server, tokens=400)]
        streams = begin_on(server, 2)
        with httpx.Client(base_url=server.url, timeout=START_S) as kept:
            assert kept.get("/ready").json()["status"] in ("ready", "stalled")
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: kept.get("/ready").json()["status"] == "draining", START_S)
            assert kept.get("/ready").status_code == 503
        engine(server).kill()
        assert [stream.outcome() for stream in streams] == undisturbed
        assert server.process.wait(START_S) == 0


def test_what_does_not_end_in_time_ends_with_an_error(tmp_path):
    with serving(tmp_path, "--frontends", "2", "--drain-timeout-s", "0.5", **MODELLED) as server:
        streams = start(server, 4, 1900)
        eventually(lambda: begun(streams), START_S)
        server.process.send_signal(signal.SIGTERM)
        assert {stream.outcome()[3] for stream in streams} == {"shutting_down"}
        assert server.process.wait(START_S) == 0


def test_a_killed_supervisor_leaves_nothing(tmp_path):
    """Processes, shared memory and the port go; a dead socket's path is taken over."""
    path = tmp_path / "weft.sock"
    command = [*WEFT, "serve", "--uds", str(path), "--frontends", "2", *SMALL, "--standby"]
    before, environment = in_shared_memory(), with_engines(tmp_path, modelled=True)
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://weft", timeout=START_S) as client:
        for _ in range(2):
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
            eventually(lambda: ready_on(client), START_S)
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 3
            next(child for child in family if child.name().startswith("weft-engin")).suspend()
            process.kill()
            process.wait()
            assert psutil.wait_procs(family, timeout=START_S)[1] == []
            assert in_shared_memory() <= before
            assert path.exists()
            with pytest.raises(httpx.ConnectError):
                client.get("/health")


def ready_on(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get("/ready").status_code == 200
    return False


def test_engines_that_cannot_start_any_more_end_the_server(tmp_path):
    """The model is damaged while it is served: the server ends with the reason."""
    import weft

    model = tmp_path / "model"
    model.mkdir()
    for file in (Path(weft.__file__).parent / "builtin").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    named = ("--model", str(model), "--served-model-name", "builtin")
    with serving(tmp_path, *named, **MODELLED) as server:
        (stream,) = start(server, 1, 1900)
        eventually(lambda: bool(stream.tokens), START_S)
        (model / "config.json").unlink()
        engine(server).kill()
        assert stream.outcome()[3] == "shutting_down"
        assert server.process.wait(60) == 1
        assert "config.json" in server.errors.read_text().splitlines()[-1]
