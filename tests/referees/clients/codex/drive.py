"""Codex without a terminal: `codex exec` with its shell tool, over the Responses API.

Runs with any Python; ``codex`` is a program of the environment.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import checks

CONFIG = f"""
model = "{checks.MODEL}"
model_provider = "weft"
model_context_window = 131072
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.weft]
name = "weft"
base_url = "{checks.URL}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false

[mcp_servers.fruit]
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(Path(__file__).parent / "fruit_server.py"))}]
"""
PATCH = "*** Begin Patch\n*** Add File: fruit.txt\n+mauve plum\n*** End Patch"
SHOW = "cat fruit.txt"
KNOWN_MODEL = "gpt-5.5"
LIMIT_S = 240


def start(*given: str) -> "subprocess.Popen[str]":
    home = Path.home() / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG)
    return subprocess.Popen(
        ["codex", "exec", "--json", "--skip-git-repo-check", *given],
        env=os.environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(*given: str) -> list[dict[str, Any]]:
    """Its events; raises if it says that something failed."""
    process = start(*given)
    said, _ = process.communicate(timeout=LIMIT_S)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    faults = [event for event in events if event["type"] in ("error", "turn.failed")]
    assert (process.returncode, faults) == (0, []), said[-2000:]
    assert events[-1]["type"] == "turn.completed", said[-2000:]
    assert events[-1]["usage"]["output_tokens"] > 0, events[-1]
    return events


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


def result(events: list[dict[str, Any]]) -> str:
    return " ".join(item["text"] for item in items(events, "agent_message"))


def first() -> None:
    checks.expect("It is mauve.", result(run(checks.say("It is mauve."))))


def tools() -> None:
    """An image, a command, a tool of an MCP server; then a patch by a grammar, and that tool again.

    The model of the catalog patches by a grammar, and has to search for tools of MCP servers.
    """
    picture = Path("picture.png").absolute()
    picture.write_bytes(base64.b64decode(checks.PNG))
    look = checks.call("view_image", path=str(picture))
    lines = [look, checks.call("exec_command", cmd="echo mau$((1))ve")]
    checks.expect("mau1ve", result(run("\n".join(lines))))
    fruit = checks.call("mcp__fruit__colour_of", fruit="plum")
    checks.expect(checks.COLOUR, result(run(fruit)))
    if checks.KNOWN:  # its prompt is long
        lines = [checks.call("apply_patch", input=PATCH), checks.call("exec_command", cmd=SHOW)]
        given = ["-c", f"model_catalog_json={json.dumps(str(catalog()))}"]
        checks.expect("mauve plum", result(run(*given, "\n".join(lines))))
        lines = [checks.call("tool_search", query="colour of a fruit"), fruit]
        checks.expect(checks.COLOUR, result(run(*given, "\n".join(lines))))


def catalog() -> Path:
    """Codex's own record of a model that patches by a grammar, under the served name."""
    bundled = subprocess.check_output(["codex", "debug", "models", "--bundled"], text=True)
    [record] = [model for model in json.loads(bundled)["models"] if model["slug"] == KNOWN_MODEL]
    path = Path("catalog.json").absolute()
    path.write_text(json.dumps({"models": [record | {"slug": checks.MODEL}]}))
    return path


def stream() -> None:
    checks.expect(checks.WORDS, result(run(checks.say(checks.WORDS))))  # it always streams


def second() -> None:
    run(checks.say("It is mauve."))
    checks.expect("I said: It is mauve.", result(run("resume", "--last", checks.RECALL)))


def cancel() -> None:
    process = start(checks.WAIT)
    checks.wait_until_busy(lambda: process.poll() is not None)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=checks.IDLE_S)
    checks.wait_until_idle()


checks.run(first=first, tools=tools, stream=stream, second=second, cancel=cancel)
