"""Flags of the command line, made from the declarations of settings."""

from __future__ import annotations

import argparse
from collections.abc import Container, Mapping
from typing import Any

from weft.core.errors import ConfigError, WeftError, suggest
from weft.core.settings import Setting, load_config_file, settings_of

# Nested: in a file.
NOT_ON_COMMAND_LINE = frozenset({"classes", "logit_bias", "bad_token_sequences"})


def add_settings(
    parser: argparse.ArgumentParser, title: str, declared_by: Any, there: Container[str] = ()
) -> None:
    """Add a flag for each setting; one that is ``there`` by the same name serves for both."""
    group = parser.add_argument_group(f"{title} settings")
    for declared in settings_of(declared_by).values():
        if declared.name not in NOT_ON_COMMAND_LINE and declared.name not in there:
            add_setting(group, declared)


def add_setting(group: Any, declared: Setting) -> None:
    """Add the flag of a setting to a parser or a group of one."""
    facts = [declared.kind, declared.bounds(), f"default {_shown(declared)}"]
    text = f"{declared.help} ({'; '.join(fact for fact in facts if fact)})".replace("%", "%%")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if declared.kind == "bool":
        group.add_argument(declared.flag, action=argparse.BooleanOptionalAction, **options)
        return

    def parse(word: str) -> Any:
        try:
            value = declared.parse(word)
            return value if declared.kind == "strings" else declared.check(value)
        except WeftError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    options |= {"type": parse, "metavar": declared.name.upper()}
    if declared.kind == "strings":
        options["action"] = "append"
    group.add_argument(declared.flag, **options)


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
    named = options.get("named")
    if named is not None and options.get("model", named) != named:
        raise ConfigError(f"Two models are named: {named} and --model {options['model']}.")
    given = options if named is None else {**options, "model": named}
    values |= {name: value for name, value in given.items() if name in names}
    return [{name: values[name] for name in settings if name in values} for settings in known]
