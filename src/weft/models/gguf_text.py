"""The tokeniser, chat template and sampling defaults of a GGUF file as a model folder has them.

A file has a vocabulary, merges or scores, the kind of each token, and the name of the cut before
merges; of these are made a tokenizer.json, a tokenizer_config.json and a generation_config.json,
kept in the cache folder by what the file is known by. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from weft.core.cache_folder import cache_folder, file_stem
from weft.core.errors import TokenizerError, short
from weft.models.gguf_header import read_header
from weft.models.gguf_pre import PRE_TOKENIZERS
from weft.models.kept_weights import checkpoint_digest
from weft.models.weight_files import split_files

FORM = 1  # raised by whoever makes other documents of the same file
TOKENIZER = "tokenizer.json"
BESIDE = "put the model's tokenizer.json beside the file, or name its folder with --tokenizer"

_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # kinds of tokens; others are normal
_UNDERLINE = "\u2581"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
# Ends of turns that files do not always declare; llama.cpp goes by these spellings, too.
_ENDS = """
<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <|eom_id|> <EOT>
<|return|> <|call|> <turn|> <｜end▁of▁sentence｜>
"""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LONGEST_PIECE = 256  # characters of a token that merges are derived for


def text_folder(source: Path) -> Path:
    """The folder of a model's tokeniser, template and sampling defaults.

    Of a GGUF file it is its own folder if a tokenizer.json lies there, else one in the cache folder
    with what the metadata say, made at the first call.

    Raises:
        TokenizerError: the metadata describe no tokeniser that weft has, or nothing can be kept.
        CheckpointError: the file cannot be read.
    """
    if not source.is_file():
        return source
    if (source.parent / TOKENIZER).is_file():
        return source.parent
    name = f"{file_stem(source)}-{checkpoint_digest(source, split_files(source))}-{FORM}"
    folder = cache_folder() / "gguf" / name
    if not folder.is_dir():
        _keep(folder, documents(read_header(source, lists=True).fields, source.name))
    return folder


def _keep(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
            made = Path(part) / "files"
            made.mkdir()
            for name, document in files.items():
                text = json.dumps(document, ensure_ascii=False)
                (made / name).write_text(text, encoding="utf-8", errors="replace")
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(made, folder)
    except OSError as error:
        raise TokenizerError(
            f"The tokeniser of a GGUF file cannot be kept in '{folder.parent}': {error.strerror}; "
            f"set XDG_CACHE_HOME to a folder that can be written, or {BESIDE}."
        ) from None


def documents(fields: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a model folder, by name, that the metadata stand for.

    Args:
        fields: with all lists.
        name: of the file, for messages.

    Raises:
        TokenizerError: there is no vocabulary, or one of a kind that weft does not make.
    """
    vocabulary = _Vocabulary(fields, name)
    config = vocabulary.named() | _templates(fields)
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    generation: dict[str, Any] = {"eos_token_id": vocabulary.ends()}
    for key, stated in _SAMPLING.items():
        value = fields.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            # float32 numbers of a file, as whoever wrote them meant them
            generation[stated] = value if isinstance(value, int) else float(f"{value:.6g}")
    return {
        TOKENIZER: vocabulary.document(),
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }


def _templates(fields: Mapping[str, Any]) -> dict[str, Any]:
    key = "tokenizer.chat_template"
    found = {"default": fields[key]} if isinstance(fields.get(key), str) else {}
    others = fields.get("tokenizer.chat_templates")
    for other in others if isinstance(others, list) else ():
        if isinstance(text := fields.get(f"{key}.{other}"), str):
            found[str(other)] = text
    if found.keys() == {"default"}:
        return {"chat_template": found["default"]}
    listed = [{"name": other, "template": text} for other, text in found.items()]
    return {"chat_template": listed} if listed else {}


