"""What a new user types first: bare ``weft``, a model as a word, status, doctor, models, help."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from live import WEFT, Server, free_port, refused, run, serving
from local_hub import Hub, serving_hub
from weft.cli import command_line
from weft.core.config import EngineConfig
from weft.core.flags import NOT_ON_COMMAND_LINE, hide_rare, named_model
from weft.core.settings import settings_of
from weft.core.types import SamplingParams
from weft.models.hub import resolve_model
from weft.server.options import ServerOptions

FAST = ["--threads", "1", "--kv-memory", "16MiB", "--max-num-seqs", "8"]
TINY = {file.name: file.read_bytes() for file in resolve_model("builtin").iterdir()}


@pytest.fixture
def fresh(tmp_path, monkeypatch) -> Path:
    """The environment of a user with neither models nor caches."""
    for name, folder in (("HOME", "home"), ("XDG_CACHE_HOME", "cache"), ("HF_HOME", "hub")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("HF_HUB_CACHE", "OLLAMA_MODELS", "HF_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def hub(call, fresh, monkeypatch) -> Iterator[Hub]:  # noqa: ARG001 - call sets itself offline
    """A hub with one small model."""
    with serving_hub({"owner/tiny": TINY, "owner/bare": {"README.md": b"# bare"}}) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield served


def test_bare_weft_explains_itself_in_ten_lines():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 12
    named = [line.split()[1] for line in lines if line.startswith("  weft ")]
    known = run("--help").stdout
    assert named[0] == "serve"
    assert all(f"\n    {name} " in known for name in named)


def flags_in(text: str) -> set[str]:
    return {word.rstrip(",") for line in text.splitlines() for word in line.split()[:2]}


def test_help_has_the_everyday_settings_and_help_all_has_every_one(call):
    declared = [*settings_of(EngineConfig).values(), *settings_of(ServerOptions).values()]
    flags = {d.flag for d in declared if d.name not in NOT_ON_COMMAND_LINE}
    everyday = {d.flag for d in declared if d.everyday}
    assert {"--model", "--port", "--kv-memory", "--api-key"} <= everyday
    short, long = call("serve", "--help").stdout, call("serve", "--help-all").stdout
    assert flags_in(short) & flags == everyday
    assert flags <= flags_in(long)
    assert long.index("everyday settings:") < long.index("engine settings:")
    shown = flags_in(call("generate", "--help").stdout)
    assert {d.flag for d in settings_of(SamplingParams).values() if d.everyday} <= shown
    assert "--top-k" not in shown


def test_settings_that_help_leaves_out_are_known_all_the_same():
    parser = command_line("serve", first=True)
    hide_rare(parser)
    assert parser.parse_args(["serve", "--watchdog-s", "5"]).watchdog_s == 5


@pytest.mark.parametrize(
    "command",
    ["info", "compile", "profile", "chat", "bench throughput", "bench interfere",
     "bench serve", "bench energy", "cache clear"],
)  # fmt: skip
def test_a_model_is_a_word_or_a_flag(call, command):
    words = command.split()
    for given in (["m"], ["--model", "m"], ["m", "--model", "m"]):
        parsed = command_line(words[0], first=True).parse_args([*words, *given])
        assert named_model(vars(parsed)) == "m"
    refused(call(*words, "one", "--model", "two"), "Two models are named: one and", "two", code=2)


def test_generate_takes_a_model_before_the_prompt(call, tmp_path):
    once = [*FAST, "--quiet", "--max-tokens", "4", "--temperature", "0"]
    alone = call("generate", "def add(", *once)
    named = call("generate", "builtin", "def add(", *once)
    assert named.returncode == 0, named.stderr
    assert named.stdout == alone.stdout != ""
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('"def add("\n')
    filed = call("generate", "builtin", "--file", str(jobs), *once)
    assert json.loads(filed.stdout)["text"] + "\n" == alone.stdout


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["write", "a", "poem"], ["quotes", "weft generate [MODEL] 'write a poem'"]),
        (["owner/repo:Q4_K_M"], ["looks like a model", "give a prompt", "--model"]),
        (["./m.gguf"], ["looks like a model"]),
        (
            ["hello", "--file", "x.jsonl"],
            ["either a prompt or --file", "the one word is the model"],
        ),
        (["a", "b", "--model", "c"], ["Two models", "a", "c"]),
    ],
)
def test_generate_tells_which_word_is_missing_or_too_much(call, words, answer):
    refused(call("generate", *words), *answer, code=2)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["serv"], ["'serv'", "Did you mean 'serve'?", "doctor"]),
        (["info", "one", "two"], ["'two'", "weft info --help"]),
        (["models", "pul"], ["Did you mean 'pull'?"]),
        (["models", "pull"], ["name", "weft models pull --help"]),
        (["models", "pull", "builtin"], ["lies on this machine", "weft serve builtin"]),
        (["models", "remove", "owner/none", "--yes"], ["no model 'owner/none'", "weft models"]),
        (["completion"], ["shell"]),
        (["completion", "powershel"], ["'powershel'", "bash, zsh, fish, tcsh"]),
        (["status", "--url", "there"], ["'there'", "http://127.0.0.1:8000"]),
        (["status", "--interval-s", "-1"], ["--interval-s", "0 to 60"]),
        (["doctor", "--port", "http"], ["--port", "'http'"]),
        (["doctor", "now"], ["'now'"]),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_wrong_words_get_one_sentence(call, words, answer):
    refused(call(*words), *answer, code=2)


@pytest.mark.usefixtures("hub")
def test_a_model_of_the_hub_from_its_download_to_its_removal(call, fresh):
    with serving(fresh, "owner/tiny") as server:
        said = server.errors.read_text().splitlines()
        order = ["downloading owner/tiny from the hub", "loading owner/tiny", "packing the weights",
                 "KV cache of 32.00 MiB", "scheduling by fcfs", "classes: priority: first token in",
                 f"the page with chat and live view: {server.url}/",
                 f"serving owner/tiny on {server.url}"]  # fmt: skip
        found = [[word in line for line in said].index(True) for word in order]
        assert found == sorted(found), said
        assert found[-1] == len(said) - 1
        check_status(server)
    with serving(fresh, "--model", "owner/tiny") as server:
        assert "downloading" not in server.errors.read_text()
        assert "mapped from the cache" in server.errors.read_text()
    listed = call("models")
    assert "owner/tiny, fits: sequences of 2048 tokens\n    weft serve owner/tiny" in listed.stdout
    refused(call("models", "remove", "owner/tiny"), "--yes", "MiB", code=2)
    assert "owner/tiny" in call("models", "list").stdout
    removed = call("models", "remove", "owner/tiny", "--yes")
    assert removed.stdout.startswith("removed owner/tiny ("), removed.stderr
    assert "no models" in call("models").stdout
    assert call("cache", "list").stdout.startswith("0 files")


def check_status(server: Server) -> None:
    client = server.client()
    client.completions.create(model="owner/tiny", prompt="x = ", max_tokens=3)
    done = run("status", "--url", server.url, "--interval-s", "0.1")
    assert done.returncode == 0, done.stderr
    for words in (": ready", "owner/tiny", "0 running of 16", "of 32.00 MiB", "tokens/s",
                  "1 length", "scheduling fcfs", "interactive: first token in 3 s, 200 ms a token",
                  "batch: best effort"):  # fmt: skip
        assert words in done.stdout, done.stdout
    facts = json.loads(run("status", "--url", server.url + "/v1", "--json").stdout)
    assert facts["models"] == ["owner/tiny"]
    assert facts["waiting"] == 0
    assert set(facts["rates"]) == {"prompt_tokens_per_s", "output_tokens_per_s", "steps_per_s"}


@pytest.mark.usefixtures("hub")
def test_models_are_fetched_before_they_are_needed():
    online = {"HF_HUB_OFFLINE": "0"}
    done = run("models", "pull", "owner/tiny", **online)
    assert done.returncode == 0, done.stderr
    assert "downloading owner/tiny from the hub" in done.stderr
    assert "fits, with sequences of 2048 tokens: weft serve owner/tiny" in done.stdout
    again = run("models", "pull", "owner/tiny", **online)
    assert (again.returncode, again.stderr) == (0, "")
    for name, answer in (("owner/bare", "has no config.json"), ("owner/none", "is not on the hub")):
        wrong = run("models", "pull", name, **online)
        first, last = wrong.stderr.splitlines()
        assert first == f"weft: downloading {name} from the hub"
        assert f"'{name}' {answer}" in last
        assert wrong.returncode == 1
    (fact,) = json.loads(run("models", "--json").stdout)
    assert (fact["name"], fact["fits"], fact["max_model_len"]) == ("owner/tiny", True, 2048)


def test_status_of_a_server_that_wants_a_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("user:one\nadmin:two\n")
    given = ("--api-key-file", str(keys), "--metrics-key", "admin")
    with serving(tmp_path, *given, modelled=True) as server:
        ask = ("status", "--url", server.url)
        refused(run(*ask, OPENAI_API_KEY=""), "needs a key", "--api-key", code=1)
        refused(run(*ask, "--api-key", "three"), "refuses this key", code=1)
        done = run(*ask, OPENAI_API_KEY="one")
        assert done.returncode == 0, done.stderr
        assert "metrics are for other keys" in done.stdout
        found = run("doctor", "--port", server.url.rpartition(":")[2])
        assert "a weft server has" in found.stdout
        assert found.returncode == 0


class Other(BaseHTTPRequestHandler):
    """A server that is not weft."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        pass


