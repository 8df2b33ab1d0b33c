"""The same GGUF files by weft and by llama.cpp, turn by turn on the same cores.

    python benchmarks/gguf_peers.py FOLDER --out FILE.json MODEL.gguf ...

FOLDER has llama.cpp's ``llama-batched-bench``, which benchmarks/peers/install.py builds. Each round
computes a prompt and decodes behind it, one request at a time, first by one engine and then by the
other; ratios are those of the rounds' medians, weft over llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft import LLM, SamplingParams
from weft.core.results import write_json
from weft.core.topology import this_machine
from weft.engine.machine import cpu_name
from weft.kernels.cpu import attention

PROMPT, OUTPUT = 512, 64  # tokens


def by_llama_cpp(
    program: Path, model: Path, threads: int, more: Sequence[str]
) -> tuple[float, float]:
    """Tokens a second of a prompt, and of decoding behind it."""
    command = [str(program), "-m", str(model), "-c", str(2 * (PROMPT + OUTPUT)), "-b", "2048"]
    command += ["-ub", "512", "-npp", str(PROMPT), "-ntg", str(OUTPUT), "-npl", "1"]
    command += ["-t", str(threads), "-tb", str(threads), "--output-format", "jsonl", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return PROMPT / row["t_pp"], OUTPUT / row["t_tg"]


def by_weft(llm: LLM, seed: int) -> tuple[float, float]:
    """The same; no prompt comes twice, so that none is found in the prefix cache."""
    draw = np.random.default_rng(seed)
    seconds = []
    for tokens in (1, OUTPUT + 1):
        prompt = draw.integers(10, llm.served.vocab_size - 10, PROMPT).tolist()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([prompt], params, progress=False)
        seconds.append(time.perf_counter() - start)
    return PROMPT / seconds[0], OUTPUT / max(1e-9, seconds[1] - seconds[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    plain = "without llama.cpp's own layout of weights, and so its AMX kernels"
    parser.add_argument("--plain", action="store_true", help=plain)
    given = parser.parse_args()
    more = ["--no-repack"] if given.plain else []
    found = {}
    for model in given.models:
        rounds = []
        settings = {"threads": given.threads, "kv_memory": "256MiB", "max_num_seqs": 1}
        with LLM.in_process(str(model), max_model_len=2048, **settings) as llm:
            by_weft(llm, 0)
            for number in range(1, given.rounds + 1):
                theirs = by_llama_cpp(
                    given.folder / "llama-batched-bench", model, given.threads, more
                )
                rounds.append((by_weft(llm, number), theirs))
        found[model.stem] = row = {}
        for at, name in enumerate(("prefill", "decode")):
            own, other = (statistics.median(one[who][at] for one in rounds) for who in (0, 1))
            row[name] = {"weft": own, "llama.cpp": other, "ratio": own / other}
            row[name]["rounds"] = [one[0][at] / one[1][at] for one in rounds]
        print(model.stem, json.dumps(row), flush=True)
    names = " ".join(model.name for model in given.models)
    flags = f"--threads {given.threads} --rounds {given.rounds} " + "--plain " * given.plain
    result = {
        "command": f"python benchmarks/gguf_peers.py FOLDER --out FILE {flags}{names}",
        "machine": f"{cpu_name()}, {this_machine().describe()}",
        "load": os.getloadavg(),
        "threads": given.threads,
        "plain": given.plain,
        "isa": attention.isa(),
    }
    write_json(given.out, result | {"prompt": PROMPT, "output": OUTPUT, "models": found})


if __name__ == "__main__":
    main()
