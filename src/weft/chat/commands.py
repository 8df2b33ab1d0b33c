"""The commands of a chat: words that begin with a slash."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from weft.chat import conversation as conversations
from weft.chat.asking import OFF, ON, UNSET
from weft.chat.client import ChatRefusedError
from weft.core.class_table import target_words
from weft.core.errors import ParameterError, suggest

if TYPE_CHECKING:
    from weft.chat.session import ChatSession

KEYS = {
    "Enter": 'sends; after a backslash, or between """, it begins a new line',
    "Alt-Enter": "begins a new line",
    "Up, Ctrl-R": "what you wrote before",
    "Tab": "completes commands, names and files",
    "Ctrl-C": "stops an answer; clears what you write",
    "Ctrl-D": "ends the chat",
}
# What other programs have users type to leave them, or for help.
ALSO = dict.fromkeys(("exit", "quit", "/exit", "/bye"), "/quit") | {"help": "/help", "/?": "/help"}
T = TypeVar("T")
NONE = "none"
USUAL = "usual"


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """What a command is called with and does.

    Attributes:
        words: what may follow it, for completion; None for names of files.
    """

    usage: str
    help: str
    run: Callable[[ChatSession, str], Awaitable[None]]
    words: Callable[[ChatSession], Iterable[str]] | None = lambda _: ()


async def run_command(session: ChatSession, text: str) -> None:
    """Run the command that a line is.

    Raises:
        WeftError: there is none of that name, or it cannot be done.
    """
    name, _, rest = text.partition(" ")
    name, rest = name.strip(), rest.strip()
    if name not in COMMANDS:
        raise ParameterError(
            f"There is no command {name}.{suggest(name, COMMANDS)} /help shows all; a message that "
            "begins with a slash needs a space before it."
        )
    if rest and not COMMANDS[name].usage:
        raise ParameterError(f"{name} takes nothing after it.")
    await COMMANDS[name].run(session, rest)


def words_after(session: ChatSession, name: str) -> Iterable[str] | None:
    """What may follow a command; None for names of files."""
    command = COMMANDS.get(name)
    if command is None:
        return ()
    return None if command.words is None else command.words(session)


async def _help(session: ChatSession, _: str) -> None:
    session.screen.table((f"{name} {c.usage}".strip(), c.help) for name, c in COMMANDS.items())
    session.screen.table(KEYS.items())


async def _told(session: ChatSession, ask: Callable[[], T]) -> T | None:
    """What the server says; None after Ctrl-C. Raises ChatRefusedError if it says nothing."""
    found: list[T] = []

    async def wait() -> None:
        found.append(await asyncio.to_thread(ask))

    try:
        await session.until_interrupted(wait())
    except TimeoutError:
        raise ChatRefusedError(f"{session.client.name} does not answer yet; try again.") from None
    if not found:
        session.screen.say("[stopped]")
        return None
    return found[0]


async def _model(session: ChatSession, name: str) -> None:
    models = await _told(session, session.client.models)
    if models is None:
        return
    session.models = models
    if not name:
        for known in session.models:
            session.screen.show(f"{'*' if known == session.asked.model else ' '} {known}")
        return
    if name not in session.models:
        raise ParameterError(
            f"{session.client.name} does not serve '{name}'.{suggest(name, session.models)} "
            "/model shows what it serves."
        )
    session.asked.model = name
    session.screen.say(f"{name} answers from now on.")


async def _class(session: ChatSession, name: str) -> None:
    classes = await _told(session, session.client.classes)
    if classes is None:
        return
    session.classes = classes
    if not name:
        chosen = session.asked.service_class
        for row in session.classes:
            mark = row.name == chosen or (chosen is None and row.usual)
            targets = target_words(row.ttft_s, row.tpot_s) or "best effort"
            session.screen.show(f"{'*' if mark else ' '} {row.name}: {targets}")
        return
    if name == USUAL:
        session.asked.service_class = None
        session.screen.say("The server chooses the class.")
        return
    known = [row.name for row in session.classes]
    if name not in known:
        raise ParameterError(
            f"This key may not use a class '{name}'.{suggest(name, known)} It may use: "
            f"{', '.join(known)}."
        )
    session.asked.service_class = name
    session.screen.say(f"Messages are of the class {name} from now on.")


