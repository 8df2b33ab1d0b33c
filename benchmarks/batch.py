"""``weft batch`` beside ``LLM.generate`` in process: output tokens a second on the same prompts.

    python benchmarks/batch.py [--model FOLDER] [--requests 512] [--out FILE.json]

Both answer the same prompts of token ids, greedy, with outputs of the same lengths, in turns; each
round is a new command, whose rate is that of its summary, without the start of the engine. The
ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from weft import LLM, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS, VOCAB = 64, 64, 4096
SETTINGS = {"kv_memory": "256MiB", "max_num_seqs": 64, "prefix_caching": False}


def flags() -> list[str]:
    """The settings as flags."""
    words = []
    for name, value in SETTINGS.items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    return words


def batch_rate(model: str, prompts: list[list[int]], folder: Path) -> float:
    """Output tokens a second of one command."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    body = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    with source.open("w") as file:
        for number, prompt in enumerate(prompts):
            line: dict[str, Any] = {"custom_id": f"r{number}", "method": "POST"}
            line |= {"url": "/v1/completions", "body": {"model": model, "prompt": prompt, **body}}
            file.write(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "weft.cli", "batch", str(source), "-o", str(output)]
    command += ["--restart", "--model", model, *flags()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"tokens/s: [0-9]+ in, ([0-9]+) out", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def llm_rate(llm: LLM, prompts: list[list[int]]) -> float:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    results = llm.generate(prompts, params, progress=False)
    tokens = sum(len(result.token_ids) for result in results)
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    draw = random.Random(0)
    prompts = [
        [draw.randrange(8, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(arguments.requests)
    ]
    batches, generated = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            turns = [0, 1] if number % 2 else [1, 0]
            for turn in turns:
                if turn:
                    batches.append(batch_rate(arguments.model, prompts, Path(folder)))
                    continue
                with LLM.in_process(arguments.model, **SETTINGS) as llm:
                    llm_rate(llm, prompts[:8])
                    generated.append(llm_rate(llm, prompts))
    ratios = [batch / other for batch, other in zip(batches, generated, strict=True)]
    ratio = statistics.median(ratios)
    print(f"weft batch {statistics.median(batches):.0f} tokens/s, LLM.generate in process ", end="")
    print(f"{statistics.median(generated):.0f} tokens/s, ratio {ratio:.3f} {sorted(ratios)}")
    if arguments.out is not None:
        facts = {"batch_tokens_per_s": batches, "llm_tokens_per_s": generated}
        facts |= {"ratios": ratios, "ratio": ratio, "requests": len(prompts)}
        facts |= {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
        report.save(arguments.out, model=arguments.model, settings=SETTINGS, **facts)


if __name__ == "__main__":
    main()
