"""Servers whose weights are kept: mapped by the next start and by standbys, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

import weft
from live import START_S, WEFT, Server, eventually, run, serving
from weft import LLM, SamplingParams

MIB = 2**20
BUILTIN = Path(weft.__file__).parent / "builtin"
PACKED = "weft: weights packed ("
KEPT = "The packed weights are kept in"
MAPPED = "weft: weights mapped from the cache"
CHANGED = "The model's files have changed"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weft" / "packed"


def text_of(server: Server) -> str:
    body = {"model": "builtin", "prompt": "def add(a, b):", "max_tokens": 20, "temperature": 0}
    body["model"] = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
    return answer.raise_for_status().json()["choices"][0]["text"]


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.packed"))


def serve_once(folder: Path, *arguments: str) -> tuple[str, str]:
    """The text that a server gives, and what it says when it starts."""
    folder.mkdir(exist_ok=True)
    with serving(folder, *arguments) as server:
        text = text_of(server)
        return text, server.errors.read_text()


def test_the_next_start_maps_what_the_first_one_packed(cache, tmp_path):
    with serving(tmp_path, "--log-level", "info") as server:
        text = text_of(server)
        assert PACKED in server.errors.read_text()
        eventually(lambda: KEPT in server.errors.read_text(), START_S)
        assert kept(cache)
    again, said = serve_once(tmp_path / "again")
    assert again == text
    assert MAPPED in said
    listed = run("cache", "list", XDG_CACHE_HOME=str(cache.parents[1]))
    assert f"{BUILTIN}  quantize none, dtype " in listed.stdout
    assert "part rank 0 of 1, kernels cpu " in listed.stdout
    cleared = run("cache", "clear", "--model", "builtin", XDG_CACHE_HOME=str(cache.parents[1]))
    assert "removed 1 file" in cleared.stdout
    assert not kept(cache)


def cut_weights(model: Path) -> None:
    """Have parts of a checkpoint be zeros."""
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    end = len(data) - len(data) // 4
    data[end:] = bytes(len(data) - end)
    weights.write_bytes(data)


def test_a_checkpoint_that_changes_is_noticed(cache, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(BUILTIN, model)
    with serving(tmp_path, "--model", str(model)) as server:
        text = text_of(server)
        eventually(lambda: bool(kept(cache)), START_S)
    cut_weights(model)
    other, said = serve_once(tmp_path / "changed", "--model", str(model))
    assert PACKED in said
    assert other != text
    variables = {"XDG_CACHE_HOME": str(cache.parents[1])}
    assert run("cache", "list", **variables).stdout.count("; the model has changed since") == 1
    shutil.rmtree(model)
    assert "; the model is gone" in run("cache", "list", **variables).stdout


def test_a_damaged_file_is_told_and_replaced(cache, tmp_path):
    with serving(tmp_path) as server:
        text = text_of(server)
        eventually(lambda: bool(kept(cache)), START_S)
    (file,) = kept(cache)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    folder = tmp_path / "again"
    folder.mkdir()
    with serving(folder, "--verify-weights") as server:
        assert text_of(server) == text
        said = server.errors.read_text()
        assert f"{file} is not used: " in said
        assert PACKED in said
        eventually(lambda: bool(kept(cache)), START_S)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with serving(tmp_path) as server:
        assert text_of(server)
        log = server.errors
        assert PACKED in log.read_text()
        assert "mapped" not in log.read_text()
        eventually(lambda: "cannot be kept" in log.read_text(), START_S)
        assert log.read_text().count("cannot be kept") == 1
        assert "is not used" not in log.read_text()


def without_overriding() -> list[str]:
    """A command within which root, too, may do only what the modes of files allow."""
    if os.geteuid():
        return []
    drop = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"]


def test_a_home_that_may_not_be_searched_stops_nothing(tmp_path, monkeypatch):
    """As of a container that runs as another user than its home's."""
    home = tmp_path / "home"
    home.mkdir(mode=0)
    if not os.geteuid():
        os.chown(home, 65534, 65534)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    with serving(tmp_path, within=without_overriding()) as server:
        assert text_of(server)
        log = server.errors
        eventually(lambda: "cannot be kept in" in log.read_text(), START_S)
        assert "Traceback" not in log.read_text()
    command = [*without_overriding(), *WEFT]
    for words, code in ((["info"], 0), (["cache", "list"], 2), (["cache", "clear"], 2)):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (code, code // 2), done.stderr
        assert code == 0 or "Permission denied" in done.stderr


@pytest.mark.usefixtures("cache")
def test_a_checkpoint_that_changes_under_a_server_is_told(tmp_path):
    """The next engine answers with it, as after a new start, but nobody has asked for that."""
    model = tmp_path / "model"
    shutil.copytree(BUILTIN, model)
    with serving(tmp_path, "--model", str(model), "--no-standby") as server:
        text = text_of(server)
        os.kill(server.children()["weft-engine"].pid, signal.SIGKILL)
        assert text_of(server) == text
        assert CHANGED not in server.errors.read_text()
        cut_weights(model)
        os.kill(server.children()["weft-engine"].pid, signal.SIGKILL)
        assert text_of(server) != text
        assert server.errors.read_text().count(CHANGED) == 1


def test_weights_are_written_before_the_engine_measures_itself(cache, tmp_path):
    """Else the writer makes way for the steps that are measured, and disturbs them."""
    measuring = "Measuring the costs of steps while idle"
    with serving(tmp_path, "--log-level", "info", "--self-profile-s", "60") as server:
        eventually(lambda: measuring in server.errors.read_text(), START_S)
        said = server.errors.read_text()
        assert KEPT in said[: said.index(measuring)]
        assert kept(cache)


def test_processes_share_the_pages(cache, tmp_path):
    with serving(tmp_path) as server:
        text = text_of(server)
        eventually(lambda: bool(kept(cache)), START_S)
    (file,) = kept(cache)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with serving(folders[0], "--standby") as one, serving(folders[1]) as other:
        assert text_of(one) == text_of(other) == text
        engines = [server.children()["weft-engine"] for server in (one, other)]
        assert all(mapped_bytes(engine, file, "Rss") > 5 * MIB for engine in engines)
        assert sum(mapped_bytes(engine, file, "Pss") for engine in engines) < 1.1 * size(file)
        eventually(lambda: has_mapped(one.children().get("weft-standby"), file), START_S)
        standby = one.children()["weft-standby"]
        assert mapped_bytes(standby, file, "Rss") < 5 * MIB  # what it has not read takes nothing
        engines[0].kill()
        eventually(lambda: pid_of(one.children().get("weft-engine")) == standby.pid, START_S)
        assert text_of(one) == text
        assert mapped_bytes(standby, file, "Rss") > 5 * MIB


def test_a_file_that_is_cut_while_it_is_mapped_ends_one_engine(cache, tmp_path):
    with serving(tmp_path) as server:
        text = text_of(server)
        eventually(lambda: bool(kept(cache)), START_S)
    (file,) = kept(cache)
    folder = tmp_path / "again"
    folder.mkdir()
    with serving(folder) as server:
        assert MAPPED in server.errors.read_text()
        os.truncate(file, 0)
        assert text_of(server) == text
        assert server.errors.read_text().count("could not be read (SIGBUS)") == 1
        assert kept(cache) == [file]


def size(file: Path) -> int:
    return file.stat().st_size


def pid_of(process: psutil.Process | None) -> int:
    return 0 if process is None else process.pid


def has_mapped(process: psutil.Process | None, file: Path) -> bool:
    return process is not None and str(file) in Path(f"/proc/{process.pid}/maps").read_text()


def mapped_bytes(process: psutil.Process, file: Path, name: str) -> int:
    """Bytes of a file that a process has mapped, as a line of ``smaps`` counts them."""
    found, inside = 0, False
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        if not line.split(":")[0].isidentifier():
            inside = line.endswith(str(file))
        elif inside and line.startswith(f"{name}:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.parametrize("packed_cache", ["off", "1GiB"])
def test_a_process_that_ends_at_once_leaves_no_half(cache, packed_cache):
    with LLM(model="builtin", packed_cache=packed_cache, kv_memory="16MiB", threads=1) as llm:
        assert llm.generate(["x"], SamplingParams(max_tokens=1))
    assert not list(cache.glob("*.partial"))
    assert all(packed_cache != "off" and size(file) > 10 * MIB for file in kept(cache))
