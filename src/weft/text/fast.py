"""fastokens for encoding, where it is installed and gives the ids of the reference."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer as Reference

Encode = Callable[[str], list[int]]

CHARS_A_TOKEN = 8  # of the vocabulary: the reference encodes so many while fastokens loads one
_SAMPLED_TOKENS = 256
_SAMPLED_ADDED_TOKENS = 4096

_PROBES = (
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "a  b   c    d\t\te\n\n\nf \n g\r\nh\u00a0i\u2003j\u200bk",
    "\n",
    " " * 65,
    "\t" * 17 + "x",
    "0 1 12 123 1234 12345678901234567890 3.14159 1,000,000 0x7f ١٢٣ ½ ²",
    "I'm you're he'll WE'VE it's 'tis don\u2019t",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # ok?\n\n\tif a<=b&&c!=d{e->f;}',
    '<html><h1 class=\'a\'>b</h1><br/></html> {"k": [1, null, "\\u00e9"]}',
    "<|im_start|>user\n<|eot_id|><s></s>[INST] [/INST]<start_of_turn><unk><pad><0x0A>",
    "<|im_start <|im_start|| >im_end|> <s <\u200b/s>",
    "日本語のテキスト。中文，混排English和数字123。한국어 텍스트",
    "שלום عربى हिन्दी ไทย ქართული Ελληνικά Русский",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ☃️ 😀😀",
    "e\u0301 \u00e9 \ufb01 \u2126 \uff21\uff1c \u1e9b\u0323 \u0130\u0131",
    "\ufeffbom \u0000nul \u0007 \u001b[0m \u007f \u0085 \ue000 \U000f0000 \U0010fffd \ufffd",
    "\u2581\u2581 \u2581x \u0120 \u010a",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious ANTIDISESTABLISHMENTARIANISM camelCaseXMLHttp_snake",
    "!!!???...---===***///\\\\\\###@@@",
    "https://example.com/a/b?c=d&e=%20f#g user@example.com",
)


logger = logging.getLogger("weft")


class Encoder:
    """Encodes by the reference, and by fastokens once there is so much text that it pays.

    fastokens comes with the extra ``fast``. A line of the log says what encodes, once that is
    decided.

    fastokens encodes ten and more times as fast, but to load and compare it takes as long as the
    reference needs for `CHARS_A_TOKEN` characters for each token of the vocabulary, and twice the
    memory. So it is loaded, by a thread beside, once that many characters have been encoded. Safe
    to share between threads. The ids are the same, and have no special tokens added.

    Args:
        reference: changes no more.
        added: texts of the added tokens.

    Attributes:
        name: what encodes at present, "tokenizers" or "fastokens".
        reason: one sentence that says why.
    """

    def __init__(self, reference: Reference, added: Sequence[str]) -> None:
        self._reference, self._added = reference, added
        self.name, self.reason = "tokenizers", "too little text so far for fastokens to pay"
        self._encode: Encode = self._by_reference
        self._chars_left = CHARS_A_TOKEN * reference.get_vocab_size()
        self._adopting = threading.Lock()
        self._decided = False

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises TypeError or UnicodeEncodeError if it is not valid."""
        if self._chars_left > 0:
            self._chars_left -= len(text)
            if self._chars_left <= 0:
                # Not a daemon: the end of the process would catch it in native code.
                threading.Thread(target=self.decide, name="weft-fastokens").start()
        return self._encode(text)

    def decide(self) -> None:
        """Load fastokens and choose, unless that has been done; returns when it is."""
        with self._adopting:
            if self._decided:
                return
            fast, self.reason = adopt_fastokens(self._reference, self._added)
            if fast is not None:
                self._encode, self.name = fast, "fastokens"
            self._decided, self._chars_left = True, 0
            logger.info("Text is encoded by %s: %s.", self.name, self.reason)

    def _by_reference(self, text: str) -> list[int]:
        return list(self._reference.encode(text, add_special_tokens=False).ids)


def adopt_fastokens(reference: Reference, added: Sequence[str]) -> tuple[Encode | None, str]:
    """Return fastokens' encoder if it agrees with ``reference`` on every probe, and a reason.

    The probes are fixed strings, added tokens between ordinary text (all unless there are very
    many), and tokens sampled over the whole vocabulary. They also warm fastokens up. The encoder
    adds no special tokens.
    """
    try:
        import fastokens
    except ModuleNotFoundError:
        return None, "fastokens is not installed; pip install 'weft[fast]' brings it"
    except ImportError as error:
        return None, f"fastokens does not load: {_first_line(error)}"
    try:
        fast = fastokens.Tokenizer.from_json_str(reference.to_str())
        for probe in _probes(reference, added):
            expected = reference.encode(probe, add_special_tokens=False).ids
            if fast.encode(probe).ids != expected:
                return None, f"fastokens encodes {probe[:40]!r} differently"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        return None, f"fastokens cannot read this tokeniser: {_first_line(error)}"
    return lambda text: list(
        fast.encode(text).ids
    ), "fastokens agrees with tokenizers on all probes"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _probes(reference: Reference, added: Sequence[str]) -> Iterator[str]:
    yield from _PROBES
    yield "".join(_PROBES)
    added = added[:: 1 + len(added) // _SAMPLED_ADDED_TOKENS]
    for start in range(0, len(added), 64):
        group = added[start : start + 64]
        yield "".join(group)
        yield "".join(f"word {content} \n {content}{content[:-1]}x" for content in group)
    size = reference.get_vocab_size(with_added_tokens=False)
    step = max(1, size // _SAMPLED_TOKENS)
    words = [reference.decode([i]) for i in range(0, size, step)]
    yield "".join(words)
    yield " ".join(words)