class _Vocabulary:
    """The tokens of a file, and what stands beside them in its metadata."""

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self._fields, self._name = fields, name
        self._model, self._pre = self._text("model"), self._text("pre")
        tokens = self._list("tokens", str)
        if not tokens:
            self._refuse("has no vocabulary")
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        kinds = self._list("token_type", int)
        self._kinds = kinds if len(kinds) >= len(tokens) else [1] * len(tokens)

    def _refuse(self, what: str) -> NoReturn:
        raise TokenizerError(f"{self._name} {what}; {BESIDE}.")

    def _text(self, key: str) -> str:
        found = self._fields.get(f"tokenizer.ggml.{key}", "")
        return found if isinstance(found, str) else ""

    def _list(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        found = self._fields.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(found, list) or not all(isinstance(entry, kind) for entry in found):
            self._refuse(f"has metadata of another form in tokenizer.ggml.{key}")
        return list(found)

    def _id(self, key: str, default: int | None = None) -> int | None:
        found = self._fields.get(f"tokenizer.ggml.{key}", default)
        return found if isinstance(found, int) and 0 <= found < len(self.tokens) else None

    def _flag(self, key: str, default: bool) -> bool:
        found = self._fields.get(f"tokenizer.ggml.{key}", default)
        return found if isinstance(found, bool) else default

    def _named_ids(self) -> dict[str, int]:
        defaults = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # of SentencePiece
        given = defaults if self._model == "llama" else {}
        found = {name: self._id(key, given.get(name)) for name, key in _NAMED.items()}
        return {name: number for name, number in found.items() if number is not None}

    def named(self) -> dict[str, str]:
        """The tokens that templates and the engine know by a name."""
        return {name: self.tokens[number] for name, number in self._named_ids().items()}

    def ends(self) -> list[int]:
        """The ids that end an answer, that of the eos token first."""
        found = [self._id(f"{key}_token_id") for key in ("eos", "eot", "eom")]
        if self._model == "llama" and found[0] is None:
            found[0] = self._id("eos_token_id", 2)
        spelled = set(_ENDS.split())
        found += [
            i
            for i, token in enumerate(self.tokens)
            if token in spelled and self._kinds[i] in (_CONTROL, _USER)
        ]
        return list(dict.fromkeys(i for i in found if i is not None))

    def document(self) -> dict[str, Any]:
        """The tokenizer.json."""
        if self._model == "gpt2":
            return self._byte_level()
        if self._model == "llama":
            return self._pieces(self._ranked_pairs(), prefix=True, bos=True)
        if self._model != "gemma4":
            self._refuse(
                f"has a tokeniser of the kind '{short(self._model)}' (tokenizer.ggml.model), "
                "where gpt2 (byte-level BPE), llama (SentencePiece) and gemma4 are supported"
            )
        return self._pieces(self._merges(), prefix=False, bos=False)

    def _byte_level(self) -> dict[str, Any]:
        pre = PRE_TOKENIZERS.get(self._pre)
        if pre is None:
            self._refuse(
                f"cuts text by the rule '{short(self._pre)}' (tokenizer.ggml.pre), which weft does "
                f"not have: it has {', '.join(PRE_TOKENIZERS)}"
            )
        flags = {"add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        return self._whole(
            {
                "normalizer": {"type": "NFC"} if pre.composed else None,
                "pre_tokenizer": pre.document(),
                "decoder": {"type": "ByteLevel", **flags},
            },
            {"unk_token": None, "byte_fallback": False, "fuse_unk": False},
            self._merges(),
            pre.bos,
            ignore_merges=pre.whole,
        )

    def _pieces(self, merges: list[list[str]], *, prefix: bool, bos: bool) -> dict[str, Any]:
        """A vocabulary of SentencePiece: spaces are underlines, unknown characters bytes."""
        blank = {"String": " "}
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": blank, "content": _UNDERLINE},
        ]
        undone: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _UNDERLINE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self._flag("add_space_prefix", prefix):
            steps.insert(0, {"type": "Prepend", "prepend": _UNDERLINE})
            undone.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return self._whole(
            {
                "normalizer": {"type": "Sequence", "normalizers": steps},
                "pre_tokenizer": None,
                "decoder": {"type": "Sequence", "decoders": undone},
            },
            {"unk_token": self.named().get("unk_token"), "byte_fallback": True, "fuse_unk": True},
            merges,
            bos,
        )

    def _whole(
        self,
        stages: Mapping[str, Any],
        model: Mapping[str, Any],
        merges: list[list[str]],
        bos: bool,
        *,
        ignore_merges: bool = False,
    ) -> dict[str, Any]:
        vocab = {self._spelled(i): i for i in range(len(self.tokens)) if not self._is_filler(i)}
        common: dict[str, Any] = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None}
        common |= {"end_of_word_suffix": None, "ignore_merges": ignore_merges}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            **stages,
            "post_processor": self._affixes(bos),
            "model": common | dict(model) | {"vocab": vocab, "merges": merges},
        }

    def _is_filler(self, number: int) -> bool:
        """Whether a token is there only to make the vocabulary as long as the embedding."""
        unused = self._kinds[number] == _UNUSED
        return unused and re.fullmatch(r"\[PAD\d+\]", self.tokens[number]) is not None

    def _is_blanks(self, number: int) -> bool:
        """Whether a token of SentencePiece is a run of spaces, which files store as such."""
        return self._model != "gpt2" and not self.tokens[number].strip(" ")

    def _spelled(self, number: int) -> str:
        token = self.tokens[number]
        return _UNDERLINE * len(token) if self._is_blanks(number) else token

    def _added(self) -> list[dict[str, Any]]:
        named = set(self._named_ids().values())
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": token, **plain, "special": kind != _USER or i in named}
            for i, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=False))
            if (kind in (_CONTROL, _USER, _UNKNOWN) or i in named) and not self._is_blanks(i)
        ]

    def _affixes(self, bos: bool) -> dict[str, Any] | None:
        named, used = self.named(), []
        single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        if self._flag("add_bos_token", bos) and "bos_token" in named:
            single.insert(0, {"SpecialToken": {"id": named["bos_token"], "type_id": 0}})
            used.append("bos_token")
        if self._flag("add_eos_token", False) and "eos_token" in named:
            single.append({"SpecialToken": {"id": named["eos_token"], "type_id": 0}})
            used.append("eos_token")
        if not used:
            return None
        ids = self._named_ids()
        tokens = {
            named[name]: {"id": named[name], "ids": [ids[name]], "tokens": [named[name]]}
            for name in used
        }
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": tokens,
        }

    def _merges(self) -> list[list[str]]:
        found = []
        for merge in self._list("merges", str):
            at = merge.find(" ", 1)  # the first half may be a space itself
            if at < 0 or at + 1 == len(merge):
                self._refuse(f"has the malformed merge '{short(merge)}'")
            found.append([merge[:at], merge[at + 1 :]])
        return found

    def _ranked_pairs(self) -> list[list[str]]:
        """The merges that scores imply: every way to make a token of two, the best score first.

        Gemma's scores do not follow its merges, but the order of its tokens does.
        """
        if isinstance(self._fields.get("tokenizer.ggml.merges"), list):
            return self._merges()
        scores = self._list("scores", (int, float))
        architecture = str(self._fields.get("general.architecture", ""))
        if len(scores) < len(self.tokens):
            self._refuse("has fewer scores than tokens")
        if architecture.startswith("gemma"):
            scores = [-float(i) for i in range(len(self.tokens))]
        whole = (_UNKNOWN, _CONTROL, _BYTE)
        places = {
            self._spelled(i): i for i in range(len(self.tokens)) if self._kinds[i] not in whole
        }
        ranked: list[tuple[float, str, str]] = []
        for token, number in places.items():
            cuts = range(1, len(token)) if len(token) <= _LONGEST_PIECE else ()
            pairs = [(token[:cut], token[cut:]) for cut in cuts]
            known = [pair for pair in pairs if pair[0] in places and pair[1] in places]
            known.sort(key=lambda pair: (places[pair[0]], places[pair[1]]))
            ranked += [(scores[number], *pair) for pair in known]
        ranked.sort(key=lambda found: (found[0], len(found[1]), len(found[2])), reverse=True)
        return [[left, right] for _, left, right in ranked]
