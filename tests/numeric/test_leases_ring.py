"""Leases over a real ring: the loop publishes there what the host would, and nothing twice."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import FAMILY_CASES, build, prompt, save_with_tokenizer
from graphed import use_graphs
from tight_kv import GREEDY, settings_for

from weft.core.plan import Update
from weft.core.types import FinishReason, Request, TokenLogprob
from weft.engine.build import Engine, build_engine
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.ring import _native
from weft.ring.client import RingClient
from weft.ring.inbox import RingInbox
from weft.ring.layout import EngineInfo
from weft.ring.segment import RingFds, create_ring

LENGTH, SLOTS, PATIENCE_S = 400, 16, 60.0
# Beside plain requests; the tokens of the last kind come with the end of a lease, others meanwhile.
OTHERS = ({}, {}, {"frequency_penalty": 0.3}, {"bad_token_sequences": ((7,),)}, {"logprobs": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    model = build(FAMILY_CASES["llama"])
    return save_with_tokenizer(model, tmp_path_factory.mktemp("llama"))


class Answers:
    """A sink that keeps tokens and ends of requests."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[tuple[int, TokenLogprob | None]]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.changed = threading.Condition()

    def __call__(self, updates: list[Update]) -> None:
        with self.changed:
            for update in updates:
                if update.token is not None:
                    said = update.token, update.logprob
                    self.tokens.setdefault(update.sequence_id, []).append(said)
                if update.finish is not None:
                    self.ends[update.sequence_id] = update.finish
            self.changed.notify()


class Served:
    """An engine, its end of a ring, and a client at the other end."""

    def __init__(self, engine: Engine, fds: RingFds) -> None:
        self.engine, self.fds, self.answers = engine, fds, Answers()
        self.inbox = RingInbox([fds], spin_s=0)
        info = EngineInfo(ready=1, max_model_len=LENGTH, vocab_size=199, max_num_seqs=8)
        self.inbox.write_info(info)
        self.client = RingClient(fds)
        self.loop = EngineLoop(engine.scheduler, engine.executor, self.inbox, WallClock())


@contextmanager
def served(folder: Path, resident: str) -> Iterator[Served]:
    settings = {"resident": resident, "max_model_len": LENGTH, "kv_memory": 2**23}
    engine, fds = build_engine(settings_for(folder, **settings)), create_ring(SLOTS, 2**18)
    side = Served(engine, fds)
    yield side
    side.loop.drain()
    engine.scheduler.check()
    side.inbox.close()
    side.client.close()
    fds.close()
    engine.close()


def requests(seed: int) -> list[Request]:
    """Some end by a token, some by their length; many are longer than a lease."""
    draw = random.Random(seed)
    found = []
    for number in range(70):
        sampling = replace(
            GREEDY,
            max_tokens=draw.randint(1, 300),
            stop_token_ids=tuple(draw.sample(range(190), 6)),
            temperature=draw.choice((0.0, 0.9)),
            seed=number,
            **draw.choice(OTHERS),
        )
        found.append(Request(number, tuple(prompt(draw.randint(1, 60), number)), sampling))
    return found


def answer(folder: Path, resident: str, seed: int, *, cancels: bool) -> tuple[Answers, int]:
    """Send requests, a few at a time; the answers, and how many steps the loop computed."""
    with served(folder, resident) as side:
        draw, answers, client = random.Random(seed), side.answers, side.client
        client.run_in_thread()

        def feed() -> None:
            opened: set[int] = set()
            for request in requests(seed):
                with answers.changed:
                    most = draw.choice((1, 3, 6))
                    answers.changed.wait_for(lambda n=most: len(opened - set(answers.ends)) < n)
                client.submit([request], answers)
                opened.add(request.id)
                if draw.random() < 0.3:
                    time.sleep(draw.random() * 0.02)
                if cancels and draw.random() < 0.2:
                    client.cancel(draw.choice(sorted(opened)))
                if draw.random() < 0.1:
                    side.inbox.poke()
            with answers.changed:
                answers.changed.wait_for(lambda: len(answers.ends) == len(opened), PATIENCE_S)
            side.inbox.stop()

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        while not side.inbox.closed:
            if not side.loop.step():
                side.inbox.wait(0.2)
        thread.join()
        return answers, side.engine.scheduler.totals.resident_steps


@pytest.mark.parametrize(("seed", "on_device"), [(1, False), (2, False), (3, True)])
def test_streams_are_those_of_planned_steps(folder, seed, on_device, monkeypatch) -> None:
    """Ends by a token of one sequence while the next step, with others, is launched already.

    On a device, which replays steps under leases, beside the eager executor.
    """
    wanted, none = answer(folder, "off", seed, cancels=False)
    if on_device:
        use_graphs(monkeypatch)
    found, steps = answer(folder, "auto", seed, cancels=True)
    assert none == 0 < (200 if on_device else 500) < steps
    for number, end in found.ends.items():
        told, all_of_it = found.tokens.get(number, []), wanted.tokens[number]
        if end is FinishReason.CANCELLED:
            assert told == all_of_it[: len(told)]
        else:
            assert (told, end) == (all_of_it, wanted.ends[number])


def test_a_slot_with_corrupt_words_is_lost_alone(folder) -> None:
    def run(corrupt: bool) -> dict[int, list[int]]:
        with served(folder, "auto") as side:
            lend, lent = side.inbox.lend, []

            def broken(lease) -> None:
                if corrupt and not lent:
                    at = _native.offsets(SLOTS)["given"] + 16  # the state word of slot 1
                    with mmap.mmap(side.fds.memory, 0) as memory:
                        memory[at : at + 8] = b"\xff" * 8
                lent.append(lease)
                lend(lease)

            side.inbox.lend = broken
            sampling = replace(GREEDY, max_tokens=40, seed=1)
            both = [Request(n, tuple(prompt(9, n)), sampling) for n in range(2)]
            side.client.submit(both, side.answers)
            until = time.monotonic() + PATIENCE_S
            while len(side.answers.tokens.get(0, ())) < 40 and time.monotonic() < until:
                side.loop.step()
                side.client.poll()
            assert lent
            return side.answers.tokens

    whole, rest = run(corrupt=False), run(corrupt=True)
    assert rest[0] == whole[0]
    assert rest.get(1, []) == whole[1][: len(rest.get(1, []))]


def test_nothing_is_leased_while_requests_are_on_trial(folder, monkeypatch) -> None:
    """Each trial is over after a few tokens, and the others wait for it."""
    with served(folder, "auto") as side:
        monkeypatch.setattr(type(side.inbox._quarantine), "idle", False)
        request = Request(1, tuple(prompt(9)), replace(GREEDY, max_tokens=40, seed=1))
        side.client.submit([request], side.answers)
        while 1 not in side.answers.ends:
            side.loop.step()
            side.client.poll()
        assert side.engine.scheduler.totals.resident_steps == 0
