"""weft beside OpenVINO GenAI, vLLM and llama.cpp on the same machine, in turns.

    python benchmarks/peers/run.py [--cells a:A,b:A] [--peers openvino,llamacpp] [--pairs 5]
        [--envs FOLDER] [--threads 2] [--isa avx2] [--out FILE]

Installs each peer in an environment of its own below ``--envs`` (gigabytes, the first time half an
hour), makes checkpoints A and B (models.py), and runs the cells: scenario:model[:weights].

    a     one request of 128 + 128 tokens        b     16 requests of 128 + 128
    c     64 requests of 64 + 64                 d     4 requests of 2048 + 64
    e     16 requests of 4160 + 64 that have the first 4096 tokens in common
    f     one request of 16384 + 64
    http  b by 16 streaming clients, against b in process        load  until it can be asked

Greedy, random token ids, the end token ignored. Engines cache prefixes in e and f, nowhere else;
llama.cpp then runs as a server. In every round each engine runs once, in an order
that turns; a ratio is the median over the rounds of weft against the peer with the best median, so
that 1.2 is 20% better, whether much or little is good. Figures of cells that were not run are kept
in ``--out``. With ``--isa`` weft and llama.cpp have that instruction set alone, as on a machine
without a wider one; other peers fail then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import driving
from install import PEERS, SETS, InstallError, Prepared, Setup, make_models

SCENARIOS = {"a": (1, 128, 128), "b": (16, 128, 128), "c": (64, 64, 64), "d": (4, 2048, 64)}
SCENARIOS |= {"e": (16, 4160, 64), "f": (1, 16384, 64)}
SCENARIOS |= {"http": SCENARIOS["b"], "load": (1, 16, 2)}
SHARED = {"e": 4096}  # tokens that the prompts of a scenario begin with
CACHING = ("e", "f")
# metric -> whether more is better
METRICS = {
    "a": {"decode_tok_s": True, "ttft_ms": False},
    "b": {"output_tok_s": True, "all_first_ms": False},
    "c": {"output_tok_s": True, "all_first_ms": False},
    "d": {"prefill_tok_s": True, "decode_tok_s": True},
    "e": {"output_tok_s": True, "all_first_ms": False},
    "f": {"prefill_tok_s": True, "decode_tok_s": True},
    "http": {"output_tok_s": True},
    "load": {"load_s": False},
}
CELLS = [
    *("a:A", "b:A", "c:A", "d:A", "a:B", "b:B", "http:A", "load:A"),
    *("e:A", "f:A"),
    *("a:A:int8", "b:A:int8", "a:B:int8", "b:B:int8", "a:A:int4", "a:B:int4"),
]
OTHERS = ("openvino", "vllm", "llamacpp")
PAUSE_S = 0.4  # threads that spin after a run have gone to sleep by then


class DriverKey(NamedTuple):
    """An engine with a model in memory."""

    engine: str
    model: str
    weights: str
    caching: bool


@dataclass(frozen=True)
class Cell:
    """A scenario on a model with weights of a kind."""

    scenario: str
    model: str
    weights: str = "bf16"

    @classmethod
    def parse(cls, text: str) -> Cell:
        parts = text.split(":")
        parts += ["bf16"] * (len(parts) == 2)
        known = len(parts) == 3 and parts[0] in SCENARIOS and parts[1] in ("A", "B")
        if not known or parts[2] not in ("bf16", "int8", "int4"):
            raise SystemExit(f"unknown cell '{text}'; they are {' '.join(CELLS)}")
        return cls(*parts)

    def __str__(self) -> str:
        kind = "" if self.weights == "bf16" else f":{self.weights}"
        return f"{self.scenario}:{self.model}{kind}"

    def work(self, seed: int) -> dict[str, int]:
        requests, prompt, output = SCENARIOS[self.scenario]
        work = {"requests": requests, "prompt": prompt, "output": output, "seed": seed}
        return {**work, "shared": SHARED.get(self.scenario, 0)}

    def driver(self, engine: str) -> DriverKey:
        """What runs the cell for an engine."""
        return DriverKey(engine, self.model, self.weights, self.scenario in CACHING)

    def engines(self, peers: list[str]) -> list[str]:
        """Who runs, weft first."""
        if self.scenario == "http":
            return ["weft", "weft-http"]
        own = ["weft"] if self.weights == "bf16" else ["weft", "weft-bf16"]
        more = ["llamacpp-k"] if self.weights == "int4" and "llamacpp" in peers else []
        return [*own, *peers, *more]


class DriverError(Exception):
    """A driver ended; the message has its last words."""


class Driver:
    """A running driver of one engine."""

    def __init__(self, prepared: Prepared, log: Path) -> None:
        self._log = log
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **prepared.environment}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                prepared.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env=environment,
            )  # fmt: skip
        self.pid = self._process.pid
        self.facts = self._hear()

    def run(self, work: dict[str, int]) -> dict[str, float]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it says before it dies follows
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            said = [line for line in self._log.read_text().splitlines() if line.strip()]
            raise DriverError(said[-1] if said else "it said nothing")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class Result:
    """What the rounds of a cell gave, by engine."""

    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Comparison:
    """Runs cells; drivers of the same model and weights stay between them."""

    def __init__(self, setup: Setup, peers: list[str], pairs: int) -> None:
        self._setup = setup
        self._peers = peers
        self._pairs = pairs
        self._drivers: dict[DriverKey, Driver | str] = {}

    def run(self, cell: Cell) -> dict[str, Any]:
        for key in list(self._drivers):
            if key != cell.driver(key.engine):
                self._drop(key)
        engines = cell.engines(self._peers)
        result = Result()
        read_rates = [read_rate(self._setup.threads)]
        for number in range(self._pairs + 1):
            turn = number % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                if engine not in result.failed:
                    self._one(cell, engine, number, result)
        read_rates.append(read_rate(self._setup.threads))
        runs = {engine: rows for engine, rows in result.runs.items() if engine not in result.failed}
        figures = {engine: [figures_of(cell, row) for row in rows] for engine, rows in runs.items()}
        wanted = METRICS[cell.scenario].items()
        metrics = {name: compare(figures, name, more, cell) for name, more in wanted}
        if cell.scenario == "a" and cell.weights == "bf16" and "weft" in figures:
            weights = (self._setup.model(cell.model) / "model.safetensors").stat().st_size
            decode = metrics["decode_tok_s"]
            decode["ceiling_tok_s"] = max(read_rates) / weights
            rate = decode["spread"]["weft"]["median"]
            decode["share_of_ceiling"] = rate / decode["ceiling_tok_s"]
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "pairs": self._pairs,
            "read_bytes_per_s": max(read_rates),
            **asdict(result),
            "metrics": metrics,
        }

    def _one(self, cell: Cell, engine: str, number: int, result: Result) -> None:
        """A run; the first one warms up and is not kept."""
        key = cell.driver(engine)
        try:
            if cell.scenario == "load":
                self._drop(key)
            driver = self._driver(key)
            time.sleep(PAUSE_S)
            row = {**driver.run(cell.work(1000 + number)), "load_s": driver.facts["load_s"]}
            result.versions[engine] = driver.facts["version"]
        except (InstallError, DriverError) as error:
            print(f"  {engine}: {error}", file=sys.stderr)
            result.failed[engine] = self._drivers[key] = str(error)
            return
        if number:
            result.runs.setdefault(engine, []).append(row)

    def _driver(self, key: DriverKey) -> Driver:
        known = self._drivers.get(key)
        if isinstance(known, str):
            raise InstallError(known)
        if known is None:
            prepared = PEERS[key.engine](self._setup, key.model, key.weights)
            if key.caching:
                prepared = replace(prepared, command=[*prepared.command, driving.CACHING])
            log = self._setup.envs / "logs" / f"{'-'.join(key[:3])}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            known = self._drivers[key] = Driver(prepared, log)
        return known

    def _drop(self, key: DriverKey) -> None:
        driver = self._drivers.get(key)
        if isinstance(driver, Driver):
            driver.close()
            del self._drivers[key]

    def close(self) -> None:
        for key in list(self._drivers):
            self._drop(key)


def figures_of(cell: Cell, row: dict[str, float]) -> dict[str, float]:
    """The metrics of one run."""
    requests, prompt, _ = SCENARIOS[cell.scenario]
    return {
        "decode_tok_s": row["after_all_first"] / max(row["seconds"] - row["all_first_s"], 1e-9),
        "prefill_tok_s": requests * prompt / row["all_first_s"],
        "output_tok_s": row["tokens"] / row["seconds"],
        "ttft_ms": row["first_s"] * 1e3,
        "all_first_ms": row["all_first_s"] * 1e3,
        "load_s": row["load_s"],
    }


def compare(
    figures: dict[str, list[dict[str, float]]], name: str, more: bool, cell: Cell
) -> dict[str, Any]:
    """Median and range by engine, and weft's ratio to the best peer and to its own other form."""
    values = {engine: [row[name] for row in rows] for engine, rows in figures.items()}
    spread = {
        engine: {"median": statistics.median(v), "lowest": min(v), "highest": max(v)}
        for engine, v in values.items()
    }
    found: dict[str, Any] = {"spread": spread}
    if "weft" not in values:
        return found

    def ratio(other: str) -> float:
        pairs = zip(values["weft"], values[other], strict=True)
        return statistics.median(a / b if more else b / a for a, b in pairs)

    peers = [engine for engine in values if not engine.startswith("weft")]
    if peers:
        best = (max if more else min)(peers, key=lambda engine: spread[engine]["median"])
        found |= {"best": best, "ratio": ratio(best)}
    if "weft-bf16" in values:
        found["ratio_to_bf16"] = ratio("weft-bf16")
    if "weft-http" in values and cell.scenario == "http":
        found["http_share"] = 1 / ratio("weft-http")
    return found


