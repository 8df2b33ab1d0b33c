"""aider without a terminal: it asks, edits a file as the answer says, and goes on."""

import json
import os
import signal
import subprocess
from pathlib import Path

import checks

EDIT = """Here it is.

fruit.txt
```
<<<<<<< SEARCH
plum
=======
mauve plum
>>>>>>> REPLACE
```
"""
FLAGS = (
    "--no-git",
    "--yes-always",
    "--no-analytics",
    "--no-check-update",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--no-pretty",
    "--no-fancy-input",
    "--no-auto-lint",
    "--no-suggest-shell-commands",
    "--disable-playwright",
    "--no-detect-urls",
)
VARIABLES = {
    "OPENAI_API_BASE": f"{checks.URL}/v1",
    "OPENAI_API_KEY": "none",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
CUT = "has hit a token limit"
LIMIT_S = 240
FILE = Path("fruit.txt")
# A list of models that is there and fresh is not downloaded.
PRICES = Path.home() / ".aider/caches/model_prices_and_context_window.json"


def start(*given: str) -> "subprocess.Popen[str]":
    FILE.write_text("plum\n")
    PRICES.parent.mkdir(parents=True, exist_ok=True)
    PRICES.write_text(json.dumps({f"openai/{checks.MODEL}": {"mode": "chat"}}))
    model = ["--model", f"openai/{checks.MODEL}", "--edit-format", "diff", "--map-tokens", "0"]
    settings = Path("settings.yml")
    tokens = checks.LONG if checks.KNOWN else checks.MAX_TOKENS
    settings.write_text(
        f"- name: openai/{checks.MODEL}\n  edit_format: diff\n  weak_model_name: openai/builtin\n"
        f"  extra_params:\n    max_tokens: {tokens}\n"
    )
    model += ["--model-settings-file", str(settings)]
    return subprocess.Popen(
        ["aider", *model, *FLAGS, *given], env=os.environ | VARIABLES, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(*given: str) -> str:
    """What it says; raises if the server refused something."""
    process = start(*given)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said[-2000:]
    assert "litellm." not in said, said[-2000:]
    assert "Tokens:" in said or (CUT in said and not checks.KNOWN), said[-2000:]
    return said


def first() -> None:
    checks.expect("It is mauve.", run("--no-stream", "--message", checks.say("It is mauve.")))


def tools() -> None:
    run("--no-stream", "--message", checks.say(EDIT), str(FILE))
    checks.expect("mauve plum", FILE.read_text())


def stream() -> None:
    checks.expect(checks.WORDS, run("--stream", "--message", checks.say(checks.WORDS)))


def second() -> None:
    """aider remembers a conversation by its history file."""
    run("--message", checks.say("It is mauve."))
    said = run("--restore-chat-history", "--message", checks.RECALL)
    checks.expect("I said:", said)
    checks.expect("It is mauve.", said)


def cancel() -> None:
    process = start("--message", checks.WAIT)
    checks.wait_until_busy(lambda: process.poll() is not None)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=checks.IDLE_S)
    checks.wait_until_idle()


checks.run(first=first, tools=tools, stream=stream, second=second, cancel=cancel)
