"""``weft chat``: its arguments, and the server that it asks: one that runs, or one of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weft.chat.asking import AskSettings, sampling_settings
from weft.chat.client import ChatClient, NoServerError
from weft.core.addresses import DEFAULT_URL
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, suggest
from weft.core.flags import add_server, add_setting, named_model
from weft.core.settings import Setting, settings_of
from weft.core.state_folder import state_folder

FIRST_LOOK_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(run=run_chat, parser=parser)
    named = "model to talk to; by default the server's first one, or the built-in model"
    parser.add_argument("named", nargs="?", metavar="MODEL", help=named)
    add_server(parser)
    parser.set_defaults(url=None)
    parser.add_argument("--model", default=argparse.SUPPRESS, help="the same")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--class", dest="service_class", metavar="NAME", help="service class")
    parser.add_argument(
        "--usage",
        action=argparse.BooleanOptionalAction,
        help="show tokens and times after each answer (default: on a terminal)",
    )
    group = parser.add_argument_group("sampling settings")
    for declared in sampling_settings().values():
        add_setting(group, declared)
    group = parser.add_argument_group("settings of a server that chat starts")
    for declared in server_settings():
        add_setting(group, declared)


def server_settings() -> list[Setting]:
    """The settings of a server that chat starts, beside the model."""
    everyday = (one for one in settings_of(EngineConfig).values() if one.everyday)
    return [one for one in everyday if one.name != "model"]


def run_chat(options: Mapping[str, Any]) -> int:
    """Chat on a terminal, or answer what standard input has; returns the exit status.

    Raises:
        ConfigError: an argument is wrong, or standard input has no message.
        WeftError: there is no server, and none can be started, or an answer has failed.
    """
    named_model(options)  # wrong use is told before a message is read
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    usage = interactive if options["usage"] is None else options["usage"]
    sampling = {name: options[name] for name in sampling_settings() if name in options}
    if interactive:
        from weft.chat.screen import Screen

        screen = Screen()
        say = screen.say
    else:
        from weft.chat.plain import answer_once, read_message
        from weft.chat.plain import say_to_errors as say

        message = read_message()
    with _server(options, say) as (client, model):
        asked = AskSettings(model, options["service_class"], sampling, usage)
        if not interactive:
            return asyncio.run(answer_once(client, asked, options["system"], message))
        from weft.chat.conversation import Conversation
        from weft.chat.line import line_output
        from weft.chat.session import ChatSession

        history = state_folder() / "chat" / "history.jsonl"
        with line_output():
            session = ChatSession(client, asked, Conversation(options["system"]), history, screen)
            return asyncio.run(session.run())


@contextlib.contextmanager
def _server(
    options: Mapping[str, Any], say: Callable[[str], None]
) -> Iterator[tuple[ChatClient, str]]:
    """A client of the server to ask, and the name of the model there."""
    model, url = named_model(options), options["url"]
    given = {one: options[one.name] for one in server_settings() if one.name in options}
    with contextlib.closing(ChatClient(url or DEFAULT_URL, options["api_key"])) as client:
        there = _models(client, say, there=url is not None)
        if there and url is None and model is not None and model not in there:
            say(f"{client.name} serves {', '.join(there)}, not {model}")
            there = []
        if there:
            if given:
                flags = ", ".join(one.flag for one in given)
                raise ConfigError(
                    f"{flags} would be for a server that chat starts, but one runs at "
                    f"{client.name}. Leave that out, or end that server."
                )
            yield client, _served(model, there, client.name)
            return
    from weft.chat.own_server import own_server

    _fetch(model)
    settings = [word for one, value in given.items() for word in (one.flag, str(value))]
    with own_server(model, settings, state_folder() / "chat", say) as client:
        yield client, client.models()[0]


def _models(client: ChatClient, say: Callable[[str], None], *, there: bool) -> list[str]:
    """What a server serves; none if it need not be there, and is not."""
    try:
        try:
            return client.models(FIRST_LOOK_S)
        except TimeoutError:
            say(f"waiting for {client.name}, which does not answer yet")
            return client.models(None)
    except NoServerError:
        if there:
            raise
        return []


def _served(model: str | None, there: list[str], name: str) -> str:
    """The name of the model to ask. Raises ConfigError if it is not there."""
    if model is None:
        return there[0]
    if model not in there:
        raise ConfigError(
            f"{name} does not serve '{model}'.{suggest(model, there)} It serves: "
            f"{', '.join(there)}."
        )
    return model


def _fetch(model: str | None) -> None:
    """Fetch a model of the hub here, where bars can show how far that is."""
    if model is None:
        return
    from weft.core.starting import show_start
    from weft.models.hub import local_source, resolve_model

    if local_source(model) is None:
        show_start("lines")
        resolve_model(model)
