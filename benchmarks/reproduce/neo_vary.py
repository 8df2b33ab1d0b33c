"""NEO on an A10G: at which output lengths, hosts and memories the paper's gain of 1.79 appears.

    python benchmarks/reproduce/neo_vary.py [--out FOLDER] [--quick]

The cell of figure 10a on g5.16xlarge (Llama-3.1-8B, 1000 tokens in, all requests at once) with
longer answers, a host that is faster in everything, and less memory for KV on the device: the
paper says neither how much of it SwiftLLM uses there nor what its kernels reach of the host's
bandwidth. About ten minutes of one core.
"""

from __future__ import annotations

from dataclasses import replace

from neo import A10G, AT_ONCE, Cell, run
from reproduction import Reproduction

PAPER = 1.793  # section 5.5, figure 10a
REQUESTS = 100
OUTPUTS = (400, 800)
MEMORIES = (1.0, 0.75, 0.5, 0.25)
HOSTS = (1.0, 2.0)


def main() -> None:
    made = Reproduction.start("neo/vary", __doc__.splitlines()[0])
    outputs = OUTPUTS[:1] if made.quick else OUTPUTS
    rows: list[list[object]] = []
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for memory in MEMORIES:
        for asked in outputs:
            base = Cell(
                A10G[3], "fcfs", REQUESTS, AT_ONCE, "1000+-10%", f"{asked}+-10%", device_kv=memory
            )
            alone = run(base)
            for speed in HOSTS:
                found = run(replace(base, scheduler="load-aware", host=speed))
                gain = found["requests_per_s"] / alone["requests_per_s"]
                shares = (found[name] for name in ("host_share", "two_batches", "cpu_busy"))
                rows.append([memory, asked, speed, gain, *shares, alone["preemptions"]])
                label = f"{memory:g} of the KV memory, host x {speed:g}"
                xs, ys = curves.setdefault(label, ([], []))
                xs.append(asked)
                ys.append(gain)
                print(*rows[-1], flush=True)
    header = ("KV memory", "output", "speed of the host", "relative", "decoded on host",
              "steps in two", "CPU busy", "FCFS's preemptions")  # fmt: skip
    made.table("Relative throughput on g5.16xlarge under other conditions", header, rows)
    best = max(float(str(row[3])) for row in rows)
    made.compare("A10G + Llama-3.1-8B, g5.16xlarge: highest of all", PAPER, best, "x", "fig. 10a")
    made.curves(
        "a10g", "A10G + Llama-3.1-8B, g5.16xlarge, 1000 tokens in", "output tokens",
        "throughput over FCFS", curves,
    )  # fmt: skip
    made.finish(requests=REQUESTS)


if __name__ == "__main__":
    main()