def test_nobody_and_somebody_else_at_the_address(call):
    nobody = f"http://127.0.0.1:{free_port()}"
    refused(call("status", "--url", nobody), "No server answers", "weft serve", code=1)
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        port = other.server_address[1]
        refused(call("status", "--url", f"http://127.0.0.1:{port}"), "is not weft", code=1)
        found = call("doctor", "--port", str(port)).stdout
        other.shutdown()
        thread.join()
    assert f"note  port         another program has {port}\n      -> choose another one" in found


def test_a_doctor_finds_nothing_to_do_or_says_what(fresh):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free, port = str(free_port()), str(taken.getsockname()[1])
        well = run("doctor", "--port", free)
        assert well.returncode == 0, well.stdout
        assert "BAD" not in well.stdout
        assert "weft can serve here: weft serve MODEL" in well.stdout
        (fresh / "cache").write_text("a file where the folder would be")
        ill = run("doctor", "--json", "--port", port, WEFT_ISA="sse9")
    assert ill.returncode == 1
    findings = {finding["name"]: finding for finding in json.loads(ill.stdout)}
    states = {name: findings[name]["state"] for name in ("kernels", "port", "cache", "hub")}
    assert states == {"kernels": "bad", "port": "note", "cache": "note", "hub": "note"}
    assert "unset WEFT_ISA" in findings["kernels"]["advice"]
    assert "XDG_CACHE_HOME" in findings["cache"]["advice"]
    assert "HF_HUB_OFFLINE" in findings["hub"]["advice"]
    refused_at = run("doctor", "--port", "99999")
    assert refused_at.returncode == 1
    assert "weft cannot serve here: port" in refused_at.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completions_know_commands_and_flags(call, shell):
    script = call("completion", shell).stdout
    assert all(word in script for word in ("doctor", "kv-memory", "no-standby", "throughput"))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_completes(tmp_path):
    (tmp_path / "model.gguf").touch()
    script = subprocess.run([*WEFT, "completion", "bash"], capture_output=True, check=True).stdout
    (tmp_path / "weft.bash").write_bytes(script)

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("weft", *words))
        code = f"source weft.bash; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_weft; "
        code += 'printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(
            ["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done.stdout.split()

    assert completed("st") == ["status"]
    assert completed("models", "pu") == ["pull"]
    assert completed("serve", "--device", "") == ["auto", "cpu", "cuda"]
    assert completed("serve", "mod") == ["model.gguf"]
