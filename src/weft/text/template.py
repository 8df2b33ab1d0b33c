"""Chat templates: renders messages to the model's prompt format, and encodes it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from weft.core.errors import ParameterError, TemplateError, TokenizerError
from weft.core.json_files import read_text
from weft.core.logs import notice
from weft.text.assets import NAMED_TOKENS, named_tokens, read_config
from weft.text.control import AddedToken, TextPiece
from weft.text.isolated import Failure
from weft.text.quoting import (
    Alphabet,
    from_user,
    has_quoted,
    plain_data,
    refuse_surrogates,
)
from weft.text.renderer import Renderer, TemplateSource, shared_renderer
from weft.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
GLOBALS = "range dict cycler joiner namespace raise_exception strftime_now"
_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "with_images",
        "tokenize",
        "additional_special_tokens",
        *NAMED_TOKENS,
        *GLOBALS.split(),
    }
)
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TOO_COSTLY = {
    "time": "takes more than 1 s of CPU time",
    "memory": "needs more than 64 MiB of memory",
}


class ChatTemplate:
    """The chat templates of one model. Immutable; safe to share between threads.

    They run in the process of a `Renderer`, which bounds their time and memory, so their source may
    be anybody's.

    Attributes:
        sources: template text by name; "default", and perhaps "tool_use" for calls with tools.
        special_tokens: variables such as ``bos_token`` that templates see.
        response_template: the tokeniser's own description of answers, as transformers 5 has it.
        variables: names that any of the templates reads.
        max_output_chars: `render` refuses to give more.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        response_template: Mapping[str, Any] | None = None,
        max_output_chars: int = MAX_OUTPUT_CHARS,
        renderer: Renderer | None = None,
    ) -> None:
        """Compile the templates.

        Args:
            renderer: where they run; None: the process that all others share. Who waits for a slow
                template there keeps the others waiting.

        Raises:
            TokenizerError: one is not a valid template, or none is called "default".
            RendererDeadError: there can be no process to run them.
        """
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens or {})
        self.response_template = response_template
        self.max_output_chars = max_output_chars
        if "default" not in self.sources:
            raise TokenizerError(
                f"The model has chat templates {sorted(self.sources)} but none called 'default'; "
                "pass --chat-template FILE."
            )
        self._renderer = renderer or shared_renderer()
        self._sources = {name: TemplateSource.of(text) for name, text in self.sources.items()}
        self.variables: frozenset[str] = frozenset().union(
            *(self._compile(name, source) for name, source in self._sources.items())
        )
        self._reserved = _RESERVED | self.special_tokens.keys()
        self._controls: dict[int, tuple[Tokenizer, _Controls]] = {}

    def _compile(self, name: str, source: TemplateSource) -> frozenset[str]:
        found = self._renderer.compile(source)
        if not isinstance(found, Failure):
            return found
        costly = found.kind in _TOO_COSTLY
        why = "it takes too much time or memory to compile" if costly else found.detail
        raise TokenizerError(
            f"The chat template '{name}' is not valid: {why}; pass another one with "
            "--chat-template FILE."
        )

    @classmethod
    def load(cls, folder: Path, *, file: Path | None = None) -> ChatTemplate:
        """Load the template of a model folder.

        The first of these counts: ``file``; ``chat_template.jinja`` (with
        ``additional_chat_templates/*.jinja``); ``chat_template`` in ``tokenizer_config.json``, a
        string or a list of named templates.

        Raises:
            TokenizerError: there is none, or it is not a valid template.
        """
        folder = Path(folder)
        config = read_config(folder)
        declared = config.get("response_template") if file is None else None
        declared = declared if isinstance(declared, dict) else None
        sources = _find_sources(folder, config, file)
        return cls(sources, named_tokens(config), response_template=declared)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt as text, as transformers' ``apply_chat_template`` renders it.

        The text does not tell a control token of the template from one spelled in a message; to get
        ids use `encode_chat`.

        Args:
            messages: dicts with a role and whatever else the template knows; values None are left
                out.
            add_generation_prompt: end with the header of the assistant's answer.
            tools: JSON descriptions of functions; uses the template "tool_use" if there is one.
            kwargs: further variables of the template, such as ``enable_thinking``.

        Raises:
            ParameterError: a keyword is reserved, or messages or tools are not JSON values.
            TemplateError: the template refused the conversation, failed, gave too much text, or
                took too much time or memory.
            RendererDeadError: the process of the renderer is gone and cannot be replaced.
        """
        return self._render(messages, add_generation_prompt, tools, kwargs, None)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        alphabet: Alphabet | None,
    ) -> str:
        """Render, with text from outside in ``alphabet`` if one is given."""
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise ParameterError("A chat needs at least one message.", param="messages")
        self.check_variables(kwargs)
        user = _quoter(alphabet, by_model=False)
        variables = {
            **self.special_tokens,
            "documents": None,
            **plain_data(dict(kwargs), user),
            "messages": [_message(message, alphabet) for message in messages],
            "tools": plain_data(tools, user),
            "add_generation_prompt": add_generation_prompt,
        }
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        chars = None if alphabet is None else alphabet.chars
        source, limit = self._sources[name], self.max_output_chars
        try:
            text = self._renderer.render(source, variables, chars, limit)
        except ValueError as error:
            raise ParameterError(f"Messages and tools must be JSON values: {error}.") from error
        if isinstance(text, Failure):
            detail = alphabet.plain(text.detail) if alphabet is not None else text.detail
            self._fail(text.kind, detail)
        return text

    def check_variables(self, names: Iterable[str]) -> None:
        """Refuse names that a request may not set as variables of the template.

        `render` checks its keywords; call this before spreading those of a request into a call, so
        that they cannot set its other parameters.

        Raises:
            ParameterError: a name is reserved, or is no name.
        """
        for name in names:
            if name in self._reserved or name.startswith("_") or not name.isidentifier():
                raise ParameterError(
                    f"'{name}' cannot be set for a chat template: the name is reserved.",
                    param="chat_template_kwargs",
                )

    def _fail(self, kind: str, detail: str) -> NoReturn:
        if kind == "long":
            raise TemplateError(
                f"The rendered prompt has more than {self.max_output_chars} characters; send "
                "shorter messages."
            )
        if kind in _TOO_COSTLY:
            raise TemplateError(
                f"The chat template {_TOO_COSTLY[kind]} for this conversation, so it was stopped; "
                "pass another one with --chat-template FILE."
            )
        if kind == "refused":
            raise TemplateError(
                f"The chat template refused the conversation: {detail}", param="messages"
            )
        raise TemplateError(
            f"The chat template failed ({detail}); check the fields of the messages, or pass "
            "another template with --chat-template FILE.",
            param="messages",
        )

    def _controls_for(self, tokenizer: Tokenizer) -> _Controls:
        """The control tokens with this template; computed once for each tokeniser."""
        entry = self._controls.get(id(tokenizer))
        if entry is None or entry[0] is not tokenizer:
            entry = (tokenizer, _Controls(tokenizer, "\0".join(self.sources.values())))
            self._controls[id(tokenizer)] = entry
        return entry[1]


def has_template(folder: Path, file: str | None) -> bool:
    """Whether there is something to load for ``find_template``."""
    if file is not None:
        return True
    try:
        _find_sources(folder, read_config(folder), None)
    except TokenizerError:
        return False
    return True


def find_template(folder: Path, file: str | None) -> ChatTemplate | None:
    """The chat template of a model, or the one of a file.

    None, with a notice, if the model has none: it serves completions only.

    Raises:
        TokenizerError: the file is no template.
    """
    try:
        return ChatTemplate.load(folder, file=None if file is None else Path(file))
    except TokenizerError as error:
        if file is not None:
            raise
        notice(f"chat is off. {error.message}")
        return None


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    /,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    with_images: Callable[[str], str] | None = None,
    **kwargs: Any,
) -> list[int]:
    """Return the ids of a rendered chat, in which text from outside never becomes a control token.

    Control tokens are the tokeniser's special tokens, added tokens spelled ``<|...|>``, and added
    tokens that the template mentions (``<think>``, ``<tool_call>``), unless made of white space
    only. Those that the template writes are parsed; those that messages, tools or other variables
    spell are encoded as ordinary text. One exception: an assistant's message may spell those that
    only the template makes control tokens, since models write them (``<think>``).

    For any other chat the ids equal those of transformers' ``apply_chat_template``, because the
    text and the call that encodes it are the same. Two steps make that possible. Text from outside
    is rendered in a private alphabet (see `weft.text.quoting`) that survives whatever the template
    does to it and cannot spell a token, so each character of the output tells its origin. Then the
    text, with the original characters back in place, is encoded as usual; only if the control
    tokens that come out are not exactly those that the template wrote is it encoded again by the
    tokeniser's `Guard`, where nothing but a private name is a control token. Comparing ids also
    covers spellings that only normalisation or merges turn into a token.

    With ``continue_final_message`` the prompt ends with the text of the last message, so that the
    model goes on with it; its ``content`` must be a text. What ``with_images`` makes of the
    rendered text, where no message spells a control token any more, is encoded in its place.

    The alternatives lose something: placeholders for whole messages break templates that trim,
    split or compare; sentinels inside or around spelled tokens break those too, and miss a token
    that the template joins from harmless parts.

    A token that a template builds around a value, as Phi's ``'<|' + role + '|>'``, is the
    template's; the caller has to check roles.

    Raises:
        ParameterError, TemplateError: as `ChatTemplate.render`; also for unpaired surrogates.
        TokenizerError: this tokeniser cannot be guarded.
    """
    controls = template._controls_for(tokenizer)
    mark = ""
    if continue_final_message:
        mark = secrets.token_hex(16)  # cannot be guessed; no template changes letters and digits
        last = messages[-1]
        messages = [*messages[:-1], {**last, "content": f"{last['content']}{mark} "}]
    rendered = template._render(
        messages, add_generation_prompt, tools, kwargs, alphabet=controls.alphabet
    )
    if continue_final_message:
        rendered = _left_open(rendered, mark)
    if with_images is not None:
        rendered = with_images(rendered)
    return controls.encode(rendered)


def _left_open(rendered: str, mark: str) -> str:
    """The prompt up to the mark at the end of the last message's text.

    A template that trims messages has trimmed the blank that follows the mark, and would have
    trimmed what stands before it.
    """
    at = str(rendered).rfind(mark)
    if at < 0:
        raise TemplateError(
            "The chat template changes the text of the last message, so that it cannot be "
            "continued.",
            param="continue_final_message",
        )
    text = rendered[:at]
    return text if rendered[at + len(mark) : at + len(mark) + 1] == " " else text.rstrip()


class _Controls:
    """The control tokens of a tokeniser together with a template."""

    def __init__(self, tokenizer: Tokenizer, template_text: str) -> None:
        named = [t for t in tokenizer.added_tokens if t.is_marker or t.content in template_text]
        self._tokenizer = tokenizer
        self._ids = tokenizer.control_ids | {t.token_id for t in named if not t.special}
        self.alphabet = Alphabet(token.content for token in named)

    def encode(self, rendered: str) -> list[int]:
        """Encode text rendered in the alphabet."""
        plain = self.alphabet.plain(rendered)
        ids = self._tokenizer.encode_parsed(plain)
        if not has_quoted(rendered):
            return ids
        pieces = list(self._pieces(rendered))
        meant = [token.token_id for _, token in pieces if token and token.token_id in self._ids]
        if meant == [i for i in ids if i in self._ids]:
            return ids
        return self._tokenizer.guard.encode((text, token is not None) for text, token in pieces)

    def _pieces(self, rendered: str) -> list[tuple[str, AddedToken | None]]:
        """Cut the text at added tokens that are meant; others are part of the text between."""
        pieces: list[tuple[str, AddedToken | None]] = []
        for piece in self._tokenizer.scanner.split(str.__str__(rendered)):
            if piece.token is not None:
                pieces.append((piece.text, piece.token))
            else:
                pieces.extend(self._outside(piece.text))
        return pieces

    def _outside(self, text: str) -> list[tuple[str, AddedToken | None]]:
        """Cut text in which the template wrote no token at the ones that messages may write."""
        pieces: list[tuple[str, AddedToken | None]] = []
        start = 0
        for piece in self._tokenizer.scanner.split(self.alphabet.plain(text)):
            end = start + len(piece.text)
            meant = self._may_spell(piece, text[start:end])
            pieces.append((piece.text, piece.token if meant else None))
            start = end
        return pieces

    def _may_spell(self, piece: TextPiece, quoted: str) -> bool:
        token = piece.token
        if token is None or token.token_id not in self._ids:
            return token is not None
        return not token.is_marker and not from_user(quoted)


def _message(message: Message, alphabet: Alphabet | None) -> dict[str, Any]:
    """One message as plain data without None; reasoning under each name that templates read."""
    by_model = message.get("role") == "assistant"
    present = {key: value for key, value in message.items() if value is not None}
    data: dict[str, Any] = plain_data(present, _quoter(alphabet, by_model=by_model))
    reasoning = next((data[name] for name in _REASONING if name in data), None)
    if reasoning is None:
        return data
    return {"thinking": reasoning, **data, "reasoning_content": reasoning}


def _quoter(alphabet: Alphabet | None, *, by_model: bool) -> Callable[[str], str]:
    if alphabet is None:
        return _checked
    return lambda text: alphabet.quote(text, by_model=by_model)


def _checked(text: str) -> str:
    refuse_surrogates(text)
    return text


def _find_sources(folder: Path, config: Mapping[str, Any], file: Path | None) -> dict[str, str]:
    if file is not None:
        return {"default": read_text(Path(file), TokenizerError)}
    if (folder / "chat_template.jinja").is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        named = {path.stem: read_text(path, TokenizerError) for path in more}
        return named | {"default": read_text(folder / "chat_template.jinja", TokenizerError)}
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return _named_sources(template)
    raise TokenizerError("The model has no chat template; pass --chat-template FILE.")


def _named_sources(entries: list[Any]) -> dict[str, str]:
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            "The list of chat templates in tokenizer_config.json has an entry without name or "
            "template; pass --chat-template FILE."
        ) from error
