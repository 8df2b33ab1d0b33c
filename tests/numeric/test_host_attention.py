"""Attention by a host worker: the bits of direct calls, whatever happens to the worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hosted import WAIT_S, Hosted, Shape, assert_same, attend, cross

from weft.core.errors import ConfigError, HostWorkerError, InvariantError
from weft.kernels.arrays import Array, to_torch
from weft.kernels.cpu import attention
from weft.kernels.cpu.host import HostLayer, HostMailbox, HostWorker, SharedMemory
from weft.kernels.cpu.host_process import HostProcess
from weft.kernels.interface import AttentionMetadata

SMALL = Shape(rows=3, longest=40, tokens=1)
SHAPES = {
    "float32": Shape(),
    "bfloat16": Shape(dtype="bfloat16", cache_dtype="bfloat16", softcap=20.0),
    "float16-of-float32": Shape(dtype="float16", cache_dtype="float32", heads=2),
    "int8": Shape(dtype="bfloat16", cache_dtype="int8", heads=8, kv_heads=1, block_size=7),
    "fp8": Shape(cache_dtype="float8_e4m3fn", head_dim=40, softcap=5.0, block_size=32),
}


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.001)


def wait_for_all(mailbox: HostMailbox) -> None:
    """Wait until each job has a result or has failed."""
    until(lambda: not {"submitted", "running"} & set(mailbox.states()))


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_give_the_bits_of_direct_calls(shape: Shape, threads: int) -> None:
    hosted = Hosted(shape)
    mailbox = hosted.mailbox(slots=9)
    with HostWorker(mailbox, threads=threads):
        assert_same(hosted, mailbox)


def test_a_process_gives_the_bits_of_direct_calls(shape: Shape) -> None:
    hosted = Hosted(shape)
    mailbox = hosted.mailbox()
    with HostProcess(mailbox, hosted.kv, threads=2) as process:
        assert_same(hosted, mailbox)
        assert process.restarts == 0


def test_a_process_computes_with_the_instruction_set_of_its_parent() -> None:
    before = attention.isa()
    hosted = Hosted(SHAPES["bfloat16"])
    try:
        attention.use_isa("baseline")
        mailbox = hosted.mailbox()
        with HostProcess(mailbox, hosted.kv):
            assert_same(hosted, mailbox)
    finally:
        attention.use_isa(before)


def test_a_worker_has_a_pool_of_its_own() -> None:
    """Else the engine and the worker would hold up each other."""
    hosted = Hosted(SMALL)
    before = attention.threads()
    with HostWorker(hosted.mailbox(), threads=before + 3, cpus=[0] * (before + 3)):
        assert attention.threads() == before


def test_rows_may_be_views_into_a_fused_tensor() -> None:
    hosted = Hosted(replace(SMALL, dtype="bfloat16"))
    expected, _ = hosted.expected()
    mailbox, rows = hosted.mailbox(), [0, 1, 2]
    parts = [to_torch(x) for x in hosted.inputs(0, 0)]
    fused = torch.cat([part.flatten(1) for part in parts], dim=1)
    q, k, v = (part.unflatten(1, (-1, 32)) for part in fused.split([6 * 32, 64, 64], dim=1))
    out = torch.zeros(3, 40, 32, dtype=torch.bfloat16)[:, ::6][:, :6]
    with HostWorker(mailbox):
        tables = [torch.from_numpy(table) for table in hosted.tables]
        mailbox.begin(rows, hosted.contexts, tables)
        mailbox.submit(rows, 0, q, k, v)
        wait_for_all(mailbox)
        assert mailbox.take(rows, 0, out) is out
    assert torch.equal(out, to_torch(expected[0, 0]))


def test_layers_may_have_heads_and_blocks_of_their_own() -> None:
    numbers = np.random.default_rng(3)

    def random(*shape: int) -> Array:
        return numbers.standard_normal(shape, np.float32)

    layers = [
        HostLayer(random(5, 2, 16, 32), random(5, 2, 16, 32), heads=4, scale=0.1),
        HostLayer(random(9, 1, 8, 64), random(9, 1, 8, 64), heads=3, scale=0.2, group=1),
        HostLayer(random(5, 4, 16, 8), random(5, 4, 16, 8), heads=12, scale=0.3),
    ]
    tables = [np.array([[3, 0, 4]], np.int32), np.array([[8, 1, 6, 2, 7]], np.int32)]
    mailbox = HostMailbox.create(layers, slots=3, table_width=5, dtype="float32")
    mailbox.begin([2], [37], tables)
    with HostWorker(mailbox):
        for i, layer in enumerate(layers):
            size, table = layer.k_cache.shape[2], tables[layer.group]
            place = np.array([table[0, 36 // size] * size + 36 % size], np.int64)
            bounds, lengths = np.array([0, 1], np.int32), np.array([37], np.int32)
            q = random(1, layer.heads, layer.head_dim)
            k, v = (random(1, layer.kv_heads, layer.head_dim) for _ in range(2))
            own = replace(layer, k_cache=layer.k_cache.copy(), v_cache=layer.v_cache.copy())
            batch = AttentionMetadata(table, bounds, lengths, place, size)
            expected = attend(own, q, k, v, batch)
            mailbox.submit([2], i, q, k, v)
            assert mailbox.wait(WAIT_S)
            np.testing.assert_array_equal(mailbox.take([2], i), expected)
            np.testing.assert_array_equal(layer.k_cache, own.k_cache)


def test_jobs_that_were_waiting_are_computed_in_one_call() -> None:
    hosted = Hosted(Shape())
    mailbox, rows = hosted.mailbox(), list(range(12))
    hosted.begin(mailbox, rows, rows, 0)
    hosted.submit(mailbox, rows[:7], rows[:7], 0, 0)
    hosted.submit(mailbox, rows[7:], rows[7:], 0, 0)
    assert mailbox.waiting == 12
    with HostWorker(mailbox):
        until(lambda: mailbox.done_counts()[0] == 12)
    counted = mailbox.counters()
    assert (counted.submitted, counted.jobs, counted.calls, counted.failed) == (12, 12, 1, 0)
    assert counted.busy_ns > 0
    assert counted.longest_round_trip_ns * 12 >= counted.round_trip_ns > counted.busy_ns


def test_the_layer_of_the_oldest_job_comes_first() -> None:
    hosted = Hosted(Shape(rows=5, tokens=1))
    mailbox = hosted.mailbox()
    hosted.begin(mailbox, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], 0)
    hosted.submit(mailbox, [4], [4], 0, 1)
    hosted.submit(mailbox, [2, 1, 0], [2, 1, 0], 0, 0)
    hosted.submit(mailbox, [3], [3], 0, 1)
    with HostWorker(mailbox):
        until(lambda: mailbox.waiting == 0 and mailbox.counters().calls == 2)
    assert mailbox.done(1, 9).tolist() == [4, 3]
    assert mailbox.done(0, 2).tolist() == [2, 1], "in the order of their submission"
    assert mailbox.done_counts().tolist() == [3, 2, 0]


def test_a_process_may_be_killed_at_any_time() -> None:
    """Its jobs are computed again by the next one, to the same bits."""
    hosted = Hosted(Shape(rows=10, tokens=3))
    mailbox = hosted.mailbox()
    with HostProcess(mailbox, hosted.kv) as process:
        killed = []

        def kill(results: int) -> None:
            pid = mailbox.native.worker
            if results >= 15 * (len(killed) + 1) and pid == process.pid and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

        assert_same(hosted, mailbox, disturb=kill)
        until(lambda: process.restarts == len(killed))
        assert len(killed) >= 3
        assert process.error is None


def test_results_outlive_the_worker_and_the_jobs_go_to_the_next_one() -> None:
    hosted = Hosted(SMALL)
    expected, _ = hosted.expected()
    mailbox = hosted.mailbox()
    hosted.begin(mailbox, [0, 1], [0, 1], 0)
    with HostWorker(mailbox):
        hosted.submit(mailbox, [1], [1], 0, 0)
        assert mailbox.wait(WAIT_S)
    hosted.submit(mailbox, [0], [0], 0, 0)
    np.testing.assert_array_equal(mailbox.take([1], 0)[0], expected[0, 0][1])
    assert mailbox.states()[:2] == ["submitted", "taken"]
    with HostProcess(mailbox, hosted.kv):
        assert mailbox.wait(WAIT_S)
    np.testing.assert_array_equal(mailbox.take([0], 0)[0], expected[0, 0][0])


def test_who_waits_for_some_rows_does_not_wait_for_others() -> None:
    hosted = Hosted(Shape(rows=4, tokens=1))
    expected, _ = hosted.expected()
    mailbox = hosted.mailbox()
    hosted.begin(mailbox, [0, 1, 2], [0, 1, 2], 0)
    hosted.submit(mailbox, [0, 1], [0, 1], 0, 0)
    assert not mailbox.wait_for([0, 1], 0.01)
    with HostWorker(mailbox):
        assert mailbox.wait_for([0, 1], WAIT_S)
    np.testing.assert_array_equal(mailbox.take([0, 1], 0), expected[0, 0][:2])
    hosted.submit(mailbox, [2], [2], 0, 0)
    assert mailbox.wait_for([0, 1], 0), "nothing of theirs is to be computed"
    assert not mailbox.wait_for([0, 2], 0)
    with pytest.raises(InvariantError, match="slot 4 does not exist"):
        mailbox.wait_for([4], 0)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_process_holds_nobody_up() -> None:
    hosted = Hosted(Shape(rows=4, tokens=1))
    expected, _ = hosted.expected()
    mailbox = hosted.mailbox()
    with HostProcess(mailbox, hosted.kv) as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: process_state(process.pid) == "T")
        hosted.begin(mailbox, [0, 1, 2], [0, 1, 2], 0)
        hosted.submit(mailbox, [0, 1, 2], [0, 1, 2], 0, 0)
        assert mailbox.done(0, 9).tolist() == []
        assert not mailbox.wait(0.01)
        assert mailbox.abort([0, 2]) == [], "nobody has begun these"
        assert mailbox.states() == ["empty", "submitted", "empty", "empty"]
        hosted.begin(mailbox, [2], [3], 0)
        hosted.submit(mailbox, [2], [3], 0, 0)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: mailbox.done_counts()[0] == 2)
        np.testing.assert_array_equal(mailbox.take([1, 2], 0), expected[0, 0][[1, 3]])


def test_an_aborted_job_that_is_being_computed_frees_its_slot_later() -> None:
    """The worker may write to its blocks till then: if it is stopped, until it is killed."""
    hosted = Hosted(Shape(rows=2, longest=60_000, tokens=1, head_dim=128), filled=False)
    hosted.contexts[:] = 59_999
    mailbox = hosted.mailbox()
    with HostProcess(mailbox, hosted.kv) as process:
        stopped_within = False
        while not stopped_within:
            hosted.begin(mailbox, [0, 1], [0, 1], 0)
            hosted.submit(mailbox, [0, 1], [0, 1], 0, 0)
            until(lambda: "submitted" not in mailbox.states())
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: process_state(process.pid) == "T")
            stopped_within = mailbox.states() == ["running"] * 2
            if not stopped_within:  # it was done sooner
                os.kill(process.pid, signal.SIGCONT)
                until(lambda: set(mailbox.states()) == {"done"})
                mailbox.abort([0, 1])
        assert mailbox.abort([0]) == [0]
        assert mailbox.abort([0]) == [0], "still"
        assert mailbox.states() == ["aborting", "running"]
        with pytest.raises(InvariantError, match="slot 0 is aborting"):
            hosted.begin(mailbox, [0], [0], 0)
        process.restart()
        until(lambda: mailbox.states() == ["empty", "done"])
        assert process.restarts == 1


def test_a_worker_ends_an_aborted_job_by_itself() -> None:
    hosted = Hosted(SMALL)
    mailbox = hosted.mailbox()
    with HostWorker(mailbox):
        for _ in range(200):
            hosted.begin(mailbox, [0, 1], [0, 1], 0)
            hosted.submit(mailbox, [0, 1], [0, 1], 0, 0)
            mailbox.abort([1, 0])
            until(lambda: set(mailbox.states()) == {"empty"})
    assert mailbox.counters().aborted == 400


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.__setitem__((0, 0), 10**6), "a block does not exist"),
        (lambda t: t.__setitem__((0, 1), -1), "a block does not exist"),
    ],
)
def test_a_wrong_table_fails_its_row_alone(change: Callable[[object], None], why: str) -> None:
    hosted = Hosted(SMALL)
    hosted.contexts[:] = 39
    expected, _ = hosted.expected()
    mailbox = hosted.mailbox()
    right = hosted.tables[0].copy()
    change(hosted.tables[0])
    with HostWorker(mailbox):
        hosted.begin(mailbox, [0, 1], [0, 1], 0)
        hosted.submit(mailbox, [0, 1], [0, 1], 0, 0)
        wait_for_all(mailbox)
        assert mailbox.failed() == {0: why}
        np.testing.assert_array_equal(mailbox.take([1], 0)[0], expected[0, 0][1])
        mailbox.release([0])
        hosted.tables[0][:] = right
        hosted.begin(mailbox, [0], [0], 0)
        hosted.submit(mailbox, [0], [0], 0, 0)
        until(lambda: mailbox.states()[0] == "done")
    assert mailbox.counters().failed == 1


def test_a_context_longer_than_its_table_fails() -> None:
    hosted = Hosted(SMALL)
    mailbox = hosted.mailbox()
    short = [table[[0]][:, :1] for table in hosted.tables]
    mailbox.begin([0], [17], short)
    hosted.submit(mailbox, [0], [0], 0, 0)
    with HostWorker(mailbox):
        assert mailbox.wait(WAIT_S)
    assert mailbox.failed() == {0: "the context is longer than the block table"}


def test_a_mailbox_full_of_noise_crashes_nobody() -> None:
    """Whatever stands in the words, the records and the tables."""
    hosted = Hosted(SMALL)
    noise = np.random.default_rng(1)
    for _ in range(40):
        mailbox = hosted.mailbox()
        rows = [0, 1, 2]
        hosted.begin(mailbox, rows, rows, 0)
        hosted.submit(mailbox, rows, rows, 0, 0)
        memory = mailbox.memory.array(0, [len(mailbox.memory)], "uint8")
        spots = noise.integers(4096, 4 * 4096, 300)
        memory[spots] = noise.integers(0, 256, 300)
        words = mailbox.memory.array(4096, [3], "int64")
        words[:] = noise.integers(0, 5, 3) << 8 | 1
        records = mailbox.memory.array(2 * 4096, [3, 16], "uint16")
        records[:, 15] = 0  # their place: jobs of others would wait for these
        with HostWorker(mailbox):
            wait_for_all(mailbox)


def test_misuse_is_refused_and_changes_nothing() -> None:
    hosted = Hosted(SMALL)
    mailbox, tables = hosted.mailbox(), hosted.tables
    hosted.begin(mailbox, [0], [0], 0)
    q, k, v = (x[:1] for x in hosted.inputs(0, 0))
    misuses: dict[str, Callable[[], object]] = {
        r"q of shape|q \[1, 6, 32\] must be \[2": lambda: mailbox.submit([0, 1], 0, q, k, v),
        "slot 3 does not exist": lambda: mailbox.submit([3], 0, q, k, v),
        "slot -1 does not exist": lambda: mailbox.submit([-1], 0, q, k, v),
        "slot 0 occurs twice": lambda: hosted.submit(mailbox, [0, 0], [0, 1], 0, 0),
        "slot 1 has no token": lambda: mailbox.submit([1], 0, q, k, v),
        "no layer 3": lambda: mailbox.submit([0], 3, q, k, v),
        "no layer -1": lambda: mailbox.done(-1, 1),
        "layer 0 needs k and v": lambda: mailbox.submit([0], 0, q),
        "layer 2 has no k and v": lambda: mailbox.submit([0], 2, q, k, v),
        "q .* must have the type of the mailbox": lambda: mailbox.submit(
            [0], 2, q.astype(np.float16)
        ),
        r"k is \[1, 6, 32\] and not \[rows, 2, 32\]": lambda: mailbox.submit([0], 0, q, q, v),
        "slot 0 is empty and cannot be taken": lambda: mailbox.take([0], 0),
        "slot 0 is empty and cannot be released": lambda: mailbox.release([0]),
        "slot 0 is empty and cannot be put back": lambda: mailbox.put_back([0]),
        "1 token at least, not 0": lambda: begin(0, tables),
        "each group needs its block tables": lambda: begin(1, []),
        "no more than 3 blocks": lambda: begin(1, [np.zeros((1, 9), np.int32)] * 2),
        "must be int32": lambda: begin(1, [np.zeros((1, 1), np.int64)] * 2),
        "each slot needs a context": lambda: mailbox.begin([1], [], tables),
    }

    def begin(context: int, tables: list[object]) -> None:
        mailbox.begin([1], [context], [table[:1] for table in tables])  # type: ignore[index]

    for why, call in misuses.items():
        with pytest.raises(InvariantError, match=why):
            call()
    assert mailbox.states() == ["empty"] * 3
    assert mailbox.counters().submitted == 0


def test_a_mailbox_has_one_worker(capfd: pytest.CaptureFixture[str]) -> None:
    hosted = Hosted(SMALL)
    mailbox = hosted.mailbox()
    with HostWorker(mailbox):
        with pytest.raises(HostWorkerError, match=f"process {os.getpid()} serves the mailbox"):
            HostWorker(mailbox)
        with pytest.raises(HostWorkerError, match="cannot be started: it ended by exit code 1"):
            HostProcess(mailbox, hosted.kv)
        assert f"cannot be started: process {os.getpid()} serves" in capfd.readouterr().err
        assert mailbox.native.worker == os.getpid(), "the end of the other one is no end of this"
        assert_same(hosted, mailbox)
    with HostWorker(mailbox):
        pass


def test_jobs_that_end_every_process_are_not_tried_for_ever(monkeypatch, caplog) -> None:
    """Whoever waits for their results hears of it."""
    hosted = Hosted(SMALL)
    mailbox = hosted.mailbox()
    with HostProcess(mailbox, hosted.kv) as process:
        monkeypatch.setattr(HostProcess, "_start", lambda _: subprocess.Popen(["/bin/false"]))
        hosted.begin(mailbox, [0, 1], [0, 1], 0)
        os.kill(process.pid, signal.SIGSTOP)
        hosted.submit(mailbox, [0, 1], [0, 1], 0, 0)
        process.restart()
        until(lambda: process.error is not None)
        assert process.error.message == (
            "The host worker ended 6 times in a row without a result, at last by exit code 1."
        )
        assert process.restarts == 5
    assert caplog.text.count("The host worker ended by") == 5


def test_idle_processes_may_end_as_often_as_they_like(monkeypatch) -> None:
    hosted = Hosted(SMALL)
    mailbox = hosted.mailbox()
    monkeypatch.setattr("weft.core.process.FIRST_DELAY_S", 0.001)
    with HostProcess(mailbox, hosted.kv) as process:
        for count in range(8):
            until(lambda count=count: process.restarts == count)
            until(lambda: mailbox.native.worker == process.pid)
            process.restart()
        until(lambda: mailbox.native.worker == process.pid)
        assert process.error is None
        assert_same(hosted, mailbox)


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"threads": 2, "cpus": [0]}, {"cpus": [-1]}, {"cpus": [99_999]}],
)
def test_a_worker_without_threads_or_processors_is_refused(options: dict[str, object]) -> None:
    mailbox = Hosted(SMALL).mailbox()
    with pytest.raises(HostWorkerError, match="cannot be started"):
        HostWorker(mailbox, **options)  # type: ignore[arg-type]
    assert mailbox.native.worker == 0


def test_impossible_mailboxes_are_refused() -> None:
    layers = Hosted(SMALL).layers
    for sizes in ({"slots": 0}, {"slots": 70_000}, {"table_width": -1}, {"table_width": 2**30}):
        with pytest.raises(ConfigError, match="no such host mailbox"):
            HostMailbox.create(
                layers, **{"slots": 4, "table_width": 4, "dtype": "float32", **sizes}
            )
    with pytest.raises(ConfigError, match="no such host mailbox"):
        HostMailbox.create([], slots=4, table_width=4, dtype="float32")
    with pytest.raises(InvariantError, match="does not hold a mailbox"):
        HostMailbox(SharedMemory.create("empty", 4096), layers, 1)
    mailbox = Hosted(SMALL).mailbox()
    mailbox.memory.array(16, [1], "int32")[:] = 99
    with pytest.raises(InvariantError, match="version 99, this process speaks version"):
        HostMailbox(mailbox.memory, layers, 1)


def test_shared_memory_has_bounds() -> None:
    memory = SharedMemory.create("small", 64)
    assert memory.array(32, [4, 2], "float32").sum() == 0
    for offset, shape in ((36, [8]), (-4, [2]), (0, [2**62])):
        with pytest.raises(ConfigError, match="are not in 64 bytes"):
            memory.array(offset, shape, "float32")
    for size_bytes in (0, -1, 2**80):
        with pytest.raises(ConfigError, match="memory"):
            SharedMemory.create("impossible", size_bytes)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 32)


def test_impossible_layers_are_refused() -> None:
    hosted = Hosted(SMALL)
    for change in ({"window": 0}, {"softcap": 0.0}, {"softcap": float("nan")}):
        with pytest.raises(ConfigError, match="A layer cannot have a"):
            replace(hosted.layers[0], **change)
    hosted.layers[1] = replace(hosted.layers[1], heads=5)
    with pytest.raises(HostWorkerError, match="heads must be a multiple of kv_heads"):
        HostWorker(hosted.mailbox())
    with pytest.raises(HostWorkerError, match="cannot be started: it ended by exit code 1"):
        HostProcess(hosted.mailbox(), hosted.kv)


def test_caches_outside_the_shared_memory_are_refused() -> None:
    hosted = Hosted(SMALL)
    elsewhere: list[HostLayer] = [
        replace(layer, k_cache=layer.k_cache.copy()) for layer in hosted.layers
    ]
    mailbox = HostMailbox.create(elsewhere, slots=2, table_width=4, dtype="float32")
    with pytest.raises(ConfigError, match="does not lie in its shared memory"):
        HostProcess(mailbox, hosted.kv)


def test_an_idle_worker_sleeps() -> None:
    hosted = Hosted(SMALL)
    mailbox = hosted.mailbox()
    with HostProcess(mailbox, hosted.kv, threads=2) as process:
        cross(hosted, mailbox)
        folder = Path(f"/proc/{process.pid}/task")
        until(lambda: all(process_state(int(task.name)) == "S" for task in folder.iterdir()))


def test_a_process_ends_with_its_parent() -> None:
    """Also when the parent was killed."""
    script = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from hosted import Hosted, Shape\n"
        "from weft.kernels.cpu.host_process import HostProcess\n"
        "hosted = Hosted(Shape(rows=2, tokens=1))\n"
        "process = HostProcess(hosted.mailbox(), hosted.kv)\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}/comm").read_text() == "weft-host\n"
    parent.kill()
    parent.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or process_state(pid) == "Z")
