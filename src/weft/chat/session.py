"""A chat on a terminal: reads messages and commands, shows answers, and keeps whole turns.

A turn gets into the conversation once its answer is complete. One that Ctrl-C has stopped counts as
complete, marked as stopped, if it has text and would not replace another one. Whatever fails leaves
the conversation as it was, and puts the message back into the input line.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import termios
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.chat.asking import AskSettings, StreamedAnswer, call_words
from weft.chat.client import ChatClient, UsableClass
from weft.chat.commands import ALSO, COMMANDS, run_command, words_after
from weft.chat.conversation import Conversation, Message, answered
from weft.chat.line import ChatCompleter, InputLine, without_quotes
from weft.chat.screen import Screen
from weft.core.errors import WeftError

LOCAL_FLAGS = 3  # their place in what termios gets and sets
ENDING = (signal.SIGTERM, signal.SIGHUP)
WELCOME = "Enter sends, Alt-Enter begins a new line, /help shows the commands."


class ChatSession:
    """One chat.

    Attributes:
        draft: what the input line has at first when the user writes next.
        replaces: whether the next message takes the place of the last turn.
        models, classes: those of the server that are known so far.
        over: whether the user has asked for the end.
    """

    def __init__(
        self,
        client: ChatClient,
        asked: AskSettings,
        conversation: Conversation,
        history: Path,
        screen: Screen,
    ) -> None:
        self.client: ChatClient = client
        self.asked: AskSettings = asked
        self.conversation: Conversation = conversation
        self.screen: Screen = screen
        texts = {name: command.help for name, command in COMMANDS.items()}
        self.line = InputLine(history, ChatCompleter(texts, lambda name: words_after(self, name)))
        self.draft, self.replaces, self.over = "", False, False
        self.models: list[str] = []
        self.classes: list[UsableClass] = []
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Chat until the end of input or ``/quit``; returns the exit status."""
        with quiet_terminal():
            return await self._run()

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for number in ENDING:
            loop.add_signal_handler(number, self._end)
        self.screen.say(f"{self.asked.model} at {self.client.name}. {WELCOME}")
        await self.until_interrupted(self._look_around())
        while not self.over:
            draft, self.draft = self.draft, ""
            text = await self.line.read(draft)
            if text is None:
                break
            self.replaces = self.replaces and not self.line.cleared
            await self._take(text)
        await self.client.aclose()
        return 0

    async def _look_around(self) -> None:
        """Ask for what completion offers; a server that does not tell is no harm."""
        with contextlib.suppress(WeftError, TimeoutError):
            self.models = await asyncio.to_thread(self.client.models)
            self.classes = await asyncio.to_thread(self.client.classes)

    async def _take(self, text: str) -> None:
        """Do what the user has written."""
        text = ALSO.get(text.rstrip(), text)
        if text.startswith("/"):
            self.replaces = False
            try:
                await run_command(self, text)
            except WeftError as error:
                self.screen.complain(error.message)
            except (OSError, RuntimeError, ValueError) as error:  # what a name of a file may raise
                why = (error.strerror if isinstance(error, OSError) else None) or str(error)
                self.screen.complain(f"{text.split()[0]} cannot be done: {why.rstrip('.')}.")
        elif message := without_quotes(text):
            turns = len(self.conversation.turns)
            at = turns - 1 if self.replaces else turns
            if await self.ask([{"role": "user", "content": message}], at):
                self.replaces = False
            else:
                self.draft = text
        else:
            self.replaces = False

    async def ask(self, question: Sequence[Message], at: int) -> bool:
        """Ask, and keep the turn after the first ``at`` ones; False if there is nothing to keep."""
        body = self.asked.body([*self.conversation.messages(at), *question])
        answer, view = StreamedAnswer(), self.screen.view()
        instead = at < len(self.conversation.turns)  # of an answer that is there
        try:
            whole = await self.until_interrupted(answer.read(self.client, body, view))
        except WeftError as error:
            view.end()
            self.screen.complain(error.message)
            if instead:
                self.screen.say("[the answer that was there stays]")
            return False
        finally:
            view.end()
        if not whole and instead:
            self.screen.say("[stopped; the answer that was there stays]")
            return False
        if not whole and not answer.text.strip():
            self.screen.say("[stopped before the answer began; nothing of it is kept]")
            return False
        self.conversation.put(
            answered(
                question,
                answer.text,
                reasoning=answer.reasoning,
                calls=answer.calls if whole else (),
                stopped=not whole,
            ),
            at,
        )
        self._tell(answer, whole=whole)
        return True

    def _tell(self, answer: StreamedAnswer, *, whole: bool) -> None:
        """Say what there is to say about an answer."""
        for call in answer.calls if whole else ():
            self.screen.show(call_words(call))
        if not whole:
            self.screen.say("[stopped; the conversation keeps the answer as far as it came]")
        elif answer.finish == "length":
            self.screen.say("[cut off: max_tokens, or the end of the model's context]")
        if self.asked.usage:
            self.screen.say(answer.usage(self.asked.service_class))
        self.screen.show("")

    async def until_interrupted(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do something to its end, or until Ctrl-C; whether it came to its end."""
        self._task = asyncio.create_task(work)
        try:
            await self._task
        except asyncio.CancelledError:
            if not self._task.cancelled():
                self._task.cancel()
                raise
            return False
        finally:
            self._task = None
        return True

    def _end(self) -> None:
        """End the chat from outside; the terminal is left as it was."""
        self.over = True
        if self._task is not None:
            self._task.cancel()
        else:
            self.line.end()

    def _interrupt(self) -> None:
        """Handle Ctrl-C; the input line takes it as a key."""
        if self._task is not None:
            self._task.cancel()
        else:
            self.line.interrupt()


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Have the terminal not show what is typed while nobody reads, and keep it for who reads next.

    Ctrl-C stays a signal; the input line changes what it needs while it reads.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
    except termios.error:
        yield
        return
    quiet = list(before)
    quiet[LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
