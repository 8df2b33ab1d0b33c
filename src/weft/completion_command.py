"""``weft completion``: prints the script by which a shell completes commands, flags and values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import shtab

from weft.cli import command_line
from weft.core.flags import actions_of
from weft.core.settings import Setting

SHELLS = {
    "bash": 'eval "$(weft completion bash)"    # in ~/.bashrc',
    "zsh": "weft completion zsh > ~/.zfunc/_weft    # a folder of fpath",
    "fish": "weft completion fish > ~/.config/fish/completions/weft.fish",
    "tcsh": "weft completion tcsh > ~/.weft.tcsh; source ~/.weft.tcsh    # in ~/.tcshrc",
}
"""For each shell how to have the completion in every session."""
FILES = {"file", "input", "named", "output", "words", "config"}  # arguments that are no settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(run=run_completion, parser=parser)
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that is to complete")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        ["To have it in every session:", *(f"  {s}" for s in SHELLS.values())]
    )


def run_completion(options: Mapping[str, Any]) -> int:
    """Print the script; returns the exit status."""
    parser = command_line(None, whole=True)
    for action in actions_of(parser):
        declared: Setting | None = getattr(action, "declared", None)
        if declared is not None and declared.choices:
            action.choices = declared.choices
        path = declared is not None and declared.kind == "path"
        if path or action.dest in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options["shell"]))
    return 0
