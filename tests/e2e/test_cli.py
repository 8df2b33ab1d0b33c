"""The command line as a user meets it: real processes, real output, wrong uses.

Where a process is not what matters, ``call`` runs a command in this one, its engine, too.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import weft
from live import WEFT, refused, run
from weft import SamplingParams, generate
from weft.core.errors import OutOfMemoryError
from weft.engine.llm import GenerationResult
from weft.models.hub import resolve_model

FAST = ["--threads", "1", "--kv-memory", "16MiB", "--max-num-seqs", "8", "--quiet"]


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


def test_lines_of_a_file_come_as_soon_as_they_are_done(tmp_path):
    jobs = tmp_path / "prompts.jsonl"
    jobs.write_text(
        '{"prompt": "a", "max_tokens": 2}\n{"prompt": "b", "max_tokens": 2000}\n'
        '{"prompt": "c", "max_tokens": 2}\n'
    )
    command = [*WEFT, "generate", "--file", str(jobs), *FAST, "--ignore-eos"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    lines += out.splitlines()
    assert (process.returncode, err) == (130, "")
    assert [json.loads(line)["index"] for line in lines] in ([0], [0, 2])  # 2 ends with 0, or soon


class ScriptedLLM:
    """Stands for an LLM: yields results in the order of ``ends``; an exception is raised."""

    def __init__(self, *ends: int | BaseException) -> None:
        self.ends = ends
        self.served = type("Served", (), {"vocab_size": 100})

    def check_prompt(self, prompt):
        return [len(prompt)]

    def generate_iter(self, prompts, params):
        assert len(prompts) == len(params)
        for end in self.ends:
            if isinstance(end, BaseException):
                raise end
            error = OutOfMemoryError("no room") if end == 3 else None
            yield end, GenerationResult(None, (1,), text=f"é{end}", error=error)


def file_jobs(count: int) -> list[generate.PromptLine]:
    return [generate.PromptLine(f"x:{i}", f"prompt {i}", SamplingParams()) for i in range(count)]


QUIET, LOUD = {"quiet": True, "chat": False}, {"quiet": False, "chat": False}


def test_lines_keep_the_order_of_the_file(capsys):
    code = generate.generate_file(ScriptedLLM(2, 0, 1, 3), file_jobs(4), QUIET)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 1
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert lines[3]["error"] == {"code": "out_of_memory", "message": "no room"}


def test_what_is_done_is_printed_when_something_ends_the_run(capsys):
    with pytest.raises(KeyboardInterrupt):
        generate.generate_file(ScriptedLLM(0, 3, 2, KeyboardInterrupt()), file_jobs(4), QUIET)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 2, 3]


def test_progress_is_shown_to_a_terminal_only(capsys, monkeypatch):
    generate.generate_file(ScriptedLLM(0, 1), file_jobs(2), LOUD)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    generate.generate_file(ScriptedLLM(0, 1), file_jobs(2), LOUD)
    assert "2/2" in capsys.readouterr().err


def test_results_stay_json_where_the_terminal_knows_only_ascii(tmp_path):
    jobs = tmp_path / "prompts.jsonl"
    jobs.write_text('"caf\u00e9 \u6f22"\n', encoding="utf-8")
    fast = (*FAST, "--max-tokens", "1")
    done = run("generate", "--file", str(jobs), *fast, PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout)["prompt"] == "café 漢"
    done = run("generate", "café 漢", "--echo", *fast, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("caf\\xe9 \\u6f22")


def test_logit_bias_in_a_file(call, tmp_path):
    jobs = tmp_path / "prompts.jsonl"
    jobs.write_text('{"prompt": "x", "logit_bias": {"17": 100}, "temperature": 0}\n')
    done = call("generate", "--file", str(jobs), *FAST, "--max-tokens", "2")
    assert json.loads(done.stdout)["token_ids"] == [17, 17]


def test_an_end_id_beyond_the_vocabulary_harms_nobody(call, checkpoint):
    path = checkpoint / "generation_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, "eos_token_id": 99999}))
    done = call(
        "generate", "x", "--model", str(checkpoint), *FAST, "--min-tokens", "1", "--max-tokens", "2"
    )
    assert done.returncode == 0, done.stderr
    path.write_text(json.dumps({**values, "eos_token_id": [1, 2**40]}))
    refused(call("generate", "x", "--model", str(checkpoint)), "eos_token_id", str(2**40))


@pytest.mark.parametrize("module", ["typing", "argparse", "tokenizers", "queue"])
def test_ctrl_c_while_modules_are_loaded_leaves_no_trace(tmp_path, module):
    """At the very start; with the command line, the tokeniser, and the client of the engine."""
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit('too late')\n"
    (tmp_path / f"{module}.py").write_text(code)
    done = run("generate", "x", *FAST, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "")


def test_an_unknown_log_level_is_refused():
    refused(run("info", WEFT_LOG_LEVEL="foo"), "WEFT_LOG_LEVEL", "WARNING", "'foo'", code=2)
    assert run("info", WEFT_LOG_LEVEL="debug").returncode == 0


def test_an_instruction_set_is_used_and_shown_or_refused():
    machine = json.loads(run("info", "--json", WEFT_ISA="baseline").stdout)["machine"]
    assert machine["isa"] == "baseline"
    assert "instruction set baseline" in run("info", WEFT_ISA="baseline").stdout
    for command in (("info",), ("bench", "kernels")):
        refused(run(*command, WEFT_ISA="sse9"), "WEFT_ISA", "'sse9'", "baseline", code=1)


def test_chat_and_echo(call):
    done = call("generate", "What is a list?", "--chat", *FAST, "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    done = call("generate", "abc", "--echo", *FAST, "--max-tokens", "1")
    assert done.stdout.startswith("abc")


def test_info_names_the_kernel_of_every_op(call):
    done = call("info", "--json", "--kv-memory", "64MiB")
    info = json.loads(done.stdout)
    dtype = info["model"]["dtype"]
    assert info["kernels"]["paged_attention"] == {
        "kernel": "cpu",
        "dtype": dtype,
        "kv_dtype": dtype,
    }
    assert all({"kernel", "dtype"} <= set(facts) for facts in info["kernels"].values())
    assert info["memory"]["fits"]
    assert info["memory"]["largest_context"] == 2048
    words = call("info", "--kv-dtype", "int8").stdout
    assert f"paged_attention  cpu, in {dtype}, KV in int8" in words
    small = json.loads(call("info", "--json", "--kv-memory", "600KiB").stdout)
    assert 0 < small["memory"]["largest_context"] < 2048


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host-kv-memory", "1KiB"], ["host_kv_memory (1.00 KiB)", "not even one block"]),
        (["--host-kv-memory", "0GiB"], ["host_kv_memory", "at least 1024"]),
        (["--scheduler", "fcfs-swap"], ["scheduler must be one of auto, fcfs, slo"]),
        (["--quantize", "fp8"], ["quantize is fp8", "kernels of a CPU do not compute"]),
    ],
)
def test_info_refuses_what_serve_refuses(call, arguments, words):
    refused(call("info", "--device", "cpu", *arguments), *words, code=2)
    refused(run("serve", "--device", "cpu", "--port", "0", *arguments), *words, code=2)


def test_a_config_file_takes_the_same_names(call, tmp_path):
    path = tmp_path / "weft.yaml"
    path.write_text("max_model_len: 64\nkv-memory: 8MiB\nthreads: 1\ntemperature: 0\n")
    done = call("generate", "a b c " * 60, "--config", str(path), "--quiet")
    refused(done, "64", "shorten the prompt", code=2)
    flags_win = call(
        "generate", "a b c", "--config", str(path), "--max-model-len", "32", "--max-tokens", "2"
    )
    assert flags_win.returncode == 0, flags_win.stderr


def test_info_takes_the_file_and_the_tokenizer_that_generate_takes(call, tmp_path, checkpoint):
    path = tmp_path / "weft.yaml"
    path.write_text("max_model_len: 64\ntemperature: 0\nlogit_bias: {3: 1.5}\n")
    info = json.loads(call("info", "--json", "--config", str(path)).stdout)
    assert info["memory"]["max_model_len"] == 64
    path.write_text("temprature: 0\n")
    refused(call("info", "--config", str(path)), "temprature", "temperature", code=2)
    (checkpoint / "tokenizer.json").unlink()
    shown = json.loads(call("info", "--json", "--tokenizer", str(checkpoint)).stdout)
    assert shown["model"]["tokenizer"].startswith("none")
    folder = str(resolve_model("builtin"))
    shown = json.loads(
        call("info", "--json", "--model", str(checkpoint), "--tokenizer", folder).stdout
    )
    assert not shown["model"]["tokenizer"].startswith("none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_modellen: 3\n", ["max_modellen", "max_model_len"]),
        ("max_model_len: -3\n", ["max_model_len", "-3"]),
        ("block_size: yes\n", ["block_size", "True"]),
        ("classes: {gold: {rnk: 1}}\n", ["'rnk'"]),
        ("classes: {gold: {rank: 1}}\n", ["'rank'", "'priority' now"]),
        ("attention: reference\n", ["'attention'", "'kernels' now"]),
        ("- a\n", ["mapping"]),
        ("a: [\n", ["YAML"]),
    ],
)
def test_a_wrong_config_file_is_refused(call, tmp_path, text, words):
    path = tmp_path / "weft.yaml"
    path.write_text(text)
    refused(call("generate", "x", "--config", str(path)), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens=-1"], ["max_tokens", "-1"]),
        (["--model", "./no-such-folder"], ["no-such-folder"]),  # as the engine's process says
    ],
)
def test_wrong_uses_end_a_command_with_that_sentence(arguments, words):
    refused(run("generate", "hello", *arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./no-such-folder"], ["no-such-folder"]),
        (["--model", "nobody/nothing"], ["nobody/nothing"]),
        (["--temprature", "0.5"], ["--temprature", "--temperature"]),
        (["--max-tokens=-1"], ["max_tokens", "-1"]),
        (["--max-tokens", "9" * 400], ["max_tokens", "400 digits"]),
        (["--kv-memory", "9" * 400], ["512MiB"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "0"], ["top_p", "above 0"]),
        (["--dtype", "int3"], ["dtype", "bfloat16"]),
        (["--dtype", "float16"], ["float16", "bfloat16"]),
        (["--max-model-len", "100000"], ["100000", "2048"]),
        (["--kv-memory", "lots"], ["lots", "512MiB"]),
        (["--kv-memory", "900TB"], ["kv_memory", "free"]),
        (["--host-kv-memory", "900TB"], ["host_kv_memory", "beside weights and KV", "lower"]),
        (["--kv-memory", "2KiB", "--max-model-len", "64"], ["64 tokens", "kv_memory"]),
        (["--max-num-seqs", "0"], ["max_num_seqs", "0"]),
        (["--max-num-seqs", "4096"], ["max_num_batched_tokens", "max_num_seqs"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--chat-template", "missing.jinja", "--chat"], ["missing.jinja"]),
        (["--stop", ""], ["stop"]),
    ],
)
def test_wrong_uses_get_one_clear_sentence(call, arguments, words):
    refused(call("generate", "hello", *arguments), *words)


def test_a_prompt_or_a_file_but_not_both_or_none(call, tmp_path):
    refused(call("generate"), "--file")
    refused(call("generate", "x", "--file", "y"), "--file")
    refused(call("generate", "--file", "nowhere.jsonl"), "nowhere.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    refused(call("generate", "--file", str(empty)), "no prompts")
    empty.write_text('"fine"\n{"prompt": 3}\n')
    refused(call("generate", "--file", str(empty)), ":2:", "prompt")
    empty.write_text('{"prompt": "x", "temprature": 1}\n')
    refused(call("generate", "--file", str(empty)), ":1:", "temprature", "temperature")
    refused(call("generate", "--file", str(empty), "--echo"), "--echo", "--file", code=2)
    empty.write_text("{nonsense\n")
    refused(call("generate", "--file", str(empty)), ":1:", "JSON")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": ["a", "b"]}', ["token ids"]),
        ("[1, true]", ["token ids"]),
        ("[1, 99999]", ["99999"]),
        ("[1, -5]", ["-5"]),
        ("[]", ["empty"]),
        ('{"prompt": ""}', ["empty"]),
        (json.dumps("word " * 3000), ["2048", "shorten"]),
        ('"\\ud800"', ["Unicode"]),
        ('{"prompt": "x", "logit_bias": {"99999": 1}}', ["logit_bias", "99999"]),
        ('{"prompt": "x", "logit_bias": {"one": 1}}', ["logit_bias", "one"]),
        ('{"prompt": "x", "max_tokens": ' + "9" * 400 + "}", ["max_tokens", "400 digits"]),
        ('{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}", ["too long"]),
        ("[" * 100_000, ["too deep"]),
    ],
)
def test_a_wrong_line_of_a_file_is_named_before_anything_starts(call, tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    done = call("generate", "--file", str(path), *FAST)
    refused(done, f"{path}:2: ", *words, code=2)
    assert done.stdout == ""


def test_a_prompt_longer_than_the_context_is_refused(call):
    refused(call("generate", "word " * 3000, *FAST), "2048", "shorten the prompt", code=2)


def change_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_removed_tensor_is_named(call, checkpoint):
    change_weights(checkpoint, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    refused(call("generate", "x", "--model", str(checkpoint)), "model.layers.2.mlp.up_proj.weight")


def test_a_renamed_tensor_is_named(call, checkpoint):
    def rename(tensors):
        tensors["model.layers.0.self_attn.quary.weight"] = tensors.pop(
            "model.layers.0.self_attn.q_proj.weight"
        )

    change_weights(checkpoint, rename)
    refused(
        call("generate", "x", "--model", str(checkpoint)),
        "model.layers.0.self_attn.quary.weight",
        "model.layers.0.self_attn.q_proj.weight",
    )


def test_an_unknown_rope_type_is_named(call, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("rope_parameters", None)
    config["rope_scaling"] = {"rope_type": "spiral", "factor": 2.0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused(call("generate", "x", "--model", str(checkpoint)), "spiral", "llama3")


def test_a_folder_without_tokenizer_is_refused(call, checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    refused(call("generate", "x", "--model", str(checkpoint)), "tokenizer.json")


def test_the_first_token_comes_soon_after_the_start():
    """By the time that the processes work; the limit is ten times what they need."""
    before = children_s()
    assert run("generate", "x", *FAST, "--max-tokens", "1").returncode == 0
    assert children_s() - before < 40


def children_s() -> float:
    """Seconds that child processes have worked which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_template_that_is_nested_too_deeply(call, tmp_path):
    template = tmp_path / "deep.jinja"
    template.write_text("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    given = ("--chat-template", str(template))
    refused(call("generate", "hello", "--chat", *given), "'default'", "nested too deeply", code=1)
    served = run("serve", "--port", "0", *given)
    assert served.returncode == 1
    assert "nested too deeply" in served.stderr
    assert "Traceback" not in served.stderr


def test_a_config_with_a_billion_layers(call, tmp_path):
    builtin = Path(weft.__file__).parent / "builtin"
    config = json.loads((builtin / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    words = ("num_hidden_layers", "1000000000", "1024")
    refused(call("info", "--model", str(tmp_path)), *words, code=1)
