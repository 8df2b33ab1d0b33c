"""The Python API with its engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys

import psutil
import pytest

from live import START_S, command_of, eventually
from weft import LLM, SamplingParams
from weft.core.errors import (
    ConfigError,
    EngineDeadError,
    EngineOutOfMemoryError,
    ModelNotFoundError,
)
from weft.core.memory import MemoryKills
from weft.core.plan import Update
from weft.core.types import FinishReason, Request
from weft.engine.links import EngineLinks
from weft.engine.remote import EngineProcess
from weft.ring.client import RingClient
from weft.ring.segment import create_ring

SMALL = {"threads": 1, "kv_memory": "32MiB", "max_num_seqs": 8}
LONG = SamplingParams(temperature=1.0, max_tokens=1900, ignore_eos=True, seed=1)


def engines() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if command_of(child)[:1] == ["weft-engine"]]


def test_results_equal_those_of_an_engine_in_this_process():
    prompts = ["def add(a, b):", [9, 8, 7], "import os\n"]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, logprobs=2, prompt_logprobs=1)
    with LLM.in_process(**SMALL) as near:
        expected = near.generate(prompts, params, progress=False)
    with LLM(**SMALL) as far:
        results = far.generate(prompts, params, progress=False)
    assert results == expected


def test_the_calling_process_loads_no_torch():
    code = (
        "import sys; from weft import LLM; llm = LLM(threads=1, kv_memory='32MiB');"
        "llm.generate('x', progress=False); llm.close(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.usefixtures("modelled_engines")
def test_more_prompts_than_slots_wait_for_their_turn():
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with LLM(**SMALL, ring_slots=8) as llm:
        results = llm.generate([[1 + i] for i in range(100)], params, progress=False)
        assert [result.prompt_token_ids for result in results] == [(1 + i,) for i in range(100)]
        assert all(len(result.token_ids) == 3 and result.error is None for result in results)
    with pytest.raises(ConfigError, match="ring_slots 4 is less than max_num_seqs 8"):
        LLM(**SMALL, ring_slots=4)


def test_a_ring_without_room_for_the_longest_prompt_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="ring_memory 65536 cannot take a prompt"):
        LLM(**SMALL, ring_memory="64KiB")


@pytest.mark.usefixtures("modelled_engines")
@pytest.mark.parametrize("kind", [EngineDeadError, EngineOutOfMemoryError])
def test_an_engine_that_is_killed_ends_what_is_running_with_an_error(monkeypatch, kind):
    monkeypatch.setattr(MemoryKills, "recent", lambda _: kind is EngineOutOfMemoryError)
    llm = LLM(**SMALL)
    stream = llm.stream("x", LONG)
    next(stream)
    (engine,) = engines()
    engine.kill()
    last = None
    for delta in stream:
        last = delta
    assert last.result.finish_reason == "error"
    assert type(last.result.error) is kind
    with pytest.raises(kind):
        llm.generate("x", progress=False)
    llm.close()


@pytest.mark.usefixtures("modelled_engines")
def test_two_models_at_once_and_nothing_is_left():
    with LLM(**SMALL) as one, LLM(**SMALL) as two:
        params = SamplingParams(temperature=0, max_tokens=8)
        assert one.generate("x", params, progress=False) == two.generate(
            "x", params, progress=False
        )
        assert len(engines()) == 2
    assert not engines()


@pytest.mark.usefixtures("modelled_engines")
def test_descriptors_are_given_back():
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with LLM(**SMALL):
        pass
    before = count()
    for _ in range(3):
        with LLM(**SMALL) as llm:
            llm.generate("x", SamplingParams(max_tokens=2), progress=False)
    assert count() == before


def test_streams_on_an_event_loop():
    async def length(llm: LLM, number: int) -> int:
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=10 + number)
        params = SamplingParams(**{**as_dict(params), "ignore_eos": True})
        return sum([len(delta.token_ids) async for delta in llm.stream_async("x", params)])

    async def all_of_them(llm: LLM) -> list[int]:
        return await asyncio.gather(*(length(llm, number) for number in range(12)))

    with LLM(**SMALL) as llm:
        assert asyncio.run(all_of_them(llm)) == [10 + number for number in range(12)]
        assert asyncio.run(all_of_them(llm)) == [10 + number for number in range(12)]


def as_dict(params: SamplingParams) -> dict:
    return {"temperature": params.temperature, "seed": params.seed, "max_tokens": params.max_tokens}


@pytest.mark.usefixtures("modelled_engines")
def test_a_fork_says_that_the_model_is_not_its_own():
    with LLM(**SMALL) as llm:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                llm.generate("x", progress=False)
            except EngineDeadError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        params = SamplingParams(max_tokens=2)
        assert llm.generate("x", params, progress=False)[0].finish_reason in ("length", "stop")


@pytest.mark.usefixtures("modelled_engines")
def test_a_forked_child_that_exits_leaves_the_engine_alone():
    with LLM(**SMALL) as llm:
        pid = os.fork()
        if pid == 0:
            del llm
            gc.collect()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        code = "import os, sys\nfrom weft import LLM, SamplingParams\n"
        code += "llm = LLM(threads=1, kv_memory='32MiB')\n"
        code += "pid = os.fork()\nif pid == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)\n"
        code += "params = SamplingParams(max_tokens=3, ignore_eos=True)\n"
        code += "print(llm.generate('x', params)[0].finish_reason)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "length", done.stderr
        params = SamplingParams(max_tokens=2)
        assert llm.generate("x", params, progress=False)[0].error is None


@pytest.mark.usefixtures("modelled_engines")
@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "raise SystemExit(3)", "1/0"])
def test_the_engine_ends_with_its_program(end):
    code = (
        "import os; from weft import LLM; llm = LLM(threads=1, kv_memory='32MiB');"
        "print(llm.engine._process.process.pid, flush=True)\n" + end
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    wait_until_gone(int(done.stdout))


@pytest.mark.usefixtures("modelled_engines")
def test_the_engine_ends_when_its_program_is_killed():
    code = (
        "import time; from weft import LLM; llm = LLM(threads=1, kv_memory='32MiB');"
        "print(llm.engine._process.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        engine = int(user.stdout.readline())
        user.send_signal(signal.SIGKILL)
    wait_until_gone(engine)


@pytest.mark.usefixtures("modelled_engines")
def test_an_engine_belongs_to_the_program_and_not_to_the_thread_that_made_it():
    """It serves when that thread has ended, and ends with the program even if it is stopped."""
    code = (
        "import threading, time; from weft import LLM, SamplingParams; made = [];"
        "make = lambda: made.append(LLM(threads=1, kv_memory='32MiB'));"
        "maker = threading.Thread(target=make); maker.start(); maker.join();"
        "made[0].generate('x', SamplingParams(max_tokens=2), progress=False);"
        "print(made[0].engine._process.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        engine = int(user.stdout.readline())
        os.kill(engine, signal.SIGSTOP)
        user.send_signal(signal.SIGKILL)
    try:
        wait_until_gone(engine)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)


def wait_until_gone(pid: int) -> None:
    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(gone, START_S)


def test_an_engine_that_is_stopped_while_it_starts_does_not_build_the_model_first():
    ring = create_ring()
    engine = EngineProcess.start({"model": "builtin", **SMALL}, EngineLinks([ring]))
    assert engine.stop() == 0
    assert engine.report.read() == "", "it went on to report a model"
    engine.report.close()
    ring.close()


@pytest.mark.parametrize("told", [True, False], ids=["told", "orphaned"])
def test_an_engine_ends_what_is_open_if_it_is_told_to_stop_but_not_if_its_parent_dies(told):
    """A dead parent has closed its pipes by the time the kernel kills its children."""
    ring = create_ring()
    engine = EngineProcess.start({"model": "builtin", **SMALL}, EngineLinks([ring]))
    engine.wait_until_ready()
    client = RingClient(ring)
    updates: list[Update] = []
    client.submit([Request(1, (5, 6, 7), LONG.with_defaults({}))], updates.extend)
    eventually(lambda: client.poll() and len(updates) >= 3, START_S)
    if told:
        engine.stop()
    else:
        engine.orders.close()
        assert engine.process.wait(START_S) == 0
    client.poll()
    assert [update.finish for update in updates if update.finish] == [FinishReason.ERROR] * told
    assert client.in_flight == (not told)
    client.close()
    ring.close()


def test_what_is_wrong_at_the_start_is_a_typed_error():
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM("./nowhere")
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(max_model_length=3)
    with pytest.raises(ConfigError, match="2048"):
        LLM(max_model_len=4096)
    assert not engines()
