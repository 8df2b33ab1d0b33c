"""Flags of the command line, made from the declarations of settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Container, Iterator, Mapping
from typing import Any

from weft.core.addresses import DEFAULT_URL
from weft.core.errors import ConfigError, WeftError, suggest
from weft.core.settings import Setting, load_config_file, settings_of

# Nested: in a file.
NOT_ON_COMMAND_LINE = frozenset({"classes", "logit_bias", "bad_token_sequences"})
EVERYDAY = "everyday settings"
HELP_ALL = "--help-all"


def add_settings(
    parser: argparse.ArgumentParser, title: str, declared_by: Any, there: Container[str] = ()
) -> None:
    """Add a flag for each setting; one that is ``there`` by the same name serves for both.

    Where a class declares everyday settings, these come first, in a group of their own, and
    ``--help`` shows no others.
    """
    flags = [
        declared
        for declared in settings_of(declared_by).values()
        if declared.name not in NOT_ON_COMMAND_LINE and declared.name not in there
    ]
    everyday = [declared for declared in flags if declared.everyday]
    if everyday:
        first = _group(parser, EVERYDAY)
        for declared in everyday:
            add_setting(first, declared)
        if HELP_ALL not in parser._option_string_actions:
            text = "show all settings, also those that few need"
            parser.add_argument(HELP_ALL, action="help", help=text)
    group = _group(parser, f"{title} settings")
    for declared in flags:
        if not declared.everyday:
            add_setting(group, declared).rare = bool(everyday)  # type: ignore[attr-defined]


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser, and of those of commands within it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for within in action.choices.values():
                yield from actions_of(within)
        yield action


def hide_rare(parser: argparse.ArgumentParser) -> None:
    """Leave settings out of the help that are for ``--help-all``."""
    for action in actions_of(parser):
        if getattr(action, "rare", False):
            action.help = argparse.SUPPRESS


def _group(parser: argparse.ArgumentParser, title: str) -> Any:
    """The group of a parser with a title, which is made if there is none."""
    groups = (group for group in parser._action_groups if group.title == title)
    return next(groups, None) or parser.add_argument_group(title)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model as a word: the setting ``model`` without its flag."""
    help = "folder, GGUF file or name on the hub, such as Qwen/Qwen3-0.6B; the same as --model"
    parser.add_argument("named", nargs="?", metavar="MODEL", help=help)


def add_models(parser: argparse.ArgumentParser, declared: Setting) -> None:
    """Add models as words and by the flag of the setting ``model``; both may be repeated."""
    help = (
        "folder, GGUF file or name on the hub, such as Qwen/Qwen3-0.6B, the same as --model; "
        "several, or a folder of them, sleep and wake"
    )
    parser.add_argument("named", nargs="*", metavar="MODEL", help=help)
    text = f"{declared.help}; may be repeated, and be NAME=MODEL".replace("%", "%%")
    flag = _group(parser, EVERYDAY).add_argument(
        declared.flag, action="append", default=[], metavar="MODEL", help=text
    )
    _declared(flag, declared)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that asks a server."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the server ({DEFAULT_URL})")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="the server's key; OPENAI_API_KEY by default",
    )


def add_setting(group: Any, declared: Setting) -> argparse.Action:
    """Add the flag of a setting to a parser or a group of one."""
    facts = [declared.kind, declared.bounds(), f"default {_shown(declared)}"]
    text = f"{declared.help} ({'; '.join(fact for fact in facts if fact)})".replace("%", "%%")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if declared.kind == "bool":
        switch = argparse.BooleanOptionalAction
        return _declared(group.add_argument(declared.flag, action=switch, **options), declared)

    def parse(word: str) -> Any:
        try:
            value = declared.parse(word)
            return value if declared.kind == "strings" else declared.check(value)
        except WeftError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    options |= {"type": parse, "metavar": declared.name.upper()}
    if declared.kind == "strings":
        options["action"] = "append"
    return _declared(group.add_argument(declared.flag, **options), declared)


def _declared(action: argparse.Action, declared: Setting) -> argparse.Action:
    """The action of a flag, which knows its setting: completions derive from it."""
    action.declared = declared  # type: ignore[attr-defined]
    return action


def _shown(declared: Setting) -> str:
    if declared.optional:
        return "unset"
    if declared.kind == "bool":
        return str(declared.default).lower()
    return str(declared.default) if declared.default != () else "none"


def given_settings(options: Mapping[str, Any], *declared_by: Any) -> list[dict[str, Any]]:
    """Merge config file and flags; return one mapping for each declaring class.

    Raises:
        ConfigError: the file has a setting that nobody declares, or two models are named.
    """
    values: dict[str, Any] = {}
    known = [settings_of(cls) for cls in declared_by]
    names = {name for settings in known for name in settings}
    if (path := options.get("config")) is not None:
        for name, value in load_config_file(path).items():
            if name not in names:
                raise ConfigError(
                    f"{path}: unknown setting '{name}'.{suggest(name, names)}", param=name
                )
            values[name] = value
    model = named_model(options)
    given = options if model is None else {**options, "model": model}
    values |= {name: value for name, value in given.items() if name in names}
    return [{name: values[name] for name in settings if name in values} for settings in known]


def named_model(options: Mapping[str, Any]) -> str | None:
    """The model that the command line names, as a word or by ``--model``; None if it does not.

    Raises:
        ConfigError: it names two.
    """
    word = options.get("named")
    model: str | None = options.get("model")
    if word is not None and model not in (None, word):
        raise ConfigError(f"Two models are named: {word} and --model {model}. Leave one out.")
    return model if word is None else word
