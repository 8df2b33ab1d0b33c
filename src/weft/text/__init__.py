"""Text in and out: tokeniser, chat templates, incremental detokenisation, stop strings."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.text.detokenize import Detokenizer
    from weft.text.stop import StopMatcher
    from weft.text.stream import TextStream
    from weft.text.template import ChatTemplate, encode_chat
    from weft.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "TextStream",
    "Tokenizer",
    "encode_chat",
]

_HOMES = {
    "ChatTemplate": "template",
    "Detokenizer": "detokenize",
    "StopMatcher": "stop",
    "TextStream": "stream",
    "Tokenizer": "tokenizer",
    "encode_chat": "template",
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use: the process that renders templates needs no tokeniser."""
    if name in _HOMES:
        return getattr(import_module(f"weft.text.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'weft.text' has no attribute '{name}'")
