"""The byte-level BPE tokenizer, its special tokens and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from builtin.chat import Chat

BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SPECIAL = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", END)

# The split expression of Llama 3.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    # Functions, after the system message if there is one. The model has never seen any.
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] | trim + '\\n\\n' }}"
    "{% endif %}"
    "{{ 'Functions that you may call:' }}"
    "{% for tool in tools %}{{ '\\n' + (tool['function'] | tojson) }}{% endfor %}"
    '{{ \'\\nCall one: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|end|>\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\\n' + message['content'] | trim + '\\n</tool_response><|end|>' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) }}"
    "{{ ', \"arguments\": ' + (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A BPE of exactly `vocab` tokens, the special ones first (ids 0 to 6)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == vocab
    bos = token_id(tokenizer, BOS)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bos)]
            ),
        ]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def encode_plain(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids without bos; `texts` must not contain special tokens."""
    for text in texts:
        assert not any(token in text for token in SPECIAL)
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def chat_text(chat: Chat) -> str:
    """What `CHAT_TEMPLATE` makes of a chat, less bos."""
    return "".join(f"<|{role}|>{content.strip()}{END}" for role, content in chat)


def tokenizer_config(max_positions: int) -> dict[str, Any]:
    """The `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIAL[3:]),
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The `generation_config.json`: a document ends with eos, a chat turn with end."""
    return {
        "bos_token_id": token_id(tokenizer, BOS),
        "eos_token_id": [token_id(tokenizer, EOS), token_id(tokenizer, END)],
        "pad_token_id": token_id(tokenizer, PAD),
        "do_sample": True,
        "temperature": 0.7,
    }


def write_json(path: Path, value: object) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
