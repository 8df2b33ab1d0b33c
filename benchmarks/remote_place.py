"""Round trip of rows at a remote place beside the host worker's, and what a place costs the client.

    python benchmarks/remote_place.py [--out benchmarks/results/remote_place.json]

The place is a process on this machine, reached over loopback. Rows wait in one layer together; each
round has the host worker compute them and then the place, with a thread each; the ratio is the
median of the rounds. The client's part is what the thread that computes steps spends on such a
batch: submit, find and take. The rate is that at which KV arrives, with an HMAC on each frame.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import report
from host_attention import BLOCK, HEAD_DIM, HEADS, KV_HEADS, Batch, timed_s
from weft.attend.frames import CHUNK_BYTES, KVBlocks
from weft.attend.geometry import Geometry, GroupGeometry, LayerGeometry
from weft.attend.link import PlaceAccess, PlaceLink
from weft.kernels.cpu import attention
from weft.kernels.cpu.host import HostMailbox, HostWorker

CASES = [(1, 1024), (16, 256), (16, 2048), (64, 512)]  # rows, context


@contextmanager
def place() -> Iterator[str]:
    """The address of a place that attends with one thread."""
    with tempfile.TemporaryFile("w+") as log:
        words = ["--listen", "127.0.0.1:0", "--threads", "1", "--kv-memory", "1GiB"]
        process = subprocess.Popen([sys.executable, "-m", "weft.cli", "attend", *words], stderr=log)
        try:
            while (found := re.search(r"attending at (\S+) with", _text(log))) is None:
                assert process.poll() is None, _text(log)
                time.sleep(0.02)
            yield found[1]
        finally:
            process.kill()
            process.wait()


def _text(log) -> str:  # type: ignore[no-untyped-def]
    log.seek(0)
    return str(log.read())


class Remote:
    """The rows of a batch, with their KV at a place."""

    def __init__(self, case: Batch, address: str) -> None:
        self.case, keys = case, case.layer.k_cache
        size = keys.nbytes // len(keys)
        geometry = Geometry(
            f"{time.monotonic_ns()}", attention.isa(), "bfloat16", "bfloat16", BLOCK,
            len(case.slots), case.batch.block_tables.shape[1], 30.0,
            (GroupGeometry(1, KV_HEADS, HEAD_DIM, len(keys), size),),
            (LayerGeometry(0, 0, HEADS, case.layer.scale, None, None, True),),
        )  # fmt: skip
        self.mailbox = HostMailbox.create(
            [case.layer], slots=len(case.slots), table_width=geometry.table_width, dtype="bfloat16"
        )
        self.link = PlaceLink(PlaceAccess(address, b"", 30.0), 1, geometry, self.mailbox)
        self.link.start()
        while not self.link.status().blocks:
            time.sleep(0.01)
        self.session = self.link.status().session
        self.link.activate(self.session)
        tables, lengths = case.batch.block_tables, case.batch.seq_lens
        places = np.ones(len(case.slots), np.int32)
        self.mailbox.begin(case.slots, lengths, [tables], places)

    def send_kv(self) -> float:
        """Bytes a second at which all KV of the rows arrives."""
        sent, before = 0, time.perf_counter()
        for number, cache in enumerate((self.case.layer.k_cache, self.case.layer.v_cache)):
            rows = cache.view(np.uint8).reshape(len(cache), -1)
            step = max(1, CHUNK_BYTES // rows.shape[1])
            for first in range(0, len(rows), step):
                blocks = np.arange(first, min(first + step, len(rows)), dtype=np.int32)
                content = KVBlocks(0, number, blocks, rows[blocks])
                while not self.link.write(self.session, [content]):
                    time.sleep(0.001)
                sent += content.content.nbytes
        self.cross()  # jobs come after all KV
        return sent / (time.perf_counter() - before)

    def cross(self) -> float:
        """Have the place compute all rows; seconds of the client's own part."""
        case = self.case
        own = timed_s(lambda: self.mailbox.submit(case.slots, 0, case.q, case.k, case.v))
        while self.mailbox.done_counts()[0] < len(case.slots):
            self.mailbox.wait(1.0)
        return own + timed_s(
            lambda: self.mailbox.take(self.mailbox.done(0, len(case.slots)), 0, out=case.out)
        )


def compare(case: Batch, address: str, rounds: int) -> dict[str, float]:
    """Medians over the rounds of one case."""
    remote = Remote(case, address)
    try:
        rate = remote.send_kv()
        local, far, own, ratios = [], [], [], []
        with HostWorker(case.mailbox):
            case.cross()
            expected = case.out.copy()
            for _ in range(rounds):
                local.append(timed_s(case.cross))
                far.append(timed_s(lambda: own.append(remote.cross())))
                ratios.append(far[-1] / local[-1])
        assert (case.out.view(np.uint16) == expected.view(np.uint16)).all()
        return {
            "worker_us": 1e6 * statistics.median(local),
            "place_us": 1e6 * statistics.median(far),
            "ratio": statistics.median(ratios),
            "client_us": 1e6 * statistics.median(own),
            "kv_mb_s": rate / 1e6,
        }
    finally:
        remote.link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    attention.set_threads(1)
    cases = []
    for rows, context in CASES:
        case = Batch(rows, context, HEADS, KV_HEADS, HEAD_DIM)
        with place() as address:
            found = compare(case, address, options.rounds)
        cases.append({"rows": rows, "context": context, **found})
        print(
            f"{rows:>3} rows of {context:>4}: worker {found['worker_us']:>6.0f} us, place "
            f"{found['place_us']:>6.0f} us, ratio {found['ratio']:.2f}, client "
            f"{found['client_us']:.0f} us; KV {found['kv_mb_s']:.0f} MB/s"
        )
    if options.out:
        report.save(options.out, cores=os.cpu_count(), cases=cases)


if __name__ == "__main__":
    main()
