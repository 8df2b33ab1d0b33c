"""Perplexity of the same GGUF files by weft and by llama.cpp, over the same windows of a text.

    python benchmarks/gguf_perplexity.py FOLDER --text FILE --out FILE.json MODEL.gguf ...

FOLDER has llama.cpp's ``llama-perplexity``, whose method this is: windows without overlap, the
second half of each scored, the first token of each replaced by the token that begins a text.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
from pathlib import Path

from weft import LLM, SamplingParams
from weft.core.results import write_json
from weft.core.topology import this_machine
from weft.engine.machine import cpu_name
from weft.kernels.cpu import attention

TRIES = 5  # it sometimes ends before its last line is printed


def by_llama_cpp(program: Path, model: Path, text: Path, window: int) -> tuple[float, int]:
    """Perplexity, and the number of windows."""
    command = [str(program), "-m", str(model), "-f", str(text), "-c", str(window)]
    command += ["-b", str(window), "--no-repack"]
    for _ in range(TRIES):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        printed = done.stdout + done.stderr
        windows = re.search(r"over (\d+) chunks", printed)
        final = re.search(r"Final estimate: PPL = ([\d.]+)", printed)
        if windows is not None and final is not None:
            return float(final[1]), int(windows[1])
    raise SystemExit(f"llama-perplexity printed no estimate:\n{printed[-2000:]}")


def by_weft(model: Path, text: Path, window: int) -> tuple[float, int]:
    """The same, by log probabilities of prompts."""
    settings = {"kv_memory": "256MiB", "max_model_len": window + 1, "max_num_seqs": 8}
    with LLM.in_process(str(model), **settings) as llm:
        ids = llm.tokenizer.encode(text.read_text())
        begins = llm.tokenizer.encode("")  # the token before every text, where there is one
        starts = range(0, len(ids) - window + 1, window)
        prompts = [[*begins, *ids[start + len(begins) : start + window]] for start in starts]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        results = llm.generate(prompts, params, progress=False)
    scores = [
        entry.logprob for result in results for entry in result.prompt_logprobs[window // 2 + 1 :]
    ]
    return math.exp(-sum(scores) / len(scores)), len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=512, help="tokens")
    given = parser.parse_args()
    found = {}
    for model in given.models:
        theirs, windows = by_llama_cpp(
            given.folder / "llama-perplexity", model, given.text, given.window
        )
        own, same = by_weft(model, given.text, given.window)
        if same != windows:
            raise SystemExit(f"{model}: {same} windows by weft, {windows} by llama.cpp")
        found[model.stem] = {"weft": own, "llama.cpp": theirs, "ratio": own / theirs}
        print(json.dumps({model.stem: found[model.stem]}), flush=True)
    names = " ".join(model.name for model in given.models)
    head = {
        "command": f"python benchmarks/gguf_perplexity.py FOLDER --text {given.text.name} {names}",
        "machine": f"{cpu_name()}, {this_machine().describe()}",
        "isa": attention.isa(),
        "window": given.window,
    }
    write_json(given.out, head | {"models": found})


if __name__ == "__main__":
    main()
