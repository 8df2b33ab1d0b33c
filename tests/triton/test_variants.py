"""What an engine on a GPU compiles at its start and launches in a step: no more than it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from checkpoints import build, save_with_tokenizer

SCRIPT = Path(__file__).parent / "variants.py"
COMMON = {"kv_memory": "64MiB", "max_model_len": 512}
MOST = 36  # each takes a second or more to compile


def printed(model: str, settings: dict[str, object], *sizes: int) -> list[Any]:
    """What the script says, line by line."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), model, json.dumps(COMMON | settings), *map(str, sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("builtin", {}),
        ("builtin", {"quantize": "fp8", "kv_dtype": "int8", "max_num_seqs": 600}),
        ("gemma3", {"max_num_batched_tokens": 300}),
    ],
)
def test_steps_of_all_sizes_share_their_kernels(name, settings, tmp_path):
    model = name if name == "builtin" else str(save_with_tokenizer(build(name), tmp_path))
    found = defaultdict(list)
    for kernel, types, constants, facts, options in printed(model, settings):
        found[kernel, str(types), str(constants), options].append(facts)
    assert {"gemm", "decode_kernel", "prefill_kernel", "_sample"} <= {key[0] for key in found}
    twice = {key: facts for key, facts in found.items() if len(facts) > 1}
    assert not twice, "they differ by an address or a number of one launch"
    assert len(found) <= MOST, sorted(key[0] for key in found)


LAYERS = 6  # of the built-in model
FORWARD = {"_embedding": 1, "_angles": 1}
SAMPLING = {"_process_logits": 1, "_largest": 1, "_sample": 1, "_verify_drafts": 1}
TORCH = 8  # tokens in flight, the hashes, the hidden states, and those that are sampled
A_LAYER = {"_add_norm": 2, "_rotate": 1, "decode_kernel": 1, "merge_kernel": 1}
FEW = {"gemm": 3, "gated_gemm": 1}
IN_FP8 = {"_round_rows": 1, "_act_mul_round": 1}


@pytest.mark.parametrize(
    ("quantize", "rows", "more"),
    [
        ("none", 1, FEW),
        ("none", 64, FEW),
        ("none", 128, {"library": 4, "_act_mul": 1}),
        ("fp8", 1, FEW),
        ("fp8", 64, {**FEW, "_round_rows": 1}),
        ("fp8", 512, {"library": 4, **IN_FP8}),
    ],
)
def test_a_decode_step_launches_what_it_has_to(quantize, rows, more):
    """Each launch costs microseconds of a step: whoever adds one says so here."""
    settings = {"quantize": quantize, "max_num_seqs": 512}
    *_, found = printed("builtin", settings, rows)
    head = "library" if rows > 64 else "gemm"
    layers = Counter({name: LAYERS * times for name, times in (A_LAYER | more).items()})
    whole = layers + Counter(FORWARD | SAMPLING | {"torch": TORCH, "_add_norm": 1, head: 1})
    assert Counter(found) == whole
