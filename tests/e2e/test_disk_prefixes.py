"""A server with prefixes on disk: they outlive memory, engines and the server itself."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx

from live import START_S, Server, eventually, refused, run, serving

PROMPT = "def total(values):\n    return sum(values)\n\n\n" * 20


def complete(server: Server, prompt: str = PROMPT) -> tuple[str, int]:
    """The text that follows a prompt, and how many of its tokens came from a cache."""
    body = {"model": "builtin", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def saved(server: Server) -> float:
    return server.metrics("weft:kv_disk_blocks_saved_total")[0]


def test_a_prefix_outlives_the_engine_and_the_server(tmp_path: Path) -> None:
    """It is saved when the engine is idle; the next engine and a new server have it.

    Memory has nothing for an engine that follows one which crashed.
    """
    disk = tmp_path / "disk"
    settings = ("--kv-disk", str(disk), "--kv-disk-size", "64MiB")
    with serving(tmp_path, *settings) as server:
        assert f"kept in {disk}, 64.00 MiB at most" in server.errors.read_text()
        text, cached = complete(server)
        assert cached == 0
        eventually(lambda: saved(server) > 10, START_S)
        server.children()["weft-engine"].send_signal(signal.SIGSEGV)
        again, cached = complete(server)
        assert again == text
        assert cached > 200
        eventually(lambda: server.metrics("weft:kv_disk_tokens_total")[0] == cached, START_S)
    with serving(tmp_path, *settings) as server:
        assert complete(server) == (text, cached)
        assert server.metrics("weft:kv_disk_blocks_missing_total") == [0.0]
        assert f"cached prefixes kept in {disk}" in httpx.get(f"{server.url}/server_info").text
        for path in disk.rglob("*.kv"):
            path.write_bytes(path.read_bytes()[:-3])
    with serving(tmp_path, *settings) as server:
        assert complete(server) == (text, 0)
        assert server.metrics("weft:kv_disk_blocks_missing_total") == [1.0]


def test_a_prefix_is_saved_when_the_server_stops(tmp_path: Path) -> None:
    with serving(tmp_path, "--kv-disk", str(tmp_path)) as server:
        complete(server)
    assert list(tmp_path.rglob("*.kv"))


def test_wrong_settings_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = run("serve", "--port", "0", "--kv-disk", str(tmp_path / "file"))
    refused(wrong, "kv_disk", "cannot be written", "Not a directory")
    wrong = run("serve", "--kv-disk", str(tmp_path), "--no-prefix-caching")
    refused(wrong, "kv_disk", "prefix_caching is off")
