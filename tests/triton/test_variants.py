"""The start of an engine compiles few variants of each kernel, and none for an alignment alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from checkpoints import build, save_with_tokenizer

SCRIPT = Path(__file__).parent / "variants.py"
COMMON = {"kv_memory": "64MiB", "max_model_len": 512}
MOST = 36  # each takes a second or more to compile


def variants(model: str, **settings: object) -> dict[tuple[str, ...], list[list[str]]]:
    """Of each kernel with its types, constants and options, the facts of its arguments."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), model, json.dumps(COMMON | settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for line in done.stdout.splitlines():
        name, types, constants, facts, options = json.loads(line)
        found[name, str(types), str(constants), options].append(facts)
    return found


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
    found = variants(model, **settings)
    assert {"gemm", "decode_kernel", "prefill_kernel", "_sample"} <= {key[0] for key in found}
    twice = {key: facts for key, facts in found.items() if len(facts) > 1}
    assert not twice, "they differ by an address or a number of one launch"
    assert len(found) <= MOST, sorted(key[0] for key in found)
