"""The command line as a user meets it: real processes, real output, wrong uses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import weft
from weft.models.hub import resolve_model

WEFT = [sys.executable, "-m", "weft.cli"]
FAST = ["--threads", "1", "--kv-memory", "16MiB", "--max-num-seqs", "8", "--quiet"]


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*WEFT, *arguments], capture_output=True, text=True, timeout=timeout, check=False,
        env=environment,
    )  # fmt: skip


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int | None = None) -> None:
    """The command failed with one sentence that has all the words, and without a trace."""
    assert done.returncode in ((1, 2) if code is None else (code,)), done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], done.stderr


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy of the built-in model that a test may damage."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in resolve_model("builtin").iterdir():
        if file.suffix in (".json", ".safetensors", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_version():
    assert run("--version").stdout.strip() == f"weft {weft.__version__}"


def test_generate_streams_the_text_of_the_python_api():
    done = run("generate", "def add(a, b):", *FAST, "--temperature", "0", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    with weft.LLM(threads=1, kv_memory="16MiB", max_num_seqs=8) as llm:
        params = weft.SamplingParams(temperature=0, max_tokens=24)
        (result,) = llm.generate("def add(a, b):", params, progress=False)
    assert done.stdout == result.text + "\n"


def test_tokens_appear_before_the_end():
    command = [*WEFT, "generate", "import", *FAST, "--max-tokens", "2000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


def test_generate_from_a_file_answers_every_line(tmp_path):
    jobs = tmp_path / "prompts.jsonl"
    jobs.write_text(
        '"def one():"\n{"prompt": [5, 6, 7], "max_tokens": 3}\n\n'
        '{"prompt": "x = ", "stop": ["\\n"], "seed": 4}\n'
    )
    done = run("generate", "--file", str(jobs), *FAST, "--max-tokens", "6", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [len(line["token_ids"]) for line in lines][:2] == [6, 3]
    assert "\n" not in lines[2]["text"]


def test_chat_and_echo():
    done = run("generate", "What is a list?", "--chat", *FAST, "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    done = run("generate", "abc", "--echo", *FAST, "--max-tokens", "1")
    assert done.stdout.startswith("abc")


def test_info_names_the_kernel_of_every_op():
    done = run("info", "--json", "--kv-memory", "64MiB")
    info = json.loads(done.stdout)
    assert info["kernels"]["paged_attention"] == "cpu"
    assert info["memory"]["fits"]
    assert info["memory"]["largest_context"] == 2048
    assert "paged_attention" in run("info").stdout
    small = json.loads(run("info", "--json", "--kv-memory", "600KiB").stdout)
    assert 0 < small["memory"]["largest_context"] < 2048


def test_a_config_file_takes_the_same_names(tmp_path):
    path = tmp_path / "weft.yaml"
    path.write_text("max_model_len: 64\nkv-memory: 8MiB\nthreads: 1\ntemperature: 0\n")
    done = run("generate", "a b c " * 60, "--config", str(path), "--quiet")
    refused(done, "64", "shorten the prompt", code=2)
    flags_win = run(
        "generate", "a b c", "--config", str(path), "--max-model-len", "32", "--max-tokens", "2"
    )
    assert flags_win.returncode == 0, flags_win.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_modellen: 3\n", ["max_modellen", "max_model_len"]),
        ("max_model_len: -3\n", ["max_model_len", "-3"]),
        ("block_size: yes\n", ["block_size", "True"]),
        ("classes: {gold: {rnk: 1}}\n", ["rnk", "rank"]),
        ("- a\n", ["mapping"]),
        ("a: [\n", ["YAML"]),
    ],
)
def test_a_wrong_config_file_is_refused(tmp_path, text, words):
    path = tmp_path / "weft.yaml"
    path.write_text(text)
    refused(run("generate", "x", "--config", str(path)), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./no-such-folder"], ["no-such-folder"]),
        (["--model", "nobody/nothing"], ["nobody/nothing"]),
        (["--temprature", "0.5"], ["--temprature", "--temperature"]),
        (["--max-tokens=-1"], ["max_tokens", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "0"], ["top_p", "above 0"]),
        (["--dtype", "int3"], ["dtype", "bfloat16"]),
        (["--dtype", "float16"], ["float16", "bfloat16"]),
        (["--max-model-len", "100000"], ["100000", "2048"]),
        (["--kv-memory", "lots"], ["lots", "512MiB"]),
        (["--kv-memory", "900TB"], ["kv_memory", "free"]),
        (["--kv-memory", "2KiB", "--max-model-len", "64"], ["64 tokens", "kv_memory"]),
        (["--max-num-seqs", "0"], ["max_num_seqs", "0"]),
        (["--max-num-seqs", "4096"], ["max_num_batched_tokens", "max_num_seqs"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--chat-template", "missing.jinja", "--chat"], ["missing.jinja"]),
        (["--stop", ""], ["stop"]),
    ],
)
def test_wrong_uses_get_one_clear_sentence(arguments, words):
    refused(run("generate", "hello", *arguments), *words)


def test_a_prompt_or_a_file_but_not_both_or_none(tmp_path):
    refused(run("generate"), "--file")
    refused(run("generate", "x", "--file", "y"), "--file")
    refused(run("generate", "--file", "nowhere.jsonl"), "nowhere.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    refused(run("generate", "--file", str(empty)), "no prompts")
    empty.write_text('"fine"\n{"prompt": 3}\n')
    refused(run("generate", "--file", str(empty)), ":2:", "prompt")
    empty.write_text('{"prompt": "x", "temprature": 1}\n')
    refused(run("generate", "--file", str(empty)), ":1:", "temprature", "temperature")
    empty.write_text("{nonsense\n")
    refused(run("generate", "--file", str(empty)), ":1:", "JSON")


def test_a_prompt_longer_than_the_context_is_refused():
    refused(run("generate", "word " * 3000, *FAST), "2048", "shorten the prompt", code=2)


def change_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_removed_tensor_is_named(checkpoint):
    change_weights(checkpoint, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    refused(run("generate", "x", "--model", str(checkpoint)), "model.layers.2.mlp.up_proj.weight")


def test_a_renamed_tensor_is_named(checkpoint):
    def rename(tensors):
        tensors["model.layers.0.self_attn.quary.weight"] = tensors.pop(
            "model.layers.0.self_attn.q_proj.weight"
        )

    change_weights(checkpoint, rename)
    refused(
        run("generate", "x", "--model", str(checkpoint)),
        "model.layers.0.self_attn.quary.weight",
        "model.layers.0.self_attn.q_proj.weight",
    )


def test_an_unknown_rope_type_is_named(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("rope_parameters", None)
    config["rope_scaling"] = {"rope_type": "spiral", "factor": 2.0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused(run("generate", "x", "--model", str(checkpoint)), "spiral", "llama3")


def test_a_folder_without_tokenizer_is_refused(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    refused(run("generate", "x", "--model", str(checkpoint)), "tokenizer.json")


def test_the_first_token_comes_soon_after_the_start():
    """No stop watch decides this: the limit is twenty times what an idle machine needs."""
    started = time.monotonic()
    assert run("generate", "x", *FAST, "--max-tokens", "1").returncode == 0
    assert time.monotonic() - started < 60
