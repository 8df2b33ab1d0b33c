"""Text in and out: tokeniser, chat templates, incremental detokenisation, stop strings."""

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