def table(cells: dict[str, Any]) -> Iterator[str]:
    """The comparison in Markdown, a row for each metric of a cell."""
    engines = ["weft", *OTHERS, "llamacpp-k", "weft-bf16", "weft-http"]
    shown = [e for e in engines if any(e in c["runs"] or e in c["failed"] for c in cells.values())]
    yield f"| cell | metric | {' | '.join(shown)} | ratio |"
    yield "|---|---|" + "---|" * (len(shown) + 1)
    for name, cell in cells.items():
        for metric, found in cell["metrics"].items():
            values = [_value(found["spread"].get(e), cell["failed"].get(e)) for e in shown]
            yield f"| {name} | {metric} | {' | '.join(values)} | {_ratios(found)} |"
    failures = {f"{e}: {why}" for cell in cells.values() for e, why in cell["failed"].items()}
    yield from (f"\nfailed: {failure}" for failure in sorted(failures))


def _value(spread: dict[str, float] | None, failed: str | None) -> str:
    if spread is None:
        return "failed" if failed else ""
    return f"{spread['median']:.4g} ({spread['lowest']:.4g}-{spread['highest']:.4g})"


def _ratios(found: dict[str, Any]) -> str:
    parts = []
    if "ratio" in found:
        parts.append(f"{found['ratio']:.2f} to {found['best']}")
    if "ratio_to_bf16" in found:
        parts.append(f"{found['ratio_to_bf16']:.2f} to bf16")
    if "share_of_ceiling" in found:
        ceiling = found["ceiling_tok_s"]
        parts.append(f"{found['share_of_ceiling']:.0%} of the ceiling of {ceiling:.0f}")
    if "http_share" in found:
        parts.append(f"{found['http_share']:.2f} of in process")
    return ", ".join(parts)


