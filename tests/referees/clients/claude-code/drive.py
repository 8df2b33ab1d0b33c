"""Claude Code without a terminal: `claude -p` with a tool, over Anthropic's API.

Runs with any Python; ``claude`` is a program of the environment.
"""

import base64
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import checks

PACKAGE = "claude-code-linux-*"  # the program itself; the one in .bin needs a script to be run
QUIET = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_AUTOUPDATER",
)
VARIABLES = {
    "ANTHROPIC_BASE_URL": checks.URL,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": checks.MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": checks.MODEL,
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(checks.LONG if checks.KNOWN else checks.MAX_TOKENS),
    **dict.fromkeys(QUIET, "1"),
}
CUT = "output token maximum"  # how it says that an answer was cut short
LIMIT_S = 240


def command(prompt: str, *more: str) -> list[str]:
    """A command that prints its events as lines of JSON."""
    programs = Path(os.environ["PATH"].split(":")[0])
    [program] = programs.parent.glob(f"@anthropic-ai/{PACKAGE}/claude")
    given = [str(program), "-p", prompt, "--output-format", "stream-json", "--verbose"]
    given += ["--include-partial-messages", "--allowedTools", "Bash,CronList,Read"]
    if not checks.KNOWN:  # a small model on a CPU: fewer tools, shorter prompts
        given += ["--tools", "Bash"]
    return [*given, *more]


def start(*given: str) -> "subprocess.Popen[str]":
    # A key that nobody has approved makes a fresh installation ask; a token does not.
    environment = {k: v for k, v in os.environ.items() if k != "ANTHROPIC_API_KEY"} | VARIABLES
    return subprocess.Popen(
        command(*given), env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(*given: str) -> list[dict[str, Any]]:
    """Its events; raises if it says that something failed."""
    process = start(*given)
    said, _ = process.communicate(timeout=LIMIT_S)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    results = [event for event in events if event["type"] == "result"]
    assert results, said[-2000:]
    last = results[-1]
    if CUT in str(last.get("result")) and not checks.KNOWN:
        return events
    assert (process.returncode, last["is_error"]) == (0, False), last["result"]
    assert last["usage"]["output_tokens"] > 0, last
    return events


def result(events: list[dict[str, Any]]) -> str:
    return str(events[-1]["result"])


def first() -> None:
    checks.expect("It is mauve.", result(run(checks.say("It is mauve."))))


def tools() -> None:
    """A tool that is loaded when it is wanted, an image, a command."""
    picture = Path("picture.png").absolute()
    picture.write_bytes(base64.b64decode(checks.PNG))
    lines = [
        checks.call("ToolSearch", query="select:CronList"),
        checks.call("CronList"),
        checks.call("Read", file_path=str(picture)),
        checks.call("Bash", command="echo mau$((1))ve", description="Say it"),
    ]
    checks.expect("mau1ve", result(run("\n".join(lines))))


def stream() -> None:
    events = [event["event"] for event in run(checks.say(checks.WORDS)) if "event" in event]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    checks.expect_pieces([delta["text"] for delta in deltas if delta["type"] == "text_delta"])


def second() -> None:
    run(checks.say("It is mauve."))
    checks.expect("I said: It is mauve.", result(run(checks.RECALL, "--continue")))


def cancel() -> None:
    process = start(checks.WAIT)
    assert process.stdout is not None
    said = any('"content_block_delta"' in line for line in process.stdout)
    assert said or not checks.KNOWN, "it ended by itself"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=checks.IDLE_S)
    checks.wait_until_idle()


checks.run(first=first, tools=tools, stream=stream, second=second, cancel=cancel)
