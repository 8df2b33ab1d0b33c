"""Makes foreign text harmless for a terminal: none of its characters controls one."""

from __future__ import annotations

from weft.core.errors import short

LINE_CHARS = 500  # of a message in one line

_PICTURES = 0x2400  # U+2400 shows NUL, U+241B shows ESC, and so on
_REORDER = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {code: chr(_PICTURES + code) for code in range(32) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: "\u2421", ord("\r"): ""}
_SHOWN |= dict.fromkeys((*range(0x80, 0xA0), *_REORDER), "\ufffd")
_SHOWN |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def inert(text: str) -> str:
    """The text with signs in place of control characters, except for tabs and ends of lines.

    So escape sequences are text, nothing is overwritten, and no line reads in another order than it
    is stored.
    """
    return text.translate(_SHOWN)


def inert_line(text: object) -> str:
    """The beginning of a text in one line."""
    return short(inert(str(text)), LINE_CHARS)
