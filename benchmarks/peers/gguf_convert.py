"""Converts a checkpoint to GGUF with llama.cpp's own script.

    python gguf_convert.py LLAMACPP CHECKPOINT OUTPUT TYPE

The tokeniser of the checkpoints is trained here, so its checksum is unknown to the script; it is
declared as the one whose pattern it has.
"""

from __future__ import annotations

import runpy
import sys

source, folder, output, kind = sys.argv[1:5]
sys.path[:0] = [source, f"{source}/gguf-py"]

import conversion.base  # noqa: E402 - from llama.cpp

for found in vars(conversion.base).values():
    if isinstance(found, type) and "get_vocab_base_pre" in vars(found):
        found.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"  # noqa: ARG005

script = f"{source}/convert_hf_to_gguf.py"
sys.argv = [script, folder, "--outfile", output, "--outtype", kind]
runpy.run_path(script, run_name="__main__")
