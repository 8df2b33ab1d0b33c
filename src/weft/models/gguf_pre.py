"""How byte-level vocabularies of GGUF files cut text, by ``tokenizer.ggml.pre``. Torch-free.

A file names the cut and does not describe it. The patterns are those of the models' own
tokenizer.json; llama.cpp's table of names (src/llama-vocab.cpp) says which models share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIXES}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut before merges.

    Attributes:
        patterns: of the pieces, each applied to what the one before has left.
        digits: each digit is a piece, before all else.
        whole: a piece that is a token needs no merges.
        bos: whether a text begins with the bos token where the file does not say.
        composed: the text is brought into Unicode's form C first.
    """

    patterns: tuple[str, ...]
    digits: bool = False
    whole: bool = False
    bos: bool = False
    composed: bool = False

    def document(self) -> dict[str, Any]:
        """The ``pre_tokenizer`` of a tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        steps += [
            {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
            for one in self.patterns
        ]
        flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        steps.append({"type": "ByteLevel", **flags})
        return {"type": "Sequence", "pretokenizers": steps}


def _rows() -> dict[str, PreTokenizer]:
    rows = [
        (
            "llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2",
            PreTokenizer((_LLAMA3,), whole=True, bos=True),
        ),
        ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
        ("qwen2", PreTokenizer((_QWEN2,), composed=True)),
        ("deepseek-r1-qwen kormo megrez hunyuan solar-open grok-2", PreTokenizer((_QWEN2,))),
        ("qwen35", PreTokenizer((_QWEN35,), composed=True)),
        ("tekken", PreTokenizer((_TEKKEN,), whole=True, bos=True)),
        ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O,))),
        ("seed-coder", PreTokenizer((_SEED,))),
        ("bailingmoe bailingmoe2", PreTokenizer((_BAILING,))),
        ("deepseek-v3 hunyuan-dense", PreTokenizer(_DEEPSEEK3)),
        ("smollm starcoder refact command-r exaone", PreTokenizer((_GPT2,), digits=True)),
        ("gpt-2 phi-2 exaone4 olmo mpt", PreTokenizer((_GPT2,))),
    ]
    return {name: row for names, row in rows for name in names.split()}


PRE_TOKENIZERS = _rows()
