"""Requests of every kind for engines of several processes, and those processes."""

from __future__ import annotations

import psutil

from live import START_S, Server, command_of, eventually
from weft import SamplingParams

SMALL = {"dtype": "float32", "threads": 1, "kv_memory": "32MiB", "max_num_seqs": 8}
PROMPTS = ["def add(a, b):", [9, 8, 7], "import os\nfor name in os.listdir(", "class A:\n" * 30]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
KINDS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24),
    "penalised": SamplingParams(temperature=0, repetition_penalty=1.2, logprobs=2, max_tokens=24),
    "scored": SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=4),
    "grammar": SamplingParams(temperature=0.7, seed=1, grammar="start: /[0-9]{12}/"),
    "stopped": SamplingParams(temperature=0, stop=("\ud800", "("), max_tokens=24),
    "guessed": SamplingParams(temperature=0, speculation=4, max_tokens=40),
}


def ranks(of: psutil.Process | None = None) -> list[psutil.Process]:
    children = (of or psutil.Process()).children(recursive=True)
    return [child for child in children if "".join(command_of(child)[:1]).startswith("weft-rank")]


def check_a_stream_outlives_rank_1(server: Server) -> None:
    """Kill the other one of two ranks within a stream, which goes on with the same text."""
    client = server.client()

    def ask():
        return client.completions.create(
            model="builtin", prompt="def f(", max_tokens=150, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip

    expected = "".join(chunk.choices[0].text for chunk in ask())
    parts = []
    for number, chunk in enumerate(ask()):
        parts.append(chunk.choices[0].text)
        if number == 3:
            (rank,) = ranks(psutil.Process(server.process.pid))
            rank.kill()
    assert "".join(parts) == expected
    eventually(lambda: server.metrics("weft:engine_restarts_total") == [1], START_S)