def read_rate(threads: int) -> float:
    """The rate in bytes a second at which the machine's memory can be read just now."""
    script = f"""
from weft.kernels import measure
measure.set_threads({threads})
print(measure.read_rate())
"""
    command = [sys.executable, "-c", script]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    flags = set(facts.get("flags", "").split())
    return {
        "cpu": facts.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "flags": sorted(flag for flag in flags if flag.startswith(("avx", "amx", "fma"))),
        "load_1min": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--peers", default=",".join(OTHERS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "weft-peers")
    parser.add_argument("--isa", choices=sorted(filter(None, SETS)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    peers = [peer for peer in options.peers.split(",") if peer]
    if unknown := sorted(set(peers) - set(OTHERS)):
        raise SystemExit(f"unknown peers {', '.join(unknown)}; they are {', '.join(OTHERS)}")
    if options.pairs < 1:
        raise SystemExit(f"--pairs must be at least 1, not {options.pairs}")
    cells = [Cell.parse(text) for text in options.cells.split(",")]
    setup = Setup(options.envs.resolve(), options.threads, options.isa)
    setup.envs.mkdir(parents=True, exist_ok=True)
    try:
        make_models(setup)
    except InstallError as error:
        raise SystemExit(f"cannot make the models: {error}") from None
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    done = {**kept, "threads": options.threads, "isa": options.isa, "machine": machine()}
    comparison = Comparison(setup, peers, options.pairs)
    try:
        for cell in sorted(cells, key=lambda cell: cell.driver("")):
            print(cell, file=sys.stderr)
            found = comparison.run(cell)
            done.setdefault("cells", {})[str(cell)] = found
            print("\n".join(table({str(cell): found})), flush=True)
            if options.out:
                order = {name: i for i, name in enumerate(CELLS)}
                by_place = sorted(done["cells"].items(), key=lambda c: order.get(c[0], 99))
                done["cells"] = dict(by_place)
                options.out.write_text(json.dumps(done, indent=1) + "\n")
    finally:
        comparison.close()
    print()
    print("\n".join(table(done["cells"])))


if __name__ == "__main__":
    main()