async def _retry(session: ChatSession, _: str) -> None:
    turns = session.conversation.turns
    if not turns or turns[-1].asked is None:
        raise ParameterError("There is no message to ask again.")
    await session.ask(turns[-1].question, len(turns) - 1)


async def _edit(session: ChatSession, _: str) -> None:
    turns = session.conversation.turns
    text = turns[-1].asked if turns else None
    if text is None:
        raise ParameterError("There is no message to edit.")
    session.draft, session.replaces = text, True
    session.screen.say(
        "What you send now takes the place of your last message and its answer; Ctrl-C leaves both."
    )


async def _save(session: ChatSession, name: str) -> None:
    path = _path(name, "/save")
    if not session.conversation.messages():
        raise ParameterError("There is nothing to save yet.")
    if path.exists() and not await session.line.agrees(f"{path} exists. Replace it?"):
        session.screen.say("Nothing is saved.")
        return
    conversations.save(session.conversation, path)
    session.screen.say(f"Saved to {path}.")


async def _load(session: ChatSession, name: str) -> None:
    loaded, unanswered = conversations.load(_path(name, "/load"))
    if not session.conversation.saved and not await session.line.agrees(
        "This conversation is not saved. Forget it?"
    ):
        session.screen.say("Nothing is loaded.")
        return
    session.conversation, session.draft = loaded, unanswered
    count = len(loaded.turns)
    session.screen.say(f"{count} turn{'s' * (count != 1)} loaded.")
    if loaded.turns and (asked := loaded.turns[-1].asked) is not None:
        session.screen.say(f"The last message was: {asked}")


def _path(name: str, command: str) -> Path:
    if not name:
        raise ParameterError(f"Name a file: {command} FILE")
    return Path(name).expanduser()


async def _system(session: ChatSession, text: str) -> None:
    conversation = session.conversation
    if not text:
        session.screen.show(conversation.system or "There is no system message.")
        return
    conversation.system = None if text == NONE else text
    conversation.saved = False
    session.screen.say(f"The system message is {'set' if conversation.system else 'removed'}.")


async def _clear(session: ChatSession, _: str) -> None:
    session.conversation.clear()
    session.screen.say("A new conversation begins.")


async def _set(session: ChatSession, text: str) -> None:
    name, _, word = text.partition(" ")
    if not name:
        session.screen.table(session.asked.settings().items())
        return
    if not word.strip():
        raise ParameterError(f"Give a value: /set {name} VALUE, or /set {name} {UNSET}")
    session.asked.set(name, word.strip())
    session.screen.say(f"{name} is {word.strip()}.")


async def _reasoning(session: ChatSession, _: str) -> None:
    turns = session.conversation.turns
    reasoning = turns[-1].reasoning if turns else ""
    session.screen.say(reasoning.strip() or "The last answer has no reasoning.")


async def _quit(session: ChatSession, _: str) -> None:
    session.over = True


COMMANDS = {
    "/help": ChatCommand("", "show the commands", _help),
    "/model": ChatCommand(
        "[NAME]", "show the models of the server, or choose one", _model, lambda s: s.models
    ),
    "/class": ChatCommand(
        "[NAME]",
        f"show the service classes that you may use, or choose one; {USUAL}: the server's choice",
        _class,
        lambda s: [*(row.name for row in s.classes), USUAL],
    ),
    "/retry": ChatCommand("", "ask for another answer to your last message", _retry),
    "/edit": ChatCommand("", "change your last message, and ask again", _edit),
    "/reasoning": ChatCommand("", "show the reasoning of the last answer", _reasoning),
    "/system": ChatCommand(
        "[TEXT]", f"show or set the system message; {NONE} removes it", _system, lambda _: [NONE]
    ),
    "/set": ChatCommand(
        "[NAME VALUE]",
        f"show or change settings: temperature, ..., usage {ON} or {OFF}; {UNSET}: the default",
        _set,
        lambda s: s.asked.settings(),
    ),
    "/save": ChatCommand("FILE", "write the conversation as JSON", _save, None),
    "/load": ChatCommand("FILE", "go on with a conversation that was saved", _load, None),
    "/clear": ChatCommand("", "begin a new conversation", _clear),
    "/quit": ChatCommand("", "end the chat, as Ctrl-D does", _quit),
}
