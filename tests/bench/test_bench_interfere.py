"""``weft bench interfere``: what it counts, with loops that compute nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from weft.bench.interfere import NEIGHBOURS, Recorder, bench_interfere, control_cpu, neighbours
from weft.bench.options import InterfereBench
from weft.bench.report import format_interfere
from weft.core.errors import ConfigError
from weft.core.plan import StepOutputs, Update
from weft.core.types import FinishReason

STEP_S = 0.001


class NoStamps:
    """A resident loop that publishes what it is told."""

    outlet = None

    def __init__(self):
        self.notes = []

    def take(self):
        notes, self.notes = self.notes, []
        return notes


class PacedLoop:
    """Gives each sequence a token at each step; those of every second step by the stamps."""

    vocab_size = 500

    def __init__(self, stamps, computes=False):
        self.stamps = stamps
        self.computes = computes
        self.cpus = []

    def run(self, inbox):
        self.cpus.append(os.sched_getaffinity(0))
        left = {}
        step = 0
        while True:
            requests, _ = inbox.receive()
            left |= {request.id: request.sampling.max_tokens for request in requests}
            if not left:
                return
            time.sleep(STEP_S)
            step += 1
            left = {number: count - 1 for number, count in left.items()}
            ended = [number for number, count in left.items() if not count]
            if step % 2 and not ended:
                self.stamps.notes.append((time.monotonic_ns(), list(left)))
                continue
            updates = [Update(number, 7, finish=FinishReason.LENGTH) for number in ended]
            left = {number: count for number, count in left.items() if count}
            inbox.publish(StepOutputs([(number, 7) for number in left], updates))


def test_each_token_counts_once_whoever_publishes_it():
    stamps = NoStamps()
    options = InterfereBench(sequences=3, requests=7, output_tokens=20, input_tokens=5)
    recorder = Recorder(stamps, 500, options, 1)
    PacedLoop(stamps).run(recorder)
    counts = [len(times) for times in recorder.tokens_ns.values()]
    assert counts == [6, 13, 20, 20, 20, 20, 20], "those of the start are shorter"
    for number, times in recorder.tokens_ns.items():
        assert times == sorted(times)
        assert times[0] > recorder.arrived_ns[number]


def test_loops_run_on_the_processor_of_their_neighbours_only():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one processor")
    with control_cpu() as cpu:
        assert os.sched_getaffinity(0) == before - {cpu}
        stamps = NoStamps()
        loops = {"planned": PacedLoop(stamps), "one thread": PacedLoop(stamps, computes=True)}
        options = InterfereBench(sequences=2, requests=4, output_tokens=8, repeats=2)
        result = bench_interfere(loops, stamps, "m", cpu, options)
    assert os.sched_getaffinity(0) == before
    for loop in loops.values():  # alone and with neighbours, once to warm up
        assert loop.cpus == [before - {cpu} if loop.computes else {cpu}] * 6
    for found in result["loops"].values():
        assert set(found) == {"alone", "with neighbours"}
        for figures in found.values():
            assert figures["itl_ms"]["p50"] >= 1000 * STEP_S * 0.9
            assert figures["tokens_per_s"] > 0
    text = format_interfere(result)
    assert "compress, compile, memory" in text
    assert "TPOT p99.9 ms" in text


def test_neighbours_end_with_the_block_and_with_this_process():
    cpu, before = max(os.sched_getaffinity(0)), set(psutil.Process().children())
    with neighbours(NEIGHBOURS, cpu):
        family = set(psutil.Process().children()) - before
        assert len(family) == len(NEIGHBOURS)
        assert all(child.cpu_affinity() == [cpu] for child in family)
        assert all(child.is_running() for child in family)
    assert not set(psutil.Process().children()) - before
    code = (
        "import psutil\nfrom weft.bench.interfere import neighbours\n"
        f"with neighbours(['compress'], {cpu}):\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n    input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("wrong", [{"neighbours": ("sleep",)}, {"sequences": 0}, {"repeats": 0}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        InterfereBench(**wrong)


def test_one_processor_is_too_few():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from weft.bench.interfere import control_cpu\n"
        "with control_cpu(): pass"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "This needs two processors" in done.stderr
