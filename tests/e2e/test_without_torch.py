"""The whole CPU path in environments without torch: every command, the server and ``LLM``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import httpx
import pytest

from live import WEFT, refused, run, serving

FAST = ["--threads", "1", "--kv-memory", "16MiB", "--max-num-seqs", "4"]
EXTRAS = ("torch", "triton", "transformers")  # what an environment for a CPU lacks
ABSENT = "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)\n"


pytestmark = pytest.mark.usefixtures("_without")


@pytest.fixture
def _without(tmp_path, monkeypatch) -> None:
    """No process of a test can import the extras."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for name in EXTRAS:
        (hidden / f"{name}.py").write_text(ABSENT)
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_torch_is_hidden():
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False
    )
    assert "No module named 'torch'" in done.stderr


def test_a_server_answers_chats_batches_and_benchmarks(tmp_path):
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "builtin", "prompt": "import", "max_tokens": 4, "logprobs": 2},
        }
        for i in range(3)
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    data = ("--data", str(tmp_path / "data"))
    with serving(tmp_path, *data, "--host-kv-memory", "16MiB") as server:
        chat = subprocess.run(
            [*WEFT, "chat", "--url", server.url, "--max-tokens", "5"],
            input="hello\n", capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert chat.returncode == 0, chat.stderr
        assert chat.stdout.strip()
        done = run("status", "--url", server.url, "--interval-s", "0")
        assert done.returncode == 0, done.stderr
        body = {"model": "builtin", "messages": [{"role": "user", "content": "one"}]}
        body["max_tokens"] = 12
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        body["response_format"] = {
            "type": "json_schema", "json_schema": {"name": "n", "schema": schema}
        }  # fmt: skip
        body |= {"logprobs": True, "top_logprobs": 3, "frequency_penalty": 0.5, "temperature": 0.7}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"].lstrip().startswith("{")
        vectors = httpx.post(
            f"{server.url}/v1/embeddings", json={"model": "builtin", "input": "one"}, timeout=60
        )
        assert vectors.status_code == 200, vectors.text
        assert len(vectors.json()["data"][0]["embedding"]) > 10
        done = run("batches", "submit", str(file), "--url", server.url, "--follow")
        assert done.returncode == 0, done.stderr
        done = run("bench", "serve", "--url", server.url, "--requests", "3", "--rate", "20",
                   "--input-tokens", "10", "--output-tokens", "3")  # fmt: skip
        assert done.returncode == 0, done.stderr
        info = httpx.get(f"{server.url}/server_info", timeout=60).json()["engine"]
        assert {"numpy", "torch"} & info["versions"].keys() == {"numpy"}


def test_commands_run(tmp_path):
    file = tmp_path / "requests.jsonl"
    body = {"model": "builtin", "prompt": "import", "max_tokens": 4}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    file.write_text(json.dumps(line))
    results = tmp_path / "results.jsonl"
    small = ["--max-model-len", "128", "--max-num-batched-tokens", "64"]
    for command in (
        ["generate", "import", *FAST, "--max-tokens", "4"],
        ["generate", "import", *FAST, "--max-tokens", "4", "--quantize", "int4"],
        ["batch", str(file), "-o", str(results), *FAST],
        ["info"],
        ["profile", "--threads", "1", "--max-num-seqs", "4", *small, "--repeats", "20",
         "--steps", "20"],
        ["bench", "throughput", "--prompts", "2", "--input-tokens", "9", "--output-tokens", "4",
         "--repeats", "1", *FAST],
        ["bench", "kernels", "--only", "linear", "--seconds", "0.001"],
        ["cache", "list"],
        ["doctor", "--port", "0"],
        ["models"],
    ):  # fmt: skip
        done = run(*command)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip() or results.exists()
    assert json.loads(results.read_text())["response"]["status_code"] == 200


def test_llm_generates():
    code = """
import sys
from weft import LLM, SamplingParams
for start in (LLM, LLM.in_process):
    with start("builtin", threads=1, kv_memory="16MiB", max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, speculation=2, prompt_logprobs=1)
        (result,) = llm.generate(["def add(a, b):"], params)
        assert len(result.token_ids) == 4
assert not {"torch", "triton"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "asked",
    [
        ["--device", "cuda"],
        ["--kernels", "reference"],
        ["--tensor-parallel", "2"],
        ["--quantize", "fp8"],
    ],
    ids=lambda asked: asked[0],
)
def test_what_needs_torch_names_the_extra(asked):
    refused(run("generate", "import", *FAST, "--quiet", *asked), "torch", "weft[cuda]")
